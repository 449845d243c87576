"""Writes docs/api.md, but for its introduction, from the docstrings of what is public, and the
types of a recipe's keys from the schema.
"""

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import finetune
from finetune.config.keys import Key
from finetune.config.schema import NESTED, recipe_keys

KEY_TYPES = Path(__file__).resolve().parents[1] / "finetune" / "recipe_keys.pyi"
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


def make_key_types() -> str:
    """The stub in which every key of a recipe has its type: those that `load_recipe` takes."""
    lines = [f"    {name}: {_type_of(key)}\n" for name, key in recipe_keys().items()]
    return (
        "# Written by benchmarks/api_page.py.\n\n"
        "from collections.abc import Callable, Mapping, Sequence\n"
        "from pathlib import Path\n"
        "from typing import Any, Literal, TypedDict\n\n"
        "class RecipeKeys(TypedDict, total=False):\n" + "".join(lines)
    )


def _type_of(key: Key) -> str:
    if key.name in NESTED:
        return "Any  # sources, rows or a data set: see load_recipe"
    if key.is_python_name:
        each = "str | Callable[..., Any]"
        if key.is_file_or_name:  # a judge among the rewards
            each += " | Mapping[str, Any]"
        return f"{each} | Sequence[{each}] | None"
    text = _written(key.annotation)
    return text.replace("str", "str | Path") if key.is_file_or_name else text


def _written(annotation: Any) -> str:
    """A type as a stub has it; of what only pydantic reads, nothing."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation is Any or annotation is Ellipsis:
        return "Any" if annotation is Any else "..."
    if annotation is types.NoneType:
        return "None"
    if origin is typing.Annotated:
        return _written(arguments[0])
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_written, arguments)))
    if origin is tuple:
        return f"Sequence[{' | '.join(dict.fromkeys(map(_written, arguments[:1])))}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(_written, arguments))}]"
    return str(annotation.__name__)


if __name__ == "__main__":
    PAGE.write_text(make_page())
    KEY_TYPES.write_text(make_key_types())
