"""Completions that the model in training samples, their rewards, and the batches made from them."""
