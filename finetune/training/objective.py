"""What training minimizes: `Objective`, all that a step, an evaluation and the metrics know of a method, and that of sft."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from finetune.data.batches import StepBatch
from finetune.data.collate import MicroBatch
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
        """The loss, which is the sum over `count`, and the metrics; over all ranks, which all call it."""
        total, *pairs = world.sum(torch.cat([self.loss_sum[None], *self.metrics.values()])).tolist()
        means = {name: _divide(*pairs[2 * i : 2 * i + 2]) for i, name in enumerate(self.metrics)}
        return _divide(total, count), means


class Objective(Protocol):
    """A method of training: its loss, and what it shows of it."""

    def count(self, batch: StepBatch) -> int:
        """What the step's loss is averaged over, of all ranks: its trained tokens, its pairs."""

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The loss summed over `micro_batch`, which is on the device and may hold no document, in the graph.

        The last forward of `model` (in whatever mode it is) is the trained one: experts' auxiliary loss reads it.

        Args:
            inputs: the model's keyword arguments for the micro-batch.
            batch: the step that it is part of.
        """


class Objectives(NamedTuple):
    """The objectives of a run."""

    training: Objective
    held_out: Objective


class TokenCrossEntropy:
    """Supervised fine-tuning: the mean cross entropy of the trained tokens."""

    def count(self, batch: StepBatch) -> int:
        """The trained tokens of the step."""
        return batch.trained_tokens

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The summed loss of `models/loss.py`."""
        return Measured(model(**inputs))


SFT = TokenCrossEntropy()


def _divide(total: float, count: float) -> float:
    return total / count if count else float("nan")
