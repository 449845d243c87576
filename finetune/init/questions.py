"""What `finetune init` asks a person, and what it finds out by itself: the GPUs of this machine. Imports no torch."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from finetune.errors import UserError

T = TypeVar("T")


class EndOfInput(UserError):
    """The person has closed the input: there is nobody left to ask again."""


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """The GPUs that nvidia-smi lists."""

    count: int
    memory: str  # of the smallest, as 79.6GiB


def is_interactive() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def ask(question: str, default: str) -> str:
    """The answer that is typed, or `default` for an empty one. Raises `EndOfInput` at the end of the input."""
    try:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
    except KeyboardInterrupt:
        print()
        raise
    except EOFError:
        print()
        raise EndOfInput("ended before all questions were answered; nothing was written") from None
    return answer or default


def require(given: str | None, flag: str, question: str, default: str = "", *, read: Callable[[str], T]) -> T:
    """What `read` makes of `given`, else of the answer to `question`, which is asked again where `read` raises `UserError`.

    Raises `UserError`: that of `read` for what the flag gave, or naming `flag` where nobody can be asked.
    """
    if given is not None:
        if not given.strip():
            raise UserError(f"{flag}: empty; leave the flag out to be asked, or give a value")
        return read(given)
    if not is_interactive():
        if default:
            return read(default)
        raise UserError(f"{flag}: needed, since there is no terminal to ask at")
    while True:
        answer = ask(question, default)
        if not answer:
            print("an answer is needed; Ctrl-C ends without writing anything")
            continue
        try:
            return read(answer)
        except EndOfInput:
            raise
        except UserError as error:
            print(error)


def find_gpus() -> FoundGpus | None:
    """The GPUs of this machine; None where nvidia-smi finds none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        mebibytes = [int(line) for line in listed.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if not mebibytes:
        return None
    return FoundGpus(len(mebibytes), f"{int(min(mebibytes) / 1024 * 10) / 10:g}GiB")
