"""The run's tokenizer with the recipe's tokens, and its chat template, compiled once for many
conversations.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.config.methods import ADDED_MASK
from finetune.config.pretrained import Vocabulary, load_config, refuse_other_path, text_config_of
from finetune.config.schema import Data, DatasetSource, Model, Turns
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
from finetune.data.template_sandbox import compile_template
from finetune.errors import UserError, first_line
from finetune.files.json_files import read_json_object
from finetune.files.network import go_offline_without_network, hub_error

FOLDER = Path(__file__).parent / "templates"
# A template's text is part of a checkpoint's fingerprints: a changed file is another template to a
# run.
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
# For tokenizers without a template and without special tokens for turns; of those it uses only the
# EOS token.
PLAIN = TEMPLATES["plain"]


def read_template(name: str) -> str:
    """Returns the Jinja text that the key `chat_template` means.

    `name`: a name of `TEMPLATES` or `ALIASES`, a file, or the text itself.

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


# Templates whose texts other tools tokenize apart from the BOS token before them.
APART_FROM_BOS = ("alpaca", "inst", "inst-torchtune")
BOS_OF_TEMPLATE = "{{- bos_token -}}"
SPACE_AFTER_BOS = "{{- bos_token + ' ' -}}"


def fit_template(name: str, tokenizer: Any) -> str:
    """Returns the Jinja text of `read_template` as a tokenizer needs it: with a space after the
    BOS token where the text is tokenized apart from it elsewhere, and the tokenizer puts a space
    before a text alone, but not behind BOS, as Llama 2's does.
    """
    template = read_template(name)
    bos = tokenizer.bos_token
    if name not in APART_FROM_BOS or not bos:
        return template
    start = "[INST]" if "[INST]" in template else "Below"
    alone, behind, spaced = (
        tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens
        for text in (start, f"{bos}{start}", f"{bos} {start}")
    )
    if behind[1:] != alone and spaced[1:] == alone:
        template = template.replace(BOS_OF_TEMPLATE, SPACE_AFTER_BOS)
    return template


# a vocabulary that has one stops at it
USUAL_STOP_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def load_tokenizer(
    model: Model,
    data: Data,
    tools: Sequence[str] = (),
    environments: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Loads the fast tokenizer of a recipe, with the recipe's tokens and template.

    Args:
        model: `tokenizer_name_or_path`, else the model, names it.
        data: With the template.
        tools: Functions that prompts describe.
        environments: Value of the rows' column `environment` -> an environment, whose methods
            prompts describe.

    Raises:
        UserError: There is no tokenizer, or none with a fast (Rust) implementation; the tokens do
            not fit it; a function has no type hints or no docstring.
    """
    tokenizer = _load_own(model)
    _add_tokens(tokenizer, model)
    tokenizer.stop_tokens = (*model.eot_tokens, *_read_stop_tokens(model, tokenizer))
    tokenizer.images = ImageProcessor(model, tokenizer)
    tokenizer.tools = tuple(map(describe_tool, tools))
    tokenizer.environments = describe_environments(environments, tokenizer.tools)
    if data.chat_template is not None:
        tokenizer.chat_template = fit_template(data.chat_template, tokenizer)
    return tokenizer


def plan_vocabulary(tokenizer: Any, model: Model) -> Vocabulary | None:
    """Plans the changes that the tokens of `tokenizer` make to the model; None where the recipe
    names none.
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
    return Vocabulary(known=len(_load_own(model)), tokens=len(tokenizer), rows=rows, token_ids=ids)


def refuse_other_tokenizer(tokenizer: Any, teacher: Model) -> None:
    """Raises `UserError` if the teacher's tokenizer has other tokens than `tokenizer`, or cuts
    texts otherwise.
    """
    own = _load_own(teacher)
    ours = tokenizer.get_vocab()
    theirs = own.get_vocab()
    different = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    difference = ""
    if different:
        token, index = different[0]
        if token in theirs and theirs[token] == index:
            whose = "the teacher's tokenizer"
        else:
            whose = "the model's tokenizer"
        difference = f"{token!r} is token {index} only of {whose}"
    else:
        parts = [json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, own)]
        changed = [
            part
            for part in ("model", "normalizer", "pre_tokenizer")
            if parts[0].get(part) != parts[1].get(part)
        ]
        if changed:
            names = ", ".join(changed)
            difference = (
                f"the tokens are the same, but a text is cut into others ({names} in "
                "tokenizer.json)"
            )
    if difference:
        raise UserError(
            f"{teacher.model_name_or_path}: its tokenizer is not that of the model that is "
            f"trained: {difference}; name a teacher of the same family, with the same tokenizer"
        )


def _add_tokens(tokenizer: Any, model: Model) -> None:
    """Adds `added_tokens` and `special_tokens`, and makes `eot_tokens` special.

    Raises `UserError`.
    """
    from tokenizers import AddedToken

    special = model.special_tokens or {}
    for key, tokens in (("added_tokens", model.added_tokens), ("special_tokens", special.values())):
        if any(not token.strip() for token in tokens):
            raise UserError(f"{key}: an empty token; write its text, such as <|tool|>")
    writes_bos = encode_bos(tokenizer)
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
    bos = None
    if "bos_token" in special:
        bos = [find_id(tokenizer, special["bos_token"])]
    if writes_bos and bos is not None and encode_bos(tokenizer) != bos:
        raise UserError(
            f"special_tokens: bos_token: tokenizer.json writes {tokenizer.decode(writes_bos)} "
            "before every text, whatever the bos_token is; leave it as it is, or change "
            "tokenizer.json"
        )


def find_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token; None where the tokenizer does not have it.

    `get_vocab` copies the whole vocabulary: 0.3 s for Llama 3's.
    """
    number: int | None = tokenizer.convert_tokens_to_ids(token)
    if number is None or tokenizer.convert_ids_to_tokens(number) != token:
        return None  # the id of the unknown token
    return number


def find_mask_id(tokenizer: Any, mask_token: str | int | None) -> int:
    """The id of the token that stands in a masked one's place: `mask_token`, else the tokenizer's.

    Raises `UserError` where the tokenizer does not have it.
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
        known = find_id(tokenizer, mask_token)
    else:
        known = mask_token if 0 <= mask_token < len(tokenizer) else None
    if known is None:
        raise UserError(f"mask_token: {mask_token}: not a token of this tokenizer; {advice}")
    return int(known)


def encode_bos(tokenizer: Any) -> list[int]:
    """Returns the ids that a tokenizer writes before plain text."""
    return _encode_around(tokenizer)[0]


def _encode_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer writes (before plain text, after it)."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    wrapped = tokenizer.encode("a", add_special_tokens=True)
    if not bare or bare[0] not in wrapped:
        return [], []
    start = wrapped.index(bare[0])
    return wrapped[:start], wrapped[start + len(bare) :]


def _load_own(model: Model) -> Any:
    """The tokenizer as its files describe it."""
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
    how_loaded = ("is_local", "local_files_only")  # by transformers, just now
    # nothing for the files of a checkpoint
    for key in (*how_loaded, *CUTTING_KEYS[TOKENIZER_CONFIG]):
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def _describe_failure(name: str, revision: str | None, error: Exception) -> UserError:
    """Explains why transformers could not load the tokenizer of the folder or hub name `name`."""
    if not Path(name).is_dir():
        # transformers wraps the hub's answer; the cause shows whether it is unreachable, gated or
        # unknown
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
    reason = first_line(error)
    return UserError(f"{name}: its tokenizer cannot be loaded: {reason}")


@dataclass(frozen=True, slots=True)
class Encoder:
    """The facts about a tokenizer that encoding a piece of a text needs.

    Returned by `make_encoder`.
    """

    backend: Any  # tokenizers.Tokenizer
    bos_ids: list[int]  # what it writes before plain text
    # which it finds in a text before anything else; special tokens are among them
    added_tokens: tuple[str, ...]
    # The ids of a newline, if the tokenizer puts a space before every text (as SentencePiece does);
    # otherwise empty.
    newline_ids: list[int]
    pad_id: int | None = None  # as `find_pad_id`


def make_encoder(tokenizer: Any) -> Encoder:
    """Wraps a fast transformers tokenizer, which neither truncates nor pads, as an `Encoder`."""
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    newline, with_newline = (
        backend.encode(text, add_special_tokens=False).ids for text in ("\n", "\na")
    )
    added = tuple(token.content for token in backend.get_added_tokens_decoder().values())
    newline_ids = [] if with_newline == newline + bare else newline
    return Encoder(backend, encode_bos(tokenizer), added, newline_ids, find_pad_id(tokenizer))


def find_pad_id(tokenizer: Any) -> int | None:
    """The id that fills up rows: the pad token's, else that of the end of text; None where there is
    neither.
    """
    pad: int | None = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return getattr(tokenizer, "eos_token_id", None)
    return pad


CONTEXT_CHARACTERS = 64  # characters around a border in which a token that crosses it is looked for


@lru_cache(maxsize=4096)
def keeps_border(backend: Any, before: str, after: str) -> bool:
    """Whether two texts have a border of tokens between them when they are encoded as one.

    As many tokens as `before` has alone must end where it ends.
    """
    apart = backend.encode(before, add_special_tokens=False)
    together = backend.encode(before + after, add_special_tokens=False)
    return bool(apart.offsets[-1:] == together.offsets[: len(apart.ids)][-1:])


def end_of_answer_ids(tokenizer: Any, eot_tokens: tuple[str, ...] = ()) -> list[int]:
    """The ids of the tokens that end what the assistant says; see `find_stop_tokens`."""
    return sorted(tokenizer.convert_tokens_to_ids([*{*find_stop_tokens(tokenizer), *eot_tokens}]))


def find_stop_tokens(tokenizer: Any) -> list[str]:
    """Lists the tokens that end generation: the end of text, the usual ends of a turn, and those
    that `load_tokenizer` found; sorted.
    """
    stops = {*USUAL_STOP_TOKENS, *getattr(tokenizer, "stop_tokens", ())}
    if tokenizer.eos_token is not None:
        stops.add(tokenizer.eos_token)
    return sorted(token for token in stops if find_id(tokenizer, token) is not None)


def _read_stop_tokens(model: Model, tokenizer: Any) -> list[str]:
    """The tokens that the model's generation_config.json stops at; none where there is no such
    file.
    """
    from transformers.utils import cached_file

    if model.model_name_or_path is None:
        return []
    file = cached_file(
        model.model_name_or_path,
        GENERATION_FILE,
        revision=model.model_revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    # A damaged file is reported where it is written into an export.
    stops = None
    if file:
        stops = read_json_object(Path(file)).get("eos_token_id")
    ids = stops if isinstance(stops, list) else [stops]
    return [
        str(token)
        for token in tokenizer.convert_ids_to_tokens([i for i in ids if isinstance(i, int)])
        if token
    ]


ASKS_FOR_DATE = "strftime_now"  # the function by which a template asks for today's date
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# how a template reads an Alpaca row's input
INPUT = re.compile(r"""message(\.input\b|\[['"]input['"]\])""")
# What a template's own code can raise, beside Jinja's errors.
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
Span = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True, slots=True, eq=False)
class Renderer:
    """The facts about a tokenizer and its chat template that rendering needs.

    Returned by `make_renderer`.
    """

    template: str
    compiled: jinja2.Template  # the same, by transformers' sandboxed environment
    # the special tokens, under the names that templates use; chat_template_kwargs
    variables: dict[str, Any]
    special_tokens: re.Pattern[str]  # matches any of the tokenizer's special tokens
    up_to_stop: re.Pattern[str]  # matches special tokens up to the first at which generation stops
    bos: str  # what the tokenizer itself writes before plain text; may be empty
    end: str  # what the tokenizer itself writes after it; may be empty
    # written after plain text, so that the model learns to stop; empty if the tokenizer has none
    eos: str
    has_template: bool  # the tokenizer has a chat template; otherwise PLAIN is used
    has_markers: bool  # the template has {% generation %}
    assistant_only: bool  # only what the assistant says is trained on
    reads_input: bool  # the template writes an Alpaca row's input apart from its instruction
    turns: Turns = "auto"
    backend: Any = None  # tokenizers.Tokenizer, to show a token in a finding
    generation_prompt: str = ""  # what the template writes before the assistant's content
    # what it writes after that content, up to the token at which generation stops
    end_of_turn: str = ""
    # what it writes between prompt and content where an answer has no reasoning; None: it writes
    # no reasoning, or its prompt closes it
    unthinking: str | None = None
    train_on_reasoning: bool = True
    response_template: Any = None  # how transformers reads a reply back as a message
    tools: Tools = ()  # of the recipe, which prompts without tools of their own describe
    environments: Environments = field(default_factory=dict)  # whose tools they describe too
    images: ImageProcessor | None = None  # None: the tokenizer is of no recipe's model
    answers_apart: bool = False  # prompt and answer are encoded as two texts
    # the template gets each content as a list of parts, as beside an image
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
        tokenizer: As `load_tokenizer` gives it.
        assistant_only: Whether only what the assistant says is trained on.
        date: The day, as 2026-01-31, for a template that asks for today's; None: today.
        turns: How conversations become documents, as the key of the recipe.
        train_on_reasoning: Whether an answer's reasoning is trained on.

    Raises:
        UserError: The chat template is not valid Jinja.
    """
    template = tokenizer.chat_template or PLAIN
    if isinstance(template, dict):  # several, by name
        template = template.get("default") or next(iter(template.values()))
    words = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = _match_any(words | set(tokenizer.all_special_tokens))
    stop = _match_any(set(find_stop_tokens(tokenizer)))
    compiled = compile_template(template)
    _fix_date(compiled, date)
    bos, end = _encode_around(tokenizer)
    renderer = Renderer(
        template=template,
        compiled=compiled,
        variables=dict(tokenizer.special_tokens_map),
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
    """Returns the renderer with `variables` beside its own, as chat_template_kwargs gives them.

    Raises `BadRow` for a name that rendering itself sets.
    """
    if not variables:
        return renderer
    own = sorted(OWN_VARIABLES & variables.keys())
    if own:
        raise BadRow(f"chat_template_kwargs: {own[0]} is set by rendering itself; remove it")
    text = json.dumps(dict(variables), sort_keys=True, default=str)
    return _probe_turn(replace(renderer, variables=renderer.variables | json.loads(text)))


def renderer_of_source(renderer: Renderer, source: DatasetSource) -> Renderer:
    """Returns the renderer as an entry of `datasets` asks for its rows.

    Raises `BadRow` as `add_variables` does.
    """
    renderer = add_variables(renderer, source.chat_template_kwargs)
    if source.answers_apart:
        # a text of its own begins as the tokenizer has every text begin
        variables = renderer.variables | {"bos_token": renderer.bos}
        return _probe_turn(replace(renderer, answers_apart=True, variables=variables))
    return renderer


def choose_tools(renderer: Renderer, row: Mapping[str, Any]) -> Tools:
    """The tools that the prompt of a row describes: its own, or the recipe's with those of its
    environment.

    `row`: as rewards read it. Raises `BadRow` for a row of no environment.
    """
    if own := row.get("tools"):
        return tuple(own)
    if not renderer.environments:
        return renderer.tools
    chosen = choose_environment(renderer.environments, row.get("columns", {}))
    return renderer.environments[chosen].tools


@lru_cache(maxsize=64)
def read_parts(renderer: Renderer) -> Renderer:
    """Returns the renderer for conversations with an image."""
    return _probe_turn(replace(renderer, reads_parts=True))


def _match_any(words: set[str]) -> str:
    """Makes a pattern that matches any of `words`, the longest first; nothing without words."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def _fix_date(compiled: jinja2.Template, date: str | None) -> None:
    """Makes the template write `date` as today's, in place of transformers' own function.

    As a global of the compiled template: functions among a template's variables are replaced by
    their names.
    """
    if date is None:
        compiled.globals.pop(ASKS_FOR_DATE, None)
    else:
        compiled.globals[ASKS_FOR_DATE] = datetime.fromisoformat(date).strftime


def asks_for_date(tokenizer: Any) -> bool:
    """Whether the text of the tokenizer's chat template depends on the day."""
    return ASKS_FOR_DATE in str(tokenizer.chat_template)


def _probe_turn(renderer: Renderer) -> Renderer:
    """Returns the renderer with what its template writes around the assistant's content.

    It is found by an example, and empty where the template rejects that.
    """
    user = {"role": "user", "content": "QUESTION"}
    answer = {"role": "assistant", "content": "ANSWER"}
    try:
        bare = apply_template(renderer, [user])
        asked = apply_template(renderer, [user], add_generation_prompt=True)
        answered = apply_template(renderer, [user, answer])
        reasoned = apply_template(renderer, [user, {**answer, "reasoning_content": "REASONING"}])
    except BadRow:
        return replace(renderer, generation_prompt="", end_of_turn="", unthinking=None)
    prompt = asked.removeprefix(bare)
    before, _, after = answered.rpartition("ANSWER")
    special = renderer.special_tokens.search(after)
    if special is None:
        end_of_turn = after.rstrip()
    else:
        stop = renderer.up_to_stop.match(after, special.start())
        end_of_turn = after[: (stop or special).end()]
    unthinking = None
    if "REASONING" in reasoned and not THINKING_END.search(prompt):
        unthinking = before.removeprefix(asked).removeprefix(bare)
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
    """The text of the messages, as `apply_chat_template` renders it.

    Raises `BadRow` if the template rejects them.
    """
    if renderer.reads_parts or tools or any(len(message) != 2 for message in messages):
        return _render(renderer, messages, tools, add_generation_prompt=add_generation_prompt)[0]
    # Role and content, both text, need none of the conversions that take half of the time of
    # transformers' own call.
    try:
        return renderer.compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **renderer.variables,
        )
    except TEMPLATE_ERRORS as error:
        raise _rejected(messages, error) from None


def _rejected(messages: list[Message], error: Exception) -> BadRow:
    if any(isinstance(message.get("content"), list) for message in messages):
        return BadRow(
            f"the chat template writes no images ({error}); leave chat_template out, so that the "
            "model's own is used"
        )
    return BadRow(f"the chat template rejects it: {error}")


def apply_marked_template(
    renderer: Renderer, messages: list[Message], tools: Tools
) -> tuple[str, list[Span]]:
    """Returns (text, what stands between {% generation %} markers).

    Raises `BadRow` if the template rejects it.
    """
    return _render(renderer, messages, tools, return_assistant_tokens_mask=True)


def _render(
    renderer: Renderer, messages: list[Message], tools: Tools, **options: bool
) -> tuple[str, list[Span]]:
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
        raise _rejected(messages, error) from None
    return str(texts[0]), list(spans[0]) if spans else []
