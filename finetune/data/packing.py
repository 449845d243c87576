"""How examples become rows, and rows the micro-batches of a rank.

Their order is a pure function of (seed, epoch): the state of the loader is one integer, the step.
"""

import json
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
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX, ROUND_TOKENS, ceil_div, round_up
from finetune.data.batches import Ids, MicroBatch, StepBatch
from finetune.data.examples import Example, Examples, expand_groups, make_generator
from finetune.data.images import ImageProcessor
from finetune.data.messages import BadRow
from finetune.data.token_store import Int32s, Int64s
from finetune.distributed.world import DataParallelRank
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class Rows:
    """Which documents share a row. Returned by `pack` and `arrange_epoch`."""

    ids: Int64s  # [documents], row after row
    starts: Int64s  # [rows + 1]: row r holds ids[starts[r]:starts[r + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Int64s:
        """int64[documents of the row]: their ids."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def take(self, order: Int64s) -> "Rows":
        """The rows in another order."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        source = np.repeat(self.starts[:-1][order] - starts[:-1], sizes) + np.arange(len(self.ids))
        return Rows(self.ids[source], starts)

    def expand(self, size: int) -> "Rows":
        """The rows of documents, where `ids` are those of groups of `size` documents."""
        if size == 1:
            return self
        return Rows(expand_groups(self.ids, size), self.starts * size)


def pack(lengths: NDArray[np.integer], capacity: int) -> Rows:
    """Packs documents into rows of `capacity` tokens, best fit decreasing.

    The longest document comes first. Each goes into the fullest row that still has room for it, or
    into a new row. Documents of equal length keep their order in `lengths`. It takes at most 11/9
    of the fewest rows possible, plus one (Johnson 1974).

    The result is that of the one-by-one algorithm. But documents of one length and rows of one free
    space are moved together, so that the loop runs over distinct lengths: a million documents take
    a fraction of a second.

    Args:
        lengths: [documents]: tokens of each, 1 to `capacity`.
        capacity: Tokens of a row.

    >>> pack(np.array([2, 6, 3, 5]), 8)
    Rows(ids=array([1, 0, 3, 2]), starts=array([0, 2, 4]))
    """
    if len(lengths) == 0:
        return Rows(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if int(lengths.min()) < 1 or int(lengths.max()) > capacity:
        raise ValueError(
            f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {capacity}"
        )
    key_type = np.uint16 if capacity < 2**16 else np.uint32  # numpy sorts 16-bit keys by radix
    order = np.argsort((capacity - lengths).astype(key_type), kind="stable")
    moves = _plan_moves(np.bincount(lengths, minlength=capacity + 1), capacity)
    first_row, rows, per_row = moves.T
    moved = rows * per_row  # documents of each move
    # Of each document, in `order`: its move, its place among the documents of that move, its row.
    move_of = np.repeat(np.arange(len(moves)), moved)
    place = np.arange(len(order)) - np.repeat(np.cumsum(moved) - moved, moved)
    row_of = first_row[move_of] + place // per_row[move_of]
    by_row = np.argsort(row_of, kind="stable")
    row_sizes = np.bincount(row_of)
    return Rows(order[by_row].astype(np.int64), np.concatenate(([0], np.cumsum(row_sizes))))


def _plan_moves(count_of_length: Int64s, capacity: int) -> Int64s:
    """Plans which rows take the documents, from the longest documents on.

    Rows with the same free space are kept as ranges of row numbers. The fullest rows with room,
    `free` tokens each, take documents of `length` until less than `length` is left in them: after
    its first document such a row is fuller still, so best fit stays with it.

    Args:
        count_of_length: [capacity + 1]: documents of each length.
        capacity: Tokens of a row.

    Returns:
        int64[moves, 3]: first row, number of rows, and number of documents put into each of them.
    """
    moves: list[tuple[int, int, int]] = []
    ranges: dict[int, list[tuple[int, int]]] = {}  # free tokens -> ranges (first row, rows)
    spaces: list[int] = []  # the keys of `ranges`, ascending
    opened = 0

    def put(free: int, first: int, rows: int) -> None:
        if free == 0 or rows == 0:
            return
        if free not in ranges:
            insort(spaces, free)
            ranges[free] = []
        ranges[free].append((first, rows))

    for length in np.flatnonzero(count_of_length)[::-1].tolist():
        left = int(count_of_length[length])
        while left:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                free = spaces[at]
                first, rows = ranges[free].pop()
                if not ranges[free]:
                    del ranges[free], spaces[at]
            else:
                free = capacity
                first = opened
                rows = ceil_div(left, capacity // length)
                opened += rows
            per_row = free // length
            used = min(rows, left // per_row)
            if used:
                moves.append((first, used, per_row))
                put(free - per_row * length, first, used)
                left -= used * per_row
            if used < rows and left:  # fewer than `per_row` are left: one row takes them
                moves.append((first + used, 1, left))
                put(free - left * length, first + used, 1)
                used += 1
                left = 0
            put(free, first + used, rows - used)
    return np.array(moves, dtype=np.int64)


GROUP_STEPS = 64  # unpacked, the rows of so many steps are sorted by length together


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The keys that decide the order of the data: how examples become rows, and rows steps."""

    seed: int
    packing: bool
    max_length: int  # tokens in a packed row, for each document of a group
    global_batch_size: int  # rows in a step
    # so that each step has as many groups, whatever their lengths, as negatives of each other
    one_group_a_row: bool = False

    @classmethod
    def from_recipe(cls, recipe: Recipe, rows: int) -> Self:
        """The recipe's, with `rows` rows in a step."""
        return cls(
            seed=recipe.run.seed,
            packing=recipe.data.packing and not recipe.method_facts.samples,
            max_length=recipe.data.max_length,
            global_batch_size=rows,
            one_group_a_row=recipe.method_facts.reads_queries,
        )


def arrange_epoch(lengths: Int32s, config: BatchConfig, group_size: int, epoch: int) -> Rows:
    """Arranges the rows of an epoch, which hold every example once.

    With one group in a row (`one_group_a_row`), rows come in the order in which they are drawn, and
    each micro-batch is packed when it is made. Packed, examples of equal length change places from
    epoch to epoch, so that each epoch composes its rows differently while their number stays.
    Unpacked, rows of similar length share a step, so that little is padding.

    The last step of an epoch holds what remains, and may be short. The examples of a group stay
    side by side in one row.

    Args:
        lengths: [examples]: tokens of each.
        config: What decides the order.
        group_size: Examples of a group.
        epoch: 0-based.
    """
    group_lengths = lengths.reshape(-1, group_size).sum(1)
    return _arrange_groups(group_lengths, config, group_size, epoch).expand(group_size)


def _arrange_groups(lengths: Int32s, config: BatchConfig, group_size: int, epoch: int) -> Rows:
    """Arranges groups of `lengths` tokens, as `arrange_epoch`."""
    random = make_generator(config.seed, "order", epoch)
    drawn = random.permutation(len(lengths))
    if config.one_group_a_row:
        return Rows(drawn, np.arange(len(lengths) + 1))
    if not config.packing:
        drawn = _group_by_length(drawn, lengths, config.global_batch_size, random)
        return Rows(drawn, np.arange(len(lengths) + 1))
    packed = pack(lengths[drawn], config.max_length * group_size)
    return Rows(drawn[packed.ids], packed.starts).take(random.permutation(len(packed)))


def _group_by_length(
    drawn: Int64s, lengths: Int32s, step_rows: int, random: np.random.Generator
) -> Int64s:
    """Reorders unpacked rows so that those of a step have similar lengths.

    Within a step the longest row comes first; the steps come in random order.

    Args:
        drawn: [rows]: their ids, in the order in which they were drawn.
        lengths: [rows]: tokens of each, by id.
        step_rows: Rows of a step.
        random: Orders the steps.
    """
    whole = []
    short = []  # at most one step, of the last stretch: it ends the epoch
    stretch = step_rows * GROUP_STEPS
    for rows in np.split(drawn, range(stretch, len(drawn), stretch)):
        longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
        for start in range(0, len(rows), step_rows):
            step = longest_first[start : start + step_rows]
            if len(step) == step_rows:
                whole.append(step)
            else:
                short.append(step)
    if not whole and not short:
        return drawn
    return np.concatenate([whole[i] for i in random.permutation(len(whole))] + short)


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """The batches of a run over `examples`, for one rank."""

    examples: Examples
    config: BatchConfig
    per_device_batch_size: int  # rows in a micro-batch
    steps: int  # in the whole run
    world: DataParallelRank
    threads: int  # that build batches in advance; 0 builds them when asked
    pad_token_id: int
    epoch_rows: Callable[[int], Rows]  # caches the latest epochs
    images: ImageProcessor | None = None  # None: the examples hold none
    # Optimizer steps on the same rows. Above 1 where a method samples: `steps` and
    # `steps_per_epoch` count all of them, and it makes its batches from `rows_of` alone.
    iterations: int = 1

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row."""
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

        The rendered text is left out, because it may contain a date.
        """
        content = [store.facts["content"] for store in self.examples.stores]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    def rows_of(self, rows_step: int) -> list[Ids]:
        """The rows of a step over all ranks, each as the ids of its examples.

        rows_step: 0-based; the `iterations` optimizer steps on the same rows count as one.
        """
        epoch, within = divmod(rows_step, self.steps_per_epoch // self.iterations)
        rows = self.epoch_rows(epoch)
        size = self.config.global_batch_size
        return [rows[row] for row in range(within * size, min((within + 1) * size, len(rows)))]

    def step_batch(self, step: int) -> StepBatch:
        """Makes this rank's share of step `step`: the rows of `deal_rows`, or where ranks share
        rows its part of their tokens. Only with one iteration.
        """
        rows = self.rows_of(step)
        ids = np.concatenate(rows)
        first_ids = ids[:: self.examples.group_size]  # of each group
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
            trained_tokens=int(self.examples.trained[ids].sum(dtype=np.int64)),
            chosen_tokens=int(self.examples.trained[first_ids].sum(dtype=np.int64)),
            groups=len(first_ids),
        )

    def list_micro_batches(self, rows: list[Ids], rank: int) -> list[Ids]:
        """Lists the example ids of each micro-batch of a rank; see `deal_rows`."""
        return deal_rows(rows, rank, self.world.size, self.per_device_batch_size)

    def batches(self, from_step: int = 0, on_report: object = None) -> Iterator[StepBatch]:
        """Yields the step batches from `from_step` to the end.

        Threads build them in advance; for CUDA they are in pinned memory. `on_report` is what
        streamed batches call when all data is read, and ignored here: it has been.
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
        batch = self.step_batch(step)
        if self.world.device.type != "cuda":
            return batch
        return replace(
            batch,
            micro_batches=tuple(micro_batch.pin_memory() for micro_batch in batch.micro_batches),
        )


def deal_rows(rows: Sequence[Ids], rank: int, ranks: int, size: int) -> list[Ids]:
    """Deals the rows of a step to ranks, and lists the micro-batches of one rank.

    Rank r has the rows r, r + ranks, ... Every rank has as many micro-batches; the last may be
    empty.

    Args:
        rows: Of a step, each the ids of its examples.
        rank: Whose micro-batches are listed.
        ranks: The ranks that share the rows.
        size: Rows in a micro-batch.

    Returns:
        int64[examples] for each micro-batch: their ids.
    """
    count = ceil(ceil(len(rows) / ranks) / size)
    own = rows[rank::ranks]
    empty = np.zeros(0, np.int64)
    return [np.concatenate([empty, *own[i * size : (i + 1) * size]]) for i in range(count)]


def make_batches(
    examples: Examples,
    config: BatchConfig,
    world: DataParallelRank,
    per_device_batch_size: int,
    tokenizer: Any = None,
    threads: int = 0,
) -> StoredBatches:
    """Makes the batches of one epoch for a rank; `replace` their `steps` for more or fewer.

    Args:
        examples: What to train on, or to evaluate by.
        config: What decides their order.
        world: The rank.
        per_device_batch_size: Rows in a micro-batch.
        tokenizer: As `load_tokenizer` gives it; None for tokens without text.
        threads: They build batches in advance; 0: none.

    Raises:
        UserError: A row without an image holds the token of one.
    """
    arrange = partial(arrange_epoch, examples.lengths, config, examples.group_size)
    rows = lru_cache(maxsize=2)(arrange)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    images = None
    if examples.has_images:
        images = tokenizer.images
        examples.refuse_typed_images(images.token_ids)
    batches = StoredBatches(
        examples=examples,
        config=config,
        per_device_batch_size=per_device_batch_size,
        steps=0,
        world=world,
        threads=threads,
        pad_token_id=pad,
        epoch_rows=rows,
        images=images,
    )
    return replace(batches, steps=batches.steps_per_epoch)


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
    """Makes a micro-batch of the examples `ids`; a filler where there are none.

    Rated examples alternate with mismatched ones (another prompt's answer), which become a
    micro-batch within the micro-batch.

    Args:
        examples: Of the run.
        ids: int64[examples]: which of them.
        packing: Whether all stand in one row.
        pad_token_id: It fills up rows that are not packed.
        part: Which part of the tokens this rank has.
        parts: The ranks that divide the tokens of a row.
        images: The processor that makes pixels; None: the examples hold no image.
    """
    if not examples.is_rated:
        micro_batch = _collate(examples, ids, packing, pad_token_id, part, parts)
        if images is None:
            return micro_batch
        return add_images(micro_batch, micro_batch.example_ids, examples, images)
    ratings = torch.from_numpy(examples.take(ids).find_ratings())
    rated = _collate(examples, ids[0::2], packing, pad_token_id, part, parts)
    mismatched = _collate(examples, ids[1::2], packing, pad_token_id, part, parts)
    return replace(rated, desirable=ratings > 0, mismatched=mismatched)


def _collate(
    examples: Examples, ids: Ids, packing: bool, pad_token_id: int, part: int, parts: int
) -> MicroBatch:
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
    """Adds the pixels of its documents' images to a micro-batch.

    Args:
        micro_batch: Without images.
        ids: For each document the example whose images it has.
        examples: Of the run.
        images: The processor that makes the pixels.

    Raises:
        UserError: An image cannot be read.
    """
    read = [image for example_id in ids for image in examples.read_images(example_id)]
    try:
        inputs = images.make_inputs(read) if read else images.blank_inputs
    except BadRow as problem:
        raise UserError(f"one of {', '.join(map(examples.where, ids))}: {problem}") from None
    return replace(micro_batch, images=inputs, image_counts=tuple(map(examples.count_images, ids)))


def _take_part(micro_batch: MicroBatch, part: int, parts: int) -> MicroBatch:
    """Takes a rank's part of the tokens of each row, whose number `parts` divides."""
    tokens = micro_batch.labels.shape[1] // parts
    first = part * tokens
    names = ("input_ids", "labels", "position_ids", "token_mask")
    mine = {
        name: getattr(micro_batch, name)[:, first : first + tokens].contiguous() for name in names
    }
    return replace(
        micro_batch,
        **mine,
        trained_positions=_find_trained_positions(mine["labels"].numpy()),
        first_token=first,
    )


def pack_documents(documents: Sequence[Example], parts: int = 1) -> MicroBatch:
    """Packs documents one after another into a single row, filled up so that `parts` divides it.

    `example_ids` are left empty.
    """
    document_lengths = [len(document.input_ids) for document in documents]
    tokens = sum(document_lengths)
    padding = -tokens % (ROUND_TOKENS * parts)
    # The padding repeats a token of the text. The pad token's embedding may be zero, and where a
    # document holds nothing else, Gemma 3n, which takes the square root of its states' mean square,
    # has a gradient of 0 x infinity.
    input_ids = np.full(tokens + padding, documents[0].input_ids[0], np.int64)
    labels = np.full(tokens + padding, IGNORE_INDEX, np.int64)
    np.concatenate([document.input_ids for document in documents], out=input_ids[:tokens])
    np.concatenate([document.labels for document in documents], out=labels[:tokens])
    # The padding is a document of its own, which no other attends to.
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
    """Puts each document in a row of its own, padded to the longest, whose length `parts` divides.

    `example_ids` are left empty.
    """
    lengths = [len(document.input_ids) for document in documents]
    longest = round_up(max(lengths), parts)
    input_ids = np.full((len(documents), longest), pad_token_id, np.int64)
    labels = np.full((len(documents), longest), IGNORE_INDEX, np.int64)
    for row, document in enumerate(documents):
        input_ids[row, : lengths[row]] = document.input_ids
        labels[row, : lengths[row]] = document.labels
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.arange(longest).repeat(len(documents), 1),
        trained_positions=_find_trained_positions(labels),
        cu_seq_lens=None,
        max_document_length=longest,
        example_ids=(),
        document_lengths=tuple(lengths),
        token_mask=torch.arange(longest) < torch.tensor(lengths)[:, None],
    )


def _find_trained_positions(labels: Ids) -> Tensor:
    """Finds the positions of labels in the flattened `labels`.

    Positions without a label follow, up to a multiple of ROUND_TOKENS; they add nothing to the
    loss.
    """
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    missing = round_up(len(trained), ROUND_TOKENS) - len(trained)
    others = np.flatnonzero(labels == IGNORE_INDEX)[:missing]
    return torch.from_numpy(np.concatenate((trained, others)))


def make_filler(packing: bool, parts: int = 1) -> MicroBatch:
    """Makes the micro-batch of a rank that has no row: ROUND_TOKENS tokens without a label.

    With it the rank takes part in the step's collectives and adds nothing. It is not a single
    token: torch.compile treats a size of 1 as a constant, and would compile the layers again.
    """
    tokens = ROUND_TOKENS * parts
    return MicroBatch(
        # 0 is often the pad token, see `pack_documents`
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
