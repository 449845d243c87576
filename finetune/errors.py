"""What a process says to its user: errors, exit codes, and output that cannot steer the terminal.

Text from outside, such as names of columns, files and tensors, may contain control characters. All
output is cleaned in one place, where it leaves the process; that includes errors, tracebacks and
the warnings of libraries. If nobody can read stderr any more (a closed pipe, a lost terminal), its
text is dropped and the work continues.
"""

import atexit
import errno
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NoReturn, TextIO

EXIT_FAULT = 1  # an error that is no UserError: printed with its traceback
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # Ctrl-C when there was nothing to save
# EX_TEMPFAIL of sysexits.h: a signal stopped the run after a save; the same command resumes it
EXIT_PREEMPTED = 75
SECONDS_FOR_RANK_0 = 5.0  # another rank waits this long before it prints a user's error
# A rank that only lost another rank waits this long, so that the cause is printed first.
SECONDS_FOR_CAUSE = 2.0
# Parts of the messages of gloo and NCCL that mean that the process at the other end has ended.
CONNECTION_CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
# Character -> what is printed in its place. Each control character becomes its picture (U+2400 on).
# DEL and C1 controls, controls of the direction of writing, and lone surrogates become U+FFFD.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)),
    0xFFFD,
)
# Libraries whose warnings at import no user can act on. Transformers imports torchao if it is
# installed; torchao then warns of missing kernels for other GPUs, and its enums cause a deprecation
# warning.
NOISY = ("torchao", "bitsandbytes", "torch.utils._pytree")
STYLES = {"bold": "\033[1m", "dim": "\033[2m"}  # as terminals' escape sequences
# what tqdm writes to move the cursor from one of its bars to another
BETWEEN_BARS = re.compile(r"\n*(?:\x1b\[A)*")

# the disk is full, the quota is used up, or the file system became read-only
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class UserError(Exception):
    """A mistake that the user can fix.

    The text says what is wrong, where, and what to do. A command prints only this text; a script
    that does not catch the error prints Python's traceback above it.

    Several mistakes that are found at once are one error, with a line for each.

    >>> str(UserError("a.yaml:7: learning_rat: no such key; did you mean learning_rate?"))
    'a.yaml:7: learning_rat: no such key; did you mean learning_rate?'
    """

    @classmethod
    def of(cls, problems: Iterable[str]) -> "UserError":
        """Makes one error of all `problems`, a line for each, in their order."""
        return cls("\n".join(problems))


class AgreedError(UserError):
    """A mistake that all ranks raise at the same place, so that none of them waits for another."""


def install_command(extra: str) -> str:
    """Returns the command that installs an optional part of this package, which is on no package
    index.

    >>> install_command("images")
    'pip install -e ".[images]" in a clone of the repository'
    """
    return f'pip install -e ".[{extra}]" in a clone of the repository'


def name_page(page: str) -> str:
    """Returns where to find a page of the documentation; an installed wheel does not contain it.

    >>> name_page("recipes")
    'docs/recipes.md in a clone of the repository'
    """
    return f"docs/{page}.md in a clone of the repository"


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error that is not empty; the error's class if there is
    none.

    >>> first_line(OSError("\\nno space left\\nnor patience")), first_line(KeyError())
    ('no space left', 'KeyError')
    """
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def on_one_line(error: Exception) -> str:
    """Returns a library's whole error message on one line; the error's class if it is empty."""
    return " ".join(str(error).split()) or type(error).__name__


class Preempted(Exception):
    """A signal has stopped the run, and what was to be saved is on disk.

    The text says how to resume.
    """


def printable(text: str) -> str:
    r"""Returns `text` without characters that steer a terminal. Line breaks and tabs stay.

    >>> printable("red: \x1b[31m\n")
    'red: ␛[31m\n'
    """
    return text.translate(PICTURES)


class CleanStream:
    """A text stream that makes all text `printable` before it writes it.

    Only tqdm's progress bars may move the cursor.

    `is_optional`: whether an `OSError` of the stream (a closed pipe, a full disk) drops the text
    instead of being raised.
    """

    def __init__(self, stream: TextIO, *, is_optional: bool = False) -> None:
        self.unfiltered = stream
        self._is_optional = is_optional
        self.has_failed = False  # whether a write or a flush has raised an `OSError`

    def write(self, text: str) -> int:
        may_move_cursor = _is_bar(sys._getframe(1))  # the frame that called this method
        if not (may_move_cursor and BETWEEN_BARS.fullmatch(text)):
            start = "\r" if may_move_cursor and text.startswith("\r") else ""
            text = start + printable(text.removeprefix(start))
        with self._noting_failure():
            self.unfiltered.write(text)
        return len(text)

    def flush(self) -> None:
        with self._noting_failure():
            self.unfiltered.flush()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Records an `OSError` of the block; raises it unless the stream is optional."""
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


def _is_bar(caller: FrameType) -> bool:
    """Whether the code of the frame `caller` is tqdm's, which draws progress bars."""
    return str(caller.f_globals.get("__name__", "")).startswith("tqdm.")


@contextmanager
def clean_output() -> Iterator[None]:
    """Makes stdout and stderr write only `printable` text in this block."""
    stdout: Any = sys.stdout
    stderr: Any = sys.stderr
    clean_stdout: Any = CleanStream(stdout)
    clean_stderr: Any = CleanStream(stderr, is_optional=True)
    sys.stdout, sys.stderr = clean_stdout, clean_stderr
    try:
        yield
    finally:
        # The block may have put other streams in their place; those stay.
        if sys.stdout is clean_stdout:
            sys.stdout = stdout
        if sys.stderr is clean_stderr:
            sys.stderr = stderr
        try:
            stderr.flush()
        except OSError:
            # Else the interpreter's last flush would fail, and with it the process.
            discard(stderr)


def discard(stream: TextIO) -> None:
    """Points a stream that nobody reads any more at the null device."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, stream.fileno())
    os.close(null)


@clean_output()
def exit_code(main: Callable[[], object]) -> int:
    """Runs `main`, prints an error that it raises on stderr, and returns the exit code.

    A mistake that the user can fix is printed without a traceback. Under a launcher every rank
    makes the same mistake. Rank 0 prints it at once, and the launcher then ends the other ranks.
    They wait SECONDS_FOR_RANK_0 for that, and then print their own, in case rank 0 made none.
    """
    rank = os.environ.get("RANK", "0")
    # Rust code reads it at its first panic. A backtrace of sixty lines would hide our sentence.
    os.environ["RUST_BACKTRACE"] = "0"
    try:
        main()
    except Preempted as stop:  # all ranks have agreed on it and saved: one message is enough
        if rank == "0":
            _say(stop)
        return EXIT_PREEMPTED
    except UserError as mistake:
        if rank != "0":
            time.sleep(SECONDS_FOR_RANK_0)
        _say(f"rank {rank}: {mistake}" if rank != "0" else mistake)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if rank == "0":
            _say("interrupted")
        return EXIT_INTERRUPTED
    except Exception as fault:
        if isinstance(fault, OSError) and fault.errno in DISK_FAULTS:
            _say(
                f"{fault.filename or 'a file'}: cannot be written ({fault.strerror}); make room, "
                "or let it be written, and start the same command again: it continues from what "
                "was saved"
            )
            return EXIT_USER_ERROR
        _print_fault(fault, rank)
        return EXIT_FAULT
    except BaseException as fault:
        if type(fault).__name__ != "PanicException":  # the exception of Rust code that panics
            raise
        _say(
            f"a library's own code failed: {fault}; if it is a tokenizer's, a pattern in its "
            "tokenizer.json cannot be applied to this text"
        )
        return EXIT_USER_ERROR
    return 0


def end_process(code: int) -> NoReturn:
    """Ends this process with `code`, without the interpreter's own shutdown.

    In that shutdown, a rank that failed could wait forever for its threads or for other ranks. A
    rank that succeeded was sometimes aborted there (SIGABRT, no Python frame), while gloo's threads
    were still freeing tensors.
    """
    if code == 0:
        atexit._run_exitfuncs()  # what libraries still have to do, such as a tracker's upload
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_loss_of_peer(fault: BaseException) -> bool:
    """Whether a collective failed because another rank ended or did not answer.

    The error of that other rank is then the cause.
    """
    return "gloo" in str(fault) or type(fault).__name__ in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    )


def _say(text: object) -> None:
    """Prints a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def _print_fault(fault: Exception, rank: str) -> None:
    """Prints an error that is no mistake of the user: with its traceback, or as the loss of another
    rank.
    """
    if not is_loss_of_peer(fault):
        _say(f"rank {rank}: {''.join(traceback.format_exception(fault))}")
        return
    time.sleep(SECONDS_FOR_CAUSE)
    reason = str(fault).splitlines()[0]
    cause = "that rank's own error is the cause"
    if any(mark in str(fault) for mark in CONNECTION_CLOSED):
        # The other rank has ended, so that this rank's stack says nothing about the cause.
        _say(f"rank {rank}: another rank ended; {cause} ({reason})")
        return
    # The other rank may hang: where this one waited for it is a hint. The last calls are enough.
    stack = "".join(traceback.format_list(traceback.extract_tb(fault.__traceback__)[-12:]))
    _say(
        f"rank {rank}: another rank ended, or did not answer within timeout_seconds; {cause} "
        f"({reason}). This one waited at:\n{stack}"
    )


@contextmanager
def progress_bar(label: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Shows a bar with bytes and time left in this block, if stderr is a terminal.

    Yields a function that advances the bar by a number of bytes.
    """
    from tqdm import tqdm

    with tqdm(
        desc=label, total=total_bytes, unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        yield bar.update


def unfiltered(stream: TextIO) -> TextIO:
    """Returns the stream below a `CleanStream`, for text that is `printable` except for our own
    colors; any other stream as it is.
    """
    if isinstance(stream, CleanStream):
        return stream.unfiltered
    return stream


def print_styled(text: str, style: Literal["bold", "dim"]) -> None:
    """Prints a line, in `style` if stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        print(text)
        return
    print(f"{STYLES[style]}{printable(text)}\033[0m", file=unfiltered(sys.stdout))


def set_library_environment(*, deterministic: bool = False) -> None:
    """Sets the environment variables that libraries of a training process read, except those that
    the user has set.

    Call it before torch is imported.
    """
    silence_libraries()
    # PYTORCH_CUDA_ALLOC_CONF is the older name: a user's value there must not be overruled.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Rows differ in length. Without segments that can grow, the GPU's memory is soon split into
        # pieces that are too small for any of them.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers


def silence_libraries() -> None:
    """Hides the warnings of the libraries in NOISY, but not their errors.

    Call it before they are imported.
    """
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = None
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None
