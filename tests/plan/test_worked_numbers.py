"""Llama 3.1 8B and 70B by hand, against the plan: each number below is derived where it stands."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.plan.peaks import plan_phases
from finetune.plan.plan import compare_layouts
from finetune.plan.table import name_layout
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, LLAMA_31_70B, make_spec

GIB = 2**30
# By hand, from the published sizes: hidden h, intermediate i, layers L, key-value width k, vocabulary v.
#   a layer: q and o h*h each, k and v k*h each, gate, up and down i*h each, two norms h
#   the model: L layers, embedding and head v*h each, the last norm h
HAND_8B = (
    32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096) + 2 * 128256 * 4096 + 4096
)
HAND_70B = (
    80 * (2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192 + 2 * 8192) + 2 * 128256 * 8192 + 8192
)
# Adapters of rank 16 on all seven linears: A is 16 * in, B is out * 16.
LORA_A_8B, LORA_B_8B = 32 * 16 * (6 * 4096 + 14336), 32 * 16 * (3 * 4096 + 2 * 1024 + 2 * 14336)
LORA_A_70B, LORA_B_70B = 80 * 16 * (6 * 8192 + 28672), 80 * 16 * (3 * 8192 + 2 * 1024 + 2 * 28672)


def test_the_published_parameter_counts() -> None:
    assert HAND_8B == 8_030_261_248
    assert HAND_70B == 70_553_706_496
    assert round(16 * HAND_8B / GIB, 1) == 119.7  # fp32 parameters, gradients and two Adam moments


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize(
    ("config", "parameters"), [(LLAMA_31_8B, HAND_8B), (LLAMA_31_70B, HAND_70B)], ids=["8B", "70B"]
)
def test_full_training_holds_sixteen_bytes_a_parameter_over_the_world(
    config: dict[str, object], parameters: int, ranks: int
) -> None:
    planned = make_spec(config, ranks=ranks)
    whole = sum(planned.state(rank).total for rank in range(ranks))
    steps = 4 * len(planned.tensors) * ranks  # each rank counts the steps of each tensor
    assert whole - steps == 16 * parameters


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize(
    ("config", "parameters", "a", "b"),
    [
        (LLAMA_31_8B, HAND_8B, LORA_A_8B, LORA_B_8B),
        (LLAMA_31_70B, HAND_70B, LORA_A_70B, LORA_B_70B),
    ],
    ids=["8B", "70B"],
)
def test_lora_holds_a_bf16_base_and_sixteen_bytes_an_adapter_parameter(
    config: dict[str, object], parameters: int, a: int, b: int, ranks: int
) -> None:
    """Over more than 16 ranks, the 16 rows of an A are padded to one for each rank; its moments are not."""
    planned = make_spec(config, ranks=ranks, lora=True)
    states = [planned.state(rank) for rank in range(ranks)]
    trained = sum(tensor.trainable for tensor in planned.tensors)
    assert sum(state.frozen for state in states) == 2 * parameters
    padded = a * max(1, ranks // 16) + b
    assert sum(state.trained + state.gradients for state in states) == 8 * padded
    assert sum(state.optimizer for state in states) == 8 * (a + b) + 4 * trained * ranks


def test_the_moment_of_the_loss_by_hand() -> None:
    """8B on 8 ranks, one row of 8,192 tokens: the moment at which the last chunk of the loss is worked on."""
    planned = make_spec(LLAMA_31_8B, ranks=8)
    steady = {phase.name: phase.peak for phase in plan_phases(planned)}["steady step"]
    tokens, hidden, head = 8192, 4096, 128256 * 4096
    checkpoints = 32 * hidden * 2  # the bf16 input of each layer
    ends = (
        8 + 2 * 128 * 2 + 4 * hidden + 4 + 2 * hidden + 2 * hidden + 4 * 8
    )  # ids, cos and sin, the last norm and its output, the batch
    chunk = -(
        -8192 // -(-8192 // (2**30 // (4 * 128256)))
    )  # as many tokens as make 1 GiB of fp32 logits, in even chunks
    assert steady.name == "loss"
    assert steady.parameters == 4 * HAND_8B / 8
    assert steady.gathered == 2 * 2 * (head + hidden)  # the tail in bf16, and its all-gather buffer
    assert steady.activations == tokens * (checkpoints + ends)
    assert steady.loss == 4 * head + 2 * 2 * hidden * tokens + chunk * 128256 * (2 + 4 + 2)


@pytest.mark.parametrize(
    ("config", "parameters", "lora"),
    [
        (LLAMA_31_8B, HAND_8B, True),
        pytest.param(LLAMA_31_8B, HAND_8B, False, marks=pytest.mark.slow),
        pytest.param(LLAMA_31_70B, HAND_70B, False, marks=pytest.mark.slow),
        pytest.param(LLAMA_31_70B, HAND_70B, True, marks=pytest.mark.slow),
    ],
)
def test_more_ranks_never_need_more_and_ddp_never_less_than_the_state(
    config: dict[str, Any], parameters: int, lora: bool
) -> None:
    by_layout = dict(compare_layouts(make_spec(config, ranks=8, lora=lora)))
    full = [value for value in by_layout["fsdp_full_shard"] if value is not None]
    assert full[1:] == sorted(full[1:], reverse=True)
    state = 2 * parameters if lora else 16 * parameters
    assert min(value for value in by_layout["ddp"] if value is not None) > state


def test_what_is_gathered_is_a_layer_under_full_shard_and_the_model_under_shard_grad_op() -> None:
    full = {phase.name: phase.peak for phase in plan_phases(make_spec(LLAMA_31_70B, ranks=64))}[
        "steady step"
    ]
    kept = replace(FULL_SHARD, strategy="SHARD_GRAD_OP")
    whole = {
        phase.name: phase.peak
        for phase in plan_phases(make_spec(LLAMA_31_70B, ranks=64, sharding=kept))
    }["steady step"]
    assert whole.gathered - full.gathered == pytest.approx(2 * (HAND_70B - 128256 * 8192), rel=1e-2)


@pytest.mark.parametrize(
    ("sizes", "named", "shards"),
    [
        ({"tp_size": 8, "dp_replicate_size": 2}, "(2 x 1), tensor parallel over 8", 1),
        (
            {"tp_size": 8, "cp_size": 2, "dp_replicate_size": 2},
            "(2 x 2), tensor parallel over 8",
            2,
        ),
        ({"cp_size": 8, "dp_replicate_size": 2}, "(2 x 8)", 8),
        ({"dp_replicate_size": 4}, "(4 x 1)", 1),
    ],
)
def test_replicas_without_a_size_of_their_shards_are_those_of_size_one(
    tmp_path: Path, sizes: dict[str, int], named: str, shards: int
) -> None:
    """FSDP shards over the ranks of a replica that do not divide matrices, those that divide a row's tokens included."""
    ranks = prod(sizes.values())
    specs = []
    for written in (sizes, {**sizes, "dp_shard_size": 1}):
        mesh = {f"parallelism_config_{key}": size for key, size in written.items()}
        fsdp = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
        file = {
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": fsdp,
            "parallelism_config": mesh,
        }
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(file))
        sharding = read_sharding(str(tmp_path / "file.yaml"), None, {"WORLD_SIZE": str(ranks)})
        specs.append(make_spec(LLAMA_31_8B, ranks=ranks, sharding=sharding))
    assert [name_layout(spec) for spec in specs] == [f"fsdp2 HYBRID_SHARD {named}"] * 2
    tensors = sizes.get("tp_size", 1)
    for spec in specs:
        assert spec.state().trained == pytest.approx(
            4 * HAND_8B / (shards * tensors), rel=1e-3
        )  # norms are whole
    assert plan_phases(specs[0]) == plan_phases(specs[1])
    assert compare_layouts(specs[0]) == compare_layouts(specs[1])
