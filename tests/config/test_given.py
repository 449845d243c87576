"""Rows and functions of a script, where a recipe names files: written once, found again, and refused in a sentence."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset, DatasetDict

import finetune
from finetune.config.user_code import load
from finetune.units import counted
from tests.ranks import ROOT

ROWS = [{"prompt": f"{n} + {n} = ", "completion": str(2 * n)} for n in range(8)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "finetune" / "given"


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [ROWS],
        Dataset.from_list(ROWS),
        [Dataset.from_list(ROWS)],
        pandas.DataFrame(ROWS),
        [{"path": ROWS, "weight": 2}],
    ],
    ids=["rows", "list of rows", "Dataset", "list of Dataset", "data frame", "with a weight"],
)
def test_rows_are_read_as_those_of_a_file(tmp_path: Path, rows: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given, named = (
        finetune.load_recipe("quickstart", datasets=each, eval_datasets=[], exact_match_samples=0)
        for each in (rows, [{"path": str(file)}])
    )
    ours, theirs = (finetune.prepare(each).train.examples for each in (given, named))
    assert [each.input_ids.tolist() for each in map(ours.__getitem__, range(8))] == [
        each.input_ids.tolist() for each in map(theirs.__getitem__, range(8))
    ]


SCRIPT = """
import os, finetune
{moved}
FACTOR = {factor}

def count(text):
    return FACTOR * len(text)

def short(completions, **columns):
    return [-count(each) for each in completions]

print(finetune.load_recipe("quickstart_grpo", rewards=short).rollout.rewards[0])
"""


def test_a_function_of_the_script_has_one_name_until_it_changes(tmp_path: Path) -> None:
    """The name is the same in every process and on every line of the script; what the function reads is part of it."""

    def name_of(moved: str, factor: float) -> str:
        (tmp_path / "script.py").write_text(SCRIPT.format(moved=moved, factor=factor))
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    first, moved, changed = name_of("", 2.0), name_of("# one\n# two", 2.0), name_of("", 3.0)
    assert first == moved != changed
    assert load(first)(["abc"]) == [-6.0]
    assert load(changed)(["abc"]) == [-9.0]


def test_functions_of_files_and_packages_are_named_not_copied(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def right(completions):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_rewards  # type: ignore[import-not-found]

    keys = {"rewards": [own_rewards.right, counted, lambda completions: [0.5]]}
    rewards = finetune.load_recipe("quickstart_grpo", **keys).rollout.rewards  # type: ignore[arg-type]
    assert rewards[0] == f"{tmp_path / 'own_rewards.py'}:right"
    assert "from finetune.units import counted" in next(cache.glob("counted-*.py")).read_text()
    assert load(rewards[1]) is counted
    assert load(rewards[2])(["a"]) == [0.5]
    # What it names may be gone when the recipe is read again, and then it says so.
    assert all(Path(name.rpartition(":")[0]).is_file() for name in rewards)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"datasets": [[]]}, "load_recipe: datasets: the list has no rows"),
        ({"datasets": [[1]]}, "load_recipe: datasets: row 1: int; a mapping is expected"),
        (
            {"datasets": [[{"text": object()}]]},
            "load_recipe: datasets: row 1: Object of type object is not JSON serializable",
        ),
        (
            {"datasets": [DatasetDict(train=Dataset.from_list(ROWS))]},
            "load_recipe: datasets: has the splits train; give one of them",
        ),
        ({"rewards": [3]}, "load_recipe: rewards: [3] does not fit; text is expected"),
        (
            {"rewards": [(n for n in ()).__next__]},
            "load_recipe: rewards: __next__ cannot be written to a file",
        ),
        (
            {"learning_rte": 1},
            "load_recipe: learning_rte: no such key; did you mean learning_rate?",
        ),
    ],
)
def test_what_no_file_can_hold_is_said(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(finetune.UserError, match=re.escape(sentence)) as error:
        finetune.load_recipe("quickstart_grpo", **keys)
    assert "\n" not in str(error.value)


def test_plan_and_export_are_called_by_the_commands_names() -> None:
    plan: Any = finetune.plan
    assert str(plan("quickstart")) == str(finetune.make_plan("quickstart"))
    export: Any = finetune.export
    with pytest.raises(finetune.UserError, match="no such"):
        export("nowhere")
