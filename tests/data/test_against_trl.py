"""Pairs and rated answers against TRL's own processing: the same tokens on real rows in every form, and where they differ."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finetune.constants import IGNORE_INDEX
from tests.data.conftest import Prepare
from tests.data.test_prepare import write_lines

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
pytestmark = pytest.mark.slow


def read_turn(turn: dict[str, str]) -> dict[str, str]:
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def process(trainer: Any, rows: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, list[int]]]:
    """The rows as `trainer`, TRL's, tokenizes them."""
    from datasets import Dataset

    options = SimpleNamespace(
        dataset_num_proc=None,
        max_length=None,
        truncation_mode="keep_start",
        per_device_train_batch_size=4,
    )
    stub = SimpleNamespace(
        _tokenizer=tokenizer,
        calculate_KL=False,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        args=options,
    )
    return list(
        trainer._prepare_dataset(
            stub, Dataset.from_list(copy.deepcopy(rows)), tokenizer, options, "train"
        )
    )


@pytest.fixture
def read(prepare: Prepare, shared: Path, tmp_path: Path) -> Any:
    """A reader of rows as ours: (tokenizer, [(prompt ids, answer ids)] of each document)."""
    keys = {"tokenizer_name_or_path": str(shared / "tokenizers" / "llama3"), "max_length": 100_000}

    def make(
        rows: list[dict[str, Any]], **more: Any
    ) -> tuple[Any, list[tuple[list[int], list[int]]]]:
        path = write_lines(tmp_path / "rows.jsonl", rows)
        data = prepare([{"path": str(path)}], **{"chat_template": "llama3", **keys, **more})
        found = []
        for example_id in range(len(data.train.examples)):  # type: ignore[attr-defined]
            example = data.train.examples[example_id]  # type: ignore[attr-defined]
            trained = np.flatnonzero(example.labels != IGNORE_INDEX)
            found.append(
                (example.input_ids[: trained[0] + 1].tolist(), example.labels[trained].tolist())
            )
        return data.tokenizer, found

    return make


@pytest.fixture
def pairs(shared: Path) -> list[dict[str, Any]]:
    """LLaMA-Factory's pairs with an explicit prompt of messages."""
    rows = json.loads((shared / "data" / "dpo_en_demo.json").read_text())
    return [
        {"prompt": [read_turn(turn) for turn in row["conversations"]]}
        | {side: [read_turn(row[side])] for side in ("chosen", "rejected")}
        for row in rows
    ]


def test_pairs_are_the_tokens_of_trl(read: Any, pairs: list[dict[str, Any]]) -> None:
    dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    text = [
        {"prompt": f"{row['prompt'][-1]['content']}\n\n"}
        | {side: row[side][0]["content"] for side in ("chosen", "rejected")}
        for row in pairs
    ]
    implicit = [
        {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in pairs
    ]
    short = [row for row in pairs if len(row["prompt"]) == 1]
    orca = [
        {"question": row["prompt"][0]["content"]}
        | {side: row[side][0]["content"] for side in ("chosen", "rejected")}
        for row in short
    ]
    ratio = [
        {"prompt": row["prompt"], "response_w": row["chosen"], "response_l": row["rejected"]}
        for row in text
    ]
    for ours, theirs in (
        (pairs, pairs),
        (implicit, implicit),
        (text, text),
        (orca, short),
        (ratio, text),
    ):
        tokenizer, found = read(ours, method="dpo")
        expected = process(dpo_trainer.DPOTrainer, theirs, tokenizer)
        assert len(found) == 2 * len(expected) > 200
        for i, row in enumerate(expected):
            assert found[2 * i : 2 * i + 2] == [
                (row["prompt_ids"], row["chosen_ids"]),
                (row["prompt_ids"], row["rejected_ids"]),
            ]
    # ChatML writes a line break after the end of a turn: TRL trains on it, and a model never has to write it.
    tokenizer, found = read(pairs, method="dpo", chat_template="chatml")
    for i, row in enumerate(process(dpo_trainer.DPOTrainer, pairs, tokenizer)):
        assert (
            found[2 * i][0] == row["prompt_ids"] and found[2 * i][1][:-1] == row["chosen_ids"][:-1]
        )
    # Where no space is between them, TRL cuts off the prompt's last token; ours is the prompt of inference.
    glued = [{**row, "prompt": row["prompt"].strip()} for row in text]
    tokenizer, found = read(glued, method="dpo")
    assert all(
        tokenizer(row["prompt"]).input_ids == prompt
        for row, (prompt, _) in zip(glued, found[::2], strict=True)
    )
    theirs = process(dpo_trainer.DPOTrainer, glued, tokenizer)
    assert any(
        len(row["prompt_ids"]) < len(prompt)
        for row, (prompt, _) in zip(theirs, found[::2], strict=True)
    )


def test_rated_answers_are_the_tokens_of_trl(read: Any, pairs: list[dict[str, Any]]) -> None:
    kto_trainer = pytest.importorskip("trl.trainer.kto_trainer")
    rated = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if i % 2 else "rejected"],
            "label": bool(i % 2),
        }
        for i, row in enumerate(pairs)
    ]
    messages = [
        {"messages": row["prompt"] + row["completion"], "label": row["label"]} for row in rated
    ]
    for ours in (rated, messages):
        tokenizer, found = read(ours, method="kto")
        expected = process(kto_trainer.KTOTrainer, rated, tokenizer)
        assert found[::2] == [(row["prompt_ids"], row["completion_ids"]) for row in expected]
        assert [prompt for prompt, _ in found[1::2]] == [row["prompt_ids"] for row in expected]
    tokenizer, found = read(pairs, method="kto")
    apart = process(
        kto_trainer.KTOTrainer, pairs, tokenizer
    )  # all chosen answers of a batch, then all rejected ones
    assert sorted(found[::2]) == sorted((row["prompt_ids"], row["completion_ids"]) for row in apart)
