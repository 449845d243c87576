"""Distributed training: the ranks, and the layouts FSDP2, FSDP1, DDP and single.

Only this package uses Accelerate's state, environment and plugins.
"""
