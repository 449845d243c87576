"""Random numbers of a step: pure functions of the seed, the step and the rank, so that a resumed run needs no random state."""

import hashlib

import torch


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seeds dropout by the step alone, so that a resumed run needs no random state."""
    _seed_from(f"{seed}/{step}/{rank}")


def seed_rounding(seed: int, step: int, shard_rank: int, parameter: int | None = None) -> None:
    """Seeds stochastic rounding: ranks that hold the same shard must round alike, or their replicas drift apart.

    `parameter`: the index of the only one that is updated, where each is updated by itself.
    """
    _seed_from(f"{seed}/{step}/rounding/{shard_rank}" + ("" if parameter is None else f"/{parameter}"))


def _seed_from(text: str) -> None:
    digest = hashlib.sha256(text.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
