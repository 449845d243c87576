"""The losses of preference training as their papers state them, for tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from finetune.config.methods import Method


def paper(
    keys: Method,
    policy: Sequence[Tensor],
    reference: Sequence[float],
    tokens: Sequence[int],
    smoothing: float,
) -> Tensor:
    """The mean loss of a step, from every document's log-probability given its prompt and its tokens: chosen, rejected..."""
    losses, chosen_sum = [], torch.zeros(())
    for i in range(0, len(policy), 2):
        (w, r), (rw, rr), (nw, nr) = policy[i : i + 2], reference[i : i + 2], tokens[i : i + 2]
        chosen_sum = chosen_sum + w
        if keys.method == "dpo":
            h = (w - rw) - (r - rr)
            if keys.loss_type == "sigmoid":  # DPO, eq. 7; with label noise: cDPO
                p = 1 / (1 + torch.exp(-keys.beta * h))
                losses.append(-(1 - smoothing) * torch.log(p) - smoothing * torch.log(1 - p))
            elif keys.loss_type == "hinge":  # SLiC, eq. 6, with DPO's margin
                losses.append(torch.clamp(1 - keys.beta * h, min=0))
            elif (
                keys.loss_type == "apo_zero"
            ):  # APO, eq. 2: the chosen answer becomes likelier, the rejected less likely
                p_w, p_r = (1 / (1 + torch.exp(-keys.beta * ratio)) for ratio in (w - rw, r - rr))
                losses.append((1 - p_w) + p_r)
            else:  # IPO, eq. 17, per token
                losses.append(((w - rw) / nw - (r - rr) / nr - 1 / (2 * keys.beta)) ** 2)
        elif keys.method == "orpo":  # eq. 3 to 7
            p_w, p_r = torch.exp(w / nw), torch.exp(r / nr)
            odds_ratio = (p_w / (1 - p_w)) / (p_r / (1 - p_r))
            losses.append(-keys.beta * torch.log(1 / (1 + torch.exp(-torch.log(odds_ratio)))))
        else:  # SimPO, eq. 6
            margin = keys.beta / nw * w - keys.beta / nr * r - keys.simpo_gamma
            losses.append(-torch.log(1 / (1 + torch.exp(-margin))))
    loss = torch.stack(losses).mean()
    nll = -chosen_sum / sum(tokens[::2])
    if keys.method == "orpo":
        return loss + nll
    return loss + (keys.rpo_alpha or 0.0) * nll


def kto(
    keys: Method, policy: Sequence[Tensor], reference: Sequence[float], is_good: Sequence[bool]
) -> Tensor:
    """The mean loss of a step (KTO, eq. 8), from every document's log-probability: an answer, a mismatched one, an answer..."""
    ratios = [p - r for p, r in zip(policy, reference, strict=True)]
    z0 = torch.stack(ratios[1::2]).mean().detach().clamp(min=0)
    losses = []
    for ratio, good in zip(ratios[::2], is_good, strict=True):
        value = 1 / (1 + torch.exp(-keys.beta * (ratio - z0 if good else z0 - ratio)))
        losses.append((keys.desirable_weight if good else keys.undesirable_weight) * (1 - value))
    return torch.stack(losses).mean()
