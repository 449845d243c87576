"""The process that opens an export as a stranger does (`finetune.export.reload_check`), as it is started and asked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

import finetune
from finetune.errors import UserError
from finetune.export.reload_check import TRUST_REMOTE_CODE


@dataclass(frozen=True, slots=True)
class FreshProcess:
    """A process of `finetune.export.reload_check`. Source: `fresh_process`."""

    process: "subprocess.Popen[str]"
    file: Path  # where it leaves the logits

    def open_folder(self) -> None:
        """Tells it that the folder is complete."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has failed already: `logits` says how
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def logits(self) -> torch.Tensor:
        """What it got from the folder. Raises `UserError` where it could not use it."""
        _, said = self.process.communicate()
        if self.process.returncode:
            reason = (said.strip().splitlines() or [f"exit code {self.process.returncode}"])[-1]
            raise UserError(f"not exported: a fresh process could not use the result: {reason}")
        logits: torch.Tensor = load_file(self.file)["logits"]
        return logits


@contextmanager
def fresh_process(folder: Path, trust_remote_code: bool = False) -> Iterator[FreshProcess]:
    """A process that will open `folder`, in which config.json is. It ends with the block.

    It starts, which takes seconds, while the weights are written.
    """
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "logits.safetensors"
        command = [sys.executable, "-m", "finetune.export.reload_check", str(folder), str(file)]
        command += [TRUST_REMOTE_CODE] if trust_remote_code else []
        started = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with started as process:
            try:
                yield FreshProcess(process, file)
            finally:
                process.kill()


def _environment() -> dict[str, str]:
    """Of a process on the CPU, offline, outside any process group."""
    root = str(Path(finetune.__file__).resolve().parents[1])
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith(("ACCELERATE_", "FSDP_"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # transformers' threads would hold several whole tensors at once
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # as in every thread here: the order of sums depends on it
    }
