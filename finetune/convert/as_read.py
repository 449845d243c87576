"""Reads a file as its own tool does: without the keys that have no effect beside its other keys.

For instance Axolotl reads no `early_stopping_patience` in a file that names an `rl` method.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from finetune.config.optimization import OPTIMIZERS
from finetune.convert.asked_layout import find_zero_stage
from finetune.convert.counterparts import Tool, ToolFile
from finetune.convert.factory import is_of_bridge, is_of_mcore
from finetune.convert.value_conversion import DTYPES, Conversion, read_section

# tools whose files hold transformers' TrainingArguments by name
TRAINERS: tuple[Tool, ...] = ("TRL", "LLaMA-Factory", "ms-swift")
# Optimizers to which _configure_custom_optimizer of Axolotl's core/builders/base.py passes
# optim_args on, beside those of matrices. Transformers' Trainer makes the other optimizers, and
# reads no optim_args for an AdamW of torch or bitsandbytes.
CUSTOM_OPTIMIZERS = (
    "optimi_adamw",
    "ao_adamw_fp8",
    "adopt_adamw",
    "flash_adamw",
    "q_galore_adamw8bit",
)
# the tools' default logging_steps; Trainer takes logging_steps for eval_steps where there is none
DEFAULT_LOGGING_STEPS = {"TRL": 10, "LLaMA-Factory": 500}
EVALUATION_STRATEGIES = ("eval_strategy", "evaluation_strategy")  # the second is the older name
STRATEGY_KEYS = (*EVALUATION_STRATEGIES, "save_strategy")
# peft's defaults, by get_lora_ga_model of the package lora_ga: prepare_adapter of ms-swift's
# pipelines/train/tuner.py hands it no key of the adapters
ADAPTERS_OF_LORA_GA = {"lora_rank": 8, "lora_alpha": 8, "lora_dropout": 0.0}
# Axolotl's keys for how often a run saves, and evaluates
SAVES = ("save_steps", "saves_per_epoch")
EVALUATIONS = ("eval_steps", "evals_per_epoch")
# Axolotl's trainer takes rex for a cosine until it makes the schedule
COSINE_SCHEDULES = ("cosine", "rex")
# tokenizers of bytes, which no `legacy` concerns: it says where SentencePiece's space stands
BYTE_TOKENIZERS = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
# Tool -> its key for the optimizer, which Trainer hands to Accelerate
OPTIMIZER_KEYS: Mapping[Tool, str] = {"Axolotl": "optimizer", **dict.fromkeys(TRAINERS, "optim")}
# the tools' own DeepSpeed files that move the optimizer to the CPU, without
# zero_force_ds_cpu_optimizer: false
FILES_WITH_OPTIMIZER_ON_CPU = re.compile(
    r"deepspeed_configs/zero2(_torch_compile)?\.json|\b(ds_z|zero)[23]_offload|\bds_z3_fp8_config"
)
# map_pytorch_optim_to_deepspeed of accelerate/utils/deepspeed.py makes DeepSpeed's Adam of all but
# these, of which Axolotl refuses the last two beside DeepSpeed, as it does Muon
KEPT_ON_CPU = re.compile(
    r"none|ada(grad|mw(_hf|_torch(_fused|_xla|_npu_fused)?)?)|paged_adamw(_32bit)?|"
    r"(paged_)?lion(_32bit)?|muon_8bit|flash_.*"
)
ADAM_ON_CPU = (
    "the DeepSpeed file moves the optimizer to the CPU, where Accelerate puts DeepSpeed's Adam in "
    "its place, with moments in float32: AdamW here"
)
DECAY_ADDED = f"{ADAM_ON_CPU}; it adds weight_decay to the gradient, which AdamW does not"


def starts_by_lora_ga(file: ToolFile) -> bool:
    """Whether an ms-swift file has new adapters made by the package lora_ga."""
    makes_others = file.get("adapters") or file.get("use_swift_lora")
    is_of_peft = file.get("tuner_backend", "peft") == "peft"
    return file.get("init_weights") == "lora-ga" and is_of_peft and not makes_others


def _has_head_in_fp32(file: ToolFile) -> bool:
    """Whether lm_head_precision of an Automodel file has an effect."""
    layout = read_section(file, "distributed")
    ranks = layout.get("ep_size")
    precision = str(read_section(layout, "moe").get("lm_head_precision"))
    spreads_experts = isinstance(ranks, int) and ranks > 1
    return spreads_experts and DTYPES.get(precision.removeprefix("torch.")) == "float32"


def _updates_matrices(optimizer: str) -> bool:
    """Whether this optimizer treats matrices in a way of their own, as Muon does."""
    facts = OPTIMIZERS.get(optimizer)
    return facts is not None and facts.count_matrix is not None


def _takes_arguments(optimizer: str) -> bool:
    """Whether Axolotl passes optim_args on to this optimizer."""
    return optimizer in CUSTOM_OPTIMIZERS or _updates_matrices(optimizer)


# keys, dotted where they are nested, and whether a tool leaves them unread in a file
UnreadRule = tuple[tuple[str, ...], Callable[[ToolFile], object]]
# rotate_checkpoints of transformers deletes none for a limit of 0 or less
NO_LIMIT: UnreadRule = (("save_total_limit",), lambda file: file.get("save_total_limit") in (0, -1))
# the rules of transformers' Trainer
OF_TRAINER: tuple[UnreadRule, ...] = (
    # get_warmup_steps of transformers 4; in transformers 5 a ratio always decides
    (("warmup_steps",), lambda file: file.get("warmup_steps") == 0 and file.get("warmup_ratio")),
    (("neftune_noise_alpha",), lambda file: file.get("neftune_noise_alpha") == 0),
    NO_LIMIT,
)
# A comment names the tool's code by which a rule holds.
UNREAD_RULES: Mapping[Tool, tuple[UnreadRule, ...]] = {
    "TRL": OF_TRAINER,
    "Axolotl": (
        # create_scheduler of core/trainers/mixins/scheduler.py
        (
            ("cosine_min_lr_ratio",),
            lambda file: _warms_up_by_squares(file) or _find_schedule(file) not in COSINE_SCHEDULES,
        ),
        (
            ("cosine_constant_lr_ratio",),
            lambda file: (
                _warms_up_by_squares(file)
                or _find_schedule(file) != "cosine"
                or not file.get("cosine_min_lr_ratio")
            ),
        ),
        (("lr_quadratic_warmup",), lambda file: not _warms_up_by_squares(file)),
        # from_pretrained of the tokenizer
        (
            ("tokenizer_legacy",),
            lambda file: str(file.get("tokenizer_type")).removesuffix("Fast") in BYTE_TOKENIZERS,
        ),
        # core/builders/causal.py passes these on; the builder of trainers for `rl` does not
        (
            (
                "neftune_noise_alpha",
                "noisy_embedding_alpha",
                "early_stopping_patience",
                "load_best_model_at_end",
                "loss_watchdog_threshold",
                "loss_watchdog_patience",
                "dataloader_drop_last",
                *("use_dft", "use_eaft", "eaft_alpha", "eaft_k"),
                *("lisa_n_layers", "lisa_step_interval", "lisa_layers_attribute"),
            ),
            lambda file: file.get("rl"),
        ),
        (
            ("optim_args.betas", "optim_args.eps", "optim_args.weight_decay"),
            lambda file: not _takes_arguments(str(file.get("optimizer"))),
        ),
        # _configure_custom_optimizer passes on both adam_beta1 and adam_beta2, or neither
        (
            ("adam_beta1", "adam_beta2"),
            lambda file: (
                _takes_arguments(str(file.get("optimizer")))
                and not (file.get("adam_beta1") and file.get("adam_beta2"))
            ),
        ),
        NO_LIMIT,
        # set_training_args_kwargs of core/trainers/dpo
        (
            ("dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing"),
            lambda file: file.get("rl") != "dpo",
        ),
        # _build_lora_config_kwargs of loaders/adapter.py hands false to nobody
        (
            ("peft_init_lora_weights",),
            lambda file: isinstance(file.get("peft_init_lora_weights"), bool),
        ),
    ),
    "LLaMA-Factory": (
        *OF_TRAINER,
        # the default of DataArguments in hparams/data_args.py
        (("mix_strategy",), lambda file: file.get("mix_strategy") == "concat"),
        # hparams/parser.py takes null for an absent key: packing is then on with stage: pt alone
        (("packing",), lambda file: file.get("packing") is None),
        # read by train/dpo/trainer.py and train/kto/trainer.py alone
        (("pref_ftx",), lambda file: file.get("stage", "sft") not in ("dpo", "kto")),
        # read by train/sft/trainer.py alone
        (
            ("use_dft_loss", "use_eaft_loss", "use_asft_loss"),
            lambda file: file.get("stage", "sft") != "sft",
        ),
        # compute_loss of transformers' Trainer smooths no labels under a compute_loss_func
        (
            ("label_smoothing_factor",),
            lambda file: any(map(file.get, ("use_dft_loss", "use_eaft_loss", "use_asft_loss"))),
        ),
        # create_optimizer and the losses of mcore_adapter's trainer, and config_builder.py of
        # train/megatron_bridge, have their own
        (
            (
                *("optim", "use_muon", "use_adam_mini", "use_apollo", "use_badam", "use_galore"),
                *("label_smoothing_factor", "use_dft_loss", "use_eaft_loss", "use_asft_loss"),
                *("additional_target", "loraplus_lr_ratio", "pissa_init", "use_dora", "use_rslora"),
                *("lora_dropout", "lora_target"),
            ),
            lambda file: is_of_mcore(file) or is_of_bridge(file),
        ),
        # run_sft of train/mca/workflow.py trains all weights, whatever finetuning_type says
        (
            ("finetuning_type", "lora_alpha", "lora_rank"),
            lambda file: is_of_mcore(file) and file.get("finetuning_type") != "full",
        ),
        # train/pt/trainer.py and train/sft/trainer.py alone read it
        (
            ("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
            lambda file: file.get("stage", "sft") not in ("pt", "sft"),
        ),
        # fit of v1/core/base_trainer.py leaves clipping to DeepSpeed, whose file has its own bound
        (("max_grad_norm",), lambda file: "batching_strategy" in file and file.get("deepspeed")),
        # config_builder.py and dataset_export.py of train/megatron_bridge
        (
            (
                *("lr_scheduler_kwargs", "neftune_noise_alpha", "rope_scaling"),
                *("mask_history", "neat_packing", "packing", "train_on_prompt"),
            ),
            is_of_bridge,
        ),
    ),
    "Automodel": (
        # recipes/llm/train_ft.py takes null for 1.0, as it does a key that is absent
        (
            ("clip_grad_norm.max_norm",),
            lambda file: read_section(file, "clip_grad_norm").get("max_norm") is None,
        ),
        # parallelize_model of components/moe/parallelizer.py, which takes float32 alone for the
        # dtype of a head; recipes/_dist_utils.py reads the section where experts are spread over
        # ranks alone
        (("distributed.moe.lm_head_precision",), lambda file: not _has_head_in_fp32(file)),
    ),
    "ms-swift": (
        *OF_TRAINER,
        (("early_stop_interval",), lambda file: file.get("early_stop_interval") == 0),
        # init_self_cognition_preprocessor of dataset/loader.py: for rows on the model's own name
        (
            ("model_author", "model_name"),
            lambda file: "self-cognition" not in f"{file.get('dataset')} {file.get('val_dataset')}",
        ),
        (
            (
                *("target_modules", "target_parameters", "target_regex", "modules_to_save"),
                *("lora_bias", "use_dora", "use_rslora", *ADAPTERS_OF_LORA_GA),
            ),
            starts_by_lora_ga,
        ),
        # __post_init__ of arguments/tuner_args.py
        (("target_modules",), lambda file: file.get("target_regex")),
        # peft's own start: __post_init__ of arguments/tuner_args.py
        (("init_weights",), lambda file: str(file.get("init_weights")).lower() == "true"),
    ),
}


def read_as_tool(tool: Tool, settings: ToolFile) -> tuple[dict[str, Any], list[str]]:
    """Returns a copy of the file without the keys that its tool does not read, and those keys.

    The copy also has what the tool puts in place of some keys that are absent or null.

    >>> read_as_tool("TRL", {"warmup_steps": 0, "warmup_ratio": 0.1})
    ({'warmup_ratio': 0.1}, ['warmup_steps'])
    """
    file = {key: _read_word(tool, key, value) for key, value in deepcopy(dict(settings)).items()}
    if tool == "Automodel":
        _rename_dtype(file)
    if tool == "TRL":
        _read_launch_file(file)
    if tool in TRAINERS:
        _rename_checkpointing(file)
    unread = [
        key
        for keys, applies in UNREAD_RULES.get(tool, ())
        if applies(settings)
        for key in keys
        if _remove_key(file, key)
    ]
    if _is_replaced_on_cpu(tool, settings):
        del file[OPTIMIZER_KEYS[tool]]  # AdamW is the default
    if tool == "LLaMA-Factory" and is_of_mcore(settings):
        file["finetuning_type"] = "full"
    if tool == "ms-swift" and starts_by_lora_ga(settings):
        file |= ADAPTERS_OF_LORA_GA
    if tool == "Axolotl":
        _replace_defaults_of_axolotl(file)
    elif not file.get("eval_steps"):
        _set_eval_steps(tool, file)
    return file, unread


def report_adam_on_cpu(tool: Tool, settings: ToolFile, conversion: Conversion) -> None:
    """Reports that DeepSpeed's Adam takes the place of the optimizer that the file names."""
    if not _is_replaced_on_cpu(tool, settings):
        return
    key = OPTIMIZER_KEYS[tool]
    if settings.get("weight_decay"):
        conversion.add_difference(key, settings[key], DECAY_ADDED)
    else:
        conversion.add_remark(key, settings[key], ADAM_ON_CPU)


def _is_replaced_on_cpu(tool: Tool, settings: ToolFile) -> bool:
    """Whether Accelerate replaces the file's optimizer by DeepSpeed's Adam, for it is on the CPU.

    >>> file = {"optim": "adamw_8bit", "deepspeed": "zero2_offload"}
    >>> _is_replaced_on_cpu("ms-swift", file), _is_replaced_on_cpu("ms-swift", {"optim": "sgd"})
    (True, False)
    """
    optimizer = str(settings.get(OPTIMIZER_KEYS.get(tool, ""))).lower()
    is_kept = KEPT_ON_CPU.fullmatch(optimizer) is not None or _updates_matrices(optimizer)
    return _moves_optimizer(settings.get("deepspeed")) and not is_kept


def _moves_optimizer(deepspeed: Any) -> bool:
    """Whether a DeepSpeed file, by its name or settings, has Trainer's optimizer on the CPU."""
    if not isinstance(deepspeed, Mapping):
        return FILES_WITH_OPTIMIZER_ON_CPU.search(str(deepspeed).lower()) is not None
    offload = read_section(read_section(deepspeed, "zero_optimization"), "offload_optimizer")
    is_replaced = deepspeed.get("zero_force_ds_cpu_optimizer", True) is not False
    return offload.get("device", "none") != "none" and is_replaced and "optimizer" not in deepspeed


# Tool -> texts, in lower case, that it reads as other values: translate_value of Automodel's
# components/config/loader.py; HfArgumentParser of TRL's scripts/_hf_argparser.py, which reads a
# file's texts as it does those of a command; transformers' own, by which ms-swift reads both; and
# pydantic.
WORDS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": {"true": True, "false": False, "none": None, "null": None},
    "Automodel": {"true": True, "false": False, "none": None},
    "ms-swift": {
        **dict.fromkeys(("true", "yes", "t", "y"), True),
        **dict.fromkeys(("false", "no", "f", "n"), False),
    },
    "Axolotl": {"true": True, "false": False},
}
# keys whose values TRL leaves as they are
AS_TEXT = ("report_to", "eos_token", "pad_token", "scale_rewards")


def _read_word(tool: Tool, key: str, value: Any) -> Any:
    """Returns the value that the tool reads for a word; in nested mappings and lists too where the
    tool is Automodel.

    YAML, by which the values of a command are read too, takes the strategy no for false.
    """
    if key in STRATEGY_KEYS and value in (False, "no"):
        return "no"
    if isinstance(value, str) and key not in AS_TEXT:
        return WORDS.get(tool, {}).get(value.lower(), value)
    if isinstance(value, dict) and tool == "Automodel":
        return {name: _read_word(tool, name, inner) for name, inner in value.items()}
    if isinstance(value, list) and tool == "Automodel":
        return [_read_word(tool, key, inner) for inner in value]
    return value


def _read_launch_file(file: dict[str, Any]) -> None:
    """Writes the Accelerate file that TRL's command launches with as `deepspeed` or `fsdp`, in
    place: the name of one of TRL's own, such as zero3, or a path.
    """
    name = str(file.get("accelerate_config"))
    if find_zero_stage(name) is not None:
        file.setdefault("deepspeed", name)
    elif "fsdp" in name:
        file.setdefault("fsdp", name)


def _rename_dtype(file: Mapping[str, Any]) -> None:
    """Renames `model.dtype` to `model.torch_dtype`, the older name, in place.

    from_pretrained of Automodel 0.7 reads both names.
    """
    model = file.get("model")
    if isinstance(model, dict) and model.get("dtype") is not None:
        model["torch_dtype"] = model.pop("dtype")


def _rename_checkpointing(file: dict[str, Any]) -> None:
    """Renames `activation_checkpointing` to `gradient_checkpointing`, the older name, in place.

    TrainingArguments of transformers 5 reads the older name where the newer one is absent.
    """
    for end in ("", "_kwargs"):
        newer = file.pop(f"activation_checkpointing{end}", None)
        if newer is not None:
            file[f"gradient_checkpointing{end}"] = newer


def _set_eval_steps(tool: Tool, file: dict[str, Any]) -> None:
    """Sets `eval_steps` to `logging_steps`, as Trainer does where it evaluates by steps.

    `file` has no eval_steps.
    """
    is_by_steps = any(file.get(key) == "steps" for key in EVALUATION_STRATEGIES)
    if is_by_steps and tool in DEFAULT_LOGGING_STEPS:
        file["eval_steps"] = file.get("logging_steps") or DEFAULT_LOGGING_STEPS[tool]


def _replace_defaults_of_axolotl(file: dict[str, Any]) -> None:
    """Replaces values that mean the default to Axolotl but something else to a recipe here."""
    if "max_grad_norm" in file and file["max_grad_norm"] is None:
        # model_dump(exclude_none=True) drops null, and Trainer clips by its default. Here null
        # would switch clipping off.
        del file["max_grad_norm"]
    # _configure_save_and_eval_strategy of core/builders/base.py, and Trainer's own steps; Axolotl
    # logs every 10 steps of a run of 2000 or more
    if file.get("save_strategy") == "steps" and not any(map(file.get, SAVES)):
        file["save_steps"] = 500
    if file.get("eval_strategy") == "steps" and not any(map(file.get, EVALUATIONS)):
        file["eval_steps"] = file.get("logging_steps") or 10
    if file.get("chat_template") == "jinja" and file.get("chat_template_jinja"):
        del file["chat_template"]  # it says that the other key has the template
    for key in ("kto_desirable_weight", "kto_undesirable_weight"):
        if file.get(key) == 0:
            file[key] = 1.0  # core/builders/rl.py reads the weight `or 1.0`
    # check_tf32 of utils/schemas/config.py: auto, the default, is true on a GPU that has it
    if file.get("tf32", "auto") == "auto":
        file["tf32"] = True


def _warms_up_by_squares(file: ToolFile) -> bool:
    """Whether the warm-up of an Axolotl file is quadratic."""
    asks_for_it = file.get("lr_quadratic_warmup") and not file.get("rl")
    return bool(asks_for_it) and _find_schedule(file) == "cosine"


def _find_schedule(file: ToolFile) -> str:
    """Returns the schedule's name in an Axolotl file; cosine is the default."""
    return str(file.get("lr_scheduler") or "cosine")


def _remove_key(file: dict[str, Any], dotted: str) -> bool:
    """Removes a key, nested where `dotted` has a dot; returns whether its value was not null."""
    *sections, name = dotted.split(".")
    mapping: Any = file
    for section in sections:
        mapping = mapping.get(section) if isinstance(mapping, dict) else None
    return isinstance(mapping, dict) and mapping.pop(name, None) is not None
