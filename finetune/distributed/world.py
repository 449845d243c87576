"""The ranks of a run: the place of this one among them, and what they exchange without pickles.

They exchange tensors, values as JSON, and actions that succeed on all ranks or fail on all. A stage
is the ranks with the same layers: all of them, except under pipeline parallelism.
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
from torch import Tensor
from torch.distributed import ProcessGroup

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
STAGE = "stage"  # the ranks with the same layers: REPLICATE, FSDP and TENSOR together
BATCH = "batch"
SEQUENCE = "sp"
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """The share of a step's rows, and of their tokens, that a rank trains on: part `rank` of `size`
    parts.
    """

    rank: int
    size: int
    local_rank: int  # on this node, of all ranks
    device: torch.device
    sequence_rank: int = 0  # among the ranks that divide the tokens of a row between them
    sequence_size: int = 1


def alone() -> DataParallelRank:
    """A process without other ranks, on the CPU."""
    return DataParallelRank(0, 1, 0, torch.device("cpu"))


def gather_json(
    value: Any, group: ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[Any]:
    """Returns every rank's `value`, sent as JSON over tensors on `device`, in order of rank.

    All ranks of `group` call it.
    """
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group)
    longest = int(max(size.item() for size in sizes))
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(texts, torch.nn.functional.pad(own, (0, longest - own.numel())), group)
    values = []
    for text, size in zip(texts, sizes, strict=True):
        values.append(json.loads(bytes(text[: int(size.item())].tolist())))
    return values


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
    sequence_group: ProcessGroup | None = None
    # The variables that joining changed -> their values before; None: they were not set.
    environment: dict[str, str | None] = field(default_factory=dict)
    # set by `leave`: from then on other ranks may end
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.sharding.pipeline_parallel_size

    @property
    def stage_size(self) -> int:
        """The number of ranks in a stage."""
        return self.size // self.stages

    @property
    def rank_in_stage(self) -> int:
        """This rank's index in its stage."""
        return self.rank % self.stage_size

    @property
    def stage_group(self) -> ProcessGroup | None:
        """The ranks of this rank's stage; None if all ranks are in it."""
        if self.mesh is None or self.stage_size == self.size:
            return None
        return self.mesh[STAGE].get_group()

    @property
    def shard_group_size(self) -> int:
        """The number of ranks over which a replica of the stage's layers is sharded."""
        return self.sharding.count_replica_ranks(self.stage_size, self.local_size)

    @property
    def shard_rank(self) -> int:
        """This rank's position in its shard group; the ranks of a tensor-parallel group have the
        same one.
        """
        return self.sharding.tensor_group_of(self.rank_in_stage % self.shard_group_size)

    @property
    def data_parallel(self) -> DataParallelRank:
        """This rank's share of a step's rows; the ranks of a sequence or tensor group have the same
        rows.
        """
        sequence_size = self.sharding.sequence_parallel_size
        return DataParallelRank(
            rank=self.rank_in_stage // self.sharding.ranks_per_row,
            size=self.stage_size // self.sharding.ranks_per_row,
            local_rank=self.local_rank,
            device=self.device,
            sequence_rank=self.tensor_group_index % sequence_size,
            sequence_size=sequence_size,
        )

    @property
    def is_first_of_batch(self) -> bool:
        """Whether this is the first of the ranks that train on the same rows; what all of them know
        is counted on it alone.
        """
        return self.rank < self.stage_size and self.rank % self.sharding.ranks_per_row == 0

    @property
    def tensor_group_index(self) -> int:
        """The index of this rank's tensor-parallel group among `tensor_group_count`; its ranks
        compute the same losses.
        """
        return self.sharding.tensor_group_of(self.rank_in_stage)

    @property
    def tensor_group_count(self) -> int:
        """The number of tensor-parallel groups in a stage, over which gradients are averaged;
        without tensor parallelism each rank is one.
        """
        return self.sharding.tensor_group_of(self.stage_size)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The mesh of `join.make_mesh`; None if the world has one dimension."""
        return getattr(self.accelerator, "torch_device_mesh", None)

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the element-wise sum of every rank's `tensor`, in place, on every rank."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Returns the element-wise maximum of every rank's `tensor`, in place, on every rank."""
        if dist.is_initialized():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_over_groups(self, tensor: Tensor) -> Tensor:
        """As `sum`, but the ranks of a tensor-parallel group or of a pipeline have the same
        `tensor`, and count once.
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
        """Waits for every rank; over gloo, so that no GPU is waited for."""
        self.sum(torch.zeros(1))

    def gather(self, value: Any, group: ProcessGroup | None = None) -> list[Any]:
        """Returns every rank's `value` (of JSON), in order of rank, on every rank.

        `group`: of gloo; a thread beside the training loop needs its own.
        """
        if dist.is_initialized():
            return gather_json(value, group)
        return [value]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a process group, which run actions that succeed or fail on all of them."""

    world: "World"
    # None: the default group; a thread beside the training loop needs its own
    group: ProcessGroup | None = None

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on each rank; returns the results (of JSON), in order of rank, on every
        rank.

        If it raises `OSError` or `UserError` on one rank, every rank raises the same `AgreedError`.
        Any other exception is a fault of the program: it is raised as it is, on its rank.
        """
        result = None
        error = None
        try:
            result = action()
        except Exception as failure:  # raised below: the other ranks wait for this one's result
            error = failure
        sentence = None if error is None else _sentence(error)
        outcomes = self.world.gather({"result": result, "error": sentence}, self.group)
        if error is not None and not isinstance(error, OSError | UserError):
            raise error
        sentences = [outcome["error"] for outcome in outcomes]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(sentences) if text]
        if len(set(filter(None, sentences))) == 1:
            raise AgreedError(next(filter(None, sentences))) from error
        if failed:
            raise AgreedError("; ".join(failed)) from error
        return [outcome["result"] for outcome in outcomes]

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0; returns its result on every rank. The others wait for it."""
        return self.on_all(lambda: action() if self.world.is_main else None)[0]


def _sentence(error: Exception) -> str:
    """What is wrong, for a person."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}{_describe_full_disk(error)}"
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _describe_full_disk(error: OSError) -> str:
    """Says what to do if a disk, or a user's quota, has no bytes or no files left; empty for other
    errors.
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
    rows: Tensor,
    group: ProcessGroup,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Sends `sent[r]` of the rows to each rank r of the group; returns the rows from all ranks,
    `received[r]` from rank r, in order of rank.

    Its backward sends the gradients back. None: each rank sends and receives the same number.
    """
    exchanged: Tensor = _AllToAll.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return exchanged


# torch.distributed.nn's is deprecated. A functional collective returns a wrapper that waits later,
# and all views and saved tensors of a layer would be such wrappers.
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: ProcessGroup,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> Tensor:
        ctx.arguments = group, received, sent
        count = len(rows) if received is None else sum(received)
        arriving = rows.new_empty(count, *rows.shape[1:])
        dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group)
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradients[0], *ctx.arguments), None, None, None
