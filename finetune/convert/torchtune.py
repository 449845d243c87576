"""Converts and reports what several keys of a torchtune file determine together.

A comment above a text names the code, mostly torchtune's, whose behavior the text describes.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.quantization import QLORA
from finetune.convert.asked_layout import COMMAND
from finetune.convert.chat_templates import shows_images
from finetune.convert.counterparts import NOTES, ToolFile
from finetune.convert.defaults import UNLIMITED, set_optimizers_defaults
from finetune.convert.foreign_values import find_matches
from finetune.convert.shared import IN_ORDER, MICRO_BATCHES_ALIKE, MLP_LAYERS
from finetune.convert.value_conversion import Conversion, convert_targets, read_section, read_value

AN_EPOCH_AT_MOST = (
    "an epoch that is shorter ends there; here max_steps counts on into the next one: remove it "
    "where the rows make fewer steps"
)
# pattern of a model builder's dotted name -> what torchtune's model computes otherwise than
# transformers'
TORCHTUNE_MODELS = {
    # models/gemma2: hidden_capping_value, and Gemma2FinalNorm, which caps the head's input
    r"gemma2_\d+b": (
        "attention scores are capped at 30 there, and the last hidden states at 50 in place of the "
        "logits; as its config says here: scores at 50, logits at 30"
    ),
    # lora_code_llama2_* call lora_llama2, which takes no rope_base; models/phi4 gives phi3 none
    "lora_code_llama2_|phi4_14b": (
        "positions are rotated by a base of 10000 there; by the model's own here"
    ),
    r"(mistral_7b|phi3_mini)$": (
        "a token attends to all before it there; here to those in the sliding window, where the "
        "model's config has one"
    ),
    # TokenChoiceTopKRouter of modules/moe, and Llama4Router of transformers
    "llama4_": (
        "a router takes the expert of the highest score once a sigmoid of the scores is rounded to "
        "the run's 16 bits there, in which several may be alike; of the highest score itself here"
    ),
}
# The same for images in Llama 3.2 Vision: VisionTransformer and TransformerCrossAttentionLayer of
# torchtune's modules, and its padded_collate_tiled_images_and_mask; MllamaVisionModel and
# MllamaCrossAttentionDecoderLayer of transformers 5.
IMAGES_OF_LLAMA_3_2 = (
    "the projector reads what goes into layers 3, 7, 15, 23 and 30 of the vision tower there, as "
    "in Meta's code; here what comes out of them, as in transformers",
    "a token before its row's first image reads none there; here it reads all images of the row",
    "an image is filled up to the tiles of the largest of its batch there; here to four tiles, and "
    "a tile by seven tokens, and the tower reads what is filled up too",
)
# TilePositionalEmbedding, and MllamaPrecomputedAspectRatioEmbedding of transformers
TILES_EMBEDDED = (
    "a tile's position has one embedding there, for images of all shapes; here one for each shape, "
    "so that it learns from fewer images"
)
# pattern of a model builder's dotted name -> its max_seq_len, where it is not above the length that
# is written for no limit: TransformerDecoder refuses a longer row
LONGEST_ROWS = {r"\.llama2\.|phi3_mini": 4096, r"\.llama3\.|\.gemma2?\.": 8192}
STOPS_BOTH = "a row of over {} tokens, the most its model takes there, stops the run there and here"
# max_seq_len of llama3_2_vision_transform and llama4_transform
TRANSFORMS_LENGTH = 8192
# FrozenNF4Linear is in the attention and the MLP of all its builders but those of Qwen.
QWENS_IN_16_BITS = "layers without adapters are in 16 bits there, in 4 here"
# tune_to_peft_adapter_weights of its convert_weights.py reorders rows of q_proj and k_proj, as the
# weights of other families are; adapter_config of its LoRA recipes; save_checkpoint of its
# FullModelHFCheckpointer
ROWS_REORDERED = (
    "the rows of q_proj's and k_proj's adapters are saved in another order than Qwen's weights "
    "there: loaded by PEFT they are other adapters; here they are those that were trained"
)
NO_DORA_SAVED = "adapter_config.json does not say use_dora there: PEFT loads plain LoRA; DoRA here"
OWN_FORMAT = "the adapter is saved in torchtune's own format there, in PEFT's here"
# LoRAGroupedExperts of its models/llama4. Llama4TextExperts of transformers has
# parameters in place of these layers.
EXPERTS_UNADAPTED = (
    "the routed experts get adapters too there, on each one's gate_proj, up_proj and down_proj; "
    "here layers of these names alone, which are those of shared experts and dense layers"
)
# reparametrize_as_dtype_state_dict_post_hook and get_merged_lora_ckpt of torchtune
MERGED_DEQUANTIZED = (
    "the exported model is merged onto the dequantized base there; here onto that or the original "
    "one, whichever has the lower loss on held-out rows: finetune export has --merge-onto "
    "dequantized"
)
# `train` of its recipes/knowledge_distillation_*.py, in 0.6.1 and 0.7: it calls scale_grads on the
# gradients of means.
DIVIDED_BY_TOKENS = (
    "the gradients of the micro-batches' mean losses are added, and divided by the step's number "
    "of trained tokens there: they are thousands of times smaller than here, so that adam_epsilon "
    "makes Adam's updates smaller too, and clip_grad_norm clips next to none"
)
# decoder_only_tp_training_plan of its models/llama4: the ranks' outputs of an MoE layer are summed,
# but only the routed experts are split over them. {}: number of ranks, twice.
SHARED_EXPERT_ADDED = (
    "each of the {} ranks that share a row adds the whole output of the shared expert there: it is "
    "added {} times; here once"
)
# `train` of its recipes/full_finetune_single_device.py, in 0.6.1: it scales no gradients under
# optimizer_in_bwd, and the loss is multiplied by the batch's number of trained tokens
SUMMED_IN_06 = (
    "in 0.6 a step's gradients are those of the sum over its trained tokens there, of which a step "
    "with more counts more; since 0.7 those of the mean, as here"
)
ON_ONE_DEVICE = "full_finetune_single_device"
# torchtune's dtype -> our export_dtype: its checkpointers save the weights as they are trained
SAVED_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def adapt_torchtune(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Sets and reports what several keys of a torchtune file determine together.

    `text` is the file with its comments, which may say where a model was downloaded to.
    """
    recipe = conversion.recipe
    _name_models(settings, text, conversion)
    _report_model(settings, conversion)
    _set_longest_row(settings, conversion)
    _adapt_torchtune_adapters(read_section(settings, "model"), conversion)
    _report_saved_adapters(settings, conversion)
    if recipe.get("load_in_4bit") and not settings.get("save_adapter_weights_only"):
        conversion.add_remark("save_adapter_weights_only", False, MERGED_DEQUANTIZED)
    if "teacher_model" in settings:
        conversion.add_difference("kd_ratio", settings.get("kd_ratio", 0.5), DIVIDED_BY_TOKENS)
        conversion.remarks.append(MICRO_BATCHES_ALIKE)
    command = COMMAND.search(text)
    is_on_one_device = command is not None and command[1] == ON_ONE_DEVICE
    if settings.get("optimizer_in_bwd") and is_on_one_device:
        conversion.add_remark("optimizer_in_bwd", True, SUMMED_IN_06)
    export_dtype = SAVED_DTYPES.get(str(settings.get("dtype")))
    if export_dtype is not None:
        recipe["export_dtype"] = export_dtype
    optimizer = read_section(settings, "optimizer")
    if optimizer:
        set_optimizers_defaults(str(optimizer.get("_component_")), recipe)
    steps_per_epoch = settings.get("max_steps_per_epoch")
    epochs = settings.get("epochs", 1)
    if isinstance(steps_per_epoch, int) and isinstance(epochs, int):
        recipe["max_steps"] = steps_per_epoch * epochs
        conversion.add_difference("max_steps_per_epoch", steps_per_epoch, AN_EPOCH_AT_MOST)
    if settings.get("shuffle") is False:
        conversion.add_difference("shuffle", False, IN_ORDER)
    _report_shared_experts(settings, conversion)


def _report_model(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what torchtune's model computes otherwise than transformers'."""
    model = read_section(settings, "model")
    component = str(model.get("_component_"))
    notes = list(find_matches(TORCHTUNE_MODELS, component))
    if "llama3_2_vision" in component and shows_images(settings):
        notes += IMAGES_OF_LLAMA_3_2
        if model.get("encoder_trainable") in (True, "full"):
            notes.append(TILES_EMBEDDED)
    for note in notes:
        conversion.add_difference("model._component_", component, note)


def _set_longest_row(settings: ToolFile, conversion: Conversion) -> None:
    """Sets max_length where the file has none: to what the model takes, or the transform cuts at.

    Nothing is set for a model that takes longer rows than those that `add_defaults` allows.
    """
    recipe = conversion.recipe
    model = read_section(settings, "model")
    tokenizer = read_section(settings, "tokenizer")
    if recipe.get("max_length") is not None:
        return
    cuts = str(tokenizer.get("_component_")).endswith("_transform")
    if cuts and "max_seq_len" not in tokenizer:
        recipe["max_length"] = TRANSFORMS_LENGTH
        return
    component = str(model.get("_component_"))
    longest = model.get("max_seq_len") or next(find_matches(LONGEST_ROWS, component), None)
    if isinstance(longest, int) and longest <= UNLIMITED["max_length"]:
        recipe |= UNLIMITED | {"max_length": longest}
        conversion.remarks.append(STOPS_BOTH.format(longest))


def _report_saved_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Reports adapters that torchtune saves so that PEFT does not load what was trained."""
    model = read_section(settings, "model")
    component = str(model.get("_component_"))
    saves_these_alone = bool(settings.get("save_adapter_weights_only"))
    report = conversion.add_difference if saves_these_alone else conversion.add_remark
    attention = model.get("lora_attn_modules") or ()
    if ".qwen" in component and {"q_proj", "k_proj"} & set(attention):
        report("save_adapter_weights_only", saves_these_alone, ROWS_REORDERED)
    if model.get("use_dora"):
        report("save_adapter_weights_only", saves_these_alone, NO_DORA_SAVED)
    if saves_these_alone and re.search("phi[34]|llama3_2_vision|llama4", component):
        conversion.add_remark("save_adapter_weights_only", True, OWN_FORMAT)


def _report_shared_experts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that tensor parallelism adds Llama 4's shared expert once for each rank of a row."""
    plan = str(read_value(settings, "tensor_parallel_plan._component_"))
    ranks = settings.get("tensor_parallel_dim", 1)
    if plan.endswith("llama4.decoder_only_tp_plan") and isinstance(ranks, int) and ranks > 1:
        note = SHARED_EXPERT_ADDED.format(ranks, ranks)
        conversion.add_difference("tensor_parallel_plan._component_", plan, note)


# the command in a comment: hub name, folder
DOWNLOAD = re.compile(r"tune download (\S+).*?--output-dir (\S+)")
# FullModelMetaCheckpointer of torchtune
METAS_FILES = "the trained weights are saved as Meta's files there, as Hugging Face's here"


def _name_models(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Names the model and the teacher, by their hub names if a comment of `text` has the command
    that downloaded them; else by their folders.
    """
    hub_names = {folder.rstrip("/"): hub_name for hub_name, folder in DOWNLOAD.findall(text)}
    # a Llama's repository has Meta's own files in this folder
    hub_names |= {f"{folder}/original": hub_name for folder, hub_name in hub_names.items()}
    folder = str(read_value(settings, "checkpointer.checkpoint_dir") or "")
    conversion.recipe["model_name_or_path"] = hub_names.get(folder.rstrip("/"), folder)
    if folder.rstrip("/") in hub_names:
        note = "downloaded there from this hub name, says the file"
        conversion.add_remark("checkpointer.checkpoint_dir", folder, note)
    checkpointer = str(read_value(settings, "checkpointer._component_"))
    if checkpointer.endswith("MetaCheckpointer"):
        conversion.add_remark("checkpointer._component_", checkpointer, METAS_FILES)
    if "teacher_model" in settings:
        teacher = str(read_value(settings, "teacher_checkpointer.checkpoint_dir") or "").rstrip("/")
        conversion.recipe["teacher_model_name_or_path"] = hub_names.get(teacher, teacher)


def _adapt_torchtune_adapters(model: Mapping[str, Any], conversion: Conversion) -> None:
    """Sets LoRA's layers, QLoRA's base in 4 bits and an integral alpha from the section `model`."""
    recipe = conversion.recipe
    if "lora_attn_modules" in model:
        layers = model["lora_attn_modules"]
        if model.get("apply_lora_to_mlp") and isinstance(layers, list):
            layers = [*layers, *MLP_LAYERS]
        if model.get("apply_lora_to_mlp") and "llama4" in str(model.get("_component_")):
            conversion.add_difference("model.apply_lora_to_mlp", True, EXPERTS_UNADAPTED)
        targets = convert_targets(layers)
        if model.get("apply_lora_to_output") and isinstance(targets, list):
            targets = [*targets, "lm_head"]
        recipe |= {"use_peft": True, "lora_target_modules": targets}
    if model.get("quantize_base") and ".qwen" in str(model.get("_component_")):
        conversion.add_difference("model.quantize_base", True, QWENS_IN_16_BITS)
    if "qlora_" in str(model.get("_component_")):
        recipe |= QLORA
        conversion.add_remark("model._component_", model["_component_"], NOTES["NF4_OF_TORCHAO"])
    alpha = recipe.get("lora_alpha")
    if isinstance(alpha, float) and alpha.is_integer():
        recipe["lora_alpha"] = int(alpha)
