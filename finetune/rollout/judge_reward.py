"""Scores of a judge: a model behind an OpenAI-compatible server, asked about each completion.

Imports no torch.
"""

import inspect
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from finetune.config.judge import Judge, fill_prompt
from finetune.errors import UserError, printable
from finetune.files.network import send

WAITS = (0.5, 1.0)  # seconds before an address that has failed is asked again
SPARE = 0.5  # seconds before the time limit of the process, which could not say what was slow
SHOWN = 100  # characters of an answer


class Fault(str):
    """Why a completion has no score. A text, and so no number."""

    __slots__ = ()


class JudgeReward:
    """A judge with the arguments of a reward function; the columns that its prompt names are
    arguments too.
    """

    def __init__(self, judge: Judge, seconds: float) -> None:
        """`seconds`: how long all completions of a step may take together.

        Raises `UserError` where the environment does not have the key.
        """
        names = dict.fromkeys(("prompts", "completions", *judge.places))
        columns = [name for name in names if name not in ("prompt", "completion")]
        kind = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in columns])
        self._judge = judge
        self._seconds = seconds
        self._headers = _read_key(judge)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Fault]:
        """The score of each completion, or why it has none."""
        deadline = time.monotonic() + max(0.5 * self._seconds, self._seconds - SPARE)
        questions = []
        for place, completion in enumerate(completions):
            values = {name: str(column[place]) for name, column in columns.items()}
            questions.append(fill_prompt(self._judge, prompts[place], completion, values))
        with ThreadPoolExecutor(self._judge.concurrency) as pool:
            return list(pool.map(partial(self._score, deadline), questions))

    def _score(self, deadline: float, question: str) -> float | Fault:
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
            return float(matches[-1][matches[-1].re.groups and 1])
        except (LookupError, ValueError, TypeError):
            return Fault(f"{url}: no number for {self._judge.regex} in {text[-SHOWN:]!r}")

    def _ask(self, url: str, body: Mapping[str, Any], deadline: float) -> bytes:
        """The server's answer, which is asked again after a fault. Raises `UserError`."""
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
    """The header with the key. Raises `UserError` where the environment does not have it."""
    if judge.api_key_env is None:
        return {}
    key = os.environ.get(judge.api_key_env)
    if not key:
        raise UserError(
            f"rewards: {judge.title}: the environment has no {judge.api_key_env}, which holds the "
            "key by api_key_env; export it where the run starts"
        )
    return {"Authorization": f"Bearer {key}"}
