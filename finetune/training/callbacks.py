"""Code of others that watches a run: the user's callbacks and metrics, which the recipe names (its
hooks), and experiment trackers.
"""

import difflib
import io
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from finetune.checkpoint.manifest import Progress
from finetune.config.compatibility import TRACKERS
from finetune.config.schema import Recipe
from finetune.config.user_code import explained, load, place_of
from finetune.errors import UserError, first_line
from finetune.files.json_files import MAX_DIGITS, parse_json, read_json_object

EVENTS = ("on_start", "on_step", "on_log", "on_evaluate", "on_save", "on_end")
KNOWN_EVENTS = f"there are {', '.join(EVENTS)}"


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
    """Inherit it and define the events that you need.

    Each event is called on every rank, by all ranks together. An error that one raises ends the
    run, after a checkpoint of the steps done.
    """

    def on_start(self, event: Event) -> None:
        """Called before the first step; `event.step` is above 0 where the run resumes."""

    def on_step(self, event: Event) -> None:
        """Called after each step, before its checkpoint is saved."""

    def on_log(self, event: Event) -> None:
        """Called after each `logging_steps`, with the line of metrics.jsonl."""

    def on_evaluate(self, event: Event) -> None:
        """Called after a held-out loss was measured, or held-out prompts were answered, with the
        line of metrics.jsonl.
        """

    def on_save(self, event: Event) -> None:
        """Called after a checkpoint was saved; under `async_save` it may still be on its way to the
        disk.
        """

    def on_end(self, event: Event) -> None:
        """Called after the last evaluation, before the export.

        Not called if a signal or an error ends the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that checkpoints keep, as JSON values of rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before `on_start` of a run that resumes, on every rank, with what `state_dict`
        returned.
        """


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callbacks and metrics of a run, by their names."""

    callbacks: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[str, str, str], float]] = field(default_factory=dict)

    def call(self, name: str, event: Event) -> None:
        """Calls the event `name` of each callback. Raises `UserError` for what one raises."""
        for callback_name, callback in self.callbacks.items():
            on_event = getattr(callback, name, lambda _: None)
            with explained(f"{callback_name}.{name}", on_event):
                on_event(event)

    def read_states(self) -> dict[str, Any]:
        """Returns the callbacks' states that are not empty, by the callback's name.

        Raises `UserError` if a callback fails, or if a state would change in a checkpoint.
        """
        states: dict[str, Any] = {}
        for name, callback in self.callbacks.items():
            state_dict = getattr(callback, "state_dict", dict)
            with explained(f"{name}.state_dict", state_dict):
                state: Any = state_dict()
            place = f"{place_of(state_dict)}{name}.state_dict"
            try:
                text = json.dumps(state)
                kept = parse_json(text)
            except (TypeError, ValueError) as error:
                raise UserError(f"{place}: checkpoints keep values of JSON: {error}") from None
            if kept != json.loads(text):
                raise UserError(
                    f"{place}: a whole number has more than {MAX_DIGITS} digits; keep it as text"
                )
            if state:
                states[name] = kept
        return states

    def load_states(self, progress: Progress) -> None:
        """Gives the callbacks the states that `progress` holds."""
        for name, state in (progress.callbacks or {}).items():
            load_state = getattr(self.callbacks.get(name), "load_state_dict", None)
            if load_state is not None:
                with explained(f"{name}.load_state_dict", load_state):
                    load_state(state)

    def score(self, answers: Sequence[tuple[str, str, str]]) -> dict[str, float]:
        """Computes the mean of each metric over the answers, under `metrics/NAME`.

        `answers`: (prompt, answer, expected answer) of each row.
        """
        means = {}
        for name, metric in self.metrics.items():
            scores = [_score_answer(name, metric, answer) for answer in answers]
            means[f"metrics/{_function_name(name)}"] = math.fsum(scores) / len(scores)
        return means


def _score_answer(
    name: str, metric: Callable[[str, str, str], float], answer: tuple[str, str, str]
) -> float:
    """The metric of one answer. Raises `UserError` if it is no finite number."""
    with explained(name, metric):
        returned = metric(*answer)
    score = math.nan
    with suppress(Exception):  # whatever cannot be a number
        score = float(returned)
    if not math.isfinite(score):
        shown = f"returned {returned!r:.60} for the prompt {answer[0][:60]!r}"
        raise UserError(f"{place_of(metric)}{name}: {' '.join(shown.split())}; return a number")
    return score


def _function_name(name: str) -> str:
    """The name of a function in a file: b of a.py:b."""
    return name.rpartition(":")[2]


def load_hooks(recipe: Recipe, callbacks: Sequence[Any]) -> Hooks:
    """Loads the metrics and callbacks that the recipe names; `callbacks` come after them.

    Raises:
        UserError: If a file cannot be run, or if it holds no such callback or metric.
    """
    metrics = {name: load(name) for name in recipe.run.metrics}
    if len(set(map(_function_name, metrics))) < len(recipe.run.metrics):
        raise UserError(
            f"{recipe.place_of('metrics')}: metrics: two functions have the same name; rename one"
        )
    named = []
    for name in recipe.run.callbacks:
        make_callback = load(name)
        with explained(name, make_callback):
            named.append(make_callback())
    by_name: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for callback in (*named, *callbacks):
        _check_events(callback)
        name = type(callback).__name__
        counts[name] += 1
        by_name[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
    return Hooks(by_name, metrics)


def _check_events(callback: Any) -> None:
    """Raises `UserError` if a callback is a class, or has no event or an unknown one."""
    if isinstance(callback, type):
        raise UserError(
            f"callbacks: {callback.__name__} is a class; give one of it, {callback.__name__}()"
        )
    kind = type(callback)
    has_event = False
    for name in dir(callback):
        if not name.startswith("on_") or not callable(getattr(callback, name)):
            continue
        if name not in EVENTS:
            _refuse_event(callback, name)
        has_event = True
    if not has_event:
        raise UserError(
            f"{place_of(kind)}callbacks: {kind.__name__}: it has no event; {KNOWN_EVENTS}"
        )


def _refuse_event(callback: Any, name: str) -> NoReturn:
    close = difflib.get_close_matches(name, EVENTS, n=1)
    advice = f"did you mean {close[0]}?" if close else KNOWN_EVENTS
    place = place_of(getattr(callback, name))
    raise UserError(f"{place}callbacks: {type(callback).__name__}: {name} is no event; {advice}")


PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "trackio": "TRACKIO_PROJECT",
}
WRITE_ONCE = ("tensorboard", "mlflow")  # a run's configuration can be written once only
# in the run's folder: each tracker's id of the run, by which a resumed run continues there
IDENTITY = "tracker.json"


@dataclass(frozen=True, slots=True)
class Tracker:
    """An open tracker of Accelerate's. Its methods raise whatever the tracker's library raises."""

    name: str  # as in report_to
    inner: Any  # Accelerate's
    watch: str  # the page or the command that shows the run

    def log(self, line: dict[str, Any]) -> None:
        """Logs the numbers of a line of metrics."""
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        step = numbers.pop("step")
        self.inner.log(numbers, step=step)

    def close(self) -> None:
        """Ends the run in the tracker.

        To be called before Accelerate's state is reset, which its trackers read.
        """
        with _quiet():
            if self.name == "trackio":  # Accelerate's would finish it once more at exit
                import trackio

                trackio.finish()
            else:
                self.inner.finish()


def list_trackers(report_to: str | tuple[str, ...]) -> tuple[str, ...]:
    """Lists the trackers that `report_to` names, each once; all: those whose packages are
    installed.

    >>> list_trackers("none"), list_trackers(("wandb", "wandb", "mlflow"))
    ((), ('wandb', 'mlflow'))
    """
    if report_to == "all":
        return tuple(name for name, package in TRACKERS.items() if find_spec(package) is not None)
    named = (report_to,) if isinstance(report_to, str) else report_to
    return tuple(dict.fromkeys(name for name in named if name != "none"))


def open_tracker(
    report_to: str, run_name: str, folder: Path, settings: dict[str, Any], start_step: int
) -> Tracker:
    """Opens the tracker `report_to` with `settings` (the recipe, flat) as the run's configuration.

    A run that resumes at `start_step` > 0 continues in the tracker too. TensorBoard writes under
    `folder`; the others where their own environment says. To be called on the main rank.

    Raises `UserError` if the tracker does not start.
    """
    identities = read_json_object(folder / IDENTITY)
    identity = identities.get(report_to) if start_step else None
    try:
        with _quiet():
            inner = _make_tracker(report_to, run_name, folder, identity, start_step)
            inner.start()
        if identity is None or report_to not in WRITE_ONCE:
            _store_settings(report_to, inner, settings)
        identities[report_to] = _find_identity(report_to, inner)
        (folder / IDENTITY).write_text(json.dumps(identities) + "\n", encoding="utf-8")
    except Exception as error:  # whatever a tracker's library raises
        raise UserError(
            f"report_to: {report_to}: it does not start ({first_line(error)}); fix that, or set "
            "report_to: none (metrics.jsonl is always written)"
        ) from error
    return Tracker(report_to, inner, _find_page(report_to, inner, folder))


def _make_tracker(
    report_to: str, run_name: str, folder: Path, identity: str | None, start_step: int
) -> Any:
    """Makes Accelerate's tracker; `identity`: its id of the run, if the run resumes."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = os.environ.get(PROJECT_VARIABLES.get(report_to, ""), "finetune")
    make = LOGGER_TYPE_TO_CLASS[report_to]
    if report_to == "tensorboard":
        # a killed run has logged steps after its checkpoint, which are logged again
        purge_step = start_step + 1 if identity else None
        return make(run_name, logging_dir=str(folder / "tensorboard"), purge_step=purge_step)
    if report_to == "mlflow":
        return make(experiment_name=project, run_name=run_name, run_id=identity)
    if report_to == "wandb":
        resumed = {"id": identity, "resume": "allow"} if identity else {}
        return make(project, name=run_name, dir=str(folder), **resumed)
    return make(project, name=identity or run_name, resume="allow" if identity else "never")


def _store_settings(report_to: str, inner: Any, settings: dict[str, Any]) -> None:
    """Stores the recipe in the tracker: numbers and texts as they are, other values as JSON."""
    plain = dict(settings)
    for key, value in settings.items():
        if not isinstance(value, int | float | str):
            plain[key] = json.dumps(value)
    if report_to == "tensorboard":
        # Accelerate's method would make a second run for them, named by the clock
        inner.tracker.add_hparams(plain, {}, run_name=".")
    else:
        inner.store_init_configuration(plain)


def _find_identity(report_to: str, inner: Any) -> str:
    """The tracker's id of the run, by which `_make_tracker` continues it."""
    run = inner.tracker
    if report_to == "mlflow":
        return str(run.info.run_id)
    if report_to == "wandb":
        return str(run.id)
    return str(run.name if report_to == "trackio" else inner.logging_dir)


def _find_page(report_to: str, inner: Any, folder: Path) -> str:
    """The page or the command that shows the run."""
    run = inner.tracker
    if report_to == "tensorboard":
        return f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"
    if report_to == "wandb":
        return str(run.url or f"wandb sync {shlex.quote(str(Path(run.dir).parent))}")
    if report_to == "trackio":
        return f"trackio show --project {shlex.quote(inner.run_name)}"
    import mlflow

    return f"mlflow ui --backend-store-uri {shlex.quote(mlflow.get_tracking_uri())}"


@contextmanager
def _quiet() -> Iterator[None]:
    """In this block trackers print no greetings into the run's first screen, unless the environment
    asks for them.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with redirect_stdout(io.StringIO()):
        yield
