"""Schedules of pipeline stages as plain values, their simulation and their execution."""
