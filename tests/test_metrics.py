"""What a resumed run shows, compared with one that was not stopped."""

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import shutil
import struct
import sys
import termios
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import CleanStream, UserError
from finetune.files.json_files import append_json_lines
from finetune.files.run_files import drop_later_lines
from finetune.training.metrics import MetricsLog

LOSSES = (5.0, 4.0, float("nan"), 3.0, 2.5, 2.0)


def _line(step: int) -> dict[str, Any]:
    numbers = {
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_second": 100.0,
        "peak_memory_bytes": 2**30,
    }
    return {"step": step, "loss": LOSSES[step - 1], "mfu": None} | numbers


def _smoothed(path: Path, start: int, stop: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    log = MetricsLog(path, len(LOSSES), start)
    for step in range(start + 1, stop + 1):
        log.write({"step": step, "eval_loss": 9.0})
        log.step(_line(step))
    log.close()
    return re.findall(r"\(smoothed (\S+)\)", capsys.readouterr().err)


def test_the_smoothed_loss_continues_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _smoothed(tmp_path / "whole.jsonl", 0, 6, capsys)
    broken = tmp_path / "broken.jsonl"
    before = _smoothed(broken, 0, 5, capsys)  # the last checkpoint was that of step 4
    with broken.open("a") as file:
        file.write('{"step": 6, "lo')
    after = _smoothed(broken, 4, 6, capsys)
    assert before[:4] + after == whole
    steps = [
        line["step"] for line in map(json.loads, broken.read_text().splitlines()) if "loss" in line
    ]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_doubled_unreadable_and_missing_lines_are_said_and_the_doubled_ones_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(_line(step)) for step in range(1, 7)]
    path.write_text(
        "\n".join([*lines[:2], lines[1], "junk", lines[4], '{"step": "x"}', lines[5]]) + "\n"
    )
    MetricsLog(path, 9, 6).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 5, 6]
    said = capsys.readouterr().err
    assert (
        f"warning {path}: 1 doubled line removed" in said
        and f"warning {path}: 2 lines that cannot be read removed" in said
    )
    assert (
        f"warning {path}: no line for the steps 3 to 4; the report and the model card lack them"
        in said
    )
    path.unlink()
    MetricsLog(path, 9, 6).close()
    assert "no line for the steps 1 to 6; the report" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "completions.jsonl"])
def test_a_resume_keeps_the_bytes_of_the_lines_that_it_keeps(name: str, tmp_path: Path) -> None:
    """Whatever wrote them: text as it is, a lone surrogate as its escape, spaces, the order of the keys."""
    path = tmp_path / name
    append_json_lines(
        path, [{"step": step, "text": f"Größe {step} \ud800 \u2028"} for step in range(1, 4)]
    )
    odd = b'{"text":"\\u00fc",   "step": 2.0e0, "step":2}\n'
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*whole[:2], odd, whole[2], b'{"step": 4, "te']))
    drop_later_lines(path, 2)
    assert path.read_bytes() == b"".join([*whole[:2], odd])
    path.write_bytes(whole[0].rstrip(b"\n"))
    drop_later_lines(path, 1)
    assert path.read_bytes() == whole[0]


def test_a_resume_holds_a_line_at_a_time_and_writes_only_a_file_that_changes(
    tmp_path: Path,
) -> None:
    """A run's completions.jsonl may have gigabytes, and the other ranks wait for the resume."""
    path = tmp_path / "completions.jsonl"
    append_json_lines(path, [{"step": step, "text": "x" * 2000} for step in range(1, 1001)])
    written = path.read_bytes()
    inode = path.stat().st_ino
    drop_later_lines(path, 1000)
    assert path.stat().st_ino == inode
    tracemalloc.start()
    try:
        drop_later_lines(path, 999)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == b"".join(written.splitlines(keepends=True)[:999])
    assert peak_bytes < len(written) / 10
    path.write_bytes(b'\n{"step": 1}')  # as many bytes after the repair, but others
    drop_later_lines(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_full_disk_neither_ends_the_run_nor_loses_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, len(LOSSES), 0)
    log.step(_line(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1])
    )  # a write beyond it fails
    try:
        log.step(_line(2))
        log.step(_line(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        capsys.readouterr().err.count(
            f"{path}: cannot be written (File too large); the run continues"
        )
        == 1
    )
    log.step(_line(5))
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 4, 5]


def test_a_removed_run_folder_stops_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").touch()
    with MetricsLog(folder / "metrics.jsonl", len(LOSSES), 0) as log:
        log.step(_line(1))
        (folder / "metrics.jsonl").unlink()
        log.step(_line(2))  # a lost log is no reason to stop
        shutil.rmtree(folder)
        folder.mkdir()  # as a save would
        with pytest.raises(
            UserError, match=r"run: the run's folder was removed or renamed; stopped at step 4: "
        ):
            log.step(_line(4))


def _all_that_stands_on(screen: int) -> str:
    """Everything written to a terminal whose writing end is closed; the kernel hands it over in pieces."""
    shown = b""
    with (
        os.fdopen(screen, "rb", buffering=0) as reading,
        contextlib.suppress(OSError),
    ):  # EIO stands for the end
        while piece := reading.read(1 << 16):
            shown += piece
    return shown.decode()


@pytest.mark.parametrize("columns", [150, 80])
def test_at_a_terminal_one_bar_stands_below_what_is_said(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        log = MetricsLog(tmp_path / "metrics.jsonl", 2, 0)
        for step in (1, 2):
            log.step(_line(step))
        log.say("step 2: held-out loss 4.0000")
        log.close()
    shown = _all_that_stands_on(screen)
    assert "\rstep 2: held-out loss 4.0000\r\n" in shown
    bar = re.split(r"[\r\n]+", shown.rstrip())[-1]
    assert bar.startswith("100%|") and bar.endswith("0:00:00 left")
    assert (
        "| 2/2  loss 4.0000 (smoothed 4.4737)  "
        + ("lr 1.00e-03" if columns == 150 else "100 tokens/s")
        in bar
    )
    assert len(bar) <= columns


def test_a_terminal_that_is_closed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = pty.openpty()
    monkeypatch.setattr(sys, "stderr", CleanStream(os.fdopen(terminal, "w"), is_optional=True))
    log = MetricsLog(tmp_path / "metrics.jsonl", 2, 0)
    log.step(_line(1))
    os.close(screen)
    log.step(_line(2))
    log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_loss_that_leaves_where_it_started_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [2.0, 9.0, 2.1] + [9.0] * 9  # a spike is none, and nine lines in a row are not yet
    log = MetricsLog(tmp_path / "metrics.jsonl", 20, 0)
    for step, loss in enumerate(losses, start=1):
        log.step(_line(1) | {"step": step, "loss": loss})
    assert "warning" not in capsys.readouterr().err
    log.close()
    resumed = MetricsLog(tmp_path / "metrics.jsonl", 20, len(losses))
    for step in (13, 14):
        resumed.step(_line(1) | {"step": step, "loss": float("inf")})
    resumed.close()
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warned == [
        "warning the loss is inf at step 13, far above the 2 of step 1, for 10 lines in a row; lower learning_rate, or "
        "raise warmup_ratio"
    ]
