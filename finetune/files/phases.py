"""Measures the seconds of a run's phases while it runs, and reads them back from metrics.jsonl.

Imports no torch.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Phase as written in metrics.jsonl -> as shown to people, in the order in which a run has them.
PHASES = {
    "imports": "imports",
    "data": "data",
    "weights": "weights",
    "trial save": "trial save",
    "training": "training",
    "compile": "compilation",
    "save": "wait for saves",
    "publication": "publication of saves",
    "evaluation": "evaluation",
    "export": "export",
    "check": "check of the export",
}
# phases whose seconds are also counted in other phases, as they happen within or beside those
OVERLAPPING = ("compile", "publication")
LEAST_SECONDS = 1e-4  # a shorter time is not written
PHASE = "phase"  # key of a line of metrics.jsonl


class Phases:
    """Measures the phases of one start of a run on this rank, and writes them to metrics.jsonl.

    It reads the host's clock and never waits for the device. The seconds of a phase within another
    one are subtracted from the outer one. All phases except the `OVERLAPPING` ones therefore add up
    to at most the time that has passed.
    """

    def __init__(self) -> None:
        self.step: int | None = None  # steps done; None before `write_to`
        # for each open phase, from the outermost: the seconds of the phases within it so far
        self._inner_seconds: list[float] = []
        self._unwritten: deque[dict[str, Any]] = deque()
        self._write: Callable[[dict[str, Any]], object] | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measures the block as a part of `phase`. Only the training thread may call this."""
        started = time.perf_counter()
        self._inner_seconds.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            inner_seconds = self._inner_seconds.pop()
            if self._inner_seconds:
                self._inner_seconds[-1] += seconds
            self.add(phase, seconds - inner_seconds, self.step)
            self.write()

    def add(self, phase: str, seconds: float, step: int | None) -> None:
        """Adds `seconds` to the lines that the training thread will write. Any thread may call it.

        `step` None stands for the step at which the run starts.
        """
        if seconds >= LEAST_SECONDS:
            self._unwritten.append({"step": step, PHASE: phase, "seconds": seconds})

    def write_to(self, write: Callable[[dict[str, Any]], object], step: int) -> None:
        """Gives the lines measured so far to `write`, in the order of `PHASES`, and later ones too.

        `step` is where the run starts; lines without a step get it.
        """
        self.step = step
        self._write = write
        order = list(PHASES)
        self._unwritten = deque(sorted(self._unwritten, key=lambda line: order.index(line[PHASE])))
        self.write()

    def write(self) -> None:
        """Writes the lines that are not written yet; does nothing before `write_to`."""
        while self._write is not None and self._unwritten:
            line = self._unwritten.popleft()
            step = self.step if line["step"] is None else line["step"]
            self._write(line | {"step": step})


def count_starts(lines: Iterable[Mapping[str, Any] | None]) -> int:
    """Returns the highest number of a start that these lines of metrics.jsonl have seconds of.

    Starts of a run are numbered from 1. Returns 0 if no line has seconds.
    """
    return max(seconds_by_phase(lines), default=0)


def seconds_by_phase(
    lines: Iterable[Mapping[str, Any] | None],
) -> dict[int, dict[str, dict[int, float]]]:
    """Reads lines of metrics.jsonl as {start: {phase: {step: seconds}}}.

    Starts are in ascending order, and phases in the order of `PHASES`. Lines that hold no phase,
    or are damaged, are left out. Seconds of one start, phase and step are added up.
    """
    starts: dict[int, dict[str, dict[int, float]]] = {}
    for line in lines:
        if line is None:
            continue
        start = line.get("start")
        phase = line.get(PHASE)
        step = line.get("step")
        seconds = line.get("seconds")
        if (
            not isinstance(phase, str)
            or phase not in PHASES
            or not isinstance(seconds, int | float)
        ):
            continue
        if isinstance(start, int) and isinstance(step, int):
            by_step = starts.setdefault(start, {}).setdefault(phase, {})
            by_step[step] = by_step.get(step, 0.0) + seconds
    return {
        start: {phase: by_phase[phase] for phase in PHASES if phase in by_phase}
        for start, by_phase in sorted(starts.items())
    }
