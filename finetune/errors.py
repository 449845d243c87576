"""Errors that the user can fix, the exit codes, and how a process reports its end."""

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from finetune.terminal import clean_output

EXIT_FAULT = 1  # an error that is no UserError: printed with its traceback
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # Ctrl-C where there is nothing to save
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal after saving; start again to resume
SECONDS_FOR_RANK_0 = 5.0
SECONDS_FOR_CAUSE = 2.0  # a rank that only lost another waits before it reports, so that the cause is printed first
# In the messages of gloo and NCCL where the process at the other end has ended.
CONNECTION_CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


class UserError(Exception):
    """A mistake that the user can fix. Its text is all that is shown: what is wrong, where, and what to do.

    Several mistakes found at once are one error, a line for each.

    >>> str(UserError("a.yaml:7: learning_rat: no such key; did you mean learning_rate?"))
    'a.yaml:7: learning_rat: no such key; did you mean learning_rate?'
    """

    @classmethod
    def of(cls, problems: Iterable[str]) -> "UserError":
        """One error with all `problems`, in the order given."""
        return cls("\n".join(problems))


class Preempted(Exception):
    """A signal asked the run to stop, and its checkpoint is on disk. Its text says how to resume."""


@clean_output()
def exit_code(main: Callable[[], object]) -> int:
    """Runs `main` and returns the exit code; a mistake that the user can fix is one message on stderr.

    Under a launcher every rank makes the same mistake, and rank 0 prints it. Another rank prints its own once rank 0
    has had the time to fail too, since the launcher ends all ranks with the first.
    """
    rank = os.environ.get("RANK", "0")
    os.environ["RUST_BACKTRACE"] = "0"  # read at the first panic: sixty lines would stand in front of our sentence
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
        _print_fault(fault, rank)
        return EXIT_FAULT
    except BaseException as fault:
        if type(fault).__name__ != "PanicException":  # which Rust code raises
            raise
        _say(
            f"a library's own code failed: {fault}; if it is a tokenizer's, a pattern in its tokenizer.json cannot be "
            "applied to this text"
        )
        return EXIT_USER_ERROR
    return 0


def end_process(code: int) -> NoReturn:
    """Ends this process with `code`, without the interpreter's own shutdown.

    A rank that failed waits for nothing there: its threads and its peers may never answer. One that is done has been
    aborted there now and then (SIGABRT, no Python frame), while threads of gloo were still freeing their tensors.
    """
    if code == 0:
        atexit._run_exitfuncs()  # what libraries have left to do, a tracker's upload say
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_loss_of_peer(fault: BaseException) -> bool:
    """Whether a collective failed because another rank ended or did not answer: then that rank's error is the cause."""
    return "gloo" in str(fault) or type(fault).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")


def _say(text: object) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_fault(fault: Exception, rank: str) -> None:
    if not is_loss_of_peer(fault):
        _say(f"rank {rank}: {''.join(traceback.format_exception(fault))}")
        return
    time.sleep(SECONDS_FOR_CAUSE)
    reason, cause = str(fault).splitlines()[0], "that rank's own error is the cause"
    if any(mark in str(fault) for mark in CONNECTION_CLOSED):  # then where this one was says nothing
        _say(f"rank {rank}: another rank ended; {cause} ({reason})")
        return
    stack = "".join(traceback.format_list(traceback.extract_tb(fault.__traceback__)[-12:]))
    _say(
        f"rank {rank}: another rank ended, or did not answer within timeout_seconds; {cause} ({reason}). This one "
        f"waited at:\n{stack}"
    )
