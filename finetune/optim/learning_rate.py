"""The learning rate: a pure function of the step, so that there is no scheduler to save."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from finetune.config.schema import Optimization
from finetune.constants import count_steps

DECAY_SHARE = 0.1  # of a run's steps, in which warmup_stable_decay decays unless num_decay_steps is given
INVERSE_SQRT_TIMESCALE = 10_000  # transformers', where nothing warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak` over `warmup_steps`, then `kind` down to `floor` at the last of `steps`."""

    peak: float
    steps: int
    warmup_steps: int = 0
    floor: float = 0.0
    kind: str = "cosine"  # lr_scheduler_type
    arguments: Mapping[str, float | str] = field(default_factory=dict)  # lr_scheduler_kwargs


def build_schedule(optimization: Optimization, steps: int) -> Schedule:
    """The recipe's schedule for a run of `steps` optimizer steps."""
    warmup = optimization.warmup_steps
    if warmup is None:
        warmup = math.ceil(optimization.warmup_ratio * steps)
    return Schedule(
        peak=optimization.learning_rate,
        steps=steps,
        warmup_steps=min(warmup, steps),
        floor=optimization.learning_rate * optimization.min_lr_ratio,
        kind=optimization.lr_scheduler_type,
        arguments=optimization.lr_scheduler_kwargs or {},
    )


def compute_learning_rate(step: int, schedule: Schedule) -> float:
    """The learning rate of optimizer step `step` (0-based).

    Transformers' schedules, whose warm-up begins at 0; this one begins one step further, so that no step is lost.
    Cosine: Loshchilov and Hutter 2017, eq. 5, without restarts.

    >>> s = Schedule(peak=1.0, warmup_steps=2, steps=10)
    >>> [round(compute_learning_rate(step, s), 3) for step in (0, 1, 2, 6, 9, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.038, 0.0]
    """
    if step < schedule.warmup_steps:
        lowest = schedule.floor if schedule.kind == "warmup_stable_decay" else 0.0  # as in transformers
        return lowest + (schedule.peak - lowest) * (step + 1) / schedule.warmup_steps
    if schedule.kind in ("constant", "constant_with_warmup"):
        return schedule.peak
    if schedule.kind == "inverse_sqrt":
        scale = float(schedule.arguments.get("timescale", schedule.warmup_steps or INVERSE_SQRT_TIMESCALE))
        return schedule.peak * math.sqrt(scale / (step - schedule.warmup_steps + scale))
    return schedule.floor + (schedule.peak - schedule.floor) * _share_left(step, schedule)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _share_left(step: int, schedule: Schedule) -> float:
    """1 at the end of the warm-up, 0 at the end of the run."""
    after_warmup = schedule.steps - schedule.warmup_steps
    if schedule.kind == "warmup_stable_decay":
        decay = count_steps(float(schedule.arguments.get("num_decay_steps", DECAY_SHARE)), schedule.steps)
        decay = max(1, min(decay or 1, after_warmup))
        done = min(1.0, max(0.0, (step - (schedule.steps - decay)) / decay))
        return DECAYS[str(schedule.arguments.get("decay_type", "cosine"))](done)
    done = min(1.0, (step - schedule.warmup_steps) / max(1, after_warmup))
    if schedule.kind == "polynomial":
        return float((1 - done) ** float(schedule.arguments.get("power", 1.0)))
    return DECAYS[schedule.kind.removesuffix("_with_min_lr")](done)


DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
