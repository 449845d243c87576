"""The rulebook: each rule's sentence, and plan, dry run and start held to one answer on random recipes, layouts and models."""

import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from finetune.config.accelerate_file import FSDP_KEYS, MESH_KEYS
from finetune.config.compatibility import RULES, find_problems, refuse_problems
from finetune.config.exclusions import EXCLUSIONS, NOT_FOR_ALL_OPTIMIZERS, find_feature
from finetune.config.facts import (
    ACTIVATIONS,
    KINDS,
    MachineFacts,
    ModelFacts,
    names_vision_language,
    read_model_facts,
)
from finetune.config.layout import Fp8, Sharding
from finetune.config.other_names import ACCELERATE_KEYS
from finetune.config.reader import read_recipe
from finetune.config.rule import Case
from finetune.config.schema import Quantization, recipe_keys
from finetune.errors import UserError
from tests.conftest import slow_but

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 48,
}
MIXTURE = LLAMA | {"model_type": "mixtral", "num_local_experts": 12, "num_experts_per_tok": 2}
VISION = LLAMA | {"architectures": ["LForConditionalGeneration"], "vision_config": {}}
QWEN_VISION = VISION | {"model_type": "qwen3_vl_text"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FSDP2 = Sharding(
    layout="fsdp2", mixed_precision="bf16", activation_checkpointing=True, source="some.yaml"
)
TP = replace(FSDP2, tensor_parallel_size=4, shard_size=1)
SP = replace(FSDP2, sequence_parallel_size=4, shard_size=1)
EP = replace(FSDP2, expert_parallel_size=2)
CPU = MachineFacts(device="cpu")
A100 = MachineFacts(device="cuda", gpu="NVIDIA A100", capability=(8, 0))
MULTIPLY = "recipes/quickstart/multiply.py:multiply"
CODE = f"{Path(__file__)}:test_no_rule"
LORA, NVME = "use_peft=true", ["optim_offload=nvme", "offload_dir=/nvme"]
GRPO = ["method=grpo", "rewards=[length]", "max_completion_length=16"]
MASKED = ["method=masked_diffusion"]
EXITS = ["method=early_exit"]
PPO = ["method=ppo", "rewards=[length]", "max_completion_length=16", "beta=0"]
QAT = ["quantization_aware_training=int8-int4"]
ROWS = ["per_device_train_batch_size=2", "gradient_accumulation_steps=3"]
BACKWARD = ["optim_in_backward=true", "max_grad_norm=null"]

# What is asked of the recipe, the layout, its ranks, config.json, the machine -> a part of the sentence.
REFUSED: list[tuple[list[str], Sharding | None, int, dict[str, Any] | None, MachineFacts | None, str]] = [
    # layouts
    ([], Sharding(layout="single"), 2, None, None, "this layout is for one process, but 2 were launched"),
    ([], replace(FSDP2, strategy="HYBRID_SHARD"), 1, None, None, "hybrid sharding needs at least 2 ranks"),
    ([], TP, 8, None, None, "dp_shard_size 1 x tp_size 4 = 4, but 8 ranks were launched; set the sizes so that their product is 8"),
    ([], replace(FSDP2, num_machines=2), 1, None, None, "some.yaml: num_machines: 2, but --num-processes 1"),
    (["optim=adafactor"], Sharding(layout="fsdp1"), 2, None, None,
     "optim: adafactor cannot be combined with fsdp_version: 1: FSDP1 flattens the rows and columns that it averages over; set optim to one of "),
    (["optim=muon"], Sharding(layout="fsdp1"), 2, None, None, "optim: muon cannot be combined with fsdp_version: 1: FSDP1 flattens the matrices"),
    (["optim=muon"], replace(FSDP2, cpu_offload=True), 2, None, None,
     "optim: muon cannot be combined with fsdp_offload_params: the host would multiply whole matrices; set optim to one of adamw_torch_fused,"),
    (["token_loss=eaft"], TP, 4, None, None, "token_loss: eaft cannot be combined with tp_size"),
    (["optim=muon"], TP, 4, None, None, "optim: muon cannot be combined with tp_size"),
    (["optim=muon"], FSDP2, 2, MIXTURE, None, "it orthogonalizes matrices, and the experts of a layer are a stack of them"),
    (["optim=adamw_8bit"], Sharding(layout="fsdp1"), 2, None, None, "optim: adamw_8bit cannot be combined with fsdp_version: 1"),
    (["method=distill", "teacher_model_name_or_path=T"], Sharding(layout="fsdp1"), 2, None, None, "method: distill cannot be combined"),
    ([LORA, "load_in_4bit=true"], Sharding(layout="fsdp1", source="some.yaml"), 2, None, None,
     "load_in_4bit cannot be combined with fsdp_version: 1 (some.yaml): FSDP1 flattens and converts"),
    ([LORA, "lora_target_parameters=[experts.down_proj]"], Sharding(layout="fsdp1"), 2, None, None, "none of them can have an adapter"),
    ([LORA], Sharding(layout="fsdp1"), 1, None, None, "(LoRA's base, frozen_modules) cannot be combined with FSDP1 with NO_SHARD or one rank"),
    (["frozen_modules=[lm_head]"], Sharding(layout="fsdp1", strategy="NO_SHARD"), 2, None, None, "cannot be combined with FSDP1 with NO_SHARD or one rank"),
    # quantization-aware training
    (QAT, TP, 4, None, None, "cannot be combined with tp_size"),
    (QAT, replace(FSDP2, fp8=Fp8()), 1, None, None, "mixed_precision: fp8 cannot be combined with quantization_aware_training: int8-int4"),
    (["export_formats=[safetensors, compressed-tensors]", "export_quantization=int8"], None, 1, MIXTURE, None, "is a mixture or has"),
    (["export_formats=[safetensors, gguf]"], None, 1, LLAMA | {"model_type": "olmo2"}, None, "olmo2 is not among the families"),
    (QAT, None, 1, MIXTURE, None, "a mixture of experts cannot be combined with quantization_aware_training"),
    (QAT, None, 1, LLAMA | {"model_type": "falcon_h1"}, None, "recurrent layers cannot be combined with quantization_aware_training"),
    (QAT, None, 1, LLAMA | {"quantization_config": NF4}, None, "a quantized base cannot be combined with quantization_aware_training"),
    ([*QAT, "qat_group_size=64"], None, 1, LLAMA, None,
     "qat_group_size: 64 does not divide 96, the inputs of linear layers of M; set it to a divisor of 32, or to null"),
    # sampled completions
    (GRPO, None, 1, LLAMA | {"attention_dropout": 0.1, "classifier_dropout": 0.1}, None,
     "attention_dropout in the config of M cannot be combined with method: grpo: the model that learns would not be the one that was sampled"),
    (PPO, None, 1, LLAMA | {"model_type": "gpt2", "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0}, None,
     "attn_pdrop, resid_pdrop in the config of M cannot be combined with method: ppo"),
    # tensor parallelism
    (["optim=adafactor"], TP, 4, None, None, "optim: adafactor cannot be combined with tp_size"),
    (["optim=adamw_8bit"], TP, 4, None, None, "optim: adamw_8bit cannot be combined with tp_size"),
    ([LORA, "use_dora=true"], TP, 4, None, None, "use_dora cannot be combined with tp_size (some.yaml): peft adds DoRA's"),
    ([LORA, "oft_block_size=8"], TP, 4, None, None, "oft_block_size cannot be combined with tp_size (some.yaml): the inputs that are rotated are"),
    ([LORA, "load_in_4bit=true"], TP, 4, None, None, "torch divides a layer by its weight, and a quantized layer has codes"),
    (["torch_compile=true"], TP, 4, None, None, "torch_compile cannot be combined with tp_size"),
    (["use_liger_kernel=true"], TP, 4, None, None, "use_liger_kernel cannot be combined with tp_size"),
    (["neftune_noise_alpha=5"], TP, 4, None, None, "neftune_noise_alpha cannot be combined with tp_size"),
    (["attn_implementation=sdpa"], TP, 4, None, None, "attn_implementation: sdpa cannot be combined with tp_size"),
    (["activation_checkpointing_keeps=attention_and_projections"], TP, 4, None, None, "it finds its products by their sizes"),
    (["method=distill", "teacher_model_name_or_path=T"], TP, 4, None, None, "method: distill cannot be combined with tp_size"),
    ([], replace(TP, mixed_precision="fp16"), 4, None, None, "mixed_precision: fp16 cannot be combined with tp_size"),
    ([], replace(TP, fp8=Fp8()), 4, None, None, "mixed_precision: fp8 cannot be combined with tp_size"),
    ([], replace(TP, wrapping="NO_WRAP"), 4, None, None, "fsdp_auto_wrap_policy: NO_WRAP cannot be combined with tp_size"),
    ([], TP, 4, LLAMA | {"num_attention_heads": 6}, None,
     "num_attention_heads 6, and 6 / 4 leaves a remainder of 2; set tp_size to one of 1, 2"),
    ([], TP, 4, LLAMA | {"num_attention_heads": 6, "intermediate_size": 102}, None,
     "intermediate_size 102, and 102 / 4 leaves a remainder of 2; num_att"),
    ([], TP, 4, LLAMA | {"num_key_value_heads": 2}, None, "num_key_value_heads 2, and 2 / 4 leaves a remainder of 2"),
    ([], TP, 4, LLAMA | {"model_type": "phi3", "head_dim": 3, "num_key_value_heads": 2}, None, "num_key_value_heads x head_dim 6"),
    ([], TP, 4, LLAMA | {"vocab_size": 5}, None, "vocab_size 5, too few rows for 4 ranks"),
    ([], TP, 4, MIXTURE, None, "tp_size 4: not supported for mixtral, the family of M; only for llama, "),
    (["optim=adamw_bf16_moments"], TP, 4, LLAMA | {"vocab_size": 509}, None, "cannot be combined with an uneven vocabulary"),
    # sequence parallelism
    ([], replace(SP, fp8=Fp8()), 4, None, None, "mixed_precision: fp8 cannot be combined with cp_size"),
    (["attn_implementation=sdpa"], SP, 4, None, None, "attn_implementation: sdpa cannot be combined with cp_size"),
    (["max_length=32"], SP, 4, LLAMA | {"model_type": "gemma2", "num_attention_heads": 6}, None,
     "cp_size (or sp_size) 4 must divide the attention heads of gemma2, whose scores"),
    # tables of positions
    (["max_length=49"], None, 1, LLAMA | {"model_type": "opt"}, None,
     "max_length: 49: M embeds positions by a table, which ends after 48; set max_length: 48"),
    (["max_length=24", "packing=true", "per_device_train_batch_size=3"], None, 1, LLAMA | {"model_type": "gpt_neo"}, None,
     "the attention of M takes packed rows of no more than 48 tokens"),
    # vision-language models
    (["drop_vision=true"], None, 1, LLAMA, None, "drop_vision: M is no vision-language model; set drop_vision: false"),
    (["drop_vision=true"], None, 1, QWEN_VISION, None, "no class for qwen3_vl_text, the language model of M, alone"),
    ([], TP, 4, VISION, None, "the vision-language model M cannot be combined with tp_size (some.yaml); name a language model, or set tp_size: 1"),
    ([], SP, 4, VISION, None, "the vision-language model M cannot be combined with cp_size"),
    (["use_liger_kernel=true"], FSDP2, 1, VISION, A100, "Liger's kernels were not tried with its class"),
    ([], Sharding(layout="fsdp1"), 1, VISION, None, "the vision-language model M cannot be combined with FSDP1 with NO_SHARD"),
    # expert parallelism
    (["expert_parallel_size=2"], replace(EP, layout="ddp"), 2, None, None, "expert_parallel_size requires FSDP2, and some.yaml is another layout; use fsdp_full_shard_auto, or set"),
    ([], replace(EP, expert_parallel_size=4, strategy="HYBRID_SHARD", replicate_size=2, shard_size=2), 4, None, None,
     "each of the 2 replicas of some.yaml has 2 ranks, and 2 / 4 is not a whole number; set it to 2"),
    ([], replace(EP, expert_parallel_size=4), 6, None, None,
     "6 / 4 is not a whole number; set it to 2, 3 or 6 (it must divide the experts of a layer too)"),
    ([], replace(EP, tensor_parallel_size=2, shard_size=2), 4, None, None, "expert_parallel_size cannot be combined with tp_size"),
    ([], replace(EP, mixed_precision="fp16"), 2, None, None, "mixed_precision: fp16 cannot be combined with expert_parallel_size"),
    ([], replace(EP, fp8=Fp8()), 2, None, None, "mixed_precision: fp8 cannot be combined with expert_parallel_size"),
    (["optim=adafactor"], EP, 2, None, None, "optim: adafactor cannot be combined with expert_parallel_size"),
    ([], replace(EP, expert_parallel_size=5), 30, MIXTURE, None, "12 experts, and 12 / 5 is not a whole number; set it to 2, 3 or 6"),
    ([], EP, 2, LLAMA, None, "expert_parallel_size cannot be combined with the dense model M (llama)"),
    ([], EP, 2, MIXTURE | {"model_type": "longcat_flash"}, None, "not supported for longcat_flash, the family of M; it is tested with mix"),
    ([], EP, 14, MIXTURE, None, "neither the 6 experts of a rank's group nor the rows of their matrices divide over the ranks"),
    # quantization
    ([LORA, "load_in_4bit=true"], replace(FSDP2, fp8=Fp8()), 2, None, None, "a base in 4 bits is multiplied in bf16 only"),
    ([], FSDP2, 2, LLAMA | {"quantization_config": NF4}, None,
     "M: its weights are stored in 4 bits, so they cannot be fine-tuned in full; set use_peft"),
    ([LORA, "load_in_8bit=true"], FSDP2, 2, LLAMA | {"quantization_config": NF4}, None,
     "load_in_8bit: true: the weights of M are stored as 4 bits (nf4); remove load_in_8bit"),
    ([LORA, "load_in_4bit=true", "bnb_4bit_quant_type=fp4"], FSDP2, 2, LLAMA | {"quantization_config": NF4}, None,
     "bnb_4bit_quant_type: fp4: the weights of M are stored as 4 bits (nf4); remove bnb_4bit_quant_type"),
    ([LORA, "load_in_4bit=true"], FSDP2, 2, MIXTURE | {"model_type": "dbrx"}, None,
     "load_in_4bit: M is a mixture of experts (dbrx), whose experts are not"),
    ([LORA, "load_in_4bit=true"], EP, 2, MIXTURE | {"hidden_size": 100, "intermediate_size": 18}, None,
     "expert_parallel_size: 2: the experts of a rank do not begin with a block of 64 numbers, which load_in_4bit keeps under one "),
    # FP8
    ([LORA, "use_dora=true"], replace(FSDP2, fp8=Fp8()), 2, None, None, "DoRA measures the rows of the frozen weights"),
    ([], replace(FSDP2, fp8=Fp8()), 2, MIXTURE, None, "torchao does not multiply experts in FP8; set mixed_precision: bf16"),
    ([], replace(FSDP2, fp8=Fp8()), 2, LLAMA | {"hidden_size": 24}, None, "M has no linear layer that can be multiplied in FP8"),
    ([LORA, "lora_target_modules=[router]"], None, 1, VISION | {"model_type": "llama4_text"}, None, "router of llama4_text can have no adapters; name other linear layers"),
    ([LORA, "lora_target_modules=[out_proj]"], FSDP2, 2, LLAMA | {"model_type": "falcon_h1"}, None,
     "conv1d, out_proj of falcon_h1 can have no adapters; name other"),
    # mixtures
    (["torch_compile=true"], EP, 2, MIXTURE, None, "torch_compile cannot be combined with expert_parallel_size: within a layer the host"),
    (["activation_checkpointing_keeps=attention_and_projections"], FSDP2, 2, MIXTURE, None, "experts multiply matrices"),
    (["optim=adafactor"], FSDP2, 2, MIXTURE, None, "experts of a layer are a stack of matrices"),
    (["router_aux_loss_coef=0.1"], FSDP2, 2, LLAMA, None, "router_aux_loss_coef cannot be combined with the dense model M (llama); remove"),
    (["router_aux_loss_coef=0.1"], FSDP2, 2, MIXTURE | {"model_type": "deepseek_v3"}, None, "whose routers have no auxiliary loss"),
    # what is computed and kept
    (["activation_checkpointing_keeps=attention"], Sharding(layout="single"), 1, None, None, "has no effect without fsdp_activation_checkpointing: true in"),
    (["activation_offload=true"], Sharding(layout="single"), 1, None, None, "has no effect without fsdp_activation_checkpointing: true in"),
    (["activation_offload=true"], TP, 4, None, None, "activation_offload cannot be combined with tp_size"),
    (["activation_offload=true"], EP, 2, None, None, "activation_offload cannot be combined with expert_parallel_size"),
    (["global_batch_size=12", "gradient_accumulation_steps=3"], Sharding(layout="single"), 1, None, None,
     "gradient_accumulation_steps: 3: global_batch_size: 12 takes 12 with per_device_train_batch_size: 1 on 1 rank; remove one of the two"),
    (BACKWARD, Sharding(layout="ddp"), 2, None, None, "DDP keeps every gradient in its buckets"),
    (BACKWARD, Sharding(layout="fsdp1"), 2, None, None, "FSDP1 flattens parameters together"),
    (BACKWARD, replace(FSDP2, cpu_offload=True), 2, None, None, "gradients are in host memory already"),
    (BACKWARD, replace(FSDP2, mixed_precision="fp16"), 2, None, None, "checked for overflow before the first update"),
    (BACKWARD, TP, 4, None, None, "optim_in_backward cannot be combined with tp_size"),
    (BACKWARD, EP, 2, None, None, "optim_in_backward cannot be combined with expert_parallel_size"),
    (BACKWARD, replace(FSDP2, fp8=Fp8()), 2, None, None, "optim_in_backward cannot be combined with mixed_precision: fp8"),
    ([*BACKWARD, "global_batch_size=16", "per_device_train_batch_size=2"], FSDP2, 2, None, None,
     "16 rows is 4 micro-batches of 2 on 2 ranks, but a gradient that is freed in the backward cannot wait for the next micro-batch; "
     "set global_batch_size: 4, or per_device_train_batch_size: 8"),
    ([*BACKWARD, "gradient_accumulation_steps=3"], Sharding(layout="single"), 1, None, None, "of 1 on 1 rank, but a gradient that is freed in the backward cannot wait for "
     "the next micro-batch; remove gradient_accumulation_steps, and set global_batch_size: 1, or"),
    (NVME, Sharding(layout="ddp"), 2, None, None, "optim_offload: nvme requires FSDP2, and a plain launch (no Accelerate file) is another layout; use fsdp_full_shard_auto, or remove"),
    (NVME, replace(FSDP2, mixed_precision="fp16"), 2, None, None, "optim_offload: nvme cannot be combined with mixed_precision: fp16"),
    (NVME, replace(FSDP2, fp8=Fp8()), 2, None, None, "optim_offload: nvme cannot be combined with mixed_precision: fp8"),
    # sampled completions
    (GRPO, Sharding(layout="fsdp1"), 2, None, None, "fsdp_version: 1 cannot be combined with method: grpo: it cannot keep the model gathered"),
    (GRPO, SP, 4, None, None, "cp_size cannot be combined with method: grpo: the ratio of a sequence is not summed over its ranks"),
    (["method=distill", "teacher_model_name_or_path=T", "distill_top_k=4"], SP, 4, None, None, "distill_top_k cannot be combined with cp_size"),
    (GRPO, EP, 2, None, None, "expert_parallel_size cannot be combined with method: grpo: ranks sample completions of different"),
    (GRPO, replace(FSDP2, fp8=Fp8()), 2, None, None, "mixed_precision: fp8 cannot be combined with method: grpo"),
    ([*GRPO, "beta=0.1"], TP, 4, None, None,
     "beta: 0.1 cannot be combined with tp_size (some.yaml); set beta: 0, or train new adapters alone, or set tp_size: 1"),
    (PPO, TP, 4, None, None, "tp_size cannot be combined with method: ppo"),
    (GRPO, FSDP2, 2, LLAMA | {"model_type": "mamba2"}, None, "method: grpo cannot sample M here: with a cache, mamba2 computes other states or positions than without one"),
    (GRPO, FSDP2, 2, LLAMA | {"model_type": "bart"}, None, "method: grpo cannot sample M here: with a cache, bart computes other states or positions than without one"),
    # masked tokens
    (MASKED, SP, 4, None, None, "cp_size cannot be combined with method: masked_diffusion: a token and the state that predicts it may be on two ranks"),
    (MASKED, replace(FSDP2, pipeline_parallel_size=2), 2, None, None, "the first stage would read the tokens unmasked"),
    (MASKED, FSDP2, 2, VISION, None, "it reads text alone; name a language model"),
    (MASKED, FSDP2, 2, MIXTURE, None, "the balance of its routers is counted on unmasked tokens"),
    (MASKED, FSDP2, 2, LLAMA | {"model_type": "falcon_h1"}, None, "they carry a state in one direction"),
    (MASKED, FSDP2, 2, LLAMA | {"model_type": "gptj"}, None, "reads a mask of transformers' own, which hides what is after a token"),
    (MASKED, FSDP2, 2, LLAMA | {"model_type": "mistral", "sliding_window": 16}, None, "see 16 tokens at most, and no more than those before a token; set max_length to 16 or less"),
    # early exits
    (EXITS, replace(FSDP2, pipeline_parallel_size=2), 2, None, None, "the head is on the last rank, and other ranks have the layers"),
    (EXITS, FSDP2, 2, VISION, None, "cannot be combined with method: early_exit; name a language model"),
    ([*EXITS, "layer_dropout=0.2"], FSDP2, 2, MIXTURE, None, "the balance of its routers is counted on all tokens"),
    ([*EXITS, "exit_layers=[1, 99]"], FSDP2, 2, LLAMA, None, "exit_layers: 1, 99: M has"),
    ([*EXITS, "exit_layers='99:'"], FSDP2, 2, LLAMA, None, "exit_layers: 99:: M has"),
    # rows
    ([], FSDP2, 2, LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, None, "has linear_attention layers, in which packed"),
    ([], FSDP2, 2, LLAMA | {"model_type": "bloom"}, None, "M: bloom computes attention in its own code and cannot be trained on packed "
     "documents; set packing: false and remove attn_implementation"),
    (["packing=false", "attn_implementation=sdpa"], FSDP2, 2, LLAMA | {"model_type": "gpt_neo"}, None, "gpt_neo computes attention in its own"),
    (["attn_implementation=flash_attention_2"], FSDP2, 2, LLAMA | {"model_type": "gptj"}, None, "gptj computes attention in its own"),
    ([], SP, 2, LLAMA | {"model_type": "qwen3_next"}, None, "cp_size, sp_size: not supported for qwen3_next"),
    ([], SP, 2, LLAMA | {"model_type": "gptj"}, None, "cp_size, sp_size: not supported for gptj"),
    # the family's names
    ([LORA, "lora_target_modules=[q_proj, o_proj]"], FSDP2, 2, LLAMA | {"model_type": "phi3"}, None,
     "lora_target_modules: q_proj: no such linear layer in phi3; it has down_proj, gate_up_proj, o_proj, qkv_proj"),
    ([LORA], FSDP2, 2, LLAMA | {"model_type": "gpt2"}, None, "all-linear: no such linear layer in gpt2; its layers are transformers' Conv1D"),
    ([], replace(FSDP2, wrap_classes=("BertLayer",)), 2, LLAMA, None,
     "wraps BertLayer, but M is made of LlamaDecoderLayer; name that class, or remove the key"),
    # the machine
    (["activation_offload=true"], FSDP2, 1, None, CPU, "a run on a CPU: activations are in host memory already; remove activation_offload"),
    ([], Sharding(layout="fsdp1", cpu_offload=True), 2, None, CPU, "FSDP1 offloads from a GPU, and this is a CPU run; set it to false, or fsdp_version: 2"),
    (["attn_implementation=flex_attention", "packing=false"], FSDP2, 1, None, CPU, "outputs for padded rows are not finite"),
    ([], replace(FSDP2, mixed_precision="fp16"), 1, None, CPU, "mixed_precision: fp16 cannot be combined with a run on a CPU; set mixed_precision: bf16"),
    (["torch_compile=true"], FSDP2, 1, None, replace(CPU, has_compiler=False), "none is on the PATH; install one (g++)"),
    (["use_liger_kernel=true"], FSDP2, 1, None, CPU, "a run on a CPU: Liger's kernels run on CUDA only"),
    (["use_liger_kernel=true"], FSDP2, 1, LLAMA, replace(A100, liger_families=frozenset({"qwen2"})), "Liger has no kernels for llama"),
    (["attn_implementation=flash_attention_2"], FSDP2, 1, None, CPU, "needs a GPU of compute capability 8.x"),
    (["attn_implementation=flash_attention_3"], FSDP2, 1, None, A100, "compute capability 9.x, and this GPU has 8.0; remove the key"),
    ([], replace(FSDP2, fp8=Fp8()), 1, None, A100, "NVIDIA A100 has compute capability 8.0, and FP8 needs 8.9; set mixed_precision"),
    (NVME, FSDP2, 1, None, replace(CPU, system="darwin"), "optim_offload: nvme needs Linux"),
    *((keys, layout, 1, None, replace(CPU, has_package=lambda _: False), said) for keys, layout, said in [
        ([LORA, "load_in_4bit=true"], FSDP2, "load_in_4bit needs bitsandbytes; pip install bitsandbytes, or remove it"),
        (["optim=adamw_8bit"], FSDP2, "optim: adamw_8bit needs torchao; pip install torchao"),
        ([], replace(FSDP2, fp8=Fp8()), "mixed_precision: fp8 needs torchao; pip install torchao"),
        ([*QAT, "export_formats=[safetensors, compressed-tensors]"], FSDP2,
         "export_formats: compressed-tensors needs compressed_tensors; pip install compressed-tensors, or remove it"),
        (["export_formats=[safetensors, gguf]"], FSDP2, "export_formats: gguf needs gguf; pip install gguf"),
        (QAT, FSDP2, "quantization_aware_training needs torchao; pip install torchao, or remove the key"),
        (["report_to=wandb"], FSDP2, 'report_to: wandb: its package is not installed; pip install -e ".[wandb]"'),
    ]),
]  # fmt: skip


def judge(
    overrides: list[str],
    layout: Sharding | None,
    ranks: int = 1,
    config: dict[str, Any] | None = None,
    machine: MachineFacts | None = None,
) -> list[str]:
    """The sentences of all problems that are no notes."""
    recipe = read_recipe(
        None, ["model_name_or_path=M", "datasets=[{path: D}]", "max_length=32", *overrides]
    )
    facts = (
        None
        if config is None
        else read_model_facts(config, "M", vision=names_vision_language(config))
    )
    found = find_problems(recipe, layout, facts, ranks, machine=machine)
    return [str(problem) for problem in found if not problem.is_note]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[-1][:50])
def test_what_does_not_work_together_is_refused_in_a_sentence(case: tuple[Any, ...]) -> None:
    *asked, said = case
    found = judge(*asked)
    assert any(said in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("overrides", "layout", "ranks", "config", "machine"),
    [
        (["optim=adafactor"], FSDP2, 2, LLAMA, CPU),
        ([*ROWS, "global_batch_size=12"], FSDP2, 2, LLAMA, CPU),
        ([*ROWS, "global_batch_size=9"], FSDP2, 2, LLAMA, CPU),  # the last micro-batch is short
        (["optim=adafactor", "trainable_modules=[lm_head]"], FSDP2, 2, MIXTURE, CPU),
        (["optim=muon", LORA], FSDP2, 2, MIXTURE, CPU),
        ([*GRPO, "loss_type=reinforce++", "num_generations=1"], FSDP2, 2, LLAMA, CPU),
        ([], TP, 4, LLAMA | {"vocab_size": 509}, CPU),
        (["optim=adamw_bf16_moments"], TP, 4, LLAMA, CPU),
        ([], TP, 4, LLAMA | {"model_type": "phi3", "num_key_value_heads": 2}, CPU),
        ([], EP, 4, MIXTURE, CPU),
        (MASKED, TP, 4, LLAMA, CPU),
        (
            MASKED,
            FSDP2,
            2,
            LLAMA | {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False},
            CPU,
        ),
        ([*QAT, "qat_group_size=null"], SP, 4, LLAMA | {"intermediate_size": 97}, CPU),
        ([LORA, "load_in_4bit=true"], FSDP2, 2, LLAMA | {"quantization_config": NF4}, CPU),
        (NVME, FSDP2, 2, LLAMA, CPU),
        (BACKWARD, Sharding(layout="single"), 1, LLAMA, CPU),
        ([*GRPO, "attention_dropout=0"], FSDP2, 2, LLAMA, CPU),
        ([*GRPO, LORA, "beta=0.1"], TP, 4, LLAMA, CPU),
        (
            ["packing=false", "attn_implementation=eager"],
            FSDP2,
            1,
            LLAMA | {"model_type": "falcon"},
            CPU,
        ),
        (
            [LORA, "lora_target_modules=[q_a_proj, lm_head]", "modules_to_save=[lm_head]"],
            FSDP2,
            1,
            LLAMA | {"model_type": "deepseek_v3"},
            CPU,
        ),
        ([], replace(FSDP2, wrap_classes=("LlamaDecoderLayer", "Embedding")), 2, LLAMA, CPU),
        (
            [],
            replace(FSDP2, fp8=Fp8()),
            1,
            LLAMA,
            replace(A100, gpu="NVIDIA L4", capability=(8, 9)),
        ),
    ],
)
def test_what_works_is_not_refused(
    overrides: list[str],
    layout: Sharding,
    ranks: int,
    config: dict[str, Any],
    machine: MachineFacts,
) -> None:
    assert (
        judge(overrides, layout, ranks, config, replace(machine, has_package=lambda _: True)) == []
    )


def _list_values_for_off() -> list[tuple[str, str, Any]]:
    """(feature, recipe key, value) for each value that turns the key off, of the features that exclude others."""
    excluding = {*EXCLUSIONS, *NOT_FOR_ALL_OPTIMIZERS}.union(*EXCLUSIONS.values())
    found = []
    for name in sorted(excluding):
        for key in find_feature(name).keys:
            # false is what the first two ask for; an empty value of the others is refused by itself
            if key not in recipe_keys() or key in (
                *("assistant_only_loss", "train_on_reasoning"),
                *("vllm_server_base_url", "model_config", "export_formats", "model_name_or_path"),
            ):
                continue
            validator = TypeAdapter[Any](recipe_keys()[key].annotation)
            for value in (None, False, 0, 0.0, (), {}):
                with suppress(ValidationError):
                    found.append((name, key, validator.validate_python(value, strict=True)))
    return found


@pytest.mark.parametrize(("name", "key", "value"), _list_values_for_off())
def test_a_key_that_is_off_excludes_nothing(name: str, key: str, value: Any) -> None:
    model: Any = read_model_facts(LLAMA, "M")
    recipe = read_recipe(None, ["model_name_or_path=M", "datasets=[{path: D}]", *GRPO, LORA])
    section = recipe_keys()[key].section
    changed = replace(getattr(recipe, section), **{key: value})
    changes: Any = {section: changed}
    case = Case(recipe=replace(recipe, **changes), layout=FSDP2, model=model, machine=CPU)
    assert not find_feature(name).is_on(case)


def test_all_problems_are_reported_at_once_each_where_it_stands(tmp_path: Any) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "model_name_or_path: M\ndatasets: [{path: D}]\noptim: adafactor\ntorch_compile: true\n"
    )
    problems = find_problems(
        read_recipe(str(path)),
        replace(TP, tensor_parallel_size=2),
        read_model_facts(MIXTURE, "M"),
        4,
    )
    with pytest.raises(UserError) as error:
        refuse_problems(problems)
    first, *others = str(error.value).splitlines()
    assert first.startswith("some.yaml: dp_shard_size 1 x tp_size 2 = 2"), (
        "the layout is impossible: most important"
    )
    assert any(
        line.startswith(f"{path}:3: optim: adafactor cannot be combined with tp_size")
        for line in others
    )
    assert any(
        line.startswith(f"{path}:4: torch_compile cannot be combined with tp_size")
        for line in others
    )


# Keys without effect: an error where they can only be a mistake, else a note.
@pytest.mark.parametrize(
    ("overrides", "layout", "machine", "said", "is_note"),
    [
        (
            ["max_steps=10", "warmup_steps=20"],
            None,
            None,
            "the run ends after 10 steps, before learning_rate is reached",
            True,
        ),
        (
            ["dtype=bfloat16", "learning_rate=5e-7"],
            None,
            None,
            "so most updates round to nothing; remove dtype",
            True,
        ),
        (
            ["learning_rate=10"],
            None,
            None,
            "moves every parameter by about this much in each step",
            True,
        ),
        (
            ["optim=sgd", "adam_beta1=0.8"],
            None,
            None,
            "adam_beta1 has no effect with this optim",
            True,
        ),
        (["tf32=true"], FSDP2, CPU, "tf32 has no effect on a CPU", True),
        (
            ["activation_checkpointing_every=2"],
            Sharding(layout="single"),
            None,
            "has no effect without fsdp_activation_checkpointing: true in a plain launch",
            True,
        ),
        (
            ["min_lr_ratio=0.1", "lr_scheduler_type=constant"],
            None,
            None,
            "min_lr_ratio has no effect with lr_scheduler_type: constant, which has no end",
            False,
        ),
        (
            ["profile_steps=[5, 2]"],
            None,
            None,
            "profile_steps: [5, 2]: the first step comes after the last",
            False,
        ),
        (
            [f"metrics=[{CODE}]"],
            None,
            None,
            "metrics has no effect without exact_match_samples; set it, or remove metrics",
            False,
        ),
        (
            [f"datasets=[{{function: {CODE}, path: pyproject.toml}}]"],
            None,
            None,
            "datasets cannot combine function with path; keep one",
            False,
        ),
        *(
            (
                [f"run_name={name}"],
                None,
                None,
                f"run_name: {name} does not name a folder in runs/; give a name without ..",
                False,
            )
            for name in ("..", ".", "a/../../b", "/tmp/a")
        ),
        (
            ["exact_match_samples=5"],
            None,
            None,
            "exact_match_samples has no effect without eval_datasets or eval_split_size; set it",
            False,
        ),
        *(
            ([*GRPO, *keys], None, None, said, False)
            for keys, said in [
                (
                    ["rewards=[]"],
                    "method: grpo learns from rewards; set rewards, such as [exact_answer]",
                ),
                (
                    ["max_tool_calling_iterations=2"],
                    "max_tool_calling_iterations has no effect without tools",
                ),
                (
                    ["environment_processes=2"],
                    "environment_processes has no effect without environment",
                ),
                (
                    ["reward_weights=[1, 2]"],
                    "reward_weights: 2 numbers for 1 rewards; give one for each",
                ),
                (
                    ["loss_type=ipo"],
                    "loss_type: ipo is not for method: grpo; set one of grpo, dapo,",
                ),
                (
                    ["max_length=16"],
                    "max_completion_length: 16 leaves no room for a prompt in 16 tokens; raise max_length",
                ),
                (
                    ["overlength=truncate"],
                    "overlength: truncate cannot be combined with method: grpo: the question that is asked would be cut; set overlength: drop or error",
                ),
                (
                    ["loss_type=cispo"],
                    "bounds the probability ratio itself by epsilon_high, which is to be above 1; set",
                ),
                (
                    ["loss_type=rloo", "scale_rewards=none"],
                    "scale_rewards has no effect with loss_type: rloo",
                ),
                (
                    ["loss_type=rloo", "importance_sampling_level=sequence"],
                    "importance_sampling_level has no effect with loss_type: rloo, which has ratios of its own",
                ),
                (
                    ["attention_dropout=0.1"],
                    "dropout: 0.1 cannot be combined with method: grpo: the model that learns",
                ),
                (
                    ["neftune_noise_alpha=5"],
                    "neftune_noise_alpha cannot be combined with method: grpo: the model",
                ),
                (
                    ["streaming=true", "max_steps=3"],
                    "streaming cannot be combined with method: grpo: a step draws",
                ),
                (
                    ["exact_match_samples=5", "eval_split_size=2"],
                    "held-out prompts are answered and rewarded at every",
                ),
                (
                    BACKWARD,
                    "optim_in_backward cannot be combined with method: grpo: how many micro-batches",
                ),
                (
                    ["assistant_only_loss=false"],
                    "assistant_only_loss cannot be combined with method: grpo",
                ),
                (
                    ["turns=last"],
                    "turns cannot be combined with method: grpo: completions are all that is trained on",
                ),
                (
                    ["num_generations=1"],
                    "num_generations: 1: grpo compares the completions of a prompt with each other; set 2",
                ),
                (
                    ["loss_type=rloo", "beta=0.1"],
                    "beta has no effect with loss_type: rloo, whose loss has one ratio for a",
                ),
                (
                    ["beta=0.1", "added_tokens=[x]"],
                    "added_tokens cannot be combined with beta: 0.1: the reference is read from files",
                ),
                (
                    ["beta=0.1", LORA, "adapter_name_or_path=A"],
                    "read from the base's files, without the adapter; merge it into its base (finetune export ADAPTER --output",
                ),
                (
                    [
                        "method=on_policy_distill",
                        "teacher_model_name_or_path=T",
                        "rewards=[]",
                        "eval_split_size=2",
                    ],
                    "held-out prompts are answered and rewarded, but there are no rewards; set rewards",
                ),
                (
                    ["importance_sampling_correction=token_mask", "loss_type=rloo"],
                    "which has one ratio for a completion; set sequence_mask",
                ),
                (
                    ["importance_sampling_correction=token_mask", "importance_sampling_clip_min=4"],
                    "importance_sampling_clip_min: 4.0 is not below importance_sampling_clip_max: 3.0; lower it",
                ),
                (
                    ["importance_sampling_clip_max=2"],
                    "has no effect without an importance_sampling_correction that has bounds",
                ),
                (["rewards=[number, number]"], "rewards: two are named number"),
                ([f"tools=[{MULTIPLY}, {MULTIPLY}]"], "tools: two are named multiply"),
                (
                    ["soft_punish_cache=4"],
                    "the reward soft_overlong_punishment and soft_punish_cache go together",
                ),
                (["rewards=[soft_overlong_punishment]"], "and soft_punish_cache go together"),
                (
                    ["max_num_gen_batches=3", "loss_type=reinforce++"],
                    "max_num_gen_batches drops groups whose rewards are all alike, from which reinforce++ still teaches",
                ),
                (
                    [
                        "method=distill",
                        "rewards=[]",
                        "max_completion_length=256",
                        "teacher_model_name_or_path=T",
                        "distill_top_k=4",
                        "streaming=true",
                        "max_steps=3",
                    ],
                    "streaming cannot be combined with distill_top_k: the teacher is asked of all data before",
                ),
                (
                    ["vllm_server_base_url=localhost:8000"],
                    "localhost:8000 is no address; write it as http://",
                ),
                (
                    ["vllm_server_base_url=http://a", LORA, "use_dora=true"],
                    "use_dora cannot be combined with vllm_server_base_url: vLLM loads no such adapters; remove use_dora",
                ),
                (
                    [
                        "vllm_server_base_url=http://a",
                        LORA,
                        "lora_target_modules=[q_proj, lm_head]",
                    ],
                    "an adapter on the output head cannot be combined with vllm_server_base_url",
                ),
                (
                    ["top_p=0.9"],
                    "top_p: no such key: completions are sampled from all of the vocabulary",
                ),
            ]
        ),
        *(
            ([*QAT, *keys], None, None, said, False)
            for keys, said in [
                (
                    ["quantization_aware_training=fp8-fp8"],
                    "fp8-fp8: torchao quantizes to FP8 on GPUs from Ada and MI300",
                ),
                (
                    ["quantization_aware_training=int4-packed"],
                    "with kernels of the mslk package, on a GPU, so that the",
                ),
                (
                    ["quantization_aware_training=int4-packed"],
                    "could not be compared with the one that was trained; use one of",
                ),
                (
                    ["quantization_aware_training=null", "qat_group_size=8"],
                    "qat_group_size has no effect without",
                ),
                (["export_formats=[gguf]"], "without safetensors a run's folder has no model"),
                (
                    ["export_formats=[safetensors, gguf]", "export_at_end=false"],
                    "export_formats has no effect with export_at_end: false",
                ),
                (
                    ["export_quantization=int8"],
                    "export_quantization has no effect without export_formats",
                ),
                (
                    [
                        "quantization_aware_training=null",
                        "export_formats=[safetensors, compressed-tensors]",
                    ],
                    "export_formats: compressed-tensors: no scheme; set export_quantization, such as int8-int8",
                ),
                (
                    [
                        "export_formats=[safetensors, compressed-tensors]",
                        "export_quantization=nvfp4",
                    ],
                    "export_quantization: nvfp4: not written; use one of fp8-fp8, int4",
                ),
                (
                    [LORA, "load_in_4bit=true"],
                    "load_in_4bit cannot be combined with quantization_aware_training: int8-int4: the base is quantized already",
                ),
                (
                    [LORA, "use_dora=true"],
                    "use_dora cannot be combined with quantization_aware_training: int8-int4: only plain adapters are added",
                ),
                (
                    [LORA, "lora_dropout=0.1"],
                    "lora_dropout cannot be combined with quantization_aware_training: int8-int4: base and adapter are rounded",
                ),
                (
                    [LORA, "lora_target_parameters=[experts.down_proj]"],
                    "lora_target_parameters cannot be combined with quantization_aware_training",
                ),
                (
                    GRPO,
                    "method: grpo cannot be combined with quantization_aware_training: int8-int4: one rounded input",
                ),
                (
                    ["fake_quant_after_n_steps=8", "max_steps=8"],
                    "the run ends after 8 steps, and nothing would be rounded",
                ),
            ]
        ),
        *(
            (overrides, None, None, said, False)
            for overrides, said in [
                (["keep_every_steps=5"], "keep_every_steps has no effect without save_steps"),
                (["max_skipped_steps=5"], "max_skipped_steps has no effect without on_nonfinite"),
                (["eval_split_size=1.5"], "eval_split_size: 1.5: from 1 on it is a number of rows"),
                (
                    [*GRPO, "loss_type=cispo", "epsilon_high=5", "epsilon=0.3"],
                    "epsilon has no effect with loss_type: cispo, which reads epsilon_high alone",
                ),
                (["method=process_reward", "step_separator=''"], "step_separator: empty text"),
                (
                    ["method=classify", "labels=[a, b]", "class_weights=[1, -1]"],
                    "class_weights: [1.0, -1.0]; give numbers from 0 on, not all of them 0",
                ),
            ]
        ),
        (
            ["max_steps=2", "profile_steps=[5, 9]"],
            None,
            None,
            "profile_steps: [5, 9]: the run ends after 2 steps, before the profile begins",
            True,
        ),
        (
            [*GRPO, "loss_type=dr_grpo"],
            None,
            None,
            "loss_type: dr_grpo without scale_rewards: none: its paper divides by no standard deviation",
            True,
        ),
    ],
)
def test_keys_without_effect_are_named(
    overrides: list[str],
    layout: Sharding | None,
    machine: MachineFacts | None,
    said: str,
    is_note: bool,
) -> None:
    asked = ["model_name_or_path=M", "datasets=[{path: D}]", *overrides]
    if not is_note:
        with pytest.raises(UserError, match=re.escape(said)):
            read_recipe(None, asked)
        return
    found = find_problems(read_recipe(None, asked), layout, machine=machine)
    assert [problem.is_note for problem in found if said in str(problem)] == [True]


def test_a_problem_of_a_reference_names_the_model_and_beta() -> None:
    """No teacher is named in such a recipe."""
    keys = ["model_name_or_path=M", "datasets=[{path: D}]", "max_length=32", *GRPO, "beta=0.1"]
    facts = read_model_facts(LLAMA, "M", tokens=600)
    found = find_problems(read_recipe(None, keys), FSDP2, facts, 2, teacher=facts)
    said = "command line: beta: M: its embedding has 512 rows, but the tokenizer has 600 tokens"
    assert any(str(problem).startswith(said) for problem in found), found


def test_rules_have_names_of_their_own_and_keys_that_exist() -> None:
    assert [name for name, count in Counter(rule.name for rule in RULES).items() if count > 1] == []
    for rule in RULES:
        others = {key.removeprefix("fsdp_") for key in {*rule.keys} - recipe_keys().keys()}
        assert rule.keys and others <= {*ACCELERATE_KEYS, *FSDP_KEYS, *MESH_KEYS}, rule.name


def test_what_a_message_names_exists() -> None:
    for rule in RULES:
        if isinstance(rule.message, str):
            for _, field, _, _ in Formatter().parse(rule.message):
                first, _, rest = (field or "name").partition(".")
                owner = {"layout": Sharding, "model": ModelFacts, "quantization": Quantization}.get(
                    first
                )
                assert first in recipe_keys() or hasattr(Case, first), (rule.name, field)
                assert not rest or hasattr(owner, rest), (rule.name, field)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_hidden_layers": 10**9},
            "M: num_hidden_layers: 1000000000: a whole number from 1 to 1,000 is expected",
        ),
        (
            {"vocab_size": 10**12},
            "M: vocab_size: 1000000000000: a whole number from 1 to 16,777,216 is expected",
        ),
        ({"hidden_size": 0.5}, "M: hidden_size: 0.5: a whole number from 1"),
        ({"num_attention_heads": "8"}, "M: num_attention_heads: '8': a whole number"),
        ({"hidden_act": "silly"}, "M: hidden_act: 'silly': no activation of transformers"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "M: its weights are quantized (gptq), in a way that is not read",
        ),
    ],
)
def test_a_config_of_which_no_model_can_be_built_is_refused(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        read_model_facts(LLAMA | change, "M")


@pytest.mark.parametrize("family", slow_but(["deepseek_v3"], ["llama", "qwen2_moe", "deepseek_v3"]))
def test_a_damaged_config_is_planned_or_refused_in_sentences(family: str) -> None:
    from finetune.plan.plan import format_plan, make_plan

    sizes = dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
    )
    sizes |= {
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    sizes |= {
        "n_shared_experts": 1,
        "shared_expert_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }
    whole = LLAMA | sizes | {"model_type": family}
    others = dict.fromkeys(
        (*KINDS, "decoder_sparse_step", "quantization_config", "dtype", "tie_word_embeddings")
    )
    recipe = read_recipe("quickstart")
    for key, value in product(whole | others, ([1], {}, "x", 1.5, math.nan, -1, True)):
        model = replace(recipe.model, model_config=whole | {key: value})
        with suppress(UserError):
            format_plan(make_plan(replace(recipe, model=model), Sharding(layout="ddp"), 2))


def test_the_activations_are_those_of_transformers() -> None:
    from transformers.activations import ACT2CLS

    assert set(ACT2CLS) <= ACTIVATIONS


def test_a_run_and_a_plan_read_the_same_facts() -> None:
    from transformers import AutoConfig

    from finetune.config.families import FAMILIES, PLANNED
    from finetune.plan.architecture import read_architecture

    for family in PLANNED:
        config: dict[str, Any] = LLAMA | {"model_type": family}
        if (mixture := FAMILIES[family].mixture) is not None:
            config |= {mixture.experts: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        ours = read_architecture(config, "M").facts
        theirs = read_model_facts(AutoConfig.for_model(**config).to_dict(), "M")
        own = {
            "layer_types": frozenset[str](),
            "window": None,
            "expert_width": 0,
            "intermediate": 0,
        }
        assert replace(ours, **own) == replace(theirs, **own), family
