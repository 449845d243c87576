"""Which characters of a rendered conversation come from which message, whatever its words are.

The conversation is rendered a second time with marks, which no text holds, beside the words of its
messages. Where the template writes the same text otherwise, the places of the marks are known.
Nothing is searched for in the text, so no content is mistaken for the template's own words, or for
those of another message.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finetune.data.messages import (
    IMAGE,
    REASONING_KEYS,
    THINKING_END,
    BadRow,
    Message,
    count_common,
)
from finetune.data.tokenizer import Renderer, Tools, apply_template

# Of Unicode's characters that no text may hold: one begins a mark, ten are the digits of its
# number, and one ends it.
FIRST = 0xFDD0
TO_MARK_DIGITS = {ord(str(digit)): FIRST + 1 + digit for digit in range(10)}
TO_DIGITS = {mark_digit: chr(digit) for digit, mark_digit in TO_MARK_DIGITS.items()}
MARK = re.compile("\ufdd0([\ufdd1-\ufdda]+)\ufddb")
WORDS = ("content", *REASONING_KEYS)
FUNCTION_NAME = ".name"
LONGEST_TAG = 32  # characters
CLOSING_TAG = re.compile(rf"(?:{THINKING_END.pattern})\Z")
PADDING = re.compile(rf"[\s{IMAGE}]*")  # templates trim it, and part a content at its images


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a mark in a text, and which words it stands beside."""

    position: int
    message: int  # its index
    part: str  # of the message: a key, or an argument of a call by its number
    # it stands behind the words of an assistant, not before them or amid those of another role
    ends: bool = False
    lead: str = ""  # the words of another role before it
    # where these begin in the text, as far as the template writes them as they are
    words_begin: int = 0

    @property
    def name(self) -> tuple[int, str, bool]:
        return self.message, self.part, self.ends


Marks = tuple[Mark, ...]  # in the order of their places


class Rendering:
    """The text that the template writes for messages, and where the words of each stand in it.

    Raises `BadRow` as it does.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Tools,
        renderer: Renderer,
        *,
        add_generation_prompt: bool = False,
    ) -> None:
        self._messages = messages
        self._tools = tools
        self._renderer = renderer
        self._asks = add_generation_prompt
        self.text = apply_template(
            renderer, list(messages), tools, add_generation_prompt=add_generation_prompt
        )
        self.unmarked: tuple[int, ...] = ()

    @cached_property
    def marks(self) -> Marks:
        """The marks in the text, found when they are first asked for.

        A message stays unmarked where its marks make the template write another text, as Mistral's
        does for a result that is a number. `unmarked` then has its index.
        """
        marks = self._find_marks(range(len(self._messages)))
        if marks is not None:
            return marks
        kept: list[int] = []
        for index in range(len(self._messages)):
            if self._find_marks([*kept, index]) is not None:
                kept.append(index)
        self.unmarked = tuple(sorted({*range(len(self._messages))} - {*kept}))
        return self._find_marks(kept) or ()

    def _find_marks(self, indexes: Sequence[int]) -> Marks | None:
        return _find_marks(
            self.text,
            self._messages,
            indexes,
            self._tools,
            self._renderer,
            add_generation_prompt=self._asks,
        )


def trace(text: str, messages: Sequence[Message], tools: Tools, renderer: Renderer) -> Marks:
    """Finds the marks in the text of a document that ends with the last of `messages`.

    The text must be the template's own, in one of two forms: what it writes for `messages`; or the
    prompt that asks for the last message, followed by the end of what it writes for `messages`.

    Raises `BadRow` where it is neither, and where the template rejects the messages.
    """
    marks = _find_marks(text, messages, range(len(messages)), tools, renderer)
    if marks is not None:
        return marks
    own = Rendering(messages, tools, renderer)
    if text == own.text:
        return own.marks
    prompt = Rendering(messages[:-1], tools, renderer, add_generation_prompt=True)
    end = len(prompt.text)
    if not text.startswith(prompt.text) or not own.text.endswith(text[end:]):
        raise BadRow("its text is not what the chat template writes; use another chat_template")
    shift = len(text) - len(own.text)
    answered = (
        replace(mark, position=mark.position + shift, words_begin=mark.words_begin + shift)
        for mark in own.marks
    )
    return (*prompt.marks, *(mark for mark in answered if mark.position >= end))


def _find_marks(
    text: str,
    messages: Sequence[Message],
    indexes: Sequence[int],
    tools: Tools,
    renderer: Renderer,
    *,
    add_generation_prompt: bool = False,
) -> Marks | None:
    """Renders the conversation with marks in the messages at `indexes`, and finds the marks.

    Returns:
        Their places in `text`, which has no marks; None where the template rejects the marked
        messages, or writes another text beside the marks.
    """
    marked = list(messages)
    names: list[Mark] = []
    for index in indexes:
        marked[index] = _mark_message(messages[index], index, names)
    try:
        written = apply_template(
            renderer, marked, tools, add_generation_prompt=add_generation_prompt
        )
    except BadRow:
        return None
    pieces = MARK.split(written)
    words_between = pieces[::2]
    mark_numbers = pieces[1::2]
    if "".join(words_between) != text:
        return None
    marks: list[Mark] = []
    position = 0
    for words, mark_number in zip(words_between, mark_numbers, strict=False):
        position += len(words)
        mark = names[int(mark_number.translate(TO_DIGITS))]
        lead = count_common(mark.lead[::-1], text[position - len(mark.lead) : position][::-1])
        mark = replace(mark, position=position, words_begin=position - lead)
        # a result may repeat its function's name
        is_repeated = mark.part.endswith(FUNCTION_NAME) and any(
            mark.name == other.name for other in marks
        )
        if not is_repeated:
            marks.append(mark)
    return tuple(marks)


def _mark_message(message: Message, index: int, names: list[Mark]) -> Message:
    """Returns a message with marks in its words, and adds to `names` what each mark stands for.

    The number of a mark is its place in `names`.
    """
    is_assistant = message["role"] == "assistant"

    def mark(words: str, part: str) -> str:
        begin = _measure_padding(words)
        end = len(_without_closing_tags(words[: len(words) - _measure_padding(words[::-1])]))
        if not is_assistant:
            # how a content begins and ends may decide what a template makes of it
            middle = (begin + end) // 2
            return words[:middle] + write(part, lead=words[:middle]) + words[middle:]
        if begin >= end:
            return words
        return words[:begin] + write(part) + words[begin:end] + write(part, ends=True) + words[end:]

    def write(part: str, *, ends: bool = False, lead: str = "") -> str:
        names.append(Mark(0, index, part, ends, lead))
        return f"\ufdd0{str(len(names) - 1).translate(TO_MARK_DIGITS)}\ufddb"

    def mark_values(value: Any, part: str) -> Any:
        if isinstance(value, str):
            return mark(value, part)
        if isinstance(value, dict):
            return {key: mark_values(each, f"{part}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [mark_values(each, f"{part}.{number}") for number, each in enumerate(value)]
        return value

    marked = {
        key: mark_values(value, key) if key in WORDS else value for key, value in message.items()
    }
    calls = []
    for number, call in enumerate(message.get("tool_calls", ())):
        function = {
            key: mark_values(value, f"{number}.{key}") for key, value in call["function"].items()
        }
        calls.append({**call, "function": function})
    return {**marked, "tool_calls": calls} if calls else marked


def _without_closing_tags(words: str) -> str:
    """Returns the words up to the tags that close a thought at their end.

    A mark behind them would be an answer behind the thought, which a template writes otherwise.
    """
    while tag := CLOSING_TAG.search(words, max(0, len(words) - LONGEST_TAG)):
        words = words[: tag.start()].rstrip()
    return words


def _measure_padding(words: str) -> int:
    """Counts the characters of white space and images that `words` begins with."""
    padding = PADDING.match(words)
    assert padding is not None, "it matches nothing as well"
    return padding.end()
