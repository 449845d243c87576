"""Where a recipe's config.json comes from: inline, a local folder, or one small file of the hub."""

import json
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.hub import download_file
from finetune.recipe.schema import Model


def find_config(model: Model) -> tuple[dict[str, Any], str]:
    """The model's configuration, and where it was found, to be named in errors.

    Raises `UserError` where there is none, in one sentence.
    """
    if model.model_config is not None:
        return model.model_config, "model_config"
    name = str(model.model_name_or_path)
    folder = Path(name)
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise UserError(f"{name}: no config.json; name a folder of a transformers model")
    elif folder.is_absolute() or name.startswith("."):
        raise UserError(f"{name}: no such folder; name one that holds config.json and safetensors, or a hub name")
    else:
        path = download_file(name, "config.json", model.model_revision)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: an object is expected; download it again")
    # A model of text and images keeps its language part in a section of its own.
    text = config.get("text_config")
    return ({**text} if isinstance(text, dict) else config), str(path)
