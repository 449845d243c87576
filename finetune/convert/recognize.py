"""Reads another tool's file, recognizes the tool, and refuses methods, models and purposes that we
do not support.

Functions that find causes yield (evidence in the file, missing capability or other purpose, whether
the file trains at all).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.config.compatibility import find_problems
from finetune.config.reader import read_recipe
from finetune.config.yaml_file import read_entries
from finetune.convert.async_grpo import is_async, rename_async
from finetune.convert.command_line import COMMAND, is_command, read_command
from finetune.convert.counterparts import TOOL_NAMES, Tool, ToolFile
from finetune.convert.factory_v1 import PACKING
from finetune.convert.foreign_values import shorten
from finetune.convert.hints import find_texts, is_factory_v1, recognize_tool
from finetune.convert.image_models import find_images
from finetune.convert.model_names import (
    AUDIO,
    AUDIO_MODEL,
    MULTIMODAL_MODEL,
    Unsupported,
    find_refused_models,
    name_model,
)
from finetune.convert.objectives import (
    AXOLOTL_METHODS,
    COMMANDED_METHODS,
    SWIFT_METHODS,
    asks_for_rounding,
    find_distillation,
    find_masked_diffusion,
    find_method,
    find_rounding,
    find_swifts_kind,
    find_unsupported_losses,
)
from finetune.convert.swift import OF_IMAGES
from finetune.convert.value_conversion import read_section
from finetune.errors import UserError

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MOST_REFERENCES = 10  # references to references; a cycle ends here
# keys of an Accelerate config
KNOWN_ACCELERATE = ("compute_environment", "distributed_type")
FROM_SCRATCH = "training a named architecture from random weights"
# tool -> missing capability -> the keys that ask for it
REFUSED_KEYS: Mapping[Tool, Mapping[str, tuple[str, ...]]] = {
    "TRL": {"distillation": ("teacher_model_name_or_path", "lmbda")},
    "Axolotl": {
        "a reward for each step of an answer": ("process_reward_model",),
        "distillation": ("kd_trainer",),
        FROM_SCRATCH: ("reinit_weights",),
    },
    "LLaMA-Factory": {
        "LLaMA-Factory's v1 schema with that key": (
            "optim_config",
            "lr_scheduler_config",
            "quant_config",
        ),
        "LLaMA Pro": ("use_llama_pro",),
        "KTransformers": (
            "use_kt",
            "kt_optimize_rule",
            "kt_weight_path",
            "kt_expert_checkpoint_path",
        ),
        FROM_SCRATCH: ("train_from_scratch",),
    },
    "torchtune": {"online RL": ("reward_model", "ppo_epochs", "num_output_samples")},
    "Automodel": {"diffusion": ("dllm", "flow_matching")},
    "ms-swift": {
        "a classifier by ms-swift, whose rows end with a prompt for an answer": ("num_labels",),
        "training from cached tokens": ("cached_dataset",),
    },
}
BOTH_DIRECTIONS = (
    "for which Automodel's models attend in both directions, and ours to what is before"
)
RETRIEVAL = f"retrieval, {BOTH_DIRECTIONS} (docs/embeddings.md)"
AUTOMODEL_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"
# recipes that are converted, unless something else in the file is refused
AUTOMODEL_RECIPES = (AUTOMODEL_RECIPE, "FinetuneRecipeForVLM")
# part of the name of an Automodel recipe -> cause of its refusal; the first that fits
AUTOMODEL_CAUSES = {
    "Benchmark": "a benchmark",
    "KnowledgeDistillation": "distillation",
    "Diffusion": "diffusion",
    "CrossEncoder": f"reranking, {BOTH_DIRECTIONS}",
    "Encoder": RETRIEVAL,
    "Embedding": RETRIEVAL,
    "SequenceClassification": "classification of pairs of sentences, which Automodel's class joins",
    "Omni": AUDIO,
    "Eagle": "speculative decoding",
    "Vispec": "speculative decoding",
    "Pretrain": "pretraining",
    "Multimodal": "multimodal",
}
# part of the name of a model's class in Automodel -> cause
AUTOMODEL_MODELS = {
    "Seq2Seq": "encoder-decoder models",
    "MultiModal": "multimodal",
    "Biencoder": RETRIEVAL,  # of files that name no recipe
    "SequenceClassification": "classification of pairs of sentences, which Automodel's class joins",
}
TRL_COMMANDS = ("sft", "dpo", "kto", "orpo", "grpo", *COMMANDED_METHODS)
# other commands of TRL's -> cause
TRL_CAUSES = {
    "cpo": "another loss (CPO)",
    "distillation": "distillation",
    "gkd": "distillation",
    "rloo": "online RL",
}
NOT_TRAINERS = ("env", "vllm-serve")  # commands of TRL's that train nothing
# keys of Megatron-SWIFT alone
MEGATRON_KEYS = (
    "micro_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "recompute_granularity",
)
# a stage of LLaMA-Factory's, or an rlhf_type of ms-swift's -> cause
FACTORY_STAGES = {"ppo": "online RL"}
# rlhf_type -> its name in the cause
SWIFT_KINDS = {"rm": "a reward model"}
SWIFT_ROWS = "whose rows have messages and lists of positive_messages and negative_messages"
# task_type -> cause
SWIFT_TASKS = {
    "embedding": f"embeddings by ms-swift, {SWIFT_ROWS}; docs/embeddings.md has the columns here",
    "reranker": f"a reranker by ms-swift, {SWIFT_ROWS}",
    "generative_reranker": f"a reranker by ms-swift, {SWIFT_ROWS}",
    "seq_cls": "a classifier by ms-swift, whose rows end with a prompt for an answer",
}
# commands of LLaMA-Factory's v1, as words in the names of files, folders and data -> cause
V1_COMMANDS = {
    "dpo": "a preference file of LLaMA-Factory's v1, whose keys are not published",
    "rm": "a reward model of LLaMA-Factory's v1, whose keys are not published",
    "reward": "a reward model of LLaMA-Factory's v1, whose keys are not published",
    "cls": "a classifier of LLaMA-Factory's v1, whose keys are not published",
}
# key of the v1 schema -> key of the older one
V1_NAMES = {
    "model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "train_dataset": "dataset",
    "cp_size": "context_parallel_size",
    "dist_timeout": "ddp_timeout",
    "custom_chat_template": "chat_template",
}
# v1's defaults, in the keys of the older schema
V1_DEFAULTS: Mapping[str, Any] = {
    "stage": "sft",
    "per_device_train_batch_size": 1,
    "cutoff_len": 2048,
    "learning_rate": 1e-4,
    "num_train_epochs": 3,
    "bf16": True,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "batching_strategy": "normal",
    "enable_activation_checkpointing": True,
}
# key of v1's peft_config -> key of the older schema, and the default
V1_ADAPTERS: Mapping[str, tuple[str, Any]] = {
    "r": ("lora_rank", 8),
    "lora_alpha": ("lora_alpha", 16),
    "lora_dropout": ("lora_dropout", 0.05),
    "target_modules": ("lora_target", "all"),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
    "modules_to_save": ("additional_target", None),
    "adapter_name_or_path": ("adapter_name_or_path", None),
}
# keys that are not renamed: rename_v1 reads the sections, the others have no older key
V1_UNREAD = (
    "peft_config",
    "dist_config",
    "kernel_config",
    "init_config",
    "model_class",
    "batching_workers",
    "sample_backend",
    "max_new_tokens",
    "cp_mode",
    "dp_size",
    "mp_replicate_size",
    "mp_shard_size",
    "full_determinism",
    "save_ckpt_as_hf",
)


class Refusal(UserError):
    """The error of a file that is not converted.

    `cause`: the missing capability, or the file's other purpose. `is_training`: whether the file
    trains at all.
    """

    cause: str = ""
    is_training: bool = True

    @classmethod
    def because(
        cls, where: object, evidence: str, cause: str, is_training: bool = True
    ) -> "Refusal":
        """Makes the refusal of the file `where`: its `evidence` shows the `cause`."""
        reason = (
            "not supported; supervised fine-tuning and preference training of text models are "
            "converted"
        )
        if is_training:
            sentence = f"{cause}: {reason}"
        else:
            sentence = f"{cause}, not a training recipe"
        refusal = cls(f"{where}: {evidence}: {sentence}")
        refusal.cause = cause
        refusal.is_training = is_training
        return refusal


class LoadedFile(NamedTuple):
    """A training file of another tool."""

    tool: Tool
    settings: dict[str, Any]  # in the keys of the tables, with `${name}` references resolved
    text: str
    is_factory_v1: bool  # whether it is in LLaMA-Factory's v1 schema
    source: Path  # files that it names are looked for in its folder


def load_settings(source: Path) -> LoadedFile:
    """Reads a training file, or a command line, of another tool.

    Raises `UserError` if the file cannot be read, a `Refusal` if it is no training file of a known
    tool.
    """
    if is_command(source):
        # a typed command names files relative to the working folder
        origin = source if source.is_file() else Path("the command line")
        return _adapt_settings(*read_command(source), origin)
    _, problems = read_entries(source, is_foreign=True)  # YAML errors with their lines
    if problems:
        raise UserError.of(problems)
    text = source.read_text(encoding="utf-8-sig")
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        settings = {}
    tool = recognize_tool(settings)
    if tool is None:
        raise _make_unknown_refusal(settings, source)
    return _adapt_settings(tool, settings, text, source)


def _adapt_settings(tool: Tool, settings: dict[str, Any], text: str, source: Path) -> LoadedFile:
    """Renames keys of other schemas to those of the tables, and resolves `${name}` references."""
    is_v1 = tool == "LLaMA-Factory" and is_factory_v1(settings)
    if is_v1:
        _refuse_v1_method(settings, source)
        settings = rename_v1(settings)
    if tool == "torchtune" and is_async(settings):
        settings = rename_async(settings)
    return LoadedFile(tool, _resolve_references(settings, settings), text, is_v1, source)


def _make_unknown_refusal(settings: ToolFile, source: Path) -> Refusal:
    """Makes the refusal of a file that no known tool trains by."""
    if any(key in settings for key in KNOWN_ACCELERATE):
        cause = "an Accelerate config (--config takes it)"
        return Refusal.because(source, "distributed_type", cause, is_training=False)
    evidence = "none of these tools' keys for a model or data"
    cause = f"not recognized as a file of {', '.join(TOOL_NAMES)}"
    return Refusal.because(source, evidence, cause, is_training=False)


def _refuse_v1_method(settings: ToolFile, source: Path) -> None:
    """Raises `Refusal` if names in a v1 file, or the file's name, say that its command is not sft.

    No key of a v1 file says so.
    """
    for key in ("train_dataset", "output_dir", "model_class"):
        words = re.split(r"[^a-z]+", str(settings.get(key)).lower())
        for word in words:
            if word in V1_COMMANDS:
                raise Refusal.because(source, f"{key}: {settings[key]}", V1_COMMANDS[word])
    for word in re.split(r"[^a-z]+", source.stem.lower()):
        if word in V1_COMMANDS:
            raise Refusal.because(source, f"the file's name, {source.name}", V1_COMMANDS[word])


def rename_v1(settings: ToolFile) -> dict[str, Any]:
    """Renames the keys of LLaMA-Factory's v1 schema to the older ones, and adds v1's defaults.

    Keys of plugins stay, and are refused by name. Source: llamafactory/v1/config and
    v1/core/base_trainer.py.
    """
    # without data it is no training file, and is refused later by the key `template`
    if "train_dataset" not in settings:
        renamed = {**settings, "template": settings.get("template")}
        renamed.pop("micro_batch_size", None)
        return renamed
    settings = _drop_nulls(settings)
    adapters = _drop_nulls(read_section(settings, "peft_config"))
    kind = str(adapters.get("name", "lora")) if adapters else "full"
    renamed = {**V1_DEFAULTS, "finetuning_type": kind}
    renamed |= {
        V1_NAMES.get(key, key): value for key, value in settings.items() if key not in V1_UNREAD
    }
    if adapters:
        renamed |= {
            name: adapters.get(key, default) for key, (name, default) in V1_ADAPTERS.items()
        }
        other_keys = adapters.keys() - V1_ADAPTERS.keys() - {"name"}
        renamed |= {key: adapters[key] for key in sorted(other_keys)}
    sharding = read_section(settings, "dist_config")
    if sharding.get("name") in ("fsdp2", "fsdpturbo"):
        renamed |= {"fsdp": "full_shard", "init_config": read_section(settings, "init_config")}
    elif sharding:
        renamed["deepspeed"] = sharding.get("config_file") or sharding.get("name")
    elif kind == "full":
        renamed["bf16"] = False  # v1 reads it under FSDP2 alone; else the weights are in float32
    if sharding.get("name") == "fsdpturbo":  # shard_model of its fsdpturbo.py casts all weights
        renamed["pure_bf16"] = renamed["bf16"]
    if settings.get("save_epochs") == 1:
        renamed["save_strategy"] = "epoch"
        del renamed["save_epochs"]
    elif settings.get("save_steps"):
        del renamed["save_strategy"]
    renamed["disable_gradient_checkpointing"] = not renamed.pop("enable_activation_checkpointing")
    has_images = MULTIMODAL_MODEL.search(str(settings["model"]).lower())
    if has_images or settings.get("model_class") == "other":  # no class of a causal text model
        renamed["model_class"] = "other"
    renamed["packing"] = renamed["batching_strategy"] == PACKING
    return renamed


def _drop_nulls(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section without the keys whose value is null, for which v1 has no meaning."""
    return {key: value for key, value in section.items() if value is not None}


def refuse_other_methods(tool: Tool, settings: ToolFile, source: Path) -> None:
    """Raises `Refusal` if a file's method, model or purpose is not supported; it names the key that
    asks for it.
    """
    losses = find_unsupported_losses(tool, settings, source)
    # the first cause that is found
    for evidence, cause, is_training in (*_find_causes(tool, settings), *losses):
        raise Refusal.because(source, evidence, cause, is_training)
    refused_models = list(find_refused_models(settings))
    for evidence, cause, is_training in refused_models:
        if cause == AUDIO:  # the name of such a model may be taken for one of text, or of images
            raise Refusal.because(source, evidence, cause, is_training)
    key, images = find_images(tool, settings)
    if images and find_method(tool, settings, source) == "reward":
        raise Refusal.because(source, f"{key}: {name_model(settings)}", "a reward model of images")
    # What a run would refuse about these images; some/name stands for the file's model and data.
    recipe = read_recipe(None, ["model_name_or_path=some/name", 'datasets=[{"path": "some/name"}]'])
    for problem in find_problems(recipe, images=images):
        if not problem.is_note:
            refusal = Refusal(
                f"{source}: {key}: {problem.sentence.replace('some/name', name_model(settings))}"
            )
            refusal.cause = f"images of {images}"
            raise refusal
    for evidence, cause, is_training in refused_models:
        raise Refusal.because(source, evidence, cause, is_training)


def _find_causes(tool: Tool, settings: ToolFile) -> Iterator[Unsupported]:
    """Yields the methods and purposes of a file that are not supported, losses apart."""
    for cause, keys in {**REFUSED_KEYS[tool], "mixture of depths": ("mixture_of_depths",)}.items():
        yield from (
            (f"{key}: {shorten(settings[key])}", cause, True) for key in keys if settings.get(key)
        )
    if asks_for_rounding(settings) and find_rounding(settings) is None:
        key = "qat" if settings.get("qat") else "quantizer"
        cause = "quantization-aware training that torchao finishes on some GPUs only"
        yield f"{key}: {shorten(settings[key])}", cause, True
    finders = {
        "TRL": _find_trls_causes,
        "Axolotl": _find_axolotls_causes,
        "LLaMA-Factory": _find_factorys_causes,
        "torchtune": _find_torchtunes_causes,
        "Automodel": _find_automodels_causes,
        "ms-swift": _find_swifts_causes,
    }
    if tool in finders:
        yield from finders[tool](settings)


def _find_trls_causes(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields a command of TRL's that is not converted."""
    command = settings.get(COMMAND)
    is_other_loss = command == "cpo" and settings.get("loss_type") != "simpo"
    if command in NOT_TRAINERS:
        yield f"trl {command}", str(command), False
    elif command not in (None, *TRL_COMMANDS) or is_other_loss:
        yield f"trl {command}", TRL_CAUSES.get(str(command), "another trainer of TRL's"), True


def _find_swifts_causes(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields all but ms-swift's fine-tuning of text models, in full or by LoRA, supervised or by
    preferences.
    """
    command = str(settings.get(COMMAND, "sft"))
    kind = find_swifts_kind(settings)
    if command.startswith("megatron "):
        yield command, "Megatron-SWIFT", not command.endswith(("export", "infer"))
    elif kind == "cpo" and settings.get("loss_type") != "simpo":
        yield "rlhf_type: cpo", "another loss (CPO)", True
    elif kind is not None and kind not in SWIFT_METHODS:
        cause = FACTORY_STAGES.get(
            kind, f"{SWIFT_KINDS.get(kind, kind.upper())} by ms-swift, whose rows are its own"
        )
        yield f"rlhf_type: {kind}", cause, True
    elif command == "pt":
        yield (
            "swift pt",
            "pretraining by ms-swift, whose rows are conversations of the assistant alone",
            True,
        )
    elif command not in ("sft", "rlhf"):
        yield f"swift {command}", command, False
    megatron = next((key for key in MEGATRON_KEYS if key in settings), None)
    if megatron is not None:
        yield f"{megatron}: {settings[megatron]}", "Megatron-SWIFT", True
    task = str(settings.get("task_type", "causal_lm"))
    if task != "causal_lm":
        yield f"task_type: {task}", SWIFT_TASKS.get(task, task), True
    tuner = str(settings.get("tuner_type") or settings.get("train_type") or "lora")
    if tuner not in ("lora", "full"):
        yield f"tuner_type: {tuner}", tuner.upper(), True
    name = str(settings.get("model"))
    if AUDIO_MODEL.search(name.lower()):
        yield f"model: {name}", AUDIO, True
    if MULTIMODAL_MODEL.search(name.lower()):
        yield f"model: {name}", "images by ms-swift", True
    data = str(settings.get("dataset"))
    if OF_IMAGES.search(data):
        yield f"dataset: {shorten(data)}", "images by ms-swift", True


def _find_axolotls_causes(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields other RL methods than AXOLOTL_METHODS, classifiers, distillation, and diffusion other
    than masked diffusion.
    """
    rl = settings.get("rl")
    plugins = str(settings.get("plugins", "")).lower()
    if rl and str(rl) not in AXOLOTL_METHODS:
        yield f"rl: {rl}", "online RL", True
    is_classifier = settings.get("num_labels") or "Classification" in str(
        settings.get("model_type")
    )
    if is_classifier and not settings.get("reward_model"):
        yield (
            "model_type: a classifier",
            "a classifier, for which Axolotl has no prompt strategy",
            True,
        )
    if ".kd." in plugins:
        yield f"plugins: {plugins}", "distillation", True
    is_masked = find_masked_diffusion(settings) is not None
    for key in ("diffusion", "diffusion_lm", "plugins"):
        value = str(settings.get(key, "")).lower()
        is_diffusion = "diffusion" in value if key == "plugins" else bool(value)
        if (is_diffusion and not is_masked) or "diffusion_decision" in value:
            yield f"{key}: {shorten(settings[key])}", "diffusion", True


def _find_factorys_causes(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields other purposes than training, PPO, and other ways to train than LoRA, OFT, in full and
    by layers.
    """
    if not settings.get("do_train") and "stage" not in settings and "dataset" not in settings:
        purposes = {"export_dir": "merging (finetune export)", "task": "evaluation"}
        key = next(key for key in (*purposes, "template", *settings) if key in settings)
        yield key, purposes.get(key, "generation"), False
    elif settings.get("do_predict") and not settings.get("do_train"):
        yield "do_predict: true", "generation", False
    stage = str(settings.get("stage"))
    if stage in FACTORY_STAGES:
        yield f"stage: {stage}", FACTORY_STAGES[stage], True
    kind = settings.get("finetuning_type", "lora")
    if kind not in ("lora", "oft", "full", "freeze"):
        yield f"finetuning_type: {kind}", str(kind).upper(), True


def _find_torchtunes_causes(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields other losses and divergences than ours, and files for other purposes than training."""
    components = " ".join(find_texts(settings, "_component_"))
    loss = str(read_section(settings, "loss").get("_component_", "")).rsplit(".", 1)[-1]
    if "rlhf.loss" in components and find_method("torchtune", settings, Path()) == "sft":
        yield f"loss: {loss}", f"another loss ({loss.removesuffix('Loss')})", True
    has_teacher = settings.get("teacher_model") or settings.get("kd_loss")
    if has_teacher and find_distillation(settings) is None:
        yield "teacher_model", "distillation by another divergence", True
    purposes = {"tasks": "evaluation", "prompt": "generation", "max_new_tokens": "generation"}
    yield from ((key, purpose, False) for key, purpose in purposes.items() if key in settings)
    if settings.get("quantizer") and not asks_for_rounding(settings):
        yield "quantizer", "quantization", False
    if not {"dataset", "datasets"} & settings.keys():
        yield "no dataset", "a file of another purpose", False


def _find_automodels_causes(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields other recipes, model classes and data than for fine-tuning, or distillation, of a
    causal model.
    """
    recipe = settings.get("recipe")
    if isinstance(recipe, dict):
        target = recipe.get("_target_")
    else:
        target = recipe or AUTOMODEL_RECIPE
    name = str(target).rsplit(".", 1)[-1]
    # Distillation is converted if its loss is ours, but not that of embeddings.
    if name not in AUTOMODEL_RECIPES and (
        "Embedding" in name or find_distillation(settings) is None
    ):
        cause = next((cause for part, cause in AUTOMODEL_CAUSES.items() if part in name), name)
        yield f"recipe: {name}", cause, cause != "a benchmark"
    if "teacher_model" in settings and find_distillation(settings) is None:
        yield "teacher_model", "distillation by another divergence", True
    if "mock" in " ".join(find_texts(settings, "_target_")):
        yield "dataset: made-up tokens", "a benchmark", False
    model_target = str(read_section(settings, "model").get("_target_", ""))
    for part, cause in AUTOMODEL_MODELS.items():
        if part in model_target:
            # of module.Class.from_pretrained; the whole target, if it has no dot
            class_name = model_target.split(".")[-2:][0]
            yield f"model: {class_name}", cause, True
    if "prefix_tree" in str(settings):
        yield "dataloader: prefix trees", "online RL", True
    # With load_base_model the model is made from its config, and its weights are read nonetheless.
    loads_weights = read_section(settings, "model").get("load_base_model")
    if model_target.endswith("from_config") and not loads_weights:
        yield "model: from_config", FROM_SCRATCH, True


def _resolve_references(value: Any, settings: ToolFile, depth: int = 0) -> Any:
    """Replaces each `${name}` in a value by the value of that key of `settings` (dotted if nested).

    A reference to an unknown key stays as it is.
    """
    if isinstance(value, dict):
        return {key: _resolve_references(inner, settings, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve_references(inner, settings, depth) for inner in value]
    if not isinstance(value, str) or depth > MOST_REFERENCES:
        return value
    reference = REFERENCE.fullmatch(value)
    if reference:
        target = _look_up(settings, reference[1])
        if target is None:
            return value
        return _resolve_references(target, settings, depth + 1)
    return REFERENCE.sub(
        lambda match: str(_resolve_references(match[0], settings, depth + 1)), value
    )


def _look_up(settings: ToolFile, name: str) -> Any:
    """Returns the value of a dotted key; None if there is none."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
