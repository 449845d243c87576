"""Accelerate's own objects for a layout: the Accelerator, its FSDP plugin, its mesh and its precision."""

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from finetune.config.layout import Sharding

PIPELINE, REPLICATE, FSDP, TENSOR = "pp", "dp_replicate", "fsdp", "tp"
STAGE = "stage"  # of a pipeline: the ranks with the same layers, which the last three divide
BATCH, SEQUENCE = "batch", "sp"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"


def make_mesh(sharding: Sharding, device_type: str) -> DeviceMesh | None:
    """The mesh of all ranks, which call it together; None where the world is one dimension."""
    sizes, stages = sharding.mesh_sizes, sharding.pipeline_parallel_size
    if stages > 1:  # outermost: what passes between stages is the least traffic
        ranks = dist.get_world_size() // stages
        replicas, _, _, tensors = (sizes or {"": 1, "shards": ranks, "sequences": 1, "tensors": 1}).values()
        shape, names = (stages, replicas, ranks // (replicas * tensors), tensors), (PIPELINE, REPLICATE, FSDP, TENSOR)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        mesh[REPLICATE, FSDP, TENSOR]._flatten(STAGE)
        return mesh
    if sizes is None or all(size == 1 for key, size in sizes.items() if key != "dp_shard_size"):
        return None
    replicas, shards, sequences, tensors = sizes.values()
    return init_device_mesh(
        device_type, (replicas, shards * sequences, tensors), mesh_dim_names=(REPLICATE, FSDP, TENSOR)
    )


def make_sequence_group(sharding: Sharding, ranks: int, device_type: str) -> ProcessGroup | None:
    """The ranks that share a row's tokens with this one; None if it has whole rows. All `ranks` call it."""
    sequences = sharding.sequence_parallel_size
    if sequences == 1:
        return None
    tensors = sharding.tensor_parallel_size
    sizes = (ranks // (sequences * tensors), sequences, tensors)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=(BATCH, SEQUENCE, TENSOR))
    return mesh.get_group(SEQUENCE)


def make_expert_mesh(sharding: Sharding, ranks: int, device_type: str) -> DeviceMesh:
    """The mesh of the experts of a mixture, over all `ranks`, which call it together: neighbors in EXPERT divide the
    experts of a layer between them; FSDP shards each of them over EXPERT_SHARD, the ranks of a replica that have the
    same experts."""
    stages, replicas, size = (
        sharding.pipeline_parallel_size,
        sharding.replicate_size or 1,
        sharding.expert_parallel_size,
    )
    shape = (stages, replicas, ranks // (stages * replicas * size), size)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=(PIPELINE, REPLICATE, EXPERT_SHARD, EXPERT))
    # A norm is then one sum over all ranks of a replica, the same on each, and not one for each dimension.
    mesh[EXPERT_SHARD, EXPERT]._flatten()
    return mesh


def make_accelerator(sharding: Sharding, device: torch.device) -> Accelerator:
    """Accelerate's Accelerator for this layout. The process group, where there is one, has been initialized."""
    for variable in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_"))]:
        del os.environ[variable]  # plugin fields left None would be filled from these: the config is read once, by us
    on_cpu = device.type == "cpu"
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=on_cpu)
    if on_cpu and sharding.is_fsdp:
        # Accelerate raises a distributed type to FSDP only from a GPU-like one; MULTI_CPU would train plain DDP.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        PartialState._shared_state["device"] = device
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=sharding.mixed_precision,
        fsdp_plugin=_fsdp_plugin(sharding) if sharding.is_fsdp else None,
    )
    # Accelerate's own mesh refuses ranks that divide tensors alone, and its sequence parallelism is DeepSpeed's.
    mesh = make_mesh(sharding, device.type)
    if mesh is not None:
        accelerator.state.device_mesh = mesh
        accelerator.state.parallelism_config = _MeshOfFsdp(sharding)
    return accelerator


class _MeshOfFsdp(ParallelismConfig):  # type: ignore[misc]
    """Names for Accelerate the dimensions of our mesh over which FSDP replicates and shards."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.is_replicated = (sharding.replicate_size or 1) > 1

    @property
    def fsdp_dim_names(self) -> list[str]:
        return [REPLICATE, FSDP] if self.is_replicated else [FSDP]


def _fsdp_plugin(sharding: Sharding) -> Any:
    """Accelerate's plugin with every field given that it would otherwise take from the environment."""
    version = 2 if sharding.layout == "fsdp2" else 1
    by_version: dict[str, Any] = (
        {"reshard_after_forward": sharding.strategy != "SHARD_GRAD_OP"}
        if version == 2
        else {
            "use_orig_params": True,
            "sync_module_states": False,
            "forward_prefetch": sharding.forward_prefetch,
            "backward_prefetch": "BACKWARD_PRE",
        }
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        cpu_offload=CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if version == 2 and sharding.cpu_offload
        else sharding.cpu_offload,
        # By size too is by class, once the model exists and can be measured: see parallelize.find_wrap_classes.
        auto_wrap_policy="no_wrap" if sharding.wrapping == "NO_WRAP" else "transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,  # the model's own is used: see models/decoder_layers.py
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=_precision(sharding),
        **by_version,
    )


def _precision(sharding: Sharding) -> Any:
    """Compute in bf16 or fp16, reduce in fp32, keep outputs: Accelerate's policy would round the loss to bf16."""
    if sharding.mixed_precision == "no":
        return None
    dtype = torch.bfloat16 if sharding.mixed_precision == "bf16" else torch.float16
    if sharding.layout == "fsdp2":
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
