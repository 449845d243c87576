"""What a run logs: metrics.jsonl always, a progress bar at a terminal, plain lines in a log file. Imports no torch."""

import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from finetune.console.trackers import Tracker, first_line
from finetune.errors import UserError
from finetune.files.durable import replace_file
from finetune.files.run_json import read_json_lines
from finetune.terminal import is_notebook
from finetune.units import gib

SMOOTHING = 0.9  # weight of the past in the loss that is shown beside the logged one
BAR_COLUMNS = 8  # of the bar itself, at least
NOTEBOOK_COLUMNS = 110  # of the bar with what stands beside it, where there is no terminal to ask
RATE_LINES = 20  # lines of metrics from which the time left is estimated
DIVERGED_ADVICE = "lower learning_rate, or raise warmup_ratio"
DIVERGED_MARGIN = 1.0  # nats per token above the first loss, or a quarter of that loss where it is more: far above
DIVERGED_LINES = 10  # lines of metrics in a row


class MetricsLog:
    """Appends to metrics.jsonl, passes lines to trackers, and prints. On ranks other than 0 it is silent."""

    def __init__(self, path: Path | None, steps: int, start_step: int, trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._file: Any = None
        self._unwritten = b""  # lines that a full disk has refused
        self._trackers = list(trackers)
        self._display: Display | None = None
        self._losses: list[tuple[int, float]] = []  # (step, loss) of every training line
        self._has_diverged = False
        if path is not None:
            found = read_json_lines(path) if start_step else []
            missing = describe_missing(path, start_step)
            self._losses = losses_of(drop_later_lines(path, start_step))
            self._display = Display(steps, start_step, (loss for _, loss in self._losses))
            self._file = path.open("ab", buffering=0)
            readable = readable_lines(found)
            for count, what in (
                (len(found) - len(readable), "line that cannot be read"),
                (len(readable) - len(remove_doubled(readable)), "doubled line"),
            ):
                if count:
                    self.say(
                        f"warning {path}: {count:,} {what if count == 1 else what.replace('line', 'lines')} removed"
                    )
            if missing:
                self.say(f"warning {path}: {missing}; the report and the model card lack them")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes where the block raises; a run that is done has more to write first."""
        if error is not None:
            self.close()

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl. What a full disk refuses is kept, and written before the next line with room."""
        if self._file is not None:
            self._append(json.dumps({key: _rounded(value) for key, value in line.items()}).encode() + b"\n")
        self._call_tracker(lambda tracker: tracker.log(line))

    def step(self, line: dict[str, Any]) -> None:
        """Writes and shows a training line. Warns once, when the loss has been far above its start for long.

        Raises `UserError` where the run's folder has been removed: nothing of the run could be resumed or exported.
        """
        if self._path is not None and is_missing(self._path) and is_missing(self._path.with_name("recipe.yaml")):
            raise UserError(
                f"{self._path.parent}: the run's folder was removed or renamed; stopped at step "
                f"{line['step']:,}: no checkpoint "
                "could be resumed or exported from there. Start the run again, and leave its folder in place"
            )
        self.write(line)
        if self._display is not None:
            self._display.step(line)
        self._losses.append((line["step"], line["loss"]))
        if not self._has_diverged and (diverged := find_divergence(self._losses, at_end=False)):
            self._has_diverged = True
            self.say(f"warning {diverged}, for {DIVERGED_LINES} lines in a row; {DIVERGED_ADVICE}")

    def say(self, text: str) -> None:
        """A sentence for the person, above the bar."""
        if self._display is not None:
            self._display.say(text)

    @property
    def watch(self) -> str | None:
        """Where the trackers show the run; None without one."""
        return ", ".join(tracker.watch for tracker in self._trackers) or None

    def close_tracker(self) -> None:
        """Closes the tracker. To be called before the process group is destroyed."""
        self._call_tracker(lambda tracker: tracker.close())
        self._trackers = []

    def close(self) -> None:
        """Ends the tracker, the bar and the file."""
        self.close_tracker()
        if self._display is not None:
            self._display.close()
        if self._file is not None and not self._file.closed:
            if self._unwritten:
                self._append(b"")
            self._file.close()

    def _append(self, text: bytes) -> None:
        is_first = not self._unwritten
        self._unwritten += text
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if is_first:
                self.say(
                    f"{self._file.name}: cannot be written ({error.strerror}); the run continues, and its lines are "
                    "added once there is room"
                )

    def _call_tracker(self, act: Callable[[Tracker], None]) -> None:
        """Calls `act` with each tracker; one that fails is reported once and not called again."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever its library raises: no reason to end a run
                self._trackers.remove(tracker)
                self.say(
                    f"report_to: {tracker.name}: it failed ({first_line(error)}); the run continues without it, "
                    "metrics.jsonl has every line"
                )


def is_missing(path: Path) -> bool:
    """Whether there is surely nothing at `path`; a network file system that does not answer leaves that open."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class Display:
    """What the person sees on stderr: one bar at a terminal, one plain line for each line of metrics anywhere else."""

    def __init__(self, steps: int, start_step: int, losses: Iterable[float] = ()) -> None:
        """`losses`: those of the lines before `start_step`, from which the smoothed loss continues."""
        self._steps = steps
        self._smoothed, self._weight = 0.0, 0.0
        for loss in losses:
            self._smooth(loss)
        self._seen: deque[tuple[int, float]] = deque([(start_step, time.perf_counter())], maxlen=RATE_LINES)
        self._bar: Any = None
        if sys.stderr.isatty() or is_notebook():
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}"
            width = {"ncols": NOTEBOOK_COLUMNS} if is_notebook() else {"dynamic_ncols": True}
            self._bar = tqdm(total=steps, initial=start_step, bar_format=form, **width)

    def step(self, line: dict[str, Any]) -> None:
        """Shows a training line."""
        self._smooth(line["loss"])
        smoothed = self._smoothed / self._weight if self._weight else line["loss"]
        seconds_left = self._left(line["step"])
        if self._bar is not None:
            beside = len(f"100%|{'':{BAR_COLUMNS}}| {self._steps}/{self._steps}  ")
            columns = NOTEBOOK_COLUMNS if is_notebook() else os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._bar.set_description_str(shown_line(line, smoothed, seconds_left, columns - beside), refresh=False)
            self._bar.update(line["step"] - self._bar.n)
        else:
            shown = shown_line(line, smoothed, seconds_left)
            print(f"step {line['step']:>{len(str(self._steps))}}/{self._steps}  {shown}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A sentence, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar where it is."""
        if self._bar is not None:
            self._bar.close()

    def _smooth(self, loss: float) -> None:
        if math.isfinite(loss):
            self._smoothed = SMOOTHING * self._smoothed + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    def _left(self, step: int) -> float:
        """Seconds to the last step, at the pace of the last lines, evaluations and saves included."""
        first_step, started = self._seen[0]
        self._seen.append((step, time.perf_counter()))
        done = step - first_step
        return (self._steps - step) * (time.perf_counter() - started) / done if done > 0 else 0.0


def shown_line(line: dict[str, Any], smoothed: float, seconds_left: float, width: int | None = None) -> str:
    """A training line as it is shown; what does not fit into `width` characters is dropped, what matters least first.

    >>> line = {"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.8, "tokens_per_second": 5200.0, "mfu": None,
    ...         "peak_memory_bytes": 2**30}
    >>> shown_line(line, 1.6, 150.0)
    'loss 1.5000 (smoothed 1.6000)  lr 1.00e-03  grad 0.8  5,200 tokens/s  1.00 GiB  0:02:30 left'
    >>> shown_line(line, 1.6, 150.0, width=60)
    'loss 1.5000 (smoothed 1.6000)  5,200 tokens/s  0:02:30 left'
    >>> shown_line(line | {"rewards/accuracies": 0.75, "rewards/margins": 0.1234}, 1.6, 150.0, width=90)
    'loss 1.5000 (smoothed 1.6000)  accuracy 75%  margin 0.123  5,200 tokens/s  0:02:30 left'
    """
    parts = {
        "loss": f"loss {line['loss']:.4f} (smoothed {smoothed:.4f})",
        "accuracy": f"accuracy {line['rewards/accuracies']:.0%}" if "rewards/accuracies" in line else None,
        "margin": f"margin {line['rewards/margins']:.3g}" if "rewards/margins" in line else None,
        "reward": f"reward {line['reward']:.3g}" if "reward" in line else None,
        "learning_rate": f"lr {line['learning_rate']:.2e}",
        "grad_norm": f"grad {line['grad_norm']:.3g}",
        "speed": f"{line['tokens_per_second']:,.0f} tokens/s",
        "mfu": f"{line['mfu']:.1%} MFU" if line.get("mfu") is not None else None,
        "memory": f"{gib(line['peak_memory_bytes'])} GiB",
        "left": f"{timedelta(seconds=round(seconds_left))} left",
    }
    for least in ("", "memory", "grad_norm", "learning_rate", "mfu", "speed", "margin", "accuracy", "reward"):
        parts.pop(least, None)
        shown = "  ".join(part for part in parts.values() if part is not None)
        if width is None or len(shown) <= width:
            break
    return shown


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


def _rounded(value: Any) -> Any:
    """Nine digits say all that fp32 knows."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


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
