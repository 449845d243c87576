"""From prompts to a step batch: completions are sampled, rewarded and compared, and become the rows of a step.

The rollouts of a step are a pure function of the seed, the step and the weights, on any number of ranks. A resumed run
samples them again, and no checkpoint holds any.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.rollouts import POLICY_LOSSES
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch, StoredBatches, make_batches
from finetune.data.examples import Examples, cut
from finetune.data.packing import BatchConfig
from finetune.data.token_store import Tokens, keep_in_memory
from finetune.data.tokenize import SourceStats
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World
from finetune.rollout.engine import Ended, Engine, Request, Sampled, Sampling
from finetune.rollout.rewards import Rewards, Scores

Record = Callable[[list[dict[str, Any]]], None]
SMALLEST_DEVIATION = 1e-4  # added to a standard deviation that is divided by, as in TRL


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completions of some prompts, `generations` of each, one after another."""

    example_ids: NDArray[np.int64]  # [completions]: the prompts'
    prompts: list[list[int]]  # [completions]
    sampled: list[Sampled]
    scores: NDArray[np.float64]  # [completions, functions]; nan: the function says nothing of it
    rewards: NDArray[np.float64]  # [completions]: the weighted sum; nan where no function says anything
    failures: int
    generations: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples completions of prompts and rewards them, on all ranks together."""

    recipe: Recipe
    world: World
    tokenizer: Any
    engine: Engine
    rewards: Rewards
    steps: int  # in the whole run

    def roll_out(
        self, examples: Examples, example_ids: NDArray[np.int64], step: int, generations: int, *, greedy: bool = False
    ) -> Rollout:
        """Completions of the prompts `example_ids`, sampled by all ranks, each a share. All ranks call it.

        Raises `UserError` on all ranks for what a reward function does wrong.
        """
        keys, seed = self.recipe.rollout, self.recipe.run.seed
        sampling = Sampling(
            max_tokens=keys.max_completion_length, temperature=self.recipe.method.temperature, greedy=greedy
        )
        ids = [tuple(examples[int(example_id)].input_ids.tolist()) for example_id in example_ids]
        requests = [
            Request(prompt, (seed, step, place, generation))
            for place, prompt in enumerate(ids)
            for generation in range(generations)
        ]
        groups, group = self.world.tensor_group_count, self.world.tensor_group_index
        first, end = (len(requests) * index // groups for index in (group, group + 1))
        sampled = self._gather(self.engine.sample(requests[first:end], sampling))
        of_completion = np.repeat(example_ids, generations)
        found = RankGroup(self.world).on_main(lambda: asdict(self._score(examples, of_completion, sampled, step)))
        scores = np.array(found["by_function"], np.float64).T.reshape(len(sampled), len(keys.rewards))
        weights = np.array(keys.reward_weights or [1.0] * len(keys.rewards))
        rewards = np.where(np.isnan(scores).all(1), np.nan, np.nansum(scores * weights, 1))  # nan without functions
        prompts = [list(request.prompt_ids) for request in requests]
        return Rollout(of_completion, prompts, sampled, scores, rewards, found["failures"], generations)

    def _gather(self, mine: list[Sampled]) -> list[Sampled]:
        """All ranks' completions, in order of rank; ranks of a tensor parallel group have sampled the same."""
        own = [(s.token_ids, s.log_probabilities, s.entropy, s.ended.value) for s in mine]
        each = self.world.gather(own)[:: self.world.size // self.world.tensor_group_count]
        return [Sampled(ids, logs, entropy, Ended(ended)) for rank in each for ids, logs, entropy, ended in rank]

    def _score(self, examples: Examples, ids: NDArray[np.int64], sampled: Sequence[Sampled], step: int) -> Scores:
        kept = {int(example_id): examples.read_row(int(example_id)) for example_id in np.unique(ids)}
        rows = [kept[int(example_id)] for example_id in ids]
        texts = self.tokenizer.batch_decode([s.token_ids for s in sampled], skip_special_tokens=True)
        completions = [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        names = sorted({name for row in rows for name in row["columns"]})
        columns = {name: [row["columns"].get(name) for row in rows] for name in names}
        state = {
            "global_step": step,
            "max_steps": self.steps,
            "max_completion_length": self.recipe.rollout.max_completion_length,
        }
        token_ids = [s.token_ids for s in sampled]
        if not self.rewards.names:
            return Scores([], 0)
        return self.rewards.score([row["prompt"] for row in rows], completions, token_ids, columns, state)


def compute_advantages(
    rewards: NDArray[np.float64], generations: int, baseline: str, scale: str
) -> NDArray[np.float64]:
    """[completions]: by how much each reward is above its baseline; 0 where there is no reward.

    Args:
        rewards: [completions], those of a prompt one after another; nan: none.
        generations: Completions of each prompt.
        baseline, scale: Of `PolicyLoss`, and the recipe's `scale_rewards`.
    """
    groups = rewards.reshape(-1, generations)
    known = ~np.isnan(groups)
    number = known.sum(1, keepdims=True)
    total = np.nansum(groups, 1, keepdims=True)
    if baseline == "others":
        advantages = groups - (total - groups) / np.maximum(number - 1, 1)
    elif baseline == "step":
        advantages = (groups - _mean(rewards)) / (_deviation(rewards) + SMALLEST_DEVIATION)
    else:
        advantages = groups - total / np.maximum(number, 1)
        if scale == "group":
            advantages = advantages / (np.array([[_deviation(group)] for group in groups]) + SMALLEST_DEVIATION)
        elif scale == "batch":
            advantages = advantages / (_deviation(rewards) + SMALLEST_DEVIATION)
    return np.asarray(np.nan_to_num(advantages.ravel(), nan=0.0), np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0


def _deviation(values: NDArray[np.float64]) -> float:
    """Of a sample: divided by its size less 1."""
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The step batches of a run that samples, for one rank."""

    sampler: Sampler
    prompts: StoredBatches

    def batches(self, from_step: int = 0, record: Record = lambda lines: None) -> Iterator[StepBatch]:
        """The step batches from `from_step` to the end, each sampled when it is asked for. All ranks ask together.

        `record`: gets the lines of completions.jsonl of each step, on the main rank.
        """
        for step in range(from_step, self.prompts.steps):
            yield self.step_batch(step, record)

    def step_batch(self, step: int, record: Record = lambda lines: None) -> StepBatch:
        """This rank's share of the step, whose completions all ranks have sampled together."""
        example_ids = np.concatenate(self.prompts.rows_of(step))
        generations = self.sampler.recipe.rollout.num_generations
        rollout = self.sampler.roll_out(self.prompts.examples, example_ids, step, generations)
        if self.sampler.world.is_main:
            record(list(self._describe_lines(rollout, step)))
        epoch = (step + 1) / self.prompts.steps_per_epoch
        return replace(make_step_batch(rollout, self.sampler), step=step, epoch=epoch)

    def _describe_lines(self, rollout: Rollout, step: int) -> Iterator[dict[str, Any]]:
        """A line of completions.jsonl for each completion of the first prompts; `step` is 0-based."""
        keys, tokenizer, names = self.sampler.recipe.rollout, self.sampler.tokenizer, self.sampler.rewards.names
        advantages = find_advantages(rollout, self.sampler.recipe)
        for i in range(min(keys.log_completions * rollout.generations, len(rollout.sampled))):
            each = rollout.sampled[i]
            scores = (None if np.isnan(score) else float(score) for score in rollout.scores[i])
            yield {
                "step": step + 1,
                "prompt": tokenizer.decode(rollout.prompts[i]),
                "completion": tokenizer.decode(each.token_ids),
                "token_ids": each.token_ids,
                "ended": each.ended.value,
                "rewards": dict(zip(names, scores, strict=True)),
                "advantage": float(advantages[i]),
            }


def make_step_batch(rollout: Rollout, sampler: Sampler) -> StepBatch:
    """This rank's share of the completions, packed and dealt like other rows."""
    recipe, data_rank = sampler.recipe, sampler.world.data_parallel
    masks = recipe.rollout.mask_truncated_completions
    learned = [not (masks and each.ended is Ended.CUT) for each in rollout.sampled]
    store = keep_in_memory([_as_tokens(rollout, learned)], SourceStats(files=["completions"]).as_json)
    examples, _ = cut(store, recipe.data.max_length, "error")
    config = BatchConfig(
        seed=recipe.run.seed,
        packing=recipe.data.packing,
        max_length=recipe.data.max_length,
        global_batch_size=len(examples),
    )
    size = recipe.batch.per_device_train_batch_size
    batch = make_batches(examples, config, data_rank, size, sampler.tokenizer).step_batch(0)
    columns = _describe(rollout, recipe)
    micro_batches = tuple(_attach(each, rollout, columns) for each in batch.micro_batches)
    return replace(batch, micro_batches=micro_batches)


def _as_tokens(rollout: Rollout, learned: Sequence[bool]) -> Tokens:
    ids = [prompt + each.token_ids for prompt, each in zip(rollout.prompts, rollout.sampled, strict=True)]
    labels, trained = [], []
    for prompt, whole, is_learned in zip(rollout.prompts, ids, learned, strict=True):
        completion = whole[len(prompt) :] if is_learned else [IGNORE_INDEX] * (len(whole) - len(prompt))
        labels.append([IGNORE_INDEX] * (len(prompt) - 1) + completion + [IGNORE_INDEX])
        trained.append(len(completion) if is_learned else 0)
    count, nothing = len(ids), np.zeros(0, np.int64)
    zeros = np.zeros(count, np.int64)
    return Tokens(
        input_ids=np.concatenate(ids).astype(np.int32),
        labels=np.concatenate(labels).astype(np.int32),
        lengths=np.array(list(map(len, ids)), np.int32),
        trained=np.array(trained, np.int32),
        files=zeros.astype(np.int32),
        rows=np.arange(count) + 1,
        hashes=zeros.astype(np.uint64),
        ratings=zeros.astype(np.int8),
        kept_sizes=zeros,
        kept_bytes=nothing.astype(np.uint8),
        image_counts=zeros.astype(np.int32),
        image_sizes=nothing,
        image_bytes=nothing.astype(np.uint8),
        image_hashes=nothing.astype(np.uint64),
    )


def find_advantages(rollout: Rollout, recipe: Recipe) -> NDArray[np.float64]:
    """[completions]: their advantages under the recipe's loss."""
    baseline = POLICY_LOSSES[recipe.method.loss_type].baseline
    return compute_advantages(rollout.rewards, rollout.generations, baseline, recipe.rollout.scale_rewards)


def _describe(rollout: Rollout, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """[completions] or [completions, functions]: what the loss and the metrics read of each completion."""
    deviations = [_deviation(group) for group in rollout.rewards.reshape(-1, rollout.generations)]
    deviation = np.repeat(deviations, rollout.generations)
    columns = {
        "advantages": find_advantages(rollout, recipe),
        "rewards": rollout.rewards,
        "scores": rollout.scores,
        "deviations": deviation,
        "is_flat": deviation == 0,
        "tokens": [len(each.token_ids) for each in rollout.sampled],
        "entropies": [each.entropy for each in rollout.sampled],
        "is_cut": [each.ended is Ended.CUT for each in rollout.sampled],
        "failed": [rollout.failures / len(rollout.sampled)] * len(rollout.sampled),
    }
    return {name: np.asarray(values, np.float32) for name, values in columns.items()}


def _attach(micro_batch: MicroBatch, rollout: Rollout, columns: dict[str, NDArray[np.float32]]) -> MicroBatch:
    """The micro-batch with the sampler's log-probability at each trained position, and `columns` of its documents."""
    micro_batch, ids = micro_batch.with_documents(), list(micro_batch.example_ids)
    flat = torch.zeros(micro_batch.labels.numel())
    width, start = micro_batch.labels.shape[1], 0
    for place, example_id in enumerate(ids):
        first = start + len(rollout.prompts[example_id]) - 1
        values = rollout.sampled[example_id].log_probabilities
        flat[first : first + len(values)] = torch.tensor(values)
        start = start + micro_batch.document_lengths[place] if micro_batch.cu_seq_lens is not None else start + width
    tensors: dict[str, Tensor] = {"old": flat[micro_batch.trained_positions]}
    tensors |= {name: torch.from_numpy(values[ids]) for name, values in columns.items()}
    of_prompts = tuple(rollout.example_ids[ids].tolist())
    return replace(micro_batch, rollout=tensors, example_ids=of_prompts)
