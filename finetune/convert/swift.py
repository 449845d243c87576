"""What only several keys of an ms-swift file or command together determine."""

from finetune.config.quantization import LOAD_KEYS
from finetune.convert.counterparts import ToolFile
from finetune.convert.value_conversion import Conversion, convert_names

SWIFT_TURNS = (
    "ms-swift writes the model's turns by templates of its own; the tokenizer's is used here: "
    "compare them"
)


def adapt_swift(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of an ms-swift file ask for together."""
    recipe = conversion.recipe
    scale = str(settings.get("loss_scale") or "default")
    parts = scale.split("+")
    if "all" in parts:
        recipe["assistant_only_loss"] = False
    elif "last_round" in parts:
        recipe["turns"] = "last"
    if scale not in ("all", "last_round", "default"):
        conversion.add_difference("loss_scale", scale, "every token of an answer counts alike here")
    if not settings.get("template"):
        conversion.add_difference("template", None, SWIFT_TURNS)
    _adapt_swifts_values(settings, conversion)
    if settings.get("val_dataset") or settings.get("split_dataset_ratio"):
        _measure_with_saves(settings, conversion)
    adapters = convert_names(settings.get("adapters")) or []
    if len(adapters) == 1:
        recipe["adapter_name_or_path"] = adapters[0]
    elif adapters:
        conversion.add_difference(
            "adapters", adapters, "one adapter is trained further", "several adapters at once"
        )


# get_quantization_config of its arguments/base_args/quant_args.py
WITHOUT_METHOD = "no quantization there without quant_method: bnb"
# compute_loss of its trainers/seq2seq_trainer.py
SMOOTHED_MEANS = (
    "the mean of each micro-batch over its labels there; here the mean over those of the whole step"
)
# get_target_modules and get_modules_to_save of its pipelines/train/tuner.py
FOUND_THERE = ("all-embedding", "all-norm")
FOUND_BY_CLASS = "all modules of this kind there; here modules are named"
# _init_new_special_tokens of its arguments/base_args/model_args.py
FILES_OF_TOKENS = "a file of tokens there; added_tokens names each"


def _adapt_swifts_values(settings: ToolFile, conversion: Conversion) -> None:
    """Adapts values of single keys that ask for nothing alone, or for more than a name says."""
    recipe = conversion.recipe
    if settings.get("quant_bits") and not settings.get("quant_method"):
        for key in LOAD_KEYS:
            recipe.pop(key, None)
        conversion.add_remark("quant_bits", settings["quant_bits"], WITHOUT_METHOD)
    if recipe.get("label_smoothing"):
        conversion.add_remark("label_smoothing_factor", recipe["label_smoothing"], SMOOTHED_MEANS)
    for key in ("target_modules", "modules_to_save"):
        names = convert_names(settings.get(key)) or []
        found = [name for name in names if name in FOUND_THERE]
        if found:
            conversion.add_difference(key, found, FOUND_BY_CLASS)
        if found and key == "modules_to_save":
            recipe[key] = [name for name in names if name not in FOUND_THERE]
    files = [name for name in recipe.get("added_tokens", ()) if str(name).endswith(".txt")]
    if files:
        recipe["added_tokens"] = [name for name in recipe["added_tokens"] if name not in files]
        conversion.add_difference("new_special_tokens", files, FILES_OF_TOKENS)


# _init_eval_strategy of its arguments/sft_args.py
ALL_TRAINED = "no rows are held out where nothing is measured, there and here"


def _measure_with_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Measures as often as ms-swift saves, where its file does not say when."""
    recipe = conversion.recipe
    strategy = settings.get("eval_strategy", settings.get("evaluation_strategy"))
    if strategy is None:
        strategy = settings.get("save_strategy") or "steps"
        if strategy == "epoch":
            recipe["eval_strategy"] = "epoch"
    if strategy == "steps" and "eval_steps" not in recipe:
        recipe["eval_steps"] = recipe.get("save_steps", 500)
    if strategy == "no" and recipe.pop("eval_split_size", None):
        share = settings.get("split_dataset_ratio")
        conversion.add_remark("split_dataset_ratio", share, ALL_TRAINED)
