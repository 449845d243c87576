"""Prepares the data of a recipe, from the rows of its sources to batches for each rank.

Sources become documents as tokens, these are cut into examples, and batches are made of examples.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import ceil
from pathlib import Path
from threading import Event
from typing import Any

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
from finetune.data.findings import Finding, refuse_empty, refuse_fatal
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
    POLL_SECONDS,
    Tokens,
    TokenStore,
    cache_folder,
    cache_key,
    hash_inputs,
    keep_in_memory,
    open_or_write_store,
    raise_failure,
    seal,
    unseal,
    write_store,
)
from finetune.data.tokenizer import PLAIN
from finetune.data.tool_calls import count_tool_tokens, make_tool_turns
from finetune.distributed.world import DataParallelRank
from finetune.errors import UserError
from finetune.files.durable import remove_tree, replace_file
from finetune.units import counted

BLOCK_ROWS = 8192  # rows of a stream that are shuffled together


@dataclass(frozen=True, slots=True)
class Note:
    """The facts of a block that are needed to skip it, kept in a file."""

    runs: int  # batches of rows that were read up to the block's end, over all sources
    steps: int  # in the block
    examples: int  # in the block
    epoch: int  # full passes over every source up to the block's end


@dataclass(frozen=True, slots=True)
class StreamedBatches:
    """The batches of a run over data without a known end, for one rank.

    The rows are read, shuffled and trained on block by block.
    """

    recipe: Recipe
    tokenizer: Any
    config: BatchConfig
    steps: int
    world: DataParallelRank
    report: StreamReport  # of the time before anything is read
    folder: Path  # where this launch keeps its blocks
    # the `model_type` of the model that takes the images of the rows read so far; empty without any
    image_families: set[str] = field(default_factory=set)
    # On the rank that reads, batches of rows read so far -> the reader of the next ones. At most
    # one reader is kept, from one block to the next.
    readers: dict[int, Iterator[tuple[DatasetSource, RowBatch, int]]] = field(default_factory=dict)

    @property
    def data(self) -> Data:
        return self.recipe.data

    @property
    def steps_per_epoch(self) -> None:
        """Returns None: the epochs of a stream have no known length."""

    @property
    def fingerprint(self) -> str | None:
        """A hash of samples of the files; None for a data set that is streamed from the hub."""
        return fingerprint_samples(self.data.datasets)

    def batches(self, from_step: int = 0, on_report: OnReport | None = None) -> Iterator[StepBatch]:
        """Yields the step batches from `from_step` to the end.

        While one block is trained on, a thread makes the next one. `on_report` is called before the
        first batch of each block, with the report so far and the new lines for the log.
        """
        # Nothing is left to train on. Local rank 0 would remove a block that other ranks still look
        # for.
        if from_step >= self.steps:
            return
        report = StreamReport(
            self.report.max_length, self.report.eval_sources, self.report.first_rows, from_step
        )
        block, step, first_example = self._find_block(from_step)
        canceled = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            next_block = pool.submit(self.open_block, block, canceled)
            try:
                while step < self.steps:
                    block_batches, note, block_report = next_block.result()
                    log_lines = report.add(block_report)
                    if on_report is not None:
                        on_report(report, log_lines)
                    if step + note.steps < self.steps:
                        next_block = pool.submit(self.open_block, block + 1, canceled)
                    skipped_steps = max(from_step - step, 0)  # of this block
                    remaining_steps = self.steps - step - skipped_steps
                    for batch in islice(block_batches.batches(skipped_steps), remaining_steps):
                        yield _renumber(batch, step, first_example, note)
                    self._remove_block(block - 1)
                    step = step + note.steps
                    first_example = first_example + note.examples
                    block = block + 1
            finally:
                canceled.set()
                next_block.cancel()
                pool.shutdown()
                self.remove_blocks()

    def open_block(
        self, number: int, canceled: Event | None = None
    ) -> tuple[StoredBatches, Note, SourceReport]:
        """Opens a block; local rank 0 writes the block's note.

        If the block's tokens are missing, local rank 0 writes them, and the other ranks wait until
        they are there or `canceled` is set.

        Returns:
            The block's batches, with steps and examples numbered from 0; its note; and the report
            of its rows.

        Raises:
            UserError: Rows cannot be read, a finding is fatal, or no row holds a token to train on.
        """
        store = self.open_block_store(number, canceled)
        stats = SourceStats.from_json(store.facts)
        examples, report = self.select_examples(store)
        refuse_fatal(report.findings)
        if not len(examples):
            problem = f"{report.path}: no row of a block of {BLOCK_ROWS} holds a token to train on"
            refuse_empty(report.findings, problem)
        batches = self._make_batches(examples, number)
        if batches.images is not None:
            refuse_problems(find_problems(self.recipe, images=batches.images.family))
            self.image_families.add(batches.images.family)
        note = Note(stats.stream["runs"], batches.steps, len(examples), stats.stream["epoch"])
        if self.world.local_rank == 0:
            replace_file(self._note_file(number), seal(asdict(note)))
        return batches, note, report

    def open_block_store(self, number: int, canceled: Event | None = None) -> TokenStore:
        """Opens the tokens of a block. Local rank 0 writes them if they are missing."""

        def write(staging: Path) -> None:
            stats = SourceStats()
            write_store(staging, self._tokenize_block(number, stats), stats.as_json)

        return open_or_write_store(
            self._block_folder(number), self.world.local_rank, write, canceled
        )

    def select_examples(self, store: TokenStore) -> tuple[Examples, SourceReport]:
        """Selects the examples of a block; the report names all sources, whose rows it holds."""
        masks = self.recipe.method_facts.masks
        examples, report = select_examples(store, self.data.datasets[0], self.data, masks)
        origins = ", ".join(source.origin for source in self.data.datasets)
        return examples, replace(report, path=origins)

    def remove_blocks(self) -> None:
        """Removes all blocks of this launch, and the reader. The notes of the blocks stay."""
        self.readers.clear()
        if self.world.local_rank == 0:
            remove_tree(self.folder, ignore_errors=True)

    def _make_batches(self, examples: Examples, number: int) -> StoredBatches:
        """Makes the batches of one pass over the examples of block `number`."""
        # Each pass has epoch 0, so a seed of its own gives each block another order.
        seed = int(make_generator(self.config.seed, "block", number).integers(2**62))
        return make_batches(
            examples,
            replace(self.config, seed=seed),
            self.world,
            self.recipe.batch.per_device_train_batch_size,
            self.tokenizer,
            self.data.dataloader_num_workers,
        )

    def _tokenize_block(self, number: int, stats: SourceStats) -> Iterator[Tokens]:
        """Yields the tokens of a block, which begins where the block before it ended.

        `stats` counts the rows, and gets the values of the block's note in `stream` at the end.
        """
        runs_before = 0 if number == 0 else self._read_note(number - 1).runs
        reader = self.readers.pop(runs_before, None)
        if reader is None:  # after a restart: the rows of earlier blocks are read and skipped
            reader = interleave_sources(self.data.datasets, runs_before)
        passes: list[int] = []  # full passes over every source so far, at each run of the block

        def read_block() -> Iterator[tuple[DatasetSource, RowBatch]]:
            rows = 0
            for source, batch, full_passes in reader:
                passes.append(full_passes)
                rows += len(batch.rows)
                yield source, batch
                if rows >= BLOCK_ROWS:
                    return

        kind = self.recipe.method_facts.rows
        yield from tokenize_rows(read_block(), self.data, self.tokenizer, stats, kind)
        runs = runs_before + len(passes)
        stats.stream = {"runs": runs, "epoch": passes[-1]}
        self.readers.clear()
        self.readers[runs] = reader

    def _find_block(self, step: int) -> tuple[int, int, int]:
        """Returns (number of the block with step `step`, its first step, its first example).

        All numbers are 0-based and those of the whole run. Blocks that were made for their notes
        are removed.
        """
        block = 0
        first_step = 0
        first_example = 0
        while True:
            note = self._read_note(block)
            if step < first_step + note.steps:
                return block, first_step, first_example
            self._remove_block(block)
            block = block + 1
            first_step = first_step + note.steps
            first_example = first_example + note.examples

    def _read_note(self, number: int) -> Note:
        """Reads the note of a block.

        If the note is missing or damaged, local rank 0 makes the block to write the note, and the
        other ranks wait. They do not open the block, which may be removed before.
        """
        while True:
            with suppress(FileNotFoundError, ValueError):
                return Note(**unseal(self._note_file(number).read_bytes()))
            if self.world.local_rank == 0:
                _, made_note, _ = self.open_block(number)
                return made_note
            raise_failure(self._block_folder(number))
            time.sleep(POLL_SECONDS)

    def _block_folder(self, number: int) -> Path:
        """Returns the folder of a block's tokens."""
        return self.folder / f"block-{number:06}"

    def _note_file(self, number: int) -> Path:
        """Returns the file of a block's note, beside the folders of all launches."""
        return self.folder.parent / f"block-{number:06}.json"

    def _remove_block(self, number: int) -> None:
        """Removes a block that no rank opens any more; does nothing for a negative number.

        A rank that still reads the block is not disturbed, because the files are memory-mapped.
        """
        if number >= 0 and self.world.local_rank == 0:
            remove_tree(self._block_folder(number), ignore_errors=True)


def open_stream(
    recipe: Recipe,
    tokenizer: Any,
    world: DataParallelRank,
    eval_sources: tuple[SourceReport, ...] = (),
) -> StreamedBatches:
    """Makes the batches of a run over a stream; nothing of it is read yet.

    A tokenizer without a chat template gets the plain one, because it is not known before reading
    whether the stream needs it.

    Args:
        recipe: The run's.
        tokenizer: Made by `load_tokenizer`.
        world: This rank.
        eval_sources: The reports of the recipe's held-out data, which is not streamed.
    """
    data = recipe.data
    steps = recipe.optimization.max_steps
    assert steps is not None and data.eval_split_size is None, "refused with the recipe"
    reading_tokenizer = copy(tokenizer)  # has no template that findings would take for its own
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN
    config = BatchConfig.from_recipe(recipe, compute_global_batch_size(recipe.batch, world.size))
    content = [describe_source(source) for source in data.datasets]
    kind = recipe.method_facts.rows
    masks = recipe.method_facts.masks
    key = hash_inputs(data, tokenizer, kind, content, asdict(config), data.overlength, masks)
    # Each launch has blocks of its own; all ranks on a machine have the same parent process. The
    # notes are shared between launches.
    launch = f"run-{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}"
    folder = cache_folder(data) / f"stream-{key}" / launch
    folder.mkdir(parents=True, exist_ok=True)
    first_rows = tuple(
        (source.origin, source.max_samples)
        for source in data.datasets
        if source.max_samples is not None
    )
    report = StreamReport(data.max_length, eval_sources, first_rows)
    return StreamedBatches(recipe, reading_tokenizer, config, steps, world, report, folder)


def _renumber(batch: StepBatch, first_step: int, first_example: int, note: Note) -> StepBatch:
    """Returns a block's batch with the numbers of the whole run.

    Args:
        batch: A batch whose step and examples are numbered within the block.
        first_step: The block's first step.
        first_example: The block's first example.
        note: The block's note, which has the epoch.
    """

    def shift_ids(micro_batch: MicroBatch) -> MicroBatch:
        return replace(
            micro_batch, example_ids=tuple(first_example + i for i in micro_batch.example_ids)
        )

    return replace(
        batch,
        step=first_step + batch.step,
        epoch=float(note.epoch),
        micro_batches=tuple(map(shift_ids, batch.micro_batches)),
    )


def find_image_family(*batches: StoredBatches | None) -> str | None:
    """Returns the `model_type` of the model that takes the rows' images; None without images."""
    with_images = (data.images for data in batches if data is not None)
    return next((images.family for images in with_images if images is not None), None)


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The data of a run, for training and evaluation."""

    train: StoredBatches | StreamedBatches
    evaluation: StoredBatches | None
    report: Report
    tokenizer: Any

    @property
    def images(self) -> str | None:
        """The `model_type` of the model that takes the rows' images.

        None if no row has an image, or the rows are not read yet.
        """
        if isinstance(self.train, StoredBatches):
            return find_image_family(self.train, self.evaluation)
        return find_image_family(self.evaluation) or next(iter(self.train.image_families), None)

    def complete_recipe(self, recipe: Recipe) -> Recipe:
        """Returns the recipe with the `overlength` that the data decides, if it is null there.

        Without plain text it becomes `truncate`. A run over conversations that began when this was
        the default of every format can then be resumed.
        """
        is_decided = recipe.data.overlength or recipe.method_facts.samples
        if is_decided or isinstance(self.report, StreamReport) or "text" in self.report.formats:
            return recipe
        return replace(recipe, data=replace(recipe.data, overlength="truncate"))

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """Returns at most `count` held-out examples as prompts; none without held-out data."""
        if self.evaluation:
            return cut_prompts(self.evaluation.examples, count, self.tokenizer)
        return []


def prepare_data(recipe: Recipe, tokenizer: Any, world: DataParallelRank) -> PreparedData:
    """Prepares the data of a recipe for one rank: reads, tokenizes, splits and arranges it.

    Tokens that are in the cache are not made a second time. A tokenizer without a chat template
    gets the plain one if conversations need it.

    Raises `UserError` if the data cannot be read, or a finding is fatal.
    """
    if recipe.rollout.takes_turns and has_tools(tokenizer):
        make_tool_turns(recipe, tokenizer)  # only for the error if no tool can be called
    if recipe.data.streaming:
        # the held-out data is not streamed
        held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
        train = open_stream(recipe, tokenizer, world, eval_sources)
        evaluation = make_eval_batches(recipe, held_out, tokenizer, world)
        data = PreparedData(train, evaluation, train.report, tokenizer)
    else:
        data = PreparedData(*_read_stored(recipe, tokenizer, world), tokenizer)
    refuse_problems(find_problems(recipe, images=data.images))
    refuse_fatal(data.report.findings)
    return data


GIVEN = "rows"  # the name of a script's rows in messages, in place of a file's


def batch_rows(
    rows: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    tokenizer: Any,
    world: DataParallelRank,
    step: int = 0,
    columns: Sequence[str] = (),
) -> tuple[StepBatch, list[Finding]]:
    """Makes one rank's share of a step that trains on all of a script's rows.

    A tokenizer without a chat template gets the plain one if conversations need it.

    Args:
        rows: Rows as those of a file; the same on all ranks.
        recipe: The run's.
        tokenizer: Made by `load_tokenizer`.
        world: This rank.
        step: The number of the step, from 0.
        columns: The columns of `rows` that the loss reads.

    Returns:
        The batch, and the findings about the rows.

    Raises:
        UserError: A row cannot be used, a finding is fatal, or no row holds a token to train on.
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
    examples, report = select_examples(store, source, recipe.data, recipe.method_facts.masks)
    refuse_fatal(report.findings)
    if not len(examples):
        refuse_empty(report.findings, f"{GIVEN}: none of {len(rows)} holds a token to train on")
    _set_plain_template(tokenizer, report.findings)
    config = BatchConfig.from_recipe(recipe, len(examples))  # one step has room for all
    size = recipe.batch.per_device_train_batch_size
    batches = make_batches(examples, config, world, size, tokenizer)
    if batches.images is not None:
        refuse_problems(find_problems(recipe, images=batches.images.family))
    batch = replace(next(batches.batches()), step=step, epoch=0.0, has_own_rows=True)
    if columns:
        batch = attach_columns(batch, read_columns(rows, columns, examples, GIVEN), examples)
    return batch, list(report.findings)


def preview_data(
    recipe: Recipe, tokenizer: Any, world: DataParallelRank
) -> tuple[StoredBatches, StoredBatches | None, DataReport]:
    """Returns (training batches, held-out batches, report); of a stream only its first block.

    The held-out batches are None if nothing is held out.

    A fatal finding is no error here, and is in the report. Raises `UserError` if the data cannot be
    read, or nothing is left to train on.
    """
    if not recipe.data.streaming:
        return _read_stored(recipe, tokenizer, world)
    held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
    stream = open_stream(recipe, tokenizer, world)
    examples, source = stream.select_examples(stream.open_block_store(0))
    stream.remove_blocks()  # the open store stays readable, because it is memory-mapped
    if not len(examples):
        problem = f"{recipe.place_of('datasets')}: datasets: nothing is left of the first block"
        refuse_empty(source.findings, problem)
    train = make_train_batches(recipe, examples, tokenizer, world)
    evaluation = make_eval_batches(recipe, held_out, tokenizer, world)
    return train, evaluation, make_report(train, (source,), eval_sources, held_out)


def _read_stored(
    recipe: Recipe, tokenizer: Any, world: DataParallelRank
) -> tuple[StoredBatches, StoredBatches | None, DataReport]:
    """Reads data that is not streamed; returns (training batches, held-out batches, report).

    The held-out batches are None if nothing is held out. A tokenizer without a chat template gets
    the plain one if rows were rendered with it. Raises `UserError` if no example is left to train
    on.
    """
    examples, sources = _read_sources(recipe.data.datasets, recipe, tokenizer, world)
    held_out, eval_sources = _read_sources(recipe.data.eval_datasets, recipe, tokenizer, world)
    findings = [finding for source in (*sources, *eval_sources) for finding in source.findings]
    if examples is None or not len(examples):
        problem = f"{recipe.place_of('datasets')}: datasets: nothing is left to train on"
        problem += _explain_room(recipe, tokenizer, sources)
        refuse_empty(findings, problem)
    if recipe.data.eval_split_size is not None:
        examples, held_out = hold_out(examples, recipe.data.eval_split_size, recipe.run.seed)
    if held_out is None:
        leak_findings = []
    else:
        leak_findings = find_held_out_in_training(examples, held_out)
    _set_plain_template(tokenizer, findings)
    train = make_train_batches(recipe, examples, tokenizer, world)
    evaluation = make_eval_batches(recipe, held_out, tokenizer, world)
    example_findings = [*find_same_ratings(examples), *leak_findings]
    report = make_report(train, sources, eval_sources, held_out, example_findings)
    return train, evaluation, report


def _set_plain_template(tokenizer: Any, findings: Iterable[Finding]) -> None:
    """Gives the tokenizer the plain template if a finding says that rows were rendered with it.

    The run then saves this template with the model.
    """
    if any(finding.name == "plain_template" for finding in findings):
        tokenizer.chat_template = PLAIN


def _explain_room(recipe: Recipe, tokenizer: Any, sources: Sequence[SourceReport]) -> str:
    """Says how long prompts and the descriptions of their tools are, and how long they may be.

    It continues the message that nothing is left to train on. Returns "" if no prompt was too long.
    """
    if not recipe.method_facts.samples or not any(source.overlong for source in sources):
        return ""
    tokens = sum(source.tokens for source in sources)
    documents = sum(source.documents for source in sources)
    tool_tokens = count_tool_tokens(tokenizer)
    tool_note = f", {tool_tokens:,} of them the descriptions of tools" if tool_tokens else ""
    return (
        f": a prompt has {tokens // documents:,} tokens on average{tool_note}, and max_length less "
        f"max_completion_length leaves {recipe.document_data.max_length:,}; raise max_length"
    )


def _read_sources(
    sources: tuple[DatasetSource, ...], recipe: Recipe, tokenizer: Any, world: DataParallelRank
) -> tuple[Examples | None, tuple[SourceReport, ...]]:
    """Returns (the mixed examples of all sources, a report of each source).

    The examples are None if there is no source.
    """
    seed = recipe.run.seed
    kind = recipe.method_facts.rows
    masks = recipe.method_facts.masks
    source_examples = []
    reports = []
    for source in sources:
        store = open_cached_store(source, recipe.data, tokenizer, world.local_rank, seed, kind)
        examples, report = select_examples(store, source, recipe.document_data, masks)
        source_examples.append(examples)
        reports.append(report)
    mixed = mix_sources(source_examples, sources, seed) if source_examples else None
    return mixed, tuple(reports)


def open_cached_store(
    source: DatasetSource,
    data: Data,
    tokenizer: Any,
    local_rank: int,
    seed: int = 0,
    kind: RowKind = "answers",
) -> TokenStore:
    """Opens the tokens of a source in the cache.

    If they are missing or damaged, local rank 0 writes them and the other ranks wait.

    Raises `UserError`, on every rank, if the data cannot be read or has no row that can be used.
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
    """Makes the batches of the whole run to train on.

    Raises `UserError` if there are fewer rows than ranks.
    """
    config = BatchConfig.from_recipe(recipe, compute_global_batch_size(recipe.batch, world.size))
    size = recipe.batch.per_device_train_batch_size
    train = make_batches(
        examples, config, world, size, tokenizer, recipe.data.dataloader_num_workers
    )
    if train.rows_per_epoch < world.size:
        packing_advice = ", a smaller max_length, or packing: false" if config.packing else ""
        raise UserError(
            f"{recipe.place_of('datasets')}: datasets: {counted(train.rows_per_epoch, 'row')} of "
            f"{counted(len(examples), 'example')}, too few for {world.size} ranks; give more data "
            f"or fewer ranks{packing_advice}"
        )
    train = replace(train, iterations=recipe.rollout.num_iterations)
    steps = recipe.optimization.max_steps
    if not steps:
        steps = ceil(recipe.optimization.num_train_epochs * train.steps_per_epoch)
    return replace(train, steps=steps)


def make_eval_batches(
    recipe: Recipe, held_out: Examples | None, tokenizer: Any, world: DataParallelRank
) -> StoredBatches | None:
    """Makes the batches of one pass over the held-out examples; None if there are none.

    Their order does not matter to a loss that weighs every token alike.
    """
    if held_out is None or not len(held_out):
        return None
    size = recipe.batch.per_device_eval_batch_size or recipe.batch.per_device_train_batch_size
    config = BatchConfig.from_recipe(recipe, size * world.size)
    return make_batches(
        held_out, config, world, size, tokenizer, recipe.data.dataloader_num_workers
    )
