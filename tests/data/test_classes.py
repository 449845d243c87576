"""Rows with a class: what is read of them, and where their one label stands."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.schema import Data, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.classes import parse_class
from finetune.data.formats import Completion, Conversation, Text, parse_row
from finetune.data.messages import BadRow
from finetune.data.source_tokens import SourceStats, tokenize_rows
from finetune.data.sources import RowBatch
from tests.conftest import make_tokenizer

LABELS = ("bad", "good", "3")
ANSWER = {"from": "gpt", "value": "4"}
SOURCE = DatasetSource(path="rows.jsonl")


def read(row: dict[str, object]) -> tuple[object, int | None]:
    group = parse_class(row, SOURCE, Data(labels=LABELS)).groups[0]
    return group.documents[0], group.labels[0]


def test_a_class_is_a_name_or_its_place() -> None:
    assert read({"text": "Hurrah", "label": "good"}) == (Text("Hurrah"), 1)
    assert read({"text": "Hurrah", "label": 0}) == (Text("Hurrah"), 0)
    assert read({"text": "Hurrah", "label": 3}) == (Text("Hurrah"), 2)  # a name comes first
    assert read({"prompt": "2+2=", "completion": "4", "label": "bad"}) == (
        Completion("2+2=", "4"),
        0,
    )


def test_a_number_with_a_point_is_the_class_without_it() -> None:
    for label, score in ((0, 0), (1, 1), (3, 2)):  # 3 is a name
        for written in (label, float(label), str(float(label))):
            assert read({"text": "Hurrah", "label": written})[1] == score


def test_a_conversation_may_end_with_either_side() -> None:
    asked = [{"role": "user", "content": "Hello"}]
    for turns in (asked, [*asked, {"role": "assistant", "content": "Hi"}]):
        document, score = read({"messages": turns, "label": "good"})
        assert isinstance(document, Conversation) and score == 1
        assert [message["role"] for message in document.messages] == [
            turn["role"] for turn in turns
        ]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "2+2?", "completion": "4"}, {}),
        ({"q": "2+2?", "a": "4"}, {"prompt_column": "q", "completion_column": "a"}),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}], "chosen": ANSWER},
            {"type": "sharegpt"},
        ),
    ],
)
def test_a_conversation_is_read_as_sft_reads_it(
    row: dict[str, object], keys: dict[str, str]
) -> None:
    source = DatasetSource(**{"path": "rows.jsonl", "type": "messages"} | keys)  # type: ignore[arg-type]
    with_class = parse_class({**row, "label": "good"}, source, Data(labels=LABELS))
    assert with_class.document == parse_row(row, source).document
    assert with_class.unused_columns == ()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x"}, "label: no class"),
        ({"text": "x", "label": "ugly"}, "'ugly' is none of labels (bad, good, 3)"),
        ({"text": "x", "label": 4}, "4 is none of labels"),
        ({"text": "x", "label": -1}, "-1 is none of labels"),
        ({"text": "x", "label": True}, "True is none of labels"),
        ({"text": "x", "label": 0.5}, "0.5 is none of labels"),
        ({"text": "x", "label": "nan"}, "'nan' is none of labels"),
        ({"messages": [], "label": 0}, "the list of messages is empty"),
        ({"label": 0}, "unknown format"),
    ],
)
def test_other_rows_are_refused(row: dict[str, object], says: str) -> None:
    with pytest.raises(BadRow) as problem:
        read(row)
    assert says in str(problem.value)


@given(
    texts=st.lists(st.text(alphabet="ab \n.é", min_size=1, max_size=40), min_size=1, max_size=6),
    scores=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    pads_with_eos=st.booleans(),
)
def test_a_document_has_one_label_where_transformers_reads_the_score(
    texts: list[str], scores: list[int], pads_with_eos: bool
) -> None:
    tokenizer = make_tokenizer()
    if pads_with_eos:
        tokenizer.pad_token = tokenizer.eos_token
    rows = [{"text": text, "label": score} for text, score in zip(texts, scores, strict=False)]
    batch = RowBatch("rows.jsonl", list(range(1, len(rows) + 1)), rows)
    stats = SourceStats()
    data = Data(labels=("a", "b", "c"), datasets=(SOURCE,))
    (tokens,) = tokenize_rows([(SOURCE, batch)], data, tokenizer, stats, "classes")
    ends = np.cumsum(tokens.lengths)
    for text, score, start, end in zip(texts, scores, ends - tokens.lengths, ends, strict=False):
        ids = tokens.input_ids[start:end]
        assert ids.tolist() == tokenizer(text + tokenizer.eos_token).input_ids
        # As modeling_layers.GenericForSequenceClassification: the rightmost token that is not the pad token.
        (labeled,) = np.flatnonzero(tokens.labels[start:end] != IGNORE_INDEX)
        assert labeled == np.flatnonzero(ids != tokenizer.pad_token_id)[-1]
        assert tokens.labels[start:end][labeled] == score


def test_labels_are_part_of_what_the_tokens_are_known_by(tmp_path: Path) -> None:
    from finetune.data.token_store import hash_inputs

    tokenizer = make_tokenizer()
    keys = {json.dumps(names): Data(labels=names) for names in (("a", "b"), ("b", "a"))}
    assert len({hash_inputs(data, tokenizer, "classes") for data in keys.values()}) == 2
    assert len({hash_inputs(Data(), tokenizer, kind) for kind in ("pairs", "scored_pairs")}) == 2  # type: ignore[arg-type]
