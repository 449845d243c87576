"""Learning-rate schedules: a table of all facts about each `lr_scheduler_type`, and the rate."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from finetune.constants import Names, count_steps

# The share of a run's steps in which warmup_stable_decay decays, unless num_decay_steps is set.
DECAY_SHARE = 0.1
INVERSE_SQRT_TIMESCALE = 10_000  # transformers' default for a schedule without warm-up
# Shape of a decay -> function of the share of the decay's steps that is done, from 0 to 1. It
# returns the share of the learning rate that is left, from 1 to 0.
DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
DEFAULT_SCHEDULE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A linear warm-up and then a decay, over the steps of a run."""

    peak: float  # the learning rate after the warm-up
    steps: int  # optimizer steps of the run
    warmup_steps: int = 0
    floor: float = 0.0  # the learning rate that is reached after `steps` steps
    kind: str = DEFAULT_SCHEDULE  # lr_scheduler_type
    arguments: Mapping[str, float | str] = field(default_factory=dict)  # lr_scheduler_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """All facts about one `lr_scheduler_type`."""

    # (step after the warm-up, schedule) -> the share of `peak - floor` that is left, from 1 to 0
    share_left: Callable[[int, Schedule], float]
    # argument in lr_scheduler_kwargs, by transformers' name -> the words that it may be; empty: it
    # is a number above 0
    arguments: Mapping[str, Names] = field(default_factory=dict)
    has_end: bool = True  # False: it never reaches `floor`, so min_lr_ratio has no effect
    needs_floor: bool = False  # min_lr_ratio must be set
    warms_from_floor: bool = False  # the warm-up begins at `floor`; False: at 0


def _compute_progress(step: int, schedule: Schedule) -> float:
    """Returns the share of the steps after the warm-up that is done, at most 1."""
    steps_after_warmup = max(1, schedule.steps - schedule.warmup_steps)
    return min(1.0, (step - schedule.warmup_steps) / steps_after_warmup)


def _hold_then_decay(step: int, schedule: Schedule) -> float:
    """Returns 1, and over the last `num_decay_steps` of the run a decay from 1 to 0.

    `num_decay_steps` below 1 is a share of the run's steps.
    """
    wanted_steps = count_steps(
        float(schedule.arguments.get("num_decay_steps", DECAY_SHARE)), schedule.steps
    )
    steps_after_warmup = schedule.steps - schedule.warmup_steps
    decay_steps = max(1, min(wanted_steps or 1, steps_after_warmup))
    done = min(1.0, max(0.0, (step - (schedule.steps - decay_steps)) / decay_steps))
    return DECAYS[str(schedule.arguments.get("decay_type", "cosine"))](done)


def _decay_by_inverse_sqrt(step: int, schedule: Schedule) -> float:
    """Returns sqrt(timescale / (steps since the warm-up + timescale)).

    `timescale` is by default the number of warm-up steps, as in transformers.
    """
    timescale = float(
        schedule.arguments.get("timescale", schedule.warmup_steps or INVERSE_SQRT_TIMESCALE)
    )
    return math.sqrt(timescale / (step - schedule.warmup_steps + timescale))


_CONSTANT = ScheduleFacts(share_left=lambda step, schedule: 1.0, has_end=False)
SCHEDULES: Mapping[str, ScheduleFacts] = {
    DEFAULT_SCHEDULE: ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["cosine"](_compute_progress(step, schedule))
    ),
    "linear": ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["linear"](_compute_progress(step, schedule))
    ),
    "constant": _CONSTANT,
    "constant_with_warmup": _CONSTANT,
    "cosine_with_min_lr": ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["cosine"](_compute_progress(step, schedule)),
        needs_floor=True,
    ),
    "polynomial": ScheduleFacts(
        share_left=lambda step, schedule: (
            (1 - _compute_progress(step, schedule)) ** float(schedule.arguments.get("power", 1.0))
        ),
        arguments={"power": ()},
    ),
    "inverse_sqrt": ScheduleFacts(
        share_left=_decay_by_inverse_sqrt, arguments={"timescale": ()}, has_end=False
    ),
    "warmup_stable_decay": ScheduleFacts(
        share_left=_hold_then_decay,
        arguments={"num_decay_steps": (), "decay_type": tuple(DECAYS)},
        warms_from_floor=True,
    ),
}
# Short name in a recipe -> lr_scheduler_type.
SHORT_NAMES = {"wsd": "warmup_stable_decay"}
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
SCHEDULE_HELP = (
    f"What follows the linear warm-up, by Transformers' names, and {', '.join(SHORT_NAMES)} for "
    "the last. constant warms up too: warmup_steps: 0 leaves that out."
)
ARGUMENTS_HELP = (
    "What the schedule takes, by Transformers' names: power (polynomial), timescale "
    "(inverse_sqrt), num_decay_steps and decay_type (warmup_stable_decay: the last tenth of the "
    "steps and cosine; or linear, 1-sqrt)."
)
# Argument of transformers' schedules that is no lr_scheduler_kwargs here -> the recipe key to set.
SCHEDULE_KEYS = {
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "min_lr": "min_lr_ratio, a share of learning_rate",
    "lr_end": "min_lr_ratio, a share of learning_rate",
    "num_warmup_steps": "warmup_steps",
}


def compute_learning_rate(step: int, schedule: Schedule) -> float:
    """Returns the learning rate of optimizer step `step`, which counts from 0.

    The rate depends on the step alone, so a checkpoint needs no state of a scheduler. Rates are
    those of transformers, except that the warm-up is one step ahead: the first step has a rate
    above 0. Cosine: Loshchilov and Hutter 2017, eq. 5, without restarts.

    >>> s = Schedule(peak=1.0, warmup_steps=2, steps=10)
    >>> [round(compute_learning_rate(step, s), 3) for step in (0, 1, 2, 6, 9, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.038, 0.0]
    """
    facts = SCHEDULES[schedule.kind]
    if step < schedule.warmup_steps:
        start = schedule.floor if facts.warms_from_floor else 0.0  # as in transformers
        return start + (schedule.peak - start) * (step + 1) / schedule.warmup_steps
    return schedule.floor + (schedule.peak - schedule.floor) * facts.share_left(step, schedule)


def find_schedule_problems(kind: str, arguments: Mapping[str, float | str]) -> list[str]:
    """Lists what is wrong with `lr_scheduler_kwargs`, a sentence for each wrong argument.

    `kind`: lr_scheduler_type. `arguments`: lr_scheduler_kwargs.
    """
    accepted = SCHEDULES[kind].arguments
    problems = []
    for name, value in arguments.items():
        if name in SCHEDULE_KEYS:
            problems.append(f"{name}: here it is {SCHEDULE_KEYS[name]}")
        elif name not in accepted:
            problems.append(f"{name}: {kind} takes {' and '.join(accepted) or 'no arguments'}")
        elif accepted[name] and value not in accepted[name]:
            problems.append(
                f"{name}: {value} does not fit; one of {', '.join(accepted[name])} is expected"
            )
        elif not accepted[name] and (not isinstance(value, int | float) or value <= 0):
            problems.append(f"{name}: {value} does not fit; a number above 0 is expected")
    return [f"lr_scheduler_kwargs: {problem}" for problem in problems]
