"""Fewer, larger kernels: the decoder layers compiled, or Liger's kernels in them. Both leave names and weights alone."""

from typing import Any

import torch
from torch import nn

from finetune.errors import UserError


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compiles the inside of every decoder layer (regional compilation); returns how many.

    Only `forward`, not the module's call: sharding's and checkpointing's hooks stay outside, and the layers, which are
    alike, share one compiled body. Sizes are symbols, since packed rows differ in length.
    """
    layers = decoder_layers(model)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    return len(layers)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself would not split over devices."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in classes]


def use_liger_kernels(model: Any, device: torch.device) -> None:
    """Puts Liger's norms, rotary embeddings and MLPs into `model`. The loss stays ours, which is chunked alike.

    UserError where there is no GPU, no liger-kernel package, or no kernels of Liger's for this model.
    """
    if device.type != "cuda":
        raise UserError("use_liger_kernel: Liger's kernels run on CUDA only, and this is a CPU run; leave the key out")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        raise UserError("use_liger_kernel: needs Liger; pip install liger-kernel, or leave the key out") from None
    family = model.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"use_liger_kernel: Liger has no kernels for {family}; leave the key out")
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
