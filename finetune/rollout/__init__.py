"""Completions that the model in training samples, what they are worth, and the batches that are
made of them.
"""
