"""What stands in a file when writing it anew fails, and what links and devices become."""

import resource
from pathlib import Path

import pytest

from finetune.durable import replace_text
from finetune.metrics import MetricsLog


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
    metrics.write_text(lines)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, before[1])
    )  # every write fails, as on a full disk (SIGXFSZ is ignored)
    try:
        with pytest.raises(OSError, match="too large"):
            MetricsLog(metrics, steps=3, start_step=1)  # a resumed run drops the lines after its checkpoint
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert metrics.read_text() == lines
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_link_stays_a_link_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    replace_text(Path("/dev/null"), "new")
    assert not Path("/dev/null").is_file()
