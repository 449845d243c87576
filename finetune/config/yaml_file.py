"""YAML with places: every `key: value` with its line, numbers as in YAML 1.2, and no key taken
twice.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer, ComposerError
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from finetune.errors import UserError

LIMIT_BYTES = 2**18  # PyYAML reads about 80 KB a second
# Where a key stands that is in no file.
COMMAND_LINE = "command line"
LOAD_RECIPE = "load_recipe"
UNREADABLE = object()  # the value of an entry that is reported as a problem already


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` as written in a file (or on the command line), with the place to name in an
    error.

    `places` has the place of each key of a value that is a mapping.
    """

    key: str
    value: Any
    where: str
    places: Mapping[str, str] = field(default_factory=dict)


class _Nodes(Composer, SafeConstructor, Resolver):
    """YAML 1.2's numbers, and no aliases.

    PyYAML alone reads 2e-5 as a string, 1:30 as 90 and 010 as 8. An alias can make a file of ten
    lines a value of gigabytes, or of endless depth; recipes have no need of them.
    """

    reads_aliases = False  # of single values; those of lists and mappings stay refused
    # of the parser
    check_event: Any
    peek_event: Any
    get_event: Any

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            anchored = self.anchors.get(event.anchor)
            if self.reads_aliases and isinstance(anchored, yaml.ScalarNode):
                self.get_event()
                return anchored
            problem = "aliases (*name) are not read here; write the value out"
            raise ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


class _Loader(_Nodes, yaml.SafeLoader):
    """PyYAML's own parser, whose errors say the most."""


class _ForeignLoader(_Loader):
    """Aliases of single values too, which other tools' files use."""

    reads_aliases = True


if yaml.__with_libyaml__:

    class _FastLoader(_Nodes, yaml.cyaml.CParser):  # type: ignore[misc,name-defined]
        """libyaml's parser, ten times as fast."""

        def __init__(self, text: str) -> None:
            yaml.cyaml.CParser.__init__(self, text)  # type: ignore[attr-defined]
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    class _FastForeignLoader(_FastLoader):
        reads_aliases = True


_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$",
    "tag:yaml.org,2002:float": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$",  # noqa: E501
}
_LEFT_OUT = (*_NUMBERS, "tag:yaml.org,2002:timestamp")
_Nodes.yaml_implicit_resolvers = {}
for _first, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _Nodes.yaml_implicit_resolvers[_first] = [
        resolver for resolver in _resolvers if resolver[0] not in _LEFT_OUT
    ]
for _tag, _pattern in _NUMBERS.items():
    _Nodes.add_implicit_resolver(_tag, re.compile(_pattern), list("-+0123456789."))


def read_entries(
    path: Path, nested: Iterable[str] = (), is_foreign: bool = False
) -> tuple[list[Entry], list[str]]:
    """Reads the top-level entries of a YAML file.

    Args:
        path: The file.
        nested: Keys under which a list of mappings is read as a list of lists of entries.
        is_foreign: Whether it is another tool's file, which may have aliases of single values.

    Returns:
        The entries with their places, and a sentence for each mistake in the form of the file.

    Raises:
        UserError: The file cannot be read, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
        if len(content) > LIMIT_BYTES:
            raise UserError(
                f"{path}: more than {LIMIT_BYTES // 1024} KiB of YAML; name a folder or a glob of "
                "files instead"
            )
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not text in UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if path.suffix == ".json":
        # JSON has tabs between its tokens only, where PyYAML takes none
        text = text.replace("\t", " ")
    node = _compose(text, str(path), is_foreign=is_foreign)
    if node is None:
        return [], []
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: a file of `key: value` lines is expected")
    problems: list[str] = []
    entries = _entries_of(
        node, lambda part: f"{path}:{part.start_mark.line + 1}", frozenset(nested), problems
    )
    return entries, problems


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises `UserError`, for what is wrong with a value too.
    """
    entries, problems = read_entries(path)
    if problems:
        raise UserError.of(problems)
    return {entry.key: entry.value for entry in entries}


def find_yaml(path: Path, is_foreign: bool = False) -> dict[str, Any]:
    """Reads what can be read of the mapping in a YAML file; empty where there is no such file, or
    none in it.
    """
    try:
        entries, _ = read_entries(path, is_foreign=is_foreign)
    except UserError:
        return {}
    return {entry.key: entry.value for entry in entries if entry.value is not UNREADABLE}


def _compose(
    text: str, where: str, what: str = "YAML", is_foreign: bool = False
) -> yaml.Node | None:
    """Returns the node of a text; None where it is empty.

    Raises `UserError`, with the line in a file.
    """
    if yaml.__with_libyaml__:
        with suppress(yaml.YAMLError, RecursionError):
            return yaml.compose(text, Loader=_FastForeignLoader if is_foreign else _FastLoader)
    try:
        return yaml.compose(text, Loader=_ForeignLoader if is_foreign else _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and what == "YAML" else ""
        raise UserError(f"{where}{line}: not {what}: {_problem_of(error)}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deep to be read") from None


def read_value(
    text: str, key: str, where: str, nested: Iterable[str] = ()
) -> tuple[Entry, list[str]]:
    """Reads `text` as the YAML value of `key` on a command line, with what is wrong with it."""
    problems: list[str] = []
    try:
        node = _compose(text, f"{where}: {key}", "a YAML value")
    except UserError as error:
        return Entry(key, UNREADABLE, where), [str(error)]
    if node is None:
        return Entry(key, None, where), []
    return _entry(key, node, where, lambda _: where, frozenset(nested), problems), problems


def _entries_of(
    node: yaml.MappingNode,
    place: Callable[[yaml.Node], str],
    nested: frozenset[str] | None,
    problems: list[str],
) -> list[Entry]:
    """Returns the entries of a file, or with `nested` None of an item in one of its lists."""
    entries: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        where = place(key_node)
        if key in entries:
            if nested is None:
                first = ""
            else:
                first = f", first at line {entries[key].where.rsplit(':', 1)[-1]}"
            problems.append(f"{where}: {key}: given twice{first}; keep one")
        else:
            entries[key] = _entry(key, value_node, where, place, nested or frozenset(), problems)
    return list(entries.values())


def _entry(
    key: str,
    node: yaml.Node,
    where: str,
    place: Callable[[yaml.Node], str],
    nested: frozenset[str],
    problems: list[str],
) -> Entry:
    if key in nested and isinstance(node, yaml.SequenceNode):
        items: list[Any] = []
        for item in node.value:
            is_mapping = isinstance(item, yaml.MappingNode)
            items.append(
                _entries_of(item, place, None, problems) if is_mapping else _construct(item)
            )
        return Entry(key, items, where)
    problems += [
        f"{place(twice)}: {twice.value}: given twice; keep one" for twice in _repeated_keys(node)
    ]
    places = {}
    if isinstance(node, yaml.MappingNode):
        places = {str(k.value): place(k) for k, _ in node.value}
    try:
        return Entry(key, _construct(node), where, places)
    except yaml.YAMLError as error:
        problems.append(f"{where}: {key}: {_problem_of(error)}")
    except (ValueError, TypeError, RecursionError) as error:
        # `!!int abc`, a number of 5,000 digits, a list as a key
        problems.append(f"{where}: {key}: {error}")
    return Entry(key, UNREADABLE, where, places)


def _repeated_keys(node: yaml.Node) -> Iterable[yaml.Node]:
    """Yields the keys, at any depth, that their mapping has already."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key_node, value_node in node.value:
            if str(key_node.value) in seen:
                yield key_node
            seen.add(str(key_node.value))
            yield from _repeated_keys(value_node)


def _construct(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _problem_of(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or str(error).splitlines()[0])
