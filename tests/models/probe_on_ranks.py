"""Run on ranks by test_probe.py: the check before the first step, of one model in every layout.

Writes results.json into the folder given: by the scenario's name, what every rank found.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.config.layout import Sharding
from finetune.config.schema import Data, Lora, Model
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models import documents, load
from finetune.models.decoder_layers import compile_layers
from finetune.models.load import load_model
from finetune.models.probe import check_training_forward
from tests.cuda_without_gpu.steps_on_ranks import CountingBackend, micro_batch
from tests.ranks import open_stores

LENGTHS = ((40, 20, 4), (64,))  # tokens of the documents of each step


def losses(model: torch.nn.Module) -> list[float]:
    """Of two steps with dropout, after which every parameter that is trained has moved."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for lengths in LENGTHS:
        loss = model.train()(**micro_batch(lengths).inputs)
        (loss / sum(lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run(scenario: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """The losses without and with the check, what the check left behind, and what it says of a model that leaks."""
    dtype = scenario.get("dtype", "float32")
    recipe = Model(
        model_name_or_path=str(folder / "llama"),
        attention_dropout=0.2,
        dtype=dtype,
        torch_compile=scenario.get("torch_compile", False),
    )
    lora = Lora(use_peft=scenario.get("use_peft", False), lora_dropout=0.1)
    found: dict[str, Any] = {"error": None}
    for checked in (False, True):
        torch._dynamo.reset()
        backend = CountingBackend(differentiates=False)
        load.compile_layers = lambda model, offload=None, backend=backend: compile_layers(
            model, backend=backend
        )  # type: ignore[assignment]
        model, _ = load_model(recipe, lora, 0, world)
        torch.manual_seed(world.rank)
        if checked:
            state = torch.get_rng_state()
            try:
                check_training_forward(model, recipe, Data(), world)
            except UserError as error:
                return found | {"error": str(error)}
            found["is_random_state_kept"] = torch.equal(state, torch.get_rng_state())
            found["graphs"] = len(backend.graphs)
            found["gradients"] = sum(p.grad is not None for p in model.parameters())
        found["with check" if checked else "without"] = losses(model)
        found["graphs of training" if checked else "graphs without check"] = len(backend.graphs)
    leaky = Model(model_name_or_path=str(folder / "nemotron"), dtype=dtype)
    documents._hand_down = lambda *_: (
        None
    )  # whose layers drop the boundaries that its attention then lacks
    try:
        check_training_forward(load_model(leaky, lora, 0, world)[0], leaky, Data(), world)
    except UserError as error:
        found["leak"] = str(error)
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {}
    scenarios = json.loads((folder / "scenarios.json").read_text())
    open_stores(len(scenarios) + 1)
    for scenario in scenarios:
        print(scenario, flush=True)
        os.environ["MASTER_PORT"] = str(
            int(os.environ["MASTER_PORT"]) + 1
        )  # the last world's store may still be there
        world = join(Sharding(use_cpu=True, **scenario["sharding"]))
        results[scenario["name"]] = world.gather(run(scenario, folder, world))
        is_main = world.is_main
        leave(world)
    if is_main:
        (folder / "results.json").write_text(json.dumps(results))
