"""Given activation checkpointing, when a backward runs, then each k-th decoder layer is computed once more, and no other."""

from typing import Any


def test_every_kth_layer_is_computed_again(loaded: dict[str, Any]) -> None:
    recomputed = loaded["deep"]
    assert recomputed["None"] == [False, False, False, False]
    assert recomputed["1"] == [True, True, True, True]
    assert recomputed["2"] == [True, False, True, False]
    assert recomputed["3"] == [True, False, False, True]
