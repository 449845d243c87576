"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio, each through Accelerate's own class."""

import io
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.config.compatibility import TRACKERS
from finetune.errors import UserError
from finetune.files.run_json import read_json_object

PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
WRITE_ONCE = ("tensorboard", "mlflow")  # a run's configuration can be written once only
IDENTITY = "tracker.json"  # in the run's folder: the tracker's id of the run, by which a resumed run continues there


@dataclass(frozen=True, slots=True)
class Tracker:
    """An open tracker of Accelerate's. Whatever its library raises comes out as it is."""

    name: str  # as in report_to
    inner: Any
    watch: str  # the page or the command that shows the run

    def log(self, line: dict[str, Any]) -> None:
        """Logs the numbers of a line of metrics."""
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        self.inner.log(numbers, step=line["step"])

    def close(self) -> None:
        """Ends the run in the tracker. To be called before Accelerate's state is reset, which its trackers read."""
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


def open_tracker(report_to: str, run_name: str, folder: Path, settings: dict[str, Any], start_step: int) -> Tracker:
    """The tracker `report_to` with `settings` (the recipe, flat) as the run's configuration.

    A run that resumes at `start_step` > 0 continues in the tracker too. To be called on the main rank. Raises
    `UserError` where the tracker does not start. TensorBoard writes under `folder`; the others where their own
    environment says.
    """
    identity = read_json_object(folder / IDENTITY).get(report_to) if start_step else None
    try:
        with _quiet():
            inner = _make_tracker(report_to, run_name, folder, identity, start_step)
            inner.start()
        if identity is None or report_to not in WRITE_ONCE:
            _store(report_to, inner, settings)
        _write_identity(folder, report_to, _identity(report_to, inner))
    except Exception as error:  # whatever a tracker's library raises
        raise UserError(
            f"report_to: {report_to}: it does not start ({first_line(error)}); fix that, or set report_to: none "
            "(metrics.jsonl is always written)"
        ) from error
    return Tracker(report_to, inner, _find_page(report_to, inner, folder))


def first_line(error: Exception) -> str:
    """The first line of a library's error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _make_tracker(report_to: str, run_name: str, folder: Path, identity: str | None, start_step: int) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = os.environ.get(PROJECT_VARIABLES.get(report_to, ""), "finetune")
    make = LOGGER_TYPE_TO_CLASS[report_to]
    if report_to == "tensorboard":  # what a killed run logged after its checkpoint is logged again
        return make(run_name, logging_dir=str(folder / "tensorboard"), purge_step=start_step + 1 if identity else None)
    if report_to == "mlflow":
        return make(experiment_name=project, run_name=run_name, run_id=identity)
    if report_to == "wandb":
        resumed = {"id": identity, "resume": "allow"} if identity else {}
        return make(project, name=run_name, dir=str(folder), **resumed)
    return make(project, name=identity or run_name, resume="allow" if identity else "never")


def _store(report_to: str, inner: Any, settings: dict[str, Any]) -> None:
    """The recipe: numbers and texts as they are, lists and mappings as JSON."""
    plain = {
        key: value if isinstance(value, int | float | str) else json.dumps(value) for key, value in settings.items()
    }
    if report_to == "tensorboard":  # Accelerate's own would make a second run for them, named by the clock
        inner.tracker.add_hparams(plain, {}, run_name=".")
    else:
        inner.store_init_configuration(plain)


def _identity(report_to: str, inner: Any) -> str:
    run = inner.tracker
    if report_to == "mlflow":
        return str(run.info.run_id)
    return str(run.id if report_to == "wandb" else run.name if report_to == "trackio" else inner.logging_dir)


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
    """The first screen of a run is ours: no greetings of libraries, unless the environment asks for them."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with redirect_stdout(io.StringIO()):
        yield


def _write_identity(folder: Path, report_to: str, identity: str) -> None:
    text = json.dumps(read_json_object(folder / IDENTITY) | {report_to: identity})
    (folder / IDENTITY).write_text(text + "\n", encoding="utf-8")
