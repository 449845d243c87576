"""Prompts: what the model in training is asked, and the rest of a row, which rewards read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from finetune.config.row_formats import FORMATS
from finetune.config.schema import DatasetSource
from finetune.data.formats import (
    ANSWER_COLUMNS,
    CONVERSATION_COLUMNS,
    QUESTION_COLUMNS,
    Columns,
    Group,
    ParsedRow,
    Question,
    Row,
    make_conversation,
    make_message,
    take_question,
)
from finetune.data.messages import BadRow, describe_value, list_columns

ANSWER = "answer"  # the argument of reward functions that has the row's own answer
OF_COMPLETION = ("prompt", "completion", "completion_ids")  # columns that TRL does not hand to reward functions
EMPTY = make_message("assistant", "")  # in the place of the answer, which a conversation needs


def parse_prompt(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a row as a prompt: messages without the last answer, a question as the user's turn, or a text.

    Raises `BadRow`.

    >>> parsed = parse_prompt({"prompt": "2+2=", "completion": "4", "level": 1}, DatasetSource(path="sums.jsonl"))
    >>> parsed.document.asked, parsed.document.row
    ('2+2=', '{"prompt": "2+2=", "columns": {"level": 1, "answer": "4"}}')
    """
    columns, name = Columns(row), _find_prompt(row, source)
    turns: list[Any]
    if name == "instruction":
        turns = take_question(columns, source)
    else:
        value = columns.take(name)
        if isinstance(value, str):
            is_chat = FORMATS[source.type].is_chat if source.type else name != "prompt"
            turns = [make_message("user", value)] if is_chat else []
        elif isinstance(value, list) and value:
            turns = value
        else:
            raise BadRow(f"{name}: text or a list of messages is expected, found {describe_value(value)}")
    answer = _find_answer(columns, source)
    if not turns:
        return ParsedRow((Group((Question(row[name], _keep(row, row[name], answer)),)),), "prompt_completion", ())
    has_answer = isinstance(turns[-1], dict) and turns[-1].get("role", turns[-1].get("from")) in ("assistant", "gpt")
    conversation = make_conversation(columns, turns if has_answer else [*turns, EMPTY])
    if conversation.images:
        raise BadRow("images: completions are sampled of text alone; remove the images, or these rows")
    if conversation.messages[-1]["role"] != "assistant" or len(conversation.messages) == 1:
        raise BadRow(f"{name}: the prompt is empty, or it does not end where the assistant would answer")
    if has_answer:
        answer = str(conversation.messages[-1]["content"])
    messages = conversation.messages[:-1]
    asked = replace(conversation, messages=messages, trained=(False,) * len(messages))
    return ParsedRow((Group((Question(asked, _keep(row, list(messages), answer)),)),), "messages", ())


def _find_prompt(row: Row, source: DatasetSource) -> str:
    named = source.prompt_column or source.messages_column
    if named is not None and row.get(named) is None:
        raise BadRow(f"{named}: nothing; its columns are {list_columns(row)}")
    usual = ("prompt", *CONVERSATION_COLUMNS, *QUESTION_COLUMNS[1:])
    name = named or next((name for name in usual if row.get(name) is not None), None)
    if name is None:
        raise BadRow(
            f"no prompt: its columns are {list_columns(row) or 'none'}; name the one that holds the question or the "
            "messages (prompt_column)"
        )
    return name


def _find_answer(columns: Columns, source: DatasetSource) -> str | None:
    """The row's own answer, where it has one as text."""
    names = (source.completion_column,) if source.completion_column else ANSWER_COLUMNS
    return next((columns.row[name] for name in names if isinstance(columns.row.get(name), str)), None)


def _keep(row: Row, prompt: Any, answer: str | None) -> str:
    """What reward functions get of the row, as JSON; what JSON lacks, such as dates, as text."""
    columns = {name: value for name, value in row.items() if name not in OF_COMPLETION}
    if answer is not None:
        columns.setdefault(ANSWER, answer)
    return json.dumps({"prompt": prompt, "columns": columns}, ensure_ascii=False, default=str)


def check_prompt(question: Question, text: str, has_template: bool) -> Iterator[str]:
    """Names of the checks for what the chat template made of a prompt: the `text`."""
    if isinstance(question.asked, str):
        return
    if not has_template:
        yield "plain_template"
    for role, name in (("system", "system_dropped"), ("user", "user_dropped")):
        contents = [m["content"].strip() for m in question.asked.messages if m["role"] == role]
        if any(content.rpartition("\n")[2].strip() not in text for content in contents):
            yield name
