"""One language in code, messages, pages and tests: the field's words, in American spelling (docs/design.md, Terminology)."""

import re
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
    r"\w*(?:optimis|quantis|tokenis|normalis|initialis|materialis|recognis|synchronis|serialis|summaris|organis|realis)\w*": "-iz-",
    r"colour\w*|behaviour\w*|honour\w*|neighbour\w*|favour\w*|licence\w*|labelled|cancelled|modelling|artefact\w*": "American",
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


@pytest.mark.parametrize("words", NOT_OURS, ids=lambda words: words.split("|")[0][:20])
def test_no_file_uses_a_word_that_is_not_ours(words: str) -> None:
    pattern = re.compile(rf"\b(?:{words})\b", re.IGNORECASE)
    hits = []
    for path in texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for quoted in QUOTED:
                line = line.replace(quoted, "")
            if pattern.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not hits, f"write {NOT_OURS[words]} instead:\n" + "\n".join(hits)
