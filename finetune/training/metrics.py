"""The metrics of a run: sums over the steps between two lines of metrics.jsonl, and the log of the
lines.

The log writes each line to the file, passes it to trackers and shows it on stderr. A training line
has the loss and speed of the steps since the training line before. Other lines have the results of
an evaluation, or the seconds of a phase.
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
from finetune.flops import TokenPasses, fp8_share_of, mix_peaks, peak_flops_of
from finetune.training.callbacks import Tracker
from finetune.training.objectives.objective import Measured
from finetune.units import counted, gib

SMOOTHING = 0.9  # weight of the past in the smoothed loss, which is shown but not logged
BAR_COLUMNS = 8  # the smallest width of the bar itself
NOTEBOOK_COLUMNS = 110  # the width of the bar and its text in a notebook, which has no terminal
RATE_LINES = 20  # the time left is estimated from this many training lines
DIVERGED_ADVICE = "lower learning_rate, or raise warmup_ratio"


class Window:
    """Sums over the steps since the last training line.

    The loss stays on the device until the next line is due.
    """

    def __init__(self, device: torch.device) -> None:
        self.measured = Measured(torch.zeros((), device=device))
        self.steps = 0  # without those whose update was skipped
        self.count = 0  # the divisor of the loss, over all ranks
        self.tokens = 0  # over all ranks
        self.squared_tokens = 0  # the sum of the documents' squared lengths, over all ranks
        self.data_wait_seconds = 0.0
        self._device = device
        self._seconds = 0.0  # of the steps up to the end of the last pause
        self._started = time.perf_counter()  # the start, or the end of the last pause

    def add(
        self, measured: Measured, count: int, batch: StepBatch, data_wait_seconds: float
    ) -> None:
        """Adds one step.

        Args:
            measured: The step's sums on this rank.
            count: The divisor of the step's loss, over all ranks.
            batch: The step's batch; its counts are those of all ranks.
            data_wait_seconds: How long the loop waited for the batch.
        """
        self.measured += measured
        self.steps += 1
        self.count += count
        self.tokens += batch.tokens
        self.squared_tokens += batch.squared_tokens
        self.data_wait_seconds += data_wait_seconds

    def tokens_per_second(self) -> float:
        """Computes the tokens per second of all ranks together; pauses do not count."""
        return self.tokens / (self._seconds + time.perf_counter() - self._started)

    def mean_length(self) -> float:
        """Computes the mean, over tokens, of the length of a token's document in tokens.

        The FLOP of attention for a token are proportional to this length.
        """
        return self.squared_tokens / max(1, self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the seconds of this block, an evaluation or a save.

        Waits for the device before and after the block: work that steps have queued counts, work
        that the block has queued does not.
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
    """The counters of torch.compile, which is imported only if `is_on`."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._reported_graphs = 0

    def seconds(self) -> float | None:
        """Returns the seconds spent compiling since the process began; None if torch.compile is
        off.
        """
        if not self._is_on:
            return None
        return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])

    def describe_new_graphs(self) -> str | None:
        """Describes all compiled graphs, if there are new ones since the last call; else None."""
        if not self._is_on:
            return None
        counters = torch._dynamo.utils.counters
        graphs = counters["stats"]["unique_graphs"]
        cached = counters["inductor"]["fxgraph_cache_hit"]
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        if graphs == self._reported_graphs:
            return None
        self._reported_graphs = graphs
        cache_folder = ""
        if CACHE_VARIABLE in os.environ:
            cache_folder = f", in {os.environ[CACHE_VARIABLE]}"
        return (
            f"compile {self.seconds():.0f} s so far: {counted(graphs, 'graph')}, of whose parts "
            f"{compiled} were compiled and {cached} were in the cache{cache_folder}"
        )


def peak_flops(device: torch.device, fp8_share: float = 0.0) -> float | None:
    """Returns the device's dense peak in FLOP per second; None if it is not known, as of a CPU.

    `fp8_share`: the share of the FLOP that is in FP8; the rest is in bf16.
    """
    if device.type != "cuda":
        return None
    peak = peak_flops_of(torch.cuda.get_device_name(device))
    return None if peak is None else mix_peaks(peak, fp8_share)


def find_fp8_share(
    model: nn.Module, sharding: Sharding, flop_per_token: float, passes: TokenPasses
) -> float:
    """Computes the share of a step's FLOP that is in FP8; 0 without FP8.

    `flop_per_token`: all FLOP of a step for a token. `passes`: how often it computes one.
    """
    if sharding.fp8 is None:
        return 0.0
    from finetune.models.fp8 import count_multiplied  # imports torchao

    trained, frozen = count_multiplied(model)
    return fp8_share_of(
        flop_per_token,
        trained=trained,
        frozen=frozen,
        weight_gradients=sharding.fp8.multiplies_weight_gradients,
        passes=passes,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process so far: allocated on the GPU, or resident on the host
    in a run on CPUs.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # ru_maxrss is in KiB


class MetricsLog:
    """The log of a run: it appends lines to metrics.jsonl, passes them to trackers, and shows them
    on stderr.
    """

    def __init__(
        self, path: Path | None, steps: int, start_step: int, trackers: Sequence[Tracker] = ()
    ) -> None:
        """Opens metrics.jsonl, and drops the lines that the run will write again.

        Args:
            path: metrics.jsonl; None on ranks other than 0, where the log writes and shows nothing.
            steps: The steps of the whole run.
            start_step: Lines after this step are dropped; at 0, all lines.
            trackers: The open trackers, which get the lines too.
        """
        self._path = path
        self._file: Any = None
        self._unwritten = b""  # lines that could not be written yet, because the disk is full
        self._trackers = list(trackers)
        self._display: Display | None = None
        self._losses: list[tuple[int, float]] = []  # (step, loss) of every training line
        self._has_diverged = False
        self._start = 1  # counts the starts of the run: 1 in its first, 2 when it resumes
        if path is not None:
            lines = read_json_lines(path) if start_step else []
            missing = describe_missing(path, start_step)
            drop_later_lines(path, start_step)
            kept = readable_lines(read_json_lines(path))
            self._start = 1 + count_starts(kept)
            self._losses = losses_of(kept)
            self._display = Display(steps, start_step, (loss for _, loss in self._losses))
            self._file = path.open("ab", buffering=0)
            readable = readable_lines(lines)
            self._warn_of_removed(len(lines) - len(readable), "line that cannot be read")
            self._warn_of_removed(len(readable) - len(remove_doubled(readable)), "doubled line")
            if missing:
                self.say(f"warning {path}: {missing}; the report and the model card lack them")

    def _warn_of_removed(self, count: int, kind: str) -> None:
        """Warns that `count` lines were removed, if any. `kind`: says of one line why."""
        if count:
            kind = kind if count == 1 else kind.replace("line", "lines")
            self.say(f"warning {self._path}: {count:,} {kind} removed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes the log if the block raises. Else it stays open, because `finish` writes more."""
        if error is not None:
            self.close()

    def write(self, line: dict[str, Any]) -> None:
        """Writes a line to metrics.jsonl, and passes it to the trackers.

        If the disk is full, the line is kept and written once there is room.
        """
        self._write_line(line)
        self._call_trackers(lambda tracker: tracker.log(line))

    def write_phase(self, line: dict[str, Any]) -> None:
        """Writes a line with the seconds of a phase to metrics.jsonl.

        Trackers do not get it: their steps must not decrease, and a save may end after later steps
        were logged.
        """
        self._write_line({"step": line["step"], "start": self._start} | line)

    def step(self, line: dict[str, Any]) -> None:
        """Writes a training line, passes it to the trackers, and shows it.

        Warns once if the loss has been far above the first one for DIVERGED_LINES lines.

        Raises `UserError` if the run's folder was removed: the run could not be resumed or
        exported.
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
        """Whether both metrics.jsonl and recipe.yaml are gone, so that the run's folder must have
        been removed or renamed. False on ranks without a file.
        """
        if self._path is None:
            return False
        return is_missing(self._path) and is_missing(self._path.with_name("recipe.yaml"))

    def say(self, text: str) -> None:
        """Prints a line on stderr, above the bar. Does nothing on ranks other than 0."""
        if self._display is not None:
            self._display.say(text)

    @contextmanager
    def report_unwritable(self, path: Path) -> Iterator[None]:
        """If the block cannot write `path` (a full disk, say), prints that and lets the run
        continue.
        """
        try:
            yield
        except OSError as error:
            self.say(f"{path}: cannot be written ({error.strerror}); the run continues")

    @property
    def watch(self) -> str | None:
        """The pages or commands with which the trackers show the run; None without trackers."""
        return ", ".join(tracker.watch for tracker in self._trackers) or None

    def close_trackers(self) -> None:
        """Closes the trackers. Call it before the process group is destroyed; see
        `Tracker.close`.
        """
        self._call_trackers(lambda tracker: tracker.close())
        self._trackers = []

    def close(self) -> None:
        """Closes the trackers, the bar and the file."""
        self.close_trackers()
        if self._display is not None:
            self._display.close()
        if self._file is not None and not self._file.closed:
            if self._unwritten:
                self._append(b"")  # tries once more to write them
            self._file.close()

    def _write_line(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl, with rounded numbers; does nothing without a file."""
        if self._file is not None and not self._file.closed:
            self._append(
                json.dumps({key: _round(value) for key, value in line.items()}).encode() + b"\n"
            )

    def _append(self, text: bytes) -> None:
        """Writes the lines in `_unwritten` and then `text`.

        What cannot be written stays in `_unwritten`. The first failure is printed, not the next
        ones.
        """
        has_failed_before = bool(self._unwritten)
        self._unwritten += text
        try:
            while self._unwritten:
                written_bytes = self._file.write(self._unwritten)  # maybe fewer than there are
                self._unwritten = self._unwritten[written_bytes:]
        except OSError as error:
            if not has_failed_before:
                self.say(
                    f"{self._file.name}: cannot be written ({error.strerror}); the run continues, "
                    "and its lines are added once there is room"
                )

    def _call_trackers(self, act: Callable[[Tracker], None]) -> None:
        """Calls `act` with each tracker. If it fails, the tracker is reported and not called
        again.
        """
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
    """Whether `path` certainly does not exist. False if a network file system gives an error."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class Display:
    """The progress of training on stderr.

    In a terminal or a notebook it is a bar; elsewhere it is a line of text for each training line.
    """

    def __init__(self, steps: int, start_step: int, losses: Iterable[float] = ()) -> None:
        """Shows the bar at `start_step` of `steps`.

        `losses`: the losses that were logged up to `start_step`; the smoothed loss continues from
        them.
        """
        self._steps = steps
        self._smoothed = 0.0  # the weighted sum of the losses
        self._weight = 0.0  # the sum of the weights in `_smoothed`
        for loss in losses:
            self._smooth(loss)
        # (step, seconds on the clock) of the start and of the last training lines
        self._recent: deque[tuple[int, float]] = deque(
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
        else:  # no loss has been finite
            smoothed = line["loss"]
        seconds_left = self._estimate_seconds_left(line["step"])
        if self._bar is not None:
            bar_columns = len(f"100%|{'':{BAR_COLUMNS}}| {self._steps}/{self._steps}  ")
            width = _find_columns() - bar_columns
            self._bar.set_description_str(
                format_line(line, smoothed, seconds_left, width), refresh=False
            )
            self._bar.update(line["step"] - self._bar.n)
        else:
            step = f"{line['step']:>{len(str(self._steps))}}/{self._steps}"
            text = format_line(line, smoothed, seconds_left)
            print(f"step {step}  {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar, and leaves it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _smooth(self, loss: float) -> None:
        """Adds a loss to the exponential moving average, unless it is not finite."""
        if math.isfinite(loss):
            self._smoothed = SMOOTHING * self._smoothed + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    def _estimate_seconds_left(self, step: int) -> float:
        """Estimates the seconds from `step` to the last step, by the pace of the last RATE_LINES
        training lines.

        The pace includes the evaluations and saves between these lines.
        """
        first_step, started = self._recent[0]
        self._recent.append((step, time.perf_counter()))
        done = step - first_step
        if done > 0:
            return (self._steps - step) * (time.perf_counter() - started) / done
        return 0.0


def _find_columns() -> int:
    """Returns the width of the terminal or the notebook, in characters."""
    if not is_notebook():
        with suppress(OSError):  # the terminal was closed: nobody sees the width
            return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return NOTEBOOK_COLUMNS


# The parts that `format_line` drops from a line that is too long, in the order of dropping.
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


def format_line(
    line: dict[str, Any], smoothed: float, seconds_left: float, width: int | None = None
) -> str:
    """Formats a training line for the display.

    If the text has more than `width` characters, the parts in DROPPED_FIRST are left out one after
    another until it fits. None: no limit.

    >>> line = {"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.8,
    ...         "tokens_per_second": 5200.0, "mfu": None, "peak_memory_bytes": 2**30}
    >>> format_line(line, 1.6, 150.0)
    'loss 1.5000 (smoothed 1.6000)  lr 1.00e-03  grad 0.8  5,200 tokens/s  1.00 GiB  0:02:30 left'
    >>> format_line(line, 1.6, 150.0, width=60)
    'loss 1.5000 (smoothed 1.6000)  5,200 tokens/s  0:02:30 left'
    >>> line |= {"rewards/accuracies": 0.75, "rewards/margins": 0.1234}
    >>> format_line(line, 1.6, 150.0, width=90)
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


def _round(value: Any) -> Any:
    """Rounds a float to nine digits, which are enough to restore any fp32 number; returns other
    values unchanged.
    """
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return value
