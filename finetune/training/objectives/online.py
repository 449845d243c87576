"""What a run that samples is made of (engine, rewards, second model), and the checks before it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.methods import NO_CORRECTION
from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.environments import has_tools
from finetune.data.packing import StoredBatches
from finetune.data.paid_text import read_reward_texts
from finetune.data.prepare import PreparedData
from finetune.data.tokenizer import end_of_answer_ids
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
    """Makes the objective of a run that samples, with its engine and rewards, and that of held-out
    prompts.

    Args:
        model: The model that is trained.
        recipe: Of a method that samples.
        data: The prompts.
        world: The ranks of the run.
        teacher: The teacher, or the reference if it is a second model; else None.
        folder: The run's, if it has one.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    engine = _make_engine(model, recipe, data, world, folder)
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
        shares_prompts=recipe.data.packing and not world.any(not can_share),
        tools=make_tool_turns(recipe, data.tokenizer) if has_tool_turns else None,
        reward_models=load_reward_models(recipe, world),
    )
    other_model = _make_other_model(recipe, teacher)
    rollouts = RolloutBatches(sampler, data.train, _make_measure(model, recipe, world, other_model))
    if recipe.method_facts.has_critic:
        other_model = None  # `rollouts` asks it, since its log-probabilities are a part of rewards
    training = PolicyObjective(recipe, rollouts, other_model, teacher)
    return Objectives(training, HeldOutRewards(sampler, data.evaluation))


def _make_engine(
    model: nn.Module, recipe: Recipe, data: PreparedData, world: World, folder: Path | None
) -> Engine:
    """Makes the engine that samples: the model itself, or a vLLM server.

    Raises `UserError` for a server without a run's folder.
    """
    keys = recipe.rollout
    stop_ids = end_of_answer_ids(data.tokenizer, recipe.model.eot_tokens)
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
        # An image's token has no meaning in an answer, and nothing can follow it.
        stop_ids = [*stop_ids, *images.token_ids]
    return EmbeddedEngine(model, world, stop_ids, rows, images=images, routing=routing)


def _replay_routing(transformer: nn.Module) -> Routing:
    """Makes the routers of a mixture replay what they are given (`Routing.replay`).

    Raises `UserError` if no router is found.
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
    """Returns the function that asks the teacher or the reference: a second, frozen model, or the
    trained one without its adapters. None if neither is asked.
    """
    head = partial(head_log_probabilities, temperature=recipe.method.temperature)

    def ask_second_model(_: nn.Module, micro_batch: MicroBatch) -> Tensor:
        assert teacher is not None
        with torch.no_grad():
            return teacher.model(**micro_batch.inputs, head_function=head).double()  # type: ignore[no-any-return]

    def ask_without_adapters(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        unrouted = replace(micro_batch, experts=None)  # a reference chooses its experts itself
        with evaluating(model), adapters_off(model):
            return model(**unrouted.inputs, head_function=head).double()  # type: ignore[no-any-return]

    if teacher is not None:
        return ask_second_model
    return ask_without_adapters if recipe.has_reference else None


def _make_measure(
    model: nn.Module, recipe: Recipe, world: World, other_model: OtherModel | None
) -> MeasureTokens | None:
    """Makes the function that measures a step's tokens before the first update on them: their
    log-probabilities and, with a critic, its values and the reference's log-probabilities.

    None if the loss needs none of them: without a critic, only a correction of the sampler does, if
    the weights move more than once after sampling.
    """
    keys = recipe.rollout
    has_critic = recipe.method_facts.has_critic
    is_corrected = keys.importance_sampling_correction != NO_CORRECTION
    corrects_old_weights = is_corrected and keys.updates_per_generation > 1
    if not has_critic and not corrects_old_weights:
        return None
    head = choose_head(recipe)

    def measure_one(micro_batch: MicroBatch) -> dict[str, Tensor]:
        with evaluating(model):
            outputs = model(**micro_batch.inputs, head_function=head).float().cpu()
        if not has_critic:
            return {"old": outputs}
        measured = {"old": outputs[0], "values": outputs[1]}
        if other_model is not None:
            measured["reference"] = other_model(model, micro_batch).float().cpu()
        return measured

    def measure(batch: StepBatch) -> list[dict[str, Tensor]]:
        return [measure_one(micro_batch.to(world.device)) for micro_batch in batch.micro_batches]

    return measure


CHECKED_ROWS = 100  # the first of the data, whose columns reward functions may take


def check_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Checks that there are rewards and that the rows have the columns that they take, before a
    model is loaded.

    All ranks call it. Raises `UserError` on all.
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
        columns = {"environments"} if recipe.rollout.environment else set[str]()
        for row in read_rows(examples, np.arange(min(CHECKED_ROWS, len(examples)))):
            columns.update(row["columns"])
        rewards.check_arguments(sorted(columns))

    try:
        RankGroup(world).on_main(check)
    finally:
        rewards.close()


def try_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Asks the rewards for the scores of an empty and a short completion, and the server whether it
    can sample.

    All ranks call it.

    Raises `UserError` on all ranks if a reward fails and its failures are not counted instead, or
    if the server cannot sample for this run.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples = data.train.examples
    tokenizer = data.tokenizer
    rewards = Rewards(recipe.rollout)
    end = end_of_answer_ids(tokenizer, recipe.model.eot_tokens)[:1]
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in ("", "I do not know.")]
    sampled = [Sampled(ids + end, [], 0.0, Ended.STOPPED) for ids in answers]

    def ask() -> None:
        if recipe.rollout.vllm_server_base_url is not None:
            check_servers(recipe)
        rows = read_rows(examples, np.arange(2) % len(examples))
        sampler = Sampler(recipe, world, tokenizer, None, rewards, data.train.steps)
        episodes = None
        if recipe.rollout.environment:
            place = rewards.reserve_places(len(rows))
            episodes = Episodes(recipe, tokenizer, rewards, place, rows)
            episodes.begin([Request((0,), (recipe.run.seed, 0, place)) for place in range(2)])
        sampler.score(rows, sampled, [[], []], 0, episodes)
        completions = sampler.read_completions(rows, sampled, [[], []])
        for text in read_reward_texts(recipe):
            text.encode(rows[0]["prompt"], completions[0])

    try:
        RankGroup(world).on_main(ask)
    finally:
        rewards.close()
