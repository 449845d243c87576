"""A user's loss over `Session`: memory and time of a step beside the recipe's own loss, and beside
whole logits.

    python benchmarks/own_loss.py [--vocabulary 128256] [--tokens 1024] [--steps 4]

DPO of one pair on a Llama with random weights, fp32, one process. Each contestant is a process of
its own. Its memory is the highest resident memory of the steps, less that after the first update
(weights, optimizer state).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import finetune  # noqa: E402
from benchmarks.layouts import peak, reset_peak  # noqa: E402
from finetune.constants import IGNORE_INDEX  # noqa: E402
from finetune.models.cross_entropy import CrossEntropyHead  # noqa: E402
from finetune.plan.table import align_columns  # noqa: E402
from finetune.training.objectives import user_loss  # noqa: E402
from finetune.units import MIB  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CONTESTANTS = {
    "method": "method: dpo of the recipe",
    "function": "the same loss as a function",
    "logits": "the same loss from whole logits",
}
BETA = 0.1
LEARNING_RATE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, default=1024, help="of an answer")
    parser.add_argument("--steps", type=int, default=4, help="measured ones")
    # in a process of its own
    parser.add_argument("--only", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(options)))
        return
    found = {}
    for name in CONTESTANTS:
        # What is freed must be returned, to be seen: glibc else keeps tensors below 32 MiB.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
    print(show(found))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Losses, bytes and seconds of one contestant's steps."""
    with (
        tempfile.TemporaryDirectory() as folder,
        finetune.Session(make_recipe(options, Path(folder))) as session,
    ):
        batch = next(session.batches())
        step = {"method": by_method, "function": by_function, "logits": by_logits}[options.only](
            session, batch
        )
        losses = [step()]
        seconds = []
        session.optim_step(learning_rate=LEARNING_RATE)  # makes the optimizer's state
        before = reset_peak(session.world.device)
        for _ in range(options.steps):
            started = time.perf_counter()
            losses.append(step())
            session.optim_step(learning_rate=LEARNING_RATE)
            seconds.append(time.perf_counter() - started)
        most = peak(session.world.device)
    logits = 4 * batch.trained_tokens * options.vocabulary
    return {"losses": losses, "bytes": most - before, "logits": logits, "seconds": median(seconds)}


def make_recipe(options: argparse.Namespace, folder: Path) -> finetune.Recipe:
    """DPO of a small model with a large vocabulary on one pair of long answers."""
    quickstart = ROOT / "recipes" / "quickstart"
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64) | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = sizes | {
        "model_type": "llama",
        "vocab_size": options.vocabulary,
        "max_position_embeddings": 8192,
    }
    pair = {"question": "Count.", "chosen": "s" * options.tokens, "rejected": "t" * options.tokens}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (folder / "single.yaml").write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
    return finetune.load_recipe(
        model_config=model,
        tokenizer_name_or_path=str(quickstart),
        datasets=[{"path": str(folder / "pairs.jsonl")}],
        dataset_cache_dir=str(folder / "cache"),
        output_dir=str(folder / "run"),
        accelerate_config=str(folder / "single.yaml"),
        method="dpo",
        beta=BETA,
        max_length=8192,
        max_steps=10**6,
    )


def by_method(session: finetune.Session, batch: finetune.StepBatch) -> Callable[[], float]:
    return lambda: session.forward_backward(batch).loss


def by_function(session: finetune.Session, batch: finetune.StepBatch) -> Callable[[], float]:
    (before,) = session.log_probabilities(batch)

    def loss(found: Tensor, micro_batch: finetune.MicroBatch) -> Tensor:
        of = micro_batch.trained_documents
        chosen, rejected = torch.zeros(2).index_add(0, of, found - before)  # type: ignore[arg-type]
        return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))

    return lambda: session.forward_backward(batch, loss).loss


def by_logits(session: finetune.Session, batch: finetune.StepBatch) -> Callable[[], float]:
    """`by_function` with a head that makes all logits at once, as most scripts do."""

    def whole(
        head: CrossEntropyHead, hidden: Tensor, labels: Tensor, trained_positions: Tensor
    ) -> Tensor:
        logits = torch.nn.functional.linear(hidden[trained_positions], head.weight)
        ids = labels[trained_positions]
        chosen = logits.log_softmax(-1).gather(-1, ids.clamp(min=0)[:, None])[:, 0]
        return chosen.masked_fill(ids == IGNORE_INDEX, 0.0)

    vars(user_loss)["choose_label_head"] = lambda _targets: whole
    return by_function(session, batch)


def show(found: dict[str, dict[str, Any]]) -> str:
    """The table. Raises `AssertionError` where the contestants do not train alike."""
    first = found["method"]
    rows = [["", "memory of a step", "x method", "s a step", "x method"]]
    for name, title in CONTESTANTS.items():
        each = found[name]
        difference = max(
            abs(own - ours) for own, ours in zip(each["losses"], first["losses"], strict=True)
        )
        assert difference < 1e-5, (name, each["losses"], first["losses"])
        ratios = (each[key] / first[key] for key in ("bytes", "seconds"))
        memory, time_ = (f"{ratio:.2f}" for ratio in ratios)
        rows.append(
            [title, f"{each['bytes'] / MIB:,.0f} MiB", memory, f"{each['seconds']:.2f}", time_]
        )
    losses = ", ".join(f"{loss:.6f}" for loss in first["losses"])
    logits = f"logits of the pair: {first['logits'] / MIB:,.0f} MiB"
    return f"{align_columns(rows, left=(0,))}\n{logits}; losses of all: {losses}"


if __name__ == "__main__":
    main()
