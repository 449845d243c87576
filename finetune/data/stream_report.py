"""What became of the rows of a stream, counted while it is trained on."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.data.checks import Finding, Tally, findings
from finetune.data.mixture import SourceReport, tokens_lost
from finetune.data.tokenize import SHOWN_BAD_ROWS, count_columns

COUNTED = (
    "rows_read",
    "rows_skipped",
    "examples",
    "tokens",
    "trained_tokens",
    "overlong",
    "tokens_lost",
    "trained_tokens_lost",
)
TOLD_AGAIN = 10  # a finding is told when it is first met, and whenever it is in so many times more rows


@dataclass(slots=True)
class StreamReport:
    """What has been read of a stream so far. A row that comes again, its source having ended, is counted again."""

    from_step: int  # where this start of the run began to read
    eval_sources: tuple[SourceReport, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)  # what was wrong with the first of them
    unused_columns: dict[str, int] = field(default_factory=dict)  # column -> rows that hold a value in it
    tally: Tally = field(default_factory=Tally)
    told: dict[str, int] = field(default_factory=dict)  # name of a finding -> its rows when it was told

    def add(self, block: SourceReport) -> list[str]:
        """Counts a block in, and returns what a person is to be told of it."""
        self.counts.update({name: getattr(block, name) for name in COUNTED})
        self.skipped += block.skipped[: SHOWN_BAD_ROWS - len(self.skipped)]
        count_columns(self.unused_columns, block.unused_columns)
        for finding in block.findings:
            self.tally.count(finding.name, finding.rows, finding.where)
        lines = []
        for finding in self.findings():
            if finding.severity != "notice" and finding.rows >= TOLD_AGAIN * self.told.get(finding.name, 0):
                self.told[finding.name] = finding.rows
                lines.append(str(finding))
                if finding.name in ("truncated", "dropped"):
                    count = self.counts
                    lines += tokens_lost(
                        block.path, count["tokens_lost"], count["tokens"], count["trained_tokens_lost"]
                    )
        return lines

    def findings(self) -> list[Finding]:
        """What was found in the rows read so far."""
        return findings(self.tally, of=self.counts["rows_read"])

    def as_json(self) -> dict[str, Any]:
        """The report as plain values, under the names of `DataReport` where they mean the same."""
        of_eval = [finding for source in self.eval_sources for finding in source.findings]
        return {
            "streamed_from_step": self.from_step,
            **self.counts,
            "skipped": self.skipped,
            "unused_columns": self.unused_columns,
            "eval_sources": [asdict(source) for source in self.eval_sources],
            "findings": [asdict(finding) for finding in (*self.findings(), *of_eval)],
        }
