"""What a run leaves in files for others to read: metrics.jsonl and the losses in it,
benchmarks.json.

No torch.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.files.durable import replace_file
from finetune.files.json_files import read_json_lines, read_json_object, read_lines_as_written
from finetune.files.network import find_local_folder
from finetune.units import counted

BENCHMARKS = "benchmarks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One metric of one task.

    `base` is what the model before training reaches; None where it was not measured.
    """

    task: str
    metric: str
    filter: str = "none"  # what of an answer is compared; lm-eval's name
    trained: float
    trained_stderr: float | None = None
    base: float | None = None
    base_stderr: float | None = None
    higher_is_better: bool = True
    samples: int | None = None  # documents that were asked; None: unknown
    is_limited: bool = False  # not all of the task's documents were asked
    num_fewshot: int | None = None
    chat_template: bool = False
    version: str = ""  # of the task
    model: str = ""  # the folder that was measured
    base_model: str | None = None
    lm_eval: str = ""  # its version

    @property
    def key(self) -> tuple[object, ...]:
        """Results with the same key replace each other."""
        return (
            self.model,
            self.task,
            self.metric,
            self.filter,
            self.num_fewshot,
            self.chat_template,
        )


def list_runs(folder: Path) -> list[Path]:
    """The runs in a folder that is none itself, such as those of several adapters."""
    if (folder / "metrics.jsonl").is_file():
        return []
    return sorted(each.parent for each in folder.glob("*/metrics.jsonl"))


def refuse_several_runs(folder: Path) -> None:
    """Raises `UserError` for a folder of runs, where one is expected."""
    if runs := list_runs(folder):
        raise UserError(f"{folder}: holds {counted(len(runs), 'run')}; name one, such as {runs[0]}")


def find_origin(folder: Path) -> Path | None:
    """The base of the checkpoint whose model/ is `folder`, if it is one whose base has weights on
    this machine.
    """
    base = read_json_object(folder.parent / "state.json").get("base_model")
    base_folder = None
    if isinstance(base, str):
        base_folder = find_local_folder(base)
    if base_folder is not None and any(base_folder.glob("*.safetensors")):
        return base_folder
    return None


def read_benchmarks(run: Path | None) -> list[BenchmarkResult]:
    """The results in a run's folder; those that cannot be read are skipped, and the page or card
    lacks them.
    """
    entries = None
    if run is not None:
        entries = read_json_object(run / BENCHMARKS).get("results")
    results = map(_read_entry, entries) if isinstance(entries, list) else ()
    return [result for result in results if result is not None]


def write_benchmarks(path: Path, results: Iterable[BenchmarkResult]) -> None:
    """Writes `results` to a file of their own. Raises `OSError`."""
    content = {"results": [asdict(result) for result in results]}
    replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def merge_results(
    old: Sequence[BenchmarkResult], new: Sequence[BenchmarkResult]
) -> list[BenchmarkResult]:
    """`old` with `new` in place of what measured the same."""
    replaced = {result.key for result in new}
    return [*(result for result in old if result.key not in replaced), *new]


def benchmark_table(
    results: Sequence[BenchmarkResult],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of a table of results, for people."""
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
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return tuple(shown), list(zip(*shown.values(), strict=True))


def describe_models(results: Sequence[BenchmarkResult]) -> str:
    """Which models were measured, and by what."""
    bases = sorted({result.base_model for result in results if result.base_model})
    versions = sorted({result.lm_eval for result in results if result.lm_eval})
    beside = f" beside {', '.join(bases)}" if bases else ""
    return (
        f"{', '.join(sorted({result.model for result in results}))}{beside}, by lm-eval "
        f"{', '.join(versions)}"
    )


def format_value(value: float, stderr: float | None) -> str:
    """
    >>> format_value(0.41736, 0.0136), format_value(12.5, None)
    ('0.417 ± 0.014', '12.5')
    """
    if stderr is None:
        return f"{value:.4g}"
    return f"{value:.3f} ± {stderr:.3f}"


def _describe_metric(result: BenchmarkResult) -> str:
    if result.filter == "none":
        metric = result.metric
    else:
        metric = f"{result.metric}, {result.filter}"
    if result.higher_is_better:
        return metric
    return f"{metric} (lower is better)"


def _describe_setting(result: BenchmarkResult) -> str:
    parts = []
    if result.samples is not None:
        parts.append(f"{result.samples:,}" + (" of them, limited" if result.is_limited else ""))
    if result.num_fewshot is not None:
        parts.append(f"{result.num_fewshot}-shot")
    if result.chat_template:
        parts.append("chat template")
    return ", ".join(parts)


def _read_entry(entry: Any) -> BenchmarkResult | None:
    known = {field.name for field in fields(BenchmarkResult)}
    try:
        result = BenchmarkResult(**{key: value for key, value in entry.items() if key in known})
        is_right = (
            isinstance(result.task, str)
            and isinstance(result.metric, str)
            and math.isfinite(result.trained)
        )
    except (AttributeError, TypeError):
        return None
    return result if is_right else None


# nats per token above the first loss, or a quarter of that loss where it is more: far above
DIVERGED_MARGIN = 1.0


DIVERGED_LINES = 10  # lines of metrics in a row


def drop_later_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Keeps the lines of metrics.jsonl or samples.jsonl up to `step`, that of the checkpoint from
    which a run resumes, and returns them.

    The resumed run writes later lines again, and a run that starts over (`step` 0) all of them.
    Unreadable lines are dropped, and of lines of metrics that repeat each other all but the first.
    The bytes of what is kept stay as they were.
    """
    if not path.exists():
        return []
    seen = set[str]()
    kept: list[dict[str, Any]] = []
    text = b""
    for written, line in read_lines_as_written(path):
        if not readable_lines([line]) or line is None or line.get("step", 0) > step or step == 0:
            continue
        said = json.dumps(line, sort_keys=True)
        # of samples a prompt may be given, and answered, twice
        if path.name == "metrics.jsonl" and said in seen:
            continue
        seen.add(said)
        kept.append(line)
        text += written + b"\n"
    replace_file(path, text.decode())
    return kept


def readable_lines(lines: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Returns the lines that hold an object of a step."""
    return [line for line in lines if line is not None and isinstance(line.get("step", 0), int)]


def remove_doubled(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`lines` without repetitions: each stands where it first stood."""
    return list({json.dumps(line, sort_keys=True): line for line in lines}.values())


def describe_missing(path: Path, last_step: int) -> str:
    """Which steps up to `last_step` lack their training lines in the metrics.jsonl at `path`; empty
    if none.

    A line is missing in a gap that is larger than the gaps on both sides of it: `logging_steps` may
    change in a run.
    """
    if not path.is_file():
        if last_step:
            return f"no line for the steps 1 to {last_step:,}"
        return ""
    steps = [step for step, _ in losses_of(read_json_lines(path), last_step)]
    ranges = ", ".join(f"{first:,} to {last:,}" for first, last in find_gaps(steps, last_step))
    return f"no line for the steps {ranges}" if ranges else ""


def find_gaps(steps: Iterable[int], last_step: int) -> list[tuple[int, int]]:
    """The first and last missing step of each gap in `steps`, up to `last_step`. A gap is larger
    than those on both sides of it.

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
    ends = [0, *sorted(set(steps))]
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    missing = []
    for number, (end, gap) in enumerate(zip(ends[1:], gaps, strict=True)):
        before_and_after = gaps[max(0, number - 1) : number] + gaps[number + 1 : number + 2]
        usual = max(before_and_after, default=gap)
        if gap > usual:
            missing.append((end - gap + 1, end - usual))
    if gaps and last_step - ends[-1] >= gaps[-1]:
        missing.append((ends[-1] + 1, last_step))
    return missing


def losses_of(
    lines: Iterable[Mapping[str, Any] | None], last_step: int | None = None
) -> list[tuple[int, float]]:
    """Returns (step, loss) of the training lines of metrics.jsonl, up to `last_step`."""
    points = [(line.get("step"), line.get("loss")) for line in lines if line is not None]
    return [
        (step, float(loss))
        for step, loss in points
        if isinstance(step, int)
        and isinstance(loss, int | float)
        and (last_step is None or step <= last_step)
    ]


def find_divergence(losses: Sequence[tuple[int, float]], *, at_end: bool = True) -> str:
    """Describes how a run with these (step, loss in nats per token) diverged; empty if no newest
    loss is far above the first.

    The newest are the last DIVERGED_LINES, or (`at_end`) the last half of a shorter run. Not finite
    is far above.

    >>> print(find_divergence([(1, 7.6), (2, 1263.0), (3, 315.0)]))
    the loss is 315 at step 3, far above the 7.6 of step 1
    >>> find_divergence([(1, 2.0), (2, 9.0), (3, 2.5)])
    ''
    """
    start = next((index for index, (_, loss) in enumerate(losses) if math.isfinite(loss)), None)
    if start is None:
        return ""
    first_step, first_loss = losses[start]
    later = losses[start + 1 :]
    limit = first_loss + max(DIVERGED_MARGIN, first_loss / 4)
    if at_end:
        wanted = max(2, min(DIVERGED_LINES, len(later) // 2))
    else:
        wanted = DIVERGED_LINES
    if len(later) < wanted or any(loss <= limit for _, loss in later[-wanted:]):
        return ""
    step, loss = losses[-1]
    return (
        f"the loss is {loss:.4g} at step {step:,}, far above the {first_loss:.4g} of step "
        f"{first_step:,}"
    )
