"""What Accelerate's, TRL's and the alignment handbook's repositories publish as Accelerate and DeepSpeed files (July 2026).

Each is described by what it states. The launcher's own keys (ports, addresses, TPUs), which every file repeats, are left out;
where two files state the same, they are one entry.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.errors import UserError

FSDP1: dict[str, Any] = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}
FSDP1_OF_TRL = {key: value for key, value in FSDP1.items() if key != "fsdp_sharding_strategy"} | {
    "fsdp_version": 1,
    "fsdp_forward_prefetch": True,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
FSDP2: dict[str, Any] = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_version": 2,
}
ZERO3 = {
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
}
LOGGING = {"gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
TORCH_ADAMW = {
    "type": "AdamW",
    "params": ADAMW["params"] | {"torch_adam": True, "adam_w_mode": True},
}  # type: ignore[operator]
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
DECAY = {"type": "WarmupDecayLR", "params": WARMUP | {"total_num_steps": "auto"}}
BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
STAGE2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "reduce_scatter": True,
    **BUCKETS,
}
STAGE3 = {
    "stage": 3,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
    **BUCKETS,
}
ON_HOST = {"device": "cpu", "pin_memory": True}
BOTH_ON_HOST = {"offload_optimizer": ON_HOST, "offload_param": ON_HOST}
AUTO = {"bf16": {"enabled": "auto"}, "fp16": FP16 | {"enabled": "auto"}}
EXAMPLE = {"fp16": FP16, "scheduler": DECAY, **BATCH, **LOGGING}
OF_TESTS = AUTO | {"scheduler": {"type": "WarmupLR", "params": WARMUP}, **BATCH, **LOGGING}
MESH = {f"parallelism_config_{name}_size": 1 for name in ("dp_replicate", "dp_shard", "tp", "cp")}
PLAIN = {
    "distributed_type": "NO",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": False,
}
EMPTY: dict[str, Any] = {"deepspeed_config": {}, "fsdp_config": {}}
FP8 = {"backend": "TE", "fp8_format": "E4M3", "margin": 0, "interval": 1, "amax_history_len": 1024}


def accelerate(kind: str, processes: int | None = 8, **stated: Any) -> dict[str, Any]:
    launched = {} if processes is None else {"num_processes": processes}
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, **launched, **stated}


BF16 = {"mixed_precision": "bf16"}
# Name -> (what the file states, layout and strategy).
READ: Mapping[str, tuple[dict[str, Any], str]] = {
    "accelerate templates: fsdp": (
        accelerate("FSDP", 2, fsdp_config=FSDP1, **BF16),
        "fsdp1 FULL_SHARD",
    ),
    "accelerate templates: multi_gpu": (accelerate("MULTI_GPU", 2, **BF16), "ddp"),
    "accelerate templates: multi_node": (accelerate("MULTI_GPU", 8, num_machines=2), "ddp"),
    "accelerate templates: single_accelerator": (accelerate("NO", None, **BF16), "single"),
    "accelerate deepspeed templates: zero_stage1": (
        EXAMPLE | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE2 | {"stage": 1}},
        "fsdp2 SHARD_GRAD_OP",
    ),
    "accelerate deepspeed templates: zero_stage2": (
        EXAMPLE | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE2},
        "fsdp2 SHARD_GRAD_OP",
    ),
    "accelerate deepspeed templates: zero_stage2_offload": (
        EXAMPLE
        | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE2 | {"offload_optimizer": ON_HOST}},
        "fsdp2 SHARD_GRAD_OP offloaded",
    ),
    "accelerate deepspeed templates: zero_stage3": (
        EXAMPLE | {"optimizer": ADAMW, "zero_optimization": STAGE3},
        "fsdp2 FULL_SHARD",
    ),
    "accelerate deepspeed templates: zero_stage3_offload": (
        EXAMPLE | {"optimizer": ADAMW, "zero_optimization": STAGE3 | BOTH_ON_HOST},
        "fsdp2 FULL_SHARD offloaded",
    ),
    "accelerate slurm: fsdp_config": (
        accelerate("FSDP", None, fsdp_config=FSDP1),
        "fsdp1 FULL_SHARD",
    ),
    "accelerate alst: sp-alst.ds-config": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "seq_parallel_communication_data_type": "bf16",
        }
        | BATCH,
        "fsdp2 FULL_SHARD",
    ),
    "accelerate tests: ds_config_zero2": (
        OF_TESTS
        | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE2 | {"offload_optimizer": ON_HOST}},
        "fsdp2 SHARD_GRAD_OP offloaded",
    ),
    "accelerate tests: ds_config_zero2_model_only": (
        AUTO | BATCH | LOGGING | {"zero_optimization": STAGE2 | {"offload_optimizer": ON_HOST}},
        "fsdp2 SHARD_GRAD_OP offloaded",
    ),
    "accelerate tests: ds_config_zero3": (
        OF_TESTS | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE3 | BOTH_ON_HOST},
        "fsdp2 FULL_SHARD offloaded",
    ),
    "accelerate tests: ds_config_zero3_model_only": (
        AUTO
        | {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": STAGE3 | {"offload_param": ON_HOST},
        },
        "fsdp2 FULL_SHARD offloaded",
    ),
    "accelerate tests: 0_11_0, 0_12_0": (PLAIN | EMPTY, "single"),
    "accelerate tests: latest": (PLAIN | EMPTY | {"megatron_lm_config": {}}, "single"),
    "accelerate tests: latest_fsdp": (
        accelerate(
            "FSDP",
            1,
            fsdp_config=FSDP1
            | {"fsdp_ignored_modules": None, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"},
        ),
        "fsdp1 FULL_SHARD",
    ),
    "accelerate tests: fsdp2_tp_preparation_config": (
        accelerate("FSDP", 4, mixed_precision="no"),
        "fsdp1 FULL_SHARD",
    ),
    "accelerate torch native: tp_hsdp": (
        accelerate(
            "FSDP",
            fsdp_config=FSDP2,
            parallelism_config=MESH
            | {f"parallelism_config_{name}_size": 2 for name in ("dp_replicate", "dp_shard", "tp")},
        ),
        "fsdp2 HYBRID_SHARD",
    ),
    "accelerate torch native: cp": (
        accelerate(
            "FSDP", fsdp_config=FSDP2, parallelism_config=MESH | {"parallelism_config_cp_size": 8}
        ),
        "fsdp2 FULL_SHARD",
    ),
    "trl: context_parallel_2gpu": (
        accelerate(
            "FSDP",
            2,
            fsdp_config=FSDP2,
            parallelism_config=MESH | {"parallelism_config_cp_size": 2},
        ),
        "fsdp2 FULL_SHARD",
    ),
    "trl: alst_ulysses_4gpu": (
        accelerate(
            "DEEPSPEED",
            4,
            deepspeed_config=ZERO3 | {"seq_parallel_communication_data_type": "bf16"},
            parallelism_config={
                "parallelism_config_dp_replicate_size": 1,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_sp_size": 2,
                "parallelism_config_sp_backend": "deepspeed",
                "parallelism_config_sp_seq_length_is_variable": True,
                "parallelism_config_sp_attn_implementation": "flash_attention_2",
            },
        ),
        "fsdp2 FULL_SHARD",
    ),
    "handbook: ddp, trl: multi_gpu (twice)": (accelerate("MULTI_GPU", **BF16), "ddp"),
    "handbook: fsdp": (
        accelerate("FSDP", fsdp_config=FSDP1 | {"fsdp_forward_prefetch": True}, **BF16),
        "fsdp1 FULL_SHARD",
    ),
    "handbook: zero3, trl: deepspeed_zero3, zero3": (
        accelerate(
            "DEEPSPEED",
            deepspeed_config=ZERO3 | {"deepspeed_multinode_launcher": "standard"},
            **BF16,
        ),
        "fsdp2 FULL_SHARD",
    ),
    "trl: deepspeed_zero1, zero1": (
        accelerate(
            "DEEPSPEED",
            deepspeed_config={"gradient_accumulation_steps": 1, "zero_stage": 1},
            **BF16,
        ),
        "fsdp2 SHARD_GRAD_OP",
    ),
    "trl: deepspeed_zero2, zero2": (
        accelerate("DEEPSPEED", deepspeed_config=ZERO3 | {"zero_stage": 2}, **BF16),
        "fsdp2 SHARD_GRAD_OP",
    ),
    "trl: fsdp1 (twice)": (
        accelerate("FSDP", fsdp_config=FSDP1_OF_TRL, **BF16),
        "fsdp1 FULL_SHARD",
    ),
    "trl: fsdp2 (twice)": (accelerate("FSDP", fsdp_config=FSDP2, **BF16), "fsdp2 FULL_SHARD"),
    "trl: single_gpu (twice)": (accelerate("NO", 1, **BF16), "single"),
    "trl tests: ddp": (accelerate("MULTI_GPU", 2), "ddp"),
    "trl tests: fsdp2": (
        accelerate("FSDP", 2, fsdp_config={"fsdp_version": 2}),
        "fsdp2 FULL_SHARD",
    ),
    "trl tests: zero2": (
        accelerate("DEEPSPEED", 2, deepspeed_config={"zero_stage": 2}),
        "fsdp2 SHARD_GRAD_OP",
    ),
    "trl tests: zero3": (
        accelerate("DEEPSPEED", 2, deepspeed_config={"zero_stage": 3}),
        "fsdp2 FULL_SHARD",
    ),
}
# Name -> (what the file states, words of the refusal).
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "accelerate templates: fp8": (
        accelerate("NO", None, mixed_precision="fp8", fp8_config=FP8),
        "fp8_config.backend: Transformer Engine is not supported; set it to AO",
    ),
    "accelerate tests: 0_34_0_fp8": (
        accelerate(
            "MULTI_GPU", 2, mixed_precision="fp8", fp8_config=FP8 | {"amax_compute_algo": "max"}
        ),
        "fp8_config.backend: Transformer Engine is not supported; set it to AO",
    ),
    "accelerate templates: multi_xpu": (
        accelerate("MULTI_XPU", 2, **BF16),
        "distributed_type: MULTI_XPU: not supported",
    ),
    "accelerate tests: 0_28_0_mpi": (
        accelerate(
            "MULTI_CPU",
            16,
            num_machines=4,
            mpirun_config={"mpirun_hostfile": "/home/user/hostfile"},
        ),
        "mpirun is not supported as a launcher; start the ranks with accelerate launch or torchrun",
    ),
    "accelerate tests: 0_30_0_sagemaker": (
        accelerate("NO", None)
        | {"compute_environment": "AMAZON_SAGEMAKER", "ec2_instance_type": "MY_TYPE"},
        "SageMaker is not supported; use a file for LOCAL_MACHINE",
    ),
    "accelerate tests: invalid_keys": (
        PLAIN | EMPTY | {"invalid_key": "invalid_value"},
        "invalid_key: no such key",
    ),
    "accelerate tests: validate_launch_cmd": (
        PLAIN | {"deepspeed_config": {"deepspeed_config_file": "path/to/be/ignored"}},
        "deepspeed_config: it needs distributed_type: DEEPSPEED",
    ),
    "accelerate templates: deepspeed, without the JSON that it names": (
        accelerate(
            "DEEPSPEED", 2, deepspeed_config={"deepspeed_config_file": "../zero_stage1_config.json"}
        ),
        "deepspeed_config_file: ../zero_stage1_config.json: no such file",
    ),
}


def read(stated: dict[str, Any], folder: Path) -> Any:
    is_json = "zero_optimization" in stated
    path = folder / ("ds_config.json" if is_json else "config.yaml")
    path.write_text(json.dumps(stated) if is_json else yaml.safe_dump(stated))
    ranks = 1 if stated.get("distributed_type") == "NO" else stated.get("num_processes", 8)
    return read_sharding(str(path), None, {"WORLD_SIZE": str(ranks)})


@pytest.mark.parametrize("name", READ)
def test_a_published_file_is_read(name: str, tmp_path: Path) -> None:
    stated, expected = READ[name]
    found = read(stated, tmp_path)
    layout = (
        found.layout
        + (f" {found.strategy}" if found.is_fsdp else "")
        + (" offloaded" if found.cpu_offload else "")
    )
    assert layout == expected
    precision = next(
        (kind for kind in ("fp16", "bf16") if stated.get(kind, {}).get("enabled") is True), "no"
    )
    assert found.mixed_precision == stated.get("mixed_precision", precision)
    is_deepspeed = "zero_optimization" in stated or stated["distributed_type"] == "DEEPSPEED"
    assert bool(found.translated) == is_deepspeed
    mesh = stated.get("parallelism_config", {})
    divided = [mesh.get(f"parallelism_config_{key}", 1) for key in ("cp_size", "sp_size")]
    assert found.sequence_parallel_size == max(divided)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_file_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    stated, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        read(stated, tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
