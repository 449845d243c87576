"""Reads a run's folder and describes it for a report.

It works without torch, and while the run trains.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.methods import DEFAULT_METHOD, METHODS, RowKind
from finetune.config.reader import read_recipe
from finetune.config.schema import recipe_keys
from finetune.config.yaml_file import read_yaml
from finetune.constants import RATIO_SHARES
from finetune.errors import UserError
from finetune.files.json_files import load_json, read_json_lines, read_json_object
from finetune.files.phases import PHASE, PHASES, seconds_by_phase
from finetune.files.run_files import (
    BENCHMARKS,
    BenchmarkResult,
    benchmark_table,
    describe_models,
    find_divergence,
    losses_of,
    read_benchmarks,
)
from finetune.plan.plan import Plan, make_plan
from finetune.plan.table import memory_rows
from finetune.units import count, counted, disk_size, duration, format_compact, gib

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
DATA_REPORT = "data_report.json"
COMPLETIONS = "completions.jsonl"
RECIPE = "recipe.yaml"
SHARDING = "accelerate.yaml"
ENVIRONMENT = "environment.json"
# Beside the checkpoints' manifests.
REPORTED_FILES = (
    METRICS,
    SAMPLES,
    COMPLETIONS,
    DATA_REPORT,
    RECIPE,
    SHARDING,
    ENVIRONMENT,
    BENCHMARKS,
)
CHANGED = "the file was changed after the run wrote it"

# The values that the page computes with, and the kind that each needs: a type, a mapping of keys,
# or a list of one kind. `_keep_kinds` drops values of another kind.
NUMBER = float
OF_METRICS = dict.fromkeys(("step", "tokens", "trained_tokens", "peak_memory_bytes"), int) | {
    "idle_expert_share_by_layer": [NUMBER]
}
OF_PHASE = {"step": int, "start": int, PHASE: str, "seconds": NUMBER}
OF_RECIPE = {"model_config": {}, "model_name_or_path": str}
OF_ENVIRONMENT = {"ranks": int}
OF_SAMPLE = {"step": int}
OF_COMPLETION = {"step": int, "rewards": {}, "advantage": NUMBER, "parts": [str]}
OF_SOURCE = dict.fromkeys(
    (
        "rows_read",
        "rows_skipped",
        "examples",
        "pairs",
        "tokens",
        "trained_tokens",
        "overlong",
        "duplicates",
    ),
    int,
)
OF_DATA_REPORT = {
    "findings": [{"rows": int, "of": int, "where": [str]}],
    "sources": [OF_SOURCE],
    "eval_sources": [OF_SOURCE],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The contents of a run's folder. Lists are in the order in which they were written."""

    folder: Path
    name: str
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl, without those of phases
    phases: Mapping[int, Mapping[str, Mapping[int, float]]]  # as `seconds_by_phase` returns them
    recipe: dict[str, Any]  # with a value for every key
    sharding: dict[str, Any]  # accelerate.yaml
    environment: dict[str, Any]
    data_report: dict[str, Any]
    samples: tuple[dict[str, Any], ...]
    completions: tuple[dict[str, Any], ...]  # of completions.jsonl
    checkpoints: tuple[dict[str, Any], ...]  # the complete ones: name, step, size, files
    benchmarks: tuple[BenchmarkResult, ...]

    @property
    def method(self) -> str:
        """The recipe's method; runs of the first version have no such key."""
        method = str(self.recipe.get("method", DEFAULT_METHOD))
        return method if method in METHODS else DEFAULT_METHOD

    @property
    def rows(self) -> RowKind:
        """The kind of rows that the method reads."""
        return METHODS[self.method].rows

    def series(self, key: str) -> list[tuple[float, float]]:
        """Returns (step, value) of every line with a number under `key`."""
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
    """Reads everything that a report shows of one run.

    Raises `UserError` where `folder` is not a run's.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run's folder, such as runs/quickstart")
    if not (folder / METRICS).is_file():
        raise UserError(
            f"{folder}: no {METRICS}; it is not a run's folder, or the run has not logged yet"
        )
    lines = []
    of_phases = []
    for line in _read_metrics(folder / METRICS):
        if PHASE in line:
            of_phases.append(_keep_kinds(line, OF_PHASE))
        else:
            lines.append(_keep_kinds(line, dict.fromkeys(line, NUMBER) | OF_METRICS))
    return RunRecord(
        folder=folder,
        name=folder.resolve().name,
        lines=tuple(lines),
        phases=seconds_by_phase(of_phases),
        recipe=_keep_kinds(_read_mapping(folder / RECIPE), OF_RECIPE),
        sharding=_read_mapping(folder / SHARDING),
        environment=_keep_kinds(_read_mapping(folder / ENVIRONMENT), OF_ENVIRONMENT),
        data_report=_keep_kinds(_read_mapping(folder / DATA_REPORT), OF_DATA_REPORT),
        samples=tuple(_keep_kinds(line, OF_SAMPLE) for line in _read_json_lines(folder / SAMPLES)),
        completions=tuple(
            _keep_kinds(line, OF_COMPLETION) for line in _read_json_lines(folder / COMPLETIONS)
        ),
        checkpoints=tuple(_read_checkpoints(folder / "checkpoints")),
        benchmarks=tuple(read_benchmarks(folder)),
    )


def plan_run(run: RunRecord) -> Plan | None:
    """Plans `run` from its folder; None where its model, recipe or layout can no longer be read."""
    ranks = run.environment.get("ranks")
    if not isinstance(ranks, int):
        return None
    try:
        recipe = read_recipe(str(run.folder / RECIPE))
        configs = sorted(run.folder.glob("checkpoints/step-*/model/config.json"))
        if configs:  # a checkpoint has the model's config; its folder or the hub may be gone
            config = _read_mapping(configs[-1])
            model = replace(
                recipe.model, model_name_or_path=None, model_config=config, drop_vision=False
            )
            recipe = replace(recipe, model=model)
        sharding = read_sharding(str(run.folder / SHARDING), None, {"WORLD_SIZE": str(ranks)})
        on_cpu = str(run.environment.get("device", "")).startswith("CPU")
        return make_plan(recipe, sharding, ranks, on_cpu=on_cpu)
    except UserError:
        return None


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_json_lines(path), start=1):
        if line is None:
            raise UserError(f"{path}:{number}: not a JSON object; {CHANGED}")
        yield line


def _read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl.

    Raises `UserError` for a line that occurs twice.
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(_read_json_lines(path), start=1):
        first = seen.setdefault(json.dumps(line, sort_keys=True), number)
        if first != number:
            raise UserError(
                f"{path}:{number}: says again what line {first} says; {CHANGED}: remove the line"
            )
        yield line


def _read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; empty where there is no file."""
    if not path.is_file():
        return {}
    if path.suffix == ".json":
        return load_json(path, CHANGED)
    return read_yaml(path)


def _keep_kinds(value: Any, kind: Any) -> Any:
    """Returns `value` without the parts that are not of the kind that `kind` names for them.

    Returns None where `value` itself is of another kind.
    """
    if isinstance(kind, dict):
        return _keep_keys(value, kind) if isinstance(value, dict) else None
    if isinstance(kind, list):
        listed = value if isinstance(value, list) else []
        kept = [_keep_kinds(inner, kind[0]) for inner in listed]
        return [inner for inner in kept if inner is not None]
    if isinstance(value, bool):
        return None
    if kind is NUMBER:
        if isinstance(value, float) and abs(value) > 1e300:
            return math.copysign(math.inf, value)  # results computed with it would be infinite
        return value if isinstance(value, int | float) else None
    if kind is int and isinstance(value, int) and abs(value) >= 2**63:
        return None
    return value if isinstance(value, kind) else None


def _keep_keys(value: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Returns a mapping whose keys in `kinds` are of these kinds; other keys stay."""
    kept = {}
    for key, inner in value.items():
        if key in kinds:
            inner = _keep_kinds(inner, kinds[key])
            if inner is None:
                continue
        kept[key] = inner
    return kept


def _read_checkpoints(folder: Path) -> Iterator[dict[str, Any]]:
    for manifest in sorted(folder.glob("step-*/manifest.json")):
        files = read_json_object(manifest).get("files")
        if files is None:  # the checkpoint is damaged; `finetune checkpoints` says so
            continue
        sizes = []
        if isinstance(files, dict):
            sizes = [_size_of(entry) for entry in files.values()]
        digits = manifest.parent.name.removeprefix("step-")
        if digits.isdecimal() and len(digits) < 16:
            size = disk_size(sum(sizes))
            yield {
                "name": manifest.parent.name,
                "step": int(digits),
                "size": size,
                "files": len(sizes),
            }


def _size_of(entry: Any) -> int:
    if isinstance(entry, dict):
        size = entry.get("size_bytes", entry.get("size", 0))
    else:
        size = 0
    return size if isinstance(size, int) else 0


MAX_SAMPLES = 20
# The parts of a data report that the page shows as a list or table of its own.
DATA_TABLES = ("findings", "sources", "eval_sources")
# Counts of a data report, and what the page calls them. It leaves out those that are 0: most are,
# under any one method.
COUNT_NAMES = {
    "pairs": "pairs",
    "desirable": "answers rated good",
    "undesirable": "answers rated bad",
    "held out examples": "held-out examples",
    "held out groups pairs": "held-out pairs",
    "held out groups desirable": "held-out answers rated good",
    "held out groups undesirable": "held-out answers rated bad",
}


class Tile(NamedTuple):
    """One number of the summary."""

    name: str
    value: str
    note: str = ""


def describe_run(
    run: RunRecord, plan: Plan | None, columns: Sequence[str], *, live: bool
) -> dict[str, Any]:
    """Describes one run for the template.

    Args:
        run: What its folder holds.
        plan: Its plan; None where it cannot be made.
        columns: The columns of the table of its data sources.
        live: Whether the page is open while the run trains.
    """
    tiles = list(_make_tiles(run, live=live))
    questions = [sample for sample in run.samples if sample.get("expected")]
    prompts = [sample for sample in run.samples if not sample.get("expected")]
    findings, facts = _describe_data(run.data_report)
    return {
        "name": run.name,
        "tiles": tiles,
        "by_name": {tile.name: tile for tile in tiles},
        "subtitle": describe_in_one_line(run),
        "diverged": find_divergence(losses_of(run.lines)),
        "questions": _pair_answers(questions),
        "prompts": _pair_answers(prompts),
        "sampled": _page_completions(run.completions),
        "ratios": _ratio_histogram(run),
        "benchmarks": benchmark_table(run.benchmarks) if run.benchmarks else None,
        "benchmarks_note": describe_models(run.benchmarks),
        "findings": findings,
        "data": facts,
        "sources": _list_sources(run.data_report, columns),
        "time": _table_of_phases(run),
        "memory": memory_rows(plan.phases) if plan else [],
        "memory_note": _note_memory(plan),
        "recipe": [
            (key, format_value(value), format_value(default))
            for key, (value, default) in run.changed_keys().items()
        ],
        "whole_recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True),
        "checkpoints": run.checkpoints,
        "environment": list(_flatten(run.environment)),
    }


def _list_sources(report: Mapping[str, Any], columns: Sequence[str]) -> list[list[str]]:
    """The rows of the table of data sources: a source's name, then its numbers."""
    rows = []
    for source in [*report.get("sources", []), *report.get("eval_sources", [])]:
        name = Path(str(source.get("path", ""))).name
        rows.append([name, *(f"{source.get(column, 0):,}" for column in columns)])
    return rows


def _note_memory(plan: Plan | None) -> str:
    """The note below the table of planned memory."""
    if plan is None or not plan.process_bytes:
        return "peak of each phase"
    return f"one rank; its process adds about {gib(plan.process_bytes)} GiB"


def describe_in_one_line(run: RunRecord) -> str:
    """The model, layout and machine in one line."""
    model = run.recipe.get("model_name_or_path") or (run.recipe.get("model_config") or {}).get(
        "model_type"
    )
    ranks = run.environment.get("ranks")
    parts = [
        str(model) if model else None,
        _describe_trained(run.recipe) if model else None,
        None if run.method == DEFAULT_METHOD else run.method,
        run.environment.get("layout"),
        counted(ranks, "rank") if ranks else None,
        run.environment.get("device"),
    ]
    return " · ".join(str(part) for part in parts if part)


def _describe_trained(recipe: Mapping[str, Any]) -> str:
    if recipe.get("use_peft"):
        return "LoRA"
    is_partial = recipe.get("trainable_modules") or recipe.get("frozen_modules")
    return f"{'some' if is_partial else 'all'} parameters trained"


def _make_tiles(run: RunRecord, *, live: bool) -> Iterator[Tile]:
    """Yields the numbers of the summary that the run has."""
    done = run.last("step") or 0
    yield Tile("Steps", f"{done:,}", " · ".join(_describe_progress(run, done, live=live)))
    yield from _smoothed_tile(run, "reward", "Reward", format_compact)
    yield from _change_tiles(run, {"eval_reward": "Held-out reward"}, format_compact)
    yield from _smoothed_tile(run, "loss", "Training loss", "{:.4f}".format)
    yield from _change_tiles(run, {"eval_loss": "Held-out loss"}, "{:.4f}".format)
    if run.last("rewards/accuracies") is not None:
        yield _make_pairs_tile(run)
    yield from _change_tiles(run, {"exact_match": "Answered exactly"}, "{:.0%}".format)
    yield from _change_tiles(run, {"eval_accuracy": "Held-out accuracy"}, "{:.1%}".format)
    yield from _change_tiles(run, {"eval_recall@1": "Held-out recall@1"}, "{:.1%}".format)
    yield from _change_tiles(
        run, {key: key.partition("/")[2] for key in list_metrics([run])}, format_compact
    )
    yield from _make_resource_tiles(run)


def _make_pairs_tile(run: RunRecord) -> Tile:
    """The share of pairs in order; held-out ones where the run has them."""
    is_held_out = run.last("eval_rewards/accuracies") is not None
    name = "Held-out pairs in order" if is_held_out else "Pairs in order"
    prefix = "eval_" if is_held_out else ""
    margin = format_compact(run.last(f"{prefix}rewards/margins") or 0.0)
    in_order = run.last(f"{prefix}rewards/accuracies")
    return Tile(name, f"{in_order:.0%}", f"reward margin {margin}")


def _make_resource_tiles(run: RunRecord) -> Iterator[Tile]:
    """Yields what the run has read and used: tokens, time, experts, memory."""
    if run.last("tokens"):
        trained = run.last("trained_tokens")
        note = f"{count(trained)} trained" if trained else ""
        yield Tile("Tokens read", count(run.last("tokens")), note)
    speeds = [value for _, value in run.series("tokens_per_second")]
    if speeds:
        mfu = [value for _, value in run.series("mfu")]
        speed = format_compact(statistics.median(speeds))
        yield Tile("Tokens/s", speed, f"{statistics.median(mfu):.0%} MFU" if mfu else "median")
    idle = run.last("idle_expert_share_by_layer")
    if isinstance(idle, list) and idle:
        worst = f"layer {idle.index(max(idle))} of {len(idle)} mixtures"
        busiest = f"busiest expert {run.last('largest_expert_share'):.0%}"
        yield Tile("Idle experts", f"{max(idle):.0%}", f"{worst}; {busiest}")
    if run.last("peak_memory_bytes"):
        peak = max(value for _, value in run.series("peak_memory_bytes"))
        yield Tile("Peak memory", f"{gib(peak)} GiB", "first rank")


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Averages each value with its neighbors, which weigh `weight` ** distance.

    It averages over both sides, so that the line does not lag behind a falling loss. It ignores
    values that are not finite.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    before = _running_sums(values, weight)
    after = _running_sums(values[::-1], weight)[::-1]
    smoothed = []
    for value, (left, left_weight), (right, right_weight) in zip(
        values, before, after, strict=True
    ):
        own = 1.0 if math.isfinite(value) else 0.0  # both sums include the value
        total = left_weight + right_weight - own
        counted_twice = value if own else 0.0
        smoothed.append(round((left + right - counted_twice) / total, 9) if total else value)
    return smoothed


def _running_sums(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """Returns for each value (weighted sum of the values up to it, sum of their weights)."""
    total = 0.0
    weights = 0.0
    sums = []
    for value in values:
        finite = math.isfinite(value)
        total = weight * total + (value if finite else 0.0)
        weights = weight * weights + finite
        sums.append((total, weights))
    return sums


def smoothing_weight(count: int) -> float:
    """The weight with which `smooth` averages about a fortieth of `count` values on each side."""
    return 1 - 1 / max(1.0, count / 40)


RATE_LINES = 20  # the newest lines of metrics, which give the speed for the time left


def _describe_progress(run: RunRecord, done: int, *, live: bool) -> Iterator[str]:
    """Says how many steps the whole run has, its epochs, and if `live` the time that is left.

    The time does not include evaluations and saves.
    """
    steps = _count_steps(run)
    if steps is not None and steps >= done:
        yield f"of {steps:,}"
    if epoch := run.last("epoch"):
        yield f"{epoch:.2f} epochs"
    seconds = _seconds_of_step(run)
    if live and seconds is not None and steps is not None and steps > done:
        yield f"{timedelta(seconds=round((steps - done) * seconds))} left"


def _count_steps(run: RunRecord) -> int | None:
    """The number of steps that the recipe asks for; None before it is known."""
    steps = run.recipe.get("max_steps")
    epochs = run.recipe.get("num_train_epochs")
    if isinstance(steps, int):
        return steps
    line = next((line for line in run.lines if line.get("epoch") and line.get("step")), None)
    if line is None or not isinstance(epochs, int | float):
        return None
    steps_an_epoch = round(float(line["step"]) / float(line["epoch"]))
    return math.ceil(epochs * steps_an_epoch)


def _seconds_of_step(run: RunRecord) -> float | None:
    """The mean seconds of the newest steps; None before the second line of metrics."""
    keys = ("step", "tokens", "tokens_per_second")
    lines = [line for line in run.lines if all(line.get(key) for key in keys)][-RATE_LINES:]
    pairs = list(pairwise(lines))
    seconds = sum(
        (line["tokens"] - before["tokens"]) / line["tokens_per_second"] for before, line in pairs
    )
    return seconds / (lines[-1]["step"] - lines[0]["step"]) if pairs and seconds > 0 else None


def _smoothed_tile(
    run: RunRecord, key: str, name: str, form: Callable[[float], str]
) -> Iterator[Tile]:
    """A tile with the end and the beginning of the smoothed line: single steps vary too much."""
    values = [value for _, value in run.series(key)]
    if values:
        values = smooth(values, smoothing_weight(len(values)))
        yield Tile(name, form(values[-1]), f"from {form(values[0])}")


def _change_tiles(
    run: RunRecord, names: Mapping[str, str], form: Callable[[float], str]
) -> Iterator[Tile]:
    """A tile for each key that the run logged, with its last and its first value.

    names: Metric key -> the tile's name.
    """
    for key, name in names.items():
        if (last := run.last(key)) is not None:
            yield Tile(name, form(last), f"from {form(run.first(key))}")


def _pair_answers(samples: Sequence[dict[str, Any]]) -> tuple[list[dict[str, str]], str]:
    """Returns (each prompt with its first and last answer, a note on their steps)."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(str(sample.get("prompt", "")), []).append(sample)
    shown = []
    for prompt, answers in list(by_prompt.items())[:MAX_SAMPLES]:
        expected = str(answers[-1].get("expected") or "")
        if len(answers) > 1 or answers[0].get("step") == 0:
            before = answers[0]
        else:
            before = None
        # A run that still trains may have one answer.
        after = answers[-1] if answers[-1] is not before else None
        shown.append(
            {
                "prompt": prompt,
                "expected": expected,
                **_grade_answer("before", before),
                **_grade_answer("after", after),
            }
        )
    hidden = len(by_prompt) - len(shown)
    steps = sorted({sample.get("step", 0) for sample in samples})
    notes = []
    if len(steps) > 1:
        notes = [f"at steps {steps[0]} and {steps[-1]}"]
    notes += [f"the first {len(shown)} of {len(by_prompt)}"] if hidden > 0 else []
    return shown, "; ".join(notes)


SHOWN_AGES = 6  # generations by which the weights that sampled a token may be behind


def _ratio_histogram(run: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
    """The table of probability ratios: a head, then a row for each range of ratios.

    A cell is (text, length of its bar): the percentage of tokens whose ratio is in the range.
    Columns are the first and the last tenth of the run, the whole run, and the tokens sampled by
    weights of each age. The table is empty where the method samples nothing.
    """
    columns = _list_ratio_columns(run)
    if not columns:
        return []
    rows = []
    for place, name in enumerate(RATIO_SHARES):
        means = [100 * sum(values[place]) / len(values[place]) for _, values in columns]
        ratios = name.rpartition("/")[2].replace("-", " to ")
        rows.append((ratios, [(f"{mean:.3g}", round(mean, 2)) for mean in means]))
    return [("Ratio", [(head, 0.0) for head, _ in columns]), *rows]


def _list_ratio_columns(run: RunRecord) -> list[tuple[str, list[list[float]]]]:
    """Returns (head, shares [ranges][steps]) of each column; empty where none were logged."""
    whole = _read_shares(run, "")
    if not whole:
        return []
    tenth = max(1, len(whole[0]) // 10)
    columns = [
        ("First tenth", [values[:tenth] for values in whole]),
        ("Last tenth", [values[-tenth:] for values in whole]),
        ("Whole run", whole),
    ]
    for age in range(SHOWN_AGES):
        shares = _read_shares(run, f"staleness/{age}/")
        if shares:
            columns.append((f"{age} behind", shares))
    return columns


def _read_shares(run: RunRecord, prefix: str) -> list[list[float]]:
    """Returns the shares of tokens [ranges][steps]; empty where a range is missing."""
    series = [[value for _, value in run.series(prefix + name)] for name in RATIO_SHARES]
    count = min(map(len, series))
    return [values[:count] for values in series] if count else []


SHOWN_STARTS = 3  # the newest starts of a run that was resumed


def _table_of_phases(run: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
    """The table of seconds: a head, then a row for each phase with a cell for each start.

    The table is empty where no seconds were logged.
    """
    shown = sorted(run.phases)[-SHOWN_STARTS:]
    starts = [run.phases[start] for start in shown]
    phases = [phase for phase in PHASES if any(phase in of_start for of_start in starts)]
    if not phases:
        return []
    heads = [f"Start {start}" for start in shown] if len(run.phases) > 1 else ["Seconds"]
    totals = [sum(by_step.values()) for of_start in starts for by_step in of_start.values()]
    rows = []
    for phase in phases:
        cells = [_cell_of_phase(of_start.get(phase, {}), max(totals)) for of_start in starts]
        rows.append((PHASES[phase], cells))
    return [("Phase", [(head, 0.0) for head in heads]), *rows]


def _cell_of_phase(by_step: Mapping[int, float], longest: float) -> tuple[str, float]:
    """A phase's seconds as (text, length of its bar in percent of `longest`).

    by_step: The seconds at each step where the phase occurred.
    """
    if not by_step:
        return "–", 0.0
    seconds = sum(by_step.values())
    if len(by_step) > 1:
        at_most = f" in {len(by_step)}, at most {duration(max(by_step.values()))}"
    else:
        at_most = ""
    share = 100 * seconds / longest if 0 < longest < math.inf else 0.0
    return duration(seconds) + at_most, round(share, 2)


def _page_completions(lines: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Returns (step, its completions) of at most MAX_SAMPLES steps, spread over the run."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_step.setdefault(line.get("step", 0), []).append(line)
    steps = sorted(by_step)
    if len(steps) > MAX_SAMPLES:
        stride = (len(steps) - 1) / (MAX_SAMPLES - 1)
        steps = [steps[round(stride * i)] for i in range(MAX_SAMPLES)]
    return [(step, [_describe_completion(line) for line in by_step[step]]) for step in steps]


def _describe_completion(line: Mapping[str, Any]) -> dict[str, Any]:
    rewards = ", ".join(
        f"{name} {'–' if value is None else _format_number(value)}"
        for name, value in (line.get("rewards") or {}).items()
    )
    advantage = line.get("advantage")
    texts: dict[str, Any] = {
        key: str(line.get(key, "")) for key in ("prompt", "completion", "ended")
    }
    # the model's and the tools' parts in turn
    texts["parts"] = line.get("parts") or [texts["completion"]]
    return texts | {
        "rewards": rewards,
        "advantage": "" if advantage is None else f"{advantage:+.2f}",
    }


def _grade_answer(name: str, sample: dict[str, Any] | None) -> dict[str, str]:
    """An answer under `name`, and its CSS class: right, wrong, or empty without an expectation."""
    if sample is None:
        return {name: "", f"{name}_class": ""}
    text = str(sample.get("answer", ""))
    expected = str(sample.get("expected") or "").strip()
    grade = ""
    if expected:
        grade = "right" if text.strip() == expected else "wrong"
    return {name: text, f"{name}_class": grade}


def _describe_data(report: dict[str, Any]) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """Returns (the findings of a data report, the rest of it as names and values)."""
    findings = [_describe_finding(finding) for finding in report.get("findings", [])]
    facts = _flatten({key: value for key, value in report.items() if key not in DATA_TABLES})
    return findings, [
        (COUNT_NAMES.get(name, name), value)
        for name, value in facts
        if name not in COUNT_NAMES or value != "0"
    ]


def _describe_finding(finding: Mapping[str, Any]) -> dict[str, str]:
    rows = f"{finding.get('rows', 0):,} of {counted(finding.get('of', 0), 'row')}"
    where = f" ({', '.join(finding['where'])})" if finding.get("where") else ""
    text = f"in {rows} {finding.get('what', '')}{where}"
    return {"severity": str(finding.get("severity", "note")), "text": text}


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (name, value) of nested mappings; a name has those around it: `lengths median`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value, start=1):
            yield from _flatten(item, f"{name} {number}")
    elif value not in (None, []):
        yield name, " ".join(map(str, value)) if isinstance(value, list) else _format_number(value)


def _format_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def format_value(value: Any) -> str:
    """A recipe's value as YAML, without keys that are null."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _as_yaml(_drop_nulls(value))
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _as_yaml([_drop_nulls(item) for item in value])
    return json.dumps(value, ensure_ascii=False)


def _drop_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if inner is not None}


def _as_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).strip()


def list_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """The keys under which the runs logged the recipes' own `metrics`."""
    return list(
        dict.fromkeys(
            key for run in runs for line in run.lines for key in line if key.startswith("metrics/")
        )
    )
