"""A rank that fails alone, while the others wait for it in a collective.

All of them learn of it from the store by which they have found each other, and end.
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

KEY = "finetune/service/failure"
POLL_SECONDS = 0.2
SECONDS_TO_READ = 2.0  # in which clients that wait fetch their answers from a server that ends


@contextmanager
def sharing_failure(world: World) -> Iterator[None]:
    """The block that all ranks do: an error of this one alone is shared with the others, after
    which it waits for `watch_for_failure` to end the process.

    An `AgreedError` is raised, and so is any error where one rank is all.
    """
    try:
        yield
    except AgreedError:
        raise
    except Exception as error:
        if world.size == 1:
            raise
        reason = on_one_line(error)
        if is_loss_of_peer(error):
            reason = "another rank ended, whose own error is the cause"
        elif not isinstance(error, UserError):
            traceback.print_exc()
        # it stays that of the first rank, whose end the others then meet
        _get_default_store().compare_set(KEY, "", f"rank {world.rank}: {reason}")
        while True:
            time.sleep(POLL_SECONDS)


def watch_for_failure(world: World, answer: Callable[[str], None]) -> None:
    """Starts a thread that ends this process once a rank has failed in `sharing_failure`.

    answer: Called with what happened; on rank 0 it answers the clients.
    """
    if world.size > 1:
        arguments = (world, answer)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="failure").start()


def _watch(world: World, answer: Callable[[str], None]) -> None:
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    while not store.check([KEY]):
        if world.left.wait(POLL_SECONDS):  # the server has stopped as it was asked
            return
    said = store.get(KEY).decode()
    sentence = f"{said}; the server has ended; start the same command again, which resumes"
    answer(sentence)
    print(sentence, file=sys.stderr, flush=True)
    time.sleep(SECONDS_TO_READ)  # the first rank that ends ends all, by the launcher
    end_process(EXIT_USER_ERROR)
