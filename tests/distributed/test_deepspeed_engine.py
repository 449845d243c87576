"""DeepSpeed's own engine beside what its stages are translated to: the same losses on the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_python

pytestmark = pytest.mark.slow
STEPS = 10


@pytest.fixture(scope="module")
def results(
    shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], dict[str, Any]]:
    """(engine, stage) -> what the benchmark measured of a real model on real data, on 2 ranks."""
    pytest.importorskip("deepspeed")
    model, data = shared / "models" / "stories260k", shared / "data" / "gsm8k_train.jsonl"
    if not model.is_dir() or not data.is_file():
        pytest.skip("the model or the data are not at hand")
    folder = tmp_path_factory.mktemp("zero")
    given = [
        "--model",
        str(model),
        "--data",
        str(data),
        "--steps",
        str(STEPS),
        "--output",
        str(folder),
    ]
    done = run_python(["benchmarks/zero.py", *given], timeout=900)
    assert done.returncode == 0, done.stderr
    return {
        (each["contestant"], each["stage"]): each
        for each in json.loads((folder / "results.json").read_text())
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_of_zero_trains_as_its_translation(
    stage: int, results: dict[tuple[str, int], dict[str, Any]]
) -> None:
    theirs, ours = results["DeepSpeed", stage], results["finetune", stage]
    assert len(ours["losses"]) == STEPS and ours["losses"][-1] < ours["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    assert ours["held_bytes"] <= theirs["held_bytes"]
