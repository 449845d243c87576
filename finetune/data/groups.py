"""Rows as the groups of documents that a method compares, and the texts of these."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from finetune.config.methods import RowKind
from finetune.config.schema import Data, DatasetSource
from finetune.data.classes import parse_class
from finetune.data.formats import (
    Candidate,
    Conversation,
    Document,
    Group,
    ParsedRow,
    Row,
    Text,
    parse_row,
)
from finetune.data.hosted_rows import rewrite_row
from finetune.data.images import hash_images, read_image
from finetune.data.messages import BadRow
from finetune.data.preferences import (
    find_mismatched,
    is_empty_answer,
    join_answer,
    parse_pair,
    parse_prompt,
    parse_ratings,
    parse_scored_pair,
    parse_steps,
)
from finetune.data.render import (
    RenderedText,
    find_image_token,
    render,
    render_embedded,
    render_scored,
    render_turns,
    write_images,
)
from finetune.data.retrieval import parse_ranked, parse_retrieval
from finetune.data.tokenizer import Renderer, add_variables

NOT_UNICODE = "not valid Unicode: its text, or a column's name, has half of a UTF-16 surrogate pair"


@dataclass(slots=True)
class GroupReader:
    """Reads rows as the groups that a method compares.

    Grows while the rows of a source are read, in their order.
    """

    kind: RowKind
    data: Data
    earlier: Document | None = None  # the last rated answer that was read

    def read(self, rows: Sequence[Row | BadRow], source: DatasetSource) -> list[ParsedRow | BadRow]:
        """Reads each of `rows` as groups, or returns what is wrong with it."""
        read = [_read_row(row, source, self.kind, self.data) for row in rows]
        if self.kind == "ratings":
            return self._add_mismatched(read)
        return read

    def _add_mismatched(self, read: list[ParsedRow | BadRow]) -> list[ParsedRow | BadRow]:
        """Adds to each rated answer its second document: its prompt with the next answer, among
        these rows, to another prompt.
        """
        documents = [
            group.documents[0] for row in read if isinstance(row, ParsedRow) for group in row.groups
        ]
        others = iter(find_mismatched(documents, self.earlier))
        self.earlier = documents[-1] if documents else self.earlier
        return [row if isinstance(row, BadRow) else _complete_ratings(row, others) for row in read]


def render_group(
    group: Group, renderer: Renderer, folder: Path = Path()
) -> tuple[tuple[RenderedText, ...], tuple[str, ...]]:
    """Renders the documents of a group.

    Args:
        group: The group.
        renderer: The renderer of its source.
        folder: Where relative paths of images begin.

    Returns:
        The texts, none of a pair that teaches nothing; and the names of the group's findings.

    Raises:
        BadRow: The chat template rejects a document, or a text is not valid Unicode.
    """
    texts = _render_documents(group, renderer, folder)
    encoded = _encode_texts(texts)
    if group.pooling is not None:
        group_hash = _hash_group(group, texts, encoded)
        return _with_hash(texts, group_hash, pooling=group.pooling), ()
    if len(group.documents) == 1:
        return _with_labels(texts, group), ()
    findings: list[str] = []
    if not group.rating and not isinstance(group.documents[0], Candidate):  # a pair
        texts = _begin_alike(group, texts, renderer)
        findings = _check_pair(group, texts)
    if not TEACHES_NOTHING.isdisjoint(findings):
        return (), tuple(findings)
    group_hash = _hash_group(group, texts, encoded)
    labeled = _with_labels(texts, group)
    return _with_hash(labeled, group_hash, rating=group.rating), tuple(findings)


# findings of a pair
TEACHES_NOTHING = {"sides_equal", "side_empty", "side_untrained"}


def _with_hash(
    texts: Iterable[RenderedText], group_hash: int, **fields: Any
) -> tuple[RenderedText, ...]:
    """The texts with the hash of their group, and these `fields`."""
    return tuple(replace(text, group_hash=group_hash, **fields) for text in texts)


def _with_labels(texts: tuple[RenderedText, ...], group: Group) -> tuple[RenderedText, ...]:
    """The texts of a group with the labels of their last tokens, where these are scored."""
    if group.labels is None:
        return texts
    labeled = zip(texts, group.labels, strict=True)
    return tuple(replace(text, spans=(), label=label) for text, label in labeled)


def _render_documents(group: Group, renderer: Renderer, folder: Path) -> tuple[RenderedText, ...]:
    """Renders each document of a group as a text with its images.

    A document alone in its group may become several texts, one for each turn.
    """
    texts: list[RenderedText] = []
    for document in group.documents:
        images = [read_image(image, folder) for image in getattr(document, "images", ())]
        if images:
            # raises for a model without images, whose template would only ask for text
            find_image_token(renderer)
        if group.pooling is not None and isinstance(document, Text):
            rendered: tuple[RenderedText, ...] = (render_embedded(document, renderer),)
        elif len(group.documents) > 1:
            rendered = (render(document, renderer),)
        elif group.labels is not None:
            rendered = (render_scored(document, renderer),)
        else:
            rendered = render_turns(document, renderer)
        texts += [write_images(text, document, images, renderer) for text in rendered]
    return tuple(texts)


def _encode_texts(texts: Sequence[RenderedText]) -> list[bytes]:
    """Each text as UTF-8.

    Raises `BadRow` where one, or what rewards read of its row, is not valid Unicode.
    """
    try:
        for text in texts:
            text.row.encode()
        return [text.text.encode() for text in texts]
    except UnicodeEncodeError:
        raise BadRow(NOT_UNICODE) from None


def _hash_group(group: Group, texts: Sequence[RenderedText], encoded: Sequence[bytes]) -> int:
    """Hashes a group, so that its duplicates have the same hash.

    The hash of a rated answer leaves out its mismatched document, which depends on the rows around
    it.
    """
    if group.rating:
        identity = encoded[0] + bytes([group.rating > 0])
    else:
        identity = b"".join(encoded)
    images = "".join(hash_images(text.images) for text in texts if text.images)
    return xxhash.xxh3_64_intdigest(identity + images.encode())


def _begin_alike(
    group: Group, texts: tuple[RenderedText, ...], renderer: Renderer
) -> tuple[RenderedText, ...]:
    """Returns the texts of a pair with the trained parts of both beginning at the same character.

    An answer may leave its prompt before the prompt's end, as one without reasoning does after a
    prompt that opens <think>. The rest of the prompt then counts as part of the other answer. Texts
    whose prompts differ in another way stay as they are.
    """
    if not all(text.spans for text in texts):
        return texts
    shorter, longer = sorted(map(_take_prompt, texts), key=len)
    own = add_variables(renderer, getattr(group.documents[0], "variables", None))
    if (
        shorter == longer
        or not longer.startswith(shorter)
        or not own.generation_prompt.endswith(longer[len(shorter) :])
    ):
        return texts
    rest_of_prompt = (len(shorter), len(longer))
    alike = []
    for text in texts:
        begins_late = text.spans[0][0] == len(longer)
        if begins_late:
            text = replace(text, spans=(rest_of_prompt, *text.spans))
        alike.append(text)
    return tuple(alike)


def _take_prompt(text: RenderedText) -> str:
    """Returns what stands before the first trained character of a text."""
    return text.text[: text.spans[0][0]]


def _complete_ratings(row: ParsedRow, others: Iterator[Document | None]) -> ParsedRow | BadRow:
    """Adds to each group of a row the mismatched document: its prompt with an answer to another.

    Args:
        row: Its groups have one rated answer each.
        others: A document with an answer to another prompt, for each group; None where there is
            none.
    """
    groups = []
    for group in row.groups:
        rated = group.documents[0]
        other = next(others)
        if other is not None:
            groups.append(replace(group, documents=(rated, join_answer(rated, other))))
    if len(groups) == len(row.groups):
        return replace(row, groups=tuple(groups))
    return BadRow(
        "no answer to another prompt among the rows around it, from which the KL term is estimated"
    )


def _read_row(
    row: Row | BadRow, source: DatasetSource, kind: RowKind, data: Data
) -> ParsedRow | BadRow:
    """Reads one row by the function of its kind in `READERS`, or returns what is wrong with it."""
    if isinstance(row, BadRow):
        return row
    misnamed = [name for name in row if not isinstance(name, str)]  # by a user's function
    if misnamed:
        return BadRow(f"a column's name is {misnamed[0]!r}, and text is expected")
    try:
        "".join(row).encode()  # names of columns are shown in messages and stored in reports
        return READERS[kind](rewrite_row(row, source), source, data)
    except BadRow as problem:
        return problem
    except UnicodeEncodeError:
        return BadRow(NOT_UNICODE)


READERS: Mapping[RowKind, Callable[[Row, DatasetSource, Data], ParsedRow]] = {
    "answers": lambda row, source, _: parse_row(row, source),
    "pairs": lambda row, source, _: parse_pair(row, source),
    "ratings": lambda row, source, _: parse_ratings(row, source),
    "prompts": lambda row, source, _: parse_prompt(row, source),
    "scored_pairs": lambda row, source, _: parse_scored_pair(row, source),
    "classes": parse_class,
    "retrieval": parse_retrieval,
    "ranked": parse_ranked,
    "steps": parse_steps,
}


def _check_pair(group: Group, texts: Sequence[RenderedText]) -> list[str]:
    """Lists what is wrong with a pair, by names of `findings.CHECKS`."""
    names = []
    if any(isinstance(each, Conversation) and not any(each.trained) for each in group.documents):
        names.append("side_untrained")
    elif any(map(is_empty_answer, group.documents)):
        names.append("side_empty")
    if texts[0].text == texts[1].text:
        names.append("sides_equal")
    prompts = {_take_prompt(text) for text in texts if text.spans}
    if len(prompts) > 1:
        names.append("prompts_differ")
    return names
