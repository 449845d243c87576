"""The losses of sampled completions, a function a stage: ratios, the bounded loss, corrections,
divergence, the sum.

A stage has one value for each position or one for each completion: `Shape` says which.

Three ratios of probabilities occur, each with bounds. The *ratio*, of the model in training to that
before the first update ("old"), is bounded by the loss (`find_clipped`). The *sampling ratio*, of
old to sampled, is the loss's weight, with the bounds of a correction (`find_replaced`). The
*drift*, of the model in training to sampled, is only reported (`find_drifted`), most often as its
logarithm.
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

    POSITIONS = "positions"  # [positions]: one for each token
    COMPLETIONS = "completions"  # [completions]: one for each completion; RLOO alone


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

    def make_mean(self, values: Tensor, shape: Shape) -> Tensor:
        """A metric that is the mean of `values`: their sum and their number, [2].

        Positions without a label do not count.
        """
        return sum_and_count(values, self.is_trained if shape is Shape.POSITIONS else None)

    def find_largest(self, values: Tensor) -> Tensor:
        """The largest of `values` [positions], which are not negative, at trained positions: fp32,
        0-dim; 0 for a filler.
        """
        if not len(values):  # a filler
            return values.new_zeros((), dtype=torch.float32)
        return torch.where(self.is_trained, values, 0.0).max().float()


def find_completions(micro_batch: MicroBatch) -> Completions:
    """Reads which completion each of a micro-batch's `trained_positions` belongs to.

    Those that fill this list up to a round number have no label, and are not trained on.
    """
    assert micro_batch.trained_documents is not None, "completions are documents"
    is_trained = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
    return Completions(micro_batch.trained_documents, is_trained, len(micro_batch.example_ids))


def loss_facts(recipe: Recipe) -> PolicyLoss:
    """The row of the recipe's `loss_type`: how the loss is bounded and averaged."""
    return POLICY_LOSSES[recipe.method.loss_type]


def loss_shape(recipe: Recipe) -> Shape:
    """COMPLETIONS for RLOO, which has one ratio for a completion; POSITIONS for every other loss.

    GSPO's too: it gives each token the ratio of its sequence.
    """
    if loss_facts(recipe).average == "whole_sequences":
        return Shape.COMPLETIONS
    return Shape.POSITIONS


def compute_ratios(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Computes the probability ratios of the model in training to the old one.

    Args:
        log_ratios: [positions], of single tokens.
        completions: Of the positions.
        recipe: With its loss and `importance_sampling_level`.

    Returns:
        Of `loss_shape`. A completion's ratio is the product of its tokens' (RLOO). A token's is its
        own (GRPO), or the geometric mean over its sequence (GSPO: Zheng et al. 2025,
        arXiv:2507.18071, eq. 7).
    """
    if loss_shape(recipe) is Shape.COMPLETIONS:
        return completions.sum(log_ratios).exp()
    if recipe.rollout.importance_sampling_level == "sequence":
        return completions.repeat(completions.average(log_ratios)).exp()
    return log_ratios.exp()


def ratio_bounds(recipe: Recipe) -> tuple[float, float]:
    """The lowest and the highest ratio that the loss does not bound: 1 - epsilon and 1 +
    epsilon_high (DAPO; epsilon where it is null); 0 and epsilon_high itself for CISPO.
    """
    epsilon, epsilon_high = _epsilons(recipe)
    if loss_facts(recipe).bound == "weight":
        return 0.0, epsilon_high
    return 1 - epsilon, 1 + epsilon_high


def _epsilons(recipe: Recipe) -> tuple[float, float]:
    """Returns (epsilon, epsilon_high); epsilon is both where epsilon_high is null."""
    epsilon = recipe.rollout.epsilon
    epsilon_high = recipe.rollout.epsilon_high
    if epsilon_high is None:
        epsilon_high = epsilon
    return epsilon, epsilon_high


def find_drifted(log_probabilities: Tensor, sampled: Tensor, recipe: Recipe) -> Tensor:
    """Says which tokens have drifted beyond the bounds of the loss, whatever their advantages;
    bool[positions].

    The loss itself holds its bounds against the ratio. Here they are held against each token's
    drift, or the difference of its two probabilities (DPPO).

    Args:
        log_probabilities: [positions], of the model in training.
        sampled: [positions], of the sampler.
        recipe: With its loss and bounds.
    """
    if loss_facts(recipe).bound == "difference":
        epsilon, epsilon_high = _epsilons(recipe)
        return _is_outside(log_probabilities.exp() - sampled.exp(), (-epsilon, epsilon_high))
    return _is_outside((log_probabilities - sampled).exp(), ratio_bounds(recipe))


def _is_outside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    return (values < low) | (values > high)


def compute_losses(
    ratios: Tensor, advantages: Tensor, log_probabilities: Tensor, recipe: Recipe
) -> Tensor:
    """Computes the bounded losses: PPO's clipped surrogate, the log-probability under a bounded
    weight (CISPO), or the surrogate of the tokens whose probability has not moved too far with the
    advantage (DPPO).

    Args:
        ratios: Of `loss_shape`.
        advantages: Of `loss_shape`.
        log_probabilities: [positions], of the model in training.
        recipe: With its loss (`POLICY_LOSSES` names the papers) and bounds.

    Returns:
        Of `loss_shape`.
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
    """Says which losses the bounds change; bool, of `loss_shape` like `ratios` and `advantages`.

    The surrogate loses its gradient beyond the bound where the ratio went with the advantage: a
    good token that grew, a bad one that shrank. So does DPPO's, which bounds the differences of
    probabilities, and for which a token with the advantage 0 is bad. CISPO's weight is bounded for
    every advantage, and its gradient stays.
    """
    bound = loss_facts(recipe).bound
    if bound == "difference":
        epsilon, epsilon_high = _epsilons(recipe)
        probabilities = log_probabilities.exp().detach()
        old_probabilities = probabilities / ratios.detach()
        growth = probabilities - old_probabilities
        return torch.where(advantages > 0, growth > epsilon_high, growth < -epsilon)
    is_clipped = _is_outside(ratios, ratio_bounds(recipe))
    if bound == "weight":
        return is_clipped
    return is_clipped & ((ratios - 1) * advantages > 0)


def compute_sampling_ratios(log_ratios: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Computes the sampling ratios: of the old probabilities to the sampler's.

    Args:
        log_ratios: [positions], of single tokens.
        completions: Of the positions.
        recipe: The row of `CORRECTIONS` says whether a ratio is a token's, a whole sequence's or
            the geometric mean of its tokens' (`importance_sampling_level` is of the other ratios).

    Returns:
        Of `loss_shape`: a sequence's ratio is repeated for its tokens where they have losses of
        their own. Rules refuse ratios of tokens for RLOO.
    """
    level = CORRECTIONS[recipe.rollout.importance_sampling_correction].level
    if level == "token":
        return log_ratios.exp()
    if level == "sequence":
        of_sequences = completions.sum(log_ratios)
    else:
        of_sequences = completions.average(log_ratios)
    if loss_shape(recipe) is Shape.POSITIONS:
        return completions.repeat(of_sequences).exp()
    return of_sequences.exp()


def compute_weights(sampling_ratios: Tensor, recipe: Recipe) -> Tensor:
    """Computes the weights of the losses, as the recipe's row of `CORRECTIONS` says.

    Within the bounds a weight is the ratio, or 1 where `is_weighted` is false. Beyond them it is as
    `weight_beyond` says: the bound, 0, or the ratio all the same.

    Arguments and result are of `loss_shape`.
    """
    correction = CORRECTIONS[recipe.rollout.importance_sampling_correction]
    low, high = _sampling_bounds(recipe)
    within = sampling_ratios if correction.is_weighted else torch.ones_like(sampling_ratios)
    if correction.weight_beyond == "ratio":
        beyond = sampling_ratios
    elif correction.weight_beyond == "bound":
        beyond = sampling_ratios.clamp(low, high)
    else:
        beyond = torch.zeros_like(sampling_ratios)
    return torch.where(_is_outside(sampling_ratios, (low, high)), beyond, within)


def find_replaced(sampling_ratios: Tensor, recipe: Recipe) -> Tensor:
    """Says which sampling ratios the correction replaces by the bound or 0: those beyond the
    bounds, and none where it keeps the ratio; bool, of `loss_shape`.
    """
    if CORRECTIONS[recipe.rollout.importance_sampling_correction].weight_beyond == "ratio":
        return torch.zeros_like(sampling_ratios, dtype=torch.bool)
    return _is_outside(sampling_ratios, _sampling_bounds(recipe))


def _sampling_bounds(recipe: Recipe) -> tuple[float, float]:
    """The lowest and the highest sampling ratio that the correction follows."""
    keys = recipe.rollout
    return keys.importance_sampling_clip_min or 0.0, keys.importance_sampling_clip_max


def estimate_kl(log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Estimates the KL divergence from the reference, token by token: unbiased, never negative,
    with a gradient.

    Source: k3 of Schulman 2020, "Approximating KL divergence". Arguments and result are
    [positions].
    """
    return (reference - log_probabilities).exp() - (reference - log_probabilities) - 1


def compute_value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped loss of the values.

    A loss is half the larger of two squared errors: that of the value, and that of the value moved
    to within `cliprange_value` of the old one.

    Source: PPO's own code (github.com/openai/baselines, ppo2), as TRL and verl have it.

    Args:
        values: [positions], of the critic in training, with their graph.
        old_values: [positions], of the critic before the first update on these completions.
        returns: [positions].
        recipe: With `cliprange_value`.

    Returns:
        (losses, bool: whether the moved value has the larger error), [positions] each.
    """
    bound = recipe.method.cliprange_value
    bounded = torch.minimum(torch.maximum(values, old_values - bound), old_values + bound)
    errors = (values - returns).square()
    bounded_errors = (bounded - returns).square()
    return 0.5 * torch.maximum(errors, bounded_errors), bounded_errors > errors


def sum_losses(losses: Tensor, completions: Completions, recipe: Recipe) -> Tensor:
    """Sums the losses of a micro-batch, 0-dim; for GRPO, the means of its completions' losses.

    The step divides the sum by what `PolicyObjective.count` returns.
    """
    if loss_shape(recipe) is Shape.COMPLETIONS:
        return losses.sum()
    if loss_facts(recipe).average == "sequences":
        return completions.average(losses).sum()
    return torch.where(completions.is_trained, losses, 0.0).sum()
