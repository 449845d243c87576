"""Signals: a run that is told to stop saves first, on all ranks at the same step."""

import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch

from finetune.distributed.world import World

STOPPING = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 2.0  # Ctrl-C reaches a rank from the terminal and again from its launcher: that is one request


def agreed(world: World, *flags: bool) -> list[bool]:
    """Each flag, set where it is set on any rank. One small word over gloo; a GPU's queue is left alone."""
    return [bool(count) for count in world.sum(torch.tensor([int(flag) for flag in flags])).tolist()]


class Interruption:
    """What signals have asked of this rank; the loop looks once a step and agrees on it with the other ranks.

    SIGTERM and SIGINT ask to save and stop, SIGUSR1 to save and go on. A second request to stop ends the process at once.
    """

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        self._asked_at = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        # Python runs a handler only between two of its own instructions, and a rank that hangs in a collective comes to
        # none. The number of the signal is written to this pipe all the same, and a thread reads it.
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._write.close()  # ends the thread

    def _listen(self) -> None:
        while received := self._read.recv(1):
            self._on_signal(received[0])
        self._read.close()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif number in STOPPING and not self.stop:
            self.stop, self._asked_at = True, time.monotonic()
            _tell(f"{signal.Signals(number).name}: saving after this step, then stopping; once more to stop at once")
        elif number in STOPPING and time.monotonic() - self._asked_at > ECHO_SECONDS:
            _tell("stopped at once; what was not saved is lost")
            os._exit(128 + number)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
