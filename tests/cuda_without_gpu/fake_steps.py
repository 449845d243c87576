"""Training steps on a CUDA device of fake tensors, in a process of its own: `fake_steps.py RESULTS.json`.

Each case loads a model by `load_model` and takes steps by `train_step`, as a rank of a run on GPUs does. Written is, by the case's
name and the step's, what it waits for, or the error that ended it; and what is found of single operators.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from finetune.config.layout import Sharding
from finetune.config.pretrained import load_config
from finetune.config.schema import Model, Recipe
from finetune.data.batches import StepBatch
from finetune.distributed.join import make_accelerator, make_sequence_group
from finetune.distributed.world import World
from finetune.models import cross_entropy, load, quantized_weights
from finetune.models import loss_chunks as head_chunks
from finetune.models.head_factors import HeadFactors, measure_head_factors
from finetune.models.load import BuildOptions, build_on_meta, load_model
from finetune.optim.optimizers import build_optimizer
from finetune.training.step import make_guard, train_step
from finetune.training.update_in_backward import UpdateInBackward
from tests.cuda_without_gpu.fake_cases import CASES, LENGTHS, Case, config_of, make_micro_batch
from tests.cuda_without_gpu.fake_cuda import DeviceWaits, fake_tensors, pretend_device
from tests.cuda_without_gpu.fake_groups import join_ranks, pretend_groups
from tests.cuda_without_gpu.waiting_operators import find_waits


def make_world(case: Case) -> World:
    """The first of the case's ranks, each on a GPU; its collectives exchange nothing."""
    sharding = Sharding(**{"layout": case.layout, "mixed_precision": "bf16", **case.sharding})
    device = torch.device("cuda", 0)
    for name in ("LOCAL_RANK", "RANK"):
        os.environ.pop(name, None)
    size = 1 if case.layout == "single" else case.ranks
    if case.layout != "single":
        join_ranks(size, case.rank)
    accelerator = make_accelerator(sharding, device)
    group = make_sequence_group(sharding, size, device.type)
    return World(
        case.rank, size, case.rank, size, device, sharding, accelerator, sequence_group=group
    )


@contextmanager
def joined(case: Case) -> Iterator[World]:
    """The world of `case`, left again."""
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield make_world(case)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for cached in (
            head_chunks._can_add_to_fp32,
            quantized_weights.nested_values,
        ):  # fake tensors of this case
            cached.cache_clear()


def build_fake(*arguments: Any) -> torch.nn.Module:
    """`build_on_meta`, its parameters and buffers as fake tensors."""
    with unset_fake_temporarily():
        model = build_on_meta(*arguments)
    fake: dict[torch.Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in fake:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                    fake[tensor] = (
                        torch.nn.Parameter(made) if tensors is module._parameters else made
                    )
                tensors[name] = fake[tensor] if tensor is not None else None
    return model


def random_values(_name: str, slices: tuple[slice, ...]) -> torch.Tensor:
    """As if read from files."""
    return torch.randn([part.stop - part.start for part in slices])


def take_steps(case: Case, world: World, waits: DeviceWaits) -> dict[str, Any]:
    """What the second of two steps waits for: the first fills caches and makes the optimizer's state."""
    found: dict[str, Any] = {}
    keys = Model(model_config=config_of(case), **case.model)
    first = next(iter(case.optimizations.values()))
    of_case = Recipe(path="recipe.yaml", method=case.method, data=case.data)
    options = BuildOptions(scores=(of_case.score_head, 0))
    model, _ = load_model(keys, case.lora, 0, world, case.quantization, first, options)
    micro_batches_of_all = world.data_parallel.size * case.accumulation
    tokens, groups = micro_batches_of_all * sum(LENGTHS), micro_batches_of_all * len(LENGTHS)
    for name, optimization in case.optimizations.items():
        recipe = Recipe(
            path="recipe.yaml",
            model=keys,
            method=case.method,
            data=case.data,
            optimization=optimization,
        )
        objective = case.make_objective(recipe, world)
        optimizer = build_optimizer(model, optimization)
        guard = make_guard(optimizer, optimization, world)
        in_backward = (
            UpdateInBackward(optimizer, recipe, world) if optimization.optim_in_backward else None
        )
        for step in range(2):
            waits.found.clear()
            micro_batches = tuple(
                make_micro_batch(case.packing, case.parts) for _ in range(case.accumulation)
            )
            batch = StepBatch(step, 0.0, micro_batches, tokens, tokens, tokens // 2, groups)
            with in_backward or nullcontext():
                result = train_step(
                    model.train(),
                    optimizer,
                    batch,
                    objective=objective,
                    recipe=recipe,
                    world=world,
                    guard=guard,
                    learning_rate=1e-4,
                    in_backward=in_backward,
                )
            assert result.failed_check is None
        found[name] = [asdict(wait) for wait in waits.found]
    return found


def known_numbers(case: Case) -> dict[tuple[int, ...], Any]:
    """What `tolist` gives of the tensors of these shapes: lengths of documents, and tokens to and from each rank that has experts."""
    chosen = 2 * sum(LENGTHS)
    size = int(case.sharding.get("expert_parallel_size", 1))
    return {(len(LENGTHS),): LENGTHS, (2, size): [[chosen // size] * size] * 2}


def run(case: Case) -> dict[str, Any]:
    """The waits of each of the case's steps, or the error that ended it."""
    try:
        with joined(case) as world, fake_tensors(known_numbers(case)) as waits:
            return take_steps(case, world, waits)
    except Exception:
        return {"error": traceback.format_exc()}


def measure_on_numbers(model: Any) -> HeadFactors:
    """The factors of a fake model: what they are measured on are numbers of their own, which are not fake."""
    with _disable_current_modes():
        return measure_head_factors(model)


def pretend(traces: bool = False) -> None:
    """Makes this process one of ranks on GPUs, and weights fake. traces: see `pretend_device`."""
    pretend_device(("bitsandbytes", "peft", "torchao.optim"), traces)
    pretend_groups()
    # ids of documents, which are no tensors of a step; between real ranks it waits once
    World.gather = lambda self, value, group=None: [value]  # type: ignore[method-assign]
    World.broadcast = lambda self, value, group=None: value  # type: ignore[method-assign]
    load.build_on_meta = build_fake  # type: ignore[assignment]
    load.read_base_values = lambda *_: (random_values, {})
    load.fill_quantized_layers = lambda *_: None
    cross_entropy.measure_head_factors = measure_on_numbers


if __name__ == "__main__":
    pretend()
    of_teacher = Model(
        model_config=config_of(Case(name="teacher"))
    )  # which a recipe names by a folder
    load.load_config = lambda model, *rest: load_config(
        model if model.model_config else of_teacher, *rest
    )
    chosen = set(sys.argv[2:])
    results: dict[str, Any] = {"waits": find_waits()}
    for case in CASES:
        if not chosen or case.name in chosen:
            started = time.process_time()
            results[case.name] = run(case)
            print(f"{case.name}: {time.process_time() - started:.2f} s of CPU", file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps(results))
