"""Exports as a person makes them, through the command line, from folders on disk."""

import hashlib
import json
import os
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from tests.checkpoint.test_manifest import write_checkpoint
from tests.conftest import make_model
from tests.ranks import ROOT, environment
from tests.training.layouts import train_all, write_config
from tests.warm_processes import WarmProcess

MakeModel = Callable[..., Path]


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("family", ["gemma3_text", "mellum"])
def test_the_rope_of_full_attention_is_repeated_where_transformers_reads_the_same_model(
    family: str, tmp_path: Path
) -> None:
    """mlx-lm reads Gemma 3 by these keys; transformers would take them for all layers of Mellum."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    model, out = (
        make_model(tmp_path / "model", model_type=family, rope_parameters=rope),
        tmp_path / "out",
    )
    assert main(["export", str(model), "--output", str(out), "--no-verify"]) == 0
    written = json.loads((out / "config.json").read_text())
    repeated = {
        key: written.get(key) for key in ("rope_theta", "rope_local_base_freq", "rope_scaling")
    }
    scaling = {"rope_type": "linear", "type": "linear", "factor": 8.0}
    if family == "gemma3_text":
        assert list(repeated.values()) == [1e6, 2e4, scaling]
    read = AutoConfig.from_pretrained(out).rope_parameters
    read["full_attention"].pop("type", None)  # an old name of rope_type
    assert read == rope


def test_a_folder_is_exported_whole_verified_and_twice_the_same(
    tiny_llama: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama()
    assert (
        main(["export", str(model), "--output", str(tmp_path / "one"), "--max-shard-size", "100KB"])
        == 0
    )
    assert "verified: every value, and identical logits" in capsys.readouterr().out
    assert (
        main(
            [
                "export",
                str(model),
                "--output",
                str(tmp_path / "two" / "one"),
                "--max-shard-size",
                "100KB",
            ]
        )
        == 0
    )
    assert digests(tmp_path / "one") == digests(tmp_path / "two" / "one")
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in weights(tmp_path / "one").values()
    )
    assert all(
        path.stat().st_size < 110_000 for path in (tmp_path / "one").glob("model-*.safetensors")
    )
    ids = torch.arange(40).reshape(2, 20)
    before, after = (
        AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (model, tmp_path / "one")
    )
    assert torch.equal(before, after)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "one")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template != None  # noqa: E711
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_config_states_the_dtype_of_the_files(
    dtype: str, tiny_llama: MakeModel, tmp_path: Path
) -> None:
    model, out = tiny_llama(dtype="bfloat16"), tmp_path / "out"
    assert main(["export", str(model), "--output", str(out), "--dtype", dtype, "--no-verify"]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights(model).items()}
    found = weights(out)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)


def test_a_rounded_export_is_within_the_bound(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any
) -> None:
    assert (
        main(
            ["export", str(tiny_llama()), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]
        )
        == 0
    )
    assert "logits within 0.00" in capsys.readouterr().out


def test_tied_weights_are_written_once(tiny_llama: MakeModel, tmp_path: Path, capsys: Any) -> None:
    model, out = tiny_llama(tie_word_embeddings=True), tmp_path / "out"
    tensors = weights(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main(["export", str(model), "--output", str(out)]) == 0
    assert "lm_head.weight" not in weights(out)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main(["export", str(model), "--output", str(out), "--overwrite"]) == 2
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
    assert weights(out)  # the old export is still there


def test_an_existing_destination_is_kept(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any
) -> None:
    model, out = tiny_llama(), tmp_path / "out"
    out.mkdir()
    (out / "diary.txt").write_text("mine")
    assert main(["export", str(model), "--output", str(out), "--no-verify"]) == 2
    assert "exists; choose another --output" in capsys.readouterr().err
    assert main(["export", str(model), "--output", str(out), "--no-verify", "--overwrite"]) == 2
    assert "not an exported model" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["diary.txt"]
    assert main(["export", str(model), "--output", str(model), "--overwrite"]) == 2
    assert "holds what is exported" in capsys.readouterr().err


WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda _, t: t.pop("model.norm.weight"),
        "tiny-llama: model.norm.weight is missing: these are not the weights of LlamaForCausalLM",
    ),
    "unexpected": (
        lambda _, t: t.update(extra=torch.ones(1)),
        "tiny-llama: extra is without a place in LlamaForCausalLM: the config does not fit the weights",
    ),
    "shape": (
        lambda _, t: t.update({"model.norm.weight": torch.ones(7)}),
        "tiny-llama: model.norm.weight has the shape [7], but the config says [64]",
    ),
    "code": (
        lambda c, _: c.update(model_type="mystery", auto_map={"AutoConfig": "evil.Config"}),
        "auto_map: this model has code of its own (mystery); read it, then allow it with --trust-remote-code",
    ),
    "quantized": (
        lambda c, _: c.update(quantization_config={"bits": 4}),
        "quantization_config: quantized weights",
    ),
    "layers": (
        lambda c, _: c.update(num_hidden_layers=10**9),
        "config.json: num_hidden_layers: 1000000000: a whole number from 1 to 1,000 is expected",
    ),
    "no model": (
        lambda c, _: c.update(model_type="t5"),
        "config.json: t5: transformers has no causal language model of this type; name another model",
    ),
    "infinite": (
        lambda _, t: t["model.norm.weight"].fill_(float("nan")),
        "the checkpoint's logits are not finite: the training has diverged",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_reported_and_nothing_is_left(
    case: str, tiny_llama: MakeModel, tmp_path: Path, capsys: Any
) -> None:
    model = tiny_llama()
    change, message = WRONG[case]
    config, tensors = json.loads((model / "config.json").read_text()), weights(model)
    change(config, tensors)
    (model / "config.json").write_text(json.dumps(config))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / "evil.py").write_text("raise SystemExit('code in the model folder ran')")
    assert main(["export", str(model), "--output", str(tmp_path / "results" / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_tokenizer_that_is_damaged_or_runs_code_is_named(
    tiny_llama: MakeModel, tmp_path: Path, capsys: Any
) -> None:
    model, out = tiny_llama(), tmp_path / "results" / "out"
    path = model / "tokenizer_config.json"
    sound = path.read_text()
    hostile = {
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
        "tokenizer_class": "EvilTokenizer",
    }
    command = ["export", str(model), "--output", str(out), "--no-verify"]
    path.write_text(json.dumps(json.loads(sound) | hostile))
    assert main(command) == 2
    assert (
        f"{path}: auto_map: this tokenizer has code of its own (EvilTokenizer)"
        in capsys.readouterr().err
    )
    path.write_text(sound)
    (model / "tokenizer.json").write_text("{")
    assert main(command) == 2
    assert f"{model / 'tokenizer.json'}: not JSON; the file is damaged" in capsys.readouterr().err
    assert not out.parent.exists()
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert main(command) == 0
    assert "without a tokenizer, since the source has none" in capsys.readouterr().out


def test_an_exported_tokenizer_neither_cuts_nor_pads(
    tiny_llama: MakeModel, tiny_recipe: MakeModel, tmp_path: Path
) -> None:
    """Though its base's does, as one that was saved after use on data; by tokenizers, which transformers is not asked about."""
    model = tiny_llama()
    plain = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer(
        ["a long sentence", "a"],
        truncation=True,
        max_length=4,
        stride=1,
        padding="max_length",
        pad_to_multiple_of=2,
    )
    tokenizer.init_kwargs |= {"max_length": 4, "truncation": True, "padding": True}
    tokenizer.save_pretrained(model)
    texts = ["once there was a fox who lived in a box", "a"]
    cut = [
        encoding.ids
        for encoding in Tokenizer.from_file(str(model / "tokenizer.json")).encode_batch(texts)
    ]
    assert set(map(len, cut)) == {4}
    train_all(tmp_path, [(tiny_recipe(max_steps=1), write_config(tmp_path, "single"), [])], ranks=1)
    assert main(["export", str(model), "--output", str(tmp_path / "again"), "--no-verify"]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001" / "model"
    for folder in (checkpoint, tmp_path / "run" / "export", tmp_path / "again"):
        written = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert [each.ids for each in written.encode_batch(texts)] == [
            each.ids for each in plain.encode_batch(texts)
        ]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        cutting = {
            "max_length",
            "truncation",
            "truncation_strategy",
            "stride",
            "padding",
            "pad_to_multiple_of",
        }
        assert not cutting & config.keys()
        assert config["eos_token"] == tokenizer.eos_token


def test_a_terminal_shows_that_checksums_are_read(tmp_path: Path) -> None:
    """The checkpoint is of no model, which is reported once its checksums match."""
    write_checkpoint(tmp_path / "run", 7)
    command = ["-m", "finetune", "export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    terminal, its_end = os.openpty()
    termios.tcsetwinsize(its_end, (24, 80))
    try:
        process = WarmProcess(
            command, environment(), Path(os.devnull), Path(os.ttyname(its_end)), cwd=ROOT
        )
        code = process.wait(60)
        shown = os.read(terminal, 100_000).decode()
    finally:
        os.close(terminal)
        os.close(its_end)
    assert code == 2
    assert "\rchecking step-00000007:   0%|" in shown
    assert "truncated: 8 bytes" in shown
