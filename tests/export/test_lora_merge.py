"""Adapters merged row by row give what peft's own merge gives, and an adapter that does not fit is reported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.export import target

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"k_proj|up_proj": 3},
    },
    "whole modules": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
}


def make_adapter(base: Path, folder: Path, *, tokens: int | None = None, **keys: Any) -> Path:
    """A PEFT folder with random factors over `base`, grown to `tokens`, written by peft."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | keys)
    grown: Any = AutoModelForCausalLM.from_pretrained(base)
    if tokens is not None:
        grown.resize_token_embeddings(tokens)
    model = get_peft_model(grown, config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_merge_is_pefts(
    kind: str, tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        target, "BLOCK_BYTES", 4 * 64 * 7
    )  # blocks of seven rows, which divide nothing here
    base = tiny_llama(attention_bias=True)
    adapter, out = make_adapter(base, tmp_path / "adapter", **KINDS[kind]), tmp_path / "out"
    assert main(["export", str(adapter), "--output", str(out), "--no-verify"]) == 0
    theirs = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        .merge_and_unload()
        .state_dict()
    )
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, msg=lambda text, name=name: f"{name}: {text}"
        )
    changed = [
        name
        for name, tensor in load_file(base / "model.safetensors").items()
        if not torch.equal(ours[name], tensor)
    ]
    assert len(changed) >= 3
    copied = load_file(out / "adapter" / "adapter_model.safetensors")
    original = load_file(adapter / "adapter_model.safetensors")
    assert copied.keys() == original.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in original.items())


def test_an_adapter_with_whole_modules_and_patterns_verifies(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = KINDS["patterns"] | {
        "modules_to_save": ["lm_head"],
        "target_modules": ["embed_tokens", "q_proj", "up_proj"],
    }
    adapter = make_adapter(tiny_llama(), tmp_path / "adapter", **keys)
    assert main(["export", str(adapter), "--output", str(tmp_path / "out")]) == 0
    assert "verified: every value, and logits within" in capsys.readouterr().out


EMBEDDING = "base_model.model.model.embed_tokens"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "kind": (
        lambda c, _: c.update(peft_type="IA3"),
        "adapter_config.json: peft_type: 'IA3' is neither LORA nor OFT",
    ),
    "no rank": (
        lambda c, _: c.pop("r"),
        "adapter_config.json: r: a positive whole number is expected",
    ),
    "other rank": (lambda c, _: c.update(r=8), "not the config's rank 8"),
    "rank of a billion": (
        lambda c, _: c.update(r=10**9),
        "adapter_config.json: r: 1,000,000,000: its weights have",
    ),
    "bad pattern": (lambda c, _: c.update(rank_pattern={"(": 3}), "(: not a regular expression"),
    "B missing": (
        lambda _, t: t.pop(f"{LAYER}.lora_B.weight"),
        "q_proj.lora_B.weight: missing, although",
    ),
    "no magnitude": (
        lambda c, _: c.update(use_dora=True),
        "lora_magnitude_vector: missing, which contradicts use_dora",
    ),
    "unknown": (lambda _, t: t.update(unknown=torch.ones(2)), "unknown: is no part of LoRA"),
    "other layer": (
        lambda _, t: t.update(
            {k.replace("layers.0", "layers.9"): t[k].clone() for k in list(t) if LAYER in k}
        ),
        "model.layers.9.self_attn.q_proj.weight: adapted, but LlamaForCausalLM of this config has no such tensor",
    ),
    "other width": (
        lambda _, t: t.update({f"{LAYER}.lora_A.weight": torch.ones(4, 9)}),
        "q_proj.weight: its update has the shape [64, 9], the tensor [64, 64]",
    ),
    "layer lost": (
        lambda _, t: [t.pop(name) for name in list(t) if LAYER in name],
        "q_proj.lora_A.weight: missing (2 tensors in all), although adapter_config.json names its module",
    ),
    "PiSSA": (
        lambda c, _: c.update(init_lora_weights="pissa"),
        "init_lora_weights: pissa changes the base model",
    ),
    "new tokens alone": (
        lambda c, t: (
            c.update(trainable_token_indices=[1])
            or t.update({f"{EMBEDDING}.token_adapter.trainable_tokens_delta": torch.ones(1, 64)})
        ),
        "trainable_token_indices: this kind of LoRA is not supported; --adapter-only exports",
    ),
    "aLoRA": (
        lambda c, _: c.update(alora_invocation_tokens=[1]),
        "alora_invocation_tokens: this kind of LoRA is not supported",
    ),
    "base gone": (
        lambda c, _: c.update(base_model_name_or_path="/gone"),
        "/gone: the base model's folder is gone",
    ),
    "no base": (
        lambda c, _: c.update(base_model_name_or_path=None),
        "names no base model; name it with --base-model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_reported(
    case: str, tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(tiny_llama(), tmp_path / "adapter", target_modules=["q_proj"])
    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    change, message = WRONG[case]
    change(config, tensors)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert main(["export", str(adapter), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tied_weight_is_not_merged_but_exported_as_an_adapter(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_llama(tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    command = ["export", str(adapter), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert "model.embed_tokens.weight: is tied to another weight" in capsys.readouterr().err
    assert main([*command, "--adapter-only"]) == 0
    assert "lora_embedding_A" in str(
        load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    )


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_copy_of_a_tied_weight_is_merged_if_peft_ties_it(
    saved: list[str],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without ensure_weight_tying, peft leaves the other weight as it is in the base."""
    base = tiny_llama(tie_word_embeddings=True)
    out = tmp_path / "out"
    apart = make_adapter(base, tmp_path / "apart", modules_to_save=saved)
    assert main(["export", str(apart), "--output", str(out)]) == 2
    assert "is tied to another weight, and merging would untie them" in capsys.readouterr().err
    tied = make_adapter(base, tmp_path / "tied", modules_to_save=saved, ensure_weight_tying=True)
    assert main(["export", str(tied), "--output", str(out)]) == 0
    assert_same_logits(out, AutoModelForCausalLM.from_pretrained(base), tied)


def assert_same_logits(folder: Path, base: Any, adapter: Path) -> None:
    """Asserts that the model in `folder` has the logits of peft's adapter on `base`."""
    ids = torch.arange(250)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, adapter)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)


GROWN: dict[str, dict[str, Any]] = {
    "frozen": {},
    "frozen and tied": {"tie_word_embeddings": True},
    "trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trained and tied": {
        "tie_word_embeddings": True,
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "fewer tokens": {"tokens": 259},
}


@pytest.mark.parametrize("case", GROWN)
def test_an_adapter_of_another_vocabulary_brings_its_embedding(
    case: str, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """peft saves the embedding and the head of a base that was resized."""
    keys = {"tokens": 264, "tie_word_embeddings": False} | GROWN[case]
    base = tiny_llama(tie_word_embeddings=keys.pop("tie_word_embeddings"))
    adapter, out = make_adapter(base, tmp_path / "adapter", **keys), tmp_path / "out"
    assert main(["export", str(adapter), "--output", str(out)]) == 0
    grown: Any = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(keys["tokens"])
    assert_same_logits(out, grown, adapter)


def test_the_export_has_the_tokenizer_that_the_adapter_brings(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Its chat template and its EOS token are those of the training, not the base's."""
    base = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    adapter = make_adapter(base, tmp_path / "adapter", tokens=263, target_modules=["q_proj"])
    ends = {False: [tokenizer.convert_tokens_to_ids("<|end|>")]}
    ends[True] = [*ends[False], 262]
    for brings_tokenizer in (False, True):
        if brings_tokenizer:
            tokenizer.save_pretrained(adapter)
        out = tmp_path / f"out-{brings_tokenizer}"
        assert main(["export", str(adapter), "--output", str(out), "--no-verify"]) == 0
        written = AutoTokenizer.from_pretrained(out)
        assert (len(written) == 263) is brings_tokenizer
        assert (written.chat_template == tokenizer.chat_template) is brings_tokenizer
        stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
        assert (stops if isinstance(stops, list) else [stops]) == ends[brings_tokenizer]


def test_a_whole_model_ends_its_answers_as_its_folder_says_whatever_its_base_does(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    base, model, out = tiny_llama("base"), tiny_llama("model"), tmp_path / "out"
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    own = {"eos_token_id": [2, 5]}
    (model / "generation_config.json").write_text(json.dumps(own))
    command = ["export", str(model), "--output", str(out), "--base-model", str(base)]
    assert main([*command, "--no-verify"]) == 0
    assert json.loads((out / "generation_config.json").read_text()) == own


@pytest.mark.parametrize("is_named_by_the_command", [False, True])
def test_a_base_in_the_hubs_cache_gives_what_its_folder_would(
    is_named_by_the_command: bool, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """A revision in the adapter's config is one of the base that it names, not of another."""
    base, cached = tiny_llama(), Path(constants.HF_HUB_CACHE) / "models--somebody--tiny"
    adapter, out = (
        make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"]),
        tmp_path / "out",
    )
    ends_answers, license_fields = {"eos_token_id": [1, 2], "top_k": 7}, {"license": "apache-2.0"}
    (base / "generation_config.json").write_text(json.dumps(ends_answers))
    (base / "config.json").write_text(
        json.dumps(json.loads((base / "config.json").read_text()) | license_fields)
    )
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    base.rename(cached / "snapshots" / ("0" * 40))
    config = json.loads((adapter / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": "somebody/tiny"
    }
    named = []
    if is_named_by_the_command:
        config |= {"base_model_name_or_path": "another/one", "revision": "v1"}
        named = ["--base-model", "somebody/tiny"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    try:
        assert main(["export", str(adapter), "--output", str(out), "--no-verify", *named]) == 0
    finally:
        shutil.rmtree(cached)
    assert json.loads((out / "generation_config.json").read_text()) == ends_answers
    front = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert front.items() >= ({"base_model": "somebody/tiny"} | license_fields).items()
    assert (out / "tokenizer.json").exists()
