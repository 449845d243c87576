"""What training minimizes: `Objective`, all that a step, an evaluation and the metrics know of a method, and that of
sft."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.world import World


@dataclass(frozen=True, slots=True)
class Measured:
    """What an objective found in one or more micro-batches of this rank. To read a tensor is to wait for the device."""

    loss_sum: Tensor  # fp32, 0-dim
    # By the name of a metric, fp32[2]: a sum, and what it is divided by. The same names on every rank.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: "Measured") -> "Measured":
        metrics = {name: self.metrics.get(name, 0) + pair for name, pair in other.metrics.items()}
        return Measured(self.loss_sum + other.loss_sum, {**self.metrics, **metrics})

    def detach(self) -> "Measured":
        """The same without the graph."""
        return Measured(self.loss_sum.detach(), {name: pair.detach() for name, pair in self.metrics.items()})

    def average(self, count: int, world: World) -> tuple[float, dict[str, float]]:
        """The loss, which is the sum over `count` (nan where that is 0), and the metrics that anything counts for; over
        all ranks, which all call it."""
        total, *pairs = world.sum_over_groups(torch.cat([self.loss_sum[None], *self.metrics.values()])).tolist()
        means = {name: pairs[2 * i] / pairs[2 * i + 1] for i, name in enumerate(self.metrics) if pairs[2 * i + 1]}
        return total / count if count else float("nan"), means


class Objective(Protocol):
    """A method of training: its loss, and what it shows of it."""

    def prepare(self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World) -> "Objective":
        """The objective with what it must know of all of this rank's micro-batches (those of a step, or of an
        evaluation) before the first of them is measured; itself where that is nothing. All ranks call it."""
        return self

    @abstractmethod
    def count(self, batch: StepBatch) -> int:
        """What the step's loss is averaged over, of all ranks: its trained tokens, its pairs."""

    @abstractmethod
    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The loss summed over `micro_batch`, which is on the device and may hold no document, in the graph.

        The last forward of `model` (in whatever mode it is) is the trained one: experts' auxiliary loss reads it.

        Args:
            inputs: the model's keyword arguments for the micro-batch.
            batch: the step that it is part of.
        """

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """The averaged metrics, with those that follow from others."""
        return means


class Objectives(NamedTuple):
    """The objectives of a run."""

    training: Objective
    held_out: Objective


class TokenCrossEntropy(Objective):
    """Supervised fine-tuning: the mean cross entropy of the trained tokens."""

    def count(self, batch: StepBatch) -> int:
        """The trained tokens of the step."""
        return batch.trained_tokens

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The summed loss of `models/head/cross_entropy.py`."""
        return Measured(model(**inputs))


SFT = TokenCrossEntropy()
