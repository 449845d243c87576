"""Rows whose tokens ranks divide between them: what the plan says, against what torch keeps on one of those ranks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from finetune.config.accelerate_file import read_sharding
from finetune.models.cross_entropy import install_loss
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.documents import install_attention
from finetune.models.gating import install_gating
from finetune.plan.activations import Computation, kept_bytes
from finetune.plan.advice import Room, advise
from finetune.plan.architecture import read_architecture
from finetune.plan.peaks import find_peak
from tests.plan.run_specs import LLAMA_31_8B, make_spec
from tests.plan.traced import saved_for_backward

CONFIG = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DOCUMENTS = (100, 60, 96)  # tokens of the packed row


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """This process as the last rank of so many, with nobody behind the others: collectives return tensors of the right size."""
    last = request.param - 1
    dist.init_process_group("fake", store=FakeStore(), rank=last, world_size=request.param)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 8], indirect=True)
@pytest.mark.parametrize("every", [None, 1])
def test_what_a_rank_keeps_is_planned_to_the_byte(
    ranks: dist.ProcessGroup, every: int | None
) -> None:
    """With 8 ranks, the 2 key-value heads are repeated: that part falls to a half, all else to an eighth."""
    measured, planned = _measured_and_planned(ranks, "llama", DOCUMENTS, torch.bfloat16, every)
    assert measured == planned


@pytest.mark.parametrize("ranks", [16], indirect=True)
def test_keys_and_values_of_the_row_are_repeated_for_scores_that_are_written_out(
    ranks: dist.ProcessGroup,
) -> None:
    """More ranks than heads: the last one gathers all keys, and attention of capped scores has one for each head of the query."""
    measured, planned = _measured_and_planned(ranks, "gemma2", (240,), torch.float32)
    assert planned == pytest.approx(measured, rel=0.02)


def _measured_and_planned(
    ranks: dist.ProcessGroup,
    family: str,
    documents: tuple[int, ...],
    dtype: torch.dtype,
    every: int | None = None,
) -> tuple[int, int]:
    """Bytes that this rank keeps for the backward of a packed row."""
    size = ranks.size()
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**CONFIG), dtype=dtype)
    install_attention(model, "auto", ranks)
    install_loss(model)
    install_gating(model)
    if every is not None:
        checkpoint_activations(model, every)
    model.train()
    tokens = sum(documents) // size
    inputs = {
        "input_ids": torch.full((1, tokens), 5),
        "position_ids": torch.arange(tokens)[None],
        "cu_seq_lens": torch.tensor([0, *documents]).cumsum(0).to(torch.int32),
        "max_document_length": max(documents),
    }
    with saved_for_backward(iter([*model.parameters(), *model.buffers()])) as kept:
        model.model(**inputs, use_cache=False)
    a = read_architecture({"model_type": family, **CONFIG}, "config.json")
    run = Computation(
        itemsize=dtype.itemsize,
        checkpoint_every=every,
        cpu=True,
        sequence_ranks=size,
        document_length=max(documents),
    )
    # Not autograd's: the output goes to the loss; under checkpointing cos and sin are held by the layers' arguments.
    elsewhere = dtype.itemsize * (a.hidden + (2 * a.rotated_size if every == 1 else 0))
    planned = tokens * (sum(kept_bytes(a, run).values()) - elsewhere)
    measured = sum(kept.values())
    print(f"{size} ranks, checkpointing {every}: {measured:,} bytes kept, {planned:,} planned")
    return measured, planned


def test_activations_fall_as_the_ranks_that_divide_a_row() -> None:
    """And nothing else changes: the parameters are sharded over all ranks either way."""
    whole = make_spec(LLAMA_31_8B, ranks=8, max_length=262_144)
    divided = replace(whole, sharding=replace(whole.sharding, sequence_parallel_size=8))
    before, after = find_peak(whole), find_peak(divided)
    assert divided.tokens * 8 == whole.tokens
    assert after.activations * 8 == pytest.approx(before.activations, rel=0.05)
    assert (after.parameters, after.optimizer) == (before.parameters, before.optimizer)
    assert divided.global_batch_size * 8 == whole.global_batch_size


def test_it_is_advised_where_rows_do_not_fit() -> None:
    """An 8B at 294,912 tokens on 8 GPUs of 80 GB."""
    spec = make_spec(LLAMA_31_8B, ranks=8, max_length=294_912, global_batch_size=8)
    advice = advise(spec, Room(80 * 10**9))
    assert advice.changes is not None
    assert [change.text for change in advice.changes] == [
        "accelerate_config=fsdp_sequence_parallel"
    ]
    shipped = read_sharding("fsdp_sequence_parallel", None, {"WORLD_SIZE": "8"})
    assert (
        advice.after is not None
        and find_peak(replace(spec, sharding=shipped)).total == advice.after.device
    )
