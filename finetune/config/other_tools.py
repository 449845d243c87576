"""The keys of other tools and ours, as tables, and their defaults where they differ from ours. Imports no torch.

The recipe reader's hints (config/reader.py), `finetune convert` and docs/coming-from.md are made from them.

Sources: the configuration classes and documentation of TRL 1.9 with transformers 5 (SFTConfig, ModelConfig,
ScriptArguments, TrainingArguments), Axolotl 0.18, LLaMA-Factory (arguments of its `hparams`), torchtune (its recipes and
builders), NeMo Automodel (`recipes/llm/train_ft.py`, `components/optim/config.py`, `components/_peft/lora.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from finetune.config.layout import DIVISIONS, GROUP_KEYS
from finetune.config.optimization import OPTIMIZERS, REFUSED_OPTIMIZERS
from finetune.config.schema import NESTED, recipe_keys

# How a value becomes ours; finetune/convert/rules.py says what each does. "by-code" is read by convert's own code.
Carry = Literal[
    "same", "not", "adapter", "lora-only", "all-linear", "targets", "schedule", "optimizer", "attention", "tracker",
    "dtype", "template", "resume", "overlength", "on-if-true", "steps", "warmup", "min-rate", "clip", "betas", "strategy",
    "names", "parameters", "module-patterns", "bits", "quantizer", "schedule-argument",
    "flag", "optimizer-flag", "by-code",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One key of another tool. `ours` is None where there is none; `note` then says why, or what to do instead."""

    theirs: str  # dotted where it is nested
    ours: str | None
    note: str = ""
    carry: Carry = "same"
    inexact: bool = False  # nearly the same: converted, and the note is reported
    missing_capability: str = ""  # what it asks for that is not supported here
    has_effect: bool = True  # whether dropping it changes what is trained, saved or measured


def ignored(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    """Keys without effect here."""
    return tuple(Counterpart(key, None, note, has_effect=False) for key in theirs)


def without_counterpart(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    """Keys with an effect that nothing here has; `note` says what to do instead."""
    return tuple(Counterpart(key, None, note) for key in theirs)


def unsupported(capability: str, *theirs: str, note: str = "") -> tuple[Counterpart, ...]:
    """Keys that ask for what is not supported here."""
    return tuple(
        Counterpart(key, None, note or f"{capability}: not supported", missing_capability=capability) for key in theirs
    )


def in_accelerate_file(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    """Keys for what the Accelerate file says."""
    return tuple(Counterpart(key, "accelerate_config", note, "by-code") for key in theirs)


REFERENCE = (
    "the reference is the model before training: its adapters switched off, or its log-probabilities "
    "computed once, without a key"
)
CUT_PROMPTS = (
    "max_length bounds prompt and answer together here, and cuts the end; a longer prompt loses its beginning there"
)
ANOTHER_REFERENCE = f"another reference model: not supported; {REFERENCE}"
NO_DROPOUT = "adapters are trained without dropout in preference training there: lora_dropout: 0"
MEAN_OF_MEANS = "a mean of each answer's mean there, a mean over all tokens here"
TOKEN_SUMS = "the same sums of log-probabilities, computed otherwise"

TRL_PREFERENCES = (
    Counterpart("loss_type", "loss_type", "of DPO: sigmoid, hinge, ipo, apo_zero; [sigmoid, sft] is rpo_alpha; simpo is a method here", "by-code"),
    Counterpart("loss_weights", "rpo_alpha", "the weight of sft in loss_type: [sigmoid, sft]", "by-code"),
    Counterpart("cpo_alpha", None, "0 is SimPO; else CPO-SimPO adds a cross entropy, which is not supported", "by-code"),
    Counterpart("disable_dropout", "lora_dropout", NO_DROPOUT, "by-code"),
    Counterpart("truncation_mode", None, "keep_start is what is done here", "by-code"),
    *without_counterpart(CUT_PROMPTS, "max_prompt_length", "max_completion_length"),
    *unsupported("another loss (WPO)", "use_weighting"),
    *unsupported("another loss (LD-DPO)", "ld_alpha"),
    *unsupported("another reference model", "reference_free", "sync_ref_model", "ref_model_revision", note=ANOTHER_REFERENCE),
    *ignored("reverse_kl is the only one", "f_divergence_type", "f_alpha_divergence_coef"),
    *ignored(REFERENCE, "precompute_ref_log_probs", "precompute_ref_batch_size", "ref_model_init_kwargs",
        "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *ignored(TOKEN_SUMS, "use_logits_to_keep", "label_pad_token_id", "padding_value", "generate_during_eval"),
)  # fmt: skip

AXOLOTL_PREFERENCES = (
    Counterpart("rl", "method", "dpo, orpo, kto or simpo; ipo is method: dpo with loss_type: ipo", "by-code"),
    *(Counterpart(key, "beta") for key in ("rl_beta", "trl.beta", "dpo_beta")),
    Counterpart("orpo_alpha", "beta", "of orpo", "by-code"),
    Counterpart("cpo_alpha", None, "0 is SimPO; else CPO-SimPO adds a cross entropy, which is not supported", "by-code"),
    Counterpart("kto_desirable_weight", "desirable_weight"),
    Counterpart("kto_undesirable_weight", "undesirable_weight"),
    Counterpart("dpo_label_smoothing", "label_smoothing"),
    Counterpart("dpo_loss_type", "loss_type", "sigmoid, hinge, ipo, apo_zero; [sigmoid, sft] is rpo_alpha", "by-code"),
    Counterpart("dpo_loss_weights", "rpo_alpha", "the weight of sft in dpo_loss_type: [sigmoid, sft]", "by-code"),
    *without_counterpart(CUT_PROMPTS, "max_prompt_len"),
    *unsupported("another loss (WPO)", "dpo_use_weighting"),
    *unsupported("another loss (normalized DPO)", "dpo_norm_loss"),
    *ignored(REFERENCE, "precompute_ref_log_probs", "rl_adapter_ref_model"),
    *ignored(TOKEN_SUMS, "dpo_use_logits_to_keep", "dpo_padding_free", "dpo_generate_during_eval"),
)  # fmt: skip

FACTORY_PREFERENCES = (
    Counterpart("stage", "method", "dpo and kto; sft, and pt with rows of type text, need no key", "by-code"),
    Counterpart("pref_loss", "loss_type", "sigmoid, hinge, ipo, apo_zero; orpo and simpo are methods here", "by-code"),
    Counterpart("pref_beta", "beta"),
    Counterpart("pref_ftx", "rpo_alpha", MEAN_OF_MEANS, "on-if-true", inexact=True),
    Counterpart("dpo_label_smoothing", "label_smoothing"),
    Counterpart("kto_chosen_weight", "desirable_weight"),
    Counterpart("kto_rejected_weight", "undesirable_weight"),
    *unsupported("another loss (BCO)", "pref_bco_weight"),
    *unsupported("another loss (LD-DPO)", "ld_alpha"),
    *unsupported("another reference model", "ref_model", "ref_model_adapters", note=ANOTHER_REFERENCE),
    *ignored(REFERENCE, "ref_model_quantization_bit"),
)  # fmt: skip

TORCHTUNE_PREFERENCES = (
    Counterpart("loss.beta", "beta", "of DPOLoss"),
    Counterpart("loss.label_smoothing", "label_smoothing", "of DPOLoss"),
    *ignored(REFERENCE, "ref_checkpointer"),
)


SCHEDULE_NAMES = "cosine, linear, constant, polynomial, inverse_sqrt and warmup_stable_decay, by Transformers' names"
OPTIMIZER_NAMES = "AdamW, also with moments in bf16 or 8 bits, Adafactor as Trainer has it, Muon, and SGD"
NOISE = "bounded by each document's own tokens, not by those of the padded batch"
PRECISION = "mixed_precision belongs in the Accelerate file"
FP8 = "mixed_precision: fp8, by torchao, in the Accelerate file that is written beside the recipe"
MESH_SIZES = "parallelism_config_tp_size and parallelism_config_cp_size belong in the Accelerate file"
HALF = "mixed_precision: fp16 in the Accelerate file that is written beside the recipe"
CHECKPOINTING = "fsdp_activation_checkpointing belongs in the Accelerate file"
SHARDING = "sharding belongs in the Accelerate file"
FOUND = "read from the model itself; remove it"
ALWAYS = "always the case here; remove it"
BITSANDBYTES = "of the frozen base under LoRA, by bitsandbytes"
INT8 = "the base's weights are in 8 bits there and here; the inputs of its layers are rounded to 8 bits there only"
COMPUTE = "the compute dtype is the Accelerate file's, and the 4-bit weights are stored in it"
HUB = "after the run: finetune export RUN --output DIR --push-to-hub REPO"
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
IMAGE_SIZE = "the model's own image processor, as its files configure it, decides the size"
TOWER = "the tower and the projector are frozen; true is the default there too"
TOKEN = "a mapping of the four names; a pad_token is left out beside adapters, which would train the embedding for it"
MISTRAL = "mistral-v7-tekken, mistral-v11-tekken and mistral-v13-tekken are mistral-common's texts"
TEMPLATE = "chat_template takes the tokenizer's own, a family's name, a file or inline Jinja"
OWN_DATA = "an entry of datasets; columns are recognized, or named with prompt_column, messages_column, ..."
RESUMES = "a run whose output_dir has a checkpoint resumes; name another output_dir to start over"
OFFLOADED = "to host memory, where the Accelerate file turns activation checkpointing on"
MEMORY_AND_SPEED = "memory and speed only; the loss is the same"
ONE_LOSS = "one chunked loss is built in"
LAUNCHER = "the launcher starts the ranks"
PROMPTS_MASKED = "true; of a prompt and its completion in two columns the prompt is never trained on"
LABEL_LOSSES = ("use_dft_loss", "use_dft", "use_eaft_loss", "use_eaft")  # -> token_loss
WEIGHTED = "dft or eaft"

# What TRL and Axolotl call alike, mostly after transformers' TrainingArguments.
SHARED = (
    Counterpart("lora_target_modules", "lora_target_modules", "", "targets"),
    Counterpart("lora_target_parameters", "lora_target_parameters", "", "parameters"),
    Counterpart("lora_modules_to_save", "modules_to_save", "", "names"),
    Counterpart("load_in_4bit", "load_in_4bit", BITSANDBYTES, "on-if-true"),
    Counterpart("load_in_8bit", "load_in_8bit", INT8, "on-if-true", inexact=True),
    Counterpart("attn_implementation", "attn_implementation", "", "attention"),
    Counterpart("max_steps", "max_steps", "", "steps"),
    Counterpart("max_grad_norm", "max_grad_norm", "", "clip"),
    Counterpart("warmup_steps", "warmup_steps", "below 1 it is a share: warmup_ratio", "warmup"),
    Counterpart("save_steps", "save_steps", "", "steps"),
    Counterpart("eval_steps", "eval_steps", "", "steps"),
    Counterpart("evaluation_strategy", "eval_strategy", "the older name", "strategy"),
    Counterpart("eval_strategy", "eval_strategy", "", "strategy"),
    Counterpart("save_strategy", "save_strategy", "best is keep_best_checkpoint: true", "strategy"),
    *(Counterpart(f"lr_scheduler_kwargs.min_lr_{name}", "min_lr_ratio") for name in ("rate", "ratio")),
    Counterpart("lr_scheduler_kwargs.min_lr", "min_lr_ratio", "divided by the learning rate", "min-rate"),
    Counterpart("lr_scheduler_kwargs.lr_end", "min_lr_ratio", "divided by the learning rate", "min-rate"),
    *(
        Counterpart(f"lr_scheduler_kwargs.{name}", "lr_scheduler_kwargs", "", "schedule-argument")
        for name in ("power", "timescale", "num_decay_steps", "decay_type")
    ),
    Counterpart("label_smoothing_factor", "label_smoothing", "the held-out loss is without it here"),
    Counterpart("neftune_noise_alpha", "neftune_noise_alpha", NOISE, inexact=True),
    Counterpart("resume_from_checkpoint", "resume_from_checkpoint", "", "resume"),
    Counterpart("ddp_timeout", "timeout_seconds"),
    *in_accelerate_file(CHECKPOINTING, "gradient_checkpointing"),
    *ignored(CHECKPOINTING, "gradient_checkpointing_kwargs"),
)  # fmt: skip

TRL = (
    Counterpart("datasets", "datasets", "a mixture: each is an entry of datasets", "by-code"),
    Counterpart("dataset_mixer", "datasets", "an entry for each, its share of the rows as split: train[:50%], or weight: 0.125", "by-code"),
    Counterpart("dataset_splits", "datasets", "split of the entries of dataset_mixer", "by-code"),
    Counterpart("dataset_configs", "datasets", "name of the entries of dataset_mixer", "by-code"),
    Counterpart("dataset_mixture", "datasets", "a mixture: each is an entry of datasets", "by-code"),
    Counterpart("eval_datasets", "eval_datasets", "a mixture: each is an entry of eval_datasets", "by-code"),
    Counterpart("test_split_size", "eval_split_size", "a share below 1, else a count of rows", "on-if-true"),
    Counterpart("dataset_name", "datasets", OWN_DATA, "by-code"),
    Counterpart("dataset_config", "datasets", "name of an entry of datasets", "by-code"),
    Counterpart("dataset_train_split", "datasets", "split of an entry of datasets", "by-code"),
    Counterpart("dataset_test_split", "eval_datasets", "an entry of eval_datasets with this split", "by-code"),
    Counterpart("dataset_text_field", "datasets", "text_column of an entry of datasets", "by-code"),
    Counterpart("dataset_streaming", "streaming"),
    *(Counterpart(key, "dtype", "of the parameters; the compute dtype belongs in the Accelerate file", "dtype") for key in ("torch_dtype", "dtype")),
    Counterpart("max_seq_length", "max_length", "TRL's older name"),
    Counterpart("chat_template_path", "chat_template", TEMPLATE),
    *SHARED,
    Counterpart("lr_scheduler_type", "lr_scheduler_type", SCHEDULE_NAMES, "schedule"),
    Counterpart("optim", "optim", OPTIMIZER_NAMES, "optimizer"),
    Counterpart("report_to", "report_to", "one tracker", "tracker"),
    *in_accelerate_file(PRECISION, "bf16"),
    *in_accelerate_file(HALF, "fp16"),
    *in_accelerate_file(SHARDING, "fsdp", "fsdp_config", "deepspeed"),
    *without_counterpart("best-fit decreasing, isolated per document, always", "packing_strategy"),
    Counterpart("use_bnb_nested_quant", "bnb_4bit_use_double_quant"),
    *ignored(COMPUTE, "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
    Counterpart("eos_token", "special_tokens", "special_tokens: {eos_token: ...}", "by-code"),
    *ignored("causal models are the only ones", "lora_task_type"),
    *ignored("padding is not trained on", "pad_token", "padding_free", "eval_packing", "group_by_length"),
    Counterpart("completion_only_loss", "assistant_only_loss", PROMPTS_MASKED, "by-code"),
    *ignored(RESUMES, "overwrite_output_dir"),
    *ignored(HUB, "push_to_hub", "hub_model_id", "hub_model_revision", "hub_strategy", "hub_private_repo", "hub_token"),
    *ignored("always the case here", "do_train", "do_eval", "remove_unused_columns", "dataset_kwargs", "average_tokens_across_devices"),
    *ignored("loss is logged every logging_steps", "logging_strategy", "logging_first_step", "log_level"),
    *ignored("the whole state is always saved; save_total_limit bounds how often", "save_only_model"),
    *ignored("the cache is keyed by everything that affects the tokens", "preprocessing_num_workers", "wandb_entity", "wandb_project"),
)  # fmt: skip

AXOLOTL = (
    Counterpart("base_model", "model_name_or_path"),
    Counterpart("revision_of_model", "model_revision"),
    Counterpart("tokenizer_config", "tokenizer_name_or_path"),
    Counterpart("datasets", "datasets", OWN_DATA, "by-code"),
    Counterpart("pretraining_dataset", "datasets", "an entry of datasets of type text, with streaming: true", "by-code"),
    Counterpart("test_datasets", "eval_datasets", OWN_DATA, "by-code"),
    Counterpart("val_set_size", "eval_split_size", "a share below 1, else a count of rows", "on-if-true"),
    Counterpart("dataset_prepared_path", "dataset_cache_dir"),
    Counterpart("dataset_processes", "dataset_num_proc"),
    Counterpart("chat_template", "chat_template", TEMPLATE, "template"),
    Counterpart("chat_template_jinja", "chat_template"),
    Counterpart("tokenizer_use_mistral_common", "chat_template", MISTRAL, "by-code"),
    Counterpart("sequence_len", "max_length"),
    Counterpart("excess_length_strategy", "overlength", "dropped where it is not given", "overlength"),
    Counterpart("sample_packing", "packing"),
    Counterpart("train_on_inputs", "assistant_only_loss", "the opposite value", "not"),
    Counterpart("adapter", "use_peft", "lora and qlora are use_peft: true; qlora is load_in_4bit: true as well", "adapter"),
    Counterpart("bnb_config_kwargs.bnb_4bit_quant_type", "bnb_4bit_quant_type"),
    Counterpart("bnb_config_kwargs.bnb_4bit_use_double_quant", "bnb_4bit_use_double_quant"),
    Counterpart("lora_target_linear", "lora_target_modules", "true is all-linear", "all-linear"),
    Counterpart("peft_use_dora", "use_dora"),
    Counterpart("peft_use_rslora", "use_rslora"),
    Counterpart("micro_batch_size", "per_device_train_batch_size"),
    Counterpart("batch_size", "gradient_accumulation_steps", "divided by micro_batch_size", "by-code"),
    Counterpart("eval_batch_size", "per_device_eval_batch_size"),
    Counterpart("num_epochs", "num_train_epochs"),
    Counterpart("optimizer", "optim", OPTIMIZER_NAMES, "optimizer"),
    Counterpart("lr_scheduler", "lr_scheduler_type", SCHEDULE_NAMES, "schedule"),
    *SHARED,
    Counterpart("noisy_embedding_alpha", "neftune_noise_alpha", NOISE, inexact=True),
    Counterpart("cosine_min_lr_ratio", "min_lr_ratio"),
    Counterpart("adam_eps", "adam_epsilon"),
    Counterpart("sdp_attention", "attn_implementation", "true is sdpa; null: packed attention is built in", "attention"),
    Counterpart("wandb_project", "report_to", "report_to: wandb; the project is the environment's WANDB_PROJECT", "tracker"),
    Counterpart("mlflow_tracking_uri", "report_to", "report_to: mlflow; the address is MLFLOW_TRACKING_URI", "tracker"),
    Counterpart("trackio_project_name", "report_to", "report_to: trackio", "tracker"),
    Counterpart("wandb_name", "run_name"),
    Counterpart("auto_resume_from_checkpoints", "resume_from_checkpoint", "auto, the default here", "resume"),
    *in_accelerate_file(PRECISION, "bf16", "bfloat16"),
    *in_accelerate_file(HALF, "fp16", "float16"),
    *in_accelerate_file(SHARDING, "fsdp", "fsdp_config", "fsdp_version", "deepspeed", "dp_shard_size", "dp_replicate_size"),
    Counterpart("evals_per_epoch", "eval_steps", "a share of the run: 1 / (evals_per_epoch x num_epochs)", "by-code"),
    Counterpart("saves_per_epoch", "save_steps", "a share of the run: 1 / (saves_per_epoch x num_epochs)", "by-code"),
    *without_counterpart("no quadratic warm-up; it is linear here", "lr_quadratic_warmup", "cosine_constant_lr_ratio"),
    *(Counterpart(f"special_tokens.{name}", "special_tokens", TOKEN, "by-code") for name in TOKEN_NAMES),
    Counterpart("special_tokens.additional_special_tokens", "added_tokens", "", "by-code"),
    Counterpart("tokens", "added_tokens", "", "by-code"),
    Counterpart("eot_tokens", "eot_tokens", "", "names"),
    Counterpart("resize_token_embeddings_to_32x", "pad_vocab_to_multiple_of", "32 where it is true", "by-code"),
    *unsupported("other texts for reserved tokens", "added_tokens_overrides"),
    Counterpart("unfrozen_parameters", "trainable_modules", "patterns; a range of rows, as in [:32000], is not supported", "module-patterns"),
    *unsupported("ReLoRA", "relora", "relora_steps", "relora_prune_ratio", "jagged_restart_steps"),
    *unsupported("rope scaling", "rope_scaling"),
    *unsupported("another config than the model's", "overrides_of_model_config", "overrides_of_model_kwargs"),
    *unsupported("PoSE", "use_pose", "pose_num_chunks", "pose_max_context_len", "pose_split_on_token_ids"),
    *unsupported("MixLoRA", "mixlora_num_experts", "mixlora_top_k", "mixlora_router_aux_loss_coef"),
    *unsupported("another start of adapters", "peft_init_lora_weights", "loftq_config", "peft_layer_replication"),
    *unsupported("training rows of a tensor", "peft_trainable_token_indices"),
    *unsupported("another optimizer", "optim_target_modules", "qgalore_rank", "dion_lr"),
    *unsupported("another loss (LD-DPO)", "dpo_ld_alpha"),
    *without_counterpart("rows of any length are trained on", "min_sample_len"),
    *without_counterpart("rows that are alike are kept", "dataset_exact_deduplication"),
    *without_counterpart("rows are shuffled with the seed", "curriculum_sampling", "sample_packing_sequentially"),
    *without_counterpart("system turns are read from the rows", "default_system_message"),
    *without_counterpart("tokens keep the embedding that they have", "fix_untrained_tokens", "reinit_weights"),
    Counterpart("lora_rank_pattern", "rank_pattern"), Counterpart("lora_alpha_pattern", "alpha_pattern"),
    Counterpart("full_determinism", "deterministic", "", "flag"),
    Counterpart("mlflow_run_name", "run_name"),
    *(Counterpart(f"use_{name}", "report_to", f"report_to: {name}", "tracker") for name in ("wandb", "tensorboard", "mlflow", "trackio")),
    Counterpart("load_best_model_at_end", "keep_best_checkpoint", "", "flag"),
    *ignored(MEMORY_AND_SPEED, "dataloader_pin_memory", "dataloader_prefetch_factor", "dataset_keep_in_memory", "ddp_bucket_cap_mb",
             "ddp_broadcast_buffers", "device_map", "max_memory", "gpu_memory_limit", "gc_steps", "gc_collect_steps", "low_cpu_mem_usage",
             "torch_empty_cache_steps", "include_tkps", "include_tokens_per_second", "logging_nan_inf_filter", "profiler_steps",
             "profiler_steps_start", "sample_packing_bin_size", "sample_packing_eff_est", "sample_packing_group_size",
             "sample_packing_mp_start_method", "multipack_real_batches", "pretrain_multipack_buffer_size", "pad_to_multiple_of",
             "streaming_multipack_buffer_size", "tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "deepcompile",
             "torch_compile_backend", "torch_compile_mode", "layer_offloading", "selective_checkpointing", "heads_k_stride",
             "ring_attn_func", "lora_embedding_kernel", "dpo_use_liger_kernel", "chunked_cross_entropy_num_chunks", "lora_on_cpu",
             "fsdp_final_state_dict_type", "qlora_sharded_model_loading", "batch_flattening", "sdpa_varlen", "large_head_attention",
             "flash_attn_d512"),
    *ignored("part of the environment", "use_comet", "comet_project_name", "comet_workspace", "comet_mode", "comet_online", "use_ray",
             "mlflow_experiment_name", "hf_mlflow_log_artifacts", "ray_num_workers", "ray_run_name", "resources_per_worker",
             "use_otel_metrics", "gradio_title", "gradio_share", "gradio_max_new_tokens", "gradio_temperature"),
    *ignored("the held-out loss decides", "metric_for_best_model", "greater_is_better"),
    *ignored(FOUND, "is_qwen_derived_model", "mean_resizing_embeddings", "tokenizer_save_jinja_files"),
    *unsupported("LoRA+", "loraplus_lr_ratio", "loraplus_lr_embedding"),
    *unsupported("LISA", "lisa_n_layers", "lisa_step_interval", "lisa_layers_attribute"),
    *unsupported("LoftQ", "peft"), Counterpart("qat", "quantization_aware_training", "inputs of int8 with weights of int4: int8-int4", "by-code"),
    *(Counterpart(key, "token_loss", WEIGHTED, "by-code") for key in LABEL_LOSSES),
    Counterpart("eaft_k", "token_loss", "20 of the likeliest tokens", "by-code"),
    *in_accelerate_file(FP8, "fp8", "fp8_enable_fsdp_float8_all_gather"),
    *in_accelerate_file(MESH_SIZES, "tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"),
    Counterpart("lora_model_dir", "adapter_name_or_path", "a LoRA adapter to train further"),
    *unsupported("learning rates by layer", "lr_groups", "embedding_lr", "embedding_lr_scale"),
    *unsupported("LoRA on some layers", "peft_layers_to_transform"),
    Counterpart("activation_offloading", "activation_offload", OFFLOADED, "flag"),
    *ignored(MEMORY_AND_SPEED, "experimental_skip_move_to_device"),
    *ignored(COMPUTE, "bnb_config_kwargs.bnb_4bit_compute_dtype", "bnb_config_kwargs.bnb_4bit_quant_storage"),
    *without_counterpart(IMAGE_SIZE, "image_size", "image_resize_algorithm", "processor_kwargs"),
    *ignored(FOUND, "processor_type", "is_multimodal", "model_type", "tokenizer_type", "is_llama_derived_model", "base_model_config", "tokenizer_use_fast",
               "tokenizer_legacy", "gptq", "is_mistral_derived_model", "is_falcon_derived_model", "cls_model_config"),
    *ignored(ALWAYS, "pad_to_sequence_len", "eval_sample_packing", "group_by_length", "shuffle_merged_datasets",
        "remove_unused_columns", "skip_prepare_dataset", "ddp_find_unused_parameters", "max_packed_sequence_len"),
    *ignored("packed attention is built in; attn_implementation: flash_attention_2 asks for the package",
        "flash_attention", "xformers_attention", "flash_attn_fuse_mlp", "flash_attn_rms_norm", "flash_optimum",
        "flex_attention", "flex_attn_compile_kwargs", "flash_attn_cross_entropy", "s2_attention"),
    *ignored(ONE_LOSS, "plugins", "liger_fused_linear_cross_entropy", "cut_cross_entropy", "liger_rope",
        "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_rms_norm_gated", "liger_cross_entropy",
        "chunked_cross_entropy", "use_kernels", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
        "fused_attn_kernel", "experts_implementation", "use_scattermoe", "use_sonicmoe"),
    *ignored("experts are quantized with the rest of the base", "quantize_moe_experts"),
    *ignored("the weights are loaded as their files hold them, each rank its own slices", "model_quantization_config",
        "model_quantization_config_kwargs"),
    Counterpart("model_config", None, "for the routers' auxiliary loss, router_aux_loss_coef; the rest is the model's own"),
    *ignored("a run whose loss is not finite stops", "loss_watchdog_threshold", "loss_watchdog_patience", "strict",
        "debug", "early_stopping_metric", "local_rank", "torchdistx_path", "lora_fan_in_fan_out", "hf_use_auth_token"),
    *ignored("greedy answers: exact_match_samples, sample_prompts", "eval_table_size", "eval_max_new_tokens",
        "do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval"),
    *ignored("part of the environment (WANDB_ENTITY, WANDB_RUN_ID, ...)", "wandb_entity", "wandb_watch", "wandb_log_model",
               "wandb_run_id", "wandb_mode", "trackio_run_name", "trackio_space_id", "use_swanlab", "swanlab_project",
               "swanlab_experiment_name", "swanlab_description", "swanlab_mode", "swanlab_log_completions", "swanlab_workspace",
               "swanlab_log_model", "swanlab_completion_log_interval", "swanlab_completion_max_buffer", "otel_metrics_host", "otel_metrics_port"),
    *ignored(HUB, "hub_model_id", "hub_strategy", "push_dataset_to_hub"),
    *ignored("exports are safetensors, and the whole state is always saved", "save_safetensors", "save_only_model"),
    *AXOLOTL_PREFERENCES,
)  # fmt: skip

LAYERWISE = {  # optimizers of LLaMA-Factory without a kept library, and their keys
    "GaLore": ("target", "rank", "update_interval", "scale", "proj_type", "layerwise"),
    "APOLLO": ("target", "rank", "update_interval", "scale", "proj", "proj_type", "scale_type", "layerwise", "scale_front"),
    "BAdam": ("mode", "start_block", "switch_mode", "switch_interval", "update_ratio", "mask_mode", "verbose"),
}  # fmt: skip
LLAMA_FACTORY = (
    Counterpart("finetuning_type", "use_peft", "lora is use_peft: true, full is false; freeze is trainable_modules", "adapter"),
    Counterpart("lora_rank", "lora_r"),
    Counterpart("lora_target", "lora_target_modules", "all is all-linear", "targets"),
    Counterpart("dataset", "datasets", "each name is looked up in dataset_info.json, in the folder dataset_dir", "by-code"),
    Counterpart("eval_dataset", "eval_datasets", "as dataset", "by-code"),
    Counterpart("max_samples", "datasets", "max_samples of each entry; its first rows are split: train[:1000]", "by-code"),
    Counterpart("template", "chat_template", TEMPLATE, "template"),
    Counterpart("cutoff_len", "max_length"),
    Counterpart("packing", "packing"), Counterpart("neat_packing", "packing", "true is packing: true", "flag"),
    Counterpart("train_on_prompt", "assistant_only_loss", "the opposite value", "not"),
    Counterpart("preprocessing_num_workers", "dataset_num_proc"),
    Counterpart("tokenized_path", "dataset_cache_dir"),
    Counterpart("val_size", "eval_split_size", "a share below 1, else a count of rows", "on-if-true"),
    Counterpart("flash_attn", "attn_implementation", "auto: packed attention is built in", "attention"),
    Counterpart("enable_liger_kernel", "use_liger_kernel"),
    Counterpart("moe_aux_loss_coef", "router_aux_loss_coef"),
    *in_accelerate_file("pure_bf16 is dtype: bfloat16", "pure_bf16"),
    *in_accelerate_file("on or off in the Accelerate file", "disable_gradient_checkpointing"),
    *without_counterpart("only the last answer is trained with a message's `train: false`", "mask_history"),
    Counterpart("quantization_bit", "load_in_4bit", "4 is load_in_4bit: true, 8 is load_in_8bit: true", "bits"),
    Counterpart("quantization_method", "load_in_4bit", "bitsandbytes is the only one", "quantizer"),
    Counterpart("quantization_type", "bnb_4bit_quant_type"),
    Counterpart("double_quantization", "bnb_4bit_use_double_quant"),
    *(Counterpart(key, "token_loss", WEIGHTED, "by-code") for key in LABEL_LOSSES),
    Counterpart("use_asft_loss", "method", "distill, from the model before training, with token_loss: dft", "by-code"),
    Counterpart("asft_alpha", "distill_alpha", "asft_alpha / (1 + asft_alpha)", "by-code"),
    *unsupported("mixture of depths", "mixture_of_depths"),
    Counterpart("freeze_trainable_layers", "trainable_modules", "the first or last layers, by their numbers", "by-code"),
    Counterpart("freeze_trainable_modules", "trainable_modules", "the modules of these layers", "by-code"),
    Counterpart("freeze_extra_modules", "trainable_modules", "beside the layers", "by-code"),
    Counterpart("additional_target", "modules_to_save", "", "names"),
    Counterpart("use_muon", "optim", "updates scaled as by Moonshot", "optimizer-flag"),
    *(pair for name, keys in LAYERWISE.items() for pair in unsupported(name, *(f"{name.lower()}_{key}" for key in keys), f"use_{name.lower()}")),
    *unsupported("Adam-mini", "use_adam_mini"),
    *unsupported("PiSSA", "pissa_init"),
    *in_accelerate_file(FP8, "fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
    *unsupported("KTransformers", "use_kt", "kt_weight_path", "kt_expert_checkpoint_path", "kt_optimize_rule"),
    *unsupported("LoRA+", "loraplus_lr_ratio"),
    *unsupported("rope scaling", "rope_scaling"),
    *(Counterpart(key, "added_tokens", "", "by-code") for key in ("add_tokens", "add_special_tokens")),
    *ignored("the embedding grows where the tokens need it", "resize_vocab"),
    Counterpart("adapter_name_or_path", "adapter_name_or_path", "a LoRA adapter to train further"),
    *unsupported("a new adapter on a merged one", "create_new_adapter"),
    *unsupported("mixing by probability", "mix_strategy", "interleave_probs", note="weight of an entry of datasets"),
    *ignored("each entry of datasets has its own path", "dataset_dir"),
    Counterpart("media_dir", "datasets", "image_folder of each entry with images", "by-code"),
    *(Counterpart(f"freeze_{part}", "trainable_modules", TOWER, "by-code") for part in ("vision_tower", "multi_modal_projector", "language_model")),
    *without_counterpart(IMAGE_SIZE, "image_max_pixels", "image_min_pixels", "image_do_pan_scan", "crop_to_patches"),
    *ignored("data with videos or sound is refused", "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate"),
    *ignored("finetune report RUN draws the loss, and more", "plot_loss"),
    *ignored("the cache is keyed by everything that affects the tokens", "overwrite_cache"),
    *ignored(ONE_LOSS, "use_unsloth"),
    *ignored("always the case here", "do_predict", "predict_with_generate"),
    *ignored(LAUNCHER, "ray_num_workers", "ray_run_name", "ray_storage_path", "resources_per_worker", "placement_strategy"),
    *ignored("the model's own chat template writes the tools", "tool_format", "use_v1_kernels"),
    *without_counterpart("thoughts are written as the chat template writes them; chat_template_kwargs of a row is given to it", "enable_thinking"),
    *ignored(HUB, "export_dir", "export_hub_model_id"),
    *FACTORY_PREFERENCES,
)  # fmt: skip
# What LLaMA-Factory takes from TrainingArguments, as TRL does.
_NOT_ITS = {
    "datasets",
    "dataset_mixer",
    "dataset_mixture",
    "packing_strategy",
    "chat_template_path",
    "completion_only_loss",
}
_TRAINER = {pair.theirs for pair in LLAMA_FACTORY} | _NOT_ITS
LLAMA_FACTORY += tuple(pair for pair in TRL if pair.theirs not in _TRAINER and not pair.theirs.startswith("dataset_"))
TRL += TRL_PREFERENCES


Tool = Literal["TRL", "Axolotl", "LLaMA-Factory", "torchtune", "Automodel"]
TOOL_NAMES: tuple[Tool, ...] = get_args(Tool)

OWN_FOLDER = "output_dir is the run's folder, for everything"
NF4_OF_TORCHAO = "NF4 by torchao there and by bitsandbytes here: the same codes, scales rounded differently"
SCHEDULE = "pipeline_schedule is 1f1b, or interleaved_1f1b; the losses are the same"
ADAPTED_HEAD = "LoRA on the head"
TRUNCATED = (
    "completions are sampled from all of the vocabulary: a truncated distribution is not the one that is trained"
)
LAYOUT = "sharding, mixed_precision and activation checkpointing belong in the Accelerate file"

TORCHTUNE = (
    Counterpart("batch_size", "per_device_train_batch_size"),
    Counterpart("batch_size_val", "per_device_eval_batch_size"),
    Counterpart("epochs", "num_train_epochs"),
    Counterpart("max_steps_per_epoch", "max_steps", "times the epochs", "by-code"),
    Counterpart("lr", "learning_rate"),
    Counterpart("clip_grad_norm", "max_grad_norm", "", "clip"),
    Counterpart("lora_rank", "lora_r"),
    Counterpart("compile", "torch_compile"),
    Counterpart("log_every_n_steps", "logging_steps"),
    Counterpart("run_val_every_n_steps", "eval_steps"),
    Counterpart("save_every_n_steps", "save_steps"),
    Counterpart("resume_from_checkpoint", "resume_from_checkpoint", "", "resume"),
    Counterpart("dataset", "datasets", "source or data_files is the path of an entry of datasets", "by-code"),
    Counterpart("dataset_val", "eval_datasets", "as dataset", "by-code"),
    *in_accelerate_file(PRECISION, "dtype"),
    *in_accelerate_file(CHECKPOINTING, "enable_activation_checkpointing"),
    *in_accelerate_file(SHARDING, "fsdp_cpu_offload", "fsdp_reshard_after_forward", "data_parallel_replicate_dim", "data_parallel_shard_dim"),
    *TORCHTUNE_PREFERENCES,
    Counterpart("checkpointer.checkpoint_dir", "model_name_or_path", "a local folder, or the hub name it came from",
        "by-code"),
    Counterpart("tokenizer.max_seq_len", "max_length"),
    Counterpart("tokenizer.prompt_template", "chat_template", "as chat_template", "template"),
    Counterpart("dataset.packed", "packing"),
    Counterpart("dataset.train_on_input", "assistant_only_loss", "the opposite value", "not"),
    Counterpart("optimizer.lr", "learning_rate"),
    Counterpart("optimizer._component_", "optim", OPTIMIZER_NAMES, "optimizer"),
    Counterpart("optimizer.weight_decay", "weight_decay"),
    Counterpart("optimizer.eps", "adam_epsilon"),
    Counterpart("optimizer.betas", "adam_beta2", "adam_beta1 and adam_beta2", "betas"),
    Counterpart("lr_scheduler._component_", "lr_scheduler_type", "cosine, linear or constant", "schedule"),
    Counterpart("lr_scheduler.num_warmup_steps", "warmup_steps"),
    Counterpart("model.lora_rank", "lora_r", "with use_peft: true", "lora-only"),
    Counterpart("model.lora_alpha", "lora_alpha"),
    Counterpart("model.lora_dropout", "lora_dropout"),
    Counterpart("model.lora_attn_modules", "lora_target_modules", "with the MLP's where apply_lora_to_mlp is set",
        "by-code"),
    Counterpart("model.apply_lora_to_mlp", "lora_target_modules", "gate_proj, up_proj and down_proj", "by-code"),
    Counterpart("model.use_dora", "use_dora"),
    Counterpart("model.quantize_base", "load_in_4bit", NF4_OF_TORCHAO, "on-if-true", inexact=True),
    Counterpart("metric_logger._component_", "report_to", "one tracker", "tracker"),
    Counterpart("checkpointer.keep_last_n_checkpoints", "save_total_limit"),
    Counterpart("optimizer_in_bwd", "optim_in_backward", "", "flag"),
    Counterpart("enable_activation_offloading", "activation_offload", OFFLOADED, "flag"),
    Counterpart("teacher_model", "method", "distill, from the teacher_checkpointer's model", "by-code"),
    Counterpart("teacher_checkpointer", "teacher_model_name_or_path", "as checkpointer", "by-code"),
    Counterpart("kd_loss", "distill_beta", "forward KL is 0, reverse KL is 1", "by-code"),
    Counterpart("kd_ratio", "distill_alpha", "the share of the divergence", "by-code"),
    Counterpart("quantizer", "quantization_aware_training", "Int8DynActInt4WeightQATQuantizer is int8-int4", "by-code"),
    *unsupported(ADAPTED_HEAD, "model.apply_lora_to_output"),
    *in_accelerate_file(MESH_SIZES, "tensor_parallel_dim", "context_parallel_dim"),
    *in_accelerate_file(LAYOUT, "fsdp.cpu_offload"),
    *unsupported("early exit", "early_exit_loss", "layer_dropout"),
    *in_accelerate_file(FP8, "enable_fp8_training", "fp8_recipe_name"),
    *ignored("the tokenizer of model_name_or_path is used", "tokenizer.path", "tokenizer.merges_file",
        "tokenizer._component_", "tokenizer.vocab_path", "tokenizer.merges_path"),
    *ignored("read from the model itself", "model._component_", "checkpointer._component_", "checkpointer.model_type",
        "checkpointer.checkpoint_files", "checkpointer.adapter_checkpoint"),
    *ignored(ONE_LOSS, "loss", "loss._component_", "loss.num_output_chunks"),
    *ignored(OWN_FOLDER, "checkpointer.output_dir", "metric_logger.log_dir", "metric_logger.project"),
    *ignored("memory and speed only; the loss is the same", "optimizer.fused", "custom_sharded_layers",
        "tensor_parallel_plan", "low_cpu_ram", "ac_mode", "ac_option", "memory_efficient_fsdp_wrap",
        "optimizer.foreach", "activation_offloading_use_streams"),
    *ignored("always the case here", "shuffle", "log_peak_memory_stats", "checkpointer.recipe_checkpoint", "log_level",
        "save_adapter_weights_only", "save_last_epoch_only", "epochs_to_save", "enable_async_checkpointing"),
    *ignored("the launch decides: GPUs where there are any", "device"),
    *ignored("profile_steps", "profiler"),
    *ignored("read where it is used", "base_model_path", "name"),
)  # fmt: skip

AUTOMODEL = (
    Counterpart("model.pretrained_model_name_or_path", "model_name_or_path"),
    Counterpart("model.torch_dtype", "dtype", "of the parameters", "dtype"),
    Counterpart("model.attn_implementation", "attn_implementation", "", "attention"),
    Counterpart("model.trust_remote_code", "trust_remote_code"),
    Counterpart("tokenizer.pretrained_model_name_or_path", "tokenizer_name_or_path"),
    Counterpart("peft.dim", "lora_r", "with use_peft: true", "lora-only"),
    Counterpart("peft.alpha", "lora_alpha"),
    Counterpart("peft.dropout", "lora_dropout"),
    Counterpart("peft.use_dora", "use_dora"),
    Counterpart("peft.match_all_linear", "lora_target_modules", "true is all-linear", "all-linear"),
    Counterpart("peft.target_modules", "lora_target_modules", "", "targets"),
    Counterpart("step_scheduler.global_batch_size", "global_batch_size"),
    Counterpart("step_scheduler.local_batch_size", "per_device_train_batch_size"),
    Counterpart("step_scheduler.max_steps", "max_steps", "", "steps"),
    Counterpart("step_scheduler.num_epochs", "num_train_epochs"),
    Counterpart("step_scheduler.val_every_steps", "eval_steps"),
    Counterpart("step_scheduler.ckpt_every_steps", "save_steps"),
    Counterpart("optimizer._target_", "optim", OPTIMIZER_NAMES, "optimizer"),
    Counterpart("optimizer.lr", "learning_rate"),
    Counterpart("optimizer.weight_decay", "weight_decay"),
    Counterpart("optimizer.eps", "adam_epsilon"),
    Counterpart("optimizer.betas", "adam_beta2", "adam_beta1 and adam_beta2", "betas"),
    Counterpart("lr_scheduler.lr_decay_style", "lr_scheduler_type", "cosine, linear or constant", "schedule"),
    Counterpart("lr_scheduler.lr_warmup_steps", "warmup_steps"),
    Counterpart("lr_scheduler.min_lr", "min_lr_ratio", "divided by the learning rate", "min-rate"),
    Counterpart("clip_grad_norm.max_norm", "max_grad_norm", "", "clip"),
    Counterpart("packed_sequence.packed_sequence_size", "packing", "above 0: packing: true with this max_length",
        "by-code"),
    Counterpart("dataset", "datasets", "an entry of datasets", "by-code"),
    Counterpart("validation_dataset", "eval_datasets", "an entry of eval_datasets", "by-code"),
    Counterpart("rng.seed", "seed"),
    Counterpart("quantization.load_in_4bit", "load_in_4bit", BITSANDBYTES, "on-if-true"),
    Counterpart("quantization.load_in_8bit", "load_in_8bit", INT8, "on-if-true", inexact=True),
    Counterpart("quantization.bnb_4bit_quant_type", "bnb_4bit_quant_type"),
    Counterpart("quantization.bnb_4bit_use_double_quant", "bnb_4bit_use_double_quant"),
    Counterpart("compile.enabled", "torch_compile"),
    Counterpart("wandb.name", "run_name"),
    Counterpart("teacher_model", "teacher_model_name_or_path", "with method: distill", "by-code"),
    Counterpart("qat", "quantization_aware_training", "Int8DynActInt4WeightQATQuantizer is int8-int4", "by-code"),
    Counterpart("kd_loss_fn", "distill_beta", "the forward KL divergence: 0", "by-code"),
    Counterpart("kd_ratio", "distill_alpha", "the share of the divergence", "by-code"),
    *ignored("the teacher is spread as the model is", "teacher_distributed", "separate_meshes"),
    *in_accelerate_file(LAYOUT, "distributed.strategy", "distributed.activation_checkpointing",
        "distributed.offload_policy", "distributed.dp_replicate_size", "distributed._target_", "distributed.mp_policy"),
    *in_accelerate_file(MESH_SIZES, *(f"distributed.{key}" for key in DIVISIONS)),
    Counterpart("distributed.ep_size", "expert_parallel_size"),
    Counterpart("distributed.pp_size", "pipeline_parallel_size"),
    *without_counterpart(SCHEDULE, "distributed.pipeline"),
    *in_accelerate_file(LAYOUT, "distributed.cpu_offload"),
    *in_accelerate_file(FP8, "fp8.enabled", "fp8.recipe_name", "fp8.enable_fsdp_float8_all_gather"),
    *unsupported("multi-token prediction", "model.num_nextn_predict_layers"),
    *without_counterpart("all packed rows are trained on", "packed_sequence.max_packs"),
    *without_counterpart("the tokenizer's own files say which tokens begin and end a text", "tokenizer.add_bos_token",
        "tokenizer.add_eos_token"),
    *without_counterpart("adapters of experts have the rank of the others", "peft.moe_rank_scaling"),
    Counterpart("neftune.noise_alpha", "neftune_noise_alpha", NOISE, inexact=True),
    Counterpart("model.router_aux_loss_coef", "router_aux_loss_coef"),
    Counterpart("peft.exclude_modules", "lora_target_modules", "the layers that get adapters are named", "by-code"),
    *ignored("the recipe is fine-tuning", "recipe"),
    *(Counterpart(f"freeze_config.freeze_{part}", "trainable_modules", TOWER, "by-code")
      for part in ("vision_tower", "audio_tower", "language_model", "embeddings")),
    *ignored("the model's own image processor is used", "processor", "freeze_config"),
    *ignored("model_name_or_path is loaded by transformers", "model"),
    *ignored(ONE_LOSS, "loss_fn", "loss_fn._target_"),
    *ignored(COMPUTE, "quantization.bnb_4bit_compute_dtype", "quantization.bnb_4bit_quant_storage"),
    *ignored("the launch decides", "dist_env", "distributed", "ci", "skypilot", "slurm", "benchmark", "nvtx",
        "prewarm"),
    *ignored(OWN_FOLDER, "checkpoint", "wandb", "mlflow", "comet"),
    *ignored("batches are built here", "dataloader", "validation_dataloader", "packed_sequence"),
    *ignored("speed only; the loss is the same", "compile", "fp8", "optimizer", "peft", "rng", "step_scheduler",
        "quantization", "parallelizer", "lr_scheduler", "tokenizer", "moe_metrics", "offload_teacher_model"),
)  # fmt: skip

# Of TRL's GRPO trainer, beside the keys that have the same name here. finetune/convert/objectives.py reads them.
TRL_ONLINE = (
    Counterpart("reward_funcs", "rewards", "functions of files, or shipped ones by our names", "by-code"),
    Counterpart("scale_rewards", "scale_rewards", "true is group, false is none", "by-code"),
    Counterpart("max_completion_length", "max_completion_length", "with max_prompt_length it is max_length", "by-code"),
    Counterpart("steps_per_generation", "steps_per_generation", "micro-batches there, optimizer steps here", "by-code"),
    Counterpart("max_prompt_length", "max_length", "with max_completion_length", "by-code"),
    Counterpart("generation_batch_size", "steps_per_generation", "divided by the completions of a step", "by-code"),
    Counterpart("top_k", "temperature", TRUNCATED, "by-code"),
    Counterpart("multi_objective_aggregation", "reward_weights", "sum_then_normalize is what is done here", "by-code"),
    *ignored("of a loss or an entropy term that is not supported", "sapo_temperature_neg", "sapo_temperature_pos",
        "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "entropy_coef_min", "entropy_coef_max",
        "entropy_coef_delta", "entropy_target"),
    *without_counterpart(TRUNCATED, "top_p", "min_p", "repetition_penalty"),
    *(pair for key in ("delta", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
                       "off_policy_mask_threshold", "use_bias_correction_kl")
      for pair in unsupported(f"GRPO with {key}", key)),
    Counterpart("max_tool_calling_iterations", "max_tool_calling_iterations", "with tools, which have no key there",
                "by-code"),
    Counterpart("vllm_server_base_url", "vllm_server_base_url", "with use_vllm and vllm_mode: server", "by-code"),
    *(Counterpart(f"vllm_{key}", "vllm_server_base_url", "of a server's address", "by-code")
      for key in ("mode", "server_host", "server_port")),
    Counterpart("vllm_server_timeout", "vllm_server_timeout", "with a server", "by-code"),
    Counterpart("vllm_importance_sampling_mode", "importance_sampling_correction", "with a server", "by-code"),
    *(Counterpart(f"vllm_importance_sampling_{key}", f"importance_sampling_{ours}", "with a server", "by-code")
      for key, ours in (("correction", "correction"), ("clip_max", "clip_max"), ("cap", "clip_max"),
                        ("clip_min", "clip_min"))),
    *ignored("the model in training samples itself, unless vllm_server_base_url names a server of vLLM's own", "use_vllm", "use_transformers_paged",
             "use_transformers_continuous_batching", "transformers_continuous_batching_config",
             "cache_implementation", "generation_kwargs", *(
                 f"vllm_{key}" for key in (
                     "model_impl", "enable_sleep_mode", "structured_outputs_regex", "group_port",
                     "gpu_memory_utilization", "max_model_length", "tensor_parallel_size"))),
    *ignored("completions.jsonl has what log_completions says", "log_completions", "num_completions_to_print",
        "log_unique_prompts", "log_multimodal", "log_completions_hub_repo", "wandb_log_unique_prompts"),
    *ignored("held-out prompts are answered once, greedily", "num_generations_eval"),
    *ignored("always the case here", "shuffle_dataset", "remove_unused_columns", "pad_to_multiple_of",
        "cast_lm_head_to_fp32", "ds3_gather_for_generation"),
)  # fmt: skip

TOOLS: Mapping[Tool, tuple[Counterpart, ...]] = {
    "TRL": TRL,
    "Axolotl": AXOLOTL,
    "LLaMA-Factory": LLAMA_FACTORY,
    "torchtune": TORCHTUNE,
    "Automodel": AUTOMODEL,
}

# Of a data set, one of several in a file.
ALPACA_PROMPT = (
    "chat_template: alpaca writes their prompt, but is one for all datasets, and another one is read by a chat template"
)
ALPACA_STYLE = "chat_template: alpaca writes the '### Instruction:' style alone"
FILES = "an entry for each file; the files of a hub data set cannot be picked"
COLUMNS = "columns are recognized, or named with prompt_column, messages_column, ..."
TURNS = "turns are read from role or from, and content or value"
ROLES = "user, assistant, system and tool are known, human, gpt, function_call and observation too"
TRAINED = "the assistant's turns are trained, each with its end token; assistant_only_loss: false trains every turn"
PAIR = "only a prompt and a completion column can be named; type alpaca reads instruction, input and output"
PREFERENCE = (
    "chosen_column, rejected_column and label_column under stage: dpo and kto; under sft completion_column: "
    "chosen trains on "
    "the chosen answers alone, and on_bad_row: skip drops rows that are labeled false"
)
SLICE = "a split slice, such as split: train[:1000]"
FOLDER = "path takes a file, glob, folder or hub name"
SYSTEM = "system turns are read from the rows"
ENTRY_KEYS: Mapping[Tool, tuple[Counterpart, ...]] = {
    "TRL": (
        Counterpart("data_files", "path", FILES),
        *without_counterpart(FOLDER, "data_dir"),
        *without_counterpart(COLUMNS, "columns"),
    ),
    "Axolotl": (
        Counterpart("data_files", "path", FILES),
        Counterpart("type", "type", "else the rows' format is recognized from the columns"),
        Counterpart("field_messages", "messages_column"),
        Counterpart("field_instruction", "prompt_column", "of type alpaca, and in a type that names columns"),
        Counterpart("field_output", "completion_column", "of type alpaca, and in a type that names columns"),
        Counterpart("field", "text_column", "of type completion"),
        Counterpart("field_chosen", "chosen_column"),
        Counterpart("field_rejected", "rejected_column"),
        *without_counterpart(TRAINED, "roles_to_train", "train_on_eos", "train_on_eot", "message_field_training",
            "message_field_training_detail"),
        *without_counterpart(TURNS, "message_field_role", "message_field_content", "message_property_mappings"),
        *without_counterpart(ROLES, "roles"),
        *without_counterpart(PAIR, "field_input", "field_system", "system_prompt", "system_format", "format",
            "no_input_format"),
        *without_counterpart(SYSTEM, "drop_system_message"),
        *without_counterpart("chat_template is one for all datasets", "chat_template", "chat_template_jinja"),
        *without_counterpart("the kind of file follows from its name", "ds_type"),
        *without_counterpart(FOLDER, "data_dir"),
        *without_counterpart(SLICE, "shards", "shards_idx", "preprocess_shards"),
        *without_counterpart("not supported", "revision", "trust_remote_code", "split_thinking", "field_tools"),
    ),
    "LLaMA-Factory": (
        Counterpart("file_name", "path"),
        Counterpart("hf_hub_url", "path"),
        Counterpart("subset", "name"),
        Counterpart("formatting", "type"),
        Counterpart("columns.messages", "messages_column"),
        Counterpart("columns.prompt", "prompt_column"),
        Counterpart("columns.response", "completion_column"),
        *without_counterpart(TURNS, "tags.role_tag", "tags.content_tag"),
        *without_counterpart(ROLES, "tags.user_tag", "tags.assistant_tag", "tags.observation_tag", "tags.function_tag",
            "tags.system_tag"),
        *without_counterpart(PREFERENCE, "ranking", "columns.chosen", "columns.rejected", "columns.kto_tag"),
        *without_counterpart(PAIR, "columns.query"),
        *without_counterpart("type alpaca reads the column of that name", "columns.history"),
        *without_counterpart("types sharegpt and alpaca read the column of that name", "columns.system",
            "columns.tools"),
        Counterpart("columns.images", None, "images are read from the column images or image; rename it"),
        *unsupported("video", "columns.videos"),
        *unsupported("audio", "columns.audios"),
        Counterpart("num_samples", "max_samples", "drawn by the seed"),
        *without_counterpart(FOLDER, "folder", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"),
    ),
    "torchtune": (
        Counterpart("source", "path"),
        Counterpart("data_files", "path", FILES),
        Counterpart("column", "text_column", "of text_completion_dataset"),
        Counterpart("conversation_column", "messages_column"),
        Counterpart("column_map.input", "prompt_column",
            "of instruct_dataset; alpaca_dataset has instruction for it, and its input column is not read"),
        Counterpart("column_map.output", "completion_column", "of instruct_dataset and alpaca_dataset"),
        Counterpart("column_map.chosen", "chosen_column", "of preference_dataset"),
        Counterpart("column_map.rejected", "rejected_column", "of preference_dataset"),
        *without_counterpart("the rows' format is recognized from the columns", "_component_", "conversation_style"),
        *without_counterpart(PAIR, "column_map"),
        *without_counterpart("packing and assistant_only_loss are for all datasets", "packed", "train_on_input"),
        *without_counterpart(
            "documents are never split by packing; overlength: split is for those longer than max_length",
            "split_across_pack"),
        *without_counterpart(SYSTEM, "new_system_prompt"),
        *without_counterpart(FOLDER, "data_dir"),
        *without_counterpart("not supported", "filter_fn", "filter_kwargs", "image_dir", "image_tag", "add_eos"),
    ),
    "Automodel": (
        Counterpart("path_or_dataset_id", "path"),
        Counterpart("path_or_dataset", "path"),
        Counterpart("dataset_name", "path"),
        Counterpart("column_mapping.question", "prompt_column", "of ColumnMappedTextInstructionDataset"),
        Counterpart("column_mapping.answer", "completion_column", "of ColumnMappedTextInstructionDataset"),
        Counterpart("limit_dataset_samples", "split", "a slice, such as split: train[:1000]"),
        Counterpart("num_samples_limit", "split", "a slice, such as split: train[:1000]"),
        Counterpart("chat_template", "chat_template", "one for all datasets"),
        *without_counterpart("rows are drawn in an order of seed", "shuffle_seed"),
        *without_counterpart("the answer is what is trained on", "mask_reasoning_content"),
        *without_counterpart(PAIR, "column_mapping.context"),
    ),
}  # fmt: skip

# Each tool's defaults in our keys; written out where ours differ. warmup_steps: None means that warmup_ratio decides.
TRAINER = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "save_steps": 500,
    "save_total_limit": None,
}
COMPONENTS = {"packing": False, "lr_scheduler_type": "constant", "warmup_steps": 0, "save_total_limit": None}
UNLIMITED = {"max_length": 8192, "overlength": "error"}
UNLIMITED_NOTE = (
    "no limit of length there: a row of over 8192 tokens stops the run here; raise max_length for longer ones"
)
DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": TRAINER | {"max_length": 1024, "packing": False, "assistant_only_loss": False},
    "Axolotl": {"max_length": 512, "packing": False, "warmup_ratio": 0.03, "save_total_limit": 4},
    "LLaMA-Factory": TRAINER | {"packing": False, "learning_rate": 5e-5, "use_peft": True},
    "torchtune": COMPONENTS | {"max_grad_norm": None},
    "Automodel": COMPONENTS | {"num_train_epochs": 10.0},
}
LORA_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "TRL": {"lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]},
    "Axolotl": {"lora_r": 8, "lora_alpha": 8},
    "LLaMA-Factory": {"lora_r": 8},
    "torchtune": {"lora_r": 8, "lora_alpha": 16},
    "Automodel": {"lora_r": 8},
}
# Of a 4-bit base: the settings that each tool gives bitsandbytes where the file gives none (torchtune: torchao's NF4).
FOUR_BIT_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    tool: {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": tool != "TRL"} for tool in TOOL_NAMES
}

# Whose file it is.
FEW_NAMES = 3  # of a tool's own, above which a file is taken for one of its files


def recognize_tool(theirs: Mapping[str, Any]) -> Tool | None:
    """Whose file it is, by the keys that only one of them has."""
    if any("nemo_automodel" in text for text in find_texts(theirs, "_target_")) or "step_scheduler" in theirs:
        return "Automodel"
    if any(True for _ in find_texts(theirs, "_component_")):
        return "torchtune"
    if "base_model" in theirs or {"sequence_len", "micro_batch_size"} & theirs.keys():
        return "LLaMA-Factory" if is_factory_v1(theirs) else "Axolotl"
    if {"finetuning_type", "stage", "cutoff_len", "template", "export_dir"} & theirs.keys() or is_factory_v1(theirs):
        return "LLaMA-Factory"
    return "TRL" if "model_name_or_path" in theirs else None


def is_factory_v1(theirs: Mapping[str, Any]) -> bool:
    """Whether a file is in LLaMA-Factory's v1 schema."""
    return "model" in theirs and bool(
        {"train_dataset", "dist_config", "sample_backend", "kernel_config"} & theirs.keys()
    )


def find_texts(value: Any, key: str) -> Iterator[str]:
    """Every text under `key`, however deep."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str):
                yield inner
            else:
                yield from find_texts(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find_texts(inner, key)


def find_writer(file: Mapping[str, Any]) -> Tool | None:
    """The tool for which a file was written, by as many names of its own as no recipe has by mistake.

    >>> find_writer({"base_model": "a/b", "datasets": [], "sequence_len": 2048, "micro_batch_size": 1})
    'Axolotl'
    >>> find_writer({"model_name_or_path": "a/b", "datasets": [], "sequence_len": 2048})
    """
    tool = recognize_tool(file)
    if tool is None or is_factory_v1(file):
        return tool
    names = {pair.theirs.partition(".")[0] for pair in TOOLS[tool]} - recipe_keys().keys()
    return tool if len(names & file.keys()) >= FEW_NAMES else None


# What the reader answers to another tool's key or value in a recipe.
# Top-level keys of an Accelerate file; after the first eight, those that are for its launcher alone.
ACCELERATE_KEYS = frozenset(
    """
    distributed_type mixed_precision use_cpu num_machines fsdp_config parallelism_config deepspeed_config fp8_config
    compute_environment machine_rank main_process_ip main_process_port main_training_function num_processes rdzv_backend
    rdzv_conf same_network debug downcast_bf16 enable_cpu_affinity gpu_ids tpu_env tpu_use_cluster tpu_use_sudo tpu_name
    tpu_zone commands command_file num_cpu_threads_per_process max_restarts monitor_interval
    """.split()  # noqa: SIM905 - a name a line would be a page
)
# What many call what a key of an Accelerate file says: name -> that key.
IN_ACCELERATE_FILE: Mapping[str, str] = {
    **{key: f"parallelism_config_{key}" for key in GROUP_KEYS},
    "tp_config": f"parallelism_config_{GROUP_KEYS[0]}",
    "sequence_parallel_size": "parallelism_config_sp_size",
    "cpu_offload": "fsdp_offload_params",
    "offload_params": "fsdp_offload_params",
}
# What many call a key of the recipe, in a recipe or an Accelerate file: name -> that key.
IN_RECIPE: Mapping[str, str] = {
    **dict.fromkeys(("ep_size", "expert_parallel_degree"), "expert_parallel_size"),
    **dict.fromkeys(
        ("pp_size", "parallelism_config_pp_size", "pipeline_parallel_degree", "pipeline_model_parallel_size"),
        "pipeline_parallel_size",
    ),
    "pp_schedule": "pipeline_schedule",
}
# The same, of names that no other tool's file has; whose nearest spelling is often another key.
OFTEN_MEANT: Mapping[str, str] = {
    "model_name_or_path": "model model_name model_path model_id pretrained_model",
    "tokenizer_name_or_path": "tokenizer tokenizer_path",
    "datasets": "data data_path data_files dataset_path train_data train_file train_files train_dataset",
    "eval_datasets": "eval_data eval_file val_data val_file validation_file validation_data test_data",
    "lora_r": "r rank lora_dim",
    "lora_alpha": "alpha",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "max_length": "seq_len sequence_length context_length max_seq_len max_tokens block_size",
    "eval_split_size": "validation_split val_split test_size validation_size",
    "per_device_train_batch_size": "per_device_batch_size train_batch_size device_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps accumulation_steps",
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
    "assistant_only_loss": "completion_only mask_prompt response_template instruction_part response_part",
    "chat_template": "prompt_template",
}
UNSLOTH_PARTS = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
LAUNCHED = "no such key; --num-processes N says how many ranks run on this machine"
ADAPTERS = "no such key; use_peft: true trains LoRA adapters, with load_in_4bit: true on a base in 4 bits (QLoRA)"
QUANTIZED = "no such key; load_in_4bit: true keeps the frozen base of adapters in 4 bits, load_in_8bit: true in 8"
RECOMPUTED = (
    "no such key; accelerate_config: fsdp_full_shard recomputes activations, or under DDP ddp_checkpointing; in an "
    "Accelerate file of your own it is fsdp_activation_checkpointing: true"
)
ATTENTION = "no such key: packed attention is built in; attn_implementation: flash_attention_2 asks for the package"
PARTS_TRAINED = (
    "Unsloth's name; no such key: trainable_modules names what is trained by patterns, and lora_target_modules what is "
    "adapted; a vision tower is frozen without them"
)
SERVED = "Unsloth's name; no such key: the model in training samples itself, or the server of vllm_server_base_url does"
SOURCES_FORM = "[{path: FILE_OR_NAME}]"


def _list_often_meant() -> Iterator[tuple[str, tuple[str, str]]]:
    for ours, names in OFTEN_MEANT.items():
        shown = f"{ours}: {SOURCES_FORM}" if ours in NESTED else ours
        yield from ((name, (ours, f"no such key; here it is {shown}")) for name in names.split())


# Names whose nearest spelling is something else, or that are no key: name -> (the key that is meant, what to write).
MEANT: Mapping[str, tuple[str, str]] = {
    **dict(_list_often_meant()),
    **dict.fromkeys(("use_lora", "lora", "use_qlora", "qlora", "peft", "lora_enable"), ("use_peft", ADAPTERS)),
    "peft_type": ("use_peft", "peft's name; use_peft: true trains LoRA adapters, the only kind here"),
    "full_finetuning": (
        "use_peft",
        "Unsloth's name; no such key: all parameters are trained, unless use_peft: true adds adapters",
    ),
    **dict.fromkeys(("bits", "quantization", "quantize", "int4", "nf4", "4bit"), ("load_in_4bit", QUANTIZED)),
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
    "bias": ("", "peft's name; no such key: biases are frozen beside adapters, as with peft's bias: none"),
    "embedding_learning_rate": ("", "Unsloth's name; no such key: all that is trained has one learning_rate"),
    "load_in_16bit": ("", "Unsloth's name; no such key: the files' own precision is read, and dtype says what is kept"),
    "token": ("", "no such key: HF_TOKEN in the environment, or `hf auth login`, opens gated models"),
    "precision": ("", f"no such key: {PRECISION}, as accelerate_config: fsdp_full_shard has it"),
    "reward_model": (
        "rewards",
        "no such key; here it is rewards, such as [my_rewards.py:right], which may ask a model",
    ),
    "system_prompt": ("", "no such key: a system message is read from the rows, as the first of their messages"),
    **{name: ("report_to", f"no such key; here it is report_to: {name}") for name in ("wandb", "tensorboard")},
    "warmup": ("", "no such key; here it is warmup_steps, or the share warmup_ratio"),
    **dict.fromkeys(("images", "image_column"), ("", "no such key: images are read from the column images or image")),
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
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "gpus", "nproc", "nproc_per_node", "world_size"), ("", LAUNCHED)),
}
# Other tools' values of keys that are the same here: key -> their name -> ours.
OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": {other: ours for ours, facts in OPTIMIZERS.items() for other in facts.other_names},
    "lr_scheduler_type": {"constant_lr": "constant", "1-sqrt": "warmup_stable_decay"},
    "method": {
        "ipo": "method: dpo with loss_type: ipo",
        "rpo": "method: dpo with rpo_alpha",
        "gspo": "method: grpo with importance_sampling_level: sequence",
        "reinforce": "method: grpo with loss_type: reinforce++",
        **{
            name: f"method: grpo with loss_type: {name}" for name in ("dapo", "dr_grpo", "cispo", "rloo", "reinforce++")
        },
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
# Key -> their name -> why there is none.
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "method": dict.fromkeys(
        ("ppo", "rlhf"), "needs a model of values, which is not supported; grpo learns from rewards without one"
    ),
    "dtype": dict.fromkeys(
        ("fp16", "float16"),
        "parameters are kept in float32 or bfloat16; mixed_precision: fp16 computes in half precision",
    ),
    "optim": REFUSED_OPTIMIZERS,
    "lr_scheduler_type": {
        "cosine_with_restarts": "a rate that jumps back is not supported; cosine, or warmup_stable_decay",
        "reduce_lr_on_plateau": "the rate is a function of the step here; cosine, or warmup_stable_decay",
    },
    "save_strategy": {"best": "every new best is saved with keep_best_checkpoint: true"},
    "eval_strategy": {"best": "it is for save_strategy in Transformers; here see keep_best_checkpoint"},
}
