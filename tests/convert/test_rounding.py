"""Quantization-aware training in other tools' files: what is converted, what differs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from finetune.convert.conversion import convert_file
from finetune.convert.objectives import FROM_THE_START, SCALED_IN_FP32, find_rounding
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
            {"quantization_aware_training": "int8-int4", "qat_group_size": 32},
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


AUTOMODELS_QAT = {"qat": {"enabled": True, "qat_config": {"_target_": "a.QATConfig"}}}
AUTOMODEL = {
    "model": {"pretrained_model_name_or_path": "Qwen/Qwen3-8B"},
    "dataset": {"_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset", "path_or_dataset_id": "a/rows"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-5},
    "step_scheduler": {},
}  # fmt: skip
OWN_SCALES = {"_target_": "a.QATConfig", "scales_precision": "torch.float32"}


@pytest.mark.parametrize(
    ("theirs", "scaled"),
    [
        (TORCHTUNE | {"dtype": "bf16"}, "weights and inputs"),
        (TORCHTUNE | {"dtype": "fp32"}, None),
        (AUTOMODEL | AUTOMODELS_QAT, "inputs"),
        (AUTOMODEL | {"qat": {"enabled": True, "qat_config": OWN_SCALES}}, "weights and inputs"),
        (AXOLOTL | {"qat": {"activation_dtype": "int8", "weight_dtype": "int4"}}, "inputs"),
        (AXOLOTL | {"qat": {"activation_dtype": "mxfp4", "weight_dtype": "mxfp4"}}, None),
    ],
)
def test_scales_that_are_in_float32_there_alone_are_said(
    tmp_path: Path, theirs: dict[str, Any], scaled: str | None
) -> None:
    if "batch_size" in theirs:
        theirs |= {"quantizer": {"_component_": f"{QUANTIZER}Int8DynActInt4WeightQATQuantizer"}}
    lines = converted(tmp_path, theirs).differences
    said = [each for each in ("weights and inputs", "inputs") if any(f"({SCALED_IN_FP32.format(each)})" in line for line in lines)]  # fmt: skip
    assert said == ([scaled] if scaled else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_those_scales_round_otherwise_in_16_bits(
    dtype: torch.dtype, precision: torch.dtype
) -> None:
    """torchao's own quantizer of torchtune and Automodel, beside ours."""
    from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer

    from finetune.config.quantization import QuantizationAware
    from finetune.models.fake_quantize import _make_rounding

    ours = _make_rounding(QuantizationAware(quantization_aware_training="int8-int4", qat_group_size=256))  # fmt: skip
    assert ours.inputs is not None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 256, bias=False, dtype=dtype))
    weight = model[0].weight.detach().clone()
    quantizer = Int8DynActInt4WeightQATQuantizer(256, precision=dtype, scales_precision=precision)
    theirs: Any = quantizer.prepare(model)[0]
    numbers = torch.randn(16, 1024, dtype=dtype)
    inputs = theirs.activation_fake_quantizer(numbers) != ours.inputs(numbers)
    weights = theirs.weight_fake_quantizer(weight) != ours.weight(weight)
    assert (inputs.float().mean() > 0.01) == (dtype == torch.bfloat16)
    assert bool(weights.any()) == (precision != dtype)


def test_automodel_rounds_from_the_first_step_whatever_its_delay(tmp_path: Path) -> None:
    """_setup_qat of its recipes/llm/train_ft.py gives this function of torchao the whole model."""
    from torchao.quantization.qat import linear

    quantizer = linear.Int8DynActInt4WeightQATQuantizer(groupsize=256)
    model = quantizer.prepare(nn.Sequential(nn.Linear(256, 256)))
    linear.disable_8da4w_fake_quant(model)
    assert model[0].weight_fake_quantizer.enabled
    model.apply(linear.disable_8da4w_fake_quant)  # as torchtune does
    assert not model[0].weight_fake_quantizer.enabled

    config = {"_target_": "a.QATConfig", "quantizer_type": "int8_dynact_int4weight"}
    qat = {"enabled": True, "fake_quant_after_n_steps": 20, "qat_config": config}
    made = converted(tmp_path, AUTOMODEL | {"qat": qat})
    assert made.recipe["quantization_aware_training"] == "int8-int4"
    assert "fake_quant_after_n_steps" not in made.recipe
    assert f"fake_quant_after_n_steps: 20   ({FROM_THE_START})" in made.remarks
