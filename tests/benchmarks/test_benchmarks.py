"""The benchmark scripts run, at a size where their numbers mean nothing."""

import argparse
import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_ours
from benchmarks.gpu_cases import CASES, Case, Result
from benchmarks.gpu_first_steps import find_differences
from tests.ranks import ROOT, run_command, run_python


@pytest.mark.slow
def test_the_gpu_benchmark_walks_all_of_ours_on_this_machine(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu.py")
    command = [sys.executable, script, "--smoke", "--without-others", "--output", str(tmp_path)]
    done = run_command(command, timeout=400)
    assert done.returncode == 0, done.stderr
    device, *results = [
        json.loads(line) for line in (tmp_path / "gpu-smoke.jsonl").read_text().splitlines()
    ]
    assert device["gemm_flop_per_second"] > 0 and device["attention_flop_per_second"] > 0
    assert [r["case"] for r in results] == [
        case.name for case in sorted(CASES, key=lambda case: case.goal is None)
    ]
    assert all(
        r["failure"] is None and r["tokens_per_second"] > 0 and r["loss"] > 0 for r in results
    ), results


def test_a_step_that_waits_for_the_gpu_is_named_and_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def read_result(stdout: str) -> Result:
    return Result(**json.loads(stdout.splitlines()[-1]))


def run_smoke(case: int, who: str, *options: str) -> Result:
    """A row of the table, from a process of its own."""
    script = str(ROOT / "benchmarks" / "gpu.py")
    done = run_python([script, "--smoke", "--case", str(case), "--who", who, *options])
    assert done.returncode == 0, done.stderr
    return read_result(done.stdout)


def test_plain_transformers_takes_our_first_step_where_a_row_is_one_document() -> None:
    results = [run_smoke(0, who, "--documents", "0.01") for who in (gpu.OURS, gpu.TRANSFORMERS)]
    assert all(result.loss and result.grad_norm for result in results), results
    assert find_differences(results, gpu.OURS, [gpu.TRANSFORMERS]) == []


FULL = "1B full, 4096"
NAMED = (FULL, "8B LoRA r16, 4096", "8B QLoRA r16, 4096", "30B-A3B LoRA r16, 4096")
NUMBERS = {case.name: number for number, case in enumerate(CASES)}


# torchtune and peft take no common torchao: its LoRA is compared by --torchtune-python.
@pytest.mark.parametrize(("who", "cases"), [(gpu.TRL, NAMED), (gpu.TORCHTUNE, (FULL,))])
def test_the_tools_that_are_installed_take_our_first_step_from_packed_rows(
    who: str, cases: tuple[str, ...]
) -> None:
    pytest.importorskip(gpu.PACKAGES[who])
    for case in cases:
        results = [run_smoke(NUMBERS[case], each) for each in (gpu.OURS, who)]
        assert all(result.loss and result.grad_norm for result in results), results
        assert find_differences(results, gpu.OURS, [who]) == []


UNSLOTH = """
class FastLanguageModel:
    def from_pretrained(folder, *, max_seq_length, dtype, load_in_4bit, full_finetuning, use_gradient_checkpointing):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        assert not load_in_4bit
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)

    def get_peft_model(model, *, use_gradient_checkpointing, **keys):
        from peft import LoraConfig, get_peft_model
        return get_peft_model(model, LoraConfig(**keys))
"""


def test_unsloths_row_loads_the_common_weights_and_trains_the_packed_rows(tmp_path: Path) -> None:
    """Unsloth itself does not import without a GPU: transformers and peft stand in for its loader, under TRL's own trainer."""
    pytest.importorskip("trl")
    (tmp_path / "unsloth.py").write_text(UNSLOTH)
    for case in (NUMBERS[FULL], NUMBERS["8B LoRA r16, 4096"]):
        row = gpu.in_process_of_its_own(
            case,
            gpu.UNSLOTH,
            ["--smoke"],
            argparse.Namespace(timeout=300, unsloth_packages=tmp_path),
        )
        assert row.loss and row.grad_norm, row
        assert find_differences([run_smoke(case, gpu.OURS), row], gpu.OURS, [gpu.UNSLOTH]) == []


def test_a_tool_that_is_not_installed_is_a_row_that_says_so() -> None:
    if any(importlib.util.find_spec(package) for package in gpu.PACKAGES.values()):
        pytest.skip("they are installed here")
    for who, package in gpu.PACKAGES.items():
        assert (
            gpu.run_case(CASES[0], who, argparse.Namespace()).failure
            == f"not installed; pip install {package}"
        )


@pytest.mark.slow
def test_the_counts_of_a_tokens_step_find_no_wait_for_the_device() -> None:
    code = "from benchmarks.counts import count_token_step; print(count_token_step(8))"
    done = run_command(["python", "-c", code])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ operations, 0 of them wait for the device", done.stdout)


def test_whatever_a_row_fails_of_is_on_disk_before_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(case: Case, *_: Any) -> Result:
        raise KeyError(case.name)

    monkeypatch.setitem(gpu.CONTESTANTS, gpu.OURS, fails)
    written = tmp_path / "gpu-smoke.jsonl"
    on_disk: list[int] = []

    def one_row(number: int, who: str, _: Any, options: argparse.Namespace) -> Result:
        on_disk.append(len(written.read_text().splitlines()))
        return (
            Result(CASES[0].name, who)
            if who == "device"
            else gpu.run_case(CASES[number], who, options)
        )

    monkeypatch.setattr(gpu, "in_process_of_its_own", one_row)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu.py",
            "--smoke",
            "--without-others",
            "--output",
            str(tmp_path),
            "--cases",
            "8B full",
            "8B DPO",
        ],
    )
    gpu.main()
    assert on_disk == [0, 1, 2]
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    names = ["8B full, 8192", "8B DPO, LoRA r16, 4096"]  # the one with a goal first
    assert [row["failure"] for row in rows] == [None, *(f"'{name}'" for name in names)]


def test_a_row_of_another_computation_is_named() -> None:
    full, lora = CASES[0].name, CASES[3].name
    ours = [
        Result(full, gpu.OURS, loss=6.5, grad_norm=2.8),
        Result(lora, gpu.OURS, loss=6.8, grad_norm=1.3),
    ]
    same = [
        Result(full, gpu.TRL, loss=6.51, grad_norm=2.85),
        Result(lora, gpu.TRL, loss=6.8, grad_norm=2.0),
    ]
    assert find_differences([*ours, *same], gpu.OURS, [gpu.TRL]) == []
    others = [
        Result(full, gpu.TRL, loss=6.6, grad_norm=3.5),
        Result(lora, gpu.TRL, loss=float("nan")),
    ]
    found = find_differences([*ours, *others], gpu.OURS, [gpu.TRL])
    assert [line.split(":")[1].split(" of")[0] for line in found] == [
        " the loss",
        " the gradient norm",
        " the loss",
    ]


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
    size = [
        "--precision",
        "fp32",
        "--steps",
        "2",
        "--warm-up",
        "1",
        "--layers",
        "1",
        "--only",
        "bare",
        "one process",
    ]
    done = run_command(
        [sys.executable, script, *inputs, *size, "--output", str(tmp_path)], timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (
        "| fp32 | bare loop |" in done.stdout and "| fp32 | finetune, one process |" in done.stdout
    )
    assert (tmp_path / "speed.png").exists()
    steps = json.loads((tmp_path / "speed.json").read_text())["fp32"]
    same_tokens = [
        [step[-1] for step in steps[title]] for title in ("bare loop", "finetune, one process")
    ]
    assert same_tokens[0] == same_tokens[1]
