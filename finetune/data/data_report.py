"""What each source gives: its examples, and the reports behind data_report.json with what is lost
and found.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Data, DatasetSource
from finetune.constants import ROUND_TOKENS, Names
from finetune.data.batches import Ids
from finetune.data.examples import Cuts, Examples, cut, number_rows
from finetune.data.findings import MAX_SHOWN_ROWS, Finding, Tally
from finetune.data.packing import StoredBatches
from finetune.data.source_tokens import SHOWN_BAD_ROWS, SourceStats, count_columns
from finetune.data.token_store import Int64s, TokenStore
from finetune.units import counted

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
COUNTED = (
    "rows_read",
    "rows_skipped",
    "examples",
    "pairs",
    "desirable",
    "undesirable",
    "tokens",
    "trained_tokens",
    "overlong",
    "tokens_lost",
    "trained_tokens_lost",
    "images",
    "image_tokens",
)
# a stream's finding is reported when it is first met, and again in so many times as many rows
REPEATED_FROM = 10


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The counts of one source, before its weight."""

    path: str
    formats: Names  # of its rows
    rows_in_source: int | None  # where only max_samples of them are read
    rows_read: int
    rows_skipped: int
    skipped: tuple[str, ...]  # what was wrong with the first of them
    # column that nothing was read from -> rows that hold a value in it
    unused_columns: dict[str, int]
    documents: int
    tokens: int
    trained_tokens: int
    examples: int  # documents, or stretches of them, that are trained or measured on
    pairs: int  # of a chosen and a rejected example
    desirable: int  # answers rated good
    undesirable: int  # answers rated bad
    overlong: int  # documents of more than max_length tokens
    tokens_lost: int  # to cutting and dropping
    trained_tokens_lost: int
    duplicates: int
    findings: tuple[Finding, ...]
    images: int = 0
    image_tokens: int = 0  # that stand for them

    def pictures(self) -> list[str]:
        """The line that counts the images, in a list; empty where there is none."""
        share = f"{self.image_tokens / max(self.tokens, 1):.1%}"
        line = (
            f"{self.path}: {counted(self.images, 'image')}, which take {self.image_tokens:,} "
            f"({share}) of its tokens"
        )
        return [line] if self.images else []

    def sample(self) -> list[str]:
        """The line on how many of the rows are read, in a list; empty where all are."""
        if self.rows_in_source is None:
            return []
        return [
            f"{self.path}: {self.rows_read:,} of its {counted(self.rows_in_source, 'row')} "
            "(max_samples), drawn by the seed"
        ]

    def loss(self) -> list[str]:
        """The line on the share of tokens that are cut off or dropped, in a list; empty where
        nothing is lost.
        """
        return describe_loss(self.path, self.tokens_lost, self.tokens, self.trained_tokens_lost)


def count_groups(examples: Examples) -> dict[str, int]:
    """Counts the pairs, good answers and bad answers of `examples`."""
    if examples.group_size > 1:
        ratings = examples.find_ratings()
    else:
        ratings = np.zeros(0, np.int8)
    counts = {"pairs": ratings == 0, "desirable": ratings > 0, "undesirable": ratings < 0}
    return {name: int(np.count_nonzero(are_counted)) for name, are_counted in counts.items()}


def count_examples(examples: int, pairs: int, desirable: int = 0, undesirable: int = 0) -> str:
    """Says how many examples there are, in the words of their kind.

    >>> count_examples(6, 0), count_examples(6, 3), count_examples(6, 0, 2, 1)
    ('6 examples', '3 pairs', '3 rated answers (2 good, 1 bad)')
    >>> count_examples(6, 2)
    '2 groups of 3'
    """
    if rated := desirable + undesirable:
        return f"{counted(rated, 'rated answer')} ({desirable:,} good, {undesirable:,} bad)"
    if pairs and examples > 2 * pairs:
        return f"{counted(pairs, 'group')} of {examples // pairs}"
    if pairs:
        return counted(pairs, "pair")
    return counted(examples, "example")


def describe_loss(path: str, lost: int, of: int, trained: int) -> list[str]:
    """Says what share of a source's tokens `max_length` cuts off; empty where it cuts none.

    >>> print(*describe_loss("a.jsonl", 640720, 656080, 640720))
    a.jsonl: 97.7% of the tokens are lost to max_length: 640,720 of 656,080, 640,720 of them trained
    """
    share = f"{lost / max(of, 1):.1%} of the tokens are lost to max_length"
    if lost:
        return [f"{path}: {share}: {lost:,} of {of:,}, {trained:,} of them trained"]
    return []


def select_examples(
    store: TokenStore, source: DatasetSource, data: Data
) -> tuple[Examples, SourceReport]:
    """The source's examples that hold something to train on, and a report of all of its rows."""
    examples, cuts = cut(store, data.max_length, data.overlength)
    equal = _find_cut_equal(examples, cuts)
    is_trained = (examples.trained > 0).reshape(-1, examples.group_size).all(1) | store.is_asked
    is_equal = np.isin(np.arange(examples.groups), equal)
    kept = examples.take_groups(np.flatnonzero(is_trained & ~is_equal))
    stats = SourceStats.from_json(store.facts)
    if stats.stream:
        # A small source that is read again within a block would count as its own duplicate.
        duplicates = np.zeros(0, np.int64)
    else:
        duplicates = _find_duplicates(store)
    image_tokens = 0
    if stats.images:
        image_tokens = int(np.isin(store.input_ids, stats.image_token_ids).sum())
    tally = stats.tally
    _add_lengths(tally, store, examples, cuts)
    _add_documents(tally, "truncated_equal", store, examples.document[equal * examples.group_size])
    _add_documents(tally, "duplicates", store, duplicates)
    report = SourceReport(
        path=source.origin,
        formats=tuple(stats.formats),
        rows_in_source=stats.rows_in_source,
        rows_read=stats.rows_read,
        rows_skipped=stats.rows_skipped,
        skipped=tuple(stats.skipped),
        unused_columns=dict(stats.unused_columns),
        documents=len(store.rows),
        tokens=len(store.input_ids),
        trained_tokens=int(store.trained.sum(dtype=np.int64)),
        examples=len(kept),
        **count_groups(kept),
        overlong=len(cuts.truncated) + len(cuts.dropped) + len(cuts.split),
        tokens_lost=cuts.tokens_lost,
        trained_tokens_lost=cuts.trained_tokens_lost,
        duplicates=len(duplicates),
        findings=tuple(tally.list_findings(stats.rows_read, stats.unused_columns)),
        images=stats.images,
        image_tokens=image_tokens,
    )
    return kept, report


def _find_duplicates(store: TokenStore) -> Int64s:
    """Finds the groups that are the same as an earlier one: the first document of each."""
    hashes = store.hashes[:: store.group_size]
    _, first = np.unique(hashes, return_index=True)
    return np.delete(np.arange(len(hashes)), first) * store.group_size


def _find_cut_equal(examples: Examples, cuts: Cuts) -> Int64s:
    """Finds the pairs that are trained on and differ only in what was cut off: their groups."""
    if examples.group_size != 2 or examples.is_rated:
        return np.zeros(0, np.int64)
    is_cut = np.isin(examples.document, cuts.truncated).reshape(-1, 2).any(1)
    is_trained = (examples.trained > 0).reshape(-1, 2).all(1)
    groups = np.flatnonzero(is_cut & is_trained).tolist()
    pairs = ((group, examples[2 * group], examples[2 * group + 1]) for group in groups)
    equal = []
    for group, chosen, rejected in pairs:
        same_ids = np.array_equal(chosen.input_ids, rejected.input_ids)
        if same_ids and np.array_equal(chosen.labels, rejected.labels):
            equal.append(group)
    return np.array(equal, np.int64)


def _add_lengths(tally: Tally, store: TokenStore, examples: Examples, cuts: Cuts) -> None:
    """Counts what was done with documents of more than max_length tokens."""
    for name, documents in (
        ("truncated", cuts.truncated),
        ("dropped", cuts.dropped),
        ("split", cuts.split),
    ):
        _add_documents(tally, name, store, documents)
    if len(cuts.truncated):
        was_trained = store.trained[examples.document] > 0
        emptied = np.unique(examples.document[was_trained & (examples.trained == 0)])
        _add_documents(tally, "truncated_untrained", store, np.intersect1d(emptied, cuts.truncated))


def _add_documents(tally: Tally, name: str, store: TokenStore, documents: Int64s) -> None:
    """Counts a finding once for each row, though several documents may come of a row."""
    _, first = np.unique(number_rows(store)[documents], return_index=True)
    shown = documents[first[:MAX_SHOWN_ROWS]]
    tally.add(name, [store.where(int(document)) for document in shown], rows=len(first))


def find_held_out_in_training(training: Examples, held_out: Examples) -> list[Finding]:
    """A finding where the text of a held-out example is trained on too."""
    leaked = np.flatnonzero(np.isin(_list_hashes(held_out), np.unique(_list_hashes(training))))
    places = [held_out.where(int(i)) for i in leaked * held_out.group_size]
    tally = Tally()
    tally.add("held_out_in_training", places)
    return tally.list_findings(of=held_out.groups)


def _list_hashes(examples: Examples) -> NDArray[np.uint64]:
    """Returns the hash of each group: uint64[groups]."""
    return examples.look_up(lambda store: store.hashes)[:: examples.group_size]


def find_same_ratings(examples: Examples) -> list[Finding]:
    """A finding where all rated answers are good, or all are bad."""
    if not examples.is_rated or len(np.unique(examples.find_ratings())) != 1:
        return []
    tally = Tally()
    first = [
        examples.where(group * examples.group_size)
        for group in range(min(MAX_SHOWN_ROWS, examples.groups))
    ]
    tally.add("same_ratings", first, examples.groups)
    return tally.list_findings(of=examples.groups)


@dataclass(frozen=True, slots=True)
class DataReport:
    """The report of data that is read before training; every count is of one epoch over all
    ranks.
    """

    sources: tuple[SourceReport, ...]
    eval_sources: tuple[SourceReport, ...]
    examples: int
    pairs: int  # of a chosen and a rejected example
    desirable: int  # answers rated good
    undesirable: int  # answers rated bad
    tokens: int
    trained_tokens: int
    held_out_examples: int
    held_out_groups: dict[str, int]  # by what they are: see `count_groups`
    length_quantiles: dict[str, int]  # tokens of an example, by share of the examples
    rows: int  # packed rows, or padded ones
    fill: float  # the share of the rows that is not padding; see `measure_fill`
    steps_per_epoch: int
    findings: tuple[Finding, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all data has been read; a stream is read while training."""
        return True

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(self.length_quantiles.values())

    @property
    def formats(self) -> set[str]:
        return {name for source in (*self.sources, *self.eval_sources) for name in source.formats}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The lines of a run's first screen: totals, then losses and findings."""
        counts = f"{count_examples(self.examples, self.pairs, self.desirable, self.undesirable)}, "
        counts += counted(self.tokens, "token")
        # Of prompts nothing is trained on: their completions are sampled, and fill the rows.
        if self.trained_tokens:
            rows = f", {self.trained_tokens:,} trained; rows {self.fill:.1%} full"
        else:
            rows = " of prompts"
        totals = counts + rows
        sources = (*self.sources, *self.eval_sources)
        drawn = [line for source in sources for line in source.sample()]
        lost = [line for source in sources for line in (*source.pictures(), *source.loss())]
        return [
            totals,
            *drawn,
            *lost,
            *(str(finding) for finding in self.findings if finding.severity != "notice"),
        ]


def make_report(
    train: StoredBatches,
    sources: tuple[SourceReport, ...],
    eval_sources: tuple[SourceReport, ...] = (),
    held_out: Examples | None = None,
    of_mixture: Sequence[Finding] = (),
) -> DataReport:
    """The report of the batches to train on.

    `of_mixture`: what was found beside the sources' own findings.
    """
    examples = train.examples
    quantiles = np.quantile(examples.lengths, QUANTILES)
    return DataReport(
        sources=sources,
        eval_sources=eval_sources,
        examples=len(examples),
        **count_groups(examples),
        tokens=int(examples.lengths.sum(dtype=np.int64)),
        trained_tokens=int(examples.trained.sum(dtype=np.int64)),
        held_out_examples=0 if held_out is None else len(held_out),
        held_out_groups={} if held_out is None else count_groups(held_out),
        length_quantiles={f"{q:.0%}": int(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
        rows=train.rows_per_epoch,
        fill=measure_fill(train),
        steps_per_epoch=train.steps_per_epoch,
        findings=(
            *(finding for source in (*sources, *eval_sources) for finding in source.findings),
            *of_mixture,
        ),
    )


def measure_fill(train: StoredBatches, steps: int = 256) -> float:
    """Measures the share of the rows that tokens fill, over the first `steps` steps.

    A packed row has `row_tokens`; a padded one is as long as the longest of its micro-batch.
    """
    if train.config.packing and train.config.one_group_a_row:
        return 1.0  # each micro-batch is packed as it comes
    lengths = train.examples.lengths
    tokens = 0
    rows = 0
    padded = 0
    for step in range(min(steps, train.steps_per_epoch)):
        step_rows = train.rows_of(step)
        tokens += int(lengths[np.concatenate(step_rows)].sum(dtype=np.int64))
        rows += len(step_rows)
        if not train.config.packing:
            padded += _count_padded(train, step_rows)
    if train.config.packing:
        return tokens / (rows * train.row_tokens)
    return tokens / padded


def _count_padded(train: StoredBatches, step_rows: list[Ids]) -> int:
    """Counts the tokens of a step's padded rows over all ranks, padding and fillers included."""
    padded = 0
    for rank in range(train.world.size):
        for ids in train.list_micro_batches(step_rows, rank):
            if len(ids):
                padded += int(train.examples.lengths[ids].max()) * len(ids)
            else:
                padded += ROUND_TOKENS
    return padded


@dataclass(slots=True)
class StreamReport:
    """The report of a stream so far.

    A row that is read again, its source having ended, counts again.
    """

    max_length: int
    eval_sources: tuple[SourceReport, ...] = ()
    first_rows: tuple[tuple[str, int], ...] = ()  # path and max_samples of the sources that have it
    from_step: int = 0  # where this start of the run began to read
    counts: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)  # what was wrong with the first of them
    # column -> rows that hold a value in it
    unused_columns: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    # name of a finding -> its rows when it was last reported
    reported: dict[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return False

    @property
    def tokens(self) -> int:
        return self.counts["tokens"]

    @property
    def longest(self) -> int:
        return self.max_length

    @property
    def formats(self) -> set[str]:
        return {name for source in self.eval_sources for name in source.formats}

    @property
    def findings(self) -> list[Finding]:
        """The findings about the rows read so far, and the held-out data."""
        return [
            *self._stream_findings(),
            *(finding for source in self.eval_sources for finding in source.findings),
        ]

    def add(self, block: SourceReport) -> list[str]:
        """Adds a block of rows, and returns what is worth a line in the log."""
        self.counts.update({name: getattr(block, name) for name in COUNTED})
        self.skipped += block.skipped[: SHOWN_BAD_ROWS - len(self.skipped)]
        count_columns(self.unused_columns, block.unused_columns)
        for finding in block.findings:
            self.tally.add(finding.name, finding.where, finding.rows)
        lines = []
        for finding in self._stream_findings():
            if finding.severity != "notice" and finding.rows >= REPEATED_FROM * self.reported.get(
                finding.name, 0
            ):
                self.reported[finding.name] = finding.rows
                lines.append(str(finding))
                if finding.name in ("truncated", "dropped"):
                    count = self.counts
                    lines += describe_loss(
                        block.path,
                        count["tokens_lost"],
                        count["tokens"],
                        count["trained_tokens_lost"],
                    )
        return lines

    def lines(self) -> list[str]:
        of_eval = [finding for source in self.eval_sources for finding in source.findings]
        shown = [f"held out: {finding}" for finding in of_eval if finding.severity != "notice"]
        first = [
            f"{path}: its first {rows:,} rows (max_samples), not drawn"
            for path, rows in self.first_rows
        ]
        drawn = [f"held out: {line}" for source in self.eval_sources for line in source.sample()]
        return ["streamed, read while training", *first, *drawn, *shown]

    def as_json(self) -> dict[str, Any]:
        return {
            "streamed_from_step": self.from_step,
            "max_samples": list(self.first_rows),
            **self.counts,
            "skipped": self.skipped,
            "unused_columns": self.unused_columns,
            "eval_sources": [asdict(source) for source in self.eval_sources],
            "findings": [asdict(finding) for finding in self.findings],
        }

    def _stream_findings(self) -> list[Finding]:
        return self.tally.list_findings(self.counts["rows_read"], self.unused_columns)


Report = DataReport | StreamReport
# the report so far, and what is new in it as lines for the log
OnReport = Callable[[Report, list[str]], None]
