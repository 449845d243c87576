"""Rows of a file as conversations, prompts with completions, or text; recognised from their columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.recipe.schema import DatasetSource

Row = Mapping[str, Any]
Message = dict[str, Any]  # role, content and whatever else the chat template reads

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
}
KNOWN_FORMATS = (
    "messages (a list of {role, content}), conversations (a list of {from, value}), instruction + output (input too), "
    "prompt + completion, text"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that a chat template renders. Source: messages, sharegpt and alpaca rows, and conversational prompts."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]  # [messages]: whether an assistant's turn is trained on
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt as it stands, and what follows it, which alone is trained on. No chat template has a part in it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, all of it trained on."""

    text: str


Document = Conversation | Completion | Text


class BadRow(Exception):
    """A row that fits no known format. Its text says what is wrong with the row; the reader adds file and row number."""


def read_row(row: Row, source: DatasetSource) -> Document:
    """The document that a row holds. Raises `BadRow`.

    >>> read_row({"prompt": "2+2=", "completion": "4"}, DatasetSource(path="sums.jsonl"))
    Completion(prompt='2+2=', completion='4')
    """
    return READERS[format_of(row, source)](row, source)


def format_of(row: Row, source: DatasetSource) -> str:
    """The type of a row: as the source says, else as its columns are recognised. Raises `BadRow`."""
    return source.type or recognise(row, source)


def recognise(row: Row, source: DatasetSource) -> str:
    """The type of a row, from the columns that the source names, then from the columns that the row has."""
    named = {
        "messages": source.messages_column,
        "prompt_completion": source.prompt_column or source.completion_column,
        "text": source.text_column,
    }
    for kind, column in named.items():
        if column is not None:
            return kind
    present = {column for column, value in row.items() if value is not None}
    if "messages" in present:
        return "messages"
    if "conversations" in present or "conversation" in present:
        return "sharegpt"
    if {"instruction", "output"} <= present:
        return "alpaca"
    if "prompt" in present and present & {"completion", "chosen"}:
        return "prompt_completion"
    if "chosen" in present and isinstance(row["chosen"], list):
        return "messages"
    if "text" in present:
        return "text"
    found = ", ".join(map(str, row)) if row else "none"
    raise BadRow(
        f"no known format: its columns are {found}; known are {KNOWN_FORMATS}. "
        "Name the columns (prompt_column and completion_column, messages_column or text_column)"
    )


def _read_messages(row: Row, source: DatasetSource) -> Document:
    if source.prompt_column or source.completion_column:
        question = _string(row, source.prompt_column or "prompt")
        answer = _string(row, source.completion_column or "completion")
        return _conversation([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], row)
    column = source.messages_column or ("messages" if row.get("messages") is not None else "chosen")
    return _conversation(_turns(row, column), row)


def _read_sharegpt(row: Row, source: DatasetSource) -> Document:
    column = source.messages_column or ("conversations" if row.get("conversations") is not None else "conversation")
    turns = list(_turns(row, column))
    if isinstance(row.get("system"), str) and row["system"]:
        turns.insert(0, {"role": "system", "content": row["system"]})
    if row.get("chosen") is not None:  # a preference pair: the chosen side is what is learnt
        chosen = row["chosen"]
        turns += chosen if isinstance(chosen, list) else [chosen]
    return _conversation(turns, row)


def _read_alpaca(row: Row, source: DatasetSource) -> Document:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    given = _string(row, "input") if row.get("input") is not None else ""
    turns: list[Any] = [
        {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction},
        {"role": "assistant", "content": output},
    ]
    if isinstance(row.get("system"), str) and row["system"]:
        turns.insert(0, {"role": "system", "content": row["system"]})
    return _conversation(turns, row)


def _read_prompt_completion(row: Row, source: DatasetSource) -> Document:
    prompt_column = source.prompt_column or "prompt"
    completion_column = source.completion_column or (
        "completion" if row.get("completion") is not None or row.get("chosen") is None else "chosen"
    )
    if isinstance(row.get(prompt_column), list) or isinstance(row.get(completion_column), list):
        prompt, completion = _turns(row, prompt_column), _turns(row, completion_column)
        conversation = _conversation([*prompt, *completion], row)
        only_completion = tuple(
            trained and i >= len(prompt) for i, trained in enumerate(conversation.trained)
        )  # what the prompt holds is not trained on, its assistant turns neither
        return Conversation(conversation.messages, only_completion, conversation.tools)
    return Completion(_string(row, prompt_column), _string(row, completion_column, empty=False))


def _read_text(row: Row, source: DatasetSource) -> Document:
    return Text(_string(row, source.text_column or "text", empty=False))


READERS: dict[str, Callable[[Row, DatasetSource], Document]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
    "text": _read_text,
}


def _conversation(turns: Sequence[Any], row: Row) -> Conversation:
    """Checked turns under the names that chat templates read. Raises `BadRow`."""
    if not turns:
        raise BadRow("the list of messages is empty")
    messages, trained = [], []
    for number, turn in enumerate(turns, 1):
        message, is_trained = _message(turn, number)
        messages.append(message)
        trained.append(is_trained and message["role"] == "assistant")
    _check_order([message["role"] for message in messages])
    tools = row.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools: a list of JSON schemas is expected, found {_shown(tools)}")
    return Conversation(tuple(messages), tuple(trained), tuple(tools))


def _message(turn: Any, number: int) -> tuple[Message, bool]:
    if not isinstance(turn, dict):
        raise BadRow(f"message {number}: a mapping with role and content is expected, found {_shown(turn)}")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRow(
            f"message {number}: unknown role {_shown(role)}; known are system, developer, user, assistant, tool"
            " (human and gpt too)"
        )
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"message {number}: content: text is expected, found {_shown(content)}")
    message = {key: value for key, value in turn.items() if key not in _OURS and value is not None}
    train = turn.get("train") if turn.get("train") is not None else turn.get("weight")
    if train not in (None, True, False):  # 0 and 1 are equal to these
        raise BadRow(f"message {number}: train: true or false is expected, found {_shown(train)}")
    return {"role": ROLES[role.lower()], "content": content, **message}, train is None or bool(train)


_OURS = frozenset({"role", "from", "content", "value", "train", "weight"})


def _part(part: Any, number: int) -> str:
    """The text of one part of a content list, as the OpenAI API writes them."""
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRow(f"message {number}: content: only text parts are known here, found {_shown(part)}")


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


def _turns(row: Row, column: str) -> Sequence[Any]:
    value = row.get(column)
    if not isinstance(value, list):
        missing = f"; its columns are {', '.join(map(str, row))}" if column not in row else ""
        raise BadRow(f"{column}: a list of messages is expected, found {_shown(value)}{missing}")
    return value


def _string(row: Row, column: str, empty: bool = True) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        missing = f"; its columns are {', '.join(map(str, row))}" if column not in row else ""
        raise BadRow(f"{column}: text is expected, found {_shown(value)}{missing}")
    if not value and not empty:
        raise BadRow(f"{column}: empty")
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        text = "deeply nested values"
    return f"{text[:60]}... ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"
