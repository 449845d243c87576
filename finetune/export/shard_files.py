"""The files of the result: made at their full size, then filled a part at a time, each of which is read back from the disk."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SYNC_BYTES = 64 * 1024 * 1024  # how much is written before the disk is waited for
UNSYNCED_PARTS = 4  # of SYNC_BYTES; a slower disk holds the writer up, instead of filling the memory
FOLIO_BYTES = 2 * 1024 * 1024  # the kernel drops from its cache only whole folios, which may begin in the part before


def make_file(path: Path, content: bytes, size: int) -> None:
    """A new file of `size` bytes that begins with `content`; the rest are zeros, which take no room before `fill_file`.

    Raises `FileExistsError` for a file that exists, and any other `OSError` as it comes.
    """
    with _named_errors(path), path.open("xb", buffering=0) as file:
        file.write(content)
        file.truncate(size)


def fill_file(
    path: Path, position: int, chunks: Iterable[bytes | memoryview], on_disk: Callable[[int], object] = lambda _: None
) -> None:
    """Writes `chunks` into a file from `position` on, and waits until the disk has them.

    A thread waits for the disk while the next part is written. It then has the kernel forget the part, so that whoever reads
    it next reads the disk, and calls `on_disk` with the number of bytes, from the file's beginning, that are there.

    Raises `OSError` as it comes (a full disk, say).
    """
    wait_for_disk: Callable[[int], object] = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync

    def sync(descriptor: int, start: int, end: int, *, is_last: bool = False) -> None:
        (os.fsync if is_last else wait_for_disk)(descriptor)
        _forget(descriptor, start, end)
        on_disk(end)

    with _named_errors(path), path.open("r+b", buffering=0) as file, ThreadPoolExecutor(max_workers=1) as pool:
        file.seek(position)
        synced, waiting = 0, list[Future[None]]()
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            position += len(view)
            while view:
                view = view[file.write(view) :]
            if position - synced >= SYNC_BYTES:
                waiting.append(pool.submit(sync, file.fileno(), synced, position))
                synced = position
            if len(waiting) > UNSYNCED_PARTS:
                waiting.pop(0).result()
        waiting.append(pool.submit(sync, file.fileno(), synced, position, is_last=True))
        for future in waiting:  # each: the kernel reports a failure once, to the part that waited for it
            future.result()


def _forget(descriptor: int, start: int, end: int) -> None:
    """Has the kernel drop these bytes of a file, which are on disk, from its cache, where the system can."""
    if hasattr(os, "posix_fadvise"):
        start = max(0, start - FOLIO_BYTES)
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Names `path` in an `OSError` of its descriptor, of which the system does not say to what file it belongs."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
