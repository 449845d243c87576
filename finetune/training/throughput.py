"""What the steps between two lines of metrics amount to: loss, tokens per second, MFU, memory."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.config.layout import Sharding
from finetune.data.batches import StepBatch
from finetune.distributed.parallelize import unwrap
from finetune.flops import fp8_share_of, mix_peaks, peak_flops_of
from finetune.models.moe.experts import find_routing
from finetune.progress import Progress
from finetune.training.objectives.sft import Measured

if TYPE_CHECKING:
    from finetune.training.training_run import TrainingRun


def peak_flops(device: torch.device, fp8_share: float = 0.0) -> float | None:
    """The device's dense peak in FLOP per second; None where it is not known (a CPU). `fp8_share`: of the FLOP, what is
    multiplied in FP8; the rest in bf16."""
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
        """Around an evaluation or a save: its seconds are no step's. Waits for the device, whose queue holds the
        steps."""
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
