"""The schema as data: every key with its section, type, default and help."""

import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from finetune.config.markers import FileOrName, ModulePatterns, ReadAs, SameOnResume
from finetune.config.schema import SECTIONS, DatasetSource

NESTED: dict[str, type] = {"datasets": DatasetSource, "eval_datasets": DatasetSource}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema. `default` is dataclasses.MISSING where the key must be given."""

    name: str
    section: str
    annotation: Any
    default: Any
    help: str
    is_file_or_name: bool
    same_on_resume: bool
    is_patterns: bool
    read_as: ReadAs | None

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


@cache
def keys_of(schema: type, section: str = "") -> dict[str, Key]:
    """The keys of one dataclass of the schema, by name."""
    hints = typing.get_type_hints(schema, include_extras=True)
    keys = {}
    for field in fields(schema):
        metadata = typing.get_args(hints[field.name])[1:]
        keys[field.name] = Key(
            name=field.name,
            section=section,
            annotation=hints[field.name],
            default=field.default,
            help=next(text for text in metadata if isinstance(text, str)),
            is_file_or_name=FileOrName in metadata,
            same_on_resume=SameOnResume in metadata,
            is_patterns=ModulePatterns in metadata,
            read_as=next((mark for mark in metadata if isinstance(mark, ReadAs)), None),
        )
    return keys


@cache
def recipe_keys() -> dict[str, Key]:
    """Every top-level key of a recipe file, by name."""
    return {name: key for section, schema in SECTIONS.items() for name, key in keys_of(schema, section).items()}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values inside mappings and lists of mappings, under names such as `datasets[0].path`.

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
