"""Steps a minute with a vLLM server on one core and the trainer on another: max_staleness 0, 1, 2.

    python benchmarks/sampling_ahead.py VLLM TOKENIZER [--cores 0 1] [--rounds 3] [--steps 10]

VLLM: the command of a vLLM for CPUs, in an environment of its own. TOKENIZER: a folder with one.
The model is a random Llama with heads of 32, for which vLLM has kernels on a CPU. Prints the wall
clock of the steps after the first two, each round's ratios to max_staleness 0, and their medians:
other processes on these cores disturb both sides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
PORT = 8931
URL = f"http://127.0.0.1:{PORT}"
ROOM = 256
FIRST = 2  # steps that fill what is in flight, and do not count
STALENESS = (0, 1, 2)
START_SECONDS = 300
REWARD = (
    "def even(completion_ids, **_):\n"
    "    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
)


def main() -> None:
    """All rounds, at one server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm")
    parser.add_argument("tokenizer")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="server, trainer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    server_core, trainer_core = options.cores
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", options.tokenizer, options.layers)
        recipe = write_recipe(folder, model, FIRST + options.steps)
        with serve(options.vllm, model, server_core, folder / "vllm.log"):
            rounds = []
            for number in range(options.rounds):
                rates = {
                    staleness: measure(
                        recipe, folder / f"{number}-{staleness}", staleness, trainer_core
                    )
                    for staleness in STALENESS
                }
                rounds.append(rates)
                print(f"round {number + 1}: {describe(rates)}", flush=True)
    medians = {each: statistics.median(rates[each] for rates in rounds) for each in STALENESS}
    print(f"medians: {describe(medians)}; load average {os.getloadavg()[0]:.1f}")


def make_model(folder: Path, tokenizer: str, layers: int) -> Path:
    """A folder with a random Llama of this tokenizer."""
    reader = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(reader),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=ROOM,
        bos_token_id=reader.bos_token_id,
        eos_token_id=reader.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def write_recipe(folder: Path, model: Path, steps: int) -> Path:
    """GRPO over short prompts, which neither evaluates nor saves."""
    rows = [json.dumps({"prompt": f"Once there were {i} children "}) for i in range(200)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "my_rewards.py").write_text(REWARD)
    keys = {
        "method": "grpo",
        "model_name_or_path": str(model),
        "accelerate_config": "single",
        "datasets": [{"path": str(folder / "prompts.jsonl"), "type": "prompt_completion"}],
        "dataset_cache_dir": str(folder / "cache"),
        "rewards": ["my_rewards.py:even"],
        "vllm_server_base_url": URL,
        "num_generations": 8,
        "max_completion_length": 96,
        "max_length": ROOM,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-5,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "export_at_end": False,
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


@contextmanager
def serve(command: str, model: Path, core: int, log: Path) -> Iterator[None]:
    """A vLLM server of the model, on one core, until the block ends."""
    serving = ["taskset", "-c", str(core), command, "serve", str(model), "--port", str(PORT)]
    serving += ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(ROOM)]
    serving += ["--max-num-seqs", "32", "--logprobs-mode", "processed_logprobs"]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings
    with log.open("w") as output:
        server = subprocess.Popen(serving, env=environment, stdout=output, stderr=output)
        try:
            wait_for(server, log)
            yield
        finally:
            server.terminate()
            server.wait()


def wait_for(server: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the server answers, and raises RuntimeError where it has ended or is late."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{URL}/v1/models").close()
            return
        except OSError:
            time.sleep(1)
        if server.poll() is not None:
            break
    raise RuntimeError(f"vllm did not start: {log.read_text()[-2000:]}")


def measure(recipe: Path, run: Path, staleness: int, core: int) -> float:
    """Steps a minute of a run on one core, from the line of step FIRST to the last."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "finetune", "launch"]
    command += ["--recipe", str(recipe), f"max_staleness={staleness}", f"output_dir={run}"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    training = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.DEVNULL)
    times: list[float] = []
    while training.poll() is None:
        times += [time.monotonic()] * (count_steps(run) - len(times))
        time.sleep(0.02)
    if training.returncode:
        raise RuntimeError(f"the run with max_staleness {staleness} failed; it says above why")
    return 60 * (len(times) - FIRST) / (times[-1] - times[FIRST - 1])


def count_steps(run: Path) -> int:
    """How many lines of steps the metrics have."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    return sum('"log_ratio/mean"' in line for line in path.read_text().splitlines())


def describe(rates: dict[int, float]) -> str:
    """Steps a minute by staleness, each with its ratio to that of 0."""
    each = [f"{k}: {rate:.1f} a minute ({rate / rates[0]:.2f})" for k, rate in rates.items()]
    return ", ".join(each)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main()
