"""What a run will need, calculated from its configs alone: memory by phase, disk, and time.

A plan needs no weights. For a model that the table of families describes, it needs no torch either,
and takes less than two seconds on any machine. The numbers are tested against real tensors, traced
activations and, on a GPU, the allocator's own peak (tests/plan, benchmarks/gpu.py).
"""

from finetune import make_callable

make_callable(__name__, "make_plan")
