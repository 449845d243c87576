"""Training steps by the branch of attention that CUDA takes: the CPU's losses, one graph for all layers and lengths."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_without_gpu.steps_on_ranks import HEAD_SIZE, LONGEST, STEPS
from tests.ranks import launch_ranks

LAYERS = 2
PLAIN = {"family": "llama", "varlen": False, "flex": False, "compile": False, "lora": False, "differentiates": False,
         "keeps": "nothing"}  # fmt: skip
# `differentiates`: see CountingBackend.
JOBS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "compiled": {"varlen": True, "compile": True, "differentiates": True},
    "lora, cpu": {"lora": True},
    "lora, compiled": {"varlen": True, "compile": True, "lora": True},
}
# With adapters on the experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "cpu": {"family": "mixtral", "lora": True},
    "compiled": {
        "family": "mixtral",
        "lora": True,
        "varlen": True,
        "compile": True,
        "keeps": "attention",
    },
}
CAPPED: dict[str, dict[str, Any]] = {
    "cpu": {"family": "gemma2"},
    "flex": {"family": "gemma2", "flex": True, "differentiates": True},
    "compiled": {"family": "gemma2", "flex": True, "compile": True, "differentiates": True},
}


COMPILED = ("compiled", "lora, compiled")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of JOBS found, by rank."""
    return run_jobs(tmp_path_factory.mktemp("steps"), JOBS)


def run_jobs(folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What each job found, by rank: FSDP2 on two ranks, activations checkpointed."""
    (folder / "jobs.json").write_text(
        json.dumps([{"name": name} | PLAIN | job for name, job in jobs.items()])
    )
    launch_ranks(Path(__file__).with_name("steps_on_ranks.py"), [str(folder)], timeout=300).check()
    results: dict[str, list[dict[str, Any]]] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("name", COMPILED)
def test_the_branch_that_cuda_takes_trains_to_the_losses_of_the_cpus(found: Any, name: str) -> None:
    expected = found["lora, cpu" if "lora" in name else "cpu"]
    assert HEAD_SIZE % 8, "the kernel's padding is part of it"
    for rank in (0, 1):
        for what in ("losses", "norms", "held_out"):
            assert found[name][rank][what] == pytest.approx(expected[rank][what], rel=1e-5), what
    losses = found[name][0]["losses"]
    assert len(set(losses)) == len(STEPS)


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_serves_every_layer_and_length_and_generation_makes_none(
    found: Any, name: str
) -> None:
    for rank in (0, 1):
        each = found[name][rank]
        assert each["graphs_of_generation"] == [0, 0]
        # One graph of the layers and one of the loss, which rank 1 has nothing to compute of in the first step.
        first = [2, 0] if rank == 0 else [1, 1]
        assert each["graphs"] == [*first, 0, 0, 0], f"{each['graphs']}: recompiled"
        assert each["evaluation_graphs"] == [2, 0], "without gradients other graphs, once"
        assert each["unique_graphs"] == [4 if rank == 0 else 3, 4, 4, 4, 4], (
            "dynamo counts the same, none after step 2"
        )
        assert each["differentiated"] == ("lora" not in name)
        losses = [2] * 5 if rank == 0 else [0, 1, 1, 1, 1]  # micro-batches with trained tokens
        calls = [2 * LAYERS + loss for loss in losses]
        assert each["calls"] == calls, f"{each['calls']}: not every layer ran compiled"


def test_compiled_layers_under_fsdp2_keep_no_more_activations_for_backward(found: Any) -> None:
    # Without torch.compile the cosines and sines of the rotary embedding are in a closure, out of the count's sight.
    rotary = 2 * LONGEST * HEAD_SIZE * 4
    for rank in (0, 1):
        assert found["compiled"][rank]["saved_bytes"] <= found["cpu"][rank]["saved_bytes"] + rotary


def test_a_mixture_compiles_to_one_graph_without_a_break(tmp_path: Path) -> None:
    """What its routers choose is counted outside of the compiled layers, and the same; attention's outputs are kept."""
    found = run_jobs(tmp_path, MIXTURES)
    for rank in (0, 1):
        each, expected = found["compiled"][rank], found["cpu"][rank]
        for what in ("losses", "norms", "held_out"):
            assert each[what] == pytest.approx(expected[what], rel=1e-5), what
        assert each["chosen"] == expected["chosen"]
        assert each["graphs"] == [*([2, 0] if rank == 0 else [1, 1]), 0, 0, 0]
        assert each["graph_breaks"] == {}


def test_capped_scores_train_to_the_losses_of_the_cpus_by_masks_that_layers_share(
    tmp_path: Path,
) -> None:
    """By flex_attention, compiled by itself or within its layer: one graph for all lengths."""
    found = run_jobs(tmp_path, CAPPED)
    for name in ("flex", "compiled"):
        for rank in (0, 1):
            each, expected = found[name][rank], found["cpu"][rank]
            for what in ("losses", "norms", "held_out"):
                assert each[what] == pytest.approx(expected[what], rel=1e-5), (name, what)
            # Compiled layers that slide are another graph than those that do not, and the loss is one.
            assert sum(each["graphs"][:2]) == (3 if name == "compiled" else 1), (
                f"{name}: {each['graphs']}"
            )
            assert each["graphs"][2:] == [0, 0, 0], f"{name}: {each['graphs']}: recompiled"
            assert each["evaluation_graphs"] == [3 if name == "compiled" else 1, 0]
            assert each["graphs_of_generation"] == [0, 0]
