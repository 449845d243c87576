"""`finetune plan`, and the plan that a dry run prints."""

import argparse
import json
import os
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from finetune.distributed.accelerate_config import Sharding, read_sharding
from finetune.errors import UserError
from finetune.plan.advice import advise
from finetune.plan.architecture import read_architecture
from finetune.plan.disk import Disk, Host, disk, host
from finetune.plan.memory import Phase, peak, phases
from finetune.plan.model_config import find_config
from finetune.plan.run_spec import Job
from finetune.plan.table import (
    advice_lines,
    header,
    memory_table,
    ranks_table,
    speed_lines,
    storage_lines,
)
from finetune.plan.time import ASSUMED_MFU, Speed, speed
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import Recipe
from finetune.units import MIB, read_size

RANKS = (1, 2, 4, 8, 16, 64)  # of the table


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is known before a run."""

    job: Job
    phases: tuple[Phase, ...]
    disk: Disk
    host: Host
    speed: Speed


def plan_command(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.recipe`; exit code 1 where it does not fit --gpu-memory."""
    limit = None if arguments.gpu_memory is None else read_size(arguments.gpu_memory)
    if limit is not None and limit < MIB:
        raise UserError(f"--gpu-memory {arguments.gpu_memory}: is {limit} bytes; write a unit, for example 80GiB")
    mfu = ASSUMED_MFU if arguments.mfu is None else arguments.mfu
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: a share of the peak is above 0 and at most 1; for example --mfu 0.4")
    recipe = read_recipe(arguments.recipe, arguments.overrides)
    ranks = arguments.num_processes or _implied_ranks(recipe, arguments.config)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    sharding = read_sharding(arguments.config, recipe.run.accelerate_config, environ | {"WORLD_SIZE": str(ranks)})
    plan = make_plan(recipe, sharding, ranks, mfu=mfu)
    advice = None if limit is None else advise(plan.job, limit)
    if arguments.json:
        print(json.dumps(as_json(plan, limit), indent=2))
    else:
        print(describe(plan, ranks_assumed=arguments.num_processes is None))
        if arguments.num_processes is None:
            print("\n" + ranks_table(layouts_by_ranks(plan.job), RANKS, limit))
        if advice is not None and limit is not None:
            print("\n" + advice_lines(advice, limit))
    return 0 if advice is None or advice.fits else 1


def make_plan(
    recipe: Recipe,
    sharding: Sharding,
    ranks: int,
    *,
    mfu: float = ASSUMED_MFU,
    on_cpu: bool = False,
    read: tuple[int, int] | None = None,
) -> Plan:
    """The plan of a run; `read`: an epoch's tokens and the run's steps, where the data has been read already. Raises `UserError` where the model's config cannot be had or understood."""
    config, where = find_config(recipe.model)
    job = Job(
        architecture=read_architecture(config, where),
        recipe=recipe,
        sharding=sharding,
        ranks=ranks,
        device="cpu" if on_cpu or sharding.use_cpu else "cuda",
        grouped_attention=_torch_version() >= (2, 12),
    )
    base_dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return Plan(
        job=job,
        phases=phases(job),
        disk=disk(job, base_dtype),
        host=host(job),
        speed=speed(job, mfu, read),
    )


def describe(plan: Plan, *, ranks_assumed: bool = False) -> str:
    """The plan as text, without the table over ranks and without advice."""
    job = plan.job
    needs = [storage_lines(plan.disk, plan.host)]
    if job.device != "cpu":  # what a CPU reaches of its peak is anybody's guess
        needs.append(speed_lines(plan.speed, job.ranks))
    return "\n\n".join([header(job, ranks_assumed), memory_table(plan.phases), "\n".join(needs)])


def as_json(plan: Plan, limit: int | None = None) -> dict[str, Any]:
    """The plan for programs: bytes and seconds."""
    job = plan.job
    found: dict[str, Any] = {
        "parameters": job.architecture.parameters,
        "trained_parameters": sum(tensor.numel for tensor in job.tensors if tensor.trainable),
        "ranks": job.ranks,
        "sharding": asdict(job.sharding),
        "global_batch_size": job.global_batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "memory_bytes": {
            phase.name: asdict(phase.peak) | {"allocated": phase.peak.allocated, "total": phase.peak.total}
            for phase in plan.phases
        },
        "peak_bytes": max(phase.peak.total for phase in plan.phases),
        "disk_bytes": asdict(plan.disk) | {"total": plan.disk.total},
        "host_bytes": asdict(plan.host) | {"total": plan.host.total},
        "time": asdict(plan.speed),
        "peak_bytes_by_ranks": {
            name: dict(zip(map(str, RANKS), values, strict=True)) for name, values in layouts_by_ranks(job)
        },
    }
    if limit is not None:
        advice = advise(job, limit)
        found["fits"] = advice.fits
        found["changes"] = None if advice.changes is None else [change.text for change in advice.changes]
    return found


def layouts_by_ranks(job: Job) -> list[tuple[str, list[int | None]]]:
    """The peak of one rank, for each layout and each number of RANKS; None where the layout cannot be made."""
    plain = replace(job.sharding, layout="fsdp2", cpu_offload=False, replicate_size=None, shard_size=None)
    layouts = {
        "fsdp_full_shard": replace(plain, strategy="FULL_SHARD"),
        "fsdp_shard_grad_op": replace(plain, strategy="SHARD_GRAD_OP"),
        "fsdp_hybrid_shard": replace(plain, strategy="HYBRID_SHARD"),
        "fsdp_cpu_offload": replace(plain, strategy="FULL_SHARD", cpu_offload=True),
        "ddp": replace(plain, layout="ddp", strategy="FULL_SHARD"),
    }
    rows: list[tuple[str, list[int | None]]] = []
    for name, sharding in layouts.items():
        values: list[int | None] = []
        for ranks in RANKS:
            impossible = name == "fsdp_hybrid_shard" and ranks <= job.ranks_per_node
            wide = replace(job, sharding=sharding, ranks=ranks)
            values.append(None if impossible else peak(wide).total)
        rows.append((name, values))
    return rows


def _implied_ranks(recipe: Recipe, config: str | None) -> int:
    """Without --num-processes: as many ranks as a node commonly has, one where the layout is a single process."""
    sharding = read_sharding(config, recipe.run.accelerate_config, {"WORLD_SIZE": "1"})
    return 1 if sharding.layout == "single" else 8


def _torch_version() -> tuple[int, int]:
    """The torch of this machine, without importing it; the newest known to us where there is none."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return (2, 13)
    return int(major), int(minor)
