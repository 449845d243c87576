"""The soak, in small: random faults on one run after another, and nothing lost. In full: `python tests/soak.py`."""

import json

import pytest

from tests.ranks import run_python


@pytest.mark.parametrize(("faults", "launcher"), [(60, 0.0), pytest.param(300, 0.05, marks=pytest.mark.slow)])
def test_random_faults_lose_nothing(faults: int, launcher: float) -> None:
    command = ["tests/soak.py", "--faults", str(faults), "--launcher", str(launcher)]
    done = run_python(command, timeout=120 + 10 * faults)
    assert done.returncode == 0, done.stderr[-8000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["faults"] >= faults and line["lost"] == line["silent"] == 0
