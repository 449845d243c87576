"""One run, one folder: two runs that write to the same one would prune each other's checkpoints."""

import fcntl
import os
from pathlib import Path

from finetune.checkpoint import files
from finetune.checkpoint import manifest as folder
from finetune.errors import UserError


def hold(run_folder: Path) -> None:
    """Takes the folder for this process until it ends, however it ends, and clears away what a killed run left there.

    Rank 0 does this, before anything is written. Raises `UserError` where another process has it.
    """
    checkpoints = folder.checkpoints_of(run_folder)
    files.make_folder(checkpoints)
    descriptor = os.open(checkpoints / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept by the open descriptor, so never closed
    except OSError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UserError(f"{run_folder}: {holder} is writing here; wait for it, or set another output_dir") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    folder.tidy(run_folder)
