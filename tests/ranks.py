"""Real ranks for tests: N processes on this machine that find each other as under torchrun, without its start-up time.

A distributed test starts its ranks ONCE and walks many scenarios in them; each start costs the imports of every rank.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import EXIT_USER_ERROR
from tests.warm_processes import WARM_LAUNCH, WarmProcess

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 5.0  # after one rank has failed, before the others are killed
PORTS_AFTER = 64
FIRST_PORT, WORKERS, PORTS_OF_WORKER = 15_000, 8, 1_875
USER_ERROR_SECONDS = 0.5  # the same where it ended with a user's error, which it alone reports


@dataclass(frozen=True, slots=True)
class Finished:
    """How every rank ended and what it wrote (stdout and stderr in one), in order of rank."""

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]

    def check(self) -> "Finished":
        """Itself, if every rank ended with 0; else an AssertionError that shows what the failed ranks wrote."""
        failed = [r for r, code in enumerate(self.returncodes) if code != 0]
        shown = "\n".join(
            f"--- rank {r} ended with {self.returncodes[r]}:\n{self.outputs[r][-4000:]}"
            for r in failed
        )
        assert not failed, shown
        return self


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that are running; each leads its own process group."""

    processes: tuple[WarmProcess, ...]
    logs: tuple[Path, ...]

    def output(self, rank: int) -> str:
        """What `rank` has written so far."""
        return self.logs[rank].read_text(errors="replace")

    def wait(self, timeout: float) -> Finished:
        """Waits for all ranks. Once one fails the others are killed soon, as by a launcher; past `timeout` seconds all are."""
        deadline = time.monotonic() + timeout
        failed_at = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if failed_at is None and any(process.poll() for process in self.processes):
                failed_at = now
            is_user_error = any(process.poll() == EXIT_USER_ERROR for process in self.processes)
            grace = USER_ERROR_SECONDS if is_user_error else GRACE_SECONDS
            if now > deadline or (failed_at is not None and now > failed_at + grace):
                break
            time.sleep(0.02)
        too_long = time.monotonic() > deadline
        self.kill()
        finished = Finished(
            tuple(p.wait() for p in self.processes),
            tuple(self.output(r) for r in range(len(self.logs))),
        )
        tails = "\n".join(
            f"--- rank {r}:\n{text[-4000:]}" for r, text in enumerate(finished.outputs)
        )
        assert not too_long, f"the ranks took more than {timeout:.0f} s\n{tails}"
        return finished

    def kill(self) -> None:
        """Kills what still runs, children included."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # it may not lead its group yet
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def default_interrupt() -> None:
    """For a child that gets a SIGINT: it takes it as at a terminal, also where nohup or a shell's `&` has these tests ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_ranks(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
) -> Ranks:
    """Starts `python script arguments` on `ranks` ranks (gloo finds them by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    They are forked from a process that has done the imports.

    env: More of their environment; nothing that a library reads when it is imported, but for huggingface_hub.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    logs = tuple(folder / f"rank{rank}.log" for rank in range(ranks))
    port = free_port()
    processes = []
    for rank, log in enumerate(logs):
        log.touch()
        environ = environment() | _rendezvous(rank, ranks, port) | dict(env or {})
        processes.append(WarmProcess([str(script), *arguments], environ, log, log))
    return Ranks(tuple(processes), logs)


def launch_ranks(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Finished:
    """Runs `python script arguments` on `ranks` ranks and waits for them, `timeout` seconds at most."""
    running = start_ranks(script, arguments, ranks=ranks, env=env)
    try:
        return running.wait(timeout)
    finally:
        running.kill()


def run_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs one command of a user's, such as `accelerate launch ...`; "python" is the tests' own. Its whole group dies with it."""
    program = Path(sys.executable).parent / command[0]
    process = subprocess.Popen(
        [str(program) if program.exists() else command[0], *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | dict(env or {}),
        cwd=cwd or ROOT,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)


def run_python(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` (a script or `-m module`) like `run_command`, but in a warm process: its imports are not the point."""
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    output = {name: folder / name for name in ("stdout", "stderr")}
    # no signal is sent to a launcher here, whose ranks are not its children then
    warm = environment() | {WARM_LAUNCH: "1"} | dict(env or {})
    process = WarmProcess([str(word) for word in arguments], warm, **output, cwd=cwd or ROOT)
    try:
        code = process.wait(timeout)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    said = [
        output[name].read_text() if output[name].exists() else "" for name in ("stdout", "stderr")
    ]
    return subprocess.CompletedProcess(["python", *arguments], code, *said)


def environment() -> dict[str, str]:
    """This process's environment for a child: the checkout importable, one thread, no launcher's settings."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("FSDP_", "ACCELERATE_", "TORCHELASTIC_"))
    }
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        kept.pop(name, None)
    return kept | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago, as were the PORTS_AFTER it: each world that ranks join takes the next.

    Below those that the system gives to outgoing connections: gloo opens many of these, and one of them would take the port
    before a store listens there. Each worker of pytest-xdist has ports of its own: another would take them in the same moment.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    first = FIRST_PORT + worker * PORTS_OF_WORKER
    while True:
        port = random.SystemRandom().randrange(first, first + PORTS_OF_WORKER - PORTS_AFTER)
        with ExitStack() as stack, suppress(OSError):
            for each in range(port, port + 1 + PORTS_AFTER):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


def open_stores(count: int = 1) -> None:
    """On rank 0, called before it joins a world: the stores of MASTER_PORT and the ports after it, one for each world.

    A rank that looks for a store before rank 0 has opened it tries again only after a third of a second.
    """
    import torch.distributed as dist

    if os.environ["RANK"] == "0":
        first = int(os.environ["MASTER_PORT"])
        _opened.extend(
            dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True
            )
            for port in range(first, first + count)
        )


_opened: list[object] = []


def _rendezvous(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
