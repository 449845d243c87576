"""One language in code, messages, pages and tests: the field's words, in American spelling (docs/design.md, Terminology)."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.ranks import ROOT

# Word -> what stands in its place. Quotations of data in tests are the only exception.
NOT_OURS = {
    r"tell|tells|told|telling": "report, say, log",
    r"mend|mends|mended": "fix",
    r"anew|made anew|begin anew": "again, start over, rebuild",
    r"beforehand": "before, first",
    r"rehearse|rehearses|rehearsed|rehearsal": "check that a save will work",
    r"goes on|going on|go on": "resumes, continues",
    r"made away|taken leave|takes leave": "removed, leaves",
    r"computing (?:type|dtype)": "compute dtype",
    r"hub is away|is away": "unreachable",
    r"of another model": "saved from a different model",
    r"a stranger|fresh process": "a separate process",
    r"the floors|the rooms|floors of the house": "layers, packages",
    r"colour\w*|behaviour\w*|honour\w*|neighbour\w*|favour\w*|licence\w*|labelled|cancelled|modelling|artefact\w*": "American",
}
# Parts of words.
SPELLINGS = {
    "optimis|quantis|tokenis|normalis|initialis|materialis|recognis|synchronis|serialis|summaris|organis|realis": "-iz-"
}
QUOTED = (
    "Tell me",
    "tell me",
    ".tell()",
    "def tell(",
    "do not tell the user",
)  # the last: Qwen's template
FOLDERS = ("finetune", "docs", "recipes", "accelerate_configs", "benchmarks", "tests")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "AGENTS.md",
    "CITATION.cff",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
)
ENDINGS = {".py", ".md", ".yaml", ".jinja", ".js", ".css"}


def texts() -> list[Path]:
    """Every file that a person reads."""
    found = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in ENDINGS
    ]
    return [ROOT / page for page in PAGES] + [path for path in found if path != Path(__file__)]


@cache
def read_lines() -> list[tuple[str, str]]:
    """Every line of these files, without quotations, and where it stands."""
    lines = []
    for path in texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for quoted in QUOTED:
                line = line.replace(quoted, "")
            lines.append((f"{path.relative_to(ROOT)}:{number}", line.strip()))
    return lines


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [*((rf"\b(?:{words})\b", instead) for words, instead in NOT_OURS.items()), *SPELLINGS.items()],
    ids=lambda text: text[:20],
)
def test_no_file_uses_a_word_that_is_not_ours(pattern: str, instead: str) -> None:
    search = re.compile(pattern, re.IGNORECASE).search
    hits = [f"{place}: {line}" for place, line in read_lines() if search(line)]
    assert not hits, f"write {instead} instead:\n" + "\n".join(hits)
