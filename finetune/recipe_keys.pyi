# Written by benchmarks/api_page.py.

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

class RecipeKeys(TypedDict, total=False):
    model_name_or_path: str | Path | None
    model_config: Mapping[str, Any] | None
    model_revision: str | None
    drop_vision: bool
    train_mtp: bool
    tokenizer_name_or_path: str | Path | None
    added_tokens: Sequence[str]
    special_tokens: Mapping[Literal['bos_token', 'eos_token', 'pad_token', 'unk_token'], str] | None
    eot_tokens: Sequence[str]
    pad_vocab_to_multiple_of: int
    trust_remote_code: bool
    dtype: Literal['float32', 'bfloat16']
    trainable_modules: Sequence[str]
    frozen_modules: Sequence[str]
    attn_implementation: Literal['auto', 'sdpa', 'eager', 'flex_attention', 'flash_attention_2', 'flash_attention_3', 'flash_attention_4']
    torch_compile: bool
    tf32: bool
    use_liger_kernel: bool
    activation_checkpointing_every: int
    activation_checkpointing_keeps: Literal['nothing', 'attention', 'attention_and_projections']
    activation_offload: bool
    attention_dropout: float | None
    router_aux_loss_coef: float | None
    expert_parallel_size: int
    pipeline_parallel_size: int
    pipeline_schedule: Literal['1f1b', 'interleaved_1f1b']
    method: Literal['sft', 'dpo', 'orpo', 'simpo', 'kto', 'distill', 'masked_diffusion', 'early_exit', 'grpo', 'ppo', 'on_policy_distill', 'reward', 'process_reward', 'classify', 'embed', 'rerank']
    beta: float
    loss_type: Literal['sigmoid', 'hinge', 'ipo', 'apo_zero', 'grpo', 'dapo', 'dr_grpo', 'cispo', 'rloo', 'reinforce++', 'dppo', 'pointwise', 'pairwise', 'listwise', 'listnet']
    rpo_alpha: float | None
    simpo_gamma: float
    desirable_weight: float
    undesirable_weight: float
    teacher_model_name_or_path: str | Path | None
    teacher_model_revision: str | None
    teacher_load_in_4bit: bool
    distill_beta: float
    temperature: float
    distill_top_k: int | None
    distill_alpha: float
    gamma: float
    lam: float
    vf_coef: float
    cliprange_value: float
    center_rewards_coefficient: float | None
    class_weights: Sequence[float]
    matryoshka_dims: Sequence[int]
    mask_token: str | int | None
    mask_eps: float
    exit_layers: Sequence[int] | str
    exit_curriculum: Literal['none', 'rotational', 'gradual']
    exit_weights: Literal['uniform', 'linear', 'sum', 'root', 'inverse', 'inverse_root']
    exit_scale: float
    layer_dropout: float
    layer_dropout_layers: Sequence[int] | str
    layer_dropout_schedule: Literal['uniform', 'exp', 'linear', 'log', 'sin', 'sigmoid']
    rewards: str | Callable[..., Any] | Mapping[str, Any] | Sequence[str | Callable[..., Any] | Mapping[str, Any]] | None
    tools: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None
    max_tool_calling_iterations: int | None
    environment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None
    environment_processes: int
    reward_weights: Sequence[float] | None
    num_generations: int
    max_completion_length: int
    num_iterations: int
    steps_per_generation: int
    max_num_gen_batches: int
    per_device_generation_batch_size: int
    vllm_server_base_url: str | Sequence[str] | None
    vllm_server_timeout: float
    max_staleness: int
    routing_replay: bool
    in_flight: Literal['keep', 'restart']
    scale_rewards: Literal['group', 'batch', 'none']
    epsilon: float
    epsilon_high: float | None
    importance_sampling_level: Literal['token', 'sequence']
    importance_sampling_correction: Literal['none', 'token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask', 'geometric_mask', 'decoupled']
    importance_sampling_clip_max: float
    importance_sampling_clip_min: float | None
    soft_punish_cache: int | None
    mask_truncated_completions: bool
    log_completions: int
    reward_timeout_seconds: float
    on_bad_reward: Literal['error', 'zero']
    use_peft: bool
    adapter_name_or_path: str | Path | None
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    lora_target_modules: Literal['all-linear'] | Sequence[str]
    lora_target_parameters: Sequence[str]
    rank_pattern: Mapping[str, int] | None
    alpha_pattern: Mapping[str, int] | None
    modules_to_save: Sequence[str]
    use_rslora: bool
    use_dora: bool
    oft_block_size: int | None
    adapters: Sequence[Mapping[str, Any]]
    load_in_4bit: bool
    load_in_8bit: bool
    bnb_4bit_quant_type: Literal['nf4', 'fp4']
    bnb_4bit_use_double_quant: bool
    quantization_aware_training: Literal['int4', 'int8', 'int8-int4', 'int8-int8', 'int4-packed', 'fp8-int4', 'fp8-fp8', 'nvfp4', 'mxfp4', 'int8-ternary'] | None
    qat_group_size: int | None
    fake_quant_after_n_steps: int
    datasets: Any  # sources, rows or a data set: see load_recipe
    eval_datasets: Any  # sources, rows or a data set: see load_recipe
    eval_split_size: float | None
    chat_template: str | Path | None
    chat_template_date: str | None
    max_length: int
    packing: bool
    overlength: Literal['truncate', 'drop', 'split', 'error'] | None
    assistant_only_loss: bool
    turns: Literal['auto', 'split', 'whole', 'last']
    train_on_reasoning: bool
    on_bad_row: Literal['error', 'skip']
    labels: Sequence[str]
    problem_type: Literal['single_label_classification', 'multi_label_classification']
    step_separator: str
    pooling: Literal['lasttoken', 'mean']
    query_prompt: str
    document_prompt: str
    num_negatives: int
    streaming: bool
    dataset_num_proc: int | None
    dataset_cache_dir: str | None
    dataloader_num_workers: int
    global_batch_size: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int | None
    per_device_eval_batch_size: int | None
    num_train_epochs: float
    max_steps: int | None
    learning_rate: float
    lr_scheduler_type: Literal['cosine', 'linear', 'constant', 'constant_with_warmup', 'cosine_with_min_lr', 'polynomial', 'inverse_sqrt', 'warmup_stable_decay']
    lr_scheduler_kwargs: Mapping[str, float | str] | None
    min_lr_ratio: float
    warmup_ratio: float
    warmup_steps: int | None
    optim: Literal['adamw_torch_fused', 'adamw_torch', 'adam', 'adamw_bf16_moments', 'adamw_8bit', 'adafactor', 'muon', 'sgd']
    optim_offload: Literal['none', 'nvme']
    offload_dir: str | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    neftune_noise_alpha: float | None
    label_smoothing: float
    token_loss: Literal['cross_entropy', 'dft', 'eaft']
    eaft_alpha: float
    optim_in_backward: bool
    max_grad_norm: float | None
    on_nonfinite: Literal['stop', 'skip']
    max_skipped_steps: int
    run_name: str | None
    output_dir: str | None
    accelerate_config: str | Path | None
    seed: int
    deterministic: bool
    logging_steps: int | float
    eval_strategy: Literal['no', 'steps', 'epoch']
    eval_steps: int | float | None
    exact_match_samples: int
    metrics: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None
    sample_prompts: Sequence[str]
    early_stopping_patience: int | None
    timeout_seconds: float
    profile_steps: Sequence[int] | None
    callbacks: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None
    report_to: Literal['none', 'all', 'tensorboard', 'wandb', 'mlflow', 'trackio'] | Sequence[Literal['tensorboard', 'wandb', 'mlflow', 'trackio']]
    save_strategy: Literal['no', 'steps', 'epoch']
    save_steps: int | float | None
    save_total_limit: int | None
    keep_every_steps: int | None
    keep_best_checkpoint: bool
    async_save: bool | None
    resume_from_checkpoint: str
    allow_changed_recipe: bool
    export_at_end: bool
    export_dtype: Literal['float32', 'bfloat16', 'float16'] | None
    export_formats: Sequence[Literal['safetensors', 'gguf', 'compressed-tensors']]
    export_quantization: Literal['int4', 'int8', 'int8-int4', 'int8-int8', 'int4-packed', 'fp8-int4', 'fp8-fp8', 'nvfp4', 'mxfp4', 'int8-ternary'] | None
