"""Mixtures whose files hold each expert's layers quantized by bitsandbytes, as Axolotl saves Llama 4 and DeepSeek V2: the losses
are those of the same numbers in plain files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import UserError
from finetune.export.export import export
from finetune.files.tensors import StoredTensor, read, read_folder, read_slice
from finetune.models.quantized_weights import fuse_linear_experts, split_quantized
from tests.conftest import make_chat, make_model, make_tokenizer
from tests.models.sweep import tiny_config
from tests.training import reference
from tests.training.layouts import assert_losses, train_all, write_config, write_recipe

functional = pytest.importorskip("bitsandbytes.functional")
EXPERTS = ("gate_up_proj", "down_proj")


def _quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(what bitsandbytes saves of a linear layer's weight, its numbers)."""
    packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4")
    parts = {f"{name}.{end}": value for end, value in state.as_dict(packed=True).items()}
    # as one row: on a CPU the library dequantizes rows rightly where they are a multiple of 64
    flat = functional.quantize_4bit(weight.reshape(1, -1), blocksize=64, quant_type="nf4")
    return parts | {name: packed}, functional.dequantize_4bit(*flat).view(weight.shape)


def _linearize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Llama 4's experts as Axolotl's Llama4TextExperts has them: lists of linear layers."""
    linear = {}
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        if ".experts" not in layer or end not in EXPERTS:
            linear[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            if end == "down_proj":
                linear[f"{layer}.down_projs.{expert}.weight"] = matrix.t()
                continue
            gate, up = matrix.t().chunk(2)
            linear[f"{layer}.gate_projs.{expert}.weight"] = gate
            linear[f"{layer}.up_projs.{expert}.weight"] = up
    return linear


def _delinearize(tensors: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    plain = {name: tensors[name] for name in like if name in tensors}
    for name in like.keys() - plain.keys():
        layer, _, end = name.rpartition(".")
        kinds = ("down_projs",) if end == "down_proj" else ("gate_projs", "up_projs")
        plain[name] = torch.stack(
            [
                torch.cat([tensors[f"{layer}.{kind}.{expert}.weight"] for kind in kinds]).t()
                for expert in range(like[name].shape[0])
            ]
        ).contiguous()
    return plain


def _make_bases(folder: Path, family: str) -> tuple[Path, Path]:
    """(a model with layers in 4 bits, experts' too; the same in plain numbers)."""
    from transformers import AutoModelForCausalLM

    plain = make_model(folder / "plain")  # for the tokenizer
    config = tiny_config(family)
    config.vocab_size = len(make_tokenizer())
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    stored = Path(shutil.copytree(plain, folder / "stored"))
    tensors = load_file(plain / "model.safetensors")
    linear = _linearize(tensors) if family == "llama4_text" else dict(tensors)
    written, numbers = {}, {}
    for name, weight in linear.items():
        is_layer = "proj" in name and "norm" not in name and weight.dim() == 2
        parts, numbers[name] = _quantize(name, weight) if is_layer else ({name: weight}, weight)
        written |= parts
    assert any(".experts." in name for name in written.keys() - linear.keys())
    if family == "llama4_text":
        numbers = _delinearize(numbers, tensors)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    contiguous = {name: tensor.contiguous() for name, tensor in written.items()}
    save_file(contiguous, stored / "model.safetensors", {"format": "pt"})
    keys = json.loads((stored / "config.json").read_text())
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (stored / "config.json").write_text(json.dumps(keys | {"quantization_config": settings}))
    return stored, plain


@pytest.mark.parametrize(
    ("family", "layout", "ranks"),
    [
        pytest.param("deepseek_v2", "single", 1, marks=pytest.mark.slow),
        ("llama4_text", "full_shard", 2),
        pytest.param("llama4_text", "single", 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "full_shard", 2, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_the_same_numbers(
    family: str, layout: str, ranks: int, tmp_path: Path
) -> None:
    stored, plain = _make_bases(tmp_path, family)
    data = make_chat(tmp_path / "chat.jsonl", rows=12)
    keys: dict[str, Any] = {
        "global_batch_size": 4,
        "max_steps": 2,
        "use_peft": True,
        "lora_r": 4,
        "lora_target_modules": ["o_proj"],
        "learning_rate": 1e-2,
    }
    run = tmp_path / "run"
    ours = write_recipe(tmp_path / "ours.yaml", stored, data, **keys, output_dir=str(run))
    theirs = write_recipe(tmp_path / "theirs.yaml", plain, data, **keys)
    train_all(tmp_path, [(ours, write_config(tmp_path, layout), [])], ranks=ranks)
    assert_losses(run, reference.losses(theirs))
    if layout == "single":
        export(run, run / "export", log=lambda _: None)
        exported, before = (
            load_file(each / "model.safetensors") for each in (run / "export", plain)
        )
        assert exported.keys() == before.keys()


def test_fused_experts_are_read_in_any_slices(tmp_path: Path) -> None:
    stored, plain = _make_bases(tmp_path, "llama4_text")
    weights, quantized = split_quantized(read_folder(stored), str(stored))
    expected = load_file(plain / "model.safetensors")
    assert quantized and not any(".experts." in name for name in quantized)
    fused = [name for name in weights if name.rpartition(".")[2] in EXPERTS and "experts" in name]
    assert len(fused) >= 2
    for name in fused:
        assert torch.equal(read(weights[name]), expected[name])
        for _ in range(10):
            cut = tuple(
                slice(*sorted(torch.randperm(size + 1)[:2].tolist()))
                for size in expected[name].shape
            )
            assert torch.equal(read_slice(weights[name], cut), expected[name][cut])


def test_a_missing_expert_is_one_sentence() -> None:
    tensor = StoredTensor("", (4, 4), torch.float32, ())
    names = ["gate_projs.0", "up_projs.0", "down_projs.0", "down_projs.1"]
    stored = {f"layers.0.experts.{name}.weight": tensor for name in names}
    with pytest.raises(UserError, match=r"layers\.0\.experts: an expert's layer is missing"):
        fuse_linear_experts(stored, "model")
