"""Metrics of a loader: counters, diagnosis, timeline, report and progress bar."""
