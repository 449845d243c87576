"""bf16 moments: as torch's AdamW up to the rounding, unbiased, and saved and loaded in bf16."""

import copy
import shutil

import pytest
import torch

from finetune.optim import optimizers as adamw
from finetune.optim.optimizers import AdamWBf16Moments, round_stochastically


def quadratic(optimizer_class: type[torch.optim.Optimizer], steps: int = 300) -> list[float]:
    """The losses of fitting a matrix to another."""
    torch.manual_seed(0)
    goal, start = torch.randn(40, 30), torch.randn(40, 30)
    weight, bias = torch.nn.Parameter(start), torch.nn.Parameter(torch.zeros(30))
    optimizer = optimizer_class(
        [{"params": [weight], "weight_decay": 0.01}, {"params": [bias]}], lr=0.02
    )  # type: ignore[call-arg]
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = (weight + bias - goal).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_follows_torchs_adamw() -> None:
    ours, torchs = quadratic(AdamWBf16Moments), quadratic(torch.optim.AdamW)
    assert torchs[-1] < torchs[0] / 50
    assert all(abs(a - b) <= 0.02 * b + 1e-3 for a, b in zip(ours, torchs, strict=True))


def test_first_step_is_torchs_own() -> None:
    """Before anything is rounded the two are the same up to fp32."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(50, 7))
    twin = copy.deepcopy(weight)
    weight.grad = torch.randn(50, 7)
    twin.grad = weight.grad.clone()
    AdamWBf16Moments([weight], lr=0.1, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3).step()
    torch.optim.AdamW([twin], lr=0.1, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3).step()
    assert torch.allclose(weight, twin, rtol=1e-6, atol=1e-7)


def test_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    torch.manual_seed(0)
    third = torch.full((200_000,), 1 / 3)
    rounded = round_stochastically(third)
    assert set(rounded.tolist()) == {0.33203125, 0.333984375}  # the two neighbors in bf16
    assert abs(rounded.double().mean().item() - 1 / 3) < 2e-5
    exact = torch.tensor([0.0, 1.0, -2.5, 1e-30]).to(torch.bfloat16)
    assert torch.equal(round_stochastically(exact.float()), exact)


def test_a_slow_second_moment_keeps_moving() -> None:
    """With plain rounding it would stay where the steps become smaller than bf16 resolves."""
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = AdamWBf16Moments([weight], lr=0.0, betas=(0.9, 0.999))
    for _ in range(400):
        weight.grad = torch.ones(10_000)
        optimizer.step()
    expected = 1 - 0.999**400
    assert abs(optimizer.state[weight]["exp_avg_sq"].double().mean().item() / expected - 1) < 0.01


def test_state_is_loaded_in_bf16_and_training_goes_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64))
    optimizer = AdamWBf16Moments([weight], lr=0.01)

    def step(parameter: torch.nn.Parameter, of: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        parameter.grad = torch.randn(64)
        of.step()

    for seed in range(5):
        step(weight, optimizer, seed)
    twin = copy.deepcopy(weight)
    other = AdamWBf16Moments([twin], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[twin]["exp_avg"].dtype == torch.bfloat16
    assert other.param_groups[0]["lr"] == 0.01
    step(weight, optimizer, 9)
    step(twin, other, 9)
    assert torch.equal(weight, twin)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_gpu_run_looks_for_the_compiler_once_not_for_every_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[str] = []
    monkeypatch.setattr(shutil, "which", lookups.append)
    monkeypatch.setattr(adamw, "_compiled_update", lambda: adamw._update_)
    parameters = [torch.zeros(3).as_subclass(OnGpu).requires_grad_() for _ in range(5)]
    optimizer = AdamWBf16Moments(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    assert len(lookups) <= 1
