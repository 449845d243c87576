"""Converts and reports what several keys of an ms-swift file or command determine together.

A comment above a text or a table names the code of ms-swift that it describes.
"""

import re
from typing import Any

from finetune.config.optimization import convert_optimizer
from finetune.config.quantization import LOAD_KEYS
from finetune.constants import ALL_LINEAR
from finetune.convert.as_read import starts_by_lora_ga
from finetune.convert.chat_templates import MAYBE_THINKING
from finetune.convert.chat_templates import THINKING as ALWAYS_THINKING
from finetune.convert.counterparts import ToolFile, read_table
from finetune.convert.foreign_values import find_matches
from finetune.convert.model_names import guess_family, has_tower, name_model
from finetune.convert.objectives import find_swifts_kind
from finetune.convert.shared import describe_shares
from finetune.convert.value_conversion import Conversion, convert_names

SWIFT_TURNS = (
    "ms-swift writes the model's turns by templates of its own, some with a system message or words"
    " that the tokenizer's lacks; that is used here: compare them"
)


# model/models: start of a name on ModelScope's hub (a pattern) -> what it is on Hugging Face's
MODELS_ON_HUGGING_FACE = {
    row["start"]: row["on_hugging_face"] for row in read_table("swift_models.csv")
}
# owners on ModelScope's hub that mirror models of others
MIRRORS = re.compile(r"(AI-ModelScope|LLM-Research|iic|swift)/")
ON_MODELSCOPE = "a name of ModelScope's hub: write the model's own on Hugging Face's"


def _rename_model(settings: ToolFile, conversion: Conversion) -> None:
    """Renames a model of ModelScope's hub to its name on Hugging Face's; an unknown mirror is left
    to do.
    """
    name = str(conversion.recipe.get("model_name_or_path"))
    if settings.get("use_hf"):
        return
    for start, new_start in MODELS_ON_HUGGING_FACE.items():
        new_name, count = re.subn(f"^{start}", new_start, name)
        if count:
            conversion.recipe["model_name_or_path"] = new_name
            conversion.add_remark("model", name, THERE_AS.format(new_name))
            return
    if MIRRORS.match(name):
        conversion.to_do.append(f"model: {name}: {ON_MODELSCOPE}")


def adapt_swift(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of an ms-swift file determine together."""
    recipe = conversion.recipe
    _rename_model(settings, conversion)
    kind = find_swifts_kind(settings)
    # _set_loss_scale of arguments/rlhf_args.py
    default_scale = "default" if kind in (None, "orpo") else "last_round"
    scale = str(settings.get("loss_scale") or default_scale)
    parts = scale.split("+")
    if "all" in parts:
        recipe["assistant_only_loss"] = False
    elif "last_round" in parts:
        recipe["turns"] = "last"
    if scale not in ("all", "last_round", "default"):
        conversion.add_difference("loss_scale", scale, "every token of an answer counts alike here")
    if not settings.get("template"):
        conversion.add_difference("template", None, SWIFT_TURNS)
    _report_turns(settings, conversion)
    _report_rows(settings, conversion)
    _report_start(settings, conversion)
    _report_targets(settings, conversion)
    _report_copies(settings, conversion)
    _adapt_optimizer(settings, conversion)
    _adapt_swifts_values(settings, conversion)
    if kind is None and settings.get("loss_type"):
        note = f"{ANOTHER_LOSS}: not supported"
        conversion.add_difference("loss_type", settings["loss_type"], note, ANOTHER_LOSS)
    if settings.get("val_dataset") or settings.get("split_dataset_ratio"):
        _measure_with_saves(settings, conversion)
    adapters = convert_names(settings.get("adapters")) or []
    if len(adapters) == 1:
        recipe["adapter_name_or_path"] = adapters[0]
    elif adapters:
        conversion.add_difference(
            "adapters", adapters, "one adapter is trained further", "several adapters at once"
        )


# _swift_encode and _add_dynamic_eos of template/base.py
ENDS_WHOLE = (
    "template: all that its template writes after the last answer of a row is trained there, as "
    "ChatML's line break or GLM's <|user|>, and after an earlier one if that begins alike; here "
    "the token alone that ends a turn"
)
# models after whose answers a template writes only the token that ends the turn
WITHOUT_MORE = re.compile(r"deepseek|gpt-?oss|llama|gemma-?[123]|phi|mistral|mixtral")
# Its templates with another chat_sep than suffix, which alone is trained, and their models.
OTHER_SEPARATORS = re.compile(
    r"^(baichuan|bluelm|chatglm2|codefuse_codellama|default|ernie|gpt_oss|ling|longwriter_llama|"
    r"mengzi|minicpm|numina|openbuddy|ring2|wizardlm2|ziya)$|"
    r"gpt-?oss|ernie-?4\.5(?!.*thinking)|phi-?2|(?<!falcon-)mamba-\d|longwriter-llama|minicpm-moe|"
    r"openbuddy-(llama-|llama2|mistral|mixtral|zephyr)|codefuse-codellama"
)
EARLIER_ENDS = (
    "answers before the last one of a row end otherwise than that there, by text that is not "
    "trained; here all with the same token, which is"
)
# Models, by their templates: with a non_thinking_prefix, and the others with is_thinking.
HYBRID = re.compile(
    r"^(?!.*(instruct|thinking|coder|deepseek-r1)).*qwen-?3(?!-?(next|vl|coder|embedding|omni))|"
    r"glm-?4\.[567]|glm-?5|gemma-?4(?!b|.*e[24]b)|deepseek-?v(3\.[12]|4)|hunyuan-\d|"
    r"youtu|kimi-k2\.[5-9]|minicpm-?5|\bhy-?3"
)
THINKING = re.compile(
    r"qwq(?!.*preview)|deepseek-?r1|thinking|nemotron-?3|minimax-?m2|qwenlong-l1|rumination"
)
# Those whose empty thought is trained whatever the keys say: theirs is no <think> alone.
UNIGNORED = re.compile(r"\bhy-?3(?!-preview)|qwen-?3-?(guard|reranker)")
# non_thinking_prefix_only_after_user of their template_cls
AFTER_QUESTIONS = re.compile(r"gemma-?4(?!b)|deepseek-?v3\.[12]")
# preserve_thinking of their TemplateMeta
ALWAYS_KEEPING = re.compile(r"qwen-?3\.8")
# _add_non_thinking_prefix of template/base.py, and _set_loss_scale of template_args.py. {}: which
# turns.
EMPTY_THOUGHTS = (
    "an answer without a thought begins with an empty one there, {}, and none is trained, nor "
    "white space after it; here as the tokenizer's template writes it, whose empty thought is "
    "trained"
)
TRAINED_THOUGHTS = (
    "an answer without a thought begins with an empty one there, {}; here where the tokenizer's "
    "template writes one"
)
# other models, whose tokenizers' templates write an empty thought, or may
WRITING_THOUGHTS = re.compile(
    r"^(?!.*(minimax-?m3|kimi-?k3|seed-oss)).*"
    f"({ALWAYS_THINKING.pattern}|{MAYBE_THINKING.pattern})"
)
NO_EMPTY_THOUGHTS = (
    "template: an answer without a thought begins with no empty one there; here with one where the "
    "tokenizer's template writes it, and that is trained"
)
# _get_preserve_thinking of template/base.py
THOUGHTS_KEPT = (
    "template: the thoughts of all answers of a row stay as they are written there; here where the "
    "tokenizer's template keeps them"
)
# _swift_encode of template/base.py: an answer's thought is a part of its text
OPENING_TRAINED = (
    "template: the <think> before a thought is trained there; here it is not where the tokenizer's "
    "prompt for an answer ends with it"
)
# model -> its default_system in templates/qwen.py, which base models have too
SYSTEMS = {
    r"qwen-?2\.5-math(?!.*instruct)": (
        "Please reason step by step, and put your final answer within \\boxed{}."
    ),
    r"qwen-?2\.5-(?!.*(instruct|vl|omni|math))": (
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    ),
}
NO_SYSTEM = "no system message is written there for a row without one; here the template's own"
SYSTEM_THERE = "of a row without one this is the system message there; here the tokenizer's own"
# other models whose template has a default_system
WITH_SYSTEM = re.compile(
    r"(?<!-)(llama-?2-|mistral-7b|mixtral)|chinese-llama-2|codestral-22b|c4ai-command-r|aya-expanse|"
    r"yi-coder|mistral-small-(24b|3\.1)|devstral-small-2505|phi-?2|(?<!falcon-)mamba-\d|dots\.llm1|"
    r"reflection|skywork-o1|wizardlm-2|dbrx|minimax-m2|moonlight|rumination|openbuddy"
)
ANY_SYSTEM = (
    "of a row without one a system message by ms-swift's template stands there; here what the "
    "tokenizer's own writes, if anything"
)
# model -> what its template writes otherwise: templates/mistral.py and templates/seed.py
OTHER_WORDS = {
    r"mistral-(nemo|small-instruct-24|large-instruct-24)|ministral-8b": (
        "the last question of a row without a system message begins with the text {{SYSTEM}} there"
    ),
    r"seed-oss": (
        "the system message names a thinking budget there, and an answer without a thought begins "
        "with one, which is trained; here as the tokenizer's template writes them"
    ),
}


def _report_turns(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what a template of ms-swift's writes or trains otherwise than the tokenizer's."""
    template = settings.get("template")
    name = name_model(settings).lower()
    masks_prompts = conversion.recipe.get("assistant_only_loss") is not False
    if masks_prompts and (template or not WITHOUT_MORE.search(name)):
        conversion.remarks.append(ENDS_WHOLE)
    if masks_prompts and OTHER_SEPARATORS.search(str(template or name)):
        conversion.add_difference("template", template, EARLIER_ENDS)
    _report_thoughts(name, settings, conversion)
    if not template and settings.get("system") is None:
        _report_system(name, conversion)


def _report_thoughts(name: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports which thoughts of answers ms-swift writes, trains and leaves out.

    `name` is the model's, in lower case.
    """
    template = settings.get("template")
    is_hybrid = HYBRID.search(name) is not None
    # then ms-swift keeps the thought of the last answer alone
    trains_last = conversion.recipe.get("turns") == "last" and not ALWAYS_KEEPING.search(name)
    if is_hybrid and not template and settings.get("add_non_thinking_prefix", True):
        turns = "in the last turn" if trains_last else "in every turn"
        if AFTER_QUESTIONS.search(name):
            turns += " but those after a tool's result"
        are_trained = settings.get("disable_ignore_empty_think") or UNIGNORED.search(name)
        note = TRAINED_THOUGHTS if are_trained else EMPTY_THOUGHTS
        conversion.add_difference("template", None, note.format(turns))
    elif not template and not is_hybrid and WRITING_THOUGHTS.search(name):
        conversion.remarks.append(NO_EMPTY_THOUGHTS)
    keeps_thoughts = settings.get("preserve_thinking", not trains_last)
    if is_hybrid or THINKING.search(name):
        conversion.remarks.append(OPENING_TRAINED)
        if keeps_thoughts:
            conversion.remarks.append(THOUGHTS_KEPT)
    if settings.get("system") == "":
        conversion.add_difference("system", "", NO_SYSTEM)


def _report_system(name: str, conversion: Conversion) -> None:
    """Reports the system message, and other words, that ms-swift's template of a model writes."""
    system = next(find_matches(SYSTEMS, name), None)
    if system:
        conversion.add_difference("system", system, SYSTEM_THERE)
    elif WITH_SYSTEM.search(name):
        conversion.add_difference("system", None, ANY_SYSTEM)
    for note in find_matches(OTHER_WORDS, name):
        conversion.add_difference("template", None, note)


# BatchSamplerShard of dataloader/shard.py
NOT_OF_ALL_RANKS = (
    "rows: where their number is no multiple of the processes' the last of them are left out there"
)
# SequenceParallelSampler of sequence_parallel/utils.py
READ_TWICE = (
    "rows: where their number is no multiple of the groups' of ranks some are read twice there"
)
# _inner_call of loss_scale/base.py
LOSS_OF_MESSAGES = (
    "rows: a message's loss and loss_scale say there whether it is trained, and how much; train "
    "and weight do here"
)
# _swift_encode of template/base.py
EMPTY_SYSTEM = (
    "rows: an empty system message is written as none there; here as the tokenizer's template "
    "writes one without words"
)
# calculate_matched_group of dataset/packing.py, and to_constant_volume of binpacking. {}: number of
# rows, and the text of `describe_shares`.
PACKED_AT_ONCE = (
    "packing: {} rows at a time{} are packed there, the longest first, each into the emptiest "
    "packed row with room for it; here each into the fullest: fewer packed rows, and fewer steps"
)
# LazyLLMDataset of dataset/utils.py, by _init_lazy_tokenize of base_args.py
DRAWN_ANEW = (
    "max_length: rows are tokenized when they are trained on there, and in place of one that is "
    "too long another one is drawn; none is here"
)


def _report_rows(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how rows are trained, left out, drawn and packed there."""
    conversion.remarks += [LOSS_OF_MESSAGES, EMPTY_SYSTEM]
    if not settings.get("streaming"):
        ranks_share_rows = (settings.get("sequence_parallel_size") or 1) > 1
        conversion.remarks.append(READ_TWICE if ranks_share_rows else NOT_OF_ALL_RANKS)
    packs = settings.get("packing")
    if packs and settings.get("packing_strategy", "binpack") == "binpack":
        at_once = "128" if settings.get("streaming") else "a thousand"
        shares = describe_shares(settings, "packing_num_proc")
        conversion.remarks.append(PACKED_AT_ONCE.format(at_once, shares))
    is_lazy = settings.get("lazy_tokenize")
    if is_lazy is None:  # a model with a tower reads rows lazily, unless one of these keys is set
        is_prevented = any(map(settings.get, ("packing", "streaming", "group_by_length")))
        is_lazy = has_tower(name_model(settings)) and not is_prevented
    if is_lazy and conversion.recipe.get("overlength", "drop") == "drop":
        conversion.remarks.append(DRAWN_ANEW)


# as_read.py has set these values
BY_LORA_GA = (
    "lora_rank, lora_alpha, lora_dropout, target_modules and other keys of adapters are not read "
    "beside it there: adapters have rank 8, alpha 8 and no dropout, on all linear layers, as here"
)
# reset_lora_parameters of peft leaves the values of torch's Linear
BOTH_RANDOM = (
    "both matrices of an adapter start at random there, so that the first loss is not the base's; "
    "here one of them starts at zero"
)


def _report_start(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what `init_weights` does beside what its row of the table says."""
    start = settings.get("init_weights")
    if conversion.recipe.get("use_peft") is False:
        return
    if starts_by_lora_ga(settings):
        conversion.add_remark("init_weights", start, BY_LORA_GA)
    elif start is False:
        capability = "another start of adapters"
        conversion.add_difference("init_weights", start, BOTH_RANDOM, capability)


# families for _drop_mamba_incompatible_targets of pipelines/train/tuner.py
MAMBA_FAMILIES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
NOT_ON_MAMBA = "no adapter is on out_proj and conv1d of this family there"


def _report_targets(settings: ToolFile, conversion: Conversion) -> None:
    """Reports layers for which all-linear stands there and not here, or the reverse."""
    targets = conversion.recipe.get("lora_target_modules", ALL_LINEAR)
    family = guess_family(name_model(settings)) or ""
    if ALL_LINEAR not in targets or not conversion.recipe.get("use_peft", True):
        return
    if family in MAMBA_FAMILIES:
        conversion.add_difference("target_modules", targets, NOT_ON_MAMBA)


# cast_adapter_dtype of peft leaves the copies of ModulesToSaveWrapper in the base's dtype.
COPIES_IN_16_BITS = (
    "without DeepSpeed and FSDP the copies that are trained are in bfloat16 there, as the base is, "
    "and so are their moments; in float32 here"
)
# _add_new_special_tokens of model/register.py
ROWS_UNTRAINED = (
    "beside adapters the rows of new tokens are trained there where modules_to_save names the "
    "embedding and the output head; both are trained here"
)


def _report_copies(settings: ToolFile, conversion: Conversion) -> None:
    """Reports differences in the modules that are trained in full beside adapters."""
    recipe = conversion.recipe
    if recipe.get("use_peft") is False:
        return
    modules = recipe.get("modules_to_save")
    is_sharded = settings.get("deepspeed") or settings.get("fsdp")
    if modules and not is_sharded and settings.get("torch_dtype") in (None, "bfloat16"):
        conversion.add_difference("modules_to_save", modules, COPIES_IN_16_BITS)
    if settings.get("new_special_tokens") and not modules:
        added = settings["new_special_tokens"]
        conversion.add_difference("new_special_tokens", added, ROWS_UNTRAINED)


# The data sets that dataset/dataset registers, by the last part of their names. A row has their
# names there, the one on Hugging Face's hub, our keys, and how its rows are rewritten there. It
# names columns too where ms-swift reads not all of them.
DATA_SETS = {row["paths"].rpartition("/")[2]: row for row in read_table("swift_datasets.csv")}
# name of such a data set -> its name on Hugging Face's hub
ON_HUGGING_FACE = {
    path: row["on_hugging_face"] for row in DATA_SETS.values() for path in row["paths"].split()
}
COLUMNS = ("type", "prompt_column", "completion_column", "chosen_column", "rejected_column")
SELF_COGNITION = "self-cognition"
THERE_AS = "by ms-swift's own list {} on Hugging Face's hub"
# SelfCognitionPreprocessor of dataset/dataset/llm.py: subset that ms-swift makes -> how it rewrites
# rows
SUBSETS = {
    "qwen3": "each question ends with /no_think there, each answer begins with an empty thought",
    "empty_think": "each answer begins with an empty thought there",
}
# by the list of data sets in ms-swift's documentation
ROWS_OF_SELF_COGNITION = 108
AS_OFTEN = f"of its {ROWS_OF_SELF_COGNITION} rows, by ms-swift's own list, weight makes so many"
# names of data sets of images
OF_IMAGES = re.compile("latex_ocr|textcaps|captcha|clevr|coco|llava|vqa", re.IGNORECASE)


def adapt_rows(sources: list[dict[str, Any]], conversion: Conversion) -> None:
    """Names the hub's data set and the columns for each data set that ms-swift knows by name, and
    reports how ms-swift rewrites the rows.

    `sources`: entries of our `datasets`, changed in place.
    """
    for entry in sources:
        path = str(entry["path"])
        name = path.rpartition("/")[2]
        row = DATA_SETS.get(name, {})
        if row.get("note"):
            conversion.add_difference("dataset", path, row["note"])
        entry |= {key: row[key] for key in COLUMNS if row.get(key)}
        entry["path"] = ON_HUGGING_FACE.get(path, path)
        if entry["path"] != path:
            conversion.add_remark("dataset", path, THERE_AS.format(entry["path"]))
        subset = entry.get("name")
        if name == SELF_COGNITION and subset in SUBSETS:
            del entry["name"]
            conversion.add_difference("dataset", f"{path}:{subset}", SUBSETS[subset])


def repeat_rows(entry: dict[str, Any], conversion: Conversion) -> bool:
    """Replaces max_samples by a weight if a data set is known to have fewer rows, which ms-swift
    repeats then.

    Returns whether it was replaced.
    """
    count = entry["max_samples"]
    is_known = str(entry["path"]).rpartition("/")[2] == SELF_COGNITION
    if not is_known or count <= ROWS_OF_SELF_COGNITION:
        return False
    del entry["max_samples"]
    entry["weight"] = round(count / ROWS_OF_SELF_COGNITION, 6)
    conversion.add_remark("dataset", f"{entry['path']}#{count}", AS_OFTEN)
    return True


ANOTHER_LOSS = "another loss"
# optimizers_map of optimizers/mapping.py, of whose names one is that of an optimizer here
ANOTHER_OPTIMIZER = "another optimizer"


def _adapt_optimizer(settings: ToolFile, conversion: Conversion) -> None:
    """Sets or reports the optimizer that the key `optimizer` names, whatever `optim` says."""
    name = settings.get("optimizer") or "default"
    optim = convert_optimizer(str(name))
    if optim is not None:
        conversion.recipe["optim"] = optim
    elif name != "default":
        note = f"{ANOTHER_OPTIMIZER}: not supported"
        conversion.add_difference("optimizer", name, note, ANOTHER_OPTIMIZER)


# get_quantization_config of arguments/base_args/quant_args.py
WITHOUT_METHOD = "no quantization there without quant_method: bnb"
# names that stand for modules of a kind: get_target_modules and get_modules_to_save of
# pipelines/train/tuner.py, and of megatron/utils/utils.py
KINDS_OF_MODULES = ("all-embedding", "all-norm", "all-router")
FOUND_BY_CLASS = "all modules of this kind there; here modules are named"
# _init_new_special_tokens of arguments/base_args/model_args.py
FILES_OF_TOKENS = "a file of tokens there; added_tokens names each"


def _adapt_swifts_values(settings: ToolFile, conversion: Conversion) -> None:
    """Adapts values that ms-swift reads otherwise than by their key alone: a quantization without a
    method, modules by their kind, and files of tokens.
    """
    recipe = conversion.recipe
    if settings.get("quant_bits") and not settings.get("quant_method"):
        for key in LOAD_KEYS:
            recipe.pop(key, None)
        conversion.add_remark("quant_bits", settings["quant_bits"], WITHOUT_METHOD)
    for key in ("target_modules", "modules_to_save"):
        names = convert_names(settings.get(key)) or []
        kinds = [name for name in names if name in KINDS_OF_MODULES]
        if kinds:
            conversion.add_difference(key, kinds, FOUND_BY_CLASS)
        if kinds and key == "modules_to_save":
            recipe[key] = [name for name in names if name not in KINDS_OF_MODULES]
    files = [name for name in recipe.get("added_tokens", ()) if str(name).endswith(".txt")]
    if files:
        recipe["added_tokens"] = [name for name in recipe["added_tokens"] if name not in files]
        conversion.add_difference("new_special_tokens", files, FILES_OF_TOKENS)


# _init_eval_strategy of arguments/sft_args.py
ALL_TRAINED = "no rows are held out where nothing is measured, there and here"


def _measure_with_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Sets when held-out rows are measured: when the file saves, if it does not say when.

    If nothing is measured, no rows are held out.
    """
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
