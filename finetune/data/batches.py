"""Batches: what a rank trains on in one optimizer step. The state of the loader is one integer, the step."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import xxhash

from finetune.config.schema import Recipe
from finetune.constants import ROUND_TOKENS, compute_global_batch_size
from finetune.data.collate import Ids, MicroBatch, TokenPart, collate
from finetune.data.examples import Examples
from finetune.data.packing import Rows
from finetune.data.sampler import BatchConfig, arrange_epoch
from finetune.errors import UserError
from finetune.units import counted

if TYPE_CHECKING:  # a training step does not need what reads and tokenizes the data
    from finetune.data.data_report import Report

OnReport = Callable[["Report", list[str]], None]  # the report so far, and what is new in it as lines for the log


class RankInfo(Protocol):
    """What the data needs to know of the world: who this process is among how many, on which node and device, and who among
    those that have the same rows, whose tokens they divide between them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def sequence_rank(self) -> int: ...
    @property
    def sequence_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's share of this rank. The counts are those of all ranks together."""

    step: int  # 0-based
    epoch: float  # epochs done after this step
    micro_batches: tuple[MicroBatch, ...]  # as many on every rank
    tokens: int  # of the step over all ranks, padding not counted
    trained_tokens: int  # of the step over all ranks: those with a label
    chosen_tokens: int = 0  # of trained_tokens, those of each group's first document: of the chosen or rated answers
    groups: int = 0  # of the step over all ranks: pairs of chosen and rejected; documents where none belong together


class Batches(Protocol):
    """The batches of a run for one rank: `StoredBatches` of tokens on disk, `StreamedBatches` of rows read while training."""

    @property
    def config(self) -> BatchConfig: ...

    @property
    def steps(self) -> int:
        """Of the whole run."""

    @property
    def steps_per_epoch(self) -> int | None:
        """None where it is not known."""

    @property
    def fingerprint(self) -> str | None:
        """A hash of the content of the files that are trained on; None where it is not known.

        Not of the rendered text: a chat template may put today's date into it.
        """

    def batches(self, from_step: int = 0, on_report: OnReport | None = None) -> Iterator[StepBatch]:
        """The step batches from `from_step` to the end. `on_report` is called when more of the data has been read."""


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """The batches of a run over `examples`, for one rank."""

    examples: Examples
    config: BatchConfig
    per_device_batch_size: int  # rows in a micro-batch
    steps: int
    world: RankInfo
    threads: int  # that build batches in advance; 0 builds them when asked
    pad_token_id: int
    epoch_rows: Callable[[int], Rows]  # caches the latest epochs

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row."""
        return self.config.max_length * self.examples.group_size

    @property
    def rows_per_epoch(self) -> int:
        return len(self.epoch_rows(0))

    @property
    def steps_per_epoch(self) -> int:
        return ceil(self.rows_per_epoch / self.config.global_batch_size)

    @property
    def fingerprint(self) -> str:
        content = [store.facts["content"] for store in self.examples.stores]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    def fill(self, steps: int = 256) -> float:
        """How full the rows of the first `steps` steps are: of `row_tokens` where packed, else of their longest document."""
        tokens = rows = padded = 0
        for step in range(min(steps, self.steps_per_epoch)):
            of_step = self.rows_of(step)
            tokens += int(self.examples.lengths[np.concatenate(of_step)].sum(dtype=np.int64))
            rows += len(of_step)
            for rank in range(0 if self.config.packing else self.world.size):
                for micro_batch in self._micro_batches(of_step, rank):
                    longest = int(self.examples.lengths[micro_batch].max()) if len(micro_batch) else ROUND_TOKENS
                    padded += longest * max(len(micro_batch), 1)
        return tokens / (rows * self.row_tokens if self.config.packing else padded)

    def rows_of(self, step: int) -> list[Ids]:
        """The rows of optimizer step `step` over all ranks, each the ids of its examples."""
        epoch, within = divmod(step, self.steps_per_epoch)
        rows, size = self.epoch_rows(epoch), self.config.global_batch_size
        return [rows[row] for row in range(within * size, min((within + 1) * size, len(rows)))]

    def step_batch(self, step: int) -> StepBatch:
        """This rank's share of optimizer step `step`: rows rank, rank + size, ... of the step's rows, or its part of their tokens."""
        rows = self.rows_of(step)
        ids = np.concatenate(rows)
        part = TokenPart(self.world.sequence_rank, self.world.sequence_size)
        return StepBatch(
            step=step,
            epoch=(step + 1) / self.steps_per_epoch,
            micro_batches=tuple(
                collate(self.examples, mine, packing=self.config.packing, pad_token_id=self.pad_token_id, part=part)
                for mine in self._micro_batches(rows, self.world.rank)
            ),
            tokens=int(self.examples.lengths[ids].sum(dtype=np.int64)),
            trained_tokens=int(self.examples.trained[ids].sum(dtype=np.int64)),
            chosen_tokens=int(self.examples.trained[ids[:: self.examples.group_size]].sum(dtype=np.int64)),
            groups=len(ids) // self.examples.group_size,
        )

    def _micro_batches(self, rows: list[Ids], rank: int) -> list[Ids]:
        """The example ids of each micro-batch of a rank; as many micro-batches on every rank, the last ones perhaps empty."""
        size = self.per_device_batch_size
        count = ceil(ceil(len(rows) / self.world.size) / size)
        mine = rows[rank :: self.world.size]
        return [np.concatenate([np.zeros(0, np.int64), *mine[i * size : (i + 1) * size]]) for i in range(count)]

    def batches(self, from_step: int = 0, on_report: OnReport | None = None) -> Iterator[StepBatch]:
        """The step batches from `from_step` to the end, built in advance by threads, in pinned memory for CUDA.

        `on_report` is never called: all of the data has been read.
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
        return replace(batch, micro_batches=tuple(micro_batch.pin_memory() for micro_batch in batch.micro_batches))


def make_train_batches(recipe: Recipe, examples: Examples, tokenizer: Any, world: RankInfo) -> StoredBatches:
    """The batches of a run. Raises `UserError` for fewer rows than ranks."""
    config = BatchConfig.from_recipe(recipe, compute_global_batch_size(recipe.batch, world.size))
    size = recipe.batch.per_device_train_batch_size
    train = make_batches(examples, config, world, size, recipe.data.dataloader_num_workers, tokenizer.pad_token_id)
    if train.rows_per_epoch < world.size:
        given, less = "", ""
        if config.packing:
            given = f" ({counted(len(examples), 'example')} packed by max_length {config.max_length})"
            less = ", a smaller max_length, or packing: false"
        raise UserError(
            f"{recipe.place_of('datasets')}: datasets: {counted(train.rows_per_epoch, 'row')}{given} "
            f"{'is' if train.rows_per_epoch == 1 else 'are'} too few for {world.size} ranks; give more data or fewer ranks{less}"
        )
    epochs = recipe.optimization.num_train_epochs
    return replace(train, steps=recipe.optimization.max_steps or ceil(epochs * train.steps_per_epoch))


def make_eval_batches(
    recipe: Recipe, held_out: Examples | None, tokenizer: Any, world: RankInfo
) -> StoredBatches | None:
    """One pass over the held-out examples. Their order does not matter to a loss that weighs every token alike."""
    if held_out is None or not len(held_out):
        return None
    size = recipe.batch.per_device_eval_batch_size or recipe.batch.per_device_train_batch_size
    config = BatchConfig.from_recipe(recipe, size * world.size)
    return make_batches(held_out, config, world, size, recipe.data.dataloader_num_workers, tokenizer.pad_token_id)


def make_batches(
    examples: Examples,
    config: BatchConfig,
    world: RankInfo,
    per_device_batch_size: int,
    threads: int = 0,
    pad_token_id: int | None = None,
) -> StoredBatches:
    """The batches of one epoch; `replace` its `steps` for more or fewer."""
    rows = lru_cache(maxsize=2)(partial(arrange_epoch, examples.lengths, config, examples.group_size))
    batches = StoredBatches(examples, config, per_device_batch_size, 0, world, threads, pad_token_id or 0, rows)
    return replace(batches, steps=batches.steps_per_epoch)
