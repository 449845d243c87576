"""Turns in the forms in which hosted models are fine-tuned, rewritten as messages.

Their contents are lists of parts or blocks, in which Anthropic, Amazon and Google put tool calls
and results too.
"""

import json
from typing import Any

from finetune.constants import Fields, Record

ROLES_OF_PARTS = {"function": "user"}  # Google's, whose results become turns of tools
# what a part of Google's or Amazon's holds in place of a text
MEDIA = (
    *("inlineData", "inline_data", "fileData", "file_data", "image", "document", "video"),
    *("executableCode", "executable_code", "codeExecutionResult", "code_execution_result"),
)


def split_turn(turn: Any) -> list[Any]:
    """Splits a turn whose content has blocks of tool calls or results.

    Returns a turn for each result, then one for the rest of the content, with its calls.

    Raises `ValueError` for blocks that a message has no place for where they stand.

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
    rest: list[Any] = []
    for block in content:
        if (result := _read_result(block)) is not None:
            results.append(result)
            continue
        words, call = _separate_call(block)
        if calls and any(map(_says_something, words)):
            raise ValueError(
                "content: words behind a tool call, which chat templates write before it; move "
                "them before it, or into a turn behind the result"
            )
        rest += words
        calls += call
    if calls and results:
        raise ValueError("content: a tool call and a result in one turn; make the result its own")
    if calls and turn.get("tool_calls"):
        raise ValueError("has tool_calls, and calls in its content too; keep one")
    if calls:
        return [{**turn, "content": rest, "tool_calls": calls}]
    if results and not rest:
        return results
    return [*results, {**turn, "content": rest}]


def read_google_turn(turn: Any) -> Any:
    """Google's turn {role, parts} as a message; another as it is.

    >>> read_google_turn({"parts": [{"text": "Hi"}]})
    {'content': [{'text': 'Hi'}], 'role': 'user'}
    """
    parts = turn.get("parts") if isinstance(turn, dict) else None
    if parts is None or turn.get("content") is not None:
        return turn
    role = turn.get("role") or "user"
    listed = parts if isinstance(parts, list) else [parts]
    content = [{"text": part} if isinstance(part, str) else part for part in listed]
    others = without_keys(turn, "role", "parts")
    return {**others, "content": content, "role": ROLES_OF_PARTS.get(str(role).lower(), role)}


def _says_something(part: Any) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return not isinstance(text, str) or bool(text.strip())


def _separate_call(block: Any) -> tuple[list[Any], list[Record]]:
    """Returns (the parts of a block beside a tool call, its calls {name, arguments, id})."""
    if not isinstance(block, dict):
        return [block], []
    if block.get("type") == "tool_use":  # Anthropic
        return [], [_make_call(block.get("name"), block.get("input"), block.get("id"))]
    if call := _take(block, "toolUse"):  # Amazon
        made = _make_call(call.get("name"), call.get("input"), call.get("toolUseId"))
    elif call := _take(block, "functionCall"):  # Google
        made = _make_call(call.get("name"), call.get("args"), call.get("id"))
    else:
        part = _read_part(block)
        return [] if part is None else [part], []
    text = block.get("text")
    return [{"text": text}] if text else [], [made]


def _make_call(name: Any, arguments: Any, call_id: Any) -> Record:
    return _without_nulls(name=name, arguments=arguments, id=call_id)


def _read_part(part: Record) -> Record | None:
    """A part as Anthropic's, Mistral's and OpenAI's; None for a mark of Amazon's cache.

    Raises `ValueError` where it holds a text and something else.
    """
    if part.get("cachePoint") and not part.get("text"):
        return None
    if part.get("thought") and part.get("text") is not None:  # Google
        return {"type": "thinking", "thinking": part["text"]}
    if reasoning := _take(part, "reasoningContent"):  # Amazon
        return {
            "type": "thinking",
            "thinking": (_take(reasoning, "reasoningText") or {}).get("text"),
        }
    if "type" not in part and any(map(part.get, MEDIA)):
        if part.get("text"):
            raise ValueError("content: a part with text and something else; make it two parts")
        part = without_keys(part, "text")
    address = _find_image(part)
    return {"type": "image_url", "image_url": {"url": address}} if address else part


def _find_image(part: Fields) -> str | None:
    """The address of an image of Anthropic's, Amazon's or Google's; None for another part."""
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict):  # Anthropic
        if source.get("data"):
            return f"data:{source.get('media_type')};base64,{source['data']}"
        return source.get("url")
    if data := _take(part, "inlineData"):  # Google
        kind = str(data.get("mimeType", data.get("mime_type")))
        return f"data:{kind};base64,{data.get('data')}" if kind.startswith("image/") else None
    image = _take(part, "image") or {}
    held = _take(image, "source") or {}
    if "type" not in part and isinstance(held.get("bytes"), str):  # Amazon
        return f"data:image/{image.get('format')};base64,{held['bytes']}"
    return None


def _read_result(block: Any) -> Record | None:
    """Reads a block as the turn of a tool; None for another block."""
    if not isinstance(block, dict):
        return None
    if block.get("type") == "tool_result":  # Anthropic
        content = block.get("content")
        names = {"tool_call_id": block.get("tool_use_id"), "is_error": block.get("is_error")}
    elif result := _take(block, "toolResult"):  # Amazon
        content = result.get("content")
        names = {
            "tool_call_id": result.get("toolUseId"),
            "is_error": result.get("status") == "error",
        }
    elif result := _take(block, "functionResponse"):  # Google
        content = result.get("response")
        names = {"tool_call_id": result.get("id"), "name": result.get("name")}
    else:
        return None
    if isinstance(content, list):
        content = [each for part in content for each in _read_part_of_result(part)]
    empty = content is None or content == []
    read = _without_nulls(role="tool", **{key: value or None for key, value in names.items()})
    return read | {"content": "" if empty else content}


def _read_part_of_result(part: Any) -> list[Any]:
    """A result's part with the type that Amazon's does not name; JSON as its text."""
    if not isinstance(part, dict) or part.get("type"):
        return [_read_part(part) if isinstance(part, dict) else part]
    parts = []
    if isinstance(part.get("text"), str):
        parts.append({"type": "text", "text": part["text"]})
    if part.get("json") is not None:
        parts.append({"type": "text", "text": json.dumps(part["json"], ensure_ascii=False)})
    if any(map(part.get, MEDIA)):
        read = _read_part(without_keys(part, "text"))
        parts.append({"type": "media", **(read or {})})  # of which only an image is read
    return parts or [part]


def without_keys(mapping: Fields, *keys: str) -> Record:
    """A copy of a mapping without some of its keys."""
    return {key: value for key, value in mapping.items() if key not in keys}


def _without_nulls(**values: Any) -> Record:
    return {key: value for key, value in values.items() if value is not None}


def _take(mapping: Fields, name: str) -> Any:
    """Returns a mapping under its name, or under that of Google's SDK, in snake case."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    values = (mapping.get(each) for each in (name, snake))
    return next((value for value in values if isinstance(value, dict)), None)
