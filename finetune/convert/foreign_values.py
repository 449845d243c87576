"""Single values of another tool's file: numbers, which may be written as text, and how a value is
shown.
"""

import json
import math
from typing import Any

from finetune.errors import UserError
from finetune.units import is_fp32_number


class WrongValue(UserError):
    """A value that its tool would not read either. `convert_file` adds the file's name."""

    @classmethod
    def of_key(cls, key: str, value: Any, expected: str, example: str) -> "WrongValue":
        """Makes the error of a key whose value is something else.

        `expected` is a noun phrase in the singular; `example` is a value to write instead.
        """
        return cls(
            f"{key}: {expected} is expected, found {shorten(value)}; write one, such as {key}: "
            f"{example}"
        )


def shorten(value: Any) -> str:
    """Shows a value as JSON, cut at 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def convert_number(value: Any) -> Any:
    """Converts numbers that YAML 1.1 reads as text (2e-5); leaves other values as they are.

    >>> convert_number("2e-5"), convert_number("auto")
    (2e-05, 'auto')
    """
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read_number(key: str, value: Any, example: str, least: float = -math.inf) -> Any:
    """Reads the number of at least `least` under a key. Raises `WrongValue` for any other value.

    >>> read_number("save_steps", "500", "100"), read_number("min_lr", 0, "1e-6")
    (500.0, 0)
    """
    number = convert_number(value)
    if isinstance(number, bool) or not is_fp32_number(number):
        raise WrongValue.of_key(key, value, "a number", example)
    if number < least:
        raise WrongValue.of_key(key, value, f"a number of at least {least:g}", example)
    return number
