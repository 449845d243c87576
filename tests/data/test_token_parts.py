"""The parts that ranks have of a row's tokens are the whole row, and every part knows whose tokens it holds."""

import numpy as np
import pytest
import torch

from finetune.constants import IGNORE_INDEX, ROUND_TOKENS
from finetune.data.batches import MicroBatch
from finetune.data.packing import BatchConfig, collate, make_batches
from tests.data.world import Rank, examples_of

LENGTHS = (5, 61, 40, 17, 3, 64)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_together_they_are_the_whole(parts: int, packing: bool, group_size: int) -> None:
    examples = examples_of(LENGTHS, group_size=group_size)
    ids = np.arange(len(LENGTHS))
    whole = collate(examples, ids, packing=packing, pad_token_id=0)
    split = [
        collate(examples, ids, packing=packing, pad_token_id=0, part=rank, parts=parts)
        for rank in range(parts)
    ]
    tokens = split[0].labels.shape[1]
    assert all(
        part.labels.shape == part.input_ids.shape == (len(whole.labels), tokens) for part in split
    )
    assert tokens % ROUND_TOKENS == 0 or not packing
    for name in ("input_ids", "labels", "position_ids", "token_mask"):
        together = torch.cat([getattr(part, name) for part in split], dim=1)
        real = min(together.shape[1], whole.labels.shape[1])
        mask = whole.token_mask[:, :real]  # type: ignore[index]
        assert together[:, :real][mask].equal(getattr(whole, name)[:, :real][mask])
    for part in split:
        assert (part.example_ids, part.document_lengths) == (
            whole.example_ids,
            whole.document_lengths,
        )
        assert part.cu_seq_lens is None or int(part.cu_seq_lens[-1]) == tokens * parts
    assert sorted(of_each_document(whole)) == sorted(
        pair for part in split for pair in of_each_document(part)
    )


def of_each_document(micro_batch: MicroBatch) -> list[tuple[int, int]]:
    """(its document, or -1 where none are compared; the label) of every trained position."""
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    documents = micro_batch.trained_documents
    owners = torch.full_like(labels, -1) if documents is None else documents
    has_label = labels != IGNORE_INDEX
    assert int(has_label.sum()) == int((micro_batch.labels != IGNORE_INDEX).sum())
    return list(zip(owners[has_label].tolist(), labels[has_label].tolist(), strict=True))


def test_ranks_of_a_sequence_have_the_same_rows_and_fillers() -> None:
    """Two groups of two ranks; the second group has a row less."""
    config = BatchConfig(seed=0, packing=True, max_length=64, global_batch_size=3)
    examples = examples_of((60, 60, 60))
    batches = [
        make_batches(
            examples, config, Rank(group, 2, sequence_rank=part, sequence_size=2), 1
        ).step_batch(0)
        for group in range(2)
        for part in range(2)
    ]
    rows = [[micro_batch.example_ids for micro_batch in batch.micro_batches] for batch in batches]
    assert rows[0] == rows[1] and rows[2] == rows[3]
    assert [len(ids) for ids in rows[0]] == [1, 1] and [len(ids) for ids in rows[2]] == [1, 0]
    assert len({batch.micro_batches[1].labels.shape for batch in batches}) == 1
    assert {batch.tokens for batch in batches} == {180}
