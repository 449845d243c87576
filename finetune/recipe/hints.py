"""The keys of other tools and ours, once: what the reader says of a foreign key, what `finetune convert` writes, and the
page docs/coming-from.md are all made from these tables. No torch here.

Sources: the configuration classes and documentation of TRL 1.9 with transformers 5 (SFTConfig, ModelConfig,
ScriptArguments, TrainingArguments), Axolotl 0.18, LLaMA-Factory (arguments of its `hparams`), torchtune (its recipes).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from finetune.recipe.schema import SECTIONS

Tool = Literal["TRL", "Axolotl", "LLaMA-Factory", "torchtune"]
# How a value is carried over; finetune/convert/values.py says what each does.
Carry = Literal[
    "same", "not", "adapter", "lora-only", "all-linear", "targets", "schedule", "optimizer", "attention", "tracker",
    "precision", "sharding", "dtype", "template", "data", "resume", "overlength", "on-if-true", "name",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One key of another tool. `ours` is None where there is none; `note` then says why, or what to do instead."""

    theirs: str  # dotted where it is nested
    ours: str | None
    note: str = ""
    carry: Carry = "same"
    inexact: bool = False  # nearly the same: carried over, and the note is told


def _none(note: str, *theirs: str) -> tuple[Counterpart, ...]:
    return tuple(Counterpart(key, None, note) for key in theirs)


def _into_accelerate(note: str, carry: Carry, *theirs: str, inexact: bool = False) -> tuple[Counterpart, ...]:
    return tuple(Counterpart(key, "accelerate_config", note, carry, inexact) for key in theirs)


PRECISION = "mixed_precision stands in the Accelerate file"
HALF = "the shipped Accelerate files compute in bf16; mixed_precision: fp16 there is what you had"
PURE = "bf16 is what it computes in here; parameters stay fp32 unless dtype: bfloat16"
CHECKPOINTING = "fsdp_activation_checkpointing stands in the Accelerate file"
SHARDING = "sharding stands in the Accelerate file"
FOUND = "found from the model itself; leave it out"
ALWAYS = "always so here; leave it out"
QUANTIZED = "4-bit and 8-bit weights are not supported: the frozen base of LoRA is bf16 here"
HUB = "after the run: finetune export RUN --output DIR --push-to-hub REPO"
TEMPLATE = "chat_template takes the tokenizer's own, chatml, llama3, a file or inline Jinja"
OWN_DATA = "an entry of datasets; columns are recognized, or named with prompt_column and the like"
EPOCHS_ONLY = "given in steps here; leave it out for only at the end"

TRL = (
    Counterpart("datasets", "datasets", "a mixture: each is an entry of datasets", "data"),
    Counterpart("eval_datasets", "eval_datasets", "a mixture: each is an entry of eval_datasets", "data"),
    Counterpart("test_split_size", "eval_split_size", "a share below 1, else a count of rows", "on-if-true"),
    Counterpart("dataset_name", "datasets", OWN_DATA, "data"),
    Counterpart("dataset_config", "datasets", "name of an entry of datasets", "data"),
    Counterpart("dataset_train_split", "datasets", "split of an entry of datasets", "data"),
    Counterpart("dataset_test_split", "eval_datasets", "an entry of eval_datasets with this split", "data"),
    Counterpart("dataset_text_field", "datasets", "text_column of an entry of datasets", "data"),
    Counterpart("dataset_streaming", "streaming"),
    Counterpart("torch_dtype", "dtype", "of the parameters; the compute dtype stands in the Accelerate file", "dtype"),
    Counterpart("max_seq_length", "max_length", "TRL's older name"),
    Counterpart("chat_template_path", "chat_template", TEMPLATE),
    Counterpart("lora_target_modules", "lora_target_modules", "", "targets"),
    Counterpart("lora_task_type", None, ALWAYS),
    Counterpart("evaluation_strategy", "eval_steps", EPOCHS_ONLY, "not"),
    Counterpart("eval_strategy", "eval_steps", EPOCHS_ONLY, "not"),
    Counterpart("save_strategy", "save_steps", EPOCHS_ONLY, "not"),
    Counterpart("logging_strategy", None, "given in logging_steps"),
    Counterpart("lr_scheduler_type", "lr_scheduler_type", "cosine, linear or constant", "schedule"),
    Counterpart("optim", "optim", "AdamW is the only one", "optimizer"),
    Counterpart("attn_implementation", "attn_implementation", "", "attention"),
    Counterpart("report_to", "report_to", "one tracker", "tracker"),
    Counterpart("resume_from_checkpoint", "resume_from_checkpoint", "", "resume"),
    Counterpart("ddp_timeout", "timeout_seconds"),
    *_into_accelerate(PRECISION, "precision", "bf16"),
    *_into_accelerate(HALF, "precision", "fp16", inexact=True),
    *_into_accelerate(CHECKPOINTING, "sharding", "gradient_checkpointing"),
    *_into_accelerate(SHARDING, "sharding", "fsdp", "fsdp_config", "deepspeed"),
    *_none(CHECKPOINTING, "gradient_checkpointing_kwargs"),
    *_none("a mask of completions only is the default for prompts and completions", "completion_only_loss"),
    *_none("best-fit decreasing, isolated per document, always", "packing_strategy", "padding_free", "eval_packing"),
    *_none("LoRA on linear layers only; the embedding and the head stay frozen", "lora_modules_to_save"),
    *_none(QUANTIZED, "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *_none("the tokenizer's own tokens are used", "eos_token", "pad_token"),
    *_none("not supported", "neftune_noise_alpha", "loss_type", "label_smoothing_factor", "group_by_length"),
    *_none("a run whose output_dir has a checkpoint goes on; name another output_dir to start anew", "overwrite_output_dir"),
    *_none(HUB, "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"),
    *_none("there is only this here", "do_train", "do_eval", "remove_unused_columns", "dataset_kwargs"),
    *_none("loss is logged per step over its trained tokens, always", "logging_first_step", "log_level"),
    *_none("the whole state is always saved; save_total_limit bounds how often", "save_only_model"),
)  # fmt: skip

AXOLOTL = (
    Counterpart("base_model", "model_name_or_path"),
    Counterpart("revision_of_model", "model_revision"),
    Counterpart("tokenizer_config", "tokenizer_name_or_path"),
    Counterpart("datasets", "datasets", OWN_DATA, "data"),
    Counterpart("test_datasets", "eval_datasets", OWN_DATA, "data"),
    Counterpart("val_set_size", "eval_split_size", "a share below 1, else a count of rows", "on-if-true"),
    Counterpart("dataset_prepared_path", "dataset_cache_dir"),
    Counterpart("dataset_processes", "dataset_num_proc"),
    Counterpart("chat_template", "chat_template", TEMPLATE, "template"),
    Counterpart("sequence_len", "max_length"),
    Counterpart("excess_length_strategy", "overlength", "", "overlength"),
    Counterpart("sample_packing", "packing"),
    Counterpart("train_on_inputs", "assistant_only_loss", "the opposite value", "not"),
    Counterpart("adapter", "use_peft", "lora and qlora are use_peft: true; 4-bit is not supported, the frozen base is bf16 here", "adapter"),
    Counterpart("lora_target_linear", "lora_target_modules", "true is all-linear", "all-linear"),
    Counterpart("lora_target_modules", "lora_target_modules", "", "targets"),
    Counterpart("peft_use_dora", "use_dora"),
    Counterpart("peft_use_rslora", "use_rslora"),
    Counterpart("micro_batch_size", "per_device_train_batch_size"),
    Counterpart("eval_batch_size", "per_device_eval_batch_size"),
    Counterpart("num_epochs", "num_train_epochs"),
    Counterpart("optimizer", "optim", "AdamW is the only one", "optimizer"),
    Counterpart("lr_scheduler", "lr_scheduler_type", "cosine, linear or constant", "schedule"),
    Counterpart("cosine_min_lr_ratio", "min_lr_ratio"),
    Counterpart("adam_beta1", "adam_beta1"),
    Counterpart("sdp_attention", "attn_implementation", "true is sdpa; left out, packed attention is built in", "attention"),
    Counterpart("wandb_project", "report_to", "report_to: wandb; the project is the environment's WANDB_PROJECT", "tracker"),
    Counterpart("use_wandb", "report_to", "report_to: wandb", "tracker"),
    Counterpart("mlflow_tracking_uri", "report_to", "report_to: mlflow; the address is MLFLOW_TRACKING_URI", "tracker"),
    Counterpart("use_tensorboard", "report_to", "report_to: tensorboard", "tracker"),
    Counterpart("wandb_name", "run_name"),
    Counterpart("auto_resume_from_checkpoints", "resume_from_checkpoint", "auto, the default here", "resume"),
    Counterpart("resume_from_checkpoint", "resume_from_checkpoint", "", "resume"),
    Counterpart("ddp_timeout", "timeout_seconds"),
    *_into_accelerate(PRECISION, "precision", "bf16", "bfloat16"),
    *_into_accelerate(HALF, "precision", "fp16", "float16", inexact=True),
    *_into_accelerate(CHECKPOINTING, "sharding", "gradient_checkpointing"),
    *_into_accelerate(SHARDING, "sharding", "fsdp", "fsdp_config", "fsdp_version", "deepspeed"),
    *_none(CHECKPOINTING, "gradient_checkpointing_kwargs"),
    *_none(FOUND, "model_type", "tokenizer_type", "is_llama_derived_model", "base_model_config", "tokenizer_use_fast"),
    *_none(ALWAYS, "pad_to_sequence_len", "eval_sample_packing", "group_by_length", "tf32", "shuffle_merged_datasets"),
    *_none("packed attention is built in; attn_implementation: flash_attention_2 asks for the package", "flash_attention"),
    *_none(QUANTIZED, "load_in_8bit", "load_in_4bit", "gptq"),
    *_none("the tokenizer's own tokens are used; tokenizer_name_or_path names another one", "special_tokens", "tokens"),
    *_none("LoRA on linear layers only; the embedding and the head stay frozen", "lora_modules_to_save"),
    *_none(EPOCHS_ONLY, "evals_per_epoch", "saves_per_epoch", "eval_strategy", "save_strategy"),
    *_none("one chunked loss is built in", "plugins", "liger_fused_linear_cross_entropy", "cut_cross_entropy"),
    *_none("not supported", "neftune_noise_alpha", "xformers_attention", "strict", "debug", "rl", "lora_model_dir",
           "early_stopping_metric", "relora_steps", "unfrozen_parameters", "loraplus_lr_ratio", "noisy_embedding_alpha"),
    *_none("part of the environment (WANDB_ENTITY, WANDB_RUN_ID, ...)", "wandb_entity", "wandb_watch", "wandb_log_model",
           "wandb_run_id"),
    *_none(HUB, "hub_model_id", "hub_strategy", "push_dataset_to_hub"),
    *_none("exports are safetensors, always", "save_safetensors"),
)  # fmt: skip

LLAMA_FACTORY = (
    Counterpart("stage", None, "sft, and pt with rows of type text; preference tuning has no counterpart"),
    Counterpart("finetuning_type", "use_peft", "lora is use_peft: true, full is false; freeze has no counterpart", "adapter"),
    Counterpart("lora_rank", "lora_r"),
    Counterpart("lora_target", "lora_target_modules", "all is all-linear", "targets"),
    Counterpart("dataset", "datasets", "each name is looked up in dataset_info.json, where it lies beside", "data"),
    Counterpart("eval_dataset", "eval_datasets", "as dataset", "data"),
    Counterpart("dataset_dir", None, "each entry of datasets has its own path"),
    Counterpart("template", "chat_template", TEMPLATE, "template"),
    Counterpart("cutoff_len", "max_length"),
    Counterpart("neat_packing", "packing"),
    Counterpart("packing", "packing"),
    Counterpart("train_on_prompt", "assistant_only_loss", "the opposite value", "not"),
    Counterpart("mask_history", "assistant_only_loss", "only the last answer is trained with a message's `train: false`", "name"),
    Counterpart("preprocessing_num_workers", "dataset_num_proc"),
    Counterpart("tokenized_path", "dataset_cache_dir"),
    Counterpart("val_size", "eval_split_size", "a share below 1, else a count of rows", "on-if-true"),
    Counterpart("flash_attn", "attn_implementation", "auto: packed attention is built in", "attention"),
    Counterpart("lr_scheduler_type", "lr_scheduler_type", "cosine, linear or constant", "schedule"),
    Counterpart("optim", "optim", "AdamW is the only one", "optimizer"),
    Counterpart("report_to", "report_to", "one tracker", "tracker"),
    Counterpart("resume_from_checkpoint", "resume_from_checkpoint", "", "resume"),
    Counterpart("ddp_timeout", "timeout_seconds"),
    *_into_accelerate(PRECISION, "precision", "bf16"),
    *_into_accelerate(HALF, "precision", "fp16", inexact=True),
    *_into_accelerate(PURE, "precision", "pure_bf16", inexact=True),
    *_into_accelerate(CHECKPOINTING, "sharding", "gradient_checkpointing"),
    *_into_accelerate(SHARDING, "sharding", "fsdp", "fsdp_config", "deepspeed"),
    *_none("on or off in the Accelerate file", "disable_gradient_checkpointing"),
    *_none("a split slice of an entry of datasets, such as split: train[:1000]", "max_samples"),
    *_none("finetune report RUN draws the loss, and more", "plot_loss"),
    *_none(EPOCHS_ONLY, "eval_strategy", "evaluation_strategy", "save_strategy"),
    *_none("a run whose output_dir has a checkpoint goes on; name another output_dir to start anew", "overwrite_output_dir"),
    *_none("the cache is keyed by all that made it", "overwrite_cache"),
    *_none(QUANTIZED, "quantization_bit", "quantization_method"),
    Counterpart("enable_liger_kernel", "use_liger_kernel"),
    *_none("one chunked loss is built in", "use_unsloth"),
    *_none("there is only this here", "do_train", "do_eval", "do_predict", "predict_with_generate"),
    *_none("the whole state is always saved", "save_only_model"),
    *_none("not supported", "rope_scaling", "neftune_noise_alpha", "freeze_trainable_layers", "pissa_init", "use_galore",
           "use_badam", "additional_target", "loraplus_lr_ratio", "resize_vocab", "mix_strategy"),
    *_none(HUB, "push_to_hub", "export_dir", "export_hub_model_id"),
    *_none("the base and the adapter are one recipe here", "adapter_name_or_path"),
)  # fmt: skip

TORCHTUNE = (
    Counterpart("checkpointer.checkpoint_dir", "model_name_or_path", "a local folder, or the hub name it came from"),
    Counterpart("tokenizer.max_seq_len", "max_length"),
    Counterpart("tokenizer.path", None, "the tokenizer of model_name_or_path is used; tokenizer_name_or_path names another"),
    Counterpart("tokenizer.prompt_template", "chat_template", TEMPLATE, "template"),
    Counterpart("dataset", "datasets", "source or data_files is the path of an entry of datasets", "data"),
    Counterpart("dataset_val", "eval_datasets", "as dataset", "data"),
    Counterpart("dataset.packed", "packing"),
    Counterpart("dataset.train_on_input", "assistant_only_loss", "the opposite value", "not"),
    Counterpart("batch_size", "per_device_train_batch_size"),
    Counterpart("batch_size_val", "per_device_eval_batch_size"),
    Counterpart("epochs", "num_train_epochs"),
    Counterpart("max_steps_per_epoch", "max_steps", "of the whole run, not of an epoch", inexact=True),
    Counterpart("lr", "learning_rate"),
    Counterpart("optimizer.lr", "learning_rate"),
    Counterpart("optimizer._component_", "optim", "AdamW is the only one", "optimizer"),
    Counterpart("optimizer.weight_decay", "weight_decay"),
    Counterpart("optimizer.eps", "adam_epsilon"),
    Counterpart("lr_scheduler._component_", "lr_scheduler_type", "cosine, linear or constant", "schedule"),
    Counterpart("lr_scheduler.num_warmup_steps", "warmup_steps"),
    Counterpart("clip_grad_norm", "max_grad_norm"),
    Counterpart("lora_rank", "lora_r"),
    Counterpart("model.lora_rank", "lora_r", "with use_peft: true", "lora-only"),
    Counterpart("model.lora_alpha", "lora_alpha"),
    Counterpart("model.lora_dropout", "lora_dropout"),
    Counterpart("model.lora_attn_modules", "lora_target_modules", "", "targets"),
    Counterpart("model.use_dora", "use_dora"),
    Counterpart("compile", "torch_compile"),
    Counterpart("log_every_n_steps", "logging_steps"),
    Counterpart("run_val_every_n_steps", "eval_steps"),
    Counterpart("save_every_n_steps", "save_steps"),
    Counterpart("metric_logger._component_", "report_to", "one tracker", "tracker"),
    Counterpart("resume_from_checkpoint", "resume_from_checkpoint", "", "resume"),
    *_into_accelerate(PRECISION, "precision", "dtype"),
    *_into_accelerate(CHECKPOINTING, "sharding", "enable_activation_checkpointing"),
    *_into_accelerate(SHARDING, "sharding", "fsdp_cpu_offload", "fsdp_reshard_after_forward", "data_parallel_replicate_dim"),
    *_none(FOUND, "model._component_", "tokenizer._component_", "checkpointer._component_", "checkpointer.model_type",
           "checkpointer.checkpoint_files"),
    *_none("lora_target_modules names every layer, those of the MLP too", "model.apply_lora_to_mlp", "model.apply_lora_to_output"),
    *_none("one chunked loss is built in", "loss", "loss._component_"),
    *_none("output_dir is the run's folder, for everything", "checkpointer.output_dir", "metric_logger.log_dir"),
    *_none("always the fused AdamW", "optimizer.fused", "optimizer_in_bwd"),
    *_none("always so here; leave it out", "shuffle", "log_peak_memory_stats", "checkpointer.recipe_checkpoint"),
    *_none("the launch decides: GPUs where there are any", "device"),
    *_none("not supported", "profiler", "enable_activation_offloading", "tensor_parallel_dim", "custom_sharded_layers",
           "log_level", "save_adapter_weights_only"),
)  # fmt: skip

TOOLS: Mapping[Tool, tuple[Counterpart, ...]] = {
    "TRL": TRL,
    "Axolotl": AXOLOTL,
    "LLaMA-Factory": LLAMA_FACTORY,
    "torchtune": TORCHTUNE,
}


def foreign_names() -> dict[str, tuple[str, str]]:
    """Other tools' names for keys of ours that are called differently here: name -> (whose it is, ours).

    >>> foreign_names()["sequence_len"], foreign_names()["lora_rank"][0]
    (("Axolotl's", 'max_length'), "LLaMA-Factory's and torchtune's")
    """
    own = {key.name for section in SECTIONS.values() for key in fields(section)}
    found: dict[str, tuple[list[str], str]] = {}
    for tool, counterparts in TOOLS.items():
        for pair in counterparts:
            if pair.ours is None or pair.theirs in own or "." in pair.theirs:
                continue
            meant = f"{pair.ours} ({pair.note})" if pair.ours == "accelerate_config" else pair.ours
            found.setdefault(pair.theirs, ([], meant))[0].append(f"{tool}'s")
    return {key: (" and ".join(whose[:2]), ours) for key, (whose, ours) in found.items()}
