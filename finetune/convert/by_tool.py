"""What only several keys of a tool's file together determine."""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.facts import find_linear_layers, read_family_source
from finetune.config.optimization import OPTIMIZERS
from finetune.config.quantization import LOAD_KEYS, QLORA
from finetune.config.schema import recipe_keys
from finetune.constants import ALL_LINEAR, HEADS
from finetune.convert.asked_layout import count_sharing_ranks, find_zero_stage
from finetune.convert.automodel import (
    SHUFFLED_ONCE,
    adapt_decay,
    report_loaded_dtype,
    report_loop,
    report_packing,
    report_routers,
)
from finetune.convert.counterparts import NOTES, ToolFile
from finetune.convert.defaults import DEFAULTS
from finetune.convert.factory_v1 import WHOLE_STEPS, adapt_v1
from finetune.convert.foreign_values import convert_number, read_number
from finetune.convert.hints import find_texts
from finetune.convert.model_names import (
    guess_family,
    guess_vision_family,
    has_tower,
    is_mixture,
    name_model,
    report_turn_ends,
)
from finetune.convert.objectives import LABEL_LOSSES, cuts_loss, find_masked_diffusion
from finetune.convert.value_conversion import (
    Conversion,
    convert_names,
    convert_targets,
    find_method_facts,
    read_section,
)

OF_PAIRS = ("rl", "reward_model")  # keys of Axolotl's trainers that average pairs, not labels
# Axolotl's core/builders/base.py: average_tokens_across_devices = False
RANKS_ALIKE = (
    "loss: on several processes the mean of each over its labels counts alike there{}; here it is "
    "the mean over those of the whole step"
)
# model_accepts_loss_kwargs of its core/trainers/base.py, which was False for every model
EACH_IN_19 = ", and in 0.19 that of each micro-batch too"
# _num_items of its integrations/context_parallel/trainer.py
GROUPS_ALIKE = (
    "loss: of several groups of ranks that share a row the mean of each over its labels counts "
    "alike there{}; here it is the mean over those of the whole step"
)
# deepspeed_sp_compute_loss of transformers, and _get_num_items_in_batch of its
# core/trainers/base.py
MICRO_BATCHES_OF_GROUPS = (
    "loss: the mean over its labels of each micro-batch of a group of ranks that share a row "
    "counts alike there; here it is the mean over those of the whole step"
)
DIONS_MUON = (
    "under FSDP Microsoft's there: updates times the root of rows / columns, other coefficients, "
    "and no Nesterov momentum"
)
DOWNLOAD = re.compile(r"tune download (\S+).*?--output-dir (\S+)")
IN_ORDER = "rows are trained on in their order there, shuffled with the seed here"
# optimizers by the names of their classes: AdamW of torch, torchao, bitsandbytes, and what is
# AdamW by default; the others have none, as torch's Adam and SGD, and Transformer Engine's
# FusedAdam
DECAYING = re.compile("AdamW|Offload|Config$")
NOT_CUT = (None, False, "do_not_truncate")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
TENTH = "a tenth of the steps, but at most 1000 there"
SLOW_START = "warm-up: from a tenth of the rate there, from 0 here"
AN_EPOCH_AT_MOST = (
    "an epoch that is shorter ends there; here max_steps counts on into the next one: remove it "
    "where the rows make fewer steps"
)
JOINED = (
    "documents are joined there, cut into blocks of cutoff_len, and attend to those before; each "
    "is apart here"
)
SWIFT_TURNS = (
    "ms-swift writes the model's turns by templates of its own; the tokenizer's is used here: "
    "compare them"
)
# get_quantization_config of its arguments/base_args/quant_args.py
WITHOUT_METHOD = "no quantization there without quant_method: bnb"
# compute_loss of its trainers/seq2seq_trainer.py
SMOOTHED_MEANS = (
    "the mean of each micro-batch over its labels there; here the mean over those of the whole step"
)
# get_target_modules and get_modules_to_save of its pipelines/train/tuner.py
FOUND_THERE = ("all-embedding", "all-norm")
FOUND_BY_CLASS = "all modules of this kind there; here modules are named"
# _init_new_special_tokens of its arguments/base_args/model_args.py
FILES_OF_TOKENS = "a file of tokens there; added_tokens names each"
# _init_eval_strategy of its arguments/sft_args.py
ALL_TRAINED = "no rows are held out where nothing is measured, there and here"
# Axolotl's names for attention that keeps packed documents apart, and its older switches for the
# same.
ISOLATING = re.compile(
    r"sdpa|eager|(flash_attention_([234]|torch)|flex_attention|xformers|sage|"
    r"kernels-community/(flash-attn[23]|sage-attention))([@:].*)?"
)
# for which Axolotl casts the embedding and the head to 16 bits (attn_needs_dtype_cast)
SWITCHES_IN_16_BITS = ("xformers_attention", "sage_attention", "flex_attention", "flash_attention")
ISOLATING_SWITCHES = (
    *SWITCHES_IN_16_BITS,
    "sdp_attention",
    "eager_attention",
    "gemma4_hybrid_attn_impl",
)
NOT_ISOLATED = (
    "documents in a packed row attend to those before under this attention there; each is apart "
    "here"
)
# for the rows of pretraining, whose data loader writes a mask of ones; transformers looks for
# documents in a packed row where there is none
SEES_NO_STARTS = re.compile("sdpa|eager|flex_attention")
# whose mask compute_loss of its core/trainers/base.py removes
MASK_REMOVED = ("gemma3", "gemma4", "gemma4_unified")
HIDDEN_BY_MASK = (
    "documents in a packed row of pretraining attend to those before there under sdpa, but for its "
    "kernel on GPUs in 16 bits, eager and flex_attention; each is apart here"
)
# PackedSupervisedDatasetProcessor of LLaMA-Factory, whose mask has ones alone without neat_packing
NOT_NEAT = (
    "without neat_packing documents in a packed row attend to those before there; each is apart "
    "here"
)
# create_ref_model of its train/trainer_utils.py
BASE_IS_REFERENCE = (
    "the reference is the base without this adapter there; here the model before training, of "
    "which it is a part"
)
# _build_adapters of Axolotl's loaders/model.py, which makes the config of an adapter alone
NEW_UNDER_TRL = (
    "not loaded there under this rl: a new adapter is trained; here this one is trained further"
)
TRAINED_BY_TRL = ("dpo", "ipo", "kto")
ALL_BUT_LAST = "all but the last one are merged into the base there; the last is trained further"
# monkeypatch/models/recurrent_support.py of 0.21: whose recurrent layers get no bounds of
# documents, and those that get them since
PASSING_STATES_ON = ("jamba", "minimax", "olmo_hybrid", "zamba", "zamba2")
APART_SINCE = ("lfm2", "lfm2_moe", "mamba", "mamba2", "falcon_mamba")
STATE_PASSED_ON = (
    "documents in a packed row start from the state of those before in recurrent layers and "
    "convolutions in 0.19, and 0.21 refuses to pack this family; each is apart here"
)
APART_IN_21 = (
    "documents in a packed row start from the state of those before in recurrent layers and "
    "convolutions in 0.19; each is apart in 0.21, and here"
)
# KimiSparseMoeBlock of its model_support/kimi_linear
ROUTED_OTHERWISE = ("kimi_linear",)
BY_SOFTMAX = (
    "while training, tokens are routed by a softmax over all experts there, without the routers' "
    "biases and groups; by their sigmoid, biases and groups here, as in inference"
)
# KimiBlockSparseMLP of the same
EXPERTS_ADAPTED = (
    "w1, w2 and w3 of each expert get adapters too there; here an expert has no linear layers of "
    "its own, and lora_target_parameters names its parameters"
)
# encode_packed_streaming and prompt_strategies/pretrain.py
WINDOWS = (
    "a longer text is cut into pieces there, each with the tokens that begin and end a text, and "
    "each repeats the {} tokens before it; here none repeats any, and the EOS token ends the last "
    "one"
)
# encode_streaming
PIECES_ALONE = (
    "without packing a text is cut to {} tokens there, and the EOS token ends it by "
    "pretraining_sample_concatenation alone; here all of it is trained on, and ends with that token"
)
# _extract_pretraining_config
FIRST_ENTRY = "the first entry alone is read there, all here"
# load of prompt_strategies/completion.py
TEXTS_CUT = (
    "what follows the first 64 times as many tokens of a text is left out there; here all of it is "
    "trained on"
)
# labels of a packed row are shifted as those of one text: V2BatchSamplerDataCollatorForSeq2Seq of
# Axolotl, PackedSupervisedDatasetProcessor of LLaMA-Factory
FIRST_TRAINED = (
    "packing: the first token of a packed document is trained too there, after the end of the one "
    "before it"
)
# create_train_validation_split, which draws no rows
LAST_HELD_OUT = "the last rows of the data are held out there; they are drawn by the seed here"
# dataloader_drop_last of its core/builders/causal.py
LAST_UNMEASURED = (
    "eval_loss: the held-out rows of the last batch of a rank are left out there, where they do "
    "not fill it"
)
NO_SCALING = (
    "without bf16 and fp16 the model computes in float16 there, with neither autocast nor loss "
    "scaling; under mixed precision with both here"
)
OUT_PROJECTION = (
    "out_proj stays in 16 bits there, and the output head does not; the other way around here"
)
MAMBA_LAYERS = (
    "the Mamba layers stay in 16 bits there, and the output head does not; the other way around "
    "here"
)
WATCHED = "a run whose loss stays above it is stopped there; here one whose loss is not finite"
# model_accepts_loss_kwargs = False of LLaMA-Factory's train/sft/trainer.py, where the model has a
# processor, and of transformers' classes with a tower, which Axolotl loads for text too
LOSS_OF_ITS_OWN = re.compile(
    r"^class \w+ForConditionalGeneration\((?:(?!^class ).)*accepts_loss_kwargs = False",
    re.DOTALL | re.MULTILINE,
)
# whose flag monkeypatch/gemma4_loss_kwargs.py of Axolotl sets
COUNTED_IN_21 = ("gemma4", "gemma4_unified")
MICRO_BATCHES_ALIKE = (
    "loss: the mean of each micro-batch over its labels counts alike there; here it is the mean "
    "over those of the whole step"
)
# lce_forward of Axolotl's integrations/liger/models, which take no count of the step's labels:
# deepseekv2.py, for which Trainer divides by the micro-batches, and jamba.py, for which it does not
UNCOUNTED_BY_LIGER = {
    "deepseek_v2": MICRO_BATCHES_ALIKE,
    "jamba": (
        "loss: the means of a step's micro-batches over their labels are added in 0.21 under this "
        "fused loss, and averaged in 0.19; here it is the mean over the labels of the whole step"
    ),
}
LIGERS_LOSS = "liger_fused_linear_cross_entropy"
# keys of losses that read the head's weight without calling it: LigerForCausalLMLoss, and apply_lce
# of cut_cross_entropy
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
SHARED_CUT = (
    "cutoff_len: {}   (of a longer row its prompt and its answer are both cut there, by share; its "
    "end here)"
)
OFFLOADED = {
    "offload": "activation_offload: to host memory",
    "offload_disk": "activation_offload: to host memory here, to a disk there",
}
# whose gradients no zero_grad takes away between two epochs
CARRIED_OVER = (
    "epochs: micro-batches that fill no step are added to the next epoch's first one there, and "
    "left out after the last; here they are a last, short step"
)
# of its full_finetune recipes, whose newest source ends an epoch with its last whole step
CARRIED_IN_06 = (
    "epochs: micro-batches that fill no step are added to the next epoch's first one in 0.6, and "
    "left out by the newest source, and after the last one; here they are a last, short step"
)
# its calculate_total_num_steps, and _configure_warmup_and_logging
FEWER_STEPS = (
    "num_epochs: the run ends up to a step an epoch earlier there, for it counts whole steps, and "
    "rounds the warm-up's share down; here a short step ends each epoch"
)
# _configure_warmup_and_logging of its core/builders/base.py, in a run that is no shorter
ROUNDED_DOWN = (
    "warmup_ratio: its share of the steps{} is rounded down there, up here, and a warm-up of one "
    "step is one of two there"
)
OF_EPOCHS = ", of those in num_epochs where they are fewer than max_steps,"
# the same of a mixture's routers of that name, which it casts back under no attention
GATE = "self.gate = "
ROUTERS_IN_FP32 = "the routers are in float32 there; all weights are in bfloat16 here"
NORMS_IN_FP32 = "norms are in float32 there; all weights are in bfloat16 here"
# load_best_model_at_end of its core/builders/causal.py
BEST_AT_END = (
    "of the checkpoints that are saved the best one is kept there, of all evaluations here"
)
# sort_checkpoints of transformers' Trainer, with a metric_for_best_model, which ms-swift sets
BEST_AMONG_KEPT = (
    "the best of those that were saved is among them there; here they are the newest, and "
    "keep_best_checkpoint keeps the best beside them"
)
# ModelArguments, and _preprocess_image of its data/mm_plugin.py
IMAGES_SHRUNK = (
    "an image of more than 768 x 768 pixels is made smaller there, its default; the model's own "
    "image processor, as its files configure it, decides the size here"
)
# backends of AutoImageProcessor, and the families that have no other
RESIZED = (
    "images: resized by torchvision there, its default, and by Pillow here, which rounds some "
    "pixels otherwise"
)
BY_TORCHVISION = ("llama4",)
# Mistral3Processor of Axolotl's loaders/processor.py, by mistral-common's tokenizers/image.py
RESIZED_BY_COMMON = (
    "mistral-common resizes images by OpenCV there, whose cubic smooths none that is made smaller, "
    "and rounds the sides of a large one; here by Pillow, and those sides are rounded down"
)
BEST_ON_STEPS = "no best one is kept there unless eval_steps divides save_steps"
TWO_STEPS = "a warm-up of one step is one of two there"  # of its core/builders/base.py
# its utils/schemas/config.py; a plugin of diffusion reads it as warmup_ratio before
SHARE_REFUSED = "0.21 refuses a share of the steps under this key; it is taken as one here"
# _configure_embedding_dtypes of its loaders/model.py
PARTS_IN_FP32 = (
    "the embedding, the output head and norms are in float32 there under this attention; all "
    "weights are in bfloat16 here"
)
# default_collate_fn of Automodel's components/datasets/vlm/collate_fns.py
CUT_IN_BATCHES = "a longer row with images is cut there, unless its function drops it; dropped here"
KEPT_IN_FP32 = (None, "sdpa", "eager")  # values of attn_implementation
SHARDING_KEYS = ("fsdp", "fsdp_config", "deepspeed")
CASTING_KEYS = (*SWITCHES_IN_16_BITS, *SHARDING_KEYS)
# Trainer's evaluation_loop, which repeats a batch's loss for each of its rows
HELD_OUT_ALIKE = (
    "eval_loss: each row counts by its batch's mean over labels there; here it is the mean over "
    "all labels that are held out"
)
# prediction_step of Trainer, by compute_loss
HELD_OUT_SMOOTHED = "eval_loss: with label smoothing there, without it here"
# torchtune's run_val_every_n_steps: null, and _configure_save_and_eval_strategy of Axolotl
NOT_MEASURED = (
    "eval_loss: not measured there without a number of steps; here before and after training"
)
ALIKE_LENGTHS = "rows: those of similar length share a step here; they are drawn at random there"
GROUPED = "group_by_length"  # a key, and a value of train_sampling_strategy
BITSANDBYTES_8_BITS = "^(?!.*torch).*8bit"  # names of its optimizers
# of bitsandbytes, for which Trainer leaves them so (register_module_override)
EMBEDDING_MOMENTS = "the embedding's moments are in 32 bits there"
# transformers' convert_and_load_state_dict_in_model, in the torch_dtype that is asked for; by
# Axolotl's resolve_dtype it is the run's
ROUNDED_BEFORE = (
    "a base whose files have another dtype than is asked for, as Llama 2's have under bf16, is "
    "rounded to that before it is quantized there; here its own numbers are quantized"
)
# param.data.to(torch.bfloat16) of TRL's trainers where the model is quantized
ADAPTERS_IN_16_BITS = (
    "over a quantized base adapters and their moments are in bfloat16 there, in float32 here"
)
ADAPTERS_LEFT = ("orpo", "simpo")  # methods whose trainers, in its experimental/, cast none
# autocast_adapter_dtype=False of TRL's trainers under ZeRO-3, since 1.16
ADAPTERS_UNDER_ZERO_3 = (
    "under DeepSpeed's ZeRO-3 adapters are in bfloat16 there, as the base is, in TRL's newest "
    "version; in float32 here"
)
# cast_residual_fp32 of Axolotl's monkeypatch/accelerate/fsdp2_quantized.py, unless
# lora_fp32_gradients
ADAPTERS_BESIDE_NVFP4 = (
    "under FSDP adapters with their moments, and what else is in float32 beside a base that stays "
    "in NVFP4, are in bfloat16 there; in float32 here"
)
# autocast_adapter_dtype of peft, which its loaders/adapter.py passes on
ADAPTERS_AS_BASE = "adapters and their moments have the dtype of the base there, float32 here"
# peft casts adapters to float32, and no other modules (cast_adapter_dtype)
COPIES_AS_LOADED = "trained in bfloat16 there, as the base is loaded; in float32 here"
# torchtune's models by their builders' names -> what they compute otherwise than transformers'
TORCHTUNE_MODELS = {
    # models/gemma2: hidden_capping_value, and Gemma2FinalNorm, which caps what the head reads
    r"gemma2_\d+b": (
        "attention scores are capped at 30 there, and the last hidden states at 50 in place of the "
        "logits; as its config says here: scores at 50, logits at 30"
    ),
    # lora_llama2 takes no rope_base
    "lora_code_llama2_": "positions are rotated by a base of 10000 there; by the model's own here",
    r"(mistral_7b|phi3_mini)$": (
        "a token attends to all before it there; here to those in the sliding window, where the "
        "model's config has one"
    ),
}
# reparametrize_as_dtype_state_dict_post_hook and get_merged_lora_ckpt of torchtune
MERGED_DEQUANTIZED = (
    "the exported model is merged onto the dequantized base there; here onto that or the original "
    "one, whichever has the lower loss on held-out rows: finetune export has --merge-onto "
    "dequantized"
)
# FullModelMetaCheckpointer of torchtune
METAS_FILES = "the trained weights are saved as Meta's files there, as Hugging Face's here"
# torch_dtype "auto" of LLaMA-Factory's model/loader.py, and init_adapter of its model/adapter.py
LOADED_IN_16_BITS = (
    "without bf16 and fp16 what is not trained has the dtype of the model's files there, as a rule "
    "16 bits, and is computed in it; all is in float32 here"
)
TRAINED_IN_16_BITS = (
    "without bf16 and fp16 all weights have the dtype of the model's files there, those that BAdam "
    "trains too, and are computed in it; all is in float32 here"
)
ALL_DECAYED = "weight_decay: norms and biases are decayed too there, matrices alone here"
# by get_decay_parameter_names of transformers' Trainer too, which spares norms and biases
MAGNITUDES_DECAYED = "weight_decay: DoRA's magnitudes are decayed too there, matrices alone here"


# LoRA_MLP of Axolotl's kernels/lora.py, lora_kernels_auto_enable of its
# utils/schemas/validation.py, and find_mlp_in_layer of its monkeypatch/lora_kernels.py
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
STOPS_KERNELS = ("rl", "nvfp4_merge_aware", "trust_remote_code")
# whose model_support says so
WITHOUT_KERNELS = re.compile(
    r"glm-?5\.3-flash|qwen-?3\.\d-flash-next|muse-glimmer|k2-horizon|paddleocr|diffusion-?gemma|"
    r"\bdream|twotower"
)
DENSE_BESIDE_EXPERTS = ("gemma4_text",)
# patch_self_attn_lora, which refuses a family whose attention has none of these lines, but for two
# that it leaves alone
REWRITTEN = re.compile(
    r"self\.q_proj\(hidden_states\)\.view\(hidden_shape\)\)?\.transpose\(1, 2\)|"
    r"query_states, gate = torch\.chunk\("
)
REWRITTEN_OUTPUT = "attn_output = self.o_proj(attn_output)"
LEFT_ALONE = ("gemma4_text", "gemma4_unified_text")
# which get_attention_cls_from_config sends to the file of its language model
IN_ANOTHER_FILE = ("mistral3",)
BY_KERNELS = "by its LoRA kernels, which 0.21 turns on unless a key turns them off, "
DOWN_UNDROPPED = (
    f"{BY_KERNELS}the adapter of an MLP's down_proj drops none of its inputs there; here it drops "
    "them as all others do"
)
# of MLPs that are not the kernel's, down_proj(activation(gate_proj(x)) * up_proj(x))
MLPS_OTHERWISE = {
    "dory": "an MLP has no learned scales and no norm before down_proj there, as it has here",
    "gemma3n_text": "the first layers' MLPs have no sparse activations there, as they have here",
    "seed_oss": "an MLP's output is not dropped in part there; here by its config's share",
}
# kernels/geglu.py, for families whose configs say gelu_pytorch_tanh
GELUS_BY_TANH = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "vaultgemma",
)
EXACT_GELU = f"{BY_KERNELS}GELU is exact there, and by tanh here, as the model's config says"


def adapt_tool(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Adds what only several keys together determine; `text` is the file with its comments."""
    tool = conversion.tool
    if tool == "Axolotl":
        _adapt_axolotl(settings, conversion)
    elif tool == "ms-swift":
        _adapt_swift(settings, conversion)
    elif tool == "LLaMA-Factory":
        _adapt_factory(settings, conversion)
    elif tool == "torchtune":
        _adapt_torchtune(settings, text, conversion)
    elif tool == "Automodel":
        _adapt_automodel(settings, conversion)
    decays_all = (
        tool in ("torchtune", "Automodel") or conversion.is_factory_v1 or settings.get("use_muon")
    )
    if (
        decays_all
        and not conversion.recipe.get("use_peft")
        and conversion.recipe.get("weight_decay")
    ):
        conversion.remarks.append(ALL_DECAYED)
    _report_embedding_moments(settings, conversion)


def _report_quantized_base(settings: ToolFile, conversion: Conversion) -> None:
    """Reports in which dtypes a base is quantized, and adapters over it are trained."""
    tool = conversion.tool
    load_key = next((key for key in LOAD_KEYS if conversion.recipe.get(key)), None)
    if load_key is None:
        return
    is_trained_by_trl = tool == "TRL" or any(map(settings.get, OF_PAIRS))
    is_cast = conversion.recipe.get("method") not in ADAPTERS_LEFT
    if tool in ("TRL", "Axolotl") and is_trained_by_trl and is_cast:
        conversion.add_difference(load_key, True, ADAPTERS_IN_16_BITS)
    named = str(settings.get("torch_dtype") or settings.get("dtype")).rpartition(".")[2]
    is_rounded = tool in ("TRL", "ms-swift") and named in ("bfloat16", "float16")
    if tool == "Axolotl" or is_rounded:
        conversion.add_remark(load_key, True, ROUNDED_BEFORE)


def report_dtypes(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the dtypes of adapters over a quantized base, and which weights Axolotl keeps in
    float32 where all are in bfloat16 here.
    """
    recipe = conversion.recipe
    if recipe.get("use_peft"):
        _report_quantized_base(settings, conversion)
    _report_adapters_under_zero_3(settings, conversion)
    _report_axolotls_adapters(settings, conversion)
    if conversion.tool == "Automodel":
        report_loaded_dtype(settings, conversion)
    if conversion.tool != "Axolotl" or recipe.get("dtype") != "bfloat16":
        return
    is_cast = any(map(settings.get, CASTING_KEYS)) or cuts_loss(settings)
    if settings.get("attn_implementation") in KEPT_IN_FP32 and not is_cast:
        conversion.add_difference("dtype", "bfloat16", PARTS_IN_FP32)
    source = read_family_source(guess_family(name_model(settings)) or "")
    if GATE in source and not any(map(settings.get, SHARDING_KEYS)):
        conversion.add_difference("dtype", "bfloat16", ROUTERS_IN_FP32)
    if settings.get("fp32_norms"):
        conversion.add_difference("fp32_norms", True, NORMS_IN_FP32)


def _report_adapters_under_zero_3(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the dtype of TRL's adapters where the file, or the one of its launch, shards by
    DeepSpeed.
    """
    recipe = conversion.recipe
    is_quantized = any(map(recipe.get, LOAD_KEYS))
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    is_in_16_bits = dtype in ("bfloat16", "auto")
    if conversion.tool != "TRL" or not recipe.get("use_peft") or is_quantized or not is_in_16_bits:
        return
    stage = find_zero_stage(settings.get("deepspeed"))
    if stage == 3:
        conversion.add_difference("deepspeed", settings["deepspeed"], ADAPTERS_UNDER_ZERO_3)
    elif stage is None:
        conversion.add_remark("use_peft", True, ADAPTERS_UNDER_ZERO_3)


def _report_axolotls_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl's adapters are in 16 bits."""
    is_in_fp32 = settings.get("lora_fp32_gradients")
    if conversion.tool != "Axolotl" or not conversion.recipe.get("use_peft") or is_in_fp32:
        return
    name = name_model(settings)
    if settings.get("peft_autocast_adapter_dtype") is False:
        conversion.add_difference("peft_autocast_adapter_dtype", False, ADAPTERS_AS_BASE)
    elif "nvfp4" in name.lower() and settings.get("fsdp_config"):
        conversion.add_difference("base_model", name, ADAPTERS_BESIDE_NVFP4)


def report_epochs(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how an epoch goes otherwise: how it ends, and which rows share a step."""
    recipe = conversion.recipe
    tool = conversion.tool
    if find_method_facts(recipe).samples:
        return
    is_packed = recipe.get("packing", recipe_keys()["packing"].default)
    epochs = recipe.get("num_train_epochs", 1)
    if tool == "torchtune" and "max_steps" not in recipe:
        accumulates = recipe.get("gradient_accumulation_steps", 1) > 1
        is_carried = epochs != 1 and accumulates
        conversion.remarks.append(_find_carried(conversion) if is_carried else WHOLE_STEPS)
    elif (
        tool == "Axolotl"
        and "max_steps" not in recipe
        and (is_packed or settings.get("sample_packing") or epochs != 1)
    ):
        conversion.remarks.append(FEWER_STEPS)
    elif tool == "Axolotl" and settings.get("warmup_ratio") and recipe.get("warmup_ratio"):
        counts_rows = "max_steps" in recipe and not recipe.get("streaming")
        conversion.remarks.append(ROUNDED_DOWN.format(OF_EPOCHS if counts_rows else ""))
    is_asked = GROUPED in settings.values() or any(
        section.get(GROUPED) for section in (settings, read_section(settings, "dataloader"))
    )
    is_in_order = any(IN_ORDER in line for line in conversion.differences)
    if not (is_packed or is_asked or is_in_order or find_method_facts(recipe).reads_queries):
        conversion.remarks.append(ALIKE_LENGTHS)


def _find_carried(conversion: Conversion) -> str:
    """Returns what torchtune's recipe does with micro-batches that fill no step: all but those for
    full fine-tuning add them to the next epoch.
    """
    recipe = conversion.recipe
    others = ("use_peft", "quantization_aware_training")
    is_full = recipe.get("method", "sft") == "sft" and not any(map(recipe.get, others))
    return CARRIED_IN_06 if is_full else CARRIED_OVER


def report_losses(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where the loss of a step is another mean, and where it passes an adapter by."""
    answers = find_method_facts(conversion.recipe).rows == "answers"
    targets = conversion.recipe.get("lora_target_modules")
    heads = sorted(HEADS.intersection(targets)) if isinstance(targets, list) else []
    is_asked = settings.get(FUSED_LOSSES.get(conversion.tool, "")) or cuts_loss(settings)
    # which need the scores
    others = map(settings.get, LABEL_LOSSES.get(conversion.tool, ()))
    if answers and heads and is_asked and not any(others):
        conversion.add_difference("lora_target_modules", heads, HEAD_PASSED_BY)
    if conversion.tool == "TRL" and answers and _has_own_loss(name_model(settings)):
        conversion.remarks.append(MICRO_BATCHES_ALIKE)


def report_magnitudes(conversion: Conversion) -> None:
    """Reports that DoRA's magnitudes, which are vectors, decay in every other tool."""
    if conversion.recipe.get("use_dora") and conversion.recipe.get("weight_decay"):
        conversion.remarks.append(MAGNITUDES_DECAYED)


def report_mlp_kernel(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what differs where Axolotl computes an MLP with its adapters in one kernel."""
    recipe = conversion.recipe
    if conversion.tool != "Axolotl" or not recipe.get("use_peft"):
        return
    targets = recipe.get("lora_target_modules", ())
    name = name_model(settings)
    family = guess_family(name) or ""
    layers = find_linear_layers(family) if ALL_LINEAR in targets else targets
    source = read_family_source(family)
    is_dense = not is_mixture(name) or family in DENSE_BESIDE_EXPERTS
    has_mlps = is_dense and set(MLP_LAYERS) <= set(layers) and (not source or "self.mlp" in source)
    if not (has_mlps and _has_mlp_kernel(settings, family)):
        return
    if recipe.get("lora_dropout"):
        conversion.add_remark("lora_dropout", recipe["lora_dropout"], DOWN_UNDROPPED)
    asked = settings.get("lora_mlp_kernel")
    if family in MLPS_OTHERWISE:
        note = f"{BY_KERNELS}{MLPS_OTHERWISE[family]}"
        conversion.add_difference("lora_mlp_kernel", asked, note)
    if family in GELUS_BY_TANH:
        conversion.add_remark("lora_mlp_kernel", asked, EXACT_GELU)


def _has_mlp_kernel(settings: ToolFile, family: str) -> bool:
    """Whether Axolotl computes an MLP with its adapters in one kernel."""
    flags = [settings.get(key) for key in LORA_KERNELS]
    if any(flag is not None for flag in flags):
        return bool(settings.get(LORA_KERNELS[0]))
    adapter = settings.get("adapter")
    is_in_8_bits = adapter == "lora" and settings.get("load_in_8bit")
    has_none = WITHOUT_KERNELS.search(name_model(settings).lower())
    is_stopped = any(map(settings.get, STOPS_KERNELS)) or is_in_8_bits or has_none
    if adapter not in ("lora", "qlora") or is_stopped:
        return False
    return _is_rewritten(name_model(settings), family)


def _is_rewritten(name: str, family: str) -> bool:
    """Whether Axolotl's kernels take a model's attention, and do not refuse it; in doubt they do.

    `family`: of its language model.
    """
    whole = str(guess_vision_family(name))
    source = read_family_source(family if whole in IN_ANOTHER_FILE else whole)
    if not source or family in LEFT_ALONE:
        return True
    return REWRITTEN.search(source) is not None and REWRITTEN_OUTPUT in source


def report_images(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what resizes images, and their size that LLaMA-Factory bounds without a key."""
    if conversion.images and settings.get("tokenizer_use_mistral_common"):
        conversion.add_difference("tokenizer_use_mistral_common", True, RESIZED_BY_COMMON)
    elif conversion.images and conversion.tool != "torchtune":
        conversion.remarks += [RESIZED] if conversion.images not in BY_TORCHVISION else []
    is_bounded = conversion.tool == "LLaMA-Factory" and settings.get("stage") != "pt"
    if conversion.images and is_bounded and settings.get("image_max_pixels") is None:
        conversion.add_difference("image_max_pixels", None, IMAGES_SHRUNK)


def report_evaluation(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where the loss of held-out rows is not measured, or Trainer averages it otherwise,
    and which checkpoint it keeps by it.
    """
    recipe = conversion.recipe
    if not {"eval_datasets", "eval_split_size"} & recipe.keys():
        return
    is_measured = {"eval_steps", "eval_strategy"} & recipe.keys()
    if conversion.tool in ("torchtune", "Axolotl") and not is_measured:
        conversion.remarks.append(NOT_MEASURED)
    is_trainer = conversion.tool not in ("torchtune", "Automodel")
    are_all_saved = recipe.get("save_steps") == recipe.get("eval_steps")
    is_said = any(BEST_AT_END in line for line in conversion.remarks)
    if is_trainer and recipe.get("keep_best_checkpoint") and not (are_all_saved or is_said):
        asked = settings.get("load_best_model_at_end")
        conversion.add_remark("load_best_model_at_end", asked, BEST_AT_END)
    keeps_best = conversion.tool == "ms-swift" or settings.get("metric_for_best_model")
    limit = recipe.get("save_total_limit")
    if (
        is_trainer
        and is_measured
        and keeps_best
        and limit
        and not recipe.get("keep_best_checkpoint")
    ):
        conversion.add_remark("save_total_limit", limit, BEST_AMONG_KEPT)
    if is_trainer and is_measured and find_method_facts(recipe).rows == "answers":
        conversion.remarks.append(HELD_OUT_ALIKE)
        if recipe.get("label_smoothing"):
            conversion.remarks.append(HELD_OUT_SMOOTHED)


def _report_embedding_moments(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Trainer has bitsandbytes keep the embedding's moments in 32 bits."""
    recipe = conversion.recipe
    key = "optimizer" if conversion.tool == "Axolotl" else "optim"
    name = str(settings.get(key))
    if not re.search(BITSANDBYTES_8_BITS, name):
        return
    if settings.get("deepspeed"):
        return  # whose optimizer has a flat tensor in place of the embedding
    has_adapters = recipe.get("use_peft", conversion.tool in ("LLaMA-Factory", "ms-swift"))
    if has_adapters:
        trained = recipe.get("modules_to_save") or ()
    else:
        trained = recipe.get("trainable_modules") or ("embed",)
    if any(re.search("embed|wte", str(name)) for name in trained):
        conversion.add_remark(key, name, EMBEDDING_MOMENTS)


def _adapt_axolotls_warmup(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    if recipe.get("warmup_steps") == 1:
        recipe["warmup_steps"] = 2
        conversion.add_remark("warmup_steps", 1, TWO_STEPS)
    steps = settings.get("warmup_steps")
    is_share = isinstance(steps, float) and not steps.is_integer()
    if is_share and find_masked_diffusion(settings) is None:
        conversion.add_remark("warmup_steps", steps, SHARE_REFUSED)


def _adapt_axolotl(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    _set_axolotl_targets(settings, recipe)
    total = settings.get("batch_size")
    micro = settings.get("micro_batch_size") or 1
    if (
        isinstance(total, int)
        and isinstance(micro, int)
        and "gradient_accumulation_steps" not in settings
    ):
        recipe["gradient_accumulation_steps"] = max(1, total // micro)
    _adapt_axolotl_saves(settings, conversion)
    if settings.get("pretraining_dataset"):
        recipe["streaming"] = True
    offload = str(settings.get("gradient_checkpointing"))
    if offload in OFFLOADED:
        recipe["activation_offload"] = True
        conversion.add_remark("gradient_checkpointing", offload, OFFLOADED[offload])
    # masked diffusion divides each row by its own labels
    if not any(map(settings.get, OF_PAIRS)) and find_masked_diffusion(settings) is None:
        conversion.remarks.append(_describe_mean(settings))
    _adapt_axolotls_warmup(settings, conversion)
    report_turn_ends(settings, conversion)
    _report_axolotl_rows(settings, conversion)
    _report_axolotl_numerics(settings, conversion)
    if settings.get("loss_watchdog_threshold"):
        conversion.add_remark(
            "loss_watchdog_threshold", settings["loss_watchdog_threshold"], WATCHED
        )
    adapter = settings.get("lora_model_dir")
    if adapter and settings.get("adapter") and settings.get("rl") in TRAINED_BY_TRL:
        conversion.add_difference("lora_model_dir", adapter, NEW_UNDER_TRL)
    if settings.get("nf4_backend") == "torchao":
        conversion.add_remark("nf4_backend", "torchao", NOTES["NF4_OF_TORCHAO"])
    optim = str(recipe.get("optim"))
    if optim not in OPTIMIZERS or not OPTIMIZERS[optim].count_matrix:
        return
    if "fsdp_config" in settings or settings.get("fsdp"):
        conversion.add_difference("optimizer", optim, DIONS_MUON)
    elif not recipe.get("use_peft"):
        conversion.add_difference("optimizer", optim, "norms and biases are not trained there")


def _set_axolotl_targets(settings: ToolFile, recipe: dict[str, Any]) -> None:
    """Names the adapted layers where two keys do, and none where parameters alone are adapted."""
    names = convert_names(settings.get("lora_target_modules")) or ()
    heads = HEADS.intersection(names)
    if settings.get("lora_target_linear") and heads:
        recipe["lora_target_modules"] = [ALL_LINEAR, *sorted(heads)]
    elif settings.get("lora_target_parameters") and not (
        settings.get("lora_target_linear") or names
    ):
        recipe["lora_target_modules"] = []


def _adapt_axolotl_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Sets when it saves and evaluates, and whether the best checkpoint is kept."""
    recipe = conversion.recipe
    epochs = convert_number(settings.get("num_epochs") or 1)
    for key, ours in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        per_epoch = convert_number(settings.get(key))
        if (
            isinstance(per_epoch, int | float)
            and isinstance(epochs, int | float)
            and per_epoch * epochs > 1
        ):
            recipe[ours] = 1 / (per_epoch * epochs)  # else at the end only, there too
    # null is not False, which its core/builders/causal.py asks
    asks_best = settings.get("load_best_model_at_end", False) is not False
    if asks_best and _loads_best(recipe):
        recipe["keep_best_checkpoint"] = True
    elif settings.get("load_best_model_at_end"):
        recipe.pop("keep_best_checkpoint", None)
        conversion.add_remark("load_best_model_at_end", True, BEST_ON_STEPS)
    if settings.get("early_stopping_patience"):
        recipe["keep_best_checkpoint"] = True
        patience = settings["early_stopping_patience"]
        conversion.add_remark("early_stopping_patience", patience, BEST_AT_END)


def _loads_best(recipe: Mapping[str, Any]) -> bool:
    """Whether Axolotl loads the best checkpoint at the end: of saves that are evaluated."""
    saves = recipe.get("save_steps")
    evaluations = recipe.get("eval_steps")
    if not isinstance(saves, int | float) or not isinstance(evaluations, int | float):
        return False
    return evaluations > 0 and saves % evaluations == 0


def _describe_mean(settings: ToolFile) -> str:
    """What the loss of a step is the mean of, in Axolotl's trainer of answers."""
    if any(map(settings.get, LABEL_LOSSES["Axolotl"])):
        return RANKS_ALIKE.format("")  # a compute_loss_func gets the count of the step's labels
    shares_rows = count_sharing_ranks(settings) > 1
    if shares_rows and settings.get("deepspeed"):
        return MICRO_BATCHES_OF_GROUPS
    name = name_model(settings)
    family = guess_family(name)
    if settings.get(LIGERS_LOSS) and family in UNCOUNTED_BY_LIGER:
        return UNCOUNTED_BY_LIGER[family]
    if _has_own_loss(name) and guess_vision_family(name) not in COUNTED_IN_21:
        return MICRO_BATCHES_ALIKE
    return (GROUPS_ALIKE if shares_rows else RANKS_ALIKE).format(EACH_IN_19)


def _has_own_loss(name: str) -> bool:
    """Whether transformers' class of a model with a tower takes no count of the step's labels."""
    source = read_family_source(str(guess_vision_family(name)))
    return has_tower(name) and LOSS_OF_ITS_OWN.search(source) is not None


def _report_axolotl_rows(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which rows are held out, and how the texts of pretraining are cut."""
    for key, value in (("shuffle_merged_datasets", False), ("curriculum_sampling", True)):
        if settings.get(key) is value and settings.get("val_set_size"):
            conversion.add_difference(key, value, LAST_HELD_OUT)
    packs = settings.get("sample_packing")
    if settings.get("pretraining_dataset"):
        _report_pretraining(settings, conversion)
    kinds = list(find_texts(settings, "type"))
    are_texts = any(each.startswith("completion") for each in kinds)
    if are_texts and (packs or not settings.get("pretraining_dataset")):
        conversion.add_remark("sequence_len", settings.get("sequence_len"), TEXTS_CUT)
    trains_prompts = settings.get("train_on_inputs") and not all(
        each.startswith("chat_template") for each in kinds
    )
    if packs and (are_texts or trains_prompts or settings.get("pretraining_dataset")):
        conversion.remarks.append(FIRST_TRAINED)
    holds_out = settings.get("val_set_size") or settings.get("test_datasets")
    is_measured = holds_out and {"eval_steps", "eval_strategy"} & conversion.recipe.keys()
    if packs and settings.get("eval_sample_packing") is False and is_measured:
        conversion.remarks.append(LAST_UNMEASURED)


def _report_pretraining(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which texts Axolotl pretrains on, and how it cuts them."""
    entries = settings["pretraining_dataset"]
    if isinstance(entries, list) and len(entries) > 1:
        conversion.add_difference("pretraining_dataset", entries, FIRST_ENTRY)
    kind = next(find_texts(entries, "type"), "pretrain")
    length = conversion.recipe.get("max_length", DEFAULTS["Axolotl"]["max_length"])
    if not isinstance(length, int):
        return  # which the reader refuses
    if not settings.get("sample_packing"):
        conversion.add_difference("sample_packing", False, PIECES_ALONE.format(length - 2))
    elif kind == "pretrain":
        overlap = min(256, (length - 1) // 2)
        conversion.add_difference("pretraining_dataset", f"type: {kind}", WINDOWS.format(overlap))


def _report_axolotl_numerics(settings: ToolFile, conversion: Conversion) -> None:
    copies = settings.get("lora_modules_to_save")
    is_upcast = (
        settings.get("adapter") == "qlora"
        and bool(settings.get("fsdp") or settings.get("fsdp_config"))
        and not (cuts_loss(settings) or settings.get("embeddings_skip_upcast"))
    )
    is_bf16 = settings.get("bf16") or settings.get("bfloat16")
    if copies and settings.get("adapter") and is_bf16 and not is_upcast:
        conversion.add_difference("lora_modules_to_save", copies, COPIES_AS_LOADED)
    family = guess_family(str(settings.get("base_model")))
    if family in ROUTED_OTHERWISE:
        conversion.add_difference("base_model", settings.get("base_model"), BY_SOFTMAX)
        if settings.get("lora_target_linear"):
            conversion.add_difference("lora_target_linear", True, EXPERTS_ADAPTED)
    if settings.get("sample_packing"):
        _report_axolotl_packing(settings, family, conversion)
    if settings.get("float16") and not any(map(settings.get, ("fp16", "bf16", "bfloat16"))):
        conversion.add_difference("float16", True, NO_SCALING)
    load_key = next((key for key in LOAD_KEYS if conversion.recipe.get(key)), None)
    if load_key and family == "falcon_h1":
        conversion.add_difference(load_key, True, OUT_PROJECTION)
    if load_key == "load_in_8bit" and family == "jamba":
        conversion.add_difference(load_key, True, MAMBA_LAYERS)


def _report_axolotl_packing(settings: ToolFile, family: str | None, conversion: Conversion) -> None:
    attention = settings.get("attn_implementation")
    isolates = ISOLATING.fullmatch(str(attention)) or any(map(settings.get, ISOLATING_SWITCHES))
    if not isolates:
        conversion.add_difference("attn_implementation", attention, NOT_ISOLATED)
    elif settings.get("pretraining_dataset") and _sees_no_starts(settings):
        conversion.add_difference("attn_implementation", attention, HIDDEN_BY_MASK)
    if family in PASSING_STATES_ON:
        conversion.add_difference("sample_packing", True, STATE_PASSED_ON)
    elif family in APART_SINCE:
        conversion.add_remark("sample_packing", True, APART_IN_21)


def _sees_no_starts(settings: ToolFile) -> bool:
    """Whether the attention of a file is one that reads a mask before it looks for documents."""
    if guess_vision_family(name_model(settings)) in MASK_REMOVED:
        return False
    switches = ("sdp_attention", "eager_attention", "flex_attention")
    is_named = SEES_NO_STARTS.fullmatch(str(settings.get("attn_implementation")))
    return is_named is not None or any(map(settings.get, switches))


def _adapt_swift(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    scale = str(settings.get("loss_scale") or "default")
    parts = scale.split("+")
    if "all" in parts:
        recipe["assistant_only_loss"] = False
    elif "last_round" in parts:
        recipe["turns"] = "last"
    if scale not in ("all", "last_round", "default"):
        conversion.add_difference("loss_scale", scale, "every token of an answer counts alike here")
    if not settings.get("template"):
        conversion.add_difference("template", None, SWIFT_TURNS)
    _adapt_swifts_values(settings, conversion)
    if settings.get("val_dataset") or settings.get("split_dataset_ratio"):
        _measure_with_saves(settings, conversion)
    adapters = convert_names(settings.get("adapters")) or []
    if len(adapters) == 1:
        recipe["adapter_name_or_path"] = adapters[0]
    elif adapters:
        conversion.add_difference(
            "adapters", adapters, "one adapter is trained further", "several adapters at once"
        )


def _adapt_swifts_values(settings: ToolFile, conversion: Conversion) -> None:
    """Adapts values of single keys that ask for nothing alone, or for more than a name says."""
    recipe = conversion.recipe
    if settings.get("quant_bits") and not settings.get("quant_method"):
        for key in LOAD_KEYS:
            recipe.pop(key, None)
        conversion.add_remark("quant_bits", settings["quant_bits"], WITHOUT_METHOD)
    if recipe.get("label_smoothing"):
        conversion.add_remark("label_smoothing_factor", recipe["label_smoothing"], SMOOTHED_MEANS)
    for key in ("target_modules", "modules_to_save"):
        names = convert_names(settings.get(key)) or []
        found = [name for name in names if name in FOUND_THERE]
        if found:
            conversion.add_difference(key, found, FOUND_BY_CLASS)
        if found and key == "modules_to_save":
            recipe[key] = [name for name in names if name not in FOUND_THERE]
    files = [name for name in recipe.get("added_tokens", ()) if str(name).endswith(".txt")]
    if files:
        recipe["added_tokens"] = [name for name in recipe["added_tokens"] if name not in files]
        conversion.add_difference("new_special_tokens", files, FILES_OF_TOKENS)


def _measure_with_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Measures as often as ms-swift saves, where its file does not say when."""
    recipe = conversion.recipe
    strategy = settings.get("eval_strategy", settings.get("evaluation_strategy"))
    if strategy is None:
        strategy = settings.get("save_strategy") or "steps"
        if strategy == "epoch":
            recipe["eval_strategy"] = "epoch"
    if strategy == "steps" and "eval_steps" not in recipe:
        recipe["eval_steps"] = recipe.get("save_steps", 500)
    if strategy == "no" and recipe.pop("eval_split_size", None):
        share = settings.get("split_dataset_ratio")
        conversion.add_remark("split_dataset_ratio", share, ALL_TRAINED)


def _adapt_factory(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    if settings.get("finetuning_type") == "oft":
        block = read_number("oft_block_size", settings.get("oft_block_size", 32), "32", 0)
        recipe["oft_block_size"] = int(block)
    if not conversion.is_factory_v1:
        _report_loaded_dtype(settings, conversion)
    if conversion.is_factory_v1:
        adapt_v1(settings, conversion)
    elif settings.get("stage") == "pt" and settings.get("packing", True):
        conversion.add_difference("stage", "pt", JOINED)
    elif settings.get("stage") == "pt":
        recipe["overlength"] = "truncate"
    elif settings.get("stage") != "rm":
        conversion.remarks.append(SHARED_CUT.format(recipe.get("max_length", 2048)))
    reads_images = conversion.images is not None or has_tower(name_model(settings))
    has_processor = reads_images and not conversion.is_factory_v1
    if has_processor and settings.get("stage") in ("pt", "sft"):
        conversion.remarks.append(MICRO_BATCHES_ALIKE)
    packs = settings.get("packing") and settings.get("stage", "sft") == "sft"
    if packs and settings.get("train_on_prompt"):
        conversion.remarks.append(FIRST_TRAINED)
    if packs and not (conversion.is_factory_v1 or settings.get("neat_packing")):
        conversion.add_difference("packing", True, NOT_NEAT)
    _adapt_factorys_adapters(settings, conversion)


def _report_loaded_dtype(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which weights are in 16 bits in a file of LLaMA-Factory that names no precision."""
    if any(map(settings.get, ("bf16", "fp16", "pure_bf16", "deepspeed"))):
        return
    asked = settings.get("bf16")
    if settings.get("use_badam"):
        conversion.add_remark("bf16", asked, TRAINED_IN_16_BITS)
    elif settings.get("finetuning_type", "lora") != "full":
        conversion.add_remark("bf16", asked, LOADED_IN_16_BITS)


def _adapt_factorys_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Names the adapter that is trained further, and says what else LLaMA-Factory does with it."""
    names = convert_names(settings.get("adapter_name_or_path")) or []
    if len(names) > 1:
        conversion.recipe["adapter_name_or_path"] = names[-1]
        conversion.add_difference(
            "adapter_name_or_path", names, ALL_BUT_LAST, "several adapters at once"
        )
    has_reference = settings.get("stage") in ("dpo", "kto") and not settings.get("ref_model")
    if names and has_reference and settings.get("pref_loss") not in ("orpo", "simpo"):
        conversion.add_difference("adapter_name_or_path", names[-1], BASE_IS_REFERENCE)


def _adapt_torchtune(settings: ToolFile, text: str, conversion: Conversion) -> None:
    recipe = conversion.recipe
    _name_models(settings, text, conversion)
    component = str(read_section(settings, "model").get("_component_"))
    for pattern, note in TORCHTUNE_MODELS.items():
        if re.search(pattern, component):
            conversion.add_difference("model._component_", component, note)
    _adapt_torchtune_adapters(read_section(settings, "model"), conversion)
    if recipe.get("load_in_4bit") and not settings.get("save_adapter_weights_only"):
        conversion.add_remark("save_adapter_weights_only", False, MERGED_DEQUANTIZED)
    optimizer = read_section(settings, "optimizer")
    if optimizer:
        _set_optimizers_defaults(str(optimizer.get("_component_")), recipe)
    per_epoch = settings.get("max_steps_per_epoch")
    epochs = settings.get("epochs", 1)
    if isinstance(per_epoch, int) and isinstance(epochs, int):
        recipe["max_steps"] = per_epoch * epochs
        conversion.add_difference("max_steps_per_epoch", per_epoch, AN_EPOCH_AT_MOST)
    if settings.get("shuffle") is False:
        conversion.add_difference("shuffle", False, IN_ORDER)


def _name_models(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Names the model and the teacher by their hub names, where a comment says which was downloaded
    into the folder.
    """
    downloaded = {local.rstrip("/"): hub for hub, local in DOWNLOAD.findall(text)}
    # of Meta's own files, beside those of the hub
    downloaded |= {f"{local}/original": hub for local, hub in downloaded.items()}
    folder = str(read_section(settings, "checkpointer").get("checkpoint_dir") or "")
    conversion.recipe["model_name_or_path"] = downloaded.get(folder.rstrip("/"), folder)
    if folder.rstrip("/") in downloaded:
        note = "downloaded there from this hub name, says the file"
        conversion.add_remark("checkpointer.checkpoint_dir", folder, note)
    checkpointer = str(read_section(settings, "checkpointer").get("_component_"))
    if checkpointer.endswith("MetaCheckpointer"):
        conversion.add_remark("checkpointer._component_", checkpointer, METAS_FILES)
    if "teacher_model" in settings:
        teacher = str(
            read_section(settings, "teacher_checkpointer").get("checkpoint_dir") or ""
        ).rstrip("/")
        conversion.recipe["teacher_model_name_or_path"] = downloaded.get(teacher, teacher)


def _adapt_torchtune_adapters(model: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    if "lora_attn_modules" in model:
        layers = model["lora_attn_modules"]
        if model.get("apply_lora_to_mlp") and isinstance(layers, list):
            layers = [*layers, *MLP_LAYERS]
        targets = convert_targets(layers)
        if model.get("apply_lora_to_output") and isinstance(targets, list):
            targets = [*targets, "lm_head"]
        recipe |= {"use_peft": True, "lora_target_modules": targets}
    if "qlora_" in str(model.get("_component_")):
        recipe |= QLORA
        conversion.add_remark("model._component_", model["_component_"], NOTES["NF4_OF_TORCHAO"])
    alpha = recipe.get("lora_alpha")
    if isinstance(alpha, float) and alpha.is_integer():
        recipe["lora_alpha"] = int(alpha)


def _adapt_automodel(settings: ToolFile, conversion: Conversion) -> None:
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
    report_loop(settings, conversion)
    report_packing(settings, conversion)
    report_routers(settings, conversion)


def _set_optimizers_defaults(name: str, recipe: dict[str, Any]) -> None:
    """Sets the rate and the decay of an optimizer that is named by its class, where a file has
    none.
    """
    recipe.setdefault("weight_decay", 0.01 if DECAYING.search(name) else 0.0)
    recipe.setdefault("learning_rate", 1e-4 if name.endswith("Config") else 1e-3)


def _adapt_automodel_optimizer(optimizer: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    _set_optimizers_defaults(str(optimizer.get("_target_")), recipe)
    if any("bfloat16" in str(optimizer.get(key)) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")):
        recipe["optim"] = next(name for name, row in OPTIMIZERS.items() if row.moment_itemsize)


def _adapt_automodel_schedule(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    recipe.setdefault("lr_scheduler_type", "cosine")
    if schedule.get("lr_warmup_steps") is None:
        recipe["warmup_ratio"] = 0.1
        conversion.add_remark("lr_scheduler.lr_warmup_steps", None, TENTH)
    if schedule.get("lr_warmup_steps") != 0 and schedule.get("init_lr") is None:
        conversion.remarks.append(SLOW_START)
    adapt_decay(schedule, conversion)
    recipe.setdefault("min_lr_ratio", 0.01)
    lowest = convert_number(schedule.get("min_lr"))
    rate = recipe["learning_rate"]
    if isinstance(lowest, float | int) and isinstance(rate, float) and rate:
        # the schedule may come before the rate in the file
        recipe["min_lr_ratio"] = round(min(1.0, lowest / rate), 9)


def _adapt_automodel_lengths(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    packed = read_section(settings, "packed_sequence")
    dataset = read_section(settings, "dataset")
    packed_length = packed.get("packed_sequence_size") or 0
    is_cut = dataset.get("truncation") not in NOT_CUT
    row_length = dataset.get("seq_length") if is_cut else None  # else it is the length of padding
    if packed_length:
        if row_length and row_length <= packed_length:
            overlength = "truncate"
        elif packed.get("drop_long_samples", True):
            overlength = "drop"
        else:
            overlength = "error"
        recipe |= {"packing": True, "max_length": packed_length, "overlength": overlength}
    elif row_length:
        recipe["max_length"] = row_length
    elif conversion.images is not None:
        _adapt_image_lengths(settings, conversion)
    if packed_length and row_length and row_length < packed_length:
        note = "a row is cut to it before it is packed there, to max_length here"
        conversion.add_difference("dataset.seq_length", row_length, note)


def _adapt_image_lengths(settings: ToolFile, conversion: Conversion) -> None:
    """Takes over the length of rows with images, as they are tokenized before or in a batch."""
    packed = read_section(settings, "packed_sequence")
    length = packed.get("max_length") or packed.get("pack_size")
    collated = read_section(read_section(settings, "dataloader"), "collate_fn")
    if not length and collated.get("max_length"):
        length = collated["max_length"]
        if not collated.get("drop_overlong"):
            conversion.add_difference("dataloader.collate_fn.max_length", length, CUT_IN_BATCHES)
    if length:
        conversion.recipe |= {"max_length": length, "overlength": "drop"}
