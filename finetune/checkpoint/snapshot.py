"""This rank's tensors as plain numbers and as copies on the host: what an async save writes while training changes the model.

torchao's 8-bit moments are written as fp32 numbers, so that any layout can read a checkpoint. Their tensor has `codes`
(uint8, shaped like the whole), `scale` (fp32, the largest magnitude of each block of numbers) and `qmap` (256 fp32 numbers
in [-1, 1], what a code stands for). torchao itself is not imported here.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from finetune.optim.state_windows import OffloadedTensor

if TYPE_CHECKING:
    from finetune.checkpoint.shards import TensorShard


def is_quantized(tensor: Any) -> bool:
    """Whether this is torchao's 8-bit tensor, of which torch sees only the wrapper."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def dequantize(tensor: Any) -> torch.Tensor:
    """The fp32 numbers, of which torchao's own quantization makes the same codes and scales again.

    Its lowest signed code stands for -0.993, but is what it makes of a block's largest magnitude, -1, from which it takes
    the scale. Written as -0.993 the scale, and with it every code of that block, would be another; so it is written as -1.
    """
    values = tensor.qmap.clone()
    if tensor.signed:
        values[0] = -1.0
    blocks: torch.Tensor = values[tensor.codes.int()].view(len(tensor.scale), -1) * tensor.scale.view(-1, 1)
    return blocks.view(tensor.shape)


def plain_chunks(tensor: Any) -> Iterator[torch.Tensor]:
    """The numbers of a rank's tensor, flat, in its order: at once, or in chunks where it lies in a file (optim_offload: nvme)."""
    if isinstance(tensor, OffloadedTensor):
        yield from tensor.chunks()
    else:
        yield (dequantize(tensor) if is_quantized(tensor) else tensor).contiguous().reshape(-1)


def allocate_on_host(tensor: Any) -> Any:
    """Memory on the host for a copy of `tensor`, quantized or not; pinned where it is on a GPU."""
    if is_quantized(tensor):
        parts = allocate_on_host(tensor.codes), allocate_on_host(tensor.scale), tensor.qmap.cpu()
        return type(tensor)(*parts, tensor.signed, dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def record_event(device: torch.device) -> Any:
    """A CUDA event after all work queued so far; None on a CPU, where that work is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def copy_to_host(
    shards: list["TensorShard"], copies: dict[str, torch.Tensor], event: Any, device: torch.device
) -> list["TensorShard"]:
    """The shards with their tensors, as they are at `event` (of `record_event`), copied into `copies`.

    `copies` is filled by the first call and reused by the next. On a GPU the copies run on a stream of their own.
    """
    # A new thread's device is the first, whatever the loop's is.
    stream = None if event is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied = []
    with torch.cuda.stream(stream):
        if stream is not None:
            stream.wait_event(event)
        for shard in shards:
            name, tensor = f"{shard.part}/{shard.name}", shard.tensor
            copy = copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = copies[name] = allocate_on_host(tensor)
            copy.copy_(tensor, non_blocking=True)
            copied.append(replace(shard, tensor=copy))
    if stream is not None:
        stream.synchronize()
    return copied
