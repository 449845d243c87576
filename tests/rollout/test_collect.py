"""Which prompts a step samples and trains on, with a sampler whose rewards are given."""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from finetune.config.reader import read_recipe
from finetune.data.batches import StepBatch
from finetune.distributed.world import alone
from finetune.errors import UserError
from finetune.rollout import completion_rows
from finetune.rollout.collect import RolloutBatches
from finetune.rollout.completion_rows import RowOptions, make_step_batch
from finetune.rollout.engine import Ended, Rollout, Sampled
from finetune.training.objectives.policy import HeldOutRewards

SIZE, GENERATIONS, EXAMPLES = 4, 2, 40


def make_rollouts(
    steps: int, flat: Any, *keys: str
) -> tuple[RolloutBatches, list[tuple[int, list[int], int]]]:
    """Rollouts over `EXAMPLES` prompts, and what their sampler is asked for: (step, prompts, first place). The completions of a
    prompt get the same reward where `flat` says so."""
    asked: list[tuple[int, list[int], int]] = []

    def roll_out(
        examples: Any,
        ids: Any,
        step: int,
        generations: int,
        prompts_before: int = 0,
        greedy: bool = False,
        taken: Any = None,
    ) -> Rollout:
        asked.append((step, ids.tolist(), prompts_before))
        rewards = np.array(
            [0.0 if flat(i) else float(j) for i in ids.tolist() for j in range(generations)]
        )
        sampled = [Sampled([1], [-1.0], 0.0, Ended.CUT)] * len(rewards)
        found = (
            np.repeat(ids, generations),
            [[7]] * len(rewards),
            sampled,
            rewards[:, None],
            rewards,
        )
        return Rollout(*found, 0, generations, len(ids), sum(map(flat, ids.tolist())))

    given = ["method=grpo", "rewards=[length]", f"num_generations={GENERATIONS}", *keys]
    recipe = read_recipe(None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", *given])
    sampler: Any = SimpleNamespace(recipe=recipe, roll_out=roll_out)
    rows = [
        [np.array([i]) for i in range(first, first + SIZE)] for first in range(0, EXAMPLES, SIZE)
    ]
    prompts: Any = SimpleNamespace(
        examples=range(EXAMPLES), steps=steps, rows_of=lambda step: rows[step % len(rows)]
    )
    return RolloutBatches(sampler, prompts), asked


def test_flat_groups_are_drawn_again_until_there_are_enough() -> None:
    rollouts, asked = make_rollouts(1, lambda i: i % 3 > 0, "max_num_gen_batches=50")
    found = rollouts._sample_step(0, 0)
    assert (
        found.example_ids[::GENERATIONS].tolist()[:2] == [0, 3]
        and len(found.rewards) == SIZE * GENERATIONS
    )
    assert all(i % 3 == 0 for i in found.example_ids.tolist())
    assert [len(ids) for _, ids, _ in asked[:2]] == [4, 2]  # only as many as were missing
    drawn = [i for _, ids, _ in asked for i in ids]
    assert len(set(drawn)) == len(drawn)
    assert [place for _, _, place in asked] == np.cumsum(
        [0, *(len(ids) for _, ids, _ in asked)]
    ).tolist()[:-1]
    assert found.sampled_groups == len(drawn) and found.flat_groups == sum(i % 3 > 0 for i in drawn)
    again, _ = make_rollouts(1, lambda i: i % 3 > 0, "max_num_gen_batches=50")
    assert again._sample_step(0, 0).example_ids.tolist() == found.example_ids.tolist()


@pytest.mark.parametrize(("signal", "groups"), [({0}, 1), (set(), SIZE)])
def test_the_draws_are_bounded(signal: set[int], groups: int) -> None:
    """Fewer groups where the bound is reached; all of them where none has a signal, which then teach nothing."""
    rollouts, asked = make_rollouts(1, lambda i: i not in signal, "max_num_gen_batches=3")
    found = rollouts._sample_step(0, 0)
    assert len(asked) == 3 and len(found.rewards) == groups * GENERATIONS
    every, asked = make_rollouts(1, lambda i: True, "max_num_gen_batches=99")
    every._sample_step(0, 0)
    assert sum(len(ids) for _, ids, _ in asked) == EXAMPLES  # no prompt twice in a step


@pytest.mark.parametrize(
    ("steps", "iterations", "shares", "expected"),
    [
        (3, 1, 1, [(0, 0), (1, 0), (2, 0)]),
        (4, 2, 1, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (4, 1, 2, [(0, 0), (1, 0), (2, 0), (3, 0)]),
        (8, 2, 2, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]),
        (
            6,
            2,
            2,
            [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)],
        ),  # at the end each is trained on as often, too
    ],
)
def test_each_share_is_trained_on_in_turn_and_then_again(
    steps: int, iterations: int, shares: int, expected: list[tuple[int, int]]
) -> None:
    rollouts, _ = make_rollouts(
        steps, lambda i: False, f"num_iterations={iterations}", f"steps_per_generation={shares}"
    )
    found = [rollouts.schedule.find_prompts_step(step) for step in range(steps)]
    assert found == expected


def test_a_resumed_run_of_another_length_says_what_it_lacks(tmp_path: Path) -> None:
    """Of 5 steps the last shares the completions of step 5 alone; of 16 steps it has three companions."""
    keys = ("num_iterations=2", "steps_per_generation=4")
    tokenizer: Any = SimpleNamespace(decode=str)
    runs = [make_rollouts(steps, lambda i: False, *keys)[0] for steps in (5, 16)]
    for each in runs:
        each.sampler.tokenizer, each.sampler.engine = (
            tokenizer,
            SimpleNamespace(forget=lambda: None),
        )  # type: ignore[misc]
    short, longer = runs
    short._held.update({number: short._sample_step(number, number) for number in range(3)})
    for name, content in short.describe_files(1).items():
        (tmp_path / name).write_bytes(content)
    short.resume(tmp_path, 1)
    with pytest.raises(
        UserError,
        match=r"no completions for step 4, which trains on what step 1 sampled; .*max_steps",
    ):
        longer.resume(tmp_path, 1)


def test_a_long_evaluation_shows_that_it_continues_and_can_be_ended() -> None:
    """By the micro-batches that it asks for, one before it answers the next prompts."""
    rollouts, asked = make_rollouts(1, lambda i: False, "per_device_generation_batch_size=8")
    held_out, alive, two_groups = (
        HeldOutRewards(rollouts.sampler, rollouts.prompts),
        [0],
        SimpleNamespace(tensor_group_count=2),
    )

    def micro_batches(stops: bool = False) -> Iterator[Any]:
        for _ in range(2):
            if stops and alive[0] == 1:
                raise InterruptedError
            alive[0] += 1
            yield None

    found = held_out.prepare(None, micro_batches, two_groups)  # type: ignore[arg-type]
    assert sorted(found.results) == list(range(EXAMPLES)) and alive == [3]
    assert [(ids, first) for _, ids, first in asked] == [
        (list(range(i, min(i + 16, EXAMPLES))), i) for i in (0, 16, 32)
    ]
    alive[0] = 0
    asked.clear()
    with pytest.raises(InterruptedError):
        held_out.prepare(None, lambda: micro_batches(stops=True), two_groups)  # type: ignore[arg-type]
    assert len(asked) == 1


def read_completions(batches: list[StepBatch], rewards: NDArray[np.float64]) -> dict[int, Any]:
    """Of each completion the whole text, and at each trained token its position, label and log-probability."""
    found: dict[int, Any] = {}
    for one in (
        micro_batch
        for batch in batches
        for micro_batch in batch.micro_batches
        if micro_batch.example_ids
    ):
        assert (
            one.cu_seq_lens is not None
            and one.columns is not None
            and one.trained_documents is not None
        )
        starts = one.cu_seq_lens.tolist()
        assert one.packed_lengths == tuple(np.diff(starts)) and one.max_document_length == max(
            one.packed_lengths
        )
        texts: list[list[int]] = []
        for at, (start, end) in enumerate(itertools.pairwise(starts)):
            before = None if one.continued is None else one.continued[at]
            texts.append(
                ([] if before is None else texts[before]) + one.input_ids[0, start:end].tolist()
            )
            assert (
                one.position_ids[0, start:end].tolist()
                == list(range(len(texts[-1])))[start - end :]
            )
        for index, reward in enumerate(one.columns["rewards"].tolist()):
            is_own = (one.labels[0, one.trained_positions] >= 0) & (one.trained_documents == index)
            places = one.trained_positions[is_own]
            text = {bisect.bisect(starts, place) - 1 for place in places.tolist()}
            values = (
                one.position_ids[0, places],
                one.labels[0, places],
                one.columns["sampled"][is_own],
            )
            number = int(np.abs(rewards - reward).argmin())
            found[number] = [texts[at] for at in text], *(each.tolist() for each in values)
    return found


@pytest.mark.parametrize(("ranks", "rows", "tokens"), [(1, 1, 111), (2, 4, 111), (1, 4, 77)])
def test_a_prompt_that_lies_in_a_row_once_is_that_of_all_its_completions(
    ranks: int, rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts of 9, 1 and 14 tokens; the second is nothing to share."""
    monkeypatch.setattr(completion_rows, "ROWS_OF_RANK", 1)
    drawn = np.random.default_rng(0)
    keys = [
        "method=grpo",
        "rewards=[length]",
        "num_generations=4",
        "max_completion_length=7",
        "max_length=21",
    ]
    keys += [
        f"per_device_train_batch_size={rows}",
        "mask_truncated_completions=true",
        "model_name_or_path=a/b",
    ]
    recipe = read_recipe(None, [*keys, "datasets=[{path: a/b}]"])
    prompts = [
        prompt for length in (9, 1, 14) for prompt in [drawn.integers(1, 99, length).tolist()] * 4
    ]
    sampled = []
    for length in drawn.integers(1, 7, len(prompts)).tolist():
        ended = Ended.CUT if len(sampled) == 2 else Ended.STOPPED
        sampled.append(
            Sampled(
                drawn.integers(1, 99, length).tolist(), (-drawn.random(length)).tolist(), 0.5, ended
            )
        )
    rewards = drawn.random(len(prompts))
    rollout = Rollout(
        np.repeat([5, 6, 7], 4), prompts, sampled, rewards[:, None], rewards, 0, 4, 3, 0
    )

    def lay_out(*, shares: bool) -> list[StepBatch]:
        places = [replace(alone(), rank=rank, size=ranks) for rank in range(ranks)]
        return [make_step_batch(rollout, RowOptions(recipe, place, 0, shares)) for place in places]

    shared, apart = lay_out(shares=True), lay_out(shares=False)
    found, truth = read_completions(shared, rewards), read_completions(apart, rewards)
    assert found == truth and sorted(found) == list(range(12)) and found[2] == ([], [], [], [])
    assert all(found[i][0] == [prompts[i] + sampled[i].token_ids] for i in range(12) if i != 2)
    assert (
        shared[0].groups == apart[0].groups == 12
        and shared[0].trained_tokens == apart[0].trained_tokens
    )
    lengths = [
        len(prompt) + len(each.token_ids) for prompt, each in zip(prompts, sampled, strict=True)
    ]
    assert apart[0].tokens == sum(lengths) and apart[0].squared_tokens == sum(
        length**2 for length in lengths
    )
    assert (
        shared[0].tokens == tokens < apart[0].tokens
        and shared[0].squared_tokens < apart[0].squared_tokens
    )
