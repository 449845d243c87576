"""The losses of sampled completions, a function a stage: ratios, the bounded loss, corrections,
divergence, the sum.

A stage's values belong to tokens or to sequences: `Level` says to which, and with it their shape.

Three ratios of probabilities occur. The *ratio*, of the model in training to that before the first
update ("old"), is bounded by the loss. The *sampling ratio*, of old to sampled, corrects it. The
*drift*, of the model in training to sampled, is only reported, most often as its logarithm.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from finetune.config.methods import CORRECTIONS, POLICY_LOSSES, PolicyLoss
from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch
from finetune.training.objectives.preference import sum_and_count


class Level(Enum):
    """The unit that has a loss of its own: a token or, for RLOO alone, a sequence."""

    TOKEN = "token"  # losses, ratios and advantages are [positions]
    SEQUENCE = "sequence"  # they are [completions]


@dataclass(frozen=True, slots=True)
class Completions:
    """Which completion of a micro-batch each trained position belongs to."""

    # int64[positions]: a place in `MicroBatch.example_ids`; 0 for positions without a label
    of_position: Tensor
    is_trained: Tensor  # bool[positions]; False for those without a label
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """Sums each completion's trained tokens: [positions] -> [completions]."""
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.of_position, torch.where(self.is_trained, values, 0.0))

    def average(self, values: Tensor) -> Tensor:
        """Averages over each completion's trained tokens: [positions] -> [completions]; 0 where it
        has none.
        """
        tokens = self.sum(torch.ones_like(self.of_position, dtype=torch.float64))
        return (self.sum(values) / tokens.clamp(min=1)).to(values.dtype)

    def repeat(self, values: Tensor) -> Tensor:
        """Gives each position its completion's value: [completions] -> [positions]."""
        return values[self.of_position]

    def make_mean(self, values: Tensor, level: Level) -> Tensor:
        """A metric that is the mean of `values`: their sum and their number.

        Positions without a label do not count.
        """
        return sum_and_count(values, self.is_trained if level is Level.TOKEN else None)


def find_completions(micro_batch: MicroBatch) -> Completions:
    """Reads which completion each of a micro-batch's `trained_positions` belongs to.

    Some of these positions are padding, without a label.
    """
    assert micro_batch.trained_documents is not None, "completions are documents"
    is_trained = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
    return Completions(micro_batch.trained_documents, is_trained, len(micro_batch.example_ids))


def policy_loss(recipe: Recipe) -> PolicyLoss:
    """The row of the recipe's `loss_type`."""
    return POLICY_LOSSES[recipe.method.loss_type]


def loss_level(recipe: Recipe) -> Level:
    """SEQUENCE where a completion has one ratio, the product of its tokens' (RLOO, whose `average`
    is "sums"); TOKEN for every other loss, GSPO included.
    """
    if policy_loss(recipe).average == "sums":
        return Level.SEQUENCE
    return Level.TOKEN


def compute_ratios(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Computes the probability ratios of the model in training to the old one.

    Args:
        log_ratios: [positions], of single tokens.
        completions: Of the positions.
        recipe: With its loss and `importance_sampling_level`.

    Returns:
        At `loss_level`. A sequence's ratio is the product of its tokens' (RLOO). A token's is its
        own (GRPO), or the geometric mean over its sequence (GSPO: Zheng et al. 2025,
        arXiv:2507.18071, eq. 7).
    """
    if loss_level(recipe) is Level.SEQUENCE:
        return completions.sum(log_ratios).exp()
    if recipe.rollout.importance_sampling_level == "sequence":
        return completions.repeat(completions.average(log_ratios)).exp()
    return log_ratios.exp()


def ratio_bounds(recipe: Recipe) -> tuple[float, float]:
    """The lowest and the highest ratio that the loss does not bound: 1 - epsilon and 1 +
    epsilon_high (DAPO); 0 and epsilon_high where the weight alone is bounded (CISPO).
    """
    low, high = _epsilons(recipe)
    if policy_loss(recipe).bound == "weight":
        return 0.0, high
    return 1 - low, 1 + high


def _epsilons(recipe: Recipe) -> tuple[float, float]:
    """Returns (epsilon, epsilon_high); epsilon is both where epsilon_high is null."""
    low = recipe.rollout.epsilon
    high = recipe.rollout.epsilon_high
    return low, low if high is None else high


def find_outside(log_probabilities: Tensor, sampled: Tensor, recipe: Recipe) -> Tensor:
    """Says which tokens are beyond the bounds of the loss, whatever their advantages;
    bool[positions].

    The bounds are on the drifts, or on the differences of the two probabilities (DPPO).

    Args:
        log_probabilities: [positions], of the model in training.
        sampled: [positions], of the sampler.
        recipe: With its loss and bounds.
    """
    if policy_loss(recipe).bound == "difference":
        low, high = _epsilons(recipe)
        return _is_outside(log_probabilities.exp() - sampled.exp(), (-low, high))
    return _is_outside((log_probabilities - sampled).exp(), ratio_bounds(recipe))


def _is_outside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    return (values < low) | (values > high)


def compute_losses(
    ratios: Tensor, advantages: Tensor, log_probabilities: Tensor, recipe: Recipe
) -> Tensor:
    """Computes the bounded losses: PPO's clipped surrogate, the log-probability under a bounded
    weight (CISPO), or the surrogate of the tokens whose probability has not moved too far (DPPO).

    Args:
        ratios: At `loss_level`.
        advantages: At `loss_level`.
        log_probabilities: [positions], of the model in training.
        recipe: With its loss (`POLICY_LOSSES` names the papers) and bounds.

    Returns:
        At `loss_level`.
    """
    low, high = ratio_bounds(recipe)
    bound = policy_loss(recipe).bound
    if bound == "weight":
        return -ratios.detach().clamp(max=high) * advantages * log_probabilities
    if bound == "difference":
        is_dropped = find_clipped(ratios, advantages, log_probabilities, recipe)
        return torch.where(is_dropped, 0.0, -(ratios * advantages))
    return -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)


def find_clipped(
    ratios: Tensor, advantages: Tensor, log_probabilities: Tensor, recipe: Recipe
) -> Tensor:
    """Says which losses the bounds change; bool, at `loss_level` like `ratios` and `advantages`.

    The surrogate loses its gradient beyond the bound where the ratio went with the advantage: a
    good token that grew, a bad one that shrank. So does DPPO's, which bounds the differences of
    probabilities, and for which a token with the advantage 0 is bad. CISPO's weight is bounded for
    every advantage, and its gradient stays.
    """
    bound = policy_loss(recipe).bound
    if bound == "difference":
        low, high = _epsilons(recipe)
        # p - p_old, since a ratio is p / p_old
        grown = (log_probabilities.exp() * (1 - 1 / ratios)).detach()
        return torch.where(advantages > 0, grown > high, grown < -low)
    is_clipped = _is_outside(ratios, ratio_bounds(recipe))
    if bound == "weight":
        return is_clipped
    return is_clipped & ((ratios - 1) * advantages > 0)


def compute_sampling_ratios(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Computes by how much training and sampling differ: the ratios of their probabilities.

    Args:
        log_ratios: [positions], of single tokens.
        completions: Of the positions.
        recipe: The row of `CORRECTIONS` says whether a ratio is a token's, a whole sequence's or
            the geometric mean of its tokens'.

    Returns:
        At `loss_level`; a sequence's ratio is repeated for its tokens where they have losses of
        their own.
    """
    level = CORRECTIONS[recipe.rollout.importance_sampling_correction].level
    if level == "token":
        return log_ratios.exp()
    if level == "sequence":
        of_sequences = completions.sum(log_ratios)
    else:
        of_sequences = completions.average(log_ratios)
    if loss_level(recipe) is Level.TOKEN:
        return completions.repeat(of_sequences).exp()
    return of_sequences.exp()


def bound_sampling_ratios(ratios: Tensor, recipe: Recipe) -> Tensor:
    """Returns the weights of the losses, as the recipe's row of `CORRECTIONS` says.

    Within the bounds a weight is the ratio, or 1 where `is_weighted` is false. Beyond them it is as
    `beyond` says: the bound, 0, or the ratio all the same.

    Arguments and result are at `loss_level`.
    """
    keys = recipe.rollout
    correction = CORRECTIONS[keys.importance_sampling_correction]
    low = keys.importance_sampling_clip_min or 0.0
    high = keys.importance_sampling_clip_max
    if correction.beyond == "ratio":
        return ratios
    if correction.beyond == "bound":
        return ratios.clamp(low, high)
    within = ratios if correction.is_weighted else torch.ones_like(ratios)
    return torch.where(find_corrected(ratios, recipe), 0.0, within)


def find_corrected(ratios: Tensor, recipe: Recipe) -> Tensor:
    """Says which ratios of training to sampling have the bound or 0 as their weight: those beyond
    the bounds, and none where the correction keeps the ratio; bool, at `loss_level`.
    """
    keys = recipe.rollout
    if CORRECTIONS[keys.importance_sampling_correction].beyond == "ratio":
        return torch.zeros_like(ratios, dtype=torch.bool)
    low = keys.importance_sampling_clip_min or 0.0
    return _is_outside(ratios, (low, keys.importance_sampling_clip_max))


def estimate_kl(log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Estimates the KL divergence from the reference, token by token: unbiased, never negative,
    with a gradient.

    Source: k3 of Schulman 2020, "Approximating KL divergence". Arguments and result are
    [positions].
    """
    return (reference - log_probabilities).exp() - (reference - log_probabilities) - 1


def compute_value_losses(
    values: Tensor, old: Tensor, returns: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped loss of the values.

    A loss is half the larger of two squared errors: that of the value, and that of the value moved
    to within `cliprange_value` of the old one.

    Source: PPO's own code (github.com/openai/baselines, ppo2), as TRL and verl have it.

    Args:
        values: [positions], of the critic in training, with their graph.
        old: [positions], of the critic before the first update on these completions.
        returns: [positions].
        recipe: With `cliprange_value`.

    Returns:
        (losses, bool: whether the moved value has the larger error), [positions] each.
    """
    bound = recipe.method.cliprange_value
    bounded = torch.minimum(torch.maximum(values, old - bound), old + bound)
    errors = (values - returns).square()
    bounded_errors = (bounded - returns).square()
    return 0.5 * torch.maximum(errors, bounded_errors), bounded_errors > errors


def sum_losses(losses: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Sums the losses of a micro-batch, 0-dim. GRPO sums the means of its sequences.

    The step divides the sum by what `PolicyObjective.count` returns.
    """
    if loss_level(recipe) is Level.SEQUENCE:
        return losses.sum()
    if policy_loss(recipe).average == "sequences":
        return completions.average(losses).sum()
    return torch.where(completions.is_trained, losses, 0.0).sum()
