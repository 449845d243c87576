"""Rows in the forms in which hosted models are fine-tuned."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.cli import main
from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import Conversation, ParsedRow
from finetune.data.groups import GroupReader
from finetune.data.messages import BadRow

# as the hosts' own documentation has them
GOOGLES = {
    "systemInstruction": {
        "role": "system",
        "parts": [{"text": "You are a pirate dog named Captain Barktholomew."}],
    },
    "contents": [
        {"role": "user", "parts": [{"text": "Hi"}]},
        {"role": "model", "parts": [{"text": "Argh! What brings ye to my ship?"}]},
        {"role": "user", "parts": [{"text": "What's your name?"}]},
        {"role": "model", "parts": [{"text": "I be Captain Barktholomew."}]},
    ],
}
AMAZONS = {
    "schemaVersion": "bedrock-conversation-2024",
    "system": [{"text": "You are a digital assistant with a friendly personality"}],
    "messages": [
        {"role": "user", "content": [{"text": "What is the capital of Mars?"}]},
        {
            "role": "assistant",
            "content": [{"text": "Mars does not have a capital. Perhaps it will one day."}],
        },
    ],
}
OPENAIS_PAIR = {
    "input": {
        "messages": [{"role": "user", "content": "How cold is San Francisco today?"}],
        "tools": [],
        "parallel_tool_calls": True,
    },
    "preferred_output": [{"role": "assistant", "content": "A high near 68 °F."}],
    "non_preferred_output": [{"role": "assistant", "content": "Not particularly cold."}],
}


def read(row: dict[str, Any], kind: Any = "answers") -> ParsedRow:
    [parsed] = GroupReader(kind, Data()).read([row], DatasetSource(path="a.jsonl"))
    if isinstance(parsed, BadRow):
        raise parsed
    return parsed


def read_conversation(row: dict[str, Any]) -> Conversation:
    document = read(row).document
    assert isinstance(document, Conversation)
    return document


def test_googles_contents_are_a_conversation_with_its_system_message() -> None:
    messages = read_conversation(GOOGLES).messages
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    assert messages[0]["content"] == "You are a pirate dog named Captain Barktholomew."
    assert messages[4]["content"] == "I be Captain Barktholomew."


def test_amazons_system_message_is_read() -> None:
    parsed = read(AMAZONS)
    assert isinstance(parsed.document, Conversation)
    assert [message["role"] for message in parsed.document.messages] == [
        "system",
        "user",
        "assistant",
    ]
    assert parsed.unused_columns == ("schemaVersion",)


def test_openais_pair_is_a_preference() -> None:
    parsed = read(OPENAIS_PAIR, "pairs")
    answers = [document.messages[-1]["content"] for document in parsed.groups[0].documents]  # type: ignore[union-attr]
    assert answers == ["A high near 68 °F.", "Not particularly cold."]
    assert parsed.unused_columns == ("parallel_tool_calls",)


def test_googles_thought_is_the_answers_reasoning() -> None:
    parts = [{"text": "I greet.", "thought": True}, {"text": "Hi"}]
    contents = [{"parts": [{"text": "Hi"}]}, {"role": "model", "parts": parts}]
    answer = read_conversation({"contents": contents}).messages[1]
    assert answer == {"role": "assistant", "content": "Hi", "reasoning_content": "I greet."}


TOOL = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
SCHEMA = {"type": "object"}
NAMED = {key: TOOL[key] for key in ("name", "description")}
TOOLS = {
    "anthropic": {"tools": [{**NAMED, "input_schema": SCHEMA}]},
    "amazon": {"toolConfig": {"tools": [{"toolSpec": {**NAMED, "inputSchema": {"json": SCHEMA}}}]}},
    "google": {"tools": [{"functionDeclarations": [{**NAMED, "parameters": {"type": "OBJECT"}}]}]},
}


@pytest.mark.parametrize("host", TOOLS)
def test_a_hosts_tools_are_described_as_openais(host: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    conversation = read_conversation({"messages": messages, **TOOLS[host]})
    assert conversation.tools == ({"type": "function", "function": TOOL},)


def write_anthropics(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's form as Anthropic's."""
    if message["role"] == "tool":
        block = {
            "type": "tool_result",
            "tool_use_id": message["tool_call_id"],
            "content": message["content"],
        }
        return {"role": "user", "content": [block]}
    blocks = [{"type": "text", "text": message["content"]}]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        block = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", **block})
    return {"role": message["role"], "content": blocks}


def write_amazons(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's form as Amazon's."""
    if message["role"] == "tool":
        content = [{"text": message["content"]}]
        result = {"toolUseId": message["tool_call_id"], "content": content, "status": "success"}
        return {"role": "user", "content": [{"toolResult": result}]}
    blocks: list[dict[str, Any]] = [{"text": message["content"]}]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        use = {"toolUseId": call["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append({"toolUse": use})
    return {"role": message["role"], "content": blocks}


def write_googles(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's form as a turn of Google's."""
    if message["role"] == "tool":
        response = {"id": message["tool_call_id"], "response": {"text": message["content"]}}
        return {"role": "user", "parts": [{"functionResponse": response}]}
    parts: list[dict[str, Any]] = [{"text": message["content"]}]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        called = {"id": call["id"], "name": function["name"], "args": function["arguments"]}
        parts.append({"functionCall": called})
    return {"role": "model" if message["role"] == "assistant" else "user", "parts": parts}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns of a user, of tools that are called, and of the assistant, in OpenAI's form."""
    messages: list[dict[str, Any]] = []
    words = st.text("ab 4\n", min_size=1, max_size=8)
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for number in range(draw(st.integers(0, 2))):
            call_id = f"call_{len(messages)}_{number}"
            arguments = draw(st.dictionaries(st.sampled_from("xy"), st.integers(), min_size=1))
            function = {"name": draw(st.sampled_from(["f", "g"])), "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": draw(words), "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(words), "tool_call_id": call_id})
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


@given(messages=conversations())
def test_a_conversation_in_every_hosts_form_is_the_same(messages: list[dict[str, Any]]) -> None:
    expected = read_conversation({"messages": messages})
    anthropics = {"messages": list(map(write_anthropics, messages))}
    amazons = {"messages": list(map(write_amazons, messages))}
    assert read_conversation(anthropics) == read_conversation(amazons) == expected
    googles = read_conversation({"contents": list(map(write_googles, messages))})
    for own, theirs in zip(googles.messages, expected.messages, strict=True):
        if own["role"] == "tool":  # a result is an object there
            own["content"] = json.loads(own["content"])["text"]
        assert own == theirs


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "parts",
                    "text",
                    "role",
                    "content",
                    "type",
                    "toolUse",
                    "functionCall",
                    "toolSpec",
                    "functionDeclarations",
                    "toolResult",
                    "functionResponse",
                    "input_schema",
                    "messages",
                    "tools",
                    "name",
                ]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
COLUMNS = ["contents", "system", "systemInstruction", "toolConfig", "tools", "messages", "input"]
COLUMNS += ["preferred_output", "non_preferred_output"]


@given(row=st.dictionaries(st.sampled_from(COLUMNS), VALUES, min_size=1, max_size=4))
def test_a_row_of_no_hosts_form_is_a_bad_row_or_read(row: dict[str, Any]) -> None:
    for kind in ("answers", "pairs"):
        try:
            read(row, kind)
        except BadRow as problem:
            assert str(problem)


def test_inspect_shows_googles_rows_without_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text((json.dumps(GOOGLES) + "\n") * 8)
    assert main(["inspect", "a.jsonl", "--rows", "1"]) == 0
    assert "Captain Barktholomew" in capsys.readouterr().out
