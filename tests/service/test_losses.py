"""Each loss of the API against its formula, token by token, and torch's own gradient of that."""

import math
import random

import pytest
import torch
from torch import Tensor

from finetune.errors import UserError
from finetune.service.datums import Limits, check_datums
from finetune.service.losses import LOSSES


def by_formula(
    name: str, new: Tensor, given: dict[str, list[float]], options: dict[str, float]
) -> Tensor:
    """The published formulas, a token at a time, in plain arithmetic."""
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 0.0)
    count = len(new)
    total = new.new_zeros(())
    if name == "gspo":
        marked = [i for i in range(count) if given["sequence_ratio_mask"][i]]
        mean = sum(new[i].item() - given["logprobs"][i] for i in marked) / len(marked)
    for i in range(count):
        if name == "cross_entropy":
            total = total - given["weights"][i] * new[i]
            continue
        advantage = given["advantages"][i]
        ratio = torch.exp(new[i] - given["logprobs"][i])
        if name == "importance_sampling":
            total = total - ratio * advantage
        elif name == "dro":
            total = total - (
                new[i] * advantage - options["beta"] / 2 * (new[i] - given["logprobs"][i]) ** 2
            )
        elif name == "cispo":
            total = total - min(max(ratio.item(), low), high) * advantage * new[i]
        else:
            if name == "gspo":
                ratio = math.exp(mean) * torch.exp(new[i] - new[i].item())
            kept = (
                ratio
                if low <= ratio.item() <= high
                else torch.tensor(min(max(ratio.item(), low), high))
            )
            total = total - torch.minimum(ratio * advantage, kept * advantage)
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_formulas(name: str) -> None:
    draw = random.Random(name)
    for _ in range(50):
        lengths = [draw.randint(1, 6) for _ in range(3)]
        options = {
            "clip_low_threshold": draw.uniform(0.5, 0.9),
            "clip_high_threshold": draw.uniform(1.1, 1.5),
        }
        options = {
            key: value
            for key, value in {**options, "beta": draw.uniform(0, 1)}.items()
            if key in LOSSES[name].options
        }
        documents = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
        new = torch.tensor([draw.uniform(-3, 0) for _ in documents], dtype=torch.float64)
        given = {key: [draw.uniform(-2, 2) for _ in documents] for key in LOSSES[name].inputs}
        if "logprobs" in given:
            given["logprobs"] = [value + draw.uniform(-0.6, 0.6) for value in new.tolist()]
        if "sequence_ratio_mask" in given:
            given["sequence_ratio_mask"] = [
                1.0 if i == 0 or draw.random() < 0.5 else 0.0
                for length in lengths
                for i in range(length)
            ]
        ours = new.clone().requires_grad_()
        tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in given.items()}
        loss = LOSSES[name].compute(ours, tensors, options, documents).sum()
        loss.backward()
        plain = new.clone().requires_grad_()
        start = 0
        expected = torch.zeros((), dtype=torch.float64)
        for length in lengths:
            own = {key: value[start : start + length] for key, value in given.items()}
            expected = expected + by_formula(name, plain[start : start + length], own, options)
            start += length
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-6)


def test_cispos_weight_is_capped_and_has_no_floor_where_a_client_gives_no_thresholds() -> None:
    """Tinker's tutorial of losses: thresholds of 0 and 4."""
    new = torch.tensor([-3.0, -1.0, -0.5], requires_grad=True)
    given = {"logprobs": torch.tensor([0.0, -2.0, -4.0]), "advantages": torch.ones(3)}
    loss = LOSSES["cispo"]
    usual = {name: value for name, value in loss.options.items() if value is not None}
    loss.compute(new, given, usual, torch.zeros(3, dtype=torch.int64)).sum().backward()
    weights = torch.tensor([math.exp(-3), math.exp(1), 4.0])  # exp(3.5) is above 4
    torch.testing.assert_close(new.grad, -weights)


@pytest.mark.parametrize(
    ("loss", "needed"), [("dro", "beta"), ("gspo", "clip_low_threshold and clip_high_threshold")]
)
def test_a_number_without_a_known_default_is_asked_for(loss: str, needed: str) -> None:
    said = f"loss_fn_config: {loss} has no default for {needed}; give it"
    with pytest.raises(UserError, match=said):
        check_datums([{"tokens": [1], "inputs": {}}], loss, {}, Limits(8, 8))
