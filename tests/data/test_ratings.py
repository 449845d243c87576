"""Rated answers in every form, each with another prompt's answer that depends on the order of the source alone."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.cli import main
from finetune.config.schema import RENDERINGS, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.formats import Completion, Conversation
from finetune.data.messages import BadRow
from finetune.data.packing import StoredBatches, arrange_epoch
from finetune.data.preferences import find_mismatched, join_answer, parse_ratings
from finetune.data.prepare import PreparedData
from finetune.errors import UserError
from tests.data.conftest import Prepare
from tests.data.test_prepare import chat, names, write_lines

USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
EARLIER = [USER, {"role": "assistant", "content": "Which?"}]


def rated(row: dict[str, Any], **options: Any) -> list[tuple[Any, bool]]:
    """(the answer as [(role, trained)] or (prompt, completion), whether it is good) of each rated answer."""
    found: list[tuple[Any, bool]] = []
    for each in parse_ratings(row, DatasetSource(path="rows.jsonl", **options)).groups:
        document, is_good = each.documents[0], each.rating > 0
        if isinstance(document, Completion):
            found.append(((document.prompt, document.completion), is_good))
        else:
            turns = zip(document.messages, document.trained, strict=True)
            found.append(([(message["content"], on) for message, on in turns], is_good))
    return found


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [USER, ANSWER], "label": True}, {}),
        ({"messages": [USER, ANSWER], "kto_tag": "True"}, {}),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "kto_tag": True}, {}),
        ({"instruction": "Q", "input": "", "output": "A", "label": 1.0}, {}),
        ({"prompt": [USER], "completion": [ANSWER], "label": True}, {}),
        ({"q": "Q", "a": "A", "good": True}, {"type": "messages", "prompt_column": "q", "completion_column": "a", "label_column": "good"}),
    ],
)  # fmt: skip
def test_every_form_is_an_answer_with_its_rating(
    row: dict[str, Any], options: dict[str, Any]
) -> None:
    assert rated(row, **options) == [([("Q", False), ("A", True)], True)]


def test_the_last_answer_is_rated_and_pairs_are_two() -> None:
    conversation = [("Q", False), ("Which?", False), ("Q", False), ("A", True)]
    assert rated({"messages": [*EARLIER, USER, ANSWER], "label": False}) == [(conversation, False)]
    assert rated({"prompt": "Q", "completion": " A", "label": False}) == [(("Q", " A"), False)]
    two = [(("Q", " A"), True), (("Q", " B"), False)]
    assert rated({"prompt": "Q", "chosen": " A", "rejected": " B"}) == two
    assert rated({"prompt": "Q", "response_w": " A", "response_l": " B", "label": True}) == two
    row = {"prompt": "Q", "completion": "A", "label": True, "id": 7}
    assert parse_ratings(row, DatasetSource(path="rows.jsonl")).unused_columns == ("id",)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [USER, ANSWER]},
            "label or kto_tag: no rating of the answer; its columns are messages",
        ),
        ({"messages": [USER, ANSWER], "label": 3}, "label: true or false is expected, found 3"),
        ({"text": "Once", "label": True}, "plain text is no answer that could be rated"),
        ({"prompt": "Q", "chosen": "A"}, "rows with a chosen and a rejected answer are read too"),
    ],
)
def test_what_is_not_rated_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRow) as problem:
        parse_ratings(row, DatasetSource(path="rows.jsonl"))
    assert words in str(problem.value)


def test_an_answer_that_is_not_trained_on_is_no_mismatched_answer(
    prepare: Prepare, tmp_path: Path
) -> None:
    """`train: false` leaves nothing of it: to put that behind another prompt ended in an error of Python's."""
    rows = [chat(f"Q{i}", f"A{i}") | {"label": True} for i in range(4)]
    rows[2]["messages"][-1]["train"] = False
    data = prepare([{"path": str(write_lines(tmp_path / "a.jsonl", rows))}], method="kto")
    assert [answer for _, answer in texts(data)] == [f"A{i}<|end|>" for i in (0, 1, 1, 3, 3, 0)]
    assert names(data)["nothing_trained"] == "warning"


def test_a_mismatched_answer_is_the_next_to_another_prompt() -> None:
    a, b, c, d = (
        Completion(prompt, answer)
        for prompt, answer in (("P", "1"), ("P", "2"), ("R", "3"), ("S", "4"))
    )
    assert find_mismatched([a, b, c, d], []) == [c, c, d, a]
    assert find_mismatched([a, b], []) == [None, None] and find_mismatched([a, b], [c]) == [c, c]
    assert find_mismatched([a], [b]) == [None] and find_mismatched([a], [b, d]) == [d]
    turns = Conversation(
        ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}), (False, True)
    )
    assert join_answer(a, turns) == Completion("P", "A")
    joined = join_answer(turns, a)
    assert isinstance(joined, Conversation) and joined.messages[1] == {
        "role": "assistant",
        "content": "1",
    }
    assert joined.trained == (False, True)


def texts(data: PreparedData) -> list[tuple[str, str]]:
    """(prompt, answer) of each document."""
    found = []
    examples = data.train.examples  # type: ignore[attr-defined]
    for example_id in range(len(examples)):
        example = examples[example_id]
        labels = np.flatnonzero(example.labels != IGNORE_INDEX)
        prompt, answer = (
            example.input_ids[: labels[0] + 1].tolist(),
            example.labels[labels].tolist(),
        )
        found.append((data.tokenizer.decode(prompt), data.tokenizer.decode(answer)))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_rated_answers_from_a_file_to_batches(
    prepare: Prepare, tmp_path: Path, packing: bool
) -> None:
    rows = [chat(f"Q{i}", f"A{i}") | {"label": i % 3 > 0} for i in range(7)]
    path = str(write_lines(tmp_path / "a.jsonl", [*rows, rows[1], {**rows[1], "label": False}]))
    data = prepare([{"path": path}], method="kto", packing=packing)
    found = texts(data)
    for i in range(7):
        assert found[2 * i] == (f"<|begin|><|user|>Q{i}<|end|><|assistant|>", f"A{i}<|end|>")
        assert found[2 * i + 1] == (found[2 * i][0], f"A{i + 1 if i < 6 else 1}<|end|>")
    report = data.report.as_json()
    assert (report["pairs"], report["desirable"], report["undesirable"], report["examples"]) == (
        0,
        5,
        4,
        18,
    )
    assert data.report.lines()[0].startswith("9 rated answers (5 good, 4 bad), ")
    (duplicate,) = [finding for finding in data.report.findings if finding.name == "duplicates"]
    assert duplicate.rows == 1  # the same answer rated otherwise is another
    assert isinstance(data.train, StoredBatches)
    trained_in_epoch = 0  # without the mismatched answers, which have no gradient
    for step in islice(data.train.batches(), data.train.steps_per_epoch):
        labels = [m.labels for m in step.micro_batches]
        trained = int(sum((each != IGNORE_INDEX).sum() for each in labels))
        assert step.trained_tokens == step.chosen_tokens == trained
        trained_in_epoch += trained
    assert report["trained_tokens"] == report["sources"][0]["trained_tokens"] == trained_in_epoch
    for step in data.train.batches():
        for m in step.micro_batches:
            assert m.desirable is not None and m.desirable.dtype == torch.bool
            expected = [i // 2 % 3 > 0 if i < 14 else i == 14 for i in m.example_ids]
            assert m.mismatched is not None and m.mismatched.example_ids == tuple(
                i + 1 for i in m.example_ids
            )
            assert m.desirable.tolist() == expected
            assert "desirable" not in m.inputs
    if not packing:
        rank = prepare(
            [{"path": path}], method="kto", packing=False, global_batch_size=1, rank=1, size=2
        )
        filler = next(rank.train.batches()).micro_batches[0]
        assert filler.desirable is not None and filler.desirable.shape == (0,)


def test_a_pair_of_equal_answers_is_not_rated_as_good_and_as_bad(
    prepare: Prepare, tmp_path: Path
) -> None:
    """DPO does not use such a pair either."""
    pairs = [{"question": f"Q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(4)]
    pairs[1]["rejected"] = pairs[1]["chosen"]
    path = write_lines(tmp_path / "a.jsonl", pairs)
    of_kto, of_dpo = (prepare([{"path": str(path)}], method=method) for method in ("kto", "dpo"))
    for data in (of_kto, of_dpo):
        (equal,) = [finding for finding in data.report.findings if finding.name == "sides_equal"]
        assert (equal.severity, equal.where) == ("warning", (f"{path}:2",))
    answers = [answer.removesuffix("<|end|>") for _, answer in texts(of_kto)[::2]]
    assert answers == [text for i in (0, 2, 3) for text in (f"good {i}", f"bad {i}")]


def test_mismatched_answers_reach_over_batches_of_rows_and_pairs_are_taken_apart(
    prepare: Prepare, tmp_path: Path
) -> None:
    rows = [chat(f"Q{i}", f"A{i}") | {"label": True} for i in range(501)]  # 500 are read together
    data = prepare([{"path": str(write_lines(tmp_path / "a.jsonl", rows))}], method="kto")
    found = texts(data)
    assert found[2 * 499 + 1][1] == "A0<|end|>" and found[2 * 500 + 1][1] == "A499<|end|>"
    pairs = [{"question": f"Q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(4)]
    data = prepare(
        [{"path": str(write_lines(tmp_path / "b.jsonl", pairs))}], method="kto", eval_split_size=2
    )
    assert data.report.as_json()["held_out_groups"] == {
        "pairs": 0,
        "desirable": 2,
        "undesirable": 2,
    }
    assert sorted(answer.partition(" ")[0] for _, answer in texts(data)[::2]) == [
        "bad",
        "bad",
        "good",
        "good",
    ]
    for (prompt, _), (same, other) in zip(texts(data)[::2], texts(data)[1::2], strict=True):
        assert prompt == same and prompt[len("<|begin|><|user|>Q")] != other.split()[1][0]
    long = [row | {"rejected": "bad " * 20, "chosen": "good " * 20} for row in pairs]
    cut = prepare([{"path": str(write_lines(tmp_path / "d.jsonl", long))}], method="kto")
    (finding,) = [found for found in cut.report.findings if found.name == "truncated"]
    assert (finding.rows, finding.of, len(finding.where)) == (4, 4, 3), (
        "rows, not the four documents of each"
    )
    alone = str(write_lines(tmp_path / "c.jsonl", pairs[:1]))
    with pytest.raises(
        UserError, match=r"c\.jsonl:1: no answer to another prompt among the rows around it"
    ):
        prepare([{"path": alone}], method="kto")
    with pytest.raises(
        UserError, match="label_column has no effect with method: dpo; it is for kto"
    ):
        prepare([{"path": alone, "label_column": "x"}], method="dpo")


def test_the_first_answers_wait_for_one_to_another_prompt(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later file, and where a block of a stream begins with the last rows of a file."""
    for i, question in enumerate(("P", "P", "R", "R")):
        row = chat(question, f"A{i}") | {"label": True}
        write_lines(tmp_path / f"part-{i}.jsonl", [row])
    found = texts(prepare([{"path": str(tmp_path / "part-*.jsonl")}], method="kto"))
    assert [answer.removesuffix("<|end|>") for _, answer in found[1::2]] == ["A2", "A2", "A1", "A1"]
    monkeypatch.setattr("finetune.data.prepare.BLOCK_ROWS", 8)
    monkeypatch.setattr("finetune.data.sources.TURN_ROWS", 8)
    rows = [chat(f"Q{i}", f"A{i}") | {"label": True} for i in range(9)]
    source = {"path": str(write_lines(tmp_path / "nine.jsonl", rows))}
    adapters = {"use_peft": True, "model_config": None, "model_name_or_path": "some/model"}
    keys = adapters | {"streaming": True, "max_steps": 4, "global_batch_size": 8}
    steps = list(prepare([source], method="kto", packing=False, **keys).train.batches())
    assert [step.groups for step in steps] == [8, 8, 1, 8]  # the second block has 1 + 8 rows


def test_a_rated_answer_is_as_long_as_itself_not_as_its_mismatched_one(
    prepare: Prepare, tmp_path: Path
) -> None:
    rows = [chat(f"Q{i}", "long " * 20 * (i % 2) + "A") | {"label": True} for i in range(4)]
    sources = [{"path": str(write_lines(tmp_path / "a.jsonl", rows))}]
    dropped = prepare(sources, method="kto", overlength="drop")
    assert [len(answer) for _, answer in texts(dropped)[::2]] == [len("A<|end|>")] * 2
    (finding,) = [found for found in dropped.report.findings if found.name == "dropped"]
    assert finding.rows == 2
    cut = prepare(sources, method="kto", overlength="truncate")
    (finding,) = [found for found in cut.report.findings if found.name == "truncated"]
    assert finding.rows == 2
    with pytest.raises(UserError, match=r"a\.jsonl:2: more than max_length = .* 2 rows are"):
        prepare(sources, method="kto", overlength="error")


def test_neither_rated_nor_mismatched_answers_overfill_a_packed_row(
    prepare: Prepare, tmp_path: Path
) -> None:
    """They have other lengths, and a forward each."""
    rows = [chat(f"Q{i}", "long " * 3 * (i % 2) + "A") | {"label": True} for i in range(40)]
    sources = [{"path": str(write_lines(tmp_path / "a.jsonl", rows))}]
    data = prepare(sources, method="kto", packing=True, max_length=128)
    assert isinstance(data.train, StoredBatches)
    micro_batches = [
        micro_batch
        for step in islice(data.train.batches(), data.train.steps_per_epoch)
        for micro_batch in step.micro_batches
    ]
    assert max(each.input_ids.numel() for each in micro_batches) <= 128
    mismatched = [each.mismatched for each in micro_batches if each.mismatched is not None]
    assert max(each.input_ids.numel() for each in mismatched) <= 128
    assert sum(len(each.example_ids) for each in micro_batches) == 40
    assert len(micro_batches) < 20


def test_unpacked_rows_of_similar_length_share_a_step_with_their_mismatched_answers(
    prepare: Prepare, tmp_path: Path
) -> None:
    """Both are padded, so the length of both counts."""
    rows = [chat(f"Q{i}", "long " * (i % 7) + "A") | {"label": True} for i in range(40)]
    sources = [{"path": str(write_lines(tmp_path / "a.jsonl", rows))}]
    train = prepare(sources, method="kto", packing=False, max_length=128).train
    assert isinstance(train, StoredBatches)
    arranged = arrange_epoch(train.examples.lengths, train.config, 2, epoch=0)
    assert train.epoch_rows(0).ids.tolist() == arranged.ids.tolist()


def test_prompts_come_from_good_answers_and_a_stream_has_ratings(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(f"Q{i}", f"A{i}") | {"label": i % 2 == 0} for i in range(10)]
    path = str(write_lines(tmp_path / "a.jsonl", rows))
    other = str(
        write_lines(
            tmp_path / "b.jsonl", [chat(f"R{i}", f"B{i}") | {"label": i > 1} for i in range(4)]
        )
    )
    data = prepare([{"path": path}], method="kto", eval_datasets=[{"path": other}])
    assert [prompt.answer for prompt in data.held_out_prompts(9)] == ["B2", "B3"] and names(
        data
    ) == {}
    monkeypatch.setattr("finetune.data.prepare.BLOCK_ROWS", 64)
    # Without adapters alone, all data is gone through before training, and a stream is refused.
    adapters = {"use_peft": True, "model_config": None, "model_name_or_path": "some/model"}
    keys = adapters | {"streaming": True, "max_steps": 2, "global_batch_size": 2}
    stream = prepare([{"path": path}], method="kto", **keys)
    assert all(
        m.desirable is not None for step in stream.train.batches() for m in step.micro_batches
    )


def test_answers_that_are_all_rated_alike_are_a_finding(prepare: Prepare, tmp_path: Path) -> None:
    good, bad = (
        str(
            write_lines(
                tmp_path / f"{name}.jsonl",
                [chat(f"{name} {i}", f"A{i}") | {"label": name == "good"} for i in range(4)],
            )
        )
        for name in ("good", "bad")
    )
    for path in (good, bad):
        (finding,) = prepare([{"path": path}], method="kto").report.findings
        assert str(finding).startswith(
            "warning: same_ratings: in 4 of 4 rows the answer has the same rating as all others; a method"
        )
    assert names(prepare([{"path": good}, {"path": bad}], method="kto")) == {}


def test_the_format_says_whether_the_chat_template_renders_the_rows(
    prepare: Prepare, tmp_path: Path
) -> None:
    answers = ("chosen", [ANSWER]), ("rejected", [{"role": "assistant", "content": "B"}])
    of_chat = [
        {"prompt": [{"role": "user", "content": f"Q{i}"}], **dict(answers)} for i in range(2)
    ]
    of_text = [{"prompt": f"Q{i}", "chosen": " A", "rejected": " B"} for i in range(2)]
    rated_chat = [
        {"prompt": row["prompt"], "completion": [ANSWER], "label": True} for row in of_chat
    ]
    for number, (rows, method, name) in enumerate(
        (
            (of_chat, "dpo", "preference"),
            (of_text, "dpo", "preference_text"),
            (of_text, "kto", "preference_text"),
            (rated_chat, "kto", "prompt_completion_messages"),
        )
    ):
        path = str(write_lines(tmp_path / f"{number}.jsonl", rows))
        data = prepare([{"path": path}], method=method)
        assert data.report.formats == {name}
        is_rendered = "<|assistant|>" in data.tokenizer.decode(data.train.examples[0].input_ids)  # type: ignore[attr-defined]
        assert RENDERINGS[name].is_chat == is_rendered


def test_inspect_names_the_rating(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [chat(f"Q{i}", f"A{i}") | {"label": i > 0} for i in range(3)]
    path = str(write_lines(tmp_path / "a.jsonl", rows))
    assert (
        main(["inspect", path, "method=kto", f"dataset_cache_dir={tmp_path}", "--rows", "2"]) == 0
    )
    shown = capsys.readouterr().out
    for head in (
        "example 0 (bad)",
        "example 1 (mismatched)",
        "example 2 (good)",
        "3 rated answers (2 good, 1 bad)",
    ):
        assert head in shown


def test_an_empty_answer_is_found_whether_or_not_a_template_renders_it(
    prepare: Prepare, tmp_path: Path
) -> None:
    """As plain text it was trained on without a word, and `method: dpo` does not use the pair."""
    for i, (prompt, found_by) in enumerate(
        [("question", "kto"), ("prompt", "kto"), ("question", "dpo"), ("prompt", "dpo")]
    ):
        rows = [{prompt: f"Q{n}", "chosen": " A", "rejected": " B"} for n in range(4)]
        rows[1]["rejected"] = ""
        rows[2]["chosen"] = " \n"
        path = str(write_lines(tmp_path / f"{i}.jsonl", rows))
        data = prepare([{"path": path}], method=found_by)
        found = {finding.name: finding.rows for finding in data.report.findings}
        expected = "empty_answer" if found_by == "kto" else "side_empty"
        assert {name: found[name] for name in found if "empty" in name} == {expected: 2}
    rows = [{"prompt": "Q", "completion": answer} for answer in (" A", " B", " \n")]
    data = prepare([{"path": str(write_lines(tmp_path / "sft.jsonl", rows))}])
    assert names(data)["empty_answer"] == "warning"
