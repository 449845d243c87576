"""Reward models and embeddings on real data: held-out figures before and after training.

    python benchmarks/heads.py reward --model tokenizers/llama3 --data dpo_en_demo.json
    python benchmarks/heads.py embed --model stories260k --data gsm8k_train.jsonl
        --held-out gsm8k_test.jsonl

`reward` trains a Llama of two layers from random weights, with the tokenizer in --model: for each
seed FOLDS times, so that every pair is held out once, and all of it again with pairs whose sides a
fair coin swaps (the control). Each text is cut at CHARACTERS. Prints a line of JSON for each seed
and control, with the share of all pairs in order; of `embed` for each run.
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

FOLDS = 5
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


def split_pairs(
    data: Path, folder: Path, seed: int, fold: int, *, is_shuffled: bool
) -> tuple[dict[str, Any], int]:
    """The keys of a recipe that name pairs to train on and pairs that are held out, and how many
    those are.
    """
    draw = random.Random(seed)
    rows = json.loads(data.read_text(encoding="utf-8"))
    draw.shuffle(rows)
    for row in rows:
        for text in (*row["conversations"], row["chosen"], row["rejected"]):
            text["value"] = text["value"][:CHARACTERS]
    held_out = rows[fold::FOLDS]
    trained = [row for place, row in enumerate(rows) if place % FOLDS != fold]
    if is_shuffled:
        for row in trained:
            if draw.random() < 0.5:
                chosen = row["chosen"]
                row["chosen"] = row["rejected"]
                row["rejected"] = chosen
    keys = {}
    for key, part in (("datasets", trained), ("eval_datasets", held_out)):
        path = folder / f"{key}.json"
        path.write_text(json.dumps(part), encoding="utf-8")
        keys[key] = [{"path": str(path)}]
    return keys, len(held_out)


def measure_reward(common: dict[str, Any], data: Path, seed: int, *, is_shuffled: bool) -> float:
    """The share of all pairs that are in order, each held out in one of FOLDS trainings."""
    right = 0.0
    total = 0
    for fold in range(FOLDS):
        with tempfile.TemporaryDirectory() as name:
            keys, count = split_pairs(data, Path(name), seed, fold, is_shuffled=is_shuffled)
            figures = train(REWARD | keys | common, Path(name))[-1]
        right += figures["eval_rewards/accuracies"] * count
        total += count
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("reward", "embed"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    model = str(options.model.resolve())
    for seed in options.seeds:
        if options.what == "reward":
            common = {"tokenizer_name_or_path": model, "seed": seed}
            for is_shuffled in (False, True):
                share = measure_reward(common, options.data, seed, is_shuffled=is_shuffled)
                line = {"what": "reward", "seed": seed, "shuffled": is_shuffled, "in order": share}
                print(json.dumps(line), flush=True)
            continue
        held_out = {"path": str(options.held_out.resolve()), "split": "train[:200]"}
        keys = EMBED | {"datasets": [{"path": str(options.data.resolve())}]}
        keys |= {"eval_datasets": [held_out], "model_name_or_path": model, "seed": seed}
        with tempfile.TemporaryDirectory() as name:
            figures = train(keys, Path(name))
        print(json.dumps({"what": "embed", "seed": seed, "held_out": figures}), flush=True)


if __name__ == "__main__":
    main()
