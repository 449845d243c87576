"""What the device itself gives, in the same run: matrix products and attention in bf16, with
nothing round them.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_cases import Result

NAME = "the device itself"
BACKWARD = 2.5  # times the forward's operations: FlashAttention computes the scores again


def measure_device(smoke: bool) -> Result:
    """FLOP per second of a square product, and of causal attention forward and backward over one
    long document.
    """
    import torch
    import torch.nn.functional as F

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, tokens, heads, head_size = (256, 256, 4, 64) if smoke else (8192, 8192, 32, 128)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    states = [
        torch.randn(
            1, heads, tokens, head_size, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        for _ in range(3)
    ]

    def attend() -> None:
        F.scaled_dot_product_attention(*states, is_causal=True).sum().backward()

    product = _median_seconds(lambda: left @ right, device)
    attention = _median_seconds(attend, device)
    forward = 4 * tokens**2 * heads * head_size / 2  # half of the scores are masked
    return Result(
        NAME,
        "torch",
        gemm_flop_per_second=2 * size**3 / product,
        attention_flop_per_second=(1 + BACKWARD) * forward / attention,
    )


def _median_seconds(run: Callable[[], Any], device: Any, repeats: int = 20) -> float:
    """Of one call, after as many without a clock."""
    import torch

    seconds = []
    for _ in range(2 * repeats):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[repeats:])
