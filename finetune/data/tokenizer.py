"""The run's tokenizer: with the recipe's chat template and tokens, and prepared for encoding pieces of text."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from finetune.config.pretrained_adapter import refuse_other_path
from finetune.config.schema import Data, Model
from finetune.constants import GENERATION_FILE, grow_rows
from finetune.data.images import ImageProcessor
from finetune.errors import UserError
from finetune.files.hub import go_offline_without_network, hub_error
from finetune.files.run_json import read_json_object
from finetune.pretrained_config import Vocabulary, load_config, text_config_of

FOLDER = Path(__file__).parent / "templates"
# A template's text is part of a checkpoint's fingerprints: a changed file is another template to a run.
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
ALIASES = {
    "qwen2.5": "qwen",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "deepseek": "deepseek-v3",
    "olmo": "olmo2",
    "glm-4": "glm4",
    "glm4.6": "glm4.5",
    "gptoss": "gpt-oss",
    "magistral": "mistral-v13-tekken",
    "ministral3": "mistral-v13-tekken",
}  # fmt: skip
# For tokenizers without a template and without special tokens for turns; of those it uses only the EOS token.
PLAIN = TEMPLATES["plain"]


def read_template(name: str) -> str:
    """The Jinja text that `chat_template` means: one of `TEMPLATES` or `ALIASES`, a file, or the text itself.

    Raises `UserError` for a file that does not exist or cannot be read.
    """
    known = TEMPLATES | {alias: TEMPLATES[own] for alias, own in ALIASES.items()}
    if name in known:
        return known[name]
    if "{" in name:
        return name
    path = Path(name)
    if not path.is_file():
        near = name.replace("_", "-")
        close = [near] if near in known else get_close_matches(near, known)
        hint = f"; did you mean {' or '.join(close)}?" if close else f", which are {', '.join(sorted(known))}"
        raise UserError(f"chat_template: {name}: not a file, not Jinja text, and not one of the named templates{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template: {name}: cannot be read: {error}") from None


USUAL_STOP_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")  # a vocabulary that has one stops at it


def load_tokenizer(model: Model, data: Data) -> Any:
    """The fast tokenizer of `tokenizer_name_or_path` or the model, with the recipe's tokens and template.

    Raises `UserError` if there is none, none with a fast (Rust) implementation, or if the tokens do not fit it.
    """
    tokenizer = _load_own(model)
    _add_tokens(tokenizer, model)
    tokenizer.stop_tokens = (*model.eot_tokens, *_read_stop_tokens(model, tokenizer))
    tokenizer.images = ImageProcessor(model, tokenizer)
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(data.chat_template)
    return tokenizer


def plan_vocabulary(tokenizer: Any, model: Model) -> Vocabulary | None:
    """What the tokens of `tokenizer` ask of the model; None where the recipe names none."""
    special = model.special_tokens or {}
    if not (model.added_tokens or special):
        return None
    rows = grow_rows(text_config_of(load_config(model)).vocab_size, len(tokenizer), model.pad_vocab_to_multiple_of)
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in special.items() if name != "unk_token"
    }
    return Vocabulary(known=len(_load_own(model)), tokens=len(tokenizer), rows=rows, token_ids=ids)


def refuse_other_tokenizer(tokenizer: Any, teacher: Model) -> None:
    """Raises `UserError` if the teacher's tokenizer has other tokens than `tokenizer`, or cuts texts otherwise."""
    own = _load_own(teacher)
    ours, theirs = tokenizer.get_vocab(), own.get_vocab()
    different = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    found = ""
    if different:
        token, index = different[0]
        whose = "the teacher's tokenizer" if token in theirs and theirs[token] == index else "the model's tokenizer"
        found = f"{token!r} is token {index} only of {whose}"
    else:
        parts = [json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, own)]
        changed = [
            part for part in ("model", "normalizer", "pre_tokenizer") if parts[0].get(part) != parts[1].get(part)
        ]
        if changed:
            found = f"the tokens are the same, but a text is cut into others ({', '.join(changed)} in tokenizer.json)"
    if found:
        raise UserError(
            f"{teacher.model_name_or_path}: its tokenizer is not that of the model that is trained: "
            f"{found}; name a teacher of the same family, with the same tokenizer"
        )


def _add_tokens(tokenizer: Any, model: Model) -> None:
    """Adds `added_tokens` and `special_tokens`, and makes `eot_tokens` special. Raises `UserError`."""
    from tokenizers import AddedToken

    special = model.special_tokens or {}
    for key, tokens in (("added_tokens", model.added_tokens), ("special_tokens", special.values())):
        if any(not token.strip() for token in tokens):
            raise UserError(f"{key}: an empty token; write its text, such as <|tool|>")
    writes_bos = encode_bos(tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in model.added_tokens])
    tokenizer.add_special_tokens(special)
    known = tokenizer.get_vocab()
    for token in model.eot_tokens:
        if token not in known:
            raise UserError(f"eot_tokens: {token}: not a token of this tokenizer; name it in added_tokens too")
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in model.eot_tokens])
    bos = [known[special["bos_token"]]] if "bos_token" in special else None
    if writes_bos and bos is not None and encode_bos(tokenizer) != bos:
        raise UserError(
            f"special_tokens: bos_token: tokenizer.json writes {tokenizer.decode(writes_bos)} before every text, "
            "whatever the bos_token is; leave it as it is, or change tokenizer.json"
        )


def encode_bos(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer writes before plain text."""
    bare, wrapped = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a", add_special_tokens=True)
    return wrapped[: wrapped.index(bare[0])] if bare and bare[0] in wrapped else []


def _load_own(model: Model) -> Any:
    """The tokenizer as its files describe it."""
    from transformers import AutoTokenizer

    name = model.tokenizer_name_or_path or model.model_name_or_path
    if name is None:
        raise UserError("no tokenizer; set tokenizer_name_or_path")
    if Path(name).exists() and not Path(name).is_dir():
        raise UserError(f"{name}: a folder with tokenizer.json is expected, this is a file")
    revision = model.model_revision if model.tokenizer_name_or_path is None else None
    if not Path(name).is_dir():
        go_offline_without_network()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # transformers raises whatever the hub, the network or a folder's files raise
        raise _describe_failure(name, revision, error) from None
    if not tokenizer.is_fast:
        raise UserError(f"{name}: its tokenizer has no tokenizer.json, which is needed to mask exactly what is trained")
    for name in (
        "is_local",
        "local_files_only",
    ):  # how transformers has just loaded it: nothing for the files of an export
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def _describe_failure(name: str, revision: str | None, error: Exception) -> UserError:
    if not Path(name).is_dir():
        # transformers wraps the hub's answer; the cause shows whether it is unreachable, gated or unknown
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return hub_error(name, cause, what="its tokenizer", revision=revision)
    if not (Path(name) / "tokenizer.json").is_file():
        refuse_other_path(Path(name))
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
    """Wraps a fast transformers tokenizer as an `Encoder`, and turns off its truncation and padding."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    bare = backend.encode("a", add_special_tokens=False).ids
    newline, with_newline = (backend.encode(text, add_special_tokens=False).ids for text in ("\n", "\na"))
    added = tuple(token.content for token in backend.get_added_tokens_decoder().values())
    return Encoder(backend, encode_bos(tokenizer), added, [] if with_newline == newline + bare else newline)


@lru_cache(maxsize=4096)
def keeps_border(backend: Any, before: str, after: str) -> bool:
    """Whether two texts have the same tokens together as apart."""
    apart, together = (backend.encode(text, add_special_tokens=False) for text in (before, before + after))
    return bool(apart.offsets[-1:] == together.offsets[: len(apart.ids)][-1:])


def end_of_answer_ids(tokenizer: Any, eot_tokens: tuple[str, ...] = ()) -> list[int]:
    """The ids of the tokens that end what the assistant says; see `find_stop_tokens`."""
    return sorted(tokenizer.convert_tokens_to_ids([*{*find_stop_tokens(tokenizer), *eot_tokens}]))


def find_stop_tokens(tokenizer: Any) -> list[str]:
    """The tokens that end generation: end of text, known ends of a turn, and what `load_tokenizer` found."""
    known = tokenizer.get_vocab()
    stops = {tokenizer.eos_token, *USUAL_STOP_TOKENS, *getattr(tokenizer, "stop_tokens", ())}
    return sorted(token for token in stops if token in known)


def _read_stop_tokens(model: Model, tokenizer: Any) -> list[str]:
    """The tokens that the model's generation_config.json stops at; none where there is no such file."""
    from transformers.utils import cached_file

    if model.model_name_or_path is None:
        return []
    found = cached_file(
        model.model_name_or_path,
        GENERATION_FILE,
        revision=model.model_revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    # A damaged file is reported where it is written into an export.
    stops = read_json_object(Path(found)).get("eos_token_id") if found else None
    ids = stops if isinstance(stops, list) else [stops]
    return [str(token) for token in tokenizer.convert_ids_to_tokens([i for i in ids if isinstance(i, int)]) if token]
