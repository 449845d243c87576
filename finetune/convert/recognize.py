"""Whose file it is, and whether what it does is done here: other methods, models and purposes are refused by name."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.compatibility import find_problems
from finetune.config.methods import METHODS, Method
from finetune.config.other_tools import LABEL_LOSSES, MEAN_OF_MEANS, NO_DROPOUT, Tool
from finetune.config.reader import read_recipe
from finetune.config.schema import keys_of
from finetune.convert.model_names import Found, find_images, find_refused_models, find_texts, name_model
from finetune.convert.online import adapt_online, find_unsupported_online, is_online
from finetune.convert.rounding import asks_for_rounding, find_rounding
from finetune.convert.rules import Conversion, convert_number, read_section, shorten
from finetune.errors import UserError

AXOLOTL_METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero")
TRL_SIGNS = (
    "beta", "loss_type", "max_prompt_length", "precompute_ref_log_probs", "ref_model", "desirable_weight",
    "undesirable_weight", "rpo_alpha", "simpo_gamma", "cpo_alpha", "loss_weights",
)  # fmt: skip
SFT_LOSSES = (None, "nll", "chunked_nll", "dft")
TRL_NAMES = ("kto", "orpo", "dpo", "simpo")  # of trainers, in the names of files and folders
# Where our default differs, by what the tool's own preference trainer takes.
PREFERENCE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"learning_rate": 1e-6}, "Axolotl": {"overlength": "drop"},
}  # fmt: skip
KL_DIVERGENCES = {"ForwardKL": 0.0, "KDLoss": 0.0, "ReverseKL": 1.0}  # -> distill_beta
WITHOUT_DROPOUT = ("TRL", "Axolotl", "LLaMA-Factory")  # disable_dropout is the default of TRL's trainers
WHOLE_ROW = "the cross entropy is over prompt and answer there, over the answer here"
CPO_SIMPO = "the cross entropy of the chosen answers is added there (CPO-SimPO); not here"
KTO_ROWS = "the KL term is estimated on the answers of a batch there, here on each row's successor in the data"
ASFT = (
    "the loss is divided by 1 + asft_alpha here, and so is max_grad_norm: AdamW's steps are the same; a mean over all "
    "tokens of a step here, of each micro-batch's mean there"
)
NOT_SAID = "the file does not say which trainer reads it; for ORPO set method: orpo, for KTO kto"


def find_method(tool: Tool, theirs: Mapping[str, Any], source: Path) -> str:
    """Our `method` for a file; `sft` where it is no preference training."""
    match tool:
        case "Axolotl":
            return AXOLOTL_METHODS.get(str(theirs.get("rl")), "sft")
        case "LLaMA-Factory":
            loss, stage = theirs.get("pref_loss"), theirs.get("stage")
            if theirs.get("use_asft_loss"):
                return "distill"
            return (
                "kto" if stage == "kto" else "sft" if stage != "dpo" else loss if loss in ("orpo", "simpo") else "dpo"
            )
        case "torchtune" | "Automodel" if find_distillation(theirs) is not None:
            return "distill"
        case "torchtune":
            return "dpo" if str(read_section(theirs, "loss").get("_component_")).endswith("DPOLoss") else "sft"
        case "TRL":
            return _find_trl_method(theirs, source)
        case _:
            return "sft"


def find_distillation(theirs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our keys for torchtune's and Automodel's distillation: (1 - kd_ratio) x cross entropy + kd_ratio x KL divergence.

    LLaMA-Factory's ASFT is that sum, not divided by 1 + asft_alpha, of DFT and the divergence from the model before
    training. None where a file has no teacher, or its divergence is another.
    """
    if theirs.get("use_asft_loss"):
        share, clip = convert_number(theirs.get("asft_alpha", 0.1)), convert_number(theirs.get("max_grad_norm", 1.0))
        return {
            "method": "distill", "distill_beta": 0.0, "distill_alpha": round(share / (1 + share), 9),
            "token_loss": "dft",
            "teacher_model_name_or_path": theirs.get("model_name_or_path"),
            "max_grad_norm": clip and clip / (1 + share),
        }  # fmt: skip
    if "teacher_model" not in theirs:
        return None
    there, fn = read_section(theirs, "kd_loss").get("_component_"), read_section(theirs, "kd_loss_fn").get("_target_")
    kind = str(there or fn or "KDLoss")
    beta = next((beta for part, beta in KL_DIVERGENCES.items() if kind.rsplit(".", 1)[-1].startswith(part)), None)
    temperature = read_section(theirs, "kd_loss_fn").get("temperature", 1.0)
    alpha = convert_number(theirs.get("kd_ratio", 0.5))
    if beta is None or temperature != 1 or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        return None
    return {"method": "distill", "distill_beta": beta, "distill_alpha": alpha}


def _find_trl_method(theirs: Mapping[str, Any], source: Path) -> str:
    """TRL's files name no trainer: their keys do, else the file's or its folder's name (orpo/config.yaml)."""
    if is_online(theirs):
        return "grpo"
    if "desirable_weight" in theirs or "undesirable_weight" in theirs:
        return "kto"
    if "simpo" in _losses("TRL", theirs) or "simpo_gamma" in theirs:
        return "simpo"
    if not any(key in theirs for key in TRL_SIGNS) or (
        "beta" not in theirs and theirs.get("loss_type") in SFT_LOSSES[1:]
    ):
        return "sft"
    return _find_name(source) or "dpo"


def _find_name(source: Path) -> str | None:
    words = {source.resolve().parent.name.lower(), *re.split(r"[^a-z]+", source.stem.lower())}
    return next((name for name in TRL_NAMES if name in words), None)


def find_unsupported_losses(tool: Tool, theirs: Mapping[str, Any], source: Path) -> Iterator[Found]:
    """The losses of a preference file that nothing here computes."""
    method = find_method(tool, theirs, source)
    if method == "grpo":
        yield from find_unsupported_online(theirs)
    if method in ("sft", "distill", "grpo"):
        return
    losses = _losses(tool, theirs)
    key = {"Axolotl": "dpo_loss_type", "LLaMA-Factory": "pref_loss"}.get(tool, "loss_type")
    known = (*PAIR_LOSSES, "sft", "kto", "orpo", "simpo")
    for name in losses:
        if name not in known:
            yield f"{key}: {name}", f"another loss ({name.upper()})", True
    pairs = [name for name in losses if name != "sft"]
    if len(pairs) > 1 or any(losses[name] != 1 for name in pairs):
        yield f"{key}: {shorten(list(losses))}", "several losses at once", True
    if "cpo_alpha" in theirs and tool == "TRL" and "simpo" not in losses:
        yield f"cpo_alpha: {theirs['cpo_alpha']}", "another loss (CPO)", True
    divergence = str(theirs.get("f_divergence_type", "reverse_kl"))
    if divergence.lower() != "reverse_kl":
        yield f"f_divergence_type: {divergence}", f"another loss ({divergence.upper()})", True


def _losses(tool: Tool, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The losses that a file names, with their weights.

    >>> _losses("TRL", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]})
    {'sigmoid': 1.0, 'sft': 0.2}
    """
    keys = {"Axolotl": ("dpo_loss_type", "dpo_loss_weights"), "LLaMA-Factory": ("pref_loss", "")}
    names_key, weights_key = keys.get(tool, ("loss_type", "loss_weights"))
    names = theirs.get(names_key) or []
    names = names if isinstance(names, list) else [names]
    weights = theirs.get(weights_key) or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [None] * len(names)  # which no loss here has
    return dict(zip(map(str, names), map(convert_number, weights), strict=False))


def adapt_preferences(method: str, theirs: Mapping[str, Any], source: Path, found: Conversion) -> None:
    """Adds the method of a file to the recipe, with what several of its keys together mean."""
    tool, recipe = found.tool, found.recipe
    if method == "distill":
        recipe |= find_distillation(theirs) or {}
        if theirs.get("use_asft_loss"):
            found.remarks.append(f"use_asft_loss: true   ({ASFT})")
        return
    if method == "sft":
        _set_token_loss(theirs, found)
        _drop_unused("sft", found)
        losses = _losses("TRL", theirs) if tool == "TRL" else {}
        for name in losses.keys() - set(map(str, SFT_LOSSES)):
            note = "of supervised fine-tuning nll is the only one"
            found.add_difference("loss_type", name, note, f"another loss ({name.upper()})")
        return
    if method == "grpo":
        adapt_online(theirs, found)
        _drop_unused(method, found)
        return
    recipe["method"] = method
    losses = _losses(tool, theirs)
    named = next((name for name in losses if name in PAIR_LOSSES), None)
    if method == "dpo" and (named or theirs.get("rl") == "ipo"):
        recipe["loss_type"] = named or "ipo"
    if "sft" in losses:
        recipe["rpo_alpha"] = losses["sft"]
    if tool == "Axolotl" and method == "orpo" and theirs.get("orpo_alpha") is not None:
        recipe.setdefault("beta", convert_number(theirs["orpo_alpha"]))
    if tool == "TRL" and method == "dpo" and not losses and _find_name(source) is None:
        found.remarks.append(f"method: dpo   ({NOT_SAID})")
    _list_differences(method, theirs, found)
    if tool in WITHOUT_DROPOUT and theirs.get("disable_dropout", True) and recipe.get("lora_dropout", 0) != 0:
        found.remarks.append(f"lora_dropout: {recipe['lora_dropout']}   ({NO_DROPOUT})")
    if tool in WITHOUT_DROPOUT and theirs.get("disable_dropout", True):
        recipe["lora_dropout"] = 0.0
    if theirs.get("label_smoothing_factor") is not None and "label_smoothing" not in theirs:
        recipe.pop("label_smoothing", None)  # read by the Trainer's own loss only
        found.ignored.append("label_smoothing_factor")
    for key, value in PREFERENCE_DEFAULTS.get(tool, {}).items():
        recipe.setdefault(key, value)
    for key in ("assistant_only_loss", "packing"):
        if key in recipe and not (key == "packing" and recipe[key] is False):
            del recipe[key]  # only answers are compared; no tool packs pairs
    _drop_unused(method, found)


def _set_token_loss(theirs: Mapping[str, Any], found: Conversion) -> None:
    asked = next((key for key in LABEL_LOSSES if theirs.get(key)), "dft" if theirs.get("loss_type") == "dft" else "")
    if asked:
        found.recipe["token_loss"] = asked.removeprefix("use_").removesuffix("_loss")
    if "eaft" not in asked:
        found.recipe.pop("eaft_alpha", None)
    elif theirs.get("eaft_k") not in (None, 20):
        found.add_difference(
            "eaft_k", theirs["eaft_k"], "the entropy is of the 20 likeliest tokens", "another loss (EAFT)"
        )


def _list_differences(method: str, theirs: Mapping[str, Any], found: Conversion) -> None:
    """What the tool's trainer for `method` does otherwise."""
    tool, on_trl = found.tool, found.tool in ("TRL", "Axolotl")
    if method == "simpo" and on_trl and theirs.get("cpo_alpha", 1.0) != 0:
        found.add_difference("cpo_alpha", theirs.get("cpo_alpha", 1.0), CPO_SIMPO)
    if method == "orpo" and on_trl:
        found.add_difference("rl" if tool == "Axolotl" else "method", "orpo", WHOLE_ROW)
    if method == "orpo" and tool == "LLaMA-Factory":
        found.remarks.append(f"pref_loss: orpo   ({MEAN_OF_MEANS})")
    if method == "kto":
        found.remarks.append(f"kto   ({KTO_ROWS})")
    if theirs.get("pref_ftx") and method != "dpo":
        found.add_difference("pref_ftx", theirs["pref_ftx"], f"no cross entropy is added under method: {method}")
    if theirs.get("truncation_mode") == "keep_end":
        found.add_difference("truncation_mode", "keep_end", "a side of over max_length tokens loses its end here")
    reference = read_section(theirs, "ref_checkpointer").get("checkpoint_dir")
    if reference and reference != read_section(theirs, "checkpointer").get("checkpoint_dir"):
        note = "the reference is the model before training"
        found.add_difference("ref_checkpointer.checkpoint_dir", reference, note, "another reference model")


def _drop_unused(method: str, found: Conversion) -> None:
    """Removes keys of other methods, which have no effect there either."""
    for key in keys_of(Method).keys() & found.recipe.keys() - {"method", *METHODS[method].keys}:
        del found.recipe[key]
        found.ignored.append(key)
    if "label_smoothing" not in METHODS[method].keys and found.recipe.pop("label_smoothing", None):
        found.ignored.append("label_smoothing")


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


def recognize_tool(theirs: Mapping[str, Any]) -> Tool | None:
    """Whose file it is, by the keys that only one of them has."""
    if any("nemo_automodel" in text for text in find_texts(theirs, "_target_")) or "step_scheduler" in theirs:
        return "Automodel"
    if any(True for _ in find_texts(theirs, "_component_")):
        return "torchtune"
    if "base_model" in theirs or {"sequence_len", "micro_batch_size"} & theirs.keys():
        return "LLaMA-Factory" if is_factory_v1(theirs) else "Axolotl"
    if {"finetuning_type", "stage", "cutoff_len", "template", "export_dir"} & theirs.keys() or is_factory_v1(theirs):
        return "LLaMA-Factory"
    return "TRL" if "model_name_or_path" in theirs else None


def is_factory_v1(theirs: Mapping[str, Any]) -> bool:
    """Whether a file is in LLaMA-Factory's v1 schema."""
    return "model" in theirs and bool(
        {"train_dataset", "dist_config", "sample_backend", "kernel_config"} & theirs.keys()
    )


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
