"""Going on from a checkpoint, in any layout and on any number of ranks."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import manifest as folder
from finetune.checkpoint import shards as state
from finetune.checkpoint.inputs import changed_inputs
from finetune.checkpoint.json_files import read_state
from finetune.checkpoint.save import plain_optimizer, plain_recipe
from finetune.constants import global_batch_size
from finetune.distributed.collective import Ranks
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.progress import Progress
from finetune.recipe.keys import leaves, recipe_keys
from finetune.recipe.schema import Recipe


def resume(
    recipe: Recipe,
    run_folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    inputs: Mapping[str, str] | None = None,
) -> Progress:
    """Goes on from where `resume_from_checkpoint` says, or begins. All ranks call it.

    Raises `UserError` where the checkpoint cannot be used, or where what decides the run's course has changed: the
    recipe, or what it names (`inputs`: their `fingerprints`).
    """
    found = Ranks(world, None).main(lambda: _found(recipe, run_folder, world.size, inputs or {}))
    return Progress() if found is None else load(Path(found), model, optimizer, world)


def find_checkpoint(resume_from: str, run_folder: Path) -> Path | None:
    """The checkpoint from which a run in `run_folder` goes on; None, where it begins. It has been verified.

    `resume_from`: auto, none, or the path of a checkpoint or of a run. A path outside `run_folder` is only where the
    run begins: once it has checkpoints of its own it goes on from those, so that a preempted job can be started again
    by the same command.
    """
    own = folder.published(run_folder)
    if resume_from == "none":
        if own:
            raise UserError(
                f"{run_folder}: resume_from_checkpoint is none, but a run has left checkpoints here (the newest of step "
                f"{own[-1][0]}); set another output_dir, or remove them"
            )
        return None
    if resume_from == "auto" or (own and not _is_within(Path(resume_from), run_folder)):
        return _newest(run_folder) if own else None
    path = Path(resume_from)
    if not path.is_dir():
        raise UserError(f"resume_from_checkpoint: {path}: no such folder; give a checkpoint's, a run's, or auto")
    if not (path / folder.MANIFEST).exists() and folder.published(path):
        return _newest(path)
    if problems := folder.problems_of(path):
        raise UserError(f"resume_from_checkpoint: {path}: does not verify: {'; '.join(problems)}")
    later = [step for step, _ in own if step > folder.read_manifest(path).step]
    if later:
        raise UserError(
            f"resume_from_checkpoint: {path}: the run went on from here to step {later[-1]}; set another output_dir, "
            "or remove the later checkpoints"
        )
    return path


def load(checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Progress:
    """Fills the model and the optimizer from `checkpoint`, which has been verified. All ranks call it, each reads its part.

    Raises `UserError` where the checkpoint is of another model.
    """
    weights, moments = state.model_state(model), state.optimizer_state(model, plain_optimizer(optimizer))
    with torch.no_grad():
        state.read_into(weights, folder.MODEL, checkpoint)
        state.read_into(state.tensors_of(moments), folder.OPTIMIZER, checkpoint)
    state.set_model(model, weights)
    state.set_optimizer(model, plain_optimizer(optimizer), moments)
    progress = read_progress(checkpoint)
    if progress.scaler and world.accelerator.scaler is not None:
        world.accelerator.scaler.load_state_dict(progress.scaler)
    return progress


def read_progress(checkpoint: Path) -> Progress:
    """How far the run was when `checkpoint`, which has been verified, was written."""
    content = read_state(checkpoint)
    return Progress(**{field.name: content[field.name] for field in fields(Progress)})


def changed_keys(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What differs between two recipes with every key filled in, as `key: then -> now`.

    First what decides the course of a run (the schema marks it), then the rest. A key that `then` does not know had its
    default.
    """
    deciding: list[str] = []
    other: list[str] = []
    for name, key in recipe_keys().items():
        before, after = dict(leaves(then.get(name, _plain(key.default)), name)), dict(leaves(now[name], name))
        changed = [leaf for leaf in before | after if before.get(leaf) != after.get(leaf)]
        (deciding if key.same_on_resume else other).extend(
            f"{leaf}: {_short(before.get(leaf))} -> {_short(after.get(leaf))}" for leaf in changed
        )
    return deciding, other


def _found(recipe: Recipe, run_folder: Path, ranks: int, inputs: Mapping[str, str]) -> str | None:
    checkpoint = find_checkpoint(recipe.checkpoint.resume_from_checkpoint, run_folder)
    if checkpoint is None:
        return None
    _compare(recipe, checkpoint, ranks, inputs)
    if _is_within(checkpoint, run_folder):
        for damaged in folder.set_aside_after(run_folder, folder.read_manifest(checkpoint).step):
            print(f"{damaged}: kept under this name for you to look at; remove it when you need the room")
    return str(checkpoint)


def _compare(recipe: Recipe, checkpoint: Path, ranks: int, inputs: Mapping[str, str]) -> None:
    then = read_state(checkpoint)
    deciding, other = changed_keys(then["recipe"], plain_recipe(recipe))
    before, after = then["global_batch_size"], global_batch_size(recipe.batch, ranks)
    if before != after:
        deciding.append(
            f"rows in a step: {before} -> {after} (global_batch_size keeps them the same on any number of ranks)"
        )
    inputs_then = then.get("inputs", {}) | {"datasets": then.get("data_fingerprint")}
    deciding += changed_inputs(inputs_then, inputs, deciding)
    if deciding and not recipe.checkpoint.allow_changed_recipe:
        raise UserError.of(
            [
                f"{checkpoint}: the recipe has changed since, so that the run would not be the one that was begun:",
                *(f"  {change}" for change in deciding),
                "set it back, set another output_dir, or set allow_changed_recipe: true",
            ]
        )
    for change in deciding + other:
        print(f"resuming with a changed recipe: {change}")


def _newest(run_folder: Path) -> Path:
    told: list[str] = []
    newest = folder.newest_valid(run_folder, told.append)
    if newest is None:
        raise UserError.of(
            [f"{run_folder}: none of its checkpoints verifies; set another output_dir to begin anew:", *told]
        )
    for line in told:
        print(line)
    return newest


def _is_within(path: Path, run_folder: Path) -> bool:
    return path.resolve().is_relative_to(run_folder.resolve())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"  # paths differ at their ends
