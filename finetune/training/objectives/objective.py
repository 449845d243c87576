"""What training minimizes: the protocol `Objective`, and the objective of supervised fine-tuning.

The optimizer step knows a method only by its `Objective`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from finetune.constants import Names
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.world import World

Metrics = dict[str, Tensor]
"""Metric's name -> [2]: its sum over a micro-batch, and the divisor of its average."""
Means = dict[str, float]
"""Metric's name -> its average over all ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The sums that an objective measured in one or more micro-batches of this rank.

    The tensors are on the device: reading one makes the host wait for it.
    """

    loss_sum: Tensor  # fp32, 0-dim
    # metric's name -> fp32[2]: a sum, and its divisor. Ranks add them up by position, so every rank
    # has the same names in the same order.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # metric's name -> fp32, 0-dim: the largest value, at least 0
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    # fp64[documents, columns] each, of held-out data only: `describe_rows` computes from them the
    # metrics that are not means
    rows: tuple[Tensor, ...] = ()

    def __add__(self, other: "Measured") -> "Measured":
        metrics = dict(self.metrics)
        for name, sum_and_divisor in other.metrics.items():
            if name in metrics:
                metrics[name] = metrics[name] + sum_and_divisor
            else:
                metrics[name] = sum_and_divisor
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima.get(name, value), value)
        return Measured(self.loss_sum + other.loss_sum, metrics, maxima, self.rows + other.rows)

    def detach(self) -> "Measured":
        """Returns the sums and maxima without their graph; leaves out the rows."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        maxima = {name: value.detach() for name, value in self.maxima.items()}
        return Measured(self.loss_sum.detach(), metrics, maxima)

    def gather_rows(self, world: World) -> Tensor:
        """Returns the rows of the documents of all ranks, fp64[documents, columns], on every rank.

        All ranks call it. The result is fp64[0] if there are no rows.
        """
        own_rows = []
        # The ranks that share a batch have the same rows: only the first of them adds them.
        if self.rows and world.is_first_of_batch:
            own_rows = torch.cat(self.rows).tolist()
        all_rows = list(chain.from_iterable(world.gather(own_rows)))
        return torch.tensor(all_rows, dtype=torch.float64)

    def average(self, count: int, world: World) -> tuple[float, Means]:
        """Averages the loss and the metrics over all ranks. All ranks call it.

        Args:
            count: The divisor of the loss, over all ranks.
            world: The ranks of the run.

        Returns:
            The loss (nan if `count` is 0); and each metric whose divisor is not 0, and each
            maximum.
        """
        return self.add_up(world).average(count)

    def add_up(self, world: World) -> "Totals":
        """Adds up the sums of all ranks, without waiting for the device. All ranks call it."""
        largest = None
        if self.maxima:
            largest = world.largest(torch.stack([*self.maxima.values()]))
        sums = world.sum_over_groups(torch.cat([self.loss_sum[None], *self.metrics.values()]))
        return Totals(sums, tuple(self.metrics), largest, tuple(self.maxima))


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of all ranks, on the device: reading them makes the host wait for it."""

    sums: Tensor  # fp32[1 + 2 x metrics]: of the loss, then a sum and its divisor for each metric
    metrics: Names  # the names of the metrics in `sums`
    largest: Tensor | None  # fp32[maxima]: the largest values of all ranks; None if none are taken
    maxima: Names  # the names of the metrics in `largest`

    def average(self, count: int) -> tuple[float, Means]:
        """Divides the sums; waits for the device.

        Returns:
            The loss divided by `count` (nan if that is 0); and each metric whose divisor is not 0,
            and each maximum.
        """
        loss_sum, *pairs = self.sums.tolist()
        metric_sums = pairs[::2]
        divisors = pairs[1::2]
        values = {}
        for name, metric_sum, divisor in zip(self.metrics, metric_sums, divisors, strict=True):
            if divisor:
                values[name] = metric_sum / divisor
        if self.largest is not None:
            values |= zip(self.maxima, self.largest.tolist(), strict=True)
        loss = loss_sum / count if count else float("nan")
        return loss, values


class Objective(Protocol):
    """A method of training: its loss and its metrics.

    A rank that has no row left in a step gets a filler: a micro-batch without documents. Its loss
    is 0, but has a graph, because every rank must take part in the collectives of the forward and
    the backward.
    """

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "Objective":
        """Computes what `measure` needs to know of a whole step or evaluation before its first
        micro-batch.

        All ranks call it.

        Args:
            model: The model that is trained.
            micro_batches: Returns this rank's micro-batches, from the first, at each call.
            world: The ranks of the run.

        Returns:
            The objective that measures this step or evaluation; self if nothing is prepared.
        """
        return self

    def count(self, batch: StepBatch) -> int:
        """Returns the divisor of the step's loss, over all ranks.

        It is the step's trained tokens, unless the method averages over something else, such as
        pairs.
        """
        return batch.trained_tokens

    @abstractmethod
    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Computes the loss summed over one micro-batch, with its graph.

        If it runs several forwards of `model`, the last must be the one that is trained: the
        auxiliary loss of a mixture of experts is computed from the last forward.

        Args:
            model: The model that is trained, in training or evaluation mode.
            micro_batch: On the device. It may be a filler.
            inputs: The model's keyword arguments for the micro-batch. In training they add noise to
                the embeddings if the recipe asks for it.
            batch: The step of the micro-batch.
        """

    def complete(self, means: Means) -> Means:
        """Returns the averaged metrics, and those that are computed from them."""
        return means

    def for_evaluation(self) -> "Objective":
        """Returns the objective that measures held-out data."""
        return self

    def describe_rows(self, rows: Tensor) -> Means:
        """Computes the metrics of held-out data that are not means.

        `rows`: those of all documents, as `Measured.gather_rows` returns them.
        """
        return {}

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """Returns what a checkpoint after `step` steps must keep for this method.

        The keys are names of files in the checkpoint, the values their contents.
        """
        return {}

    def resume(self, checkpoint: Path, step: int) -> None:
        """Reads back what `describe_files` kept.

        All ranks call it.

        Args:
            checkpoint: The folder of a verified checkpoint.
            step: How many steps were done when it was saved.
        """
        return


class Objectives(NamedTuple):
    """The objectives of a run."""

    training: Objective
    held_out: Objective

    @classmethod
    def of(cls, training: Objective) -> "Objectives":
        """Pairs a training objective with the one that it has for held-out data."""
        return cls(training, training.for_evaluation())


class GroupObjective(Objective):
    """A method whose loss is averaged over groups of documents, such as pairs."""

    def count(self, batch: StepBatch) -> int:
        """Returns the number of the step's groups, over all ranks."""
        return batch.groups


class TokenCrossEntropy(Objective):
    """Supervised fine-tuning: the cross entropy, averaged over trained tokens."""

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Returns the loss that the model itself computes: the summed cross entropy."""
        return Measured(model(**inputs))


SFT = TokenCrossEntropy()
