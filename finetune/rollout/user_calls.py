"""Calls users' functions within limits of time and size, and ends the processes that they start.

Imports no torch.
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

# After a time limit, a process has this long to report where its function was, before it is ended.
SECONDS_TO_STOP = 5.0
SECONDS_TO_REPEAT = 0.5  # a function that catches `TimeLimit` gets it again after this time
MOST_CHARACTERS = 1_000_000  # of a tool's or a reset's text; no completion has room for more


def has_ended(pid: int) -> bool:
    """Returns whether a child process has ended. Its exit code can still be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def list_children(pid: int) -> list[psutil.Process]:
    """Lists all descendants of a process that still run; [] if the process has ended."""
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
    return children


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kills processes; those that have ended are skipped."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


class Exceeded(BaseException):
    """A function took too long, or returned too much text.

    It is not an `Exception`, so that a user's `except Exception` does not catch it.
    """


class TimeLimit(Exceeded):
    """A function took too long."""


class SizeLimit(Exceeded):
    """A function returned too much text."""


# Scores are summed, squared and averaged, and losses are in fp32: no square of one may overflow it.
LARGEST_SCORE = 1e18


def is_score(value: Any) -> bool:
    """Returns whether a reward function's value is None or a number of at most LARGEST_SCORE.

    A text is neither.

    >>> (
    ...     is_score(True),
    ...     is_score(None),
    ...     is_score("1"),
    ...     is_score(float("nan")),
    ...     is_score({"score": 1}),
    ...     is_score(-1e39),
    ... )
    (True, True, False, False, False, False)
    """
    if value is None:
        return True
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        return False
    try:
        return abs(float(value)) <= LARGEST_SCORE
    except Exception:  # an array of several numbers, or a number that is too large
        return False


def describe_score(value: Any) -> str:
    """Describes a value that is no score: the beginning of its repr, or only its type; of a number
    that is too large also the limit.
    """
    is_plain = isinstance(value, str | bytes | int | float)
    text = repr(value)[:100] if is_plain else type(value).__name__
    if isinstance(value, int | float) and LARGEST_SCORE < abs(value) < math.inf:
        return f"{text} (beyond {LARGEST_SCORE:g})"
    return text


def limit_of_one(seconds: float, completions: int) -> float:
    """Returns the time limit of one of `completions` that have `seconds` together.

    It is at least a second.
    """
    return max(1.0, seconds / completions)


def call_tools(
    tools: Mapping[str, Callable[..., Any]],
    calls: Sequence[Mapping[str, Any]],
    seconds: float,
    *,
    counts_failures: bool,
) -> list[tuple[str, bool]]:
    """Calls tools one after another. A call that raises has failed; its text is then the error.

    Args:
        tools: Name -> function.
        calls: The `name` and the `arguments` of each call.
        seconds: The time for each call if `counts_failures`, else for all together.
        counts_failures: Whether a call over its time or size has failed, too; else it is raised.

    Returns:
        (the text that the model reads, whether the call failed), for each call.

    Raises:
        UserError: A call exceeds its time or size, unless `counts_failures`.
    """
    deadline = time.monotonic() + seconds
    results = []
    for call in calls:
        if counts_failures:
            seconds_left = seconds
        else:
            # At least a millisecond, because a timer of 0 s is off.
            seconds_left = max(1e-3, deadline - time.monotonic())
        function = tools.get(call["name"])
        with explained(f"{call['name']}, a tool", function, is_isolated=True):
            try:
                if function is None:
                    raise ValueError(f"Tool {call['name']} not found.")
                with time_limit(seconds_left):
                    text = str(settle(function(**call["arguments"])))
                check_size(text)
                failed = False
            except BaseException as error:
                if isinstance(error, Exceeded) and not counts_failures:
                    raise
                text = str({"error": str(error)[:MOST_CHARACTERS]})  # as in TRL
                failed = True
        text = text.encode(errors="replace").decode()  # without lone surrogates
        results.append((text, failed))
    return results


def check_size(text: str) -> None:
    """Raises `SizeLimit` if a text has more than MOST_CHARACTERS."""
    if len(text) > MOST_CHARACTERS:
        raise SizeLimit(f"said {len(text):,} characters; {MOST_CHARACTERS:,} are read at most")


def settle(value: Any) -> Any:
    """Returns `value`, or its result if it is awaitable.

    The process has a single event loop, so that an environment can keep a connection open between
    its calls.
    """
    if not inspect.isawaitable(value):
        return value
    loop = _open_loop()
    task = asyncio.ensure_future(value, loop=loop)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        # The time limit may have interrupted the loop rather than the task, which would then
        # continue at the next call.
        task.cancel()
        raise


@cache
def _open_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process, which is made at the first call."""
    return asyncio.new_event_loop()


# A forked process makes its own loop.
os.register_at_fork(after_in_child=_open_loop.cache_clear)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeLimit` within the block after `seconds`, and repeatedly while the block runs.

    A block that catches it and ends late raises `TimeLimit` at its end.
    """
    deadline = time.monotonic() + seconds
    message = f"took more than reward_timeout_seconds allows: {seconds:g} s"

    def stop(*_: Any) -> None:
        raise TimeLimit(message)

    old_handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, SECONDS_TO_REPEAT)
    try:
        yield
        if time.monotonic() > deadline:
            raise TimeLimit(message)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
