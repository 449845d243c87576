"""Models trained for two steps on every rank, saved by this project and by Accelerate: what the export tests start from.

    python tests/export/trained.py '{"folder": ..., "runs": [{"name": ..., "layout": "fsdp2", "recipe": ...}], "accelerate": [...]}'

Leaves FOLDER/<name>.safetensors, the logits of the training process itself, beside each run's own output_dir.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.save import Saver
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.models.load import load_model
from finetune.optim.optimizers import build_optimizer
from tests.ranks import open_stores

LEARNING_RATE = 1e-2
IDS = torch.arange(48).reshape(2, 24) * 5 % 250


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    for layout in given["layouts"]:
        world = joined(layout)
        for run in given["runs"]:
            if run["layout"] == layout:
                save_file(
                    {"logits": trained_by_us(run["recipe"], world)},
                    folder / f"{run['name']}.{world.rank}",
                )
        leave(world)
    for kind in given["accelerate"]:
        world = joined(kind["layout"], kind.get("state_dict_type", "SHARDED_STATE_DICT"))
        logits = trained_by_accelerate(given["model"], world, folder / kind["name"] / "state")
        save_file({"logits": logits}, folder / f"{kind['name']}.{world.rank}")
        leave(world)


def joined(layout: Any, state_dict_type: str = "SHARDED_STATE_DICT") -> World:
    """The ranks in a layout, after they may have been in another."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    open_stores()
    world = join(Sharding(layout=layout, use_cpu=True))
    if world.sharding.is_fsdp:
        world.accelerator.state.fsdp_plugin.set_state_dict_type(state_dict_type)
    return world


def trained_by_us(recipe_path: str, world: World) -> torch.Tensor:
    """Two steps of the recipe's model, a checkpoint, and its logits: float32[2, 24, vocabulary]."""
    from finetune.data.tokenizer import load_tokenizer

    recipe = read_recipe(recipe_path)
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    model, _ = load_model(recipe.model, recipe.lora, recipe.run.seed, world)
    optimizer = world.accelerator.prepare_optimizer(build_optimizer(model, recipe.optimization))
    for _ in range(2):
        world.accelerator.backward(
            model(input_ids=IDS, labels=IDS.roll(-1, 1), use_cache=False) / IDS.numel()
        )
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        optimizer.step()
        optimizer.zero_grad()
    run = Path(recipe.run.output_dir or "")
    with Saver(run, model, optimizer, world, recipe, tokenizer) as saver:
        saver.save(Progress(step=2, tokens=96, trained_tokens=96))
    return logits_of(model)


def trained_by_accelerate(model_folder: str, world: World, folder: Path) -> torch.Tensor:
    """Two steps under Accelerate alone, and its `save_state`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if world.sharding.layout == "fsdp1":
        model = world.accelerator.prepare(model)
        optimizer = world.accelerator.prepare(
            torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        )
    else:
        model, optimizer = world.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        )
    for _ in range(2):
        world.accelerator.backward(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    world.accelerator.save_state(str(folder))
    return logits_of(model)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits.float().contiguous()


if __name__ == "__main__":
    main()
