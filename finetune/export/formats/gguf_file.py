"""GGUF files: planned, streamed to disk a block of rows at a time, and read back by the gguf package."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
import xxhash

from finetune.errors import UserError
from finetune.export.formats.gguf_model import FileTensor
from finetune.export.target import prefetch, raw_bytes
from finetune.export.write import fill_file, make_file

ALIGNMENT: int = gguf.GGUF_DEFAULT_ALIGNMENT
Kind = gguf.GGMLQuantizationType
# What is written here; every other type is made by llama.cpp.
FILE_TYPES = {
    "f32": (Kind.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Kind.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One GGUF file. `header` are its bytes before the values."""

    name: str
    header: bytes
    tensors: tuple[tuple[FileTensor, gguf.GGMLQuantizationType], ...]

    @property
    def byte_count(self) -> int:
        return len(self.header) + sum(_padded(byte_count(tensor, kind)) for tensor, kind in self.tensors)


def file_name(title: str) -> str:
    """
    >>> file_name("my model/é")
    'my-model'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-") or "model"


def byte_count(tensor: FileTensor, kind: gguf.GGMLQuantizationType) -> int:
    shape: tuple[int, ...] = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
    return math.prod(shape)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def choose_kind(tensor: FileTensor, file_type: str) -> gguf.GGMLQuantizationType:
    """The type of one tensor in a file of `file_type`: as llama.cpp's own converter has it."""
    if tensor.stays_float32:
        return Kind.F32
    kind, _ = FILE_TYPES[file_type]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if tensor.shape[-1] % block == 0 else Kind.F16


def plan_file(
    name: str,
    architecture: str,
    tensors: Sequence[FileTensor],
    file_type: str,
    write_keys: Callable[[Any], Sequence[FileTensor]],
) -> PlannedFile:
    """A file of `tensors`. `write_keys` adds its keys to a `gguf.GGUFWriter`, and returns tensors that go with them."""
    writer = gguf.GGUFWriter(None, architecture)
    generated = write_keys(writer)
    chosen = tuple((tensor, choose_kind(tensor, file_type)) for tensor in (*tensors, *generated))
    writer.add_file_type(FILE_TYPES[file_type][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor, kind in chosen:
        shape, size = gguf.quant_shape_to_byte_shape(tensor.shape, kind), byte_count(tensor, kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, raw_dtype=kind)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return PlannedFile(name, header.ljust(_padded(len(header)), b"\0"), chosen)


def write_file(folder: Path, file: PlannedFile, advance: Callable[[int], object]) -> dict[str, str]:
    """Writes `file` into `folder`. Returns the digest (xxh3, 128 bits) of each tensor's bytes, taken from memory."""
    digests = {tensor.name: xxhash.xxh3_128() for tensor, _ in file.tensors}

    def content() -> Iterator[bytes | memoryview]:
        for tensor, kind in file.tensors:
            size = byte_count(tensor, kind)
            parts = ((block, kind, tensor.name) for block in tensor.blocks())
            for packed in prefetch(pack, parts):
                digests[tensor.name].update(packed)
                advance(len(packed))
                yield packed
            yield bytes(_padded(size) - size)

    make_file(folder / file.name, file.header, file.byte_count)
    fill_file(folder / file.name, len(file.header), content())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def pack(block: torch.Tensor, kind: gguf.GGMLQuantizationType, name: str) -> memoryview:
    """Rows in float32 as a file holds them. Raises `UserError` where float16 cannot hold them."""
    if kind == Kind.F16:
        half = block.half()
        if not torch.equal(torch.isfinite(half), torch.isfinite(block)):
            raise UserError(f"{name}: holds values beyond float16's 65,504; export with --gguf-type bf16 or f32")
        return raw_bytes(half)
    if kind in (Kind.F32, Kind.BF16):
        return raw_bytes(block.to(torch.float32 if kind == Kind.F32 else torch.bfloat16))
    return _bytes_of(gguf.quants.quantize(block.numpy(), kind))


def _bytes_of(values: Any) -> memoryview:
    """The bytes of a numpy array, row-major."""
    return memoryview(values.reshape(-1)).cast("B")


def find_differences(path: Path, file: PlannedFile, written: dict[str, str]) -> list[str]:
    """What the gguf package reads in a file otherwise than was written, in words; empty where all is the same."""
    expected = {tensor.name: (tensor.shape, kind) for tensor, kind in file.tensors}
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    problems = [f"{name}: not in the file" for name in expected if name not in found]
    problems += [f"{name}: in the file, but not in the model" for name in found if name not in expected]
    for name, (shape, kind) in expected.items():
        if name not in found:
            continue
        tensor = found[name]
        has = tuple(int(size) for size in reversed(tensor.shape))
        if (has, tensor.tensor_type) != (shape, kind):
            problems.append(f"{name}: {tensor.tensor_type.name} {has}, not {kind.name} {shape}")
        elif xxhash.xxh3_128(_bytes_of(tensor.data)).hexdigest() != written[name]:
            problems.append(f"{name}: differs from what was written")
    return problems
