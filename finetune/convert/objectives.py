"""What a file trains by: its method, the losses of preferences, TRL's GRPO and its rewards, and rounding (QAT)."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.keys import keys_of
from finetune.config.methods import METHODS, POLICY_LOSSES, Method
from finetune.config.other_names import TRUNCATED
from finetune.config.quantization import SCHEMES
from finetune.convert.counterparts import NOTES, Tool
from finetune.convert.foreign_values import WrongValue, convert_number, read_number, shorten
from finetune.convert.model_names import Unsupported
from finetune.convert.rules import Conversion, read_section

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
LABEL_LOSSES = ("use_dft_loss", "use_dft", "use_eaft_loss", "use_eaft")  # -> token_loss
GRPO_SIGNS = ("reward_funcs", "num_generations", "max_completion_length", "steps_per_generation")
PROMPT_TOKENS = 512  # of max_prompt_length in TRL, until it bounded prompts no more
# TRL's rewards by the names that its command knows: ours, or a function to import.
REWARDS = {"think_format_reward": "think_format", "get_soft_overlong_punishment": "soft_overlong_punishment"}
TRL_PUNISHMENT = {"max_completion_length": 1280, "soft_punish_cache": 256}  # of its command
SUMMED = "sum_then_normalize"
LOCAL_MEAN = "the mean over the tokens of a local batch there, over those of the whole step here"


def find_method(tool: Tool, settings: Mapping[str, Any], source: Path) -> str:
    """Our `method` for a file; `sft` where it is no preference training."""
    match tool:
        case "Axolotl":
            return AXOLOTL_METHODS.get(str(settings.get("rl")), "sft")
        case "LLaMA-Factory":
            loss, stage = settings.get("pref_loss"), settings.get("stage")
            if settings.get("use_asft_loss"):
                return "distill"
            return (
                "kto" if stage == "kto" else "sft" if stage != "dpo" else loss if loss in ("orpo", "simpo") else "dpo"
            )
        case "torchtune" | "Automodel" if find_distillation(settings) is not None:
            return "distill"
        case "torchtune":
            return "dpo" if str(read_section(settings, "loss").get("_component_")).endswith("DPOLoss") else "sft"
        case "TRL":
            return _find_trl_method(settings, source)
        case _:
            return "sft"


def find_distillation(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our keys for torchtune's and Automodel's distillation: (1 - kd_ratio) x cross entropy + kd_ratio x KL divergence.

    LLaMA-Factory's ASFT is that sum, not divided by 1 + asft_alpha, of DFT and the divergence from the model before
    training. None where a file has no teacher, or its divergence is another.
    """
    if settings.get("use_asft_loss"):
        share = read_number("asft_alpha", settings.get("asft_alpha", 0.1), "0.1", 0)
        clip = read_number("max_grad_norm", settings.get("max_grad_norm", 1.0) or 0, "1.0")
        return {
            "method": "distill", "distill_beta": 0.0, "distill_alpha": round(share / (1 + share), 9),
            "token_loss": "dft",
            "teacher_model_name_or_path": settings.get("model_name_or_path"),
            "max_grad_norm": clip / (1 + share) if clip else None,
        }  # fmt: skip
    if "teacher_model" not in settings:
        return None
    there, fn = (
        read_section(settings, "kd_loss").get("_component_"),
        read_section(settings, "kd_loss_fn").get("_target_"),
    )
    kind = str(there or fn or "KDLoss")
    beta = next((beta for part, beta in KL_DIVERGENCES.items() if kind.rsplit(".", 1)[-1].startswith(part)), None)
    temperature = read_section(settings, "kd_loss_fn").get("temperature", 1.0)
    alpha = convert_number(settings.get("kd_ratio", 0.5))
    if beta is None or temperature != 1 or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        return None
    return {"method": "distill", "distill_beta": beta, "distill_alpha": alpha}


def _find_trl_method(settings: Mapping[str, Any], source: Path) -> str:
    """TRL's files name no trainer: their keys do, else the file's or its folder's name (orpo/config.yaml)."""
    if is_online(settings):
        return "grpo"
    if "desirable_weight" in settings or "undesirable_weight" in settings:
        return "kto"
    if "simpo" in _losses("TRL", settings) or "simpo_gamma" in settings:
        return "simpo"
    if not any(key in settings for key in TRL_SIGNS) or (
        "beta" not in settings and settings.get("loss_type") in SFT_LOSSES[1:]
    ):
        return "sft"
    return _find_name(source) or "dpo"


def _find_name(source: Path) -> str | None:
    words = {source.resolve().parent.name.lower(), *re.split(r"[^a-z]+", source.stem.lower())}
    return next((name for name in TRL_NAMES if name in words), None)


def find_unsupported_losses(tool: Tool, settings: Mapping[str, Any], source: Path) -> Iterator[Unsupported]:
    """The losses of a preference file that nothing here computes."""
    method = find_method(tool, settings, source)
    if method == "grpo":
        yield from find_unsupported_online(settings)
    if method in ("sft", "distill", "grpo"):
        return
    losses = _losses(tool, settings)
    key = {"Axolotl": "dpo_loss_type", "LLaMA-Factory": "pref_loss"}.get(tool, "loss_type")
    known = (*PAIR_LOSSES, "sft", "kto", "orpo", "simpo")
    for name in losses:
        if name not in known:
            yield f"{key}: {name}", f"another loss ({name.upper()})", True
    pairs = [name for name in losses if name != "sft"]
    if len(pairs) > 1 or any(losses[name] != 1 for name in pairs):
        yield f"{key}: {shorten(list(losses))}", "several losses at once", True
    if "cpo_alpha" in settings and tool == "TRL" and "simpo" not in losses:
        yield f"cpo_alpha: {settings['cpo_alpha']}", "another loss (CPO)", True
    divergence = str(settings.get("f_divergence_type", "reverse_kl"))
    if divergence.lower() != "reverse_kl":
        yield f"f_divergence_type: {divergence}", f"another loss ({divergence.upper()})", True


def _losses(tool: Tool, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The losses that a file names, with their weights.

    >>> _losses("TRL", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]})
    {'sigmoid': 1.0, 'sft': 0.2}
    """
    keys = {"Axolotl": ("dpo_loss_type", "dpo_loss_weights"), "LLaMA-Factory": ("pref_loss", "")}
    names_key, weights_key = keys.get(tool, ("loss_type", "loss_weights"))
    names = settings.get(names_key) or []
    names = names if isinstance(names, list) else [names]
    weights = settings.get(weights_key) or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [None] * len(names)  # which no loss here has
    return dict(zip(map(str, names), map(convert_number, weights), strict=False))


def adapt_preferences(method: str, settings: Mapping[str, Any], source: Path, conversion: Conversion) -> None:
    """Adds the method of a file to the recipe, with what several of its keys together mean."""
    tool, recipe = conversion.tool, conversion.recipe
    if method == "distill":
        recipe |= find_distillation(settings) or {}
        if settings.get("use_asft_loss"):
            conversion.remarks.append(f"use_asft_loss: true   ({ASFT})")
        return
    if method == "sft":
        _set_token_loss(settings, conversion)
        _drop_unused("sft", conversion)
        losses = _losses("TRL", settings) if tool == "TRL" else {}
        if tool == "TRL" and settings.get("completion_only_loss"):
            recipe["assistant_only_loss"] = True
        elif tool == "TRL" and settings.get("completion_only_loss") is False:
            conversion.add_difference("completion_only_loss", False, NOTES["PROMPTS_MASKED"].removeprefix("true; "))
        for name in losses.keys() - set(map(str, SFT_LOSSES)):
            note = "of supervised fine-tuning nll is the only one"
            conversion.add_difference("loss_type", name, note, f"another loss ({name.upper()})")
        return
    if method == "grpo":
        adapt_online(settings, conversion)
        _drop_unused(method, conversion)
        return
    recipe["method"] = method
    losses = _losses(tool, settings)
    named = next((name for name in losses if name in PAIR_LOSSES), None)
    if method == "dpo" and (named or settings.get("rl") == "ipo"):
        recipe["loss_type"] = named or "ipo"
    if "sft" in losses:
        recipe["rpo_alpha"] = losses["sft"]
    if tool == "Axolotl" and method == "orpo" and settings.get("orpo_alpha") is not None:
        recipe.setdefault("beta", convert_number(settings["orpo_alpha"]))
    if tool == "TRL" and method == "dpo" and not losses and _find_name(source) is None:
        conversion.remarks.append(f"method: dpo   ({NOT_SAID})")
    _list_differences(method, settings, conversion)
    if tool in WITHOUT_DROPOUT and settings.get("disable_dropout", True) and recipe.get("lora_dropout", 0) != 0:
        conversion.remarks.append(f"lora_dropout: {recipe['lora_dropout']}   ({NOTES['NO_DROPOUT']})")
    if tool in WITHOUT_DROPOUT and settings.get("disable_dropout", True):
        recipe["lora_dropout"] = 0.0
    if settings.get("label_smoothing_factor") is not None and "label_smoothing" not in settings:
        recipe.pop("label_smoothing", None)  # read by the Trainer's own loss only
        conversion.ignored.append("label_smoothing_factor")
    for key, value in PREFERENCE_DEFAULTS.get(tool, {}).items():
        recipe.setdefault(key, value)
    for key in ("assistant_only_loss", "packing"):
        if key in recipe and not (key == "packing" and recipe[key] is False):
            del recipe[key]  # only answers are compared; no tool packs pairs
    _drop_unused(method, conversion)


def _set_token_loss(settings: Mapping[str, Any], conversion: Conversion) -> None:
    asked = next(
        (key for key in LABEL_LOSSES if settings.get(key)), "dft" if settings.get("loss_type") == "dft" else ""
    )
    if asked:
        conversion.recipe["token_loss"] = asked.removeprefix("use_").removesuffix("_loss")
    if "eaft" not in asked:
        conversion.recipe.pop("eaft_alpha", None)
    elif settings.get("eaft_k") not in (None, 20):
        conversion.add_difference(
            "eaft_k", settings["eaft_k"], "the entropy is of the 20 likeliest tokens", "another loss (EAFT)"
        )


def _list_differences(method: str, settings: Mapping[str, Any], conversion: Conversion) -> None:
    """What the tool's trainer for `method` does otherwise."""
    tool, on_trl = conversion.tool, conversion.tool in ("TRL", "Axolotl")
    if method == "simpo" and on_trl and settings.get("cpo_alpha", 1.0) != 0:
        conversion.add_difference("cpo_alpha", settings.get("cpo_alpha", 1.0), CPO_SIMPO)
    if method == "orpo" and on_trl:
        conversion.add_difference("rl" if tool == "Axolotl" else "method", "orpo", WHOLE_ROW)
    if method == "orpo" and tool == "LLaMA-Factory":
        conversion.remarks.append(f"pref_loss: orpo   ({NOTES['MEAN_OF_MEANS']})")
    if method == "kto":
        conversion.remarks.append(f"kto   ({KTO_ROWS})")
    if settings.get("pref_ftx") and method != "dpo":
        conversion.add_difference("pref_ftx", settings["pref_ftx"], f"no cross entropy is added under method: {method}")
    if settings.get("truncation_mode") == "keep_end":
        conversion.add_difference("truncation_mode", "keep_end", "a side of over max_length tokens loses its end here")
    reference = read_section(settings, "ref_checkpointer").get("checkpoint_dir")
    if reference and reference != read_section(settings, "checkpointer").get("checkpoint_dir"):
        note = "the reference is the model before training"
        conversion.add_difference("ref_checkpointer.checkpoint_dir", reference, note, "another reference model")


def _drop_unused(method: str, conversion: Conversion) -> None:
    """Removes keys of other methods, which have no effect there either."""
    for key in keys_of(Method).keys() & conversion.recipe.keys() - {"method", *METHODS[method].keys}:
        del conversion.recipe[key]
        conversion.ignored.append(key)
    if "label_smoothing" not in METHODS[method].keys and conversion.recipe.pop("label_smoothing", None):
        conversion.ignored.append("label_smoothing")


def is_online(settings: Mapping[str, Any]) -> bool:
    """Whether a TRL file is for its GRPO trainer."""
    return any(key in settings for key in GRPO_SIGNS)


def find_unsupported_online(settings: Mapping[str, Any]) -> Iterator[Unsupported]:
    """The losses that nothing here computes, and models as rewards."""
    loss = str(settings.get("loss_type", "dapo"))
    if loss not in (*POLICY_LOSSES, "bnpo"):
        yield f"loss_type: {loss}", f"another loss ({loss.upper()})", True
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if settings.get(key):
            yield f"{key}: {settings[key]}", "a reward model", True


def adapt_online(settings: Mapping[str, Any], conversion: Conversion) -> None:
    """Adds what several keys of a GRPO file together mean."""
    recipe, loss = conversion.recipe, settings.get("loss_type")
    recipe |= {"method": "grpo", "lora_dropout": 0.0, **({"loss_type": loss} if loss else {})}
    if loss == "bnpo":
        recipe["loss_type"] = "dapo"
        conversion.remarks.append(f"loss_type: bnpo   ({LOCAL_MEAN})")
    recipe.setdefault("learning_rate", 1e-6)
    scale = settings.get("scale_rewards", "group")
    if not isinstance(scale, bool | str):
        raise WrongValue.of_key("scale_rewards", scale, "one of group, batch and none", "group")
    recipe["scale_rewards"] = scale if isinstance(scale, str) else "group" if scale else "none"
    longest = read_number("max_completion_length", settings.get("max_completion_length", 256), "256", 1)
    prompt = read_number("max_prompt_length", settings.get("max_prompt_length") or PROMPT_TOKENS, str(PROMPT_TOKENS), 1)
    recipe["max_completion_length"], recipe["max_length"] = longest, longest + prompt
    conversion.remarks.append(f"max_length: {longest + prompt}   (prompts of over {prompt} tokens are dropped here)")
    recipe.pop("packing", None)  # what is sampled is packed here, for the same loss
    rows, accumulated, generations = (
        int(read_number(key, settings.get(key, default), str(default), 1))
        for key, default in (
            ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1), ("num_generations", 8)
        )
    )  # fmt: skip
    recipe.pop("gradient_accumulation_steps", None)
    recipe["global_batch_size"] = max(1, rows * accumulated // generations)
    per_process = f"{rows} x {accumulated} completions, {generations} of each prompt, on one process there"
    conversion.remarks.append(
        f"global_batch_size: {recipe['global_batch_size']}   ({per_process}; times the processes)"
    )
    sampled, micro_steps = (
        int(read_number(key, settings.get(key) or 0, "8", 0))
        for key in ("generation_batch_size", "steps_per_generation")
    )
    micro_steps = micro_steps or sampled // rows  # in micro-batches, on one process
    if micro_steps > accumulated:
        recipe["steps_per_generation"] = micro_steps // accumulated
    if settings.get("top_k") not in (None, 0, -1):
        conversion.add_difference("top_k", settings["top_k"], TRUNCATED)
    if (rule := settings.get("multi_objective_aggregation", SUMMED)) != SUMMED:
        note = "rewards are summed, and then normalized"
        conversion.add_difference("multi_objective_aggregation", rule, note, "normalizing each reward")
    _add_rewards(settings.get("reward_funcs") or [], conversion)
    if iterations := settings.get("max_tool_calling_iterations"):
        named = f"name your functions, such as my_tools.py:multiply, and set max_tool_calling_iterations: {iterations}"
        conversion.to_do.append(f"tools: they have no key there; {named}")
    if settings.get("use_vllm") and settings.get("vllm_mode") == "server":
        recipe |= _read_server(settings)
        conversion.to_do.append(
            f"vllm_server_base_url: start the server of {recipe['vllm_server_base_url']} as docs/online.md says"
        )


def _read_server(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of a server that samples, and of TRL's correction of its numerics."""
    host = str(settings.get("vllm_server_host", "0.0.0.0")).replace("0.0.0.0", "localhost")
    address = settings.get("vllm_server_base_url") or f"http://{host}:{settings.get('vllm_server_port', 8000)}"
    keys: dict[str, Any] = {"vllm_server_base_url": address}
    if "vllm_server_timeout" in settings:
        keys["vllm_server_timeout"] = float(read_number("vllm_server_timeout", settings["vllm_server_timeout"], "240"))
    if settings.get("vllm_importance_sampling_correction", True):
        keys["importance_sampling_correction"] = settings.get("vllm_importance_sampling_mode", "sequence_mask")
        for bound, other in (("clip_max", "cap"), ("clip_min", "clip_min")):
            names = (f"vllm_importance_sampling_{name}" for name in (bound, other))
            values = [settings[name] for name in names if settings.get(name) is not None]
            keys |= {f"importance_sampling_{bound}": value for value in values[:1]}
    return keys


def _add_rewards(names: Any, conversion: Conversion) -> None:
    if not isinstance(names, list | str):
        raise WrongValue.of_key("reward_funcs", names, "a list of names", "[think_format_reward]")
    rewards = []
    for name in [names] if isinstance(names, str) else names:
        module, _, function = str(name).rpartition(".")
        rewards.append(REWARDS.get(name) or f"{module.replace('.', '/') or 'my_rewards'}.py:{function}")
        if not module and name not in REWARDS:
            conversion.to_do.append(f"reward_funcs: {name}: write my_rewards.py: from trl.rewards import {name}")
    if "soft_overlong_punishment" in rewards:
        conversion.recipe["soft_punish_cache"] = TRL_PUNISHMENT["soft_punish_cache"]
        if (longest := conversion.recipe["max_completion_length"]) != TRL_PUNISHMENT["max_completion_length"]:
            note = f"up to 1280 tokens there, whatever max_completion_length is; up to {longest} here"
            conversion.add_difference("reward_funcs", "get_soft_overlong_punishment", note)
    if rewards:
        conversion.recipe["rewards"] = rewards
    else:
        conversion.to_do.append("rewards: the file names none; name your functions, such as my_rewards.py:right")


# torchao's quantizers, and pairs of Axolotl's dtypes (inputs, weights) -> our scheme, and its usual group.
QUANTIZERS: Mapping[str, tuple[str, int | None]] = {
    "Int8DynActInt4WeightQATQuantizer": ("int8-int4", 256),
    "Int4WeightOnlyQATQuantizer": ("int4-packed", 256),
    "Float8ActInt4WeightQATQuantizer": ("fp8-int4", 128),
}
QAT_DTYPES: Mapping[tuple[str, str], tuple[str, int | None]] = {
    ("int8", "int4"): ("int8-int4", 32),
    ("None", "int4"): ("int4-packed", 128),
    ("float8_e4m3fn", "int4"): ("fp8-int4", 128),
    ("float8_e4m3fn", "float8_e4m3fn"): ("fp8-fp8", None),
    ("nvfp4", "nvfp4"): ("nvfp4", 16),
    ("mxfp4", "mxfp4"): ("mxfp4", 32),
}
HEAD_ROUNDED = "the output head is rounded there too, where its inputs divide into groups"
ADAPTER_APART = (
    "the base alone is rounded there, beside its adapter; here base and adapter together, as they are exported"
)


def asks_for_rounding(settings: Mapping[str, Any]) -> bool:
    """Whether a file of training asks for it."""
    qat = settings.get("qat")
    is_on = isinstance(qat, dict) and qat.get("enabled", True)
    return bool(is_on or ("dataset" in settings and isinstance(settings.get("quantizer"), dict)))


def find_rounding(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Our keys; None where a file asks for none, or for what torchao does not finish here.

    >>> find_rounding({"qat": {"activation_dtype": "int8", "weight_dtype": "int4", "fake_quant_after_n_steps": 9}})
    {'quantization_aware_training': 'int8-int4', 'qat_group_size': 32, 'fake_quant_after_n_steps': 9}
    """
    if not asks_for_rounding(settings):
        return None
    qat = settings.get("qat") or {}
    quantizer = settings.get("quantizer") or qat.get("quantizer") or qat.get("qat_config") or {}
    name = str(quantizer.get("_component_") or quantizer.get("_target_") or "").rsplit(".", 1)[-1]
    dtypes = tuple(str(qat.get(key)).removeprefix("torch.") for key in ("activation_dtype", "weight_dtype"))
    scheme, usual = QUANTIZERS.get(name) or QAT_DTYPES.get((dtypes[0], dtypes[1]), ("", None))
    if scheme not in SCHEMES or SCHEMES[scheme].refused:
        return None
    keys: dict[str, Any] = {"quantization_aware_training": scheme}
    keys["qat_group_size"] = quantizer.get("groupsize") or qat.get("group_size") or usual
    after = settings.get("fake_quant_after_n_steps") or qat.get("fake_quant_after_n_steps")
    return keys | ({"fake_quant_after_n_steps": after} if after else {})


def adapt_rounding(settings: Mapping[str, Any], conversion: Conversion) -> None:
    """Quantization-aware training, and where the same torchao rounds other layers there."""
    keys = find_rounding(settings)
    if keys is None:
        return
    conversion.recipe |= keys
    key = "qat" if "qat" in settings else "quantizer"
    conversion.add_difference(key, settings[key], HEAD_ROUNDED)
    if (
        settings.get("adapter")
        or "lora" in str(read_section(settings, "model").get("_component_"))
        or settings.get("peft")
    ):
        conversion.add_difference(key, settings[key], ADAPTER_APART)
