"""A separate process that opens an export as its users will: with transformers and safetensors, not the code that wrote it.

`start_reload` runs `python -m finetune.export.reload_check FOLDER LOGITS`. At its start FOLDER needs config.json alone: it
imports, which takes seconds, while the weights are written. A line on stdin says that they are; it then loads the model and
leaves the logits of fixed prompts in the file LOGITS. A folder that does not load is one line on stderr and exit code 1.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import finetune
from finetune.errors import UserError
from finetune.export.logits import stream_logits
from finetune.export.target import TargetModel, describe_target
from finetune.models.weight_conversions import Slices, boxes_of_parameters
from finetune.safetensors_io.tensors import SINGLE_FILE

TRUST_REMOTE_CODE = "--trust-remote-code"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ReloadProcess:
    """The running process. Returned by `start_reload`."""

    process: "subprocess.Popen[str]"
    file: Path  # of its logits

    def open_folder(self) -> None:
        """Starts its work: the folder is complete."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has failed already: `logits` raises the reason
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def logits(self) -> torch.Tensor:
        """Waits for the logits of the folder's model. Raises `UserError` where it could not be used."""
        _, stderr = self.process.communicate()
        if self.process.returncode:
            reason = (stderr.strip().splitlines() or [f"exit code {self.process.returncode}"])[-1]
            raise UserError(f"not exported: a separate process could not use the result: {reason}")
        logits: torch.Tensor = load_file(self.file)["logits"]
        return logits


@contextmanager
def start_reload(folder: Path, trust_remote_code: bool = False) -> Iterator[ReloadProcess]:
    """A process that will open `folder`, which holds config.json. It is killed at the end of the block."""
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "logits.safetensors"
        command = [sys.executable, "-m", "finetune.export.reload_check", str(folder), str(file)]
        command += [TRUST_REMOTE_CODE] if trust_remote_code else []
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, env=_environment(), stdin=pipe, stdout=null, stderr=pipe, text=True) as process:
            try:
                yield ReloadProcess(process, file)
            finally:
                process.kill()


def _environment() -> dict[str, str]:
    """For a process on the CPU, offline, outside any process group."""
    root = str(Path(finetune.__file__).resolve().parents[1])
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("ACCELERATE_", "FSDP_"))
    }
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # transformers' threads would hold several whole tensors at once
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # as in every thread here: the order of sums depends on it
    }


def main(arguments: list[str]) -> int:
    """The process itself."""
    trust_remote_code = TRUST_REMOTE_CODE in arguments
    folder, logits = (Path(argument) for argument in arguments if argument != TRUST_REMOTE_CODE)
    _import_transformers()
    try:
        target = describe_target(folder, trust_remote_code=trust_remote_code)
        if not sys.stdin.readline():
            return 1  # the parent has gone
        load_with_transformers(folder, trust_remote_code)
        save_file({"logits": _compute_logits(folder, target).contiguous()}, logits)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _import_transformers() -> None:
    """Takes seconds, before the folder is complete."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401


def load_with_transformers(folder: Path, trust_remote_code: bool = False) -> None:
    """Loads config, generation config, tokenizer and (on meta) the model as a user of transformers does.

    Raises `UserError` where any of it does not load, or a tensor is missing, unexpected or of another shape.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        GenerationConfig.from_pretrained(folder)
        if (folder / "tokenizer_config.json").exists():
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _, loading_info = AutoModelForCausalLM.from_pretrained(
            folder, device_map="meta", output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever is wrong, the folder must not be published
        raise UserError(f"transformers cannot open it: {type(error).__name__}: {error}") from None
    wrong = {kind: sorted(map(str, names)) for kind, names in loading_info.items() if names}
    if wrong:
        raise UserError(
            "; ".join(f"transformers reports {kind}: {', '.join(names[:5])}" for kind, names in wrong.items())
        )


def _compute_logits(folder: Path, target: TargetModel) -> torch.Tensor:
    files = sorted(folder.glob("*.safetensors")) if not (folder / SINGLE_FILE).exists() else [folder / SINGLE_FILE]
    file_of: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            file_of |= dict.fromkeys(opened.keys(), file)

    boxes = boxes_of_parameters(target.model, _read_shapes(file_of), str(folder))

    def read(name: str, slices: Slices) -> torch.Tensor:
        start, stop = (slices[0].start, slices[0].stop) if slices else (0, 1)
        rows = read_with_safetensors(file_of[name], name, start, stop, _copy_float32)
        return rows[(slice(None), *slices[1:])] if slices else rows

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        box = boxes[target.tied.get(name, name)]
        return box.read((slice(start, stop),) if box.shape else (), read)

    return stream_logits(target.model, rows)


def _read_shapes(file_of: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(file_of.values())):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def read_with_safetensors(
    file: Path, name: str, start: int, stop: int, use: Callable[[torch.Tensor], Result]
) -> Result:
    """`use(rows)` for rows of a tensor, as the reference implementation reads them; a scalar has one row, itself.

    The rows are a memory map, gone when `use` returns: the file is opened for each call, so that its pages are freed.
    """
    with safe_open(file, framework="pt") as opened:
        part: Any = opened.get_slice(name)
        return use(part[start:stop] if part.get_shape() else opened.get_tensor(name))


def _copy_float32(mapped: torch.Tensor) -> torch.Tensor:
    """A copy in memory; what is not floating keeps its dtype."""
    return mapped.to(torch.float32 if mapped.is_floating_point() else mapped.dtype, copy=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
