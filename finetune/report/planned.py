"""What the plan says of a run that is being reported, where its folder still tells enough to make one."""

import json
from dataclasses import dataclass, replace

from finetune.distributed.accelerate_config import read_sharding
from finetune.errors import UserError
from finetune.plan.cli import make_plan
from finetune.plan.disk import CPU_PROCESS_BYTES
from finetune.plan.table import memory_rows
from finetune.recipe.reader import read_recipe
from finetune.report.run_data import RunRecord
from finetune.units import gib


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan's highest moment in bytes, and its table."""

    peak_bytes: int
    table: list[list[str]]
    note: str


def planned(run: RunRecord) -> Planned | None:
    """The plan of `run`; None where its model, recipe or layout cannot be had any more."""
    ranks = run.environment.get("ranks")
    if not isinstance(ranks, int):
        return None
    try:
        recipe = read_recipe(str(run.folder / "recipe.yaml"))
        configs = sorted(run.folder.glob("checkpoints/step-*/model/config.json"))
        if configs:  # the model as it was trained, also where the hub is away
            config = json.loads(configs[-1].read_text(encoding="utf-8"))
            recipe = replace(recipe, model=replace(recipe.model, model_name_or_path=None, model_config=config))
        sharding = read_sharding(str(run.folder / "accelerate.yaml"), None, {"WORLD_SIZE": str(ranks)})
        on_cpu = str(run.environment.get("device", "")).startswith("CPU")
        plan = make_plan(recipe, sharding, ranks, on_cpu=on_cpu)
    except (UserError, OSError, ValueError):
        return None
    process = CPU_PROCESS_BYTES if on_cpu else 0
    note = (
        f"one rank; the process itself, about {gib(CPU_PROCESS_BYTES)} GiB, comes on top"
        if on_cpu
        else "at its highest moment"
    )
    return Planned(max(phase.peak.total for phase in plan.phases) + process, memory_rows(plan.phases), note)
