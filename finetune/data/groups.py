"""Reads rows as the groups of documents that a method compares, and renders these groups."""

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
    find_last_answers,
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
from finetune.data.sources import RowBatch
from finetune.data.tokenizer import Renderer, add_variables

NOT_UNICODE = "not valid Unicode: its text, or a column's name, has half of a UTF-16 surrogate pair"

WAITING_BATCHES = 100  # batches of rows that may wait for an answer to a second prompt

GroupBatch = tuple[DatasetSource, RowBatch, list[ParsedRow | BadRow]]


@dataclass(slots=True)
class GroupReader:
    """Reads the rows of a source as groups.

    The rows must be read in their order: a rated answer may be completed by an earlier one.
    """

    kind: RowKind
    data: Data
    # the last rated answer that was read, and the last one to another prompt
    answers: tuple[Document, ...] = ()

    def read_batches(
        self, batches: Iterable[tuple[DatasetSource, RowBatch]]
    ) -> Iterator[GroupBatch]:
        """Yields each batch of rows with its source and the groups of its rows.

        What is wrong with a row is returned in its place. The first rated answers wait until an
        answer to a second prompt is read: it may be in a later batch.
        """
        waiting: list[GroupBatch] = []
        for source, batch in batches:
            waiting.append((source, batch, self._parse(batch.rows, source)))
            is_ready = self.kind != "ratings" or len(self.answers) > 1
            if is_ready or len(waiting) == WAITING_BATCHES:
                yield from map(self._complete, waiting)
                waiting = []
        yield from map(self._complete, waiting)

    def _parse(
        self, rows: Sequence[Row | BadRow], source: DatasetSource
    ) -> list[ParsedRow | BadRow]:
        """Reads the groups of a batch of rows, without mismatched documents."""
        parsed_rows = [_read_row(row, source, self.kind, self.data) for row in rows]
        if self.kind == "ratings":
            known = reversed(self.answers)
            self.answers = find_last_answers([*known, *_list_rated(parsed_rows)])
        return parsed_rows

    def _complete(self, batch: GroupBatch) -> GroupBatch:
        """Adds to the group of each rated answer a mismatched document.

        It is the answer's prompt with the answer of a document of the batch to another prompt, or
        one of `answers`. A batch without rated answers stays as it is.
        """
        if self.kind != "ratings":
            return batch
        source, rows, parsed_rows = batch
        mismatched = iter(find_mismatched(_list_rated(parsed_rows), self.answers))
        completed = [
            row if isinstance(row, BadRow) else _complete_ratings(row, mismatched)
            for row in parsed_rows
        ]
        return source, rows, completed


def _list_rated(rows: Iterable[ParsedRow | BadRow]) -> list[Document]:
    """Lists the rated answers of rows."""
    return [
        group.documents[0] for row in rows if isinstance(row, ParsedRow) for group in row.groups
    ]


def render_group(
    group: Group, renderer: Renderer, folder: Path = Path()
) -> tuple[tuple[RenderedText, ...], tuple[str, ...]]:
    """Renders the documents of a group.

    Args:
        group: The group.
        renderer: The renderer of its source.
        folder: The folder to which paths of images are relative.

    Returns:
        The texts (none for a pair from which nothing can be learned), and the findings about the
        group, by their names in `findings.CHECKS`.

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


# findings of a pair from which nothing can be learned
TEACHES_NOTHING = {"sides_equal", "side_empty", "side_untrained"}


def _with_hash(
    texts: Iterable[RenderedText], group_hash: int, **fields: Any
) -> tuple[RenderedText, ...]:
    """Sets the hash of the group, and `fields`, in each text."""
    return tuple(replace(text, group_hash=group_hash, **fields) for text in texts)


def _with_labels(texts: tuple[RenderedText, ...], group: Group) -> tuple[RenderedText, ...]:
    """Sets the label of the last token of each text, the only one that is then trained on.

    Texts of a group without labels stay as they are.
    """
    if group.labels is None:
        return texts
    labeled = zip(texts, group.labels, strict=True)
    return tuple(replace(text, spans=(), label=label) for text, label in labeled)


def _render_documents(group: Group, renderer: Renderer, folder: Path) -> tuple[RenderedText, ...]:
    """Renders each document of a group as a text with its images.

    A document that is a group by itself may become several texts, each with some of its turns.
    """
    texts: list[RenderedText] = []
    for document in group.documents:
        images = [read_image(image, folder) for image in getattr(document, "images", ())]
        if images:
            # Called for its error, which says that the model reads no images. Without it the
            # rendering would only report that the chat template expects text.
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
    """Encodes each text as UTF-8.

    Raises `BadRow` if a text, or what rewards read of its row, is not valid Unicode.
    """
    try:
        for text in texts:
            text.row.encode()
        return [text.text.encode() for text in texts]
    except UnicodeEncodeError:
        raise BadRow(NOT_UNICODE) from None


def _hash_group(group: Group, texts: Sequence[RenderedText], encoded: Sequence[bytes]) -> int:
    """Hashes the texts and images of a group; duplicates of the group have the same hash.

    The mismatched document of a rated answer is left out: it depends on the rows around the answer.

    Args:
        group: The group.
        texts: The texts of its documents.
        encoded: The same texts as UTF-8.
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
    """Makes the trained parts of both texts of a pair begin at the same character.

    One answer may part from the prompt before the prompt's end: an answer without reasoning does,
    after a prompt that opens <think>. The end of the prompt is then trained on as a part of the
    other answer. Texts whose prompts differ in another way stay as they are.
    """
    if not all(text.spans for text in texts):
        return texts
    shorter, longer = sorted(map(_take_prompt, texts), key=len)
    row_renderer = add_variables(renderer, getattr(group.documents[0], "variables", None))
    end_of_prompt = longer[len(shorter) :]
    if (
        shorter == longer
        or not longer.startswith(shorter)
        or not row_renderer.generation_prompt.endswith(end_of_prompt)
    ):
        return texts
    added_span = (len(shorter), len(longer))
    aligned = []
    for text in texts:
        begins_late = text.spans[0][0] == len(longer)
        if begins_late:
            text = replace(text, spans=(added_span, *text.spans))
        aligned.append(text)
    return tuple(aligned)


def _take_prompt(text: RenderedText) -> str:
    """Returns the part of a text before its first trained character."""
    first_span_start, _ = text.spans[0]
    return text.text[:first_span_start]


def _complete_ratings(row: ParsedRow, mismatched: Iterator[Document | None]) -> ParsedRow | BadRow:
    """Adds to each group of a row its mismatched document: the prompt with an answer to another.

    Args:
        row: Each of its groups has one document, a rated answer.
        mismatched: Yields for each group a document that answers another prompt, or None if no such
            document was found; the row is then bad.
    """
    groups = []
    for group in row.groups:
        rated = group.documents[0]
        other = next(mismatched)
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
    """Reads one row by the function of its kind in `READERS`, or returns what is wrong with it.

    A row that could not even be read from its file is a `BadRow` already.
    """
    if isinstance(row, BadRow):
        return row
    # a user's function may make rows with such names
    misnamed = [name for name in row if not isinstance(name, str)]
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
    """Lists what is wrong with a pair, as names in `findings.CHECKS`."""
    names = []
    is_side_masked = any(
        isinstance(document, Conversation) and not any(document.trained)
        for document in group.documents
    )
    if is_side_masked:
        names.append("side_untrained")
    elif any(map(is_empty_answer, group.documents)):
        names.append("side_empty")
    if texts[0].text == texts[1].text:
        names.append("sides_equal")
    prompts = {_take_prompt(text) for text in texts if text.spans}
    if len(prompts) > 1:
        names.append("prompts_differ")
    return names
