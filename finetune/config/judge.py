"""A judge of completions: a model behind an OpenAI-compatible server, as `rewards` names it."""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any

from annotated_types import Gt

NUMBER = r"-?\d+(?:\.\d+)?"
PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A mapping in `rewards`."""

    url: str  # of the server, with or without /v1
    model: str  # as the server calls it
    prompt: str  # the user's turn, with {prompt}, {completion} and columns of the rows in braces
    regex: str = NUMBER  # its last match in the answer is the score: its group, where it has one
    name: str | None = None  # for metrics; None: the model's
    api_key_env: str | None = None  # the environment variable that holds the key
    concurrency: Annotated[int, Gt(0)] = 8  # requests at a time
    timeout_seconds: Annotated[float, Gt(0)] = 30.0  # of a request
    max_tokens: Annotated[int, Gt(0)] = 512  # of an answer

    @property
    def title(self) -> str:
        """The judge's name in metrics."""
        return self.name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def places(self) -> tuple[str, ...]:
        """The names in braces of the prompt, each once."""
        return tuple(dict.fromkeys(PLACE.findall(self.prompt)))

    def fill(self, values: Mapping[str, str]) -> str:
        """The prompt with each of its places filled; what stands in braces in a value stays as it
        is.

        >>> judge = Judge(url="http://localhost", model="m", prompt="{prompt} -> {completion}?")
        >>> judge.fill({"prompt": "2+2", "completion": "{prompt}"})
        '2+2 -> {prompt}?'
        """
        return PLACE.sub(lambda place: values[place[1]], self.prompt)


def is_judge(name: str) -> bool:
    """Whether an entry of `rewards`, as a recipe holds it, is a judge."""
    return name.startswith("{")


def write_judge(given: Mapping[str, Any]) -> str:
    """A mapping of `rewards` as text, in which a recipe holds it.

    Raises `ValueError` with a sentence where it names no judge.

    >>> write_judge({"url": "http://localhost:8000", "model": "m"})
    Traceback (most recent call last):
    ValueError: a judge without prompt; it has url, model, prompt, and may have regex, name, \
api_key_env, concurrency, timeout_seconds, max_tokens
    """
    from pydantic import TypeAdapter, ValidationError

    known = [each.name for each in fields(Judge)]
    needed = [each.name for each in fields(Judge) if each.default is MISSING]
    missing = [key for key in needed if key not in given]
    keys = f"it has {', '.join(needed)}, and may have {', '.join(known[len(needed) :])}"
    if missing:
        raise ValueError(f"a judge without {', '.join(missing)}; {keys}")
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise ValueError(f"a judge with {', '.join(unknown)}; {keys}")
    try:
        text = json.dumps(dict(given), ensure_ascii=False, default=str)
        judge = TypeAdapter(Judge).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not re.match(r"https?://[^/]", judge.url):
        raise ValueError(f"url: {judge.url}: an address is expected, such as http://localhost:8000")
    if "completion" not in judge.places:
        raise ValueError(
            "prompt: does not show the completion; write {completion} where it belongs"
        )
    try:
        re.compile(judge.regex)
    except re.error as error:
        raise ValueError(f"regex: {judge.regex}: no regular expression: {error}") from None
    return text


@cache
def read_judge(name: str) -> Judge:
    """The judge of an entry of `rewards`, as `write_judge` wrote it."""
    return Judge(**json.loads(name))


def fill_prompt(judge: Judge, prompt: Any, completion: Any, values: Mapping[str, str]) -> str:
    """Returns the judge's prompt about a completion. `values`: of the row, by column."""
    own = {"prompt": _show_prompt(prompt), "completion": text_of(completion)}
    return judge.fill({**values, **own})


def text_of(completion: Any) -> str:
    """A completion as text; that of a conversation is a list of messages."""
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


def _show_prompt(prompt: Any) -> str:
    """A prompt as text: a single message by its content, several with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
