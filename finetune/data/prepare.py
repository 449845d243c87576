"""From a recipe to batches: sources, their documents as tokens, examples cut from these, and
batches of examples.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from threading import Event
from typing import Any

import xxhash

from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.methods import RowKind
from finetune.config.schema import Data, DatasetSource, Recipe, compute_global_batch_size
from finetune.config.user_code import plain_row
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.data_report import (
    DataReport,
    OnReport,
    Report,
    SourceReport,
    StreamReport,
    find_held_out_in_training,
    find_same_ratings,
    make_report,
    select_examples,
)
from finetune.data.environments import has_tools
from finetune.data.examples import (
    Examples,
    Prompt,
    cut_prompts,
    hold_out,
    make_generator,
    mix_sources,
)
from finetune.data.findings import Finding, refuse_fatal
from finetune.data.given_columns import attach_columns, read_columns
from finetune.data.packing import BatchConfig, StoredBatches, make_batches
from finetune.data.source_tokens import SourceStats, tokenize_rows
from finetune.data.sources import (
    RowBatch,
    describe_source,
    draw_rows,
    fingerprint_samples,
    hash_content,
    interleave_sources,
)
from finetune.data.token_store import (
    Tokens,
    TokenStore,
    cache_folder,
    cache_key,
    hash_inputs,
    keep_in_memory,
    open_or_write_store,
    write_store,
)
from finetune.data.tokenizer import PLAIN
from finetune.data.tool_calls import count_tool_tokens, make_tool_turns
from finetune.distributed.world import DataParallelRank
from finetune.errors import UserError
from finetune.files.durable import remove_tree, replace_file
from finetune.units import counted

BLOCK_ROWS = 8192  # rows that are shuffled together


@dataclass(frozen=True, slots=True)
class Note:
    """The facts of a block that are needed to skip it."""

    runs: int  # read before the block, over all sources
    steps: int  # in the block
    examples: int
    epoch: int  # full passes over every source before the block


@dataclass(frozen=True, slots=True)
class StreamedBatches:
    """The batches of a run over data without a known end, for one rank."""

    recipe: Recipe
    tokenizer: Any
    config: BatchConfig
    per_device_batch_size: int
    steps: int
    world: DataParallelRank
    report: StreamReport  # before anything is read
    folder: Path  # of this launch's blocks
    kind: RowKind = "answers"  # what is read of the rows

    @property
    def data(self) -> Data:
        return self.recipe.data

    @property
    def steps_per_epoch(self) -> None:
        """Returns None: the epochs of a stream have no known length."""

    @property
    def fingerprint(self) -> str | None:
        """A hash of samples of the files; None for a stream of the hub."""
        return fingerprint_samples(self.data.datasets)

    def batches(self, from_step: int = 0, on_report: OnReport | None = None) -> Iterator[StepBatch]:
        """Yields the step batches from `from_step` to the end.

        The next block is made while one is trained on. `on_report` is called before the first batch
        of each block.
        """
        # local rank 0 would remove a block that the others still look for
        if from_step >= self.steps:
            return
        report = StreamReport(
            self.report.max_length, self.report.eval_sources, self.report.first_rows, from_step
        )
        block, step, examples = self._find_block(from_step)
        canceled = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            next_block = pool.submit(self.open_block, block, canceled)
            try:
                while step < self.steps:
                    current, note, rows = next_block.result()
                    news = report.add(rows)
                    if on_report is not None:
                        on_report(report, news)
                    if step + note.steps < self.steps:
                        next_block = pool.submit(self.open_block, block + 1, canceled)
                    for batch in islice(
                        current.batches(max(from_step - step, 0)), self.steps - max(step, from_step)
                    ):
                        yield _renumber(batch, step, examples, note)
                    step = step + note.steps
                    examples = examples + note.examples
                    block = block + 1
                    self._remove_block(block - 2)
            finally:
                canceled.set()
                next_block.cancel()
                pool.shutdown()
                self.remove_blocks()

    def open_block(
        self, number: int, canceled: Event | None = None
    ) -> tuple[StoredBatches, Note, SourceReport]:
        """Opens a block: its batches, numbered from 0; its note; and the report of its rows.

        Local rank 0 writes its tokens; the others wait, unless `canceled` is set.

        Raises `UserError` for rows that cannot be read and for fatal findings.
        """
        store = self.open_block_store(number, canceled)
        stats = SourceStats.from_json(store.facts)
        examples, report = select_examples(store, self.data.datasets[0], self.data)
        refuse_fatal(report.findings)
        if not len(examples):
            raise UserError(
                f"{self.data.datasets[0].origin}: no row of a block of {BLOCK_ROWS} holds a token "
                "to train on"
            )
        batches = self._make_batches(examples, number)
        if batches.images is not None:
            refuse_problems(find_problems(self.recipe, images=batches.images.family))
        note = Note(stats.stream["runs"], batches.steps, len(examples), stats.stream["epoch"])
        if self.world.local_rank == 0:
            text = json.dumps(asdict(note))
            replace_file(
                self._note_file(number), f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}\n"
            )
        return batches, note, report

    def open_block_store(self, number: int, canceled: Event | None = None) -> TokenStore:
        """Opens the tokens of a block; local rank 0 writes them where they are missing."""
        folder = self.folder / f"block-{number:06}"

        def write(staging: Path) -> None:
            stats = SourceStats()
            write_store(staging, self._tokenize_block(number, stats), stats.as_json)

        return open_or_write_store(folder, self.world.local_rank, write, canceled)

    def remove_blocks(self) -> None:
        """Removes this launch's blocks; their notes stay."""
        if self.world.local_rank == 0:
            remove_tree(self.folder, ignore_errors=True)

    def _make_batches(self, examples: Examples, number: int) -> StoredBatches:
        # The number of the block in place of the epoch: each block has its own order.
        seed = int(make_generator(self.config.seed, "block", number).integers(2**62))
        return make_batches(
            examples,
            replace(self.config, seed=seed),
            self.world,
            self.per_device_batch_size,
            self.tokenizer,
            self.data.dataloader_num_workers,
        )

    def _tokenize_block(self, number: int, stats: SourceStats) -> Iterator[Tokens]:
        runs = 0 if number == 0 else self._read_note(number - 1).runs
        passes: list[int] = []  # at each run of the block

        def read_block() -> Iterator[tuple[DatasetSource, RowBatch]]:
            rows = 0
            for source, batch, passed in interleave_sources(self.data.datasets, runs):
                passes.append(passed)
                rows += len(batch.rows)
                yield source, batch
                if rows >= BLOCK_ROWS:
                    return

        yield from tokenize_rows(read_block(), self.data, self.tokenizer, stats, self.kind)
        stats.stream = {"runs": runs + len(passes), "epoch": passes[-1]}

    def _find_block(self, step: int) -> tuple[int, int, int]:
        """Returns (the block that step `step` is in, its first step, the examples before it)."""
        block = first = examples = 0
        while True:
            note = self._read_note(block)
            if step < first + note.steps:
                return block, first, examples
            block = block + 1
            first = first + note.steps
            examples = examples + note.examples

    def _read_note(self, number: int) -> Note:
        """The note of a block. Where there is none, or it is damaged, the block is rebuilt."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            checksum, _, text = self._note_file(number).read_text(encoding="utf-8").partition("\n")
            if checksum == xxhash.xxh3_128_hexdigest(text.removesuffix("\n").encode()):
                return Note(**json.loads(text))
        return self.open_block(number)[1]

    def _note_file(self, number: int) -> Path:
        return self.folder.parent / f"block-{number:06}.json"

    def _remove_block(self, number: int) -> None:
        """Removes a block that every rank has opened.

        A rank that still reads it keeps it: it is memory-mapped.
        """
        if number >= 0 and self.world.local_rank == 0:
            remove_tree(self.folder / f"block-{number:06}", ignore_errors=True)


def open_stream(
    recipe: Recipe,
    tokenizer: Any,
    world: DataParallelRank,
    eval_sources: tuple[SourceReport, ...] = (),
) -> StreamedBatches:
    """The batches of a run over a stream. `eval_sources`: the report of what is held out beside it.

    A tokenizer without a chat template gets the plain one: whether the stream needs it is not known
    before it is read.
    """
    data = recipe.data
    steps = recipe.optimization.max_steps
    assert steps is not None and data.eval_split_size is None, "refused with the recipe"
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN
    config = BatchConfig.from_recipe(recipe, compute_global_batch_size(recipe.batch, world.size))
    content = [describe_source(source) for source in data.datasets]
    kind = recipe.method_facts.rows
    key = hash_inputs(data, tokenizer, kind, content, asdict(config), data.overlength)
    # Blocks are this launch's alone (its ranks have one parent); the notes beside them are
    # everybody's.
    launch = f"run-{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}"
    folder = cache_folder(data) / f"stream-{key}" / launch
    folder.mkdir(parents=True, exist_ok=True)
    first_rows = tuple(
        (source.origin, source.max_samples)
        for source in data.datasets
        if source.max_samples is not None
    )
    report = StreamReport(data.max_length, eval_sources, first_rows)
    size = recipe.batch.per_device_train_batch_size
    return StreamedBatches(recipe, tokenizer, config, size, steps, world, report, folder, kind)


def _renumber(batch: StepBatch, first_step: int, first_example: int, note: Note) -> StepBatch:
    """A block's batch under the run's own numbers."""

    def shift(micro_batch: MicroBatch) -> MicroBatch:
        return replace(
            micro_batch, example_ids=tuple(first_example + i for i in micro_batch.example_ids)
        )

    return replace(
        batch,
        step=first_step + batch.step,
        epoch=float(note.epoch),
        micro_batches=tuple(map(shift, batch.micro_batches)),
    )


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The data of a run, for training and evaluation."""

    train: StoredBatches | StreamedBatches
    evaluation: StoredBatches | None
    report: Report
    tokenizer: Any

    @property
    def images(self) -> str | None:
        """The family of the model whose images are in the rows; None where none are, or they are
        not read yet.
        """
        parts = [part for part in (self.train, self.evaluation) if isinstance(part, StoredBatches)]
        return next((part.images.family for part in parts if part.images is not None), None)

    def complete_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with what the data decides: without plain text, an `overlength` of null is
        `truncate`.

        A run over conversations from when this was every format's default resumes with it.
        """
        is_decided = recipe.data.overlength or recipe.method_facts.samples
        if is_decided or not self.report.is_complete or "text" in self.report.formats:
            return recipe
        return replace(recipe, data=replace(recipe.data, overlength="truncate"))

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """At most `count` held-out examples as prompts."""
        if self.evaluation:
            return cut_prompts(self.evaluation.examples, count, self.tokenizer)
        return []


def prepare_data(recipe: Recipe, tokenizer: Any, world: DataParallelRank) -> PreparedData:
    """Reads, tokenizes (or finds tokenized), splits and arranges the data of a recipe, for one
    rank.

    A tokenizer without a chat template gets the plain one where conversations need it. Raises
    `UserError` for data that cannot be read, and for fatal findings.
    """
    if recipe.rollout.takes_turns and has_tools(tokenizer):
        make_tool_turns(recipe, tokenizer)  # or it says why no tool can be called
    if recipe.data.streaming:
        data = _prepare_stream(recipe, tokenizer, world)
    else:
        data = PreparedData(*_read_stored(recipe, tokenizer, world), tokenizer)
    refuse_problems(find_problems(recipe, images=data.images))
    refuse_fatal(data.report.findings)
    return data


GIVEN = "rows"  # how messages name rows that no file holds


def batch_rows(
    rows: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    tokenizer: Any,
    world: DataParallelRank,
    step: int = 0,
    columns: Sequence[str] = (),
) -> StepBatch:
    """Makes one rank's share of a step over rows that a script gives.

    A tokenizer without a chat template gets the plain one where conversations need it.

    Args:
        rows: Read as the rows of a file; the same on all ranks.
        recipe: The run's.
        tokenizer: As `load_tokenizer` gives it.
        world: The rank.
        step: The number of the step.
        columns: The columns of `rows` that the loss reads.

    Raises:
        UserError: For a row that cannot be used, for fatal findings, and where nothing is trained
            on.
    """
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(f"{GIVEN}: a list of mappings is expected, each as a row of a data file")
    source = DatasetSource(path=GIVEN)
    stats = SourceStats()
    without_columns = [{key: row[key] for key in row if key not in columns} for row in rows]
    numbers = tuple(range(1, len(rows) + 1))
    row_batch = RowBatch(GIVEN, numbers, tuple(map(plain_row, without_columns)))
    tokens = tokenize_rows(
        [(source, row_batch)], recipe.data, tokenizer, stats, recipe.method_facts.rows
    )
    store = keep_in_memory(tokens, stats.as_json)
    examples, report = select_examples(store, source, recipe.data)
    refuse_fatal(report.findings)
    if not len(examples):
        raise UserError(f"{GIVEN}: none of {len(rows)} holds a token to train on")
    _set_plain_template(tokenizer, report.findings)
    config = BatchConfig.from_recipe(recipe, len(examples))  # all in one step
    size = recipe.batch.per_device_train_batch_size
    batches = make_batches(examples, config, world, size, tokenizer)
    if batches.images is not None:
        refuse_problems(find_problems(recipe, images=batches.images.family))
    batch = replace(next(batches.batches()), step=step, epoch=0.0, has_own_rows=True)
    if not columns:
        return batch
    return attach_columns(batch, read_columns(rows, columns, examples, GIVEN), examples)


def preview_data(
    recipe: Recipe, tokenizer: Any, world: DataParallelRank
) -> tuple[StoredBatches, DataReport]:
    """Returns the training data and its report, with fatal findings too; of a stream, its first
    block.

    Raises `UserError` for data that cannot be read, or that leaves nothing to train on.
    """
    if not recipe.data.streaming:
        train, _, report = _read_stored(recipe, tokenizer, world)
        return train, report
    stream = open_stream(recipe, tokenizer, world)
    examples, source = select_examples(
        stream.open_block_store(0), recipe.data.datasets[0], recipe.data
    )
    stream.remove_blocks()  # an open store is memory-mapped, and needs no name
    train = make_train_batches(recipe, examples, tokenizer, world)
    return train, make_report(train, (source,))


def _prepare_stream(recipe: Recipe, tokenizer: Any, world: DataParallelRank) -> PreparedData:
    held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
    train: StreamedBatches = open_stream(recipe, tokenizer, world, eval_sources)
    return PreparedData(
        train, make_eval_batches(recipe, held_out, tokenizer, world), train.report, tokenizer
    )


def _read_stored(
    recipe: Recipe, tokenizer: Any, world: DataParallelRank
) -> tuple[StoredBatches, StoredBatches | None, DataReport]:
    """Returns (training, held-out, report) of data that is read before training.

    A tokenizer without a chat template gets `plain` where rows were rendered by it.
    """
    examples, sources = _read_sources(recipe.data.datasets, recipe, tokenizer, world)
    held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
    findings = [finding for source in (*sources, *eval_sources) for finding in source.findings]
    if examples is None or not len(examples):
        stop = [str(finding) for finding in findings if finding.is_fatal]
        nothing = f"{recipe.place_of('datasets')}: datasets: nothing is left to train on"
        raise UserError.of([*stop, nothing + _explain_room(recipe, tokenizer, sources)])
    if recipe.data.eval_split_size is not None:
        examples, held_out = hold_out(examples, recipe.data.eval_split_size, recipe.run.seed)
    if held_out is None:
        leaked = []
    else:
        leaked = find_held_out_in_training(examples, held_out)
    _set_plain_template(tokenizer, findings)
    train = make_train_batches(recipe, examples, tokenizer, world)
    evaluation = make_eval_batches(recipe, held_out, tokenizer, world)
    report = make_report(
        train, sources, eval_sources, held_out, [*find_same_ratings(examples), *leaked]
    )
    return train, evaluation, report


def _set_plain_template(tokenizer: Any, findings: Iterable[Finding]) -> None:
    """Gives the tokenizer the template `plain` where a finding says that rows were rendered by it:
    the run then saves it with the model.
    """
    if any(finding.name == "plain_template" for finding in findings):
        tokenizer.chat_template = PLAIN


def _explain_room(recipe: Recipe, tokenizer: Any, sources: Sequence[SourceReport]) -> str:
    """Says how long prompts and the descriptions of their tools are, and how long they may be.

    Returns "" where no prompt was too long.
    """
    if not recipe.method_facts.samples or not any(source.overlong for source in sources):
        return ""
    tokens = sum(source.tokens for source in sources)
    documents = sum(source.documents for source in sources)
    of_tools = count_tool_tokens(tokenizer)
    described = f", {of_tools:,} of them the descriptions of tools" if of_tools else ""
    return (
        f": a prompt has {tokens // documents:,} tokens on average{described}, and max_length less "
        f"max_completion_length leaves {recipe.document_data.max_length:,}; raise max_length"
    )


def _read_sources(
    sources: tuple[DatasetSource, ...], recipe: Recipe, tokenizer: Any, world: DataParallelRank
) -> tuple[Examples | None, tuple[SourceReport, ...]]:
    """Returns (the examples of all sources, a report of each); None where there is no source."""
    seed = recipe.run.seed
    kind = recipe.method_facts.rows
    parts = []
    reports = []
    for source in sources:
        store = open_cached_store(source, recipe.data, tokenizer, world.local_rank, seed, kind)
        examples, report = select_examples(store, source, recipe.document_data)
        parts.append(examples)
        reports.append(report)
    mixed = mix_sources(parts, sources, seed) if parts else None
    return mixed, tuple(reports)


def open_cached_store(
    source: DatasetSource,
    data: Data,
    tokenizer: Any,
    local_rank: int,
    seed: int = 0,
    kind: RowKind = "answers",
) -> TokenStore:
    """Opens a source's tokens in the cache.

    If they are missing or damaged, local rank 0 writes them and the others wait.

    Raises `UserError` on every rank where the data cannot be read.
    """
    content = hash_content(source)
    folder = cache_folder(data) / cache_key(source, content, data, tokenizer, seed, kind)

    def write(staging: Path) -> None:
        stats = SourceStats(content=list(content.values()))
        batches, stats.rows_in_source = draw_rows(source, seed)
        rows = ((source, batch) for batch in batches)
        write_store(staging, tokenize_rows(rows, data, tokenizer, stats, kind), stats.as_json)
        if stats.rows_read == 0:
            raise UserError(f"{source.origin}: it has no rows")
        if stats.rows_read == stats.rows_skipped:
            raise UserError(
                f"{source.origin}: every row was skipped; the first: {stats.skipped[0]}"
            )

    return open_or_write_store(folder, local_rank, write)


def make_train_batches(
    recipe: Recipe, examples: Examples, tokenizer: Any, world: DataParallelRank
) -> StoredBatches:
    """Makes the batches to train on. Raises `UserError` for fewer rows than ranks."""
    config = BatchConfig.from_recipe(recipe, compute_global_batch_size(recipe.batch, world.size))
    size = recipe.batch.per_device_train_batch_size
    train = make_batches(
        examples, config, world, size, tokenizer, recipe.data.dataloader_num_workers
    )
    if train.rows_per_epoch < world.size:
        given = ""
        less = ""
        if config.packing:
            given = (
                f" ({counted(len(examples), 'example')} packed by max_length {config.max_length})"
            )
            less = ", a smaller max_length, or packing: false"
        raise UserError(
            f"{recipe.place_of('datasets')}: datasets: "
            f"{counted(train.rows_per_epoch, 'row')}{given} "
            f"{'is' if train.rows_per_epoch == 1 else 'are'} too few for {world.size} ranks; give "
            f"more data or fewer ranks{less}"
        )
    train = replace(train, iterations=recipe.rollout.num_iterations)
    steps = recipe.optimization.max_steps
    if not steps:
        steps = ceil(recipe.optimization.num_train_epochs * train.steps_per_epoch)
    return replace(train, steps=steps)


def make_eval_batches(
    recipe: Recipe, held_out: Examples | None, tokenizer: Any, world: DataParallelRank
) -> StoredBatches | None:
    """Makes the batches of one pass over the held-out examples; None where there are none.

    Their order does not matter to a loss that weighs every token alike.
    """
    if held_out is None or not len(held_out):
        return None
    size = recipe.batch.per_device_eval_batch_size or recipe.batch.per_device_train_batch_size
    config = BatchConfig.from_recipe(recipe, size * world.size)
    return make_batches(
        held_out, config, world, size, tokenizer, recipe.data.dataloader_num_workers
    )
