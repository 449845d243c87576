"""The arguments of learning rate schedules: which schedule takes which, and what is wrong with them. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

# Schedule -> its lr_scheduler_kwargs, by transformers' names; a number above 0, or one of these words.
ARGUMENTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "polynomial": {"power": ()},
    "inverse_sqrt": {"timescale": ()},
    "warmup_stable_decay": {"num_decay_steps": (), "decay_type": ("cosine", "linear", "1-sqrt")},
}
# transformers' other arguments, which are keys of the recipe here.
KEYS = {
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "min_lr": "min_lr_ratio, a share of learning_rate",
    "lr_end": "min_lr_ratio, a share of learning_rate",
    "num_warmup_steps": "warmup_steps",
}


def find_schedule_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the schedule of a recipe with these `values`, one sentence each.

    >>> list(find_schedule_problems({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0}}))
    ['lr_scheduler_kwargs: lr_end: here it is min_lr_ratio, a share of learning_rate']
    """
    kind, arguments = values.get("lr_scheduler_type", "cosine"), values.get("lr_scheduler_kwargs") or {}
    takes = ARGUMENTS.get(kind, {})
    for name, value in arguments.items():
        if name in KEYS:
            yield f"lr_scheduler_kwargs: {name}: here it is {KEYS[name]}"
        elif name not in takes:
            yield f"lr_scheduler_kwargs: {name}: {kind} takes {' and '.join(takes) or 'no arguments'}"
        elif takes[name] and value not in takes[name]:
            yield f"lr_scheduler_kwargs: {name}: {value} does not fit; one of {', '.join(takes[name])} is expected"
        elif not takes[name] and (not isinstance(value, int | float) or value <= 0):
            yield f"lr_scheduler_kwargs: {name}: {value} does not fit; a number above 0 is expected"
    if kind == "cosine_with_min_lr" and not values.get("min_lr_ratio"):
        yield "lr_scheduler_type: cosine_with_min_lr ends at learning_rate times min_lr_ratio: set it, or cosine"
    if kind == "inverse_sqrt" and values.get("min_lr_ratio"):
        yield "lr_scheduler_type: inverse_sqrt has no end, and min_lr_ratio no effect: remove one of the two"
