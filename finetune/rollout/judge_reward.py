"""A judge as a reward: a model behind an OpenAI-compatible server scores each completion.

Imports no torch.
"""

import inspect
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from finetune.config.judge import Judge, fill_prompt
from finetune.constants import Fields
from finetune.errors import UserError, printable
from finetune.files.network import send

WAITS = (0.5, 1.0)  # seconds before the second and the third try
SPARE = 0.5  # seconds that a judge stops before the time limit, which could not say what was slow
SHOWN = 100  # characters of an answer in an error


class Fault(str):
    """The reason why a completion has no score. `is_score` accepts no text."""

    __slots__ = ()


class JudgeReward:
    """A judge as a reward function.

    Its signature has the columns that the judge's prompt names.
    """

    def __init__(self, judge: Judge, seconds: float) -> None:
        """Raises `UserError` where the environment does not have the judge's key.

        seconds: The time for all completions of a step together.
        """
        names = dict.fromkeys(("prompts", "completions", *judge.places))
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in names
            if name not in ("prompt", "completion")
        ]
        self.__signature__ = inspect.Signature(parameters)
        self._judge = judge
        self._seconds = seconds
        self._headers = _read_key(judge)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Fault]:
        """Returns for each completion the judge's score, or a fault."""
        deadline = time.monotonic() + max(0.5 * self._seconds, self._seconds - SPARE)
        questions = []
        for place, completion in enumerate(completions):
            values = {name: str(column[place]) for name, column in columns.items()}
            questions.append(fill_prompt(self._judge, prompts[place], completion, values))
        with ThreadPoolExecutor(self._judge.concurrency) as pool:
            return list(pool.map(partial(self._score, deadline), questions))

    def _score(self, deadline: float, question: str) -> float | Fault:
        """Asks the judge; returns the number in its answer, by the judge's regex, or a fault."""
        url = f"{self._judge.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        body = {
            "model": self._judge.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self._judge.max_tokens,
        }
        try:
            answer = self._ask(url, body, deadline)
        except UserError as error:
            return Fault(error)
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"] or ""
            matches = list(re.finditer(self._judge.regex, text))
        except (ValueError, LookupError, TypeError):
            said = printable(answer[:SHOWN].decode(errors="replace"))
            return Fault(f"{url}: no answer of a chat completion: {said}")
        try:
            last = matches[-1]
            return float(last[1] if last.groups() else last[0])
        except (LookupError, ValueError, TypeError):
            return Fault(f"{url}: no number for {self._judge.regex} in {text[-SHOWN:]!r}")

    def _ask(self, url: str, body: Fields, deadline: float) -> bytes:
        """Returns the server's answer; tries again after an error, until `deadline`.

        Raises `UserError` where the last try fails.
        """
        for wait in (*WAITS, None):
            left = deadline - time.monotonic()
            if left <= 0:
                raise UserError(
                    f"{url}: not asked: reward_timeout_seconds was over; raise it, or concurrency"
                )
            try:
                return send(url, body, min(left, self._judge.timeout_seconds), self._headers)
            except UserError:
                if wait is None or time.monotonic() + wait >= deadline:
                    raise
                time.sleep(wait)
        raise AssertionError("the last try ends above")


def _read_key(judge: Judge) -> dict[str, str]:
    """Returns the header with the judge's key. Raises `UserError` where it is not set."""
    if judge.api_key_env is None:
        return {}
    key = os.environ.get(judge.api_key_env)
    if not key:
        raise UserError(
            f"rewards: {judge.title}: the environment has no {judge.api_key_env}, which holds the "
            "key by api_key_env; export it where the run starts"
        )
    return {"Authorization": f"Bearer {key}"}
