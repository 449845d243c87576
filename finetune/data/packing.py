"""Arranges examples in rows, and deals the rows of each step out as micro-batches of the ranks.

The order of the rows is a pure function of (seed, epoch), so the loader's whole state is the step.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX, ROUND_TOKENS, ceil_div, round_up
from finetune.data.batches import Ids, MicroBatch, StepBatch
from finetune.data.examples import Example, Examples, count_trained, expand_groups, make_generator
from finetune.data.images import ImageProcessor
from finetune.data.messages import BadRow
from finetune.data.token_store import Int32s, Int64s
from finetune.distributed.world import DataParallelRank
from finetune.errors import UserError
from finetune.files.durable import hash_json


@dataclass(frozen=True, slots=True)
class Rows:
    """Which documents share a row. Returned by `pack` and `arrange_epoch`."""

    ids: Int64s  # [documents]: the documents of row 0, then those of row 1, and so on
    starts: Int64s  # [rows + 1]: row r holds ids[starts[r]:starts[r + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Int64s:
        """Returns the ids of a row's documents: int64[documents of the row]."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def take(self, order: Int64s) -> "Rows":
        """Returns the rows in another order. `order`: [rows], a permutation of the row numbers."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        # how far back or forth in `self.ids` the ids of each reordered row stand
        shifts = self.starts[:-1][order] - starts[:-1]
        source = np.repeat(shifts, sizes) + np.arange(len(self.ids))
        return Rows(self.ids[source], starts)

    def expand(self, size: int) -> "Rows":
        """Returns rows of documents for rows whose `ids` number groups of `size` documents."""
        return Rows(expand_groups(self.ids, size), self.starts * size)


def pack(lengths: NDArray[np.integer], capacity: int) -> Rows:
    """Packs documents into rows of `capacity` tokens, best fit decreasing.

    Documents are taken from the longest to the shortest, in the order of `lengths` if equally long.
    Each goes into the fullest row that still has room for it, or else into a new row. This takes at
    most 11/9 of the fewest possible rows, plus one (Johnson 1974).

    All documents of equal length are placed together, in rows with equal free space, so that the
    loop runs over distinct lengths. The rows are the same as if each document were placed by
    itself. A million documents take a fraction of a second.

    Args:
        lengths: [documents]: tokens of each document, 1 to `capacity`. There is at least one.
        capacity: Tokens that a row holds.

    >>> pack(np.array([2, 6, 3, 5]), 8)
    Rows(ids=array([1, 0, 3, 2]), starts=array([0, 2, 4]))
    """
    key_type = np.uint16 if capacity < 2**16 else np.uint32  # numpy sorts 16-bit keys by radix
    order = np.argsort((capacity - lengths).astype(key_type), kind="stable")
    moves = _plan_moves(np.bincount(lengths, minlength=capacity + 1), capacity)
    first_row, rows, per_row = moves.T
    move_sizes = rows * per_row  # documents that each move places
    # Three arrays [documents], in the order `order`: the move of each document, its number among
    # the documents of that move, and its row.
    move_of = np.repeat(np.arange(len(moves)), move_sizes)
    move_begins = np.cumsum(move_sizes) - move_sizes
    number_in_move = np.arange(len(order)) - np.repeat(move_begins, move_sizes)
    row_of = first_row[move_of] + number_in_move // per_row[move_of]
    by_row = np.argsort(row_of, kind="stable")
    row_sizes = np.bincount(row_of)
    return Rows(order[by_row].astype(np.int64), np.concatenate(([0], np.cumsum(row_sizes))))


def _plan_moves(count_of_length: Int64s, capacity: int) -> Int64s:
    """Plans which rows take how many documents, from the longest documents to the shortest.

    Rows with equal free space are kept as ranges of row numbers. A row that takes one document of a
    length takes as many of that length as it has room for. Best fit would do the same: with each
    document the row becomes fuller, and stays the fullest one that has room.

    Args:
        count_of_length: [capacity + 1]: how many documents have each length.
        capacity: Tokens that a row holds.

    Returns:
        int64[moves, 3]: first row, number of rows, and number of documents put into each of these
        rows. All documents of a move have the same length; the moves go from long to short.
    """
    moves: list[tuple[int, int, int]] = []
    ranges: dict[int, list[tuple[int, int]]] = {}  # free tokens -> ranges (first row, rows)
    spaces: list[int] = []  # the keys of `ranges`, ascending
    opened_rows = 0

    def add_range(free: int, first: int, rows: int) -> None:
        if free == 0 or rows == 0:
            return
        if free not in ranges:
            insort(spaces, free)
            ranges[free] = []
        ranges[free].append((first, rows))

    for length in np.flatnonzero(count_of_length)[::-1].tolist():
        remaining = int(count_of_length[length])  # documents of this length
        while remaining:
            fullest = bisect_left(spaces, length)  # index of the smallest space with enough room
            if fullest < len(spaces):
                free = spaces[fullest]
                first, rows = ranges[free].pop()
                if not ranges[free]:
                    del ranges[free], spaces[fullest]
            else:
                free = capacity
                first = opened_rows
                rows = ceil_div(remaining, capacity // length)
                opened_rows += rows
            per_row = free // length
            used_rows = min(rows, remaining // per_row)
            if used_rows:
                moves.append((first, used_rows, per_row))
                add_range(free - per_row * length, first, used_rows)
                remaining -= used_rows * per_row
            if used_rows < rows and remaining:  # fewer than `per_row`: one row takes all of them
                moves.append((first + used_rows, 1, remaining))
                add_range(free - remaining * length, first + used_rows, 1)
                used_rows += 1
                remaining = 0
            add_range(free, first + used_rows, rows - used_rows)
    return np.array(moves, dtype=np.int64)


GROUP_STEPS = 64  # unpacked rows are sorted by length within stretches of this many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The settings that decide which examples share a row, and which rows share a step."""

    seed: int
    packing: bool
    max_length: int  # a packed row has this many tokens for each document of a group
    global_batch_size: int  # rows in a step
    # Each row is one group. All full steps then have equally many groups, whatever their lengths,
    # and each group has the others of its step as negatives.
    one_group_a_row: bool = False

    @classmethod
    def from_recipe(cls, recipe: Recipe, rows: int) -> Self:
        """Takes the settings from a recipe. `rows`: rows in a step, over all ranks."""
        return cls(
            seed=recipe.run.seed,
            # the prompts of sampled completions are not packed
            packing=recipe.data.packing and not recipe.method_facts.samples,
            max_length=recipe.data.max_length,
            global_batch_size=rows,
            one_group_a_row=recipe.method_facts.reads_queries,
        )


def arrange_epoch(lengths: Int32s, config: BatchConfig, group_size: int, epoch: int) -> Rows:
    """Arranges every example once, in the rows of an epoch and in the order of its steps.

    - `one_group_a_row`: the rows come in random order. If there is packing, it is done within each
      micro-batch, by `collate`.
    - Packed: every epoch has the same number of rows, in random order. Examples of equal length
      change places from epoch to epoch, so the rows differ.
    - Unpacked: rows of similar length share a step, which keeps the padding small.

    The last step of an epoch has the remaining rows, which may be fewer. The examples of a group
    stay side by side in one row; unpacked, an arranged row is one group.

    Args:
        lengths: [examples]: tokens of each example, the examples of a group side by side.
        config: The settings.
        group_size: Examples in a group.
        epoch: 0-based.
    """
    group_lengths = lengths.reshape(-1, group_size).sum(1)
    random = make_generator(config.seed, "order", epoch)
    groups = random.permutation(len(group_lengths))
    if len(groups) == 0 or config.one_group_a_row:
        rows = Rows(groups, np.arange(len(groups) + 1))
    elif config.packing:
        packed = pack(group_lengths[groups], config.max_length * group_size)
        rows = Rows(groups[packed.ids], packed.starts).take(random.permutation(len(packed)))
    else:
        by_length = _group_by_length(groups, group_lengths, config.global_batch_size, random)
        rows = Rows(by_length, np.arange(len(groups) + 1))
    return rows.expand(group_size)


def _group_by_length(
    shuffled: Int64s, lengths: Int32s, step_rows: int, random: np.random.Generator
) -> Int64s:
    """Reorders unpacked rows so that the rows of a step have similar lengths.

    Rows are sorted by length within stretches of GROUP_STEPS steps. Within a step the longest row
    comes first. The steps come in random order.

    Args:
        shuffled: [rows]: ids of the rows, in random order.
        lengths: [rows]: tokens of each row, by id.
        step_rows: Rows of a step.
        random: Draws the order of the steps.
    """
    full_steps = []
    short_steps = []  # at most one, from the last stretch; it ends the epoch
    stretch = step_rows * GROUP_STEPS
    for rows in np.split(shuffled, range(stretch, len(shuffled), stretch)):
        longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
        for start in range(0, len(rows), step_rows):
            step = longest_first[start : start + step_rows]
            if len(step) == step_rows:
                full_steps.append(step)
            else:
                short_steps.append(step)
    order = random.permutation(len(full_steps))
    return np.concatenate([full_steps[i] for i in order] + short_steps)


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """The batches of a run over `examples`, for one rank."""

    examples: Examples
    config: BatchConfig
    per_device_batch_size: int  # rows in a micro-batch
    steps: int  # in the whole run
    world: DataParallelRank
    threads: int  # that build batches in advance; 0: a batch is built when it is asked for
    pad_token_id: int
    epoch_rows: Callable[[int], Rows]  # epoch -> its rows; the latest epochs are cached
    images: ImageProcessor | None = None  # None: the examples hold no images
    # Optimizer steps on the same rows; more than 1 only if the method samples completions. `steps`
    # and `steps_per_epoch` count all of them. Such a method uses `rows_of`, not `step_batch`.
    iterations: int = 1

    @property
    def row_tokens(self) -> int:
        """Tokens that a packed row holds."""
        return self.config.max_length * self.examples.group_size

    @property
    def rows_per_epoch(self) -> int:
        return len(self.epoch_rows(0))

    @property
    def steps_per_epoch(self) -> int:
        return ceil(self.rows_per_epoch / self.config.global_batch_size) * self.iterations

    @property
    def fingerprint(self) -> str:
        """A hash of the files that the examples come from.

        It does not cover the rendered text, because a chat template may write a date.
        """
        return hash_json([store.facts["content"] for store in self.examples.stores])

    def rows_of(self, rows_step: int) -> list[Ids]:
        """Returns the rows of a step over all ranks, each as the ids of its examples.

        `rows_step`: 0-based; the `iterations` optimizer steps on the same rows count as one.
        """
        epoch, step_in_epoch = divmod(rows_step, self.steps_per_epoch // self.iterations)
        rows = self.epoch_rows(epoch)
        first = step_in_epoch * self.config.global_batch_size
        end = min(first + self.config.global_batch_size, len(rows))
        return [rows[row] for row in range(first, end)]

    def step_batch(self, step: int) -> StepBatch:
        """Makes this rank's share of a step (0-based): the micro-batches of `deal_rows`.

        If several ranks share their rows, each gets a part of every row's tokens. `iterations` must
        be 1.
        """
        rows = self.rows_of(step)
        ids = np.concatenate(rows)
        first_ids = ids[:: self.examples.group_size]  # the first example of each group
        lengths = self.examples.lengths[ids].astype(np.int64)
        make_micro_batch = partial(
            collate,
            self.examples,
            packing=self.config.packing,
            pad_token_id=self.pad_token_id,
            part=self.world.sequence_rank,
            parts=self.world.sequence_size,
            images=self.images,
        )
        return StepBatch(
            step=step,
            epoch=(step + 1) / self.steps_per_epoch,
            micro_batches=tuple(
                map(make_micro_batch, self.list_micro_batches(rows, self.world.rank))
            ),
            tokens=int(lengths.sum()),
            squared_tokens=int(lengths @ lengths),
            trained_tokens=count_trained(self.examples, ids),
            chosen_tokens=int(self.examples.trained[first_ids].sum(dtype=np.int64)),
            groups=len(first_ids),
        )

    def list_micro_batches(self, rows: list[Ids], rank: int) -> list[Ids]:
        """Lists the example ids of each micro-batch of a rank; see `deal_rows`."""
        return deal_rows(rows, rank, self.world.size, self.per_device_batch_size)

    def batches(self, from_step: int = 0, on_report: object = None) -> Iterator[StepBatch]:
        """Yields the step batches from `from_step` to the end, in pinned memory for CUDA.

        `threads` threads build them in advance. `on_report` is never called: only streamed batches
        have a report that changes while they are read.
        """
        steps = range(from_step, self.steps)
        if self.threads == 0:
            yield from map(self._pinned_batch, steps)
            return
        pending: deque[Future[StepBatch]] = deque()
        with ThreadPoolExecutor(self.threads, thread_name_prefix="batches") as pool:
            try:
                for step in steps:
                    pending.append(pool.submit(self._pinned_batch, step))
                    if len(pending) > 2 * self.threads:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _pinned_batch(self, step: int) -> StepBatch:
        """Makes the batch of a step, in pinned memory if the device is a CUDA GPU."""
        batch = self.step_batch(step)
        if self.world.device.type != "cuda":
            return batch
        return replace(
            batch,
            micro_batches=tuple(micro_batch.pin_memory() for micro_batch in batch.micro_batches),
        )


def deal_rows(rows: Sequence[Ids], rank: int, ranks: int, size: int) -> list[Ids]:
    """Deals the rows of a step out to the ranks, and lists the micro-batches of one rank.

    Rank r gets the rows r, r + ranks, r + 2 ranks and so on. Every rank has the same number of
    micro-batches, of which the last ones may have no examples.

    Args:
        rows: The rows of the step, each as the ids of its examples.
        rank: The rank whose micro-batches are listed.
        ranks: How many ranks the rows are dealt out to.
        size: Rows in a micro-batch.

    Returns:
        The example ids of each micro-batch: int64[examples].
    """
    most_rows = ceil(len(rows) / ranks)  # of any rank
    count = ceil(most_rows / size)
    rank_rows = rows[rank::ranks]
    no_ids = np.zeros(0, np.int64)  # np.concatenate needs at least one array
    return [np.concatenate([no_ids, *rank_rows[i * size : (i + 1) * size]]) for i in range(count)]


def make_batches(
    examples: Examples,
    config: BatchConfig,
    world: DataParallelRank,
    per_device_batch_size: int,
    tokenizer: Any = None,
    threads: int = 0,
) -> StoredBatches:
    """Makes the batches of one epoch for a rank. For more or fewer steps, `replace` `steps`.

    Args:
        examples: The examples to train on, or to evaluate on.
        config: The settings that decide their order.
        world: This rank.
        per_device_batch_size: Rows in a micro-batch.
        tokenizer: Made by `load_tokenizer`; None if the examples come without a tokenizer.
        threads: How many threads build batches in advance; 0: none.

    Raises:
        UserError: A row without an image holds an image token as typed text.
    """
    lengths = examples.lengths
    if examples.is_rated and config.packing:
        # An answer counts with the longer length of both: in a packed row neither the rated answers
        # nor the mismatched ones, which have a forward of their own, are over max_length.
        lengths = lengths.reshape(-1, examples.group_size).max(1).repeat(examples.group_size)
    arrange = partial(arrange_epoch, lengths, config, examples.group_size)
    rows = lru_cache(maxsize=2)(arrange)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    images = None
    if examples.has_images:
        images = tokenizer.images
        examples.refuse_typed_images(images.token_ids)
    return StoredBatches(
        examples=examples,
        config=config,
        per_device_batch_size=per_device_batch_size,
        steps=ceil_div(len(rows(0)), config.global_batch_size),
        world=world,
        threads=threads,
        pad_token_id=pad,
        epoch_rows=rows,
        images=images,
    )


def collate(
    examples: Examples,
    ids: Ids,
    *,
    packing: bool,
    pad_token_id: int,
    part: int = 0,
    parts: int = 1,
    images: ImageProcessor | None = None,
) -> MicroBatch:
    """Makes the micro-batch of the examples `ids`; a filler if there are none.

    If examples are rated, `ids` alternates between a rated example and its mismatched one (the
    prompt with another prompt's answer). The mismatched ones become `MicroBatch.mismatched`.

    Args:
        examples: The examples of the run.
        ids: int64[examples]: the examples of this micro-batch.
        packing: Whether all examples go into one row.
        pad_token_id: Fills up rows that are not packed.
        part: The number, from 0, of the part of each row's tokens that this rank gets.
        parts: Into how many parts the tokens of a row are divided, one for each rank.
        images: The processor that makes pixels; None: the examples hold no image.
    """
    if not examples.is_rated:
        micro_batch = _collate(examples, ids, packing, pad_token_id, part, parts)
        if images is None:
            return micro_batch
        return add_images(micro_batch, micro_batch.example_ids, examples, images)
    ratings = torch.from_numpy(examples.take(ids).find_group_ratings())
    # `ids` holds whole groups of (rated, mismatched).
    rated = _collate(examples, ids[0::2], packing, pad_token_id, part, parts)
    mismatched = _collate(examples, ids[1::2], packing, pad_token_id, part, parts)
    return replace(rated, desirable=ratings > 0, mismatched=mismatched)


def _collate(
    examples: Examples, ids: Ids, packing: bool, pad_token_id: int, part: int, parts: int
) -> MicroBatch:
    """Makes a micro-batch as `collate` does, without images, ratings and mismatched examples.

    It has `trained_documents` if examples form groups, whose documents the loss compares.
    """
    if len(ids) == 0:
        micro_batch = make_filler(packing, parts)
    else:
        documents = [examples[example_id] for example_id in ids]
        if packing:
            micro_batch = pack_documents(documents, parts)
        else:
            micro_batch = pad_documents(documents, pad_token_id, parts)
        micro_batch = replace(micro_batch, example_ids=tuple(ids.tolist()))
    if parts > 1:
        micro_batch = _take_part(micro_batch, part, parts)
    if examples.group_size == 1:
        return micro_batch
    return micro_batch.with_documents()


def add_images(
    micro_batch: MicroBatch, ids: Sequence[int], examples: Examples, images: ImageProcessor
) -> MicroBatch:
    """Adds the pixels of the documents' images to a micro-batch.

    If there are no images, these are the pixels of a blank image.

    Args:
        micro_batch: A micro-batch without images.
        ids: For each document, the example that has its images.
        examples: The examples of the run.
        images: The processor that makes the pixels.

    Raises:
        UserError: An image cannot be read.
    """
    read_images = [image for example_id in ids for image in examples.read_images(example_id)]
    try:
        inputs = images.make_inputs(read_images) if read_images else images.blank_inputs
    except BadRow as problem:
        raise UserError(f"one of {', '.join(map(examples.where, ids))}: {problem}") from None
    return replace(micro_batch, images=inputs, image_counts=tuple(map(examples.count_images, ids)))


def _take_part(micro_batch: MicroBatch, part: int, parts: int) -> MicroBatch:
    """Takes part `part` of the tokens of each row. A row's length is a multiple of `parts`."""
    row_length = micro_batch.labels.shape[1]
    tokens = row_length // parts
    first = part * tokens
    names = ("input_ids", "labels", "position_ids", "token_mask")
    part_tensors = {
        name: getattr(micro_batch, name)[:, first : first + tokens].contiguous() for name in names
    }
    return replace(
        micro_batch,
        **part_tensors,
        trained_positions=_find_trained_positions(part_tensors["labels"].numpy()),
        first_token=first,
    )


def pack_documents(documents: Sequence[Example], parts: int = 1) -> MicroBatch:
    """Packs documents one after another into a single row, which padding fills up.

    The row's length becomes a multiple of ROUND_TOKENS x `parts`. `example_ids` stays empty.
    """
    document_lengths = [len(document.input_ids) for document in documents]
    tokens = sum(document_lengths)
    padding = -tokens % (ROUND_TOKENS * parts)
    # The padding repeats a token of the text, because the embedding of the pad token may be zero.
    # Gemma 3n takes the square root of the mean square of its states. In a document of zeros alone
    # its gradient would be 0 x infinity.
    input_ids = np.full(tokens + padding, documents[0].input_ids[0], np.int64)
    labels = np.full(tokens + padding, IGNORE_INDEX, np.int64)
    np.concatenate([document.input_ids for document in documents], out=input_ids[:tokens])
    np.concatenate([document.labels for document in documents], out=labels[:tokens])
    # The padding is a separate document, so no document attends to it.
    lengths = np.array([*document_lengths, padding] if padding else document_lengths, np.int64)
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids)[None],
        labels=torch.from_numpy(labels)[None],
        position_ids=torch.from_numpy(positions)[None],
        trained_positions=_find_trained_positions(labels),
        cu_seq_lens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        max_document_length=int(lengths.max()),
        example_ids=(),
        document_lengths=tuple(document_lengths),
        packed_lengths=tuple(lengths.tolist()),
        token_mask=(torch.arange(tokens + padding) < tokens)[None],
    )


def pad_documents(documents: Sequence[Example], pad_token_id: int, parts: int = 1) -> MicroBatch:
    """Puts each document in a separate row, padded to the length of the longest document.

    That length is rounded up to a multiple of `parts`. `example_ids` stays empty.
    """
    lengths = [len(document.input_ids) for document in documents]
    row_length = round_up(max(lengths), parts)
    input_ids = np.full((len(documents), row_length), pad_token_id, np.int64)
    labels = np.full((len(documents), row_length), IGNORE_INDEX, np.int64)
    for row, document in enumerate(documents):
        input_ids[row, : lengths[row]] = document.input_ids
        labels[row, : lengths[row]] = document.labels
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.arange(row_length).repeat(len(documents), 1),
        trained_positions=_find_trained_positions(labels),
        cu_seq_lens=None,
        max_document_length=row_length,
        example_ids=(),
        document_lengths=tuple(lengths),
        token_mask=torch.arange(row_length) < torch.tensor(lengths)[:, None],
    )


def _find_trained_positions(labels: Ids) -> Tensor:
    """Finds the positions in the flattened `labels` that have a label: int64[positions].

    Positions without a label follow and round their number up to a multiple of ROUND_TOKENS, as far
    as there are any. They add nothing to the loss.
    """
    labeled = np.flatnonzero(labels != IGNORE_INDEX)
    missing = round_up(len(labeled), ROUND_TOKENS) - len(labeled)
    unlabeled = np.flatnonzero(labels == IGNORE_INDEX)[:missing]
    return torch.from_numpy(np.concatenate((labeled, unlabeled)))


def make_filler(packing: bool, parts: int = 1) -> MicroBatch:
    """Makes the micro-batch of a rank without rows: ROUND_TOKENS x `parts` tokens without a label.

    With it the rank takes part in the step's collectives and adds nothing to the loss. A single
    token would not do: torch.compile treats a size of 1 as a constant and would compile the layers
    a second time.
    """
    tokens = ROUND_TOKENS * parts
    return MicroBatch(
        # token 1, because 0 is often the pad token: see `pack_documents`
        input_ids=torch.ones(1, tokens, dtype=torch.int64),
        labels=torch.full((1, tokens), IGNORE_INDEX, dtype=torch.int64),
        position_ids=torch.arange(tokens)[None],
        trained_positions=torch.zeros(0, dtype=torch.int64),
        cu_seq_lens=torch.tensor([0, tokens], dtype=torch.int32) if packing else None,
        max_document_length=tokens,
        example_ids=(),
        packed_lengths=(tokens,) if packing else None,
        token_mask=torch.zeros(1, tokens, dtype=torch.bool),
    )
