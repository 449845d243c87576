"""The tokenizer of a run, with the chat template that the recipe asks for."""

from pathlib import Path
from typing import Any

from finetune.data.chat_templates import read_template
from finetune.errors import UserError
from finetune.hub import hub_error
from finetune.recipe.schema import Data, Model


def load_tokenizer(model: Model, data: Data) -> Any:
    """The fast tokenizer that `tokenizer_name_or_path` or the model names, `chat_template` set on it where given.

    Raises `UserError` where there is none, or none with a fast (Rust) implementation.
    """
    from transformers import AutoTokenizer

    name = model.tokenizer_name_or_path or model.model_name_or_path
    if name is None:
        raise UserError("no tokenizer; set tokenizer_name_or_path")
    if Path(name).exists() and not Path(name).is_dir():
        raise UserError(f"{name}: a folder with tokenizer.json is expected, this is a file")
    revision = model.model_revision if model.tokenizer_name_or_path is None else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # a hub name, a folder, a network: transformers raises whatever each of them raises
        raise _not_loaded(name, revision, error) from None
    if not tokenizer.is_fast:
        raise UserError(f"{name}: its tokenizer has no tokenizer.json, which is needed to mask exactly what is trained")
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(data.chat_template)
    return tokenizer


def _not_loaded(name: str, revision: str | None, error: Exception) -> UserError:
    if not Path(name).is_dir():
        # transformers wraps what the hub said; the cause knows whether it is away, gated or unknown
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return hub_error(name, cause, what="its tokenizer", revision=revision)
    if not (Path(name) / "tokenizer.json").is_file():
        return UserError(f"{name}: has no tokenizer.json; name a folder that has, or a hub name")
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return UserError(f"{name}: its tokenizer cannot be loaded: {reason}")
