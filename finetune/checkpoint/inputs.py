"""Fingerprints of what a run reads beside its recipe: the same recipe over other files would be a different run.

They are kept in state.json. A resumed run compares them, and an export compares that of the LoRA base.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from finetune.checkpoint.manifest import MODEL, STATE, find_checkpoint_of, find_problems
from finetune.config.pretrained_adapter import find_adapter
from finetune.config.rollouts import SHIPPED_REWARDS
from finetune.config.schema import Model, Recipe
from finetune.config.user_code import file_of
from finetune.constants import CONFIG_FILE
from finetune.data.prepare import PreparedData
from finetune.data.sources import hash_file
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.hub import find_local_folder
from finetune.files.run_json import load_json, read_json_object
from finetune.files.tensors import read_folder
from finetune.models.load import weights_folder

BOOKKEEPING = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}  # without effect on a run

OF_MODEL = ("model_name_or_path", "model_revision")
OF_TOKENIZER = ("tokenizer_name_or_path", *OF_MODEL, "added_tokens", "special_tokens", "eot_tokens")
OF_TEACHER = ("teacher_model_name_or_path", "teacher_model_revision")
STARTED = "the same name is given, but its weights, from which the training started, have changed"
# name -> (the recipe's keys that name it, what has changed where its content has, and those keys have not)
INPUTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "datasets": (("datasets", "streaming"), "datasets: the same files are named, but their content has changed"),
    "held_out": (("eval_datasets",), "eval_datasets: the same files are named, but their content has changed"),
    "chat_template": (
        ("chat_template", "tokenizer_name_or_path", "model_name_or_path"),
        "chat_template: the same name is given, but its text has changed",
    ),
    "tokenizer": (
        OF_TOKENIZER,
        "tokenizer: the same name is given, but its vocabulary, merges or special tokens have changed",
    ),
    "config": (OF_MODEL, "model_name_or_path: the same name is given, but its config.json has changed"),
    "base": (OF_MODEL, f"model_name_or_path: {STARTED}"),
    "adapter": (("adapter_name_or_path",), f"adapter_name_or_path: {STARTED}"),
    "metrics": (("metrics",), "metrics: the same functions are named, but their files have changed"),
    "rewards": (("rewards",), "rewards: the same functions are named, but their files have changed"),
    "callbacks": (("callbacks",), "callbacks: the same classes are named, but their files have changed"),
    "teacher": (OF_TEACHER, f"{OF_TEACHER[0]}: the same name is given, but its config.json or weights have changed"),
}


def fingerprint_inputs(recipe: Recipe, tokenizer: Any, data: PreparedData | None, world: World) -> dict[str, str]:
    """A hash of each of `INPUTS` that the run has, on every rank; rank 0 reads them.

    For LoRA, and where the base is the reference, every byte of its weights is read, and of a teacher's; those of a
    full model are in its checkpoint.
    """
    for model in (recipe.model if _is_base_read(recipe) else None, recipe.teacher):
        if model is not None and model.model_name_or_path is not None:
            weights_folder(model)  # a hub's are downloaded first, on every node
    found: dict[str, str] = RankGroup(world).on_main(lambda: _read_fingerprints(recipe, tokenizer, data))
    return found


def _is_base_read(recipe: Recipe) -> bool:
    is_reference = recipe.method_facts.needs_reference or (recipe.method_facts.samples and recipe.method.beta > 0)
    return recipe.lora.use_peft or is_reference


def find_changed_inputs(then: Mapping[str, str | None], now: Mapping[str, str], changed_keys: list[str]) -> list[str]:
    """A sentence for each input that differs, but for those that a key of `changed_keys` (`key: then -> now`) explains.

    What either does not know (another version wrote it, or a hub's data set is streamed) is not compared.
    """
    return [
        sentence
        for name, (keys, sentence) in INPUTS.items()
        if None not in (then.get(name), now.get(name))
        and then[name] != now[name]
        and not any(change.startswith(keys) for change in changed_keys)
    ]


def refuse_damaged_model(recipe: Recipe) -> None:
    """Raises `UserError` where the model or its teacher is a checkpoint of a run that does not verify: the weights are
    read once here, since no checksum is compared while a model is loaded."""
    named = {"model_name_or_path": recipe.model, "teacher_model_name_or_path": recipe.teacher}
    for key, model in named.items():
        name = None if model is None else model.model_name_or_path
        checkpoint = find_checkpoint_of(Path(name)) if name is not None else None
        if checkpoint is not None and (problems := find_problems(checkpoint, parts=[MODEL])):
            raise UserError(f"{key}: {name}: damaged: {'; '.join(problems)}; name another checkpoint")


def hash_base(base: Path) -> str:
    """A hash of all bytes of the weights in the folder `base`, at the speed of its disk."""
    paths = sorted({part.path for tensor in read_folder(base).values() for part in tensor.parts})
    with ThreadPoolExecutor(max_workers=4) as pool:
        return _hash([[path.name, entry] for path, entry in zip(paths, pool.map(durable.checksum, paths), strict=True)])


def _read_fingerprints(recipe: Recipe, tokenizer: Any, data: PreparedData | None) -> dict[str, str]:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    found: dict[str, str | None] = {
        "datasets": data.train.fingerprint if data else None,
        "held_out": data.evaluation.fingerprint if data and data.evaluation and recipe.data.eval_datasets else None,
        "chat_template": _hash(tokenizer.chat_template),
        "tokenizer": _hash([vocabulary, tokenizer.special_tokens_map]),
    }
    for key in ("metrics", "callbacks"):
        named = getattr(recipe.run, key)
        found[key] = _hash([hash_file(str(file_of(name))) for name in named]) if named else None
    files = [str(file_of(name)) for name in recipe.rollout.rewards if name not in SHIPPED_REWARDS]
    found["rewards"] = _hash(list(map(hash_file, files))) if files else None
    base, teacher = _find_folder(recipe.model), _find_folder(recipe.teacher)
    if base is not None:
        found["config"] = _hash_config(base)
        if _is_base_read(recipe):
            found["base"] = hash_base(base)
    if recipe.lora.adapter_name_or_path is not None:
        found["adapter"] = hash_base(find_adapter(recipe.lora.adapter_name_or_path))
    if teacher is not None and recipe.method_facts.needs_teacher:
        found["teacher"] = _hash([_hash_config(teacher), hash_base(teacher)])
    if recipe.lora.adapter_name_or_path is not None:
        _refuse_other_base(find_adapter(recipe.lora.adapter_name_or_path), found.get("base"), recipe)
    return {name: text for name, text in found.items() if text is not None}


def _refuse_other_base(adapter: Path, base: str | None, recipe: Recipe) -> None:
    """Raises `UserError` if the run that made `adapter` had a base with other weights than the hash `base`."""
    states = [adapter.parent / STATE, *sorted(adapter.parent.glob(f"checkpoints/*/{STATE}"))]
    inputs = (read_json_object(state).get("inputs") for state in states)
    trained_on = {each["base"] for each in inputs if isinstance(each, dict) and isinstance(each.get("base"), str)}
    if base is not None and trained_on and base not in trained_on:
        raise UserError(
            f"{recipe.place_of('adapter_name_or_path')}: adapter_name_or_path: {adapter} was trained on other weights "
            f"than those of {recipe.model.model_name_or_path}; name its own base in model_name_or_path"
        )


def _find_folder(model: Model | None) -> Path | None:
    """A model's folder on this machine; None where there is no such model, or it is inline."""
    name = None if model is None else model.model_name_or_path
    return None if model is None or name is None else find_local_folder(name, model.model_revision)


def _hash_config(folder: Path) -> str:
    config = load_json(folder / CONFIG_FILE)
    return _hash({key: value for key, value in config.items() if key not in BOOKKEEPING})


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())
