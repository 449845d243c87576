"""A loss of the user's own, as `Session.forward_backward` takes it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from finetune.config.user_code import explained, place_of
from finetune.constants import Fields
from finetune.data.batches import MicroBatch, StepBatch
from finetune.errors import UserError
from finetune.models.log_probabilities import choose_label_head
from finetune.training.objectives.objective import Measured, Objective

LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""The `loss` of `Session.forward_backward`, which documents it."""


class AskedColumns(dict[str, Tensor]):
    """The columns of a batch by name; a missing one is explained to the user."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"the loss reads the column {name!r}, which the batch does not have; make it by "
            f"session.batch(rows, columns=[{name!r}])"
        )


@dataclass(frozen=True, slots=True)
class FunctionObjective(Objective):
    """A user's loss, averaged over what the recipe's method counts.

    Where the function fails, the loss is 0, since the other ranks wait in the backward;
    `raise_fault` raises the fault after it.
    """

    function: LossFunction
    counts_pairs: bool
    faults: list[UserError] = field(default_factory=list)

    def count(self, batch: StepBatch) -> int:
        """The step's trained tokens, or its pairs."""
        return batch.groups if self.counts_pairs else batch.trained_tokens

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Fields, batch: StepBatch
    ) -> Measured:
        """The function's loss; of a filler 0, with a graph: ranks meet in its backward too."""
        outputs = model(**inputs, head_function=choose_label_head(micro_batch.targets))
        if not micro_batch.example_ids:
            return Measured(outputs.sum() * 0.0)
        columns = AskedColumns(micro_batch.columns or {})
        try:
            return Measured(self._call(outputs, replace(micro_batch, columns=columns)))
        except UserError as fault:
            self.faults.append(fault)
            return Measured(outputs.sum() * 0.0)

    def _call(self, outputs: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Calls the function. Raises `UserError` if it fails or returns no loss."""
        with explained("loss", self.function):
            loss: object = self.function(outputs, micro_batch.with_documents())
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise UserError(
                f"{place_of(self.function)}loss: returned {_describe(loss)}; return one number "
                "with its graph, such as -log_probabilities.sum()"
            )
        return loss

    def raise_fault(self) -> None:
        """Raises the first fault of the function on this rank, if there was one."""
        if self.faults:
            raise self.faults[0]


def _describe(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    if loss.dim():
        return f"a tensor of shape {tuple(loss.shape)}"
    return "a tensor without a graph"
