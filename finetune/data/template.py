"""A tokenizer's chat template, compiled once and applied to many conversations."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.config.schema import Data, Turns
from finetune.data.images import ImageProcessor, split_parts
from finetune.data.messages import OWN_VARIABLES, THINKING_END, BadRow, Message, Tool
from finetune.data.template_sandbox import compile_template
from finetune.data.tokenizer import PLAIN, encode_bos, find_stop_tokens

ASKS_FOR_DATE = "strftime_now"  # the function by which a template asks for today's date
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
INPUT = re.compile(r"""message(\.input\b|\[['"]input['"]\])""")  # how a template reads an Alpaca row's input
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
    """What rendering needs to know about a tokenizer and its chat template. Returned by `make_renderer`."""

    template: str
    compiled: jinja2.Template  # the same, by transformers' sandboxed environment
    variables: dict[str, Any]  # the special tokens, under the names that templates use; chat_template_kwargs
    special_tokens: re.Pattern[str]  # matches any of the tokenizer's special tokens
    up_to_stop: re.Pattern[str]  # matches special tokens up to the first at which generation stops
    bos: str  # what the tokenizer itself writes before plain text; may be empty
    eos: str  # written after plain text, so that the model learns to stop; empty if the tokenizer has none
    has_template: bool  # the tokenizer has a chat template; otherwise PLAIN is used
    has_markers: bool  # the template has {% generation %}
    assistant_only: bool  # only what the assistant says is trained on
    reads_input: bool  # the template writes an Alpaca row's input apart from its instruction
    turns: Turns = "auto"
    backend: Any = None  # tokenizers.Tokenizer, to show a token in a finding
    generation_prompt: str = ""  # what the template writes before the assistant's content
    end_of_turn: str = ""  # what it writes after that content, up to the token at which generation stops
    unthinking: str | None = None  # before a content without reasoning; None: it writes no reasoning, or closes it
    train_on_reasoning: bool = True
    response_template: Any = None  # how transformers reads a reply back as a message
    images: ImageProcessor | None = None  # None: the tokenizer is of no recipe's model
    reads_parts: bool = False  # the template gets each content as a list of parts, as beside an image


def make_renderer(
    tokenizer: Any,
    assistant_only: bool,
    date: str | None = None,
    turns: Turns = "auto",
    train_on_reasoning: bool = True,
) -> Renderer:
    """`date`: the day, as 2026-01-31, for a template that asks for today's; None: today.

    Raises `UserError` if the tokenizer's chat template is not valid Jinja.
    """
    template = tokenizer.chat_template or PLAIN
    if isinstance(template, dict):  # several, by name
        template = template.get("default") or next(iter(template.values()))
    words = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = _match_any(words | set(tokenizer.all_special_tokens))
    stop = _match_any(set(find_stop_tokens(tokenizer)))
    compiled = compile_template(template)
    _fix_date(compiled, date)
    renderer = Renderer(
        template=template,
        compiled=compiled,
        variables=dict(tokenizer.special_tokens_map),
        special_tokens=re.compile(special),
        up_to_stop=re.compile(f"(?:(?!{stop})(?:{special}))*(?:{stop})"),
        bos=tokenizer.decode(encode_bos(tokenizer)),
        eos=tokenizer.eos_token or "",
        has_template=bool(tokenizer.chat_template),
        has_markers=bool(GENERATION_MARKER.search(template)),
        assistant_only=assistant_only,
        reads_input=bool(INPUT.search(template)),
        turns=turns,
        backend=tokenizer.backend_tokenizer,
        train_on_reasoning=train_on_reasoning,
        response_template=getattr(tokenizer, "response_template", None),
        images=getattr(tokenizer, "images", None),
    )
    return _probe_turn(renderer)


def make_renderer_of(data: Data, tokenizer: Any) -> Renderer:
    """As `make_renderer`, as a recipe asks for its data."""
    date, turns = data.chat_template_date, data.turns
    return make_renderer(tokenizer, data.assistant_only_loss, date, turns, data.train_on_reasoning)


def add_variables(renderer: Renderer, variables: Mapping[str, Any] | None) -> Renderer:
    """`renderer`, with chat_template_kwargs. Raises `BadRow` for a name that rendering itself sets."""
    if not variables:
        return renderer
    own = sorted(OWN_VARIABLES & variables.keys())
    if own:
        raise BadRow(f"chat_template_kwargs: {own[0]} is set by rendering itself; remove it")
    return _add_variables(renderer, json.dumps(dict(variables), sort_keys=True, default=str))


@lru_cache(maxsize=64)
def read_parts(renderer: Renderer) -> Renderer:
    """`renderer`, for conversations with an image."""
    return _probe_turn(replace(renderer, reads_parts=True))


@lru_cache(maxsize=64)
def _add_variables(renderer: Renderer, variables: str) -> Renderer:
    return _probe_turn(replace(renderer, variables=renderer.variables | json.loads(variables)))


def _match_any(words: set[str]) -> str:
    """A pattern of any of `words`, the longest first; of nothing where there are none."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def _fix_date(compiled: jinja2.Template, date: str | None) -> None:
    """Makes the template write `date` as today's, in place of transformers' own function.

    As a global of the compiled template: functions among a template's variables are replaced by their names.
    """
    if date is None:
        compiled.globals.pop(ASKS_FOR_DATE, None)
    else:
        compiled.globals[ASKS_FOR_DATE] = datetime.fromisoformat(date).strftime


def asks_for_date(tokenizer: Any) -> bool:
    """Whether the text of the tokenizer's chat template depends on the day."""
    return ASKS_FOR_DATE in str(tokenizer.chat_template)


def _probe_turn(renderer: Renderer) -> Renderer:
    """`renderer`, with what the template writes around the assistant's content, from an example."""
    user, answer = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
    try:
        bare = apply_template(renderer, [user])
        asked = apply_template(renderer, [user], add_generation_prompt=True)
        answered = apply_template(renderer, [user, answer])
        reasoned = apply_template(renderer, [user, {**answer, "reasoning_content": "REASONING"}])
    except BadRow:
        return replace(renderer, generation_prompt="", end_of_turn="", unthinking=None)
    prompt, (before, _, after) = asked.removeprefix(bare), answered.rpartition("ANSWER")
    thinks = "REASONING" in reasoned and not THINKING_END.search(prompt)
    special = renderer.special_tokens.search(after)
    stop = renderer.up_to_stop.match(after, special.start()) if special else None
    return replace(
        renderer,
        generation_prompt=prompt,
        end_of_turn=after[: (stop or special).end()] if special else after.rstrip(),
        unthinking=before.removeprefix(asked).removeprefix(bare) if thinks else None,
    )


def apply_template(
    renderer: Renderer, messages: list[Message], tools: Tools = (), *, add_generation_prompt: bool = False
) -> str:
    """The text of the messages, as `apply_chat_template` renders it. Raises `BadRow` if the template rejects them."""
    if renderer.reads_parts or tools or any(len(message) != 2 for message in messages):
        return _render(renderer, messages, tools, add_generation_prompt=add_generation_prompt)[0]
    # Role and content, both text, need none of the conversions that take half of the time of transformers' own call.
    try:
        return renderer.compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **renderer.variables,
        )
    except TEMPLATE_ERRORS as error:
        raise BadRow(f"the chat template rejects it: {error}") from None


def apply_marked_template(renderer: Renderer, messages: list[Message], tools: Tools) -> tuple[str, list[Span]]:
    """(text, what stands between {% generation %} markers). Raises `BadRow` if the template rejects it."""
    return _render(renderer, messages, tools, return_assistant_tokens_mask=True)


def _render(renderer: Renderer, messages: list[Message], tools: Tools, **options: bool) -> tuple[str, list[Span]]:
    if renderer.reads_parts:
        messages = [message | {"content": split_parts(message["content"])} for message in messages]
    try:
        texts, spans = render_jinja_template(
            [messages], tools=list(tools) or None, chat_template=renderer.template, **options, **renderer.variables
        )
    except TEMPLATE_ERRORS as error:
        raise BadRow(f"the chat template rejects it: {error}") from None
    return str(texts[0]), list(spans[0]) if spans else []
