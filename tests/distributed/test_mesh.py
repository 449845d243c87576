"""Given more ranks than are started here, when each makes the mesh, then groups and places in them are those that data, loss and state go by."""

from collections import Counter
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.config.layout import Sharding, Strategy
from finetune.distributed.join import make_mesh, make_sequence_group
from finetune.distributed.world import FSDP, REPLICATE, TENSOR, World

DIVIDED = {"sequence_parallel_size": 2, "tensor_parallel_size": 2}
SIZES: dict[str, dict[str, int]] = {
    "8 ranks": {"shard_size": 2, **DIVIDED},
    "16 ranks in 2 replicas": {"replicate_size": 2, "shard_size": 2, **DIVIDED},
    "a group of 4 x 2": {"shard_size": 1, **DIVIDED, "sequence_parallel_size": 4},
}


class Place(NamedTuple):
    """What a rank knows: its world, the ranks that have its rows' other tokens, and those of each dimension of its mesh."""

    world: World
    sequence: list[int]
    mesh: dict[str, list[int]]


@pytest.fixture(scope="module", params=SIZES)
def places(request: pytest.FixtureRequest) -> list[Place]:
    """Of each rank, in a group of which it alone is there."""
    sizes = SIZES[request.param]
    strategy: Strategy = "HYBRID_SHARD" if "replicate_size" in sizes else "FULL_SHARD"
    sharding = replace(Sharding(layout="fsdp2", strategy=strategy), **sizes)  # type: ignore[arg-type]
    ranks = prod(sizes.values())
    assert prod((sharding.mesh_sizes or {}).values()) == ranks
    found = []
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            mesh, group = make_mesh(sharding, "cpu"), make_sequence_group(sharding, ranks, "cpu")
            assert mesh is not None and group is not None
            named = {
                name: dist.get_process_group_ranks(mesh[name].get_group())
                for name in (REPLICATE, FSDP, TENSOR)
            }
            accelerator: Any = SimpleNamespace(torch_device_mesh=mesh)
            world = World(rank, ranks, rank, ranks, torch.device("cpu"), sharding, accelerator)
            found.append(Place(world, dist.get_process_group_ranks(group), named))
        finally:
            dist.destroy_process_group()
    return found


def test_a_group_has_one_rank_for_each_part_of_its_rows_and_of_its_matrices(
    places: list[Place],
) -> None:
    data = [place.world.data_parallel for place in places]
    for rank, (world, sequence, mesh) in enumerate(places):
        assert [data[other].sequence_rank for other in sequence] == list(
            range(data[rank].sequence_size)
        ), "in order"
        assert {data[other].rank for other in (*sequence, *mesh[TENSOR])} == {data[rank].rank}, (
            "the same rows"
        )
        assert {data[other].sequence_rank for other in mesh[TENSOR]} == {
            data[rank].sequence_rank
        }, "the same tokens"
        assert {places[other].world.tensor_group_index for other in mesh[TENSOR]} == {
            world.tensor_group_index
        }
        assert set(sequence) & set(mesh[TENSOR]) == {rank}
        assert set(sequence) <= set(mesh[FSDP]), "they have gradients of different tokens"
        assert max(mesh[TENSOR]) - min(mesh[TENSOR]) == len(mesh[TENSOR]) - 1, "neighbors"


def test_rows_are_dealt_out_and_counted_once(places: list[Place]) -> None:
    worlds = [place.world for place in places]
    groups, shared = worlds[0].data_parallel.size, worlds[0].sharding.ranks_per_batch
    assert Counter(world.data_parallel.rank for world in worlds) == dict.fromkeys(
        range(groups), shared
    )
    assert [world.data_parallel.rank for world in worlds if world.is_first_of_batch] == list(
        range(groups)
    )
    averaged = places[0].mesh[FSDP], places[0].mesh[REPLICATE]
    assert worlds[0].tensor_group_count == prod(map(len, averaged)), (
        "the loss is multiplied by what FSDP divides by"
    )


def test_ranks_that_hold_the_same_shard_round_it_alike(places: list[Place]) -> None:
    for world, _, mesh in places:
        assert [places[other].world.shard_rank for other in mesh[FSDP]] == list(
            range(len(mesh[FSDP]))
        )
        same = {
            places[other].world.shard_rank for name in (TENSOR, REPLICATE) for other in mesh[name]
        }
        assert same == {world.shard_rank}
