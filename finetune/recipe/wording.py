"""What is wrong with a value, in plain words: pydantic's findings as sentences for the person who can fix them."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "none_required": "null",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "missing": "a list with one more entry",
}
NOT_FINITE = ("nan", "inf", "infinity")  # text in YAML, which writes .nan and .inf


def what_is_wrong(error: ValidationError, value: Any, also: Any = None) -> str:
    """One sentence on a value that its key does not take. `also`: a value outside its bounds that it takes.

    >>> from pydantic import TypeAdapter
    >>> try: TypeAdapter(int | None).validate_python("8", strict=True)
    ... except ValidationError as error: what_is_wrong(error, "8")
    '"8" does not fit; a whole number is expected; in quotes it is text: write 8'
    """
    details: list[Any] = error.errors(include_url=False)
    takes_number = any(detail["type"] in ("int_type", "float_type") for detail in details)
    if takes_number and isinstance(value, str) and value.lower().lstrip("+-") in NOT_FINITE:
        return f"{value} does not fit; a finite number is expected"
    expected = " or ".join(dict.fromkeys(_expected(detail["type"], detail.get("ctx", {})) for detail in details))
    if also is not None and any(detail["type"].startswith(("greater_than", "less_than")) for detail in details):
        expected += f", or {_shown(also)},"
    return f"{_shown(value)} does not fit; {expected} is expected{_hint(details, value)}"


def _expected(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return f"one of {str(context['expected']).replace(chr(39), '').replace(' or ', ', ')}"
    return EXPECTED[kind].format(**context) if kind in EXPECTED else kind.replace("_", " ")


def _hint(details: Any, value: Any) -> str:
    kinds = {detail["type"] for detail in details}
    if isinstance(value, float) and "int_type" in kinds and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and kinds & {"int_type", "float_type", "bool_type"}:
        try:
            plain = json.loads(value.lower())
        except ValueError:
            return ""
        return f"; in quotes it is text: write {value}" if isinstance(plain, (int, float)) else ""
    if isinstance(value, str) and "literal_error" in kinds:
        known = [
            word for d in details if "expected" in d.get("ctx", {}) for word in d["ctx"]["expected"].split("'")[1::2]
        ]
        close = difflib.get_close_matches(value.lower(), known, n=1)
        return f"; did you mean {close[0]}?" if close else ""
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) < 80 else f"{text[:77]}..."
