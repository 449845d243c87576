"""Ends all ranks after one rank alone has failed, for which the others wait in a collective.

The failed rank leaves its error in the process group's store. A thread of every rank watches it.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import _get_default_store

from finetune.distributed.world import World
from finetune.errors import (
    EXIT_USER_ERROR,
    AgreedError,
    UserError,
    end_process,
    is_loss_of_peer,
    on_one_line,
)

KEY = "finetune/service/failure"  # of the error in the store
POLL_SECONDS = 0.2
SECONDS_TO_READ = 2.0  # waiting clients fetch their answers in this time, before rank 0 ends


@contextmanager
def sharing_failure(world: World) -> Iterator[None]:
    """Shares an error of the block with all ranks, then waits for `watch_for_failure` to end this
    process.

    Raises only an `AgreedError`, or any error if there is one rank.
    """
    try:
        yield
    except AgreedError:  # every rank has it, so none waits for another
        raise
    except Exception as error:
        if world.size == 1:
            raise
        reason = on_one_line(error)
        if is_loss_of_peer(error):
            reason = "another rank ended, whose own error is the cause"
        elif not isinstance(error, UserError):
            traceback.print_exc()
        # The first error stays: later ones may be consequences.
        _get_default_store().compare_set(KEY, "", f"rank {world.rank}: {reason}")
        while True:  # until the watching thread ends this process
            time.sleep(POLL_SECONDS)


def watch_for_failure(world: World, answer: Callable[[str], None]) -> None:
    """Starts a thread that ends this process once any rank has failed in `sharing_failure`.

    Does nothing if there is one rank.

    answer: Called with the error before the end; on rank 0 it answers the clients.
    """
    if world.size > 1:
        arguments = (world, answer)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="failure").start()


def _watch(world: World, answer: Callable[[str], None]) -> None:
    """Waits for a rank's error, passes it to `answer`, and ends this process."""
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    while not store.check([KEY]):
        if world.left.wait(POLL_SECONDS):  # the server was asked to stop
            return
    error = store.get(KEY).decode()
    sentence = f"{error}; the server has ended; start the same command again, which resumes"
    answer(sentence)
    print(sentence, file=sys.stderr, flush=True)
    time.sleep(SECONDS_TO_READ)  # the launcher kills all ranks once one has ended
    end_process(EXIT_USER_ERROR)
