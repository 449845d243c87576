"""The files of an export beside its weights: configs, the tokenizer, and the model cards."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.constants import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    CUTTING_KEYS,
    GENERATION_FILE,
    PROCESSOR_FILES,
    TOKENIZER_CONFIG,
)
from finetune.errors import UserError
from finetune.export.card import CARD_FILE, render_card
from finetune.export.publish import ExportOptions
from finetune.export.sentence_transformer import describe_sentence_transformer
from finetune.export.source import Source, has_vocabulary
from finetune.export.target import TargetModel
from finetune.export.write import Weights
from finetune.files.durable import sync_folder, write_file
from finetune.files.json_files import load_json, read_json_object

# globs of all files that a tokenizer and its chat templates may have
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
    folder: Path,
    source: Source,
    target: TargetModel,
    weights: Weights,
    title: str,
    options: ExportOptions,
) -> None:
    """Writes all files of an export but its weights.

    With `safetensors` among the formats these are the configs, cards and tokenizer of the model, of
    the adapter, or of both. Without it the only file is the model's card; an adapter has none.

    Args:
        folder: The export's folder.
        source: What is exported.
        target: The model that config.json describes.
        weights: The plan of the weights. It says whether there is a model, an adapter, or both.
        title: The title of the cards.
        options: With the formats, and whether the model's own code is trusted and copied.

    Raises:
        UserError: The tokenizer is damaged, or runs code of its own without `trust_remote_code`.
    """
    has_safetensors = "safetensors" in options.formats
    if weights.model and has_safetensors:
        if not options.trust_remote_code:
            _check_tokenizer_code(source.tokenizer)
        _write_configs(folder, source, target, weights, options)
    if weights.model:
        card = render_card(
            source,
            title,
            merge=weights.merge,
            formats=options.formats,
            of_base=weights.account.sentences,
        )
        _write_text(folder / CARD_FILE, card)
    if not has_safetensors:
        return
    if source.adapter is not None and weights.adapter is not None:
        # `folder`, or adapter/ in it beside a model
        adapter_folder = (folder / weights.adapter.name).parent
        adapter_folder.mkdir(exist_ok=True)
        config = _make_adapter_config(source, source.adapter.config, weights)
        _write_json(adapter_folder / ADAPTER_CONFIG, config)
        # peft ignores it: it says at which tokens the adapter was trained to end an answer
        _write_json(adapter_folder / GENERATION_FILE, make_generation_config(source, target))
        _write_text(adapter_folder / CARD_FILE, render_card(source, title, is_adapter=True))
    _copy_files(TOKENIZER_FILES, source.tokenizer, folder)
    # an adapter that brings its tokenizer may have no processor
    has_processor = any((source.tokenizer / name).is_file() for name in PROCESSOR_FILES)
    _copy_files(PROCESSOR_FILES, source.tokenizer if has_processor else source.description, folder)
    if weights.model and options.trust_remote_code:
        for path in sorted(source.description.glob("*.py")):
            _copy(path, folder / path.name)


def _write_configs(
    folder: Path, source: Source, target: TargetModel, weights: Weights, options: ExportOptions
) -> None:
    """Writes the configs of the model and of its generation.

    If the recipe trains embeddings, it writes those of sentence-transformers too.
    """
    config = target.written_config(weights.dtype, options.trust_remote_code)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_FILE, make_generation_config(source, target))
    if not source.method.embeds:
        return
    # Not from config.json: there some families have another name for it, such as n_embd.
    model_config: Any = target.model.config
    hidden_size = model_config.get_text_config().hidden_size
    contents = describe_sentence_transformer(source.recipe, hidden_size)
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        _write_json(path, content)
        sync_folder(path.parent)


def _make_adapter_config(
    source: Source, trained_config: Mapping[str, Any], weights: Weights
) -> dict[str, Any]:
    """Makes the content of adapter_config.json, for inference on the source's base model.

    Args:
        source: What is exported.
        trained_config: The adapter's config in the source.
        weights: Their `adapter_config` is that of the source, or renamed for vLLM.
    """
    config = {
        **weights.adapter_config,
        "base_model_name_or_path": source.base_model,
        "inference_mode": True,
    }
    # A revision is one of the model that it is named with, not of another that --base-model names.
    if source.recipe.get("model_name_or_path") == source.base_model:
        config["revision"] = trained_config.get("revision") or source.recipe.get("model_revision")
    elif trained_config.get("base_model_name_or_path") != source.base_model:
        config["revision"] = None
    return config


def _copy_files(patterns: Iterable[str], description: Path, folder: Path) -> None:
    """Copies the files of a tokenizer or processor from `description` to `folder`.

    They are copied byte for byte. Only a file with settings that cut or pad every text is written
    without these settings.

    Raises `UserError` if a JSON file is damaged.
    """
    paths = {path for pattern in patterns for path in description.glob(pattern)}
    for path in sorted(paths):
        destination = folder / path.relative_to(description)
        destination.parent.mkdir(exist_ok=True)
        content = load_json(path) if path.suffix == ".json" else {}
        cutting_keys = CUTTING_KEYS.get(path.name, ())
        if any(content.get(key) for key in cutting_keys):
            kept = {key: value for key, value in content.items() if key not in cutting_keys}
            _write_text(destination, json.dumps(kept, indent=2, ensure_ascii=False))
        else:
            _copy(path, destination)
        sync_folder(destination.parent)


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has a tokenizer's settings or its vocabulary."""
    return (folder / TOKENIZER_CONFIG).exists() or has_vocabulary(folder)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template, in its config or a file of its own."""
    config = read_json_object(folder / TOKENIZER_CONFIG)
    return bool(config.get("chat_template")) or any(folder.glob("chat_template*"))


def _check_tokenizer_code(description: Path) -> None:
    """Raises `UserError` if the tokenizer needs code of its own.

    It does if its config has an `auto_map` and transformers has no class of its name.
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
    """Copies a small file. Of a link, as in the hub's cache, it copies the target's content.

    Raises `UserError` if the file cannot be read or written.
    """
    try:
        write_file(destination, [path.read_bytes()])
    except OSError as error:
        raise UserError(f"{path}: cannot be copied to {destination}: {error.strerror}") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file in transformers' layout: sorted keys, an indent of 2, a final newline."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    write_file(path, [f"{text}\n".encode()])


def _write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file. Lone surrogates, which UTF-8 cannot hold, are written as escapes."""
    write_file(path, [text.encode(errors="backslashreplace")])


def _add_eos(content: dict[str, Any], tokenizer: Path) -> None:
    """Adds the EOS token of an adapter's own tokenizer to the content of generation_config.json.

    The adapter was trained to end its answers with it, and the base may end them with another.
    """
    from transformers import AutoTokenizer

    try:
        eos_id = AutoTokenizer.from_pretrained(tokenizer).eos_token_id
    except (OSError, ValueError):  # it needs code of its own
        return
    known = content.get("eos_token_id")
    listed = known if isinstance(known, list) else [known]
    ids = [token for token in listed if token is not None]
    if eos_id is not None and eos_id not in ids:
        content["eos_token_id"] = [*ids, eos_id]


def _find_generation_file(source: Source) -> Path | None:
    """Finds the generation_config.json that names the tokens at which the source ends an answer.

    It is that of the exported folder. A checkpoint of this project and most adapters have none
    there: theirs is the base model's, or else that beside config.json. Returns None if there is
    none.
    """
    describing = [source.base, source.description]
    if source.recipe.get("special_tokens") or source.recipe.get("eot_tokens"):
        describing.reverse()  # the checkpoint's file is the base's with these tokens added
    folders = [folder for folder in (source.path, *describing) if folder is not None]
    paths = [folder / GENERATION_FILE for folder in folders]
    return next((path for path in paths if path.exists()), None)


def make_generation_config(source: Source, target: TargetModel) -> dict[str, Any]:
    """Makes the content of generation_config.json, which names the tokens that end an answer.

    Without a file of the source or its base it is derived from config.json.
    """
    from transformers import GenerationConfig

    path = _find_generation_file(source)
    content: Any
    if path is None:
        content = GenerationConfig.from_model_config(target.model.config).to_diff_dict()
    else:
        content = load_json(path, "fix it, or remove it to derive one from config.json")
    if source.adapter_tokenizer is not None:
        _add_eos(content, source.adapter_tokenizer)
    if content.get("use_cache") is False:  # generation needs the cache, which is on by default
        del content["use_cache"]
    return dict(content)


def find_ends(source: Source, target: TargetModel) -> list[int]:
    """Finds the ids of the tokens that end an answer by generation_config.json.

    Empty if neither the source nor its base has such a file.
    """
    if _find_generation_file(source) is None:
        return []
    listed = make_generation_config(source, target).get("eos_token_id")
    ends = listed if isinstance(listed, list) else [listed]
    return [token_id for token_id in ends if isinstance(token_id, int)]
