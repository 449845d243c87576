"""The process of rewards and tools: JSON lines in and out, functions of a user's files between.

No torch here.

The first line says which functions; every other line is a step's completions, one function's turn,
calls of tools, or what environments are asked. Each line has a word that its answer repeats. What
the functions print goes to stderr.

Answers go through a pipe that user code is not given: no standard stream, closed in its children,
and whoever finds it does not know the word. The process leads a group, and ends it with itself once
the run is gone.
"""

import fcntl
import inspect
import json
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil

from finetune.config.judge import is_judge, read_judge
from finetune.config.reward_names import name_of_reward
from finetune.config.user_code import explained, load, place_of
from finetune.errors import UserError
from finetune.rollout.environment_processes import EnvironmentProcesses, thaw
from finetune.rollout.judge_reward import Fault, JudgeReward
from finetune.rollout.shipped_rewards import FUNCTIONS, load_shipped
from finetune.rollout.user_calls import (
    call_tools,
    describe_score,
    is_score,
    limit_of_one,
    settle,
    time_limit,
)

Scores = list[float | None]
FIRST_FILE = 256  # the lowest number that the pipe gets
FILES = 512  # it is one of so many


class NoScores(UserError):
    """A function's result is not a score for each completion."""


def score(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> list[Any]:
    """Calls a function; returns its result, whatever it is.

    Raises:
        NoScores: It did not return one value for each completion.
        UserError: It raised, or took longer than `seconds`.
    """
    count = len(step["completions"])
    arguments = step["columns"] | {
        key: step[key] for key in ("prompts", "completions", "completion_ids")
    }
    arguments |= {"trainer_state": SimpleNamespace(**step["state"])}
    # of TRL's trainer
    arguments |= dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None)
    accepted = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        arguments = {
            key: value
            for key, value in arguments.items()
            if key in {each.name for each in accepted}
        }
    with explained(f"{name}, a reward", function, is_isolated=True), time_limit(seconds):
        returned = settle(function(**arguments))
        is_list = hasattr(returned, "__iter__") and not isinstance(
            returned, str | bytes | Mapping | set | frozenset
        )
        scores = list(returned) if is_list else []
    if not is_list:
        raise NoScores(
            f"{place_of(function)}{name}: returned {type(returned).__name__}; a list is expected, "
            "with a number or None for each completion"
        )
    if len(scores) != count:
        raise NoScores(
            f"{place_of(function)}{name}: returned {len(scores)} rewards for {count} completions"
        )
    return scores


ENVIRONMENTS = "environments"  # the argument with them, beside the columns
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def check_arguments(name: str, function: Callable[..., Any], columns: Sequence[str]) -> None:
    """Raises `UserError` where a function needs an argument that is neither TRL's nor one of the
    data's `columns`.
    """
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in kinds
    ]
    missing = [each for each in needed if each not in (*ARGUMENTS, *columns)]
    if missing:
        raise UserError(
            f"{place_of(function)}{name}: takes {', '.join(missing)}, and the data have no such "
            f"column (they have {', '.join(columns) or 'none'}); rename the argument, or give it a "
            "default: what completion_column names comes as `answer`"
        )


def check_scores(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], returned: list[Any]
) -> Scores:
    """Returns a function's result as scores. Raises `UserError` for the first that is no number."""
    for value, completion in zip(returned, step["completions"], strict=True):
        if not is_score(value):
            text = json.dumps(completion, ensure_ascii=False)
            fault = value if isinstance(value, Fault) else f"returned {describe_score(value)}"
            raise UserError(f"{place_of(function)}{name}: {fault} for the completion {text[:200]}")
    return [None if value is None else float(value) for value in returned]


def score_each(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> tuple[Scores, list[bool]]:
    """Returns (scores, which failed and got 0): one completion after another where the function
    raises over all of them.

    What is no list of a score for each completion says nothing about any: all of them fail.
    """
    count = len(step["completions"])
    try:
        return _with_zeros(name, function, step, score(name, function, step, seconds))
    except NoScores as error:
        print(error, file=sys.stderr)
        return [0.0] * count, [True] * count
    except UserError as error:
        if count == 1:
            print(error, file=sys.stderr)
            return [0.0], [True]
    scores: Scores = []
    failed: list[bool] = []
    for place in range(count):
        one, is_bad = score_each(
            name, function, take_one(step, place), limit_of_one(seconds, count)
        )
        scores += one
        failed += is_bad
    return scores, failed


def _with_zeros(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], returned: list[Any]
) -> tuple[Scores, list[bool]]:
    """Returns (scores, with 0 for each that is no number; whether each is one of these)."""
    failed = [not is_score(value) for value in returned]
    if any(failed):
        try:
            check_scores(name, function, step, returned)
        except UserError as error:
            print(error, file=sys.stderr)
    values = [0.0 if is_bad else value for value, is_bad in zip(returned, failed, strict=True)]
    return [None if value is None else float(value) for value in values], failed


def take_one(step: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A step with the completion at `place` alone."""
    lists = ("prompts", "completions", "completion_ids")
    columns = {name: [values[place]] for name, values in step["columns"].items()}
    return {**step, **{name: [step[name][place]] for name in lists}, "columns": columns}


class Functions:
    """The functions and tools that the first line has named, and the step whose completions they
    score.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        names: Sequence[str] = settings["names"]
        self._seconds: float = settings["seconds"]
        self._counts: bool = settings["counts_failures"]
        self._names = [name_of_reward(name) for name in names]
        self._functions = [_load(name, self._seconds) for name in names]
        self._tools = {name.rpartition(":")[2]: load(name) for name in settings["tools"]}
        user_functions = [
            function
            for name, function in zip(names, self._functions, strict=True)
            if name not in FUNCTIONS and not is_judge(name)
        ]
        self._reads_states = any(map(_takes_environments, user_functions))
        self._processes = EnvironmentProcesses(
            settings["environments"], self._tools, settings["processes"], counts=self._counts
        )
        self._step: dict[str, Any] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request, whose keys say what it asks for.

        Args:
            request: One of these, all JSON:
                `known`: column names; checks that the functions take them. Comes first.
                `calls` and `seconds`: calls of tools, and the longest that one may take.
                `do`, `items` and `seconds`: an action of environments, and an item for each.
                `function`: the index of a function; scores the last `step`, which may come with
                the request, or the completion at one `place` of it.

        Raises:
            UserError: A function fails, unless failures are counted.
        """
        if "known" in request:
            for name, function in zip(self._names, self._functions, strict=True):
                check_arguments(name, function, request["known"])
            return {}
        if "calls" in request:
            return {
                "results": call_tools(
                    self._tools, request["calls"], request["seconds"], counts=self._counts
                )
            }
        if "do" in request:
            items = [item | {"keeps_state": self._reads_states} for item in request["items"]]
            return {"answers": self._processes.ask(request["do"], items, request["seconds"])}
        if "step" in request:
            self._step = request["step"]
            columns = self._step["columns"]
            if ENVIRONMENTS in columns:
                columns[ENVIRONMENTS] = list(map(thaw, columns[ENVIRONMENTS]))
        step = self._step
        seconds = self._seconds
        if "place" in request:
            seconds = limit_of_one(seconds, len(step["completions"]))
            step = take_one(step, request["place"])
        name = self._names[request["function"]]
        function = self._functions[request["function"]]
        if self._counts:
            scores, failed = score_each(name, function, step, seconds)
            return {"scores": scores, "failed": failed}
        return {"scores": check_scores(name, function, step, score(name, function, step, seconds))}


def _takes_environments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == ENVIRONMENTS or each.kind is each.VAR_KEYWORD for each in parameters)


def _load(name: str, seconds: float) -> Callable[..., Any]:
    """The function of an entry of `rewards`. Raises `UserError` where it cannot be loaded."""
    if is_judge(name):
        return JudgeReward(read_judge(name), seconds)
    return load_shipped(name) if name in FUNCTIONS else load(name)


def main(questions: int, answers: int) -> None:
    """Answers each line of the file `questions` in the file `answers`."""
    answers = _hide(answers)
    for descriptor in (questions, answers):
        os.register_at_fork(after_in_child=partial(os.close, descriptor))
    watcher = threading.Thread(target=_end_with_the_run, args=(questions,), daemon=True)
    watcher.start()
    functions: Functions | None = None
    with os.fdopen(questions, "rb", closefd=False) as lines:
        for line in lines:
            asked = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                if functions is None:
                    with explained("rewards", is_isolated=True):
                        functions = Functions(asked)
                else:
                    answer = functions.answer(asked)
            except UserError as error:
                answer = {"error": str(error)}
            _write(answers, json.dumps({**answer, "word": asked["word"]}).encode() + b"\n")
    watcher.join()  # which ends this process


def _hide(file: int) -> int:
    """The same file under a number that is drawn, closed in whatever is started from here."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_FILE + secrets.randbelow(FILES))
    os.close(file)
    return moved


def _write(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _end_with_the_run(questions: int) -> None:
    """Waits until nobody can ask any more, then ends this process and what its functions have
    started.
    """
    poll = select.poll()
    poll.register(questions, 0)  # only that the other end is closed
    poll.poll()
    # those too that lead a group of their own
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for file in map(int, sys.argv[1:]):
        os.set_inheritable(file, False)
    main(*map(int, sys.argv[1:]))
