"""What each key of a recipe alone allows, but all of them together do not. Imports no torch."""

from collections.abc import Callable, Container, Iterator, Mapping
from datetime import date
from typing import Any

from finetune.recipe.keys import keys_of
from finetune.recipe.lora_schema import Lora, Quantization, find_lora_problems
from finetune.recipe.memory_keys import find_in_backward_problems
from finetune.recipe.method_schema import find_method_problems
from finetune.recipe.optim_offload import find_offload_problems
from finetune.recipe.optimization_schema import find_schedule_problems
from finetune.recipe.yaml_file import Entry


def find_contradictions(
    values: Mapping[str, Any], unusable: Container[str], entries: Mapping[str, Entry], file: str
) -> Iterator[str]:
    """What is wrong with all `values` together, one sentence each with its place. Silent about keys that are `unusable`, wrong in
    themselves; `entries`: where in `file`, or on the command line, each key stands."""

    def has(key: str) -> bool:
        return key in unusable or values.get(key) not in (None, ())

    def at(key: str) -> str:
        return entries[key].where if key in entries else file

    if has("model_name_or_path") and has("model_config"):
        yield f"{at('model_config')}: model_name_or_path and model_config both name a model; keep one"
    if not (has("model_name_or_path") or has("model_config")):
        yield f"{file}: no model; set model_name_or_path (a hub name or folder) or model_config (an architecture)"
    if has("model_config") and not has("tokenizer_name_or_path"):
        yield f"{at('model_config')}: model_config brings no tokenizer; set tokenizer_name_or_path"
    if "model_type" not in (values.get("model_config") or {"model_type": ""}):
        yield f"{at('model_config')}: model_config: model_type is missing; for example model_type: llama"
    if not has("datasets"):
        yield f"{file}: no data; set datasets, a list with at least `- path: FILE`"
    if has("eval_datasets") and has("eval_split_size"):
        yield f"{at('eval_split_size')}: eval_datasets and eval_split_size both name the held-out rows; keep one"
    for key, problem in [] if "method" in unusable else find_method_problems(values):
        if key not in unusable:
            yield f"{at(key)}: {problem}"
    if not _is_day(values.get("chat_template_date")):
        yield f"{at('chat_template_date')}: chat_template_date: {values['chat_template_date']}: no day; write it as 2026-01-31"
    if values.get("torch_compile") and values.get("activation_checkpointing_keeps", "nothing") != "nothing":
        key = "activation_checkpointing_keeps"
        yield f"{at(key)}: {key}: torch does not select activations inside compiled layers; remove it, or torch_compile"
    if values.get("torch_compile") and values.get("activation_offload"):
        key = "activation_offload"
        yield f"{at(key)}: {key}: torch does not offload activations inside compiled layers; remove it, or torch_compile"
    for key, problem in find_in_backward_problems(values):
        if key not in unusable:
            yield f"{at(key)}: {problem}"
    for problem in find_schedule_problems(values):
        key = "lr_scheduler_kwargs" if has("lr_scheduler_kwargs") else "lr_scheduler_type"
        yield f"{at(key)}: {problem}"
    for key, problem in [] if "optim_offload" in unusable else find_offload_problems(values, has("offload_dir")):
        if key not in unusable:
            yield f"{at(key)}: {problem}"
    if values.get("streaming") and not has("max_steps"):
        yield f"{at('streaming')}: streaming has no known end; set max_steps"
    if values.get("streaming") and has("eval_split_size"):
        yield f"{at('eval_split_size')}: eval_split_size cannot be held out of a stream; set eval_datasets"
    evaluates = "eval_strategy" if values.get("eval_strategy") == "epoch" else "eval_steps"
    for key in ("early_stopping_patience", "keep_best_checkpoint"):
        if values.get(key) and not has(evaluates):
            yield f"{at(key)}: {key} goes by the held-out losses in between; set eval_steps, or eval_strategy: epoch"
    if has(evaluates) and not (has("eval_datasets") or has("eval_split_size")):
        yield f"{at(evaluates)}: {evaluates}, but no held-out rows; set eval_datasets or eval_split_size"
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if values.get(strategy) in ("no", "epoch") and has(steps):
            yield f"{at(steps)}: {steps} has no effect with {strategy}: {values[strategy]}; keep one of the two"
    yield from _find_lora_contradictions(values, "use_peft" in unusable, has, at)
    yield from _find_quantization_contradictions(values, "use_peft" in unusable, at)


def _find_lora_contradictions(
    values: Mapping[str, Any], is_use_peft_unusable: bool, has: Callable[[str], bool], at: Callable[[str], str]
) -> Iterator[str]:
    if not (values.get("use_peft") or is_use_peft_unusable):
        # The recipe.yaml of every run writes their defaults.
        for key in (
            name
            for name, key in keys_of(Lora).items()
            if name != "use_dora" and values.get(name, key.default) != key.default
        ):
            yield f"{at(key)}: {key} has no effect without use_peft: true; set it, or every parameter is trained: then leave {key} out"
    if values.get("use_peft"):
        yield from (f"{at(key)}: {problem}" for key, problem in find_lora_problems(values))
    for key in ("trainable_modules", "frozen_modules"):
        if values.get("use_peft") and has(key):
            yield f"{at(key)}: {key} is for full fine-tuning; LoRA freezes the base but for modules_to_save: name them there"
    if values.get("use_peft") and has("model_config"):
        yield f"{at('use_peft')}: use_peft adapts a trained model, but model_config starts from random weights; set model_name_or_path"
    if values.get("use_dora") and not (values.get("use_peft") or is_use_peft_unusable):
        yield f"{at('use_dora')}: use_dora needs use_peft: true"


def _find_quantization_contradictions(
    values: Mapping[str, Any], is_use_peft_unusable: bool, at: Callable[[str], str]
) -> Iterator[str]:
    loads = [key for key in ("load_in_4bit", "load_in_8bit") if values.get(key)]
    if len(loads) > 1:
        yield f"{at(loads[1])}: load_in_4bit and load_in_8bit both say how the base is kept; keep one"
    if loads and not (values.get("use_peft") or is_use_peft_unusable):
        yield f"{at(loads[0])}: {loads[0]}: a quantized base is frozen, so it cannot be fine-tuned in full; set use_peft: true, or leave {loads[0]} out"
    for name, key in keys_of(Quantization).items():
        if name.startswith("bnb_4bit") and values.get(name, key.default) != key.default and "load_in_4bit" not in loads:
            yield f"{at(name)}: {name} has no effect without load_in_4bit: true; set it, or leave {name} out"


def _is_day(text: str | None) -> bool:
    try:
        return text is None or bool(date.fromisoformat(text))
    except ValueError:
        return False
