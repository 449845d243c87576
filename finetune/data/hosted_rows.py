"""Rows in the forms in which hosted models are fine-tuned, rewritten as messages.

They are Google's `contents` (Gemini), Amazon's and Anthropic's `system` and blocks of tool calls
and results, and OpenAI's pairs of answers.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]
GOOGLE_ROLES = {"model": "assistant", "function": "user"}  # whose results become turns of tools
OPENAI_PAIR = ("input", "preferred_output", "non_preferred_output")


def rewrite_row(row: Row) -> Row:
    """Gives a row of a hosted model the columns of this project.

    Others, and columns that are not in a host's form, stay as they are.

    >>> rewrite_row({"contents": [{"role": "model", "parts": [{"text": "Hi"}]}]})
    {'messages': [{'role': 'assistant', 'content': [{'text': 'Hi'}]}]}
    """
    for column, rewrite in REWRITTEN.items():
        if isinstance(row.get(column), dict | list):
            try:
                row = rewrite(row, column)
            except (KeyError, TypeError, AttributeError):  # parts of another form
                continue
    return row


def _rewrite_contents(row: Row, column: str) -> Row:
    """Google's turns: a list of {role, parts}."""
    messages = []
    for turn in row[column]:
        role = turn.get("role", "user")
        parts = [_read_google_part(part) for part in turn["parts"]]
        messages.append({"role": GOOGLE_ROLES.get(role, role), "content": parts})
    return {**_without(row, column), "messages": messages}


def _read_google_part(part: Any) -> Any:
    """Google's reasoning as Anthropic's and Mistral's; any other part as it is."""
    if isinstance(part, dict) and part.get("thought") and "text" in part:
        return {"type": "thinking", "thinking": part["text"]}
    return part


def _rewrite_system(row: Row, column: str) -> Row:
    """A system message in parts: Google's {parts}, Amazon's and Anthropic's list."""
    parts = row[column]["parts"] if isinstance(row[column], dict) else row[column]
    message = {"role": "system", "content": parts}
    return {**_without(row, column), "messages": [message, *row.get("messages", ())]}


def _rewrite_pair(row: Row, column: str) -> Row:
    """OpenAI's pair: {input: {messages, tools}, preferred_output, non_preferred_output}."""
    asked = row["input"]
    return {
        **_without(row, *OPENAI_PAIR),
        **_without(asked, "messages"),
        "prompt": asked["messages"],
        "chosen": row[column],
        "rejected": row["non_preferred_output"],
    }


def _rewrite_tool_config(row: Row, column: str) -> Row:
    """Amazon's tools: {tools: [{toolSpec: {name, description, inputSchema: {json}}}]}."""
    tools = []
    for tool in row[column].get("tools", ()):
        specification = tool["toolSpec"]
        schema = specification.get("inputSchema", {}).get("json", {})
        tools.append({**_without(specification, "inputSchema"), "parameters": schema})
    return {**_without(row, column), "tools": tools}


def _rewrite_tools(row: Row, column: str) -> Row:
    """Anthropic's tools, whose parameters are `input_schema`, and Google's, which are declared."""
    tools: list[Any] = []
    for tool in row[column]:
        if declared := tool.get("functionDeclarations") or tool.get("function_declarations"):
            tools += [_lower_types(function) for function in declared]
        elif "input_schema" in tool:
            tools.append({**_without(tool, "input_schema"), "parameters": tool["input_schema"]})
        else:
            tools.append(tool)
    return {**row, column: tools}


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


# in the order in which they are rewritten: a system message follows `contents`
REWRITTEN: Mapping[str, Callable[[Row, str], Row]] = {
    "contents": _rewrite_contents,
    "systemInstruction": _rewrite_system,
    "system_instruction": _rewrite_system,
    "system": _rewrite_system,
    "preferred_output": _rewrite_pair,
    "toolConfig": _rewrite_tool_config,
    "tools": _rewrite_tools,
}


def split_turn(turn: Any) -> list[Any]:
    """Splits a turn whose content has blocks of tool calls or results.

    Returns a turn for each result, then one for the rest of the content, with its calls.

    >>> call = {"type": "tool_use", "name": "now", "input": {}}
    >>> split_turn({"role": "assistant", "content": [call]})
    [{'role': 'assistant', 'content': [], 'tool_calls': [{'name': 'now', 'arguments': {}}]}]
    """
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return [turn]
    calls = []
    results = []
    rest = []
    for block in content:
        if (call := _read_call(block)) is not None:
            calls.append(call)
        elif (result := _read_result(block)) is not None:
            results.append(result)
        else:
            rest.append(block)
    if calls:
        return [*results, {**turn, "content": rest, "tool_calls": calls}]
    if results:
        return [*results, {**turn, "content": rest}] if rest else results
    return [turn]


def _read_call(block: Any) -> dict[str, Any] | None:
    """Reads a block as a tool call {name, arguments, id}; None for another block."""
    if not isinstance(block, dict):
        return None
    if block.get("type") == "tool_use":  # Anthropic
        names = {"id": block.get("id")}
        return _without_nulls(name=block.get("name"), arguments=block.get("input"), **names)
    if call := _take(block, "toolUse"):  # Amazon
        names = {"id": call.get("toolUseId")}
        return _without_nulls(name=call.get("name"), arguments=call.get("input"), **names)
    if call := _take(block, "functionCall"):  # Google
        names = {"id": call.get("id")}
        return _without_nulls(name=call.get("name"), arguments=call.get("args"), **names)
    return None


def _read_result(block: Any) -> dict[str, Any] | None:
    """Reads a block as the turn of a tool; None for another block."""
    if not isinstance(block, dict):
        return None
    if block.get("type") == "tool_result":  # Anthropic
        content = block.get("content")
        names = {"tool_call_id": block.get("tool_use_id")}
    elif result := _take(block, "toolResult"):  # Amazon
        content = _read_amazon_content(result.get("content"))
        names = {"tool_call_id": result.get("toolUseId")}
    elif result := _take(block, "functionResponse"):  # Google
        content = result.get("response")
        names = {"tool_call_id": result.get("id"), "name": result.get("name")}
    else:
        return None
    return _without_nulls(role="tool", **names) | {"content": content or ""}


def _read_amazon_content(content: Any) -> Any:
    """A result's parts with the type that they do not name; JSON as its text."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, dict) and "json" in part:
            parts.append({"type": "text", "text": json.dumps(part["json"], ensure_ascii=False)})
        elif isinstance(part, dict) and "text" in part:
            parts.append({"type": "text", **part})
        else:
            parts.append(part)
    return parts


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _without_nulls(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _take(mapping: Mapping[str, Any], name: str) -> Any:
    """Returns a mapping under its name, or under that of Google's SDK, in snake case."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    value = mapping.get(name, mapping.get(snake))
    return value if isinstance(value, dict) else None
