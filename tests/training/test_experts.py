"""Mixtures of experts, from a folder with a tensor for each expert to an export of exactly those tensors: the losses are
those of transformers alone under every layout, the auxiliary loss is the step's, and idle experts are seen."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.export.export import export
from finetune.files.tensors import read, read_folder
from finetune.report.page import render_page
from finetune.report.run_data import read_run
from finetune.run import fine_tune
from tests.conftest import make_chat, make_model, slow_but
from tests.ranks import launch_ranks
from tests.training import reference
from tests.training.layouts import (
    assert_losses,
    steps_of,
    train_all,
    train_families,
    write_config,
    write_recipe,
)

STEPS = 3
COEFFICIENT = 0.2
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SMALL: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "initializer_range": 0.3,
}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 5},
    "olmoe": {"num_experts": 5},
    "qwen2_moe": {"num_experts": 5, "shared_expert_intermediate_size": 48},
    "glm4_moe": GROUPED | {"n_shared_experts": 1},
    "deepseek_v3": GROUPED | MLA | {"head_dim": 8, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 5, "sliding_window": 16},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": 5,
            "moe_top_k": 2,
        },
    },
}
BALANCED = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "qwen2_moe",
    "gpt_oss",
)  # by an auxiliary loss; the others by a bias
VERIFIED = [("mixtral", "full_shard", 2)]  # exported by the run itself, which takes seconds
# (family, layout, ranks)
QUICK = [("qwen3_moe", "full_shard", 2), ("mixtral", "single", 1)]
WANTED = [
    *((family, "full_shard", 2) for family in FAMILIES),
    ("mixtral", "FULL_SHARD", 2),
    ("mixtral", "ddp", 2),
    ("qwen3_moe", "ddp", 2),
    ("mixtral", "single", 1),
    ("qwen3_moe", "full_shard", 1),
]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    """A recipe for each family; the rows of a step do not divide by ranks and micro-batches."""
    data = make_chat(folder / "chat.jsonl", rows=26)
    paths = {}
    for family, keys in FAMILIES.items():
        model = make_model(folder / family / "model", model_type=family, **SMALL | keys)
        coefficient = COEFFICIENT if family in BALANCED else None
        steps = {
            "global_batch_size": 5,
            "max_steps": STEPS,
            "save_steps": 1,
            "router_aux_loss_coef": coefficient,
        }
        paths[family] = write_recipe(folder / f"{family}.yaml", model, data, **steps)
    return paths


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str, int], Path]:
    """(family, layout, ranks) -> the run's folder."""
    return train_families(folder, recipes, WANTED if slow_too else QUICK, VERIFIED)


@pytest.mark.parametrize(
    ("family", "layout", "ranks"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow) for each in WANTED],
)
def test_losses_and_gradients_are_those_of_transformers(
    family: str, layout: str, ranks: int, runs: Callable[..., Path], recipes: dict[str, Path]
) -> None:
    """With the auxiliary loss in the gradients, whatever the split of the step's rows over ranks and micro-batches."""
    lines = assert_losses(runs(family, layout, ranks), reference.losses(recipes[family]))
    assert {"router_aux_loss" in line for line in lines} == {family in BALANCED}


@pytest.mark.parametrize(
    "family", slow_but(("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"), FAMILIES)
)
def test_the_export_of_a_model_that_did_not_move_is_the_folder_it_came_from(
    family: str, recipes: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    """The same names, shapes, dtypes and values; those of the folder are transformers' own, a tensor for each expert."""
    source = folder / family / "model"
    exported = export(source, tmp_path / "export", verify=False, log=lambda _: None)
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(exported / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(
        before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])
        for name in before
    )
    assert family in ("gpt_oss", "dbrx") or any(".experts.4." in name for name in before)


@pytest.mark.parametrize("family", slow_but({"qwen3_moe"}, FAMILIES))
def test_plain_transformers_opens_the_export_of_a_trained_model(
    family: str, runs: Callable[..., Path], tmp_path: Path
) -> None:
    """With nothing missing and nothing left over; its weights are those of the last checkpoint, and experts have moved."""
    from transformers import AutoModelForCausalLM

    run = runs(family, "full_shard", 2)
    exported = run / "export" if (family, "full_shard", 2) in VERIFIED else tmp_path / "export"
    if not exported.exists():
        export(run, exported, verify=False, log=lambda _: None)
    found, info = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    start = AutoModelForCausalLM.from_pretrained(
        run.parent / "model", dtype=torch.float32
    ).state_dict()
    checkpoint = read_folder(run / "checkpoints" / f"step-{STEPS:08d}" / "model")
    for name, value in found.state_dict().items():
        if name in checkpoint:
            assert torch.equal(value, read(checkpoint[name])), name
    moved = [
        name for name, value in found.state_dict().items() if not torch.equal(value, start[name])
    ]
    assert any("experts" in name for name in moved) and any(
        "gate.weight" in name or "router" in name for name in moved
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    family: str, runs: Callable[..., Path], recipes: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    """Killed by SIGKILL in the last step, on two ranks; resumed on one."""
    whole, killed = runs(family, "full_shard", 2), folder / family / "killed"
    keys = [f"output_dir={killed}"]
    listing = tmp_path / "killed.json"
    listing.write_text(
        json.dumps([[str(recipes[family]), str(write_config(tmp_path, "full_shard")), keys]])
    )
    script = Path(__file__).with_name("runs_on_ranks.py")
    ended = launch_ranks(script, [str(listing), str(STEPS - 1)], ranks=2, timeout=120)
    assert ended.returncodes == (-signal.SIGKILL, -signal.SIGKILL)
    assert not (killed / "finished.json").exists() and len(steps_of(killed)) == STEPS - 1
    printed = train_all(
        tmp_path, [(recipes[family], write_config(tmp_path, "single"), keys)], ranks=1
    )
    assert f"resumed at step {STEPS - 1}" in printed
    expected, found = steps_of(whole), steps_of(killed)
    for key in ("loss", "router_aux_loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx(
            [line[key] for line in expected], rel=1e-4
        )
    before, after = (
        read_folder(run / "checkpoints" / f"step-{STEPS:08d}" / "model") for run in (whole, killed)
    )
    assert all(
        torch.allclose(read(before[name]), read(after[name]), rtol=1e-3, atol=1e-5)
        for name in before
    )


@pytest.mark.slow
def test_the_auxiliary_loss_does_not_depend_on_the_split(runs: Callable[..., Path]) -> None:
    """One rank with five rows or two micro-batches, two ranks with DDP or FSDP2: the same number at every step."""
    for family, splits in (
        ("mixtral", [("single", 1), ("full_shard", 2), ("ddp", 2)]),
        ("qwen3_moe", [("full_shard", 1), ("full_shard", 2), ("ddp", 2)]),
    ):
        first, *others = (
            [line["router_aux_loss"] for line in steps_of(runs(family, *split))] for split in splits
        )
        for other in others:
            assert other == pytest.approx(first, rel=1e-5)


def test_the_auxiliary_loss_of_rated_answers_is_that_of_the_tokens_that_are_trained_on(
    recipes: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    """transformers' own; KTO's mismatched answers are in a forward of their own, without gradients."""
    data = tmp_path / "rated.jsonl"
    rows = [
        {"prompt": f"What is {n}?", "completion": f" It is {n * n}.", "label": n % 3 > 0}
        for n in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"method": "kto", "global_batch_size": 4, "router_aux_loss_coef": COEFFICIENT}
    recipe = write_recipe(
        tmp_path / "recipe.yaml", folder / "qwen3_moe" / "model", data, max_steps=2, **keys
    )
    run = tmp_path / "run"
    train_all(
        tmp_path, [(recipe, write_config(tmp_path, "single"), [f"output_dir={run}"])], ranks=1
    )
    assert_losses(run, reference.losses(recipe))


def test_idle_experts_are_seen_in_the_metrics_and_the_report(
    recipes: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    """A router that never chooses two of the five experts of its layer, and prefers one of the others."""
    model = tmp_path / "model"
    shutil.copytree(folder / "qwen3_moe" / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors[
        "model.layers.1.mlp.gate.weight"
    ].zero_()  # ties: the first experts are chosen, for every token
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    run = tmp_path / "run"
    keys = [
        f"output_dir={run}",
        f"model_name_or_path={model}",
        "max_steps=1",
        "export_at_end=false",
    ]
    train_all(tmp_path, [(recipes["qwen3_moe"], write_config(tmp_path, "single"), keys)], ranks=1)
    (line,) = steps_of(run)
    assert line["idle_expert_share_by_layer"][1] == line["idle_expert_share"] == 0.6
    assert line["largest_expert_share_by_layer"][1] == line["largest_expert_share"] == 0.5
    page = render_page([read_run(run)], [None])
    assert "Idle experts" in page and "60%" in page


def test_a_dense_model_has_no_auxiliary_loss(tiny_recipe: Callable[..., Path]) -> None:
    recipe = read_recipe(str(tiny_recipe(router_aux_loss_coef=0.1)))
    with pytest.raises(
        UserError,
        match=r"router_aux_loss_coef cannot be combined with the dense model .* \(llama\)",
    ):
        fine_tune(recipe, read_sharding("single", None, {}))
