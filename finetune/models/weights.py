"""The values of a model's parameters: slices of safetensors files, or random numbers from a seed.

Both are pure functions of (name, slices): every layout starts from the same weights.

transformers may convert tensors between its files and its modules: it renames, joins and splits
them. Here its own conversions run on `BoxedTensor`s, which have no values. A box is a rectangular
part of a tensor. The result says which boxes of which tensors make a parameter, so that each rank
reads its slices alone.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.module_names import base_name
from finetune.config.pretrained import Vocabulary, text_config_of
from finetune.constants import Shape, ceil_div
from finetune.distributed.model_parts import Values, tied_names
from finetune.errors import UserError
from finetune.files.tensors import ComputedPart, StoredPart, StoredTensor, read_slice
from finetune.models.carried import make_carried_filter
from finetune.models.embedding import find_grown, make_grown_reader
from finetune.models.head_scores import draw_head, find_new_head, is_left_out
from finetune.models.lora import seed_of

COMPARED_ROWS = 4096  # at once
Slices = tuple[slice, ...]


class UnsupportedConversion(Exception):
    """A conversion whose result is not composed of boxes."""


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A box of a named tensor, and its place in a `BoxedTensor`."""

    name: str
    begin: Shape  # the place of its first element in the named tensor
    offsets: Shape  # the place of its first element in the `BoxedTensor`
    shape: Shape  # in the `BoxedTensor`
    # for each dimension of the `BoxedTensor` that of the named tensor; None: an added one of size 1
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BoxedTensor:
    """A tensor without values: its shape, and the boxes that fill it.

    It stands in for a tensor in those of torch's functions that transformers' conversions use.
    """

    shape: Shape
    parts: tuple[BoxPart, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "BoxedTensor":
        """The whole tensor `name`, as one box."""
        zeros = (0,) * len(shape)
        part = BoxPart(name, zeros, zeros, tuple(shape), tuple(range(len(shape))))
        return cls(tuple(shape), (part,))

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known: dict[Any, Callable[..., Any]] = {
            torch.cat: _cat,
            torch.stack: _stack,
            torch.chunk: _chunk,
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
        if dim is None:  # all dimensions of size 1; transformers 5.17 calls it so
            if 1 in self.shape:
                return self.squeeze(self.shape.index(1)).squeeze()
            return self
        if self.shape[dim] != 1:
            return self
        parts = []
        for part in self.parts:
            offsets = _without(part.offsets, dim)
            shape = _without(part.shape, dim)
            axes = _without(part.axes, dim)
            parts.append(replace(part, offsets=offsets, shape=shape, axes=axes))
        return BoxedTensor(_without(self.shape, dim), tuple(parts))

    def read(self, slices: Slices, read: Callable[[str, Slices], Tensor]) -> Tensor:
        """Reads the elements `slices`.

        Args:
            slices: Of step 1; dimensions without one are read whole.
            read: Reads slices of a named tensor.
        """
        box = self
        for dim, (wanted, size) in enumerate(zip(slices, self.shape, strict=False)):
            start, stop, _ = wanted.indices(size)
            box = _narrow(box, dim, start, max(start, stop))
        result: Tensor | None = None
        for part in box.parts:
            value = read(part.name, _source_slices(part)).reshape(part.shape)
            if len(box.parts) == 1:
                return value
            if result is None:
                result = value.new_empty(box.shape)
            ends = [at + size for at, size in zip(part.offsets, part.shape, strict=True)]
            result[tuple(map(slice, part.offsets, ends))] = value
        assert result is not None, f"an empty box of {self.shape}"
        return result


def convert_to_parameters(
    model: Any, stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Converts the tensors of files to those of `model`'s parameters and saved buffers.

    It reads no values. A tensor that has no place in the model keeps its name.

    Args:
        model: On the meta device.
        stored: The tensors of the files, by name.
        where: Names the files in errors.

    Raises:
        UserError: Tensors do not fit together, or boxes cannot describe a conversion.
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
    """Finds for each parameter of `model` the boxes of the files' tensors that fill it.

    The steps are those of transformers' `convert_and_load_state_dict_in_model`.

    Args:
        model: On the meta device.
        shapes: The shapes of the files' tensors, by name.
        where: Names the files in errors.
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
    """Finds for each tensor of `model`'s files the boxes of parameters that fill it.

    They are in the order of the parameters.

    Args:
        model: Any model of transformers.
        shapes: The shapes of the parameters, by name.

    Raises:
        UserError: Boxes cannot describe a conversion.
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
    """The parameter `name` as one tensor on disk, with the files' tensors as its parts."""
    dtypes = {stored[part.name].dtype for part in box.parts}
    if len(dtypes) > 1:
        raise UserError(
            f"{name}: its tensors in the files differ in dtype "
            f"({', '.join(sorted(map(str, dtypes)))}); store them in one dtype"
        )
    parts: list[StoredPart] = []
    for part in box.parts:
        parts += _stored_parts(part, stored[part.name])
    return StoredTensor(name, box.shape, dtypes.pop(), tuple(parts))


def _stored_parts(part: BoxPart, tensor: StoredTensor) -> list[StoredPart]:
    """The places on disk of the elements of `part`.

    tensor: The one that `part` names.
    """
    wanted = [(cut.start, cut.stop) for cut in _source_slices(part)]
    parts: list[StoredPart] = []
    for held in tensor.parts:
        cuts = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held.box, strict=True)]
        if any(start >= stop for start, stop in cuts):
            continue
        if isinstance(held, ComputedPart):  # can be read by any slices
            of_part = replace(held, offsets=part.offsets, shape=part.shape)
            parts.append(replace(of_part, begin=part.begin, axes=part.axes))
            continue
        if cuts[1:] != list(held.box[1:]):
            raise UnsupportedConversion("a cut through the rows of a tensor")
        row_bytes = prod(held.shape[1:]) * tensor.dtype.itemsize
        skipped_rows = cuts[0][0] - held.offsets[0] if cuts else 0
        offsets = tuple(
            at if axis is None else at + cuts[axis][0] - part.begin[axis]
            for at, axis in zip(part.offsets, part.axes, strict=True)
        )
        shape = tuple(1 if axis is None else cuts[axis][1] - cuts[axis][0] for axis in part.axes)
        position = held.position + skipped_rows * row_bytes
        parts.append(StoredPart(held.path, position, offsets, shape))
    return parts


def _source_slices(part: BoxPart) -> Slices:
    """The slices of the named tensor; they have size 1 where the box has lost a dimension."""
    sizes = {
        axis: size for axis, size in zip(part.axes, part.shape, strict=True) if axis is not None
    }
    return tuple(slice(start, start + sizes.get(axis, 1)) for axis, start in enumerate(part.begin))


# torch's functions for boxes.


def _cat(boxes: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    parts = []
    length = 0
    first = boxes[0].shape
    for box in boxes:
        if _without(box.shape, dim) != _without(first, dim):
            raise ValueError(f"shapes {list(first)} and {list(box.shape)}")
        for part in box.parts:
            offsets = _changed(part.offsets, dim, part.offsets[dim] + length)
            parts.append(replace(part, offsets=offsets))
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


def _chunk(box: BoxedTensor, chunks: int, dim: int = 0) -> tuple[BoxedTensor, ...]:
    return _split(box, ceil_div(box.shape[dim], chunks), dim)


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
        if low >= high:
            continue
        axis = part.axes[dim]
        begin = part.begin
        if axis is not None:
            begin = _changed(begin, axis, begin[axis] + low - part.offsets[dim])
        shape = _changed(part.shape, dim, high - low)
        offsets = _changed(part.offsets, dim, low - start)
        parts.append(replace(part, begin=begin, offsets=offsets, shape=shape))
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
    """The values of files, of which each rank reads its slices.

    Args:
        model: On the meta device.
        stored: The files' tensors under the names of the model's parameters.
        where: Names the files in errors.
        quantized: The names of quantized tensors.
        vocabulary: The size to which embedding and head have grown, where they have.
        seed: Draws a head of scores that the files do not have.

    Raises:
        UserError: Tensors are missing, have no place in the model, or have another shape; it names
            all of them.
    """
    grown = find_grown(model, stored, vocabulary)
    new = find_new_head(model, stored)
    readers: dict[str, Callable[[Slices], Tensor]] = {}
    for name in new:
        readers[name] = partial(draw_head, model, name, seed)
    fitting = dict(stored)
    if vocabulary:
        for name, tensor in grown.items():
            fitting[name] = replace(tensor, shape=(vocabulary.rows, *tensor.shape[1:]))
            readers[name] = make_grown_reader(tensor, vocabulary)
    refuse_mismatch(model, fitting, where, quantized, new)

    def values(name: str, slices: Slices) -> Tensor:
        name = base_name(name)
        if name in readers:
            return readers[name](slices)
        return read_slice(stored[name], slices)

    return values


def untie_as_stored(model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Unties weights of `model` whose values in the files differ.

    transformers does so, too, whatever config.json says: that of Mistral Small 3 does not say it,
    and the default is tied.
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
    if one is other:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    for start in range(0, one.shape[0], COMPARED_ROWS):
        rows = (slice(start, start + COMPARED_ROWS),)
        if not torch.equal(read_slice(one, rows), read_slice(other, rows)):
            return False
    return True


def refuse_mismatch(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    where: str,
    quantized: Container[str] = (),
    new: Collection[str] = (),
) -> None:
    """Raises `UserError` unless the files hold exactly the model's parameters and saved buffers.

    Args:
        model: On the meta device.
        stored: The files' tensors under the names of the model's parameters.
        where: Names the files in errors.
        quantized: The names of quantized tensors, whose dtypes are not compared.
        new: The names of parameters that the files need not hold.
    """
    needed = saved_buffers(model) | dict(model.named_parameters())
    needed = {name: tensor for name, tensor in needed.items() if name not in new}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - needed.keys()
    untied = {name: tensor for name, tensor in stored.items() if name not in tied}
    shapes = {name: tuple(tensor.shape) for name, tensor in needed.items()}
    problems = find_mismatches(model, untied, shapes, where)
    for name, parameter in needed.items():
        if name not in stored or name in quantized or not parameter.is_floating_point():
            continue
        dtype = stored[name].dtype
        # int8 and float8 mean nothing without scales.
        if not dtype.is_floating_point or dtype.itemsize < 2:
            problems.append(
                f"{where}: {name} is stored as {str(dtype).removeprefix('torch.')}, which is "
                "quantized in a way that is not supported; name the unquantized model"
            )
    if problems:
        raise UserError.of(problems)


def find_mismatches(
    model: nn.Module, stored: Mapping[str, StoredTensor], needed: Mapping[str, Shape], where: str
) -> list[str]:
    """Compares the tensors `stored` with those that `model` needs, given by their shapes.

    Returns:
        A sentence about missing ones, one about those without a place in the model, and one for
        each of another shape.
    """
    may_carry = make_carried_filter(model)
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


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, by name, such as Gemma 4's `layer_scalar`."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def load_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Fills the saved buffers of `model`, which are in memory while its parameters are on meta."""
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(read_slice(stored[name], tuple(slice(0, size) for size in buffer.shape)))


def seeded_values(make_twin: Callable[[], nn.Module], seed: int) -> Values:
    """Random values for training from scratch, by the family's own initialization.

    Each module's are drawn from (seed, module name).

    Args:
        make_twin: Builds the same model on the meta device, unsharded.
        seed: The run's seed.

    Raises:
        UserError: When called, the values find that the family does not initialize a parameter.
    """
    twin: Any = make_twin()

    def values(name: str, slices: Slices) -> Tensor:
        module_name, _, leaf = base_name(name).rpartition(".")
        module = twin.get_submodule(module_name)
        if next(module.parameters(recurse=False)).is_meta:
            module.to_empty(device="cpu", recurse=False)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed_of(seed, module_name))
                getattr(module, leaf).fill_(torch.nan)
                _initialize(twin, module_name)
        value: Tensor = getattr(module, leaf).detach()[slices].clone()
        module.to_empty(device="meta", recurse=False)
        if value.isnan().any():
            raise UserError(
                f"model_config: transformers gives {base_name(name)} no value; train a checkpoint"
            )
        return value

    return values


def _initialize(model: Any, name: str) -> None:
    """Initializes the module `name` as transformers does.

    Then it initializes each module around it, which may set its children's weights, too. A vision
    tower has its own rules.
    """
    path = [model]
    for part in name.split(".") if name else ():
        path.append(getattr(path[-1], part))
    for depth in range(len(path), 0, -1):
        owner = next(each for each in reversed(path[:depth]) if hasattr(each, "_init_weights"))
        owner._init_weights(path[depth - 1])


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    rest = ""
    if len(ordered) > most:
        rest = f" and {len(ordered) - most} more"
    return ", ".join(ordered[:most]) + rest + (" is" if len(ordered) == 1 else " are")
