"""A folder that appears whole or not at all: made aside, renamed into place, cleared away where anything fails."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from finetune import durable
from finetune.errors import UserError
from finetune.units import disk_size

SPARE_BYTES = 64 * 1024 * 1024  # for tokenizer, index and card, and so that the disk is not filled to the brim
EXPORTS = ("export", "adapter")  # in a run's folder
MARKS = ("config.json", "adapter_config.json")  # what a folder must hold for --overwrite to replace it


@contextmanager
def staged(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder beside `output` that takes its name when the block ends, and is removed where it raises.

    So are the folders above it that were made for it.

    Raises `UserError` where `output` exists and may not be replaced, or someone else is writing it now.
    """
    bring_back(output)
    refuse_existing(output, overwrite)
    staging = _staging_of(output)
    missing = [folder for folder in output.parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(staging, output)
    except OSError as error:
        _remove_empty(missing)
        raise _unwritable(output, error) from None
    try:
        with durable.stage_and_rename(output, staging, _replaced_by(output)):
            yield staging
    except BaseException as error:
        _remove_empty(missing)
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            raise UserError(f"{output}: cannot be written: {reason}; nothing is left of the export") from None
        raise
    finally:
        os.close(lock)


def bring_back(output: Path) -> None:
    """Gives the export at `output` its name back, where a process was killed while it replaced it.

    Between the two renames of `durable.publish_folder` the old export is called .NAME.replaced. Every command that may meet one calls
    this. Nothing is done while another process is at it, or where nothing can be written.
    """
    replaced, staging = _replaced_by(output), _staging_of(output)
    if output.exists() or not replaced.is_dir():
        return
    with suppress(UserError, OSError):
        lock = _locked(staging, output)
        try:
            durable.recover_replaced(output, replaced)
            _remove_empty([staging])
        finally:
            os.close(lock)


def bring_back_exports(run: Path) -> None:
    """`bring_back` of what a run's end leaves."""
    for name in EXPORTS:
        bring_back(run / name)


def refuse_existing(output: Path, overwrite: bool) -> None:
    """Raises `UserError` unless `output` is free, or `overwrite` and it is an export (or empty)."""
    if not (output.exists() or output.is_symlink()):
        return
    if not overwrite:
        raise UserError(f"{output}: exists; choose another --output, or replace it with --overwrite")
    is_export = output.is_dir() and not output.is_symlink()
    if not is_export or (any(output.iterdir()) and not any((output / mark).exists() for mark in MARKS)):
        raise UserError(f"{output}: is no exported model, so --overwrite does not replace it; choose another --output")


def refuse_unwritable(output: Path) -> None:
    """Raises `UserError` where `output` and what is missing above it cannot be made."""
    above = output.absolute().parent
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        with TemporaryDirectory(prefix=".finetune-", dir=above):
            pass
    except OSError as error:
        raise _unwritable(output, error) from None


def refuse_full_disk(folder: Path, needed_bytes: int) -> None:
    """Raises `UserError` where the disk under `folder` has not `needed_bytes` and some to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPARE_BYTES:
        raise UserError(
            f"{folder.parent}: the export takes {disk_size(needed_bytes)}, but the disk has {disk_size(free)} free; "
            "make room or choose another --output"
        )


def _staging_of(output: Path) -> Path:
    return output.parent / f".{output.name}.exporting"


def _replaced_by(output: Path) -> Path:
    return output.parent / f".{output.name}.replaced"


def _unwritable(output: Path, error: OSError) -> UserError:
    return UserError(f"{output}: cannot be written: {error.strerror}; choose another --output")


def _locked(staging: Path, output: Path) -> int:
    """Makes the staging folder and holds it for this process alone; the lock goes with the process."""
    staging.mkdir(exist_ok=True)
    try:
        return durable.lock_folder(staging)
    except durable.FolderInUse:
        raise UserError(
            f"{output}: another process is exporting to it; wait for it, or choose another --output"
        ) from None


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes `folders`, each within the one after it, but for those that someone else has put something into."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
