"""A bad step is kept from the parameters by the device alone; the host reads it later."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.schema import Optimization
from finetune.data.batches import StepBatch
from finetune.data.packing import make_filler
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.optim.optimizers import AdamWBf16Moments
from finetune.training.step import DeviceGuard, HostGuard, StepCheck, make_guard


def alone() -> World:
    accelerator: Any = SimpleNamespace()
    return World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), accelerator)


def step_batch(step: int) -> StepBatch:
    micro_batch = replace(make_filler(packing=True), example_ids=(10 + step,))
    return StepBatch(step, 0.0, (micro_batch,), tokens=1, trained_tokens=0)


@pytest.mark.parametrize("optimizer_class", [AdamWBf16Moments, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_from_the_first_bad_step_on_nothing_moves_and_the_step_is_named(
    optimizer_class: type[torch.optim.Optimizer], bad: float
) -> None:
    fused = {"fused": True} if optimizer_class is torch.optim.AdamW else {}
    weight = torch.nn.Parameter(torch.randn(20, 3))
    optimizer = optimizer_class([weight], lr=0.1, **fused)  # type: ignore[call-arg]
    guard = DeviceGuard(optimizer, alone())
    values = []
    for step in range(5):
        weight.grad = torch.full_like(weight, bad if step == 2 else 1.0)
        assert not guard.must_skip(
            StepCheck.of(step_batch(step), torch.tensor(1.0), weight.grad.norm())
        )
        optimizer.step()
        values.append(weight.detach().clone())
        if step == 1:
            guard.raise_if_bad(Optimization())  # nothing is wrong yet
    assert not torch.equal(values[0], values[1])
    assert torch.equal(values[1], values[2]) and torch.equal(values[1], values[4])
    assert all(torch.isfinite(each).all() for each in optimizer.state[weight].values())

    with pytest.raises(UserError, match=r"step 3: the loss or gradient is not finite.*examples 12"):
        guard.raise_if_bad(Optimization())


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_where_the_optimizer_reads_no_flag_the_host_looks_at_every_step(optim: Any) -> None:
    accelerator: Any = SimpleNamespace(scaler=None)
    on_gpu = replace(alone(), device=torch.device("cuda"), accelerator=accelerator)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(make_guard(optimizer, Optimization(optim=optim), on_gpu), HostGuard)


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_where_the_update_runs_on_the_host_the_host_looks_at_every_step(layout: Any) -> None:
    """Under CPU offload the parameters, and with them the update, are on the host; the flag would be on the GPU."""
    accelerator: Any = SimpleNamespace(scaler=None)
    sharding = Sharding(layout=layout, cpu_offload=True)
    on_gpu = replace(
        alone(), device=torch.device("cuda"), sharding=sharding, accelerator=accelerator
    )
    optimizer = AdamWBf16Moments([torch.nn.Parameter(torch.zeros(1))])
    guard = make_guard(optimizer, Optimization(optim="adamw_bf16_moments"), on_gpu)
    assert isinstance(guard, HostGuard) and optimizer.found_inf is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_no_step_between_two_lines_of_metrics_waits_for_the_device(
    tiny_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    from finetune.config.accelerate_file import read_sharding
    from finetune.config.reader import read_recipe
    from finetune.data.packing import StoredBatches
    from finetune.run import fine_tune

    given = StoredBatches.batches

    def watched(self: StoredBatches, *arguments: Any) -> Any:
        for batch in given(self, *arguments):
            torch.cuda.set_sync_debug_mode("error" if 3 <= batch.step < 9 else "default")
            yield batch
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StoredBatches, "batches", watched)
    recipe = read_recipe(str(tiny_recipe(max_steps=10, logging_steps=10, export_at_end=False)), [])
    fine_tune(recipe, read_sharding("fsdp_full_shard.yaml", None, os.environ))
