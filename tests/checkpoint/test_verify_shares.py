"""The ranks verify a checkpoint together: each file is read by one of them, and all hear of what it finds."""

from pathlib import Path

from finetune.checkpoint import manifest
from tests.checkpoint.test_manifest import write_checkpoint
from tests.ranks import launch_ranks

ON_RANKS = """
import shutil, sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from finetune.checkpoint import manifest
from finetune.checkpoint.resume import find_checkpoint
from finetune.checkpoint.verify_shares import find_damage_together
from finetune.config.layout import Sharding
from finetune.distributed.join import join, leave
from finetune.errors import AgreedError
from finetune.files import durable

run = Path(sys.argv[1])
older, newest = sorted((run / "checkpoints").glob("step-*"))
files = sorted(manifest.read_manifest(newest).files)
world = join(Sharding(layout="ddp", use_cpu=True))
node = replace(world, local_rank=world.rank % 2, local_size=2)  # two ranks on each of two nodes
read_names = []
compute_checksum = durable.checksum

def note(path, advance):
    read_names.append("/".join(path.parts[len(newest.parts):]))
    return compute_checksum(path, advance)

@contextmanager
def damaged(path, by_this_rank):
    # on all ranks, one of which writes
    original = path.read_bytes()
    world.barrier()
    if by_this_rank:
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    world.barrier()
    yield
    world.barrier()
    if by_this_rank:
        path.write_bytes(original)
    world.barrier()

durable.checksum = note
assert find_checkpoint("auto", run, world) == newest
by_rank = world.gather(read_names)
assert sorted(sum(by_rank, [])) == files and sorted(map(len, by_rank)) == [0, 1, 1, 1], by_rank
for name in files:
    with damaged(newest / name, world.is_main):
        (problem,) = find_damage_together(newest, world)
        assert problem.startswith(name), problem
        assert find_checkpoint("auto", run, world) == older

# Each node has a copy, which no other reads.
copy = run / f"copy-of-node-{world.rank // 2}" / newest.name
if node.local_rank == 0:
    shutil.copytree(newest, copy)
world.barrier()
read_names.clear()
assert find_damage_together(copy, node) == []
by_rank = world.gather(read_names)
assert sorted(by_rank[0] + by_rank[1]) == sorted(by_rank[2] + by_rank[3]) == files, by_rank
for name in files:
    with damaged(copy / name, world.rank == 2):
        try:
            (problem,) = find_damage_together(copy, node)
        except AgreedError as error:  # what is seen without reading is of one copy only
            problem = str(error).partition("rank 2: ")[2]
        assert problem.startswith(name), problem

# A folder that a rank does not see is no damage, for which a sound checkpoint would be renamed.
try:
    find_damage_together(run / "nowhere" if world.rank == 3 else newest, world)
except AgreedError as error:
    assert "rank 3: manifest.json is missing" in str(error) and "a shared folder" in str(error)
else:
    raise AssertionError("nobody said that a rank does not see the checkpoint")
leave(world)
"""


def test_each_rank_reads_a_share_and_all_hear_of_its_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / "run", step)
    (tmp_path / "ranks.py").write_text(ON_RANKS)
    launch_ranks(tmp_path / "ranks.py", [str(tmp_path / "run")], ranks=4, timeout=60).check()


def test_an_empty_share_is_no_damage(tmp_path: Path) -> None:
    assert manifest.find_damage(write_checkpoint(tmp_path, 1), share=(7, 8)) == []
