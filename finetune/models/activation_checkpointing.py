"""Activation checkpointing: a layer's inside is computed again in backward instead of kept (Chen et al. 2016)."""

from typing import Any

from torch import nn


def checkpoint_activations(model: nn.Module, every: int) -> int:
    """Turns on the model's own checkpointing for every `every`-th decoder layer; returns how many layers that is.

    Not the FSDP plugin's: that drops the RNG state, so with dropout its gradients are wrong (relative error 0.5), and
    under LoRA it renames the modules, so that the saved adapter is empty.
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
