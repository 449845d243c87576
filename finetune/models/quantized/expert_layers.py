"""Layers of experts whose frozen weights, [experts, rows, columns], are kept in 4 or 8 bits.

The weights of all experts of a layer are dequantized together, and the factors of their adapters added; then
transformers' own function computes with them. None of that is kept for the backward, which does it again.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune.config.schema import Quantization
from finetune.models.moe.experts import add_factors, compute_experts, take_over_adapters
from finetune.models.quantized.linear import CODES, SCALES, QuantizedWeight, weights_of


def quantize_experts(
    model: nn.Module,
    experts: nn.Module,
    quantization: Quantization,
    dtype: torch.dtype,
    checkpointed: Container[nn.Module],
) -> list[str]:
    """Puts quantized weights, in `dtype`, into `experts`, a layer of `model` on meta; returns their parameters' names.

    `checkpointed`: the modules whose activations are recomputed anyway.
    """
    names = []
    for name, parameter in weights_of(experts).items():
        if parameter.requires_grad:  # modules_to_save
            continue
        delattr(experts, name)
        setattr(experts, name, QuantizedWeight(tuple(parameter.shape), quantization, dtype))
        names += [f"{name}.{CODES}", f"{name}.{SCALES}"]
    if names:
        adapters = take_over_adapters(model, experts)
        experts.forward = _QuantizedExperts(experts, adapters, is_recomputed=experts in checkpointed).forward
    return names


class _QuantizedExperts:
    """What `module`, a layer of experts with quantized weights and peft's `adapters`, computes."""

    def __init__(self, module: nn.Module, adapters: Sequence[Any], *, is_recomputed: bool) -> None:
        self.module, self.adapters, self.is_recomputed = module, adapters, is_recomputed

    def forward(self, *inputs: Any) -> Any:
        if self.is_recomputed or not torch.is_grad_enabled():
            return self.compute(*inputs)
        return checkpoint(self.compute, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random

    def compute(self, *inputs: Any) -> Any:
        weights: dict[str, Tensor] = dict(self.module.named_parameters(recurse=False))
        for name, weight in self.module.named_children():
            if isinstance(weight, QuantizedWeight):
                weights[name] = weight.dequantize(weight.dtype)
        add_factors(weights, self.adapters)
        experts: int = self.module.num_experts  # type: ignore[assignment]
        return compute_experts(self.module, weights, experts, *inputs)
