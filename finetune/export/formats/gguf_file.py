"""GGUF files: planned, streamed to disk a block of rows at a time, read back by the gguf package,
run by llama.cpp.

llama.cpp runs in a process of its own (`_run`): a file that it cannot use ends that process,
sometimes by an abort, and not the export.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
import xxhash

import finetune
from finetune.constants import Shape, round_up
from finetune.errors import UserError
from finetune.export.formats.gguf_model import FileTensor
from finetune.export.target import prefetch, raw_bytes
from finetune.export.write import fill_file, make_file

ALIGNMENT: int = gguf.GGUF_DEFAULT_ALIGNMENT
Kind = gguf.GGMLQuantizationType
IMPORTED = "finetune: imported"  # from here on, llama.cpp's process says what llama.cpp says
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
        return len(self.header) + sum(
            round_up(byte_count(tensor, kind), ALIGNMENT) for tensor, kind in self.tensors
        )


def file_name(title: str) -> str:
    """Returns a title as the name of a file.

    >>> file_name("my model/é")
    'my-model'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-") or "model"


def byte_count(tensor: FileTensor, kind: gguf.GGMLQuantizationType) -> int:
    shape: Shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
    return math.prod(shape)


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
    """A file of `tensors`.

    `write_keys` adds its keys to a `gguf.GGUFWriter`, and returns tensors that go with them.
    """
    writer = gguf.GGUFWriter(None, architecture)
    generated = write_keys(writer)
    chosen = tuple((tensor, choose_kind(tensor, file_type)) for tensor in (*tensors, *generated))
    writer.add_file_type(FILE_TYPES[file_type][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor, kind in chosen:
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        size = byte_count(tensor, kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, raw_dtype=kind)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return PlannedFile(name, header.ljust(round_up(len(header), ALIGNMENT), b"\0"), chosen)


def write_file(folder: Path, file: PlannedFile, advance: Callable[[int], object]) -> dict[str, str]:
    """Writes `file` into `folder`.

    Returns the digest (xxh3, 128 bits) of each tensor's bytes, taken from memory.
    """
    digests = {tensor.name: xxhash.xxh3_128() for tensor, _ in file.tensors}

    def content() -> Iterator[bytes | memoryview]:
        for tensor, kind in file.tensors:
            size = byte_count(tensor, kind)
            parts = ((block, kind, tensor.name) for block in tensor.blocks())
            for packed in prefetch(pack, parts):
                digests[tensor.name].update(packed)
                advance(len(packed))
                yield packed
            yield bytes(round_up(size, ALIGNMENT) - size)

    make_file(folder / file.name, file.header, file.byte_count)
    fill_file(folder / file.name, len(file.header), content())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def pack(block: torch.Tensor, kind: gguf.GGMLQuantizationType, name: str) -> memoryview:
    """Rows in float32 as a file holds them. Raises `UserError` where float16 cannot hold them."""
    if kind == Kind.F16:
        half = block.half()
        if not torch.equal(torch.isfinite(half), torch.isfinite(block)):
            raise UserError(
                f"{name}: holds values beyond float16's 65,504; export with --gguf-type bf16 or f32"
            )
        return raw_bytes(half)
    if kind in (Kind.F32, Kind.BF16):
        return raw_bytes(block.to(torch.float32 if kind == Kind.F32 else torch.bfloat16))
    return _bytes_of(gguf.quants.quantize(block.numpy(), kind))


def _bytes_of(values: Any) -> memoryview:
    """The bytes of a numpy array, row-major."""
    return memoryview(values.reshape(-1)).cast("B")


def find_differences(path: Path, file: PlannedFile, written: dict[str, str]) -> list[str]:
    """Finds what the gguf package reads in a file otherwise than was written, in words; empty where
    all is the same.
    """
    expected = {tensor.name: (tensor.shape, kind) for tensor, kind in file.tensors}
    in_file = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    problems = [f"{name}: not in the file" for name in expected if name not in in_file]
    problems += [
        f"{name}: in the file, but not in the model" for name in in_file if name not in expected
    ]
    for name, (shape, kind) in expected.items():
        if name not in in_file:
            continue
        tensor = in_file[name]
        has = tuple(int(size) for size in reversed(tensor.shape))
        if (has, tensor.tensor_type) != (shape, kind):
            problems.append(f"{name}: {tensor.tensor_type.name} {has}, not {kind.name} {shape}")
        elif xxhash.xxh3_128(_bytes_of(tensor.data)).hexdigest() != written[name]:
            problems.append(f"{name}: differs from what was written")
    return problems


def run_llama_cpp(
    path: Path, prompts: Sequence[Sequence[int]], texts: Sequence[tuple[str, bool]]
) -> tuple[list[Any], list[list[int]]]:
    """Runs llama.cpp on the file `path`, on the CPU, with keys and values in float32.

    Args:
        prompts: Token ids.
        texts: Texts to cut into tokens, each with whether it begins a document, so that bos belongs
            before it.

    Returns:
        For each prompt its logits, float32[tokens, vocabulary]; for each text its ids.

    Raises:
        UserError: Where llama.cpp cannot use the file.
    """
    given = {
        "path": str(path),
        "prompts": [list(map(int, ids)) for ids in prompts],
        "texts": list(texts),
    }
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.npz"
        _run(
            given | {"results": str(results)}, f"{path.name}: not exported: llama.cpp cannot use it"
        )
        with np.load(results, allow_pickle=False) as arrays:
            logits = [arrays[f"logits{number}"] for number in range(len(prompts))]
            return logits, [arrays[f"tokens{number}"].tolist() for number in range(len(texts))]


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Has llama.cpp write `source` as `target` in one of its own types.

    Raises `UserError` where it cannot.
    """
    what = f"{target.name}: not exported: llama.cpp cannot quantize to {file_type}"
    _run({"source": str(source), "target": str(target), "type": file_type}, what)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _run(given: Mapping[str, Any], what: str) -> None:
    paths = os.pathsep.join(
        filter(None, [str(Path(finetune.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    process = subprocess.run(
        [sys.executable, "-m", "finetune.export.formats.gguf_file"],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if process.returncode:
        said = process.stderr.rpartition(IMPORTED)[2].splitlines()  # without what imports say
        lines = [line for line in said if "rror" in line or "GGML_ASSERT" in line]
        raise UserError(f"{what}: {(lines or [f'exit code {process.returncode}'])[0].strip()}")


def _compute(given: Mapping[str, Any]) -> None:
    import llama_cpp
    from llama_cpp import llama_cpp as library

    default = library.llama_model_default_params()
    # else quantized weights are copied into memory, in another order
    default.use_extra_bufts = False
    library.llama_model_default_params = lambda: default
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    # as the file says
    yarn = dict.fromkeys(("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0)
    longest = max(map(len, given["prompts"]), default=1)
    llama = llama_cpp.Llama(
        given["path"],
        n_ctx=longest + 8,
        n_gpu_layers=0,
        logits_all=True,
        verbose=True,
        flash_attn=False,
        **f32,
        **yarn,
    )
    arrays: dict[str, Any] = {}
    for number, ids in enumerate(given["prompts"]):
        llama.reset()
        llama.eval(ids)
        arrays[f"logits{number}"] = np.array(llama.scores[: len(ids)], dtype=np.float32)
    for number, (text, begins) in enumerate(given["texts"]):
        arrays[f"tokens{number}"] = np.array(
            llama.tokenize(text.encode(), add_bos=begins, special=True), dtype=np.int64
        )
    np.savez(given["results"], **arrays)


def _quantize(given: Mapping[str, Any]) -> None:
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{given['type'].upper()}")
    parameters.nthread = os.cpu_count() or 1
    if llama_cpp.llama_model_quantize(
        given["source"].encode(), given["target"].encode(), parameters
    ):
        raise SystemExit("error: llama_model_quantize failed")


if __name__ == "__main__":
    print(IMPORTED, file=sys.stderr, flush=True)
    sent = json.load(sys.stdin)
    _compute(sent) if "prompts" in sent else _quantize(sent)
