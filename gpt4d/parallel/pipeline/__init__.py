"""Schedules of pipeline stages as plain values. A single stage also has a schedule."""
