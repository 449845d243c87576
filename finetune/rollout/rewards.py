"""Rewards, tools and environments of a recipe: a separate process runs them within time limits."""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from finetune.config.methods import RolloutKeys
from finetune.config.reward_names import name_of_reward
from finetune.config.user_code import file_of
from finetune.constants import Fields, Record
from finetune.errors import UserError
from finetune.rollout.user_calls import (
    SECONDS_TO_STOP,
    has_ended,
    kill_all,
    limit_of_one,
    list_children,
)

SECONDS_TO_START = 60.0
STDERR = 2


@dataclass(frozen=True, slots=True)
class Scores:
    """The results of the reward functions, and behind them of the environments' own rewards."""

    # [functions, environments' rewards][completions]; None: no score
    by_reward: list[list[float | None]]
    failed: list[int]  # places of completions with a 0 because a function or environment failed

    @property
    def failures(self) -> int:
        """The number of completions that failed."""
        return len(self.failed)


class ProcessLost(UserError):
    """The process ended, did not answer in time, or user code wrote in its place.

    The next question starts a new process.
    """


@dataclass(frozen=True, slots=True)
class RewardProcess:
    """The process, and the run's ends of its two pipes. It ends when they are closed."""

    handle: subprocess.Popen[bytes]
    questions: FileIO
    answers: FileIO

    @classmethod
    def start(cls) -> "RewardProcess":
        """Starts a process in a process group of its own, which Ctrl-C does not reach."""
        root = Path(__file__).resolve().parents[2]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path[1:]])}
        its_questions, questions = os.pipe()
        answers, its_answers = os.pipe()
        command = [sys.executable, "-m", "finetune.rollout.reward_process"]
        try:
            handle = subprocess.Popen(
                [*command, str(its_questions), str(its_answers)],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # a rank's stdout is not for what functions print
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

    def end(self) -> int:
        """Kills the process and its children; returns its exit code."""
        children = list_children(self.handle.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)
        kill_all(children)  # some may have left the process group
        self.questions.close()
        self.answers.close()
        return self.handle.wait()


class Rewards:
    """The reward functions, tools and environments of a recipe.

    Their process starts at the first call, and ends with the run.
    """

    def __init__(self, keys: RolloutKeys) -> None:
        self.names = [name_of_reward(name) for name in keys.reward_functions]
        self._keys = keys
        self._counts = keys.on_bad_reward == "zero"
        self._process: RewardProcess | None = None
        self._step: Record = {}  # the completions to score, with their columns
        self._knows_step = False  # the process has `_step`
        self._places = 0  # the number of places that were reserved
        # Threads that sample ahead ask, too. The process answers one question after another.
        self._asking = threading.RLock()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        state: Record,
        lost: Sequence[bool] = (),
    ) -> Scores:
        """Scores completions by one call of each function.

        Args:
            prompts: Text or lists of messages, as TRL gives them.
            completions: Text or lists of messages, as TRL gives them.
            completion_ids: The tokens of each completion.
            columns: The rows' columns: name -> a value for each completion.
            state: The attributes of the functions' `trainer_state`.
            lost: Whether each completion's environment has failed; empty: none has.

        Raises:
            UserError: A function raised, took too long or returned something else than rewards,
                and `on_bad_reward` is error.
        """
        self._step = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "columns": columns,
            "state": state,
        }
        self._knows_step = False
        by_reward: list[list[float | None]] = []
        failed = {place for place, is_lost in enumerate(lost) if is_lost}
        for number in range(len(self.names)):
            answer = self._score_by(number)
            by_reward.append(answer["scores"])
            failures = enumerate(answer.get("failed", ()))
            failed.update(place for place, is_failed in failures if is_failed)
        return Scores(by_reward, sorted(failed))

    def reserve_places(self, completions: int) -> int:
        """Reserves a place for the environment of each completion; returns the first place."""
        first = self._places
        self._places += completions
        return first

    def check_arguments(self, columns: Sequence[str]) -> None:
        """Raises `UserError` where a function or a tool cannot be loaded, or needs another column.

        columns: The names of the data's columns.
        """
        self._start()
        self._exchange({"known": columns}, SECONDS_TO_START)

    def call_tools(self, calls: Sequence[Fields]) -> list[tuple[str, bool]]:
        """Calls tools.

        Args:
            calls: The `name` and `arguments` of each call, and the `place` of its completion.

        Returns:
            (the text that the model reads, whether the call failed), for each call.

        Raises:
            UserError: The calls took too long together, or ended the process, and `on_bad_reward`
                is error.
        """
        if self._keys.environment:
            answers = self.ask_environments("call", calls)
            return [_read_result(each) for each in answers]
        if not self._counts:
            return self._call(calls, self._keys.reward_timeout_seconds)
        results: list[tuple[str, bool]] = []
        limit = limit_of_one(self._keys.reward_timeout_seconds, max(1, len(calls)))
        for each in calls:  # one by one: a call that ends the process does not lose the others
            try:
                results += self._call([each], limit)
            except ProcessLost as error:
                print(error, file=sys.stderr)
                results.append((str({"error": f"{each['name']} did not end as it should"}), True))
        return results

    def ask_environments(self, do: str, items: Sequence[Fields]) -> list[Record]:
        """Asks the completions' environments, as `EnvironmentProcesses.ask` does.

        Raises `UserError` for the first problem where `on_bad_reward` is error.
        """
        seconds = self._keys.reward_timeout_seconds
        count = max(1, len(items))
        most = count * (limit_of_one(seconds, count) + SECONDS_TO_STOP)  # if one process has them
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
        answers: list[Record] = answered["answers"]
        return answers

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        self._process = None
        if process is not None:
            process.end()

    def _score_by(self, number: int) -> Record:
        """Scores all completions with one function: `scores`, and `failed` if failures count.

        If the function ends the process and failures count, it scores one after another.
        """
        limit = self._keys.reward_timeout_seconds
        count = len(self._step["completions"])
        of_one = limit_of_one(limit, max(1, count))
        if not self._counts:
            return self._ask_score({"function": number}, limit)
        try:
            # The process, too, scores one after another if the function raises over all.
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

    def _ask_score(self, question: Record, seconds: float) -> Record:
        """Asks for scores; sends the step with the question if the process does not have it."""
        with self._asking:
            self._start()
            if not self._knows_step:
                question |= {"step": self._step}
            answer = self._exchange(question, seconds + SECONDS_TO_STOP)
            self._knows_step = True
        return answer

    def _call(self, calls: Sequence[Fields], seconds: float) -> list[tuple[str, bool]]:
        question = {"calls": calls, "seconds": seconds}
        with self._asking:
            self._start()
            answer = self._exchange(question, seconds + SECONDS_TO_STOP)
        return [tuple(each) for each in answer["results"]]

    def _start(self) -> None:
        """Starts the process, unless it runs. Raises `UserError` if it cannot load a file."""
        if self._process is not None and not has_ended(self._process.handle.pid):
            return
        self.close()
        self._process = RewardProcess.start()
        self._knows_step = False
        settings = {
            "names": self._keys.reward_functions,
            "tools": self._keys.tools,
            "environments": list(dict.fromkeys(self._keys.environments.values())),
            "processes": self._keys.environment_processes,
            "counts_failures": self._counts,
            "seconds": self._keys.reward_timeout_seconds,
        }
        try:
            self._exchange(settings, SECONDS_TO_START)
        except UserError as error:  # the next question starts it again
            self.close()
            raise UserError(str(error)) from None  # no `ProcessLost`, which may be counted

    def _exchange(self, question: Record, seconds: float) -> Record:
        """Asks a question; returns its answer.

        An interruption ends the process: its late answer would be read as the next one.

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

    def _describe_files(self, question: Fields) -> str:
        """Returns the recipe's key and the files of what a question asks."""
        key = "rewards"
        named = self._keys.reward_files
        if "calls" in question:
            key = "tools"
            named = self._keys.tools
        elif "do" in question:
            key = "environment"
            named = self._keys.environment_files
        return f"{key}: {', '.join(dict.fromkeys(str(file_of(name)) for name in named))}"

    def _send(self, question: Record, seconds: float) -> Record:
        """Sends a question; returns its answer. Raises `ProcessLost`."""
        process = self._process
        assert process is not None
        where = self._describe_files(question)
        word = secrets.token_hex(8)
        deadline = time.monotonic() + seconds
        sent = json.dumps(question | {"word": word}).encode() + b"\n"
        try:
            _write(process.questions.fileno(), sent, deadline)
            line = _read_line(process.answers.fileno(), deadline)
        except (BrokenPipeError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # if it ends by itself, its code says why
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


def _read_result(answer: Fields) -> tuple[str, bool]:
    if "problem" in answer:
        return str({"error": answer["problem"]}), True
    return answer["said"], answer["failed"]


def _write(file: int, content: bytes, deadline: float) -> None:
    """Writes all of `content`.

    Raises `TimeoutError`, or `BrokenPipeError` if the reader has ended.
    """
    os.set_blocking(file, False)
    poll = select.poll()  # select() takes only file numbers up to 1023
    poll.register(file, select.POLLOUT)
    left = memoryview(content)
    while left:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        with suppress(BlockingIOError):
            left = left[os.write(file, left) :]


def _read_line(file: int, deadline: float) -> bytes:
    """Reads a line. Raises `TimeoutError`, or `EOFError` if the writer has ended."""
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
