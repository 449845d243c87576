"""Quantization-aware training in other tools' files: what is converted, what differs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.convert.conversion import convert_file
from finetune.convert.objectives import find_rounding
from finetune.convert.recognize import Refusal

AXOLOTL = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "datasets": [{"path": "a/b", "type": "alpaca"}],
    "micro_batch_size": 1,
}
TORCHTUNE = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "/tmp/m/tokenizer.model", "max_seq_len": 512},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/tmp/m"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "batch_size": 2,
}  # fmt: skip
QUANTIZER = "torchtune.training.quantization."


def converted(tmp_path: Path, theirs: dict[str, Any]) -> Any:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(theirs))
    return convert_file(path)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            AXOLOTL
            | {
                "qat": {
                    "activation_dtype": "int8",
                    "weight_dtype": "int4",
                    "fake_quant_after_n_steps": 20,
                }
            },
            {
                "quantization_aware_training": "int8-int4",
                "qat_group_size": 32,
                "fake_quant_after_n_steps": 20,
            },
        ),
        (
            TORCHTUNE
            | {
                "quantizer": {
                    "_component_": f"{QUANTIZER}Int8DynActInt4WeightQATQuantizer",
                    "groupsize": 64,
                }
            }
            | {"fake_quant_after_n_steps": 1000},
            {
                "quantization_aware_training": "int8-int4",
                "qat_group_size": 64,
                "fake_quant_after_n_steps": 1000,
            },
        ),
        (
            AXOLOTL | {"qat": {"activation_dtype": "nvfp4", "weight_dtype": "nvfp4"}},
            {"quantization_aware_training": "nvfp4", "qat_group_size": 16},
        ),
        (
            AXOLOTL | {"qat": {"activation_dtype": "mxfp4", "weight_dtype": "mxfp4"}},
            {"quantization_aware_training": "mxfp4", "qat_group_size": 32},
        ),
        (
            AXOLOTL | {"use_onebitllms": True},
            {"quantization_aware_training": "int8-ternary", "qat_group_size": None},
        ),
        (AXOLOTL, {}),
    ],
)
def test_the_scheme_is_converted(
    theirs: dict[str, Any], ours: dict[str, Any], tmp_path: Path
) -> None:
    found = converted(tmp_path, theirs)
    names = ("quantization_aware_training", "qat_group_size", "fake_quant_after_n_steps")
    assert {name: found.recipe[name] for name in names if name in found.recipe} == ours
    is_tied = "llama3_2" in str(theirs)  # in torchtune, which leaves such a head as it is
    assert any(
        "the output head is rounded there too" in line for line in found.differences
    ) == bool(ours and "use_onebitllms" not in theirs and not is_tied)


@pytest.mark.parametrize(
    "theirs",
    [
        AXOLOTL | {"qat": {"weight_dtype": "int4", "group_size": 128}},
        TORCHTUNE
        | {
            "quantizer": {"_component_": f"{QUANTIZER}Int4WeightOnlyQATQuantizer", "groupsize": 128}
        },
    ],
)
def test_what_torchao_finishes_on_some_gpus_only_is_refused(
    theirs: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        Refusal, match="quantization-aware training that torchao finishes on some GPUs only"
    ):
        converted(tmp_path, theirs)


@pytest.mark.parametrize(
    ("qat", "scheme"),
    [
        ({"enabled": True, "qat_config": {"_target_": "a.QATConfig"}}, "int8-int4"),
        (
            {"enabled": True, "qat_config": {"_target_": "a.QATConfig", "groupsize": 32}},
            "int8-int4",
        ),
        ({"qat_config": {"_target_": "a.QATConfig"}}, None),  # off by default
    ],
)
def test_automodels_config_of_rounding_is_read(qat: dict[str, Any], scheme: str | None) -> None:
    """Its QATConfig, of components/quantization/qat.py, whose quantizer_type is int8_dynact_int4weight by default."""
    found = find_rounding({"qat": qat, "dataset": {}})
    size = qat["qat_config"].get("groupsize", 256)
    assert found == (scheme and {"quantization_aware_training": scheme, "qat_group_size": size})
