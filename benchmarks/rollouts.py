"""The embedded engine beside transformers' `generate` and continuous batching, and a step beside
TRL's, on a CPU.

    python benchmarks/rollouts.py MODEL gsm8k_train.jsonl [--rounds 3]

MODEL: a folder with weights and a tokenizer. The rows have a `question`. Needs trl. Prints CPU
seconds, since other processes may share the machine, and their ratios; both sides sample as many
completions of the same prompts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# not this folder, where a module may have a library's name
sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: E402

from finetune import Session, load_recipe  # noqa: E402
from finetune.rollout.embedded import EmbeddedEngine  # noqa: E402
from finetune.rollout.engine import Request, Sampling  # noqa: E402

PROMPTS = 8
GENERATIONS = 8
MOST = 64
REWARD = (
    "def short(completion_ids, **_):\n    return [-float(len(set(ids))) for ids in "
    "completion_ids]\n"
)


def measure(function: Callable[[], Any]) -> float:
    """CPU seconds of all threads."""
    began = time.process_time()
    function()
    return time.process_time() - began


def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> None:
    """Prints the medians of both, measured in turns after one round that does not count."""
    found = [(measure(ours), measure(theirs)) for _ in range(rounds + 1)][1:]
    mine, other = (statistics.median(each) for each in zip(*found, strict=True))
    print(
        f"{name}: ours {mine:.2f} CPU s, transformers {other:.2f}; {other / mine:.2f} times as "
        "fast",
        flush=True,
    )


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [
        {"prompt": json.loads(line)["question"]}
        for line in Path(options.prompts).read_text().splitlines()[:64]
    ]
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(Path(folder), options.model, rows)
        compare_engines(
            session, options.model, tokenizer, [row["prompt"] for row in rows], options.rounds
        )
        compare_steps(session, Path(folder), options.model, tokenizer, rows, options.rounds)


def open_session(folder: Path, model: str, rows: list[dict[str, str]]) -> Session:
    """Ours, in fp32 in one process."""
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows)
    )
    (folder / "short.py").write_text(REWARD)
    (folder / "fp32.yaml").write_text('distributed_type: "NO"\nmixed_precision: "no"\n')
    (folder / "recipe.yaml").write_text(
        f"method: grpo\nmodel_name_or_path: {model}\nrewards: [short.py:short]\ndatasets: [{{path: "
        f"rows.jsonl}}]\nnum_generations: {GENERATIONS}\nmax_completion_length: {MOST}\n"
        f"global_batch_size: {PROMPTS}\nper_device_train_batch_size: 64\nmax_length: 512\n"
        f"max_steps: 100\nlearning_rate: 1e-4\noutput_dir: {folder}/run\ndataset_cache_dir: "
        f"{folder}/cache\n"
    )
    return Session(load_recipe(folder / "recipe.yaml"), str(folder / "fp32.yaml"))


def compare_engines(
    session: Session, model: str, tokenizer: Any, texts: list[str], rounds: int
) -> None:
    """64 different prompts, and 8 with 8 completions each, all tokens sampled to the end."""
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    ends = tokenizer.eos_token_id
    engine = EmbeddedEngine(session.model, session.world, [ends], 64)
    eight = [text for text in texts[:8] for _ in range(8)]
    for name, chosen in (("64 prompts", texts), ("8 prompts, 8 completions each", eight)):
        ids = [tokenizer(text).input_ids for text in chosen]
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        requests = [Request(tuple(row), (0, place)) for place, row in enumerate(ids)]
        keys = {
            "max_new_tokens": MOST,
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
            "pad_token_id": 0,
            "eos_token_id": ends,
        }

        def generate(padded: Any = padded, mask: Any = mask, keys: Any = keys) -> None:
            plain.generate(input_ids=padded, attention_mask=mask, **keys)

        compare(
            f"engine, {name}",
            lambda requests=requests: engine.sample(requests, Sampling(max_tokens=MOST)),
            generate,
            rounds,
        )  # type: ignore[misc]
    ids = [tokenizer(text).input_ids for text in texts]
    requests = [Request(tuple(row), (0, place)) for place, row in enumerate(ids)]
    config = GenerationConfig(
        max_new_tokens=MOST, do_sample=True, top_k=0, top_p=1.0, eos_token_id=ends, pad_token_id=0
    )
    compare(
        "engine beside transformers' continuous batching, 64 prompts",
        lambda: engine.sample(requests, Sampling(max_tokens=MOST)),
        lambda: plain.generate_batch(ids, generation_config=config, progress_bar=False),
        1,
    )


def compare_steps(
    session: Session,
    folder: Path,
    model: str,
    tokenizer: Any,
    rows: list[dict[str, str]],
    rounds: int,
) -> None:
    """Steps of 8 prompts with 8 completions each: sampled, rewarded, learned."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batches = session.batches()

    def ours() -> None:
        session.forward_backward(next(batches))
        session.optim_step()

    def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-float(len(set(ids))) for ids in completion_ids]

    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=MOST,
        learning_rate=1e-4,
        max_steps=rounds + 1,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.append(-time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] += time.process_time()

    data = Dataset.from_list(rows)
    keys = {
        "args": args,
        "train_dataset": data,
        "processing_class": tokenizer,
        "callbacks": [Clock()],
    }
    GRPOTrainer(model, short, **keys).train()
    mine = statistics.median([measure(ours) for _ in range(rounds + 1)][1:])
    other = statistics.median(seconds[1:])
    print(
        f"a whole step: ours {mine:.2f} CPU s, TRL's {other:.2f}; {other / mine:.2f} times as fast",
        flush=True,
    )


if __name__ == "__main__":
    main()
