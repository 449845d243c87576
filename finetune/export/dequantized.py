"""A base as an adapter was trained on it in 4 or 8 bits: each weight quantized and dequantized again, one in memory at a time."""

from collections.abc import Callable

import torch

from finetune.export.source import Source
from finetune.models.quantize import dequantize_tensor, quantize_tensor
from finetune.safetensors_io.tensors import StoredTensor, read

ReadDequantized = Callable[[StoredTensor], torch.Tensor]


def make_dequantizer(source: Source) -> ReadDequantized:
    """A function that reads a weight [rows, columns] of the base in the numbers, of the compute dtype, that the training
    multiplied with. It keeps the latest one, for its rows are asked for block by block: each thread needs its own."""
    latest: list[tuple[StoredTensor, torch.Tensor]] = []

    def read_dequantized(stored: StoredTensor) -> torch.Tensor:
        if not latest or latest[0][0] is not stored:
            latest.clear()  # freed before the next is computed
            as_stored = source.quantized.get(stored.name)
            quantized = as_stored.read_whole() if as_stored else quantize_tensor(read(stored), source.quantization)
            latest.append((stored, dequantize_tensor(quantized, source.compute_dtype)))
        return latest[0][1]

    return read_dequantized
