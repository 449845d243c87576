"""Weights that other tools publish packed: the numbers are those that the tool's own code computes, in any slices, and a base
of them trains as the same base does in plain numbers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.config.quantization import read_published_form, read_stored_quantization
from finetune.errors import UserError
from finetune.export.export import export
from finetune.files.tensors import read, read_folder, read_slice
from finetune.inference.inference_model import LoadOptions, load_inference_model
from finetune.inference.inputs import find_model
from finetune.models.quantized_weights import dequantize_published
from tests.conftest import make_chat, make_model, slow_but
from tests.training.layouts import steps_of, train_all, write_config, write_recipe

ROWS, COLUMNS = 64, 96
Made = tuple[dict[str, Tensor], dict[str, Any], Tensor]  # (tensors, quantization_config, numbers)


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """int[rows, n] -> int32[rows, n * bits / 32], the first in the lowest bits, number by number."""
    per_word = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for column in range(numbers.shape[1]):
        words[:, column // per_word] |= numbers[:, column].long() << bits * (column % per_word)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _draw(*shape: int, below: int) -> Tensor:
    return torch.randint(0, below, shape)


def make_gptq(
    bits: int,
    group: int,
    *,
    in_order: bool,
    version: str = "gptq",
    shape: tuple[int, int] = (ROWS, COLUMNS),
) -> Made:
    rows, columns = shape
    groups = columns // group
    codes, zeros = _draw(rows, columns, below=1 << bits), _draw(rows, groups, below=1 << bits)
    scales = (torch.rand(groups, rows) / 8 + 0.01).half()
    index = torch.arange(columns) // group if in_order else torch.randperm(columns) % groups
    stored = zeros if version == "gptq_v2" else (zeros - 1) % (1 << bits)
    tensors = {
        "qweight": _pack(codes, bits).t(),
        "qzeros": _pack(stored.t(), bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group}
    settings |= {"checkpoint_format": version} if version != "gptq" else {}
    numbers = (codes - zeros[:, index]) * scales.t().float()[:, index]
    return tensors, settings, numbers


def make_awq(group: int) -> Made:
    codes, zeros = _draw(COLUMNS, ROWS, below=16), _draw(COLUMNS // group, ROWS, below=16)
    scales = (torch.rand(COLUMNS // group, ROWS) + 0.1).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's: which number goes to each place of a word

    def pack(numbers: Tensor) -> Tensor:
        return _pack(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    spread = torch.arange(COLUMNS) // group
    numbers = ((codes - zeros[spread]) * scales.float()[spread]).t()
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, settings, numbers


def make_aqlm(books: int, bits: int, height: int, width: int) -> Made:
    books_of = torch.randn(books, 1 << bits, height, width).half()
    codes = _draw(ROWS // height, COLUMNS // width, books, below=1 << bits)
    scales = (torch.rand(ROWS // height, 1, 1, 1) + 0.1).half()
    numbers = torch.zeros(ROWS, COLUMNS)
    for i in range(ROWS // height):
        for j in range(COLUMNS // width):
            entry = sum(books_of[book, codes[i, j, book]].float() for book in range(books))
            block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            numbers[block] = entry * scales[i].float().reshape(())
    dtype = torch.int8 if bits == 8 else torch.int16
    tensors = {"codes": codes.to(dtype), "codebooks": books_of, "scales": scales}
    return tensors, {"quant_method": "aqlm"}, numbers


def make_compressed(kind: str, **keys: Any) -> Made:
    """By the package compressed-tensors itself, there and back."""
    args = QuantizationArgs(**keys)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(ROWS, COLUMNS)
    group = args.group_size or COLUMNS
    blocks = weight.view(ROWS, -1, group).abs().amax(-1)
    state: dict[str, Tensor] = {"weight": weight}
    if kind == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.tensor([448 * 6 / float(weight.abs().max())])
        scale = state["weight_global_scale"] * blocks / 6
        state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
    else:
        top = 448 if keys["type"] == "float" else (1 << (keys["num_bits"] - 1)) - 1
        state["weight_scale"] = blocks / top
    if not keys.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-4, 4, state["weight_scale"].shape).to(
            torch.int8
        )
    compressor: Any = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    if kind == "nvfp4-pack-quantized":  # whose own decompression rounds to bf16
        codes = unpack_fp4_from_uint8(stored["weight_packed"], ROWS, COLUMNS, torch.float32)
        scales = stored["weight_scale"].float(), None, args, torch.float32
        numbers = dequantize(codes, *scales, global_scale=stored["weight_global_scale"])
    else:
        numbers = compressor.decompress(dict(stored), scheme)["weight"].float()
    groups = {"group_0": {"weights": {"num_bits": keys["num_bits"]}}}
    settings = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
    return stored, settings, numbers


def make_modelopt() -> Made:
    """ModelOpt's NVFP4 holds the inverse of compressed-tensors' scale of all."""
    stored, _, numbers = make_compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    tensors = {
        "weight": stored["weight_packed"],
        "weight_scale": stored["weight_scale"],
        "weight_scale_2": 1 / stored["weight_global_scale"].reshape(()),
    }
    return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, numbers


FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT = {"type": "int", "strategy": "group", "group_size": 32}
KINDS: dict[str, Callable[[], Made]] = {
    **{
        f"gptq-{bits}-{'in order' if in_order else 'by activation'}": (
            lambda bits=bits, in_order=in_order: make_gptq(bits, 32, in_order=in_order)
        )
        for bits in (2, 4, 8)
        for in_order in (True, False)
    },
    "gptq_v2": lambda: make_gptq(4, 32, in_order=True, version="gptq_v2"),
    "awq": lambda: make_awq(32),
    "aqlm-1x16": lambda: make_aqlm(1, 16, 1, 8),
    "aqlm-2x8": lambda: make_aqlm(2, 8, 1, 8),
    "aqlm-heights": lambda: make_aqlm(2, 8, 4, 4),
    "pack-quantized": lambda: make_compressed("pack-quantized", num_bits=4, **INT),
    "pack-quantized-8": lambda: make_compressed("pack-quantized", num_bits=8, **INT),
    "pack-asymmetric": lambda: make_compressed(
        "pack-quantized", num_bits=4, symmetric=False, **INT
    ),
    "float-quantized": lambda: make_compressed(
        "float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "int-quantized": lambda: make_compressed(
        "int-quantized", num_bits=8, type="int", strategy="channel"
    ),
    "nvfp4": lambda: make_compressed("nvfp4-pack-quantized", **FP4),
    "modelopt": make_modelopt,
}


def _store(folder: Path, made: Made) -> None:
    tensors, settings, _ = made
    stored = {f"layer.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    save_file(stored | {"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_tools_in_any_slices(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = KINDS[kind]()
    _store(tmp_path, made)
    tensors = dequantize_published(read_folder(tmp_path), tmp_path)
    assert tensors.keys() == {"layer.weight", "norm.weight"}
    weight = tensors["layer.weight"]
    assert weight.shape == (ROWS, COLUMNS) and weight.dtype == torch.float32
    torch.testing.assert_close(read(weight), made[2], rtol=1e-6, atol=1e-6)
    for _ in range(20):
        cut = tuple(
            slice(*sorted(torch.randperm(size + 1)[:2].tolist())) for size in (ROWS, COLUMNS)
        )
        assert torch.equal(read_slice(weight, cut), read(weight)[cut])


def test_tensors_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    tensors, settings, numbers = make_gptq(4, 32, in_order=True)
    _store(tmp_path, (tensors | {"scales": tensors["scales"][:, :8]}, settings, numbers))
    weight = dequantize_published(read_folder(tmp_path), tmp_path)["layer.weight"]
    with pytest.raises(UserError, match=r"layer\.weight: its packed tensors do not fit each other"):
        read(weight)


def _make_bases(folder: Path) -> tuple[Path, Path]:
    """(a model whose linear layers are GPTQ's, the same in plain numbers)."""
    torch.manual_seed(0)
    plain = make_model(folder / "plain", hidden_size=64, intermediate_size=64, head_dim=16)
    packed = Path(shutil.copytree(plain, folder / "packed"))
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        made = make_gptq(4, 32, in_order=False, shape=(rows, columns))
        tensors[name] = made[2]
        layer = name.removesuffix("weight")
        stored |= {layer + end: tensor.contiguous() for end, tensor in made[0].items()}
        del stored[name]
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain, packed


@pytest.mark.parametrize(
    ("layout", "ranks"), slow_but([("single", 1)], [("single", 1), ("full_shard", 2)])
)
def test_a_packed_base_trains_exports_and_answers_as_the_same_in_plain_numbers(
    layout: str, ranks: int, tmp_path: Path
) -> None:
    bases = _make_bases(tmp_path)
    data = make_chat(tmp_path / "chat.jsonl", rows=12)
    keys: dict[str, Any] = {"global_batch_size": 4, "max_steps": 2, "use_peft": True, "lora_r": 4}
    runs = [tmp_path / f"run-{base.name}" for base in bases]
    config = write_config(tmp_path, layout)
    recipes = [
        write_recipe(
            tmp_path / f"{base.name}.yaml", base, data, **keys, save_steps=2, output_dir=str(run)
        )
        for base, run in zip(bases, runs, strict=True)
    ]
    train_all(tmp_path, [(recipe, config, []) for recipe in recipes], ranks=ranks)
    losses = [[line["loss"] for line in steps_of(run)] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    exports = [
        load_file(export(run, run / "merged", log=lambda _: None) / "model.safetensors")
        for run in runs
    ]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(tensor, exports[1][name]) for name, tensor in exports[0].items())
    assert "quantization_config" not in json.loads((runs[1] / "merged/config.json").read_text())
    export(runs[1], runs[1] / "adapter", adapter_only=True, log=lambda _: None)
    models = [
        load_inference_model(find_model(str(place)), LoadOptions(), print).model
        for place in (*bases, runs[1] / "adapter")
    ]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain, packed, adapted = (model(ids).logits for model in models)
    assert torch.equal(plain, packed) and not torch.equal(packed, adapted)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {"quant_method": "eetq"},
    ],
)
def test_other_kinds_are_refused(settings: dict[str, Any]) -> None:
    assert read_published_form(settings) is None
    with pytest.raises(UserError, match="in a way that is not read"):
        read_stored_quantization(settings, "model")
