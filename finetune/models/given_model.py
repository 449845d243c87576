"""A transformers model in a script's memory as the model of a recipe.

The model is written to a folder, and the recipe then names the folder. The folder's name is a hash
of the weights and the configs; `config.given` does the same for rows.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from finetune.config.yaml_file import LOAD_RECIPE
from finetune.errors import UserError
from finetune.files.durable import make_folder, stage_and_rename
from finetune.files.network import find_cache


def name_model(model: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recipe's `keys` with the names of the folder of `model` and of its tokenizer.

    Writes the folder if it does not exist yet. Without tokenizer_name_or_path among the keys, the
    tokenizer is that of the folder or repository that the model was loaded from.

    Raises:
        UserError: `model` is no transformers model or holds adapters, `keys` name another model, or
            no tokenizer is known.
    """
    place = f"{LOAD_RECIPE}: model"
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise UserError(
            f"{place}: {type(model).__name__} cannot be written as a folder; give a model of "
            "transformers, or name a folder by model_name_or_path"
        )
    if hasattr(model, "peft_config"):
        raise UserError(
            f"{place}: {type(model).__name__} holds adapters; save them with save_pretrained and "
            "name their folder by adapter_name_or_path, or give merge_and_unload()"
        )
    if keys.get("model_name_or_path") is not None:
        raise UserError(f"{place}: model_name_or_path names another; leave one of them out")
    tokenizer = keys.get("tokenizer_name_or_path") or model.config._name_or_path
    if not tokenizer:
        raise UserError(
            f"{place}: was loaded from no folder that has a tokenizer; give tokenizer_name_or_path"
        )
    folder = find_cache("given") / f"model-{_hash_model(model)[:16]}"
    if not folder.exists():
        make_folder(folder.parent)
        staging = folder.with_name(f".{folder.name}.{os.getpid()}")
        with stage_and_rename(folder, staging):
            model.save_pretrained(staging)
    folder_keys = {"model_name_or_path": str(folder), "tokenizer_name_or_path": str(tokenizer)}
    return {**keys, **folder_keys}


def _hash_model(model: Any) -> str:
    """Hashes the configs and every tensor (name, dtype, shape, bytes) to hexadecimal digits."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    if model.can_generate():
        digest.update(model.generation_config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
