"""Files and folders that are on disk whole, or as they were before: through kills, power cuts and
full disks.

A file's bytes are on disk only after its own fsync, and its name only after the fsync of the folder
that holds it. A folder becomes visible by one rename, once all in it is on disk.
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

# finds damage, not malice, at the speed of memory; a SHA-256 would halve the rate of a fast disk
CHECKSUM = "xxh3_128"
CHUNK_BYTES = 16 * 1024 * 1024
# process ids are those of a machine, or of a container with a name of its own
HOST = os.uname().nodename


class FolderInUse(Exception):
    """Another process holds the lock of a folder.

    The message names that process, where it is known.
    """


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Writes a new file and waits until the disk has it.

    Returns its `size` in bytes and its checksum.

    Raises `FileExistsError` for a file that exists, and any other `OSError` as it comes (a full
    disk, say).
    """
    digest = xxhash.xxh3_128()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for whole in chunks:
            view = memoryview(whole).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    except OSError as error:  # of a descriptor: the system does not say of which file
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    return {"size": size, CHECKSUM: digest.hexdigest()}


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes `content` beside `path` and renames it to `path`.

    A link stays one, and a device (/dev/stdout) is written to.

    Raises `OSError` where that fails; then `path` is what it was.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(raw)
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{HOST}-{os.getpid()}.part")
    try:
        temporary.unlink(missing_ok=True)
        _remove_leftovers(target)
        write_file(temporary, [raw])
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        error.filename = str(path)  # the user knows no temporary file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(target: Path) -> None:
    """Removes what killed processes of this machine have left of a `replace_file` of `target`."""
    own = f".{target.name}.{HOST}-"
    for path in target.parent.glob(f"{glob.escape(own)}*.part"):
        process = path.name.removeprefix(own).removesuffix(".part")
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (
            ValueError,
            OverflowError,
            PermissionError,
        ):  # another file's, or a process of another user
            continue


def checksum(path: Path, advance: Callable[[int], object] = lambda _: None) -> dict[str, object]:
    """The `size` and checksum of a file, as `write_file` returns them.

    Calls `advance` with the bytes read.
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
    """A hash of `value` as JSON. What JSON has no form for is hashed as `str` writes it."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def sync_folder(path: Path) -> None:
    """Waits until the disk has the names in `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes `path` and the missing folders above it; one that exists is fine."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Renames a folder within its parent; `target` must not exist.

    Atomic: there is no moment with half of it.

    Raises `OSError` where that fails; with "renamed, but ..." where only the disk has not confirmed
    the new name.
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
    """Removes a folder or file and all in it; a missing one is fine. Of a link, its target stays.

    `ignore_errors` removes what it can and leaves the rest.
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
    """Makes `path` an empty folder: a missing one is made, and what an existing one holds is
    removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    make_folder(path)
    for inner in path.iterdir():
        remove_tree(inner)


@contextmanager
def stage_and_rename(target: Path, staging: Path, replaced: Path | None = None) -> Iterator[Path]:
    """An empty folder `staging` that is renamed to `target` when the block ends, and is removed
    where it raises.

    The three paths lie in one folder. `replaced`: see `publish_folder`.
    """
    try:
        empty_folder(staging)
        yield staging
        publish_folder(target, staging, replaced)
    except BaseException:
        remove_tree(staging, ignore_errors=True)
        raise


def try_writing(folder: Path) -> Path:
    """Writes a file where `folder` is or would be made, and leaves nothing; returns the folder that
    exists there. Raises `OSError` where it cannot.
    """
    path = folder.absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    with tempfile.TemporaryFile(dir=existing):
        return existing


def publish_folder(target: Path, staging: Path, replaced: Path | None = None) -> None:
    """Renames `staging`, in which all files are on disk, to `target`.

    Only one process at a time may do this.

    A `target` that exists is first renamed to `replaced`, then removed: `recover_replaced` restores
    it where the process is killed between the two renames. Without `replaced`, a `target` that
    exists stays and `staging` is removed: another process has published the same content.
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
        # the next `recover_replaced` removes what could not be removed now
        remove_tree(replaced, ignore_errors=True)


def recover_replaced(target: Path, replaced: Path) -> None:
    """Undoes half of a `publish_folder`: gives `replaced` its name back where `target` is missing,
    else removes it.
    """
    if target.exists():
        remove_tree(replaced, ignore_errors=True)
    elif replaced.is_dir():
        rename(replaced, target)


def paths_beside(target: Path) -> tuple[Path, Path]:
    """Returns (where a folder that a user named, an export, is written; what an older one is called
    while it is replaced).
    """
    return target.parent / f".{target.name}.exporting", target.parent / f".{target.name}.replaced"


def restore_folder(target: Path) -> None:
    """Restores the folder at `target` where a process was killed while it replaced it, between two
    renames.

    Every command that may meet an export calls this. It does nothing while another process writes
    there.
    """
    staging, replaced = paths_beside(target)
    if target.exists() or not replaced.is_dir():
        return
    with suppress(FolderInUse, OSError):
        staging.mkdir(exist_ok=True)
        lock = lock_folder(staging)
        try:
            recover_replaced(target, replaced)
            with suppress(OSError):  # another process has begun to write there
                staging.rmdir()
        finally:
            os.close(lock)


def restore_exports(run: Path) -> None:
    """`restore_folder` of the exports in a run's folder."""
    for name in (EXPORT, ADAPTER):
        restore_folder(run / name)


def lock_folder(folder: Path, file: str | None = None) -> int:
    """Locks `folder` until the returned descriptor is closed or this process ends, however it ends.

    The lock is on the folder itself, or on `file` in it, which then names this process. On a file
    system without locks nothing keeps two processes apart. Raises `FolderInUse` where another
    process has the lock.
    """
    path = folder if file is None else folder / file
    if file is None:
        flags = os.O_RDONLY | os.O_DIRECTORY
    else:
        flags = os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # the process that had it has renamed or removed it
        raise FolderInUse("another process") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_renamed = not path.exists() or os.fstat(descriptor).st_ino != path.stat().st_ino
    except BlockingIOError:
        is_renamed = True
    except OSError:
        is_renamed = False
    if is_renamed:
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
