"""finetune's side of `gpu.py`: the same functions as in a run, timed on the device, and the first
wait for it in a step.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetune
from benchmarks.gpu_cases import STEPS, Case, Result, rows, summarize
from benchmarks.gpu_weights import random_weight

WHO = "finetune"
PACKAGE = Path(finetune.__file__).resolve().parent


def step_batches(case: Case, options: argparse.Namespace) -> list[Any]:
    """Packed step batches of one micro-batch each, every token trained, as the data room makes
    them.
    """
    import torch

    from finetune.constants import IGNORE_INDEX
    from finetune.data.batches import MicroBatch, StepBatch

    packed = rows(case, options)
    batches = []
    for step in range(STEPS):
        examples = [ids for row in packed[step * case.rows : (step + 1) * case.rows] for ids in row]
        lengths = torch.tensor([len(ids) for ids in examples])
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        labels = torch.tensor([i for ids in examples for i in [*ids[1:], IGNORE_INDEX]])[None]
        micro_batch = MicroBatch(
            input_ids=torch.tensor([i for ids in examples for i in ids])[None],
            labels=labels,
            position_ids=torch.cat([torch.arange(len(ids)) for ids in examples])[None],
            trained_positions=(labels.flatten() != IGNORE_INDEX).nonzero().flatten(),
            cu_seq_lens=ends.to(torch.int32),
            max_document_length=int(lengths.max()),
            example_ids=(),
        )
        if case.method == "dpo":
            micro_batch = as_pairs(micro_batch)
        trained = len(micro_batch.trained_positions)
        if torch.cuda.is_available():
            micro_batch = micro_batch.pin_memory()
        counts = {"tokens": int(ends[-1]), "trained_tokens": trained}
        pairs = {"groups": len(micro_batch.example_ids) // 2, "chosen_tokens": trained // 2}
        batches.append(StepBatch(step, 0.0, (micro_batch,), **counts, **pairs))
    return batches


def as_pairs(micro_batch: Any) -> Any:
    """The same, its documents as chosen, rejected, chosen, rejected; the last two are one where
    their number is odd.
    """
    from dataclasses import replace

    import torch

    boundaries = micro_batch.cu_seq_lens
    if len(boundaries) % 2 == 0:
        boundaries = torch.cat([boundaries[:-2], boundaries[-1:]])
    lengths = boundaries.diff()
    documents = torch.searchsorted(boundaries[1:].long(), micro_batch.trained_positions, right=True)
    return replace(
        micro_batch,
        position_ids=torch.cat([torch.arange(int(length)) for length in lengths])[None],
        cu_seq_lens=boundaries,
        max_document_length=int(lengths.max()),
        example_ids=tuple(range(len(lengths))),
        trained_documents=documents,
    )


def prepare(case: Case, workspace: Path) -> tuple[Any, Any, Any, Any]:
    """(recipe, world, sharded model, optimizer), loaded as a run loads them; only the weights come
    from their names.
    """
    import torch
    import yaml

    from finetune.config.accelerate_file import read_sharding
    from finetune.config.module_names import base_name
    from finetune.config.pretrained import load_config
    from finetune.config.reader import read_recipe
    from finetune.distributed.join import join
    from finetune.models import load
    from finetune.optim.optimizers import build_optimizer

    config_file = workspace / "accelerate.yaml"
    recipe_file = workspace / "recipe.yaml"
    layout = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}
    layout["mixed_precision"] = "fp8" if case.fp8 else "bf16"
    fsdp = {"fsdp_version": 2, "fsdp_activation_checkpointing": case.checkpointed}
    config_file.write_text(yaml.safe_dump(layout | {"fsdp_config": fsdp}))
    keys = {
        # a folder of a config alone: adapters take no model_config
        "model_name_or_path": str(workspace),
        "max_length": case.length,
        "method": case.method,
        "optim": case.optim,
        "learning_rate": 1e-5,
        "torch_compile": case.torch_compile,
    }
    if case.use_peft:
        keys |= {"use_peft": True, "lora_r": 16}
    if case.load_in_4bit:
        keys |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    (workspace / "config.json").write_text(json.dumps(case.model))
    recipe_file.write_text(yaml.safe_dump(keys))
    recipe = read_recipe(str(recipe_file), needs_data=False)
    world = join(read_sharding(str(config_file), None, {}))
    whole = load.build_on_meta(load_config(recipe.model), torch.float32)
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}

    def named_values(name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        name = base_name(name)
        weight: torch.Tensor = random_weight(name, shapes[name], world.device)[slices]
        return weight

    load.read_base_values = lambda *_: (named_values, {})
    load.read_carried = lambda *_: {}  # the folder holds a config.json alone
    sections = recipe.quantization, recipe.optimization
    model, _ = load.load_model(recipe.model, recipe.lora, 0, world, *sections)
    return recipe, world, model.train(), build_optimizer(model, recipe.optimization)


def train_ours(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """Trains `steps` steps after `warm_up`; the clock is the device's own."""
    from finetune.errors import set_library_environment

    set_library_environment()  # as a run does, before torch is imported
    import torch

    from finetune.config.methods import Method
    from finetune.training.metrics import peak_flops, peak_memory_bytes
    from finetune.training.objectives.objective import SFT, Objective
    from finetune.training.objectives.preference import PreferenceObjective
    from finetune.training.reference import without_adapters
    from finetune.training.step import make_guard, train_step

    began = time.perf_counter()
    batches = step_batches(case, options)
    with tempfile.TemporaryDirectory() as folder:
        recipe, world, model, optimizer = prepare(case, Path(folder))

    dpo = PreferenceObjective(Method(method="dpo"), without_adapters)
    objective: Objective = dpo if case.method == "dpo" else SFT
    guard = make_guard(optimizer, recipe.optimization, world)
    run = {
        "objective": objective,
        "recipe": recipe,
        "world": world,
        "guard": guard,
        "learning_rate": 1e-5,
    }

    def step(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batches[index % len(batches)]
        done = train_step(model, optimizer, batch, **run)
        return done.measured.loss_sum / objective.count(batch), done.grad_norm

    loss, norm = (each.item() for each in step(0))
    first = time.perf_counter() - began
    for index in range(1, warm_up):
        step(index)
    waits = synchronizations(lambda: step(warm_up)) if world.device.type == "cuda" else None
    seconds = timed(step, warm_up, steps, world.device.type)
    speeds = [batches[(warm_up + i) % len(batches)].tokens / s for i, s in enumerate(seconds)]
    device = peak_flops(world.device), peak_memory_bytes(world.device)
    seen = {"loss": loss, "grad_norm": norm, "waits_for_device": waits}
    return summarize(case, WHO, speeds, *device, seconds_to_first_step=first, **seen)


def timed(step: Callable[[int], Any], start: int, steps: int, device: str) -> list[float]:
    """Seconds of each step, by events in the device's queue: the host never waits in between."""
    import torch

    if device != "cuda":
        seconds = []
        for index in range(start, start + steps):
            began = time.perf_counter()
            step(index)
            seconds.append(time.perf_counter() - began)
        return seconds
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for index, mark in enumerate(marks[1:]):
        step(start + index)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def synchronizations(step: Callable[[], Any]) -> str:
    """Runs a step that is warned of every wait for the device; "nothing", or the first place that
    waits.

    Warned, not stopped: an error in the middle of a step would leave gradients and sharded weights
    half done for the steps that are timed after it.
    """
    import traceback
    import warnings

    import torch

    waits: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
        # the check's word about itself
        if "synchronizing" in str(message) and "prototype" not in str(message):
            waits.append(place + str(message).splitlines()[0])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits[0] if waits else "nothing"
