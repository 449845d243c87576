"""Steps a minute of a run whose server samples ahead of training, beside one that waits for it.

    FINETUNE_VLLM=VENV/bin/vllm python benchmarks/asynchronous.py [--steps 12] [--rounds 2]

A real vLLM on the first core and the trainer on the second. The model is random: its width is such
that a step takes about as long to sample as to train. All runs of a round follow one another; what
is printed are steps a minute without the first three, and ratios within the round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from tests.conftest import make_model  # noqa: E402

SETTLED = 3  # steps after which a run has its pace
PORT = 8918
REWARD = (
    "def even(completion_ids, **_):\n"
    "    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """The address of vLLM on the first core."""
    command = ["taskset", "-c", "0", os.environ["FINETUNE_VLLM"], "serve", str(model)]
    command += ["--port", str(PORT), "--enforce-eager", "--dtype", "float32"]
    command += ["--max-model-len", "256", "--max-num-seqs", "64"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{PORT}"
    with subprocess.Popen(
        command, env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_for_server(url)
            yield url
        finally:
            server.terminate()


def wait_for_server(url: str) -> None:
    """Raises TimeoutError after five minutes."""
    for _ in range(150):
        time.sleep(2)
        try:
            urllib.request.urlopen(f"{url}/v1/models")
            return
        except OSError:
            continue
    raise TimeoutError(url)


def write_recipe(folder: Path, url: str, steps: int) -> Path:
    """A recipe of 64 completions a step."""
    rows = [{"prompt": f"Once there were {i} children ", "answer": str(i)} for i in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARD)
    keys = {
        "method": "grpo",
        "model_name_or_path": str(folder / "model"),
        "datasets": [{"path": str(folder / "prompts.jsonl"), "type": "prompt_completion"}],
        "dataset_cache_dir": str(folder / "cache"),
        "rewards": ["my_rewards.py:even"],
        "vllm_server_base_url": url,
        "num_generations": 8,
        "max_completion_length": 96,
        "max_length": 160,
        "global_batch_size": 8,
        "per_device_train_batch_size": 8,
        "per_device_generation_batch_size": 64,
        "importance_sampling_correction": "token_truncate",
        "max_steps": steps,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "export_at_end": False,
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def count_steps(recipe: Path, staleness: int, run: Path) -> float:
    """Steps a minute of the trainer on the second core."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "finetune", "launch"]
    command += ["--recipe", str(recipe), "--config", "single"]
    command += [f"max_staleness={staleness}", f"output_dir={run}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as trainer:
        arrived: list[float] = []
        while trainer.poll() is None:
            time.sleep(0.02)
            if count_lines(run) > len(arrived):
                arrived.append(time.monotonic())
    assert trainer.returncode == 0, f"{run}: the run has failed"
    return 60 * (len(arrived) - SETTLED) / (arrived[-1] - arrived[SETTLED - 1])


def count_lines(run: Path) -> int:
    """The steps that a run has logged."""
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def main() -> None:
    """Prints a line for each run."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--width", type=int, default=256)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="asynchronous-"))
    sizes = {"hidden_size": given.width, "intermediate_size": 3 * given.width}
    make_model(folder / "model", head_dim=32, num_hidden_layers=4, **sizes)
    with serving(folder / "model") as url:
        recipe = write_recipe(folder, url, given.steps)
        for number in range(given.rounds):
            pace = {
                staleness: count_steps(recipe, staleness, folder / f"{number}-{staleness}")
                for staleness in (0, 1, 2)
            }
            for staleness, steps in pace.items():
                print(
                    f"round {number + 1}, max_staleness: {staleness}: {steps:.1f} steps a minute, "
                    f"{steps / pace[0]:.2f} times those of 0",
                    flush=True,
                )


if __name__ == "__main__":
    main()
