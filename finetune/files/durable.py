"""Writes of files and folders that are complete or have not happened, whatever kill, power cut or
full disk interrupts them.

A file's bytes are on disk only after an fsync of the file, and its name only after an fsync of the
folder that holds it. A folder gets its final name by one rename, after all its files are on disk.
"""

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from finetune.constants import ADAPTER, EXPORT

# It finds damage, not malice. It is as fast as memory; SHA-256 would halve the rate of a fast disk.
CHECKSUM = "xxh3_128"
CHUNK_BYTES = 16 * 1024 * 1024
# It goes into a file name beside the process id, which is unique only on one machine or container.
HOST = os.uname().nodename


class FolderInUse(Exception):
    """Another process holds the lock of a folder. The message names that process if it is known."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Writes `chunks` to a new file and waits until the disk has them.

    Returns {"size": bytes written, CHECKSUM: checksum as hexadecimal digits}.

    Raises `FileExistsError` if the file exists, or another `OSError` (such as for a full disk). The
    error names the file.
    """
    digest = xxhash.xxh3_128()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                unwritten = view[start : start + CHUNK_BYTES]
                digest.update(unwritten)
                size += len(unwritten)
                while unwritten:  # a write may stop early
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
        os.fsync(descriptor)
    except OSError as error:
        # the system names no file in an error of a descriptor
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    return {"size": size, CHECKSUM: digest.hexdigest()}


def replace_file(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replaces the file `path`, or makes it: writes a temporary file beside it and renames that.

    A symbolic link stays, and the file that it points to is replaced. A device such as /dev/stdout
    is written to directly.

    `content`: the text or the bytes; or pieces, which may be read from the old file meanwhile.

    Raises `OSError` if it fails; `path` then keeps its old content.
    """
    if isinstance(content, str):
        content = content.encode("utf-8")
    pieces = [content] if isinstance(content, bytes) else content
    if path.exists() and not path.is_file():
        path.write_bytes(b"".join(pieces))
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{HOST}-{os.getpid()}.part")
    try:
        temporary.unlink(missing_ok=True)
        _remove_leftovers(target)
        write_file(temporary, pieces)
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        error.filename = str(path)  # the user does not know the temporary file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(target: Path) -> None:
    """Removes the temporary files of `replace_file(target)` calls that were killed on this host.

    The temporary files of processes that still run stay.
    """
    prefix = f".{target.name}.{HOST}-"
    for path in target.parent.glob(f"{glob.escape(prefix)}*.part"):
        process_id = path.name.removeprefix(prefix).removesuffix(".part")
        try:
            os.kill(int(process_id), 0)  # signal 0 only asks whether the process exists
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (ValueError, OverflowError):  # no process id: this file is not a temporary of ours
            continue
        except PermissionError:  # the process runs, under another user
            continue


def checksum(path: Path, advance: Callable[[int], object] = lambda _: None) -> dict[str, object]:
    """Reads a file and returns its size and checksum, as `write_file` does.

    Calls `advance` after each chunk with the chunk's number of bytes.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            advance(len(chunk))
    return {"size": size, CHECKSUM: digest.hexdigest()}


def hash_json(value: Any) -> str:
    """Hashes `value` as JSON text with sorted keys.

    An object that JSON cannot hold is hashed as its `str`.
    """
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def sync_folder(path: Path) -> None:
    """Waits until the disk has the names of the files in the folder `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes `path` and the missing folders above it, and waits until the disk has their names.

    It does nothing if `path` exists.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Renames a folder within its parent, atomically. `target` must not exist.

    Raises `OSError` if it fails. Its message is "renamed, but ..." if the rename succeeded and only
    the disk has not confirmed the new name.
    """
    source.rename(target)
    try:
        sync_folder(target.parent)
    except OSError as error:
        unconfirmed = (
            "renamed, but a power cut may undo that: the disk has not confirmed it "
            f"({error.strerror})"
        )
        raise OSError(error.errno, unconfirmed, str(target)) from error


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a file, or a folder with all that it holds; does nothing if `path` does not exist.

    For a symbolic link, the link is removed and its target stays. With `ignore_errors`, what cannot
    be removed stays.
    """
    try:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)  # another node may remove it at the same time
        elif path.exists():
            shutil.rmtree(path, ignore_errors=ignore_errors)
    except OSError:
        if not ignore_errors:
            raise


def empty_folder(path: Path) -> None:
    """Makes `path` an empty folder: makes it if it is missing, else removes all that it holds.

    A file or symbolic link at `path` is replaced by the folder.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    make_folder(path)
    for child in path.iterdir():
        remove_tree(child)


@contextmanager
def stage_and_rename(target: Path, staging: Path, replaced: Path | None = None) -> Iterator[Path]:
    """Gives the block an empty folder `staging`, and renames it to `target` after the block.

    If the block or the rename raises, `staging` is removed. The three paths must have the same
    parent. `replaced`: the name that an older `target` has meanwhile (see `publish_folder`).
    """
    try:
        empty_folder(staging)
        yield staging
        publish_folder(target, staging, replaced)
    except BaseException:
        remove_tree(staging, ignore_errors=True)
        raise


def try_writing(folder: Path) -> Path:
    """Checks that `folder` can be written to, or made, by a temporary file that is removed again.

    Returns the folder with the temporary file: `folder`, or its nearest parent that exists. Raises
    `OSError` if a file cannot be made there.
    """
    path = folder.absolute()
    existing_folder = next(each for each in (path, *path.parents) if each.exists())
    with tempfile.TemporaryFile(dir=existing_folder):
        return existing_folder


def publish_folder(target: Path, staging: Path, replaced: Path | None = None) -> None:
    """Renames the folder `staging` to `target`. All files in it must be on disk.

    With `replaced`, only one process at a time may call this. An older `target` is renamed to
    `replaced`, and removed after the new one is in place. If the process is killed between the two
    renames, `recover_replaced` restores the older one.

    Without `replaced`, an existing `target` stays and `staging` is removed: another process has
    published the same content.
    """
    sync_folder(staging)
    if replaced is not None and target.exists():
        remove_tree(replaced)
        rename(target, replaced)
    try:
        rename(staging, target)
    except BaseException as error:
        if replaced is not None:
            recover_replaced(target, replaced)
        elif isinstance(error, OSError) and target.exists():
            remove_tree(staging, ignore_errors=True)
            return
        raise
    if replaced is not None:
        # a later `recover_replaced` removes what cannot be removed now
        remove_tree(replaced, ignore_errors=True)


def recover_replaced(target: Path, replaced: Path) -> None:
    """Cleans up after a `publish_folder` that was interrupted.

    If `target` is missing, renames `replaced` back to `target`; else removes `replaced`.
    """
    if target.exists():
        remove_tree(replaced, ignore_errors=True)
    elif replaced.is_dir():
        rename(replaced, target)


def paths_beside(target: Path) -> tuple[Path, Path]:
    """Names the two hidden folders beside an export's folder `target`, while it is written.

    Returns (the staging folder, the name that an older `target` has while it is replaced).
    """
    return target.parent / f".{target.name}.exporting", target.parent / f".{target.name}.replaced"


def restore_folder(target: Path) -> None:
    """Restores an export's folder `target` if a process was killed between the two renames that
    replace it.

    It does nothing if `target` exists, another process holds the lock of the staging folder, or the
    file system refuses.
    """
    staging, replaced = paths_beside(target)
    with suppress(FolderInUse, OSError):
        if target.exists() or not replaced.is_dir():
            return
        staging.mkdir(exist_ok=True)
        lock = lock_folder(staging)
        try:
            recover_replaced(target, replaced)
            with suppress(OSError):  # a staging folder that is not empty stays
                staging.rmdir()
        finally:
            os.close(lock)


def restore_exports(run: Path) -> None:
    """Calls `restore_folder` for the exports in a run's folder: the model's and the adapter's."""
    for name in (EXPORT, ADAPTER):
        restore_folder(run / name)


def lock_folder(folder: Path, file: str | None = None) -> int:
    """Locks `folder` for this process until the returned descriptor is closed or the process ends.

    The lock is on the folder, or on `file` in it; the process's id is then written into the file. A
    file system without locks lets several processes have it at once.

    Raises `FolderInUse` if another process has the lock, or has just renamed or removed the folder.
    """
    path = folder if file is None else folder / file
    if file is None:
        flags = os.O_RDONLY | os.O_DIRECTORY
    else:
        flags = os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except (FileNotFoundError, NotADirectoryError):
        # the process that had the folder has renamed or removed it
        raise FolderInUse("another process") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # between open and flock another process may have renamed what this descriptor refers to
        is_in_use = not path.exists() or os.fstat(descriptor).st_ino != path.stat().st_ino
    except BlockingIOError:
        is_in_use = True
    except OSError:  # a file system without locks
        is_in_use = False
    if is_in_use:
        if file is None:
            holder = ""
        else:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise FolderInUse(holder or "another process")
    if file is not None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return descriptor
