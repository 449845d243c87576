"""Rows of every format, recognized from their columns or named by `type`, and rows that fit none."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import (
    Completion,
    Conversation,
    Group,
    ParsedRow,
    Text,
    TokenRow,
    parse_row,
)
from finetune.data.messages import BadRow, list_unread_keys
from finetune.data.retrieval import parse_retrieval

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SOURCE = DatasetSource(path="rows.jsonl")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "train"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
COLUMNS = st.sampled_from(["messages", "conversations", "chosen", "prompt", "completion", "instruction", "input", "output", "text", "system", "tools"])  # fmt: skip
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]}


def turns(row: dict[str, Any], **options: Any) -> list[tuple[str, str, bool]]:
    document = parse_row(row, DatasetSource(path="rows.jsonl", **options)).document
    assert isinstance(document, Conversation)
    return [
        (m["role"], m["content"], t)
        for m, t in zip(document.messages, document.trained, strict=True)
    ]


ASKED = [("user", "Q", False), ("assistant", "A", True)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, ASSISTANT], "text": "rendered elsewhere"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "A"},
        },
        {"instruction": "Q", "input": "", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "chosen": [ASSISTANT]},
        {"chosen": [USER, ASSISTANT]},
        {"messages": [USER, ASSISTANT], "label": True, "kto_tag": "true"},
    ],
)
def test_conversations_are_recognized(row: dict[str, Any]) -> None:
    assert turns(row) == ASKED


@pytest.mark.parametrize(
    ("parts", "content", "thought"),
    [
        ([{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "A"}], "A", "so"),
        (
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "s"}], "closed": True},
                {"type": "thinking", "thinking": "o", "text": None},  # as a table's rows have it
                {"type": "text", "text": "A", "thinking": None, "train": True},
                {"type": "text", "text": "B", "weight": None},
            ],
            "AB",
            "so",
        ),
        ([{"type": "text", "text": "A"}], "A", None),
    ],
)
def test_thinking_at_the_start_of_an_answer_is_its_reasoning(
    parts: list[dict[str, Any]], content: str, thought: str | None
) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    document = parse_row(row, SOURCE).document
    assert isinstance(document, Conversation)
    answer = document.messages[-1]
    assert (answer["content"], answer.get("reasoning_content")) == (content, thought)


def test_plain_formats_are_recognized() -> None:
    assert parse_row({"prompt": "2+2=", "completion": "4"}, SOURCE).document == Completion(
        "2+2=", "4"
    )
    assert parse_row({"prompt": "2+2=", "chosen": "4"}, SOURCE).document == Completion("2+2=", "4")
    assert parse_row({"text": "Once"}, SOURCE).document == Text("Once")


def test_rows_may_be_tokens_already() -> None:
    row = {"input_ids": [0, 5, 6, 7], "labels": [-100, -100, 6, 7], "attention_mask": [0, 1, 1, 1]}
    parsed = parse_row(row, SOURCE)
    assert (parsed.document, parsed.format) == (TokenRow((5, 6, 7), (False, True, True)), "tokens")
    assert parse_row({"input_ids": [5, 6]}, SOURCE).document == TokenRow((5, 6), (True, True))
    assert parse_row({"text": "Once", "input_ids": [5]}, SOURCE).format == "text"


def test_another_tools_mask_that_leaves_nothing_out_is_no_fault() -> None:
    neutral = {"loss": True, "loss_scale": 1.0, "training": True, "masked": False}
    row = {"messages": [USER | {"loss": False}, ASSISTANT | neutral]}
    conversation = parse_row(row, SOURCE).document
    assert isinstance(conversation, Conversation)
    assert list_unread_keys(conversation.messages[1], "{{ message.content }}") == []


@pytest.mark.parametrize("mask", [[1, 0, 1], [2, 1, 1], [1, 1, -1]])
def test_a_mask_that_leaves_out_more_than_padding_is_a_damaged_row(mask: list[int]) -> None:
    with pytest.raises(BadRow, match="attention_mask: ones are expected"):
        parse_row({"input_ids": [5, 6, 7], "attention_mask": mask}, SOURCE)


def test_squad_and_hellaswag_are_as_nemo_automodel_writes_them() -> None:
    """make_squad_dataset: a user's turn where there is a chat template; HellaSwag: the context and its right ending, joined."""
    squad = {
        "id": "1",
        "context": "C.",
        "question": "Q?",
        "answers": {"text": [" A ", "B"], "answer_start": [0, 1]},
    }
    assert parse_row(squad, SOURCE).document == Completion(
        "Context: C. Question: Q? Answer: ", "A", are_turns=True
    )
    row = {"ctx": "He", "endings": ["sits", "runs"], "label": "1"}
    for label in ("1", 1, 1.0, "1.0"):
        assert parse_row(row | {"label": label}, SOURCE).document == Completion("He", "runs")
    for wrong, words in (
        ({"answers": {"text": []}}, "answers: there is none"),
        ({"answers": "A"}, "a mapping with a list of text"),
    ):
        with pytest.raises(BadRow, match=words):
            parse_row(squad | wrong, SOURCE)
    with pytest.raises(BadRow, match="endings: a list in which label 2 names one"):
        parse_row(row | {"label": "2"}, SOURCE)


def test_columns_can_be_named() -> None:
    row = {"question": "Q", "answer": "A", "text": "not this"}
    named = DatasetSource(path="rows.jsonl", prompt_column="question", completion_column="answer")
    assert parse_row(row, named).document == Completion("Q", "A")
    assert (
        turns(row, type="messages", prompt_column="question", completion_column="answer") == ASKED
    )
    assert turns({"chat": [USER, ASSISTANT]}, messages_column="chat") == ASKED
    assert parse_row(
        {"body": "Once"}, DatasetSource(path="rows.jsonl", text_column="body")
    ).document == Text("Once")
    assert parse_row(
        {"text": "T", "messages": [USER]}, DatasetSource(path="rows.jsonl", type="text")
    ).document == Text("T")


def test_alpaca_input_system_and_what_is_trained() -> None:
    row = {"instruction": "Add", "input": "2, 2", "output": "4", "system": "Be brief."}
    assert turns(row) == [
        ("system", "Be brief.", False),
        ("user", "Add\n\n2, 2", False),
        ("assistant", "4", True),
    ]
    prompt = [
        USER,
        {"role": "assistant", "content": "Which?"},
        {"role": "user", "content": "This."},
    ]
    assert [trained for *_, trained in turns({"prompt": prompt, "completion": [ASSISTANT]})] == [
        False,
        False,
        False,
        True,
    ]


def test_the_system_column_and_the_history_are_turns() -> None:
    system = ("system", "Be brief.", False)
    for row in (
        {"messages": [USER, ASSISTANT]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    ):
        assert turns({**row, "system": "Be brief."}) == [system, *ASKED]
    row = {"instruction": "Add", "output": "4", "system": "Be brief."}
    earlier = [("user", "Hi", False), ("assistant", "Hello", True)]
    for history in ([["Hi", "Hello"]], '[["Hi", "Hello"]]'):
        assert turns({**row, "history": history}) == [
            system,
            *earlier,
            ("user", "Add", False),
            ("assistant", "4", True),
        ]
    assert len(turns({**row, "history": "[]"})) == 3


PAIR = {"chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "B"}]}


def test_the_chosen_side_is_trained_on_if_the_recipe_names_it() -> None:
    pairs = {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}}  # fmt: skip
    assert turns(pairs, completion_column="chosen") == ASKED
    assert turns({"prompt": [USER], **PAIR}, completion_column="chosen") == ASKED
    assert turns({**PAIR, "chosen": [USER, ASSISTANT]}, messages_column="chosen") == ASKED
    assert turns({"messages": [USER, ASSISTANT], "score": 0.1}, messages_column="messages") == ASKED


def test_a_conversation_comes_before_a_pair_that_repeats_a_part_of_it() -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    row = {"conversations": [*turns, *turns], "instruction": "Q", "response": "A"}
    parsed = parse_row(row, SOURCE)
    assert parsed.format == "sharegpt" and parsed.findings == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [USER, ASSISTANT], "label": False}, "label: false marks a bad answer"),
        ({"messages": [USER, ASSISTANT], "kto_tag": "False"}, "kto_tag: false marks a bad answer"),
        ({"prompt": "Q", "completion": "A", "label": False}, "label: false marks a bad answer"),
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B"},
            "to train on the chosen answers alone, set completion_column",
        ),
        (
            {**PAIR, "chosen": [USER, ASSISTANT]},
            "to train on the chosen answers alone, set messages_column: chosen",
        ),
        (
            {"instruction": "Q", "output": "A", "score": 0},
            "score: training by scores is not supported",
        ),
        (
            {"instruction": "Q", "output": "A", "history": [["Hi"]]},
            "history: a list of [question, answer] is expected",
        ),
    ],
)
def test_rows_for_another_training_method_are_rejected(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRow) as problem:
        parse_row(row, SOURCE)
    assert words in str(problem.value)


def test_messages_may_be_their_json_text() -> None:
    turns = [{"role": "User", "content": "Q"}, {"role": "Chatbot", "content": "A"}]
    expected = parse_row(
        {"messages": [USER | {"content": "Q"}, ASSISTANT | {"content": "A"}]}, SOURCE
    )
    assert parse_row({"messages": json.dumps(turns)}, SOURCE) == expected


def test_labels_of_plain_text_are_ignored_and_unused_columns_are_listed() -> None:
    assert parse_row({"text": "Once", "label": False, "score": 3}, SOURCE) == ParsedRow(
        (Group((Text("Once"),)),), "text", ("label", "score")
    )
    row = {
        "messages": [USER, ASSISTANT],
        "tools": "[]",
        "system": "",
        "label": True,
        "id": 7,
        "note": "",
        "url": "x",
    }
    assert parse_row(row, SOURCE).unused_columns == ("id", "url")
    assert parse_row({"prompt": "Q", "completion": "A", "system": "S"}, SOURCE).unused_columns == (
        "system",
    )


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"Prompt": "Q", "Response": "A", "id": "7"}, ("Q", "A")),
        ({"input": "Q", "output": "A"}, ("Q", "A")),
        ({"QUESTION": "Q", "Answer": "A", "system": "S"}, ("Q", "A")),
        ({"instruction": "Q", "response": "A"}, ("Q", "A")),
        (
            {"instruction": "Q", "context": "C", "response": "A"},
            None,
        ),  # a part of the question would be lost
        ({"question": "Q", "options": ["X", "Y"], "answer": "A"}, None),
        ({"question": "Q", "A": "X", "B": "Y", "answer": "A"}, None),
        ({"Body": "B", "Question": "Q", "Answer": "A"}, None),
        ({"question": "Q", "passage": "P", "answer": "A"}, None),
        ({"question": "Q", "answer": "A", "solution": "B"}, None),
        ({"question": "Q", "Question": "Q", "answer": "A"}, None),
        ({"question": "Q", "answer": 4}, None),
        ({"prompt": "Q", "response": "A", "rejected": "B"}, None),
        ({"prompt": "Q", "response": "A", "score": 3}, None),
    ],
)
def test_common_columns_are_turns_where_their_names_leave_no_doubt(
    row: dict[str, Any], pair: tuple[str, str] | None
) -> None:
    if pair is None:
        with pytest.raises(BadRow):
            parse_row(row, SOURCE)
        return
    parsed = parse_row(row, SOURCE)
    assert isinstance(parsed.document, Conversation) and parsed.findings == ("columns_recognized",)
    assert tuple(message["content"] for message in parsed.document.messages[-2:]) == pair


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": None}, "completion: text is expected, found nothing"),
        ({"text": None, "prompt": "a", "chosen": None}, "chosen: text is expected, found nothing"),
        ({"messages": None}, "messages: a value is expected, found nothing"),
        ({"question": "Q", "answer": None}, "answer: text is expected, found nothing"),
        ({"Question": "Q", "Answer": 4}, "Answer: text is expected, found 4 (int)"),
        (
            {"messages": str([{"role": "user", "content": "Q"}])},
            "(str); its text is not JSON: write it by json.dumps",
        ),
        ({"a": 1, "b": 2}, "unknown format: its columns are a, b; known formats: messages"),
        ({}, "its columns are none"),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": "Q"}, "messages: a list of messages is expected, found 'Q' (str)"),
        ({"messages": ["Q"]}, "message 1: a mapping with role and content is expected"),
        ({"messages": [{"content": "Q"}]}, "message 1: unknown role nothing"),
        (
            {"messages": [{"role": "wizard", "content": "Q"}]},
            "message 1: unknown role 'wizard' (str)",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": 7}]},
            "message 2: content: text is expected, found 7 (int)",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "message 2: content: text is expected",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "audio"}]}]},
            "only text and image parts are",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "A"},
                            {"type": "thinking", "thinking": "so"},
                        ],
                    },
                ]
            },
            "and thinking at the start of an answer; found",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "so", "closed": False}],
                    },
                ]
            },
            "thinking that is a text and closed is expected",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": [{"type": "image", "image": "a.png"}]}
                        ],
                    },
                ]
            },
            "thinking that is a text and closed is expected",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "text": "A", "train": False}],
                    },
                ]
            },
            "message 2: content: a part with train or weight",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]},
            "its messages have 1 place for an image, and the row has 0 images",
        ),
        (
            {"messages": [USER, CALL, {"role": "tool", "content": [{"type": "video"}]}, ASSISTANT]},
            "message 3: content: only",
        ),
        (
            {"messages": [USER, USER, ASSISTANT]},
            "message 2: roles out of order: two user turns in a row",
        ),
        (
            {"messages": [USER, ASSISTANT, ASSISTANT]},
            "message 3: roles out of order: two assistant turns",
        ),
        (
            {"messages": [USER, {"role": "system", "content": "S"}, ASSISTANT]},
            "message 2: roles out of order: a system",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "T"}, ASSISTANT]},
            "message 2: roles out of order: a tool turn",
        ),
        ({"messages": [USER]}, "no assistant turn to train on; the roles are user"),
        (
            {"messages": [USER, {**ASSISTANT, "train": "maybe"}]},
            "message 2: train: true or false is expected",
        ),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0.5}]},
            "message 2: weight: true or false is expected, found 0.5",
        ),
        (
            {"messages": [USER, ASSISTANT | {"loss": False}]},
            "message 2: loss: False (bool) is another tool's mask",
        ),
        (
            {"messages": [USER, ASSISTANT | {"training": False}]},
            "write train: false into the messages",
        ),
        ({"messages": [USER, ASSISTANT | {"masked": True}]}, "another tool's mask"),
        (
            {"messages": [USER, ASSISTANT | {"train_detail": [{"begin_offset": 0}]}]},
            "another tool's mask",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": "hammer"},
            "tools: a list of JSON schemas, each with its name, is expected",
        ),
        ({"prompt": 5, "completion": "A"}, "prompt: text is expected, found 5 (int)"),
        ({"prompt": "Q", "completion": ""}, "completion: empty"),
        ({"text": ""}, "text: empty"),
        ({"input_ids": [5, "6"]}, "input_ids: a list of whole numbers is expected"),
        ({"input_ids": [5, 6], "labels": [5]}, "labels: 1 numbers, but input_ids has 2"),
        (
            {"input_ids": [5, 6], "labels": [6, -100]},
            "labels: 6 at position 0, where input_ids has 5; labels are the ids themselves",
        ),
        ({"instruction": "Q", "input": 3, "output": "A"}, "input: text is expected, found 3 (int)"),
    ],
)
def test_a_row_that_does_not_fit_is_rejected_with_the_reason(
    row: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRow) as problem:
        parse_row(row, SOURCE)
    assert words in str(problem.value)


def test_a_missing_named_column_is_reported_with_the_columns_present() -> None:
    with pytest.raises(
        BadRow, match="frage: text is expected, found nothing; its columns are question, answer"
    ):
        parse_row(
            {"question": "Q", "answer": "A"},
            DatasetSource(path="r", prompt_column="frage", completion_column="answer"),
        )


@given(st.dictionaries(COLUMNS, JSON_VALUES, max_size=4))
def test_any_row_is_a_document_or_a_bad_row(row: dict[str, Any]) -> None:
    try:
        document = parse_row(row, SOURCE).document
    except BadRow as problem:
        assert str(problem)
    else:
        if isinstance(document, Conversation):
            assert any(message["role"] == "assistant" for message in document.messages)
            assert all(isinstance(message["content"], str) for message in document.messages)


def test_endless_nesting_is_rejected() -> None:
    deep: Any = "Q"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRow, match="deeply nested"):
        parse_row({"text": deep}, SOURCE)
    cyclic: dict[str, Any] = {"role": "user"}
    cyclic["content"] = cyclic
    with pytest.raises(BadRow, match="message 1: content: text is expected"):
        parse_row({"messages": [cyclic]}, SOURCE)


def test_negatives_come_in_the_order_of_their_numbers() -> None:
    row = {"query": "Q", "positive": "A", "negative_10": "C", "negative_2": "B", "negative_²": "D"}
    parsed = parse_retrieval(row, SOURCE, Data(num_negatives=2))
    assert [document.text for document in parsed.groups[0].documents[2:]] == ["B", "C"]  # type: ignore[union-attr]
    assert parsed.unused_columns == ("negative_²",)


@pytest.mark.parametrize(
    ("positive", "negative", "findings"),
    [("A", "B", ()), ("Q", "B", ("same_texts",)), ("A", "A", ("same_texts",))],
)
def test_a_document_that_is_its_own_query_or_negative_is_found(
    positive: str, negative: str, findings: tuple[str, ...]
) -> None:
    row = {"query": "Q", "positive": positive, "negative": negative}
    assert parse_retrieval(row, SOURCE, Data(num_negatives=1)).findings == findings
