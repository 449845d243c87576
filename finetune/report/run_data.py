"""What a run's folder holds, read without torch. A run that is still going, or that was killed, can be read too."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.json_lines import read_json_lines
from finetune.recipe.keys import recipe_keys

METRICS, SAMPLES, DATA_REPORT = "metrics.jsonl", "samples.jsonl", "data_report.json"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One published checkpoint: its step, and its size by the manifest."""

    name: str
    step: int
    size_bytes: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as its folder tells it. Lists are in the order in which they were written."""

    folder: Path
    name: str
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl
    recipe: dict[str, Any]  # every key filled in
    sharding: dict[str, Any]  # of accelerate.yaml
    environment: dict[str, Any]
    data_report: dict[str, Any]
    samples: tuple[dict[str, Any], ...]
    checkpoints: tuple[SavedCheckpoint, ...]

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every line that has a number under `key`."""
        return [
            (float(line["step"]), float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), int | float) and isinstance(line.get("step"), int | float)
        ]

    def last(self, key: str) -> Any:
        """The newest value of `key`; None where no line has it."""
        return next((line[key] for line in reversed(self.lines) if line.get(key) is not None), None)

    def first(self, key: str) -> Any:
        """The oldest value of `key`; None where no line has it."""
        return next((line[key] for line in self.lines if line.get(key) is not None), None)

    def changed_keys(self) -> dict[str, tuple[Any, Any]]:
        """The recipe's keys that differ from the defaults: key -> (value, default)."""
        known = recipe_keys()
        defaults = {name: json.loads(json.dumps(key.default)) for name, key in known.items()}
        return {
            name: (value, defaults[name])
            for name, value in self.recipe.items()
            if name in defaults and value != defaults[name]
        }


def read_run(folder: Path) -> RunRecord:
    """Everything that a report shows of one run. Raises `UserError` where `folder` is not a run's."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run's folder, such as runs/quickstart")
    if not (folder / METRICS).is_file():
        raise UserError(f"{folder}: holds no {METRICS}, so it is not a run's folder or the run has not logged yet")
    return RunRecord(
        folder=folder,
        name=folder.resolve().name,
        lines=tuple(_json_lines(folder / METRICS)),
        recipe=_yaml(folder / "recipe.yaml"),
        sharding=_yaml(folder / "accelerate.yaml"),
        environment=_json(folder / "environment.json"),
        data_report=_json(folder / DATA_REPORT),
        samples=tuple(_json_lines(folder / SAMPLES)),
        checkpoints=tuple(_checkpoints(folder / "checkpoints")),
    )


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_json_lines(path), start=1):
        if line is None:
            raise UserError(f"{path}:{number}: not a JSON object; the file was changed after the run wrote it")
        yield line


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path}: not JSON; the file was changed after the run wrote it") from None
    return found if isinstance(found, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        raise UserError(f"{path}: not YAML; the file was changed after the run wrote it") from None
    return found if isinstance(found, dict) else {}


def _checkpoints(folder: Path) -> Iterator[SavedCheckpoint]:
    for manifest in sorted(folder.glob("step-*/manifest.json")):
        try:
            files = _json(manifest).get("files")
        except UserError:  # a damaged one: `finetune checkpoints` names it, and the report is about the rest
            continue
        sizes = [_size(entry) for entry in files.values()] if isinstance(files, dict) else []
        digits = manifest.parent.name.removeprefix("step-")
        if digits.isdigit():
            yield SavedCheckpoint(manifest.parent.name, int(digits), sum(sizes), len(sizes))


def _size(entry: Any) -> int:
    size = entry.get("size_bytes", entry.get("size", 0)) if isinstance(entry, dict) else 0
    return size if isinstance(size, int) else 0
