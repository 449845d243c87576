"""Verifies a checkpoint on all ranks together."""

from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

from finetune.checkpoint.manifest import MANIFEST, PARTS, find_damage
from finetune.distributed.world import RankGroup, World
from finetune.errors import AgreedError


def find_damage_together(
    checkpoint: Path, world: World, parts: Collection[str] = PARTS
) -> list[str]:
    """Lists the problems of a checkpoint as `find_damage` does, on every rank. All ranks call it.

    Each rank reads the bytes of a share of the files, since the others wait for the slowest. If the
    nodes have copies of their own, the ranks of a node divide that node's copy.

    Raises `AgreedError` if a rank does not find the same files as rank 0.
    """
    ranks = RankGroup(world)
    views = ranks.on_all(lambda: _look_at(checkpoint, parts))
    problems: list[str] = views[0]["problems"]
    for rank, view in enumerate(views):
        if view["problems"] != problems:
            raise AgreedError(
                f"{checkpoint}: rank 0 finds there: {'; '.join(problems) or 'all files'}; rank "
                f"{rank}: {'; '.join(view['problems']) or 'all files'}; every rank must see the "
                "same files: use a shared folder"
            )
    if problems:
        return problems
    share = world.rank, world.size
    if any(view != views[0] for view in views):  # not the same file
        share = world.local_rank, world.local_size
    by_rank = ranks.on_all(lambda: find_damage(checkpoint, parts=parts, share=share))
    return sorted(set(chain.from_iterable(by_rank)))


def _look_at(checkpoint: Path, parts: Collection[str]) -> dict[str, Any]:
    """Returns the problems that are seen without reading the files; if there are none, also which
    file the manifest is: the same on every node if the folder is shared.
    """
    problems = find_damage(checkpoint, checksums=False, parts=parts)
    if problems:
        return {"problems": problems}
    status = (checkpoint / MANIFEST).stat()
    return {"problems": [], "manifest": [status.st_ino, status.st_mtime_ns]}
