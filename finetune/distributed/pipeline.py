"""Pipeline parallelism: the layers of a model over groups of ranks, one after another, by torch's
own schedules.

Every rank has the whole model, but parameters only of its own layers. A layer of another rank hands
on what it gets, so that each family is computed by transformers' own forward, whatever it does
before and after its layers.

A forward without gradients (evaluation, the reference of preferences, generation) crosses all ranks
of a pipeline, which call it together, and returns the same on each of them. A step with gradients
runs by a schedule of `torch.distributed.pipelining`: 1F1B (Narayanan et al. 2019,
arXiv:1806.03377), or interleaved, with several groups of layers on each rank (Narayanan et al.
2021, arXiv:2104.04473, section 2.2).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor

from finetune.config.layout import split_layers
from finetune.constants import COMPUTE_DTYPE
from finetune.distributed.model_parts import head_of, trunk_of
from finetune.distributed.world import PIPELINE, World, gather_json
from finetune.errors import UserError

ATTRIBUTE = "layers_of_pipeline"  # of a transformers model


def find_pipeline(model: Any) -> "Pipeline | None":
    """The pipeline of an unwrapped transformers model; None where each rank has all layers."""
    return getattr(model, ATTRIBUTE, None)


def keep_own_layers(model: Any, layers: Sequence[nn.Module], world: World) -> None:
    """Leaves `model`, which is on meta, only the parameters that this rank computes with.

    All ranks call it.

    Args:
        model: With adapters, before FSDP shards it.
        layers: Its decoder layers.
        world: The ranks and their layout.

    Raises:
        UserError: On all ranks, where one of them would hold nothing that is trained.
    """
    if world.stages == 1:
        return
    setattr(model, ATTRIBUTE, Pipeline(model, layers, world))
    if world.any(not any(parameter.requires_grad for parameter in model.parameters())):
        raise UserError(
            f"pipeline_parallel_size: {world.stages}: a rank would hold no parameter that is "
            "trained; choose a smaller size, or train more layers"
        )


class Pipeline:
    """The layers of one model that this rank computes, and its way to the ranks before and after
    it.

    A chunk is a group of neighboring layers. Of n ranks, rank r has the chunks r, r + n, and so on.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], world: World) -> None:
        assert world.mesh is not None
        self.group = world.mesh[PIPELINE].get_group()
        self.device = world.device
        self.rank = self.group.rank()
        self.size = self.group.size()
        ranks = dist.get_process_group_ranks(self.group)
        self._before = ranks[self.rank - 1]
        self._after = ranks[(self.rank + 1) % self.size]
        self._first_rank = ranks[0]
        self._last_rank = ranks[-1]
        self._trunk = trunk_of(model)
        self._head = head_of(model)
        self._embedding = model.get_input_embeddings()
        costs = [_count_multiplied(layer) for layer in layers]
        costs[-1] += _count_multiplied(self._head)
        parts = split_layers(costs, world.sharding.pipeline_chunks)
        self._chunks = [chunk for chunk in range(len(parts)) if chunk % self.size == self.rank]
        self._last_chunk = len(parts) - 1
        self._chunk: int | None = None  # that a schedule computes; None: a forward over all ranks
        self._received: Tensor | None = None  # what enters that chunk
        # of what `share` was given under each key
        self._shapes: dict[str, list[dict[str, list[int]]]] = {}
        self._schedule: tuple[tuple[int, int], Any] | None = None
        self._compute: Callable[[int], Tensor] = lambda _: torch.zeros(())
        self._sizes: Sequence[tuple[int, int]] = ()

        weight = self._embedding.weight
        precision = world.sharding.mixed_precision
        if precision == "no":
            self._dtype = weight.dtype
        else:
            self._dtype = getattr(torch, COMPUTE_DTYPE[precision])
        self._width = weight.shape[1]
        # Tied weights are on the first and the last rank, which sum their gradients.
        self._has_copies = weight is self._head.weight and weight.requires_grad
        self.copied = self._drop_ends(model)
        self._lists = self._replace_layers(layers, parts)

    def _drop_ends(self, model: Any) -> frozenset[str]:
        """Drops embedding, last norm and head where they are not computed.

        Returns the names of this rank's parameters that the first rank has as well.
        """
        embedding = self._embedding
        head = self._head
        is_last = self.rank == self.size - 1
        is_copy = embedding.weight is head.weight and is_last
        names = frozenset(
            name for name, p in model.named_parameters() if p is embedding.weight and is_copy
        )
        ends = [
            part
            for part in self._trunk.children()
            if not isinstance(part, nn.ModuleList | type(embedding))
        ]
        for norm in (part for part in ends if any(True for _ in part.parameters())):
            norm.forward = partial(self._compute_norm, norm.forward)
            if not is_last:
                _drop_parameters(norm)
        head.forward = partial(self._compute_head, head.forward)
        if not is_last:
            _drop_parameters(head)
        if self.rank > 0:
            embedding.forward = self._stand_in_for_embeddings
            if not is_copy:
                _drop_parameters(embedding)
            embedding._forward_pre_hooks.clear()  # tensor parallelism's, of the weight
            embedding._forward_hooks.clear()
        return names

    def _replace_layers(
        self, layers: Sequence[nn.Module], parts: Sequence[range]
    ) -> dict[int, nn.ModuleList]:
        """Puts a stand-in for each layer of another rank; returns each chunk's layers, with
        stand-ins for others.
        """
        name = next(
            name
            for name, part in self._trunk.named_children()
            if layers[0] in list(part.children())
        )
        own = {index for chunk in self._chunks for index in parts[chunk]}
        crossing = [
            layer
            if index in own
            else _Elsewhere(self, index, sends=index - 1 in own, receives=index + 1 in own)
            for index, layer in enumerate(layers)
        ]
        self._name = name
        self._trunk._modules[name] = nn.ModuleList(crossing)
        return {
            chunk: nn.ModuleList(
                layer
                if index in parts[chunk]
                else _Elsewhere(self, index, receives=index + 1 == parts[chunk].start)
                for index, layer in enumerate(layers)
            )
            for chunk in self._chunks
        }

    # A forward over all ranks

    def _stand_in_for_embeddings(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)

    def cross(self, hidden: Tensor, *, sends: bool, receives: bool) -> Tensor:
        """Returns the output of another rank's layer, whose input is `hidden`."""
        if self._chunk is not None:
            if receives and self._received is not None:
                return self._received
            return hidden
        assert not torch.is_grad_enabled(), "with gradients, layers run by a schedule"
        if sends:
            dist.send(hidden.contiguous(), self._after, self.group)
        if receives:
            hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            dist.recv(hidden, self._before, self.group)
        return hidden

    def _compute_norm(self, norm: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        is_here = self.rank == self.size - 1 and self._chunk in (None, self._last_chunk)
        return norm(hidden) if is_here else hidden

    def _compute_head(
        self, head: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._chunk is not None:
            if self._chunk == self._last_chunk:
                return head(hidden, *args, **kwargs)
            return hidden
        is_last = self.rank == self.size - 1
        return self.share([{"": head(hidden, *args, **kwargs)}] if is_last else [])[0][""]

    def share(
        self, values: Sequence[Mapping[str, Tensor]], key: str | None = None
    ) -> list[dict[str, Tensor]]:
        """The last rank's `values`, on every rank of the pipeline, as fp32.

        key: Under it names and shapes are asked for once; None: each time.
        """
        shapes = self._shapes.get(key or "")
        if key is None or shapes is None:
            own = [{name: list(value.shape) for name, value in each.items()} for each in values]
            shapes = self._shapes[key or ""] = gather_json(own, self.group, self.device)[-1]
        sizes = [prod(shape) for each in shapes for shape in each.values()]
        if self.rank == self.size - 1:
            flat = torch.cat(
                [value.float().flatten() for each in values for value in each.values()]
            )
        else:
            flat = torch.empty(sum(sizes), device=self.device)
        dist.broadcast(flat, self._last_rank, self.group)
        parts = iter(torch.split(flat, sizes))
        return [{name: next(parts).view(shape) for name, shape in each.items()} for each in shapes]

    # A step by a schedule

    def run(
        self,
        sizes: Sequence[tuple[int, int]],
        measure: Callable[[int], Tensor],
        forward: Callable[[int], Tensor],
        auxiliary: Callable[[], Tensor] | None = None,
    ) -> None:
        """Forward and backward of the micro-batches of a step, by the schedule. All ranks call it.

        Args:
            sizes: Rows and tokens of each micro-batch.
            measure: Runs the model over the micro-batch of an index, for the last chunk. Returns
                the loss, 0-dim.
            forward: The same for the other chunks. Returns what they hand on, [rows, tokens,
                hidden].
            auxiliary: The loss of the experts in the latest forward, if there are any.
        """

        def compute(index: int) -> Tensor:
            if self._chunk == self._last_chunk:
                return measure(index)
            hidden = forward(index)
            return hidden if auxiliary is None else _AddedLoss.apply(hidden, auxiliary())  # type: ignore[no-untyped-call]

        self._compute = compute
        self._sizes = sizes
        capacity = max(rows * tokens for rows, tokens in sizes) * self._width
        if (
            self._schedule is None
            or self._schedule[0][0] != len(sizes)
            or self._schedule[0][1] < capacity
        ):
            # Buffers have one size, for which the largest so far is taken: to make them again takes
            # messages.
            self._schedule = (len(sizes), capacity), self._make_schedule(len(sizes), capacity)
        indices = torch.arange(len(sizes))
        first = (indices,) if 0 in self._chunks else ()
        target = indices if self._last_chunk in self._chunks else None
        try:
            self._schedule[1].step(*first, index=indices, target=target, return_outputs=False)
        except RuntimeError as error:  # the schedule's own, around what a forward has raised
            if isinstance(error.__cause__, UserError | torch.OutOfMemoryError):
                raise error.__cause__ from None
            raise

    def _make_schedule(self, micro_batches: int, capacity: int) -> Any:
        state = torch.empty(1, capacity, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        is_plain = len(self._chunks) == 1 and micro_batches >= self.size
        stages: list[Any] = [
            (_Stage if is_plain else PipelineStage)(
                _Chunk(partial(self._compute_chunk, chunk, capacity)),
                chunk,
                self._last_chunk + 1,
                self.device,
                input_args=index if chunk == 0 else state,
                output_args=loss if chunk == self._last_chunk else state,
                group=self.group,
            )
            for chunk in self._chunks
        ]
        keys: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if len(stages) == 1:
            return (Schedule1F1B if is_plain else ScheduleGPipe)(stages[0], micro_batches, **keys)
        fits = micro_batches % max(1, micro_batches // self.size) == 0
        return (ScheduleInterleaved1F1B if fits else ScheduleLoopedBFS)(
            stages, micro_batches, **keys
        )

    def _compute_chunk(
        self, chunk: int, capacity: int, received: tuple[Tensor, ...], index: int
    ) -> Tensor:
        rows, tokens = self._sizes[index]
        numbers = rows * tokens * self._width
        if chunk == 0:
            hidden = None
        else:
            hidden = received[0][0, :numbers].view(rows, tokens, self._width)
        with self._computing(chunk, hidden):
            result = self._compute(index)
        if chunk == self._last_chunk:
            return result
        return F.pad(result.to(self._dtype).flatten(), (0, capacity - numbers))[None]

    @contextmanager
    def _computing(self, chunk: int, hidden: Tensor | None) -> Iterator[None]:
        over_all = self._trunk._modules[self._name]
        self._chunk = chunk
        self._received = hidden
        self._trunk._modules[self._name] = self._lists[chunk]
        try:
            yield
        finally:
            self._chunk = None
            self._received = None
            self._trunk._modules[self._name] = over_all

    def sum_copied_gradients(self) -> None:
        """Sums the gradients of a tied weight on the first and the last rank.

        All ranks call it, once an update.
        """
        if not self._has_copies or 0 < self.rank < self.size - 1:
            return
        gradient: Any = self._embedding.weight.grad
        if isinstance(gradient, DTensor):
            own = gradient.to_local()
        else:
            own = gradient
        sent = own.to(self.device).contiguous()
        other = torch.empty_like(sent)
        peer = self._last_rank if self.rank == 0 else self._first_rank
        operations = [
            dist.P2POp(dist.isend, sent, peer, self.group),
            dist.P2POp(dist.irecv, other, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        own.add_(other)


class _AddedLoss(torch.autograd.Function):
    """The identity on hidden states, whose backward is that of a loss beside theirs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_outputs[0], torch.ones((), device=grad_outputs[0].device)


class _Stage(PipelineStage):
    """torch's, with as many buffers as 1F1B fills at once, instead of one for each micro-batch."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        used = min(num_microbatches, self.num_stages - self.stage_index)
        super()._setup_forward_recv_info(used, has_backward)
        self.args_recv_info |= {
            index: self.args_recv_info[index % used] for index in range(used, num_microbatches)
        }

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info |= dict.fromkeys(range(1, num_microbatches), self.grad_recv_info[0])


class _Chunk(nn.Module):
    """A chunk, as torch's schedules want it: a module.

    It has no parameters, which FSDP reduces by itself.
    """

    def __init__(self, compute: Callable[[tuple[Tensor, ...], int], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        return self._compute(received, int(index))


class _Elsewhere(nn.Module):
    """Stands in for a decoder layer that another rank computes."""

    def __init__(
        self, pipeline: Pipeline, index: int, *, sends: bool = False, receives: bool = False
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._index = index
        self._sends = sends
        self._receives = receives

    def forward(
        self,
        hidden: Tensor,
        *args: Any,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        # generation asks the cache of any layer how many tokens it holds
        cache = (
            past_key_values if cache is None else cache
        )  # transformers up to 5.23, and from 5.24
        if cache is not None:
            nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 0)
            cache.update(nothing, nothing, self._index)
        return self._pipeline.cross(hidden, sends=self._sends, receives=self._receives)


def _count_multiplied(module: nn.Module) -> int:
    """The numbers of a module in matrix products, quantized or not, without those of adapters,
    which are few.
    """
    parts = {name: part for name, part in module.named_modules() if ".lora_" not in name}
    quantized = [
        part.full_shape
        for part in parts.values()
        if isinstance(getattr(part, "full_shape", None), tuple)
    ]
    plain = [
        p.shape for part in parts.values() for p in part.parameters(recurse=False) if p.dim() > 1
    ]
    return sum(map(prod, (*quantized, *plain)))


def _drop_parameters(module: nn.Module) -> None:
    for part in module.modules():
        part._parameters.clear()
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
