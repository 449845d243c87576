"""The learning-rate schedules by the names that `lr_scheduler_type` takes: all that the package
asks about one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from finetune.constants import Names, count_steps

# of a run's steps, in which warmup_stable_decay decays unless num_decay_steps is given
DECAY_SHARE = 0.1
INVERSE_SQRT_TIMESCALE = 10_000  # transformers', where nothing warms up
# what is left of the rate by the share of the steps that is done
DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
DEFAULT_SCHEDULE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak` over `warmup_steps`, then `kind` down to `floor` at the last of
    `steps`.
    """

    peak: float
    steps: int
    warmup_steps: int = 0
    floor: float = 0.0
    kind: str = DEFAULT_SCHEDULE  # lr_scheduler_type
    arguments: Mapping[str, float | str] = field(default_factory=dict)  # lr_scheduler_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """The facts about a schedule that the rest of the package needs."""

    # What is left of the rate above `floor`, from 1 to 0, at a step after the warm-up.
    share_left: Callable[[int, Schedule], float]
    # lr_scheduler_kwargs, by transformers' names: one of these words, or without any a number above
    # 0.
    arguments: Mapping[str, Names] = field(default_factory=dict)
    has_end: bool = True  # min_lr_ratio has an effect
    needs_floor: bool = False  # min_lr_ratio must be set
    warms_from_floor: bool = False  # the warm-up begins there, not at 0


def _share_done(step: int, schedule: Schedule) -> float:
    """Returns the share of the steps after the warm-up that is done."""
    return min(1.0, (step - schedule.warmup_steps) / max(1, schedule.steps - schedule.warmup_steps))


def _decay_at_the_end(step: int, schedule: Schedule) -> float:
    """Returns 1, and over the last `num_decay_steps` what the decay leaves."""
    asked = float(schedule.arguments.get("num_decay_steps", DECAY_SHARE))
    decay = count_steps(asked, schedule.steps) or 1
    decay = max(1, min(decay, schedule.steps - schedule.warmup_steps))
    done = min(1.0, max(0.0, (step - (schedule.steps - decay)) / decay))
    return DECAYS[str(schedule.arguments.get("decay_type", "cosine"))](done)


def _inverse_sqrt(step: int, schedule: Schedule) -> float:
    scale = float(
        schedule.arguments.get("timescale", schedule.warmup_steps or INVERSE_SQRT_TIMESCALE)
    )
    return math.sqrt(scale / (step - schedule.warmup_steps + scale))


_CONSTANT = ScheduleFacts(share_left=lambda step, schedule: 1.0, has_end=False)
SCHEDULES: Mapping[str, ScheduleFacts] = {
    DEFAULT_SCHEDULE: ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["cosine"](_share_done(step, schedule))
    ),
    "linear": ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["linear"](_share_done(step, schedule))
    ),
    "constant": _CONSTANT,
    "constant_with_warmup": _CONSTANT,
    "cosine_with_min_lr": ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["cosine"](_share_done(step, schedule)),
        needs_floor=True,
    ),
    "polynomial": ScheduleFacts(
        share_left=lambda step, schedule: (
            (1 - _share_done(step, schedule)) ** float(schedule.arguments.get("power", 1.0))
        ),
        arguments={"power": ()},
    ),
    "inverse_sqrt": ScheduleFacts(
        share_left=_inverse_sqrt, arguments={"timescale": ()}, has_end=False
    ),
    "warmup_stable_decay": ScheduleFacts(
        share_left=_decay_at_the_end,
        arguments={"num_decay_steps": (), "decay_type": tuple(DECAYS)},
        warms_from_floor=True,
    ),
}
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
# transformers' other arguments, which are keys of the recipe here.
SCHEDULE_KEYS = {
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "min_lr": "min_lr_ratio, a share of learning_rate",
    "lr_end": "min_lr_ratio, a share of learning_rate",
    "num_warmup_steps": "warmup_steps",
}


def compute_learning_rate(step: int, schedule: Schedule) -> float:
    """Returns the learning rate of optimizer step `step` (0-based): a pure function leaves no
    scheduler to save.

    As in transformers, but the warm-up starts one step later on its ramp, so that the first step
    has a learning rate above 0. Cosine: Loshchilov and Hutter 2017, eq. 5, without restarts.

    >>> s = Schedule(peak=1.0, warmup_steps=2, steps=10)
    >>> [round(compute_learning_rate(step, s), 3) for step in (0, 1, 2, 6, 9, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.038, 0.0]
    """
    facts = SCHEDULES[schedule.kind]
    if step < schedule.warmup_steps:
        lowest = schedule.floor if facts.warms_from_floor else 0.0  # as in transformers
        return lowest + (schedule.peak - lowest) * (step + 1) / schedule.warmup_steps
    return schedule.floor + (schedule.peak - schedule.floor) * facts.share_left(step, schedule)


def find_schedule_problems(kind: str, arguments: Mapping[str, float | str]) -> list[str]:
    """Lists what is wrong with `lr_scheduler_kwargs` for the schedule, one sentence each."""
    takes = SCHEDULES[kind].arguments
    problems = []
    for name, value in arguments.items():
        if name in SCHEDULE_KEYS:
            problems.append(f"{name}: here it is {SCHEDULE_KEYS[name]}")
        elif name not in takes:
            problems.append(f"{name}: {kind} takes {' and '.join(takes) or 'no arguments'}")
        elif takes[name] and value not in takes[name]:
            problems.append(
                f"{name}: {value} does not fit; one of {', '.join(takes[name])} is expected"
            )
        elif not takes[name] and (not isinstance(value, int | float) or value <= 0):
            problems.append(f"{name}: {value} does not fit; a number above 0 is expected")
    return [f"lr_scheduler_kwargs: {problem}" for problem in problems]
