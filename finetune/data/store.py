"""Tokenised documents in a folder, written once and read memory-mapped."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORE = -100  # the label of a position that is not trained on; torch's cross entropy skips it


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of documents as tokens, on the way to a store."""

    input_ids: NDArray[np.int32]  # [tokens], document after document
    labels: NDArray[np.int32]  # [tokens]: the id of the next token of the document, or IGNORE
    lengths: NDArray[np.int32]  # [documents]: tokens
    trained: NDArray[np.int32]  # [documents]: tokens with a label
    files: NDArray[np.int32]  # [documents]: index into the store's list of files
    rows: NDArray[np.int64]  # [documents]: number of the row in its file, from 1
    hashes: NDArray[np.uint64]  # [documents]: xxh3 of the text, to find duplicates


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The documents of one source. Source: `open_store`."""

    input_ids: NDArray[np.int32]  # [tokens], memory-mapped
    labels: NDArray[np.int32]  # [tokens], memory-mapped
    starts: NDArray[np.int64]  # [documents + 1]: where each document begins
    trained: NDArray[np.int32]  # [documents]: tokens with a label
    files: NDArray[np.int32]  # [documents]: index into `facts["files"]`
    rows: NDArray[np.int64]  # [documents]
    hashes: NDArray[np.uint64]  # [documents]
    facts: dict[str, Any]

    def where(self, document: int) -> str:
        """The file and row of a document."""
        return f"{self.facts['files'][self.files[document]]}:{self.rows[document]}"


COLUMNS: dict[str, Any] = {
    "input_ids": np.int32,
    "labels": np.int32,
    "lengths": np.int32,
    "trained": np.int32,
    "files": np.int32,
    "rows": np.int64,
    "hashes": np.uint64,
}


def write_store(folder: Path, batches: Iterable[Tokens], facts: Callable[[], dict[str, Any]]) -> None:
    """Writes a store into the existing, empty `folder`. `facts` is asked when the batches are through; kept as JSON."""
    files = {name: (folder / f"{name}.bin").open("wb") for name in COLUMNS}
    try:
        for batch in batches:
            for name, kind in COLUMNS.items():
                files[name].write(np.ascontiguousarray(getattr(batch, name), dtype=kind).data)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    (folder / "facts.json").write_text(json.dumps(facts(), indent=1))


def open_store(folder: Path) -> TokenStore:
    """A store that `write_store` wrote."""
    columns = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in COLUMNS.items()}
    starts = np.concatenate(([0], np.cumsum(columns["lengths"], dtype=np.int64)))
    return TokenStore(
        input_ids=columns["input_ids"],
        labels=columns["labels"],
        starts=starts,
        trained=columns["trained"],
        files=columns["files"],
        rows=columns["rows"],
        hashes=columns["hashes"],
        facts=json.loads((folder / "facts.json").read_text()),
    )


def _mapped(path: Path, kind: type) -> NDArray[Any]:
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.zeros(0, kind)
