"""What makes a folder of weights a model: config, generation config, tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

import torch

from finetune.durable import sync_folder, write_file
from finetune.errors import UserError
from finetune.export.source import Source
from finetune.export.target import CONFIG_FILE, Architecture
from finetune.safetensors_io.header import read_json

GENERATION_FILE = "generation_config.json"
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


def write_descriptions(
    target: Path, source: Source, built: Architecture, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> None:
    """Everything but weights and model card."""
    write_json(target / CONFIG_FILE, _config(built, dtype, trust_remote_code))
    write_json(target / GENERATION_FILE, _generation_config(source, built))
    copy_tokenizer(source.description, target)
    if trust_remote_code:
        for path in sorted(source.description.glob("*.py")):
            copy(path, target / path.name)


def copy_tokenizer(description: Path, target: Path) -> None:
    """The tokenizer's files and its chat template, byte for byte. Raises `UserError` where one of JSON is damaged."""
    for path in sorted({path for pattern in TOKENIZER_FILES for path in description.glob(pattern)}):
        destination = target / path.relative_to(description)
        destination.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            read_json(path, path.read_bytes())
        copy(path, destination)
        sync_folder(destination.parent)


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_CONFIG).exists() or (folder / "tokenizer.json").exists()


def refuse_tokenizer_code(description: Path) -> None:
    """Raises `UserError` where the tokenizer's config names code to run, and transformers has no class for it."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    path = description / TOKENIZER_CONFIG
    config = read_json(path, path.read_bytes()) if path.is_file() else {}
    name = config.get("tokenizer_class")
    if "auto_map" in config and (not isinstance(name, str) or tokenizer_class_from_name(name) is None):
        raise UserError(
            f"{path}: auto_map: this tokenizer brings code of its own ({name}); read it, then allow it with "
            "--trust-remote-code"
        )


def copy(path: Path, destination: Path) -> None:
    """Copies a small file: the target of a link, as in the hub's cache."""
    try:
        write_file(destination, [path.read_bytes()])
    except OSError as error:
        raise UserError(f"{path}: cannot be copied to {destination}: {error.strerror}") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """JSON as transformers writes it."""
    write_file(path, [f"{json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()])


def _config(built: Architecture, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
    """The config as it stands beside the checkpoint, but for what the files have otherwise now."""
    config = dict(built.config_json)
    name = str(dtype).removeprefix("torch.")
    config["architectures"] = [built.class_name]
    config["dtype"] = name
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    if config.get("use_cache") is False:
        del config["use_cache"]  # training turned it off; generating wants it on, which is the default
    if not trust_remote_code:
        config.pop("auto_map", None)  # the code that it names is not in the folder, and transformers has the class
    return config


def _generation_config(source: Source, built: Architecture) -> dict[str, Any]:
    """The base model's, which names the tokens that end an answer; else the source's; else what the config implies."""
    from transformers import GenerationConfig

    folders = [folder for folder in (source.base, source.description) if folder is not None]
    path = next((folder / GENERATION_FILE for folder in folders if (folder / GENERATION_FILE).exists()), None)
    if path is not None:
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{path}: cannot be read as JSON; mend it, or remove it to have one made") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: a JSON object is expected")
    else:
        content = GenerationConfig.from_model_config(built.model.config).to_diff_dict()
    if content.get("use_cache") is False:
        del content["use_cache"]
    return dict(content)
