"""What tensor parallelism asks of a recipe, of a model's sizes and of the rest of the layout. Imports no torch."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding

# The families (model_type) that are divided. Of some, transformers' plan gathers products of attention, whose heads then need not
# be divided.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "smollm3")
GATHERED_FAMILIES = ("olmo2", "phi3")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_bf16_moments", "sgd")


def check_tensor_parallel_recipe(recipe: Recipe, sharding: "Sharding") -> None:
    """Raises `UserError` for what a recipe asks beside tensor parallelism and does not work with it."""
    if sharding.tensor_parallel_size == 1:
        return
    problems = [
        f"{sharding.source}: tp_size {sharding.tensor_parallel_size}: {sentence}"
        for sentence in _find_problems(recipe, sharding)
    ]
    if problems:
        raise UserError.of(problems)


def _find_problems(recipe: Recipe, sharding: "Sharding") -> Iterator[str]:
    model, optim = recipe.model, recipe.optimization.optim
    if sharding.mixed_precision == "fp16":
        yield "mixed_precision: fp16 does not work with tensor parallelism; set it to bf16, or tp_size: 1"
    if sharding.fp8 is not None:
        yield "mixed_precision: fp8 does not work with tensor parallelism; set it to bf16, or tp_size: 1"
    if sharding.wrapping != "TRANSFORMER_BASED_WRAP":
        yield f"fsdp_auto_wrap_policy: {sharding.wrapping} does not work with it; set TRANSFORMER_BASED_WRAP, or tp_size: 1"
    if optim not in OPTIMIZERS:
        yield f"optim: {optim} does not work with tensor parallelism; choose one of {', '.join(OPTIMIZERS)}"
    if model.attn_implementation != "auto":
        yield f"attn_implementation: {model.attn_implementation} does not work with it; leave the key out"
    if model.activation_checkpointing_keeps == "attention_and_projections":
        yield (
            "activation_checkpointing_keeps: attention_and_projections finds its products by their sizes, of which each rank has "
            "a part; set it to attention"
        )
    if recipe.optimization.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha does not work with tensor parallelism; leave the key out"
    if recipe.quantization.bits is not None:
        yield f"load_in_{recipe.quantization.bits}bit: a quantized base cannot be divided; leave the key out, or set tp_size: 1"
    if recipe.method.method == "distill":
        yield "method: distill does not work with tensor parallelism; set tp_size: 1"
    switches = {
        "use_dora": recipe.lora.use_dora,
        "torch_compile": model.torch_compile,
        "use_liger_kernel": model.use_liger_kernel,
    }
    for key, is_on in switches.items():
        if is_on:
            yield f"{key}: true does not work with tensor parallelism; set {key}: false, or tp_size: 1"


def check_divisible(model_type: str, sizes: dict[str, Any], sharding: "Sharding", name: str, optim: str = "") -> None:
    """Raises `UserError` where a model of this family and these sizes cannot be divided over a tensor parallel group.

    `sizes`: num_attention_heads, num_key_value_heads, head_dim, intermediate_size and vocab_size, as in config.json.
    """
    ranks, where = sharding.tensor_parallel_size, f"{sharding.source}: tp_size {sharding.tensor_parallel_size}"
    if ranks == 1:
        return
    if model_type not in (*FAMILIES, *GATHERED_FAMILIES):
        raise UserError(
            f"{where}: tensor parallelism does not divide {name}, a {model_type} model, but only "
            f"{', '.join((*FAMILIES, *GATHERED_FAMILIES))}; set tp_size: 1"
        )
    heads, key_value_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    divided = {"intermediate_size": sizes["intermediate_size"]}
    if model_type in GATHERED_FAMILIES:
        divided["num_attention_heads x head_dim"] = heads * sizes["head_dim"]
        divided["num_key_value_heads x head_dim"] = key_value_heads * sizes["head_dim"]
    else:
        divided |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    uneven = [
        f"{key} {size}, and {size} / {ranks} leaves a rest of {size % ranks}"
        for key, size in divided.items()
        if size % ranks
    ]
    if uneven:
        common = math.gcd(*divided.values())
        sizes_that_fit = ", ".join(str(size) for size in range(1, ranks) if common % size == 0)
        raise UserError(f"{where}: {name} has {'; '.join(uneven)}; set tp_size to one of {sizes_that_fit}")
    rows = sizes["vocab_size"]
    largest = -(-rows // ranks)
    if (ranks - 1) * largest >= rows:
        raise UserError(f"{where}: {name} has vocab_size {rows}, too few rows for {ranks} ranks; set a smaller tp_size")
    if rows % ranks and optim == "adamw_bf16_moments":
        raise UserError(
            f"{where}: optim: adamw_bf16_moments rounds the moments of equal shards alike, and {name} has vocab_size {rows}, "
            f"which {ranks} ranks divide unevenly; set optim: adamw_torch_fused"
        )
