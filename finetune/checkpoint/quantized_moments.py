"""8-bit moments as plain fp32 tensors, so that a checkpoint holds nothing but numbers that any layout can read, and back.

torchao's tensor has `codes` (uint8, shaped like the whole), `scale` (fp32, the largest magnitude of each block of numbers)
and `qmap` (256 fp32 numbers in [-1, 1], what a code stands for). torchao itself is not imported here.
"""

from typing import Any

import torch


def is_quantized(tensor: Any) -> bool:
    """Whether this is torchao's 8-bit tensor, of which torch sees only the wrapper."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def dequantized(tensor: Any) -> torch.Tensor:
    """The fp32 numbers, of which torchao's own quantization makes the same codes and scales again.

    Its lowest signed code stands for -0.993, but is what it makes of a block's largest magnitude, -1, from which it takes
    the scale. Written as -0.993 the scale, and with it every code of that block, would be another; so it is written as -1.
    """
    values = tensor.qmap.clone()
    if tensor.signed:
        values[0] = -1.0
    blocks: torch.Tensor = values[tensor.codes.int()].view(len(tensor.scale), -1) * tensor.scale.view(-1, 1)
    return blocks.view(tensor.shape)


def quantize_into(tensor: Any, values: torch.Tensor) -> None:
    """Fills the 8-bit `tensor` from plain `values` of its shape."""
    tensor.copy_(values.to(tensor.device, torch.float32))


def host_memory(tensor: Any) -> Any:
    """Memory on the host for a copy of `tensor`, quantized or not; pinned where it is on a GPU."""
    if is_quantized(tensor):
        parts = host_memory(tensor.codes), host_memory(tensor.scale), tensor.qmap.cpu()
        return type(tensor)(*parts, tensor.signed, dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
