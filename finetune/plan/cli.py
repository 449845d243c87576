"""`finetune plan`: what a run will need, without torch and without its weights."""

import argparse
import json
import sys
from math import prod

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.errors import UserError
from finetune.plan.advice import advise
from finetune.plan.communication import Links
from finetune.plan.plan import TABLE_RANKS, compare_layouts, format_plan, make_plan, read_planned_sharding, to_dict
from finetune.plan.resources import ASSUMED_MFU
from finetune.plan.table import format_advice, format_layouts
from finetune.units import MIB, read_gpu_memory, read_size


def plan_command(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.recipe`. Returns 1 where it does not fit --gpu-memory, else 0."""
    if arguments.gpu_memory is not None and (read := read_gpu_memory(arguments.gpu_memory)) != arguments.gpu_memory:
        print(f"--gpu-memory {arguments.gpu_memory}: read as {read}", file=sys.stderr)
    limit = None if arguments.gpu_memory is None else read_size(read_gpu_memory(arguments.gpu_memory))
    if limit is not None and limit < MIB:
        raise UserError(f"--gpu-memory {arguments.gpu_memory}: is {limit} bytes; write a unit, for example 80GiB")
    mfu = ASSUMED_MFU if arguments.mfu is None else arguments.mfu
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: must be above 0 and at most 1; for example --mfu 0.4")
    if arguments.num_processes is not None and arguments.num_processes < 1:
        raise UserError(f"--num-processes {arguments.num_processes}: a run has at least one rank")
    recipe = read_recipe(arguments.recipe, arguments.overrides)
    ranks = arguments.num_processes or _assume_ranks(recipe, arguments.config)
    sharding = read_planned_sharding(recipe, arguments.config, ranks)
    plan = make_plan(recipe, sharding, ranks, mfu=mfu, links=_read_links(arguments))
    advice = None if limit is None else advise(plan.spec, limit)
    has_config = arguments.config is not None
    if arguments.json:
        print(json.dumps(to_dict(plan, advice, has_config=has_config), indent=2))
    else:
        print(format_plan(plan, ranks_assumed=arguments.num_processes is None))
        if arguments.num_processes is None:
            print("\n" + format_layouts(compare_layouts(plan.spec), TABLE_RANKS, limit))
        if advice is not None and limit is not None:
            print("\n" + format_advice(advice, limit, sharding.source, has_config=has_config))
    return 0 if advice is None or advice.fits else 1


def _read_links(arguments: argparse.Namespace) -> Links:
    usual = Links()
    within, between = (
        None if text is None else float(read_size(text)) for text in (arguments.gpu_link, arguments.network)
    )
    return Links(within or usual.within_node, between or usual.between_nodes)


def _assume_ranks(recipe: Recipe, config: str | None) -> int:
    """Without --num-processes: the product of the file's mesh, one rank for a single process, or a usual node."""
    sharding = read_sharding(config, recipe.run.accelerate_config, {})
    if sharding.mesh_sizes is not None:
        return prod(sharding.mesh_sizes.values())
    return 1 if sharding.layout == "single" else 8
