"""What is done to decoder layers: activation checkpointing, torch.compile, Liger's kernels. Parameters keep their names."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from finetune.compiler import configure_compiler
from finetune.distributed.parallelize import decoder_layers
from finetune.models.activation_offload import ActivationOffload, Contexts
from finetune.models.head.chunks import compute_fused_chunk
from finetune.models.moe.experts import expert_modules

Kept = Literal["nothing", "attention", "attention_and_projections"]


def checkpoint_activations(
    model: nn.Module, every: int, keeps: Kept = "nothing", offload: ActivationOffload | None = None
) -> int:
    """Recomputes the activations of every `every`-th decoder layer in backward (Chen et al. 2016); returns how many.

    What `keeps` names is kept with the layer's input (selective checkpointing, Korthikanti et al. 2022, section 5), in host
    memory if there is an `offload`.

    By transformers' own checkpointing, not the FSDP plugin's, which drops the RNG state, so that its gradients are wrong
    with dropout (relative error 0.5), and renames modules under LoRA, so that the saved adapter is empty.
    """
    transformer: Any = model
    # Renamed in transformers 5.23; the older name goes in 6.
    enable = getattr(transformer, "activation_checkpointing_enable", None) or transformer.gradient_checkpointing_enable
    contexts = {} if keeps == "nothing" else {"context_fn": partial(_make_contexts, model.config, keeps, offload)}
    enable({"use_reentrant": False, **contexts})
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing") and _is_layer(module)]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]
        if offload is not None:
            layer._gradient_checkpointing_func = offload.wrap(layer._gradient_checkpointing_func)  # type: ignore
    return sum(bool(layer.gradient_checkpointing) for layer in layers)


@cache
def _attention_operators() -> frozenset[Any]:
    """The kernels that attention may choose: torch's varlen one, and those of its scaled dot product."""
    aten = torch.ops.aten
    return frozenset(
        [
            torch.ops.torch_attn._varlen_attn.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        ]
    )


def _make_contexts(config: Any, keeps: Kept, offload: ActivationOffload | None) -> Contexts:
    """The contexts in which torch runs a checkpointed layer, and runs it again."""
    policy = _make_policy(_attention_width(config.get_text_config()) if keeps == "attention_and_projections" else 0)
    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts if offload is None else offload.wrap_contexts(contexts)


def _attention_width(config: Any) -> int:
    """The widest state round attention: the hidden state, or all of its heads."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(int(config.hidden_size), int(config.num_attention_heads) * size)


def _make_policy(width: int) -> Callable[..., CheckpointPolicy]:
    """Keeps the outputs of attention's kernels, and of products from and to at most `width` features: the MLP's are wider."""

    def choose(_context: object, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        is_kept = operator in _attention_operators()
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            is_kept = max(arguments[-2].shape[-1], arguments[-1].shape[-1]) <= width
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def _is_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compiles the forward of every decoder layer (regional compilation) of a sharded model, and a chunk of its loss; returns how
    many layers.

    Only `forward`, not the module's call: sharding's hooks stay outside, and the layers, which are alike, share one
    compiled body. After sharding, because FSDP2 changes a layer's class: the forward compiled before would be the old
    class's, and transformers checkpoints a layer's activations in the forward of its own class only.
    Sizes are symbols, since packed rows differ in length.
    """
    configure_compiler()
    layers = decoder_layers(model)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    model.get_input_embeddings().register_forward_hook(_match_grad_mode)  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.chunk_function = torch.compile(compute_fused_chunk, dynamic=True, backend=backend)
    return len(layers)


def _match_grad_mode(_module: nn.Module, _inputs: object, embedded: torch.Tensor) -> torch.Tensor:
    """Makes the first layer's input require a gradient exactly when those of the other layers do: a frozen embedding's
    output (LoRA) does not, which would compile the first layer by itself."""
    return embedded.requires_grad_(torch.is_grad_enabled())


def use_liger_kernels(model: Any) -> None:
    """Puts Liger's norms, rotary embeddings and MLPs into `model`. The loss stays ours, which is chunked as well.

    A mixture keeps its MLPs: Liger's would replace the grouped products of its experts.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    off = ["fused_linear_cross_entropy", "cross_entropy", *(("swiglu", "geglu") if expert_modules(model) else ())]
    _apply_liger_kernel_to_instance(model, **dict.fromkeys(off, False))
