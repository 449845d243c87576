"""Given the comparison of layouts on four ranks, when the tensors that a rank holds are counted, then parameters,
gradients and optimizer state are what the theory of each strategy says, to 2%; and every byte between ranks is in the plan."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_python

pytestmark = pytest.mark.slow  # ten layouts on four ranks

RANKS = 4
SHARDS = {  # the ranks over which each tensor is cut; Rajbhandari et al. 2020 (ZeRO), figure 1
    "DDP": 1,
    "FSDP1 NO_SHARD": 1,
    "FSDP2 full shard": RANKS,
    "FSDP2 shard grad op": RANKS,
    "FSDP1 FULL_SHARD": RANKS,
    "FSDP1 SHARD_GRAD_OP": RANKS,
    "FSDP2 hybrid 2 x 2": 2,
    "FSDP1 HYBRID_SHARD 2 x 2": 2,
    "FSDP2, rows divided by 2": RANKS,
    "FSDP2, matrices divided by 2": RANKS,
}
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FP32 = 4  # bytes
ROWS, TOKENS = 8, 256  # of a step, of a row


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The benchmark's own output, by layout."""
    folder = tmp_path_factory.mktemp("layouts")
    command = [
        "benchmarks/layouts.py",
        "--ranks",
        str(RANKS),
        "--steps",
        "1",
        "--rows",
        str(ROWS),
        "--output",
        str(folder),
    ]
    done = run_python([*command, "--model", json.dumps(MODEL), "--layouts", *SHARDS], timeout=400)
    assert done.returncode == 0, done.stderr
    assert (folder / "layouts.png").stat().st_size > 0
    assert all(name in (folder / "layouts.md").read_text() for name in SHARDS)
    return {
        result["layout"]: result
        for result in json.loads((Path(folder) / "layouts.json").read_text())
    }


@pytest.mark.parametrize("layout", SHARDS)
def test_a_rank_holds_what_the_theory_says(
    layout: str, measured: dict[str, dict[str, Any]]
) -> None:
    found, shards = measured[layout], SHARDS[layout]
    share = found["parameters"] * FP32 / shards
    assert found["parameter_bytes"] == pytest.approx(share, rel=0.02)
    assert found["gradient_bytes"] == pytest.approx(share, rel=0.02)
    assert found["optimizer_bytes"] == pytest.approx(2 * share, rel=0.02)  # two moments


@pytest.mark.parametrize("layout", SHARDS)
def test_the_plan_counts_every_call_and_byte(
    layout: str, measured: dict[str, dict[str, Any]]
) -> None:
    """But for one sum: the norm's, of a number or of one for each parameter."""
    calls, moved = (Counter(measured[layout][key]) for key in ("planned_calls", "planned_bytes"))
    found, found_bytes = (Counter(measured[layout][key]) for key in ("calls", "communicated_bytes"))
    norm, norm_bytes = found - calls, found_bytes - moved
    assert norm == ({} if layout in ("DDP", "FSDP1 NO_SHARD") else {"all-reduce": 1})
    assert norm_bytes.total() <= 8 * 100 and not calls - found and not moved - found_bytes


def test_shard_grad_op_keeps_parameters_whole_until_backward_and_gathers_once(
    measured: dict[str, dict[str, Any]],
) -> None:
    for kept, freed in (
        ("FSDP2 shard grad op", "FSDP2 full shard"),
        ("FSDP1 SHARD_GRAD_OP", "FSDP1 FULL_SHARD"),
    ):
        whole = measured[kept]["parameters"] * FP32
        assert measured[kept]["gathered_bytes"] == pytest.approx(whole, rel=0.02)
        assert measured[freed]["gathered_bytes"] < 0.7 * whole
        assert measured[kept]["calls"]["all-gather"] < measured[freed]["calls"]["all-gather"]


def test_replicas_meet_by_all_reduce_alone_and_hybrid_by_both(
    measured: dict[str, dict[str, Any]],
) -> None:
    assert set(measured["DDP"]["calls"]) == {"all-reduce"}
    calls = measured["FSDP2 hybrid 2 x 2"]["calls"]
    assert calls["all-reduce"] > 0 and calls["reduce-scatter"] > 0


def test_replicas_meet_in_the_last_micro_batch_alone(measured: dict[str, dict[str, Any]]) -> None:
    """Each rank has two micro-batches: two reduce-scatters of a unit, and one all-reduce; one more is the gradient norm's."""
    calls = measured["FSDP2 hybrid 2 x 2"]["calls"]
    assert calls["reduce-scatter"] == 2 * (calls["all-reduce"] - 1)


def test_ranks_that_divide_rows_keep_a_part_of_their_activations(
    measured: dict[str, dict[str, Any]],
) -> None:
    """And trade tokens for heads twice a layer in forward and in backward, in each of their micro-batches."""
    divided, whole = measured["FSDP2, rows divided by 2"], measured["FSDP2 full shard"]
    # What attention returns, and what a rank gets back of it, are two tensors.
    outputs = FP32 * MODEL["num_hidden_layers"] * MODEL["hidden_size"] * TOKENS // 2
    assert divided["activation_bytes"] == pytest.approx(
        whole["activation_bytes"] / 2 + outputs, rel=0.01
    )
    micro_batches = ROWS // (RANKS // 2)
    assert divided["calls"]["all-to-all"] == 4 * MODEL["num_hidden_layers"] * micro_batches
    assert "all-to-all" not in whole["calls"]
    head_size = MODEL["hidden_size"] // MODEL["num_attention_heads"]
    heads = (
        2 * MODEL["num_attention_heads"] + 2 * MODEL["num_key_value_heads"]
    )  # queries and outputs, keys and values
    traded = 2 * heads * head_size * TOKENS // 2 * FP32 * MODEL["num_hidden_layers"] * micro_batches
    assert divided["communicated_bytes"]["all-to-all"] == traded
