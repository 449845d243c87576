"""The tokens of a source: its rows are read and rendered one by one, and encoded by threads while
the next are read.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from finetune.config.methods import MULTI_LABEL, ROWS, STEP_SCORES, RowKind
from finetune.config.schema import Data, DatasetSource
from finetune.constants import Names, count_cores
from finetune.data.findings import Tally
from finetune.data.formats import Conversation, ParsedRow, Question, Row
from finetune.data.groups import GroupReader, render_group
from finetune.data.images import ImageProcessor, find_image_folder, holds_images
from finetune.data.messages import BadRow, list_columns, list_unread_keys
from finetune.data.readers import RepeatedKeys
from finetune.data.render import COMPARED, RenderedText
from finetune.data.sources import RowBatch
from finetune.data.token_store import Int64s, Tokens
from finetune.data.tokenize import Places, tokenize
from finetune.data.tokenizer import Renderer, make_encoder, make_renderer_of, renderer_of_source
from finetune.errors import UserError
from finetune.units import name_place

SHOWN_BAD_ROWS = 5
MAX_NAMED_COLUMNS = 100  # unused ones; a file may have a different column in every row
PREFETCH_BATCHES = 4  # for each thread


@dataclass(slots=True)
class SourceStats:
    """The counts of a source beside its tokens.

    Grows while its rows are read; stored with the tokens as JSON.
    """

    files: list[str] = field(default_factory=list)
    # a hash of each file's bytes; then of each batch of rows with images one of these
    content: list[str] = field(default_factory=list)
    rows_in_source: int | None = None  # where only max_samples of them are read
    rows_read: int = 0
    rows_skipped: int = 0
    skipped: list[str] = field(default_factory=list)  # what was wrong with the first of them
    formats: list[str] = field(default_factory=list)  # of its rows, in the order of their first row
    # column -> rows that hold a value in it
    unused_columns: dict[str, int] = field(default_factory=dict)
    # indexes in `files` of those with rows that are not plain text
    structured_files: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    group_size: int = 1  # documents that belong together: 2 for chosen and rejected
    is_rated: bool = False  # the first document of each group is a rated answer
    is_asked: bool = False  # the documents are prompts, and nothing of them is trained on
    # the names of the scores, where tokens are scored
    scores: list[str] = field(default_factory=list)
    # what the label of that token says, as in `RowFacts`; "classes": which of several classes
    label: str = "margin"
    # the tokens with a label are those whose states are a document's embedding
    is_pooled: bool = False
    images: int = 0
    # the tokens that only images have; empty where there is no image
    image_token_ids: list[int] = field(default_factory=list)
    # of a block of a stream: the stream's position after it
    stream: dict[str, int] = field(default_factory=dict)

    def describe_rows(self, kind: RowKind, data: Data) -> None:
        """Sets what rows of this kind are: their groups, and what their labels say."""
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
    """Yields the tokens of each batch of rows, in order.

    Args:
        batches: Rows, each batch with the source that it comes from.
        data: The recipe's section.
        tokenizer: As `load_tokenizer` gives it.
        stats: Its counts grow while the rows are read.
        kind: What is read of the rows.

    Raises:
        UserError: At the first rows that cannot be used, unless `on_bad_row` is `skip`.
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


def _name_scores(kind: RowKind, data: Data) -> Names:
    """Names the scores of a document for inspection; none where its tokens are predicted."""
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
    """Renders the rows of a batch that can be used; counts all in `stats`.

    Returns:
        The documents as texts, and the place of each.

    Raises:
        UserError: A row cannot be used, and `on_bad_row` is `error`.
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
        _count_format(row, parsed, file, where, stats)
        unread_keys = _list_unread_keys(parsed, renderer_of_source(renderer, source))
        count_columns(stats.unused_columns, dict.fromkeys(unread_keys, 1))
    stats.rows_read += len(batch.rows)
    _count_problems(problems, len(batch.rows), data, stats)
    return documents, places


def _render_row(
    parsed: ParsedRow | BadRow, file: str, source: DatasetSource, renderer: Renderer
) -> tuple[list[RenderedText], list[str]]:
    """Renders a row as texts; returns (the texts, the names of its findings without repeats).

    Raises `BadRow` where it cannot be used.
    """
    if isinstance(parsed, BadRow):
        raise parsed
    renderer = renderer_of_source(renderer, source)
    folder = find_image_folder(source, file)
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


def _count_format(row: Row, parsed: ParsedRow, file: int, where: str, stats: SourceStats) -> None:
    """Counts a row's unused columns and repeated keys, and notes its format."""
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


def _list_unread_keys(parsed: ParsedRow, renderer: Renderer) -> Iterator[str]:
    """Yields the keys of a row's messages that the chat template does not read, as columns."""
    for document in chain.from_iterable(group.documents for group in parsed.groups):
        asked = document.asked if isinstance(document, Question) else document
        if isinstance(asked, Conversation):
            for message in asked.messages:
                for key in list_unread_keys(message, renderer.template):
                    yield f"{key} of messages"


def _find_unread_images(row: Row, parsed: ParsedRow, kind: RowKind) -> str | None:
    """Finds the first column of images in a row whose documents have no image.

    Returns None where the row has no such column, or its documents have images.
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
    """Waits for the tokens of a batch, and counts in `stats` what is found in them.

    Args:
        documents: The batch, as it was encoded.
        places: (file, row) of each document.
        encoded: Its tokens.
        stats: The statistics of the source.
        bos: The id of BOS; None: the tokenizer has none.
        images: The model's image processor.
    """
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
        _add_rows(stats, "doubled_bos", [where[i] for i in _find_doubled_bos(tokens, bos)])
    return tokens


def _find_doubled_bos(tokens: Tokens, bos: int) -> Int64s:
    """Finds the documents that begin with two BOS: their indexes in the batch."""
    starts = np.cumsum(tokens.lengths, dtype=np.int64) - tokens.lengths
    candidates = np.flatnonzero(tokens.lengths > 1)
    first = tokens.input_ids[starts[candidates]]
    second = tokens.input_ids[starts[candidates] + 1]
    doubled: Int64s = candidates[(first == bos) & (second == bos)]
    return doubled


def _count_findings(documents: list[RenderedText], places: list[str], stats: SourceStats) -> None:
    """Adds the findings of rendered documents to `stats`.

    A finding of COMPARED keeps the first difference that it was seen with.

    Args:
        documents: The documents.
        places: File and row of each document.
        stats: The statistics of their source.
    """
    places_by_finding: dict[str, list[str]] = {}
    first_differences: dict[str, str] = {}
    for document, place in zip(documents, places, strict=True):
        for name in document.findings:
            places_by_finding.setdefault(name, []).append(place)
            if document.difference and name in COMPARED:
                first_differences.setdefault(name, document.difference)
    for name in sorted(places_by_finding):
        _add_rows(stats, name, places_by_finding[name])
    for name in sorted(first_differences):
        stats.tally.details.setdefault(name, first_differences[name])


def _count_split(
    documents: list[RenderedText], places: list[str], tokens: Tokens, stats: SourceStats
) -> None:
    """Counts the extra tokens of rows that became several documents: all but their longest one."""
    lengths_by_row: dict[str, list[int]] = {}
    for place, document, length in zip(places, documents, tokens.lengths.tolist(), strict=True):
        if "turns_split" in document.findings:
            lengths_by_row.setdefault(place, []).append(length)
    extra = sum(sum(lengths) - max(lengths) for lengths in lengths_by_row.values())
    if extra:
        stats.tally.tokens["turns_split"] = stats.tally.tokens.get("turns_split", 0) + extra


def _add_rows(stats: SourceStats, name: str, places: list[str]) -> None:
    """Counts a finding once for each row, though a row may become several documents."""
    stats.tally.add(name, list(dict.fromkeys(places)))
