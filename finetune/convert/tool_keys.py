"""The nested keys of torchtune's and NeMo Automodel's files, and every tool's defaults where they differ from ours.

Sources: torchtune's recipes and builders; Automodel's `recipes/llm/train_ft.py`, `components/optim/config.py`,
`components/_peft/lora.py`; torch's optimizers; the argument classes named in finetune/config/other_tools.py.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from finetune.config.layout import DIVISIONS
from finetune.config.other_tools import (
    AXOLOTL,
    BITSANDBYTES,
    COMPUTE,
    FP8,
    INT8,
    LLAMA_FACTORY,
    MESH_SIZES,
    NOISE,
    OFFLOADED,
    ONE_LOSS,
    OPTIMIZER_NAMES,
    TOWER,
    TRL,
    Counterpart,
    ignored,
    in_accelerate_file,
    unsupported,
    without_counterpart,
)
from finetune.config.other_tools import TORCHTUNE as TORCHTUNE_NAMES

Tool = Literal["TRL", "Axolotl", "LLaMA-Factory", "torchtune", "Automodel"]
TOOL_NAMES: tuple[Tool, ...] = get_args(Tool)

OWN_FOLDER = "output_dir is the run's folder, for everything"
NF4_OF_TORCHAO = "NF4 by torchao there and by bitsandbytes here: the same codes, scales rounded differently"
SCHEDULE = "pipeline_schedule is 1f1b, or interleaved_1f1b; the losses are the same"
ADAPTED_HEAD = "LoRA on the head"
TRUNCATED = "a truncated distribution is not the one that is trained: all of the vocabulary is sampled from here"
LAYOUT = "sharding, mixed_precision and activation checkpointing belong in the Accelerate file"

TORCHTUNE = (
    *TORCHTUNE_NAMES,
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
        "tokenizer._component_",
               "tokenizer.vocab_path", "tokenizer.merges_path"),
    *ignored("read from the model itself", "model._component_", "checkpointer._component_", "checkpointer.model_type",
               "checkpointer.checkpoint_files", "checkpointer.adapter_checkpoint"),
    *ignored(ONE_LOSS, "loss", "loss._component_", "loss.num_output_chunks"),
    *ignored(OWN_FOLDER, "checkpointer.output_dir", "metric_logger.log_dir", "metric_logger.project"),
    *ignored("memory and speed only; the loss is the same", "optimizer.fused", "custom_sharded_layers",
        "tensor_parallel_plan", "low_cpu_ram",
               "ac_mode", "ac_option", "memory_efficient_fsdp_wrap", "optimizer.foreach",
               "activation_offloading_use_streams"),
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
        "distributed.offload_policy",
             "distributed.dp_replicate_size", "distributed._target_", "distributed.mp_policy"),
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

# Of TRL's GRPO trainer, beside the keys that have the same name here. finetune/convert/online.py reads them.
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
             "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "entropy_coef_min",
             "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    *without_counterpart(TRUNCATED, "top_p", "min_p", "repetition_penalty"),
    *(pair for key in ("delta", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
                       "off_policy_mask_threshold", "use_bias_correction_kl")
      for pair in unsupported(f"GRPO with {key}", key)),
    *ignored("the model in training samples itself, with its own numerics", "use_vllm", "use_transformers_paged",
             "use_transformers_continuous_batching", "transformers_continuous_batching_config",
             "cache_implementation", "generation_kwargs", *(
                 f"vllm_{key}" for key in (
                     "mode", "model_impl", "enable_sleep_mode", "structured_outputs_regex", "server_base_url",
                     "server_host", "server_port", "server_timeout", "group_port", "gpu_memory_utilization",
                     "max_model_length", "tensor_parallel_size", "importance_sampling_correction",
                     "importance_sampling_mode", "importance_sampling_clip_max", "importance_sampling_clip_min",
                     "importance_sampling_cap"))),
    *ignored("completions.jsonl has what log_completions says", "log_completions", "num_completions_to_print",
        "log_unique_prompts",
               "log_multimodal", "log_completions_hub_repo", "wandb_log_unique_prompts"),
    *ignored("held-out prompts are answered once, greedily", "num_generations_eval"),
    *ignored("always the case here", "shuffle_dataset", "remove_unused_columns", "pad_to_multiple_of",
        "cast_lm_head_to_fp32",
               "ds3_gather_for_generation"),
)  # fmt: skip

TOOLS: Mapping[Tool, tuple[Counterpart, ...]] = {
    "TRL": TRL,
    "Axolotl": AXOLOTL,
    "LLaMA-Factory": LLAMA_FACTORY,
    "torchtune": TORCHTUNE,
    "Automodel": AUTOMODEL,
}

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
