"""A training run as one value, and the user's own code in it: callbacks and metrics. docs/api.md shows both."""

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.checkpoint.folders import step_folder
from finetune.checkpoint.manifest import Progress
from finetune.config.schedules import Schedule
from finetune.config.schema import Recipe
from finetune.config.user_code import explained, load, place_of
from finetune.data.batches import StepBatch
from finetune.data.examples import Prompt
from finetune.distributed.world import RankGroup, World
from finetune.errors import Preempted, UserError
from finetune.files.run_json import MAX_DIGITS, parse_json
from finetune.training.objectives.objective import Objectives
from finetune.training.run_log import MetricsLog
from finetune.training.watch import Watchdog

if TYPE_CHECKING:  # what prepares and saves draws half of the package in; a step needs none of it
    from finetune.checkpoint.save import Saver
    from finetune.data.prepare import PreparedData

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One run on this rank."""

    recipe: Recipe
    world: World
    folder: Path
    tokenizer: Any
    data: "PreparedData"
    read_batches: Callable[[int], Iterator[StepBatch]]  # this rank's training batches from a step (0-based) on
    prompts: tuple[Prompt, ...]  # held out, to be answered before and after training
    sample_prompts: tuple[Prompt, ...]  # the recipe's, to be answered at every evaluation
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objectives: Objectives
    schedule: Schedule
    saver: "Saver"
    log: MetricsLog
    results: dict[int, dict[str, Any]]  # step -> what this run has logged of evaluations there, also in earlier starts
    inputs: Mapping[str, str]  # fingerprints of what the recipe names
    watchdog: Watchdog
    hooks: Hooks
    count_flop: Callable[[float], float]  # to train on one token of a document of so many tokens
    fp8_share: float  # of those, what is multiplied in FP8
    peak_flops: float | None  # per second and device; None where it is not known

    def notify(self, name: str, progress: Progress, metrics: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Calls the event `name` of the callbacks. All ranks call it.

        Raises `UserError` on all ranks for what a callback raises on one; the steps done are saved before.
        """
        if not self.hooks.callbacks:
            return
        event = Event(
            step=progress.step,
            steps=self.schedule.steps,
            metrics=metrics,
            folder=self.folder,
            is_main=self.world.is_main,
            model=self.model,
        )
        is_training = self.model.training
        try:
            RankGroup(self.world).on_all(lambda: self.hooks.call(name, event))
            self.model.train(is_training)  # whatever a callback has left: dropout is part of the run
        except UserError as error:
            if progress.step == 0:
                raise
            self.saver.finish()
            if not step_folder(self.folder, progress.step).exists():
                self.save(progress)
                self.saver.finish()
            raise UserError(f"{error} (step {progress.step} is saved)") from error

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint, with the callbacks' states of rank 0. All ranks call it.

        Raises `UserError` on all ranks where a state cannot be kept; the step is saved before, without new states.
        """
        failure = None
        if self.hooks.callbacks:
            try:
                states = RankGroup(self.world).on_all(self.hooks.read_states)[0]
                progress = replace(progress, callbacks=states or None)
            except UserError as error:
                failure = error
        self.saver.save(progress)
        if failure is not None:
            self.saver.finish()
            raise UserError(f"{failure} (step {progress.step} is saved, without it)") from failure

    def preempted(self, where: str, by: str = "a signal") -> Preempted:
        """The exception of a run that a signal stops; `where` says what is saved."""
        auto = "" if self.recipe.checkpoint.resume_from_checkpoint != "none" else " with resume_from_checkpoint=auto"
        return Preempted(f"{self.folder}: stopped by {by} {where}; the same command{auto} resumes from there")
