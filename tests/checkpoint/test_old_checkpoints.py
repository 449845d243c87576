"""What earlier commits wrote is still resumed and exported: real files of these commits, in `from_<commit>/`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from finetune.checkpoint import folders, manifest
from finetune.cli import main
from finetune.files.tensors import read, read_folder
from tests.conftest import slow_but
from tests.ranks import ROOT, launch_ranks, run_python

FILES = Path(__file__).parent / "from_993aeb8"
RUN = str(ROOT / "finetune" / "run.py")


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_of_993aeb8_resumes_with_its_own_next_losses_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    place = tmp_path / "place"
    shutil.copytree(FILES, place)
    recorded = metrics(place / kind)
    monkeypatch.chdir(place)
    assert (
        main(
            [
                "export",
                f"{kind}/checkpoints/step-00000002",
                "--output",
                "out",
                "--base-model",
                "model",
            ]
        )
        == 0
    )
    assert "verified" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(place / "out").config.hidden_size == 16
    if kind == "full":
        checkpoint = read_folder(folders.step_folder(place / kind, 2) / manifest.MODEL)
        for name, tensor in read_folder(place / "out").items():
            assert bool((read(tensor) == read(checkpoint[name])).all()), name

    resumed = run_python([RUN, "--recipe", f"{kind}.yaml", "--config", "single.yaml"], cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 2" in resumed.stderr
    assert "changed" not in resumed.stdout + resumed.stderr
    now = metrics(place / kind)
    assert [line["step"] for line in now] == [line["step"] for line in recorded] == [1, 2, 3, 4]
    for one, other in zip(now, recorded, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6), one["step"]
        assert one["tokens"] == other["tokens"]


@pytest.mark.parametrize(
    ("kind", "ranks"), slow_but([("single", 1)], [("single", 1), ("fsdp1", 2)])
)
def test_a_tower_of_37b8172_resumes_with_its_own_next_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    """That commit trained what no image reaches: it saved no state for it, or under FSDP1 one of zeros."""
    pytest.importorskip("PIL", reason="Pillow is not installed: pip install -e '.[images]'")
    place = tmp_path / "place"
    shutil.copytree(Path(__file__).parent / "from_37b8172", place)
    recorded = metrics(place / kind)
    monkeypatch.chdir(place)
    resumed = launch_ranks(
        RUN, ["--recipe", f"{kind}.yaml", "--config", f"{kind}-accelerate.yaml"], ranks=ranks
    ).check()
    assert "resumed at step 2" in resumed.outputs[0] and "not trained: " in resumed.outputs[0]
    for one, other in zip(metrics(place / kind), recorded, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6), one["step"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), one["step"]
