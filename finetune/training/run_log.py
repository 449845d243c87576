"""What a run logs: metrics.jsonl always, a bar at a terminal, plain lines in a log file, and experiment trackers."""

import io
import json
import math
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from finetune.config.compatibility import TRACKERS
from finetune.errors import UserError
from finetune.files.run_json import (
    DIVERGED_LINES,
    describe_missing,
    drop_later_lines,
    find_divergence,
    losses_of,
    read_json_lines,
    read_json_object,
    readable_lines,
    remove_doubled,
)
from finetune.terminal import is_notebook
from finetune.units import gib

SMOOTHING = 0.9  # weight of the past in the loss that is shown beside the logged one
BAR_COLUMNS = 8  # of the bar itself, at least
NOTEBOOK_COLUMNS = 110  # of the bar with what stands beside it, where there is no terminal to ask
RATE_LINES = 20  # lines of metrics from which the time left is estimated
DIVERGED_ADVICE = "lower learning_rate, or raise warmup_ratio"
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


class MetricsLog:
    """Appends to metrics.jsonl, passes lines to trackers, and prints. On ranks other than 0 it is silent."""

    def __init__(self, path: Path | None, steps: int, start_step: int, trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._file: Any = None
        self._unwritten = b""  # lines that a full disk has refused
        self._trackers = list(trackers)
        self._display: Display | None = None
        self._losses: list[tuple[int, float]] = []  # (step, loss) of every training line
        self._has_diverged = False
        if path is not None:
            found = read_json_lines(path) if start_step else []
            missing = describe_missing(path, start_step)
            self._losses = losses_of(drop_later_lines(path, start_step))
            self._display = Display(steps, start_step, (loss for _, loss in self._losses))
            self._file = path.open("ab", buffering=0)
            readable = readable_lines(found)
            for count, what in (
                (len(found) - len(readable), "line that cannot be read"),
                (len(readable) - len(remove_doubled(readable)), "doubled line"),
            ):
                if count:
                    self.say(
                        f"warning {path}: {count:,} {what if count == 1 else what.replace('line', 'lines')} removed"
                    )
            if missing:
                self.say(f"warning {path}: {missing}; the report and the model card lack them")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes where the block raises; a run that is done has more to write first."""
        if error is not None:
            self.close()

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl. What a full disk refuses is kept, and written before the next line with room."""
        if self._file is not None:
            self._append(json.dumps({key: _rounded(value) for key, value in line.items()}).encode() + b"\n")
        self._call_tracker(lambda tracker: tracker.log(line))

    def step(self, line: dict[str, Any]) -> None:
        """Writes and shows a training line. Warns once, when the loss has been far above its start for long.

        Raises `UserError` where the run's folder has been removed: nothing of the run could be resumed or exported.
        """
        if self._path is not None and is_missing(self._path) and is_missing(self._path.with_name("recipe.yaml")):
            raise UserError(
                f"{self._path.parent}: the run's folder was removed or renamed; stopped at step "
                f"{line['step']:,}: no checkpoint "
                "could be resumed or exported from there. Start the run again, and leave its folder in place"
            )
        self.write(line)
        if self._display is not None:
            self._display.step(line)
        self._losses.append((line["step"], line["loss"]))
        if not self._has_diverged and (diverged := find_divergence(self._losses, at_end=False)):
            self._has_diverged = True
            self.say(f"warning {diverged}, for {DIVERGED_LINES} lines in a row; {DIVERGED_ADVICE}")

    def say(self, text: str) -> None:
        """A sentence for the person, above the bar."""
        if self._display is not None:
            self._display.say(text)

    @property
    def watch(self) -> str | None:
        """Where the trackers show the run; None without one."""
        return ", ".join(tracker.watch for tracker in self._trackers) or None

    def close_tracker(self) -> None:
        """Closes the tracker. To be called before the process group is destroyed."""
        self._call_tracker(lambda tracker: tracker.close())
        self._trackers = []

    def close(self) -> None:
        """Ends the tracker, the bar and the file."""
        self.close_tracker()
        if self._display is not None:
            self._display.close()
        if self._file is not None and not self._file.closed:
            if self._unwritten:
                self._append(b"")
            self._file.close()

    def _append(self, text: bytes) -> None:
        is_first = not self._unwritten
        self._unwritten += text
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if is_first:
                self.say(
                    f"{self._file.name}: cannot be written ({error.strerror}); the run continues, and its lines are "
                    "added once there is room"
                )

    def _call_tracker(self, act: Callable[[Tracker], None]) -> None:
        """Calls `act` with each tracker; one that fails is reported once and not called again."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever its library raises: no reason to end a run
                self._trackers.remove(tracker)
                self.say(
                    f"report_to: {tracker.name}: it failed ({first_line(error)}); the run continues without it, "
                    "metrics.jsonl has every line"
                )


def is_missing(path: Path) -> bool:
    """Whether there is surely nothing at `path`; a network file system that does not answer leaves that open."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class Display:
    """What the person sees on stderr: one bar at a terminal, one plain line for each line of metrics anywhere else."""

    def __init__(self, steps: int, start_step: int, losses: Iterable[float] = ()) -> None:
        """`losses`: those of the lines before `start_step`, from which the smoothed loss continues."""
        self._steps = steps
        self._smoothed, self._weight = 0.0, 0.0
        for loss in losses:
            self._smooth(loss)
        self._seen: deque[tuple[int, float]] = deque([(start_step, time.perf_counter())], maxlen=RATE_LINES)
        self._bar: Any = None
        if sys.stderr.isatty() or is_notebook():
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}"
            width = {"ncols": NOTEBOOK_COLUMNS} if is_notebook() else {"dynamic_ncols": True}
            self._bar = tqdm(total=steps, initial=start_step, bar_format=form, **width)

    def step(self, line: dict[str, Any]) -> None:
        """Shows a training line."""
        self._smooth(line["loss"])
        smoothed = self._smoothed / self._weight if self._weight else line["loss"]
        seconds_left = self._left(line["step"])
        if self._bar is not None:
            beside = len(f"100%|{'':{BAR_COLUMNS}}| {self._steps}/{self._steps}  ")
            columns = NOTEBOOK_COLUMNS if is_notebook() else os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._bar.set_description_str(shown_line(line, smoothed, seconds_left, columns - beside), refresh=False)
            self._bar.update(line["step"] - self._bar.n)
        else:
            shown = shown_line(line, smoothed, seconds_left)
            print(f"step {line['step']:>{len(str(self._steps))}}/{self._steps}  {shown}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A sentence, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar where it is."""
        if self._bar is not None:
            self._bar.close()

    def _smooth(self, loss: float) -> None:
        if math.isfinite(loss):
            self._smoothed = SMOOTHING * self._smoothed + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    def _left(self, step: int) -> float:
        """Seconds to the last step, at the pace of the last lines, evaluations and saves included."""
        first_step, started = self._seen[0]
        self._seen.append((step, time.perf_counter()))
        done = step - first_step
        return (self._steps - step) * (time.perf_counter() - started) / done if done > 0 else 0.0


def shown_line(line: dict[str, Any], smoothed: float, seconds_left: float, width: int | None = None) -> str:
    """A training line as it is shown; what does not fit into `width` characters is dropped, what matters least first.

    >>> line = {"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.8, "tokens_per_second": 5200.0, "mfu": None,
    ...         "peak_memory_bytes": 2**30}
    >>> shown_line(line, 1.6, 150.0)
    'loss 1.5000 (smoothed 1.6000)  lr 1.00e-03  grad 0.8  5,200 tokens/s  1.00 GiB  0:02:30 left'
    >>> shown_line(line, 1.6, 150.0, width=60)
    'loss 1.5000 (smoothed 1.6000)  5,200 tokens/s  0:02:30 left'
    >>> shown_line(line | {"rewards/accuracies": 0.75, "rewards/margins": 0.1234}, 1.6, 150.0, width=90)
    'loss 1.5000 (smoothed 1.6000)  accuracy 75%  margin 0.123  5,200 tokens/s  0:02:30 left'
    """
    parts = {
        "loss": f"loss {line['loss']:.4f} (smoothed {smoothed:.4f})",
        "accuracy": f"accuracy {line['rewards/accuracies']:.0%}" if "rewards/accuracies" in line else None,
        "margin": f"margin {line['rewards/margins']:.3g}" if "rewards/margins" in line else None,
        "reward": f"reward {line['reward']:.3g}" if "reward" in line else None,
        "learning_rate": f"lr {line['learning_rate']:.2e}",
        "grad_norm": f"grad {line['grad_norm']:.3g}",
        "speed": f"{line['tokens_per_second']:,.0f} tokens/s",
        "mfu": f"{line['mfu']:.1%} MFU" if line.get("mfu") is not None else None,
        "memory": f"{gib(line['peak_memory_bytes'])} GiB",
        "left": f"{timedelta(seconds=round(seconds_left))} left",
    }
    for least in ("", "memory", "grad_norm", "learning_rate", "mfu", "speed", "margin", "accuracy", "reward"):
        parts.pop(least, None)
        shown = "  ".join(part for part in parts.values() if part is not None)
        if width is None or len(shown) <= width:
            break
    return shown


def _rounded(value: Any) -> Any:
    """Nine digits say all that fp32 knows."""
    return float(f"{value:.9g}") if isinstance(value, float) else value
