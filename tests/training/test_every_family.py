"""Given a recipe of any causal family of transformers, when it trains on one rank, on two replicas, or sharded with activation
checkpointing, whole or by adapters, then every step has the same loss and gradient norm."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_chat, make_tokenizer, slow_but
from tests.models import sweep
from tests.training.layouts import assert_losses, steps_of, train_all, write_config, write_recipe

# No gradient reaches the bias by which its router only chooses experts, for which DDP would wait.
QUICK = ["ernie4_5_moe"]
WHOLE: list[str] = []
ADAPTERS = ["use_peft=true", "lora_r=4"]
RANDOM = ("phimoe",)  # draws experts while it trains
NOT_RECOMPUTED = (
    "ctrl",
    "gpt_neox_japanese",
    "jetmoe",
    "openai-gpt",
    "reformer",
)  # by transformers


def read_page() -> dict[str, dict[str, Any]]:
    """Family -> the keys with which docs/families.md says that it trains, on packed rows if it can."""
    keys: dict[str, dict[str, Any]] = {}
    page = sweep.PAGE.read_text().partition("## Vision-language classes")[0]
    for packed, padded, families in re.findall(
        r"^\| (.+?) \| (.+?) \| (`.+) \|$", page, re.MULTILINE
    ):
        if packed == "trains":
            chosen = {"packing": True}
        elif padded == "trains":
            chosen = {"packing": False}
        elif padded == "trains with `attn_implementation: eager`":
            chosen = {"packing": False, "attn_implementation": "eager"}
        else:
            continue
        keys |= dict.fromkeys(re.findall(r"`(.+?)`", families), chosen)
    return {family: chosen for family, chosen in keys.items() if family not in RANDOM}


KEYS = read_page()


@pytest.fixture
def recipe(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps of two micro-batches on one rank, without dropout."""
    tokenizer = make_tokenizer()
    for key in ("vocab_size", "decoder_vocab_size"):
        monkeypatch.setitem(sweep.TINY, key, len(tokenizer) + 10)
    sweep.save_tiny(family, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {key: 0.0 for key in content if "drop" in key}))
    return write_recipe(
        tmp_path / "recipe.yaml",
        tmp_path / "model",
        make_chat(tmp_path / "chat.jsonl", rows=24),
        **KEYS[family],
        global_batch_size=4,
        per_device_train_batch_size=1,
        max_steps=3,
        adam_epsilon=1e-4,  # by 1e-8 a gradient that is nearly zero would move as far as any other
    )


@pytest.mark.parametrize("family", slow_but(QUICK, KEYS))
def test_each_layout_has_the_losses_of_one_rank(family: str, recipe: Path, tmp_path: Path) -> None:
    single = write_config(tmp_path, "single")
    ddp = write_config(tmp_path, "ddp")
    sharded = write_config(tmp_path, "full_shard", checkpointing=family not in NOT_RECOMPUTED)
    kinds = {"whole": WHOLE, "adapters": ADAPTERS}
    alone = [
        (recipe, single, [*keys, f"output_dir={tmp_path / kind}"]) for kind, keys in kinds.items()
    ]
    on_two = [
        (recipe, config, [*keys, f"output_dir={tmp_path / f'{kind}-{config.stem}'}"])
        for kind, keys in kinds.items()
        for config in (ddp, sharded)
    ]
    train_all(tmp_path, alone, ranks=1)
    train_all(tmp_path, on_two, ranks=2)
    for kind in kinds:
        expected = [(line["loss"], line["grad_norm"]) for line in steps_of(tmp_path / kind)]
        for config in (ddp, sharded):
            assert_losses(tmp_path / f"{kind}-{config.stem}", expected, norms=1e-3)
