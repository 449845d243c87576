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
        """The groups of each of `rows`, or what is wrong with it."""
        read = [_read_row(row, source, self.kind, self.data) for row in rows]
        if self.kind == "ratings":
            return self._add_mismatched(read)
        return read

    def _add_mismatched(self, read: list[ParsedRow | BadRow]) -> list[ParsedRow | BadRow]:
        """Adds the second document of rated answers: the next answer, in these rows, to another
        prompt.
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
    """Returns the texts of a group's documents, and its findings; no text of a pair that teaches
    nothing.

    `folder`: where the paths of images begin.

    Raises `BadRow` where the chat template rejects one of them, or it is not valid Unicode.
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
    """The texts of each document of a group, with its images. The document of a group of one may
    have several, one for each turn.
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
    """A hash of a group by which duplicates are recognized.

    A mismatched answer depends on the rows around it: the same answer, rated alike, is a duplicate.
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
    """The texts of two answers, trained from the same place on, where one departs from the prompt
    before its end.

    One without reasoning, say, after a prompt that opens <think>: the rest of the prompt is part of
    the other answer.
    """
    if not all(text.spans for text in texts):
        return texts
    starts = [text.spans[0][0] for text in texts]
    # what stands before the first trained character
    prompts = [text.text[:start] for text, start in zip(texts, starts, strict=True)]
    short, long = sorted(prompts, key=len)
    own = add_variables(renderer, getattr(group.documents[0], "variables", None))
    if (
        short == long
        or not long.startswith(short)
        or not own.generation_prompt.endswith(long[len(short) :])
    ):
        return texts
    rest_of_prompt = (len(short), len(long))
    alike = []
    for text, start in zip(texts, starts, strict=True):
        if start == len(long):
            spans = (rest_of_prompt, *text.spans)
        else:
            spans = text.spans
        alike.append(replace(text, spans=spans))
    return tuple(alike)


def _complete_ratings(row: ParsedRow, others: Iterator[Document | None]) -> ParsedRow | BadRow:
    groups = []
    for group in row.groups:
        other = next(others)
        if other is not None:
            groups.append(
                replace(
                    group, documents=(group.documents[0], join_answer(group.documents[0], other))
                )
            )
    if len(groups) == len(row.groups):
        return replace(row, groups=tuple(groups))
    return BadRow(
        "no answer to another prompt among the rows around it, from which the KL term is estimated"
    )


def _read_row(
    row: Row | BadRow, source: DatasetSource, kind: RowKind, data: Data
) -> ParsedRow | BadRow:
    if isinstance(row, BadRow):
        return row
    misnamed = [name for name in row if not isinstance(name, str)]  # by a user's function
    if misnamed:
        return BadRow(f"a column's name is {misnamed[0]!r}, and text is expected")
    try:
        "".join(row).encode()  # names of columns are shown in messages and stored in reports
        return READERS[kind](row, source, data)
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
    """Names of the checks for what is wrong with a pair."""
    names = []
    if any(isinstance(each, Conversation) and not any(each.trained) for each in group.documents):
        names.append("side_untrained")
    elif any(map(is_empty_answer, group.documents)):
        names.append("side_empty")
    if texts[0].text == texts[1].text:
        names.append("sides_equal")
    # what stands before the first trained character
    prompts = [text.text[: text.spans[0][0]] for text in texts if text.spans]
    if len(set(prompts)) > 1:
        names.append("prompts_differ")
    return names
