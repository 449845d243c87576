"""The notebooks of examples/ run from their first cell to their last, and what `finetune.train` does in a kernel."""

import json
from pathlib import Path
from typing import Any

import pytest

import finetune
from tests.ranks import ROOT, environment, free_port, run_command
from tests.training.layouts import steps_of, write_config

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def execute(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs it in `folder`, as Jupyter would; returns what its cells have shown."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return json.dumps([cell.get("outputs", []) for cell in notebook.cells])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(path, as_version=4)
    kept = [cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code"]
    assert all("output_type" in str(outputs) for outputs in kept[1:] if outputs), (
        "run it, and save it with what it shows"
    )
    for cell in notebook.cells:
        cell.source = cell.source.replace("max_steps=40", "max_steps=6").replace(
            "range(60)", "range(3)"
        )
    notebook.cells = [  # to run it again continues, as the page says; or says that nothing is left
        cell
        for each in notebook.cells
        for cell in ([each] * 2 if "losses.append" in each.source else [each])
    ]
    shown = execute(notebook, tmp_path, monkeypatch)
    assert "<path class=" in html_of(shown) if path.stem == "fine_tune" else "focal loss" in shown
    assert list(tmp_path.glob("runs/*/export/model.safetensors"))


def html_of(shown: str) -> str:
    return shown.replace("&lt;", "<").replace("&quot;", '"').replace('\\"', '"')


INTERRUPTED = """
import os, signal, finetune

class Interrupt(finetune.Callback):
    def on_step(self, event):
        if event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)  # as Jupyter's button does

recipe = finetune.load_recipe("quickstart", max_steps=4, exact_match_samples=0, export_at_end=False, output_dir="run",
                              eval_datasets=[], accelerate_config={config!r})
try:
    finetune.train(recipe, callbacks=[Interrupt()])
except finetune.Preempted as stopped:
    print(stopped)
"""


@pytest.mark.slow
def test_to_interrupt_the_kernel_is_to_stop_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(write_config(tmp_path, "full_shard"))
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (INTERRUPTED.replace("{config!r}", repr(config)), "finetune.train(recipe)")
    ]
    shown = execute(nbformat.v4.new_notebook(cells=cells), tmp_path, monkeypatch)
    assert (
        "stopped by a signal after step 2 of 4, which is saved" in shown
        or "stopped by a signal after step 3 of 4" in shown
    )
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [4]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))[
        -1
    ].endswith("4")


LAUNCHED = """
from accelerate import notebook_launcher
import finetune

keys = {"max_steps": 2, "logging_steps": 1, "exact_match_samples": 0, "eval_datasets": [], "export_at_end": False}
recipe = finetune.load_recipe("quickstart", output_dir="run", **keys)
notebook_launcher(finetune.train, (recipe, "LAYOUT"), num_processes=2, use_port="PORT")
"""


@pytest.mark.slow
def test_notebook_launcher_trains_on_two_processes(tmp_path: Path) -> None:
    """Their losses are those of one process."""
    layout = str(write_config(tmp_path, "full_shard"))
    (tmp_path / "script.py").write_text(
        LAUNCHED.replace("LAYOUT", layout).replace("PORT", str(free_port()))
    )
    finished = run_command(("python", "script.py"), cwd=tmp_path, timeout=240)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"] == 2
    keys = {
        "max_steps": 2,
        "logging_steps": 1,
        "exact_match_samples": 0,
        "eval_datasets": [],
        "export_at_end": False,
    }
    finetune.train(
        finetune.load_recipe("quickstart", output_dir=tmp_path / "alone", **keys), layout
    )
    for two, one in zip(steps_of(tmp_path / "run"), steps_of(tmp_path / "alone"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
