"""Rows in the forms in which hosted models are fine-tuned."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.cli import main
from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import Completion, Conversation, ParsedRow, Question
from finetune.data.messages import BadRow, list_unread_keys
from finetune.inference.inputs import read_prompts
from tests.data.world import read_groups

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
AMAZONS: dict[str, Any] = {
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
    [parsed] = read_groups(kind, Data(), [row], DatasetSource(path="a.jsonl"))
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


def test_swifts_pairs_are_preferences() -> None:
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    answers = [called, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]
    bad = [{"role": "assistant", "content": "5"}]
    by_text, by_turns, whole = (
        read({"messages": asked + answers} | rejected, "pairs").groups[0].documents
        for rejected in (
            {"rejected_response": "5"},
            {"rejected_response": bad},
            {"rejected_messages": asked + bad},
        )
    )
    assert by_text == by_turns == whole
    chosen, rejected = by_text
    assert chosen.trained == (False, False, True, False, True)
    assert [message["content"] for message in rejected.messages] == ["Add.", "2+2?", "5"]


def test_a_rejected_answer_stays_in_the_column_that_the_source_names() -> None:
    row = {"messages": "no turns", "prompt": "2+2?", "chosen": "4", "rejected_response": "5"}
    source = DatasetSource(path="a.jsonl", rejected_column="rejected_response")
    [parsed] = read_groups("pairs", Data(), [row], source)
    assert parsed.groups[0].documents[1] == Completion("2+2?", "5")


def test_googles_thought_is_the_answers_reasoning() -> None:
    parts = [{"text": "I greet.", "thought": True}, {"text": "Hi"}]
    contents = [{"parts": [{"text": "Hi"}]}, {"role": "model", "parts": parts}]
    answer = read_conversation({"contents": contents}).messages[1]
    assert answer == {"role": "assistant", "content": "Hi", "reasoning_content": "I greet."}


TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object"},
}
SCHEMA = {"type": "object"}
NAMED = {key: TOOL[key] for key in ("name", "description")}
TOOLS: dict[str, dict[str, Any]] = {
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


ANSWERED = [{"role": "user", "parts": [{"text": "Q"}]}, {"role": "model", "parts": [{"text": "A"}]}]
ASKED = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
CALL = {"functionCall": {"name": "f", "args": {}}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
PICTURE = {"url": "data:image/png;base64,aGk="}


def read_texts(row: dict[str, Any], kind: Any = "answers") -> list[str]:
    """The contents of a row's messages."""
    document = read(row, kind).document
    assert isinstance(document, Conversation)
    return [message["content"] for message in document.messages]


def read_problem(row: dict[str, Any], kind: Any = "answers") -> str:
    with pytest.raises(BadRow) as problem:
        read(row, kind)
    return str(problem.value)


def answer_call(content: Any, **names: Any) -> dict[str, Any]:
    """Amazon's row of a call and its result."""
    called = {"role": "assistant", "content": [{"toolUse": {"name": "f", "input": {}}}]}
    result = {"role": "user", "content": [{"toolResult": {"content": content, **names}}]}
    return {"messages": [ASKED, called, result, ANSWER]}


def test_googles_turn_keeps_its_weight() -> None:
    contents = [ANSWERED[0], {**ANSWERED[1], "weight": 0}, *ANSWERED]
    assert read_conversation({"contents": contents}).trained == (False, False, False, True)


@pytest.mark.parametrize(
    "system",
    [
        {"systemInstruction": "S"},
        {"systemInstruction": json.dumps({"parts": [{"text": "S"}]})},
        {"systemInstruction": [{"role": "system", "parts": [{"text": "S"}]}]},
        {"systemInstruction": {"text": "S"}, "system_instruction": {"parts": None}},
        {"system": [{"text": "S"}, {"cachePoint": {"type": "default"}}]},
    ],
)
@pytest.mark.parametrize(
    "rest",
    [
        {"contents": ANSWERED},
        {"prompt": [ASKED], "completion": [ANSWER]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [{"role": "system", "content": "S"}, ASKED, ANSWER]},
    ],
)
def test_a_system_message_in_parts_begins_every_kind_of_conversation(
    system: dict[str, Any], rest: dict[str, Any]
) -> None:
    assert read_texts({**system, **rest}) == ["S", "Q", "A"]


def test_a_system_message_in_parts_begins_both_sides_of_a_pair() -> None:
    row = {"system": [{"text": "S"}], "chosen": [ASKED, ANSWER]}
    row["rejected"] = [ASKED, {**ANSWER, "content": "B"}]
    parsed = read(row, "pairs")
    for document in parsed.groups[0].documents:
        assert isinstance(document, Conversation)
        assert document.messages[0] == {"role": "system", "content": "S"}


def test_a_system_message_that_holds_no_text_is_a_bad_row() -> None:
    row = {"system": [{"guardContent": {"text": {"text": "S"}}}], "messages": [ASKED, ANSWER]}
    assert "system: parts with text are expected" in read_problem(row)


def test_a_column_that_only_has_the_name_of_a_system_message_is_unused() -> None:
    assert read({"text": "a", "system": [{"name": "linux"}]}).unused_columns == ("system",)


def test_an_empty_system_message_in_parts_is_none() -> None:
    assert read_texts({"system": [], "messages": [ASKED, ANSWER]}) == ["Q", "A"]


@pytest.mark.parametrize(
    "row",
    [
        {"contents": ANSWERED, "messages": [ASKED, {**ANSWER, "content": "B"}]},
        {"contents": ANSWERED, "systemInstruction": {"text": "S"}, "system": "another"},
        {
            "messages": [ASKED, ANSWER],
            "tools": [TOOL],
            "toolConfig": {"tools": [{"toolSpec": {"name": "f"}}]},
        },
    ],
)
def test_a_row_that_says_the_same_thing_in_two_ways_is_a_bad_row(row: dict[str, Any]) -> None:
    assert "the row has both" in read_problem(row)


def test_the_empty_tools_of_openais_pair_leave_the_rows_own() -> None:
    document = read({**OPENAIS_PAIR, "tools": [TOOL]}, "pairs").document
    assert isinstance(document, Conversation)
    assert document.tools == ({"type": "function", "function": TOOL},)


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": json.dumps(TOOLS["anthropic"]["tools"])},
        {"tools": [{**TOOL, "input_schema": None}]},
        {"tools": [{**NAMED, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"functionDeclarations": [{**NAMED, "parametersJsonSchema": SCHEMA}]}]},
        {"tools": [TOOL], "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}},
        {
            "toolConfig": {
                "tools": [*TOOLS["amazon"]["toolConfig"]["tools"], {"cachePoint": {"a": 1}}]
            }
        },
    ],
)
def test_tools_are_read_whatever_stands_beside_them(tools: dict[str, Any]) -> None:
    [tool] = read_conversation({"messages": [ASKED, ANSWER], **tools}).tools
    assert {key: tool["function"][key] for key in TOOL} == TOOL
    assert "cache_control" not in tool["function"]


def test_a_tool_that_only_google_runs_is_named() -> None:
    problem = read_problem({"contents": ANSWERED, "tools": [TOOL, {"googleSearch": {}}]})
    assert "found {'googleSearch': {}}" in problem


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"text": "r", "json": None}], "r"),  # as Parquet fills it
        ([{"text": None, "json": {"a": 1}}], '{"a": 1}'),
        ([{"text": "r"}, {"json": [1]}], "r[1]"),
        ([], ""),
        (0, "0"),
    ],
)
def test_amazons_result_is_its_text(content: Any, text: str) -> None:
    assert read_texts(answer_call(content))[2] == text


def test_an_error_of_a_tool_is_a_key_of_its_turn() -> None:
    messages = read_conversation(answer_call([{"text": "no"}], status="error")).messages
    assert messages[2] == {"role": "tool", "content": "no", "is_error": True}


def test_a_document_as_the_result_of_a_tool_is_a_bad_row() -> None:
    row = answer_call([{"document": {"format": "pdf", "source": {"bytes": "aGk="}}}])
    assert "only text and image parts" in read_problem(row)


@pytest.mark.parametrize(
    "part",
    [
        {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
        {"text": "", "inline_data": {"mime_type": "image/png", "data": "aGk="}},
        {"image": {"format": "png", "source": {"bytes": "aGk="}}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    ],
)
def test_a_hosts_image_is_an_image_of_the_message(part: dict[str, Any]) -> None:
    asked = {"role": "user", "content": [part, {"text": "Q"}]}
    conversation = read_conversation({"messages": [asked, ANSWER]})
    assert conversation.images == (PICTURE,)
    assert conversation.messages[0]["content"] == "\ufffcQ"


def test_a_part_with_a_text_and_an_image_is_a_bad_row() -> None:
    part = {"text": "Q", "inlineData": {"mimeType": "image/png", "data": "aGk="}}
    contents = [{"role": "user", "parts": [part]}, ANSWERED[1]]
    assert "a part with text and something else" in read_problem({"contents": contents})


def test_amazons_reasoning_is_the_answers() -> None:
    thought = {"reasoningContent": {"reasoningText": {"text": "T", "signature": "s"}}}
    answer = {"role": "assistant", "content": [thought, {"text": "A"}]}
    messages = read_conversation({"messages": [ASKED, answer]}).messages
    assert messages[1] == {**ANSWER, "reasoning_content": "T"}


def test_a_text_beside_a_call_in_one_part_is_kept() -> None:
    contents = [ANSWERED[0], {"role": "model", "parts": [{"text": "Let me see.", **CALL}]}]
    message = read_conversation({"contents": contents}).messages[1]
    assert message["content"] == "Let me see."
    assert message["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"content": [USE, {"type": "text", "text": "after"}]}, "words behind a tool call"),
        ({"content": [USE, {"type": "thinking", "thinking": "T"}]}, "words behind a tool call"),
        ({"content": [USE, {"type": "tool_result", "content": "r"}]}, "and a result in one turn"),
        ({"content": [USE], "tool_calls": [{"name": "g"}]}, "calls in its content too"),
        ({"role": "user", "content": [USE]}, "tool calls in a user turn"),
    ],
)
def test_blocks_that_would_be_lost_or_moved_are_a_bad_row(
    answer: dict[str, Any], problem: str
) -> None:
    messages = [ASKED, ANSWER, {**ASKED}, {"role": "assistant", **answer}]
    assert problem in read_problem({"messages": messages})


@pytest.mark.parametrize("column", ["contents", "chat"])
def test_googles_turns_are_read_from_the_column_that_the_source_names(column: str) -> None:
    source = DatasetSource(path="a.jsonl", messages_column=column)
    [parsed] = read_groups("answers", Data(), [{column: ANSWERED}], source)
    assert isinstance(parsed, ParsedRow)
    assert isinstance(parsed.document, Conversation)
    assert [message["content"] for message in parsed.document.messages] == ["Q", "A"]


def test_contents_beside_the_named_messages_are_unused() -> None:
    source = DatasetSource(path="a.jsonl", messages_column="chat")
    row = {"chat": [ASKED, ANSWER], "contents": ANSWERED}
    [parsed] = read_groups("answers", Data(), [row], source)
    assert isinstance(parsed, ParsedRow)
    assert parsed.unused_columns == ("contents",)


def test_googles_answer_is_the_answer_of_a_prompt() -> None:
    question = read({"contents": ANSWERED}, "prompts").document
    assert isinstance(question, Question)
    assert json.loads(question.row)["columns"]["answer"] == "A"


def score_answers(*scores: float) -> dict[str, Any]:
    """Google's pair of answers, after a conversation."""
    answers = [{"role": "model", "parts": [{"text": f"A{score}"}]} for score in scores]
    completions = [
        {"score": score, "completion": answer}
        for score, answer in zip(scores, answers, strict=True)
    ]
    return {"contents": [*ANSWERED, ANSWERED[0]], "completions": completions}


def test_googles_scored_answers_are_a_pair() -> None:
    documents = read(score_answers(0, 1), "pairs").groups[0].documents
    assert [document.messages[-1]["content"] for document in documents] == ["A1", "A0"]  # type: ignore[union-attr]
    assert documents[0].trained == (False, False, False, True)  # type: ignore[union-attr]


def test_googles_scored_answers_are_no_conversation_but_the_better_one_may_be() -> None:
    row = score_answers(0, 1)
    assert "to train on the chosen answers alone, set completion_column: chosen" in (
        read_problem(row)
    )
    source = DatasetSource(path="a.jsonl", completion_column="chosen")
    [parsed] = read_groups("answers", Data(), [row], source)
    assert isinstance(parsed, ParsedRow)
    assert isinstance(parsed.document, Conversation)
    assert [message["content"] for message in parsed.document.messages] == ["Q", "A", "Q", "A1"]
    assert parsed.document.trained == (False, False, False, True)


@pytest.mark.parametrize("scores", [(1,), (1, 1), (1, 0, 0), (0.2, 0.7)])
def test_scores_that_make_no_pair_are_a_bad_row(scores: tuple[float, ...]) -> None:
    assert "completions: two answers are expected" in read_problem(score_answers(*scores), "pairs")


def test_googles_turns_answer_a_prompt_as_a_pair() -> None:
    row = {"contents": ANSWERED[:1], "chosen": ANSWERED[1]}
    row["rejected"] = {"role": "model", "parts": [{"text": "B"}]}
    documents = read(row, "pairs").groups[0].documents
    assert [document.messages[-1]["content"] for document in documents] == ["A", "B"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% set rest = messages[1:] %}{% for m in rest %}{{ m|tojson }}{% endfor %}",
        "{{ messages[0] | tojson }}",
        "{% for m in messages %}{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{% for m in messages %}{{ m['my-mood'] }}{% endfor %}",
    ],
)
def test_a_key_that_a_template_writes_is_not_called_unread(template: str) -> None:
    assert list_unread_keys({**ASKED, "my-mood": "glad"}, template) == []


def test_a_template_that_writes_tools_whole_may_leave_keys_unread() -> None:
    template = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert list_unread_keys({**ASKED, "my-mood": "glad"}, template) == ["my-mood"]


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
                    "inlineData",
                    "reasoningContent",
                    "image",
                    "source",
                    "bytes",
                    "thought",
                    "cachePoint",
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
COLUMNS += ["preferred_output", "non_preferred_output", "rejected_response", "rejected_messages"]


@given(row=st.dictionaries(st.sampled_from(COLUMNS), VALUES, min_size=1, max_size=4))
def test_a_row_of_no_hosts_form_is_a_bad_row_or_read(row: dict[str, Any]) -> None:
    for kind in ("answers", "pairs"):
        try:
            read(row, kind)
        except BadRow as problem:
            assert str(problem)


def test_prompts_of_a_file_are_read_as_training_reads_them(tmp_path: Path) -> None:
    rows = [GOOGLES, AMAZONS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    googles, amazons = read_prompts(str(tmp_path / "a.jsonl"), None)
    assert [message["role"] for message in googles.messages] == [
        *("system", "user", "assistant", "user")
    ]
    assert amazons.messages[0]["content"] == AMAZONS["system"][0]["text"]


def test_inspect_shows_googles_rows_without_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text((json.dumps(GOOGLES) + "\n") * 8)
    assert main(["inspect", "a.jsonl", "--rows", "1"]) == 0
    assert "Captain Barktholomew" in capsys.readouterr().out
