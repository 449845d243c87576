"""The schedule of sampling: which prompts each optimizer step trains on, and when they are sampled.

The completions for several consecutive steps, a generation, are sampled together before the first
of these steps. Each step trains on the prompts of one step, its `prompts_step`. If `num_iterations`
is above 1, several steps of a generation have the same `prompts_step`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Share(NamedTuple):
    """A part of a generation: the prompts of one step, and when training first uses them."""

    prompts_step: int
    first_trained_at: int  # the step that first trains on their completions


@dataclass(frozen=True, slots=True)
class Generations:
    """The generations of a run.

    The steps of a generation train on its `steps_per_generation` shares in turn, one share a step,
    and pass over them `num_iterations` times.

    >>> run = Generations(steps=8, steps_per_generation=2, num_iterations=2)
    >>> [run.find_prompts_step(step) for step in range(8)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    >>> [tuple(share) for share in run.list_shares(sampled_at=4)]
    [(2, 4), (3, 5)]
    """

    steps: int  # optimizer steps of the run
    steps_per_generation: int
    num_iterations: int

    @property
    def updates_per_generation(self) -> int:
        """The optimizer steps of a generation."""
        return self.num_iterations * self.steps_per_generation

    def begins_at(self, step: int) -> bool:
        """Returns whether `step` is the first step of a generation, before which it is sampled."""
        return step % self.updates_per_generation == 0

    def find_prompts_step(self, step: int) -> tuple[int, int]:
        """Returns (the `prompts_step` of `step`, how often these prompts were trained on before).

        If the run ends within a generation, this generation has fewer shares, so that each is still
        trained on `num_iterations` times as far as the remaining steps allow.
        """
        generations_before, update = divmod(step, self.updates_per_generation)
        generation_start = step - update
        updates_left = self.steps - generation_start
        shares = min(self.steps_per_generation, math.ceil(updates_left / self.num_iterations))
        times_trained, share = divmod(update, shares)
        return generations_before * self.steps_per_generation + share, times_trained

    def list_shares(self, sampled_at: int) -> Iterator[Share]:
        """Yields the shares of the generation that is sampled before the step `sampled_at`."""
        end = min(sampled_at + self.updates_per_generation, self.steps)
        for step in range(sampled_at, end):
            prompts_step, times_trained = self.find_prompts_step(step)
            if times_trained:  # the second pass over the same prompts begins
                return
            yield Share(prompts_step, first_trained_at=step)

    def list_later(self, step: int, count: int) -> Iterator[int]:
        """Yields the first steps of the `count` generations after the one that begins at `step`.

        There are fewer if the run ends before them.
        """
        length = self.updates_per_generation
        end = min(step + (count + 1) * length, self.steps)
        yield from range(step + length, end, length)
