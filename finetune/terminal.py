"""What a process writes to its terminal, on which no text from outside (column, file, tensor names) may act.

It is cleaned in one place, where it leaves the process: errors, tracebacks and the warnings of libraries included. What
goes to stderr is only shown: where nobody reads it any more (a closed pipe, a lost terminal), it is dropped and the
work continues.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, TextIO

# Escape becomes its picture, as do the other control characters; C1 controls, overrides of the direction of writing and
# lone surrogates become the sign for what cannot be shown.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)), 0xFFFD
)
# Libraries whose warnings at import no user can act on: torchao, which transformers imports wherever it is installed,
# names kernels for other GPUs that it does not find, and its own enums then run into a deprecation.
NOISY = ("torchao", "bitsandbytes", "torch.utils._pytree")
STYLES = {"bold": "\033[1m", "dim": "\033[2m"}
BETWEEN_BARS = re.compile(r"\n*(?:\x1b\[A)*")  # all that tqdm writes to move from one of its bars to another


def printable(text: str) -> str:
    r"""`text` without anything that steers a terminal; lines and tabs stay.

    >>> printable("red: \x1b[31m\n")
    'red: ␛[31m\n'
    """
    return text.translate(PICTURES)


class CleanStream:
    """A text stream that writes only what is `printable`; progress bars may return to the beginning of a line.

    `is_optional`: an `OSError` of the stream (a closed pipe, a full disk) drops the text and is not raised.
    """

    def __init__(self, stream: TextIO, *, is_optional: bool = False) -> None:
        self.unfiltered = stream
        self._is_optional = is_optional
        self.has_failed = False  # a write, or what it left in the buffer

    def write(self, text: str) -> int:
        moves = _is_of_bar(sys._getframe(1))
        if not (moves and BETWEEN_BARS.fullmatch(text)):
            start = "\r" if moves and text.startswith("\r") else ""
            text = start + printable(text.removeprefix(start))
        with self._noting_failure():
            self.unfiltered.write(text)
        return len(text)

    def flush(self) -> None:
        with self._noting_failure():
            self.unfiltered.flush()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.has_failed = True
            if not self._is_optional:
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def _is_of_bar(caller: FrameType) -> bool:
    """Whether tqdm writes: it alone may move the cursor, whatever the text says that others print."""
    return str(caller.f_globals.get("__name__", "")).startswith("tqdm.")


@contextmanager
def clean_output() -> Iterator[None]:
    """In this block, stdout and stderr write only what is `printable`."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    clean: tuple[Any, Any] = CleanStream(sys.stdout), CleanStream(sys.stderr, is_optional=True)
    sys.stdout, sys.stderr = clean
    try:
        yield
    finally:
        if sys.stdout is clean[0]:
            sys.stdout = before[0]
        if sys.stderr is clean[1]:
            sys.stderr = before[1]
        try:
            before[1].flush()
        except OSError:  # the interpreter's last flush would fail the process
            discard(before[1])


def discard(stream: TextIO) -> None:
    """Points a stream at the null device: nobody reads it any more."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def progress_bar(label: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar of bytes and time left on stderr, as a function that advances it; none if that is no terminal."""
    from tqdm import tqdm

    with tqdm(desc=label, total=total_bytes, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


def unfiltered(stream: TextIO) -> TextIO:
    """The stream for a text that is `printable` but for colors of our own."""
    return stream.unfiltered if isinstance(stream, CleanStream) else stream


def print_styled(text: str, style: Literal["bold", "dim"]) -> None:
    """Prints a line, in `style` where stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        print(text)
        return
    print(f"{STYLES[style]}{printable(text)}\033[0m", file=unfiltered(sys.stdout))


def set_library_environment(*, deterministic: bool = False) -> None:
    """Sets what libraries read from the environment of a process that trains, where the user has set nothing.

    To be called before torch is imported.
    """
    silence_libraries()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # that older name would be overruled
        # Rows differ in length: without segments that grow, a GPU's memory is soon in pieces that fit none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers


def silence_libraries() -> None:
    """Hides the warnings of NOISY libraries; their errors are shown. To be called before they are imported."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
