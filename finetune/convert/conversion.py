"""A recipe of ours with the meaning of another tool's file: its values, its defaults, and what
differs.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from finetune.config.facts import has_fused_experts
from finetune.config.keys import keys_of
from finetune.config.methods import METHODS
from finetune.config.quantization import LOAD_KEYS, QLORA
from finetune.config.reader import read_recipe
from finetune.config.schema import NESTED, DatasetSource, recipe_keys
from finetune.config.yaml_file import COMMAND_LINE, find_yaml
from finetune.convert.as_read import read_as_tool
from finetune.convert.asked_layout import LAUNCH_FILE, AskedLayout, read_layout, write_accelerate
from finetune.convert.axolotl import FAMILIES_ROUTED_OTHERWISE, report_mlp_kernel
from finetune.convert.base_model import adapt_model
from finetune.convert.by_tool import (
    BITSANDBYTES_8_BITS,
    adapt_tool,
    name_saved_dtype,
    report_dtypes,
    report_epochs,
    report_evaluation,
    report_images,
    report_losses,
    report_magnitudes,
    report_rotation,
)
from finetune.convert.by_value import report_values
from finetune.convert.chat_templates import (
    add_tokenizers_turns,
    report_saved_template,
    report_scored_ends,
    set_template,
)
from finetune.convert.command_line import is_command
from finetune.convert.contradictions import remove_contradictions
from finetune.convert.counterparts import GRPO, NOTES, Counterpart, ToolFile, list_counterparts
from finetune.convert.datasets import add_sources
from finetune.convert.defaults import OF_COMPONENTS, add_defaults
from finetune.convert.foreign_values import WrongValue, convert_number
from finetune.convert.image_models import find_images
from finetune.convert.model_names import BITSANDBYTES_MODEL, guess_family, is_mixture
from finetune.convert.numbers import report_numbers
from finetune.convert.objectives import adapt_method, adapt_rounding, find_method
from finetune.convert.recognize import LoadedFile, load_settings, refuse_other_methods
from finetune.convert.runnable import make_runnable
from finetune.convert.shared import SUMMED_IN_16_BITS
from finetune.convert.trained_layers import (
    report_classes,
    report_expert_names,
    report_shared_experts,
)
from finetune.convert.value_conversion import (
    LEAVE,
    Conversion,
    convert_value,
    read_section,
    read_trackers,
)
from finetune.errors import UserError
from finetune.files.durable import replace_file

EXIT_TO_DO = 1
MISSING_FILE = (
    "no such file or folder, here or in the recipe's folder",
    "no such file, here or in the recipe's folder",
)


def convert_command(arguments: argparse.Namespace) -> int:
    """Writes or prints the recipe; what differs is listed in it and on stderr.

    Raises `UserError` where none is made.

    Returns 0, or 1 where something is left to do before the recipe can train.
    """
    source = Path(arguments.source)
    if not is_command(source):
        refuse_own(source)
    conversion = convert_file(source)
    problems = read_back(conversion.recipe)
    if conversion.accelerate_file is not None:
        path = accelerate_path(Path(arguments.output or _name(source)))
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
        _write_files(Path(arguments.output), text, conversion.accelerate_file, arguments.overwrite)
    else:
        print(text, end="")
    to_do = [f"to do: {problem}" for problem in [*problems, *conversion.to_do]]
    is_seen = not arguments.output and sys.stdout.isatty()  # as comments at the recipe's end
    if is_seen:
        notes = []
    else:
        notes = [*conversion.differences, *conversion.remarks]
    for line in notes + to_do:
        print(line, file=sys.stderr)
    return EXIT_TO_DO if conversion.to_do else 0


def _name(source: Path) -> str:
    return source.name if source.is_file() else "a command line"


def _write_files(output: Path, recipe: str, accelerate_file: str | None, overwrite: bool) -> None:
    if accelerate_file is not None:
        _write(accelerate_path(output), accelerate_file, overwrite)
    _write(output, recipe, overwrite)


def accelerate_path(recipe: Path) -> Path:
    """Returns the path of the Accelerate file beside a recipe.

    >>> accelerate_path(Path("runs/ours.yaml")).as_posix()
    'runs/ours.accelerate.yaml'
    """
    return recipe.with_suffix(".accelerate.yaml")


def refuse_own(source: Path) -> None:
    """Raises `UserError` where `source` is a recipe of ours already."""
    # what is wrong with it is said where it is read as another tool's
    settings = find_yaml(source, is_foreign=True)
    if settings and is_ours(settings, source):
        raise UserError(
            f"{source}: a recipe of this toolkit already: there is nothing to convert, train with "
            "it as it is"
        )


def _write(path: Path, text: str, overwrite: bool) -> None:
    if path.is_file() and not overwrite:
        raise UserError(f"{path}: exists; name another file, or replace it with --overwrite")
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None


def is_ours(settings: ToolFile, source: Path) -> bool:
    """Whether all keys are ours, and one of them is ours alone or the whole file reads as a
    recipe.
    """
    if "datasets" not in settings or not settings.keys() <= recipe_keys().keys():
        return False
    keys_of_entries: set[str] = set()
    for key in NESTED.keys() & settings.keys():
        entries = settings[key] if isinstance(settings[key], list) else []
        keys_of_entries.update(*(entry for entry in entries if isinstance(entry, dict)))
    ours = keys_of(DatasetSource).keys()
    if not keys_of_entries <= ours:
        return False
    return bool(keys_of_entries & (ours - {"path", "name", "split"})) or not _problems(str(source))


def as_text(source: Path, conversion: Conversion) -> str:
    """Returns the recipe file, with what differs as comments at its end."""
    text = f"# From {_name(source)} ({conversion.tool}) by finetune convert.\n"
    text += yaml.safe_dump(conversion.recipe, sort_keys=False, allow_unicode=True)
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
    """Lists what our reader says of a recipe.

    A local path that is missing here may exist where it is trained.
    """
    values = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items()]
    return [line.replace(COMMAND_LINE, "the recipe") for line in _problems(None, values)]


def _problems(recipe: str | None, overrides: Sequence[str] = ()) -> list[str]:
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
# filters of torchtune's and Automodel's; ours is Accelerate's filter_first_and_last_linear_layers
ALL_IN_FP8 = "the {} multiplied in FP8 too there, in 16 bits here"
# the reduce_dtype of Accelerate's FSDP, and DeepSpeed's communication_data_type
REDUCED_IN_16_BITS = (
    "gradients: added over the ranks in 16 bits there under FSDP and DeepSpeed, under DeepSpeed "
    "over a step's micro-batches too; in float32 here"
)
# of weights in 16 bits, whose gradients FSDP2 keeps in them between micro-batches here too
REDUCED_ALONE = "gradients: added over the ranks in 16 bits there, in float32 here"
MAYBE_REDUCED = (
    "accelerate launch: its file is not read here; where it shards by FSDP or DeepSpeed, gradients "
    "are added over the ranks in 16 bits there, in float32 here"
)
# What is worth knowing of an AdamW that keeps its state elsewhere, or in 8 bits, by a pattern of
# its name.
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
# AdamW by name -> what is another's of its update, or of its state
OTHER_ADAMWS = {
    "adopt|apollo|galore|grok|schedule_?free|stable": "another update than AdamW's there",
    "fp8": "moments in 8 bits there, in float32 here",
    "flash": "state in fewer bits there, in float32 here",
    "optimi": "weights in 16 bits are updated with a term that keeps what rounding loses there",
}
RATES = ("learning_rate", "lr")  # other keys become shares of it
# What decides over other keys, wherever it stands in a file: no warm-up, all layers, what is on.
DECISIVE = ("schedule", "all-linear", "flag", "optimizer-flag")
NOTHING: tuple[Any, ...] = (False, [], {}, "no", "none", 0)  # values that ask for nothing
# How a key's value becomes ours -> the capability that is missing where it cannot.
MISSING_CAPABILITIES: Mapping[str, str] = {
    "schedule": "schedule {}",
    "optimizer": "another optimizer",
    "module-patterns": "training rows of a tensor",
    "bits": "{}-bit base",
    "quantizer": "another quantization",
}


def convert_file(source: Path) -> Conversion:
    """Makes a recipe from `source`.

    Raises:
        Refusal: The file's method or model is not supported.
        UserError: The file cannot be read, or holds a value that its own tool would not read.
    """
    try:
        return _convert(load_settings(source))
    except WrongValue as wrong:
        raise UserError(f"{source}: {wrong}") from None


def _convert(file: LoadedFile) -> Conversion:
    tool, settings, text, is_v1, source = file
    refuse_other_methods(tool, settings, source)
    conversion = Conversion(tool, images=find_images(tool, settings)[1], is_factory_v1=is_v1)
    settings, unread = read_as_tool(tool, settings)
    conversion.ignored += unread
    method = find_method(tool, settings, source)
    known = {pair.key: pair for pair in list_counterparts(tool)}
    if METHODS[method].samples:
        known |= {pair.key: pair for pair in list_counterparts(GRPO)}
    for key, value in sorted(_walk(settings, known), key=lambda item: _find_turn(item[0], known)):
        _convert_key(key, value, known, conversion)
    _report_trackers(settings, known, conversion)
    adapt_model(settings, conversion)
    adapt_tool(settings, text, conversion)
    adapt_rounding(settings, conversion)
    report_classes(settings, conversion)
    add_tokenizers_turns(settings, conversion)
    _report_quantized_experts(settings, conversion)
    report_shared_experts(settings, conversion)
    adapt_method(method, settings, source, conversion)
    add_sources(tool, settings, source, conversion)
    report_scored_ends(settings, conversion)
    report_saved_template(settings, conversion)
    add_defaults(settings, conversion)
    _add_layout(settings, text, conversion)
    remove_contradictions(conversion)
    make_runnable(conversion)
    report_expert_names(settings, conversion)
    report_dtypes(settings, conversion)
    report_epochs(settings, conversion)
    report_losses(settings, conversion)
    report_rotation(settings, conversion)
    report_mlp_kernel(settings, conversion)
    report_magnitudes(conversion)
    report_values(settings, text, conversion)
    report_numbers(settings, conversion)
    report_evaluation(settings, conversion)
    report_images(settings, conversion)
    _list_once(conversion)
    conversion.recipe = {
        key: conversion.recipe[key] for key in recipe_keys() if key in conversion.recipe
    }
    return conversion


def _list_once(conversion: Conversion) -> None:
    """Removes the keys that a line is about from those without effect."""
    lines = "\n".join([*conversion.differences, *conversion.remarks])
    about = set(re.findall(r"(?:^|, )([\w.]+): ", lines, re.MULTILINE))
    conversion.ignored = [key for key in conversion.ignored if key not in about]


def _report_trackers(
    settings: ToolFile, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    """Says which trackers that a file asks for are not reported to."""
    asked: dict[str, None] = {}
    for key, value in _walk(settings, known):
        if key in known and known[key].carry == "tracker":
            asked |= dict.fromkeys(read_trackers(key, value))
    kept = conversion.recipe.get("report_to")
    left_out = [name for name in asked if name != kept]
    if left_out:
        reported = f"reports to {kept} alone" if kept else "knows none of these"
        names = ", ".join(left_out)
        conversion.remarks.append(
            f"report_to: {names}   (a run {reported}; metrics.jsonl and the report have them all)"
        )


def _find_turn(key: str, known: Mapping[str, Counterpart]) -> int:
    """Returns when a key is read: rates first (0), what decides over other keys last (2)."""
    if key.rsplit(".", 1)[-1] in RATES:
        return 0
    return 2 if key in known and known[key].carry in DECISIVE else 1


def _report_quantized_experts(settings: ToolFile, conversion: Conversion) -> None:
    name = str(conversion.recipe.get("model_name_or_path"))
    load_key = next((key for key in LOAD_KEYS if conversion.recipe.get(key)), None)
    if BITSANDBYTES_MODEL.search(name.lower()):
        return  # in 4 bits already: see EXPERTS_DEQUANTIZED
    family = guess_family(name) or ""
    is_fused = is_mixture(name) and has_fused_experts(family)
    if conversion.tool == "Axolotl" and family in FAMILIES_ROUTED_OTHERWISE:
        return  # whose code there has a linear layer for each
    if load_key and is_fused and not settings.get("quantize_moe_experts"):
        note = "a mixture's experts are quantized here too; there only linear layers are"
        conversion.add_difference(load_key, True, note)


def _walk(
    settings: ToolFile, known: Mapping[str, Counterpart], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields keys with their values; walks a nested mapping where the table names keys inside
    it.
    """
    for key, written in settings.items():
        name = f"{prefix}{key}"
        value = _read_mapping(written)
        if isinstance(value, dict) and any(other.startswith(f"{name}.") for other in known):
            if name in known and known[name].carry == "by-code":
                yield name, value
            yield from _walk(value, known, f"{name}.")
        else:
            yield name, written


def _read_mapping(value: Any) -> Any:
    """Reads a mapping that is written as JSON, as Trainer's arguments may be."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _convert_key(
    key: str, value: Any, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    """Adds a setting of the other tool to the recipe, the differences or the ignored keys.

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
    elif not pair.has_effect or json.dumps(value, default=str).strip('"') in pair.usual:
        conversion.ignored.append(key)
    elif value is None or value == "":
        if pair.carry == "clip" and conversion.tool != "Automodel":  # whose null is 1.0
            conversion.recipe[str(pair.ours)] = None
    elif pair.ours is None:
        _report_missing(key, value, pair, conversion)
    elif pair.carry == "template":
        set_template(key, value, pair, conversion)
    else:
        _set(key, value, pair, conversion)


def _report_unknown(
    key: str, value: Any, known: Mapping[str, Counterpart], conversion: Conversion
) -> None:
    section = known.get(key.split(".")[0]) if "." in key else None
    if section is not None and section.carry == "by-code":
        return  # an entry's own key is read with the entry
    if section is not None and not section.has_effect:
        conversion.ignored.append(key)
    elif value is not None:
        close = difflib.get_close_matches(key, [*known, *recipe_keys()], n=1, cutoff=0.75)
        if not close and value in NOTHING:
            conversion.ignored.append(key)  # what is not known here, and is not asked for
            return
        meant = f"; did you mean {close[0]}?" if close else ""
        conversion.add_difference(key, value, f"not known here{meant}")


def _report_missing(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    if value in NOTHING and not pair.usual:
        return
    if value == 1 and not isinstance(value, bool) and not pair.usual:
        conversion.ignored.append(key)  # a size of 1 asks for nothing
    else:
        conversion.add_difference(key, value, pair.note, pair.missing_capability)


def _set(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets our key of `pair`; reports a value without equivalent (`lr_scheduler: rex`)."""
    ours = convert_value(pair, value, conversion.recipe)
    if ours is LEAVE:
        return
    if ours is None:
        capability = MISSING_CAPABILITIES.get(pair.carry, "").format(value)
        conversion.add_difference(key, value, pair.note or "no such value here", capability)
        return
    conversion.recipe |= _name_value(value, ours, pair)
    if pair.carry in SIDE_EFFECTS:
        SIDE_EFFECTS[pair.carry](key, value, conversion)
    if pair.inexact:
        conversion.add_remark(key, value, pair.note)


def _name_value(value: Any, ours: Any, pair: Counterpart) -> dict[str, Any]:
    """Returns our keys for a value, of which the value may decide the name."""
    if pair.carry == "betas":
        return {"adam_beta1": convert_number(ours[0]), "adam_beta2": convert_number(ours[1])}
    if pair.ours == "save_strategy" and ours == "best":
        return {"keep_best_checkpoint": True}
    if pair.carry == "bits" and value == 8:
        return {"load_in_8bit": ours}
    if pair.carry == "warmup" and isinstance(ours, float) and 0 < ours < 1:
        return {"warmup_ratio": ours}
    return {str(pair.ours): None if ours == "null" else ours}


def _train_adapters(key: str, value: Any, conversion: Conversion) -> None:
    conversion.recipe["use_peft"] = True


def _quantize_base(key: str, value: Any, conversion: Conversion) -> None:
    if value == "qlora":
        conversion.recipe |= QLORA


def _note_8_bits(key: str, value: Any, conversion: Conversion) -> None:
    if value == 8:
        conversion.add_remark(key, value, NOTES["INT8"])


def _stop_warmup(key: str, value: Any, conversion: Conversion) -> None:
    """Drops the warm-up, which transformers' "constant" does not have."""
    if str(value) == "constant" and conversion.tool != "Automodel":
        conversion.recipe["warmup_steps"] = 0
        conversion.recipe.pop("warmup_ratio", None)


def _note_optimizer(key: str, value: Any, conversion: Conversion) -> None:
    name = str(value).lower()
    for pattern, note in OPTIMIZER_NOTES.items():
        if re.search(pattern, name):
            conversion.add_remark(key, value, note)
    if "4bit" in name and not name.startswith("ao_"):
        conversion.add_difference(key, value, "moments in 4 bits there, in 8 bits here")
    for pattern, note in OTHER_ADAMWS.items():
        if re.search(pattern, name.rpartition(".")[2]):
            conversion.add_difference(key, value, note)


# How a key's value becomes ours -> what it does beside that.
SIDE_EFFECTS: Mapping[str, Callable[[str, Any, Conversion], None]] = {
    "lora-only": _train_adapters,
    "adapter": _quantize_base,
    "bits": _note_8_bits,
    "schedule": _stop_warmup,
    "optimizer": _note_optimizer,
}


def _add_layout(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Names the Accelerate file for the layout of a file, and drops what that layout has no use
    for.
    """
    recipe = conversion.recipe
    layout = read_layout(conversion.tool, settings, text)
    is_sharded = layout.sharding != "none" and not layout.for_groups
    if recipe.get("optim_in_backward") and layout.sharding == "none":
        # the same in one process, and DDP keeps its gradients
        layout = replace(layout, sharding="full")
    if layout.file is not None:
        recipe["accelerate_config"] = layout.file
    conversion.accelerate_file = write_accelerate(layout)
    conversion.remarks += layout.remarks()
    in_fp32 = (
        conversion.tool == "Automodel"
        or settings.get("lora_fp32_gradients")
        # the reduce_dtype of its v1/plugins/trainer_plugins/distributed/fsdp2.py
        or (conversion.is_factory_v1 and not settings.get("deepspeed"))
    )
    _set_dtype(layout, conversion)
    if is_sharded and layout.precision != "no" and not in_fp32:
        conversion.remarks.append(_describe_sums(conversion))
    elif conversion.tool == "ms-swift" and LAUNCH_FILE.search(text):
        conversion.remarks.append(MAYBE_REDUCED)
    if layout.fp8 and conversion.tool in OF_COMPONENTS:
        filters = read_section(settings, "fp8").get("filter_fqns") or []
        has_head = conversion.tool == "Automodel" and "lm_head" not in filters
        layers = (
            "first linear layer and the output head are" if has_head else "first linear layer is"
        )
        conversion.add_difference("fp8", layout.fp8, ALL_IN_FP8.format(layers))
    name_saved_dtype(settings, layout, conversion)
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
    if layout.file not in (None, "ddp", "ddp_checkpointing") and not layout.checkpointing:
        conversion.remarks.append(
            "activation checkpointing is on in the Accelerate file: less memory, the same loss"
        )


def _describe_sums(conversion: Conversion) -> str:
    """Says which sums of gradients are in 16 bits there, and in float32 here."""
    recipe = conversion.recipe
    if recipe.get("dtype") == "bfloat16" and not recipe.get("use_peft"):
        return REDUCED_ALONE
    return SUMMED_IN_16_BITS if conversion.tool == "torchtune" else REDUCED_IN_16_BITS


def _set_dtype(layout: AskedLayout, conversion: Conversion) -> None:
    recipe = conversion.recipe
    if layout.pure_bf16 and not recipe.get("use_peft"):
        recipe.setdefault("dtype", "bfloat16")
    elif layout.pure_bf16 and conversion.tool == "torchtune":
        conversion.remarks.append(
            "dtype: bf16   (of adapters, their gradients and moments too there; in fp32 here)"
        )
    elif (
        layout.keeps_fp32 and not recipe.get("use_peft") and recipe.pop("dtype", None) == "bfloat16"
    ):
        note = OPTIMIZERS_COPY if conversion.tool == "Automodel" else MASTER_WEIGHTS
        conversion.remarks.append(f"dtype: bfloat16   ({note})")
