"""Training: one optimizer step, the loop round it, and how a run starts, evaluates, stops and ends."""
