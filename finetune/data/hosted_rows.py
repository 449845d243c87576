"""Rewrites rows from the formats that hosts of models fine-tune on as rows of messages.

These are Google's `contents` (Gemini), Amazon's and Anthropic's `system` and tools, and the pairs
of answers that OpenAI, Google and ms-swift read. `hosted_turns` reads the turns in them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from finetune.config.schema import DatasetSource
from finetune.data.hosted_turns import read_google_turn, without_keys
from finetune.data.messages import BadRow, describe_value, parse_if_json, read_role

Row = Mapping[str, Any]
GOOGLES_SYSTEM = ("systemInstruction", "system_instruction")
# the column by which a pair is recognized -> all columns of the pair; OpenAI's, Google's, and two
# of ms-swift's
PAIRS = {
    "preferred_output": ("input", "preferred_output", "non_preferred_output"),
    "completions": ("messages", "completions"),
    "rejected_response": ("messages", "rejected_response"),
    "rejected_messages": ("messages", "rejected_messages"),
}


def rewrite_row(row: Row, source: DatasetSource) -> Row:
    """Replaces the columns of a host's format by those that `formats` and `preferences` read.

    All other columns stay as they are. So does `contents` if the source names the columns to read,
    and a rejected answer whose column it names.

    Raises `BadRow` if the row already has one of the new columns with another value.

    >>> row = {"contents": [{"role": "model", "parts": [{"text": "Hi"}]}]}
    >>> rewrite_row(row, DatasetSource(path="gemini.jsonl"))
    {'messages': [{'content': [{'text': 'Hi'}], 'role': 'model'}]}
    """
    is_named = any((source.messages_column, source.prompt_column, source.text_column))
    for column, rewrite in REWRITTEN.items():
        value = row.get(column)
        if column in AS_JSON and isinstance(value, str):
            value = parse_if_json(value)
        if isinstance(value, str) and column in MAYBE_TEXT:
            value = [value]
        is_kept = source.rejected_column == column or (column == "contents" and is_named)
        if not isinstance(value, dict | list) or is_kept:
            continue
        try:
            new_columns = rewrite(row, value)
        except (KeyError, TypeError, AttributeError):
            # The value is not in the host's format: the column is not a host's.
            continue
        if new_columns is not None:
            row = _replace_column(row, column, new_columns)
    return row


def _replace_column(row: Row, column: str, new_columns: Row) -> Row:
    """Replaces a column, or all columns of a pair, by `new_columns`.

    A value that the row already has in one of these stays. Raises `BadRow` if the two differ.
    """
    others = without_keys(row, *PAIRS.get(column, (column,)))
    for name, value in new_columns.items():
        if others.get(name) and value and others[name] != value:
            raise BadRow(f"{column} and {name}: the row has both, and they differ; keep one")
    added = {name: value for name, value in new_columns.items() if not others.get(name)}
    return {**others, **added}


def _rewrite_contents(row: Row, contents: Any) -> Row | None:
    """Rewrites Google's turns, a list of {role, parts}, as `messages`."""
    if contents and not any(turn.get("parts") for turn in contents):
        return None
    return {"messages": [read_google_turn(turn) for turn in contents]}


def _rewrite_system(row: Row, system: Any) -> Row | None:
    """Joins the parts of a system message: Google's {parts}, or Amazon's and Anthropic's list."""
    if isinstance(system, dict) and system and not system.keys() & {"parts", "text"}:
        return None
    try:
        return {"system": _read_system(system)}
    except BadRow:
        if row.get("messages"):
            raise
        return None  # the row is not a conversation, so its `system` may be anything


def _read_system(part: Any) -> str:
    """Reads the text of a system message or of one of its parts.

    Raises `BadRow` for a part without text that holds anything else.
    """
    if isinstance(part, dict) and part.get("parts") is not None:
        part = part["parts"]
    if isinstance(part, list):
        return "".join(map(_read_system, part))
    text = part.get("text") if isinstance(part, dict) else part
    if text is None and isinstance(part, dict):
        is_without_content = not any(map(part.get, part.keys() - NOT_CONTENT))
        if is_without_content:
            return ""  # such as the mark of Amazon's cache
    if not isinstance(text, str):
        raise BadRow(f"system: parts with text are expected, found {describe_value(part)}")
    return text


def _rewrite_pair(row: Row, preferred: Any) -> Row:
    """Rewrites OpenAI's pair as `prompt`, `chosen`, `rejected` and the columns of its input.

    The pair is {input: {messages, tools}, preferred_output, non_preferred_output}.
    """
    question = row["input"]
    return {
        **without_keys(question, "messages"),
        "prompt": question["messages"],
        "chosen": preferred,
        "rejected": row["non_preferred_output"],
    }


def _rewrite_completions(row: Row, completions: Any) -> Row | None:
    """Rewrites Google's pair as `chosen` and `rejected`, and the row's messages as `prompt`.

    The pair is a list of two {score, completion}: the chosen one has score 1, the other 0.
    """
    by_score = {each["score"]: each["completion"] for each in completions}
    if not completions:
        return None
    if by_score.keys() != {0, 1} or len(completions) > len(by_score):
        raise BadRow("completions: two answers are expected, one with the score 1, one with 0")
    sides = {"chosen": [by_score[1]], "rejected": [by_score[0]]}
    return {"prompt": row["messages"], **sides} if "messages" in row else sides


def _rewrite_rejected_response(row: Row, rejected: Any) -> Row | None:
    """Rewrites ms-swift's pair as `prompt`, `chosen` and `rejected`.

    The rejected answer, a text or turns, stands in place of all that follows the last question.
    """
    messages = row["messages"]
    if not isinstance(messages, list):
        return None
    asked = [number for number, turn in enumerate(messages) if read_role(turn) == "user"]
    end = asked[-1] + 1 if asked else 0
    if not rejected or not messages[end:]:
        return None
    turns = [
        {"role": "assistant", "content": turn} if isinstance(turn, str) else turn
        for turn in rejected
    ]
    return {"prompt": messages[:end], "chosen": messages[end:], "rejected": turns}


def _rewrite_rejected_messages(row: Row, rejected: Any) -> Row:
    """Rewrites ms-swift's pair of whole conversations as `chosen` and `rejected`."""
    return {"chosen": row["messages"], "rejected": rejected}


def _rewrite_tool_config(row: Row, config: Any) -> Row | None:
    """Rewrites Amazon's tools as `tools`.

    They are {tools: [{toolSpec: {name, description, inputSchema: {json}}}]}. An entry that is only
    a mark of Amazon's cache is left out.
    """
    if not config.get("tools"):  # Google's config, which says how tools are chosen
        return None
    tools = []
    for tool in config["tools"]:
        if tool.get("toolSpec") is None and tool.get("cachePoint"):
            continue
        specification = tool["toolSpec"]
        schema = parse_if_json((specification.get("inputSchema") or {}).get("json")) or {}
        tools.append({**without_keys(specification, "inputSchema"), "parameters": schema})
    return {"tools": tools}


def _rewrite_tools(row: Row, listed: Any) -> Row:
    """Rewrites Anthropic's and Google's tools with their parameters as `parameters`.

    Anthropic's name them `input_schema`. Google's are lists of function declarations. Other tools
    stay as they are.
    """
    tools: list[Any] = []
    for tool in map(parse_if_json, listed if isinstance(listed, list) else [listed]):
        if declared := tool.get("functionDeclarations") or tool.get("function_declarations"):
            tools += map(_read_declaration, declared)
        elif tool.get("input_schema") is not None:
            others = without_keys(tool, "input_schema", "cache_control", "type")
            tools.append({**others, "parameters": tool["input_schema"]})
        else:
            tools.append(tool)
    return {"tools": tools}


def _read_declaration(function: Row) -> Row:
    """Rewrites a function declaration of Google's with its parameters as `parameters`.

    They stand under one of the two names below as a JSON schema, or under `parameters` as Google's
    schema, whose names of types are lowered.
    """
    for name in ("parametersJsonSchema", "parameters_json_schema"):
        if function.get(name) is not None:
            return {**without_keys(function, name), "parameters": function[name]}
    lowered: Row = _lower_types(function)
    return lowered


def _lower_types(schema: Any) -> Any:
    """Writes the names of types in a schema in lower case, as JSON schemas do; Google's are upper.

    It does so at every level of the schema.
    """
    if isinstance(schema, list):
        return [_lower_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    lowered = {key: _lower_types(value) for key, value in schema.items()}
    if isinstance(schema.get("type"), str):
        lowered["type"] = schema["type"].lower()
    return lowered


# column -> makes the new columns of (row, the column's value); it returns None, or raises KeyError,
# TypeError or AttributeError, for a value in another format
REWRITTEN: Mapping[str, Callable[[Row, Any], Row | None]] = {
    "contents": _rewrite_contents,
    **dict.fromkeys(GOOGLES_SYSTEM, _rewrite_system),
    "system": _rewrite_system,
    "preferred_output": _rewrite_pair,
    "completions": _rewrite_completions,
    "rejected_response": _rewrite_rejected_response,
    "rejected_messages": _rewrite_rejected_messages,
    "toolConfig": _rewrite_tool_config,
    "tools": _rewrite_tools,
}
AS_JSON = ("contents", "tools", *GOOGLES_SYSTEM)  # columns that may hold JSON text
MAYBE_TEXT = ("rejected_response", *GOOGLES_SYSTEM)  # columns whose text is a list of one
NOT_CONTENT = {"type", "cachePoint", "cache_control", "role"}  # keys of a part of a system message
