"""Converts another tool's file to a recipe with the same meaning, and lists what differs."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from finetune.config.facts import has_fused_experts
from finetune.config.keys import keys_of
from finetune.config.methods import METHODS
from finetune.config.quantization import QLORA
from finetune.config.reader import read_recipe
from finetune.config.schema import NESTED, DatasetSource, recipe_keys
from finetune.config.yaml_file import COMMAND_LINE, find_yaml, write_yaml
from finetune.convert.as_read import read_as_tool, report_adam_on_cpu
from finetune.convert.asked_layout import (
    LAUNCH_FILE,
    AskedLayout,
    find_zero_stage,
    read_layout,
    write_accelerate,
)
from finetune.convert.axolotl import FAMILIES_ROUTED_OTHERWISE, report_mlp_kernel
from finetune.convert.base_model import adapt_model
from finetune.convert.by_tool import (
    BITSANDBYTES_8_BITS,
    adapt_tool,
    keep_unfused_update,
    name_saved_dtype,
    report_dtypes,
    report_epochs,
    report_evaluation,
    report_images,
    report_losses,
    report_magnitudes,
)
from finetune.convert.by_value import report_values
from finetune.convert.chat_templates import (
    add_tokenizers_turns,
    end_last_answers,
    report_saved_template,
    report_scored_ends,
    set_template,
)
from finetune.convert.command_line import is_command
from finetune.convert.contradictions import remove_contradictions
from finetune.convert.counterparts import GRPO, NOTES, Counterpart, ToolFile, list_counterparts
from finetune.convert.datasets import add_sources
from finetune.convert.defaults import OF_COMPONENTS, add_defaults
from finetune.convert.foreign_values import (
    WrongValue,
    as_json,
    convert_number,
    find_matches,
    read_number,
)
from finetune.convert.image_models import find_images
from finetune.convert.model_names import BITSANDBYTES_MODEL, guess_family, is_mixture
from finetune.convert.numbers import report_numbers
from finetune.convert.objectives import adapt_method, adapt_rounding, find_method
from finetune.convert.recognize import LoadedFile, load_settings, refuse_other_methods
from finetune.convert.runnable import make_runnable
from finetune.convert.shared import SUMMED_IN_16_BITS
from finetune.convert.trained_layers import (
    adapt_trained_layers,
    report_expert_names,
    report_shared_experts,
)
from finetune.convert.value_conversion import (
    LEAVE,
    Conversion,
    convert_value,
    read_trackers,
    read_value,
)
from finetune.errors import UserError
from finetune.files.durable import replace_file

EXIT_TO_DO = 1
# how our reader's lines about a missing path end: it may exist on the machine that trains
MISSING_FILE = (
    "no such file or folder, here or in the recipe's folder",
    "no such file, here or in the recipe's folder",
)


def convert_command(arguments: argparse.Namespace) -> int:
    """Runs `finetune convert`: writes or prints the recipe. What differs is in it and on stderr.

    Raises `UserError` if no recipe can be made.

    Returns 0, or 1 if something is left to do before the recipe can train.
    """
    source = Path(arguments.source)
    if not is_command(source):
        refuse_own(source)
    conversion = convert_file(source)
    problems = read_back(conversion.recipe)
    if conversion.accelerate_file is not None:
        path = accelerate_path(Path(arguments.output or _name_source(source)))
        conversion.recipe["accelerate_config"] = path.name
        if not arguments.output:
            conversion.to_do.append(
                f"accelerate_config: {path.name} is written beside the recipe with --output"
            )
    text = as_text(source, conversion)
    wrong = [problem for problem in problems if not problem.endswith(MISSING_FILE)]
    if wrong:
        raise UserError.of(
            f"{source}: not converted; the recipe would be wrong: {problem}" for problem in wrong
        )
    if arguments.output:
        output = Path(arguments.output)
        if conversion.accelerate_file is not None:
            path = accelerate_path(output)
            _write_file(path, conversion.accelerate_file, arguments.overwrite)
        _write_file(output, text, arguments.overwrite)
    else:
        print(text, end="")
    to_do = [f"to do: {problem}" for problem in [*problems, *conversion.to_do]]
    # on a terminal they have just been printed, as comments at the recipe's end
    notes_are_seen = not arguments.output and sys.stdout.isatty()
    if notes_are_seen:
        notes = []
    else:
        notes = [*conversion.differences, *conversion.remarks]
    for line in notes + to_do:
        print(line, file=sys.stderr)
    return EXIT_TO_DO if conversion.to_do else 0


def _name_source(source: Path) -> str:
    """Returns the name of the file, or says that the source is a command line."""
    return source.name if source.is_file() else "a command line"


def accelerate_path(recipe: Path) -> Path:
    """Returns the path of the Accelerate file beside a recipe.

    >>> accelerate_path(Path("runs/ours.yaml")).as_posix()
    'runs/ours.accelerate.yaml'
    """
    return recipe.with_suffix(".accelerate.yaml")


def refuse_own(source: Path) -> None:
    """Raises `UserError` if `source` is a recipe of ours already."""
    # None for a file with faults: they are reported when it is read as another tool's
    settings = find_yaml(source, is_foreign=True)
    if settings and is_ours(settings, source):
        raise UserError(
            f"{source}: a recipe of this toolkit already: there is nothing to convert, train with "
            "it as it is"
        )


def _write_file(path: Path, text: str, overwrite: bool) -> None:
    """Writes a file; raises `UserError` if that fails, or if it exists and may not be replaced."""
    if path.is_file() and not overwrite:
        raise UserError(f"{path}: exists; name another file, or replace it with --overwrite")
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None


def is_ours(settings: ToolFile, source: Path) -> bool:
    """Whether a file with these settings is a recipe of ours.

    All its keys must be ours. Other tools share some of them, so a data set must also have a key
    that only ours have, or the whole file must be a recipe without problems.
    """
    if "datasets" not in settings or not settings.keys() <= recipe_keys().keys():
        return False
    entry_keys: set[str] = set()
    for key in NESTED.keys() & settings.keys():
        entries = settings[key] if isinstance(settings[key], list) else []
        entry_keys.update(*(entry for entry in entries if isinstance(entry, dict)))
    our_entry_keys = keys_of(DatasetSource).keys()
    if not entry_keys <= our_entry_keys:
        return False
    if entry_keys & (our_entry_keys - {"path", "name", "split"}):
        return True
    return not _list_problems(str(source))


def as_text(source: Path, conversion: Conversion) -> str:
    """Returns the text of the recipe file; what differs is in comments at its end."""
    text = f"# From {_name_source(source)} ({conversion.tool}) by finetune convert.\n"
    text += write_yaml(conversion.recipe)
    sections = {
        "To do": conversion.to_do,
        "Different here": conversion.differences,
        "Worth a look": conversion.remarks,
    }
    for title, lines in sections.items():
        if lines:
            text += f"\n# {title}:\n" + "".join(
                f"#   {' '.join(line.splitlines())}\n" for line in lines
            )
    if conversion.ignored:
        text += f"\n# Without effect here: {', '.join(dict.fromkeys(conversion.ignored))}\n"
    return text


def read_back(recipe: Mapping[str, Any]) -> list[str]:
    """Lists the problems that our reader finds in a recipe, a line for each.

    One may be a local path that is missing here, but exists on the machine that trains.
    """
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items()]
    return [line.replace(COMMAND_LINE, "the recipe") for line in _list_problems(None, overrides)]


def _list_problems(recipe: str | None, overrides: Sequence[str] = ()) -> list[str]:
    """Lists the lines of the reader's error on a recipe's path and overrides; empty without one."""
    try:
        read_recipe(recipe, overrides)
    except UserError as error:
        return str(error).splitlines()
    return []


MASTER_WEIGHTS = (
    "of the weights as they are loaded: ZeRO and FSDP under bf16 train a copy in float32 there, as "
    "is the default here"
)
OPTIMIZERS_COPY = (
    "of the weights as they are loaded: the optimizer trains a copy in more bits there; they are "
    "in float32 here, the default"
)
# These layers pass the filters of torchtune and Automodel. Here Accelerate's
# filter_first_and_last_linear_layers excludes them.
ALL_IN_FP8 = "the {} multiplied in FP8 too there, in 16 bits here"
# create_model_from_path and ModelConfig of TRL; autocast leaves embeddings and norms in their dtype
BASE_IN_FP32 = (
    "the base is in float32 there unless this key says otherwise: under neither FSDP nor DeepSpeed "
    "its embedding, its norms and what layers hand on are in float32; here all is in the run's 16 "
    "bits, to which files in another dtype, as Llama 2's under bf16, are rounded"
)
BASE_IN_FP32_BEFORE_5 = f"under transformers 4 {BASE_IN_FP32}"
# from_pretrained of transformers 5 reads None as "auto": TRL passes on a null of the file, and its
# examples/scripts/orpo.py and cpo.py name no dtype
LOADED_AS_FILED = (
    "dtype: under transformers 5 the weights are loaded in the dtype of the model's files there, "
    "as a rule bfloat16, and trained in it where neither ZeRO nor FSDP under bf16 makes a copy in "
    "float32; in float32 here"
)
TRAINED_AS_FILED = (
    "weights that neither ZeRO nor FSDP under bf16 copies are trained in the dtype of the model's "
    "files there, as a rule bfloat16; in float32 here"
)
# the reduce_dtype of Accelerate's FSDP, and DeepSpeed's communication_data_type
REDUCED_IN_16_BITS = (
    "gradients: added over the ranks in 16 bits there under FSDP and DeepSpeed, under DeepSpeed "
    "over a step's micro-batches too; in float32 here"
)
# The same for weights in 16 bits: FSDP2 keeps their gradients in 16 bits between micro-batches here
# too.
REDUCED_ALONE = "gradients: added over the ranks in 16 bits there, in float32 here"
MAYBE_REDUCED = (
    "accelerate launch: its file is not read here; where it shards by FSDP or DeepSpeed, gradients "
    "are added over the ranks in 16 bits there, in float32 here"
)
DEEPSPEED_UNREAD = (
    "not read here, and taken for stage 2 without an optimizer, a schedule or a bound of gradients "
    "of its own: compare them"
)
# pattern of an AdamW's name in lower case -> the remark on where its state is, or in how many bits
OPTIMIZER_NOTES = {
    "paged.*8bit": "its state is not paged to the host here",
    "^(?!.*8bit).*paged": (
        "its state is not paged to the host here, and has the dtype of what is trained; there "
        "float32"
    ),
    BITSANDBYTES_8_BITS: (
        "8-bit moments by bitsandbytes there and by torchao here: blocks of 256 in both, rounded "
        "differently"
    ),
    # _configure_custom_optimizer of its core/builders/base.py, in 0.19 and 0.21
    "^ao_adamw_[48]bit": "Axolotl names this optimizer and refuses it; torchao's in 8 bits here",
}
# pattern of a name that is converted to AdamW -> how its update or its state differs from AdamW's
OTHER_ADAMWS = {
    "adopt|apollo|galore|grok|schedule_?free|stable": "another update than AdamW's there",
    "fp8": "moments in 8 bits there, in float32 here",
    "flash": "state in fewer bits there, in float32 here",
    "optimi": "weights in 16 bits are updated with a term that keeps what rounding loses there",
}
# Kinds of keys that are converted last, since they overrule other keys: a schedule without warm-up,
# all layers as targets, a feature or an optimizer that is switched on.
DECISIVE = ("schedule", "all-linear", "flag", "optimizer-flag")
NOTHING: tuple[Any, ...] = (False, [], {}, "no", "none", 0)  # values that ask for nothing
# keys whose value of 1 asks for nothing; objectives.py reports cpo_alpha
OFF_AT_1 = (
    *("cosine_constant_lr_ratio", "embedding_lr_scale", "loraplus_lr_ratio", "lorap_lr_ratio"),
    *("ld_alpha", "dpo_ld_alpha", "cpo_alpha", "min_sample_len", "dataset_shard_num"),
    *("top_p", "repetition_penalty", "top_entropy_quantile", "num_generations_eval"),
)
# keys whose 0 has an effect
ON_AT_0 = ("ld_alpha", "dpo_ld_alpha")
# kind of conversion (`carry`) -> the missing capability of a value that has no equivalent here
MISSING_CAPABILITIES: Mapping[str, str] = {
    "schedule": "schedule {}",
    "optimizer": "another optimizer",
    "module-patterns": "training rows of a tensor",
    "bits": "{}-bit base",
    "quantizer": "another quantization",
}


def convert_file(source: Path) -> Conversion:
    """Converts the file or command line `source` to a recipe.

    Raises:
        Refusal: The file's method or model is not supported.
        UserError: The file cannot be read, or has a value that its own tool would not read either.
    """
    try:
        return _convert(load_settings(source))
    except WrongValue as wrong:
        raise UserError(f"{source}: {wrong}") from None


def _convert(file: LoadedFile) -> Conversion:
    """Converts a file, in four stages. Each reads what those before it left in `conversion`."""
    # 1. Each key by itself.
    tool, settings, text, is_v1, source = file
    refuse_other_methods(tool, settings, source)
    _, image_family = find_images(tool, settings)
    conversion = Conversion(tool, image_family=image_family, is_factory_v1=is_v1)
    report_adam_on_cpu(tool, settings, conversion)
    settings, unread = read_as_tool(tool, settings)
    conversion.ignored += unread
    method = find_method(tool, settings, source)
    known = {pair.key: pair for pair in list_counterparts(tool)}
    if METHODS[method].samples:
        known |= {pair.key: pair for pair in list_counterparts(GRPO)}
    decisive = {key for key, pair in known.items() if pair.carry in DECISIVE}
    for key, value in sorted(_walk(settings, known), key=lambda pair: pair[0] in decisive):
        _convert_key(key, value, known, conversion)
    _report_trackers(settings, known, conversion)
    # 2. What several keys determine together, what the file leaves to its tool's defaults, and the
    # layout. From here to `make_runnable` the order matters: most calls change the recipe.
    adapt_model(settings, conversion)
    adapt_tool(settings, text, conversion)
    adapt_rounding(settings, conversion)
    adapt_trained_layers(settings, conversion)
    add_tokenizers_turns(settings, conversion)
    _report_quantized_experts(settings, conversion)
    report_shared_experts(settings, conversion)
    adapt_method(method, settings, source, conversion)
    add_sources(tool, settings, source, conversion)
    report_scored_ends(settings, conversion)
    report_saved_template(settings, conversion)
    end_last_answers(settings, conversion)
    add_defaults(settings, conversion)
    _adapt_lowest_rate(settings, known, conversion)
    _add_layout(settings, text, conversion)
    remove_contradictions(conversion)
    # 3. What a run would refuse.
    make_runnable(conversion)
    # 4. The recipe stands, but for a router's coefficient without effect (`report_values`). What
    # still differs is read from it; the lines are printed in this order.
    report_expert_names(settings, conversion)
    report_dtypes(settings, conversion)
    report_epochs(settings, conversion)
    report_losses(settings, conversion)
    report_mlp_kernel(settings, conversion)
    report_magnitudes(conversion)
    report_values(settings, text, conversion)
    report_numbers(settings, conversion)
    report_evaluation(settings, conversion)
    report_images(settings, conversion)
    _join_remarks(conversion)
    _drop_reported_keys(conversion)
    # in the order of the schema
    conversion.recipe = {
        key: conversion.recipe[key] for key in recipe_keys() if key in conversion.recipe
    }
    return conversion


def _join_remarks(conversion: Conversion) -> None:
    """Joins a remark on Automodel's validation_dataset with the same one on its dataset."""
    for remark in list(conversion.remarks):
        same = f"validation_{remark}"
        if remark.startswith("dataset: ") and same in conversion.remarks:
            conversion.remarks.remove(same)
            index = conversion.remarks.index(remark)
            conversion.remarks[index] = f"dataset, validation_{remark}"


def _drop_reported_keys(conversion: Conversion) -> None:
    """Drops from the keys without effect those that a difference or a remark names."""
    lines = "\n".join([*conversion.differences, *conversion.remarks])
    reported = set(re.findall(r"(?:^|, )([\w.]+): ", lines, re.MULTILINE))
    conversion.ignored = [key for key in conversion.ignored if key not in reported]


def _report_trackers(
    settings: ToolFile, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    """Remarks on the trackers that a file asks for and the recipe leaves out: a run has one."""
    trackers: dict[str, None] = {}  # a set in the order of the file
    for key, value in _walk(settings, known):
        if key in known and known[key].carry == "tracker":
            trackers |= dict.fromkeys(read_trackers(key, value))
    tracker_here = conversion.recipe.get("report_to")
    left_out = [name for name in trackers if name != tracker_here]
    if left_out:
        reported = f"reports to {tracker_here} alone" if tracker_here else "knows none of these"
        names = ", ".join(left_out)
        conversion.remarks.append(
            f"report_to: {names}   (a run {reported}; metrics.jsonl and the report have them all)"
        )


def _adapt_lowest_rate(
    settings: ToolFile, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    """Sets a schedule's lowest rate as a share of the learning rate, maybe the tool's default."""
    recipe = conversion.recipe
    peak = convert_number(recipe.get("learning_rate", recipe_keys()["learning_rate"].default))
    for key, value in _walk(settings, known):
        is_lowest = key in known and known[key].carry == "min-rate" and value is not None
        if is_lowest and "min_lr_ratio" not in recipe:
            rate = read_number(key, value, "1e-6")
            if peak and not isinstance(peak, str):  # the recipe's reader refuses a text
                recipe["min_lr_ratio"] = round(rate / peak, 9)


def _report_quantized_experts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that the base's experts are quantized here, if the tool leaves them in 16 bits."""
    name = str(conversion.recipe.get("model_name_or_path"))
    load_key = conversion.load_key
    if BITSANDBYTES_MODEL.search(name.lower()):
        return  # its experts are in 4 bits already: see EXPERTS_DEQUANTIZED
    family = guess_family(name) or ""
    is_fused = is_mixture(name) and has_fused_experts(family)
    if conversion.tool == "Axolotl" and family in FAMILIES_ROUTED_OTHERWISE:
        return  # Axolotl's code for these has linear layers for each expert
    if load_key and is_fused and not settings.get("quantize_moe_experts"):
        note = "a mixture's experts are quantized here too; there only linear layers are"
        conversion.add_difference(load_key, True, note)


def _walk(
    settings: ToolFile, known: Mapping[str, Counterpart], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the settings as (dotted key, value).

    A mapping is entered if the table `known` has keys inside it; else it is a value. A section that
    is converted by code is also yielded whole.
    """
    for key, value in settings.items():
        name = f"{prefix}{key}"
        section = _read_mapping(value)
        if isinstance(section, dict) and any(other.startswith(f"{name}.") for other in known):
            if name in known and known[name].carry == "by-code":
                yield name, section
            yield from _walk(section, known, f"{name}.")
        else:
            yield name, value


def _read_mapping(value: Any) -> Any:
    """Returns the mapping in a text of JSON, as Trainer's arguments may be; else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _convert_key(
    key: str, value: Any, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    """Adds one setting of the other tool to the recipe, or to the differences or ignored keys.

    >>> conversion = Conversion("Axolotl")
    >>> known = {pair.key: pair for pair in list_counterparts("Axolotl")}
    >>> settings = {"sequence_len": 4096, "relora_steps": 5, "cut_cross_entropy": True}
    >>> for key, value in settings.items():
    ...     _convert_key(key, value, known, conversion)
    >>> conversion.recipe, conversion.differences, conversion.ignored
    ({'max_length': 4096}, ['relora_steps: 5   (ReLoRA: not supported)'], ['cut_cross_entropy'])
    """
    pair = known.get(key)
    if pair is None and key in recipe_keys() and key not in NESTED:
        pair = Counterpart(key, key)
    if pair is None:
        _report_unknown(key, value, known, conversion)
    elif not pair.has_effect or as_json(value) in pair.usual:
        conversion.ignored.append(key)
    elif value is None or value == "":
        # without a value a key asks for the default; but null turns clipping off, except in
        # Automodel, where it means 1.0
        if pair.carry == "clip" and conversion.tool != "Automodel":
            conversion.recipe[str(pair.ours)] = None
    elif pair.ours is None:
        _report_missing(key, value, pair, conversion)
    elif pair.carry == "template":
        set_template(key, value, pair, conversion)
    else:
        _set_key(key, value, pair, conversion)


def _report_unknown(
    key: str, value: Any, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    """Reports a key that is in no table, unless it asks for nothing or its section is known."""
    section = known.get(key.split(".")[0]) if "." in key else None
    if section is not None and section.carry == "by-code":
        return  # the code that reads the section reports its keys
    if section is not None and not section.has_effect:
        conversion.ignored.append(key)
    elif value is not None:
        close = difflib.get_close_matches(key, [*known, *recipe_keys()], n=1, cutoff=0.75)
        if not close and value in NOTHING:
            conversion.ignored.append(key)  # whatever it is, it is off
            return
        meant = f"; did you mean {close[0]}?" if close else ""
        conversion.add_difference(key, value, f"not known here{meant}")


def _report_missing(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Reports a key without counterpart here, unless its value asks for nothing.

    If the table lists usual values, even a 0 or false that is not among them is reported.
    """
    if value in NOTHING and not pair.usual and key not in ON_AT_0:
        return
    if value == 1 and not isinstance(value, bool) and key in OFF_AT_1:
        conversion.ignored.append(key)
    else:
        conversion.add_difference(key, value, pair.note, pair.missing_capability)


def _set_key(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets our key of `pair`, or reports a value that has no equivalent (`lr_scheduler: rex`)."""
    if pair.carry == "bits":
        value = convert_number(value)  # it may be in quotes
    ours = convert_value(pair, value, conversion.recipe)
    if ours is LEAVE:
        return
    if ours is None:
        capability = MISSING_CAPABILITIES.get(pair.carry, "").format(value)
        conversion.add_difference(key, value, pair.note or "no such value here", capability)
        return
    is_switch = bool in get_args(recipe_keys()[str(pair.ours)].annotation)
    if is_switch and ours in (0, 1):
        ours = bool(ours)
    conversion.recipe |= _make_entries(value, ours, pair)
    _apply_side_effects(key, value, pair, conversion)
    if pair.inexact:
        conversion.add_remark(key, value, pair.note)


def _make_entries(value: Any, ours: Any, pair: Counterpart) -> dict[str, Any]:
    """Returns the recipe's entries for their `value`, which is `ours` here.

    The key is that of `pair`, except for values that have a key of their own here.
    """
    if pair.carry == "betas":
        beta1, beta2 = ours
        return {"adam_beta1": convert_number(beta1), "adam_beta2": convert_number(beta2)}
    if pair.ours == "save_strategy" and ours == "best":
        return {"keep_best_checkpoint": True}
    if pair.carry == "bits" and value == 8:
        return {"load_in_8bit": ours}
    if pair.carry == "warmup" and isinstance(ours, float) and 0 < ours < 1:
        return {"warmup_ratio": ours}
    return {str(pair.ours): None if ours == "null" else ours}


def _apply_side_effects(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets and reports what a value asks for besides our key of `pair`."""
    recipe = conversion.recipe
    match pair.carry:
        case "lora-only":
            recipe["use_peft"] = True
        case "adapter" if value == "qlora":
            recipe |= QLORA
        case "bits" if value == 8:
            conversion.add_remark(key, value, NOTES["INT8"])
        case "schedule" if str(value) == "constant" and conversion.tool != "Automodel":
            # transformers' "constant" has no warm-up
            recipe["warmup_steps"] = 0
            recipe.pop("warmup_ratio", None)
        case "optimizer":
            _note_optimizer(key, value, conversion)


def _note_optimizer(key: str, value: Any, conversion: Conversion) -> None:
    """Reports how an optimizer that is converted to AdamW differs from it."""
    name = str(value).lower()
    for note in find_matches(OPTIMIZER_NOTES, name):
        conversion.add_remark(key, value, note)
    if "4bit" in name and not name.startswith("ao_"):
        conversion.add_difference(key, value, "moments in 4 bits there, in 8 bits here")
    class_name = name.split(".")[-1]  # without the modules of a component, such as torchao.optim
    for note in find_matches(OTHER_ADAMWS, class_name):
        conversion.add_difference(key, value, note)


def _add_layout(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Names or makes the Accelerate file for the file's layout, and adapts keys that depend on it.

    `text` is the file with its comments.
    """
    recipe = conversion.recipe
    layout = read_layout(conversion.tool, settings, text)
    is_sharded = layout.sharding != "none" and not layout.for_groups
    if recipe.get("optim_in_backward") and layout.sharding == "none":
        # one process trains the same under FSDP, and DDP would keep the gradients
        layout = replace(layout, sharding="full")
    if layout.file is not None:
        recipe["accelerate_config"] = layout.file
    conversion.accelerate_file = write_accelerate(layout)
    deepspeed = settings.get("deepspeed")
    if isinstance(deepspeed, str) and find_zero_stage(deepspeed) is None:
        conversion.add_remark("deepspeed", deepspeed, DEEPSPEED_UNREAD)
    conversion.remarks += layout.remarks()
    reduces_in_fp32 = (
        conversion.tool == "Automodel"
        or settings.get("lora_fp32_gradients")
        # reduce_dtype of LLaMA-Factory's v1/plugins/trainer_plugins/distributed/fsdp2.py
        or (conversion.is_factory_v1 and not settings.get("deepspeed"))
    )
    _set_dtype(layout, conversion)
    keep_unfused_update(settings, conversion)
    if conversion.tool == "TRL":
        _report_loaded_dtype(settings, layout, conversion)
    is_reduced = is_sharded or layout.by_deepspeed
    if is_reduced and layout.precision != "no" and not reduces_in_fp32:
        conversion.remarks.append(_describe_reduction(conversion))
    elif conversion.tool == "ms-swift" and LAUNCH_FILE.search(text):
        conversion.remarks.append(MAYBE_REDUCED)
    if layout.fp8 and conversion.tool in OF_COMPONENTS:
        _report_fp8_layers(settings, layout, conversion)
    name_saved_dtype(settings, layout, conversion)
    _fit_memory_savings(layout, conversion)


def _report_loaded_dtype(settings: ToolFile, layout: AskedLayout, conversion: Conversion) -> None:
    """Reports where TRL trains or computes in the dtype in which it loads the weights."""
    asked_dtype = settings.get("dtype", settings.get("torch_dtype"))
    is_sharded = layout.sharding != "none"
    are_copied = layout.by_deepspeed or (is_sharded and layout.precision != "no")
    says_null = asked_dtype is None and not {"dtype", "torch_dtype"}.isdisjoint(settings)
    if conversion.recipe.get("use_peft"):
        uses_autocast = layout.precision != "no" and not layout.by_deepspeed
        if asked_dtype in (None, "float32") and uses_autocast:
            note = BASE_IN_FP32_BEFORE_5 if says_null else BASE_IN_FP32
            conversion.add_remark("dtype", asked_dtype, note)
    elif asked_dtype == "auto" and are_copied:
        conversion.add_remark("dtype", "auto", MASTER_WEIGHTS)
    elif asked_dtype == "auto":
        conversion.add_difference("dtype", "auto", TRAINED_AS_FILED)
    elif says_null or (
        asked_dtype is None and conversion.recipe.get("method") in ("orpo", "simpo")
    ):
        conversion.remarks.append(LOADED_AS_FILED)


def _report_fp8_layers(settings: ToolFile, layout: AskedLayout, conversion: Conversion) -> None:
    """Reports the layers that are multiplied in FP8 there and in 16 bits here."""
    filters = read_value(settings, "fp8.filter_fqns") or []
    has_head = conversion.tool == "Automodel" and "lm_head" not in filters
    if has_head:
        layers = "first linear layer and the output head are"
    else:
        layers = "first linear layer is"
    conversion.add_difference("fp8", layout.fp8, ALL_IN_FP8.format(layers))


def _fit_memory_savings(layout: AskedLayout, conversion: Conversion) -> None:
    """Drops ways to save memory that have no use in the layout, and reports an additional one."""
    recipe = conversion.recipe
    if recipe.get("activation_offload") and (layout.file is None or not layout.checkpointing):
        del recipe["activation_offload"]
        conversion.remarks.append(
            "activation offloading is dropped: without activation checkpointing there is none here"
        )
    if recipe.get("optim_in_backward") and layout.sharding == "offload":
        del recipe["optim_in_backward"]
        conversion.remarks.append(
            "optimizer_in_bwd is dropped: under CPU offload gradients are in host memory already"
        )
    is_fsdp_file = layout.file not in (None, "ddp", "ddp_checkpointing")
    if is_fsdp_file and not layout.checkpointing:
        conversion.remarks.append(
            "activation checkpointing is on in the Accelerate file: less memory, the same loss"
        )


def _describe_reduction(conversion: Conversion) -> str:
    """Returns the remark on sums of gradients that are in 16 bits there, and in float32 here."""
    recipe = conversion.recipe
    if recipe.get("dtype") == "bfloat16" and not recipe.get("use_peft"):
        return REDUCED_ALONE
    return SUMMED_IN_16_BITS if conversion.tool == "torchtune" else REDUCED_IN_16_BITS


def _set_dtype(layout: AskedLayout, conversion: Conversion) -> None:
    """Sets the dtype in which the weights are loaded and trained, or reports what differs in it."""
    recipe = conversion.recipe
    trains_base = not recipe.get("use_peft")
    if layout.pure_bf16 and trains_base:
        recipe.setdefault("dtype", "bfloat16")
    elif layout.pure_bf16 and conversion.tool == "torchtune":
        conversion.remarks.append(
            "dtype: bf16   (of adapters, their gradients and moments too there; in fp32 here)"
        )
    elif layout.keeps_fp32 and trains_base:
        # float32, in which the weights are trained there, is the default here
        loaded_dtype = recipe.pop("dtype", None)
        if loaded_dtype == "bfloat16":
            note = OPTIMIZERS_COPY if conversion.tool == "Automodel" else MASTER_WEIGHTS
            conversion.remarks.append(f"dtype: bfloat16   ({note})")
