"""Counts the bytes that a model's forward and backward hold, by running its own code over tensors
with shapes and without values.

The plan uses it for models that its formulas do not know. It counts the tensors that autograd
saves, and those that exist at the same time, for rows of a few lengths. Through these it fits a
polynomial of the length: some bytes grow with the tokens, some with their square. Everything runs
as on a CPU, except for a GPU's attention: its kernel keeps its inputs, its output and the
log-sum-exp.
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

# The lengths of the traced rows, in units. One unit would be a single chunk, which some layers
# compute in another way than several. Only growth with the square needs the third length.
LENGTHS = (2, 3, 4)
MOST_LAYERS = 4  # that are traced one by one
UNIT = 64  # tokens; the smallest chunk of linear attention and state spaces
LARGEST_UNIT = 512  # tokens
STEPPED_UNIT = 8  # tokens, for layers that compute one token after the other in a loop
KERNEL = "traced_kernel"  # the name of our stand-in among transformers' attention functions
PLACES = ("layer_idx", "layer_id", "layer_number", "block_idx")  # attributes with a layer's place


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that grow with the tokens of a document, and with their square."""

    linear: float = 0.0
    square: float = 0.0

    def per_token(self, length: int) -> float:
        """Bytes per token of a document of `length` tokens."""
        return self.linear + self.square * length

    @classmethod
    def fit(cls, unit: int, measured: Sequence[float]) -> "Growth":
        """Fits the polynomial through measured bytes, and drops its constant.

        Args:
            unit: Tokens.
            measured: The bytes at the first two or at all three LENGTHS times `unit`.

        >>> Growth.fit(2, [10 + 2 * n + 3 * n * n for n in (4, 6, 8)]), Growth.fit(2, [18, 22])
        (Growth(linear=2.0, square=3.0), Growth(linear=2.0, square=0.0))
        """
        first, second, *others = measured
        square = sum(third - 2 * second + first for third in others) / (2 * unit * unit)
        return cls((second - first) / unit - (LENGTHS[0] + LENGTHS[1]) * unit * square, square)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The bytes that one decoder layer holds."""

    saved: Growth  # from its forward to its backward
    working: Growth  # during its backward, in addition
    forward: Growth  # during a forward that saves nothing


@dataclass(frozen=True, slots=True)
class Trace:
    """The bytes that a model without its head holds. Returned by `trace_model`."""

    layers: tuple[LayerTrace, ...] = ()
    rest: Growth = Growth()  # saved outside the layers: token ids, rotary embedding, final norm
    failure: str | None = None  # why the model could not be traced

    def layer_bytes(self, part: Literal["saved", "working", "forward"], length: int) -> list[int]:
        """Each layer's bytes per token of a document of `length` tokens."""
        return [max(0, round(getattr(layer, part).per_token(length))) for layer in self.layers]

    def largest(self, part: Literal["saved", "working", "forward"], length: int) -> int:
        """The largest of `layer_bytes`; 0 where the model could not be traced."""
        return max(self.layer_bytes(part, length), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The settings of a forward that decide what it saves."""

    itemsize: int  # bytes of the compute dtype
    autocast: bool = False
    lora: Lora | None = None
    cpu: bool = False  # whether attention runs as on a CPU: by document, in fp32

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products."""
        return torch.bfloat16 if self.itemsize == 2 else torch.float32


def trace_model(config: Mapping[str, Any], how: Forward) -> Trace:
    """Traces a layer of each kind of the model of a config.json.

    Traces all layers where some need the results of others, as in Gemma 4.
    """
    failure = ""
    for skips in (True, False):
        try:
            with _silent():
                return _trace(config, how, skips)
        except Exception as error:  # a family's own code may need values, and fail in any way
            failure = on_one_line(error)
    return Trace(failure=failure)


@contextmanager
def _silent() -> Iterator[None]:
    """Silences libraries in this block: their warnings of missing kernels are about the trace."""
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


def _trace(config: Mapping[str, Any], how: Forward, skips: bool) -> Trace:
    """Traces the model's layers.

    skips: Whether of equal layers only the first is traced, and the others are left out.
    """
    model = build_class(config, "config.json")
    layers = list_layers(model)
    if not skips and len(layers) > MOST_LAYERS:
        raise RuntimeError("its layers need what other layers compute")
    if skips:
        kinds = [_describe(layer) for layer in layers]
        places = [kinds.index(kind) for kind in kinds]  # by layer: the place of the traced one
    else:
        places = list(range(len(layers)))
    skipped = [layer for place, layer in enumerate(layers) if place not in places]
    _empty([*other_parts(model), *skipped])
    _prepare(model, how)
    trunk = trunk_of(model).train()
    unit = _find_unit(trunk)
    forwards = {place: layers[place].forward for place in set(places)}
    lengths = LENGTHS[:2] if trunk.config._attn_implementation == KERNEL else LENGTHS
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Without threads of its own, autograd runs backwards in this one, where the modes see them.
    with mode, torch.autograd.set_multithreading_enabled(False):
        _make_fake(model, mode)
        rows = [_trace_row(trunk, layers, forwards, unit * number, how) for number in lengths]
    traced = {place: _fit_layer(unit, rows, place) for place in forwards}
    rest = Growth.fit(unit, [row.rest for row in rows])
    return Trace(tuple(traced[place] for place in places), rest)


def _empty(modules: Sequence[nn.Module]) -> None:
    """Removes what `modules` hold: the trace does not run them."""
    for module in modules:
        module._modules.clear()
        module._parameters.clear()


def _describe(layer: nn.Module) -> Any:
    """Describes a layer's modules. Layers with equal descriptions hold the same bytes."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    settings = set()
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | str | float) and name not in PLACES:
                settings.add((path, type(module).__name__, name, value))
    return shapes, frozenset(settings)


def _prepare(model: Any, how: Forward) -> None:
    """Changes the model on the meta device as loading for training does (models/load.py).

    Unless `how.cpu`, a stand-in for a GPU's kernel computes attention.
    """
    from transformers import AttentionInterface

    register_grouped()
    set_experts_implementation(model, GROUPED)
    install_attention(model)
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
        model.to(how.dtype)  # mixed precision computes with fp32 adapters in this dtype
    multiply_by_factors(model)


class _Kernel(torch.autograd.Function):
    """Saves for its backward what a GPU's attention kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _attend_as_a_kernel(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_options: Any
) -> tuple[Tensor, None]:
    """Stands in for attention: [rows, heads, tokens, size] -> [rows, tokens, heads, size]."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    else:
        dtype = value.dtype
    out: Tensor = _Kernel.apply(*(states.to(dtype) for states in (query, key, value)))  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None


def _find_unit(trunk: Any) -> int:
    """Finds the number of tokens that divides the lengths of traced rows.

    It is at least one chunk. No matrix of the model has as many rows as a traced row has tokens, so
    that `_Live` does not take activations for parameters.
    """
    keys = trunk.config.to_dict()
    recurrence = find_family(trunk.config.model_type).recurrence
    if recurrence is not None and recurrence.steps_through_tokens:
        least = STEPPED_UNIT
    else:
        least = UNIT
    chunks = [size for name, size in keys.items() if "chunk_size" in name and isinstance(size, int)]
    unit = max([least, *(size for size in chunks if size <= LARGEST_UNIT)])
    rows = {parameter.shape[0] for parameter in trunk.parameters() if parameter.dim() == 2}
    multiples = [number * each for number in LENGTHS for each in (1, max(1, count_chosen(keys)))]
    return next(
        size
        for size in count(unit, 2 * unit)
        if not rows.intersection(size * each for each in multiples)
    )


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Turns parameters and buffers into fake tensors on the CPU."""

    def fake(tensor: Tensor) -> Tensor:
        return mode.fake_tensor_converter.from_meta_and_device(
            mode, tensor.to("meta"), torch.device("cpu")
        )

    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is one fake tensor, too
    for parameter in model.parameters():
        fake_data = fake(parameter.data)
        made[parameter] = nn.Parameter(fake_data, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, own in module._parameters.items():
            module._parameters[name] = None if own is None else made[own]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fake(buffer)


@dataclass(slots=True)
class _Row:
    """The bytes held for one traced row, by the place of a layer."""

    saved: dict[int, int] = field(default_factory=dict)
    working: dict[int, int] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)
    rest: int = 0


def _fit_layer(unit: int, rows: Sequence[_Row], place: int) -> LayerTrace:
    """Fits how the bytes of a layer grow with the tokens of a row."""
    return LayerTrace(
        Growth.fit(unit, [row.saved[place] for row in rows]),
        Growth.fit(unit, [row.working[place] for row in rows]),
        Growth.fit(unit, [row.forward[place] for row in rows]),
    )


def _trace_row(
    trunk: Any,
    layers: Sequence[nn.Module],
    forwards: Mapping[int, Callable[..., Any]],
    tokens: int,
    how: Forward,
) -> _Row:
    """Traces one row with a single document of `tokens` tokens.

    Each traced layer runs forward, backward, and forward again without a graph.

    forwards: The traced layers' own forwards, by place.
    """
    row = _Row()
    live = _Live(trunk)
    outputs = list[Any]()
    rest = _Saved(live)

    def trace_layer(place: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaf = hidden.detach().requires_grad_()
        args, kwargs = tree_map_only(Tensor, _cut, (args, kwargs))
        saved = _Saved(live, rest, (args, kwargs), _cut_shared(kwargs))
        with saved.count():
            out = forwards[place](leaf, *args, **kwargs)
        row.saved[place] = saved.bytes
        result = next(
            each for each in _tensors(out) if each.requires_grad and each.shape == hidden.shape
        )
        row.working[place] = live.measure_peak(
            lambda: torch.autograd.backward(result, torch.empty_like(result))
        )
        with torch.no_grad():
            row.forward[place] = live.measure_peak(
                lambda: outputs.append(forwards[place](hidden, *args, **kwargs))
            )
        returned = outputs.pop()
        # as in a run, where what is trained before the last norm makes that save its input
        next(each for each in _tensors(returned) if each.shape == hidden.shape).requires_grad_()
        return returned

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
        lengths = {
            "cu_seq_lens": boundaries,
            "max_document_length": tokens,
            "packed_lengths": (tokens,),
        }
        trunk(input_ids=ids, position_ids=positions, use_cache=False, **lengths)
    row.rest = rest.bytes
    return row


def _cut(tensor: Tensor) -> Tensor:
    """Cuts a tensor off its graph: each layer's backward may run through its own graph alone."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _cut_shared(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Cuts tensors that layers pass on in a mapping (Gemma 4's keys, values); returns them."""
    shared = list[Tensor]()
    for mapping in kwargs.values():
        if isinstance(mapping, MutableMapping):
            for name, value in mapping.items():
                cut = tree_map_only(Tensor, _cut, value)
                mapping[name] = cut
                shared += _tensors(cut)
    return shared


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    """A key for a tensor's memory, valid while the memory exists."""
    return int(tensor.untyped_storage()._cdata)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that exist.

    It leaves out tensors of a parameter's shape: these are gradients and casts.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        self.of_parameters = {_key(each) for each in (*module.parameters(), *module.buffers())}
        self._sizes: dict[int, int] = {}
        self._now = self._peak = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # torch can fake this operator in bfloat16 alone
            halves = [tensor.to(torch.bfloat16) for tensor in args[:2]]
            out = operator(*halves, *args[2:], **(kwargs or {})).to(torch.float32)
        else:
            out = operator(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._add(tensor)
        return out

    def measure_peak(self, run: Callable[[], object]) -> int:
        """The most bytes during `run`, less those before it."""
        before = self._peak = self._now
        run()
        return self._peak - before

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(tensor)
        if key in self._sizes or key in self.of_parameters:
            return
        if tuple(tensor.shape) in self._shapes:
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
    """Counts the bytes that autograd saves, each storage once, without those of parameters."""

    def __init__(
        self,
        live: _Live,
        shared: "_Saved | None" = None,
        given: Any = (),
        of_others: Sequence[Tensor] = (),
    ) -> None:
        """Counts for a layer, or for the whole model.

        Args:
            live: Knows the parameters.
            shared: Counts the layer's arguments, which all layers share; None for the model.
            given: The layer's arguments.
            of_others: Tensors that another layer made, and which count there.
        """
        self._live = live
        self._shared = shared
        self._given = {_key(tensor) for tensor in _tensors(given)}
        self._of_others = {_key(tensor) for tensor in of_others}
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """The bytes saved so far."""
        return sum(self._sizes.values())

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts what the forward in this block saves."""
        with torch.autograd.graph.saved_tensors_hooks(self._add, lambda tensor: tensor):
            yield

    def _add(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key in self._live.of_parameters or key in self._of_others:
            return tensor
        owner = self
        if self._shared is not None and key in self._given:
            owner = self._shared
        owner._sizes[key] = tensor.untyped_storage().nbytes()
        return tensor
