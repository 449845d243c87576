"""Layers of experts whose frozen weights, [experts, rows, columns], are kept in 4 or 8 bits.

The weights of all experts of a layer are dequantized together; then transformers' own function computes with them, or
ours where they have adapters. None of that is kept for the backward, which does it again.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune.config.schema import Quantization
from finetune.distributed.parallelize import local_part
from finetune.models.moe.experts import compute_experts, find_factors, take_over_adapters
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
        weight = QuantizedWeight(tuple(parameter.shape), quantization, dtype)
        weight.keeps_dequantized = experts in checkpointed
        setattr(experts, name, weight)
        names += [f"{name}.{CODES}", f"{name}.{SCALES}"]
    if names:
        experts.forward = _QuantizedExperts(experts, take_over_adapters(model, experts)).forward
    return names


def quantized_children(experts: nn.Module) -> dict[str, QuantizedWeight]:
    """The weights of `experts` that are quantized, by name."""
    return {name: each for name, each in experts.named_children() if isinstance(each, QuantizedWeight)}


def expert_weights(experts: nn.Module) -> dict[str, Tensor]:
    """The parameters of `experts` as this rank has them, those that are quantized dequantized."""
    weights = {name: local_part(parameter) for name, parameter in experts.named_parameters(recurse=False)}
    return weights | {name: each.dequantize(each.dtype) for name, each in quantized_children(experts).items()}


def recompute_dequantized(experts: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """What `compute` returns. A backward dequantizes weights of `experts` again, so that nothing is kept."""
    weights = quantized_children(experts).values()
    if not torch.is_grad_enabled() or all(weight.keeps_dequantized for weight in weights):
        return compute(*inputs)
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random


class _QuantizedExperts:
    """What `module`, a layer of experts with quantized weights and peft's `adapters`, computes."""

    def __init__(self, module: nn.Module, adapters: Sequence[Any]) -> None:
        self.module, self.adapters = module, adapters

    def forward(self, *inputs: Any) -> Any:
        return recompute_dequantized(self.module, self.compute, *inputs)

    def compute(self, *inputs: Any) -> Any:
        weights = expert_weights(self.module)
        experts: int = self.module.num_experts  # type: ignore[assignment]
        return compute_experts(self.module, weights, experts, *inputs, factors=find_factors(self.adapters))
