"""Attention over rows whose tokens ranks divide between them."""

from pathlib import Path

import pytest

from tests.models.sequences_on_ranks import CASES
from tests.ranks import launch_ranks

SCRIPT = Path(__file__).with_name("sequences_on_ranks.py")


def test_it_is_that_of_one_rank_and_its_gradients_are() -> None:
    """On 4 ranks, which divide 8 heads, and 8, 4, 2 or 1 key-value heads."""
    outputs = launch_ranks(SCRIPT, ranks=4, timeout=120).check().outputs
    assert [output.count("attention as on one rank") for output in outputs] == [len(CASES)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_a_real_model_has_the_loss_and_gradients_that_transformers_computes(
    ranks: int, shared: Path
) -> None:
    """stories260k, with 8 heads and 4 key-value heads, under activation checkpointing."""
    folder = shared / "models" / "stories260k"
    outputs = launch_ranks(SCRIPT, [str(folder)], ranks=ranks, timeout=120).check().outputs
    print(outputs[0])
    assert outputs[0].count("by transformers' ") == 2
