"""Code from outside the package that a run calls: the hooks (the user's callbacks and metrics) and
experiment trackers.
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
from finetune.files.durable import replace_file
from finetune.files.json_files import MAX_DIGITS, parse_json, read_json_object

EVENTS = ("on_start", "on_step", "on_log", "on_evaluate", "on_save", "on_end")
KNOWN_EVENTS = f"there are {', '.join(EVENTS)}"  # the end of an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The state of a run that a callback sees at an event."""

    step: int  # steps done
    steps: int  # steps of the whole run
    # on_log and on_evaluate: the new line of metrics.jsonl; empty at the other events
    metrics: Mapping[str, Any]
    folder: Path  # the run's folder
    is_main: bool  # whether this is rank 0
    model: nn.Module  # sharded over the ranks; do not change it


class Callback:
    """The base class of callbacks: inherit it, and define the events that you need.

    All ranks call each event. If a callback raises an error on any rank, the run saves the steps
    done and ends.
    """

    def on_start(self, event: Event) -> None:
        """Called before the first step. In a run that resumes, `event.step` is above 0."""

    def on_step(self, event: Event) -> None:
        """Called after each step, before its checkpoint is saved."""

    def on_log(self, event: Event) -> None:
        """Called every `logging_steps` steps and after the last, with the new line of
        metrics.jsonl in `event.metrics`.
        """

    def on_evaluate(self, event: Event) -> None:
        """Called after the held-out loss was measured, and after held-out prompts were answered,
        with the new line of metrics.jsonl in `event.metrics`.
        """

    def on_save(self, event: Event) -> None:
        """Called after a checkpoint was saved. Under `async_save`, the checkpoint may not be on
        disk yet.
        """

    def on_end(self, event: Event) -> None:
        """Called after the last evaluation, before the export.

        Not called if a signal or an error ends the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state, of JSON values. A checkpoint keeps rank 0's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called on every rank before `on_start`, if the run resumes from a checkpoint that keeps a
        state of this callback.
        """


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callbacks and metrics of a run.

    `callbacks`: the name -> the callback, as `load_hooks` names it.
    `metrics`: `FILE.py:NAME` -> the function.
    """

    callbacks: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[str, str, str], float]] = field(default_factory=dict)

    def call(self, name: str, event: Event) -> None:
        """Calls the event `name` of each callback that has this event.

        Raises `UserError` if a callback raises an error.
        """
        for callback_name, callback in self.callbacks.items():
            on_event = getattr(callback, name, lambda _: None)
            with explained(f"{callback_name}.{name}", on_event):
                on_event(event)

    def read_states(self) -> dict[str, Any]:
        """Returns the state of each callback that has one: the callback's name -> its state.

        Raises `UserError` if a callback raises an error, or if a checkpoint could not keep a state
        unchanged.
        """
        states: dict[str, Any] = {}
        for name, callback in self.callbacks.items():
            state_dict = getattr(callback, "state_dict", dict)
            with explained(f"{name}.state_dict", state_dict):
                state: Any = state_dict()
            place = f"{place_of(state_dict)}{name}.state_dict"
            try:
                text = json.dumps(state)
                read_back = parse_json(text)
            except (TypeError, ValueError) as error:
                raise UserError(f"{place}: checkpoints keep values of JSON: {error}") from None
            # `parse_json`, unlike json, makes a float of an integer of more than MAX_DIGITS digits
            if read_back != json.loads(text):
                raise UserError(
                    f"{place}: a whole number has more than {MAX_DIGITS} digits; keep it as text"
                )
            if state:
                states[name] = read_back
        return states

    def load_states(self, progress: Progress) -> None:
        """Gives the states in `progress` to the callbacks of the same names.

        A state is dropped if its callback is no longer in the run, or has no `load_state_dict`.
        """
        for name, state in (progress.callbacks or {}).items():
            load_state = getattr(self.callbacks.get(name), "load_state_dict", None)
            if load_state is not None:
                with explained(f"{name}.load_state_dict", load_state):
                    load_state(state)

    def score(self, answers: Sequence[tuple[str, str, str]]) -> dict[str, float]:
        """Computes the mean of each metric over the answers: `metrics/NAME` -> the mean.

        `answers`: (prompt, answer, expected answer) of each row; not empty.
        """
        means = {}
        for name, metric in self.metrics.items():
            scores = [_score_answer(name, metric, *answer) for answer in answers]
            means[f"metrics/{_function_name(name)}"] = math.fsum(scores) / len(scores)
        return means


def _score_answer(
    name: str, metric: Callable[[str, str, str], float], prompt: str, answer: str, expected: str
) -> float:
    """Computes the metric `name` of one answer.

    Raises `UserError` if the metric raises an error, or returns no finite number.
    """
    with explained(name, metric):
        returned = metric(prompt, answer, expected)
    score = math.nan
    with suppress(Exception):  # `float` runs a method of the object, which may raise anything
        score = float(returned)
    if not math.isfinite(score):
        problem = f"returned {returned!r:.60} for the prompt {prompt[:60]!r}"
        raise UserError(f"{place_of(metric)}{name}: {' '.join(problem.split())}; return a number")
    return score


def _function_name(name: str) -> str:
    """Returns NAME of `FILE.py:NAME`."""
    _, _, function_name = name.rpartition(":")
    return function_name


def load_hooks(recipe: Recipe, callbacks: Sequence[Any]) -> Hooks:
    """Loads the metrics and callbacks that the recipe names, and adds `callbacks` after them.

    A callback is named after its class; the second of a class is `NAME 2`.

    Raises:
        UserError: If a file cannot be run or lacks the name, if a callback cannot be made or has no
            event, or if two metrics have the same name.
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
    """Raises `UserError` if `callback` is a class instead of an object, has no event, or has a
    method named on_* that is no event.
    """
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
    """Raises `UserError` for the method `name` of `callback`, which is no event."""
    close = difflib.get_close_matches(name, EVENTS, n=1)
    advice = f"did you mean {close[0]}?" if close else KNOWN_EVENTS
    place = place_of(getattr(callback, name))
    raise UserError(f"{place}callbacks: {type(callback).__name__}: {name} is no event; {advice}")


# The environment variable that names the project, for the trackers that read one.
PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "trackio": "TRACKIO_PROJECT",
}
WRITE_ONCE = ("tensorboard", "mlflow")  # they take a run's configuration only once
# A file in the run's folder: the tracker -> its id of the run. A resumed run continues under it.
IDENTITY = "tracker.json"


@dataclass(frozen=True, slots=True)
class Tracker:
    """An experiment tracker that has started this run.

    Its methods raise whatever the tracker's library raises.
    """

    name: str  # as in report_to
    inner: Any  # Accelerate's tracker object
    watch: str  # the page or the command that shows the run

    def log(self, line: dict[str, Any]) -> None:
        """Logs the numbers in a line of metrics.jsonl, at the line's step."""
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        step = numbers.pop("step")
        self.inner.log(numbers, step=step)

    def close(self) -> None:
        """Ends the run in the tracker.

        Call it before Accelerate's state is reset, because Accelerate's trackers read that state.
        """
        with _quiet():
            if self.name == "trackio":  # after Accelerate's `finish` it would finish again at exit
                import trackio

                trackio.finish()
            else:
                self.inner.finish()


def list_trackers(report_to: str | tuple[str, ...]) -> tuple[str, ...]:
    """Lists the trackers that `report_to` names, without repetition.

    "all" names every tracker whose package is installed.

    >>> list_trackers("none"), list_trackers(("wandb", "wandb", "mlflow"))
    ((), ('wandb', 'mlflow'))
    """
    if report_to == "all":
        return tuple(name for name in TRACKERS if find_spec(name) is not None)
    named = (report_to,) if isinstance(report_to, str) else report_to
    return tuple(dict.fromkeys(name for name in named if name != "none"))


def open_tracker(
    report_to: str, run_name: str, folder: Path, settings: dict[str, Any], start_step: int
) -> Tracker:
    """Starts a run in the tracker `report_to`, or continues it if `start_step` > 0.

    The main rank alone calls it.

    Args:
        report_to: One tracker's name.
        run_name: The run's name in the tracker.
        folder: The run's folder. TensorBoard and wandb write there.
        settings: The recipe's keys and values, which become the run's configuration.
        start_step: Steps done before; above 0 if the run resumes.

    Raises:
        UserError: If the tracker does not start.
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
        replace_file(folder / IDENTITY, json.dumps(identities) + "\n")
    except Exception as error:  # whatever a tracker's library raises
        raise UserError(
            f"report_to: {report_to}: it does not start ({first_line(error)}); fix that, or set "
            "report_to: none (metrics.jsonl is always written)"
        ) from error
    return Tracker(report_to, inner, _find_page(report_to, inner, folder))


def _make_tracker(
    report_to: str, run_name: str, folder: Path, identity: str | None, start_step: int
) -> Any:
    """Makes Accelerate's tracker object, without starting it.

    `identity`: the tracker's id of the run that is continued; None starts a new run.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = os.environ.get(PROJECT_VARIABLES.get(report_to, ""), "finetune")
    make = LOGGER_TYPE_TO_CLASS[report_to]
    if report_to == "tensorboard":
        # A killed run has logged steps after its checkpoint. They are trained and logged again.
        purge_step = start_step + 1 if identity else None
        return make(run_name, logging_dir=str(folder / "tensorboard"), purge_step=purge_step)
    if report_to == "mlflow":
        return make(experiment_name=project, run_name=run_name, run_id=identity)
    if report_to == "wandb":
        resume_options = {"id": identity, "resume": "allow"} if identity else {}
        return make(project, name=run_name, dir=str(folder), **resume_options)
    # trackio, which identifies a run by its name
    return make(project, name=identity or run_name, resume="allow" if identity else "never")


def _store_settings(report_to: str, inner: Any, settings: dict[str, Any]) -> None:
    """Stores the recipe as the run's configuration in the tracker.

    Numbers and texts are stored as they are, other values as JSON.
    """
    configuration = dict(settings)
    for key, value in settings.items():
        if not isinstance(value, int | float | str):
            configuration[key] = json.dumps(value)
    if report_to == "tensorboard":
        # Accelerate's method would make a second run for the configuration, named by the time.
        inner.tracker.add_hparams(configuration, {}, run_name=".")
    else:
        inner.store_init_configuration(configuration)


def _find_identity(report_to: str, inner: Any) -> str:
    """Returns the tracker's id of the run, with which `_make_tracker` can continue the run."""
    run = inner.tracker
    if report_to == "mlflow":
        return str(run.info.run_id)
    if report_to == "wandb":
        return str(run.id)
    return str(run.name if report_to == "trackio" else inner.logging_dir)


def _find_page(report_to: str, inner: Any, folder: Path) -> str:
    """Returns the page or the shell command that shows the run."""
    run = inner.tracker
    if report_to == "tensorboard":
        return f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"
    if report_to == "wandb":
        # an offline run has no page
        return str(run.url or f"wandb sync {shlex.quote(str(Path(run.dir).parent))}")
    if report_to == "trackio":
        return f"trackio show --project {shlex.quote(inner.run_name)}"
    import mlflow

    return f"mlflow ui --backend-store-uri {shlex.quote(mlflow.get_tracking_uri())}"


@contextmanager
def _quiet() -> Iterator[None]:
    """In this block, keeps what trackers print, such as greetings, out of the run's screens.

    WANDB_SILENT and MLFLOW_LOGGING_LEVEL keep their values if they are set.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with redirect_stdout(io.StringIO()):
        yield
