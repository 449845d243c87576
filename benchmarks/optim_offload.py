"""The optimizer's state in files (optim_offload: nvme): its rate beside dd's on the same disk, and
memory as the model doubles.

    python benchmarks/optim_offload.py [--folder DIR] [--layers 2 4 8 16] [--steps 5] [--json]

One process, FSDP2 in a world of one, bf16. Each model is trained in a process of its own, with its
state in files and in memory. dd's requests are direct, as ours are: the page cache, which could
hold all of it here, takes no part. `--folder` is on the disk that is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from finetune.config.layout import Sharding  # noqa: E402
from finetune.config.schema import Optimization  # noqa: E402
from finetune.distributed.join import join, leave  # noqa: E402
from finetune.distributed.parallelize import parallelize  # noqa: E402
from finetune.distributed.world import World  # noqa: E402
from finetune.optim.offload import OffloadedOptimizer  # noqa: E402
from finetune.optim.optimizers import build_optimizer  # noqa: E402
from finetune.plan.table import align_columns  # noqa: E402
from finetune.units import MIB  # noqa: E402

VOCABULARY = 2048
TOKENS = 64
DD_BLOCK = 8 << 20
DD_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    # in a process of its own
    parser.add_argument("--only", choices=("files", "memory"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(options)))
        return
    results: dict[str, Any] = {"dd": measure_dd(options.folder), "models": []}
    for layers in options.layers:
        found: dict[str, Any] = {"layers": layers}
        for where in ("files", "memory"):
            sizes = [
                "--hidden",
                str(options.hidden),
                "--layers",
                str(layers),
                "--steps",
                str(options.steps),
            ]
            command = [
                sys.executable,
                __file__,
                "--folder",
                str(options.folder),
                *sizes,
                "--only",
                where,
            ]
            # What is freed must be returned, to be seen: glibc else keeps tensors below 32 MiB, the
            # fp32 parameters among them.
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environment
            )
            found[where] = json.loads(done.stdout.splitlines()[-1])
        results["models"].append(found)
    print(json.dumps(results, indent=1) if options.json else show(results))


def measure_dd(folder: Path) -> dict[str, float]:
    """dd's direct writes and reads of DD_BYTES, in bytes per second; the best of three, in
    turns.
    """
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = f"{name}/dd"
        count = f"count={DD_BYTES // DD_BLOCK}"
        for _ in range(3):
            for kind, arguments in {
                "write": ["if=/dev/zero", f"of={file}", "oflag=direct", "conv=notrunc"],
                "read": [f"if={file}", "of=/dev/null", "iflag=direct"],
            }.items():
                started = time.perf_counter()
                subprocess.run(
                    ["dd", *arguments, f"bs={DD_BLOCK}", count],
                    check=True,
                    stderr=subprocess.DEVNULL,
                )
                seconds[kind].append(time.perf_counter() - started)
    return {kind: DD_BYTES / min(values) for kind, values in seconds.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of one model's steps; `options.only` says where its state is."""
    world = join(Sharding(layout="fsdp2", mixed_precision="bf16", use_cpu=True))
    model = build(options.layers[0], options.hidden, world)
    where = (
        {"optim_offload": "nvme", "offload_dir": str(options.folder)}
        if options.only == "files"
        else {}
    )
    optimizer = build_optimizer(model, Optimization(**where), world)  # type: ignore[arg-type]
    updates: list[float] = []
    for step in range(options.steps + 1):
        ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if step == 1:  # the first step may create state
            # proc_pid_clear_refs(5): the peak is that of now
            Path("/proc/self/clear_refs").write_text("5")
        started = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - started)
        gradients = count_bytes(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found: dict[str, Any] = {
        "parameters": count_bytes(model.parameters()),
        "gradients": gradients,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
        "update_seconds": median(updates[1:]),
    }
    if isinstance(optimizer, OffloadedOptimizer):
        found |= {
            "state": count_bytes(optimizer.buffers),
            "file": optimizer.file.size,
            "windows": len(optimizer.windows),
        }
        optimizer._update = lambda window, buffer: None  # type: ignore[method-assign]
        passes = []
        for _ in range(options.steps):
            started = time.perf_counter()
            optimizer.step()
            passes.append(time.perf_counter() - started)
        found["pass_seconds"] = median(passes)
    else:
        found["state"] = count_bytes(
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
    leave(world)
    return found


def build(layers: int, hidden: int, world: World) -> nn.Module:
    """A Llama with random weights, sharded."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.float32)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def values(name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        return (
            torch.ones(()).expand(shapes[name])[slices]
            if "norm" in name
            else torch.randn(shapes[name])[slices] * 0.02
        )

    return parallelize(model, values, world)


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of this rank's part of `tensors`."""
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors
    )


def show(results: dict[str, Any]) -> str:
    """The results as two tables."""
    read = results["dd"]["read"]
    write = results["dd"]["write"]
    lines = [
        (
            f"dd, direct, {DD_BLOCK >> 20} MiB requests: read {read / 1e6:,.0f} MB/s, written "
            f"{write / 1e6:,.0f} MB/s"
        )
    ]
    lines.append(
        "as many bytes read as written, one after the other: "
        f"{2 / (1 / read + 1 / write) / 1e6:,.0f} MB/s\n"
    )
    rates = [
        [
            "parameters",
            "file MB",
            "windows",
            "pass alone MB/s",
            "with the update MB/s",
            "update s",
            "in memory s",
        ]
    ]
    sizes = [
        [
            "MiB",
            "parameters",
            "gradients",
            "state",
            "peak",
            "peak - parameters - gradients",
            "in memory: state",
            "peak",
        ]
    ]
    for model in results["models"]:
        files = model["files"]
        memory = model["memory"]
        numel = f"{files['parameters'] / 2e6:,.0f}M"
        moved = 2 * files["file"] / 1e6
        rates.append(
            [
                numel,
                f"{files['file'] / 1e6:,.0f}",
                str(files["windows"]),
                f"{moved / files['pass_seconds']:,.0f}",
                f"{moved / files['update_seconds']:,.0f}",
                f"{files['update_seconds']:.2f}",
                f"{memory['update_seconds']:.2f}",
            ]
        )
        rest = files["peak"] - files["parameters"] - files["gradients"]
        shown = (
            files["parameters"],
            files["gradients"],
            files["state"],
            files["peak"],
            rest,
            memory["state"],
            memory["peak"],
        )
        sizes.append([numel, *(f"{value / MIB:,.0f}" for value in shown)])
    return "\n".join([*lines, align_columns(rates, left=(0,)), "", align_columns(sizes, left=(0,))])


if __name__ == "__main__":
    main()
