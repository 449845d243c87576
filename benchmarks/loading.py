"""How much host memory loading takes: a checkpoint of random bf16 weights is made on the spot and
loaded on CPU ranks.

    python benchmarks/loading.py --parameters 1e9 --ranks 2 --output benchmarks/results/loading

The claim: summed over the ranks of a node, memory at its highest is at most 1.2 x what the loaded
parameters take, over the processes' own baseline. With `dtype: bfloat16` that is 1.2 x the file;
fp32 parameters, which full fine-tuning wants, take twice a bf16 file by themselves, and are
measured beside it. A plain `from_pretrained` on every rank is the comparison. The folder is removed
at the end. Writes loading.json.
"""

import argparse
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (imported once, before ranks are forked)
from safetensors.torch import save_file

from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Model
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.errors import exit_code
from finetune.models.load import load_model

SHARD_BYTES = 500 * 2**20
SAMPLED_EVERY_SECONDS = 0.02
WAYS: dict[str, tuple[Sharding, str]] = {
    "FSDP2, dtype bfloat16": (Sharding(layout="fsdp2", use_cpu=True), "bfloat16"),
    "FSDP2, dtype float32": (Sharding(layout="fsdp2", use_cpu=True), "float32"),
    "FSDP1, dtype bfloat16": (Sharding(layout="fsdp1", use_cpu=True), "bfloat16"),
    "from_pretrained on every rank, bfloat16": (Sharding(layout="ddp", use_cpu=True), "bfloat16"),
}


@dataclass(frozen=True)
class Measured:
    """Host memory of one way to load.

    Private bytes: those of a process that it shares with no other.
    """

    way: str
    ranks: int
    file_bytes: int
    loaded_bytes: int  # of the parameters in memory, over all ranks
    peak_bytes: int  # private memory at its highest, over the baseline, summed over ranks
    settled_bytes: int  # the same once loaded
    seconds: float

    @property
    def peak_over_loaded(self) -> float:
        return self.peak_bytes / self.loaded_bytes

    @property
    def peak_over_file(self) -> float:
        return self.peak_bytes / self.file_bytes


def make_checkpoint(folder: Path, parameters: int) -> int:
    """A Llama of about so many random bf16 parameters, in files of SHARD_BYTES; returns their
    bytes.

    One file in memory at a time.
    """
    from transformers import AutoConfig

    from finetune.models.load import build_on_meta

    vocabulary = 32000 if parameters > 10**8 else 1024
    layers = 16
    per_square = (
        12.25 * layers
    )  # parameters for each hidden^2: attention 4, feed-forward 3 x 2.75; embedding and head beside
    hidden = (math.sqrt(vocabulary**2 + per_square * parameters) - vocabulary) / per_square
    hidden = 64 * max(1, round(hidden / 64))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = build_on_meta(config, torch.bfloat16)
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    files = 0

    def flush() -> None:
        nonlocal files, batch
        name = f"model-{files:05d}.safetensors"
        save_file(batch, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(batch, name))
        files = files + 1
        batch = {}

    for name, parameter in model.named_parameters():
        batch[name] = torch.randn(parameter.shape, dtype=torch.bfloat16) * 0.02
        if sum(t.nbytes for t in batch.values()) > SHARD_BYTES:
            flush()
    flush()
    total = sum(p.numel() * 2 for p in model.parameters())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def measure(way: str, folder: Path, world: World) -> dict[str, Any]:
    """Loads on this rank; returns the bytes of its parameters and its memory."""
    sharding, dtype = WAYS[way]
    world.barrier()
    begun = time.perf_counter()
    with sampled() as memory:
        if sharding.layout == "ddp":
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            # from_pretrained maps the files: the weights are there once touched
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        else:
            model, _ = load_model(
                Model(model_name_or_path=str(folder), dtype=dtype), Lora(), 0, world
            )  # type: ignore[arg-type]
    loaded = sum(getattr(p, "to_local", p.detach)().nbytes for p in model.parameters())
    return {"loaded": loaded, "seconds": time.perf_counter() - begun} | memory


@contextmanager
def sampled() -> Iterator[dict[str, int]]:
    """Watches this process's private memory from a thread; fills in `peak` and `settled`, in bytes
    over the beginning.
    """
    found: dict[str, int] = {}
    baseline = private_bytes()
    highest = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLED_EVERY_SECONDS):
            highest[0] = max(highest[0], private_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield found
    done.set()
    watcher.join()
    settled = private_bytes()
    found |= {"peak": max(highest[0], settled) - baseline, "settled": settled - baseline}


def private_bytes() -> int:
    """The resident memory that belongs to this process alone: anonymous, without pages of files or
    of its parent.
    """
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(int(lines[key].split()[0]) for key in ("Private_Clean", "Private_Dirty")) * 1024


def on_ranks(way: str, ranks: int, folder: Path, file_bytes: int) -> Measured:
    """One way, on ranks forked for it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            values = {
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": ranks,
            }
            os.environ |= {k: str(v) for k, v in values.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os._exit(exit_code(partial(_rank, way, folder)))  # no clean-up of the parent's
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * ranks, f"{way} on {ranks} ranks ended with {codes}"
    every = json.loads((folder / "measured.json").read_text())
    return Measured(
        way=way,
        ranks=ranks,
        file_bytes=file_bytes,
        loaded_bytes=sum(rank["loaded"] for rank in every),
        peak_bytes=sum(rank["peak"] for rank in every),
        settled_bytes=sum(rank["settled"] for rank in every),
        seconds=max(rank["seconds"] for rank in every),
    )


def _rank(way: str, folder: Path) -> None:
    world = join(WAYS[way][0])
    every = world.gather(measure(way, folder, world))
    if world.is_main:
        (folder / "measured.json").write_text(json.dumps(every))
    leave(world)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/loading"))
    options = parser.parse_args()
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        child = os.fork()  # makes the checkpoint, so that its memory is not the ranks' to share
        if child == 0:
            os._exit(exit_code(partial(make_checkpoint, folder, int(options.parameters))))
        assert os.waitpid(child, 0)[1] == 0
        file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for way in options.ways:
            results.append(on_ranks(way, options.ranks, folder, file_bytes))
            print(_line(results[-1]), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "loading.json").write_text(
        json.dumps([asdict(r) for r in results], indent=1) + "\n"
    )


def _line(r: Measured) -> str:
    gib = 2**30
    return (
        f"{r.way}: file {r.file_bytes / gib:.2f} GiB, {r.ranks} ranks hold "
        f"{r.loaded_bytes / gib:.2f} GiB, peak {r.peak_bytes / gib:.2f} GiB "
        f"({r.peak_over_loaded:.2f} x loaded, {r.peak_over_file:.2f} x file), {r.seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
