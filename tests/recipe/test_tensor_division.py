"""What tensor parallelism does not work with is refused in a sentence, and sizes that do not divide with the arithmetic."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.distributed.fp8 import Fp8
from finetune.distributed.sharding import Sharding
from finetune.errors import UserError
from finetune.recipe.reader import read_recipe
from finetune.recipe.tensor_division import check_divisible, check_tensor_parallel_recipe

TP = Sharding(layout="fsdp2", mixed_precision="bf16", tensor_parallel_size=4, source="tp.yaml")
SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 509,
}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["optim=adafactor"],
            "optim: adafactor does not work with tensor parallelism; choose one of adamw_torch_fused, ",
        ),
        (["optim=adamw_8bit"], "optim: adamw_8bit"),
        (
            ["use_peft=true", "use_dora=true"],
            "use_dora: true does not work with tensor parallelism; set use_dora: false",
        ),
        (["use_peft=true", "load_in_4bit=true"], "load_in_4bit: a quantized base cannot be divided"),
        (["torch_compile=true"], "torch_compile: true"),
        (["use_liger_kernel=true"], "use_liger_kernel: true"),
        (["neftune_noise_alpha=5"], "neftune_noise_alpha"),
        (["attn_implementation=sdpa"], "attn_implementation: sdpa"),
        (
            ["activation_checkpointing_keeps=attention_and_projections"],
            "activation_checkpointing_keeps: attention_and_projections finds its products by their sizes",
        ),
        (["method=distill", "teacher_model_name_or_path=t"], "method: distill"),
    ],
)
def test_what_does_not_work_with_it(overrides: list[str], named: str, tiny_recipe: Callable[..., Path]) -> None:
    recipe = read_recipe(str(tiny_recipe()), overrides)
    with pytest.raises(UserError, match=re.escape(f"tp.yaml: tp_size 4: {named}")):
        check_tensor_parallel_recipe(recipe, TP)
    check_tensor_parallel_recipe(recipe, replace(TP, tensor_parallel_size=1))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision: fp16"),
        ({"fp8": Fp8()}, "mixed_precision: fp8"),
        ({"wrapping": "NO_WRAP"}, "fsdp_auto_wrap_policy: NO_WRAP"),
    ],
)
def test_layouts_that_do_not_work_with_it(keys: dict[str, Any], named: str, tiny_recipe: Callable[..., Path]) -> None:
    recipe = read_recipe(str(tiny_recipe()), [])
    check_tensor_parallel_recipe(recipe, TP)
    with pytest.raises(UserError, match=re.escape(f"tp.yaml: tp_size 4: {named}")):
        check_tensor_parallel_recipe(recipe, replace(TP, **keys))


@pytest.mark.parametrize(
    ("family", "sizes", "named"),
    [
        ("llama", {"num_attention_heads": 6}, "num_attention_heads 6, and 6 / 4 leaves a rest of 2"),
        (
            "llama",
            {"num_attention_heads": 6, "intermediate_size": 102},
            "intermediate_size 102, and 102 / 4 leaves a rest of 2; num_att",
        ),
        ("llama", {"num_attention_heads": 6}, "; set tp_size to one of 1, 2"),
        ("llama", {"num_key_value_heads": 2}, "num_key_value_heads 2, and 2 / 4 leaves a rest of 2"),
        ("qwen3", {"intermediate_size": 99}, "intermediate_size 99, and 99 / 4 leaves a rest of 3"),
        ("phi3", {"head_dim": 3, "num_key_value_heads": 2}, "num_key_value_heads x head_dim 6, and 6 / 4 leaves"),
        ("llama", {"vocab_size": 5}, "vocab_size 5, too few rows for 4 ranks"),
        ("mixtral", {}, "tensor parallelism does not divide model, a mixtral model, but only llama, "),
    ],
)
def test_sizes_that_do_not_divide(family: str, sizes: dict[str, int], named: str) -> None:
    with pytest.raises(UserError, match=re.escape("tp.yaml: tp_size 4: ")) as caught:
        check_divisible(family, SIZES | sizes, TP, "model")
    assert named in str(caught.value)
    check_divisible(family, SIZES | sizes, replace(TP, tensor_parallel_size=1), "model")


def test_heads_need_not_divide_where_their_products_are_gathered() -> None:
    check_divisible("phi3", SIZES | {"num_key_value_heads": 2}, TP, "model")


def test_a_vocabulary_is_divided_unevenly_but_for_rounded_moments() -> None:
    check_divisible("llama", SIZES, TP, "model", "adamw_torch_fused")
    with pytest.raises(UserError, match="vocab_size 509, which 4 ranks divide unevenly; set optim"):
        check_divisible("llama", SIZES, TP, "model", "adamw_bf16_moments")
    check_divisible("llama", SIZES | {"vocab_size": 512}, TP, "model", "adamw_bf16_moments")
