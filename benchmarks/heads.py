"""Reward models and embeddings on real data: held-out figures before and after training.

    python benchmarks/heads.py reward --model tokenizers/llama3 --data dpo_en_demo.json
    python benchmarks/heads.py embed --model stories260k --data gsm8k_train.jsonl
        --held-out gsm8k_test.jsonl

`reward` trains a Llama of two layers from random weights, with the tokenizer in --model, and each
seed twice: on the pairs, and on pairs whose sides a fair coin swaps (the control). The held-out
pairs are the same in both, and another draw for each seed; each text is cut at CHARACTERS. Prints a
line of JSON for each run.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

HELD_OUT = 60  # pairs
CHARACTERS = 1000  # of each text of a pair
SMALL = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 128001,
}
REWARD = {
    "method": "reward",
    "model_config": SMALL,
    "chat_template": "llama3",
    "max_length": 1024,
    "num_train_epochs": 2,
    "global_batch_size": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_ratio": 0.1,
    "center_rewards_coefficient": 0.01,
}
EMBED = {
    "method": "embed",
    "pooling": "mean",
    "max_length": 512,
    "max_steps": 60,
    "global_batch_size": 64,
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-3,
}
FIGURES = ("eval_loss", "eval_rewards/accuracies", "eval_recall@1", "eval_mrr@10")


def train(keys: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Trains in `folder`; the held-out figures before and after."""
    common = {"output_dir": str(folder / "run"), "export_at_end": False, "logging_steps": 10}
    common["dataset_cache_dir"] = str(folder / "cache")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(keys | common))
    command = [sys.executable, "-m", "finetune", "launch", "--recipe", str(recipe)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    held_out = [line for line in map(json.loads, lines) if "eval_loss" in line]
    return [{key: line[key] for key in FIGURES if key in line} for line in held_out]


def split_pairs(data: Path, folder: Path, seed: int, *, is_shuffled: bool) -> dict[str, Any]:
    """The keys of a recipe that name pairs to train on and pairs that are held out."""
    draw = random.Random(seed)
    rows = json.loads(data.read_text(encoding="utf-8"))
    draw.shuffle(rows)
    for row in rows:
        for text in (*row["conversations"], row["chosen"], row["rejected"]):
            text["value"] = text["value"][:CHARACTERS]
    trained = rows[HELD_OUT:]
    if is_shuffled:
        for row in trained:
            if draw.random() < 0.5:
                chosen = row["chosen"]
                row["chosen"] = row["rejected"]
                row["rejected"] = chosen
    keys = {}
    for key, part in (("datasets", trained), ("eval_datasets", rows[:HELD_OUT])):
        path = folder / f"{key}.json"
        path.write_text(json.dumps(part), encoding="utf-8")
        keys[key] = [{"path": str(path)}]
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("reward", "embed"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    key = "tokenizer_name_or_path" if options.what == "reward" else "model_name_or_path"
    common = {key: str(options.model.resolve())}
    for seed in options.seeds:
        for is_shuffled in (False, True) if options.what == "reward" else (False,):
            with tempfile.TemporaryDirectory() as name:
                if options.what == "reward":
                    data = split_pairs(options.data, Path(name), seed, is_shuffled=is_shuffled)
                    keys = REWARD | data
                else:
                    keys = EMBED | {"datasets": [{"path": str(options.data.resolve())}]}
                    held_out = {"path": str(options.held_out.resolve()), "split": "train[:200]"}
                    keys |= {"eval_datasets": [held_out]}
                figures = train(keys | common | {"seed": seed}, Path(name))
            line = {"what": options.what, "seed": seed, "shuffled": is_shuffled}
            print(json.dumps(line | {"held_out": figures}), flush=True)


if __name__ == "__main__":
    main()
