"""From prompts to a step batch: completions are sampled, rewarded and compared, and become the rows of a step.

The rollouts of a step are a pure function of the seed, the step and the weights, on any number of ranks. A resumed run
samples them again, unless the weights have moved since: a checkpoint between two updates on the same rollouts holds
them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Examples, cut, make_generator
from finetune.data.messages import Message
from finetune.data.packing import BatchConfig, StoredBatches, make_batches
from finetune.data.token_store import Tokens, keep_in_memory
from finetune.data.tokenize import SourceStats
from finetune.data.tool_calls import ToolTurns
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.rollout.engine import Ended, Engine, Request, Rollout, Sampled, Sampling, find_advantages
from finetune.rollout.rewards import Rewards, Scores
from finetune.rollout.turns import Conversations, take_turns

Record = Callable[[list[dict[str, Any]]], None]
Score = Callable[[StepBatch], list[Tensor]]
"""A step's batch -> fp32[positions] of each of its micro-batches: the labels' log-probabilities in training."""
ROWS_OF_RANK = 4  # at least, of which each rank gets as many: longer ones would leave some ranks with much less
ROLLOUTS = "rollouts.jsonl"  # of a checkpoint: what the steps after it are still to train on


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples completions of prompts and rewards them, on all ranks together."""

    recipe: Recipe
    world: World
    tokenizer: Any
    engine: Engine | None  # None: nothing is sampled
    rewards: Rewards
    steps: int  # in the whole run
    shares_prompts: bool = False  # whether a step computes the prompt of a group once
    tools: ToolTurns | None = None  # None: no tool is called

    def roll_out(
        self,
        examples: Examples,
        example_ids: NDArray[np.int64],
        step: int,
        generations: int,
        *,
        greedy: bool = False,
        first_place: int = 0,
    ) -> Rollout:
        """Completions of the prompts `example_ids`, sampled by all ranks, each a share. All ranks call it.

        `first_place`: of the prompts in the step, which is part of their completions' seeds.
        Raises `UserError` on all ranks for what a reward function does wrong.
        """
        keys, seed = self.recipe.rollout, self.recipe.run.seed
        sampling = Sampling(
            max_tokens=keys.max_completion_length, temperature=self.recipe.method.temperature, greedy=greedy
        )
        ids = [tuple(examples[int(example_id)].input_ids.tolist()) for example_id in example_ids]
        requests = [
            Request(prompt, (seed, step, place, generation))
            for place, prompt in enumerate(ids, first_place)
            for generation in range(generations)
        ]
        of_completion, ranks = np.repeat(example_ids, generations), RankGroup(self.world)
        rows = read_rows(examples, of_completion) if self.world.is_main else []
        sample, messages = partial(self._sample, sampling), [list[Message]() for _ in rows]
        if self.tools is None:
            sampled = sample(requests)
        else:
            talks = Conversations(self.tools, self.rewards, sampling.max_tokens, rows, messages)
            sampled = take_turns(requests, sample, talks, keys.max_tool_calling_iterations, ranks)
        found = ranks.on_main(lambda: asdict(self.score(rows, sampled, messages, step)))
        scores = np.array(found["by_function"], np.float64).T.reshape(len(sampled), len(keys.rewards))
        weights = np.array(keys.reward_weights or [1.0] * len(keys.rewards))
        rewards = np.where(np.isnan(scores).all(1), np.nan, np.nansum(scores * weights, 1))  # nan without functions
        prompts = [list(request.prompt_ids) for request in requests]
        made = Rollout(of_completion, prompts, sampled, scores, rewards, found["failures"], generations, len(ids), 0)
        return replace(made, flat_groups=int((made.deviations() == 0).sum()))

    def _sample(self, sampling: Sampling, requests: Sequence[Request]) -> list[Sampled]:
        """A completion of each request; each rank samples a share, those of a tensor parallel group the same."""
        groups, group = self.world.tensor_group_count, self.world.tensor_group_index
        first, end = (len(requests) * index // groups for index in (group, group + 1))
        assert self.engine is not None
        mine = self.engine.sample(requests[first:end], sampling)
        stage = self.world.stage_size  # the ranks of the others have the same completions
        each = self.world.gather([s.as_json() for s in mine])[: stage : stage // groups]
        return [Sampled.of_json(values) for rank in each for values in rank]

    def score(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampled: Sequence[Sampled],
        messages: Sequence[list[Message]],
        step: int,
    ) -> Scores:
        """What the functions give each completion. `messages`: of each, where tools were there to be called."""
        if not self.rewards.names:
            return Scores([], 0)
        texts = self.tokenizer.batch_decode([s.token_ids for s in sampled], skip_special_tokens=True)
        completions = [
            text if isinstance(row["prompt"], str) else said or [{"role": "assistant", "content": text}]
            for row, said, text in zip(rows, messages, texts, strict=True)
        ]
        names = sorted({name for row in rows for name in row["columns"]})
        columns = {name: [row["columns"].get(name) for row in rows] for name in names}
        state = {
            "global_step": step,
            "max_steps": self.steps,
            "max_completion_length": self.recipe.rollout.max_completion_length,
            "soft_punish_cache": self.recipe.rollout.soft_punish_cache,
        }
        token_ids = [s.token_ids for s in sampled]
        return self.rewards.score([row["prompt"] for row in rows], completions, token_ids, columns, state)


def read_rows(examples: Examples, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
    """[completions]: the rows of the prompts `ids`."""
    kept = {int(example_id): examples.read_row(int(example_id)) for example_id in np.unique(ids)}
    return [kept[int(example_id)] for example_id in ids]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The step batches of a run that samples, for one rank."""

    sampler: Sampler
    prompts: StoredBatches
    score: Score | None = None  # None where the loss does not ask for them before its own forward
    _held: dict[int, Rollout] = field(default_factory=dict)  # step of prompts -> what is still trained on

    def batches(self, from_step: int = 0, record: Record = lambda lines: None) -> Iterator[StepBatch]:
        """The step batches from `from_step` to the end, each sampled when it is asked for. All ranks ask together.

        `record`: gets the lines of completions.jsonl of each step, on the main rank.
        """
        for step in range(from_step, self.prompts.steps):
            yield self.step_batch(step, record)

    def step_batch(self, step: int, record: Record = lambda lines: None) -> StepBatch:
        """This rank's share of the step, whose completions all ranks have sampled together."""
        number, iteration = self._place_of(step)
        if self._is_sampled_at(step):
            self._held.clear()
            for first in range(step, self.prompts.steps):
                of_prompts, again = self._place_of(first)
                if again or (first > step and self._is_sampled_at(first)):
                    break
                self._held[of_prompts] = self._sample(of_prompts, first)
        rollout = self._held[number]
        if self.sampler.world.is_main and iteration == 0:
            record(list(self._describe_lines(rollout, step)))
        epoch = (step + 1) / self.prompts.steps_per_epoch
        return replace(make_step_batch(rollout, self.sampler), step=step, epoch=epoch)

    def _is_sampled_at(self, step: int) -> bool:
        return step % self.sampler.recipe.rollout.updates_per_generation == 0

    def _place_of(self, step: int) -> tuple[int, int]:
        """(the step of the prompts, how often they have been trained on before) of an optimizer step."""
        keys = self.sampler.recipe.rollout
        before, within = divmod(step, keys.updates_per_generation)
        left = -(-(self.prompts.steps - step + within) // keys.num_iterations)  # at the end there may be fewer
        iteration, number = divmod(within, min(keys.steps_per_generation, left))
        return before * keys.steps_per_generation + number, iteration

    def _sample(self, number: int, step: int) -> Rollout:
        """The completions of the prompts of step `number`; groups without signal are replaced as the recipe says."""
        recipe, generations = self.sampler.recipe, self.sampler.recipe.rollout.num_generations
        example_ids, examples = np.concatenate(self.prompts.rows_of(number)), self.prompts.examples
        rollout = self.sampler.roll_out(examples, example_ids, step, generations)
        drawn = make_generator(recipe.run.seed, "other prompts", step).permutation(len(examples))
        others = iter(drawn[~np.isin(drawn, example_ids)])
        for _ in range(1, recipe.rollout.max_num_gen_batches):
            ids = np.fromiter(islice(others, int((rollout.deviations() == 0).sum())), np.int64)
            if not len(ids):
                break
            more = self.sampler.roll_out(examples, ids, step, generations, first_place=rollout.sampled_groups)
            rollout = rollout.join(more)
            rollout = rollout.select(np.argsort(rollout.deviations() == 0, kind="stable")[: len(example_ids)])
        if recipe.rollout.max_num_gen_batches > 1 and (rollout.deviations() > 0).any():
            rollout = rollout.select((rollout.deviations() > 0).nonzero()[0])
        return rollout if self.score is None else replace(rollout, old=self._score(self.score, rollout))

    def _score(self, score: Score, rollout: Rollout) -> list[list[float]]:
        """[completions][trained tokens]: their log-probabilities in training, on every rank."""
        batch = _pack(rollout, self.sampler)
        mine = []
        for micro_batch, values in zip(batch.micro_batches, score(batch), strict=True):
            has_label, counts = _count_labels(micro_batch)
            of_completions = torch.split(values[has_label], counts)
            mine += [[i, of.tolist()] for i, of in zip(micro_batch.example_ids, of_completions, strict=True)]
        found = {i: values for rank in self.sampler.world.gather(mine) for i, values in rank}
        return [found[i] for i in range(len(rollout.sampled))]

    def describe_files(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint after `step` steps: the rollouts that later steps are still to train on."""
        assert self.sampler.engine is not None
        self.sampler.engine.forget()
        if self._is_sampled_at(step) or step >= self.prompts.steps:
            return {}
        lines = (
            json.dumps(line | {"prompts_step": number}) + "\n"
            for number, each in self._held.items()
            for line in each.describe_lines(self.sampler.tokenizer)
        )
        return {ROLLOUTS: "".join(lines).encode()}

    def resume(self, checkpoint: Path, step: int) -> None:
        """Takes the rollouts of a verified checkpoint of `step` steps. Raises `UserError` where it lacks them."""
        self._held.clear()
        if self._is_sampled_at(step) or step >= self.prompts.steps:
            return
        path = checkpoint / ROLLOUTS
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        by_step: dict[int, list[dict[str, Any]]] = {}
        for line in lines:
            by_step.setdefault(line["prompts_step"], []).append(line)
        self._held.update({number: Rollout.of_lines(of_step) for number, of_step in by_step.items()})
        every = self.sampler.recipe.rollout.updates_per_generation
        sampled_at = step // every * every
        for each in range(step, min(sampled_at + every, self.prompts.steps)):
            if self._place_of(each)[0] not in self._held:
                raise UserError(
                    f"{checkpoint}: holds no completions for step {each + 1}, which trains on what step "
                    f"{sampled_at + 1} sampled; set num_iterations, steps_per_generation and max_steps as they were"
                )

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
                **({"tool_mask": each.tool_mask, "parts": _split(each, tokenizer)} if each.tool_mask else {}),
                "rewards": dict(zip(names, scores, strict=True)),
                "advantage": float(advantages[i]),
            }


def _split(completion: Sampled, tokenizer: Any) -> list[str]:
    """What the model wrote and what tools answered, in turn."""
    parts = groupby(zip(completion.tool_mask, completion.token_ids, strict=True), itemgetter(0))
    return [tokenizer.decode([token for _, token in each]) for _, each in parts]


def make_step_batch(rollout: Rollout, sampler: Sampler) -> StepBatch:
    """This rank's share of the completions, packed and dealt like other rows."""
    batch, columns = _pack(rollout, sampler), _describe(rollout, sampler.recipe)
    micro_batches = tuple(_attach(each, rollout, columns) for each in batch.micro_batches)
    return replace(batch, micro_batches=micro_batches)


def _pack(rollout: Rollout, sampler: Sampler) -> StepBatch:
    """As `make_step_batch`, of the tokens alone; `example_ids` are places in the rollout."""
    recipe, data_rank = sampler.recipe, sampler.world.data_parallel
    masks = recipe.rollout.mask_truncated_completions
    learned = [not (masks and each.ended is Ended.CUT) for each in rollout.sampled]
    rows = _count_rows_together(rollout, sampler)
    tokens = rows * recipe.data.max_length
    pieces = list(_cut_groups(rollout, tokens if sampler.shares_prompts else 0))
    store = keep_in_memory([_as_tokens(rollout, pieces, learned)], SourceStats(files=["completions"]).as_json)
    examples, _ = cut(store, tokens, "error")
    config = BatchConfig(
        seed=recipe.run.seed, packing=recipe.data.packing, max_length=tokens, global_batch_size=len(examples)
    )
    size = recipe.batch.per_device_train_batch_size // rows
    batch = make_batches(examples, config, data_rank, size, sampler.tokenizer).step_batch(0)
    documents = [_documents_of(piece, rollout) for piece in pieces]
    return replace(
        batch,
        micro_batches=tuple(_separate(each, documents) for each in batch.micro_batches),
        squared_tokens=sum(one.end**2 - one.first**2 for piece in documents for one in piece),
        groups=len(rollout.sampled),
    )


def _count_rows_together(rollout: Rollout, sampler: Sampler) -> int:
    """How many rows of a micro-batch are packed as one, which holds more of a group, so that each rank has some."""
    if not sampler.shares_prompts:
        return 1
    recipe, ranks = sampler.recipe, sampler.world.data_parallel.size
    tokens, size = sum(len(each.token_ids) for each in rollout.sampled), recipe.batch.per_device_train_batch_size
    most = tokens // (ROWS_OF_RANK * ranks * recipe.data.max_length)
    return max(rows for rows in range(1, size + 1) if rows == 1 or (rows <= most and size % rows == 0))


def _cut_groups(rollout: Rollout, most: int) -> Iterator[list[int]]:
    """The completions of each group by places, those together that fit into `most` tokens with their prompt once."""
    for group in range(0, len(rollout.sampled), rollout.generations):
        prompt, piece, tokens = len(rollout.prompts[group]), list[int](), 0
        for place in range(group, group + rollout.generations):
            own = 1 + len(rollout.sampled[place].token_ids)  # with the prompt's last token, which predicts the first
            if piece and (prompt == 1 or tokens + own > most):
                yield piece
                piece = []
            tokens = own + (tokens if piece else prompt - 1)
            piece.append(place)
        yield piece


class Document(NamedTuple):
    """Tokens of a packed row: a prompt without its last one, what continues it, or all of a prompt and a completion."""

    first: int  # the position of its first token; 0: it continues nothing
    end: int  # the position after its last
    completion: int | None  # place in the rollout


def _documents_of(piece: Sequence[int], rollout: Rollout) -> list[Document]:
    prompt, is_shared = len(rollout.prompts[piece[0]]) - 1, len(piece) > 1
    ends = [prompt + 1 + len(rollout.sampled[place].token_ids) for place in piece]
    completions = [Document(prompt * is_shared, end, place) for end, place in zip(ends, piece, strict=True)]
    return [Document(0, prompt, None), *completions] if is_shared else completions


def _separate(micro_batch: MicroBatch, pieces: Sequence[Sequence[Document]]) -> MicroBatch:
    """The micro-batch, whose examples are pieces of groups, with their documents and with completions as examples."""
    documents = [one for number in micro_batch.example_ids for one in pieces[number]]
    is_completion = np.array([one.completion is not None for one in documents], bool)
    micro_batch = replace(micro_batch, example_ids=tuple(d.completion for d in documents if d.completion is not None))
    if is_completion.all():
        return micro_batch.with_documents()
    tokens, (first, end) = micro_batch.labels.numel(), np.array([(one.first, one.end) for one in documents]).T
    if padding := tokens - (end - first).sum():
        first, end = np.append(first, 0), np.append(end, padding)
    lengths = end - first
    starts, prompts = np.cumsum(lengths) - lengths, np.maximum.accumulate(np.arange(len(first)) * (first == 0))
    laid_out = replace(
        micro_batch,
        position_ids=torch.from_numpy(np.arange(tokens) - np.repeat(starts - first, lengths))[None],
        cu_seq_lens=torch.from_numpy(np.append(starts, tokens).astype(np.int32)),
        packed_lengths=tuple(lengths.tolist()),
        max_document_length=int(lengths.max()),
        document_lengths=tuple(lengths[: len(documents)][is_completion].tolist()),
        continued=tuple(int(prompt) if begins else None for prompt, begins in zip(prompts, first, strict=True)),
    ).with_documents()
    places = torch.from_numpy(np.maximum(is_completion.cumsum() - 1, 0))  # of each document among the completions
    return replace(laid_out, trained_documents=places[laid_out.trained_documents])


def _as_tokens(rollout: Rollout, pieces: Sequence[Sequence[int]], learned: Sequence[bool]) -> Tokens:
    """A document of each piece: its prompt, and each completion from the prompt's last token on."""
    ids, labels = list[list[int]](), list[list[int]]()
    for piece in pieces:
        *prompt, last = rollout.prompts[piece[0]]
        completions = [rollout.sampled[place] for place in piece]
        targets = (each.labels(is_learned=learned[i]) for i, each in zip(piece, completions, strict=True))
        ids.append([*prompt, *(token for each in completions for token in (last, *each.token_ids))])
        labels.append([IGNORE_INDEX] * len(prompt) + [label for each in targets for label in (*each, IGNORE_INDEX)])
    trained = [sum(label != IGNORE_INDEX for label in of_piece) for of_piece in labels]
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


def _describe(rollout: Rollout, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """[completions] or [completions, functions]: what the loss and the metrics read of each completion."""
    count = len(rollout.sampled)
    columns = {
        "advantages": find_advantages(rollout, recipe),
        "rewards": rollout.rewards,
        "scores": rollout.scores,
        "deviations": np.repeat(rollout.deviations(), rollout.generations),
        "flat": [rollout.flat_groups / rollout.sampled_groups] * count,
        "groups": [rollout.sampled_groups] * count,
        "tokens": [len(each.log_probabilities) for each in rollout.sampled],
        "calls": [each.calls for each in rollout.sampled],
        "failed_calls": [each.failed_calls for each in rollout.sampled],
        "entropies": [each.entropy for each in rollout.sampled],
        "is_cut": [each.ended is Ended.CUT for each in rollout.sampled],
        "failed": [rollout.failures / (rollout.sampled_groups * rollout.generations)] * count,
    }
    return {name: np.asarray(values, np.float32) for name, values in columns.items()}


def _attach(micro_batch: MicroBatch, rollout: Rollout, columns: dict[str, NDArray[np.float32]]) -> MicroBatch:
    """The micro-batch with the sampler's log-probability at each trained position, that in training where it is known,
    and `columns` of its documents."""
    ids, (has_label, counts) = list(micro_batch.example_ids), _count_labels(micro_batch)
    of_tokens = {"sampled": [each.log_probabilities for each in rollout.sampled], "old": rollout.old}
    tensors: dict[str, Tensor] = {}
    for name, values in ((name, values) for name, values in of_tokens.items() if values):
        found = [value for i, count in zip(ids, counts, strict=True) for value in values[i][:count]]
        tensors[name] = torch.zeros(len(has_label)).masked_scatter(has_label, torch.tensor(found))
    tensors |= {name: torch.from_numpy(values[ids]) for name, values in columns.items()}
    of_prompts = tuple(rollout.example_ids[ids].tolist())
    return replace(micro_batch, rollout=tensors, example_ids=of_prompts)


def _count_labels(micro_batch: MicroBatch) -> tuple[Tensor, list[int]]:
    """Which trained positions have a label, in order of the row; how many of each completion."""
    assert micro_batch.trained_documents is not None
    has_label = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
    counts = torch.bincount(micro_batch.trained_documents[has_label], minlength=len(micro_batch.example_ids))
    return has_label, counts.tolist()
