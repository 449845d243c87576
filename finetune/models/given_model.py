"""A model that a script has in memory, where a recipe names one: it is written to a folder, which
the recipe then names.

The folder's name is made of the weights and the config, as those of `config.given` are of rows.
"""

import hashlib
import os
from typing import Any

import torch

from finetune.config.yaml_file import LOAD_RECIPE
from finetune.constants import Fields, Record
from finetune.errors import UserError
from finetune.files.durable import make_folder, stage_and_rename
from finetune.files.network import find_cache


def name_model(model: Any, keys: Fields) -> Record:
    """Returns keys of a recipe with the folder of `model`, written where it is not there yet, and
    the tokenizer of what it was loaded from.

    Raises:
        UserError: For what is no model of transformers, and where no tokenizer is known.
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
    folder = find_cache("given") / f"model-{_hash(model)[:16]}"
    if not folder.exists():
        make_folder(folder.parent)
        staging = folder.with_name(f".{folder.name}.{os.getpid()}")
        with stage_and_rename(folder, staging) as written:
            model.save_pretrained(written)
    named = {"model_name_or_path": str(folder), "tokenizer_name_or_path": str(tokenizer)}
    return {**keys, **named}


def _hash(model: Any) -> str:
    content = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        content.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        content.update(values.flatten().view(torch.uint8).numpy())
    return content.hexdigest()
