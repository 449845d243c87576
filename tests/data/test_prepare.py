"""From a recipe to batches: what is read, mixed, held out and found."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.config.reader import read_recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.readers import NumberedRow
from finetune.data.sources import read_file
from finetune.data.tokenizer import PLAIN, load_tokenizer
from finetune.errors import UserError
from tests.conftest import make_tokenizer, slow_but
from tests.data.conftest import Prepare
from tests.data.world import Rank

ASKED = {"prompt_column": "question", "completion_column": "answer"}
REAL: dict[str, dict[str, str]] = {
    "alpaca_en_demo.json": {},
    "dpo_en_demo.json": {"completion_column": "chosen"},
    "c4_demo.jsonl": {},
    "gsm8k_test.jsonl": ASKED,
}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def names(prepared: PreparedData) -> dict[str, str]:
    return {finding.name: finding.severity for finding in prepared.report.findings}


def text_of(prepared: PreparedData, example_id: int) -> str:
    text: str = prepared.tokenizer.decode(prepared.train.examples[example_id].input_ids)
    return text


def answer_of(prepared: PreparedData, example_id: int) -> str:
    labels = prepared.train.examples[example_id].labels
    text: str = prepared.tokenizer.decode(labels[labels != IGNORE_INDEX])
    return text


# Two files, each with one of two tokenizers; all files with both nightly.
TOKENIZERS = ("models/stories260k", "tokenizers/llama3")
QUICK = [("alpaca_en_demo.json", TOKENIZERS[0]), ("gsm8k_test.jsonl", TOKENIZERS[1])]


@pytest.mark.parametrize(
    ("file", "tokenizer"), slow_but(QUICK, itertools.product(REAL, TOKENIZERS))
)
def test_real_files_need_only_their_path(
    prepare: Prepare, shared: Path, file: str, tokenizer: str
) -> None:
    prepared = prepare(
        [{"path": str(shared / "data" / file), **REAL[file]}],
        tokenizer_name_or_path=str(shared / tokenizer),
        max_length=512,
        eval_split_size=8,
    )
    report = prepared.report
    (source,) = report.sources
    raw = (shared / "data" / file).read_text()
    assert source.rows_read == len(json.loads(raw) if file.endswith(".json") else raw.splitlines())
    assert source.rows_skipped == 0
    assert report.examples + report.held_out_examples == source.examples
    if file.startswith("c4"):  # plain text is split
        assert source.tokens_lost == 0 and source.examples > source.documents
    else:
        untrained = sum(f.rows for f in source.findings if f.name == "truncated_untrained")
        assert source.examples + untrained == source.documents
    assert not [finding for finding in report.findings if finding.severity == "fatal"]
    batch = next(prepared.train.batches())
    assert batch.trained_tokens > 0
    # Whatever the file holds, one BOS begins the text, and its end is trained where it was not cut off.
    bos, special = prepared.tokenizer.bos_token_id, set(prepared.tokenizer.all_special_ids)
    for example_id in range(0, report.examples, 40):
        example = prepared.train.examples[example_id]
        assert (example.input_ids == bos).sum() <= 1
        if len(example.input_ids) < 512:
            assert int(example.labels[example.labels != IGNORE_INDEX][-1]) in special
    assert len(prepared.held_out_prompts(4)) == (0 if file.startswith("c4") else 4)


def test_held_out_prompts_end_where_the_answer_begins(prepare: Prepare, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", (chat(f"What is {i}?", f"It is {i}.") for i in range(20))
    )
    prepared = prepare([{"path": str(path)}], eval_split_size=0.25)
    assert (prepared.report.examples, prepared.report.held_out_examples) == (15, 5)
    for prompt in prepared.held_out_prompts(10):
        number = prompt.answer.removeprefix("It is ").removesuffix(".")
        asked = [{"role": "user", "content": f"What is {number}?"}]
        assert prompt.prompt_ids == prepared.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=False
        )
    assert len(prepared.held_out_prompts(10)) == 5


def test_prompt_and_completion_are_joined_as_they_stand(prepare: Prepare, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": " 4"}])
    prepared = prepare([{"path": str(path)}])
    assert (text_of(prepared, 0), answer_of(prepared, 0)) == ("2+2= 4<|end|>", " 4<|end|>")
    assert names(prepared) == {"template_unused": "warning"}
    templated = prepare(
        [
            {
                "path": str(path),
                "type": "messages",
                "prompt_column": "prompt",
                "completion_column": "completion",
            }
        ]
    )
    assert text_of(templated, 0) == "<|begin|><|user|>2+2=<|end|><|assistant|> 4<|end|>"


@pytest.mark.parametrize(
    "row",
    [{"prompt": "2+2=", "completion": " 4<|end|>"}, {"text": "2+2= 4<|end|>"}],
    ids=["completion", "text"],
)
def test_an_end_of_text_that_the_row_has_is_not_doubled(
    row: dict[str, str], prepare: Prepare, tmp_path: Path
) -> None:
    """As TRL does: many write the EOS token behind each text themselves."""
    prepared = prepare([{"path": str(write_lines(tmp_path / "a.jsonl", [row]))}])
    assert text_of(prepared, 0) == "2+2= 4<|end|>"
    assert "typed_special_token" not in names(prepared)


def test_a_tokenizer_without_a_template_gets_the_plain_one_and_keeps_it(
    prepare: Prepare, tmp_path: Path
) -> None:
    bare = make_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    path = write_lines(tmp_path / "a.jsonl", [chat("Q", "A")])
    prepared = prepare([{"path": str(path)}], tokenizer_name_or_path=str(tmp_path / "bare"))
    assert text_of(prepared, 0) == "user:\nQ\n\nassistant:\nA<|end|>"
    assert names(prepared) == {"plain_template": "notice"}
    assert prepared.tokenizer.chat_template == PLAIN
    plain_text = prepare(
        [{"path": str(write_lines(tmp_path / "b.jsonl", [{"text": "Once"}]))}],
        tokenizer_name_or_path=str(tmp_path / "bare"),
    )
    assert plain_text.tokenizer.chat_template is None


def test_chat_template_of_the_recipe_by_name_file_and_text(
    prepare: Prepare, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat("Q", "A")])
    (tmp_path / "mine.jinja").write_text(
        "{%- for m in messages -%}[{{ m.content }}]{{ eos_token }}{%- endfor -%}"
    )
    assert (
        text_of(prepare([{"path": str(path)}], chat_template=str(tmp_path / "mine.jinja")), 0)
        == "[Q]<|end|>[A]<|end|>"
    )
    inline = "{%- for m in messages -%}({{ m.content }}){{ eos_token }}{%- endfor -%}"
    assert (
        text_of(prepare([{"path": str(path)}], chat_template=inline), 0) == "(Q)<|end|>(A)<|end|>"
    )
    named = prepare([{"path": str(path)}], chat_template="chatml")
    assert (
        text_of(named, 0) == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )
    assert names(named)["end_of_turn_is_text"] == "warning"
    with pytest.raises(
        UserError,
        match="chat_template: nosuch: not a file, not Jinja text, and not one of the named templates, which are alpaca",
    ):
        prepare([{"path": str(path)}], chat_template="nosuch")


LONG = [chat("Q", "word " * 30), chat("Q", "A"), {"messages": [{"role": "user", "content": "Q" * 80}, {"role": "assistant", "content": "A"}]}]  # fmt: skip


@pytest.mark.parametrize(
    ("overlength", "lengths", "found"),
    [
        ("truncate", [64, 7], {"truncated": "warning", "truncated_untrained": "warning"}),
        ("drop", [7], {"dropped": "warning"}),
        ("split", [64, 64, 28, 7, 22], {"split": "notice"}),
    ],
)
def test_overlength_is_dealt_with_as_asked_and_reported(
    prepare: Prepare, tmp_path: Path, overlength: str, lengths: list[int], found: dict[str, str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", LONG)
    prepared = prepare([{"path": str(path)}], overlength=overlength)
    assert prepared.train.examples.lengths.tolist() == lengths
    assert names(prepared) == found
    source = prepared.report.sources[0]
    assert source.overlong == 2
    kept = int(prepared.train.examples.trained.sum())
    assert kept == source.trained_tokens - source.trained_tokens_lost
    if overlength == "split":
        assert source.trained_tokens_lost == 0


def test_plain_text_is_split_unless_the_recipe_says_otherwise(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_lines(tmp_path / "text.jsonl", [{"text": "word " * 200}, {"text": "end"}])
    mixed = write_lines(tmp_path / "mixed.jsonl", [{"text": "word " * 200}, chat("Q", "A")])
    split = prepare([{"path": str(text)}])
    assert split.report.sources[0].tokens_lost == 0 and names(split) == {"split": "notice"}
    assert split.train.examples.lengths.tolist() == [*[64] * 15, 41, 4]
    assert not any("lost" in line for line in split.report.lines())
    cut = prepare([{"path": str(text)}], overlength="truncate")
    assert cut.train.examples.lengths.tolist() == [64, 4]
    assert any(
        "93.2% of the tokens are lost to max_length: 937 of 1,005, " in line
        for line in cut.report.lines()
    )
    # Sources each by their own rows; one that holds conversations too is cut as they are.
    both = prepare([{"path": str(text)}, {"path": str(mixed)}])
    assert [source.tokens_lost > 0 for source in both.report.sources] == [False, True]
    monkeypatch.setattr("finetune.data.prepare.BLOCK_ROWS", 64)
    stream = prepare([{"path": str(text)}], streaming=True, max_steps=1)
    assert (
        len(next(stream.train.batches()).micro_batches)
        and stream.train.open_block(0)[2].tokens_lost == 0
    )


def test_overlength_may_be_an_error_that_names_the_row(prepare: Prepare, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", LONG)
    with pytest.raises(
        UserError,
        match=r"a\.jsonl:1: more than max_length = 64 tokens .*2 rows are, the longest of 156",
    ):
        prepare([{"path": str(path)}], overlength="error")


def test_sources_are_mixed_by_weight_the_same_way_every_time(
    prepare: Prepare, tmp_path: Path
) -> None:
    a = write_lines(tmp_path / "a.jsonl", (chat(f"a{i}", "A") for i in range(40)))
    b = write_lines(tmp_path / "b.jsonl", (chat(f"b{i}", "B") for i in range(40)))
    sources = [{"path": str(a), "weight": 2.5}, {"path": str(b), "weight": 0.25}]
    prepared = prepare(sources)
    texts = [text_of(prepared, i) for i in range(prepared.report.examples)]
    assert sum("<|user|>a" in text for text in texts) == 100
    assert sum("<|user|>b" in text for text in texts) == 10
    counts = np.unique([text for text in texts if "<|user|>a" in text], return_counts=True)[1]
    assert sorted(counts.tolist()) == [2] * 20 + [3] * 20
    again, otherwise = prepare(sources), prepare(sources, seed=1)
    assert texts == [text_of(again, i) for i in range(prepared.report.examples)]
    assert texts != [text_of(otherwise, i) for i in range(prepared.report.examples)]
    rare = prepare([{"path": str(a), "weight": 0.01}, {"path": str(b)}])
    assert (
        sum("<|user|>a" in text_of(rare, i) for i in range(rare.report.examples)) == 1
    )  # none would be left out
    first_rows = [i for row in prepared.train.rows_of(0) for i in row]
    assert {texts[i][len("<|begin|><|user|>")] for i in first_rows} == {"a", "b"} or len(
        first_rows
    ) < 4


def test_no_row_behind_a_slice_is_parsed(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def note_rows(path: str) -> Iterator[NumberedRow]:
        for number, row in read_file(path):
            parsed.append(number)
            yield number, row

    monkeypatch.setattr("finetune.data.sources.read_file", note_rows)
    path = write_lines(tmp_path / "a.jsonl", [chat(f"Q{i}", "A") for i in range(20)])
    prepared = prepare([{"path": str(path), "split": "train[2:4]+train[6:8]"}])
    assert prepared.report.examples == 4 and max(parsed) == 8


def test_files_globs_folders_splits_and_slices(prepare: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "more").mkdir(parents=True)
    write_lines(folder / "train-1.jsonl", (chat(f"x{i}", "A") for i in range(10)))
    write_lines(folder / "train-2.jsonl", (chat(f"y{i}", "A") for i in range(10)))
    write_lines(folder / "test.jsonl", (chat(f"z{i}", "A") for i in range(4)))
    (folder / "README.md").write_text("not data")

    def rows(path: Path | str, split: str = "train") -> list[str]:
        prepared = prepare([{"path": str(path), "split": split}])
        places = [prepared.train.examples.where(i) for i in range(prepared.report.examples)]
        return [
            f"{Path(place.partition(':')[0]).stem}:{place.partition(':')[2]}" for place in places
        ]

    first, second = [f"train-1:{i}" for i in range(1, 11)], [f"train-2:{i}" for i in range(1, 11)]
    assert rows(folder) == first + second
    assert rows(folder, "test") == [f"test:{i}" for i in range(1, 5)]
    assert rows(folder, "train[5:12]") == first[5:] + second[:2]
    assert rows(folder, "train[:10%]+test[-1:]") == [*first[:2], "test:4"]
    assert rows(folder / "train-*.jsonl") == first + second
    assert rows(folder / "test.jsonl", "train[50%:]") == ["test:3", "test:4"]
    with pytest.raises(UserError, match="split validation: no such split, only train, test"):
        rows(folder, "validation")
    with pytest.raises(UserError, match="no data in this folder"):
        rows(folder / "more")
    (folder / "more" / "part-1.jsonl.zst").write_bytes(b"packed")
    write_lines(folder / "more" / "part-0.jsonl", [chat("x", "A")])
    with pytest.raises(UserError, match=r"part-1\.jsonl\.zst: unknown kind of file"):
        rows(folder / "more")
    with pytest.raises(
        UserError,
        match=r"nobody/nothing: no such file or folder, and not loaded as a hub data set: ",
    ):
        rows("nobody/nothing")


def test_bad_rows_stop_the_run_or_are_skipped_and_counted(prepare: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(chat("Q", "A"))
    path.write_text(
        f'{good}\nnope\n{{"messages": []}}\n{{"text": "\\ud800"}}\n{good.replace("Q", "R")}\n'
    )
    with pytest.raises(UserError) as error:
        prepare([{"path": str(path)}])
    lines = str(error.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"{path}:{number}" for number in (2, 3, 4)
    ]
    assert "not JSON" in lines[0] and "empty" in lines[1] and "not valid Unicode" in lines[2]
    assert lines[2].endswith("(on_bad_row: skip counts such rows and continues)")
    prepared = prepare([{"path": str(path)}], on_bad_row="skip")
    source = prepared.report.sources[0]
    assert (source.rows_read, source.rows_skipped, source.examples) == (5, 3, 2)
    assert source.formats == ("messages",)
    assert [problem.partition(": ")[0] for problem in source.skipped] == [
        f"{path}:{number}" for number in (2, 3, 4)
    ]
    assert names(prepared)["skipped"] == "warning"
    path.write_text(
        "".join(json.dumps(chat(question, "A")) + "\n" for question in ("Q", "no", "R", "no"))
    )
    refusing = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}{{ m.content + eos_token }}{% endfor %}"
    source = prepare(
        [{"path": str(path)}], on_bad_row="skip", chat_template=refusing
    ).report.sources[0]
    assert (source.rows_skipped, source.examples) == (2, 2)
    assert source.skipped == tuple(
        f"{path}:{line}: the chat template rejects it: not this" for line in (2, 4)
    )
    path.write_text("nope\n")
    with pytest.raises(
        UserError, match=r"every row was skipped; the first: .*a\.jsonl:1: not JSON"
    ):
        prepare([{"path": str(path)}], on_bad_row="skip")
    path.write_text("")
    with pytest.raises(UserError, match="it has no rows"):
        prepare([{"path": str(path)}])


def test_rows_labeled_false_stop_the_run_or_are_skipped_and_counted(
    prepare: Prepare, tmp_path: Path
) -> None:
    rows = [
        chat(f"Q{i}", "good" if i % 2 else "bad") | {"label": bool(i % 2), "source": "kto"}
        for i in range(6)
    ]
    path = write_lines(tmp_path / "kto.jsonl", rows)
    with pytest.raises(
        UserError,
        match=r"kto\.jsonl:1: label: false marks a bad answer, which would be trained on like",
    ):
        prepare([{"path": str(path)}])
    prepared = prepare([{"path": str(path)}], on_bad_row="skip")
    (source,) = prepared.report.sources
    assert (source.rows_read, source.rows_skipped, source.unused_columns) == (6, 3, {"source": 3})
    assert {answer_of(prepared, i) for i in range(3)} == {"good<|end|>"}


def test_a_lost_tool_call_stops_the_training_in_any_row(prepare: Prepare, tmp_path: Path) -> None:
    call = {"from": "function_call", "value": '{"name": "now", "arguments": {}}'}
    asked = {"conversations": [{"from": "human", "value": "What time is it?"}, call], "tools": "[]"}
    path = write_lines(tmp_path / "a.jsonl", [*(chat(f"Q{i}", "A") for i in range(40)), asked])
    with pytest.raises(
        UserError,
        match="fatal: tool_calls_dropped: in 1 of 41 rows the chat template drops tool calls",
    ):
        prepare([{"path": str(path)}])
    assert names(prepare([{"path": str(path)}], chat_template="chatml", max_length=1024)) == {
        "end_of_turn_is_text": "warning",
        "calls_without_tools": "warning",
    }


def test_fatal_findings_stop_the_training_in_their_own_words(
    prepare: Prepare, tmp_path: Path
) -> None:
    silent = [{**chat("Q", "A")["messages"][i], "train": False} for i in range(2)]
    masked = write_lines(tmp_path / "masked.jsonl", [{"messages": silent}] * 3)
    with pytest.raises(
        UserError, match="fatal: nothing_trained: in 3 of 3 rows no token is trained on"
    ):
        prepare([{"path": str(masked)}])
    asked = write_lines(tmp_path / "asked.jsonl", [chat("Q", "A"), chat("R", "B")])
    endless = "{%- for m in messages -%}{{- m.role + ': ' + m.content + ' ' -}}{%- endfor -%}"
    with pytest.raises(
        UserError, match="fatal: no_end_of_turn: in 2 of 2 rows no end-of-turn token is trained"
    ):
        prepare([{"path": str(asked)}], chat_template=endless)
    silent_role = "{%- for m in messages -%}{{- m.role + (m.content if m.role == 'user' else '') + eos_token -}}{%- endfor -%}"
    with pytest.raises(
        UserError,
        match="fatal: assistant_dropped: in 2 of 2 rows the chat template drops the assist",
    ):
        prepare([{"path": str(asked)}], chat_template=silent_role)
    deaf = silent_role.replace("'user'", "'assistant'")
    with pytest.raises(
        UserError,
        match="fatal: user_dropped: in 2 of 2 rows the chat template drops a user's message",
    ):
        prepare([{"path": str(asked)}], chat_template=deaf)
    doubled = "{{ bos_token }}{{ bos_token }}{%- for m in messages -%}{{- m.content + eos_token -}}{%- endfor -%}"
    with pytest.raises(UserError, match="fatal: doubled_bos: in 2 of 2 rows"):
        prepare([{"path": str(asked)}], chat_template=doubled)


def test_findings_that_do_not_stop_it(prepare: Prepare, tmp_path: Path) -> None:
    rows = [chat("Q <|end|>", "A"), chat("Q", "A"), chat("Q", "A"), chat("R", "B"), chat("S", "C")]
    rows[3]["messages"].reverse()
    prepared = prepare([{"path": str(write_lines(tmp_path / "a.jsonl", rows))}])
    assert names(prepared) == {
        "typed_special_token": "warning",
        "duplicates": "notice",
        "begins_with_assistant": "notice",
    }
    (duplicate,) = [finding for finding in prepared.report.findings if finding.name == "duplicates"]
    assert duplicate.where == (f"{tmp_path / 'a.jsonl'}:3",)
    same = prepare(
        [
            {
                "path": str(
                    write_lines(tmp_path / "same.jsonl", [chat("Q", "A")] * 199 + [chat("R", "B")])
                )
            }
        ]
    )
    assert names(same) == {"duplicates": "warning"}
    leaked = prepare(
        [{"path": str(tmp_path / "a.jsonl")}],
        eval_datasets=[
            {"path": str(write_lines(tmp_path / "b.jsonl", [chat("S", "C"), chat("T", "D")]))}
        ],
    )
    assert names(leaked)["held_out_in_training"] == "warning"


def test_data_that_is_too_little_says_so(prepare: Prepare, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "a.jsonl", [chat("Q", "A"), chat("R", "B")]))
    with pytest.raises(
        UserError, match=r"1 row of 2 examples, too few for 2 ranks; .* a smaller max_length"
    ):
        prepare([{"path": path}], size=2)
    assert prepare([{"path": path}], size=2, packing=False).train.rows_per_epoch == 2
    with pytest.raises(UserError, match="2 rows of 2 examples, too few for 3 ranks"):
        prepare([{"path": path}], size=3, packing=False)
    with pytest.raises(
        UserError, match="eval_split_size: 2 of 2 rows is 2, which leaves none to train on"
    ):
        prepare([{"path": path}], eval_split_size=2)


def test_steps_follow_epochs_or_max_steps(prepare: Prepare, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "a.jsonl", (chat(f"Q{i}", "A") for i in range(10))))
    keys = {"packing": False, "global_batch_size": 4}
    assert prepare([{"path": path}], **keys).train.steps == 3
    assert prepare([{"path": path}], num_train_epochs=2.5, **keys).train.steps == 8
    assert prepare([{"path": path}], max_steps=5, **keys).train.steps == 5
    accumulated = prepare(
        [{"path": path}],
        packing=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        size=2,
    )
    assert accumulated.train.config.global_batch_size == 8


def test_per_device_eval_batch_size_sets_the_rows_of_a_held_out_batch(
    tiny_recipe: Callable[..., Path],
) -> None:
    keys = {"eval_split_size": 6, "per_device_train_batch_size": 2, "packing": False}
    for given, rows in ((None, 2), (3, 3)):
        recipe = read_recipe(str(tiny_recipe(**keys, per_device_eval_batch_size=given)))
        data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Rank())
        assert data.evaluation is not None
        first = next(data.evaluation.batches())
        assert [len(micro_batch.input_ids) for micro_batch in first.micro_batches] == [rows]
