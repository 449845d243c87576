"""The run's side of rewards, tools and environments: it starts the separate process that runs them
within time limits, and asks it.
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

from finetune.config.methods import RolloutKeys
from finetune.config.reward_names import name_of_reward
from finetune.config.user_code import file_of
from finetune.errors import UserError
from finetune.rollout.user_calls import (
    SECONDS_TO_STOP,
    has_ended,
    kill_all,
    limit_of_one,
    list_children,
)

SECONDS_TO_START = 60.0  # that the process has at least to load the recipe's files
STDERR = 2  # the file descriptor


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of completions by the reward functions, then by the environments' own rewards."""

    # [reward functions, then environments' own rewards][completions]; None: no score
    by_reward: list[list[float | None]]
    # The places of completions for which a function or the environment failed. Its score is then 0;
    # the others' scores count.
    failed: list[int]


class ProcessLost(UserError):
    """The process ended, did not answer in time, or user code wrote into the pipe of its answers.

    The next question starts a new process.
    """


@dataclass(frozen=True, slots=True)
class RewardProcess:
    """The process, and the run's ends of its two pipes. The process ends when they are closed."""

    handle: subprocess.Popen[bytes]
    questions: FileIO  # to write
    answers: FileIO  # to read

    @classmethod
    def start(cls) -> "RewardProcess":
        """Starts a process in its own process group, which Ctrl-C does not reach."""
        root = Path(__file__).resolve().parents[2]  # the folder with the package `finetune`
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path[1:]])}
        child_questions, questions = os.pipe()
        answers, child_answers = os.pipe()
        command = [sys.executable, "-m", "finetune.rollout.reward_process"]
        try:
            handle = subprocess.Popen(
                [*command, str(child_questions), str(child_answers)],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # what functions print does not belong on a rank's stdout
                pass_fds=(child_questions, child_answers),
                start_new_session=True,
                env=environment,
            )
        except BaseException:
            os.close(questions)
            os.close(answers)
            raise
        finally:
            os.close(child_questions)
            os.close(child_answers)
        return cls(handle, FileIO(questions, "w"), FileIO(answers))

    def end(self) -> int:
        """Kills the process and all that it has started; returns its exit code."""
        children = list_children(self.handle.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)
        kill_all(children)  # some may not be in the process group
        self.questions.close()
        self.answers.close()
        return self.handle.wait()


class Rewards:
    """The reward functions, tools and environments of a recipe.

    Their process starts at the first question, and ends with the run.
    """

    def __init__(self, keys: RolloutKeys) -> None:
        self.names = [name_of_reward(name) for name in keys.reward_functions]  # in metrics
        self._keys = keys
        self._counts_failures = keys.on_bad_reward == "zero"  # else they are raised
        self._process: RewardProcess | None = None
        self._step: dict[str, Any] = {}  # the completions to score, with their columns
        self._knows_step = False  # whether the process has got `_step`
        self._places = 0  # the number of places that have been reserved
        # Held while a question is asked, because threads that sample ahead call tools meanwhile.
        self._asking = threading.RLock()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        state: dict[str, Any],
    ) -> Scores:
        """Scores completions by all functions, each of which is called with all completions.

        Args:
            prompts: Text or a list of messages for each completion, as TRL passes them.
            completions: Text or a list of messages for each completion, as TRL passes them.
            completion_ids: The tokens of each completion.
            columns: The data's columns: name -> a value for each completion.
            state: The attributes of the functions' `trainer_state`.

        Raises:
            UserError: A function raised, took too long or did not return a score for each
                completion, and `on_bad_reward` is error.
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
        failed: set[int] = set()
        for index in range(len(self.names)):
            answer = self._score_by_function(index)
            by_reward.append(answer["scores"])
            failures = enumerate(answer.get("failed", ()))  # absent if failures are raised
            failed.update(place for place, is_failed in failures if is_failed)
        return Scores(by_reward, sorted(failed))

    def take_places(self, completions: int) -> int:
        """Takes the next places, one for the environment of each of `completions` completions.

        Places are consecutive numbers, which no other completion of the run gets. Returns the
        first.
        """
        first_place = self._places
        self._places += completions
        return first_place

    def check_arguments(self, columns: Sequence[str]) -> None:
        """Loads the functions, and checks that the data have the columns that they require.

        columns: The names of the data's columns.

        Raises `UserError` if a function or tool cannot be loaded, or requires another column.
        """
        self._start()
        self._exchange({"known": columns}, SECONDS_TO_START)

    def call_tools(self, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
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
            return [_read_result(answer) for answer in answers]
        if not self._counts_failures:
            return self._call(calls, self._keys.reward_timeout_seconds)
        # One call after another, so that one which ends the process does not lose the others.
        results: list[tuple[str, bool]] = []
        seconds_each = limit_of_one(self._keys.reward_timeout_seconds, max(1, len(calls)))
        for call in calls:
            try:
                results += self._call([call], seconds_each)
            except ProcessLost as error:
                print(error, file=sys.stderr)
                results.append((str({"error": f"{call['name']} did not end as it should"}), True))
        return results

    def ask_environments(self, do: str, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Asks the completions' environments, as `EnvironmentProcesses.ask` does.

        Returns an answer for each item. Raises `UserError` for the first problem if
        `on_bad_reward` is error.
        """
        seconds = self._keys.reward_timeout_seconds
        count = max(1, len(items))
        # The longest time: one process has all items, and each takes its limit.
        most_seconds = count * (limit_of_one(seconds, count) + SECONDS_TO_STOP)
        question = {"do": do, "items": items, "seconds": seconds}
        try:
            with self._asking:
                self._start()
                answer = self._exchange(question, most_seconds + SECONDS_TO_STOP)
        except ProcessLost as error:
            if not self._counts_failures:
                raise
            print(error, file=sys.stderr)
            return [{"problem": str(error)} for _ in items]
        answers: list[dict[str, Any]] = answer["answers"]
        return answers

    def close(self) -> None:
        """Ends the process, if it runs. The next question would start it again."""
        process = self._process
        self._process = None
        if process is not None:
            process.end()

    def _score_by_function(self, index: int) -> dict[str, Any]:
        """Scores all completions of the step with the function at `index`.

        Returns `scores`, and if failures are counted `failed`: whether each completion failed. If
        the function ends the process and failures are counted, it scores one completion after
        another.
        """
        seconds = self._keys.reward_timeout_seconds
        count = len(self._step["completions"])
        seconds_each = limit_of_one(seconds, max(1, count))
        if not self._counts_failures:
            return self._ask_score({"function": index}, seconds)
        try:
            # The limit includes scoring one completion after another, which the process does if
            # the function raises for all of them together.
            return self._ask_score({"function": index}, seconds + count * seconds_each)
        except ProcessLost as error:
            print(error, file=sys.stderr)
        scores: list[float | None] = []
        failed: list[bool] = []
        for place in range(count):
            try:
                answer = self._ask_score({"function": index, "place": place}, seconds_each)
            except ProcessLost as error:
                print(error, file=sys.stderr)
                answer = {"scores": [0.0], "failed": [True]}
            scores += answer["scores"]
            failed += answer["failed"]
        return {"scores": scores, "failed": failed}

    def _ask_score(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Asks for scores, and sends the step with the question if the process does not have it.

        seconds: The time limit of the functions; the process has SECONDS_TO_STOP more.
        """
        with self._asking:
            self._start()
            if not self._knows_step:
                question |= {"step": self._step}
            answer = self._exchange(question, seconds + SECONDS_TO_STOP)
            self._knows_step = True
        return answer

    def _call(self, calls: Sequence[Mapping[str, Any]], seconds: float) -> list[tuple[str, bool]]:
        """Calls tools in the process; returns what `call_tools` returns.

        seconds: The time limit of all calls together.
        """
        question = {"calls": calls, "seconds": seconds}
        with self._asking:
            self._start()
            answer = self._exchange(question, seconds + SECONDS_TO_STOP)
        return [tuple(result) for result in answer["results"]]

    def _start(self) -> None:
        """Starts the process, unless it runs.

        Raises `UserError` if it cannot load a file.
        """
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
            "counts_failures": self._counts_failures,
            "seconds": self._keys.reward_timeout_seconds,
        }
        try:
            self._exchange(settings, max(SECONDS_TO_START, self._keys.reward_timeout_seconds))
        except UserError as error:
            self.close()
            # Not as `ProcessLost`, which callers may count as a failure of a completion.
            raise UserError(str(error)) from None

    def _exchange(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Asks the process a question; returns the answer.

        seconds: How long to wait for the answer.

        Raises:
            ProcessLost: There is no answer.
            UserError: The answer is an error.
        """
        try:
            answer = self._send(question, seconds)
        except BaseException:
            # Ended even after Ctrl-C, because a late answer would be read as that of the next
            # question.
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
        """Describes where an error comes from: the recipe's key and the files of what is asked."""
        key = "rewards"
        entries = self._keys.reward_files
        if "names" in question:
            key = "rewards, tools and environment"
            entries = (*entries, *self._keys.tools, *self._keys.environment_files)
        elif "calls" in question:
            key = "tools"
            entries = self._keys.tools
        elif "do" in question:
            key = "environment"
            entries = self._keys.environment_files
        return f"{key}: {', '.join(dict.fromkeys(str(file_of(name)) for name in entries))}"

    def _send(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a question to the process; returns the answer.

        Raises `ProcessLost` if the process ends, does not answer within `seconds`, or the answer is
        not its own.
        """
        process = self._process
        assert process is not None
        where = self._describe_files(question)
        word = secrets.token_hex(8)
        deadline = time.monotonic() + seconds
        message = json.dumps(question | {"word": word}).encode() + b"\n"
        try:
            _write(process.questions.fileno(), message, deadline)
            line = _read_line(process.answers.fileno(), deadline)
        except (BrokenPipeError, EOFError):
            # Wait, so that the process ends with its own exit code, which says why.
            with suppress(subprocess.TimeoutExpired):
                process.handle.wait(SECONDS_TO_STOP)
            self._process = None
            code = process.end()
            raise ProcessLost(
                f"{where}: their process ended with {code}; its last words are above"
            ) from None
        except TimeoutError:
            reason = f"no answer in {seconds:g} s, in code that Python cannot interrupt"
            if "names" in question:
                reason = f"not loaded in {seconds:g} s"
            raise ProcessLost(
                f"{where}: {reason}; raise reward_timeout_seconds, or change the function"
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
    """Reads an environment's answer to a call.

    Returns (the text that the model reads, whether the call failed).
    """
    if "problem" in answer:
        return str({"error": answer["problem"]}), True
    return answer["said"], answer["failed"]


def _write(file: int, content: bytes, deadline: float) -> None:
    """Writes all of `content` to a pipe.

    Args:
        file: The file descriptor, which is made non-blocking.
        content: What is written.
        deadline: The time by `time.monotonic` at which `TimeoutError` is raised.

    Raises `BrokenPipeError` if the reader has ended.
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
    """Reads a line, which is all that is in the pipe.

    Args:
        file: The file descriptor.
        deadline: The time by `time.monotonic` at which `TimeoutError` is raised.

    Raises `EOFError` if the writer has ended.
    """
    line = bytearray()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        part = os.read(file, 1 << 20)
        if not part:
            raise EOFError
        line += part
    return bytes(line)
