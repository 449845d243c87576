"""A real pretrained model on real preferences, through the command that a user gives: what it learns, killed in between, exported."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.ranks import ROOT, environment, run_command
from tests.training.layouts import write_config

LORA = {"use_peft": True, "learning_rate": 3e-4}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [LORA, {"learning_rate": 5e-5}], ids=["LoRA", "full"])
def test_stories260k_learns_which_answers_are_preferred(
    keys: dict[str, Any], shared: Path, tmp_path: Path
) -> None:
    recipe = {
        "model_name_or_path": str(shared / "models" / "stories260k"),
        "method": "dpo",
        "datasets": [{"path": str(shared / "data" / "dpo_en_demo.json")}],
        "dataset_cache_dir": str(tmp_path / "cache"),
        "eval_split_size": 60,
        "max_length": 256,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": 20,
        "save_steps": 4,
        "logging_steps": 1,
        **keys,
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(recipe))
    command = [
        "python",
        "-m",
        "finetune",
        "launch",
        "--recipe",
        str(tmp_path / "dpo.yaml"),
        "--config",
        # in fp32: in 16 bits rounding moves the loss of so few pairs by as much as 20 steps do
        str(write_config(tmp_path, "full_shard")),
    ]
    command += ["--num-processes", "2"]
    kill_after_save(command, tmp_path / "killed")
    for run in ("killed", "whole"):
        done = run_command([*command, f"output_dir={tmp_path / run}"], timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "verified: every value" in done.stderr
    killed, whole = (metrics(tmp_path / run) for run in ("killed", "whole"))
    assert killed == whole, "bit for bit"
    held_out = [line for line in whole if "eval_loss" in line]
    assert held_out[0]["eval_rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert held_out[-1]["eval_rewards/margins"] > 0.1
    assert held_out[-1]["eval_rewards/accuracies"] > 0.5
    assert held_out[-1]["eval_loss"] < held_out[0]["eval_loss"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = tmp_path / "whole" / "export"
    ids = AutoTokenizer.from_pretrained(export)("Once upon a time", return_tensors="pt")
    assert torch.isfinite(AutoModelForCausalLM.from_pretrained(export)(**ids).logits).all()


def kill_after_save(command: list[str], run: Path) -> None:
    """Starts the run and kills all of its processes once it has saved a checkpoint."""
    process = subprocess.Popen(
        [*command, f"output_dir={run}"],
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the machine."""
    other = {
        "tokens_per_second",
        "mfu",
        "mfu_of_whole_rows",
        "peak_memory_bytes",
        "data_wait_seconds",
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in other}
        for line in lines
        if "phase" not in line
    ]
