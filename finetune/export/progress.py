"""How far an export has come, for the person at the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar with bytes and time left, and the function that moves it on; no bar where stderr is no terminal."""
    with tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update
