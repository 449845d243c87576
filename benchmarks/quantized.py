"""Memory of a quantized base under LoRA beside a bf16 one, on a CPU: while it is loaded, and in a
step.

    python benchmarks/quantized.py --parameters 1e9 --output benchmarks/results/quantized

A checkpoint of random bf16 weights is made on the spot. Each base is a process of its own: FSDP2 in
a world of one, bf16, activation checkpointing, LoRA of rank 16 on all linear layers, a row of 512
tokens. Memory is the process's private resident memory at its highest, over what it had before; a
step's, over what it had once the model was loaded as well. Writes quantized.json and quantized.md,
with ratios to the bf16 base.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.loading import make_checkpoint, sampled  # noqa: E402
from finetune.config.schema import Lora, Model, Optimization, Quantization  # noqa: E402
from finetune.errors import exit_code  # noqa: E402

BASES = {
    "bf16": Quantization(),
    "int8": Quantization(load_in_8bit=True),
    "nf4": Quantization(load_in_4bit=True),
    "nf4, double-quantized": Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True),
}
TOKENS = 512
STEPS = 3


@dataclass(frozen=True)
class Measured:
    """One base. Bytes of private resident memory; seconds of the fastest step."""

    base: str
    parameters: int  # bytes of all parameters in memory, adapters included
    load_peak: int
    loaded: int
    step_peak: int  # over `loaded`
    load_seconds: float
    step_seconds: float

    @property
    def peak(self) -> int:
        return max(self.load_peak, self.loaded + self.step_peak)


def measure(base: str, folder: Path) -> Measured:
    """Loads the model on this base, and trains some steps."""
    import torch

    from finetune.config.layout import Sharding
    from finetune.distributed.join import join
    from finetune.models.load import load_model
    from finetune.optim.optimizers import build_optimizer

    sharding = Sharding(
        layout="fsdp2", use_cpu=True, mixed_precision="bf16", activation_checkpointing=True
    )
    world = join(sharding)
    lora = Lora(use_peft=True)
    begun = time.perf_counter()
    with sampled() as loading:
        model, _ = load_model(Model(model_name_or_path=str(folder)), lora, 0, world, BASES[base])
    load_seconds = time.perf_counter() - begun
    optimizer = build_optimizer(model, Optimization())
    ids = torch.randint(3, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    seconds = []
    with sampled() as stepping:
        for _ in range(STEPS):
            begun = time.perf_counter()
            world.accelerator.backward(
                model(input_ids=ids, labels=ids, position_ids=torch.arange(TOKENS)[None])
            )
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begun)
    parameters = sum(getattr(p, "to_local", p.detach)().nbytes for p in model.parameters())
    return Measured(
        base,
        parameters,
        loading["peak"],
        loading["settled"],
        stepping["peak"],
        load_seconds,
        min(seconds),
    )


def table(results: list[Measured]) -> list[str]:
    """The table of benchmarks/results/cpu.md."""
    lines = [
        "| frozen base | parameters | loading, peak | a step, over what is loaded | highest | x "
        "bf16 | seconds to load | a step, x bf16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = results[0]
    for r in results:
        mib = [
            f"{size / 2**20:,.0f} MiB" for size in (r.parameters, r.load_peak, r.step_peak, r.peak)
        ]
        ratios = (
            f"{r.peak / first.peak:.2f}",
            f"{r.load_seconds:.1f}",
            f"{r.step_seconds / first.step_seconds:.2f}",
        )
        lines.append(f"| {' | '.join((r.base, *mib, *ratios))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/quantized"))
    parser.add_argument("--base", choices=list(BASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.base is not None:
        (options.folder / "measured.json").write_text(
            json.dumps(asdict(measure(options.base, options.folder)))
        )
        os._exit(0)  # a process group of one needs no farewell
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        child = os.fork()  # makes the checkpoint, so that its memory is not this process's
        if child == 0:
            os._exit(exit_code(partial(make_checkpoint, folder, int(options.parameters))))
        assert os.waitpid(child, 0)[1] == 0
        for base in BASES:
            subprocess.run(
                [sys.executable, __file__, "--base", base, "--folder", str(folder)], check=True
            )
            results.append(Measured(**json.loads((folder / "measured.json").read_text())))
            print(table([results[0], results[-1]])[-1], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "quantized.json").write_text(
        json.dumps([asdict(r) for r in results], indent=1) + "\n"
    )
    (options.output / "quantized.md").write_text("\n".join(table(results)) + "\n")


if __name__ == "__main__":
    main()
