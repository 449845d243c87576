"""The loader: every example once in an epoch, in an order that neither ranks nor threads nor a stop can change."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.constants import IGNORE_INDEX, ROUND_TOKENS
from finetune.data.batches import MicroBatch
from finetune.data.data_report import measure_fill
from finetune.data.examples import cut, cut_prompts, join
from finetune.data.packing import BatchConfig, StoredBatches, make_batches
from tests.conftest import make_tokenizer
from tests.data.world import Rank, examples_of, store_of

LENGTHS = np.random.default_rng(0).integers(1, 65, size=101).tolist()


def loader(
    lengths: Sequence[int] = LENGTHS, *, packing: bool, size: int = 1, rank: int = 0, threads: int = 0,
    global_batch_size: int = 6, per_device: int = 2, seed: int = 0, epochs: int = 3,
) -> StoredBatches:  # fmt: skip
    config = BatchConfig(
        seed=seed, packing=packing, max_length=64, global_batch_size=global_batch_size
    )
    batches = make_batches(
        examples_of(lengths),
        config,
        Rank(rank, size),
        per_device_batch_size=per_device,
        threads=threads,
    )
    return replace(batches, steps=epochs * batches.steps_per_epoch)


def ids_of_steps(ranks: Sequence[StoredBatches], from_step: int = 0) -> list[Counter[int]]:
    """For each step the ids of its examples over all ranks; asserts what holds on every rank of every step."""
    steps = []
    for shares in zip(*(batches.batches(from_step) for batches in ranks), strict=True):
        assert (
            len(
                {
                    (b.step, b.epoch, b.tokens, b.trained_tokens, len(b.micro_batches))
                    for b in shares
                }
            )
            == 1
        )
        micro_batches = [m for share in shares for m in share.micro_batches]
        ids = Counter(i for m in micro_batches for i in m.example_ids)
        assert shares[0].tokens == sum(ranks[0].examples.lengths[i] * n for i, n in ids.items())
        assert shares[0].trained_tokens == sum(
            int((m.labels != IGNORE_INDEX).sum()) for m in micro_batches
        )
        steps.append(ids)
    return steps


@pytest.mark.parametrize("packing", [True, False])
def test_every_epoch_holds_every_example_once_and_no_two_are_alike(packing: bool) -> None:
    batches = loader(packing=packing)
    steps = ids_of_steps([batches])
    per_epoch = batches.steps_per_epoch
    epochs = [sum(steps[e * per_epoch : (e + 1) * per_epoch], Counter()) for e in range(3)]
    assert epochs == [Counter(range(len(LENGTHS)))] * 3
    assert steps[:per_epoch] != steps[per_epoch : 2 * per_epoch]
    assert steps != ids_of_steps([loader(packing=packing, seed=1)])


@pytest.mark.parametrize("packing", [True, False])
def test_the_sequence_is_the_same_on_any_ranks_with_any_threads_and_after_any_stop(
    packing: bool,
) -> None:
    truth = ids_of_steps([loader(packing=packing)])
    for size in (1, 2, 3):
        for threads in (0, 1, 2):
            for start in (0, 1, len(truth) // 2, len(truth) - 1, len(truth)):
                ranks = [
                    loader(packing=packing, size=size, rank=rank, threads=threads)
                    for rank in range(size)
                ]
                assert ids_of_steps(ranks, start) == truth[start:]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=40),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_no_split_over_ranks_loses_or_repeats_anything(
    lengths: list[int], packing: bool, size: int, global_batch_size: int, per_device: int
) -> None:
    ranks = [
        loader(
            lengths,
            packing=packing,
            size=size,
            rank=rank,
            global_batch_size=global_batch_size,
            per_device=per_device,
            epochs=1,
        )
        for rank in range(size)
    ]
    steps = ids_of_steps(ranks)
    assert sum(steps, Counter()) == Counter(range(len(lengths)))
    assert steps == ids_of_steps(
        [loader(lengths, packing=packing, global_batch_size=global_batch_size, epochs=1)]
    )


def documents(micro_batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """(input ids, labels) of each document of a micro-batch, without padding; asserts that positions start at 0 in each."""
    found = []
    if micro_batch.cu_seq_lens is not None:
        bounds = micro_batch.cu_seq_lens.tolist()
        assert micro_batch.max_document_length == max(b - a for a, b in itertools.pairwise(bounds))
        pieces = [(0, a, b) for a, b in itertools.pairwise(bounds)]
    else:
        pieces = [
            (row, 0, micro_batch.input_ids.shape[1]) for row in range(len(micro_batch.input_ids))
        ]
    for row, start, stop in pieces:
        ids, labels = (
            micro_batch.input_ids[row, start:stop].tolist(),
            micro_batch.labels[row, start:stop].tolist(),
        )
        assert micro_batch.position_ids[row, start:stop].tolist() == list(range(stop - start))
        length = max(i for i, token in enumerate(ids) if i == 0 or token) + 1  # the padding is 0
        assert labels[length:] == [IGNORE_INDEX] * (len(ids) - length)
        found.append((ids[:length], labels[:length]))
    padding = found[len(micro_batch.example_ids) :]
    assert len(padding) <= 1 and all(
        label == IGNORE_INDEX for _, labels in padding for label in labels
    )
    if (
        micro_batch.example_ids
    ):  # a pad token's embedding may be zero, which some families cannot differentiate
        assert {token for ids, _ in padding for token in ids} <= {found[0][0][0]}
    return found[: len(micro_batch.example_ids)]


@pytest.mark.parametrize("packing", [True, False])
def test_a_micro_batch_holds_its_documents_whole_with_shifted_labels(packing: bool) -> None:
    batches = loader(packing=packing)
    for step in batches.batches():
        for micro_batch in step.micro_batches:
            trained = (micro_batch.labels != IGNORE_INDEX).sum()
            looked_at = micro_batch.labels.flatten()[micro_batch.trained_positions]
            assert (
                looked_at[:trained].ne(IGNORE_INDEX).all()
                and looked_at[trained:].eq(IGNORE_INDEX).all()
            )
            assert len(looked_at) == len(micro_batch.trained_positions.unique())
            for example_id, (ids, labels) in zip(
                micro_batch.example_ids, documents(micro_batch), strict=True
            ):
                assert ids == [1000 * example_id + t for t in range(LENGTHS[example_id])]
                assert labels == [*ids[1:], IGNORE_INDEX]


def test_lengths_of_packed_rows_and_of_their_trained_positions_are_round() -> None:
    lengths = np.random.default_rng(2).integers(1, 65, size=500).tolist()
    for step in loader(lengths, packing=True).batches():
        for micro_batch in step.micro_batches:
            assert micro_batch.input_ids.numel() % ROUND_TOKENS == 0
            assert len(micro_batch.trained_positions) % ROUND_TOKENS == 0
            rows_tokens = sum(lengths[i] for i in micro_batch.example_ids)
            assert 0 <= micro_batch.input_ids.numel() - rows_tokens < ROUND_TOKENS


def test_rows_of_one_step_are_of_similar_length_where_they_are_padded() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, size=2000).tolist()
    assert measure_fill(loader(lengths, packing=False, global_batch_size=16, per_device=16)) > 0.95
    assert measure_fill(loader(lengths, packing=True)) > 0.99


def test_a_rank_without_a_row_has_a_round_of_tokens_without_a_label() -> None:
    (share,) = loader([5], packing=True, size=2, rank=1, epochs=1).batches()
    (filler,) = share.micro_batches
    assert filler.example_ids == () and filler.input_ids.shape == (1, ROUND_TOKENS)
    assert filler.labels.tolist() == [[IGNORE_INDEX] * ROUND_TOKENS] and share.tokens == 5
    assert filler.inputs["cu_seq_lens"].tolist() == [0, ROUND_TOKENS]


def test_closing_the_loader_early_leaves_no_thread_behind() -> None:
    import threading

    batches = loader(packing=True, threads=2).batches()
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_packed_and_padded_training_give_the_same_loss_for_every_token(tmp_path, shared) -> None:  # type: ignore[no-untyped-def]
    """On real conversations cut to every length from 1 to max_length, by a real model, in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.constants import IGNORE_INDEX
    from finetune.data.examples import cut
    from finetune.models.documents import install_attention
    from tests.data.world import store_of

    folder = shared / "models" / "stories260k"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (shared / "data" / "gsm8k_train.jsonl").read_text().splitlines()[:64]
    ids = [
        tokenizer(line).input_ids[:length] for length, line in zip(range(1, 65), lines, strict=True)
    ]
    examples = cut(store_of(ids, first_trained=3), 64, "error")[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    install_attention(model)

    def losses(packing: bool) -> dict[tuple[int, int], float]:
        """(example, position) -> loss."""
        config = BatchConfig(seed=3, packing=packing, max_length=64, global_batch_size=8)
        found = {}
        for step in make_batches(examples, config, Rank(), per_device_batch_size=4).batches():
            for micro_batch in step.micro_batches:
                inputs = {
                    k: v
                    for k, v in micro_batch.inputs.items()
                    if k not in ("labels", "trained_positions")
                }
                with torch.no_grad():
                    logits = model(**inputs, use_cache=False).logits
                each = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1),
                    micro_batch.labels.flatten(),
                    ignore_index=IGNORE_INDEX,
                    reduction="none",
                )
                places = [
                    (i, p)
                    for i, length in zip(
                        micro_batch.example_ids,
                        examples.lengths[list(micro_batch.example_ids)],
                        strict=True,
                    )
                    for p in range(length)
                ]
                widths = torch.tensor(examples.lengths[list(micro_batch.example_ids)].tolist())
                width = micro_batch.labels.shape[1]
                kept = torch.arange(width) < (widths.sum() if packing else widths[:, None])
                found |= dict(zip(places, each[kept.flatten()].tolist(), strict=True))
        return found

    packed, padded = losses(True), losses(False)
    assert packed.keys() == padded.keys() and len(packed) == sum(range(1, 65))
    assert max(abs(packed[place] - padded[place]) for place in packed) <= 1e-6 * max(
        packed.values()
    )


def test_a_prompt_is_asked_only_with_its_whole_answer() -> None:
    lengths = (9, 8, 14)
    store = store_of([list(range(10, 10 + length)) for length in lengths], first_trained=4)
    # the second document has more after its answer, where it is cut
    longer = store_of([list(range(10, 22))], first_trained=4)
    longer.labels[6:] = IGNORE_INDEX
    tokenizer = make_tokenizer()
    for overlength in ("truncate", "split"):
        parts = [cut(each, 8, overlength)[0] for each in (store, longer)]
        prompts = cut_prompts(join(parts), 9, tokenizer)
        assert [prompt.prompt_ids for prompt in prompts] == [[10, 11, 12, 13]] * 2
        answers = [range(14, 18), range(14, 17)]  # of the second document, and of the longer one
        assert [prompt.answer for prompt in prompts] == [
            tokenizer.decode(list(answer)).strip() for answer in answers
        ]
