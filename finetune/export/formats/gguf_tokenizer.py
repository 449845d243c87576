"""A tokenizer as llama.cpp reads it: the vocabulary, how a text is cut before it is merged, and the
special tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from finetune.constants import GENERATION_FILE
from finetune.errors import UserError
from finetune.files.json_files import read_json_object

SPACE = "\u2581"  # SentencePiece writes it for a space
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
# (how tokenizer.json cuts a text, whether a whole word in the vocabulary is taken unmerged) ->
# llama.cpp's name for it. Source: llama-vocab.cpp, which has the expressions of each name.
PRE_TOKENIZERS: Mapping[tuple[str, bool], str] = {
    ("ByteLevel", False): "gpt-2",
    ("Digits ByteLevel", False): "smollm",
    (f"{CONTRACTIONS}|{END % '{1,3}'}", True): "llama-bpe",
    (f"{CONTRACTIONS}|{END % '{1,3}'}", False): "dbrx",
    (f"{CONTRACTIONS}|{END % ''}", False): "qwen2",
    (CASES % ("", "", ""), True): "tekken",
    (CASES % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", "{1,3}"), False): "gpt-4o",
}
# llama.cpp wants one; of words that no merge makes, this one never applies
NO_MERGES = ["never merged"]
# of byte-level tokenizers; llama.cpp takes a text as it is, which mostly is NFC
NORMALIZERS = ({"NFC"}, set[str]())


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer in llama.cpp's terms. Returned by `describe_tokenizer`."""

    # "llama": SentencePiece's BPE; "gpt2": byte-level BPE; "gemma4": the first with merges
    model: str
    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    # of SentencePiece: the pair with the highest score is merged first
    scores: list[float] | None = None
    merges: list[str] | None = None  # of byte-level BPE
    adds_space: bool | None = None  # of SentencePiece, in front of a text
    special: dict[str, int] = field(default_factory=dict)  # "bos" -> id
    adds_bos: bool = False
    adds_eos: bool = False
    template: Any = None
    strips_after: bool = False  # whether special tokens take the spaces after them, as Phi-3's do
    notes: tuple[str, ...] = ()  # what llama.cpp does otherwise
    doubts: tuple[str, ...] = ()  # where llama.cpp may cut a text otherwise


def describe_tokenizer(
    tokenizer: Any, rows: int, folder: Path, pre_tokenizer: str | None
) -> GgufVocabulary:
    """Describes a tokenizer of transformers, loaded from `folder`, for a model whose embedding has
    `rows` rows.

    Args:
        pre_tokenizer: llama.cpp's name for how a text is cut, where tokenizer.json is not one of
            those known here.

    Raises `UserError` where llama.cpp has no tokenizer of its kind.
    """
    described = _read_bpe(tokenizer, rows, folder)
    model = described["model"]
    pairs = [
        tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair)
        for pair in model["merges"]
    ]
    common = _describe_tokens(tokenizer, rows, folder, model)
    parts = _list_parts(described.get("pre_tokenizer"))
    kinds = {part["type"] for part in parts}
    if not model.get("byte_fallback") and "ByteLevel" in kinds:
        pre = pre_tokenizer or _name_pre_tokenizer(
            described, parts, has_merges=bool(pairs), folder=folder
        )
        merges = [" ".join(map(_spell, pair)) for pair in pairs] or NO_MERGES
        return GgufVocabulary("gpt2", pre, merges=merges, **common)
    if not model.get("byte_fallback") or kinds - {"Metaspace", "Split"}:
        raise UserError(
            f"{folder}: a BPE that is neither byte-level nor SentencePiece's; export safetensors"
        )
    doubts = _find_doubts(model["vocab"], set(pairs))
    adds_space = tokenizer.tokenize("a")[0].startswith(SPACE)
    # Gemma's kind, whose merges newer versions of llama.cpp follow.
    if doubts and common["adds_bos"] and not adds_space:
        return GgufVocabulary(
            "gemma4", "gemma4", merges=[" ".join(pair) for pair in pairs], **common
        )
    scores = _score_tokens(common["tokens"], pairs)
    return GgufVocabulary(
        "llama", "default", scores=scores, adds_space=adds_space, doubts=doubts, **common
    )


def _read_bpe(tokenizer: Any, rows: int, folder: Path) -> dict[str, Any]:
    """Returns the content of tokenizer.json; `UserError` unless it is a BPE, all of whose ids are
    below `rows`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        described: dict[str, Any] = json.loads(backend.to_str())
    else:
        described = {}
    kind = (described.get("model") or {}).get("type")
    if kind != "BPE":
        kind = kind or type(tokenizer).__name__
        raise UserError(
            f"{folder}: a tokenizer of the kind {kind}, which is not exported as GGUF; export "
            "safetensors"
        )
    if max(tokenizer.get_vocab().values()) >= rows:
        raise UserError(
            f"{folder}: the tokenizer has ids beyond the model's {rows:,} embeddings; export its "
            "own one"
        )
    return described


def _describe_tokens(
    tokenizer: Any, rows: int, folder: Path, model: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of `GgufVocabulary` that every kind of tokenizer has."""
    tokens, types = _list_tokens(tokenizer, rows, model)
    bos = [tokenizer.bos_token_id]
    eos = [tokenizer.eos_token_id]
    plain = tokenizer.encode("a", add_special_tokens=False)
    complete = tokenizer.encode("a", add_special_tokens=True)
    return {
        "tokens": tokens,
        "types": types,
        "special": _find_special(tokenizer, folder),
        "adds_bos": bos != [None] and complete[:1] == bos != plain[:1],
        "adds_eos": eos != [None] and complete[-1:] == eos != plain[-1:],
        "template": tokenizer.chat_template,
        "notes": _list_hidden(tokenizer),
        "strips_after": any(token.rstrip for token in tokenizer.added_tokens_decoder.values()),
    }


def _score_tokens(tokens: Sequence[str], pairs: Sequence[tuple[str, ...]]) -> list[float]:
    """SentencePiece's score of each token: minus the place of the first of the merges `pairs` that
    makes it.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)  # several pairs may make one token
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _spell(token: str) -> str:
    # a space separates the two of a pair; of byte-level BPE none has one
    return token.replace(" ", "\u0120")


def _list_tokens(
    tokenizer: Any, rows: int, model: Mapping[str, Any]
) -> tuple[list[str], list[int]]:
    """The token of each row of the embedding, and its kind; rows without one get a name that no
    text has.
    """
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    types = gguf.TokenType
    tokens = list[str]()
    kinds = list[int]()
    for number in range(rows):
        token = names.get(number, f"[PAD{number}]")
        if number not in names:
            kind = types.UNUSED
        elif number in added and (added[number].special or _looks_special(token)):
            if token == model.get("unk_token"):
                kind = types.UNKNOWN
            else:
                kind = types.CONTROL
        elif number in added:
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
    """Whether an added token is a mark, though its tokenizer does not call it special, as in
    Gemma's.

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
    """At most one sentence: the added tokens that llama.cpp does not print, though transformers
    does.
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
    """
    >>> _is_byte("<0x0A>"), _is_byte("<0xZZ>")
    (True, False)
    """
    return re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _find_special(tokenizer: Any, folder: Path) -> dict[str, int]:
    """The ids of special tokens.

    What ends an answer beside eos, as generation_config.json says, is "eot" and "eom".
    """
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    ends = read_json_object(folder / GENERATION_FILE).get("eos_token_id")
    ends = [
        number for number in (ends if isinstance(ends, list) else [ends]) if isinstance(number, int)
    ]
    if ends and ids["eos"] not in ends:
        ids["eos"] = ends[0]
    others = (number for number in ends if number != ids["eos"])
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    return {key: number for key, number in ids.items() if number is not None}


def _list_parts(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        inner = pre_tokenizer.get("pretokenizers", [])
    else:
        inner = [pre_tokenizer]
    return [
        part
        for each in inner
        for part in (_list_parts(each) if each["type"] == "Sequence" else [each])
    ]


def _name_pre_tokenizer(
    described: Mapping[str, Any],
    parts: Iterable[Mapping[str, Any]],
    *,
    has_merges: bool,
    folder: Path,
) -> str:
    """llama.cpp's name for how a byte-level tokenizer cuts a text.

    Raises `UserError` where it has none.
    """
    if not has_merges:
        return "gpt-2"  # every byte is a token: nothing depends on where a text is cut
    names: list[str] = []
    for part in parts:
        if part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            names += part["pattern"].values()
        elif part["type"] == "Digits" and part["individual_digits"]:
            names.append("Digits")
        elif part["type"] == "ByteLevel" and not part["add_prefix_space"]:
            names += ["ByteLevel"] if part["use_regex"] else []
        else:
            names.append(f"{part['type']} with other settings")
    cut = (" ".join(names), bool(described["model"].get("ignore_merges")))
    normalizers = {part["type"] for part in _list_normalizers(described.get("normalizer"))}
    if cut in PRE_TOKENIZERS and normalizers in NORMALIZERS:
        return PRE_TOKENIZERS[cut]
    more = ""
    if normalizers not in NORMALIZERS:
        more = f" after {' and '.join(sorted(normalizers))}"
    raise UserError(
        f"{folder}: llama.cpp is not known to cut a text as this tokenizer does "
        f"({cut[0][:60]!r}{more}); name its pre-tokenizer with --gguf-pre-tokenizer, or export "
        "safetensors"
    )


def _list_normalizers(normalizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if normalizer is None:
        return []
    if normalizer["type"] == "Sequence":
        inner = normalizer.get("normalizers")
    else:
        inner = [normalizer]
    return list(inner or [])


def _find_doubts(vocabulary: Mapping[str, int], pairs: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Finds a text that llama.cpp may cut otherwise: it merges any two tokens whose text is a
    token, which a tokenizer that SentencePiece has not made may not.
    """
    for token in vocabulary:
        if not _is_byte(token):
            for cut in range(1, len(token)):
                first = token[:cut]
                second = token[cut:]
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
    for name, number in vocabulary.special.items():  # bos, eos, eot, eom, unk, pad
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.template:
        named = vocabulary.template
        writer.add_chat_template(
            named
            if isinstance(named, str)
            else [{"name": name, "template": each} for name, each in named.items()]
        )
