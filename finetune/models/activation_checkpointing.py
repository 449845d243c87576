"""Activation checkpointing: backward recomputes a layer's activations instead of keeping them (Chen et al. 2016)."""

from typing import Any

from torch import nn


def checkpoint_activations(model: nn.Module, every: int) -> int:
    """Turns on transformers' own checkpointing for every `every`-th decoder layer; returns the number of those layers.

    Not the FSDP plugin's, which drops the RNG state, so that its gradients are wrong with dropout (relative error 0.5),
    and renames modules under LoRA, so that the saved adapter is empty.
    """
    transformer: Any = model
    # Renamed in transformers 5.23; the older name goes in 6.
    enable = getattr(transformer, "activation_checkpointing_enable", None) or transformer.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing") and _is_layer(module)]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]
    return sum(bool(layer.gradient_checkpointing) for layer in layers)


def _is_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)
