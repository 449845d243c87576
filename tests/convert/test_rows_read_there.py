"""Which rows and columns of a data set another tool reads, where this toolkit reads others."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.convert.datasets import COLUMN_UNREAD, LEFT_OUT_UNLESS_ALTERNATING, UNTAGGED
from finetune.convert.factory import PARSED_TEMPLATE
from tests.convert.conftest import Convert, said

FACTORY = {"model_name_or_path": "org/model", "stage": "sft", "dataset": "a", "template": "llama3"}
ALTERNATING = LEFT_OUT_UNLESS_ALTERNATING.format("an answer")
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "gpt"}
EVERY_TAG = {"observation_tag": "tool", "function_tag": "function_call", "system_tag": "system"}


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        ({}, [COLUMN_UNREAD.format("system or tools or history")]),
        ({"columns": {"history": "history"}}, [COLUMN_UNREAD.format("system or tools")]),
        (
            {"formatting": "sharegpt", "columns": {"system": "system", "tools": "tools"}},
            [ALTERNATING],
        ),
        (
            {"formatting": "sharegpt", "tags": TAGS},
            [COLUMN_UNREAD.format("system or tools"), ALTERNATING, UNTAGGED],
        ),
        (
            {"formatting": "sharegpt", "tags": TAGS | EVERY_TAG},
            [COLUMN_UNREAD.format("system or tools"), ALTERNATING],
        ),
    ],
)
def test_rows_and_columns_that_llama_factory_leaves_out_are_said(
    entry: dict[str, Any], lines: list[str], tmp_path: Path, convert: Convert
) -> None:
    """DatasetAttr of its data/parser.py, SharegptDatasetConverter of its data/converter.py."""
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json"} | entry}))
    text = said(convert(FACTORY, dataset_dir=str(tmp_path)))
    columns = ("system or tools or history", "system or tools")
    known = (*map(COLUMN_UNREAD.format, columns), ALTERNATING, UNTAGGED)
    assert [line for line in known if line in text] == lines


def test_rows_of_a_data_set_that_is_described_elsewhere_may_be_left_out_there(
    convert: Convert,
) -> None:
    text = said(convert(FACTORY | {"stage": "dpo"}))
    assert LEFT_OUT_UNLESS_ALTERNATING.format("one") in text
    assert ALTERNATING not in said(convert(FACTORY, dataset_dir="ONLINE"))
    assert "rows: a co" not in said(convert(FACTORY | {"stage": "pt"}))


def test_without_a_template_llama_factory_takes_the_tokenizers_apart(convert: Convert) -> None:
    """parse_template of its data/template.py."""
    assert PARSED_TEMPLATE in said(convert(FACTORY | {"template": None}))
    assert PARSED_TEMPLATE not in said(convert(FACTORY))
    assert PARSED_TEMPLATE not in said(convert(FACTORY | {"template": None, "stage": "pt"}))
