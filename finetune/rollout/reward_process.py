"""The process that runs the users' reward functions, tools and environments. No torch here.

It reads questions and writes answers as JSON lines. The first question names the functions.
`Functions.answer` describes the others. Each question has a random word, which its answer repeats.

User code cannot answer by mistake: the pipe of the answers is no standard stream, is closed in
child processes, and takes only answers with the question's word. What user code prints goes to
stderr. The process leads a process group, which it kills when the run has ended.
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
from functools import partial
from types import SimpleNamespace
from typing import Any

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
    kill_all,
    limit_of_one,
    list_children,
    settle,
    time_limit,
)

Scores = list[float | None]
FIRST_FILE = 256  # the lowest number of a file that `_hide` draws
FILES = 512  # how many numbers it draws from
ENVIRONMENTS = "environments"  # the argument with the completions' environments
LISTS = ("prompts", "completions", "completion_ids")  # the arguments with an entry a completion
CALLBACKS = ("log_extra", "log_metric")  # arguments that TRL gives; here they do nothing
ARGUMENTS = (*LISTS, "trainer_state", *CALLBACKS)


class NoScores(UserError):
    """A function's result is not a score for each completion."""


def score(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> list[Any]:
    """Calls a reward function; returns a value for each completion, which may be no score.

    Raises:
        NoScores: It did not return one value for each completion.
        UserError: It raised, or took longer than `seconds`.
    """
    count = len(step["completions"])
    arguments = _choose_arguments(function, step)
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


def _choose_arguments(function: Callable[..., Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the function takes: TRL's, and the data's columns."""
    arguments = {**step["columns"], **{name: step[name] for name in LISTS}}
    arguments["trainer_state"] = SimpleNamespace(**step["state"])
    arguments |= dict.fromkeys(CALLBACKS, lambda *_, **__: None)
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def check_arguments(name: str, function: Callable[..., Any], columns: Sequence[str]) -> None:
    """Raises `UserError` for a required argument that is neither TRL's nor one of the `columns`."""
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
    """Returns a function's result as scores. Raises `UserError` for the first that is none."""
    for value, completion in zip(returned, step["completions"], strict=True):
        if not is_score(value):
            text = json.dumps(completion, ensure_ascii=False)
            fault = value if isinstance(value, Fault) else f"returned {describe_score(value)}"
            raise UserError(f"{place_of(function)}{name}: {fault} for the completion {text[:200]}")
    return [None if value is None else float(value) for value in returned]


def score_each(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> tuple[Scores, list[bool]]:
    """Scores completions, with 0 for those where the function fails.

    Where it raises for all together, it scores one after another. Where it returns anything but a
    list of one value for each, all fail.

    Returns:
        (the scores, whether each failed).
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
    """Returns (the scores, with 0 for values that are none; whether each value is none)."""
    failed = [not is_score(value) for value in returned]
    if any(failed):
        try:
            check_scores(name, function, step, returned)
        except UserError as error:
            print(error, file=sys.stderr)
    values = [0.0 if is_bad else value for value, is_bad in zip(returned, failed, strict=True)]
    return [None if value is None else float(value) for value in values], failed


def take_one(step: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Returns the step with only the completion at `place`."""
    columns = {name: [values[place]] for name, values in step["columns"].items()}
    return {**step, **{name: [step[name][place]] for name in LISTS}, "columns": columns}


class Functions:
    """The functions, tools and environments of a run, and the step that is scored."""

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
            settings["environments"],
            self._tools,
            settings["processes"],
            counts_failures=self._counts,
        )
        self._step: dict[str, Any] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request. Its keys say what it asks for.

        Args:
            request: One of these, all JSON:
                `known`: the names of the data's columns; checks the functions' arguments.
                `calls` and `seconds`: calls of tools, and their time limit.
                `do`, `items` and `seconds`: see `EnvironmentProcesses.ask`.
                `function`: the index of a function; scores the last `step`, or only its completion
                at `place`. The request may bring the `step`.

        Raises:
            UserError: A function fails, unless failures are counted.
        """
        if "known" in request:
            for name, function in zip(self._names, self._functions, strict=True):
                check_arguments(name, function, request["known"])
            return {}
        if "calls" in request:
            seconds = request["seconds"]
            results = call_tools(self._tools, request["calls"], seconds, counts=self._counts)
            return {"results": results}
        if "do" in request:
            items = [item | {"keeps_state": self._reads_states} for item in request["items"]]
            return {"answers": self._processes.ask(request["do"], items, request["seconds"])}
        if "step" in request:
            self._step = request["step"]
            columns = self._step["columns"]
            if ENVIRONMENTS in columns:
                columns[ENVIRONMENTS] = list(map(thaw, columns[ENVIRONMENTS]))
        return self._score(request)

    def _score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Scores the step, or its completion at the request's `place`, with one function."""
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
    """Loads the function of an entry of `rewards`. Raises `UserError` where that is impossible."""
    if is_judge(name):
        return JudgeReward(read_judge(name), seconds)
    if name in FUNCTIONS:
        return load_shipped(name)
    function: Callable[..., Any] = load(name)
    return function


def main(questions: int, answers: int) -> None:
    """Reads questions from one file and writes the answers to another, given by their numbers."""
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
    watcher.join()  # the watcher ends this process


def _hide(file: int) -> int:
    """Gives the open file a random number, and has programs that are started from here not get it.

    Returns the number.
    """
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_FILE + secrets.randbelow(FILES))
    os.close(file)
    return moved


def _write(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _end_with_the_run(questions: int) -> None:
    """Waits until the run has closed its end of the pipe, then kills this process's group."""
    poll = select.poll()
    poll.register(questions, 0)  # no event but a closed pipe
    poll.poll()
    kill_all(list_children(os.getpid()))  # some may have left the process group
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for file in map(int, sys.argv[1:]):
        os.set_inheritable(file, False)
    main(*map(int, sys.argv[1:]))
