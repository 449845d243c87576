"""What a tool writes when it has trained, and which token it scores: where that is another than here."""

import pytest

from finetune.convert.by_tool import SAVED_BY_LAUNCH
from tests.convert.conftest import Convert, said
from tests.convert.test_newest_versions import AXOLOTL, FACTORY

TEXT = FACTORY | {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen3"}
SWIFT = {"model": "Qwen/Qwen3-8B", "tuner_type": "full", "dataset": ["a/rows"]}
ZERO = {"deepspeed": "ds_z3_config.json"}
TRL = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/rows"}


@pytest.mark.parametrize(
    ("file", "exported"),
    [
        (TEXT, "float32"),
        (TEXT | {"pure_bf16": True}, "bfloat16"),
        (TEXT | ZERO, "bfloat16"),
        (TEXT | {"use_badam": True}, None),
        (TEXT | {"finetuning_type": "lora"}, None),
        (AXOLOTL, "bfloat16"),
        (AXOLOTL | {"bf16": False, "fp16": False}, "float32"),
        (AXOLOTL | {"fsdp": ["full_shard"]}, "float32"),
        (AXOLOTL | {"adapter": "lora"}, None),
        (SWIFT, "bfloat16"),
        (SWIFT | {"torch_dtype": "float32"}, "float32"),
        (TRL, None),
        (TRL | ZERO, "bfloat16"),
    ],
)
def test_an_export_has_the_dtype_that_trainer_saves(
    file: dict[str, object], exported: str | None, convert: Convert
) -> None:
    """Source: save_model of transformers' Trainer, which casts nothing, and Accelerate's get_state_dict and fsdp2_prepare_model."""
    made = convert(file)
    assert made.recipe.get("export_dtype") == exported
    assert (SAVED_BY_LAUNCH in said(made)) == (file == TRL)
