"""Describes a tokenizer in llama.cpp's terms: vocabulary, pre-tokenizer and special tokens.

The pre-tokenizer cuts a text into words; tokens are merged only within a word.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from finetune.errors import UserError

SPACE = "\u2581"  # SentencePiece writes it for a space
# Regular expressions, and parts of them, by which byte-level tokenizers cut a text into words. The
# last %s of END and CASES is how many digits a word may have, such as {1,3}. The first two of CASES
# are for contractions.
END = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
CASES = (
    f"{START}{UPPER}*{LOWER}+%s|{START}{UPPER}+{LOWER}*%s|\\p{{N}}%s| "
    f"?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*"
)
CASES += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# (how tokenizer.json cuts a text, whether a word that is a token is taken without merging) ->
# llama.cpp's name of this pre-tokenizer. Source: llama-vocab.cpp has the expressions of each name.
PRE_TOKENIZERS: Mapping[tuple[str, bool], str] = {
    ("ByteLevel", False): "gpt-2",
    ("Digits ByteLevel", False): "smollm",
    (f"{CONTRACTIONS}|{END % '{1,3}'}", True): "llama-bpe",
    (f"{CONTRACTIONS}|{END % '{1,3}'}", False): "dbrx",
    (f"{CONTRACTIONS}|{END % ''}", False): "qwen2",
    (CASES % ("", "", ""), True): "tekken",
    (CASES % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", "{1,3}"), False): "gpt-4o",
}
# llama.cpp expects at least one merge, of two tokens with a space between. No merge makes these two
# words, so that this one never applies.
NO_MERGES = ["never merged"]
# The normalizers that a byte-level tokenizer may have. llama.cpp normalizes nothing, and most texts
# are NFC already.
NORMALIZERS = ({"NFC"}, set[str]())


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer in llama.cpp's terms. Returned by `describe_tokenizer`."""

    # "llama": SentencePiece's BPE by scores; "gemma4": SentencePiece's BPE by merges; "gpt2":
    # byte-level BPE
    model: str
    pre_tokenizer: str  # llama.cpp's name for how a text is cut into words
    tokens: list[str]  # by id, one for each row of the embedding
    types: list[int]  # by id, each a `gguf.TokenType`
    # for "llama", by id: the two tokens that make the token with the highest score are merged first
    scores: list[float] | None = None
    # for "gpt2" and "gemma4": two tokens with a space between; the first are merged first
    merges: list[str] | None = None
    adds_space: bool | None = None  # for "llama": whether a text gets a space in front
    special: dict[str, int] = field(default_factory=dict)  # such as "bos" -> id
    adds_bos: bool = False
    adds_eos: bool = False
    template: Any = None  # chat template: a text, {name: text}, or None
    # whether special tokens swallow the spaces after them, as Phi-3's do
    strips_after: bool = False
    notes: tuple[str, ...] = ()  # sentences on what llama.cpp does differently
    # sentences on where llama.cpp may cut a text into other tokens
    doubts: tuple[str, ...] = ()


def describe_tokenizer(
    tokenizer: Any, vocab_size: int, folder: Path, pre_tokenizer: str | None, ends: Sequence[int]
) -> GgufVocabulary:
    """Describes a tokenizer in llama.cpp's terms.

    Args:
        tokenizer: The tokenizer, of transformers.
        vocab_size: The number of rows of the model's embedding.
        folder: The folder that the tokenizer was loaded from.
        pre_tokenizer: llama.cpp's name for how a text is cut into words, as the user says; None: it
            is found.
        ends: The ids of the tokens that end an answer; empty: only the tokenizer's EOS is known.

    Raises:
        UserError: llama.cpp has no tokenizer of this kind.
    """
    tokenizer_json = _read_bpe(tokenizer, vocab_size, folder)
    model = tokenizer_json["model"]
    pairs = [
        tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair)
        for pair in model["merges"]
    ]
    common_fields = _describe_tokens(tokenizer, vocab_size, ends, model)
    steps = _list_steps(tokenizer_json.get("pre_tokenizer"))
    kinds = {step["type"] for step in steps}
    if not model.get("byte_fallback") and "ByteLevel" in kinds:
        name = pre_tokenizer or _name_pre_tokenizer(
            tokenizer_json, steps, has_merges=bool(pairs), folder=folder
        )
        # a space separates a merge's tokens: within them it is written as byte-level BPE does
        merges = [
            " ".join(token.replace(" ", "\u0120") for token in pair) for pair in pairs
        ] or NO_MERGES
        return GgufVocabulary("gpt2", name, merges=merges, **common_fields)
    if not model.get("byte_fallback") or kinds - {"Metaspace", "Split"}:
        raise UserError(
            f"{folder}: a BPE that is neither byte-level nor SentencePiece's; export safetensors"
        )
    doubts = _find_doubts(model["vocab"], set(pairs))
    adds_space = tokenizer.tokenize("a")[0].startswith(SPACE)
    # Gemma's kind: newer versions of llama.cpp follow its merges.
    if doubts and common_fields["adds_bos"] and not adds_space:
        merges = [" ".join(pair) for pair in pairs]
        return GgufVocabulary("gemma4", "gemma4", merges=merges, **common_fields)
    scores = _score_tokens(common_fields["tokens"], pairs)
    return GgufVocabulary(
        "llama", "default", scores=scores, adds_space=adds_space, doubts=doubts, **common_fields
    )


def _read_bpe(tokenizer: Any, vocab_size: int, folder: Path) -> dict[str, Any]:
    """Returns the content of tokenizer.json, which must describe a BPE.

    Raises `UserError` if it does not, or if a token's id is not below `vocab_size`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        tokenizer_json: dict[str, Any] = json.loads(backend.to_str())
    else:
        tokenizer_json = {}  # a tokenizer in Python, which has no such file
    kind = (tokenizer_json.get("model") or {}).get("type")
    if kind != "BPE":
        kind = kind or type(tokenizer).__name__
        raise UserError(
            f"{folder}: a tokenizer of the kind {kind}, which is not exported as GGUF; export "
            "safetensors"
        )
    if max(tokenizer.get_vocab().values()) >= vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has ids beyond the model's {vocab_size:,} embeddings; export "
            "its own one"
        )
    return tokenizer_json


def _describe_tokens(
    tokenizer: Any, vocab_size: int, ends: Sequence[int], model: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes the fields of `GgufVocabulary` that every kind of tokenizer has.

    Args:
        tokenizer: The tokenizer, of transformers.
        vocab_size: The number of rows of the model's embedding.
        ends: The ids of the tokens that end an answer.
        model: The section "model" of tokenizer.json.
    """
    tokens, types = _list_tokens(tokenizer, vocab_size, model)
    bos = [tokenizer.bos_token_id]
    eos = [tokenizer.eos_token_id]
    plain_ids = tokenizer.encode("a", add_special_tokens=False)
    complete_ids = tokenizer.encode("a", add_special_tokens=True)
    return {
        "tokens": tokens,
        "types": types,
        "special": _find_special(tokenizer, ends),
        "adds_bos": bos != [None] and complete_ids[:1] == bos and plain_ids[:1] != bos,
        "adds_eos": eos != [None] and complete_ids[-1:] == eos and plain_ids[-1:] != eos,
        "template": tokenizer.chat_template,
        "notes": _list_hidden(tokenizer),
        "strips_after": any(token.rstrip for token in tokenizer.added_tokens_decoder.values()),
    }


def _score_tokens(tokens: Sequence[str], pairs: Sequence[tuple[str, ...]]) -> list[float]:
    """Computes SentencePiece's score of each token. By scores llama.cpp merges as `pairs` do.

    The score is minus the rank of the first pair that makes the token. Tokens that no pair makes
    get the lowest score.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)  # several pairs may make one token
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _list_tokens(
    tokenizer: Any, vocab_size: int, model: Mapping[str, Any]
) -> tuple[list[str], list[int]]:
    """Lists the token of each row of the embedding.

    Returns:
        (tokens, a `gguf.TokenType` for each). A row without a token gets a name that no text has.
    """
    token_of = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    types = gguf.TokenType
    tokens = list[str]()
    kinds = list[int]()
    for token_id in range(vocab_size):
        token = token_of.get(token_id, f"[PAD{token_id}]")
        if token_id not in token_of:
            kind = types.UNUSED
        elif token_id in added and (added[token_id].special or _looks_special(token)):
            if token == model.get("unk_token"):
                kind = types.UNKNOWN
            else:
                kind = types.CONTROL
        elif token_id in added:
            token = token.replace(SPACE, " ")
            kind = types.USER_DEFINED
        elif token == model.get("unk_token"):
            kind = types.UNKNOWN
        elif model.get("byte_fallback") and _is_byte(token):
            kind = types.BYTE
        else:
            kind = types.NORMAL
        tokens.append(token)
        kinds.append(int(kind))
    return tokens, kinds


def _looks_special(token: str) -> bool:
    """Whether an added token is written like a special one, as llama.cpp's converter judges it.

    Some tokenizers, such as Gemma's, do not call all of these tokens special.

    >>> _looks_special("<|im_end|>"), _looks_special("<unused7>"), _looks_special("<tool_call>")
    (True, True, False)
    """
    marks = (
        ("<|", "|>"),
        ("<\uff5c", "\uff5c>"),
        ("<unused", ">"),
        ("<start_of_", ">"),
        ("<end_of_", ">"),
    )
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        token.startswith(start) and token.endswith(end) for start, end in marks
    )


def _list_hidden(tokenizer: Any) -> tuple[str, ...]:
    """Names the added tokens that transformers prints and llama.cpp does not.

    Returns a tuple of one sentence; empty if there are no such tokens.
    """
    added = tokenizer.added_tokens_decoder.values()
    hidden = [
        token.content for token in added if not token.special and _looks_special(token.content)
    ]
    if not hidden:
        return ()
    shown = ", ".join(hidden[:3])
    if len(hidden) <= 3:
        names = shown
    else:
        names = f"{shown} and {len(hidden) - 3:,} more"
    return (
        f"GGUF calls {names} control tokens, as llama.cpp's own converter does for their looks: "
        "llama.cpp prints them only with --special",
    )


def _is_byte(token: str) -> bool:
    """Whether a token of SentencePiece stands for one byte.

    >>> _is_byte("<0x0A>"), _is_byte("<0xZZ>")
    (True, False)
    """
    return re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _find_special(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """Finds the ids of special tokens: {"bos", "eos", "unk", "pad", "eot" or "eom": id}.

    Up to two of `ends`, the ids of the tokens that end an answer, that are not EOS become "eot" and
    "eom".
    """
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    if ends and ids["eos"] not in ends:
        ids["eos"] = ends[0]
    other_ends = [token_id for token_id in ends if token_id != ids["eos"]]
    ids |= dict(zip(("eot", "eom"), other_ends[:2], strict=False))  # there may be fewer than two
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _list_steps(section: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Lists the steps of a section of tokenizer.json, with nested sequences laid out flat.

    `section`: the pre-tokenizer or the normalizer; empty if it is None.
    """
    if section is None:
        return []
    if section["type"] != "Sequence":
        return [section]
    inner = section.get("pretokenizers") or section.get("normalizers") or []
    return [step for each in inner for step in _list_steps(each)]


def _name_pre_tokenizer(
    tokenizer_json: Mapping[str, Any],
    steps: Iterable[Mapping[str, Any]],
    *,
    has_merges: bool,
    folder: Path,
) -> str:
    """Finds llama.cpp's name for how a byte-level tokenizer cuts a text into words.

    Args:
        tokenizer_json: The content of tokenizer.json.
        steps: The steps of its pre-tokenizer.
        has_merges: Whether its BPE has any merges.
        folder: The tokenizer's folder, for errors.

    Raises:
        UserError: llama.cpp has no name for it.
    """
    if not has_merges:
        return "gpt-2"  # every byte is a token: nothing depends on where a text is cut
    cuts: list[str] = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            cuts += step["pattern"].values()
        elif step["type"] == "Digits" and step["individual_digits"]:
            cuts.append("Digits")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            if step["use_regex"]:  # else this step cuts nothing
                cuts.append("ByteLevel")
        else:
            cuts.append(f"{step['type']} with other settings")
    all_cuts = " ".join(cuts)
    key = (all_cuts, bool(tokenizer_json["model"].get("ignore_merges")))
    normalizers = {step["type"] for step in _list_steps(tokenizer_json.get("normalizer"))}
    if key in PRE_TOKENIZERS and normalizers in NORMALIZERS:
        return PRE_TOKENIZERS[key]
    after = ""
    if normalizers not in NORMALIZERS:
        after = f" after {' and '.join(sorted(normalizers))}"
    raise UserError(
        f"{folder}: llama.cpp is not known to cut a text as this tokenizer does "
        f"({all_cuts[:60]!r}{after}); name its pre-tokenizer with --gguf-pre-tokenizer, or export "
        "safetensors"
    )


def _find_doubts(vocabulary: Mapping[str, int], pairs: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Finds two tokens that llama.cpp merges, and this tokenizer does not.

    llama.cpp merges any two tokens that make a third one. A tokenizer that was not made by
    SentencePiece may have no such merge.

    Args:
        vocabulary: {token: id}.
        pairs: The tokenizer's merges.

    Returns:
        A tuple of one sentence, on the first such tokens; empty if there are none.
    """
    for token in vocabulary:
        if not _is_byte(token):
            for border in range(1, len(token)):
                first = token[:border]
                second = token[border:]
                if first in vocabulary and second in vocabulary and (first, second) not in pairs:
                    return (
                        f"llama.cpp may cut some texts otherwise: it merges {first!r} with "
                        f"{second!r}, which this tokenizer never does",
                    )
    return ()


def write_tokenizer(writer: Any, vocabulary: GgufVocabulary) -> None:
    """Adds `vocabulary` to a `gguf.GGUFWriter`."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.adds_space is not None:
        writer.add_add_space_prefix(vocabulary.adds_space)
    for name, token_id in vocabulary.special.items():  # bos, eos, eot, eom, unk, pad
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    template = vocabulary.template
    if isinstance(template, str) and template:
        writer.add_chat_template(template)
    elif template:
        writer.add_chat_template(
            [{"name": name, "template": text} for name, text in template.items()]
        )
