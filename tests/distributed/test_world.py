"""What a machine without GPUs cannot do is refused by name, before ranks are joined or anything is loaded; its cores are
used as the user says."""

import os
from pathlib import Path

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.distributed.join import ALONE, join, leave, use_deterministic_kernels
from finetune.errors import UserError
from tests.ranks import launch_ranks, run_command, run_python


@pytest.mark.parametrize(
    ("given", "offload", "ranks"),
    [(False, True, 1), (False, True, 2), (False, False, 1), (True, True, 1)],
)
def test_a_gpu_run_with_offload_uses_its_share_of_the_cores(
    given: bool, offload: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets OMP_NUM_THREADS=1, and the optimizer of offloaded parameters runs on the CPU."""

    class JoinedError(Exception):
        pass

    def stop(*_: object) -> None:
        raise JoinedError

    monkeypatch.setattr(
        "finetune.distributed.join._choose_device", lambda _: torch.device("cuda", 0)
    )
    monkeypatch.setattr("finetune.distributed.join._join_process_group", stop)
    monkeypatch.setattr("finetune.distributed.join._launcher_has_threads", lambda: given)
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(ranks),
    }.items():
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


@pytest.mark.slow
def test_accelerate_launch_uses_all_cores_but_for_a_users_own_number_of_threads(
    tmp_path: Path,
) -> None:
    """A bare `accelerate launch` sets OMP_NUM_THREADS=1 itself; where the user has set it, that is kept."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import torch\nfrom finetune.config.accelerate_file import Sharding\nfrom finetune.distributed.join import join\n"
        "join(Sharding(layout='single', use_cpu=True))\nprint('threads', torch.get_num_threads())\n"
    )
    given = run_python(["-m", "accelerate.commands.launch", str(script)])
    assert given.stdout == "threads 1\n", (
        given.stderr
    )  # the tests' environment has OMP_NUM_THREADS=1
    left_out = run_command(["env", "-u", "OMP_NUM_THREADS", "accelerate", "launch", str(script)])
    assert left_out.stdout == f"threads {len(os.sched_getaffinity(0))}\n", left_out.stderr


def test_a_world_of_one_leaves_the_environment_as_it_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*ALONE, "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)

    leave(join(Sharding(layout="fsdp2", use_cpu=True)))  # torch's compiler names its folder once
    found = dict(os.environ)
    for layout in ("fsdp2", "single", "fsdp2"):
        leave(join(Sharding(layout=layout, use_cpu=True)))  # type: ignore[arg-type]
        assert dict(os.environ) == found


LEAVES = """
import os, sys, torch
from torch import nn
from finetune.config.layout import Sharding
from finetune.distributed.join import join, leave
from tests.ranks import open_stores

WORLDS = 12
open_stores(WORLDS)
sys.setswitchinterval(60)  # no other thread gets Python's lock before this one waits
port = int(os.environ["MASTER_PORT"])
for number in range(WORLDS):
    os.environ["MASTER_PORT"] = str(port + number)
    world = join(Sharding(layout="ddp", use_cpu=True))
    model = world.accelerator.prepare(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    leave(world)
    del model
"""


def test_a_model_of_ddp_that_is_freed_after_leaving_waits_for_nobody(tmp_path: Path) -> None:
    """It hung within ten worlds while it was the last that held the process group."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    launch_ranks(tmp_path / "leaves.py", timeout=60).check()


LONG_RESULT = """
from pathlib import Path
from finetune.config.layout import Sharding
from finetune.distributed.join import join, leave
from finetune.distributed.world import RankGroup
from finetune.errors import AgreedError

def read_peak_bytes():
    _, after = Path("/proc/self/status").read_text().split("VmHWM:")
    kib, *_ = after.split()
    return 1024 * int(kib)

world = join(Sharding(layout="ddp", use_cpu=True))
ranks = RankGroup(world)
assert ranks.on_main(lambda: {"answer": [1, None, "\\u00fc"]}) == {"answer": [1, None, "\\u00fc"]}
text = "x" * (20 << 20) if world.is_main else None
Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
before = read_peak_bytes()
assert len(ranks.on_main(lambda: text)) == 20 << 20
assert read_peak_bytes() - before < 5 * (20 << 20), f"{(read_peak_bytes() - before) / 2**20} MiB"
try:
    ranks.on_main(lambda: 1 / 0)
except ZeroDivisionError:
    assert world.is_main
except AgreedError as error:
    assert not world.is_main and "division by zero" in str(error)
leave(world)
"""


def test_a_long_result_of_rank_0_takes_its_own_memory_on_the_others(tmp_path: Path) -> None:
    """Not that of a result from every rank: a rollout of 64 ranks would take gigabytes on each."""
    (tmp_path / "long.py").write_text(LONG_RESULT)
    launch_ranks(tmp_path / "long.py", ranks=4, timeout=60).check()


def test_a_kernel_that_is_not_deterministic_is_refused_by_name() -> None:
    values, places = torch.zeros(4), torch.tensor([1, 1])
    with use_deterministic_kernels(on=False):
        values.put_(places, torch.ones(2))
    with (
        pytest.raises(UserError, match=r"^deterministic: true: put_ .*; remove the key"),
        use_deterministic_kernels(on=True),
    ):
        with use_deterministic_kernels(on=True):  # as where a model is loaded at its first use
            pass
        values.put_(places, torch.ones(2))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_threads_of_a_forked_rank_find_a_pool() -> None:
    """Children of a process that has torch's threads failed now and then; those of one that has none, as the launcher's, never."""
    script = str(Path(__file__).with_name("forked_threads.py"))

    def failures(kind: str) -> int:
        done = run_python([script, "600", kind], timeout=500)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert failures("forked") > 0, "else this shows nothing"
    assert failures("renewed") == failures("without a pool") == 0
