"""A user's own code in a run: callbacks at its events, and metrics of its answers. docs/api.md shows both."""

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from finetune.checkpoint.manifest import Progress
from finetune.config.schema import Recipe
from finetune.config.user_code import explained, load, place_of
from finetune.errors import UserError
from finetune.files.run_json import MAX_DIGITS, parse_json

EVENTS = ("on_start", "on_step", "on_log", "on_evaluate", "on_save", "on_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A run at the moment of an event."""

    step: int  # steps done
    steps: int  # of the whole run
    metrics: Mapping[str, Any]  # on_log and on_evaluate: the new line of metrics.jsonl
    folder: Path  # the run's
    is_main: bool  # whether this is rank 0
    model: nn.Module  # sharded over the ranks; not to be changed


class Callback:
    """Inherit it and define the events that you need. Each is called on every rank, by all ranks together.

    What one raises ends the run, after a checkpoint of the steps done.
    """

    def on_start(self, event: Event) -> None:
        """Before the first step; `event.step` is above 0 where the run resumes."""

    def on_step(self, event: Event) -> None:
        """After each step, before its checkpoint is saved."""

    def on_log(self, event: Event) -> None:
        """After each `logging_steps`, with the line of metrics.jsonl."""

    def on_evaluate(self, event: Event) -> None:
        """After a held-out loss was measured, or held-out prompts were answered, with the line of metrics.jsonl."""

    def on_save(self, event: Event) -> None:
        """After a checkpoint was saved; under `async_save` it may still be on its way to the disk."""

    def on_end(self, event: Event) -> None:
        """After the last evaluation, before the export. Not where a signal or an error ends the run."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep, as values of JSON; rank 0's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back, on every rank, what `state_dict` gave, where the run resumes; before `on_start`."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callbacks and metrics of a run, by their names."""

    callbacks: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[str, str, str], float]] = field(default_factory=dict)

    def call(self, name: str, event: Event) -> None:
        """Calls each callback that has the event `name`. Raises `UserError` for what one raises."""
        for of, callback in self.callbacks.items():
            event_of_it = getattr(callback, name, lambda _: None)
            with explained(f"{of}.{name}", event_of_it):
                event_of_it(event)

    def read_states(self) -> dict[str, Any]:
        """The callbacks' states, by name. Raises `UserError` where one fails, or would not come back as it is."""
        states: dict[str, Any] = {}
        for of, callback in self.callbacks.items():
            state_dict = getattr(callback, "state_dict", dict)
            with explained(f"{of}.state_dict", state_dict):
                state: Any = state_dict()
            place = f"{place_of(state_dict)}{of}.state_dict"
            try:
                text = json.dumps(state)
                kept = parse_json(text)
            except (TypeError, ValueError) as error:
                raise UserError(f"{place}: checkpoints keep values of JSON: {error}") from None
            if kept != json.loads(text):
                raise UserError(f"{place}: a whole number has more than {MAX_DIGITS} digits; keep it as text")
            states |= {of: kept} if state else {}
        return states

    def load_states(self, progress: Progress) -> None:
        """Gives the callbacks the states that `progress` holds."""
        for of, state in (progress.callbacks or {}).items():
            if (load_state := getattr(self.callbacks.get(of), "load_state_dict", None)) is not None:
                with explained(f"{of}.load_state_dict", load_state):
                    load_state(state)

    def score(self, answers: Sequence[tuple[str, str, str]]) -> dict[str, float]:
        """The mean of each metric over the (prompt, answer, expected answer) of all rows, as `metrics/NAME`."""
        found = {}
        for of, metric in self.metrics.items():
            scores = []
            for answer in answers:
                with explained(of, metric):
                    returned = metric(*answer)
                score = math.nan
                with suppress(Exception):  # whatever cannot be a number
                    score = float(returned)
                if not math.isfinite(score):
                    shown = f"returned {returned!r:.60} for the prompt {answer[0][:60]!r}"
                    raise UserError(f"{place_of(metric)}{of}: {' '.join(shown.split())}; return a number")
                scores.append(score)
            found[f"metrics/{of.rpartition(':')[2]}"] = math.fsum(scores) / len(scores)
        return found


def load_hooks(recipe: Recipe, callbacks: Sequence[Any] = ()) -> Hooks:
    """The metrics and callbacks that the recipe names, and `callbacks` after them.

    Raises:
        UserError: Where a file cannot be run, or what it holds is no callback or metric.
    """
    metrics = {name: load(name) for name in recipe.run.metrics}
    if len({name.rpartition(":")[2] for name in metrics}) < len(recipe.run.metrics):
        raise UserError(f"{recipe.place_of('metrics')}: metrics: two of one name; their names are those of their means")
    made = []
    for name in recipe.run.callbacks:
        kind = load(name)
        with explained(name, kind):
            made.append(kind())
    by_name: dict[str, Any] = {}
    for callback in (*made, *callbacks):
        kind = type(callback).__name__
        if isinstance(callback, type):
            raise UserError(f"callbacks: {callback.__name__} is a class; give one of it, {callback.__name__}()")
        events = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
        unknown = [name for name in events if name not in EVENTS]
        if unknown or not events:
            close = difflib.get_close_matches(unknown[0], EVENTS, n=1) if unknown else []
            wrong = f"{unknown[0]} is no event" if unknown else "it has no event"
            advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(EVENTS)}"
            place = place_of(getattr(callback, unknown[0]) if unknown else type(callback))
            raise UserError(f"{place}callbacks: {kind}: {wrong}; {advice}")
        same = sum(name.partition(" ")[0] == kind for name in by_name)
        by_name[f"{kind} {same + 1}" if same else kind] = callback
    return Hooks(by_name, metrics)
