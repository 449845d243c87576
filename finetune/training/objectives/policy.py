"""Learning from sampled completions: GRPO and its kin, as one objective over the probability ratios
of the completions' tokens.

The losses are in `policy_losses.py`, the metrics in `policy_metrics.py`. A rank that has no row
left in a step gets a filler, a micro-batch without completions. Its loss is 0, but has a graph,
because every rank must take part in the collectives of the forward and the backward.
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

# Names of metrics: the mean sampling ratio, and the share of sampling ratios that the correction
# replaces by the bound or 0.
SAMPLING_RATIO = "importance_sampling/ratio"
SAMPLING_CORRECTED = "importance_sampling/corrected"


def choose_head(recipe: Recipe) -> HeadFunction:
    """Chooses the head function for completions.

    It computes the log-probabilities of labels, [positions]; with a critic these and the critic's
    values, [2, positions].
    """
    if recipe.method_facts.has_critic:
        head = head_log_probabilities_and_values
    else:
        head = head_log_probabilities
    return partial(head, temperature=recipe.method.temperature)


OtherModel = Callable[[nn.Module, MicroBatch], Tensor]
"""(the model in training, a micro-batch on the device) -> the log-probabilities of the reference or
the teacher, fp64[positions].
"""


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """The loss of sampled completions, averaged as the recipe's `loss_type` does."""

    recipe: Recipe
    rollouts: RolloutBatches  # has the names of the rewards, and the files for a checkpoint
    # the reference or the teacher; None if the loss needs neither
    other_model: OtherModel | None = None
    teacher: Teacher | None = None  # the second model that `other_model` runs, if it runs one

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "PolicyObjective":
        """Runs the other model on all micro-batches if there is a pipeline; else returns itself.

        In a pipeline `measure` runs within the schedule of the stages, where a rank cannot run a
        whole forward. The copy that is returned then has an `other_model` that runs nothing: each
        call returns the result of the next micro-batch.
        """
        if self.other_model is None or world.stages == 1:
            return self
        results = [
            self.other_model(model, micro_batch.to(world.device)) for micro_batch in micro_batches()
        ]
        next_results = iter(results)

        def take_next(_model: nn.Module, _micro_batch: MicroBatch) -> Tensor:
            return next(next_results)

        return replace(self, other_model=take_next)

    def count(self, batch: StepBatch) -> int:
        """Returns the divisor of a step's summed loss, over all ranks.

        It is the number of trained tokens, of completions, or (Dr. GRPO) of completions times
        `max_completion_length`.
        """
        completions = batch.groups  # in a batch of completions, each is a group of its own
        average = loss_facts(self.recipe).average
        if average == "tokens":
            return batch.trained_tokens
        if average == "budget":
            return completions * self.recipe.rollout.max_completion_length
        return completions

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Computes the micro-batch's loss, summed as `sum_losses` says and not divided yet, and
        metrics.

        Arguments and result are those of `Objective.measure`. The loss of a filler, which has no
        completions, is 0.
        """
        rollout = micro_batch.columns
        assert rollout is not None, "`make_step_batch` attaches the columns of sampled completions"
        completions = find_completions(micro_batch)
        other_log_probabilities = None
        # For a filler too: every rank must take part in gathering the weights.
        if self.other_model is not None:
            other_log_probabilities = self.other_model(model, micro_batch)
        # After the other model: a mixture's auxiliary loss is computed from the last forward.
        outputs = model(**inputs, head_function=choose_head(self.recipe)).double()
        log_probabilities = outputs
        values: Tensor | None = None
        if self.recipe.method_facts.has_critic:
            log_probabilities, values = outputs.unbind()
        metrics, maxima = self._describe(
            log_probabilities.detach(), completions, rollout, batch.step
        )
        if completions.count:
            losses, loss_metrics = self._compute_losses(
                log_probabilities, other_log_probabilities, completions, rollout
            )
            metrics |= loss_metrics  # in the places that `_describe` has made for them
            if values is not None:
                value_losses, value_metrics = self._compute_value_losses(
                    values, completions, rollout
                )
                # Both are [positions]: only RLOO has losses of whole completions, and no critic.
                losses = losses + value_losses
                metrics |= value_metrics
            loss = sum_losses(losses, completions, self.recipe)
        else:  # a filler: the sum over no positions is 0, and has a graph
            loss = outputs.sum()
        metrics = {name: sum_and_divisor.float() for name, sum_and_divisor in metrics.items()}
        return Measured(loss.float(), metrics, maxima)

    def _compute_losses(
        self,
        log_probabilities: Tensor,
        other_log_probabilities: Tensor | None,
        completions: Completions,
        rollout: Mapping[str, Tensor],
    ) -> tuple[Tensor, Metrics]:
        """Computes the policy's losses in a micro-batch, and metrics of ratios, correction and KL.

        Args:
            log_probabilities: fp64[positions], of the model in training, with their graph.
            other_log_probabilities: fp64[positions], of the reference or the teacher; None if there
                is neither.
            completions: Which completion each position belongs to.
            rollout: The columns of the micro-batch.

        Returns:
            (losses, in the shape that `loss_shape` names; metrics).
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
        if self.recipe.rollout.corrects_sampling:
            sampling_ratios = compute_sampling_ratios(
                old_log_probabilities - sampled, completions, recipe
            )
            losses = losses * compute_weights(sampling_ratios, recipe)
            is_replaced = find_replaced(sampling_ratios, recipe)
            metrics[SAMPLING_RATIO] = completions.make_mean(sampling_ratios, shape)
            metrics[SAMPLING_CORRECTED] = completions.make_mean(is_replaced.double(), shape)
        if kl is not None:
            metrics["kl"] = completions.make_mean(kl.detach(), Shape.POSITIONS)
            # The divergence from a teacher is in the advantages already. Losses and `kl` are both
            # [positions]: rules refuse beta with RLOO.
            if not recipe.method_facts.needs_teacher:
                losses = losses + recipe.method.beta * kl
        return losses, metrics

    def _estimate_divergence(
        self, log_probabilities: Tensor, other_log_probabilities: Tensor | None, sampled: Tensor
    ) -> Tensor | None:
        """Estimates the KL divergence at each token, [positions].

        With a teacher it is KL(sampler || teacher), without a gradient, since it goes into the
        advantages. With a reference it is KL(model || reference), with a gradient, since it is
        added to the loss. None without either.
        """
        if other_log_probabilities is None:
            return None
        if self.recipe.method_facts.needs_teacher:
            return sampled - other_log_probabilities
        return estimate_kl(log_probabilities, other_log_probabilities)

    def _choose_advantages(
        self, completions: Completions, rollout: Mapping[str, Tensor], kl: Tensor | None
    ) -> Tensor:
        """Chooses the advantages, in the shape that `loss_shape` names.

        A critic gives each token its own. Else a token has the advantage of its completion; with a
        teacher, the token's `kl` is subtracted (Agarwal et al. 2023, arXiv:2306.13649, sec. 3.2).
        """
        if self.recipe.method_facts.has_critic:
            return rollout["token_advantages"].double()
        by_completion = rollout["advantages"].double()
        if loss_shape(self.recipe) is Shape.COMPLETIONS:
            return by_completion
        by_position = completions.repeat(by_completion)
        if kl is None or not self.recipe.method_facts.needs_teacher:
            return by_position
        return by_position - kl

    def _compute_value_losses(
        self, values: Tensor, completions: Completions, rollout: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        """Computes the critic's losses times `vf_coef`, [positions], and metrics of the critic.

        `values`: fp64[positions], of the critic in training, with their graph. "value/mean" is the
        mean of the values before the generation's first update.
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
        if "reference" in rollout:  # then "old" is there too
            # With a critic the divergence from the reference is a part of the rewards.
            log_ratios = rollout["old"].double() - rollout["reference"].double()
            metrics["kl"] = completions.make_mean(log_ratios, Shape.POSITIONS)
        return self.recipe.method.vf_coef * losses, metrics

    def _choose_old_log_probabilities(
        self, log_probabilities: Tensor, sampled: Tensor, rollout: Mapping[str, Tensor]
    ) -> Tensor:
        """Chooses the old log-probabilities, against which ratios are taken, fp64[positions].

        With a critic or a correction of the sampler, they are those before the generation's first
        update: "old", which was measured then. If a correction has no "old", this is
        the only update, and the present log-probabilities are the old ones. In all other cases they
        are the sampler's.
        """
        if "old" in rollout:
            return rollout["old"].double()
        if self.recipe.rollout.corrects_sampling:
            return log_probabilities.detach()
        return sampled

    def _describe(
        self,
        log_probabilities: Tensor,
        completions: Completions,
        rollout: Mapping[str, Tensor],
        step: int,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Makes the metrics and maxima that need no losses; metrics of losses get empty sums.

        So every micro-batch has the same names in the same order. A filler keeps the empty sums.
        """
        sampled = rollout["sampled"].double()
        log_drifts = log_probabilities - sampled
        is_drifted = find_drifted(log_probabilities, sampled, self.recipe)
        metrics = {
            **describe_completions(rollout, has_groups=not self.recipe.method_facts.has_critic),
            **describe_ratios(log_drifts, completions),
            "ratio/outside": sum_and_count(is_drifted.double(), completions.is_trained),
            **self._make_empty_metrics(log_drifts.new_zeros(2)),
            **self._make_rollout_metrics(rollout),
        }
        maxima = {"log_ratio/max": completions.find_largest(log_drifts.abs())}
        if self.recipe.rollout.max_staleness:
            staleness = step - rollout["versions"].double()
            metrics |= describe_staleness(log_drifts, staleness, completions, self.recipe)
            maxima["staleness/max"] = completions.find_largest(staleness)
        return metrics, maxima

    def _make_empty_metrics(self, zero: Tensor) -> Metrics:
        """Makes the metrics of the policy's and the critic's losses, each with a sum of 0 over 0
        values.

        `zero`: [2], on the device.
        """
        names = ["clip_ratio"]
        if self.recipe.method_facts.has_critic:
            names += ["value/loss", "value/clip_ratio", "value/mean", "value/return"]
        if self.other_model is not None or self.recipe.has_reference:
            names.append("kl")
        if self.recipe.rollout.corrects_sampling:
            names += [SAMPLING_RATIO, SAMPLING_CORRECTED]
        return dict.fromkeys(names, zero)

    def _make_rollout_metrics(self, rollout: Mapping[str, Tensor]) -> Metrics:
        """Makes the metrics that depend on the recipe: of a critic, a server, sampling ahead,
        dynamic sampling, tools and each reward function.

        A score is nan if the function does not apply to the completion; its mean leaves it out.

        rollout: A value for each completion, by name. Of explained_variance, hand_over and groups
            each completion has the same one.
        """
        keys = self.recipe.rollout
        metrics = {}
        if self.recipe.method_facts.has_critic:
            explained = rollout["explained_variance"]
            metrics["value/explained_variance"] = sum_and_count(
                explained.nan_to_num(), ~explained.isnan()
            )
        if keys.vllm_server_base_url is not None:
            # how long it took to hand the weights over to the server
            metrics["hand_over_seconds"] = sum_and_count(rollout["hand_over"])
        if keys.max_staleness:
            # how often new weights or the end of a run interrupted a completion, and the sampled
            # tokens that were lost by it
            metrics["in_flight/cuts"] = sum_and_count(rollout["cuts"])
            metrics["in_flight/dropped_tokens"] = sum_and_count(rollout["dropped"])
        if keys.max_num_gen_batches > 1:
            metrics["sampled_groups"] = sum_and_count(rollout["groups"])
        if keys.takes_turns:  # TRL has these two names
            metrics["tools/call_frequency"] = sum_and_count(rollout["calls"])
            metrics["tools/failure_frequency"] = torch.stack(
                [rollout["failed_calls"].sum(), rollout["calls"].sum()]
            )
        reward_names = self.rollouts.sampler.reward_names
        for name, scores in zip(reward_names, rollout["scores"].T, strict=True):
            metrics[f"rewards/{name}"] = sum_and_count(scores.nan_to_num(), ~scores.isnan())
        return metrics

    def complete(self, means: Means) -> Means:
        """Replaces each mean square of ratios by the effective sample size, mean**2 / mean square.

        That is a share of the tokens; it is 1 if all ratios are equal.
        """
        names_of_squares = [name for name in means if name.endswith(SQUARE)]
        for name in names_of_squares:
            mean_square = means.pop(name)
            prefix = name.removesuffix("/square")  # "ratio", or such as "staleness/2/ratio"
            if mean_square:  # it rounds to 0 if all ratios are close to 0
                share = means[f"{prefix}/mean"] ** 2 / mean_square
                # sums in fp32 may round above 1
                means[f"{prefix}/effective_sample_size"] = min(1.0, share)
        return means

    def describe_files(self, step: int) -> Mapping[str, bytes]:
        """Returns the files with the completions that later steps are still to train on."""
        return self.rollouts.describe_files(step)

    def resume(self, checkpoint: Path, step: int) -> None:
        """Reads back the completions that later steps are still to train on."""
        self.rollouts.resume(checkpoint, step)


@dataclass(frozen=True, slots=True)
class HeldOutRewards(GroupObjective):
    """The rewards of greedy answers to held-out prompts.

    The loss is minus the mean reward, since a lower loss must be better. There an answer without a
    reward counts as 0.
    """

    sampler: Sampler
    prompts: StoredBatches | None  # None: nothing is held out, and nothing is measured
    # example id -> the reward, the number of sampled tokens, and the score of each reward function
    results: Mapping[int, list[float]] = field(default_factory=dict)

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "HeldOutRewards":
        """Samples and rewards answers to all held-out prompts, some of them at a time.

        Returns:
            The objective with the `results` of all prompts, on every rank.
        """
        assert self.prompts is not None, "something is held out"
        ids = np.arange(len(self.prompts.examples))
        results: dict[int, list[float]] = {}
        prompts_at_once = (
            self.sampler.recipe.rollout.per_device_generation_batch_size * world.tensor_group_count
        )
        # Reading a micro-batch raises if a signal ends the evaluation. The micro-batches are not
        # used. They are repeated without end: there may be fewer of them than rounds of sampling.
        checks_for_signal = chain.from_iterable(begin() for begin in repeat(micro_batches))
        for first in range(0, len(ids), prompts_at_once):
            next(checks_for_signal)
            rollout = self.sampler.roll_out(
                self.prompts.examples,
                ids[first : first + prompts_at_once],
                step=0,
                generations=1,
                greedy=True,
                prompts_before=first,
            )
            for place, example_id in enumerate(rollout.example_ids.tolist()):
                sampled_tokens = len(rollout.sampled[place].log_probabilities)
                results[example_id] = [
                    float(rollout.rewards[place]),
                    float(sampled_tokens),
                    *rollout.scores[place].tolist(),
                ]
        return replace(self, results=results)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the `results` of the micro-batch's prompts. The model is not run."""
        # in the order of a result's numbers
        names = ["reward", "completions/mean_length"]
        names += [f"rewards/{name}" for name in self.sampler.reward_names]
        results = torch.tensor([self.results[i] for i in micro_batch.example_ids])
        # a filler has none: [0] becomes [0, names]
        columns = results.reshape(-1, len(names)).to(micro_batch.labels.device).T
        metrics = {}
        for name, column in zip(names, columns, strict=True):
            metrics[name] = sum_and_count(column.nan_to_num(), ~column.isnan()).float()
        rewards = columns[0]
        return Measured(-rewards.nan_to_num().sum(), metrics)
