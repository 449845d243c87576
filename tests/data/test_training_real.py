"""Real files train with only their path in the recipe, by each tokenizer: the whole way through run.py."""

import json
from pathlib import Path

import pytest
import yaml

from tests.data.test_prepare import REAL
from tests.ranks import run_python


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["models/stories260k", "tokenizers/llama3"])
@pytest.mark.parametrize("file", [*REAL, "gsm8k_train.jsonl"])
def test_a_real_file_trains(tmp_path: Path, shared: Path, file: str, tokenizer: str) -> None:
    recipe = {
        "model_config": {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        "tokenizer_name_or_path": str(shared / tokenizer),
        "datasets": [
            {"path": str(shared / "data" / file), **REAL.get(file, REAL["gsm8k_test.jsonl"])}
        ],
        "dataset_cache_dir": str(tmp_path / "cache"),
        "max_length": 512,
        "global_batch_size": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "export_at_end": False,
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    finished = run_python(
        ["finetune/run.py", "--config", "single", "--recipe", str(path)], timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert all(line["trained_tokens"] > 0 for line in lines if "loss" in line)
