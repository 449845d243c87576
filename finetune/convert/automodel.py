"""What NeMo Automodel's loop, its packing and its own classes of models do otherwise than a run
here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.config.facts import read_family_source
from finetune.config.optimization import OPTIMIZERS
from finetune.convert.asked_layout import trains_copy
from finetune.convert.counterparts import ToolFile
from finetune.convert.defaults import set_optimizers_defaults
from finetune.convert.foreign_values import convert_number
from finetune.convert.image_models import UNKNOWN_IMAGES, reads_images, runs_for_images
from finetune.convert.model_names import (
    guess_family,
    guess_vision_family,
    has_tower,
    is_mixture,
    name_model,
)
from finetune.convert.shared import (
    IN_ORDER,
    PACKED_IN_ORDER,
    ROTATED_IN_PART,
    ROTATED_WHOLE,
    UNMULTIPLIED,
    UNMULTIPLIED_BY_LIGER,
)
from finetune.convert.trained_layers import FUSED_LOSS, is_of_transformers
from finetune.convert.value_conversion import Conversion, read_section

# drop_last of its components/datasets/loader.py, which pipeline parallelism sets, beside that of
# its sampler
LAST_ROWS = (
    "epochs: the last rows, where the ranks do not divide them, and the rows of a rank that fill "
    "no micro-batch, are left out there; here they are a last, short step"
)
# _load_openai_messages of its components/datasets/llm/chat_dataset.py
SHUFFLED_BEFORE = "the slice is one of the rows in the order of this seed there, in their own here"
SHUFFLED_ONCE = "each epoch has the order of shuffle_seed there, another one by the seed here"
# is_ckpt_step of its StepScheduler
SAVED_WITH_EPOCHS = "a checkpoint is saved at the end of each epoch too there"
# its CheckpointingConfig, which writes Hugging Face's files beside adapters all the same
SAVED_IN_PARTS = "the weights are saved as parts of tensors there, as Hugging Face's files here"
NOTHING_SAVED = "nothing is saved there; here a checkpoint and an export at the end"
# num_epochs and max_steps of its StepScheduler
FIRST_TO_COME = (
    "the run ends with its last epoch there (num_epochs: {}), where that comes first; here "
    "max_steps counts on into the next one"
)
# of its StepSchedulerConfig, where a file names no key
EPOCHS = 10
SAVE_STEPS = 100
SAVED_IN_EPOCHS = f"a checkpoint is saved every {SAVE_STEPS} steps too there, its default"
# its is_val_step
MEASURED_WITH_SAVES = (
    "eval_loss: measured at each checkpoint and at the end of each epoch too there, whatever "
    "val_every_steps says"
)
HELD_OUT_ROWS_LEFT = (
    "eval_loss: the held-out rows of a rank that fill no micro-batch are left out there"
)
# the sampler of _make_sampler of its components/datasets/loader.py, with drop_last
LAST_OF_RANKS = (
    "epochs: where the ranks do not divide the rows, the last ones, fewer than there are ranks, "
    "are left out there, of held-out rows too"
)
# the sampler of its components/datasets/vlm/loader.py, which is torch's own as it is
READ_AGAIN = (
    "epochs: where the ranks do not divide the rows, the first of an epoch, fewer than there are "
    "ranks, are read again at its end there, of held-out rows too"
)
# of its recipes/vlm/finetune.py, and recipes/llm/kd.py
UNMEASURED_IN_STAGES = "eval_loss: not measured between pipeline stages there; measured here"
# pad_to_max_length of its components/datasets/llm/hellaswag.py
PADDED_ROWS = (
    "each row is padded to the longest of the data before it is packed there: a packed row has "
    "fewer rows, and an epoch more steps"
)
# transformers' _is_packed_sequence, which looks at one row alone
NOT_APART = (
    "documents in a packed row attend to those before under flash attention there, its default, "
    "where local_batch_size is above 1; each is apart here"
)
# get_wd of its OptimizerParamScheduler
RISING_DECAY = "the weight decay rises from {} to it there; weight_decay stays the same here"
NOT_FLASH = ("sdpa", "eager", "flex_attention")  # values of attn_implementation
# update_moe_gate_bias of its own classes of these families, and gate_bias_update_factor
BIASES_MOVED = ("deepseek_v3", "deepseek_v32", "glm5_next_text", "glm_moe_dsa")
MOVED_BIASES = (
    "each step moves the routers' biases by 0.001 toward an even load there; they stay as they are "
    "here"
)

# mtp_config of its own classes of these families: _resolve_mtp_num_layers, and MTPConfig
PREDICTING_AHEAD = ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text")
AHEAD = (
    "where the model's config has layers for it, a tenth of the loss of predicting later tokens is "
    "added there; no such layers are trained here"
)
# _resolve_mtp_num_layers
LAYERS_AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# _fp32_params of its own classes of these families
DECAYS_IN_FP32 = (
    "kimi_linear",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp_text",
)
RATES_IN_FP32 = (
    "A_log, dt_bias and, where there is one, D of the recurrent layers stay in float32 there, and "
    "are in the run's 16 bits here"
)


# models whose head is their embedding by their files' configs
TIED_MODEL = re.compile(
    r"gemma|llama-?3\.2-[13]b|qwen-?2(\.5)?-(0\.5|1\.5|3)b|qwen-?3-(0\.6|1\.7|4)b|smollm"
)
# materialize_missing_tied_lm_head of its components/checkpoint/utils.py, for a last stage
HEAD_APART = (
    "the output head, which is the embedding, is a copy of it in the last pipeline stage there, "
    "and trained and saved apart; here they are one weight"
)


def _adapt_loop(settings: ToolFile, conversion: Conversion) -> None:
    """Sets when checkpoints are saved and held-out rows measured, and reports how an epoch ends."""
    recipe = conversion.recipe
    schedule = read_section(settings, "step_scheduler")
    is_split = has_stages(settings)
    is_for_images = runs_for_images(settings)
    drops_last_rows = is_split and not is_for_images
    if drops_last_rows or read_section(settings, "dataloader").get("drop_last"):
        conversion.remarks.append(LAST_ROWS)
    else:
        conversion.remarks.append(READ_AGAIN if is_for_images else LAST_OF_RANKS)
    epochs = schedule.get("num_epochs", EPOCHS)
    steps = schedule.get("max_steps")
    if epochs is not None and steps is not None:
        conversion.add_remark("step_scheduler.max_steps", steps, FIRST_TO_COME.format(epochs))
    _adapt_saves(settings, conversion)
    if not settings.get("validation_dataset"):
        return
    measures_saves = schedule.get("validate_on_checkpoint", True)  # a key of 0.7
    # after _adapt_saves: rows without steps of their own are measured with each save
    if measures_saves and not schedule.get("val_every_steps") and "save_steps" in recipe:
        recipe["eval_steps"] = recipe["save_steps"]
    if is_split and (is_for_images or settings.get("teacher_model")):
        conversion.remarks.append(UNMEASURED_IN_STAGES)
        return
    if measures_saves:
        conversion.remarks.append(MEASURED_WITH_SAVES)
    if drops_last_rows or read_section(settings, "validation_dataloader").get("drop_last"):
        conversion.remarks.append(HELD_OUT_ROWS_LEFT)


def _adapt_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Sets which checkpoints are saved, and reports those that the file does not name."""
    recipe = conversion.recipe
    schedule = read_section(settings, "step_scheduler")
    saves = read_section(settings, "checkpoint")
    at_epochs = schedule.get("save_checkpoint_every_epoch")
    if saves.get("enabled", True) is False:
        recipe["save_strategy"] = "no"
        conversion.add_difference("checkpoint.enabled", False, NOTHING_SAVED)
        return
    asked = ("save_consolidated", "model_save_format")
    parted = [key for key in asked if saves.get(key) in (False, "false", "torch_save")]
    if parted and not settings.get("peft"):
        key = f"checkpoint.{parted[0]}"
        conversion.add_remark(key, saves[parted[0]], SAVED_IN_PARTS)
    if "ckpt_every_steps" not in schedule and at_epochs is False:
        recipe["save_steps"] = SAVE_STEPS
    elif "ckpt_every_steps" not in schedule:
        conversion.add_remark("step_scheduler.ckpt_every_steps", None, SAVED_IN_EPOCHS)
    steps = recipe.get("save_steps")
    if steps is not None and at_epochs is not False:
        conversion.add_remark("step_scheduler.ckpt_every_steps", steps, SAVED_WITH_EPOCHS)


def _adapt_decay(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    """Takes over the weight decay of a schedule, or reports that it rises there."""
    start, end = (convert_number(schedule.get(key)) for key in ("start_wd", "end_wd"))
    decay = conversion.recipe["weight_decay"]
    if start is None:
        start = decay
    if end is None:
        end = decay
    if start == end:
        conversion.recipe["weight_decay"] = end
    else:
        conversion.add_difference("lr_scheduler.end_wd", end, RISING_DECAY.format(start))


def _report_packing(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which documents share a packed row, and which of them see each other."""
    size = read_section(settings, "packed_sequence").get("packed_sequence_size") or 0
    if not size:
        return
    dataset = read_section(settings, "dataset")
    is_class = str(dataset.get("_target_")).endswith("HellaSwag")
    is_padded = is_class and dataset.get("pad_to_max_length", True)
    if is_padded:
        conversion.add_difference("packed_sequence.packed_sequence_size", size, PADDED_ROWS)
    rows = _count_rows(settings)
    model = read_section(settings, "model")
    is_thd = read_section(settings, "packed_sequence").get("packing_strategy", "thd") == "thd"
    if is_thd and not is_padded:  # of rows of one length both pack alike
        conversion.remarks.append(PACKED_IN_ORDER)
    is_batch = isinstance(rows, int) and rows > 1
    if is_thd and is_batch and not model.get("backend") and _may_flash(settings):
        conversion.add_difference("step_scheduler.local_batch_size", rows, NOT_APART)


def has_stages(settings: ToolFile) -> bool:
    """Whether pipeline stages share a model's layers there."""
    stages = read_section(settings, "distributed").get("pp_size")
    return isinstance(stages, int) and stages > 1


def _report_head(settings: ToolFile, conversion: Conversion) -> None:
    """Reports a head that is the embedding, of which the outer stages have one each."""
    is_tied = TIED_MODEL.search(name_model(settings).lower())
    if is_tied and has_stages(settings) and not conversion.recipe.get("use_peft"):
        stages = read_section(settings, "distributed")["pp_size"]
        conversion.add_difference("distributed.pp_size", stages, HEAD_APART)


def _count_rows(settings: ToolFile) -> Any:
    """Returns how many rows a forward pass has there: of pipeline stages those of a part."""
    if has_stages(settings):
        distributed = read_section(settings, "distributed")
        return read_section(distributed, "pipeline").get("pp_microbatch_size", 1)
    return read_section(settings, "step_scheduler").get("local_batch_size") or 1


def _may_flash(settings: ToolFile) -> bool:
    """Whether a model's attention is flash attention there: by the key or the default of its own
    classes, always with transformers' (_apply_preload_overrides of its kernel_patches.py).
    """
    model = read_section(settings, "model")
    family = guess_family(name_model(settings))
    is_own = not is_of_transformers(settings) and family in (None, *OWN_CLASSES)
    return not is_own or model.get("attn_implementation") not in NOT_FLASH


# whose own classes give their Gate, of components/moe/layers.py, no dtype by default
GATED_IN_16_BITS = ("hy_v3",)
GATED_IN_16_BITS_IN_06 = ("deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
IN_16_BITS = (
    "routers are computed in bfloat16 there, in float32 here, and choose some other experts"
)
IN_16_BITS_IN_06 = (
    "routers are computed in bfloat16 in 0.6 there, and choose some other experts; in float32 "
    "since, as here"
)
IN_32_BITS = (
    "routers are computed in float32 there, in the run's 16 bits here, and choose some other "
    "experts"
)
IN_32_BITS_SINCE_07 = f"{IN_32_BITS}; in 0.6 as here, but the scores are rounded to bfloat16 too"
# by the default of the class there, where it is another than that of transformers' code
GATES: Mapping[str, str] = {
    **dict.fromkeys(GATED_IN_16_BITS, IN_16_BITS),
    "minimax_m2": IN_32_BITS_SINCE_07,
    "laguna": IN_32_BITS,
    "gemma4_text": IN_32_BITS,
}
BESIDE_DENSE = ("gemma4_text",)  # families of mixtures and of dense models
IN_OWN_DTYPE = "routers are computed in the dtype of the model's own code"
# of transformers' classes
GATE_IN_FP32 = re.compile(
    r"F\.linear\(hidden_states\.(type\(torch\.float32\)|float\(\)), "
    r"self\.weight\.(type\(torch\.float32\)|float\(\))\)"
)
# the indexers of its models/glm_moe_dsa and models/deepseek_v32, and those of transformers
INDEXED_OTHERWISE = (
    "a document of more tokens than the config's index_topk (2048) attends to other ones there, "
    "in 0.7 where the config does not say indexer_rope_interleave: true: the indexer rotates "
    "halves of a query there, neighboring pairs here"
)
INDEXED_OTHERWISE_IN_06 = (
    "a document of more tokens than the config's index_topk (2048) attends to other ones in 0.6 "
    "there: the indexer rotates neighboring pairs of a query's last numbers; halves of its first "
    "ones since, as here"
)
MOVED_BIASES_IN_06 = (
    "each step moves the routers' biases by 0.001 toward an even load in 0.6 there; they stay as "
    "they are since, as here"
)
# config.sliding_window and inv_freq of its models/mimo_v2_flash
MIMO_IN_06 = (
    "in 0.6 there a token attends to one fewer before it in the layers with a sliding window (127 "
    "and itself), and frequencies of positions are rounded to bfloat16; since as here"
)
# q_a_layernorm and kv_a_layernorm of its MLA, which had the config's rms_norm_eps or a default
LATENTS_IN_06 = (
    "the norms of the attention's latents have an eps of 1e-5 in 0.6 there; of 1e-6 since, as here"
)
LATENTS = "the norms of the attention's latents have an eps of 1e-5 there, of 1e-6 here"
OF_CLASSES_IN_06 = {
    "deepseek_v32": INDEXED_OTHERWISE_IN_06,
    "glm4_moe_lite": LATENTS_IN_06,
    "glm_moe_dsa": LATENTS_IN_06,
    "mistral4": MOVED_BIASES_IN_06,
    "mimo_v2_flash": MIMO_IN_06,
}
# router_weight_uses_score_correction_bias of its models/kimi_linear, as the model's own code has it
BIASED_WEIGHTS = ("kimi_linear",)
WITH_BIAS = (
    "the weights of a token's experts have the routers' biases in them there; here these choose "
    "the experts, and the weights are without them"
)
# e_score_correction_bias of its Gate; transformers' classes of these have it in the model's dtype
KEEPS_BIASES = re.compile(r"_keep_in_fp32_modules_strict = \[[^\]]*e_score_correction_bias")
BIASES_ROUNDED = ("kimi_linear", "laguna", "minimax_m2")
ROUNDED_BIASES = (
    "the biases by which routers choose experts are in float32 there, in the run's 16 bits here, "
    "and choose some other experts"
)
# window_size of its models/gpt_oss/layers.py, for Transformer Engine
WIDER_WINDOW = (
    "in the layers with a sliding window a token attends to one more before it there, under "
    "Transformer Engine's attention, its default: 128 and itself"
)
# _build_sparse_mask of its models/deepseek_v32/layers.py, which under sdpa takes the place of the
# causal mask, and hides no token where a row is no longer than index_topk
SEES_LATER = (
    "under sdpa{} a token attends to those after it too there, what it is to predict among them; "
    "here to those before it alone"
)
WITHOUT_ENGINE = ", the default without Transformer Engine,"
# attention_sink_bias of its models/mimo_v2_flash, which is no parameter
SINKS_FROZEN = "the attention's sinks stay as they are there; they are trained here"
# the cast at the end of initialize_weights of its Mistral 4 with images
ROTATION_ROUNDED = (
    "positions are rotated by frequencies that are rounded to bfloat16 there, in float32 here"
)
# from_hf and to_hf of its models/gemma4_moe/state_dict_adapter.py
SCALES_FOLDED = (
    "an expert's per_expert_scale is multiplied into its down_proj there, which is trained as one "
    "weight, and is 1 in the export; here it is a weight beside it, trained too"
)
# time_step_limit of its models/nemotron_v3, and of transformers' class
STEPS_UNCLAMPED = (
    "the steps of the recurrent layers keep to the config's time_step_limit there, which as a rule "
    "bounds none; here none is below its time_step_min"
)
OF_CLASSES: Sequence[tuple[tuple[str, ...], str]] = (
    (BIASES_MOVED, MOVED_BIASES),
    (BIASED_WEIGHTS, WITH_BIAS),
    (("mimo_v2_flash",), SINKS_FROZEN),
    (("nemotron_h",), STEPS_UNCLAMPED),
    (("glm_moe_dsa",), INDEXED_OTHERWISE),
    (("deepseek_v32",), LATENTS),
)
UNKNOWN_CLASS = (
    "model: its name says no family that is known here: what a class of Automodel's own for it "
    "does otherwise is not listed"
)
SCALED_SCORES = "logits_scaling|logit_scale|lm_head_multiplier"
CAPPED_SCORES = "final_logit_softcapping"
# validate_lm_head of its components/loss/chunked_ce.py refuses a cap and a head with an adapter
CHUNKED_LOSS = "ChunkedCrossEntropy"
UNSCALED = (
    "this loss takes scores as the head gives them there, without a scale or a cap of the model's "
    "config, which has effect here"
)
UNSCALED_BUT_IN_06 = f"{UNSCALED} and in 0.6"
BIASED_HEAD = re.compile(r"lm_head = nn\.Linear\([^)]*(bias=(True|\S*lm_head_bias)|vocab_size)\)")
UNBIASED = "this loss leaves the output head's bias out there; it has effect here"
# _init_model_bnb_streaming of its _transformers/model_init.py, which leaves no layer out
HEAD_IN_4_BITS = "the output head is in 4 bits too there, in 16 bits here"


# get_sync_ctx of its components/distributed/utils.py, and to_accumulated_grad_if_needed of torch's
# FSDP2: what is not reduced yet is in the reduce_dtype. Here each micro-batch is reduced.
ADDED_IN_FP32 = (
    "gradients: a step's micro-batches are added in float32 there under FSDP; in 16 bits here, as "
    "the weights are"
)
# _restore_loaded_model_dtype of its _transformers/model_init.py, for transformers' classes
AS_FILED = "weights have the dtype of the model's files there, as a rule bfloat16; bfloat16 here"
# resolve_storage_dtype, which recipes/llm/kd.py and recipes/vlm/kd.py of 0.6 alone call
AS_FILED_BUT_IN_06 = (
    "weights have the dtype of the model's files there, as a rule bfloat16, and are in float32 in "
    "0.6; bfloat16 here"
)
WIDENED = (
    "weights whose files are in float32 or float16 are trained in float32 there; bfloat16 here"
)
# of a name that says no family: its own classes, as Inkling's, have all but a few in torch_dtype
MAYBE_WIDENED = f"where Automodel has no class of its own for the model, {WIDENED}"
# models of its own: MODEL_ARCH_MAPPING of its _transformers/registry.py
OWN_CLASSES = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "ernie4_5_moe",
    "gemma4",
    "gemma4_unified",
    "glm4_moe",
    "glm4_moe_lite",
    "glm5_next",
    "glm5_next_text",
    "glm_moe_dsa",
    "gpt_oss",
    "hy_v3",
    "kimi_linear",
    "laguna",
    "llama",
    "mimo_v2_flash",
    "minimax_m2",
    "ministral3",
    "mistral4",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
    "qwen4_exp_text",
)
# supports_config of its classes of Mistral3ForConditionalGeneration
TOWERS_BY_TEXT = ("ministral3", "mistral4")


def report_loaded_dtype(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which dtype weights are trained in that are all in bfloat16 here, and in which their
    gradients are added.
    """
    recipe = conversion.recipe
    name = name_model(settings)
    _report_biases(name, settings, conversion)
    if recipe.get("use_peft") or recipe.get("dtype") != "bfloat16":
        return
    if _adds_in_fp32(settings):
        conversion.remarks.append(ADDED_IN_FP32)
    model = read_section(settings, "model")
    asked = model.get("torch_dtype", "auto")
    family = guess_vision_family(name) if has_tower(name) else guess_family(name)
    is_own = family in OWN_CLASSES or guess_family(name) in TOWERS_BY_TEXT
    if asked == "auto":
        optimizer = str(read_section(settings, "optimizer").get("_target_"))
        is_widened = "teacher_model" in settings and optimizer.startswith("torch.optim.")
        note = AS_FILED_BUT_IN_06 if is_widened else AS_FILED
        conversion.add_remark("model.torch_dtype", model.get("torch_dtype"), note)
    elif model.get("force_hf") or not is_own:
        is_known = family is not None or model.get("force_hf")
        conversion.add_remark("model.torch_dtype", asked, WIDENED if is_known else MAYBE_WIDENED)


def _adds_in_fp32(settings: ToolFile) -> bool:
    """Whether Automodel adds a step's micro-batches before FSDP casts their sum to 16 bits.

    Groups that replicate the weights do so here too.
    """
    layout = read_section(settings, "distributed")
    rows = read_section(settings, "step_scheduler")
    dtype = read_section(layout, "mp_policy").get("reduce_dtype", "float32")
    is_alone = layout.get("dp_replicate_size") in (None, "none", 1) and not has_stages(settings)
    is_sharded = layout.get("strategy", "fsdp2") == "fsdp2" and is_alone
    is_deferred = layout.get("defer_fsdp_grad_sync", True) and "float32" in str(dtype)
    is_one = rows.get("global_batch_size", 0) == rows.get("local_batch_size", 1)
    return bool(is_sharded and is_deferred and not is_one)


def _report_biases(name: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports the biases of routers that a run rounds to 16 bits: of parameters what a layer
    computes with, of buffers what is loaded so.
    """
    family = guess_family(name) or ""
    recipe = conversion.recipe
    is_in_16_bits = recipe.get("use_peft") or recipe.get("dtype") == "bfloat16"
    source = read_family_source(family)
    is_parameter = "e_score_correction_bias = nn.Parameter" in source
    is_kept_there = family in BIASES_ROUNDED and not is_of_transformers(settings)
    is_kept_here = KEEPS_BIASES.search(source)  # Kimi Linear's since transformers 5.24
    if is_kept_there and not is_kept_here and (is_in_16_bits or is_parameter):
        conversion.add_difference("model", name, ROUNDED_BIASES)


def _report_own_class(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what a class of Automodel's own does otherwise with routers, attention and losses,
    and which weights it keeps in float32.
    """
    name = name_model(settings)
    family = str(guess_family(name))
    _report_gates(family, settings, conversion)
    if is_of_transformers(settings):
        return
    for families, note in OF_CLASSES:
        if family in families:
            conversion.add_difference("model", name, note)
    if family in OF_CLASSES_IN_06:
        conversion.add_remark("model", name, OF_CLASSES_IN_06[family])
    if family in PREDICTING_AHEAD and _predicts_ahead(settings):
        conversion.add_difference("model", name, AHEAD)
    if _rounds_rotation(family, settings, conversion):
        conversion.add_difference("model", name, ROTATION_ROUNDED)
    if family == "gemma4_text" and is_mixture(name) and not conversion.recipe.get("use_peft"):
        conversion.add_difference("model", name, SCALES_FOLDED)
    _report_attention(family, settings, conversion)
    if family in DECAYS_IN_FP32:
        conversion.add_remark("model", name, RATES_IN_FP32)
    is_image_file = conversion.images or any(
        UNKNOWN_IMAGES in line for line in conversion.differences
    )
    if guess_family(name) is None and not is_image_file:
        conversion.remarks.append(UNKNOWN_CLASS)


def _rounds_rotation(family: str, settings: ToolFile, conversion: Conversion) -> bool:
    """Whether a class of Automodel's own rounds the frequencies of its positions to 16 bits, as all
    its weights are.
    """
    is_in_32_bits = "32" in str(read_section(settings, "model").get("torch_dtype"))
    return family == "mistral4" and bool(conversion.images) and not is_in_32_bits


def _report_attention(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports which other tokens a token sees by the attention of a class of Automodel's own."""
    name = name_model(settings)
    attention = read_section(read_section(settings, "model"), "backend").get("attn")
    if family == "gpt_oss" and attention != "flex":
        conversion.add_difference("model", name, WIDER_WINDOW)
    if family == "deepseek_v32" and attention in (None, "sdpa"):
        default = "" if attention else WITHOUT_ENGINE
        conversion.add_difference("model.backend.attn", attention, SEES_LATER.format(default))


def _report_fused_loss(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the scale, the cap and the bias of scores that losses by the head's weight do not
    know.
    """
    loss = read_section(settings, "loss_fn")
    family = conversion.images or guess_family(name_model(settings)) or ""
    source = read_family_source(family)
    target = str(loss.get("_target_"))
    is_capped = bool(loss.get("logit_softcapping"))
    scores = f"{SCALED_SCORES}|{CAPPED_SCORES}"
    if target.endswith(FUSED_LOSS) and not is_capped and re.search(scores, source):
        conversion.add_difference("loss_fn._target_", FUSED_LOSS, UNSCALED)
    elif target.endswith(FUSED_LOSS) and BIASED_HEAD.search(source):
        conversion.add_difference("loss_fn._target_", FUSED_LOSS, UNBIASED)
    elif target.endswith(CHUNKED_LOSS) and re.search(SCALED_SCORES, source):
        conversion.add_difference("loss_fn._target_", CHUNKED_LOSS, UNSCALED_BUT_IN_06)


# _patch_liger_kernel of its _transformers/kernel_patches.py, for transformers' classes by default
WITH_LIGER = "where Liger is installed, "


def _report_liger(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Liger's kernels compute otherwise than the config of a model says."""
    name = name_model(settings)
    layout = read_section(settings, "distributed")
    is_divided = any(
        str(layout.get(size, 1)) not in ("none", "1") for size in ("tp_size", "cp_size")
    )
    asked = read_section(settings, "model").get("use_liger_kernel")
    if is_divided or asked is False:
        return
    reads_weight = str(read_section(settings, "loss_fn").get("_target_")).endswith(
        (FUSED_LOSS, CHUNKED_LOSS)
    )
    if guess_family(name) in UNMULTIPLIED_BY_LIGER and not reads_weight:
        note = f"{WITH_LIGER}{UNMULTIPLIED}"
        conversion.add_difference("model.use_liger_kernel", asked, note)
    if ROTATED_IN_PART.search(name.lower()):
        note = f"{WITH_LIGER}{ROTATED_WHOLE}"
        conversion.add_difference("model.use_liger_kernel", asked, note)


def _report_head_bits(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the output head that a loader of Automodel's own quantizes with the other layers."""
    is_quantized = read_section(settings, "quantization").get("load_in_4bit")
    is_streamed = not (conversion.images or is_mixture(name_model(settings)))
    if is_quantized and is_streamed and not read_section(settings, "model").get("force_hf"):
        conversion.add_difference("quantization.load_in_4bit", True, HEAD_IN_4_BITS)


def _predicts_ahead(settings: ToolFile) -> bool:
    """Whether a model may predict later tokens: distillation takes no loss of it, and 0 layers have
    none.
    """
    model = read_section(settings, "model")
    own = [model, read_section(model, "config"), read_section(model, "text_config")]
    counts = [section.get(key) for section in own for key in LAYERS_AHEAD]
    return not settings.get("teacher_model") and 0 not in counts


def _report_gates(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports where routers are computed in another dtype than by transformers' class."""
    model = read_section(settings, "model")
    name = name_model(settings)
    asked = read_section(model, "backend").get("gate_precision")
    is_in_fp32 = GATE_IN_FP32.search(read_family_source(family)) is not None
    is_listed = family in GATES and (family not in BESIDE_DENSE or is_mixture(name))
    if asked is not None and not (is_in_fp32 and "float32" in str(asked)):
        conversion.add_difference("model.backend.gate_precision", asked, IN_OWN_DTYPE)
    elif asked is None and is_listed and not is_of_transformers(settings):
        conversion.add_difference("model", name, GATES[family])
    elif asked is None and family in GATED_IN_16_BITS_IN_06 and not is_of_transformers(settings):
        conversion.add_remark("model", name, IN_16_BITS_IN_06)


def adapt_automodel(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of an Automodel file ask for together."""
    recipe = conversion.recipe
    if read_section(settings, "peft"):
        recipe["use_peft"] = True  # of dim 8, where it says none
    teacher = read_section(settings, "teacher_model").get("pretrained_model_name_or_path")
    if teacher:
        recipe["teacher_model_name_or_path"] = teacher
    _adapt_automodel_optimizer(read_section(settings, "optimizer"), conversion)
    schedule = settings.get("lr_scheduler")
    if isinstance(schedule, dict):
        _adapt_automodel_schedule(schedule, conversion)
    if read_section(settings, "dataloader").get("shuffle") is False:
        is_shuffled = read_section(settings, "dataset").get("shuffle_seed") is not None
        order = SHUFFLED_ONCE if is_shuffled else IN_ORDER
        conversion.add_difference("dataloader.shuffle", False, order)
    _adapt_automodel_lengths(settings, conversion)
    if "max_steps" in recipe and "num_train_epochs" not in recipe:
        recipe["num_train_epochs"] = 1.0  # max_steps decides
    if settings.get("wandb") and read_section(settings, "wandb").get("enable", True):
        recipe["report_to"] = "wandb"
    _adapt_loop(settings, conversion)
    _report_packing(settings, conversion)
    _report_head(settings, conversion)
    _report_rows_of_images(settings, conversion)
    _report_positions(settings, conversion)
    _report_masks(settings, conversion)
    _report_reduction(settings, conversion)
    _report_own_class(settings, conversion)
    _report_head_bits(settings, conversion)
    _report_fused_loss(settings, conversion)
    _report_liger(settings, conversion)


def _adapt_automodel_optimizer(optimizer: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    set_optimizers_defaults(str(optimizer.get("_target_")), recipe)
    if any("bfloat16" in str(optimizer.get(key)) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")):
        recipe["optim"] = next(name for name, row in OPTIMIZERS.items() if row.moment_itemsize)


# `build` of its LRSchedulerConfig
TENTH = "a tenth of the steps there, rounded down, and at most 1000; rounded up here"
SLOW_START = "warm-up: from a tenth of the rate there, from 0 here"


def _adapt_automodel_schedule(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    recipe.setdefault("lr_scheduler_type", "cosine")
    if schedule.get("lr_warmup_steps") is None:
        recipe["warmup_ratio"] = 0.1
        conversion.add_remark("lr_scheduler.lr_warmup_steps", None, TENTH)
    if schedule.get("lr_warmup_steps") != 0 and schedule.get("init_lr") is None:
        conversion.remarks.append(SLOW_START)
    _adapt_decay(schedule, conversion)
    recipe.setdefault("min_lr_ratio", 0.01)
    lowest = convert_number(schedule.get("min_lr"))
    rate = recipe["learning_rate"]
    if isinstance(lowest, float | int) and isinstance(rate, float) and rate:
        # the schedule may come before the rate in the file
        recipe["min_lr_ratio"] = round(min(1.0, lowest / rate), 9)


NOT_CUT = (None, False, "do_not_truncate")
# __getitem__ of its ChatDataset, and of its ColumnMappedTextInstructionDataset
CUT_BEFORE_ANSWER = "a row that is cut before its answer has no loss there; it is left out here"
NEXT_IN_PLACE = (
    "a row that is cut before its answer is the next one in its place there; it is left out here"
)


def _adapt_automodel_lengths(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    packed = read_section(settings, "packed_sequence")
    dataset = read_section(settings, "dataset")
    packed_length = packed.get("packed_sequence_size") or 0
    is_cut = dataset.get("truncation") not in NOT_CUT
    row_length = dataset.get("seq_length") if is_cut else None  # else it is the length of padding
    # of its pack_dataset, whose rows no key keeps
    is_thd = packed.get("packing_strategy", "thd") == "thd"
    if packed_length:
        if row_length and row_length <= packed_length:
            overlength = "truncate"
        elif is_thd or packed.get("drop_long_samples", True):
            overlength = "drop"
        else:
            overlength = "error"
        recipe |= {"packing": True, "max_length": packed_length, "overlength": overlength}
    elif row_length:
        recipe["max_length"] = row_length
    elif runs_for_images(settings):
        _adapt_lengths_of_images(settings, conversion)
    if row_length and recipe.get("overlength") != "drop":
        cut = NEXT_IN_PLACE if dataset.get("column_mapping") else CUT_BEFORE_ANSWER
        conversion.add_remark("dataset.seq_length", row_length, cut)
    if packed_length and row_length and row_length < packed_length:
        note = "a row is cut to it before it is packed there, to max_length here"
        conversion.add_difference("dataset.seq_length", row_length, note)


# default_collate_fn of its components/datasets/vlm/collate_fns.py
CUT_IN_BATCHES = "a longer row with images is cut there, unless its function drops it; dropped here"
# PreTokenizedDatasetWrapper of its components/datasets/vlm/datasets.py
REPLACED = "a longer row{} gives its place to another one, drawn at random, there; {} left out here"
CUT_AND_REPLACED = (
    "a longer row{} is cut there, and one whose image is cut gives its place to another one; {} "
    "left out here"
)
# _estimate_sample_length of its components/datasets/vlm/neat_packing_vlm.py, by which
# drop_long_samples goes
DROPPED_BY_ESTIMATE = (
    "a row is left out there where an estimate is more than pack_size: as a rule a third of its "
    "characters, and 500 for an image; here where its tokens are more"
)
KEPT_BY_ESTIMATE = " that drop_long_samples leaves in"
# PackedDatasetWrapper of the same
ESTIMATED = (
    "packing: rows are put together by an estimate of their lengths there, and one that does not "
    "fit in after all is left out; here by their lengths"
)


def _adapt_lengths_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Takes over the length of rows of the recipe for images, as they are tokenized before they are
    packed, or in a batch.
    """
    packed = read_section(settings, "packed_sequence")
    dataset = read_section(settings, "dataset")
    size = packed.get("pack_size")
    length = packed.get("max_length", dataset.get("max_length"))
    collated = read_section(read_section(settings, "dataloader"), "collate_fn")
    is_cut = dataset.get("truncate", dataset.get("max_length") is not None)
    drops = bool(size and packed.get("drop_long_samples"))
    cuts_texts = is_cut and conversion.images is None and not drops
    overlength = "truncate" if cuts_texts else "drop"
    if length and overlength == "drop":
        note = CUT_AND_REPLACED if is_cut else REPLACED
        kept = KEPT_BY_ESTIMATE if drops else ""
        left_out = "one longer than pack_size is" if size and length < size else "it is"
        conversion.add_difference("packed_sequence.max_length", length, note.format(kept, left_out))
    if drops:
        conversion.add_difference("packed_sequence.drop_long_samples", True, DROPPED_BY_ESTIMATE)
    if size:
        conversion.remarks.append(ESTIMATED)
        conversion.recipe |= {"packing": True, "max_length": size, "overlength": overlength}
        if conversion.images is not None:
            # the attention that is built in alone keeps packed rows with images apart
            conversion.recipe.pop("attn_implementation", None)
        return
    if not length and collated.get("max_length"):
        length = collated["max_length"]
        is_dropped = collated.get("drop_overlong")
        if not (is_dropped or reads_images(settings)):
            overlength = "truncate"
        elif not is_dropped:
            conversion.add_difference("dataloader.collate_fn.max_length", length, CUT_IN_BATCHES)
    if length:
        conversion.recipe |= {"max_length": length, "overlength": overlength}


# of its components/datasets/vlm/collate_fns.py, by its _inject_thinking_prefix_tokens, whose tokens
# follow the marker from which build_labels_from_template trains
ADDING_THOUGHTS = ("gemma4_inject_thinking_prefix", "gemma4_prefix_collate_fn")
THOUGHT_ADDED = (
    "an empty thought is written before each answer of Gemma 4 there, and trained with it; here a "
    "row is as the chat template writes it"
)
# inject_fake_image_into_conversation of its components/datasets/vlm/fake_image.py
BLANK_IMAGES = (
    "a blank image is put before the first question of a row without one there, which shifts what "
    "follows; none is here"
)
# build_labels of the same: the templates of these families write nothing between a question's end
# and an answer, so that _derive_turn_markers finds no marker
WITHOUT_HEADER = ("mistral3",)
FOUND_BY_WORDS = (
    "an answer is found there by its own tokens, where they first stand in a row: those that stand "
    "in what is asked, too, are trained there; here the answer"
)
# _build_labels_from_markers of the same, of templates that trim no answer
WITH_BREAK = ("internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
HEADER_UNFOUND = (
    "rows: an answer that begins with a line break is not trained there where the tokenizer has "
    "one token for that and the one that ends its header; it is here"
)


def _report_rows_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what the recipe for images puts into rows, and which of their tokens it trains."""
    packed = read_section(settings, "packed_sequence")
    is_packed = bool(packed.get("pack_size"))
    collated = read_section(read_section(settings, "dataloader"), "collate_fn").get("_target_")
    if is_packed:  # by a function of its own
        collated = None
    functions = {
        "packed_sequence.post_tokenize_hook_fn": packed.get("post_tokenize_hook_fn"),
        "dataloader.collate_fn._target_": collated,
    }
    name = name_model(settings)
    is_gemma = guess_family(name) == "gemma4_text"
    for key, value in functions.items():
        if str(value).endswith(ADDING_THOUGHTS) and is_gemma:
            conversion.add_difference(key, value, THOUGHT_ADDED)
    dataset = read_section(settings, "dataset")
    is_tokenized = packed.get("pretokenize", is_packed)
    are_texts = runs_for_images(settings) and not reads_images(settings)
    if is_tokenized and are_texts and dataset.get("inject_fake_images", True):
        asked = dataset.get("inject_fake_images")
        conversion.add_difference("dataset.inject_fake_images", asked, BLANK_IMAGES)
    # the recipe for texts reads it since 0.7
    is_frozen = read_section(settings, "freeze_config").get("freeze_language_model")
    has_text_part = runs_for_images(settings) or has_tower(name)
    if is_frozen and has_text_part and not reads_images(settings):
        conversion.add_difference("freeze_language_model", True, "trained here")
    if conversion.images in WITHOUT_HEADER or (conversion.images and "pixtral" in name.lower()):
        conversion.add_difference("model", name, FOUND_BY_WORDS)
    if conversion.images in WITH_BREAK:
        conversion.remarks.append(HEADER_UNFOUND)


# the text parts of its own classes of these, which number the tokens where they are handed no
# position_ids: stages after the first get none; batches of packed rows, and of context parallelism,
# have them
PLACED_BY_IMAGE = ("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
NUMBERED_IN_STAGES = (
    "in the pipeline stages after the first the position of a token is its number in the row "
    "there; in the first, and in all layers here, tokens of an image have those of their row and "
    "column in it, and the tokens behind it count on from these"
)


def _report_positions(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the pipeline stages that do not know where in an image a token is."""
    layout = read_section(settings, "distributed")
    is_packed = read_section(settings, "packed_sequence").get("pack_size")
    shares_rows = layout.get("cp_size") not in (None, 1)
    if conversion.images not in PLACED_BY_IMAGE or is_packed or shares_rows:
        return
    if has_stages(settings):
        conversion.add_difference("distributed.pp_size", layout["pp_size"], NUMBERED_IN_STAGES)


# _indexed_mask_to_4d_block_causal of its components/datasets/utils.py, whose masks are of booleans,
# which transformers' eager_attention_forward adds to the scores
UNMASKED = (
    "in a packed row of several documents this attention hides nothing there: a token sees all "
    "others, later ones and those of other documents too; here those before it in its own"
)
# the same masks, to which transformers' create_causal_mask adds neither windows nor images
WITHOUT_WINDOWS = (
    "in packed rows{} no layer has a window there, and an image's tokens see those before them "
    "alone; here as in rows that are not packed"
)
# Gemma4MoETextModelBackend of its models/gemma4_moe, which is handed the documents of a packed row
# where there are several (neat_packed_vlm_collater), and makes its own masks of these
OF_ONE_DOCUMENT = " of one document alone"
# _shift_sample of its neat_packing_vlm.py, which keeps no token_type_ids
IMAGES_IN_ORDER = (
    "in packed rows an image's tokens see those before them alone there; here each other too"
)
# whose own classes compute attention by transformers' functions
BY_ITS_FUNCTIONS = ("gemma3_text", "gemma3n_text", "gemma4_text", "llama", "qwen2")
# whose own classes compute it by BackendConfig.attn, and pass the mask on as it is: that of flash
# attention, of numbers of documents, is one of padding in preprocess_args_and_kwargs_for_attn of
# its components/attention/utils.py
BY_BACKEND = (
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "hy_v3",
    "mistral4",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
SEEN_BY_ENGINE = (
    "documents in a packed row attend to those before in 0.6 there under Transformer Engine's "
    "attention, the default where it is installed, and 0.7 refuses such rows; each is apart here"
)


def _report_masks(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what the masks of packed rows hide, or show, otherwise."""
    packed = read_section(settings, "packed_sequence")
    is_for_images = bool(packed.get("pack_size")) and packed.get("packing_format") != "thd"
    ranks = read_section(settings, "distributed").get("cp_size")
    if ranks not in (None, 1) or not (is_for_images or packed.get("packing_strategy") == "neat"):
        return
    name = name_model(settings)
    family = guess_family(name) or ""
    model = read_section(settings, "model")
    attention = model.get("attn_implementation")
    backend = read_section(model, "backend").get("attn")
    is_own = is_mixture(name) and not is_of_transformers(settings)
    is_computed_there = is_for_images and not is_own
    if attention == "eager" and (is_computed_there or family in BY_ITS_FUNCTIONS):
        conversion.add_difference("model.attn_implementation", attention, UNMASKED)
    elif is_computed_there and attention == "sdpa" and family.startswith("gemma"):
        conversion.add_difference(
            "model.attn_implementation", attention, WITHOUT_WINDOWS.format("")
        )
    elif conversion.images == "gemma3":
        conversion.add_difference("model.attn_implementation", attention, IMAGES_IN_ORDER)
    elif is_own and family in BY_BACKEND and (attention, backend) == ("flash_attention_2", None):
        conversion.add_difference("model.backend.attn", backend, SEEN_BY_ENGINE)
    if is_own and family == "gemma4_text" and attention in ("eager", "sdpa"):
        note = WITHOUT_WINDOWS.format(OF_ONE_DOCUMENT)
        conversion.add_difference("model.attn_implementation", attention, note)


# MixedPrecisionPolicy of torch, which its FSDP2Config makes with torch.float32
REDUCED = "gradients are added over the ranks in this dtype there; in float32 here"
MEGATRON = "megatron_fsdp"
REDUCED_BY_MEGATRON = (
    "gradients are added over the ranks in the weights' dtype there, the default of "
    "grad_reduce_in_fp32; in float32 here"
)
# orig_dtype of torch's FSDP2, to which it casts what it has reduced; those of experts that ep_size
# alone divides are summed in it over a step's micro-batches too
GRADIENTS_ROUNDED = "gradients: in 16 bits there, as their weights are; in float32 here"


def _report_reduction(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that gradients are in 16 bits, or added over the ranks in them."""
    layout = read_section(settings, "distributed")
    dtype = str(read_section(layout, "mp_policy").get("reduce_dtype", "float32"))
    is_of_megatron = layout.get("strategy") == MEGATRON
    if trains_copy(settings) and not (is_of_megatron or settings.get("peft")):
        conversion.remarks.append(GRADIENTS_ROUNDED)
    if is_of_megatron and not layout.get("grad_reduce_in_fp32"):
        conversion.add_difference("distributed.strategy", MEGATRON, REDUCED_BY_MEGATRON)
    elif "float32" not in dtype:
        conversion.add_difference("distributed.mp_policy.reduce_dtype", dtype, REDUCED)
