"""Reads messages, tool calls and tool schemas into the form that chat templates read."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, takewhile
from typing import Any

from finetune.config.user_code import load, place_of
from finetune.data.hosted_turns import split_turn
from finetune.errors import UserError, name_page
from finetune.units import counted

Message = dict[str, Any]  # role, content and any other key that the chat template reads
# the JSON schema of a tool: {"type": "function", "function": {name, description, parameters}}
Tool = dict[str, Any]

# a role in a row, in lower case -> the role that chat templates know
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
CALL_ROLES = ("function_call", "tool_call")  # the content of such a turn is calls as JSON text
# Variables of a chat template that rendering sets, so chat_template_kwargs must not.
OWN_VARIABLES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_date",
}
# keys of a turn that are read here; all others are passed on to the chat template
KNOWN_KEYS = frozenset(
    {"role", "from", "content", "value", "train", "weight", "tool_calls", "function_call"}
)
# keys of an answer by which ms-swift, Axolotl and torchtune leave all or a part of it untrained ->
# the value that leaves nothing untrained
OTHER_MASKS: Mapping[str, Any] = {
    "loss": True,
    "loss_scale": 1,
    "training": True,
    "training_detail": [],
    "train_detail": [],
    "masked": False,
}
SHOWN_COLUMNS = 100  # how many names of columns an error message lists
# synonyms, which transformers passes to templates as one key
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINKING_START = re.compile(r"<\w*think\w*>|\[THINK\]|<\|channel>thought\n")
THINKING_END = re.compile(r"</\w*think\w*>|\[/THINK\]|<channel\|>")
# template code that, after the name of a mapping, writes or reads all of the mapping's keys
ALL_KEYS = r"\s*(?:\|\s*(?:tojson|string|items)|\.items\(|\}\})"
# a template that writes messages with all of their keys
WHOLE_MESSAGES = re.compile(
    r"for\s+(\w+)\s+in\s(?![^%]*(?:tool|content|param|arg|doc))[^%]*%\}.*?(?<![\w.'\"])\1"
    rf"{ALL_KEYS}|messages(?:\[[^\]]*\])?{ALL_KEYS}",
    re.DOTALL,
)
# the beginning of str() of a list of turns
PYTHONS_TURNS = re.compile(r"\s*\[\{'(?:role|content|from|value)': '")
# str() of a list of texts, or of an array of NumPy
PYTHONS_LIST = re.compile(r"""\s*\[\s*['"].*['"]\s*\]\s*""", re.DOTALL)
# reasoning between its tags; group 1 is the reasoning
THOUGHT = re.compile(f"(?:{THINKING_START.pattern})(.*?)(?:{THINKING_END.pattern})", re.DOTALL)


# stands for an image in a message's content: Unicode's object replacement character
IMAGE = "\ufffc"


class BadRow(Exception):
    """A row that cannot be used.

    The message says what is wrong with the row. The reader of the file adds file and line.
    """


def parse_messages(
    turns: Sequence[Any], images: Sequence[Any] = (), *, needs_answer: bool = True
) -> tuple[tuple[Message, ...], tuple[bool, ...], tuple[Any, ...]]:
    """Converts the turns of a row into the form that chat templates read.

    Args:
        turns: The turns as they stand in the row.
        images: The images of the row's own column, in the order of their places in the contents.
        needs_answer: Whether a message must be the assistant's.

    Returns:
        The messages, with IMAGE for each image in a content; whether each message is trained on;
        and the images, in the order of their places.

    Raises:
        BadRow: A turn cannot be read, the roles are out of order, or the number of images is not
            the number of their places.
    """
    if not turns:
        raise BadRow("the list of messages is empty")
    messages: list[Message] = []
    trained: list[bool] = []
    part_images: list[Any] = []
    for number, turn in _number_turns(turns):
        message, is_trained = _parse_message(turn, number, part_images)
        if messages and messages[-1]["role"] == "assistant" and _normalize_role(turn) in CALL_ROLES:
            # ShareGPT has one turn for the text and one for each call. A chat template reads all of
            # them as one message.
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
    roles = [message["role"] for message in messages]
    _check_order(roles)
    if needs_answer and "assistant" not in roles:
        raise BadRow(f"no assistant turn to train on; the roles are {', '.join(roles)}")
    for message in messages:
        _remove_channel(message)
    return tuple(messages), tuple(trained), _find_images(messages, part_images, images)


def _number_turns(turns: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yields (number in the row from 1, turn) for the turns of a row.

    A turn whose content has tool calls or results is split by `split_turn`; the turns that it gives
    have the same number.

    Raises `BadRow` if a turn cannot be split.
    """
    for number, row_turn in enumerate(turns, 1):
        try:
            split_turns = split_turn(row_turn)
        except ValueError as problem:
            raise BadRow(f"message {number}: {problem}") from None
        for turn in split_turns:
            yield number, turn


def _follows_its_reasoning(message: Message, previous: Message) -> bool:
    """Whether `previous` is a turn with the reasoning of `message`.

    gpt-oss has one turn for each channel, and the reasoning is in the channel `analysis`. A chat
    template reads the reasoning as a part of the answer or call that follows. If one of the two
    messages already has a key with reasoning, they cannot be joined.
    """
    if previous["role"] != "assistant" or message["role"] != "assistant":
        return False
    has_reasoning = any(map(previous.get, REASONING_KEYS)) or any(map(message.get, REASONING_KEYS))
    is_thought = previous.get("channel") == "analysis"
    return is_thought and message.get("channel") != "analysis" and not has_reasoning


def _check_trained_alike(before: bool, after: bool, number: int) -> None:
    """Raises `BadRow` if only one of two turns that become one message is trained on.

    `before` and `after`: whether each turn is trained on. `number`: of the second turn.
    """
    if before != after:
        raise BadRow(
            f"message {number}: it and the turn before are one message, which is trained as a "
            "whole; give both the same train or weight"
        )


def _remove_channel(message: Message) -> None:
    """Removes gpt-oss's key `channel` from a message.

    Raises `BadRow` for an analysis message: its reasoning was not joined to an answer or call, and
    would be trained as an answer.
    """
    channel = message.pop("channel", None)
    if channel == "analysis" and message["role"] == "assistant":
        raise BadRow(
            f"an analysis turn is followed by no answer or call: {message['content'][:60]!r}; add "
            "what it leads to, or leave it out"
        )


def _find_images(
    messages: Sequence[Message], part_images: Sequence[Any], row_images: Sequence[Any]
) -> tuple[Any, ...]:
    """Finds the image of each IMAGE in the contents, in order.

    Changes the contents of a row whose images are in a column: <image> becomes IMAGE, and if no
    content has a place for an image, the first user message begins with all of them.

    Args:
        messages: The messages.
        part_images: One entry for each image part of the contents; None if the part does not name
            its image.
        row_images: The images of the row's own column.

    Raises:
        BadRow: Parts and column both name images, or there are not as many images as places.
    """
    if not part_images and not row_images:
        return ()  # an IMAGE in the contents is the text's own character
    if row_images and not part_images:  # the format of LLaVA and LLaMA-Factory
        for message in messages:
            message["content"] = message["content"].replace("<image>", IMAGE)
    places = sum(message["content"].count(IMAGE) for message in messages)
    if row_images and not places:  # as TRL reads such a row
        question = next((message for message in messages if message["role"] == "user"), messages[0])
        question["content"] = IMAGE * len(row_images) + question["content"]
        places = len(row_images)
    named_images = [image for image in part_images if image is not None]
    if named_images and row_images:
        raise BadRow(
            "images are named both in the messages and in a column of the row; keep one of the two"
        )
    images = tuple(named_images or row_images)
    if places != len(images):
        raise BadRow(
            f"its messages have {counted(places, 'place')} for an image, and the row has "
            f"{counted(len(images), 'image')}"
        )
    return images


def read_reasoning(message: Message) -> str:
    """Returns an assistant's reasoning, stripped; "" if the message has none.

    It is the text of the first key of REASONING_KEYS, else the first thought between tags in the
    content. The opening tag may be missing, since some templates write it with the prompt.
    """
    texts = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    text_of_key: str = texts[0].strip() if texts else ""
    if text_of_key:
        return text_of_key
    before_end_tag, *after_end_tag = THINKING_END.split(message["content"])
    if not after_end_tag:  # no thought was closed
        return ""
    return THINKING_START.split(before_end_tag)[-1].strip()


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """Reads the tool schemas of a row from a list or from JSON text.

    Raises `BadRow` if a tool is no schema with a name.

    >>> parse_tools('[{"name": "now", "parameters": {}}]')
    ({'type': 'function', 'function': {'name': 'now', 'parameters': {}}},)
    """
    tools = parse_if_json(value)
    if not tools:
        return ()
    tool_list = tools if isinstance(tools, list | tuple) else [tools]
    schemas = []
    for tool in map(parse_if_json, tool_list):
        if not isinstance(tool, dict) or not tool.keys() & {"name", "function", "type"}:
            raise BadRow(
                "tools: a list of JSON schemas, each with its name, is expected, found "
                f"{describe_value(tool)}"
            )
        is_bare = "name" in tool and "function" not in tool
        schemas.append({"type": "function", "function": tool} if is_bare else tool)
    return tuple(schemas)


def describe_tool(tool: str | Callable[..., Any], tool_name: str | None = None) -> Tool:
    """Makes the JSON schema of a tool from the type hints and the docstring of its function.

    Args:
        tool: FILE.py:NAME, or the function.
        tool_name: The tool's name if `tool` is a function; otherwise it is NAME.

    Raises:
        UserError: The function has no type hints or no docstring.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if isinstance(tool, str):
        function = load(tool)
        _, _, tool_name = tool.rpartition(":")
    else:
        function = tool
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers' own errors, and any error of evaluating type hints
        raise UserError(
            f"{place_of(function)}{tool_name}, a tool: {error}; describe it by a docstring and "
            f"type hints ({name_page('online')}, Tools)"
        ) from None
    # Calls find the tool by this name, which may be an alias of the function.
    return {**schema, "function": schema["function"] | {"name": tool_name}}


def parse_if_json(value: Any) -> Any:
    """Parses a value if it is JSON text, and returns any other value unchanged.

    An empty value ("", [], 0) becomes None.
    """
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value, object_pairs_hook=_make_object)
    except (ValueError, RecursionError):
        return value


def parse_number(value: Any) -> Any:
    """Returns the number that a text holds, as in a CSV file, and any other value unchanged.

    >>> parse_number("2"), parse_number("0.5"), parse_number("two"), parse_number(None)
    (2, 0.5, 'two', None)
    """
    if not isinstance(value, str):
        return value
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return value


def parse_list(value: Any, name: str) -> Any:
    """Parses a text that is the JSON of a list of texts or numbers, as in a CSV file.

    Any other value is returned unchanged, also the JSON of other things. Raises `BadRow` for a list
    of texts as Python writes it. `name`: the column, for the error.

    >>> parse_list('["4", "5"]', "negatives"), parse_list("[citation needed]", "negatives")
    (['4', '5'], '[citation needed]')
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    values = parse_if_json(value)
    if isinstance(values, list) and all(isinstance(each, str | int | float) for each in values):
        return values
    if isinstance(values, str) and PYTHONS_LIST.fullmatch(value):  # as pandas writes it
        raise BadRow(f"{name}: a list that is not JSON: {value:.60}; write it by json.dumps")
    return value


def parse_turns(value: Any) -> Any:
    """Parses a text that is the JSON of a list of turns, as in a CSV file.

    Any other value is returned unchanged, also the JSON of other things. Raises `BadRow` for a list
    of turns as Python writes it.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    if PYTHONS_TURNS.match(value):  # as pandas writes it into a CSV file
        raise BadRow(
            f"messages that are not JSON: {value.lstrip()[:60]!r}; write them by json.dumps"
        )
    turns = parse_if_json(value)
    is_of_turns = isinstance(turns, list) and turns and all(map(read_role, turns))
    return turns if is_of_turns else value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object from its keys and values. Raises `BadRow` if two keys are equal."""
    json_object = dict(pairs)
    if len(json_object) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"JSON text in which two keys are named {repeated!r:.60}; keep one")
    return json_object


def describe_value(value: Any) -> str:
    """Shows a value and its type, short enough for an error message."""
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
    """Converts one turn into the form that chat templates read.

    Args:
        turn: The turn as it stands in the row.
        number: The turn's number in the row, from 1, for errors.
        images: An entry is appended for each image part of the content; see `_parse_part`.

    Returns:
        The message, and whether the turn's own keys allow training on it.

    Raises:
        BadRow: The turn cannot be read.
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
    role = ROLES[name]
    is_assistant = role == "assistant"
    content, calls = _separate_calls(turn, name, number)
    if calls and not is_assistant:
        raise BadRow(f"message {number}: tool calls in a {name} turn; they are the assistant's")
    thoughts: list[str] = []
    known_keys = KNOWN_KEYS
    if is_assistant:
        _refuse_other_mask(turn, number)
        known_keys |= OTHER_MASKS.keys()
        content, thoughts = _separate_thoughts(content, number)
    if isinstance(turn.get("recipient"), str):  # gpt-oss's, which `_separate_calls` has read
        known_keys |= {"recipient"}
    message: Message = {"role": role, "content": read_content(content, role, number, images)}
    message |= {
        key: value for key, value in turn.items() if key not in known_keys and value is not None
    }
    if is_assistant:
        _add_reasoning(message, "".join(thoughts), number)
    if calls:
        call_list = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_parse_call(call, number) for call in call_list]
    return message, _read_train(turn, number)


def list_unread_keys(message: Message, template: str) -> list[str]:
    """Lists the keys of a message that hold a value which the chat template does not write.

    These are the keys that the template does not name. Reasoning in a message that is not the
    assistant's counts too, because no template writes it.

    >>> list_unread_keys({"role": "user", "content": "2+2?", "mood": "glad"}, "{{ m.content }}")
    ['mood']
    """
    further_keys = [str(key) for key, value in message.items() if value and key not in KNOWN_KEYS]
    if not further_keys:  # the usual case
        return []
    names = _list_names(template)
    if names is None:
        return []
    if message["role"] != "assistant":
        names -= set(REASONING_KEYS)
    return [key for key in further_keys if not names.issuperset(re.findall(r"\w+", key))]


@cache
def _list_names(template: str) -> frozenset[str] | None:
    """Lists the words of a chat template, among them all keys that it can read.

    If the template names `reasoning_content`, the other REASONING_KEYS count as named too.

    Returns None for a template that writes messages with all of their keys.
    """
    if WHOLE_MESSAGES.search(template):
        return None
    names = set(re.findall(r"\w+", template))
    if "reasoning_content" in names:
        names.update(REASONING_KEYS)
    # the input of an Alpaca row is also a part of its content, which every template writes
    return frozenset(names | {"input"})


def _add_reasoning(message: Message, thoughts: str, number: int) -> None:
    """Adds the reasoning of an answer's parts as `reasoning_content`, unless a key has it already.

    Args:
        message: The answer, which is changed.
        thoughts: The text of the content's parts of type thinking; "" without such parts.
        number: The turn's number in the row, for errors.

    Raises:
        BadRow: `reasoning_content` is no text, or the message has two different texts of reasoning,
            of which a template would write only one.
    """
    reasoning_by_key = {key: message[key] for key in REASONING_KEYS if message.get(key)}
    reasoning = reasoning_by_key.get("reasoning_content", "")
    if not isinstance(reasoning, str):
        raise BadRow(
            f"message {number}: reasoning_content: a text is expected, found "
            f"{describe_value(reasoning)}"
        )
    all_reasoning = (thoughts, *reasoning_by_key.values())
    texts = {text.strip() for text in all_reasoning if isinstance(text, str)}
    if len(texts - {""}) > 1:
        places = [*reasoning_by_key]
        if thoughts:
            places.append("parts of type thinking")
        raise BadRow(
            f"message {number}: its reasoning stands in {' and '.join(places)}, with other words; "
            "keep one"
        )
    if thoughts and not reasoning_by_key:
        message["reasoning_content"] = thoughts


def _separate_calls(turn: Message, name: str, number: int) -> tuple[Any, Any]:
    """Returns (content, calls) of a turn; the calls still have the form that the row gives them.

    The calls have a key of their own, or they are the content: under a role of CALL_ROLES, and if
    gpt-oss names a function as the recipient.

    Args:
        turn: The turn.
        name: The turn's role, a key of ROLES.
        number: The turn's number in the row, for errors.

    Raises:
        BadRow: `tool_calls` and `function_call` differ, a turn of CALL_ROLES has no call, or the
            recipient is a tool that is no function.
    """
    content = turn.get("content", turn.get("value"))
    calls = parse_if_json(turn.get("tool_calls"))
    older_call = parse_if_json(turn.get("function_call"))  # OpenAI's older key, for one call
    if calls and older_call and calls not in (older_call, [older_call]):
        raise BadRow(f"message {number}: has tool_calls and function_call; keep one")
    calls = calls or older_call
    if name in CALL_ROLES:
        calls = parse_if_json(content)
        content = ""
        if not calls:
            raise BadRow(
                f"message {number}: {name}: JSON of {{name, arguments}} is expected, found nothing"
            )
    recipient = turn.get("recipient")  # gpt-oss's key
    if isinstance(recipient, str) and recipient != "all" and ROLES[name] == "assistant":
        if not recipient.startswith("functions."):
            raise BadRow(
                f"message {number}: recipient: {recipient!r}: functions.NAME is expected; a chat "
                "template writes no call of a built-in tool, such as browser or python"
            )
        return "", {"name": recipient.removeprefix("functions."), "arguments": content}
    if content is None and calls:
        content = ""
    return content, calls


def _separate_thoughts(content: Any, number: int) -> tuple[Any, list[str]]:
    """Splits an answer's content into (the content without reasoning, the texts of reasoning).

    Reasoning is what Mistral writes as parts of type thinking at the start of a content. A content
    that is no list has none.

    Raises:
        BadRow: A thinking part holds no text or is not closed; or `train` or `weight` excludes one
            part from training, which only a whole message can be.
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


def _read_thought(part: Mapping[str, Any], number: int) -> str:
    """Reads the text of a part of type thinking, which is a text or a list of parts.

    Raises `BadRow` if there is no text, if it holds an image, or if the thought is not closed.
    """
    thought = part.get("thinking")
    images: list[Any] = []
    if isinstance(thought, list):
        thought = "".join(_parse_part(text_part, number, images) for text_part in thought)
    if not isinstance(thought, str) or images or part.get("closed") is False:
        raise BadRow(
            f"message {number}: content: thinking that is a text and closed is expected, found "
            f"{describe_value(part)}"
        )
    return thought


def read_content(content: Any, role: str, number: int, images: list[Any]) -> str:
    """Reads a content as text, and appends the images of its parts to `images`.

    A tool's result may be any JSON value. Raises `BadRow` if another role's content is neither text
    nor a list of parts.
    """
    # The result of a tool may also be a list of values.
    if isinstance(content, list) and (role != "tool" or _has_parts(content)):
        return "".join(_parse_part(part, number, images) for part in content)
    if role == "tool" and content is not None and not isinstance(content, str):
        # templates write text only
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise BadRow(
            f"message {number}: content: text is expected, found {describe_value(content)}"
        )
    return content


def _has_parts(content: list[Any]) -> bool:
    return any(isinstance(part, dict) and "type" in part for part in content)


def _read_train(turn: Message, number: int) -> bool:
    """Reads from a turn whether it is trained on: `train`, or OpenAI's `weight`.

    Returns True if the turn has neither key. Raises `BadRow` for a value other than true and false,
    and if the two keys contradict each other.
    """
    values = {key: turn[key] for key in ("train", "weight") if turn.get(key) is not None}
    for key, train in values.items():
        if train not in (True, False):  # 0 and 1 are equal to these
            raise BadRow(
                f"message {number}: {key}: true or false is expected, found {describe_value(train)}"
            )
    if len({bool(train) for train in values.values()}) > 1:
        raise BadRow(f"message {number}: train and weight say the opposite; keep one")
    return all(values.values())


def _refuse_other_mask(turn: Message, number: int) -> None:
    """Raises `BadRow` for an answer that another tool would leave untrained by a key of its own."""
    for key, neutral in OTHER_MASKS.items():
        value = turn.get(key)
        if value is not None and value != neutral:
            raise BadRow(
                f"message {number}: {key}: {describe_value(value)} is another tool's mask, which "
                "is not read; write train: false into the messages that are not trained on, and "
                f"remove {key}"
            )


def read_role(turn: Any) -> str | None:
    """Reads the role of a row's turn, in any spelling of ROLES; None if there is no known role."""
    return ROLES.get(_normalize_role(turn))


def _normalize_role(turn: Any) -> str:
    """Returns the role of a row's turn in the spelling of ROLES; "" if the role is no text."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if isinstance(role, str):
        return role.lower().replace("-", "_")
    return ""


def _parse_call(value: Any, number: int) -> dict[str, Any]:
    """Parses a tool call into {"type": "function", "function": {name, arguments}}.

    `arguments` may be JSON text, and becomes a mapping, {} if there are none. `number`: of the
    turn, for errors.

    Raises `BadRow` if the value is no call.
    """
    call = parse_if_json(value)
    if isinstance(call, dict) and not _read_train(call, number):
        raise BadRow(
            f"message {number}: a tool call with train or weight; a message is trained as a whole: "
            "set it there"
        )
    if isinstance(call, dict) and "function" not in call:  # {name, arguments}, the form of ShareGPT
        outer = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        call = {**outer, "function": {k: v for k, v in call.items() if k not in ("id", "type")}}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(
            f"message {number}: a tool call {{name, arguments}} is expected, found "
            f"{describe_value(value)}"
        )
    arguments = parse_if_json(function.get("arguments"))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow(
            f"message {number}: tool call {function['name']}: arguments: a JSON object is "
            f"expected, found {describe_value(function['arguments'])}"
        )
    _check_numbers(arguments, f"message {number}: tool call {function['name']}")
    known = {key: part for key, part in call.items() if part is not None}
    return {"type": "function", **known, "function": {**function, "arguments": arguments}}


def _check_numbers(arguments: dict[str, Any], place: str) -> None:
    """Raises `BadRow` for a number that is not finite, such as 1e400: JSON has no such number."""
    try:
        json.dumps(arguments, allow_nan=False, default=str)
    except ValueError:
        raise BadRow(
            f"{place}: arguments: a number that is not finite, which JSON does not have"
        ) from None


def _parse_part(part: Any, message_number: int, images: list[Any]) -> str:
    """Returns the text of one part of a content list.

    For an image this is IMAGE, and the image is appended to `images`; None is appended if the part
    does not name its image. Raises `BadRow` for any other part: thinking at the start of an answer
    is taken out before.

    message_number: 1-based, for the error.
    """
    if (
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    if isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image"):
        keys = ("image", "image_url", "path", "url", "bytes")
        image = next((part[key] for key in keys if part.get(key) is not None), None)
        if image is None and part.get("base64") is not None:
            image = {"base64": part["base64"]}  # the text alone would be read as a path
        images.append(image)
        return IMAGE
    raise BadRow(
        f"message {message_number}: content: only text and image parts are supported, and thinking "
        f"at the start of an answer; found {describe_value(part)}"
    )


def count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Counts the equal items at the beginning of two sequences."""
    # One sequence may be longer: what it has beyond the other is not compared.
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def _check_order(roles: list[str]) -> None:
    """Raises `BadRow` if the roles of messages are out of order."""
    previous = None
    for number, role in enumerate(roles, 1):
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
        previous = role
