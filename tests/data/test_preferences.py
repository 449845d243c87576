"""Preference rows of every form, their common prompt, and pairs that teach nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.cli import main
from finetune.config.schema import DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.environments import choose_environment
from finetune.data.formats import Completion, Conversation, Document, Question, parse_row
from finetune.data.messages import BadRow
from finetune.data.preferences import find_end_of_prompt, parse_pair, parse_prompt
from finetune.data.prepare import PreparedData
from finetune.errors import EXIT_USER_ERROR, UserError
from tests.data.conftest import Prepare
from tests.data.test_prepare import names, write_lines

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("assistant", "B")))  # fmt: skip
SYSTEM = {"role": "system", "content": "S"}
HUMAN, GPT, WORSE = (
    {"from": role, "value": text} for role, text in (("human", "Q"), ("gpt", "A"), ("gpt", "B"))
)
EARLIER = [USER, {"role": "assistant", "content": "Which?"}]
ASKED = [("user", "Q", False)]


def sides(row: dict[str, Any], **options: Any) -> list[Any]:
    """Each side: (role, content, trained) of its messages, or (prompt, completion)."""
    chosen, rejected = (
        parse_pair(row, DatasetSource(path="rows.jsonl", **options)).groups[0].documents
    )

    def describe(side: Document) -> Any:
        if isinstance(side, Completion):
            return side.prompt, side.completion
        assert isinstance(side, Conversation)
        return [
            (m["role"], m["content"], on) for m, on in zip(side.messages, side.trained, strict=True)
        ]

    return [describe(chosen), describe(rejected)]


def answers(*before: tuple[str, str, bool]) -> list[Any]:
    return [[*before, ("assistant", text, True)] for text in "AB"]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": [USER], "chosen": GOOD, "rejected": BAD}, {}),
        ({"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": [USER], "chosen": "A", "rejected": "B"}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "Q", "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": WORSE}, {}),
        ({"messages": [USER], "chosen": GOOD, "rejected": BAD}, {}),
        ({"question": "Q", "system": "", "chosen": "A", "rejected": "B"}, {}),
        ({"question": "Q", "chosen": "A", "rejected": "B"}, {"prompt_column": "question"}),
        ({"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"}, {}),
        ({"prompt": "Q", "response_w": "A", "response_l": "B"}, {"type": "messages"}),
        ({"x": "Q", "y": "A", "z": "B"}, {"type": "messages", "prompt_column": "x", "chosen_column": "y", "rejected_column": "z"}),
        ({"history": [USER], "chosen": GOOD, "rejected": BAD}, {"messages_column": "history"}),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, {"type": "messages", "completion_column": "chosen"}),
    ],
)  # fmt: skip
def test_every_form_is_a_question_with_two_answers(
    row: dict[str, Any], options: dict[str, Any]
) -> None:
    assert sides(row, **options) == answers(*ASKED)


def test_nothing_of_the_prompt_is_trained_on() -> None:
    before = [("user", "Q", False), ("assistant", "Which?", False), ("user", "Q", False)]
    assert sides({"prompt": [*EARLIER, USER], "chosen": [GOOD], "rejected": [BAD]}) == answers(
        *before
    )
    assert sides({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}) == answers(
        *before
    )
    system = ("system", "S", False)
    assert sides({"system": "S", "question": "Q", "chosen": "A", "rejected": "B"}) == answers(
        system, *ASKED
    )
    assert sides({"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]}) == answers(
        system, *ASKED
    )
    # One side continues where the other ends: the last answer that both have is compared.
    shorter, longer = sides({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]})
    assert [on for *_, on in shorter] == [False, True] and [on for *_, on in longer] == [
        False,
        True,
        False,
        True,
    ]
    calls = [
        USER,
        {"from": "gpt", "value": ""},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    ]
    assert [on for *_, on in sides({"chosen": [*calls[:1], GOOD], "rejected": calls})[1]] == [
        False,
        True,
    ]


def test_plain_text_has_an_explicit_prompt_or_the_one_that_both_sides_share() -> None:
    for row in ({"chosen": " A", "rejected": " B"}, {"response_w": " A", "response_l": " B"}):
        assert sides({"prompt": "Q:", **row}) == [("Q:", " A"), ("Q:", " B")]
    asked = "\n\nHuman: Why?\n\nAssistant:"
    assert sides({"chosen": f"{asked} So.", "rejected": f"{asked} No."}) == [
        (asked, " So."),
        (asked, " No."),
    ]
    for chosen, rejected, prompt in (
        ("A:\nthink", "A:\nthank", "A:\n"),  # a line break stays with the prompt
        ("say yes", "say yes indeed", "say"),  # no side is left empty
        ("yes", "yesterday", ""),
        ("same", "same", ""),
        ("a  b", "a  c", "a "),
    ):
        assert chosen[: find_end_of_prompt(chosen, rejected)] == prompt


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"messages": [USER, GOOD]}, {}, "chosen or response_w: no such answer: its columns are messages; a preference"),
        ({"prompt": "Q", "completion": "A", "label": True}, {}, "method: kto learns from answers rated by label"),
        ({"prompt": "Q", "chosen": "A"}, {}, "rejected or response_l: no such answer: its columns are prompt, chosen"),
        ({"chosen": "A", "rejected": "B"}, {"rejected_column": "worse"}, "worse: no such answer"),
        ({"chosen": [GOOD], "rejected": [BAD]}, {}, "chosen and rejected have no common prompt"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "R"}, BAD]}, {}, "have no common prompt"),
        ({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, {**USER, "content": "R"}, BAD]}, {}, "message 3: chosen and rejected differ in a turn that is not the assistant's"),
        ({"prompt": [], "chosen": "A", "rejected": "B"}, {}, "their first messages differ, and prompt is an empty list"),
        ({"prompt": 3, "chosen": "A", "rejected": "B"}, {}, "prompt: text or a list of messages is expected, found 3"),
        ({"prompt": "Q", "chosen": 3, "rejected": "B"}, {}, "chosen: an answer is expected, as text or messages, found 3"),
        ({"prompt": "Q", "chosen": [], "rejected": [BAD]}, {}, "chosen: an answer is expected, as text or messages, found []"),
        ({"prompt": [], "chosen": [3], "rejected": [BAD]}, {}, "message 1: a mapping with role and content is expected"),
        ({"chosen": "A", "rejected": "B"}, {"prompt_column": "q"}, "q: nothing; its columns are chosen, rejected"),
        ({"chosen": "A", "rejected": "B"}, {"type": "text"}, "plain text (type: text, text_column) holds no pairs"),
        ({"prompt": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]}, {}, "two assistant turns in a row"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused_with_the_reason(
    row: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRow) as problem:
        parse_pair(row, DatasetSource(path="rows.jsonl", **options))
    assert words in str(problem.value)


def test_ratings_say_which_answer_is_better() -> None:
    row = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    for scores, is_swapped in (
        ({"score_chosen": 2, "score_rejected": 7.5}, True),
        ({"score_chosen": 7.5, "score_rejected": 2}, False),
        ({"score_chosen": 2, "score_rejected": 2}, False),
        (
            {"chosen-rating": 1, "rejected-rating": 2, "score_w": 3, "score_l": 1},
            False,
        ),  # they do not agree
        (
            {"chosen_tokens": 1, "rejected_tokens": 2, "score_chosen": True, "score_rejected": 2},
            False,
        ),
    ):
        parsed = parse_pair({**row, **scores}, DatasetSource(path="rows.jsonl"))
        assert parsed.findings == (("order_swapped",) if is_swapped else ())
    named = DatasetSource(path="rows.jsonl", chosen_column="rejected", rejected_column="chosen")
    assert not parse_pair({**row, "score_chosen": 2, "score_rejected": 7}, named).findings
    assert parse_pair(
        {**row, "score_chosen": 2, "score_rejected": 7, "id": 3}, named
    ).unused_columns == ("id",)


@pytest.mark.parametrize(
    "name", ["query", "input", "Prompt", "context", "user", "problem", "Aufgabe"]
)
def test_a_prompt_under_an_unknown_name_is_found(
    prepare: Prepare, tmp_path: Path, name: str
) -> None:
    row = {name: "What is 0?", "chosen": "It is 0.", "rejected": "No 0", "n": 1}
    assert parse_pair(row, DatasetSource(path="a.jsonl")).findings == ("prompt_missing",)
    assert not parse_pair(row, DatasetSource(path="a.jsonl", prompt_column=name)).findings
    alike = {**row, "rejected": "It is 1."}
    assert bool(parse_pair(alike, DatasetSource(path="a.jsonl")).findings) == (name != "Aufgabe")
    asked = {
        **row,
        "chosen": "\n\nHuman: Why?\n\nAssistant: So.",
        "rejected": "\n\nHuman: Why?\n\nAssistant: No.",
    }
    assert not parse_pair(asked, DatasetSource(path="a.jsonl")).findings
    assert not parse_pair(
        {"chosen": "Yes", "rejected": "No", "n": 1}, DatasetSource(path="a.jsonl")
    ).findings
    if name == "query":
        path = str(write_lines(tmp_path / "a.jsonl", [row, {**row, "chosen": "Yes"}, pair_of(1)]))
        words = (
            r"fatal: prompt_missing: in 2 of 3 rows .*\(prompt_column\).*; not used: query, n \("
        )
        for method in ("dpo", "kto"):
            with pytest.raises(UserError, match=words):
                prepare([{"path": path}], method=method)
        mostly = str(write_lines(tmp_path / "b.jsonl", [row, pair_of(1), pair_of(2)]))
        assert names(prepare([{"path": mostly}], method="dpo"))["prompt_missing"] == "warning"


def test_a_prompt_beside_conversations_that_ask_something_else_is_found() -> None:
    row = {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}
    source = DatasetSource(path="a.jsonl")
    assert parse_pair({"prompt": "AAA", **row}, source).findings == ("prompt_unread",)
    for prompt in ("Q", "", "\n\nHuman: Q\n\nAssistant:", [SYSTEM, USER], None):
        assert not parse_pair({"prompt": prompt, **row}, source).findings
    assert not parse_pair({"prompt": "AAA", "chosen": [GOOD], "rejected": [BAD]}, source).findings
    turns = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    for messages in ([SYSTEM, USER], [{"role": "user", "content": "AAA"}]):
        lost = parse_pair({"messages": messages, **turns}, source)
        assert lost.findings == ("prompt_unread",), "was dropped without a word"
    for turn in (USER, {"from": "human", "value": USER["content"]}):
        assert not parse_pair({"messages": [turn], **turns}, source).findings
    image = {"question": "<image>What?", "images": ["a.png"], "chosen": "A", "rejected": "B"}
    assert not parse_pair(image, source).findings


def test_messages_may_be_json_text_wherever_messages_may_stand() -> None:
    """A CSV file holds nothing else. `messages` was read so, and in other columns the JSON itself was trained on."""
    source = DatasetSource(path="a.csv")
    lists: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (parse_pair, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
        (parse_pair, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        (parse_pair, {"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        (parse_pair, {"conversations": [HUMAN], "chosen": [GPT], "rejected": [WORSE]}),
        (parse_prompt, {"messages": [USER]}),
        (parse_prompt, {"prompt": [SYSTEM, USER]}),
        (parse_row, {"prompt": [USER], "completion": [GOOD]}),
        (parse_row, {"messages": [USER, GOOD]}),
    ]
    for parse, row in lists:
        text_row = {
            name: value if isinstance(value, str) else json.dumps(value, indent=1)
            for name, value in row.items()
        }
        [group] = parse(row, source).groups
        [text_group] = parse(text_row, source).groups
        for document, expected in zip(text_group.documents, group.documents, strict=True):
            if isinstance(document, Question):
                document = document.asked
                expected = expected.asked
            assert document == expected
        if "messages" not in row:
            of_python = {name: str(value) for name, value in row.items()}
            with pytest.raises(BadRow, match=r"not JSON: .*json\.dumps"):
                parse(of_python, source)
    plain = {"prompt": '["a", {"b": 1}]', "chosen": '[{"role": "none"}]', "rejected": "[]"}
    assert sides(plain) == [(plain["prompt"], plain[name]) for name in ("chosen", "rejected")]


@pytest.mark.parametrize("role", ["user", "User", "HUMAN", "prompter", "System"])
def test_answers_that_begin_with_their_prompt_do_so_in_any_spelling_of_its_role(role: str) -> None:
    """Only some spellings were known here, and `messages` reads all of them."""
    asked: list[Any] = [{"role": role, "content": "Q"}]
    if role == "System":
        asked.append(USER)
    row = {"prompt": "Q", "chosen": [*asked, GOOD], "rejected": [*asked, BAD]}
    [group] = parse_pair(row, DatasetSource(path="a.jsonl")).groups
    for document, answer in zip(group.documents, (GOOD, BAD), strict=True):
        expected = parse_row({"messages": [*asked, answer]}, DatasetSource(path="a.jsonl"))
        assert document == expected.document


def pair_of(number: int, chosen: str = "yes", rejected: str = "no", **more: Any) -> dict[str, Any]:
    return {"question": f"Is it {number}?", "chosen": chosen, "rejected": rejected, **more}


def text_of_pair(data: PreparedData, number: int) -> list[tuple[str, str]]:
    """(prompt, what is trained on) of both sides."""
    found = []
    for example_id in (2 * number, 2 * number + 1):
        example = data.train.examples[example_id]  # type: ignore[attr-defined]
        trained = np.flatnonzero(example.labels != IGNORE_INDEX)
        assert (np.diff(trained) == 1).all()
        ids = example.input_ids.tolist(), example.labels[trained].tolist()
        found.append(
            (data.tokenizer.decode(ids[0][: trained[0] + 1]), data.tokenizer.decode(ids[1]))
        )
    return found


def test_pairs_from_a_file_to_batches(prepare: Prepare, tmp_path: Path) -> None:
    rows = [*(pair_of(i) for i in range(12)), pair_of(3)]
    path = str(write_lines(tmp_path / "a.jsonl", rows))
    data = prepare([{"path": path}], method="dpo", eval_split_size=4, global_batch_size=2)
    assert text_of_pair(data, 0)[0][0] == text_of_pair(data, 0)[1][0]
    assert text_of_pair(data, 0)[0][0].endswith("?<|end|><|assistant|>")
    assert [trained for _, trained in text_of_pair(data, 0)] == ["yes<|end|>", "no<|end|>"]
    report = data.report.as_json()
    assert (report["pairs"], report["examples"], report["held_out_groups"]["pairs"]) == (9, 18, 4)
    assert report["sources"][0]["pairs"] == 13 and data.report.formats == {"preference"}
    assert data.report.lines()[0].startswith("9 pairs, ") and names(data)["duplicates"] == "notice"
    assert [prompt.answer for prompt in data.held_out_prompts(9)] == ["yes"] * 4
    batch = next(data.train.batches())
    assert batch.groups == sum(
        len(m.example_ids) for m in batch.micro_batches
    ) // 2 and batch.trained_tokens == sum(
        int((m.labels != IGNORE_INDEX).sum()) for m in batch.micro_batches
    )
    # The same rows read for another method are other tokens.
    named = prepare(
        [
            {
                "path": path,
                "type": "messages",
                "prompt_column": "question",
                "completion_column": "chosen",
            }
        ]
    )
    assert named.train.examples.group_size == 1 and len(named.train.examples) == 13  # type: ignore[attr-defined]


def test_pairs_are_streamed_weighed_and_compared_with_held_out_ones(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(
        write_lines(
            tmp_path / "a.jsonl", [pair_of(i, rejected="n" * (1 + i % 5)) for i in range(40)]
        )
    )
    held_out = str(write_lines(tmp_path / "b.jsonl", [pair_of(7, rejected="nnn"), pair_of(99)]))
    half = prepare(
        [{"path": path, "weight": 0.5}], method="orpo", eval_datasets=[{"path": held_out}]
    )
    assert half.report.as_json()["pairs"] == 20
    whole = prepare([{"path": path}], method="simpo", eval_datasets=[{"path": held_out}])
    (leak,) = [
        finding for finding in whole.report.findings if finding.name == "held_out_in_training"
    ]
    assert (leak.rows, leak.of) == (1, 2)
    assert prepare([{"path": path, "max_samples": 6}], method="dpo").report.as_json()["pairs"] == 6
    monkeypatch.setattr("finetune.data.prepare.BLOCK_ROWS", 64)
    streamed = prepare(
        [{"path": path}], method="orpo", streaming=True, max_steps=2, global_batch_size=4
    )
    steps = list(streamed.train.batches())
    ids = [i for step in steps for m in step.micro_batches for i in m.example_ids]
    assert len(steps) == 2 and [i + 1 for i in ids[::2]] == ids[1::2]
    assert all(m.trained_documents is not None for step in steps for m in step.micro_batches)


def test_pairs_that_teach_nothing_are_found_and_not_used(prepare: Prepare, tmp_path: Path) -> None:
    rows = [pair_of(i, score_chosen=1, score_rejected=2 if i else 0) for i in range(4)]
    rows += [
        pair_of(4, "no"),
        pair_of(5, "  "),
        pair_of(6, rejected=""),
        pair_of(7, "y" * 60 + "a", "y" * 60 + "b"),
    ]
    rows += [{"question": "Q" * 70, "chosen": "a", "rejected": "b"}]
    data = prepare([{"path": str(write_lines(tmp_path / "a.jsonl", rows))}], method="dpo")
    assert {finding.name: (finding.severity, finding.rows) for finding in data.report.findings} == {
        "sides_equal": ("warning", 1),
        "side_empty": ("warning", 2),
        "truncated": ("warning", 2),
        "truncated_equal": ("warning", 1),
        "truncated_untrained": ("warning", 1),
        "order_swapped": ("notice", 3),
    }
    assert data.report.as_json()["pairs"] == 4
    dropped = prepare([{"path": str(tmp_path / "a.jsonl")}], method="dpo", overlength="drop")
    assert names(dropped)["dropped"] == "warning" and dropped.report.as_json()["pairs"] == 4
    swapped = [pair_of(i, score_chosen=1, score_rejected=2) for i in range(3)] + [pair_of(9)]
    data = prepare([{"path": str(write_lines(tmp_path / "b.jsonl", swapped))}], method="dpo")
    assert names(data) == {"order_swapped": "warning"}
    masked = {"prompt": [USER], "chosen": [{**GOOD, "train": False}], "rejected": [BAD]}
    for name, row in (
        ("sides_equal", pair_of(1, "no")),
        ("side_empty", pair_of(1, "")),
        ("side_untrained", masked),
        ("side_untrained", {**masked, "chosen": [GOOD], "rejected": [{**BAD, "weight": 0}]}),
    ):
        same = str(write_lines(tmp_path / f"{name}.jsonl", [row, {**row, "question": "R?"}]))
        with pytest.raises(
            UserError, match=f"fatal: {name}: in 2 of 2 rows .*such pairs are not used"
        ):
            prepare([{"path": same}], method="dpo")


def test_a_prompt_that_the_template_writes_differently_is_found(
    prepare: Prepare, tmp_path: Path
) -> None:
    count = "{{ messages|length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    longer = [{"role": "assistant", "content": "B"}, USER, GOOD]
    path = write_lines(
        tmp_path / "a.jsonl", [{"prompt": [USER], "chosen": [GOOD], "rejected": longer}]
    )
    data = prepare([{"path": str(path)}], method="dpo", chat_template=count)
    assert names(data) == {"prompts_differ": "warning", "unlike_inference": "warning"}


def test_rows_of_another_method_are_refused_or_skipped(prepare: Prepare, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "a.jsonl", [{"messages": [USER, GOOD]}, pair_of(1)]))
    with pytest.raises(
        UserError,
        match=r"a\.jsonl:1: chosen or response_w: no such answer: its columns are messages",
    ):
        prepare([{"path": path}], method="dpo")
    assert prepare([{"path": path}], method="dpo", on_bad_row="skip").report.as_json()["pairs"] == 1
    pair = str(write_lines(tmp_path / "b.jsonl", [{"prompt": "Q", "chosen": "A", "rejected": "B"}]))
    with pytest.raises(
        UserError,
        match=r"b\.jsonl:1: rejected: method: dpo or orpo or simpo or reward learns from pairs; to",
    ):
        prepare([{"path": pair}])
    with pytest.raises(
        UserError,
        match="chosen_column has no effect with method: sft; it is for dpo, orpo, simpo, kto",
    ):
        prepare([{"path": pair, "chosen_column": "chosen"}])


def test_a_conversation_beside_a_pair_is_learned_where_its_column_is_named(
    prepare: Prepare, tmp_path: Path
) -> None:
    row = {"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    path = str(write_lines(tmp_path / "a.jsonl", [row]))
    data = prepare([{"path": path, "messages_column": "messages"}])
    assert data.report.as_json()["sources"][0]["examples"] == 1
    for keys in ({}, {"messages_column": "rejected"}):
        with pytest.raises(UserError, match=r"a\.jsonl:1: rejected: method: dpo"):
            prepare([{"path": path, **keys}])


def test_a_pair_that_is_too_long_is_named_once_and_cannot_be_split(
    prepare: Prepare, tmp_path: Path
) -> None:
    path = str(
        write_lines(tmp_path / "a.jsonl", [pair_of(1), {**pair_of(2), "question": "Q" * 99}])
    )
    words = r"a\.jsonl:2: .*; 1 row is, the longest of \d+ tokens; raise max_length or set overlength to truncate or drop$"
    with pytest.raises(UserError, match=words):
        prepare([{"path": path}], method="dpo", overlength="error")


def test_pairs_of_another_method_are_refused_by_its_name(prepare: Prepare, tmp_path: Path) -> None:
    pair = str(
        write_lines(tmp_path / "c.jsonl", [{"prompt": "Q", "response_w": "A", "response_l": "B"}])
    )
    with pytest.raises(
        UserError,
        match=r"response_w and response_l are two answers to one prompt: method: dpo or orpo",
    ):
        prepare([{"path": pair}])


def test_inspect_shows_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_lines(tmp_path / "a.jsonl", [pair_of(i) for i in range(3)]))
    keys = ["method=dpo", f"dataset_cache_dir={tmp_path}"]
    assert main(["inspect", path, *keys, "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert (
        "example 0 (chosen), " in shown
        and "example 3 (rejected), " in shown
        and "example 4" not in shown
    )
    assert "an epoch: 3 pairs, " in shown and "3 pairs, " in shown
    assert main(["inspect", path, *keys, "--examples", "3", "--json"]) == 0
    assert [
        (row["example"], row["side"]) for row in json.loads(capsys.readouterr().out)["rows"]
    ] == [(2, "chosen"), (3, "rejected")]


def test_pairs_that_all_teach_nothing_for_several_reasons_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reason alone is fatal."""
    monkeypatch.setattr("finetune.data.prepare.BLOCK_ROWS", 4)
    path = str(write_lines(tmp_path / "a.jsonl", [pair_of(1, "no"), pair_of(2, "")]))
    for keys in (["method=dpo"], ["method=orpo", "streaming=true", "max_steps=1"]):
        assert main(["inspect", path, f"dataset_cache_dir={tmp_path}", *keys]) == EXIT_USER_ERROR
        equal, empty, last = capsys.readouterr().err.splitlines()
        assert equal.startswith("warning: sides_equal: ") and f"{path}:1" in equal
        assert empty.startswith("warning: side_empty: ") and f"{path}:2" in empty
        assert "datasets: nothing is left" in last


@pytest.mark.parametrize("part", ["context", "choices", "option_a", "Passage", "level"])
def test_a_question_that_is_asked_without_its_parts_is_found(part: str) -> None:
    """Training on answers refuses the same rows, until the recipe names the question's column."""
    row = {"question": "Who did it?", part: "Ann or Bob", "answer": "Ann"}
    source = DatasetSource(path="rows.jsonl")
    parsed = parse_prompt(row, source)
    is_part = part != "level"
    assert parsed.findings == (("question_part_unread",) if is_part else ())
    assert parsed.unused_columns == ((part,) if is_part else ())
    if is_part:
        with pytest.raises(BadRow, match="unknown format: its columns are question, "):
            parse_row(row, source)
    named = DatasetSource(path="rows.jsonl", prompt_column="question")
    whole = {"prompt": "Who did it?", part: "Ann or Bob"}
    assert not parse_prompt(row, named).findings and not parse_prompt(whole, source).findings


def test_every_side_of_real_pairs_ends_in_its_own_answer(prepare: Prepare, shared: Path) -> None:
    """LLaMA-Factory's file with the template of Llama 3: the prompt of both sides is that of inference."""
    path = shared / "data" / "dpo_en_demo.json"
    data = prepare(
        [{"path": str(path), "split": "train[:30]"}],
        method="dpo",
        max_length=100_000,
        chat_template="llama3",
    )
    rows = json.loads(path.read_text())[:30]
    assert data.report.as_json()["pairs"] == len(rows) == 30
    for number, row in enumerate(rows):
        (prompt, chosen), (same, rejected) = text_of_pair(data, number)
        assert prompt == same and prompt.endswith(
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )
        assert chosen == row["chosen"]["value"].strip() + "<|eot_id|>"
        assert rejected == row["rejected"]["value"].strip() + "<|eot_id|>"
        asked = [{"role": {"human": "user", "gpt": "assistant"}.get(t["from"], t["from"]), "content": t["value"]} for t in row["conversations"]]  # fmt: skip
        assert prompt == data.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "Q", "answer": "long #### 42", "final": 42}, 42),
        (
            {
                "messages": [
                    {"role": "user", "content": "Q"},
                    {"role": "assistant", "content": "A"},
                ],
                "final": "42",
            },
            "42",
        ),
        ({"question": "Q", "answer": "another column"}, None),
    ],
)
def test_rewards_get_the_answer_that_the_recipe_names(row: dict[str, Any], answer: Any) -> None:
    document = parse_prompt(row, DatasetSource(path="a.jsonl", completion_column="final")).document
    assert isinstance(document, Question)
    assert json.loads(document.row)["columns"].get("answer") == answer


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"solution": 4}, 4),  # was no answer, so that each score was None
        ({"answer": None, "solution": "4"}, "4"),  # as Parquet fills the column of another source
        ({"output": 0.5, "solution": "4"}, "4"),
        ({"answer": 4, "solution": "so 4"}, 4),
        ({"solution": ["4"]}, None),
    ],
)
def test_rewards_get_a_number_or_a_text_as_the_answer(columns: dict[str, Any], answer: Any) -> None:
    document = parse_prompt({"prompt": "Q", **columns}, DatasetSource(path="a.jsonl")).document
    assert isinstance(document, Question)
    assert json.loads(document.row)["columns"].get("answer") == answer


def test_a_prompt_as_text_is_found_where_a_template_would_ask_it(
    prepare: Prepare, tmp_path: Path
) -> None:
    """As a prompt with its completion is."""
    path = str(write_lines(tmp_path / "a.jsonl", [{"prompt": "Q", "completion": " A"}]))
    online: dict[str, Any] = {"method": "grpo", "rewards": ["length"], "num_generations": 2}
    online |= {"max_length": 512}
    keys: dict[str, Any]
    for keys in ({}, online):
        assert names(prepare([{"path": path}], **keys))["template_unused"] == "warning"
        assert "template_unused" not in names(prepare([{"path": path, "type": "messages"}], **keys))


@pytest.mark.parametrize("role", ["GPT", "Assistant", "ai", "chatgpt"])
def test_an_answer_is_found_in_every_spelling_of_its_role(role: str) -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": role, "value": "A"}]
    document = parse_prompt({"conversations": turns}, DatasetSource(path="a.jsonl")).document
    assert isinstance(document, Question)
    assert json.loads(document.row)["columns"]["answer"] == "A"


def test_an_environment_that_is_no_text_is_a_bad_row() -> None:
    environments: Any = {"a": None, "b": None}
    with pytest.raises(BadRow, match=r"environment: .* is none of the recipe's"):
        choose_environment(environments, {"environment": ["a"]})
