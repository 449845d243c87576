"""The seconds of a run's phases: measured while it runs, and read back from metrics.jsonl.

No torch.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from finetune.constants import Fields, Record

# In the order in which a run comes to them.
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
# within or beside other phases, which have their seconds too
OVERLAPPING = ("compile", "publication")
LEAST_SECONDS = 1e-4  # what is shorter is not written
PHASE = "phase"


class Phases:
    """Measures the phases of one start of a run on this rank, by the host's clock: it never waits
    for the device.

    A phase within another one is taken off the outer one, so that seconds of phases add up to at
    most the time that has passed; `OVERLAPPING` ones are in addition.
    """

    def __init__(self) -> None:
        self.step: int | None = None  # steps done; None until it is known where the run starts
        # for each phase that is open: the seconds of the phases within it
        self._inner: list[float] = []
        self._unwritten: deque[Record] = deque()
        self._write: Callable[[Record], object] | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """The block is a part of `phase`. For the thread that trains."""
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            inner = self._inner.pop()
            if self._inner:
                self._inner[-1] += seconds
            self.add(phase, seconds - inner, self.step)
            self.write()

    def add(self, phase: str, seconds: float, step: int | None) -> None:
        """Adds a part of `phase` that belongs to `step`, to be written by the thread that trains.

        For any thread.
        """
        if seconds >= LEAST_SECONDS:
            self._unwritten.append({"step": step, PHASE: phase, "seconds": seconds})

    def write_to(self, write: Callable[[Record], object], step: int) -> None:
        """Sends lines to `write` from now on; those of the phases before belong to `step`, where
        the run starts.
        """
        self.step = step
        self._write = write
        order = list(PHASES)
        self._unwritten = deque(sorted(self._unwritten, key=lambda line: order.index(line[PHASE])))
        self.write()

    def write(self) -> None:
        """Writes what is measured and not yet written, once there is a file for it."""
        while self._write is not None and self._unwritten:
            line = self._unwritten.popleft()
            step = self.step if line["step"] is None else line["step"]
            self._write(line | {"step": step})


def count_starts(lines: Iterable[Fields | None]) -> int:
    """Counts the starts of the run that left seconds in these lines of metrics.jsonl."""
    starts = [line.get("start") for line in lines if line is not None and PHASE in line]
    return max((start for start in starts if isinstance(start, int)), default=0)


def seconds_by_phase(lines: Iterable[Fields | None]) -> dict[int, dict[str, dict[int, float]]]:
    """Seconds by start, phase (in `PHASES`' order) and step, from lines of metrics.jsonl; damaged
    ones are left out.
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
