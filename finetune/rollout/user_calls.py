"""Calls of a user's functions within limits of time and size, and the processes that they start. No
torch here.
"""

import asyncio
import inspect
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import psutil

from finetune.config.user_code import explained

SECONDS_TO_STOP = 5.0  # that a process has after a time limit to report where its function was
SECONDS_TO_REPEAT = 0.5  # a function that catches `TimeLimit` gets it again after this time
MOST_CHARACTERS = 1_000_000  # of a tool's result; no completion has room for more


def has_ended(pid: int) -> bool:
    """Returns whether a child process has ended. Its exit code can still be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def list_children(pid: int) -> list[psutil.Process]:
    """Lists the processes that a process and its children have started; empty if it has ended."""
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
    return children


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kills processes, which may have ended."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


class Exceeded(BaseException):
    """A function took too long, or returned too much text.

    It is no `Exception`: a function that catches those does not catch it.
    """


class TimeLimit(Exceeded):
    """A function took too long."""


class SizeLimit(Exceeded):
    """A function returned too much text."""


def is_score(given: Any) -> bool:
    """Returns whether a reward function's value is a finite number or None. No text is a number.

    >>> (
    ...     is_score(True),
    ...     is_score(None),
    ...     is_score("1"),
    ...     is_score(float("nan")),
    ...     is_score({"score": 1}),
    ... )
    (True, True, False, False, False)
    """
    if given is None:
        return True
    if not hasattr(given, "__float__") and not hasattr(given, "__index__"):
        return False
    try:
        return math.isfinite(float(given))
    except Exception:  # an array of several numbers, or a number that is too large
        return False


def describe_score(given: Any) -> str:
    """Describes a value that is no score, in a few words."""
    is_plain = isinstance(given, str | bytes | int | float)
    return repr(given)[:100] if is_plain else type(given).__name__


def limit_of_one(seconds: float, completions: int) -> float:
    """Returns the seconds for one completion, where all of a step together have `seconds`."""
    return max(1.0, seconds / completions)


def call_tools(
    tools: Mapping[str, Callable[..., Any]],
    calls: Sequence[Mapping[str, Any]],
    seconds: float,
    *,
    counts: bool,
) -> list[tuple[str, bool]]:
    """Calls tools one after another.

    Args:
        tools: By name.
        calls: The `name` and the `arguments` of each.
        seconds: For all calls together, or for each where failures are counted.
        counts: Whether a call over its time or size is a failed call; else it is raised.

    Returns:
        (the text that the model reads, whether the call failed), for each call.

    Raises:
        UserError: The calls took too long, or one returned too much text.
    """
    deadline = time.monotonic() + seconds
    results = []
    for each in calls:
        left = seconds if counts else max(1e-3, deadline - time.monotonic())
        function = tools.get(each["name"])
        with explained(f"{each['name']}, a tool", function, is_isolated=True):
            try:
                if function is None:
                    raise ValueError(f"Tool {each['name']} not found.")
                with time_limit(left):
                    text = str(settle(function(**each["arguments"])))
                check_size(text)
                failed = False
            except BaseException as error:
                if isinstance(error, Exceeded) and not counts:
                    raise
                text = str({"error": str(error)[:MOST_CHARACTERS]})
                failed = True  # as TRL
        results.append((text.encode(errors="replace").decode(), failed))
    return results


def check_size(text: str) -> None:
    """Raises `SizeLimit` for a text of more than MOST_CHARACTERS."""
    if len(text) > MOST_CHARACTERS:
        raise SizeLimit(f"said {len(text):,} characters; {MOST_CHARACTERS:,} are read at most")


def settle(value: Any) -> Any:
    """Returns `value`, or the result of an awaitable, which runs in the process's only event loop.

    A connection that an environment keeps open between its calls stays open with its loop.
    """
    if not inspect.isawaitable(value):
        return value
    loop = _open_loop()
    task = loop.create_task(_wait_for(value))
    try:
        return loop.run_until_complete(task)
    except BaseException:
        task.cancel()  # the time limit may have interrupted the loop, not the task
        raise


@cache
def _open_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


os.register_at_fork(after_in_child=_open_loop.cache_clear)


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeLimit` within the block after `seconds`, and repeatedly while the block runs.

    A block that catches it nevertheless ends with a `TimeLimit`.
    """
    deadline = time.monotonic() + seconds
    said = f"took more than reward_timeout_seconds allows: {seconds:g} s"

    def stop(*_: Any) -> None:
        raise TimeLimit(said)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, SECONDS_TO_REPEAT)
    try:
        yield
        if time.monotonic() > deadline:
            raise TimeLimit(said)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
