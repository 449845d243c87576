"""Files from outside, read within bounds: JSON, safetensors headers; and a run's metrics.jsonl and benchmarks.json.

Imports no torch.
"""

import errno
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.files.durable import replace_file

LIMIT_BYTES = 100_000_000  # of a file; the reference implementation of safetensors allows a header as many
MAX_DEPTH = 100
MAX_DIGITS = 20  # of an integer; 2^64 has as many
LONG_NUMBER = re.compile(f"[0-9]{{{MAX_DIGITS + 1}}}")
DAMAGED = "the file is damaged, copy or download it again"


def read_bounded(path: Path) -> bytes:
    """The bytes of a plain file. Raises `OSError` for others, such as a pipe, and for a larger one."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > LIMIT_BYTES:
            raise OSError(errno.EFBIG, f"more than {LIMIT_BYTES:,} bytes")
        return file.read(LIMIT_BYTES)


def open_plain(path: Path) -> FileIO:
    """A plain file, opened for reading. Raises `OSError`."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
    return FileIO(path)


def load_json(path: Path, advice: str = DAMAGED) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError`, with `advice`, where there is none that can be read."""
    try:
        return parse_object(path, read_bounded(path), advice=advice)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def parse_object(path: Path, text: bytes, part: str = "", advice: str = DAMAGED) -> dict[str, Any]:
    """The JSON object in `text`, which is (`part` of) the file `path`. Raises `UserError`, for repeated names too."""
    try:
        value = parse_json(text, is_strict=True)
    except RepeatedName as error:
        raise UserError(f"{path}: {error}: {part}named twice; the file is damaged") from None
    except ValueError:
        raise UserError(f"{path}: {part}not JSON; {advice}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: {part}a JSON object is expected; {advice}")
    return value


def read_tensor_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(the header of a safetensors file, where its values begin, the file's size), in bytes. Raises `UserError`."""
    try:
        file = open_plain(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(
                f"{path}: truncated: {size:,} bytes, where the header alone claims {length:,}; copy or "
                "download it again"
            )
        if length > LIMIT_BYTES:
            raise UserError(f"{path}: its header claims {length:,} bytes; this is no safetensors file")
        return parse_object(path, file.read(length), "header: "), 8 + length, size


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """The object on each line; None for a line that holds none. Empty where there is no such file.

    A last line without its end is dropped where it is cut: a run was killed, or is writing it.
    """
    if not path.is_file():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    found = [_parse(line) for line in lines]
    last = _parse(tail)
    return found if last is None else [*found, last]


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file, or none in it."""
    try:
        return _parse(read_bounded(path)) or {}
    except OSError:
        return {}


def append_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds a line for each object, in place of the cut line that a killed run may have left at the end."""
    with path.open("ab+") as file:
        _drop_cut_line(file)
        for line in lines:
            # a lone surrogate becomes its JSON escape
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _drop_cut_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    while end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
        end -= 1
    file.truncate(end)


class RepeatedName(ValueError):
    """Two values in one JSON object have the same name, which is the error's text."""


def parse_json(text: bytes | str, *, is_strict: bool = False) -> Any:
    """The value of a JSON text that comes from outside; an integer of more than MAX_DIGITS digits is a float.

    Raises `ValueError` where it is not JSON, or nested deeper than MAX_DEPTH; `RepeatedName` if `is_strict`.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    read_integer = _read_integer if LONG_NUMBER.search(text) else None  # json's own is faster
    try:
        value = json.loads(text, parse_int=read_integer, object_pairs_hook=_make_unique if is_strict else None)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level, depth = [value] if isinstance(value, list | dict) else [], 0
    while level and text.count("[") + text.count("{") > MAX_DEPTH:
        inside = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for values in inside for inner in values if isinstance(inner, list | dict)]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
    return value


def _make_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise RepeatedName(name)
        entries[name] = value
    return entries


def _read_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


BENCHMARKS = "benchmarks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One metric of one task. `base` is what the model before training reaches; None where it was not measured."""

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
        return (self.model, self.task, self.metric, self.filter, self.num_fewshot, self.chat_template)


def read_benchmarks(run: Path | None) -> list[BenchmarkResult]:
    """The results in a run's folder; those that cannot be read are skipped, and the page or card lacks them."""
    entries = read_json_object(run / BENCHMARKS).get("results") if run is not None else None
    found = map(_read_entry, entries) if isinstance(entries, list) else ()
    return [result for result in found if result is not None]


def write_benchmarks(path: Path, results: Iterable[BenchmarkResult]) -> None:
    """Writes `results` to a file of their own. Raises `OSError`."""
    content = {"results": [asdict(result) for result in results]}
    replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def merge_results(old: Sequence[BenchmarkResult], new: Sequence[BenchmarkResult]) -> list[BenchmarkResult]:
    """`old` with `new` in place of what measured the same."""
    replaced = {result.key for result in new}
    return [*(result for result in old if result.key not in replaced), *new]


def benchmark_table(results: Sequence[BenchmarkResult]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
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
    return f"{', '.join(sorted({result.model for result in results}))}{beside}, by lm-eval {', '.join(versions)}"


def format_value(value: float, stderr: float | None) -> str:
    """
    >>> format_value(0.41736, 0.0136), format_value(12.5, None)
    ('0.417 ± 0.014', '12.5')
    """
    return f"{value:.4g}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def _describe_metric(result: BenchmarkResult) -> str:
    metric = result.metric if result.filter == "none" else f"{result.metric}, {result.filter}"
    return metric if result.higher_is_better else f"{metric} (lower is better)"


def _describe_setting(result: BenchmarkResult) -> str:
    parts = [
        f"{result.samples:,}" + (" of them, limited" if result.is_limited else "")
        if result.samples is not None
        else "",
        f"{result.num_fewshot}-shot" if result.num_fewshot is not None else "",
        "chat template" if result.chat_template else "",
    ]
    return ", ".join(part for part in parts if part)


def _read_entry(entry: Any) -> BenchmarkResult | None:
    known = {field.name for field in fields(BenchmarkResult)}
    try:
        result = BenchmarkResult(**{key: value for key, value in entry.items() if key in known})
        is_right = isinstance(result.task, str) and isinstance(result.metric, str) and math.isfinite(result.trained)
    except (AttributeError, TypeError):
        return None
    return result if is_right else None


DIVERGED_MARGIN = 1.0  # nats per token above the first loss, or a quarter of that loss where it is more: far above
DIVERGED_LINES = 10  # lines of metrics in a row


def drop_later_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Keeps the lines of metrics.jsonl or samples.jsonl up to `step`, that of the checkpoint from which a run resumes,
    and returns them. What an interrupted run wrote after it is written again; so is all of a run that starts over.
    """
    if not path.exists():
        return []
    whole = readable_lines(read_json_lines(path))
    if path.name == "metrics.jsonl":  # a prompt may be given, and answered, twice
        whole = remove_doubled(whole)
    kept = [line for line in whole if line.get("step", 0) <= step and step > 0]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def readable_lines(lines: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Those that hold an object of a step."""
    return [line for line in lines if line is not None and isinstance(line.get("step", 0), int)]


def remove_doubled(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`lines` without those that say again what an earlier one has said."""
    return list({json.dumps(line, sort_keys=True): line for line in lines}.values())


def describe_missing(path: Path, last_step: int) -> str:
    """Which steps up to `last_step` lack their training lines in the metrics.jsonl at `path`; empty if none.

    A line is missing in a gap that is larger than the gaps on both sides of it: `logging_steps` may change in a run.
    """
    if not path.is_file():
        return f"no line for the steps 1 to {last_step:,}" if last_step else ""
    steps = [step for step, _ in losses_of(read_json_lines(path), last_step)]
    ranges = ", ".join(f"{first:,} to {last:,}" for first, last in find_gaps(steps, last_step))
    return f"no line for the steps {ranges}" if ranges else ""


def find_gaps(steps: Iterable[int], last_step: int) -> list[tuple[int, int]]:
    """The first and last step of each gap in `steps`, up to `last_step`.

    >>> find_gaps([2, 4, 6], 7), find_gaps([2, 4, 8, 10], 10), find_gaps([10, 20, 40, 60], 60), find_gaps([], 5)
    ([], [(5, 6)], [], [])
    >>> find_gaps([6, 8], 12)
    [(1, 4), (9, 12)]
    """
    ends = [0, *sorted(set(steps))]
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    missing = []
    for number, (end, gap) in enumerate(zip(ends[1:], gaps, strict=True)):
        usual = max([*gaps[:number][-1:], *gaps[number + 1 :][:1]], default=gap)
        missing += [(end - gap + 1, end - usual)] if gap > usual else []
    if gaps and last_step - ends[-1] >= gaps[-1]:
        missing.append((ends[-1] + 1, last_step))
    return missing


def losses_of(lines: Iterable[Mapping[str, Any] | None], last_step: int | None = None) -> list[tuple[int, float]]:
    """(step, loss) of the training lines among `lines` of metrics.jsonl, up to `last_step`."""
    found = [(line.get("step"), line.get("loss")) for line in lines if line is not None]
    return [
        (step, float(loss))
        for step, loss in found
        if isinstance(step, int) and isinstance(loss, int | float) and (last_step is None or step <= last_step)
    ]


def find_divergence(losses: Sequence[tuple[int, float]], *, at_end: bool = True) -> str:
    """What diverged in a run with these (step, loss in nats per token); empty if no newest loss is far above the first.

    The newest are the last DIVERGED_LINES, or (`at_end`) the last half of a shorter run. Not finite is far above.

    >>> print(find_divergence([(1, 7.6), (2, 1263.0), (3, 315.0)]))
    the loss is 315 at step 3, far above the 7.6 of step 1
    >>> find_divergence([(1, 2.0), (2, 9.0), (3, 2.5)])
    ''
    """
    start = next((index for index, (_, loss) in enumerate(losses) if math.isfinite(loss)), None)
    if start is None:
        return ""
    (first_step, first_loss), later = losses[start], losses[start + 1 :]
    limit = first_loss + max(DIVERGED_MARGIN, first_loss / 4)
    wanted = max(2, min(DIVERGED_LINES, len(later) // 2)) if at_end else DIVERGED_LINES
    if len(later) < wanted or any(loss <= limit for _, loss in later[-wanted:]):
        return ""
    step, loss = losses[-1]
    return f"the loss is {loss:.4g} at step {step:,}, far above the {first_loss:.4g} of step {first_step:,}"
