"""The messages of a conversation under the names that chat templates read, with their tool calls and tool schemas."""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]  # role, content and whatever else the chat template reads
Tool = dict[str, Any]  # a JSON schema, as {"type": "function", "function": {name, description, parameters}}

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "prompter": "user",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALL_ROLES = ("function_call", "tool_call")  # their content is the calls, as JSON text
READ_HERE = frozenset({"role", "from", "content", "value", "train", "weight", "tool_calls", "function_call"})


class BadRow(Exception):
    """A row that fits no known format. Its text says what is wrong with the row; the reader adds file and row number."""


def read_messages(turns: Sequence[Any]) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """(the turns as chat templates read them, whether each is trained on). Raises `BadRow`."""
    if not turns:
        raise BadRow("the list of messages is empty")
    messages: list[Message] = []
    trained: list[bool] = []
    for number, turn in enumerate(turns, 1):
        message, is_trained = _message(turn, number)
        if messages and messages[-1]["role"] == "assistant" and _role(turn) in CALL_ROLES:
            # ShareGPT gives words and each call a turn of its own; to a chat template they are one.
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
            trained[-1] = trained[-1] and is_trained
            continue
        messages.append(message)
        trained.append(is_trained and message["role"] == "assistant")
    _check_order([message["role"] for message in messages])
    return tuple(messages), tuple(trained)


def read_tools(value: Any) -> tuple[Tool, ...]:
    """The tool schemas of a row, given as a list, or as JSON text of one. Raises `BadRow`.

    >>> read_tools('[{"name": "now", "parameters": {}}]')
    ({'type': 'function', 'function': {'name': 'now', 'parameters': {}}},)
    """
    tools = parse_json(value)
    if not tools:
        return ()
    tools = [parse_json(tool) for tool in (tools if isinstance(tools, list | tuple) else [tools])]
    if not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools: a list of JSON schemas is expected, found {shown(value)}")
    return tuple(
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    )


def parse_json(value: Any) -> Any:
    """What a JSON text holds; any other value, and text that is no JSON, as it is."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def shown(value: Any) -> str:
    """A value with its type, short enough for a message."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        text = "deeply nested values"
    return f"{text[:60]}... ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"


def _message(turn: Any, number: int) -> tuple[Message, bool]:
    if not isinstance(turn, dict):
        raise BadRow(f"message {number}: a mapping with role and content is expected, found {shown(turn)}")
    role = _role(turn)
    if role not in ROLES:
        raise BadRow(
            f"message {number}: unknown role {shown(turn.get('role', turn.get('from')))}; known are system, developer, "
            "user, assistant, tool (human, gpt, function_call and observation too)"
        )
    content = turn.get("content", turn.get("value"))
    calls = parse_json(turn.get("tool_calls")) or parse_json(turn.get("function_call"))
    if role in CALL_ROLES:
        content, calls = "", parse_json(content)
        if not calls:
            raise BadRow(f"message {number}: {role}: JSON of {{name, arguments}} is expected, found nothing")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"message {number}: content: text is expected, found {shown(content)}")
    message = {key: value for key, value in turn.items() if key not in READ_HERE and value is not None}
    if calls:
        message["tool_calls"] = [_call(call, number) for call in (calls if isinstance(calls, list) else [calls])]
    train = turn.get("train") if turn.get("train") is not None else turn.get("weight")
    if train not in (None, True, False):  # 0 and 1 are equal to these
        raise BadRow(f"message {number}: train: true or false is expected, found {shown(train)}")
    return {"role": ROLES[role], "content": content, **message}, train is None or bool(train)


def _role(turn: Any) -> str:
    role = turn.get("role", turn.get("from"))
    return role.lower().replace("-", "_") if isinstance(role, str) else ""


def _call(value: Any, number: int) -> dict[str, Any]:
    """One tool call as {"type": "function", "function": {name, arguments}}, its arguments parsed. Raises `BadRow`."""
    call = parse_json(value)
    if isinstance(call, dict) and "function" not in call:  # {name, arguments}, as ShareGPT has it
        apart = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        call = {**apart, "function": {"arguments": {}} | {k: v for k, v in call.items() if k not in apart}}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"message {number}: a tool call {{name, arguments}} is expected, found {shown(value)}")
    if "arguments" in function:
        arguments = parse_json(function["arguments"])
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise BadRow(
                f"message {number}: tool call {function['name']}: arguments: a JSON object is expected, found "
                f"{shown(function['arguments'])}"
            )
        function = {**function, "arguments": arguments}
    return {"type": "function", **call, "function": function}


def _part(part: Any, number: int) -> str:
    """The text of one part of a content list, as the OpenAI API writes them."""
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRow(f"message {number}: content: only text parts are known here, found {shown(part)}")


def _check_order(roles: list[str]) -> None:
    for number, (before, role) in enumerate(zip([None, *roles], roles, strict=False), 1):
        if role in ("system", "developer") and before not in (None, "system", "developer"):
            raise BadRow(f"message {number}: roles out of order: a {role} turn may only come first, not after {before}")
        if role == before and role in ("user", "assistant"):
            raise BadRow(f"message {number}: roles out of order: two {role} turns in a row; join them, or drop the row")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRow(f"message {number}: roles out of order: a tool turn answers an assistant, not {before}")
    if "assistant" not in roles:
        raise BadRow(f"no assistant turn to learn from; the roles are {', '.join(roles)}")
