"""The soak, in small: random faults on one run after another, and nothing lost. In full: `python tests/soak.py`."""

import json

import pytest

from tests.ranks import ROOT, run_python


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "launcher"), [(25, 0.0), (300, 0.05)])
def test_random_faults_lose_nothing(faults: int, launcher: float) -> None:
    command = ["tests/soak.py", "--faults", str(faults), "--launcher", str(launcher)]
    done = run_python(command, timeout=120 + 10 * faults)
    assert done.returncode == 0, done.stderr[-8000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["faults"] >= faults and line["lost"] == line["silent"] == 0


def test_the_page_has_the_table_of_the_counts() -> None:
    results = ROOT / "benchmarks" / "results" / "soak"
    page = (results / "soak.md").read_text(encoding="utf-8")
    counts = json.loads((results / "soak.json").read_text())
    table = page.partition("<!-- soak -->\n")[2].partition("<!-- /soak -->")[0]
    named = {
        line.split("|")[1].strip(): line.split("|")[2:]
        for line in table.splitlines()
        if line.startswith("| ")
    }
    faults, lost, silent = (int(cell.strip().replace(",", "")) for cell in named["all"][:3])
    assert (faults, lost, silent) == (
        counts["faults"],
        counts["lost"],
        counts["silent"],
    ) and lost == silent == 0
    assert faults >= 3000
    rows = [
        int(cells[0].strip().replace(",", ""))
        for name, cells in named.items()
        if "faults" not in name and name != "all"
    ]
    assert sum(rows) == faults
    assert counts["note"] in table
