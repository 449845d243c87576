"""Joining and leaving the other ranks of a run, and facts about this rank's machine.

To join is to make the process group, Accelerate's objects and the meshes.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from finetune.config.facts import MachineFacts, has_compiler
from finetune.config.layout import Sharding
from finetune.constants import COMPUTE_DTYPE, count_cores
from finetune.distributed.world import (
    BATCH,
    EXPERT,
    EXPERT_SHARD,
    FSDP,
    PIPELINE,
    REPLICATE,
    SEQUENCE,
    STAGE,
    TENSOR,
    World,
    gather_json,
)
from finetune.errors import EXIT_FAULT, SECONDS_FOR_CAUSE, UserError

POLL_SECONDS = 0.5  # between two checks that the other ranks' processes are alive
# the variables that a launcher would have set for one process
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
PR_SET_PDEATHSIG = 1  # an option of prctl, from linux/prctl.h: a signal when the parent dies
Process = tuple[str, int, float]
"""Host name, process id and creation time (seconds since the epoch)."""
_left_groups: list[ProcessGroup] = []
"""The process groups of the world that was left last; kept until the next world is joined.

This avoids a deadlock. A DDP model also keeps a reference to its group, and drops it while it holds
Python's lock (the GIL). If that were the last reference, the group's destructor would wait for
gloo's thread, which may wait for the lock to free a tensor.
"""


def join(sharding: Sharding, timeout_seconds: float = 1800.0) -> World:
    """Joins the ranks that the launcher started, in the layout of `sharding`.

    All ranks call it. A process without a launcher becomes a world of one. Asserts what Accelerate
    does not check: that every launched rank is in the world, and that FSDP is on if the layout
    needs it. The rules of `config` have already refused layouts that this machine cannot run.
    """
    _end_with_launcher()
    _left_groups.clear()
    environment_before = dict(os.environ)
    device = _choose_device(sharding)
    _use_own_cores(device, sharding)
    renew_thread_pool()
    # The run's own watchdog must act first: it waits for SECONDS_FOR_CAUSE and then shows the
    # stacks of every rank. Only then does a collective give up.
    timeout = timedelta(seconds=timeout_seconds + SECONDS_FOR_CAUSE + 0.5)
    if sharding.layout != "single":
        _join_process_group(device, timeout)
    accelerator = make_accelerator(sharding, device)
    rank = accelerator.process_index
    sequence_group = make_sequence_group(sharding, accelerator.num_processes, device.type)
    set_timeouts(timeout)  # the meshes have groups of their own
    if dist.is_initialized():
        left = watch_peers(rank, gather_json(this_process(), None), timeout_seconds)
    else:
        left = threading.Event()
    changed_names = {name for name, _ in environment_before.items() ^ os.environ.items()}
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
        environment={name: environment_before.get(name) for name in changed_names},
        left=left,
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    assert world.size == launched, (
        f"{launched} processes were launched, but Accelerate sees {world.size}"
    )
    assert not sharding.is_fsdp or str(accelerator.distributed_type.value) == "FSDP", (
        accelerator.distributed_type
    )
    return world


def renew_thread_pool() -> None:
    """Makes torch's thread pool now, because a forked process has lost its parent's.

    A notebook's launcher forks, for example. Otherwise the first computation would make the pool,
    and if two threads then compute at the same time, both fail: "Invalid thread pool".
    """
    torch.set_num_threads(torch.get_num_threads())


def leave(world: World) -> None:
    """Destroys the process group, so that this process can join another world.

    All ranks call it, and wait for each other. It restores the environment variables from before
    joining: with those of a launcher, the next world would wait for other ranks; with Accelerate's,
    the next world and every child process would use FSDP.
    """
    from accelerate.state import AcceleratorState, GradientState

    if dist.is_initialized():
        world.barrier()
        world.left.set()
        _left_groups[:] = dist.distributed_c10d._world.pg_map
        dist.destroy_process_group()
        _forget_meshes()
    for name, value in world.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _forget_meshes() -> None:
    """Clears DTensor's caches, whose keys are meshes.

    An equal mesh of the next world would otherwise find the groups of this world, which are
    destroyed.
    """
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _gen_transform_infos.cache_clear()


def _end_with_launcher() -> None:
    """Makes Linux send this rank SIGTERM when torchrun's agent ends; a run then saves and stops.

    Without this, an agent that is killed by SIGKILL would leave its ranks running unnoticed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _join_process_group(device: torch.device, timeout: timedelta) -> None:
    """Joins the default process group: gloo for tensors on the CPU, NCCL for those on a GPU.

    A run on GPUs needs gloo too, for checkpoints, offload and counts. A process without a launcher
    makes a group of one rank, whose store is in memory and takes no port.
    """
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    if "RANK" not in os.environ:
        os.environ |= ALONE
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(timeout=timeout, **options)


def set_timeouts(timeout: timedelta) -> None:
    """Sets the timeout of every process group of this rank, if there are any.

    The groups of a mesh would otherwise have torch's default of 30 minutes.
    """
    if not dist.is_initialized():
        return
    set_timeout: Any = getattr(dist, "set_timeout", None)  # torch from 2.14
    if set_timeout is None:
        set_timeout = dist.distributed_c10d._set_pg_timeout
    for group in dist.distributed_c10d._world.pg_map:
        set_timeout(timeout, group)


@contextmanager
def use_deterministic_kernels(*, on: bool) -> Iterator[None]:
    """Makes torch use only deterministic kernels in this block: same inputs, same bits.

    Changes nothing if `on` is false.

    Raises:
        UserError: If an operation in the block has no deterministic kernel.
    """
    if not on:
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()  # by a block around this one
    torch.use_deterministic_algorithms(True)
    # torch would also fill each new tensor, which costs time; all of ours are written before they
    # are read.
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
        torch.use_deterministic_algorithms(was_on)


def describe_machine(sharding: Sharding, *, with_liger: bool = False) -> MachineFacts:
    """Describes this rank's machine for the rules, before it joins the others.

    `with_liger`: whether to import Liger, which is slow.
    """
    device = _choose_device(sharding)
    if device.type == "cpu":
        return MachineFacts(device="cpu", system=sys.platform, has_compiler=has_compiler())
    families = None
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


def _choose_device(sharding: Sharding) -> torch.device:
    """Returns this rank's GPU, after making it torch's current device, or else the CPU.

    Raises `UserError` if this node has fewer GPUs than ranks.
    """
    if sharding.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {os.environ.get('RANK', 0)} is the {local_rank + 1}th on this machine, which "
            f"has {torch.cuda.device_count()} GPUs; launch one process for each GPU "
            "(--num_processes)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _use_own_cores(device: torch.device, sharding: Sharding) -> None:
    """Undoes the OMP_NUM_THREADS=1 of a launcher, if the CPU has work to do.

    This is so for the one process that a bare `accelerate launch` starts on a CPU, and for GPU runs
    that offload to the CPU. OMP_NUM_THREADS=1 stays if the launcher got it from the user.
    """
    is_bare_launch = "LOCAL_RANK" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    cpu_has_work = is_bare_launch if device.type == "cpu" else sharding.cpu_offload
    if cpu_has_work and os.environ.get("OMP_NUM_THREADS") == "1" and not _launcher_has_threads():
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, count_cores() // local_ranks))


def _launcher_has_threads() -> bool:
    """Returns whether the parent process has OMP_NUM_THREADS in its environment.

    False if that environment cannot be read.
    """
    try:
        return "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return False


def this_process() -> Process:
    """Describes this process, so that other ranks of its node can find it."""
    return os.uname().nodename, os.getpid(), psutil.Process().create_time()


def watch_peers(rank: int, processes: Sequence[Process], timeout_seconds: float) -> threading.Event:
    """Starts a thread that ends this process if another rank of this node has died.

    A rank that this process cannot see (another host, another container) is not watched. Without
    any rank to watch, no thread starts.

    Args:
        rank: This process's rank.
        processes: `this_process()` of every rank, in order of rank.
        timeout_seconds: From the death until this process ends.

    Returns:
        An event; set it to stop the thread.
    """
    own_host = os.uname().nodename
    peers = {}
    for peer, (host, process, created) in enumerate(processes):
        if peer != rank and host == own_host and is_alive(process, created):
            peers[peer] = (process, created)
    left = threading.Event()
    if peers:
        arguments = (rank, peers, timeout_seconds, left)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="watch_peers").start()
    return left


def is_alive(process: int, created: float) -> bool:
    """Returns whether the process with this id and creation time still runs.

    Another process may have the id by now, hence the time. A zombie does not run: it has ended, and
    waits for its parent.
    """
    try:
        candidate = psutil.Process(process)
        is_same = candidate.create_time() == created
        return bool(is_same and candidate.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _watch(
    rank: int, peers: Mapping[int, tuple[int, float]], timeout_seconds: float, left: threading.Event
) -> None:
    """Waits until a peer has died, and ends this process `timeout_seconds` later.

    Returns without an effect as soon as `left` is set.

    Args:
        rank: This process's rank.
        peers: Rank -> (process id, creation time).
        timeout_seconds: From a death until this process ends.
        left: Set when this process leaves the world.
    """
    while not left.wait(POLL_SECONDS):
        dead = [peer for peer, process in peers.items() if not is_alive(*process)]
        if dead and not left.wait(timeout_seconds):
            sys.stderr.write(
                f"rank {rank}: rank {dead[0]} ended {timeout_seconds:g} s ago (timeout_seconds), "
                "and the run cannot continue without it; that rank's own error is the cause. "
                "Where this one was:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_FAULT)


def make_accelerator(sharding: Sharding, device: torch.device) -> Accelerator:
    """Builds Accelerate's Accelerator for this layout, with our mesh.

    Call it after the process group, if there is one, is initialized. It removes Accelerate's
    variables from the environment.
    """
    # Accelerate would fill fields of its FSDP plugin from these variables; `sharding` holds what
    # they say.
    for name in list(os.environ):
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_")):
            del os.environ[name]
    on_cpu = device.type == "cpu"
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=on_cpu)
    if on_cpu and sharding.is_fsdp:
        # Accelerate uses FSDP only for a distributed type of GPUs or the like; for MULTI_CPU it
        # would use DDP.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        PartialState._shared_state["device"] = device
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=sharding.mixed_precision,
        fsdp_plugin=_fsdp_plugin(sharding) if sharding.is_fsdp else None,
    )
    # Accelerate cannot make this mesh: it refuses tensor parallelism without another dimension, and
    # its sequence parallelism is DeepSpeed's.
    mesh = make_mesh(sharding, device.type)
    if mesh is not None:
        accelerator.state.device_mesh = mesh
        accelerator.state.parallelism_config = _MeshOfFsdp(sharding)
    return accelerator


class _MeshOfFsdp(ParallelismConfig):  # type: ignore[misc]
    """Accelerate's description of our mesh: the dimensions over which FSDP replicates and shards.

    FSDP replicates over none if there is one replica.
    """

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.is_replicated = (sharding.replicate_size or 1) > 1

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that FSDP gets."""
        return [REPLICATE, FSDP] if self.is_replicated else [FSDP]


def _fsdp_plugin(sharding: Sharding) -> Any:
    """Makes Accelerate's FSDP plugin.

    Sets every field that Accelerate would otherwise fill from environment variables.
    """
    cpu_offload: Any = sharding.cpu_offload
    if sharding.layout == "fsdp2":
        options: dict[str, Any] = {
            "fsdp_version": 2,
            "reshard_after_forward": sharding.strategy != "SHARD_GRAD_OP",
        }
        if sharding.cpu_offload:
            cpu_offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    else:
        options = {
            "fsdp_version": 1,
            "use_orig_params": True,
            "sync_module_states": False,
            "forward_prefetch": sharding.forward_prefetch,
        }
    return FullyShardedDataParallelPlugin(
        cpu_offload=cpu_offload,
        # SIZE_BASED_WRAP also wraps by class here: `find_wrap_classes` finds the large classes.
        auto_wrap_policy="no_wrap" if sharding.wrapping == "NO_WRAP" else "transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,  # the model's own is used: see models/decoder_layers.py
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=_precision_policy(sharding),
        **options,
    )


def _precision_policy(sharding: Sharding) -> Any:
    """Makes FSDP's mixed-precision policy; None without mixed precision.

    It computes in bf16 or fp16, reduces gradients in fp32, and leaves outputs in their dtype.
    Accelerate's own policy would round the loss to bf16.
    """
    if sharding.mixed_precision == "no":
        return None
    dtype = getattr(torch, COMPUTE_DTYPE[sharding.mixed_precision])
    if sharding.layout == "fsdp2":
        return MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None
        )
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def make_mesh(sharding: Sharding, device_type: str) -> DeviceMesh | None:
    """Makes the mesh of all ranks, over which FSDP2 replicates and shards. All ranks call it.

    Returns None if one dimension is enough: the layout is not FSDP2, or it only shards.
    """
    sizes = sharding.mesh_sizes
    stages = sharding.pipeline_parallel_size
    if stages > 1:
        stage_size = dist.get_world_size() // stages
        if sizes is None:
            replicas = tensors = 1
        else:
            replicas, _, _, tensors = sizes.values()
        # stages are the outermost dimension: they have the least traffic between them
        shape = (stages, replicas, stage_size // (replicas * tensors), tensors)
        names = (PIPELINE, REPLICATE, FSDP, TENSOR)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        mesh[REPLICATE, FSDP, TENSOR]._flatten(STAGE)
        return mesh
    if sizes is None or all(size == 1 for key, size in sizes.items() if key != "dp_shard_size"):
        return None
    replicas, shards, sequences, tensors = sizes.values()
    return init_device_mesh(
        device_type,
        (replicas, shards * sequences, tensors),
        mesh_dim_names=(REPLICATE, FSDP, TENSOR),
    )


def make_sequence_group(sharding: Sharding, ranks: int, device_type: str) -> ProcessGroup | None:
    """Makes the group of ranks that divide the tokens of a row with this one.

    All ranks call it. Returns None without sequence parallelism: each rank then has whole rows.
    `ranks` is the number of all ranks.
    """
    sequences = sharding.sequence_parallel_size
    if sequences == 1:
        return None
    tensors = sharding.tensor_parallel_size
    sizes = (ranks // (sequences * tensors), sequences, tensors)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=(BATCH, SEQUENCE, TENSOR))
    return mesh.get_group(SEQUENCE)


def make_expert_mesh(sharding: Sharding, ranks: int, device_type: str) -> DeviceMesh:
    """Makes the mesh over which the experts of a mixture are divided.

    The ranks of dimension EXPERT divide the experts of a layer among them. FSDP shards each expert
    over EXPERT_SHARD, the ranks of a replica that have the same experts. All ranks call it; `ranks`
    is the number of all ranks.
    """
    stages = sharding.pipeline_parallel_size
    replicas = sharding.replicate_size or 1
    owners = sharding.expert_parallel_size  # the number of ranks that divide a layer's experts
    shape = (stages, replicas, ranks // (stages * replicas * owners), owners)
    mesh = init_device_mesh(
        device_type, shape, mesh_dim_names=(PIPELINE, REPLICATE, EXPERT_SHARD, EXPERT)
    )
    # The ranks of a replica as one dimension: a norm is then one sum over them, and the same on
    # each of them.
    mesh[EXPERT_SHARD, EXPERT]._flatten()
    return mesh
