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
from finetune.convert.model_names import Found
from finetune.convert.rules import Conversion, read_section
from finetune.convert.their_values import WrongValue, convert_number, read_number, shorten

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
        share = read_number("asft_alpha", theirs.get("asft_alpha", 0.1), "0.1", 0)
        clip = read_number("max_grad_norm", theirs.get("max_grad_norm", 1.0) or 0, "1.0")
        return {
            "method": "distill", "distill_beta": 0.0, "distill_alpha": round(share / (1 + share), 9),
            "token_loss": "dft",
            "teacher_model_name_or_path": theirs.get("model_name_or_path"),
            "max_grad_norm": clip / (1 + share) if clip else None,
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
        if tool == "TRL" and theirs.get("completion_only_loss"):
            recipe["assistant_only_loss"] = True
        elif tool == "TRL" and theirs.get("completion_only_loss") is False:
            found.add_difference("completion_only_loss", False, NOTES["PROMPTS_MASKED"].removeprefix("true; "))
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
        found.remarks.append(f"lora_dropout: {recipe['lora_dropout']}   ({NOTES['NO_DROPOUT']})")
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
        found.remarks.append(f"pref_loss: orpo   ({NOTES['MEAN_OF_MEANS']})")
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


def is_online(theirs: Mapping[str, Any]) -> bool:
    """Whether a TRL file is for its GRPO trainer."""
    return any(key in theirs for key in GRPO_SIGNS)


def find_unsupported_online(theirs: Mapping[str, Any]) -> Iterator[Found]:
    """The losses that nothing here computes, and models as rewards."""
    loss = str(theirs.get("loss_type", "dapo"))
    if loss not in (*POLICY_LOSSES, "bnpo"):
        yield f"loss_type: {loss}", f"another loss ({loss.upper()})", True
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if theirs.get(key):
            yield f"{key}: {theirs[key]}", "a reward model", True


def adapt_online(theirs: Mapping[str, Any], found: Conversion) -> None:
    """Adds what several keys of a GRPO file together mean."""
    recipe, loss = found.recipe, theirs.get("loss_type")
    recipe |= {"method": "grpo", "lora_dropout": 0.0, **({"loss_type": loss} if loss else {})}
    if loss == "bnpo":
        recipe["loss_type"] = "dapo"
        found.remarks.append(f"loss_type: bnpo   ({LOCAL_MEAN})")
    recipe.setdefault("learning_rate", 1e-6)
    scale = theirs.get("scale_rewards", "group")
    if not isinstance(scale, bool | str):
        raise WrongValue.of_key("scale_rewards", scale, "one of group, batch and none", "group")
    recipe["scale_rewards"] = scale if isinstance(scale, str) else "group" if scale else "none"
    longest = read_number("max_completion_length", theirs.get("max_completion_length", 256), "256", 1)
    prompt = read_number("max_prompt_length", theirs.get("max_prompt_length") or PROMPT_TOKENS, str(PROMPT_TOKENS), 1)
    recipe["max_completion_length"], recipe["max_length"] = longest, longest + prompt
    found.remarks.append(f"max_length: {longest + prompt}   (prompts of over {prompt} tokens are dropped here)")
    recipe.pop("packing", None)  # what is sampled is packed here, for the same loss
    rows, accumulated, generations = (
        int(read_number(key, theirs.get(key, default), str(default), 1))
        for key, default in (
            ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1), ("num_generations", 8)
        )
    )  # fmt: skip
    recipe.pop("gradient_accumulation_steps", None)
    recipe["global_batch_size"] = max(1, rows * accumulated // generations)
    per_process = f"{rows} x {accumulated} completions, {generations} of each prompt, on one process there"
    found.remarks.append(f"global_batch_size: {recipe['global_batch_size']}   ({per_process}; times the processes)")
    sampled, micro_steps = (
        int(read_number(key, theirs.get(key) or 0, "8", 0)) for key in ("generation_batch_size", "steps_per_generation")
    )
    micro_steps = micro_steps or sampled // rows  # in micro-batches, on one process
    if micro_steps > accumulated:
        recipe["steps_per_generation"] = micro_steps // accumulated
    if theirs.get("top_k") not in (None, 0, -1):
        found.add_difference("top_k", theirs["top_k"], TRUNCATED)
    if (rule := theirs.get("multi_objective_aggregation", SUMMED)) != SUMMED:
        note = "rewards are summed, and then normalized"
        found.add_difference("multi_objective_aggregation", rule, note, "normalizing each reward")
    _add_rewards(theirs.get("reward_funcs") or [], found)
    if iterations := theirs.get("max_tool_calling_iterations"):
        named = f"name your functions, such as my_tools.py:multiply, and set max_tool_calling_iterations: {iterations}"
        found.to_do.append(f"tools: they have no key there; {named}")
    if theirs.get("use_vllm") and theirs.get("vllm_mode") == "server":
        recipe |= _read_server(theirs)
        found.to_do.append(
            f"vllm_server_base_url: start the server of {recipe['vllm_server_base_url']} as docs/online.md says"
        )


def _read_server(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of a server that samples, and of TRL's correction of its numerics."""
    host = str(theirs.get("vllm_server_host", "0.0.0.0")).replace("0.0.0.0", "localhost")
    address = theirs.get("vllm_server_base_url") or f"http://{host}:{theirs.get('vllm_server_port', 8000)}"
    keys: dict[str, Any] = {"vllm_server_base_url": address}
    if "vllm_server_timeout" in theirs:
        keys["vllm_server_timeout"] = float(read_number("vllm_server_timeout", theirs["vllm_server_timeout"], "240"))
    if theirs.get("vllm_importance_sampling_correction", True):
        keys["importance_sampling_correction"] = theirs.get("vllm_importance_sampling_mode", "sequence_mask")
        for bound, other in (("clip_max", "cap"), ("clip_min", "clip_min")):
            names = (f"vllm_importance_sampling_{name}" for name in (bound, other))
            values = [theirs[name] for name in names if theirs.get(name) is not None]
            keys |= {f"importance_sampling_{bound}": value for value in values[:1]}
    return keys


def _add_rewards(names: Any, found: Conversion) -> None:
    if not isinstance(names, list | str):
        raise WrongValue.of_key("reward_funcs", names, "a list of names", "[think_format_reward]")
    rewards = []
    for name in [names] if isinstance(names, str) else names:
        module, _, function = str(name).rpartition(".")
        rewards.append(REWARDS.get(name) or f"{module.replace('.', '/') or 'my_rewards'}.py:{function}")
        if not module and name not in REWARDS:
            found.to_do.append(f"reward_funcs: {name}: write my_rewards.py: from trl.rewards import {name}")
    if "soft_overlong_punishment" in rewards:
        found.recipe["soft_punish_cache"] = TRL_PUNISHMENT["soft_punish_cache"]
        if (longest := found.recipe["max_completion_length"]) != TRL_PUNISHMENT["max_completion_length"]:
            note = f"up to 1280 tokens there, whatever max_completion_length is; up to {longest} here"
            found.add_difference("reward_funcs", "get_soft_overlong_punishment", note)
    if rewards:
        found.recipe["rewards"] = rewards
    else:
        found.to_do.append("rewards: the file names none; name your functions, such as my_rewards.py:right")


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


def asks_for_rounding(theirs: Mapping[str, Any]) -> bool:
    """Whether a file of training asks for it."""
    qat = theirs.get("qat")
    is_on = isinstance(qat, dict) and qat.get("enabled", True)
    return bool(is_on or ("dataset" in theirs and isinstance(theirs.get("quantizer"), dict)))


def find_rounding(theirs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Our keys; None where a file asks for none, or for what torchao does not finish here.

    >>> find_rounding({"qat": {"activation_dtype": "int8", "weight_dtype": "int4", "fake_quant_after_n_steps": 9}})
    {'quantization_aware_training': 'int8-int4', 'qat_group_size': 32, 'fake_quant_after_n_steps': 9}
    """
    if not asks_for_rounding(theirs):
        return None
    qat = theirs.get("qat") or {}
    quantizer = theirs.get("quantizer") or qat.get("quantizer") or qat.get("qat_config") or {}
    name = str(quantizer.get("_component_") or quantizer.get("_target_") or "").rsplit(".", 1)[-1]
    dtypes = tuple(str(qat.get(key)).removeprefix("torch.") for key in ("activation_dtype", "weight_dtype"))
    scheme, usual = QUANTIZERS.get(name) or QAT_DTYPES.get((dtypes[0], dtypes[1]), ("", None))
    if scheme not in SCHEMES or SCHEMES[scheme].refused:
        return None
    keys: dict[str, Any] = {"quantization_aware_training": scheme}
    keys["qat_group_size"] = quantizer.get("groupsize") or qat.get("group_size") or usual
    after = theirs.get("fake_quant_after_n_steps") or qat.get("fake_quant_after_n_steps")
    return keys | ({"fake_quant_after_n_steps": after} if after else {})


def adapt_rounding(theirs: Mapping[str, Any], found: Conversion) -> None:
    """Quantization-aware training, and where the same torchao rounds other layers there."""
    keys = find_rounding(theirs)
    if keys is None:
        return
    found.recipe |= keys
    key = "qat" if "qat" in theirs else "quantizer"
    found.add_difference(key, theirs[key], HEAD_ROUNDED)
    if theirs.get("adapter") or "lora" in str(read_section(theirs, "model").get("_component_")) or theirs.get("peft"):
        found.add_difference(key, theirs[key], ADAPTER_APART)
