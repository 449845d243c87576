"""What training minimizes: the `Objective` protocol, which is all that a step knows of a method,
and fine-tuning's.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.world import World


@dataclass(frozen=True, slots=True)
class Measured:
    """The sums that an objective measured in one or more micro-batches of this rank.

    Reading a tensor waits for the device.
    """

    loss_sum: Tensor  # fp32, 0-dim
    # By the name of a metric, fp32[2]: a sum, and what it is divided by. The same names on every
    # rank.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # fp32, 0-dim: the largest of a number, not below 0
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    # fp64[documents, columns] each: of held-out documents, what metrics that are no means are
    # computed from
    rows: tuple[Tensor, ...] = ()

    def __add__(self, other: "Measured") -> "Measured":
        metrics = {name: self.metrics.get(name, 0) + pair for name, pair in other.metrics.items()}
        maxima = {
            name: torch.maximum(self.maxima.get(name, most), most)
            for name, most in other.maxima.items()
        }
        return Measured(
            self.loss_sum + other.loss_sum,
            {**self.metrics, **metrics},
            {**self.maxima, **maxima},
            self.rows + other.rows,
        )

    def detach(self) -> "Measured":
        """The same without the graph."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        maxima = {name: value.detach() for name, value in self.maxima.items()}
        return Measured(self.loss_sum.detach(), metrics, maxima)

    def gather_rows(self, world: World) -> Tensor:
        """The rows of all documents, on every rank. All ranks call it."""
        mine = torch.cat(self.rows).tolist() if self.rows and world.is_first_of_batch else []
        every = [row for rows in world.gather(mine) for row in rows]
        return torch.tensor(every, dtype=torch.float64)

    def average(self, count: int, world: World) -> tuple[float, dict[str, float]]:
        """Averages over all ranks. All ranks call it.

        Args:
            count: What the loss is divided by, over all ranks.
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

    sums: Tensor  # fp32: the loss, then a sum and what it is divided by of each metric
    metrics: tuple[str, ...]
    largest: Tensor | None
    maxima: tuple[str, ...]

    def average(self, count: int) -> tuple[float, dict[str, float]]:
        """Returns the loss over `count`, and each metric whose divisor is not 0."""
        total, *pairs = self.sums.tolist()
        means = {
            name: pairs[2 * i] / pairs[2 * i + 1]
            for i, name in enumerate(self.metrics)
            if pairs[2 * i + 1]
        }
        if self.largest is not None:
            means |= zip(self.maxima, self.largest.tolist(), strict=True)
        return total / count if count else float("nan"), means


class Objective(Protocol):
    """A method of training: its loss and its metrics."""

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
        """Returns the divisor of the step's loss, over all ranks: its trained tokens, unless a
        method counts pairs.
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
            micro_batch: On the device. It may hold no document.
            inputs: The model's keyword arguments for the micro-batch.
            batch: The step that it is part of.
        """

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """Adds metrics that follow from the averaged ones."""
        return means

    def for_evaluation(self) -> "Objective":
        """The same, as it measures held-out data."""
        return self

    def describe_rows(self, rows: Tensor) -> dict[str, float]:
        """Metrics that are no means, of the rows of all held-out documents: see `Measured.rows`."""
        return {}

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """Returns the files that the steps after `step` need beside the weights: name in a
        checkpoint -> content.
        """
        return {}

    def resume(self, checkpoint: Path, step: int) -> None:
        """Takes what `describe_files` has left in a verified checkpoint of `step` steps.

        All ranks call it.
        """
        return


class Objectives(NamedTuple):
    """The objectives of a run."""

    training: Objective
    held_out: Objective


class TokenCrossEntropy(Objective):
    """Supervised fine-tuning: the mean cross entropy of the trained tokens."""

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The summed loss of `models/cross_entropy.py`."""
        return Measured(model(**inputs))


SFT = TokenCrossEntropy()
