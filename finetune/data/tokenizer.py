"""The run's tokenizer: loaded with the chat template that the recipe names, and prepared for encoding pieces of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.chat_templates import read_template
from finetune.errors import UserError
from finetune.hub import hub_error
from finetune.recipe.schema import Data, Model


def load_tokenizer(model: Model, data: Data) -> Any:
    """The fast tokenizer that `tokenizer_name_or_path` or the model names, with `chat_template` set on it if given.

    Raises `UserError` if there is none, or none with a fast (Rust) implementation.
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
    except Exception as error:  # transformers raises whatever the hub, the network or a folder's files raise
        raise _describe_failure(name, revision, error) from None
    if not tokenizer.is_fast:
        raise UserError(f"{name}: its tokenizer has no tokenizer.json, which is needed to mask exactly what is trained")
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(data.chat_template)
    return tokenizer


def _describe_failure(name: str, revision: str | None, error: Exception) -> UserError:
    if not Path(name).is_dir():
        # transformers wraps the hub's answer; the cause shows whether it is unreachable, gated or unknown
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return hub_error(name, cause, what="its tokenizer", revision=revision)
    if not (Path(name) / "tokenizer.json").is_file():
        return UserError(f"{name}: has no tokenizer.json; name a folder that has one, or a hub name")
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return UserError(f"{name}: its tokenizer cannot be loaded: {reason}")


@dataclass(frozen=True, slots=True)
class Encoder:
    """What encoding a piece of a text needs to know about a tokenizer. Returned by `make_encoder`."""

    backend: Any  # tokenizers.Tokenizer
    bos_ids: list[int]  # what it writes before plain text
    added_tokens: tuple[str, ...]  # which it finds in a text before anything else; special tokens are among them
    # The ids of a newline, if the tokenizer puts a space before every text (as SentencePiece does); otherwise empty.
    newline_ids: list[int]


def make_encoder(tokenizer: Any) -> Encoder:
    """`tokenizer`: a fast tokenizer of transformers. Turns its truncation and padding off."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    bare, wrapped = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    newline, with_newline = (backend.encode(text, add_special_tokens=False).ids for text in ("\n", "\na"))
    bos_ids = wrapped[: wrapped.index(bare[0])] if bare and bare[0] in wrapped else []
    added = tuple(token.content for token in backend.get_added_tokens_decoder().values())
    return Encoder(backend, bos_ids, added, [] if with_newline == newline + bare else newline)


def end_of_answer_ids(tokenizer: Any) -> list[int]:
    """The tokens that end what the assistant says: the end of text, and the known names of an end of turn."""
    ends = {tokenizer.eos_token_id} - {None}
    known = tokenizer.get_added_vocab()
    ends |= {known[name] for name in ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>") if name in known}
    return sorted(ends)
