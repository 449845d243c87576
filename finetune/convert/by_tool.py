"""Converts what several keys of a file determine together.

`adapt_tool` hands a file to its tool's module; the reports below are of several tools.
"""

import re

from finetune.config.facts import read_family_source
from finetune.config.optimization import DEFAULT_OPTIMIZER, OPTIMIZERS
from finetune.config.schema import recipe_keys
from finetune.constants import ALL_LINEAR, HEADS
from finetune.convert.asked_layout import (
    COMPUTE_DTYPES,
    AskedLayout,
    find_zero_stage,
    has_flat_parameters,
)
from finetune.convert.automodel import adapt_automodel, has_stages, report_loaded_dtype
from finetune.convert.axolotl import adapt_axolotl, has_own_loss, report_axolotls_adapters
from finetune.convert.chat_templates import shows_images
from finetune.convert.counterparts import ToolFile
from finetune.convert.defaults import OF_COMPONENTS
from finetune.convert.factory import adapt_factory, is_of_megatron
from finetune.convert.model_names import guess_family, is_mixture, name_model
from finetune.convert.objectives import LABEL_LOSSES, cuts_loss
from finetune.convert.shared import (
    BEST_AT_END,
    EXPERIMENTAL_METHODS,
    EXPERTS_UNDER_4,
    IN_ORDER,
    LIGERS_LOSS,
    MICRO_BATCHES_ALIKE,
    NORMS_IN_FP32,
    OF_PAIRS,
    ROTATED_IN_PART,
    ROTATED_WHOLE,
    SWITCHES_IN_16_BITS,
    UNMULTIPLIED,
    UNMULTIPLIED_BY_LIGER,
    WHOLE_STEPS,
    find_muon_key,
    has_linear_experts,
)
from finetune.convert.swift import adapt_swift
from finetune.convert.torchtune import adapt_torchtune
from finetune.convert.trained_layers import is_of_transformers
from finetune.convert.value_conversion import (
    Conversion,
    find_method_facts,
    read_section,
    read_value,
)

SHARDING_KEYS = ("fsdp", "fsdp_config", "deepspeed")
ALL_DECAYED = "weight_decay: norms and biases are decayed too there, matrices alone here"


def adapt_tool(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Converts what several keys of the file determine together, by the module of its tool.

    Then adds the remarks that several tools share: on weight decay and on the embedding's moments.

    `text` is the file with its comments.
    """
    tool = conversion.tool
    if tool == "Axolotl":
        adapt_axolotl(settings, conversion)
    elif tool == "ms-swift":
        adapt_swift(settings, conversion)
    elif tool == "LLaMA-Factory":
        adapt_factory(settings, conversion)
    elif tool == "torchtune":
        adapt_torchtune(settings, text, conversion)
    elif tool == "Automodel":
        adapt_automodel(settings, conversion)
    _report_linear_experts(settings, conversion)
    _report_decayed_norms(settings, conversion)
    _report_embedding_moments(settings, conversion)


# tools whose targets for all linear layers are found in the model, and their key for them
TARGET_KEYS = {"LLaMA-Factory": "lora_target", "ms-swift": "target_modules"}


def _report_linear_experts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports experts of a text model that get adapters under transformers 4 alone."""
    key = TARGET_KEYS.get(conversion.tool)
    if key is None or conversion.image_family or is_of_megatron(settings):
        return
    recipe = conversion.recipe
    makes_adapters = recipe.get("use_peft", True) and not recipe.get("adapter_name_or_path")
    targets = recipe.get("lora_target_modules", ALL_LINEAR)
    has_experts = has_linear_experts(guess_family(name_model(settings)) or "")
    if makes_adapters and ALL_LINEAR in targets and has_experts:
        conversion.add_remark(key, targets, EXPERTS_UNDER_4)


def _has_adapters(conversion: Conversion) -> bool:
    """Whether adapters are trained, as LLaMA-Factory, but for v1, and ms-swift do by default."""
    by_default = conversion.tool in ("LLaMA-Factory", "ms-swift") and not conversion.is_factory_v1
    return bool(conversion.recipe.get("use_peft", by_default))


# transformers' convert_and_load_state_dict_in_model loads weights in the torch_dtype that is asked
# for, which Axolotl's resolve_dtype sets to that of the run
ROUNDED_BEFORE = (
    "a base whose files have another dtype than is asked for, as Llama 2's have under bf16, is "
    "rounded to that before it is quantized there; here its own numbers are quantized"
)
# param.data.to(torch.bfloat16) of TRL's trainers where the model is quantized
ADAPTERS_IN_16_BITS = (
    "over a quantized base adapters and their moments are in bfloat16 there, in float32 here"
)
# `correct` of Gemma3nTextAltUp in transformers 5 multiplies by the clamped `weight` of a layer,
# which has other dimensions in 4 bits
ALTUP_IN_4_BITS = (
    "the first step of this model stops there under transformers 5, which reads the packed weight "
    "of AltUp's correction_coefs as it is; here it is dequantized"
)
# tools that keep the base in 4 bits by transformers
QUANTIZED_BY_TRANSFORMERS = ("Axolotl", "LLaMA-Factory", "TRL", "ms-swift")


def _report_quantized_base(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where adapters over a quantized base are in bfloat16 there, and the base is rounded
    before it is quantized.
    """
    tool = conversion.tool
    load_key = conversion.load_key
    if load_key is None:
        return
    # Axolotl's trainers of pairs are TRL's
    is_trained_by_trl = tool == "TRL" or any(map(settings.get, OF_PAIRS))
    is_cast = conversion.recipe.get("method") not in EXPERIMENTAL_METHODS
    if tool in ("TRL", "Axolotl") and is_trained_by_trl and is_cast:
        conversion.add_difference(load_key, True, ADAPTERS_IN_16_BITS)
    asked_dtype = str(settings.get("torch_dtype") or settings.get("dtype"))
    dtype = asked_dtype.split(".")[-1]  # torch.bfloat16 is written too
    is_rounded = tool in ("TRL", "ms-swift") and dtype in ("bfloat16", "float16")
    if tool == "Axolotl" or is_rounded:
        conversion.add_remark(load_key, True, ROUNDED_BEFORE)
    in_4_bits = load_key == "load_in_4bit" and tool in QUANTIZED_BY_TRANSFORMERS
    if in_4_bits and guess_family(name_model(settings)) == "gemma3n_text":
        conversion.add_remark(load_key, True, ALTUP_IN_4_BITS)


# the line of a model's code that makes a mixture's routers; Axolotl does not cast these back to 16
# bits, whatever the attention
GATE_LINE = "self.gate = "
ROUTERS_IN_FP32 = "the routers are in float32 there; all weights are in bfloat16 here"
# _configure_embedding_dtypes of Axolotl's loaders/model.py
PARTS_IN_FP32 = (
    "the embedding, the output head and norms are in float32 there under this attention; all "
    "weights are in bfloat16 here"
)
# values of attn_implementation under which these parts stay in float32
FP32_ATTENTION = (None, "sdpa", "eager")
# keys under which they are cast to 16 bits
CASTING_KEYS = (*SWITCHES_IN_16_BITS, *SHARDING_KEYS)


def report_dtypes(settings: ToolFile, conversion: Conversion) -> None:
    """Reports other dtypes of adapters, moments and weights than those of the run here.

    For Axolotl that includes the weights which stay in float32 where all are in bfloat16 here.
    """
    recipe = conversion.recipe
    if recipe.get("use_peft"):
        _report_quantized_base(settings, conversion)
    else:
        _report_small_moments(settings, conversion)
    _report_adapters_under_zero_3(settings, conversion)
    report_axolotls_adapters(settings, conversion)
    if conversion.tool == "Automodel":
        report_loaded_dtype(settings, conversion)
    if conversion.tool != "Axolotl" or recipe.get("dtype") != "bfloat16":
        return
    is_cast = any(map(settings.get, CASTING_KEYS)) or cuts_loss(settings)
    if settings.get("attn_implementation") in FP32_ATTENTION and not is_cast:
        conversion.add_difference("dtype", "bfloat16", PARTS_IN_FP32)
    source = read_family_source(guess_family(name_model(settings)) or "")
    if GATE_LINE in source and not any(map(settings.get, SHARDING_KEYS)):
        conversion.add_difference("dtype", "bfloat16", ROUTERS_IN_FP32)
    if settings.get("fp32_norms"):
        conversion.add_difference("fp32_norms", True, NORMS_IN_FP32)


TORCHAO_4_OR_8_BITS = "torch.*[48]bit"  # names of torchao's optimizers
# _new_buffer of torchao's _AdamBase, which quantizes a rank's shard of a tensor if it has at least
# 4096 numbers
SMALL_MOMENTS = (
    "the moments of small tensors, as of norms, are not quantized: in bfloat16 there, as the "
    "weights are, in float32 here"
)


def _report_small_moments(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the dtype of small tensors' moments, which torchao's optimizers do not quantize."""
    if conversion.recipe.get("dtype") != "bfloat16":
        return
    for key in ("optim", "optimizer", "optimizer._component_", "optimizer._target_"):
        name = read_value(settings, key)
        if isinstance(name, str) and re.search(TORCHAO_4_OR_8_BITS, name.lower()):
            conversion.add_remark(key, name, SMALL_MOMENTS)


# autocast_adapter_dtype=False of TRL's trainers under ZeRO-3, since 1.16
ADAPTERS_UNDER_ZERO_3 = (
    "under DeepSpeed's ZeRO-3 adapters are in bfloat16 there, as the base is, in TRL's newest "
    "version; in float32 here"
)


def _report_adapters_under_zero_3(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that TRL's adapters are in bfloat16 under DeepSpeed's ZeRO-3.

    A remark where the file names no stage: the file of the launch, which is not read, may.
    """
    recipe = conversion.recipe
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    is_in_16_bits = dtype in ("bfloat16", "auto")
    has_adapters = conversion.tool == "TRL" and recipe.get("use_peft")
    if not has_adapters or conversion.load_key or not is_in_16_bits:
        return
    stage = find_zero_stage(settings.get("deepspeed"))
    if stage == 3:
        conversion.add_difference("deepspeed", settings["deepspeed"], ADAPTERS_UNDER_ZERO_3)
    elif stage is None:
        conversion.add_remark("use_peft", True, ADAPTERS_UNDER_ZERO_3)


# tools that load the weights in the dtype in which matrices are multiplied
LOADING_IN_COMPUTE_DTYPE = ("Axolotl", "ms-swift")
# save_model of transformers' Trainer, and get_state_dict of Accelerate
SAVED_BY_LAUNCH = (
    "export_dtype: the trained weights are saved in float32 there under FSDP, in 16 bits under "
    "DeepSpeed, and under neither in the dtype that they are loaded in; here in that of the base's "
    "files, unless this key names another"
)

# the same, for adapters: DeepSpeedEngine casts them with the model, and trains copies
ADAPTERS_SAVED = "adapter: saved in 16 bits there, as DeepSpeed does; in float32 here"


# torch's loop or foreach, which both tools' own default is, and its fused kernel
ROUNDED_EACH_TIME = (
    "the weights are in bfloat16, and without the fused kernel each operation of an update rounds "
    "to it there; here an update is computed in float32 and rounded once"
)
UNFUSED = re.compile(r"torch\.optim\.(\w+\.)?AdamW?")


def keep_unfused_update(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the optimizer that rounds a bfloat16 weight as often as that of torchtune or Automodel.

    Adam is AdamW where nothing decays. Where something does it has no such form here: reports it.
    """
    recipe = conversion.recipe
    optimizer = read_section(settings, "optimizer")
    name = optimizer.get("_target_") or optimizer.get("_component_")
    trains_in_16_bits = recipe.get("dtype") == "bfloat16" and not recipe.get("use_peft")
    is_unfused = UNFUSED.fullmatch(str(name)) and not optimizer.get("fused")
    if not is_unfused or not trains_in_16_bits:
        return
    facts = OPTIMIZERS[recipe.get("optim", DEFAULT_OPTIMIZER)]
    if facts.unfused is None:
        return
    if facts.decouples_decay or not recipe.get("weight_decay"):
        recipe["optim"] = facts.unfused
    else:
        conversion.add_difference("optimizer.fused", optimizer.get("fused"), ROUNDED_EACH_TIME)


def name_saved_dtype(settings: ToolFile, layout: AskedLayout, conversion: Conversion) -> None:
    """Sets `export_dtype` to the dtype in which Trainer saves weights that are all trained.

    That is the dtype of the parameters, or under DeepSpeed the one in which matrices multiply.
    Reports that of adapters, if it is another than here.
    """
    recipe = conversion.recipe
    if recipe.get("use_peft") and layout.by_deepspeed and layout.precision != "no":
        conversion.remarks.append(ADAPTERS_SAVED)
    keeps_dtype_of_files = settings.get("use_badam") or is_of_megatron(settings)
    if recipe.get("use_peft") or conversion.tool in OF_COMPONENTS or keeps_dtype_of_files:
        return
    loads_in_compute_dtype = (
        conversion.tool in LOADING_IN_COMPUTE_DTYPE
        and layout.sharding == "none"
        and str(settings.get("torch_dtype")) != "float32"
    )
    if layout.by_deepspeed or loads_in_compute_dtype or layout.pure_bf16:
        recipe["export_dtype"] = COMPUTE_DTYPES[layout.precision]
    elif conversion.tool == "TRL":
        conversion.remarks.append(SAVED_BY_LAUNCH)
    else:
        recipe["export_dtype"] = "float32"


# calculate_total_num_steps of Axolotl
WHOLE_STEPS_COUNTED = (
    "num_epochs: the run ends up to a step an epoch earlier there, for it counts whole steps; here "
    "a short step ends each epoch"
)
# _configure_warmup_and_logging of Axolotl's core/builders/base.py
ROUNDED_DOWN = (
    "warmup_ratio: its share of the steps{} is rounded down there, up here, and a warm-up of one "
    "step is one of two there"
)
STEPS_OF_EPOCHS = ", of those in num_epochs where they are fewer than max_steps,"
# load_preference_datasets of Axolotl's common/datasets.py, which reads no max_steps
ALWAYS_OF_EPOCHS = ", of those in num_epochs whatever max_steps is,"
ROWS_BY_LENGTH = "rows: those of similar length share a step here; they are drawn at random there"
GROUP_BY_LENGTH = "group_by_length"  # a key, and a value of train_sampling_strategy


def report_epochs(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how an epoch ends there, how long the warm-up is, and which rows share a step.

    Nothing for methods that sample completions.
    """
    recipe = conversion.recipe
    tool = conversion.tool
    if find_method_facts(recipe).samples:
        return
    is_packed = recipe.get("packing", recipe_keys()["packing"].default)
    epochs = recipe.get("num_train_epochs", 1)
    if tool == "torchtune" and "max_steps" not in recipe:
        accumulates = recipe.get("gradient_accumulation_steps", 1) > 1
        carries_over = epochs != 1 and accumulates
        note = _describe_carried_over(conversion) if carries_over else WHOLE_STEPS
        conversion.remarks.append(note)
    elif (
        tool == "Axolotl"
        and not settings.get("max_steps")  # of a negative one Trainer counts the steps
        and (is_packed or settings.get("sample_packing") or epochs != 1)
    ):
        conversion.remarks.append(WHOLE_STEPS_COUNTED)
    if tool == "Axolotl" and settings.get("warmup_ratio") and recipe.get("warmup_ratio"):
        counted = ALWAYS_OF_EPOCHS if settings.get("rl") else STEPS_OF_EPOCHS
        counts_rows = "max_steps" in recipe and not recipe.get("streaming")
        conversion.remarks.append(ROUNDED_DOWN.format(counted if counts_rows else ""))
    # for instance train_sampling_strategy: group_by_length, or group_by_length: true
    is_grouped = (
        GROUP_BY_LENGTH in settings.values()
        or settings.get(GROUP_BY_LENGTH)
        or read_value(settings, f"dataloader.{GROUP_BY_LENGTH}")
    )
    is_in_order = any(IN_ORDER in line for line in conversion.differences)
    is_in_order = is_in_order or settings.get("train_sampling_strategy") == "sequential"
    if not (is_packed or is_grouped or is_in_order or find_method_facts(recipe).reads_queries):
        conversion.remarks.append(ROWS_BY_LENGTH)


# torchtune's recipes call no zero_grad between two epochs
CARRIED_OVER = (
    "epochs: micro-batches that fill no step are added to the next epoch's first one there, and "
    "left out after the last; here they are a last, short step"
)
# torchtune's full_finetune recipes, whose newest source ends an epoch with the last whole step
CARRIED_IN_06 = (
    "epochs: micro-batches that fill no step are added to the next epoch's first one in 0.6, and "
    "left out by the newest source, and after the last one; here they are a last, short step"
)


def _describe_carried_over(conversion: Conversion) -> str:
    """Returns the note on what torchtune does with the micro-batches that fill no step.

    It adds them to the next epoch; the recipes for full fine-tuning do so in 0.6 only.
    """
    recipe = conversion.recipe
    keys_of_other_recipes = ("use_peft", "quantization_aware_training")
    is_sft = recipe.get("method", "sft") == "sft"
    is_full_finetuning = is_sft and not any(map(recipe.get, keys_of_other_recipes))
    return CARRIED_IN_06 if is_full_finetuning else CARRIED_OVER


# Keys of Liger's fused loss, LigerForCausalLMLoss. Like apply_lce of cut_cross_entropy it reads the
# head's weight without calling the head.
FUSED_LOSSES = {
    "Axolotl": LIGERS_LOSS,
    "LLaMA-Factory": "enable_liger_kernel",
    "ms-swift": "use_liger_kernel",
    "TRL": "use_liger_kernel",
}
HEAD_PASSED_BY = (
    "the fused loss reads the head's weight without its adapter there, which is not trained; it is "
    "here"
)


def report_losses(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where the loss of a step is another mean, where a fused loss ignores the head's
    adapter or the multiplier of its scores, and where Liger rotates otherwise than the config says.
    """
    trains_answers = find_method_facts(conversion.recipe).rows == "answers"
    targets = conversion.recipe.get("lora_target_modules")
    heads = sorted(HEADS.intersection(targets)) if isinstance(targets, list) else []
    key = FUSED_LOSSES.get(conversion.tool, "")
    uses_liger = settings.get(key)
    # losses that need the scores, so that no fused loss takes their place
    loss_keys = LABEL_LOSSES.get(conversion.tool, ())
    may_fuse = trains_answers and not any(map(settings.get, loss_keys))
    if may_fuse and heads and (uses_liger or cuts_loss(settings)):
        conversion.add_difference("lora_target_modules", heads, HEAD_PASSED_BY)
    has_multiplier = guess_family(name_model(settings)) in UNMULTIPLIED_BY_LIGER
    # LLaMA-Factory has no Liger for this family, Falcon-H1
    if may_fuse and uses_liger and has_multiplier and conversion.tool != "LLaMA-Factory":
        conversion.add_difference(key, True, UNMULTIPLIED)
    if conversion.tool == "TRL" and trains_answers and has_own_loss(name_model(settings)):
        conversion.remarks.append(MICRO_BATCHES_ALIKE)
    rotation_key = "liger_rope" if conversion.tool == "Axolotl" else key
    if settings.get(rotation_key) and ROTATED_IN_PART.search(name_model(settings).lower()):
        conversion.add_difference(rotation_key, True, ROTATED_WHOLE)


# get_decay_parameter_names of transformers' Trainer spares norms and biases, but not these
MAGNITUDES_DECAYED = "weight_decay: DoRA's magnitudes are decayed too there, matrices alone here"


def report_magnitudes(conversion: Conversion) -> None:
    """Reports that DoRA's magnitudes, which are vectors, are decayed in every other tool."""
    if conversion.recipe.get("use_dora") and conversion.recipe.get("weight_decay"):
        conversion.remarks.append(MAGNITUDES_DECAYED)


# ModelArguments, and _preprocess_image of LLaMA-Factory's data/mm_plugin.py
IMAGES_SHRUNK = (
    "an image of more than 768 x 768 pixels is made smaller there, its default; the model's own "
    "image processor, as its files configure it, decides the size here"
)
# backends of AutoImageProcessor
RESIZED = (
    "images: resized by torchvision there, its default, and by Pillow here, which rounds some "
    "pixels otherwise"
)
# CLIPImageTransform of torchtune's models/clip
RESIZED_IN_16_BITS = (
    "images: turned into bfloat16 there before they are resized and normalized; here resized in 8 "
    "bits by Pillow and normalized in float32"
)
# Mistral3Processor of Axolotl's loaders/processor.py, by mistral-common's tokenizers/image.py
RESIZED_BY_COMMON = (
    "mistral-common resizes images by OpenCV there, whose cubic smooths none that is made smaller, "
    "and rounds the sides of a large one; here by Pillow, and those sides are rounded down"
)
# Gemma 4's large models; create_masks_for_vision_model of transformers' modeling_gemma4.py
SEEN_IN_WINDOWS = re.compile(r"gemma-?4-(26b|31b)")
IMAGES_SEEN_IN_ALL_LAYERS = (
    "before transformers 5.13 the tokens of an image see each other in all layers of this model, "
    "and since then, and here, in those with a window"
)
# Gemma4MoETextModelBackend of Automodel's models/gemma4_moe; packed rows and context parallelism
# have other masks
IMAGES_SEEN_IN_ALL_LAYERS_IN_06 = (
    "in 0.6 there the tokens of an image see each other in all layers of this model; in those with "
    "a window since, as here"
)
# create_pipeline_forward_gemma4_text of Automodel makes masks without images
IMAGES_UNSEEN_IN_STAGES = (
    "between pipeline stages a token of an image sees those before it alone there, in all layers; "
    "here they see each other in those with a window"
)


def report_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how images are resized there, and which of their tokens see each other.

    LLaMA-Factory bounds the size of an image even without a key for it.
    """
    name = name_model(settings)
    if conversion.image_family and SEEN_IN_WINDOWS.search(name.lower()):
        _report_layers_of_images(settings, name, conversion)
    if conversion.image_family and settings.get("tokenizer_use_mistral_common"):
        conversion.add_difference("tokenizer_use_mistral_common", True, RESIZED_BY_COMMON)
    elif conversion.tool == "torchtune":
        if shows_images(settings):
            conversion.remarks.append(RESIZED_IN_16_BITS)
    elif conversion.image_family not in (None, "llama4"):  # which has no other backend here either
        conversion.remarks.append(RESIZED)
    is_bounded = (
        conversion.tool == "LLaMA-Factory"
        and settings.get("stage") != "pt"
        and not conversion.is_factory_v1
    )
    if conversion.image_family and is_bounded and settings.get("image_max_pixels") is None:
        conversion.add_difference("image_max_pixels", None, IMAGES_SHRUNK)


def _report_layers_of_images(settings: ToolFile, name: str, conversion: Conversion) -> None:
    """Reports in which layers of Gemma 4's large models the tokens of an image see each other."""
    has_own_class = (
        conversion.tool == "Automodel" and is_mixture(name) and not is_of_transformers(settings)
    )
    ranks = read_value(settings, "distributed.cp_size")
    is_packed = read_value(settings, "packed_sequence.pack_size")
    if conversion.tool == "Automodel" and has_stages(settings):
        stages = read_value(settings, "distributed.pp_size")
        conversion.add_difference("distributed.pp_size", stages, IMAGES_UNSEEN_IN_STAGES)
    elif not has_own_class:
        conversion.add_remark("model", name, IMAGES_SEEN_IN_ALL_LAYERS)
    elif not is_packed and ranks in (None, 1):
        conversion.add_remark("model", name, IMAGES_SEEN_IN_ALL_LAYERS_IN_06)


# sort_checkpoints of transformers' Trainer, under a metric_for_best_model, which ms-swift sets
BEST_AMONG_KEPT = (
    "the best of those that were saved is among them there; here they are the newest, and "
    "keep_best_checkpoint keeps the best beside them"
)
# Trainer's evaluation_loop, which repeats a batch's loss for each of its rows
HELD_OUT_ALIKE = (
    "eval_loss: each row counts by its batch's mean over labels there; here it is the mean over "
    "all labels that are held out"
)
# prediction_step of Trainer, which calls compute_loss
HELD_OUT_SMOOTHED = "eval_loss: with label smoothing there, without it here"
# the end of TRL's and LLaMA-Factory's scripts, save_trained_model of Axolotl's train.py, and
# __init__ of transformers' Trainer
LAST_EXPORTED = (
    "the last model is exported there, the best one here; no run begins there without "
    "metric_for_best_model"
)
# torchtune's run_val_every_n_steps: null, _configure_save_and_eval_strategy of Axolotl, and
# eval_strategy: no of transformers' Trainer; do_eval of LLaMA-Factory measures at the end
NOT_MEASURED = (
    "eval_loss: not measured there without a number of steps or a strategy; here before and after "
    "training"
)


def report_evaluation(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where the loss of held-out rows is not measured there, or is another mean.

    Reports also which checkpoints Trainer keeps by that loss. Nothing without held-out rows.
    """
    recipe = conversion.recipe
    if not {"eval_datasets", "eval_split_size"} & recipe.keys():
        return
    is_measured = conversion.is_measured
    evaluates_at_end = conversion.tool == "Automodel" or settings.get("do_eval")
    if not is_measured and not evaluates_at_end:
        conversion.remarks.append(NOT_MEASURED)
    uses_trainer = conversion.tool not in ("torchtune", "Automodel")
    saves_each_evaluation = recipe.get("save_steps") == recipe.get("eval_steps")
    is_reported = any(BEST_AT_END in line for line in conversion.remarks)
    keeps_best_here = recipe.get("keep_best_checkpoint")
    if uses_trainer and keeps_best_here and not (saves_each_evaluation or is_reported):
        asked = settings.get("load_best_model_at_end")
        conversion.add_remark("load_best_model_at_end", asked, BEST_AT_END)
    exports_last = conversion.tool != "ms-swift" and not settings.get("load_best_model_at_end")
    if uses_trainer and settings.get("save_strategy") == "best" and exports_last:
        conversion.add_remark("save_strategy", "best", LAST_EXPORTED)
    keeps_best_there = conversion.tool == "ms-swift" or settings.get("metric_for_best_model")
    limit = recipe.get("save_total_limit")
    if uses_trainer and is_measured and keeps_best_there and limit and not keeps_best_here:
        conversion.add_remark("save_total_limit", limit, BEST_AMONG_KEPT)
    if uses_trainer and is_measured and find_method_facts(recipe).rows == "answers":
        conversion.remarks.append(HELD_OUT_ALIKE)
        if recipe.get("label_smoothing"):
            conversion.remarks.append(HELD_OUT_SMOOTHED)


BITSANDBYTES_8_BITS = "^(?!ao_|.*torch).*8bit"  # names of bitsandbytes' optimizers
# register_module_override of bitsandbytes, which Trainer calls for the embedding
EMBEDDING_MOMENTS = "the embedding's moments are in 32 bits there"


def _report_decayed_norms(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where the other tool decays norms and biases too, which adapters do not train."""
    recipe = conversion.recipe
    decays_all = (
        conversion.tool in ("torchtune", "Automodel")
        or conversion.is_factory_v1
        # the Muon of LLaMA-Factory and ms-swift decays every parameter
        or find_muon_key(conversion.tool, settings, recipe)
        # Trainer finds norms and biases by their names, which a flat parameter does not have
        or (conversion.tool == "Axolotl" and has_flat_parameters(settings))
    )
    if decays_all and recipe.get("weight_decay") and not _has_adapters(conversion):
        conversion.remarks.append(ALL_DECAYED)


def _report_embedding_moments(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Trainer has bitsandbytes keep the embedding's moments in 32 bits."""
    recipe = conversion.recipe
    key = "optimizer" if conversion.tool == "Axolotl" else "optim"
    name = str(settings.get(key))
    if not re.search(BITSANDBYTES_8_BITS, name):
        return
    # DeepSpeed's optimizer, and FSDP1, may have a flat tensor in place of the embedding
    is_flat = conversion.tool == "Axolotl" and has_flat_parameters(settings)
    if settings.get("deepspeed") or is_flat or conversion.is_factory_v1:  # v1 is no Trainer
        return
    if _has_adapters(conversion):
        trained = recipe.get("modules_to_save") or ()
    else:
        trained = recipe.get("trainable_modules") or ("embed",)
    if any(re.search("embed|wte", str(module)) for module in trained):
        conversion.add_remark(key, name, EMBEDDING_MOMENTS)
