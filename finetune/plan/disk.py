"""Host memory, and disk for checkpoints and exports."""

from dataclasses import dataclass

from finetune.config.optimizers import count_optimizer_bytes
from finetune.constants import FP32, ITEMSIZE
from finetune.plan.activations import offloaded_bytes
from finetune.plan.run_spec import RunSpec
from finetune.plan.step_memory import find_peak

PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
# Without CUDA, its heap grown by the products that are compiled for each length of a row. Measured, less the planned
# tensors: 477 MiB for the quickstart, 971 MiB after 200 bf16 steps of up to 4,096 tokens (benchmarks/speed.py).
CPU_PROCESS_BYTES = 1 << 30
EXPORT_SHARD_BYTES = 5 * 10**9  # finetune export --max-shard-size


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the run's disk; `offload` is elsewhere."""

    checkpoint: int  # one of them
    checkpoints_kept: int | None  # save_total_limit; None: all
    checkpoints: int  # those kept, and the one being written
    export: int
    adapter: int
    offload: int = 0  # of one node, in offload_dir while it trains

    @property
    def total(self) -> int:
        return self.checkpoints + self.export + self.adapter


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes of one node's memory."""

    processes: int  # where ranks compute on the CPU, with all their tensors
    offloaded: int  # parameters, gradients and optimizer state where they are offloaded
    activations: int  # what checkpointed layers keep, where it is offloaded
    saving: int  # the copy of the state that is written while training continues
    export: int  # one output file and one tensor, on the first rank
    buffers: int = 0  # beside a GPU: through which state in files passes

    @property
    def total(self) -> int:
        return self.processes + self.offloaded + self.activations + self.buffers + max(self.saving, self.export)


def plan_disk(spec: RunSpec, base_dtype: str) -> Disk:
    """Disk for the checkpoints that are kept and for the export, in the recipe's `export_dtype` or else
    `base_dtype`."""
    trained = [tensor for tensor in spec.tensors if tensor.trainable]
    optim = spec.recipe.optimization.optim
    moments = sum(count_optimizer_bytes(optim, tensor.shape, tensor.itemsize, on_disk=True) for tensor in trained)
    saved = (
        trained if spec.recipe.lora.use_peft else spec.tensors
    )  # a full model's is complete, also where some is frozen
    checkpoint = sum(tensor.numel * tensor.itemsize for tensor in saved) + moments
    kept, recipe, files = spec.recipe.checkpoint.save_total_limit, spec.recipe.checkpoint, spec.files()
    exported = ITEMSIZE[recipe.export_dtype or base_dtype] * spec.architecture.parameters if recipe.export_at_end else 0
    return Disk(
        checkpoint=checkpoint,
        checkpoints_kept=kept,
        checkpoints=checkpoint * ((kept or 1) + 1),
        export=exported,
        adapter=sum(tensor.numel * tensor.itemsize for tensor in trained) if spec.recipe.lora.use_peft else 0,
        offload=files.size * min(spec.ranks, spec.ranks_per_node) if files is not None else 0,
    )


def plan_host(spec: RunSpec) -> Host:
    """The memory of one node, for all its ranks."""
    ranks = min(spec.ranks, spec.ranks_per_node)
    trained = [tensor for tensor in spec.tensors if tensor.trainable]
    optim = spec.recipe.optimization.optim
    files = spec.files()
    if files is None:
        state = sum(t.numel * t.itemsize + count_optimizer_bytes(optim, t.shape, t.itemsize) for t in trained)
    else:
        state = sum(t.numel * ITEMSIZE[spec.compute_dtype] + FP32 for t in trained)
    frozen = sum(tensor.numel * tensor.itemsize for tensor in spec.tensors if not tensor.trainable)
    gradients = sum(tensor.numel * tensor.itemsize for tensor in trained)
    teacher = sum(tensor.numel * tensor.itemsize for tensor in spec.teacher_tensors)
    share = ranks / spec.state_ranks  # of the sharded state, on this node
    largest = max(tensor.numel for tensor in spec.tensors) * 4
    return Host(
        processes=ranks * (CPU_PROCESS_BYTES + find_peak(spec).total if spec.device == "cpu" else PROCESS_BYTES),
        offloaded=int((state + frozen + gradients + teacher) * share) if spec.sharding.cpu_offload else 0,
        activations=ranks * offloaded_bytes(spec.part, spec.computation, spec.tokens),
        saving=int((state + (0 if spec.recipe.lora.use_peft else frozen)) * min(share, 1))
        if spec.device == "cuda" and files is None
        else 0,
        export=min(EXPORT_SHARD_BYTES, 4 * spec.architecture.parameters) + largest
        if spec.recipe.checkpoint.export_at_end
        else 0,
        buffers=2 * files.buffer * ranks if files is not None and spec.device == "cuda" else 0,
    )
