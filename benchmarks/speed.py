"""Tokens per second on a CPU: ours beside a bare loop, transformers.Trainer and TRL's SFTTrainer,
in one run.

    python benchmarks/speed.py --data gsm8k_train.jsonl --tokenizer stories260k --output RESULTS

All train a Llama of 3.2M parameters on the same file at max length 512, batch 8, with the same
optimizer, precision and threads. Each is a process of its own that waits for its turn: every round
gives each a few steps, in a new order, so that a slow minute of the machine slows all alike.
Padding is not counted as tokens. Beside the clock stands the CPU time of all threads, which other
jobs on the machine disturb less. Needs `pip install .[benchmarks]`.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MAX_LENGTH = 512  # tokens
BATCH_SIZE = 8  # rows in a step


@dataclass(frozen=True)
class Contestant:
    """A way to train, as a command of `contestant.py`."""

    title: str
    arguments: tuple[str, ...]
    ranks: int = 1


CONTESTANTS = (
    Contestant("bare loop", ("bare",)),
    Contestant("finetune, one process", ("ours", "--layout", "single")),
    Contestant("finetune, FSDP2, a world of one", ("ours", "--layout", "fsdp2")),
    Contestant("finetune, FSDP2, 2 ranks of 1 thread", ("ours", "--layout", "fsdp2"), ranks=2),
    Contestant("transformers.Trainer, padded", ("trainer",)),
    Contestant("TRL SFTTrainer, padded", ("trl-padded",)),
    Contestant("TRL SFTTrainer, packed", ("trl-packed",)),
)


@dataclass
class Running:
    """A contestant's processes, one for each rank, and what they have reported."""

    contestant: Contestant
    processes: list[subprocess.Popen[str]]
    steps: list[tuple[float, float, int]] = field(
        default_factory=list
    )  # (seconds, CPU seconds, tokens), over all ranks
    peak_memory_bytes: int = 0

    def turn(self, steps: int) -> list[tuple[float, float, int]]:
        """Lets it train `steps` steps; a step of several ranks lasts as long as its slowest
        rank's.
        """
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self.processes]
        return [
            (max(wall for wall, _, _ in ranks), sum(cpu for _, cpu, _ in ranks), ranks[0][2])
            for ranks in zip(*answers, strict=True)
        ]

    def ready(self) -> None:
        """Waits until it stands before its first step."""
        for process in self.processes:
            self._answer(process)

    def _answer(self, process: subprocess.Popen[str]) -> list[tuple[float, float, int]]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.contestant.title}: ended early; its messages stand above")
        return [(float(wall), float(cpu), int(tokens)) for wall, cpu, tokens in json.loads(line)]

    @property
    def tokens_per_second(self) -> list[float]:
        return [tokens / seconds for seconds, _, tokens in self.steps]

    @property
    def tokens_per_cpu_second(self) -> float:
        """The median over the steps."""
        return statistics.median(tokens / cpu for _, cpu, tokens in self.steps)


@contextlib.contextmanager
def started(
    contestants: Sequence[Contestant], workspace: Path, bf16: bool, threads: int
) -> Iterator[list[Running]]:
    """The contestants' processes, ready for their first turn; ended with the block."""
    running: list[Running] = []
    try:
        for contestant in contestants:
            running.append(Running(contestant, _start(contestant, workspace, bf16, threads)))
            running[-1].ready()  # one after another: they share the machine
            print(f"  {contestant.title}: ready", file=sys.stderr, flush=True)
        yield running
    finally:
        for each in running:
            for process in each.processes:
                process.kill()
                process.wait()


def _start(
    contestant: Contestant, workspace: Path, bf16: bool, threads: int
) -> list[subprocess.Popen[str]]:
    threads = max(threads // contestant.ranks, 1)
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "contestant.py"),
        *contestant.arguments,
        str(workspace),
    ]
    command += ["--threads", str(threads)] + (["--bf16"] if bf16 else [])
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_", "ACCELERATE_"))}
    environ |= {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environ |= {"HF_HOME": str(workspace / "cache")}
    port = str(20000 + random.randrange(20000))
    processes = []
    for rank in range(contestant.ranks):
        rendezvous = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(contestant.ranks),
        }
        rendezvous |= {
            "LOCAL_WORLD_SIZE": str(contestant.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(workspace / f"{contestant.title.replace('/', '-')}-{rank}.log").open("w"),
                text=True,
                env=environ | (rendezvous if contestant.ranks > 1 else {}),
            )
        )
    return processes


def measure(running: Sequence[Running], steps: int, block: int, warm_up: int) -> None:
    """Rounds of `block` steps for each, in a new order every round, until each has done `steps`
    after its warm-up.
    """
    order = list(running)
    for each in order:
        each.turn(warm_up)
    while len(order[0].steps) < steps:
        random.shuffle(order)
        for each in order:
            each.steps += each.turn(block)
    for each in order:
        each.peak_memory_bytes = sum(_peak_memory(process.pid) for process in each.processes)


def _peak_memory(pid: int) -> int:
    """The most memory that a live process has held, in bytes (Linux; 0 elsewhere)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def prepare(workspace: Path, data: Path, tokenizer: Path, model: dict[str, Any]) -> None:
    """What all contestants read: the model with random weights, the data file, the recipe, the
    layouts.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    special = {
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(**model | special | {"vocab_size": len(tokens)})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        workspace / "model"
    )
    tokens.save_pretrained(workspace / "model")
    (workspace / "data.jsonl").write_bytes(data.read_bytes())
    recipe = {
        "model_name_or_path": str(workspace / "model"),
        "datasets": [
            {
                "path": str(workspace / "data.jsonl"),
                "type": "prompt_completion",
                "prompt_column": "question",
                "completion_column": "answer",
            }
        ],
        "dataset_cache_dir": str(workspace / "tokens"),
        "max_length": MAX_LENGTH,
        "packing": True,
        "global_batch_size": BATCH_SIZE,
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": 10**6,
        "learning_rate": 1e-3,
        "logging_steps": 10,
        "export_at_end": False,
    }
    (workspace / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (workspace / "facts.json").write_text(
        json.dumps({"max_length": MAX_LENGTH, "batch_size": BATCH_SIZE})
    )
    for precision, mixed in (("fp32", "no"), ("bf16", "bf16")):
        single = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "mixed_precision": mixed,
        }
        fsdp2 = single | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
        (workspace / f"single-{precision}.yaml").write_text(yaml.safe_dump(single))
        (workspace / f"fsdp2-{precision}.yaml").write_text(yaml.safe_dump(fsdp2))


def table(running: Sequence[Running], precision: str) -> list[str]:
    """A row for each contestant: the median of its steps' tokens per second, its middle half, and
    ratios.
    """
    medians = {each.contestant.title: statistics.median(each.tokens_per_second) for each in running}
    by_cpu = {each.contestant.title: each.tokens_per_cpu_second for each in running}
    trl = [title for title in medians if title.startswith("TRL")]
    lines = [
        "| precision | contestant | tokens/s, median | middle half | x bare | x TRL's better | "
        "tokens/CPU s | x bare | x TRL's better | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in running:
        title = each.contestant.title
        low, _, high = statistics.quantiles(each.tokens_per_second, n=4)
        cells = [precision, title, f"{medians[title]:,.0f}", f"{low:,.0f} to {high:,.0f}"]
        for column in (medians, by_cpu):
            cells += [f"{by_cpu[title]:,.0f}"] if column is by_cpu else []
            cells.append(
                f"{column[title] / column['bare loop']:.3f}" if "bare loop" in column else ""
            )
            cells.append(f"{column[title] / max(column[t] for t in trl):.2f}" if trl else "")
        lines.append(
            "| " + " | ".join([*cells, f"{each.peak_memory_bytes / 2**20:,.0f} MiB"]) + " |"
        )
    return lines


def save(results: dict[str, list[Running]], lines: list[str], output: Path) -> None:
    """The table, every step and the plot of the precisions measured so far."""
    (output / "speed.md").write_text("\n".join(lines) + "\n")
    steps = {
        p: {each.contestant.title: each.steps for each in running} for p, running in results.items()
    }
    (output / "speed.json").write_text(json.dumps(steps))
    plot(results, output / "speed.png")


def plot(results: dict[str, list[Running]], path: Path) -> None:
    """Boxes of tokens per second, a panel for each precision."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(6.5 * len(results), 4), squeeze=False, sharey=True
    )
    for axis, (precision, running) in zip(axes[0], results.items(), strict=True):
        shown = list(reversed(running))
        axis.boxplot(
            [each.tokens_per_second for each in shown], orientation="horizontal", showfliers=False
        )
        axis.set_yticks(range(1, len(shown) + 1), [each.contestant.title for each in shown])
        axis.set_xlabel("tokens per second (padding not counted)")
        axis.set_xlim(left=0)
        axis.set_title(precision)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="JSON lines with `question` and `answer` (GSM8K)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a folder with a tokenizer (stories260k)"
    )
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"]
    )
    parser.add_argument(
        "--only", nargs="+", help="contestants whose title contains one of these words"
    )
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each contestant")
    parser.add_argument("--block", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="cores that each contestant may use, over all its ranks",
    )
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    wanted = [
        c for c in CONTESTANTS if not options.only or any(word in c.title for word in options.only)
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Running]] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="finetune-speed-") as folder:
        workspace = Path(folder)
        prepare(
            workspace,
            options.data,
            options.tokenizer,
            MODEL | {"num_hidden_layers": options.layers},
        )
        for precision in options.precision:
            print(f"{precision}: load {os.getloadavg()[0]:.2f} before", file=sys.stderr)
            began = time.time()
            with started(wanted, workspace, precision == "bf16", options.threads) as running:
                measure(running, options.steps, options.block, options.warm_up)
            lines += table(running, precision)[0 if not lines else 2 :]
            results[precision] = running
            # what has been measured outlives what comes after it
            save(results, lines, options.output)
            print(
                f"{precision}: {time.time() - began:.0f} s, load {os.getloadavg()[0]:.2f} after",
                file=sys.stderr,
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
