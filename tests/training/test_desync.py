"""Given a run on two ranks, when one of them raises, exits, is killed or falls behind, then the run ends on both within
its timeout plus 5 s, and what that rank has to say stands first in the output."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_chat, make_model, slow_but
from tests.ranks import run_python
from tests.training.layouts import write_config

TIMEOUT_SECONDS = 10
CASES = [
    ("full_shard", fault)
    for fault in ("raises", "exits", "killed", "sleeps", "killed while tokenizing")
]
CASES += [("ddp", "raises")]
QUICK = [("full_shard", fault) for fault in ("raises", "killed", "sleeps")]
Case = Callable[[str, str], tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Case:
    """(layout, fault) -> how the ranks ended, and their output."""
    import yaml

    folder = tmp_path_factory.mktemp("desync")
    recipe = folder / "recipe.yaml"
    keys = {
        "model_name_or_path": str(make_model(folder / "model")),
        "datasets": [{"path": str(make_chat(folder / "chat.jsonl", rows=8))}],
        "dataset_cache_dir": str(folder / "cache"),
        "max_length": 64,
        "global_batch_size": 2,
        "max_steps": 3,
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    recipe.write_text(yaml.safe_dump(keys))
    wanted = CASES if slow_too else QUICK
    cases = [
        {
            "recipe": str(recipe),
            "config": str(write_config(folder, layout)),
            "overrides": [
                f"output_dir={folder}/{layout}-{fault}",
                *([f"dataset_cache_dir={folder}/empty"] if "tokenizing" in fault else []),
            ],
            "fault": fault,
            "log": str(folder / f"{layout}-{fault}.log"),
        }
        for layout, fault in wanted
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    script = str(Path(__file__).with_name("desync_on_ranks.py"))
    done = run_python([script, str(folder / "cases.json")], timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(zip(wanted, [json.loads(line) for line in done.stdout.splitlines()], strict=True))
    return lambda layout, fault: (
        found[layout, fault],
        (folder / f"{layout}-{fault}.log").read_text(),
    )


@pytest.mark.parametrize(("layout", "fault"), slow_but(QUICK, CASES))
def test_the_run_ends_everywhere_in_time(layout: str, fault: str, ended: Case) -> None:
    end, output = ended(layout, fault)
    assert None not in end["codes"] and 0 not in end["codes"], output
    assert end["seconds"] < TIMEOUT_SECONDS + 5, output


@pytest.mark.parametrize("layout", slow_but(["full_shard"], ["full_shard", "ddp"]))
def test_the_error_of_the_rank_that_raised_stands_first(layout: str, ended: Case) -> None:
    _, output = ended(layout, "raises")
    cause, consequence = (
        output.index("rank 1: Traceback"),
        output.index("rank 0: another rank ended"),
    )
    assert cause < output.index("ZeroDivisionError") < consequence


def test_the_rank_that_fell_behind_reports_first_where_it_was(ended: Case) -> None:
    _, output = ended("full_shard", "sleeps")
    reported = output.index(f"rank 1: no progress for {TIMEOUT_SECONDS} s")
    assert reported < output.index("seed_and_fail") < output.index("rank 0: ")


@pytest.mark.parametrize("fault", slow_but(["killed"], ["exits", "killed"]))
def test_a_rank_that_cannot_speak_is_missed_by_the_other(fault: str, ended: Case) -> None:
    end, output = ended("full_shard", fault)
    assert end["codes"] == [1, 3 if fault == "exits" else -9]
    assert "rank 0: another rank ended; " in output and "This one waited at" not in output, (
        "no stack: one sentence"
    )
