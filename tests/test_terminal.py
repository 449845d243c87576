"""Text that others chose never steers the terminal that shows it; our own bars and colors do."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from finetune.cli import main
from finetune.errors import CleanStream, exit_code, printable
from tests.ranks import ROOT, environment

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def say_and_fail() -> None:
    print(f"said {ESCAPES}")
    raise ValueError(f"library {ESCAPES}")


def test_no_name_of_anything_steers_the_terminal(
    tiny_recipe: Callable[..., Path],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []

    def answer(code: int, *arguments: str) -> str:
        capsys.readouterr()  # what the fixtures said
        assert main(arguments) == code
        written = capsys.readouterr()
        said.append(written.out + written.err)
        return said[-1]

    assert "learning_rat" in answer(
        2, "plan", "--recipe", str(tiny_recipe()), f"learning_rat{ESCAPES}=1"
    )
    (tmp_path / "column.jsonl").write_text(json.dumps({f"column{ESCAPES}": "text"}) + "\n")
    file = str(tmp_path / f"file{ESCAPES}.jsonl")
    (tmp_path / "failing.jinja").write_text(
        "{{ raise_exception('template ESCAPES') }}".replace("ESCAPES", ESCAPES)
    )
    recipes: list[dict[str, object]] = [
        {"datasets": [{"path": str(tmp_path / "column.jsonl")}]},
        {"datasets": [{"path": file}]},
        {"chat_template": str(tmp_path / "failing.jinja")},
    ]
    for number, keys in enumerate(recipes):
        assert re.search(
            "column|file|template",
            answer(2, "inspect", "--recipe", str(tiny_recipe(f"r{number}", **keys))),
        )
    foreign = tiny_llama("foreign")
    save_file({f"tensor{ESCAPES}": torch.ones(2)}, foreign / "model.safetensors")
    assert "tensor" in answer(2, "export", str(foreign), "--output", str(tmp_path / "out"))
    assert exit_code(say_and_fail) == 1
    written = capsys.readouterr()
    said += [written.out, written.err]
    assert "said ␛]0;owned␇␛[2J\ufffd31m\ufffd\n" in said[-2]
    assert "library ␛]0;owned" in said[-1]
    for text in said:
        assert printable(text.replace("\r", "")) == text.replace("\r", "")  # a bar's


@pytest.mark.slow
def test_a_run_with_nobody_to_read_its_stderr_trains_and_exports(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "finetune/run.py",
        "--recipe",
        str(tiny_recipe(max_steps=1, exact_match_samples=0)),
    ]
    assert exit_code_without_stderr(command, *os.pipe()) == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_a_closed_terminal_fails_no_command() -> None:
    program = "import sys; from finetune.errors import exit_code; sys.exit(exit_code(lambda: print('x', file=sys.stderr)))"
    assert exit_code_without_stderr([sys.executable, "-c", program], *os.openpty()) == 0


def test_a_full_disk_behind_stdout_is_one_sentence() -> None:
    command = [sys.executable, "-m", "finetune", "plan", "--num-processes", "1"]
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    said = "stdout: cannot be written: No space left on device; send the output elsewhere, or make room\n"
    assert (finished.returncode, finished.stderr) == (2, said)


def exit_code_without_stderr(command: list[str], read_end: int, write_end: int) -> int:
    """Of a process that writes its stderr to `write_end`, whose other end is closed."""
    os.close(read_end)
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment(), stderr=write_end, stdout=subprocess.DEVNULL
        ).returncode
    finally:
        os.close(write_end)


def test_bars_still_move_and_messages_do_not() -> None:
    stream = io.StringIO()
    clean = CleanStream(stream)
    with (
        tqdm(total=2, file=clean, desc="outer") as bar,
        tqdm(total=2, file=clean, position=1) as inner,
    ):
        inner.update()
        bar.update()
    direct = io.StringIO()
    with (
        tqdm(total=2, file=direct, desc="outer") as bar,
        tqdm(total=2, file=direct, position=1) as inner,
    ):
        inner.update()
        bar.update()
    assert controls(stream.getvalue()) == controls(direct.getvalue())
    assert "\x1b[A" in stream.getvalue()
    print("a.jsonl: \x1b[A\rforged", file=CleanStream(forged := io.StringIO()))
    assert controls(forged.getvalue()) == {"\n"}
    for piece in ("\x1b[A", "\rSPOOFED", "\n\n\x1b[A"):  # tokens of a model, as chat prints them
        print(piece, end="", file=CleanStream(forged := io.StringIO()))
        assert controls(forged.getvalue()) <= {"\n"}


def controls(text: str) -> set[str]:
    return set(re.findall(r"\x1b\[.|[\x00-\x1a]", text))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_a_sentence_wherever_it_shows(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever writes: each place of its own would be forgotten somewhere, as finished.json was."""

    def fail() -> None:
        raise OSError(number, os.strerror(number), "run/finished.json")

    assert exit_code(fail) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"run/finished.json: cannot be written ({os.strerror(number)}); make room"
    )
    assert len(said.splitlines()) == 1
