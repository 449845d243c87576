"""Run on ranks by test_compiled_steps.py: whole training steps under FSDP2, with attention on the way that it takes on CUDA.

Writes results.json into the folder given: for each job, what every rank found.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._guards import CompileContext

from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Model, Optimization, Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Prompt
from finetune.data.packing import make_filler
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.models import attention_kernels as document_attention
from finetune.models import load
from finetune.models.decoder_layers import compile_layers
from finetune.models.routing import find_routing
from finetune.optim.optimizers import build_optimizer
from finetune.training.evaluate import answer, measure_held_out
from finetune.training.objectives.objective import SFT
from finetune.training.step import make_guard, train_step
from tests.conftest import make_model, make_tokenizer
from tests.cuda_without_gpu.flex_on_cpu import patch_flex
from tests.cuda_without_gpu.varlen_on_cpu import register_cpu_kernels, takes_varlen
from tests.models.families import build, documents, packed

HEAD_SIZE = 12  # 8 does not divide it
# Tokens of the documents of each step. The first step's packed length, its one document and the hidden size are all 64.
STEPS = ((64,), (40, 20, 4), (100, 28), (3, 1, 120, 68), (256,))
LONGEST = 256  # tokens; no other size of the model
TRAINED_FROM = Optimization(learning_rate=1e-3)


class CountingBackend:
    """A backend of torch.compile that counts the graphs that dynamo made, and how often they ran.

    With `differentiates` it also decides, as inductor does, what a graph that is differentiated keeps for its backward, which
    takes long. The loss has its gradient in its forward.
    """

    def __init__(self, differentiates: bool) -> None:
        self.differentiates = differentiates
        self.graphs: set[str] = set()  # dynamo may hand one in twice, while it is still being made
        self.calls = 0
        self.differentiated = 0

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.add(str(CompileContext.current_compile_id()))
        is_differentiated = torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in inputs
        )
        compiled = (
            aot_eager(graph, inputs) if self.differentiates and is_differentiated else graph.forward
        )
        self.differentiated += compiled != graph.forward

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return compiled(*arguments)

        return run


def micro_batch(lengths: tuple[int, ...]) -> MicroBatch:
    """These documents in one packed row."""
    inputs = packed(documents(lengths))
    positions = (inputs["labels"].flatten() != -100).nonzero().squeeze(1)
    return MicroBatch(**inputs, trained_positions=positions, example_ids=())


def step_batch(step: int, world: World) -> StepBatch:
    """Two micro-batches for rank 0. Rank 1 has a filler in place of the second, and in the first step of the first."""
    first, second = micro_batch(STEPS[step]), micro_batch(STEPS[-1 - step])
    trained = [int((each.labels != -100).sum()) for each in (first, second)]
    filler = make_filler(packing=True)
    mine = (first, second) if world.rank == 0 else (filler if step == 0 else first, filler)
    total = trained[0] * (1 if step == 0 else world.size) + trained[1]
    return StepBatch(step, 0.0, mine, tokens=0, trained_tokens=total)


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


def run(
    job: dict[str, Any], folder: Path, world: World, patch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """One model through all steps, evaluated and generating before the first and after the second."""
    torch._dynamo.reset()
    counters.clear()
    backend = CountingBackend(job["differentiates"])
    if job["flex"]:
        patch_flex(patch, backend)
    load.compile_layers = functools.partial(compile_layers, backend=backend)
    document_attention._can_use_varlen = takes_varlen if job["varlen"] else on_cpu
    world = replace(world, sharding=replace(world.sharding, activation_checkpointing=True))
    adapted: dict[str, Any] = {"lora_target_modules": ["q_proj", "down_proj"]}
    if job["family"] == "mixtral":
        adapted = {
            "lora_target_modules": ["q_proj"],
            "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        }
    lora = Lora(use_peft=True, **adapted) if job["lora"] else Lora()
    recipe = Recipe(
        path="recipe.yaml",
        model=Model(
            model_name_or_path=str(folder),
            torch_compile=job["compile"],
            activation_checkpointing_keeps=job["keeps"],
        ),
        optimization=TRAINED_FROM,
    )
    model, _ = load.load_model(recipe.model, lora, 0, world)
    optimizer = build_optimizer(model, recipe.optimization)
    guard = make_guard(optimizer, recipe.optimization, world)
    found: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "held_out": [],
        "graphs": [],
        "calls": [],
        "evaluation_graphs": [],
        "graphs_of_generation": [],
        "unique_graphs": [],
    }

    def evaluate() -> None:
        before = len(backend.graphs)
        prompts = [Prompt([5, 6, 7][:n], "a b") for n in (1, 2, 3)]
        answer(model, prompts, make_tokenizer(), world)
        found["graphs_of_generation"].append(len(backend.graphs) - before)
        batch = StepBatch(0, 0.0, (micro_batch((50, 14)),), tokens=0, trained_tokens=30)
        found["held_out"].append(measure_held_out(model, lambda: iter([batch]), world, SFT)[0])
        found["evaluation_graphs"].append(len(backend.graphs) - before)

    for step in range(len(STEPS)):
        if step in (0, 2):
            evaluate()
        graphs, calls, batch = len(backend.graphs), backend.calls, step_batch(step, world)
        result = train_step(
            model.train(),
            optimizer,
            batch,
            objective=SFT,
            recipe=recipe,
            world=world,
            guard=guard,
            learning_rate=TRAINED_FROM.learning_rate,
        )
        found["losses"].append(result.measured.average(batch.trained_tokens, world)[0])
        found["norms"].append(float(result.grad_norm))
        found["graphs"].append(len(backend.graphs) - graphs)
        found["calls"].append(backend.calls - calls)
        found["unique_graphs"].append(counters["stats"]["unique_graphs"])  # by dynamo's own count
    found["differentiated"] = backend.differentiated
    found["graph_breaks"] = dict(counters["graph_break"])
    routing = find_routing(model)
    found["chosen"] = routing.take_metrics(world) if routing is not None else {}
    found["saved_bytes"] = saved_bytes(lambda: model(**micro_batch(STEPS[-1]).inputs))
    return found


if __name__ == "__main__":
    on_cpu = document_attention._can_use_varlen
    register_cpu_kernels()
    world = join(Sharding(layout="fsdp2", use_cpu=True))
    folder = Path(sys.argv[1])
    if world.is_main:
        make_model(folder / "llama", head_dim=HEAD_SIZE)
        make_model(
            folder / "mixtral", model_type="mixtral", head_dim=HEAD_SIZE, num_local_experts=4
        )
        build("gemma2", vocab_size=len(make_tokenizer())).save_pretrained(folder / "gemma2")
    world.barrier()
    results = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        with pytest.MonkeyPatch.context() as patch:
            results[job["name"]] = world.gather(run(job, folder / job["family"], world, patch))
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    leave(world)
