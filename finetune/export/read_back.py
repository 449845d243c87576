"""The files of the result, read back by the reference implementation of safetensors: their digests, and their rows."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import safe_open

from finetune.export.blocks import raw_bytes, row_blocks
from finetune.files.safetensors_header import HeaderEntry, read_header

# How much of a file is read before it is reopened. Rows are a memory map of safetensors', whose pages count as resident.
MAPPED_BYTES = 16 * 1024 * 1024
Wait = Callable[[str, int], object]  # (file, end): returns once the first `end` bytes of it are on disk

Result = TypeVar("Result")


class WrittenFiles:
    """The tensors of some safetensors files of a folder, which may be written while they are read.

    One reading: rows are handed out one call at a time.
    """

    def __init__(self, folder: Path, files: tuple[str, ...], wait: Wait = lambda _file, _end: None) -> None:
        """Reads the headers, which the files must hold. Raises `UserError` where one is wrong, or two hold one name."""
        self._folder, self._wait, self._lock = folder, wait, Lock()
        self.entries: dict[str, tuple[str, HeaderEntry]] = {}
        for file in files:
            for entry in sorted(read_header(folder / file), key=lambda entry: entry.begin):
                self.entries[entry.name] = (file, entry)
        self._opened: Any = None
        self._opened_file, self._mapped_bytes = "", 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, (_, entry) in self.entries.items()}

    def read(self, name: str, start: int, stop: int, use: Callable[[torch.Tensor], Result]) -> Result:
        """`use(rows)` for rows of a tensor; a scalar has one row, itself. They are a memory map, gone when `use` returns."""
        file, entry = self.entries[name]
        row_bytes = (entry.end - entry.begin) // max(1, entry.shape[0] if entry.shape else 1)
        self._wait(file, entry.begin + stop * row_bytes)
        with self._lock:
            if self._opened_file != file or self._mapped_bytes > MAPPED_BYTES:
                self.close()
                self._opened = safe_open(self._folder / file, framework="pt")
                self._opened_file = file
            self._mapped_bytes += (stop - start) * row_bytes
            part = self._opened.get_slice(name)
            return use(part[start:stop] if entry.shape else self._opened.get_tensor(name))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._opened, self._opened_file, self._mapped_bytes = None, "", 0


def read_digests(files: WrittenFiles, advance: Callable[[int], object] = lambda _: None) -> dict[str, str]:
    """The digest (xxh3, 128 bits, in hexadecimal) of every tensor's bytes, by name, in the order in which they lie there."""
    found = {}
    for name, (_, entry) in files.entries.items():
        digest = xxhash.xxh3_128()

        def add(rows: torch.Tensor, digest: Any = digest) -> int:
            digest.update(raw_bytes(rows))
            return rows.nbytes

        for start, stop in row_blocks(entry.shape):
            advance(files.read(name, start, stop, add))
        found[name] = digest.hexdigest()
    files.close()
    return found
