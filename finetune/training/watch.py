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
from typing import Any, TypeVar

import psutil
import torch

from finetune.data.batches import StepBatch
from finetune.distributed.world import World
from finetune.errors import SECONDS_FOR_CAUSE

EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h

Item = TypeVar("Item")


class Watchdog:
    """Ends this process once `beat` has not been called for `timeout_seconds`, after writing the
    stacks of all its threads to stderr.

    Every rank has one: in a hang all ranks wait, and each prints its own stacks.
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
        """Reports progress: `doing` starts now. Nothing is watched outside the `with`."""
        self._doing = doing
        self._since = time.monotonic()
        if self._watching:
            # A hang may hold Python's lock, so that no thread of ours runs: this is a timer of the
            # C runtime. It needs a file, which a notebook's own stderr is not.
            faulthandler.dump_traceback_later(
                self._timeout + 5.0, exit=True, file=sys.__stderr__ or sys.stderr
            )

    def watched(self, items: Iterator[Item], doing: str) -> Iterator[Item]:
        """Yields the items, with a beat before each."""
        for item in items:
            self.beat(doing)
            yield item

    def _watch(self) -> None:
        """Waits until the time is over since the last beat, and ends the process."""
        while not self._ended.wait(max(0.05, self._since + self._timeout - time.monotonic())):
            since = self._since
            if _waits_for_others():  # the rank that it waits for prints first
                self._ended.wait(SECONDS_FOR_CAUSE)
            has_beaten = self._since != since
            is_over = time.monotonic() >= since + self._timeout
            if self._ended.is_set() or has_beaten or not is_over:
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
    calls = _calls_of(sys._current_frames().get(threading.main_thread().ident or 0))
    return any(
        "torch/distributed/" in path or name == "_engine_run_backward" for path, name in calls
    )


def _compiles() -> bool:
    """Whether torch.compile is at work in any thread: on a GPU, a thread of torch's own compiles a
    backward.
    """
    compilers = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
    for frame in sys._current_frames().values():
        if any(path.endswith(compilers) for path, _ in _calls_of(frame)):
            return True
    return False


def _calls_of(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yields the file and the function of each call of a stack."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


STOPPING = (signal.SIGTERM, signal.SIGINT)
# Ctrl-C reaches a rank from the terminal and again from its launcher: within this time it is one
# request
ECHO_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of this step on which all ranks have agreed."""

    stop: bool = False
    save: bool = False
    failed_save: bool = False  # an async save has failed


class SignalListener:
    """The signals that this rank has received, on which the loop agrees with the other ranks after
    each step.

    SIGTERM and SIGINT save and stop, SIGUSR1 saves and continues. A second request to stop ends the
    process at once.
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
        """Returns the requests of any rank, on all ranks. All ranks call it.

        It sends three numbers over gloo, and waits for no GPU.
        """
        flags = torch.tensor([int(self.stop), int(self.save), int(has_failed_save)])
        return Requests(*(bool(count) for count in world.sum(flags).tolist()))

    def interrupt(self, items: Iterable[Item], world: World, error: Exception) -> Iterator[Item]:
        """Yields the items. Every rank has the same number of them.

        Raises `error` on all ranks once a signal asks any of them to stop.
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
            # a rank gets SIGTERM when its launcher ends, whatever ended that
            if self._has_launcher():
                cause = signal.Signals(number).name
            else:
                cause = "the launcher has ended"
            _print(f"{cause}: saving, then stopping{when}; send it again to stop at once")
        elif number in STOPPING and time.monotonic() - self._asked_at > ECHO_SECONDS:
            _print("stopped at once; what was not saved is lost")
            os._exit(128 + number)

    def _has_launcher(self) -> bool:
        """Whether the launcher runs. While its last threads end it is a zombie, and still the
        parent.
        """
        with suppress(psutil.Error):  # a parent outside of this container cannot be seen
            if psutil.Process(self._launcher).status() == psutil.STATUS_ZOMBIE:
                return False
        return os.getppid() == self._launcher


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done; the handler from before the block then gets it.

    Has no effect outside the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if held:
            signal.raise_signal(signal.SIGINT)


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # in one write: the lines of several ranks must not run together
    sys.stderr.flush()


def profile_steps(
    batches: Iterator[StepBatch], steps: tuple[int, int] | None, folder: Path, rank: int
) -> Iterator[StepBatch]:
    """Yields `batches`, and records the steps from the first to the last of `steps` (1-based).

    Writes into `folder`/profile `trace-rank<r>.json` (chrome://tracing, ui.perfetto.dev), and on
    CUDA `memory-rank<r>.json`: the allocator's segments and blocks, each with its stack.
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
    finally:  # a run that ends at `last` or before asks for no other batch
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
