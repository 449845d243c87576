"""Reads numbers of another tool's file, which may be text there, and shows values in messages."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from finetune.errors import UserError
from finetune.units import is_fp32_number

Value = TypeVar("Value")


class WrongValue(UserError):
    """A value that the other tool would not read either. `convert_file` adds the file's name."""

    @classmethod
    def of_key(cls, key: str, value: Any, expected: str, example: str) -> "WrongValue":
        """Makes the error for a key whose value is not what is expected.

        `expected` is a noun phrase in the singular; `example` is a value to write instead.
        """
        return cls(
            f"{key}: {expected} is expected, found {shorten(value)}; write one, such as {key}: "
            f"{example}"
        )


def shorten(value: Any) -> str:
    """Returns a value as JSON, cut to at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def find_matches(table: Mapping[str, Value], text: str) -> Iterator[Value]:
    """Yields the values of a table whose keys, which are patterns, match a part of the text.

    >>> list(find_matches({"llama": 1, "-7b$": 2, "": 3}, "llama-2-7b-hf"))
    [1, 3]
    """
    return (value for pattern, value in table.items() if re.search(pattern, text))


def as_json(value: Any) -> str:
    """Returns a value as the tables of keys have it: in JSON, a text without its quotes."""
    return json.dumps(value, default=str).strip('"')


def convert_number(value: Any) -> Any:
    """Converts text that is a number, as YAML 1.1 reads 2e-5; returns any other value unchanged.

    >>> convert_number("2e-5"), convert_number("16"), convert_number("auto")
    (2e-05, 16, 'auto')
    """
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def read_number(key: str, value: Any, example: str, least: float = -math.inf) -> Any:
    """Reads a key's value as a number of at least `least`; raises `WrongValue` for anything else.

    `example` is the value that the error suggests.

    >>> read_number("save_steps", "500", "100"), read_number("min_lr", 0, "1e-6")
    (500, 0)
    """
    number = convert_number(value)
    if isinstance(number, bool) or not is_fp32_number(number):
        raise WrongValue.of_key(key, value, "a number", example)
    if number < least:
        raise WrongValue.of_key(key, value, f"a number of at least {least:g}", example)
    return number
