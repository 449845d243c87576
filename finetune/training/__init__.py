"""The loop, and what is looked at on the way."""
