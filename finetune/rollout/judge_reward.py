"""A judge as a reward: a model behind an OpenAI-compatible server scores each completion.

Imports no torch.
"""

import inspect
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from finetune.config.judge import Judge, fill_prompt
from finetune.errors import UserError, printable
from finetune.files.network import send

WAITS = (0.5, 1.0)  # seconds before the second and the third try
# Seconds by which a judge stops before the reward process's time limit, whose error could not say
# what was slow.
SPARE = 0.5
SHOWN = 100  # the most characters of an answer that an error quotes


class Fault(str):
    """The reason why a completion has no score, in place of the score.

    As a text it is no score by `is_score`.
    """

    __slots__ = ()


class JudgeReward:
    """A judge as a reward function.

    Its signature names the data's columns that the judge's prompt reads, so that the reward process
    passes them.
    """

    def __init__(self, judge: Judge) -> None:
        """Makes the function. Raises `UserError` if the judge's key is not in the environment."""
        names = dict.fromkeys(("prompts", "completions", *judge.places))
        # The places {prompt} and {completion} are filled from `prompts` and `completions`.
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in names
            if name not in ("prompt", "completion")
        ]
        self.__signature__ = inspect.Signature(parameters)
        self._judge = judge
        self._headers = _read_key(judge)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Fault]:
        """Asks the judge about each completion; returns its score or a fault for each.

        It is called within `time_limit`, whose timer says how much time these completions have.

        columns: Name -> a value for each completion.
        """
        seconds, _ = signal.getitimer(signal.ITIMER_REAL)
        deadline = time.monotonic() + max(0.5 * seconds, seconds - SPARE)
        questions = []
        for place, completion in enumerate(completions):
            values = {name: str(column[place]) for name, column in columns.items()}
            questions.append(fill_prompt(self._judge, prompts[place], completion, values))
        with ThreadPoolExecutor(self._judge.concurrency) as pool:
            return list(pool.map(partial(self._score, deadline), questions))

    def _score(self, deadline: float, question: str) -> float | Fault:
        """Asks the judge a question; returns the score in its answer, or a fault.

        The score is the last match of the judge's regex: its first group, or all of it.
        """
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
            excerpt = printable(answer[:SHOWN].decode(errors="replace"))
            return Fault(f"{url}: no answer of a chat completion: {excerpt}")
        try:
            last_match = matches[-1]
            return float(last_match[1] if last_match.groups() else last_match[0])
        except (LookupError, ValueError, TypeError):
            return Fault(f"{url}: no number for {self._judge.regex} in {text[-SHOWN:]!r}")

    def _ask(self, url: str, body: Mapping[str, Any], deadline: float) -> bytes:
        """Sends a request and returns the server's answer; tries again after an error.

        Raises `UserError` if the last try fails, or `deadline` has passed before the request.
        """
        for wait in (*WAITS, None):  # None: after the last try
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise UserError(
                    f"{url}: not asked: reward_timeout_seconds was over; raise it, or concurrency"
                )
            timeout = min(seconds_left, self._judge.timeout_seconds)
            try:
                return send(url, body, timeout, self._headers)
            except UserError:
                if wait is None or time.monotonic() + wait >= deadline:
                    raise
                time.sleep(wait)
        raise AssertionError("the last try ends above")


def _read_key(judge: Judge) -> dict[str, str]:
    """Makes the HTTP header with the judge's key, which an environment variable holds.

    Returns {} if the judge has no key. Raises `UserError` if the variable is not set.
    """
    if judge.api_key_env is None:
        return {}
    key = os.environ.get(judge.api_key_env)
    if not key:
        raise UserError(
            f"rewards: {judge.title}: the environment has no {judge.api_key_env}, which holds the "
            "key by api_key_env; export it where the run starts"
        )
    return {"Authorization": f"Bearer {key}"}
