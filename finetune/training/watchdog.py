"""The watchdog: ends a run that hangs, and prints where every rank hung."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

from finetune.errors import SECONDS_FOR_CAUSE

EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h

Item = TypeVar("Item")


class Watchdog:
    """Ends this process where `beat` has not been called for `timeout_seconds`, after writing all its stacks to stderr.

    Every rank has one: in a hang all of them wait, and each prints its own stacks.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self._rank, self._timeout = rank, timeout_seconds
        self._doing, self._since = "starting", time.monotonic()
        self._ended, self._watching = threading.Event(), False

    def __enter__(self) -> "Watchdog":
        self._watching = True
        self.beat(self._doing)
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching = False
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, doing: str) -> None:
        """Reports progress: `doing` starts now. Of no effect outside the `with`."""
        self._doing, self._since = doing, time.monotonic()
        if self._watching:
            # In case the hang holds Python's lock, so that no thread of Python runs: a timer of the C runtime.
            faulthandler.dump_traceback_later(self._timeout + 5.0, exit=True)

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
            if self._ended.is_set() or self._since != since or time.monotonic() < since + self._timeout:
                continue
            sys.stderr.write(
                f"rank {self._rank}: no progress for {self._timeout:g} s (timeout_seconds) while {self._doing}; the run "
                "is ended. Where this rank was:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_HUNG)


def _waits_for_others() -> bool:
    """Whether the main thread is in a collective, or in a backward, which may be in one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if "torch/distributed/" in path or name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False
