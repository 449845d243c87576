"""Ranks that hold the same part of the state hold the same values, bit for bit, whatever the optimizer and layout."""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import make_chat, make_model, slow_but
from tests.ranks import run_python
from tests.training.layouts import write_config

ROUNDED = "adamw_bf16_moments"  # by random numbers, which replicas must share
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", ROUNDED, "adamw_8bit")
LAYOUTS = {  # ranks, ranks a node, ranks in a shard group
    "ddp": (2, 2, 1),
    "hybrid": (4, 4, 2),
    "hybrid1": (4, 2, 2),
}
STEPS, SAVED_AT = 6, 2
ON_LAYOUTS = slow_but({"ddp"}, ["ddp", "hybrid"])  # the latter starts four ranks
Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Callable[[str], Cases]:
    """A layout -> every case's exit codes, digests and log; all of a layout are run by one process that forks their ranks."""

    @cache
    def run(layout: str) -> Cases:
        folder = tmp_path_factory.mktemp(layout)
        recipe, config = _write_recipe(folder), folder / "config.yaml"
        if layout == "hybrid1":
            fsdp1 = {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}
            config.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": fsdp1}))
        else:
            config = (
                write_config(folder, "ddp")
                if layout == "ddp"
                else write_config(folder, "full_shard", mesh=(2, 2))
            )

        def case(
            name: str, optim: str, fault: str = "", output: str | None = None
        ) -> dict[str, Any]:
            keys = [f"optim={optim}", f"output_dir={folder / (output or name)}"]
            return _case(
                recipe, config, keys, layout, fault, STEPS if fault == "flipped" else SAVED_AT, name
            )

        if layout == "hybrid1":
            return _run_cases(folder, {ROUNDED: case(ROUNDED, ROUNDED)})
        optimizers = _installed() if slow_too else (ROUNDED,)
        wanted = {optim: case(optim, optim) for optim in optimizers}
        wanted["killed"] = case("killed", ROUNDED, "killed")
        wanted["resumed"] = case("resumed", ROUNDED, "flipped", "killed")
        return _run_cases(folder, wanted)

    return run


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of a run of two replicas, whose ranks divide a mixture's experts between them."""
    folder = tmp_path_factory.mktemp("divided")
    recipe = _write_recipe(folder, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    keys = [
        "expert_parallel_size=2",
        "optim=adamw_bf16_moments",
        f"max_steps={2 * SAVED_AT}",
        f"output_dir={folder / 'run'}",
    ]
    config = write_config(folder, "full_shard", mesh=(2, 2))
    case = _case(recipe, config, keys, "hybrid", "flipped", 2 * SAVED_AT, "divided")
    return _run_cases(folder, {"divided": case | {"flipped": "experts.down_proj.exp_avg"}})[
        "divided"
    ]


def _write_recipe(folder: Path, **model: Any) -> Path:
    make_chat(folder / "chat.jsonl", rows=24)
    recipe = {
        "model_name_or_path": str(make_model(folder / "model", **model)),
        "datasets": [{"path": str(folder / "chat.jsonl")}],
        "dataset_cache_dir": str(folder / "cache"),
        "max_length": 64,
        "global_batch_size": 4,
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "learning_rate": 1e-2,
        "attention_dropout": 0.1,
        "export_at_end": False,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def _case(
    recipe: Path, config: Path, keys: list[str], layout: str, fault: str, step: int, name: str
) -> dict[str, Any]:
    ranks, local_size, _ = LAYOUTS[layout]
    return {
        "recipe": str(recipe),
        "config": str(config),
        "overrides": keys,
        "ranks": ranks,
        "local_size": local_size,
        "fault": fault,
        "flipped": "q_proj.weight.exp_avg",
        "step": step,
        "log": str(recipe.parent / f"{name}.log"),
    }


def _run_cases(folder: Path, wanted: dict[str, dict[str, Any]]) -> Cases:
    (folder / "cases.json").write_text(json.dumps(list(wanted.values())))
    script = Path(__file__).with_name("replicas_on_ranks.py")
    done = run_python([str(script), str(folder / "cases.json")], timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name: result | {"folder": Path(given["overrides"][-1].partition("=")[2])}
        for (name, given), result in zip(wanted.items(), results, strict=True)
    }


def _installed() -> tuple[str, ...]:
    return OPTIMIZERS if importlib.util.find_spec("torchao") else OPTIMIZERS[:3]


@pytest.mark.parametrize("optim", slow_but({ROUNDED}, OPTIMIZERS))
@pytest.mark.parametrize("layout", ON_LAYOUTS)
def test_replicas_stay_equal_bit_for_bit(
    layout: str, optim: str, runs: Callable[[str], Cases]
) -> None:
    if optim not in _installed():
        pytest.skip("needs torchao")
    run = runs(layout)[optim]
    assert not any(run["codes"]), run["log"]
    assert list(run["held"]) == [str(step) for step in range(SAVED_AT, STEPS + 1, SAVED_AT)]
    assert_equal(run, LAYOUTS[layout][2])


@pytest.mark.slow
def test_fsdp1s_replicas_stay_equal_bit_for_bit(runs: Callable[[str], Cases]) -> None:
    run = runs("hybrid1")[ROUNDED]
    assert not any(run["codes"]), run["log"]
    assert_equal(run, LAYOUTS["hybrid1"][2])


def assert_equal(run: dict[str, Any], shard_group_size: int) -> None:
    for step, held in run["held"].items():
        for position in range(shard_group_size):
            assert len(set(held[position::shard_group_size])) == 1, f"step {step}: {held}"
        assert len(set(held)) == shard_group_size, "ranks of a shard group hold different parts"


@pytest.mark.parametrize("layout", ON_LAYOUTS)
def test_a_killed_run_resumes_exactly_with_rounded_moments(
    layout: str, runs: Callable[[str], Cases]
) -> None:
    whole, killed, resumed = (runs(layout)[name] for name in (ROUNDED, "killed", "resumed"))
    assert killed["codes"] == [-9] * len(killed["codes"]) and list(killed["held"]) == [
        str(SAVED_AT)
    ]
    assert list(resumed["held"]) == [str(2 * SAVED_AT), str(STEPS)]
    held = killed["held"] | resumed["held"]
    for step in range(SAVED_AT, STEPS, SAVED_AT):  # at the last step the next test changes a bit
        assert held[str(step)] == whole["held"][str(step)], step


@pytest.mark.parametrize("layout", ON_LAYOUTS)
def test_replicas_that_are_not_equal_stop_the_run_and_are_not_saved(
    layout: str, runs: Callable[[str], Cases]
) -> None:
    run, (ranks, _, group) = runs(layout)["resumed"], LAYOUTS[layout]
    assert run["codes"] == [2] * ranks, run["log"]
    said = f"step {STEPS} is not saved: ranks {(ranks - 1) % group} and {ranks - 1} hold replicas of the model"
    assert said in run["log"] and "q_proj.weight.exp_avg the first" in run["log"]
    assert "Traceback" not in run["log"]
    left = [path.name for path in (run["folder"] / "checkpoints").glob("[!.]*")]
    assert sorted(left) == [f"step-{step:08d}" for step in range(SAVED_AT, STEPS, SAVED_AT)]


@pytest.mark.slow
def test_replicas_of_divided_experts_stay_equal_and_are_compared(divided: dict[str, Any]) -> None:
    """Up to the save before which a bit of an expert's moments is turned on the last rank."""
    saved, refused = (divided["held"][str(step)] for step in (SAVED_AT, 2 * SAVED_AT))
    assert saved[:2] == saved[2:] and saved[0] != saved[1]
    assert refused[0] == refused[2] and refused[1] != refused[3]
    assert divided["codes"] == [2] * 4, divided["log"]
    assert (
        f"step {2 * SAVED_AT} is not saved: ranks 1 and 3 hold replicas of the model"
        in divided["log"]
    )
    assert (
        "experts.down_proj.exp_avg the first" in divided["log"]
        and "Traceback" not in divided["log"]
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        ({"layout": "ddp"}, 4, [0, 0, 0, 0]),
        ({"layout": "fsdp1", "strategy": "NO_SHARD"}, 4, [0, 0, 0, 0]),
        ({"layout": "fsdp2"}, 4, [0, 1, 2, 3]),
        (
            {"layout": "fsdp2", "strategy": "HYBRID_SHARD", "replicate_size": 2, "shard_size": 2},
            4,
            [0, 1, 0, 1],
        ),
        ({"layout": "fsdp1", "strategy": "HYBRID_SHARD"}, 4, [0, 1, 0, 1]),
    ],
)
def test_the_position_within_the_shard_group(
    layout: dict[str, Any], ranks: int, expected: list[int]
) -> None:
    import torch

    from finetune.config.layout import Sharding
    from finetune.distributed.world import World

    def world(rank: int) -> World:  # two ranks a node
        accelerator: Any = None
        return World(rank, ranks, rank % 2, 2, torch.device("cpu"), Sharding(**layout), accelerator)

    assert [world(rank).shard_rank for rank in range(ranks)] == expected
