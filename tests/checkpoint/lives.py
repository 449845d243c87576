"""One start of a run for the soak: its ranks, when they are killed or preempted, and how they ended."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import yaml

from tests.checkpoint.comparing import Images
from tests.checkpoint.faults import Setup
from tests.forked_ranks import fork_ranks, kill, reap, run_main
from tests.ranks import ROOT, environment

LONGEST_SECONDS = 180.0
GRACE_SECONDS = (
    6.0  # after a rank was killed, before the others are: they end by themselves, or wait in vain to join it
)


@dataclass(frozen=True, slots=True)
class Moment:
    """When a life is disturbed: `delay` seconds after a file matches `pattern`; without one, after the start."""

    number: signal.Signals
    victim: int | None  # a rank; None: all
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

    def __init__(self, setup: Setup, name: str, by_launcher: bool, keep: int | None = -1) -> None:
        self.setup, self.name, self.by_launcher = setup, name, by_launcher
        self.recipe = setup.root / f"{name}.yaml"
        self.recipe.write_text(yaml.safe_dump(setup.recipe(name, setup.limit if keep == -1 else keep)))
        self.log = setup.root / f"{name}.log"
        self.log.write_bytes(b"")
        self.seen_at = 0.0  # seconds after the start at which what the moment waits for was there

    def run(self, moment: Moment | None, usual_seconds: float, images: Images | None = None) -> Ended:
        """Starts the ranks, disturbs them at `moment`, and waits for their ends. Takes `images` of the run's folder meanwhile."""
        arguments = ["--recipe", str(self.recipe), "--config", str(self.setup.config)]
        if self.by_launcher:
            return self._by_launcher(arguments, moment, usual_seconds)
        launched = self.setup.layout != "single"
        processes = fork_ranks(lambda rank: run_main(arguments), self.setup.ranks, self.log, launched=launched)
        codes: dict[int, int] = {}
        met, dead_since, started = None, 0.0, time.monotonic()
        while len(codes) < len(processes):
            reap(processes, codes)
            now = time.monotonic()
            if not dead_since and any(code < 0 or code == 2 for code in codes.values()):
                dead_since = now if any(code < 0 for code in codes.values()) else now - GRACE_SECONDS
            if moment and not met and not codes and self._is_due(moment, now - started, usual_seconds):
                for rank in range(len(processes)) if moment.victim is None else [moment.victim]:
                    os.kill(processes[rank], moment.number)
                met = self._words(moment)
            elif images and not met and not codes and images.is_new():
                self._stand_still(processes, codes, images)
            elif now - started > LONGEST_SECONDS or (dead_since and now > dead_since + GRACE_SECONDS):
                kill(processes, codes)
            time.sleep(0.004 if (moment and not met) or images else 0.02)
        return Ended([codes[rank] for rank in range(len(processes))], met, self.log.read_text(errors="replace"))

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
        if not self.seen_at and (moment.pattern is None or any(self.setup.root.glob(moment.pattern))):
            self.seen_at = max(elapsed, 1e-9) if moment.pattern else 1e-9
        return bool(self.seen_at and elapsed > self.seen_at + moment.delay) or elapsed > 3 * usual_seconds

    def _words(self, moment: Moment) -> str:
        what = "killed" if moment.number == signal.SIGKILL else "preempted"
        who = "all ranks" if moment.victim is None else "one rank"
        return f"{what}: {who}, {moment.phase if self.seen_at else 'anywhere'}"

    def _by_launcher(self, arguments: list[str], moment: Moment | None, usual_seconds: float) -> Ended:
        """`finetune launch` as a user has it; a signal goes to the launcher, SIGKILL to its whole session."""
        command = [sys.executable, "-m", "finetune", "launch", *arguments, "--num-processes", str(self.setup.ranks)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), cwd=ROOT, start_new_session=True
            )
        met, started = None, time.monotonic()
        while process.poll() is None:
            elapsed = time.monotonic() - started
            if moment and not met and self._is_due(moment, elapsed - 8.0, usual_seconds):  # its imports come first
                if moment.number == signal.SIGKILL:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.send_signal(moment.number)
                met = self._words(moment) + ", by the launcher"
            if elapsed > LONGEST_SECONDS:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        while self._is_running():  # ranks whose launcher was killed get SIGTERM, on which they save
            time.sleep(0.1)
        return Ended([process.wait()], met, self.log.read_text(errors="replace"))

    def _is_running(self) -> bool:
        """Whether a process that was given this life's recipe is still there."""
        commands = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
        return any(str(self.recipe) in command for command in commands)
