"""The order of the data: a pure function of (seed, epoch, index), the same for every number of ranks and threads."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Recipe
from finetune.data.packing import Rows, pack

GROUP_STEPS = 64  # steps, among the rows of which unpacked rows are sorted by length


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """What decides the order of the data: how examples become rows, and rows steps."""

    seed: int
    packing: bool
    max_length: int  # tokens in a packed row, for each document of a group
    global_batch_size: int  # rows in a step

    @classmethod
    def from_recipe(cls, recipe: Recipe, rows: int) -> Self:
        """The recipe's, with `rows` rows in a step."""
        return cls(
            seed=recipe.run.seed,
            packing=recipe.data.packing and not recipe.method_facts.samples,
            max_length=recipe.data.max_length,
            global_batch_size=rows,
        )


def make_generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """Random numbers that are a pure function of the arguments; each purpose has its own."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number, *purpose.encode()])))


def arrange_epoch(lengths: NDArray[np.int32], config: BatchConfig, group_size: int, epoch: int) -> Rows:
    """The rows of epoch `epoch` (0-based) over examples of `lengths` tokens: every example once.

    Packed, examples of equal length change places from epoch to epoch, so that each epoch composes its rows differently
    while their number stays. Unpacked, rows of similar length share a step, so that little is padding. The last,
    short step of an epoch holds what remains. The `group_size` examples of a group stay side by side in one row.
    """
    return _arrange_groups(lengths.reshape(-1, group_size).sum(1), config, group_size, epoch).expand(group_size)


def _arrange_groups(lengths: NDArray[np.int32], config: BatchConfig, group_size: int, epoch: int) -> Rows:
    random = make_generator(config.seed, "order", epoch)
    drawn = random.permutation(len(lengths))
    if not config.packing:
        drawn = _group_by_length(drawn, lengths, config.global_batch_size, random)
        return Rows(drawn, np.arange(len(lengths) + 1))
    packed = pack(lengths[drawn], config.max_length * group_size)
    return Rows(drawn[packed.ids], packed.starts).take(random.permutation(len(packed)))


def _group_by_length(
    drawn: NDArray[np.int64], lengths: NDArray[np.int32], step_rows: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """`drawn` with the rows of each step of similar length, longest first within it, and the steps in random order."""
    steps = [
        group[np.argsort(-lengths[group], kind="stable")][start : start + step_rows]
        for group in np.split(drawn, range(step_rows * GROUP_STEPS, len(drawn), step_rows * GROUP_STEPS))
        for start in range(0, len(group), step_rows)
    ]
    whole = [step for step in steps if len(step) == step_rows]
    short = [step for step in steps if len(step) < step_rows]  # at most one: it ends the epoch
    return np.concatenate([whole[i] for i in random.permutation(len(whole))] + short) if steps else drawn
