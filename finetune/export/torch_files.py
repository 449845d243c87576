"""Tensors inside files that torch wrote with pickle, found without running anything that they bring along.

Two kinds: a `torch.distributed.checkpoint` folder (`.metadata` and `*.distcp`) and a whole state dict (`*.bin`, `*.pt`).
Both keep the values as plain, uncompressed records. A process of its own finds where they lie (`torch_layout`); from
then on they are read like safetensors, slice by slice.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import finetune
from finetune.errors import UserError
from finetune.safetensors_io.tensors import Piece, StoredTensor, join_pieces


def read_dcp_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder that `torch.distributed.checkpoint.save` wrote, by name; no values are read.

    Raises `UserError` where the metadata asks for anything but DCP's own classes, or names what the files do not hold.
    """
    answer = _layout(folder)
    tensors = _stored_tensors(folder, answer["tensors"])
    for name, size in answer["sizes"].items():
        if name not in tensors or tensors[name].shape != tuple(size):
            has = f"pieces of shape {list(tensors[name].shape)}" if name in tensors else "no piece"
            raise UserError(f"{folder}: {name}: of shape {size} by its metadata, but the files hold {has}")
    return tensors


def read_torch_files(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of the state dict that `torch.save` wrote into these files of one folder, by name; no values are read.

    Raises `UserError` where a file holds anything but weights, or values that do not lie in it as they are.
    """
    return _stored_tensors(paths[0].parent, _layout(*paths)["tensors"])


def _stored_tensors(folder: Path, places: list[Any]) -> dict[str, StoredTensor]:
    found: dict[str, list[tuple[Piece, torch.dtype]]] = {}
    for name, dtype, file_name, position, offsets, shape in places:
        piece = Piece(folder / file_name, position, tuple(offsets), tuple(shape))
        found.setdefault(name, []).append((piece, getattr(torch, dtype)))
    return {name: join_pieces(name, pieces) for name, pieces in sorted(found.items())}


def _layout(*paths: Path) -> Any:
    """What `finetune.export.torch_layout` says of `paths`."""
    root = str(Path(finetune.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    # -P: nothing is imported from the folder that this is run in
    command = [sys.executable, "-P", "-m", "finetune.export.torch_layout", *map(str, paths)]
    finished = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    try:
        answer = json.loads(finished.stdout)
    except ValueError:
        raise UserError(
            f"{paths[0]}: torch could not read it ({_ending(finished)}); it is damaged, or no file that torch wrote"
        ) from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _ending(finished: "subprocess.CompletedProcess[bytes]") -> str:
    if finished.returncode < 0:
        return f"ended by {signal.Signals(-finished.returncode).name}"
    last = finished.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return last or f"exit code {finished.returncode}"
