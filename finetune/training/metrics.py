"""The metrics of a run: sums over the steps between two lines, and where the lines go
(metrics.jsonl, trackers, stderr).

A training line has the loss of the steps since the last one; other lines have the results of an
evaluation, or the seconds of a phase.
"""

import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from finetune.config.layout import Sharding
from finetune.constants import CACHE_VARIABLE
from finetune.data.batches import StepBatch
from finetune.errors import UserError, first_line, is_notebook
from finetune.files.json_files import read_json_lines
from finetune.files.phases import count_starts
from finetune.files.run_files import (
    DIVERGED_LINES,
    describe_missing,
    drop_later_lines,
    find_divergence,
    losses_of,
    readable_lines,
    remove_doubled,
)
from finetune.flops import fp8_share_of, mix_peaks, peak_flops_of
from finetune.training.callbacks import Tracker
from finetune.training.objectives.objective import Measured
from finetune.units import counted, gib

SMOOTHING = 0.9  # weight of the past in the smoothed loss, which is shown and not logged
BAR_COLUMNS = 8  # of the bar, at least
NOTEBOOK_COLUMNS = 110  # of the bar with the text beside it, since there is no terminal to ask
RATE_LINES = 20  # lines of metrics from which the time left is estimated
DIVERGED_ADVICE = "lower learning_rate, or raise warmup_ratio"


class Window:
    """The steps since the last line of metrics.

    Their loss stays on the device until a line is due.
    """

    def __init__(self, device: torch.device) -> None:
        self.measured = Measured(torch.zeros((), device=device))
        self.count = 0  # the divisor of the loss, over all ranks
        self.tokens = 0
        self.squared_tokens = 0  # the squares of the documents' lengths
        self.data_wait_seconds = 0.0
        self._device = device
        self._seconds = 0.0  # of the steps before the last pause
        self._started = time.perf_counter()

    def add(
        self, measured: Measured, count: int, batch: StepBatch, data_wait_seconds: float
    ) -> None:
        """Adds one step.

        Args:
            measured: On this rank.
            count: The divisor of the step's loss, over all ranks.
            batch: Of the step; its counts are those of all ranks.
            data_wait_seconds: How long the loop waited for the batch.
        """
        self.measured += measured
        self.count += count
        self.tokens += batch.tokens
        self.squared_tokens += batch.squared_tokens
        self.data_wait_seconds += data_wait_seconds

    def tokens_per_second(self) -> float:
        """Divides the tokens of all ranks by the seconds of the steps, without the pauses."""
        return self.tokens / (self._seconds + time.perf_counter() - self._started)

    def mean_length(self) -> float:
        """The length of the document that a token is in, averaged over tokens: attention costs a
        token in proportion to it.
        """
        return self.squared_tokens / max(1, self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the seconds of the block out: those of an evaluation or a save.

        Waits for the device before and after it.
        """
        self._synchronize()
        self._seconds += time.perf_counter() - self._started
        try:
            yield
        finally:
            self._synchronize()
            self._started = time.perf_counter()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Compilation:
    """Reads what torch.compile has counted; imports it only if it is on."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._graphs = 0  # that have been reported

    def seconds(self) -> float | None:
        """The seconds of compilation since the process began; None if nothing is compiled."""
        if not self._is_on:
            return None
        return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])

    def news(self) -> str | None:
        """A sentence about the graphs, if some were compiled since the last call; else None."""
        if not self._is_on:
            return None
        counters = torch._dynamo.utils.counters
        graphs = counters["stats"]["unique_graphs"]
        cached = counters["inductor"]["fxgraph_cache_hit"]
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        if graphs == self._graphs:
            return None
        self._graphs = graphs
        where = ""
        if CACHE_VARIABLE in os.environ:
            where = f", in {os.environ[CACHE_VARIABLE]}"
        return (
            f"compile {self.seconds():.0f} s so far: {counted(graphs, 'graph')}, of whose parts "
            f"{compiled} were compiled and {cached} were in the cache{where}"
        )


def peak_flops(device: torch.device, fp8_share: float = 0.0) -> float | None:
    """Returns the device's dense peak in FLOP per second, if `fp8_share` of the FLOP is in FP8;
    None if it is not known (a CPU).
    """
    if device.type != "cuda":
        return None
    peak = peak_flops_of(torch.cuda.get_device_name(device))
    return None if peak is None else mix_peaks(peak, fp8_share)


def find_fp8_share(model: nn.Module, sharding: Sharding, flop_per_token: float) -> float:
    """Computes the share of training FLOP that is multiplied in FP8; 0 if nothing is."""
    if sharding.fp8 is None:
        return 0.0
    from finetune.models.fp8 import count_multiplied  # imports torchao

    trained, frozen = count_multiplied(model)
    in_fp8 = sharding.fp8.multiplies_weight_gradients
    return fp8_share_of(flop_per_token, trained=trained, frozen=frozen, weight_gradients=in_fp8)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: of the GPU, or of the host without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsLog:
    """Appends lines to metrics.jsonl, passes them to trackers, and shows them."""

    def __init__(
        self, path: Path | None, steps: int, start_step: int, trackers: Sequence[Tracker] = ()
    ) -> None:
        """Opens `path` after its lines up to `start_step`.

        `path`: None on ranks other than 0, where the log writes and shows nothing. `steps`: of the
        run.
        """
        self._path = path
        self._file: Any = None
        self._unwritten = b""  # lines that a full disk has refused
        self._trackers = list(trackers)
        self._display: Display | None = None
        self._losses: list[tuple[int, float]] = []  # (step, loss) of every training line
        self._has_diverged = False
        self._start = 1  # which start of the run this is
        if path is not None:
            lines = read_json_lines(path) if start_step else []
            missing = describe_missing(path, start_step)
            kept = drop_later_lines(path, start_step)
            self._start = 1 + count_starts(kept)
            self._losses = losses_of(kept)
            self._display = Display(steps, start_step, (loss for _, loss in self._losses))
            self._file = path.open("ab", buffering=0)
            readable = readable_lines(lines)
            self._warn_of_removed(len(lines) - len(readable), "line that cannot be read")
            self._warn_of_removed(len(readable) - len(remove_doubled(readable)), "doubled line")
            if missing:
                self.say(f"warning {path}: {missing}; the report and the model card lack them")

    def _warn_of_removed(self, count: int, what: str) -> None:
        if count:
            what = what if count == 1 else what.replace("line", "lines")
            self.say(f"warning {self._path}: {count:,} {what} removed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes the log if the block raises; else `finish` has more to write."""
        if error is not None:
            self.close()

    def write(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics, and passes it to the trackers.

        A line that a full disk refuses is kept, and written before the next one that has room.
        """
        self._write_line(line)
        self._call_trackers(lambda tracker: tracker.log(line))

    def phase(self, line: dict[str, Any]) -> None:
        """Writes the seconds of a phase.

        Trackers do not get it: they take steps in order, and a save ends after later steps.
        """
        self._write_line({"step": line["step"], "start": self._start} | line)

    def step(self, line: dict[str, Any]) -> None:
        """Writes and shows a training line.

        Warns once, when the loss has been far above its start for long.

        Raises `UserError` if the run's folder has been removed: nothing of the run could be resumed
        or exported.
        """
        if self._is_removed():
            assert self._path is not None
            raise UserError(
                f"{self._path.parent}: the run's folder was removed or renamed; stopped at step "
                f"{line['step']:,}: no checkpoint could be resumed or exported from there. Start "
                "the run again, and leave its folder in place"
            )
        self.write(line)
        if self._display is not None:
            self._display.step(line)
        self._losses.append((line["step"], line["loss"]))
        if not self._has_diverged and (diverged := find_divergence(self._losses, at_end=False)):
            self._has_diverged = True
            self.say(f"warning {diverged}, for {DIVERGED_LINES} lines in a row; {DIVERGED_ADVICE}")

    def _is_removed(self) -> bool:
        """Whether neither metrics.jsonl nor recipe.yaml is in the run's folder any more."""
        if self._path is None:
            return False
        return is_missing(self._path) and is_missing(self._path.with_name("recipe.yaml"))

    def say(self, text: str) -> None:
        """Prints a sentence above the bar."""
        if self._display is not None:
            self._display.say(text)

    @contextmanager
    def report_unwritable(self, path: Path) -> Iterator[None]:
        """In this block a failed write of `path`, say to a full disk, is said and ends no run."""
        try:
            yield
        except OSError as error:
            self.say(f"{path}: cannot be written ({error.strerror}); the run continues")

    @property
    def watch(self) -> str | None:
        """Where the trackers show the run; None without one."""
        return ", ".join(tracker.watch for tracker in self._trackers) or None

    def close_trackers(self) -> None:
        """Closes the trackers. To be called before the process group is destroyed."""
        self._call_trackers(lambda tracker: tracker.close())
        self._trackers = []

    def close(self) -> None:
        """Closes the trackers, the bar and the file."""
        self.close_trackers()
        if self._display is not None:
            self._display.close()
        if self._file is not None and not self._file.closed:
            if self._unwritten:
                self._append(b"")
            self._file.close()

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._file is not None and not self._file.closed:
            self._append(
                json.dumps({key: _rounded(value) for key, value in line.items()}).encode() + b"\n"
            )

    def _append(self, text: bytes) -> None:
        """Writes what is unwritten and `text`; says so once if there is no room."""
        has_room = not self._unwritten
        self._unwritten += text
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if has_room:
                self.say(
                    f"{self._file.name}: cannot be written ({error.strerror}); the run continues, "
                    "and its lines are added once there is room"
                )

    def _call_trackers(self, act: Callable[[Tracker], None]) -> None:
        """Calls `act` with each tracker; one that fails is reported once and not called again."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever a tracker's library raises must not end a run
                self._trackers.remove(tracker)
                self.say(
                    f"report_to: {tracker.name}: it failed ({first_line(error)}); the run "
                    "continues without it, metrics.jsonl has every line"
                )


def is_missing(path: Path) -> bool:
    """Whether there is surely nothing at `path`; False if a network file system does not answer."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class Display:
    """The progress on stderr: a bar at a terminal, elsewhere a line for each line of metrics."""

    def __init__(self, steps: int, start_step: int, losses: Iterable[float] = ()) -> None:
        """`losses`: those of the lines before `start_step`, from which the smoothed loss
        continues.
        """
        self._steps = steps
        self._smoothed = 0.0
        self._weight = 0.0  # by which `_smoothed` is divided: it began at 0
        for loss in losses:
            self._smooth(loss)
        # (step, seconds on the clock) of the last lines
        self._seen: deque[tuple[int, float]] = deque(
            [(start_step, time.perf_counter())], maxlen=RATE_LINES
        )
        self._bar: Any = None
        if sys.stderr.isatty() or is_notebook():
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}"
            if is_notebook():
                width = {"ncols": NOTEBOOK_COLUMNS}
            else:
                width = {"dynamic_ncols": True}
            self._bar = tqdm(total=steps, initial=start_step, bar_format=form, **width)

    def step(self, line: dict[str, Any]) -> None:
        """Shows a training line."""
        self._smooth(line["loss"])
        if self._weight:
            smoothed = self._smoothed / self._weight
        else:
            smoothed = line["loss"]
        seconds_left = self._estimate_seconds_left(line["step"])
        if self._bar is not None:
            bar_columns = len(f"100%|{'':{BAR_COLUMNS}}| {self._steps}/{self._steps}  ")
            width = _find_columns() - bar_columns
            self._bar.set_description_str(
                shown_line(line, smoothed, seconds_left, width), refresh=False
            )
            self._bar.update(line["step"] - self._bar.n)
        else:
            step = f"{line['step']:>{len(str(self._steps))}}/{self._steps}"
            shown = shown_line(line, smoothed, seconds_left)
            print(f"step {step}  {shown}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Prints a sentence, above the bar."""
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

    def _estimate_seconds_left(self, step: int) -> float:
        """Estimates the seconds to the last step from the pace of the last lines, evaluations and
        saves included.
        """
        first_step, started = self._seen[0]
        self._seen.append((step, time.perf_counter()))
        done = step - first_step
        if done > 0:
            return (self._steps - step) * (time.perf_counter() - started) / done
        return 0.0


def _find_columns() -> int:
    """The columns of the terminal or the notebook."""
    if not is_notebook():
        with suppress(OSError):  # a terminal that is gone shows nothing anyway
            return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return NOTEBOOK_COLUMNS


# The parts of a shown line that are dropped if they do not fit, the least important first.
DROPPED_FIRST = (
    "memory",
    "grad_norm",
    "learning_rate",
    "mfu",
    "speed",
    "margin",
    "accuracy",
    "reward",
)


def shown_line(
    line: dict[str, Any], smoothed: float, seconds_left: float, width: int | None = None
) -> str:
    """Formats a training line; drops parts of `DROPPED_FIRST` until `width` characters are enough.

    >>> line = {"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.8,
    ...         "tokens_per_second": 5200.0, "mfu": None, "peak_memory_bytes": 2**30}
    >>> shown_line(line, 1.6, 150.0)
    'loss 1.5000 (smoothed 1.6000)  lr 1.00e-03  grad 0.8  5,200 tokens/s  1.00 GiB  0:02:30 left'
    >>> shown_line(line, 1.6, 150.0, width=60)
    'loss 1.5000 (smoothed 1.6000)  5,200 tokens/s  0:02:30 left'
    >>> line |= {"rewards/accuracies": 0.75, "rewards/margins": 0.1234}
    >>> shown_line(line, 1.6, 150.0, width=90)
    'loss 1.5000 (smoothed 1.6000)  accuracy 75%  margin 0.123  5,200 tokens/s  0:02:30 left'
    """
    accuracy = line.get("rewards/accuracies", line.get("accuracy"))
    parts = {"loss": f"loss {line['loss']:.4f} (smoothed {smoothed:.4f})"}
    if accuracy is not None:
        parts["accuracy"] = f"accuracy {accuracy:.0%}"
    if "rewards/margins" in line:
        parts["margin"] = f"margin {line['rewards/margins']:.3g}"
    if "reward" in line:
        parts["reward"] = f"reward {line['reward']:.3g}"
    parts["learning_rate"] = f"lr {line['learning_rate']:.2e}"
    parts["grad_norm"] = f"grad {line['grad_norm']:.3g}"
    parts["speed"] = f"{line['tokens_per_second']:,.0f} tokens/s"
    if line.get("mfu") is not None:
        parts["mfu"] = f"{line['mfu']:.1%} MFU"
    parts["memory"] = f"{gib(line['peak_memory_bytes'])} GiB"
    parts["left"] = f"{timedelta(seconds=round(seconds_left))} left"
    for name in DROPPED_FIRST:
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def _rounded(value: Any) -> Any:
    """Rounds a number to nine digits, which hold all that fp32 does."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return value
