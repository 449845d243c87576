"""The tokens of a source: rows are read and rendered one by one, and encoded in batches by threads
while the next rows are read.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from finetune.data.formats import Conversation, Group, ParsedRow, Question, Row
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

SHOWN_BAD_ROWS = 5  # in messages
# unused columns that are counted; a file may have a different column in every row
MAX_NAMED_COLUMNS = 100
PREFETCH_BATCHES = 4  # batches that wait for the encoder, for each thread


@dataclass(slots=True)
class SourceStats:
    """What is known of a source besides its tokens: counts, findings and the kind of rows.

    The counts grow while the rows are read. Stored with the tokens as JSON.
    """

    files: list[str] = field(default_factory=list)
    # a hash of each file's bytes, then a hash of the images of each batch that has images
    content: list[str] = field(default_factory=list)
    rows_in_source: int | None = None  # None: without max_samples, so all rows are read
    rows_read: int = 0
    rows_skipped: int = 0
    # what was wrong with the first skipped rows, at most SHOWN_BAD_ROWS
    skipped: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)  # of the rows, in the order of appearance
    # column -> number of rows that hold a value in it
    unused_columns: dict[str, int] = field(default_factory=dict)
    # indexes in `files`: the files with a row that is not plain text
    structured_files: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    group_size: int = 1  # documents that belong together: 2 for chosen and rejected
    is_rated: bool = False  # the first document of each group is a rated answer
    is_asked: bool = False  # the documents are prompts, of which no token is trained on
    # the names of the scores, for rows that train a head of scores; else empty
    scores: list[str] = field(default_factory=list)
    # what the label of a scored token means: `RowFacts.label`, or "classes", the bits of a
    # document's classes where it may have several
    label: str = "margin"
    # whether a document becomes a vector, made of the states of its labeled tokens
    is_pooled: bool = False
    images: int = 0
    # ids of the tokens that stand for parts of images and nothing else; empty without images
    image_token_ids: list[int] = field(default_factory=list)
    # the stream's position after this block of a stream; empty for data that is not streamed
    stream: dict[str, int] = field(default_factory=dict)

    def describe_rows(self, kind: RowKind, data: Data) -> None:
        """Sets the fields that follow from the kind of rows: groups, labels and scores."""
        self.group_size = ROWS[kind].count_documents(data.num_negatives)
        self.is_rated = kind == "ratings"
        self.is_asked = kind == "prompts"
        self.is_pooled = ROWS[kind].head == "states"
        self.scores = list(_name_scores(kind, data))
        self.label = "classes" if data.problem_type == MULTI_LABEL else ROWS[kind].label

    def as_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "SourceStats":
        """Makes the stats from the output of `as_json`; shares nothing with it."""
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
        batches: Batches of rows, each with its source.
        data: The recipe's data section.
        tokenizer: The tokenizer, from `load_tokenizer`.
        stats: Is filled while the rows are read.
        kind: What the rows are read as.

    Raises:
        UserError: A batch has rows that cannot be used, and `on_bad_row` is error.
    """
    stats.describe_rows(kind, data)
    renderer = make_renderer_of(data, tokenizer)
    reader = GroupReader(kind, data)
    encoder = make_encoder(tokenizer)
    threads = data.dataset_num_proc or count_cores()
    pending: deque[tuple[list[RenderedText], Places, Future[Tokens]]] = deque()
    finish = partial(_finish_batch, stats=stats, bos=tokenizer.bos_token_id, images=renderer.images)
    with (
        _without_tokenizer_threads(),
        ThreadPoolExecutor(threads, thread_name_prefix="tokenize") as pool,
    ):
        try:
            for source, batch, parsed_rows in reader.read_batches(batches):
                documents, places = _render_batch(
                    batch, parsed_rows, source, data, renderer, stats, kind
                )
                pending.append(
                    (documents, places, pool.submit(tokenize, documents, places, encoder))
                )
                # Batches with images do not wait, since all their images stay in memory with them.
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
    """Names the scores of a document, for inspection; empty if the rows train no head of scores."""
    if ROWS[kind].head != "scores":
        return ()
    if ROWS[kind].label == "steps":
        return STEP_SCORES
    return data.labels or ("",)


@contextmanager
def _without_tokenizer_threads() -> Iterator[None]:
    """Keeps the tokenizers library from starting a thread pool beside ours.

    The size of its pool cannot be set.
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
    parsed_rows: Sequence[ParsedRow | BadRow],
    source: DatasetSource,
    data: Data,
    renderer: Renderer,
    stats: SourceStats,
    kind: RowKind,
) -> tuple[list[RenderedText], Places]:
    """Renders the usable rows of a batch, and counts usable and unusable rows in `stats`.

    `parsed_rows`: the groups of each row, or what is wrong with the row.

    Returns:
        The rendered documents, and the place (file, row) of each.

    Raises:
        UserError: A row cannot be used, and `on_bad_row` is error.
    """
    if batch.file not in stats.files:
        stats.files.append(batch.file)
    file = stats.files.index(batch.file)
    documents: list[RenderedText] = []
    places: Places = []
    problems: dict[str, str] = {}  # place of a row -> what is wrong with it
    for number, row, parsed in zip(batch.numbers, batch.rows, parsed_rows, strict=True):
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
        _count_images_unread(row, parsed, where, kind, renderer, stats)
        _count_row(row, parsed, file, where, stats)
        unread_keys = _list_unread_keys(parsed, renderer_of_source(renderer, source))
        count_columns(stats.unused_columns, dict.fromkeys(unread_keys, 1))
    stats.rows_read += len(batch.rows)
    _count_problems(problems, len(batch.rows), data, stats)
    return documents, places


def _render_row(
    parsed: ParsedRow | BadRow, file: str, source: DatasetSource, renderer: Renderer
) -> tuple[list[RenderedText], list[str]]:
    """Renders a row; returns its documents, and the names of its findings without repeats.

    Raises `BadRow` if the row cannot be used: `parsed` itself, or what the rendering finds.
    """
    if isinstance(parsed, BadRow):
        raise parsed
    source_renderer = renderer_of_source(renderer, source)
    folder = find_image_folder(source, file)
    texts: list[RenderedText] = []
    findings = list(parsed.findings)
    for group in parsed.groups:
        group_texts, group_findings = render_group(group, source_renderer, folder)
        texts += group_texts
        findings += group_findings
    if _is_rated_both_ways(parsed.groups, texts):
        texts = []
        findings.append("sides_equal")
    return texts, list(dict.fromkeys(findings))


def _is_rated_both_ways(groups: Sequence[Group], texts: Sequence[RenderedText]) -> bool:
    """Whether a row is a pair of equal answers, of which one is rated good and the other bad.

    `texts`: of all groups. Each rated answer is followed by its mismatched one.
    """
    if len(groups) != 2 or not groups[0].rating:
        return False
    return texts[0].text == texts[2].text


def _count_images_unread(
    row: Row, parsed: ParsedRow, where: str, kind: RowKind, renderer: Renderer, stats: SourceStats
) -> None:
    """Counts a finding if the row has a column of images that the model does not see."""
    column = _find_unread_image_column(row, parsed, kind)
    if column is None:
        return
    takes_images = renderer.images is not None and renderer.images.model_takes_images
    name = "images_dropped" if takes_images else "images_unread"
    stats.tally.add(name, [where])
    stats.tally.details.setdefault(name, f"the column {list_columns([column])}")


def _count_row(row: Row, parsed: ParsedRow, file: int, where: str, stats: SourceStats) -> None:
    """Counts a row's unused columns and repeated keys, and records its format.

    `file`: the index of the row's file in `stats.files`; `where`: the row's place, for the finding.
    """
    count_columns(stats.unused_columns, dict.fromkeys(parsed.unused_columns, 1))
    if isinstance(row, RepeatedKeys):
        stats.tally.add("repeated_keys", [where])
    if parsed.rendering not in stats.formats:
        stats.formats.append(parsed.rendering)
    if parsed.format != "text" and file not in stats.structured_files:
        stats.structured_files.append(file)


def _count_problems(problems: Mapping[str, str], rows: int, data: Data, stats: SourceStats) -> None:
    """Counts the rows of a batch that cannot be used.

    Args:
        problems: Place of a row -> what is wrong with it.
        rows: Number of all rows of the batch.
        data: The recipe's data section.
        stats: The counts of the source.

    Raises:
        UserError: There are problems, and `on_bad_row` is error.
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
    """Yields "KEY of messages" for each key of a message that the chat template does not read.

    They are counted as unused columns.
    """
    for document in chain.from_iterable(group.documents for group in parsed.groups):
        asked = document.asked if isinstance(document, Question) else document
        if isinstance(asked, Conversation):
            for message in asked.messages:
                for key in list_unread_keys(message, renderer.template):
                    yield f"{key} of messages"


def _find_unread_image_column(row: Row, parsed: ParsedRow, kind: RowKind) -> str | None:
    """Finds the first column of images in a row that no document reads images from.

    Returns None if a document of the row has images, or if no column holds any.
    """
    for group in parsed.groups:
        if any(getattr(document, "images", ()) for document in group.documents):
            return None
    # Rewards get all columns of a prompt, so none counts as unused; the model does not see them.
    columns = row if kind == "prompts" else parsed.unused_columns
    return next(
        (column for column in columns if row.get(column) and holds_images(column, row[column])),
        None,
    )


def count_columns(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds `more` to `counts` (column -> rows); at most MAX_NAMED_COLUMNS columns are counted."""
    for column, rows in more.items():
        if column in counts or len(counts) < MAX_NAMED_COLUMNS:
            counts[column] = counts.get(column, 0) + rows


def _finish_batch(
    documents: list[RenderedText],
    places: Places,
    encoded: "Future[Tokens]",
    stats: SourceStats,
    bos: int | None,
    images: ImageProcessor | None,
) -> Tokens:
    """Waits for the tokens of a batch, and counts the findings and images of the batch in `stats`.

    Args:
        documents: The rendered documents.
        places: (file, row) of each document.
        encoded: The documents' tokens.
        stats: The counts of the source.
        bos: The id of BOS; None if the tokenizer has none.
        images: The model's image processor; None if the renderer has none.
    """
    tokens = encoded.result()
    names = [name_place(stats.files[file], row) for file, row in places]
    _count_findings(documents, names, stats)
    _count_split_tokens(documents, names, tokens, stats)
    if len(tokens.image_hashes):
        stats.images += len(tokens.image_hashes)
        assert images is not None
        stats.image_token_ids = list(images.token_ids)
        digest = xxhash.xxh3_128_hexdigest(tokens.image_hashes.tobytes())
        stats.content.append(digest)  # a run that resumes compares it
    if not stats.is_asked:
        _tally_rows(
            stats, "nothing_trained", [names[i] for i in np.flatnonzero(tokens.trained == 0)]
        )
    if bos is not None:
        _tally_rows(stats, "doubled_bos", [names[i] for i in _find_doubled_bos(tokens, bos)])
    return tokens


def _find_doubled_bos(tokens: Tokens, bos: int) -> Int64s:
    """Returns the indexes, in the batch, of the documents that begin with two BOS tokens."""
    starts = np.cumsum(tokens.lengths, dtype=np.int64) - tokens.lengths
    candidates = np.flatnonzero(tokens.lengths > 1)
    first = tokens.input_ids[starts[candidates]]
    second = tokens.input_ids[starts[candidates] + 1]
    doubled: Int64s = candidates[(first == bos) & (second == bos)]
    return doubled


def _count_findings(documents: list[RenderedText], places: list[str], stats: SourceStats) -> None:
    """Counts the findings of rendered documents, once for each row.

    For a finding in COMPARED, the first difference is kept as its detail.

    Args:
        documents: The documents.
        places: The name of each document's row.
        stats: The counts of their source.
    """
    places_by_finding: dict[str, list[str]] = {}
    for document, place in zip(documents, places, strict=True):
        for name in document.findings:
            places_by_finding.setdefault(name, []).append(place)
            if document.difference and name in COMPARED:
                stats.tally.details.setdefault(name, document.difference)
    for name in sorted(places_by_finding):
        _tally_rows(stats, name, places_by_finding[name])


def _count_split_tokens(
    documents: list[RenderedText], places: list[str], tokens: Tokens, stats: SourceStats
) -> None:
    """Counts the tokens that `turns_split` adds to the data.

    A row whose turns became several documents adds the tokens of all but its longest document.
    """
    lengths_by_row: dict[str, list[int]] = {}
    for place, document, length in zip(places, documents, tokens.lengths.tolist(), strict=True):
        if "turns_split" in document.findings:
            lengths_by_row.setdefault(place, []).append(length)
    extra = sum(sum(lengths) - max(lengths) for lengths in lengths_by_row.values())
    if extra:
        stats.tally.tokens["turns_split"] = stats.tally.tokens.get("turns_split", 0) + extra


def _tally_rows(stats: SourceStats, name: str, places: list[str]) -> None:
    """Counts a finding once for each row: `places` repeats a row that became several documents."""
    stats.tally.add(name, list(dict.fromkeys(places)))
