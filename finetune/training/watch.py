"""Watches a run from inside: signals, after which all ranks save and stop; hangs; a profiler."""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from finetune.data.batches import StepBatch
from finetune.distributed.world import World
from finetune.errors import SECONDS_FOR_CAUSE

if TYPE_CHECKING:
    pass

EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h

Item = TypeVar("Item")


class Watchdog:
    """Ends this process where `beat` has not been called for `timeout_seconds`, after writing all
    its stacks to stderr.

    Every rank has one: in a hang all of them wait, and each prints its own stacks.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._timeout = timeout_seconds
        self._doing = "starting"
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._watching = False

    def __enter__(self) -> "Watchdog":
        self._watching = True
        self.beat(self._doing)
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watching = False
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, doing: str) -> None:
        """Reports progress: `doing` starts now. Of no effect outside the `with`."""
        self._doing = doing
        self._since = time.monotonic()
        if self._watching:
            # In case the hang holds Python's lock: a timer of the C runtime. A notebook's own
            # stderr is not a file.
            faulthandler.dump_traceback_later(
                self._timeout + 5.0, exit=True, file=sys.__stderr__ or sys.stderr
            )

    def watched(self, items: Iterator[Item], doing: str) -> Iterator[Item]:
        """The items, with a beat before each."""
        for item in items:
            self.beat(doing)
            yield item

    def _watch(self) -> None:
        while not self._ended.wait(max(0.05, self._since + self._timeout - time.monotonic())):
            since = self._since
            if _waits_for_others():  # the rank that they wait for prints first
                self._ended.wait(SECONDS_FOR_CAUSE)
            if (
                self._ended.is_set()
                or self._since != since
                or time.monotonic() < since + self._timeout
            ):
                continue
            sys.stderr.write(
                f"rank {self._rank}: no progress for {self._timeout:g} s (timeout_seconds) while "
                f"{self._doing}; the run is ended. Where this rank was:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_HUNG)


def _waits_for_others() -> bool:
    """Whether the main thread is in a collective, or in a backward, which may be in one."""
    running = _running(sys._current_frames().get(threading.main_thread().ident or 0))
    return any(
        "torch/distributed/" in path or name == "_engine_run_backward" for path, name in running
    )


def _compiles() -> bool:
    """Whether torch.compile is at work in a thread; a backward is compiled in one of torch's own on
    a GPU.
    """
    at_work = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
    return any(
        path.endswith(at_work)
        for frame in sys._current_frames().values()
        for path, _ in _running(frame)
    )


def _running(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """The file and the function of each call of a stack."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


STOPPING = (signal.SIGTERM, signal.SIGINT)
# Ctrl-C reaches a rank from the terminal and again from its launcher: that is one request
ECHO_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of this step on which all ranks have agreed."""

    stop: bool = False
    save: bool = False
    failed_save: bool = False  # an async save has failed


class SignalListener:
    """The signals that this rank has received. The loop looks once a step and agrees with the other
    ranks.

    SIGTERM and SIGINT save and stop, SIGUSR1 saves and continues. A second request to stop ends at
    once.
    """

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        self._asked_at = 0.0
        self._launcher = os.getppid()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "SignalListener":
        # Python runs a handler only between two of its own instructions, and a rank that hangs in a
        # collective runs none. But the number of the signal is still written to this pipe, and a
        # thread reads it.
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._write.close()  # ends the thread

    def agree(self, world: World, has_failed_save: bool = False) -> Requests:
        """Returns the requests of any rank, on all ranks.

        All ranks call it. One small word over gloo; a GPU's queue is left alone.
        """
        flags = torch.tensor([int(self.stop), int(self.save), int(has_failed_save)])
        return Requests(*(bool(count) for count in world.sum(flags).tolist()))

    def interrupt(self, items: Iterable[Item], world: World, error: Exception) -> Iterator[Item]:
        """The items, of which every rank has as many.

        Raises `error` on all ranks once a signal asks any to stop.
        """
        for item in items:
            if self.agree(world).stop:
                raise error
            yield item

    def _listen(self) -> None:
        while received := self._read.recv(1):
            self._on_signal(received[0])
        self._read.close()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif number in STOPPING and not self.stop:
            self.stop = True
            self._asked_at = time.monotonic()
            when = " once torch.compile is done" if _compiles() else ""
            # A rank gets SIGTERM when its launcher ends, whoever ended that.
            if self._is_launched():
                cause = signal.Signals(number).name
            else:
                cause = "the launcher has ended"
            _print(f"{cause}: saving, then stopping{when}; send it again to stop at once")
        elif number in STOPPING and time.monotonic() - self._asked_at > ECHO_SECONDS:
            _print("stopped at once; what was not saved is lost")
            os._exit(128 + number)

    def _is_launched(self) -> bool:
        """Whether the launcher runs.

        It is the parent still for the moment in which its last threads end.
        """
        with suppress(psutil.Error):  # a parent outside of this container cannot be seen
            if psutil.Process(self._launcher).status() == psutil.STATUS_ZOMBIE:
                return False
        return os.getppid() == self._launcher


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done; a script's own handler then gets it.

    Only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if held:
            signal.raise_signal(signal.SIGINT)


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # in one write: the lines of several ranks must not run together
    sys.stderr.flush()


def profile_steps(
    batches: Iterator[StepBatch], steps: tuple[int, int] | None, folder: Path, rank: int
) -> Iterator[StepBatch]:
    """Yields `batches`, and records the steps from the first to the last of `steps` (1-based) in
    `folder`/profile.

    Leaves `trace-rank<r>.json` (chrome://tracing, ui.perfetto.dev), and on CUDA
    `memory-rank<r>.json`: the allocator's segments and blocks with the stack of each, without a
    pickle.
    """
    if not steps:
        yield from batches
        return
    first, last = steps
    profiler: torch.profiler.profile | None = None
    try:
        for batch in batches:
            if batch.step + 1 == first:
                profiler = _start_profiler()
            yield batch
            if batch.step + 1 == last and profiler is not None:
                _finish_profile(profiler, folder / "profile", rank)
                profiler = None
    finally:  # the run may end at `last` or before it, and then asks for no other batch
        if profiler is not None:
            _finish_profile(profiler, folder / "profile", rank)


def _start_profiler() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler


def _finish_profile(profiler: torch.profiler.profile, folder: Path, rank: int) -> None:
    profiler.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace-rank{rank}.json"))
    if torch.cuda.is_available():
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        (folder / f"memory-rank{rank}.json").write_text(json.dumps(snapshot, default=str))
