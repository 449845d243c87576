"""Best-fit-decreasing packing of documents into rows, exact and fast."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rows:
    """Which documents share a row. Returned by `pack`, `sampler.arrange_epoch`."""

    ids: NDArray[np.int64]  # [documents], row after row
    starts: NDArray[np.int64]  # [rows + 1]: row r holds ids[starts[r]:starts[r + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """int64[documents of the row]: their ids."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def take(self, order: NDArray[np.int64]) -> "Rows":
        """The rows in another order."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        source = np.repeat(self.starts[:-1][order] - starts[:-1], sizes) + np.arange(len(self.ids))
        return Rows(self.ids[source], starts)

    def expand(self, size: int) -> "Rows":
        """The rows with the documents of each group in place of the group."""
        return self if size == 1 else Rows(expand_groups(self.ids, size), self.starts * size)


def expand_groups(groups: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The documents of `groups`, in that order; group g is documents g x size to (g + 1) x size - 1.

    >>> expand_groups(np.array([3, 0]), 2)
    array([6, 7, 0, 1])
    """
    return (groups[:, None] * size + np.arange(size)).reshape(-1)


def pack(lengths: NDArray[np.integer], capacity: int) -> Rows:
    """Packs documents of `lengths` tokens (each 1 to `capacity`) into rows of `capacity` tokens, best fit decreasing.

    Longest document first, each into the fullest row that still has room for it, a new row where none has; documents
    of equal length go in their order in `lengths` (Johnson 1974: at most 11/9 of the fewest rows possible, plus one).
    The result is exactly that of the one-by-one algorithm, but documents of one length and rows of one free space are
    moved together, so that the loop below runs over distinct lengths: a million documents take a fraction of a second.

    >>> pack(np.array([2, 6, 3, 5]), 8)
    Rows(ids=array([1, 0, 3, 2]), starts=array([0, 2, 4]))
    """
    if len(lengths) == 0:
        return Rows(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if int(lengths.min()) < 1 or int(lengths.max()) > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {capacity}")
    narrow = np.uint16 if capacity < 2**16 else np.uint32  # numpy sorts 16-bit keys by radix
    order = np.argsort((capacity - lengths).astype(narrow), kind="stable")
    moves = _plan_moves(np.bincount(lengths, minlength=capacity + 1), capacity)
    # Each move puts `each` documents into each of `rows` rows from `first` on; spelled out, document by document:
    first, rows, each = moves.T
    counts = rows * each
    move_of = np.repeat(np.arange(len(moves)), counts)
    within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    row_of = first[move_of] + within // each[move_of]
    by_row = np.argsort(row_of, kind="stable")
    row_sizes = np.bincount(row_of)
    return Rows(order[by_row].astype(np.int64), np.concatenate(([0], np.cumsum(row_sizes))))


def _plan_moves(count_of_length: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """int64[moves, 3]: (first row, rows, documents put into each of them), for documents from the longest on.

    Rows with the same free space are kept as ranges of row numbers. The fullest rows with room, `free` tokens each,
    take documents of `length` until less than `length` is left in them: after its first document such a row is
    fuller still, so best fit stays with it.
    """
    moves: list[tuple[int, int, int]] = []
    ranges: dict[int, list[tuple[int, int]]] = {}  # free tokens -> ranges (first row, rows)
    spaces: list[int] = []  # the keys of `ranges`, ascending
    opened = 0

    def put(free: int, first: int, rows: int) -> None:
        if free == 0 or rows == 0:
            return
        if free not in ranges:
            insort(spaces, free)
            ranges[free] = []
        ranges[free].append((first, rows))

    for length in np.flatnonzero(count_of_length)[::-1].tolist():
        left = int(count_of_length[length])
        while left:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                free = spaces[at]
                first, rows = ranges[free].pop()
                if not ranges[free]:
                    del ranges[free], spaces[at]
            else:
                free, first, rows = capacity, opened, -(-left // (capacity // length))
                opened += rows
            each = free // length
            full = min(rows, left // each)
            if full:
                moves.append((first, full, each))
                put(free - each * length, first, full)
                left -= full * each
            if full < rows and left:  # fewer than `each` documents are left: one row takes them
                moves.append((first + full, 1, left))
                put(free - left * length, first + full, 1)
                full, left = full + 1, 0
            put(free, first + full, rows - full)
    return np.array(moves, dtype=np.int64)
