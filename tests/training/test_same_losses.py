"""The first promise: one recipe gives the same losses and gradient norms on every layout and number of ranks."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.plan.plan import format_plan, make_plan
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import (
    LAYOUTS,
    assert_losses,
    steps_of,
    train_all,
    write_config,
    write_recipe,
    write_split_recipes,
)

STEPS = 6
ROWS = 26  # 5 steps an epoch, the last of 2 rows: fewer than 3 ranks
LORA: dict[str, object] = {"use_peft": True, "lora_r": 4}
MODES: dict[str, dict[str, object]] = {
    "full": {},
    "lora": LORA,
    "dora": {**LORA, "use_dora": True},
    "nf4": {**LORA, "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {**LORA, "load_in_8bit": True},
    "nf4-dora": {**LORA, "use_dora": True, "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
}
# What a run differs in from the plain fp32 one: its Accelerate file's precision and checkpointing, and recipe keys.
VARIANTS: dict[str, tuple[str, bool, list[str]]] = {
    "fp32": ("no", False, []),
    "bf16": ("bf16", True, ["exact_match_samples=3", "eval_datasets=[{path: HELD_OUT}]"]),
    "dropout": ("no", False, ["attention_dropout=0.1"]),
    "dropout-checkpointed": ("no", True, ["attention_dropout=0.1"]),
    "bf16-weights": ("bf16", False, ["dtype=bfloat16"]),
}
ONE_RANK = [
    ("single", "full"),
    ("single", "lora"),
    ("full_shard", "full"),
    ("FULL_SHARD", "full"),
    ("ddp", "lora"),
]
ONE_RANK += [("single", mode) for mode in ("nf4", "int8", "nf4-dora")]
TWO_RANKS = [(layout, "full") for layout in ("full_shard", "offload", "FULL_SHARD", "ddp")]
TWO_RANKS += [(layout, "lora") for layout in ("full_shard", "FULL_SHARD", "ddp")]
TWO_RANKS += [("ddp", "int8"), ("full_shard", "nf4-dora")]
MORE_ON_TWO = [(layout, "full") for layout in LAYOUTS if (layout, "full") not in TWO_RANKS]
MORE_ON_TWO += [
    (layout, "lora")
    for layout in ("shard_grad_op", "by_size", "no_wrap", "SHARD_GRAD_OP", "offload")
]
MORE_ON_TWO += [(layout, "dora") for layout in ("full_shard", "FULL_SHARD", "ddp")]
MORE_ON_TWO += [
    (layout, "nf4") for layout in ("full_shard", "shard_grad_op", "offload", "ddp")
]  # not FSDP1
MORE_ON_TWO += [("full_shard", "int8")]
THREE_RANKS = [("full_shard", "full"), ("ddp", "full")]
MORE_ON_THREE = [
    ("full_shard", "lora"),
    ("FULL_SHARD", "full"),
    ("FULL_SHARD", "lora"),
    ("ddp", "lora"),
]
MORE_ON_THREE += [("full_shard", "nf4"), ("full_shard", "int8"), ("ddp", "nf4")]
IN_BF16 = [
    ("full_shard", "full"),
    ("offload", "lora"),
    ("FULL_SHARD", "full"),
    ("ddp", "full"),
    ("ddp", "lora"),
]
MORE_IN_BF16 = [
    ("offload", "full"),
    ("full_shard", "lora"),
    ("FULL_SHARD", "lora"),
    ("full_shard", "int8"),
]
MORE_IN_BF16 += [("ddp", "int8"), ("full_shard", "nf4"), ("ddp", "nf4")]
WITH_DROPOUT, MORE_WITH_DROPOUT = ["full_shard", "FULL_SHARD"], ["ddp"]
IN_BF16_WEIGHTS, MORE_IN_BF16_WEIGHTS = ["full_shard", "FULL_SHARD"], ["NO_SHARD", "ddp"]


def all_on_two(
    plain: list[tuple[str, str]],
    bf16: list[tuple[str, str]],
    dropout: list[str],
    weights: list[str],
) -> list[tuple[str, str, str]]:
    """(layout, mode, variant) of the runs of one start of two ranks."""
    runs = [
        (*which, variant) for variant, its in (("fp32", plain), ("bf16", bf16)) for which in its
    ]
    runs += [
        (layout, "full", variant)
        for layout in dropout
        for variant in ("dropout", "dropout-checkpointed")
    ]
    return runs + [(layout, "full", "bf16-weights") for layout in weights]


# (layout, mode, variant) of the runs that each start of ranks walks, by their number; those of the second start on 2 and on 3 are slow.
STARTS: list[tuple[int, list[tuple[str, str, str]]]] = [
    (1, [(*which, "fp32") for which in ONE_RANK]),
    (2, all_on_two(TWO_RANKS, IN_BF16, WITH_DROPOUT, IN_BF16_WEIGHTS)),
    (2, all_on_two(MORE_ON_TWO, MORE_IN_BF16, MORE_WITH_DROPOUT, MORE_IN_BF16_WEIGHTS)),
    (3, [(*which, "fp32") for which in THREE_RANKS]),
    (3, [(*which, "fp32") for which in MORE_ON_THREE]),
]


def with_slow(quick: list[tuple[str, str]], slow: list[tuple[str, str]]) -> list[Any]:
    """Cases of (layout, mode)."""
    return [*quick, *(pytest.param(*which, marks=pytest.mark.slow) for which in slow)]


Expected = dict[str, list[tuple[float, float]]]
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    """A recipe for each mode, on a model whose sizes divide by nothing: hidden 72, vocabulary 509."""
    model = make_model(
        folder / "model",
        hidden_size=72,
        vocab_size=509,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    )
    data = make_chat(folder / "chat.jsonl", rows=ROWS)
    steps = {"global_batch_size": 6, "max_steps": STEPS}
    return {
        mode: write_recipe(folder / f"{mode}.yaml", model, data, **steps, **keys)
        for mode, keys in MODES.items()
    }


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path]) -> Runs:
    """(layout, mode, ranks, variant) -> the run's folder; each set of ranks is started once and walks all its runs."""
    started: set[int] = set()

    def train(layout: str, mode: str, ranks: int, variant: str) -> tuple[Path, Path, list[str]]:
        precision, checkpointing, overrides = VARIANTS[variant]
        config = write_config(folder, layout, precision, checkpointing=checkpointing)
        rows = f"per_device_train_batch_size={3 if ranks == 1 else 2}"
        given = [override.replace("HELD_OUT", f"{folder}/chat.jsonl") for override in overrides]
        return (
            recipes[mode],
            config,
            [f"output_dir={folder}/{layout}-{mode}-{ranks}-{variant}", rows, *given],
        )

    def run(layout: str, mode: str, ranks: int, variant: str = "fp32") -> Path:
        start = next(
            i
            for i, (n, runs) in enumerate(STARTS)
            if n == ranks and (layout, mode, variant) in runs
        )
        if start not in started:
            wanted = [train(*which[:2], ranks, which[2]) for which in STARTS[start][1]]
            started.add(start)
            (folder / f"printed-{start}.txt").write_text(
                train_all(folder, wanted, ranks=ranks, timeout=500)
            )
        return folder / f"{layout}-{mode}-{ranks}-{variant}"

    return run


@pytest.fixture(scope="module")
def expected(recipes: dict[str, Path]) -> Expected:
    """The plain loop's loss and gradient norm of every step, for each mode."""
    return {mode: reference.train(path) for mode, path in recipes.items()}


def test_the_reference_learns(expected: Expected) -> None:
    for losses in expected.values():
        assert losses[-1][0] < 0.98 * losses[0][0]


@pytest.mark.parametrize(("layout", "mode"), with_slow(TWO_RANKS, MORE_ON_TWO))
def test_two_ranks_under_every_layout(
    layout: str, mode: str, runs: Runs, expected: Expected
) -> None:
    assert_losses(runs(layout, mode, 2), expected[mode])


@pytest.mark.parametrize(("layout", "mode"), ONE_RANK)
def test_one_rank_with_accumulation(layout: str, mode: str, runs: Runs, expected: Expected) -> None:
    assert_losses(runs(layout, mode, 1), expected[mode])


@pytest.mark.parametrize(("layout", "mode"), with_slow(THREE_RANKS, MORE_ON_THREE))
def test_three_ranks_that_share_unevenly(
    layout: str, mode: str, runs: Runs, expected: Expected
) -> None:
    assert_losses(runs(layout, mode, 3), expected[mode])


@pytest.mark.parametrize(("layout", "mode"), with_slow(IN_BF16, MORE_IN_BF16))
def test_bf16_with_checkpointing_stays_close(
    layout: str, mode: str, runs: Runs, expected: Expected
) -> None:
    assert_losses(runs(layout, mode, 2, "bf16"), expected[mode], rel=2e-2)


@pytest.mark.parametrize(
    "layout", slow_but(IN_BF16_WEIGHTS, IN_BF16_WEIGHTS + MORE_IN_BF16_WEIGHTS)
)
def test_bfloat16_parameters_are_kept_in_every_layout(
    layout: str, folder: Path, recipes: dict[str, Path], runs: Runs, expected: Expected
) -> None:
    """The recipe's `dtype` decides: the first screen, the plan and the checkpoint agree."""
    run = runs(layout, "full", 2, "bf16-weights")
    assert_losses(run, expected["full"], rel=2e-2)
    files = [*run.glob("checkpoints/step-*/model/*.safetensors")]
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {
        torch.bfloat16
    }
    printed = "".join(path.read_text() for path in folder.glob("printed-*.txt"))
    first_screen = printed.partition(f"{run}: ")[2].splitlines()[2]
    assert first_screen.endswith("; bf16; activation checkpointing off")
    overrides = VARIANTS["bf16-weights"][2]
    plan = make_plan(
        read_recipe(str(recipes["full"]), overrides),
        read_sharding(str(run / "accelerate.yaml"), None, {"WORLD_SIZE": "2"}),
        2,
    )
    assert {tensor.itemsize for tensor in plan.spec.tensors} == {2}
    assert "\nprecision  parameters bfloat16, compute bfloat16, " in format_plan(plan)


@pytest.mark.parametrize(("layout", "mode"), with_slow(IN_BF16, MORE_IN_BF16))
def test_held_out_loss_and_answers_under_every_wrapper(layout: str, mode: str, runs: Runs) -> None:
    lines = [
        json.loads(line)
        for line in (runs(layout, mode, 2, "bf16") / "metrics.jsonl").read_text().splitlines()
    ]
    expected = [
        json.loads(line)
        for line in (runs("ddp", mode, 2, "bf16") / "metrics.jsonl").read_text().splitlines()
    ]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held_out == pytest.approx(
        [line["eval_loss"] for line in expected if "eval_loss" in line], rel=2e-2
    )
    assert held_out[-1] < held_out[0]
    assert [line["exact_match_samples"] for line in lines if "exact_match" in line] == [3, 3]


@pytest.mark.parametrize("layout", slow_but(WITH_DROPOUT, WITH_DROPOUT + MORE_WITH_DROPOUT))
def test_dropout_is_the_same_where_activations_are_computed_again(
    layout: str, runs: Runs, expected: Expected
) -> None:
    """A recomputation that draws other random numbers has wrong gradients, and nobody says so."""
    kept, again = (
        steps_of(runs(layout, "full", 2, variant))
        for variant in ("dropout", "dropout-checkpointed")
    )
    assert [line["loss"] for line in again] == pytest.approx(
        [line["loss"] for line in kept], rel=1e-6
    )
    assert [line["grad_norm"] for line in again] == pytest.approx(
        [line["grad_norm"] for line in kept], rel=1e-5
    )
    without = [loss for loss, _ in expected["full"]]
    assert [line["loss"] for line in kept] != pytest.approx(without, rel=1e-4), (
        "dropout does nothing"
    )


@pytest.mark.slow
def test_bf16_ends_where_fp32_does_after_a_hundred_steps(
    folder: Path, recipes: dict[str, Path]
) -> None:
    long = folder / "hundred.yaml"
    long.write_text(recipes["full"].read_text().replace(f"max_steps: {STEPS}", "max_steps: 100"))
    layouts = ("full_shard", "shard_grad_op", "FULL_SHARD", "ddp")
    runs = {layout: folder / f"hundred-{layout}" for layout in layouts}
    configs = {
        layout: write_config(folder, layout, "bf16", checkpointing=True) for layout in layouts
    }
    train_all(
        folder,
        [(long, configs[layout], [f"output_dir={runs[layout]}"]) for layout in layouts],
        ranks=2,
        timeout=500,
    )
    last = reference.train(long)[-1][0]
    for layout, run in runs.items():
        assert steps_of(run)[-1]["loss"] == pytest.approx(last, rel=1e-2), layout


SPLIT: dict[str, tuple[str, dict[str, int] | None]] = {
    "ddp": ("ddp", None),
    "FULL_SHARD": ("FULL_SHARD", None),
    "full_shard": ("full_shard", None),
    "sp": ("full_shard", {"sp_size": 2}),
    "cp": ("full_shard", {"cp_size": 2}),
    "tp": ("full_shard", {"tp_size": 2}),
}


def test_split_turns_of_packed_rows_train_as_rows_of_their_own(tmp_path: Path) -> None:
    """On every layout, as a plain loop over rows of one trained turn each; both take the documents in the same order. Experts and
    replicas: `test_expert_parallel.py`."""
    split, apart = write_split_recipes(tmp_path, make_model(tmp_path / "model"))
    expected = reference.train(apart)
    # Older torch is refused for tensor parallelism.
    can_divide = "grad_placements" in inspect.signature(DTensor.from_local).parameters
    layouts = {name: each for name, each in SPLIT.items() if can_divide or name != "tp"}
    runs = []
    for name, (layout, sizes) in layouts.items():
        config = write_config(tmp_path, layout, sizes=sizes)
        runs.append((split, config, [f"output_dir={tmp_path}/{name}"]))
    train_all(tmp_path, runs, ranks=2)
    for name in layouts:
        assert_losses(tmp_path / name, expected)
