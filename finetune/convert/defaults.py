"""Each tool's defaults, written into a recipe where ours differ."""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.keys import keys_of
from finetune.config.quantization import read_recipe_quantization
from finetune.config.schema import Lora, recipe_keys
from finetune.constants import ceil_div
from finetune.convert.counterparts import TOOL_NAMES, Tool, ToolFile
from finetune.convert.model_names import guess_family
from finetune.convert.value_conversion import Conversion, find_method_facts, read_section

# Each tool's defaults in our keys; written out where ours differ. warmup_steps: None means that
# warmup_ratio decides.
TRAINER = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "save_steps": 500,
    "save_total_limit": None,
}
OF_COMPONENTS = ("torchtune", "Automodel")
COMPONENTS = {
    "packing": False,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "save_total_limit": None,
}
SPLITTING = ("bfd_split", "wrapped")  # ways to pack of TRL's that lose no token of a long row
UNLIMITED = {"max_length": 8192, "overlength": "error"}
UNLIMITED_NOTE = (
    "no limit of length there: a row of over 8192 tokens stops the run here; raise max_length for "
    "longer ones"
)
# max_length of ms-swift's base_args.py, which is max_model_len where a file has none
MODELS_LIMIT_NOTE = (
    "a row that is longer than the model takes is left out there; one of over 8192 tokens stops "
    "the run here: raise max_length for longer ones"
)
DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": TRAINER | {"max_length": 1024, "packing": False, "assistant_only_loss": False},
    "Axolotl": {"max_length": 512, "packing": False, "warmup_ratio": 0.03, "save_total_limit": 4},
    "LLaMA-Factory": TRAINER | {"packing": False, "learning_rate": 5e-5, "use_peft": True},
    "ms-swift": TRAINER
    | {
        "packing": False,
        "overlength": "drop",
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "cosine",
        "use_peft": True,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "learning_rate": 1e-4,
    },
    "torchtune": COMPONENTS | {"max_grad_norm": None},
    "Automodel": COMPONENTS | {"num_train_epochs": 10.0, "global_batch_size": 32},
}
LORA_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": {"lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]},
    "Axolotl": {"lora_r": 8, "lora_alpha": 8},
    "LLaMA-Factory": {"lora_r": 8},
    "torchtune": {"lora_r": 8, "lora_alpha": 16},
    "ms-swift": {
        "lora_r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": "all-linear",
    },
    "Automodel": {"lora_r": 8},
}
# Of peft, by the model's family, where these are not TRL's above
# (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
PEFTS_TARGETS: Mapping[str | None, list[str]] = {
    "nemotron_h": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "phi": ["q_proj", "v_proj", "fc1", "fc2"],
}
# Of a 4-bit base: the settings that each tool gives bitsandbytes where the file gives none
# (torchtune: torchao's NF4).
FOUR_BIT_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    tool: {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": tool != "TRL"}
    for tool in TOOL_NAMES
}
FACTORY_RANK = 8
WARMUP_THERE = (
    "3% of the steps, but at most 100 there, rounded down, and a warm-up of one step is one of "
    "two; rounded up here"
)


def add_defaults(settings: ToolFile, conversion: Conversion) -> None:
    """Writes the tool's defaults into the recipe where ours differ."""
    recipe = conversion.recipe
    defaults = dict(DEFAULTS[conversion.tool])
    if conversion.tool == "ms-swift":
        _fit_swift(conversion, defaults)
    _keep_unlimited_length(settings, conversion, defaults)
    _fit_schedule(conversion, defaults)
    _fit_data(settings, conversion, defaults)
    _fit_adapters(conversion, defaults)
    _fit_saves(settings, conversion, defaults)
    for key, value in defaults.items():
        if key not in recipe and recipe_keys()[key].default != value:
            recipe[key] = value
    _drop_keys_of_adapters(recipe)


def _fit_swift(conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Sets what depends there on the kind of tuning, and on the batch: 16 rows a step, on all
    processes.
    """
    recipe = conversion.recipe
    if recipe.get("use_peft") is False:
        defaults["learning_rate"] = 1e-5
    rows = recipe.get("per_device_train_batch_size", 1)
    if "gradient_accumulation_steps" not in recipe and isinstance(rows, int) and rows > 0:
        recipe["gradient_accumulation_steps"] = ceil_div(16, rows)
        conversion.add_remark(
            "gradient_accumulation_steps", None, "16 rows a step there, divided by the processes"
        )


def _keep_unlimited_length(
    settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]
) -> None:
    """Cuts no example where the tool cuts none, and says so in a remark."""
    tool = conversion.tool
    is_unlimited = tool in (*OF_COMPONENTS, "ms-swift") or (
        tool == "TRL" and settings.get("max_length", 0) is None
    )
    if is_unlimited and conversion.recipe.get("max_length") is None:
        conversion.recipe.pop("max_length", None)
        defaults |= UNLIMITED
        conversion.remarks.append(MODELS_LIMIT_NOTE if tool == "ms-swift" else UNLIMITED_NOTE)


def _fit_schedule(conversion: Conversion, defaults: dict[str, Any]) -> None:
    recipe = conversion.recipe
    if conversion.tool in OF_COMPONENTS:
        if "warmup_ratio" in recipe:
            del defaults["warmup_steps"]
        elif recipe.get("lr_scheduler_type", "constant") != "constant":
            del defaults["lr_scheduler_type"]
    if recipe.get("warmup_steps"):
        defaults.pop("warmup_ratio", None)
    if conversion.tool == "Axolotl" and not {"warmup_steps", "warmup_ratio"} & recipe.keys():
        conversion.add_remark("warmup_steps", None, WARMUP_THERE)


def _fit_data(settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]) -> None:
    recipe = conversion.recipe
    method = find_method_facts(recipe)
    if conversion.tool == "LLaMA-Factory" and settings.get("stage") == "pt":
        defaults["packing"] = True
    if conversion.tool == "TRL" and method.rows == "answers" and not conversion.images:
        # pack_dataset of its data_utils.py, and _prepare_dataset of its SFTTrainer; of plain text
        # too, which is split here
        splits = settings.get("packing") and settings.get("packing_strategy") in SPLITTING
        defaults.setdefault("overlength", "split" if splits else "truncate")
    if method.rows != "answers":
        defaults.pop("assistant_only_loss", None)  # only the answers are compared
    if method.samples:
        defaults.pop("packing", None)  # what is sampled is packed here, for the same loss
    if conversion.tool == "Axolotl" and any(
        entry.get("type") != "text" for entry in recipe.get("datasets", ())
    ):
        defaults["overlength"] = "drop"  # plain text is split, there as here


def _fit_adapters(conversion: Conversion, defaults: dict[str, Any]) -> None:
    tool = conversion.tool
    recipe = conversion.recipe
    if tool == "LLaMA-Factory" and recipe.get("use_peft", True):
        rank = recipe.get("lora_r", FACTORY_RANK)
        recipe.setdefault("lora_alpha", 2 * rank if isinstance(rank, int) else 2 * FACTORY_RANK)
    if recipe.get("use_peft", defaults.get("use_peft")):
        defaults |= LORA_DEFAULTS[tool]
        family = guess_family(str(recipe.get("model_name_or_path")))
        if tool == "TRL" and family in PEFTS_TARGETS:
            defaults["lora_target_modules"] = PEFTS_TARGETS[family]
    if read_recipe_quantization(recipe).bits == 4:
        defaults |= FOUR_BIT_DEFAULTS[tool]


def _fit_saves(settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Sets when a tool saves, and how many it keeps, where the file does not say: all but Trainer
    save every epoch.
    """
    recipe = conversion.recipe
    is_said = {"save_steps", "save_strategy", "keep_best_checkpoint"} & recipe.keys()
    if is_said:
        defaults.pop("save_steps", None)
    elif "save_steps" not in defaults and not _saves_once(conversion.tool, settings, recipe):
        epochs = recipe.get("num_train_epochs", defaults.get("num_train_epochs", 1))
        if _may_repeat(conversion.tool, recipe) or (isinstance(epochs, int | float) and epochs > 1):
            recipe["save_strategy"] = "epoch"
    saves = {"save_steps", "save_strategy"} & (recipe.keys() | defaults.keys())
    if not saves or recipe.get("save_strategy") == "no":
        defaults.pop("save_total_limit", None)  # one checkpoint, at the end


def _may_repeat(tool: Tool, recipe: Mapping[str, Any]) -> bool:
    """Whether max_steps may go through the data more often than the epochs say."""
    return tool in ("Axolotl", "Automodel") and "max_steps" in recipe


def _saves_once(tool: Tool, settings: ToolFile, recipe: Mapping[str, Any]) -> bool:
    if (
        (settings.get("saves_per_epoch") and not _may_repeat(tool, recipe))
        or settings.get("save_last_epoch_only")
        or recipe.get("streaming")
    ):
        return True
    return read_section(settings, "step_scheduler").get("save_checkpoint_every_epoch") is False


def _drop_keys_of_adapters(recipe: dict[str, Any]) -> None:
    """Drops the keys of LoRA without adapters; one that is trained further decides them, there as
    here.
    """
    kept: set[str] = set()
    if recipe.get("use_peft"):
        if recipe.get("adapter_name_or_path"):
            kept = {"use_peft", "adapter_name_or_path"}
        elif recipe.get("oft_block_size"):
            kept = {"use_peft", "oft_block_size", "lora_target_modules", "modules_to_save"}
        else:
            kept = set(keys_of(Lora))
    for key in keys_of(Lora).keys() - kept:
        recipe.pop(key, None)


# optimizers by the names of their classes: AdamW of torch, torchao, bitsandbytes, and what is
# AdamW by default; the others have none, as torch's Adam and SGD, and Transformer Engine's
# FusedAdam
DECAYING = re.compile("AdamW|Offload|Config$")


def set_optimizers_defaults(name: str, recipe: dict[str, Any]) -> None:
    """Sets the rate and the decay of an optimizer that is named by its class, where a file has
    none.
    """
    recipe.setdefault("weight_decay", 0.01 if DECAYING.search(name) else 0.0)
    recipe.setdefault("learning_rate", 1e-4 if name.endswith("Config") else 1e-3)
