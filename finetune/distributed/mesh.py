"""The device mesh: ranks arranged by what they divide between them. Neighbors divide a tensor, their groups a row's tokens.

From the outermost dimension, as Accelerate orders them: replicas, shards, sequences, tensors. FSDP shards parameters over the
ranks of shards and sequences together, since each of them has gradients of tokens of its own.
"""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from finetune.config.layout import Sharding

REPLICATE, FSDP, TENSOR = "dp_replicate", "fsdp", "tp"
BATCH, SEQUENCE = "batch", "sp"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"


def make_mesh(sharding: Sharding, device_type: str) -> DeviceMesh | None:
    """The mesh of all ranks, which call it together; None where the world is one dimension."""
    sizes = sharding.mesh_sizes
    if sizes is None or all(size == 1 for key, size in sizes.items() if key != "dp_shard_size"):
        return None
    replicas, shards, sequences, tensors = sizes.values()
    return init_device_mesh(
        device_type, (replicas, shards * sequences, tensors), mesh_dim_names=(REPLICATE, FSDP, TENSOR)
    )


def make_sequence_group(sharding: Sharding, ranks: int, device_type: str) -> ProcessGroup | None:
    """The ranks that divide a row's tokens with this one; None where a rank has whole rows. All `ranks` call it together."""
    if sharding.sequence_parallel_size == 1:
        return None
    sizes = (ranks // sharding.ranks_per_batch, sharding.sequence_parallel_size, sharding.tensor_parallel_size)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=(BATCH, SEQUENCE, TENSOR))
    return mesh.get_group(SEQUENCE)


def make_expert_mesh(sharding: Sharding, ranks: int, device_type: str) -> DeviceMesh:
    """The mesh of the experts of a mixture, over all `ranks`, which call it together: neighbors in EXPERT divide the experts of a
    layer between them; FSDP shards each of them over EXPERT_SHARD, the ranks of a replica that have the same experts."""
    replicas, size = sharding.replicate_size or 1, sharding.expert_parallel_size
    shape = (replicas, ranks // (replicas * size), size)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, EXPERT_SHARD, EXPERT))
    # A norm is then one sum over all ranks of a replica, the same on each, and not one for each dimension.
    mesh[EXPERT_SHARD, EXPERT]._flatten()
    return mesh
