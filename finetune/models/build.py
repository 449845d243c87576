"""The architecture: a transformers model on the meta device, with not a byte of weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError
from finetune.hub import download_file, hub_error
from finetune.recipe.schema import Model


def load_config(model: Model) -> Any:
    """The transformers config of the recipe's model (hub name, folder, or inline architecture).

    Raises `UserError` in one sentence where it cannot be had.
    """
    from transformers import AutoConfig

    if model.model_config is not None:
        try:
            config = AutoConfig.for_model(**model.model_config)
        except Exception as error:  # each family checks its config in its own way
            raise UserError(f"model_config: {_one_line(error)}") from None
    else:
        assert model.model_name_or_path is not None  # the reader saw to it
        config = _pretrained_config(model.model_name_or_path, model)
    if model.attention_dropout is not None:
        config.attention_dropout = model.attention_dropout
    config.use_cache = False
    return getattr(config, "text_config", None) or config


def build_on_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """`...ForCausalLM` of `config` with parameters on meta; buffers (rotary frequencies) are real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        # eager, since every family has it (Gemma 2 refuses sdpa); attention.py then installs the one that is used.
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    model.config.architectures = model.config.architectures or [
        type(model).__name__
    ]  # an inline model_config names none
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]


def weights_folder(model: Model) -> Path:
    """The local folder with the model's safetensors: a folder as it is, a hub name from the cache or the hub.

    Raises `UserError` where the hub, the model or the right to it is missing.
    """
    assert model.model_name_or_path is not None
    if Path(model.model_name_or_path).is_dir():
        return Path(model.model_name_or_path)
    from huggingface_hub import snapshot_download

    try:
        # Beside the weights, what an export says of its base: the tokens that end an answer, and the license.
        patterns = ["*.safetensors", "*.safetensors.index.json", "generation_config.json", "README.md"]
        return Path(snapshot_download(model.model_name_or_path, revision=model.model_revision, allow_patterns=patterns))
    except Exception as error:
        raise hub_error(model.model_name_or_path, error, "its safetensors", model.model_revision) from None


def _pretrained_config(name: str, model: Model) -> Any:
    from transformers import AutoConfig

    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name}: holds an adapter, not a model; merge the two with `finetune export`, or name the adapter's base model"
        )
    if (folder / "checkpoints").is_dir():
        raise UserError(f"{name}: is a run's folder; name its export/, or one of its checkpoints/")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{name}: has no config.json; give a folder with config.json and *.safetensors, or a hub name")
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{name}: is a file; model_name_or_path takes a folder with config.json and *.safetensors, or a hub name"
        )
    if not folder.is_dir():
        download_file(
            name, "config.json", model.model_revision
        )  # says why where it is out of reach; transformers guesses
    try:
        return AutoConfig.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise UserError(f"{name}: config.json: {_one_line(error)}; name another model") from None


def _one_line(error: Exception) -> str:
    """A validation error of transformers has its cause in its second line."""
    return " ".join(str(error).split()) or type(error).__name__
