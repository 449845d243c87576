"""Gradients under fp16's loss scale, on torch's own scaler. The ranks that would use it have GPUs; the arithmetic has none."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from finetune.distributed.gradients import (
    backward,
    clip_gradients,
    is_scaled,
    refuse_missing_gradients,
    skip_update,
    unscale,
    update,
)
from finetune.distributed.world import World
from finetune.errors import UserError


def world_with(scaler: Any) -> World:
    """What scaling.py reads of a world."""
    return cast(World, SimpleNamespace(accelerator=SimpleNamespace(scaler=scaler)))


def one_step(scaler: Any, gradient_factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient as it would be clipped, parameter after the step) of loss = sum(w^2) at w = 1."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    world = world_with(scaler)
    loss = weight.square().sum() * gradient_factor
    (loss if scaler is None else scaler.scale(loss)).backward()
    unscale(optimizer, world)
    assert weight.grad is not None
    gradient = weight.grad.clone()
    update(optimizer, world)
    return gradient, weight.detach()


def test_the_scale_is_out_of_the_gradient_before_it_is_clipped_and_the_step_is_the_same() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert is_scaled(world_with(scaler)) and not is_scaled(world_with(None))
    plain, scaled = one_step(None), one_step(scaler)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[1], plain[1])


def test_an_overflow_leaves_the_parameters_and_lowers_the_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, after = one_step(scaler, gradient_factor=float("inf"))
    torch.testing.assert_close(after, torch.ones(3))
    assert scaler.get_scale() == 512.0


def test_after_a_skipped_update_the_next_step_is_made_at_the_same_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (float("nan"), 1.0):
        scaler.scale(weight.square().sum() * factor).backward()
        unscale(optimizer, world_with(scaler))
        if factor == 1.0:
            update(optimizer, world_with(scaler))
        else:
            skip_update(world_with(scaler))
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.8))
    assert scaler.get_scale() == 1024.0


def test_a_gradient_that_is_never_finite_stops_the_run_where_the_scale_cannot_fall_further() -> (
    None
):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for expected in (2.0, 1.0, 0.5):
        if expected < 1.0:
            with pytest.raises(
                UserError, match="fp16: the gradients are not finite at a loss scale of 1 either"
            ):
                one_step(scaler, gradient_factor=float("inf"))
        else:
            one_step(scaler, gradient_factor=float("inf"))
        assert scaler.get_scale() == expected


def test_a_low_scale_that_is_enough_stops_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.25)
    _, after = one_step(scaler)
    torch.testing.assert_close(after, torch.full((3,), 0.8))


def test_the_norm_of_millions_of_gradients_is_exact_and_they_are_scaled_down_to_the_bound() -> None:
    """torch's own is 1e-4 too low for a tensor of five million numbers on a CPU."""
    layer = torch.nn.Linear(2048, 2500, bias=False)
    layer.weight.grad = torch.randn(2500, 2048, generator=torch.Generator().manual_seed(0))
    expected = layer.weight.grad.double().square().sum().sqrt()
    norm = clip_gradients(layer, 1.0)
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(float(expected), rel=1e-7)
    assert float(layer.weight.grad.double().square().sum().sqrt()) == pytest.approx(1.0, rel=1e-6)


def test_rows_that_reach_nothing_that_is_trained_stop_the_run_with_a_reason() -> None:
    """As texts where adapters of Llama 3.2 Vision's layers of cross attention alone are trained."""
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="the rows reach no weight that is trained"):
        backward(layer(torch.ones(2)).sum(), world_with(None))
    layer.requires_grad_(True)  # which a checkpointed block's inputs are, too
    with pytest.raises(UserError, match="the rows reach no weight that is trained"):
        clip_gradients(layer, 1.0)


def test_a_trained_weight_without_a_gradient_stops_a_run_under_ddp() -> None:
    layers = torch.nn.ModuleDict({"read": torch.nn.Linear(2, 2), "unread": torch.nn.Linear(2, 2)})
    layers["read"](torch.ones(2)).sum().backward()
    refuse_missing_gradients(layers)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with pytest.raises(UserError, match=r"2 got none in this step, unread\.weight the first"):
            refuse_missing_gradients(torch.nn.parallel.DistributedDataParallel(layers))
        layers["unread"].requires_grad_(False)
        refuse_missing_gradients(torch.nn.parallel.DistributedDataParallel(layers))
    finally:
        torch.distributed.destroy_process_group()
