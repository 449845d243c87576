"""Whether ranks can divide the tokens of a row between them, by what recipe, model and Accelerate file say. No torch."""

from typing import TYPE_CHECKING

from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding


def refuse_undivided_attention(heads: int, implementation: str, sharding: "Sharding") -> None:
    """Raises `UserError` where ranks that divide a row's tokens cannot divide attention's `heads` between them."""
    ranks = sharding.sequence_parallel_size
    if ranks > 1 and implementation != "auto":
        raise UserError(
            f"attn_implementation: {implementation}: only the packed attention that is built in works where {ranks} ranks divide "
            f"the tokens of a row ({sharding.source}); leave the key out"
        )
    if heads % ranks:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise UserError(
            f"{sharding.source}: {ranks} ranks are to divide the tokens of a row, and in attention the heads, but the model has "
            f"{heads}; set the size to one of {sizes}"
        )
