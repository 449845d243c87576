"""The metrics of a run: what steps amount to between two lines, and the lines in metrics.jsonl, in
a bar or a log.
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

SMOOTHING = 0.9  # weight of the past in the loss that is shown beside the logged one
BAR_COLUMNS = 8  # of the bar itself, at least
NOTEBOOK_COLUMNS = 110  # of the bar with what stands beside it, where there is no terminal to ask
RATE_LINES = 20  # lines of metrics from which the time left is estimated
DIVERGED_ADVICE = "lower learning_rate, or raise warmup_ratio"


class Window:
    """The steps since the last line of metrics.

    Their loss stays on the device until a line is due.
    """

    def __init__(self, device: torch.device) -> None:
        self.measured = Measured(torch.zeros((), device=device))
        self.count = 0  # what the loss is averaged over, of all ranks
        self.tokens = 0
        self.squared_tokens = 0  # of the documents' lengths
        self.data_wait_seconds = 0.0
        self._device = device
        self._seconds = 0.0  # of the steps before the last pause
        self._started = time.perf_counter()

    def add(
        self, measured: Measured, count: int, batch: StepBatch, data_wait_seconds: float
    ) -> None:
        """Adds one step: what was measured on this rank, and its batch with the counts of all
        ranks.
        """
        self.measured += measured
        self.count += count
        self.tokens += batch.tokens
        self.squared_tokens += batch.squared_tokens
        self.data_wait_seconds += data_wait_seconds

    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the seconds of the steps, without the pauses."""
        return self.tokens / (self._seconds + time.perf_counter() - self._started)

    def mean_length(self) -> float:
        """The mean length of a token's document: what attention costs a token, wherever documents
        begin in a row.
        """
        return self.squared_tokens / max(1, self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation or a save, whose seconds are no step's.

        Waits for the device to finish its steps.
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
    """Reads the counters between two lines of metrics.

    Imports torch's compiler only where it is used.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._graphs = 0  # that have been reported

    def seconds(self) -> float | None:
        """Since the process began; None where nothing is compiled."""
        if not self._is_on:
            return None
        return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])

    def news(self) -> str | None:
        """A sentence where graphs were compiled since it was asked last, else None."""
        if not self._is_on:
            return None
        counters = torch._dynamo.utils.counters
        graphs = counters["stats"]["unique_graphs"]
        cached = counters["inductor"]["fxgraph_cache_hit"]
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        if graphs == self._graphs:
            return None
        self._graphs = graphs
        if CACHE_VARIABLE in os.environ:
            where = f", in {os.environ[CACHE_VARIABLE]}"
        else:
            where = ""
        return (
            f"compile {self.seconds():.0f} s so far: {counted(graphs, 'graph')}, of whose parts "
            f"{compiled} were compiled and {cached} were in the cache{where}"
        )


def peak_flops(device: torch.device, fp8_share: float = 0.0) -> float | None:
    """The device's dense peak in FLOP per second, `fp8_share` of it in FP8; None if not known (a
    CPU).
    """
    if device.type == "cuda":
        peak = peak_flops_of(torch.cuda.get_device_name(device))
    else:
        peak = None
    return None if peak is None else mix_peaks(peak, fp8_share)


def find_fp8_share(model: nn.Module, sharding: Sharding, flop_per_token: float) -> float:
    """The share of training FLOP that is multiplied in FP8; 0 if nothing is."""
    if sharding.fp8 is None:
        return 0.0
    from finetune.models.fp8 import count_multiplied  # imports torchao

    trained, frozen = count_multiplied(model)
    in_fp8 = sharding.fp8.multiplies_weight_gradients
    return fp8_share_of(flop_per_token, trained=trained, frozen=frozen, weight_gradients=in_fp8)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: of the GPU, or of the host where there is
    none.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsLog:
    """Appends to metrics.jsonl, passes lines to trackers, and prints.

    On ranks other than 0 it is silent.
    """

    def __init__(
        self, path: Path | None, steps: int, start_step: int, trackers: Sequence[Tracker] = ()
    ) -> None:
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
            for count, what in (
                (len(lines) - len(readable), "line that cannot be read"),
                (len(readable) - len(remove_doubled(readable)), "doubled line"),
            ):
                if count:
                    self.say(
                        f"warning {path}: {count:,} "
                        f"{what if count == 1 else what.replace('line', 'lines')} removed"
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
        """One line of metrics.jsonl.

        What a full disk refuses is kept, and written before the next line with room.
        """
        self._write_line(line)
        self._call_tracker(lambda tracker: tracker.log(line))

    def phase(self, line: dict[str, Any]) -> None:
        """Writes the seconds of a phase.

        Trackers do not get them: they take steps in order, and a save ends late.
        """
        self._write_line({"step": line["step"], "start": self._start} | line)

    def step(self, line: dict[str, Any]) -> None:
        """Writes and shows a training line.

        Warns once, when the loss has been far above its start for long.

        Raises `UserError` where the run's folder has been removed: nothing of the run could be
        resumed or exported.
        """
        if (
            self._path is not None
            and is_missing(self._path)
            and is_missing(self._path.with_name("recipe.yaml"))
        ):
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

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._file is not None and not self._file.closed:
            self._append(
                json.dumps({key: _rounded(value) for key, value in line.items()}).encode() + b"\n"
            )

    def _append(self, text: bytes) -> None:
        is_first = not self._unwritten
        self._unwritten += text
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if is_first:
                self.say(
                    f"{self._file.name}: cannot be written ({error.strerror}); the run continues, "
                    "and its lines are added once there is room"
                )

    def _call_tracker(self, act: Callable[[Tracker], None]) -> None:
        """Calls `act` with each tracker; one that fails is reported once and not called again."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever its library raises: no reason to end a run
                self._trackers.remove(tracker)
                self.say(
                    f"report_to: {tracker.name}: it failed ({first_line(error)}); the run "
                    "continues without it, metrics.jsonl has every line"
                )


def is_missing(path: Path) -> bool:
    """Whether there is surely nothing at `path`; a network file system that does not answer leaves
    that open.
    """
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
        self._weight = 0.0
        for loss in losses:
            self._smooth(loss)
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
        seconds_left = self._left(line["step"])
        if self._bar is not None:
            beside = len(f"100%|{'':{BAR_COLUMNS}}| {self._steps}/{self._steps}  ")
            columns = NOTEBOOK_COLUMNS
            if not is_notebook():
                # a terminal that is gone, where what is shown is dropped anyway
                with suppress(OSError):
                    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._bar.set_description_str(
                shown_line(line, smoothed, seconds_left, columns - beside), refresh=False
            )
            self._bar.update(line["step"] - self._bar.n)
        else:
            shown = shown_line(line, smoothed, seconds_left)
            print(
                f"step {line['step']:>{len(str(self._steps))}}/{self._steps}  {shown}",
                file=sys.stderr,
                flush=True,
            )

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
        """Seconds to the last step, at the pace of the last lines, evaluations and saves
        included.
        """
        first_step, started = self._seen[0]
        self._seen.append((step, time.perf_counter()))
        done = step - first_step
        if done > 0:
            return (self._steps - step) * (time.perf_counter() - started) / done
        return 0.0


def shown_line(
    line: dict[str, Any], smoothed: float, seconds_left: float, width: int | None = None
) -> str:
    """A training line as it is shown; what does not fit into `width` characters is dropped, what
    matters least first.

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
    parts = {
        "loss": f"loss {line['loss']:.4f} (smoothed {smoothed:.4f})",
        "accuracy": None if accuracy is None else f"accuracy {accuracy:.0%}",
        "margin": f"margin {line['rewards/margins']:.3g}" if "rewards/margins" in line else None,
        "reward": f"reward {line['reward']:.3g}" if "reward" in line else None,
        "learning_rate": f"lr {line['learning_rate']:.2e}",
        "grad_norm": f"grad {line['grad_norm']:.3g}",
        "speed": f"{line['tokens_per_second']:,.0f} tokens/s",
        "mfu": f"{line['mfu']:.1%} MFU" if line.get("mfu") is not None else None,
        "memory": f"{gib(line['peak_memory_bytes'])} GiB",
        "left": f"{timedelta(seconds=round(seconds_left))} left",
    }
    for least in (
        "",
        "memory",
        "grad_norm",
        "learning_rate",
        "mfu",
        "speed",
        "margin",
        "accuracy",
        "reward",
    ):
        parts.pop(least, None)
        shown = "  ".join(part for part in parts.values() if part is not None)
        if width is None or len(shown) <= width:
            break
    return shown


def _rounded(value: Any) -> Any:
    """Nine digits say all that fp32 knows."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return value
