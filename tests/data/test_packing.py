"""Packing: exactly best-fit decreasing, nothing lost, fast."""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.packing import Rows, pack


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Free tokens of every row after best-fit decreasing, in the textbook's way."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(free, length)
        room = free.pop(at) if at < len(free) else capacity
        insort(free, room - length)
    return free


@given(
    st.integers(1, 40).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=80))
    )
)
def test_it_is_best_fit_decreasing_and_loses_nothing(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    packing = pack(np.array(lengths), capacity)
    assert sorted(packing.ids.tolist()) == list(range(len(lengths)))
    filled = np.add.reduceat(np.array(lengths)[packing.ids], packing.starts[:-1])
    assert sorted((capacity - filled).tolist()) == one_by_one(lengths, capacity)


def test_a_million_documents_take_the_steps_of_ten_thousand_and_leave_a_thousandth_of_padding() -> (
    None
):
    """The loop runs over distinct lengths, of which both have about as many."""
    random = np.random.default_rng(0)
    lengths = np.clip(
        np.round(random.lognormal(np.log(400) - 0.5, 1.0, 1_000_000)), 1, 4096
    ).astype(np.int32)
    few, _ = count_lines(lambda: pack(lengths[:10_000], 4096))
    many, packing = count_lines(lambda: pack(lengths, 4096))
    assert lengths.sum() / (len(packing) * 4096) >= 0.999
    assert few < many < 10 * few


def count_lines(action: Callable[[], Rows]) -> tuple[int, Rows]:
    """How many lines of Python `action` runs, and what it returns."""
    lines = 0

    def trace(_frame: object, event: str, _argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = action()
    finally:
        sys.settrace(before)
    return lines, result
