"""Trackers of runs: services and files that show the curves of metrics.jsonl."""
