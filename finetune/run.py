"""The script that the launcher starts on every rank: `accelerate launch finetune/run.py --config C --recipe R key=value`."""

import argparse
import os
import sys
from pathlib import Path

# A script's own folder comes first on sys.path, where our `data` or `export` would hijack another's: the project's root must.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.distributed.accelerate_config import read_sharding
from finetune.distributed.deepspeed import refuse_contradictions
from finetune.distributed.sharding import Sharding
from finetune.errors import end_process, exit_code
from finetune.pretrained_adapter import complete_lora
from finetune.recipe.expert_division import with_expert_parallelism
from finetune.recipe.lora_schema import check_lora_layout
from finetune.recipe.memory_keys import check_memory_keys
from finetune.recipe.overrides import read_overrides
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.tensor_division import check_tensor_parallel_recipe
from finetune.terminal import silence_libraries


def main() -> None:
    """Reads what the user asked for, which needs no torch, and does it."""
    parser = argparse.ArgumentParser(prog="finetune/run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipe", default="quickstart", help="a file, or a name in recipes/ (default: quickstart)")
    parser.add_argument("--config", help="an Accelerate file, or a name in accelerate_configs/ (default: the recipe's)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run and stop")
    options, rest = parser.parse_known_args()
    recipe = read_recipe(options.recipe, read_overrides(rest, vars(options)))
    sharding = read_sharding(options.config, recipe.run.accelerate_config, os.environ)
    data_ranks = int(os.environ.get("WORLD_SIZE", "1")) // sharding.ranks_per_batch
    refuse_contradictions(recipe, dict(sharding.asked), sharding.source, data_ranks)
    fine_tune(recipe, sharding, options.dry_run)


def fine_tune(recipe: Recipe, sharding: Sharding, dry_run: bool = False) -> None:
    """A run from its recipe to its export."""
    recipe = complete_lora(recipe)
    check_lora_layout(recipe.lora, sharding)
    check_tensor_parallel_recipe(recipe, sharding)
    sharding = with_expert_parallelism(sharding, recipe, int(os.environ.get("WORLD_SIZE", "1")))
    check_memory_keys(recipe, sharding, int(os.environ.get("WORLD_SIZE", "1")))
    silence_libraries()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # that older name would be overruled
        # Rows differ in length: without segments that grow, a GPU's memory is soon in pieces that fit none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from finetune.checkpoint.inputs import fingerprint_inputs
    from finetune.checkpoint.resume import find_start, load_start
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer, plan_vocabulary
    from finetune.distributed.collective import RankGroup
    from finetune.distributed.world import join, leave
    from finetune.export.logits_check import check_streamed_logits
    from finetune.models.load import load_model
    from finetune.models.probe import check_training_forward
    from finetune.optim.optimizer import build_optimizer
    from finetune.pretrained_config import check_config, check_division, complete_quantization, load_config
    from finetune.training.distillation import check_teacher
    from finetune.training.dry_run import check_offload_dir, explain_out_of_memory, print_dry_run
    from finetune.training.evaluate import evaluate_after_training, evaluate_before_training
    from finetune.training.finish import finish, is_finished, leave_ranks
    from finetune.training.loop import train
    from finetune.training.method_objectives import make_objectives
    from finetune.training.run_folder import check_packages, fix_template_date, open_run_folder
    from finetune.training.signals import SignalListener
    from finetune.training.start import start_run

    world = join(sharding, recipe.run.timeout_seconds)
    check_packages(recipe, sharding)
    if dry_run:
        return print_dry_run(recipe, world)
    folder = open_run_folder(recipe, world)
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    recipe = fix_template_date(recipe, folder, tokenizer, world)
    vocabulary = plan_vocabulary(tokenizer, recipe.model)
    config = load_config(recipe.model, vocabulary)
    check_config(config, recipe.model, recipe.data, len(tokenizer))
    check_division(config, recipe, sharding, world.size)
    check_teacher(recipe, tokenizer, sharding)
    recipe = complete_quantization(recipe, config, sharding)
    check_offload_dir(recipe, world)
    RankGroup(world, None).main(lambda: check_streamed_logits(config, recipe.model.trust_remote_code))
    data = prepare_data(recipe, tokenizer, world.data_parallel)
    recipe = data.complete_recipe(recipe)
    inputs = fingerprint_inputs(recipe, tokenizer, data, world)
    if is_finished(folder, recipe, inputs, data.train.steps, world):
        return leave(world)
    start = find_start(recipe, folder, world, inputs)
    with explain_out_of_memory(recipe, world):
        keys = recipe.quantization, recipe.optimization, vocabulary
        model, size = load_model(recipe.model, recipe.lora, recipe.run.seed, world, *keys)
        optimizer = build_optimizer(model, recipe.optimization, world)
        check_training_forward(model, recipe.model, recipe.data, world)
        objectives = make_objectives(model, recipe, data, inputs, world)  # of the weights before training
        progress = load_start(start, model, optimizer, world)
        run = start_run(recipe, world, folder, tokenizer, data, model, size, optimizer, objectives, progress, inputs)
        with run.log, SignalListener() as signals:
            evaluate_before_training(run, progress, signals)
            progress = train(run, progress, signals)
            progress = evaluate_after_training(run, progress, signals)
            leave_ranks(run, signals)
    return finish(run, progress)


if __name__ == "__main__":
    end_process(exit_code(main))
