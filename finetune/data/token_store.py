"""Tokenized documents in a folder, written once and read memory-mapped."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from finetune.data.images import IN_FILE, EncodedImage, load_stored
from finetune.data.messages import BadRow
from finetune.errors import UserError
from finetune.files.durable import write_file
from finetune.units import name_place

FACTS = "facts.json"


class DamagedStore(UserError):
    """A store's files are not what was written: one is missing, cut short or altered."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of documents as tokens, to be written into a store."""

    input_ids: NDArray[np.int32]  # [tokens], document after document
    labels: NDArray[np.int32]  # [tokens]: the id of the next token of the document, or IGNORE_INDEX
    lengths: NDArray[np.int32]  # [documents]: tokens
    trained: NDArray[np.int32]  # [documents]: tokens with a label
    files: NDArray[np.int32]  # [documents]: index into the store's list of files
    rows: NDArray[np.int64]  # [documents]: number of the row in its file, from 1
    hashes: NDArray[np.uint64]  # [documents]: xxh3 of the text, in a group of all its texts, to find duplicates
    ratings: NDArray[np.int8]  # [documents]: 1 for a good answer (and its mismatched one), -1 for bad, 0 for unrated
    kept_sizes: NDArray[np.int64]  # [documents]: bytes of `kept_bytes`
    kept_bytes: NDArray[np.uint8]  # of prompts, what rewards read of each row, one after another
    image_counts: NDArray[np.int32]  # [documents]: images
    image_sizes: NDArray[np.int64]  # [images]: bytes of `image_bytes`
    image_bytes: NDArray[np.uint8]  # `EncodedImage.stored()` of each image, one after another
    image_hashes: NDArray[np.uint64]  # [images]: xxh3 of the encoded image


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The documents of one source. Returned by `open_store`."""

    input_ids: NDArray[np.int32]  # [tokens], memory-mapped
    labels: NDArray[np.int32]  # [tokens], memory-mapped
    starts: NDArray[np.int64]  # [documents + 1]: where each document begins
    trained: NDArray[np.int32]  # [documents]: tokens with a label
    files: NDArray[np.int32]  # [documents]: index into `facts["files"]`
    rows: NDArray[np.int64]  # [documents]
    hashes: NDArray[np.uint64]  # [documents]
    ratings: NDArray[np.int8]  # [documents]
    facts: dict[str, Any]
    kept_starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))  # [documents + 1]
    kept_bytes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # memory-mapped
    first_images: NDArray[np.int64] | None = None  # [documents + 1]: the first image of each; None: there are none
    image_starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))  # [images + 1]
    image_bytes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # memory-mapped
    image_hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))  # [images]

    def read_row(self, document: int) -> Any:
        """What rewards read of a prompt's row, which data/questions.py has kept."""
        return json.loads(self.kept_bytes[self.kept_starts[document] : self.kept_starts[document + 1]].tobytes())

    def count_images(self, document: int) -> int:
        """The images of a document."""
        return 0 if self.first_images is None else int(self.first_images[document + 1] - self.first_images[document])

    def read_images(self, document: int) -> list[EncodedImage]:
        """The images of a document. Raises `UserError` where one is no longer what it was."""
        if self.first_images is None:
            return []
        numbers = range(int(self.first_images[document]), int(self.first_images[document + 1]))
        return [self._read_image(number, document) for number in numbers]

    def _read_image(self, number: int, document: int) -> EncodedImage:
        try:
            image = load_stored(self.image_bytes[self.image_starts[number] : self.image_starts[number + 1]].tobytes())
        except BadRow as problem:
            raise DamagedStore(f"{self.where(document)}: {problem}") from None
        if image.hash != self.image_hashes[number]:
            raise DamagedStore(f"{self.where(document)}: image: {image.path}: it has changed since it was read")
        return image

    def check_images(self) -> None:
        """Raises `DamagedStore` where the file of an image has changed."""
        if self.first_images is not None:
            documents = np.repeat(np.arange(len(self.first_images) - 1), np.diff(self.first_images))
            for number in np.flatnonzero(self.image_bytes[self.image_starts[:-1]] == IN_FILE[0]).tolist():
                self._read_image(number, int(documents[number]))

    @property
    def group_size(self) -> int:
        """Documents that belong together, one after another: 2 for chosen and rejected."""
        return int(self.facts.get("group_size", 1))

    @property
    def is_rated(self) -> bool:
        """Whether the first document of each group is a rated answer."""
        return bool(self.facts.get("is_rated", False))

    @property
    def is_asked(self) -> bool:
        """Whether the documents are prompts, of which nothing is trained on."""
        return bool(self.facts.get("is_asked", False))

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """bool[documents]: whether it is plain text, in a file that holds nothing else."""
        return ~np.isin(self.files, self.facts["structured_files"])

    def where(self, document: int) -> str:
        """The file and the line or row of a document."""
        return name_place(self.facts["files"][self.files[document]], int(self.rows[document]))


COLUMNS: dict[str, Any] = {
    "input_ids": np.int32, "labels": np.int32, "lengths": np.int32, "trained": np.int32, "files": np.int32,
    "rows": np.int64, "hashes": np.uint64, "ratings": np.int8, "kept_sizes": np.int64, "kept_bytes": np.uint8,
    "image_counts": np.int32, "image_sizes": np.int64, "image_bytes": np.uint8, "image_hashes": np.uint64,
}  # fmt: skip


def keep_in_memory(batches: Iterable[Tokens], facts: Callable[[], dict[str, Any]]) -> TokenStore:
    """A store of a few documents that is on no disk. `facts` is called after the last batch."""
    read = list(batches)
    columns = {name: np.concatenate([getattr(batch, name) for batch in read]) for name in COLUMNS}
    return _make_store(columns, facts())


def _make_store(columns: dict[str, Any], facts: dict[str, Any]) -> TokenStore:
    """A store of what `write_store` writes; lengths and counts become the places where each begins."""
    lengths, kept, sizes, counts = (
        columns.pop(name) for name in ("lengths", "kept_sizes", "image_sizes", "image_counts")
    )
    starts, kept_starts, image_starts, first_images = (
        np.concatenate(([0], np.cumsum(each, dtype=np.int64))) for each in (lengths, kept, sizes, counts)
    )
    images: dict[str, Any] = {"image_starts": image_starts, "first_images": first_images if len(sizes) else None}
    return TokenStore(**columns, **images, starts=starts, kept_starts=kept_starts, facts=facts)


def write_store(folder: Path, batches: Iterable[Tokens], facts: Callable[[], dict[str, Any]]) -> None:
    """Writes a store into the existing, empty `folder`. `facts` is called after the last batch; kept as JSON.

    facts.json lists the size and checksum of every column, and begins with a checksum of its own. When this returns,
    the files are on disk; their names are once the folder is synced.
    """
    files = {name: (folder / f"{name}.bin").open("wb") for name in COLUMNS}
    digests = {name: xxhash.xxh3_128() for name in COLUMNS}
    try:
        for batch in batches:
            for name, kind in COLUMNS.items():
                block = np.ascontiguousarray(getattr(batch, name), dtype=kind).data
                files[name].write(block)
                digests[name].update(block)
        columns = {name: {"bytes": files[name].tell(), "xxh3": digests[name].hexdigest()} for name in COLUMNS}
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    text = json.dumps({"columns": columns, "facts": facts()}, indent=1)
    write_file(folder / FACTS, [f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}".encode()])


def open_store(folder: Path) -> TokenStore:
    """A store that `write_store` wrote. Every byte is read and compared with its checksum.

    Raises `DamagedStore` where one differs.
    """
    try:
        checksum, _, text = (folder / FACTS).read_text(encoding="utf-8").partition("\n")
        if checksum != xxhash.xxh3_128_hexdigest(text.encode()):
            raise DamagedStore(f"{folder / FACTS}: damaged")
        kept = json.loads(text)
        columns = {
            name: _map_column(folder / f"{name}.bin", kind, kept["columns"][name]) for name, kind in COLUMNS.items()
        }
    except OSError as error:
        raise DamagedStore(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DamagedStore(f"{folder / FACTS}: damaged") from None
    store = _make_store(columns, kept["facts"])
    store.check_images()
    return store


def _map_column(path: Path, kind: type, written: dict[str, Any]) -> NDArray[Any]:
    """The column in `path`, memory-mapped, once its size and checksum are those of `written`."""
    with path.open("rb") as stream:  # read, not mapped, so that the pages do not count as this process's memory
        checksum = file_digest(stream, xxhash.xxh3_128).hexdigest()
        size = stream.tell()
    if (size, checksum) != (written["bytes"], written["xxh3"]):
        raise DamagedStore(f"{path}: damaged: it is not what was written ({size:,} of {written['bytes']:,} bytes)")
    return np.memmap(path, dtype=kind, mode="r") if size else np.zeros(0, kind)
