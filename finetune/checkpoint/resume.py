"""Resumes from a checkpoint, in any layout and on any number of ranks, if the inputs are the same.

The same recipe over other files would be a different run. A checkpoint's state.json therefore has
hashes of the inputs (data, tokenizer, base, user's code). A resumed run compares them all; an
export compares the hash of a LoRA adapter's base.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.folders import list_checkpoints, rename_damaged
from finetune.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Progress,
    find_checkpoint_of,
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
from finetune.checkpoint.verify_shares import find_damage_together
from finetune.config.keys import keys_of, leaves
from finetune.config.optimization import OPTIMIZERS
from finetune.config.pretrained import find_adapter
from finetune.config.reader import to_dict
from finetune.config.reward_names import SHIPPED_REWARDS
from finetune.config.schema import NESTED, Model, Recipe, compute_global_batch_size, recipe_keys
from finetune.config.user_code import file_of
from finetune.constants import CONFIG_FILE, Names
from finetune.data.prepare import PreparedData
from finetune.data.sources import hash_file
from finetune.distributed.world import RankGroup, World
from finetune.errors import AgreedError, UserError
from finetune.files import durable
from finetune.files.json_files import load_json, read_json_object
from finetune.files.network import find_local_folder
from finetune.files.tensors import hash_weights
from finetune.models.carried import hash_tensors
from finetune.models.load import read_carried, weights_folder

# keys of a config.json that do not affect a run
BOOKKEEPING = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}

# the recipe's keys that choose an input
OF_MODEL = ("model_name_or_path", "model_revision")
OF_TOKENIZER = ("tokenizer_name_or_path", *OF_MODEL, "added_tokens", "special_tokens", "eot_tokens")
OF_TEACHER = ("teacher_model_name_or_path", "teacher_model_revision")
STARTED = "the same name is given, but its weights, from which the training started, have changed"
# input -> (the recipe's keys that choose it, the sentence if it changed though these keys did not)
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
    """Returns the hash of each input in `INPUTS` that the run has, on every rank.

    All ranks call it; rank 0 reads the inputs. It reads every byte of a base under LoRA, of a base
    that is the reference, of a teacher and of reward models. Of any other base it reads only the
    tensors that an export carries over.
    """
    ranks = RankGroup(world)
    ranks.on_all(lambda: _download_models(recipe))  # on every node
    hashes: dict[str, str] = ranks.on_main(lambda: _read_fingerprints(recipe, tokenizer, data))
    return hashes


def _download_models(recipe: Recipe) -> None:
    """Downloads the recipe's models from the hub, unless they are on this machine."""
    for _, model in _list_models(recipe):
        weights_folder(model)


def _list_models(recipe: Recipe) -> list[tuple[str, Model]]:
    """Lists (key, model) of each model that the recipe names: trained, teacher, rewards."""
    models = [("model_name_or_path", recipe.model), (recipe.teacher_key, recipe.teacher)]
    models += [("rewards", Model(model_name_or_path=name)) for name in recipe.rollout.reward_models]
    return [
        (key, model)
        for key, model in models
        if model is not None and model.model_name_or_path is not None
    ]


def _is_base_read(recipe: Recipe) -> bool:
    """Returns whether a run depends on the base's weights besides starting from them.

    They are frozen under LoRA, or serve as the reference.
    """
    if recipe.lora.use_peft or recipe.method_facts.needs_reference:
        return True
    return recipe.method_facts.samples and recipe.method.beta > 0


def find_changed_inputs(
    then: Mapping[str, str | None], now: Mapping[str, str], changed_keys: list[str]
) -> list[str]:
    """Returns a sentence for each input whose content has changed under unchanged keys.

    An input is left out if one of the runs has no hash of it: another version wrote the hashes, or
    a hub's data set is streamed.

    Args:
        then: Input -> hash, of the run that saved the checkpoint.
        now: Input -> hash, of this run.
        changed_keys: The changes of the recipe, as `compare_recipes` writes them.
    """
    changed_names = {find_key(change) for change in changed_keys}
    sentences = []
    for name, (keys, sentence) in INPUTS.items():
        is_known = None not in (then.get(name), now.get(name))
        has_changed = is_known and then[name] != now[name]
        if has_changed and changed_names.isdisjoint(keys):
            sentences.append(sentence)
    return sentences


def find_key(change: str) -> str:
    """Returns the recipe's key in a sentence about a change.

    >>> find_key("datasets[0].path: 'a' -> 'b'")
    'datasets'
    """
    key, *_ = re.split(r"\W", change, maxsplit=1)
    return key


def refuse_damaged_model(recipe: Recipe, world: World) -> None:
    """Raises `UserError` if a model that the recipe names is a damaged checkpoint of a run.

    This is needed because loading does not compare checksums. All ranks call it.
    """
    names = [(key, str(model.model_name_or_path)) for key, model in _list_models(recipe)]
    checkpoints = RankGroup(world).on_main(
        lambda: [str(find_checkpoint_of(Path(name)) or "") for _, name in names]
    )
    for (key, name), checkpoint in zip(names, checkpoints, strict=True):
        if checkpoint and (problems := find_damage_together(Path(checkpoint), world, [MODEL])):
            raise AgreedError(
                f"{key}: {name}: damaged: {'; '.join(problems)}; name another checkpoint"
            )


def _read_fingerprints(recipe: Recipe, tokenizer: Any, data: PreparedData | None) -> dict[str, str]:
    """Does the work of `fingerprint_inputs` on rank 0: input -> hash.

    Raises `UserError` if the run continues an adapter that was trained on another base.
    """
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
    """Returns the hashes of the training data and of the files of `eval_datasets`.

    Data without a fingerprint, such as a hub's streamed data set, is left out.
    """
    if data is None:
        return {}
    hashes = {"datasets": data.train.fingerprint}
    if data.evaluation and recipe.data.eval_datasets:
        hashes["held_out"] = data.evaluation.fingerprint
    return {name: fingerprint for name, fingerprint in hashes.items() if fingerprint is not None}


def _hash_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Returns the hashes of the chat template and of the tokenizer.

    The tokenizer's settings for truncation and padding are not hashed.
    """
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    for key in ("truncation", "padding"):
        tokenizer_json.pop(key, None)
    return {
        "chat_template": durable.hash_json(tokenizer.chat_template),
        "tokenizer": durable.hash_json([tokenizer_json, tokenizer.special_tokens_map]),
    }


def _hash_code(recipe: Recipe) -> dict[str, str]:
    """Returns the hashes of the user's Python files that the recipe names, by recipe key."""
    names_by_key = {
        "metrics": recipe.run.metrics,
        "callbacks": recipe.run.callbacks,
        "rewards": recipe.rollout.reward_files,
        "tools": [name for name in recipe.rollout.tools if name not in SHIPPED_REWARDS],
        "environment": recipe.rollout.environment_files,
    }
    hashes = {}
    for key, names in names_by_key.items():
        if names:
            hashes[key] = durable.hash_json([hash_file(str(file_of(name))) for name in names])
    return hashes


def _hash_base(folder: Path, recipe: Recipe) -> dict[str, str]:
    """Returns the hashes of a base's config, and of those of its weights that training keeps.

    They are all weights if `_is_base_read`; else the tensors that an export carries over, if any.
    """
    hashes = {"config": _hash_config(folder)}
    if _is_base_read(recipe):
        return hashes | {"base": hash_weights(folder)}
    carried = read_carried(recipe.model)
    if carried:
        return hashes | {"carried": hash_tensors(carried)}
    return hashes


def _refuse_other_base(adapter: Path, base: str | None, recipe: Recipe) -> None:
    """Raises `UserError` if the run that made `adapter` had another base.

    If the base of that run is not known, nothing is checked: no state.json lies beside the adapter.

    Args:
        adapter: The adapter's folder: in a checkpoint of a run, or an export in a run's folder.
        base: The hash of this run's base; None if it is not known.
        recipe: The recipe, for the message.
    """
    states = [adapter.parent / STATE, *sorted(adapter.parent.glob(f"checkpoints/*/{STATE}"))]
    adapter_bases = set()  # hashes
    for state in states:
        inputs = read_json_object(state).get("inputs")
        if isinstance(inputs, dict) and isinstance(inputs.get("base"), str):
            adapter_bases.add(inputs["base"])
    is_known = base is not None and bool(adapter_bases)
    if is_known and base not in adapter_bases:
        raise UserError(
            f"{recipe.place_of('adapter_name_or_path')}: adapter_name_or_path: {adapter} was "
            f"trained on other weights than those of {recipe.model.model_name_or_path}; name its "
            "own base in model_name_or_path"
        )


def _find_folder(model: Model | None) -> Path | None:
    """Returns a model's folder on this machine; None without a model, or if it is not here."""
    if model is None or model.model_name_or_path is None:
        return None
    return find_local_folder(model.model_name_or_path, model.model_revision)


def _hash_config(folder: Path) -> str:
    """Returns the hash of a model's config.json, without the keys that do not affect a run."""
    config = load_json(folder / CONFIG_FILE)
    return durable.hash_json(
        {key: value for key, value in config.items() if key not in BOOKKEEPING}
    )


def find_resume_checkpoint(
    recipe: Recipe, run_folder: Path, world: World, inputs: Mapping[str, str] | None = None
) -> Path | None:
    """Returns the verified checkpoint from which the run resumes; None to start at step 0.

    The recipe's `resume_from_checkpoint` chooses it. All ranks call this.

    Args:
        recipe: The recipe.
        run_folder: The run's folder.
        world: The ranks.
        inputs: What `fingerprint_inputs` returned.

    Raises:
        UserError: If the checkpoint cannot be used, or if the recipe or its inputs have changed in
            a way that makes this another run.
    """
    checkpoint = find_checkpoint(recipe.checkpoint.resume_from_checkpoint, run_folder, world)
    if checkpoint is not None:
        ranks = world.data_parallel.size
        RankGroup(world).on_main(
            lambda: _check_start(checkpoint, recipe, run_folder, ranks, inputs or {})
        )
    return checkpoint


def find_checkpoint(resume_from: str, run_folder: Path, world: World) -> Path | None:
    """Finds and verifies the checkpoint from which a run resumes; None to start at step 0.

    All ranks call it.

    Args:
        resume_from: auto, none, or the path of a checkpoint or a run.
        run_folder: The run's folder.
        world: The ranks, which verify together.

    Raises:
        UserError: If the checkpoint does not exist or is damaged, or if the run has continued from
            it and has later checkpoints.
    """
    ranks = RankGroup(world)
    candidates = ranks.on_main(lambda: [str(path) for path in list_starts(resume_from, run_folder)])
    passed_over: list[str] = []  # a sentence for each damaged checkpoint
    for candidate in map(Path, reversed(candidates)):
        problems = find_damage_together(candidate, world)
        if not problems:
            for line in passed_over if world.is_main else ():
                print(line)
            return candidate
        if candidate == Path(resume_from):
            raise AgreedError(
                f"resume_from_checkpoint: {candidate}: does not verify: {'; '.join(problems)}; "
                "give another checkpoint, or the run's folder, whose newest one that verifies is "
                "taken"
            )
        passed_over.append(f"{candidate}: passed over: {'; '.join(problems)}")
    if passed_over:
        raise AgreedError.of(
            [
                f"{Path(candidates[0]).parent.parent}: none of its checkpoints verifies; set "
                "another output_dir to start over:",
                *passed_over,
            ]
        )
    return None


def list_starts(resume_from: str, run_folder: Path) -> list[Path]:
    """Lists the checkpoints from which a run may resume, in order of step. They are not verified.

    Args:
        resume_from: auto, none, or the path of a checkpoint or a run. A path outside `run_folder`
            is used only until the run has checkpoints of its own, so that the same command can
            start a run and resume it.
        run_folder: The run's folder.

    Raises:
        UserError: If the path has no checkpoint, or if it is none and the run has checkpoints.
    """
    own_checkpoints = list_checkpoints(run_folder)
    if resume_from == "none" and own_checkpoints:
        newest_step, _ = own_checkpoints[-1]
        raise UserError(
            f"{run_folder}: resume_from_checkpoint is none, but a run has left checkpoints "
            f"here (the newest of step {newest_step}); set another output_dir, or remove them"
        )
    path = Path(resume_from)
    is_elsewhere = bool(own_checkpoints) and not _is_within(path, run_folder)
    if resume_from in ("auto", "none") or is_elsewhere:
        return [checkpoint for _, checkpoint in own_checkpoints]
    if not path.is_dir():
        raise UserError(
            f"resume_from_checkpoint: {path}: no such folder; give a checkpoint's, a run's, or auto"
        )
    if (path / MANIFEST).exists():
        return [path]
    checkpoints = [checkpoint for _, checkpoint in list_checkpoints(path)]
    if not checkpoints:
        raise UserError(
            f"resume_from_checkpoint: {path}: neither a checkpoint nor a run that has one, as "
            f"there is no {MANIFEST}; give a run's folder checkpoints/step-..., or name a model's "
            "folder in model_name_or_path, to start from its weights"
        )
    return checkpoints


def load_checkpoint(
    start: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> Progress:
    """Loads a checkpoint into model, optimizer and gradient scaler.

    Returns the checkpoint's progress; without a checkpoint that of step 0. All ranks call it.
    Raises `UserError` if the checkpoint was saved from a different model or optimizer.
    """
    if start is None:
        return Progress()
    optimizer = unwrap_optimizer(optimizer)
    model_state = get_model_state(model, optimizer)
    optimizer_state = get_optimizer_state(model, optimizer)
    optimizer_tensors = select_tensors(optimizer_state)
    with torch.no_grad():
        read_shards(model_state, MODEL, start, world)
        read_shards(optimizer_tensors, OPTIMIZER, start, world, names_beside_text(model))
    set_model_state(model, model_state)
    del model_state  # FSDP1's copies make room for those of the optimizer's state
    set_optimizer_state(model, optimizer, optimizer_state)
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


def refuse_other_rows(progress: Progress, recipe: Recipe, steps_per_epoch: int | None) -> None:
    """Raises `UserError` if a resumed run would train on other rows of the same files.

    Another version of this package may leave out other rows, so that an epoch has other steps. The
    recipe's `allow_changed_recipe` allows it.

    Args:
        progress: Of the checkpoint.
        recipe: Of the resumed run.
        steps_per_epoch: Steps of an epoch of its rows; None: a stream, which has no epochs.
    """
    if steps_per_epoch is None or recipe.checkpoint.allow_changed_recipe:
        return
    epoch = progress.step / steps_per_epoch
    if not math.isclose(epoch, progress.epoch, rel_tol=1e-6):
        raise UserError(
            f"{recipe.folder}: its {progress.step} steps were {progress.epoch:g} epochs, and are "
            f"{epoch:g} of the rows that this version selects from the same files, so the resumed "
            "run would be a different one; continue with the version that began it, set another "
            "output_dir, or set allow_changed_recipe: true"
        )


def compare_to_saved(
    state: Mapping[str, Any], recipe: Recipe, inputs: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Lists what has changed between the run that saved `state` and this run.

    Args:
        state: The content of the checkpoint's state.json.
        recipe: This run's recipe.
        inputs: What `fingerprint_inputs` returned for this run.

    Returns:
        (changes that make this another run, harmless changes), as sentences. A change of held-out
        data is harmless unless the held-out loss chooses a checkpoint or ends the run.
    """
    folder = Path(recipe.path).resolve().parent
    deciding, other = compare_recipes(state["recipe"], to_dict(recipe), folder)
    inputs_then = state.get("inputs", {}) | {"datasets": state.get("data_fingerprint")}
    changed_inputs = find_changed_inputs(inputs_then, inputs, deciding + other)
    held_out = [change for change in other if find_key(change) == "eval_datasets"]
    harmless = [change for change in other if change not in held_out]
    for change in changed_inputs:
        key = find_key(change)
        if key == "eval_datasets":
            held_out.append(change)
        elif key in ("metrics", "callbacks"):  # they do not affect the training
            harmless.append(change)
        else:
            deciding.append(change)
    stops_early = recipe.run.early_stopping_patience is not None
    if recipe.checkpoint.keep_best_checkpoint or stops_early:
        return deciding + held_out, harmless
    return deciding, harmless + held_out


def compare_recipes(
    then: dict[str, Any], now: dict[str, Any], folder: Path
) -> tuple[list[str], list[str]]:
    """Lists the differences between two recipes with every key filled in, as `key: then -> now`.

    A key that `then` lacks did not exist when it was written, and counts as the key's default. One
    that `then` alone has is a key no longer, and is no difference. A path from `folder`, the
    recipe's, is no difference from the same path in full: which of the two a recipe holds depends
    on the working directory.

    Returns:
        (changes that make this another run, other changes); the schema marks the keys.
    """
    deciding: list[str] = []
    other: list[str] = []
    for name, key in recipe_keys().items():
        value_then = _add_new_defaults(name, then.get(name, _to_list(key.default)))
        before = dict(leaves(value_then, name))
        after = dict(leaves(now[name], name))
        changes = other if key.may_change else deciding
        names_files = key.is_file_or_name or key.is_python_name or name in NESTED
        start = folder if names_files else None
        leaf_names = before | after
        if len(leaf_names) > 1:
            leaf_names.pop(name, None)  # an empty list or mapping, which the other leaves replace
        for leaf in leaf_names:
            if _complete(before.get(leaf), start) != _complete(after.get(leaf), start):
                values = f"{_shorten(before.get(leaf))} -> {_shorten(after.get(leaf))}"
                changes.append(f"{leaf}: {values}")
    return deciding, other


def _complete(value: Any, folder: Path | None) -> Any:
    """Puts `folder` before the relative paths in a value; None leaves it as it is.

    >>> _complete(["r.py:f", "/other/r.py:f"], Path("/exp"))
    ['/exp/r.py:f', '/other/r.py:f']
    """
    if isinstance(value, list):
        return [_complete(item, folder) for item in value]
    if folder is None or not isinstance(value, str):
        return value
    return str(folder / value)


def _check_start(
    checkpoint: Path, recipe: Recipe, run_folder: Path, ranks: int, inputs: Mapping[str, str]
) -> None:
    """Compares the recipe and its inputs with those of `checkpoint`, from which the run resumes.

    Renames the damaged checkpoints after it, if it is in `run_folder`. Raises `UserError` if this
    is another run, or if the recipe names an older checkpoint than the run's newest.

    `ranks`: the number of shares into which a step's rows are divided.
    """
    step = read_manifest(checkpoint).step
    later = [saved_step for saved_step, _ in list_checkpoints(run_folder) if saved_step > step]
    if later and checkpoint == Path(recipe.checkpoint.resume_from_checkpoint):
        raise UserError(
            f"resume_from_checkpoint: {checkpoint}: the run has continued from here to step "
            f"{later[-1]}; set another output_dir, or remove the later checkpoints"
        )
    _refuse_another_run(recipe, checkpoint, ranks, inputs)
    if _is_within(checkpoint, run_folder):
        until = " until the run has saved that step again"
        if recipe.checkpoint.save_total_limit is None:
            until = ""  # all checkpoints are kept
        for damaged in rename_damaged(run_folder, step):
            print(f"{damaged}: damaged, kept under this name{until}")


def _refuse_another_run(
    recipe: Recipe, checkpoint: Path, ranks: int, inputs: Mapping[str, str]
) -> None:
    """Raises `UserError` if changes since the checkpoint make this another run; else prints them.

    With the recipe's `allow_changed_recipe`, all changes are only printed, except one to an
    optimizer that cannot read the checkpoint's state.
    """
    state = read_state(checkpoint)
    _refuse_other_optimizer(checkpoint, state["recipe"].get("optim"), recipe.optimization.optim)
    deciding, harmless = compare_to_saved(state, recipe, inputs)
    rows_then = state["global_batch_size"]
    rows_now = compute_global_batch_size(recipe.batch, ranks)
    if rows_then != rows_now:
        deciding.append(
            f"rows in a step: {rows_then} -> {rows_now} (global_batch_size keeps them the same on "
            "any number of ranks)"
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
    for change in deciding + harmless:
        print(f"resuming with a changed recipe: {change}")


def _refuse_other_optimizer(checkpoint: Path, then: str | None, now: str) -> None:
    """Raises `UserError` if the optimizer `now` cannot read the state that `then` has saved.

    An optimizer that is not known here, such as one of another version, is not compared.
    """
    saved = OPTIMIZERS.get(str(then))
    if saved is not None and saved.saved_state != OPTIMIZERS[now].saved_state:
        raise UserError(
            f"{checkpoint}: optim: {then} -> {now}: {now} cannot read the state that {then} has "
            "saved; set it back, or set another output_dir to start from this checkpoint's weights"
        )


def _is_within(path: Path, run_folder: Path) -> bool:
    """Returns whether `path` is `run_folder`, or in it, after links are resolved."""
    return path.resolve().is_relative_to(run_folder.resolve())


def _add_new_defaults(name: str, value: Any) -> Any:
    """Adds the defaults of keys that did not exist when an earlier version wrote `value`.

    Changes only keys that hold a list of sections, such as `datasets`.
    """
    if name not in NESTED or not isinstance(value, list):
        return value
    defaults = {
        key.name: _to_list(key.default)
        for key in keys_of(NESTED[name]).values()
        if not key.is_required
    }
    return [defaults | entry if isinstance(entry, dict) else entry for entry in value]


def _to_list(value: Any) -> Any:
    """Returns a tuple as a list, as JSON has it; any other value unchanged."""
    return list(value) if isinstance(value, tuple) else value


def _shorten(value: Any) -> str:
    """Returns `value` as JSON, with the middle of a long text left out."""
    text = json.dumps(value)
    if len(text) <= 200:
        return text
    return f"{text[:100]} ... {text[-95:]}"  # the end stays, since paths differ there
