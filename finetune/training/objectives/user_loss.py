"""The objective of a loss function that a user passes to `Session.forward_backward`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from finetune.config.user_code import explained, place_of
from finetune.data.batches import MicroBatch, StepBatch
from finetune.errors import UserError
from finetune.models.log_probabilities import choose_label_head
from finetune.training.objectives.objective import Measured, Objective

LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""(log-probabilities, micro-batch) -> the loss, as `Session.forward_backward` documents it."""


class AskedColumns(dict[str, Tensor]):
    """The columns of a micro-batch by name. Reading a missing one raises `UserError`."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"the loss reads the column {name!r}, which the batch does not have; make it by "
            f"session.batch(rows, columns=[{name!r}])"
        )


@dataclass(frozen=True, slots=True)
class FunctionObjective(Objective):
    """A user's loss, averaged over the step's pairs or trained tokens.

    If the function fails, the loss is 0 for the time being, since the other ranks wait for this
    rank's backward. `raise_fault`, called after the backward, raises the error.
    """

    function: LossFunction
    counts_pairs: bool  # whether the recipe's method averages over pairs
    faults: list[UserError] = field(default_factory=list)  # of the function, on this rank

    def count(self, batch: StepBatch) -> int:
        """Returns the divisor of the step's loss, over all ranks: its pairs or trained tokens."""
        return batch.groups if self.counts_pairs else batch.trained_tokens

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Computes the function's loss; 0 for a filler, or if the function fails.

        A loss of 0 has a graph too, because every rank must take part in the collectives of the
        backward.
        """
        outputs = model(**inputs, head_function=choose_label_head(micro_batch.targets))
        is_filler = not micro_batch.example_ids
        if is_filler:
            return Measured(outputs.sum() * 0.0)
        columns = AskedColumns(micro_batch.columns or {})
        try:
            return Measured(self._call(outputs, replace(micro_batch, columns=columns)))
        except UserError as fault:
            self.faults.append(fault)
            return Measured(outputs.sum() * 0.0)

    def _call(self, log_probabilities: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Calls the user's function; returns the loss, 0-dim.

        Raises `UserError` if the function fails, or if it returns anything but one number with a
        graph.
        """
        with explained("loss", self.function):
            loss: object = self.function(log_probabilities, micro_batch.with_documents())
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise UserError(
                f"{place_of(self.function)}loss: returned {_describe(loss)}; return one number "
                "with its graph, such as -log_probabilities.sum()"
            )
        return loss

    def raise_fault(self) -> None:
        """Raises the first error of the function on this rank, if there was one."""
        if self.faults:
            raise self.faults[0]


def _describe(loss: object) -> str:
    """Describes, for a message, a value that is no loss: not a tensor, not one number, no graph."""
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    if loss.dim():
        return f"a tensor of shape {tuple(loss.shape)}"
    return "a tensor without a graph"
