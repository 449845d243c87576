"""What a machine without GPUs cannot do is refused by name, before ranks are joined or anything is loaded."""

import os

import pytest
import torch

from finetune.errors import UserError
from finetune.sharding import world
from finetune.sharding.config import Sharding
from finetune.sharding.world import join


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1", "ddp", "single"])
def test_fp16_on_a_cpu(layout: str) -> None:
    asked = Sharding(layout=layout, mixed_precision="fp16", use_cpu=True, source="mine.yaml")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^mine.yaml: mixed_precision: fp16 does not train on a CPU; use bf16 or no$"):
        join(asked)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("given", "offload", "ranks"), [(False, True, 1), (False, True, 2), (False, False, 1), (True, True, 1)]
)
def test_a_gpu_run_with_offload_uses_its_share_of_the_cores(
    given: bool, offload: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets OMP_NUM_THREADS=1, and the optimizer of offloaded parameters runs on the CPU."""

    class JoinedError(Exception):
        pass

    def stop(*_: object) -> None:
        raise JoinedError

    monkeypatch.setattr(world, "_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(world, "_join_process_group", stop)
    monkeypatch.setattr(world, "_launcher_has_threads", lambda: given)
    for name, value in {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(JoinedError):
            join(Sharding(layout="fsdp2", cpu_offload=offload))
        cores = len(os.sched_getaffinity(0))
        assert torch.get_num_threads() == (max(1, cores // ranks) if offload and not given else 1)
    finally:
        torch.set_num_threads(before)
