"""The planned memory of attention that a CPU computes by document, against what torch allocates."""

from typing import Any

import pytest

from tests.conftest import slow_but
from tests.plan.small_steps import SMALL, planned_share

ATTENTIONS: dict[str, dict[str, Any]] = {
    "window": {"model_type": "mistral", "sliding_window": 128},
    "dropout": {"attention_dropout": 0.1},
    "both": {"model_type": "mistral", "sliding_window": 128, "attention_dropout": 0.1},
}
CASES = [(name, recomputes) for name in ATTENTIONS for recomputes in (False, True)]


@pytest.mark.parametrize(
    ("name", "recomputes"), slow_but([("window", False), ("dropout", True)], CASES)
)
def test_scores_and_masks_of_whole_documents_are_planned(name: str, recomputes: bool) -> None:
    """They grow with the square of a document, and are most of this step."""
    share = planned_share(SMALL | ATTENTIONS[name], recomputes=recomputes, tokens=1024)
    assert 0.99 < share < 1.15, share
