"""Answers many commands that need no torch in processes forked from one, each as a process of its own would.

Run as `python -m tests.light_commands FOLDER`, where FOLDER/commands.json lists commands as `["python", "-m", "finetune", ...]`
or `["python", "finetune/run.py", ...]`. It writes answers.json there: exit code, stdout, stderr and imported modules of each.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import finetune.cli
import finetune.run  # noqa: F401  # what commands read; it must be light too, since the modules of every answer hold it


def run(command: list[str], folder: Path) -> None:
    """In a process of its own: the command, with its output and at its end its modules in files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    end = os._exit

    def end_recorded(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / "modules").write_text("\n".join(sys.modules))
        end(code)

    os._exit = end_recorded  # type: ignore[assignment]
    sys.argv = command[2:] if command[1] == "-m" else command[1:]
    try:
        if command[1] == "-m":
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[1], run_name="__main__")
        code: Any = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    end_recorded(code)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    answers = []
    for command in json.loads((folder / "commands.json").read_text()):
        process = os.fork()
        if process == 0:
            run(command, folder)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        answers.append(
            [code, *((folder / name).read_text() for name in ("stdout", "stderr", "modules"))]
        )
    (folder / "answers.json").write_text(json.dumps(answers))
