"""A first recipe for a model, data and GPUs: the columns read, the size planned, every choice
commented.
"""
