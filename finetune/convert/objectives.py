"""What a file trains by: its method, the losses of preferences, TRL's GRPO and its rewards, and
rounding (QAT).
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
from finetune.convert.chat_templates import compare_scored_turns
from finetune.convert.command_line import COMMAND
from finetune.convert.counterparts import NOTES, Tool, ToolFile
from finetune.convert.foreign_values import WrongValue, convert_number, read_number, shorten
from finetune.convert.model_names import Unsupported, guess_family, name_model
from finetune.convert.shared import IN_ORDER, PACKED_AT_A_TIME, describe_shares
from finetune.convert.value_conversion import LINEAR_LAYERS, Conversion, read_section

AXOLOTL_METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
# The key that names the losses of preferences, and the one for their weights, where it is not
# TRL's.
LOSS_KEYS: Mapping[str, str] = {"Axolotl": "dpo_loss_type", "LLaMA-Factory": "pref_loss"}
WEIGHT_KEYS: Mapping[str, str] = {"Axolotl": "dpo_loss_weights", "LLaMA-Factory": ""}
PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero")
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
)
SFT_LOSSES = (None, "nll", "chunked_nll", "dft")
TRL_NAMES = ("kto", "orpo", "dpo", "simpo")  # of trainers, in the names of files and folders
# of TRL's command line, and in the names of its files
REWARD_COMMANDS = ("reward", "reward_modeling")
# Where our default differs, by what the tool's own preference trainer takes.
PREFERENCE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"learning_rate": 1e-6},
    "Axolotl": {"overlength": "drop"},
}
KL_DIVERGENCES = {"ForwardKL": 0.0, "KDLoss": 0.0, "ReverseKL": 1.0}  # -> distill_beta
# disable_dropout is the default of TRL's trainers
WITHOUT_DROPOUT = ("TRL", "Axolotl", "LLaMA-Factory")
PROMPTS_WERE_CUT = (
    "a prompt of over 512 tokens lost its beginning in TRL 0.21; not in 1.0 and later, nor here"
)
# truncation_mode's default in TRL's DPO until 0.29, which knows max_prompt_length no more
SIDES_WERE_CUT = (
    "by default a side of over max_length tokens loses its beginning in the versions that know "
    "max_prompt_length, before 0.29; its end here"
)
# since TRL 0.29, which is that of Axolotl 0.21
SMOOTHED_BEFORE = "no effect on this loss there since TRL 0.29; it smooths here, as in 0.28"
# compute_preference_loss of its CustomDPOTrainer, which gives TRL's dpo_loss no loss_type
ALWAYS_SIGMOID = (
    "sigmoid's loss there under TRL 0.20 and later, which take the name as an argument that is not "
    "given; as named here, and there under TRL 0.19"
)
# completion_only_loss: null of its SFTConfig
COMPLETION_ALONE = (
    "where prompt and completion are two lists of messages, the completion alone is trained there, "
    "both here: for such rows set assistant_only_loss: true"
)
WHOLE_ROW = (
    "the cross entropy is over prompt and answer there, the mean of each micro-batch counting "
    "alike; over the answer here, a mean over the whole step"
)
CPO_SIMPO = "the cross entropy of the chosen answers is added there (CPO-SimPO); not here"
NO_CROSS_ENTROPY = "the cross entropy of the wanted answers is added there; not here"
KTO_ROWS = (
    "the KL term is estimated on the answers of a batch there, here on each row's successor in the "
    "data"
)
# kl_response of LLaMA-Factory's data/processor/feedback.py
KTO_ROWS_OF_FACTORY = (
    "the KL term is that of a micro-batch there, estimated on the answer before each row's in the "
    "data; that of the whole step here, on the next one to another prompt"
)
ASFT = (
    "the loss is divided by 1 + asft_alpha here, and so is max_grad_norm: AdamW's steps are the "
    "same; a mean over all tokens of a step here, the sum of each micro-batch's mean there, for "
    "which max_grad_norm is divided by gradient_accumulation_steps too"
)
# Of reward models.
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
# each tool's own -> token_loss
LABEL_LOSSES: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("use_dft", "use_eaft"),
    "LLaMA-Factory": ("use_dft_loss", "use_eaft_loss"),
    "ms-swift": ("enable_dft_loss",),
}
GRPO_SIGNS = ("reward_funcs", "num_generations", "max_completion_length", "steps_per_generation")
PROMPT_TOKENS = 512  # of max_prompt_length in TRL, until it bounded prompts no more
# of max_completion_length: of GRPOConfig until 1.9, and of AsyncGRPOConfig
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
TRL_DROPOUT = 0.05
# TRL's rewards by the names that its command knows: ours, or a function to import.
REWARDS = {
    "think_format_reward": "think_format",
    "get_soft_overlong_punishment": "soft_overlong_punishment",
}
TRL_PUNISHMENT = {"max_completion_length": 1280, "soft_punish_cache": 256}  # of its command
# ours -> TRL's names
SAMPLING_BOUNDS = {"clip_max": ("clip_max", "cap"), "clip_min": ("clip_min",)}
SUMMED = "sum_then_normalize"
DIFFUSION_PLUGIN = "integrations.diffusion.DiffusionPlugin"
DIFFUSION_MASK = "<|diffusion_mask|>"  # which Axolotl adds where a file names no other
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
BEFORE_LAYERS = (
    "each exit scores the state before its layer there, so that the last layer learns nothing; the "
    "state after it here, as in the paper"
)
OUTPUT_SCORED = "the model's output is always scored here"
# scale_grads of its recipe, without the number of ranks over which FSDP has made a mean
DIVIDED_TWICE = (
    "gradients: on several processes divided by their number too there; AdamW's steps are the "
    "same, clipping is not"
)
# torchtune's classes and functions -> ours
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
    """Returns our `method` for a file; `sft` where it is no preference training."""
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


def _find_factory_method(settings: ToolFile) -> str:
    if settings.get("use_asft_loss"):
        return "distill"
    stage = settings.get("stage")
    if stage != "dpo":
        return {"kto": "kto", "rm": "reward"}.get(str(stage), "sft")
    loss = settings.get("pref_loss")
    return loss if loss in ("orpo", "simpo") else "dpo"


def find_masked_diffusion(settings: ToolFile) -> dict[str, Any] | None:
    """Returns the section in which Axolotl trains a causal model to fill in masked tokens; None
    where a file does not, or trains a model that has been made for it.
    """
    section = read_section(settings, "diffusion_lm")
    if section.get("from_causal_lm"):
        return section
    plugins = str(settings.get("plugins", ""))
    if DIFFUSION_PLUGIN in plugins and not section:
        return read_section(settings, "diffusion")
    return None


def find_distillation(settings: ToolFile) -> dict[str, Any] | None:
    """Returns our keys for distillation; None where a file has no teacher, or its divergence is
    another.

    torchtune and Automodel minimize (1 - kd_ratio) x cross entropy + kd_ratio x KL divergence.
    LLaMA-Factory's ASFT is that sum of DFT and the divergence from the model before training, not
    divided by 1 + asft_alpha.
    """
    if settings.get("use_asft_loss"):
        return _read_asft(settings)
    if "teacher_model" not in settings:
        return None
    component = read_section(settings, "kd_loss").get("_component_")
    target = read_section(settings, "kd_loss_fn").get("_target_")
    name = str(component or target or "KDLoss").rsplit(".", 1)[-1]
    beta = next((beta for start, beta in KL_DIVERGENCES.items() if name.startswith(start)), None)
    temperature = read_section(settings, "kd_loss_fn").get("temperature", 1.0)
    alpha = convert_number(settings.get("kd_ratio", 0.5))
    if beta is None or temperature != 1 or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        return None
    return {"method": "distill", "distill_beta": beta, "distill_alpha": alpha}


def _read_asft(settings: ToolFile) -> dict[str, Any]:
    share = read_number("asft_alpha", settings.get("asft_alpha", 0.1), "0.1", 0)
    clip = read_number("max_grad_norm", settings.get("max_grad_norm", 1.0) or 0, "1.0")
    name = "gradient_accumulation_steps"
    # Trainer divides by it no loss of a compute_loss_func
    micro_batches = read_number(name, settings.get(name) or 1, "1", 1)
    return {
        "method": "distill",
        "distill_beta": 0.0,
        "distill_alpha": round(share / (1 + share), 9),
        "token_loss": "dft",
        "teacher_model_name_or_path": settings.get("model_name_or_path"),
        "max_grad_norm": clip / (1 + share) / micro_batches if clip else None,
    }


def _find_trl_method(settings: ToolFile, source: Path) -> str:
    """Reads the method off the keys, else off the file's or its folder's name (orpo/config.yaml):
    no key names it.
    """
    command = settings.get(COMMAND)
    if command is not None:
        return "reward" if command in REWARD_COMMANDS else str(command)
    if is_online(settings):
        return "grpo"
    if settings.get("center_rewards_coefficient") is not None:
        return "reward"
    if "desirable_weight" in settings or "undesirable_weight" in settings:
        return "kto"
    if "simpo" in _read_losses("TRL", settings) or "simpo_gamma" in settings:
        return "simpo"
    compares = any(key in settings for key in TRL_SIGNS)
    names_sft_loss = "beta" not in settings and settings.get("loss_type") in SFT_LOSSES[1:]
    if not compares or names_sft_loss:
        if _find_name(source, REWARD_COMMANDS[:1]):
            return "reward"
        return "sft"
    return _find_name(source, TRL_NAMES) or "dpo"


def _find_name(source: Path, names: Sequence[str]) -> str | None:
    """Returns the first of `names` that is a word in a file's name, or the name of its folder."""
    words = {source.resolve().parent.name.lower(), *re.split(r"[^a-z]+", source.stem.lower())}
    return next((name for name in names if name in words), None)


def find_unsupported_losses(tool: Tool, settings: ToolFile, source: Path) -> Iterator[Unsupported]:
    """Yields the losses of a preference file that nothing here computes."""
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
    pairs = [name for name in losses if name != "sft"]
    if len(pairs) > 1 or any(losses[name] != 1 for name in pairs):
        yield f"{key}: {shorten(list(losses))}", "several losses at once", True
    if "cpo_alpha" in settings and tool == "TRL" and "simpo" not in losses:
        yield f"cpo_alpha: {settings['cpo_alpha']}", "another loss (CPO)", True
    divergence = str(settings.get("f_divergence_type", "reverse_kl"))
    if divergence.lower() != "reverse_kl":
        yield f"f_divergence_type: {divergence}", f"another loss ({divergence.upper()})", True


def _read_losses(tool: Tool, settings: ToolFile) -> dict[str, Any]:
    """Reads the losses that a file names, with their weights.

    >>> _read_losses("TRL", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]})
    {'sigmoid': 1.0, 'sft': 0.2}
    """
    names = settings.get(LOSS_KEYS.get(tool, "loss_type")) or []
    names = names if isinstance(names, list) else [names]
    weights = settings.get(WEIGHT_KEYS.get(tool, "loss_weights")) or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [None] * len(names)  # which no loss here has
    return dict(zip(map(str, names), map(convert_number, weights), strict=False))


def adapt_method(method: str, settings: ToolFile, source: Path, conversion: Conversion) -> None:
    """Adds the method of a file to the recipe, with what several of its keys together mean."""
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


def _adapt_supervised(settings: ToolFile, conversion: Conversion) -> None:
    _set_token_loss(settings, conversion)
    _drop_unused("sft", conversion)
    if conversion.tool != "TRL":
        return
    if settings.get("packing") and settings.get("packing_strategy") != "wrapped":
        shares = describe_shares(settings, "dataset_num_proc")
        conversion.remarks.append(PACKED_AT_A_TIME.format("a thousand", shares))
    masks_prompts = settings.get("completion_only_loss")
    if masks_prompts:
        conversion.recipe["assistant_only_loss"] = True
    elif masks_prompts is False:
        conversion.add_difference(
            "completion_only_loss", False, NOTES["PROMPTS_MASKED"].removeprefix("true; ")
        )
    elif not settings.get("assistant_only_loss"):
        conversion.add_remark("completion_only_loss", None, COMPLETION_ALONE)
    for name in _read_losses("TRL", settings):
        if name not in map(str, SFT_LOSSES):
            note = "of supervised fine-tuning nll is the only one"
            conversion.add_difference("loss_type", name, note, f"another loss ({name.upper()})")


def _adapt_distillation(settings: ToolFile, conversion: Conversion) -> None:
    conversion.recipe |= find_distillation(settings) or {}
    if settings.get("use_asft_loss"):
        conversion.add_remark("use_asft_loss", True, ASFT)


def _adapt_masked_diffusion(settings: ToolFile, conversion: Conversion) -> None:
    """Adds masked diffusion, as core/trainers/diffusion_lm of Axolotl 0.21 has it."""
    recipe = conversion.recipe
    section = find_masked_diffusion(settings) or {}
    recipe["method"] = "masked_diffusion"
    recipe.pop("attn_implementation", None)  # the one that is built in looks in both directions
    _drop_unused("masked_diffusion", conversion)
    named = section.get("mask_token_id")
    if named is not None:
        recipe["mask_token"] = named
        conversion.add_difference("mask_token_id", named, OTHER_MASK)
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
    method = "masked_diffusion"
    conversion.add_difference("method", method, UNMASKED)
    conversion.add_difference("method", method, ROWS_ALIKE)
    if recipe.get("packing"):
        conversion.add_difference("sample_packing", True, NOISE_OF_ROWS)
        if settings.get("pretraining_dataset"):
            conversion.add_difference("sample_packing", True, JOINED_DOCUMENTS)


def _adapt_early_exit(settings: ToolFile, conversion: Conversion) -> None:
    """Adds early exits and layer dropout, as dev/early_exit_finetune_distributed of torchtune 0.6.1
    has them.
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
        for key, theirs, table in (
            ("exit_curriculum", curriculum, CURRICULA),
            ("exit_weights", scale_fn, EXIT_SCALES),
        ):
            if theirs in table:
                recipe[key] = table[theirs]
            else:
                note = "one of torchtune's own is expected"
                conversion.add_difference("early_exit_loss", theirs, note, "code of your own")
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
    """The last part of a dotted name."""
    return str(name).rpartition(".")[2]


def _read_layers(key: str, text: Any) -> str | list[int]:
    """Torchtune's list of layers, or slice. Raises `WrongValue` for anything else.

    >>> _read_layers("layers", "8,12"), _read_layers("layers", "::4"), _read_layers("layers", 3)
    ([8, 12], '::4', [3])
    """
    if not re.fullmatch(rf"\d+(,\d+)*|{LAYER_SLICE}", str(text)):
        raise WrongValue.of_key(key, text, "a list of layers or a slice", '"::4"')
    return str(text) if ":" in str(text) else [int(part) for part in str(text).split(",")]


def _adapt_comparison(
    method: str, settings: ToolFile, source: Path, conversion: Conversion
) -> None:
    """Adds a method that compares or rates answers."""
    recipe = conversion.recipe
    recipe["method"] = method
    _set_comparison_loss(method, settings, source, conversion)
    _list_differences(method, settings, conversion)
    if conversion.tool in WITHOUT_DROPOUT and settings.get("disable_dropout", True):
        _stop_dropout(conversion)
    if settings.get("label_smoothing_factor") is not None and "label_smoothing" not in settings:
        recipe.pop("label_smoothing", None)  # the Trainer's own loss alone reads it
        conversion.ignored.append("label_smoothing_factor")
    for key, value in PREFERENCE_DEFAULTS.get(conversion.tool, {}).items():
        recipe.setdefault(key, value)
    _compare_answers(method, conversion)


def _compare_answers(method: str, conversion: Conversion) -> None:
    """Drops what has no effect where answers are compared."""
    recipe = conversion.recipe
    recipe.pop("assistant_only_loss", None)  # only answers are compared
    if recipe.get("packing") is not False:
        recipe.pop("packing", None)  # no tool packs pairs
    _drop_unused(method, conversion)


def _stop_dropout(conversion: Conversion) -> None:
    dropout = conversion.recipe.get("lora_dropout", 0)
    if dropout != 0:
        conversion.remarks.append(f"lora_dropout: {dropout}   ({NOTES['NO_DROPOUT']})")
    conversion.recipe["lora_dropout"] = 0.0


def _adapt_reward(settings: ToolFile, source: Path, conversion: Conversion) -> None:
    """Adds a reward model.

    TRL's trainer, which is Axolotl's too, has the loss and the head of here.
    """
    tool = conversion.tool
    recipe = conversion.recipe
    recipe["method"] = "reward"
    recipe.pop("overlength", None)  # a document that is cut has lost the token that is scored
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
    compare_scored_turns(settings, conversion)
    _compare_answers("reward", conversion)


def _set_comparison_loss(
    method: str, settings: ToolFile, source: Path, conversion: Conversion
) -> None:
    tool = conversion.tool
    recipe = conversion.recipe
    losses = _read_losses(tool, settings)
    pair_loss = next((name for name in losses if name in PAIR_LOSSES), None)
    if method == "dpo" and (pair_loss or settings.get("rl") == "ipo"):
        recipe["loss_type"] = pair_loss or "ipo"
    if "sft" in losses:
        recipe["rpo_alpha"] = losses["sft"]
    if tool == "Axolotl" and method == "orpo" and settings.get("orpo_alpha") is not None:
        recipe.setdefault("beta", convert_number(settings["orpo_alpha"]))
    is_guessed = not losses and COMMAND not in settings and _find_name(source, TRL_NAMES) is None
    if tool == "TRL" and method == "dpo" and is_guessed:
        conversion.remarks.append(f"method: dpo   ({NOT_SAID})")


def _set_token_loss(settings: ToolFile, conversion: Conversion) -> None:
    keys = LABEL_LOSSES.get(conversion.tool, ())
    asked = next((key for key in keys if settings.get(key)), "")
    if not asked and settings.get("loss_type") == "dft":
        asked = "dft"
    if asked:
        conversion.recipe["token_loss"] = re.sub("^(use|enable)_", "", asked).removesuffix("_loss")
    if "eaft" not in asked:
        conversion.recipe.pop("eaft_alpha", None)
    elif conversion.tool == "Axolotl":
        _scale_eaft(conversion)
    if "eaft" in asked and settings.get("eaft_k") not in (None, 20):
        note = "the entropy is of the 20 likeliest tokens"
        conversion.add_difference("eaft_k", settings["eaft_k"], note, "another loss (EAFT)")


def _scale_eaft(conversion: Conversion) -> None:
    """Clips as Axolotl does, whose monkeypatch/loss/eaft.py does not divide the entropy."""
    recipe = conversion.recipe
    alpha = read_number("eaft_alpha", recipe.get("eaft_alpha", 1.0), "1.0", 0)
    clip = read_number("max_grad_norm", recipe.get("max_grad_norm", 1.0) or 0, "1.0", 0)
    recipe["max_grad_norm"] = clip / 3**alpha if clip else None
    conversion.remarks.append(f"use_eaft: true   ({UNDIVIDED})")


def _list_differences(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Lists what the tool's trainer for `method` does otherwise."""
    if conversion.tool == "LLaMA-Factory":
        _list_factory_differences(method, settings, conversion)
    if conversion.tool in ("TRL", "Axolotl"):
        _list_trl_differences(method, settings, conversion)
    if method == "kto":
        rows = KTO_ROWS_OF_FACTORY if conversion.tool == "LLaMA-Factory" else KTO_ROWS
        conversion.remarks.append(f"kto   ({rows})")
        _report_order(settings, conversion)
    if settings.get("truncation_mode") == "keep_end":
        note = "a side of over max_length tokens loses its end here"
        conversion.add_difference("truncation_mode", "keep_end", note)
    reference = read_section(settings, "ref_checkpointer").get("checkpoint_dir")
    if reference and reference != read_section(settings, "checkpointer").get("checkpoint_dir"):
        note = "the reference is the model before training"
        conversion.add_difference(
            "ref_checkpointer.checkpoint_dir", reference, note, "another reference model"
        )


def _report_order(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where rated answers come in the order of their rows: TRL's trainer draws none at
    random, and Axolotl shuffles them before, but under shuffle_merged_datasets: false.
    """
    if conversion.tool == "TRL" and settings.get("train_sampling_strategy") is None:
        conversion.add_difference("train_sampling_strategy", None, IN_ORDER)
    if conversion.tool == "Axolotl" and settings.get("shuffle_merged_datasets") is False:
        conversion.add_difference("shuffle_merged_datasets", False, IN_ORDER)


def _list_factory_differences(method: str, settings: ToolFile, conversion: Conversion) -> None:
    pair_loss = settings.get("pref_loss", "sigmoid")
    if method == "dpo" and pair_loss != "sigmoid":
        conversion.add_difference("pref_loss", pair_loss, ALWAYS_SIGMOID)
    if method == "orpo":
        conversion.remarks.append(f"pref_loss: orpo   ({NOTES['MEAN_OF_MEANS']})")
    if settings.get("pref_ftx") and method != "dpo":
        conversion.remarks = [
            line for line in conversion.remarks if not line.startswith("pref_ftx: ")
        ]
        conversion.add_difference("pref_ftx", settings["pref_ftx"], NO_CROSS_ENTROPY)


def _list_trl_differences(method: str, settings: ToolFile, conversion: Conversion) -> None:
    """Lists what TRL's trainers, which Axolotl uses too, do otherwise."""
    is_axolotl = conversion.tool == "Axolotl"
    if method == "simpo" and settings.get("cpo_alpha", 1.0) != 0:
        conversion.add_difference("cpo_alpha", settings.get("cpo_alpha", 1.0), CPO_SIMPO)
    if method == "orpo":
        conversion.add_difference("rl" if is_axolotl else "method", "orpo", WHOLE_ROW)
    smoothing = "dpo_label_smoothing" if is_axolotl else "label_smoothing"
    if method == "dpo" and settings.get(smoothing):
        conversion.add_difference(smoothing, settings[smoothing], SMOOTHED_BEFORE)
    if is_axolotl:
        return
    if settings.get("max_prompt_length") is None:
        conversion.add_remark("max_prompt_length", None, PROMPTS_WERE_CUT)
    if method == "dpo" and settings.get("truncation_mode") is None:
        _report_cut_sides(settings, conversion)


def _report_cut_sides(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which end of a long pair is cut: for sure where the file is of an older version."""
    if settings.get("max_prompt_length") is None:
        conversion.add_remark("truncation_mode", None, SIDES_WERE_CUT)
    else:
        conversion.add_difference("truncation_mode", None, SIDES_WERE_CUT)


def _drop_unused(method: str, conversion: Conversion) -> None:
    """Removes keys of other methods, which have no effect there either."""
    of_other_methods = keys_of(Method).keys() - {"method", *METHODS[method].keys}
    for key in [key for key in conversion.recipe if key in of_other_methods]:
        del conversion.recipe[key]
        conversion.ignored.append(key)
    if "label_smoothing" not in METHODS[method].keys and conversion.recipe.pop(
        "label_smoothing", None
    ):
        conversion.ignored.append("label_smoothing")


def is_online(settings: ToolFile) -> bool:
    """Whether a TRL file is for its GRPO trainer."""
    return any(key in settings for key in GRPO_SIGNS)


def find_unsupported_online(settings: ToolFile) -> Iterator[Unsupported]:
    """Yields the losses that nothing here computes, and models as rewards."""
    loss = str(settings.get("loss_type", "dapo"))
    if loss not in (*POLICY_LOSSES, "bnpo"):
        yield f"loss_type: {loss}", f"another loss ({loss.upper()})", True
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if settings.get(key):
            yield f"{key}: {settings[key]}", "a reward model", True


def _adapt_online(settings: ToolFile, conversion: Conversion) -> None:
    """Adds what several keys of a GRPO file together mean."""
    recipe = conversion.recipe
    recipe["method"] = "grpo"
    dropout = recipe.get("lora_dropout", TRL_DROPOUT)
    is_dropped = recipe.get("use_peft") and dropout and not settings.get("disable_dropout")
    if conversion.tool == "TRL" and is_dropped:
        conversion.add_difference("lora_dropout", dropout, DROPOUT_ONLINE)
    recipe["lora_dropout"] = 0.0
    recipe.setdefault("learning_rate", 1e-6)
    recipe.pop("packing", None)  # what is sampled is packed here, for the same loss
    if settings.get("top_k") not in (None, 0, -1):
        conversion.add_difference("top_k", settings["top_k"], TRUNCATED)
    if conversion.tool == "torchtune":
        adapt_async(settings, conversion)
    else:
        _adapt_trls_online(settings, conversion)
    _drop_unused("grpo", conversion)


def _adapt_trls_online(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    _set_policy_loss(settings, conversion)
    is_ahead = "max_staleness" in settings  # of AsyncGRPOTrainer, which has no other sampler
    if not is_ahead and recipe.get("beta") and settings.get("use_bias_correction_kl") is None:
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
        what = (
            "name your functions, such as my_tools.py:multiply, and set "
            f"max_tool_calling_iterations: {iterations}"
        )
        conversion.to_do.append(f"tools: they have no key there; {what}")
    if is_ahead or (settings.get("use_vllm") and settings.get("vllm_mode") == "server"):
        recipe |= _read_server(settings, is_corrected=not is_ahead)
        address = recipe["vllm_server_base_url"]
        conversion.to_do.append(
            f"vllm_server_base_url: start the server of {address} as docs/online.md says"
        )


def _set_policy_loss(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    loss = settings.get("loss_type")
    if loss == "bnpo":
        recipe["loss_type"] = "dapo"
        conversion.remarks.append(f"loss_type: bnpo   ({LOCAL_MEAN})")
    elif loss:
        recipe["loss_type"] = loss
    scale = settings.get("scale_rewards", "group")
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if not isinstance(scale, str):
        raise WrongValue.of_key("scale_rewards", scale, "one of group, batch and none", "group")
    recipe["scale_rewards"] = scale


def _set_lengths(settings: ToolFile, conversion: Conversion) -> None:
    key = "max_completion_length"
    is_ahead = "max_staleness" in settings
    default = COMPLETION_TOKENS_AHEAD if is_ahead else COMPLETION_TOKENS
    completion = read_number(key, settings.get(key, default), str(default), 1)
    if key not in settings and not is_ahead:
        conversion.add_remark(key, None, LONGER_SINCE)
    longest = settings.get("max_prompt_length") or PROMPT_TOKENS
    prompt = read_number("max_prompt_length", longest, str(PROMPT_TOKENS), 1)
    conversion.recipe["max_completion_length"] = completion
    conversion.recipe["max_length"] = completion + prompt
    note = f"prompts of over {prompt} tokens are dropped here"
    conversion.remarks.append(f"max_length: {completion + prompt}   ({note})")


def _set_sampled_batch(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the prompts of a step, and the steps that share a generation, from counts of completions
    on one process.
    """
    recipe = conversion.recipe
    rows = _read_count(settings, "per_device_train_batch_size", 8)
    accumulated = _read_count(settings, "gradient_accumulation_steps", 1)
    generations = _read_count(settings, "num_generations", 8)
    recipe.pop("gradient_accumulation_steps", None)
    recipe["global_batch_size"] = max(1, rows * accumulated // generations)
    per_process = (
        f"{rows} x {accumulated} completions, {generations} of each prompt, on one process there"
    )
    remark = (
        f"global_batch_size: {recipe['global_batch_size']}   ({per_process}; times the processes)"
    )
    conversion.remarks.append(remark)
    sampled = int(
        read_number("generation_batch_size", settings.get("generation_batch_size") or 0, "8", 0)
    )
    micro_steps = int(
        read_number("steps_per_generation", settings.get("steps_per_generation") or 0, "8", 0)
    )
    micro_steps = micro_steps or sampled // rows
    if micro_steps > accumulated:
        recipe["steps_per_generation"] = micro_steps // accumulated


def _read_count(settings: ToolFile, key: str, default: int) -> int:
    return int(read_number(key, settings.get(key, default), str(default), 1))


def _read_server(settings: ToolFile, *, is_corrected: bool) -> dict[str, Any]:
    """Reads our keys of a server that samples, and of TRL's correction of its numerics, where the
    trainer has one.
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
    if not (is_corrected and settings.get("vllm_importance_sampling_correction", True)):
        return keys
    keys["importance_sampling_correction"] = settings.get(
        "vllm_importance_sampling_mode", "sequence_mask"
    )
    for bound, names in SAMPLING_BOUNDS.items():
        given = (settings.get(f"vllm_importance_sampling_{name}") for name in names)
        value = next((value for value in given if value is not None), None)
        if value is not None:
            keys[f"importance_sampling_{bound}"] = value
    return keys


def _add_rewards(names: Any, conversion: Conversion) -> None:
    if not isinstance(names, list | str):
        raise WrongValue.of_key("reward_funcs", names, "a list of names", "[think_format_reward]")
    names = [names] if isinstance(names, str) else names
    rewards = [_name_reward(name, conversion) for name in names]
    if "soft_overlong_punishment" in rewards:
        conversion.recipe["soft_punish_cache"] = TRL_PUNISHMENT["soft_punish_cache"]
        longest = conversion.recipe["max_completion_length"]
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
    """Returns our name for a reward of TRL's command, or the function of a file."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = str(name).rpartition(".")
    if module:
        return f"{module.replace('.', '/')}.py:{function}"
    conversion.to_do.append(
        f"reward_funcs: {name}: write my_rewards.py: from trl.rewards import {name}"
    )
    return f"my_rewards.py:{function}"


# torchao's quantizers, and pairs of Axolotl's dtypes (inputs, weights) -> our scheme, and its usual
# group.
QUANTIZERS: Mapping[str, tuple[str, int | None]] = {
    "Int8DynActInt4WeightQATQuantizer": ("int8-int4", 256),
    "Int4WeightOnlyQATQuantizer": ("int4-packed", 256),
    "Float8ActInt4WeightQATQuantizer": ("fp8-int4", 128),
}
# quantizer_type of Automodel's QATConfig
QUANTIZER_TYPES = {
    "int8_dynact_int4weight": "Int8DynActInt4WeightQATQuantizer",
    "int4_weight_only": "Int4WeightOnlyQATQuantizer",
}
# by torchao's own classes of these names, create_quantizer of the same, and Axolotl's
# _make_qat_config; here a scale has the dtype of what it scales, as in the files that are exported
SCALED_IN_FP32 = (
    "the scales of rounded {} are in float32 there, in the run's 16 bits here: some numbers are "
    "rounded to a neighboring step"
)
QAT_DTYPES: Mapping[tuple[str, str], tuple[str, int | None]] = {
    ("int8", "int4"): ("int8-int4", 32),
    ("None", "int4"): ("int4-packed", 128),
    ("float8_e4m3fn", "int4"): ("fp8-int4", 128),
    ("float8_e4m3fn", "float8_e4m3fn"): ("fp8-fp8", None),
    ("nvfp4", "nvfp4"): ("nvfp4", 16),
    ("mxfp4", "mxfp4"): ("mxfp4", 32),
}
CUTTING_PLUGIN = "CutCrossEntropyPlugin"  # turns on the key of that name
HEAD_ROUNDED = "the output head is rounded there too, where its inputs divide into groups"
# torchtune's models whose head is the embedding (TiedLinear), which no quantizer replaces
TIED_IN_TORCHTUNE = re.compile(r"gemma|llama3_2\.|qwen2(_5)?_(0_5b|1_5b|3b)|qwen3_(0_6b|1_7b|4b)")
# _bf16_activations_forward of torchao's Int4WeightFakeQuantizer, by Axolotl's _make_qat_config
MIN_TO_MAX = (
    "the weights of a group are rounded to 16 steps from its smallest to its largest there, to "
    "steps on both sides of 0 here"
)
ADAPTER_APART = (
    "the base alone is rounded there, beside its adapter; here base and adapter together, as they "
    "are exported"
)
# toggle_fake_quant of Axolotl looks for quantizers, which torchao's layers of these do not have
ROUNDED_THROUGHOUT = ("mxfp4", "nvfp4")
FROM_THE_START = "has no effect on this rounding there, which begins with the first step, as here"
# the backward of torchao's prototype/qat/nvfp4.py and mx.py, which returns None for the bias
BIASES_FIXED = "the biases of rounded layers are not trained there; they are here"
# swap_lora_linear_with_qat of torchtune
ADAPTED_ALONE = (
    "layers that get no adapter are not rounded there; here all linear layers but the output head"
)


def cuts_loss(settings: ToolFile) -> bool:
    """Whether Axolotl's plugin computes the loss in parts, for which embeddings are in 16 bits."""
    is_on = CUTTING_PLUGIN in str(settings.get("plugins"))
    return bool(settings.get("cut_cross_entropy", is_on))


def asks_for_rounding(settings: ToolFile) -> bool:
    """Whether a file of training asks for it."""
    qat = settings.get("qat")
    # Automodel's is off by default
    is_on = isinstance(qat, dict) and qat.get("enabled", "qat_config" not in qat)
    return bool(is_on or ("dataset" in settings and isinstance(settings.get("quantizer"), dict)))


def find_rounding(settings: ToolFile) -> Mapping[str, Any] | None:
    """Returns our keys; None where a file asks for none, or for what torchao does not finish here.

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
        name = QUANTIZER_TYPES.get(quantizer.get("quantizer_type", next(iter(QUANTIZER_TYPES))), "")
    inputs = str(qat.get("activation_dtype")).removeprefix("torch.")
    weights = str(qat.get("weight_dtype")).removeprefix("torch.")
    scheme, usual_group = QUANTIZERS.get(name) or QAT_DTYPES.get((inputs, weights), ("", None))
    if scheme not in SCHEMES or SCHEMES[scheme].refused:
        return None
    keys: dict[str, Any] = {"quantization_aware_training": scheme}
    keys["qat_group_size"] = quantizer.get("groupsize") or qat.get("group_size") or usual_group
    after = settings.get("fake_quant_after_n_steps") or qat.get("fake_quant_after_n_steps")
    if after:
        keys["fake_quant_after_n_steps"] = after
    return keys


def adapt_rounding(settings: ToolFile, conversion: Conversion) -> None:
    """Adds quantization-aware training, and where the same torchao rounds other layers there."""
    keys = find_rounding(settings)
    if keys is None:
        return
    conversion.recipe |= keys
    if settings.get("use_onebitllms"):
        return
    key = "qat" if "qat" in settings else "quantizer"
    _compare_scales(key, settings, conversion)
    is_axolotl = conversion.tool == "Axolotl"
    if is_axolotl and keys["quantization_aware_training"] in ROUNDED_THROUGHOUT:
        _compare_rounding_to_floats(settings, conversion)
    if is_axolotl and keys["quantization_aware_training"] == "int8-int4":
        conversion.add_difference(key, settings[key], MIN_TO_MAX)
    model = read_section(settings, "model")
    component = str(model.get("_component_"))
    is_tunes_lora = "lora" in component
    # which read the head's weight, and do not call it
    has_kernel = settings.get("liger_fused_linear_cross_entropy") or cuts_loss(settings)
    has_head = model.get("apply_lora_to_output") if is_tunes_lora else not has_kernel
    if has_head and not TIED_IN_TORCHTUNE.search(component):
        conversion.add_difference(key, settings[key], HEAD_ROUNDED)
    if settings.get("adapter") or settings.get("peft") or is_tunes_lora:
        conversion.add_difference(key, settings[key], ADAPTER_APART)
    adapted = conversion.recipe.get("lora_target_modules") or ()
    if is_tunes_lora and not LINEAR_LAYERS.keys() <= set(adapted):
        conversion.add_difference(key, settings[key], ADAPTED_ALONE)


def _compare_scales(key: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports which scales are in float32 there alone."""
    scheme = conversion.recipe["quantization_aware_training"]
    is_in_fp32 = "32" in str(settings.get("dtype")) or settings.get("bf16") is False
    if scheme != "int8-int4" or is_in_fp32:
        return
    config = read_section(read_section(settings, "qat"), "qat_config")
    usual = "float32" if conversion.tool == "torchtune" else "bfloat16"
    precision = config.get("scales_precision", usual)
    scaled = "weights and inputs" if "32" in str(precision) else "inputs"
    conversion.add_difference(key, settings[key], SCALED_IN_FP32.format(scaled))


def _compare_rounding_to_floats(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what torchao's layers of MXFP4 and NVFP4, which Axolotl trains, do otherwise."""
    after = "fake_quant_after_n_steps"
    if after in conversion.recipe:
        conversion.add_remark(after, conversion.recipe.pop(after), FROM_THE_START)
    has_biases = find_biased_layers(guess_family(name_model(settings)) or "")
    if has_biases and not settings.get("adapter"):
        conversion.add_difference("qat", settings["qat"], BIASES_FIXED)
