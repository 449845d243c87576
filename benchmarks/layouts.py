"""What each layout costs: state per rank, peak memory, tokens per second and communication calls,
measured.

    python benchmarks/layouts.py --ranks 1 2 4 --output benchmarks/results/layouts

Trains a small Llama from random weights for a few steps under every layout, on the GPUs at hand or
on CPU ranks, with the project's own loading, loop and optimizer. State is counted from the tensors
that a rank really holds. Writes layouts.json, layouts.md (a table) and layouts.png (needs
matplotlib: `pip install .[benchmarks]`).
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

# asking for GPUs must not open them before the fork
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (imported once, before ranks are forked)
from torch import nn
from torch.distributed.tensor import DTensor

sys.path[0] = str(Path(__file__).resolve().parents[1])
from benchmarks.layouts_counted import communication, kept_bytes, planned_communication
from benchmarks.layouts_shown import Measured, plot, table
from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Model, Optimization
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.gradients import clip_gradients
from finetune.distributed.join import join, leave
from finetune.distributed.world import EXPERT, TENSOR, World
from finetune.errors import exit_code
from finetune.models.load import load_model
from finetune.optim.optimizers import build_optimizer
from finetune.training.step import accumulate_gradients

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MIXTURE = MODEL | {  # of the layouts whose name says so
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 176,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
LENGTH = 256  # tokens in a row
WARM_STEPS = 1  # steps not timed

LAYOUTS: dict[str, Sharding] = {
    "single": Sharding(layout="single"),
    "DDP": Sharding(layout="ddp"),
    "FSDP2 full shard": Sharding(layout="fsdp2"),
    "FSDP2 shard grad op": Sharding(layout="fsdp2", strategy="SHARD_GRAD_OP"),
    "FSDP2 hybrid 2 x 2": Sharding(
        layout="fsdp2", strategy="HYBRID_SHARD", replicate_size=2, shard_size=2
    ),
    "FSDP2, rows divided by 2": Sharding(layout="fsdp2", sequence_parallel_size=2),
    "FSDP2, rows divided by 4": Sharding(layout="fsdp2", sequence_parallel_size=4),
    "FSDP2, matrices divided by 2": Sharding(layout="fsdp2", tensor_parallel_size=2),
    "FSDP2, matrices divided by 4": Sharding(layout="fsdp2", tensor_parallel_size=4),
    "FSDP2, rows and matrices divided by 2": Sharding(
        layout="fsdp2", sequence_parallel_size=2, tensor_parallel_size=2
    ),
    "FSDP2 full shard, CPU offload": Sharding(layout="fsdp2", cpu_offload=True),
    "FSDP1 FULL_SHARD": Sharding(layout="fsdp1"),
    "FSDP1 SHARD_GRAD_OP": Sharding(layout="fsdp1", strategy="SHARD_GRAD_OP"),
    "FSDP1 NO_SHARD": Sharding(layout="fsdp1", strategy="NO_SHARD"),
    "FSDP1 HYBRID_SHARD 2 x 2": Sharding(layout="fsdp1", strategy="HYBRID_SHARD"),
    "mixture, FSDP2 full shard": Sharding(layout="fsdp2"),
    "mixture, experts over 2": Sharding(layout="fsdp2", expert_parallel_size=2),
    "mixture, experts over 4": Sharding(layout="fsdp2", expert_parallel_size=4),
    "mixture, hybrid 2 x 2, experts over 2": Sharding(
        layout="fsdp2",
        strategy="HYBRID_SHARD",
        replicate_size=2,
        shard_size=2,
        expert_parallel_size=2,
    ),
}


def possible_on(name: str, ranks: int) -> bool:
    """Whether the layout can be made of so many ranks."""
    if name == "single":
        return ranks == 1
    if ranks % (LAYOUTS[name].expert_parallel_size * LAYOUTS[name].ranks_per_batch):
        return False
    return ranks == 4 if "2 x 2" in name else True


def sharding_of(name: str, ranks: int) -> Sharding:
    """The layout on so many ranks: those that do not divide rows have rows of their own."""
    sharding = replace(LAYOUTS[name], use_cpu=not torch.cuda.is_available())
    return (
        sharding
        if sharding.ranks_per_batch == 1
        else replace(sharding, shard_size=ranks // sharding.ranks_per_batch)
    )


def shards(name: str, ranks: int) -> int:
    """The ranks over which a tensor is cut: what the theory of each strategy divides by."""
    if name in ("single", "DDP", "FSDP1 NO_SHARD"):
        return 1
    return 2 if "2 x 2" in name else ranks


def measure(
    name: str, model_config: dict[str, Any], steps: int, rows: int, world: World
) -> Measured | None:
    """Trains on this rank; all ranks call it, and rank 0 gets the result."""
    started_at = reset_peak(world.device)
    model, size = load_model(Model(model_config=model_config), Lora(), 0, world)
    optimizer = build_optimizer(model, Optimization())
    batch = step_batch(world, model_config["vocab_size"], rows)
    gathered = []
    handle = model.register_forward_hook(lambda *_: gathered.append(gathered_bytes(model)))
    for _ in range(WARM_STEPS):
        gradients, _ = train_step(model, optimizer, batch, world)
    handle.remove()
    world.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        train_step(model, optimizer, batch, world)
    world.barrier()
    seconds = time.perf_counter() - begun
    mine = {
        "parameter_bytes": sum(held_bytes(p) for p in model.parameters()),
        "gathered_bytes": max(gathered),
        "gradient_bytes": gradients,
        "optimizer_bytes": sum(
            held_bytes(t)
            for moments in optimizer.state.values()
            for t in moments.values()
            if torch.is_tensor(t)
        ),
        "peak_memory_bytes": peak(world.device) - started_at,
        "activation_bytes": kept_bytes(model, batch, world),
    }
    every = world.gather(mine)
    calls, moved = communication(lambda: train_step(model, optimizer, batch, world))
    if not world.is_main:
        return None
    planned_calls, planned_bytes = planned_communication(model_config, rows, LENGTH, world)
    return Measured(
        layout=name,
        ranks=world.size,
        device=world.device.type,
        parameters=size.total,
        tokens_per_second=steps * batch.tokens / seconds,
        calls=calls,
        planned_calls=planned_calls,
        planned_bytes=planned_bytes,
        communicated_bytes=moved,
        **{key: max(rank[key] for rank in every) for key in mine},
    )


def train_step(
    model: nn.Module, optimizer: Any, batch: StepBatch, world: World
) -> tuple[int, float]:
    """One step; returns the bytes of this rank's gradients, and their norm."""
    accumulate_gradients(model, batch, world)
    norm = float(clip_gradients(model, 1.0))
    gradients = sum(held_bytes(p.grad) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return gradients, norm


def held_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the part that this rank holds.

    FSDP1 shows a parameter as its piece of the flat one already.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def gathered_bytes(model: nn.Module) -> int:
    """The bytes of parameters that are whole at this moment although they are sharded between
    steps.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    if isinstance(model, FSDPModule):
        # Gathered experts and divided matrices are sharded still: over the ranks that divide them.
        return sum(held_bytes(p) for p in model.parameters() if not is_sharded_by_fsdp(p))
    if isinstance(model, Fsdp1):
        flat = [h.flat_param for h in model._all_handles if h.uses_sharded_strategy]
        return sum(p._full_param_padded.untyped_storage().size() for p in flat)  # type: ignore[attr-defined]
    return 0


def is_sharded_by_fsdp(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names not in (
        (EXPERT,),
        (TENSOR,),
    )


def step_batch(world: World, vocabulary: int, rows: int) -> StepBatch:
    """This rank's share of a step of `rows` rows of random tokens, the same in every layout."""
    ids = torch.randint(vocabulary, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    ranks = world.data_parallel
    tokens = LENGTH // ranks.sequence_size
    first = ranks.sequence_rank * tokens
    micro_batches = [
        MicroBatch(
            input_ids=row[None, first : first + tokens].clone(),
            labels=row[None, first + 1 : first + tokens + 1].clone(),
            position_ids=torch.arange(first, first + tokens)[None],
            trained_positions=torch.arange(tokens),
            cu_seq_lens=None,
            max_document_length=LENGTH,
            example_ids=(),
        )
        for row in ids[ranks.rank :: ranks.size]
    ]
    tokens = rows * LENGTH
    return StepBatch(
        step=0, epoch=0.0, micro_batches=tuple(micro_batches), tokens=tokens, trained_tokens=tokens
    )


def reset_peak(device: torch.device) -> int:
    """Begins a new measurement of the peak; returns where it begins, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of the resident set
    return _status("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes held since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def run(
    names: list[str], counts: list[int], model_config: dict[str, Any], steps: int, rows: int
) -> Iterator[Measured]:
    """Every layout on every number of ranks that can make it, each on ranks forked for it."""
    for ranks in counts:
        for name in names:
            if possible_on(name, ranks):
                yield _on_ranks(name, ranks, model_config, steps, rows)


def _on_ranks(
    name: str, ranks: int, model_config: dict[str, Any], steps: int, rows: int
) -> Measured:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        result = Path(folder) / "result.json"
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.environ |= _environment(name, rank, ranks, port)
                os._exit(
                    exit_code(partial(_rank, name, ranks, model_config, steps, rows, result))
                )  # no clean-up of the parent
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * ranks, f"{name} on {ranks} ranks ended with {codes}"
        return Measured(**json.loads(result.read_text()))


def _environment(name: str, rank: int, ranks: int, port: int) -> dict[str, str]:
    # FSDP1 shards within what the launch calls a node
    local = 2 if name == "FSDP1 HYBRID_SHARD 2 x 2" else ranks
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_PORT": port,
    }
    return {key: str(value) for key, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _rank(
    name: str, ranks: int, model_config: dict[str, Any], steps: int, rows: int, result: Path
) -> None:
    # the same for every number of ranks, and ranks do not spin for each other's cores
    torch.set_num_threads(1)
    world = join(sharding_of(name, ranks))
    measured = measure(
        name, MIXTURE if name.startswith("mixture") else model_config, steps, rows, world
    )
    if measured is not None:
        result.write_text(json.dumps(asdict(measured)))
    leave(world)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="LAYOUT"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--rows", type=int, default=4, help="rows in a step over all ranks")
    parser.add_argument(
        "--model", type=json.loads, default=MODEL, help="another model_config, as JSON"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/layouts"))
    options = parser.parse_args()
    results = []
    for measured in run(options.layouts, options.ranks, options.model, options.steps, options.rows):
        results.append(measured)
        print(
            f"{measured.ranks} ranks, {measured.layout}: {measured.tokens_per_second:,.0f} "
            "tokens/s",
            flush=True,
        )
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "layouts.json").write_text(
        json.dumps([asdict(r) for r in results], indent=1) + "\n"
    )
    (options.output / "layouts.md").write_text(table(results))
    plot(results, options.output / "layouts.png")
    print(table(results))


if __name__ == "__main__":
    main()
