"""One start of a run for the soak: its ranks, when they are killed or preempted, and how they ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.checkpoint.comparing import Images
from tests.checkpoint.disk import FULL_FOR_A_WHILE, Disk, DiskFault
from tests.checkpoint.faults import Setup
from tests.forked_ranks import fork_ranks, kill, reap, run_main
from tests.ranks import ROOT, environment

LONGEST_SECONDS = 400.0
GRACE_SECONDS = 6.0  # after a rank was killed, before the others are: they end by themselves, or wait in vain to join it


@dataclass(frozen=True, slots=True)
class Moment:
    """When a life is disturbed: `delay` seconds after a file matches `pattern`; without one, after the start."""

    what: signal.Signals | DiskFault
    victim: int | None  # a rank; under the launcher, the launcher alone; None: all processes
    phase: str
    pattern: str | None  # below the setup's root
    delay: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How a life ended."""

    codes: list[int]
    met: str | None  # what it met, in words; None where it was not disturbed
    log: str


class Life:
    """One start of `name` under `setup`, on forked ranks or by the launcher."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        by_launcher: bool,
        keep: int | None = -1,
        disk: Disk | None = None,
    ) -> None:
        self.setup, self.name, self.by_launcher, self.disk = setup, name, by_launcher, disk
        self.arguments = setup.arguments(name, setup.limit if keep == -1 else keep)
        self.log = setup.root / f"{name.replace('/', '-')}.log"
        self.log.write_bytes(b"")
        self.seen_at = 0.0  # seconds after the start at which what the moment waits for was there
        self.met: str | None = None
        self.met_at = 0.0

    def run(
        self, moment: Moment | None, usual_seconds: float, images: Images | None = None
    ) -> Ended:
        """Starts the ranks, disturbs them at `moment`, and waits for their ends. Takes `images` of the run's folder meanwhile."""
        try:
            return (self._by_launcher if self.by_launcher else self._on_forked)(
                moment, usual_seconds, images
            )
        finally:
            if self.disk is not None:
                self.disk.end()

    def _on_forked(
        self, moment: Moment | None, usual_seconds: float, images: Images | None
    ) -> Ended:
        launched = self.setup.layout != "single"
        processes = fork_ranks(
            lambda rank: run_main(self.arguments), self.setup.ranks, self.log, launched=launched
        )
        codes: dict[int, int] = {}
        dead_since, started = 0.0, time.monotonic()
        while len(codes) < len(processes):
            reap(processes, codes)
            now = time.monotonic()
            if not dead_since and any(code < 0 or code == 2 for code in codes.values()):
                dead_since = (
                    now if any(code < 0 for code in codes.values()) else now - GRACE_SECONDS
                )
            self._end_of_a_while(moment)
            if (
                moment
                and not self.met
                and not codes
                and self._is_due(moment, now - started, usual_seconds)
            ):
                self._disturb(
                    moment, processes if moment.victim is None else [processes[moment.victim]]
                )
            elif images and not self.met and not codes and images.is_new():
                self._stand_still(processes, codes, images)
            elif now - started > LONGEST_SECONDS or (
                dead_since and now > dead_since + GRACE_SECONDS
            ):
                kill(processes, codes)
            time.sleep(0.004 if (moment and not self.met) or images else 0.02)
        return Ended(
            [codes[rank] for rank in range(len(processes))],
            self.met,
            self.log.read_text(errors="replace"),
        )

    def _disturb(self, moment: Moment, victims: Iterable[int]) -> None:
        """What `moment` does: a signal to the processes `victims`, or a fault of the disk."""
        if isinstance(moment.what, DiskFault):
            assert self.disk is not None
            if not self.disk.begin(moment.what, self.setup.root / self.name):
                return
        else:
            for process in victims:
                with suppress(ProcessLookupError):
                    os.kill(process, moment.what)
        self.met = self._words(moment)
        self.met_at = time.monotonic()

    def _end_of_a_while(self, moment: Moment | None) -> None:
        """Frees a disk that was to be full for a while."""
        if (
            self.disk is None
            or not self.met
            or moment is None
            or not isinstance(moment.what, DiskFault)
        ):
            return
        if (
            moment.what.kind == FULL_FOR_A_WHILE
            and time.monotonic() > self.met_at + moment.what.seconds
        ):
            self.disk.end()

    @staticmethod
    def _stand_still(processes: list[int], codes: dict[int, int], images: Images) -> None:
        """One of `images`, while no rank moves; none where one has ended."""
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        for rank, process in enumerate(processes):
            _, status = os.waitpid(process, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                codes[rank] = os.waitstatus_to_exitcode(status)
        if not codes:
            images.take()
        for rank, process in enumerate(processes):
            if rank not in codes:
                os.kill(process, signal.SIGCONT)

    def _is_due(self, moment: Moment, elapsed: float, usual_seconds: float) -> bool:
        if not self.seen_at and (
            moment.pattern is None or any(self.setup.root.glob(moment.pattern))
        ):
            self.seen_at = max(elapsed, 1e-9) if moment.pattern else 1e-9
        return (
            bool(self.seen_at and elapsed > self.seen_at + moment.delay)
            or elapsed > 3 * usual_seconds
        )

    def _words(self, moment: Moment) -> str:
        where = (
            moment.phase if self.seen_at else "anywhere"
        ) + ", by the launcher" * self.by_launcher
        if isinstance(moment.what, DiskFault):
            return f"{moment.what.kind}: {where}"
        what = "killed" if moment.what == signal.SIGKILL else "preempted"
        one = "the launcher" if self.by_launcher else "one rank"
        return f"{what}: {'all ranks' if moment.victim is None else one}, {where}"

    def _by_launcher(self, moment: Moment | None, usual_seconds: float, _: Images | None) -> Ended:
        """`finetune launch` as a user has it. It passes a signal on; SIGKILL is for it alone, or for its ranks as well."""
        command = [sys.executable, "-m", "finetune", "launch", *self.arguments]
        command += ["--num-processes", str(self.setup.ranks)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), cwd=ROOT, start_new_session=True
            )
        started = time.monotonic()
        while process.poll() is None:
            elapsed = time.monotonic() - started
            self._end_of_a_while(moment)
            if (
                moment and not self.met and self._is_due(moment, elapsed - 8.0, usual_seconds)
            ):  # its imports come first
                takes_all = moment.what == signal.SIGKILL and moment.victim is None
                self._disturb(moment, self._processes() if takes_all else [process.pid])
            if elapsed > LONGEST_SECONDS:
                self._disturb(
                    Moment(signal.SIGKILL, None, "after too long", None, 0.0), self._processes()
                )
            time.sleep(0.01)
        while self._processes():  # ranks whose launcher was killed save and stop
            time.sleep(0.1)
        return Ended([process.wait()], self.met, self.log.read_text(errors="replace"))

    def _processes(self) -> list[int]:
        """The launcher and its ranks: the processes with this life's arguments."""
        every = psutil.process_iter(["pid", "cmdline"])
        return [
            each.info["pid"]
            for each in every
            if set(self.arguments) <= set(each.info["cmdline"] or ())
        ]
