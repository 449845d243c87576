"""Reads YAML strictly: keys have their lines and stand once, and numbers are those of YAML 1.2.

What `write_yaml` writes reads back as the same, here and by YAML 1.1.
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

LIMIT_BYTES = 2**18  # of a file; PyYAML reads about 80 KB a second
# Places of keys that are in no file.
COMMAND_LINE = "command line"
LOAD_RECIPE = "load_recipe"
UNREADABLE = object()  # in place of a value that could not be read and is reported as a problem


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a file or the command line."""

    key: str
    value: Any
    where: str  # its place, for messages: FILE:LINE or the command line
    # if the value is a mapping: key of the mapping -> its place
    places: Mapping[str, str] = field(default_factory=dict)


class _Nodes(Composer, SafeConstructor, Resolver):
    """Makes nodes and values of a parser's events, with numbers of YAML 1.2 and without aliases.

    PyYAML itself reads 2e-5 as text, 1:30 as 90 and 010 as 8. With aliases a file of ten lines
    could be a value of gigabytes, or of endless depth, and recipes do not need them.
    """

    # whether aliases of single values are read; those of lists and mappings never are
    reads_aliases = False
    # methods of the parser, which a subclass adds
    check_event: Any
    peek_event: Any
    get_event: Any

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Makes the node of the next event; raises `ComposerError` for a refused alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            anchored_node = self.anchors.get(event.anchor)
            if self.reads_aliases and isinstance(anchored_node, yaml.ScalarNode):
                self.get_event()
                return anchored_node
            problem = "aliases (*name) are not read here; write the value out"
            raise ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


class _Loader(_Nodes, yaml.SafeLoader):
    """Reads with PyYAML's own parser, whose errors say the most."""


class _ForeignLoader(_Loader):
    """Reads aliases of single values too, for files of other tools."""

    reads_aliases = True


# libyaml is optional when PyYAML is built
if yaml.__with_libyaml__:

    class _FastLoader(_Nodes, yaml.cyaml.CParser):  # type: ignore[misc,name-defined]
        """Reads with libyaml's parser, which is ten times as fast."""

        def __init__(self, text: str) -> None:
            # one by one, since none of them calls super().__init__
            yaml.cyaml.CParser.__init__(self, text)  # type: ignore[attr-defined]
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    class _FastForeignLoader(_FastLoader):
        """Reads aliases of single values too, for files of other tools."""

        reads_aliases = True


_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$",
    "tag:yaml.org,2002:float": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$",  # noqa: E501
}
# A resolver gives a plain value its type by a pattern: {first character: [(type, pattern)]}. Those
# of PyYAML are kept except for numbers, which are replaced, and dates, which stay text.
_DROPPED_TAGS = (*_NUMBERS, "tag:yaml.org,2002:timestamp")
_Nodes.yaml_implicit_resolvers = {}
for _first_character, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _Nodes.yaml_implicit_resolvers[_first_character] = [
        (tag, pattern) for tag, pattern in _resolvers if tag not in _DROPPED_TAGS
    ]


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that would be read as a number, by YAML 1.1 or by 1.2."""


for _tag, _pattern in _NUMBERS.items():
    for _class in (_Nodes, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list("-+0123456789."))


def write_yaml(value: Any, **options: Any) -> str:
    """Returns `value` as YAML, keys in their order. `options`: those of `yaml.dump`."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options))


def read_entries(
    path: Path, nested: Iterable[str] = (), is_foreign: bool = False
) -> tuple[list[Entry], list[str]]:
    """Reads the top-level entries of a YAML file.

    Args:
        path: The file.
        nested: Keys whose value is a list of mappings. Each mapping is read as a list of entries.
        is_foreign: Whether the file is another tool's, which may have aliases of single values.

    Returns:
        (entries, problems). A problem is a sentence with its place, such as a key that stands
        twice. Both are empty for an empty file.

    Raises:
        UserError: The file cannot be read, is no YAML, or is not a mapping.
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
        # JSON may have tabs between its tokens, and nowhere else; PyYAML accepts none
        text = text.replace("\t", " ")
    node = _compose(text, str(path), is_foreign=is_foreign)
    if node is None:
        return [], []
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: a file of `key: value` lines is expected")
    problems: list[str] = []
    entries = _read_mapping(
        node, lambda part: f"{path}:{part.start_mark.line + 1}", frozenset(nested), problems
    )
    return entries, problems


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file; raises `UserError` for any problem in it."""
    entries, problems = read_entries(path)
    if problems:
        raise UserError.of(problems)
    return {entry.key: entry.value for entry in entries}


def find_yaml(path: Path, is_foreign: bool = False) -> dict[str, Any]:
    """Returns those keys of a YAML file whose values are readable.

    Returns an empty mapping if there is no such file, or no mapping in it.
    """
    try:
        entries, _ = read_entries(path, is_foreign=is_foreign)
    except UserError:
        return {}
    return {entry.key: entry.value for entry in entries if entry.value is not UNREADABLE}


def _compose(
    text: str, where: str, what: str = "YAML", is_foreign: bool = False
) -> yaml.Node | None:
    """Parses a text to a YAML node; returns None if the text is empty.

    Args:
        text: The text.
        where: Its place, for messages.
        what: What the text should be, for messages. "YAML" is a file, whose line is named too.
        is_foreign: Whether aliases of single values are read.

    Raises:
        UserError: The text is no YAML.
    """
    if yaml.__with_libyaml__:
        # after an error the slow parser below reads the text again, since its message is better
        with suppress(yaml.YAMLError, RecursionError):
            return yaml.compose(text, Loader=_FastForeignLoader if is_foreign else _FastLoader)
    try:
        return yaml.compose(text, Loader=_ForeignLoader if is_foreign else _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and what == "YAML" else ""
        raise UserError(f"{where}{line}: not {what}: {_describe_problem(error)}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deep to be read") from None


def read_value(
    text: str, key: str, where: str, nested: Iterable[str] = ()
) -> tuple[Entry, list[str]]:
    """Reads a text as the YAML value of `key`: returns (entry, problems).

    Args:
        text: The value, such as one on a command line.
        key: Its key.
        where: The place of both, for messages.
        nested: See `read_entries`.
    """
    problems: list[str] = []
    try:
        node = _compose(text, f"{where}: {key}", "a YAML value")
    except UserError as error:
        return Entry(key, UNREADABLE, where), [str(error)]
    if node is None:
        return Entry(key, None, where), []
    entry = _read_entry(key, node, where, lambda _: where, frozenset(nested), problems)
    return entry, problems


def _read_mapping(
    node: yaml.MappingNode,
    find_place: Callable[[yaml.Node], str],
    nested: frozenset[str] | None,
    problems: list[str],
) -> list[Entry]:
    """Reads the entries of a mapping, and adds what is wrong with them to `problems`.

    Args:
        node: The mapping.
        find_place: Returns the place of a node, for messages.
        nested: See `read_entries`; None for a mapping in such a list.
        problems: Gets a sentence for each problem.
    """
    entries: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        where = find_place(key_node)
        if key in entries:
            first = ""
            if nested is not None:
                _, _, first_line = entries[key].where.rpartition(":")
                first = f", first at line {first_line}"
            problems.append(f"{where}: {key}: given twice{first}; keep one")
        else:
            entries[key] = _read_entry(
                key, value_node, where, find_place, nested or frozenset(), problems
            )
    return list(entries.values())


def _read_entry(
    key: str,
    node: yaml.Node,
    where: str,
    find_place: Callable[[yaml.Node], str],
    nested: frozenset[str],
    problems: list[str],
) -> Entry:
    """Makes the entry of a key and the node of its value; see `_read_mapping`.

    The value is `UNREADABLE` if it could not be read. `where`: the key's place.
    """
    if key in nested and isinstance(node, yaml.SequenceNode):
        items: list[Any] = []
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                items.append(_read_mapping(item, find_place, None, problems))
            else:
                items.append(_construct(item))
        return Entry(key, items, where)
    problems += [
        f"{find_place(key_node)}: {key_node.value}: given twice; keep one"
        for key_node in _find_repeated_keys(node)
    ]
    places = {}
    if isinstance(node, yaml.MappingNode):
        places = {str(key_node.value): find_place(key_node) for key_node, _ in node.value}
    try:
        return Entry(key, _construct(node), where, places)
    except yaml.YAMLError as error:
        problems.append(f"{where}: {key}: {_describe_problem(error)}")
    except (ValueError, TypeError, RecursionError) as error:
        # for example `!!int abc`, a number of 5,000 digits, or a list as a key
        problems.append(f"{where}: {key}: {error}")
    return Entry(key, UNREADABLE, where, places)


def _find_repeated_keys(node: yaml.Node) -> Iterable[yaml.Node]:
    """Yields each key that its mapping had before, from mappings at any depth."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _find_repeated_keys(item)
    elif isinstance(node, yaml.MappingNode):
        keys = set()
        for key_node, value_node in node.value:
            if str(key_node.value) in keys:
                yield key_node
            keys.add(str(key_node.value))
            yield from _find_repeated_keys(value_node)


def _construct(node: yaml.Node) -> Any:
    """Returns the Python value of a node; raises as PyYAML's constructors do."""
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _describe_problem(error: yaml.YAMLError) -> str:
    """Returns the sentence of a PyYAML error on what is wrong, without places and context."""
    return str(getattr(error, "problem", None) or str(error).splitlines()[0])
