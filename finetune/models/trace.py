"""Counts the bytes that a model's forward and backward hold, by running the model's own code over
tensors that have shapes and no values.

The plan uses it for models that its formulas do not know. It counts the bytes of the tensors that
autograd saves, and of those that exist at the same time, for rows of two or three lengths. To these
counts it fits a polynomial of the length: some bytes grow with the tokens, some with their square.
Everything runs as on a CPU, except attention, which saves what a GPU's kernel saves: its inputs,
its output and the log-sum-exp.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from finetune.config.facts import count_chosen
from finetune.config.families import find_family
from finetune.config.schema import Lora
from finetune.constants import FP32
from finetune.distributed.model_parts import language_model_of, other_parts, trunk_of
from finetune.errors import on_one_line
from finetune.models.attention import NAME
from finetune.models.documents import install_attention
from finetune.models.experts import (
    GROUPED,
    multiply_by_factors,
    register_grouped,
    set_experts_implementation,
)
from finetune.models.fused_lora import fuse_adapters
from finetune.models.gating import install_gating
from finetune.models.lora import add_adapters
from finetune.models.outline import build_class, list_layers

# The lengths of the traced rows, in units. A row of one unit would be a single chunk, which some
# layers compute in another way than several. The third length is needed only for the square.
LENGTHS = (2, 3, 4)
MOST_LAYERS = 4  # of a model whose layers are all traced
UNIT = 64  # tokens; the smallest chunk of linear attention and state spaces
LARGEST_UNIT = 512  # tokens
STEPPED_UNIT = 8  # tokens, for layers that compute one token after the other in a loop
KERNEL = "traced_kernel"  # the name of `_attend_as_a_kernel` among transformers' attentions
# attributes of modules that hold a layer's place in the model
PLACES = ("layer_idx", "layer_id", "layer_number", "block_idx")


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes for a document of n tokens: linear * n + square * n * n."""

    linear: float = 0.0
    square: float = 0.0

    def per_token(self, length: int) -> float:
        """Bytes per token of a document of `length` tokens."""
        return self.linear + self.square * length

    @classmethod
    def fit(cls, unit: int, measured: Sequence[float]) -> "Growth":
        """Fits a polynomial of the length to measured bytes, and drops its constant.

        Args:
            unit: The number of tokens in a unit of LENGTHS.
            measured: The bytes at the first two of LENGTHS, for a line, or at all three.

        >>> Growth.fit(2, [10 + 2 * n + 3 * n * n for n in (4, 6, 8)]), Growth.fit(2, [18, 22])
        (Growth(linear=2.0, square=3.0), Growth(linear=2.0, square=0.0))
        """
        first, second = measured[:2]
        square = 0.0
        if len(measured) == len(LENGTHS):
            third = measured[2]
            square = (third - 2 * second + first) / (2 * unit * unit)
        # The lengths m and n are a unit apart: n * n - m * m = (m + n) * unit.
        slope_of_square = (LENGTHS[0] + LENGTHS[1]) * unit * square
        return cls((second - first) / unit - slope_of_square, square)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The bytes that one decoder layer holds."""

    saved: Growth  # from the layer's forward to its backward
    working: Growth  # the peak during its backward, in addition to `saved`
    forward: Growth  # the peak during a forward without gradients


@dataclass(frozen=True, slots=True)
class Trace:
    """The bytes that a model without its head holds. Returned by `trace_model`."""

    layers: tuple[LayerTrace, ...] = ()  # of every layer; () after a failure
    rest: Growth = Growth()  # saved outside the layers: token ids, rotary embedding, final norm
    failure: str | None = None  # why the model could not be traced

    def layer_bytes(self, part: Literal["saved", "working", "forward"], length: int) -> list[int]:
        """Returns the bytes of each layer per token, for a document of `length` tokens."""
        return [max(0, round(getattr(layer, part).per_token(length))) for layer in self.layers]

    def largest(self, part: Literal["saved", "working", "forward"], length: int) -> int:
        """Returns the largest of `layer_bytes`; 0 if the model could not be traced."""
        return max(self.layer_bytes(part, length), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The settings of a forward that decide what it saves."""

    itemsize: int  # bytes of a number in the compute dtype
    autocast: bool = False  # whether parameters are in fp32, and cast for each product
    lora: Lora | None = None  # None: full fine-tuning
    cpu: bool = False  # whether attention runs as on a CPU: by document, in fp32
    attention: str = "auto"  # as `install_attention` takes it

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return torch.bfloat16 if self.itemsize == 2 else torch.float32


def trace_model(config: Mapping[str, Any], how: Forward) -> Trace:
    """Traces the model of a config.json.

    Of equal layers it traces one. Where that fails, because layers need the results of others as in
    Gemma 4, it traces all. If that fails too, `failure` of the result says why.
    """
    failure = ""
    for skips_equal in (True, False):
        try:
            with _silent():
                return _trace(config, how, skips_equal)
        except Exception as error:  # a family's own code may need values, and fail in any way
            failure = on_one_line(error)
    return Trace(failure=failure)


@contextmanager
def _silent() -> Iterator[None]:
    """Silences transformers and torch in this block.

    Their warnings of missing kernels are about the trace, and not about the run.
    """
    loggers = [
        logging.getLogger(name) for name in ("transformers", "torch._subclasses.fake_tensor")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _trace(config: Mapping[str, Any], how: Forward, skips_equal: bool) -> Trace:
    """Traces the model's layers.

    skips_equal: Whether of equal layers only the first is traced, and the others do not run.
    """
    model = build_class(config, "config.json")
    layers = list_layers(model)
    if not skips_equal and len(layers) > MOST_LAYERS:
        raise RuntimeError("its layers need what other layers compute")
    # For each layer, the place of the layer whose trace it gets.
    if skips_equal:
        kinds = [_describe_layer(layer) for layer in layers]
        places = [kinds.index(kind) for kind in kinds]
    else:
        places = list(range(len(layers)))
    skipped = [layer for place, layer in enumerate(layers) if place not in places]
    _clear([*other_parts(model), *skipped])
    _prepare_for_training(model, how)
    trunk = trunk_of(model).train()
    unit = _find_unit(trunk)
    forwards = {place: layers[place].forward for place in set(places)}
    # Under a GPU's kernel no bytes grow with the square of the tokens: two lengths are enough.
    lengths = LENGTHS[:2] if trunk.config._attn_implementation == KERNEL else LENGTHS
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Without threads of its own, autograd runs backwards in this thread, where the modes apply.
    with mode, torch.autograd.set_multithreading_enabled(False):
        _make_fake(model, mode)
        rows = [_trace_row(trunk, layers, forwards, unit * length, how) for length in lengths]
    traced = {place: _fit_layer(unit, rows, place) for place in forwards}
    rest = Growth.fit(unit, [row.rest for row in rows])
    return Trace(tuple(traced[place] for place in places), rest)


def _clear(modules: Sequence[nn.Module]) -> None:
    """Removes the parameters and submodules of `modules`, which the trace does not run."""
    for module in modules:
        module._modules.clear()
        module._parameters.clear()


def _describe_layer(layer: nn.Module) -> Any:
    """Returns the shapes of a layer's parameters and the settings of its modules.

    Two layers that are equal in these hold the same bytes.
    """
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    settings = set()
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | str | float) and name not in PLACES:
                settings.add((path, type(module).__name__, name, value))
    return shapes, frozenset(settings)


def _prepare_for_training(model: Any, how: Forward) -> None:
    """Changes the model on the meta device as loading for training does (models/load.py).

    Unless `how.cpu` is set, this project's attention becomes `_attend_as_a_kernel`.
    """
    from transformers import AttentionInterface

    register_grouped()
    set_experts_implementation(model, GROUPED)
    install_attention(model, how.attention)
    install_gating(model)
    if not how.cpu and trunk_of(model).config._attn_implementation == NAME:
        AttentionInterface.register(KERNEL, _attend_as_a_kernel)
        language_model_of(model).set_attn_implementation(KERNEL)
    model.to(torch.float32 if how.autocast else how.dtype)
    if how.lora is None:
        return
    add_adapters(model, how.lora, how.dtype)
    if not (how.lora.lora_dropout or how.lora.use_dora):
        fuse_adapters(model)
    if not how.autocast:
        # In a run the adapters are in fp32, but mixed precision computes with them in this dtype.
        model.to(how.dtype)
    multiply_by_factors(model)


class _Kernel(torch.autograd.Function):
    """Allocates the tensors of a GPU's attention kernel, and saves those that the kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        out = query.new_empty((rows, heads, tokens, value.shape[3]))
        log_sums = query.new_empty((rows, heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend_as_a_kernel(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_options: Any
) -> tuple[Tensor, None]:
    """Stands in for transformers' attention function.

    Query, key and value are [rows, heads, tokens, size], the output [rows, tokens, heads, size].
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    else:
        dtype = value.dtype
    is_by_document = dtype.itemsize >= FP32  # by `_attend_by_sdpa`; the outputs are concatenated
    repeats = query.shape[1] // key.shape[1]
    if is_by_document and repeats > 1:
        key, value = [states.repeat_interleave(repeats, dim=1) for states in (key, value)]
    out: Tensor = _Kernel.apply(*(states.to(dtype) for states in (query, key, value)))  # type: ignore[no-untyped-call]
    out = out.transpose(1, 2)
    return out.contiguous() if is_by_document else out, None


def _find_unit(trunk: Any) -> int:
    """Finds the number of tokens in a unit of LENGTHS.

    A unit has at least one chunk of the layers that compute in chunks. No matrix of the model may
    have as many rows as the activations of a traced row, because `_Live` would take such
    activations for parameters.
    """
    keys = trunk.config.to_dict()
    recurrence = find_family(trunk.config.model_type).recurrence
    if recurrence is not None and recurrence.steps_through_tokens:
        least = STEPPED_UNIT
    else:
        least = UNIT
    chunks = [size for name, size in keys.items() if "chunk_size" in name and isinstance(size, int)]
    smallest = max([least, *(size for size in chunks if size <= LARGEST_UNIT)])
    matrix_rows = {parameter.shape[0] for parameter in trunk.parameters() if parameter.dim() == 2}
    # An expert layer computes each token once for each of the experts chosen for it.
    repeats = (1, max(1, count_chosen(keys)))
    activation_rows = [length * repeat for length in LENGTHS for repeat in repeats]  # in units
    return next(
        unit
        for unit in count(smallest, 2 * smallest)
        if not matrix_rows.intersection(unit * rows for rows in activation_rows)
    )


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Turns the parameters and buffers of `model` into fake tensors on the CPU.

    A tied parameter stays tied.
    """

    def make_fake(tensor: Tensor) -> Tensor:
        return mode.fake_tensor_converter.from_meta_and_device(
            mode, tensor.to("meta"), torch.device("cpu")
        )

    fakes: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        fake_data = make_fake(parameter.data)
        fakes[parameter] = nn.Parameter(fake_data, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, own_parameter in module._parameters.items():
            module._parameters[name] = None if own_parameter is None else fakes[own_parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else make_fake(buffer)


@dataclass(slots=True)
class _Row:
    """The bytes of one traced row, as in `LayerTrace` and `Trace`."""

    # place of a traced layer -> bytes
    saved: dict[int, int] = field(default_factory=dict)
    working: dict[int, int] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)
    rest: int = 0


def _fit_layer(unit: int, rows: Sequence[_Row], place: int) -> LayerTrace:
    """Fits how the bytes of the layer at `place` grow with the tokens of a row.

    Args:
        unit: The number of tokens in a unit of LENGTHS.
        rows: One row for each of the traced LENGTHS, in their order.
        place: The place of a traced layer.
    """
    return LayerTrace(
        saved=Growth.fit(unit, [row.saved[place] for row in rows]),
        working=Growth.fit(unit, [row.working[place] for row in rows]),
        forward=Growth.fit(unit, [row.forward[place] for row in rows]),
    )


def _trace_row(
    trunk: Any,
    layers: Sequence[nn.Module],
    forwards: Mapping[int, Callable[..., Any]],
    tokens: int,
    how: Forward,
) -> _Row:
    """Traces one row with a single document of `tokens` tokens.

    Each traced layer runs forward, backward, and forward again without gradients.

    Args:
        trunk: The model without its head, of fake tensors.
        layers: All of its layers, whose forwards are replaced.
        forwards: The own forward of each layer to trace, by the layer's place.
        tokens: The number of tokens.
        how: The settings of the forward.
    """
    row = _Row()
    live = _Live(trunk)
    rest = _Saved(live)

    def trace_layer(place: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaf = hidden.detach().requires_grad_()
        args, kwargs = tree_map_only(Tensor, _detach, (args, kwargs))
        saved = _Saved(live, rest, (args, kwargs), _detach_shared(kwargs))
        with saved.count():
            out = forwards[place](leaf, *args, **kwargs)
        row.saved[place] = saved.bytes
        result = next(
            each for each in _tensors(out) if each.requires_grad and each.shape == hidden.shape
        )
        row.working[place] = live.measure_peak(
            lambda: torch.autograd.backward(result, torch.empty_like(result))
        )
        outputs = list[Any]()  # the lambda puts the layer's output here
        with torch.no_grad():
            row.forward[place] = live.measure_peak(
                lambda: outputs.append(forwards[place](hidden, *args, **kwargs))
            )
        output = outputs.pop()
        # In a run, parameters before the final norm are trained. So the final norm saves its input,
        # which it would not do of an output without gradients.
        next(each for each in _tensors(output) if each.shape == hidden.shape).requires_grad_()
        return output

    def skip(hidden: Tensor, *_: Any, **__: Any) -> Any:
        return hidden

    for place, layer in enumerate(layers):
        if place in forwards:
            layer.forward = partial(trace_layer, place)
        else:
            layer.forward = skip
    with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast), live, rest.count():
        ids = torch.zeros(1, tokens, dtype=torch.long)
        positions = torch.arange(tokens)[None]
        boundaries = torch.tensor([0, tokens], dtype=torch.int32)
        lengths: dict[str, Any] = {
            "cu_seq_lens": boundaries,
            "max_document_length": tokens,
            "packed_lengths": (tokens,),
        }
        if how.attention == "sdpa":  # a row of several documents has a mask, which layers save
            lengths["attention_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
        trunk(input_ids=ids, position_ids=positions, use_cache=False, **lengths)
    row.rest = rest.bytes
    return row


def _detach(tensor: Tensor) -> Tensor:
    """Detaches a tensor from its graph, so that the backward of a layer stays within the layer.

    The result requires a gradient if the tensor does.
    """
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _detach_shared(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Detaches the tensors that layers pass on in a mapping (Gemma 4's keys and values).

    It puts the detached tensors into the mapping, and returns them.
    """
    shared = list[Tensor]()
    for mapping in kwargs.values():
        if isinstance(mapping, MutableMapping):
            for name, value in mapping.items():
                detached = tree_map_only(Tensor, _detach, value)
                mapping[name] = detached
                shared += _tensors(detached)
    return shared


def _tensors(tree: Any) -> list[Tensor]:
    """Lists the tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    """Returns a key of the tensor's memory, which is unique while the memory exists."""
    return int(tensor.untyped_storage()._cdata)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that exist, from when operators return them until they are
    freed.

    It leaves out parameters and buffers, and tensors of a parameter's shape: the latter are taken
    for gradients and casts of parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameter_shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        # keys of the memory that is left out
        self.of_parameters = {_key(each) for each in (*module.parameters(), *module.buffers())}
        self._sizes: dict[int, int] = {}  # key -> bytes
        self._now = 0  # bytes
        self._peak = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # torch can fake this operator only in bfloat16
            left, right, *others = args
            matrices = (left.to(torch.bfloat16), right.to(torch.bfloat16))
            out = operator(*matrices, *others, **(kwargs or {})).to(torch.float32)
        else:
            out = operator(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._add(tensor)
        return out

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Calls `run`, and returns the peak of the bytes during the call less the bytes before."""
        before = self._now
        self._peak = before
        run()
        return self._peak - before

    def _add(self, tensor: Tensor) -> None:
        """Counts a tensor's memory, if it is new, until it is freed."""
        storage = tensor.untyped_storage()
        key = _key(tensor)
        if key in self._sizes or key in self.of_parameters:
            return
        if tuple(tensor.shape) in self._parameter_shapes:
            self.of_parameters.add(key)
            weakref.finalize(storage, self.of_parameters.discard, key)
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


class _Saved:
    """Counts the bytes that autograd saves in a layer, or in the model outside its layers.

    Memory that several tensors share counts once, and memory of parameters not at all.
    """

    def __init__(
        self,
        live: _Live,
        rest: "_Saved | None" = None,
        arguments: Any = (),
        of_other_layers: Sequence[Tensor] = (),
    ) -> None:
        """Starts with no bytes.

        Args:
            live: Knows which memory is left out as that of parameters.
            rest: Of a layer: counts the layer's arguments instead, because all layers share them.
                None for the model.
            arguments: The layer's arguments besides its input, in a nested structure.
            of_other_layers: Tensors that another layer made, which count there.
        """
        self._live = live
        self._rest = rest
        self._arguments = {_key(tensor) for tensor in _tensors(arguments)}
        self._of_other_layers = {_key(tensor) for tensor in of_other_layers}
        self._sizes: dict[int, int] = {}  # key of the memory -> bytes

    @property
    def bytes(self) -> int:
        """The bytes that were saved so far."""
        return sum(self._sizes.values())

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts what forwards in this block save."""
        with torch.autograd.graph.saved_tensors_hooks(self._add, lambda tensor: tensor):
            yield

    def _add(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves, and returns it for autograd to keep."""
        key = _key(tensor)
        if key in self._live.of_parameters or key in self._of_other_layers:
            return tensor
        if self._rest is not None and key in self._arguments:
            counter = self._rest
        else:
            counter = self
        counter._sizes[key] = tensor.untyped_storage().nbytes()
        return tensor
