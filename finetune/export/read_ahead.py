"""Files that will be needed are read from the disk into the kernel's cache while the processor is busy with imports. No
torch."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from finetune.checkpoint.manifest import MODEL, NAME
from finetune.constants import ADAPTER_CONFIG
from finetune.files.run_json import read_json_object

FSDP_FOLDER = "pytorch_model_fsdp_0"  # of accelerator.save_state, sharded
BUFFER_BYTES = 1024 * 1024  # what fits a core's cache is copied fastest
# filled by one call, all of them the same: between calls a thread that imports holds Python's lock for milliseconds
BUFFERS = 32
CACHE_SHARE = 0.5  # of the memory that is available: what is read ahead must not drive out what is in use
WEIGHTS = re.compile(r".*\.(safetensors|distcp|bin|pt|pth)")


@contextmanager
def read_weights_ahead(source: Path) -> Iterator[None]:
    """Reads the weights of what is exported ahead, in a thread that ends with the block."""
    ended = Event()

    def read() -> None:
        remaining = int(_available_bytes() * CACHE_SHARE)
        with suppress(OSError):  # reported where it matters
            for path in _find_weights(source):
                remaining -= read_ahead(path, 0, min(path.stat().st_size, remaining), ended)

    thread = Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def read_ahead(path: Path, start: int, end: int, ended: Event | None = None) -> int:
    """Reads these bytes of a file, for the kernel to keep. Returns their number; fewer where the file or the time
    `ended`.

    Read in order, they are kept in large pieces, which takes a fraction of the processor's time that page faults, or
    the kernel's own advice to read ahead, take.
    """
    buffer, position = memoryview(bytearray(BUFFER_BYTES)), start
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        while position < end and not (ended is not None and ended.is_set()):
            whole, rest = divmod(min(end - position, BUFFERS * BUFFER_BYTES), BUFFER_BYTES)
            count = os.preadv(descriptor, [buffer] * whole + [buffer[:rest]], position)
            if count == 0:
                break
            position += count
    finally:
        os.close(descriptor)
    return position - start


def _find_weights(source: Path) -> list[Path]:
    """The weights that an export of `source` will read, as far as names say; with an adapter, those of a base in a
    folder."""
    steps = sorted(path for path in source.glob("checkpoints/*") if NAME.fullmatch(path.name))
    newest = steps[-1] if steps else source
    folders = [folder for folder in (newest / MODEL, newest, newest / FSDP_FOLDER) if folder.is_dir()]
    bases = [base for folder in folders if (base := _find_base(folder / ADAPTER_CONFIG)) is not None]
    return sorted(path for folder in (*folders, *bases) for path in folder.iterdir() if WEIGHTS.fullmatch(path.name))


def _find_base(config: Path) -> Path | None:
    name = read_json_object(config).get("base_model_name_or_path")  # what is wrong with it is said where it is needed
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


def _available_bytes() -> int:
    """The memory that the kernel can give without taking any from a process; 0 where it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
