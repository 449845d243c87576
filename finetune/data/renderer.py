"""A tokenizer's chat template, ready to be applied to many rows, and what has to be known of the two once."""

import re
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from finetune.data.chat_templates import PLAIN
from finetune.data.messages import BadRow, Message, Tool
from finetune.errors import UserError

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Tools = tuple[Tool, ...]
Span = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True, slots=True, eq=False)
class Renderer:
    """What rendering needs to know of a tokenizer and its chat template. Source: `renderer`."""

    template: str
    compiled: jinja2.Template  # the same, by transformers' sandboxed environment
    variables: dict[str, Any]  # the special tokens, by the names that templates know them by
    special_tokens: re.Pattern[str]  # any of the tokenizer's special tokens
    bos: str  # what the tokenizer itself puts before plain text; empty where nothing
    eos: str  # what is written after plain text, so that the model learns to end; empty where the tokenizer has none
    has_template: bool  # the tokenizer brings a chat template; else PLAIN stands in
    has_markers: bool  # the template has {% generation %}
    assistant_only: bool
    generation_prompt: str = ""  # what the template writes before an assistant's words
    end_of_turn: str = ""  # what it writes behind them, to the first special token


def renderer(tokenizer: Any, assistant_only: bool) -> Renderer:
    """Finds out once what every row needs to know. Raises `UserError` where the chat template is not valid Jinja."""
    template = tokenizer.chat_template or PLAIN
    if isinstance(template, dict):  # several, by name
        template = template.get("default") or next(iter(template.values()))
    words = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted(words | set(tokenizer.all_special_tokens), key=len, reverse=True)
    bare, wrapped = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a", add_special_tokens=True)
    try:
        compiled = _compile_jinja_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"chat_template: line {error.lineno}: not valid Jinja: {error.message}") from None
    way = Renderer(
        template=template,
        compiled=compiled,
        variables=dict(tokenizer.special_tokens_map),
        special_tokens=re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
        bos=tokenizer.decode(wrapped[: wrapped.index(bare[0])]) if bare and bare[0] in wrapped else "",
        eos=tokenizer.eos_token or "",
        has_template=bool(tokenizer.chat_template),
        has_markers=bool(GENERATION_MARKER.search(template)),
        assistant_only=assistant_only,
    )
    prompt, end = _frame(way)
    return replace(way, generation_prompt=prompt, end_of_turn=end)


def _frame(way: Renderer) -> tuple[str, str]:
    """(what the template writes before an assistant's words, what it writes behind them), found by trying."""
    user = {"role": "user", "content": "QUESTION"}
    try:
        bare = apply_template(way, [user])
        prompt = apply_template(way, [user], add_generation_prompt=True).removeprefix(bare)
        answered = apply_template(way, [user, {"role": "assistant", "content": "ANSWER"}])
    except BadRow:
        return "", ""
    behind = answered.rpartition("ANSWER")[2]
    special = way.special_tokens.search(behind)
    return prompt, behind[: special.end()] if special else behind.rstrip()


def apply_template(
    way: Renderer,
    messages: list[Message],
    tools: Tools = (),
    *,
    add_generation_prompt: bool = False,
) -> str:
    """The template's text, by transformers' own sandboxed Jinja, as `apply_chat_template` renders it."""
    return rendered(way, messages, tools, add_generation_prompt=add_generation_prompt)[0]


def rendered(way: Renderer, messages: list[Message], tools: Tools, **options: bool) -> tuple[str, list[Span]]:
    """(text, the stretches between {% generation %} markers where `return_assistant_tokens_mask` is asked for)."""
    try:
        if not tools and not options.get("return_assistant_tokens_mask") and all(len(m) == 2 for m in messages):
            # Role and content, both text, need none of the conversions that make up half of transformers' own call.
            prompted = options.get("add_generation_prompt", False)
            return way.compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompted, **way.variables
            ), []
        texts, spans = render_jinja_template(
            [messages], tools=list(tools) or None, chat_template=way.template, **options, **way.variables
        )
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise BadRow(f"the chat template refuses it: {error}") from None
    return str(texts[0]), list(spans[0]) if spans else []
