"""The script that the launcher starts on every rank: `accelerate launch finetune/run.py --config C --recipe R
key=value`."""

import argparse
import os
import sys
from pathlib import Path

# A script's own folder comes first on sys.path, where our `data` or `export` would hijack another's: the project's root
# must.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.facts import adopt_quantization, with_expert_parallelism
from finetune.config.layout import Sharding
from finetune.config.overrides import read_overrides
from finetune.config.pretrained_adapter import complete_lora
from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.errors import end_process, exit_code
from finetune.plan.architecture import find_local_facts
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
    fine_tune(recipe, sharding, options.dry_run)


def fine_tune(recipe: Recipe, sharding: Sharding, dry_run: bool = False) -> None:
    """A run from its recipe to its export."""
    recipe, sharding = complete_lora(recipe), with_expert_parallelism(sharding, recipe)
    facts, ranks = find_local_facts(recipe.model), int(os.environ.get("WORLD_SIZE", "1"))
    refuse_problems(find_problems(recipe, sharding, facts, ranks))  # before torch is imported
    silence_libraries()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # that older name would be overruled
        # Rows differ in length: without segments that grow, a GPU's memory is soon in pieces that fit none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if recipe.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers
    from finetune.checkpoint.inputs import fingerprint_inputs
    from finetune.checkpoint.resume import find_start, load_start
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer, plan_vocabulary
    from finetune.distributed.collective import RankGroup
    from finetune.distributed.world import describe_machine, join, leave, use_deterministic_kernels
    from finetune.export.logits import check_streamed_logits
    from finetune.models.load import load_model
    from finetune.models.probe import check_training_forward
    from finetune.optim.build import build_optimizer
    from finetune.pretrained_config import load_config, read_facts
    from finetune.training.dry_run import check_offload_dir, explain_out_of_memory, print_dry_run
    from finetune.training.evaluate import evaluate_after_training, evaluate_before_training
    from finetune.training.finish import finish, is_finished, leave_ranks
    from finetune.training.loop import train
    from finetune.training.objectives.distill import read_teacher_facts
    from finetune.training.run_folder import fix_template_date, open_run_folder
    from finetune.training.start import make_objectives, start_run
    from finetune.training.watch import SignalListener

    machine = describe_machine(sharding, with_liger=recipe.model.use_liger_kernel)
    refuse_problems(find_problems(recipe, sharding, facts, ranks, machine=machine))
    world = join(sharding, recipe.run.timeout_seconds)
    if dry_run:
        return print_dry_run(recipe, world, machine)
    folder = open_run_folder(recipe, world)
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    recipe = fix_template_date(recipe, folder, tokenizer, world)
    vocabulary = plan_vocabulary(tokenizer, recipe.model)
    config = load_config(recipe.model, vocabulary)
    facts = read_facts(config, recipe.model.model_name_or_path, len(tokenizer))
    teacher = read_teacher_facts(recipe, tokenizer)
    refuse_problems(find_problems(recipe, sharding, facts, ranks, teacher=teacher, machine=machine))
    recipe = adopt_quantization(recipe, facts)
    check_offload_dir(recipe, world)
    RankGroup(world, None).main(lambda: check_streamed_logits(config, recipe.model.trust_remote_code))
    data = prepare_data(recipe, tokenizer, world.data_parallel)
    recipe = data.complete_recipe(recipe)
    inputs = fingerprint_inputs(recipe, tokenizer, data, world)
    if is_finished(folder, recipe, inputs, data.train.steps, world):
        return leave(world)
    start = find_start(recipe, folder, world, inputs)
    with explain_out_of_memory(recipe, world), use_deterministic_kernels(on=recipe.run.deterministic):
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
