"""What ranks exchange without pickles: tensors, values as JSON, and actions that succeed on all ranks or fail on all.

`DataParallelRank` is what the data asks about a rank: which rows of a step are its own.
"""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from finetune.errors import UserError
from finetune.units import disk_size

if TYPE_CHECKING:
    from finetune.distributed.world import World


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """Which of the step's rows are this rank's: those of `rank` among `size`; and which part of their tokens."""

    rank: int
    size: int
    local_rank: int  # on this node, of all ranks
    device: torch.device
    sequence_rank: int = 0  # of those that divide the tokens of a row between them
    sequence_size: int = 1


def alone() -> DataParallelRank:
    """A process without other ranks, on the CPU."""
    return DataParallelRank(0, 1, 0, torch.device("cpu"))


def gather_json(value: Any, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> list[Any]:
    """Every rank's `value`, sent as JSON over tensors on `device`, in order of rank. All ranks of `group` call it."""
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([raw.numel()], device=device), group)
    longest = int(max(size.item() for size in sizes))
    padded = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(padded, torch.nn.functional.pad(raw, (0, longest - raw.numel())), group)
    return [json.loads(bytes(p[: int(n.item())].tolist())) for p, n in zip(padded, sizes, strict=True)]


def all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Sends `sent[r]` of the rows to each rank r of the group, and returns the rows received, in order of rank.

    Its backward returns the gradients the same way. By default every rank sends and receives as many.
    """
    exchanged: torch.Tensor = _AllToAll.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return exchanged


# torch.distributed.nn has the same and is deprecated; the functional collectives return a tensor that waits later, and
# that a layer's views and saved tensors would all be.
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
    ) -> torch.Tensor:
        ctx.arguments = group, received, sent
        arriving = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group)
        return arriving

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(gradients[0], *ctx.arguments), None, None, None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that agree, over a process group. A thread beside the training loop needs its own group."""

    world: "World"
    group: dist.ProcessGroup | None = None  # None: the default group

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        """What `action` returns on each rank (anything JSON can say), in order of rank, on every rank.

        Where it raises `OSError` or `UserError` on one rank, every rank raises the same `UserError`; anything else is a
        fault of the program, which is raised as it is where it happens.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as failure:  # the other ranks must learn of it first, since they wait for this one
            error = failure
        outcomes = self.world.gather({"result": result, "error": error and _sentence(error)}, self.group)
        failed = {rank: outcome["error"] for rank, outcome in enumerate(outcomes) if outcome["error"]}
        if error is not None and not isinstance(error, OSError | UserError):
            raise error
        if len(set(failed.values())) == 1:
            raise UserError(next(iter(failed.values()))) from error
        if failed:
            raise UserError("; ".join(f"rank {rank}: {text}" for rank, text in failed.items())) from error
        return [outcome["result"] for outcome in outcomes]

    def on_main(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on rank 0, on every rank; the others wait for it."""
        return self.on_all(lambda: action() if self.world.is_main else None)[0]


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}{_describe_full_disk(error)}"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _describe_full_disk(error: OSError) -> str:
    """What to do where a disk, or a user's quota, has no bytes or no files left; empty for other errors."""
    folder = Path(error.filename or ".").parent
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not folder.is_dir():
        return ""
    disk = os.statvfs(folder)
    if disk.f_files and not disk.f_favail:
        return " (no inodes are left there, though bytes are); remove files, or set output_dir to another disk"
    return f" ({disk_size(disk.f_frsize * disk.f_bavail)} free there); make room, or set output_dir to a larger disk"
