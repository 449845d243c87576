"""Run on every rank: trains one step under each layout and writes the bytes of the real tensors that this rank holds.

Arguments: a JSON file of scenarios (name, recipe's path, Accelerate config's path), and the folder for results.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finetune.config.accelerate_file import read_sharding
from finetune.config.facts import with_recipe_keys
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import World
from finetune.models.load import load_model
from finetune.optim.offload import OffloadedOptimizer
from finetune.optim.optimizers import build_optimizer
from tests.ranks import free_port, open_stores


def main() -> None:
    scenarios, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    measured = {}
    for number, (name, recipe, config) in enumerate(scenarios):
        # A port of its own: the last scenario's store may still be listening.
        os.environ["MASTER_PORT"] = agreed_port(results / f"port-{number}")
        measured[name] = measure(recipe, config)
    (results / f"rank{os.environ['RANK']}.json").write_text(json.dumps(measured))


def agreed_port(path: Path) -> str:
    """A free port that rank 0 chooses and writes into `path`."""
    if os.environ["RANK"] == "0":
        os.environ["MASTER_PORT"] = str(free_port())
        open_stores()
        path.with_suffix(".new").write_text(os.environ["MASTER_PORT"])
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


def measure(recipe_path: str, config: str) -> dict[str, int]:
    ranks = os.environ["WORLD_SIZE"]
    sharding = read_sharding(config, None, {"WORLD_SIZE": ranks})
    world = join(with_recipe_keys(sharding, read_recipe(recipe_path)))
    try:
        return state_bytes(recipe_path, world)
    finally:
        leave(world)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def state_bytes(recipe_path: str, world: World) -> dict[str, int]:
    recipe = read_recipe(recipe_path)
    model, _ = load_model(recipe.model, recipe.lora, recipe.run.seed, world, recipe.quantization)
    optimizer = build_optimizer(model, recipe.optimization, world)
    ids = torch.randint(3, 200, (1, 16))
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(16)[None]}
    if pipeline := find_pipeline(model):
        pipeline.run([(1, 16)] * 2, lambda _: model(**inputs), lambda _: model(**inputs))
    else:
        world.accelerator.backward(model(**inputs))
    optimizer.step()
    buffers, files = [], 0
    if isinstance(optimizer, OffloadedOptimizer):
        buffers, files = optimizer.buffers, optimizer.file.size
    return {
        "files": files,
        "parameters": in_storages(model.parameters()),
        "gradients": in_storages(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": in_storages(
            [
                value
                for state in optimizer.state.values()
                for value in state.values()
                if torch.is_tensor(value)
            ]
            + buffers
        ),
    }


def in_storages(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the memory behind `tensors`, each piece of it once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    local = [part for tensor in local for part in parts(tensor)]
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()
        }.values()
    )


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory behind this one: itself, or those of which a quantized one is made."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


if __name__ == "__main__":
    main()
