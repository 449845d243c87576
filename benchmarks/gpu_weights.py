"""The weights that every contestant of `gpu.py` starts with: random, and a function of a
parameter's name and shape alone.
"""

import zlib
from collections.abc import Sequence
from typing import Any


def random_weight(name: str, shape: Sequence[int], device: Any) -> Any:
    """float32 of `shape`: ones for a norm; else normal with a variance of 1 / columns, so that
    logits are of the order of 1 in a model of any size, and another weight or token gives another
    loss.

    name: transformers' for the parameter.
    """
    import torch

    if "norm" in name:
        return torch.ones(*shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator, device=device).mul_(shape[-1] ** -0.5)


def fill(model: Any) -> None:
    """Gives every parameter of a transformers model its weight."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weight(name, parameter.shape, parameter.device))
