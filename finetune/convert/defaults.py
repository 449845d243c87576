"""Writes the defaults of another tool into a recipe where ours differ from them."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from finetune.config.keys import keys_of
from finetune.config.quantization import read_recipe_quantization
from finetune.config.schema import Lora, recipe_keys
from finetune.constants import ceil_div
from finetune.convert.counterparts import TOOL_NAMES, Tool, ToolFile, read_table
from finetune.convert.model_names import guess_family
from finetune.convert.value_conversion import Conversion, find_method_facts, read_value

# tools without Trainer, whose files name components: Python classes and functions
OF_COMPONENTS = ("torchtune", "Automodel")
SPLITTING = ("bfd_split", "wrapped")  # TRL's packing strategies that lose no token of a long row
# what is written for a tool without a limit of length
UNLIMITED: dict[str, Any] = {"max_length": 8192, "overlength": "error"}
UNLIMITED_NOTE = (
    "no limit of length there: a row of over 8192 tokens stops the run here; raise max_length for "
    "longer ones"
)
# ms-swift's base_args.py sets max_length to the model's max_model_len if a file has none
MODELS_LIMIT_NOTE = (
    "a row that is longer than the model takes is left out there; one of over 8192 tokens stops "
    "the run here: raise max_length for longer ones"
)
# max_seq_len of torchtune's model builders, here those of more than 8192
BUILDERS_LIMIT_NOTE = (
    "a row may be as long as the model's own limit there; one of over 8192 tokens stops the run "
    "here: raise max_length for longer ones"
)
LIMIT_NOTES = {"ms-swift": MODELS_LIMIT_NOTE, "torchtune": BUILDERS_LIMIT_NOTE}


def _read_defaults(under: str) -> Mapping[str, Mapping[str, Any]]:
    """Reads each tool's defaults, in our keys and values, from the rows of the table for `under`.

    That is "lora", "4-bit" for a base in 4 bits, and "" for those of every file.
    """
    defaults: dict[str, dict[str, Any]] = {tool: {} for tool in TOOL_NAMES}
    for row in read_table("defaults.csv"):
        for tool in row["tools"].split():
            if row["under"] == under:
                defaults[tool][row["key"]] = yaml.safe_load(row["default"])
    return defaults


DEFAULTS = _read_defaults("")
LORA_DEFAULTS = _read_defaults("lora")
# what each tool asks of bitsandbytes (torchtune: of torchao's NF4) if the file does not say
FOUR_BIT_DEFAULTS = _read_defaults("4-bit")
# peft's default targets, which TRL leaves to peft, by the model's family where they are not those
# above (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
PEFTS_TARGETS: Mapping[str | None, list[str]] = {
    "nemotron_h": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "phi": ["q_proj", "v_proj", "fc1", "fc2"],
}
FACTORY_RANK = 8  # LLaMA-Factory's default rank; its default lora_alpha is twice the rank
WARMUP_THERE = (
    "3% of the steps, but at most 100 there, rounded down, and a warm-up of one step is one of "
    "two; rounded up here"
)


SWIFT_STEP_ROWS = 16  # rows a step to which ms-swift accumulates by default


def add_defaults(settings: ToolFile, conversion: Conversion) -> None:
    """Writes the tool's defaults into the recipe where ours differ."""
    recipe = conversion.recipe
    defaults = dict(DEFAULTS[conversion.tool])
    if conversion.tool == "ms-swift":
        _fit_swift(conversion, defaults)
    _keep_unlimited_length(settings, conversion, defaults)
    _fit_schedule(settings, conversion, defaults)
    _fit_data(settings, conversion, defaults)
    _fit_adapters(conversion, defaults)
    _fit_saves(settings, conversion, defaults)
    for key, value in defaults.items():
        if key not in recipe and recipe_keys()[key].default != value:
            recipe[key] = value
    _drop_keys_of_adapters(recipe)


def _fit_swift(conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Sets ms-swift's defaults that depend on other keys: the learning rate and the accumulation.

    ms-swift accumulates to 16 rows a step over all processes. The recipe's value is for one.
    """
    recipe = conversion.recipe
    if recipe.get("use_peft") is False:
        defaults["learning_rate"] = 1e-5  # of full fine-tuning
    rows = recipe.get("per_device_train_batch_size", 1)
    if "gradient_accumulation_steps" not in recipe and isinstance(rows, int) and rows > 0:
        recipe["gradient_accumulation_steps"] = ceil_div(SWIFT_STEP_ROWS, rows)
        conversion.add_remark(
            "gradient_accumulation_steps", None, "16 rows a step there, divided by the processes"
        )


def _keep_unlimited_length(
    settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]
) -> None:
    """Sets a high max_length, over which a run stops, if the tool has no limit, and reports it."""
    tool = conversion.tool
    has_null = "max_length" in settings and settings["max_length"] is None  # no limit in TRL
    is_unlimited = tool in (*OF_COMPONENTS, "ms-swift") or (tool == "TRL" and has_null)
    if is_unlimited and conversion.recipe.get("max_length") is None:
        conversion.recipe.pop("max_length", None)
        defaults.update(UNLIMITED)
        conversion.remarks.append(LIMIT_NOTES.get(tool, UNLIMITED_NOTE))


def _fit_schedule(settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Removes the default of the warm-up key that the recipe does not use.

    warmup_steps and warmup_ratio say the same: with one in the recipe, the other has no default.
    Reports Axolotl's default warm-up if the recipe has neither.
    """
    recipe = conversion.recipe
    if conversion.tool in OF_COMPONENTS and "warmup_ratio" in recipe:
        del defaults["warmup_steps"]
    if recipe.get("warmup_steps"):
        defaults.pop("warmup_ratio", None)
    if conversion.tool != "Axolotl" or {"warmup_steps", "warmup_ratio"} & recipe.keys():
        return
    # _configure_warmup_and_logging takes its share of a negative max_steps, which is no step
    if settings.get("max_steps") and "max_steps" not in recipe:
        defaults["warmup_ratio"] = 0.0
    else:
        conversion.add_remark("warmup_steps", None, WARMUP_THERE)


def _fit_data(settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Sets the defaults of packing, of long rows and of trained tokens that the method decides."""
    recipe = conversion.recipe
    method = find_method_facts(recipe)
    if conversion.tool == "LLaMA-Factory" and settings.get("stage") == "pt":
        defaults["packing"] = True
    if conversion.tool == "TRL" and method.rows == "answers" and not conversion.image_family:
        # pack_dataset of its data_utils.py, and _prepare_dataset of its SFTTrainer, cut plain text
        # too, which is split here by default
        splits = settings.get("packing") and settings.get("packing_strategy") in SPLITTING
        defaults.setdefault("overlength", "split" if splits else "truncate")
    if method.rows != "answers":
        defaults.pop("assistant_only_loss", None)  # only the answers are compared
    if method.samples:
        defaults.pop("packing", None)  # sampled completions are packed here, with the same loss
    if conversion.tool == "Axolotl" and any(
        entry.get("type") != "text" for entry in recipe.get("datasets", ())
    ):
        defaults["overlength"] = "drop"  # both tools split plain text


def _fit_adapters(conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Adds the tool's defaults of LoRA and of a 4-bit base, where the recipe has these."""
    tool = conversion.tool
    recipe = conversion.recipe
    if tool == "LLaMA-Factory" and recipe.get("use_peft", True):
        rank = recipe.get("lora_r", FACTORY_RANK)
        if not isinstance(rank, int):
            rank = FACTORY_RANK
        recipe.setdefault("lora_alpha", 2 * rank)
    if recipe.get("use_peft", defaults.get("use_peft")):
        defaults.update(LORA_DEFAULTS[tool])
        family = guess_family(str(recipe.get("model_name_or_path")))
        if tool == "TRL" and recipe.get("lora_target_parameters"):
            defaults["lora_target_modules"] = []  # peft then adapts no layer by itself
        elif tool == "TRL" and family in PEFTS_TARGETS:
            defaults["lora_target_modules"] = PEFTS_TARGETS[family]
    if read_recipe_quantization(recipe).bits == 4:
        defaults.update(FOUR_BIT_DEFAULTS[tool])


def _fit_saves(settings: ToolFile, conversion: Conversion, defaults: dict[str, Any]) -> None:
    """Sets when the tool saves, and how many checkpoints it keeps, if the file does not say.

    A tool whose defaults above have no save_steps saves after every epoch.
    """
    recipe = conversion.recipe
    says_when = {"save_steps", "save_strategy", "keep_best_checkpoint"} & recipe.keys()
    if says_when:
        defaults.pop("save_steps", None)
    elif "save_steps" not in defaults and not _saves_once(conversion.tool, settings, recipe):
        epochs = recipe.get("num_train_epochs", defaults.get("num_train_epochs", 1))
        has_several = isinstance(epochs, int | float) and epochs > 1
        if has_several or _may_repeat(conversion.tool, recipe):
            recipe["save_strategy"] = "epoch"
    saves_between = {"save_steps", "save_strategy"} & (recipe.keys() | defaults.keys())
    if not saves_between or recipe.get("save_strategy") == "no":
        defaults.pop("save_total_limit", None)  # the only checkpoint is that of the end


def _may_repeat(tool: Tool, recipe: Mapping[str, Any]) -> bool:
    """Whether max_steps may train for more epochs than the file's number of epochs."""
    return tool in ("Axolotl", "Automodel") and "max_steps" in recipe


def _saves_once(tool: Tool, settings: ToolFile, recipe: Mapping[str, Any]) -> bool:
    """Whether a run without save_steps in its recipe is saved at its end alone."""
    # saves_per_epoch has become save_steps, unless it asks for one save in the whole run
    has_one_save = settings.get("saves_per_epoch") and not _may_repeat(tool, recipe)
    if has_one_save or settings.get("save_last_epoch_only") or recipe.get("streaming"):
        return True
    return read_value(settings, "step_scheduler.save_checkpoint_every_epoch") is False


def _drop_keys_of_adapters(recipe: dict[str, Any]) -> None:
    """Drops the keys of adapters that have no effect.

    Without adapters these are all keys of LoRA. An adapter that is trained further brings its
    own settings, and OFT has fewer than LoRA.
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


# Names of optimizer classes whose default weight decay is not 0: AdamW of torch, torchao and
# bitsandbytes, and those that are AdamW by default. It is 0 in others, such as torch's Adam and
# SGD, and Transformer Engine's FusedAdam.
DECAYING = re.compile("AdamW|Offload|Config$")
# DionConfigBase of Automodel's components/optim, which also makes Dion's classes
OF_DION = re.compile(r"^dion\.|(Muon|Dion2?)Config$")


def set_optimizers_defaults(name: str, recipe: dict[str, Any]) -> None:
    """Sets the default learning rate and weight decay of the optimizer class `name`.

    Values that the recipe has already stay.
    """
    if OF_DION.search(name):
        recipe.setdefault("weight_decay", 0.0)
        recipe.setdefault("learning_rate", 5e-4)
    recipe.setdefault("weight_decay", 0.01 if DECAYING.search(name) else 0.0)
    recipe.setdefault("learning_rate", 1e-4 if name.endswith("Config") else 1e-3)
