"""Converts what several keys of a LLaMA-Factory file determine together.

Paths in comments are in its src/llamafactory, unless they name another package.
"""

import math
import re

from finetune.convert.chat_templates import ENDS_AS_EOS, THOUGHT, TOOLS_IN_ITS_WORDS
from finetune.convert.counterparts import ToolFile
from finetune.convert.factory_v1 import FILLED_UP, adapt_v1
from finetune.convert.foreign_values import read_number
from finetune.convert.model_names import guess_family, has_tower, name_model
from finetune.convert.shared import (
    FIRST_TRAINED,
    IN_ORDER,
    MICRO_BATCHES_ALIKE,
    PACKED_AT_A_TIME,
    SUMMED_IN_16_BITS,
    WHOLE_STEPS,
    describe_shares,
)
from finetune.convert.trained_layers import AUXILIARY, BY_LAYER
from finetune.convert.value_conversion import Conversion, convert_names

JOINED = (
    "documents are joined there, cut into blocks of cutoff_len, and attend to those before; each "
    "is apart here"
)
# PretrainDatasetProcessor gets preprocessing_batch_size rows at a time from data/loader.py
LEFT_OVER = (
    "packing: of {} texts at a time{} what fills no block is left out there; nothing is here"
)
PROCESSES = "preprocessing_num_workers"  # the key of the number of processes that pack
# PretrainDatasetProcessor
ENDS_OF_LLAMA = (
    "stage: pt   (a text ends with <|end_of_text|> there, and <|eot_id|> is saved as the EOS "
    "token; here both are the tokenizer's EOS token)"
)
# DataCollatorForLanguageModeling of transformers gives padding no label, by its id
END_AS_PADDING = (
    "stage: pt   (the EOS token that ends a text has no label there where it is the padding token, "
    "as it is for a tokenizer without one of its own; here it is trained)"
)
# (pattern of the start of a template's name, the EOS token that it sets): the templates with
# replace_eos in data/template.py
REPLACED_EOS = (
    (r"chatml|qwen|keye|lfm2|mimo|moss|moonlight|dbrx|phi4$|llava_next_qwen", "<|im_end|>"),
    (r"gemma(3n?)?$|paligemma_chat", "<end_of_turn>"),
    ("gemma4", "<turn|>"),
    ("llama3|mllama|llava_next_llama3", "<|eot_id|>"),
    ("llama4", "<|eot|>"),
    (r"phi($|_small|4_mini)", "<|end|>"),
    ("hy3", "<｜hy_eos｜>"),
    ("ernie_vl", "<|end_of_sentence|>"),
    (r"youtu$", "<|end_of_text|>"),
)
# without neat_packing the mask of PackedSupervisedDatasetProcessor is all ones
NOT_NEAT = (
    "without neat_packing documents in a packed row attend to those before there; each is apart "
    "here"
)
# transformers adds no window to the mask of prepare_4d_attention_mask in data/collator.py
NEAT_WITHOUT_WINDOWS = (
    "without flash_attn: fa2 no layer has a window in packed rows there; here as in rows that are "
    "not packed"
)
# families in which some layers attend in a sliding window
WINDOWED = (
    "cohere2",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "mimo_v2_flash",
    "olmo3",
)
# encode_multiturn of ReasoningTemplate in data/template.py; true is the default
UNTRAINED_THOUGHT = (
    "an empty thought that the template puts before an answer without one is not trained there, as "
    "under false, and thoughts stay; here as under true"
)
# parse_template of data/template.py, and the classes of templates that it makes
PARSED_TEMPLATE = (
    "the turns are pieces of what the tokenizer's own template writes there, which are found by "
    "comparing texts: what follows an answer's end, as ChatML's line break, is trained too, tools "
    "and calls are in its own words, an empty thought is in every turn if in one, and a question's "
    "header lacks its first characters where the tokenizer writes a BOS token and the template "
    "none; without a template texts stand without turns"
)
# __post_init__ of DataArguments in hparams/data_args.py
ONE_LESS = "packing takes one token off it there, as here"
SHARED_CUT = (
    "cutoff_len: {}   (of a longer row its prompt and its answer are both cut there, by share; its "
    "end here)"
)
# _get_num_items_in_batch of transformers' Trainer until 5.8, the newest that LLaMA-Factory takes
FIRST_COUNTED = (
    "loss: divided by the number of labels there, of which each row's first has no loss; by that "
    "of the trained tokens here"
)
# our templates of which `turns: auto` makes a text for each answer: they leave out earlier thoughts
SPLIT_TEMPLATES = ("qwen3", "qwen3.5", "qwen3.6")
# create_custom_scheduler of train/trainer_utils.py
DECAYS_EARLY = (
    "the rate stays for a third of the steps after the warm-up there, then decays over this many, "
    "and is 0 from there on; here it decays over the last ones of the run"
)
DECAYS_AFTER = (
    "the decay takes two thirds of the steps after the warm-up there, the last two thirds of all "
    "here"
)
ROW_FOR_EACH_ANSWER = (
    "rows: a conversation of several answers is one row there; here each answer is a row, after "
    "the prompt of inference, so an epoch of such conversations has more steps"
)


def adapt_factory(settings: ToolFile, conversion: Conversion) -> None:
    """Converts and reports what several keys of a LLaMA-Factory file determine together."""
    if settings.get("finetuning_type") == "oft":
        block = read_number("oft_block_size", settings.get("oft_block_size", 32), "32", 0)
        conversion.recipe["oft_block_size"] = int(block)
    asks_for_packing = settings.get("packing") or settings.get("neat_packing")
    packs = asks_for_packing and settings.get("stage", "sft") == "sft"
    if packs and settings.get("train_on_prompt"):
        conversion.remarks.append(FIRST_TRAINED)
    if conversion.is_factory_v1:
        adapt_v1(settings, conversion)
    else:
        _adapt_v0(settings, conversion, packs=bool(packs))
    _adapt_factorys_adapters(settings, conversion)


def _adapt_v0(settings: ToolFile, conversion: Conversion, *, packs: bool) -> None:
    """Converts what LLaMA-Factory's older code (v0) does and v1 does not.

    `packs`: the file packs rows of supervised fine-tuning.
    """
    recipe = conversion.recipe
    stage = settings.get("stage")
    _report_loaded_dtype(settings, conversion)
    if settings.get("fp8") and not is_of_megatron(settings):
        conversion.add_difference("fp8", settings["fp8"], FP8_UNDER_4)
    if settings.get("packing") or settings.get("neat_packing"):
        length = read_number("cutoff_len", settings.get("cutoff_len") or 2048, "2048", 2)
        recipe["max_length"] = int(length) - 1
        conversion.add_remark("cutoff_len", length, ONE_LESS)
    if settings.get("enable_thinking", True) is None and stage != "pt":
        conversion.add_difference("enable_thinking", None, UNTRAINED_THOUGHT)
    if not settings.get("template") and stage != "pt":
        conversion.add_difference("template", None, PARSED_TEMPLATE)
    _name_eos(settings, conversion)
    if stage == "pt" and settings.get("template"):
        _drop_turns(conversion)
    if stage == "pt" and settings.get("packing", True):
        conversion.add_difference("stage", "pt", JOINED)
        batch = settings.get("preprocessing_batch_size", 1000)
        shares = describe_shares(settings, PROCESSES)
        conversion.remarks.append(LEFT_OVER.format(batch, shares))
    elif stage == "pt":
        recipe["overlength"] = "truncate"
    elif stage != "rm" and not is_of_bridge(settings):
        conversion.remarks.append(SHARED_CUT.format(recipe.get("max_length", 2048)))
    has_vision = conversion.image_family is not None or has_tower(name_model(settings))
    if is_of_megatron(settings):
        _report_megatron(settings, conversion)
    elif has_vision and stage in ("pt", "sft"):
        conversion.remarks.append(MICRO_BATCHES_ALIKE)
    if packs:
        _report_packing(settings, conversion)
    _report_counts(settings, conversion)
    if not is_of_megatron(settings):
        _set_decay(settings, conversion)


def _set_decay(settings: ToolFile, conversion: Conversion) -> None:
    """Sets how long warmup_stable_decay decays: two thirds of the steps after the warm-up."""
    recipe = conversion.recipe
    if recipe.get("lr_scheduler_type") != "warmup_stable_decay":
        return
    arguments = recipe.setdefault("lr_scheduler_kwargs", {})
    names_stable = "num_stable_steps" in str(settings.get("lr_scheduler_kwargs"))
    if "num_decay_steps" in arguments:
        if not names_stable:
            decay = arguments["num_decay_steps"]
            conversion.add_difference("lr_scheduler_kwargs.num_decay_steps", decay, DECAYS_EARLY)
        return
    left = 2 * (1 - recipe.get("warmup_ratio", 0)) / 3
    arguments["num_decay_steps"] = math.floor(left * 1e6) / 1e6  # the loop rounds steps up
    if recipe.get("warmup_steps"):
        conversion.add_remark("lr_scheduler_type", recipe["lr_scheduler_type"], DECAYS_AFTER)


def _report_counts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what is counted otherwise there: the labels of a step, the rows of an epoch."""
    recipe = conversion.recipe
    stage = settings.get("stage", "sft")
    trains_firsts = stage == "pt" or (stage == "sft" and settings.get("train_on_prompt"))
    has_vision = conversion.image_family is not None or has_tower(name_model(settings))
    if trains_firsts and not has_vision and not is_of_megatron(settings):
        conversion.remarks.append(FIRST_COUNTED)
    splits = recipe.get("chat_template") in SPLIT_TEMPLATES and recipe.get("train_on") != "all"
    if stage == "sft" and splits and "turns" not in recipe:
        conversion.remarks.append(ROW_FOR_EACH_ANSWER)


def _name_eos(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the EOS token that the template puts in place of the tokenizer's, if they differ."""
    template = str(settings.get("template"))
    if settings.get("stage") == "pt" and template == "llama3":
        conversion.remarks.append(ENDS_OF_LLAMA)
        return
    if settings.get("stage") == "pt":
        conversion.remarks.append(END_AS_PADDING)
    eos = next((token for pattern, token in REPLACED_EOS if re.match(pattern, template)), None)
    name = name_model(settings).lower()
    is_tokenizers = any(token == eos and re.search(pattern, name) for pattern, token in ENDS_AS_EOS)
    if eos is not None and not is_tokenizers:
        conversion.recipe["special_tokens"] = {"eos_token": eos}


def _drop_turns(conversion: Conversion) -> None:
    """Drops the template and what is reported about its turns: pretraining writes no turns."""
    conversion.recipe.pop("chat_template", None)
    conversion.ignored.append("template")
    for lines in (conversion.differences, conversion.remarks):
        lines[:] = [line for line in lines if not line.startswith("template: ")]


# Keys that v0 reads only under Megatron: that is mcore_adapter (USE_MCA) or Megatron Bridge
# (USE_MEGATRON_BRIDGE). BRIDGE_KEYS: those of Megatron Bridge alone.
MEGATRON_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "use_distributed_optimizer",
    "moe_token_dispatcher_type",
    "recompute_granularity",
)
BRIDGE_KEYS = ("mixed_precision", "use_packed_sequences", "export_hf_on_finish", "extra_config")
# families for which models/ of mcore_adapter reads router_aux_loss_coef as moe_aux_loss_coeff
BALANCED_BY_MEGATRON = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text")
# save_hf_model of mcore_adapter's arguments
MEGATRONS_FILES = "the trained weights are saved as Megatron's files there, as Hugging Face's here"
# _create_peft_config in train/megatron_bridge, and LoRA of Megatron Bridge
FUSED_ADAPTERS = (
    "under Megatron Bridge one adapter is on query, key and value together, and one on gate and "
    "up, whatever lora_target says, without dropout, and with a Xavier start; here each of these "
    "layers has its own"
)
# _compute_train_schedule in train/megatron_bridge
FEWER_ROWS = "a step has the rows of {} times fewer ranks there, of all here"


# dataset_export.py of train/megatron_bridge writes rows as messages, and the template as Jinja, for
# GPTSFTChatDataset of Megatron Bridge; _compute_train_schedule counts the steps.
BRIDGES_ROWS = (
    FILLED_UP,
    "rows: of one with tools their description, the calls and the results are left out there; here "
    "they are written",
    "max_length: a row whose answers are cut off whole is trained whole there, prompt and all; "
    "here it is left out",
)
NO_THOUGHT = (
    "no empty thought is written there, and the thoughts of all answers stay; here as the chat "
    "template writes them"
)
# keys of _LR_SCHEDULER_MAP in train/megatron_bridge/config_builder.py
BRIDGES_SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")
NOW_A_COSINE = "not known to Megatron Bridge: a cosine there and here"


def is_of_megatron(settings: ToolFile) -> bool:
    """Whether a v0 file is for training by Megatron."""
    return any(key in settings for key in MEGATRON_KEYS)


def is_of_mcore(settings: ToolFile) -> bool:
    """Whether a v0 file is for training by mcore_adapter (Megatron)."""
    return is_of_megatron(settings) and not is_of_bridge(settings)


def is_of_bridge(settings: ToolFile) -> bool:
    """Whether a v0 file is for training by Megatron Bridge."""
    return is_of_megatron(settings) and any(key in settings for key in BRIDGE_KEYS)


def _report_megatron(settings: ToolFile, conversion: Conversion) -> None:
    """Converts and reports what Megatron's trainers do differently than LLaMA-Factory's own."""
    is_bridge = is_of_bridge(settings)
    splits_rows = is_bridge and (settings.get("context_parallel_size") or 1) > 1
    if not (settings.get("calculate_per_token_loss") or splits_rows):
        conversion.remarks.append(MICRO_BATCHES_ALIKE)
    name = name_model(settings)
    coefficient = settings.get("moe_aux_loss_coeff")
    if guess_family(name) in BALANCED_BY_MEGATRON and coefficient is None:
        conversion.add_difference("model_name_or_path", name, AUXILIARY.format(BY_LAYER))
    if is_bridge and settings.get("finetuning_type", "lora") == "lora":
        conversion.add_difference("finetuning_type", "lora", FUSED_ADAPTERS)
        conversion.recipe["lora_dropout"] = 0.0
    warmup = next((key for key in ("warmup_steps", "warmup_ratio") if settings.get(key)), None)
    if warmup and settings.get("lr_scheduler_type") == "constant":
        # Megatron warms up before a constant rate; transformers, as converted so far, does not
        conversion.recipe[warmup] = settings[warmup]
    if is_bridge:
        _report_bridge(settings, conversion)
        return
    if settings.get("bf16") and not settings.get("accumulate_allreduce_grads_in_fp32"):
        conversion.remarks.append(SUMMED_IN_16_BITS)
    conversion.remarks.append(WHOLE_STEPS)
    conversion.add_difference("dataset", settings.get("dataset"), IN_ORDER)
    if not settings.get("save_hf_model"):
        conversion.add_remark("save_hf_model", False, MEGATRONS_FILES)


def _report_bridge(settings: ToolFile, conversion: Conversion) -> None:
    """Converts and reports what Megatron Bridge does differently with steps, rows and files."""
    experts = settings.get("expert_model_parallel_size") or 1
    if experts > 1:
        note = FEWER_ROWS.format(experts)
        conversion.add_difference("expert_model_parallel_size", experts, note)
    schedule = settings.get("lr_scheduler_type", "linear")
    if schedule not in BRIDGES_SCHEDULES:
        conversion.recipe["lr_scheduler_type"] = "cosine"
        conversion.add_remark("lr_scheduler_type", schedule, NOW_A_COSINE)
    if not settings.get("export_hf_on_finish"):
        conversion.add_remark("export_hf_on_finish", False, MEGATRONS_FILES)
    if settings.get("stage") == "pt":
        return
    remarks = [line for line in conversion.remarks if TOOLS_IN_ITS_WORDS not in line]
    conversion.remarks[:] = [*remarks, *BRIDGES_ROWS]
    conversion.differences[:] = [
        line.replace(THOUGHT, NO_THOUGHT) for line in conversion.differences
    ]


def _report_packing(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which rows v0 packs together, and what a document in a packed row attends to."""
    rows = settings.get("preprocessing_batch_size", 1000)
    shares = describe_shares(settings, PROCESSES)
    conversion.remarks.append(PACKED_AT_A_TIME.format(rows, shares))
    if not settings.get("neat_packing"):
        conversion.add_difference("packing", True, NOT_NEAT)
        return
    family = guess_family(name_model(settings))
    attention = settings.get("flash_attn", "auto")
    # configure_attn_implementation of model/model_utils/attention.py
    is_flash = attention == "fa2" or (attention == "auto" and family == "gemma2")
    if family in WINDOWED and not is_flash:
        conversion.add_difference("neat_packing", True, NEAT_WITHOUT_WINDOWS)


# configure_fp8_environment of train/fp8_utils.py sets a variable of Accelerate's, before which the
# Trainer of transformers 5 puts the mixed_precision of its arguments
FP8_UNDER_4 = (
    "linear layers multiply in FP8 there under transformers 4 alone, in 16 bits under 5, whose "
    "Trainer passes this by; in FP8 here"
)
# torch_dtype "auto" in model/loader.py, and init_adapter in model/adapter.py
LOADED_IN_16_BITS = (
    "without bf16 and fp16 what is not trained has the dtype of the model's files there, as a rule "
    "16 bits, and is computed in it; all is in float32 here"
)
TRAINED_IN_16_BITS = (
    "without bf16 and fp16 all weights have the dtype of the model's files there, those that BAdam "
    "trains too, and are computed in it; all is in float32 here"
)


def _report_loaded_dtype(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which weights v0 keeps in 16 bits if the file names no precision."""
    if any(map(settings.get, ("bf16", "fp16", "pure_bf16", "deepspeed"))):
        return
    bf16 = settings.get("bf16")  # as the file has it: false, null or not at all
    if settings.get("use_badam"):
        conversion.add_remark("bf16", bf16, TRAINED_IN_16_BITS)
    elif settings.get("finetuning_type", "lora") != "full":
        conversion.add_remark("bf16", bf16, LOADED_IN_16_BITS)


# create_ref_model in train/trainer_utils.py
BASE_IS_REFERENCE = (
    "the reference is the base without this adapter there; here the model before training, of "
    "which it is a part"
)
ALL_BUT_LAST = "all but the last one are merged into the base there; the last is trained further"


def _adapt_factorys_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the adapter that is trained further, and reports what LLaMA-Factory does with others.

    Without a ref_model, DPO and KTO compare with the base without this adapter there.
    """
    names = convert_names(settings.get("adapter_name_or_path")) or []
    if len(names) > 1:
        conversion.recipe["adapter_name_or_path"] = names[-1]
        conversion.add_difference(
            "adapter_name_or_path", names, ALL_BUT_LAST, "several adapters at once"
        )
    has_reference = settings.get("stage") in ("dpo", "kto") and not settings.get("ref_model")
    if names and has_reference and settings.get("pref_loss") not in ("orpo", "simpo"):
        conversion.add_difference("adapter_name_or_path", names[-1], BASE_IS_REFERENCE)
