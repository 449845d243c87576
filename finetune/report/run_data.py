"""Reads a run's folder, and describes the run for the template of the report.

It works while the run trains. Imports no torch.
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
from finetune.config.schema import Model, Recipe, recipe_keys
from finetune.config.yaml_file import read_yaml
from finetune.constants import CONFIG_FILE, RATIO_SHARES
from finetune.errors import UserError
from finetune.files.json_files import load_json, read_json_lines, read_json_object
from finetune.files.network import find_local_folder
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
from finetune.plan.architecture import WHOLE, find_config
from finetune.plan.plan import Plan, make_plan
from finetune.plan.table import memory_rows
from finetune.units import counted, disk_size, duration, format_compact, format_count, gib

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
DATA_REPORT = "data_report.json"
COMPLETIONS = "completions.jsonl"
RECIPE = "recipe.yaml"
SHARDING = "accelerate.yaml"
ENVIRONMENT = "environment.json"
# files of a run's folder that the report shows, in addition to the checkpoints' manifests
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

# The kinds of the values that the report computes with, by key. A kind is a type, a mapping of keys
# to kinds, or a list of one kind. `_keep_kinds` drops values of a wrong kind.
NUMBER = float  # as a kind: an int or a float
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
        "images",
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
    """The contents of a run's folder. Lines of a file are in the order of the file."""

    folder: Path
    name: str  # the folder's name
    lines: tuple[dict[str, Any], ...]  # metrics.jsonl without the lines of phases
    phases: Mapping[int, Mapping[str, Mapping[int, float]]]  # as `seconds_by_phase` returns them
    recipe: dict[str, Any]  # recipe.yaml, with a value for every key
    sharding: dict[str, Any]  # accelerate.yaml
    environment: dict[str, Any]
    data_report: dict[str, Any]
    samples: tuple[dict[str, Any], ...]  # samples.jsonl
    completions: tuple[dict[str, Any], ...]  # completions.jsonl
    # the complete ones, each with the keys name, step, size (as text) and files (a number)
    checkpoints: tuple[dict[str, Any], ...]
    benchmarks: tuple[BenchmarkResult, ...]

    @property
    def method(self) -> str:
        """The recipe's method; the default one if the recipe names no known method.

        Recipes of runs of the first version have no key `method`.
        """
        method = str(self.recipe.get("method", DEFAULT_METHOD))
        return method if method in METHODS else DEFAULT_METHOD

    @property
    def rows(self) -> RowKind:
        """The kind of rows that the method reads."""
        return METHODS[self.method].rows

    def series(self, key: str) -> list[tuple[float, float]]:
        """Returns (step, value) of every line of metrics with a number under `key`."""
        return [
            (float(line["step"]), float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), int | float) and 0 <= line.get("step", -1) < 2**53
        ]

    def last(self, key: str) -> Any:
        """Returns the newest value of `key` in the metrics; None if no line has the key."""
        return next((line[key] for line in reversed(self.lines) if line.get(key) is not None), None)

    def first(self, key: str) -> Any:
        """Returns the oldest value of `key` in the metrics; None if no line has the key."""
        return next((line[key] for line in self.lines if line.get(key) is not None), None)

    def changed_keys(self) -> dict[str, tuple[Any, Any]]:
        """Returns {key: (value, default)} of the recipe's keys that differ from their defaults."""
        known = recipe_keys()
        # through JSON, because tuples are lists in the run's recipe
        defaults = {name: json.loads(json.dumps(key.default)) for name, key in known.items()}
        return {
            name: (value, defaults[name])
            for name, value in self.recipe.items()
            if name in defaults and value != defaults[name]
        }


def read_run(folder: Path) -> RunRecord:
    """Reads the files of a run's folder that the report shows.

    Raises `UserError` if `folder` is not a run's, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run's folder, such as runs/quickstart")
    if not (folder / METRICS).is_file():
        raise UserError(
            f"{folder}: no {METRICS}; it is not a run's folder, or the run has not logged yet"
        )
    lines = []
    phase_lines = []
    for line in _read_metrics(folder / METRICS):
        if PHASE in line:
            phase_lines.append(_keep_kinds(line, OF_PHASE))
        else:
            lines.append(_keep_kinds(line, dict.fromkeys(line, NUMBER) | OF_METRICS))
    return RunRecord(
        folder=folder,
        name=folder.resolve().name,
        lines=tuple(lines),
        phases=seconds_by_phase(phase_lines),
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
    """Plans the run from its folder.

    Returns None if the number of ranks is unknown, if its model, recipe or layout cannot be read,
    or if a rule needs the model's files and they are not on this machine.
    """
    ranks = run.environment.get("ranks")
    if not isinstance(ranks, int):
        return None
    try:
        recipe = read_recipe(str(run.folder / RECIPE))
        recipe = replace(recipe, model=_find_readable_model(run, recipe.model))
        sharding = read_sharding(str(run.folder / SHARDING), None, {"WORLD_SIZE": str(ranks)})
        on_cpu = str(run.environment.get("device", "")).startswith("CPU")
        images = _find_images(run, recipe)
        return make_plan(recipe, sharding, ranks, on_cpu=on_cpu, images=images)
    except UserError:
        return None


def _find_readable_model(run: RunRecord, model: Model) -> Model:
    """Returns `model` if its config is on this machine, else with the config of a checkpoint.

    The model's own config comes first, because rules refuse what needs files, such as a reference,
    for a model that has only a config. Returns `model` too if the run has no checkpoint.
    """
    name = model.model_name_or_path
    folder = None if name is None else find_local_folder(name, model.model_revision)
    configs = sorted(run.folder.glob("checkpoints/step-*/model/config.json"))
    if not configs or (folder is not None and (folder / CONFIG_FILE).is_file()):
        return model
    config = _read_mapping(configs[-1])
    return replace(model, model_name_or_path=None, model_config=config, drop_vision=False)


def list_data_sources(run: RunRecord) -> list[Mapping[str, Any]]:
    """Lists what the run's data report says of each source, in training and held out."""
    report = run.data_report
    return [*report.get("sources", ()), *report.get("eval_sources", ())]


def _find_images(run: RunRecord, recipe: Recipe) -> str | None:
    """Returns the model_type of the whole model if rows of the run hold images; else None.

    Raises `UserError` if the model's config cannot be read.
    """
    if not any(source.get("images") for source in list_data_sources(run)):
        return None
    config, _ = find_config(recipe.model)
    whole = config.get(WHOLE) or config
    return str(whole["model_type"])


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the object on each line of a file. Raises `UserError` for a line without one."""
    for number, line in enumerate(read_json_lines(path), start=1):
        if line is None:
            raise UserError(f"{path}:{number}: not a JSON object; {CHANGED}")
        yield line


def _read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of metrics.jsonl. Raises `UserError` for a line that occurs twice."""
    first_numbers: dict[str, int] = {}  # a line as JSON -> the number of the first such line
    for number, line in enumerate(_read_json_lines(path), start=1):
        first = first_numbers.setdefault(json.dumps(line, sort_keys=True), number)
        if first != number:
            raise UserError(
                f"{path}:{number}: says again what line {first} says; {CHANGED}: remove the line"
            )
        yield line


def _read_mapping(path: Path) -> dict[str, Any]:
    """Reads the mapping in a JSON or YAML file; {} if the file does not exist.

    Raises `UserError` if the file is damaged.
    """
    if not path.is_file():
        return {}
    if path.suffix == ".json":
        return load_json(path, CHANGED)
    return read_yaml(path)


def _keep_kinds(value: Any, kind: Any) -> Any:
    """Returns `value` without its parts of a wrong kind; None if the whole is of a wrong kind.

    `kind` is described above at NUMBER. In place of a list of a wrong kind it returns [].
    """
    if isinstance(kind, dict):
        return _keep_keys(value, kind) if isinstance(value, dict) else None
    if isinstance(kind, list):
        [item_kind] = kind
        items = value if isinstance(value, list) else []
        checked = [_keep_kinds(item, item_kind) for item in items]
        return [item for item in checked if item is not None]
    if isinstance(value, bool):
        return None
    if kind is NUMBER:
        if isinstance(value, float) and abs(value) > 1e300:
            return math.copysign(math.inf, value)  # results computed with it would be infinite
        return value if isinstance(value, int | float) else None
    if kind is int and isinstance(value, int) and abs(value) >= 2**63:
        return None
    return value if isinstance(value, kind) else None


def _keep_keys(mapping: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Returns `mapping` without keys whose value is not of the kind in `kinds`.

    Keys that are not in `kinds` stay as they are.
    """
    result = {}
    for key, value in mapping.items():
        if key in kinds:
            value = _keep_kinds(value, kinds[key])
            if value is None:
                continue
        result[key] = value
    return result


def _read_checkpoints(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the name, step, size and number of files of each checkpoint with a manifest.

    Checkpoints whose manifest lists no files are left out.
    """
    for manifest in sorted(folder.glob("step-*/manifest.json")):
        files = read_json_object(manifest).get("files")
        digits = manifest.parent.name.removeprefix("step-")
        # `finetune checkpoints` reports a damaged manifest
        if isinstance(files, dict) and digits.isdecimal() and len(digits) < 16:
            sizes = [_size_of(entry) for entry in files.values()]
            yield {
                "name": manifest.parent.name,
                "step": int(digits),
                "size": disk_size(sum(sizes)),
                "files": len(sizes),
            }


def _size_of(entry: Any) -> int:
    """Returns the bytes of a file by its entry in a manifest; 0 if the entry does not say."""
    size = entry.get("size_bytes", entry.get("size")) if isinstance(entry, dict) else None
    return size if isinstance(size, int) else 0


MAX_SAMPLES = 20  # prompts with answers, and steps with completions, that the page shows
# Keys of a data report that the page shows as a list or table, apart from the others.
DATA_TABLES = ("findings", "sources", "eval_sources")
# Key of a count in a data report -> its name on the page. A count of 0 is left out: most are 0,
# whichever the method.
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
    """A number in the summary of a run, as texts."""

    name: str
    value: str
    note: str = ""


def describe_run(
    run: RunRecord, plan: Plan | None, columns: Sequence[str], *, live: bool
) -> dict[str, Any]:
    """Makes the values that the template page.html.jinja shows for one run.

    Args:
        run: The contents of the run's folder.
        plan: The run's plan; None if it cannot be made.
        columns: The columns of the table of data sources, which are keys of OF_SOURCE.
        live: Whether the page follows a run that trains.
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
        "sampled": _group_by_step(run.completions),
        "ratios": _ratio_histogram(run),
        "benchmarks": benchmark_table(run.benchmarks) if run.benchmarks else None,
        "benchmarks_note": describe_models(run.benchmarks),
        "findings": findings,
        "data": facts,
        "sources": _list_sources(run, columns),
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


def _list_sources(run: RunRecord, columns: Sequence[str]) -> list[list[str]]:
    """Lists the rows of the table of data sources: a source's file name, then its numbers."""
    rows = []
    for source in list_data_sources(run):
        name = Path(str(source.get("path", ""))).name
        rows.append([name, *(f"{source.get(column, 0):,}" for column in columns)])
    return rows


def _note_memory(plan: Plan | None) -> str:
    """Makes the note beside the title of the table of planned memory."""
    if plan is None or not plan.process_bytes:
        return "peak of each phase"
    return f"one rank; its process adds about {gib(plan.process_bytes)} GiB"


def describe_in_one_line(run: RunRecord) -> str:
    """Describes a run's model, method, layout and machine in one line."""
    model_config = run.recipe.get("model_config") or {}
    model = run.recipe.get("model_name_or_path") or model_config.get("model_type")
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
    """Says whether LoRA adapters, all parameters or some of them are trained."""
    if recipe.get("use_peft"):
        return "LoRA"
    is_partial = recipe.get("trainable_modules") or recipe.get("frozen_modules")
    return f"{'some' if is_partial else 'all'} parameters trained"


def _make_tiles(run: RunRecord, *, live: bool) -> Iterator[Tile]:
    """Yields the numbers of the summary, without those that the run did not log."""
    steps_done = run.last("step") or 0
    progress = " · ".join(_describe_progress(run, steps_done, live=live))
    yield Tile("Steps", f"{steps_done:,}", progress)
    yield from _smoothed_tile(run, "reward", "Reward", format_compact)
    yield from _change_tile(run, "eval_reward", "Held-out reward", format_compact)
    yield from _smoothed_tile(run, "loss", "Training loss", "{:.4f}".format)
    yield from _change_tile(run, "eval_loss", "Held-out loss", "{:.4f}".format)
    if run.last("rewards/accuracies") is not None:
        yield _make_pairs_tile(run)
    yield from _change_tile(run, "exact_match", "Answered exactly", "{:.0%}".format)
    yield from _change_tile(run, "eval_accuracy", "Held-out accuracy", "{:.1%}".format)
    yield from _change_tile(run, "eval_recall@1", "Held-out recall@1", "{:.1%}".format)
    for key in list_metrics([run]):
        yield from _change_tile(run, key, key.partition("/")[2], format_compact)
    yield from _make_resource_tiles(run)


def _make_pairs_tile(run: RunRecord) -> Tile:
    """Makes the tile of the share of pairs in order; of held-out pairs if the run has them.

    In a pair in order the chosen answer has the larger reward.
    """
    is_held_out = run.last("eval_rewards/accuracies") is not None
    name = "Held-out pairs in order" if is_held_out else "Pairs in order"
    prefix = "eval_" if is_held_out else ""
    margin = format_compact(run.last(f"{prefix}rewards/margins") or 0.0)
    in_order = run.last(f"{prefix}rewards/accuracies")
    return Tile(name, f"{in_order:.0%}", f"reward margin {margin}")


def _make_resource_tiles(run: RunRecord) -> Iterator[Tile]:
    """Yields the tiles of what the run has used: tokens, speed, idle experts, memory."""
    if run.last("tokens"):
        trained = run.last("trained_tokens")
        note = f"{format_count(trained)} trained" if trained else ""
        yield Tile("Tokens read", format_count(run.last("tokens")), note)
    speeds = [value for _, value in run.series("tokens_per_second")]
    if speeds:
        mfu = [value for _, value in run.series("mfu")]
        speed = format_compact(statistics.median(speeds))
        yield Tile("Tokens/s", speed, f"{statistics.median(mfu):.0%} MFU" if mfu else "median")
    idle_shares = run.last("idle_expert_share_by_layer")
    if isinstance(idle_shares, list) and idle_shares:
        largest = max(idle_shares)
        layer = f"layer {idle_shares.index(largest)} of {len(idle_shares)} mixtures"
        busiest = run.last("largest_expert_share")
        note = layer if busiest is None else f"{layer}; busiest expert {busiest:.0%}"
        yield Tile("Idle experts", f"{largest:.0%}", note)
    if run.last("peak_memory_bytes"):
        peak = max(value for _, value in run.series("peak_memory_bytes"))
        yield Tile("Peak memory", f"{gib(peak)} GiB", "first rank")


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Averages each value with all others, which have the weights `weight` ** distance.

    It averages over both sides, so that the line does not lag behind a falling loss. Values that
    are not finite are ignored. A value without any weight on finite ones stays as it is.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    before = _running_sums(values, weight)
    after = _running_sums(values[::-1], weight)[::-1]
    smoothed = []
    for value, (left, left_weight), (right, right_weight) in zip(
        values, before, after, strict=True
    ):
        is_finite = math.isfinite(value)
        counted_twice = value if is_finite else 0.0  # by both sums, with weight 1
        total_weight = left_weight + right_weight - is_finite
        if total_weight:
            smoothed.append(round((left + right - counted_twice) / total_weight, 9))
        else:
            smoothed.append(value)
    return smoothed


def _running_sums(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """Returns for each value (weighted sum of the finite values up to it, sum of their weights).

    A value's weight is `weight` ** distance.
    """
    total = 0.0
    total_weight = 0.0
    sums = []
    for value in values:
        is_finite = math.isfinite(value)
        total = weight * total + (value if is_finite else 0.0)
        total_weight = weight * total_weight + is_finite
        sums.append((total, total_weight))
    return sums


def smoothing_weight(count: int) -> float:
    """Returns the weight with which `smooth` averages about a fortieth of the values on each side.

    `count` is the number of values. Up to 40 values the weight is 0: nothing is smoothed.
    """
    return 1 - 1 / max(1.0, count / 40)


RATE_LINES = 20  # the time left is estimated from this many newest lines of metrics


def _describe_progress(run: RunRecord, steps_done: int, *, live: bool) -> Iterator[str]:
    """Says how many steps the run will have, the epochs done, and if `live` the time left.

    The time left does not include evaluations and saves.
    """
    steps = _count_steps(run)
    if steps is not None and steps >= steps_done:
        yield f"of {steps:,}"
    if epoch := run.last("epoch"):
        yield f"{epoch:.2f} epochs"
    seconds_per_step = _measure_step_seconds(run)
    if live and seconds_per_step is not None and steps is not None and steps > steps_done:
        yield f"{timedelta(seconds=round((steps - steps_done) * seconds_per_step))} left"


def _count_steps(run: RunRecord) -> int | None:
    """Counts the steps of the whole run: max_steps, else by the epochs and the steps of an epoch.

    Returns None if there is no max_steps and no line of metrics with an epoch yet.
    """
    steps = run.recipe.get("max_steps")
    epochs = run.recipe.get("num_train_epochs")
    if isinstance(steps, int):
        return steps
    line = next((line for line in run.lines if line.get("epoch") and line.get("step")), None)
    if line is None or not isinstance(epochs, int | float):
        return None
    steps_per_epoch = round(float(line["step"]) / float(line["epoch"]))
    return math.ceil(epochs * steps_per_epoch)


def _measure_step_seconds(run: RunRecord) -> float | None:
    """Computes the mean seconds of the newest steps; None if fewer than two lines have a speed."""
    keys = ("step", "tokens", "tokens_per_second")
    lines = [line for line in run.lines if all(line.get(key) for key in keys)][-RATE_LINES:]
    pairs = list(pairwise(lines))
    # a line's speed is that of the steps since the line before it
    seconds: float = sum(
        (line["tokens"] - before["tokens"]) / line["tokens_per_second"] for before, line in pairs
    )
    if pairs and seconds > 0:
        steps: int = lines[-1]["step"] - lines[0]["step"]
        return seconds / steps
    return None


def _smoothed_tile(
    run: RunRecord, key: str, name: str, write: Callable[[float], str]
) -> Iterator[Tile]:
    """Yields a tile with the last and first smoothed value of `key`; none if it was not logged.

    Single steps vary too much to be shown. `write` makes a text of a value.
    """
    values = [value for _, value in run.series(key)]
    if values:
        smoothed = smooth(values, smoothing_weight(len(values)))
        yield Tile(name, write(smoothed[-1]), f"from {write(smoothed[0])}")


def _change_tile(
    run: RunRecord, key: str, name: str, write: Callable[[float], str]
) -> Iterator[Tile]:
    """Yields a tile with the last and first value of `key`; none if it was not logged."""
    if (last := run.last(key)) is not None:
        yield Tile(name, write(last), f"from {write(run.first(key))}")


def _pair_answers(samples: Sequence[dict[str, Any]]) -> tuple[list[dict[str, str]], str]:
    """Pairs the first and the last answer to each of the first MAX_SAMPLES prompts.

    Returns (a row for each prompt with the keys of the template's table, a note on the steps).
    """
    samples_by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        samples_by_prompt.setdefault(str(sample.get("prompt", "")), []).append(sample)
    rows = []
    for prompt, answers in list(samples_by_prompt.items())[:MAX_SAMPLES]:
        first = answers[0]
        last = answers[-1]
        # a single answer is from before training if its step is 0
        before = first if len(answers) > 1 or first.get("step") == 0 else None
        after = last if last is not before else None
        rows.append(
            {
                "prompt": prompt,
                "expected": str(last.get("expected") or ""),
                **_grade_answer("before", before),
                **_grade_answer("after", after),
            }
        )
    steps = sorted({sample.get("step", 0) for sample in samples})
    notes = []
    if len(steps) > 1:
        notes.append(f"at steps {steps[0]} and {steps[-1]}")
    if len(samples_by_prompt) > len(rows):
        notes.append(f"the first {len(rows)} of {len(samples_by_prompt)}")
    return rows, "; ".join(notes)


# The table of ratios has a column for each age from 0 to 5: the generations by which the weights
# that sampled a token are behind those in training.
SHOWN_AGES = 6


def _ratio_histogram(run: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
    """Makes the table of probability ratios: a head, then a row for each range of ratios.

    A row is (label, cells), and a cell is (text, length of its bar): the percentage of tokens whose
    ratio is in the range, as a mean over steps. Columns are the first and the last tenth of the
    run, the whole run, and the tokens sampled by weights of each age. The table is empty if the run
    logged no ratios.
    """
    columns = _list_ratio_columns(run)
    if not columns:
        return []
    rows = []
    for index, key in enumerate(RATIO_SHARES):  # such as ratio/share/0.9-0.99
        means = [100 * sum(shares[index]) / len(shares[index]) for _, shares in columns]
        _, _, ratio_range = key.rpartition("/")
        label = ratio_range.replace("-", " to ")
        rows.append((label, [(f"{mean:.3g}", round(mean, 2)) for mean in means]))
    return [("Ratio", [(head, 0.0) for head, _ in columns]), *rows]


def _list_ratio_columns(run: RunRecord) -> list[tuple[str, list[list[float]]]]:
    """Lists (head, shares of tokens [ranges][steps]) of each column; [] if none were logged."""
    all_shares = _read_shares(run, "")
    if not all_shares:
        return []
    tenth = max(1, len(all_shares[0]) // 10)  # in logged steps
    columns = [
        ("First tenth", [shares[:tenth] for shares in all_shares]),
        ("Last tenth", [shares[-tenth:] for shares in all_shares]),
        ("Whole run", all_shares),
    ]
    for age in range(SHOWN_AGES):
        shares_of_age = _read_shares(run, f"staleness/{age}/")
        if shares_of_age:
            columns.append((f"{age} behind", shares_of_age))
    return columns


def _read_shares(run: RunRecord, prefix: str) -> list[list[float]]:
    """Returns the shares of tokens [ranges][steps] under `prefix`; [] if a range was not logged.

    A range with more steps than another is cut.
    """
    series = [[value for _, value in run.series(prefix + key)] for key in RATIO_SHARES]
    steps = min(map(len, series))
    return [shares[:steps] for shares in series] if steps else []


SHOWN_STARTS = 3  # newest starts of a resumed run that the table of phases shows


def _table_of_phases(run: RunRecord) -> list[tuple[str, list[tuple[str, float]]]]:
    """Makes the table of seconds: a head, then a row for each phase with a cell for each start.

    A row is (label, cells), and a cell is (text, length of its bar in percent). The table is empty
    if no seconds were logged.
    """
    start_numbers = sorted(run.phases)[-SHOWN_STARTS:]
    starts = [run.phases[number] for number in start_numbers]
    phases = [phase for phase in PHASES if any(phase in seconds_of for seconds_of in starts)]
    if not phases:
        return []
    if len(run.phases) > 1:
        heads = [f"Start {number}" for number in start_numbers]
    else:
        heads = ["Seconds"]
    longest = max(sum(by_step.values()) for seconds_of in starts for by_step in seconds_of.values())
    rows = []
    for phase in phases:
        cells = [_make_phase_cell(seconds_of.get(phase, {}), longest) for seconds_of in starts]
        rows.append((PHASES[phase], cells))
    return [("Phase", [(head, 0.0) for head in heads]), *rows]


def _make_phase_cell(by_step: Mapping[int, float], longest: float) -> tuple[str, float]:
    """Makes a cell of a phase's seconds: (text, length of its bar in percent of `longest`).

    by_step: The seconds at each step where the phase occurred; may be empty.
    """
    if not by_step:
        return "–", 0.0
    seconds = sum(by_step.values())
    if len(by_step) > 1:
        note = f" in {len(by_step)}, at most {duration(max(by_step.values()))}"
    else:
        note = ""
    percent = 100 * seconds / longest if 0 < longest < math.inf else 0.0
    return duration(seconds) + note, round(percent, 2)


def _group_by_step(lines: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Groups completions by step: (step, completions) of at most MAX_SAMPLES steps.

    The steps are spread evenly over the run; the first and the last are among them.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_step.setdefault(line.get("step", 0), []).append(line)
    steps = sorted(by_step)
    if len(steps) > MAX_SAMPLES:
        stride = (len(steps) - 1) / (MAX_SAMPLES - 1)
        steps = [steps[round(stride * i)] for i in range(MAX_SAMPLES)]
    return [(step, [_describe_completion(line) for line in by_step[step]]) for step in steps]


def _describe_completion(line: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the values that the template shows for a line of completions.jsonl."""
    rewards = ", ".join(
        f"{name} {'–' if value is None else _format_number(value)}"
        for name, value in (line.get("rewards") or {}).items()
    )
    advantage = line.get("advantage")
    texts: dict[str, Any] = {
        key: str(line.get(key, "")) for key in ("prompt", "completion", "ended")
    }
    # parts by the model and by tools in turn; without tools the completion is the only part
    texts["parts"] = line.get("parts") or [texts["completion"]]
    return texts | {
        "rewards": rewards,
        "advantage": "" if advantage is None else f"{advantage:+.2f}",
    }


def _grade_answer(name: str, sample: dict[str, Any] | None) -> dict[str, str]:
    """Returns {name: answer, name_class: CSS class}; both are empty if `sample` is None.

    The class is "right" or "wrong", or empty if no answer is expected.
    """
    if sample is None:
        return {name: "", f"{name}_class": ""}
    text = str(sample.get("answer", ""))
    expected = str(sample.get("expected") or "").strip()
    grade = ""
    if expected:
        grade = "right" if text.strip() == expected else "wrong"
    return {name: text, f"{name}_class": grade}


def _describe_data(report: dict[str, Any]) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """Returns (findings of a data report, (name, value) of its other entries except tables)."""
    findings = [_describe_finding(finding) for finding in report.get("findings", [])]
    facts = _flatten({key: value for key, value in report.items() if key not in DATA_TABLES})
    return findings, [
        (COUNT_NAMES.get(name, name), value)
        for name, value in facts
        if name not in COUNT_NAMES or value != "0"
    ]


def _describe_finding(finding: Mapping[str, Any]) -> dict[str, str]:
    """Makes the severity and the sentence of a finding in a data report."""
    rows = f"{finding.get('rows', 0):,} of {counted(finding.get('of', 0), 'row')}"
    where = f" ({', '.join(finding['where'])})" if finding.get("where") else ""
    text = f"in {rows} {finding.get('what', '')}{where}"
    return {"severity": str(finding.get("severity", "note")), "text": text}


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (name, value as text) of all values in nested mappings and lists.

    A name is made of all keys on the way to the value: {"lengths": {"median": 3}} has the name
    "lengths median". None and [] are left out. `name`: the keys on the way to `value`.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value, start=1):
            yield from _flatten(item, f"{name} {number}")
    elif value not in (None, []):
        yield name, " ".join(map(str, value)) if isinstance(value, list) else _format_number(value)


def _format_number(value: Any) -> str:
    """Writes a number with commas between thousands and a float with four digits; else `str`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def format_value(value: Any) -> str:
    """Writes a recipe's value as text: mappings as YAML without null entries, others as JSON.

    A string is returned as it is.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _as_yaml(_drop_nulls(value))
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _as_yaml([_drop_nulls(item) for item in value])
    return json.dumps(value, ensure_ascii=False)


def _drop_nulls(value: Any) -> Any:
    """Returns a mapping without its null entries; any other value as it is."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if inner is not None}


def _as_yaml(value: Any) -> str:
    """Writes a value as YAML, with keys in their order."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).strip()


def list_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """Lists the keys under which the runs logged the functions of the recipe key `metrics`."""
    return list(
        dict.fromkeys(
            key for run in runs for line in run.lines for key in line if key.startswith("metrics/")
        )
    )
