"""The environments of completions, in processes of their own, each with a share of them.

The process of the rewards forks them, so that the files of a recipe are loaded once. A process
answers one question after another, each with a time limit; one that does not answer is killed, and
its environments are lost. No torch here.
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
import psutil

from finetune.config.user_code import explained
from finetune.data.environments import list_tools, load_environment
from finetune.errors import UserError
from finetune.rollout.user_calls import (
    SECONDS_TO_STOP,
    call_tools,
    check_size,
    describe_score,
    is_score,
    limit_of_one,
    settle,
    time_limit,
)

MOST_BYTES = 1 << 26  # of an answer; a longer one is none
STATE_BYTES = 1 << 20  # of an attribute that reward functions may read

Item = Mapping[str, Any]  # of a question: the `place` of a completion, and what is asked of it
Answer = dict[str, Any]
"""`problem`: a sentence, where the environment did something wrong; else what an
`EnvironmentHost` answers.
"""


@dataclass(slots=True)
class Living:
    """An environment of a completion, with the random numbers that are its own."""

    name: str
    environment: Any
    numbers: Any = None
    arrays: Any = None  # of numpy, where the environment uses it

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """The block draws the environment's own numbers, whatever others draw between."""
        random.setstate(self.numbers)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.arrays is None:
            numpy.random.seed(random.Random(str(self.numbers[1][:4])).getrandbits(32))
        elif numpy is not None:
            numpy.random.set_state(self.arrays)
        try:
            yield
        finally:
            self.numbers = random.getstate()
            if numpy is not None:
                self.arrays = numpy.random.get_state()


class EnvironmentHost:
    """The environments of one process, which answers what the others' process asks."""

    def __init__(
        self, factories: Mapping[str, Callable[[], Any]], tools: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._factories = factories
        self._tools = tools
        # those that no completion has, in the order in which they become free
        self._free: dict[str, deque[Any]] = {name: deque() for name in factories}
        self._living: dict[int, Living] = {}

    def serve(self, pipe: Connection) -> None:
        """Answers each item of each question as soon as it is done, until nobody asks."""
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
        """`said`: what the model reads of the environment first, or None."""
        name = item["environment"]
        factory = self._factories[name]
        free = self._free[name]
        with explained(f"{name}, an environment", factory, is_isolated=True), time_limit(seconds):
            if not free:
                free.append(factory())
            living = Living(name, free[0], random.Random(item["seed"]).getstate())
            with living.own_numbers():
                said = settle(living.environment.reset(**item["row"]))
            if said is not None and not isinstance(said, str):
                raise TypeError(f"reset returned {type(said).__name__}; text or None is expected")
            check_size(said or "")
        free.popleft()
        self._living[item["place"]] = living
        return {"said": said}

    def _call(self, item: Item, seconds: float) -> Answer:
        """`said`: what the model reads of the tool's result; `failed`: whether it is an error."""
        living = self._find(item)
        tools = {**self._tools, **list_tools(living.environment)}
        with living.own_numbers():
            [(said, failed)] = call_tools(tools, [item], seconds, counts=False)
        return {"said": said, "failed": failed}

    def _finish(self, item: Item, seconds: float) -> Answer:
        """`reward`: what the environment says that the completion is worth; `state`: its
        attributes, where they are asked for.
        """
        living = self._find(item)
        environment = living.environment
        del self._living[item["place"]]
        self._free[living.name].append(environment)
        reward = None
        if hasattr(type(environment), "get_reward"):
            what = f"{living.name}, an environment: get_reward"
            with explained(what, type(environment), is_isolated=True), time_limit(seconds):
                with living.own_numbers():
                    reward = settle(environment.get_reward())
                if not is_score(reward):
                    raise TypeError(f"returned {describe_score(reward)}")
        state = freeze(environment) if item["keeps_state"] else None
        return {"reward": None if reward is None else float(reward), "state": state}

    def _find(self, item: Item) -> Living:
        living = self._living.get(item["place"])
        if living is None:
            raise UserError("environment: it was lost by a failure that was reported before")
        return living


def freeze(environment: Any) -> str:
    """The class of an object and those of its attributes that can be copied to another process, as
    `thaw` reads them.
    """
    kept = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        with suppress(Exception):  # of whatever says that it cannot be copied
            pickled = pickle.dumps(value)  # dill would open files again, and make new locks
            if len(pickled) <= STATE_BYTES:
                kept[name] = pickled
    return b64encode(dill.dumps((type(environment), kept))).decode()


def thaw(state: str | None) -> Any:
    """The object of `freeze`, without what it could not copy; None of None."""
    if state is None:
        return None
    kind, kept = dill.loads(b64decode(state))  # noqa: S301 - of `freeze`, in a process beside
    environment = object.__new__(kind)
    for name, pickled in kept.items():
        with suppress(Exception):  # of what cannot be made again
            object.__setattr__(environment, name, pickle.loads(pickled))  # noqa: S301
    return environment


@dataclass(slots=True)
class Process:
    """A process of environments, and the items that it is still to answer, by number."""

    pid: int
    pipe: Connection
    asked: list[int] = field(default_factory=list)
    deadline: float = 0.0

    def end(self) -> int:
        """Kills it and what it has started; returns its exit code, which may be its own."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def has_ended(self) -> bool:
        """Whether it has ended by itself; its exit code is kept."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class EnvironmentProcesses:
    """The processes, which start at the first reset; completion `place` is in one of them."""

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
        """The answer to each item.

        Args:
            do: reset, call or finish.
            items: Of completions.
            seconds: Of all items together; those of a process have a share each.

        Raises:
            UserError: For the first that does something wrong, unless that is counted. Then all
                processes have ended.
        """
        answers: list[Answer] = [{} for _ in items]
        waiting: dict[Connection, Process] = {}
        for number, item in enumerate(items):
            process = self._find(item["place"], starts=do == "reset")
            if process is None:
                answers[number] = {"problem": "environment: its process has ended"}
            else:
                process.asked.append(number)
                waiting[process.pipe] = process
        limits = {pipe: limit_of_one(seconds, len(each.asked)) for pipe, each in waiting.items()}
        for pipe, process in waiting.items():
            process.deadline = time.monotonic() + limits[pipe] + SECONDS_TO_STOP
            own = [items[number] for number in process.asked]
            with suppress(OSError):  # it has ended, as reading will show
                pipe.send_bytes(
                    json.dumps({"do": do, "items": own, "seconds": limits[pipe]}).encode()
                )
        while waiting:
            left = min(each.deadline for each in waiting.values()) - time.monotonic()
            ready = [each for each in wait(list(waiting), max(0.0, left)) if each in waiting]
            for pipe in ready:
                self._read(waiting[pipe], answers, limits[pipe], items)
            for process in list(waiting.values()):
                if process.asked and process.deadline < time.monotonic():
                    self._lose(process, answers, items, is_late=True)
            waiting = {pipe: each for pipe, each in waiting.items() if each.asked}
        self._report(answers)
        return answers

    def end(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _find(self, place: int, *, starts: bool) -> Process | None:
        number = place % self._most
        if number not in self._processes and starts:
            self._processes[number] = self._fork()
        return self._processes.get(number)

    def _fork(self) -> Process:
        ours, its_own = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside a thread
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

    def _read(
        self, process: Process, answers: list[Answer], seconds: float, items: Sequence[Item]
    ) -> None:
        try:
            answer = json.loads(process.pipe.recv_bytes(MOST_BYTES))
        except (EOFError, OSError, ValueError):
            self._lose(process, answers, items)
            return
        answers[process.asked.pop(0)] = answer
        process.deadline = time.monotonic() + seconds + SECONDS_TO_STOP

    def _lose(
        self,
        process: Process,
        answers: list[Answer],
        items: Sequence[Item],
        *,
        is_late: bool = False,
    ) -> None:
        """Ends a process; the first item that it has not answered is why."""
        self._processes = {
            number: each for number, each in self._processes.items() if each is not process
        }
        patience = time.monotonic() + (0.0 if is_late else 1.0)
        while not process.has_ended() and time.monotonic() < patience:
            time.sleep(0.01)  # its pipe is closed before it has ended, with a code of its own
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
        problems = [each["problem"] for each in answers if "problem" in each]
        if problems and not self._counts:
            self.end()
            raise UserError(problems[0])
        for problem in dict.fromkeys(problems):
            print(problem, file=sys.stderr)
