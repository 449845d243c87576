"""Learning from sampled completions: GRPO and its kin, as one objective over the probability ratios
of their tokens.

A rank that has no row left in a step gets a filler, a micro-batch without completions. Its loss is
0, with a graph: the ranks' collectives meet in its forward and backward.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.methods import NO_CORRECTION
from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.packing import StoredBatches
from finetune.distributed.world import World
from finetune.models.cross_entropy import HeadFunction
from finetune.models.load import Teacher
from finetune.models.log_probabilities import head_log_probabilities
from finetune.models.value_head import head_log_probabilities_and_values
from finetune.rollout.collect import RolloutBatches, Sampler
from finetune.training.objectives.objective import (
    GroupObjective,
    Means,
    Measured,
    Metrics,
    Objective,
)
from finetune.training.objectives.policy_losses import (
    Completions,
    Shape,
    compute_losses,
    compute_ratios,
    compute_sampling_ratios,
    compute_value_losses,
    compute_weights,
    estimate_kl,
    find_clipped,
    find_completions,
    find_drifted,
    find_replaced,
    loss_facts,
    loss_shape,
    sum_losses,
)
from finetune.training.objectives.policy_metrics import (
    SQUARE,
    describe_completions,
    describe_ratios,
    describe_staleness,
)
from finetune.training.objectives.preference import sum_and_count

SAMPLING_RATIO = "importance_sampling/ratio"  # the mean sampling ratio
# the share of these ratios that the correction replaces by the bound or 0
SAMPLING_CORRECTED = "importance_sampling/corrected"


def choose_head(recipe: Recipe) -> HeadFunction:
    """Chooses the head function of completions: log-probabilities, and with a critic the values."""
    if recipe.method_facts.has_critic:
        head = head_log_probabilities_and_values
    else:
        head = head_log_probabilities
    return partial(head, temperature=recipe.method.temperature)


OtherModel = Callable[[nn.Module, MicroBatch], Tensor]
"""(the model in training, a micro-batch on the device) -> fp64[positions]: another model's
log-probabilities.
"""


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """The loss of sampled completions, averaged as the recipe's `loss_type` does."""

    recipe: Recipe
    rollouts: RolloutBatches  # has the rewards' names, and what a checkpoint keeps
    other_model: OtherModel | None = None  # scores tokens by the reference or the teacher
    teacher: Teacher | None = None  # the teacher's model, which `other_model` runs

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "PolicyObjective":
        """Under pipeline parallelism, runs the other model on all micro-batches now.

        `measure` runs within the schedule of the stages, where no whole forward is possible; it
        takes each result once, in the order of the micro-batches.
        """
        if self.other_model is None or world.stages == 1:
            return self
        log_probabilities = iter(
            [self.other_model(model, part.to(world.device)) for part in micro_batches()]
        )
        return replace(self, other_model=lambda *_: next(log_probabilities))

    def count(self, batch: StepBatch) -> int:
        """Counts what the summed loss of a step is divided by: its trained tokens, its completions
        times `max_completion_length` (Dr. GRPO), or its completions.
        """
        completions = batch.groups  # of a batch, not of a prompt: each completion is one
        average = loss_facts(self.recipe).average
        if average == "tokens":
            return batch.trained_tokens
        if average == "budget":
            return completions * self.recipe.rollout.max_completion_length
        return completions

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Computes the loss, summed over the micro-batch's completions, and metrics of rewards and
        ratios.

        Arguments and result are those of `Objective.measure`. The loss of a filler, which has no
        completions, is 0.
        """
        rollout = micro_batch.columns
        assert rollout is not None, "completions come with what was sampled"
        completions = find_completions(micro_batch)
        other_log_probabilities = None
        if self.other_model is not None:  # for a filler too: all ranks gather weights together
            other_log_probabilities = self.other_model(model, micro_batch)
        # [positions], or [2, positions] with a critic
        outputs = model(**inputs, head_function=choose_head(self.recipe)).double()
        log_probabilities, values = self._split_head_outputs(outputs)
        metrics, maxima = self._describe(
            log_probabilities.detach(), completions, rollout, batch.step
        )
        if completions.count:
            losses, loss_metrics = self._compute_losses(
                log_probabilities, other_log_probabilities, completions, rollout
            )
            metrics |= loss_metrics
            if values is not None:
                value_losses, value_metrics = self._compute_value_losses(
                    values, completions, rollout
                )
                losses = losses + value_losses  # [positions] both: RLOO has no critic
                metrics |= value_metrics
            loss = sum_losses(losses, completions, self.recipe)
        else:  # a filler
            loss = outputs.sum() * 0.0
        metrics = {name: sum_and_divisor.float() for name, sum_and_divisor in metrics.items()}
        return Measured(loss.float(), metrics, maxima)

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss is weighted by the sampling ratio, of old to sampled probabilities."""
        return self.recipe.rollout.importance_sampling_correction != NO_CORRECTION

    def _split_head_outputs(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Splits the head's outputs into log-probabilities and values, fp64[positions] each.

        `outputs`: fp64[2, positions] with a critic, else fp64[positions] and no values.
        """
        if not self.recipe.method_facts.has_critic:
            return outputs, None
        log_probabilities, values = outputs.unbind()
        return log_probabilities, values

    def _compute_losses(
        self,
        log_probabilities: Tensor,
        other_log_probabilities: Tensor | None,
        completions: Completions,
        rollout: Mapping[str, Tensor],
    ) -> tuple[Tensor, Metrics]:
        """Computes the policy's losses of a micro-batch, and metrics of ratios, correction and KL.

        Args:
            log_probabilities: fp64[positions], of the model in training, with their graph.
            other_log_probabilities: fp64[positions], of the reference or the teacher; None without
                one.
            completions: The completions at these positions.
            rollout: The columns of the micro-batch.

        Returns:
            (losses of `loss_shape`, metric's name -> [2], a sum and its divisor).
        """
        recipe = self.recipe
        shape = loss_shape(recipe)
        sampled = rollout["sampled"].double()  # the sampler's log-probabilities
        old_log_probabilities = self._choose_old_log_probabilities(
            log_probabilities, sampled, rollout
        )
        kl = self._estimate_divergence(log_probabilities, other_log_probabilities, sampled)
        advantages = self._choose_advantages(completions, rollout, kl)
        ratios = compute_ratios(log_probabilities - old_log_probabilities, completions, recipe)
        losses = compute_losses(ratios, advantages, log_probabilities, recipe)
        is_clipped = find_clipped(ratios.detach(), advantages, log_probabilities.detach(), recipe)
        metrics = {"clip_ratio": completions.make_mean(is_clipped.double(), shape)}
        if self.corrects_sampling:
            sampling_ratios = compute_sampling_ratios(
                old_log_probabilities - sampled, completions, recipe
            )
            losses = losses * compute_weights(sampling_ratios, recipe)
            is_replaced = find_replaced(sampling_ratios, recipe)
            metrics[SAMPLING_RATIO] = completions.make_mean(sampling_ratios, shape)
            metrics[SAMPLING_CORRECTED] = completions.make_mean(is_replaced.double(), shape)
        if kl is not None:
            metrics["kl"] = completions.make_mean(kl.detach(), Shape.POSITIONS)
            # A teacher's is part of the advantages. The losses are [positions] here: rules refuse
            # beta with RLOO.
            if not recipe.method_facts.needs_teacher:
                losses = losses + recipe.method.beta * kl
        return losses, metrics

    def _estimate_divergence(
        self, log_probabilities: Tensor, other_log_probabilities: Tensor | None, sampled: Tensor
    ) -> Tensor | None:
        """Estimates each token's KL divergence from the other model, [positions]; None without one.

        To a teacher: of the sampling policy, without a gradient, for the advantages. To a
        reference: of the model in training, with a gradient, for the loss.
        """
        if other_log_probabilities is None:
            return None
        if self.recipe.method_facts.needs_teacher:
            return sampled - other_log_probabilities
        return estimate_kl(log_probabilities, other_log_probabilities)

    def _choose_advantages(
        self, completions: Completions, rollout: Mapping[str, Tensor], kl: Tensor | None
    ) -> Tensor:
        """Returns the advantages, of `loss_shape`.

        Under a teacher a token's advantage is that of its completion, less the token's `kl`
        (Agarwal et al. 2023, arXiv:2306.13649, sec. 3.2).
        """
        if self.recipe.method_facts.has_critic:
            return rollout["token_advantages"].double()
        of_completions = rollout["advantages"].double()
        if loss_shape(self.recipe) is Shape.COMPLETIONS:
            return of_completions
        of_positions = completions.repeat(of_completions)
        if kl is None or not self.recipe.method_facts.needs_teacher:
            return of_positions
        return of_positions - kl

    def _compute_value_losses(
        self, values: Tensor, completions: Completions, rollout: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        """The critic's losses with their weight, [positions], and metrics as `_compute_losses`.

        "value/mean" is of the values before the first update on these completions.
        """
        old_values = rollout["values"].double()
        returns = rollout["returns"].double()
        losses, is_clipped = compute_value_losses(values, old_values, returns, self.recipe)
        metrics = {
            "value/loss": completions.make_mean(losses.detach(), Shape.POSITIONS),
            "value/clip_ratio": completions.make_mean(is_clipped.double(), Shape.POSITIONS),
            "value/mean": completions.make_mean(old_values, Shape.POSITIONS),
            "value/return": completions.make_mean(returns, Shape.POSITIONS),
        }
        if "reference" in rollout:  # with "old"; the divergence is a part of the rewards
            log_ratios = rollout["old"].double() - rollout["reference"].double()
            metrics["kl"] = completions.make_mean(log_ratios, Shape.POSITIONS)
        return self.recipe.method.vf_coef * losses, metrics

    def _choose_old_log_probabilities(
        self, log_probabilities: Tensor, sampled: Tensor, rollout: Mapping[str, Tensor]
    ) -> Tensor:
        """Chooses the log-probabilities that the ratios divide by, fp64[positions].

        With a critic, or if sampling is corrected, they are those under the weights before the
        first update on these completions: "old", which training has measured, or the present ones
        if a correction has no "old", since there is one update only. Else they are the sampler's,
        however many updates there are.
        """
        if "old" in rollout:
            return rollout["old"].double()
        if self.corrects_sampling:
            return log_probabilities.detach()
        return sampled

    def _describe(
        self,
        log_probabilities: Tensor,
        completions: Completions,
        rollout: Mapping[str, Tensor],
        step: int,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Metrics and maxima of a micro-batch: the same names for every one, fillers included."""
        sampled = rollout["sampled"].double()
        log_drifts = log_probabilities - sampled
        is_drifted = find_drifted(log_probabilities, sampled, self.recipe)
        metrics = {
            **describe_completions(rollout, has_groups=not self.recipe.method_facts.has_critic),
            **describe_ratios(log_drifts, completions),
            "ratio/outside": sum_and_count(is_drifted.double(), completions.is_trained),
            **self._make_empty_metrics(log_drifts.new_zeros(2)),
            **self._describe_rollout(rollout),
        }
        maxima = {"log_ratio/max": completions.find_largest(log_drifts.abs())}
        if self.recipe.rollout.max_staleness:
            staleness = step - rollout["versions"].double()
            metrics |= describe_staleness(log_drifts, staleness, completions, self.recipe)
            maxima["staleness/max"] = completions.find_largest(staleness)
        return metrics, maxima

    def _make_empty_metrics(self, zero: Tensor) -> Metrics:
        """Names every metric of both losses, with a sum of 0 over 0 values, as a filler has them.

        `zero`: [2].
        """
        names = ["clip_ratio"]
        if self.recipe.method_facts.has_critic:
            names += ["value/loss", "value/clip_ratio", "value/mean", "value/return"]
        if self.other_model is not None or self.recipe.has_reference:
            names.append("kl")
        if self.corrects_sampling:
            names += [SAMPLING_RATIO, SAMPLING_CORRECTED]
        return dict.fromkeys(names, zero)

    def _describe_rollout(self, rollout: Mapping[str, Tensor]) -> Metrics:
        """Metrics that only some recipes have: of a critic, a server, dynamic sampling, tools and
        each reward function.

        A score that is nan is left out of its mean: the function does not apply.
        """
        keys = self.recipe.rollout
        metrics = {}
        if self.recipe.method_facts.has_critic:
            explained = rollout["explained_variance"]
            metrics["value/explained_variance"] = sum_and_count(
                explained.nan_to_num(), ~explained.isnan()
            )
        if keys.vllm_server_base_url is not None:
            # of the weights to the server
            metrics["hand_over_seconds"] = sum_and_count(rollout["hand_over"])
        if keys.max_staleness:
            # how often new weights, or the end of a run, cut a completion, and the tokens lost so
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

    def complete(self, means: Means) -> Means:
        """Replaces each mean square of ratios by the effective sample size, mean**2 / mean square:
        a share of the tokens, 1 if all ratios are equal.
        """
        for name in [name for name in means if name.endswith(SQUARE)]:
            mean_square = means.pop(name)
            prefix = name.removesuffix("/square")  # "ratio", or such as "staleness/2/ratio"
            if mean_square:  # 0 if the ratios are next to 0; over no tokens there is no mean
                share = means[f"{prefix}/mean"] ** 2 / mean_square
                # sums in fp32 may round above 1
                means[f"{prefix}/effective_sample_size"] = min(1.0, share)
        return means

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """The completions that are still to be trained on."""
        return self.rollouts.describe_files(step)

    def resume(self, checkpoint: Path, step: int) -> None:
        """Reads the completions that are still to be trained on."""
        self.rollouts.resume(checkpoint, step)


@dataclass(frozen=True, slots=True)
class HeldOutRewards(GroupObjective):
    """The rewards of greedy answers to held-out prompts.

    The loss is their mean, negative, so that less is better; an answer without a reward counts as
    0 there.
    """

    sampler: Sampler
    prompts: StoredBatches | None
    # example -> reward, tokens, scores
    results: Mapping[int, list[float]] = field(default_factory=dict)

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "HeldOutRewards":
        """Samples answers to all held-out prompts, a part of them at a time; every rank has all."""
        assert self.prompts is not None, "something is held out"
        ids = np.arange(len(self.prompts.examples))
        results: dict[int, list[float]] = {}
        at_once = (
            self.sampler.recipe.rollout.per_device_generation_batch_size * world.tensor_group_count
        )
        # Asking for a micro-batch raises where a signal ends the evaluation; none is used. They
        # begin again at the first one, since there may be more parts than micro-batches.
        checks_for_signal = chain.from_iterable(begin() for begin in repeat(micro_batches))
        for first in range(0, len(ids), at_once):
            next(checks_for_signal)
            part = ids[first : first + at_once]
            rollout = self.sampler.roll_out(
                self.prompts.examples,
                part,
                step=0,
                generations=1,
                greedy=True,
                prompts_before=first,
            )
            for i, example_id in enumerate(rollout.example_ids.tolist()):
                tokens = len(rollout.sampled[i].log_probabilities)
                results[example_id] = [
                    float(rollout.rewards[i]),
                    float(tokens),
                    *rollout.scores[i].tolist(),
                ]
        return replace(self, results=results)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the rewards, tokens and scores that `prepare` has collected, and counts them."""
        names = ["reward", "completions/mean_length"]
        names += [f"rewards/{name}" for name in self.sampler.reward_names]
        rows = torch.tensor([self.results[i] for i in micro_batch.example_ids])
        # a filler has no row
        columns = rows.reshape(-1, len(names)).to(micro_batch.labels.device).T
        metrics = {}
        for name, column in zip(names, columns, strict=True):
            metrics[name] = sum_and_count(column.nan_to_num(), ~column.isnan()).float()
        return Measured(-columns[0].nan_to_num().sum(), metrics)
