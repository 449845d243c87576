"""What a conversation holds and the chat template leaves out of its text: it would be lost without a word."""

import json
import re
from collections.abc import Iterator, Mapping

from finetune.data.formats import Conversation
from finetune.data.messages import Message
from finetune.data.renderer import Span

THINKING_END = re.compile(r"</\w*think\w*>|\[/THINK\]")
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names that transformers hands to templates as one


def find_unrendered(conversation: Conversation, text: str, turns: Mapping[int, Span]) -> Iterator[str]:
    """Names of `findings` for what is missing in the `text` of a conversation.

    `turns`: where the text holds what the assistant says, by message; empty where the turns cannot be told apart.
    """
    messages, trained = conversation.messages, conversation.trained
    said = {i: text[slice(*turns[i])] if i in turns else text for i, m in enumerate(messages) if _is_answer(m)}
    last = max(said)
    if any(m["role"] in ("system", "developer") and m["content"].strip() not in text for m in messages):
        yield "system_dropped"
    if any(m["role"] == "user" and _last_line(m["content"]) not in text for m in messages):
        yield "user_dropped"
    # Templates may rewrite the words of earlier turns, so that only the last ones are sure to stand as they are.
    with_words = {i for i in said if trained[i] and (i == last or messages[i].get("tool_calls"))}
    if any(_last_line(messages[i]["content"]) not in text for i in with_words):
        yield "assistant_dropped"
    if any(trained[i] and _is_empty(messages[i]) for i in said):
        yield "empty_answer"
    unwritten = [i for i in said for call in messages[i].get("tool_calls", ()) if not _holds_call(said[i], call)]
    if any(trained[i] for i in unwritten):
        yield "tool_calls_dropped"
    if any(not trained[i] for i in unwritten) or not _holds_tools(conversation, text, turns):
        yield "tools_dropped"
    if trained[last] and not _holds(text, _last_line(_reasoning(messages[last]))):
        yield "reasoning_dropped"


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _is_empty(message: Message) -> bool:
    return not (message["content"].strip() or message.get("tool_calls") or _reasoning(message))


def _reasoning(message: Message) -> str:
    return next((message[name] for name in REASONING if isinstance(message.get(name), str)), "").strip()


def _last_line(content: str) -> str:
    """What a template that shows a message shows of it: it may trim the content, or set its reasoning apart."""
    return str(THINKING_END.split(content)[-1].strip().rpartition("\n")[2].strip())


def _holds_call(said: str, call: Message) -> bool:
    """Whether a call's name and the names of its arguments stand in what the assistant says."""
    function = call["function"]
    return all(_holds(said, str(name)) for name in (function["name"], *function.get("arguments", ())))


def _holds_tools(conversation: Conversation, text: str, turns: Mapping[int, Span]) -> bool:
    """Whether the schemas of the tools, and what the tools answered, stand around what the assistant says."""
    around, position = "", 0
    for start, end in turns.values():
        around, position = around + text[position:start], end
    around += text[position:]
    names = [tool.get("function", tool) for tool in conversation.tools]
    wanted = [str(function["name"]) for function in names if isinstance(function, dict) and "name" in function]
    wanted += [_last_line(m["content"]) for m in conversation.messages if m["role"] == "tool"]
    return all(_holds(around, words) for words in wanted)


def _holds(text: str, words: str) -> bool:
    """Whether the text holds the words, as they are or as JSON writes them."""
    return words in text or any(json.dumps(words, ensure_ascii=escape)[1:-1] in text for escape in (False, True))
