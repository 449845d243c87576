"""Learning from sampled completions: GRPO and its kin, as one objective over the probability ratios of their tokens."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.methods import POLICY_LOSSES
from finetune.config.schema import Recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.tokenizer import end_of_answer_ids
from finetune.data.tool_calls import make_tool_turns
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.models.documents import can_continue
from finetune.models.load import Teacher
from finetune.models.log_probabilities import head_log_probabilities
from finetune.rollout.collect import Rollouts, Sampler, read_rows
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Engine, Rollout, Sampled
from finetune.rollout.rewards import Rewards
from finetune.rollout.vllm import VllmEngine, check_server
from finetune.training.objectives.objective import Measured, Objective, Objectives
from finetune.training.objectives.preference import mean
from finetune.training.reference import adapters_off, evaluating

CORRECTED = ("importance_sampling/ratio", "importance_sampling/corrected")  # its mean, and the share outside the bounds


@dataclass(frozen=True, slots=True)
class Completions:
    """Which completion of a micro-batch each trained position belongs to."""

    of: Tensor  # int64[positions]
    is_trained: Tensor  # bool[positions]; False for those without a label
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """[completions]: the sums of [positions]."""
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.of, torch.where(self.is_trained, values, 0.0))

    def lengths(self) -> Tensor:
        """[completions]: the trained tokens."""
        return self.sum(torch.ones_like(self.of, dtype=torch.float64))


def policy_losses(
    log_probabilities: Tensor,
    old: Tensor,
    advantages: Tensor,
    completions: Completions,
    recipe: Recipe,
    of_tokens: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(losses, probability ratios) of the positions; of the completions where a ratio is a whole completion's.

    Args:
        log_probabilities: [positions], of the model that learns.
        old: [positions], of the model that was sampled.
        advantages: [completions].
        completions: Of the positions.
        of_tokens: [positions], added to the advantages of each token.
        recipe: With its loss (`POLICY_LOSSES` has the papers) and bounds.
    """
    keys, loss = recipe.rollout, POLICY_LOSSES[recipe.method.loss_type]
    log_ratios = log_probabilities - old
    per_token = advantages[completions.of] + of_tokens
    if loss.average == "sums":
        log_ratios, per_token = completions.sum(log_ratios), advantages
    elif keys.importance_sampling_level == "sequence":  # Zheng et al. 2025, arXiv:2507.18071, eq. 7
        means = completions.sum(log_ratios) / completions.lengths().clamp(min=1)
        log_ratios = means.to(log_ratios.dtype)[completions.of]
    ratios, (low, high) = log_ratios.exp(), ratio_bounds(recipe)
    if loss.bound == "weight":
        return -ratios.detach().clamp(max=high) * per_token * log_probabilities, ratios
    return -torch.minimum(ratios * per_token, ratios.clamp(low, high) * per_token), ratios


def ratio_bounds(recipe: Recipe) -> tuple[float, float]:
    """The lowest and the highest ratio that the recipe's loss follows."""
    keys = recipe.rollout
    high = keys.epsilon if keys.epsilon_high is None else keys.epsilon_high
    is_weight = POLICY_LOSSES[recipe.method.loss_type].bound == "weight"
    return (0.0, high) if is_weight else (1 - keys.epsilon, 1 + high)


def correct_sampling(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """(what the losses are multiplied by, the ratios before they were truncated or masked), as many as losses.

    Truncated: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Masked: Liu et
    al. 2025, "When Speed Kills Stability".

    Args:
        log_ratios: [positions], of training to sampling, both with the weights that were sampled.
        completions: Of the positions.
        recipe: With `importance_sampling_correction` and its bounds.
    """
    keys = recipe.rollout
    level, _, kind = keys.importance_sampling_correction.partition("_")
    if level == "sequence":
        log_ratios = completions.sum(log_ratios)
        if POLICY_LOSSES[recipe.method.loss_type].average != "sums":
            log_ratios = log_ratios[completions.of]
    ratios = log_ratios.exp()
    low, high = keys.importance_sampling_clip_min or 0.0, keys.importance_sampling_clip_max
    if kind == "truncate":
        return ratios.clamp(low, high), ratios
    return torch.where((ratios < low) | (ratios > high), 0.0, ratios), ratios


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """The loss of sampled completions, averaged as the recipe's `loss_type` does."""

    recipe: Recipe
    rollouts: Rollouts
    other: "OtherModel | None" = None  # the reference or the teacher
    teacher: Teacher | None = None  # it, where it is a model of its own

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "PolicyObjective":
        """In a pipeline, asks the other model before the schedule, in which a forward is that of one stage alone."""
        if self.other is None or world.stages == 1:
            return self
        known = iter([self.other(model, each.to(world.device)) for each in micro_batches()])
        return replace(self, other=lambda *_: next(known))

    def count(self, batch: StepBatch) -> int:
        """What `PolicyLoss.average` names."""
        average = POLICY_LOSSES[self.recipe.method.loss_type].average
        budget = batch.groups * self.recipe.rollout.max_completion_length
        return {"tokens": batch.trained_tokens, "budget": budget}.get(average, batch.groups)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's completions; as metrics their rewards, and the raw ratios."""
        head = partial(head_log_probabilities, temperature=self.recipe.method.temperature)
        theirs = None if self.other is None else self.other(model, micro_batch)  # of a filler too: ranks meet in it
        found = model(**inputs, head_function=head).double()
        rollout, of = micro_batch.rollout, micro_batch.trained_documents
        assert rollout is not None and of is not None, "completions come with what was sampled"
        is_trained = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
        completions = Completions(of, is_trained, len(micro_batch.example_ids))
        sampled, advantages = rollout["sampled"].double(), rollout["advantages"].double()
        metrics, maxima = self._describe(found.detach() - sampled, completions, rollout)
        if not completions.count:  # a filler: in the graph all the same, since its backward takes part in collectives
            return Measured(found.sum().float() * 0.0, metrics, maxima)
        of_tokens, divergence = self._compare(theirs, found, sampled)
        metrics |= {} if divergence is None else {"kl": mean(divergence.detach(), is_trained)}
        is_corrected = self.recipe.rollout.importance_sampling_correction != "none"
        old = rollout["old"].double() if "old" in rollout else found.detach() if is_corrected else sampled
        losses, ratios = policy_losses(found, old, advantages, completions, self.recipe, of_tokens)
        if is_corrected:
            weights, raw = correct_sampling(old - sampled, completions, self.recipe)
            losses, where = losses * weights, is_trained if len(raw) == len(is_trained) else None
            metrics |= zip(CORRECTED, (mean(raw, where), mean((weights != raw).double(), where)), strict=True)
        if divergence is not None and not self.recipe.method_facts.needs_teacher:
            losses = losses + self.recipe.method.beta * divergence
        average = POLICY_LOSSES[self.recipe.method.loss_type].average
        if average == "sums":
            loss = losses.sum()
        else:
            loss = torch.where(is_trained, losses, 0.0).sum()
            if average == "sequences":
                loss = (completions.sum(losses) / completions.lengths().clamp(min=1)).sum()
        metrics["clip_ratio"] = self._clipped(ratios.detach(), advantages, completions, of_tokens)
        return Measured(loss.float(), {name: pair.float() for name, pair in metrics.items()}, maxima)

    def _compare(self, theirs: Tensor | None, found: Tensor, sampled: Tensor) -> tuple[Tensor | float, Tensor | None]:
        """(the teacher's part of the advantages, the divergence) of each token; 0 and None without another model.

        From the reference: its estimate without bias that is never negative (Schulman 2020, "Approximating KL
        divergence", k3), with its gradient. From a teacher: the reverse KL divergence's own estimate, the difference of
        log-probabilities, whose negative is the advantage (Agarwal et al. 2023, arXiv:2306.13649, sec. 3.2).
        """
        if theirs is None:
            return 0.0, None
        if self.recipe.method_facts.needs_teacher:
            return theirs - sampled, sampled - theirs
        return 0.0, (theirs - found).exp() - (theirs - found) - 1

    def _is_outside(self, ratios: Tensor) -> Tensor:
        """Whether ratios are outside the bounds, whatever their advantages."""
        low, high = ratio_bounds(self.recipe)
        return (ratios < low) | (ratios > high)

    def _clipped(
        self, ratios: Tensor, advantages: Tensor, completions: Completions, of_tokens: Tensor | float
    ) -> Tensor:
        """The share of ratios that are outside the bounds, so that the loss has no gradient there."""
        is_of_tokens = len(ratios) == len(completions.of)
        advantages = advantages[completions.of] + of_tokens if is_of_tokens else advantages
        outside = self._is_outside(ratios)
        if POLICY_LOSSES[self.recipe.method.loss_type].bound == "surrogate":  # what is bad may grow, and good shrink
            outside = outside & ((ratios - 1) * advantages > 0)
        return mean(outside.double(), completions.is_trained if is_of_tokens else None)

    def _describe(
        self, log_ratios: Tensor, completions: Completions, rollout: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Metrics and maxima of a micro-batch: the same names for every one, fillers included."""
        where, keys = completions.is_trained, self.recipe.rollout
        off, ratios = torch.where(where, log_ratios, 0.0).abs(), log_ratios.exp()
        below = torch.stack([ratios > border for border in RATIO_BORDERS]).sum(0)  # how many borders are
        shares = (below == torch.arange(len(RATIO_SHARES), device=below.device)[:, None]).double()
        known = ~rollout["rewards"].isnan()
        zero = log_ratios.new_zeros(2)
        metrics = {
            "reward": mean(rollout["rewards"].nan_to_num(), known),
            "reward_std": mean(rollout["deviations"]),
            "frac_reward_zero_std": mean(rollout["flat"]),
            "reward_failures": mean(rollout["failed"]),
            "completions/mean_length": mean(rollout["tokens"]),
            "completions/clipped_ratio": mean(rollout["is_cut"]),
            "entropy": torch.stack([rollout["entropies"].double().sum(), rollout["tokens"].double().sum()]),
            "log_ratio/mean": mean(off, where),
            "log_ratio/mean_square": mean(off.square(), where),
            "ratio/mean": mean(ratios, where),
            "ratio/mean_square": mean((2 * log_ratios).exp(), where),
            "ratio/outside": mean(self._is_outside(ratios).double(), where),
            **{name: mean(share, where) for name, share in zip(RATIO_SHARES, shares, strict=True)},
            "clip_ratio": zero,
            **({} if self.other is None else {"kl": zero}),
            **({} if keys.importance_sampling_correction == "none" else dict.fromkeys(CORRECTED, zero)),
            **({} if keys.max_num_gen_batches == 1 else {"sampled_groups": mean(rollout["groups"])}),
            **({} if not keys.tools else _count_calls(rollout["calls"], rollout["failed_calls"])),
        }
        for number, name in enumerate(self.rollouts.sampler.rewards.names):
            scores = rollout["scores"][:, number]
            metrics[f"rewards/{name}"] = mean(scores.nan_to_num(), ~scores.isnan())
        metrics = {name: pair.detach().float() for name, pair in metrics.items()}
        return metrics, {"log_ratio/max": off.max().float() if len(off) else off.new_zeros(()).float()}

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """With the effective sample size, as a share of the tokens: 1 where all ratios are alike."""
        square = means.pop("ratio/mean_square", 0.0)
        share = min(1.0, means["ratio/mean"] ** 2 / square) if square else None  # sums in fp32 may round above 1
        return means | ({} if share is None else {"ratio/effective_sample_size": share})

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """The completions that are still to be trained on."""
        return self.rollouts.describe_files(step)

    def resume(self, checkpoint: Path, step: int) -> None:
        """Takes them back."""
        self.rollouts.resume(checkpoint, step)


@dataclass(frozen=True, slots=True)
class HeldOutRewards(Objective):
    """The rewards of greedy answers to held-out prompts. The loss is their mean, negative, so that less is better."""

    sampler: Sampler
    prompts: StoredBatches | None
    found: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # example -> reward, tokens, scores

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "HeldOutRewards":
        """Answers all held-out prompts, which ranks divide between them, some at once."""
        assert self.prompts is not None, "something is held out"
        ids, found = np.arange(len(self.prompts.examples)), dict[int, tuple[float, ...]]()
        at_once = self.sampler.recipe.rollout.per_device_generation_batch_size * world.tensor_group_count
        # Asking for a micro-batch shows that the evaluation continues, and ends it where a signal asks for that.
        asked = (each for _ in count() for each in micro_batches())
        for first in range(0, len(ids), at_once):
            next(asked)
            some = ids[first : first + at_once]
            rollout = self.sampler.roll_out(self.prompts.examples, some, 0, 1, greedy=True, first_place=first)
            found |= _by_example(rollout)
        return replace(self, found=found)

    def count(self, batch: StepBatch) -> int:
        """The prompts."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The rewards that `prepare` has found."""
        width = 2 + len(self.sampler.rewards.names)
        found = torch.tensor([self.found[i] for i in micro_batch.example_ids]).reshape(-1, width)
        found = found.to(micro_batch.labels.device)
        names = ("reward", "completions/mean_length", *(f"rewards/{name}" for name in self.sampler.rewards.names))
        metrics = {
            name: mean(column.nan_to_num(), ~column.isnan()).float()
            for name, column in zip(names, found.T, strict=True)
        }
        return Measured(-found[:, 0].nan_to_num().sum(), metrics)


def _count_calls(calls: Tensor, failed: Tensor) -> dict[str, Tensor]:
    """Calls of tools in a completion, and the share of them that got an error, as TRL names them."""
    return {"tools/call_frequency": mean(calls), "tools/failure_frequency": torch.stack([failed.sum(), calls.sum()])}


def _by_example(rollout: Rollout) -> dict[int, tuple[float, ...]]:
    rows = zip(rollout.example_ids.tolist(), rollout.rewards, rollout.sampled, rollout.scores, strict=True)
    return {
        i: (float(reward), float(len(each.log_probabilities)), *scores.tolist()) for i, reward, each, scores in rows
    }


OtherModel = Callable[[nn.Module, MicroBatch], Tensor]
"""(the model in training, a micro-batch on the device) -> fp64[positions]: another model's log-probabilities."""


def _without_adapters(head: Any, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    with evaluating(model), adapters_off(model):
        return model(**micro_batch.inputs, head_function=head).double()  # type: ignore[no-any-return]


def _of_teacher(teacher: Teacher, head: Any, _model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    with torch.no_grad():
        return teacher.model(**micro_batch.inputs, head_function=head).double()  # type: ignore[no-any-return]


def _score(model: nn.Module, world: World, head: Any, batch: StepBatch) -> list[Tensor]:
    with evaluating(model):
        each = (micro_batch.to(world.device) for micro_batch in batch.micro_batches)
        return [model(**one.inputs, head_function=head).float().cpu() for one in each]


def make_policy_objectives(
    model: nn.Module, recipe: Recipe, data: PreparedData, world: World, teacher: Teacher | None, folder: Path | None
) -> Objectives:
    """The objective of a run that samples, with its engine and rewards; and that of held-out prompts.

    `teacher`: or the reference, where it is a model of its own. `folder`: the run's, where it has one.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    stop_ids = end_of_answer_ids(data.tokenizer, recipe.model.eot_tokens)
    engine: Engine
    if recipe.rollout.vllm_server_base_url is None:
        engine = EmbeddedEngine(model, world, stop_ids, recipe.rollout.per_device_generation_batch_size)
    elif folder is None:
        raise UserError("vllm_server_base_url: the server reads weights from the run's folder; a session saves none")
    else:
        engine = VllmEngine(model, world, recipe, data.tokenizer, stop_ids, folder)
    models = [unwrap(each) for each in (model, *([] if teacher is None else [teacher.model]))]
    shares = recipe.data.packing and not world.any(not all(map(can_continue, models)))
    rewards = Rewards(recipe.rollout)
    tools = make_tool_turns(recipe, data.tokenizer) if recipe.rollout.tools else None
    sampler = Sampler(recipe, world, data.tokenizer, engine, rewards, data.train.steps, shares, tools)
    head, other = partial(head_log_probabilities, temperature=recipe.method.temperature), None
    if teacher is not None:
        other = partial(_of_teacher, teacher, head)
    elif recipe.method.beta:
        other = partial(_without_adapters, head)
    keys = recipe.rollout
    is_moved = keys.importance_sampling_correction != "none" and keys.updates_per_generation > 1
    score = partial(_score, model, world, head) if is_moved else None
    training = PolicyObjective(recipe, Rollouts(sampler, data.train, score), other, teacher)
    return Objectives(training, HeldOutRewards(sampler, data.evaluation))


CHECKED_ROWS = 100  # of the data, whose columns reward functions may take


def check_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Looks whether the reward functions are there and take what the rows have, before a model is loaded.

    All ranks call it. Raises `UserError` on all.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples = data.train.examples
    rewards = Rewards(recipe.rollout)

    def check() -> None:
        rows = read_rows(examples, np.arange(min(CHECKED_ROWS, len(examples))))
        rewards.check_arguments(sorted({name for row in rows for name in row["columns"]}))

    try:
        RankGroup(world).on_main(check)
    finally:
        rewards.close()


def try_rewards(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Asks the rewards about an empty and a short completion, and whether the server can sample. All ranks call it.

    Raises `UserError` on all ranks for what a reward does wrong, unless that is counted, and for another server.
    """
    assert isinstance(data.train, StoredBatches), "streaming is refused"
    examples, tokenizer = data.train.examples, data.tokenizer
    rewards, ends = Rewards(recipe.rollout), end_of_answer_ids(tokenizer, recipe.model.eot_tokens)[:1]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in ("", "I do not know.")]
    sampled = [Sampled(ids + ends, [], 0.0, Ended.STOPPED) for ids in texts]

    def ask() -> None:
        if recipe.rollout.vllm_server_base_url is not None:
            check_server(recipe)
        rows = read_rows(examples, np.arange(2) % len(examples))
        Sampler(recipe, world, tokenizer, None, rewards, data.train.steps).score(rows, sampled, [[], []], 0)

    try:
        RankGroup(world).on_main(ask)
    finally:
        rewards.close()
