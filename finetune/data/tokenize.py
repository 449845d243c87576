"""Rendered texts as tokens and labels: a text is cut where training begins and ends in it, and its
pieces are encoded.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from finetune.config.schema import Pooling
from finetune.constants import IGNORE_INDEX
from finetune.data.formats import Conversation, Question
from finetune.data.render import RenderedText, render
from finetune.data.token_store import Int32s, Int64s, Tokens
from finetune.data.tokenizer import CONTEXT_CHARACTERS, Encoder, Renderer, keeps_border

LONG_TEXT = 2**18  # characters that are encoded at a time; what is longer is cut
CUTS_TRIED = 100
WORD_END = re.compile(r"(?<=\S)(?=\s)")


Places = list[tuple[int, int]]  # (index of a file, number of the row in it)
Stretch = tuple[bool, list[int]]
"""Whether ids that follow one another are trained on, all of them or none; and the ids."""


def tokenize(documents: Sequence[RenderedText], places: Places, encoder: Encoder) -> Tokens:
    """The ids and labels of `documents`, which come from `places`.

    A text is cut where its trained spans begin and end, and the pieces are encoded separately. So
    no token crosses such a border, the mask is exact, and the text before an answer is encoded
    exactly as in the prompt at inference. A piece that follows a special token is encoded as it
    would be within the whole text.
    """
    stretches: list[Stretch] = []
    lengths = np.zeros(len(documents), np.int32)
    for i, own_stretches in enumerate(_encode_documents(documents, encoder)):
        stretches += own_stretches
        lengths[i] = sum(len(ids) for _, ids in own_stretches)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    input_ids, is_trained = _join(stretches)
    labels = _make_labels(input_ids, is_trained, ends[lengths > 0])
    for document, start, end in zip(documents, starts, ends, strict=True):
        own = slice(start, end)
        _relabel(document, labels[own], input_ids[own], is_trained[own], encoder.pad_id)
    # [tokens + 1]: how many labels come before each position
    labels_before = np.concatenate(([0], np.cumsum(labels != IGNORE_INDEX)))
    return Tokens(
        input_ids=input_ids,
        labels=labels,
        lengths=lengths,
        trained=(labels_before[ends] - labels_before[starts]).astype(np.int32),
        files=np.array([file for file, _ in places], np.int32),
        rows=np.array([row for _, row in places], np.int64),
        **_store_facts(documents),
        **_store_images(documents),
    )


def _join(stretches: Sequence[Stretch]) -> tuple[Int32s, NDArray[np.bool_]]:
    """Joins stretches to (int32[tokens]: ids, bool[tokens]: whether each is trained on)."""
    lengths = np.array([len(ids) for _, ids in stretches], np.int64)
    ids = chain.from_iterable(ids for _, ids in stretches)
    input_ids = np.fromiter(ids, np.int32, int(lengths.sum()))
    is_trained = np.array([is_trained for is_trained, _ in stretches], np.bool_)
    return input_ids, np.repeat(is_trained, lengths)


def _encode_documents(
    documents: Sequence[RenderedText], encoder: Encoder
) -> Iterator[list[Stretch]]:
    """Yields each document's stretches: the tokenizer's BOS before plain text, its pieces, and the
    ids of a row that comes as ids.
    """
    pieces = [list(_cut_document(document, encoder)) for document in documents]
    encoded = _encode(chain.from_iterable(pieces), encoder)  # of all, one after another
    for document, own_pieces in zip(documents, pieces, strict=True):
        if document.is_plain:
            stretches: list[Stretch] = [(False, encoder.bos_ids)]
        else:
            stretches = []
        stretches += [(piece.is_trained, next(encoded)) for piece in own_pieces]
        stretches += document.tokens.stretches() if document.tokens else ()
        yield stretches


def encode_prompt(row: Mapping[str, Any], renderer: Renderer, encoder: Encoder) -> list[int]:
    """Returns the ids of a prompt of messages, encoded as the data is.

    `row`: with the prompt, as reward functions get it. Raises `BadRow` where the chat template
    rejects it.
    """
    messages = tuple(row["prompt"])
    conversation = Conversation(
        messages,
        trained=(False,) * len(messages),
        tools=tuple(row.get("tools") or ()),
        variables=row.get("variables") or {},
    )
    # rendering reads the row as JSON: it chooses the environment, whose tools the template writes
    question = Question(conversation, row=json.dumps(row, default=str))
    text = render(question, renderer)
    [stretches] = _encode_documents([text], encoder)
    return [token for _, ids in stretches for token in ids]


def _make_labels(input_ids: Int32s, is_trained: NDArray[np.bool_], ends: Int64s) -> Int32s:
    """int32[tokens]: what each position predicts: the next token of its document, if that is
    trained on.

    Args:
        input_ids: [tokens], of all documents.
        is_trained: [tokens].
        ends: [documents that have tokens], behind the last token of each.
    """
    labels = np.full(len(input_ids), IGNORE_INDEX, np.int32)
    labels[:-1] = np.where(is_trained[1:], input_ids[1:], IGNORE_INDEX)
    labels[ends - 1] = IGNORE_INDEX  # the next token belongs to another document
    return labels


def _relabel(
    document: RenderedText,
    labels: Int32s,
    input_ids: Int32s,
    is_trained: NDArray[np.bool_],
    pad_id: int | None,
) -> None:
    """Gives a document other labels than its next tokens, where it is scored or embedded."""
    if document.label is not None:
        _label_last(labels, input_ids, document.label, pad_id)
    elif document.step_labels:
        _label_steps(labels, is_trained, document.step_labels)
    elif document.pooling is not None:
        _label_pooled(labels, document.pooling)


def _label_last(labels: Int32s, input_ids: Int32s, label: int, pad_id: int | None) -> None:
    """Gives a document one label, at its last token that is not the pad token.

    transformers' sequence classifiers read the score there: where the pad token is also the end of
    text, one token before the end.
    """
    labels[:] = IGNORE_INDEX
    not_padding = np.flatnonzero(input_ids != pad_id)
    if len(not_padding):
        labels[not_padding[-1]] = label


def _label_steps(
    labels: Int32s, is_separator: NDArray[np.bool_], step_labels: tuple[int, ...]
) -> None:
    """Gives a document a label at the last token of each separator.

    `is_separator` is true in as many stretches as there are labels: only separators are trained on,
    and rendering writes one behind each step.
    """
    labels[:] = IGNORE_INDEX
    is_last = is_separator & ~np.append(is_separator[1:], False)
    labels[is_last] = step_labels


def _label_pooled(labels: Int32s, pooling: Pooling) -> None:
    """Marks the tokens whose hidden states make the document's embedding: the last one, or all.

    The label that marks them is 0, and no loss reads it.
    """
    labels[:] = IGNORE_INDEX
    if pooling == "lasttoken":
        labels[-1:] = 0
    else:
        labels[:] = 0


def _store_facts(documents: Sequence[RenderedText]) -> dict[str, NDArray[Any]]:
    """The fields of `Tokens` that hold what each document has beside its text; "kept" is its row,
    which rewards read.
    """
    rows = [document.row.encode() for document in documents]
    return {
        "hashes": np.array([_hash(document) for document in documents], np.uint64),
        "ratings": np.array([document.rating for document in documents], np.int8),
        "kept_sizes": np.array([len(row) for row in rows], np.int64),
        "kept_bytes": np.frombuffer(b"".join(rows), np.uint8),
    }


def _store_images(documents: Sequence[RenderedText]) -> dict[str, NDArray[Any]]:
    """The fields of `Tokens` by which images are found again: their paths, or the bytes of those
    that came with the row. Reads no file.
    """
    images = list(chain.from_iterable(document.images for document in documents))
    stored = [image.stored() for image in images]
    return {
        "image_counts": np.array([len(document.images) for document in documents], np.int32),
        "image_sizes": np.array([len(image) for image in stored], np.int64),
        "image_bytes": np.frombuffer(b"".join(stored), np.uint8),
        "image_hashes": np.array([image.hash for image in images], np.uint64),
    }


def _hash(document: RenderedText) -> int:
    """The hash by which duplicates are found: of the document's text, or `group_hash` where more
    than the text makes a duplicate (ids, images, another document of its group).
    """
    if document.group_hash is None:
        return xxhash.xxh3_64_intdigest(document.text.encode())
    return document.group_hash


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    is_trained: bool
    # Encoded together with the text and removed again: a SentencePiece tokenizer puts a space
    # before a text unless something stands there. It is "" at the start of a document and at a
    # fresh start; the added token that the piece follows, since tokenizers differ in whether a
    # space follows such a token; else "\n".
    prefix: str


def _cut_document(document: RenderedText, encoder: Encoder) -> Iterator[_Piece]:
    """The pieces of a document's text, each short enough to be encoded at once."""
    for piece in _cut_at_borders(document, encoder.added_tokens):
        yield from _cut_long_piece(piece, encoder)


def _cut_at_borders(document: RenderedText, added_tokens: tuple[str, ...]) -> Iterator[_Piece]:
    """Cuts a document's text where its trained spans begin and end, and at `fresh_starts`, where
    the text is encoded as if nothing stood before it.
    """
    text = document.text
    borders = {0, *chain.from_iterable(document.spans), *document.fresh_starts, len(text)}
    # Spans do not overlap: of two with one start the first is empty.
    span_ends = dict(document.spans)  # start -> end
    trained_until = 0  # the end of the last span that has begun
    for start, end in pairwise(sorted(borders)):
        trained_until = span_ends.get(start, trained_until)
        if start == 0 or start in document.fresh_starts:
            prefix = ""
        elif text.endswith(added_tokens, 0, start):
            # of several that end here, the longest
            prefix = max((t for t in added_tokens if text.endswith(t, 0, start)), key=len)
        else:
            prefix = "\n"
        yield _Piece(text[start:end], start < trained_until, prefix)


def _cut_long_piece(piece: _Piece, encoder: Encoder) -> Iterator[_Piece]:
    """Cuts a long piece into parts of about LONG_TEXT characters, where a cut changes no token.

    The tokenizer needs memory of 150 times the text that it encodes at once.
    """
    text = piece.text
    start = 0  # of the part that is not yielded yet
    prefix = piece.prefix
    search_from = LONG_TEXT
    while search_from < len(text):
        border = _find_border(text, search_from, encoder)
        if border is None:  # this part becomes longer
            search_from += LONG_TEXT
            continue
        yield replace(piece, text=text[start:border], prefix=prefix)
        start = border
        prefix = "\n"  # else a tokenizer may put a space before the text
        search_from = border + LONG_TEXT
    yield replace(piece, text=text[start:], prefix=prefix)


def _find_border(text: str, begin: int, encoder: Encoder) -> int | None:
    """The place, in characters, of the first end of a word from `begin` on where a cut changes no
    token; None where none of the first CUTS_TRIED within LONG_TEXT characters is one.
    """
    word_ends = WORD_END.finditer(text, begin, begin + LONG_TEXT)
    for match in islice(word_ends, CUTS_TRIED):
        at = match.start()
        before = text[at - CONTEXT_CHARACTERS : at]
        if keeps_border(encoder.backend, before, text[at : at + CONTEXT_CHARACTERS]):
            return at
    return None


def _encode(pieces: Iterable[_Piece], encoder: Encoder) -> Iterator[list[int]]:
    """Yields the ids of each piece. Encodes as many pieces at a time as have LONG_TEXT
    characters.
    """
    batch: list[_Piece] = []
    size = 0  # characters of the batch
    for piece in pieces:
        if batch and size + len(piece.text) > LONG_TEXT:
            yield from _encode_at_once(batch, encoder)
            batch = []
            size = 0
        batch.append(piece)
        size += len(piece.text)
    yield from _encode_at_once(batch, encoder)


def encode_after(text: str, special_token: str, encoder: Encoder) -> list[int]:
    """The ids of a text that follows a special token, as within the whole text."""
    return _encode_at_once([_Piece(text, is_trained=False, prefix=special_token)], encoder)[0]


def _encode_at_once(pieces: Sequence[_Piece], encoder: Encoder) -> list[list[int]]:
    """Encodes each piece behind its prefix, and removes the prefix's ids again.

    A newline is put before no piece where `newline_ids` is empty: that tokenizer puts no space
    before a text.
    """
    added_tokens = {piece.prefix for piece in pieces} - {"", "\n"}
    prefix_ids = {
        token: encoder.backend.encode(token, add_special_tokens=False).ids for token in added_tokens
    }
    prefix_ids |= {"": [], "\n": encoder.newline_ids}
    texts = []
    for piece in pieces:
        has_prefix = bool(prefix_ids[piece.prefix])
        texts.append(piece.prefix + piece.text if has_prefix else piece.text)
    encodings = encoder.backend.encode_batch_fast(texts, add_special_tokens=False)
    ids_of_pieces = []
    for piece, encoding in zip(pieces, encodings, strict=True):
        own_prefix_ids = prefix_ids[piece.prefix]
        ids = encoding.ids
        if ids[: len(own_prefix_ids)] == own_prefix_ids:
            ids_of_pieces.append(ids[len(own_prefix_ids) :])
        else:  # prefix and text were merged into one token
            alone = encoder.backend.encode(piece.text, add_special_tokens=False)
            ids_of_pieces.append(alone.ids)
    return ids_of_pieces
