"""Several sources as one set of examples, and the part of it that is held out."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Data, DatasetSource
from finetune.data.data_report import SourceReport, count_groups
from finetune.data.examples import Cuts, Examples, cut, join
from finetune.data.findings import MAX_SHOWN_ROWS, Finding, Tally
from finetune.data.packing import make_generator
from finetune.data.token_store import TokenStore
from finetune.data.tokenize import SourceStats
from finetune.errors import UserError


def select_examples(store: TokenStore, source: DatasetSource, data: Data) -> tuple[Examples, SourceReport]:
    """The source's examples that hold something to train on, and a report of all of its rows."""
    examples, cuts = cut(store, data.max_length, data.overlength)
    equal = _find_cut_equal(examples, cuts)
    is_trained = (examples.trained > 0).reshape(-1, examples.group_size).all(1) | store.is_asked
    kept = examples.take_groups(np.flatnonzero(is_trained & ~np.isin(np.arange(examples.groups), equal)))
    stats = SourceStats.from_json(store.facts)
    # In a block of a stream, a small source that is read again would count as its own duplicate.
    duplicates = (
        np.zeros(0, np.int64) if stats.stream else _find_repeated(store.hashes[:: store.group_size]) * store.group_size
    )
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
        image_tokens=int(np.isin(store.input_ids, stats.image_token_ids).sum()) if stats.images else 0,
    )
    return kept, report


def _find_cut_equal(examples: Examples, cuts: Cuts) -> NDArray[np.int64]:
    """The groups of two documents that differ only in what was cut off, but still hold something to train on."""
    if examples.group_size == 1 or examples.is_rated:
        return np.zeros(0, np.int64)
    is_cut = np.isin(examples.document, cuts.truncated).reshape(-1, 2).any(1)
    is_trained = (examples.trained > 0).reshape(-1, 2).all(1)
    groups = np.flatnonzero(is_cut & is_trained).tolist()
    pairs = ((group, examples[2 * group], examples[2 * group + 1]) for group in groups)
    equal = [
        group
        for group, chosen, rejected in pairs
        if np.array_equal(chosen.input_ids, rejected.input_ids) and np.array_equal(chosen.labels, rejected.labels)
    ]
    return np.array(equal, np.int64)


def _add_lengths(tally: Tally, store: TokenStore, examples: Examples, cuts: Cuts) -> None:
    for name, documents in (("truncated", cuts.truncated), ("dropped", cuts.dropped), ("split", cuts.split)):
        _add_documents(tally, name, store, documents)
    if len(cuts.truncated):
        emptied = np.unique(examples.document[(examples.trained == 0) & (store.trained[examples.document] > 0)])
        _add_documents(tally, "truncated_untrained", store, np.intersect1d(emptied, cuts.truncated))


def _add_documents(tally: Tally, name: str, store: TokenStore, documents: NDArray[np.int64]) -> None:
    """Counts a check once for each row, of which several documents may come."""
    _, first = np.unique(_number_rows(store)[documents], return_index=True)
    tally.add(name, [store.where(int(document)) for document in documents[first[:MAX_SHOWN_ROWS]]], len(first))


def _find_repeated(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indexes of all but the first of equal hashes."""
    _, first = np.unique(hashes, return_index=True)
    again = np.ones(len(hashes), bool)
    again[first] = False
    return np.flatnonzero(again)


def mix_sources(parts: Sequence[Examples], sources: Sequence[DatasetSource], seed: int) -> Examples:
    """All sources' examples, each as often as its weight: 2 is twice, 0.5 is a half of them, drawn by the seed."""
    return join([_weigh(part, sources[i].weight, seed, i) for i, part in enumerate(parts)])


def _weigh(examples: Examples, weight: float, seed: int, number: int) -> Examples:
    if weight == 1:
        return examples
    whole, rest = divmod(weight, 1.0)
    count = examples.groups
    drawn = make_generator(seed, "weights", number).permutation(count)[: round(rest * count)]
    return examples.take_groups(np.concatenate([np.tile(np.arange(count), int(whole)), np.sort(drawn)]))


def hold_out(examples: Examples, size: float, seed: int) -> tuple[Examples, Examples]:
    """(examples to train on, held-out ones), of which `size` is a share (below 1) or a count of rows.

    All that comes of a row (stretches, groups, repetitions) stays on one side. Raises `UserError` if one is empty.
    """
    rows, of = np.unique(_number(examples.store, examples.look_up(_number_rows)), return_inverse=True)
    total = len(rows)
    count = round(size * total) if size < 1 else int(size)
    if not 0 < count < total:
        raise UserError(
            f"eval_split_size: {size:g} of {total} rows is {count}, which leaves none to "
            f"{'measure' if count == 0 else 'train'} on; set another size, or name other rows in eval_datasets"
        )
    held = np.zeros(total, bool)
    held[make_generator(seed, "held out").permutation(total)[:count]] = True
    is_held = held[of]
    return examples.take(np.flatnonzero(~is_held)), _drop_repeats(examples.take(np.flatnonzero(is_held)))


def _number_rows(store: TokenStore) -> NDArray[np.int64]:
    """int64[documents]: the row that each comes of, counted over the store."""
    is_next = (np.diff(store.files) != 0) | (np.diff(store.rows) != 0)
    return np.append(0, np.cumsum(is_next))


def _drop_repeats(examples: Examples) -> Examples:
    """Without the repetitions that a weight above 1 made."""
    _, first = np.unique(_number(examples.store, examples.start), return_index=True)
    return examples.take(np.sort(first))


def _number(store: NDArray[np.int32], within: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each (store, place within it); far quicker to sort than pairs."""
    return (store.astype(np.int64) << 44) | within


def find_held_out_in_training(training: Examples, held_out: Examples) -> list[Finding]:
    """A finding where the text of a held-out example is trained on too."""
    hashes = [examples.look_up(lambda store: store.hashes)[:: examples.group_size] for examples in (held_out, training)]
    leaked = np.flatnonzero(np.isin(hashes[0], np.unique(hashes[1])))
    tally = Tally()
    tally.add("held_out_in_training", [held_out.where(int(i)) for i in leaked * held_out.group_size])
    return tally.list_findings(of=held_out.groups)


def find_same_ratings(examples: Examples) -> list[Finding]:
    """A finding where all rated answers are good, or all are bad."""
    if not examples.is_rated or len(np.unique(examples.find_ratings())) != 1:
        return []
    tally = Tally()
    first = [examples.where(group * examples.group_size) for group in range(min(MAX_SHOWN_ROWS, examples.groups))]
    tally.add("same_ratings", first, examples.groups)
    return tally.list_findings(of=examples.groups)
