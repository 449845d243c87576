"""Which rows and columns of a data set another tool reads, where this toolkit reads others."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.convert.datasets import (
    ALL_SUBSETS,
    COLUMN_MAPPED,
    COLUMN_UNREAD,
    COUNT_OF_SUBSETS,
    FIRST_OF_ALL,
    LEFT_OUT_UNLESS_ALTERNATING,
    SWIFT_HUB,
    UNTAGGED,
)
from finetune.convert.factory import PARSED_TEMPLATE
from finetune.convert.numbers import SMOOTHED_MEANS
from finetune.convert.swift import NO_SYSTEM
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


AUTOMODEL = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "model": {"pretrained_model_name_or_path": "org/model"},
    "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1},
}
CHAT = "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset"
MAPPED = f"nemo_automodel.components.datasets.llm.{COLUMN_MAPPED}"
COLUMNS = {"question": "q", "answer": "a"}
FILES = ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("keys", "splits", "is_said"),
    [
        ({"path_or_dataset_id": FILES, "limit_dataset_samples": 9}, [None, None], True),
        ({"path_or_dataset_id": FILES, "split": "train[:9]"}, [None, None], False),
        ({"path_or_dataset_id": "a.jsonl", "limit_dataset_samples": 9}, ["train[:9]"], False),
        (
            {"path_or_dataset_id": "a/b", "split": "train[9:]", "limit_dataset_samples": 9},
            ["train[9:]"],
            True,
        ),
    ],
)
def test_automodel_counts_the_rows_of_all_files_and_of_a_slice(
    keys: dict[str, Any], splits: list[str | None], is_said: bool, convert: Convert
) -> None:
    """_load_dataset and __init__ of its column_mapped_text_instruction_dataset.py."""
    found = convert(AUTOMODEL, dataset={"_target_": MAPPED, "column_mapping": COLUMNS} | keys)
    assert [entry.get("split") for entry in found.recipe["datasets"]] == splits
    assert (FIRST_OF_ALL in said(found)) is is_said


def test_automodels_chats_in_a_file_have_no_split(convert: Convert) -> None:
    """_load_openai_messages of its chat_dataset.py."""
    data = {"_target_": CHAT, "path_or_dataset_id": "a.ndjson", "split": "train[:9]"}
    assert convert(AUTOMODEL, dataset=data).recipe["datasets"] == [{"path": "a.ndjson"}]


SWIFT = {"model": "org/model", "tuner_type": "lora", "max_length": 512}


@pytest.mark.parametrize(
    ("name", "entries", "line"),
    [
        ("hf::org/x", [{"path": "org/x"}], None),
        ("org/x:en/zh", [{"path": "org/x", "name": "en"}, {"path": "org/x", "name": "zh"}], None),
        (
            "org/x:en/zh#20",
            [{"path": "org/x", "name": "en"}, {"path": "org/x", "name": "zh"}],
            COUNT_OF_SUBSETS,
        ),
        ("MS::org/x:all#20", [{"path": "org/x", "max_samples": 20}], ALL_SUBSETS),
    ],
)
def test_a_name_of_ms_swifts_has_a_hub_subsets_and_a_count(
    name: str, entries: list[dict[str, Any]], line: str | None, convert: Convert
) -> None:
    """DatasetSyntax of its dataset_syntax.py, _select_subsets of its loader.py."""
    found = convert(SWIFT, dataset=[name])
    assert found.recipe["datasets"] == entries
    known = (ALL_SUBSETS, COUNT_OF_SUBSETS)
    assert [each for each in known if each in said(found)] == ([line] if line else [])
    assert any(SWIFT_HUB in each for each in found.to_do) is not name.startswith("hf::")


def test_an_empty_system_message_of_ms_swifts_is_none(convert: Convert) -> None:
    """default_system of its TemplateArguments."""
    assert NO_SYSTEM in said(convert(SWIFT, dataset=["a.jsonl"], system=""))
    assert NO_SYSTEM not in said(convert(SWIFT, dataset=["a.jsonl"]))


def test_smoothed_losses_are_summed_over_micro_batches(convert: Convert) -> None:
    """ms-swift's Seq2SeqTrainer, and Trainer of transformers up to 5.12, which LLaMA-Factory uses: with
    2 micro-batches a step its 0.9.5 logged twice our loss, and twice our gradient norm.
    """
    found = convert(SWIFT, dataset=["a.jsonl"], label_smoothing_factor=0.1)
    assert any(SMOOTHED_MEANS in line for line in found.differences)
    smoothed = {"label_smoothing_factor": 0.1}
    for keys, is_said in (({}, True), ({"use_dft_loss": True}, False), ({"stage": "dpo"}, False)):
        found = convert(FACTORY, **smoothed, **keys)
        assert any(SMOOTHED_MEANS in line for line in found.differences) == is_said
