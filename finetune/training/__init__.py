"""Training: one optimizer step, the loop around it, and how a run starts, evaluates, stops and
ends.
"""
