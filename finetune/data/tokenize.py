"""Rendered texts as tokens and labels: a text is cut at the borders of its trained spans, and the
pieces are encoded separately.
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
from finetune.errors import UserError

LONG_TEXT = 2**18  # characters that are encoded at a time; a longer text is cut
LONGEST_TOKEN = 1024  # characters before a piece that are searched for an added token
MAX_CUTS_TRIED = 100  # ends of words at which a cut of a long text is tried
WORD_END = re.compile(r"(?<=\S)(?=\s)")


Places = list[tuple[int, int]]  # of each document: (index of the file, number of the row in it)
Stretch = tuple[bool, list[int]]
"""Consecutive ids that are all trained on, or all not: (whether they are trained on, the ids)."""


def tokenize(documents: Sequence[RenderedText], places: Places, encoder: Encoder) -> Tokens:
    """Encodes documents to ids and labels. `places` says where each document comes from.

    A text is cut where its trained spans begin and end, and the pieces are encoded separately. So
    no token crosses such a border, the mask is exact, and the text before an answer is encoded
    exactly as in the prompt at inference. A piece that follows a special token is encoded as it
    would be within the whole text.
    """
    stretches: list[Stretch] = []
    lengths = np.zeros(len(documents), np.int32)
    for i, document_stretches in enumerate(_encode_documents(documents, encoder)):
        stretches += document_stretches
        lengths[i] = sum(len(ids) for _, ids in document_stretches)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    input_ids, is_trained = _join_stretches(stretches)
    labels = _make_labels(input_ids, is_trained, ends[lengths > 0])
    for document, start, end in zip(documents, starts, ends, strict=True):
        tokens = slice(start, end)
        # Slices of arrays are views: this writes into `labels`.
        _replace_labels(
            document, labels[tokens], input_ids[tokens], is_trained[tokens], encoder.pad_id
        )
    # [tokens + 1]: the number of labels before each position
    labels_before = np.concatenate(([0], np.cumsum(labels != IGNORE_INDEX)))
    return Tokens(
        input_ids=input_ids,
        labels=labels,
        lengths=lengths,
        trained=(labels_before[ends] - labels_before[starts]).astype(np.int32),
        files=np.array([file for file, _ in places], np.int32),
        rows=np.array([row for _, row in places], np.int64),
        **_make_fact_columns(documents),
        **_make_image_columns(documents),
    )


def _join_stretches(stretches: Sequence[Stretch]) -> tuple[Int32s, NDArray[np.bool_]]:
    """Joins stretches to int32[tokens] of ids, and bool[tokens]: whether a token is trained on."""
    lengths = np.array([len(ids) for _, ids in stretches], np.int64)
    ids = chain.from_iterable(ids for _, ids in stretches)
    input_ids = np.fromiter(ids, np.int32, int(lengths.sum()))
    is_trained = np.array([is_trained for is_trained, _ in stretches], np.bool_)
    return input_ids, np.repeat(is_trained, lengths)


def _encode_documents(
    documents: Sequence[RenderedText], encoder: Encoder
) -> Iterator[list[Stretch]]:
    """Yields the stretches of each document.

    They are the tokenizer's BOS if the document is plain text, then the pieces of the text, then
    the ids of a row that comes as ids.
    """
    pieces = [list(_cut_document(document, encoder)) for document in documents]
    ids = _encode_pieces(chain.from_iterable(pieces), encoder)  # of all documents' pieces
    for document, document_pieces in zip(documents, pieces, strict=True):
        if document.is_plain:
            stretches: list[Stretch] = [(False, encoder.bos_ids)]
        else:
            stretches = []
        stretches += [(piece.is_trained, next(ids)) for piece in document_pieces]
        stretches += document.tokens.stretches() if document.tokens else ()
        yield stretches


def encode_prompt(row: Mapping[str, Any], renderer: Renderer, encoder: Encoder) -> list[int]:
    """Encodes a prompt of messages in the same way as the training data.

    `row`: the prompt's row as reward functions get it. Raises `BadRow` if the chat template rejects
    the prompt.
    """
    messages = tuple(row["prompt"])
    conversation = Conversation(
        messages,
        trained=(False,) * len(messages),
        tools=tuple(row.get("tools") or ()),
        variables=row.get("variables") or {},
    )
    # Rendering reads the row's JSON to choose the environment whose tools the template writes.
    question = Question(conversation, row=json.dumps(row, default=str))
    rendered = render(question, renderer)
    [stretches] = _encode_documents([rendered], encoder)
    return [token for _, ids in stretches for token in ids]


def _make_labels(input_ids: Int32s, is_trained: NDArray[np.bool_], ends: Int64s) -> Int32s:
    """Makes int32[tokens] of labels: the next token of the document, if that is trained on.

    Any other label is IGNORE_INDEX.

    Args:
        input_ids: [tokens], of all documents.
        is_trained: [tokens].
        ends: [documents that have tokens]: the position behind the document's last token.
    """
    labels = np.full(len(input_ids), IGNORE_INDEX, np.int32)
    labels[:-1] = np.where(is_trained[1:], input_ids[1:], IGNORE_INDEX)
    labels[ends - 1] = IGNORE_INDEX  # the next token belongs to another document
    return labels


def _replace_labels(
    document: RenderedText,
    labels: Int32s,
    input_ids: Int32s,
    is_trained: NDArray[np.bool_],
    pad_id: int | None,
) -> None:
    """Replaces a document's labels, in place, if the document is scored or embedded.

    The arrays hold the document's tokens only.
    """
    if document.label is not None:
        _label_last(labels, input_ids, document.label, pad_id)
    elif document.step_labels:
        _label_steps(labels, is_trained, document.step_labels)
    elif document.pooling is not None:
        _label_pooled(labels, document.pooling)


def _label_last(labels: Int32s, input_ids: Int32s, label: int, pad_id: int | None) -> None:
    """Gives a document one label, at its last token that is not the pad token.

    transformers' sequence classifiers read the score there. If the end-of-text token is also the
    pad token, that is before the end of text.
    """
    labels[:] = IGNORE_INDEX
    not_padding = np.flatnonzero(input_ids != pad_id)
    if len(not_padding):
        labels[not_padding[-1]] = label


def _label_steps(
    labels: Int32s, is_separator: NDArray[np.bool_], step_labels: tuple[int, ...]
) -> None:
    """Gives a document the label of each step (1 for right, 0 for wrong), at the last token of the
    step's separator.

    The score is read at that token, so labels are not shifted as those of next tokens are.
    Rendering writes one separator behind each step, and only separators are trained on. So
    `is_separator` has one run of true values for each of `step_labels`.

    Raises `UserError` if a step or a separator has no tokens.
    """
    labels[:] = IGNORE_INDEX
    is_last = is_separator & ~np.append(is_separator[1:], False)
    if is_last.sum() != len(step_labels):
        raise UserError(
            f"step_separator: {is_last.sum()} of a row's {len(step_labels)} steps end with tokens "
            "of their own, since the tokenizer drops white space; set another step_separator, or "
            "remove steps of white space"
        )
    labels[is_last] = step_labels


def _label_pooled(labels: Int32s, pooling: Pooling) -> None:
    """Marks the tokens whose hidden states make the document's embedding: the last one, or all.

    They get the label 0. No loss reads its value.
    """
    labels[:] = IGNORE_INDEX if pooling == "lasttoken" else 0
    labels[-1:] = 0


def _make_fact_columns(documents: Sequence[RenderedText]) -> dict[str, NDArray[Any]]:
    """Makes the fields of `Tokens` for duplicates, ratings and the prompts' rows.

    The "kept" fields hold the row that rewards read; it is empty for any other document.
    """
    rows = [document.row.encode() for document in documents]
    return {
        "hashes": np.array([_hash_document(document) for document in documents], np.uint64),
        "ratings": np.array([document.rating for document in documents], np.int8),
        "kept_sizes": np.array([len(row) for row in rows], np.int64),
        "kept_bytes": np.frombuffer(b"".join(rows), np.uint8),
    }


def _make_image_columns(documents: Sequence[RenderedText]) -> dict[str, NDArray[Any]]:
    """Makes the fields of `Tokens` for images: an image's path, or its bytes if the row had them.

    Reads no file.
    """
    images = list(chain.from_iterable(document.images for document in documents))
    stored = [image.stored() for image in images]
    return {
        "image_counts": np.array([len(document.images) for document in documents], np.int32),
        "image_sizes": np.array([len(image) for image in stored], np.int64),
        "image_bytes": np.frombuffer(b"".join(stored), np.uint8),
        "image_hashes": np.array([image.hash for image in images], np.uint64),
    }


def _hash_document(document: RenderedText) -> int:
    """Returns the 64-bit hash by which duplicate documents are found.

    It is the hash of the document's text. If equal text is not enough for a duplicate (ids, images,
    other documents of the group), rendering has set `group_hash`.
    """
    if document.group_hash is None:
        return xxhash.xxh3_64_intdigest(document.text.encode())
    return document.group_hash


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a document's text that is encoded separately."""

    text: str
    is_trained: bool
    # Is encoded before the text, and its ids are removed again: otherwise a SentencePiece tokenizer
    # would put a space before the text. "" at the start of a document and at a fresh start; the
    # added token that the piece follows, since tokenizers differ in whether a space follows such a
    # token; else "\n".
    prefix: str


def _cut_document(document: RenderedText, encoder: Encoder) -> Iterator[_Piece]:
    """Yields the pieces of a document's text, each short enough to be encoded at once."""
    for piece in _cut_at_borders(document, encoder):
        yield from _cut_long_piece(piece, encoder)


def _cut_at_borders(document: RenderedText, encoder: Encoder) -> Iterator[_Piece]:
    """Cuts a document's text where its trained spans begin and end, and at its `fresh_starts`.

    At a fresh start (of a step, a separator, or an answer under `answers_apart`), the text is
    encoded as if nothing stood before it.
    """
    text = document.text
    borders = {0, *chain.from_iterable(document.spans), *document.fresh_starts, len(text)}
    # Spans are in order and do not overlap. If two have the same start, the first is empty and the
    # second counts.
    span_ends = dict(document.spans)  # start -> end
    trained_until = 0  # the end of the last span that began at or before `start`
    for start, end in pairwise(sorted(borders)):
        trained_until = span_ends.get(start, trained_until)
        if start == 0 or start in document.fresh_starts:
            prefix = ""
        else:
            prefix = _find_prefix(text[max(0, start - LONGEST_TOKEN) : start], encoder)
        yield _Piece(text[start:end], start < trained_until, prefix)


def _find_prefix(before: str, encoder: Encoder) -> str:
    """Returns the added token that ends the text `before` a piece; a newline if none does.

    White space that a token takes with it may stand between the two.
    """
    tokens = encoder.added_tokens
    if not before.endswith(tokens):
        tokens = encoder.stripping_tokens
        before = before.rstrip()
    # Several may end here: the longest counts.
    return max((token for token in tokens if before.endswith(token)), key=len, default="\n")


def _cut_long_piece(piece: _Piece, encoder: Encoder) -> Iterator[_Piece]:
    """Cuts a long piece into parts of about LONG_TEXT characters, where a cut changes no token.

    The tokenizer needs 150 times as much memory as the text that it encodes at once.
    """
    text = piece.text
    start = 0  # of the next part
    prefix = piece.prefix
    search_from = LONG_TEXT
    while search_from < len(text):
        cut = _find_safe_cut(text, search_from, encoder)
        if cut is None:  # this part becomes longer
            search_from += LONG_TEXT
            continue
        yield replace(piece, text=text[start:cut], prefix=prefix)
        start = cut
        prefix = "\n"  # so that a tokenizer puts no space before the text
        search_from = cut + LONG_TEXT
    yield replace(piece, text=text[start:], prefix=prefix)


def _find_safe_cut(text: str, begin: int, encoder: Encoder) -> int | None:
    """Finds the first end of a word, from `begin` on, at which a cut changes no token.

    Returns its position in characters; None if no cut is safe at the first MAX_CUTS_TRIED ends of
    words within LONG_TEXT characters.
    """
    word_ends = WORD_END.finditer(text, begin, begin + LONG_TEXT)
    for match in islice(word_ends, MAX_CUTS_TRIED):
        cut = match.start()
        before = text[cut - CONTEXT_CHARACTERS : cut]
        after = text[cut : cut + CONTEXT_CHARACTERS]
        if keeps_border(encoder.backend, before, after):
            return cut
    return None


def _encode_pieces(pieces: Iterable[_Piece], encoder: Encoder) -> Iterator[list[int]]:
    """Yields the ids of each piece. Encodes the pieces in batches of about LONG_TEXT characters."""
    batch: list[_Piece] = []
    size = 0  # characters of the batch
    for piece in pieces:
        if batch and size + len(piece.text) > LONG_TEXT:
            yield from _encode_batch(batch, encoder)
            batch = []
            size = 0
        batch.append(piece)
        size += len(piece.text)
    yield from _encode_batch(batch, encoder)


def encode_after(text: str, special_token: str, encoder: Encoder) -> list[int]:
    """Encodes a text that follows a special token as it would be within the whole text."""
    [ids] = _encode_batch([_Piece(text, is_trained=False, prefix=special_token)], encoder)
    return ids


def _encode_batch(pieces: Sequence[_Piece], encoder: Encoder) -> list[list[int]]:
    """Encodes each piece behind its prefix, and removes the prefix's ids again.

    The prefix of a newline is left out if `encoder.newline_ids` is empty, since such a tokenizer
    puts no space before a text.
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
        expected = prefix_ids[piece.prefix]
        ids = encoding.ids
        if ids[: len(expected)] == expected:
            ids_of_pieces.append(ids[len(expected) :])
        else:  # prefix and text were merged into one token
            alone = encoder.backend.encode(piece.text, add_special_tokens=False)
            ids_of_pieces.append(alone.ids)
    return ids_of_pieces
