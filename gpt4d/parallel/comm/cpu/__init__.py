"""Transports between ranks that compute on CPUs: gloo, shared memory of a host, and both for several hosts."""
