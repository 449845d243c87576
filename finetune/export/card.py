"""What makes a folder of weights a model: config, generation config, tokenizer with chat template, and model card."""

import json
from pathlib import Path
from typing import Any

import torch

from finetune.constants import ADAPTER_CONFIG, CONFIG_FILE, GENERATION_FILE
from finetune.errors import UserError
from finetune.export.model_card import CARD_FILE, model_card
from finetune.export.options import ExportOptions
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.export.write import Weights
from finetune.files.durable import sync_folder, write_file
from finetune.files.safetensors_header import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model*",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.jin*",
    "chat_template*.json",
    "additional_chat_templates/*.jinja",
)


def write_metadata(
    folder: Path, source: Source, target: TargetModel, weights: Weights, title: str, options: ExportOptions
) -> None:
    """Everything but the weights: of the model, of the adapter in its own folder, or of an adapter alone.

    Raises `UserError` where the tokenizer is damaged, or runs code of its own without `trust_remote_code`.
    """
    if weights.model:
        if not options.trust_remote_code:
            _check_tokenizer_code(source.description)
        _write_json(folder / CONFIG_FILE, _config(target, weights.dtype, options.trust_remote_code))
        _write_json(folder / GENERATION_FILE, _generation_config(source, target))
        _write_text(folder / CARD_FILE, model_card(source, title, merge=weights.merge))
    if source.adapter is not None and weights.adapter is not None:
        adapter_folder = (folder / weights.adapter.name).parent
        adapter_folder.mkdir(exist_ok=True)
        config = source.adapter.config | {"base_model_name_or_path": source.base_model, "inference_mode": True}
        _write_json(adapter_folder / ADAPTER_CONFIG, config)
        _write_text(adapter_folder / CARD_FILE, model_card(source, title, is_adapter=True))
    _copy_tokenizer(source.description, folder)
    if weights.model and options.trust_remote_code:
        for path in sorted(source.description.glob("*.py")):
            _copy(path, folder / path.name)


def _copy_tokenizer(description: Path, folder: Path) -> None:
    """The tokenizer's files and its chat template, byte for byte. Raises `UserError` where one of JSON is damaged."""
    for path in sorted({path for pattern in TOKENIZER_FILES for path in description.glob(pattern)}):
        destination = folder / path.relative_to(description)
        destination.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            read_json(path, path.read_bytes())
        _copy(path, destination)
        sync_folder(destination.parent)


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_CONFIG).exists() or (folder / "tokenizer.json").exists()


def _check_tokenizer_code(description: Path) -> None:
    """Raises `UserError` where the tokenizer's config names code to run, and transformers has no class for it."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    path = description / TOKENIZER_CONFIG
    config = read_json(path, path.read_bytes()) if path.is_file() else {}
    name = config.get("tokenizer_class")
    if "auto_map" in config and (not isinstance(name, str) or tokenizer_class_from_name(name) is None):
        raise UserError(
            f"{path}: auto_map: this tokenizer has code of its own ({name}); read it, then allow it with "
            "--trust-remote-code"
        )


def _copy(path: Path, destination: Path) -> None:
    """Copies a small file: the target of a link, as in the hub's cache."""
    try:
        write_file(destination, [path.read_bytes()])
    except OSError as error:
        raise UserError(f"{path}: cannot be copied to {destination}: {error.strerror}") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """JSON as transformers writes it."""
    write_file(path, [f"{json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()])


def _write_text(path: Path, text: str) -> None:
    write_file(path, [text.encode(errors="backslashreplace")])


def _config(target: TargetModel, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
    """The source's config, with the dtype and the class of what is written."""
    config = dict(target.config_json)
    name = str(dtype).removeprefix("torch.")
    config["architectures"] = [target.class_name]
    config["dtype"] = name
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    if config.get("use_cache") is False:
        config["use_cache"] = True  # training turned it off; generation needs it
    if not trust_remote_code:
        config.pop("auto_map", None)  # the code that it names is not in the folder, and transformers has the class
    return config


def _generation_config(source: Source, target: TargetModel) -> dict[str, Any]:
    """The base model's, which names the tokens that end an answer; else the source's; else one derived from the config."""
    from transformers import GenerationConfig

    folders = [folder for folder in (source.base, source.description) if folder is not None]
    if source.recipe.get("special_tokens") or source.recipe.get("eot_tokens"):
        folders.reverse()  # the checkpoint's is the base's with these tokens
    path = next((folder / GENERATION_FILE for folder in folders if (folder / GENERATION_FILE).exists()), None)
    if path is not None:
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{path}: not JSON; fix it, or remove it to derive one from config.json") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: a JSON object is expected")
    else:
        content = GenerationConfig.from_model_config(target.model.config).to_diff_dict()
    if content.get("use_cache") is False:
        del content["use_cache"]
    return dict(content)
