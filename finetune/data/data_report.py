"""Selects the examples of each source that are trained on, and reports what was lost and found:
the contents of data_report.json.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Data, DatasetSource
from finetune.constants import ROUND_TOKENS, Names
from finetune.data.batches import Ids
from finetune.data.examples import Cuts, Examples, count_trained, cut, number_rows
from finetune.data.findings import MAX_SHOWN_ROWS, Finding, Tally, list_warnings
from finetune.data.packing import StoredBatches
from finetune.data.source_tokens import SHOWN_BAD_ROWS, SourceStats, count_columns
from finetune.data.token_store import Int64s, TokenStore
from finetune.units import counted

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)  # of the examples' lengths
# the counts of `SourceReport` that a stream adds up over its blocks
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
# A stream's finding is logged when it is first met, and again each time that its number of rows
# has grown by this factor.
REPEATED_FROM = 10


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The counts of one source, before its `weight` repeats or draws its examples."""

    path: str
    formats: Names  # of the rows
    rows_in_source: int | None  # of which max_samples are read; None: without max_samples
    rows_read: int
    rows_skipped: int
    skipped: tuple[str, ...]  # for the first skipped rows: what was wrong
    # column that nothing was read from -> number of rows that hold a value in it
    unused_columns: dict[str, int]
    documents: int
    tokens: int
    trained_tokens: int
    examples: int  # documents, or parts of them, that are trained on or measured
    pairs: int  # groups that are compared and not rated, such as chosen with rejected
    desirable: int  # answers rated good
    undesirable: int  # answers rated bad
    overlong: int  # documents of more than max_length tokens
    tokens_lost: int  # in what was cut off or dropped
    trained_tokens_lost: int
    duplicates: int  # groups that are the same as an earlier one
    findings: tuple[Finding, ...]
    images: int = 0
    image_tokens: int = 0  # tokens that stand for the images

    def lines(self) -> list[str]:
        """The lines on the rows that max_samples drew, the images, and the tokens that are lost."""
        lines = []
        if self.rows_in_source is not None:
            lines.append(
                f"{self.path}: {self.rows_read:,} of its {counted(self.rows_in_source, 'row')} "
                "(max_samples), drawn by the seed"
            )
        if self.images:
            share = f"{self.image_tokens / max(self.tokens, 1):.1%}"
            lines.append(
                f"{self.path}: {counted(self.images, 'image')}, which take {self.image_tokens:,} "
                f"({share}) of its tokens"
            )
        lines += describe_lost(self.path, self.tokens_lost, self.tokens, self.trained_tokens_lost)
        return lines


def count_groups(examples: Examples) -> dict[str, int]:
    """Counts the groups of `examples`: unrated ones ("pairs"), good answers and bad answers.

    All are 0 where each example is a group by itself: nothing is compared then.
    """
    if examples.group_size > 1:
        ratings = examples.find_group_ratings()
    else:
        ratings = np.zeros(0, np.int8)
    masks = {"pairs": ratings == 0, "desirable": ratings > 0, "undesirable": ratings < 0}
    return {name: int(np.count_nonzero(mask)) for name, mask in masks.items()}


def count_examples(examples: int, pairs: int, desirable: int = 0, undesirable: int = 0) -> str:
    """Says how many examples there are, as groups or rated answers where they are such.

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


def describe_lost(path: str, lost: int, tokens: int, trained_lost: int) -> list[str]:
    """Says how many of a source's tokens are lost to `max_length`; an empty list if none are.

    >>> print(*describe_lost("a.jsonl", 640720, 656080, 640720))
    a.jsonl: 97.7% of the tokens are lost to max_length: 640,720 of 656,080, 640,720 of them trained
    """
    share = f"{lost / max(tokens, 1):.1%} of the tokens are lost to max_length"
    if lost:
        return [f"{path}: {share}: {lost:,} of {tokens:,}, {trained_lost:,} of them trained"]
    return []


def select_examples(
    store: TokenStore, source: DatasetSource, data: Data, omits_next: bool = False
) -> tuple[Examples, SourceReport]:
    """Selects the examples of a source that hold something to train on.

    A group is selected if all of its documents have a trained token, and if truncation has not made
    chosen and rejected equal. Prompts, which have no trained token, are all selected.

    Args:
        store: The documents of the source.
        source: The source.
        data: The recipe's data section.
        omits_next: Whether the method masks tokens, as in `cut`.

    Returns:
        The selected examples, and a report of all rows of the source.
    """
    examples, cuts = cut(store, data.max_length, data.overlength, omits_next)
    equal_groups = _find_cut_equal(examples, cuts)
    is_trained = (examples.trained > 0).reshape(-1, examples.group_size).all(1) | store.is_asked
    is_equal = np.isin(np.arange(examples.groups), equal_groups)
    selected = examples.take_groups(np.flatnonzero(is_trained & ~is_equal))
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
    _add_cuts(tally, store, examples, cuts)
    equal_documents = examples.document[equal_groups * examples.group_size]
    _add_documents(tally, "truncated_equal", store, equal_documents)
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
        trained_tokens=count_trained(store),
        examples=len(selected),
        **count_groups(selected),
        overlong=len(cuts.truncated) + len(cuts.dropped) + len(cuts.split),
        tokens_lost=cuts.tokens_lost,
        trained_tokens_lost=cuts.trained_tokens_lost,
        duplicates=len(duplicates),
        findings=tuple(tally.list_findings(stats.rows_read, stats.unused_columns)),
        images=stats.images,
        image_tokens=image_tokens,
    )
    return selected, report


def _find_duplicates(store: TokenStore) -> Int64s:
    """Finds the groups that are the same as an earlier group.

    Returns:
        The first document of each such group, as indexes into the store's documents.
    """
    hashes = store.hashes[:: store.group_size]
    _, first_groups = np.unique(hashes, return_index=True)
    repeated_groups = np.delete(np.arange(len(hashes)), first_groups)
    return repeated_groups * store.group_size


def _find_cut_equal(examples: Examples, cuts: Cuts) -> Int64s:
    """Finds the pairs whose chosen and rejected are the same after truncation.

    A pair with a side without trained tokens is left out: it is not used in any case.

    Returns:
        The numbers of their groups.
    """
    if examples.group_size != 2 or examples.is_rated:
        return np.zeros(0, np.int64)
    is_cut = np.isin(examples.document, cuts.truncated).reshape(-1, 2).any(1)
    is_trained = (examples.trained > 0).reshape(-1, 2).all(1)
    equal = []
    for group in np.flatnonzero(is_cut & is_trained).tolist():
        chosen = examples[2 * group]
        rejected = examples[2 * group + 1]
        same_ids = np.array_equal(chosen.input_ids, rejected.input_ids)
        if same_ids and np.array_equal(chosen.labels, rejected.labels):
            equal.append(group)
    return np.array(equal, np.int64)


def _add_cuts(tally: Tally, store: TokenStore, examples: Examples, cuts: Cuts) -> None:
    """Counts the documents that `max_length` truncated, dropped, split or left without a label."""
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
    """Counts the finding `name` in the rows that `documents` come from, each row once."""
    _, first_of_row = np.unique(number_rows(store)[documents], return_index=True)
    shown = documents[first_of_row[:MAX_SHOWN_ROWS]]
    tally.add(name, [store.where(int(document)) for document in shown], rows=len(first_of_row))


def find_held_out_in_training(training: Examples, held_out: Examples) -> list[Finding]:
    """Finds the held-out groups that are trained on too, by the hash of their texts.

    Returns one finding, or none.
    """
    leaked = np.flatnonzero(np.isin(_list_hashes(held_out), np.unique(_list_hashes(training))))
    places = [held_out.where(int(i)) for i in leaked * held_out.group_size]
    tally = Tally()
    tally.add("held_out_in_training", places)
    return tally.list_findings(examined=held_out.groups)


def _list_hashes(examples: Examples) -> NDArray[np.uint64]:
    """Returns the hash of each group: uint64[groups]."""
    return examples.look_up(lambda store: store.hashes)[:: examples.group_size]


def find_same_ratings(examples: Examples) -> list[Finding]:
    """Returns one finding if all rated answers are good, or all are bad; else none."""
    if not examples.is_rated or len(np.unique(examples.find_group_ratings())) != 1:
        return []
    tally = Tally()
    first_places = [
        examples.where(group * examples.group_size)
        for group in range(min(MAX_SHOWN_ROWS, examples.groups))
    ]
    tally.add("same_ratings", first_places, examples.groups)
    return tally.list_findings(examined=examples.groups)


@dataclass(frozen=True, slots=True)
class DataReport:
    """The report of data that is all read before training; `StreamReport` is that of a stream.

    Every count is of one epoch over all ranks.
    """

    is_complete: ClassVar[bool] = True  # all data has been read
    sources: tuple[SourceReport, ...]
    eval_sources: tuple[SourceReport, ...]
    examples: int
    pairs: int  # groups that are compared and not rated, such as chosen with rejected
    desirable: int  # answers rated good
    undesirable: int  # answers rated bad
    tokens: int
    trained_tokens: int
    held_out_examples: int
    held_out_groups: dict[str, int]  # the counts of `count_groups`
    length_quantiles: dict[str, int]  # "50%" -> the median number of tokens of an example
    rows: int  # packed rows, or padded ones
    fill: float  # the share of the rows' positions that is not padding; see `measure_fill`
    steps_per_epoch: int
    findings: tuple[Finding, ...]

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
        """The lines about the data on a run's first screen.

        They are the totals, the lines of each source, then the findings above a notice.
        """
        examples = count_examples(self.examples, self.pairs, self.desirable, self.undesirable)
        totals = f"{examples}, {counted(self.tokens, 'token')}"
        # Of prompts nothing is trained on: their completions are sampled, and fill the rows.
        if self.trained_tokens:
            totals += f", {self.trained_tokens:,} trained; rows {self.fill:.1%} full"
        else:
            totals += " of prompts"
        sources = (*self.sources, *self.eval_sources)
        of_sources = [line for source in sources for line in source.lines()]
        return [totals, *of_sources, *map(str, list_warnings(self.findings))]


def make_report(
    train: StoredBatches,
    sources: tuple[SourceReport, ...],
    eval_sources: tuple[SourceReport, ...] = (),
    held_out: Examples | None = None,
    of_mixture: Sequence[Finding] = (),
) -> DataReport:
    """Makes the report of the batches to train on.

    Args:
        train: The batches.
        sources: The reports of the sources to train on.
        eval_sources: The reports of the held-out sources.
        held_out: The held-out examples; None: nothing is held out.
        of_mixture: Findings about all sources together, after the sources' own.
    """
    examples = train.examples
    quantiles = np.quantile(examples.lengths, QUANTILES)
    length_quantiles = {
        f"{share:.0%}": int(tokens) for share, tokens in zip(QUANTILES, quantiles, strict=True)
    }
    return DataReport(
        sources=sources,
        eval_sources=eval_sources,
        examples=len(examples),
        **count_groups(examples),
        tokens=int(examples.lengths.sum(dtype=np.int64)),
        trained_tokens=count_trained(examples),
        held_out_examples=0 if held_out is None else len(held_out),
        held_out_groups={} if held_out is None else count_groups(held_out),
        length_quantiles=length_quantiles,
        rows=train.rows_per_epoch,
        fill=measure_fill(train),
        steps_per_epoch=train.steps_per_epoch,
        findings=(
            *(finding for source in (*sources, *eval_sources) for finding in source.findings),
            *of_mixture,
        ),
    )


def measure_fill(train: StoredBatches, steps: int = 256) -> float:
    """Measures the share of the rows' positions that hold a token, in the first `steps` steps.

    A packed row has room for `row_tokens` tokens. A padded row has as many positions as the longest
    row of its micro-batch.
    """
    if train.config.packing and train.config.one_group_a_row:
        # Nothing fills such rows up to `row_tokens`: a micro-batch is as long as its documents.
        return 1.0
    lengths = train.examples.lengths
    tokens = 0
    rows = 0
    padded_positions = 0
    for step in range(min(steps, train.steps_per_epoch)):
        step_rows = train.rows_of(step)
        tokens += int(lengths[np.concatenate(step_rows)].sum(dtype=np.int64))
        rows += len(step_rows)
        if not train.config.packing:
            padded_positions += _count_padded(train, step_rows)
    if train.config.packing:
        return tokens / (rows * train.row_tokens)
    return tokens / padded_positions


def _count_padded(train: StoredBatches, step_rows: list[Ids]) -> int:
    """Counts the positions of a step's padded rows over all ranks, padding and fillers included.

    Args:
        train: The batches.
        step_rows: The examples of each row of the step.
    """
    positions = 0
    for rank in range(train.world.size):
        for ids in train.list_micro_batches(step_rows, rank):
            if len(ids):
                positions += int(train.examples.lengths[ids].max()) * len(ids)
            else:
                positions += ROUND_TOKENS  # a filler
    return positions


@dataclass(slots=True)
class StreamReport:
    """The report of a stream up to the block that is trained on.

    A source that has ended is read again, and its rows then count again.
    """

    is_complete: ClassVar[bool] = False  # the stream is read while training
    max_length: int
    eval_sources: tuple[SourceReport, ...] = ()
    first_rows: tuple[tuple[str, int], ...] = ()  # (path, max_samples) of sources with max_samples
    from_step: int = 0  # the first step that this launch of the run reads
    counts: Counter[str] = field(default_factory=Counter)  # name in COUNTED -> sum over the blocks
    skipped: list[str] = field(default_factory=list)  # for the first skipped rows: what was wrong
    # column that nothing was read from -> number of rows that hold a value in it
    unused_columns: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    # name of a finding -> its number of rows when it was last logged
    reported: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.counts["tokens"]

    @property
    def longest(self) -> int:
        """The most tokens that an example may have: those to come are not known."""
        return self.max_length

    @property
    def findings(self) -> list[Finding]:
        """The findings about the rows read so far, and the held-out data."""
        return [
            *self._stream_findings(),
            *(finding for source in self.eval_sources for finding in source.findings),
        ]

    def add(self, block: SourceReport) -> list[str]:
        """Adds the report of a block, and returns the lines for the log.

        A warning or fatal finding is logged when it is new or has REPEATED_FROM times as many rows
        as when it was last logged.
        """
        self.counts.update({name: getattr(block, name) for name in COUNTED})
        self.skipped += block.skipped[: SHOWN_BAD_ROWS - len(self.skipped)]
        count_columns(self.unused_columns, block.unused_columns)
        for finding in block.findings:
            self.tally.add_finding(finding)
        lines = []
        for finding in self._stream_findings():
            last_logged = self.reported.get(finding.name, 0)
            if finding.severity != "notice" and finding.rows >= REPEATED_FROM * last_logged:
                self.reported[finding.name] = finding.rows
                lines.append(str(finding))
                if finding.name in ("truncated", "dropped"):
                    lines += describe_lost(
                        block.path,
                        self.counts["tokens_lost"],
                        self.counts["tokens"],
                        self.counts["trained_tokens_lost"],
                    )
        return lines

    def lines(self) -> list[str]:
        """The lines about the data on a run's first screen; nothing of the stream is read yet."""
        eval_findings = [finding for source in self.eval_sources for finding in source.findings]
        shown = [f"held out: {finding}" for finding in list_warnings(eval_findings)]
        first = [
            f"{path}: its first {rows:,} rows (max_samples), not drawn"
            for path, rows in self.first_rows
        ]
        held_out = [f"held out: {line}" for source in self.eval_sources for line in source.lines()]
        return ["streamed, read while training", *first, *held_out, *shown]

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
        """The findings about the rows of the stream that have been read."""
        return self.tally.list_findings(self.counts["rows_read"], self.unused_columns)


Report = DataReport | StreamReport
# called with the report so far, and its new lines for the log
OnReport = Callable[[Report, list[str]], None]
