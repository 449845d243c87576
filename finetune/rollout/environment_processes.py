"""Processes in which the environments of completions live.

The reward process forks these processes, so that they need not load the recipe's files again. A
process answers one question after another, each item within a time limit. If it does not answer, it
is killed, and its environments are lost. Imports no torch.
"""

import json
import os
import pickle
import random
import signal
import sys
import time
import warnings
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import dill

from finetune.config.user_code import explained
from finetune.data.environments import list_tools, load_environment
from finetune.errors import UserError
from finetune.rollout.user_calls import (
    SECONDS_TO_STOP,
    call_tools,
    check_size,
    describe_score,
    has_ended,
    is_score,
    kill_all,
    limit_of_one,
    list_children,
    settle,
    time_limit,
)

MOST_BYTES = 1 << 26  # of an answer; a process that sends more is ended
STATE_BYTES = 1 << 20  # of a pickled attribute of an environment; larger ones are not copied

Item = Mapping[str, Any]
"""What a question asks about one completion: its `place`, and arguments."""
Answer = dict[str, Any]
"""The answer to an `Item`: what `EnvironmentHost` returns, or {"problem": what went wrong}."""


@dataclass(slots=True)
class Living:
    """The environment of one completion, with its own random state."""

    name: str  # as recipes name the environment
    environment: Any
    random_state: Any  # of the module `random`
    numpy_state: Any = None  # of `numpy.random`; None until a block with numpy loaded has ended

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """Sets the environment's random state for the block, and saves its state at the end."""
        random.setstate(self.random_state)
        numpy = sys.modules.get("numpy")  # user code may have loaded it meanwhile
        if numpy is not None and self.numpy_state is None:
            _, internal_state, _ = self.random_state
            numpy.random.seed(random.Random(str(internal_state[:4])).getrandbits(32))
        elif numpy is not None:
            numpy.random.set_state(self.numpy_state)
        try:
            yield
        finally:
            self.random_state = random.getstate()
            if numpy is not None:
                self.numpy_state = numpy.random.get_state()


class EnvironmentHost:
    """The environments of one process. `serve` answers questions about them.

    A question asks for `reset`, `call` or `finish`. The methods `_reset`, `_call` and `_finish`
    answer one item of it.
    """

    def __init__(
        self, factories: Mapping[str, Callable[[], Any]], tools: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._factories = factories
        self._tools = tools
        # By name: environments whose episode has ended, the earliest first, for the next resets.
        self._free: dict[str, deque[Any]] = {name: deque() for name in factories}
        self._living: dict[int, Living] = {}  # by the completion's place

    def serve(self, pipe: Connection) -> None:
        """Answers questions, with one message for each item. Raises `EOFError` once the pipe is
        closed.
        """
        while True:
            question = json.loads(pipe.recv_bytes())
            for item in question["items"]:
                answer: Answer
                try:
                    answer = getattr(self, f"_{question['do']}")(item, question["seconds"])
                except UserError as error:
                    answer = {"problem": str(error)}
                pipe.send_bytes(json.dumps(answer).encode())

    def _reset(self, item: Item, seconds: float) -> Answer:
        """Resets a free environment, or a new one.

        Returns `said`: the text that the environment appends to the prompt, or None.
        """
        name = item["environment"]
        factory = self._factories[name]
        free = self._free[name]
        with explained(f"{name}, an environment", factory, is_isolated=True), time_limit(seconds):
            if not free:
                free.append(factory())
            living = Living(name, free[0], random.Random(item["seed"]).getstate())
            with living.own_random_state():
                text = settle(living.environment.reset(**item["row"]))
            if text is not None and not isinstance(text, str):
                raise TypeError(f"reset returned {type(text).__name__}; text or None is expected")
            check_size(text or "")
        free.popleft()  # only now: an environment whose reset fails stays free
        self._living[item["place"]] = living
        return {"said": text}

    def _call(self, item: Item, seconds: float) -> Answer:
        """Calls a tool of the environment or of the recipe.

        Returns `said`: the text that the model reads; `failed`: whether it is an error.
        """
        living = self._find(item)
        tools = {**self._tools, **list_tools(living.environment)}
        with living.own_random_state():
            [(text, failed)] = call_tools(tools, [item], seconds, counts_failures=False)
        return {"said": text, "failed": failed}

    def _finish(self, item: Item, seconds: float) -> Answer:
        """Ends an episode. The environment is free afterwards.

        Returns `reward`: the environment's own, or None; `state`: what `freeze` returns, if the
        item asks for it, else None.
        """
        living = self._find(item)
        environment = living.environment
        del self._living[item["place"]]
        self._free[living.name].append(environment)
        reward = None
        if hasattr(type(environment), "get_reward"):
            title = f"{living.name}, an environment: get_reward"
            with explained(title, type(environment), is_isolated=True), time_limit(seconds):
                with living.own_random_state():
                    reward = settle(environment.get_reward())
                if not is_score(reward):
                    raise TypeError(f"returned {describe_score(reward)}")
        return {
            "reward": None if reward is None else float(reward),
            "state": freeze(environment) if item["keeps_state"] else None,
        }

    def _find(self, item: Item) -> Living:
        """Finds the environment of the item's completion.

        Raises `UserError` if it was lost, for instance because its reset failed.
        """
        living = self._living.get(item["place"])
        if living is None:
            raise UserError("environment: it was lost by a failure that was reported before")
        return living


def freeze(environment: Any) -> str:
    """Copies an environment as text for `thaw`: its class, and the attributes that can be pickled.

    An attribute of more than STATE_BYTES is left out.
    """
    attributes = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        with suppress(Exception):  # pickling an attribute may raise anything
            pickled = pickle.dumps(value)  # dill would copy open files and locks too
            if len(pickled) <= STATE_BYTES:
                attributes[name] = pickled
    # dill copies a class of the recipe's file by value; pickle would only name it
    return b64encode(dill.dumps((type(environment), attributes))).decode()


def thaw(state: str | None) -> Any:
    """Makes the object that `freeze` copied, with the attributes that could be pickled.

    It does not call the class's `__init__`. Returns None for None.
    """
    if state is None:
        return None
    class_, attributes = dill.loads(b64decode(state))  # noqa: S301 - `freeze` wrote it
    environment = object.__new__(class_)
    for name, pickled in attributes.items():
        with suppress(Exception):  # unpickling an attribute may raise anything
            object.__setattr__(environment, name, pickle.loads(pickled))  # noqa: S301
    return environment


@dataclass(slots=True)
class Process:
    """A process of environments, and the items that it has not answered yet."""

    pid: int
    pipe: Connection
    # The indexes of these items among those that `EnvironmentProcesses.ask` asks about, in the
    # order in which the process answers.
    unanswered: list[int] = field(default_factory=list)
    seconds_each: float = 0.0  # the time limit of one item
    deadline: float = 0.0  # of the first unanswered item

    def set_deadline(self) -> None:
        """Gives the process the time of one item, counted from now."""
        self.deadline = time.monotonic() + self.seconds_each + SECONDS_TO_STOP

    def end(self) -> int:
        """Kills the process and its children; returns its exit code."""
        kill_all(list_children(self.pid))
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class EnvironmentProcesses:
    """The processes of environments. Each starts at the first reset of one of its environments.

    The environment of the completion at `place` lives in process number `place` modulo `count`.

    Args:
        names: The environments, as recipes name them.
        tools: The recipe's tools by name.
        count: The number of processes.
        counts_failures: Whether a failure of an environment is only counted; else it is raised.
    """

    def __init__(
        self,
        names: Sequence[str],
        tools: Mapping[str, Callable[..., Any]],
        count: int,
        *,
        counts_failures: bool,
    ) -> None:
        factories = {name: load_environment(name) for name in names}
        self._host = EnvironmentHost(factories, tools)  # every process is forked with a copy
        self._count = count
        self._counts_failures = counts_failures
        self._processes: dict[int, Process] = {}  # the running ones, by number

    def ask(self, do: str, items: Sequence[Item], seconds: float) -> list[Answer]:
        """Asks the processes about all items, and waits for the answer to each, in order.

        Args:
            do: reset, call or finish.
            items: What is asked about each completion. Calls may ask about one several times.
            seconds: The time for all items together. Each process shares it out evenly to its
                items.

        Raises:
            UserError: There is a problem, and failures are not counted. All processes have then
                been ended.
        """
        answers: list[Answer] = [{} for _ in items]
        processes: list[Process] = []
        for index, item in enumerate(items):
            process = self._find(item["place"], starts=do == "reset")
            if process is None:
                answers[index] = {"problem": "environment: its process has ended"}
                continue
            if not process.unanswered:
                processes.append(process)
            process.unanswered.append(index)
        for process in processes:
            process.seconds_each = limit_of_one(seconds, len(process.unanswered))
            process.set_deadline()
            process_items = [items[index] for index in process.unanswered]
            question = {"do": do, "items": process_items, "seconds": process.seconds_each}
            with suppress(OSError):  # the process has ended, which reading its answer will notice
                process.pipe.send_bytes(json.dumps(question).encode())
        self._wait_for_answers(processes, answers, items)
        self._report(answers)
        return answers

    def end(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _find(self, place: int, *, starts: bool) -> Process | None:
        """Returns the process with the environment of a completion; None: it has ended.

        starts: Whether the process is started if it does not run.
        """
        number = place % self._count
        if number not in self._processes and starts:
            self._processes[number] = self._fork()
        return self._processes.get(number)

    def _fork(self) -> Process:
        """Starts a process that serves until this one closes its end of the pipe."""
        parent_end, child_end = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's about threads and forks
            pid = os.fork()
        if pid == 0:  # in the child
            try:
                # Ends that the child kept open would keep the other processes' pipes open.
                for other in self._processes.values():
                    other.pipe.close()
                parent_end.close()
                self._host.serve(child_end)
            except EOFError:
                pass
            finally:
                os._exit(0)
        child_end.close()
        return Process(pid, parent_end)

    def _wait_for_answers(
        self, processes: Sequence[Process], answers: list[Answer], items: Sequence[Item]
    ) -> None:
        """Puts the answer to each item into `answers`; a problem if its process ends or is late."""
        waiting = {process.pipe: process for process in processes}
        while waiting:
            first_deadline = min(process.deadline for process in waiting.values())
            ready = wait(list(waiting), max(0.0, first_deadline - time.monotonic()))
            for pipe, process in waiting.items():
                if pipe in ready:
                    self._read(process, answers, items)
                if process.unanswered and process.deadline < time.monotonic():
                    self._end_failed(process, answers, items, is_late=True)
            waiting = {pipe: process for pipe, process in waiting.items() if process.unanswered}

    def _read(self, process: Process, answers: list[Answer], items: Sequence[Item]) -> None:
        """Reads the answer to a process's first unanswered item, or finds that it has ended."""
        try:
            answer = json.loads(process.pipe.recv_bytes(MOST_BYTES))
        except (EOFError, OSError, ValueError):
            self._end_failed(process, answers, items)
            return
        index = process.unanswered.pop(0)
        answers[index] = answer
        process.set_deadline()

    def _end_failed(
        self,
        process: Process,
        answers: list[Answer],
        items: Sequence[Item],
        *,
        is_late: bool = False,
    ) -> None:
        """Ends a process, and answers its items with problems. The first unanswered item caused it.

        is_late: Whether an item took too long; else the pipe was closed, or the answer is faulty.
        """
        self._processes = {
            number: other for number, other in self._processes.items() if other is not process
        }
        if not is_late:  # wait up to a second, so that the process ends with its own exit code
            deadline = time.monotonic() + 1.0
            while not has_ended(process.pid) and time.monotonic() < deadline:
                time.sleep(0.01)
        code = process.end()
        first, *others = process.unanswered
        process.unanswered.clear()
        title = items[first].get("name") or "an environment"  # a call has the tool's name
        if is_late:
            reason = "no answer in its time, in code that Python cannot interrupt"
        else:
            reason = f"its process ended with {code}"
        answers[first] = {"problem": f"environment: {title}: {reason}"}
        for index in others:
            answers[index] = {"problem": "environment: its process has ended"}

    def _report(self, answers: Sequence[Answer]) -> None:
        """Prints each distinct problem; or ends all processes and raises the first problem, if
        failures are not counted.
        """
        problems = [answer["problem"] for answer in answers if "problem" in answer]
        if problems and not self._counts_failures:
            self.end()
            raise UserError(problems[0])
        for problem in dict.fromkeys(problems):
            print(problem, file=sys.stderr)
