"""From prompts to a step batch: completions are sampled, rewarded and compared, and become the rows
of a step.

A group is the completions of one prompt, of which there are `generations`; it is flat if their
rewards are all equal. `generations.py` says what is sampled together, and on the prompts of which
step, the `prompts_step`, a step trains. An episode is a completion within an environment, which may
change its prompt and reward it.

The rollouts of a step are a pure function of the seed, the step and the weights, on any number of
ranks. A resumed run samples them again, unless the weights have moved since: a checkpoint between
two updates on the same rollouts holds them.
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
    ServedEngine,
)
from finetune.rollout.episodes import Episodes, list_environment_rewards
from finetune.rollout.generations import Generations, Share
from finetune.rollout.reward_models import RewardModel
from finetune.rollout.rewards import Rewards, Scores
from finetune.rollout.turns import Conversations, take_turns
from finetune.units import counted

WriteLines = Callable[[list[dict[str, Any]]], None]
MeasureTokens = Callable[[StepBatch], list[dict[str, Tensor]]]
"""A step's batch -> for each micro-batch, fp32[positions] by name: "old", "reference", "values"
(`OF_TOKENS` in engine.py).
"""
ROLLOUTS = "rollouts.jsonl"  # of a checkpoint: what the steps after it are still to train on
IN_FLIGHT = "in_flight.jsonl"  # what has been begun for them, and is not rewarded yet


@dataclass(slots=True)
class RequestBatch:
    """Requests for completions of some prompts, and the messages of their turns so far.

    Only the main rank has rows and messages; they are empty on others.
    """

    example_ids: Ids  # [completions]: the prompts'
    generations: int  # completions of each prompt
    requests: list[Request]
    rows: list[dict[str, Any]]  # [completions]
    episodes: Episodes | None  # one for each completion
    messages: list[list[Message]] = field(init=False)  # [completions]

    def __post_init__(self) -> None:
        self.messages = [[] for _ in self.rows]

    def list_prompts(self) -> list[list[int]]:
        """The prompt ids of each completion."""
        return [list(request.prompt_ids) for request in self.requests]

    def replace_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Replaces the prompt ids: environments have added to the prompts when they began."""
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
    engine: Engine | None  # None: nothing is sampled
    rewards: Rewards
    steps: int  # in the whole run
    shares_prompts: bool = False  # whether a step computes the prompt of a group once
    tools: ToolTurns | None = None  # None: no tool is called
    reward_models: Sequence[RewardModel] = ()

    @property
    def reward_names(self) -> list[str]:
        """The metrics' names of the recipe's rewards, then of those that environments give."""
        named = [name_of_reward(name) for name in self.recipe.rollout.rewards]
        return named + self.environment_rewards

    @property
    def environment_rewards(self) -> list[str]:
        """The metrics' names of the rewards that environments give themselves."""
        # load_tokenizer sets them where the recipe has some
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
        """Samples and rewards completions of the prompts `example_ids`. All ranks call it; each
        samples a share, and every rank returns all.

        Args:
            examples: The prompts' store.
            example_ids: [prompts].
            step: Part of the completions' seeds; reward functions read it.
            generations: Completions of each prompt.
            greedy: Whether the likeliest tokens are taken.
            prompts_before: How many prompts were sampled for the step before these; part of the
                seeds.

        Raises:
            UserError: On all ranks, for what a reward function does wrong.
        """
        batch = self.make_requests(examples, example_ids, step, generations, prompts_before)
        sample = partial(self._sample_requests, self.choose_sampling(greedy=greedy))
        sampled = self._sample_turns(batch, sample, RankGroup(self.world).on_main)
        return self.reward(batch, sampled, step)

    def sample_alone(
        self, batch: RequestBatch, sample: Callable[[Sequence[Request]], list[Sampled]]
    ) -> list[Sampled]:
        """Samples completions by `sample` on the main rank alone, in a thread, while all ranks
        train. No other rank gets them from here.
        """
        return self._sample_turns(batch, sample, on_main=lambda action: action())

    def reward(self, batch: RequestBatch, sampled: list[Sampled], step: int) -> Rollout:
        """Scores the completions of a batch. All ranks call it.

        Raises `UserError` on all ranks for what a reward function does wrong.
        """
        scores, failures = self._score_all(batch, sampled, step)
        rollout = Rollout(
            example_ids=batch.example_ids,
            prompts=batch.list_prompts(),
            sampled=sampled,
            scores=scores,
            rewards=self._weigh(scores),
            failures=failures,
            generations=batch.generations,
            sampled_groups=len(sampled) // batch.generations,
            flat_groups=0,  # known once the rollout has its rewards
        )
        return replace(rollout, flat_groups=_count_flat_groups(rollout))

    def _sample_turns(
        self,
        batch: RequestBatch,
        sample: Callable[[Sequence[Request]], list[Sampled]],
        on_main: Callable[[Callable[[], Any]], Any],
    ) -> list[Sampled]:
        """Samples a completion of each request; where there are tools, with their turns.

        Args:
            batch: The requests. Environments may give them other prompts.
            sample: Samples one turn of each request.
            on_main: Runs a function on the main rank, and returns its result on all ranks.
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
        calling_turns = self.recipe.rollout.max_tool_calling_iterations  # one more may follow
        return take_turns(batch.requests, sample, conversations, calling_turns, on_main)

    def _score_all(
        self, batch: RequestBatch, sampled: Sequence[Sampled], step: int
    ) -> tuple[Floats, int]:
        """Scores completions by functions, environments and reward models.

        Returns:
            (the scores in the order of `reward_names`, fp64[completions, rewards]; the number of
            completions of which one score or more failed and became 0), on every rank.
        """
        scored = RankGroup(self.world).on_main(
            lambda: asdict(self.score(batch.rows, sampled, batch.messages, step, batch.episodes))
        )
        names = self.rewards.names + self.environment_rewards  # of functions, then of environments
        by_name = dict(zip(names, scored["by_reward"], strict=True))
        failed = set(scored["failed"])
        for model in self.reward_models:
            by_name[model.name], not_finite = self._score_by_model(
                model, batch.rows, sampled, batch.messages
            )
            failed.update(not_finite)
        ordered = [by_name[name] for name in self.reward_names]
        return np.array(ordered, np.float64).T.reshape(len(sampled), len(ordered)), len(failed)

    def _weigh(self, scores: Floats) -> Floats:
        """Returns fp64[completions]: the weighted sum of each one's scores [completions, rewards];
        nan where no function has scored it.
        """
        keys = self.recipe.rollout
        of_recipe = keys.reward_weights or (1.0,) * len(keys.rewards)
        of_environments = (1.0,) * len(self.environment_rewards)
        weights = np.array([*of_recipe, *of_environments])
        return np.where(np.isnan(scores).all(1), np.nan, np.nansum(scores * weights, 1))

    def choose_sampling(self, *, greedy: bool = False) -> Sampling:
        """The recipe's settings of sampling; `greedy` takes the likeliest tokens instead."""
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

        A request's seed is made of the run's seed, the step, the place of its prompt (counted from
        `prompts_before`) and the number of its completion.
        """
        requests = []
        for place, example_id in enumerate(example_ids.tolist(), prompts_before):
            prompt = tuple(examples[example_id].input_ids.tolist())
            images = tuple(examples.read_images(example_id))
            requests += [
                Request(prompt, (self.recipe.run.seed, step, place, number), images=images)
                for number in range(generations)
            ]
        completion_ids = np.repeat(example_ids, generations)
        rows = read_rows(examples, completion_ids) if self.world.is_main else []
        episodes = None
        if self.recipe.rollout.environment:
            # Environments live in the rewards' process, in places that are numbered over the whole
            # run. The main rank alone has it; the episodes of others have no rows.
            first_place = self.rewards.reserve_places(len(rows))
            episodes = Episodes(self.recipe, self.tokenizer, self.rewards, first_place, rows)
        return RequestBatch(completion_ids, generations, requests, rows, episodes)

    def make_row_options(self, prompts: StoredBatches) -> RowOptions:
        """The options by which this rank lays out its share of the completions of `prompts`."""
        pad_token_id = getattr(self.tokenizer, "pad_token_id", None) or 0
        return RowOptions(
            self.recipe, self.world.data_parallel, pad_token_id, self.shares_prompts, prompts
        )

    def _sample_requests(self, sampling: Sampling, requests: Sequence[Request]) -> list[Sampled]:
        """A completion of each request. Each tensor parallel group samples a share, which all of
        its ranks compute.
        """
        assert self.engine is not None
        groups = self.world.tensor_group_count
        index = self.world.tensor_group_index
        first = len(requests) * index // groups
        end = len(requests) * (index + 1) // groups
        own = self.engine.sample(requests[first:end], sampling)
        by_rank = self.world.gather([completion.as_json() for completion in own])
        # A group's ranks are neighbors and have the same completions; its first rank's are taken.
        # The ranks of the first pipeline stage come first; the later stages repeat its groups.
        ranks_in_group = self.world.stage_size // groups
        by_group = [by_rank[group * ranks_in_group] for group in range(groups)]
        return [Sampled.of_json(values) for values in chain.from_iterable(by_group)]

    def score(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampled: Sequence[Sampled],
        messages: Sequence[list[Message]],
        step: int,
        episodes: Episodes | None = None,
    ) -> Scores:
        """Scores each completion by the functions, then by the environments' own rewards.

        Environments end before the functions are called, which read their states.

        Args:
            rows: [completions]: the prompts' rows.
            sampled: [completions].
            messages: [completions]: the turns of each; an empty list where no tool could be called.
            step: 0-based.
            episodes: The completions' environments.
        """
        ended = None
        rewards_of_environments: list[list[float | None]] = []
        lost: list[bool] = []  # [completions]: whether the environment failed; counts as a failure
        if episodes is not None:
            ended = episodes.end()
            rewards_of_environments = list(ended.rewards.values())
            lost = ended.lost
        if not self.rewards.names:
            failed = [place for place, is_lost in enumerate(lost) if is_lost]
            return Scores(rewards_of_environments, failed)
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
        token_ids = [s.token_ids for s in sampled]
        prompts = [row["prompt"] for row in rows]
        scores = self.rewards.score(prompts, completions, token_ids, columns, trainer_state, lost)
        return replace(scores, by_reward=scores.by_reward + rewards_of_environments)

    def read_completions(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampled: Sequence[Sampled],
        messages: Sequence[list[Message]],
    ) -> list[Any]:
        """Each completion as text, or as messages where its prompt is a conversation."""
        texts = self.tokenizer.batch_decode(
            [s.token_ids for s in sampled], skip_special_tokens=True
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
        """Scores completions by a reward model. All ranks compute.

        Args:
            model: The reward model.
            rows: The prompts' rows, on the main rank.
            sampled: [completions].
            messages: The turns of each completion, on the main rank.

        Returns:
            (the scores; the places of those that were not finite, which became 0).

        Raises:
            UserError: On all ranks: a score is not finite, and `on_bad_reward` is error; or the
                chat template rejects a conversation.
        """

        def encode() -> list[list[int]]:
            completions = self.read_completions(rows, sampled, messages)
            prompts = (row["prompt"] for row in rows)
            return [model.text.encode(*each) for each in zip(prompts, completions, strict=True)]

        documents = RankGroup(self.world).on_main(encode)
        ranks = self.world.size
        scores = [0.0] * len(documents)
        for rank, own in enumerate(
            self.world.gather(model.score(documents[self.world.rank :: ranks]))
        ):
            scores[rank::ranks] = own
        numbers = [score if math.isfinite(score) else 0.0 for score in scores]
        failed = [place for place, score in enumerate(scores) if not math.isfinite(score)]
        if failed and self.recipe.rollout.on_bad_reward == "error":
            raise UserError(
                f"rewards: {model.text.name}: gave {counted(len(failed), 'completion')} a score "
                "that is no finite number (on_bad_reward: zero counts such completions and "
                "continues)"
            )
        return numbers, failed


def read_rows(examples: Examples, ids: Ids) -> list[dict[str, Any]]:
    """[completions]: the rows of the prompts `ids`."""
    row_by_id = {
        example_id: examples.read_row(example_id) for example_id in np.unique(ids).tolist()
    }
    return [row_by_id[example_id] for example_id in ids.tolist()]


def _count_flat_groups(rollout: Rollout) -> int:
    """Counts the flat groups of a rollout, without those that it has dropped."""
    return int((rollout.deviations() == 0).sum())


@dataclass(frozen=True, slots=True)
class RolloutBatches:
    """The step batches of a run that samples, for one rank."""

    sampler: Sampler
    prompts: StoredBatches
    # runs before the first update on a rollout; None where the loss needs nothing of before it
    measure_tokens: MeasureTokens | None = None
    # by prompts_step: what is still trained on; what is sampled ahead, and not rewarded yet
    _held: dict[int, Rollout] = field(default_factory=dict)
    _requested: dict[int, RequestBatch] = field(default_factory=dict)

    def batches(
        self, from_step: int = 0, record: WriteLines = lambda lines: None
    ) -> Iterator[StepBatch]:
        """The step batches from `from_step` to the end, each made when it is asked for; the first
        of a generation samples for all of it, or takes what was sampled ahead.

        All ranks ask together.

        `record`: gets the lines of completions.jsonl of each step, on the main rank.
        """
        for step in range(from_step, self.prompts.steps):
            yield self.step_batch(step, record)

    def step_batch(self, step: int, record: WriteLines = lambda lines: None) -> StepBatch:
        """This rank's share of the step, whose completions all ranks have sampled together."""
        if self.schedule.begins_at(step):
            self._sample_generation(step)
        prompts_step, times_trained = self.schedule.find_prompts_step(step)
        rollout = self._held[prompts_step]
        if self.sampler.world.is_main and times_trained == 0:
            record(list(self._describe_lines(rollout, step)))
        if self._samples_ahead:  # the weights of the next hand-over have had this step's update
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
        return self.sampler.make_row_options(self.prompts)

    @property
    def _samples_ahead(self) -> bool:
        """Whether a server samples for later steps while this one trains."""
        return self.sampler.recipe.rollout.max_staleness > 0

    @property
    def _engine(self) -> ServedEngine:
        return cast(ServedEngine, self.sampler.engine)  # rules ask for a server

    def _sample_generation(self, step: int) -> None:
        """Replaces the held rollouts by those of the generation that begins at `step`.

        They are sampled now, or taken where the server has begun them at an earlier step, under
        older weights.
        """
        self._held.clear()
        taken: dict[int, list[Sampled]] = {}
        if self._samples_ahead:
            taken = self._take_and_submit_next(step)
        for prompts_step, first_trained_at in self.schedule.list_shares(step):
            rollout = self._sample_step(prompts_step, first_trained_at, taken.get(prompts_step))
            if self.sampler.recipe.rollout.vllm_server_base_url is not None:
                # the seconds of the latest hand-over: this share's own where it is sampled now
                rollout = replace(rollout, hand_over_seconds=self._engine.hand_over_seconds)
            self._held[prompts_step] = rollout

    def _take_and_submit_next(self, step: int) -> dict[int, list[Sampled]]:
        """Returns the completions that were sampled ahead for the generation at `step`, by the
        steps of their prompts, and has the server begin those of the next generations that it has
        not begun.

        Where nothing of this generation has begun, at the start of a run or after a resume, it is
        submitted here too. After a resume the engine answers its requests from the checkpoint's
        lines (`resume`), as far as they go.
        """
        engine = self._engine
        engine.version = step
        shares = list(self.schedule.list_shares(step))
        has_begun = engine.is_in_flight(shares[0].prompts_step)
        if not has_begun:
            engine.hand_over()
            self._submit(shares)
        taken = {share.prompts_step: engine.take(share.prompts_step) for share in shares}
        engine.hand_over()  # what begins from here on has these weights
        max_staleness = self.sampler.recipe.rollout.max_staleness
        for later in self.schedule.list_later(step, max_staleness):
            self._submit(self.schedule.list_shares(later))
        return taken

    def _submit(self, shares: Iterable[Share]) -> None:
        """Has the server begin completions of those shares that it has not begun.

        A share may be passed several times, once by each earlier generation. All ranks call it.
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
                else:  # a thread of the main rank takes the turns, while all ranks train
                    converse = partial(sampler.sample_alone, batch)
                    self._engine.converse(prompts_step, converse, sampling)

    def _sample_step(
        self, prompts_step: int, first_trained_at: int, taken: list[Sampled] | None = None
    ) -> Rollout:
        """Samples and rewards completions of the prompts of a step, and measures their tokens where
        the loss asks for that.

        Args:
            prompts_step: The step whose prompts are drawn.
            first_trained_at: The step that seeds the completions, the first that trains on them.
            taken: On every rank the completions, if they were sampled ahead; None: they are sampled
                now.
        """
        example_ids = np.concatenate(self.prompts.rows_of(prompts_step))
        if taken is not None:
            batch = self._requested.pop(prompts_step)
            if batch.episodes is not None:  # they have changed the prompts, on the main rank alone
                batch.replace_prompts(RankGroup(self.sampler.world).on_main(batch.list_prompts))
            rollout = self.sampler.reward(batch, taken, first_trained_at)
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
        """Replaces flat groups by groups of other prompts, which may be flat too, until no group is
        flat, no other prompt is left or the step has sampled `max_num_gen_batches` times. Then
        drops the flat groups, unless all are flat.
        """
        keys = self.sampler.recipe.rollout
        examples = self.prompts.examples
        generator = make_generator(self.sampler.recipe.run.seed, "other prompts", step)
        drawn = generator.permutation(len(examples))
        other_ids = iter(drawn[~np.isin(drawn, example_ids)])
        for _ in range(1, keys.max_num_gen_batches):
            ids = np.fromiter(islice(other_ids, _count_flat_groups(rollout)), np.int64)
            if not len(ids):
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
        """Returns what `measure` finds by name, [completions][trained tokens] each, on every rank.

        A resumed run may have other ranks, to which completions are dealt otherwise: so a number is
        kept by its completion, not by its place in a micro-batch.
        """
        batch = lay_out(rollout, self._row_options)
        own: list[tuple[str, int, list[float]]] = []  # of this rank: name, completion, its numbers
        for micro_batch, by_name in zip(batch.micro_batches, measure(batch), strict=True):
            for name, values in by_name.items():
                by_completion = collect_by_completion(micro_batch, values)
                own += [(name, completion, each) for completion, each in by_completion.items()]
        collected: dict[str, dict[int, list[float]]] = {}
        for name, completion, numbers in chain.from_iterable(self.sampler.world.gather(own)):
            collected.setdefault(name, {})[completion] = numbers
        return {
            name: [by_completion[i] for i in range(len(rollout.sampled))]
            for name, by_completion in collected.items()
        }

    def describe_files(self, step: int) -> dict[str, bytes]:
        """Returns the files of a checkpoint after `step` steps: the rollouts that later steps are
        still to train on. Has the engine forget what only an older checkpoint needs.
        """
        assert self.sampler.engine is not None
        self.sampler.engine.forget()
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
        """Takes the rollouts of a verified checkpoint of `step` steps.

        Raises `UserError` where it lacks them.
        """
        self._held.clear()
        if self._samples_ahead:
            self._engine.version = step
            # submitted again, these requests are answered from here
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
        """A line of completions.jsonl for each completion of the first `log_completions` prompts;
        `step` is 0-based.
        """
        keys = self.sampler.recipe.rollout
        tokenizer = self.sampler.tokenizer
        names = self.sampler.reward_names
        advantages = describe_advantages(rollout, self.sampler.recipe)
        logged = min(keys.log_completions * rollout.generations, len(rollout.sampled))
        for i in range(logged):
            each = rollout.sampled[i]
            scores = (None if np.isnan(score) else float(score) for score in rollout.scores[i])
            line = {
                "step": step + 1,
                "prompt": tokenizer.decode(rollout.prompts[i]),
                "completion": tokenizer.decode(each.token_ids),
                "token_ids": each.token_ids,
                "ended": each.ended.value,
            }
            if each.tool_mask:
                parts = _split_by_speaker(each, tokenizer)
                line |= {"tool_mask": each.tool_mask, "parts": parts}
            line["rewards"] = dict(zip(names, scores, strict=True))
            line["advantage"] = float(advantages[i])
            yield line


def _encode_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of a file of JSON lines."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of a checkpoint; none where it has no such file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _split_by_speaker(completion: Sampled, tokenizer: Any) -> list[str]:
    """Splits a completion into the model's words and the tools' answers (0 in `tool_mask`), in
    turn.
    """
    parts = groupby(zip(completion.tool_mask, completion.token_ids, strict=True), itemgetter(0))
    return [tokenizer.decode([token for _, token in each]) for _, each in parts]
