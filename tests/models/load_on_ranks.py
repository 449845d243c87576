"""Run on ranks by the fixture `loaded` in conftest.py: folders of every form and family, loaded and trained under FSDP2.

Reads jobs.json in the folder given; rank 0 writes one JSON line for each job, which the tests check.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from finetune.checkpoint.folders import list_checkpoints
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.save import Saver
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.layout import Sharding
from finetune.config.pretrained import load_config, read_facts
from finetune.config.reader import read_recipe
from finetune.config.schema import Data, Lora, Model, Optimization, Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.tokenizer import load_tokenizer
from finetune.distributed.gradients import clip_gradients
from finetune.distributed.join import join, leave
from finetune.distributed.model_parts import decoder_layers
from finetune.distributed.parallelize import count_wrapped_units, list_groups
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.files.tensors import read, read_folder
from finetune.models.load import load_model
from finetune.models.probe import check_training_forward
from finetune.optim.optimizers import build_optimizer
from finetune.training.step import accumulate_gradients
from tests.models.families import documents, packed, padded, plain_loss

OPTIMIZATION = Optimization(learning_rate=1e-3)


def step_batch(world: World) -> StepBatch:
    """This rank's documents of one step, packed into one row."""
    every = documents()
    inputs = packed(every[world.rank :: world.size])
    trained_positions = (inputs["labels"].flatten() != -100).nonzero().squeeze(1)
    micro_batch = MicroBatch(**inputs, trained_positions=trained_positions, example_ids=())
    trained = sum(int((labels != -100).sum()) for _, labels in every)
    return StepBatch(
        step=0,
        epoch=0.0,
        micro_batches=(micro_batch,),
        tokens=sum(len(i) for i, _ in every),
        trained_tokens=trained,
    )


def ours(
    folder: str, world: World, steps: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """The model of `folder` after `steps` steps, its losses and gradient norms, and what was made a unit."""
    model, size = load_model(Model(model_name_or_path=folder), Lora(), 0, world)
    optimizer = build_optimizer(model, OPTIMIZATION)
    losses, norms = [], []
    for _ in range(steps):
        batch = step_batch(world)
        losses.append(
            float(world.sum(accumulate_gradients(model, batch, world).loss_sum))
            / batch.trained_tokens
        )
        norms.append(float(clip_gradients(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": losses,
        "norms": norms,
        "units": count_wrapped_units(model),
        "size": size.total,
    }
    return model, optimizer, found | overlapped(model)


def overlapped(model: torch.nn.Module) -> dict[str, Any]:
    """Whether reductions have a process group of their own, and how many layers each layer gathers ahead."""
    states = [layer._get_fsdp_state() for layer in decoder_layers(model)]  # type: ignore[operator]
    meshes = [group.mesh_info for layer in decoder_layers(model) for group in list_groups(layer)]
    own = [
        getattr(m, "reduce_scatter_process_group", None) not in (None, m.shard_process_group)
        for m in meshes
    ]
    return {
        "own_group": own,
        "gathered_ahead": [len(state._states_to_forward_prefetch) for state in states],
    }


def plain(folder: str, steps: int) -> dict[str, Any]:
    """The same steps by transformers alone, in one process, one document at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).train()
    optimizer = build_optimizer(model, OPTIMIZATION)
    trained = sum(int((labels != -100).sum()) for _, labels in documents())
    losses, norms = [], []
    for _ in range(steps):
        loss = plain_loss(model, documents()) / trained
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def differing(model: torch.nn.Module, folder: Path) -> list[str]:
    """The parameters that are not, bit for bit, in `folder`. All ranks call it."""
    stored = read_folder(folder)
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter.full_tensor().detach(), read(stored[name]).to(parameter.dtype))  # type: ignore[operator]
    ]


def trains(job: dict[str, Any], world: World) -> dict[str, Any]:
    """A family: the steps here and, on one rank, by transformers alone."""
    _, _, found = ours(job["folder"], world, steps=2)
    return {"ours": found, "plain": plain(job["folder"], steps=2) if world.is_main else None}


def probes(job: dict[str, Any], world: World) -> dict[str, Any]:
    """A folder of a family of which little is known: why it is refused, or its loss beside transformers' own."""
    recipe = Model(
        model_name_or_path=job["folder"],
        attn_implementation=job.get("attn_implementation", "auto"),
        dtype="float32",
    )
    data = Data(packing=job["packing"], max_length=64)
    try:
        facts = read_facts(load_config(recipe), job["folder"])
        refuse_problems(
            find_problems(Recipe(path="recipe.yaml", model=recipe, data=data), facts=facts)
        )
        model: Any = load_model(recipe, Lora(), 0, world)[0]
        check_training_forward(model, recipe, data, world)
    except UserError as error:
        return {"error": str(error)}
    model.eval()  # GPT-2 and XGLM have dropout
    with torch.no_grad():
        loss = float(model(**(packed if job["packing"] else padded)(documents())))
        if not world.is_main:
            return {}
        truth = AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=torch.float32, attn_implementation="eager"
        )
        return {"error": None, "loss": loss, "plain": float(plain_loss(truth, documents()))}


def loads(job: dict[str, Any], world: World) -> dict[str, Any]:
    """A form of folder: whether every parameter is the file's."""
    model, _, _ = ours(job["folder"], world, steps=0)
    return {
        "differing": differing(model, Path(job["folder"])),
        "parameters": len(list(model.parameters())),
    }


def refuses(job: dict[str, Any], world: World) -> dict[str, Any]:
    """A broken folder: the message."""
    model = Model(model_name_or_path=job["folder"])
    try:
        read_facts(load_config(model), job["folder"], 1)
        ours(job["folder"], world, steps=0)
    except UserError as error:
        return {"error": str(error)}
    return {"error": None}


def builds(job: dict[str, Any], world: World) -> dict[str, Any]:
    """An inline architecture under LoRA: the standard deviation of an adapted layer's own weight, or why it is refused."""
    try:
        model: Any = load_model(
            Model(model_config=job["model_config"]), Lora(use_peft=True), 0, world
        )[0]
    except UserError as error:
        return {"error": str(error)}
    weight = model.model.layers[1].mlp.up_proj.base_layer.weight.full_tensor()
    return {"error": None, "std": float(weight.float().std())}


def recomputes(job: dict[str, Any], world: World) -> dict[str, Any]:
    """Which decoder layers a backward computes again, for `activation_checkpointing_every` of None (off), 1, 2 and 3."""
    return {str(every): recomputed(job["folder"], every, world) for every in (None, 1, 2, 3)}


def recomputed(folder: str, every: int | None, world: World) -> list[bool]:
    """For each decoder layer, whether it ran a second time. Seen before its feed-forward part: torch stops when it has what it needs."""
    on = replace(
        world, sharding=replace(world.sharding, activation_checkpointing=every is not None)
    )
    keys: dict[str, Any] = {} if every is None else {"activation_checkpointing_every": every}
    model: Any = load_model(Model(model_name_or_path=folder, **keys), Lora(), 0, on)[0]
    calls: Counter[int] = Counter()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    accumulate_gradients(model, step_batch(world), world)
    assert set(calls.values()) <= {1, 2}, calls
    return [times == 2 for _, times in sorted(calls.items())]


def restarts(job: dict[str, Any], world: World) -> dict[str, Any]:
    """A checkpoint as the model that another run starts from: its weights and its tokenizer."""
    recipe = read_recipe(job["recipe"])
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    trained, optimizer, _ = ours(str(recipe.model.model_name_or_path), world, steps=1)
    with Saver(Path(job["folder"]), trained, optimizer, world, recipe, tokenizer) as saver:
        saver.save(Progress(step=1))
    ((_, checkpoint),) = list_checkpoints(Path(job["folder"]))
    before = {
        name: parameter.full_tensor().detach() for name, parameter in trained.named_parameters()
    }  # type: ignore[operator]
    same = {}
    for name in (checkpoint, checkpoint / "model"):
        model = read_recipe(job["recipe"], [f"model_name_or_path={name}"]).model
        loaded, _ = load_model(model, Lora(), 0, world)
        after = {
            name: parameter.full_tensor().detach() for name, parameter in loaded.named_parameters()
        }  # type: ignore[operator]
        same[name.name] = before.keys() == after.keys() and all(
            torch.equal(before[n], after[n]) for n in before
        )
    return {
        "same": same,
        "moved": bool(differing(trained, Path(str(recipe.model.model_name_or_path)))),
    }


if __name__ == "__main__":
    world = join(Sharding(layout="fsdp2", use_cpu=True))
    kinds = {
        "trains": trains,
        "probes": probes,
        "loads": loads,
        "refuses": refuses,
        "builds": builds,
        "recomputes": recomputes,
        "restarts": restarts,
    }
    folder = Path(sys.argv[1])
    results = []
    for job in json.loads((folder / "jobs.json").read_text()):
        print(job, flush=True)
        results.append(kinds[job["kind"]](job, world))
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    leave(world)
