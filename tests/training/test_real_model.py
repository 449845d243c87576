"""A real pretrained model on real data, through the command that a user gives."""

import json
from pathlib import Path

import pytest
import yaml

from tests.ranks import run_command


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_stories260k_learns_gsm8k_under_full_sharding(
    ranks: int, shared: Path, tmp_path: Path
) -> None:
    columns = {"prompt_column": "question", "completion_column": "answer"}
    recipe = {
        "model_name_or_path": str(shared / "models" / "stories260k"),
        "datasets": [{"path": str(shared / "data" / "gsm8k_train.jsonl"), **columns}],
        "eval_datasets": [
            {"path": str(shared / "data" / "gsm8k_test.jsonl"), "split": "train[:200]", **columns}
        ],
        "max_length": 512,
        "packing": False,
        "global_batch_size": 16,
        "per_device_train_batch_size": 8,
        "max_steps": 200,
        "learning_rate": 2e-3,
        "warmup_ratio": 0.05,
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(recipe))
    command = ["python", "-m", "finetune", "launch", "--recipe", str(tmp_path / "gsm8k.yaml")]
    done = run_command(
        [*command, "--config", "fsdp_full_shard", "--num-processes", str(ranks)], timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FSDP2 FULL_SHARD, wrapped 5 LlamaDecoderLayer" in done.stderr
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held_out[0] > 6.5
    assert held_out[-1] < 1.9
