"""How far a training run has come: what a checkpoint stores beside the state of model and optimizer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. Data order, learning rate and dropout are pure functions of `step`, so this is all there is."""

    step: int = 0  # optimizer steps done
    epoch: float = 0.0
    tokens: int = 0  # read so far over all ranks, padding not counted
    trained_tokens: int = 0  # those with a label
    skipped_steps: int = 0  # whose update was left out, since the loss or gradient was not finite
    best_eval_loss: float | None = None  # the lowest held-out loss so far
    best_step: int | None = None  # where it was
    evaluations_since_best: int = 0
    scaler: dict[str, Any] | None = None  # the fp16 gradient scaler's state
