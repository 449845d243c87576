"""Given a base whose files are quantized, when it is named in a recipe, then it is used as it is or refused in a sentence."""

from dataclasses import replace
from typing import Any

import pytest

from finetune import quantization
from finetune.distributed.accelerate_config import Sharding
from finetune.errors import UserError
from finetune.pretrained_config import check_config, complete_quantization, load_config
from finetune.quantization import check_quantization
from finetune.recipe.schema import Checkpoint, Data, Lora, Model, Quantization, Recipe

SIZES = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
NF4 = BITSANDBYTES | {"bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
FSDP2 = Sharding(layout="fsdp2")
UNQUANTIZED = Quantization()


def adopted(
    stored: dict[str, Any] | None,
    asked: Quantization = UNQUANTIZED,
    *,
    use_peft: bool = True,
    sharding: Sharding = FSDP2,
) -> Quantization:
    """How the base of a run is quantized whose config.json says `stored` and whose recipe says `asked`."""
    extra = {} if stored is None else {"quantization_config": stored}
    model = Model(model_config={"model_type": "llama", **SIZES, **extra})
    recipe = Recipe(
        path="r.yaml",
        given=frozenset(),
        model=model,
        lora=Lora(use_peft=use_peft),
        quantization=asked,
        checkpoint=Checkpoint(export_at_end=False),
    )
    config = load_config(model)
    check_config(config, model, Data(), 64)
    return complete_quantization(recipe, config, sharding).quantization


def test_a_base_stored_by_bitsandbytes_is_adopted_and_any_other_stays_as_asked() -> None:
    double = Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    assert adopted(NF4) == double
    assert adopted(NF4, Quantization(load_in_4bit=True)) == double  # the rest was left at its defaults
    assert adopted(BITSANDBYTES) == replace(double, bnb_4bit_quant_type="fp4")  # transformers' default
    assert adopted(INT8) == Quantization(load_in_8bit=True)
    assert adopted(None) == Quantization()
    assert adopted(None, double) == double


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "compressed-tensors", "hqq", "torchao"])
def test_other_formats_are_refused_with_what_to_do(method: str) -> None:
    sentence = (
        rf"its weights are quantized \({method}\), and only those of bitsandbytes can be trained on; name the unquantized model, "
        "and set use_peft and load_in_4bit: true to keep it in 4 bits"
    )
    with pytest.raises(UserError, match=sentence):
        adopted({"quant_method": method, "bits": 4})


def test_what_the_files_do_not_hold_is_refused() -> None:
    stored = r"the weights of model_config are stored as 4 bits \(nf4, double quantization\); leave"
    with pytest.raises(UserError, match=f"load_in_8bit: true: {stored} load_in_8bit out"):
        adopted(NF4, Quantization(load_in_8bit=True))
    with pytest.raises(UserError, match=f'bnb_4bit_quant_type: "fp4": {stored} bnb_4bit_quant_type out'):
        adopted(NF4, Quantization(load_in_4bit=True, bnb_4bit_quant_type="fp4"))


def test_full_fine_tuning_of_a_stored_quantized_base_is_refused() -> None:
    with pytest.raises(
        UserError, match="its weights are stored in 4 bits, so they cannot be fine-tuned in full; set use_peft"
    ):
        adopted(NF4, use_peft=False)


@pytest.mark.parametrize("asked", [Quantization(load_in_4bit=True), Quantization(load_in_8bit=True)])
def test_fsdp1_is_refused(asked: Quantization) -> None:
    fsdp1 = Sharding(layout="fsdp1", source="some.yaml")
    with pytest.raises(UserError, match=rf"some.yaml: load_in_{asked.bits}bit: FSDP1 .*; set fsdp_version: 2"):
        adopted(None, asked, sharding=fsdp1)
    check_quantization(Quantization(), fsdp1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="load_in_4bit needs bitsandbytes; pip install bitsandbytes, or leave load_in_4bit out"
    ):
        adopted(NF4)
    adopted(None)
