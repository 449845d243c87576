"""The run's tokenizer with the recipe's tokens, and its compiled chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.config.methods import ADDED_MASK
from finetune.config.pretrained import (
    Vocabulary,
    find_file,
    load_config,
    refuse_other_path,
    text_config_of,
)
from finetune.config.schema import Data, DatasetSource, Model, Recipe, Turns
from finetune.constants import (
    CUTTING_KEYS,
    GENERATION_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    grow_rows,
)
from finetune.data.environments import Environments, choose_environment, describe_environments
from finetune.data.images import ImageProcessor, split_parts
from finetune.data.messages import OWN_VARIABLES, THINKING_END, BadRow, Message, Tool, describe_tool
from finetune.data.template_sandbox import DATE_VARIABLE, compile_template
from finetune.errors import UserError, first_line
from finetune.files.json_files import read_json_object, refuse_lfs_pointer
from finetune.files.network import go_offline_without_network, hub_error

FOLDER = Path(__file__).parent / "templates"
# A template's text is part of a checkpoint's fingerprints, so a run that resumes notices if one of
# these files has changed.
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
}
# For tokenizers without a chat template. The only special token that it writes is EOS.
PLAIN = TEMPLATES["plain"]


def read_template(name: str) -> str:
    """Returns the Jinja text for a value of the key `chat_template`.

    `name`: a name in `TEMPLATES` or `ALIASES`, the path of a file, or the text itself.

    Raises `UserError` for a file that does not exist or cannot be read.
    """
    known = TEMPLATES | {alias: TEMPLATES[target] for alias, target in ALIASES.items()}
    if name in known:
        return known[name]
    if "{" in name:
        return name
    path = Path(name)
    if not path.is_file():
        near = name.replace("_", "-")
        if near in known:
            close = [near]
        else:
            close = get_close_matches(near, known)
        if close:
            hint = f"; did you mean {' or '.join(close)}?"
        else:
            hint = f", which are {', '.join(sorted(known))}"
        raise UserError(
            f"chat_template: {name}: not a file, not Jinja text, and not one of the named "
            f"templates{hint}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template: {name}: cannot be read: {error}") from None


# Templates whose text other tools tokenize separately from the BOS token before it.
APART_FROM_BOS = ("alpaca", "inst", "inst-torchtune")
BOS_OF_TEMPLATE = "{{- bos_token -}}"
SPACE_AFTER_BOS = "{{- bos_token + ' ' -}}"


def fit_template(name: str, tokenizer: Any) -> str:
    """Returns the Jinja text of `read_template`, adapted to a tokenizer.

    Other tools tokenize the text of APART_FROM_BOS separately from BOS. A tokenizer such as Llama
    2's puts a space before a separate text, but none behind BOS. The template then writes the space
    itself.
    """
    template = read_template(name)
    bos = tokenizer.bos_token
    if name not in APART_FROM_BOS or not bos:
        return template
    start = "[INST]" if "[INST]" in template else "Below"
    alone, with_bos, with_bos_and_space = (
        tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens
        for text in (start, f"{bos}{start}", f"{bos} {start}")
    )
    # The first token of the latter two is BOS.
    if with_bos[1:] != alone and with_bos_and_space[1:] == alone:
        template = template.replace(BOS_OF_TEMPLATE, SPACE_AFTER_BOS)
    return template


# Generation stops at each of these that the tokenizer has, but at <|end|> only without <|return|>:
# gpt-oss ends an answer with the latter, and the thought before the answer with the former.
USUAL_STOP_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def load_tokenizer(
    model: Model,
    data: Data,
    tools: Sequence[str] = (),
    environments: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Loads the fast tokenizer of a recipe, with the recipe's tokens and chat template.

    It also sets the attributes `stop_tokens`, `images`, `tools` and `environments`, which
    `make_renderer` reads.

    Args:
        model: Names the tokenizer by `tokenizer_name_or_path`, else by the model.
        data: Has the chat template.
        tools: Functions that prompts describe, each as FILE.py:NAME.
        environments: Value of the rows' column `environment` -> the environment whose methods
            prompts describe.

    Raises:
        UserError: There is no tokenizer, or none with a fast (Rust) implementation; the recipe's
            tokens do not fit the tokenizer; or a function has no type hints or no docstring.
    """
    tokenizer = _load_unchanged(model)
    _add_tokens(tokenizer, model)
    tokenizer.stop_tokens = (*model.eot_tokens, *_read_stop_tokens(model, tokenizer))
    tokenizer.images = ImageProcessor(model, tokenizer)
    tokenizer.tools = tuple(map(describe_tool, tools))
    tokenizer.environments = describe_environments(environments, tokenizer.tools)
    if data.chat_template is not None:
        tokenizer.chat_template = fit_template(data.chat_template, tokenizer)
    return tokenizer


def plan_vocabulary(tokenizer: Any, model: Model) -> Vocabulary | None:
    """Plans how the recipe's tokens change the model's embedding and config.

    Returns None if the recipe names no `added_tokens` and no `special_tokens`.

    `tokenizer`: from `load_tokenizer`, with these tokens.
    """
    special = model.special_tokens or {}
    if not (model.added_tokens or special):
        return None
    rows = grow_rows(
        text_config_of(load_config(model)).vocab_size,
        len(tokenizer),
        model.pad_vocab_to_multiple_of,
    )
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in special.items()
        if name != "unk_token"
    }
    return Vocabulary(
        known=len(_load_unchanged(model)), tokens=len(tokenizer), rows=rows, token_ids=ids
    )


def refuse_unnamed_tokens(recipe: Recipe) -> None:
    """Raises `UserError` for new rows that only `special_tokens` asks for, where the plan and the
    rules must know of them.

    Beside adapters, embedding and head would be trained whole. A reference lacks such rows. The
    plan and the rules read no tokenizer: they count on new rows if `added_tokens` names the token.
    """
    special = recipe.model.special_tokens
    if not special:
        return
    if recipe.lora.use_peft:
        reason = (
            "so that embedding and head would be trained whole beside the adapters; choose a token "
            "that the tokenizer has, or name this one in added_tokens too"
        )
    elif recipe.has_reference:
        reason = (
            "and so does the reference of beta, which is read from files; choose a token that the "
            "tokenizer has, or set beta: 0"
        )
    else:
        return
    unchanged = _load_unchanged(recipe.model)
    for name, token in special.items():
        if find_id(unchanged, token) is None and token not in recipe.model.added_tokens:
            raise UserError(
                f"{recipe.place_of('special_tokens')}: special_tokens: {name}: {token}: the "
                f"tokenizer lacks it, {reason}"
            )


def refuse_other_tokenizer(tokenizer: Any, teacher: Model) -> None:
    """Raises `UserError` if the teacher's tokenizer differs from `tokenizer`.

    They differ if they have different tokens, or cut a text into different tokens.
    """
    teacher_tokenizer = _load_unchanged(teacher)
    vocabulary = tokenizer.get_vocab()  # token -> id
    teacher_vocabulary = teacher_tokenizer.get_vocab()
    different = vocabulary.items() ^ teacher_vocabulary.items()
    parts, teacher_parts = (
        json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, teacher_tokenizer)
    )
    changed = [
        part
        for part in ("model", "normalizer", "pre_tokenizer")
        if parts.get(part) != teacher_parts.get(part)
    ]
    if different:
        token, index = min(different, key=lambda item: item[::-1])  # the one with the lowest id
        whose = "teacher" if teacher_vocabulary.get(token) == index else "model"
        difference = f"{token!r} is token {index} only of the {whose}'s tokenizer"
    elif changed:
        difference = (
            "the tokens are the same, but a text is cut into others "
            f"({', '.join(changed)} in tokenizer.json)"
        )
    else:
        return
    raise UserError(
        f"{teacher.model_name_or_path}: its tokenizer is not that of the model that is trained: "
        f"{difference}; name a teacher of the same family, with the same tokenizer"
    )


def _add_tokens(tokenizer: Any, model: Model) -> None:
    """Adds the recipe's `added_tokens` and `special_tokens`, and makes `eot_tokens` special.

    Raises `UserError` for an empty token, one of `eot_tokens` that the tokenizer does not have, or
    a `bos_token` that is not the one that tokenizer.json writes.
    """
    from tokenizers import AddedToken

    special = model.special_tokens or {}
    for key, tokens in (("added_tokens", model.added_tokens), ("special_tokens", special.values())):
        if any(not token.strip() for token in tokens):
            raise UserError(f"{key}: an empty token; write its text, such as <|tool|>")
    written_bos = encode_bos(tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in model.added_tokens])
    tokenizer.add_special_tokens(special)
    for token in model.eot_tokens:
        if find_id(tokenizer, token) is None:
            raise UserError(
                f"eot_tokens: {token}: not a token of this tokenizer; name it in added_tokens too"
            )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=True) for token in model.eot_tokens]
    )
    recipe_bos = None
    if "bos_token" in special:
        recipe_bos = [find_id(tokenizer, special["bos_token"])]
    if written_bos and recipe_bos is not None and encode_bos(tokenizer) != recipe_bos:
        raise UserError(
            f"special_tokens: bos_token: tokenizer.json writes {tokenizer.decode(written_bos)} "
            "before every text, whatever the bos_token is; leave it as it is, or change "
            "tokenizer.json"
        )


def find_id(tokenizer: Any, token: str) -> int | None:
    """Returns the id of a token; None if the tokenizer does not have the token.

    It does not use `get_vocab`, which copies the whole vocabulary: 0.3 s for Llama 3's.
    """
    token_id: int | None = tokenizer.convert_tokens_to_ids(token)
    # A tokenizer gives None, or the id of its unknown token, for a token that it does not have.
    if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token:
        return None
    return token_id


def find_mask_id(tokenizer: Any, mask_token: str | int | None) -> int:
    """Returns the id of the token that replaces masked tokens.

    It is the recipe's `mask_token` (a token or an id); if that is None, the tokenizer's own. Raises
    `UserError` if the tokenizer does not have the token.
    """
    advice = (
        f"name one of its tokens, or add one: added_tokens: ['{ADDED_MASK}'] with mask_token: "
        f"'{ADDED_MASK}'"
    )
    if mask_token is None:
        if tokenizer.mask_token_id is None:
            raise UserError(f"mask_token: the tokenizer has no mask token of its own; {advice}")
        return int(tokenizer.mask_token_id)
    if isinstance(mask_token, str):
        mask_id = find_id(tokenizer, mask_token)
    else:
        mask_id = mask_token if 0 <= mask_token < len(tokenizer) else None
    if mask_id is None:
        raise UserError(f"mask_token: {mask_token}: not a token of this tokenizer; {advice}")
    return int(mask_id)


def encode_bos(tokenizer: Any) -> list[int]:
    """Returns the ids that a tokenizer itself writes before plain text; may be empty."""
    bos_ids, _ = _encode_around(tokenizer)
    return bos_ids


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Encodes a text without a chat template, as the data does: behind what the tokenizer itself
    writes before plain text, and without what it writes after it, such as EOS.
    """
    bos_ids = encode_bos(tokenizer)
    text = text.removeprefix(tokenizer.decode(bos_ids))
    return [*bos_ids, *tokenizer.encode(text, add_special_tokens=False, verbose=False)]


def _encode_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer itself writes before plain text, and after it."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    wrapped = tokenizer.encode("a", add_special_tokens=True)
    if not bare or bare[0] not in wrapped:
        return [], []
    start = wrapped.index(bare[0])
    return wrapped[:start], wrapped[start + len(bare) :]


def _load_unchanged(model: Model) -> Any:
    """Loads a recipe's tokenizer as published, without the recipe's tokens and template.

    Raises `UserError` if it cannot be loaded, or is not a fast tokenizer.
    """
    from transformers import AutoTokenizer

    name = model.tokenizer_name_or_path or model.model_name_or_path
    if name is None:
        raise UserError("no tokenizer; set tokenizer_name_or_path")
    if Path(name).exists() and not Path(name).is_dir():
        raise UserError(f"{name}: a folder with tokenizer.json is expected, this is a file")
    revision = None
    if model.tokenizer_name_or_path is None:
        revision = model.model_revision
    if not Path(name).is_dir():
        go_offline_without_network()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # whatever the hub, the network or a folder's files raise
        raise _describe_failure(name, revision, error) from None
    if not tokenizer.is_fast:
        raise UserError(
            f"{name}: its tokenizer has no tokenizer.json, which is needed to mask exactly what is "
            "trained"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    # transformers would save these in a checkpoint's tokenizer_config.json. The first two only say
    # how the tokenizer was loaded just now.
    for key in ("is_local", "local_files_only", *CUTTING_KEYS[TOKENIZER_CONFIG]):
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def _describe_failure(name: str, revision: str | None, error: Exception) -> UserError:
    """Explains why transformers could not load the tokenizer of the folder or hub name `name`."""
    if not Path(name).is_dir():
        # transformers wraps the hub's error. The cause shows whether the hub is unreachable, or the
        # repository gated or unknown.
        if isinstance(error.__cause__, Exception):
            cause = error.__cause__
        else:
            cause = error
        return hub_error(name, cause, what="its tokenizer", revision=revision)
    if not (Path(name) / TOKENIZER_FILE).is_file():
        refuse_other_path(Path(name))
        return UserError(
            f"{name}: has no tokenizer.json; name a folder that has one, or a hub name"
        )
    try:
        refuse_lfs_pointer(Path(name) / TOKENIZER_FILE)
    except UserError as pointer:
        return pointer
    reason = first_line(error)
    return UserError(f"{name}: its tokenizer cannot be loaded: {reason}")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A fast tokenizer with what is needed to encode a piece of a text.

    Returned by `make_encoder`.
    """

    backend: Any  # tokenizers.Tokenizer
    bos_ids: list[int]  # what the tokenizer itself writes before plain text; may be empty
    # tokens that it looks for in a text before it cuts the rest; includes the special tokens
    added_tokens: tuple[str, ...]
    # those of them that take the white space behind them too (rstrip), as Phi-3's do
    stripping_tokens: tuple[str, ...]
    # the ids of a newline if the tokenizer puts a space before every text, as SentencePiece does;
    # otherwise empty
    newline_ids: list[int]
    pad_id: int | None = None  # from `find_pad_id`


def make_encoder(tokenizer: Any) -> Encoder:
    """Makes the encoder of a fast transformers tokenizer, which must neither truncate nor pad."""
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    newline, with_newline = (
        backend.encode(text, add_special_tokens=False).ids for text in ("\n", "\na")
    )
    tokens = backend.get_added_tokens_decoder().values()
    added = tuple(token.content for token in tokens)
    stripping = tuple(token.content for token in tokens if token.rstrip)
    # A tokenizer that puts a space before every text puts it before "a", but not between "\n" and
    # "a".
    newline_ids = [] if with_newline == newline + bare else newline
    bos_ids = encode_bos(tokenizer)
    return Encoder(backend, bos_ids, added, stripping, newline_ids, find_pad_id(tokenizer))


def find_pad_id(tokenizer: Any) -> int | None:
    """Returns the id that fills up rows: that of the pad token, else of the end of text.

    Returns None if the tokenizer has neither.
    """
    pad: int | None = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return getattr(tokenizer, "eos_token_id", None)
    return pad


# The characters on either side of a border that are encoded to see whether a token crosses it.
CONTEXT_CHARACTERS = 64


@lru_cache(maxsize=4096)
def keeps_border(backend: Any, before: str, after: str) -> bool:
    """Whether no token crosses the border of two texts when they are encoded as one.

    If `before` alone has n tokens, the n-th token of both texts together must be at the same place
    as the last token of `before`. True if `before` has no tokens.
    """
    alone = backend.encode(before, add_special_tokens=False)
    together = backend.encode(before + after, add_special_tokens=False)
    return bool(alone.offsets[-1:] == together.offsets[: len(alone.ids)][-1:])


def find_stop_token_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of `find_stop_tokens`, sorted: a token that ends an answer."""
    return sorted(tokenizer.convert_tokens_to_ids(find_stop_tokens(tokenizer)))


def find_stop_tokens(tokenizer: Any) -> list[str]:
    """Lists the tokens at which generation stops, sorted.

    They are the end of text, USUAL_STOP_TOKENS and the `stop_tokens` from `load_tokenizer`, as far
    as the tokenizer has them.
    """
    stops = set(USUAL_STOP_TOKENS)
    if find_id(tokenizer, "<|return|>") is not None:
        stops.remove("<|end|>")
    stops.update(getattr(tokenizer, "stop_tokens", ()))
    if tokenizer.eos_token is not None:
        stops.add(tokenizer.eos_token)
    return sorted(token for token in stops if find_id(tokenizer, token) is not None)


def _read_stop_tokens(model: Model, tokenizer: Any) -> list[str]:
    """Reads the tokens at which the model's generation_config.json stops.

    Empty if there is no such file, or no model.
    """
    if model.model_name_or_path is None:
        return []
    file = find_file(model.model_name_or_path, GENERATION_FILE, model.model_revision)
    if file is None:
        return []
    stops = read_json_object(file).get("eos_token_id")  # an export reports a damaged file
    ids = stops if isinstance(stops, list) else [stops]
    return [
        str(token)
        for token in tokenizer.convert_ids_to_tokens([i for i in ids if isinstance(i, int)])
        if token
    ]


ASKS_FOR_DATE = "strftime_now"  # the function by which a template asks for today's date
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# matches a template that reads an Alpaca row's input
INPUT = re.compile(r"""message(\.input\b|\[['"]input['"]\])""")
# Jinja's errors, and what the code of a template can raise besides.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
    ArithmeticError,
    MemoryError,
)
Tools = tuple[Tool, ...]
Span = tuple[int, int]  # start and end in a text, in characters; the end is exclusive


@dataclass(frozen=True, slots=True, eq=False)
class Renderer:
    """A tokenizer's chat template, with what is needed to render conversations by it.

    Returned by `make_renderer`.
    """

    template: str
    compiled: jinja2.Template  # `template`, compiled in a sandbox
    # what the template can read: special tokens such as bos_token, chat_template_kwargs, and the
    # date that it gets as today's
    variables: dict[str, Any]
    special_tokens: re.Pattern[str]  # matches any of the tokenizer's special tokens
    # matches consecutive special tokens up to the first at which generation stops
    up_to_stop: re.Pattern[str]
    bos: str  # what the tokenizer itself writes before plain text; may be empty
    end: str  # what the tokenizer itself writes after plain text; may be empty
    # the EOS token, written after plain text so that the model learns to stop; empty without one
    eos: str
    has_template: bool  # the tokenizer has a chat template; otherwise PLAIN is used
    has_markers: bool  # the template has {% generation %} markers
    assistant_only: bool  # only the assistant's turns are trained on
    reads_input: bool  # the template writes an Alpaca row's input separately from the instruction
    turns: Turns = "auto"  # the recipe's key
    backend: Any = None  # tokenizers.Tokenizer, to show a token in a finding
    generation_prompt: str = ""  # what the template writes before the assistant's content
    # what the template writes after that content, up to the token at which generation stops
    end_of_turn: str = ""
    # what the template writes between prompt and content if an answer has no reasoning; None if the
    # template never writes reasoning, or its generation prompt already closes it
    unthinking: str | None = None
    train_on_reasoning: bool = True
    response_template: Any = None  # how transformers reads a reply back as a message
    tools: Tools = ()  # the recipe's tools, for prompts of rows without tools of their own
    environments: Environments = field(default_factory=dict)  # with tools for such prompts too
    images: ImageProcessor | None = None  # None: the tokenizer is not from `load_tokenizer`
    answers_apart: bool = False  # prompt and answers are encoded as separate texts
    # the template gets each content as a list of parts, as in conversations with images
    reads_parts: bool = False


def make_renderer(
    tokenizer: Any,
    assistant_only: bool,
    date: str | None = None,
    turns: Turns = "auto",
    train_on_reasoning: bool = True,
) -> Renderer:
    """Makes the renderer of a tokenizer and its chat template.

    Args:
        tokenizer: The tokenizer, from `load_tokenizer`.
        assistant_only: Whether only the assistant's turns are trained on.
        date: The date that a template gets as today's, such as 2026-01-31; None: today.
        turns: How conversations become documents; the recipe's key.
        train_on_reasoning: Whether an answer's reasoning is trained on.

    Raises:
        UserError: The chat template is not valid Jinja.
    """
    template = tokenizer.chat_template or PLAIN
    if isinstance(template, dict):  # several templates by name
        template = template.get("default") or next(iter(template.values()))
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = _make_pattern(added | set(tokenizer.all_special_tokens))
    stop = _make_pattern(set(find_stop_tokens(tokenizer)))
    bos, end = _encode_around(tokenizer)
    renderer = Renderer(
        template=template,
        compiled=compile_template(template),
        variables=dict(tokenizer.special_tokens_map) | ({DATE_VARIABLE: date} if date else {}),
        special_tokens=re.compile(special),
        up_to_stop=re.compile(f"(?:(?!{stop})(?:{special}))*(?:{stop})"),
        bos=tokenizer.decode(bos),
        end=tokenizer.decode(end),
        eos=tokenizer.eos_token or "",
        has_template=bool(tokenizer.chat_template),
        has_markers=bool(GENERATION_MARKER.search(template)),
        assistant_only=assistant_only,
        reads_input=bool(INPUT.search(template)),
        turns=turns,
        backend=tokenizer.backend_tokenizer,
        train_on_reasoning=train_on_reasoning,
        response_template=getattr(tokenizer, "response_template", None),
        tools=getattr(tokenizer, "tools", ()),
        environments=getattr(tokenizer, "environments", {}),
        images=getattr(tokenizer, "images", None),
    )
    return _probe_turn(renderer)


def make_renderer_of(data: Data, tokenizer: Any) -> Renderer:
    """Makes the renderer that a recipe asks for; see `make_renderer`."""
    date = data.chat_template_date
    turns = data.turns
    return make_renderer(tokenizer, data.assistant_only_loss, date, turns, data.train_on_reasoning)


def add_variables(renderer: Renderer, variables: Mapping[str, Any] | None) -> Renderer:
    """Returns the renderer with more variables for its template, from chat_template_kwargs.

    `variables` replace those of the same name. Raises `BadRow` for a name that rendering itself
    sets.
    """
    if not variables:
        return renderer
    reserved = sorted(OWN_VARIABLES & variables.keys())
    if reserved:
        raise BadRow(f"chat_template_kwargs: {reserved[0]} is set by rendering itself; remove it")
    # The template gets plain JSON values.
    text = json.dumps(dict(variables), sort_keys=True, default=str)
    return _probe_turn(replace(renderer, variables=renderer.variables | json.loads(text)))


def renderer_of_source(renderer: Renderer, source: DatasetSource) -> Renderer:
    """Returns the renderer for the rows of an entry of `datasets`.

    It has the entry's `chat_template_kwargs` and `answers_apart`. Raises `BadRow` as
    `add_variables` does.
    """
    renderer = add_variables(renderer, source.chat_template_kwargs)
    if source.answers_apart:
        # A prompt that is a text of its own has BOS only if the tokenizer itself writes it before
        # every text.
        variables = renderer.variables | {"bos_token": renderer.bos}
        return _probe_turn(replace(renderer, answers_apart=True, variables=variables))
    return renderer


def choose_tools(renderer: Renderer, row: Mapping[str, Any]) -> Tools:
    """Returns the tools that the prompt of a row describes.

    They are the row's own tools; else the recipe's, with those of the row's environment if the
    recipe has environments. Raises `BadRow` if the row's environment is none of the recipe's.

    `row`: the row as rewards read it.
    """
    if row_tools := row.get("tools"):
        return tuple(row_tools)
    if not renderer.environments:
        return renderer.tools
    name = choose_environment(renderer.environments, row.get("columns", {}))
    return renderer.environments[name].tools  # with the recipe's tools


@lru_cache(maxsize=64)
def read_parts(renderer: Renderer) -> Renderer:
    """Returns the renderer for conversations with images: contents become lists of parts."""
    return _probe_turn(replace(renderer, reads_parts=True))


def _make_pattern(words: set[str]) -> str:
    """Makes a pattern that matches any of `words`, longer ones first; without words, nothing."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def asks_for_date(tokenizer: Any) -> bool:
    """Whether the text of the tokenizer's chat template depends on the day."""
    return ASKS_FOR_DATE in str(tokenizer.chat_template)


def _probe_turn(renderer: Renderer) -> Renderer:
    """Finds what the template writes around the assistant's content, by rendering an example.

    Returns the renderer with `generation_prompt`, `end_of_turn` and `unthinking` set. If the
    template rejects the example, they are "", "" and None.
    """
    user = {"role": "user", "content": "QUESTION"}
    answer = {"role": "assistant", "content": "ANSWER"}
    try:
        question = apply_template(renderer, [user])
        asked = apply_template(renderer, [user], add_generation_prompt=True)
        answered = apply_template(renderer, [user, answer])
        reasoned = apply_template(renderer, [user, {**answer, "reasoning_content": "REASONING"}])
    except BadRow:
        return replace(renderer, generation_prompt="", end_of_turn="", unthinking=None)
    prompt = asked.removeprefix(question)
    before, _, after = answered.rpartition("ANSWER")
    special = renderer.special_tokens.search(after)
    if special is None:
        end_of_turn = after.rstrip()
    else:
        stop = renderer.up_to_stop.match(after, special.start())
        end_of_turn = after[: (stop or special).end()]
    unthinking = None
    if "REASONING" in reasoned and not THINKING_END.search(prompt):
        # If the answer does not begin with the generation prompt, it only continues the question.
        unthinking = before.removeprefix(asked).removeprefix(question)
    return replace(
        renderer, generation_prompt=prompt, end_of_turn=end_of_turn, unthinking=unthinking
    )


def apply_template(
    renderer: Renderer,
    messages: list[Message],
    tools: Tools = (),
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Renders messages to a text, as transformers' `apply_chat_template` does.

    Raises `BadRow` if the template rejects the messages.
    """
    if renderer.reads_parts or tools or any(len(message) != 2 for message in messages):
        return _render(renderer, messages, tools, add_generation_prompt=add_generation_prompt)[0]
    # Messages of only a role and a content need none of transformers' conversions, which take half
    # of the time of its own call.
    try:
        return renderer.compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **renderer.variables,
        )
    except TEMPLATE_ERRORS as error:
        raise _make_rejection(messages, error) from None


def _make_rejection(messages: list[Message], error: Exception) -> BadRow:
    """Makes the error for messages that the template rejects with `error`."""
    if any(isinstance(message.get("content"), list) for message in messages):
        return BadRow(
            f"the chat template writes no images ({error}); leave chat_template out, so that the "
            "model's own is used"
        )
    return BadRow(f"the chat template rejects it: {error}")


def apply_marked_template(
    renderer: Renderer, messages: list[Message], tools: Tools
) -> tuple[str, list[Span]]:
    """Renders messages; returns the text, and the spans between its {% generation %} markers.

    Raises `BadRow` if the template rejects the messages.
    """
    return _render(renderer, messages, tools, return_assistant_tokens_mask=True)


def _render(
    renderer: Renderer, messages: list[Message], tools: Tools, **options: bool
) -> tuple[str, list[Span]]:
    """Renders messages with transformers' own function, to which `options` are passed.

    Returns the text, and the spans between {% generation %} markers if `options` ask for them; else
    an empty list. Raises `BadRow` if the template rejects the messages.
    """
    if renderer.reads_parts:
        messages = [message | {"content": split_parts(message["content"])} for message in messages]
    try:
        texts, spans = render_jinja_template(
            [messages],
            tools=list(tools) or None,
            chat_template=renderer.template,
            **options,
            **renderer.variables,
        )
    except TEMPLATE_ERRORS as error:
        raise _make_rejection(messages, error) from None
    return str(texts[0]), list(spans[0]) if spans else []
