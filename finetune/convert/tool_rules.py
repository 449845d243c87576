"""The result of a conversion, and the rules for keys of one tool that only mean something together."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.config.other_tools import TOKEN_NAMES
from finetune.convert.rules import convert_names, convert_number, convert_targets, read_section
from finetune.convert.tool_keys import NF4_OF_TORCHAO, Tool

DOWNLOAD = re.compile(r"tune download (\S+).*?--output-dir (\S+)")


@dataclass(slots=True)
class Conversion:
    """The recipe made from a file of `tool`, and what to report about it."""

    tool: Tool
    recipe: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)  # what this recipe does otherwise, or not at all
    remarks: list[str] = field(default_factory=list)  # converted, but worth a look
    ignored: list[str] = field(default_factory=list)  # keys without effect here
    to_do: list[str] = field(default_factory=list)  # what must be set or written before the recipe can train
    missing_capabilities: list[str] = field(default_factory=list)  # those behind some of the differences

    def add_difference(self, key: str, value: Any, note: str, missing_capability: str = "") -> None:
        """Reports that their `key: value` works differently here, or needs a capability that is missing."""
        if missing_capability and missing_capability not in self.missing_capabilities:
            self.missing_capabilities.append(missing_capability)
        line, end = f"{key}: {shorten(value)}", f"   ({note})"
        same = next((i for i, other in enumerate(self.differences) if other.endswith(end)), None)
        if same is None:
            self.differences.append(line + end)
        else:  # one reason, one line
            self.differences[same] = f"{self.differences[same].removesuffix(end)}, {line}{end}"


def shorten(value: Any) -> str:
    """A value of theirs as JSON, cut at 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def adapt_tool(theirs: Mapping[str, Any], text: str, found: Conversion) -> None:
    """Adds to `found` what only several keys of `theirs` together determine; `text` is the file with its comments."""
    _adapt_tokens(theirs, found)
    rules = {"Axolotl": _adapt_axolotl, "torchtune": _adapt_torchtune, "Automodel": _adapt_automodel}
    if found.tool in rules:
        rules[found.tool](theirs, text, found)


def _adapt_tokens(theirs: Mapping[str, Any], found: Conversion) -> None:
    """Tokens by Axolotl's, LLaMA-Factory's and TRL's keys; padding, which is not trained on, only where no adapters are."""
    section = read_section(theirs, "special_tokens")
    special = {name: section.get(name) for name in TOKEN_NAMES}
    special |= {"eos_token": theirs["eos_token"]} if found.tool == "TRL" and "eos_token" in theirs else {}
    if found.recipe.get("use_peft") or theirs.get("adapter") or theirs.get("finetuning_type") == "lora":
        del special["pad_token"]
    if named := {name: str(token) for name, token in special.items() if token}:
        found.recipe["special_tokens"] = named
    keys = {"Axolotl": ("tokens",), "LLaMA-Factory": ("add_tokens", "add_special_tokens")}.get(found.tool, ())
    given = [theirs.get(key) for key in keys] + [section.get("additional_special_tokens")]
    added = [name for value in given if value for name in convert_names(value) or ()]
    if added:
        found.recipe["added_tokens"] = list(dict.fromkeys(added))
    if found.tool == "Axolotl" and theirs.get("resize_token_embeddings_to_32x"):
        found.recipe["pad_vocab_to_multiple_of"] = 32


def _adapt_axolotl(theirs: Mapping[str, Any], text: str, found: Conversion) -> None:
    total, micro = theirs.get("batch_size"), theirs.get("micro_batch_size") or 1
    if isinstance(total, int) and isinstance(micro, int) and "gradient_accumulation_steps" not in theirs:
        found.recipe["gradient_accumulation_steps"] = max(1, total // micro)
    for per_epoch, ours in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        events, epochs = convert_number(theirs.get(per_epoch)), convert_number(theirs.get("num_epochs") or 1)
        if isinstance(events, int | float) and isinstance(epochs, int | float) and events * epochs > 1:
            found.recipe[ours] = 1 / (events * epochs)  # else at the end only, there too
    if theirs.get("pretraining_dataset"):
        found.recipe["streaming"] = True


def _adapt_torchtune(theirs: Mapping[str, Any], text: str, found: Conversion) -> None:
    model = read_section(theirs, "model")
    folder = str(read_section(theirs, "checkpointer").get("checkpoint_dir") or "")
    downloaded = {local.rstrip("/"): hub for hub, local in DOWNLOAD.findall(text)}
    found.recipe["model_name_or_path"] = downloaded.get(folder.rstrip("/"), folder)
    if folder.rstrip("/") in downloaded:
        found.remarks.append(
            f"checkpointer.checkpoint_dir: {shorten(folder)}   (downloaded there from this hub name, says the file)"
        )
    if "lora_attn_modules" in model:
        layers = model["lora_attn_modules"]
        layers = [*layers, "w1", "w3", "w2"] if model.get("apply_lora_to_mlp") and isinstance(layers, list) else layers
        found.recipe |= {"use_peft": True, "lora_target_modules": convert_targets(layers)}
    if "qlora_" in str(model.get("_component_")):
        found.recipe |= {"use_peft": True, "load_in_4bit": True}
        found.remarks.append(f"model._component_: {shorten(model['_component_'])}   ({NF4_OF_TORCHAO})")
    if read_section(theirs, "optimizer"):
        found.recipe.setdefault("weight_decay", 0.01)  # torch's AdamW
    per_epoch = theirs.get("max_steps_per_epoch")
    if isinstance(per_epoch, int) and isinstance(theirs.get("epochs", 1), int):
        found.recipe["max_steps"] = per_epoch * theirs.get("epochs", 1)
    alpha = found.recipe.get("lora_alpha")
    if isinstance(alpha, float) and alpha.is_integer():
        found.recipe["lora_alpha"] = int(alpha)


def _adapt_automodel(theirs: Mapping[str, Any], text: str, found: Conversion) -> None:
    optimizer, schedule = read_section(theirs, "optimizer"), theirs.get("lr_scheduler")
    recipe = found.recipe
    is_adam = str(optimizer.get("_target_")).endswith(".Adam")
    recipe.setdefault("weight_decay", 0.0 if is_adam else 0.01)
    recipe.setdefault("learning_rate", 1e-3)
    if is_adam and recipe["weight_decay"]:
        note = "its weight decay is part of the gradient; AdamW's is not"
        found.add_difference("optimizer._target_", "torch.optim.Adam", note, "Adam with coupled weight decay")
    if isinstance(schedule, dict):
        recipe.setdefault("lr_scheduler_type", "cosine")
        if "lr_warmup_steps" not in schedule:
            recipe["warmup_ratio"] = 0.1
            found.remarks.append("lr_scheduler.lr_warmup_steps: null   (a tenth of the steps, but at most 1000 there)")
        recipe.setdefault("min_lr_ratio", 0.01)
        min_lr = convert_number(schedule.get("min_lr"))
        if (
            isinstance(min_lr, float | int) and isinstance(recipe["learning_rate"], float) and recipe["learning_rate"]
        ):  # the schedule may come before the rate in the file
            recipe["min_lr_ratio"] = round(min(1.0, min_lr / recipe["learning_rate"]), 9)
    size = read_section(theirs, "packed_sequence").get("packed_sequence_size") or 0
    if size:
        recipe |= {"packing": True, "max_length": size}
    length = read_section(theirs, "dataset").get("seq_length")
    if length and not size:
        recipe["max_length"] = length
    if "max_steps" in recipe and "num_train_epochs" not in recipe:
        recipe["num_train_epochs"] = 1.0  # max_steps decides
    if theirs.get("wandb") and read_section(theirs, "wandb").get("enable", True):
        recipe["report_to"] = "wandb"
