"""Starts the separate process that opens an export, and takes its results.

export/verify.py is what that process runs. Its imports take seconds, so `finetune export` starts it
before its own imports. Therefore this module imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import finetune
from finetune.errors import UserError

if TYPE_CHECKING:
    import torch

# The environment variables with which a launcher makes a process a rank.
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, slots=True)
class ReloadProcess:
    """The running process. Returned by `start_reload`."""

    process: "subprocess.Popen[str]"
    results: Path  # the safetensors file that it writes

    def open_folder(self, folder: Path, files: Collection[str], *, trust_remote_code: bool) -> None:
        """Has the process open `folder`, in which everything is complete but the tensors' values.

        `files`: the safetensors files. The process reads them in this order, each as far as
        `on_disk` has reported it.
        """
        message = {
            "folder": str(folder),
            "files": list(files),
            "trust_remote_code": trust_remote_code,
        }
        self._send(message)

    def on_disk(self, file: str, end: int) -> None:
        """Reports to the process that the first `end` bytes of `file` are on disk."""
        self._send({"file": file, "end": end})

    def read_results(self) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
        """Waits for the process to end.

        Returns:
            The logits and expert choices that the process computed with the model, by the names of
            `verify.main`. And tensor's name -> digest of the values read back, in hexadecimal.

        Raises:
            UserError: The process failed: it could not use the folder.
        """
        _, stderr = self.process.communicate()
        if self.process.returncode:
            reason = describe_end(self.process.returncode, stderr)
            raise UserError(f"not exported: a separate process could not use the result: {reason}")
        from safetensors import safe_open

        with safe_open(self.results, framework="pt") as opened:
            computed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return computed, dict(opened.metadata() or {})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has failed already: `read_results` raises the reason
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()


@contextmanager
def start_reload() -> Iterator[ReloadProcess]:
    """Starts the process, which imports its libraries and then waits for `open_folder`.

    It is killed at the end of the block.
    """
    with TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.safetensors"
        command = [sys.executable, "-m", "finetune.export.verify", str(results)]
        pipe = subprocess.PIPE
        null = subprocess.DEVNULL
        with subprocess.Popen(
            command, env=_environment(), stdin=pipe, stdout=null, stderr=pipe, text=True
        ) as process:
            try:
                yield ReloadProcess(process, results)
            finally:
                process.kill()


def describe_end(exit_code: int, stderr: str) -> str:
    """Says why a process failed: by its signal, its last line on stderr, or its exit code."""
    if exit_code < 0:  # Python's form of an end by a signal
        return f"ended by {signal.Signals(-exit_code).name}"
    _, _, last_line = stderr.strip().rpartition("\n")
    return last_line or f"exit code {exit_code}"


def make_python_path() -> str:
    """Makes the PYTHONPATH of a process that imports this package, wherever it is run from."""
    root = str(Path(finetune.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


def _environment() -> dict[str, str]:
    """Makes environment variables for a process on the CPU, offline, that is no rank of a run."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("ACCELERATE_", "FSDP_"))
    }
    return inherited | {
        "PYTHONPATH": make_python_path(),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        # transformers' threads would hold several whole tensors at once
        "HF_DEACTIVATE_ASYNC_LOAD": "1",
        # as in the export's threads: the order of sums in the logits depends on it
        "OMP_NUM_THREADS": "1",
        # as in the export's own process: one heap, so that a thread reuses what another has freed
        "MALLOC_ARENA_MAX": "1",
    }
