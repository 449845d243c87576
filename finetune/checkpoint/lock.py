"""One run, one folder: two runs that write to the same one would prune each other's checkpoints."""

from pathlib import Path

from finetune import durable
from finetune.checkpoint import manifest as folder
from finetune.errors import UserError


def hold(run_folder: Path) -> None:
    """Takes the folder for this process until it ends, however it ends, and clears away what a killed run left there.

    Rank 0 does this, before anything is written. Raises `UserError` where another process has it.
    """
    checkpoints = folder.checkpoints_of(run_folder)
    durable.make_folder(checkpoints)
    try:
        durable.lock_folder(checkpoints, ".lock")  # kept until the process ends
    except durable.FolderInUse as holder:
        raise UserError(f"{run_folder}: {holder} is writing here; wait for it, or set another output_dir") from None
    folder.tidy(run_folder)
