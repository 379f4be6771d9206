"""The training loop, what it alone uses, and what starts it: dry runs and sweeps."""
