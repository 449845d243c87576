"""Pairs of documents: never taken apart, by rows, steps, ranks, sources, held-out splits or what is too long."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.schema import Data, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch
from finetune.data.data_report import find_held_out_in_training, measure_fill, select_examples
from finetune.data.examples import cut, hold_out, mix_sources
from finetune.data.packing import BatchConfig, StoredBatches, make_batches
from tests.data.world import Rank, examples_of, store_of

LENGTHS = np.random.default_rng(5).integers(2, 65, size=74).tolist()


def loader(
    lengths: Sequence[int] = LENGTHS,
    *,
    packing: bool,
    size: int = 1,
    rank: int = 0,
    per_device: int = 2,
) -> StoredBatches:
    config = BatchConfig(seed=0, packing=packing, max_length=64, global_batch_size=5)
    batches = make_batches(examples_of(lengths, group_size=2), config, Rank(rank, size), per_device)
    return replace(batches, steps=2 * batches.steps_per_epoch)


def assert_whole_pairs(micro_batch: MicroBatch) -> None:
    """Chosen and rejected side by side, and each trained position under the document that holds it."""
    ids = micro_batch.example_ids
    assert list(ids[1::2]) == [i + 1 for i in ids[::2]] and all(i % 2 == 0 for i in ids[::2])
    documents, positions = micro_batch.trained_documents, micro_batch.trained_positions
    assert (
        documents is not None
        and documents.dtype == torch.int64
        and len(documents) == len(positions)
    )
    labels = micro_batch.labels.flatten()[positions]
    trained = labels != IGNORE_INDEX
    # The tokens of example i are 1000 i, 1000 i + 1, ...
    assert [ids[d] for d in documents[trained].tolist()] == (labels[trained] // 1000).tolist()
    assert not documents[~trained].any() and "trained_documents" not in micro_batch.inputs


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_stay_whole_on_any_ranks_and_in_any_micro_batches(packing: bool) -> None:
    truth = [
        Counter(i for m in step.micro_batches for i in m.example_ids)
        for step in loader(packing=packing).batches()
    ]
    assert sum(truth, Counter()) == dict.fromkeys(range(len(LENGTHS)), 2)
    for size in (1, 2, 3):
        for per_device in (1, 4):
            ranks = [
                loader(packing=packing, size=size, rank=rank, per_device=per_device)
                for rank in range(size)
            ]
            for step, shares in enumerate(
                zip(*(batches.batches() for batches in ranks), strict=True)
            ):
                micro_batches = [m for share in shares for m in share.micro_batches]
                for micro_batch in micro_batches:
                    assert_whole_pairs(micro_batch)
                ids = Counter(i for m in micro_batches for i in m.example_ids)
                assert ids == truth[step]
                assert {share.groups for share in shares} == {len(ids) // 2}


@given(
    st.lists(st.tuples(st.integers(2, 64), st.integers(2, 64)), min_size=1, max_size=20),
    st.booleans(),
)
def test_a_packed_row_holds_two_documents_of_max_length_and_a_padded_one_a_pair(
    pairs: list[tuple[int, int]], packing: bool
) -> None:
    batches = loader([length for pair in pairs for length in pair], packing=packing)
    rows = [
        row.tolist() for step in range(batches.steps_per_epoch) for row in batches.rows_of(step)
    ]
    assert Counter(i for row in rows for i in row) == Counter(range(2 * len(pairs)))
    for row in rows:
        assert [i + 1 for i in row[::2]] == row[1::2]
        assert sum(batches.examples.lengths[row]) <= 128 and (packing or len(row) == 2)
    assert 0 < measure_fill(batches) <= 1


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_without_a_pair_has_no_document(packing: bool) -> None:
    (share,) = replace(loader([5, 6], packing=packing, size=2, rank=1), steps=1).batches()
    (filler,) = share.micro_batches
    assert share.groups == 1 and filler.example_ids == () and filler.trained_documents is not None
    assert len(filler.trained_documents) == len(filler.trained_positions) == 0
    (single,) = replace(make_batches(examples_of([5]), BatchConfig(seed=0, packing=packing, max_length=64, global_batch_size=1), Rank(), 1)).batches()  # fmt: skip
    assert single.micro_batches[0].trained_documents is None


def test_sources_are_weighed_held_out_and_compared_by_pairs() -> None:
    pairs = examples_of([3] * 40, group_size=2)
    for weight, expected in ((0.5, 20), (2.5, 100)):
        mixed = mix_sources([pairs], [DatasetSource(path="p", weight=weight)], seed=1)
        assert len(mixed) == expected and (mixed.document[1::2] == mixed.document[::2] + 1).all()
        training, held_out = hold_out(mixed, 3, seed=1)
        assert len(held_out) == 6 and len(training) + len(held_out) <= len(mixed)
        assert not set((training.document // 2).tolist()) & set((held_out.document // 2).tolist())
        assert (held_out.document[1::2] == held_out.document[::2] + 1).all()
        assert find_held_out_in_training(training, held_out) == []
    (leak,) = find_held_out_in_training(pairs, pairs.take_groups(np.array([4, 7])))
    assert (leak.rows, leak.of, leak.where) == (2, 2, ("made-up.jsonl:5", "made-up.jsonl:8"))


def test_what_is_too_long_or_untrained_is_left_out_with_its_other_side() -> None:
    documents = [list(range(start, start + length)) for start, length in ((0, 70), (100, 9), (200, 9), (300, 9), (400, 9), (500, 1))]  # fmt: skip
    store = store_of(documents, group_size=2)
    store.facts.update({"rows_read": 3, "formats": ["pairs"]})
    assert cut(store, 64, "drop")[0].document.tolist() == [2, 3, 4, 5]
    assert cut(store, 64, "truncate")[0].lengths.tolist() == [64, 9, 9, 9, 9, 1]
    for overlength, kept, finding in (
        ("truncate", [0, 1, 2, 3], "truncated"),
        ("drop", [2, 3], "dropped"),
    ):
        examples, report = select_examples(
            store, DatasetSource(path="p"), Data(max_length=64, overlength=overlength)
        )  # type: ignore[arg-type]
        assert (
            examples.document.tolist() == kept and examples.group_size == 2
        )  # the last document has no label
        (found,) = [finding_ for finding_ in report.findings if finding_.name == finding]
        assert (found.rows, found.where) == (1, ("made-up.jsonl:1",))
