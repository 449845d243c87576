"""Export of a random float32 checkpoint to bfloat16: memory and time, beside Accelerate's
merge_fsdp_weights and a copy.

    python benchmarks/export.py [--layers 24] [--rounds 3] [--folder DIR]

With 24 layers the model has 1.99 billion parameters, 7.94 GB in float32. The checkpoint is the kind
of folder that `accelerator.save_state` writes under FSDP, so that both tools read the same bytes.
Every measurement is a process of its own, with the checkpoint out of the page cache before it;
rounds take turns, and medians are printed. "Copy" reads the checkpoint and writes as many bytes as
the export does, fsync included, and imports neither torch nor any other library for it. The
processor's seconds are those of the process and its children, user and system. Memory is the
highest sum of the proportional sets of the process and its children, in which a page that several
of them share counts once, looked at twenty times a second, less that of a process that only imports
the same.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
COPY_BLOCK_BYTES = 32 * 1024 * 1024
CONFIG: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
IMPORTS = "import torch, finetune.export.export"
MERGE_IMPORTS = (
    "import torch, torch.distributed.checkpoint; from accelerate.utils import merge_fsdp_weights"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One process, from its start to its end."""

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="folder for the files while it runs; default: a temporary one"
    )
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--copy", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.make, options.layers)
    elif options.copy:
        copy_bytes(*options.copy)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(table(compare(Path(folder), options.layers, options.rounds)))


def compare(folder: Path, layers: int, rounds: int) -> dict[str, list[Measured]]:
    """Every kind of process, `rounds` times each, in turns."""
    run([sys.executable, __file__, "--make", str(folder / "state"), "--layers", str(layers)])
    state = folder / "state"
    out = folder / "out"
    finetune = [
        sys.executable,
        "-m",
        "finetune",
        "export",
        str(state),
        "--dtype",
        "bfloat16",
        "--output",
        str(out),
    ]
    merge = f"{MERGE_IMPORTS}; merge_fsdp_weights('{state}/pytorch_model_fsdp_0', '{out}')"
    commands = {
        "imports": [sys.executable, "-c", IMPORTS],
        "merge imports": [sys.executable, "-c", MERGE_IMPORTS],
        "copy": [sys.executable, __file__, "--copy", str(state), str(out)],
        "finetune export --no-verify": [*finetune, "--no-verify"],
        "merge_fsdp_weights": [sys.executable, "-c", merge],
        "finetune export": finetune,
    }
    found: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            drop_from_cache(state)
            found[name].append(run(command))
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
            shutil.rmtree(out, ignore_errors=True)
    return found


def table(found: dict[str, list[Measured]]) -> str:
    """A Markdown table of medians."""
    lines = [
        "| | Seconds | × copy | CPU seconds | Peak memory over imports, MiB |",
        "|---|---|---|---|---|",
    ]
    copy = statistics.median(m.seconds for m in found["copy"])
    for name in ("copy", "finetune export --no-verify", "finetune export", "merge_fsdp_weights"):
        baseline = found["merge imports" if name.startswith("merge") else "imports"]
        seconds = statistics.median(m.seconds for m in found[name])
        memory = max(m.peak_memory_bytes for m in found[name]) - max(
            m.peak_memory_bytes for m in baseline
        )
        shown = "" if name == "copy" else f"{memory / 2**20:,.0f}"
        cpu_seconds = statistics.median(m.cpu_seconds for m in found[name])
        lines.append(
            f"| {name} | {seconds:.1f} | {seconds / copy:.2f} | {cpu_seconds:.1f} | {shown} |"
        )
    starting = statistics.median(m.seconds for m in found["imports"])
    return "\n".join(
        [*lines, f"\nStarting Python and importing alone: {starting:.1f} s, in all but the copy."]
    )


def run(command: list[str]) -> Measured:
    """Runs a process to its end; an AssertionError where it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    peak_memory_bytes = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak_memory_bytes
        while not ended.wait(0.05):
            peak_memory_bytes = max(peak_memory_bytes, memory_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    ended.set()
    watcher.join()
    assert status == 0, f"{command} ended with {status}"
    return Measured(seconds, usage.ru_utime + usage.ru_stime, peak_memory_bytes)


def memory_bytes(pid: int) -> int:
    """The proportional sets of a process and its children, added up. 0 where it has ended."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        # A child that has not begun its own program yet (vfork) has the very memory of its parent.
        children = [
            child for child in process.children(recursive=True) if child.cmdline() != command
        ]
        return sum(one.memory_full_info().pss for one in (process, *children))
    except psutil.NoSuchProcess:
        return 0


def drop_from_cache(folder: Path) -> None:
    """Makes the next reader of these files read them from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_bytes(source: Path, target: Path) -> None:
    """Reads every file under `source` and writes half of its bytes (bfloat16 of float32) to one
    file.
    """
    buffer = memoryview(bytearray(COPY_BLOCK_BYTES))
    target.mkdir()
    with (target / "copy").open("wb", buffering=0) as written:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    written.write(buffer[: count // 2])
        os.fsync(written.fileno())


def make_checkpoint(folder: Path, layers: int) -> None:
    """What `accelerator.save_state` leaves under FSDP, four files of random values, made a tensor
    at a time.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.planner import WriteItem
    from transformers import AutoConfig, AutoModelForCausalLM

    class RandomPlanner(dcp.DefaultSavePlanner):
        """Draws a tensor when its turn to be written comes."""

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            assert write_item.tensor_data is not None
            generator = torch.Generator().manual_seed(hash(write_item.index.fqn) % 2**31)
            tensor = torch.empty(write_item.tensor_data.size).normal_(0, 0.02, generator=generator)
            return tensor.add_(1) if "norm" in write_item.index.fqn else tensor

    config = AutoConfig.for_model("llama", **CONFIG, num_hidden_layers=layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    part = folder / "pytorch_model_fsdp_0"
    writer = dcp.FileSystemWriter(part, single_file_per_rank=True, thread_count=4)
    dcp.save(
        {"model": model.state_dict()}, storage_writer=writer, planner=RandomPlanner(), no_dist=True
    )
    config.save_pretrained(folder)
    size = sum(path.stat().st_size for path in part.iterdir())
    parameters = sum(p.numel() for p in model.parameters())
    print(
        json.dumps(
            {"parameters": parameters, "checkpoint_bytes": size, "files": len(list(part.iterdir()))}
        )
    )


if __name__ == "__main__":
    main()
