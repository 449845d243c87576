"""The first promise: one recipe gives the same losses and gradient norms on every layout and number of ranks."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

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

STEPS = 4
ROWS = 13  # 3 steps an epoch, the last of 1 row: fewer than 2 ranks
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
ONE_RANK = [("single", mode) for mode in ("full", "lora", "int8", "nf4-dora")]
MORE_ON_ONE = [("single", "nf4"), ("full_shard", "full"), ("FULL_SHARD", "full"), ("ddp", "lora")]
TWO_RANKS = [("full_shard", "full"), ("full_shard", "nf4-dora")]
MORE_ON_TWO = [(layout, "full") for layout in LAYOUTS if (layout, "full") not in TWO_RANKS]
MORE_ON_TWO += [(layout, "lora") for layout in LAYOUTS if layout != "NO_SHARD"]
MORE_ON_TWO += [(layout, "dora") for layout in ("full_shard", "FULL_SHARD", "ddp")]
MORE_ON_TWO += [
    (layout, "nf4") for layout in ("full_shard", "shard_grad_op", "offload", "ddp")
]  # not FSDP1
MORE_ON_TWO += [("full_shard", "int8"), ("ddp", "int8")]
THREE_RANKS = [
    ("full_shard", "full"),
    ("ddp", "full"),
    ("full_shard", "lora"),
    ("FULL_SHARD", "full"),
    ("FULL_SHARD", "lora"),
    ("ddp", "lora"),
]
THREE_RANKS += [("full_shard", "nf4"), ("full_shard", "int8"), ("ddp", "nf4")]
IN_BF16 = [("full_shard", "full")]
MORE_IN_BF16 = [(layout, "full") for layout in ("FULL_SHARD", "offload", "ddp")]
MORE_IN_BF16 += [(layout, "lora") for layout in ("full_shard", "FULL_SHARD", "offload", "ddp")]
MORE_IN_BF16 += [(layout, mode) for layout in ("full_shard", "ddp") for mode in ("int8", "nf4")]
# (ranks, layout) of full training, each with dropout and with parameters in bfloat16
SAME_ON_ONE = [(1, "full_shard")]
MORE_ON_BOTH = [(2, layout) for layout in ("full_shard", "FULL_SHARD", "ddp")]
IN_BF16_WEIGHTS = [*SAME_ON_ONE, *MORE_ON_BOTH, (2, "NO_SHARD")]
WITH_DROPOUT = [*SAME_ON_ONE, *MORE_ON_BOTH]
OTHERS = [
    *((n, layout, v) for n, layout in WITH_DROPOUT for v in ("dropout", "dropout-checkpointed")),
    *((n, layout, "bf16-weights") for n, layout in IN_BF16_WEIGHTS),
]


def others_on(ranks: int) -> list[tuple[str, str, str]]:
    return [(layout, "full", variant) for number, layout, variant in OTHERS if number == ranks]


def each_in(variant: str, runs: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    return [(*which, variant) for which in runs]


# (layout, mode, variant) of the runs that each start of ranks walks, by their number; the second on a number, and that on 3, is slow.
STARTS: list[tuple[int, list[tuple[str, str, str]]]] = [
    (1, each_in("fp32", ONE_RANK) + others_on(1)),
    (1, each_in("fp32", MORE_ON_ONE)),
    (2, each_in("fp32", TWO_RANKS) + each_in("bf16", IN_BF16)),
    (2, each_in("fp32", MORE_ON_TWO) + each_in("bf16", MORE_IN_BF16) + others_on(2)),
    (3, each_in("fp32", THREE_RANKS)),
]


Expected = Callable[[str], list[tuple[float, float]]]
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    """A recipe for each mode, on a model whose sizes divide by nothing: hidden 72, vocabulary 509."""
    model = make_model(folder / "model", hidden_size=72, vocab_size=509, tie_word_embeddings=True)
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
    return lambda mode: reference.losses(recipes[mode])


@pytest.mark.parametrize("mode", slow_but({mode for _, mode in ONE_RANK}, MODES))
def test_the_reference_learns(mode: str, expected: Expected) -> None:
    losses = expected(mode)
    assert losses[-1][0] < 0.98 * losses[0][0]


@pytest.mark.parametrize(("layout", "mode"), slow_but(TWO_RANKS, TWO_RANKS + MORE_ON_TWO))
def test_two_ranks_under_every_layout(
    layout: str, mode: str, runs: Runs, expected: Expected
) -> None:
    assert_losses(runs(layout, mode, 2), expected(mode))


@pytest.mark.parametrize(("layout", "mode"), slow_but(ONE_RANK, ONE_RANK + MORE_ON_ONE))
def test_one_rank_with_accumulation(layout: str, mode: str, runs: Runs, expected: Expected) -> None:
    assert_losses(runs(layout, mode, 1), expected(mode))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mode"), THREE_RANKS)
def test_three_ranks_that_share_unevenly(
    layout: str, mode: str, runs: Runs, expected: Expected
) -> None:
    assert_losses(runs(layout, mode, 3), expected(mode))


@pytest.mark.parametrize(("layout", "mode"), slow_but(IN_BF16, IN_BF16 + MORE_IN_BF16))
def test_bf16_with_checkpointing_stays_close(
    layout: str, mode: str, runs: Runs, expected: Expected
) -> None:
    assert_losses(runs(layout, mode, 2, "bf16"), expected(mode), rel=2e-2)


@pytest.mark.parametrize(("ranks", "layout"), slow_but(SAME_ON_ONE, IN_BF16_WEIGHTS))
def test_bfloat16_parameters_are_kept_in_every_layout(
    ranks: int, layout: str, folder: Path, recipes: dict[str, Path], runs: Runs, expected: Expected
) -> None:
    """The recipe's `dtype` decides: the first screen, the plan and the checkpoint agree."""
    run = runs(layout, "full", ranks, "bf16-weights")
    assert_losses(run, expected("full"), rel=2e-2)
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
        read_sharding(str(run / "accelerate.yaml"), None, {"WORLD_SIZE": str(ranks)}),
        ranks,
    )
    assert {tensor.itemsize for tensor in plan.spec.tensors} == {2}
    assert "\nprecision  parameters bfloat16, compute bfloat16, " in format_plan(plan)


@pytest.mark.parametrize(("layout", "mode"), slow_but(IN_BF16, IN_BF16 + MORE_IN_BF16))
def test_held_out_loss_and_answers_under_every_wrapper(layout: str, mode: str, runs: Runs) -> None:
    lines = [
        json.loads(line)
        for line in (runs(layout, mode, 2, "bf16") / "metrics.jsonl").read_text().splitlines()
    ]
    expected = [
        json.loads(line)
        for line in (runs("full_shard", mode, 2, "bf16") / "metrics.jsonl").read_text().splitlines()
    ]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held_out == pytest.approx(
        [line["eval_loss"] for line in expected if "eval_loss" in line], rel=2e-2
    )
    assert held_out[-1] < held_out[0]
    assert [line["exact_match_samples"] for line in lines if "exact_match" in line] == [3, 3]


@pytest.mark.parametrize(("ranks", "layout"), slow_but(SAME_ON_ONE, WITH_DROPOUT))
def test_dropout_is_the_same_where_activations_are_computed_again(
    ranks: int, layout: str, runs: Runs, expected: Expected
) -> None:
    """A recomputation that draws other random numbers has wrong gradients, and nobody says so."""
    kept, again = (
        steps_of(runs(layout, "full", ranks, variant))
        for variant in ("dropout", "dropout-checkpointed")
    )
    assert [line["loss"] for line in again] == pytest.approx(
        [line["loss"] for line in kept], rel=1e-6
    )
    assert [line["grad_norm"] for line in again] == pytest.approx(
        [line["grad_norm"] for line in kept], rel=1e-5
    )
    without = [loss for loss, _ in expected("full")]
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


@pytest.mark.parametrize("ranks", slow_but([1], [1, 2]))
def test_split_turns_of_packed_rows_train_as_rows_of_their_own(ranks: int, tmp_path: Path) -> None:
    """On every layout of two ranks, as a plain loop over rows of one trained turn each; both take the documents in the same order. Experts and
    replicas: `test_expert_parallel.py`."""
    split, apart = write_split_recipes(tmp_path, make_model(tmp_path / "model"))
    expected = reference.train(apart)
    # Older torch is refused for tensor parallelism.
    can_divide = "grad_placements" in inspect.signature(DTensor.from_local).parameters
    layouts = {name: each for name, each in SPLIT.items() if can_divide or name != "tp"}
    if ranks == 1:
        layouts = {"single": ("single", None)}
    runs = []
    for name, (layout, sizes) in layouts.items():
        config = write_config(tmp_path, layout, sizes=sizes)
        runs.append((split, config, [f"output_dir={tmp_path}/{name}"]))
    train_all(tmp_path, runs, ranks=ranks)
    for name in layouts:
        assert_losses(tmp_path / name, expected)
