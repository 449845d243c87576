"""One source as tokens: rows are read and rendered in turn, and encoded by threads while the next are read."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from finetune.data.chat import Rendered, render
from finetune.data.checks import Tally
from finetune.data.formats import format_of, read_document
from finetune.data.json_rows import RepeatedKeys
from finetune.data.messages import BadRow
from finetune.data.renderer import Renderer, renderer
from finetune.data.sources import RowBatch
from finetune.data.token_store import Tokens
from finetune.data.tokens import encoder, tokenize
from finetune.errors import UserError
from finetune.recipe.schema import Data, DatasetSource

SHOWN_BAD_ROWS = 5
NAMED_COLUMNS = 100  # of the unused ones; a file may have another column in every row
ENCODED_AHEAD = 4  # batches for each thread


@dataclass(slots=True)
class Facts:
    """What is known of a source beside its tokens, once all of it has been read."""

    files: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)  # a hash of each file's bytes
    rows_read: int = 0
    rows_skipped: int = 0
    skipped: list[str] = field(default_factory=list)  # what was wrong with the first of them
    formats: list[str] = field(default_factory=list)  # of its rows, as they are met
    unused_columns: dict[str, int] = field(default_factory=dict)  # column -> rows that hold a value in it
    structured_files: list[int] = field(default_factory=list)  # indexes of the files with rows that are not plain text
    tally: Tally = field(default_factory=Tally)
    stream: dict[str, int] = field(default_factory=dict)  # of a block of a stream: where the stream stands behind it

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_facts(kept: dict[str, Any]) -> Facts:
    """Facts that `Facts.as_json` wrote."""
    return Facts(**{**kept, "tally": Tally(**kept["tally"])})


def tokenized(
    batches: Iterable[tuple[DatasetSource, RowBatch]], data: Data, tokenizer: Any, facts: Facts
) -> Iterator[Tokens]:
    """Rows as tokens, batch after batch in their order; `facts` grows with them.

    Raises `UserError` at the first rows that fit no format, unless `on_bad_row` is `skip`.
    """
    way = renderer(tokenizer, data.assistant_only_loss)
    by = encoder(tokenizer)
    threads = data.dataset_num_proc or os.cpu_count() or 1
    ahead: deque[tuple[list[Rendered], list[tuple[int, int]], Future[Tokens]]] = deque()
    with _one_thread_each(), ThreadPoolExecutor(threads, thread_name_prefix="tokenize") as pool:
        try:
            for source, batch in batches:
                documents, places = _rendered(batch, source, data, way, facts)
                ahead.append((documents, places, pool.submit(tokenize, documents, places, by)))
                if len(ahead) > ENCODED_AHEAD * threads:
                    yield _noted(*ahead.popleft(), facts, tokenizer.bos_token_id)
            while ahead:
                yield _noted(*ahead.popleft(), facts, tokenizer.bos_token_id)
        finally:
            for _, _, future in ahead:
                future.cancel()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keeps the tokenizers library from starting threads of its own beside ours: its pool cannot be given a size."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _rendered(
    batch: RowBatch, source: DatasetSource, data: Data, way: Renderer, facts: Facts
) -> tuple[list[Rendered], list[tuple[int, int]]]:
    """(documents, their (file, row number)) of one batch of rows."""
    if batch.file not in facts.files:
        facts.files.append(batch.file)
    file = facts.files.index(batch.file)
    documents: list[Rendered] = []
    places, bad = [], []
    for number, row in zip(batch.numbers, batch.rows, strict=True):
        try:
            if isinstance(row, BadRow):
                raise row
            "".join(row).encode()  # a column's name is shown in messages and kept in reports
            read, unused = read_document(row, source)
            document = render(read, way)
            document.text.encode()
        except BadRow as problem:
            bad.append(f"{batch.file}:{number}: {problem}")
        except UnicodeEncodeError:
            bad.append(
                f"{batch.file}:{number}: half of a UTF-16 pair stands alone in its text or a column's name; it is not valid Unicode"
            )
        else:
            documents.append(document)
            places.append((file, number))
            count_columns(facts.unused_columns, dict.fromkeys(unused, 1))
            if isinstance(row, RepeatedKeys):
                facts.tally.note("repeated_keys", [f"{batch.file}:{number}"])
            kind = format_of(row, source)
            if kind not in facts.formats:
                facts.formats.append(kind)
            if kind != "text" and file not in facts.structured_files:
                facts.structured_files.append(file)
    facts.rows_read += len(batch.rows)
    if bad and data.on_bad_row == "error":
        raise UserError(_told(bad, len(batch.rows)))
    facts.rows_skipped += len(bad)
    facts.skipped += bad[: SHOWN_BAD_ROWS - len(facts.skipped)]
    facts.tally.note("skipped", [problem.split(": ", 1)[0] for problem in bad])
    return documents, places


def count_columns(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds `more` to the rows counted for each column, naming at most `NAMED_COLUMNS` of them."""
    for column, rows in more.items():
        if column in counts or len(counts) < NAMED_COLUMNS:
            counts[column] = counts.get(column, 0) + rows


def _told(bad: Sequence[str], rows: int) -> str:
    """The first bad rows, a line each, and what to do."""
    more = len(bad) - SHOWN_BAD_ROWS
    lines = list(bad[:SHOWN_BAD_ROWS])
    if more > 0:
        lines.append(f"{more} more rows of these {rows} do not fit either")
    lines[-1] += " (on_bad_row: skip leaves such rows out and counts them)"
    return "\n".join(lines)


def _noted(
    documents: list[Rendered],
    places: list[tuple[int, int]],
    encoded: "Future[Tokens]",
    facts: Facts,
    bos: int | None,
) -> Tokens:
    """The batch's tokens, once they are there, with what they show noted in `facts`."""
    tokens = encoded.result()
    where = [f"{facts.files[file]}:{row}" for file, row in places]
    for name in sorted({name for document in documents for name in document.remarks}):
        facts.tally.note(name, [place for place, d in zip(where, documents, strict=True) if name in d.remarks])
    facts.tally.note("nothing_trained", [where[i] for i in np.flatnonzero(tokens.trained == 0)])
    if bos is not None and len(tokens.input_ids):
        starts = np.cumsum(tokens.lengths, dtype=np.int64) - tokens.lengths
        long_enough = tokens.lengths > 1
        second = tokens.input_ids[np.minimum(starts + 1, len(tokens.input_ids) - 1)]
        first = tokens.input_ids[np.minimum(starts, len(tokens.input_ids) - 1)]
        doubled = long_enough & (first == bos) & (second == bos)
        facts.tally.note("doubled_bos", [where[i] for i in np.flatnonzero(doubled)])
    return tokens
