"""Rows in the forms in which hosted models are fine-tuned, rewritten as messages.

They are Google's `contents` (Gemini), Amazon's and Anthropic's `system` and tools, and OpenAI's
and Google's pairs of answers. Their turns are read by `hosted_turns`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from finetune.config.schema import DatasetSource
from finetune.data.hosted_turns import read_google_turn, without_keys
from finetune.data.messages import BadRow, describe_value, parse_if_json

Row = Mapping[str, Any]
GOOGLES_SYSTEM = ("systemInstruction", "system_instruction")
# the columns of which a pair is made: OpenAI's and Google's
PAIRS = {
    "preferred_output": ("input", "preferred_output", "non_preferred_output"),
    "completions": ("messages", "completions"),
}


def rewrite_row(row: Row, source: DatasetSource) -> Row:
    """Gives a row of a hosted model the columns of this project.

    Others, those that the source names, and columns that are not in a host's form stay as they
    are.

    Raises `BadRow` where the row has such a column too, with another value.

    >>> row = {"contents": [{"role": "model", "parts": [{"text": "Hi"}]}]}
    >>> rewrite_row(row, DatasetSource(path="gemini.jsonl"))
    {'messages': [{'content': [{'text': 'Hi'}], 'role': 'model'}]}
    """
    is_named = any((source.messages_column, source.prompt_column, source.text_column))
    for column, rewrite in REWRITTEN.items():
        value = row.get(column)
        if column in AS_JSON and isinstance(value, str):
            value = parse_if_json(value)
        if isinstance(value, str) and column in GOOGLES_SYSTEM:
            value = [value]
        if not isinstance(value, dict | list) or (column == "contents" and is_named):
            continue
        try:
            made = rewrite(row, value)
        except (KeyError, TypeError, AttributeError):  # parts of another form
            continue
        if made is not None:
            row = _exchange(row, column, made)
    return row


def _exchange(row: Row, column: str, made: Row) -> Row:
    """The row with the columns `made` in place of one. Raises `BadRow` where it has others."""
    rest = without_keys(row, *PAIRS.get(column, (column,)))
    for name, value in made.items():
        if rest.get(name) and value and rest[name] != value:
            raise BadRow(f"{column} and {name}: the row has both, and they differ; keep one")
    return {**rest, **{name: value for name, value in made.items() if not rest.get(name)}}


def _rewrite_contents(row: Row, contents: Any) -> Row | None:
    """Google's turns: a list of {role, parts}."""
    if contents and not any(turn.get("parts") for turn in contents):
        return None
    return {"messages": [read_google_turn(turn) for turn in contents]}


def _rewrite_system(row: Row, system: Any) -> Row | None:
    """A system message in parts: Google's {parts}, Amazon's and Anthropic's list."""
    if isinstance(system, dict) and system and not system.keys() & {"parts", "text"}:
        return None
    try:
        return {"system": _read_system(system)}
    except BadRow:
        if row.get("messages"):
            raise
        return None  # of a row that is no conversation, it may be anything


def _read_system(part: Any) -> str:
    """The text of a system message, or of a part of it. Raises `BadRow`."""
    if isinstance(part, dict) and part.get("parts") is not None:
        part = part["parts"]
    if isinstance(part, list):
        return "".join(map(_read_system, part))
    text = part.get("text") if isinstance(part, dict) else part
    if text is None and isinstance(part, dict) and not any(map(part.get, part.keys() - OF_SYSTEM)):
        return ""  # Amazon's mark of its cache, or nothing
    if not isinstance(text, str):
        raise BadRow(f"system: parts with text are expected, found {describe_value(part)}")
    return text


def _rewrite_pair(row: Row, preferred: Any) -> Row:
    """OpenAI's pair: {input: {messages, tools}, preferred_output, non_preferred_output}."""
    asked = row["input"]
    return {
        **without_keys(asked, "messages"),
        "prompt": asked["messages"],
        "chosen": preferred,
        "rejected": row["non_preferred_output"],
    }


def _rewrite_completions(row: Row, completions: Any) -> Row | None:
    """Google's pair: a list of two {score, completion}, of which one has the score 1."""
    by_score = {each["score"]: each["completion"] for each in completions}
    if not completions:
        return None
    if by_score.keys() != {0, 1} or len(completions) > len(by_score):
        raise BadRow("completions: two answers are expected, one with the score 1, one with 0")
    sides = {"chosen": [by_score[1]], "rejected": [by_score[0]]}
    return {"prompt": row["messages"], **sides} if "messages" in row else sides


def _rewrite_tool_config(row: Row, config: Any) -> Row | None:
    """Amazon's tools: {tools: [{toolSpec: {name, description, inputSchema: {json}}}]}."""
    if not config.get("tools"):  # Google's, which says how tools are chosen
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
    """Anthropic's tools, whose parameters are `input_schema`, and Google's, which are declared."""
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
    """A function that Google declares: its parameters in one of three names."""
    for name in ("parametersJsonSchema", "parameters_json_schema"):
        if function.get(name) is not None:
            return {**without_keys(function, name), "parameters": function[name]}
    lowered: Row = _lower_types(function)
    return lowered


def _lower_types(schema: Any) -> Any:
    """A schema with JSON's names of types, which Google writes in capitals."""
    if isinstance(schema, list):
        return [_lower_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    lowered = {key: _lower_types(value) for key, value in schema.items()}
    if isinstance(schema.get("type"), str):
        lowered["type"] = schema["type"].lower()
    return lowered


# each makes columns of a row's column in its form; None where it has another
REWRITTEN: Mapping[str, Callable[[Row, Any], Row | None]] = {
    "contents": _rewrite_contents,
    **dict.fromkeys(GOOGLES_SYSTEM, _rewrite_system),
    "system": _rewrite_system,
    "preferred_output": _rewrite_pair,
    "completions": _rewrite_completions,
    "toolConfig": _rewrite_tool_config,
    "tools": _rewrite_tools,
}
AS_JSON = ("contents", "tools", *GOOGLES_SYSTEM)  # which may be the text of JSON
OF_SYSTEM = {"type", "cachePoint", "cache_control", "role"}  # that are no words
