"""A separate process that runs llama.cpp on a GGUF file: its logits and tokens, or a quantized copy.

A file that llama.cpp cannot use ends the process, sometimes by an abort, and not the export.
`run_llama_cpp` starts `python -m finetune.export.formats.llama_cpp_process RESULTS` and sends it one line of JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import finetune
from finetune.errors import UserError


def run_llama_cpp(path: Path, prompts: Sequence[Sequence[int]], texts: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    """What llama.cpp computes of the file `path`, on the CPU, with keys and values in float32.

    Args:
        prompts: Token ids.
        texts: Texts to cut into tokens, each with whether it begins a document, so that bos belongs before it.

    Returns:
        "logits": for each prompt float32[tokens, vocabulary]; "tokens": for each text its ids.

    Raises:
        UserError: Where llama.cpp cannot use the file.
    """
    given = {"path": str(path), "prompts": [list(map(int, ids)) for ids in prompts], "texts": list(texts)}
    with TemporaryDirectory() as folder:
        results = _run(given, Path(folder) / "results.npz", f"{path.name}: not exported: llama.cpp cannot use it")
        return {"logits": results[0], "tokens": results[1]}


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Has llama.cpp write `source` as `target` in one of its own types. Raises `UserError` where it cannot."""
    with TemporaryDirectory() as folder:
        what = f"{target.name}: not exported: llama.cpp cannot quantize to {file_type}"
        _run({"source": str(source), "target": str(target), "type": file_type}, Path(folder) / "results.npz", what)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _run(given: Mapping[str, Any], results: Path, what: str) -> tuple[list[Any], list[Any]]:
    paths = os.pathsep.join(filter(None, [str(Path(finetune.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, "-m", "finetune.export.formats.llama_cpp_process", str(results)],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "rror" in line or "GGML_ASSERT" in line]
        raise UserError(f"{what}: {(lines or [f'exit code {process.returncode}'])[0].strip()}")
    if not results.exists():
        return [], []
    with np.load(results, allow_pickle=False) as arrays:
        named = {kind: [arrays[f"{kind}{n}"] for n in range(int(arrays[kind]))] for kind in ("logits", "tokens")}
    return named["logits"], [ids.tolist() for ids in named["tokens"]]


def _compute(given: Mapping[str, Any], results: Path) -> None:
    import llama_cpp
    from llama_cpp import llama_cpp as library

    default = library.llama_model_default_params()
    default.use_extra_bufts = False  # else quantized weights are copied into memory, in another order
    library.llama_model_default_params = lambda: default
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    yarn = dict.fromkeys(("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0)  # as the file says
    longest = max(map(len, given["prompts"]), default=1)
    llama = llama_cpp.Llama(
        given["path"], n_ctx=longest + 8, n_gpu_layers=0, logits_all=True, verbose=True, flash_attn=False, **f32, **yarn
    )
    arrays: dict[str, Any] = {"logits": len(given["prompts"]), "tokens": len(given["texts"])}
    for number, ids in enumerate(given["prompts"]):
        llama.reset()
        llama.eval(ids)
        arrays[f"logits{number}"] = np.array(llama.scores[: len(ids)], dtype=np.float32)
    for number, (text, begins) in enumerate(given["texts"]):
        arrays[f"tokens{number}"] = np.array(
            llama.tokenize(text.encode(), add_bos=begins, special=True), dtype=np.int64
        )
    np.savez(results, **arrays)


def _quantize(given: Mapping[str, Any]) -> None:
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{given['type'].upper()}")
    parameters.nthread = os.cpu_count() or 1
    if llama_cpp.llama_model_quantize(given["source"].encode(), given["target"].encode(), parameters):
        raise SystemExit("error: llama_model_quantize failed")


if __name__ == "__main__":
    sent = json.load(sys.stdin)
    _compute(sent, Path(sys.argv[1])) if "prompts" in sent else _quantize(sent)
