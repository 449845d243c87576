"""Rewards and tools: the functions of a recipe, asked in a process of their own with a time limit."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.methods import Rollout
from finetune.config.user_code import file_of
from finetune.errors import UserError
from finetune.rollout.reward_process import limit_of_one

SECONDS_TO_START = 60.0
SECONDS_TO_STOP = 5.0  # after the time limit, in which the process itself says where it was


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reward functions gave."""

    by_function: list[list[float | None]]  # [functions][completions]; None: the function gave no score
    failures: int  # completions that got a 0 because a function failed


class Rewards:
    """The rewards and tools of a recipe. The process starts at the first call, and ends with this one."""

    def __init__(self, keys: Rollout) -> None:
        self.names = [name.rpartition(":")[2] for name in keys.rewards]
        self._keys = keys
        self._process: subprocess.Popen[bytes] | None = None

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        state: dict[str, Any],
    ) -> Scores:
        """Scores completions, in one call of each function.

        Args:
            prompts, completions: As TRL gives them: text, or lists of messages.
            completion_ids: The tokens of each.
            columns: Of the rows, by name, a value for each completion.
            state: Attributes of the functions' `trainer_state`.

        Raises:
            UserError: A function raised, took too long or returned what is no reward, and `on_bad_reward` is error.
        """
        step = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        limit = self._keys.reward_timeout_seconds
        if self._keys.on_bad_reward == "zero":  # a function may be called for all completions, and then for each
            limit += len(completions) * limit_of_one(limit, len(completions))
        answer = self._ask(step | {"columns": columns, "state": state}, len(self.names) * limit + SECONDS_TO_STOP)
        return Scores(answer["scores"], answer["failures"])

    def call_tools(self, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """(what the model reads of the result, whether the call failed) of each call, a name with arguments.

        Raises `UserError` where they take too long together, and `on_bad_reward` is error.
        """
        limit = self._keys.reward_timeout_seconds
        if self._keys.on_bad_reward == "zero":
            limit = len(calls) * limit_of_one(limit, len(calls))
        return [tuple(each) for each in self._ask({"calls": calls}, limit + SECONDS_TO_STOP)["results"]]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        root = Path(__file__).resolve().parents[2]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path[1:]])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "finetune.rollout.reward_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        counts = self._keys.on_bad_reward == "zero"
        asked = {"names": self._keys.rewards, "tools": self._keys.tools, "counts_failures": counts}
        try:
            self._exchange(asked | {"seconds": self._keys.reward_timeout_seconds}, SECONDS_TO_START)
        except UserError:  # the next question starts it again
            self.close()
            raise

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._exchange(question, seconds)

    def _exchange(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        process, key = self._process, "tools" if "calls" in question else "rewards"
        assert process is not None and process.stdin is not None and process.stdout is not None
        files = dict.fromkeys(str(file_of(name)) for name in getattr(self._keys, key) if ".py:" in name)
        where = f"{key}: {', '.join(files)}"
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer: dict[str, Any] = _read_line(process.stdout.fileno(), seconds)
        except (BrokenPipeError, EOFError):
            code = process.wait()
            self.close()
            raise UserError(f"{where}: their process ended with {code}; its last words are above") from None
        except TimeoutError:
            self.close()
            raise UserError(
                f"{where}: no answer in {seconds:g} s, in code that Python cannot interrupt; "
                "raise reward_timeout_seconds, or change the function"
            ) from None
        if "error" in answer:
            counted = "calls" if key == "tools" else "completions" if "completions" in question else None
            hint = f" (on_bad_reward: zero counts such {counted} and continues)" if counted else ""
            raise UserError(f"{answer['error']}{hint}")
        return answer


def _read_line(file: int, seconds: float) -> Any:
    """A line of JSON. Raises `TimeoutError`, or `EOFError` where the other side has ended."""
    deadline, parts, poll = time.monotonic() + seconds, bytearray(), select.poll()
    poll.register(file, select.POLLIN)  # select() takes no number of a file above 1023
    while not parts.endswith(b"\n"):
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        part = os.read(file, 1 << 20)
        if not part:
            raise EOFError
        parts += part
    return json.loads(parts)
