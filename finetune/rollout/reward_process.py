"""The process that runs the users' reward functions, tools and environments. Imports no torch.

It reads questions and writes answers as JSON lines. The first question names the functions;
`Functions.answer` describes the others. Each question has a random word, which its answer repeats.

User code cannot answer by mistake: the pipe of the answers is not a standard stream, is closed in
child processes, and the run accepts only answers with the question's word. What user code prints
goes to stderr. The process leads a process group, which it kills when the run has ended.
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
# `_hide_descriptor` draws a number from the FILES numbers that begin with FIRST_FILE.
FIRST_FILE = 256
FILES = 512
# The arguments that a reward function may take, besides the data's columns:
ENVIRONMENTS = "environments"  # the environments of the completions
LISTS = ("prompts", "completions", "completion_ids")  # lists with an entry for each completion
CALLBACKS = ("log_extra", "log_metric")  # functions that TRL passes; here they do nothing
ARGUMENTS = (*LISTS, "trainer_state", *CALLBACKS)


class NoScores(UserError):
    """A function's result is not a list with one value for each completion."""


def score(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> list[Any]:
    """Calls a reward function; returns its value for each completion, which may be no score.

    Args:
        name: The function's name in metrics.
        function: The reward function.
        step: The completions and their columns, from `Rewards.score`.
        seconds: The time limit.

    Raises:
        NoScores: The function did not return one value for each completion.
        UserError: The function raised, or took longer than `seconds`.
    """
    count = len(step["completions"])
    arguments = _choose_arguments(function, step)
    with explained(f"{name}, a reward", function, is_isolated=True), time_limit(seconds):
        returned = settle(function(**arguments))
        is_list = hasattr(returned, "__iter__") and not isinstance(
            returned, str | bytes | Mapping | set | frozenset
        )
        scores = list(returned) if is_list else []  # within the block: a generator runs here
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
    """Chooses the arguments that the function takes among those of TRL and the data's columns.

    The function gets copies: what it changes is not changed for the next function. A required
    column that no row of these completions has is None for each, as where one of the rows has it.
    """
    arguments: dict[str, Any] = {
        name: [None] * len(step["completions"]) for name in _find_required(function)
    }
    arguments |= _copy({**step["columns"], **{name: step[name] for name in LISTS}})
    arguments["trainer_state"] = SimpleNamespace(**step["state"])
    arguments |= dict.fromkeys(CALLBACKS, lambda *_, **__: None)
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _copy(value: Any) -> Any:
    """Copies the lists and mappings of a JSON value; what else is in them is not copied."""
    if isinstance(value, list):
        return [_copy(each) for each in value]
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value


def _find_required(function: Callable[..., Any]) -> list[str]:
    """Lists the names of the arguments that the function cannot be called without."""
    optional_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in optional_kinds
    ]


def check_arguments(name: str, function: Callable[..., Any], columns: Sequence[str]) -> None:
    """Raises `UserError` for a required argument that is neither TRL's nor one of the `columns`."""
    missing = [each for each in _find_required(function) if each not in (*ARGUMENTS, *columns)]
    if missing:
        raise UserError(
            f"{place_of(function)}{name}: takes {', '.join(missing)}, and the data have no such "
            f"column (they have {', '.join(columns) or 'none'}); rename the argument, or give it a "
            "default: what completion_column names comes as `answer`"
        )


def read_scores(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], returned: list[Any]
) -> tuple[Scores, dict[int, str]]:
    """Converts the values that a function returned to scores, with 0 for those that are no score.

    Returns:
        (the scores, the place of each value that is no score -> what is wrong with it).
    """
    scores: Scores = []
    faults = {}
    for place, (value, completion) in enumerate(zip(returned, step["completions"], strict=True)):
        if is_score(value):
            scores.append(None if value is None else float(value))
            continue
        text = json.dumps(completion, ensure_ascii=False)
        # A judge returns the fault itself in place of a score.
        fault = value if isinstance(value, Fault) else f"returned {describe_score(value)}"
        faults[place] = f"{place_of(function)}{name}: {fault} for the completion {text[:200]}"
        scores.append(0.0)
    return scores, faults


def score_each(
    name: str, function: Callable[..., Any], step: Mapping[str, Any], seconds: float
) -> tuple[Scores, list[bool]]:
    """Scores completions where failures are counted: a completion that fails has score 0.

    If the function raises for all completions together, it is called for one after another. If it
    does not return a list with one value for each, all completions fail. Failures are printed; of
    values that are no score, the first.

    Returns:
        (the scores, whether each completion failed).
    """
    count = len(step["completions"])
    try:
        scores, faults = read_scores(name, function, step, score(name, function, step, seconds))
        for fault in list(faults.values())[:1]:
            print(fault, file=sys.stderr)
        return scores, [place in faults for place in range(count)]
    except UserError as error:
        if count == 1 or isinstance(error, NoScores):
            print(error, file=sys.stderr)
            return [0.0] * count, [True] * count
    scores = []
    failed: list[bool] = []
    for place in range(count):
        one_score, one_failed = score_each(
            name, function, take_one(step, place), limit_of_one(seconds, count)
        )
        scores += one_score
        failed += one_failed
    return scores, failed


def take_one(step: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Returns a step like `step` with only the completion at `place`."""
    columns = {name: [values[place]] for name, values in step["columns"].items()}
    lists = {name: [step[name][place]] for name in LISTS}
    return {**step, **lists, "columns": columns}


class Functions:
    """The functions, tools and environments of a run, and the step that is being scored."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Loads the functions that the first question names; `Rewards._start` sends it.

        Raises `UserError` if one cannot be loaded.
        """
        names: Sequence[str] = settings["names"]
        self._seconds: float = settings["seconds"]
        self._counts_failures: bool = settings["counts_failures"]
        self._names = [name_of_reward(name) for name in names]
        self._functions = [_load(name) for name in names]
        self._tools: dict[str, Callable[..., Any]] = {}
        for entry in settings["tools"]:  # FILE:FUNCTION
            _, _, function_name = entry.rpartition(":")
            self._tools[function_name] = load(entry)
        user_functions = [
            function
            for name, function in zip(names, self._functions, strict=True)
            if name not in FUNCTIONS and not is_judge(name)
        ]
        # Environments are copied at the end of an episode only if a function reads them.
        self._reads_states = any(map(_takes_environments, user_functions))
        self._processes = EnvironmentProcesses(
            settings["environments"],
            self._tools,
            settings["processes"],
            counts_failures=self._counts_failures,
        )
        self._step: dict[str, Any] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request. Its keys say what it asks for.

        Args:
            request: One of these, all JSON:
                `known`: the names of the data's columns, with which the functions' arguments are
                checked.
                `calls` and `seconds`: calls of tools, and their time limit.
                `do`, `items` and `seconds`: see `EnvironmentProcesses.ask`.
                `function`: the index of a function that scores all completions, or only the one at
                `place`. `step`: the completions, if they are others than in the last request.

        Raises:
            UserError: A function requires an argument that is neither TRL's nor a column; or a
                function, tool or environment fails, and failures are not counted.
        """
        if "known" in request:
            for name, function in zip(self._names, self._functions, strict=True):
                check_arguments(name, function, request["known"])
            return {}
        if "calls" in request:
            seconds = request["seconds"]
            results = call_tools(
                self._tools, request["calls"], seconds, counts_failures=self._counts_failures
            )
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
        if self._counts_failures:
            scores, failed = score_each(name, function, step, seconds)
            return {"scores": scores, "failed": failed}
        returned = score(name, function, step, seconds)
        scores, faults = read_scores(name, function, step, returned)
        for fault in faults.values():
            raise UserError(fault)
        return {"scores": scores}


def _takes_environments(function: Callable[..., Any]) -> bool:
    """Returns whether a function has an argument `environments`, or takes any argument."""
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == ENVIRONMENTS or each.kind is each.VAR_KEYWORD for each in parameters)


def _load(name: str) -> Callable[..., Any]:
    """Loads the function of an entry of `rewards`: a judge, a shipped one, or one in a file.

    Raises `UserError` if it cannot be loaded.
    """
    if is_judge(name):
        return JudgeReward(read_judge(name))
    if name in FUNCTIONS:
        return load_shipped(name)
    function: Callable[..., Any] = load(name)
    return function


def main(questions: int, answers: int) -> None:
    """Answers questions until the run has ended.

    Args:
        questions: The file descriptor from which questions are read.
        answers: The file descriptor to which answers are written.
    """
    answers = _hide_descriptor(answers)
    for descriptor in (questions, answers):
        os.register_at_fork(after_in_child=partial(os.close, descriptor))
    watcher = threading.Thread(target=_end_with_the_run, args=(questions,), daemon=True)
    watcher.start()
    functions: Functions | None = None
    with os.fdopen(questions, "rb", closefd=False) as lines:
        for line in lines:
            question = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                if functions is None:
                    with explained("rewards", is_isolated=True):
                        functions = Functions(question)
                else:
                    answer = functions.answer(question)
            except UserError as error:
                answer = {"error": str(error)}
            _write(answers, json.dumps({**answer, "word": question["word"]}).encode() + b"\n")
    watcher.join()  # the watcher ends this process


def _hide_descriptor(descriptor: int) -> int:
    """Moves an open file to a random descriptor, so that user code does not write there by mistake.

    Programs that are started from here do not inherit it. Returns the new descriptor.
    """
    lowest = FIRST_FILE + secrets.randbelow(FILES)
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(descriptor)
    return moved


def _write(descriptor: int, content: bytes) -> None:
    """Writes all of `content`; a single call of `os.write` may write only a part."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _end_with_the_run(questions: int) -> None:
    """Waits until the run has closed its end of the pipe, then kills this process and its group."""
    poll = select.poll()
    poll.register(questions, 0)  # an event mask of 0 still reports a closed pipe
    poll.poll()
    kill_all(list_children(os.getpid()))  # some may have left the process group
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions_descriptor, answers_descriptor = map(int, sys.argv[1:])
    for descriptor in (questions_descriptor, answers_descriptor):
        os.set_inheritable(descriptor, False)
    main(questions_descriptor, answers_descriptor)
