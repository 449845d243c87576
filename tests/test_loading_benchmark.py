"""Given a checkpoint of a billion random bf16 parameters, when two ranks of one machine load it under FSDP2, then their
memory at its highest, summed over both, is at most 1.2 x what the loaded parameters take."""

import json
from pathlib import Path

import pytest

from tests.ranks import ROOT, run_command

PARAMETERS = 1e9
ALLOWED = 1.2


@pytest.mark.slow
def test_the_ranks_together_hold_the_model_once(tmp_path: Path) -> None:
    ways = ["FSDP2, dtype bfloat16", "FSDP2, dtype float32"]
    command = [
        "python",
        "benchmarks/loading.py",
        "--parameters",
        str(PARAMETERS),
        "--output",
        str(tmp_path),
    ]
    done = run_command([*command, "--ways", *ways], timeout=550, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    bf16, fp32 = json.loads((tmp_path / "loading.json").read_text())
    assert bf16["file_bytes"] == pytest.approx(2 * PARAMETERS, rel=0.1)
    assert bf16["peak_bytes"] <= ALLOWED * bf16["file_bytes"]
    # fp32 parameters of a bf16 file are twice the file; what loading may add is the same.
    assert fp32["loaded_bytes"] == pytest.approx(2 * fp32["file_bytes"], rel=0.01)
    assert fp32["peak_bytes"] <= ALLOWED * fp32["loaded_bytes"]
