"""The benchmark scripts run, at a size where their numbers mean nothing."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_ours
from benchmarks.gpu_cases import CASES
from tests.ranks import ROOT, run_command


@pytest.mark.slow
def test_the_gpu_benchmark_walks_all_of_ours_on_this_machine(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu.py")
    command = [sys.executable, script, "--smoke", "--without-others", "--output", str(tmp_path)]
    done = run_command(command, timeout=400)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gpu-smoke.json").read_text())
    device, *results = results
    assert device["gemm_flop_per_second"] > 0 and device["attention_flop_per_second"] > 0
    assert [r["case"] for r in results] == [case.name for case in CASES]
    assert all(r["failure"] is None and r["tokens_per_second"] > 0 and r["loss"] > 0 for r in results), results


def test_a_step_that_waits_for_the_gpu_is_named_and_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, finished = ["default"], 0
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step(waits: int) -> None:
        nonlocal finished
        for _ in range(waits):
            if modes[-1] == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            if modes[-1] == "warn":
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        finished += 1

    assert gpu_ours.synchronizations(lambda: step(2)) == "called a synchronizing CUDA operation"
    assert gpu_ours.synchronizations(lambda: step(0)) == "nothing"
    assert finished == 2 and modes[-1] == "default"


@pytest.mark.slow
def test_the_cpu_benchmark_sets_ours_beside_the_bare_loop(tmp_path: Path, shared: Path) -> None:
    pytest.importorskip("matplotlib")
    script = str(ROOT / "benchmarks" / "speed.py")
    inputs = [
        "--data",
        str(shared / "data" / "gsm8k_train.jsonl"),
        "--tokenizer",
        str(shared / "models" / "stories260k"),
    ]
    size = ["--precision", "fp32", "--steps", "2", "--warm-up", "1", "--layers", "1", "--only", "bare", "one process"]
    done = run_command([sys.executable, script, *inputs, *size, "--output", str(tmp_path)], timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| fp32 | bare loop |" in done.stdout and "| fp32 | finetune, one process |" in done.stdout
    assert (tmp_path / "speed.png").exists()
    steps = json.loads((tmp_path / "speed.json").read_text())["fp32"]
    same_tokens = [[step[-1] for step in steps[title]] for title in ("bare loop", "finetune, one process")]
    assert same_tokens[0] == same_tokens[1]
