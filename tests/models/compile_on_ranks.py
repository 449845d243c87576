"""Run on ranks by test_compile.py: models loaded with torch_compile under FSDP2, attention by the varlen kernel.

Writes results.json into the folder given: for each job, what every rank found.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._guards import CompileContext

from finetune.data.collate import MicroBatch, make_filler
from finetune.data.examples import Prompt
from finetune.distributed.sharding import Sharding
from finetune.distributed.world import World, join, leave
from finetune.models import document_attention, load
from finetune.models.layers import compile_layers
from finetune.recipe.schema import Lora, Model
from finetune.training.evaluate import answer
from tests.conftest import make_model, make_tokenizer
from tests.models.families import documents, packed
from tests.models.varlen_on_cpu import register_cpu_kernels

# Tokens of the documents of each step. The first step's packed length, its one document and the hidden size are all 64.
STEPS = ((64,), (40, 20, 4), (100, 28), (3, 1, 120, 68), (256,))
LONGEST = 256  # tokens; no other size of the model


class CountingBackend:
    """A backend of torch.compile that counts the graphs that dynamo made, and how often they ran.

    With `differentiates` it also decides, as inductor does, what a graph keeps for its backward, which takes long.
    """

    def __init__(self, differentiates: bool) -> None:
        self.differentiates = differentiates
        self.graphs: set[str] = set()  # dynamo may hand one in twice, while it is still being made
        self.calls = 0

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.add(str(CompileContext.current_compile_id()))
        compiled = aot_eager(graph, inputs) if self.differentiates else graph.forward

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return compiled(*arguments)

        return run


def micro_batch(lengths: tuple[int, ...]) -> MicroBatch:
    """These documents in one packed row."""
    inputs = packed(documents(lengths))
    positions = (inputs["labels"].flatten() != -100).nonzero().squeeze(1)
    return MicroBatch(**inputs, trained_positions=positions, example_ids=())


def saved_bytes(loss_of: Callable[[], torch.Tensor]) -> int:
    """The bytes that a forward over LONGEST tokens keeps for its backward, parameters left aside."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if LONGEST in tensor.shape:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of()
    total = sum(storages.values())
    loss.backward()
    return total


def run(job: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """One model through all steps."""
    torch._dynamo.reset()
    backend = CountingBackend(differentiates=job["checkpointing"])
    load.compile_layers = functools.partial(compile_layers, backend=backend)
    world = replace(world, sharding=replace(world.sharding, activation_checkpointing=job["checkpointing"]))
    lora = Lora(use_peft=job["lora"], lora_target_modules=["q_proj"]) if job["lora"] else Lora()
    recipe = Model(model_name_or_path=str(folder), torch_compile=job["compile"])
    model, _ = load.load_model(recipe, lora, 0, world)
    if job["generate"]:
        prompts = [Prompt([5, 6, 7][:n], "a b") for n in (1, 2, 3)]
        answer(model, prompts, make_tokenizer(), world)
    after_generation = len(backend.graphs)
    losses, graphs, calls = [], [], []
    for step, lengths in enumerate(STEPS):
        before = backend.calls
        batch = make_filler(packing=True) if step == 0 and world.rank == 1 else micro_batch(lengths)
        loss = model.train()(**batch.inputs)
        calls.append(backend.calls - before)
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
        graphs.append(len(backend.graphs) - after_generation)
    kept = saved_bytes(lambda: model(**micro_batch(STEPS[-1]).inputs))
    return {
        "losses": losses,
        "graphs": graphs,
        "calls": calls,
        "saved_bytes": kept,
        "graphs_of_generation": after_generation,
    }


if __name__ == "__main__":
    register_cpu_kernels()
    document_attention._can_use_varlen = lambda _query, _value, options: options.is_fusible
    world = join(Sharding(layout="fsdp2", use_cpu=True))
    folder = Path(sys.argv[1])
    if world.is_main:
        make_model(folder / "model")
    world.barrier()
    results = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        results[job["name"]] = world.gather(run(job, folder / "model", world))
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    leave(world)
