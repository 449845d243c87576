"""What the exported model consists of: the architecture that config.json describes, built on the meta device."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.constants import CONFIG_FILE
from finetune.errors import UserError
from finetune.files.run_json import load_json
from finetune.models.load import build_on_meta
from finetune.models.weights import Box, boxes_of_files
from finetune.pretrained_config import text_config_of

SECTIONS = ("text_config", "vision_config")  # of a vision-language model's config.json
LAYERS_LIMIT = 10_000  # a config that claims more would be built for hours


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The tensors of a causal language model, as it holds them and as its files do. Returned by `describe_target`."""

    config_json: dict[str, Any]  # the file's content
    model: nn.Module  # on meta; its buffers (rotary frequencies) are real
    shapes: dict[str, tuple[int, ...]]  # of parameters and saved buffers, in the model's order
    tied: dict[str, str]  # name that is not stored -> name of the tensor with its values
    float32: frozenset[str]  # names that transformers keeps in float32 whatever the model's dtype
    files: dict[str, Box]  # the tensors of the model's files, each as parts of those in `shapes`; most are one of them

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    def written_dtype(self, name: str, stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
        """The dtype in which `name`, stored as `stored`, is written to a model of dtype `wanted`."""
        if not stored.is_floating_point:
            return stored
        return torch.float32 if name in self.float32 else wanted

    def written_config(self, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
        """The content of config.json, with the dtype and the class of what is written."""
        config = copy.deepcopy(self.config_json) | {"architectures": [self.class_name]}
        config["dtype"] = name = str(dtype).removeprefix("torch.")
        for part in (config, *(config[key] for key in SECTIONS if isinstance(config.get(key), dict))):
            part |= {key: name for key in ("dtype", "torch_dtype") if key in part}
            if part.get("use_cache") is False:
                part["use_cache"] = True  # training turned it off; generation needs it
        if not trust_remote_code:
            config.pop("auto_map", None)  # the code that it names is not in the folder, and transformers has the class
        return config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`. Raises `UserError` where it is missing or not a JSON object."""
    path = folder / CONFIG_FILE
    if not path.exists():
        raise UserError(f"{path}: missing; name the model that was trained with --base-model")
    return load_json(path)


def import_transformers() -> None:
    """What describing a target imports, which takes seconds."""
    import accelerate  # noqa: F401
    import transformers.conversion_mapping
    import transformers.modeling_utils  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401


def describe_target(folder: Path, *, trust_remote_code: bool = False) -> TargetModel:
    """The model that config.json of `folder` describes.

    Raises `UserError` where it describes none, names code to run (unless `trust_remote_code`) or a quantized model.
    """
    config_json, path = read_config(folder), folder / CONFIG_FILE
    _check_code_is_trusted(config_json, path, trust_remote_code)
    if "quantization_config" in config_json:
        raise UserError(
            f"{path}: quantization_config: quantized weights cannot be exported; name the unquantized model"
        )
    model = _build_model(folder, trust_remote_code)
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}
    return TargetModel(
        config_json=config_json,
        model=model,
        shapes=shapes,
        files=boxes_of_files(model, shapes),
        tied=tied,
        float32=_find_float32(model, state),
    )


def _check_code_is_trusted(config_json: Mapping[str, Any], path: Path, trust_remote_code: bool) -> None:
    from transformers import CONFIG_MAPPING

    if "auto_map" in config_json and config_json.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        raise UserError(
            f"{path}: auto_map: this model has code of its own ({config_json.get('model_type')}); read it, then "
            "allow it with --trust-remote-code"
        )


def _build_model(folder: Path, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoConfig

    path = folder / CONFIG_FILE
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        layers = getattr(text_config_of(config), "num_hidden_layers", 0)
        if not isinstance(layers, int) or layers > LAYERS_LIMIT:
            raise UserError(f"num_hidden_layers: {layers} is not a number of layers")
        return build_on_meta(config, torch.float32, trust_remote_code).eval()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a config can be wrong in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: describes no causal language model that transformers can build: {reason}") from None


def _find_float32(model: Any, names: Mapping[str, Any]) -> frozenset[str]:
    modules = [re.escape(part) for part in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    pattern = re.compile(rf"(^|\.)({'|'.join(modules)})(\.|$)") if modules else None
    return frozenset(name for name in names if pattern is not None and pattern.search(name))
