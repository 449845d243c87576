"""From prompts to a step batch: samples completions, rewards them, and makes the rows of a step.

A group is the `generations` completions of one prompt. A group is flat if its rewards are all
equal. An episode is a completion within an environment, which may extend the prompt and may reward
the completion. A step trains on completions of the prompts of its `prompts_step`; `generations.py`
says which step that is, and which completions are sampled together.

The rollouts of a step are a pure function of the seed, the step and the weights, on any number of
ranks. A resumed run samples them again. But if the weights have had an update since the rollouts
were sampled, the checkpoint holds the rollouts.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from finetune.config.reward_names import name_of_reward
from finetune.config.schema import Recipe
from finetune.data.batches import Ids, StepBatch
from finetune.data.examples import Examples, make_generator
from finetune.data.messages import Message
from finetune.data.packing import StoredBatches
from finetune.data.tool_calls import ToolTurns
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.rollout.completion_rows import (
    RowOptions,
    collect_by_completion,
    lay_out,
    make_step_batch,
)
from finetune.rollout.critic import describe_advantages
from finetune.rollout.engine import (
    Engine,
    Floats,
    Request,
    Rollout,
    Sampled,
    Sampling,
    none_for_nan,
    sample_shares,
)
from finetune.rollout.episodes import Episodes, list_environment_rewards
from finetune.rollout.generations import Generations, Share
from finetune.rollout.reward_models import RewardModel
from finetune.rollout.rewards import Rewards, Scores
from finetune.rollout.turns import Conversations, take_turns
from finetune.rollout.vllm import VllmEngine
from finetune.units import counted

WriteLines = Callable[[list[dict[str, Any]]], None]
MeasureTokens = Callable[[StepBatch], list[dict[str, Tensor]]]
"""Takes a step's batch and returns for each micro-batch the columns "old", "reference" and "values"
(`OF_TOKENS` in engine.py), as far as the loss needs them: name -> fp32[positions].
"""
# Files of a checkpoint:
ROLLOUTS = "rollouts.jsonl"  # the rewarded completions that later steps still train on
IN_FLIGHT = "in_flight.jsonl"  # requests for later steps, and the server's answers so far


@dataclass(slots=True)
class RequestBatch:
    """Requests for completions of some prompts, and the messages of their turns so far.

    `rows` and `messages` are empty except on the main rank.
    """

    example_ids: Ids  # [completions]: the example of each completion's prompt
    generations: int  # completions of each prompt
    requests: list[Request]  # [completions]
    rows: list[dict[str, Any]]  # [completions]: the data row of each completion's prompt
    episodes: Episodes | None  # of all completions; None: the recipe has no environment
    # [completions]: the messages after the prompt; they stay empty if there are no tools
    messages: list[list[Message]] = field(init=False)

    def __post_init__(self) -> None:
        self.messages = [[] for _ in self.rows]

    def list_prompts(self) -> list[list[int]]:
        """Returns the token ids of each completion's prompt: [completions][tokens]."""
        return [list(request.prompt_ids) for request in self.requests]

    def replace_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Replaces the prompt ids by `prompts`, to which environments may have added text."""
        self.requests = [
            request._replace(prompt_ids=tuple(ids))
            for request, ids in zip(self.requests, prompts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples completions of prompts and rewards them, on all ranks together."""

    recipe: Recipe
    world: World
    tokenizer: Any
    engine: Engine | None  # None: this sampler only scores
    rewards: Rewards
    steps: int  # of the whole run
    # whether training computes a prompt once for several completions of its group
    shares_prompts: bool = False
    tools: ToolTurns | None = None  # None: each completion is a single turn
    reward_models: Sequence[RewardModel] = ()

    @property
    def reward_names(self) -> list[str]:
        """The names that metrics give to the recipe's rewards, then to the environments' own."""
        recipe_rewards = [name_of_reward(name) for name in self.recipe.rollout.rewards]
        return recipe_rewards + self.environment_rewards

    @property
    def environment_rewards(self) -> list[str]:
        """The names that metrics give to the rewards that the environments themselves compute."""
        # `load_tokenizer` sets this attribute only if the recipe has environments.
        return list_environment_rewards(getattr(self.tokenizer, "environments", {}))

    def roll_out(
        self,
        examples: Examples,
        example_ids: Ids,
        step: int,
        generations: int,
        *,
        greedy: bool = False,
        prompts_before: int = 0,
    ) -> Rollout:
        """Samples and rewards completions of the prompts `example_ids`.

        All ranks call it. Each samples a share, and each returns all completions.

        Args:
            examples: The examples that are the prompts.
            example_ids: [prompts].
            step: Part of the completions' seeds; reward functions read it.
            generations: Completions of each prompt.
            greedy: Whether each token is the likeliest one instead of a random one.
            prompts_before: The number of prompts already sampled for this step; part of the seeds.

        Raises:
            UserError: A reward or an environment fails, and `on_bad_reward` is error. All ranks
                raise it.
        """
        batch = self.make_requests(examples, example_ids, step, generations, prompts_before)
        assert self.engine is not None
        sampling = self.choose_sampling(greedy=greedy)
        sample = partial(sample_shares, self.engine, self.world, sampling)
        sampled = self._sample_turns(batch, sample, RankGroup(self.world).on_main)
        return self.reward(batch, sampled, step)

    def sample_alone(
        self, batch: RequestBatch, sample: Callable[[Sequence[Request]], list[Sampled]]
    ) -> list[Sampled]:
        """Samples completions by `sample`, without the other ranks; only the main rank calls it.

        It runs in a thread while all ranks train, so it uses no collectives.
        """
        return self._sample_turns(batch, sample, on_main=lambda action: action())

    def reward(self, batch: RequestBatch, sampled: list[Sampled], step: int) -> Rollout:
        """Scores the completions of a batch, and makes a rollout of them. All ranks call it.

        Raises `UserError` on all ranks if a reward fails and `on_bad_reward` is error.
        """
        scores, failures = self._score_all(batch, sampled, step)
        rollout = Rollout(
            example_ids=batch.example_ids,
            prompts=batch.list_prompts(),
            sampled=sampled,
            scores=scores,
            rewards=self._weigh_scores(scores),
            failures=failures,
            generations=batch.generations,
            sampled_groups=len(sampled) // batch.generations,
            flat_groups=0,  # replaced below: counting needs the rollout's rewards
        )
        return replace(rollout, flat_groups=_count_flat_groups(rollout))

    def _sample_turns(
        self,
        batch: RequestBatch,
        sample: Callable[[Sequence[Request]], list[Sampled]],
        on_main: Callable[[Callable[[], Any]], Any],
    ) -> list[Sampled]:
        """Samples a completion of each request: one turn, or several if there are tools.

        Args:
            batch: The requests. If there are environments, the batch's prompts are replaced by
                those that the environments begin with.
            sample: Samples one turn for each request.
            on_main: Runs a function on the main rank, and returns its result on every rank that
                takes part.
        """
        episodes = batch.episodes
        if episodes is not None:
            batch.replace_prompts(on_main(partial(episodes.begin, batch.requests)))
        if self.tools is None:
            return sample(batch.requests)
        conversations = Conversations(
            self.tools,
            self.rewards,
            self.recipe.rollout.max_completion_length,
            batch.rows,
            messages=batch.messages,
            first_place=0 if episodes is None else episodes.first_place,
        )
        # A completion may have one turn more, after the tools have answered the last calls.
        most_calling_turns = self.recipe.rollout.max_tool_calling_iterations
        return take_turns(batch.requests, sample, conversations, most_calling_turns, on_main)

    def _score_all(
        self, batch: RequestBatch, sampled: Sequence[Sampled], step: int
    ) -> tuple[Floats, int]:
        """Scores completions by functions, environments and reward models. All ranks call it.

        Returns:
            (fp64[completions, rewards], the scores in the order of `reward_names`; the number of
            completions with at least one score that failed and became 0), on every rank.
        """
        scored = RankGroup(self.world).on_main(
            lambda: asdict(self.score(batch.rows, sampled, batch.messages, step, batch.episodes))
        )
        names = self.rewards.names + self.environment_rewards  # the order of `Scores.by_reward`
        by_name = dict(zip(names, scored["by_reward"], strict=True))
        failed = set(scored["failed"])
        for model in self.reward_models:
            by_name[model.name], not_finite = self._score_by_model(
                model, batch.rows, sampled, batch.messages
            )
            failed.update(not_finite)
        ordered = [by_name[name] for name in self.reward_names]
        return np.array(ordered, np.float64).T.reshape(len(sampled), len(ordered)), len(failed)

    def _weigh_scores(self, scores: Floats) -> Floats:
        """Computes each completion's reward, the weighted sum of its scores: fp64[completions].

        A completion without any score has the reward nan. An environment's own reward has weight 1.

        scores: [completions, rewards]; nan: no score.
        """
        keys = self.recipe.rollout
        recipe_weights = keys.reward_weights or (1.0,) * len(keys.rewards)
        environment_weights = (1.0,) * len(self.environment_rewards)
        weights = np.array([*recipe_weights, *environment_weights])
        has_no_score = np.isnan(scores).all(1)
        return np.where(has_no_score, np.nan, np.nansum(scores * weights, 1))

    def choose_sampling(self, *, greedy: bool = False) -> Sampling:
        """Makes the recipe's settings for sampling; under `greedy` each token is the likeliest."""
        return Sampling(
            max_tokens=self.recipe.rollout.max_completion_length,
            temperature=self.recipe.method.temperature,
            greedy=greedy,
        )

    def make_requests(
        self,
        examples: Examples,
        example_ids: Ids,
        step: int,
        generations: int,
        prompts_before: int = 0,
    ) -> RequestBatch:
        """Makes the requests for `generations` completions of each prompt.

        A request's seed consists of the run's seed, the step, the prompt's number in the step
        (`prompts_before` for the first one), and the completion's number in its group.
        """
        requests = []
        for prompt_number, example_id in enumerate(example_ids.tolist(), prompts_before):
            prompt_ids = tuple(examples[example_id].input_ids.tolist())
            images = tuple(examples.read_images(example_id))
            for number in range(generations):
                seed = (self.recipe.run.seed, step, prompt_number, number)
                requests.append(Request(prompt_ids, seed, images=images))
        completion_ids = np.repeat(example_ids, generations)
        rows = read_rows(examples, completion_ids) if self.world.is_main else []
        episodes = None
        if self.recipe.rollout.environment:
            # Environments live in the main rank's reward process, and are numbered over the whole
            # run. The episodes of other ranks have no rows, and are never asked.
            first_place = self.rewards.take_places(len(rows))
            episodes = Episodes(self.recipe, self.tokenizer, self.rewards, first_place, rows)
        return RequestBatch(completion_ids, generations, requests, rows, episodes)

    def score(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampled: Sequence[Sampled],
        messages: Sequence[list[Message]],
        step: int,
        episodes: Episodes | None = None,
    ) -> Scores:
        """Scores each completion by the functions, then by the environments' own rewards.

        The main rank calls it. The environments end first, because functions may read the states
        in which they ended.

        Args:
            rows: [completions]: the data row of each completion's prompt.
            sampled: [completions].
            messages: [completions]: the messages after each prompt; empty if there are no tools.
            step: 0-based.
            episodes: The completions' environments; None: the recipe has none.
        """
        ended = None if episodes is None else episodes.end()
        completions = self.read_completions(rows, sampled, messages)
        names = sorted({name for row in rows for name in row["columns"]})
        columns = {name: [row["columns"].get(name) for row in rows] for name in names}
        trainer_state = {
            "global_step": step,
            "max_steps": self.steps,
            "max_completion_length": self.recipe.rollout.max_completion_length,
            "soft_punish_cache": self.recipe.rollout.soft_punish_cache,
        }
        if ended is not None:
            columns["environments"] = ended.states
        token_ids = [completion.token_ids for completion in sampled]
        prompts = [row["prompt"] for row in rows]
        scores = self.rewards.score(prompts, completions, token_ids, columns, trainer_state)
        if ended is None:
            return scores
        return Scores(
            scores.by_reward + list(ended.rewards.values()), sorted({*scores.failed, *ended.lost})
        )

    def read_completions(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampled: Sequence[Sampled],
        messages: Sequence[list[Message]],
    ) -> list[Any]:
        """Reads each completion as text, or as messages if its prompt is a conversation.

        messages: [completions]: the messages after each prompt; empty if there are no tools. Then
            the completion's text is its only message.
        """
        texts = self.tokenizer.batch_decode(
            [completion.token_ids for completion in sampled], skip_special_tokens=True
        )
        completions: list[Any] = []
        for row, turns, text in zip(rows, messages, texts, strict=True):
            if isinstance(row["prompt"], str):
                completions.append(text)
            else:
                completions.append(turns or [{"role": "assistant", "content": text}])
        return completions

    def _score_by_model(
        self,
        model: RewardModel,
        rows: Sequence[Mapping[str, Any]],
        sampled: Sequence[Sampled],
        messages: Sequence[list[Message]],
    ) -> tuple[list[float], list[int]]:
        """Scores completions by a reward model. All ranks call it; each scores a share.

        Args:
            model: The reward model.
            rows: [completions]: the rows of the prompts; on the main rank only.
            sampled: [completions].
            messages: [completions]: the messages after each prompt; on the main rank only.

        Returns:
            (the scores, with 0 for those that are not finite; the places of these), on every rank.

        Raises:
            UserError: A score is not finite, and `on_bad_reward` is error; or the reward model's
                chat template rejects a conversation. All ranks raise it.
        """

        def encode() -> list[list[int]]:
            completions = self.read_completions(rows, sampled, messages)
            return [model.text.encode(*each) for each in zip(rows, completions, strict=True)]

        documents = RankGroup(self.world).on_main(encode)
        ranks = self.world.size
        scores = [0.0] * len(documents)
        by_rank = self.world.gather(model.score(documents[self.world.rank :: ranks]))
        for rank, scores_of_rank in enumerate(by_rank):
            scores[rank::ranks] = scores_of_rank
        finite_scores = [score if math.isfinite(score) else 0.0 for score in scores]
        failed = [place for place, score in enumerate(scores) if not math.isfinite(score)]
        if failed and self.recipe.rollout.on_bad_reward == "error":
            raise UserError(
                f"rewards: {model.text.name}: gave {counted(len(failed), 'completion')} a score "
                "that is no finite number (on_bad_reward: zero counts such completions and "
                "continues)"
            )
        return finite_scores, failed


def read_rows(examples: Examples, ids: Ids) -> list[dict[str, Any]]:
    """Reads the data row of each example in `ids`, each distinct example once."""
    row_by_id = {
        example_id: examples.read_row(example_id) for example_id in np.unique(ids).tolist()
    }
    return [row_by_id[example_id] for example_id in ids.tolist()]


def _count_flat_groups(rollout: Rollout) -> int:
    """Counts the groups of a rollout whose rewards are all equal."""
    return int((rollout.deviations() == 0).sum())


@dataclass(frozen=True, slots=True)
class RolloutBatches:
    """The step batches of a run that samples, for one rank."""

    sampler: Sampler
    prompts: StoredBatches
    # Measures the sampled tokens before the generation's first update; None: the loss needs no such
    # columns.
    measure_tokens: MeasureTokens | None = None
    # By `prompts_step`: the rollouts of the current generation, and the requests that a server
    # samples ahead of training.
    _held: dict[int, Rollout] = field(default_factory=dict)
    _requested: dict[int, RequestBatch] = field(default_factory=dict)

    def batches(
        self, from_step: int = 0, record: WriteLines = lambda lines: None
    ) -> Iterator[StepBatch]:
        """Yields the step batches from `from_step` to the end, each made when it is asked for.

        All ranks ask together, because they sample together.

        record: Called on the main rank with lines of completions.jsonl; see `step_batch`.
        """
        for step in range(from_step, self.prompts.steps):
            yield self.step_batch(step, record)

    def step_batch(self, step: int, record: WriteLines = lambda lines: None) -> StepBatch:
        """Makes this rank's share of a step.

        At the first step of a generation it samples all of the generation, or takes what a server
        has sampled ahead. All ranks call it.

        record: Called on the main rank with the lines of completions.jsonl, at the first step that
            trains on these completions.
        """
        if self.schedule.begins_at(step):
            self._sample_generation(step)
        prompts_step, times_trained = self.schedule.find_prompts_step(step)
        rollout = self._held[prompts_step]
        if self.sampler.world.is_main and times_trained == 0:
            record(list(self._describe_lines(rollout, step)))
        if self._samples_ahead:
            # The next hand-over of weights, of an evaluation or of the next generation, comes after
            # this step's update.
            self._engine.version = step + 1
        epoch = (step + 1) / self.prompts.steps_per_epoch
        return replace(make_step_batch(rollout, self._row_options), step=step, epoch=epoch)

    @property
    def schedule(self) -> Generations:
        """What is sampled together, over the whole run."""
        keys = self.sampler.recipe.rollout
        return Generations(self.prompts.steps, keys.steps_per_generation, keys.num_iterations)

    @property
    def _row_options(self) -> RowOptions:
        """The options for laying out this rank's share of the completions."""
        sampler = self.sampler
        # A tokenizer may lack a pad token; then padding has the id 0.
        pad_token_id = getattr(sampler.tokenizer, "pad_token_id", None) or 0
        rank = sampler.world.data_parallel
        return RowOptions(sampler.recipe, rank, pad_token_id, sampler.shares_prompts, self.prompts)

    @property
    def _samples_ahead(self) -> bool:
        """Whether a server samples for later steps while this one trains."""
        return self.sampler.recipe.rollout.max_staleness > 0

    @property
    def _has_server(self) -> bool:
        return self.sampler.recipe.rollout.vllm_server_base_url is not None

    @property
    def _engine(self) -> VllmEngine:
        """The sampler's engine as that of a server. Only runs with a server use it."""
        return cast(VllmEngine, self.sampler.engine)

    def _sample_generation(self, step: int) -> None:
        """Replaces the held rollouts by those of the generation that begins at `step`.

        The completions are sampled now, or taken from the server if it samples ahead.
        """
        self._held.clear()
        sampled_ahead: dict[int, list[Sampled]] = {}
        if self._samples_ahead:
            sampled_ahead = self._take_and_submit_next(step)
        for prompts_step, first_trained_at in self.schedule.list_shares(step):
            rollout = self._sample_step(
                prompts_step, first_trained_at, sampled_ahead.get(prompts_step)
            )
            if self._has_server:
                # The seconds of the latest hand-over, which may have been for a later generation.
                rollout = replace(rollout, hand_over_seconds=self._engine.hand_over_seconds)
            self._held[prompts_step] = rollout

    def _take_and_submit_next(self, step: int) -> dict[int, list[Sampled]]:
        """Takes the completions of the generation at `step`, then submits the next generations.

        At the start of a run and after a resume the generation at `step` is not in flight, and is
        submitted here too. After a resume the engine answers requests from the checkpoint's lines
        (`resume`) if they hold the completion. The next `max_staleness` generations are submitted.

        Returns the completions by their `prompts_step`.
        """
        engine = self._engine
        engine.version = step
        shares = list(self.schedule.list_shares(step))
        has_begun = engine.is_in_flight(shares[0].prompts_step)
        if not has_begun:
            engine.hand_over()
            self._submit(shares)
        sampled = {share.prompts_step: engine.take(share.prompts_step) for share in shares}
        engine.hand_over()  # the next generations begin with the current weights
        max_staleness = self.sampler.recipe.rollout.max_staleness
        for later_step in self.schedule.list_later(step, max_staleness):
            self._submit(self.schedule.list_shares(later_step))
        return sampled

    def _submit(self, shares: Iterable[Share]) -> None:
        """Has the server begin the completions of `shares`, except those that are in flight.

        A share is in flight if an earlier generation has already submitted it. All ranks call it:
        the main rank alone knows what is in flight, and each rank keeps the requests for
        `_sample_step`.
        """
        sampler = self.sampler
        for prompts_step, first_trained_at in shares:
            if not self._engine.is_in_flight(prompts_step):
                example_ids = np.concatenate(self.prompts.rows_of(prompts_step))
                batch = sampler.make_requests(
                    self.prompts.examples,
                    example_ids,
                    first_trained_at,
                    sampler.recipe.rollout.num_generations,
                )
                self._requested[prompts_step] = batch
                sampling = sampler.choose_sampling()
                if sampler.tools is None and batch.episodes is None:
                    self._engine.submit(prompts_step, batch.requests, sampling)
                else:  # a thread of the main rank samples turn by turn, while all ranks train
                    converse = partial(sampler.sample_alone, batch)
                    self._engine.converse(prompts_step, converse, sampling)

    def _sample_step(
        self, prompts_step: int, first_trained_at: int, sampled_ahead: list[Sampled] | None = None
    ) -> Rollout:
        """Samples and rewards completions of the prompts of a step. All ranks call it.

        Groups of equal rewards are replaced if the recipe says so, and tokens are measured if the
        loss needs that.

        Args:
            prompts_step: The step whose prompts are taken.
            first_trained_at: The first step that trains on the completions; part of their seeds.
            sampled_ahead: The completions, on every rank, if they were sampled ahead; None: they
                are sampled now.
        """
        example_ids = np.concatenate(self.prompts.rows_of(prompts_step))
        if sampled_ahead is not None:
            batch = self._requested.pop(prompts_step)
            if batch.episodes is not None:
                # Environments have changed the prompts, on the main rank alone.
                batch.replace_prompts(RankGroup(self.sampler.world).on_main(batch.list_prompts))
            rollout = self.sampler.reward(batch, sampled_ahead, first_trained_at)
        else:
            rollout = self.sampler.roll_out(
                self.prompts.examples,
                example_ids,
                first_trained_at,
                self.sampler.recipe.rollout.num_generations,
            )
        if self.sampler.recipe.rollout.max_num_gen_batches > 1:
            rollout = self._replace_flat_groups(rollout, example_ids, first_trained_at)
        if self.measure_tokens is None:
            return rollout
        return replace(rollout, **self._collect_tokens(self.measure_tokens, rollout))

    def _replace_flat_groups(self, rollout: Rollout, example_ids: Ids, step: int) -> Rollout:
        """Replaces flat groups by groups of other prompts, then drops those that are still flat.

        It samples other prompts until no group is flat, no prompt is left, or the step has sampled
        `max_num_gen_batches` times. If all groups are flat at the end, it keeps them.
        """
        keys = self.sampler.recipe.rollout
        examples = self.prompts.examples
        generator = make_generator(self.sampler.recipe.run.seed, "other prompts", step)
        shuffled_ids = generator.permutation(len(examples))
        other_ids = iter(shuffled_ids[~np.isin(shuffled_ids, example_ids)])
        for _ in range(1, keys.max_num_gen_batches):
            ids = np.fromiter(islice(other_ids, _count_flat_groups(rollout)), np.int64)
            if not len(ids):  # no group is flat, or no prompt is left
                break
            more = self.sampler.roll_out(
                examples, ids, step, keys.num_generations, prompts_before=rollout.sampled_groups
            )
            joined = rollout.join(more)
            flat_last = np.argsort(joined.deviations() == 0, kind="stable")
            rollout = joined.select(flat_last[: len(example_ids)])
        not_flat = np.flatnonzero(rollout.deviations())
        return rollout.select(not_flat) if len(not_flat) else rollout

    def _collect_tokens(self, measure: MeasureTokens, rollout: Rollout) -> dict[str, Any]:
        """Collects the columns of `measure` from all ranks: name -> [completions][trained tokens].

        All ranks call it, and each returns all. Values are kept by completion rather than by place
        in a micro-batch, because a run that resumes on other ranks deals completions differently.
        """
        batch = lay_out(rollout, self._row_options)
        # (column's name, completion's place in the rollout, values), of this rank's completions
        measured: list[tuple[str, int, list[float]]] = []
        for micro_batch, columns in zip(batch.micro_batches, measure(batch), strict=True):
            for name, column in columns.items():
                for completion, values in collect_by_completion(micro_batch, column).items():
                    measured.append((name, completion, values))
        collected: dict[str, dict[int, list[float]]] = {}
        for name, completion, values in chain.from_iterable(self.sampler.world.gather(measured)):
            collected.setdefault(name, {})[completion] = values
        return {
            name: [by_completion[i] for i in range(len(rollout.sampled))]
            for name, by_completion in collected.items()
        }

    def describe_files(self, step: int) -> dict[str, bytes]:
        """Returns a checkpoint's files by name: the completions that steps from `step` on need.

        Also has the engine drop records that only older checkpoints need. The main rank calls it.
        """
        if self._has_server:
            self._engine.forget()
        if step >= self.prompts.steps:
            return {}
        files = {}
        if self._samples_ahead:
            files[IN_FLIGHT] = _encode_lines(self._engine.describe_lines())
        if not self.schedule.begins_at(step):
            files[ROLLOUTS] = _encode_lines(
                line | {"prompts_step": prompts_step}
                for prompts_step, rollout in self._held.items()
                for line in rollout.describe_lines(self.sampler.tokenizer)
            )
        return files

    def resume(self, checkpoint: Path, step: int) -> None:
        """Reads the completions of a verified checkpoint after `step` steps. All ranks call it.

        Raises `UserError` if the checkpoint lacks completions that this generation still needs.
        """
        self._held.clear()
        if self._samples_ahead:
            self._engine.version = step
            # When these requests are submitted again, the engine answers them from the lines.
            self._engine.recall(_read_lines(checkpoint / IN_FLIGHT))
        if self.schedule.begins_at(step) or step >= self.prompts.steps:
            return
        by_step: dict[int, list[dict[str, Any]]] = {}
        for line in _read_lines(checkpoint / ROLLOUTS):
            by_step.setdefault(line["prompts_step"], []).append(line)
        self._held.update(
            {prompts_step: Rollout.of_lines(lines) for prompts_step, lines in by_step.items()}
        )
        updates = self.schedule.updates_per_generation
        sampled_at = step - step % updates  # the first step of this generation
        for later in range(step, min(sampled_at + updates, self.prompts.steps)):
            prompts_step, _ = self.schedule.find_prompts_step(later)
            if prompts_step not in self._held:
                raise UserError(
                    f"{checkpoint}: holds no completions for step {later + 1}, which trains "
                    f"on what step {sampled_at + 1} sampled; set num_iterations, "
                    "steps_per_generation and max_steps as they were"
                )

    def _describe_lines(self, rollout: Rollout, step: int) -> Iterator[dict[str, Any]]:
        """Yields a line of completions.jsonl for each completion of the first `log_completions`
        prompts.

        step: 0-based.
        """
        keys = self.sampler.recipe.rollout
        tokenizer = self.sampler.tokenizer
        names = self.sampler.reward_names
        advantages = describe_advantages(rollout, self.sampler.recipe)
        log_count = min(keys.log_completions * rollout.generations, len(rollout.sampled))
        for i in range(log_count):
            completion = rollout.sampled[i]
            scores = map(none_for_nan, rollout.scores[i].tolist())
            line = {
                "step": step + 1,
                "prompt": tokenizer.decode(rollout.prompts[i]),
                "completion": tokenizer.decode(completion.token_ids),
                "token_ids": completion.token_ids,
                "ended": completion.ended.value,
            }
            if completion.tool_mask:
                parts = _split_by_speaker(completion, tokenizer)
                line |= {"tool_mask": completion.tool_mask, "parts": parts}
            line["rewards"] = dict(zip(names, scores, strict=True))
            line["advantage"] = float(advantages[i])
            yield line


def _encode_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Encodes `lines` as the content of a JSON-lines file."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file of a checkpoint; returns [] if there is no such file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _split_by_speaker(completion: Sampled, tokenizer: Any) -> list[str]:
    """Splits a completion's text into what the model wrote and what tools answered, in order."""
    masked_ids = zip(completion.tool_mask, completion.token_ids, strict=True)
    parts = groupby(masked_ids, key=itemgetter(0))  # runs of tokens with the same speaker
    return [tokenizer.decode([token for _, token in part]) for _, part in parts]
