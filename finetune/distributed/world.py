"""The ranks of a run: joining them, what this rank is, and Accelerate, kernels and compiler set up for the layout."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from finetune.config.facts import MachineFacts, has_compiler
from finetune.config.layout import Sharding
from finetune.constants import count_cores
from finetune.distributed.accelerator import STAGE, make_accelerator, make_sequence_group
from finetune.distributed.collective import DataParallelRank, gather_json
from finetune.errors import EXIT_FAULT, SECONDS_FOR_CAUSE, UserError
from finetune.files.network import find_cache

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

POLL_SECONDS = 0.5

Process = tuple[str, int, float]
"""Host name, process id and creation time (seconds since the epoch)."""


def this_process() -> Process:
    """This process, as other ranks find it."""
    return os.uname().nodename, os.getpid(), psutil.Process().create_time()


def watch_peers(rank: int, processes: Sequence[Process], timeout_seconds: float) -> threading.Event:
    """Starts a thread that ends this process `timeout_seconds` after another rank of this node has died.

    `processes`: every rank's `this_process()`. A rank that this process cannot see (another host, another container) is
    not watched. The thread ends when the returned event is set.
    """
    host = os.uname().nodename
    peers = {
        peer: (process, created)
        for peer, (of, process, created) in enumerate(processes)
        if peer != rank and of == host and is_alive(process, created)
    }
    left = threading.Event()
    if peers:
        arguments = (rank, peers, timeout_seconds, left)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="watch_peers").start()
    return left


def is_alive(process: int, created: float) -> bool:
    """Whether the process runs; one that has ended and waits for its parent (a zombie) does not."""
    try:
        found = psutil.Process(process)
        return bool(found.create_time() == created and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _watch(rank: int, peers: Mapping[int, tuple[int, float]], timeout_seconds: float, left: threading.Event) -> None:
    while not left.wait(POLL_SECONDS):
        dead = [peer for peer, process in peers.items() if not is_alive(*process)]
        if dead and not left.wait(timeout_seconds):
            sys.stderr.write(
                f"rank {rank}: rank {dead[0]} ended {timeout_seconds:g} s ago (timeout_seconds), and the run cannot "
                "continue without it; that rank's own error is the cause. Where this one was:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_FAULT)


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # what a launcher would have set
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks. One process is a world of one: the same code, the same layout."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    device: torch.device
    sharding: Sharding
    accelerator: "Accelerator"
    collective_timeout: timedelta = timedelta(minutes=30)  # after which a collective gives up
    sequence_group: dist.ProcessGroup | None = None  # the ranks that divide a row's tokens; None: a rank has whole rows
    # What the environment said, before joining, of the variables that joining changes; None: nothing.
    environment: dict[str, str | None] = field(default_factory=dict)
    left: threading.Event = field(default_factory=threading.Event)  # set by `leave`: peers may end from then on

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def stages(self) -> int:
        """Groups of ranks that hold different layers: one but under pipeline parallelism."""
        return self.sharding.pipeline_parallel_size

    @property
    def stage_size(self) -> int:
        """How many ranks hold the same layers."""
        return self.size // self.stages

    @property
    def stage_rank(self) -> int:
        """This rank among those that hold the same layers."""
        return self.rank % self.stage_size

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same layers; None where all do."""
        return None if self.mesh is None or self.stage_size == self.size else self.mesh[STAGE].get_group()

    @property
    def shard_group_size(self) -> int:
        """How many ranks hold one replica of the model, or of these layers, between them."""
        return self.sharding.count_replica_ranks(self.stage_size, self.local_size)

    @property
    def shard_rank(self) -> int:
        """This rank's position in its shard group, which ranks of a tensor-parallel group share."""
        return self.sharding.tensor_group_of(self.stage_rank % self.shard_group_size)

    @property
    def data_parallel(self) -> DataParallelRank:
        """This rank among those with rows of their own; the ranks of a sequence or tensor group count as one."""
        sequence, shared = self.sharding.sequence_parallel_size, self.sharding.ranks_per_row
        rank, size = self.stage_rank // shared, self.stage_size // shared
        part = self.tensor_group_index % sequence
        return DataParallelRank(rank, size, self.local_rank, self.device, part, sequence)

    @property
    def is_first_of_batch(self) -> bool:
        """Whether no rank before this one trains on the same rows: what all of them know is counted once."""
        return self.rank < self.stage_size and self.rank % self.sharding.ranks_per_row == 0

    @property
    def tensor_group_index(self) -> int:
        """This rank's tensor-parallel group among `tensor_group_count`: its ranks compute the same losses."""
        return self.sharding.tensor_group_of(self.stage_rank)

    @property
    def tensor_group_count(self) -> int:
        """The number of tensor-parallel groups with the same layers, over which gradients are averaged, or of ranks."""
        return self.sharding.tensor_group_of(self.stage_size)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The mesh of `accelerator.make_mesh`; None where the world is one dimension."""
        mesh: DeviceMesh | None = getattr(self.accelerator, "torch_device_mesh", None)
        return mesh

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of every rank's `tensor`, in place, on every rank."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum of every rank's `tensor`, in place, on every rank."""
        if dist.is_initialized():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_over_groups(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `sum`, with ranks that know the same `tensor` (a tensor parallel group, a pipeline) counted once."""
        summed, copies = self.sum(tensor), self.size // self.tensor_group_count
        return summed if copies == 1 else summed.div_(copies)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(int(flag))).item()) if dist.is_initialized() else flag

    def barrier(self) -> None:
        """Waits for every rank. Over gloo, so that a GPU's queue is left alone."""
        self.sum(torch.zeros(1))

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's `value` (anything JSON can say), in order of rank, on every rank. No pickle crosses the wire.

        A thread beside the loop gives a gloo `group` of its own.
        """
        return gather_json(value, group) if dist.is_initialized() else [value]


def join(sharding: Sharding, timeout_seconds: float = 1800.0) -> World:
    """Joins the ranks that the launcher started, under `sharding`; a process without a launcher becomes a world of one.

    Asserts what Accelerate does not check: that every launched rank is in the world, and that FSDP is
    on where it was asked for. What this machine cannot do, the rules have refused before.
    """
    _end_with_launcher()
    before = dict(os.environ)
    device = _device(sharding)
    _use_own_cores(device, sharding)
    # The watchdog, which shows every rank's stacks, waits for SECONDS_FOR_CAUSE: only then may a collective give up.
    timeout = timedelta(seconds=timeout_seconds + SECONDS_FOR_CAUSE + 0.5)
    if sharding.layout != "single":
        _join_process_group(device, timeout)
    accelerator = make_accelerator(sharding, device)
    rank = accelerator.process_index
    sequence_group = make_sequence_group(sharding, accelerator.num_processes, device.type)
    set_timeouts(timeout)  # of the groups of the meshes too
    left = (
        watch_peers(rank, gather_json(this_process(), None), timeout_seconds)
        if dist.is_initialized()
        else threading.Event()
    )
    world = World(
        rank=rank,
        size=accelerator.num_processes,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=device,
        sharding=sharding,
        accelerator=accelerator,
        collective_timeout=timeout,
        sequence_group=sequence_group,
        environment={
            name: before.get(name)
            for name in before.keys() | os.environ.keys()
            if before.get(name) != os.environ.get(name)
        },
        left=left,
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    assert world.size == launched, f"{launched} processes were launched, but Accelerate sees {world.size}"
    assert not sharding.is_fsdp or str(accelerator.distributed_type.value) == "FSDP", accelerator.distributed_type
    return world


def leave(world: World) -> None:
    """Destroys the process group once every rank has called this; afterwards the process can join another world.

    What joining has changed in the environment is undone: a launcher's variables would make the next world wait for
    other ranks, and Accelerate's would make it, and whatever this process starts, an FSDP world.
    """
    from accelerate.state import AcceleratorState, GradientState

    if dist.is_initialized():
        world.barrier()
        world.left.set()
        dist.destroy_process_group()
    for name, value in world.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def use_deterministic_kernels(*, on: bool) -> Iterator[None]:
    """Within it, torch runs only kernels whose results are the same bits each time. Not `on`: any kernel.

    Raises:
        UserError: For an operation that has no such kernel.
    """
    if not on:
        yield
        return
    torch.use_deterministic_algorithms(True)
    # Filling costs time, and every tensor here is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(
            f"deterministic: true: {str(error).split('. ')[0]}; remove the key, or what needs it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(False)


def _end_with_launcher() -> None:
    """Makes Linux send this rank SIGTERM, on which a run saves and stops, when torchrun's agent has ended.

    An agent that is killed with SIGKILL ends no rank: they would continue to train, where nobody can see or stop them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def describe_machine(sharding: Sharding, *, with_liger: bool = False) -> MachineFacts:
    """This rank's machine, for the rules, before it joins the others. `with_liger`: import Liger, which is slow."""
    device, families = _device(sharding), None
    if device.type == "cpu":
        return MachineFacts(device="cpu", system=sys.platform, has_compiler=has_compiler())
    if with_liger:
        with suppress(ImportError):
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

            families = frozenset(MODEL_TYPE_TO_APPLY_LIGER_FN)
    return MachineFacts(
        device="cuda",
        system=sys.platform,
        has_compiler=has_compiler(),
        gpu=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        is_hip=bool(torch.version.hip),
        liger_families=families,
    )


def _device(sharding: Sharding) -> torch.device:
    if sharding.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {os.environ.get('RANK', 0)} is the {local_rank + 1}th on this machine, which has "
            f"{torch.cuda.device_count()} GPUs; launch one process for each GPU (--num_processes)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _use_own_cores(device: torch.device, sharding: Sharding) -> None:
    """Undoes OMP_NUM_THREADS=1, which launchers set, where the CPU has work: for the one process that a bare
    `accelerate launch` starts on a CPU, and for GPU runs whose optimizer runs on the host.

    Where the launcher itself was given OMP_NUM_THREADS, that is the user's, and is kept.
    """
    alone = "LOCAL_RANK" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    has_work = alone if device.type == "cpu" else sharding.cpu_offload
    if has_work and os.environ.get("OMP_NUM_THREADS") == "1" and not _launcher_has_threads():
        torch.set_num_threads(max(1, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _launcher_has_threads() -> bool:
    """Whether OMP_NUM_THREADS stood in the environment of the process that started this one."""
    try:
        return "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return False


def _join_process_group(device: torch.device, timeout: timedelta) -> None:
    """Both backends on a GPU: NCCL for tensors there, gloo for what stays on the host (checkpoints, offload, counts).

    A process without a launcher meets nobody: its store is in memory and takes no port.
    """
    how: dict[str, Any] = {"backend": "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"}
    if device.type == "cuda":
        how["device_id"] = device
    if "RANK" not in os.environ:
        os.environ |= ALONE
        how |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(timeout=timeout, **how)


def set_timeouts(timeout: timedelta) -> None:
    """Sets the timeout of every process group of this rank: those of a device mesh have torch's 30 minutes."""
    for group in dist.distributed_c10d._world.pg_map if dist.is_initialized() else ():
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# Graphs that dynamo keeps for one piece of code before it runs the rest eagerly. A model soon needs more than the
# default of 8: one for each kind of layer, with and without gradients, and for a batch of one row.
RECOMPILE_LIMIT = 64
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def configure_compiler() -> None:
    """Sets torch's compiler up for packed rows, which differ in length. Call it before `torch.compile`."""
    _keep_compiled()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # Else equal sizes in the first batch (tokens and hidden size, say) become one symbol.
    torch.fx.experimental._config.use_duck_shape = False
    # Epsilons and scales as constants at once: as symbols they become constants after a whole compile.
    torch._dynamo.config.specialize_float = True
    # A checkpointed layer leaves what its router chose (models/experts.py); when it is recomputed, it need not.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _keep_compiled() -> None:
    """Makes torch keep what it compiles where it outlives a reboot, for the next start. Its own folder is in /tmp.

    Where that cannot be written, or the user has set a folder, all stays as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable to its own folder when its compiler is imported, which another library may have done.
    if os.environ.get(CACHE_VARIABLE) not in (None, os.path.abspath(default_cache_dir())):  # noqa: PTH100
        return
    folder = find_cache("compiled")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(folder)
