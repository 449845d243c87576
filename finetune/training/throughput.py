"""What the steps between two lines of metrics amount to: loss, tokens per second, MFU, memory."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import StepBatch
from finetune.distributed.parallelize import unwrap
from finetune.flops import peak_flops_of
from finetune.models.experts import find_routing
from finetune.progress import Progress
from finetune.training.objective import Measured

if TYPE_CHECKING:
    from finetune.training.training_run import TrainingRun


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP per second; None where it is not known (a CPU)."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


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
        self.data_wait_seconds = 0.0
        self._device = device
        self._seconds = 0.0  # of the steps before the last pause
        self._started = time.perf_counter()

    def add(self, measured: Measured, count: int, batch: StepBatch, data_wait_seconds: float) -> None:
        """Adds one step: what was measured on this rank, and its batch with the counts of all ranks."""
        self.measured += measured
        self.count += count
        self.tokens += batch.tokens
        self.data_wait_seconds += data_wait_seconds

    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the seconds of the steps, without the pauses."""
        return self.tokens / (self._seconds + time.perf_counter() - self._started)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation or a save: its seconds are no step's. Waits for the device, whose queue holds the steps."""
        self._synchronize()
        self._seconds += time.perf_counter() - self._started
        try:
            yield
        finally:
            self._synchronize()
            self._started = time.perf_counter()

    def metrics(self, run: "TrainingRun", progress: Progress, rate: float, grad_norm: torch.Tensor) -> dict[str, Any]:
        """A line of metrics.jsonl. The one place of a step where the host waits for the device."""
        loss, means = self.measured.average(max(1, self.count), run.world)
        tokens_per_second = self.tokens_per_second()
        peak, routing = run.peak_flops, find_routing(unwrap(run.model))
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": float(grad_norm),
            "tokens": progress.tokens,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second * run.flop_per_token / (peak * run.world.size) if peak else None,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "data_wait_seconds": self.data_wait_seconds,
            **run.objectives.training.complete(means),
            **({} if routing is None else routing.take_metrics(run.world)),
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
