"""The environments of completions, shared out to processes.

The process of the rewards forks these processes, which therefore do not load the recipe's files
again. A process answers one question after another, each within a time limit. If it does not
answer, it is killed and its environments are lost. No torch here.
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

MOST_BYTES = 1 << 26  # an answer with more ends its process
STATE_BYTES = 1 << 20  # an attribute of an environment with more is not sent to reward functions

Item = Mapping[str, Any]  # what is asked about one completion: its `place`, and arguments
Answer = dict[str, Any]
"""The answer to an `Item`: what `EnvironmentHost` returns, or under `problem` a sentence that says
what the environment did wrong.
"""


@dataclass(slots=True)
class Living:
    """The environment of one completion, with a random state of its own."""

    name: str
    environment: Any
    random_state: Any
    numpy_state: Any = None  # where numpy is loaded

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """Restores the environment's random state for the block, and keeps it afterwards."""
        random.setstate(self.random_state)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy_state is None:
            numpy.random.seed(random.Random(str(self.random_state[1][:4])).getrandbits(32))
        elif numpy is not None:
            numpy.random.set_state(self.numpy_state)
        try:
            yield
        finally:
            self.random_state = random.getstate()
            if numpy is not None:
                self.numpy_state = numpy.random.get_state()


class EnvironmentHost:
    """The environments in one process, where `serve` answers the questions about them.

    `reset`, `call` and `finish` are what a question may ask for; `_reset`, `_call` and `_finish`
    answer one item of it.
    """

    def __init__(
        self, factories: Mapping[str, Callable[[], Any]], tools: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._factories = factories
        self._tools = tools
        # environments without a completion, first the one that has been free for longest
        self._free: dict[str, deque[Any]] = {name: deque() for name in factories}
        self._living: dict[int, Living] = {}  # by the place of the completion

    def serve(self, pipe: Connection) -> None:
        """Answers each item as soon as it is done. Raises `EOFError` when the pipe is closed."""
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
        """Resets a free environment, or a new one; `said`: what the model reads first, or None."""
        name = item["environment"]
        factory = self._factories[name]
        free = self._free[name]
        with explained(f"{name}, an environment", factory, is_isolated=True), time_limit(seconds):
            if not free:
                free.append(factory())
            living = Living(name, free[0], random.Random(item["seed"]).getstate())
            with living.own_random_state():
                said = settle(living.environment.reset(**item["row"]))
            if said is not None and not isinstance(said, str):
                raise TypeError(f"reset returned {type(said).__name__}; text or None is expected")
            check_size(said or "")
        free.popleft()
        self._living[item["place"]] = living
        return {"said": said}

    def _call(self, item: Item, seconds: float) -> Answer:
        """Calls a tool; `said`: what the model reads, `failed`: whether that is an error."""
        living = self._find(item)
        tools = {**self._tools, **list_tools(living.environment)}
        with living.own_random_state():
            [(said, failed)] = call_tools(tools, [item], seconds, counts=False)
        return {"said": said, "failed": failed}

    def _finish(self, item: Item, seconds: float) -> Answer:
        """Ends an episode; `reward`: the environment's own, `state`: as `freeze`, if asked for."""
        living = self._find(item)
        environment = living.environment
        del self._living[item["place"]]
        self._free[living.name].append(environment)
        reward = None
        if hasattr(type(environment), "get_reward"):
            what = f"{living.name}, an environment: get_reward"
            with explained(what, type(environment), is_isolated=True), time_limit(seconds):
                with living.own_random_state():
                    reward = settle(environment.get_reward())
                if not is_score(reward):
                    raise TypeError(f"returned {describe_score(reward)}")
        return {
            "reward": None if reward is None else float(reward),
            "state": freeze(environment) if item["keeps_state"] else None,
        }

    def _find(self, item: Item) -> Living:
        living = self._living.get(item["place"])
        if living is None:
            raise UserError("environment: it was lost by a failure that was reported before")
        return living


def freeze(environment: Any) -> str:
    """Returns an object as text for `thaw`: its class, and the attributes that can be copied."""
    kept = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        with suppress(Exception):  # an attribute may raise anything where it cannot be copied
            pickled = pickle.dumps(value)  # dill would open files again, and make new locks
            if len(pickled) <= STATE_BYTES:
                kept[name] = pickled
    return b64encode(dill.dumps((type(environment), kept))).decode()


def thaw(state: str | None) -> Any:
    """Makes the object that `freeze` described, with the attributes that could be copied.

    Returns None for None.
    """
    if state is None:
        return None
    kind, kept = dill.loads(b64decode(state))  # noqa: S301 - `freeze` wrote it in our process
    environment = object.__new__(kind)
    for name, pickled in kept.items():
        with suppress(Exception):  # an attribute may raise anything where it cannot be made again
            object.__setattr__(environment, name, pickle.loads(pickled))  # noqa: S301
    return environment


@dataclass(slots=True)
class Process:
    """A process of environments, and the items that it has not answered yet."""

    pid: int
    pipe: Connection
    asked: list[int] = field(default_factory=list)  # the items' numbers in the question, in order
    seconds_each: float = 0.0  # for one item
    deadline: float = 0.0  # of the first of the items

    def set_deadline(self) -> None:
        """Gives the process its seconds for the next item, from now on."""
        self.deadline = time.monotonic() + self.seconds_each + SECONDS_TO_STOP

    def end(self) -> int:
        """Kills the process and its children; returns its exit code."""
        kill_all(list_children(self.pid))
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class EnvironmentProcesses:
    """The processes of environments, each of which starts at the first reset of one of its own.

    The completion at `place` has its environment in process `place` modulo the number of
    processes.

    Args:
        names: The environments, as recipes name them.
        tools: The recipe's tools by name.
        most: The number of processes.
        counts: Whether an environment's failure is counted; else it is raised.
    """

    def __init__(
        self,
        names: Sequence[str],
        tools: Mapping[str, Callable[..., Any]],
        most: int,
        *,
        counts: bool,
    ) -> None:
        factories = {name: load_environment(name) for name in names}
        self._host = EnvironmentHost(factories, tools)
        self._most = most
        self._counts = counts
        self._processes: dict[int, Process] = {}

    def ask(self, do: str, items: Sequence[Item], seconds: float) -> list[Answer]:
        """Asks about all items, and waits for the answer to each.

        Args:
            do: reset, call or finish.
            items: One for each completion.
            seconds: The time for all items together. A process divides it by its number of items.

        Raises:
            UserError: The first problem, unless failures are counted. All processes are ended.
        """
        answers: list[Answer] = [{} for _ in items]
        asked: list[Process] = []
        for number, item in enumerate(items):
            process = self._find(item["place"], starts=do == "reset")
            if process is None:
                answers[number] = {"problem": "environment: its process has ended"}
                continue
            if not process.asked:
                asked.append(process)
            process.asked.append(number)
        for process in asked:
            process.seconds_each = limit_of_one(seconds, len(process.asked))
            process.set_deadline()
            own = [items[number] for number in process.asked]
            question = {"do": do, "items": own, "seconds": process.seconds_each}
            with suppress(OSError):  # the process has ended, as reading will show
                process.pipe.send_bytes(json.dumps(question).encode())
        self._wait_for_answers(asked, answers, items)
        self._report(answers)
        return answers

    def end(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _find(self, place: int, *, starts: bool) -> Process | None:
        """Returns the process of a completion, which `starts` if missing; None: it has ended."""
        number = place % self._most
        if number not in self._processes and starts:
            self._processes[number] = self._fork()
        return self._processes.get(number)

    def _fork(self) -> Process:
        """Starts a process that serves until this one closes its end of the pipe."""
        ours, its_own = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's about threads and forks
            pid = os.fork()
        if pid == 0:
            try:
                for other in self._processes.values():
                    other.pipe.close()
                ours.close()
                self._host.serve(its_own)
            except EOFError:
                pass
            finally:
                os._exit(0)
        its_own.close()
        return Process(pid, ours)

    def _wait_for_answers(
        self, processes: Sequence[Process], answers: list[Answer], items: Sequence[Item]
    ) -> None:
        """Puts the answer to each item into `answers`, a problem where its process is lost."""
        waiting = {process.pipe: process for process in processes}
        while waiting:
            left = min(each.deadline for each in waiting.values()) - time.monotonic()
            ready = wait(list(waiting), max(0.0, left))
            for pipe, process in waiting.items():
                if pipe in ready:
                    self._read(process, answers, items)
                if process.asked and process.deadline < time.monotonic():
                    self._lose(process, answers, items, is_late=True)
            waiting = {pipe: each for pipe, each in waiting.items() if each.asked}

    def _read(self, process: Process, answers: list[Answer], items: Sequence[Item]) -> None:
        """Reads the answer to the next item of a process, or finds that it has ended."""
        try:
            answer = json.loads(process.pipe.recv_bytes(MOST_BYTES))
        except (EOFError, OSError, ValueError):
            self._lose(process, answers, items)
            return
        answers[process.asked.pop(0)] = answer
        process.set_deadline()

    def _lose(
        self,
        process: Process,
        answers: list[Answer],
        items: Sequence[Item],
        *,
        is_late: bool = False,
    ) -> None:
        """Ends a process, and answers its items with a problem: the first of them caused it."""
        self._processes = {
            number: each for number, each in self._processes.items() if each is not process
        }
        if not is_late:  # the pipe was closed, and the process is about to end with its own code
            patience = time.monotonic() + 1.0
            while not has_ended(process.pid) and time.monotonic() < patience:
                time.sleep(0.01)
        code = process.end()
        first, *others = process.asked
        process.asked.clear()
        what = items[first].get("name") or "an environment"
        if is_late:
            why = "no answer in its time, in code that Python cannot interrupt"
        else:
            why = f"its process ended with {code}"
        answers[first] = {"problem": f"environment: {what}: {why}"}
        for number in others:
            answers[number] = {"problem": "environment: its process has ended"}

    def _report(self, answers: Sequence[Answer]) -> None:
        """Prints the problems, or raises the first unless failures are counted."""
        problems = [each["problem"] for each in answers if "problem" in each]
        if problems and not self._counts:
            self.end()
            raise UserError(problems[0])
        for problem in dict.fromkeys(problems):
            print(problem, file=sys.stderr)
