"""Jobs for the plan's tests: real architectures by their published sizes, and recipes made in place."""

from typing import Any

from finetune.distributed.sharding import Sharding
from finetune.plan.architecture import read_architecture
from finetune.plan.run_spec import RunSpec
from finetune.recipe.schema import Batch, Data, Lora, Model, Optimization, Recipe

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
FULL_SHARD = Sharding(layout="fsdp2", mixed_precision="bf16", activation_checkpointing=True)


def recipe(*, lora: bool = False, max_length: int = 8192, rows: int = 1, **batch: Any) -> Recipe:
    return Recipe(
        path="recipe.yaml",
        given=frozenset(),
        model=Model(),
        lora=Lora(use_peft=lora),
        data=Data(max_length=max_length),
        batch=Batch(per_device_train_batch_size=rows, **batch),
        optimization=Optimization(),
    )


def make_spec(config: dict[str, Any], *, ranks: int, sharding: Sharding = FULL_SHARD, **keys: Any) -> RunSpec:
    return RunSpec(
        architecture=read_architecture(config, "config.json"), recipe=recipe(**keys), sharding=sharding, ranks=ranks
    )
