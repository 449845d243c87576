"""Rendered documents as tokens and labels, many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from finetune.constants import IGNORE_INDEX
from finetune.data.chat import Rendered
from finetune.data.token_store import Tokens


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer as pieces of text need it. Source: `encoder`."""

    backend: Any  # tokenizers.Tokenizer
    bos_ids: list[int]  # what it puts before plain text
    added_tokens: tuple[str, ...]  # those that it finds in a text before anything else, the special ones among them
    # What a newline becomes where the tokenizer puts a space before every text (SentencePiece's way); else empty.
    newline_ids: list[int]


def encoder(tokenizer: Any) -> Encoder:
    """The encoder of a fast tokenizer of transformers."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    bare, wrapped = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    newline, after = (backend.encode(text, add_special_tokens=False).ids for text in ("\n", "\na"))
    bos_ids = wrapped[: wrapped.index(bare[0])] if bare and bare[0] in wrapped else []
    added = tuple(token.content for token in backend.get_added_tokens_decoder().values())
    return Encoder(backend, bos_ids, added, [] if after == newline + bare else newline)


def tokenize(documents: Sequence[Rendered], rows: Sequence[tuple[int, int]], by: Encoder) -> Tokens:
    """Encodes `documents`, whose (file, row number) are `rows`.

    A text is cut at the borders of its trained stretches and the pieces are encoded apart. So no token lies across a
    border, the mask is exact, and what stands before an answer is encoded just as it is when the model is asked. A piece
    behind a special token is encoded as the whole text would be there.
    """
    pieces = [list(_pieces(document, by.added_tokens)) for document in documents]
    encoded = iter(_encode([piece for of_document in pieces for piece in of_document], by))
    ids: list[list[int]] = []
    trained: list[bool] = []
    lengths = np.zeros(len(documents), np.int32)
    for i, (document, of_document) in enumerate(zip(documents, pieces, strict=True)):
        found = [by.bos_ids] if document.is_plain else []
        trained += [False] * len(found) + [piece.trained for piece in of_document]
        found += [next(encoded) for _ in of_document]
        lengths[i] = sum(map(len, found))
        ids += found
    flat = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum(dtype=np.int64)))
    labels = _labels(flat, np.repeat(trained, np.fromiter(map(len, ids), np.int64, len(ids))), lengths)
    counts = np.concatenate(([0], np.cumsum(labels != IGNORE_INDEX)))
    ends = np.cumsum(lengths, dtype=np.int64)
    return Tokens(
        input_ids=flat,
        labels=labels,
        lengths=lengths,
        trained=(counts[ends] - counts[ends - lengths]).astype(np.int32),
        files=np.array([file for file, _ in rows], np.int32),
        rows=np.array([row for _, row in rows], np.int64),
        hashes=np.array([xxhash.xxh3_64_intdigest(document.text.encode()) for document in documents], np.uint64),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    trained: bool
    # What is encoded before the text and taken off again, as it decides whether a space is put before the text:
    before: str  # the special token that it follows; "\n" for any other text; "" at the start of a document


def _pieces(document: Rendered, added_tokens: tuple[str, ...]) -> Iterator[_Piece]:
    """The text of a document, cut at the borders of its trained stretches."""
    text = document.text

    def piece(start: int, end: int, trained: bool) -> _Piece:
        if start == 0:
            return _Piece(text[:end], trained, "")
        if not text.endswith(added_tokens, 0, start):
            return _Piece(text[start:end], trained, "\n")
        before = max((token for token in added_tokens if text.endswith(token, 0, start)), key=len)
        return _Piece(text[start:end], trained, before)

    position = 0
    for start, end in document.spans:
        if start > position:
            yield piece(position, start, trained=False)
        if end > start:
            yield piece(start, end, trained=True)
        position = end
    if position < len(text):
        yield piece(position, len(text), trained=False)


def _encode(pieces: Sequence[_Piece], by: Encoder) -> list[list[int]]:
    """The ids of each piece, without those of what stands before it."""
    contexts = {piece.before for piece in pieces} - {"", "\n"}
    ids_of = {text: by.backend.encode(text, add_special_tokens=False).ids for text in contexts}
    ids_of |= {"": [], "\n": by.newline_ids}
    texts = [piece.text if not ids_of[piece.before] else piece.before + piece.text for piece in pieces]
    encoded = [e.ids for e in by.backend.encode_batch_fast(texts, add_special_tokens=False)]
    return [
        ids[len(before) :]
        if ids[: len(before)] == before
        else by.backend.encode(piece.text, add_special_tokens=False).ids  # the two have merged into one token
        for piece, ids, before in zip(pieces, encoded, (ids_of[piece.before] for piece in pieces), strict=True)
    ]


def _labels(
    flat: np.ndarray[Any, np.dtype[np.int32]], is_trained: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32[tokens]: at every position the next token of the document where that one is trained, else IGNORE_INDEX."""
    labels = np.full(len(flat), IGNORE_INDEX, np.int32)
    labels[:-1] = np.where(is_trained[1:], flat[1:], IGNORE_INDEX)
    ends = np.cumsum(lengths, dtype=np.int64)[lengths > 0]
    labels[ends - 1] = IGNORE_INDEX  # what follows is another document
    return labels
