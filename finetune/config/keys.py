"""A key of the recipe: its marks beside type and help, and the keys that a class of the schema
has.
"""

import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any

from annotated_types import Gt, Lt
from pydantic import Field

Positive = Annotated[int, Gt(0)]
FileName = Annotated[str, Field(pattern=r"^[^\x00]+$")]
# a share of the run's steps; see constants.count_steps
StepsOrShare = Positive | Annotated[float, Gt(0), Lt(1)]


class FileOrName:
    """Marks a key whose value may be a local path, from the working directory or else the recipe's
    folder.
    """


class PythonName:
    """Marks a key whose values name functions or classes in files: see user_code.py."""


class ModulePatterns:
    """Marks a key whose value (a list, or a mapping's keys) is patterns of module names: see
    module_names.py.
    """


class SameOnResume:
    """Marks a key that decides the course of a run (data, model, batch, seed), which a resumed run
    must keep.
    """


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Marks a key for which a value that other tools' files have is read as one of ours."""

    written: Any
    meant: Any


NO_IN_YAML = ReadAs(False, "no")  # YAML reads a plain `no` as false


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema. `default` is dataclasses.MISSING where the key must be given."""

    name: str
    section: str
    annotation: Any
    default: Any
    help: str
    is_file_or_name: bool
    is_python_name: bool
    same_on_resume: bool
    is_patterns: bool
    read_as: ReadAs | None

    @property
    def is_rewards(self) -> bool:
        """Whether each value is a Python function, a model or a judge."""
        return self.is_python_name and self.is_file_or_name

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


@cache
def keys_of(schema: type, section: str = "") -> dict[str, Key]:
    """Returns the keys of one dataclass of the schema, by name."""
    hints = typing.get_type_hints(schema, include_extras=True)
    keys = {}
    for attribute in fields(schema):
        metadata = typing.get_args(hints[attribute.name])[1:]
        keys[attribute.name] = Key(
            name=attribute.name,
            section=section,
            annotation=hints[attribute.name],
            default=attribute.default,
            help=next(text for text in metadata if isinstance(text, str)),
            is_file_or_name=FileOrName in metadata,
            is_python_name=PythonName in metadata,
            same_on_resume=SameOnResume in metadata,
            is_patterns=ModulePatterns in metadata,
            read_as=next((mark for mark in metadata if isinstance(mark, ReadAs)), None),
        )
    return keys


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values inside mappings and lists of mappings, under names such as
    `datasets[0].path`.

    >>> dict(leaves({"seed": 1, "datasets": [{"path": "a"}, {"path": "b"}]}))
    {'seed': 1, 'datasets[0].path': 'a', 'datasets[1].path': 'b'}
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from leaves(item, f"{name}[{number}]")
    else:
        yield name, value
