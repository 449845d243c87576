"""The values of a model's parameters: slices of safetensors files, or random from a seed.

Both are pure functions of (name, slices), so every layout and every number of ranks starts from the
same weights.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from finetune.config.module_names import base_name
from finetune.config.pretrained import Vocabulary, text_config_of
from finetune.constants import ceil_div
from finetune.distributed.model_parts import Values, tied_names
from finetune.errors import UserError
from finetune.files.tensors import ComputedPart, StoredPart, StoredTensor, read_slice
from finetune.models.carried import carries
from finetune.models.embedding import find_grown, grown_reader
from finetune.models.head_scores import draw_head, find_new_head, is_left_out
from finetune.models.lora import seed_of

COMPARED_ROWS = 4096  # at once
Slices = tuple[slice, ...]
Shape = tuple[int, ...]


class UnsupportedConversion(Exception):
    """A conversion whose result is not made of boxes of its sources."""


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A box of a named tensor, at its place in a `BoxedTensor`."""

    name: str
    begin: Shape  # of its first element in the named tensor
    offsets: Shape  # of its first element in the box
    shape: Shape  # in the box
    # for each dimension of the box, the named tensor's; None: added, of size 1
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BoxedTensor:
    """The tensor that a conversion makes: its shape, and the parts that fill it.

    Stands in for a tensor in torch's functions, as far as transformers' conversions of weights in
    boxes use them.
    """

    shape: Shape
    parts: tuple[BoxPart, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "BoxedTensor":
        """All of the tensor `name`."""
        shape, zeros = tuple(shape), (0,) * len(shape)
        return cls(shape, (BoxPart(name, zeros, zeros, shape, tuple(range(len(shape)))),))

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known: dict[Any, Callable[..., Any]] = {
            torch.cat: _cat,
            torch.stack: _stack,
            torch.chunk: lambda box, chunks, dim=0: _split(
                box, ceil_div(box.shape[dim], chunks), dim
            ),
            torch.split: _split,
        }
        if function not in known:
            raise UnsupportedConversion(f"torch.{getattr(function, '__name__', function)}")
        return known[function](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedConversion(f"Tensor.{name}")

    def __getitem__(self, _index: Any) -> Any:
        raise UnsupportedConversion("an index")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> "BoxedTensor":
        return self

    def squeeze(self, dim: int | None = None) -> "BoxedTensor":
        if dim is None:  # all dimensions of size 1, as transformers 5.17 has it
            if 1 in self.shape:
                return self.squeeze(self.shape.index(1)).squeeze()
            return self
        if self.shape[dim] != 1:
            return self
        parts = tuple(
            replace(
                p,
                offsets=_without(p.offsets, dim),
                shape=_without(p.shape, dim),
                axes=_without(p.axes, dim),
            )
            for p in self.parts
        )
        return BoxedTensor(_without(self.shape, dim), parts)

    def read(self, slices: Slices, read: Callable[[str, Slices], torch.Tensor]) -> torch.Tensor:
        """The elements `slices` (of step 1; missing dimensions are whole), by `read(name, slices)`
        of the tensors.
        """
        bounds = [
            wanted.indices(size)[:2] for wanted, size in zip(slices, self.shape, strict=False)
        ]
        bounds += [(0, size) for size in self.shape[len(bounds) :]]
        box = self
        for dim, (start, stop) in enumerate(bounds):
            box = _narrow(box, dim, start, max(start, stop))
        result: torch.Tensor | None = None
        for part in box.parts:
            value = read(part.name, _source_slices(part)).reshape(part.shape)
            if len(box.parts) == 1:
                return value
            result = value.new_empty(box.shape) if result is None else result
            result[
                tuple(slice(at, at + n) for at, n in zip(part.offsets, part.shape, strict=True))
            ] = value
        assert result is not None, f"an empty box of {self.shape}"
        return result


def convert_to_parameters(
    model: Any, stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """The tensors of the files under the names of `model`'s parameters and saved buffers, in their
    form in memory.

    A tensor that has no place in the model keeps its name. Reads no value. `where` names the files
    in errors.

    Raises `UserError` where tensors do not fit together, or a conversion rearranges elements in a
    way that rectangular boxes cannot describe.
    """
    names = model.state_dict().keys()
    if stored.keys() <= names:
        return dict(stored)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    boxes = boxes_of_parameters(model, shapes, where)
    try:
        return {name: _as_stored(name, box, stored) for name, box in boxes.items()}
    except UnsupportedConversion as error:
        raise _unsupported(model, where, str(error)) from None


def boxes_of_parameters(
    model: Any, shapes: Mapping[str, Shape], where: str
) -> dict[str, BoxedTensor]:
    """For each parameter of `model` the tensors of the files (given by their shapes) that it is
    made of.

    The order of the steps is transformers' own (`convert_and_load_state_dict_in_model`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    boxes: dict[str, BoxedTensor] = {}
    collected: dict[str, Any] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        box = BoxedTensor.whole(name, shapes[name])
        if target not in state or target in boxes:
            boxes[name] = box
        elif pattern is None:
            boxes[target] = box
        else:
            converter = collected.setdefault(target, deepcopy(converter_of[pattern]))
            converter.add_tensor(target, name, pattern, box)
    for target, converter in collected.items():
        try:
            boxes |= converter.convert(target, model=model, config=model.config)
        except UnsupportedConversion as error:
            raise _unsupported(model, where, str(error)) from None
        except ValueError as error:
            raise UserError(
                f"{where}: the tensors of {target} do not fit together ({error}); copy the files "
                "again"
            ) from None
    return boxes


def boxes_of_files(model: Any, shapes: Mapping[str, Shape]) -> dict[str, BoxedTensor]:
    """For each tensor that transformers writes to `model`'s files, the parameters (given by their
    shapes) that it is made of, in their order.

    Raises `UserError` where a conversion rearranges elements in a way that rectangular boxes cannot
    describe.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters: Any = {name: BoxedTensor.whole(name, shape) for name, shape in shapes.items()}
    try:
        written = revert_weight_conversion(model, parameters)
    except UnsupportedConversion as error:
        raise _unsupported(model, type(model).__name__, str(error)) from None
    order = {name: index for index, name in enumerate(shapes)}
    return dict(sorted(written.items(), key=lambda item: order[item[1].parts[0].name]))


def _unsupported(model: nn.Module, where: str, operation: str) -> UserError:
    return UserError(
        f"{where}: the files of {type(model).__name__} arrange its tensors otherwise than its "
        f"modules do, and transformers converts them by {operation}, which is not supported here; "
        "name a model of another family"
    )


def _as_stored(name: str, box: BoxedTensor, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    """The parameter `name` as one tensor on disk, whose parts lie wherever the files' tensors
    do.
    """
    dtypes = {stored[part.name].dtype for part in box.parts}
    if len(dtypes) > 1:
        raise UserError(
            f"{name}: its tensors in the files differ in dtype "
            f"({', '.join(sorted(map(str, dtypes)))}); store them in one dtype"
        )
    parts = [
        stored_part for part in box.parts for stored_part in _stored_parts(part, stored[part.name])
    ]
    return StoredTensor(name, box.shape, dtypes.pop(), tuple(parts))


def _stored_parts(part: BoxPart, tensor: StoredTensor) -> list[StoredPart]:
    """Where the elements of `part` lie on disk."""
    wanted = [(cut.start, cut.stop) for cut in _source_slices(part)]
    parts: list[StoredPart] = []
    for held in tensor.parts:
        cuts = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held.box, strict=True)]
        if any(start >= stop for start, stop in cuts):
            continue
        if isinstance(held, ComputedPart):  # a whole tensor, read by any slices
            parts.append(
                replace(
                    held, offsets=part.offsets, shape=part.shape, begin=part.begin, axes=part.axes
                )
            )
            continue
        if cuts[1:] != list(held.box[1:]):
            raise UnsupportedConversion("a cut through the rows of a tensor")
        row_bytes = prod(held.shape[1:]) * tensor.dtype.itemsize
        if cuts:
            skipped = (cuts[0][0] - held.offsets[0]) * row_bytes
        else:
            skipped = 0
        offsets = tuple(
            at if axis is None else at + cuts[axis][0] - part.begin[axis]
            for at, axis in zip(part.offsets, part.axes, strict=True)
        )
        shape = tuple(1 if axis is None else cuts[axis][1] - cuts[axis][0] for axis in part.axes)
        parts.append(StoredPart(held.path, held.position + skipped, offsets, shape))
    return parts


def _source_slices(part: BoxPart) -> Slices:
    """Which elements of the named tensor `part` is; a dimension that the box has lost is one
    element wide.
    """
    sizes = {
        axis: size for axis, size in zip(part.axes, part.shape, strict=True) if axis is not None
    }
    return tuple(slice(start, start + sizes.get(axis, 1)) for axis, start in enumerate(part.begin))


# torch's functions, for boxes.


def _cat(boxes: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    parts = []
    length = 0
    first = boxes[0].shape
    for box in boxes:
        if _without(box.shape, dim) != _without(first, dim):
            raise ValueError(f"shapes {list(first)} and {list(box.shape)}")
        parts += [
            replace(p, offsets=_changed(p.offsets, dim, p.offsets[dim] + length)) for p in box.parts
        ]
        length += box.shape[dim]
    return BoxedTensor(_changed(first, dim, length), tuple(parts))


def _stack(boxes: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    def add(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:dim], value, *values[dim:])

    def add_dimension(part: BoxPart) -> BoxPart:
        return replace(
            part, offsets=add(part.offsets, 0), shape=add(part.shape, 1), axes=add(part.axes, None)
        )

    layers = [BoxedTensor(add(box.shape, 1), tuple(map(add_dimension, box.parts))) for box in boxes]
    return _cat(layers, dim)


def _split(box: BoxedTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[BoxedTensor, ...]:
    length = box.shape[dim]
    if isinstance(sizes, int):
        each = [sizes] * ceil_div(length, sizes)
    else:
        each = list(sizes)
    starts = [sum(each[:index]) for index in range(len(each))]
    return tuple(
        _narrow(box, dim, start, min(start + size, length))
        for start, size in zip(starts, each, strict=True)
    )


def _narrow(box: BoxedTensor, dim: int, start: int, stop: int) -> BoxedTensor:
    """The elements from `start` to `stop` of dimension `dim`."""
    if (start, stop) == (0, box.shape[dim]):
        return box
    parts = []
    for part in box.parts:
        low = max(start, part.offsets[dim])
        high = min(stop, part.offsets[dim] + part.shape[dim])
        if low < high:
            axis = part.axes[dim]
            if axis is None:
                begin = part.begin
            else:
                begin = _changed(part.begin, axis, part.begin[axis] + low - part.offsets[dim])
            shape = _changed(part.shape, dim, high - low)
            parts.append(
                replace(
                    part, begin=begin, offsets=_changed(part.offsets, dim, low - start), shape=shape
                )
            )
    return BoxedTensor(_changed(box.shape, dim, stop - start), tuple(parts))


def _changed(values: Shape, index: int, value: int) -> Shape:
    index %= len(values)
    return (*values[:index], value, *values[index + 1 :])


def _without(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    index %= len(values)
    return (*values[:index], *values[index + 1 :])


def stored_values(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    where: str,
    quantized: Container[str] = (),
    vocabulary: Vocabulary | None = None,
    seed: int = 0,
) -> Values:
    """Values read from files, each rank its own slices.

    `where` names the files in errors; `vocabulary`: what the embedding and the head have grown to;
    `seed`: of a head of scores, where the files have none.

    Raises `UserError` naming every tensor that is missing, without a place in the model, or of
    another shape.
    """
    grown = find_grown(model, stored, vocabulary)
    rows = vocabulary.rows if vocabulary else 0
    fitting = {
        name: replace(tensor, shape=(rows, *tensor.shape[1:])) for name, tensor in grown.items()
    }
    new = find_new_head(model, stored)
    refuse_mismatch(model, {**stored, **fitting}, where, quantized, new)
    if vocabulary:
        readers = {name: grown_reader(tensor, vocabulary) for name, tensor in grown.items()}
    else:
        readers = {}
    readers |= {name: partial(draw_head, model, name, seed) for name in new}

    def values(name: str, slices: Slices) -> torch.Tensor:
        name = base_name(name)
        if name in readers:
            return readers[name](slices)
        return read_slice(stored[name], slices)

    return values


def untie_as_stored(model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Unties weights of `model`, on meta, that the files hold apart with other values, as
    transformers does whatever config.json says: that of Mistral Small 3 leaves it out, and the
    default is tied.
    """
    for second, first in tied_names(model).items():
        if second in stored and first in stored and not are_equal(stored[second], stored[first]):
            parent, _, leaf = second.rpartition(".")
            setattr(
                model.get_submodule(parent),
                leaf,
                nn.Parameter(torch.empty_like(model.get_parameter(first))),
            )
            model.all_tied_weights_keys.pop(second, None)
            for config in (model.config, text_config_of(model.config)):
                config.tie_word_embeddings = False


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors on disk are the same."""
    if one is other or (one.shape, one.dtype) != (other.shape, other.dtype):
        return one is other
    rows = [
        (slice(start, start + COMPARED_ROWS),) for start in range(0, one.shape[0], COMPARED_ROWS)
    ]
    return all(torch.equal(read_slice(one, part), read_slice(other, part)) for part in rows)


def refuse_mismatch(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    where: str,
    quantized: Container[str] = (),
    new: Collection[str] = (),
) -> None:
    """Raises `UserError` where the files do not hold exactly the base model's parameters and saved
    buffers, but for `new` ones; of those that are `quantized`, the shape alone is compared.
    """
    needed = saved_buffers(model) | dict(model.named_parameters())
    needed = {name: tensor for name, tensor in needed.items() if name not in new}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - needed.keys()
    untied = {name: tensor for name, tensor in stored.items() if name not in tied}
    problems = find_mismatches(
        model, untied, {name: tuple(tensor.shape) for name, tensor in needed.items()}, where
    )
    for name, parameter in needed.items():
        if name not in stored or name in quantized or not parameter.is_floating_point():
            continue
        dtype = stored[name].dtype
        # int8, and float8 too: they mean nothing without scales
        if not dtype.is_floating_point or dtype.itemsize < 2:
            problems.append(
                f"{where}: {name} is stored as {str(dtype).removeprefix('torch.')}, which is "
                "quantized in a way that is not supported; name the unquantized model"
            )
    if problems:
        raise UserError.of(problems)


def find_mismatches(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    needed: Mapping[str, tuple[int, ...]],
    where: str,
) -> list[str]:
    """Compares the tensors `stored` with those of `model`, which are `needed` with these shapes.
    Returns a sentence on those that are missing, one on those without a place in it, and one for
    each of another shape.
    """
    may_carry = carries(model)
    extra = {
        name
        for name in stored.keys() - needed.keys()
        if not may_carry(name) and not is_left_out(model, name)
    }
    missing = needed.keys() - stored.keys()
    class_name = type(model).__name__
    problems = []
    if missing:
        problems.append(
            f"{where}: {_listed(missing)} missing: these are not the weights of {class_name}"
        )
    if extra:
        problems.append(
            f"{where}: {_listed(extra)} without a place in {class_name}: the config does not fit "
            "the weights"
        )
    for name, shape in needed.items():
        if name in stored and stored[name].shape != shape:
            given = list(stored[name].shape)
            problems.append(
                f"{where}: {name} has the shape {given}, but the config says {list(shape)}"
            )
    return problems


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds beside the parameters (Gemma 4's `layer_scalar`), by
    name.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def load_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Fills the saved buffers of `model`, which are in memory while its parameters are still on
    meta.
    """
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(read_slice(stored[name], tuple(slice(0, size) for size in buffer.shape)))


def seeded_values(make_twin: Callable[[], nn.Module], seed: int) -> Values:
    """Values for training from random weights: the family's own initialization, drawn module by
    module from (seed, module name).

    `make_twin` builds the same model on meta, unsharded.

    The values raise `UserError` where the family initializes a parameter nowhere.
    """
    twin: Any = make_twin()

    def values(name: str, slices: Slices) -> torch.Tensor:
        module_name, _, leaf = base_name(name).rpartition(".")
        module = twin.get_submodule(module_name)
        if next(module.parameters(recurse=False)).is_meta:
            module.to_empty(device="cpu", recurse=False)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed_of(seed, module_name))
                getattr(module, leaf).fill_(torch.nan)
                _initialize(twin, module_name)
        value: torch.Tensor = getattr(module, leaf).detach()[slices].clone()
        module.to_empty(device="meta", recurse=False)
        if value.isnan().any():
            raise UserError(
                f"model_config: transformers gives {base_name(name)} no value; train a checkpoint"
            )
        return value

    return values


def _initialize(model: Any, name: str) -> None:
    """Initializes the module `name` as transformers does.

    After it comes each module that holds it, whose initialization may include its children's
    weights. A vision tower has rules of its own.
    """
    path = [model]
    for part in name.split(".") if name else ():
        path.append(getattr(path[-1], part))
    for depth in range(len(path), 0, -1):
        owner = next(each for each in reversed(path[:depth]) if hasattr(each, "_init_weights"))
        owner._init_weights(path[depth - 1])


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    if len(ordered) > most:
        rest = f" and {len(ordered) - most} more"
    else:
        rest = ""
    return ", ".join(ordered[:most]) + rest + (" is" if len(ordered) == 1 else " are")
