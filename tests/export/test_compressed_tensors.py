"""Quantized exports: transformers' own loader of compressed-tensors computes what torchao made of the trained model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.export.merge_choice import ROWS_FILE
from finetune.plan.plan import make_plan
from tests.conftest import make_chat, make_model
from tests.training.layouts import train_all, write_config, write_recipe
from tests.training.test_qat import KEYS, is_rounded, torchao_base

pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
pytest.importorskip("torchao")
from finetune.export.formats import compressed_tensors_export

TRAINED = ("int4", "int8-int4", "int8 of rows", "lora int8-int4")
IDS = torch.arange(96).reshape(2, 48) * 5 % 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without quantization, and one for each of TRAINED."""
    folder = tmp_path_factory.mktemp("compressed")
    model, data = make_model(folder / "model"), make_chat(folder / "chat.jsonl", rows=40)
    keys = {"global_batch_size": 4, "max_steps": 6, "eval_split_size": 8, "learning_rate": 1e-2}
    recipe, config = (
        write_recipe(folder / "recipe.yaml", model, data, **keys),
        write_config(folder, "single"),
    )
    runs = [(recipe, config, [f"output_dir={folder}/plain"])]
    names = (*TRAINED, "mxfp4")
    runs += [(recipe, config, [f"output_dir={folder}/{name}", *KEYS[name]]) for name in names]
    train_all(folder, runs, ranks=1)
    return folder


def export(source: Path, output: Path, *arguments: str, formats: str = "compressed-tensors") -> int:
    return main(["export", str(source), "--output", str(output), "--format", formats, *arguments])


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    found: torch.Tensor = model.eval()(ids, use_cache=False).logits
    return found.float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", TRAINED)
def test_the_export_is_the_rounded_model_that_was_trained(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaded by transformers and compressed-tensors; beside it torchao's fake-quantized and converted models."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    assert export(folder / name, tmp_path / "out", formats="safetensors,compressed-tensors") == 0
    said = capsys.readouterr().out
    assert "verified: every value. On 8 held-out rows" in said
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    unrounded = logits_of(plain)
    quantize_(plain, QATConfig(torchao_base(name), step="prepare"), filter_fn=is_rounded)
    trained = logits_of(plain)
    quantize_(plain, QATConfig(torchao_base(name), step="convert"))
    served = logits_of(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "compressed-tensors")
    )
    assert difference(served, trained) < 1e-5
    assert difference(served, logits_of(plain)) < 1e-5
    assert difference(served, unrounded) > 1e-3


def test_a_run_leaves_all_formats_and_the_plan_knows_their_bytes(folder: Path) -> None:
    keys = ["quantization_aware_training=int4", "qat_group_size=16", "export_at_end=true"]
    keys += [
        "export_formats=[safetensors, gguf, compressed-tensors]",
        f"output_dir={folder}/formats",
    ]
    printed = train_all(
        folder, [(folder / "recipe.yaml", write_config(folder, "single"), keys)], ranks=1
    )
    assert (
        "/formats/export/compressed-tensors: " in printed
        and "in int4, verified: every value. On 8 held-out" in printed
    )
    files = [*folder.glob("formats/export/**/*.safetensors"), *folder.glob("formats/export/*.gguf")]
    assert len(files) == 3
    plan = make_plan(
        read_recipe(str(folder / "recipe.yaml"), keys), read_sharding("single", None, {}), ranks=1
    )
    written = sum(path.stat().st_size for path in files)
    assert written - 40_000 < plan.disk.export <= written  # headers, the GGUF's tokenizer, shapes


@pytest.mark.parametrize("scheme", ["fp8-fp8", "int8-int8", "int8"])
def test_a_plain_export_is_measured_as_transformers_measures_it(
    scheme: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(folder / "plain", tmp_path / "out", "--quantization", scheme) == 0
    said, card = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    pattern = (
        r"its loss is (\S+), beside (\S+) of the unquantized model; KL divergence (\S+) a token"
    )
    numbers = [tuple(map(float, re.findall(pattern, text)[0])) for text in (said, card)]
    assert numbers[0] == numbers[1]
    assert export(folder / "plain", tmp_path / "plain", formats="safetensors") == 0
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "plain")]
    losses, divergences, count = [0.0, 0.0], 0.0, 0
    for row in json.loads((folder / "plain" / ROWS_FILE).read_text())["rows"]:
        labels = torch.tensor(row["labels"])
        each = [
            logits_of(model, torch.tensor([row["input_ids"]]))[0].log_softmax(-1)
            for model in models
        ]
        for place, scores in enumerate(each):
            losses[place] += float(functional.nll_loss(scores, labels, reduction="sum"))
        quantized, truth = (scores[labels != -100] for scores in each)
        divergences += float((truth.exp() * (truth - quantized)).sum())
        count += int((labels != -100).sum())
    expected = (losses[0] / count, losses[1] / count, divergences / count)
    assert numbers[0][:2] == pytest.approx(expected[:2], abs=1e-4)
    assert numbers[0][2] == pytest.approx(expected[2], rel=0.1)


def test_a_loss_that_rises_too_much_is_not_published(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(folder / "plain", out, "--quantization", "int4", "--max-loss-increase", "-1") == 2
    assert re.search(
        r"not exported: quantized, the loss is \S+ instead of \S+, more than",
        capsys.readouterr().err,
    )
    assert not out.exists()
    assert (
        export(
            folder / "plain",
            out,
            "--quantization",
            "int4",
            "--group-size",
            "16",
            "--max-loss-increase",
            "1",
        )
        == 0
    )
    assert (
        export(
            folder / "model",
            tmp_path / "other",
            "--quantization",
            "int8",
            "--max-loss-increase",
            "1",
        )
        == 2
    )
    assert "the run kept no rows to measure on" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["a byte", "a tensor"])
def test_what_is_not_what_was_quantized_is_found_and_not_published(
    damage: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_weights = compressed_tensors_export.write_weights

    def write_and_damage(where: Path, weights: Any) -> Any:
        written, path = write_weights(where, weights), where / "model.safetensors"
        tensors = load_file(path)
        name = "model.layers.1.mlp.up_proj.weight_packed"
        if damage == "a tensor":
            del tensors[name]
        else:
            tensors[name].view(torch.uint8)[3, 5] ^= 1
        save_file(tensors, path)
        return written

    monkeypatch.setattr(compressed_tensors_export, "write_weights", write_and_damage)
    assert export(folder / "int4", tmp_path / "out") == 2
    said = "differs from the checkpoint" if damage == "a byte" else "not in the files"
    assert f"model.layers.1.mlp.up_proj.weight_packed: {said}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name how with --quantization: one of fp8-fp8, int4, int8, int8-int4, int8-int8"),
        (["--quantization", "nvfp4"], "--quantization: nvfp4: one of fp8-fp8, int4, int8"),
        (["--quantization", "int4", "--group-size", "24"], "--group-size: 24 does not divide the 64 inputs of model.layers.0"),
        (["--quantization", "int4", "--group-size", "0"], "--group-size: 0: a number above 0 is expected"),
        (["--group-size", "8"], "--group-size: name the scheme too"),
        (["--quantization", "fp8-fp8", "--group-size", "8"], "fp8-fp8 has one scale a row; omit it"),
        (["--format", "safetensors", "--quantization", "int8"], "nothing is quantized; add --format compressed-tensors"),
        (["--adapter-only"], "an adapter is not quantized"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused_in_a_sentence(
    arguments: list[str],
    sentence: str,
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: Any,
) -> None:
    assert export(tiny_llama(), tmp_path / "out", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_mixtures_are_refused(tiny_llama: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    model = tiny_llama("mixture", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert export(model, tmp_path / "out", "--quantization", "int8") == 2
    assert "a mixture, whose experts are no linear layers" in capsys.readouterr().err


@pytest.mark.slow
def test_training_for_4_bits_loses_less_than_quantizing_afterwards(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """stories260k on real questions for 200 steps, a scale for each row of a weight."""
    columns = {"prompt_column": "question", "completion_column": "answer"}
    data = shared / "data"
    keys = {
        "datasets": [{"path": str(data / "gsm8k_train.jsonl"), **columns}],
        "eval_datasets": [
            {"path": str(data / "gsm8k_test.jsonl"), "split": "train[:100]", **columns}
        ],
        "max_length": 512,
        "global_batch_size": 4,
        "per_device_train_batch_size": 4,
        "max_steps": 200,
        "learning_rate": 2e-3,
        "packing": True,
    }
    recipe = write_recipe(
        tmp_path / "recipe.yaml", shared / "models" / "stories260k", Path("unused"), **keys
    )
    config, scheme = (
        write_config(tmp_path, "single"),
        ["quantization_aware_training=int4", "qat_group_size=null"],
    )
    runs = [
        (recipe, config, [f"output_dir={tmp_path}/{name}", *keys])
        for name, keys in (("plain", []), ("aware", scheme))
    ]
    train_all(tmp_path, runs, ranks=1, timeout=1500)
    losses = {}
    for name, flags in (("plain", ["--quantization", "int4"]), ("aware", [])):
        assert export(tmp_path / name, tmp_path / f"{name} out", *flags) == 0
        found = re.findall(
            r"its loss is (\S+), beside (\S+) of the unquantized model", capsys.readouterr().out
        )[0]
        losses[name] = tuple(map(float, found))
    print(losses)
    (afterwards, unquantized), (aware, _) = losses["plain"], losses["aware"]
    assert unquantized < aware < unquantized + 0.6 * (afterwards - unquantized)


def test_weights_in_blocks_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    """Opened by transformers: bit for bit what torchao quantizes, and so near that inputs rounded by the package,
    whose scale is another power of two, give a like loss."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from transformers import CompressedTensorsConfig

    formats = "safetensors,compressed-tensors"
    assert export(folder / "mxfp4", tmp_path / "out", formats=formats) == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" / "compressed-tensors",
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    rounded = 0
    for name, weight in opened.state_dict().items():
        if "_proj.weight" not in name or "scale" in name:
            continue
        made = MXTensor.to_mx(
            plain[name], torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL
        ).dequantize(torch.float32)
        assert torch.equal(weight.float(), made), name
        assert not torch.equal(made, plain[name])
        rounded += 1
    assert rounded == 14
