"""A training run small enough to be started a hundred times: a tiny model with dropout, saved and loaded as any other.

    python tests/checkpoint/tiny_run.py '{"recipe": ..., "layout": "fsdp2", "steps": 6, "save_at": [3]}'

Resumes from the newest checkpoint that verifies. Writes `STEP LOSS` lines and a digest of the parameters.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import find_resume_checkpoint, load_checkpoint
from finetune.checkpoint.save import Saver
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from finetune.distributed.parallelize import parallelize
from finetune.distributed.world import World
from finetune.files.tensors import read_folder, read_slice

ROWS = 6
ALONE = World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), SimpleNamespace())  # type: ignore[arg-type]


def build(model_folder: str, lora: bool, world: World) -> tuple[Any, Any]:
    """The model of `model_folder` in the world's layout, with dropout, and its optimizer."""
    config = AutoConfig.from_pretrained(model_folder, attention_dropout=0.1)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        if lora:
            from peft import LoraConfig, inject_adapter_in_model

            inject_adapter_in_model(
                LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1), model
            )
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    stored = read_folder(model_folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def values(name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        if ".lora_" in name:
            return torch.full(shapes[name], 0.02)[slices]
        return read_slice(stored[name.replace(".base_layer", "")], slices)

    model = parallelize(model, values, world)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    return model, world.accelerator.prepare_optimizer(optimizer)


def train_step(
    step: int, model: Any, optimizer: Any, world: World, saver: Saver | None = None
) -> float:
    """One step on ROWS rows dealt out over the ranks; the mean loss over all of them. A pure function of state and step."""
    ids = torch.randint(3, 200, (ROWS, 12), generator=torch.Generator().manual_seed(step))[
        world.rank :: world.size
    ]
    torch.manual_seed(1000 * step + world.rank)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss * len(ids) / ROWS
    world.accelerator.backward(loss * world.size)
    if saver is not None:
        saver.before_update()
    optimizer.step()
    optimizer.zero_grad()
    return float(world.sum(loss.detach().clone()))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of this rank's pieces of all tensors, bit for bit."""
    from finetune.checkpoint.shards import dequantize, is_quantized, list_shards

    whole = xxhash.xxh3_128()
    for piece in list_shards(tensors, "model"):
        plain = dequantize(piece.tensor) if is_quantized(piece.tensor) else piece.tensor
        whole.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    from finetune.checkpoint.shards import get_model_state, get_optimizer_state, select_tensors

    given = json.loads(sys.argv[1])
    recipe = read_recipe(given["recipe"])
    run_folder = Path(recipe.run.output_dir or "")
    world = join(Sharding(layout=given["layout"], use_cpu=True))
    model, optimizer = build(recipe.model.model_name_or_path or "", recipe.lora.use_peft, world)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.model_name_or_path)
    progress = load_checkpoint(
        find_resume_checkpoint(recipe, run_folder, world), model, optimizer, world
    )
    print("resumed", progress.step)
    with Saver(run_folder, model, optimizer, world, recipe, tokenizer) as saver:
        saver.check_save(given["steps"])
        for step in range(progress.step, given["steps"]):
            print(step, repr(train_step(step, model, optimizer, world, saver)), flush=True)
            if step + 1 in given["save_at"]:
                saver.save(Progress(step=step + 1))
    print("model", digest(get_model_state(model)))
    print("optimizer", digest(select_tensors(get_optimizer_state(model, optimizer.optimizer))))
    leave(world)


if __name__ == "__main__":
    main()
