"""The ranks of a run: this rank's place among them, and what they exchange.

Ranks exchange tensors and JSON, never pickles, and can run an action that succeeds on all ranks or
fails on all. A stage is a group of ranks with the same layers; without pipeline parallelism all
ranks are one stage.
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

# Names of the dimensions of the meshes; `join` makes the meshes.
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
    """The share of a step's rows, and of their tokens, that a rank trains on.

    The rows are divided into `size` shares, and this rank trains on share `rank`. Ranks that work
    on a row together have the same `rank`.
    """

    rank: int
    size: int
    local_rank: int  # the process's index on its node
    device: torch.device
    sequence_rank: int = 0  # index among the ranks that divide the tokens of a row
    sequence_size: int = 1  # the number of these ranks


def alone() -> DataParallelRank:
    """Returns the share of a process without other ranks, on the CPU: all rows."""
    return DataParallelRank(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def gather_json(
    value: Any, group: ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[Any]:
    """Returns the `value` of every rank of `group`, in order of rank. All of them call it.

    Each value is sent as JSON, in a tensor of bytes on `device`. Every rank receives as many times
    the longest value as there are ranks: `broadcast_json` is for a value of one rank.
    """
    own_text = _encode(value).to(device)
    ranks = dist.get_world_size(group)
    # an all-gather needs tensors of one size: lengths first, then texts padded to the longest
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([own_text.numel()], device=device), group)
    longest = int(max(size.item() for size in sizes))
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    padded_text = torch.nn.functional.pad(own_text, (0, longest - own_text.numel()))
    dist.all_gather(texts, padded_text, group)
    values = []
    for text, size in zip(texts, sizes, strict=True):
        values.append(_decode(text[: int(size.item())]))
    return values


def broadcast_json(value: Any, group: ProcessGroup | None = None) -> Any:
    """Returns the `value` of rank 0 on every rank of `group`, a gloo group of all ranks.

    All ranks call it; the other ranks' `value` is not used.
    """
    is_main = dist.get_rank() == 0
    text = _encode(value) if is_main else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, 0, group)
    if not is_main:
        text = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(text, 0, group)
    return _decode(text)


def _encode(value: Any) -> Tensor:
    """Returns `value` as JSON, uint8[bytes]."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    """Returns the value that `_encode` wrote into `text`, uint8[bytes]."""
    return json.loads(text.cpu().numpy().tobytes())


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks of a run, and the collectives over all ranks.

    One process is a world of one, and runs the same code.
    """

    rank: int
    size: int
    local_rank: int  # this process's index on its node
    local_size: int  # the number of ranks on this node
    device: torch.device
    sharding: Sharding
    accelerator: "Accelerator"
    collective_timeout: timedelta = timedelta(minutes=30)  # after which a collective gives up
    # the ranks that divide the tokens of a row with this one; None: each rank has whole rows
    sequence_group: ProcessGroup | None = None
    # environment variable that joining changed -> its value before; None: it was not set
    environment: dict[str, str | None] = field(default_factory=dict)
    # set by `leave`; until then, the end of another rank on this node ends this process
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def stages(self) -> int:
        """The number of pipeline stages; 1 without pipeline parallelism."""
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
        """The group of this rank's stage; None (the default group) if all ranks are in it."""
        if self.mesh is None or self.stage_size == self.size:
            return None
        return self.mesh[STAGE].get_group()

    @property
    def shard_group_size(self) -> int:
        """The number of ranks over which one replica of the stage's layers is sharded."""
        return self.sharding.count_replica_ranks(self.stage_size, self.local_size)

    @property
    def shard_rank(self) -> int:
        """This rank's index in its shard group.

        The ranks of a tensor-parallel group have the same index.
        """
        return self.sharding.tensor_group_of(self.rank_in_stage % self.shard_group_size)

    @property
    def data_parallel(self) -> DataParallelRank:
        """This rank's share of a step's rows and tokens.

        The ranks of a sequence-parallel or tensor-parallel group have the same rows, and so have
        the ranks of a pipeline.
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
        """Whether this is the first of the ranks that train on the same rows.

        A sum over ranks that should count such rows once takes them from this rank.
        """
        return self.rank < self.stage_size and self.rank % self.sharding.ranks_per_row == 0

    @property
    def tensor_group_index(self) -> int:
        """The index of this rank's tensor-parallel group in its stage.

        The ranks of a group compute the same losses. Without tensor parallelism each rank is a
        group.
        """
        return self.sharding.tensor_group_of(self.rank_in_stage)

    @property
    def tensor_group_count(self) -> int:
        """The number of tensor-parallel groups in a stage; gradients are averaged over them.

        Without tensor parallelism each rank is a group.
        """
        return self.sharding.tensor_group_of(self.stage_size)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The mesh that `join.make_mesh` made, or None."""
        return getattr(self.accelerator, "torch_device_mesh", None)

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the element-wise sum of `tensor` over all ranks, in place. All ranks call it."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Returns the element-wise maximum of `tensor` over all ranks, in place.

        All ranks call it.
        """
        if dist.is_initialized():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_over_groups(self, tensor: Tensor) -> Tensor:
        """Returns the sum of `tensor` as `sum` does, but counts equal tensors once.

        All ranks of a tensor-parallel group, or of a pipeline, have the same `tensor`.
        """
        summed = self.sum(tensor)
        copies = self.size // self.tensor_group_count
        return summed if copies == 1 else summed.div_(copies)

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank. All ranks call it."""
        if dist.is_initialized():
            return bool(self.sum(torch.tensor(int(flag))).item())
        return flag

    def barrier(self) -> None:
        """Waits until every rank has called this.

        The tensor is on the CPU, so gloo sums it, and no rank waits for its GPU's queue.
        """
        self.sum(torch.zeros(1))

    def gather(self, value: Any, group: ProcessGroup | None = None) -> list[Any]:
        """Returns the JSON `value` of every rank, in order of rank. All ranks call it.

        `group` is a gloo group of all ranks, by default the world's. A thread beside the training
        loop needs a group of its own.
        """
        if dist.is_initialized():
            return gather_json(value, group)
        return [value]

    def broadcast(self, value: Any, group: ProcessGroup | None = None) -> Any:
        """Returns the JSON `value` of rank 0 on every rank. All ranks call it.

        `group` is as for `gather`.
        """
        if dist.is_initialized():
            return broadcast_json(value, group)
        return value


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Runs actions that succeed on all ranks or fail on all."""

    world: "World"
    # a group of all ranks; None: the default group. A thread beside the training loop needs its own
    group: ProcessGroup | None = None

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on each rank; returns all JSON results, in order of rank, on every rank.

        All ranks call it. If the action raises on one rank, every other rank raises `AgreedError`
        with its message. So does the failed rank for `OSError` and `UserError`. Any other exception
        is a fault of the program, and is raised unchanged on the failed rank.
        """
        result = None
        error = None
        try:
            result = action()
        except Exception as failure:  # raised below: the other ranks wait for this one's result
            error = failure
        sentence = None if error is None else _describe_error(error)
        outcomes = self.world.gather({"result": result, "error": sentence}, self.group)
        if error is not None and not isinstance(error, OSError | UserError):
            raise error
        sentences = [outcome["error"] for outcome in outcomes]
        by_rank = [f"rank {rank}: {text}" for rank, text in enumerate(sentences) if text]
        different = set(filter(None, sentences))
        if len(different) == 1:
            raise AgreedError(different.pop()) from error
        if by_rank:
            raise AgreedError("; ".join(by_rank)) from error
        return [outcome["result"] for outcome in outcomes]

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0; returns its JSON result on every rank.

        All ranks call it, and wait for rank 0. It raises as `on_all` does.
        """
        result = None

        def run_on_main() -> None:
            nonlocal result
            if self.world.is_main:
                result = action()

        self.on_all(run_on_main)
        return self.world.broadcast(result, self.group)


def _describe_error(error: Exception) -> str:
    """Returns a sentence for a person on what went wrong."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}{_describe_full_disk(error)}"
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _describe_full_disk(error: OSError) -> str:
    """Returns advice if the error is a full disk or an exhausted quota; else an empty text."""
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
    """Sends rows to each rank of `group` and returns the rows from all ranks, in order of rank.

    The backward sends the gradients back. All ranks of the group call it.

    Args:
        rows: [rows, ...], in order of the rank to which they go.
        group: The ranks.
        sent: The number of rows for each rank; None: the same for all.
        received: The number of rows from each rank; None: the same from all.
    """
    exchanged: Tensor = _AllToAll.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return exchanged


# torch.distributed.nn's version is deprecated. A functional collective returns a wrapper that waits
# later, and all views and saved tensors of a layer would be such wrappers.
class _AllToAll(torch.autograd.Function):
    """Exchanges rows as `all_to_all` does; the backward swaps the numbers sent and received."""

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
