"""Preference training on a CPU: ours beside TRL's DPOTrainer, with LoRA and in full, in one run.

    python benchmarks/preferences.py --data dpo_en_demo.json --tokenizer stories260k --output
    benchmarks/results/preferences

All train the same Llama with random weights on the same pairs with the same optimizer, precision
and threads, in turns, as in `speed.py`. A step has about as many tokens; padding is not counted as
tokens. Needs `pip install .[benchmarks]`.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.speed import Contestant, Running, measure, started  # noqa: E402

MODEL = {
    "model_type": "llama",
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MAX_LENGTH = 768  # tokens of a side, at most
BETA = 0.1
PAIRS = 4  # in a step: TRL's pairs
ROWS = 2  # our packed rows of two times MAX_LENGTH tokens, which hold about as many tokens
LORA = "use_peft=true lora_r=16 lora_alpha=32"
CONTESTANTS = (
    Contestant("finetune, LoRA", ("ours", "--keys", LORA)),
    Contestant("TRL DPOTrainer, LoRA", ("trl-dpo-lora",)),
    Contestant("finetune, full", ("ours",)),
    Contestant("TRL DPOTrainer, full", ("trl-dpo",)),
)


def prepare(workspace: Path, data: Path, tokenizer: Path) -> None:
    """What all contestants read: the model, the pairs as text, of which none is cut, and the
    recipe.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    tokens.pad_token = tokens.pad_token or tokens.eos_token
    torch.manual_seed(0)
    special = {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id}
    config = AutoConfig.for_model(**MODEL | special | {"vocab_size": len(tokens)})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        workspace / "model"
    )
    tokens.save_pretrained(workspace / "model")
    with (workspace / "pairs.jsonl").open("w") as file:
        for row in json.loads(data.read_text()):
            prompt = "\n".join(turn["value"] for turn in row["conversations"]) + "\n"
            pair = {
                "prompt": prompt,
                "chosen": row["chosen"]["value"],
                "rejected": row["rejected"]["value"],
            }
            longest = max(
                len(tokens(prompt + pair[side])["input_ids"]) for side in ("chosen", "rejected")
            )
            if longest < MAX_LENGTH - 2 and pair["chosen"] != pair["rejected"]:
                file.write(json.dumps(pair) + "\n")
    recipe = {
        "model_name_or_path": str(workspace / "model"),
        "method": "dpo",
        "beta": BETA,
        "datasets": [{"path": str(workspace / "pairs.jsonl")}],
        "dataset_cache_dir": str(workspace / "tokens"),
        "max_length": MAX_LENGTH,
        "packing": True,
        "global_batch_size": ROWS,
        "per_device_train_batch_size": ROWS,
        "max_steps": 10**6,
        "learning_rate": 1e-3,
        "logging_steps": 10,
        "export_at_end": False,
    }
    (workspace / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (workspace / "facts.json").write_text(
        json.dumps({"max_length": MAX_LENGTH, "batch_size": PAIRS, "beta": BETA})
    )
    for precision, mixed in (("fp32", "no"), ("bf16", "bf16")):
        single = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "mixed_precision": mixed,
        }
        (workspace / f"single-{precision}.yaml").write_text(yaml.safe_dump(single))


def table(running: Sequence[Running], precision: str) -> list[str]:
    """A row for each contestant, with its ratios to TRL's of the same kind."""
    lines = [
        "| precision | contestant | tokens/s, median | middle half | x TRL | peak memory | x TRL |",
        "|---|---|---|---|---|---|---|",
    ]
    found: dict[str, Running] = {each.contestant.title: each for each in running}
    for title, each in found.items():
        low, _, high = quantiles(each.tokens_per_second, n=4)
        theirs = found.get("TRL DPOTrainer, " + title.partition(", ")[2])
        speed = median(each.tokens_per_second)
        memory = each.peak_memory_bytes
        cells: list[Any] = [precision, title, f"{speed:,.0f}", f"{low:,.0f} to {high:,.0f}"]
        cells.append(f"{speed / median(theirs.tokens_per_second):.2f}" if theirs else "")
        cells += [
            f"{memory / 2**20:,.0f} MiB",
            f"{memory / theirs.peak_memory_bytes:.2f}" if theirs else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="LLaMA-Factory's dpo_en_demo.json, or rows like its",
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument(
        "--only", nargs="+", help="contestants whose title contains one of these words"
    )
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each contestant")
    parser.add_argument("--block", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/preferences"))
    options = parser.parse_args()
    wanted = [
        c for c in CONTESTANTS if not options.only or any(word in c.title for word in options.only)
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="finetune-preferences-") as folder:
        workspace = Path(folder)
        prepare(workspace, options.data, options.tokenizer)
        for precision in options.precision:
            print(f"{precision}: load {os.getloadavg()[0]:.2f} before", file=sys.stderr)
            with started(wanted, workspace, precision == "bf16", options.threads) as running:
                measure(running, options.steps, options.block, options.warm_up)
                lines += table(running, precision)[0 if not lines else 2 :]
            (options.output / "preferences.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
