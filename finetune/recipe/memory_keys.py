"""The keys that trade memory against time, activation_offload and optim_in_backward: where they work. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from finetune.constants import compute_global_batch_size
from finetune.errors import UserError
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding
    from finetune.recipe.lora_schema import Lora
    from finetune.recipe.schema import Model, Recipe


def check_memory_keys(recipe: "Recipe", sharding: "Sharding", ranks: int) -> None:
    """Raises `UserError` where `activation_offload`, `activation_checkpointing_keeps` or `optim_in_backward` is asked for and
    does not work in this layout."""
    _check_checkpointing_keys(recipe, sharding)
    _check_update_in_backward(recipe, sharding, ranks)


def _check_checkpointing_keys(recipe: "Recipe", sharding: "Sharding") -> None:
    keeps = "activation_checkpointing_keeps"
    if recipe.model.activation_checkpointing_keeps != "nothing" and not sharding.activation_checkpointing:
        raise UserError(
            f"{recipe.place_of(keeps)}: {keeps}: {recipe.model.activation_checkpointing_keeps} is of checkpointed "
            f"layers, but {sharding.source} checkpoints none; set fsdp_activation_checkpointing: true there, or remove the key"
        )
    if not recipe.model.activation_offload:
        return
    where = f"{recipe.place_of('activation_offload')}: activation_offload"
    if not sharding.activation_checkpointing:
        raise UserError(
            f"{where}: offloads what checkpointed layers keep, but {sharding.source} checkpoints none; set "
            "fsdp_activation_checkpointing: true there, or remove the key"
        )
    if sharding.ranks_per_batch > 1 or sharding.expert_parallel_size > 1:
        what = "sequence, tensor or expert parallelism"
        raise UserError(f"{where}: it does not work with {what} ({sharding.source}); remove the key")


def refuse_unsuited_keys(model: "Model", lora: "Lora", experts: int, name: str) -> None:
    """Raises `UserError` for `torch_compile` and `activation_checkpointing_keeps` where they do not work with a mixture of experts, or
    with DoRA. experts: of the model `name`; 0 for a dense one."""
    if model.torch_compile and experts:
        raise UserError(
            f"torch_compile: {name} is a mixture of experts, whose tokens for each expert differ from step to step; leave the key out"
        )
    if model.activation_checkpointing_keeps == "attention_and_projections" and (experts or lora.use_dora):
        what = "DoRA's adapters" if lora.use_dora else f"the experts of {name}"
        raise UserError(
            f"activation_checkpointing_keeps: attention_and_projections: {what} multiply matrices of the sizes of attention's; set it "
            "to attention"
        )


def find_in_backward_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, sentence) for what keeps a recipe with these `values` from `optim_in_backward`.

    >>> [key for key, _ in find_in_backward_problems({"optim_in_backward": True, "max_grad_norm": None, "optim": "adafactor"})]
    ['optim']
    """
    if not values.get("optim_in_backward"):
        return
    if values.get("max_grad_norm", 1.0) is not None:
        yield (
            "max_grad_norm",
            "max_grad_norm clips by the norm of all gradients, which is known only after the updates of optim_in_backward; set "
            "max_grad_norm: null, or remove optim_in_backward",
        )
    if values.get("on_nonfinite", "stop") != "stop":
        yield (
            "on_nonfinite",
            "on_nonfinite: skip leaves out a whole step, but under optim_in_backward a part of it has been made when a gradient is "
            "found that is not finite; set on_nonfinite: stop",
        )
    if values.get("optim_offload", "none") != "none":
        yield (
            "optim_offload",
            "optim_offload: nvme updates one layer after another when all gradients are there, optim_in_backward before; remove one "
            "of the two",
        )
    if values.get("optim") == "adafactor":
        yield (
            "optim",
            "optim: adafactor averages each update over the ranks, for which optim_in_backward leaves no place; set another "
            "optimizer",
        )


def _check_update_in_backward(recipe: "Recipe", sharding: "Sharding", ranks: int) -> None:
    """Raises `UserError` where `optim_in_backward` is asked for and a step's gradients cannot be used one by one."""
    if not recipe.optimization.optim_in_backward:
        return
    where, rows = f"{recipe.place_of('optim_in_backward')}: optim_in_backward", recipe.batch.per_device_train_batch_size
    if sharding.ranks_per_batch > 1 or sharding.expert_parallel_size > 1 or sharding.fp8 is not None:
        what = "FP8" if sharding.fp8 is not None else "sequence, tensor or expert parallelism"
        raise UserError(f"{where}: it does not work with {what} ({sharding.source}); remove the key")
    global_rows = compute_global_batch_size(recipe.batch, ranks)
    micro_batches = -(-global_rows // (rows * ranks))
    if micro_batches > 1:
        raise UserError(
            f"{where}: a step of {global_rows} rows is {micro_batches} micro-batches of {rows} on {counted(ranks, 'rank')}, but a "
            "gradient that is freed in the backward cannot wait for the next micro-batch; set global_batch_size: "
            f"{rows * ranks}, or per_device_train_batch_size: {-(-global_rows // ranks)}"
        )
    if sharding.layout in ("ddp", "fsdp1"):
        why = (
            "DDP keeps every gradient in its buckets"
            if sharding.layout == "ddp"
            else "FSDP1 flattens parameters together"
        )
        raise UserError(f"{where}: {why} ({sharding.source}); use FSDP2 or one process, or remove the key")
    if sharding.cpu_offload:
        raise UserError(
            f"{where}: under CPU offload gradients are in host memory already ({sharding.source}); remove the key"
        )
    if sharding.mixed_precision == "fp16":
        raise UserError(
            f"{where}: under fp16 all gradients are checked for overflow before the first update ({sharding.source}); set "
            "mixed_precision: bf16, or remove the key"
        )
