"""What a process says to its user: errors, exit codes, and output that nothing from outside may act
on.

No text from outside (column, file, tensor names) steers the terminal: output is cleaned in one
place, where it leaves the process, errors, tracebacks and the warnings of libraries included. What
goes to stderr is only shown: where nobody reads it any more (a closed pipe, a lost terminal), it is
dropped and the work continues.
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
EXIT_INTERRUPTED = 130  # Ctrl-C where there is nothing to save
# EX_TEMPFAIL of sysexits.h: stopped by a signal after saving; start again to resume
EXIT_PREEMPTED = 75
SECONDS_FOR_RANK_0 = 5.0
# a rank that only lost another waits before it reports, so that the cause is printed first
SECONDS_FOR_CAUSE = 2.0
# In the messages of gloo and NCCL where the process at the other end has ended.
CONNECTION_CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
# Escape becomes its picture, as do the other control characters; C1 controls, overrides of the
# direction of writing and lone surrogates become the sign for what cannot be shown.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)),
    0xFFFD,
)
# Libraries whose warnings at import no user can act on: torchao, which transformers imports
# wherever it is installed, names kernels for other GPUs that it does not find, and its own enums
# then run into a deprecation.
NOISY = ("torchao", "bitsandbytes", "torch.utils._pytree")
STYLES = {"bold": "\033[1m", "dim": "\033[2m"}
# all that tqdm writes to move from one of its bars to another
BETWEEN_BARS = re.compile(r"\n*(?:\x1b\[A)*")

# a full disk, and one that became read-only
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class UserError(Exception):
    """A mistake that the user can fix.

    Its text says what is wrong, where, and what to do. A command shows nothing else; in a script it
    comes last, below Python's traceback, unless it is caught.

    Several mistakes found at once are one error, a line for each.

    >>> str(UserError("a.yaml:7: learning_rat: no such key; did you mean learning_rate?"))
    'a.yaml:7: learning_rat: no such key; did you mean learning_rate?'
    """

    @classmethod
    def of(cls, problems: Iterable[str]) -> "UserError":
        """One error with all `problems`, in the order given."""
        return cls("\n".join(problems))


class AgreedError(UserError):
    """A mistake that all ranks have met at the same place: none waits for another."""


def install_command(extra: str) -> str:
    """The command that installs an optional part of this package. It is on no package index.

    >>> install_command("images")
    'pip install -e ".[images]" in a clone of the repository'
    """
    return f'pip install -e ".[{extra}]" in a clone of the repository'


def name_page(page: str) -> str:
    """Where a page of documentation is found. An installed wheel has none.

    >>> name_page("recipes")
    'docs/recipes.md in a clone of the repository'
    """
    return f"docs/{page}.md in a clone of the repository"


def first_line(error: Exception) -> str:
    """The first line of a library's error; the error's class where it says nothing.

    >>> first_line(OSError("\\nno space left\\nnor patience")), first_line(KeyError())
    ('no space left', 'KeyError')
    """
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def on_one_line(error: Exception) -> str:
    """All that a library's error says, on one line; the error's class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class Preempted(Exception):
    """A signal asked the run to stop, and its checkpoint is on disk.

    Its text says how to resume.
    """


def printable(text: str) -> str:
    r"""`text` without anything that steers a terminal; lines and tabs stay.

    >>> printable("red: \x1b[31m\n")
    'red: ␛[31m\n'
    """
    return text.translate(PICTURES)


class CleanStream:
    """A text stream that writes only what is `printable`; progress bars may return to the beginning
    of a line.

    `is_optional`: an `OSError` of the stream (a closed pipe, a full disk) drops the text and is not
    raised.
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
    """Whether tqdm writes: it alone may move the cursor, whatever the text says that others
    print.
    """
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


@clean_output()
def exit_code(main: Callable[[], object]) -> int:
    """Runs `main` and returns the exit code; a mistake that the user can fix is one message on
    stderr.

    Under a launcher every rank makes the same mistake, and rank 0 prints it. Another rank prints
    its own once rank 0 has had the time to fail too, since the launcher ends all ranks with the
    first.
    """
    rank = os.environ.get("RANK", "0")
    # read at the first panic: sixty lines would stand in front of our sentence
    os.environ["RUST_BACKTRACE"] = "0"
    try:
        main()
    except Preempted as stop:  # every rank has agreed on it and saved
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
        if type(fault).__name__ != "PanicException":  # which Rust code raises
            raise
        _say(
            f"a library's own code failed: {fault}; if it is a tokenizer's, a pattern in its "
            "tokenizer.json cannot be applied to this text"
        )
        return EXIT_USER_ERROR
    return 0


def end_process(code: int) -> NoReturn:
    """Ends this process with `code`, without the interpreter's own shutdown.

    A rank that failed waits for nothing there: its threads and its peers may never answer. One that
    is done has been aborted there now and then (SIGABRT, no Python frame), while threads of gloo
    were still freeing their tensors.
    """
    if code == 0:
        atexit._run_exitfuncs()  # what libraries have left to do, a tracker's upload say
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_loss_of_peer(fault: BaseException) -> bool:
    """Whether a collective failed because another rank ended or did not answer: then that rank's
    error is the cause.
    """
    return "gloo" in str(fault) or type(fault).__name__ in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    )


def _say(text: object) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_fault(fault: Exception, rank: str) -> None:
    if not is_loss_of_peer(fault):
        _say(f"rank {rank}: {''.join(traceback.format_exception(fault))}")
        return
    time.sleep(SECONDS_FOR_CAUSE)
    reason = str(fault).splitlines()[0]
    cause = "that rank's own error is the cause"
    # then where this one was says nothing
    if any(mark in str(fault) for mark in CONNECTION_CLOSED):
        _say(f"rank {rank}: another rank ended; {cause} ({reason})")
        return
    stack = "".join(traceback.format_list(traceback.extract_tb(fault.__traceback__)[-12:]))
    _say(
        f"rank {rank}: another rank ended, or did not answer within timeout_seconds; {cause} "
        f"({reason}). This one waited at:\n{stack}"
    )


@contextmanager
def progress_bar(label: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar of bytes and time left on stderr, as a function that advances it; none if that is no
    terminal.
    """
    from tqdm import tqdm

    with tqdm(
        desc=label, total=total_bytes, unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        yield bar.update


def unfiltered(stream: TextIO) -> TextIO:
    """The stream for a text that is `printable` but for colors of our own."""
    if isinstance(stream, CleanStream):
        return stream.unfiltered
    return stream


def print_styled(text: str, style: Literal["bold", "dim"]) -> None:
    """Prints a line, in `style` where stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        print(text)
        return
    print(f"{STYLES[style]}{printable(text)}\033[0m", file=unfiltered(sys.stdout))


def set_library_environment(*, deterministic: bool = False) -> None:
    """Sets what libraries read from the environment of a process that trains, where the user has
    set nothing.

    To be called before torch is imported.
    """
    silence_libraries()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # that older name would be overruled
        # Rows differ in length: without segments that grow, a GPU's memory is soon in pieces that
        # fit none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers


def silence_libraries() -> None:
    """Hides the warnings of NOISY libraries; their errors are shown.

    To be called before they are imported.
    """
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = None
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None
