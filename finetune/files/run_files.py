"""Reads and writes a run's benchmarks.json, and reads metrics.jsonl for losses and missing lines.

Imports no torch.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finetune.errors import UserError
from finetune.files.durable import hash_json, replace_file
from finetune.files.json_files import read_json_lines, read_json_object, read_lines_as_written
from finetune.files.network import find_local_folder
from finetune.units import counted

BENCHMARKS = "benchmarks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The value of one metric of one lm-eval task, for the trained model and its base model."""

    task: str
    metric: str
    filter: str = "none"  # lm-eval's name of what it takes from an answer to compare
    trained: float  # the trained model's value
    trained_stderr: float | None = None
    base: float | None = None  # the value before training; None if not measured
    base_stderr: float | None = None
    higher_is_better: bool = True
    samples: int | None = None  # number of documents asked; None if unknown
    is_limited: bool = False  # only a part of the task's documents was asked
    num_fewshot: int | None = None
    chat_template: bool = False
    version: str = ""  # the task's version
    model: str = ""  # the folder of the trained model
    base_model: str | None = None
    lm_eval: str = ""  # lm-eval's version

    @property
    def key(self) -> tuple[object, ...]:
        """Says what was measured and how: a new result replaces an old one of the same key."""
        return (
            self.model,
            self.task,
            self.metric,
            self.filter,
            self.num_fewshot,
            self.chat_template,
        )


_RESULT = TypeAdapter(BenchmarkResult)


def list_runs(folder: Path) -> list[Path]:
    """Lists the folders of runs directly in `folder`, such as the runs of several adapters.

    The list is empty if `folder` is a run's own folder.
    """
    if (folder / "metrics.jsonl").is_file():
        return []
    return sorted(each.parent for each in folder.glob("*/metrics.jsonl"))


def refuse_several_runs(folder: Path) -> None:
    """Raises `UserError` if `folder` holds runs, where a single run's folder is expected."""
    if runs := list_runs(folder):
        raise UserError(f"{folder}: holds {counted(len(runs), 'run')}; name one, such as {runs[0]}")


def find_origin(folder: Path) -> Path | None:
    """Finds the folder of the base from which the checkpoint with model/ `folder` was trained.

    Returns None if `folder` is no checkpoint's model/, or the base has no weights on this machine.
    """
    state = read_json_object(folder.parent / "state.json")
    base = state.get("base_model")
    recipe = state.get("recipe")
    base_folder = None
    if isinstance(base, str) and isinstance(recipe, dict):
        base_folder = find_local_folder(base, recipe.get("model_revision"))
    if base_folder is not None and any(base_folder.glob("*.safetensors")):
        return base_folder
    return None


def read_benchmarks(run: Path | None) -> list[BenchmarkResult]:
    """Reads the results in a run's folder; [] if it has none, or without a run.

    Results that cannot be read are left out.
    """
    entries = None
    if run is not None:
        entries = read_json_object(run / BENCHMARKS).get("results")
    results = map(_read_entry, entries) if isinstance(entries, list) else ()
    return [result for result in results if result is not None]


def write_benchmarks(path: Path, results: Iterable[BenchmarkResult]) -> None:
    """Writes `results` to the file `path` in place of its content. Raises `OSError`."""
    content = {"results": [asdict(result) for result in results]}
    replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def merge_results(
    old: Sequence[BenchmarkResult], new: Sequence[BenchmarkResult]
) -> list[BenchmarkResult]:
    """Returns `old` and `new` without those of `old` that `new` measured again (same `key`)."""
    new_keys = {result.key for result in new}
    return [*(result for result in old if result.key not in new_keys), *new]


def benchmark_table(
    results: Sequence[BenchmarkResult],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Makes a table of results to show to people: (column names, rows of cells).

    Columns without any content are left out, and so is the model if there is only one.
    """
    columns: dict[str, list[str]] = {
        "Model": [Path(result.model).name for result in results],
        "Task": [result.task for result in results],
        "Metric": [_describe_metric(result) for result in results],
        "Base": ["" if r.base is None else format_value(r.base, r.base_stderr) for r in results],
        "Trained": [format_value(result.trained, result.trained_stderr) for result in results],
        "Change": ["" if r.base is None else f"{r.trained - r.base:+.3g}" for r in results],
        "Asked": [_describe_setting(result) for result in results],
    }
    if len(set(columns["Model"])) < 2:
        del columns["Model"]
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return tuple(filled), list(zip(*filled.values(), strict=True))


def describe_models(results: Sequence[BenchmarkResult]) -> str:
    """Says which models and base models were measured, and by which versions of lm-eval."""
    models = ", ".join(sorted({result.model for result in results}))
    bases = sorted({result.base_model for result in results if result.base_model})
    versions = sorted({result.lm_eval for result in results if result.lm_eval})
    beside = f" beside {', '.join(bases)}" if bases else ""
    return f"{models}{beside}, by lm-eval {', '.join(versions)}"


def format_value(value: float, stderr: float | None) -> str:
    """Writes a metric's value, with its standard error if that is known.

    >>> format_value(0.41736, 0.0136), format_value(12.5, None)
    ('0.417 ± 0.014', '12.5')
    """
    if stderr is None:
        return f"{value:.4g}"
    return f"{value:.3f} ± {stderr:.3f}"


def _describe_metric(result: BenchmarkResult) -> str:
    """Names the metric, with lm-eval's filter if there is one, and whether lower is better."""
    if result.filter == "none":
        metric = result.metric
    else:
        metric = f"{result.metric}, {result.filter}"
    if result.higher_is_better:
        return metric
    return f"{metric} (lower is better)"


def _describe_setting(result: BenchmarkResult) -> str:
    """Says how many documents were asked and with which prompt: "500, 5-shot, chat template"."""
    parts = []
    if result.samples is not None:
        parts.append(f"{result.samples:,}" + (" of them, limited" if result.is_limited else ""))
    if result.num_fewshot is not None:
        parts.append(f"{result.num_fewshot}-shot")
    if result.chat_template:
        parts.append("chat template")
    return ", ".join(parts)


def _read_entry(entry: Any) -> BenchmarkResult | None:
    """Reads one result of benchmarks.json, without keys that are not ours; None if it is wrong."""
    try:
        result = _RESULT.validate_python(entry)
    except ValidationError:  # no mapping, a key is missing, or a value is of a wrong kind
        return None
    return result if math.isfinite(result.trained) else None


# A loss is "far above" the first one if it is higher by this many nats per token, and by a quarter.
DIVERGED_MARGIN = 1.0
# A run has diverged if the losses of this many newest lines of metrics.jsonl are far above.
DIVERGED_LINES = 10


def drop_later_lines(path: Path, step: int) -> None:
    """Removes the lines after `step` from metrics.jsonl, samples.jsonl or completions.jsonl.

    `step` is that of the checkpoint from which a run resumes: the run writes later lines again. A
    run that starts over (`step` 0) writes all lines again, so all are removed.

    Unreadable lines are removed too, and repetitions of a line of metrics.jsonl. The bytes of the
    lines that stay do not change, and a file without lines to remove is not written. The file may
    be larger than the memory.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        pairs = itertools.zip_longest(lines, _lines_up_to(path, step))
        is_unchanged = all(before == after for before, after in pairs)
    if not is_unchanged:
        replace_file(path, _lines_up_to(path, step))


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """Yields the lines of a file that `drop_later_lines` leaves, each with its newline."""
    if step == 0:
        return
    seen = set[str]()  # hashes
    for written, line in read_lines_as_written(path):
        if line is None or not readable_lines([line]) or line.get("step", 0) > step:
            continue
        # equal lines of samples.jsonl stay: a prompt may be given twice and get the same answer
        if path.name == "metrics.jsonl":
            line_hash = hash_json(line)
            if line_hash in seen:
                continue
            seen.add(line_hash)
        yield written.removesuffix(b"\n") + b"\n"


def readable_lines(lines: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Returns the lines that hold an object, except those with a "step" that is no integer."""
    return [line for line in lines if line is not None and isinstance(line.get("step", 0), int)]


def remove_doubled(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns `lines` without repetitions, in the order in which each came first."""
    return list({json.dumps(line, sort_keys=True): line for line in lines}.values())


def describe_missing(path: Path, last_step: int) -> str:
    """Says for which steps up to `last_step` the metrics.jsonl at `path` lacks training lines.

    Returns "" if none are missing, as far as `find_gaps` can see.
    """
    if not path.is_file():
        if last_step:
            return f"no line for the steps 1 to {last_step:,}"
        return ""
    steps = [step for step, _ in losses_of(read_json_lines(path), last_step)]
    ranges = ", ".join(f"{first:,} to {last:,}" for first, last in find_gaps(steps, last_step))
    return f"no line for the steps {ranges}" if ranges else ""


def find_gaps(steps: Iterable[int], last_step: int) -> list[tuple[int, int]]:
    """Finds the steps, up to `last_step`, at which a run should have logged and did not.

    Returns (first missing step, last missing step) of each gap. The distance between two logged
    steps is a gap if it is larger than the distances before and after it; one that stays larger
    is a new `logging_steps`.

    >>> (
    ...     find_gaps([2, 4, 6], 7),
    ...     find_gaps([2, 4, 8, 10], 10),
    ...     find_gaps([10, 20, 40, 60], 60),
    ...     find_gaps([], 5),
    ... )
    ([], [(5, 6)], [], [])
    >>> find_gaps([6, 8], 12)
    [(1, 4), (9, 12)]
    """
    logged = [0, *sorted(set(steps))]
    distances = [after - before for before, after in itertools.pairwise(logged)]
    missing = []
    for index, (step, distance) in enumerate(zip(logged[1:], distances, strict=True)):
        neighbors = distances[max(0, index - 1) : index] + distances[index + 1 : index + 2]
        usual = max(neighbors, default=distance)
        if distance > usual:
            missing.append((step - distance + 1, step - usual))
    if distances and last_step - logged[-1] >= distances[-1]:
        missing.append((logged[-1] + 1, last_step))
    return missing


def losses_of(
    lines: Iterable[Mapping[str, Any] | None], last_step: int | None = None
) -> list[tuple[int, float]]:
    """Returns (step, loss) of the training lines of metrics.jsonl, up to `last_step` if given."""
    points = [(line.get("step"), line.get("loss")) for line in lines if line is not None]
    return [
        (step, float(loss))
        for step, loss in points
        if isinstance(step, int)
        and isinstance(loss, int | float)
        and (last_step is None or step <= last_step)
    ]


def find_divergence(losses: Sequence[tuple[int, float]], *, at_end: bool = True) -> str:
    """Says that a run diverged, if all its newest losses are far above its first finite loss.

    Returns "" otherwise. A loss that is not finite counts as far above.

    Args:
        losses: (step, loss in nats per token) of each training line.
        at_end: Whether the run has ended. The newest losses are the last DIVERGED_LINES; of a short
            run that has ended, the second half of those after the first, and at least two.

    >>> print(find_divergence([(1, 7.6), (2, 1263.0), (3, 315.0)]))
    the loss is 315 at step 3, far above the 7.6 of step 1
    >>> find_divergence([(1, 2.0), (2, 9.0), (3, 2.5)])
    ''
    """
    first = next((index for index, (_, loss) in enumerate(losses) if math.isfinite(loss)), None)
    if first is None:
        return ""
    first_step, first_loss = losses[first]
    later = losses[first + 1 :]
    limit = first_loss + max(DIVERGED_MARGIN, first_loss / 4)
    if at_end:
        newest_count = max(2, min(DIVERGED_LINES, len(later) // 2))
    else:
        newest_count = DIVERGED_LINES
    if len(later) < newest_count or any(loss <= limit for _, loss in later[-newest_count:]):
        return ""
    step, loss = losses[-1]
    return (
        f"the loss is {loss:.4g} at step {step:,}, far above the {first_loss:.4g} of step "
        f"{first_step:,}"
    )
