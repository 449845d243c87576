"""Which characters of a rendered conversation come from which message.

The conversation is rendered a second time, with marks inside its messages. A mark is made of
characters that no text may hold. If the second rendering is the first one plus marks, the places of
the marks are known. The text is never searched for a message's words, so they cannot be confused
with words that the template writes or that another message has too.
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

# A mark is written with Unicode's noncharacters: one opens it, ten are the digits of its number,
# and one closes it.
MARK_OPENING = 0xFDD0
TO_MARK_DIGITS = {ord(str(digit)): MARK_OPENING + 1 + digit for digit in range(10)}
TO_DIGITS = {mark_digit: chr(digit) for digit, mark_digit in TO_MARK_DIGITS.items()}
MARK = re.compile("\ufdd0([\ufdd1-\ufdda]+)\ufddb")
WORDS = ("content", *REASONING_KEYS)  # the keys of a message whose texts are marked
FUNCTION_NAME = ".name"  # how the `part` of a mark in a called function's name ends
LONGEST_TAG = 32  # characters that are searched for a closing tag
CLOSING_TAG = re.compile(rf"(?:{THINKING_END.pattern})\Z")
# templates trim white space, and split a content at its images
PADDING = re.compile(rf"[\s{IMAGE}]*")


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a mark in a text, and the words that it marks.

    An assistant's words have a mark before and a mark behind them, the words of any other role a
    mark in their middle.
    """

    position: int  # the character of the text before which the mark stood
    message: int  # index of the message
    part: str  # of the message: a key, or a call's number and keys, such as "0.arguments.city"
    ends: bool = False  # the mark is the one behind an assistant's words
    lead: str = ""  # the words before a mark in the middle; empty for an assistant
    # where the lead begins in the text, as far back as the text has it unchanged
    words_begin: int = 0

    @property
    def name(self) -> tuple[int, str, bool]:
        """Identifies the mark in every rendering of the same messages."""
        return self.message, self.part, self.ends


Marks = tuple[Mark, ...]  # ordered by position


class Rendering:
    """The text that the template writes for messages, and the marks in it.

    Raises `BadRow` if the template rejects the messages.
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
        self._add_generation_prompt = add_generation_prompt
        self.text = apply_template(
            renderer, list(messages), tools, add_generation_prompt=add_generation_prompt
        )
        self.unmarked: tuple[int, ...] = ()  # set by `marks`

    @cached_property
    def marks(self) -> Marks:
        """The marks in the text, found on first access.

        A message stays unmarked if its marks make the template write a different text, as with
        Mistral's template and a tool result that is a number. `unmarked` lists the indexes of these
        messages.
        """
        indexes = range(len(self._messages))
        marks = self._find_marks(indexes)
        if marks is not None:
            return marks
        markable: list[int] = []
        for index in indexes:
            if self._find_marks([*markable, index]) is not None:
                markable.append(index)
        self.unmarked = tuple(sorted({*indexes} - {*markable}))
        return self._find_marks(markable) or ()

    def _find_marks(self, indexes: Sequence[int]) -> Marks | None:
        return _find_marks(
            self.text,
            self._messages,
            indexes,
            self._tools,
            self._renderer,
            add_generation_prompt=self._add_generation_prompt,
        )


def trace(text: str, messages: Sequence[Message], tools: Tools, renderer: Renderer) -> Marks:
    """Finds the marks in `text`, which was rendered from `messages`.

    The text has one of two forms. Either it is what the template writes for all messages. Or it
    begins with the prompt of the last message (all messages before it and the generation prompt)
    and ends as what the template writes for all messages.

    Raises `BadRow` if the text has neither form, or the template rejects the messages.
    """
    marks = _find_marks(text, messages, range(len(messages)), tools, renderer)
    if marks is not None:
        return marks
    whole = Rendering(messages, tools, renderer)
    if text == whole.text:
        return whole.marks
    prompt = Rendering(messages[:-1], tools, renderer, add_generation_prompt=True)
    prompt_end = len(prompt.text)
    if not text.startswith(prompt.text) or not whole.text.endswith(text[prompt_end:]):
        raise BadRow("its text is not what the chat template writes; use another chat_template")
    # Both texts have the same end, so their marks there differ by the difference in length.
    shift = len(text) - len(whole.text)
    shifted = (
        replace(mark, position=mark.position + shift, words_begin=mark.words_begin + shift)
        for mark in whole.marks
    )
    return (*prompt.marks, *(mark for mark in shifted if mark.position >= prompt_end))


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

    Args:
        text: The same rendering without marks.
        messages: The messages, without marks.
        indexes: The messages to mark.
        tools: The tools that the template describes.
        renderer: The renderer.
        add_generation_prompt: Whether `text` ends with the generation prompt.

    Returns:
        The marks with their positions in `text`; None if the template rejects the marked messages,
        or if what it writes for them is not `text` plus marks.
    """
    marked = list(messages)
    unplaced: list[Mark] = []
    for index in indexes:
        marked[index] = _mark_message(messages[index], index, unplaced)
    try:
        written = apply_template(
            renderer, marked, tools, add_generation_prompt=add_generation_prompt
        )
    except BadRow:
        return None
    # The pieces alternate: words, the number of a mark, words, and so on, up to the last words.
    pieces = MARK.split(written)
    words_between = pieces[::2]
    mark_numbers = pieces[1::2]
    if "".join(words_between) != text:
        return None
    marks: list[Mark] = []
    position = 0
    for words, mark_number in zip(words_between[:-1], mark_numbers, strict=True):
        position += len(words)
        mark = unplaced[int(mark_number.translate(TO_DIGITS))]
        text_before = text[position - len(mark.lead) : position]
        lead_length = count_common(mark.lead[::-1], text_before[::-1])  # from the mark backwards
        mark = replace(mark, position=position, words_begin=position - lead_length)
        # A template may write the function's name a second time, with the result of the call.
        is_repeated = mark.part.endswith(FUNCTION_NAME) and any(
            mark.name == other.name for other in marks
        )
        if not is_repeated:
            marks.append(mark)
    return tuple(marks)


def _mark_message(message: Message, index: int, unplaced: list[Mark]) -> Message:
    """Returns a copy of a message with marks in its texts.

    Args:
        message: The message.
        index: Its index in the conversation.
        unplaced: Each mark is appended here, with position 0. The number that is written into the
            message is the mark's index in this list.
    """
    is_assistant = message["role"] == "assistant"

    def mark_words(words: str, part: str) -> str:
        begin = _measure_padding(words)
        end = len(_without_closing_tags(words[: len(words) - _measure_padding(words[::-1])]))
        if not is_assistant:
            # how a content begins and ends may decide what a template makes of it
            middle = (begin + end) // 2
            lead = words[:middle]
            return lead + write_mark(part, lead=lead) + words[middle:]
        if begin >= end:
            return words
        marked_words = write_mark(part) + words[begin:end] + write_mark(part, ends=True)
        return words[:begin] + marked_words + words[end:]

    def write_mark(part: str, *, ends: bool = False, lead: str = "") -> str:
        number = len(unplaced)
        unplaced.append(Mark(0, index, part, ends, lead))
        return f"\ufdd0{str(number).translate(TO_MARK_DIGITS)}\ufddb"

    def mark_values(value: Any, part: str) -> Any:
        if isinstance(value, str):
            return mark_words(value, part)
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
    """Removes the tags that close a thought (such as </think>) from the end of `words`.

    A mark behind such a tag would look like an answer after the thought, and the template would
    write a different text.
    """
    while tag := CLOSING_TAG.search(words, max(0, len(words) - LONGEST_TAG)):
        words = words[: tag.start()].rstrip()
    return words


def _measure_padding(words: str) -> int:
    """Counts the characters of white space and images at the beginning of `words`."""
    padding = PADDING.match(words)
    assert padding is not None, "the pattern also matches an empty text"
    return padding.end()
