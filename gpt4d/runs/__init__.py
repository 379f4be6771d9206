"""Runs as their files describe them: the lock of a run directory, history, state, tables and plots. No torch here."""
