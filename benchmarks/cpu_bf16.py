"""bf16 on a CPU beside fp32, in one run: matrix products, and a step of the quickstart.

The goal is a ratio of at most
1.15.

    python benchmarks/cpu_bf16.py [--rounds 5] [--native]

--native: torch's own bf16 products, which are slow without instructions for them.

One thread, CPU seconds, in turns: what other jobs on the machine take is not counted.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

# tokens, features in, features out: an MLP of the quickstart, of 1B and of 8B, and a head of
# 128,256
SHAPES = (
    (1536, 128, 512),
    (1024, 1024, 1024),
    (512, 2048, 8192),
    (256, 4096, 14336),
    (256, 1024, 128256),
)


def make_products(tokens: int, inner: int, columns: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """The three products of a linear layer, by name, each in both dtypes."""
    import torch

    made: dict[str, dict[str, Callable[[], Any]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w, g = (
            torch.randn(*s, dtype=dtype)
            for s in ((tokens, inner), (columns, inner), (tokens, columns))
        )
        products: dict[str, Callable[[], Any]] = {
            "forward": lambda x=x, w=w: x @ w.t(),
            "gradient of the input": lambda g=g, w=w: g @ w,
            "gradient of the weight": lambda g=g, x=x: g.t() @ x,
        }
        for name, product in products.items():
            made.setdefault(name, {})[str(dtype).removeprefix("torch.")] = product
    return made


def make_steps() -> dict[str, Callable[[], Any]]:
    """A step of the quickstart's model on its batches, sharded by FSDP2 in a world of one, with
    checkpointed activations.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from benchmarks.techniques import step_of
    from finetune.config.pretrained import load_config
    from finetune.config.reader import read_recipe
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer, plan_vocabulary
    from finetune.distributed.model_parts import decoder_layers
    from finetune.distributed.world import DataParallelRank
    from finetune.models.cross_entropy import install_loss
    from finetune.models.decoder_layers import checkpoint_activations
    from finetune.models.documents import install_attention
    from finetune.models.load import build_on_meta
    from finetune.optim.optimizers import build_optimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recipe = read_recipe("quickstart", {})
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    data = prepare_data(recipe, tokenizer, DataParallelRank(0, 1, 0, torch.device("cpu")))
    config = load_config(recipe.model, plan_vocabulary(tokenizer, recipe.model))
    steps: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = build_on_meta(config, torch.float32).to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        install_attention(model, "auto")
        install_loss(model)
        checkpoint_activations(model, 1, "nothing")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (*decoder_layers(model), model):
            fully_shard(module, mp_policy=policy)
        step = step_of(model, build_optimizer(model, recipe.optimization, None))
        batches = data.train.batches(0)
        steps[str(dtype).removeprefix("torch.")] = lambda step=step, batches=batches: step(
            next(batches)
        )
    return steps


def compare(calls: Mapping[str, Callable[[], Any]], rounds: int) -> str:
    """Cells of a table: both medians in milliseconds, and the median ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if index:
                seconds[name].append(time.process_time() - began)
    fp32 = seconds["float32"]
    bf16 = seconds["bfloat16"]
    ratio = statistics.median(b / f for b, f in zip(bf16, fp32, strict=True))
    return (
        f"{1e3 * statistics.median(fp32):,.1f} | {1e3 * statistics.median(bf16):,.1f} | {ratio:.2f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--native", action="store_true")
    options = parser.parse_args()
    import torch

    from finetune.models.cpu_products import find_slow_dtypes, multiply_in_fp32

    torch.set_num_threads(1)
    steps = make_steps()
    if not options.native:
        multiply_in_fp32(torch.device("cpu"), {torch.bfloat16})
    slow = ", ".join(sorted(map(str, find_slow_dtypes()))) or "none"
    print(f"dtypes without instructions on this CPU: {slow}\n")
    print("| what | fp32, CPU ms | bf16, CPU ms | x fp32 |\n|---|---|---|---|")
    for shape in SHAPES[: 2 if options.native else None]:
        for name, calls in make_products(*shape).items():
            print(
                f"| {' x '.join(f'{size:,}' for size in shape)}, {name} | "
                f"{compare(calls, options.rounds)} |",
                flush=True,
            )
    print(f"| a step of the quickstart | {compare(steps, options.rounds)} |")


if __name__ == "__main__":
    main()
