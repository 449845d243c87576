"""A file without a name, for state of this process alone: reserved at once, written past the page cache.

No killed process leaves one behind: the system frees what has neither a name nor a process. Requests are direct
(open(2), O_DIRECT) where the file system has that; else what they leave in the page cache, which would be the very
memory that is to be saved, is dropped after each.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from finetune.constants import OFFLOAD_ALIGNMENT
from finetune.errors import UserError
from finetune.units import counted, disk_size

T = TypeVar("T")
REQUEST_BYTES = 8 << 20
REQUESTS = 4  # in flight at once: one alone leaves an NVMe disk waiting


def align(byte_count: int) -> int:
    """The next multiple of OFFLOAD_ALIGNMENT.

    >>> align(1), align(4096), align(0)
    (4096, 4096, 0)
    """
    return -(-byte_count // OFFLOAD_ALIGNMENT) * OFFLOAD_ALIGNMENT


def allocate_aligned(byte_count: int, device: torch.device) -> torch.Tensor:
    """Host memory [bytes, a multiple of OFFLOAD_ALIGNMENT] for direct requests; pinned for GPU ranks.

    Not by torch's pinned allocator, which rounds up to a power of two.
    """
    memory = torch.frombuffer(mmap.mmap(-1, max(align(byte_count), OFFLOAD_ALIGNMENT)), dtype=torch.uint8)
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # where that fails, copies are only slower
    return memory


def check_scratch_folder(folder: Path, needed: int, ranks: int) -> None:
    """Raises `UserError` where `folder`, which may be missing yet, cannot be written, is in host memory, or has not
    `needed` bytes free for the files of `ranks` ranks; and where the folder above it is missing too, as by a typing
    error. Leaves nothing there."""
    if not folder.exists() and not folder.absolute().parent.exists():
        raise UserError(
            f"offload_dir: {folder}: no such folder, nor one to make it in; make {folder.parent}, or correct the path"
        )
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None
    kind = _find_filesystem(existing)
    if kind in ("tmpfs", "ramfs"):
        raise UserError(f"offload_dir: {folder}: a {kind}, which is host memory; name a folder on a disk")
    if needed > shutil.disk_usage(existing).free:
        raise _too_small(existing, needed, ranks)


def open_scratch_file(folder: Path, size: int) -> "ScratchFile":
    """A scratch file of `size` bytes in `folder`, which is made if missing. Raises `UserError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ScratchFile(folder, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_small(folder, size, 1) from None
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"offload_dir: {folder}: cannot be written ({error.strerror}); name another folder")


def _too_small(folder: Path, needed: int, ranks: int) -> UserError:
    free = disk_size(shutil.disk_usage(folder).free)
    return UserError(
        f"offload_dir: {folder}: the optimizer's state of {counted(ranks, 'rank')} takes {disk_size(needed)}, but "
        f"{free} are free there; make room, name a larger disk, or launch on more nodes"
    )


def _find_filesystem(folder: Path) -> str:
    import psutil

    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (folder.resolve(), *folder.resolve().parents) if path in mounts), "unknown")


class ScratchFile:
    """`size` bytes in `folder`, zero at first. All offsets and lengths are multiples of OFFLOAD_ALIGNMENT.

    Raises `OSError` where the folder cannot be written, or the disk has not so many bytes free.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        if size > shutil.disk_usage(folder).free:  # to reserve it would fill the disk before it failed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        self._file = self._with_place(lambda: tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - open as long as the run
        self._descriptor = self._file.fileno()
        if size:
            self._with_place(lambda: os.posix_fallocate(self._descriptor, 0, size))
        self.is_direct = _make_direct(self._descriptor)
        self._pool = ThreadPoolExecutor(max_workers=REQUESTS, thread_name_prefix="offload")

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fills `into` (uint8, of `allocate_aligned`) with the bytes from `offset` on."""
        self._with_place(lambda: self._request(os.preadv, offset, into))

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Writes `values` (uint8, of `allocate_aligned`) to `offset`."""
        self._with_place(lambda: self._request(os.pwritev, offset, values))
        if not self.is_direct:
            os.fdatasync(self._descriptor)  # only clean pages can be dropped
            os.posix_fadvise(self._descriptor, offset, values.nbytes, os.POSIX_FADV_DONTNEED)

    def _request(self, call: Callable[[int, list[memoryview], int], int], offset: int, memory: torch.Tensor) -> None:
        view = memory.numpy().data

        def move(start: int) -> None:
            part, place = view[start : start + REQUEST_BYTES], offset + start
            while part:
                moved = call(self._descriptor, [part], place)
                if moved == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                part, place = part[moved:], place + moved

        list(self._pool.map(move, range(0, len(view), REQUEST_BYTES)))
        if call is os.preadv and not self.is_direct:
            os.posix_fadvise(self._descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)

    def _with_place(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as error:
            error.filename = str(self.folder / "(a file without a name)")  # the system knows only a descriptor
            raise


def _make_direct(descriptor: int) -> bool:
    """Whether requests now pass the page cache by; a file system without that (tmpfs) refuses."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
