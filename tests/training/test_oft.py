"""Rotations of layers' inputs (OFT): peft's own, in every layout, resumed, trained further, merged and opened by peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import OFTConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.models.lora import make_rotations
from finetune.plan.plan import make_plan
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    assert_losses,
    steps_of,
    train_all,
    write_config,
    write_recipe,
)
from tests.training.test_adapter_further import make_pairs

STEPS, SAVED_AT = 4, 2
BLOCK = 8
MODES: dict[str, dict[str, Any]] = {
    "sft": {},
    "packed": {"packing": True},
    "dpo": {"method": "dpo", "beta": 0.5, "datasets": [{"path": "PAIRS"}]},
}
LAYOUTS = ("full_shard", "shard_grad_op", "offload", "ddp", "FULL_SHARD")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oft")
    model = make_model(folder / "model", hidden_size=48, intermediate_size=80)
    data = make_chat(folder / "chat.jsonl", rows=24)
    make_pairs(folder / "pairs.jsonl", rows=24)
    for mode, keys in MODES.items():
        keys = json.loads(json.dumps(keys).replace("PAIRS", f"{folder}/pairs.jsonl"))
        common = {
            "use_peft": True,
            "oft_block_size": BLOCK,
            "learning_rate": 1e-2,
            "global_batch_size": 4,
            "max_steps": STEPS,
        }
        write_recipe(folder / f"{mode}.yaml", model, data, **common | keys)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path, slow_too: bool) -> Path:
    saves = [f"save_steps={SAVED_AT}", "save_total_limit=9"]
    configs = {
        layout: write_config(folder, layout, checkpointing=layout == "full_shard")
        for layout in (LAYOUTS if slow_too else LAYOUTS[:1])
    }
    alone = ["per_device_train_batch_size=4", "export_at_end=true", *saves]
    single = write_config(folder, "single")
    one = [
        (folder / f"{mode}.yaml", single, [f"output_dir={folder}/{mode}", *alone]) for mode in MODES
    ]
    further = [f"output_dir={folder}/further", f"adapter_name_or_path={folder}/sft/adapter"]
    train_all(folder, [*one, (folder / "sft.yaml", single, further)], ranks=1)
    rows = ["per_device_train_batch_size=2", *saves]
    wanted = [
        (folder / "sft.yaml", config, [f"output_dir={folder}/sft-{layout}", *rows])
        for layout, config in configs.items()
    ]
    if slow_too:
        middle = f"resume_from_checkpoint={folder}/sft-full_shard/checkpoints/step-{SAVED_AT:08d}"
        again = [f"output_dir={folder}/resumed", middle, *rows]
        wanted.append((folder / "sft.yaml", configs["full_shard"], again))
    train_all(folder, wanted, ranks=2)
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_the_losses_are_those_of_plain_peft(mode: str, runs: Path) -> None:
    expected = reference.losses(runs / f"{mode}.yaml")
    assert expected[-1][0] < expected[0][0]
    assert_losses(runs / mode, expected)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS[:1], LAYOUTS))
def test_every_layout_has_the_same_losses(layout: str, runs: Path) -> None:
    assert_losses(runs / f"sft-{layout}", reference.losses(runs / "sft.yaml"))


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(runs: Path) -> None:
    assert_bit_equal(runs / "sft-full_shard", runs / "resumed", STEPS, SAVED_AT)


def test_the_adapter_opens_in_peft_and_is_the_merged_model(runs: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    ids = torch.arange(12)[None]
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, runs / "sft" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(runs / "sft" / "export", dtype=torch.float32)
    with torch.no_grad():
        logits = adapted(ids).logits
        assert (logits - plain).abs().max() > 1e-3
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            adapted.merge_and_unload()(ids).logits, logits, rtol=1e-5, atol=1e-5
        )


def test_the_card_names_the_kind_of_adapter(runs: Path) -> None:
    card = (runs / "sft" / "adapter" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["finetune", "sft", "oft"]
    assert "A OFT adapter" not in card and "An OFT adapter fine-tuned from model." in card


def test_an_adapter_is_trained_further_from_where_it_ended(runs: Path) -> None:
    first = steps_of(runs / "further")[0]
    start = steps_of(runs / "sft")[0]
    assert first["loss"] < start["loss"]
    saved = load_file(runs / "sft" / "adapter" / "adapter_model.safetensors")
    assert saved and all(".oft_R." in name for name in saved)


def test_rotations_are_pefts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(24, 5)),
        OFTConfig(oft_block_size=BLOCK, target_modules=["0"], init_weights=False),
    ).base_model.model[0]
    vectors = layer.oft_R["default"].weight.detach()
    theirs = layer.get_delta_weight("default").detach()
    ours = torch.block_diag(*make_rotations(vectors, BLOCK))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_plan_counts_the_rotations(runs: Path) -> None:
    recipe = read_recipe(str(runs / "sft.yaml"))
    spec = make_plan(recipe, read_sharding(None, None, {"WORLD_SIZE": "1"}), 1, on_cpu=True).spec
    saved = load_file(runs / "sft" / "adapter" / "adapter_model.safetensors")
    assert spec.trained_numel == sum(tensor.numel() for tensor in saved.values())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["oft_block_size=7"], "which blocks of 7 do not divide; set oft_block_size: 6"),
        (["lora_dropout=0.1"], "lora_dropout cannot be combined with oft_block_size"),
        (["load_in_4bit=true"], "load_in_4bit cannot be combined with oft_block_size"),
        (["use_dora=true"], "use_dora cannot be combined with oft_block_size"),
    ],
)
def test_what_does_not_go_with_it_is_one_sentence(
    keys: list[str], words: str, folder: Path
) -> None:
    with pytest.raises(UserError, match=words):
        recipe = read_recipe(str(folder / "sft.yaml"), [f"output_dir={folder}/x", *keys])
        make_plan(recipe, read_sharding(None, None, {"WORLD_SIZE": "1"}), 1, on_cpu=True)
