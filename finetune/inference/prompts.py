"""Prompts from the command line, a pipe, or a file's rows, each a conversation that waits. Imports no torch."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.data.formats import CONVERSATION_COLUMNS, QUESTION_COLUMNS, Columns, Conversation, make_conversation
from finetune.data.images import read_image
from finetune.data.messages import IMAGE, BadRow, Message, list_columns
from finetune.data.readers import read_file
from finetune.errors import UserError

PROMPT_COLUMNS = (*QUESTION_COLUMNS, "text")


def make_prompt(prompt: str, system: str | None, images: Sequence[str] = ()) -> Conversation:
    """A conversation that begins with `prompt`, after the system message where there is one.

    images: Paths of what is asked about.

    Raises:
        UserError: Where an image cannot be read.
    """
    return ask([*system_message(system), user_message(prompt, images)])


def user_message(prompt: str, images: Sequence[str] = ()) -> Message:
    """What a user says, after the images that it is about."""
    parts = [{"type": "image", "path": path} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt}] if parts else prompt}


def ask(messages: Sequence[Message]) -> Conversation:
    """The messages, to be answered; a content may be a list of parts.

    Raises:
        UserError: Where an image cannot be read.
    """
    if all(isinstance(message["content"], str) for message in messages):
        return Conversation(tuple(messages), (False,) * len(messages))
    try:
        return _before_answer({}, list(messages), None, Path())
    except BadRow as error:
        raise UserError(str(error)) from None


def system_message(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


def check_utf8(text: str, where: str) -> str:
    """`text`, which came from outside: Python holds bytes there that are no UTF-8 as lone surrogates.

    Raises `UserError` where it holds any.

    >>> check_utf8("café", "--prompt")
    'café'
    """
    try:
        text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except UnicodeEncodeError as error:  # a surrogate that stands for no byte
        raise UserError(f"{where}: not UTF-8: {error.reason} at character {error.start + 1}") from None
    return text


def read_piped_prompt() -> str:
    """All of stdin as one prompt. Raises `UserError` where it is empty or not UTF-8."""
    try:
        text = check_utf8(sys.stdin.read().strip(), "stdin") if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    if not text:
        raise UserError("stdin: empty, and no terminal to ask at; give a prompt with --prompt, --prompts or a pipe")
    return text


def read_prompts(path: str, system: str | None) -> Iterator[Conversation]:
    """The prompts in a file: a row each of JSON, CSV, Parquet or Arrow, a line each of text.

    Of a row with messages, those before its last answer; else the first of its usual columns.

    Raises `UserError` where a row has none.
    """
    for number, row in read_file(path):
        try:
            if isinstance(row, BadRow):
                raise row
            yield _read_row(row, system, Path(path).parent)
        except BadRow as error:
            raise UserError(f"{path}:{number}: {error}") from None


def _read_row(row: dict[str, Any], system: str | None, folder: Path) -> Conversation:
    for column in (*CONVERSATION_COLUMNS, "prompt"):
        if isinstance(row.get(column), list):
            return _before_answer(row, row[column], system, folder)
    if isinstance(row.get("instruction"), str):  # Alpaca: instruction and input
        parts = [row["instruction"], row.get("input")]
        text = "\n\n".join(part for part in parts if isinstance(part, str) and part)
        return _before_answer(row, [user_message(text)], system, folder)
    for column in PROMPT_COLUMNS:
        if isinstance(row.get(column), str) and row[column].strip():
            return _before_answer(row, [user_message(row[column])], system, folder)
    raise BadRow(
        f"no prompt; its columns are {list_columns(row) or 'none'}, and one of messages, "
        f"{', '.join(PROMPT_COLUMNS)} is expected"
    )


def _before_answer(row: dict[str, Any], turns: list[Any], system: str | None, folder: Path) -> Conversation:
    """The conversation up to the last turn not said by the assistant. Images' paths are of `folder`."""
    answer = {"role": "assistant", "content": ""}
    conversation = make_conversation(Columns(row), [*turns, answer] if _is_open(turns) else turns)
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow("messages: nothing is asked before the assistant's turn")
    messages = [*(system_message(system) if messages[0]["role"] != "system" else []), *messages]
    asked = sum(message["content"].count(IMAGE) for message in messages) if conversation.images else 0
    images = tuple(read_image(image, folder) for image in conversation.images[:asked])
    return replace(conversation, messages=tuple(messages), trained=(False,) * len(messages), images=images)


def _is_open(turns: list[Any]) -> bool:
    """Whether the last turn is not the assistant's, so that an answer is due."""
    last = turns[-1] if turns else None
    role = last.get("role", last.get("from")) if isinstance(last, dict) else None
    return role not in ("assistant", "gpt", "model")
