"""Whether ranks can divide the tokens of a row between them, by what recipe, model and Accelerate file say. No torch."""

from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.recipe.tensor_division import GATHERED_FAMILIES

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding


def refuse_undivided_attention(model_type: str, heads: int, implementation: str, sharding: "Sharding") -> None:
    """Raises `UserError` where ranks that divide a row's tokens cannot divide attention's `heads` between them, or what tensor
    parallelism, whose size divides them, leaves of these on a rank."""
    ranks, tensors = sharding.sequence_parallel_size, sharding.tensor_parallel_size
    if ranks > 1 and implementation != "auto":
        raise UserError(
            f"attn_implementation: {implementation}: only the packed attention that is built in works where {ranks} ranks divide "
            f"the tokens of a row ({sharding.source}); leave the key out"
        )
    is_divided = tensors > 1 and model_type not in GATHERED_FAMILIES
    local = heads // tensors if is_divided else heads
    if local % ranks:
        sizes = ", ".join(str(size) for size in range(1, local + 1) if local % size == 0)
        left = f", of which tp_size {tensors} leaves {local} on a rank" if is_divided else ""
        raise UserError(
            f"{sharding.source}: {ranks} ranks are to divide the tokens of a row, and in attention the heads, but the model has "
            f"{heads}{left}; set the size to one of {sizes}"
        )
