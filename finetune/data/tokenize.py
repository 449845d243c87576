"""Rows as tokens and labels: rows are read and rendered one by one, and encoded by threads while
the next are read.
"""

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from finetune.config.methods import MULTI_LABEL, ROWS, STEP_SCORES, RowKind
from finetune.config.schema import Data, DatasetSource, Pooling
from finetune.constants import IGNORE_INDEX, count_cores
from finetune.data.classes import parse_class
from finetune.data.findings import Tally
from finetune.data.formats import (
    Candidate,
    Conversation,
    Document,
    Group,
    ParsedRow,
    Question,
    Row,
    Text,
    parse_row,
)
from finetune.data.images import ImageProcessor, hash_images, holds_images, read_image
from finetune.data.messages import BadRow, list_columns
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
from finetune.data.readers import RepeatedKeys
from finetune.data.render import (
    COMPARED,
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
from finetune.data.token_store import Tokens
from finetune.data.tokenizer import (
    CONTEXT,
    Encoder,
    Renderer,
    add_variables,
    keeps_border,
    make_encoder,
    make_renderer_of,
    renderer_of_source,
)
from finetune.errors import UserError
from finetune.units import name_place

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
        """With the second document of rated answers: the next answer, in these rows, to another
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
    """(the texts of a group's documents, findings in the group); no text of a pair that teaches
    nothing.

    `folder`: where the paths of images begin.

    Raises `BadRow` where the chat template rejects one of them, or it is not valid Unicode.
    """
    texts = _render_documents(group, renderer, folder)
    encoded = _encode_texts(texts)
    findings: tuple[str, ...] = ()
    if group.pooling is not None:
        group_hash = _hash_group(group, texts, encoded)
        return tuple(
            replace(text, group_hash=group_hash, pooling=group.pooling) for text in texts
        ), findings
    if len(group.documents) == 1:
        return _with_labels(texts, group), findings
    if not group.rating and not isinstance(group.documents[0], Candidate):
        texts = _begin_alike(group, texts, renderer)
        findings = tuple(_check_pair(group, texts))
    if {"sides_equal", "side_empty", "side_untrained"} & set(findings):
        return (), findings
    group_hash = _hash_group(group, texts, encoded)
    return tuple(
        replace(text, group_hash=group_hash, rating=group.rating)
        for text in _with_labels(texts, group)
    ), findings


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


SHOWN_BAD_ROWS = 5
MAX_NAMED_COLUMNS = 100  # unused ones; a file may have a different column in every row
PREFETCH_BATCHES = 4  # for each thread
LONG_TEXT = 2**18  # characters that are encoded at a time; what is longer is cut
CUTS_TRIED = 100
WORD_END = re.compile(r"(?<=\S)(?=\s)")
Places = list[tuple[int, int]]  # (index of a file, number of the row in it)


@dataclass(slots=True)
class SourceStats:
    """What is known about a source beside its tokens.

    Grows while its rows are read; stored with the tokens as JSON.
    """

    files: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)  # a hash of each file's bytes
    rows_in_source: int | None = None  # where only max_samples of them are read
    rows_read: int = 0
    rows_skipped: int = 0
    skipped: list[str] = field(default_factory=list)  # what was wrong with the first of them
    formats: list[str] = field(default_factory=list)  # of its rows, in the order of their first row
    # column -> rows that hold a value in it
    unused_columns: dict[str, int] = field(default_factory=dict)
    # indexes of the files with rows that are not plain text
    structured_files: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    group_size: int = 1  # documents that belong together: 2 for chosen and rejected
    is_rated: bool = False  # the first document of each group is a rated answer
    is_asked: bool = False  # the documents are prompts, and nothing of them is trained on
    # their names, where the last token of a document is scored
    scores: list[str] = field(default_factory=list)
    # what the label of that token says, as in `RowFacts`; "classes": which of several classes
    label: str = "margin"
    # the tokens with a label are those whose states are a document's embedding
    is_pooled: bool = False
    images: int = 0
    # that only images have, where there are some
    image_token_ids: list[int] = field(default_factory=list)
    # of a block of a stream: the stream's position after it
    stream: dict[str, int] = field(default_factory=dict)

    def describe_rows(self, kind: RowKind, data: Data) -> None:
        """Says what is read of the rows."""
        self.group_size = ROWS[kind].count_documents(data.num_negatives)
        self.is_rated = kind == "ratings"
        self.is_asked = kind == "prompts"
        self.is_pooled = ROWS[kind].head == "states"
        self.scores = list(_name_scores(kind, data))
        self.label = "classes" if data.problem_type == MULTI_LABEL else ROWS[kind].label

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "SourceStats":
        """The stats from the output of `as_json`, as an independent copy."""
        return cls(**deepcopy({**stored, "tally": Tally(**stored["tally"])}))


def tokenize_rows(
    batches: Iterable[tuple[DatasetSource, RowBatch]],
    data: Data,
    tokenizer: Any,
    stats: SourceStats,
    kind: RowKind = "answers",
) -> Iterator[Tokens]:
    """The tokens of each batch of rows, in order; `stats` grows with them.

    `kind`: what is read of the rows.

    Raises `UserError` at the first rows that cannot be used, unless `on_bad_row` is `skip`.
    """
    stats.describe_rows(kind, data)
    renderer = make_renderer_of(data, tokenizer)
    reader = GroupReader(kind, data)
    encoder = make_encoder(tokenizer)
    threads = data.dataset_num_proc or count_cores()
    pending: deque[tuple[list[RenderedText], Places, Future[Tokens]]] = deque()
    finish = partial(_check_tokens, stats=stats, bos=tokenizer.bos_token_id, images=renderer.images)
    with (
        _without_tokenizer_threads(),
        ThreadPoolExecutor(threads, thread_name_prefix="tokenize") as pool,
    ):
        try:
            for source, batch in batches:
                documents, places = _render_batch(batch, source, data, renderer, stats, reader)
                pending.append(
                    (documents, places, pool.submit(tokenize, documents, places, encoder))
                )
                # images are kept with their rows: no batch of them waits
                has_images = any(document.images for document in documents)
                most_pending = 0 if has_images else PREFETCH_BATCHES * threads
                while len(pending) > most_pending:
                    yield finish(*pending.popleft())
            while pending:
                yield finish(*pending.popleft())
        finally:
            for _, _, future in pending:
                future.cancel()


def _name_scores(kind: RowKind, data: Data) -> tuple[str, ...]:
    """What inspection calls the scores of a document; none where its tokens are predicted."""
    if ROWS[kind].head != "scores":
        return ()
    if ROWS[kind].label == "steps":
        return STEP_SCORES
    return data.labels or ("",)


@contextmanager
def _without_tokenizer_threads() -> Iterator[None]:
    """Keeps the tokenizers library from starting threads beside ours: the size of its pool cannot
    be set.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _render_batch(
    batch: RowBatch,
    source: DatasetSource,
    data: Data,
    renderer: Renderer,
    stats: SourceStats,
    reader: GroupReader,
) -> tuple[list[RenderedText], Places]:
    """(documents, their places) of the usable rows.

    Raises `UserError` for others if `on_bad_row` is error.
    """
    if batch.file not in stats.files:
        stats.files.append(batch.file)
    file = stats.files.index(batch.file)
    documents: list[RenderedText] = []
    places: Places = []
    problems: dict[str, str] = {}  # place of a row -> what is wrong
    for number, row, parsed in zip(
        batch.numbers, batch.rows, reader.read(batch.rows, source), strict=True
    ):
        where = name_place(batch.file, number)
        try:
            texts, findings = _render_row(parsed, batch.file, source, renderer)
        except BadRow as problem:
            problems[where] = str(problem)
            continue
        assert isinstance(parsed, ParsedRow) and not isinstance(row, BadRow), (
            "else it had a problem"
        )
        documents += texts
        places += [(file, number)] * len(texts)
        for name in findings:
            stats.tally.add(name, [where])
        _count_images_unread(row, parsed, where, reader.kind, renderer, stats)
        _count_form(row, parsed, file, where, stats)
    stats.rows_read += len(batch.rows)
    _count_problems(problems, len(batch.rows), data, stats)
    return documents, places


def _render_row(
    parsed: ParsedRow | BadRow, file: str, source: DatasetSource, renderer: Renderer
) -> tuple[list[RenderedText], list[str]]:
    """(the texts of a row, the findings in it, each once).

    Raises `BadRow` where it cannot be used.
    """
    if isinstance(parsed, BadRow):
        raise parsed
    renderer = renderer_of_source(renderer, source)
    folder = Path(source.image_folder or Path(file).parent)
    texts: list[RenderedText] = []
    findings = list(parsed.findings)
    for group in parsed.groups:
        group_texts, group_findings = render_group(group, renderer, folder)
        texts += group_texts
        findings += group_findings
    return texts, list(dict.fromkeys(findings))


def _count_images_unread(
    row: Row, parsed: ParsedRow, where: str, kind: RowKind, renderer: Renderer, stats: SourceStats
) -> None:
    """Counts a row with a column of images that the model is not shown."""
    column = _find_unread_images(row, parsed, kind)
    if column is None:
        return
    takes_images = renderer.images is not None and renderer.images.is_expected
    name = "images_dropped" if takes_images else "images_unread"
    stats.tally.add(name, [where])
    stats.tally.details.setdefault(name, f"the column {list_columns([column])}")


def _count_form(row: Row, parsed: ParsedRow, file: int, where: str, stats: SourceStats) -> None:
    """Counts a row's unused columns, and notes its format."""
    count_columns(stats.unused_columns, dict.fromkeys(parsed.unused_columns, 1))
    if isinstance(row, RepeatedKeys):
        stats.tally.add("repeated_keys", [where])
    if parsed.rendering not in stats.formats:
        stats.formats.append(parsed.rendering)
    if parsed.format != "text" and file not in stats.structured_files:
        stats.structured_files.append(file)


def _count_problems(problems: Mapping[str, str], rows: int, data: Data, stats: SourceStats) -> None:
    """Counts the rows that cannot be used, of `rows` that were read.

    Raises `UserError` if `on_bad_row` is error.

    `problems`: place of a row -> what is wrong with it.
    """
    lines = [f"{where}: {problem}" for where, problem in problems.items()]
    if lines and data.on_bad_row == "error":
        shown = lines[:SHOWN_BAD_ROWS]
        if len(lines) > SHOWN_BAD_ROWS:
            shown.append(
                f"{len(lines) - SHOWN_BAD_ROWS} more of these {rows} rows cannot be used either"
            )
        shown[-1] += " (on_bad_row: skip counts such rows and continues)"
        raise UserError("\n".join(shown))
    stats.rows_skipped += len(lines)
    stats.skipped += lines[: SHOWN_BAD_ROWS - len(stats.skipped)]
    stats.tally.add("skipped", list(problems))


def _find_unread_images(row: Row, parsed: ParsedRow, kind: RowKind) -> str | None:
    """The first column of images in a row of which the model is shown none; None where there is
    none.
    """
    for group in parsed.groups:
        if any(getattr(document, "images", ()) for document in group.documents):
            return None
    # rewards get all columns of a prompt
    columns = row if kind == "prompts" else parsed.unused_columns
    return next(
        (column for column in columns if row.get(column) and holds_images(column, row[column])),
        None,
    )


def count_columns(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds `more` to the rows counted for each column, for at most `MAX_NAMED_COLUMNS` of them."""
    for column, rows in more.items():
        if column in counts or len(counts) < MAX_NAMED_COLUMNS:
            counts[column] = counts.get(column, 0) + rows


def _check_tokens(
    documents: list[RenderedText],
    places: Places,
    encoded: "Future[Tokens]",
    stats: SourceStats,
    bos: int | None,
    images: ImageProcessor | None,
) -> Tokens:
    """The batch's tokens when they are ready; what is wrong with them is counted in `stats`."""
    tokens = encoded.result()
    where = [name_place(stats.files[file], row) for file, row in places]
    _count_findings(documents, where, stats)
    _count_split(documents, where, tokens, stats)
    if len(tokens.image_hashes):
        stats.images += len(tokens.image_hashes)
        assert images is not None
        stats.image_token_ids = list(images.token_ids)
        digest = xxhash.xxh3_128_hexdigest(tokens.image_hashes.tobytes())
        stats.content.append(digest)  # a run that resumes compares it
    if not stats.is_asked:
        _add_rows(stats, "nothing_trained", [where[i] for i in np.flatnonzero(tokens.trained == 0)])
    if bos is not None:
        starts = (np.cumsum(tokens.lengths, dtype=np.int64) - tokens.lengths)[tokens.lengths > 1]
        doubled = (tokens.input_ids[starts] == bos) & (tokens.input_ids[starts + 1] == bos)
        _add_rows(
            stats, "doubled_bos", [where[i] for i in np.flatnonzero(tokens.lengths > 1)[doubled]]
        )
    return tokens


def _count_findings(documents: list[RenderedText], where: list[str], stats: SourceStats) -> None:
    """Counts what rendering has noted in the documents, by name; of those that compare, with the
    first difference.
    """
    places: dict[str, list[str]] = {}
    differences: dict[str, str] = {}
    for document, place in zip(documents, where, strict=True):
        for name in document.findings:
            places.setdefault(name, []).append(place)
            if document.difference and name in COMPARED:
                differences.setdefault(name, document.difference)
    for name in sorted(places):
        _add_rows(stats, name, places[name])
        if name in differences:
            stats.tally.details.setdefault(name, differences[name])


def _count_split(
    documents: list[RenderedText], where: list[str], tokens: Tokens, stats: SourceStats
) -> None:
    """Counts the tokens that rows have more in several documents than in their longest alone."""
    lengths: dict[str, list[int]] = {}
    for place, document, length in zip(where, documents, tokens.lengths.tolist(), strict=True):
        if "turns_split" in document.findings:
            lengths.setdefault(place, []).append(length)
    more = sum(sum(of_row) - max(of_row) for of_row in lengths.values())
    if more:
        stats.tally.tokens["turns_split"] = stats.tally.tokens.get("turns_split", 0) + more


def _add_rows(stats: SourceStats, name: str, places: list[str]) -> None:
    """Counts a check once for each row, of which several documents may come."""
    stats.tally.add(name, list(dict.fromkeys(places)))


def tokenize(documents: Sequence[RenderedText], places: Places, encoder: Encoder) -> Tokens:
    """The ids and labels of `documents`, which come from `places`.

    A text is cut where its trained spans begin and end, and the pieces are encoded separately. So
    no token crosses such a border, the mask is exact, and the text before an answer is encoded
    exactly as in the prompt at inference. A piece that follows a special token is encoded as it
    would be within the whole text.
    """
    runs: list[Run] = []
    lengths = np.zeros(len(documents), np.int32)
    for i, own_runs in enumerate(_encode_documents(documents, encoder)):
        runs += own_runs
        lengths[i] = sum(len(ids) for _, ids in own_runs)
    ends = np.cumsum(lengths, dtype=np.int64)
    input_ids = np.fromiter(
        chain.from_iterable(ids for _, ids in runs), np.int32, int(lengths.sum(dtype=np.int64))
    )
    run_lengths = np.array([len(ids) for _, ids in runs], np.int64)
    is_trained = np.repeat([trained for trained, _ in runs], run_lengths)
    labels = _make_labels(input_ids, is_trained, ends[lengths > 0])
    for document, start, end in zip(documents, ends - lengths, ends, strict=True):
        own = slice(start, end)
        _label_read(document, labels[own], input_ids[own], is_trained[own], encoder.pad_id)
    labels_before = np.concatenate(([0], np.cumsum(labels != IGNORE_INDEX)))
    kept = [document.row.encode() for document in documents]
    return Tokens(
        input_ids=input_ids,
        labels=labels,
        lengths=lengths,
        trained=(labels_before[ends] - labels_before[ends - lengths]).astype(np.int32),
        files=np.array([file for file, _ in places], np.int32),
        rows=np.array([row for _, row in places], np.int64),
        hashes=np.array([_hash(document) for document in documents], np.uint64),
        ratings=np.array([document.rating for document in documents], np.int8),
        kept_sizes=np.array([len(row) for row in kept], np.int64),
        kept_bytes=np.frombuffer(b"".join(kept), np.uint8),
        **_store_images(documents),
    )


Run = tuple[bool, list[int]]
"""Ids that follow one another, and whether all of them are trained on or none."""


def _encode_documents(documents: Sequence[RenderedText], encoder: Encoder) -> Iterator[list[Run]]:
    """The ids of each document in runs: the tokenizer's BOS before plain text, its pieces, and ids
    that a row has.
    """
    pieces = [_cut_document(document, encoder) for document in documents]
    encoded = _encode(list(chain.from_iterable(pieces)), encoder)
    for document, own_pieces in zip(documents, pieces, strict=True):
        if document.is_plain:
            runs: list[Run] = [(False, encoder.bos_ids)]
        else:
            runs = []
        runs += [(piece.trained, next(encoded)) for piece in own_pieces]
        runs += document.tokens.runs() if document.tokens else ()
        yield runs


def encode_prompt(row: Mapping[str, Any], renderer: Renderer, encoder: Encoder) -> list[int]:
    """The ids of a prompt of messages, as those of the data.

    `row`: as rewards read it. Raises `BadRow` where the chat template rejects it.
    """
    messages = tuple(row["prompt"])
    asked = Conversation(
        messages,
        (False,) * len(messages),
        tuple(row.get("tools") or ()),
        row.get("variables") or {},
    )
    text = render(Question(asked, json.dumps(row, default=str)), renderer)
    [runs] = _encode_documents([text], encoder)
    return [token for _, ids in runs for token in ids]


def _make_labels(
    input_ids: NDArray[np.int32], is_trained: NDArray[np.bool_], ends: NDArray[np.int64]
) -> NDArray[np.int32]:
    """int32[tokens]: what each position predicts: the next token of its document, if that is
    trained on.

    Args:
        input_ids: [tokens], of all documents.
        is_trained: [tokens].
        ends: [documents], behind the last token of each.
    """
    labels = np.full(len(input_ids), IGNORE_INDEX, np.int32)
    labels[:-1] = np.where(is_trained[1:], input_ids[1:], IGNORE_INDEX)
    labels[ends - 1] = IGNORE_INDEX  # the next token belongs to another document
    return labels


def _label_read(
    document: RenderedText,
    labels: NDArray[np.int32],
    input_ids: NDArray[np.int32],
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


def _label_last(
    labels: NDArray[np.int32], input_ids: NDArray[np.int32], label: int, pad_id: int | None
) -> None:
    """Gives a document one label, at its last token that is not the pad token.

    There transformers' own classes for sequence classification read the score, also where a text
    ends with the pad token, as it does where that is the tokenizer's end of text.
    """
    labels[:] = IGNORE_INDEX
    scored = np.flatnonzero(input_ids != pad_id)
    if len(scored):
        labels[scored[-1]] = label


def _label_steps(
    labels: NDArray[np.int32], is_separator: NDArray[np.bool_], step_labels: tuple[int, ...]
) -> None:
    """Gives a document a label at the last token of each separator."""
    labels[:] = IGNORE_INDEX
    is_last = is_separator & ~np.append(is_separator[1:], False)
    labels[is_last] = step_labels


def _label_pooled(labels: NDArray[np.int32], pooling: Pooling) -> None:
    """Gives a label, which says nothing more, to each token of a document whose state is part of
    its embedding.
    """
    labels[:] = IGNORE_INDEX
    labels[-1 if pooling == "lasttoken" else 0 :] = 0


def _store_images(documents: Sequence[RenderedText]) -> dict[str, NDArray[Any]]:
    """The fields of `Tokens` that hold the documents' images."""
    images = list(chain.from_iterable(document.images for document in documents))
    stored = [image.stored() for image in images]
    return {
        "image_counts": np.array([len(document.images) for document in documents], np.int32),
        "image_sizes": np.array([len(image) for image in stored], np.int64),
        "image_bytes": np.frombuffer(b"".join(stored), np.uint8),
        "image_hashes": np.array([image.hash for image in images], np.uint64),
    }


def _hash(document: RenderedText) -> int:
    if document.group_hash is None:
        return xxhash.xxh3_64_intdigest(document.text.encode())
    return document.group_hash


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    trained: bool
    # Encoded together with the text and removed again, because it decides whether a space is put
    # before the text: the special token that the piece follows; "\n" after any other text; "" at
    # the start of a document.
    before: str


def _split(document: RenderedText, added_tokens: tuple[str, ...]) -> Iterator[_Piece]:
    """The text of a document, cut where a trained span begins or ends, and where a text starts as
    if nothing stood before it.
    """
    text = document.text
    borders = {0, *chain.from_iterable(document.spans), *document.fresh_starts, len(text)}
    trained_ends = dict(document.spans)
    trained_until = 0
    for start, end in pairwise(sorted(borders)):
        trained_until = max(trained_until, trained_ends.get(start, 0))
        before = ""
        if start > 0 and start not in document.fresh_starts:
            follows_token = text.endswith(added_tokens, 0, start)
            if follows_token:
                # of several that end here, the longest
                before = max((t for t in added_tokens if text.endswith(t, 0, start)), key=len)
            else:
                before = "\n"
        yield _Piece(text[start:end], start < trained_until, before)


def _cut_document(document: RenderedText, encoder: Encoder) -> list[_Piece]:
    """The pieces of a document's text, each short enough to be encoded at once."""
    pieces = _split(document, encoder.added_tokens)
    return list(chain.from_iterable(_cut(piece, encoder) for piece in pieces))


def _cut(piece: _Piece, encoder: Encoder) -> Iterator[_Piece]:
    """The piece in parts of about LONG_TEXT, cut where it has the same tokens: encoding takes 150
    times its text.
    """
    text = piece.text
    start = 0  # of the part that is not yielded yet
    search_from = LONG_TEXT
    while search_from < len(text):
        border = _find_border(text, search_from, encoder)
        if border is not None:
            yield replace(piece, text=text[start:border], before="\n" if start else piece.before)
            start = border
        search_from = (border or search_from) + LONG_TEXT
    yield replace(piece, text=text[start:], before="\n") if start else piece


def _find_border(text: str, begin: int, encoder: Encoder) -> int | None:
    """The first end of a word from `begin` on where a cut changes no token; None where the first
    CUTS_TRIED do.
    """
    word_ends = WORD_END.finditer(text, begin, begin + LONG_TEXT)
    for match in islice(word_ends, CUTS_TRIED):
        at = match.start()
        if keeps_border(encoder.backend, text[at - CONTEXT : at], text[at : at + CONTEXT]):
            return at
    return None


def _encode(pieces: Sequence[_Piece], encoder: Encoder) -> Iterator[list[int]]:
    """The ids of each piece, without those of what stands before it; a stretch of pieces is encoded
    at a time.
    """
    stretch: list[_Piece] = []
    size = 0
    for piece in pieces:
        if stretch and size + len(piece.text) > LONG_TEXT:
            yield from _encode_stretch(stretch, encoder)
            stretch = []
            size = 0
        stretch.append(piece)
        size += len(piece.text)
    yield from _encode_stretch(stretch, encoder)


def encode_after(text: str, before: str, encoder: Encoder) -> list[int]:
    """The ids of a text that follows the special token `before`, as within the whole text."""
    return _encode_stretch([_Piece(text, trained=False, before=before)], encoder)[0]


def _encode_stretch(pieces: Sequence[_Piece], encoder: Encoder) -> list[list[int]]:
    contexts = {piece.before for piece in pieces} - {"", "\n"}
    context_ids = {
        text: encoder.backend.encode(text, add_special_tokens=False).ids for text in contexts
    }
    context_ids |= {"": [], "\n": encoder.newline_ids}
    texts = [
        piece.before + piece.text if context_ids[piece.before] else piece.text for piece in pieces
    ]
    stretch_ids = []
    for piece, encoded in zip(
        pieces, encoder.backend.encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        before = context_ids[piece.before]
        ids = encoded.ids
        if ids[: len(before)] == before:
            stretch_ids.append(ids[len(before) :])
        else:  # the two were merged into one token
            stretch_ids.append(encoder.backend.encode(piece.text, add_special_tokens=False).ids)
    return stretch_ids
