"""Makes the parts of a run that samples (engine, rewards, second model), and checks its rewards
before it starts.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.schema import Recipe
from finetune.constants import ceil_div
from finetune.data.batches import Ids, MicroBatch, StepBatch
from finetune.data.environments import has_tools
from finetune.data.examples import Examples
from finetune.data.messages import Message
from finetune.data.packing import StoredBatches
from finetune.data.paid_text import read_reward_texts
from finetune.data.prepare import PreparedData
from finetune.data.tokenizer import find_stop_token_ids
from finetune.data.tool_calls import make_tool_turns
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.models.documents import can_continue
from finetune.models.load import Teacher
from finetune.models.log_probabilities import head_log_probabilities
from finetune.models.routing import Routing, find_routing
from finetune.rollout.collect import MeasureTokens, RolloutBatches, Sampler, read_rows
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Engine, Request, Sampled
from finetune.rollout.episodes import Episodes, list_environment_rewards
from finetune.rollout.reward_models import load_reward_models
from finetune.rollout.rewards import Rewards
from finetune.rollout.vllm import VllmEngine, check_servers
from finetune.training.objectives.objective import Objectives
from finetune.training.objectives.policy import (
    HeldOutRewards,
    OtherModel,
    PolicyObjective,
    choose_head,
)
from finetune.training.reference import adapters_off, evaluating


def make_policy_objectives(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    world: World,
    teacher: Teacher | None,
    folder: Path | None,
) -> Objectives:
    """Makes the objectives of a run that samples, with the engine and the rewards.

    All ranks call it.

    Args:
        model: The model that is trained.
        recipe: Of a method that samples.
        data: The prompts, in training and held out.
        world: The ranks of the run.
        teacher: The second model of the run: a teacher or a reference; None if there is none.
        folder: The run's folder; None for a session without one.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    engine = _make_engine(model, recipe, data, world, folder)
    # Whether completions can share the forward of their prompt.
    can_share = can_continue(unwrap(model))
    if teacher is not None:
        can_share = can_share and can_continue(unwrap(teacher.model))
    has_tool_turns = recipe.rollout.takes_turns and has_tools(data.tokenizer)
    sampler = Sampler(
        recipe,
        world,
        data.tokenizer,
        engine,
        Rewards(recipe.rollout),
        data.train.steps,
        # Each rank lays out the rows of all ranks, so the ranks must agree.
        shares_prompts=recipe.data.packing and not world.any(not can_share),
        tools=make_tool_turns(recipe, data.tokenizer) if has_tool_turns else None,
        reward_models=load_reward_models(recipe, world),
    )
    other_model = _make_other_model(recipe, teacher)
    rollouts = RolloutBatches(sampler, data.train, _make_measure(model, recipe, world, other_model))
    if recipe.method_facts.has_critic:
        # `rollouts` runs it instead: the reference's log-probabilities are a part of the rewards.
        other_model = None
    training = PolicyObjective(recipe, rollouts, other_model, teacher)
    return Objectives(training, HeldOutRewards(sampler, data.evaluation))


def _make_engine(
    model: nn.Module, recipe: Recipe, data: PreparedData, world: World, folder: Path | None
) -> Engine:
    """Makes the engine that samples: the model itself, or vLLM servers.

    Raises `UserError` if servers are to sample and there is no `folder` to hand weights over in.
    """
    keys = recipe.rollout
    stop_ids = find_stop_token_ids(data.tokenizer)
    if keys.vllm_server_base_url is not None:
        if folder is None:
            raise UserError(
                "vllm_server_base_url: the server reads weights from the run's folder; a session "
                "saves none"
            )
        return VllmEngine(model, world, recipe, data.tokenizer, stop_ids, folder)
    rows = keys.per_device_generation_batch_size
    routing = _replay_routing(unwrap(model)) if keys.routing_replay else None
    images = None if data.images is None else data.tokenizer.images
    if images is not None:
        # A sampled image token has no image behind it: it ends the answer.
        stop_ids = [*stop_ids, *images.token_ids]
    return EmbeddedEngine(model, world, stop_ids, rows, images=images, routing=routing)


def _replay_routing(transformer: nn.Module) -> Routing:
    """Makes the routers of a mixture of experts take recorded choices (`Routing.replay`).

    Returns the routers. Raises `UserError` if the model has none that are known.
    """
    routing = find_routing(transformer)
    if routing is None:
        raise UserError(
            f"routing_replay: the routers of {type(transformer).__name__} are not found; remove "
            "the key"
        )
    routing.replay()
    return routing


def _make_other_model(recipe: Recipe, teacher: Teacher | None) -> OtherModel | None:
    """Makes the function that computes the log-probabilities of the teacher or the reference.

    It runs the second model `teacher`, or else, for a reference, the trained model without its
    adapters. Returns None if the recipe has neither teacher nor reference.
    """
    head = partial(head_log_probabilities, temperature=recipe.method.temperature)

    def run_second_model(_: nn.Module, micro_batch: MicroBatch) -> Tensor:
        assert teacher is not None
        with torch.no_grad():
            return teacher.model(**micro_batch.inputs, head_function=head).double()  # type: ignore[no-any-return]

    def run_without_adapters(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        # The sampler's choices are replayed in training only: a reference chooses its own experts.
        unrouted = replace(micro_batch, experts=None)
        with evaluating(model), adapters_off(model):
            return model(**unrouted.inputs, head_function=head).double()  # type: ignore[no-any-return]

    if teacher is not None:
        return run_second_model
    if recipe.has_reference:
        return run_without_adapters
    return None


def _make_measure(
    model: nn.Module, recipe: Recipe, world: World, other_model: OtherModel | None
) -> MeasureTokens | None:
    """Makes the function that measures the tokens of completions before the generation's first
    update.

    It computes their log-probabilities ("old") and, with a critic, the critic's "values" and the
    log-probabilities under the "reference", if there is one.

    Returns None if the loss needs none of these. Without a critic it needs only "old", and only if
    it corrects for the sampler and makes several updates on the same completions.
    """
    if not recipe.measures_generations:
        return None
    has_critic = recipe.method_facts.has_critic
    head = choose_head(recipe)

    def measure_one(micro_batch: MicroBatch) -> dict[str, Tensor]:
        with evaluating(model):
            outputs = model(**micro_batch.inputs, head_function=head).float().cpu()
        if not has_critic:
            return {"old": outputs}
        log_probabilities, values = outputs
        measured = {"old": log_probabilities, "values": values}
        if other_model is not None:
            measured["reference"] = other_model(model, micro_batch).float().cpu()
        return measured

    def measure(batch: StepBatch) -> list[dict[str, Tensor]]:
        return [measure_one(micro_batch.to(world.device)) for micro_batch in batch.micro_batches]

    return measure


CHECKED_ROWS = 100  # how many rows of each source `check_rewards` reads for the data's columns


def check_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Checks, before a model is loaded, that there are rewards and that the data has the columns
    that they need.

    All ranks call it. Raises `UserError` on all ranks if not, or if a reward cannot be loaded.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples = data.train.examples
    rewards = Rewards(recipe.rollout)
    has_rewards = recipe.rollout.rewards or list_environment_rewards(data.tokenizer.environments)
    if not has_rewards and not recipe.method_facts.needs_teacher:
        raise UserError(
            "environment: says nothing of what a completion is worth; give it a method get_reward, "
            "or set rewards"
        )

    def check() -> None:
        columns = set[str]()
        if recipe.rollout.environment:
            columns.add("environments")  # reward functions may take their states
        for row in read_rows(examples, _spread_ids(examples)):
            columns.update(row["columns"])
        rewards.check_arguments(sorted(columns))

    try:
        RankGroup(world).on_main(check)
    finally:
        rewards.close()


def _spread_ids(examples: Examples) -> Ids:
    """Returns the ids of up to CHECKED_ROWS examples of each source, evenly spaced."""
    spread = []
    for number in range(len(examples.stores)):
        ids = np.flatnonzero(examples.store == number)
        spread.append(ids[:: max(1, ceil_div(len(ids), CHECKED_ROWS))])
    return np.concatenate(spread)


def try_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Tries all rewards on an empty and a short completion, and checks the vLLM servers.

    All ranks call it; the scores are not used.

    Raises `UserError` on all ranks if a reward fails and `on_bad_reward` makes that an error, or if
    a server cannot sample for this run.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples = data.train.examples
    tokenizer = data.tokenizer
    rewards = Rewards(recipe.rollout)
    end_ids = find_stop_token_ids(tokenizer)
    stop = end_ids[:1]  # any one of them ends an answer
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in ("", "I do not know.")]
    sampled = [
        Sampled(ids + stop, log_probabilities=[], entropy=0.0, ended=Ended.STOPPED)
        for ids in answers
    ]

    def try_all() -> None:
        if recipe.rollout.vllm_server_base_url is not None:
            check_servers(recipe)
        rows = read_rows(examples, np.arange(2) % len(examples))  # twice the same if there is one
        sampler = Sampler(
            recipe, world, tokenizer, engine=None, rewards=rewards, steps=data.train.steps
        )
        episodes = None
        if recipe.rollout.environment:
            first_place = rewards.take_places(len(rows))
            episodes = Episodes(recipe, tokenizer, rewards, first_place, rows)
            # Any prompt does: no token is sampled.
            requests = [
                Request(prompt_ids=(0,), seed=(recipe.run.seed, 0, prompt)) for prompt in range(2)
            ]
            episodes.begin(requests)
        no_turns: list[list[Message]] = [[], []]
        sampler.score(rows, sampled, no_turns, step=0, episodes=episodes)
        # A reward model is not loaded here, but its chat template is tried.
        completions = sampler.read_completions(rows, sampled, no_turns)
        for text in read_reward_texts(recipe):
            text.encode(rows[0], completions[0])

    try:
        RankGroup(world).on_main(try_all)
    finally:
        rewards.close()
