"""Tensor parallelism: the same losses and gradient norms as one process, checkpoints for any layout, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import make_chat, make_model, slow_but
from tests.ranks import launch_ranks
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    assert_losses,
    steps_of,
    train_all,
    write_config,
    write_recipe,
)
from tests.training.test_preference_layouts import make_pairs

STEPS, SAVED_AT = 6, 3
TP: dict[str, dict[str, int]] = {  # Accelerate's sizes of each layout's mesh
    "tp": {"tp_size": 2},
    "tp-shard": {"tp_size": 2, "dp_shard_size": 2},
    "tp-offload": {"tp_size": 2},
    "tp-rows": {"tp_size": 2, "cp_size": 2},
    "tp-replicas": {"tp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 1},
}
LORA = {"use_peft": True, "lora_r": 4}
SAVED_WHOLE = {"modules_to_save": ["lm_head", "embed_tokens"]}
PACKED = {"packing": True, "max_length": 160}  # three documents a row
SHORT = {"max_steps": 4}
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "full-packed": PACKED | SHORT,
    "lora": LORA | SHORT,
    "lora-packed": LORA | PACKED | SHORT,
    "lora-whole": {**LORA, **SAVED_WHOLE, **PACKED, "max_steps": 2, "label_smoothing": 0.1},
}
SLOW_MODES: dict[str, dict[str, Any]] = {
    "full-packed-6": PACKED,
    "lora-6": LORA,
    "lora-packed-6": LORA | PACKED,
    "smoothed": {"label_smoothing": 0.1, "max_steps": 3},
    "sgd": {"optim": "sgd", "max_steps": 3},
    "kept": {**PACKED, "activation_checkpointing_keeps": "attention", "max_steps": 3},
}
STREAMED: dict[str, Any] = {**PACKED, "streaming": True, "max_steps": 3}
METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"method": "dpo"}
}  # the reference is computed before training
SLOW_METHODS: dict[str, dict[str, Any]] = {
    "orpo": {"method": "orpo", **LORA},
    "kto": {"method": "kto", **LORA},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": True},  # norms over heads, whose gradients are parts
    "gemma2": {"tie_word_embeddings": True},
    "olmo2": {},  # attention's products are gathered
}
SLOW_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma3_text": {},
    "phi3": {},
    "granite": {"logits_scaling": 2.0},
    "smollm3": {},
}


@pytest.fixture(scope="module")
def recipes(folder: Path, slow_too: bool) -> dict[str, Path]:
    """A recipe for each mode and each family. The vocabulary is odd, so that two ranks divide it unevenly."""
    data = make_chat(folder / "chat.jsonl", rows=26)
    common: dict[str, Any] = {"global_batch_size": 4, "max_steps": STEPS, "save_total_limit": None}
    model = make_model(folder / "model", hidden_size=72, vocab_size=509)
    modes = MODES | SLOW_MODES | {"streamed": STREAMED}
    made = {
        mode: write_recipe(folder / f"{mode}.yaml", model, data, **common | keys)
        for mode, keys in modes.items()
    }
    pairs = make_pairs(folder / "pairs.jsonl", 12)
    for method, keys in (METHODS | SLOW_METHODS).items():
        made[method] = write_recipe(
            folder / f"{method}.yaml", model, pairs, **common | keys | {"max_steps": 2}
        )
    for family, config in (FAMILIES | SLOW_FAMILIES).items():
        model = folder / f"model-{family}"
        if slow_too or family in QUICK_FAMILIES:
            make_model(model, model_type=family, vocab_size=264, **config)
        keys = common | {"max_steps": 2, "max_length": 48}
        made[family] = write_recipe(folder / f"{family}.yaml", model, data, **keys)
    return made


WITH_SHARDS = ("full", "lora-packed")
QUICK = ("tp-full", "tp-olmo2", "again")  # runs
QUICK_MODES = ("full",)
QUICK_FAMILIES = ("olmo2",)
PARAMETERS = 156_600  # of the model of MODES

Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Runs:
    """name -> the run's folder; each number of ranks is started once, and walks all its runs."""

    def run(
        mode: str, layout: str, *overrides: str, name: str = "", precision: str = "no"
    ) -> tuple[Path, Path, list[str]]:
        is_single = layout == "single"
        sizes = None if layout in ("single", "full_shard") else TP[layout]
        base = "single" if is_single else "offload" if layout == "tp-offload" else "full_shard"
        config = write_config(
            folder, base, precision, sizes=sizes, checkpointing=precision == "bf16"
        )
        return (
            recipes[mode],
            config,
            [f"output_dir={folder}/{name or f'{layout}-{mode}'}", *overrides],
        )

    def resumed(
        layout: str, start: str, name: str, *overrides: str
    ) -> tuple[Path, Path, list[str]]:
        at = f"resume_from_checkpoint={folder}/{start}/checkpoints/step-{SAVED_AT:08d}"
        return run("full", layout, at, *overrides, name=name)

    saved = f"save_steps={SAVED_AT}"
    two_rows = "per_device_train_batch_size=2"  # two micro-batches
    in_files = ["optim_offload=nvme", f"offload_dir={folder}/scratch"]
    # As many as have other lengths: DTensor propagates the shardings of each length once more.
    held_out = f"{{path: {folder}/chat.jsonl, max_samples: 10}}"
    asked = ["exact_match_samples=1", f"eval_datasets=[{held_out}]"]
    by_ranks = {
        2: [
            *(
                run(mode, "tp", *([two_rows, saved, *asked] if mode == "full" else []))
                for mode in MODES
            ),
            *(run(family, "tp") for family in FAMILIES),
            *(run(method, "tp", two_rows) for method in METHODS),
            run("full", "tp", *asked, "max_steps=3", name="bf16", precision="bf16"),
            run("full", "tp", *in_files, "max_steps=3", name="bf16-in-files", precision="bf16"),
            run(
                "lora",
                "tp",
                "lora_dropout=0.1",
                "attention_dropout=0.1",
                "max_steps=2",
                name="dropout",
                precision="bf16",
            ),
            run("qwen3", "tp", "optim=adamw_bf16_moments", name="rounded"),
            resumed("tp", "tp-full", "again", two_rows),
            run("qwen3", "tp-offload"),
            run("full", "full_shard", two_rows, saved),
            resumed("tp", "full_shard-full", "from-full-shard", two_rows),
            resumed("full_shard", "tp-full", "to-full-shard", two_rows),
        ],
        4: [
            run("lora-packed", "tp-shard"),
            run("full", "tp-shard", "export_at_end=true", saved),
            run("qwen3", "tp-replicas"),
            *(run(family, "tp-rows") for family in FAMILIES),
            resumed("tp-shard", "tp-full", "to-tp-shard"),
        ],
        1: [resumed("single", "tp-shard-full", "to-single", "export_at_end=true")],
    }

    def name_of(wanted: tuple[Path, Path, list[str]]) -> str:
        return wanted[2][0].rpartition("/")[2]

    if not slow_too:
        by_ranks = {2: [wanted for wanted in by_ranks[2] if name_of(wanted) in QUICK]}
    ranks_of = {name_of(wanted): ranks for ranks, runs in by_ranks.items() for wanted in runs}

    def trained(name: str) -> Path:
        order = list(by_ranks)
        for ranks in order[: order.index(ranks_of[name]) + 1]:
            if (wanted := by_ranks[ranks]) and not (folder / f"printed-{ranks}.txt").exists():
                (folder / f"printed-{ranks}.txt").write_text(
                    train_all(folder, wanted, ranks=ranks, timeout=500)
                )
        return folder / name

    return trained


@pytest.mark.slow
def test_all_families_optimizers_and_methods(folder: Path, recipes: dict[str, Path]) -> None:
    names = {"tp": [*SLOW_MODES, *SLOW_FAMILIES, *SLOW_METHODS], "tp-shard": list(SLOW_MODES)}
    whole = (
        recipes["streamed"],
        write_config(folder, "full_shard"),
        [f"output_dir={folder}/whole-streamed"],
    )
    for layout, ranks in (("tp", 2), ("tp-shard", 4)):
        config = write_config(folder, "full_shard", sizes=TP[layout], checkpointing=True)
        runs = [*names[layout], "streamed"]
        wanted = [
            (recipes[name], config, [f"output_dir={folder}/{layout}-{name}"]) for name in runs
        ]
        train_all(folder, [*wanted, *([whole] if ranks == 2 else [])], ranks=ranks)
        assert_losses(folder / f"{layout}-streamed", facts_of(folder / "whole-streamed"))
    for name in names["tp"]:
        expected = expect(recipes[name])
        for layout in [layout for layout in names if name in names[layout]]:
            assert_losses(folder / f"{layout}-{name}", expected)


def facts_of(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in steps_of(run)]


def expect(recipe: Path, **keys: Any) -> list[tuple[float, float]]:
    if recipe.stem == "sgd":
        keys["make_optimizer"] = lambda trained: torch.optim.SGD(trained, lr=0.0)
    smoothing = 0.1 if recipe.stem in ("smoothed", "lora-whole") else 0.0
    return reference.losses(recipe, label_smoothing=smoothing, **keys)


@pytest.mark.parametrize("mode", slow_but(QUICK_MODES, MODES))
def test_two_ranks_compute_what_one_does(mode: str, runs: Runs, recipes: dict[str, Path]) -> None:
    expected = expect(recipes[mode])
    assert len(expected) < STEPS or expected[-1][0] < 0.95 * expected[0][0], (
        "the reference does not learn"
    )
    assert_losses(runs(f"tp-{mode}"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", WITH_SHARDS)
def test_four_ranks_that_shard_too(mode: str, runs: Runs, recipes: dict[str, Path]) -> None:
    assert_losses(runs(f"tp-shard-{mode}"), expect(recipes[mode]))


@pytest.mark.parametrize("family", slow_but(QUICK_FAMILIES, FAMILIES))
def test_families_compute_what_one_process_does(
    family: str, runs: Runs, recipes: dict[str, Path]
) -> None:
    expected = expect(recipes[family])
    assert_losses(runs(f"tp-{family}"), expected)


@pytest.mark.slow
def test_what_is_offloaded_to_the_host_computes_what_one_process_does(
    runs: Runs, recipes: dict[str, Path]
) -> None:
    assert_losses(runs("tp-offload-qwen3"), expect(recipes["qwen3"]))


@pytest.mark.slow
def test_replicas_compute_what_one_process_does(runs: Runs, recipes: dict[str, Path]) -> None:
    assert_losses(runs("tp-replicas-qwen3"), expect(recipes["qwen3"]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_divide_rows_too(family: str, runs: Runs, recipes: dict[str, Path]) -> None:
    assert_losses(runs(f"tp-rows-{family}"), expect(recipes[family]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_preferences_compute_what_one_process_does(
    method: str, runs: Runs, recipes: dict[str, Path]
) -> None:
    assert_losses(runs(f"tp-{method}"), expect(recipes[method]))


@pytest.mark.slow
def test_bf16_checkpointed_stays_close(runs: Runs, recipes: dict[str, Path]) -> None:
    assert_losses(runs("bf16"), expect(recipes["full"])[:3], rel=2e-2)


@pytest.mark.parametrize("name", slow_but(["tp-full"], ["tp-full", "bf16"]))
def test_it_answers_and_evaluates(name: str, runs: Runs) -> None:
    lines = [json.loads(line) for line in (runs(name) / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    first = next(line["loss"] for line in lines if "loss" in line)
    assert held_out[-1] < held_out[0] == pytest.approx(first, rel=0.02), (
        "each held-out document counts once"
    )
    assert [line["exact_match_samples"] for line in lines if "exact_match" in line] == [1, 1]


@pytest.mark.slow
def test_what_every_rank_of_a_group_holds_stays_equal(runs: Runs) -> None:
    """A save compares them: under dropout, whose masks are the group's, and where moments are rounded at random."""
    for name in ("dropout", "rounded"):
        assert (runs(name) / "checkpoints").is_dir() and len(steps_of(runs(name))) == 2
    rounded, plain = (steps_of(runs(name)) for name in ("rounded", "tp-qwen3"))
    assert rounded[1]["loss"] == pytest.approx(plain[1]["loss"], rel=1e-3)


@pytest.mark.slow
def test_state_in_files_is_bit_for_bit_that_in_memory(runs: Runs) -> None:
    assert_bit_equal(runs("bf16-in-files"), runs("bf16"), 3)


def test_a_run_resumes_bit_for_bit(runs: Runs) -> None:
    assert facts_of(runs("again")) == facts_of(runs("tp-full"))[SAVED_AT:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "resumed", ["to-full-shard", "from-full-shard", "to-tp-shard", "to-single"]
)
def test_a_run_resumes_in_another_layout(resumed: str, runs: Runs) -> None:
    uninterrupted = facts_of(runs("tp-full"))[SAVED_AT:]
    assert facts_of(runs(resumed)) == [pytest.approx(step, rel=1e-5) for step in uninterrupted]


@pytest.mark.slow
def test_exports_are_the_same_model(runs: Runs) -> None:
    """The run compares the export with its checkpoint value by value; the other layout's is the same up to rounding."""
    divided, single = (
        load_file(runs(name) / "export" / "model.safetensors")
        for name in ("tp-shard-full", "to-single")
    )
    assert divided.keys() == single.keys()
    for name, tensor in divided.items():
        torch.testing.assert_close(tensor, single[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("run", ["tp-full", pytest.param("tp-shard-full", marks=pytest.mark.slow)])
def test_each_value_is_in_one_file_of_a_checkpoint(run: str, runs: Runs) -> None:
    folder = runs(run) / "checkpoints" / f"step-{STEPS:08d}" / "model"
    written = sum(
        tensor.numel()
        for file in folder.glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    assert written == PARAMETERS


@pytest.mark.slow
def test_gradients_of_several_calls_add_up_once_where_ranks_sum_parts_of_them(
    tmp_path: Path,
) -> None:
    """Of the norms of heads under tensor parallelism, and of a tied embedding, which both ends of a pipeline have."""
    make_model(tmp_path / "qwen3", model_type="qwen3")
    make_model(tmp_path / "tied", tie_word_embeddings=True)
    write_config(tmp_path, "full_shard", sizes={"tp_size": 2}).rename(tmp_path / "tp.yaml")
    write_config(tmp_path, "full_shard").rename(tmp_path / "fsdp.yaml")
    launch_ranks(Path(__file__).with_name("repeated_on_ranks.py"), [str(tmp_path)], ranks=2).check()
    for once, twice in json.loads((tmp_path / "found.json").read_text()).values():
        assert twice == pytest.approx(2 * once, rel=1e-5)
