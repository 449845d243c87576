"""The corrections of sampled losses against verl's own functions and prime-rl's own loss, where these are installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.config.reader import read_recipe
from finetune.rollout.critic import find_targets
from finetune.training.objectives.policy_losses import (
    Completions,
    compute_losses,
    compute_ratios,
    compute_sampling_ratios,
    compute_value_losses,
    compute_weights,
    sum_losses,
)

pytestmark = pytest.mark.slow
PPO = ["model_name_or_path=a/b", "datasets=[{path: a/b}]", "method=ppo", "rewards=[length]"]
LENGTHS = [5, 1, 8, 3]
LOW, HIGH = 0.6, 1.4


def make_recipe(*keys: str) -> Any:
    given = ["model_name_or_path=a/b", "datasets=[{path: a/b}]", "method=grpo"]
    return read_recipe(None, [*given, "rewards=[exact_answer]", *keys])


def draw(scale: float) -> tuple[Completions, Tensor, Tensor, Tensor, Tensor]:
    """(completions one after another; fp32[positions]: log-probabilities in training and in sampling, advantages; bool[rows,
    positions of a row]: the places of the tokens in padded rows)."""
    random = torch.Generator().manual_seed(5)
    of = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    sampled = -2 * torch.rand(len(of), generator=random)
    trained = sampled + scale * torch.randn(len(of), generator=random)
    trained = trained.clamp(max=-1e-3)
    advantages = torch.tensor([1.0, -0.5, -1.5, 0.7])[of]
    places = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    completions = Completions(of, torch.ones(len(of), dtype=torch.bool), len(LENGTHS))
    return completions, trained, sampled, advantages, places


def pad(values: Tensor, places: Tensor) -> Tensor:
    return torch.zeros(places.shape).masked_scatter(places, values)


@pytest.mark.parametrize(
    ("kind", "level", "threshold"),
    [
        ("token_truncate", "token", f"{HIGH}"),
        ("token_mask", "token", f"{LOW}_{HIGH}"),
        ("sequence_truncate", "sequence", f"{HIGH}"),
        ("sequence_mask", "sequence", f"{LOW}_{HIGH}"),
    ],
)
def test_verl_weighs_the_same_tokens_by_the_same_ratios(
    kind: str, level: str, threshold: str
) -> None:
    verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    completions, trained, sampled, _, places = draw(0.5)
    bounds = [f"importance_sampling_clip_max={HIGH}"]
    bounds += [f"importance_sampling_clip_min={LOW}"] if "mask" in kind else []
    recipe = make_recipe(f"importance_sampling_correction={kind}", *bounds)
    ratios = compute_sampling_ratios(trained - sampled, completions, recipe)
    weights = compute_weights(ratios, recipe)
    truth, _ = verl.compute_rollout_correction_weights(
        pad(trained - sampled, places), places.float(), level, threshold
    )
    torch.testing.assert_close(weights, truth[places], rtol=1e-6, atol=1e-6)
    assert (weights != ratios).any() and (weights == ratios).any()


def test_verl_keeps_the_same_completions_by_their_mean_ratio() -> None:
    verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    completions, trained, sampled, _, places = draw(0.25)
    low, high = 0.75, 1.1
    keys = [f"importance_sampling_clip_min={low}", f"importance_sampling_clip_max={high}"]
    recipe = make_recipe("importance_sampling_correction=geometric_mask", *keys)
    ratios = compute_sampling_ratios(trained - sampled, completions, recipe)
    weights = compute_weights(ratios, recipe)
    truth, _ = verl.compute_rollout_rejection_mask(
        pad(trained - sampled, places),
        places.float(),
        "seq_mean_k1",
        f"{1 / high}_{1 / low}",  # its bounds are of sampling over training
    )
    torch.testing.assert_close(weights, truth[places], rtol=0, atol=0)
    assert {0.0, 1.0} == set(weights.tolist())


def sum_dppo(trained: Tensor, sampled: Tensor, advantages: Tensor, completions: Any) -> Tensor:
    """Our loss of all tokens, summed."""
    recipe = make_recipe("loss_type=dppo", "epsilon=0.1", "epsilon_high=0.15")
    ratios = compute_ratios(trained - sampled, completions, recipe)
    return compute_losses(ratios, advantages, trained, recipe).sum()


def test_verl_drops_the_same_tokens_by_the_difference_of_probabilities() -> None:
    """Its surrogate is the log-probability under the ratio: the gradient is the same."""
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import FSDPActorConfig

    completions, trained, sampled, advantages, places = draw(0.3)
    config = FSDPActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
    )
    theirs = trained.clone().requires_grad_()
    loss, metrics = algorithms.compute_policy_loss_dppo_tv(
        pad(sampled, places), pad(theirs, places), pad(advantages, places), places.float(),
        "token-mean", config,
    )  # fmt: skip
    loss.backward()
    ours = trained.clone().requires_grad_()
    (sum_dppo(ours, sampled, advantages, completions) / len(trained)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)
    assert 0 < metrics["actor/pg_clipfrac"] < 1


def test_verl_has_the_same_advantages_and_returns_of_a_critic() -> None:
    """Also where a tool has answered between the tokens: its places are passed over."""
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos")
    _, trained, sampled, _, places = draw(0.5)
    random = torch.Generator().manual_seed(9)
    values = torch.randn(len(trained), generator=random)
    scores = torch.randn(len(LENGTHS), generator=random)
    beta, gamma, lam = 0.3, 0.97, 0.9
    recipe = read_recipe(None, [*PPO, f"beta={beta}", f"gamma={gamma}", f"lam={lam}"])
    rollout: Any = SimpleNamespace(
        values=[each.tolist() for each in values.split(LENGTHS)],
        old=[each.tolist() for each in trained.split(LENGTHS)],
        reference=[each.tolist() for each in sampled.split(LENGTHS)],
        rewards=scores.numpy().astype("float64"),
    )
    targets = find_targets(rollout, recipe)
    # each sampled token stands before one of a tool, which has a value of no meaning
    mask = torch.zeros(len(LENGTHS), 2 * max(LENGTHS), dtype=torch.bool)
    mask[:, ::2] = places
    rewards = torch.zeros(mask.shape).masked_scatter(mask, -beta * (trained - sampled))
    for row, length in enumerate(LENGTHS):
        rewards[row, 2 * length - 2] += scores[row]
    all_values = torch.full(mask.shape, 7.0).masked_scatter(mask, values)
    advantages, returns = algorithms.compute_gae_advantage_return(
        rewards, all_values, mask.float(), gamma, lam
    )
    ours = torch.tensor([each for own in targets.advantages for each in own])
    torch.testing.assert_close(ours, advantages[mask], rtol=1e-6, atol=1e-6)
    ours = torch.tensor([each for own in targets.returns for each in own])
    torch.testing.assert_close(ours, returns[mask], rtol=1e-6, atol=1e-6)


def test_verl_has_the_same_loss_of_a_critic() -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos")
    completions, values, old, _, places = draw(0.3)
    returns = values + torch.linspace(-1, 1, len(values))
    recipe = read_recipe(None, [*PPO, "cliprange_value=0.2"])
    theirs = values.clone().requires_grad_()
    loss, share = algorithms.compute_value_loss(
        pad(theirs, places), pad(returns, places), pad(old, places), places.float(), 0.2
    )
    loss.backward()
    own = values.clone().requires_grad_()
    losses, is_clipped = compute_value_losses(own, old, returns, recipe)
    sum_losses(losses, completions, recipe).div(len(values)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(losses.mean(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    assert float(is_clipped.float().mean()) == pytest.approx(float(share)) and 0 < share < 1


def test_prime_rl_has_the_same_loss_of_the_same_tokens() -> None:
    prime = pytest.importorskip("prime_rl.trainer.rl.loss")
    completions, trained, sampled, advantages, _ = draw(0.3)
    keys = SimpleNamespace(
        dppo_mask_low=0.1, dppo_mask_high=0.15, adv_tau=1.0, teacher_tau=0.0, kl_tau=0.0
    )
    theirs = trained.clone().requires_grad_()
    fields = dict.fromkeys(prime.LossInputs.__dataclass_fields__)
    fields |= {"trainer_logprobs": theirs, "inference_logprobs": sampled, "advantages": advantages}
    fields["loss_mask"] = torch.ones(len(trained), dtype=torch.bool)
    truth = prime.default_loss_fn(prime.LossInputs(**fields), keys)
    truth.loss.backward()
    ours = trained.clone().requires_grad_()
    loss = sum_dppo(ours, sampled, advantages, completions)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, truth.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    assert 0 < truth.metrics["is_masked"] < 1
