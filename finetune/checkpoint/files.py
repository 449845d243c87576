"""Every change that a checkpoint makes on disk, each durable once its function returns.

A file's bytes are on disk only after its own fsync, and its name only after the fsync of the folder that holds it.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

CHECKSUM = "xxh3_128"  # finds damage, not malice, at the speed of memory; a SHA-256 would halve the rate of a fast disk
CHUNK_BYTES = 16 * 1024 * 1024


def make_folder(path: Path) -> None:
    """Makes `path` and what is missing above it; one that is there is fine."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Writes a new file and waits until the disk has it. Returns its `size` in bytes and its checksum.

    Raises `FileExistsError` for a file that is there, and any other `OSError` as it comes (a full disk, say).
    """
    digest, size = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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


def sync_folder(path: Path) -> None:
    """Waits until the disk has the names in `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Moves a folder within one parent; `target` must not exist. Atomic: there is no moment with half of it."""
    source.rename(target)
    sync_folder(target.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it; one that is not there is fine. Of a link, what it leads to stays."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def checksum(path: Path, advance: Callable[[int], object] = lambda _: None) -> dict[str, object]:
    """The `size` and checksum of a file, as `write_file` returned them. `advance` is told the bytes as they are read."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            advance(len(chunk))
    return {"size": size, CHECKSUM: digest.hexdigest()}
