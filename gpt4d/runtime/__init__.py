"""The lifetime of a process: launcher, rendezvous, watchdog, preflight checks, signals and errors."""
