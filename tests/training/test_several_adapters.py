"""Several adapters in one recipe: each is what a run of it alone is, bit for bit, on one base in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import finetune
from finetune.models import load
from tests.conftest import make_chat

PLAIN = {"name": "plain"}
OTHER = {
    "name": "other",
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "up_proj"],
    "seed": 5,
    "max_steps": 5,
}
WHOLE = {"name": "whole", "modules_to_save": ["lm_head"], "use_rslora": True}
AGAIN = {"name": "again", "use_dora": True, "eval_split_size": 0.2}
Make = Callable[..., Path]


def list_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without what is measured by the clock."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss")
    return [{k: line[k] for k in kept if k in line} for line in lines if "phase" not in line]


def assert_same_run(folder: Path, alone: Path) -> None:
    """The same metrics, and the same weights and optimizer state in the last checkpoint."""
    assert list_lines(folder) == list_lines(alone)
    checkpoints = [sorted((each / "checkpoints").glob("step-*")) for each in (folder, alone)]
    assert checkpoints[0][-1].name == checkpoints[1][-1].name
    found = [sorted(each[-1].rglob("*.safetensors")) for each in checkpoints]
    assert [path.name for path in found[0]] == [path.name for path in found[1]]
    assert found[0]
    for path, other in zip(*found, strict=True):
        tensors = load_file(path)
        others = load_file(other)
        assert tensors.keys() == others.keys()
        assert all(tensors[name].equal(others[name]) for name in tensors), path


def train_alone(make: Make, adapter: dict[str, Any], folder: Path, **keys: Any) -> Path:
    own = {key: value for key, value in adapter.items() if key != "name"}
    finetune.train(make("alone", **{**keys, **own, "output_dir": str(folder)}))
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="plain"),
        pytest.param({"load_in_4bit": True}, id="quantized"),
        pytest.param({"method": "dpo"}, id="pairs", marks=pytest.mark.slow),
    ],
)
def test_each_adapter_is_a_run_alone(
    tiny_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """Losses, gradients, weights and optimizer states are equal; the base is read once."""
    other = {**OTHER, "datasets": [{"path": str(make_chat(tmp_path / "other.jsonl", rows=16))}]}
    adapters = [PLAIN, other, AGAIN] if "load_in_4bit" in keys else [PLAIN, other, WHOLE, AGAIN]
    if "method" in keys:
        path = str(make_pairs(tmp_path / "pairs.jsonl"))
        keys = {**keys, "datasets": [{"path": path}]}
        adapters = [PLAIN, {**OTHER, "datasets": [{"path": path, "max_samples": 12}]}]
    keys = {"use_peft": True, "export_at_end": False, **keys}
    read: list[tuple[str, ...]] = []
    parallelize = load.parallelize

    def watch(model: Any, values: Any, *rest: Any) -> Any:
        names: list[str] = []

        def count(name: str, slices: Any) -> Any:
            names.append(name)
            return values(name, slices)

        made = parallelize(model, count, *rest)
        read.append(tuple(name for name in names if ".lora_" not in name))
        return made

    monkeypatch.setattr(load, "parallelize", watch)
    finetune.train(tiny_recipe(**keys, adapters=adapters))
    assert len(read[0]) > len(adapters)
    # a head that is trained whole is read, and again after it
    expected = [(), ("lm_head.weight",), ("lm_head.weight",)] if WHOLE in adapters else None
    assert read[1:] == (expected or [()] * (len(adapters) - 1))
    for adapter in adapters:
        alone = train_alone(tiny_recipe, adapter, tmp_path / "alone" / adapter["name"], **keys)
        assert_same_run(tmp_path / "run" / adapter["name"], alone)


def make_pairs(path: Path) -> Path:
    rows = [
        {"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n * 7}."}
        for n in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
