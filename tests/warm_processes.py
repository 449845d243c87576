"""Scripts run in processes forked from one that has imported everything once: a start takes a tenth of a second, not six.

For tests in which the imports are not the point. `multiprocessing`'s fork server is that process: it has no threads, which
whoever forks must not have. What a library reads from the environment when it is imported is the server's: a script that
needs other values (HF_HUB_OFFLINE, OMP_NUM_THREADS) is for `subprocess`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


class WarmProcess:
    """What tests use of `subprocess.Popen`, over a process of the fork server: `python ARGUMENTS`, its output in files."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], stdout: Path, stderr: Path, cwd: Path | None = None
    ) -> None:
        target = partial(_run, tuple(arguments), dict(env), str(stdout), str(stderr), str(cwd or Path.cwd()))
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


@cache
def start_server() -> Any:
    """Begins with the imports, beside the caller. Returns the context that makes processes."""
    from tests.ranks import environment

    context = multiprocessing.get_context("forkserver")
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


def _run(arguments: tuple[str, ...], env: dict[str, str], stdout: str, stderr: str, cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ |= env
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
