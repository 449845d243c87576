"""Resuming from a checkpoint, in any layout and on any number of ranks."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    find_changed_inputs,
    find_problems,
    read_manifest,
    read_state,
)
from finetune.checkpoint.retention import find_newest_valid, list_checkpoints, rename_damaged
from finetune.checkpoint.save import unwrap_optimizer
from finetune.checkpoint.shards import (
    get_model_state,
    get_optimizer_state,
    read_shards,
    select_tensors,
    set_model_state,
    set_optimizer_state,
)
from finetune.config.reader import to_dict
from finetune.config.schema import NESTED, Recipe, compute_global_batch_size, keys_of, leaves, recipe_keys
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.progress import Progress


def find_start(recipe: Recipe, run_folder: Path, world: World, inputs: Mapping[str, str] | None = None) -> Path | None:
    """The verified checkpoint from which `resume_from_checkpoint` says to resume; None to start at step 0. All ranks
    call it.

    Raises `UserError` where the checkpoint cannot be used, or where what decides the run's course has changed: the
    recipe, or the content of what it names (`inputs`, of `fingerprint_inputs`).
    """
    found = RankGroup(world).on_main(
        lambda: _find_and_compare(recipe, run_folder, world.data_parallel.size, inputs or {})
    )
    return None if found is None else Path(found)


def find_checkpoint(resume_from: str, run_folder: Path) -> Path | None:
    """The verified checkpoint from which a run in `run_folder` resumes; None where it starts at step 0.

    `resume_from`: auto, none, or the path of a checkpoint or of a run. A path outside `run_folder` is only the start of
    the run: once it has checkpoints of its own it resumes from those, so that the same command restarts a preempted
    job.
    """
    own = list_checkpoints(run_folder)
    if resume_from == "none":
        if own:
            raise UserError(
                f"{run_folder}: resume_from_checkpoint is none, but a run has left checkpoints here (the newest of "
                f"step {own[-1][0]}); set another output_dir, or remove them"
            )
        return None
    if resume_from == "auto" or (own and not _is_within(Path(resume_from), run_folder)):
        return _find_newest(run_folder) if own else None
    path = Path(resume_from)
    if not path.is_dir():
        raise UserError(f"resume_from_checkpoint: {path}: no such folder; give a checkpoint's, a run's, or auto")
    if not (path / MANIFEST).exists() and list_checkpoints(path):
        return _find_newest(path)
    if problems := find_problems(path):
        raise UserError(f"resume_from_checkpoint: {path}: does not verify: {'; '.join(problems)}")
    later = [step for step, _ in own if step > read_manifest(path).step]
    if later:
        raise UserError(
            f"resume_from_checkpoint: {path}: the run has continued from here to step {later[-1]}; set another "
            "output_dir, or remove the later checkpoints"
        )
    return path


def load_start(start: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Progress:
    """Loads the checkpoint that `find_start` has found; a run without one is at step 0, with the weights that it
    has."""
    return Progress() if start is None else load(start, model, optimizer, world)


def load(checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Progress:
    """Fills the model and the optimizer from `checkpoint`, which has been verified. All ranks call it, each reads its
    part.

    Raises `UserError` where the checkpoint was saved from a different model.
    """
    optimizer = unwrap_optimizer(optimizer)
    weights, moments = get_model_state(model, optimizer), get_optimizer_state(model, optimizer)
    with torch.no_grad():
        read_shards(weights, MODEL, checkpoint)
        read_shards(select_tensors(moments), OPTIMIZER, checkpoint)
    set_model_state(model, weights)
    set_optimizer_state(model, optimizer, moments)
    progress = read_progress(checkpoint)
    if progress.scaler and world.accelerator.scaler is not None:
        world.accelerator.scaler.load_state_dict(progress.scaler)
    return progress


def read_progress(checkpoint: Path) -> Progress:
    """How far the run was when `checkpoint`, which has been verified, was written."""
    content = read_state(checkpoint)
    return Progress(**{field.name: content[field.name] for field in fields(Progress) if field.name in content})


def list_changes(state: Mapping[str, Any], recipe: Recipe, inputs: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What differs between the run that saved `state` (state.json) and this one: what decides its course, then the
    rest.

    Held-out data decide it where their loss chooses a checkpoint or ends the run.
    """
    deciding, other = compare_recipes(state["recipe"], to_dict(recipe))
    inputs_then = state.get("inputs", {}) | {"datasets": state.get("data_fingerprint")}
    changed = find_changed_inputs(inputs_then, inputs, deciding + other)
    held_out = [change for change in other + changed if change.startswith("eval_datasets")]
    watching = [change for change in changed if change.startswith(("metrics", "callbacks"))]  # not what is trained
    deciding += [change for change in changed if change not in held_out + watching]
    other = [change for change in other if change not in held_out] + watching
    is_decided_by_them = recipe.checkpoint.keep_best_checkpoint or recipe.run.early_stopping_patience is not None
    return (deciding + held_out, other) if is_decided_by_them else (deciding, other + held_out)


def compare_recipes(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What differs between two recipes with every key filled in, as `key: then -> now`.

    First what decides the course of a run (the schema marks it), then the rest. A key that `then` does not know had its
    default.
    """
    deciding: list[str] = []
    other: list[str] = []
    for name, key in recipe_keys().items():
        was = _fill_in(name, then.get(name, _plain(key.default)))
        before, after = dict(leaves(was, name)), dict(leaves(now[name], name))
        changed = [leaf for leaf in before | after if before.get(leaf) != after.get(leaf)]
        (deciding if key.same_on_resume else other).extend(
            f"{leaf}: {_short(before.get(leaf))} -> {_short(after.get(leaf))}" for leaf in changed
        )
    return deciding, other


def _find_and_compare(recipe: Recipe, run_folder: Path, ranks: int, inputs: Mapping[str, str]) -> str | None:
    checkpoint = find_checkpoint(recipe.checkpoint.resume_from_checkpoint, run_folder)
    if checkpoint is None:
        return None
    _compare(recipe, checkpoint, ranks, inputs)
    if _is_within(checkpoint, run_folder):
        for damaged in rename_damaged(run_folder, read_manifest(checkpoint).step):
            print(f"{damaged}: damaged, kept under this name until the run has saved that step again")
    return str(checkpoint)


def _compare(recipe: Recipe, checkpoint: Path, ranks: int, inputs: Mapping[str, str]) -> None:
    then = read_state(checkpoint)
    deciding, other = list_changes(then, recipe, inputs)
    before, after = then["global_batch_size"], compute_global_batch_size(recipe.batch, ranks)
    if before != after:
        deciding.append(
            f"rows in a step: {before} -> {after} (global_batch_size keeps them the same on any number of ranks)"
        )
    if deciding and not recipe.checkpoint.allow_changed_recipe:
        raise UserError.of(
            [
                f"{checkpoint}: the recipe has changed since this checkpoint, so the resumed run would be a "
                "different one:",
                *(f"  {change}" for change in deciding),
                "set it back, set another output_dir, or set allow_changed_recipe: true",
            ]
        )
    for change in deciding + other:
        print(f"resuming with a changed recipe: {change}")


def _find_newest(run_folder: Path) -> Path:
    passed_over: list[str] = []
    newest = find_newest_valid(run_folder, passed_over.append)
    if newest is None:
        raise UserError.of(
            [f"{run_folder}: none of its checkpoints verifies; set another output_dir to start over:", *passed_over]
        )
    for line in passed_over:
        print(line)
    return newest


def _is_within(path: Path, run_folder: Path) -> bool:
    return path.resolve().is_relative_to(run_folder.resolve())


def _fill_in(name: str, value: Any) -> Any:
    """`value` with defaults added for the `datasets` keys that did not exist when it was written."""
    if name not in NESTED or not isinstance(value, list):
        return value
    defaults = {key.name: _plain(key.default) for key in keys_of(NESTED[name]).values() if not key.is_required}
    return [defaults | entry if isinstance(entry, dict) else entry for entry in value]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"  # paths differ at their ends
