"""What the tests of loading share: folders of every form and family, walked once by two ranks."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.conftest import make_chat, make_model, make_once
from tests.models.families import (
    FAMILIES,
    HYBRIDS,
    MASKED,
    OTHERS,
    OWN_ATTENTION,
    QUICK_FAMILIES,
    build,
)
from tests.ranks import launch_ranks

SCRIPT = Path(__file__).with_name("load_on_ranks.py")
Job = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What two ranks found, by the job's name: see load_on_ranks.py."""
    families = [item for item in request.session.items if item.path.stem == "test_families"]
    is_slow = any(item.get_closest_marker("slow") for item in families)
    trained = FAMILIES if is_slow else QUICK_FAMILIES
    root = make_once(tmp_path_factory, "loaded", partial(_load, families=trained))
    jobs, results = (
        json.loads((root / f"{name}.json").read_text()) for name in ("jobs", "results")
    )
    return {job["name"]: result for job, result in zip(jobs, results, strict=True)}


def _load(root: Path, families: Iterable[str]) -> None:
    jobs = [
        *_families(root, families),
        *_probed(root),
        *_forms(root),
        *_broken(root),
        *_deep(root),
        *_checkpoint(root),
        *_inline(),
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    launch_ranks(SCRIPT, [str(root)], ranks=2, timeout=300).check()


def _families(root: Path, families: Iterable[str]) -> list[Job]:
    jobs = []
    for family in families:
        build(family).save_pretrained(root / family)
        jobs.append({"name": family, "kind": "trains", "folder": str(root / family)})
    return jobs


def _probed(root: Path) -> list[Job]:
    packed, padded = {"packing": True}, {"packing": False}
    every = (*OTHERS, *HYBRIDS, *MASKED, *OWN_ATTENTION, "modernbert-decoder")
    cases = [(family, keys) for keys in (packed, padded) for family in every]
    for family in {family for family, _ in cases}:
        build(family).save_pretrained(root / family)
    return [
        {
            "name": f"{family}, {'packed' if keys['packing'] else 'padded'}",
            "kind": "probes",
            "folder": str(root / family),
        }
        | keys
        for family, keys in cases
    ]


def _forms(root: Path) -> list[Job]:
    jobs = []
    for tied in (False, True):
        for shards, size in (("one file", "1GB"), ("several files", "20KB")):
            name = f"{shards}, {'tied' if tied else 'untied'}"
            build("llama", torch.bfloat16, tie_word_embeddings=tied).save_pretrained(
                root / name, max_shard_size=size
            )
            jobs.append({"name": name, "kind": "loads", "folder": str(root / name)})
    # Some writers leave the tied head in the file: it is the embedding once more.
    build("llama", tie_word_embeddings=True).save_pretrained(root / "tied twice")
    _change(
        root / "tied twice",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    return [*jobs, {"name": "tied twice", "kind": "loads", "folder": str(root / "tied twice")}]


def _broken(root: Path) -> list[Job]:
    norm, head = "model.layers.1.input_layernorm.weight", "lm_head.weight"
    changes: dict[str, Callable[[Tensors], object]] = {
        "missing": lambda t: t.pop(norm),
        "extra": lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(48)}),
        "misshapen": lambda t: t.update({norm: torch.ones(47)}),
        "all three": lambda t: [
            t.pop(head),
            t.update({"model.extra.weight": torch.ones(1)}),
            t.update({norm: torch.ones(2)}),
        ],
    }
    jobs = []
    for name, change in changes.items():
        build("llama").save_pretrained(root / name)
        _change(root / name, change)
    build("mixtral").save_pretrained(root / "expert missing")
    _change(
        root / "expert missing",
        lambda t: t.pop("model.layers.1.block_sparse_moe.experts.1.w3.weight"),
    )
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    (root / "run of others" / "checkpoints").mkdir(parents=True)
    for name in (*changes, "expert missing", "adapter", "run of others"):
        jobs.append({"name": name, "kind": "refuses", "folder": str(root / name)})
    return jobs


def _change(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _deep(root: Path) -> list[Job]:
    build("llama", num_hidden_layers=4).save_pretrained(root / "deep")
    return [{"name": "deep", "kind": "recomputes", "folder": str(root / "deep")}]


def _inline() -> list[Job]:
    sizes = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = sizes | {"model_type": "llama", "intermediate_size": 64}
    return [
        {"name": "inline, LoRA", "kind": "builds", "model_config": llama},
        {
            "name": "inline, wrong",
            "kind": "builds",
            "model_config": llama | {"num_attention_heads": 5},
        },
    ]


def _checkpoint(root: Path) -> list[Job]:
    recipe = root / "checkpoint.yaml"
    model = make_model(root / "before")
    data = make_chat(root / "chat.jsonl", rows=4)
    recipe.write_text(
        yaml.safe_dump({"model_name_or_path": str(model), "datasets": [{"path": str(data)}]})
    )
    return [
        {
            "name": "checkpoint",
            "kind": "restarts",
            "folder": str(root / "run"),
            "recipe": str(recipe),
        }
    ]
