"""Process groups of one process for fake_steps.py: it is the first of many ranks, and their collectives exchange nothing.

For a process of its own, as fake_cuda.py: what it replaces in torch stays replaced.
"""

import os
from collections.abc import Callable
from typing import Any

import torch._dynamo.config
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # the shapes of collectives of fake tensors
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init as fully_shard
from torch.distributed.pipelining import _utils, schedules
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.distributed import join as mesh
from finetune.distributed import model_parts, pipeline


def join_ranks(size: int, rank: int = 0) -> None:
    """Joins a world as `rank` of `size` ranks of a node, of which there are no others."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def pretend_groups() -> None:
    """Makes groups and meshes of them work among fake tensors."""
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (
        None if tensor.device.type == "cpu" else all_reduce(tensor, *a, **k)
    )
    make_mesh = _with_real_tensors(device_mesh.init_device_mesh)
    device_mesh.init_device_mesh = fully_shard.init_device_mesh = mesh.init_device_mesh = make_mesh
    # Ranks exchange once which stages know their shapes, and which numbers the last one measures.
    schedules._PipelineSchedule._warmup_p2p = _know_shapes  # type: ignore[method-assign]
    pipeline.gather_json = lambda own, *_: [own or [{"": []}]] * 2
    torch.cuda.get_rng_state = lambda *_: torch.empty(0)
    torch.cuda.set_rng_state = lambda *_: None
    for name in ("__init__", "__getitem__", "_flatten", "_concatenate"):
        setattr(DeviceMesh, name, _with_real_tensors(getattr(DeviceMesh, name)))
    find_slices = _with_real_tensors(model_parts.compute_local_shape_and_global_offset)
    model_parts.compute_local_shape_and_global_offset = find_slices
    distributed._verify_param_shape_across_processes = distributed._sync_module_states = (
        lambda *_, **__: None
    )
    construct = _with_python_reducer(distributed.DistributedDataParallel.__init__)
    distributed.DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]


def _know_shapes(_schedule: Any, stages: list[Any], *_: Any) -> None:
    for stage in stages:
        stage._inference_mode = _utils.InferenceMode.STATIC  # torch 2.11 has no such question


def _with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with real tensors, whose values it needs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _with_python_reducer(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor of DDP, whose reducer in C++, which reads addresses, is replaced by torch's own in Python."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            init(self, *args, **kwargs)
        self._force_to_disable_cpp_reducer = True

    return construct
