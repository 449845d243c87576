"""The files of an export beside its weights: configs, tokenizer with chat template, and cards."""

import json
from pathlib import Path
from typing import Any

from finetune.constants import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    CUTTING_KEYS,
    GENERATION_FILE,
    PROCESSOR_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    Fields,
    Record,
)
from finetune.errors import UserError
from finetune.export.card import CARD_FILE, model_card
from finetune.export.publish import ExportOptions
from finetune.export.sentence_transformer import describe_sentence_transformer, is_embedder
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.export.write import Weights
from finetune.files.durable import sync_folder, write_file
from finetune.files.json_files import load_json, read_json_object

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
    *PROCESSOR_FILES,
)


def write_metadata(
    folder: Path,
    source: Source,
    target: TargetModel,
    weights: Weights,
    title: str,
    options: ExportOptions,
) -> None:
    """Writes everything but the weights: of the model, of the adapter in its own folder, or of an
    adapter alone.

    Args:
        folder: That of the export.
        source: What is exported.
        target: The model that the export describes.
        weights: What was written of the weights.
        title: Of the cards.
        options: With the formats, and whether the model's own code is copied.

    Raises:
        UserError: The tokenizer is damaged, or runs code of its own without `trust_remote_code`.
    """
    is_folder = "safetensors" in options.formats
    if weights.model and is_folder:
        if not options.trust_remote_code:
            _check_tokenizer_code(source.description)
        _write_configs(folder, source, target, weights, options)
    if weights.model:
        card = model_card(
            source,
            title,
            merge=weights.merge,
            formats=options.formats,
            of_base=weights.account.sentences,
        )
        _write_text(folder / CARD_FILE, card)
    if not is_folder:
        return
    if source.adapter is not None and weights.adapter is not None:
        adapter_folder = (folder / weights.adapter.name).parent
        adapter_folder.mkdir(exist_ok=True)
        config = _adapter_config(source, source.adapter.config, weights)
        _write_json(adapter_folder / ADAPTER_CONFIG, config)
        _write_text(adapter_folder / CARD_FILE, model_card(source, title, is_adapter=True))
    _copy_tokenizer(source.description, folder)
    if weights.model and options.trust_remote_code:
        for path in sorted(source.description.glob("*.py")):
            _copy(path, folder / path.name)


def _write_configs(
    folder: Path, source: Source, target: TargetModel, weights: Weights, options: ExportOptions
) -> None:
    """Writes the configs of the model, of its generation, and of sentence-transformers."""
    config = target.written_config(weights.dtype, options.trust_remote_code)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_FILE, _generation_config(source, target))
    if not is_embedder(source.recipe):
        return
    described = describe_sentence_transformer(source.recipe, _read_hidden(source))
    for name, content in described.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        _write_json(path, content)
        sync_folder(path.parent)


def _adapter_config(source: Source, trained: Fields, weights: Weights) -> Record:
    """The adapter's config for inference, with its base and the revision of that.

    Args:
        source: What is exported.
        trained: The adapter's config as it was trained.
        weights: What was written of the weights.
    """
    config = {
        **weights.adapter_config,
        "base_model_name_or_path": source.base_model,
        "inference_mode": True,
    }
    if source.recipe.get("model_name_or_path") == source.base_model:
        config["revision"] = trained.get("revision") or source.recipe.get("model_revision")
    return config


def _read_hidden(source: Source) -> int:
    """Reads how many numbers a hidden state of the model has."""
    return int(read_json_object(source.description / CONFIG_FILE)["hidden_size"])


def _copy_tokenizer(description: Path, folder: Path) -> None:
    """Copies the tokenizer's files and its chat template, byte for byte but for what would cut or
    pad a text.

    Raises `UserError` where one of JSON is damaged.
    """
    paths = {path for pattern in TOKENIZER_FILES for path in description.glob(pattern)}
    for path in sorted(paths):
        destination = folder / path.relative_to(description)
        destination.parent.mkdir(exist_ok=True)
        content = load_json(path) if path.suffix == ".json" else {}
        cutting = CUTTING_KEYS.get(path.name, ())
        if any(content.get(key) for key in cutting):
            kept = {key: value for key, value in content.items() if key not in cutting}
            _write_text(destination, json.dumps(kept, indent=2, ensure_ascii=False))
        else:
            _copy(path, destination)
        sync_folder(destination.parent)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files of a tokenizer."""
    return (folder / TOKENIZER_CONFIG).exists() or (folder / TOKENIZER_FILE).exists()


def has_chat_template(folder: Path) -> bool:
    """Returns whether the tokenizer in `folder` has a chat template, in a file of its own or in its
    config.
    """
    config = read_json_object(folder / TOKENIZER_CONFIG)
    return bool(config.get("chat_template")) or any(folder.glob("chat_template*"))


def _check_tokenizer_code(description: Path) -> None:
    """Raises `UserError` where the tokenizer's config names code to run, and transformers has no
    class for it.
    """
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    path = description / TOKENIZER_CONFIG
    config = load_json(path) if path.is_file() else {}
    if "auto_map" not in config:
        return
    name = config.get("tokenizer_class")
    is_known = isinstance(name, str) and tokenizer_class_from_name(name) is not None
    if not is_known:
        raise UserError(
            f"{path}: auto_map: this tokenizer has code of its own ({name}); read it, then allow "
            "it with --trust-remote-code"
        )


def _copy(path: Path, destination: Path) -> None:
    """Copies a small file: the target of a link, as in the hub's cache."""
    try:
        write_file(destination, [path.read_bytes()])
    except OSError as error:
        raise UserError(f"{path}: cannot be copied to {destination}: {error.strerror}") from None


def _write_json(path: Path, content: Record) -> None:
    """Writes JSON as transformers does."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    write_file(path, [f"{text}\n".encode()])


def _write_text(path: Path, text: str) -> None:
    write_file(path, [text.encode(errors="backslashreplace")])


def _generation_config(source: Source, target: TargetModel) -> Record:
    """Reads the base model's, which names the tokens that end an answer; else the source's; else
    makes one from the config.
    """
    from transformers import GenerationConfig

    folders = [folder for folder in (source.base, source.description) if folder is not None]
    if source.recipe.get("special_tokens") or source.recipe.get("eot_tokens"):
        folders.reverse()  # the checkpoint's is the base's with these tokens
    paths = [folder / GENERATION_FILE for folder in folders]
    path = next((path for path in paths if path.exists()), None)
    content: Any
    if path is None:
        content = GenerationConfig.from_model_config(target.model.config).to_diff_dict()
    else:
        content = load_json(path, "fix it, or remove it to derive one from config.json")
    if content.get("use_cache") is False:
        del content["use_cache"]
    return dict(content)
