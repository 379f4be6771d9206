"""Schedules of pipeline stages as plain values. A single stage has a schedule too."""
