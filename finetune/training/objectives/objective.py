"""What training minimizes: the `Objective` protocol, which is all that a step knows of a method,
and the objective of supervised fine-tuning.
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
"""Metric -> [2]: its sum in a micro-batch, and the divisor."""
Means = dict[str, float]
"""Metric -> its average over all ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The sums that an objective measured in one or more micro-batches of this rank.

    Reading a tensor waits for the device.
    """

    loss_sum: Tensor  # fp32, 0-dim
    # By the name of a metric, fp32[2]: a sum, and its divisor. The same names on every rank, in the
    # same order: ranks add them up by their place.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # By the name of a metric, fp32, 0-dim: the largest value, not below 0
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    # fp64[documents, columns] each, of held-out documents alone: from them `describe_rows` computes
    # the metrics that are no means
    rows: tuple[Tensor, ...] = ()

    def __add__(self, other: "Measured") -> "Measured":
        metrics = dict(self.metrics)
        for name, pair in other.metrics.items():
            metrics[name] = metrics[name] + pair if name in metrics else pair
        maxima = dict(self.maxima)
        for name, most in other.maxima.items():
            maxima[name] = torch.maximum(maxima.get(name, most), most)
        return Measured(self.loss_sum + other.loss_sum, metrics, maxima, self.rows + other.rows)

    def detach(self) -> "Measured":
        """The same without the graph and the rows."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        maxima = {name: value.detach() for name, value in self.maxima.items()}
        return Measured(self.loss_sum.detach(), metrics, maxima)

    def gather_rows(self, world: World) -> Tensor:
        """Returns the rows of all documents, on every rank. All ranks call it."""
        own = []
        if self.rows and world.is_first_of_batch:  # the other ranks of its batch have the same
            own = torch.cat(self.rows).tolist()
        every = list(chain.from_iterable(world.gather(own)))
        return torch.tensor(every, dtype=torch.float64)

    def average(self, count: int, world: World) -> tuple[float, Means]:
        """Averages over all ranks. All ranks call it.

        Args:
            count: The divisor of the loss, over all ranks.
            world: The ranks of the run.

        Returns:
            The loss (nan if `count` is 0), and each metric whose divisor is not 0.
        """
        return self.add_up(world).average(count)

    def add_up(self, world: World) -> "Totals":
        """Adds up over all ranks, without waiting for the device. All ranks call it."""
        largest = None
        if self.maxima:
            largest = world.largest(torch.stack([*self.maxima.values()]))
        sums = world.sum_over_groups(torch.cat([self.loss_sum[None], *self.metrics.values()]))
        return Totals(sums, tuple(self.metrics), largest, tuple(self.maxima))


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over all ranks. Reading them waits for the device."""

    sums: Tensor  # fp32[1 + 2 x metrics]: the loss, then of each metric a sum and its divisor
    metrics: Names  # their names
    largest: Tensor | None  # fp32[maxima]; None if there are none
    maxima: Names  # their names

    def average(self, count: int) -> tuple[float, Means]:
        """Returns the loss over `count` (nan if 0), and each metric whose divisor is not 0."""
        loss_sum, *pairs = self.sums.tolist()
        values = {}
        for name, total, divisor in zip(self.metrics, pairs[::2], pairs[1::2], strict=True):
            if divisor:
                values[name] = total / divisor
        if self.largest is not None:
            values |= zip(self.maxima, self.largest.tolist(), strict=True)
        loss = loss_sum / count if count else float("nan")
        return loss, values


class Objective(Protocol):
    """A method of training: its loss and its metrics.

    A rank that has no row left in a step gets a filler, a micro-batch without documents. Its loss
    is 0, with a graph: the ranks' collectives meet in its forward and backward.
    """

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "Objective":
        """Prepares for all micro-batches of a step or an evaluation before the first is measured.

        All ranks call it.

        Args:
            model: The model that is trained.
            micro_batches: Returns this rank's micro-batches.
            world: The ranks of the run.

        Returns:
            The objective to measure with. Returns self if there is nothing to prepare.
        """
        return self

    def count(self, batch: StepBatch) -> int:
        """Returns the divisor of the step's loss, over all ranks: its trained tokens, unless the
        method counts something else, such as pairs.
        """
        return batch.trained_tokens

    @abstractmethod
    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Computes the loss summed over one micro-batch, with its graph.

        The last forward of `model` must be the trained one, because the experts' auxiliary loss
        reads it.

        Args:
            model: The model that is trained, in whatever mode it is.
            micro_batch: On the device. It may be a filler.
            inputs: The model's keyword arguments for the micro-batch.
            batch: The step of the micro-batch.
        """

    def complete(self, means: Means) -> Means:
        """Returns the averaged metrics with those that follow from them."""
        return means

    def for_evaluation(self) -> "Objective":
        """Returns the objective that measures held-out data."""
        return self

    def describe_rows(self, rows: Tensor) -> Means:
        """Computes the metrics that are no means from `Measured.rows` of all held-out documents."""
        return {}

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """Returns the files that the steps after `step` need beside the weights: name in a
        checkpoint -> content.
        """
        return {}

    def resume(self, checkpoint: Path, step: int) -> None:
        """Reads the files of `describe_files` from a verified checkpoint of `step` steps.

        All ranks call it.
        """
        return


class Objectives(NamedTuple):
    """The objectives of a run."""

    training: Objective
    held_out: Objective

    @classmethod
    def of(cls, training: Objective) -> "Objectives":
        """Pairs an objective with that of its evaluation."""
        return cls(training, training.for_evaluation())


class GroupObjective(Objective):
    """A method whose loss is averaged over groups of documents: pairs, rated answers, queries."""

    def count(self, batch: StepBatch) -> int:
        """The groups of the step."""
        return batch.groups


class TokenCrossEntropy(Objective):
    """Supervised fine-tuning: the mean cross entropy of the trained tokens."""

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The summed loss of `models/cross_entropy.py`."""
        return Measured(model(**inputs))


SFT = TokenCrossEntropy()
