"""Batches: what a rank trains on in one optimizer step. The state of the loader is one integer, the step."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.constants import IGNORE_INDEX, ROUND_TOKENS
from finetune.data.examples import Examples
from finetune.data.sampler import Arrangement, EpochRows, epoch_rows

Ids = NDArray[np.int64]


class Ranks(Protocol):
    """What the data needs to know of the world: who this process is among how many, on which node and device."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank.

    Packed, all rows lie one after another in a single row, and `cu_seq_lens` says where each document begins; fewer than
    ROUND_TOKENS tokens of padding come last, as a document of their own. Unpacked, each row is one document, padded on the right; attention is causal and padding comes last without
    labels, so that no mask is needed. A rank that has no row left in a step gets a `filler`.
    """

    input_ids: Tensor  # int64[rows, tokens]
    labels: Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    position_ids: Tensor  # int64[rows, tokens]: from 0 in every document
    # int64[trained tokens, filled up to a multiple of ROUND_TOKENS with others]: where the flattened labels are. Found on
    # the host: a GPU's search would make the host wait.
    trained_positions: Tensor
    cu_seq_lens: Tensor | None  # int32[documents + 1]: where documents begin in the packed row, and its end
    max_document_length: int
    example_ids: tuple[int, ...]

    @property
    def inputs(self) -> dict[str, Any]:
        """The model's keyword arguments."""
        names = ("input_ids", "labels", "position_ids", "trained_positions")
        inputs: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.cu_seq_lens is not None:
            inputs |= {"cu_seq_lens": self.cu_seq_lens, "max_document_length": self.max_document_length}
        return inputs

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`; from pinned memory the copy does not wait."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        """The same in pinned host memory."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return replace(
            self,
            input_ids=change(self.input_ids),
            labels=change(self.labels),
            position_ids=change(self.position_ids),
            trained_positions=change(self.trained_positions),
            cu_seq_lens=None if self.cu_seq_lens is None else change(self.cu_seq_lens),
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's share of this rank. The counts are those of all ranks together."""

    step: int  # 0-based
    epoch: float  # epochs done once this step is
    micro_batches: tuple[MicroBatch, ...]  # as many on every rank
    tokens: int  # of the step over all ranks, padding not counted
    trained_tokens: int  # of the step over all ranks: those with a label


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run over `examples`, for one rank."""

    examples: Examples
    arrangement: Arrangement
    per_device_batch_size: int  # rows in a micro-batch
    steps: int  # of the whole run
    ranks: Ranks
    threads: int  # that build batches ahead; 0 builds them when asked
    pad_token_id: int
    epoch_rows: Callable[[int], EpochRows]  # remembers the latest epochs

    @property
    def rows_per_epoch(self) -> int:
        return self.epoch_rows(0).rows

    @property
    def steps_per_epoch(self) -> int:
        return ceil(self.rows_per_epoch / self.arrangement.global_batch_size)

    def fill(self, steps: int = 256) -> float:
        """How full the rows of the first `steps` steps are: of max_length where packed, else of their longest row."""
        tokens = rows = padded = 0
        for step in range(min(steps, self.steps_per_epoch)):
            of_step = self.rows_of(step)
            tokens += int(self.examples.lengths[np.concatenate(of_step)].sum(dtype=np.int64))
            rows += len(of_step)
            for rank in range(0 if self.arrangement.packing else self.ranks.size):
                for micro_batch in self._micro_batches(of_step, rank):
                    longest = max((int(self.examples.lengths[row].max()) for row in micro_batch), default=ROUND_TOKENS)
                    padded += longest * max(len(micro_batch), 1)
        return tokens / (rows * self.arrangement.max_length if self.arrangement.packing else padded)

    def rows_of(self, step: int) -> list[Ids]:
        """The rows of optimizer step `step` over all ranks, each the ids of its examples."""
        epoch, within = divmod(step, self.steps_per_epoch)
        rows, size = self.epoch_rows(epoch), self.arrangement.global_batch_size
        return [rows.of(row) for row in range(within * size, min((within + 1) * size, rows.rows))]

    def step_batch(self, step: int) -> StepBatch:
        """This rank's share of optimizer step `step`: rows rank, rank + size, ... of the step's rows."""
        rows = self.rows_of(step)
        ids = np.concatenate(rows)
        build = self._packed if self.arrangement.packing else self._padded
        return StepBatch(
            step=step,
            epoch=(step + 1) / self.steps_per_epoch,
            micro_batches=tuple(map(build, self._micro_batches(rows, self.ranks.rank))),
            tokens=int(self.examples.lengths[ids].sum(dtype=np.int64)),
            trained_tokens=int(self.examples.trained[ids].sum(dtype=np.int64)),
        )

    def _micro_batches(self, rows: list[Ids], rank: int) -> list[list[Ids]]:
        """The rows of each micro-batch of a rank; as many micro-batches on every rank, the last ones perhaps empty."""
        size = self.per_device_batch_size
        count = ceil(ceil(len(rows) / self.ranks.size) / size)
        mine = rows[rank :: self.ranks.size]
        return [mine[i * size : (i + 1) * size] for i in range(count)]

    def batches(self, start_step: int = 0) -> Iterator[StepBatch]:
        """The step batches from `start_step` to the end, built ahead by threads, in pinned memory where it pays."""
        steps = range(start_step, self.steps)
        if self.threads == 0:
            yield from map(self._ready, steps)
            return
        ahead: deque[Future[StepBatch]] = deque()
        with ThreadPoolExecutor(self.threads, thread_name_prefix="batches") as pool:
            try:
                for step in steps:
                    ahead.append(pool.submit(self._ready, step))
                    if len(ahead) > 2 * self.threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def _ready(self, step: int) -> StepBatch:
        batch = self.step_batch(step)
        if self.ranks.device.type != "cuda":
            return batch
        return replace(batch, micro_batches=tuple(micro_batch.pinned() for micro_batch in batch.micro_batches))

    def _packed(self, rows: list[Ids]) -> MicroBatch:
        ids = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if len(ids) == 0:
            return filler(packed=True)
        examples = [self.examples[example_id] for example_id in ids]
        lengths = self.examples.lengths[ids].astype(np.int64)
        tokens = int(lengths.sum())
        padding = -tokens % ROUND_TOKENS
        input_ids = np.full(tokens + padding, self.pad_token_id, np.int64)
        labels = np.full(tokens + padding, IGNORE_INDEX, np.int64)
        np.concatenate([example.input_ids for example in examples], out=input_ids[:tokens])
        np.concatenate([example.labels for example in examples], out=labels[:tokens])
        lengths = np.append(lengths, padding) if padding else lengths  # a document of its own, which nothing sees
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids)[None],
            labels=torch.from_numpy(labels)[None],
            position_ids=torch.from_numpy(positions)[None],
            trained_positions=_trained_positions(labels),
            cu_seq_lens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
            max_document_length=int(lengths.max()),
            example_ids=tuple(ids.tolist()),
        )

    def _padded(self, rows: list[Ids]) -> MicroBatch:
        ids = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if len(ids) == 0:
            return filler(packed=False)
        longest = int(self.examples.lengths[ids].max())
        input_ids = np.full((len(ids), longest), self.pad_token_id, np.int64)
        labels = np.full((len(ids), longest), IGNORE_INDEX, np.int64)
        for row, example_id in enumerate(ids):
            example = self.examples[example_id]
            input_ids[row, : len(example.input_ids)] = example.input_ids
            labels[row, : len(example.labels)] = example.labels
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.arange(longest).repeat(len(ids), 1),
            trained_positions=_trained_positions(labels),
            cu_seq_lens=None,
            max_document_length=longest,
            example_ids=tuple(ids.tolist()),
        )


def batches_of(
    examples: Examples,
    arrangement: Arrangement,
    ranks: Ranks,
    *,
    per_device_batch_size: int,
    threads: int = 0,
    pad_token_id: int = 0,
) -> Batches:
    """The batches of one epoch; `replace` its `steps` for more or fewer."""
    rows = lru_cache(maxsize=2)(partial(epoch_rows, examples.lengths, arrangement))
    batches = Batches(examples, arrangement, per_device_batch_size, 0, ranks, threads, pad_token_id, rows)
    return replace(batches, steps=batches.steps_per_epoch)


def _trained_positions(labels: Ids) -> Tensor:
    """Where the flattened `labels` are, and then places without one, which add nothing to the loss."""
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    others = np.flatnonzero(labels == IGNORE_INDEX)[: -len(trained) % ROUND_TOKENS]
    return torch.from_numpy(np.concatenate((trained, others)))


def filler(packed: bool) -> MicroBatch:
    """ROUND_TOKENS tokens without a label, for a rank that has no row: it takes part in the step's collectives and adds
    nothing. Not a single token: torch.compile treats a size of 1 as a constant, and would compile the layers once more."""
    return MicroBatch(
        input_ids=torch.zeros(1, ROUND_TOKENS, dtype=torch.int64),
        labels=torch.full((1, ROUND_TOKENS), IGNORE_INDEX, dtype=torch.int64),
        position_ids=torch.arange(ROUND_TOKENS)[None],
        trained_positions=torch.zeros(0, dtype=torch.int64),
        cu_seq_lens=torch.tensor([0, ROUND_TOKENS], dtype=torch.int32) if packed else None,
        max_document_length=ROUND_TOKENS,
        example_ids=(),
    )
