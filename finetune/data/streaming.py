"""Data that is read while training: tokenized block by block, each block shuffled and packed for itself.

A block is a pure function of the recipe, so the state of the loader is the step here too. A short note of every block
stays on disk; with it, a resumed run goes straight to its block, and without it the blocks before are made again.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import xxhash

from finetune.data.batches import Batches, MicroBatch, Ranks, StepBatch, batches_of
from finetune.data.checks import fatal
from finetune.data.examples import Examples
from finetune.data.mixture import SourceReport, examples_of
from finetune.data.readers import readable
from finetune.data.sampler import Arrangement, generator
from finetune.data.sources import RowBatch, files_of, local_splits, read_rows
from finetune.data.token_cache import cache_folder, find_store, hashed
from finetune.data.token_store import Tokens, TokenStore
from finetune.data.tokenize import Facts, read_facts, tokenized
from finetune.durable import replace_file
from finetune.errors import UserError
from finetune.recipe.schema import Data, DatasetSource

BLOCK_ROWS = 8192  # rows that are shuffled together
RUN_ROWS = 64  # rows read from one source before the next is drawn
PIECE_BYTES = 64 * 1024  # of a file, read for a stream's fingerprint
FINGERPRINT_BYTES = 256 * 1024 * 1024  # read for it of one source at most, two pieces of each file at least


@dataclass(frozen=True, slots=True)
class Note:
    """What must be known of a block to go past it."""

    runs: int  # read before the block, over all sources
    steps: int  # in the block
    examples: int
    epoch: int  # how often every source had been read to its end before the block


@dataclass(frozen=True, slots=True)
class StreamedBatches:
    """The batches of a run over data without a known end, for one rank. Looks like `Batches` to the loop."""

    sources: tuple[DatasetSource, ...]
    data: Data
    tokenizer: Any
    arrangement: Arrangement
    per_device_batch_size: int
    steps: int
    ranks: Ranks
    folder: Path

    @property
    def steps_per_epoch(self) -> None:
        """Not known of a stream."""

    def batches(
        self, start_step: int = 0, on_block: Callable[[SourceReport], None] | None = None
    ) -> Iterator[StepBatch]:
        """The step batches from `start_step` to the end; the next block is made while one is trained on.

        `on_block` is called before the first batch of each block, with what became of its rows.
        """
        block, step, examples = self._find(start_step)
        leaving = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            coming = pool.submit(self.block, block, leaving)
            try:
                while step < self.steps:
                    current, note, report = coming.result()
                    if on_block is not None:
                        on_block(report)
                    if step + note.steps < self.steps:
                        coming = pool.submit(self.block, block + 1, leaving)
                    for batch in islice(current.batches(max(start_step - step, 0)), self.steps - max(step, start_step)):
                        yield _numbered(batch, step, examples, note)
                    step, examples, block = step + note.steps, examples + note.examples, block + 1
                    self._forget(block - 2)
            finally:
                leaving.set()
                coming.cancel()
                pool.shutdown()
                self.clear()

    def block(self, number: int, leaving: Event | None = None) -> tuple[Batches, Note, SourceReport]:
        """A block's batches, numbered from 0, and what became of its rows. Local rank 0 makes its tokens; the others wait, unless `leaving` is set.

        Raises `UserError` for rows that cannot be read and for fatal findings.
        """
        store = self.store(number, leaving)
        facts = read_facts(store.facts)
        examples, report = examples_of(store, self.sources[0], self.data)
        stop = fatal(report.findings)
        if stop:
            raise UserError.of(map(str, stop))
        if not len(examples):
            raise UserError(f"{self.sources[0].path}: no row of a block of {BLOCK_ROWS} holds a token to train on")
        batches = self._batches_of(examples, number)
        note = Note(facts.stream["runs"], batches.steps, len(examples), facts.stream["epoch"])
        if self.ranks.local_rank == 0:
            text = json.dumps(asdict(note))
            replace_file(self._note_file(number), f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}\n")
        return batches, note, report

    def store(self, number: int, leaving: Event | None = None) -> TokenStore:
        """The tokens of a block."""
        folder = self.folder / f"block-{number:06}"
        return find_store(folder, self.ranks.local_rank, lambda facts: self._tokens(number, facts), leaving)

    def clear(self) -> None:
        """Removes this launch's blocks; their notes stay."""
        if self.ranks.local_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _batches_of(self, examples: Examples, number: int) -> Batches:
        # The number of the block in place of the epoch: each block is shuffled in its own way.
        arrangement = replace(
            self.arrangement, seed=int(generator(self.arrangement.seed, "block", number).integers(2**62))
        )
        return batches_of(
            examples,
            arrangement,
            self.ranks,
            per_device_batch_size=self.per_device_batch_size,
            threads=self.data.dataloader_num_workers,
            pad_token_id=self.tokenizer.pad_token_id or 0,
        )

    def _tokens(self, number: int, facts: Facts) -> Iterator[Tokens]:
        runs = 0 if number == 0 else self._runs_through(number - 1)
        passes: list[int] = []  # at each run of the block

        def of_block() -> Iterator[tuple[DatasetSource, RowBatch]]:
            rows = 0
            for source, batch, passed in mixed_stream(self.sources, self.arrangement.seed, runs):
                passes.append(passed)
                rows += len(batch.rows)
                yield source, batch
                if rows >= BLOCK_ROWS:
                    return

        yield from tokenized(of_block(), self.data, self.tokenizer, facts)
        facts.stream = {"runs": runs + len(passes), "epoch": passes[-1]}

    def _runs_through(self, number: int) -> int:
        """Runs read up to the end of block `number`."""
        return self._note(number).runs

    def _find(self, step: int) -> tuple[int, int, int]:
        """(the block that step `step` is in, its first step, examples before it)."""
        block = first = examples = 0
        while True:
            note = self._note(block)
            if step < first + note.steps:
                return block, first, examples
            block, first, examples = block + 1, first + note.steps, examples + note.examples

    def _note(self, number: int) -> Note:
        """The note of a block. Where there is none, or it is not what was written, the block is made again."""
        try:
            checksum, _, text = self._note_file(number).read_text(encoding="utf-8").partition("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return self.block(number)[1]
        if checksum != xxhash.xxh3_128_hexdigest(text.removesuffix("\n").encode()):
            return self.block(number)[1]
        return Note(**json.loads(text))

    def _note_file(self, number: int) -> Path:
        return self.folder.parent / f"block-{number:06}.json"

    def _forget(self, number: int) -> None:
        """Removes a block that every rank has opened. A rank that still reads it keeps it, being memory-mapped."""
        if number >= 0 and self.ranks.local_rank == 0:
            shutil.rmtree(self.folder / f"block-{number:06}", ignore_errors=True)


def streamed(
    sources: tuple[DatasetSource, ...],
    data: Data,
    tokenizer: Any,
    arrangement: Arrangement,
    ranks: Ranks,
    *,
    per_device_batch_size: int,
    steps: int,
) -> StreamedBatches:
    """The batches of a stream of `sources`."""
    content = [_described(source) for source in sources]
    key = hashed(data, tokenizer, content, asdict(arrangement), data.overlength)
    # Blocks are this launch's alone (its ranks have one parent); the notes beside them are everybody's.
    launch = f"run-{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}"
    folder = cache_folder(data) / f"stream-{key}" / launch
    folder.mkdir(parents=True, exist_ok=True)
    return StreamedBatches(sources, data, tokenizer, arrangement, per_device_batch_size, steps, ranks, folder)


def mixed_stream(
    sources: tuple[DatasetSource, ...], seed: int, skip: int = 0
) -> Iterator[tuple[DatasetSource, RowBatch, int]]:
    """(source, some of its rows, how often every source has been read to its end), for ever.

    Which source comes next is drawn by weight; one that ends begins again. The first `skip` draws are passed over.
    """
    random = generator(seed, "interleave")
    weights = [source.weight / sum(source.weight for source in sources) for source in sources]
    passes = [0] * len(sources)
    readers = [read_rows(source, streaming=True, batch_rows=RUN_ROWS) for source in sources]
    drawn = 0
    while True:
        i = int(random.choice(len(sources), p=weights))
        batch = next(readers[i], None)
        if batch is None:
            passes[i] += 1
            readers[i] = read_rows(sources[i], streaming=True, batch_rows=RUN_ROWS)
            batch = next(readers[i], None)
            if batch is None:
                raise UserError(f"{sources[i].path}: there is no row in it")
        drawn += 1
        if drawn > skip:
            yield sources[i], batch, min(passes)


def _described(source: DatasetSource) -> Any:
    """A source and, where it is local, its files with size and time: their content would take too long to hash."""
    splits = local_splits(source.path) or {}
    files = [(file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for f in splits.values() for file in f]
    return asdict(source), files


def stream_fingerprint(sources: tuple[DatasetSource, ...]) -> str | None:
    """A hash of what the sources' files hold: all of it up to FINGERPRINT_BYTES, else pieces that are spread evenly over it.

    None where a source is of the hub. Names and times do not count: a copy on another disk is the same stream.
    """
    content = []
    for source in sources:
        paths = files_of(source)
        if not paths:
            return None
        pieces = max(2, FINGERPRINT_BYTES // PIECE_BYTES // len(paths))
        with ThreadPoolExecutor(8) as pool:
            content.append(list(pool.map(lambda path, most=pieces: _sampled(path, most), paths)))
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def _sampled(path: str, most_pieces: int) -> tuple[int, str]:
    """A file's size and a hash of at most `most_pieces` of it, the first and the last among them."""
    digest = xxhash.xxh3_128()
    with readable(path), Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, -(-size // PIECE_BYTES) - 1)  # number of the last piece
        count = min(last + 1, most_pieces)
        for index in range(count):
            file.seek(index * last // max(1, count - 1) * PIECE_BYTES)
            digest.update(file.read(PIECE_BYTES))
    return size, digest.hexdigest()


def _numbered(batch: StepBatch, first_step: int, first_example: int, note: Note) -> StepBatch:
    """A block's batch under the run's own numbers."""

    def shifted(micro_batch: MicroBatch) -> MicroBatch:
        return replace(micro_batch, example_ids=tuple(first_example + i for i in micro_batch.example_ids))

    return replace(
        batch,
        step=first_step + batch.step,
        epoch=float(note.epoch),
        micro_batches=tuple(map(shifted, batch.micro_batches)),
    )
