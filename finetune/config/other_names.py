"""Hints for a recipe that has unknown keys, or values that other tools have: what to write instead.

Here are names that people write from habit. Keys of a single tool are in finetune/convert, whose
hints `reader.add_hints` adds to these. Imports no torch.
"""

from collections.abc import Iterator, Mapping

from finetune.config.layout import GROUP_KEYS
from finetune.config.optimization import OPTIMIZERS, REFUSED_OPTIMIZERS
from finetune.config.schema import NESTED

# Parts of hints.
PRECISION = "mixed_precision belongs in the Accelerate file"
TRUNCATED = (
    "completions are sampled from all of the vocabulary: a truncated distribution is not the one "
    "that is trained"
)

# Top-level keys of an Accelerate file. All but the first eight are for its launcher alone.
ACCELERATE_KEYS = frozenset(
    """
    distributed_type mixed_precision use_cpu num_machines fsdp_config parallelism_config
    deepspeed_config fp8_config compute_environment machine_rank main_process_ip
    main_process_port main_training_function num_processes rdzv_backend rdzv_conf same_network
    debug downcast_bf16 enable_cpu_affinity gpu_ids tpu_env tpu_use_cluster tpu_use_sudo
    tpu_name tpu_zone commands command_file num_cpu_threads_per_process max_restarts
    monitor_interval
    """.split()  # noqa: SIM905 - a name a line would be a page
)
# A name that people write in a recipe -> the key of the Accelerate file that they mean.
IN_ACCELERATE_FILE: Mapping[str, str] = {
    **{key: f"parallelism_config_{key}" for key in GROUP_KEYS},
    "tp_config": f"parallelism_config_{GROUP_KEYS[0]}",
    "sequence_parallel_size": "parallelism_config_sp_size",
    "cpu_offload": "fsdp_offload_params",
    "offload_params": "fsdp_offload_params",
}
# A name that people write in a recipe or an Accelerate file -> the recipe's key that they mean.
IN_RECIPE: Mapping[str, str] = {
    **dict.fromkeys(("ep_size", "expert_parallel_degree"), "expert_parallel_size"),
    **dict.fromkeys(
        (
            "pp_size",
            "parallelism_config_pp_size",
            "pipeline_parallel_degree",
            "pipeline_model_parallel_size",
        ),
        "pipeline_parallel_size",
    ),
    "pp_schedule": "pipeline_schedule",
}
# A key of the recipe -> names that people write for it in a recipe. No tool's file has these names,
# and the key with the nearest spelling is often another one.
OFTEN_MEANT: Mapping[str, str] = {
    "model_name_or_path": "model model_name model_path model_id pretrained_model",
    "tokenizer_name_or_path": "tokenizer tokenizer_path",
    "datasets": (
        "data data_path data_files dataset_path train_data train_file train_files train_dataset"
    ),
    "eval_datasets": (
        "eval_data eval_file val_data val_file validation_file validation_data test_data"
    ),
    "lora_r": "r rank lora_dim",
    "lora_alpha": "alpha",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "max_length": "seq_len sequence_length context_length max_seq_len max_tokens block_size",
    "eval_split_size": "validation_split val_split test_size validation_size",
    "per_device_train_batch_size": "per_device_batch_size train_batch_size device_batch_size",
    "gradient_accumulation_steps": (
        "gradient_accumulation grad_accum grad_accum_steps accumulation_steps"
    ),
    "max_grad_norm": "grad_clip clip clip_grad_norm gradient_clipping clip_grad",
    "max_steps": "steps num_steps total_steps train_steps num_train_steps",
    "lr_scheduler_type": "scheduler schedule",
    "min_lr_ratio": "min_lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "early_stopping_patience": "early_stopping patience",
    "eval_steps": "eval_every eval_interval val_every",
    "save_steps": "save_every save_interval checkpoint_every",
    "logging_steps": "log_every log_interval log_steps",
    "output_dir": "output out_dir output_path save_dir save_path logging_dir",
    "resume_from_checkpoint": "resume resume_from",
    "seed": "random_state data_seed random_seed",
    "rewards": "reward reward_fn reward_func reward_function reward_functions",
    "beta": "kl_coef kl_beta init_kl_coef kl_penalty",
    "num_generations": "num_return_sequences n_samples group_size num_samples_per_prompt",
    "max_completion_length": "max_new_tokens max_response_length response_length",
    "teacher_model_name_or_path": "teacher teacher_model teacher_model_path",
    "method": "trainer algorithm objective",
    "assistant_only_loss": (
        "completion_only mask_prompt response_template instruction_part response_part"
    ),
    "chat_template": "prompt_template",
}
# Methods of other tools that are a loss_type of method: grpo here.
OTHER_POLICY_METHODS = ("dapo", "dr_grpo", "cispo", "rloo", "reinforce++")
# Unsloth's keys are finetune_PART.
UNSLOTH_PARTS = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
# Hints that several names share.
LAUNCHED = "no such key; --num-processes N says how many ranks run on this machine"
ADAPTERS = (
    "no such key; use_peft: true trains LoRA adapters, with load_in_4bit: true on a base in 4 bits "
    "(QLoRA)"
)
QUANTIZED = (
    "no such key; load_in_4bit: true keeps the frozen base of adapters in 4 bits, load_in_8bit: "
    "true in 8"
)
RECOMPUTED = (
    "no such key; accelerate_config: fsdp_full_shard_auto recomputes activations, or under DDP "
    "ddp_checkpointing; in an Accelerate file of your own it is fsdp_activation_checkpointing: true"
)
ATTENTION = (
    "no such key: packed attention is built in; attn_implementation: flash_attention_2 asks for "
    "the package"
)
PARTS_TRAINED = (
    "Unsloth's name; no such key: trainable_modules names what is trained by patterns, and "
    "lora_target_modules what is adapted; a vision tower is frozen without them"
)
SERVED = (
    "Unsloth's name; no such key: the model in training samples itself, or the server of "
    "vllm_server_base_url does"
)
SOURCES_FORM = "[{path: FILE_OR_NAME}]"  # the form of a value of datasets and eval_datasets


def _list_often_meant() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the entries of `MEANT` for OFTEN_MEANT: (name, (key, hint))."""
    for key, names in OFTEN_MEANT.items():
        form = f"{key}: {SOURCES_FORM}" if key in NESTED else key
        for name in names.split():
            yield name, (key, f"no such key; here it is {form}")


# A name that people write -> (the key that they mean, the hint). The key is "" where there is none.
# A later entry replaces an earlier one of the same name.
MEANT: Mapping[str, tuple[str, str]] = {
    **dict(_list_often_meant()),
    **dict.fromkeys(
        ("use_lora", "lora", "use_qlora", "qlora", "peft", "lora_enable"), ("use_peft", ADAPTERS)
    ),
    "peft_type": (
        "use_peft",
        "peft's name; use_peft: true trains LoRA adapters, with oft_block_size OFT's rotations",
    ),
    "full_finetuning": (
        "use_peft",
        (
            "Unsloth's name; no such key: all parameters are trained, unless use_peft: true adds "
            "adapters"
        ),
    ),
    **dict.fromkeys(
        ("bits", "quantization", "quantize", "int4", "nf4", "4bit"), ("load_in_4bit", QUANTIZED)
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing"),
        ("accelerate_config", RECOMPUTED),
    ),
    **dict.fromkeys(
        ("use_flash_attention_2", "use_flash_attention", "use_flash_attn", "flash_attn"),
        ("attn_implementation", ATTENTION),
    ),
    **dict.fromkeys([f"finetune_{part}" for part in UNSLOTH_PARTS], ("", PARTS_TRAINED)),
    **dict.fromkeys(("fast_inference", "gpu_memory_utilization", "max_lora_rank"), ("", SERVED)),
    "bias": (
        "",
        "peft's name; no such key: biases are frozen beside adapters, as with peft's bias: none",
    ),
    "embedding_learning_rate": (
        "",
        "Unsloth's name; no such key: all that is trained has one learning_rate",
    ),
    "load_in_16bit": (
        "",
        (
            "Unsloth's name; no such key: the files' own precision is read, and dtype says what is "
            "kept"
        ),
    ),
    "token": (
        "",
        "no such key: HF_TOKEN in the environment, or `hf auth login`, opens gated models",
    ),
    "precision": (
        "",
        f"no such key: {PRECISION}, as accelerate_config: fsdp_full_shard_auto has it",
    ),
    "reward_model": (
        "rewards",
        "no such key; here it is rewards, such as [my_rewards.py:right], which may ask a model",
    ),
    "system_prompt": (
        "",
        "no such key: a system message is read from the rows, as the first of their messages",
    ),
    **{
        name: ("report_to", f"no such key; here it is report_to: {name}")
        for name in ("wandb", "tensorboard")
    },
    "warmup": ("", "no such key; here it is warmup_steps, or the share warmup_ratio"),
    **dict.fromkeys(
        ("images", "image_column"),
        ("", "no such key: images are read from the column images or image"),
    ),
    "max_tokens": ("max_length", "no such key; max_length is the number of tokens in a row"),
    "batch_size": (
        "per_device_train_batch_size",
        "torchtune's and Axolotl's name; per_device_train_batch_size is the rows of a micro-batch, "
        "global_batch_size those of a step",
    ),
    "load_best_model_at_end": (
        "keep_best_checkpoint",
        "Transformers' name; here it is keep_best_checkpoint, with eval_steps",
    ),
    "train_on_responses_only": (
        "assistant_only_loss",
        "Unsloth's name; here it is assistant_only_loss, true by default",
    ),
    **dict.fromkeys(("top_p", "top_k", "min_p"), ("", f"no such key: {TRUNCATED}")),
    "reward_funcs": ("rewards", "TRL's name; here it is rewards, such as [my_rewards.py:right]"),
    **dict.fromkeys(
        ("num_gpus", "n_gpus", "ngpus", "gpus", "nproc", "nproc_per_node", "world_size"),
        ("", LAUNCHED),
    ),
}


def _map_optimizers() -> dict[str, str]:
    """Maps other tools' values of `optim` to ours."""
    return {name: optim for optim, facts in OPTIMIZERS.items() for name in facts.other_names}


# Values of other tools for keys that have the same name here: key -> their value -> what to write.
OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": _map_optimizers(),
    "lr_scheduler_type": {"constant_lr": "constant", "1-sqrt": "warmup_stable_decay"},
    "method": {
        "ipo": "method: dpo with loss_type: ipo",
        "rpo": "method: dpo with rpo_alpha",
        "gspo": "method: grpo with importance_sampling_level: sequence",
        "reinforce": "method: grpo with loss_type: reinforce++",
        **{name: f"method: grpo with loss_type: {name}" for name in OTHER_POLICY_METHODS},
        "rlhf": "method: ppo",
        **dict.fromkeys(("lora", "peft"), "use_peft: true, of every method"),
        "qlora": "use_peft: true with load_in_4bit: true, of every method",
        **dict.fromkeys(("pt", "pretrain", "cpt"), "method: sft with rows of texts"),
    },
    "attn_implementation": {
        "fa2": "flash_attention_2",
        "fa3": "flash_attention_3",
        "fa4": "flash_attention_4",
        "flash_attention": "auto",
    },
}
# The same for values without a counterpart here: key -> their value -> the reason, or what to use.
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": dict.fromkeys(
        ("fp16", "float16"),
        (
            "parameters are kept in float32 or bfloat16; mixed_precision: fp16 computes in half "
            "precision"
        ),
    ),
    "optim": REFUSED_OPTIMIZERS,
    "lr_scheduler_type": {
        "cosine_with_restarts": (
            "a rate that jumps back is not supported; cosine, or warmup_stable_decay"
        ),
        "reduce_lr_on_plateau": (
            "the rate is a function of the step here; cosine, or warmup_stable_decay"
        ),
    },
    "save_strategy": {"best": "every new best is saved with keep_best_checkpoint: true"},
    "eval_strategy": {
        "best": "it is for save_strategy in Transformers; here see keep_best_checkpoint"
    },
}
