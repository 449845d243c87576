"""Whether the experts of a mixture can be divided over ranks: what the layout, the recipe and the model must be. Torch-free."""

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.recipe.schema import Recipe
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding

KEY = "expert_parallel_size"
# By model_type: those whose losses are held to one process's (tests/training/test_expert_parallel.py).
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
UNSUPPORTED_OPTIMIZERS = ("adafactor",)


def with_expert_parallelism(sharding: "Sharding", recipe: Recipe, ranks: int) -> "Sharding":
    """`sharding` with the recipe's `expert_parallel_size`.

    Raises `UserError` where the layout, the number of ranks or another key of the recipe does not go with it.
    """
    size = recipe.model.expert_parallel_size
    if size == 1:
        return sharding
    if sharding.layout != "fsdp2":
        raise UserError(
            f"{sharding.source}: {KEY}: {size}: experts are divided only under FSDP2; use fsdp_full_shard, or set {KEY}: 1"
        )
    replicas = sharding.replicate_size or 1
    shards = ranks // replicas
    if shards % size:
        run = "the run" if replicas == 1 else f"each of the {replicas} replicas of {sharding.source}"
        raise UserError(
            f"{recipe.place_of(KEY)}: {KEY}: {size}: {run} has {counted(shards, 'rank')}, and {shards} / {size} is no whole number; "
            f"{_advise(shards, ' (it must divide the experts of a layer too)')}"
        )
    if sharding.ranks_per_batch > 1:
        raise UserError(
            f"{sharding.source}: {KEY}: {size}: experts are not divided where a row's tokens or a layer's matrices are; set "
            f"{KEY}: 1, or the Accelerate file's cp_size, sp_size and tp_size to 1"
        )
    if sharding.mixed_precision == "fp16" or sharding.fp8 is not None:
        precision = "fp16" if sharding.fp8 is None else "fp8"
        raise UserError(
            f"{sharding.source}: {KEY}: {size}: mixed_precision: {precision} is not supported with it; use bf16"
        )
    if recipe.optimization.optim in UNSUPPORTED_OPTIMIZERS:
        raise UserError(
            f"{recipe.place_of('optim')}: optim: {recipe.optimization.optim} is not supported with {KEY}; set optim: adamw_bf16_moments, or {KEY}: 1"
        )
    return replace(sharding, expert_parallel_size=size)


def refuse_undivided(sharding: "Sharding", model_type: str, experts: int, name: str, ranks: int) -> None:
    """Raises `UserError` where the experts of the model `name` cannot be divided as `sharding` asks.

    experts: of a layer; 0 for a dense model. ranks: of the run, which other sizes must divide too.
    """
    size = sharding.expert_parallel_size
    if size == 1:
        return
    if not experts:
        raise UserError(f"{KEY}: {size}: {name} is a dense model ({model_type}); leave the key out")
    if model_type not in FAMILIES:
        raise UserError(
            f"{KEY}: {size}: {name} is a mixture of experts of a family whose experts have not been divided yet ({model_type}; "
            f"tested are {', '.join(FAMILIES)}); leave the key out"
        )
    if experts % size:
        raise UserError(
            f"{KEY}: {size}: a layer of {name} has {experts} experts, and {experts} / {size} is no whole number; "
            f"{_advise(gcd(experts, ranks // (sharding.replicate_size or 1)))}"
        )


def shard_experts(shape: tuple[int, ...], size: int, shards: int) -> tuple[int, ...] | None:
    """What one rank holds of a parameter [experts, rows, ...] whose experts `size` ranks divide, and FSDP shards over `shards`:
    whole experts where they divide evenly, else some rows of each; None where neither does.

    >>> shard_experts((8, 64, 32), 2, 2), shard_experts((8, 64, 32), 2, 8), shard_experts((8, 63, 32), 2, 8)
    ((2, 64, 32), (4, 8, 32), None)
    """
    own = shape[0] // size
    if own % shards == 0:
        return (own // shards, *shape[1:])
    return (own, shape[1] // shards, *shape[2:]) if shape[1] % shards == 0 else None


def _advise(number: int, condition: str = "") -> str:
    """What to do where the size must divide `number`; `condition`: what else it must do, in brackets.

    >>> _advise(6), _advise(7, " (and 14)"), _advise(1)
    ('set it to 2, 3 or 6', 'set it to 7 (and 14)', 'leave the key out')
    """
    sizes = [str(size) for size in range(2, number + 1) if number % size == 0]
    if not sizes:
        return "leave the key out"
    listed = f"{', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else sizes[0]
    return f"set it to {listed}{condition}"
