"""Which prompts each optimizer step of a run trains on, and at which step they are sampled.

A generation is the steps whose completions are sampled together, before the first of them. Each
trains on the prompts of one step, its `prompts_step`; with `num_iterations` above 1 several steps
share one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Share(NamedTuple):
    """The prompts of one step, and the step that first trains on their completions."""

    prompts_step: int
    first_trained_at: int


@dataclass(frozen=True, slots=True)
class Generations:
    """The generations of a run: each trains on the prompts of all its shares in turn, and then on
    all of them again, `num_iterations` times.

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
        """Whether a generation is sampled before `step`."""
        return step % self.updates_per_generation == 0

    def find_prompts_step(self, step: int) -> tuple[int, int]:
        """Returns (the step of the prompts, how often they have been trained on before) of an
        optimizer step.
        """
        generations_before, update = divmod(step, self.updates_per_generation)
        updates_left = self.steps - (step - update)  # of this generation and later ones
        # the run may end within the generation
        shares = min(self.steps_per_generation, math.ceil(updates_left / self.num_iterations))
        times_trained, own = divmod(update, shares)
        return generations_before * self.steps_per_generation + own, times_trained

    def list_shares(self, sampled_at: int) -> Iterator[Share]:
        """Yields the shares of the generation that is sampled at the step `sampled_at`."""
        end = min(sampled_at + self.updates_per_generation, self.steps)
        for step in range(sampled_at, end):
            prompts_step, times_trained = self.find_prompts_step(step)
            if times_trained:  # the second pass over the same prompts begins
                return
            yield Share(prompts_step, first_trained_at=step)

    def list_later(self, step: int, count: int) -> Iterator[int]:
        """Yields the steps at which the next `count` generations after that of `step` are
        sampled.
        """
        end = min(step + (count + 1) * self.updates_per_generation, self.steps)
        yield from range(step + self.updates_per_generation, end, self.updates_per_generation)
