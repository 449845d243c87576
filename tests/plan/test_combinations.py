"""The table in docs/layouts.md of what works with which layout is what the checks before a run accept."""

from dataclasses import replace
from pathlib import Path

import pytest

from finetune.config.layout import Fp8, Sharding
from finetune.config.schema import (
    Batch,
    Data,
    Lora,
    Method,
    Model,
    Optimization,
    Quantization,
    QuantizationAware,
    Recipe,
)
from finetune.errors import UserError
from finetune.plan.plan import make_plan
from tests.ranks import ROOT

RANKS = 4
DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
FSDP2 = Sharding(layout="fsdp2", mixed_precision="bf16", activation_checkpointing=True)
LAYOUTS = {
    "DDP": replace(FSDP2, layout="ddp"),
    "FSDP1": replace(FSDP2, layout="fsdp1"),
    "FSDP2": FSDP2,
    "hybrid": replace(FSDP2, strategy="HYBRID_SHARD", replicate_size=2, shard_size=2),
    "CPU offload": replace(FSDP2, cpu_offload=True),
    "`tp_size`": replace(FSDP2, tensor_parallel_size=2, shard_size=2),
    "`cp_size`": replace(FSDP2, sequence_parallel_size=2, shard_size=2),
    "experts": FSDP2,
    "stages": FSDP2,
}
PLAIN = Recipe(
    path="recipe.yaml",
    model=Model(model_config=DENSE),
    data=Data(max_length=64),
    batch=Batch(per_device_train_batch_size=1),
)
PEFT = Lora(use_peft=True)
TECHNIQUES: dict[str, Recipe] = {
    "every parameter trained": PLAIN,
    "LoRA": replace(PLAIN, lora=PEFT),
    "DoRA (`use_dora`)": replace(PLAIN, lora=replace(PEFT, use_dora=True)),
    "QLoRA (`load_in_4bit`)": replace(
        PLAIN, lora=PEFT, quantization=Quantization(load_in_4bit=True)
    ),
    "`method: dpo`, orpo, simpo, kto": replace(PLAIN, method=Method(method="dpo")),
    "`method: reward`, process_reward, classify, rerank": replace(
        PLAIN, method=Method(method="reward")
    ),
    "`method: embed`": replace(
        PLAIN,
        method=Method(method="embed", temperature=0.05),
        data=replace(PLAIN.data, overlength="drop"),
    ),
    "`method: masked_diffusion`": replace(PLAIN, method=Method(method="masked_diffusion")),
    "`method: early_exit`": replace(PLAIN, method=Method(method="early_exit")),
    "FP8": PLAIN,
    "`quantization_aware_training`": replace(
        PLAIN, quantization_aware=QuantizationAware(quantization_aware_training="int8-int4")
    ),
    "`torch_compile`": replace(PLAIN, model=replace(PLAIN.model, torch_compile=True)),
    "`activation_checkpointing_keeps`": replace(
        PLAIN, model=replace(PLAIN.model, activation_checkpointing_keeps="attention")
    ),
    "`activation_offload`": replace(PLAIN, model=replace(PLAIN.model, activation_offload=True)),
    "`optim_in_backward`": replace(
        PLAIN, optimization=Optimization(optim_in_backward=True, max_grad_norm=None)
    ),
    "`optim_offload: nvme`": replace(
        PLAIN, optimization=Optimization(optim_offload="nvme", offload_dir="/nvme")
    ),
}


def works(technique: str, layout: str) -> bool:
    """Whether nothing refuses the two together before a model is loaded."""
    recipe, sharding = TECHNIQUES[technique], LAYOUTS[layout]
    if layout == "experts":
        recipe = replace(
            recipe, model=replace(recipe.model, model_config=MIXTURE, expert_parallel_size=2)
        )
    if layout == "stages":
        recipe = replace(recipe, model=replace(recipe.model, pipeline_parallel_size=2))
    if technique == "FP8":
        sharding = replace(sharding, fp8=Fp8())
    try:
        make_plan(recipe, sharding, RANKS)
    except UserError:
        return False
    return True


def table() -> list[str]:
    """A row for each technique."""
    head = [f"| | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    rows = [
        [technique, *("yes" if works(technique, layout) else "no" for layout in LAYOUTS)]
        for technique in TECHNIQUES
    ]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def test_the_page_says_what_works_together() -> None:
    pytest.importorskip("bitsandbytes")  # which a quantized base asks for where the layout matters
    page = Path(ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    lines = table()
    assert "\n".join(lines) in page, "\n" + "\n".join(lines)
