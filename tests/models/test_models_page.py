"""docs/models.md: the outcome of every family that was tried, as two ranks found it."""

from pathlib import Path
from typing import Any

from tests.models.conftest import DENSE
from tests.models.families import HYBRIDS, LEAKY, OTHERS, OWN_ATTENTION

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
REASONS = {
    "do not keep documents apart": "refused: attention or a state reaches from one document into the next",
    "in which packed documents cannot be kept apart": "refused: layers carry a state from one document into the next",
    "cannot be trained on packed documents": "refused: its own attention takes no document boundaries",
    "does not compute what the model's own forward does": "refused: a layer between its trunk and its head",
    "is a mixture of experts": "refused: a mixture of experts",
    "name or arrange its tensors otherwise": "refused: its files name tensors otherwise than its modules do",
}


def outcome(result: dict[str, Any] | None, key: str = "") -> str:
    if result is None:
        return "not tried"
    if result.get("error") is None:
        return f"trains{key}"
    return next(text for part, text in REASONS.items() if part in result["error"])


def table(loaded: dict[str, Any]) -> list[str]:
    """The page's lines: `model_type`, packed rows, one example a row."""
    rows = dict.fromkeys(DENSE, ("trains", "trains"))  # see test_families.py and test_attention.py
    for family in OTHERS:
        rows[family] = (outcome(loaded[f"{family}, packed"]), outcome(loaded[f"{family}, padded"]))
    for family in LEAKY:
        rows[family] = (outcome(loaded[f"{family}, packed"]), outcome(loaded[f"{family}, padded"]))
    for family in (*HYBRIDS, *OWN_ATTENTION):
        unpacked = outcome(loaded[f"{family}, padded"], " with `attn_implementation: eager`")
        rows[family] = (outcome(loaded[f"{family}, packed"]), unpacked)
    for family in ("modernbert-decoder",):
        rows[family] = (outcome(loaded[f"{family}, packed"]), outcome(loaded[f"{family}, padded"]))
    for family, job in (("mixtral", "experts"), ("gpt_neox", "converted")):
        rows[family] = (outcome(loaded[job]), outcome(loaded[job]))
    head = ["| `model_type` | `packing: true` | `packing: false` |", "|---|---|---|"]
    return head + [f"| `{family}` | {packed} | {unpacked} |" for family, (packed, unpacked) in sorted(rows.items())]


def test_the_page_states_what_was_found(loaded: dict[str, Any]) -> None:
    lines = table(loaded)
    found = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert found == lines, "docs/models.md should hold this table:\n" + "\n".join(lines)
