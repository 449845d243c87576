"""What a run's folder holds, and its plan; read without torch, also while it runs or after it was killed."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.accelerate_file import read_sharding
from finetune.config.methods import DEFAULT_METHOD, METHODS, RowKind
from finetune.config.reader import read_recipe
from finetune.config.schema import recipe_keys
from finetune.config.yaml_file import read_yaml
from finetune.errors import UserError
from finetune.files.run_json import (
    BENCHMARKS,
    BenchmarkResult,
    load_json,
    read_benchmarks,
    read_json_lines,
    read_json_object,
)
from finetune.plan.plan import Plan, make_plan
from finetune.units import disk_size

METRICS, SAMPLES, DATA_REPORT = "metrics.jsonl", "samples.jsonl", "data_report.json"
COMPLETIONS = "completions.jsonl"
RECIPE, SHARDING, ENVIRONMENT = "recipe.yaml", "accelerate.yaml", "environment.json"
# Beside the checkpoints' manifests.
REPORTED_FILES = (METRICS, SAMPLES, COMPLETIONS, DATA_REPORT, RECIPE, SHARDING, ENVIRONMENT, BENCHMARKS)
CHANGED = "the file was changed after the run wrote it"

# What the page computes with, by the kind that it needs: a type, a mapping of keys, or a list of one kind.
NUMBER = float
OF_METRICS = dict.fromkeys(("step", "tokens", "trained_tokens", "peak_memory_bytes"), int) | {
    "idle_expert_share_by_layer": [NUMBER]
}
OF_RECIPE = {"model_config": {}, "model_name_or_path": str}
OF_ENVIRONMENT = {"ranks": int}
OF_SAMPLE = {"step": int}
OF_COMPLETION = {"step": int, "rewards": {}, "advantage": NUMBER}
OF_SOURCE = dict.fromkeys(
    ("rows_read", "rows_skipped", "examples", "pairs", "tokens", "trained_tokens", "overlong", "duplicates"), int
)
OF_DATA_REPORT = {
    "findings": [{"rows": int, "of": int, "where": [str]}],
    "sources": [OF_SOURCE],
    "eval_sources": [OF_SOURCE],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run's folder holds. Lists are in the order in which they were written."""

    folder: Path
    name: str
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl
    recipe: dict[str, Any]  # every key filled in
    sharding: dict[str, Any]  # of accelerate.yaml
    environment: dict[str, Any]
    data_report: dict[str, Any]
    samples: tuple[dict[str, Any], ...]
    completions: tuple[dict[str, Any], ...]  # of completions.jsonl
    checkpoints: tuple[dict[str, Any], ...]  # published ones, by their manifests: name, step, size, files
    benchmarks: tuple[BenchmarkResult, ...]

    @property
    def method(self) -> str:
        """The recipe's method; runs of earlier versions had only one."""
        method = str(self.recipe.get("method", DEFAULT_METHOD))
        return method if method in METHODS else DEFAULT_METHOD

    @property
    def rows(self) -> RowKind:
        """What the method reads of the data."""
        return METHODS[self.method].rows

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every line with a number under `key`."""
        return [
            (float(line["step"]), float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), int | float) and 0 <= line.get("step", -1) < 2**53
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
    """Reads everything that a report shows of one run. Raises `UserError` where `folder` is not a run's."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run's folder, such as runs/quickstart")
    if not (folder / METRICS).is_file():
        raise UserError(f"{folder}: no {METRICS}; it is not a run's folder, or the run has not logged yet")
    return RunRecord(
        folder=folder,
        name=folder.resolve().name,
        lines=tuple(
            _keep_kinds(line, dict.fromkeys(line, NUMBER) | OF_METRICS) for line in _read_json_lines(folder / METRICS)
        ),
        recipe=_keep_kinds(_read_mapping(folder / RECIPE), OF_RECIPE),
        sharding=_read_mapping(folder / SHARDING),
        environment=_keep_kinds(_read_mapping(folder / ENVIRONMENT), OF_ENVIRONMENT),
        data_report=_keep_kinds(_read_mapping(folder / DATA_REPORT), OF_DATA_REPORT),
        samples=tuple(_keep_kinds(line, OF_SAMPLE) for line in _read_json_lines(folder / SAMPLES)),
        completions=tuple(_keep_kinds(line, OF_COMPLETION) for line in _read_json_lines(folder / COMPLETIONS)),
        checkpoints=tuple(_read_checkpoints(folder / "checkpoints")),
        benchmarks=tuple(read_benchmarks(folder)),
    )


def plan_run(run: RunRecord) -> Plan | None:
    """The plan of `run`, made from its folder; None where its model, recipe or layout can no longer be read."""
    ranks = run.environment.get("ranks")
    if not isinstance(ranks, int):
        return None
    try:
        recipe = read_recipe(str(run.folder / RECIPE))
        configs = sorted(run.folder.glob("checkpoints/step-*/model/config.json"))
        if configs:  # the trained model's own, which needs no hub
            config = _read_mapping(configs[-1])
            model = replace(recipe.model, model_name_or_path=None, model_config=config, drop_vision=False)
            recipe = replace(recipe, model=model)
        sharding = read_sharding(str(run.folder / SHARDING), None, {"WORLD_SIZE": str(ranks)})
        return make_plan(recipe, sharding, ranks, on_cpu=str(run.environment.get("device", "")).startswith("CPU"))
    except UserError:
        return None


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_json_lines(path), start=1):
        if line is None:
            raise UserError(f"{path}:{number}: not a JSON object; {CHANGED}")
        yield line


def _read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; empty where there is no file."""
    if not path.is_file():
        return {}
    return load_json(path, CHANGED) if path.suffix == ".json" else read_yaml(path)


def _keep_kinds(value: Any, kind: Any) -> Any:
    """`value` without those parts of it that are of another kind than `kind` names; None where it is itself."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return None
        kept = {key: _keep_kinds(inner, kind[key]) if key in kind else inner for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner is not None or key not in kind}
    if isinstance(kind, list):
        found = [_keep_kinds(inner, kind[0]) for inner in value] if isinstance(value, list) else []
        return [inner for inner in found if inner is not None]
    wanted = int | float if kind is NUMBER else kind
    if kind is NUMBER and isinstance(value, float) and abs(value) > 1e300:
        return math.copysign(math.inf, value)  # whatever is computed with it would be infinite
    is_right = isinstance(value, wanted) and not isinstance(value, bool)
    return value if is_right and (kind is not int or abs(value) < 2**63) else None


def _read_checkpoints(folder: Path) -> Iterator[dict[str, Any]]:
    for manifest in sorted(folder.glob("step-*/manifest.json")):
        files = read_json_object(manifest).get("files")
        if files is None:  # a damaged checkpoint, which `finetune checkpoints` names; the report shows the others
            continue
        sizes = [_size_of(entry) for entry in files.values()] if isinstance(files, dict) else []
        digits = manifest.parent.name.removeprefix("step-")
        if digits.isdecimal() and len(digits) < 16:
            size = disk_size(sum(sizes))
            yield {"name": manifest.parent.name, "step": int(digits), "size": size, "files": len(sizes)}


def _size_of(entry: Any) -> int:
    size = entry.get("size_bytes", entry.get("size", 0)) if isinstance(entry, dict) else 0
    return size if isinstance(size, int) else 0
