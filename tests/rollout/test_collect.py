"""Which prompts a step samples and trains on, with a sampler whose rewards are given."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finetune.config.reader import read_recipe
from finetune.rollout.collect import Rollouts
from finetune.rollout.engine import Ended, Rollout, Sampled

SIZE, GENERATIONS, EXAMPLES = 4, 2, 40


def make_rollouts(steps: int, flat: Any, *keys: str) -> tuple[Rollouts, list[tuple[int, list[int], int]]]:
    """Rollouts over `EXAMPLES` prompts, and what their sampler is asked for: (step, prompts, first place). The completions of a
    prompt get the same reward where `flat` says so."""
    asked: list[tuple[int, list[int], int]] = []

    def roll_out(examples: Any, ids: Any, step: int, generations: int, first_place: int = 0) -> Rollout:
        asked.append((step, ids.tolist(), first_place))
        rewards = np.array([0.0 if flat(i) else float(j) for i in ids.tolist() for j in range(generations)])
        sampled = [Sampled([1], [-1.0], 0.0, Ended.CUT)] * len(rewards)
        found = np.repeat(ids, generations), [[7]] * len(rewards), sampled, rewards[:, None], rewards
        return Rollout(*found, 0, generations, len(ids), sum(map(flat, ids.tolist())))

    given = ["method=grpo", "rewards=[length]", f"num_generations={GENERATIONS}", *keys]
    recipe = read_recipe(None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", *given])
    sampler: Any = SimpleNamespace(recipe=recipe, roll_out=roll_out)
    rows = [[np.array([i]) for i in range(first, first + SIZE)] for first in range(0, EXAMPLES, SIZE)]
    prompts: Any = SimpleNamespace(examples=range(EXAMPLES), steps=steps, rows_of=lambda step: rows[step % len(rows)])
    return Rollouts(sampler, prompts), asked


def test_flat_groups_are_drawn_again_until_there_are_enough() -> None:
    rollouts, asked = make_rollouts(1, lambda i: i % 3 > 0, "max_num_gen_batches=50")
    found = rollouts._sample(0, 0)
    assert found.example_ids[::GENERATIONS].tolist()[:2] == [0, 3] and len(found.rewards) == SIZE * GENERATIONS
    assert all(i % 3 == 0 for i in found.example_ids.tolist())
    assert [len(ids) for _, ids, _ in asked[:2]] == [4, 2]  # only as many as were missing
    drawn = [i for _, ids, _ in asked for i in ids]
    assert len(set(drawn)) == len(drawn)
    assert [place for _, _, place in asked] == np.cumsum([0, *(len(ids) for _, ids, _ in asked)]).tolist()[:-1]
    assert found.sampled_groups == len(drawn) and found.flat_groups == sum(i % 3 > 0 for i in drawn)
    again, _ = make_rollouts(1, lambda i: i % 3 > 0, "max_num_gen_batches=50")
    assert again._sample(0, 0).example_ids.tolist() == found.example_ids.tolist()


@pytest.mark.parametrize(("signal", "groups"), [({0}, 1), (set(), SIZE)])
def test_the_draws_are_bounded(signal: set[int], groups: int) -> None:
    """Fewer groups where the bound is reached; all of them where none has a signal, which then teach nothing."""
    rollouts, asked = make_rollouts(1, lambda i: i not in signal, "max_num_gen_batches=3")
    found = rollouts._sample(0, 0)
    assert len(asked) == 3 and len(found.rewards) == groups * GENERATIONS
    every, asked = make_rollouts(1, lambda i: True, "max_num_gen_batches=99")
    every._sample(0, 0)
    assert sum(len(ids) for _, ids, _ in asked) == EXAMPLES  # no prompt twice in a step


@pytest.mark.parametrize(
    ("steps", "iterations", "shares", "expected"),
    [
        (3, 1, 1, [(0, 0), (1, 0), (2, 0)]),
        (4, 2, 1, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (4, 1, 2, [(0, 0), (1, 0), (2, 0), (3, 0)]),
        (8, 2, 2, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]),
        (6, 2, 2, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]),  # at the end each is trained on as often, too
    ],
)
def test_each_share_is_trained_on_in_turn_and_then_again(
    steps: int, iterations: int, shares: int, expected: list[tuple[int, int]]
) -> None:
    rollouts, _ = make_rollouts(
        steps, lambda i: False, f"num_iterations={iterations}", f"steps_per_generation={shares}"
    )
    assert [rollouts._place_of(step) for step in range(steps)] == expected
