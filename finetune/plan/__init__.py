"""What a run will need, worked out on paper: memory by phase, disk, and time, from the configs alone.

No torch and no weights here: a plan answers in under two seconds on any machine. The numbers are checked against real
tensors, traced activations and, on a GPU, the allocator's own peak (tests/plan, benchmarks/gpu.py).
"""
