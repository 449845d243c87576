"""A recipe's model on the ranks, ready to train."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.constants import frozen_dtype
from finetune.distributed.parallelize import Values, parallelize, unwrap
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.activation_checkpointing import checkpoint_activations
from finetune.models.attention import install as install_attention
from finetune.models.build import build_on_meta, load_config, weights_folder
from finetune.models.compile import compile_layers, use_liger_kernels
from finetune.models.lora import add_adapters
from finetune.models.loss import install_loss
from finetune.models.weights import (
    is_adapter,
    load_buffers,
    seeded_values,
    stored_values,
    with_adapters,
)
from finetune.recipe.schema import Lora, Model
from finetune.safetensors_io.tensors import read_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters of the whole model, over all ranks. Counted before sharding: afterwards FSDP1 shows pieces only."""

    total: int
    trained: int
    multiplied: int  # those that a token is multiplied with: without an untied input embedding


def load_model(model: Model, lora: Lora, seed: int, vocabulary: int, world: World) -> tuple[nn.Module, Size]:
    """Builds the model on meta, adapts it, spreads it over the ranks, and reads every rank's own slices.

    `vocabulary`: the tokenizer's size, which the embedding must hold. Raises `UserError` for a model that cannot be
    had, or whose files do not fit its config, before anything is trained.
    """
    config = load_config(model)
    refuse_unfit(config, model, vocabulary)
    built = build_on_meta(config, DTYPES[model.dtype], model.trust_remote_code)
    values = _base_values(built, config, model, seed)
    install_attention(built, model.attn_implementation)
    install_loss(built)
    if model.use_liger_kernel:
        use_liger_kernels(built, world.device)
    if lora.use_peft:
        add_adapters(built, lora, DTYPES[frozen_dtype(world.sharding, lora)])
        values = with_adapters(
            values, {name: p.shape for name, p in built.named_parameters() if is_adapter(name)}, seed
        )
    if world.sharding.activation_checkpointing:
        checkpoint_activations(built, model.activation_checkpointing_every)
    size = size_of(built)
    sharded = parallelize(built, values, world)
    if model.torch_compile:
        compile_layers(unwrap(sharded))
    return sharded, size


def size_of(model: Any) -> Size:
    """The parameters of an unsharded model, tied ones once."""
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Size(
        total=total,
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        multiplied=total if embedding is head else total - embedding.numel(),
    )


def refuse_unfit(config: Any, model: Model, vocabulary: int) -> None:
    """Raises `UserError` for a config that this project cannot train."""
    name = model.model_name_or_path or "model_config"
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{name}: its weights are quantized; name the unquantized model")
    if any(getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise UserError(f"{name}: {config.model_type} is a mixture of experts; only dense models are trained here")
    if vocabulary > config.vocab_size:
        raise UserError(
            f"{name}: its embedding has {config.vocab_size} rows, but the tokenizer has {vocabulary} tokens; "
            "use the model's own tokenizer, or set vocab_size in model_config"
        )


def _base_values(built: nn.Module, config: Any, model: Model, seed: int) -> Values:
    if model.model_config is not None:
        return seeded_values(lambda: build_on_meta(config, torch.float32, model.trust_remote_code), seed)
    folder: Path = weights_folder(model)
    stored = read_folder(folder)
    values = stored_values(built, stored, str(folder))
    load_buffers(built, stored)
    return values
