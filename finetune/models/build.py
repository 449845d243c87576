"""The model on the meta device, without weights, and the folder that has them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.hub import download_folder
from finetune.recipe.schema import Model


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
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # a loop over the experts of a mixture, exact on every device
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]


def weights_folder(model: Model) -> Path:
    """The local folder with the model's safetensors: a folder as it is, a hub name from the cache or the hub.

    Raises `UserError` where the hub is unreachable, or the model or the permission to read it is missing.
    """
    assert model.model_name_or_path is not None
    if Path(model.model_name_or_path).is_dir():
        return Path(model.model_name_or_path)
    # Beside the weights, what an export says of its base: the tokens that end an answer, and the license.
    patterns = ["*.safetensors", "*.safetensors.index.json", "generation_config.json", "README.md"]
    return download_folder(model.model_name_or_path, patterns, "its safetensors", model.model_revision)
