"""DeepSpeed's ZeRO beside what its files are translated to here: the same losses, and the memory of
a rank.

    python benchmarks/zero.py --model stories260k --data gsm8k_train.jsonl   # needs deepspeed

Trains the model in fp32 on CPU ranks: by DeepSpeed's own engine at stages 1, 2 and 3, and here
under an Accelerate file that asks for each stage. Both get the same rows in the same order, the
same optimizer and the same clipping; DeepSpeed trains transformers' own model with the cross
entropy of its logits. Every contestant runs on ranks of its own.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])
STAGES = (1, 2, 3)
BUCKET_NUMBERS = 500_000  # DeepSpeed's own buckets would be 2 GB
ROWS_PER_RANK = 2
CLIP = 1.0
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Result:
    """What one contestant did; the bytes are of the rank that held most."""

    contestant: str
    stage: int
    losses: list[float]  # of each step, the mean over the trained tokens of all ranks
    norms: list[float]  # of each step's gradients before clipping
    held_bytes: int  # in tensors between two steps
    gradient_bytes: int  # more than that in tensors, after a backward
    peak_bytes: int  # of resident memory, over what the process had before the model


def write_recipe(folder: Path, model: str, data: str, length: int, ranks: int) -> Path:
    import yaml

    path = folder / "recipe.yaml"
    recipe = {
        "model_name_or_path": model,
        "datasets": [{"path": data, "prompt_column": "question", "completion_column": "answer"}],
        "dataset_cache_dir": str(folder / "cache"),
        "max_length": length,
        "packing": False,
        "overlength": "truncate",
        "per_device_train_batch_size": ROWS_PER_RANK,
        "global_batch_size": ROWS_PER_RANK * ranks,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


def write_accelerate_file(folder: Path, stage: int, ranks: int) -> Path:
    import yaml

    path = folder / f"zero{stage}.yaml"
    file = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": stage},
        "num_processes": ranks,
    }
    path.write_text(yaml.safe_dump(file | {"mixed_precision": "no", "use_cpu": True}))
    return path


def tensor_bytes() -> int:
    """The bytes of every tensor's storage in this process, each counted once."""
    import torch

    gc.collect()
    tensors = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor) and not found.is_meta
    ]
    tensors += [
        local for found in tensors if (local := getattr(found, "_local_tensor", None)) is not None
    ]
    tensors += [found.grad for found in tensors if found.is_leaf and found.grad is not None]
    storages: dict[int, int] = {}
    for tensor in tensors:
        try:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        except (
            NotImplementedError,
            RuntimeError,
        ):  # a wrapper, whose inner tensor is found by itself
            continue
    return sum(storages.values())


def train_with_deepspeed(
    stage: int, recipe: Any, batches: Any, steps: int, begin: Any
) -> dict[str, Any]:
    """On this rank, by DeepSpeed's engine and transformers' model."""
    import deepspeed
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    begin()
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model.model_name_or_path, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS_PER_RANK,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET_NUMBERS},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    measured: dict[str, Any] = {"sums": [], "counts": [], "norms": []}
    for step in range(steps):
        before = tensor_bytes()
        batch = batches.step_batch(step)
        (micro_batch,) = batch.micro_batches
        logits = engine(input_ids=micro_batch.input_ids, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), micro_batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        del logits
        engine.backward(loss * (engine.world_size / batch.trained_tokens))
        after = tensor_bytes()
        engine.step()
        measured["sums"].append(float(loss.detach()))
        measured["counts"].append(batch.trained_tokens)
        measured["norms"].append(float(engine.get_global_grad_norm()))
        measured |= {"held_bytes": before, "gradient_bytes": after - before}
    return measured


def train_here(
    stage: int, folder: Path, recipe: Any, batches: Any, steps: int, begin: Any, world: Any
) -> dict[str, Any]:
    """On this rank, by what the Accelerate file of that stage is translated to."""
    import torch

    from finetune.distributed.gradients import clip_gradients
    from finetune.models.load import load_model
    from finetune.optim.optimizers import build_optimizer
    from finetune.training.step import accumulate_gradients

    begin()
    model, _ = load_model(recipe.model, recipe.lora, 0, world)
    optimizer = build_optimizer(model, recipe.optimization)
    model.train()
    measured: dict[str, Any] = {"sums": [], "counts": [], "norms": []}
    for step in range(steps):
        before = tensor_bytes()
        batch = batches.step_batch(step)
        found = accumulate_gradients(model, batch, world)
        after = tensor_bytes()
        measured["norms"].append(float(clip_gradients(model, CLIP)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        measured["sums"].append(float(found.loss_sum))
        measured["counts"].append(batch.trained_tokens)
        measured |= {"held_bytes": before, "gradient_bytes": after - before}
        del found
    assert isinstance(model, torch.nn.Module)
    return measured


def run_rank(contestant: str, stage: int, steps: int, folder: Path) -> None:
    """One rank of one contestant; rank 0 writes the result."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    from benchmarks.layouts import peak, reset_peak
    from finetune.config.accelerate_file import read_sharding
    from finetune.config.reader import read_recipe
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer
    from finetune.distributed.join import join, leave

    torch.set_num_threads(1)
    recipe = read_recipe(str(folder / "recipe.yaml"))
    world = join(read_sharding(str(folder / f"zero{stage}.yaml"), None, os.environ))
    batches = prepare_data(
        recipe, load_tokenizer(recipe.model, recipe.data), world.data_parallel
    ).train
    started: list[int] = []

    def begin() -> None:
        started.append(reset_peak(world.device))

    if contestant == "DeepSpeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        measured = train_with_deepspeed(stage, recipe, batches, steps, begin)
    else:
        measured = train_here(stage, folder, recipe, batches, steps, begin, world)
    measured["peak_bytes"] = peak(world.device) - started[0]
    every = world.gather(measured)
    if world.is_main:
        sums = [sum(of_step) for of_step in zip(*(rank["sums"] for rank in every), strict=True)]
        result = Result(
            contestant=contestant,
            stage=stage,
            losses=[total / count for total, count in zip(sums, measured["counts"], strict=True)],
            norms=measured["norms"],
            **{
                key: max(rank[key] for rank in every)
                for key in ("held_bytes", "gradient_bytes", "peak_bytes")
            },
        )
        (folder / "result.json").write_text(json.dumps(asdict(result)))
    leave(world)


def run_ranks(contestant: str, stage: int, steps: int, ranks: int, folder: Path) -> Result:
    """One contestant on ranks of its own. Raises where a rank fails, with what it wrote."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    # Files: a pipe that nobody reads would stop a rank, and with it all.
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [
            sys.executable,
            __file__,
            "--rank",
            contestant,
            "--stages",
            str(stage),
            "--steps",
            str(steps),
        ]
        environment = os.environ | {
            k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, "--output", folder],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(
            f"{contestant}, stage {stage}:\n" + "\n".join(log.read_text()[-3000:] for log in logs)
        )
    return Result(**json.loads((folder / "result.json").read_text()))


def show_table(results: list[Result]) -> str:
    """Markdown: a line a contestant and stage, MiB of the rank that held most."""
    lines = [
        (
            "| stage | engine | last loss | last gradient norm | held between steps | more with "
            "gradients | peak resident |"
        )
    ]
    lines.append("|" + "---|" * 7)
    for r in results:
        sizes = " | ".join(
            f"{size / 2**20:.1f}" for size in (r.held_bytes, r.gradient_bytes, r.peak_bytes)
        )
        lines.append(
            f"| {r.stage} | {r.contestant} | {r.losses[-1]:.6f} | {r.norms[-1]:.6f} | {sizes} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder of a model with its tokenizer")
    parser.add_argument("--data", help="GSM8K's file of questions and answers")
    parser.add_argument("--length", type=int, default=256, help="tokens of an example at most")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--output", type=Path, help="a folder for results.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # the contestant, in a rank's own process
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.stages[0], options.steps, options.output)
        os._exit(0)  # a thread of DeepSpeed's would abort the interpreter's own end now and then
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recipe(folder, options.model, options.data, options.length, options.ranks)
        for stage in options.stages:
            write_accelerate_file(folder, stage, options.ranks)
            results += [
                run_ranks(who, stage, options.steps, options.ranks, folder)
                for who in ("DeepSpeed", "finetune")
            ]
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(
            json.dumps([asdict(r) for r in results], indent=1) + "\n"
        )
    print(show_table(results))


if __name__ == "__main__":
    main()
