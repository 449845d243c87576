"""The keys of the recipe as the schema declares them: their types, help texts and marks.

A mark stands in a key's `Annotated` type, beside the help text.
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
# a number of steps, or a share of the run's steps: see constants.count_steps
StepsOrShare = Positive | Annotated[float, Gt(0), Lt(1)]


class FileOrName:
    """Marks a key whose value may be a local path.

    The path starts from the working directory, or else from the recipe's folder.
    """


class LocalFolder:
    """Marks a key whose value is the path of a folder on this machine, or a word such as auto."""


class PythonName:
    """Marks a key whose values name functions or classes in files: see user_code.py."""


class ModulePatterns:
    """Marks a key whose list, or whose mapping's keys, are patterns of module names.

    See module_names.py.
    """


class MayChange:
    """Marks a key that a resumed run may change.

    Any other key decides the course of the run: data, model or seed.
    """


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Marks a key for which the reader replaces one value by another."""

    written: Any  # the value in the file
    meant: Any  # the value that replaces it


NO_IN_YAML = ReadAs(written=False, meant="no")  # YAML reads a plain `no` as false


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema."""

    name: str
    section: str  # the attribute of `Recipe` that holds the key; empty if `keys_of` was given none
    annotation: Any  # its `Annotated` type
    default: Any  # dataclasses.MISSING: the key is required
    help: str
    is_file_or_name: bool  # marked FileOrName
    is_local_folder: bool  # marked LocalFolder
    is_python_name: bool  # marked PythonName
    may_change: bool  # marked MayChange
    is_patterns: bool  # marked ModulePatterns
    read_as: ReadAs | None

    @property
    def is_rewards(self) -> bool:
        """Whether each value is a reward: a Python function, a model or a judge."""
        return self.is_python_name and self.is_file_or_name

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


@cache
def keys_of(schema: type, section: str = "") -> dict[str, Key]:
    """Returns the keys of one dataclass of the schema: name -> key.

    `section`: the attribute of `Recipe` that holds the dataclass.
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    keys = {}
    for attribute in fields(schema):
        _, *metadata = typing.get_args(hints[attribute.name])  # of Annotated[type, *metadata]
        keys[attribute.name] = Key(
            name=attribute.name,
            section=section,
            annotation=hints[attribute.name],
            default=attribute.default,
            help=next(text for text in metadata if isinstance(text, str)),
            is_file_or_name=FileOrName in metadata,
            is_local_folder=LocalFolder in metadata,
            is_python_name=PythonName in metadata,
            may_change=MayChange in metadata,
            is_patterns=ModulePatterns in metadata,
            read_as=next((mark for mark in metadata if isinstance(mark, ReadAs)), None),
        )
    return keys


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each value inside mappings and lists of mappings.

    A name is the path to the value, such as `datasets[0].path`. Empty mappings and lists of other
    things are values themselves. `name`: the path to `value`; empty at the top.

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
