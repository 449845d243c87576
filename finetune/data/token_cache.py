"""Tokenized sources on disk: written once on each node, published by one rename, read memory-mapped by every rank.

No collective takes part: ranks that wait look at the file system, so that no timeout of a process group can end them.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from threading import Event
from typing import Any

import psutil

from finetune.config.methods import RowKind
from finetune.config.schema import Data, DatasetSource
from finetune.data.sources import draw_rows, hash_content
from finetune.data.token_store import DamagedStore, Tokens, TokenStore, open_store, write_store
from finetune.data.tokenize import SourceStats, tokenize_rows
from finetune.data.tokenizer import PLAIN, asks_for_date
from finetune.errors import UserError
from finetune.files.durable import remove_tree, replace_file, stage_and_rename
from finetune.files.hub import find_cache

VERSION = 17  # of how rows become tokens, and of a store's files; raised when the same rows would give others
POLL_SECONDS = 0.1


def open_cached_store(
    source: DatasetSource, data: Data, tokenizer: Any, local_rank: int, seed: int = 0, kind: RowKind = "answers"
) -> TokenStore:
    """The source as tokens, from the cache. If missing or damaged, local rank 0 writes it and the others wait.

    Raises `UserError` on every rank where the data cannot be read.
    """
    content = hash_content(source)
    folder = cache_folder(data) / cache_key(source, content, data, tokenizer, seed, kind)
    return open_or_write_store(
        folder, local_rank, lambda stats: _tokenize_source(source, content, data, tokenizer, stats, seed, kind)
    )


def open_or_write_store(
    folder: Path, local_rank: int, tokens: Callable[[SourceStats], Iterator[Tokens]], canceled: Event | None = None
) -> TokenStore:
    """The store in `folder`. If missing or damaged, local rank 0 writes it and others wait, unless `canceled`.

    Raises `UserError` on every rank where it cannot be written.
    """
    if local_rank == 0:
        if folder.exists():
            try:
                return open_store(folder)
            except DamagedStore as damage:
                print(f"{damage}; the rows are tokenized again", file=sys.stderr, flush=True)
                _discard(folder)
        publish_store(folder, tokens)
        return open_store(folder)
    while True:
        wait_for_store(folder, canceled)
        try:
            return open_store(folder)
        except DamagedStore:  # local rank 0 finds the same and replaces it
            time.sleep(POLL_SECONDS)


def cache_folder(data: Data) -> Path:
    """The folder of tokenized sources."""
    if data.dataset_cache_dir is not None:
        return Path(data.dataset_cache_dir).expanduser()
    return find_cache("tokens")


def cache_key(
    source: DatasetSource, content: dict[str, str], data: Data, tokenizer: Any, seed: int = 0, kind: RowKind = "answers"
) -> str:
    """A name for everything that makes the tokens: rows, tokenizer, template, options, and the seed that draws."""
    described = {key: value for key, value in asdict(source).items() if key not in ("weight", "max_samples")}
    if source.max_samples is not None:
        described |= {"max_samples": source.max_samples, "seed": seed}
    return hash_inputs(data, tokenizer, kind, described, list(content.items()))


def hash_inputs(data: Data, tokenizer: Any, kind: RowKind, *rows: Any) -> str:
    """A name for the tokens of what is read of `rows` (whatever describes them) under the tokenizer and the options."""
    options: dict[str, Any] = {"assistant_only_loss": data.assistant_only_loss, "on_bad_row": data.on_bad_row}
    options |= {"turns": data.turns, "train_on_reasoning": data.train_on_reasoning}
    options["response_template"] = getattr(tokenizer, "response_template", None)  # findings are stored too
    if data.chat_template_date is not None and asks_for_date(tokenizer):
        options["date"] = data.chat_template_date
    template = tokenizer.chat_template or PLAIN
    options |= {} if kind == "answers" else {"kind": kind}
    described = [VERSION, options, template, tokenizer.special_tokens_map, rows]
    digest = blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    if (images := getattr(tokenizer, "images", None)) is not None:
        digest.update(json.dumps(images.describe(), sort_keys=True).encode())
    return digest.hexdigest()


def _tokenize_source(
    source: DatasetSource,
    content: dict[str, str],
    data: Data,
    tokenizer: Any,
    stats: SourceStats,
    seed: int,
    kind: RowKind,
) -> Iterator[Tokens]:
    """One source's rows as tokens."""
    stats.content = list(content.values())
    batches, stats.rows_in_source = draw_rows(source, seed)
    yield from tokenize_rows(((source, batch) for batch in batches), data, tokenizer, stats, kind)
    if stats.rows_read == 0:
        raise UserError(f"{source.origin}: it has no rows")
    if stats.rows_read == stats.rows_skipped:
        raise UserError(f"{source.origin}: every row was skipped; the first: {stats.skipped[0]}")


def publish_store(folder: Path, tokens: Callable[[SourceStats], Iterator[Tokens]]) -> None:
    """Writes a store, which appears as `folder` once all of it is on disk.

    What fails is a `UserError` here and, through a note beside the folder, on the ranks that wait for it.
    """
    failure = _failure_file(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        failure.unlink(missing_ok=True)
        _sweep(folder.parent)
        with stage_and_rename(folder, _staging_folder(folder)) as staging:
            stats = SourceStats()
            write_store(staging, tokens(stats), stats.as_json)
    except (OSError, UserError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"{folder.parent}: cannot write the tokens: {error.strerror or error}; set dataset_cache_dir"
        with suppress(OSError):  # where not even this can be written, the launcher ends the ranks that wait
            replace_file(failure, problem)
        raise UserError(problem) from None


def wait_for_store(folder: Path, canceled: Event | None = None) -> None:
    """Waits until local rank 0 of this node has written the folder or noted its failure, or `canceled` is set."""
    failure, started = _failure_file(folder), psutil.Process().create_time()
    while not folder.exists():
        if failure.exists() and failure.stat().st_mtime >= started:
            raise UserError(failure.read_text())
        if canceled is not None and canceled.is_set():
            raise UserError(f"{folder}: the wait for it was canceled")
        time.sleep(POLL_SECONDS)


def _discard(folder: Path) -> None:
    """Removes a damaged store. A process that still reads it keeps its files, being memory-mapped."""
    damaged = _staging_folder(folder)
    try:
        folder.rename(damaged)
    except FileNotFoundError:  # another node has discarded it, on a file system that both see
        return
    except OSError as error:
        raise UserError(f"{folder}: damaged, and cannot be removed: {error.strerror or error}") from None
    remove_tree(damaged, ignore_errors=True)


def _staging_folder(folder: Path) -> Path:
    """This process's own name for a store that is not published; `_sweep` removes what a killed process leaves."""
    return folder.parent / f"making-{socket.gethostname()}-{os.getpid()}-{folder.name}"


def _failure_file(folder: Path) -> Path:
    return folder.parent / f"failed-{folder.name}.txt"


def _sweep(folder: Path) -> None:
    """Removes what killed processes of this machine have left half-written."""
    for left in folder.glob(f"making-{socket.gethostname()}-*"):
        process = left.name.removeprefix(f"making-{socket.gethostname()}-").partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            remove_tree(left, ignore_errors=True)
