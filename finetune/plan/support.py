"""Whether a planned run is one that could be started: the refusals that it would end with, on what a plan knows."""

from finetune.distributed.fp8 import refuse_unmultiplied
from finetune.distributed.sharding import refuse_impossible
from finetune.errors import UserError
from finetune.plan.run_spec import RunSpec
from finetune.recipe.expert_division import refuse_undivided, with_expert_parallelism
from finetune.recipe.lora_schema import check_lora_layout
from finetune.recipe.memory_keys import check_memory_keys, refuse_unsuited_keys
from finetune.recipe.method_schema import refuse_layout
from finetune.recipe.optim_offload import check_offload_layout
from finetune.recipe.quantization import check_quantization, refuse_quantized_experts
from finetune.recipe.reader import list_contradictions
from finetune.recipe.sequence_division import refuse_undivided_attention
from finetune.recipe.tensor_division import check_divisible, check_tensor_parallel_recipe


def refuse_unsupported(spec: RunSpec) -> None:
    """Raises `UserError` where the layout, the number of ranks, the recipe and the model do not go together."""
    recipe, sharding, a = spec.recipe, spec.sharding, spec.architecture
    name, experts = recipe.model.model_name_or_path or "model_config", a.mixture.experts if a.mixture is not None else 0
    refuse_impossible(sharding, spec.ranks)
    refuse_layout(recipe.method.method, sharding)
    if sharding.layout == "fsdp1" or sharding.fp8 is not None:  # elsewhere a plan needs no bitsandbytes
        check_quantization(recipe.quantization, sharding)
    refuse_quantized_experts(recipe.quantization, a.model_type, experts, name)
    check_lora_layout(recipe.lora, sharding)
    check_tensor_parallel_recipe(recipe, sharding)
    with_expert_parallelism(sharding, recipe, spec.ranks)
    check_memory_keys(recipe, sharding, spec.ranks)
    refuse_unsuited_keys(recipe.model, recipe.lora, experts, name)
    check_offload_layout(recipe.optimization, sharding)
    refuse_undivided(sharding, a.model_type, experts, name, spec.ranks)
    sizes = {
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.key_value_heads,
        "head_dim": a.head_size,
        "intermediate_size": a.intermediate,
        "vocab_size": a.vocabulary,
    }
    check_divisible(a.model_type, sizes, sharding, name, recipe.optimization.optim)
    refuse_undivided_attention(a.model_type, a.heads, recipe.model.attn_implementation, sharding)
    if sharding.fp8 is not None:
        refuse_unmultiplied(sharding, a.model_type, a.mixture is not None, len(spec.fp8_weights))


def is_supported(changed: RunSpec, asked: RunSpec) -> bool:
    """Whether the run `asked` for could be started as it has been `changed`."""
    try:
        refuse_unsupported(changed)
    except UserError:
        return False
    return list_contradictions(changed.recipe) <= list_contradictions(asked.recipe)
