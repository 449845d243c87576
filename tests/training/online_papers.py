"""The losses of sampled completions as their papers state them, completion by completion, for tests."""

from collections.abc import Sequence
from statistics import mean, stdev

import torch
from torch import Tensor

EPS = 1e-4  # beside a standard deviation, as in TRL


def advantages(rewards: Sequence[float], size: int, loss_type: str, scale: str) -> list[float]:
    """Of each completion; those of a prompt follow one another, `size` of them."""
    found = []
    for i, reward in enumerate(rewards):
        group = rewards[i // size * size : (i // size + 1) * size]
        if loss_type == "rloo":  # the mean of the others
            found.append(reward - (sum(group) - reward) / (size - 1))
        elif loss_type == "reinforce++":  # the mean and deviation of the batch
            found.append((reward - mean(rewards)) / (stdev(rewards) + EPS))
        else:
            by = {"group": stdev(group) + EPS, "batch": stdev(rewards) + EPS, "none": 1.0}[scale]
            found.append((reward - mean(group)) / by)
    return found


def corrections(
    kind: str, trained: Sequence[Tensor], sampled: Sequence[Tensor], *, low: float, high: float
) -> list[Tensor]:
    """Of each completion's tokens, or one number: truncated (TIS, Yao et al. 2025) or masked (MIS, Liu et al. 2025)."""
    found = []
    for t, s in zip(trained, sampled, strict=True):
        ratio = (t.sum() - s.sum()).exp()[None] if kind.startswith("sequence") else (t - s).exp()
        if kind == "decoupled":  # Hilton et al. 2021, eq. 2: no bound on proximal over behavior
            found.append(ratio)
        elif kind == "geometric_mask":  # a completion is kept or not, with the weight 1
            mean = torch.exp((t - s).sum() / len(t)).item()
            found.append(torch.tensor([1.0 if low <= mean <= high else 0.0], dtype=ratio.dtype))
        elif kind.endswith("mask"):
            found.append(
                torch.tensor(
                    [r if low <= r <= high else 0.0 for r in ratio.tolist()], dtype=ratio.dtype
                )
            )
        else:
            found.append(
                torch.tensor([max(low, min(r, high)) for r in ratio.tolist()], dtype=ratio.dtype)
            )
    return found


def paper(
    loss_type: str,
    new: Sequence[Tensor],
    old: Sequence[Tensor],
    advantage: Sequence[float],
    *,
    low: float,
    high: float,
    budget: int,
    level: str = "token",
    weights: Sequence[Tensor] | None = None,
) -> Tensor:
    """The loss of a step, from the log-probabilities of each completion's tokens under both policies, times `weights`."""

    def clipped(ratio: Tensor, a: float) -> Tensor:
        return torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)

    terms: list[Tensor] = []  # each completion's objective, token by token
    for n, o, a in zip(new, old, advantage, strict=True):
        ratio = (n - o).exp()
        if level == "sequence":  # GSPO, eq. 7
            ratio = ((n - o).sum() / len(n)).exp().expand(len(n))
        if loss_type == "cispo":  # eq. 4 and 5: the weight has no gradient
            terms.append(ratio.detach().clamp(max=high) * a * n)
        elif loss_type == "dppo":  # Qi et al. 2026, eq. 11 with the binary total variation
            grown = n.exp() - o.exp()
            is_kept = grown <= high if a > 0 else grown >= -low
            terms.append(torch.where(is_kept, ratio * a, 0.0))
        elif loss_type == "rloo":  # the whole completion is one action
            terms.append(clipped((n - o).sum().exp(), a)[None])
        else:
            terms.append(clipped(ratio, a))
    if weights is not None:
        terms = [each * weight for each, weight in zip(terms, weights, strict=True)]
    tokens = sum(len(each) for each in new)
    if loss_type == "grpo":  # eq. 3
        return -sum((each.mean() for each in terms), torch.zeros(())) / len(terms)
    total = sum((each.sum() for each in terms), torch.zeros(()))
    return -total / {"dr_grpo": len(terms) * budget, "rloo": len(terms)}.get(loss_type, tokens)
