"""How far training is from sampling in a tiny mixture, with and without `routing_replay`, on a CPU.

    python benchmarks/routing_replay.py

Prints the figures of docs/online.md: the mean |log-ratio| of GRPO's steps, in fp32 and in bf16, for
a mixture of random weights that this script writes.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

# not this folder, where a module may have a library's name
sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from finetune.config.accelerate_file import read_sharding  # noqa: E402
from finetune.config.reader import read_recipe  # noqa: E402
from finetune.run import fine_tune  # noqa: E402
from tests.conftest import make_chat, make_model  # noqa: E402

STEPS = 3
SIZES = {
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "initializer_range": 0.1,
}
REWARD = "def even(completion_ids, **_):\n    return [ids[0] % 2 for ids in completion_ids]\n"


def main() -> None:
    """A row for each precision."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", model_type="qwen3_moe", **SIZES)
        make_chat(folder / "chat.jsonl", rows=32)
        (folder / "my_rewards.py").write_text(REWARD)
        rows = [
            [measure(folder, precision, replays=replays) for replays in (False, True)]
            for precision in ("no", "bf16")
        ]
    print("| | without | `routing_replay: true` |\n|---|---|---|")
    for title, (without, replayed) in zip(("fp32", "bf16"), rows, strict=True):
        print(f"| {title} | {without:.2e} | {replayed:.2e} |")


def measure(folder: Path, precision: str, *, replays: bool) -> float:
    """The mean |log-ratio| over the steps of a run."""
    output = folder / f"{precision}-{replays}"
    accelerate = folder / f"{precision}.yaml"
    accelerate.write_text(f"distributed_type: 'NO'\nmixed_precision: '{precision}'\n")
    given = {
        "model_name_or_path": folder / "model",
        "datasets": f"[{{path: {folder}/chat.jsonl}}]",
        "dataset_cache_dir": folder / "cache",
        "output_dir": output,
        "method": "grpo",
        "rewards": f"[{folder}/my_rewards.py:even]",
        "num_generations": 4,
        "max_completion_length": 16,
        "max_length": 100,
        "global_batch_size": 4,
        "max_steps": STEPS,
        "logging_steps": 1,
        "export_at_end": "false",
        "routing_replay": str(replays).lower(),
    }
    recipe = read_recipe(None, [f"{key}={value}" for key, value in given.items()])
    fine_tune(recipe, read_sharding(str(accelerate), None, {}))
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    means = [line["log_ratio/mean"] for line in lines if "log_ratio/mean" in line]
    return sum(means) / len(means)


if __name__ == "__main__":
    main()
