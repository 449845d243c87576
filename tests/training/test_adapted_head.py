"""LoRA on the output head: peft's own losses in every layout, resumed, trained further, merged and opened by peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.config.accelerate_file import read_sharding
from finetune.config.module_names import base_name
from finetune.config.pretrained import complete_lora, load_config
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.models.load import build_on_meta
from finetune.models.lora import add_adapters, read_adapter
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
MODES: dict[str, dict[str, Any]] = {
    "sft": {},
    "packed": {"packing": True, "use_rslora": True, "rank_pattern": {"lm_head": 3}},
    "dpo": {"method": "dpo", "beta": 0.5, "datasets": [{"path": "PAIRS"}]},
    "head": {"lora_target_modules": ["lm_head"]},
    "tied": {"model_name_or_path": "TIED"},
}
LAYOUTS = ("full_shard", "shard_grad_op", "offload", "ddp", "FULL_SHARD")
QUICK_MODES = ("sft", "packed", "tied")  # on one rank; on two: sft in full_shard
SIZES: dict[str, dict[str, int]] = {"tp": {"tp_size": 2}, "cp": {"cp_size": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    model = make_model(folder / "model", hidden_size=48, intermediate_size=80)
    data = make_chat(folder / "chat.jsonl", rows=24)
    make_model(folder / "tied", hidden_size=48, intermediate_size=80, tie_word_embeddings=True)
    make_pairs(folder / "pairs.jsonl", rows=24)
    for mode, keys in MODES.items():
        text = json.dumps(keys).replace("PAIRS", f"{folder}/pairs.jsonl")
        keys = json.loads(text.replace("TIED", f"{folder}/tied"))
        common = {
            "use_peft": True,
            "lora_r": 4,
            "lora_alpha": 12,
            "lora_target_modules": ["q_proj", "down_proj", "lm_head"],
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
        for layout in LAYOUTS
    }
    configs |= {
        name: write_config(folder, "full_shard", sizes=sizes) for name, sizes in SIZES.items()
    }
    alone = ["per_device_train_batch_size=4", "export_at_end=true", *saves]
    single = write_config(folder, "single")
    one = [
        (folder / f"{mode}.yaml", single, [f"output_dir={folder}/{mode}-single", *alone])
        for mode in (MODES if slow_too else QUICK_MODES)
    ]
    adapter = f"adapter_name_or_path={folder}/sft-single/adapter"
    one += [
        (folder / "sft.yaml", single, [f"output_dir={folder}/further", adapter]),
        (folder / "sft.yaml", single, [f"output_dir={folder}/dropout", "lora_dropout=0.9"]),
    ]
    train_all(folder, one, ranks=1)
    rows = ["per_device_train_batch_size=2", *saves]
    middle = f"resume_from_checkpoint={folder}/sft-full_shard/checkpoints/step-{SAVED_AT:08d}"
    again = [f"output_dir={folder}/resumed", middle, *rows]
    whole = [f"output_dir={folder}/sft-full_shard", *rows]
    given = (whole, again) if slow_too else (whole,)
    wanted = [(folder / "sft.yaml", configs["full_shard"], keys) for keys in given]
    train_all(folder, wanted, ranks=2)
    if not slow_too:
        return folder
    wanted = [
        (folder / f"{mode}.yaml", config, [f"output_dir={folder}/{mode}-{layout}", *rows])
        for mode in ("sft", "tied")
        for layout, config in configs.items()
        if (mode, layout) != ("sft", "full_shard")
    ]
    wanted += [
        (
            folder / f"{mode}.yaml",
            configs["shard_grad_op"],
            [f"output_dir={folder}/{mode}-stages", "pipeline_parallel_size=2", *rows],
        )
        for mode in ("sft", "tied")
    ]
    wanted += [
        (folder / "sft.yaml", config, [f"output_dir={folder}/{name}", *rows, *keys])
        for name, config, keys in (
            ("bf16-FULL_SHARD", write_config(folder, "FULL_SHARD", "bf16"), []),
            ("bf16-full_shard", write_config(folder, "full_shard", "bf16"), []),
            ("bf16-ddp", write_config(folder, "ddp", "bf16"), []),
            ("qlora", write_config(folder, "full_shard", "bf16"), ["load_in_4bit=true"]),
        )
    ]
    train_all(folder, wanted, ranks=2)
    return folder


@pytest.mark.parametrize("mode", slow_but(QUICK_MODES, MODES))
def test_the_losses_are_those_of_plain_peft(mode: str, runs: Path) -> None:
    expected = reference.losses(runs / f"{mode}.yaml")
    assert expected[-1][0] < expected[0][0]
    assert_losses(runs / f"{mode}-single", expected)


@pytest.mark.parametrize("mode", slow_but(["sft"], ["sft", "tied"]))
@pytest.mark.parametrize("layout", slow_but(["full_shard"], [*LAYOUTS, *SIZES, "stages"]))
def test_every_layout_has_the_same_losses(layout: str, mode: str, runs: Path) -> None:
    assert_losses(runs / f"{mode}-{layout}", reference.losses(runs / f"{mode}.yaml"))


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(runs: Path) -> None:
    assert_bit_equal(runs / "sft-full_shard", runs / "resumed", STEPS, SAVED_AT)


@pytest.mark.parametrize("mode", slow_but(["packed", "tied"], ["sft", "packed", "head", "tied"]))
def test_the_adapter_opens_in_peft_and_is_the_merged_model(mode: str, runs: Path) -> None:
    """A tied head is the embedding no longer: the merged model is untied. peft's own merging adds the update to the embedding too."""
    folder = runs / ("tied" if mode == "tied" else "model")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(12)[None]
    plain = base(ids).logits
    run = runs / f"{mode}-single"
    adapted = PeftModel.from_pretrained(base, run / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    assert not merged.config.tie_word_embeddings
    assert adapted.get_output_embeddings().lora_B["default"].weight.abs().max() > 0
    with torch.no_grad():
        logits = adapted(ids).logits
        assert (logits - plain).abs().max() > 1e-3
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-5, atol=1e-5)
        if mode != "tied":
            by_peft = adapted.merge_and_unload()(ids).logits
            torch.testing.assert_close(by_peft, logits, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_trained_further_from_where_it_ended(runs: Path) -> None:
    first = steps_of(runs / "further")[0]
    start = steps_of(runs / "sft-single")[0]
    assert first["loss"] < start["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FULL_SHARD", "full_shard", "ddp"])
def test_in_bf16_the_losses_are_those_up_to_its_rounding(layout: str, runs: Path) -> None:
    """Under FSDP1 both matrices of the head's adapter are units of their own, whole in their own forwards alone."""
    assert_losses(
        runs / f"bf16-{layout}", reference.losses(runs / "sft.yaml"), rel=5e-3, norms=2e-2
    )


@pytest.mark.slow
def test_the_head_of_a_quantized_base_is_in_16_bits(runs: Path) -> None:
    losses = [line["loss"] for line in steps_of(runs / "qlora")]
    assert losses == pytest.approx(
        [loss for loss, _ in reference.losses(runs / "sft.yaml")], rel=2e-2
    )


def test_dropout_drops_what_the_heads_adapter_reads(runs: Path) -> None:
    """The adapter starts at zero: the first loss is the same, the first gradient is another."""
    (loss, norm), *_ = reference.losses(runs / "sft.yaml")
    first = steps_of(runs / "dropout")[0]
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(first["grad_norm"] / norm - 1) > 0.05


@pytest.mark.parametrize("is_own", [True, False], ids=["the base's head", "another head"])
def test_an_adapter_that_peft_saved_is_trained_further(
    is_own: bool, runs: Path, tmp_path: Path
) -> None:
    """peft saves the weight of an adapted head beside the adapter."""
    base = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, runs / "sft-single" / "adapter")
    if not is_own:
        adapted.get_output_embeddings().base_layer.weight.data[0, 0] += 1
    adapted.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert "base_model.model.lm_head.base_layer.weight" in names
    recipe = read_recipe(str(runs / "sft.yaml"), [f"adapter_name_or_path={tmp_path}"])
    model = build_on_meta(load_config(recipe.model), torch.float32)
    stored = load_file(runs / "model" / "model.safetensors")
    lora = complete_lora(recipe).lora
    add_adapters(model, lora, torch.float32)
    values = read_adapter(model, tmp_path, lambda name, slices: stored[base_name(name)][slices])
    whole = (slice(None), slice(None))
    head = "lm_head.base_layer.weight"
    if is_own:
        assert torch.equal(values(head, whole), stored["lm_head.weight"])
    else:
        with pytest.raises(
            UserError, match=r"was trained on another lm_head\.weight than the base"
        ):
            values(head, whole)


@pytest.mark.parametrize("mode", slow_but(QUICK_MODES, MODES))
def test_the_plan_counts_the_adapter(mode: str, runs: Path) -> None:
    recipe = read_recipe(str(runs / f"{mode}.yaml"))
    spec = make_plan(recipe, read_sharding(None, None, {"WORLD_SIZE": "1"}), 1, on_cpu=True).spec
    saved = load_file(runs / f"{mode}-single" / "adapter" / "adapter_model.safetensors")
    assert {"base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"} <= {
        *saved
    }
    assert spec.trained_numel == sum(tensor.numel() for tensor in saved.values())
