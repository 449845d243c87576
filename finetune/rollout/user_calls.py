"""Calls of a user's functions, each with a bound: on its time, and on what it says. No torch
here.
"""

import asyncio
import inspect
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from finetune.config.user_code import explained

SECONDS_TO_STOP = 5.0  # after the time limit, in which the process itself says where it was
SECONDS_TO_REPEAT = 0.5  # after which a function that has swallowed its time limit meets it again
MOST_CHARACTERS = 1_000_000  # of a tool's result; no completion has room for more


class Exceeded(BaseException):
    """A function took too long, or said too much.

    No `Exception`, so that a function that catches these does not catch it.
    """


class TimeLimit(Exceeded):
    """A function took too long."""


class SizeLimit(Exceeded):
    """A function said too much."""


def is_score(given: Any) -> bool:
    """Whether this is a finite number or None. A text is no number, whatever it says.

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
    """Describes a function's result that is no score, in a few words."""
    is_plain = isinstance(given, str | bytes | int | float)
    return repr(given)[:100] if is_plain else type(given).__name__


def limit_of_one(seconds: float, completions: int) -> float:
    """The seconds of one completion by itself, where all of a step's together have `seconds`."""
    return max(1.0, seconds / completions)


def call_tools(
    tools: Mapping[str, Callable[..., Any]],
    calls: Sequence[Mapping[str, Any]],
    seconds: float,
    *,
    counts: bool,
) -> list[tuple[str, bool]]:
    """Returns for each call (the text that the model reads, whether it failed): the error's text
    where it raised.

    Raises `UserError` if they take longer than `seconds` together, or one says too much. If that
    `counts` as failed, each may take `seconds`.
    """
    deadline = time.monotonic() + seconds
    results = []
    for each in calls:
        if counts:
            left = seconds
        else:
            left = max(1e-3, deadline - time.monotonic())
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
    """Raises `SizeLimit` for more than anybody reads."""
    if len(text) > MOST_CHARACTERS:
        raise SizeLimit(f"said {len(text):,} characters; {MOST_CHARACTERS:,} are read at most")


def settle(value: Any) -> Any:
    """A value, or what an awaitable comes to, in the one loop of this process.

    One loop, so that what an environment keeps open between its calls stays open.
    """
    if not inspect.isawaitable(value):
        return value
    loop = _open_loop()
    task = loop.create_task(_wait_for(value))
    try:
        return loop.run_until_complete(task)
    except BaseException:
        task.cancel()  # where the time limit has left it in the middle
        raise


@cache
def _open_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


os.register_at_fork(after_in_child=_open_loop.cache_clear)


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeLimit` in the block, where it is, after so many seconds; and again while it
    continues.

    A block that has swallowed it and ends later than that meets it at its end.
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
