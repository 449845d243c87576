"""Pipeline parallelism: each rank computes some of the layers and passes hidden states on.

Every rank has all modules of the model, but parameters only for its own layers. Stand-ins replace
the layers of other ranks and pass on the hidden states. So transformers' own forward computes each
model family, with all that it does before and after the layers.

A forward without gradients (evaluation, the reference of preferences, generation) crosses all ranks
of a pipeline. They call it together, and it returns the same on each of them. A step with gradients
runs by a schedule of `torch.distributed.pipelining`: 1F1B (Narayanan et al. 2019,
arXiv:1806.03377), or interleaved, with several chunks on each rank (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2); some numbers of micro-batches need others (`choose_order`). A chunk
is a group of neighboring layers. With n ranks in a pipeline, rank r has the chunks r, r + n, and so
on.
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
from finetune.constants import COMPUTE_DTYPE
from finetune.distributed.model_parts import head_of, local_part, trunk_of
from finetune.distributed.world import PIPELINE, World, gather_json
from finetune.errors import UserError

ATTRIBUTE = "layers_of_pipeline"  # the attribute of a transformers model that holds its `Pipeline`


def find_pipeline(model: Any) -> "Pipeline | None":
    """Returns the pipeline of an unwrapped transformers model; None if each rank has all layers."""
    return getattr(model, ATTRIBUTE, None)


def keep_own_layers(model: Any, layers: Sequence[nn.Module], world: World) -> None:
    """Removes the parameters of other ranks' layers from `model`, and gives it a `Pipeline`.

    All ranks call it. Does nothing without pipeline parallelism.

    Args:
        model: On meta, with its adapters, before FSDP shards it.
        layers: The decoder layers of `model`.
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
    """Computes this rank's chunks of a model, and exchanges hidden states with the other ranks.

    `run` computes a step with gradients. Without gradients, the model's own forward works, through
    the stand-ins and hooks that the constructor puts in.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], world: World) -> None:
        assert world.mesh is not None
        self.group = world.mesh[PIPELINE].get_group()
        self.device = world.device
        self.rank = self.group.rank()
        self.size = self.group.size()
        ranks = dist.get_process_group_ranks(self.group)  # their numbers in the whole world
        self._previous_rank = ranks[self.rank - 1]
        self._next_rank = ranks[(self.rank + 1) % self.size]
        self._first_rank = ranks[0]
        self._last_rank = ranks[-1]
        self._trunk = trunk_of(model)
        self._head = head_of(model)
        self._embedding = model.get_input_embeddings()
        costs = [_count_matrix_numbers(layer) for layer in layers]
        costs[-1] += _count_matrix_numbers(self._head)
        layers_by_chunk = split_layers(costs, world.sharding.pipeline_chunks)
        chunk_count = len(layers_by_chunk)
        self._chunks = [chunk for chunk in range(chunk_count) if chunk % self.size == self.rank]
        self._last_chunk = chunk_count - 1
        # the chunk that a schedule computes now; None in a forward over all ranks
        self._chunk: int | None = None
        self._received: Tensor | None = None  # the input of `_chunk`; None for the first chunk
        # a key of `share` -> names and shapes of the values under that key
        self._shapes: dict[str, list[dict[str, list[int]]]] = {}
        self._schedule: Any = None
        self._micro_batches = 0  # the number of micro-batches of `_schedule`
        self._capacity = 0  # numbers (not bytes) in a buffer of `_schedule`
        # the current step: index of a micro-batch -> output of the chunk that computes now
        self._compute: Callable[[int], Tensor] = lambda _: torch.zeros(())
        self._sizes: Sequence[tuple[int, int]] = ()  # (rows, tokens) of each micro-batch

        weight = self._embedding.weight
        precision = world.sharding.mixed_precision
        if precision == "no":
            self._dtype = weight.dtype
        else:
            self._dtype = getattr(torch, COMPUTE_DTYPE[precision])
        self._width = weight.shape[1]
        # A tied weight is on the first and the last rank, which sum its gradients.
        self._has_copies = weight is self._head.weight and weight.requires_grad
        # names of this rank's parameters that the first rank has as well
        self.copied = self._drop_ends(model)
        # chunk -> the trunk's list of layers while that chunk is computed
        self._layer_lists = self._replace_layers(layers, layers_by_chunk)

    def _drop_ends(self, model: Any) -> frozenset[str]:
        """Drops the parameters of embedding, last norm and head on ranks that do not compute them.

        Replaces the forwards of norm and head on all ranks, and that of the embedding on all but
        the first: the new forwards compute only on the right rank, in the right chunk. Returns the
        names of this rank's parameters that the first rank has as well: a tied embedding's on the
        last rank, else none.
        """
        embedding = self._embedding
        head = self._head
        is_last = self.rank == self.size - 1
        has_copy = embedding.weight is head.weight and is_last
        copied = set()
        for name, parameter in model.named_parameters():
            if has_copy and parameter is embedding.weight:
                copied.add(name)
        for part in self._trunk.children():
            # the trunk has layers, embedding, last norm, and modules without parameters (rotary)
            is_other = not isinstance(part, nn.ModuleList | type(embedding))
            if is_other and any(True for _ in part.parameters()):
                part.forward = partial(self._compute_norm, part.forward)
                if not is_last:
                    _drop_parameters(part)
        head.forward = partial(self._compute_head, head.forward)
        if not is_last:
            _drop_parameters(head)
        if self.rank > 0:
            embedding.forward = self._stand_in_for_embeddings
            if not has_copy:
                _drop_parameters(embedding)
            # tensor parallelism's hooks, which belong to a look-up in the weight
            embedding._forward_pre_hooks.clear()
            embedding._forward_hooks.clear()
        return frozenset(copied)

    def _replace_layers(
        self, layers: Sequence[nn.Module], layers_by_chunk: Sequence[range]
    ) -> dict[int, nn.ModuleList]:
        """Replaces each layer of another rank by a stand-in, for forwards over all ranks.

        Args:
            layers: All decoder layers.
            layers_by_chunk: The indices of the layers of each chunk.

        Returns:
            For each chunk of this rank, a list of layers to compute that chunk alone: stand-ins
            replace all other layers, this rank's other chunks included.
        """
        self._layers_name = next(
            name
            for name, part in self._trunk.named_children()
            if layers[0] in list(part.children())
        )
        own = set(chain.from_iterable(layers_by_chunk[chunk] for chunk in self._chunks))
        crossing = list(layers)
        for index in range(len(layers)):
            if index not in own:
                follows_own = index - 1 in own
                precedes_own = index + 1 in own
                crossing[index] = _Elsewhere(self, index, sends=follows_own, receives=precedes_own)
        self._trunk._modules[self._layers_name] = nn.ModuleList(crossing)
        layer_lists = {}
        for chunk in self._chunks:
            chunk_alone = list(layers)
            for index in range(len(layers)):
                if index not in layers_by_chunk[chunk]:
                    precedes_chunk = index + 1 == layers_by_chunk[chunk].start
                    chunk_alone[index] = _Elsewhere(self, index, receives=precedes_chunk)
            layer_lists[chunk] = nn.ModuleList(chunk_alone)
        return layer_lists

    # A forward over all ranks

    def _stand_in_for_embeddings(self, ids: Tensor) -> Tensor:
        """Returns zeros in the shape of embeddings, [rows, tokens, hidden].

        It is the embedding's forward on all ranks but the first, which receive hidden states later.
        """
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)

    def cross(self, hidden: Tensor, *, sends: bool, receives: bool) -> Tensor:
        """Does the work of a stand-in: returns the output of another rank's layer.

        If no layer of this rank reads that output, it is not fetched, and `hidden` is returned.
        While a schedule computes a chunk, nothing is sent: the schedule has received the input.

        Args:
            hidden: [rows, tokens, hidden].
            sends: Whether the layer follows a layer of this rank, and thus needs `hidden`.
            receives: Whether the layer precedes a layer of this rank.
        """
        if self._chunk is not None:
            if receives and self._received is not None:
                return self._received
            return hidden
        assert not torch.is_grad_enabled(), "with gradients, layers run by a schedule"
        if sends:
            dist.send(hidden.contiguous(), self._next_rank, self.group)
        if receives:
            hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            dist.recv(hidden, self._previous_rank, self.group)
        return hidden

    def _compute_norm(self, norm: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """Applies the last norm, on the last rank and there in the last chunk.

        It is the identity on other ranks and in other chunks.
        """
        is_here = self.rank == self.size - 1 and self._chunk in (None, self._last_chunk)
        return norm(hidden) if is_here else hidden

    def _compute_head(
        self, head: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Applies the output head, on the last rank.

        In a schedule, chunks before the last return `hidden`. In a forward over all ranks, every
        rank returns the last rank's output.
        """
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
        """Returns the last rank's `values` on every rank of the pipeline, as fp32.

        All ranks of the pipeline call it. `values` of other ranks are ignored. Names and shapes
        must be the same for each call with the same `key`, and are exchanged in the first of these
        calls; without a `key`, they are exchanged in every call.
        """
        shapes = None if key is None else self._shapes.get(key)
        if shapes is None:
            own_shapes = [
                {name: list(value.shape) for name, value in by_name.items()} for by_name in values
            ]
            shapes = gather_json(own_shapes, self.group, self.device)[-1]  # the last rank's
            if key is not None:
                self._shapes[key] = shapes
        sizes = [prod(shape) for by_name in shapes for shape in by_name.values()]
        if self.rank == self.size - 1:
            tensors = chain.from_iterable(by_name.values() for by_name in values)
            flat = torch.cat([value.float().flatten() for value in tensors])
        else:
            flat = torch.empty(sum(sizes), device=self.device)
        dist.broadcast(flat, self._last_rank, self.group)
        flat_values = iter(torch.split(flat, sizes))
        return [
            {name: next(flat_values).view(shape) for name, shape in by_name.items()}
            for by_name in shapes
        ]

    # A step by a schedule

    def run(
        self,
        sizes: Sequence[tuple[int, int]],
        measure: Callable[[int], Tensor],
        forward: Callable[[int], Tensor],
        auxiliary: Callable[[], Tensor] | None = None,
    ) -> None:
        """Runs forward and backward of a step's micro-batches by a schedule. All ranks call it.

        Args:
            sizes: (rows, tokens) of each micro-batch.
            measure: Index of a micro-batch -> its loss, 0-dim. Called for the last chunk.
            forward: Index of a micro-batch -> hidden states, [rows, tokens, hidden]. Called for the
                other chunks.
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
            # A new schedule makes all ranks exchange messages. So the old one is used as long as
            # the number of micro-batches stays, and its buffers are large enough.
            self._micro_batches = len(sizes)
            self._capacity = numbers
            self._schedule = self._make_schedule()
        # The schedule splits these indices into micro-batches, in place of rows of tokens.
        indices = torch.arange(len(sizes))
        first_input = (indices,) if 0 in self._chunks else ()
        target = indices if self._last_chunk in self._chunks else None
        try:
            self._schedule.step(*first_input, index=indices, target=target, return_outputs=False)
        except RuntimeError as error:  # the schedule wraps an error of a forward in this
            if isinstance(error.__cause__, UserError | torch.OutOfMemoryError):
                raise error.__cause__ from None
            raise

    def _make_schedule(self) -> Any:
        """Makes torch's schedule for `_micro_batches` micro-batches. What torch calls a stage is a
        chunk of this file.

        Its tensors between stages are [1, `_capacity`]: hidden states, flat and padded. The first
        stage reads the index of a micro-batch in place of rows; the last stage returns the loss.
        """
        micro_batches = self._micro_batches
        hidden = torch.empty(
            1, self._capacity, dtype=self._dtype, device="meta", requires_grad=True
        )
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
                input_args=index if chunk == 0 else hidden,
                output_args=loss if chunk == self._last_chunk else hidden,
                group=self.group,
            )
            for chunk in self._chunks
        ]
        # The last chunk's output is already the loss, divided by the count of the whole step: torch
        # must not divide the gradients by the number of micro-batches.
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if order == "1f1b":
            return Schedule1F1B(stages[0], micro_batches, **options)
        if order == "gpipe":
            return ScheduleGPipe(stages[0], micro_batches, **options)
        if order == "interleaved":
            return ScheduleInterleaved1F1B(stages, micro_batches, **options)
        return ScheduleLoopedBFS(stages, micro_batches, **options)

    def _compute_chunk(self, chunk: int, received: tuple[Tensor, ...], index: int) -> Tensor:
        """Computes a chunk for the micro-batch `index`.

        Args:
            chunk: One of this rank's chunks.
            received: For the first chunk an index; else one tensor of hidden states, [1, capacity].
            index: Of the micro-batch in the step.

        Returns:
            The last chunk's loss, 0-dim; else the hidden states, flat and padded: [1, capacity].
        """
        rows, tokens = self._sizes[index]
        numbers = rows * tokens * self._width
        hidden = None
        if chunk > 0:
            (padded,) = received
            hidden = padded[0, :numbers].view(rows, tokens, self._width)
        with self._computing(chunk, hidden):
            result = self._compute(index)
        if chunk == self._last_chunk:
            return result
        return F.pad(result.to(self._dtype).flatten(), (0, self._capacity - numbers))[None]

    @contextmanager
    def _computing(self, chunk: int, hidden: Tensor | None) -> Iterator[None]:
        """Makes a forward of the model compute `chunk` alone in this block, from `hidden`.

        `hidden` is None for the first chunk, which starts from tokens.
        """
        crossing = self._trunk._modules[self._layers_name]
        self._chunk = chunk
        self._received = hidden
        self._trunk._modules[self._layers_name] = self._layer_lists[chunk]
        try:
            yield
        finally:
            self._chunk = None
            self._received = None
            self._trunk._modules[self._layers_name] = crossing

    def sum_copied_gradients(self) -> None:
        """Sums the gradients of a tied weight over the first and the last rank of the pipeline.

        All ranks call it, once for each update. Does nothing without a trained tied weight.
        """
        is_between = 0 < self.rank < self.size - 1
        if not self._has_copies or is_between:
            return
        gradient = local_part(self._embedding.weight.grad)
        sent = gradient.to(self.device).contiguous()
        received = torch.empty_like(sent)
        peer = self._last_rank if self.rank == 0 else self._first_rank
        operations = [
            dist.P2POp(dist.isend, sent, peer, self.group),
            dist.P2POp(dist.irecv, received, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(received)


class _AddedLoss(torch.autograd.Function):
    """Returns hidden states unchanged, and gives `loss` a gradient of 1 in the backward.

    So the backward of a chunk is also that of `loss`, which is not sent to the next chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_outputs[0], torch.ones((), device=grad_outputs[0].device)


class _Stage(PipelineStage):
    """torch's stage with fewer buffers: as many as 1F1B fills at once.

    torch makes a buffer for each micro-batch.
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        # 1F1B has at most one micro-batch in flight for each stage from here to the last.
        buffers = min(num_microbatches, self.num_stages - self.stage_index)
        super()._setup_forward_recv_info(buffers, has_backward)
        self.args_recv_info |= {
            index: self.args_recv_info[index % buffers]
            for index in range(buffers, num_microbatches)
        }

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)  # sets `chunks` to 1 too
        self.chunks = num_microbatches
        self.grad_recv_info |= dict.fromkeys(range(1, num_microbatches), self.grad_recv_info[0])


class _Chunk(nn.Module):
    """A chunk as a module, since torch's schedules need modules.

    It has no parameters, because the schedule would reduce their gradients, and FSDP does so
    already.
    """

    def __init__(self, compute: Callable[[tuple[Tensor, ...], int], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        return self._compute(received, int(index))


class _Elsewhere(nn.Module):
    """Stands in for a decoder layer that another rank or chunk computes. See `Pipeline.cross`."""

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
        if cache is None:  # transformers up to 5.23 calls it past_key_values
            cache = past_key_values
        if cache is not None:
            # Generation may ask any layer's cache how many tokens it holds. So this layer's cache
            # gets the right number of tokens, [rows, heads, tokens, head size], of head size 0.
            rows, tokens, _ = hidden.shape
            empty_states = hidden.new_zeros(rows, 1, tokens, 0)
            cache.update(empty_states, empty_states, self._index)
        return self._pipeline.cross(hidden, sends=self._sends, receives=self._receives)


def _count_matrix_numbers(module: nn.Module) -> int:
    """Counts the numbers in the matrices of a module, quantized or not, without adapters.

    It is the cost of computing the module, by which layers are split into chunks.
    """
    count = 0
    for name, part in module.named_modules():
        if "lora_" in name:  # an adapter, as the plan's `layer_costs` has none
            continue
        full_shape = getattr(part, "full_shape", None)
        if isinstance(full_shape, tuple):  # a quantized weight, whose codes have one dimension
            count += prod(full_shape)
        count += sum(p.numel() for p in part.parameters(recurse=False) if p.dim() > 1)
    return count


def _drop_parameters(module: nn.Module) -> None:
    """Drops the parameters of a module that another rank computes, and the module's hooks.

    The hooks read the parameters.
    """
    for part in module.modules():
        part._parameters.clear()
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
