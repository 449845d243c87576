"""The dtype in which a model is exported, from the files that it was trained from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.constants import CONFIG_FILE, ITEMSIZE
from finetune.errors import UserError
from finetune.files.safetensors_header import read_json
from finetune.files.tensors import main_dtype, read_folder


def choose_dtype(given: str | None, base: Path | None, *others: torch.dtype | None) -> torch.dtype:
    """The dtype of an export: the one `given`, else that of the base model's files, else the first known of `others`.

    One that exports do not have (float64, float8) becomes bfloat16. Raises `UserError` for a config.json that is no JSON object.
    """
    if given is not None:
        return getattr(torch, given)  # type: ignore[no-any-return]
    found = next((dtype for dtype in (_base_dtype(base), *others) if dtype is not None), torch.float32)
    return found if str(found).removeprefix("torch.") in ITEMSIZE else torch.bfloat16


def config_dtype(config_json: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config.json states for its weights (`torch_dtype` before transformers 4.56), if any."""
    name = config_json.get("dtype") or config_json.get("torch_dtype")
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _base_dtype(base: Path | None) -> torch.dtype | None:
    """The dtype of most of the base's weights; by its config where they are not on this machine."""
    if base is None:
        return None
    try:
        return main_dtype(read_folder(base).values())
    except UserError:
        path = base / CONFIG_FILE
        return config_dtype(read_json(path, path.read_bytes())) if path.exists() else None
