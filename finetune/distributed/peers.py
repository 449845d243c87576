"""Ends this process when another rank of its node has died: without a launcher nobody else would.

Collectives fail at once when a peer's connection closes, but a rank that waits for a file of a dead peer, or that works on
its own for long, would continue. Torch-free.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Mapping, Sequence

import psutil

from finetune.errors import EXIT_FAULT

POLL_SECONDS = 0.5

Process = tuple[str, int, float]
"""Host name, process id and creation time (seconds since the epoch)."""


def this_process() -> Process:
    """This process, as other ranks find it."""
    return os.uname().nodename, os.getpid(), psutil.Process().create_time()


def watch_peers(rank: int, processes: Sequence[Process], timeout_seconds: float) -> threading.Event:
    """Starts a thread that ends this process `timeout_seconds` after another rank of this node has died.

    `processes`: every rank's `this_process()`. A rank that this process cannot see (another host, another container) is
    not watched. The thread ends when the returned event is set.
    """
    host = os.uname().nodename
    peers = {
        peer: (process, created)
        for peer, (of, process, created) in enumerate(processes)
        if peer != rank and of == host and is_alive(process, created)
    }
    left = threading.Event()
    if peers:
        arguments = (rank, peers, timeout_seconds, left)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="watch_peers").start()
    return left


def is_alive(process: int, created: float) -> bool:
    """Whether the process runs; one that has ended and waits for its parent (a zombie) does not."""
    try:
        found = psutil.Process(process)
        return bool(found.create_time() == created and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _watch(rank: int, peers: Mapping[int, tuple[int, float]], timeout_seconds: float, left: threading.Event) -> None:
    while not left.wait(POLL_SECONDS):
        dead = [peer for peer, process in peers.items() if not is_alive(*process)]
        if dead and not left.wait(timeout_seconds):
            sys.stderr.write(
                f"rank {rank}: rank {dead[0]} ended {timeout_seconds:g} s ago (timeout_seconds), and the run cannot continue "
                "without it; that rank's own error is the cause. Where this one was:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_FAULT)
