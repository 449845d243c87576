"""Rewrites turns from the formats that hosts of models fine-tune on as messages.

Their contents are lists of parts, which Anthropic and Amazon call blocks. Tool calls and results
are parts of these lists too.
"""

import json
from collections.abc import Mapping
from typing import Any

# Google's role of a turn with results -> the role of what else is in it; the results become turns
# of their own
ROLES_OF_PARTS = {"function": "user"}
# the keys under which a part of Google's or Amazon's holds something other than text
MEDIA = (
    *("inlineData", "inline_data", "fileData", "file_data", "image", "document", "video"),
    *("executableCode", "executable_code", "codeExecutionResult", "code_execution_result"),
)


def split_turn(turn: Any) -> list[Any]:
    """Splits a turn whose content has tool calls or results into turns in the form of messages.

    Returns a tool's turn for each result, then a turn for the rest of the content. The calls are
    moved from the content to `tool_calls`.

    Raises `ValueError` for words behind a call, for a call beside a result, and for calls beside
    `tool_calls`.

    >>> call = {"type": "tool_use", "name": "now", "input": {}}
    >>> split_turn({"role": "assistant", "content": [call]})
    [{'role': 'assistant', 'content': [], 'tool_calls': [{'name': 'now', 'arguments': {}}]}]
    """
    turn = read_google_turn(turn)
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return [turn]
    calls: list[Any] = []
    results: list[Any] = []
    other_parts: list[Any] = []
    for block in content:
        if (result := _read_result(block)) is not None:
            results.append(result)
            continue
        parts, block_calls = _separate_call(block)
        if calls and any(map(_says_something, parts)):
            raise ValueError(
                "content: words behind a tool call, which chat templates write before it; move "
                "them before it, or into a turn behind the result"
            )
        other_parts += parts
        calls += block_calls
    if calls and results:
        raise ValueError("content: a tool call and a result in one turn; make the result its own")
    if calls and turn.get("tool_calls"):
        raise ValueError("has tool_calls, and calls in its content too; keep one")
    if calls:
        return [{**turn, "content": other_parts, "tool_calls": calls}]
    if results and not other_parts:
        return results
    return [*results, {**turn, "content": other_parts}]


def read_google_turn(turn: Any) -> Any:
    """Rewrites Google's turn {role, parts} as {role, content}; any other value stays as it is.

    >>> read_google_turn({"parts": [{"text": "Hi"}]})
    {'content': [{'text': 'Hi'}], 'role': 'user'}
    """
    parts = turn.get("parts") if isinstance(turn, dict) else None
    if parts is None or turn.get("content") is not None:
        return turn
    role = turn.get("role") or "user"
    part_list = parts if isinstance(parts, list) else [parts]
    content = [{"text": part} if isinstance(part, str) else part for part in part_list]
    other_keys = without_keys(turn, "role", "parts")
    return {**other_keys, "content": content, "role": ROLES_OF_PARTS.get(str(role).lower(), role)}


def _says_something(part: Any) -> bool:
    """Whether a part is anything but white space."""
    text = part.get("text") if isinstance(part, dict) else None
    return not isinstance(text, str) or bool(text.strip())


def _separate_call(block: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Separates a block's tool call from what else is in it.

    Returns (the other parts, the call as {name, arguments, id}), each in a list that may be empty.
    """
    if not isinstance(block, dict):
        return [block], []
    if block.get("type") == "tool_use":  # Anthropic
        return [], [_make_call(block.get("name"), block.get("input"), block.get("id"))]
    if call := _take(block, "toolUse"):  # Amazon
        tool_call = _make_call(call.get("name"), call.get("input"), call.get("toolUseId"))
    elif call := _take(block, "functionCall"):  # Google
        tool_call = _make_call(call.get("name"), call.get("args"), call.get("id"))
    else:
        part = _read_part(block)
        return [] if part is None else [part], []
    text = block.get("text")
    return [{"text": text}] if text else [], [tool_call]


def _make_call(name: Any, arguments: Any, call_id: Any) -> dict[str, Any]:
    """Makes a call {name, arguments, id} without the keys whose value is None."""
    call = {"name": name, "arguments": arguments, "id": call_id}
    return {key: value for key, value in call.items() if value is not None}


def _read_part(part: dict[str, Any]) -> dict[str, Any] | None:
    """Rewrites a part in the form that Anthropic, Mistral and OpenAI share: {type, ...}.

    A plain text part stays as it is. Returns None for a mark of Amazon's cache.

    Raises `ValueError` for a part that holds a text and something else.
    """
    if part.get("cachePoint") and not part.get("text"):
        return None
    if part.get("thought") and part.get("text") is not None:  # Google
        return {"type": "thinking", "thinking": part["text"]}
    if reasoning := _take(part, "reasoningContent"):  # Amazon
        reasoning_text = _take(reasoning, "reasoningText") or {}
        return {"type": "thinking", "thinking": reasoning_text.get("text")}
    if "type" not in part and any(map(part.get, MEDIA)):
        if part.get("text"):
            raise ValueError("content: a part with text and something else; make it two parts")
        part = without_keys(part, "text")
    url = _find_image(part)
    return {"type": "image_url", "image_url": {"url": url}} if url else part


def _find_image(part: Mapping[str, Any]) -> str | None:
    """Returns the URL of an image part: its own, or a data: URL of its bytes.

    Reads Anthropic's, Google's and Amazon's parts; returns None for any other.
    """
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict):  # Anthropic
        if source.get("data"):
            return f"data:{source.get('media_type')};base64,{source['data']}"
        return source.get("url")
    if data := _take(part, "inlineData"):  # Google
        media_type = str(data.get("mimeType", data.get("mime_type")))
        is_image = media_type.startswith("image/")
        return f"data:{media_type};base64,{data.get('data')}" if is_image else None
    image = _take(part, "image") or {}
    image_source = _take(image, "source") or {}
    if "type" not in part and isinstance(image_source.get("bytes"), str):  # Amazon
        return f"data:image/{image.get('format')};base64,{image_source['bytes']}"
    return None


def _read_result(block: Any) -> dict[str, Any] | None:
    """Rewrites a tool result as the turn of the tool; returns None for any other block."""
    if not isinstance(block, dict):
        return None
    if block.get("type") == "tool_result":  # Anthropic
        content = block.get("content")
        keys = {"tool_call_id": block.get("tool_use_id"), "is_error": block.get("is_error")}
    elif result := _take(block, "toolResult"):  # Amazon
        content = result.get("content")
        keys = {
            "tool_call_id": result.get("toolUseId"),
            "is_error": result.get("status") == "error",
        }
    elif result := _take(block, "functionResponse"):  # Google
        content = result.get("response")
        keys = {"tool_call_id": result.get("id"), "name": result.get("name")}
    else:
        return None
    if isinstance(content, list):
        content = [each for part in content for each in _read_part_of_result(part)]
    is_empty = content is None or content == []
    keys_with_value = {key: value for key, value in keys.items() if value}
    return {"role": "tool", **keys_with_value, "content": "" if is_empty else content}


def _read_part_of_result(part: Any) -> list[Any]:
    """Rewrites a part of a result as parts with a type, which Amazon's parts do not name.

    Its JSON becomes the text of the JSON. A part with a type is read as `_read_part` does.
    """
    if not isinstance(part, dict):
        return [part]
    if part.get("type"):
        return [_read_part(part)]
    parts = []
    if isinstance(part.get("text"), str):
        parts.append({"type": "text", "text": part["text"]})
    if part.get("json") is not None:
        parts.append({"type": "text", "text": json.dumps(part["json"], ensure_ascii=False)})
    if any(map(part.get, MEDIA)):
        media = _read_part(without_keys(part, "text")) or {}
        # An image has a type of its own. `parse_messages` rejects "media", the type of the others.
        parts.append({"type": "media", **media})
    return parts or [part]


def without_keys(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Copies a mapping without `keys`."""
    return {key: value for key, value in mapping.items() if key not in keys}


def _take(mapping: Mapping[str, Any], name: str) -> Any:
    """Returns the mapping under `name`, or under `name` in snake case, as Google's SDK writes it.

    Returns None if neither key holds a mapping.
    """
    snake_name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    values = (mapping.get(key) for key in (name, snake_name))
    return next((value for value in values if isinstance(value, dict)), None)
