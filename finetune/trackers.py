"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, trackio, each through Accelerate's own class."""

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

from finetune.errors import UserError

PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
WRITE_ONCE = ("tensorboard", "mlflow")  # what they were told of a run's configuration stays
IDENTITY = "tracker.json"  # in the run's folder: what the tracker calls the run, so that a resumed one goes on there


@dataclass(frozen=True, slots=True)
class Tracker:
    """An open tracker of Accelerate's. Whatever its library raises comes out as it is."""

    name: str  # as in report_to
    inner: Any
    watch: str  # the page or the command that shows the run

    def log(self, line: dict[str, Any]) -> None:
        """Hands on the numbers of a line of metrics."""
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        self.inner.log(numbers, step=line["step"])

    def close(self) -> None:
        """Says that the run is over. To be called while Accelerate's state is there, which its trackers ask for."""
        with _quiet():
            if self.name == "trackio":  # Accelerate's leaves it to be finished, and told, once more at exit
                import trackio

                trackio.finish()
            else:
                self.inner.finish()


def refuse_missing(report_to: str) -> None:
    """Raises `UserError` where the tracker's package is not installed, before anything is loaded."""
    package = PACKAGES.get(report_to)
    if package is not None and find_spec(package) is None:
        raise UserError(
            f'report_to: {report_to}: its package is not installed; pip install "finetune[{report_to}]", or set '
            "report_to: none (metrics.jsonl is always written)"
        )


def open_tracker(
    report_to: str, run_name: str, folder: Path, settings: dict[str, Any], start_step: int
) -> Tracker | None:
    """The recipe's tracker with `settings` (the recipe, flat) as the run's configuration; None where none is asked for.

    A run that goes on at `start_step` > 0 goes on in the tracker too. To be called on the main rank. Raises `UserError`
    where the tracker does not start. TensorBoard writes under `folder`; the others where their own environment says.
    """
    if report_to == "none":
        return None
    known_as = _identities(folder).get(report_to) if start_step else None
    try:
        with _quiet():
            inner = _made(report_to, run_name, folder, known_as, start_step)
            inner.start()
        if known_as is None or report_to not in WRITE_ONCE:
            _store(report_to, inner, settings)
        _remember(folder, report_to, _identity(report_to, inner))
    except Exception as error:  # whatever a tracker's library raises
        raise UserError(
            f"report_to: {report_to}: it does not start ({first_line(error)}); mend that, or set report_to: none "
            "(metrics.jsonl is always written)"
        ) from error
    return Tracker(report_to, inner, _watch(report_to, inner, folder))


def first_line(error: Exception) -> str:
    """What an error of a library says, in a line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _made(report_to: str, run_name: str, folder: Path, known_as: str | None, start_step: int) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = os.environ.get(PROJECT_VARIABLES.get(report_to, ""), "finetune")
    make = LOGGER_TYPE_TO_CLASS[report_to]
    if report_to == "tensorboard":  # what a killed run logged beyond its checkpoint is about to be logged again
        return make(run_name, logging_dir=str(folder / "tensorboard"), purge_step=start_step + 1 if known_as else None)
    if report_to == "mlflow":
        return make(experiment_name=project, run_name=run_name, run_id=known_as)
    if report_to == "wandb":
        going_on = {"id": known_as, "resume": "allow"} if known_as else {}
        return make(project, name=run_name, dir=str(folder), **going_on)
    return make(project, name=known_as or run_name, resume="allow" if known_as else "never")


def _store(report_to: str, inner: Any, settings: dict[str, Any]) -> None:
    """The recipe: numbers and texts as they are, lists and mappings as JSON."""
    plain = {
        key: value if isinstance(value, int | float | str) else json.dumps(value) for key, value in settings.items()
    }
    if report_to == "tensorboard":  # Accelerate's own way makes a second run, named by the clock, for them
        inner.tracker.add_hparams(plain, {}, run_name=".")
    else:
        inner.store_init_configuration(plain)


def _identity(report_to: str, inner: Any) -> str:
    run = inner.tracker
    if report_to == "mlflow":
        return str(run.info.run_id)
    return str(run.id if report_to == "wandb" else run.name if report_to == "trackio" else inner.logging_dir)


def _watch(report_to: str, inner: Any, folder: Path) -> str:
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
    """The first screen of a run is ours: no greetings of libraries, but for whoever asks for them in the environment."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with redirect_stdout(io.StringIO()):
        yield


def _identities(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(folder: Path, report_to: str, identity: str) -> None:
    text = json.dumps(_identities(folder) | {report_to: identity})
    (folder / IDENTITY).write_text(text + "\n", encoding="utf-8")
