"""Token stores: folders of tokenized documents.

Each node writes a store once and publishes it by one rename; all ranks read it memory-mapped.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
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
from finetune.files.durable import (
    CHECKSUM,
    checksum,
    remove_tree,
    replace_file,
    stage_and_rename,
    write_file,
)
from finetune.files.network import find_cache
from finetune.units import name_place

FACTS = "facts.json"  # the file of a store's facts and checksums


class DamagedStore(UserError):
    """A file of a store, or of an image in it, is missing, cut short or altered."""


Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of documents as tokens, to be written into a store."""

    input_ids: Int32s  # [tokens], document after document
    labels: Int32s  # [tokens]: the id of the document's next token, another label, or IGNORE_INDEX
    lengths: Int32s  # [documents]: number of tokens
    trained: Int32s  # [documents]: number of tokens with a label
    files: Int32s  # [documents]: index into the store's list of files
    rows: Int64s  # [documents]: number of the row in its file, from 1
    # [documents]: xxh3 by which duplicates are found: of the text, or of what a group compares
    hashes: NDArray[np.uint64]
    # [documents]: 1 for a good answer (and its mismatched one), -1 for bad, 0 for unrated
    ratings: NDArray[np.int8]
    kept_sizes: Int64s  # [documents]: number of bytes in `kept_bytes`; 0 without rewards
    kept_bytes: NDArray[np.uint8]  # the rows of prompts as rewards read them, one after another
    image_counts: Int32s  # [documents]: number of images
    image_sizes: Int64s  # [images]: number of bytes in `image_bytes`
    image_bytes: NDArray[np.uint8]  # `EncodedImage.stored()` of each image, one after another
    image_hashes: NDArray[np.uint64]  # [images]: xxh3 of the encoded image


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The documents of one source. Returned by `open_store`."""

    input_ids: Int32s  # [tokens], memory-mapped
    labels: Int32s  # [tokens], memory-mapped
    starts: Int64s  # [documents + 1]: where each document begins, and the number of tokens
    trained: Int32s  # [documents]: number of tokens with a label
    files: Int32s  # [documents]: index into `facts["files"]`
    rows: Int64s  # [documents], as in `Tokens`
    hashes: NDArray[np.uint64]  # [documents], as in `Tokens`
    ratings: NDArray[np.int8]  # [documents], as in `Tokens`
    facts: dict[str, Any]  # `SourceStats.as_json()`
    # [documents + 1]: where each document's row begins in `kept_bytes`
    kept_starts: Int64s
    kept_bytes: NDArray[np.uint8]  # memory-mapped
    # [documents + 1]: the number of each document's first image; None if the store has no images
    first_images: Int64s | None
    image_starts: Int64s  # [images + 1]: where each image begins in `image_bytes`
    image_bytes: NDArray[np.uint8]  # memory-mapped
    image_hashes: NDArray[np.uint64]  # [images], as in `Tokens`

    def read_row(self, document: int) -> Any:
        """Reads the row of a prompt for the rewards, as data/preferences.py wrote it."""
        kept = slice(self.kept_starts[document], self.kept_starts[document + 1])
        return json.loads(self.kept_bytes[kept].tobytes())

    def count_images(self, document: int) -> int:
        """Counts a document's images."""
        return len(self._find_image_numbers(document))

    def _find_image_numbers(self, document: int) -> range:
        """Returns the numbers of a document's images among all images of the store."""
        if self.first_images is None:
            return range(0)
        return range(int(self.first_images[document]), int(self.first_images[document + 1]))

    def read_images(self, document: int) -> list[EncodedImage]:
        """Reads a document's images. Raises `DamagedStore` if a file is missing or has changed."""
        return [self._read_image(number, document) for number in self._find_image_numbers(document)]

    def _read_image(self, number: int, document: int) -> EncodedImage:
        """Reads image `number` of the store, which belongs to `document`.

        Raises `DamagedStore` if the image cannot be read or has changed.
        """
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
        """Raises `DamagedStore` if an image that is stored as a path is missing or has changed."""
        if self.first_images is None:
            return
        document_of_image = np.repeat(
            np.arange(len(self.first_images) - 1), np.diff(self.first_images)
        )
        # The first byte of a stored image says whether it is the path of a file.
        is_in_file = self.image_bytes[self.image_starts[:-1]] == IN_FILE[0]
        for number in np.flatnonzero(is_in_file).tolist():
            self._read_image(number, int(document_of_image[number]))

    @property
    def group_size(self) -> int:
        """The number of consecutive documents in a group: 2 for chosen and rejected."""
        return int(self.facts["group_size"])

    @property
    def is_rated(self) -> bool:
        """Whether the first document of each group is a rated answer."""
        return bool(self.facts["is_rated"])

    @property
    def is_asked(self) -> bool:
        """Whether the documents are prompts, of which no token is trained on."""
        return bool(self.facts["is_asked"])

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """bool[documents]: whether the document's file holds nothing but plain text."""
        return ~np.isin(self.files, self.facts["structured_files"])

    def where(self, document: int) -> str:
        """Names a document's place: the file, with the line or the number of the row."""
        return name_place(self.facts["files"][self.files[document]], int(self.rows[document]))


# field of `Tokens` -> dtype in the store's file
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
    """Makes a store of a few documents in memory. `facts` is called after the last batch."""
    tokens = list(batches)
    columns = {name: np.concatenate([getattr(batch, name) for batch in tokens]) for name in COLUMNS}
    return _make_store(columns, facts())


def _make_store(columns: dict[str, Any], facts: dict[str, Any]) -> TokenStore:
    """Makes a store of the columns that `write_store` writes.

    Lengths and counts become the positions where each document, kept row and image begins. Removes
    these columns from `columns`.
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
    """Returns where each of consecutive parts begins, and where the last part ends: [sizes + 1]."""
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def write_store(
    folder: Path, batches: Iterable[Tokens], facts: Callable[[], dict[str, Any]]
) -> None:
    """Writes a store into an existing, empty folder.

    facts.json lists the size and checksum of every column. The file's first line is a checksum of
    the rest. When this returns, the files' contents are on disk; their names are on disk once the
    folder is synced.

    Args:
        folder: The folder.
        batches: The documents.
        facts: Returns the store's facts, to be saved as JSON. Called after the last batch, since
            the batches may be made while they are read.
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
    write_file(folder / FACTS, [seal({"columns": columns, "facts": facts()})])


def seal(value: Any) -> bytes:
    """Writes a value as JSON, behind a line with the checksum of the JSON."""
    text = json.dumps(value, indent=1).encode()
    return f"{xxhash.xxh3_128_hexdigest(text)}\n".encode() + text


def unseal(content: bytes) -> Any:
    """Reads what `seal` has written. Raises `ValueError` if the checksum is another."""
    digest, _, text = content.partition(b"\n")
    if digest != xxhash.xxh3_128_hexdigest(text).encode():
        raise ValueError("damaged")
    return json.loads(text)


def open_store(folder: Path) -> TokenStore:
    """Opens a store that `write_store` wrote.

    Every file is read and compared with its checksum, images that are stored as paths included.
    Raises `DamagedStore` if a file is missing or differs.
    """
    try:
        stored = unseal((folder / FACTS).read_bytes())
        columns = {
            name: _open_column(folder / f"{name}.bin", kind, stored["columns"][name])
            for name, kind in COLUMNS.items()
        }
    except OSError as error:
        raise DamagedStore(
            f"{error.filename or folder}: cannot be read: {error.strerror}"
        ) from None
    except ValueError:
        raise DamagedStore(f"{folder / FACTS}: damaged") from None
    store = _make_store(columns, stored["facts"])
    store.check_images()
    return store


def _open_column(path: Path, kind: type, written: dict[str, Any]) -> NDArray[Any]:
    """Checks a column's file, and maps it into memory; an empty file becomes an empty array.

    Raises `DamagedStore` if the file's size or checksum is not that in `written`.
    """
    # Read, not mapped, so that the pages do not count as this process's memory.
    read = checksum(path)
    size = written["bytes"]
    if read != {"size": size, CHECKSUM: written["xxh3"]}:
        raise DamagedStore(
            f"{path}: damaged: it is not what was written ({read['size']:,} of {size:,} bytes)"
        )
    if size:
        return np.memmap(path, dtype=kind, mode="r")
    return np.zeros(0, kind)


# The version of how rows become tokens, and of a store's files. It is raised when the same rows
# give other tokens or files, so that stores of earlier versions are not found.
VERSION = 28
POLL_SECONDS = 0.1  # between two looks for a store that another process writes
DAMAGE_SECONDS = 60.0  # after which a damaged store is no longer expected to be replaced


def cache_folder(data: Data) -> Path:
    """Returns the folder that holds the token stores: dataset_cache_dir, or the user's cache."""
    if data.dataset_cache_dir is not None:
        return Path(data.dataset_cache_dir)
    return find_cache("tokens")


def cache_key(
    source: DatasetSource,
    content: dict[str, str],
    data: Data,
    tokenizer: Any,
    seed: int = 0,
    kind: RowKind = "answers",
) -> str:
    """Returns a key for a source's tokens, a hash of everything that they depend on.

    That is the rows, the tokenizer, the template and the options; and the seed, if it draws rows.

    `content`: a hash of each file, from `sources.hash_content`.
    """
    source_keys = {
        key: value for key, value in asdict(source).items() if key not in ("weight", "max_samples")
    }
    if source.max_samples is not None:
        source_keys |= {"max_samples": source.max_samples, "seed": seed}
    return hash_inputs(data, tokenizer, kind, source_keys, list(content.items()))


def hash_inputs(data: Data, tokenizer: Any, kind: RowKind, *descriptions: Any) -> str:
    """Hashes everything that the tokens of some rows depend on: 32 hexadecimal digits.

    Args:
        data: The recipe's data section, with the options.
        tokenizer: The tokenizer, with chat template, tools, environments and images.
        kind: What the rows are read as.
        descriptions: What identifies the rows, as values that JSON or `str` can write.
    """
    options: dict[str, Any] = {
        "assistant_only_loss": data.assistant_only_loss,
        "on_bad_row": data.on_bad_row,
        "turns": data.turns,
        "train_on_reasoning": data.train_on_reasoning,
        # The stored findings depend on these two.
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
    inputs = [VERSION, options, template, tokenizer.special_tokens_map, descriptions]
    digest = blake2b(json.dumps(inputs, sort_keys=True, default=str).encode(), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    if (images := getattr(tokenizer, "images", None)) is not None:
        # transformers counts the tokens of an image, beside the files of the processor
        library = version("transformers") if images.model_takes_images else ""
        facts = [images.model_takes_images, images.describe(), library]
        digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


def open_or_write_store(
    folder: Path, local_rank: int, write: Callable[[Path], None], canceled: Event | None = None
) -> TokenStore:
    """Opens the store in `folder`; if it is missing or damaged, local rank 0 writes it first.

    The other ranks wait for the folder to appear, without a collective: writing can take longer
    than the timeout of a process group.

    Args:
        folder: The store's folder.
        local_rank: This process's rank on its node.
        write: Writes a store into an empty folder.
        canceled: Ends the wait with a `UserError` once it is set.

    Raises:
        UserError: On every rank, if the store cannot be written.
    """
    if local_rank == 0:
        if folder.exists():
            try:
                return open_store(folder)
            except DamagedStore as damage:
                print(f"{damage}; the rows are tokenized again", file=sys.stderr, flush=True)
                _remove_damaged(folder)
        publish_store(folder, write)
        return open_store(folder)
    return _open_when_written(folder, canceled)


def _open_when_written(folder: Path, canceled: Event | None) -> TokenStore:
    """Opens the store in `folder` once local rank 0 has written it.

    A damaged store is tried again: local rank 0 finds the same damage and replaces the store.

    Raises:
        DamagedStore: The same folder was still damaged DAMAGE_SECONDS later. Only this rank finds
            the damage, as in an image that has changed meanwhile.
        UserError: As in `wait_for_store`.
    """
    damaged_folder = None  # the time of its last change, by which a replaced one is recognized
    damaged_since = 0.0
    while True:
        wait_for_store(folder, canceled)
        tried_folder = _find_time(folder)
        try:
            return open_store(folder)
        except DamagedStore:
            if tried_folder != damaged_folder:
                damaged_folder = tried_folder
                damaged_since = time.monotonic()
            elif time.monotonic() - damaged_since > DAMAGE_SECONDS:
                raise
            time.sleep(POLL_SECONDS)


def _find_time(folder: Path) -> int | None:
    """Returns when the folder's list of files last changed, in ns; None if there is no folder."""
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime_ns
    return None


def publish_store(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a store with `write`; it appears as `folder` once all of it is on disk.

    Raises `UserError` if that fails. A note of the failure is left beside the folder, so that the
    ranks in `wait_for_store` raise it too.
    """
    failure = _name_failure_file(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        failure.unlink(missing_ok=True)
        _remove_leftovers(folder.parent)
        with stage_and_rename(folder, _name_staging_folder(folder)) as staging:
            write(staging)
    except (OSError, UserError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = (
                f"{folder.parent}: cannot write the tokens: {error.strerror or error}; set "
                "dataset_cache_dir"
            )
        # If not even the note can be written, the launcher ends the ranks that wait.
        with suppress(OSError):
            replace_file(failure, problem)
        raise UserError(problem) from None


def wait_for_store(folder: Path, canceled: Event | None) -> None:
    """Waits until local rank 0 of this node has published the folder.

    Raises `UserError` if local rank 0 has left a note of its failure, or once `canceled` is set.
    """
    while not folder.exists():
        raise_failure(folder)
        if canceled is not None and canceled.is_set():
            raise UserError(f"{folder}: the wait for it was canceled")
        time.sleep(POLL_SECONDS)


def raise_failure(folder: Path) -> None:
    """Raises `UserError` if local rank 0 has left a note that it could not write the folder."""
    failure = _name_failure_file(folder)
    # An older note is of an earlier run.
    started = psutil.Process().create_time()
    if failure.exists() and failure.stat().st_mtime >= started:
        raise UserError(failure.read_text())


def _remove_damaged(folder: Path) -> None:
    """Removes a damaged store.

    A process that has the files mapped into memory can still read them.
    """
    damaged = _name_staging_folder(folder)
    try:
        folder.rename(damaged)
    except FileNotFoundError:  # another node has removed it from a shared file system
        return
    except OSError as error:
        raise UserError(
            f"{folder}: damaged, and cannot be removed: {error.strerror or error}"
        ) from None
    remove_tree(damaged, ignore_errors=True)


def _name_staging_folder(folder: Path) -> Path:
    """Names the folder in which this process writes or removes a store.

    If the process is killed, `_remove_leftovers` finds the folder by the host and process in its
    name.
    """
    return folder.parent / f"making-{socket.gethostname()}-{os.getpid()}-{folder.name}"


def _name_failure_file(folder: Path) -> Path:
    """Names the note that says why the store `folder` could not be written."""
    return folder.parent / f"failed-{folder.name}.txt"


def _remove_leftovers(folder: Path) -> None:
    """Removes the staging folders in `folder` that killed processes of this machine have left."""
    prefix = f"making-{socket.gethostname()}-"
    for staging in folder.glob(f"{prefix}*"):
        pid, _, _ = staging.name.removeprefix(prefix).partition("-")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            remove_tree(staging, ignore_errors=True)
