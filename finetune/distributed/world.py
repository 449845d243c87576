"""The ranks of a run: what this one is among them, and what they exchange without pickles.

They exchange tensors, values as JSON, and actions that succeed on all ranks or fail on all.
"""

import errno
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from finetune.config.layout import Sharding
from finetune.errors import AgreedError, UserError
from finetune.units import disk_size

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

# The dimensions of the meshes.
PIPELINE = "pp"
REPLICATE = "dp_replicate"
FSDP = "fsdp"
TENSOR = "tp"
STAGE = "stage"  # of a pipeline: the ranks with the same layers, which the last three divide
BATCH = "batch"
SEQUENCE = "sp"
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """Which of the step's rows are this rank's: those of `rank` among `size`; and which part of
    their tokens.
    """

    rank: int
    size: int
    local_rank: int  # on this node, of all ranks
    device: torch.device
    sequence_rank: int = 0  # of those that divide the tokens of a row between them
    sequence_size: int = 1


def alone() -> DataParallelRank:
    """A process without other ranks, on the CPU."""
    return DataParallelRank(0, 1, 0, torch.device("cpu"))


def gather_json(
    value: Any, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[Any]:
    """Every rank's `value`, sent as JSON over tensors on `device`, in order of rank.

    All ranks of `group` call it.
    """
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([raw.numel()], device=device), group)
    longest = int(max(size.item() for size in sizes))
    padded = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(padded, torch.nn.functional.pad(raw, (0, longest - raw.numel())), group)
    return [
        json.loads(bytes(p[: int(n.item())].tolist())) for p, n in zip(padded, sizes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks.

    One process is a world of one: the same code, the same layout.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    device: torch.device
    sharding: Sharding
    accelerator: "Accelerator"
    collective_timeout: timedelta = timedelta(minutes=30)  # after which a collective gives up
    # the ranks that divide a row's tokens; None: a rank has whole rows
    sequence_group: dist.ProcessGroup | None = None
    # What the environment said, before joining, of the variables that joining changes; None:
    # nothing.
    environment: dict[str, str | None] = field(default_factory=dict)
    # set by `leave`: peers may end from then on
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def stages(self) -> int:
        """Groups of ranks that hold different layers: one but under pipeline parallelism."""
        return self.sharding.pipeline_parallel_size

    @property
    def stage_size(self) -> int:
        """The number of ranks that hold the same layers."""
        return self.size // self.stages

    @property
    def rank_in_stage(self) -> int:
        """This rank's index among those that hold the same layers."""
        return self.rank % self.stage_size

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same layers; None where all do."""
        if self.mesh is None or self.stage_size == self.size:
            return None
        return self.mesh[STAGE].get_group()

    @property
    def shard_group_size(self) -> int:
        """The number of ranks that share one replica of the model, or of these layers."""
        return self.sharding.count_replica_ranks(self.stage_size, self.local_size)

    @property
    def shard_rank(self) -> int:
        """This rank's position in its shard group, which ranks of a tensor-parallel group share."""
        return self.sharding.tensor_group_of(self.rank_in_stage % self.shard_group_size)

    @property
    def data_parallel(self) -> DataParallelRank:
        """This rank among those with rows of their own; the ranks of a sequence or tensor group
        count as one.
        """
        sequence = self.sharding.sequence_parallel_size
        shared = self.sharding.ranks_per_row
        rank = self.rank_in_stage // shared
        size = self.stage_size // shared
        part = self.tensor_group_index % sequence
        return DataParallelRank(rank, size, self.local_rank, self.device, part, sequence)

    @property
    def is_first_of_batch(self) -> bool:
        """Whether no rank before this one trains on the same rows: what all of them know is counted
        once.
        """
        return self.rank < self.stage_size and self.rank % self.sharding.ranks_per_row == 0

    @property
    def tensor_group_index(self) -> int:
        """This rank's tensor-parallel group among `tensor_group_count`: its ranks compute the same
        losses.
        """
        return self.sharding.tensor_group_of(self.rank_in_stage)

    @property
    def tensor_group_count(self) -> int:
        """The number of tensor-parallel groups with the same layers, over which gradients are
        averaged, or of ranks.
        """
        return self.sharding.tensor_group_of(self.stage_size)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The mesh of `join.make_mesh`; None where the world is one dimension."""
        mesh: DeviceMesh | None = getattr(self.accelerator, "torch_device_mesh", None)
        return mesh

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of every rank's `tensor`, in place, on every rank."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum of every rank's `tensor`, in place, on every rank."""
        if dist.is_initialized():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_over_groups(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `sum`, with ranks that know the same `tensor` (a tensor parallel group, a pipeline)
        counted once.
        """
        summed = self.sum(tensor)
        copies = self.size // self.tensor_group_count
        return summed if copies == 1 else summed.div_(copies)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if dist.is_initialized():
            return bool(self.sum(torch.tensor(int(flag))).item())
        return flag

    def barrier(self) -> None:
        """Waits for every rank. Over gloo, so that a GPU's queue is left alone."""
        self.sum(torch.zeros(1))

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's `value` (anything JSON can say), in order of rank, on every rank.

        No pickle crosses the wire.

        A thread beside the loop gives a gloo `group` of its own.
        """
        if dist.is_initialized():
            return gather_json(value, group)
        return [value]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that agree, over a process group.

    A thread beside the training loop needs its own group.
    """

    world: "World"
    group: dist.ProcessGroup | None = None  # None: the default group

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on each rank; returns the results (anything JSON can say), in order of
        rank, on every rank.

        Where it raises `OSError` or `UserError` on one rank, every rank raises the same
        `AgreedError`; anything else is a fault of the program, which is raised as it is where it
        happens.
        """
        result = None
        error = None
        try:
            result = action()
        except (
            Exception
        ) as failure:  # the other ranks must learn of it first, since they wait for this one
            error = failure
        outcomes = self.world.gather(
            {"result": result, "error": error and _sentence(error)}, self.group
        )
        failed = {
            rank: outcome["error"] for rank, outcome in enumerate(outcomes) if outcome["error"]
        }
        if error is not None and not isinstance(error, OSError | UserError):
            raise error
        if len(set(failed.values())) == 1:
            raise AgreedError(next(iter(failed.values()))) from error
        if failed:
            raise AgreedError(
                "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            ) from error
        return [outcome["result"] for outcome in outcomes]

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0; returns its result on every rank. The others wait for it."""
        return self.on_all(lambda: action() if self.world.is_main else None)[0]


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}{_describe_full_disk(error)}"
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _describe_full_disk(error: OSError) -> str:
    """Says what to do where a disk, or a user's quota, has no bytes or no files left; empty for
    other errors.
    """
    folder = Path(error.filename or ".").parent
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not folder.is_dir():
        return ""
    disk = os.statvfs(folder)
    if disk.f_files and not disk.f_favail:
        return (
            " (no inodes are left there, though bytes are); remove files, or set output_dir to "
            "another disk"
        )
    return (
        f" ({disk_size(disk.f_frsize * disk.f_bavail)} free there); make room, or set output_dir "
        "to a larger disk"
    )


def all_to_all(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> torch.Tensor:
    """Sends `sent[r]` of the rows to each rank r of the group, and returns the rows received, in
    order of rank.

    Its backward returns the gradients the same way. By default every rank sends and receives as
    many.
    """
    exchanged: torch.Tensor = _AllToAll.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return exchanged


# torch.distributed.nn has the same and is deprecated; the functional collectives return a tensor
# that waits later, and that a layer's views and saved tensors would all be.
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: dist.ProcessGroup,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> torch.Tensor:
        ctx.arguments = group, received, sent
        arriving = rows.new_empty(
            (len(rows) if received is None else sum(received), *rows.shape[1:])
        )
        dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group)
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(gradients[0], *ctx.arguments), None, None, None
