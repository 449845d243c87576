"""What a run prints and logs: metrics and experiment trackers."""
