"""A recipe of ours with the meaning of another tool's file: its values, its defaults, and what differs."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from finetune.config.facts import has_fused_experts
from finetune.config.keys import keys_of
from finetune.config.methods import METHODS
from finetune.config.quantization import LOAD_KEYS, QLORA, read_recipe_quantization
from finetune.config.reader import read_recipe
from finetune.config.schedules import SCHEDULES
from finetune.config.schema import NESTED, DatasetSource, Lora, recipe_keys
from finetune.config.yaml_file import COMMAND_LINE, find_yaml
from finetune.convert.counterparts import GRPO, NOTES, Counterpart, Tool, list_counterparts
from finetune.convert.datasets import add_sources
from finetune.convert.defaults import DEFAULTS, FOUR_BIT_DEFAULTS, LORA_DEFAULTS, UNLIMITED, UNLIMITED_NOTE
from finetune.convert.foreign_values import WrongValue, convert_number, shorten
from finetune.convert.model_names import (
    BITSANDBYTES_MODEL,
    adapt_model,
    add_tokenizers_turns,
    find_images,
    guess_family,
    is_mixture,
    report_classes,
    set_template,
)
from finetune.convert.objectives import adapt_preferences, adapt_rounding, find_method
from finetune.convert.recognize import load_settings, refuse_other_methods
from finetune.convert.rules import LEAVE, Conversion, adapt_tool, convert_value, read_section
from finetune.convert.runnable import make_runnable, read_layout, write_accelerate
from finetune.errors import UserError
from finetune.files.durable import replace_file

EXIT_TO_DO = 1
MISSING_FILE = (
    "no such file or folder, here or in the recipe's folder",
    "no such file, here or in the recipe's folder",
)


def convert_command(arguments: argparse.Namespace) -> int:
    """Writes or prints the recipe; what differs is listed in it and on stderr. Raises `UserError` where none is made.

    Returns 0, or 1 where something is left to do before the recipe can train.
    """
    source = Path(arguments.source)
    refuse_own(source)
    conversion = convert_file(source)
    problems = read_back(conversion.recipe)
    if conversion.accelerate_file is not None:
        path = accelerate_path(Path(arguments.output or source.name))
        conversion.recipe["accelerate_config"] = path.name
        if not arguments.output:
            conversion.to_do.append(f"accelerate_config: {path.name} is written beside the recipe with --output")
    text = as_text(source, conversion)
    wrong = [problem for problem in problems if not problem.endswith(MISSING_FILE)]
    if wrong:
        raise UserError.of(f"{source}: not converted; the recipe would be wrong: {problem}" for problem in wrong)
    if arguments.output:
        output = Path(arguments.output)
        if conversion.accelerate_file is not None:
            _write(accelerate_path(output), conversion.accelerate_file, arguments.overwrite)
        _write(output, text, arguments.overwrite)
    else:
        print(text, end="")
    is_seen = not arguments.output and sys.stdout.isatty()  # as comments at the recipe's end
    notes = [] if is_seen else [*conversion.differences, *conversion.remarks]
    for line in [*notes, *(f"to do: {problem}" for problem in [*problems, *conversion.to_do])]:
        print(line, file=sys.stderr)
    return EXIT_TO_DO if conversion.to_do else 0


def accelerate_path(recipe: Path) -> Path:
    """The Accelerate file beside a recipe.

    >>> accelerate_path(Path("runs/ours.yaml")).as_posix()
    'runs/ours.accelerate.yaml'
    """
    return recipe.with_suffix(".accelerate.yaml")


def refuse_own(source: Path) -> None:
    """Raises `UserError` where `source` is a recipe of ours already."""
    settings = find_yaml(source, is_foreign=True)  # what is wrong with it is said where it is read as another tool's
    if settings and is_ours(settings, source):
        raise UserError(
            f"{source}: a recipe of this toolkit already: there is nothing to convert, train with it as it is"
        )


def _write(path: Path, text: str, overwrite: bool) -> None:
    if path.is_file() and not overwrite:
        raise UserError(f"{path}: exists; name another file, or replace it with --overwrite")
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file") from None


def is_ours(settings: Mapping[str, Any], source: Path) -> bool:
    """Whether all keys are ours, and one of them is ours alone or the whole file reads as a recipe."""
    mixtures = [settings.get(key) for key in NESTED if key in settings]
    entries = [entry for mixture in mixtures if isinstance(mixture, list) for entry in mixture]
    named = {key for entry in entries if isinstance(entry, dict) for key in entry}
    own = keys_of(DatasetSource).keys()
    if "datasets" not in settings or not (settings.keys() <= recipe_keys().keys() and named <= own):
        return False
    return bool(named & (own - {"path", "name", "split"})) or not _problems(str(source))


def as_text(source: Path, conversion: Conversion) -> str:
    """The recipe file, with what differs as comments at its end."""
    text = f"# From {source.name} ({conversion.tool}) by finetune convert.\n"
    text += yaml.safe_dump(conversion.recipe, sort_keys=False, allow_unicode=True)
    for title, lines in (
        ("To do", conversion.to_do),
        ("Different here", conversion.differences),
        ("Worth a look", conversion.remarks),
    ):
        if lines:
            text += f"\n# {title}:\n" + "".join(f"#   {' '.join(line.splitlines())}\n" for line in lines)
    if conversion.ignored:
        text += f"\n# Without effect here: {', '.join(dict.fromkeys(conversion.ignored))}\n"
    return text


def read_back(recipe: Mapping[str, Any]) -> list[str]:
    """What our reader says of a converted recipe. A local path that is missing here may exist where it is trained."""
    values = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items()]
    return [line.replace(COMMAND_LINE, "the recipe") for line in _problems(None, values)]


def _problems(recipe: str | None, overrides: Sequence[str] = ()) -> list[str]:
    try:
        read_recipe(recipe, overrides)
    except UserError as error:
        return str(error).splitlines()
    return []


MASTER_WEIGHTS = (
    "of the weights as they are loaded: ZeRO and FSDP under bf16 train a copy in float32 there, as is the default here"
)
# What is worth knowing of an AdamW that keeps its state elsewhere, or in 8 bits, by a pattern of its name.
OPTIMIZER_NOTES = {
    "paged": "its state is not paged to the host here; the update is the same",
    "^(?!.*torch).*8bit": "8-bit moments by bitsandbytes there and by torchao here: blocks of 256 in both, rounded "
    "differently",
}
RATES = ("learning_rate", "lr")  # other keys become shares of it
# Read last: what decides over other keys, wherever it stands in a file (no warm-up, all layers, what is on).
DECISIVE = ("schedule", "all-linear", "flag", "optimizer-flag")


def convert_file(source: Path) -> Conversion:
    """The recipe made from `source`. Raises `UserError`, a `Refusal` if its method or model is not supported."""
    try:
        return _convert(*load_settings(source), source)
    except WrongValue as wrong:
        raise UserError(f"{source}: {wrong}") from None


def _convert(tool: Tool, settings: dict[str, Any], text: str, source: Path) -> Conversion:
    refuse_other_methods(tool, settings, source)
    conversion, method = Conversion(tool, images=find_images(tool, settings)[1]), find_method(tool, settings, source)
    known = {pair.key: pair for pair in list_counterparts(tool)}
    if METHODS[method].samples:
        known |= {pair.key: pair for pair in list_counterparts(GRPO)}

    def find_turn(item: tuple[str, Any]) -> int:
        pair = known.get(item[0])
        return 0 if item[0].rsplit(".", 1)[-1] in RATES else 2 if pair and pair.carry in DECISIVE else 1

    for key, value in sorted(_walk(settings, known), key=find_turn):
        _convert_key(key, value, known, conversion)
    adapt_model(settings, conversion)
    adapt_tool(settings, text, conversion)
    adapt_rounding(settings, conversion)
    report_classes(settings, conversion)
    add_tokenizers_turns(settings, conversion)
    name = str(conversion.recipe.get("model_name_or_path"))
    asked = next((load_key for load_key in LOAD_KEYS if conversion.recipe.get(load_key)), None)
    is_fused = is_mixture(name) and has_fused_experts(guess_family(name) or "")
    if asked and is_fused and not settings.get("quantize_moe_experts"):
        conversion.add_difference(
            asked, True, "a mixture's experts are quantized here too; there only linear layers are"
        )
    adapt_preferences(method, settings, source, conversion)
    add_sources(tool, settings, source, conversion)
    _add_defaults(settings, conversion)
    _add_layout(settings, text, conversion)
    _remove_contradictions(conversion)
    make_runnable(conversion)
    order = list(recipe_keys())
    conversion.recipe = dict(sorted(conversion.recipe.items(), key=lambda item: order.index(item[0])))
    return conversion


def _walk(settings: Mapping[str, Any], known: Mapping[str, Counterpart], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Their keys with values; a nested mapping is walked where the table names keys inside it."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and any(other.startswith(f"{name}.") for other in known):
            if name in known and known[name].carry == "by-code":
                yield name, value
            yield from _walk(value, known, f"{name}.")
        else:
            yield name, value


def _convert_key(key: str, value: Any, known: Mapping[str, Counterpart], conversion: Conversion) -> None:
    """Adds a setting of the other tool to the recipe, the differences or the ignored keys.

    >>> conversion, known = Conversion("Axolotl"), {pair.key: pair for pair in list_counterparts("Axolotl")}
    >>> for key, value in {"sequence_len": 4096, "relora_steps": 5, "cut_cross_entropy": True}.items():
    ...     _convert_key(key, value, known, conversion)
    >>> conversion.recipe, conversion.differences, conversion.ignored
    ({'max_length': 4096}, ['relora_steps: 5   (ReLoRA: not supported)'], ['cut_cross_entropy'])
    """
    ours, pair = recipe_keys(), known.get(key)
    if pair is None and key in ours and key not in NESTED:
        pair = Counterpart(key, key)
    if pair is None and "." in key:
        section = known.get(key.split(".")[0])
        if section is not None and (section.carry == "by-code" or not section.has_effect):
            conversion.ignored += [] if section.carry == "by-code" else [key]
            return  # an entry's own key is read with the entry
    if pair is None:
        close = difflib.get_close_matches(key, [*known, *ours], n=1, cutoff=0.75)
        if value is not None:
            conversion.add_difference(key, value, f"not known here{f'; did you mean {close[0]}?' if close else ''}")
    elif not pair.has_effect:
        conversion.ignored.append(key)
    elif value is None or value == "" or (pair.ours is None and value in (False, [], {}, "no", "none", 0)):
        if pair.carry == "clip":
            conversion.recipe[str(pair.ours)] = None
    elif pair.ours is None and value == 1 and not isinstance(value, bool):
        conversion.ignored.append(key)  # a size of 1 asks for nothing
    elif pair.ours is None:
        conversion.add_difference(key, value, pair.note, pair.missing_capability)
    elif pair.carry == "template":
        set_template(key, value, pair, conversion)
    else:
        _set(key, value, pair, conversion)


def _set(key: str, value: Any, pair: Counterpart, conversion: Conversion) -> None:
    """Sets our key of `pair`. A value without equivalent is reported instead (`lr_scheduler: rex`)."""
    ours = convert_value(pair, value, conversion.recipe)
    if ours is LEAVE:
        return
    if ours is None:
        capability = {
            "schedule": f"schedule {value}",
            "optimizer": "another optimizer",
            "module-patterns": "training rows of a tensor",
            "bits": f"{value}-bit base",
            "quantizer": "another quantization",
        }.get(pair.carry)
        conversion.add_difference(key, value, pair.note or "no such value here", capability or "")
        return
    name = "load_in_8bit" if pair.carry == "bits" and value == 8 else str(pair.ours)
    if pair.carry == "warmup" and isinstance(ours, float) and 0 < ours < 1:
        name = "warmup_ratio"
    if pair.carry == "betas":
        conversion.recipe |= {"adam_beta1": convert_number(ours[0]), "adam_beta2": convert_number(ours[1])}
        return
    if ours == "best" and name == "save_strategy":
        conversion.recipe["keep_best_checkpoint"] = True
        return
    conversion.recipe[name] = None if ours == "null" else ours
    if pair.carry == "lora-only":
        conversion.recipe["use_peft"] = True
    if pair.carry == "schedule" and str(value) == "constant" and conversion.tool != "Automodel":
        conversion.recipe["warmup_steps"] = 0  # transformers' "constant" has no warm-up
        conversion.recipe.pop("warmup_ratio", None)
    if pair.carry == "optimizer":
        notes = (note for pattern, note in OPTIMIZER_NOTES.items() if re.search(pattern, str(value).lower()))
        conversion.remarks += [f"{key}: {shorten(value)}   ({note})" for note in notes]
        if "4bit" in str(value).lower():
            conversion.add_difference(key, value, "moments in 4 bits there, in 8 bits here")
    if value == "qlora" and pair.carry == "adapter":
        conversion.recipe |= QLORA
    elif pair.carry == "bits" and value == 8:
        conversion.remarks.append(f"{key}: {shorten(value)}   ({NOTES['INT8']})")
    elif pair.inexact:
        conversion.remarks.append(f"{key}: {shorten(value)}   ({pair.note})")


def _add_defaults(settings: Mapping[str, Any], conversion: Conversion) -> None:
    """The tool's defaults where ours differ."""
    tool, recipe, ours = conversion.tool, conversion.recipe, recipe_keys()
    given = dict(DEFAULTS[tool])
    if tool == "LLaMA-Factory" and settings.get("stage") == "pt":
        given["packing"] = True
    is_unlimited = tool in ("torchtune", "Automodel") or (tool == "TRL" and settings.get("max_length", 0) is None)
    if is_unlimited and recipe.get("max_length") is None:
        recipe.pop("max_length", None)
        given |= UNLIMITED
        conversion.remarks.append(UNLIMITED_NOTE)
    has_schedule = "warmup_ratio" in recipe or recipe.get("lr_scheduler_type", "constant") != "constant"
    if tool in ("torchtune", "Automodel") and has_schedule:
        given.pop("warmup_steps" if "warmup_ratio" in recipe else "lr_scheduler_type")
    if METHODS[recipe.get("method", "sft")].rows != "answers":
        given.pop("assistant_only_loss", None)  # only the answers are compared
    if METHODS[recipe.get("method", "sft")].samples:
        given.pop("packing", None)  # what is sampled is packed here, for the same loss
    if recipe.get("warmup_steps"):
        given.pop("warmup_ratio", None)
    if tool == "Axolotl" and not {"warmup_steps", "warmup_ratio"} & recipe.keys():
        conversion.remarks.append("warmup_steps: null   (3% of the steps, but at most 100 there)")
    if tool == "LLaMA-Factory" and recipe.get("use_peft", True):
        rank = recipe.get("lora_r", 8)
        recipe.setdefault("lora_alpha", 2 * rank if isinstance(rank, int) else 16)
    if recipe.get("use_peft", given.get("use_peft")):
        given |= LORA_DEFAULTS[tool]
    if read_recipe_quantization(recipe).bits == 4:
        given |= FOUR_BIT_DEFAULTS[tool]
    if tool == "Axolotl" and any(entry.get("type") != "text" for entry in recipe.get("datasets", ())):
        given["overlength"] = "drop"  # plain text is split, there as here
    _add_saves(settings, conversion, given)
    for key, value in given.items():
        if key not in recipe and ours[key].default != value:
            recipe[key] = value
    # An adapter that is trained further decides the other keys of LoRA, there as here.
    kept = {"use_peft", "adapter_name_or_path"} if recipe.get("adapter_name_or_path") else set(keys_of(Lora))
    for key in keys_of(Lora).keys() - (kept if recipe.get("use_peft") else set()):
        recipe.pop(key, None)


def _add_saves(settings: Mapping[str, Any], conversion: Conversion, given: dict[str, Any]) -> None:
    """When a tool saves, and how many it keeps, where the file does not say: all but Trainer save every epoch."""
    recipe = conversion.recipe
    is_said = {"save_steps", "save_strategy", "keep_best_checkpoint"} & recipe.keys()
    if is_said:
        given.pop("save_steps", None)
    epochs = recipe.get("num_train_epochs", given.get("num_train_epochs", 1))
    once = settings.get("saves_per_epoch") or settings.get("save_last_epoch_only") or recipe.get("streaming")
    once = once or read_section(settings, "step_scheduler").get("save_checkpoint_every_epoch") is False
    if not is_said and "save_steps" not in given and not once and isinstance(epochs, int | float) and epochs > 1:
        recipe["save_strategy"] = "epoch"
    if not {"save_steps", "save_strategy"} & (recipe.keys() | given.keys()) or recipe.get("save_strategy") == "no":
        given.pop("save_total_limit", None)  # one checkpoint, at the end


def _add_layout(settings: Mapping[str, Any], text: str, conversion: Conversion) -> None:
    layout = read_layout(conversion.tool, settings, text)
    if conversion.recipe.get("optim_in_backward") and layout.sharding == "none":
        layout = replace(layout, sharding="full")  # the same in one process, and DDP keeps its gradients
    if layout.file is not None:
        conversion.recipe["accelerate_config"] = layout.file
    conversion.accelerate_file = write_accelerate(layout)
    conversion.remarks += layout.remarks()
    if layout.pure_bf16 and not conversion.recipe.get("use_peft"):
        conversion.recipe.setdefault("dtype", "bfloat16")
    elif layout.pure_bf16 and conversion.tool == "torchtune":
        conversion.remarks.append("dtype: bf16   (of the adapters and their moments too there; both are in fp32 here)")
    elif (
        layout.keeps_fp32
        and not conversion.recipe.get("use_peft")
        and conversion.recipe.pop("dtype", None) == "bfloat16"
    ):
        conversion.remarks.append(f"dtype: bfloat16   ({MASTER_WEIGHTS})")
    if conversion.recipe.get("activation_offload") and (layout.file is None or not layout.checkpointing):
        del conversion.recipe["activation_offload"]
        conversion.remarks.append(
            "activation offloading is dropped: without activation checkpointing there is none here"
        )
    if conversion.recipe.get("optim_in_backward") and layout.sharding == "offload":
        del conversion.recipe["optim_in_backward"]
        conversion.remarks.append("optimizer_in_bwd is dropped: under CPU offload gradients are in host memory already")
    if layout.file not in (None, "ddp", "ddp_checkpointing") and not layout.checkpointing:
        conversion.remarks.append(f"activation checkpointing is on in {layout.file}.yaml: less memory, the same loss")


def _remove_contradictions(conversion: Conversion) -> None:
    """Removes keys that ask for nothing together with the others, and says so."""
    recipe = conversion.recipe
    if recipe.get("streaming") and recipe.pop("eval_split_size", None) is not None:
        conversion.differences.append(
            "eval_split_size is dropped: rows cannot be held out of a stream; name eval_datasets"
        )
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if strategy in recipe and recipe.pop(steps, None) is not None:
            conversion.ignored.append(steps)  # only the strategy steps reads it
        if recipe.get(strategy) == "no":
            del recipe[strategy]  # without steps the default here
    for key in LOAD_KEYS:
        if not recipe.get("use_peft") and recipe.pop(key, False):
            conversion.add_difference(key, True, "only a frozen base can be quantized; every parameter is trained here")
    is_stored = BITSANDBYTES_MODEL.search(str(recipe.get("model_name_or_path")).lower()) is not None
    if is_stored and (asked := [key for key in LOAD_KEYS if recipe.pop(key, False)]):
        conversion.remarks.append(f"{', '.join(asked)}: left to the model, whose files are quantized already")
    if read_recipe_quantization(recipe).bits != 4:
        for key in FOUR_BIT_DEFAULTS[conversion.tool]:
            recipe.pop(key, None)
    held_out = "eval_datasets" in recipe or "eval_split_size" in recipe
    for key in ("eval_steps", "eval_strategy"):
        if not held_out and recipe.pop(key, None) is not None:
            conversion.remarks.append(f"{key} is dropped: no rows are held out")
    for key in ("early_stopping_patience", "keep_best_checkpoint"):
        if not {"eval_steps", "eval_strategy"} & recipe.keys() and recipe.pop(key, None) is not None:
            conversion.differences.append(f"{key} is dropped: it needs eval_steps here")
    if recipe.get("lr_scheduler_type") == "polynomial" and "min_lr_ratio" not in recipe:
        rate = recipe.get("learning_rate") or recipe_keys()["learning_rate"].default
        recipe["min_lr_ratio"] = 1e-7 / rate  # lr_end there
    schedule = SCHEDULES.get(str(recipe.get("lr_scheduler_type")))
    if schedule is not None and not schedule.has_end and recipe.pop("min_lr_ratio", None):
        conversion.ignored.append("min_lr")  # a rate that does not fall has no use for it
    if recipe.get("warmup_steps", 0) is None:
        del recipe["warmup_steps"]
    for key in [key for key, value in recipe.items() if value is None and recipe_keys()[key].default is None]:
        del recipe[key]
