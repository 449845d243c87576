"""What a run needs beside device memory: the host's, and room on disk."""

from dataclasses import dataclass

from finetune.constants import ITEMSIZE
from finetune.plan.memory import peak
from finetune.plan.run_spec import Job
from finetune.plan.state import MOMENT_ITEMSIZE, MOMENTS, moment_bytes

PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
# Without CUDA, its heap grown by the products that are compiled for each length of a row. Measured, less the planned
# tensors: 477 MiB for the quickstart, 971 MiB after 200 bf16 steps of up to 4,096 tokens (benchmarks/speed.py).
CPU_PROCESS_BYTES = 1 << 30
EXPORT_SHARD_BYTES = 5 * 10**9  # finetune export --max-shard-size


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the run's disk."""

    checkpoint: int  # one of them
    checkpoints_kept: int | None  # save_total_limit; None: all
    checkpoints: int  # those kept, and the one that is being written
    export: int
    adapter: int

    @property
    def total(self) -> int:
        return self.checkpoints + self.export + self.adapter


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes of one node's memory."""

    processes: int  # where the ranks compute on the CPU, with all that they hold
    offloaded: int  # parameters, gradients and optimizer state where they are offloaded
    saving: int  # the copy of the state that is written while training goes on
    export: int  # one output file and one tensor, on the first rank

    @property
    def total(self) -> int:
        return self.processes + self.offloaded + max(self.saving, self.export)


def disk(job: Job, base_dtype: str) -> Disk:
    """Room for the checkpoints that are kept at once and for the export, whose type is the recipe's, else `base_dtype`."""
    trained = [tensor for tensor in job.tensors if tensor.trainable]
    itemsize = MOMENT_ITEMSIZE.get(job.recipe.optimization.optim)
    moments = sum(MOMENTS * (itemsize or tensor.itemsize) * tensor.numel for tensor in trained)
    checkpoint = sum(tensor.numel * tensor.itemsize for tensor in trained) + moments
    kept, recipe = job.recipe.checkpoint.save_total_limit, job.recipe.checkpoint
    exported = ITEMSIZE[recipe.export_dtype or base_dtype] * job.architecture.parameters if recipe.export_at_end else 0
    return Disk(
        checkpoint=checkpoint,
        checkpoints_kept=kept,
        checkpoints=checkpoint * ((kept or 1) + 1),
        export=exported,
        adapter=sum(tensor.numel * tensor.itemsize for tensor in trained) if job.recipe.lora.use_peft else 0,
    )


def host(job: Job) -> Host:
    """A node's memory, all its ranks together."""
    ranks = min(job.ranks, job.ranks_per_node)
    trained = [tensor for tensor in job.tensors if tensor.trainable]
    optim = job.recipe.optimization.optim
    state = sum(t.numel * t.itemsize + MOMENTS * moment_bytes(optim, t.numel, t.itemsize) for t in trained)
    everything = state + sum(tensor.numel * tensor.itemsize for tensor in job.tensors if not tensor.trainable)
    gradients = sum(tensor.numel * tensor.itemsize for tensor in trained)
    share = ranks / job.pieces  # of the sharded whole on this node
    largest = max(tensor.numel for tensor in job.tensors) * 4
    return Host(
        processes=ranks * (CPU_PROCESS_BYTES + peak(job).total if job.device == "cpu" else PROCESS_BYTES),
        offloaded=int((everything + gradients) * share) if job.sharding.cpu_offload else 0,
        saving=int(state * min(share, 1)) if job.device == "cuda" else 0,
        export=min(EXPORT_SHARD_BYTES, 4 * job.architecture.parameters) + largest
        if job.recipe.checkpoint.export_at_end
        else 0,
    )
