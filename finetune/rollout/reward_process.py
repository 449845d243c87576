"""The process of rewards and tools: JSON lines in and out, functions of a user's files between. No torch here.

The first line says which functions; every other line is a step's completions, or calls of tools. What the functions
print goes to stderr. The process ends when its input does, so that it outlives no run.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from finetune.config.user_code import explained, load, place_of
from finetune.errors import UserError
from finetune.rollout.shipped_rewards import FUNCTIONS, load_shipped

Scores = list[float | None]


class TimeLimit(TimeoutError):
    """A function took too long."""


def score(name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float) -> Scores:
    """A function's score of each completion; None where it gives none. Raises `UserError` for what it does wrong."""
    count = len(step["completions"])
    arguments = step["columns"] | {key: step[key] for key in ("prompts", "completions", "completion_ids")}
    arguments |= {"trainer_state": SimpleNamespace(**step["state"])}
    arguments |= dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None)  # of TRL's trainer
    accepted = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        arguments = {key: value for key, value in arguments.items() if key in {each.name for each in accepted}}
    with explained(f"{name}, a reward", function), _time_limit(seconds):
        scores = function(**arguments)
        if inspect.isawaitable(scores):
            scores = asyncio.run(_wait_for(scores))
        scores = [None if each is None else float(each) for each in scores]
    if len(scores) != count:
        raise UserError(f"{place_of(function)}{name}: returned {len(scores)} rewards for {count} completions")
    if wrong := [i for i, each in enumerate(scores) if each is not None and not math.isfinite(each)]:
        text = json.dumps(step["completions"][wrong[0]], ensure_ascii=False)
        raise UserError(f"{place_of(function)}{name}: returned {scores[wrong[0]]} for the completion {text[:200]}")
    return scores


def score_each(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> tuple[Scores, list[bool]]:
    """(scores, which failed and got 0): as `score`, one completion after another where they fail together."""
    failed = [False] * len(step["completions"])
    try:
        return score(name, function, step, seconds), failed
    except UserError:
        scores: Scores = []
        for place, one in enumerate(_split(step)):
            try:
                scores += score(name, function, one, limit_of_one(seconds, len(step["completions"])))
            except UserError as error:
                print(error, file=sys.stderr)
                scores.append(0.0)
                failed[place] = True
        return scores, failed


def limit_of_one(seconds: float, completions: int) -> float:
    """The seconds of one completion by itself, where all of a step's together have `seconds`."""
    return max(1.0, seconds / completions)


def call_tools(
    tools: Mapping[str, Callable[..., Any]], calls: Sequence[Mapping[str, Any]], seconds: float, *, counts: bool
) -> list[tuple[str, bool]]:
    """(what the model reads of its result, whether it failed) of each call: of one that raises, what it has raised.

    Raises `UserError` where they take longer than `seconds` together; where that `counts` as failed, a call's share.
    """
    deadline, results = time.monotonic() + seconds, []
    for each in calls:
        left = limit_of_one(seconds, len(calls)) if counts else max(1e-3, deadline - time.monotonic())
        function = tools.get(each["name"])
        with explained(f"{each['name']}, a tool", function):
            try:
                if function is None:
                    raise ValueError(f"Tool {each['name']} not found.")
                with _time_limit(left):
                    result = function(**each["arguments"])
                    text, failed = str(asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result), False
            except (Exception, SystemExit) as error:
                if isinstance(error, TimeLimit) and not counts:
                    raise
                text, failed = str({"error": str(error)}), True  # as TRL
        results.append((text.encode(errors="replace").decode(), failed))
    return results


def _split(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    lists = ("prompts", "completions", "completion_ids")
    for i in range(len(step["completions"])):
        columns = {name: [values[i]] for name, values in step["columns"].items()}
        yield {**step, **{name: [step[name][i]] for name in lists}, "columns": columns}


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeLimit` in the block, where it is, after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeLimit(f"took more than reward_timeout_seconds: {seconds:g}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Answers each line of stdin on what was stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    names: Sequence[str] | None = None
    functions: list[Callable[..., Any]] = []
    tools: dict[str, Callable[..., Any]] = {}
    seconds, counts = 0.0, False
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if names is None:
                names, seconds, counts = asked["names"], asked["seconds"], asked["counts_failures"]
                functions = [load_shipped(name) if name in FUNCTIONS else load(name) for name in names]
                tools = {name.rpartition(":")[2]: load(name) for name in asked["tools"]}
                answer: dict[str, Any] = {}
            elif "calls" in asked:
                answer = {"results": call_tools(tools, asked["calls"], seconds, counts=counts)}
            else:
                pairs = zip((name.rpartition(":")[2] for name in names), functions, strict=True)
                scorer = score_each if counts else lambda *given: (score(*given), [])
                each = [scorer(*pair, asked, seconds) for pair in pairs]
                failed = map(any, zip(*(failed for _, failed in each), strict=True))
                answer = {"scores": [scores for scores, _ in each], "failures": sum(failed)}
        except UserError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, whose end is this process's
    main()
