"""The published files of other tools: what they train on is compared with what our recipe trains on, value by value.

What each file means is worked out here from the file and that tool's documented defaults, not by finetune.convert.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe, to_dict
from finetune.convert.conversion import MISSING_FILE, as_text, convert_file, read_back
from finetune.convert.recognize import Refusal
from finetune.convert.value_conversion import Conversion
from finetune.errors import UserError

Meaning = dict[str, Any]
RENAMED = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture(scope="module")
def published(shared: Path) -> Path:
    folder = shared / "peer_configs"
    if not folder.is_dir():
        pytest.skip("the published files of other tools are not at hand")
    return folder


def ours(found: Conversion, source: Path, tmp_path: Path) -> Meaning:
    """The effective values of the converted recipe, as our reader has them. A local path need not exist here."""
    problems = read_back(found.recipe)
    assert all(line.endswith(MISSING_FILE) for line in problems), problems
    path = tmp_path / "ours.yaml"
    recipe = yaml.safe_load(as_text(source, found))
    if problems:
        recipe["model_name_or_path"] = "some/model"
        recipe["datasets"] = [
            {"path": "some/rows"} | {k: v for k, v in d.items() if k != "path"}
            for d in recipe["datasets"]
        ]
        if "teacher_model_name_or_path" in recipe:
            recipe["teacher_model_name_or_path"] = "some/teacher"
        if "rewards" in recipe:  # which are to be written
            recipe["rewards"] = ["length"]
        recipe.pop("eval_datasets", None)
        recipe.pop("eval_steps", None)
    path.write_text(yaml.safe_dump(recipe))
    read = to_dict(read_recipe(str(path)))
    if found.accelerate_file is not None:  # written beside the recipe
        (tmp_path / "accelerate.yaml").write_text(found.accelerate_file)
        read["accelerate_config"] = str(tmp_path / "accelerate.yaml")
    layout = read_sharding(None, read["accelerate_config"], {"WORLD_SIZE": "8"})
    shape = (
        "ddp" if layout.layout == "ddp" else "offload" if layout.cpu_offload else layout.strategy
    )
    return read | {"precision": layout.mixed_precision, "layout": shape, "dtype": read["dtype"]}


def number(value: Any) -> float:
    return float(value)  # PyYAML reads 2e-5 as text


def torchtune(file: Mapping[str, Any], text: str) -> Meaning:
    """torchtune's recipes: no scheduler is a constant rate, AdamW decays 0.01, nothing is clipped, cut or packed unasked."""
    if "orchestration" in file:
        return asynchronous_grpo(file)
    optimizer, schedule = file["optimizer"], file.get("lr_scheduler")
    dataset = file.get("dataset") or {"_component_": "several", "train_on_input": False}
    command = (
        next(line for line in text.splitlines() if "tune run" in line) if "tune run" in text else ""
    )
    meaning: Meaning = {
        "learning_rate": number(optimizer["lr"]),
        "lr_scheduler_type": "cosine" if schedule else "constant",
        "warmup_steps": schedule["num_warmup_steps"] if schedule else 0,
        "weight_decay": optimizer.get("weight_decay", 0.01),
        "max_grad_norm": file.get("clip_grad_norm"),
        "per_device_train_batch_size": file["batch_size"],
        "gradient_accumulation_steps": file.get("gradient_accumulation_steps", 1),
        "num_train_epochs": float(file["epochs"]),
        "packing": dataset.get("packed", False),
        "assistant_only_loss": not dataset.get(
            "train_on_input", "alpaca" in dataset["_component_"]
        ),
        "precision": file["dtype"],
        "layout": "ddp"
        if "single_device" in command
        else "offload"
        if file.get("fsdp_cpu_offload")
        else "FULL_SHARD",
        "optim_in_backward": bool(file.get("optimizer_in_bwd")),
        "activation_offload": bool(file.get("enable_activation_offloading")),
        "save_strategy": "epoch" if file["epochs"] > 1 else "steps",
    }
    if meaning["optim_in_backward"] and meaning["layout"] == "ddp":
        meaning["layout"] = (
            "FULL_SHARD"  # DDP keeps every gradient; in one process there is nothing to shard
        )
    length = file["tokenizer"].get("max_seq_len")
    meaning |= (
        {"max_length": length} if length else {"overlength": "error"}
    )  # nothing is cut where there is no limit
    model = file["model"]
    if "lora_rank" in model:
        layers = model["lora_attn_modules"] + (
            ["w1", "w2", "w3"] if model.get("apply_lora_to_mlp") else []
        )
        meaning |= {
            "use_peft": True,
            "lora_r": model["lora_rank"],
            "lora_alpha": model["lora_alpha"],
        }
        targets = {RENAMED.get(layer, layer) for layer in layers}
        if model.get("decoder_trainable") == "frozen":  # the layers that read images alone
            attention = {name for name in targets if name[0] in "qkvo"}
            targets = {f"cross_attn.{name}" for name in attention} | (targets - attention)
        meaning |= {"lora_target_modules": targets}
    else:
        meaning |= {"use_peft": False, "dtype": "bfloat16"}
    if "kd_loss" in file:  # (1 - kd_ratio) x cross entropy + kd_ratio x KL(teacher, student)
        meaning |= {
            "method": "distill",
            "distill_beta": 0.0,
            "distill_alpha": file["kd_ratio"],
            "temperature": 1.0,
        }
        assert file["kd_loss"]["_component_"].startswith("torchtune.modules.loss.ForwardKL")
    if file["loss"]["_component_"] == "torchtune.rlhf.loss.DPOLoss":  # beta 0.1; on answers alone
        meaning |= {
            "method": "dpo",
            "loss_type": "sigmoid",
            "beta": 0.1,
            "assistant_only_loss": True,
        }
        assert "stack_exchange_paired" in file["dataset"]["_component_"]
        named = {
            "prompt_column": "question",
            "chosen_column": "response_j",
            "rejected_column": "response_k",
        }
        meaning |= {
            "datasets": [{"path": "lvwerra/stack-exchange-paired", "type": "messages"} | named]
        }
    return meaning


def asynchronous_grpo(file: Mapping[str, Any]) -> Meaning:
    """torchtune's dev/async_grpo: a constant rate, whole rows of prompt and answer in max_seq_len."""
    training = file["training"]
    return {
        "method": "grpo",
        "use_peft": False,
        "learning_rate": number(training["optimizer"]["lr"]),
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": training["clip_grad_norm"],
        "max_steps": file["orchestration"]["num_steps"],
        "num_generations": file["inference"]["group_size"],
        "max_completion_length": file["inference"]["max_generated_tokens"],
        "temperature": file["inference"]["temperature"],
        "beta": training["loss"]["kl_coeff"],
        "num_iterations": training["ppo_epochs"],
        "max_length": file["tokenizer"]["max_seq_len"],
        "activation_offload": training["enable_activation_offloading"],
        "layout": "FULL_SHARD",
        "dtype": "bfloat16",
    }


def axolotl(file: Mapping[str, Any], text: str) -> Meaning:
    """Axolotl's schema: cosine, 3% of warm-up, no decay, one epoch, 512 tokens, nothing packed unasked, answers trained."""
    schedule = file.get("lr_scheduler", "cosine")
    meaning: Meaning = {
        "learning_rate": number(file["learning_rate"]),
        "lr_scheduler_type": schedule.removesuffix("_with_warmup"),
        "weight_decay": number(file.get("weight_decay") or 0.0),
        # its EAFT does not divide the entropy by 3, as the paper's does; its gradients are as much larger
        "max_grad_norm": pytest.approx(
            (file.get("max_grad_norm") or 1.0)
            / (3 ** file.get("eaft_alpha", 1.0) if file.get("use_eaft") else 1)
        ),
        "per_device_train_batch_size": file.get("micro_batch_size", 1),
        "max_length": file.get("sequence_len", 512),
        "packing": bool(file.get("sample_packing")),
        # its classes for images know roles by the chat template that a file names
        "assistant_only_loss": not file.get("train_on_inputs")
        and ("processor_type" not in file or bool(file.get("chat_template"))),
        "use_peft": file.get("adapter") in ("lora", "qlora"),
        "load_in_4bit": bool(file.get("load_in_4bit")),
        "load_in_8bit": bool(file.get("load_in_8bit")),
        "bnb_4bit_use_double_quant": bool(file.get("load_in_4bit")),
        "precision": "bf16"
        if file.get("bf16") or file.get("bfloat16")
        else "fp16"
        if file.get("fp16") or file.get("float16")
        else "no",
        "overlength": "drop",  # rows that are too long, but for plain text, of which no file here is made
        "activation_offload": bool(file.get("activation_offloading"))
        or file.get("gradient_checkpointing") == "offload",
    }
    if (
        file.get("save_steps")
        or (file.get("saves_per_epoch") or 0) * (file.get("num_epochs") or 1) > 1
    ):
        meaning["save_total_limit"] = file.get("save_total_limit") or 4
    # the schema's default, beside batch_size too, which then only counts the steps of the run
    meaning["gradient_accumulation_steps"] = file.get("gradient_accumulation_steps", 1)
    if file.get("num_epochs"):
        micro_batch = file.get("micro_batch_size") or 1
        share = micro_batch / (file.get("batch_size") or micro_batch)
        meaning["num_train_epochs"] = file["num_epochs"] * share
    warmup = file.get("warmup_steps")
    if schedule == "constant":
        meaning["warmup_steps"] = 0
    elif warmup is not None and warmup >= 1:
        meaning["warmup_steps"] = warmup
    else:
        meaning["warmup_ratio"] = warmup or file.get("warmup_ratio", 0.03)
    if meaning["use_peft"]:
        meaning |= {"lora_r": file.get("lora_r"), "lora_alpha": file.get("lora_alpha")}
    if (
        "diffusion" in file
    ):  # core/trainers/diffusion_lm/trainer.py, of which the schedule and the ratios are no part
        noise = file["diffusion"]
        meaning |= {
            "method": "masked_diffusion",
            "mask_token": noise["mask_token_id"],
            "mask_eps": number(noise["eps"]),
            "attn_implementation": "auto",
        }
    if "pretraining_dataset" in file:
        meaning |= {"overlength": None, "streaming": True, "assistant_only_loss": True}
    if file.get("rl"):  # by TRL's trainers: without dropout; orpo_alpha is its beta
        meaning |= {
            "method": file["rl"],
            "beta": file.get("orpo_alpha", file.get("rl_beta", 0.1)),
            "lora_dropout": 0.0,
        }
    if not file.get("fsdp") and not file.get("fsdp_config") and not file.get("deepspeed"):
        # Ranks that share rows need FSDP2 here.
        meaning["layout"] = "FULL_SHARD" if file.get("context_parallel_size", 1) > 1 else "ddp"
    elif file.get("fsdp_config", {}).get("fsdp_offload_params") is False:
        meaning["layout"] = "FULL_SHARD"
    if file.get("fsdp_version") == 2 and file.get("fsdp_config") and not meaning["use_peft"]:
        meaning["dtype"] = (
            "bfloat16"  # its monkeypatch/accelerate/fsdp2.py casts nothing to float32
        )
    return meaning


def trainer(file: Mapping[str, Any]) -> Meaning:
    """transformers' TrainingArguments: linear, 3 epochs, batches of 8, no warm-up, no decay, clipped at 1."""
    return {
        "lr_scheduler_type": str(file.get("lr_scheduler_type", "linear")).removesuffix(
            "_with_min_lr"
        ),
        "warmup_ratio": file.get("warmup_ratio", 0.0),
        "weight_decay": file.get("weight_decay", 0.0),
        "max_grad_norm": file.get("max_grad_norm", 1.0),
        "per_device_train_batch_size": file.get("per_device_train_batch_size", 8),
        "gradient_accumulation_steps": file.get("gradient_accumulation_steps", 1),
        "num_train_epochs": float(file.get("num_train_epochs", 3)),
        "precision": "bf16" if file.get("bf16") else "no",
        "dtype": "float32",  # of what is trained, under ZeRO-3 and by LLaMA-Factory's upcasting
    } | (
        {}
        if file.get("save_strategy", "steps") != "steps"
        else {
            "save_steps": file.get("save_steps", 500),
            "save_total_limit": file.get("save_total_limit"),
        }
    )


def llama_factory(file: Mapping[str, Any], text: str) -> Meaning:
    """LLaMA-Factory: LoRA of rank 8, scaled by 2, on all linear layers; nothing packed unasked; answers trained.

    v1/config and v1/core/base_trainer.py: torch's AdamW at a constant 1e-4, batches of 1, weights in float32.
    """
    if "train_dataset" in file:
        adapters = file.get("peft_config")
        return {
            "learning_rate": number(file.get("learning_rate", 1e-4)), "lr_scheduler_type": "constant", "weight_decay": 0.01,
            "max_steps": file["max_steps"], "max_length": file["cutoff_len"], "max_grad_norm": 1.0, "precision": "bf16",
            "per_device_train_batch_size": file["micro_batch_size"], "layout": "FULL_SHARD", "use_peft": bool(adapters),
            "packing": file.get("batching_strategy") == "dynamic_padding_free", "dtype": "float32",
        } | ({"lora_r": adapters["r"], "lora_alpha": adapters["lora_alpha"]} if adapters else {})  # fmt: skip
    meaning = trainer(file) | {
        "learning_rate": number(file.get("learning_rate", 5e-5)),
        "max_length": file.get("cutoff_len", 2048),
        "packing": bool(file.get("packing") or file.get("neat_packing")),
        "assistant_only_loss": not file.get("train_on_prompt", False),
        "use_peft": file.get("finetuning_type", "lora") in ("lora", "oft"),
        # the launch with FSDP stands in the comments
        "layout": "FULL_SHARD"
        if "z3" in str(file.get("deepspeed")) or re.search(r"--config_file \S*fsdp", text)
        else "ddp",
    }
    if file.get("finetuning_type") == "oft":
        meaning |= {"oft_block_size": file.get("oft_block_size", 32)}
    elif meaning["use_peft"]:
        rank = file.get("lora_rank", 8)
        meaning |= {
            "lora_r": rank,
            "lora_alpha": file.get("lora_alpha", 2 * rank),
            "lora_target_modules": "all-linear",
        }
    if file.get(
        "use_asft_loss"
    ):  # the sum of DFT and asft_alpha x KL there, their mean by these weights here
        meaning |= {
            "max_grad_norm": pytest.approx(
                1 / (1 + file["asft_alpha"]) / file["gradient_accumulation_steps"]
            ),
            "token_loss": "dft",
            "distill_beta": 0.0,
        }
        meaning |= {
            "method": "distill",
            "distill_alpha": pytest.approx(file["asft_alpha"] / (1 + file["asft_alpha"])),
        }
    if file["stage"] in ("dpo", "kto"):  # its trainers are TRL's: without dropout
        meaning |= {
            "method": file["stage"],
            "beta": file["pref_beta"],
            "loss_type": "sigmoid",
            "lora_dropout": 0.0,
        }
    return meaning


def trl(file: Mapping[str, Any], text: str) -> Meaning:
    """TRL's SFTConfig: loss on every token, 1024 of them, 2e-5, nothing packed unasked; its DPOConfig: 1e-6, beta 0.1."""
    if "beta" in file:
        meaning = {
            "method": "dpo",
            "beta": file["beta"],
            "loss_type": file.get("loss_type", "sigmoid"),
        }
        length = file.get("max_length", 1024)  # of prompt and one answer, as here
        rate = number(file.get("learning_rate", 1e-6))
        return (
            trainer(file)
            | meaning
            | {"max_length": length, "learning_rate": rate, "packing": False}
        )
    return trainer(file) | {
        "method": "sft",
        "learning_rate": number(file.get("learning_rate", 2e-5)),
        "max_length": file.get("max_length", file.get("max_seq_length", 1024)),
        "packing": file.get("packing", False),
        "assistant_only_loss": file.get("assistant_only_loss", False),
        "use_peft": file.get("use_peft", False),
    }


def automodel(file: Mapping[str, Any], text: str) -> Meaning:
    """NeMo Automodel: no scheduler is a constant rate; with one, cosine to 1% after 10%; clipped at 1; not packed unasked."""
    optimizer, schedule, steps = file["optimizer"], file.get("lr_scheduler"), file["step_scheduler"]
    rate, size = (
        number(optimizer["lr"]),
        file.get("packed_sequence", {}).get("packed_sequence_size", 0),
    )
    meaning: Meaning = {
        "learning_rate": rate,
        "lr_scheduler_type": schedule.get("lr_decay_style", "cosine") if schedule else "constant",
        "weight_decay": optimizer.get(
            "weight_decay", 0.0 if optimizer["_target_"].endswith(".Adam") else 0.01
        ),
        "adam_beta2": optimizer["betas"][1],
        "max_grad_norm": file.get("clip_grad_norm", {}).get("max_norm", 1.0),
        "global_batch_size": steps["global_batch_size"],
        "max_steps": steps.get("max_steps"),
        "packing": size > 0,
        "use_peft": "peft" in file,
        "assistant_only_loss": True,
        "precision": "bf16",
        "layout": "offload" if "offload_policy" in file["distributed"] else "FULL_SHARD",
    }
    if schedule:
        is_constant = meaning["lr_scheduler_type"] == "constant"  # which reaches no lowest rate
        least = number(schedule["min_lr"]) / rate if "min_lr" in schedule else 0.01
        meaning["min_lr_ratio"] = pytest.approx(0.0 if is_constant else least)
        given = schedule.get("lr_warmup_steps")
        meaning |= {"warmup_ratio": 0.1} if given is None else {"warmup_steps": given}
    else:
        meaning["warmup_steps"] = 0
    length = size or file["dataset"].get("seq_length")
    meaning |= {"max_length": length} if length else {"overlength": "error"}
    if "peft" in file:
        meaning |= {"lora_r": file["peft"]["dim"], "lora_alpha": file["peft"]["alpha"]}
    return meaning


TOOLS = {
    "torchtune": (torchtune, 26),
    "axolotl": (axolotl, 20),
    "llama_factory": (llama_factory, 5),
    "alignment_handbook": (trl, 7),
    "automodel": (automodel, 10),
}


LISTED_AS = {  # by the start of a line of the differences: what may differ, since it is said
    "precision": ("mixed_precision", "optimizer"),
    "packing": ("packing: false, ",),
    "lora_target_modules": ("model.apply_lora_to_mlp",),
    # which are left to a base that is stored in 4 bits
    "load_in_4bit": ("base_model:",),
    "bnb_4bit_use_double_quant": ("base_model:",),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_published_file_is_converted_with_its_meaning_or_refused_by_name(
    published: Path, tool: str, tmp_path: Path
) -> None:
    meaning_of, least = TOOLS[tool]
    wrong, compared = [], 0
    for path in sorted((published / tool).iterdir()):
        try:
            found = convert_file(path)
        except Refusal as refusal:
            assert refusal.cause and str(refusal).startswith(str(path)), path
            continue
        text = path.read_text()
        file = yaml.safe_load(text.replace("${batch_size}", "1"))
        expected, actual = meaning_of(file, text), ours(found, path, tmp_path)
        compared += 1
        for key, value in expected.items():
            has = set(actual[key]) if isinstance(value, set) else actual[key]
            if key == "datasets":  # the keys that are named
                has = [{name: entry[name] for name in value[0]} for entry in has]
            is_reported = any(line.startswith(LISTED_AS.get(key, ())) for line in found.differences)
            if has != value and not is_reported:
                wrong.append(f"{path.name}: {key}: {value} there, {has} here")
    assert not wrong, "\n".join(wrong)
    assert compared >= least  # else this test would hold for files that are all refused


def test_a_capability_that_is_lacking_is_always_listed(published: Path) -> None:
    for path in sorted((published / "axolotl").iterdir()):
        try:
            found = convert_file(path)
        except UserError:
            continue
        file = yaml.safe_load(path.read_text())
        assert found.recipe.get("modules_to_save") == file.get("lora_modules_to_save"), path
        assert bool(found.missing_capabilities) <= bool(found.differences), path
