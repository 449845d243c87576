"""Converts what several keys of an Axolotl file determine together, and reports what Axolotl does
otherwise than a run here.

The paths in the comments are those of Axolotl's source, below src/axolotl.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.facts import find_linear_layers, read_family_source
from finetune.config.optimization import OPTIMIZERS
from finetune.constants import ALL_LINEAR
from finetune.convert.as_read import CUSTOM_OPTIMIZERS
from finetune.convert.asked_layout import count_sharing_ranks, is_first_fsdp
from finetune.convert.chat_templates import report_turn_ends
from finetune.convert.counterparts import NOTES, ToolFile
from finetune.convert.defaults import DEFAULTS
from finetune.convert.foreign_values import convert_number, find_matches, read_number
from finetune.convert.hints import find_texts, list_types
from finetune.convert.model_names import (
    guess_family,
    guess_vision_family,
    has_tower,
    is_mixture,
    name_model,
)
from finetune.convert.objectives import LABEL_LOSSES, cuts_loss, find_masked_diffusion
from finetune.convert.shared import (
    BEST_AT_END,
    FIRST_TRAINED,
    LIGERS_LOSS,
    MICRO_BATCHES_ALIKE,
    MLP_LAYERS,
    OF_PAIRS,
    PACKED_IN_ORDER,
    SWITCHES_IN_16_BITS,
)
from finetune.convert.value_conversion import Conversion, convert_names, convert_targets, read_value

BY_KERNELS = (
    "by its LoRA kernels, which are on unless a key turns them off, in 0.19 not under the first "
    "FSDP, "
)


LOSS_WATCHED = "a run whose loss stays above it is stopped there; here one whose loss is not finite"
OFFLOADED = {
    "offload": "activation_offload: to host memory",
    "offload_disk": "activation_offload: to host memory here, to a disk there",
}


def adapt_axolotl(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of an Axolotl file ask for together."""
    recipe = conversion.recipe
    _set_axolotl_targets(settings, recipe)
    _set_accumulation(settings, conversion)
    _adapt_axolotl_saves(settings, conversion)
    if settings.get("pretraining_dataset"):
        recipe["streaming"] = True
    offload = str(settings.get("gradient_checkpointing"))
    if offload in OFFLOADED:
        recipe["activation_offload"] = True
        conversion.add_remark("gradient_checkpointing", offload, OFFLOADED[offload])
    # the trainers of pairs have another loss; masked diffusion divides each row by its own labels
    if not any(map(settings.get, OF_PAIRS)) and find_masked_diffusion(settings) is None:
        conversion.remarks.append(_describe_mean(settings))
    _adapt_warmup(settings, conversion)
    _set_trained_tokens(settings, conversion)
    _report_axolotl_rows(settings, conversion)
    _report_axolotl_numerics(settings, conversion)
    threshold = settings.get("loss_watchdog_threshold")
    if threshold:
        conversion.add_remark("loss_watchdog_threshold", threshold, LOSS_WATCHED)
    _report_pairs(settings, conversion)
    if settings.get("nf4_backend") == "torchao":
        conversion.add_remark("nf4_backend", "torchao", NOTES["NF4_OF_TORCHAO"])
    _report_muon(settings, conversion)
    _report_decay(settings, conversion)
    _report_shared_experts(settings, conversion)


# AxolotlMambaTrainer and MambaDataCollator until 0.19: all ids of a batch are labels
ALL_TRAINED = (
    "0.19 trains on prompts too, whatever this key says, and on the padding of a shorter row in a "
    "batch; {}"
)
# the class of the package mamba_ssm, which 0.21 does not read; the hub has the same weights in
# transformers' format
MAMBA_SSM = "MambaLMHeadModel"
MAMBA_SSM_MODEL = re.compile(r"state-spaces/mamba-(130m|370m|790m|1\.4b|2\.8b)")
AS_TRANSFORMERS = "the same weights as transformers reads them: {}-hf"


def _set_trained_tokens(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports which tokens Axolotl trains: all of Mamba's rows, else which ends of turns.

    A model of the package mamba_ssm is replaced by the same one for transformers.
    """
    name = name_model(settings)
    is_mamba_ssm = settings.get("model_type") == MAMBA_SSM
    if is_mamba_ssm and MAMBA_SSM_MODEL.fullmatch(name):
        conversion.recipe["model_name_or_path"] = f"{name}-hf"
        conversion.add_remark("base_model", name, AS_TRANSFORMERS.format(name))
    if guess_family(name) == "mamba" and not any(map(settings.get, OF_PAIRS)):
        if is_mamba_ssm:
            here = "prompts are trained here, padding never"
        else:
            here = "neither 0.21 nor a run here"
        conversion.add_remark(
            "train_on_inputs", settings.get("train_on_inputs"), ALL_TRAINED.format(here)
        )
    if is_mamba_ssm:
        conversion.recipe["assistant_only_loss"] = False
    else:
        report_turn_ends(settings, conversion)


# HyperparametersConfig of utils/schemas/training.py makes accumulation 1 where a file lacks the
# key, and normalize_config of utils/config divides where it is null. calculate_total_num_steps of
# utils/trainer.py counts a run's steps by batch_size.
STEPS_OF_BATCHES = (
    "without gradient_accumulation_steps a step has micro_batch_size rows there, and the run as "
    "many steps as if it had batch_size: num_train_epochs is the part of the epochs that it gets to"
)


def _set_accumulation(settings: ToolFile, conversion: Conversion) -> None:
    """Sets what `batch_size`, the rows of a step on one process, does there.

    It sets the accumulation if the file has null for that, and else how many steps the run has.
    """
    recipe = conversion.recipe
    rows = settings.get("batch_size")
    micro_batch = settings.get("micro_batch_size") or 1
    if not isinstance(rows, int) or not isinstance(micro_batch, int) or rows < 1:
        return
    if "gradient_accumulation_steps" not in settings:
        recipe["gradient_accumulation_steps"] = 1
        epochs = read_number("num_epochs", settings.get("num_epochs") or 1, "1", least=0)
        if rows != micro_batch and "max_steps" not in recipe:
            recipe["num_train_epochs"] = round(epochs * micro_batch / rows, 6)
            conversion.add_remark("batch_size", rows, STEPS_OF_BATCHES)
    elif settings["gradient_accumulation_steps"] is None:
        recipe["gradient_accumulation_steps"] = max(1, rows // micro_batch)


# _build_adapters of loaders/model.py, which under these methods only makes the adapter's config
NEW_UNDER_TRL = (
    "not loaded there under this rl: a new adapter is trained; here this one is trained further"
)
# transform_fn of prompt_strategies/dpo/chat_template.py until 0.19, by str.find
ANSWERS_FOUND = (
    "in 0.19 an answer is looked for in the text that the template makes of it: with white space "
    "around it that the template trims it is lost, but for a last character, and one that is found "
    "earlier, as user in the header of a question, begins there; in 0.21 and here each is scored "
    "as it is"
)


def _report_pairs(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that the trainers of pairs make a new adapter in place of the one in
    `lora_model_dir`, and may lose a part of an answer, which they find by its text.
    """
    method = settings.get("rl")
    adapter = settings.get("lora_model_dir")
    if adapter and settings.get("adapter") and method in ("dpo", "ipo", "kto"):
        conversion.add_difference("lora_model_dir", adapter, NEW_UNDER_TRL)
    is_of_template = any(each.startswith("chat_template") for each in list_types(settings))
    if is_of_template and method in ("dpo", "ipo", "simpo"):
        conversion.add_remark("datasets.type", "chat_template", ANSWERS_FOUND)


DIONS_MUON = (
    "under FSDP Microsoft's there: updates times the root of rows / columns, other coefficients, "
    "and no Nesterov momentum"
)

# MuonOptimizerFactory of contribs/mit/muon leaves out vectors, and looks for lm_head in names
MAGNITUDES_FIXED = "DoRA's magnitudes are not trained there"
HEADS_ADAPTER = "the adapter of lm_head is trained by AdamW there, by this optimizer here"


def _report_muon(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how Axolotl's optimizers of matrices, such as Muon, differ from those here."""
    optim = str(conversion.recipe.get("optim"))
    if optim not in OPTIMIZERS or not OPTIMIZERS[optim].count_matrix:
        return
    if "fsdp_config" in settings or settings.get("fsdp"):
        conversion.add_difference("optimizer", optim, DIONS_MUON)
    elif not conversion.recipe.get("use_peft"):
        conversion.add_difference("optimizer", optim, "norms and biases are not trained there")
    else:
        if conversion.recipe.get("use_dora"):
            conversion.add_difference("optimizer", optim, MAGNITUDES_FIXED)
        if "lm_head" in conversion.recipe.get("lora_target_modules", ()):
            conversion.add_difference("optimizer", optim, HEADS_ADAPTER)


# create_optimizer_grouped_parameters of core/trainers/mixins/optimizer.py, for optimizers that
# Trainer does not know
EMBEDDINGS_SPARED = (
    "under this optimizer the embedding and the output head are not decayed there, nor copies of "
    "modules beside adapters; all matrices are here"
)


def _report_decay(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that embedding and head do not decay under an optimizer that Axolotl makes itself."""
    recipe = conversion.recipe
    decay = recipe.get("weight_decay")
    # under adapters, only modules_to_save may hold such matrices
    may_train_them = recipe.get("modules_to_save") or not recipe.get("use_peft")
    if decay and may_train_them and settings.get("optimizer") in CUSTOM_OPTIMIZERS:
        conversion.add_remark("weight_decay", decay, EMBEDDINGS_SPARED)


# validate_expert_parallel_topology of integrations/expert_parallel/args.py; until 0.19
# _register_expert_grad_scale of its plugin.py, and clip_grad_norm_ of each rank's parameters
CLIPPED_BY_RANK = (
    "0.21 refuses this without FSDP2; in 0.19, where DeepEP is installed, each rank clips by a "
    "norm of its own, over its experts and what all ranks have, whose copies drift apart, and each "
    "micro-batch divides the experts' gradients of those before by this size again; here one norm "
    "is over all weights"
)


def _report_shared_experts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how Axolotl trains experts that ranks share without FSDP."""
    size = convert_number(settings.get("expert_parallel_size"))
    trains_experts = not conversion.recipe.get("use_peft") or settings.get("lora_target_parameters")
    is_sharded = settings.get("fsdp_config") or settings.get("fsdp")
    if isinstance(size, int) and size > 1 and trains_experts and not is_sharded:
        conversion.add_difference("expert_parallel_size", size, CLIPPED_BY_RANK)


def _set_axolotl_targets(settings: ToolFile, recipe: dict[str, Any]) -> None:
    """Sets the layers that get adapters where `lora_target_modules` does not name them alone.

    `lora_target_linear` adds all linear layers to them. With lora_target_parameters alone, no layer
    gets adapters.
    """
    names = convert_names(settings.get("lora_target_modules")) or ()
    if settings.get("lora_target_linear"):
        recipe["lora_target_modules"] = convert_targets([ALL_LINEAR, *names])
    elif settings.get("lora_target_parameters") and not names:
        recipe["lora_target_modules"] = []


# core/builders/base.py
TWO_STEPS = "a warm-up of one step is one of two there"
# utils/schemas/config.py; the plugin of diffusion reads a share as warmup_ratio before that
SHARE_REFUSED = "0.21 refuses a share of the steps under this key; it is taken as one here"


def _adapt_warmup(settings: ToolFile, conversion: Conversion) -> None:
    """Sets a warm-up of one step to two, as Axolotl does, and reports a share of the steps."""
    recipe = conversion.recipe
    if recipe.get("warmup_steps") == 1:
        recipe["warmup_steps"] = 2
        conversion.add_remark("warmup_steps", 1, TWO_STEPS)
    steps = settings.get("warmup_steps")
    is_share = isinstance(steps, float) and not steps.is_integer()
    if is_share and find_masked_diffusion(settings) is None:
        conversion.add_remark("warmup_steps", steps, SHARE_REFUSED)


BEST_ON_STEPS = "no best one is kept there unless eval_steps divides save_steps"


def _adapt_axolotl_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Sets how often checkpoints are saved and evaluated, and whether the best one is kept."""
    recipe = conversion.recipe
    epochs = convert_number(settings.get("num_epochs") or 1)
    for key, ours in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        per_epoch = convert_number(settings.get(key))
        if (
            isinstance(per_epoch, int | float)
            and isinstance(epochs, int | float)
            and per_epoch * epochs > 1
        ):
            # a share of all steps; without the key it happens at the end alone, in both tools
            recipe[ours] = 1 / (per_epoch * epochs)
    # core/builders/causal.py asks whether it is False, so null asks for the best checkpoint too
    asks_for_best = settings.get("load_best_model_at_end", False) is not False
    if asks_for_best and _loads_best(recipe):
        recipe["keep_best_checkpoint"] = True
    elif settings.get("load_best_model_at_end"):
        recipe.pop("keep_best_checkpoint", None)
        conversion.add_remark("load_best_model_at_end", True, BEST_ON_STEPS)
    if settings.get("early_stopping_patience"):
        recipe["keep_best_checkpoint"] = True
        patience = settings["early_stopping_patience"]
        conversion.add_remark("early_stopping_patience", patience, BEST_AT_END)


def _loads_best(recipe: Mapping[str, Any]) -> bool:
    """Whether Axolotl loads the best checkpoint at the end: it does if every save is evaluated."""
    saves = recipe.get("save_steps")
    evaluations = recipe.get("eval_steps")
    if not isinstance(saves, int | float) or not isinstance(evaluations, int | float):
        return False
    return evaluations > 0 and saves % evaluations == 0


# average_tokens_across_devices = False of core/builders/base.py
RANKS_ALIKE = (
    "loss: on several processes the mean of each over its labels counts alike there{}; here it is "
    "the mean over those of the whole step"
)
# model_accepts_loss_kwargs of core/trainers/base.py, which was False for every model in 0.19
EACH_IN_19 = ", and in 0.19 that of each micro-batch too"
# _num_items of integrations/context_parallel/trainer.py
GROUPS_ALIKE = (
    "loss: of several groups of ranks that share a row the mean of each over its labels counts "
    "alike there{}; here it is the mean over those of the whole step"
)
# deepspeed_sp_compute_loss of transformers, and _get_num_items_in_batch of core/trainers/base.py
MICRO_BATCHES_OF_GROUPS = (
    "loss: the mean over its labels of each micro-batch of a group of ranks that share a row "
    "counts alike there; here it is the mean over those of the whole step"
)
# families whose accepts_loss_kwargs is set by monkeypatch/gemma4_loss_kwargs.py
COUNTED_IN_21 = ("gemma4", "gemma4_unified")
# Families whose lce_forward, in integrations/liger/models, takes no count of the step's labels.
# Trainer divides the loss by the number of micro-batches for deepseekv2.py, but not for jamba.py.
UNCOUNTED_BY_LIGER = {
    "deepseek_v2": MICRO_BATCHES_ALIKE,
    "jamba": (
        "loss: the means of a step's micro-batches over their labels are added in 0.21 under this "
        "fused loss, and averaged in 0.19; here it is the mean over the labels of the whole step"
    ),
}


def _describe_mean(settings: ToolFile) -> str:
    """Returns the note on what the loss of a step averages in Axolotl's trainer of answers.

    That is seldom the mean over all labels of the step, as it is here.
    """
    if any(map(settings.get, LABEL_LOSSES["Axolotl"])):
        return RANKS_ALIKE.format("")  # a compute_loss_func gets the count of the step's labels
    shares_rows = count_sharing_ranks(settings) > 1
    if shares_rows and settings.get("deepspeed"):
        return MICRO_BATCHES_OF_GROUPS
    name = name_model(settings)
    family = guess_family(name)
    if settings.get(LIGERS_LOSS) and family in UNCOUNTED_BY_LIGER:
        return UNCOUNTED_BY_LIGER[family]
    if has_own_loss(name) and guess_vision_family(name) not in COUNTED_IN_21:
        return MICRO_BATCHES_ALIKE
    note = GROUPS_ALIKE if shares_rows else RANKS_ALIKE
    return note.format(EACH_IN_19)


# accepts_loss_kwargs = False of transformers' classes with a tower. Axolotl loads such a class for
# texts too. LLaMA-Factory's train/sft/trainer.py sets the same for a model with a processor.
CLASS_WITH_OWN_LOSS = re.compile(
    r"^class \w+ForConditionalGeneration\((?:(?!^class ).)*accepts_loss_kwargs = False",
    re.DOTALL | re.MULTILINE,
)


def has_own_loss(name: str) -> bool:
    """Whether transformers' class of a model takes no count of the step's labels for its loss.

    Only models with a tower (for images) have such classes.
    """
    source = read_family_source(str(guess_vision_family(name)))
    return has_tower(name) and CLASS_WITH_OWN_LOSS.search(source) is not None


# load of prompt_strategies/completion.py
TEXTS_CUT = (
    "what follows the first 64 times as many tokens of a text is left out there; here all of it is "
    "trained on"
)
# create_train_validation_split, which under these keys draws no rows
LAST_HELD_OUT = "the last rows of the data are held out there; they are drawn by the seed here"
# dataloader_drop_last of core/builders/causal.py
LAST_UNMEASURED = (
    "eval_loss: the held-out rows of the last batch of a rank are left out there, where they do "
    "not fill it"
)


def _report_axolotl_rows(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which rows are held out or left out there, and how long texts are cut."""
    for key, value in (("shuffle_merged_datasets", False), ("curriculum_sampling", True)):
        if settings.get(key) is value and settings.get("val_set_size"):
            conversion.add_difference(key, value, LAST_HELD_OUT)
    packs = settings.get("sample_packing")
    if settings.get("pretraining_dataset"):
        _report_pretraining(settings, conversion)
    elif settings.get("streaming"):
        _report_stream(settings, conversion)
    types = list_types(settings)
    has_plain_texts = any(each.startswith("completion") for each in types)
    if has_plain_texts and (packs or not settings.get("pretraining_dataset")):
        conversion.add_remark("sequence_len", settings.get("sequence_len"), TEXTS_CUT)
    trains_prompts = settings.get("train_on_inputs") and not all(
        each.startswith("chat_template") for each in types
    )
    if packs and (has_plain_texts or trains_prompts or settings.get("pretraining_dataset")):
        conversion.remarks.append(FIRST_TRAINED)
    holds_out = settings.get("val_set_size") or settings.get("test_datasets")
    is_measured = holds_out and conversion.is_measured
    if packs and settings.get("eval_sample_packing") is False and is_measured:
        conversion.remarks.append(LAST_UNMEASURED)


# encode_packed_streaming and prompt_strategies/pretrain.py
PIECES_OVERLAP = (
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


# process_pretraining_datasets_for_packing
LONG_DROPPED = "a longer row is dropped there where a stream is packed, whatever this key says"
# _load_raw_datasets of utils/data/sft.py
LONG_KEPT = (
    "rows of any length are trained on there where a stream is not packed; a longer one is "
    "dropped, cut or refused here, as overlength says"
)


def _report_stream(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Axolotl does with long rows of a stream that is not one of pretraining.

    Plain texts, of type completion, are cut instead.
    """
    strategy = settings.get("excess_length_strategy")
    length = settings.get("sequence_len")
    has_only_texts = all(kind.startswith("completion") for kind in list_types(settings))
    if not settings.get("sample_packing") and not has_only_texts:
        conversion.add_difference("sequence_len", length, LONG_KEPT)
    elif settings.get("sample_packing") and strategy not in (None, "drop"):
        conversion.add_difference("excess_length_strategy", strategy, LONG_DROPPED)
        conversion.recipe["overlength"] = "drop"


def _report_pretraining(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which texts of `pretraining_dataset` Axolotl trains on, and how it cuts them."""
    entries = settings["pretraining_dataset"]
    if isinstance(entries, list) and len(entries) > 1:
        conversion.add_difference("pretraining_dataset", entries, FIRST_ENTRY)
    kind = next(find_texts(entries, "type"), "pretrain")
    length = conversion.recipe.get("max_length", DEFAULTS["Axolotl"]["max_length"])
    if not isinstance(length, int):
        return  # the recipe's reader refuses such a length
    if not settings.get("sample_packing"):
        tokens = length - 2  # encode_streaming keeps room for two more
        conversion.add_difference("sample_packing", False, PIECES_ALONE.format(tokens))
    elif kind == "pretrain":
        overlap = min(256, (length - 1) // 2)
        conversion.add_difference(
            "pretraining_dataset", f"type: {kind}", PIECES_OVERLAP.format(overlap)
        )


# KimiSparseMoeBlock of model_support/kimi_linear
FAMILIES_ROUTED_OTHERWISE = ("kimi_linear",)
BY_SOFTMAX = (
    "while training, tokens are routed by a softmax over all experts there, without the routers' "
    "biases and groups; by their sigmoid, biases and groups here, as in inference"
)
# KimiBlockSparseMLP of model_support/kimi_linear
EXPERTS_ADAPTED = (
    "w1, w2 and w3 of each expert get adapters too there; here an expert has no linear layers of "
    "its own, and lora_target_parameters names its parameters"
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
# Token of gpt-oss that ends a turn, but also the thought within an answer: generation that stops
# there would stop before the answer itself. Axolotl trains eot_tokens, and stops at none of them. A
# recipe here trains the ends of turns without the key, and stops at its eot_tokens.
END_OF_THOUGHT = "<|end|>"
# peft casts adapters to float32, and no other modules (cast_adapter_dtype)
COPIES_AS_LOADED = "trained in bfloat16 there, as the base is loaded; in float32 here"


def _report_axolotl_numerics(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what differs in dtypes, in positions, for single families, and under packing."""
    family = guess_family(str(settings.get("base_model")))
    _report_positions(settings, conversion)
    _report_beside_adapters(settings, conversion)
    _report_family(settings, family, conversion)
    if settings.get("sample_packing"):
        _report_axolotl_packing(settings, family, conversion)
    if settings.get("float16") and not any(map(settings.get, ("fp16", "bf16", "bfloat16"))):
        conversion.add_difference("float16", True, NO_SCALING)


# _adjust_model_config of loaders/model.py
MORE_POSITIONS = (
    "a config with a smaller max_position_embeddings is saved with this there, and is as it was "
    "here; training is the same"
)
# Pattern of a model's name -> the least max_position_embeddings that these models have. The last
# pattern is of all other models.
LEAST_POSITIONS = {
    r"tiny-?llama|pythia|gpt-?j|phi-?[12]|open_?llama|\bllama-(7|13|30|65)b|redpajama": 2048,
    r"llama-?2|vicuna|stablelm|phi-3-mini-4k": 4096,
    r"llama-?3(?!\.)|gemma": 8192,
    "": 32768,
}


def _report_positions(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that Axolotl may raise max_position_embeddings of the config to `sequence_len`."""
    name = name_model(settings).lower()
    least = next(find_matches(LEAST_POSITIONS, name))
    length = convert_number(settings.get("sequence_len"))
    if isinstance(length, int) and length > least:
        conversion.add_remark("sequence_len", length, MORE_POSITIONS)


# load_tokenizer of loaders/tokenizer.py, which asks for lora_modules_to_save for other tokens alone
ENDS_FROZEN = (
    "beside adapters the embedding and the output head are trained there where "
    "lora_modules_to_save names them; both are trained here"
)


def _report_beside_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that modules trained beside adapters are in bfloat16 there, and in float32 here.

    Axolotl casts them to float32 only for QLoRA under FSDP, unless a key stops it. Added tokens
    leave embedding and head frozen there, which is reported too.
    """
    if not settings.get("adapter"):
        return
    modules = settings.get("lora_modules_to_save")
    are_cast_to_fp32 = (
        settings.get("adapter") == "qlora"
        and bool(settings.get("fsdp") or settings.get("fsdp_config"))
        and not (cuts_loss(settings) or settings.get("embeddings_skip_upcast"))
    )
    is_bf16 = settings.get("bf16") or settings.get("bfloat16")
    if modules and is_bf16 and not are_cast_to_fp32:
        conversion.add_difference("lora_modules_to_save", modules, COPIES_AS_LOADED)
    key = "special_tokens.additional_special_tokens"
    tokens = read_value(settings, key)
    ends = [name for name in convert_names(modules) or () if re.search("emb|wte|head", name)]
    if tokens and len(ends) < 2:
        conversion.add_difference(key, tokens, ENDS_FROZEN)


def _report_family(settings: ToolFile, family: str | None, conversion: Conversion) -> None:
    """Reports what Axolotl does otherwise with models of a single family."""
    if family in FAMILIES_ROUTED_OTHERWISE:
        conversion.add_difference("base_model", settings.get("base_model"), BY_SOFTMAX)
        if settings.get("lora_target_linear"):
            conversion.add_difference("lora_target_linear", True, EXPERTS_ADAPTED)
    if family == "gpt_oss":
        _remove_end_of_thought(conversion.recipe, conversion)
    load_key = conversion.load_key
    if load_key and family == "falcon_h1":
        conversion.add_difference(load_key, True, OUT_PROJECTION)
    if load_key == "load_in_8bit" and family == "jamba":
        conversion.add_difference(load_key, True, MAMBA_LAYERS)


def _remove_end_of_thought(recipe: dict[str, Any], conversion: Conversion) -> None:
    """Removes the token that ends a thought from the recipe's `eot_tokens`.

    An answer would stop at it here. The key goes if no token is left.
    """
    eot_tokens = recipe.pop("eot_tokens", None) or []
    other_tokens = [token for token in eot_tokens if token != END_OF_THOUGHT]
    if other_tokens:
        recipe["eot_tokens"] = other_tokens
    elif eot_tokens:
        conversion.ignored.append("eot_tokens")


# Axolotl's names for attention that keeps the documents of a packed row apart, and its older
# switches for the same.
ISOLATING_ATTENTION = re.compile(
    r"sdpa|eager|(flash_attention_([234]|torch)|flex_attention|xformers|sage|"
    r"kernels-community/(flash-attn[23]|sage-attention))([@:].*)?"
)
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
HIDDEN_BY_MASK = (
    "documents in a packed row of pretraining attend to those before there under sdpa, but for its "
    "kernel on GPUs in 16 bits, eager and flex_attention; each is apart here"
)
# monkeypatch/models/recurrent_support.py of 0.21: families whose recurrent layers never learn where
# documents begin, and families whose layers do since 0.21
FAMILIES_PASSING_STATES = ("jamba", "minimax", "olmo_hybrid", "zamba", "zamba2")
FAMILIES_APART_IN_21 = ("bamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "falcon_mamba")
STATE_PASSED_ON = (
    "documents in a packed row start from the state of those before in recurrent layers and "
    "convolutions in 0.19, and 0.21 refuses to pack this family; each is apart here"
)
APART_IN_21 = (
    "documents in a packed row start from the state of those before in recurrent layers and "
    "convolutions in 0.19; each is apart in 0.21, and here"
)


# pack_group of utils/samplers/multipack.py, which does not sort the rows, and the key
# sample_packing_bin_size
FIRST_FIT = (
    "packing: rows are packed as they come there, each into the first packed row of {} tokens with "
    "room for it, and at most {} into one; here each where it fits best, however many: fewer steps "
    "where rows are short"
)
DEFAULT_BIN_SIZE = 200  # rows in a packed row, at most
# attention that isolates documents by a mask; ATTN_IMPLS_SUPPORTING_PACKING lists all others that
# isolate them
MASKED_ATTENTION = ("sdpa", "eager")


def _describe_packing(settings: ToolFile, isolates: bool) -> str:
    """Returns the note on how Axolotl packs rows, with the length of a packed row.

    A packed row holds a whole micro-batch where the attention isolates documents without a mask.
    """
    most_rows = settings.get("sample_packing_bin_size") or DEFAULT_BIN_SIZE
    length = convert_number(settings.get("sequence_len", DEFAULTS["Axolotl"]["max_length"]))
    is_masked = settings.get("attn_implementation") in MASKED_ATTENTION or any(
        map(settings.get, ("sdp_attention", "eager_attention"))
    )
    # real batches: a micro-batch has micro_batch_size packed rows, and not one of as many tokens
    has_real_batches = settings.get("multipack_real_batches")
    if settings.get("pretraining_dataset") or settings.get("streaming"):
        has_real_batches = False
    elif has_real_batches is None:
        has_real_batches = is_masked or not isolates
    rows = 1 if has_real_batches else convert_number(settings.get("micro_batch_size") or 1)
    if isinstance(rows, int) and isinstance(length, int):  # the recipe's reader refuses others
        length *= rows
    return FIRST_FIT.format(length, most_rows)


# compute_loss of transformers' mixtures, which gets no mask where the attention isolates documents
FILLING_ROUTED = "what fills up a packed row counts in the routers' auxiliary loss there, not here"


def _report_axolotl_packing(settings: ToolFile, family: str | None, conversion: Conversion) -> None:
    """Reports how Axolotl packs rows, and where it does not keep the documents of a row apart."""
    attention = settings.get("attn_implementation")
    isolates = ISOLATING_ATTENTION.fullmatch(str(attention)) or any(
        map(settings.get, ISOLATING_SWITCHES)
    )
    is_sequential = settings.get("sample_packing_sequentially")
    conversion.remarks.append(
        PACKED_IN_ORDER if is_sequential else _describe_packing(settings, bool(isolates))
    )
    asks_for_loss = read_value(settings, "model_config.output_router_logits")
    if isolates and asks_for_loss and settings.get("pad_to_sequence_len") is not False:
        conversion.add_remark("model_config.output_router_logits", True, FILLING_ROUTED)
    # The trainer of masked diffusion makes masks of its own (objectives.py has their lines).
    reads_attention = find_masked_diffusion(settings) is None
    if reads_attention and not isolates:
        conversion.add_difference("attn_implementation", attention, NOT_ISOLATED)
    elif reads_attention and settings.get("pretraining_dataset") and _misses_documents(settings):
        conversion.add_difference("attn_implementation", attention, HIDDEN_BY_MASK)
    if family in FAMILIES_PASSING_STATES:
        conversion.add_difference("sample_packing", True, STATE_PASSED_ON)
    elif family in FAMILIES_APART_IN_21:
        conversion.add_remark("sample_packing", True, APART_IN_21)


# Attention under which the documents of pretraining's packed rows are not found: the data loader
# writes a mask of ones, and transformers looks for documents only where there is no mask.
HIDING_ATTENTION = re.compile("sdpa|eager|flex_attention")
# families whose mask compute_loss of core/trainers/base.py removes
FAMILIES_WITHOUT_MASK = ("gemma3", "gemma4", "gemma4_unified")


def _misses_documents(settings: ToolFile) -> bool:
    """Whether a mask of ones keeps the file's attention from finding documents in a packed row."""
    if guess_vision_family(name_model(settings)) in FAMILIES_WITHOUT_MASK:
        return False
    switches = ("sdp_attention", "eager_attention", "flex_attention")
    is_named = HIDING_ATTENTION.fullmatch(str(settings.get("attn_implementation")))
    return is_named is not None or any(map(settings.get, switches))


# cast_residual_fp32 of monkeypatch/accelerate/fsdp2_quantized.py, unless lora_fp32_gradients is set
ADAPTERS_BESIDE_NVFP4 = (
    "under FSDP adapters with their moments, and what else is in float32 beside a base that stays "
    "in NVFP4, are in bfloat16 there; in float32 here"
)
# autocast_adapter_dtype of peft, which loaders/adapter.py passes on
ADAPTERS_AS_BASE = "adapters and their moments have the dtype of the base there, float32 here"


def report_axolotls_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where Axolotl's adapters are in 16 bits; nothing for a file of another tool."""
    keeps_fp32 = settings.get("lora_fp32_gradients")
    if conversion.tool != "Axolotl" or not conversion.recipe.get("use_peft") or keeps_fp32:
        return
    name = name_model(settings)
    if settings.get("peft_autocast_adapter_dtype") is False:
        conversion.add_difference("peft_autocast_adapter_dtype", False, ADAPTERS_AS_BASE)
    elif "nvfp4" in name.lower() and settings.get("fsdp_config"):
        conversion.add_difference("base_model", name, ADAPTERS_BESIDE_NVFP4)


DOWN_UNDROPPED = (
    f"{BY_KERNELS}the adapter of an MLP's down_proj drops none of its inputs there; here it drops "
    "them as all others do"
)
MAYBE_UNDROPPED = (
    f"{BY_KERNELS}the adapter of down_proj drops none of its inputs there where the model's MLPs "
    "have gate_proj, up_proj and down_proj; here it drops them as all others do"
)
# Family -> what its MLPs have beyond the kernel's down_proj(activation(gate_proj(x)) * up_proj(x)).
MLPS_OTHERWISE = {
    "dory": "an MLP has no learned scales and no norm before down_proj there, as it has here",
    "gemma3n_text": "the first layers' MLPs have no sparse activations there, as they have here",
    "seed_oss": "an MLP's output is not dropped in part there; here by its config's share",
}
# kernels/geglu.py computes an exact GELU; the configs of these families say gelu_pytorch_tanh
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


def report_mlp_kernel(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Axolotl's kernel for an MLP with adapters computes otherwise.

    Nothing for a file of another tool, and without adapters.
    """
    recipe = conversion.recipe
    if conversion.tool != "Axolotl" or not recipe.get("use_peft"):
        return
    targets = recipe.get("lora_target_modules", ())
    name = name_model(settings)
    family = guess_family(name) or ""
    layers = find_linear_layers(family) if ALL_LINEAR in targets else targets
    source = read_family_source(family)
    is_dense = not is_mixture(name) or family == "gemma4_text"  # whose mixtures have MLPs too
    has_mlps = is_dense and set(MLP_LAYERS) <= set(layers) and (not source or "self.mlp" in source)
    may_have_mlps = is_dense and not family and ALL_LINEAR in targets
    if not ((has_mlps or may_have_mlps) and _has_mlp_kernel(settings, family)):
        return
    if recipe.get("lora_dropout"):
        note = MAYBE_UNDROPPED if may_have_mlps else DOWN_UNDROPPED
        conversion.add_remark("lora_dropout", recipe["lora_dropout"], note)
    asked = settings.get("lora_mlp_kernel")
    if family in MLPS_OTHERWISE:
        note = f"{BY_KERNELS}{MLPS_OTHERWISE[family]}"
        conversion.add_difference("lora_mlp_kernel", asked, note)
    if family in GELUS_BY_TANH:
        conversion.add_remark("lora_mlp_kernel", asked, EXACT_GELU)


# LoRA_MLP of kernels/lora.py, lora_kernels_auto_enable of utils/schemas/validation.py (in 0.19
# check_auto_enable_lora_kernels of config.py), and find_mlp_in_layer of monkeypatch/lora_kernels.py
MLP_KERNEL = "lora_mlp_kernel"
LORA_KERNELS = (MLP_KERNEL, "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# keys under which no kernel is switched on by default
STOPS_KERNELS = ("rl", "nvfp4_merge_aware", "trust_remote_code")
# models whose entry in model_support switches the kernels off
WITHOUT_KERNELS = re.compile(
    r"glm-?5\.3-flash|qwen-?3\.\d-flash-next|muse-glimmer|k2-horizon|paddleocr|diffusion-?gemma|"
    r"\bdream|twotower"
)


def _has_mlp_kernel(settings: ToolFile, family: str) -> bool:
    """Whether Axolotl computes an MLP with adapters by its kernel.

    A file that sets any of the kernels decides. Otherwise all are on where nothing stops them.
    """
    flags = [settings.get(key) for key in LORA_KERNELS]
    if any(flag is not None for flag in flags):
        return bool(settings.get(MLP_KERNEL))
    adapter = settings.get("adapter")
    is_in_8_bits = adapter == "lora" and settings.get("load_in_8bit")
    has_none = WITHOUT_KERNELS.search(name_model(settings).lower())
    is_stopped = any(map(settings.get, STOPS_KERNELS)) or is_in_8_bits or has_none
    if adapter not in ("lora", "qlora") or is_stopped or is_first_fsdp(settings):
        return False
    return _accepts_kernels(name_model(settings), family)


# patch_self_attn_lora rewrites these lines of a family's attention. It refuses a family whose
# attention has none of them, but for two families that it leaves alone.
REWRITTEN_INPUTS = re.compile(
    r"self\.q_proj\(hidden_states\)\.view\(hidden_shape\)\)?\.transpose\(1, 2\)|"
    r"query_states, gate = torch\.chunk\("
)
REWRITTEN_OUTPUT = "attn_output = self.o_proj(attn_output)"
FAMILIES_LEFT_ALONE = ("gemma4_text", "gemma4_unified_text")


def _accepts_kernels(name: str, family: str) -> bool:
    """Whether Axolotl's LoRA kernels accept the attention of a model; True if it is not known.

    `family` is that of the language model.
    """
    whole_family = str(guess_vision_family(name))
    # get_attention_cls_from_config looks for this one's in the file of the language model
    source = read_family_source(family if whole_family == "mistral3" else whole_family)
    if not source or family in FAMILIES_LEFT_ALONE:
        return True
    return REWRITTEN_INPUTS.search(source) is not None and REWRITTEN_OUTPUT in source
