"""Training steps on a CUDA device of fake tensors, in a process of its own: `fake_steps.py RESULTS.json`.

Each case loads a model by `load_model` and takes steps by `train_step`, as a rank of a run on GPUs does. Written is, by the case's
name and the step's, what it waits for, or the error that ended it; and what is found of single operators.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # the shapes of collectives of fake tensors
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.constants import OPTIMIZERS, ROUND_TOKENS
from finetune.data.batches import StepBatch
from finetune.data.collate import MicroBatch
from finetune.distributed.accelerator import make_accelerator
from finetune.distributed.fp8 import Fp8
from finetune.distributed.sharding import Sharding
from finetune.distributed.world import World
from finetune.models import head_chunks, load, quantize
from finetune.models.load import build_on_meta, load_model
from finetune.optim.optimizer import build_optimizer
from finetune.recipe.method_schema import Method
from finetune.recipe.schema import Lora, Model, Optimization, Quantization, Recipe
from finetune.training.loop import train_step
from finetune.training.nonfinite import make_guard
from finetune.training.objective import SFT, Objective
from finetune.training.preference_objective import PreferenceObjective, RatingObjective
from finetune.training.reference import StoredReference, without_adapters
from finetune.training.update_in_backward import UpdateInBackward
from tests.cuda_without_gpu.fake_cuda import DeviceWaits, fake_tensors, pretend_device
from tests.cuda_without_gpu.waiting_operators import find_waits
from tests.models.families import FAMILIES

RANKS = 2
LENGTHS = (30, 5, 60, 33)  # tokens of the documents of a micro-batch; a multiple of ROUND_TOKENS together
FUSED = Optimization(optim="adamw_torch_fused")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model in a layout, and the ways in which it takes a step."""

    name: str
    family: str = "llama"
    layout: str = "fsdp2"
    sharding: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: Lora = field(default_factory=Lora)
    quantization: Quantization = field(default_factory=Quantization)
    optimizations: Mapping[str, Optimization] = field(default_factory=lambda: {"step": FUSED})
    layers: int = 1
    packing: bool = True
    accumulation: int = 1  # micro-batches in a step
    make_objective: Callable[[], Objective] = lambda: SFT


def every_optimizer() -> dict[str, Optimization]:
    """Each optimizer with each way to treat a loss that is not finite."""
    return {
        f"{optim}, {on_nonfinite}": Optimization(optim=optim, on_nonfinite=on_nonfinite)  # type: ignore[arg-type]
        for optim in OPTIMIZERS
        for on_nonfinite in ("stop", "skip")
    }


def stored_reference() -> StoredReference:
    """The log-probabilities of the micro-batch's documents, computed before training."""
    with unset_fake_temporarily():
        reference = StoredReference(np.zeros(len(LENGTHS)))
    reference._found = torch.zeros(len(LENGTHS), dtype=torch.float64)
    return reference


UPDATED_IN_BACKWARD = {
    optim: Optimization(optim=optim, optim_in_backward=True, max_grad_norm=None)  # type: ignore[arg-type]
    for optim in ("adamw_torch_fused", "adamw_bf16_moments", "adamw_torch")
}
PEFT = Lora(use_peft=True, lora_r=4, lora_dropout=0.1)
NF4 = Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True)
CASES = (
    Case(name="full", optimizations=every_optimizer()),
    Case(name="offload", sharding={"cpu_offload": True}, optimizations=every_optimizer()),
    Case(name="two layers, accumulated", layers=2, accumulation=2),
    Case(name="one process", layout="single"),
    Case(name="hybrid", sharding={"strategy": "HYBRID_SHARD", "replicate_size": 2, "shard_size": 1}, accumulation=2),
    Case(name="updated in backward", optimizations=UPDATED_IN_BACKWARD),
    Case(name="updated in backward, offload", sharding={"cpu_offload": True}, optimizations=UPDATED_IN_BACKWARD),
    Case(name="fp16", sharding={"mixed_precision": "fp16"}),
    Case(name="fp8", sharding={"fp8": Fp8()}),
    Case(name="padded rows", packing=False),
    Case(
        name="checkpointed",
        sharding={"activation_checkpointing": True},
        model={"activation_checkpointing_keeps": "attention"},
    ),
    Case(name="lora", lora=PEFT),
    Case(name="lora, offload", lora=PEFT, sharding={"cpu_offload": True}, accumulation=2),
    Case(name="nf4", lora=PEFT, quantization=NF4),
    Case(name="nf4, checkpointed", lora=PEFT, quantization=NF4, sharding={"activation_checkpointing": True}),
    Case(name="int8, one process", layout="single", lora=PEFT, quantization=Quantization(load_in_8bit=True)),
    Case(name="neftune", optimizations={"step": replace(FUSED, neftune_noise_alpha=5.0, label_smoothing=0.1)}),
    Case(
        name="dpo, adapters",
        lora=PEFT,
        make_objective=lambda: PreferenceObjective(Method(method="dpo", rpo_alpha=1.0), without_adapters),
    ),
    Case(name="dpo", make_objective=lambda: PreferenceObjective(Method(method="dpo"), stored_reference())),
    Case(name="orpo", make_objective=lambda: PreferenceObjective(Method(method="orpo"), None)),
    Case(name="kto", make_objective=lambda: RatingObjective(Method(method="kto"), stored_reference())),
    *(Case(name=family, family=family) for family in ("mistral", "gemma2", "mixtral", "gpt_oss")),
)


def make_world(case: Case) -> World:
    """The first of RANKS ranks, each on a GPU; its collectives exchange nothing."""
    sharding = Sharding(**{"layout": case.layout, "mixed_precision": "bf16", **case.sharding})
    device = torch.device("cuda", 0)
    for name in ("LOCAL_RANK", "RANK"):
        os.environ.pop(name, None)
    if case.layout != "single":
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    size = 1 if case.layout == "single" else RANKS
    return World(0, size, 0, size, device, sharding, make_accelerator(sharding, device))


@contextmanager
def joined(case: Case) -> Iterator[World]:
    """The world of `case`, left again."""
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield make_world(case)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for cached in (head_chunks._can_add_to_fp32, quantize.nested_values):  # fake tensors of this case
            cached.cache_clear()


def config_of(family: str, layers: int) -> dict[str, Any]:
    """A small model, whose heads have a size that 8 does not divide where the family allows it."""
    sizes = {"vocab_size": 512, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": layers}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {"model_type": family, **sizes, **heads, **FAMILIES[family]}


def make_micro_batch(packing: bool) -> MicroBatch:
    """A micro-batch of LENGTHS on the host, as `collate` makes them."""
    lengths = torch.tensor(LENGTHS)
    ends = lengths.cumsum(0)
    tokens = sum(LENGTHS)
    if packing:
        shape, positions = (1, tokens), torch.cat([torch.arange(n) for n in LENGTHS])
    else:
        shape, positions = (len(LENGTHS), max(LENGTHS)), torch.arange(max(LENGTHS)).repeat(len(LENGTHS))
    trained = torch.arange(ROUND_TOKENS)
    documents = torch.arange(ROUND_TOKENS) % len(LENGTHS)
    batch = MicroBatch(
        input_ids=torch.ones(shape, dtype=torch.int64),
        labels=torch.ones(shape, dtype=torch.int64),
        position_ids=positions.view(shape),
        trained_positions=trained,
        cu_seq_lens=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32) if packing else None,
        max_document_length=max(LENGTHS),
        example_ids=tuple(range(len(LENGTHS))),
        document_lengths=LENGTHS,
        token_mask=torch.ones(shape, dtype=torch.bool),
        trained_documents=documents,
        desirable=torch.arange(len(LENGTHS)) % 2 == 0,
    )
    return replace(batch, mismatched=batch)


def build_fake(*arguments: Any) -> torch.nn.Module:
    """`build_on_meta`, its parameters and buffers as fake tensors."""
    with unset_fake_temporarily():
        model = build_on_meta(*arguments)
    fake: dict[torch.Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in fake:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                    fake[tensor] = torch.nn.Parameter(made) if tensors is module._parameters else made
                tensors[name] = fake[tensor] if tensor is not None else None
    return model


def random_values(_name: str, slices: tuple[slice, ...]) -> torch.Tensor:
    """As if read from files."""
    return torch.randn([part.stop - part.start for part in slices])


def take_steps(case: Case, world: World, waits: DeviceWaits) -> dict[str, Any]:
    """What the second of two steps waits for: the first fills caches and makes the optimizer's state."""
    found: dict[str, Any] = {}
    keys = Model(model_config=config_of(case.family, case.layers), **case.model)
    first = next(iter(case.optimizations.values()))
    model, _ = load_model(keys, case.lora, 0, world, case.quantization, first)
    micro_batches_of_all = world.size * case.accumulation
    tokens, groups = micro_batches_of_all * sum(LENGTHS), micro_batches_of_all * len(LENGTHS)
    for name, optimization in case.optimizations.items():
        recipe = Recipe(path="recipe.yaml", given=frozenset(), model=keys, optimization=optimization)
        optimizer = build_optimizer(model, optimization)
        guard = make_guard(optimizer, optimization, world)
        in_backward = UpdateInBackward(optimizer, recipe, world) if optimization.optim_in_backward else None
        for step in range(2):
            waits.found.clear()
            micro_batches = tuple(make_micro_batch(case.packing) for _ in range(case.accumulation))
            batch = StepBatch(step, 0.0, micro_batches, tokens, tokens, tokens // 2, groups)
            with in_backward or nullcontext():
                result = train_step(
                    model.train(),
                    optimizer,
                    batch,
                    objective=case.make_objective(),
                    recipe=recipe,
                    world=world,
                    guard=guard,
                    learning_rate=1e-4,
                    in_backward=in_backward,
                )
            assert result.failed_check is None
        found[name] = [asdict(wait) for wait in waits.found]
    return found


def run(case: Case) -> dict[str, Any]:
    """The waits of each of the case's steps, or the error that ended it."""
    try:
        with joined(case) as world, fake_tensors({(len(LENGTHS),): LENGTHS}) as waits:
            return take_steps(case, world, waits)
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    for package in ("bitsandbytes", "peft", "torchao.optim"):
        importlib.import_module(package)  # they look for CUDA's own functions where torch has a device
    pretend_device()
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: None if tensor.device.type == "cpu" else all_reduce(tensor, *a, **k)
    load.build_on_meta = build_fake  # type: ignore[assignment]
    load.read_base_values = lambda *_: (random_values, {})
    load.fill_quantized_layers = lambda *_: None
    chosen = set(sys.argv[2:])
    results: dict[str, Any] = {"waits": find_waits()}
    for case in CASES:
        if not chosen or case.name in chosen:
            started = time.process_time()
            results[case.name] = run(case)
            print(f"{case.name}: {time.process_time() - started:.2f} s of CPU", file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps(results))
