"""Converts what a file trains by: its method, the losses of preferences, TRL's GRPO and its
rewards, and quantization-aware training (QAT).

A comment above a text or a table names the other tool's code that it describes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.facts import find_biased_layers
from finetune.config.keys import keys_of
from finetune.config.methods import LAYER_SLICE, METHODS, POLICY_LOSSES, Method
from finetune.config.other_names import TRUNCATED
from finetune.config.quantization import SCHEMES
from finetune.convert.async_grpo import adapt_async, is_async
from finetune.convert.chat_templates import HEADER_TRAINED, report_scored_text
from finetune.convert.command_line import COMMAND
from finetune.convert.counterparts import NOTES, Tool, ToolFile
from finetune.convert.defaults import DEFAULTS
from finetune.convert.foreign_values import WrongValue, convert_number, read_number, shorten
from finetune.convert.model_names import Unsupported, guess_family, name_model
from finetune.convert.shared import (
    EXPERIMENTAL_METHODS,
    IN_ORDER,
    PACKED_AT_A_TIME,
    describe_shares,
)
from finetune.convert.value_conversion import LINEAR_LAYERS, Conversion, read_section

# Axolotl's `rl` -> our method
AXOLOTL_METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
# ms-swift's `rlhf_type` -> our method; cpo is converted with SimPO's loss alone
SWIFT_METHODS = {"dpo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "cpo": "simpo"}
# The key for the losses of preferences, and the key for their weights, where they are not TRL's
# loss_type and loss_weights. LLaMA-Factory has no weights.
LOSS_KEYS: Mapping[str, str] = {"Axolotl": "dpo_loss_type", "LLaMA-Factory": "pref_loss"}
WEIGHT_KEYS: Mapping[str, str] = {"Axolotl": "dpo_loss_weights", "LLaMA-Factory": ""}
PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero")
OTHER_PAIR_LOSSES = ("sft", "kto", "simpo", "apo_zero_unpaired", "alphapo")
# keys that TRL's preference trainers have, and its SFT trainer mostly has not
TRL_SIGNS = (
    "beta",
    "loss_type",
    "max_prompt_length",
    "precompute_ref_log_probs",
    "ref_model",
    "desirable_weight",
    "undesirable_weight",
    "rpo_alpha",
    "simpo_gamma",
    "cpo_alpha",
    "loss_weights",
    "discopop_tau",
    "f_alpha_divergence_coef",
    "f_divergence_type",
    "generate_during_eval",
    "label_smoothing",
    "ld_alpha",
    "precompute_ref_batch_size",
    "ref_model_init_kwargs",
    "ref_model_mixup_alpha",
    "ref_model_revision",
    "ref_model_sync_steps",
    "reference_free",
    "sync_ref_model",
    "use_weighting",
)
# keys of TRL's preference trainers that its GRPO trainer does not have
PAIR_SIGNS = (
    *("desirable_weight", "undesirable_weight", "rpo_alpha", "simpo_gamma", "cpo_alpha"),
    *("loss_weights", "precompute_ref_log_probs", "ref_model"),
)
# values of loss_type in TRL's supervised fine-tuning; None: it is not set
SFT_LOSSES = (None, "nll", "chunked_nll", "dft")
# trainers of TRL's that the name of a file or folder may say
TRL_NAMES = ("kto", "orpo", "dpo", "simpo")
# TRL's command -> our method, where it has another name; cpo is converted with SimPO's loss alone
COMMANDED_METHODS = {"reward": "reward", "reward_modeling": "reward", "cpo": "simpo"}
# tool -> our key -> the default of the tool's preference trainer, where ours differs
PREFERENCE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"learning_rate": 1e-6},
    "Axolotl": {"overlength": "drop"},
}
# start of the name of a distillation loss -> distill_beta
KL_DIVERGENCES = {"ForwardKL": 0.0, "KDLoss": 0.0, "ReverseKL": 1.0}
# tools whose preference trainers, TRL's or made from TRL's, disable dropout by default
WITHOUT_DROPOUT = ("TRL", "Axolotl", "LLaMA-Factory", "ms-swift")
PROMPTS_WERE_CUT = (
    "a prompt of over 512 tokens lost its beginning in TRL 0.21; not in 1.0 and later, nor here"
)
# tokenize_row of TRL's ORPO and CPO trainers before 0.28, _process_tokens of its KTO trainer before
# 0.27. {}: first or last, tokens of the prompt, and of the answer
CUT_BY_PARTS = "the prompt keeps its {} {}, and if that is still too long an answer its first {}"
CUT_BY_PARTS_THERE = "of a row of over {} tokens {} there; here it loses its end"
WAS_CUT_BY_PARTS = "of a row of over {} tokens {} before TRL 0.27; not since, nor here"
# tokenize_row of TRL's ORPO and CPO trainers since 0.28
ANSWERS_SLICED = (
    "of a row of over {} tokens the prompt stays whole there, and each answer is sliced by "
    "[:max_length - tokens of the longer answer]; before TRL 0.28 {}; here the row loses its end"
)
# _truncate_long_sequences_rl of Axolotl's utils/data/rl.py, before that trainer adds the EOS token
SLICED_AGAIN = (
    "a row that is cut is too long again there by its EOS token, so that TRL since 0.28 slices "
    "each answer by [:sequence_len - tokens of the longer answer]; here it loses its end alone"
)
# what keys.csv says of a file with max_prompt_length, and with max_completion_length
PROMPT_CUT_ALONE = "a longer prompt loses its beginning there"
ANSWER_CUT_ALONE = "a longer answer loses its end there"
# __init__ of TRL's ORPO and CPO trainers, and of its KTO trainer before 0.27, where max_length is
# null
LENGTH_FOR_NULL = 512
# cpo_loss of TRL's CPOTrainer
PAIRS_SMOOTHED = (
    "a pair counts to this share with its answers exchanged there (label smoothing of SimPO); here "
    "as it is"
)
# default of truncation_mode in TRL's DPO before 0.29, which dropped max_prompt_length
SIDES_WERE_CUT = (
    "by default a side of over max_length tokens loses its beginning in the versions that know "
    "max_prompt_length, before 0.29; its end here"
)
# Axolotl 0.21 has TRL 0.29.
SMOOTHED_BEFORE = "no effect on this loss there since TRL 0.29; it smooths here, as in 0.28"
# compute_preference_loss of LLaMA-Factory's CustomDPOTrainer gives TRL's dpo_loss no loss_type.
ALWAYS_SIGMOID = (
    "sigmoid's loss there under TRL 0.20 and later, which take the name as an argument that is not "
    "given; as named here, and there under TRL 0.19"
)
# concatenated_forward divides them by the lengths of the answers, whatever the loss then is
SIGMOID_OF_MEANS = f"{ALWAYS_SIGMOID}; of each answer's mean log-probability, as ipo's, there"
# completion_only_loss: null of TRL's SFTConfig
COMPLETION_ALONE = (
    "where prompt and completion are two lists of messages, the completion alone is trained there, "
    "with what the template writes after its end, as ChatML's line break; both lists here: for "
    "such rows set assistant_only_loss: true, which leaves that line break out"
)
COMPLETIONS_BREAK = (
    "where prompt and completion are two lists of messages, what the template writes after the end "
    "of an answer, as ChatML's line break, is trained too there; a conversation in one column, as "
    "messages, is trained whole there"
)
# get_training_chat_template of TRL's chat_template_utils.py
TEMPLATE_OF_TRL = (
    "a tokenizer's template without {% generation %} is replaced there by TRL's own of its family: "
    "it marks the line break after an answer too, as Qwen2.5's the one before it, and Qwen3's "
    "writes a thought into every answer, an empty one where a row has none; here the template is "
    "the tokenizer's"
)
WHOLE_ROW = (
    "the cross entropy is over prompt and answer there, the mean of each micro-batch counting "
    "alike; over the answer here, a mean over the whole step"
)
# _set_loss_scale of ms-swift's arguments/rlhf_args.py
ANSWERS_OF_PROMPTS = (
    "what precedes the last question counts there too: its answers, under all everything; here the "
    "answer to the last question alone"
)
CPO_SIMPO = "the cross entropy of the chosen answers is added there (CPO-SimPO); not here"
NO_CROSS_ENTROPY = "the cross entropy of the wanted answers is added there; not here"
KTO_ROWS = (
    "the KL term is estimated on the answers of a batch there, here on each row's successor in the "
    "data"
)
# kl_response of LLaMA-Factory's data/processor/feedback.py, and KTOPreprocessor of ms-swift's
# pipelines/train/kto.py
KTO_OF_MICRO_BATCHES = (
    "the KL term is that of a micro-batch there, estimated on the answer before each row's in the "
    "data; that of the whole step here, on the next one to another prompt"
)
ASFT = (
    "the loss is divided by 1 + asft_alpha here, and so is max_grad_norm: AdamW's steps are the "
    "same; a mean over all tokens of a step here, the sum of each micro-batch's mean there, for "
    "which max_grad_norm is divided by gradient_accumulation_steps too"
)
# The next five are on reward models.
NAMED_REWARD = (
    "the name of the file says so: no key of TRL's names its trainer; for supervised fine-tuning "
    "set method: sft"
)
FROZEN_HEAD = (
    "under LoRA the head of scores keeps the values there that it is drawn with, unless "
    "lora_task_type is SEQ_CLS; it is trained here"
)
VALUE_HEAD = (
    "a value head there, which reads a tenth fewer numbers at random (dropout), has another "
    "start, and is saved as v_head; here the head of transformers' class for sequence "
    "classification, without dropout"
)
WHOLE_PAIR = (
    "a pair with a longer answer is dropped here; there both its prompt and its answers are cut"
)
CUT_PAIR = (
    "a pair with a longer answer is dropped here, as by TRL; there it is cut and loses the end "
    "that is scored"
)
NOT_SAID = "the file does not say which trainer reads it; for ORPO set method: orpo, for KTO kto"
UNDIVIDED = (
    "the entropy of the likeliest tokens is divided by 3 here, and max_grad_norm by 3 ** "
    "eaft_alpha: AdamW's steps are the same"
)
# tool -> the switches of its losses of a token, which become our token_loss
LABEL_LOSSES: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("use_dft", "use_eaft"),
    "LLaMA-Factory": ("use_dft_loss", "use_eaft_loss"),
    "ms-swift": ("enable_dft_loss",),
}
# keys that mark a file of TRL's GRPO trainer
GRPO_SIGNS = ("reward_funcs", "num_generations", "max_completion_length", "steps_per_generation")
PROMPT_TOKENS = 512  # default of max_prompt_length in the versions of TRL that had it
# default of max_completion_length in GRPOConfig until 1.9, and in AsyncGRPOConfig
COMPLETION_TOKENS = 256
COMPLETION_TOKENS_AHEAD = 2048
LONGER_SINCE = f"{COMPLETION_TOKENS}, TRL's default until 1.9; 512 in 1.16"
# use_bias_correction_kl of GRPOConfig
KL_TIMES_RATIO = (
    "the KL term is multiplied by the probability ratio in TRL 1.16, by default, which changes its "
    "gradient; not here, nor in 1.9"
)
# disable_dropout of GRPOConfig, and lora_dropout of ModelConfig
DROPOUT_ONLINE = (
    "adapters are trained with dropout there unless disable_dropout is true; without it here, for "
    "completions are sampled without it"
)
TRL_DROPOUT = 0.05  # default of lora_dropout
TRL_EPSILON = 0.2  # default of epsilon, which is that of epsilon_high too
LARGEST_RATIO = 5.0  # the epsilon_high of CISPO that TRL's documentation recommends
MEAN_OF_GENERATION = (
    "loss_type: {}   (the sum over a step's tokens is divided by the mean of all steps that share "
    "a generation there, by the step's own number of tokens here)"
)
# names of rewards that TRL's command knows -> ours
REWARDS = {
    "think_format_reward": "think_format",
    "get_soft_overlong_punishment": "soft_overlong_punishment",
}
# arguments of get_soft_overlong_punishment in TRL's command
TRL_PUNISHMENT = {"max_completion_length": 1280, "soft_punish_cache": 256}
# end of our importance_sampling_* -> ends of TRL's vllm_importance_sampling_*
SAMPLING_BOUNDS = {"clip_max": ("clip_max", "cap"), "clip_min": ("clip_min",)}
SUMMED = "sum_then_normalize"  # the multi_objective_aggregation that is ours
DIFFUSION_PLUGIN = "integrations.diffusion.DiffusionPlugin"
DIFFUSION_MASK = "<|diffusion_mask|>"  # the token that Axolotl adds if a file names no other
OTHER_MASK = (
    f"an id beyond the tokenizer's base vocabulary, as of its special tokens, is passed over there "
    f"for an added {DIFFUSION_MASK}; it is the mask here"
)
UNTRAINED_MASK = (
    "beside adapters the embedding of an added token stays as it is; it is trained here"
)
UNWEIGHTED = "losses are not divided by the probability of their mask there"
UNMASKED = "the BOS, EOS and pad tokens are never masked there; those that are trained on are here"
ROWS_ALIKE = (
    "each row is divided by its trained tokens, and micro-batches are added up there; the step is "
    "divided by its trained tokens here"
)
NOISE_OF_ROWS = (
    "all documents of a row are masked with one probability there, each with its own here"
)
JOINED_DOCUMENTS = "documents of a row see each other there in pretraining; each is apart here"
# encode_packed_streaming of utils/data/streaming.py, which stores rows without their mask
PADDING_SEEN = "what fills up a row is seen there in pretraining; not here"
BEFORE_LAYERS = (
    "each exit scores the state before its layer there, so that the last layer learns nothing; the "
    "state after it here, as in the paper"
)
OUTPUT_SCORED = "the model's output is always scored here"
# The recipe calls scale_grads without the number of ranks, and FSDP has made a mean over the ranks.
DIVIDED_TWICE = (
    "gradients: on several processes divided by their number too there; AdamW's steps are the "
    "same, clipping is not"
)
# names of losses that are the cross entropy, which torchtune and Automodel have several kernels of
CROSS_ENTROPIES = re.compile(r"(CrossEntropy(Loss)?|cross_entropy|CEWithChunkedOutputLoss)$")
# torchtune's classes and functions for early exits -> our exit_curriculum and exit_weights
CURRICULA: Mapping[str, str] = {
    "None": "none",
    "RotationalEarlyExitCurriculum": "rotational",
    "GradualEarlyExitCurriculum": "gradual",
}
EXIT_SCALES: Mapping[str, str] = {
    "uniform_loss_scale": "uniform",
    "linear_l_loss_scale": "linear",
    "sum_l_loss_scale": "sum",
    "sqrt_l_loss_scale": "root",
    "inv_l_loss_scale": "inverse",
    "inv_sqrt_l_loss_scale": "inverse_root",
}
LOCAL_MEAN = "the mean over the tokens of a local batch there, over those of the whole step here"


def find_method(tool: Tool, settings: ToolFile, source: Path) -> str:
    """Returns our `method` for a file; `sft` if it asks for no other."""
    if tool == "TRL":
        return _find_trl_method(settings, source)
    if tool == "Axolotl":
        if settings.get("reward_model"):
            return "reward"
        if find_masked_diffusion(settings) is not None:
            return "masked_diffusion"
        return AXOLOTL_METHODS.get(str(settings.get("rl")), "sft")
    if tool == "LLaMA-Factory":
        return _find_factory_method(settings)
    if tool == "ms-swift":
        return SWIFT_METHODS.get(str(find_swifts_kind(settings)), "sft")
    if find_distillation(settings) is not None:
        return "distill"
    if tool == "torchtune" and is_async(settings):
        return "grpo"
    if tool == "torchtune" and (settings.get("early_exit_loss") or settings.get("layer_dropout")):
        return "early_exit"
    loss = str(read_section(settings, "loss").get("_component_"))
    if tool == "torchtune" and loss.endswith("DPOLoss"):
        return "dpo"
    return "sft"


def find_swifts_kind(settings: ToolFile) -> str | None:
    """Returns the `rlhf_type` of an ms-swift file, dpo by default; None if it trains by none."""
    command = settings.get(COMMAND, "rlhf" if "rlhf_type" in settings else "sft")
    return str(settings.get("rlhf_type", "dpo")) if command == "rlhf" else None


def _find_factory_method(settings: ToolFile) -> str:
    """Returns our method for a LLaMA-Factory file, by its stage and its loss of preferences."""
    if settings.get("use_asft_loss"):
        return "distill"
    stage = settings.get("stage")
    if stage != "dpo":
        return {"kto": "kto", "rm": "reward"}.get(str(stage), "sft")
    loss = settings.get("pref_loss")
    return loss if loss in ("orpo", "simpo") else "dpo"


def find_masked_diffusion(settings: ToolFile) -> dict[str, Any] | None:
    """Returns Axolotl's section on training a causal model to predict masked tokens.

    Returns None if the file does not, or starts from a model that has been trained so.
    """
    section = read_section(settings, "diffusion_lm")
    if section.get("from_causal_lm"):
        return section
    plugins = str(settings.get("plugins", ""))
    if DIFFUSION_PLUGIN in plugins and not section:
        return read_section(settings, "diffusion")
    return None


def find_distillation(settings: ToolFile) -> dict[str, Any] | None:
    """Returns our keys for distillation; None if a file has no teacher, or a loss that we do not
    have.

    torchtune and Automodel minimize (1 - kd_ratio) x cross entropy + kd_ratio x KL divergence, as
    we do. LLaMA-Factory's ASFT is DFT + asft_alpha x KL divergence from the model before training.
    """
    if settings.get("use_asft_loss"):
        return _read_asft(settings)
    if not settings.get("teacher_model"):
        return None
    component = read_section(settings, "kd_loss").get("_component_")
    target = read_section(settings, "kd_loss_fn").get("_target_")
    name = str(component or target or "KDLoss").rsplit(".", 1)[-1]
    betas = (beta for start, beta in KL_DIVERGENCES.items() if name.startswith(start))
    beta = next(betas, None)
    temperature = read_section(settings, "kd_loss_fn").get("temperature", 1.0)
    alpha = convert_number(settings.get("kd_ratio", 0.5))
    if beta is None or temperature != 1 or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        return None
    return {"method": "distill", "distill_beta": beta, "distill_alpha": alpha}


def _read_asft(settings: ToolFile) -> dict[str, Any]:
    """Returns our keys for ASFT.

    Its loss is 1 + asft_alpha times ours, so max_grad_norm becomes as many times smaller.
    """
    weight = read_number("asft_alpha", settings.get("asft_alpha", 0.1), "0.1", least=0)
    max_norm = read_number("max_grad_norm", settings.get("max_grad_norm", 1.0) or 0, "1.0")
    name = "gradient_accumulation_steps"
    # Trainer does not divide the loss of a compute_loss_func by the number of micro-batches
    micro_batches = read_number(name, settings.get(name) or 1, "1", least=1)
    return {
        "method": "distill",
        "distill_beta": 0.0,
        "distill_alpha": round(weight / (1 + weight), 9),
        "token_loss": "dft",
        "teacher_model_name_or_path": settings.get("model_name_or_path"),
        "max_grad_norm": max_norm / (1 + weight) / micro_batches if max_norm else None,
    }


def _find_trl_method(settings: ToolFile, source: Path) -> str:
    """Returns our method for a TRL file, in which no key names it.

    It follows from the command, else from keys of one trainer alone, else from the name of the file
    or its folder (orpo/config.yaml).
    """
    command = settings.get(COMMAND)
    if command is not None:
        return COMMANDED_METHODS.get(str(command), str(command))
    name = _find_name(source, TRL_NAMES)
    is_of_pairs = name is not None and _list_online_signs(settings) == {"max_completion_length"}
    if is_online(settings) and not is_of_pairs:
        return "grpo"
    if settings.get("center_rewards_coefficient") is not None:
        return "reward"
    losses = _read_losses("TRL", settings)
    if "kto" in losses or "desirable_weight" in settings or "undesirable_weight" in settings:
        return "kto"
    if "simpo" in losses or "simpo_gamma" in settings:
        return "simpo"
    has_sign = any(key in settings for key in TRL_SIGNS)
    loss = settings.get("loss_type")
    names_sft_loss = "beta" not in settings and loss is not None and loss in SFT_LOSSES
    if not has_sign or names_sft_loss:
        if _find_name(source, ["reward"]):
            return "reward"
        return "sft"
    return name or "dpo"


def _find_name(source: Path, names: Sequence[str]) -> str | None:
    """Returns the first of `names` that is a word of the file's name, or the name of its folder.

    Returns None if there is none.
    """
    words = {source.resolve().parent.name.lower(), *re.split(r"[^a-z]+", source.stem.lower())}
    return next((name for name in names if name in words), None)


def find_unsupported_losses(tool: Tool, settings: ToolFile, source: Path) -> Iterator[Unsupported]:
    """Yields each loss of a preference or GRPO file that we do not compute: (evidence, missing
    capability, True since the file trains).
    """
    method = find_method(tool, settings, source)
    if method == "grpo":
        yield from find_unsupported_online(settings)
    if method in ("sft", "distill", "grpo", "reward", "masked_diffusion", "early_exit"):
        return
    losses = _read_losses(tool, settings)
    key = LOSS_KEYS.get(tool, "loss_type")
    known = (*PAIR_LOSSES, "sft", "kto", "orpo", "simpo")
    for name in losses:
        if name not in known:
            yield f"{key}: {name}", f"another loss ({name.upper()})", True
    compared = [name for name in losses if name != "sft"]
    if losses and not compared:
        yield f"{key}: sft", "another loss (the cross entropy of the chosen answers alone)", True
    if len(compared) > 1:
        yield f"{key}: {shorten(list(losses))}", "several losses at once", True
    elif any(losses[name] != 1 for name in compared):  # here sft alone has a weight, rpo_alpha
        weight_key = WEIGHT_KEYS.get(tool, "loss_weights")
        yield f"{weight_key}: {shorten(list(losses.values()))}", "a weight of the loss", True
    if "cpo_alpha" in settings and tool == "TRL" and "simpo" not in losses:
        yield f"cpo_alpha: {settings['cpo_alpha']}", "another loss (CPO)", True
    divergence = str(settings.get("f_divergence_type", "reverse_kl"))
    if divergence.lower() != "reverse_kl":
        yield f"f_divergence_type: {divergence}", f"another loss ({divergence.upper()})", True


def _read_losses(tool: Tool, settings: ToolFile) -> dict[str, Any]:
    """Reads the names of a file's losses with their weights: 1 if it has no weights, None if they
    cannot be assigned.

    >>> _read_losses("TRL", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]})
    {'sigmoid': 1.0, 'sft': 0.2}
    """
    weights = settings.get(WEIGHT_KEYS.get(tool, "loss_weights"))
    names = settings.get(LOSS_KEYS.get(tool, "loss_type")) or (["sigmoid"] if weights else [])
    names = names if isinstance(names, list) else [names]
    weights = weights or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [None] * len(names)
    return dict(zip(map(str, names), map(convert_number, weights), strict=True))


def adapt_method(method: str, settings: ToolFile, source: Path, conversion: Conversion) -> None:
    """Adds our `method` to the recipe, with what several keys of the file mean under it."""
    if METHODS[method].rows == "answers":
        _report_own_loss(settings, conversion)
    if method == "sft":
        _adapt_supervised(settings, conversion)
    elif method == "distill":
        _adapt_distillation(settings, conversion)
    elif method == "grpo":
        _adapt_online(settings, conversion)
    elif method == "reward":
        _adapt_reward(settings, source, conversion)
    elif method == "masked_diffusion":
        _adapt_masked_diffusion(settings, conversion)
    elif method == "early_exit":
        _adapt_early_exit(settings, conversion)
    else:
        _adapt_comparison(method, settings, source, conversion)


def _report_own_loss(settings: ToolFile, conversion: Conversion) -> None:
    """Reports a loss of torchtune's or Automodel's section that is no cross entropy by its name."""
    for section, key in (("loss", "_component_"), ("loss_fn", "_target_")):
        name = read_section(settings, section).get(key)
        if name and not CROSS_ENTROPIES.search(str(name)):
            note = "the cross entropy here"
            conversion.add_difference(f"{section}.{key}", name, note, "a loss of one's own")


def _adapt_supervised(settings: ToolFile, conversion: Conversion) -> None:
    """Adds the loss of supervised fine-tuning and, for TRL, which tokens of a row are trained."""
    _set_token_loss(settings, conversion)
    _drop_unused("sft", conversion)
    if conversion.tool != "TRL":
        return
    if settings.get("packing") and settings.get("packing_strategy") != "wrapped":
        shares = describe_shares(settings, "dataset_num_proc")
        conversion.remarks.append(PACKED_AT_A_TIME.format("a thousand", shares))
    masks_prompts = settings.get("completion_only_loss")
    marks_answers = settings.get("assistant_only_loss")
    if marks_answers:
        _train_marked_answers(conversion)
    if masks_prompts:
        conversion.recipe["assistant_only_loss"] = True
        conversion.add_remark("completion_only_loss", masks_prompts, COMPLETIONS_BREAK)
    elif masks_prompts is False:
        conversion.add_difference(
            "completion_only_loss", False, NOTES["PROMPTS_MASKED"].removeprefix("true; ")
        )
    elif not marks_answers:
        conversion.add_remark("completion_only_loss", None, COMPLETION_ALONE)
    for name in _read_losses("TRL", settings):
        if name not in map(str, SFT_LOSSES):
            note = "of supervised fine-tuning nll is the only one"
            conversion.add_difference("loss_type", name, note, f"another loss ({name.upper()})")


def _train_marked_answers(conversion: Conversion) -> None:
    """Trains what a template marks of a whole conversation, and reports TRL's own templates."""
    conversion.recipe["turns"] = "whole"
    if "chat_template" not in conversion.recipe:
        conversion.add_remark("assistant_only_loss", True, TEMPLATE_OF_TRL)


def _adapt_distillation(settings: ToolFile, conversion: Conversion) -> None:
    """Adds the keys of distillation."""
    conversion.recipe |= find_distillation(settings) or {}
    if settings.get("use_asft_loss"):
        conversion.add_remark("use_asft_loss", True, ASFT)


def _adapt_masked_diffusion(settings: ToolFile, conversion: Conversion) -> None:
    """Adds masked diffusion, and reports how Axolotl 0.21 differs (core/trainers/diffusion_lm)."""
    recipe = conversion.recipe
    section = find_masked_diffusion(settings) or {}
    method = "masked_diffusion"
    recipe["method"] = method
    recipe.pop("attn_implementation", None)  # our built-in attention looks in both directions
    _drop_unused(method, conversion)
    mask_id = section.get("mask_token_id")
    if mask_id is not None:
        recipe["mask_token"] = mask_id
        conversion.add_difference("mask_token_id", mask_id, OTHER_MASK)
    else:
        token = str(section.get("mask_token_str") or DIFFUSION_MASK)
        recipe["mask_token"] = token
        recipe["added_tokens"] = [*dict.fromkeys([*recipe.get("added_tokens", ()), token])]
        if recipe.get("use_peft"):
            conversion.add_difference("mask_token_str", token, UNTRAINED_MASK)
    if section.get("importance_weighting") is False:
        conversion.add_difference("importance_weighting", False, UNWEIGHTED)
    if section.get("generate_samples", True):
        conversion.add_difference("generate_samples", True, "no text is sampled while training")
    conversion.add_difference("method", method, UNMASKED)
    conversion.add_difference("method", method, ROWS_ALIKE)
    if recipe.get("packing"):
        conversion.add_difference("sample_packing", True, NOISE_OF_ROWS)
        if settings.get("pretraining_dataset"):
            conversion.add_difference("sample_packing", True, JOINED_DOCUMENTS)
            if settings.get("pretrain_multipack_attn") is not False:
                conversion.add_difference("sample_packing", True, PADDING_SEEN)


def _adapt_early_exit(settings: ToolFile, conversion: Conversion) -> None:
    """Adds early exits and layer dropout, and reports how torchtune 0.6.1 differs
    (dev/early_exit_finetune_distributed).
    """
    recipe = conversion.recipe
    recipe["method"] = "early_exit"
    _drop_unused("early_exit", conversion)
    exits = read_section(settings, "early_exit_loss")
    dropout = read_section(settings, "layer_dropout")
    conversion.remarks.append(DIVIDED_TWICE)
    if exits:
        curriculum = _read_component(exits.get("curriculum"))
        scale_fn = _read_component(exits.get("scale_fn", "sum_l_loss_scale"))
        recipe["exit_layers"] = _read_layers("early_exit_loss.layers", exits.get("layers", ":"))
        recipe["exit_scale"] = read_number("early_exit_loss.scale", exits.get("scale", 1.0), "1.0")
        for key, name, table in (
            ("exit_curriculum", curriculum, CURRICULA),
            ("exit_weights", scale_fn, EXIT_SCALES),
        ):
            if name in table:
                recipe[key] = table[name]
            else:
                note = "one of torchtune's own is expected"
                conversion.add_difference("early_exit_loss", name, note, "code of your own")
        conversion.add_difference("early_exit_loss.layers", exits.get("layers", ":"), BEFORE_LAYERS)
        if exits.get("include_last_layer") is False:
            conversion.add_difference("include_last_layer", False, OUTPUT_SCORED)
        if recipe.get("exit_curriculum") == "gradual":
            conversion.add_remark("curriculum", curriculum, "each exit comes a step later there")
    else:
        recipe["exit_layers"] = []
    if dropout:
        recipe["layer_dropout"] = read_number("layer_dropout.prob", dropout.get("prob", 0.0), "0.2")
        recipe["layer_dropout_layers"] = _read_layers(
            "layer_dropout.layers", dropout.get("layers", ":")
        )
        recipe["layer_dropout_schedule"] = dropout.get("layers_scale", "uniform")


def _read_component(name: Any) -> str:
    """Returns the last part of a dotted name."""
    return str(name).rpartition(".")[2]


def _read_layers(key: str, text: Any) -> str | list[int]:
    """Reads torchtune's layers: a list of numbers, or the text of a slice.

    Raises `WrongValue` for anything else.

    >>> _read_layers("layers", "8,12"), _read_layers("layers", "::4"), _read_layers("layers", 3)
    ([8, 12], '::4', [3])
    """
    if not re.fullmatch(rf"\d+(,\d+)*|{LAYER_SLICE}", str(text)):
        raise WrongValue.of_key(key, text, "a list of layers or a slice", '"::4"')
    return str(text) if ":" in str(text) else [int(part) for part in str(text).split(",")]


def _adapt_comparison(
    method: str, settings: ToolFile, source: Path, conversion: Conversion
) -> None:
    """Adds a method that compares answers (DPO and its kin) or rates them (KTO)."""
    recipe = conversion.recipe
    recipe["method"] = method
    _set_comparison_loss(method, settings, source, conversion)
    _report_trainer(method, settings, conversion)
    if conversion.tool in WITHOUT_DROPOUT and settings.get("disable_dropout", True):
        _stop_dropout(conversion)
    if settings.get("label_smoothing_factor") is not None and "label_smoothing" not in settings:
        # only the loss of transformers' Trainer reads it, and these trainers have other losses
        recipe.pop("label_smoothing", None)
        conversion.ignored.append("label_smoothing_factor")
    for key, value in PREFERENCE_DEFAULTS.get(conversion.tool, {}).items():
        recipe.setdefault(key, value)
    _drop_supervised_keys(method, conversion)


def _drop_supervised_keys(method: str, conversion: Conversion) -> None:
    """Drops the keys that have no effect where answers are compared or rated."""
    recipe = conversion.recipe
    recipe.pop("assistant_only_loss", None)  # the loss is of answers alone
    if recipe.get("packing") is not False and conversion.tool != "ms-swift":
        recipe.pop("packing", None)  # no other tool packs pairs
    if conversion.tool == "torchtune":
        # The header is alike in both answers, so that DPO's loss is the same with or without it.
        conversion.remarks = [line for line in conversion.remarks if line != HEADER_TRAINED]
    _drop_unused(method, conversion)


def _stop_dropout(conversion: Conversion) -> None:
    """Sets LoRA's dropout to 0; a remark says so if the file asks for some."""
    dropout = conversion.recipe.get("lora_dropout", 0)
    if dropout != 0:
        conversion.remarks.append(f"lora_dropout: {dropout}   ({NOTES['NO_DROPOUT']})")
    conversion.recipe["lora_dropout"] = 0.0


def _adapt_reward(settings: ToolFile, source: Path, conversion: Conversion) -> None:
    """Adds a reward model, and reports how the tool's trainer differs.

    TRL's trainer, which Axolotl uses too, has our loss and our head.
    """
    tool = conversion.tool
    recipe = conversion.recipe
    recipe["method"] = "reward"
    recipe.pop("overlength", None)  # the last token is scored, and a cut would remove it
    if tool == "LLaMA-Factory":
        conversion.add_difference("stage", "rm", VALUE_HEAD)
        conversion.add_remark("cutoff_len", recipe.get("max_length", 2048), WHOLE_PAIR)
    elif settings.get("disable_dropout", True):
        _stop_dropout(conversion)
    if tool == "Axolotl":
        conversion.add_remark("sequence_len", recipe.get("max_length", 512), CUT_PAIR)
    elif tool == "TRL":
        recipe.setdefault("learning_rate", 1e-4)
        trains_head = settings.get("lora_task_type") == "SEQ_CLS" or "score" in recipe.get(
            "modules_to_save", ()
        )
        if recipe.get("use_peft") and not trains_head:
            conversion.add_difference("lora_task_type", settings.get("lora_task_type"), FROZEN_HEAD)
        if COMMAND not in settings and settings.get("center_rewards_coefficient") is None:
            conversion.remarks.append(f"method: reward   ({NAMED_REWARD})")
    report_scored_text(settings, conversion)
    _drop_supervised_keys("reward", conversion)


def _set_comparison_loss(
    method: str, settings: ToolFile, source: Path, conversion: Conversion
) -> None:
    """Sets the loss of pairs, its weights, and a remark if the method DPO is only a guess."""
    tool = conversion.tool
    recipe = conversion.recipe
    losses = _read_losses(tool, settings)
    pair_loss = next((name for name in losses if name in PAIR_LOSSES), None)
    if method == "dpo" and (pair_loss or settings.get("rl") == "ipo"):
        recipe["loss_type"] = pair_loss or "ipo"
    if losses.get("sft"):  # a weight of 0 adds nothing
        recipe["rpo_alpha"] = losses["sft"]
    if tool == "Axolotl" and method == "orpo" and settings.get("orpo_alpha") is not None:
        recipe.setdefault("beta", convert_number(settings["orpo_alpha"]))
    is_guessed = not losses and COMMAND not in settings and _find_name(source, TRL_NAMES) is None
    if tool == "TRL" and method == "dpo" and is_guessed:
        conversion.remarks.append(f"method: dpo   ({NOT_SAID})")


def _set_token_loss(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the loss of a token, DFT or EAFT, by the tool's switch or TRL's loss_type."""
    switches = LABEL_LOSSES.get(conversion.tool, ())
    name = next((key for key in switches if settings.get(key)), "")
    if not name and conversion.tool == "TRL" and settings.get("loss_type") == "dft":
        name = "dft"
    if name:  # use_dft_loss -> dft
        conversion.recipe["token_loss"] = re.sub("^(use|enable)_", "", name).removesuffix("_loss")
    if "eaft" not in name:
        conversion.recipe.pop("eaft_alpha", None)
    elif conversion.tool == "Axolotl":
        _scale_eaft(conversion)
    if "eaft" in name and settings.get("eaft_k") not in (None, 20):
        note = "the entropy is of the 20 likeliest tokens"
        conversion.add_difference("eaft_k", settings["eaft_k"], note, "another loss (EAFT)")


def _scale_eaft(conversion: Conversion) -> None:
    """Divides max_grad_norm by 3 ** eaft_alpha: Axolotl's loss is as many times ours.

    Its monkeypatch/loss/eaft.py does not divide the entropy by 3.
    """
    recipe = conversion.recipe
    alpha = read_number("eaft_alpha", recipe.get("eaft_alpha", 1.0), "1.0", 0)
    max_norm = read_number("max_grad_norm", recipe.get("max_grad_norm", 1.0) or 0, "1.0", 0)
    recipe["max_grad_norm"] = max_norm / 3**alpha if max_norm else None
    conversion.remarks.append(f"use_eaft: true   ({UNDIVIDED})")


# compute_loss of TRL's DPOTrainer, by whose example ms-swift computes it too
CHOSEN_BY_MICRO_BATCH = (
    "rpo_alpha: the cross entropy of the chosen answers is a mean of each micro-batch there, which "
    "count alike; here a mean over the whole step"
)


def _report_trainer(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports what the tool's trainer for `method` does otherwise."""
    if conversion.tool == "LLaMA-Factory":
        _report_factorys_trainer(method, settings, conversion)
    elif method == "dpo" and conversion.recipe.get("rpo_alpha"):
        conversion.remarks.append(CHOSEN_BY_MICRO_BATCH)
    if conversion.tool in ("TRL", "Axolotl"):
        _report_trls_trainer(method, settings, conversion)
    if conversion.tool == "ms-swift":
        _report_swifts_trainer(method, settings, conversion)
    if method == "kto":
        has_micro_batches = conversion.tool in ("LLaMA-Factory", "ms-swift")
        note = KTO_OF_MICRO_BATCHES if has_micro_batches else KTO_ROWS
        conversion.remarks.append(f"kto   ({note})")
        _report_order(settings, conversion)
    if settings.get("truncation_mode") == "keep_end":
        note = "a side of over max_length tokens loses its end here"
        conversion.add_difference("truncation_mode", "keep_end", note)
    # torchtune's reference model
    reference = read_section(settings, "ref_checkpointer").get("checkpoint_dir")
    if reference and reference != read_section(settings, "checkpointer").get("checkpoint_dir"):
        note = "the reference is the model before training"
        conversion.add_difference(
            "ref_checkpointer.checkpoint_dir", reference, note, "another reference model"
        )


def _report_order(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that rated answers are trained on in the order of their rows there.

    TRL's trainer does not shuffle them by default. Axolotl shuffles the rows before it, unless
    shuffle_merged_datasets is false.
    """
    if conversion.tool == "TRL" and settings.get("train_sampling_strategy") is None:
        conversion.add_difference("train_sampling_strategy", None, IN_ORDER)
    if conversion.tool == "Axolotl" and settings.get("shuffle_merged_datasets") is False:
        conversion.add_difference("shuffle_merged_datasets", False, IN_ORDER)


def _report_factorys_trainer(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports what LLaMA-Factory's trainer for `method` does otherwise."""
    pair_loss = settings.get("pref_loss") or "sigmoid"
    if method == "dpo" and pair_loss != "sigmoid":
        sigmoids = SIGMOID_OF_MEANS if pair_loss == "ipo" else ALWAYS_SIGMOID
        conversion.add_difference("pref_loss", pair_loss, sigmoids)
    if method == "orpo":
        conversion.remarks.append(f"pref_loss: orpo   ({NOTES['MEAN_OF_MEANS']})")
    if settings.get("pref_ftx") and method != "dpo":
        # the difference takes the place of the remark on the conversion of pref_ftx
        conversion.remarks = [
            line for line in conversion.remarks if not line.startswith("pref_ftx: ")
        ]
        conversion.add_difference("pref_ftx", settings["pref_ftx"], NO_CROSS_ENTROPY)


# PackingDataset of ms-swift's dataset/packing.py adds the lengths of a row's two answers, and its
# trainers take the mean of a micro-batch, whatever that holds. {}: those answers.
PACKED_BY_SUM = (
    "a packed row holds max_length tokens there, counting {}; twice as many here: about half the "
    "steps, each on twice the rows; and a micro-batch's mean counts alike there, however many rows "
    "it has, each row here"
)
# method of ms-swift that packs -> the two answers of a row
PACKED_ANSWERS = {
    "dpo": "both answers of a pair",
    "kto": "a rated answer and the one of its KL term",
}


def _report_swifts_trainer(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what ms-swift's trainer for `method` does otherwise."""
    recipe = conversion.recipe
    recipe.pop("turns", None)  # of supervised fine-tuning
    scale = settings.get("loss_scale")
    counts_all = method == "orpo" if scale is None else "last_round" not in str(scale)
    if counts_all:
        conversion.add_difference("loss_scale", scale, ANSWERS_OF_PROMPTS)
    if method == "simpo":
        recipe.setdefault("beta", 2.0 if find_swifts_kind(settings) == "simpo" else 0.1)
        recipe.setdefault("simpo_gamma", 1.0)
        _report_simpo(settings, conversion)
    if method == "orpo":
        conversion.add_remark("rlhf_type", "orpo", NOTES["MEAN_OF_MICRO_BATCHES"])
    if recipe.get("packing") and method in PACKED_ANSWERS:
        conversion.add_difference("packing", True, PACKED_BY_SUM.format(PACKED_ANSWERS[method]))


def _report_simpo(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what TRL's CPOTrainer, which ms-swift and Axolotl use too, adds to SimPO's loss."""
    alpha = settings.get("cpo_alpha", 1.0)
    if alpha != 0:
        conversion.add_difference("cpo_alpha", alpha, CPO_SIMPO)
    smoothing = settings.get("label_smoothing")
    if smoothing and conversion.tool != "Axolotl":  # which has no such key
        conversion.add_difference("label_smoothing", smoothing, PAIRS_SMOOTHED)


def _report_trls_trainer(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports what TRL's trainer for `method`, which Axolotl uses too, does otherwise."""
    is_axolotl = conversion.tool == "Axolotl"
    if method == "simpo":
        _report_simpo(settings, conversion)
    if method == "orpo":
        conversion.add_difference("rl" if is_axolotl else "method", "orpo", WHOLE_ROW)
    smoothing = "dpo_label_smoothing" if is_axolotl else "label_smoothing"
    if method == "dpo" and settings.get(smoothing):
        conversion.add_difference(smoothing, settings[smoothing], SMOOTHED_BEFORE)
    strategy = settings.get("excess_length_strategy")
    if is_axolotl and method in EXPERIMENTAL_METHODS and str(strategy).lower() == "truncate":
        conversion.add_difference("excess_length_strategy", strategy, SLICED_AGAIN)
    if is_axolotl:
        return
    if method in (*EXPERIMENTAL_METHODS, "kto"):
        _report_cut_parts(method, settings, conversion)
    elif settings.get("max_prompt_length") is None:
        conversion.add_remark("max_prompt_length", None, PROMPTS_WERE_CUT)
    if method == "dpo" and settings.get("truncation_mode") is None:
        _report_cut_sides(settings, conversion)


def _report_cut_sides(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that TRL before 0.29 cuts the beginning of a long side by default.

    Only a file for such a version has max_prompt_length: then it is a difference, else a remark.
    """
    if settings.get("max_prompt_length") is None:
        conversion.add_remark("truncation_mode", None, SIDES_WERE_CUT)
    else:
        conversion.add_difference("truncation_mode", None, SIDES_WERE_CUT)


def _report_cut_parts(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports how TRL's ORPO, SimPO and KTO trainers cut a row: prompt and answers apart.

    Only a file for an older version has max_prompt_length; the newer KTO trainer cuts as we do.
    """
    length = convert_number(settings.get("max_length", DEFAULTS["TRL"]["max_length"]))
    if length is None:
        length = LENGTH_FOR_NULL
        if method != "kto":  # newer KTO trainers cut nothing
            conversion.recipe["max_length"] = length
    if settings.get("max_completion_length"):  # of models with an encoder alone
        conversion.differences = [
            line for line in conversion.differences if ANSWER_CUT_ALONE not in line
        ]
        conversion.ignored.append("max_completion_length")
    if not isinstance(length, int):
        return
    asked = settings.get("max_prompt_length")
    prompt = read_number("max_prompt_length", asked or PROMPT_TOKENS, str(PROMPT_TOKENS), 1)
    end = "first" if settings.get("truncation_mode") == "keep_start" else "last"
    parts = CUT_BY_PARTS.format(end, prompt, length - prompt)
    if asked:
        conversion.differences = [
            line for line in conversion.differences if PROMPT_CUT_ALONE not in line
        ]
        note = CUT_BY_PARTS_THERE.format(length, parts)
        conversion.add_difference("max_prompt_length", asked, note)
    elif method == "kto":
        note = WAS_CUT_BY_PARTS.format(length, parts)
        conversion.add_remark("max_length", settings.get("max_length", length), note)
    else:
        note = ANSWERS_SLICED.format(length, parts)
        conversion.add_difference("max_length", length, note)


def _drop_unused(method: str, conversion: Conversion) -> None:
    """Drops the keys of other methods than `method`, which have no effect there either."""
    of_other_methods = keys_of(Method).keys() - {"method", *METHODS[method].keys}
    for key in [key for key in conversion.recipe if key in of_other_methods]:
        del conversion.recipe[key]
        conversion.ignored.append(key)
    if "label_smoothing" not in METHODS[method].keys and conversion.recipe.pop(
        "label_smoothing", None
    ):
        conversion.ignored.append("label_smoothing")


def is_online(settings: ToolFile) -> bool:
    """Whether a TRL file is for its GRPO trainer.

    Older preference trainers have max_completion_length too, beside keys or losses of their own.
    """
    signs = _list_online_signs(settings)
    compares = any(key in settings for key in PAIR_SIGNS) or any(
        name in PAIR_LOSSES or name in OTHER_PAIR_LOSSES for name in _read_losses("TRL", settings)
    )
    return bool(signs) and not (compares and signs == {"max_completion_length"})


def _list_online_signs(settings: ToolFile) -> set[str]:
    """Returns the keys of a TRL file that its GRPO trainer has, and its SFT trainer has not."""
    return {key for key in GRPO_SIGNS if key in settings}


def find_unsupported_online(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields a policy loss that we do not compute, and a model as reward."""
    loss = str(settings.get("loss_type", "dapo"))
    if loss not in (*POLICY_LOSSES, "bnpo"):
        yield f"loss_type: {loss}", f"another loss ({loss.upper()})", True
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if settings.get(key):
            yield f"{key}: {settings[key]}", "a reward model", True


def _adapt_online(settings: ToolFile, conversion: Conversion) -> None:
    """Adds GRPO, and what several keys of a GRPO file mean together."""
    recipe = conversion.recipe
    recipe["method"] = "grpo"
    dropout = recipe.get("lora_dropout", TRL_DROPOUT)
    has_dropout = recipe.get("use_peft") and dropout and not settings.get("disable_dropout")
    if conversion.tool == "TRL" and has_dropout:
        conversion.add_difference("lora_dropout", dropout, DROPOUT_ONLINE)
    recipe["lora_dropout"] = 0.0
    recipe.setdefault("learning_rate", 1e-6)
    recipe.pop("packing", None)  # completions are packed here, which does not change the loss
    if settings.get("top_k") not in (None, 0, -1):
        conversion.add_difference("top_k", settings["top_k"], TRUNCATED)
    if conversion.tool == "torchtune":
        adapt_async(settings, conversion)
    else:
        _adapt_trls_online(settings, conversion)
    _drop_unused("grpo", conversion)


def _adapt_trls_online(settings: ToolFile, conversion: Conversion) -> None:
    """Adds what several keys of TRL's GRPOTrainer or AsyncGRPOTrainer mean together."""
    recipe = conversion.recipe
    _set_policy_loss(settings, conversion)
    is_async_trainer = "max_staleness" in settings  # it samples on a vLLM server alone
    if (
        not is_async_trainer
        and recipe.get("beta")
        and settings.get("use_bias_correction_kl") is None
    ):
        conversion.add_remark("beta", recipe["beta"], KL_TIMES_RATIO)
    _set_lengths(settings, conversion)
    _set_sampled_batch(settings, conversion)
    aggregation = settings.get("multi_objective_aggregation", SUMMED)
    if aggregation != SUMMED:
        note = "rewards are summed, and then normalized"
        conversion.add_difference(
            "multi_objective_aggregation", aggregation, note, "normalizing each reward"
        )
    _add_rewards(settings.get("reward_funcs") or [], conversion)
    iterations = settings.get("max_tool_calling_iterations")
    if iterations:
        advice = (
            "name your functions, such as my_tools.py:multiply, and set "
            f"max_tool_calling_iterations: {iterations}"
        )
        conversion.to_do.append(f"tools: they have no key there; {advice}")
    if is_async_trainer or (settings.get("use_vllm") and settings.get("vllm_mode") == "server"):
        recipe |= _read_server(settings, has_correction=not is_async_trainer)
        address = recipe["vllm_server_base_url"]
        conversion.to_do.append(
            f"vllm_server_base_url: start the server of {address} as docs/online.md says"
        )


def _set_policy_loss(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the policy loss, and what rewards are divided by (scale_rewards)."""
    recipe = conversion.recipe
    loss = settings.get("loss_type")
    if loss == "bnpo":
        recipe["loss_type"] = "dapo"
        conversion.remarks.append(f"loss_type: bnpo   ({LOCAL_MEAN})")
    elif loss:
        recipe["loss_type"] = loss
    if loss == "cispo":
        _set_largest_ratio(settings, conversion)
    scale = settings.get("scale_rewards", "group")
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if not isinstance(scale, str):
        raise WrongValue.of_key("scale_rewards", scale, "one of group, batch and none", "group")
    recipe["scale_rewards"] = scale


def _set_largest_ratio(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the largest ratio of CISPO; one below 1, which our reader refuses, is reported."""
    recipe = conversion.recipe
    recipe.pop("epsilon", None)
    largest = settings.get("epsilon_high")
    if largest is None:
        largest = settings.get("epsilon", TRL_EPSILON)
    if read_number("epsilon_high", largest, str(LARGEST_RATIO)) < 1:
        recipe["epsilon_high"] = LARGEST_RATIO
        note = (
            f"the weight of nearly every token there, for a ratio is near 1; up to {LARGEST_RATIO} "
            "here"
        )
        conversion.add_difference("epsilon_high", largest, note)


def _set_lengths(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the length of a completion, and max_length: a prompt and its completion together."""
    key = "max_completion_length"
    is_async_trainer = "max_staleness" in settings
    default = COMPLETION_TOKENS_AHEAD if is_async_trainer else COMPLETION_TOKENS
    completion = read_number(key, settings.get(key, default), str(default), 1)
    if key not in settings and not is_async_trainer:
        conversion.add_remark(key, None, LONGER_SINCE)
    max_prompt = settings.get("max_prompt_length") or PROMPT_TOKENS
    prompt = read_number("max_prompt_length", max_prompt, str(PROMPT_TOKENS), 1)
    conversion.recipe["max_completion_length"] = completion
    conversion.recipe["max_length"] = completion + prompt
    note = f"prompts of over {prompt} tokens are dropped here"
    conversion.remarks.append(f"max_length: {completion + prompt}   ({note})")


def _set_sampled_batch(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the prompts of a step, and the steps that share a generation.

    TRL counts both in completions, or micro-batches of them, on one process.
    """
    recipe = conversion.recipe
    completions = _read_count(settings, "per_device_train_batch_size", 8)
    micro_batches = _read_count(settings, "gradient_accumulation_steps", 1)
    generations = _read_count(settings, "num_generations", 8)
    recipe.pop("gradient_accumulation_steps", None)
    recipe["global_batch_size"] = max(1, completions * micro_batches // generations)
    per_process = (
        f"{completions} x {micro_batches} completions, {generations} of each prompt, on one "
        "process there"
    )
    remark = (
        f"global_batch_size: {recipe['global_batch_size']}   ({per_process}; times the processes)"
    )
    conversion.remarks.append(remark)
    generated = int(
        read_number("generation_batch_size", settings.get("generation_batch_size") or 0, "8", 0)
    )
    batches_per_generation = int(
        read_number("steps_per_generation", settings.get("steps_per_generation") or 0, "8", 0)
    )
    batches_per_generation = batches_per_generation or generated // completions
    if batches_per_generation > micro_batches:
        recipe["steps_per_generation"] = batches_per_generation // micro_batches
        loss = settings.get("loss_type", "dapo")
        if loss in ("dapo", "cispo"):
            conversion.remarks.append(MEAN_OF_GENERATION.format(loss))


def _read_count(settings: ToolFile, key: str, default: int) -> int:
    """Reads a number of at least 1, rounded down. Raises `WrongValue` for another value."""
    return int(read_number(key, settings.get(key, default), str(default), 1))


def _read_server(settings: ToolFile, *, has_correction: bool) -> dict[str, Any]:
    """Returns our keys for a vLLM server that samples, and for the correction of its probabilities.

    `has_correction`: whether TRL's trainer corrects them at all.
    """
    host = str(settings.get("vllm_server_host", "0.0.0.0")).replace("0.0.0.0", "localhost")
    address = (
        settings.get("vllm_server_base_url")
        or f"http://{host}:{settings.get('vllm_server_port', 8000)}"
    )
    keys: dict[str, Any] = {"vllm_server_base_url": address}
    if "vllm_server_timeout" in settings:
        keys["vllm_server_timeout"] = float(
            read_number("vllm_server_timeout", settings["vllm_server_timeout"], "240")
        )
    if not (has_correction and settings.get("vllm_importance_sampling_correction", True)):
        return keys
    keys["importance_sampling_correction"] = settings.get(
        "vllm_importance_sampling_mode", "sequence_mask"
    )
    for bound, names in SAMPLING_BOUNDS.items():
        values = (settings.get(f"vllm_importance_sampling_{name}") for name in names)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            keys[f"importance_sampling_{bound}"] = value
    return keys


def _add_rewards(names: Any, conversion: Conversion) -> None:
    """Adds the rewards of reward_funcs; if there are none, naming them is left to do.

    Raises `WrongValue` if `names` is neither a name nor a list.
    """
    if not isinstance(names, list | str):
        raise WrongValue.of_key("reward_funcs", names, "a list of names", "[think_format_reward]")
    names = [names] if isinstance(names, str) else names
    rewards = [_name_reward(name, conversion) for name in names]
    if "soft_overlong_punishment" in rewards:
        longest = conversion.recipe["max_completion_length"]
        conversion.recipe["soft_punish_cache"] = min(TRL_PUNISHMENT["soft_punish_cache"], longest)
        if longest != TRL_PUNISHMENT["max_completion_length"]:
            note = (
                f"up to 1280 tokens there, whatever max_completion_length is; up to {longest} here"
            )
            conversion.add_difference("reward_funcs", "get_soft_overlong_punishment", note)
    if rewards:
        conversion.recipe["rewards"] = rewards
    else:
        conversion.to_do.append(
            "rewards: the file names none; name your functions, such as my_rewards.py:right"
        )


def _name_reward(name: Any, conversion: Conversion) -> str:
    """Returns our name for one of reward_funcs: a shipped reward, or a function of a file.

    `my.rewards.right` becomes `my/rewards.py:right`. A reward that only TRL ships becomes a
    function of my_rewards.py, which is left to write.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = str(name).rpartition(".")
    if module:
        return f"{module.replace('.', '/')}.py:{function}"
    conversion.to_do.append(
        f"reward_funcs: {name}: write my_rewards.py: from trl.rewards import {name}"
    )
    return f"my_rewards.py:{function}"


# torchao's quantizers -> our scheme, and the default size of a group
QUANTIZERS: Mapping[str, tuple[str, int | None]] = {
    "Int8DynActInt4WeightQATQuantizer": ("int8-int4", 256),
    "Int4WeightOnlyQATQuantizer": ("int4-packed", 256),
    "Float8ActInt4WeightQATQuantizer": ("fp8-int4", 128),
}
# quantizer_type of Automodel's QATConfig, its default first -> torchao's quantizer
QUANTIZER_TYPES = {
    "int8_dynact_int4weight": "Int8DynActInt4WeightQATQuantizer",
    "int4_weight_only": "Int4WeightOnlyQATQuantizer",
}
# torchao's classes of these names, Automodel's create_quantizer, and Axolotl's _make_qat_config.
# Here a scale has the dtype of what it scales, as in exported files. {}: what is rounded.
SCALED_IN_FP32 = (
    "the scales of rounded {} are in float32 there, in the run's 16 bits here: some numbers are "
    "rounded to a neighboring step"
)
# Axolotl's dtypes of inputs and weights -> our scheme, and the default size of a group
QAT_DTYPES: Mapping[tuple[str, str], tuple[str, int | None]] = {
    ("int8", "int4"): ("int8-int4", 32),
    ("None", "int4"): ("int4-packed", 128),
    ("float8_e4m3fn", "int4"): ("fp8-int4", 128),
    ("float8_e4m3fn", "float8_e4m3fn"): ("fp8-fp8", None),
    ("nvfp4", "nvfp4"): ("nvfp4", 16),
    ("mxfp4", "mxfp4"): ("mxfp4", 32),
}
CUTTING_PLUGIN = "CutCrossEntropyPlugin"  # turns on cut_cross_entropy
HEAD_ROUNDED = "the output head is rounded there too, where its inputs divide into groups"
# torchtune's models whose head is the embedding (TiedLinear), which no quantizer replaces
TIED_IN_TORCHTUNE = re.compile(r"gemma|llama3_2\.|qwen2(_5)?_(0_5b|1_5b|3b)|qwen3_(0_6b|1_7b|4b)")
# _bf16_activations_forward of torchao's Int4WeightFakeQuantizer, by Axolotl's _make_qat_config
MIN_TO_MAX = (
    "the weights of a group are rounded to 16 steps from its smallest to its largest there, to "
    "steps on both sides of 0 here"
)
EMBEDDING_ROUNDED = "the weights of the embedding are rounded too there, not here"
ADAPTER_APART = (
    "the base alone is rounded there, beside its adapter; here base and adapter together, as they "
    "are exported"
)
# torchao's layers of MXFP4 and NVFP4 have no quantizers for Axolotl's toggle_fake_quant to turn on
# late. Of the others those of inputs in 8 bits alone, IntxFakeQuantizer, have an `enabled` to set
# in torchao 0.17, which Axolotl 0.18 and 0.19 require.
INPUTS_PUT_OFF = (
    "puts off the rounding of inputs alone there, by torchao 0.17, which is required: weights are "
    "rounded from the first step; here both are"
)
FROM_THE_START = "has no effect on this rounding there, which begins with the first step, as here"
# the backward of torchao's prototype/qat/nvfp4.py and mx.py, which returns None for the bias
BIASES_FIXED = "the biases of rounded layers are not trained there; they are here"
# swap_lora_linear_with_qat of torchtune
ADAPTED_ALONE = (
    "layers that get no adapter are not rounded there; here all linear layers but the output head"
)


def cuts_loss(settings: ToolFile) -> bool:
    """Whether Axolotl computes the loss in parts, by cut_cross_entropy or its plugin."""
    is_on = CUTTING_PLUGIN in str(settings.get("plugins"))
    return bool(settings.get("cut_cross_entropy", is_on))


def asks_for_rounding(settings: ToolFile) -> bool:
    """Whether a training file asks for quantization-aware training (QAT)."""
    qat = settings.get("qat")
    # the section of Automodel, which has qat_config, is off by default
    is_on = isinstance(qat, dict) and qat.get("enabled", "qat_config" not in qat)
    return bool(is_on or ("dataset" in settings and isinstance(settings.get("quantizer"), dict)))


def find_rounding(settings: ToolFile) -> Mapping[str, Any] | None:
    """Returns our keys for QAT; None if a file asks for no QAT, or for a scheme that we refuse.

    >>> find_rounding({"qat": {"activation_dtype": "int8", "weight_dtype": "int4"}})
    {'quantization_aware_training': 'int8-int4', 'qat_group_size': 32}
    """
    if settings.get("use_onebitllms"):
        return {"quantization_aware_training": "int8-ternary", "qat_group_size": None}
    if not asks_for_rounding(settings):
        return None
    qat = settings.get("qat") or {}
    quantizer = settings.get("quantizer") or qat.get("quantizer") or qat.get("qat_config") or {}
    name = str(quantizer.get("_component_") or quantizer.get("_target_") or "").rsplit(".", 1)[-1]
    if name == "QATConfig":
        default_type = next(iter(QUANTIZER_TYPES))
        name = QUANTIZER_TYPES.get(quantizer.get("quantizer_type", default_type), "")
    inputs = str(qat.get("activation_dtype")).removeprefix("torch.")
    weights = str(qat.get("weight_dtype")).removeprefix("torch.")
    scheme, default_group = QUANTIZERS.get(name) or QAT_DTYPES.get((inputs, weights), ("", None))
    if scheme not in SCHEMES or SCHEMES[scheme].refused:
        return None
    keys: dict[str, Any] = {"quantization_aware_training": scheme}
    keys["qat_group_size"] = quantizer.get("groupsize") or qat.get("group_size") or default_group
    delay = settings.get("fake_quant_after_n_steps") or qat.get("fake_quant_after_n_steps")
    if delay:
        keys["fake_quant_after_n_steps"] = delay
    return keys


def adapt_rounding(settings: ToolFile, conversion: Conversion) -> None:
    """Adds quantization-aware training, and reports what the tool rounds otherwise."""
    keys = find_rounding(settings)
    if keys is None:
        return
    conversion.recipe |= keys
    if settings.get("use_onebitllms"):
        return
    key = "qat" if "qat" in settings else "quantizer"
    _compare_scales(key, settings, conversion)
    is_axolotl = conversion.tool == "Axolotl"
    # _setup_qat of Automodel's recipes/llm/train_ft.py gives torchao's function that turns a layer
    # off the whole model, which is no such layer
    if is_axolotl or conversion.tool == "Automodel":
        _drop_delay(conversion)
    if is_axolotl and SCHEMES[keys["quantization_aware_training"]].is_float:
        _compare_biases(settings, conversion)
    if is_axolotl and keys["quantization_aware_training"] == "int8-int4":
        conversion.add_difference(key, settings[key], MIN_TO_MAX)
        # torchao refuses an embedding under the other schemes
        if settings[key].get("quantize_embedding"):
            conversion.add_difference("qat.quantize_embedding", True, EMBEDDING_ROUNDED)
    model = read_section(settings, "model")
    component = str(model.get("_component_"))
    is_torchtune_lora = "lora" in component
    # These losses read the head's weight without calling the head, which is then not rounded.
    has_fused_loss = settings.get("liger_fused_linear_cross_entropy") or cuts_loss(settings)
    if is_torchtune_lora:
        rounds_head = model.get("apply_lora_to_output")
    else:
        rounds_head = not has_fused_loss
    if rounds_head and not TIED_IN_TORCHTUNE.search(component):
        conversion.add_difference(key, settings[key], HEAD_ROUNDED)
    if settings.get("adapter") or settings.get("peft") or is_torchtune_lora:
        conversion.add_difference(key, settings[key], ADAPTER_APART)
    adapted = conversion.recipe.get("lora_target_modules") or ()
    if is_torchtune_lora and not LINEAR_LAYERS.keys() <= set(adapted):
        conversion.add_difference(key, settings[key], ADAPTED_ALONE)


def _compare_scales(key: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports which scales of int8-int4 are in float32 there and in the run's 16 bits here."""
    scheme = conversion.recipe["quantization_aware_training"]
    is_in_fp32 = "32" in str(settings.get("dtype")) or settings.get("bf16") is False
    if scheme != "int8-int4" or is_in_fp32:
        return
    config = read_section(read_section(settings, "qat"), "qat_config")
    default = "float32" if conversion.tool == "torchtune" else "bfloat16"
    precision = config.get("scales_precision", default)
    scaled = "weights and inputs" if "32" in str(precision) else "inputs"
    conversion.add_difference(key, settings[key], SCALED_IN_FP32.format(scaled))


def _drop_delay(conversion: Conversion) -> None:
    """Leaves out the key that puts rounding off, where the tool rounds from the first step.

    Axolotl's int8-int4 rounds weights alone so.
    """
    key = "fake_quant_after_n_steps"
    delay = conversion.recipe.pop(key, None)
    scheme = conversion.recipe["quantization_aware_training"]
    if delay is not None and (conversion.tool, scheme) == ("Axolotl", "int8-int4"):
        conversion.add_difference(key, delay, INPUTS_PUT_OFF)
    elif delay is not None:
        conversion.add_remark(key, delay, FROM_THE_START)


def _compare_biases(settings: ToolFile, conversion: Conversion) -> None:
    """Reports biases that torchao's layers, which round to MXFP4 or NVFP4, do not train."""
    has_biases = find_biased_layers(guess_family(name_model(settings)) or "")
    if has_biases and not settings.get("adapter"):
        conversion.add_difference("qat", settings["qat"], BIASES_FIXED)
