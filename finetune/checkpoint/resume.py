"""Resumes from a checkpoint, in any layout and on any number of ranks, if the inputs are the same.

The same recipe over other files would be a different run. A checkpoint's state.json therefore has
hashes of these files. A resumed run compares them, and an export compares the LoRA base's.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.folders import find_newest_valid, list_checkpoints, rename_damaged
from finetune.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Progress,
    find_checkpoint_of,
    find_damage,
    read_manifest,
    read_state,
)
from finetune.checkpoint.save import unwrap_optimizer
from finetune.checkpoint.shards import (
    get_model_state,
    get_optimizer_state,
    names_beside_text,
    read_shards,
    select_tensors,
    set_model_state,
    set_optimizer_state,
)
from finetune.config.keys import keys_of, leaves
from finetune.config.pretrained import find_adapter
from finetune.config.reader import to_dict
from finetune.config.reward_names import SHIPPED_REWARDS
from finetune.config.schema import NESTED, Model, Recipe, compute_global_batch_size, recipe_keys
from finetune.config.user_code import file_of
from finetune.constants import CONFIG_FILE, Names
from finetune.data.prepare import PreparedData
from finetune.data.sources import hash_file
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import load_json, read_json_object
from finetune.files.network import find_local_folder
from finetune.files.tensors import hash_weights
from finetune.models.carried import hash_tensors
from finetune.models.load import read_carried, weights_folder

# keys of a config.json without effect on a run
BOOKKEEPING = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}

OF_MODEL = ("model_name_or_path", "model_revision")
OF_TOKENIZER = ("tokenizer_name_or_path", *OF_MODEL, "added_tokens", "special_tokens", "eot_tokens")
OF_TEACHER = ("teacher_model_name_or_path", "teacher_model_revision")
STARTED = "the same name is given, but its weights, from which the training started, have changed"
# input -> (the recipe's keys that name it, the sentence for a changed content under equal keys)
INPUTS: Mapping[str, tuple[Names, str]] = {
    "datasets": (
        ("datasets", "streaming"),
        "datasets: the same files are named, but their content has changed",
    ),
    "held_out": (
        ("eval_datasets",),
        "eval_datasets: the same files are named, but their content has changed",
    ),
    "chat_template": (
        ("chat_template", "tokenizer_name_or_path", "model_name_or_path"),
        "chat_template: the same name is given, but its text has changed",
    ),
    "tokenizer": (
        OF_TOKENIZER,
        (
            "tokenizer: the same name is given, but its vocabulary, merges or special tokens have "
            "changed"
        ),
    ),
    "config": (
        OF_MODEL,
        "model_name_or_path: the same name is given, but its config.json has changed",
    ),
    "base": (OF_MODEL, f"model_name_or_path: {STARTED}"),
    "carried": (
        OF_MODEL,
        "model_name_or_path: the same name is given, but what an export carries over has changed",
    ),
    "adapter": (("adapter_name_or_path",), f"adapter_name_or_path: {STARTED}"),
    "metrics": (
        ("metrics",),
        "metrics: the same functions are named, but their files have changed",
    ),
    "rewards": (
        ("rewards",),
        "rewards: the same functions are named, but their files have changed",
    ),
    "reward_models": (
        ("rewards",),
        "rewards: the same models are named, but their files have changed",
    ),
    "tools": (("tools",), "tools: the same functions are named, but their files have changed"),
    "environment": (
        ("environment",),
        "environment: the same classes are named, but their files have changed",
    ),
    "callbacks": (
        ("callbacks",),
        "callbacks: the same classes are named, but their files have changed",
    ),
    "teacher": (
        OF_TEACHER,
        f"{OF_TEACHER[0]}: the same name is given, but its config.json or weights have changed",
    ),
}


def fingerprint_inputs(
    recipe: Recipe, tokenizer: Any, data: PreparedData | None, world: World
) -> dict[str, str]:
    """Returns a hash of each of `INPUTS` that the run has, on every rank; rank 0 reads them.

    It reads every byte of a base under LoRA, of a base that is the reference, of a teacher and of
    reward models. Of other bases it reads the tensors that an export carries over.
    """
    reward_models = [Model(model_name_or_path=name) for name in recipe.rollout.reward_models]
    for model in (recipe.model, recipe.teacher, *reward_models):
        if model is not None and model.model_name_or_path is not None:
            weights_folder(model)  # which downloads a hub's model first, on every node
    hashes: dict[str, str] = RankGroup(world).on_main(
        lambda: _read_fingerprints(recipe, tokenizer, data)
    )
    return hashes


def _is_base_read(recipe: Recipe) -> bool:
    """Returns whether a run reads all weights of its base while it trains others."""
    if recipe.lora.use_peft or recipe.method_facts.needs_reference:
        return True
    return recipe.method_facts.samples and recipe.method.beta > 0


def find_changed_inputs(
    then: Mapping[str, str | None], now: Mapping[str, str], changed_keys: list[str]
) -> list[str]:
    """Returns a sentence for each input whose content has changed.

    An input whose keys were changed is left out, and so is one that either run does not know:
    another version wrote the hashes, or a hub's data set is streamed.

    Args:
        then: Input -> hash, of the run that saved the checkpoint.
        now: Input -> hash, of this run.
        changed_keys: The changed keys, as `compare_recipes` writes them.
    """
    changed_names = {_name_of(change) for change in changed_keys}
    sentences = []
    for name, (keys, sentence) in INPUTS.items():
        is_known = None not in (then.get(name), now.get(name))
        has_changed = is_known and then[name] != now[name]
        if has_changed and changed_names.isdisjoint(keys):
            sentences.append(sentence)
    return sentences


def _name_of(change: str) -> str:
    """Returns the key of a change.

    >>> _name_of("datasets[0].path: 'a' -> 'b'")
    'datasets'
    """
    return re.split(r"\W", change, maxsplit=1)[0]


def refuse_damaged_model(recipe: Recipe) -> None:
    """Raises `UserError` if a model of the recipe is a damaged checkpoint.

    Loading does not compare checksums.
    """
    named = [("model_name_or_path", recipe.model), ("teacher_model_name_or_path", recipe.teacher)]
    named += [("rewards", Model(model_name_or_path=name)) for name in recipe.rollout.reward_models]
    for key, model in named:
        if model is None or model.model_name_or_path is None:
            continue
        checkpoint = find_checkpoint_of(Path(model.model_name_or_path))
        if checkpoint is not None and (problems := find_damage(checkpoint, parts=[MODEL])):
            raise UserError(
                f"{key}: {model.model_name_or_path}: damaged: {'; '.join(problems)}; name another "
                "checkpoint"
            )


def _read_fingerprints(recipe: Recipe, tokenizer: Any, data: PreparedData | None) -> dict[str, str]:
    """Computes the hash of each of `INPUTS` that the run has."""
    hashes = _hash_data(recipe, data) | _hash_tokenizer(tokenizer) | _hash_code(recipe)
    base = _find_folder(recipe.model)
    teacher = _find_folder(recipe.teacher)
    if base is not None:
        hashes |= _hash_base(base, recipe)
    if recipe.lora.adapter_name_or_path is not None:
        adapter = find_adapter(recipe.lora.adapter_name_or_path)
        hashes["adapter"] = hash_weights(adapter)
        _refuse_other_base(adapter, hashes.get("base"), recipe)
    if teacher is not None and recipe.method_facts.needs_teacher:
        hashes["teacher"] = durable.hash_json([_hash_config(teacher), hash_weights(teacher)])
    if recipe.rollout.reward_models:
        by_model = []
        for name in recipe.rollout.reward_models:
            folder = weights_folder(Model(model_name_or_path=name))
            by_model.append([_hash_config(folder), hash_weights(folder)])
        hashes["reward_models"] = durable.hash_json(by_model)
    return hashes


def _hash_data(recipe: Recipe, data: PreparedData | None) -> dict[str, str]:
    """Returns the hashes of the training rows and the held-out files, except streamed ones."""
    if data is None:
        return {}
    hashes = {"datasets": data.train.fingerprint}
    if data.evaluation and recipe.data.eval_datasets:
        hashes["held_out"] = data.evaluation.fingerprint
    return {name: text for name, text in hashes.items() if text is not None}


def _hash_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Returns the hashes of the chat template and the tokenizer, without truncation and padding."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for key in ("truncation", "padding"):
        backend.pop(key, None)
    return {
        "chat_template": durable.hash_json(tokenizer.chat_template),
        "tokenizer": durable.hash_json([backend, tokenizer.special_tokens_map]),
    }


def _hash_code(recipe: Recipe) -> dict[str, str]:
    """Returns the hashes of the user's files of code that the recipe names."""
    named = {
        "metrics": recipe.run.metrics,
        "callbacks": recipe.run.callbacks,
        "rewards": recipe.rollout.reward_files,
        "tools": [name for name in recipe.rollout.tools if name not in SHIPPED_REWARDS],
        "environment": recipe.rollout.environment_files,
    }
    hashes = {}
    for key, names in named.items():
        if names:
            hashes[key] = durable.hash_json([hash_file(str(file_of(name))) for name in names])
    return hashes


def _hash_base(folder: Path, recipe: Recipe) -> dict[str, str]:
    """Returns the hashes of a base's config, and of the weights that are read but not trained."""
    hashes = {"config": _hash_config(folder)}
    if _is_base_read(recipe):
        return hashes | {"base": hash_weights(folder)}
    carried = read_carried(recipe.model)
    if carried:
        return hashes | {"carried": hash_tensors(carried)}
    return hashes


def _refuse_other_base(adapter: Path, base: str | None, recipe: Recipe) -> None:
    """Raises `UserError` if the run that made `adapter` had another base.

    base: The hash of this run's base.
    """
    states = [adapter.parent / STATE, *sorted(adapter.parent.glob(f"checkpoints/*/{STATE}"))]
    trained_on = set()
    for state in states:
        inputs = read_json_object(state).get("inputs")
        if isinstance(inputs, dict) and isinstance(inputs.get("base"), str):
            trained_on.add(inputs["base"])
    is_known = base is not None and bool(trained_on)
    if is_known and base not in trained_on:
        raise UserError(
            f"{recipe.place_of('adapter_name_or_path')}: adapter_name_or_path: {adapter} was "
            f"trained on other weights than those of {recipe.model.model_name_or_path}; name its "
            "own base in model_name_or_path"
        )


def _find_folder(model: Model | None) -> Path | None:
    """Returns a model's folder on this machine; None where it has none, or there is no model."""
    if model is None or model.model_name_or_path is None:
        return None
    return find_local_folder(model.model_name_or_path, model.model_revision)


def _hash_config(folder: Path) -> str:
    config = load_json(folder / CONFIG_FILE)
    return durable.hash_json(
        {key: value for key, value in config.items() if key not in BOOKKEEPING}
    )


def find_start(
    recipe: Recipe, run_folder: Path, world: World, inputs: Mapping[str, str] | None = None
) -> Path | None:
    """Returns the verified checkpoint that `resume_from_checkpoint` names; None: start at step 0.

    All ranks call it.

    Args:
        recipe: The recipe.
        run_folder: The run's folder.
        world: This rank's place.
        inputs: What `fingerprint_inputs` returned.

    Raises:
        UserError: The checkpoint cannot be used, or the recipe or its inputs have changed so that
            this would be another run.
    """
    checkpoint = RankGroup(world).on_main(
        lambda: _find_and_compare(recipe, run_folder, world.data_parallel.size, inputs or {})
    )
    return None if checkpoint is None else Path(checkpoint)


def find_checkpoint(resume_from: str, run_folder: Path) -> Path | None:
    """Finds and verifies the checkpoint from which a run resumes; None: it starts at step 0.

    Args:
        resume_from: auto, none, or the path of a checkpoint or a run. A path outside `run_folder`
            is used until the run has checkpoints of its own: the command can be repeated.
        run_folder: The run's folder.

    Raises:
        UserError: The checkpoint does not exist or is damaged, or the run would lose later ones.
    """
    of_run = list_checkpoints(run_folder)
    if resume_from == "none":
        if of_run:
            raise UserError(
                f"{run_folder}: resume_from_checkpoint is none, but a run has left checkpoints "
                f"here (the newest of step {of_run[-1][0]}); set another output_dir, or remove them"
            )
        return None
    if resume_from == "auto" or (of_run and not _is_within(Path(resume_from), run_folder)):
        return _find_newest(run_folder) if of_run else None
    path = Path(resume_from)
    if not path.is_dir():
        raise UserError(
            f"resume_from_checkpoint: {path}: no such folder; give a checkpoint's, a run's, or auto"
        )
    if not (path / MANIFEST).exists() and list_checkpoints(path):
        return _find_newest(path)
    if problems := find_damage(path):
        raise UserError(f"resume_from_checkpoint: {path}: does not verify: {'; '.join(problems)}")
    later = [step for step, _ in of_run if step > read_manifest(path).step]
    if later:
        raise UserError(
            f"resume_from_checkpoint: {path}: the run has continued from here to step {later[-1]}; "
            "set another output_dir, or remove the later checkpoints"
        )
    return path


def load_start(
    start: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> Progress:
    """Loads the checkpoint that `find_start` returned into model and optimizer.

    Returns its progress, or that of step 0 without one. All ranks call it. Raises `UserError` where
    the checkpoint was saved from a different model.
    """
    if start is None:
        return Progress()
    optimizer = unwrap_optimizer(optimizer)
    weights = get_model_state(model, optimizer)
    moments = get_optimizer_state(model, optimizer)
    with torch.no_grad():
        read_shards(weights, MODEL, start, world)
        read_shards(select_tensors(moments), OPTIMIZER, start, world, names_beside_text(model))
    set_model_state(model, weights)
    set_optimizer_state(model, optimizer, moments)
    progress = read_progress(start)
    if progress.scaler and world.accelerator.scaler is not None:
        world.accelerator.scaler.load_state_dict(progress.scaler)
    return progress


def read_progress(checkpoint: Path) -> Progress:
    """Reads the progress of the run from a verified `checkpoint`."""
    content = read_state(checkpoint)
    return Progress(
        **{field.name: content[field.name] for field in fields(Progress) if field.name in content}
    )


def compare_to_saved(
    state: Mapping[str, Any], recipe: Recipe, inputs: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Lists the differences between the run that saved `state` (state.json) and this one.

    Returns:
        (the changes that would make it another run, the harmless ones). Changes of held-out data
        make it another run where their loss chooses a checkpoint or ends the run.
    """
    deciding, other = compare_recipes(state["recipe"], to_dict(recipe))
    inputs_then = state.get("inputs", {}) | {"datasets": state.get("data_fingerprint")}
    changed = find_changed_inputs(inputs_then, inputs, deciding + other)
    held_out = [change for change in other if _name_of(change) == "eval_datasets"]
    other = [change for change in other if change not in held_out]
    for change in changed:
        name = _name_of(change)
        if name == "eval_datasets":
            held_out.append(change)
        elif name in ("metrics", "callbacks"):  # which do not change the training
            other.append(change)
        else:
            deciding.append(change)
    keys = recipe.checkpoint
    if keys.keep_best_checkpoint or recipe.run.early_stopping_patience is not None:
        return deciding + held_out, other
    return deciding, other + held_out


def compare_recipes(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lists the differences between two recipes with every key filled in, as `key: then -> now`.

    A key that `then` lacks had its default.

    Returns:
        (the changes that make it another run, by the schema's marks, the others).
    """
    deciding: list[str] = []
    other: list[str] = []
    for name, key in recipe_keys().items():
        was = _fill_in(name, then.get(name, _plain(key.default)))
        before = dict(leaves(was, name))
        after = dict(leaves(now[name], name))
        changes = deciding if key.same_on_resume else other
        for leaf in before | after:
            if before.get(leaf) != after.get(leaf):
                values = f"{_short(before.get(leaf))} -> {_short(after.get(leaf))}"
                changes.append(f"{leaf}: {values}")
    return deciding, other


def _find_and_compare(
    recipe: Recipe, run_folder: Path, ranks: int, inputs: Mapping[str, str]
) -> str | None:
    """Does `find_start` on rank 0."""
    checkpoint = find_checkpoint(recipe.checkpoint.resume_from_checkpoint, run_folder)
    if checkpoint is None:
        return None
    _compare(recipe, checkpoint, ranks, inputs)
    if _is_within(checkpoint, run_folder):
        for damaged in rename_damaged(run_folder, read_manifest(checkpoint).step):
            print(
                f"{damaged}: damaged, kept under this name until the run has saved that step again"
            )
    return str(checkpoint)


def _compare(recipe: Recipe, checkpoint: Path, ranks: int, inputs: Mapping[str, str]) -> None:
    """Prints what has changed since the checkpoint. Raises `UserError` for another run."""
    then = read_state(checkpoint)
    deciding, other = compare_to_saved(then, recipe, inputs)
    before = then["global_batch_size"]
    after = compute_global_batch_size(recipe.batch, ranks)
    if before != after:
        deciding.append(
            f"rows in a step: {before} -> {after} (global_batch_size keeps them the same on any "
            "number of ranks)"
        )
    if deciding and not recipe.checkpoint.allow_changed_recipe:
        raise UserError.of(
            [
                f"{checkpoint}: the recipe has changed since this checkpoint, so the resumed run "
                "would be a different one:",
                *(f"  {change}" for change in deciding),
                "set it back, set another output_dir, or set allow_changed_recipe: true",
            ]
        )
    for change in deciding + other:
        print(f"resuming with a changed recipe: {change}")


def _find_newest(run_folder: Path) -> Path:
    """Returns a run's newest checkpoint that verifies. Raises `UserError` where none does."""
    passed_over: list[str] = []
    newest = find_newest_valid(run_folder, passed_over.append)
    if newest is None:
        raise UserError.of(
            [
                (
                    f"{run_folder}: none of its checkpoints verifies; set another output_dir to "
                    "start over:"
                ),
                *passed_over,
            ]
        )
    for line in passed_over:
        print(line)
    return newest


def _is_within(path: Path, run_folder: Path) -> bool:
    return path.resolve().is_relative_to(run_folder.resolve())


def _fill_in(name: str, value: Any) -> Any:
    """Adds defaults to a value of `datasets` for keys that did not exist when it was written."""
    if name not in NESTED or not isinstance(value, list):
        return value
    defaults = {
        key.name: _plain(key.default)
        for key in keys_of(NESTED[name]).values()
        if not key.is_required
    }
    return [defaults | entry if isinstance(entry, dict) else entry for entry in value]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= 200:
        return text
    return f"{text[:100]} ... {text[-95:]}"  # paths differ at their ends
