"""tests/slow_runs.json: when each file's slow tests last ran, how they ended and how long they took.

A pytest plugin. A session that runs slow tests writes their files' entries; every long session ends with how many files have
slow tests that nobody has run for a week.
"""

import json
from collections import Counter, defaultdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("slow_runs.json")
WEEK = timedelta(days=7)
LONG_SESSION = 300  # tests


class SlowRecord:
    """What the slow tests of this session came to, by file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a phase of a slow test: its seconds, and its outcome where that is the test's."""
        if "slow" not in report.keywords:
            return
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[file][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the entries of the files that ran, and names those that nobody has run."""
        record = read_record()
        today = datetime.now(UTC).date()
        for file, outcomes in self.outcomes.items():
            record[file] = {"date": today.isoformat(), "seconds": round(self.seconds[file])}
            record[file] |= dict(outcomes)
        if self.outcomes:
            entries = [
                f"{json.dumps(file)}: {json.dumps(entry)}" for file, entry in sorted(record.items())
            ]
            RECORD.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
        passed = len(terminalreporter.stats.get("passed", ()))
        if passed > LONG_SESSION:
            late = find_late(record, today)
            named = f": {', '.join(late)}" if self.outcomes else f" (see {RECORD.name})"
            terminalreporter.write_line(
                f"{len(late)} files have slow tests that nobody has run for a week{named}"
            )


def read_record() -> dict[str, dict[str, object]]:
    """The entries: file -> date, seconds, and the number of tests of each outcome."""
    record: dict[str, dict[str, object]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def find_late(record: dict[str, dict[str, object]], today: date) -> list[str]:
    """The test files with slow tests that have no entry of the last seven days."""
    late = []
    for path in sorted(RECORD.parent.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        file = path.relative_to(RECORD.parents[1]).as_posix()
        ran = date.fromisoformat(str(record.get(file, {}).get("date", date.min.isoformat())))
        is_slow = any(word in text for word in ("mark.slow", "slow_but(", "cross("))
        if is_slow and today - ran > WEEK:
            late.append(file)
    return late
