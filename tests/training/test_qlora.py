"""QLoRA as a run: resumed bit for bit, its base named by a digest, and about as good as LoRA on the base in bf16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune.checkpoint.resume import load_checkpoint
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from finetune.export.export import export
from finetune.files.tensors import hash_weights
from finetune.models.load import load_model
from finetune.optim.optimizers import build_optimizer
from tests.conftest import make_chat, make_model
from tests.ranks import run_command
from tests.training.layouts import steps_of, train_all, write_config

QLORA = {"use_peft": True, "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
STEPS, SAVED = 4, 2
# The share by which held-out losses of QLoRA and LoRA may differ after the same steps.
SLACK = 0.02


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """A run of two ranks in `whole`, the same resumed from its middle in `again`, and resumed by one rank in `alone`."""
    folder = tmp_path_factory.mktemp("qlora")
    model = make_model(
        # Rows of 40, 64 and 75 numbers: of lengths like 48 bitsandbytes' own forward on a CPU takes the wrong scales.
        folder / "model",
        hidden_size=40,
        intermediate_size=75,
    )
    keys = {
        "model_name_or_path": str(model),
        "datasets": [{"path": str(make_chat(folder / "chat.jsonl", rows=24))}],
        "dataset_cache_dir": str(folder / "cache"),
        "max_length": 64,
        "global_batch_size": 4,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "save_total_limit": 10,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "export_at_end": False,
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(keys | QLORA))
    middle = f"resume_from_checkpoint={folder}/whole/checkpoints/step-{SAVED:08d}"
    sharded = write_config(folder, "full_shard", "bf16", checkpointing=True)
    runs = [
        (recipe, sharded, [f"output_dir={folder}/whole"]),
        (recipe, sharded, [f"output_dir={folder}/again", middle]),
    ]
    train_all(folder, runs, ranks=2)
    if slow_too:
        single = write_config(folder, "single", "bf16")
        keys = [f"output_dir={folder}/alone", middle, "per_device_train_batch_size=4"]
        train_all(folder, [(recipe, single, keys)], ranks=1)
    return folder


def tensors_of(run: Path, part: str) -> dict[str, list[torch.Tensor]]:
    """The shards of the last checkpoint, in order of rank."""
    found: dict[str, list[torch.Tensor]] = {}
    for file in sorted((run / "checkpoints" / f"step-{STEPS:08d}" / part).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(name, []).append(tensor)
    return found


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_run_resumes_bit_for_bit(part: str, resumed: Path) -> None:
    whole, again = tensors_of(resumed / "whole", part), tensors_of(resumed / "again", part)
    assert whole.keys() == again.keys()
    assert all(
        torch.equal(a, b) for name in whole for a, b in zip(whole[name], again[name], strict=True)
    )
    losses = [[line["loss"] for line in steps_of(resumed / run)] for run in ("whole", "again")]
    assert losses[0][SAVED:] == losses[1]


@pytest.mark.slow
def test_it_resumes_in_another_layout_up_to_rounding(resumed: Path) -> None:
    whole, alone = (steps_of(resumed / run)[-SAVED:] for run in ("whole", "alone"))
    assert [line["loss"] for line in alone] == pytest.approx(
        [line["loss"] for line in whole], rel=2e-2
    )


def test_a_checkpoint_holds_the_adapters_and_the_digest_of_the_base(resumed: Path) -> None:
    assert all(".lora_" in name for name in tensors_of(resumed / "whole", "model"))
    checkpoint = resumed / "whole" / "checkpoints" / f"step-{STEPS:08d}"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["inputs"]["base"] == hash_weights(resumed / "model")
    assert {key: state["recipe"][key] for key in QLORA} == QLORA
    assert "quantization_config" not in json.loads(
        (checkpoint / "model" / "config.json").read_text()
    )


@pytest.mark.slow
def test_plain_peft_on_the_quantized_base_gives_the_logits_that_were_trained(resumed: Path) -> None:
    """Transformers, bitsandbytes and peft alone, from the base's folder and `adapter/`, against the run's own model in fp32."""
    recipe = read_recipe(str(resumed / "recipe.yaml"))
    checkpoint = resumed / "whole" / "checkpoints" / f"step-{STEPS:08d}"
    ids = torch.arange(24)[None] * 5 % 250
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        model: Any = load_model(recipe.model, recipe.lora, 0, world, recipe.quantization)[0]
        load_checkpoint(checkpoint, model, build_optimizer(model, recipe.optimization), world)
        with torch.no_grad():
            trained = model.eval()(input_ids=ids, use_cache=False).logits
            model = load_model(recipe.model, recipe.lora, 0, world, recipe.quantization)[0]
            untrained = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        leave(world)
    export(checkpoint, resumed / "adapter", adapter_only=True, log=lambda line: None)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    config.bnb_4bit_compute_dtype = torch.float32
    base = AutoModelForCausalLM.from_pretrained(
        resumed / "model", dtype=torch.float32, quantization_config=config
    )
    with (
        torch.no_grad()
    ):  # as in training: outside of it, bitsandbytes multiplies in bf16 on some CPUs
        plain = PeftModel.from_pretrained(base, resumed / "adapter").train()(input_ids=ids).logits
    assert (trained - untrained).abs().max() > 0.1, "the adapter does nothing"
    assert torch.allclose(plain, trained, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(7600)  # five runs of at most 1500 s each
def test_stories260k_on_gsm8k_is_as_good_as_lora_in_bf16(shared: Path, tmp_path: Path) -> None:
    columns = {"prompt_column": "question", "completion_column": "answer"}
    keys: dict[str, Any] = {
        "model_name_or_path": str(shared / "models" / "stories260k"),
        "datasets": [{"path": str(shared / "data" / "gsm8k_train.jsonl"), **columns}],
        "eval_datasets": [
            {"path": str(shared / "data" / "gsm8k_test.jsonl"), "split": "train[:200]", **columns}
        ],
        "dataset_cache_dir": str(tmp_path / "cache"),
        "max_length": 512,
        "packing": False,
        "global_batch_size": 16,
        "per_device_train_batch_size": 8,
        "max_steps": 200,
        "learning_rate": 5e-3,
        "warmup_ratio": 0.05,
        "logging_steps": 1,
        "export_at_end": False,
        "use_peft": True,
    }
    quantized = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    held_out: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for name, extra, ranks, precision in (
        ("lora", {}, 1, "bf16"),
        ("qlora", quantized, 1, "bf16"),
        ("qlora-2", quantized, 2, "bf16"),
        ("fp32", quantized | {"max_steps": 30}, 1, "no"),
        ("fp32-2", quantized | {"max_steps": 30}, 2, "no"),
    ):
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump(keys | extra | {"output_dir": str(tmp_path / name)})
        )
        config = write_config(tmp_path, "full_shard", precision)
        command = [
            "python",
            "-m",
            "finetune",
            "launch",
            "--recipe",
            f"{tmp_path}/{name}.yaml",
            "--config",
            str(config),
        ]
        done = run_command([*command, "--num-processes", str(ranks)], timeout=1500)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        held_out[name] = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    print(f"held-out losses: {held_out}")
    assert held_out["lora"] < 2.5, "LoRA learns nothing"
    assert held_out["qlora"] == pytest.approx(held_out["lora"], rel=SLACK)
    assert held_out["qlora-2"] == pytest.approx(held_out["lora"], rel=SLACK)
    assert losses["fp32-2"] == pytest.approx(losses["fp32"], rel=1e-5)
