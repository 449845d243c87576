"""Reports keys that mean the same here, except for some of their values beside other keys."""

import re
from typing import Any

from finetune.config.facts import read_family_source
from finetune.convert.asked_layout import COMMAND, COMPUTE_DTYPES, read_layout
from finetune.convert.base_model import CHATMLS, CHATMLS_OWN
from finetune.convert.counterparts import ToolFile
from finetune.convert.model_names import guess_family, name_model
from finetune.convert.shared import EXPERIMENTAL_METHODS, IN_ORDER, NORMS_IN_FP32
from finetune.convert.value_conversion import (
    Conversion,
    find_method_facts,
    read_section,
    read_value,
)

# load_model_config of Axolotl's loaders/utils.py reads the config there; utils/config reads the
# tokenizer there where the file names none
OTHER_CONFIG = (
    "the model's config is read there, and the tokenizer where tokenizer_config names none; both "
    "are the model's own here"
)
# _build_model of Axolotl's loaders/model.py
OTHER_CLASS = "a class of another family reads the weights there; here the model's own"
# Axolotl's utils/schemas/deprecated.py
SUM_REFUSED = "0.21 refuses this key, which TRL has had no more since 0.29; as TRL 0.28 has it here"
# load_tokenizer of Axolotl's loaders/tokenizer.py; in transformers 5 a class splits texts its own
# way, whatever the files say
OTHER_TOKENIZER = "this class reads the tokenizer there; here the one that its files name"
# calculate_total_num_steps of Axolotl's utils/trainer.py
STEPS_BY_ESTIMATE = (
    "the steps of a run are counted by this share there, of all tokens; here by the rows as they "
    "are packed"
)
# wrap_streaming_dataset of Axolotl's utils/data/streaming.py, and merge_datasets of
# utils/data/shared.py
STREAM_IN_ORDER = IN_ORDER.replace("rows", "a stream's rows")
WHERE_ROOM = "as the model has them where its embedding has room, else "
NEAR_MEAN = f"{WHERE_ROOM}near the mean of the others"
# How the rows of new tokens start, by tool: resize_token_embeddings of transformers, which Axolotl
# calls with mean_resizing_embeddings false by default, and _noisy_mean_initialization of
# LLaMA-Factory's model/model_utils/embedding.py.
STARTS_OF_NEW_ROWS = {
    "Axolotl": f"{WHERE_ROOM}drawn at random",
    "LLaMA-Factory": "at the mean of the others, with noise",
    "ms-swift": NEAR_MEAN,
    "TRL": NEAR_MEAN,
}
START_OF_ROWS = "added_tokens: their rows start {} there, at the mean of the others here"
START_OF_SPECIAL = (
    "special_tokens: the rows of those that the tokenizer does not have start {} there, at the "
    "mean of the others here"
)
# _setup_lora_tuning of LLaMA-Factory's model/adapter.py
ENDS_TRAINED = (
    "the embedding and the output head are trained beside the adapters there; modules_to_save "
    "names what is here"
)
# _get_eval_sampler of TRL's GRPOTrainer, which samples as in training
HELD_OUT_SAMPLED = (
    "eval_reward: each held-out prompt is answered as often as in training there, by sampling; "
    "once, greedily, here"
)
# Keys of torchtune -> pattern of the names of the recipes that do not read them.
UNREAD_BY_RECIPES = {
    "clip_grad_norm": "lora_dpo|knowledge_distillation_distributed",
    "lr_scheduler": "qat_single_device",
    "dataset_val": "single_device|dpo|knowledge_distillation|early_exit|multi_dataset",
}
NOT_READ = "{} does not read it"
# NEFTune of Automodel's components/training/neftune.py; recipes/vlm does not read the key
NOISE_ALPHA = 5.0
DEFAULT_NOISE = f"{NOISE_ALPHA}, its default"
NO_NOISE = "not read with images there, nor taken over here"
TOKENIZER_ELSEWHERE = (
    "the tokenizer is read from elsewhere than the model there; tokenizer_name_or_path names one"
)
# aux_loss_enabled of TRL's trainers; the coefficient was TRL's default in 1.7, and is the config's
# since. Those of EXPERIMENTAL_METHODS add the loss if the model's config says output_router_logits,
# as is done here.
BALANCED_BY_DEFAULT = (
    "since 1.7 the routers' auxiliary loss is added there for every mixture whose class in "
    "transformers has one; router_aux_loss_coef adds it here"
)
# transformers' models sum their loss over the step's labels, so Trainer does not divide it by the
# number of micro-batches: the auxiliary loss counts in full each time
ADDED_EACH_TIME = (
    "added once for each micro-batch of each process there: gradient_accumulation_steps times the "
    "processes as much; once a step here"
)
# compute_sft_loss of ms-swift's template/base.py, and compute_loss of its
# trainers/seq2seq_trainer.py
OF_EACH_PART = "of each micro-batch there, which counts by its labels; of the whole step here"
# Reentrant checkpoints of torch run a layer's forward without gradients; there the hooks of
# transformers 5 collect the routers' logits.
WITHOUT_GRADIENT = (
    "the routers' auxiliary loss is only added to the loss that is shown there, without a "
    "gradient, under {}; here it has one"
)
# _fix_gradient_checkpointing of ms-swift's trainers/mixin.py
SWIFTS_CHECKPOINTS = (
    "gradient checkpointing (the default), unless it is plain DDP or has use_reentrant: false"
)
# prepare_model_for_training of LLaMA-Factory's model/model_utils/checkpointing.py
FACTORYS_CHECKPOINTS = (
    "gradient checkpointing (the default), unless it is FSDP2 or has use_reentrant_gc: false"
)
# _gradient_checkpointing_enable there, which Trainer calls again by this key
ENABLED_TWICE = "gradient_checkpointing: true without use_reentrant: false"
# normalize_config of Axolotl's utils/config
AXOLOTLS_CHECKPOINTS = "gradient checkpointing in 0.19, and in 0.21 with DeepSpeed's ZeRO-3"
NOT_REENTRANT = ("rl", "selective_checkpointing", "unfrozen_parameters")
USE_REENTRANT = re.compile(r"use_reentrant\W+(true|false)")
# compute_loss of TRL's trainers
OF_MICRO_BATCHES = (
    "of each micro-batch of each process by itself there, and their mean is added, also to the "
    "loss that is shown; of the whole step together here, and shown apart from the loss"
)
# compute_loss of Axolotl's core/trainers/base.py, where the model adds it to a sum over the step's
# labels
ADDED_BY_MODEL = (
    "the routers' auxiliary loss is added once for each micro-batch in 0.21: "
    "gradient_accumulation_steps times as much as router_aux_loss_coef adds here; their mean in "
    "0.19"
)
MODELS_OWN = "the model's own config is kept here"
BALANCED_BY_CONFIG = (
    "the routers' auxiliary loss is added there by the coefficient of the model's config; write "
    "it as router_aux_loss_coef here"
)
# router_aux_loss_coef of this model's published config; the default of its class is another
MIXTRAL = re.compile("mixtral-8x7b")
MIXTRALS_COEFFICIENT = 0.02
# families for which configure_moe of LLaMA-Factory's model/model_utils/moe.py reads the coefficient
FACTORYS_BALANCED_FAMILIES = (
    "ernie4_5_moe",
    "granitemoe",
    "jamba",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)
COMPUTE_KEYS = (
    "bnb_4bit_compute_dtype",
    "bnb_config_kwargs.bnb_4bit_compute_dtype",
    "quantization.bnb_4bit_compute_dtype",
)
OTHER_COMPUTE = "layers of 4 bits multiply in this dtype there, in {} here"


def report_values(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Reports values that, beside other keys of the file, ask for something else than a run here.

    `text` is the file with its comments.
    """
    recipe = conversion.recipe
    if conversion.tool == "Axolotl":
        _report_axolotl(settings, conversion)
    elif conversion.tool == "LLaMA-Factory":
        _report_factory(settings, conversion)
    elif conversion.tool == "torchtune":
        _report_tokenizer(settings, conversion)
        _report_unread(settings, text, conversion)
    elif conversion.tool == "Automodel":
        _report_automodel(settings, conversion)
    samples = find_method_facts(recipe).samples
    if conversion.tool == "TRL" and samples and conversion.is_measured:
        conversion.remarks.append(HELD_OUT_SAMPLED)
    _report_balance(settings, conversion)
    _report_new_rows(settings, conversion)
    if recipe.get("streaming"):
        _report_stream(conversion)
    if recipe.get("load_in_4bit"):
        _report_compute(settings, text, conversion)


# concatenate_datasets of Axolotl's merge_datasets, LLaMA-Factory's merge_dataset, ms-swift's
# concat_datasets and TRL's get_dataset; interleave_sources of data/sources.py
ONE_AFTER_ANOTHER = (
    "datasets: of a stream the rows of a data set come after all of those before it there; here "
    "all are read in turns, by their weights"
)


def _report_stream(conversion: Conversion) -> None:
    """Reports the order in which the other tool reads the rows of streams."""
    if len(conversion.recipe.get("datasets", ())) > 1 and conversion.tool != "Automodel":
        conversion.differences.append(ONE_AFTER_ANOTHER)
    if conversion.tool == "TRL":  # Trainer does not shuffle a stream
        conversion.add_difference("dataset_streaming", True, STREAM_IN_ORDER)


def _report_axolotl(settings: ToolFile, conversion: Conversion) -> None:
    """Reports another config, class or tokenizer than the model's own.

    Also reported are a loss that 0.21 refuses, estimated steps, and a stream that keeps its order.
    """
    config = settings.get("base_model_config")
    if config and config != name_model(settings):
        conversion.add_difference("base_model_config", config, OTHER_CONFIG)
    model_class = str(settings.get("model_type"))
    source = read_family_source(guess_family(name_model(settings)) or "")
    is_of_family = model_class.startswith("Auto") or f"class {model_class}(" in source
    if source and model_class.endswith("ForCausalLM") and not is_of_family:
        conversion.add_difference("model_type", model_class, OTHER_CLASS)
    if settings.get("rpo_alpha") is not None:
        conversion.add_remark("rpo_alpha", settings["rpo_alpha"], SUM_REFUSED)
    tokenizer = settings.get("tokenizer_type")
    if tokenizer and tokenizer != "AutoTokenizer":
        conversion.add_remark("tokenizer_type", tokenizer, OTHER_TOKENIZER)
    share = settings.get("sample_packing_eff_est")
    if share and settings.get("sample_packing") and "max_steps" not in conversion.recipe:
        conversion.add_difference("sample_packing_eff_est", share, STEPS_BY_ESTIMATE)
    if settings.get("shuffle_merged_datasets") is False and conversion.recipe.get("streaming"):
        conversion.add_difference("shuffle_merged_datasets", False, STREAM_IN_ORDER)


def _report_factory(settings: ToolFile, conversion: Conversion) -> None:
    """Reports what `resize_vocab` trains beside adapters, and norms in float32."""
    recipe = conversion.recipe
    has_adapters = recipe.get("use_peft")
    resizes = settings.get("resize_vocab") and not recipe.get("added_tokens")
    if resizes and has_adapters and not settings.get("additional_target"):
        conversion.add_difference("resize_vocab", True, ENDS_TRAINED)
    is_bf16 = recipe.get("dtype") == "bfloat16" and not has_adapters
    if settings.get("upcast_layernorm") and is_bf16:
        conversion.add_difference("upcast_layernorm", True, NORMS_IN_FP32)


def _report_tokenizer(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that torchtune reads the tokenizer from another folder than the model."""
    path = str(read_value(settings, "tokenizer.path") or "")
    folder = str(read_value(settings, "checkpointer.checkpoint_dir") or "")
    is_elsewhere = path and folder and not path.startswith(folder.rstrip("/"))
    is_unresolved = path.startswith("$")  # refers to a key that the file does not have
    if is_elsewhere and not is_unresolved:
        conversion.add_difference("tokenizer.path", path, TOKENIZER_ELSEWHERE)


def _report_unread(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Reports the keys that the file's torchtune recipe does not read.

    Clipping and the schedule are taken out of the recipe here if their keys are among them.
    """
    recipe = conversion.recipe
    name = _find_torchtune_recipe(text, conversion)
    for key, pattern in UNREAD_BY_RECIPES.items():
        value = settings.get(key)
        if not value or not re.search(pattern, name):
            continue
        conversion.add_remark(key, value, NOT_READ.format(name))
        if key == "clip_grad_norm":
            recipe["max_grad_norm"] = None
        elif key == "lr_scheduler":
            recipe |= {"lr_scheduler_type": "constant", "warmup_steps": 0}


def _find_torchtune_recipe(text: str, conversion: Conversion) -> str:
    """Returns the name of the torchtune recipe in the command that the file's comments give.

    Without a command it is the method's recipe for several GPUs; empty for other methods than dpo
    and distill.
    """
    command = COMMAND.search(text)
    if command is not None:
        return command[1]
    recipe = conversion.recipe
    if recipe.get("method") == "dpo":
        return "lora_dpo_distributed" if recipe.get("use_peft") else "full_dpo_distributed"
    return "knowledge_distillation_distributed" if recipe.get("method") == "distill" else ""


def _report_automodel(settings: ToolFile, conversion: Conversion) -> None:
    """Sets NEFTune's noise by Automodel's default.

    The recipe for images reads no noise.
    """
    recipe = conversion.recipe
    neftune = settings.get("neftune")
    is_default = isinstance(neftune, dict) and "noise_alpha" not in neftune
    if is_default:
        recipe["neftune_noise_alpha"] = NOISE_ALPHA
    alpha = recipe.get("neftune_noise_alpha")
    if alpha and conversion.image_family is not None:
        del recipe["neftune_noise_alpha"]
        conversion.add_remark("neftune.noise_alpha", alpha, NO_NOISE)
    elif alpha and is_default:
        conversion.add_remark("neftune.noise_alpha", None, DEFAULT_NOISE)


def _report_balance(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a tool adds the routers' auxiliary loss by default, or in another amount.

    Axolotl's files ask for it by what they override of the model's config.
    """
    family = guess_family(name_model(settings)) or ""
    asked = conversion.recipe.get("router_aux_loss_coef")
    if conversion.tool == "TRL":
        source = read_family_source(family, "configuration")
        is_balanced = "output_router_logits" in source and "router_aux_loss_coef" in source
        is_default = (
            is_balanced
            and conversion.recipe.get("method") not in EXPERIMENTAL_METHODS
            and not find_method_facts(conversion.recipe).scores
        )
        if asked is None and is_default:
            conversion.add_difference("router_aux_loss_coef", None, BALANCED_BY_DEFAULT)
        if asked or (asked is None and is_default):
            conversion.add_remark("router_aux_loss_coef", asked, OF_MICRO_BATCHES)
            _report_gradient("router_aux_loss_coef", asked, settings, conversion)
    elif conversion.tool == "Axolotl":
        _adapt_model_config(dict(read_section(settings, "model_config")), settings, conversion)
    elif asked and conversion.tool == "LLaMA-Factory":
        if family and family not in FACTORYS_BALANCED_FAMILIES:
            del conversion.recipe["router_aux_loss_coef"]
            conversion.add_remark("moe_aux_loss_coef", asked, NOT_READ.format("this family's code"))
        else:
            conversion.add_difference("moe_aux_loss_coef", asked, ADDED_EACH_TIME)
            _report_gradient("moe_aux_loss_coef", asked, settings, conversion)
    elif asked and conversion.tool == "ms-swift":
        conversion.add_remark("router_aux_loss_coef", asked, OF_EACH_PART)
        _report_gradient("router_aux_loss_coef", asked, settings, conversion)


def _report_gradient(key: str, value: Any, settings: ToolFile, conversion: Conversion) -> None:
    """Reports where the routers' auxiliary loss, which `key` asks for, has no gradient there."""
    asked = USE_REENTRANT.search(str(settings.get("gradient_checkpointing_kwargs")).lower())
    is_reentrant = asked[1] == "true" if asked else None
    if conversion.tool == "LLaMA-Factory":
        checkpoints = _name_factorys_checkpoints(settings, is_reentrant)
    elif conversion.tool == "Axolotl":
        checkpoints = _name_axolotls_checkpoints(settings, is_reentrant)
    # fsdp2 is a preset of ms-swift, whose checkpoints are FSDP's own: _check_fsdp2_compatibility of
    # arguments/sft_args.py
    elif not settings.get("gradient_checkpointing", True) or settings.get("fsdp") == "fsdp2":
        checkpoints = ""
    elif is_reentrant is None and conversion.tool == "ms-swift":
        checkpoints = SWIFTS_CHECKPOINTS
    else:
        checkpoints = "use_reentrant: true" if is_reentrant else ""
    if checkpoints:
        conversion.add_difference(key, value, WITHOUT_GRADIENT.format(checkpoints))


def _name_factorys_checkpoints(settings: ToolFile, is_reentrant: bool | None) -> str:
    """Returns under which checkpoints LLaMA-Factory runs a forward without gradients; "" for none.

    `is_reentrant` is what gradient_checkpointing_kwargs says.
    """
    if settings.get("disable_gradient_checkpointing") or settings.get("use_kt"):
        return ""
    if settings.get("use_unsloth_gc"):
        return "use_unsloth_gc"
    if settings.get("gradient_checkpointing"):
        return "" if is_reentrant is False else ENABLED_TWICE
    return FACTORYS_CHECKPOINTS if settings.get("use_reentrant_gc", True) else ""


def _name_axolotls_checkpoints(settings: ToolFile, is_reentrant: bool | None) -> str:
    """Returns under which checkpoints Axolotl runs a forward without gradients; "" for none.

    `is_reentrant` is what gradient_checkpointing_kwargs says.
    """
    offload = settings.get("activation_offloading")
    adapter = settings.get("adapter")
    if offload == "legacy" and adapter:
        return "activation_offloading: legacy"
    is_on = settings.get("gradient_checkpointing")
    offloads = is_on in ("offload", "offload_disk") or offload in (True, "disk", "legacy")
    # what offloads is checkpointed by torch's own wrapper, but in the load of an adapter's base
    if not is_on or (offloads and adapter != "lora"):
        return ""
    keeps_graph = offload == "hidden_states" or any(map(settings.get, NOT_REENTRANT))
    if is_reentrant is None and not keeps_graph:
        return AXOLOTLS_CHECKPOINTS
    return "use_reentrant: true" if is_reentrant else ""


def _adapt_model_config(
    overrides: dict[str, Any], settings: ToolFile, conversion: Conversion
) -> None:
    """Sets the coefficient of the routers' auxiliary loss by what overrides the model's config.

    Other overrides are reported. `overrides` is emptied of the two keys that are read.
    """
    is_balanced = overrides.pop("output_router_logits", False)
    coefficient = overrides.pop("router_aux_loss_coef", None)
    if overrides:
        conversion.add_difference("model_config", overrides, MODELS_OWN)
    if not is_balanced:
        return
    if coefficient is None and MIXTRAL.search(name_model(settings).lower()):
        coefficient = MIXTRALS_COEFFICIENT
    if coefficient is None:
        conversion.add_difference("model_config.output_router_logits", True, BALANCED_BY_CONFIG)
    else:
        conversion.recipe["router_aux_loss_coef"] = float(coefficient)
    conversion.add_remark("model_config.output_router_logits", True, ADDED_BY_MODEL)
    _report_gradient("model_config.output_router_logits", True, settings, conversion)


def _report_new_rows(settings: ToolFile, conversion: Conversion) -> None:
    """Reports the values with which the embedding's rows of new tokens start there."""
    if conversion.tool not in STARTS_OF_NEW_ROWS:
        return
    if conversion.tool == "Axolotl" and settings.get("mean_resizing_embeddings"):
        start = NEAR_MEAN
    else:
        start = STARTS_OF_NEW_ROWS[conversion.tool]
    special = " ".join(conversion.recipe.get("special_tokens", {}).values())
    has_chatml = CHATMLS_OWN.search(name_model(settings).lower())
    if conversion.recipe.get("added_tokens"):
        conversion.remarks.append(START_OF_ROWS.format(start))
    if conversion.tool == "Axolotl" and CHATMLS in special and not has_chatml:
        conversion.remarks.append(START_OF_SPECIAL.format(start))


def _report_compute(settings: ToolFile, text: str, conversion: Conversion) -> None:
    """Reports that layers in 4 bits multiply in another dtype than the run's mixed precision."""
    layout = read_layout(conversion.tool, settings, text)
    dtype_here = COMPUTE_DTYPES[layout.precision]
    for key in COMPUTE_KEYS:
        value = read_value(settings, key)
        dtype_there = str(value).split(".")[-1]  # torch.bfloat16 is written too
        if value and dtype_there != dtype_here:
            conversion.add_difference(key, value, OTHER_COMPUTE.format(dtype_here))
