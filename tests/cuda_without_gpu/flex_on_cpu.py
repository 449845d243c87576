"""flex_attention on a CPU, so that the branch that CUDA takes runs, differentiates and compiles here.

torch refuses gradients there, since its compiler has no such kernel for a CPU; without one, what a graph says is computed by torch's own
definition of flex_attention and of its backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.nn.attention import flex_attention

from finetune.models import attention_kernels as block_attention


def patch_flex(patch: pytest.MonkeyPatch, backend: str | Callable[..., Any] | None = None) -> None:
    """Makes layers that need masks of blocks compute by them, compiled by `backend`; None: by torch's definition at once."""
    patch.setattr(block_attention, "has_kernel", lambda _: True)
    patch.setattr(block_attention, "LARGEST_HEAD_BYTES", 4096)  # on a CPU attention is computed in fp32
    patch.setattr(flex_attention, "_validate_device", lambda *_: None)
    if backend is None:
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(block_attention, "_compile_attention", lambda: block_attention._attend_by_flex)
    else:
        patch.setattr(
            block_attention,
            "_compile_attention",
            partial(block_attention._compile_attention, backend),
        )
