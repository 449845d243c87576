"""How far a training run has come: what a checkpoint stores beside model and optimizer. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any, Protocol


class StepCounts(Protocol):
    """What a step's batch says of the step over all ranks."""

    @property
    def epoch(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def trained_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. Data order, learning rate and dropout are pure functions of `step`, so this is all there is."""

    step: int = 0  # optimizer steps done
    epoch: float = 0.0
    tokens: int = 0  # read so far over all ranks, padding not counted
    trained_tokens: int = 0  # those with a label
    skipped_steps: int = 0  # steps without an update, since the loss or gradient was not finite
    best_eval_loss: float | None = None  # the lowest held-out loss so far
    best_step: int | None = None  # the step that had it
    evaluations_since_best: int = 0
    scaler: dict[str, Any] | None = None  # the fp16 gradient scaler's state
    callbacks: dict[str, Any] | None = None  # of a checkpoint: the states of a user's callbacks, by their names

    def after_step(self, batch: StepCounts, *, is_skipped: bool = False) -> "Progress":
        """The progress one step later, `batch`'s. `is_skipped`: its update was skipped."""
        return replace(
            self,
            step=self.step + 1,
            epoch=batch.epoch,
            tokens=self.tokens + batch.tokens,
            trained_tokens=self.trained_tokens + batch.trained_tokens,
            skipped_steps=self.skipped_steps + is_skipped,
        )

    def after_evaluation(self, loss: float) -> "Progress":
        """The progress after an evaluation that found the held-out `loss`.

        A nan is never the lowest, nor is the loss before the first step: no checkpoint holds that model.

        >>> progress = Progress(step=5).after_evaluation(2.0).after_evaluation(3.0)
        >>> progress.best_eval_loss, progress.best_step, progress.evaluations_since_best
        (2.0, 5, 1)
        """
        if self.step == 0:
            return self
        if loss < (float("inf") if self.best_eval_loss is None else self.best_eval_loss):
            return replace(self, best_eval_loss=loss, best_step=self.step, evaluations_since_best=0)
        return replace(self, evaluations_since_best=self.evaluations_since_best + 1)
