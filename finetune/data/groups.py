"""Rows as groups of documents, as a method compares them: an answer by itself, chosen with rejected, rated with mismatched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from finetune.config.methods import RowKind
from finetune.config.schema import DatasetSource
from finetune.data.formats import Conversation, Document, Row, name_rendering, parse_row
from finetune.data.messages import BadRow
from finetune.data.preferences import is_empty_answer, parse_pair
from finetune.data.ratings import find_mismatched, join_answer, parse_ratings
from finetune.data.render import RenderedText, render, render_turns
from finetune.data.template import Renderer

NOT_UNICODE = "not valid Unicode: its text, or a column's name, has half of a UTF-16 surrogate pair"


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that no batch takes apart: an answer; chosen and rejected; a rated answer and the same prompt with another's."""

    documents: tuple[Document, ...]
    rating: int = 0  # 1: a good answer, -1: a bad one, 0: not rated


@dataclass(frozen=True, slots=True)
class RowGroups:
    """What a row holds. Returned by `GroupReader.read`."""

    groups: tuple[Group, ...]
    format: str  # of `name_rendering`
    unused_columns: tuple[str, ...]  # that hold a value
    findings: tuple[str, ...] = ()  # names in `checks.CHECKS`


@dataclass(slots=True)
class GroupReader:
    """Reads rows as the groups that a method compares. Grows while the rows of a source are read, in their order."""

    kind: RowKind
    earlier: Document | None = None  # the last rated answer that was read

    def read(self, rows: Sequence[Row | BadRow], source: DatasetSource) -> list[RowGroups | BadRow]:
        """The groups of each of `rows`, or what is wrong with it."""
        read = [_read_row(row, source, self.kind) for row in rows]
        return self._add_mismatched(read) if self.kind == "ratings" else read

    def _add_mismatched(self, read: list[RowGroups | BadRow]) -> list[RowGroups | BadRow]:
        """With the second document of rated answers: the next answer, in these rows, to another prompt."""
        documents = [group.documents[0] for row in read if isinstance(row, RowGroups) for group in row.groups]
        others = iter(find_mismatched(documents, self.earlier))
        self.earlier = documents[-1] if documents else self.earlier
        return [row if isinstance(row, BadRow) else _complete_ratings(row, others) for row in read]


def render_group(group: Group, renderer: Renderer) -> tuple[tuple[RenderedText, ...], tuple[str, ...]]:
    """(the texts of a group's documents, findings in the group); no text of a pair that teaches nothing.

    Raises `BadRow` where the chat template rejects one of them, or it is not valid Unicode.
    """
    if len(group.documents) == 1:
        texts = render_turns(group.documents[0], renderer)
    else:
        texts = tuple(render(document, renderer) for document in group.documents)
    try:
        encoded = [text.text.encode() for text in texts]
    except UnicodeEncodeError:
        raise BadRow(NOT_UNICODE) from None
    if len(group.documents) == 1:
        return texts, ()
    findings = () if group.rating else tuple(_check_pair(group, texts))
    if {"sides_equal", "side_empty", "side_untrained"} & set(findings):
        return (), findings
    # A mismatched answer depends on the rows around it: the same answer, rated alike, is a duplicate.
    identity = b"".join(encoded) if not group.rating else encoded[0] + bytes([group.rating > 0])
    group_hash = xxhash.xxh3_64_intdigest(identity)
    return tuple(replace(text, group_hash=group_hash, rating=group.rating) for text in texts), findings


def _complete_ratings(row: RowGroups, others: Iterator[Document | None]) -> RowGroups | BadRow:
    groups = []
    for group in row.groups:
        other = next(others)
        if other is not None:
            groups.append(replace(group, documents=(group.documents[0], join_answer(group.documents[0], other))))
    if len(groups) == len(row.groups):
        return replace(row, groups=tuple(groups))
    return BadRow("no answer to another prompt among the rows around it, from which kto estimates its KL term")


def _read_row(row: Row | BadRow, source: DatasetSource, kind: RowKind) -> RowGroups | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        "".join(row).encode()  # names of columns are shown in messages and stored in reports
        return READERS[kind](row, source)
    except BadRow as problem:
        return problem
    except UnicodeEncodeError:
        return BadRow(NOT_UNICODE)


def _read_answer(row: Row, source: DatasetSource) -> RowGroups:
    parsed = parse_row(row, source)
    row_format = name_rendering(parsed.format, parsed.document)
    return RowGroups((Group((parsed.document,)),), row_format, parsed.unused_columns, parsed.findings)


def _read_pair(row: Row, source: DatasetSource) -> RowGroups:
    parsed = parse_pair(row, source)
    group = Group((parsed.pair.chosen, parsed.pair.rejected))
    row_format = name_rendering("preference", parsed.pair.chosen)
    return RowGroups((group,), row_format, parsed.unused_columns, parsed.findings)


def _read_ratings(row: Row, source: DatasetSource) -> RowGroups:
    parsed = parse_ratings(row, source)
    groups = tuple(Group((rated.document,), 1 if rated.is_good else -1) for rated in parsed.rated)
    row_format = name_rendering(parsed.format, parsed.rated[0].document)
    return RowGroups(groups, row_format, parsed.unused_columns, parsed.findings)


READERS: Mapping[RowKind, Callable[[Row, DatasetSource], RowGroups]] = {
    "answers": _read_answer,
    "pairs": _read_pair,
    "ratings": _read_ratings,
}


def _is_masked(document: Document) -> bool:
    return isinstance(document, Conversation) and not any(document.trained)


def _check_pair(group: Group, texts: Sequence[RenderedText]) -> list[str]:
    """Names of the checks for what is wrong with a pair."""
    found = []
    if any(_is_masked(document) for document in group.documents):
        found.append("side_untrained")
    elif any(is_empty_answer(document) for document in group.documents):
        found.append("side_empty")
    if texts[0].text == texts[1].text:
        found.append("sides_equal")
    prompts = [text.text[: text.spans[0][0]] for text in texts if text.spans]
    if len(set(prompts)) > 1:
        found.append("prompts_differ")
    return found
