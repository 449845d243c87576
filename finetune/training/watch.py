"""What watches a run from inside: signals that ask to save or stop, a watchdog for hangs, and a
profiler.
"""

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
    """Ends this process if `beat` is not called for `timeout_seconds`.

    Before that it writes the stacks of all threads to stderr. Every rank has a watchdog: in a hang
    all ranks wait, and each prints its own stacks.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._timeout = timeout_seconds
        self._doing = "starting"  # what this process does since the last beat
        self._last_beat = time.monotonic()
        self._ended = threading.Event()  # set at the end of the `with`
        self._is_watching = False

    def __enter__(self) -> "Watchdog":
        self._is_watching = True
        self.beat(self._doing)
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_watching = False
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, doing: str) -> None:
        """Reports progress: this process starts to do `doing` now.

        Outside the `with` of the watchdog, nothing is watched.
        """
        self._doing = doing
        self._last_beat = time.monotonic()
        if self._is_watching:
            # A hang may hold Python's lock, so that `_watch` never runs. This timer needs no lock:
            # faulthandler runs it in C. It writes to a file, which a notebook's stderr is not.
            faulthandler.dump_traceback_later(
                self._timeout + 5.0, exit=True, file=sys.__stderr__ or sys.stderr
            )

    def watched(self, items: Iterator[Item], doing: str) -> Iterator[Item]:
        """Yields the items, and calls `beat` with `doing` before each."""
        for item in items:
            self.beat(doing)
            yield item

    def _watch(self) -> None:
        """Waits until there was no beat for `timeout_seconds`, and ends the process; runs in a
        thread of its own.
        """
        while not self._ended.wait(max(0.05, self._last_beat + self._timeout - time.monotonic())):
            last_beat = self._last_beat
            if _waits_for_others():  # the rank for which this one waits shall print first
                self._ended.wait(SECONDS_FOR_CAUSE)
            has_beaten = self._last_beat != last_beat
            is_over = time.monotonic() >= last_beat + self._timeout
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
    """Whether the main thread is in a collective, or in a backward, which may wait in a collective
    in C++.
    """
    calls = _list_calls(sys._current_frames().get(threading.main_thread().ident or 0))
    return any(
        "torch/distributed/" in path or name == "_engine_run_backward" for path, name in calls
    )


def _is_compiling() -> bool:
    """Whether torch.compile is compiling in any thread. On a GPU, one of torch's own threads
    compiles the backward.
    """
    compilers = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
    for frame in sys._current_frames().values():
        if any(path.endswith(compilers) for path, _ in _list_calls(frame)):
            return True
    return False


def _list_calls(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yields (file, function) of each call on a stack, from `frame` outwards; nothing for None."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


STOPPING = (signal.SIGTERM, signal.SIGINT)
# Ctrl-C reaches a rank twice, from the terminal and from its launcher. Within this time the second
# signal is not a second request.
ECHO_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of any rank, as all ranks have agreed on them after a step."""

    stop: bool = False
    save: bool = False
    failed_save: bool = False  # an async save has failed on some rank


class SignalListener:
    """Records the signals that this rank receives. The training loop asks for them after each step,
    in agreement with the other ranks.

    SIGTERM and SIGINT ask to save and stop, SIGUSR1 to save and continue. A second request to stop
    ends the process at once. Entered outside the main thread, which alone gets signals, it records
    none.
    """

    def __init__(self) -> None:
        self.stop = False  # whether a signal has asked this rank to stop
        self.save = False  # whether a signal has asked this rank for a save that is still due
        self._asked_at = 0.0  # when a signal first asked to stop, on the monotonic clock
        self._launcher = os.getppid()
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "SignalListener":
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs a handler only between two of its own instructions, and a rank that hangs in a
        # collective runs none. But CPython's handler in C writes the signal's number to this pipe
        # at once, and a thread reads it.
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._write.fileno(), warn_on_full_buffer=False
        )
        for number in (*STOPPING, signal.SIGUSR1):
            # The thread acts on the signal. This handler only keeps it from ending the process.
            self._previous_handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous_handlers:  # entered outside the main thread
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._write.close()  # ends the thread

    def agree(self, world: World, has_failed_save: bool = False) -> Requests:
        """Returns what any rank asks for, on all ranks. All ranks call it.

        `has_failed_save`: whether an async save has failed on this rank.

        It sums three numbers over gloo, so that no GPU is waited for.
        """
        flags = torch.tensor([int(self.stop), int(self.save), int(has_failed_save)])
        return Requests(*(bool(count) for count in world.sum(flags).tolist()))

    def interrupt(self, items: Iterable[Item], world: World, error: Exception) -> Iterator[Item]:
        """Yields the items, until a signal asks any rank to stop: then all ranks raise `error`.

        Every rank must have the same number of items.
        """
        for item in items:
            if self.agree(world).stop:
                raise error
            yield item

    def _listen(self) -> None:
        """Passes each signal from the pipe to `_on_signal`, until the pipe is closed."""
        while received := self._read.recv(1):  # one byte: the signal's number
            self._on_signal(received[0])
        self._read.close()

    def _on_signal(self, number: int) -> None:
        """Records what the signal `number` asks for. A second request to stop ends the process."""
        if number == signal.SIGUSR1:
            self.save = True
        elif number in STOPPING and not self.stop:
            self.stop = True
            self._asked_at = time.monotonic()
            when = " once torch.compile is done" if _is_compiling() else ""
            # a rank also gets SIGTERM when its launcher ends, for whatever reason
            if self._has_launcher():
                cause = signal.Signals(number).name
            else:
                cause = "the launcher has ended"
            _print(f"{cause}: saving, then stopping{when}; send it again to stop at once")
        elif number in STOPPING and time.monotonic() - self._asked_at > ECHO_SECONDS:
            _print("stopped at once; what was not saved is lost")
            os._exit(128 + number)

    def _has_launcher(self) -> bool:
        """Whether the launcher still runs. While its last threads end, it is a zombie that is still
        this process's parent.
        """
        with suppress(psutil.Error):  # psutil cannot see a parent outside of this container
            if psutil.Process(self._launcher).status() == psutil.STATUS_ZOMBIE:
                return False
        return os.getppid() == self._launcher


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block is done; then the handler from before the block gets it.

    Does nothing outside the main thread, because only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: delayed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if delayed:
            signal.raise_signal(signal.SIGINT)


def _print(text: str) -> None:
    """Prints a line on stderr in a single write, so that the lines of several ranks do not mix."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def profile_steps(
    batches: Iterator[StepBatch], steps: tuple[int, int] | None, folder: Path, rank: int
) -> Iterator[StepBatch]:
    """Yields `batches`, and profiles the steps in which some of them are trained on.

    Writes `trace-rank<r>.json` into `folder`/profile (for chrome://tracing, ui.perfetto.dev), and
    on CUDA `memory-rank<r>.json`: the allocator's segments and blocks, each with its stack.

    `steps`: the first and the last step to profile, 1-based; None profiles nothing.
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
    finally:  # a run that ends at `last` or earlier never asks for the batch after it
        if profiler is not None:
            _finish_profile(profiler, folder / "profile", rank)


def _start_profiler() -> torch.profiler.profile:
    """Starts the profiler and, on CUDA, the recording of allocations."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler


def _finish_profile(profiler: torch.profiler.profile, folder: Path, rank: int) -> None:
    """Stops the profiler and the recording of allocations, and writes both into `folder`."""
    profiler.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace-rank{rank}.json"))
    if torch.cuda.is_available():
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        (folder / f"memory-rank{rank}.json").write_text(json.dumps(snapshot, default=str))
