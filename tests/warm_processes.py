"""Scripts run in processes forked from one that has imported everything once: a start takes a tenth of a second, not six.

For tests in which the imports are not the point. `multiprocessing`'s fork server is that process: it has no threads, which
whoever forks must not have. What a library reads from the environment when it is imported is the server's: a script that
needs other values (HF_HUB_OFFLINE, OMP_NUM_THREADS) is for `subprocess`.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WARM_LAUNCH = "FINETUNE_TESTS_WARM_LAUNCH"  # in the environment of a warm launcher whose ranks are to be warm too


class WarmProcess:
    """What tests use of `subprocess.Popen`, over a process of the fork server: `python ARGUMENTS`, its output in files."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        *,
        stdin: Path = Path(os.devnull),
        cwd: Path | None = None,
    ) -> None:
        files = [str(path) for path in (stdin, stdout, stderr)]
        target = partial(_run, tuple(arguments), dict(env), files, str(cwd or Path.cwd()))
        self._process = start_server().Process(target=target)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a script in a warm process", timeout or 0.0)
        return code


class WarmRank(WarmProcess):
    """What torchrun's agent uses of `subprocess.Popen` to start a rank, which writes where the agent does."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        words = [word for word in args[1:] if word != "-u"]
        super().__init__(
            words, env, Path("/proc/self/fd/1").readlink(), Path("/proc/self/fd/2").readlink()
        )


class WarmCommand:
    """What `export.reload_process` uses of `subprocess.Popen`: a Python command with a pipe to its stdin, and its stderr."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        os.mkfifo(folder / "stdin")
        self.stdin = os.fdopen(
            os.open(folder / "stdin", os.O_RDWR), "w"
        )  # O_RDWR: does not wait for the reader
        self._errors = folder / "stderr"
        self._process = WarmProcess(
            command[1:], env, Path(os.devnull), self._errors, stdin=folder / "stdin"
        )

    def __enter__(self) -> "WarmCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.wait()
        self.stdin.close()
        self._folder.cleanup()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def communicate(self) -> tuple[str, str]:
        self._process.wait()
        return "", self._errors.read_text()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)


def freeze_imports() -> None:
    """Keeps Python's garbage collector from what is imported by now: it walks through half a million objects in 0.3 s.

    A run thaws at its end all that is frozen (training/loop.py); here it stays frozen.
    """
    gc.enable()
    gc.freeze()
    vars(gc)["unfreeze"] = lambda: None


@cache
def start_server() -> Any:
    """Begins with the imports, beside the caller. Returns the context that makes processes."""
    from tests.ranks import environment

    context = multiprocessing.get_context("forkserver")
    if multiprocessing.parent_process() is not None:  # a warm process: its parent is the server
        vars(forkserver._forkserver)["ensure_running"] = lambda: None
        return context
    context.set_forkserver_preload(["pytest", "tests.warm_imports"])
    before = dict(os.environ)
    clean = environment()
    try:
        os.environ.clear()
        os.environ |= clean
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


def warm_reload() -> Any:
    """In place of `subprocess` in export/reload_process.py and torch_files.py: the processes that open an export or a file of torch's
    do not import all again."""
    return SimpleNamespace(
        Popen=WarmCommand, run=_run_command, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )


def _run_command(
    command: Sequence[str], *, env: Mapping[str, str], **_: Any
) -> "subprocess.CompletedProcess[bytes]":
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        code = WarmProcess(
            [word for word in command[1:] if word != "-P"], env, stdout, stderr
        ).wait()
        said = [path.read_bytes() if path.exists() else b"" for path in (stdout, stderr)]
    return subprocess.CompletedProcess(command, code, *said)


def _read_hub_again() -> None:
    """What huggingface_hub has read from the environment when it was imported."""
    from huggingface_hub import constants

    constants.ENDPOINT = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    constants.HF_HUB_DISABLE_XET = os.environ.get("HF_HUB_DISABLE_XET") == "1"


def _run(arguments: tuple[str, ...], env: dict[str, str], files: list[str], cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in what a shell starts in the background
    for number, path in enumerate(files):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, flags, 0o666), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ |= env
    _read_hub_again()
    freeze_imports()
    if (
        int(env.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" not in env
    ):  # whose agent has opened the store
        from tests.ranks import open_stores

        open_stores()
    if arguments[:2] != ("-m", "finetune.export.verify"):
        from finetune.export import reload_process

        vars(reload_process)["subprocess"] = warm_reload()
    if WARM_LAUNCH in env and arguments[:3] == ("-m", "finetune", "launch"):
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        vars(subprocess_handler)["Popen"] = WarmRank
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
