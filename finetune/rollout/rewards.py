"""Rewards and tools: the functions of a recipe, asked in a process of their own with a time
limit.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import psutil

from finetune.config.methods import RolloutKeys
from finetune.config.reward_names import name_of_reward
from finetune.config.user_code import file_of
from finetune.errors import UserError
from finetune.rollout.user_calls import SECONDS_TO_STOP, limit_of_one

SECONDS_TO_START = 60.0
STDERR = 2


@dataclass(frozen=True, slots=True)
class Scores:
    """The results of the reward functions."""

    # [functions][completions]; None: the function gave no score
    by_function: list[list[float | None]]
    failures: int  # completions that got a 0 because a function failed


class ProcessLost(UserError):
    """The process ended, did not answer in time, or another wrote in its place.

    The next question starts a new one.
    """


@dataclass(frozen=True, slots=True)
class RewardProcess:
    """The process, and this side of its two pipes: where nobody holds them any more, it ends."""

    handle: subprocess.Popen[bytes]
    questions: FileIO
    answers: FileIO

    @classmethod
    def start(cls) -> "RewardProcess":
        """A new process, which leads a group of its own: Ctrl-C is for the run."""
        root = Path(__file__).resolve().parents[2]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path[1:]])}
        its_questions, questions = os.pipe()
        answers, its_answers = os.pipe()
        try:
            handle = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "finetune.rollout.reward_process",
                    str(its_questions),
                    str(its_answers),
                ],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # what functions print is not a rank's output
                pass_fds=(its_questions, its_answers),
                start_new_session=True,
                env=environment,
            )
        except BaseException:
            os.close(questions)
            os.close(answers)
            raise
        finally:
            os.close(its_questions)
            os.close(its_answers)
        return cls(handle, FileIO(questions, "w"), FileIO(answers))

    def has_ended(self) -> bool:
        """Whether it has ended; its exit code is kept."""
        return (
            os.waitid(os.P_PID, self.handle.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def end(self) -> int:
        """Kills it and what its functions have started; returns its exit code."""
        started: list[psutil.Process] = []
        with suppress(psutil.Error):  # what has left its group is still its child
            started = psutil.Process(self.handle.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)
        for each in started:
            with suppress(psutil.Error):
                each.kill()
        self.questions.close()
        self.answers.close()
        return self.handle.wait()


class Rewards:
    """The reward functions and tools of a recipe.

    The process starts at the first call, and ends with this one.
    """

    def __init__(self, keys: RolloutKeys) -> None:
        self.names = [name_of_reward(name) for name in keys.reward_functions]
        self._keys = keys
        self._counts = keys.on_bad_reward == "zero"
        self._process: RewardProcess | None = None
        self._step: dict[str, Any] = {}  # whose completions are scored
        self._knows_step = False  # whether the process has it
        self._places = 0  # of completions with environments, given out so far
        # Completions that are sampled ahead ask, too; the process answers one after another.
        self._asking = threading.RLock()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        state: dict[str, Any],
        lost: Sequence[bool] = (),
    ) -> Scores:
        """Scores completions, in one call of each function.

        Args:
            prompts, completions: As TRL gives them: text, or lists of messages.
            completion_ids: The tokens of each.
            columns: Of the rows, by name, a value for each completion.
            state: Attributes of the functions' `trainer_state`.
            lost: Of each completion, whether its environment has failed, which counts too.

        Raises:
            UserError: A function raised, took too long or returned what is no reward, and
                `on_bad_reward` is error.
        """
        self._step = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        self._step |= {"columns": columns, "state": state}
        self._knows_step = False
        by_function: list[list[float | None]] = []
        failed = list(lost) or [False] * len(completions)
        for number in range(len(self.names)):
            answer = self._score_by(number)
            by_function.append(answer["scores"])
            failed = [
                one or other
                for one, other in zip(failed, answer.get("failed", failed), strict=True)
            ]
        return Scores(by_function, sum(failed))

    def reserve_places(self, completions: int) -> int:
        """Returns the first of so many places, by which the environments of completions are
        known.
        """
        first = self._places
        self._places += completions
        return first

    def check_arguments(self, columns: Sequence[str]) -> None:
        """Raises `UserError` where a function or a tool is not there, or takes what no column of
        the data is.
        """
        self._start()
        self._exchange({"known": columns}, SECONDS_TO_START)

    def call_tools(self, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """Returns for each call, a name with arguments and the completion's place, (the text that
        the model reads, whether it failed).

        Raises `UserError` where they take too long together, or end their process, and
        `on_bad_reward` is error.
        """
        if self._keys.environment:
            answers = self.ask_environments("call", calls)
            return [_read_result(each) for each in answers]
        if not self._counts:
            return self._call(calls, self._keys.reward_timeout_seconds)
        results: list[tuple[str, bool]] = []
        limit = limit_of_one(self._keys.reward_timeout_seconds, max(1, len(calls)))
        for each in calls:  # one that ends the process takes no other with it
            try:
                results += self._call([each], limit)
            except ProcessLost as error:
                print(error, file=sys.stderr)
                results.append((str({"error": f"{each['name']} did not end as it should"}), True))
        return results

    def ask_environments(self, do: str, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the answers of completions' environments, as `EnvironmentProcesses.ask` does.

        Raises `UserError` for the first that does something wrong, and `on_bad_reward` is error.
        """
        seconds = self._keys.reward_timeout_seconds
        count = max(1, len(items))
        most = count * (limit_of_one(seconds, count) + SECONDS_TO_STOP)  # if one process has all
        question = {"do": do, "items": items, "seconds": seconds}
        try:
            with self._asking:
                self._start()
                answered = self._exchange(question, most + SECONDS_TO_STOP)
        except ProcessLost as error:
            if not self._counts:
                raise
            print(error, file=sys.stderr)
            return [{"problem": str(error)} for _ in items]
        answers: list[dict[str, Any]] = answered["answers"]
        return answers

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        self._process = None
        if process is not None:
            process.end()

    def _score_by(self, number: int) -> dict[str, Any]:
        """The answer of one function over all completions; where it loses the process and that
        counts, over each.
        """
        limit = self._keys.reward_timeout_seconds
        count = len(self._step["completions"])
        of_one = limit_of_one(limit, max(1, count))
        if not self._counts:
            return self._ask_score({"function": number}, limit)
        try:
            # all at once, and then each
            return self._ask_score({"function": number}, limit + count * of_one)
        except ProcessLost as error:
            print(error, file=sys.stderr)
        scores: list[float | None] = []
        failed: list[bool] = []
        for place in range(count):
            try:
                answer = self._ask_score({"function": number, "place": place}, of_one)
            except ProcessLost as error:
                print(error, file=sys.stderr)
                answer = {"scores": [0.0], "failed": [True]}
            scores += answer["scores"]
            failed += answer["failed"]
        return {"scores": scores, "failed": failed}

    def _ask_score(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        with self._asking:
            self._start()
            if not self._knows_step:
                question |= {"step": self._step}
            answer = self._exchange(question, seconds + SECONDS_TO_STOP)
            self._knows_step = True
        return answer

    def _call(self, calls: Sequence[Mapping[str, Any]], seconds: float) -> list[tuple[str, bool]]:
        question = {"calls": calls, "seconds": seconds}
        with self._asking:
            self._start()
            answer = self._exchange(question, seconds + SECONDS_TO_STOP)
        return [tuple(each) for each in answer["results"]]

    def _start(self) -> None:
        """Starts the process, unless it runs. Raises `UserError` where a file cannot be loaded."""
        if self._process is not None and not self._process.has_ended():
            return
        self.close()
        self._process = RewardProcess.start()
        self._knows_step = False
        named = {
            "names": self._keys.reward_functions,
            "tools": self._keys.tools,
            "environments": list(dict.fromkeys(self._keys.environments.values())),
            "processes": self._keys.environment_processes,
            "counts_failures": self._counts,
        }
        try:
            self._exchange(named | {"seconds": self._keys.reward_timeout_seconds}, SECONDS_TO_START)
        except UserError as error:  # the next question starts it again
            self.close()
            raise UserError(str(error)) from None  # what cannot be loaded is no bad reward

    def _exchange(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a question.

        Whatever interrupts it ends the process, whose answer would be the next one's.

        Raises:
            ProcessLost: There is no answer.
            UserError: The answer is an error.
        """
        try:
            answer = self._send(question, seconds)
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            hint = ""
            if "calls" in question or question.get("do") == "call":
                hint = " (on_bad_reward: zero counts such calls and continues)"
            elif "do" in question or "function" in question:
                hint = " (on_bad_reward: zero counts such completions and continues)"
            raise UserError(f"{answer['error']}{hint}")
        return answer

    def _describe_files(self, question: Mapping[str, Any]) -> str:
        """The key that names what a question asks, and its files."""
        key = "rewards"
        named = self._keys.reward_files
        if "calls" in question:
            key = "tools"
            named = self._keys.tools
        elif "do" in question:
            key = "environment"
            named = self._keys.environment_files
        return f"{key}: {', '.join(dict.fromkeys(str(file_of(name)) for name in named))}"

    def _send(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        where = self._describe_files(question)
        word = secrets.token_hex(8)
        deadline = time.monotonic() + seconds
        try:
            _write(
                process.questions.fileno(),
                json.dumps(question | {"word": word}).encode() + b"\n",
                deadline,
            )
            line = _read_line(process.answers.fileno(), deadline)
        except (BrokenPipeError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # its own exit code, where it ends by itself
                process.handle.wait(SECONDS_TO_STOP)
            self._process = None
            code = process.end()
            raise ProcessLost(
                f"{where}: their process ended with {code}; its last words are above"
            ) from None
        except TimeoutError:
            raise ProcessLost(
                f"{where}: no answer in {seconds:g} s, in code that Python cannot interrupt; "
                "raise reward_timeout_seconds, or change the function"
            ) from None
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.get("word") != word:
            raise ProcessLost(
                f"{where}: a function has written into the pipe of the answers; let it write to "
                "files that it has opened, or print"
            )
        return answer


def _read_result(answer: Mapping[str, Any]) -> tuple[str, bool]:
    if "problem" in answer:
        return str({"error": answer["problem"]}), True
    return answer["said"], answer["failed"]


def _write(file: int, content: bytes, deadline: float) -> None:
    """Writes all of `content`.

    Raises `TimeoutError`, or `BrokenPipeError` where the other side has ended.
    """
    os.set_blocking(file, False)
    poll = select.poll()  # select() takes no number of a file above 1023
    poll.register(file, select.POLLOUT)
    left = memoryview(content)
    while left:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        with suppress(BlockingIOError):
            left = left[os.write(file, left) :]


def _read_line(file: int, deadline: float) -> bytes:
    """A line. Raises `TimeoutError`, or `EOFError` where the other side has ended."""
    parts = bytearray()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while not parts.endswith(b"\n"):
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        part = os.read(file, 1 << 20)
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
