"""Messages, tool calls and tool schemas, brought into the form that chat templates read."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import islice, takewhile
from typing import Any

from finetune.config.user_code import load, place_of
from finetune.constants import Fields, Record
from finetune.data.hosted_turns import split_turn
from finetune.errors import UserError, name_page
from finetune.units import counted

Message = dict[str, Any]  # role, content and whatever else the chat template reads
# a JSON schema, as {"type": "function", "function": {name, description, parameters}}
Tool = dict[str, Any]

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bard", "bing", "model", "ai", "bot", "chatbot"), "assistant"
    ),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("function", "ipython", "observation", "tool_response", "function_response"), "tool"
    ),
}
CALL_ROLES = ("function_call", "tool_call")  # the content is the calls, as JSON text
# What rendering gives a chat template itself, so that chat_template_kwargs cannot.
OWN_VARIABLES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
}
KNOWN_KEYS = frozenset(
    {"role", "from", "content", "value", "train", "weight", "tool_calls", "function_call"}
)
SHOWN_COLUMNS = 100
# transformers passes them to templates as one
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINKING_START = re.compile(r"<\w*think\w*>|\[THINK\]|<\|channel>thought\n")
THINKING_END = re.compile(r"</\w*think\w*>|\[/THINK\]|<channel\|>")
# what writes a mapping with all of its keys, behind its name
WHOLE = r"\s*(?:\|\s*(?:tojson|string|items)|\.items\(|\}\})"
WHOLE_MESSAGES = re.compile(
    r"for\s+(\w+)\s+in\s(?![^%]*(?:tool|content|param|arg|doc))[^%]*%\}.*?(?<![\w.'\"])\1"
    rf"{WHOLE}|messages(?:\[[^\]]*\])?{WHOLE}",
    re.DOTALL,
)
THOUGHT = re.compile(f"(?:{THINKING_START.pattern})(.*?)(?:{THINKING_END.pattern})", re.DOTALL)


# stands for an image in a message's content: Unicode's object replacement character
IMAGE = "\ufffc"


class BadRow(Exception):
    """A row that cannot be used.

    Its message says what is wrong with it; the reader of the file adds its place.
    """


def parse_messages(
    turns: Sequence[Any], images: Sequence[Any] = ()
) -> tuple[tuple[Message, ...], tuple[bool, ...], tuple[Any, ...]]:
    """Brings the turns of a row into the form that chat templates read.

    Args:
        turns: As the row has them.
        images: Of the row's own column, in the order of their places in the contents.

    Returns:
        The messages, with IMAGE for each image in a content; whether each is trained on; and the
        images.

    Raises:
        BadRow: A turn is none, their order is wrong, or the images do not fit their places.
    """
    if not turns:
        raise BadRow("the list of messages is empty")
    messages: list[Message] = []
    trained: list[bool] = []
    part_images: list[Any] = []
    for number, turn in _number_turns(turns):
        message, is_trained = _parse_message(turn, number, part_images)
        if messages and messages[-1]["role"] == "assistant" and _normalize_role(turn) in CALL_ROLES:
            # ShareGPT has a turn for the text and one for each call; a chat template reads them as
            # one message.
            messages[-1]["tool_calls"] = [
                *messages[-1].get("tool_calls", ()),
                *message["tool_calls"],
            ]
            _check_trained_alike(trained[-1], is_trained, number)
            continue
        if messages and _follows_its_reasoning(message, messages[-1]):
            message = {**message, "reasoning_content": messages.pop()["content"]}
            _check_trained_alike(trained.pop(), is_trained, number)
        messages.append(message)
        trained.append(is_trained and message["role"] == "assistant")
    _check_order([message["role"] for message in messages])
    for message in messages:
        _remove_channel(message)
    return tuple(messages), tuple(trained), _find_images(messages, part_images, images)


def _number_turns(turns: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yields (its number in the row, from 1; a turn), with blocks of tools as turns and calls.

    Raises `BadRow`.
    """
    for number, turn in enumerate(turns, 1):
        try:
            split = split_turn(turn)
        except ValueError as problem:
            raise BadRow(f"message {number}: {problem}") from None
        for each in split:
            yield number, each


def _follows_its_reasoning(message: Message, previous: Message) -> bool:
    """Whether `previous` is the reasoning of `message`.

    gpt-oss has a turn for each channel; a chat template reads the reasoning as part of what it
    leads to. A message with reasoning of its own has no place for another.
    """
    if any(each["role"] != "assistant" for each in (previous, message)):
        return False
    has_own = any(map(previous.get, REASONING_KEYS)) or any(map(message.get, REASONING_KEYS))
    is_thought = previous.get("channel") == "analysis"
    return is_thought and message.get("channel") != "analysis" and not has_own


def _check_trained_alike(before: bool, after: bool, number: int) -> None:
    """Raises `BadRow` where one of two turns that become one message is trained, the other not."""
    if before != after:
        raise BadRow(
            f"message {number}: it and the turn before are one message, which is trained as a "
            "whole; give both the same train or weight"
        )


def _remove_channel(message: Message) -> None:
    """Takes gpt-oss's channel off a message. Raises `BadRow` for reasoning that is still a message
    of its own, which would be trained as an answer.
    """
    channel = message.pop("channel", None)
    if channel == "analysis" and message["role"] == "assistant":
        raise BadRow(
            f"an analysis turn is followed by no answer or call: {message['content'][:60]!r}; add "
            "what it leads to, or leave it out"
        )


def _find_images(
    messages: Sequence[Message], of_parts: Sequence[Any], of_row: Sequence[Any]
) -> tuple[Any, ...]:
    """Finds the image of each IMAGE in the contents, in order.

    May put IMAGE into the contents: for <image>, and where no content has a place for an image.

    Args:
        messages: The messages.
        of_parts: The images of the contents' parts; None for a part that does not name its image.
        of_row: The images of the row's own column.

    Raises:
        BadRow: Parts and column both name images, or there are not as many images as places.
    """
    if not of_parts and not of_row:
        return ()  # an IMAGE in the contents is the text's own character
    if of_row and not of_parts:  # LLaVA's and LLaMA-Factory's
        for message in messages:
            message["content"] = message["content"].replace("<image>", IMAGE)
    places = sum(message["content"].count(IMAGE) for message in messages)
    if of_row and not places:  # as TRL reads such a row
        asked = next((message for message in messages if message["role"] == "user"), messages[0])
        asked["content"] = IMAGE * len(of_row) + asked["content"]
        places = len(of_row)
    named = [image for image in of_parts if image is not None]
    if named and of_row:
        raise BadRow(
            "images are named both in the messages and in a column of the row; keep one of the two"
        )
    images = tuple(named or of_row)
    if places != len(images):
        raise BadRow(
            f"its messages have {counted(places, 'place')} for an image, and the row has "
            f"{counted(len(images), 'image')}"
        )
    return images


def read_reasoning(message: Message) -> str:
    """Returns the assistant's reasoning: from its own key, or from the tags inside the content."""
    texts = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    own: str = texts[0].strip() if texts else ""
    if own:
        return own
    before_end, *rest = THINKING_END.split(message["content"])
    if not rest:
        return ""
    return THINKING_START.split(before_end)[-1].strip()


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """Reads the tool schemas of a row, from a list or the JSON text of one. Raises `BadRow`.

    >>> parse_tools('[{"name": "now", "parameters": {}}]')
    ({'type': 'function', 'function': {'name': 'now', 'parameters': {}}},)
    """
    tools = parse_if_json(value)
    if not tools:
        return ()
    listed = tools if isinstance(tools, list | tuple) else [tools]
    schemas = []
    for tool in map(parse_if_json, listed):
        if not isinstance(tool, dict) or not tool.keys() & {"name", "function", "type"}:
            raise BadRow(
                "tools: a list of JSON schemas, each with its name, is expected, found "
                f"{describe_value(tool)}"
            )
        is_bare = "name" in tool and "function" not in tool
        schemas.append({"type": "function", "function": tool} if is_bare else tool)
    return tuple(schemas)


def describe_tool(tool: str | Callable[..., Any], called: str | None = None) -> Tool:
    """Makes the JSON schema of a tool from the type hints and the docstring of its function.

    Args:
        tool: FILE.py:NAME, or the function.
        called: The tool's name, where `tool` is the function.

    Raises:
        UserError: The function has no type hints or no docstring.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if isinstance(tool, str):
        function = load(tool)
        called = tool.rpartition(":")[2]
    else:
        function = tool
    try:
        schema = get_json_schema(function)
    except Exception as error:  # its own kinds, and what type hints raise
        raise UserError(
            f"{place_of(function)}{called}, a tool: {error}; describe it by a docstring and type "
            f"hints ({name_page('online')}, Tools)"
        ) from None
    # by which it is found, also if it is an alias
    return {**schema, "function": schema["function"] | {"name": called}}


def parse_if_json(value: Any) -> Any:
    """Parses a JSON text. Text that is not JSON, and a value that is no text, stay as they are;
    what is empty becomes None.
    """
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value, object_pairs_hook=_make_object)
    except (ValueError, RecursionError):
        return value


def _make_object(pairs: list[tuple[str, Any]]) -> Record:
    """Makes an object of JSON text. Raises `BadRow` where two of its keys have the same name."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"JSON text in which two keys are named {repeated!r:.60}; keep one")
    return made


def describe_value(value: Any) -> str:
    """A value with its type, short enough for an error message."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        text = "deeply nested values"
    if len(text) > 60:
        return f"{text[:60]}... ({type(value).__name__})"
    return f"{text} ({type(value).__name__})"


def list_columns(columns: Collection[str]) -> str:
    r"""Lists the names of columns in one line: the first SHOWN_COLUMNS, long ones shortened.

    A name with a character that cannot be printed, such as a line break, is quoted.

    >>> print(list_columns(["text", "a\nb"]))
    text, 'a\nb'
    """
    names = []
    for column in islice(columns, SHOWN_COLUMNS):
        name = str(column) if str(column).isprintable() else repr(str(column))
        names.append(name if len(name) <= 200 else f"{name[:200]}...")
    if len(columns) > SHOWN_COLUMNS:
        names.append(f"{len(columns) - SHOWN_COLUMNS:,} more")
    return ", ".join(names)


def _parse_message(turn: Any, number: int, images: list[Any]) -> tuple[Message, bool]:
    """Brings one turn into the form that chat templates read, and adds its images to `images`.

    Args:
        turn: As the row has it.
        number: Its place in the row, from 1, for errors.
        images: Grows.

    Returns:
        The message, and whether the turn asks to be trained on.

    Raises:
        BadRow: It is no turn.
    """
    if not isinstance(turn, dict):
        raise BadRow(
            f"message {number}: a mapping with role and content is expected, found "
            f"{describe_value(turn)}"
        )
    name = _normalize_role(turn)
    if name not in ROLES:
        raise BadRow(
            f"message {number}: unknown role {describe_value(turn.get('role', turn.get('from')))}; "
            "known are system, developer, user, assistant, tool (human, gpt, function_call and "
            "observation too)"
        )
    content, calls = _separate_calls(turn, name, number)
    if calls and ROLES[name] != "assistant":
        raise BadRow(f"message {number}: tool calls in a {name} turn; they are the assistant's")
    thoughts: list[str] = []
    if ROLES[name] == "assistant":
        content, thoughts = _separate_thoughts(content, number)
    message: Message = {
        "role": ROLES[name],
        "content": _read_content(content, ROLES[name], number, images),
    }
    known = KNOWN_KEYS | {"recipient"} if isinstance(turn.get("recipient"), str) else KNOWN_KEYS
    message |= {key: value for key, value in turn.items() if key not in known and value is not None}
    if ROLES[name] == "assistant":
        _take_reasoning(message, "".join(thoughts), number)
    if calls:
        listed = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_parse_call(call, number) for call in listed]
    return message, _read_train(turn, number)


def list_unread_keys(message: Message, template: str) -> list[str]:
    """Lists the keys of a message that hold a value and that a chat template does not name, and an
    assistant's reasoning in another's message, which no template writes.

    >>> list_unread_keys({"role": "user", "content": "2+2?", "mood": "glad"}, "{{ m.content }}")
    ['mood']
    """
    others = [str(key) for key, value in message.items() if value and key not in KNOWN_KEYS]
    if not others:  # as a rule
        return []
    names = _list_names(template)
    if names is None:
        return []
    if message["role"] != "assistant":
        names -= set(REASONING_KEYS)
    return [key for key in others if not names.issuperset(re.findall(r"\w+", key))]


@cache
def _list_names(template: str) -> frozenset[str] | None:
    """The words of a chat template, and those that stand for others; None: it writes messages with
    all of their keys.
    """
    if WHOLE_MESSAGES.search(template):
        return None
    names = set(re.findall(r"\w+", template))
    if "reasoning_content" in names:
        names.update(REASONING_KEYS)
    return frozenset(names | {"input"})  # of an Alpaca row, which is written with the instruction


def _take_reasoning(message: Message, thoughts: str, number: int) -> None:
    """Puts the reasoning in the parts of an answer beside that under its keys.

    Args:
        message: Grows.
        thoughts: The text of its parts of type thinking.
        number: Its place in the row, for errors.

    Raises:
        BadRow: The reasoning is no text, or two texts differ, of which a template writes one.
    """
    named = {key: message[key] for key in REASONING_KEYS if message.get(key)}
    reasoning = named.get("reasoning_content", "")
    if not isinstance(reasoning, str):
        raise BadRow(
            f"message {number}: reasoning_content: a text is expected, found "
            f"{describe_value(reasoning)}"
        )
    texts = {text.strip() for text in (thoughts, *named.values()) if isinstance(text, str)}
    if len(texts - {""}) > 1:
        places = [*named, "parts of type thinking"] if thoughts else [*named]
        raise BadRow(
            f"message {number}: its reasoning stands in {' and '.join(places)}, with other words; "
            "keep one"
        )
    if thoughts and not named:
        message["reasoning_content"] = thoughts


def _separate_calls(turn: Message, name: str, number: int) -> tuple[Any, Any]:
    """Returns (the content of a turn, its calls), wherever the turn has its calls.

    They have a key of their own, or stand in place of the content: under a role of CALL_ROLES, and
    where gpt-oss names a function as the recipient.

    Args:
        turn: The turn.
        name: Its role, a key of ROLES.
        number: Its place in the row, for errors.

    Raises:
        BadRow: A role of CALL_ROLES without a call.
    """
    content = turn.get("content", turn.get("value"))
    calls = parse_if_json(turn.get("tool_calls"))
    older = parse_if_json(turn.get("function_call"))  # OpenAI's name of one call
    if calls and older and calls not in (older, [older]):
        raise BadRow(f"message {number}: has tool_calls and function_call; keep one")
    calls = calls or older
    if name in CALL_ROLES:
        calls = parse_if_json(content)
        content = ""
        if not calls:
            raise BadRow(
                f"message {number}: {name}: JSON of {{name, arguments}} is expected, found nothing"
            )
    recipient = turn.get("recipient")
    # gpt-oss
    if (
        isinstance(recipient, str)
        and recipient.startswith("functions.")
        and ROLES[name] == "assistant"
    ):
        return "", {"name": recipient.removeprefix("functions."), "arguments": content}
    if content is None and calls:
        content = ""
    return content, calls


def _separate_thoughts(content: Any, number: int) -> tuple[Any, list[str]]:
    """Returns (an answer's content, its reasoning): Mistral's parts of type thinking, which begin a
    content.

    Raises:
        BadRow: Such a part holds no text, or is not closed; or a part is left untrained, which a
            whole message alone can be.
    """
    if not isinstance(content, list):
        return content, []
    for part in content:
        if isinstance(part, dict) and not _read_train(part, number):
            raise BadRow(
                f"message {number}: content: a part with train or weight; a message is trained as "
                "a whole: set it there"
            )
    thoughts = list(takewhile(_is_thought, content))
    return content[len(thoughts) :], [_read_thought(part, number) for part in thoughts]


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def _read_thought(part: Fields, number: int) -> str:
    """Reads the text of a part of type thinking: a text, or parts of type text."""
    thought = part.get("thinking")
    if isinstance(thought, list):
        thought = "".join(_parse_part(each, number, []) for each in thought)
    if not isinstance(thought, str) or part.get("closed") is False:
        raise BadRow(
            f"message {number}: content: thinking that is a text and closed is expected, found "
            f"{describe_value(part)}"
        )
    return thought


def _read_content(content: Any, role: str, number: int, images: list[Any]) -> str:
    """Reads a content as text, and adds the images of its parts to `images`. Raises `BadRow`."""
    if isinstance(content, list) and (role != "tool" or _has_parts(content)):
        return "".join(_parse_part(part, number, images) for part in content)
    if role == "tool" and content is not None and not isinstance(content, str):
        # a result as an object: templates write texts
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise BadRow(
            f"message {number}: content: text is expected, found {describe_value(content)}"
        )
    return content


def _has_parts(content: list[Any]) -> bool:
    return any(isinstance(part, dict) and "type" in part for part in content)


def _read_train(turn: Message, number: int) -> bool:
    """Whether a turn is trained on, as far as it says: `train`, or OpenAI's `weight`.

    Raises `BadRow`.
    """
    asked = [turn[key] for key in ("train", "weight") if turn.get(key) is not None]
    for train in asked:
        if train not in (True, False):  # 0 and 1 are equal to these
            raise BadRow(
                f"message {number}: train: true or false is expected, found {describe_value(train)}"
            )
    if len({bool(train) for train in asked}) > 1:
        raise BadRow(f"message {number}: train and weight say the opposite; keep one")
    return all(asked)


def role_of(turn: Any) -> Any:
    """Returns the role of a row's turn, which may be anything; None where it names none."""
    if isinstance(turn, dict):
        return turn.get("role", turn.get("from"))
    return None


def _normalize_role(turn: Any) -> str:
    role = role_of(turn)
    if isinstance(role, str):
        return role.lower().replace("-", "_")
    return ""


def _parse_call(value: Any, number: int) -> Record:
    """One tool call as {"type": "function", "function": {name, arguments}}, its arguments parsed.

    Raises `BadRow`.
    """
    call = parse_if_json(value)
    if isinstance(call, dict) and not _read_train(call, number):
        raise BadRow(
            f"message {number}: a tool call with train or weight; a message is trained as a whole: "
            "set it there"
        )
    if isinstance(call, dict) and "function" not in call:  # {name, arguments}, the form of ShareGPT
        outer = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        call = {
            **outer,
            "function": {"arguments": {}} | {k: v for k, v in call.items() if k not in outer},
        }
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(
            f"message {number}: a tool call {{name, arguments}} is expected, found "
            f"{describe_value(value)}"
        )
    if "arguments" in function:
        arguments = parse_if_json(function["arguments"])
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise BadRow(
                f"message {number}: tool call {function['name']}: arguments: a JSON object is "
                f"expected, found {describe_value(function['arguments'])}"
            )
        _check_numbers(arguments, f"message {number}: tool call {function['name']}")
        function = {**function, "arguments": arguments}
    return {"type": "function", **call, "function": function}


def _check_numbers(arguments: Record, place: str) -> None:
    """Raises `BadRow` for a number that JSON does not have, such as 1e400, which is infinite."""
    try:
        json.dumps(arguments, allow_nan=False, default=str)
    except ValueError:
        raise BadRow(
            f"{place}: arguments: a number that is not finite, which JSON does not have"
        ) from None


def _parse_part(part: Any, number: int, images: list[Any]) -> str:
    """The text of one part of a content list; an image is IMAGE, and added to `images`.

    Raises `BadRow`.
    """
    if (
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    if isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image"):
        keys = ("image", "image_url", "path", "url", "bytes", "base64")
        images.append(next((part[key] for key in keys if part.get(key) is not None), None))
        return IMAGE
    raise BadRow(
        f"message {number}: content: only text and image parts are supported, and thinking at the "
        f"start of an answer; found {describe_value(part)}"
    )


def count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Counts the items that both begin with."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


def _check_order(roles: list[str]) -> None:
    for number, (previous, role) in enumerate(zip([None, *roles], roles, strict=False), 1):
        if role in ("system", "developer") and previous not in (None, "system", "developer"):
            raise BadRow(
                f"message {number}: roles out of order: a {role} turn may only come first, not "
                f"after {previous}"
            )
        if role == previous and role in ("user", "assistant"):
            raise BadRow(
                f"message {number}: roles out of order: two {role} turns in a row; join them, or "
                "drop the row"
            )
        if role == "tool" and previous not in ("assistant", "tool"):
            raise BadRow(
                f"message {number}: roles out of order: a tool turn follows an assistant turn, not "
                f"{previous}"
            )
    if "assistant" not in roles:
        raise BadRow(f"no assistant turn to train on; the roles are {', '.join(roles)}")
