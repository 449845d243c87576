"""Rows as groups of documents, as a method compares them: an answer by itself, or a chosen answer with a rejected one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from finetune.data.chat import RenderedText, render
from finetune.data.formats import Document, Row, parse_row
from finetune.data.messages import BadRow
from finetune.data.preferences import is_empty_answer, parse_pair
from finetune.data.renderer import Renderer
from finetune.recipe.method_schema import RowKind
from finetune.recipe.schema import DatasetSource

NOT_UNICODE = "not valid Unicode: its text, or a column's name, has half of a UTF-16 surrogate pair"


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that no batch takes apart; of a pair the chosen one comes first."""

    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """What a row holds. Returned by `read_groups`."""

    groups: tuple[Group, ...]
    format: str
    unused_columns: tuple[str, ...]  # that hold a value
    findings: tuple[str, ...] = ()  # names in `checks.CHECKS`


def read_groups(rows: Sequence[Row | BadRow], source: DatasetSource, kind: RowKind) -> list[RowGroups | BadRow]:
    """The groups of each of `rows`, or what is wrong with it."""
    return [_read_row(row, source, kind) for row in rows]


def render_group(group: Group, renderer: Renderer) -> tuple[tuple[RenderedText, ...], tuple[str, ...]]:
    """(the texts of a group's documents, findings in the group); no text of a pair that teaches nothing.

    Raises `BadRow` where the chat template rejects one of them, or it is not valid Unicode.
    """
    texts = tuple(render(document, renderer) for document in group.documents)
    digest = xxhash.xxh3_64()
    try:
        for text in texts:
            digest.update(text.text.encode())
    except UnicodeEncodeError:
        raise BadRow(NOT_UNICODE) from None
    if len(texts) == 1:
        return texts, ()
    findings = tuple(_check_pair(group, texts))
    if {"sides_equal", "side_empty"} & set(findings):
        return (), findings
    return tuple(replace(text, group_hash=digest.intdigest()) for text in texts), findings


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
    return RowGroups((Group((parsed.document,)),), parsed.format, parsed.unused_columns)


def _read_pair(row: Row, source: DatasetSource) -> RowGroups:
    parsed = parse_pair(row, source)
    findings = ("order_swapped",) if parsed.is_swapped else ()
    group = Group((parsed.pair.chosen, parsed.pair.rejected))
    return RowGroups((group,), "preference", parsed.unused_columns, findings)


READERS: Mapping[RowKind, Callable[[Row, DatasetSource], RowGroups]] = {
    "answers": _read_answer,
    "pairs": _read_pair,
}


def _check_pair(group: Group, texts: Sequence[RenderedText]) -> list[str]:
    """Names of the checks for what is wrong with a pair."""
    found = []
    if any(is_empty_answer(document) for document in group.documents):
        found.append("side_empty")
    if texts[0].text == texts[1].text:
        found.append("sides_equal")
    prompts = [text.text[: text.spans[0][0]] for text in texts if text.spans]
    if len(set(prompts)) > 1:
        found.append("prompts_differ")
    return found
