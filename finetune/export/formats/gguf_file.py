"""Single GGUF files: they are planned, streamed to disk a block of rows at a time, read back by the
gguf package, and run by llama.cpp.

llama.cpp runs in a process of its own, which is this module as a program: a file that llama.cpp
cannot use ends that process, sometimes by an abort, and not the export.
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

from finetune.constants import Shape, round_up
from finetune.errors import UserError
from finetune.export.formats.gguf_model import FileTensor
from finetune.export.reload_process import make_python_path
from finetune.export.target import prefetch, raw_bytes
from finetune.export.write import fill_file, find_misfits, make_file

ALIGNMENT: int = gguf.GGUF_DEFAULT_ALIGNMENT
Kind = gguf.GGMLQuantizationType  # the type of one tensor
# llama.cpp's process writes this line to stderr after the imports of this module. What follows is
# llama.cpp's.
IMPORTED = "finetune: imported"
# The types of files that are written here: the type of most tensors, and the file's. llama.cpp
# makes every other type.
FILE_TYPES = {
    "f32": (Kind.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Kind.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A GGUF file to write. Returned by `plan_file`."""

    name: str
    header: bytes  # all bytes before the tensors' values
    tensors: tuple[tuple[FileTensor, gguf.GGMLQuantizationType], ...]  # each with its type

    @property
    def byte_count(self) -> int:
        """The size of the file, with the padding after each tensor."""
        return len(self.header) + sum(
            round_up(byte_count(tensor, kind), ALIGNMENT) for tensor, kind in self.tensors
        )


def file_name(title: str) -> str:
    """Makes the name of a file, without suffix, from a title: other characters become hyphens.

    >>> file_name("my model/é")
    'my-model'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-") or "model"


def byte_count(tensor: FileTensor, kind: gguf.GGMLQuantizationType) -> int:
    """Counts the bytes of a tensor's values in a file, without padding."""
    shape: Shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
    return math.prod(shape)


def choose_kind(tensor: FileTensor, file_type: str) -> gguf.GGMLQuantizationType:
    """Chooses the type of one tensor in a file of `file_type`, as llama.cpp's own converter does.

    It is float16 if rows cannot be cut into the type's blocks of numbers.
    """
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
    """Plans a file and makes its header. Reads no values of `tensors`.

    Args:
        name: The file's name.
        architecture: llama.cpp's name of the model's family.
        tensors: The tensors of the file.
        file_type: A key of FILE_TYPES.
        write_keys: Adds keys to a `gguf.GGUFWriter`. It returns further tensors, which the file
            gets after `tensors`.
    """
    writer = gguf.GGUFWriter(None, architecture)
    generated = write_keys(writer)
    typed_tensors = tuple(
        (tensor, choose_kind(tensor, file_type)) for tensor in (*tensors, *generated)
    )
    _, gguf_file_type = FILE_TYPES[file_type]
    writer.add_file_type(gguf_file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor, kind in typed_tensors:
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        size = byte_count(tensor, kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, raw_dtype=kind)
    # The package writes a header to a file only, and without the padding before the values.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    padded_header = header.ljust(round_up(len(header), ALIGNMENT), b"\0")
    return PlannedFile(name, padded_header, typed_tensors)


def write_file(folder: Path, file: PlannedFile, advance: Callable[[int], object]) -> dict[str, str]:
    """Writes `file` into `folder`.

    Args:
        folder: The folder.
        file: The planned file.
        advance: Called with the number of bytes of each block that is written.

    Returns:
        {tensor: digest (xxh3, 128 bits) of its bytes}, taken from memory before they are written.
    """
    digests = {tensor.name: xxhash.xxh3_128() for tensor, _ in file.tensors}

    def pack_tensors() -> Iterator[bytes | memoryview]:
        for tensor, kind in file.tensors:
            size = byte_count(tensor, kind)
            arguments = ((block, kind, tensor.name) for block in tensor.blocks())
            for packed in prefetch(pack, arguments):
                digests[tensor.name].update(packed)
                advance(len(packed))
                yield packed
            yield bytes(round_up(size, ALIGNMENT) - size)

    make_file(folder / file.name, file.header, file.byte_count)
    fill_file(folder / file.name, len(file.header), pack_tensors())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def pack(block: torch.Tensor, kind: gguf.GGMLQuantizationType, name: str) -> memoryview:
    """Converts rows of the tensor `name`, in float32, to the bytes that a file holds of them.

    Raises `UserError` if `kind` is float16, and it cannot hold them.
    """
    if kind == Kind.F16:
        half = block.half()
        if not torch.equal(torch.isfinite(half), torch.isfinite(block)):
            raise UserError(
                f"{name}: holds values beyond float16's 65,504; export with --gguf-type bf16 or f32"
            )
        return raw_bytes(half)
    if kind == Kind.F32:
        return raw_bytes(block.to(torch.float32))
    if kind == Kind.BF16:
        return raw_bytes(block.to(torch.bfloat16))
    return _bytes_of(gguf.quants.quantize(block.numpy(), kind))


def _bytes_of(values: Any) -> memoryview:
    """Returns the bytes of a numpy array, row-major."""
    return memoryview(values.reshape(-1)).cast("B")


def find_differences(path: Path, file: PlannedFile, written: dict[str, str]) -> list[str]:
    """Reads a written file by the gguf package, and finds how it differs from the plan.

    Args:
        path: The written file.
        file: The plan.
        written: The digests that `write_file` returned.

    Returns:
        A sentence for each difference; [] if there is none.
    """
    expected = {tensor.name: (kind.name, tensor.shape) for tensor, kind in file.tensors}
    tensors = gguf.GGUFReader(path).tensors
    # A file lists the sizes of a tensor the other way round.
    in_file = {
        tensor.name: (tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in tensors
    }
    return find_misfits(expected, in_file) + [
        f"{tensor.name}: differs from what was written"
        for tensor in tensors
        if in_file[tensor.name] == expected.get(tensor.name)
        and xxhash.xxh3_128(_bytes_of(tensor.data)).hexdigest() != written[tensor.name]
    ]


def run_llama_cpp(
    path: Path, prompts: Sequence[Sequence[int]], texts: Sequence[tuple[str, bool]]
) -> tuple[list[Any], list[list[int]]]:
    """Runs llama.cpp on a GGUF file, on the CPU, with the KV cache in float32.

    Args:
        path: The file.
        prompts: The token ids of each prompt.
        texts: Texts to cut into tokens, each with whether it begins a document, so that BOS belongs
            before it.

    Returns:
        (the logits of each prompt, float32[tokens, vocabulary]; the token ids of each text).

    Raises:
        UserError: llama.cpp cannot use the file.
    """
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.npz"
        task = {
            "path": str(path),
            "prompts": [list(map(int, ids)) for ids in prompts],
            "texts": list(texts),
            "results": str(results),
        }
        _run_process(task, f"{path.name}: not exported: llama.cpp cannot use it")
        with np.load(results, allow_pickle=False) as arrays:
            logits = [arrays[f"logits{number}"] for number in range(len(prompts))]
            tokens = [arrays[f"tokens{number}"].tolist() for number in range(len(texts))]
            return logits, tokens


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Has llama.cpp quantize the file `source` to the file `target`, in one of its own types.

    Raises `UserError` if llama.cpp cannot.
    """
    task = {"source": str(source), "target": str(target), "type": file_type}
    _run_process(task, f"{target.name}: not exported: llama.cpp cannot quantize to {file_type}")
    # Waits until the file is on disk.
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _run_process(task: Mapping[str, Any], failure: str) -> None:
    """Runs this module as a program on `task`, which says what llama.cpp does, and waits for it.

    Raises `UserError` if the process fails: `failure` with llama.cpp's first line on an error.
    """
    process = subprocess.run(
        [sys.executable, "-m", "finetune.export.formats.gguf_file"],
        input=json.dumps(task),
        env=os.environ | {"PYTHONPATH": make_python_path()},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if process.returncode:
        _, _, llama_cpp_output = process.stderr.rpartition(IMPORTED)
        lines = llama_cpp_output.splitlines()
        errors = [line for line in lines if "rror" in line or "GGML_ASSERT" in line]
        reason = errors[0].strip() if errors else f"exit code {process.returncode}"
        raise UserError(f"{failure}: {reason}")


def _compute_in_process(task: Mapping[str, Any]) -> None:
    """Does the task of `run_llama_cpp` in the separate process, and writes its results."""
    import llama_cpp
    from llama_cpp import llama_cpp as library

    # `Llama` has no such argument, but starts from these defaults. With extra buffers llama.cpp
    # copies quantized weights into memory, in another order.
    defaults = library.llama_model_default_params()
    defaults.use_extra_bufts = False
    library.llama_model_default_params = lambda: defaults
    float32_cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    # A negative number leaves the setting to the file.
    yarn = dict.fromkeys(("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0)
    longest = max(map(len, task["prompts"]), default=1)
    llama = llama_cpp.Llama(
        task["path"],
        n_ctx=longest + 8,
        n_gpu_layers=0,
        logits_all=True,
        verbose=True,
        flash_attn=False,
        **float32_cache,
        **yarn,
    )
    arrays: dict[str, Any] = {}
    for number, ids in enumerate(task["prompts"]):
        llama.reset()
        llama.eval(ids)
        arrays[f"logits{number}"] = np.array(llama.scores[: len(ids)], dtype=np.float32)
    for number, (text, begins_document) in enumerate(task["texts"]):
        arrays[f"tokens{number}"] = np.array(
            llama.tokenize(text.encode(), add_bos=begins_document, special=True), dtype=np.int64
        )
    np.savez(task["results"], **arrays)


def _quantize_in_process(task: Mapping[str, Any]) -> None:
    """Does the task of `quantize` in the separate process."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{task['type'].upper()}")
    parameters.nthread = os.cpu_count() or 1
    error_code = llama_cpp.llama_model_quantize(
        task["source"].encode(), task["target"].encode(), parameters
    )
    if error_code:
        raise SystemExit("error: llama_model_quantize failed")


if __name__ == "__main__":
    print(IMPORTED, file=sys.stderr, flush=True)
    received_task = json.load(sys.stdin)
    if "prompts" in received_task:
        _compute_in_process(received_task)
    else:
        _quantize_in_process(received_task)
