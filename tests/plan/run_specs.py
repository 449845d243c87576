"""Jobs for the plan's tests: real architectures by their published sizes, and recipes made in place."""

from typing import Any

from finetune.config.layout import Sharding
from finetune.config.schema import Batch, Data, Lora, Model, Optimization, Recipe
from finetune.plan.architecture import read_architecture
from finetune.plan.run_spec import RunSpec

LLAMA_31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_31_70B = LLAMA_31_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_235B = {  # 235B-A22B
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
FULL_SHARD = Sharding(layout="fsdp2", mixed_precision="bf16", activation_checkpointing=True)


def recipe(*, lora: bool = False, max_length: int = 8192, rows: int = 1, **batch: Any) -> Recipe:
    return Recipe(
        path="recipe.yaml",
        model=Model(),
        lora=Lora(use_peft=lora),
        data=Data(max_length=max_length),
        batch=Batch(per_device_train_batch_size=rows, **batch),
        optimization=Optimization(),
    )


def make_spec(
    config: dict[str, Any], *, ranks: int, sharding: Sharding = FULL_SHARD, **keys: Any
) -> RunSpec:
    return RunSpec(
        architecture=read_architecture(config, "config.json"),
        recipe=recipe(**keys),
        sharding=sharding,
        ranks=ranks,
    )
