"""Whether a run fits the device, and if not, the smallest changes that make it fit, cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from finetune.plan.memory import peak
from finetune.plan.run_spec import Job
from finetune.recipe.schema import Recipe

Optim = Literal["adamw_bf16_moments", "adamw_8bit"]
FP32_MOMENTS = ("adamw_torch_fused", "adamw_torch")
SHORTEST_ROW = 512  # tokens; no shorter row is suggested
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as it is pasted behind the command (or where `text` says)."""

    text: str
    cost: str
    apply: Callable[[Job], Job]


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes` make the run fit, with `peak` bytes; None: none of them do, but `ranks` ranks would (None: no number)."""

    fits: bool
    changes: tuple[Change, ...] | None
    peak: int
    ranks: int | None = None


def advise(job: Job, device_bytes: int) -> Advice:
    """The changes that make `job` fit, none dearer than needed: the first in order of cost that fits alone, or with those
    before it, of which the ones not needed are dropped."""
    needed = peak(job).total
    if needed <= device_bytes:
        return Advice(True, (), needed)
    taken: list[Change] = []
    for change in possible_changes(job):
        if (alone := peak(change.apply(job)).total) <= device_bytes:
            return Advice(False, (change,), alone)
        taken.append(change)
        if _peak_after(job, taken) <= device_bytes:
            break
    else:
        return Advice(False, None, _peak_after(job, taken), _enough_ranks(job, taken, device_bytes))
    for change in reversed(list(taken)):  # the dearest first
        fewer = [other for other in taken if other is not change]
        if _peak_after(job, fewer) <= device_bytes:
            taken = fewer
    return Advice(False, tuple(taken), _peak_after(job, taken))


def possible_changes(job: Job) -> Iterator[Change]:
    """What can still be changed, the cheapest first: what costs next to no time, then more time, then what is learned."""
    sharding, recipe = job.sharding, job.recipe
    yield from _smaller_micro_batch(job)
    if recipe.optimization.optim in FP32_MOMENTS:
        yield Change(
            "optim=adamw_bf16_moments", "moments rounded to bf16, no more time", _with_optim("adamw_bf16_moments")
        )
    if not sharding.activation_checkpointing:
        yield Change(
            "fsdp_activation_checkpointing: true" if sharding.is_fsdp else "accelerate_config=fsdp_full_shard",
            "about 30% more time",
            lambda job: replace(job, sharding=replace(job.sharding, activation_checkpointing=True)),
        )
    if job.pieces < job.ranks or sharding.strategy == "SHARD_GRAD_OP":
        yield Change(
            "accelerate_config=fsdp_full_shard",
            "more communication",
            lambda job: replace(
                job,
                sharding=replace(
                    job.sharding,
                    layout="fsdp2",
                    strategy="FULL_SHARD",
                    wrapping="TRANSFORMER_BASED_WRAP",
                    activation_checkpointing=True,
                ),
            ),
        )
    if recipe.optimization.optim != "adamw_8bit" and sharding.layout != "fsdp1":
        yield Change("optim=adamw_8bit", "moments in 8 bits; needs torchao", _with_optim("adamw_8bit"))
    if recipe.data.max_length >= 2 * SHORTEST_ROW:
        half = recipe.data.max_length // 2
        yield Change(f"max_length={half}", "longer examples are cut", lambda job: _with_length(job, half))
    if not sharding.cpu_offload:
        yield Change(
            "accelerate_config=fsdp_cpu_offload",
            "several times the time",
            lambda job: replace(
                job,
                sharding=replace(
                    job.sharding,
                    layout="fsdp2",
                    strategy="FULL_SHARD",
                    wrapping="TRANSFORMER_BASED_WRAP",
                    activation_checkpointing=True,
                    cpu_offload=True,
                ),
            ),
        )
    if not recipe.lora.use_peft:
        yield Change("use_peft=true", "adapters instead of all parameters", _with_lora)


def _smaller_micro_batch(job: Job) -> Iterator[Change]:
    if job.rows > 1:
        rows = job.global_batch_size
        keep = "" if job.recipe.batch.global_batch_size else f" global_batch_size={rows}"
        yield Change(
            f"per_device_train_batch_size=1{keep}",
            "more micro-batches, the same step",
            lambda job: _with_batch(job, per_device_train_batch_size=1, global_batch_size=rows),
        )


def _with_optim(optim: Optim) -> Callable[[Job], Job]:
    return lambda job: _with_recipe(
        job, replace(job.recipe, optimization=replace(job.recipe.optimization, optim=optim))
    )


def _with_length(job: Job, tokens: int) -> Job:
    return _with_recipe(job, replace(job.recipe, data=replace(job.recipe.data, max_length=tokens)))


def _with_lora(job: Job) -> Job:
    return _with_recipe(job, replace(job.recipe, lora=replace(job.recipe.lora, use_peft=True)))


def _with_batch(job: Job, **keys: int) -> Job:
    batch = replace(job.recipe.batch, gradient_accumulation_steps=None, **keys)
    return _with_recipe(job, replace(job.recipe, batch=batch))


def _with_recipe(job: Job, recipe: Recipe) -> Job:
    return replace(job, recipe=recipe)


def _peak_after(job: Job, changes: list[Change]) -> int:
    for change in changes:
        job = change.apply(job)
    return peak(job).total


def _enough_ranks(job: Job, changes: list[Change], device_bytes: int) -> int | None:
    for change in changes:
        job = change.apply(job)
    wider = (replace(job, ranks=ranks) for ranks in RANKS if ranks > job.ranks)
    return next((wide.ranks for wide in wider if peak(wide).total <= device_bytes), None)
