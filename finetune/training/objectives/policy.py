"""Learning from sampled completions: GRPO and its kin, as one objective over the probability ratios
of their tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.methods import NO_CORRECTION
from finetune.config.schema import Recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
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
from finetune.rollout.collect import Rollouts, Sampler, Score, read_rows
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Engine, Request, Sampled
from finetune.rollout.episodes import Episodes, list_own_rewards
from finetune.rollout.reward_models import load_reward_models
from finetune.rollout.rewards import Rewards
from finetune.rollout.vllm import VllmEngine, check_servers
from finetune.training.objectives.objective import Measured, Objective, Objectives
from finetune.training.objectives.policy_losses import (
    Completions,
    Level,
    bound_sampling_ratios,
    compute_losses,
    compute_ratios,
    compute_sampling_ratios,
    estimate_kl,
    find_clipped,
    find_completions,
    find_corrected,
    is_outside,
    loss_level,
    policy_loss,
    ratio_bounds,
    sum_losses,
)
from finetune.training.objectives.preference import sum_and_count
from finetune.training.reference import adapters_off, evaluating

SAMPLING_RATIO = "importance_sampling/ratio"  # the mean ratio of training to sampling
# the share of these ratios that are outside the bounds
SAMPLING_CORRECTED = "importance_sampling/corrected"


SQUARE = "ratio/square"  # their mean square, which the effective sample size is computed from


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """The loss of sampled completions, averaged as the recipe's `loss_type` does."""

    recipe: Recipe
    rollouts: Rollouts
    other_model: "OtherModel | None" = None  # the reference or the teacher
    teacher: Teacher | None = None  # it, where it is a model of its own

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "PolicyObjective":
        """In a pipeline, asks the other model before the schedule, in which a forward is that of
        one stage alone.
        """
        if self.other_model is None or world.stages == 1:
            return self
        answers = iter([self.other_model(model, each.to(world.device)) for each in micro_batches()])
        return replace(self, other_model=lambda *_: next(answers))

    def count(self, batch: StepBatch) -> int:
        """What `PolicyLoss.average` names."""
        average = policy_loss(self.recipe).average
        if average == "tokens":
            return batch.trained_tokens
        if average == "budget":
            return batch.groups * self.recipe.rollout.max_completion_length
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Computes the summed loss of the micro-batch's completions, and as metrics their rewards
        and ratios.
        """
        rollout = micro_batch.columns
        assert rollout is not None, "completions come with what was sampled"
        completions = find_completions(micro_batch)
        # Asked for a filler too: ranks meet in its forward.
        if self.other_model is None:
            other = None
        else:
            other = self.other_model(model, micro_batch)
        head = partial(head_log_probabilities, temperature=self.recipe.method.temperature)
        log_probabilities = model(**inputs, head_function=head).double()
        metrics, maxima = self._describe(log_probabilities.detach(), completions, rollout)
        if self.recipe.rollout.max_staleness:
            log_ratios = log_probabilities.detach() - rollout["sampled"].double()
            own, oldest = _describe_staleness(
                log_ratios, batch.step - rollout["versions"].double(), completions, self.recipe
            )
            metrics |= own
            maxima["staleness/max"] = oldest
        if completions.count:
            loss, own_metrics = self._compute_loss(log_probabilities, other, completions, rollout)
            metrics |= own_metrics
        else:  # a filler: in the graph all the same, since its backward takes part in collectives
            loss = log_probabilities.sum() * 0.0
        return Measured(
            loss.float(), {name: pair.float() for name, pair in metrics.items()}, maxima
        )

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss is weighed by the ratio of training to sampling."""
        return self.recipe.rollout.importance_sampling_correction != NO_CORRECTION

    def _compute_loss(
        self,
        log_probabilities: Tensor,
        other_log_probabilities: Tensor | None,
        completions: Completions,
        rollout: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the summed loss of a micro-batch (0-dim), and by name the metrics of the ratio,
        the correction and the KL divergence, [2] each: a sum, and what it is divided by.

        Args:
            log_probabilities: fp64[positions], of the model in training, with their graph.
            other_log_probabilities: fp64[positions], of the reference or the teacher; None without
                one.
            completions: The completions at these positions.
            rollout: The columns of the micro-batch.
        """
        recipe = self.recipe
        level = loss_level(recipe)
        sampled = rollout["sampled"].double()
        old = self._choose_old(log_probabilities, sampled, rollout)
        advantages = rollout["advantages"].double()
        if level is Level.TOKEN:
            advantages = completions.repeat(advantages)  # [positions]
        kl = None
        if other_log_probabilities is not None and recipe.method_facts.needs_teacher:
            # log p_student - log p_teacher estimates the reverse KL divergence of a token; the
            # advantage is its negative (Agarwal et al. 2023, arXiv:2306.13649, sec. 3.2)
            kl = sampled - other_log_probabilities
            advantages = advantages - kl
        elif other_log_probabilities is not None:
            kl = estimate_kl(log_probabilities, other_log_probabilities)

        ratios = compute_ratios(log_probabilities - old, completions, recipe)
        losses = compute_losses(ratios, advantages, log_probabilities, recipe)
        is_clipped = find_clipped(ratios.detach(), advantages, log_probabilities.detach(), recipe)
        metrics = {"clip_ratio": completions.make_mean(is_clipped.double(), level)}
        if self.corrects_sampling:
            sampling_ratios = compute_sampling_ratios(old - sampled, completions, recipe)
            weights = bound_sampling_ratios(sampling_ratios, recipe)
            losses = losses * weights
            metrics[SAMPLING_RATIO] = completions.make_mean(sampling_ratios, level)
            metrics[SAMPLING_CORRECTED] = completions.make_mean(
                find_corrected(sampling_ratios, recipe).double(), level
            )
        if kl is not None:
            metrics["kl"] = completions.make_mean(kl.detach(), Level.TOKEN)
            if not recipe.method_facts.needs_teacher:
                losses = losses + recipe.method.beta * kl
        return sum_losses(losses, completions, recipe), metrics

    def _choose_old(
        self, log_probabilities: Tensor, sampled: Tensor, rollout: Mapping[str, Tensor]
    ) -> Tensor:
        """Log-probabilities under the sampled weights, fp64[positions]: in training if that is
        corrected, else sampled.

        Before the first update the model in training still has these weights.
        """
        if "old" in rollout:
            return rollout["old"].double()
        if self.corrects_sampling:
            return log_probabilities.detach()
        return sampled

    def _describe(
        self, log_probabilities: Tensor, completions: Completions, rollout: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Metrics and maxima of a micro-batch: the same names for every one, fillers included."""
        log_ratios = log_probabilities - rollout["sampled"].double()
        metrics = {
            **_describe_completions(rollout),
            **_describe_ratios(log_ratios, completions, ratio_bounds(self.recipe)),
            **self._describe_stages(log_ratios.new_zeros(2)),
            **self._describe_rollout(rollout),
        }
        distances = torch.where(completions.is_trained, log_ratios, 0.0).abs()
        if len(distances):
            largest = distances.max()
        else:
            largest = distances.new_zeros(())
        return {name: pair.detach().float() for name, pair in metrics.items()}, {
            "log_ratio/max": largest.float()
        }

    def _describe_stages(self, zero: Tensor) -> dict[str, Tensor]:
        """The metrics of `_compute_loss`, as a filler has them."""
        names = ["clip_ratio"]
        if self.other_model is not None:
            names.append("kl")
        if self.corrects_sampling:
            names += [SAMPLING_RATIO, SAMPLING_CORRECTED]
        return dict.fromkeys(names, zero)

    def _describe_rollout(self, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Metrics that only some recipes have: of a server, dynamic sampling, tools and each reward
        function. A score that is not a number says that the function does not apply.
        """
        keys = self.recipe.rollout
        metrics = {}
        if keys.vllm_server_base_url is not None:
            metrics["hand_over_seconds"] = sum_and_count(rollout["hand_over"])
        if keys.max_staleness:
            metrics["in_flight/cuts"] = sum_and_count(rollout["cuts"])
            metrics["in_flight/dropped_tokens"] = sum_and_count(rollout["dropped"])
        if keys.max_num_gen_batches > 1:
            metrics["sampled_groups"] = sum_and_count(rollout["groups"])
        if keys.takes_turns:  # as TRL names them
            metrics["tools/call_frequency"] = sum_and_count(rollout["calls"])
            metrics["tools/failure_frequency"] = torch.stack(
                [rollout["failed_calls"].sum(), rollout["calls"].sum()]
            )
        for name, scores in zip(
            self.rollouts.sampler.reward_names, rollout["scores"].T, strict=True
        ):
            metrics[f"rewards/{name}"] = sum_and_count(scores.nan_to_num(), ~scores.isnan())
        return metrics

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """With the effective sample sizes, as shares of the tokens: 1 where ratios are alike."""
        for name in [name for name in means if name.endswith(SQUARE)]:
            square = means.pop(name)
            ratio = name.removesuffix("/square")
            if square:  # sums in fp32 may round above 1
                share = min(1.0, means[f"{ratio}/mean"] ** 2 / square)
                means[f"{ratio}/effective_sample_size"] = share
        return means

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """The completions that are still to be trained on."""
        return self.rollouts.describe_files(step)

    def resume(self, checkpoint: Path, step: int) -> None:
        """Takes them back."""
        self.rollouts.resume(checkpoint, step)


@dataclass(frozen=True, slots=True)
class HeldOutRewards(Objective):
    """The rewards of greedy answers to held-out prompts.

    The loss is their mean, negative, so that less is better.
    """

    sampler: Sampler
    prompts: StoredBatches | None
    # example -> reward, tokens, scores
    results: Mapping[int, list[float]] = field(default_factory=dict)

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "HeldOutRewards":
        """Answers all held-out prompts, which ranks divide between them, some at once."""
        assert self.prompts is not None, "something is held out"
        ids = np.arange(len(self.prompts.examples))
        results: dict[int, list[float]] = {}
        at_once = (
            self.sampler.recipe.rollout.per_device_generation_batch_size * world.tensor_group_count
        )
        # Asking for a micro-batch shows that the evaluation continues, and ends it where a signal
        # asks for that.
        asked = chain.from_iterable(micro_batches() for _ in count())
        for first in range(0, len(ids), at_once):
            next(asked)
            asked_ids = ids[first : first + at_once]
            rollout = self.sampler.roll_out(
                self.prompts.examples, asked_ids, 0, 1, greedy=True, first_place=first
            )
            for i, example_id in enumerate(rollout.example_ids.tolist()):
                tokens = len(rollout.sampled[i].log_probabilities)
                results[example_id] = [
                    float(rollout.rewards[i]),
                    float(tokens),
                    *rollout.scores[i].tolist(),
                ]
        return replace(self, results=results)

    def count(self, batch: StepBatch) -> int:
        """The prompts."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The rewards that `prepare` has collected."""
        names = ["reward", "completions/mean_length"]
        names += [f"rewards/{name}" for name in self.sampler.reward_names]
        rows = torch.tensor([self.results[i] for i in micro_batch.example_ids]).reshape(
            -1, len(names)
        )
        columns = rows.to(micro_batch.labels.device).T
        metrics = {}
        for name, column in zip(names, columns, strict=True):
            metrics[name] = sum_and_count(column.nan_to_num(), ~column.isnan()).float()
        return Measured(-columns[0].nan_to_num().sum(), metrics)


def _describe_completions(rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of a micro-batch's completions, each [2] as `sum_and_count` makes it.

    `rollout`: the columns that `completion_rows` makes, [completions] each.
    """
    rewards = rollout["rewards"]
    return {
        "reward": sum_and_count(rewards.nan_to_num(), ~rewards.isnan()),
        "reward_std": sum_and_count(rollout["deviations"]),
        "frac_reward_zero_std": sum_and_count(rollout["flat"]),
        "reward_failures": sum_and_count(rollout["failed"]),
        "completions/mean_length": sum_and_count(rollout["tokens"]),
        "completions/clipped_ratio": sum_and_count(rollout["is_cut"]),
        "entropy": torch.stack(
            [rollout["entropies"].double().sum(), rollout["tokens"].double().sum()]
        ),
    }


def _describe_ratios(
    log_ratios: Tensor, completions: Completions, bounds: tuple[float, float]
) -> dict[str, Tensor]:
    """Metrics of how far the model in training is from the one that sampled; `log_ratios`:
    fp64[positions].
    """
    is_trained = completions.is_trained
    distances = torch.where(is_trained, log_ratios, 0.0).abs()
    ratios = log_ratios.exp()
    return {
        "log_ratio/mean": sum_and_count(distances, is_trained),
        "log_ratio/mean_square": sum_and_count(distances.square(), is_trained),
        "ratio/outside": sum_and_count(is_outside(ratios, bounds).double(), is_trained),
        **_describe_spread(log_ratios, is_trained),
    }


def _describe_spread(log_ratios: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Mean, mean square and histogram of the ratios that count; `counts`: bool[positions]."""
    ratios = log_ratios.exp()
    metrics = {
        "ratio/mean": sum_and_count(ratios, counts),
        SQUARE: sum_and_count((2 * log_ratios).exp(), counts),
    }
    borders_below = torch.stack([ratios > border for border in RATIO_BORDERS]).sum(0)
    for place, name in enumerate(RATIO_SHARES):
        metrics[name] = sum_and_count((borders_below == place).double(), counts)
    return metrics


def _describe_staleness(
    log_ratios: Tensor, staleness: Tensor, completions: Completions, recipe: Recipe
) -> tuple[dict[str, Tensor], Tensor]:
    """(metrics of how old the weights are that sampled, and of the ratios by that; the oldest,
    0-dim).

    Args:
        log_ratios: fp64[positions].
        staleness: fp64[positions]: the steps from the weights that sampled to those of the step.
        completions: Of the positions.
        recipe: With `max_staleness`.
    """
    keys = recipe.rollout
    is_trained = completions.is_trained
    metrics = {"staleness/mean": sum_and_count(staleness, is_trained)}
    # steps of a generation are trained on in turn, the last one after updates of its own
    generations = (staleness / keys.updates_per_generation).floor().clamp(max=keys.max_staleness)
    for age in range(keys.max_staleness + 1):
        is_own = is_trained & (generations == age)
        metrics[f"staleness/{age}/share"] = sum_and_count(is_own.double(), is_trained)
        for name, pair in _describe_spread(log_ratios, is_own).items():
            metrics[f"staleness/{age}/{name}"] = pair
    ages = torch.where(is_trained, staleness, 0.0)
    return metrics, (ages.max() if len(ages) else ages.new_zeros(())).float()


OtherModel = Callable[[nn.Module, MicroBatch], Tensor]
"""(the model in training, a micro-batch on the device) -> fp64[positions]: another model's
log-probabilities.
"""


def make_policy_objectives(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    world: World,
    teacher: Teacher | None,
    folder: Path | None,
) -> Objectives:
    """The objective of a run that samples, with its engine and rewards; and that of held-out
    prompts.

    Args:
        model: The model that is trained.
        recipe: Of a method that samples.
        data: The prompts.
        world: The ranks of the run.
        teacher: Or the reference, where it is a model of its own.
        folder: The run's, where it has one.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    engine = _make_engine(model, recipe, data, world, folder)
    models = [model] if teacher is None else [model, teacher.model]
    can_share = all(can_continue(unwrap(each)) for each in models)
    shares_prompts = recipe.data.packing and not world.any(not can_share)
    if recipe.rollout.takes_turns and has_tools(data.tokenizer):
        tools = make_tool_turns(recipe, data.tokenizer)
    else:
        tools = None
    rewards = Rewards(recipe.rollout)
    paying = load_reward_models(recipe, world)
    sampler = Sampler(
        recipe,
        world,
        data.tokenizer,
        engine,
        rewards,
        data.train.steps,
        shares_prompts,
        tools,
        paying,
    )
    rollouts = Rollouts(sampler, data.train, _make_score(model, recipe, world))
    training = PolicyObjective(recipe, rollouts, _make_other_model(recipe, teacher), teacher)
    return Objectives(training, HeldOutRewards(sampler, data.evaluation))


def _make_engine(
    model: nn.Module, recipe: Recipe, data: PreparedData, world: World, folder: Path | None
) -> Engine:
    """What samples: the model itself, or a vLLM server.

    Raises `UserError` for a server without a run's folder.
    """
    keys = recipe.rollout
    stop_ids = end_of_answer_ids(data.tokenizer, recipe.model.eot_tokens)
    if keys.vllm_server_base_url is None:
        return EmbeddedEngine(model, world, stop_ids, keys.per_device_generation_batch_size)
    if folder is None:
        raise UserError(
            "vllm_server_base_url: the server reads weights from the run's folder; a session saves "
            "none"
        )
    return VllmEngine(model, world, recipe, data.tokenizer, stop_ids, folder)


def _make_other_model(recipe: Recipe, teacher: Teacher | None) -> OtherModel | None:
    """Returns what asks the teacher or the reference: a second, frozen model, or the trained one
    without its adapters. None where neither is asked.
    """
    head = partial(head_log_probabilities, temperature=recipe.method.temperature)

    def ask_second_model(_: nn.Module, micro_batch: MicroBatch) -> Tensor:
        assert teacher is not None
        with torch.no_grad():
            return teacher.model(**micro_batch.inputs, head_function=head).double()  # type: ignore[no-any-return]

    def ask_without_adapters(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        with evaluating(model), adapters_off(model):
            return model(**micro_batch.inputs, head_function=head).double()  # type: ignore[no-any-return]

    if teacher is not None:
        return ask_second_model
    return ask_without_adapters if recipe.method.beta else None


def _make_score(model: nn.Module, recipe: Recipe, world: World) -> Score | None:
    """What asks for log-probabilities in training before the first update; None where the loss
    needs none of them.

    Only a correction of the sampler needs them, once the weights have moved since it sampled.
    """
    keys = recipe.rollout
    if keys.importance_sampling_correction == NO_CORRECTION or keys.updates_per_generation == 1:
        return None
    head = partial(head_log_probabilities, temperature=recipe.method.temperature)

    def score(batch: StepBatch) -> list[Tensor]:
        on_device = (micro_batch.to(world.device) for micro_batch in batch.micro_batches)
        with evaluating(model):
            return [model(**each.inputs, head_function=head).float().cpu() for each in on_device]

    return score


CHECKED_ROWS = 100  # of the data, whose columns reward functions may take


def check_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Looks whether the reward functions are there and take what the rows have, before a model is
    loaded.

    All ranks call it. Raises `UserError` on all.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples = data.train.examples
    rewards = Rewards(recipe.rollout)
    if (
        not recipe.rollout.rewards
        and not recipe.method_facts.needs_teacher
        and not list_own_rewards(data.tokenizer.environments)
    ):
        raise UserError(
            "environment: says nothing of what a completion is worth; give it a method get_reward, "
            "or set rewards"
        )

    def check() -> None:
        rows = read_rows(examples, np.arange(min(CHECKED_ROWS, len(examples))))
        given = {"environments"} if recipe.rollout.environment else set[str]()
        rewards.check_arguments(sorted(given.union(*(row["columns"] for row in rows))))

    try:
        RankGroup(world).on_main(check)
    finally:
        rewards.close()


def try_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Asks the rewards about an empty and a short completion, and whether the server can sample.

    All ranks call it.

    Raises `UserError` on all ranks for what a reward does wrong, unless that is counted, and for
    another server.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples = data.train.examples
    tokenizer = data.tokenizer
    rewards = Rewards(recipe.rollout)
    ends = end_of_answer_ids(tokenizer, recipe.model.eot_tokens)[:1]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in ("", "I do not know.")]
    sampled = [Sampled(ids + ends, [], 0.0, Ended.STOPPED) for ids in texts]

    def ask() -> None:
        if recipe.rollout.vllm_server_base_url is not None:
            check_servers(recipe)
        rows = read_rows(examples, np.arange(2) % len(examples))
        sampler = Sampler(recipe, world, tokenizer, None, rewards, data.train.steps)
        episodes = None
        if recipe.rollout.environment:
            episodes = Episodes(recipe, tokenizer, rewards, rows)
            episodes.begin([Request((0,), (recipe.run.seed, 0, place)) for place in range(2)])
        sampler.score(rows, sampled, [[], []], 0, episodes)
        completions = sampler.read_completions(rows, sampled, [[], []])
        for text in read_reward_texts(recipe):
            text.encode(rows[0]["prompt"], completions[0])

    try:
        RankGroup(world).on_main(ask)
    finally:
        rewards.close()
