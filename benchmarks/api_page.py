"""Writes docs/api.md, but for its introduction, from the docstrings of what is public."""

import inspect
import re
from pathlib import Path
from typing import Any

import finetune

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
OF_THE_COMMAND = ("computing", "inputs", "start")  # what run.py alone uses of a session
TYPES = ("MicroBatch", "Recipe", "StepBatch")  # whose attributes may change
BEGINS = "## Chat\n"  # the first of finetune.__all__


def make_page() -> str:
    """The page: its introduction as it is, then each public name with its signature and
    docstring.
    """
    parts = [PAGE.read_text().partition(BEGINS)[0].rstrip() + "\n"]
    for name in finetune.__all__:
        value = getattr(finetune, name)
        parts.append(f"## {name}\n\n{_describe(value, name)}")
        if (
            inspect.isclass(value)
            and not issubclass(value, Exception | tuple)
            and name not in TYPES
        ):
            own = {
                key: each
                for key, each in vars(value).items()
                if is_public(key) and inspect.getdoc(each)
            }
            parts += [f"### {name}.{key}\n\n{_describe(each, key)}" for key, each in own.items()]
    return "\n".join(parts)


def is_public(name: str) -> bool:
    """Whether a script may rely on a class's attribute of this name."""
    return not name.startswith("_") and name not in OF_THE_COMMAND


def _describe(value: Any, name: str) -> str:
    lines = (inspect.getdoc(value) or "").splitlines()
    text = "\n".join(
        lines[: next((i for i, line in enumerate(lines) if line.startswith(">>>")), len(lines))]
    ).strip()
    is_called = name not in TYPES and (
        inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception))
    )
    signature = str(inspect.signature(value)) if is_called else ""
    signature = re.sub(r"self(, )?|'|\b[a-z_.]+\.(?=[A-Z])", "", signature).replace(
        "<factory>", "[]"
    )
    return f"```\n{name}{signature}\n\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(make_page())
