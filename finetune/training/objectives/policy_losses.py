"""The losses of sampled completions, stage by stage: ratios, the bounded loss, the correction, the
KL divergence, the critic's loss, the sum.

Ratios, advantages and losses have one value for each position or one for each completion: `Shape`
says which.

There are three ratios of a token's probabilities, each with bounds:

- The *ratio*, of the model in training to the model before the generation's first update ("old").
  The loss bounds it (`find_clipped`).
- The *sampling ratio*, of old to sampled. It weighs the loss, within the bounds of a correction
  (`find_replaced`).
- The *drift*, of the model in training to sampled. It is only reported (`find_drifted`), most often
  as its logarithm.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from finetune.config.methods import CORRECTIONS, POLICY_LOSSES, PolicyLoss
from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch
from finetune.training.objectives.preference import sum_and_count


class Shape(Enum):
    """The shape of losses, ratios and advantages."""

    POSITIONS = "positions"  # [positions]: a value for each trained position of a micro-batch
    COMPLETIONS = "completions"  # [completions]: a value for each completion; only RLOO has these


@dataclass(frozen=True, slots=True)
class Completions:
    """Which completion of a micro-batch each of its `trained_positions` belongs to."""

    # int64[positions]: an index into `MicroBatch.example_ids`; 0 for positions without a label
    of_position: Tensor
    is_trained: Tensor  # bool[positions]: whether the position has a label
    count: int  # how many completions there are; 0 in a filler

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` over each completion's trained tokens: [positions] -> [completions]."""
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.of_position, torch.where(self.is_trained, values, 0.0))

    def average(self, values: Tensor) -> Tensor:
        """Averages `values` over each completion's trained tokens: [positions] -> [completions].

        A completion without trained tokens gets 0.
        """
        tokens = self.sum(torch.ones_like(self.of_position, dtype=torch.float64))
        return (self.sum(values) / tokens.clamp(min=1)).to(values.dtype)

    def repeat(self, values: Tensor) -> Tensor:
        """Gives each position the value of its completion: [completions] -> [positions]."""
        return values[self.of_position]

    def make_mean(self, values: Tensor, shape: Shape) -> Tensor:
        """Makes the metric that is the mean of `values`: their sum and their number, fp64[2].

        Positions without a label do not count.
        """
        is_counted = self.is_trained if shape is Shape.POSITIONS else None
        return sum_and_count(values, is_counted)

    def find_largest(self, values: Tensor) -> Tensor:
        """Finds the largest of `values` at trained positions, fp32, 0-dim; 0 if there are none.

        `values`: [positions], none of them negative.
        """
        if not len(values):  # a filler
            return values.new_zeros((), dtype=torch.float32)
        return torch.where(self.is_trained, values, 0.0).max().float()


def find_completions(micro_batch: MicroBatch) -> Completions:
    """Reads which completion each of a micro-batch's `trained_positions` belongs to.

    Positions that only fill this list up to a round number have no label, and are not trained on.
    """
    assert micro_batch.trained_documents is not None, "completions are documents"
    is_trained = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
    return Completions(micro_batch.trained_documents, is_trained, len(micro_batch.example_ids))


def loss_facts(recipe: Recipe) -> PolicyLoss:
    """Returns the facts of the recipe's `loss_type`: how the loss is bounded and averaged."""
    return POLICY_LOSSES[recipe.method.loss_type]


def loss_shape(recipe: Recipe) -> Shape:
    """Returns COMPLETIONS if a completion has one ratio and one loss (RLOO), and else POSITIONS.

    Under `importance_sampling_level: sequence` (GSPO) it is POSITIONS too: each token gets the
    ratio of its sequence.
    """
    if loss_facts(recipe).has_one_ratio:
        return Shape.COMPLETIONS
    return Shape.POSITIONS


def compute_ratios(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Computes the probability ratios of the model in training to the old one.

    A completion's ratio is the product of its tokens' ratios (RLOO). A token's ratio is its own
    (GRPO), or the geometric mean over its completion (GSPO: Zheng et al. 2025, arXiv:2507.18071,
    eq. 7).

    Args:
        log_ratios: [positions], of single tokens.
        completions: Which completion each position belongs to.
        recipe: With its loss and `importance_sampling_level`.

    Returns:
        The ratios, in the shape that `loss_shape` names.
    """
    if loss_shape(recipe) is Shape.COMPLETIONS:
        return completions.sum(log_ratios).exp()
    if recipe.rollout.importance_sampling_level == "sequence":
        return completions.repeat(completions.average(log_ratios)).exp()
    return log_ratios.exp()


def ratio_bounds(recipe: Recipe) -> tuple[float, float]:
    """Returns the lowest and the highest ratio that the loss leaves unchanged.

    They are 1 - epsilon and 1 + epsilon_high (DAPO); for CISPO, 0 and epsilon_high itself.
    """
    epsilon, epsilon_high = _epsilons(recipe)
    if loss_facts(recipe).bound == "weight":
        return 0.0, epsilon_high
    return 1 - epsilon, 1 + epsilon_high


def _epsilons(recipe: Recipe) -> tuple[float, float]:
    """Returns (epsilon, epsilon_high). If the recipe's epsilon_high is null, it is epsilon too."""
    epsilon = recipe.rollout.epsilon
    epsilon_high = recipe.rollout.epsilon_high
    if epsilon_high is None:
        epsilon_high = epsilon
    return epsilon, epsilon_high


def find_drifted(log_probabilities: Tensor, sampled: Tensor, recipe: Recipe) -> Tensor:
    """Finds the tokens whose drift is outside the bounds of the loss, bool[positions].

    The bounds are those that the loss sets to its ratios, whatever the advantages. DPPO's are set
    to the difference of a token's two probabilities instead.

    Args:
        log_probabilities: [positions], of the model in training.
        sampled: [positions], the log-probabilities under the sampler.
        recipe: With its loss and bounds.
    """
    if loss_facts(recipe).bound == "difference":
        epsilon, epsilon_high = _epsilons(recipe)
        return _is_outside(log_probabilities.exp() - sampled.exp(), (-epsilon, epsilon_high))
    return _is_outside((log_probabilities - sampled).exp(), ratio_bounds(recipe))


def _is_outside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Returns, for each value, whether it lies below or above the bounds (lowest, highest)."""
    low, high = bounds
    return (values < low) | (values > high)


def compute_losses(
    ratios: Tensor, advantages: Tensor, log_probabilities: Tensor, recipe: Recipe
) -> Tensor:
    """Computes the bounded losses.

    A loss is PPO's clipped surrogate; or the log-probability times a bounded weight (CISPO); or the
    plain surrogate, which is dropped if the token's probability has moved too far in the direction
    of the advantage (DPPO).

    Args:
        ratios: In the shape that `loss_shape` names.
        advantages: In that shape.
        log_probabilities: [positions], of the model in training; CISPO and DPPO alone read it.
        recipe: With its loss (`POLICY_LOSSES` names the papers) and bounds.

    Returns:
        The losses, in that shape; `sum_losses` drops those of positions without a label.
    """
    bound = loss_facts(recipe).bound
    if bound == "difference":
        is_dropped = find_clipped(ratios, advantages, log_probabilities, recipe)
        return torch.where(is_dropped, 0.0, -(ratios * advantages))
    low, high = ratio_bounds(recipe)
    if bound == "weight":
        return -ratios.detach().clamp(max=high) * advantages * log_probabilities
    return -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)


def find_clipped(
    ratios: Tensor, advantages: Tensor, log_probabilities: Tensor, recipe: Recipe
) -> Tensor:
    """Finds the losses that the bounds change: a bool for each ratio.

    PPO's surrogate loses its gradient where a ratio is out of bounds in the direction of the
    advantage: a good token became too likely, or a bad one too unlikely. DPPO's does so too, but
    the bounds are those of the difference of the two probabilities, and a token with the advantage
    0 counts as bad. CISPO's weight is bounded whatever the advantage, and the loss keeps its
    gradient.

    The arguments are those of `compute_losses`.
    """
    bound = loss_facts(recipe).bound
    if bound == "difference":
        epsilon, epsilon_high = _epsilons(recipe)
        probabilities = log_probabilities.exp().detach()
        old_probabilities = probabilities / ratios.detach()
        growth = probabilities - old_probabilities
        return torch.where(advantages > 0, growth > epsilon_high, growth < -epsilon)
    is_outside = _is_outside(ratios, ratio_bounds(recipe))
    if bound == "weight":
        return is_outside
    moved_with_advantage = (ratios - 1) * advantages > 0
    return is_outside & moved_with_advantage


def compute_sampling_ratios(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Computes the sampling ratios: of the old probabilities to the sampler's.

    By the correction's `level`, a ratio is that of a token, that of a whole completion (the product
    of its tokens' ratios), or the geometric mean of its tokens' ratios. The recipe's
    `importance_sampling_level` has no influence: it is about the other ratios.

    Args:
        log_ratios: [positions], of single tokens.
        completions: Which completion each position belongs to.
        recipe: With its correction.

    Returns:
        The ratios, in the shape that `loss_shape` names: the ratio of a completion is repeated at
        its positions if that is POSITIONS.
    """
    level = CORRECTIONS[recipe.rollout.importance_sampling_correction].level
    if level == "token":  # [positions]: rules refuse it for RLOO
        return log_ratios.exp()
    if level == "sequence":
        log_ratio_of_completion = completions.sum(log_ratios)
    else:  # "geometric"
        log_ratio_of_completion = completions.average(log_ratios)
    if loss_shape(recipe) is Shape.POSITIONS:
        return completions.repeat(log_ratio_of_completion).exp()
    return log_ratio_of_completion.exp()


def compute_weights(sampling_ratios: Tensor, recipe: Recipe) -> Tensor:
    """Computes the weight that each sampling ratio gives its loss, as the recipe's correction says.

    Within the bounds the weight is the ratio, or 1 if the correction's `is_weighted` is false.
    Beyond the bounds `weight_beyond` decides: the weight is the bound, 0, or still the ratio.
    """
    correction = CORRECTIONS[recipe.rollout.importance_sampling_correction]
    low, high = _sampling_bounds(recipe)
    if correction.is_weighted:
        within = sampling_ratios
    else:
        within = torch.ones_like(sampling_ratios)
    if correction.weight_beyond == "ratio":
        beyond = sampling_ratios
    elif correction.weight_beyond == "bound":
        beyond = sampling_ratios.clamp(low, high)
    else:
        beyond = torch.zeros_like(sampling_ratios)
    return torch.where(_is_outside(sampling_ratios, (low, high)), beyond, within)


def find_replaced(sampling_ratios: Tensor, recipe: Recipe) -> Tensor:
    """Finds the sampling ratios that the correction replaces by the bound or 0: a bool for each.

    These are the ratios beyond the bounds; none if the correction keeps the ratio there.
    """
    if CORRECTIONS[recipe.rollout.importance_sampling_correction].weight_beyond == "ratio":
        return torch.zeros_like(sampling_ratios, dtype=torch.bool)
    return _is_outside(sampling_ratios, _sampling_bounds(recipe))


def _sampling_bounds(recipe: Recipe) -> tuple[float, float]:
    """Returns the lowest and the highest sampling ratio of the correction's bounds."""
    keys = recipe.rollout
    return keys.importance_sampling_clip_min or 0.0, keys.importance_sampling_clip_max


def estimate_kl(log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Estimates the KL divergence from the reference at each token: unbiased, never negative, and
    with a gradient.

    Source: k3 of Schulman 2020, "Approximating KL divergence".

    Args:
        log_probabilities: [positions], of the model in training.
        reference: [positions], the log-probabilities under the reference.
    """
    return (reference - log_probabilities).exp() - (reference - log_probabilities) - 1


def compute_value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped loss of the critic's values.

    A loss is half the larger of two squared errors: that of the value, and that of the clipped
    value, which is at most `cliprange_value` away from the old value.

    Source: PPO's own code (github.com/openai/baselines, ppo2), as TRL and verl have it.

    Args:
        values: [positions], of the critic in training, with their graph.
        old_values: [positions], of the critic before the generation's first update.
        returns: [positions], the targets of the values.
        recipe: With `cliprange_value`.

    Returns:
        (losses, whether the clipped value has the larger error), [positions] each.
    """
    clip_range = recipe.method.cliprange_value
    lowest = old_values - clip_range
    highest = old_values + clip_range
    clipped_values = torch.minimum(torch.maximum(values, lowest), highest)
    errors = (values - returns).square()
    clipped_errors = (clipped_values - returns).square()
    return 0.5 * torch.maximum(errors, clipped_errors), clipped_errors > errors


def sum_losses(losses: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Sums the losses of a micro-batch, 0-dim.

    For GRPO each completion's losses are averaged over its tokens first. The step divides the sum
    by the result of `PolicyObjective.count`. For RLOO a completion without trained tokens has the
    ratio 1, and adds minus its advantage without a gradient, as in TRL.

    Args:
        losses: In the shape that `loss_shape` names.
        completions: Which completion each position belongs to.
        recipe: With its loss.
    """
    if loss_shape(recipe) is Shape.COMPLETIONS:
        return losses.sum()
    if loss_facts(recipe).average == "sequences":
        return completions.average(losses).sum()
    return torch.where(completions.is_trained, losses, 0.0).sum()
