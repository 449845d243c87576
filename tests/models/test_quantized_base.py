"""Given a base whose files are quantized, when it is named in a recipe, then it is used as it is or refused in a sentence."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file

from finetune.config.facts import adopt_quantization
from finetune.config.layout import Sharding
from finetune.config.pretrained import load_config, read_facts
from finetune.config.schema import Lora, Model, Quantization, Recipe
from finetune.distributed.join import join, leave
from finetune.errors import UserError
from finetune.files.tensors import read_folder
from finetune.models.load import load_model
from finetune.models.quantized_layers import quantize_layers
from finetune.models.quantized_weights import four_bit_values, nested_values, split_quantized
from finetune.models.weights import refuse_mismatch
from tests.models.families import build
from tests.models.test_quantize import by_bitsandbytes
from tests.ranks import run_command

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
BITSANDBYTES = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_use_double_quant": True,
}
NF4 = BITSANDBYTES | {"bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
FSDP2 = Sharding(layout="fsdp2")
UNQUANTIZED = Quantization()
NOTHING_INSTALLED = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))


def adopted(stored: dict[str, Any] | None, asked: Quantization = UNQUANTIZED) -> Quantization:
    """How the base of a run is quantized whose config.json says `stored` and whose recipe says `asked`."""
    extra = {} if stored is None else {"quantization_config": stored}
    model = Model(model_config={"model_type": "llama", **SIZES, **extra})
    recipe = Recipe(path="r.yaml", model=model, lora=Lora(use_peft=True), quantization=asked)
    return adopt_quantization(recipe, read_facts(load_config(model), None)).quantization


def test_a_base_stored_by_bitsandbytes_is_adopted_and_any_other_stays_as_asked() -> None:
    double = Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    assert adopted(NF4) == double
    assert (
        adopted(NF4, Quantization(load_in_4bit=True)) == double
    )  # the rest was left at its defaults
    assert adopted(BITSANDBYTES) == replace(
        double, bnb_4bit_quant_type="fp4"
    )  # transformers' default
    assert adopted(INT8) == Quantization(load_in_8bit=True)
    assert adopted(None) == Quantization()
    assert adopted(None, double) == double


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("gptq", {"bits": 3}),  # which no word holds a whole number of
        ("awq", {"bits": 4, "version": "gemv"}),
        ("compressed-tensors", {"bits": 4}),
        ("hqq", {"bits": 4}),
        ("torchao", {"bits": 4}),
    ],
)
def test_other_formats_are_refused_with_what_to_do(method: str, settings: dict[str, Any]) -> None:
    sentence = (
        rf"its weights are quantized \({method}, \d\), in a way that is not read "
        r"\(docs/quantization.md in a clone of the repository has those that are\); name the unquantized model "
        r"\(the BF16 files that these were made from\), and set use_peft and load_in_4bit: true to keep it in 4 bits"
    )
    with pytest.raises(UserError, match=sentence):
        adopted({"quant_method": method, **settings})


Tensors = dict[str, torch.Tensor]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{Q_PROJ}.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as transformers saves it in 4 bits with double quantization."""
    folder = tmp_path_factory.mktemp("stored")
    build("llama").save_pretrained(folder / "plain")
    by_bitsandbytes(folder / "plain", "nf4-double").save_pretrained(folder / "nf4")
    return folder / "nf4"


def text(**state: Any) -> torch.Tensor:
    keys = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": [48, 48],
        "nested_blocksize": 256,
        "nested_offset": 0.1,
    }
    return torch.tensor(list(json.dumps(keys | state).encode()), dtype=torch.uint8)


CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "other values": (
        lambda t: t[f"{Q_PROJ}.quant_map"].mul_(0.9),
        "quant_map: not the values that bitsandbytes uses",
    ),
    "fewer values": (
        lambda t: t.update({f"{Q_PROJ}.quant_map": torch.ones(15)}),
        "quant_map: not the values that bitsandbytes uses",
    ),
    "no scales": (lambda t: t.pop(f"{Q_PROJ}.absmax"), "absmax: 36 scales are expected"),
    "few scales": (
        lambda t: t.update({f"{Q_PROJ}.absmax": torch.ones(35, dtype=torch.uint8)}),
        "absmax: 36 scales are expected",
    ),
    "few codes": (
        lambda t: t.update({Q_PROJ: torch.ones(9, 1, dtype=torch.uint8)}),
        ": 1,152 bytes in one file are expected",
    ),
    "no text": (
        lambda t: t.update({STATE: torch.arange(9, dtype=torch.uint8)}),
        "description of the weight",
    ),
    "block of zero": (lambda t: t.update({STATE: text(blocksize=0)}), "description of the weight"),
    "shape of one": (lambda t: t.update({STATE: text(shape=[2304])}), "description of the weight"),
    "infinite mean": (
        lambda t: t.update({STATE: text(nested_offset=float("inf"))}),
        "description of the weight",
    ),
    "other blocks": (
        lambda t: t.update({STATE: text(nested_blocksize=128)}),
        "description of the weight",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stored_weight_that_bitsandbytes_did_not_write_is_refused(
    change: str, stored: Path, tmp_path: Path
) -> None:
    tensors = load_file(stored / "model.safetensors")
    assert len(split_quantized(read_folder(stored), "folder")[1]) == 14
    CHANGES[change][0](tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError,
        match=rf"^folder: {re.escape(Q_PROJ)}.*{CHANGES[change][1]}.*; save the model again",
    ):
        split_quantized(read_folder(tmp_path), "folder")


def test_the_values_of_codes_are_those_of_bitsandbytes() -> None:
    assert torch.equal(nested_values(torch.device("cpu")), functional.create_dynamic_map())
    for name in ("nf4", "fp4"):
        expected = functional.get_4bit_type(name, device="cpu")
        torch.testing.assert_close(four_bit_values(name), expected, rtol=0, atol=2e-7)


def test_a_stored_base_is_opened_without_imports(stored: Path) -> None:
    """`finetune export` opens the base while another thread imports: two at once can break a module."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import finetune.export.cli\n"
        "from finetune.export.source import find_base, read_folder, split_quantized\n"
        "before = set(sys.modules)\n"
        f"folder = find_base({str(stored)!r}, with_weights=True)\n"
        "assert len(split_quantized(read_folder(folder), str(folder))[1]) == 14\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    assert run_command([sys.executable, "-c", code]).stdout.strip() == "[]"


def test_numbers_without_their_scales_are_never_loaded(tmp_path: Path) -> None:
    """FP8 and int8 whose config does not say so."""
    model = build("llama")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.float8_e4m3fn)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as refused:
        refuse_mismatch(model, read_folder(tmp_path), "folder")
    assert (
        "q_proj.weight is stored as float8_e4m3fn, which is quantized in a way that is not supported"
        in str(refused.value)
    )
    assert "lm_head.weight is stored as int8" in str(refused.value)


def test_a_quantized_head_and_a_config_that_does_not_tell_are_refused(
    stored: Path, tmp_path: Path
) -> None:
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        untold = tmp_path / "untold"
        shutil.copytree(stored, untold)
        config = json.loads((untold / "config.json").read_text())
        del config["quantization_config"]
        (untold / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            UserError,
            match=r"is stored quantized, but config.json does not say so; name the unquantized",
        ):
            load_model(Model(model_name_or_path=str(untold)), Lora(use_peft=True), 0, world)
        whole, quantized = split_quantized(read_folder(stored), "folder")
        assert whole[Q_PROJ].shape == (48, 48)
        model = build("llama").requires_grad_(False)
        head = {"lm_head.weight": quantized[Q_PROJ]}
        with pytest.raises(
            UserError,
            match=r"lm_head.weight is stored in 4 bits, but only frozen linear layers other than",
        ):
            quantize_layers(model, quantized[Q_PROJ].quantization, torch.float32, quantized | head)
    finally:
        leave(world)
