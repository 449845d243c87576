"""Pipeline parallelism: the layers of a model over groups of ranks, one after another, by torch's
own schedules.

Every rank has the whole model, but parameters only of its own layers. Stand-ins take the places of
other ranks' layers and hand on the hidden states, so that each family is computed by transformers'
own forward, whatever it does before and after its layers.

A forward without gradients (evaluation, the reference of preferences, generation) crosses all ranks
of a pipeline, which call it together, and returns the same on each of them. A step with gradients
runs by a schedule of `torch.distributed.pipelining`: 1F1B (Narayanan et al. 2019,
arXiv:1806.03377), or interleaved, with several chunks on each rank (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2). A chunk is a group of neighboring layers. Of n ranks, rank r has the
chunks r, r + n, and so on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
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

from finetune.config.layout import UNTRAINED_STAGE, choose_order, split_layers
from finetune.constants import COMPUTE_DTYPE, Record
from finetune.distributed.model_parts import head_of, local_part, trunk_of
from finetune.distributed.world import PIPELINE, World, gather_json
from finetune.errors import UserError

ATTRIBUTE = "layers_of_pipeline"  # of a transformers model


def find_pipeline(model: Any) -> "Pipeline | None":
    """The pipeline of an unwrapped transformers model; None where each rank has all layers."""
    return getattr(model, ATTRIBUTE, None)


def keep_own_layers(model: Any, layers: Sequence[nn.Module], world: World) -> None:
    """Leaves in `model`, which is on meta, only the parameters that this rank computes with.

    All ranks call it.

    Args:
        model: With adapters, before FSDP shards it.
        layers: Its decoder layers.
        world: The ranks and their layout.

    Raises:
        UserError: On all ranks, if one of them would hold no trained parameter.
    """
    if world.stages == 1:
        return
    setattr(model, ATTRIBUTE, Pipeline(model, layers, world))
    if world.any(not any(parameter.requires_grad for parameter in model.parameters())):
        raise UserError(UNTRAINED_STAGE.format(world.stages))


class Pipeline:
    """The chunks of one model that this rank computes, and its exchange with the ranks before and
    after it.
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
        # the chunk that a schedule computes; None in a forward over all ranks
        self._chunk: int | None = None
        self._received: Tensor | None = None  # that chunk's input; None for the first one
        # `share`'s key -> the names and shapes of its values
        self._shapes: dict[str, list[dict[str, list[int]]]] = {}
        self._schedule: Any = None
        self._micro_batches = 0  # of the schedule
        self._capacity = 0  # of its buffers, in numbers
        # of the step that runs: computes the micro-batch of an index; (rows, tokens) of each
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
        self.copied = self._drop_ends(model)  # names of parameters that the first rank has as well
        self._layer_lists = self._replace_layers(layers, parts)  # of each chunk

    def _drop_ends(self, model: Any) -> frozenset[str]:
        """Drops embedding, last norm and head on ranks that do not compute them.

        Returns the names of this rank's parameters that the first rank has as well.
        """
        embedding = self._embedding
        head = self._head
        is_last = self.rank == self.size - 1
        is_copy = embedding.weight is head.weight and is_last
        copied = set()
        for name, parameter in model.named_parameters():
            if is_copy and parameter is embedding.weight:
                copied.add(name)
        for part in self._trunk.children():
            is_norm = not isinstance(part, nn.ModuleList | type(embedding))
            if is_norm and any(True for _ in part.parameters()):
                part.forward = partial(self._compute_norm, part.forward)
                if not is_last:
                    _drop_parameters(part)
        head.forward = partial(self._compute_head, head.forward)
        if not is_last:
            _drop_parameters(head)
        if self.rank > 0:
            embedding.forward = self._stand_in_for_embeddings
            if not is_copy:
                _drop_parameters(embedding)
            embedding._forward_pre_hooks.clear()  # tensor parallelism's, of the weight
            embedding._forward_hooks.clear()
        return frozenset(copied)

    def _replace_layers(
        self, layers: Sequence[nn.Module], parts: Sequence[range]
    ) -> dict[int, nn.ModuleList]:
        """Puts a stand-in in the place of each layer of another rank.

        `parts`: the layers of each chunk. Returns, for each chunk of this rank, the model's list of
        layers with stand-ins for all others.
        """
        self._name = next(
            name
            for name, part in self._trunk.named_children()
            if layers[0] in list(part.children())
        )
        own = set(chain.from_iterable(parts[chunk] for chunk in self._chunks))
        crossing = list(layers)
        for index in range(len(layers)):
            if index not in own:
                is_after = index - 1 in own
                is_before = index + 1 in own
                crossing[index] = _Elsewhere(self, index, sends=is_after, receives=is_before)
        self._trunk._modules[self._name] = nn.ModuleList(crossing)
        by_chunk = {}
        for chunk in self._chunks:
            of_chunk = list(layers)
            for index in range(len(layers)):
                if index not in parts[chunk]:
                    is_before = index + 1 == parts[chunk].start
                    of_chunk[index] = _Elsewhere(self, index, receives=is_before)
            by_chunk[chunk] = nn.ModuleList(of_chunk)
        return by_chunk

    # A forward over all ranks

    def _stand_in_for_embeddings(self, ids: Tensor) -> Tensor:
        """Zeros of the shape of embeddings: a rank that is not the first receives hidden states."""
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)

    def cross(self, hidden: Tensor, *, sends: bool, receives: bool) -> Tensor:
        """Returns the output of another rank's layer; `hidden` if no layer here reads it.

        Args:
            hidden: [rows, tokens, hidden].
            sends: Whether the layer follows this rank's, and is sent `hidden`.
            receives: Whether the layer is the last before this rank's.
        """
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
        """The norm on the last rank, at the end of the last chunk; elsewhere the identity."""
        is_here = self.rank == self.size - 1 and self._chunk in (None, self._last_chunk)
        return norm(hidden) if is_here else hidden

    def _compute_head(
        self, head: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The head of the last chunk; in a forward over all ranks they share its output."""
        if self._chunk == self._last_chunk:
            return head(hidden, *args, **kwargs)
        if self._chunk is not None:
            return hidden
        outputs = []
        if self.rank == self.size - 1:
            outputs.append({"": head(hidden, *args, **kwargs)})
        return self.share(outputs)[0][""]

    def share(
        self, values: Sequence[Mapping[str, Tensor]], key: str | None = None
    ) -> list[dict[str, Tensor]]:
        """Returns the last rank's `values`, on every rank of the pipeline, as fp32.

        `key`: names and shapes are exchanged once for a key; None: each time.
        """
        shapes = None if key is None else self._shapes.get(key)
        if shapes is None:
            own = [
                {name: list(value.shape) for name, value in by_name.items()} for by_name in values
            ]
            shapes = gather_json(own, self.group, self.device)[-1]
            if key is not None:
                self._shapes[key] = shapes
        sizes = [prod(shape) for by_name in shapes for shape in by_name.values()]
        if self.rank == self.size - 1:
            tensors = chain.from_iterable(by_name.values() for by_name in values)
            flat = torch.cat([value.float().flatten() for value in tensors])
        else:
            flat = torch.empty(sum(sizes), device=self.device)
        dist.broadcast(flat, self._last_rank, self.group)
        parts = iter(torch.split(flat, sizes))
        return [
            {name: next(parts).view(shape) for name, shape in by_name.items()} for by_name in shapes
        ]

    # A step by a schedule

    def run(
        self,
        sizes: Sequence[tuple[int, int]],
        measure: Callable[[int], Tensor],
        forward: Callable[[int], Tensor],
        auxiliary: Callable[[], Tensor] | None = None,
    ) -> None:
        """Runs forward and backward of the micro-batches of a step by the schedule. All ranks call
        it.

        Args:
            sizes: (rows, tokens) of each micro-batch.
            measure: Runs the model over the micro-batch of an index, for the last chunk. Returns
                the loss, 0-dim.
            forward: The same for the other chunks. Returns hidden states, [rows, tokens, hidden].
            auxiliary: Returns the loss of the experts in the latest forward; None without experts.
        """

        def compute(index: int) -> Tensor:
            if self._chunk == self._last_chunk:
                return measure(index)
            hidden = forward(index)
            if auxiliary is None:
                return hidden
            with_loss: Tensor = _AddedLoss.apply(hidden, auxiliary())  # type: ignore[no-untyped-call]
            return with_loss

        self._compute = compute
        self._sizes = sizes
        numbers = max(rows * tokens for rows, tokens in sizes) * self._width
        if self._micro_batches != len(sizes) or self._capacity < numbers:
            # Another schedule makes all ranks exchange messages: one of the same number of
            # micro-batches is made only for a micro-batch that is larger than all before it.
            self._micro_batches = len(sizes)
            self._capacity = numbers
            self._schedule = self._make_schedule()
        indices = torch.arange(len(sizes))
        first = (indices,) if 0 in self._chunks else ()
        target = indices if self._last_chunk in self._chunks else None
        try:
            self._schedule.step(*first, index=indices, target=target, return_outputs=False)
        except RuntimeError as error:  # the schedule's, around the error of a forward
            if isinstance(error.__cause__, UserError | torch.OutOfMemoryError):
                raise error.__cause__ from None
            raise

    def _make_schedule(self) -> Any:
        """Makes torch's schedule of `_micro_batches`, with buffers of `_capacity` numbers.

        Its tensors between stages are [1, capacity]. The first stage reads indices of micro-batches
        in place of rows; the last one returns losses.
        """
        micro_batches = self._micro_batches
        state = torch.empty(1, self._capacity, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        order = choose_order(micro_batches, self.size, self._last_chunk + 1)
        stage_class: Any = _Stage if order == "1f1b" else PipelineStage
        stages = [
            stage_class(
                _Chunk(partial(self._compute_chunk, chunk)),
                chunk,
                self._last_chunk + 1,
                self.device,
                input_args=index if chunk == 0 else state,
                output_args=loss if chunk == self._last_chunk else state,
                group=self.group,
            )
            for chunk in self._chunks
        ]
        options: Record = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if order == "1f1b":
            return Schedule1F1B(stages[0], micro_batches, **options)
        if order == "gpipe":
            return ScheduleGPipe(stages[0], micro_batches, **options)
        if order == "interleaved":
            return ScheduleInterleaved1F1B(stages, micro_batches, **options)
        return ScheduleLoopedBFS(stages, micro_batches, **options)

    def _compute_chunk(self, chunk: int, received: tuple[Tensor, ...], index: int) -> Tensor:
        """Computes a chunk over the micro-batch of an index.

        Returns the loss of the last chunk; of others the hidden states, padded to [1, capacity].
        """
        rows, tokens = self._sizes[index]
        numbers = rows * tokens * self._width
        hidden = None
        if chunk > 0:
            hidden = received[0][0, :numbers].view(rows, tokens, self._width)
        with self._computing(chunk, hidden):
            result = self._compute(index)
        if chunk == self._last_chunk:
            return result
        return F.pad(result.to(self._dtype).flatten(), (0, self._capacity - numbers))[None]

    @contextmanager
    def _computing(self, chunk: int, hidden: Tensor | None) -> Iterator[None]:
        """In this block a forward of the model computes `chunk`, whose input is `hidden`."""
        crossing = self._trunk._modules[self._name]
        self._chunk = chunk
        self._received = hidden
        self._trunk._modules[self._name] = self._layer_lists[chunk]
        try:
            yield
        finally:
            self._chunk = None
            self._received = None
            self._trunk._modules[self._name] = crossing

    def sum_copied_gradients(self) -> None:
        """Sums the gradients of a tied weight on the first and the last rank.

        All ranks call it, once an update.
        """
        if not self._has_copies or 0 < self.rank < self.size - 1:
            return
        own = local_part(self._embedding.weight.grad)
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
    """The identity on hidden states, whose backward is also that of `loss`, which no later chunk
    reads.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_outputs[0], torch.ones((), device=grad_outputs[0].device)


class _Stage(PipelineStage):
    """torch's stage, but with as many buffers as 1F1B fills at once, in place of one for each
    micro-batch.
    """

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
    """A chunk as a module, which torch's schedules need.

    It has no parameters: the schedule would reduce their gradients, as FSDP does already.
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
        if cache is None:  # its name up to transformers 5.23
            cache = past_key_values
        if cache is not None:
            # generation asks the cache of any layer how many tokens it holds
            nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 0)
            cache.update(nothing, nothing, self._index)
        return self._pipeline.cross(hidden, sends=self._sends, receives=self._receives)


def _count_multiplied(module: nn.Module) -> int:
    """Counts the numbers of a module that are multiplied, quantized or not, without adapters'."""
    count = 0
    for name, part in module.named_modules():
        if ".lora_" in name:  # few
            continue
        full_shape = getattr(part, "full_shape", None)
        if isinstance(full_shape, tuple):  # of a quantized weight
            count += prod(full_shape)
        count += sum(p.numel() for p in part.parameters(recurse=False) if p.dim() > 1)
    return count


def _drop_parameters(module: nn.Module) -> None:
    """Drops the parameters of a module that another rank computes, and the hooks that read them."""
    for part in module.modules():
        part._parameters.clear()
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
