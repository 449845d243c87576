"""Removes and reports keys of a converted recipe that have no effect beside its other keys."""

from finetune.config.quantization import LOAD_KEYS, read_recipe_quantization
from finetune.config.schedules import SCHEDULES
from finetune.config.schema import recipe_keys
from finetune.convert.chat_templates import BREAK_TRAINED, HEADER
from finetune.convert.defaults import FOUR_BIT_DEFAULTS
from finetune.convert.model_names import BITSANDBYTES_MODEL
from finetune.convert.value_conversion import Conversion

# a strategy -> the number that is read only under the strategy "steps"
STEPS = {"eval_strategy": "eval_steps", "save_strategy": "save_steps"}

# _tokenize_footer of torchtune's Qwen tokenizers
WHOLE_TEXT = (
    "chat_template: the line break after the last answer is trained too here, and a row is one "
    "text; there it ends with <|im_end|>, and each message is tokenized apart"
)
# Our chat_template -> the remark for torchtune's rows in which every token is trained.
WHOLE_TEXTS = {
    "chatml": WHOLE_TEXT,
    "phi3": (
        "chat_template: the EOS token after the last answer is trained too here; there since 0.7 "
        "alone"
    ),
}


def remove_contradictions(conversion: Conversion) -> None:
    """Changes the recipe, and reports each removed key that has an effect in the other tool."""
    _keep_stream(conversion)
    _drop_unread_steps(conversion)
    _drop_quantization(conversion)
    _drop_evaluation(conversion)
    _fit_schedule(conversion)
    _drop_empty(conversion)
    if conversion.recipe.get("assistant_only_loss") is False:
        _fit_remarks_to_whole_rows(conversion)


def _fit_remarks_to_whole_rows(conversion: Conversion) -> None:
    """Drops the remarks that tokens around an answer are trained there: here every token is too."""
    conversion.remarks = [
        line
        for line in conversion.remarks
        if not any(note in line for note in (HEADER, BREAK_TRAINED))
    ]
    template = str(conversion.recipe.get("chat_template"))
    if conversion.tool == "torchtune" and template in WHOLE_TEXTS:
        conversion.remarks.append(WHOLE_TEXTS[template])


def _keep_stream(conversion: Conversion) -> None:
    """Drops the held-out share of a data set that is streamed."""
    recipe = conversion.recipe
    if recipe.get("streaming") and recipe.pop("eval_split_size", None) is not None:
        conversion.differences.append(
            "eval_split_size is dropped: rows cannot be held out of a stream; name eval_datasets"
        )


def _drop_unread_steps(conversion: Conversion) -> None:
    """Drops eval_steps and save_steps beside a strategy that does not read them.

    The recipe names no strategy for "steps", which is the default here.
    """
    recipe = conversion.recipe
    for strategy, steps in STEPS.items():
        if strategy in recipe and recipe.pop(steps, None) is not None:
            conversion.ignored.append(steps)
        if recipe.get(strategy) == "no":
            del recipe[strategy]  # the default here, without steps, does the same


def _drop_quantization(conversion: Conversion) -> None:
    """Drops quantization if the base is trained or stored quantized, and unused 4-bit settings."""
    recipe = conversion.recipe
    for key in LOAD_KEYS:
        if not recipe.get("use_peft") and recipe.pop(key, False):
            note = "only a frozen base can be quantized; every parameter is trained here"
            conversion.add_difference(key, True, note)
    if BITSANDBYTES_MODEL.search(str(recipe.get("model_name_or_path")).lower()):
        dropped = [key for key in LOAD_KEYS if recipe.pop(key, False)]
        if dropped:
            conversion.remarks.append(
                f"{', '.join(dropped)}: left to the model, whose files are quantized already"
            )
    if read_recipe_quantization(recipe).bits != 4:
        for key in FOUR_BIT_DEFAULTS[conversion.tool]:
            recipe.pop(key, None)


def _drop_evaluation(conversion: Conversion) -> None:
    """Drops evaluation without held-out rows, and then what needs evaluations."""
    recipe = conversion.recipe
    if not {"eval_datasets", "eval_split_size"} & recipe.keys():
        for key in ("eval_steps", "eval_strategy"):
            if recipe.pop(key, None) is not None:
                conversion.remarks.append(f"{key} is dropped: no rows are held out")
    if not conversion.is_measured:
        for key in ("early_stopping_patience", "keep_best_checkpoint"):
            if recipe.pop(key, None) is not None:
                conversion.differences.append(f"{key} is dropped: it needs eval_steps here")


def _fit_schedule(conversion: Conversion) -> None:
    """Sets the last rate of a polynomial schedule, and drops it from one whose rate never ends."""
    recipe = conversion.recipe
    if recipe.get("lr_scheduler_type") == "polynomial" and "min_lr_ratio" not in recipe:
        rate = recipe.get("learning_rate") or recipe_keys()["learning_rate"].default
        recipe["min_lr_ratio"] = 1e-7 / rate  # transformers' default lr_end
    schedule = SCHEDULES.get(str(recipe.get("lr_scheduler_type")))
    if schedule is not None and not schedule.has_end and recipe.pop("min_lr_ratio", None):
        conversion.ignored.append("min_lr")  # a rate that does not fall has no use for it


def _drop_empty(conversion: Conversion) -> None:
    """Drops keys without a value (None) where that is the default.

    Elsewhere None has a meaning: max_grad_norm without a value turns clipping off.
    """
    recipe = conversion.recipe
    if recipe.get("warmup_steps", 0) is None:
        del recipe["warmup_steps"]
    for key in [key for key, value in recipe.items() if value is None]:
        if recipe_keys()[key].default is None:
            del recipe[key]
