"""Converts what several keys of a NeMo Automodel file determine together, and reports what it
does otherwise.

What differs is the training loop, packing, and Automodel's own model classes. It trains a model by
its own class where it has one for the family (OWN_FAMILIES), and by transformers' class otherwise.
The paths in the comments are those of Automodel's source.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.facts import read_family_source
from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Run
from finetune.convert.asked_layout import trains_copy
from finetune.convert.counterparts import NOTES, ToolFile, read_table
from finetune.convert.defaults import DEFAULTS, set_optimizers_defaults
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
    ROTATION_ROUNDED,
    UNMULTIPLIED,
    UNMULTIPLIED_BY_LIGER,
)
from finetune.convert.trained_layers import FUSED_LOSS, is_of_transformers
from finetune.convert.value_conversion import Conversion, read_section, read_value

# drop_last of components/datasets/loader.py, which pipeline parallelism sets for the batches; the
# sampler always drops
LAST_ROWS_LEFT_OUT = (
    "epochs: the last rows, where the ranks do not divide them, and the rows of a rank that fill "
    "no micro-batch, are left out there; here they are a last, short step"
)
# _load_openai_messages of components/datasets/llm/chat_dataset.py
SHUFFLED_BEFORE = "the slice is one of the rows in the order of this seed there, in their own here"
SHUFFLED_ONCE = "each epoch has the order of shuffle_seed there, another one by the seed here"
# is_ckpt_step of StepScheduler
SAVED_WITH_EPOCHS = "a checkpoint is saved at the end of each epoch too there"
# CheckpointingConfig; adapters are written as Hugging Face's files in any case
SAVED_IN_PARTS = "the weights are saved as parts of tensors there, as Hugging Face's files here"
NOTHING_SAVED = "nothing is saved there; here a checkpoint and an export at the end"
# num_epochs and max_steps of StepScheduler
ENDS_WITH_EPOCHS = (
    "the run ends with its last epoch there (num_epochs: {}), where that comes first; here "
    "max_steps counts on into the next one"
)
# defaults of StepSchedulerConfig
DEFAULT_EPOCHS = 10
SAVE_STEPS = 100
SAVED_IN_EPOCHS = f"a checkpoint is saved every {SAVE_STEPS} steps too there, its default"
# is_val_step of StepScheduler
MEASURED_WITH_SAVES = (
    "eval_loss: measured at each checkpoint and at the end of each epoch too there, whatever "
    "val_every_steps says"
)
HELD_OUT_ROWS_LEFT = (
    "eval_loss: the held-out rows of a rank that fill no micro-batch are left out there"
)
# _make_sampler of components/datasets/loader.py, whose sampler has drop_last
UNEVEN_ROWS_LEFT_OUT = (
    "epochs: where the ranks do not divide the rows, the last ones, fewer than there are ranks, "
    "are left out there, of held-out rows too"
)
# components/datasets/vlm/loader.py, whose sampler is torch's with its defaults
ROWS_READ_AGAIN = (
    "epochs: where the ranks do not divide the rows, the first of an epoch, fewer than there are "
    "ranks, are read again at its end there, of held-out rows too"
)
UNFILLED_LEFT_OUT = (
    "epochs: the rows of a rank that fill no micro-batch are left out there; here they are a last, "
    "short step"
)
# vlm_validation_dataloader of recipes/_typed_config.py, without packed_sequence
HELD_OUT_UNBOUNDED = (
    "eval_loss: held-out rows have no limit of length there; here those over max_length are {}"
)
OVERLONG_WAYS = {"drop": "left out", "truncate": "cut"}  # what overlength does with a longer row
# recipes/vlm/finetune.py, and recipes/llm/kd.py
UNMEASURED_IN_STAGES = "eval_loss: not measured between pipeline stages there; measured here"
# pad_to_max_length of components/datasets/llm/hellaswag.py, and `padding: max_length` of the others
PADDED_ROWS = (
    "each row is padded to {} before it is packed there: a packed row has fewer rows, and an epoch "
    "more steps"
)
LONGEST = "the longest of the data"
# transformers' _is_packed_sequence finds documents only in a batch of one row
DOCUMENTS_NOT_APART = (
    "documents in a packed row attend to those before under flash attention there, its default, "
    "where local_batch_size is above 1; each is apart here"
)
# _build_or_reuse_pp_causal_mask of components/distributed/pipelining/hf_utils.py: where a batch has
# no attention_mask, as one of packed rows, a mask is kept by the length of rows
MASKED_AS_FIRST = (
    "in pipeline stages all packed rows have the mask of the first one there, so that a token sees "
    "what is before it in that row's documents; here in its own"
)
WITHOUT_FLASH = "where flash attention is not installed, "
WHERE_NO_ENGINE = "where Transformer Engine is not installed, "
OWN_DENSE_FAMILIES = ("llama", "qwen2", "qwen3")  # their inner model gets a forward for stages
# get_wd of OptimizerParamScheduler
CHANGING_DECAY = "the weight decay goes from {} to {} there; weight_decay stays the same here"
NOT_FLASH = ("sdpa", "eager", "flex_attention")  # values of attn_implementation
# families whose own class has layers that predict later tokens: mtp_config, by
# _resolve_mtp_num_layers and MTPConfig
FAMILIES_PREDICTING_AHEAD = ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text")
LATER_TOKENS_PREDICTED = (
    "where the model's config has layers for it, a tenth of the loss of predicting later tokens is "
    "added there; no such layers are trained here"
)
# keys of the model's config for the number of these layers (_resolve_mtp_num_layers)
KEYS_OF_LAYERS_AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# models whose config ties the output head to the embedding
TIED_MODEL = re.compile(
    r"gemma|llama-?3\.2-[13]b|qwen-?2(\.5)?-(0\.5|1\.5|3)b|qwen-?3-(0\.6|1\.7|4)b|smollm"
)
# materialize_missing_tied_lm_head of components/checkpoint/utils.py, for the last stage
HEAD_APART = (
    "the output head, which is the embedding, is a copy of it in the last pipeline stage there, "
    "and trained and saved apart; here they are one weight"
)


def _adapt_batch(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the rows of a step where the batches of `dataloader` are of another size.

    Their number is that of micro-batches of `local_batch_size` in `global_batch_size`, by
    _resolve_dataloader of recipes/_typed_config.py.
    """
    schedule = read_section(settings, "step_scheduler")
    size = read_value(settings, "dataloader.batch_size")
    local_size = schedule.get("local_batch_size") or 1
    if isinstance(size, int) and isinstance(local_size, int) and size != local_size:
        recipe = conversion.recipe
        rows = recipe.get("global_batch_size", DEFAULTS["Automodel"]["global_batch_size"])
        recipe["global_batch_size"] = rows * size // local_size
        recipe["per_device_train_batch_size"] = size


def _adapt_loop(settings: ToolFile, conversion: Conversion) -> None:
    """Sets when checkpoints are saved and when held-out rows are measured.

    Reports which rows an epoch leaves out, or reads twice, at its end.
    """
    recipe = conversion.recipe
    schedule = read_section(settings, "step_scheduler")
    has_pipeline = has_stages(settings)
    is_for_images = runs_for_images(settings)
    drops_last_rows = has_pipeline and not is_for_images
    _report_last_rows(settings, drops_last_rows, conversion)
    epochs = schedule.get("num_epochs", DEFAULT_EPOCHS)
    steps = schedule.get("max_steps")
    if epochs is not None and steps is not None:
        conversion.add_remark("step_scheduler.max_steps", steps, ENDS_WITH_EPOCHS.format(epochs))
    _adapt_saves(settings, conversion)
    if not settings.get("validation_dataset"):
        return
    measures_saves = schedule.get("validate_on_checkpoint", True)  # a key of 0.7
    # Without val_every_steps, held-out rows are measured at each save, which _adapt_saves has set.
    if measures_saves and not schedule.get("val_every_steps") and "save_steps" in recipe:
        recipe["eval_steps"] = recipe["save_steps"]
    if has_pipeline and (is_for_images or settings.get("teacher_model")):
        conversion.remarks.append(UNMEASURED_IN_STAGES)
        return
    if measures_saves:
        conversion.remarks.append(MEASURED_WITH_SAVES)
    if drops_last_rows or read_value(settings, "validation_dataloader.drop_last"):
        conversion.remarks.append(HELD_OUT_ROWS_LEFT)


def _report_last_rows(settings: ToolFile, drops_last_rows: bool, conversion: Conversion) -> None:
    """Reports which rows an epoch leaves out, or reads twice, at its end."""
    asks_to_drop = read_value(settings, "dataloader.drop_last")
    if runs_for_images(settings):
        conversion.remarks.append(ROWS_READ_AGAIN)
        if asks_to_drop:
            conversion.remarks.append(UNFILLED_LEFT_OUT)
    elif drops_last_rows or asks_to_drop:
        conversion.remarks.append(LAST_ROWS_LEFT_OUT)
    else:
        conversion.remarks.append(UNEVEN_ROWS_LEFT_OUT)


def _report_held_out_lengths(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that Automodel's recipe for images bounds the length of training rows alone."""
    held_out = read_section(settings, "validation_dataset")
    collate = read_section(settings, "validation_dataloader.collate_fn")
    is_bounded = held_out.get("max_length") or collate.get("max_length")
    way = OVERLONG_WAYS.get(str(conversion.recipe.get("overlength")))
    is_measured = held_out and runs_for_images(settings) and not has_stages(settings)
    if is_measured and way and not is_bounded:
        conversion.remarks.append(HELD_OUT_UNBOUNDED.format(way))


def _adapt_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Sets how often checkpoints are saved, and reports the saves that are left out here.

    Automodel saves by steps and, unless the file says false, at the end of each epoch too.
    """
    recipe = conversion.recipe
    schedule = read_section(settings, "step_scheduler")
    checkpoint = read_section(settings, "checkpoint")
    saves_epochs = schedule.get("save_checkpoint_every_epoch") is not False
    if checkpoint.get("enabled", True) is False:
        recipe["save_strategy"] = "no"
        conversion.add_difference("checkpoint.enabled", False, NOTHING_SAVED)
        return
    format_keys = ("save_consolidated", "model_save_format")
    in_parts = [key for key in format_keys if checkpoint.get(key) in (False, "false", "torch_save")]
    if in_parts and not settings.get("peft"):
        key = in_parts[0]
        conversion.add_remark(f"checkpoint.{key}", checkpoint[key], SAVED_IN_PARTS)
    if "ckpt_every_steps" not in schedule and not saves_epochs:
        recipe["save_steps"] = SAVE_STEPS
    elif "ckpt_every_steps" not in schedule:
        conversion.add_remark("step_scheduler.ckpt_every_steps", None, SAVED_IN_EPOCHS)
    steps = recipe.get("save_steps")
    if steps is not None and saves_epochs:
        conversion.add_remark("step_scheduler.ckpt_every_steps", steps, SAVED_WITH_EPOCHS)


def _adapt_decay(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    """Sets the weight decay by the schedule's start_wd and end_wd, or reports that it changes.

    A key that the schedule does not have is the optimizer's weight decay.
    """
    start = convert_number(schedule.get("start_wd"))
    end = convert_number(schedule.get("end_wd"))
    decay = conversion.recipe["weight_decay"]
    if start is None:
        start = decay
    if end is None:
        end = decay
    if start == end:
        conversion.recipe["weight_decay"] = end
    else:
        key = "start_wd" if schedule.get("end_wd") is None else "end_wd"
        note = CHANGING_DECAY.format(start, end)
        conversion.add_difference(f"lr_scheduler.{key}", schedule[key], note)


# pack_dataset of Automodel's components/datasets/llm/packed_sequence.py
PADDED_TO_SPLIT = (
    "packing: each document is padded to a multiple of twice cp_size before it is packed there, so "
    "that a packed row may hold less"
)


def _report_packing(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which documents Automodel packs into a row, and which of them see each other."""
    size = _read_packed_size(settings)
    if not size:
        return
    padded_length = _find_padded_length(read_section(settings, "dataset"))
    is_padded = padded_length is not None
    if is_padded:
        note = PADDED_ROWS.format(padded_length)
        conversion.add_difference("packed_sequence.packed_sequence_size", size, note)
    rows = _count_rows_of_forward(settings)
    is_thd = read_value(settings, "packed_sequence.packing_strategy", "thd") == "thd"
    if is_thd and read_value(settings, "distributed.cp_size", 1) > 1:
        conversion.remarks.append(PADDED_TO_SPLIT)
    if is_thd and not is_padded:  # padded rows have one length, and both tools pack these alike
        conversion.remarks.append(PACKED_IN_ORDER)
    has_several_rows = isinstance(rows, int) and rows > 1
    if is_thd and has_several_rows and _may_join_documents(settings):
        note = DOCUMENTS_NOT_APART
        if _has_dense_class(settings) and "attn" not in read_section(settings, "model.backend"):
            note = f"{WHERE_NO_ENGINE}{note}"
        conversion.add_difference("step_scheduler.local_batch_size", rows, note)
    if is_thd:
        _report_masks_of_stages(settings, conversion)


def _report_masks_of_stages(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that pipeline stages have the mask of the first packed row for all of them."""
    model = read_section(settings, "model")
    pipeline = read_section(settings, "distributed.pipeline")
    attention = model.get("attn_implementation")
    is_patched = has_stages(settings) and pipeline.get("patch_inner_model", True)
    if not is_patched or not _has_dense_class(settings):
        return
    if attention is None:
        conversion.remarks.append(f"packing: {WITHOUT_FLASH}{MASKED_AS_FIRST}")
    elif attention in NOT_FLASH:
        conversion.add_difference("model.attn_implementation", attention, MASKED_AS_FIRST)


def _read_packed_size(settings: ToolFile) -> Any:
    """Returns the length of packed rows of texts; 0 if no rows are packed so.

    The recipe for images does not read this key.
    """
    packed = read_section(settings, "packed_sequence")
    return 0 if runs_for_images(settings) else packed.get("packed_sequence_size") or 0


def _find_padded_length(dataset: Mapping[str, Any]) -> str | None:
    """Returns to which length a data set pads its rows, in words; None if it pads none."""
    if str(dataset.get("_target_")).endswith("HellaSwag"):
        return LONGEST if dataset.get("pad_to_max_length", True) else None
    length = dataset.get("seq_length")
    return f"seq_length ({length})" if length and dataset.get("padding") == "max_length" else None


def has_stages(settings: ToolFile) -> bool:
    """Whether the file splits the model's layers over pipeline stages."""
    stages = read_value(settings, "distributed.pp_size")
    return isinstance(stages, int) and stages > 1


def _count_rows_of_forward(settings: ToolFile) -> Any:
    """Returns the number of rows in a forward pass there, as the file says it.

    Pipeline stages compute a micro-batch in parts of `pp_microbatch_size` rows.
    """
    if has_stages(settings):
        return read_value(settings, "distributed.pipeline.pp_microbatch_size", 1)
    return read_value(settings, "step_scheduler.local_batch_size") or 1


def _may_join_documents(settings: ToolFile) -> bool:
    """Whether documents in one of several packed rows may see those before them there.

    transformers' classes get flash attention for packed rows, by _apply_preload_overrides of
    kernel_patches.py. An own class has Transformer Engine's attention by default, which keeps
    documents apart. Without it, dense ones have that of transformers.
    """
    family = guess_family(name_model(settings))
    backend = read_section(settings, "model.backend")
    has_flash = read_value(settings, "model.attn_implementation") not in NOT_FLASH
    if _has_dense_class(settings):
        return has_flash and backend.get("attn") != "te"
    if backend:
        return False
    if is_of_transformers(settings):
        return True
    if family is None:  # a name that says no family may be that of an own class
        return has_flash
    return family not in OWN_FAMILIES


def _has_dense_class(settings: ToolFile) -> bool:
    """Whether Automodel loads one of its own classes of dense models."""
    has_family = guess_family(name_model(settings)) in OWN_DENSE_FAMILIES
    return has_family and not is_of_transformers(settings)


# families whose own class gives Gate, of components/moe/layers.py, no dtype by default
GATED_IN_16_BITS = ("hy_v3",)
GATED_IN_16_BITS_IN_06 = ("deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
ROUTERS_IN_16_BITS = (
    "routers are computed in bfloat16 there, in float32 here, and choose some other experts"
)
ROUTERS_IN_16_BITS_IN_06 = (
    "routers are computed in bfloat16 in 0.6 there, and choose some other experts; in float32 "
    "since, as here"
)
ROUTERS_IN_32_BITS = (
    "routers are computed in float32 there, in the run's 16 bits here, and choose some other "
    "experts"
)
ROUTERS_IN_32_BITS_SINCE_07 = (
    f"{ROUTERS_IN_32_BITS}; in 0.6 as here, but the scores are rounded to bfloat16 too"
)
# The weight of Gate has the model's dtype, unless an own class lists it in
# _keep_in_fp32_modules_strict. _restore_loaded_model_dtype of _transformers/model_init.py gives it
# the dtype of the files in transformers' classes.
# Family -> what is said of its own class.
GATES_IN_FP32 = {
    "ernie4_5_moe": "the routers' weights are trained in float32 there; in bfloat16 here",
    "minimax_m2": (
        "the routers' weights are trained in float32 in 0.7 there; in bfloat16 here, as in 0.6"
    ),
}
# Families whose routers have another dtype in Automodel's own class, by its default, than in
# transformers' code.
GATE_NOTES: Mapping[str, str] = {
    **dict.fromkeys(GATED_IN_16_BITS, ROUTERS_IN_16_BITS),
    "minimax_m2": ROUTERS_IN_32_BITS_SINCE_07,
    "laguna": ROUTERS_IN_32_BITS,
    "gemma4_text": ROUTERS_IN_32_BITS,
}
ROUTERS_IN_OWN_DTYPE = "routers are computed in the dtype of the model's own code"
# the line by which a router of transformers' classes computes in float32
GATE_IN_FP32 = re.compile(
    r"F\.linear\(hidden_states\.(type\(torch\.float32\)|float\(\)), "
    r"self\.weight\.(type\(torch\.float32\)|float\(\))\)"
)
# a model of the family deepseek_v3 whose config has an rms_norm_eps of 1e-5
OF_LARGER_EPS = re.compile("moonlight", re.IGNORECASE)
# the lines by which a class of transformers keeps the routers' biases in float32
KEEPS_BIASES = re.compile(r"_keep_in_fp32_modules_strict = \[[^\]]*e_score_correction_bias")
# Families whose own class has the routers' biases in float32: e_score_correction_bias of Gate.
# transformers' class has them in the model's dtype, unless KEEPS_BIASES matches its source.
FP32_BIAS_FAMILIES = ("kimi_linear", "laguna", "minimax_m2")
ROUNDED_BIASES = (
    "the biases by which routers choose experts are in float32 there, in the run's 16 bits here, "
    "and choose some other experts"
)
# window_size of models/gpt_oss/layers.py, for Transformer Engine
WIDER_WINDOW = (
    "in the layers with a sliding window a token attends to one more before it there, under "
    "Transformer Engine's attention, a backend's default: 128 and itself"
)
# _build_sparse_mask of models/deepseek_v32/layers.py takes the place of the causal mask under sdpa,
# and hides no token of a row that is no longer than index_topk
SEES_LATER = (
    "under sdpa{} a token attends to those after it too there, what it is to predict among them; "
    "here to those before it alone"
)
WITHOUT_ENGINE = ", the default without Transformer Engine,"
# from_hf and to_hf of models/gemma4_moe/state_dict_adapter.py
SCALES_FOLDED = (
    "an expert's per_expert_scale is multiplied into its down_proj there, which is trained as one "
    "weight, and is 1 in the export; here it is a weight beside it, trained too"
)
# what own classes do otherwise than those of transformers, with names in `NOTES`
CLASS_NOTES = list(read_table("class_notes.csv"))
UNKNOWN_CLASS = (
    "model: its name says no family that is known here: what a class of Automodel's own for it "
    "does otherwise is not listed"
)
# patterns of configs whose output scores are scaled, or capped
SCALED_SCORES = "logits_scaling|logit_scale|lm_head_multiplier"
CAPPED_SCORES = "final_logit_softcapping"
# validate_lm_head of components/loss/chunked_ce.py refuses a cap and a head with an adapter
CHUNKED_LOSS = "ChunkedCrossEntropy"
SCORES_UNSCALED = (
    "this loss takes scores as the head gives them there, without a scale or a cap of the model's "
    "config, which has effect here"
)
SCORES_UNSCALED_BUT_IN_06 = f"{SCORES_UNSCALED} and in 0.6"
# an output head with a bias, in the source of a class of transformers
BIASED_HEAD = re.compile(r"lm_head = nn\.Linear\([^)]*(bias=(True|\S*lm_head_bias)|vocab_size)\)")
SCORES_UNBIASED = "this loss leaves the output head's bias out there; it has effect here"
# _init_model_bnb_streaming of _transformers/model_init.py quantizes every linear layer
HEAD_IN_4_BITS = "the output head is in 4 bits too there, in 16 bits here"


# get_sync_ctx of components/distributed/utils.py reduces gradients once a step. Until then
# to_accumulated_grad_if_needed of torch's FSDP2 keeps them in the reduce_dtype. Here each
# micro-batch is reduced.
ADDED_IN_FP32 = (
    "gradients: a step's micro-batches are added in float32 there under FSDP; in 16 bits here, as "
    "the weights are"
)
# _restore_loaded_model_dtype of _transformers/model_init.py, for transformers' classes
AS_FILED = "weights have the dtype of the model's files there, as a rule bfloat16; bfloat16 here"
# resolve_storage_dtype, which only recipes/llm/kd.py and recipes/vlm/kd.py of 0.6 call
AS_FILED_BUT_IN_06 = (
    "weights have the dtype of the model's files there, as a rule bfloat16, and are in float32 in "
    "0.6; bfloat16 here"
)
WIDENED = (
    "weights whose files are in float32 or float16 are trained in float32 there; bfloat16 here"
)
# For a name that says no family. An own class, such as Inkling's, has almost all weights in
# torch_dtype.
MAYBE_WIDENED = f"where Automodel has no class of its own for the model, {WIDENED}"
# families for which Automodel has its own class: MODEL_ARCH_MAPPING of _transformers/registry.py
OWN_FAMILIES = (
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
# families of a text part for which Automodel has its own class of the model with images:
# supports_config of Mistral3ForConditionalGeneration
OWN_TEXT_FAMILIES = ("ministral3", "mistral4")


def _is_of_own_family(name: str) -> bool:
    """Whether Automodel has its own class for a model's family."""
    family = guess_vision_family(name) if has_tower(name) else guess_family(name)
    return family in OWN_FAMILIES or guess_family(name) in OWN_TEXT_FAMILIES


def report_loaded_dtype(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which dtypes the weights, their gradients and the routers' biases have there.

    Only a run that trains all weights in bfloat16 here differs in the first two.
    """
    recipe = conversion.recipe
    name = name_model(settings)
    _report_router_biases(name, settings, conversion)
    if recipe.get("use_peft") or recipe.get("dtype") != "bfloat16":
        return
    if _adds_in_fp32(settings):
        conversion.remarks.append(ADDED_IN_FP32)
    model = read_section(settings, "model")
    asked_dtype = model.get("torch_dtype", "auto")
    family = guess_vision_family(name) if has_tower(name) else guess_family(name)
    has_own_class = _is_of_own_family(name)
    keeps_gates = is_mixture(name) and not is_of_transformers(settings)
    if family in GATES_IN_FP32 and keeps_gates:
        conversion.add_difference("model", name, GATES_IN_FP32[family])
    if asked_dtype == "auto":
        optimizer = str(read_value(settings, "optimizer._target_"))
        # distillation in 0.6 trained in float32 with torch's optimizers
        is_fp32_in_06 = "teacher_model" in settings and optimizer.startswith("torch.optim.")
        note = AS_FILED_BUT_IN_06 if is_fp32_in_06 else AS_FILED
        conversion.add_remark("model.torch_dtype", model.get("torch_dtype"), note)
    elif model.get("force_hf") or not has_own_class:
        is_known = family is not None or model.get("force_hf")
        note = WIDENED if is_known else MAYBE_WIDENED
        conversion.add_remark("model.torch_dtype", asked_dtype, note)


def _defers_reduction(settings: ToolFile) -> bool:
    """Whether Automodel reduces the gradients of a step's micro-batches at its end alone.

    get_sync_ctx does so for a model that is wrapped itself. Where its parts alone are, by
    parallelize_model of components/moe/parallelizer.py, MoEFSDPSyncMixin may do so.
    """
    layout = read_section(settings, "distributed")
    wraps_model = read_value(layout, "moe.wrap_outer_model", True)
    if _is_shared(layout, "ep_size") and wraps_model is False:
        backend = read_section(settings, "model.backend")
        return bool(backend.get("enable_fsdp_optimizations"))
    return bool(layout.get("defer_fsdp_grad_sync", True))


def _adds_in_fp32(settings: ToolFile) -> bool:
    """Whether Automodel adds a step's micro-batches in float32, and casts only the sum to 16 bits.

    With groups that replicate the weights, this toolkit does the same: these do not count.
    """
    layout = read_section(settings, "distributed")
    schedule = read_section(settings, "step_scheduler")
    dtype = read_value(layout, "mp_policy.reduce_dtype", "float32")
    has_one_group = layout.get("dp_replicate_size") in (None, "none", 1)
    is_plain_fsdp2 = (
        layout.get("strategy", "fsdp2") == "fsdp2" and has_one_group and not has_stages(settings)
    )
    is_deferred = _defers_reduction(settings) and "float32" in str(dtype)
    # one micro-batch a step, on one process: nothing is added
    is_one = schedule.get("global_batch_size", 0) == schedule.get("local_batch_size", 1)
    return bool(is_plain_fsdp2 and is_deferred and not is_one)


def _report_router_biases(name: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports that the biases of routers are rounded to 16 bits here, and not there.

    A buffer is rounded when it is loaded in 16 bits, a parameter whenever a layer computes with it.
    """
    family = guess_family(name) or ""
    recipe = conversion.recipe
    loads_in_16_bits = recipe.get("use_peft") or recipe.get("dtype") == "bfloat16"
    source = read_family_source(family)
    is_parameter = "e_score_correction_bias = nn.Parameter" in source
    is_fp32_there = family in FP32_BIAS_FAMILIES and not is_of_transformers(settings)
    is_fp32_here = KEEPS_BIASES.search(source)  # Kimi Linear's since transformers 5.24
    if is_fp32_there and not is_fp32_here and (loads_in_16_bits or is_parameter):
        conversion.add_difference("model", name, ROUNDED_BIASES)


def _report_own_class(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Automodel's own class of the model does otherwise than transformers' class.

    That is routers, attention, losses of later tokens, and weights that stay in float32.
    """
    name = name_model(settings)
    family = str(guess_family(name))
    _report_router_dtype(family, settings, conversion)
    if is_of_transformers(settings):
        return
    for row in CLASS_NOTES:
        is_remark = row["report"] == "remark"
        report = conversion.add_remark if is_remark else conversion.add_difference
        if family in row["families"].split():
            report("model", name, NOTES[row["note"]])
    if OF_LARGER_EPS.search(name):
        conversion.add_remark("model", name, NOTES["LATENTS_IN_06"])
    if family in FAMILIES_PREDICTING_AHEAD and _predicts_ahead(settings):
        conversion.add_difference("model", name, LATER_TOKENS_PREDICTED)
    # initialize_weights of Mistral 4 with images
    loads_fp32 = "32" in str(read_value(settings, "model.torch_dtype"))
    if family == "mistral4" and conversion.image_family and not loads_fp32:
        conversion.add_difference("model", name, ROTATION_ROUNDED)
    if family == "gemma4_text" and is_mixture(name) and not conversion.recipe.get("use_peft"):
        conversion.add_difference("model", name, SCALES_FOLDED)
    _report_attention(family, settings, conversion)
    # a file with images says in another line that its model is not known
    is_for_images = conversion.image_family or any(
        UNKNOWN_IMAGES in line for line in conversion.differences
    )
    if guess_family(name) is None and not is_for_images:
        conversion.remarks.append(UNKNOWN_CLASS)


def _report_attention(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a token attends to other tokens in Automodel's own class than here."""
    name = name_model(settings)
    model = read_section(settings, "model")
    attention = read_value(model, "backend.attn")
    # without a backend the class of gpt-oss takes flex attention, with the window that is here
    if family == "gpt_oss" and model.get("backend") is not None and attention != "flex":
        conversion.add_difference("model", name, WIDER_WINDOW)
    if family == "deepseek_v32" and attention in (None, "sdpa"):
        condition = "" if attention else WITHOUT_ENGINE
        conversion.add_difference("model.backend.attn", attention, SEES_LATER.format(condition))


def _report_scores(settings: ToolFile, conversion: Conversion) -> None:
    """Reports an output head in 4 bits, and the scale, the cap or the bias of scores that a fused
    loss leaves out there, which computes them from the head's weight alone.
    """
    # models with images and mixtures of experts, and `force_hf`, have another loader
    is_loaded_otherwise = (
        conversion.image_family
        or is_mixture(name_model(settings))
        or read_value(settings, "model.force_hf")
    )
    if read_value(settings, "quantization.load_in_4bit") and not is_loaded_otherwise:
        conversion.add_difference("quantization.load_in_4bit", True, HEAD_IN_4_BITS)
    loss = read_section(settings, "loss_fn")
    family = conversion.image_family or guess_family(name_model(settings)) or ""
    source = read_family_source(family)
    target = str(loss.get("_target_"))
    is_capped = bool(loss.get("logit_softcapping"))
    scores = f"{SCALED_SCORES}|{CAPPED_SCORES}"
    if target.endswith(FUSED_LOSS) and not is_capped and re.search(scores, source):
        conversion.add_difference("loss_fn._target_", FUSED_LOSS, SCORES_UNSCALED)
    elif target.endswith(FUSED_LOSS) and BIASED_HEAD.search(source):
        conversion.add_difference("loss_fn._target_", FUSED_LOSS, SCORES_UNBIASED)
    elif target.endswith(CHUNKED_LOSS) and re.search(SCALED_SCORES, source):
        conversion.add_difference("loss_fn._target_", CHUNKED_LOSS, SCORES_UNSCALED_BUT_IN_06)


# _patch_liger_kernel of _transformers/kernel_patches.py, for transformers' classes by default
WITH_LIGER = "where Liger is installed, "


def _report_liger(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Liger's kernels compute otherwise than the config of a model says.

    Automodel uses Liger by default, but not under tensor or context parallelism.
    """
    name = name_model(settings)
    layout = read_section(settings, "distributed")
    is_parallel = _is_shared(layout, "tp_size") or _is_shared(layout, "cp_size")
    asked = read_value(settings, "model.use_liger_kernel")
    if is_parallel or asked is False:
        return
    # a fused loss computes the scores itself, in place of Liger's forward
    has_fused_loss = str(read_value(settings, "loss_fn._target_")).endswith(
        (FUSED_LOSS, CHUNKED_LOSS)
    )
    if guess_family(name) in UNMULTIPLIED_BY_LIGER and not has_fused_loss:
        note = f"{WITH_LIGER}{UNMULTIPLIED}"
        conversion.add_difference("model.use_liger_kernel", asked, note)
    if ROTATED_IN_PART.search(name.lower()):
        note = f"{WITH_LIGER}{ROTATED_WHOLE}"
        conversion.add_difference("model.use_liger_kernel", asked, note)


def _predicts_ahead(settings: ToolFile) -> bool:
    """Whether the loss may include that of predicting later tokens.

    Distillation does not include it, and a file may set the number of these layers to 0.
    """
    model = read_section(settings, "model")
    sections = [model, read_section(model, "config"), read_section(model, "text_config")]
    counts = [section.get(key) for section in sections for key in KEYS_OF_LAYERS_AHEAD]
    return not settings.get("teacher_model") and 0 not in counts


def _report_router_dtype(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Automodel computes routers in another dtype than transformers' class does.

    A file asks for a dtype by `gate_precision`; otherwise Automodel's own class has a default.
    """
    model = read_section(settings, "model")
    name = name_model(settings)
    asked = read_value(model, "backend.gate_precision")
    is_fp32_here = GATE_IN_FP32.search(read_family_source(family)) is not None
    is_dense = family == "gemma4_text" and not is_mixture(name)
    is_listed = family in GATE_NOTES and not is_dense
    if asked is not None and not (is_fp32_here and "float32" in str(asked)):
        conversion.add_difference("model.backend.gate_precision", asked, ROUTERS_IN_OWN_DTYPE)
    elif asked is None and is_listed and not is_of_transformers(settings):
        conversion.add_difference("model", name, GATE_NOTES[family])
    elif asked is None and family in GATED_IN_16_BITS_IN_06 and not is_of_transformers(settings):
        conversion.add_remark("model", name, ROUTERS_IN_16_BITS_IN_06)


def adapt_automodel(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of an Automodel file ask for together."""
    recipe = conversion.recipe
    if read_section(settings, "peft"):
        recipe["use_peft"] = True
    teacher = read_value(settings, "teacher_model.pretrained_model_name_or_path")
    if teacher:
        recipe["teacher_model_name_or_path"] = teacher
    minutes = read_value(settings, "dist_env.timeout_minutes")
    if isinstance(minutes, int | float) and minutes * 60 > Run().timeout_seconds:
        recipe["timeout_seconds"] = round(minutes * 60)
    _adapt_automodel_optimizer(read_section(settings, "optimizer"), conversion)
    schedule = settings.get("lr_scheduler")
    if isinstance(schedule, dict):
        _adapt_automodel_schedule(schedule, conversion)
    if read_value(settings, "dataloader.shuffle") is False:
        is_shuffled_once = read_value(settings, "dataset.shuffle_seed") is not None
        note = SHUFFLED_ONCE if is_shuffled_once else IN_ORDER
        conversion.add_difference("dataloader.shuffle", False, note)
    _adapt_automodel_lengths(settings, conversion)
    if "max_steps" in recipe and "num_train_epochs" not in recipe:
        recipe["num_train_epochs"] = 1.0  # max_steps decides
    if settings.get("wandb") and read_value(settings, "wandb.enable", True):
        recipe["report_to"] = "wandb"
    _adapt_batch(settings, conversion)
    _adapt_loop(settings, conversion)
    _report_held_out_lengths(settings, conversion)
    _report_packing(settings, conversion)
    _report_stages(settings, conversion)
    _report_rows_of_images(settings, conversion)
    _report_masks(settings, conversion)
    _report_reduction(settings, conversion)
    _report_ranks_in_06(settings, conversion)
    _report_own_class(settings, conversion)
    _report_scores(settings, conversion)
    _report_liger(settings, conversion)


def _adapt_automodel_optimizer(optimizer: Mapping[str, Any], conversion: Conversion) -> None:
    """Sets the optimizer's defaults, and an optimizer with bfloat16 moments where the file asks."""
    recipe = conversion.recipe
    set_optimizers_defaults(str(optimizer.get("_target_")), recipe)
    if any("bfloat16" in str(optimizer.get(key)) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")):
        recipe["optim"] = next(name for name, facts in OPTIMIZERS.items() if facts.moment_itemsize)


# `build` of LRSchedulerConfig
WARMUP_OF_A_TENTH = "a tenth of the steps there, rounded down, and at most 1000; rounded up here"
WARMUP_FROM_A_TENTH = (
    "warm-up: from a tenth of the rate there, and the step after it has the whole; here each step "
    "has an even share more, and the last one the whole"
)


def _adapt_automodel_schedule(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    """Sets what the section `lr_scheduler` says: warm-up, weight decay and the lowest rate.

    A key that is absent gets Automodel's default.
    """
    recipe = conversion.recipe
    recipe.setdefault("lr_scheduler_type", "cosine")
    if schedule.get("lr_warmup_steps") is None:
        recipe["warmup_ratio"] = 0.1
        conversion.add_remark("lr_scheduler.lr_warmup_steps", None, WARMUP_OF_A_TENTH)
    if schedule.get("lr_warmup_steps") != 0 and schedule.get("init_lr") is None:
        conversion.remarks.append(WARMUP_FROM_A_TENTH)
    _adapt_decay(schedule, conversion)
    if schedule.get("min_lr") is None:
        recipe["min_lr_ratio"] = 0.01


NO_TRUNCATION = (None, False, "do_not_truncate")  # values of dataset.truncation
# __getitem__ of ChatDataset, and of ColumnMappedTextInstructionDataset
CUT_BEFORE_ANSWER = "a row that is cut before its answer has no loss there; it is left out here"
NEXT_IN_PLACE = (
    "a row that is cut before its answer is the next one in its place there; it is left out here"
)


def _adapt_automodel_lengths(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the length of rows, packing, and what becomes of a row that is longer.

    A row is first cut to `dataset.seq_length`, if it is cut at all, and then packed.
    """
    recipe = conversion.recipe
    packed = read_section(settings, "packed_sequence")
    dataset = read_section(settings, "dataset")
    packed_length = _read_packed_size(settings)
    is_cut = dataset.get("truncation") not in NO_TRUNCATION
    # without truncation seq_length is the length to which rows are padded
    row_length = dataset.get("seq_length") if is_cut else None
    # pack_dataset, which packs by thd, always drops longer rows
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
        note = NEXT_IN_PLACE if dataset.get("column_mapping") else CUT_BEFORE_ANSWER
        conversion.add_remark("dataset.seq_length", row_length, note)
    if packed_length and row_length and row_length < packed_length:
        note = "a row is cut to it before it is packed there, to max_length here"
        conversion.add_difference("dataset.seq_length", row_length, note)


# default_collate_fn of components/datasets/vlm/collate_fns.py
LONG_ROWS_CUT_IN_BATCHES = (
    "a longer row with images is cut there, unless its function drops it; dropped here"
)
# PreTokenizedDatasetWrapper of components/datasets/vlm/datasets.py
LONG_ROWS_REPLACED = (
    "a longer row{} gives its place to another one, drawn at random, there; {} left out here"
)
LONG_ROWS_CUT_OR_REPLACED = (
    "a longer row{} is cut there, and one whose image is cut gives its place to another one; {} "
    "left out here"
)
# drop_long_samples goes by _estimate_sample_length of components/datasets/vlm/neat_packing_vlm.py
DROPPED_BY_ESTIMATE = (
    "a row is left out there where an estimate is more than pack_size: as a rule a third of its "
    "characters, and 500 for an image; here where its tokens are more"
)
KEPT_BY_ESTIMATE = " that drop_long_samples leaves in"
# PackedDatasetWrapper of the same file
PACKED_BY_ESTIMATE = (
    "packing: rows are put together by an estimate of their lengths there, and one that does not "
    "fit in after all is left out; here by their lengths"
)


def _adapt_lengths_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the length of rows for Automodel's recipe for images, and what becomes of longer ones.

    Such a row is bounded when it is tokenized, by `max_length`, or otherwise when rows become a
    batch, by the `collate_fn`. Packed rows have `pack_size` tokens.
    """
    packed = read_section(settings, "packed_sequence")
    dataset = read_section(settings, "dataset")
    pack_size = packed.get("pack_size")
    length = packed.get("max_length", dataset.get("max_length"))
    collate = read_section(settings, "dataloader.collate_fn")
    is_cut = dataset.get("truncate", dataset.get("max_length") is not None)
    drops_long = bool(pack_size and packed.get("drop_long_samples"))
    # rows with images are never cut here
    cuts_texts = is_cut and conversion.image_family is None and not drops_long
    overlength = "truncate" if cuts_texts else "drop"
    if length and overlength == "drop":
        note = LONG_ROWS_CUT_OR_REPLACED if is_cut else LONG_ROWS_REPLACED
        which = KEPT_BY_ESTIMATE if drops_long else ""
        is_shorter = pack_size and length < pack_size
        left_out = "one longer than pack_size is" if is_shorter else "it is"
        conversion.add_difference(
            "packed_sequence.max_length", length, note.format(which, left_out)
        )
    if drops_long:
        conversion.add_difference("packed_sequence.drop_long_samples", True, DROPPED_BY_ESTIMATE)
    if pack_size:
        conversion.remarks.append(PACKED_BY_ESTIMATE)
        conversion.recipe |= {"packing": True, "max_length": pack_size, "overlength": overlength}
        if conversion.image_family is not None:
            # only the default attention here keeps documents with images apart in a packed row
            conversion.recipe.pop("attn_implementation", None)
        return
    if not length and collate.get("max_length"):
        length = collate["max_length"]
        is_dropped = collate.get("drop_overlong")
        if not (is_dropped or reads_images(settings)):
            overlength = "truncate"
        elif not is_dropped:
            conversion.add_difference(
                "dataloader.collate_fn.max_length", length, LONG_ROWS_CUT_IN_BATCHES
            )
    if length:
        conversion.recipe |= {"max_length": length, "overlength": overlength}


# Functions of components/datasets/vlm/collate_fns.py that write an empty thought, by
# _inject_thinking_prefix_tokens. The thought follows the marker from which
# build_labels_from_template trains.
THOUGHT_WRITERS = ("gemma4_inject_thinking_prefix", "gemma4_prefix_collate_fn")
THOUGHT_ADDED = (
    "an empty thought is written before each answer of Gemma 4 there, and trained with it; here a "
    "row is as the chat template writes it"
)
# inject_fake_image_into_conversation of components/datasets/vlm/fake_image.py
BLANK_IMAGES = (
    "a blank image is put before the first question of a row without one there, which shifts what "
    "follows; none is here"
)
# PreTokenizedDatasetWrapper tokenizes the rendered text as any text
STARTS_TWICE = (
    "rows: where the chat template writes the BOS token and the tokenizer begins each text with "
    "one too, as Gemma 3's, a row begins with two there; with one here"
)
EMBEDDING_THERE = (
    "not read there since 0.3, and refused since 0.7; nor read here: the embedding is trained; "
    "frozen_modules: [embed_tokens] freezes it, as 0.2 does"
)
# models whose tokenizer begins no text with BOS; that of Gemma 4's base models does
WITHOUT_OWN_BOS = re.compile(r"qwen|internvl|gemma-?4-.*it\b")
# build_labels of collate_fns.py: the templates of these families write nothing between a question's
# end and an answer, so that _derive_turn_markers finds no marker
FAMILIES_WITHOUT_HEADER = ("mistral3",)
FOUND_BY_WORDS = (
    "an answer is found there by its own tokens, where they first stand in a row: those that stand "
    "in what is asked, too, are trained there; here the answer"
)
# _build_labels_from_markers of collate_fns.py; the templates of these families trim no answer
FAMILIES_WITH_BREAK = ("internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
HEADER_UNFOUND = (
    "rows: an answer that begins with a line break is not trained there where the tokenizer has "
    "one token for that and the one that ends its header; it is here"
)


def _report_rows_of_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Automodel's recipe for images writes into rows, and which tokens it trains."""
    packed = read_section(settings, "packed_sequence")
    is_packed = bool(packed.get("pack_size"))
    collate = read_value(settings, "dataloader.collate_fn._target_")
    if is_packed:  # packing has its own function in place of collate_fn
        collate = None
    functions = {
        "packed_sequence.post_tokenize_hook_fn": packed.get("post_tokenize_hook_fn"),
        "dataloader.collate_fn._target_": collate,
    }
    name = name_model(settings)
    is_gemma = guess_family(name) == "gemma4_text"
    for key, value in functions.items():
        if str(value).endswith(THOUGHT_WRITERS) and is_gemma:
            conversion.add_difference(key, value, THOUGHT_ADDED)
    if runs_for_images(settings) and packed.get("pretokenize", is_packed):
        _report_tokenized(settings, conversion)
    # since 0.7 the recipe for texts reads freeze_config too
    frozen = read_section(settings, "freeze_config")
    has_text_part = runs_for_images(settings) or has_tower(name)
    if frozen.get("freeze_embeddings") and has_text_part and not settings.get("peft"):
        conversion.add_remark("freeze_embeddings", True, EMBEDDING_THERE)
    if frozen.get("freeze_language_model") and has_text_part and not reads_images(settings):
        conversion.add_difference("freeze_language_model", True, "trained here")
    if conversion.image_family in FAMILIES_WITHOUT_HEADER or (
        conversion.image_family and "pixtral" in name.lower()
    ):
        conversion.add_difference("model", name, FOUND_BY_WORDS)
    if conversion.image_family in FAMILIES_WITH_BREAK:
        conversion.remarks.append(HEADER_UNFOUND)


def _report_tokenized(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Automodel writes into rows that it tokenizes before it makes batches of them."""
    dataset = read_section(settings, "dataset")
    asked = dataset.get("inject_fake_images")
    if not reads_images(settings) and dataset.get("inject_fake_images", True):
        conversion.add_difference("dataset.inject_fake_images", asked, BLANK_IMAGES)
    if not WITHOUT_OWN_BOS.search(name_model(settings).lower()):
        conversion.remarks.append(STARTS_TWICE)


# Families whose own class gives the tokens of an image positions by row and column. Its text part
# numbers all tokens instead where it gets no position_ids. Pipeline stages after the first get
# none, unless rows are packed or split by context parallelism.
FAMILIES_WITH_IMAGE_POSITIONS = ("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
NUMBERED_IN_STAGES = (
    "in the pipeline stages after the first the position of a token is its number in the row "
    "there; in the first, and in all layers here, tokens of an image have those of their row and "
    "column in it, and the tokens behind it count on from these"
)


def _report_stages(settings: ToolFile, conversion: Conversion) -> None:
    """Reports a tied output head that pipeline stages train apart from the embedding, and that
    later stages do not know where in an image a token is.
    """
    if not has_stages(settings):
        return
    layout = read_section(settings, "distributed")
    is_tied = TIED_MODEL.search(name_model(settings).lower())
    if is_tied and not conversion.recipe.get("use_peft"):
        conversion.add_difference("distributed.pp_size", layout["pp_size"], HEAD_APART)
    is_packed = read_value(settings, "packed_sequence.pack_size")
    is_whole = layout.get("cp_size") in (None, 1) and not is_packed
    if conversion.image_family in FAMILIES_WITH_IMAGE_POSITIONS and is_whole:
        conversion.add_difference("distributed.pp_size", layout["pp_size"], NUMBERED_IN_STAGES)


# _indexed_mask_to_4d_block_causal of components/datasets/utils.py makes masks of booleans, and
# transformers' eager_attention_forward adds these to the scores
PACKED_ROWS_UNMASKED = (
    "in a packed row of several documents this attention hides nothing there: a token sees all "
    "others, later ones and those of other documents too; here those before it in its own"
)
# the same masks; transformers' create_causal_mask adds neither windows nor images to them
WITHOUT_WINDOWS = (
    "in packed rows{} no layer has a window there, and an image's tokens see those before them "
    "alone; here as in rows that are not packed"
)
# Gemma4MoETextModelBackend of models/gemma4_moe makes its own masks where a packed row has several
# documents, which neat_packed_vlm_collater hands it
OF_ONE_DOCUMENT = " of one document alone"
# _shift_sample of neat_packing_vlm.py keeps no token_type_ids
IMAGES_IN_ORDER = (
    "in packed rows an image's tokens see those before them alone there; here each other too"
)
# _detect_causal_mask of _transformers/te_attention.py reads the first and the last row of a mask.
# Automodel's own classes, such as that of Gemma 4, compute attention otherwise.
IMAGES_UNSEEN_BY_ENGINE = (
    "where no row of a micro-batch is padded, an image's tokens see those before them alone there; "
    "here each other too"
)
# families whose own class computes attention by transformers' functions
FAMILIES_BY_TRANSFORMERS = ("gemma3_text", "gemma3n_text", "gemma4_text", "llama", "qwen2")
# Families whose own class computes attention by BackendConfig.attn, and passes the mask on as is.
# Flash attention's mask holds the numbers of documents. preprocess_args_and_kwargs_for_attn of
# components/attention/utils.py takes it for a mask of padding.
FAMILIES_BY_BACKEND = (
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
    "attention, the default where it is installed, and under gpt-oss's own default, flex "
    "attention, and 0.7 refuses such rows; each is apart here"
)


def _report_masks(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a token attends to others there than here: images under Transformer Engine, and
    rows that are packed without `thd` and without context parallelism.
    """
    packed = read_section(settings, "packed_sequence")
    packs_images = runs_for_images(settings) and bool(packed.get("pack_size"))
    packs_images_unsplit = packs_images and packed.get("packing_format") != "thd"
    packs_texts = bool(_read_packed_size(settings)) and packed.get("packing_strategy") == "neat"
    shares_rows = _is_shared(read_section(settings, "distributed"), "cp_size")
    model = read_section(settings, "model")
    attention = model.get("attn_implementation")
    is_whole = not shares_rows and not packs_images
    if attention == "te" and conversion.image_family == "gemma3" and is_whole:
        conversion.add_difference("model.attn_implementation", attention, IMAGES_UNSEEN_BY_ENGINE)
    if shares_rows or not (packs_images_unsplit or packs_texts):
        return
    name = name_model(settings)
    family = guess_family(name) or ""
    backend = read_value(model, "backend.attn")
    has_own_class = is_mixture(name) and not is_of_transformers(settings)
    is_by_transformers = packs_images_unsplit and not has_own_class
    if attention == "eager" and (is_by_transformers or family in FAMILIES_BY_TRANSFORMERS):
        conversion.add_difference("model.attn_implementation", attention, PACKED_ROWS_UNMASKED)
    elif is_by_transformers and attention == "sdpa" and family.startswith("gemma"):
        conversion.add_difference(
            "model.attn_implementation", attention, WITHOUT_WINDOWS.format("")
        )
    elif conversion.image_family == "gemma3":
        conversion.add_difference("model.attn_implementation", attention, IMAGES_IN_ORDER)
    elif (
        has_own_class
        and family in FAMILIES_BY_BACKEND
        and attention == "flash_attention_2"
        and backend is None
    ):
        conversion.add_difference("model.backend.attn", backend, SEEN_BY_ENGINE)
    if has_own_class and family == "gemma4_text" and attention in ("eager", "sdpa"):
        note = WITHOUT_WINDOWS.format(OF_ONE_DOCUMENT)
        conversion.add_difference("model.attn_implementation", attention, note)


# MixedPrecisionPolicy of torch, which FSDP2Config makes with torch.float32
GRADIENTS_REDUCED_IN_DTYPE = (
    "gradients are added over the ranks in this dtype there; in float32 here"
)
MEGATRON = "megatron_fsdp"
REDUCED_BY_MEGATRON = (
    "gradients are added over the ranks in the weights' dtype there, the default of "
    "grad_reduce_in_fp32; in float32 here"
)
# torch's FSDP2 casts a reduced gradient to its parameter's dtype, orig_dtype. The gradients of
# experts that ep_size alone shards are summed over a step's micro-batches in it too.
GRADIENTS_ROUNDED = "gradients: in 16 bits there, as their weights are; in float32 here"
# Values of `experts` for which MoE of components/moe/layers.py makes GroupedExpertsTE, unless a
# dispatcher has experts of its own. _clip_grad_norm_impl of components/training/utils.py takes a
# rank's weights of it for weights that all ranks have.
EXPERTS_OF_ENGINE = ("te", "torch")
DISPATCHERS_OTHERWISE = ("torch", "mok")
CLIPPED_BY_RANK_IN_06 = (
    "each rank clips gradients by a norm with its own experts alone in 0.6 there, so that parts of "
    "one weight are scaled otherwise; by one norm with all experts since, as here"
)
# transformers' style for a norm that each head of a rank has; get_hf_tp_shard_plan and the plans of
# components/distributed/optimized_tp_plans.py leave such norms alone in 0.6
NORM_OF_HEADS = 'self_attn.q_norm": "replicated_with_grad_allreduce"'
NORMS_OF_RANKS_IN_06 = (
    "q_norm and k_norm are trained on each rank by the gradients of its own heads alone in 0.6 "
    "there, and become other weights on each; by those of all heads since, as here"
)

# apply_model_infrastructure of _transformers/infrastructure.py took any model outside FSDP2 for one
# with its weights, though its own classes are made without them
UNREAD_IN_06 = (
    "the model's weights are not read there in 0.6, and the run starts from random ones; they are "
    "read since, as here"
)


def _report_ranks_in_06(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which gradients were of one rank alone in 0.6, and which weights were not read."""
    name = name_model(settings)
    layout = read_section(settings, "distributed")
    backend = read_section(settings, "model.backend")
    has_own_class = not is_of_transformers(settings)
    experts = backend.get("experts")
    is_of_engine = (
        experts in EXPERTS_OF_ENGINE and backend.get("dispatcher") not in DISPATCHERS_OTHERWISE
    )
    if is_of_engine and has_own_class and _is_shared(layout, "ep_size"):
        conversion.add_remark("model.backend.experts", experts, CLIPPED_BY_RANK_IN_06)
    # Automodel's own mixtures split no attention over the ranks
    splits_heads = _is_shared(layout, "tp_size") and not (is_mixture(name) and has_own_class)
    plan = read_family_source(guess_family(name) or "", "configuration")
    if splits_heads and NORM_OF_HEADS in plan and not conversion.recipe.get("use_peft"):
        conversion.add_remark("distributed.tp_size", layout["tp_size"], NORMS_OF_RANKS_IN_06)
    strategy = layout.get("strategy")
    reads_late = _is_shared(layout, "tp_size") or settings.get("peft")
    is_own = has_own_class and _is_of_own_family(name)
    if strategy in ("ddp", MEGATRON) and is_own and not reads_late:
        conversion.add_remark("distributed.strategy", strategy, UNREAD_IN_06)


def _is_shared(layout: Mapping[str, Any], size: str) -> bool:
    """Whether a size in the section `distributed` makes several ranks share a layer or a row."""
    return str(layout.get(size)) not in ("None", "none", "1")


def _report_reduction(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where gradients are in 16 bits there, or are added over the ranks in 16 bits."""
    layout = read_section(settings, "distributed")
    dtype = str(read_value(layout, "mp_policy.reduce_dtype", "float32"))
    is_of_megatron = layout.get("strategy") == MEGATRON
    if trains_copy(settings) and not (is_of_megatron or settings.get("peft")):
        conversion.remarks.append(GRADIENTS_ROUNDED)
    if is_of_megatron and not layout.get("grad_reduce_in_fp32"):
        conversion.add_difference("distributed.strategy", MEGATRON, REDUCED_BY_MEGATRON)
    elif "float32" not in dtype:
        conversion.add_difference(
            "distributed.mp_policy.reduce_dtype", dtype, GRADIENTS_REDUCED_IN_DTYPE
        )
