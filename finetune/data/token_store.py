"""Tokenized documents in a folder: written once on each node, published by one rename, read
memory-mapped.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
import xxhash
from numpy.typing import NDArray

from finetune.config.methods import ROWS, RowKind
from finetune.config.schema import Data, DatasetSource
from finetune.data.images import IN_FILE, EncodedImage, load_stored
from finetune.data.messages import BadRow
from finetune.data.tokenizer import PLAIN, asks_for_date, find_stop_tokens
from finetune.errors import UserError
from finetune.files.durable import remove_tree, replace_file, stage_and_rename, write_file
from finetune.files.network import find_cache
from finetune.units import name_place

FACTS = "facts.json"


class DamagedStore(UserError):
    """A store's files are not what was written: one is missing, cut short or altered."""


Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of documents as tokens, to be written into a store."""

    input_ids: Int32s  # [tokens], document after document
    labels: Int32s  # [tokens]: the id of the next token of the document, or IGNORE_INDEX
    lengths: Int32s  # [documents]: tokens
    trained: Int32s  # [documents]: tokens with a label
    files: Int32s  # [documents]: index into the store's list of files
    rows: Int64s  # [documents]: number of the row in its file, from 1
    # [documents]: xxh3 of the text, in a group of all its texts, to find duplicates
    hashes: NDArray[np.uint64]
    # [documents]: 1 for a good answer (and its mismatched one), -1 for bad, 0 for unrated
    ratings: NDArray[np.int8]
    kept_sizes: Int64s  # [documents]: bytes of `kept_bytes`
    kept_bytes: NDArray[np.uint8]  # of prompts, what rewards read of each row, one after another
    image_counts: Int32s  # [documents]: images
    image_sizes: Int64s  # [images]: bytes of `image_bytes`
    image_bytes: NDArray[np.uint8]  # `EncodedImage.stored()` of each image, one after another
    image_hashes: NDArray[np.uint64]  # [images]: xxh3 of the encoded image


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The documents of one source. Returned by `open_store`."""

    input_ids: Int32s  # [tokens], memory-mapped
    labels: Int32s  # [tokens], memory-mapped
    starts: Int64s  # [documents + 1]: where each document begins
    trained: Int32s  # [documents]: tokens with a label
    files: Int32s  # [documents]: index into `facts["files"]`
    rows: Int64s  # [documents]
    hashes: NDArray[np.uint64]  # [documents]
    ratings: NDArray[np.int8]  # [documents]
    facts: dict[str, Any]
    # [documents + 1]
    kept_starts: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    # memory-mapped
    kept_bytes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    # [documents + 1]: the first image of each; None: there are none
    first_images: Int64s | None = None
    # [images + 1]
    image_starts: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    # memory-mapped
    image_bytes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    # [images]
    image_hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def read_row(self, document: int) -> Any:
        """Reads the prompt's row for the rewards, as data/preferences.py has kept it."""
        kept = slice(self.kept_starts[document], self.kept_starts[document + 1])
        return json.loads(self.kept_bytes[kept].tobytes())

    def count_images(self, document: int) -> int:
        """The number of a document's images."""
        return len(self._number_images(document))

    def _number_images(self, document: int) -> range:
        """The places of a document's images among all."""
        if self.first_images is None:
            return range(0)
        return range(int(self.first_images[document]), int(self.first_images[document + 1]))

    def read_images(self, document: int) -> list[EncodedImage]:
        """Reads a document's images. Raises `UserError` where one is no longer what it was."""
        return [self._read_image(number, document) for number in self._number_images(document)]

    def _read_image(self, number: int, document: int) -> EncodedImage:
        """Reads image `number` of the store, which is in `document`."""
        stored = slice(self.image_starts[number], self.image_starts[number + 1])
        try:
            image = load_stored(self.image_bytes[stored].tobytes())
        except BadRow as problem:
            raise DamagedStore(f"{self.where(document)}: {problem}") from None
        if image.hash != self.image_hashes[number]:
            raise DamagedStore(
                f"{self.where(document)}: image: {image.path}: it has changed since it was read"
            )
        return image

    def check_images(self) -> None:
        """Raises `DamagedStore` where the file of an image has changed."""
        if self.first_images is None:
            return
        document_of_image = np.repeat(
            np.arange(len(self.first_images) - 1), np.diff(self.first_images)
        )
        is_in_file = self.image_bytes[self.image_starts[:-1]] == IN_FILE[0]
        for number in np.flatnonzero(is_in_file).tolist():
            self._read_image(number, int(document_of_image[number]))

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
    "input_ids": np.int32,
    "labels": np.int32,
    "lengths": np.int32,
    "trained": np.int32,
    "files": np.int32,
    "rows": np.int64,
    "hashes": np.uint64,
    "ratings": np.int8,
    "kept_sizes": np.int64,
    "kept_bytes": np.uint8,
    "image_counts": np.int32,
    "image_sizes": np.int64,
    "image_bytes": np.uint8,
    "image_hashes": np.uint64,
}


def keep_in_memory(batches: Iterable[Tokens], facts: Callable[[], dict[str, Any]]) -> TokenStore:
    """A store of a few documents that is on no disk. `facts` is called after the last batch."""
    read = list(batches)
    columns = {name: np.concatenate([getattr(batch, name) for batch in read]) for name in COLUMNS}
    return _make_store(columns, facts())


def _make_store(columns: dict[str, Any], facts: dict[str, Any]) -> TokenStore:
    """Makes a store of the columns that `write_store` writes.

    Lengths and counts become the places where each document, kept row and image begins.
    """
    has_images = len(columns["image_sizes"]) > 0
    starts = _find_starts(columns.pop("lengths"))
    kept_starts = _find_starts(columns.pop("kept_sizes"))
    image_starts = _find_starts(columns.pop("image_sizes"))
    first_images = _find_starts(columns.pop("image_counts"))
    return TokenStore(
        **columns,
        starts=starts,
        kept_starts=kept_starts,
        image_starts=image_starts,
        first_images=first_images if has_images else None,
        facts=facts,
    )


def _find_starts(sizes: NDArray[np.integer]) -> Int64s:
    """Returns where each of several stretches begins, and where the last ends: [sizes + 1]."""
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def write_store(
    folder: Path, batches: Iterable[Tokens], facts: Callable[[], dict[str, Any]]
) -> None:
    """Writes a store into the existing, empty `folder`.

    facts.json lists the size and checksum of every column, and begins with a checksum of its own.
    When this returns, the files' contents are on disk. Their names are on disk once the folder is
    synced.

    Args:
        folder: Where to write.
        batches: The documents.
        facts: Called after the last batch, for what is kept as JSON beside them.
    """
    files = {name: (folder / f"{name}.bin").open("wb") for name in COLUMNS}
    digests = {name: xxhash.xxh3_128() for name in COLUMNS}
    try:
        for batch in batches:
            for name, kind in COLUMNS.items():
                block = np.ascontiguousarray(getattr(batch, name), dtype=kind).data
                files[name].write(block)
                digests[name].update(block)
        columns = {
            name: {"bytes": files[name].tell(), "xxh3": digests[name].hexdigest()}
            for name in COLUMNS
        }
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
            name: _map_column(folder / f"{name}.bin", kind, kept["columns"][name])
            for name, kind in COLUMNS.items()
        }
    except OSError as error:
        raise DamagedStore(
            f"{error.filename or folder}: cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise DamagedStore(f"{folder / FACTS}: damaged") from None
    store = _make_store(columns, kept["facts"])
    store.check_images()
    return store


def _map_column(path: Path, kind: type, written: dict[str, Any]) -> NDArray[Any]:
    """The column in `path`, memory-mapped, once its size and checksum are those of `written`."""
    # read, not mapped, so that the pages do not count as this process's memory
    with path.open("rb") as stream:
        checksum = file_digest(stream, xxhash.xxh3_128).hexdigest()
        size = stream.tell()
    if (size, checksum) != (written["bytes"], written["xxh3"]):
        raise DamagedStore(
            f"{path}: damaged: it is not what was written ({size:,} of {written['bytes']:,} bytes)"
        )
    if size:
        return np.memmap(path, dtype=kind, mode="r")
    return np.zeros(0, kind)


# of how rows become tokens, and of a store's files; raised when the same rows would give others
VERSION = 22
POLL_SECONDS = 0.1


def cache_folder(data: Data) -> Path:
    """The folder of tokenized sources."""
    if data.dataset_cache_dir is not None:
        return Path(data.dataset_cache_dir).expanduser()
    return find_cache("tokens")


def cache_key(
    source: DatasetSource,
    content: dict[str, str],
    data: Data,
    tokenizer: Any,
    seed: int = 0,
    kind: RowKind = "answers",
) -> str:
    """Names a source's tokens by all that decides them: rows, tokenizer, template and options; and
    by the seed, where it draws the rows.
    """
    described = {
        key: value for key, value in asdict(source).items() if key not in ("weight", "max_samples")
    }
    if source.max_samples is not None:
        described |= {"max_samples": source.max_samples, "seed": seed}
    return hash_inputs(data, tokenizer, kind, described, list(content.items()))


def hash_inputs(data: Data, tokenizer: Any, kind: RowKind, *rows: Any) -> str:
    """Names the tokens that rows give under a tokenizer and the recipe's options.

    Args:
        data: The options.
        tokenizer: With its template, tools and images.
        kind: What is read of the rows.
        rows: Whatever describes them.
    """
    options: dict[str, Any] = {
        "assistant_only_loss": data.assistant_only_loss,
        "on_bad_row": data.on_bad_row,
        "turns": data.turns,
        "train_on_reasoning": data.train_on_reasoning,
        # Findings are stored too, and depend on these two.
        "response_template": getattr(tokenizer, "response_template", None),
        "stop_tokens": find_stop_tokens(tokenizer),
    }
    if data.chat_template_date is not None and asks_for_date(tokenizer):
        options["date"] = data.chat_template_date
    template = tokenizer.chat_template or PLAIN
    if kind != "answers":
        options["kind"] = kind
    options |= {key: getattr(data, key) for key in ROWS[kind].keys}
    if tools := getattr(tokenizer, "tools", ()):
        options["tools"] = tools
    if environments := getattr(tokenizer, "environments", {}):
        options["environments"] = {name: facts.tools for name, facts in environments.items()}
    described = [VERSION, options, template, tokenizer.special_tokens_map, rows]
    digest = blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    if (images := getattr(tokenizer, "images", None)) is not None:
        digest.update(json.dumps([images.is_expected, images.describe()], sort_keys=True).encode())
    return digest.hexdigest()


def open_or_write_store(
    folder: Path, local_rank: int, write: Callable[[Path], None], canceled: Event | None = None
) -> TokenStore:
    """Opens the store in `folder`; if it is missing or damaged, local rank 0 writes it first.

    The other ranks look at the file system, not at each other, so that no timeout of a process
    group ends their waiting.

    Args:
        folder: Of the store.
        local_rank: Of this process.
        write: Writes a store into an empty folder.
        canceled: Ends the waiting once it is set.

    Raises:
        UserError: On every rank, where the store cannot be written.
    """
    if local_rank == 0:
        if folder.exists():
            try:
                return open_store(folder)
            except DamagedStore as damage:
                print(f"{damage}; the rows are tokenized again", file=sys.stderr, flush=True)
                _discard(folder)
        publish_store(folder, write)
        return open_store(folder)
    while True:
        wait_for_store(folder, canceled)
        try:
            return open_store(folder)
        except DamagedStore:  # local rank 0 finds the same and replaces it
            time.sleep(POLL_SECONDS)


def publish_store(folder: Path, write: Callable[[Path], None]) -> None:
    """Has `write` make a store, which appears as `folder` once all of it is on disk.

    What fails is a `UserError` here and, through a note beside the folder, on the ranks that wait
    for it.
    """
    failure = _failure_file(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        failure.unlink(missing_ok=True)
        _sweep(folder.parent)
        with stage_and_rename(folder, _staging_folder(folder)) as staging:
            write(staging)
    except (OSError, UserError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = (
                f"{folder.parent}: cannot write the tokens: {error.strerror or error}; set "
                "dataset_cache_dir"
            )
        # where not even this can be written, the launcher ends the ranks that wait
        with suppress(OSError):
            replace_file(failure, problem)
        raise UserError(problem) from None


def wait_for_store(folder: Path, canceled: Event | None) -> None:
    """Waits until local rank 0 of this node has written the folder or noted its failure, or
    `canceled` is set.
    """
    failure = _failure_file(folder)
    started = psutil.Process().create_time()
    while not folder.exists():
        if failure.exists() and failure.stat().st_mtime >= started:
            raise UserError(failure.read_text())
        if canceled is not None and canceled.is_set():
            raise UserError(f"{folder}: the wait for it was canceled")
        time.sleep(POLL_SECONDS)


def _discard(folder: Path) -> None:
    """Removes a damaged store.

    A process that still reads it keeps its files, being memory-mapped.
    """
    damaged = _staging_folder(folder)
    try:
        folder.rename(damaged)
    except FileNotFoundError:  # another node has discarded it, on a file system that both see
        return
    except OSError as error:
        raise UserError(
            f"{folder}: damaged, and cannot be removed: {error.strerror or error}"
        ) from None
    remove_tree(damaged, ignore_errors=True)


def _staging_folder(folder: Path) -> Path:
    """This process's own name for a store that is not published; `_sweep` removes what a killed
    process leaves.
    """
    return folder.parent / f"making-{socket.gethostname()}-{os.getpid()}-{folder.name}"


def _failure_file(folder: Path) -> Path:
    return folder.parent / f"failed-{folder.name}.txt"


def _sweep(folder: Path) -> None:
    """Removes what killed processes of this machine have left half-written."""
    for left in folder.glob(f"making-{socket.gethostname()}-*"):
        process = left.name.removeprefix(f"making-{socket.gethostname()}-").partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            remove_tree(left, ignore_errors=True)
