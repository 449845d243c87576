"""Replicas compared: under DDP and hybrid sharding several ranks hold the same values, and a checkpoint takes each from one.

Were they not equal, the checkpoint would be of no model that was ever trained, and a resumed run another one.
"""

import json

import torch
import xxhash

from finetune.checkpoint.quantized_moments import dequantized, is_quantized
from finetune.checkpoint.shards import Piece
from finetune.distributed.collective import Ranks
from finetune.errors import UserError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SLICE = 1 << 20  # elements summed at once: bounds the int64 temporaries to 24 MiB


def refuse_different_replicas(pieces: list[Piece], step: int, ranks: Ranks) -> None:
    """Raises `UserError` on all ranks where two that hold the same part of the state do not hold the same values.

    `pieces`: all of this rank's, first copies or not. One digest a rank crosses the wire.
    """
    group_size = ranks.world.shard_group_size
    if ranks.world.size == group_size:  # one replica
        return
    sums = {f"{piece.part}/{piece.name}": int(weighted_sum(piece.tensor)) for piece in pieces}
    digests = ranks.all(lambda: xxhash.xxh3_64_hexdigest(json.dumps(sums).encode()))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[rank % group_size]]
    if not different:
        return
    by_rank = ranks.all(lambda: sums)
    rank, first = different[0], different[0] % group_size
    unequal = [name for name, value in by_rank[rank].items() if value != by_rank[first].get(name)]
    raise UserError(
        f"step {step} is not saved: ranks {first} and {rank} hold replicas of the model, but {len(unequal)} of "
        f"{len(by_rank[rank])} tensors are not equal, {unequal[0]} the first; start the run again to resume from an "
        "earlier checkpoint, and if it happens again, test the memory of these ranks, or report a bug"
    )


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of each element's bits times an odd number by its position, modulo 2**64 (0-dim int64, on the device).

    Integers add up to the same in any order, so that it is the same on every device; one changed element always shows.
    """
    plain = dequantized(tensor) if is_quantized(tensor) else tensor
    bits = plain.contiguous().reshape(-1).view(INTEGERS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), SLICE):
        part = bits[start : start + SLICE]
        weights = torch.arange(start, start + part.numel(), device=bits.device) * 2 + 1
        total += (part * weights).sum()
    return total
