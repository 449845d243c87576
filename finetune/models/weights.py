"""The values of a model's parameters: slices of safetensors files, or random numbers from a seed.

Both are pure functions of (name, slices), so that every layout starts from the same weights.

Between its files and its modules, transformers may rename, join and split tensors. Here its own
conversions run on `BoxedTensor`s, which have no values. A box is a rectangular part of a tensor.
The result says which boxes of which tensors in the files make a parameter, so that each rank reads
only its own slices.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.module_names import base_name
from finetune.config.pretrained import Vocabulary, text_config_of
from finetune.constants import Shape, ceil_div
from finetune.distributed.model_parts import Slices, Values, tied_names
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, read_slice
from finetune.models.carried import make_carried_filter
from finetune.models.embedding import find_grown, make_grown_reader
from finetune.models.head_scores import draw_head, find_new_head, is_left_out
from finetune.models.lora import seed_of

COMPARED_ROWS = 4096  # rows that `are_equal` reads at once


class UnsupportedConversion(Exception):
    """Raised for a conversion whose result boxes cannot describe; its message is the operation."""


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A box of the tensor `name`, and its place in a `BoxedTensor`."""

    name: str
    begin: Shape  # the index of the box's first element in the named tensor
    offsets: Shape  # the index of that element in the `BoxedTensor`
    shape: Shape  # the box's shape in the `BoxedTensor`
    # for each dimension of the `BoxedTensor`, the same dimension of the named tensor; None for an
    # added dimension of size 1
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BoxedTensor:
    """A tensor without values: its shape, and the boxes that fill it.

    It stands in for a tensor in the functions and methods of torch that transformers' conversions
    use. Any other raises `UnsupportedConversion`.
    """

    shape: Shape
    parts: tuple[BoxPart, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "BoxedTensor":
        """Makes a `BoxedTensor` of one box: the whole tensor `name`."""
        zeros = (0,) * len(shape)
        part = BoxPart(
            name, begin=zeros, offsets=zeros, shape=tuple(shape), axes=tuple(range(len(shape)))
        )
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
        # Without `dim`, as transformers 5.17 calls it, all dimensions of size 1 are removed.
        if dim is None:
            if 1 in self.shape:
                return self.squeeze(self.shape.index(1)).squeeze()
            return self
        if self.shape[dim] != 1:
            return self
        parts = []
        for part in self.parts:
            offsets = _remove_at(part.offsets, dim)
            shape = _remove_at(part.shape, dim)
            axes = _remove_at(part.axes, dim)
            parts.append(replace(part, offsets=offsets, shape=shape, axes=axes))
        return BoxedTensor(_remove_at(self.shape, dim), tuple(parts))

    def read(self, slices: Slices, read: Callable[[str, Slices], Tensor]) -> Tensor:
        """Reads the elements `slices`.

        Args:
            slices: Slices of step 1. Further dimensions are read whole.
            read: Reads slices of a named tensor.
        """
        wanted = self
        for dim, (dim_slice, size) in enumerate(zip(slices, self.shape, strict=False)):
            start, stop, _ = dim_slice.indices(size)
            wanted = _narrow(wanted, dim, start, max(start, stop))
        result: Tensor | None = None
        for part in wanted.parts:
            value = read(part.name, _find_source_slices(part)).reshape(part.shape)
            if len(wanted.parts) == 1:  # no copy is needed
                return value
            if result is None:
                result = value.new_empty(wanted.shape)
            ends = [start + size for start, size in zip(part.offsets, part.shape, strict=True)]
            result[tuple(map(slice, part.offsets, ends))] = value
        assert result is not None, f"an empty box of {self.shape}"
        return result


def convert_to_parameters(
    model: Any, stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Converts the tensors of files to those of the parameters and saved buffers of `model`.

    It reads no values. A tensor that has no place in the model keeps its name.

    Args:
        model: On the meta device.
        stored: The tensors of the files, by name.
        where: The files, for messages.

    Returns:
        The tensors by their names in the model.

    Raises:
        UserError: Tensors do not fit together, or boxes cannot describe a conversion.
    """
    names = model.state_dict().keys()
    if stored.keys() <= names:
        return dict(stored)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    boxes = boxes_of_parameters(model, shapes, where)
    return {name: _make_stored(name, box, stored) for name, box in boxes.items()}


def boxes_of_parameters(
    model: Any, shapes: Mapping[str, Shape], where: str
) -> dict[str, BoxedTensor]:
    """Finds for each parameter of `model` the boxes of the files' tensors that fill it.

    The steps are those of transformers' `convert_and_load_state_dict_in_model`. A tensor that has
    no place in the model keeps its name.

    Args:
        model: On the meta device.
        shapes: The shapes of the files' tensors, by name.
        where: The files, for messages.

    Raises:
        UserError: Tensors do not fit together, or boxes cannot describe a conversion.
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
    # name in the model -> a converter of transformers, which collects the tensors to convert
    collected: dict[str, Any] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            # The renamings are not meant for this name; the prefix may be.
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
    """Finds for each tensor that the files of `model` hold the boxes of parameters that fill it.

    Args:
        model: Any model of transformers.
        shapes: The shapes of the parameters, by name.

    Returns:
        The tensors of the files by name, in the order of the parameters.

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
    """Makes the error of a conversion by an `operation` that boxes cannot describe."""
    return UserError(
        f"{where}: the files of {type(model).__name__} arrange its tensors otherwise than its "
        f"modules do, and transformers converts them by {operation}, which is not supported here; "
        "name a model of another family"
    )


def _make_stored(name: str, box: BoxedTensor, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    """Describes the parameter `name` as one tensor on disk, which boxes of the files' tensors fill.

    Raises `UserError` where those tensors differ in dtype.
    """
    sources = {part.name: stored[part.name] for part in box.parts}
    first_name, first = next(iter(sources.items()))
    if box == BoxedTensor.whole(first_name, first.shape):
        return replace(first, name=name)
    dtypes = {source.dtype for source in sources.values()}
    if len(dtypes) > 1:
        raise UserError(
            f"{name}: its tensors in the files differ in dtype "
            f"({', '.join(sorted(map(str, dtypes)))}); store them in one dtype"
        )

    def read_source(source: str, slices: Slices) -> Tensor:
        return read_slice(sources[source], slices)

    parts = tuple(part for source in sources.values() for part in source.parts)
    return StoredTensor(name, box.shape, first.dtype, parts, partial(box.read, read=read_source))


def _find_source_slices(part: BoxPart) -> Slices:
    """Finds the slices of the named tensor that `part` is.

    They have size 1 in a dimension that the `BoxedTensor` has no longer.
    """
    sizes = {
        axis: size for axis, size in zip(part.axes, part.shape, strict=True) if axis is not None
    }
    return tuple(slice(start, start + sizes.get(axis, 1)) for axis, start in enumerate(part.begin))


# What torch's functions do to boxes.


def _cat(boxes: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    parts = []
    length = 0
    first = boxes[0].shape
    for box in boxes:
        if _remove_at(box.shape, dim) != _remove_at(first, dim):
            raise ValueError(f"shapes {list(first)} and {list(box.shape)}")
        for part in box.parts:
            offsets = _replace_at(part.offsets, dim, part.offsets[dim] + length)
            parts.append(replace(part, offsets=offsets))
        length += box.shape[dim]
    return BoxedTensor(_replace_at(first, dim, length), tuple(parts))


def _stack(boxes: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    def insert(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:dim], value, *values[dim:])

    def unsqueeze(box: BoxedTensor) -> BoxedTensor:
        parts = [
            replace(
                part,
                offsets=insert(part.offsets, 0),
                shape=insert(part.shape, 1),
                axes=insert(part.axes, None),
            )
            for part in box.parts
        ]
        return BoxedTensor(insert(box.shape, 1), tuple(parts))

    return _cat([unsqueeze(box) for box in boxes], dim)


def _chunk(box: BoxedTensor, chunks: int, dim: int = 0) -> tuple[BoxedTensor, ...]:
    return _split(box, ceil_div(box.shape[dim], chunks), dim)


def _split(box: BoxedTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[BoxedTensor, ...]:
    length = box.shape[dim]
    if isinstance(sizes, int):
        part_sizes = [sizes] * ceil_div(length, sizes)
    else:
        part_sizes = list(sizes)
    starts = [sum(part_sizes[:index]) for index in range(len(part_sizes))]
    return tuple(
        _narrow(box, dim, start, min(start + size, length))
        for start, size in zip(starts, part_sizes, strict=True)
    )


def _narrow(box: BoxedTensor, dim: int, start: int, stop: int) -> BoxedTensor:
    """Returns the elements from `start` to `stop` of dimension `dim`."""
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
            begin = _replace_at(begin, axis, begin[axis] + low - part.offsets[dim])
        shape = _replace_at(part.shape, dim, high - low)
        offsets = _replace_at(part.offsets, dim, low - start)
        parts.append(replace(part, begin=begin, offsets=offsets, shape=shape))
    return BoxedTensor(_replace_at(box.shape, dim, stop - start), tuple(parts))


def _replace_at(values: Shape, index: int, value: int) -> Shape:
    index %= len(values)  # torch's dimensions may be negative
    return (*values[:index], value, *values[index + 1 :])


def _remove_at(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
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
    """Makes the `Values` that read slices of files.

    Args:
        model: On the meta device.
        stored: The files' tensors under the names of the model's parameters.
        where: The files, for messages.
        quantized: The names of quantized tensors.
        vocabulary: The vocabulary with the recipe's tokens, to which embedding and head grow; with
            None neither grows.
        seed: The seed of a head of scores, which is drawn if the files do not have it.

    Raises:
        UserError: Tensors are missing, have no place in the model, or have another shape or an
            unsupported dtype; the error names all of them.
    """
    grown = find_grown(model, stored, vocabulary)
    new_head = find_new_head(model, stored)
    # of the parameters that are not read from a file as they are
    readers: dict[str, Callable[[Slices], Tensor]] = {}
    for name in new_head:
        readers[name] = partial(draw_head, model, name, seed)
    as_in_model = dict(stored)  # with the shapes that grown tensors have in the model
    if vocabulary:
        for name, tensor in grown.items():
            as_in_model[name] = replace(tensor, shape=(vocabulary.rows, *tensor.shape[1:]))
            readers[name] = make_grown_reader(tensor, vocabulary)
    refuse_mismatch(model, as_in_model, where, quantized, new_head)

    def read_values(name: str, slices: Slices) -> Tensor:
        name = base_name(name)
        if name in readers:
            return readers[name](slices)
        return read_slice(stored[name], slices)

    return read_values


def untie_as_stored(model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Unties the tied weights of `model` whose values in the files differ.

    transformers does this too, whatever config.json says. The config.json of Mistral Small 3 does
    not say whether weights are tied; its weights are not, but the default is tied.
    """
    for second, first in tied_names(model).items():
        if second in stored and first in stored and not are_equal(stored[second], stored[first]):
            module_name, _, parameter_name = second.rpartition(".")
            own_parameter = nn.Parameter(torch.empty_like(model.get_parameter(first)))
            setattr(model.get_submodule(module_name), parameter_name, own_parameter)
            model.all_tied_weights_keys.pop(second, None)
            for config in (model.config, text_config_of(model.config)):
                config.tie_word_embeddings = False


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors on disk have the same shape, dtype and values."""
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
        where: The files, for messages.
        quantized: The names of quantized tensors, whose dtypes are not checked.
        new: The names of parameters that the files need not hold.
    """
    in_model = saved_buffers(model) | dict(model.named_parameters())
    needed = {name: tensor for name, tensor in in_model.items() if name not in new}
    # Names that the files may hold and need not: second names of tied parameters, and `new`.
    optional = {name for name, _ in model.named_parameters(remove_duplicate=False)} - needed.keys()
    compared = {name: tensor for name, tensor in stored.items() if name not in optional}
    shapes = {name: tuple(tensor.shape) for name, tensor in needed.items()}
    problems = find_mismatches(model, compared, shapes, where)
    for name, parameter in needed.items():
        if name not in stored or name in quantized or not parameter.is_floating_point():
            continue
        dtype = stored[name].dtype
        # Numbers in int8 or float8 have no meaning without scales.
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
    """Compares the tensors `stored` with those that `model` needs.

    Args:
        model: On the meta device.
        stored: Tensors under the names of the model's parameters.
        needed: The shapes of the tensors that the model needs, by name.
        where: The files, for messages.

    Returns:
        A sentence about the missing tensors, one about those without a place in the model, and one
        for each tensor of another shape; [] if all fit.
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
            f"{where}: {_join_with_verb(missing)} missing: these are not the weights of "
            f"{class_name}"
        )
    if extra:
        problems.append(
            f"{where}: {_join_with_verb(extra)} without a place in {class_name}: the config does "
            "not fit the weights"
        )
    for name, shape in needed.items():
        if name in stored and stored[name].shape != shape:
            stored_shape = list(stored[name].shape)
            problems.append(
                f"{where}: {name} has the shape {stored_shape}, but the config says {list(shape)}"
            )
    return problems


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that files hold beside parameters, such as Gemma 4's `layer_scalar`, by
    name.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def load_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Reads the saved buffers of `model`, which are in memory though its parameters are on meta."""
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(read_slice(stored[name], tuple(slice(0, size) for size in buffer.shape)))


def seeded_values(make_twin: Callable[[], nn.Module], seed: int) -> Values:
    """Makes the `Values` for training from scratch: random numbers by the family's own
    initialization.

    The numbers of each module are drawn from (seed, module name).

    Args:
        make_twin: Builds the same model on the meta device, unsharded.
        seed: The run's seed.

    Returns:
        A function that raises `UserError` for a parameter that the family does not initialize.
    """
    twin: Any = make_twin()

    def draw_values(name: str, slices: Slices) -> Tensor:
        module_name, _, parameter_name = base_name(name).rpartition(".")
        module = twin.get_submodule(module_name)
        if next(module.parameters(recurse=False)).is_meta:
            module.to_empty(device="cpu", recurse=False)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed_of(seed, module_name))
                # What the family does not initialize stays NaN.
                getattr(module, parameter_name).fill_(torch.nan)
                _initialize(twin, module_name)
        value: Tensor = getattr(module, parameter_name).detach()[slices].clone()
        module.to_empty(device="meta", recurse=False)  # frees the memory
        if value.isnan().any():
            raise UserError(
                f"model_config: transformers gives {base_name(name)} no value; train a checkpoint"
            )
        return value

    return draw_values


def _initialize(model: Any, name: str) -> None:
    """Initializes the module `name` of `model` as transformers does.

    Then it initializes each module around that module, from the inside out, since these may set
    their children's weights too. The rules are those of the nearest model around a module: a vision
    tower has its own.
    """
    path = [model]  # from the model to the named module
    for part in name.split(".") if name else ():
        path.append(getattr(path[-1], part))
    for depth in range(len(path), 0, -1):
        module = path[depth - 1]
        owner = next(each for each in reversed(path[:depth]) if hasattr(each, "_init_weights"))
        owner._init_weights(module)


def _join_with_verb(names: Iterable[str], most: int = 4) -> str:
    """Joins names in alphabetical order, `most` of them, with the verb of their number.

    >>> _join_with_verb(["b", "a"]), _join_with_verb("abcdef"), _join_with_verb("a")
    ('a, b are', 'a, b, c, d and 2 more are', 'a is')
    """
    ordered = sorted(names)
    rest = ""
    if len(ordered) > most:
        rest = f" and {len(ordered) - most} more"
    return ", ".join(ordered[:most]) + rest + (" is" if len(ordered) == 1 else " are")
