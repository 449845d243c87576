"""What steps amount to between two lines of metrics (loss, tokens per second, MFU, memory), and their profile."""

import gc
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.checkpoint.manifest import Progress
from finetune.config.layout import Sharding
from finetune.data.batches import StepBatch
from finetune.distributed.model_parts import unwrap
from finetune.flops import fp8_share_of, mix_peaks, peak_flops_of
from finetune.models.decoder_layers import CACHE_VARIABLE
from finetune.models.routing import find_routing
from finetune.training.objectives.objective import Measured
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.training.training_run import TrainingRun


def peak_flops(device: torch.device, fp8_share: float = 0.0) -> float | None:
    """The device's dense peak in FLOP per second, `fp8_share` of it in FP8; None if not known (a CPU)."""
    peak = peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
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
    """The most memory that this process has held so far: of the GPU, or of the host where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Window:
    """The steps since the last line of metrics. Their loss stays on the device until a line is due."""

    def __init__(self, device: torch.device) -> None:
        self.measured = Measured(torch.zeros((), device=device))
        self.count = 0  # what the loss is averaged over, of all ranks
        self.tokens = 0
        self.squared_tokens = 0  # of the documents' lengths
        self.data_wait_seconds = 0.0
        self._device = device
        self._seconds = 0.0  # of the steps before the last pause
        self._started = time.perf_counter()

    def add(self, measured: Measured, count: int, batch: StepBatch, data_wait_seconds: float) -> None:
        """Adds one step: what was measured on this rank, and its batch with the counts of all ranks."""
        self.measured += measured
        self.count += count
        self.tokens += batch.tokens
        self.squared_tokens += batch.squared_tokens
        self.data_wait_seconds += data_wait_seconds

    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the seconds of the steps, without the pauses."""
        return self.tokens / (self._seconds + time.perf_counter() - self._started)

    def mean_length(self) -> float:
        """The mean length of a token's document: what attention costs a token, wherever documents begin in a row."""
        return self.squared_tokens / max(1, self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation or a save, whose seconds are no step's. Waits for the device to finish its steps."""
        self._synchronize()
        self._seconds += time.perf_counter() - self._started
        try:
            yield
        finally:
            self._synchronize()
            self._started = time.perf_counter()

    def metrics(
        self,
        run: "TrainingRun",
        progress: Progress,
        rate: float,
        grad_norm: torch.Tensor,
        compile_seconds: float | None = None,
    ) -> dict[str, Any]:
        """A line of metrics.jsonl. The one place of a step where the host waits for the device."""
        loss, means = self.measured.average(max(1, self.count), run.world)
        routing = find_routing(unwrap(run.model))
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": float(grad_norm),
            "tokens": progress.tokens,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_second": self.tokens_per_second(),
            "mfu": self._mfu(run, self.mean_length()),
            "mfu_of_whole_rows": self._mfu(run, run.recipe.data.max_length),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "data_wait_seconds": self.data_wait_seconds,
            **({} if compile_seconds is None else {"compile_seconds": compile_seconds}),
            **run.objectives.training.complete(means),
            **({} if routing is None else routing.take_metrics(run.world)),
        }

    def _mfu(self, run: "TrainingRun", length: float) -> float | None:
        """Model FLOP utilization with documents of `length` tokens; None where the device's peak is not known."""
        if run.peak_flops is None:
            return None
        return self.tokens_per_second() * run.count_flop(length) / (run.peak_flops * run.world.size)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Compilation:
    """Reads the counters between two lines of metrics. Imports torch's compiler only where it is used."""

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
        graphs, cached = counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        if graphs == self._graphs:
            return None
        self._graphs = graphs
        where = f", in {os.environ[CACHE_VARIABLE]}" if CACHE_VARIABLE in os.environ else ""
        return (
            f"compile {self.seconds():.0f} s so far: {counted(graphs, 'graph')}, of whose parts {compiled} were "
            f"compiled and {cached} were in the cache{where}"
        )


def profile_steps(
    batches: Iterator[StepBatch], steps: tuple[int, int] | None, folder: Path, rank: int
) -> Iterator[StepBatch]:
    """Yields `batches`, and records the steps from the first to the last of `steps` (1-based) in `folder`/profile.

    Leaves `trace-rank<r>.json` (chrome://tracing, ui.perfetto.dev), and on CUDA `memory-rank<r>.json`: the allocator's
    segments and blocks with the stack of each, without a pickle.
    """
    if not steps:
        yield from batches
        return
    first, last = steps
    profiler: torch.profiler.profile | None = None
    for batch in batches:
        if batch.step + 1 == first:
            profiler = _start()
        yield batch
        if batch.step + 1 == last and profiler is not None:
            _finish(profiler, folder / "profile", rank)
            profiler = None
    if profiler is not None:  # the run ended before `last`
        _finish(profiler, folder / "profile", rank)


def _start() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler


def _finish(profiler: torch.profiler.profile, folder: Path, rank: int) -> None:
    profiler.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace-rank{rank}.json"))
    if torch.cuda.is_available():
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        (folder / f"memory-rank{rank}.json").write_text(json.dumps(snapshot, default=str))


@contextmanager
def garbage_collected_between_lines() -> Iterator[None]:
    """Keeps Python's garbage collector out of the steps: a full collection stops one rank, and all others wait for it.

    The loop collects at its lines of metrics instead, see `collect_garbage`.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_garbage() -> None:
    """Collects what steps have left behind: the young generations only."""
    gc.collect(1)
