"""Whose file it is, and whether what it does is done here: other methods, models and purposes are refused by name."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from finetune.config.compatibility import find_problems
from finetune.config.reader import read_recipe
from finetune.config.yaml_file import read_entries
from finetune.convert.counterparts import TOOL_NAMES, Tool
from finetune.convert.hints import find_texts, is_factory_v1, recognize_tool
from finetune.convert.model_names import Found, find_images, find_refused_models, name_model
from finetune.convert.objectives import (
    AXOLOTL_METHODS,
    asks_for_rounding,
    find_distillation,
    find_method,
    find_rounding,
    find_unsupported_losses,
)
from finetune.convert.rules import read_section
from finetune.convert.their_values import shorten
from finetune.errors import UserError

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MOST_REFERENCES = 10  # references to references; a cycle ends here
KNOWN_ACCELERATE = ("compute_environment", "distributed_type")
FROM_SCRATCH = "training a named architecture from random weights"
# What a key alone says, by tool: the lacking capability -> the keys.
REFUSED_KEYS: Mapping[Tool, Mapping[str, tuple[str, ...]]] = {
    "TRL": {"distillation": ("teacher_model_name_or_path", "lmbda")},
    "Axolotl": {
        "reward model": ("reward_model", "process_reward_model"),
        "classification": ("num_labels",),
        "diffusion": ("diffusion",),
        "distillation": ("kd_trainer",),
        "1-bit training": ("use_onebitllms",),
    },
    "LLaMA-Factory": {
        "LLaMA-Factory's v1 schema with that key": ("optim_config", "lr_scheduler_config", "quant_config"),
        "LLaMA Pro": ("use_llama_pro",),
        FROM_SCRATCH: ("train_from_scratch",),
    },
    "torchtune": {
        "online RL": ("orchestration", "reward_functions", "reward_model", "ppo_epochs", "num_output_samples"),
        "early exit": ("early_exit_loss", "layer_dropout"),
    },
    "Automodel": {"diffusion": ("dllm", "flow_matching")},
}
AUTOMODEL_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"
AUTOMODEL_RECIPES = (AUTOMODEL_RECIPE, "FinetuneRecipeForVLM")
# Parts of the names of Automodel's recipes, and of its models' classes.
AUTOMODEL_CAUSES = {
    "Benchmark": "a benchmark", "KnowledgeDistillation": "distillation", "Diffusion": "diffusion",
    "Encoder": "retrieval", "Embedding": "retrieval", "SequenceClassification": "classification", "Omni": "audio",
    "Eagle": "speculative decoding", "Pretrain": "pretraining",
}  # fmt: skip
AUTOMODEL_MODELS = {
    "Seq2Seq": "encoder-decoder models", "MultiModal": "multimodal",
    "SequenceClassification": "classification",
}  # fmt: skip
V1_NAMES = {
    "model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size", "train_dataset": "dataset",
}  # fmt: skip
V1_DEFAULTS: Mapping[str, Any] = {
    "stage": "sft", "do_train": True, "template": "qwen3_nothink", "per_device_train_batch_size": 1, "cutoff_len": 2048,
    "learning_rate": 1e-4, "num_train_epochs": 3, "bf16": True, "pure_bf16": True, "lr_scheduler_type": "constant",
    "weight_decay": 0.01, "logging_steps": 1, "save_strategy": "no", "batching_strategy": "normal",
    "enable_activation_checkpointing": True,
}  # fmt: skip
V1_UNREAD = ("peft_config", "dist_config", "kernel_config", "init_config", "model_class", "batching_workers",
"sample_backend",
             "max_new_tokens")  # fmt: skip


class Refusal(UserError):
    """A file that is not converted. `cause` names the method or capability; `is_training`: whether it trains at all."""

    cause: str = ""
    is_training: bool = True

    @classmethod
    def because(cls, where: object, found: str, cause: str, is_training: bool = True) -> "Refusal":
        """What was `found` in the file, and the `cause` that it stands for."""
        reason = (
            f"{cause}: not supported; supervised fine-tuning and preference training of text models are converted"
            if is_training
            else f"{cause}, not a training recipe"
        )
        refusal = cls(f"{where}: {found}: {reason}")
        refusal.cause, refusal.is_training = cause, is_training
        return refusal


def load_theirs(source: Path) -> tuple[Tool, dict[str, Any], str]:
    """The tool that a file was written for, its mapping with `${name}` references resolved, and its text.

    Raises `UserError` where the file cannot be read, a `Refusal` where it is no training file of a known tool.
    """
    _, problems = read_entries(source, is_foreign=True)  # what is wrong with it as YAML, and where
    if problems:
        raise UserError.of(problems)
    text = source.read_text(encoding="utf-8-sig")
    theirs = yaml.safe_load(text)
    tool = recognize_tool(theirs) if isinstance(theirs, dict) else None
    if tool is None and isinstance(theirs, dict) and any(key in theirs for key in KNOWN_ACCELERATE):
        raise Refusal.because(source, "distributed_type", "an Accelerate config (--config takes it)", is_training=False)
    if tool is None:
        found = "none of these tools' keys for a model or data"
        raise Refusal.because(source, found, f"not recognized as a file of {', '.join(TOOL_NAMES)}", is_training=False)
    if tool == "LLaMA-Factory" and is_factory_v1(theirs):
        theirs = rename_v1(theirs)
    return tool, _resolve_references(theirs, theirs), text


def rename_v1(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A file of LLaMA-Factory's v1 schema by the keys of the older one, with the defaults that differ from those.

    Keys of plugins stay, and are refused by name. Source: llamafactory/v1/config and v1/core/base_trainer.py.
    """
    if "train_dataset" not in theirs:
        return {key: value for key, value in theirs.items() if key != "micro_batch_size"} | {
            "template": theirs.get("template")
        }
    adapters = read_section(theirs, "peft_config")
    kind = str(adapters.get("name", "lora")) if adapters else "full"
    renamed: dict[str, Any] = {**V1_DEFAULTS, "finetuning_type": kind}
    renamed |= {V1_NAMES.get(key, key): value for key, value in theirs.items() if key not in V1_UNREAD}
    for key, ours, default in (("r", "lora_rank", 8), ("lora_alpha", "lora_alpha", 16),
    ("lora_dropout", "lora_dropout", 0.05),
                               ("target_modules", "lora_target", "all"),
                               ("use_rslora", "use_rslora", False)):  # fmt: skip
        renamed |= {ours: adapters.get(key, default)} if adapters else {}
    sharding = read_section(theirs, "dist_config").get("name")
    renamed |= {"fsdp": "full_shard"} if sharding == "fsdp2" else {"deepspeed": sharding} if sharding else {}
    renamed["disable_gradient_checkpointing"] = not renamed.pop("enable_activation_checkpointing")
    renamed["packing"] = str(renamed.pop("batching_strategy")).startswith("dynamic")  # filled by tokens
    return renamed


def refuse_other_methods(tool: Tool, theirs: Mapping[str, Any], source: Path) -> None:
    """Raises `Refusal` for a file whose method, model or purpose is not supported, naming the key that says so."""
    losses = find_unsupported_losses(tool, theirs, source)
    for found, cause, is_training in (*_methods(tool, theirs), *losses):
        raise Refusal.because(source, found, cause, is_training)
    key, images = find_images(tool, theirs)
    read = read_recipe(None, ["model_name_or_path=some/name", 'datasets=[{"path": "some/name"}]'])
    for problem in find_problems(read, images=images):
        if not problem.is_note:  # as a run says it
            refusal = Refusal(f"{source}: {key}: {problem.sentence.replace('some/name', name_model(theirs))}")
            refusal.cause = f"images of {images}"
            raise refusal
    for found, cause, is_training in find_refused_models(theirs):
        raise Refusal.because(source, found, cause, is_training)


def _methods(tool: Tool, theirs: Mapping[str, Any]) -> Iterator[Found]:
    for cause, keys in {**REFUSED_KEYS[tool], "mixture of depths": ("mixture_of_depths",)}.items():
        yield from ((f"{key}: {shorten(theirs[key])}", cause, True) for key in keys if theirs.get(key))
    if asks_for_rounding(theirs) and find_rounding(theirs) is None:
        key = "qat" if theirs.get("qat") else "quantizer"
        yield (
            f"{key}: {shorten(theirs[key])}",
            "quantization-aware training that torchao finishes on some GPUs only",
            True,
        )
    others = {"Axolotl": _axolotl, "LLaMA-Factory": _factory, "torchtune": _torchtune, "Automodel": _automodel}
    yield from others[tool](theirs) if tool in others else ()


def _axolotl(theirs: Mapping[str, Any]) -> Iterator[Found]:
    rl, plugins = theirs.get("rl"), str(theirs.get("plugins", "")).lower()
    if rl and str(rl) not in AXOLOTL_METHODS:
        yield f"rl: {rl}", "online RL", True
    if "Classification" in str(theirs.get("model_type")):
        yield "model_type: a classifier", "classification", True
    for part, cause in (("diffusion", "diffusion"), (".kd.", "distillation")):
        if part in plugins:
            yield f"plugins: {plugins}", cause, True


def _factory(theirs: Mapping[str, Any]) -> Iterator[Found]:
    if not theirs.get("do_train") and "stage" not in theirs and "dataset" not in theirs:
        purposes = {"export_dir": "merging (finetune export)", "task": "evaluation"}
        purpose = next((purpose for key, purpose in purposes.items() if key in theirs), "generation")
        yield next(key for key in ("export_dir", "task", "template", *theirs) if key in theirs), purpose, False
    elif theirs.get("do_predict") and not theirs.get("do_train"):
        yield "do_predict: true", "generation", False
    stage, kind = str(theirs.get("stage")), theirs.get("finetuning_type", "lora")
    if cause := {"rm": "reward model", "ppo": "online RL"}.get(stage):
        yield f"stage: {stage}", cause, True
    if kind not in ("lora", "full", "freeze"):
        yield f"finetuning_type: {kind}", str(kind).upper(), True


def _torchtune(theirs: Mapping[str, Any]) -> Iterator[Found]:
    components = " ".join(find_texts(theirs, "_component_"))
    loss = str(read_section(theirs, "loss").get("_component_", "")).rsplit(".", 1)[-1]
    if "rlhf.loss" in components and find_method("torchtune", theirs, Path()) == "sft":
        yield f"loss: {loss}", f"another loss ({loss.removesuffix('Loss')})", True
    if {"teacher_model", "kd_loss"} & theirs.keys() and find_distillation(theirs) is None:
        yield "teacher_model", "distillation by another divergence", True
    purposes = {"tasks": "evaluation", "prompt": "generation", "max_new_tokens": "generation"}
    yield from ((key, purpose, False) for key, purpose in purposes.items() if key in theirs)
    if "quantizer" in theirs and not asks_for_rounding(theirs):
        yield "quantizer", "quantization", False
    if not {"dataset", "datasets"} & theirs.keys():
        yield "no dataset", "a file of another purpose", False


def _automodel(theirs: Mapping[str, Any]) -> Iterator[Found]:
    recipe, model = theirs.get("recipe"), read_section(theirs, "model")
    name = str(recipe.get("_target_") if isinstance(recipe, dict) else recipe or AUTOMODEL_RECIPE).rsplit(".", 1)[-1]
    if name not in AUTOMODEL_RECIPES and ("Embedding" in name or find_distillation(theirs) is None):
        cause = next((cause for part, cause in AUTOMODEL_CAUSES.items() if part in name), name)
        yield f"recipe: {name}", cause, cause != "a benchmark"
    if "teacher_model" in theirs and find_distillation(theirs) is None:
        yield "teacher_model", "distillation by another divergence", True
    if "mock" in " ".join(find_texts(theirs, "_target_")):
        yield "dataset: made-up tokens", "a benchmark", False
    kind = str(model.get("_target_", ""))
    for part, cause in AUTOMODEL_MODELS.items():
        if part in kind:
            yield f"model: {kind.rsplit('.', 2)[-2]}", cause, True
    if "prefix_tree" in str(theirs):
        yield "dataloader: prefix trees", "online RL", True
    if kind.endswith("from_config"):
        yield "model: from_config", FROM_SCRATCH, True


def _resolve_references(value: Any, theirs: Mapping[str, Any], depth: int = 0) -> Any:
    """Replaces `${name}` by the value of that key (dotted where nested); an unknown name is left unchanged."""
    if isinstance(value, dict):
        return {key: _resolve_references(inner, theirs, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve_references(inner, theirs, depth) for inner in value]
    if not isinstance(value, str) or depth > MOST_REFERENCES:
        return value
    whole = REFERENCE.fullmatch(value)
    if whole:
        named = _look_up(theirs, whole[1])
        return value if named is None else _resolve_references(named, theirs, depth + 1)
    return (
        REFERENCE.sub(lambda match: str(_resolve_references(match[0], theirs, depth + 1)), value)
        if "${" in value
        else value
    )


def _look_up(theirs: Any, name: str) -> Any:
    for part in name.split("."):
        theirs = theirs.get(part) if isinstance(theirs, dict) else None
    return theirs
