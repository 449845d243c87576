"""Blocks computed in another thread, a few ahead of whoever takes them."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

BLOCKS_AHEAD = 2

Block = TypeVar("Block")


def computed_ahead(compute: Callable[..., Block], parts: Iterable[tuple[Any, ...]]) -> Iterator[Block]:
    """`compute(*part)` for each part, in order: the next ones are computed while the caller works on this one.

    >>> list(computed_ahead(pow, [(2, 3), (3, 2)]))
    [8, 9]
    """
    remaining = iter(parts)
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: list[Future[Block]] = [pool.submit(compute, *part) for part in islice(remaining, BLOCKS_AHEAD)]
        try:
            while waiting:
                block = waiting.pop(0).result()
                waiting += [pool.submit(compute, *part) for part in islice(remaining, 1)]
                yield block
        finally:
            for future in waiting:
                future.cancel()
