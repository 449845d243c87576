"""A judge of completions: a model behind an OpenAI-compatible server, described in `rewards`."""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any

from annotated_types import Gt

NUMBER = r"-?\d+(?:\.\d+)?"
PLACE = re.compile(r"\{(\w+)\}")  # {NAME} in a judge's prompt, to be filled in


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A judge as `rewards` describes it: a mapping with these keys."""

    url: str  # the server's, with or without /v1
    model: str  # the model's name on the server
    prompt: str  # the user's turn, with {prompt}, {completion} and columns of the rows in braces
    regex: str = NUMBER  # the last match in the answer is the score, or its group if it has one
    name: str | None = None  # for metrics; None: the last part of the model's name
    api_key_env: str | None = None  # the environment variable that holds the API key
    concurrency: Annotated[int, Gt(0)] = 8  # requests at a time
    timeout_seconds: Annotated[float, Gt(0)] = 30.0  # for a request
    max_tokens: Annotated[int, Gt(0)] = 512  # for an answer

    @property
    def title(self) -> str:
        """The judge's name in metrics."""
        _, _, model_name = self.model.rstrip("/").rpartition("/")
        return self.name or model_name

    @property
    def places(self) -> tuple[str, ...]:
        """The names that stand in braces in the prompt, each once."""
        return tuple(dict.fromkeys(PLACE.findall(self.prompt)))

    def fill(self, values: Mapping[str, str]) -> str:
        """Returns the prompt with each {NAME} replaced by its value.

        Braces inside a value are not replaced.

        >>> judge = Judge(url="http://localhost", model="m", prompt="{prompt} -> {completion}?")
        >>> judge.fill({"prompt": "2+2", "completion": "{prompt}"})
        '2+2 -> {prompt}?'
        """
        return PLACE.sub(lambda match: values[match[1]], self.prompt)


def is_judge(name: str) -> bool:
    """Whether an entry of a recipe's `rewards` is a judge, which is JSON (see `write_judge`)."""
    return name.startswith("{")


def write_judge(entry: Mapping[str, Any]) -> str:
    """Checks a mapping in `rewards`, and returns it as the JSON text that a recipe holds.

    Raises `ValueError` with a sentence for the first mistake.

    >>> write_judge({"url": "http://localhost:8000", "model": "m"})
    Traceback (most recent call last):
    ValueError: a judge without prompt; it has url, model, prompt, and may have regex, name, \
api_key_env, concurrency, timeout_seconds, max_tokens
    """
    from pydantic import TypeAdapter, ValidationError

    required = [key.name for key in fields(Judge) if key.default is MISSING]
    optional = [key.name for key in fields(Judge) if key.default is not MISSING]
    keys = f"it has {', '.join(required)}, and may have {', '.join(optional)}"
    missing = [key for key in required if key not in entry]
    if missing:
        raise ValueError(f"a judge without {', '.join(missing)}; {keys}")
    unknown = [str(key) for key in entry if key not in (*required, *optional)]
    if unknown:
        raise ValueError(f"a judge with {', '.join(unknown)}; {keys}")
    try:
        text = json.dumps(dict(entry), ensure_ascii=False, default=str)
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
    """Returns the judge of an entry of `rewards` that `write_judge` wrote."""
    return Judge(**json.loads(name))


def fill_prompt(judge: Judge, prompt: Any, completion: Any, values: Mapping[str, str]) -> str:
    """Returns the judge's prompt about one completion.

    Args:
        judge: The judge.
        prompt: Text, or a list of messages.
        completion: Text, or a list of messages.
        values: Column of the row -> its text. A column named prompt or completion is not used.
    """
    texts = {"prompt": _show_prompt(prompt), "completion": text_of(completion)}
    return judge.fill({**values, **texts})


def text_of(completion: Any) -> str:
    """Returns a completion as text; of a list of messages, the content of the last."""
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


def _show_prompt(prompt: Any) -> str:
    """Returns a prompt as text; of several messages, each with its role before it."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
