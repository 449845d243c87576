"""What keeps a recipe, or a layout, from having the optimizer's state in files (optim_offload: nvme). Imports no torch."""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.recipe.optimization_schema import Optimization

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding

OFFLOADED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_bf16_moments")


def find_offload_problems(values: Mapping[str, Any], has_folder: bool) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) with the offload of a recipe with these `values`.

    has_folder: whether `offload_dir` is given, if only with a value that does not fit and is not in `values`.

    >>> list(find_offload_problems({"offload_dir": "/nvme"}, True))
    [('offload_dir', 'offload_dir has no effect without optim_offload: nvme; set it, or leave offload_dir out')]
    """
    if values.get("optim_offload", "none") == "none":
        if has_folder:
            key = "offload_dir"
            yield key, f"{key} has no effect without optim_offload: nvme; set it, or leave {key} out"
        return
    if not has_folder:
        yield "optim_offload", "optim_offload: nvme needs offload_dir, a folder on the NVMe disk of each node"
    elif not values.get("offload_dir", "/").strip():
        yield "offload_dir", "offload_dir: empty text is no folder; name one on the NVMe disk of each node"
    optim = values.get("optim", OFFLOADED_OPTIMIZERS[0])
    if optim not in OFFLOADED_OPTIMIZERS:
        known = ", ".join(OFFLOADED_OPTIMIZERS)
        yield "optim", f"optim: {optim} cannot have its state in files; use one of {known}, or leave optim_offload out"
    if values.get("async_save"):
        yield (
            "async_save",
            "async_save copies the state to host memory, out of which optim_offload: nvme keeps it; leave one of them out",
        )


def check_offload_layout(optimization: Optimization, sharding: "Sharding") -> None:
    """Raises `UserError` where this layout, or this system, cannot have the optimizer's state in files."""
    if optimization.optim_offload == "none":
        return
    where = f"{sharding.source}: optim_offload: nvme"
    if sharding.layout != "fsdp2":
        raise UserError(
            f"{where} is for the shards of FSDP2, of one rank too; use fsdp_full_shard, or leave optim_offload out"
        )
    if sharding.mixed_precision == "fp16":
        raise UserError(f"{where}: not with a loss scaler; set mixed_precision: bf16, or leave optim_offload out")
    if sharding.fp8 is not None:
        raise UserError(f"{where}: not with FP8; set mixed_precision: bf16, or leave optim_offload out")
    if sys.platform != "linux":
        raise UserError(f"{where} needs Linux; leave optim_offload out")
