"""Code of others that watches a run: callbacks and metrics that the recipe names, and experiment
trackers.
"""

import difflib
import io
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from finetune.checkpoint.manifest import Progress
from finetune.config.compatibility import TRACKERS
from finetune.config.schema import Recipe
from finetune.config.user_code import explained, load, place_of
from finetune.errors import UserError, first_line
from finetune.files.json_files import MAX_DIGITS, parse_json, read_json_object

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
    """Inherit it and define the events that you need.

    Each is called on every rank, by all ranks together.

    What one raises ends the run, after a checkpoint of the steps done.
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

        Not where a signal or an error ends the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that checkpoints keep, as JSON values of rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back, on every rank, what `state_dict` gave, where the run resumes; before
        `on_start`.
        """


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callbacks and metrics of a run, by their names."""

    callbacks: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[str, str, str], float]] = field(default_factory=dict)

    def call(self, name: str, event: Event) -> None:
        """Calls each callback that has the event `name`. Raises `UserError` for what one raises."""
        for callback_name, callback in self.callbacks.items():
            on_event = getattr(callback, name, lambda _: None)
            with explained(f"{callback_name}.{name}", on_event):
                on_event(event)

    def read_states(self) -> dict[str, Any]:
        """The callbacks' states, by name.

        Raises `UserError` where one fails, or would not come back as it is.
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
            states |= {name: kept} if state else {}
        return states

    def load_states(self, progress: Progress) -> None:
        """Gives the callbacks the states that `progress` holds."""
        for name, state in (progress.callbacks or {}).items():
            if (
                load_state := getattr(self.callbacks.get(name), "load_state_dict", None)
            ) is not None:
                with explained(f"{name}.load_state_dict", load_state):
                    load_state(state)

    def score(self, answers: Sequence[tuple[str, str, str]]) -> dict[str, float]:
        """The mean of each metric over the (prompt, answer, expected answer) of all rows, as
        `metrics/NAME`.
        """
        metrics = {}
        for name, metric in self.metrics.items():
            scores = []
            for answer in answers:
                with explained(name, metric):
                    returned = metric(*answer)
                score = math.nan
                with suppress(Exception):  # whatever cannot be a number
                    score = float(returned)
                if not math.isfinite(score):
                    shown = f"returned {returned!r:.60} for the prompt {answer[0][:60]!r}"
                    raise UserError(
                        f"{place_of(metric)}{name}: {' '.join(shown.split())}; return a number"
                    )
                scores.append(score)
            metrics[f"metrics/{name.rpartition(':')[2]}"] = math.fsum(scores) / len(scores)
        return metrics


def load_hooks(recipe: Recipe, callbacks: Sequence[Any] = ()) -> Hooks:
    """The metrics and callbacks that the recipe names, and `callbacks` after them.

    Raises:
        UserError: Where a file cannot be run, or what it holds is no callback or metric.
    """
    metrics = {name: load(name) for name in recipe.run.metrics}
    if len({name.rpartition(":")[2] for name in metrics}) < len(recipe.run.metrics):
        raise UserError(
            f"{recipe.place_of('metrics')}: metrics: two functions have the same name; rename one"
        )
    made = []
    for name in recipe.run.callbacks:
        kind = load(name)
        with explained(name, kind):
            made.append(kind())
    by_name: dict[str, Any] = {}
    for callback in (*made, *callbacks):
        _check_events(callback)
        name = type(callback).__name__
        same = sum(other.partition(" ")[0] == name for other in by_name)
        by_name[f"{name} {same + 1}" if same else name] = callback
    return Hooks(by_name, metrics)


def _check_events(callback: Any) -> None:
    """Raises `UserError` where a callback is a class, or has no event or an unknown one."""
    if isinstance(callback, type):
        raise UserError(
            f"callbacks: {callback.__name__} is a class; give one of it, {callback.__name__}()"
        )
    kind = type(callback)
    events = [
        name
        for name in dir(callback)
        if name.startswith("on_") and callable(getattr(callback, name))
    ]
    unknown = [name for name in events if name not in EVENTS]
    advice = f"there are {', '.join(EVENTS)}"
    if unknown:
        close = difflib.get_close_matches(unknown[0], EVENTS, n=1)
        place = place_of(getattr(callback, unknown[0]))
        raise UserError(
            f"{place}callbacks: {kind.__name__}: {unknown[0]} is no event; "
            + (f"did you mean {close[0]}?" if close else advice)
        )
    if not events:
        raise UserError(f"{place_of(kind)}callbacks: {kind.__name__}: it has no event; {advice}")


PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "trackio": "TRACKIO_PROJECT",
}
WRITE_ONCE = ("tensorboard", "mlflow")  # a run's configuration can be written once only
# in the run's folder: the tracker's id of the run, by which a resumed run continues there
IDENTITY = "tracker.json"


@dataclass(frozen=True, slots=True)
class Tracker:
    """An open tracker of Accelerate's. Whatever its library raises comes out as it is."""

    name: str  # as in report_to
    inner: Any
    watch: str  # the page or the command that shows the run

    def log(self, line: dict[str, Any]) -> None:
        """Logs the numbers of a line of metrics."""
        numbers = {
            key: value
            for key, value in line.items()
            if isinstance(value, int | float) and key != "step"
        }
        self.inner.log(numbers, step=line["step"])

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
    """The trackers that `report_to` names, each once; all: those whose packages are installed.

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
    """The tracker `report_to` with `settings` (the recipe, flat) as the run's configuration.

    A run that resumes at `start_step` > 0 continues in the tracker too. To be called on the main
    rank. Raises `UserError` where the tracker does not start. TensorBoard writes under `folder`;
    the others where their own environment says.
    """
    if start_step:
        identity = read_json_object(folder / IDENTITY).get(report_to)
    else:
        identity = None
    try:
        with _quiet():
            inner = _make_tracker(report_to, run_name, folder, identity, start_step)
            inner.start()
        if identity is None or report_to not in WRITE_ONCE:
            _store(report_to, inner, settings)
        identities = read_json_object(folder / IDENTITY) | {report_to: _identity(report_to, inner)}
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
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = os.environ.get(PROJECT_VARIABLES.get(report_to, ""), "finetune")
    make = LOGGER_TYPE_TO_CLASS[report_to]
    if report_to == "tensorboard":  # what a killed run logged after its checkpoint is logged again
        return make(
            run_name,
            logging_dir=str(folder / "tensorboard"),
            purge_step=start_step + 1 if identity else None,
        )
    if report_to == "mlflow":
        return make(experiment_name=project, run_name=run_name, run_id=identity)
    if report_to == "wandb":
        resumed = {"id": identity, "resume": "allow"} if identity else {}
        return make(project, name=run_name, dir=str(folder), **resumed)
    return make(project, name=identity or run_name, resume="allow" if identity else "never")


def _store(report_to: str, inner: Any, settings: dict[str, Any]) -> None:
    """The recipe: numbers and texts as they are, lists and mappings as JSON."""
    plain = {
        key: value if isinstance(value, int | float | str) else json.dumps(value)
        for key, value in settings.items()
    }
    # Accelerate's own would make a second run for them, named by the clock
    if report_to == "tensorboard":
        inner.tracker.add_hparams(plain, {}, run_name=".")
    else:
        inner.store_init_configuration(plain)


def _identity(report_to: str, inner: Any) -> str:
    run = inner.tracker
    if report_to == "mlflow":
        return str(run.info.run_id)
    if report_to == "wandb":
        return str(run.id)
    return str(run.name if report_to == "trackio" else inner.logging_dir)


def _find_page(report_to: str, inner: Any, folder: Path) -> str:
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
    """The first screen of a run is ours: no greetings of libraries, unless the environment asks for
    them.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with redirect_stdout(io.StringIO()):
        yield
