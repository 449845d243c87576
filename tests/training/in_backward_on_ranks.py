"""Steps with and without optim_in_backward, each job on freshly forked ranks: `in_backward_on_ranks.py JOBS.json`.

JOBS.json: a list of {name, ranks, recipe, config, overrides, folder}, perhaps with `pretended`: of so many ranks the one process is
the first, and its collectives exchange nothing. Every rank leaves FOLDER/NAME-RANK.pt: its state after STEPS
steps, their losses and gradient norms, and the bytes that the last step, and the optimizer's state for a save and a
resume before the first step, allocate beside those that are planned.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.checkpoint.shards import get_optimizer_state, set_optimizer_state
from finetune.config.accelerate_file import read_sharding
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.join import join, leave, make_accelerator
from finetune.distributed.model_parts import local_part
from finetune.distributed.world import World
from finetune.models import cpu_products
from finetune.models.load import load_model
from finetune.optim.optimizers import build_optimizer
from finetune.plan.plan import make_plan
from finetune.training.objectives.objective import SFT
from finetune.training.step import make_guard, train_step
from finetune.training.update_in_backward import UpdateInBackward
from tests.forked_ranks import fork_ranks, import_all, wait
from tests.plan.traced import allocated_peak

STEPS, TOKENS = 3, 64


def run(rank: int, job: dict[str, Any]) -> None:
    # Its fp32 copies, of CHUNK_BYTES at most (test_cpu_products.py), are no part of a step's plan: all CPUs compute alike here.
    cpu_products.override_products = lambda _: None
    recipe, sharding = (
        read_recipe(job["recipe"], job["overrides"]),
        read_sharding(job["config"], None, os.environ),
    )
    world = pretend(sharding, job["pretended"]) if "pretended" in job else join(sharding)
    model, _ = load_model(recipe.model, recipe.lora, recipe.run.seed, world)
    optimizer = build_optimizer(model, recipe.optimization)
    guard = make_guard(optimizer, recipe.optimization, world)
    in_backward = (
        UpdateInBackward(optimizer, recipe, world)
        if recipe.optimization.optim_in_backward
        else None
    )
    done: list[Any] = []

    def step(number: int) -> None:
        keys: dict[str, Any] = {"objective": SFT, "recipe": recipe, "world": world, "guard": guard}
        batch = make_batch(number, world)
        done.append(
            train_step(model, optimizer, batch, learning_rate=1e-2, in_backward=in_backward, **keys)
        )

    def make_state() -> torch.Tensor:
        set_optimizer_state(model, optimizer, get_optimizer_state(model, optimizer))
        return torch.zeros(1)  # so that something is allocated also for an optimizer without state

    made = allocated_peak(make_state)
    optimizer.state.clear()
    model.train()
    with in_backward or nullcontext():
        for number in range(STEPS - 1):
            step(number)
        peak = allocated_peak(lambda: step(STEPS - 1))
    state = {}
    for index, parameter in enumerate(
        each for group in optimizer.param_groups for each in group["params"]
    ):
        tensors = {"": parameter, **optimizer.state[parameter]}
        state |= {
            f"{index} {name}": local_part(tensor).detach().clone()
            for name, tensor in tensors.items()
        }
    plan = make_plan(recipe, sharding, world.size, on_cpu=True)
    peaks = {phase.name: phase.peak for phase in plan.phases}
    planned, saved = peaks["steady step"], peaks["save"]
    found = {
        "state": state,
        "losses": [float(each.measured.loss_sum) for each in done],
        "norms": [float(each.grad_norm) for each in done],
        "measured": peak,
        "planned": planned.allocated - planned.parameters - planned.optimizer,
        "state made": made,
        "state planned": saved.allocated - saved.parameters,
    }
    torch.save(found, Path(job["folder"]) / f"{job['name']}-{rank}.pt")
    leave(world)


def pretend(sharding: Sharding, ranks: int) -> World:
    """The first of so many ranks, without the others: what gloo itself allocates, and frees when it is done, is no part of it."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    device = torch.device("cpu")
    return World(0, ranks, 0, ranks, device, sharding, make_accelerator(sharding, device))


def make_batch(step: int, world: World) -> StepBatch:
    """A packed row of two documents, of other tokens on every rank."""
    generator = torch.Generator().manual_seed(100 * step + world.rank)
    half = TOKENS // 2
    micro_batch = MicroBatch(
        input_ids=torch.randint(3, 500, (1, TOKENS), generator=generator),
        labels=torch.randint(3, 500, (1, TOKENS), generator=generator),
        position_ids=torch.arange(half).repeat(2)[None],
        trained_positions=torch.arange(TOKENS),
        cu_seq_lens=torch.tensor([0, half, TOKENS], dtype=torch.int32),
        max_document_length=half,
        example_ids=(),
    )
    tokens = TOKENS * world.size
    return StepBatch(step, 0.0, (micro_batch,), tokens=tokens, trained_tokens=tokens)


if __name__ == "__main__":
    import_all()
    for each in json.loads(Path(sys.argv[1]).read_text()):

        def run_job(rank: int, job: dict[str, Any] = each) -> None:
            run(rank, job)

        log = Path(each["folder"]) / f"{each['name']}.log"
        codes = wait(fork_ranks(run_job, each["ranks"], log), seconds=60)
        if any(codes):
            sys.exit(f"{each['name']}: {codes}\n{log.read_text()[-3000:]}")
