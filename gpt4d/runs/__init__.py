"""Inspection of runs by their files: the lock of a run directory, history, state, tables and plots. No torch here."""
