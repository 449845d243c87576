"""The tensors of the result as values: as stored, or with an adapter merged onto its base,
dequantized or not.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finetune.config.module_names import find_problem, find_value, is_adapter
from finetune.config.pretrained import why_unsupported
from finetune.constants import ROTATION, Shape
from finetune.errors import UserError
from finetune.export.publish import ExportOptions, MergeOnto
from finetune.export.source import Adapter, Source
from finetune.export.target import (
    TargetModel,
    Value,
    as_floating,
    match_tensors,
    read_rows,
    row_blocks,
    stored_value,
)
from finetune.files.tensors import (
    StoredTensor,
    choose_dtype,
    config_dtype,
    main_dtype,
    read,
    read_folder,
    read_slice,
)
from finetune.models.head_scores import add_new_head
from finetune.models.lora import AdaptedParameter, find_adapted_parameters, make_rotations
from finetune.models.quantized_layers import quantized_weights
from finetune.models.quantized_weights import dequantize_tensor, quantize_whole
from finetune.models.weights import Slices, convert_to_parameters

BASE_LAYER = ".base_layer."


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An adapter's change of one tensor of its base, a few rows at a time, in float32."""

    # (elements of the base, where they are) -> the same, updated
    apply: Callable[[Tensor, Slices], Tensor]
    shape: Shape  # of the tensor that it fits
    used: frozenset[str]  # the adapter's tensors in it
    is_whole: bool = False  # whether the tensor is replaced
    needs_whole_rows: bool = False  # whether the slices must be rows


def refuse_idle(adapter: Adapter, where: str) -> None:
    """Raises `UserError` where an adapter changes nothing: it has only the factors A and B, and
    every B is zero.
    """
    b_ends = (".lora_B.weight", ".lora_embedding_B")
    factors = {
        name
        for name in adapter.tensors
        if name.endswith((*b_ends, ".lora_A.weight", ".lora_embedding_A"))
    }
    all_b = [adapter.tensors[name] for name in factors if name.endswith(b_ends)]
    if all_b and factors == adapter.tensors.keys() and not any(read(b).any() for b in all_b):
        raise UserError(
            f"{where}: the adapter changes nothing: every lora_B in it is zero, as before "
            "training; train it"
        )


def find_own_bases(adapter: Adapter) -> dict[str, StoredTensor]:
    """Base tensor -> the copy of it that PEFT saved with the adapter, as it does for an adapted
    embedding.
    """
    return {
        name.replace(BASE_LAYER, "."): t
        for name, t in adapter.tensors.items()
        if _is_own_base(name)
    }


def _is_own_base(name: str) -> bool:
    return BASE_LAYER in name and not is_adapter(name)


def find_updates(adapter: Adapter, target: TargetModel, where: str) -> dict[str, WeightUpdate]:
    """Base tensor -> what the adapter does to it.

    Raises `UserError` where a tensor of the adapter fits no module or has a wrong shape.
    """
    parameters = find_adapted_parameters(
        target.model, adapter.config.get("target_parameters") or ()
    )
    updates: dict[str, WeightUpdate] = {}
    for name in sorted(adapter.tensors):
        updates |= _find_update(name, adapter, target, parameters, where)
    used = frozenset(filter(_is_own_base, adapter.tensors))
    used |= {name for name, first in target.tied.items() if _repeats(adapter, name, first)}
    used = used.union(*(update.used for update in updates.values()))
    problems = [
        f"{where}: {name}: is no part of LoRA for {target.class_name}"
        for name in sorted(adapter.tensors.keys() - used)
    ]
    fits = {name: update.shape for name, update in updates.items()}
    fits |= {name: tensor.shape for name, tensor in find_own_bases(adapter).items()}
    for name, shape in fits.items():
        misfit = _find_misfit(name, shape, target, where)
        if misfit is not None:
            problems.append(misfit)
    if problems or not updates:
        raise UserError.of(problems[:20] or [f"{where}: the adapter is empty"])
    return updates


def _find_update(
    name: str,
    adapter: Adapter,
    target: TargetModel,
    parameters: Mapping[str, AdaptedParameter],
    where: str,
) -> dict[str, WeightUpdate]:
    """Finds the update that the adapter's tensor `name` begins: base tensor -> update. It is empty
    for a tensor that another one's update reads, or that belongs to none.

    `parameters`: the parameters that target_parameters adapts, by module.
    """
    if name.endswith(f"{ROTATION}weight"):
        weight = f"{name.partition(ROTATION)[0]}.weight"
        rows = target.shapes.get(weight, (0,))[0]
        return {weight: _rotation_update(adapter, name, rows, where)}
    module = name.rpartition(".lora_")[0]
    weight = f"{module}.weight"
    if name.endswith(".lora_A.weight") and module in parameters:
        parameter = parameters[module]
        return {parameter.name: _parameter_update(adapter, module, parameter, where)}
    if name.endswith(".lora_A.weight"):
        return {weight: _linear_update(adapter, module, weight, where)}
    if name.endswith(".lora_B.bias"):
        return {f"{module}.bias": _bias_update(adapter, module, where)}
    if name.endswith(".lora_embedding_A"):
        return {weight: _embedding_update(adapter, module, where)}
    # the second name of a tied tensor, with other values than the first: merging would untie them
    is_untied = name in target.tied and not _repeats(adapter, name, target.tied[name])
    if name in target.shapes or is_untied:
        return {name: _replacement(adapter.tensors[name])}
    return {}


def find_parameter_updates(
    adapter: Adapter, target: TargetModel, where: str
) -> dict[str, WeightUpdate]:
    """Finds the updates of the parameters that peft's target_parameters name."""
    named = find_adapted_parameters(target.model, adapter.config.get("target_parameters") or ())
    updates = find_updates(adapter, target, where) if named else {}
    return {
        parameter.name: updates[parameter.name]
        for parameter in named.values()
        if parameter.name in updates
    }


def merged_value(update: WeightUpdate, base: Value) -> Value:
    """The base tensor with its update merged."""

    def rows(start: int, stop: int) -> Tensor:
        return update.apply(base.rows(start, stop).float(), (slice(start, stop),))

    return Value(base.name, base.shape, base.dtype, rows)


def scale_of(config: Mapping[str, Any], module: str, where: str) -> tuple[float, int]:
    """Returns (scale, rank) of one adapted module, by rank_pattern and alpha_pattern too.

    Raises `UserError` where one of their patterns is wrong.
    """
    ranks = config.get("rank_pattern") or {}
    alphas = config.get("alpha_pattern") or {}
    for pattern in (*ranks, *alphas):
        problem = find_problem(pattern)
        if problem:
            raise UserError(f"{where}: {problem}")
    rank = find_value(module, ranks, config["r"])
    alpha = find_value(module, alphas, config["lora_alpha"])
    if config.get("use_rslora"):
        return alpha / math.sqrt(rank), rank
    return alpha / rank, rank


def check_mergeable(
    adapter: Adapter, updates: Mapping[str, WeightUpdate], target: TargetModel, where: str
) -> None:
    """Raises `UserError` where the base with its updates would not be the model that was
    trained: of tied tensors, the first may be replaced, and its second names have no update.
    """
    reason = why_unsupported(adapter.config)
    changed_firsts = {
        name for name in target.tied.values() if name in updates and not updates[name].is_whole
    }
    tied = sorted(changed_firsts | (updates.keys() & target.tied.keys()))
    if reason is None and tied:
        reason = f"{tied[0]}: is tied to another weight, and merging would untie them"
    if reason is not None:
        raise UserError(f"{where}: {reason}; --adapter-only exports the adapter as it is")


def _parameter_update(
    adapter: Adapter, module: str, parameter: AdaptedParameter, where: str
) -> WeightUpdate:
    """The update of a parameter that is adapted as such: that of a layer's experts, or the weight
    of a linear layer.

    With experts, A [experts rank, in] has the rows of one expert after another. In B [out, rank
    experts] expert e has the columns e, e + experts, ... The parameter is [experts, out, in], or
    transposed [experts, in, out].
    """
    if len(parameter.shape) == 2:
        return _linear_update(adapter, module, parameter.name, where)
    experts = parameter.shape[0]
    a, b, scale, rank = _factors(adapter, module, parameter.name, where, experts=experts)
    inputs = a.shape[1]
    outputs = b.shape[0]
    if parameter.is_transposed:
        shape = (experts, inputs, outputs)
    else:
        shape = (experts, outputs, inputs)

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        whole = (slice(None),) * (3 - len(slices))
        if parameter.is_transposed:
            expert_slice, input_slice, output_slice = (*slices, *whole)
        else:
            expert_slice, output_slice, input_slice = (*slices, *whole)
        b_rows = read_slice(b, (output_slice,)).float()
        updated = weight.clone()
        for place, expert in enumerate(range(*expert_slice.indices(experts))):
            a_rows = slice(expert * rank, (expert + 1) * rank)
            product = b_rows[:, expert::experts] @ read_slice(a, (a_rows, input_slice)).float()
            updated[place] += (product.T if parameter.is_transposed else product) * scale
        return updated

    return WeightUpdate(apply, shape, frozenset({a.name, b.name}))


def _linear_update(adapter: Adapter, module: str, weight_name: str, where: str) -> WeightUpdate:
    a, b, scale, _ = _factors(adapter, module, weight_name, where)
    name = f"{module}.lora_magnitude_vector"
    magnitude = adapter.tensors.get(name)
    if (magnitude is not None) != bool(adapter.config.get("use_dora")):
        raise UserError(
            f"{where}: {name}: {'present' if magnitude else 'missing'}, which contradicts use_dora"
        )
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise UserError(
            f"{where}: {name}: has the shape {list(magnitude.shape)}, but B has {b.shape[0]} rows"
        )

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        rows = slices[:1]
        columns = slices[1:]
        product = read_slice(b, rows).float() @ read_slice(a, (slice(None), *columns)).float()
        weight = weight + product * scale
        if magnitude is None:
            return weight
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=1)
        return (read_slice(magnitude, rows).float() / lengths)[:, None] * weight

    used = {a.name, b.name} | ({magnitude.name} if magnitude else set())
    return WeightUpdate(
        apply, (b.shape[0], a.shape[1]), frozenset(used), needs_whole_rows=magnitude is not None
    )


def _rotation_update(adapter: Adapter, name: str, rows: int, where: str) -> WeightUpdate:
    """The update of a layer of `rows` whose inputs OFT rotates: each block W of its columns becomes
    W Rᵀ.
    """
    vectors = adapter.tensors[name]
    block = adapter.config["oft_block_size"]
    if len(vectors.shape) != 2 or vectors.shape[1] != block * (block - 1) // 2:
        raise UserError(
            f"{where}: {name}: has the shape {list(vectors.shape)}, which is not of blocks of "
            f"{block}; copy both files again"
        )
    blocks = vectors.shape[0]

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        rotations = make_rotations(read(vectors).float(), block)
        parts = weight.view(len(weight), blocks, block)
        # w: row of the weight, b: block, i and j: column of the block, before and after
        return torch.einsum("wbi,bji->wbj", parts, rotations).reshape(weight.shape)

    return WeightUpdate(apply, (rows, blocks * block), frozenset({name}), needs_whole_rows=True)


def _embedding_update(adapter: Adapter, module: str, where: str) -> WeightUpdate:
    """The update of an embedding is (B A)ᵀ: A has a column, the result a row for each token."""
    a, b, scale, _ = _factors(adapter, module, f"{module}.weight", where, kind="lora_embedding_{}")
    if adapter.config.get("use_dora"):
        raise UserError(
            f"{where}: {a.name}: DoRA is not merged into embeddings; --adapter-only exports the "
            "adapter"
        )

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        product = read(b).float() @ read_slice(a, (slice(None), *slices[:1])).float()
        return weight + product.T * scale

    return WeightUpdate(
        apply, (a.shape[1], b.shape[0]), frozenset({a.name, b.name}), needs_whole_rows=True
    )


def _bias_update(adapter: Adapter, module: str, where: str) -> WeightUpdate:
    bias = adapter.tensors[f"{module}.lora_B.bias"]
    scale, _ = scale_of(adapter.config, module, where)
    return WeightUpdate(
        lambda base, slices: base + scale * read_slice(bias, slices).float(),
        bias.shape,
        frozenset({bias.name}),
    )


def _replacement(tensor: StoredTensor) -> WeightUpdate:
    """A tensor that was trained whole (modules_to_save, or a bias)."""
    return WeightUpdate(
        lambda _, slices: as_floating(read_slice(tensor, slices)),
        tensor.shape,
        frozenset({tensor.name}),
        is_whole=True,
    )


def _repeats(adapter: Adapter, name: str, first: str) -> bool:
    """Whether an adapter holds a tied tensor under its second `name` too, with the values of the
    `first`.
    """
    second = adapter.tensors.get(name)
    original = adapter.tensors.get(first)
    return second is not None and original is not None and torch.equal(read(second), read(original))


def _factors(
    adapter: Adapter,
    module: str,
    weight: str,
    where: str,
    *,
    experts: int = 1,
    kind: str = "lora_{}.weight",
) -> tuple[StoredTensor, StoredTensor, float, int]:
    """A [experts r, in], B [out, experts r], scale and rank r of the adapter with the names of
    `module`, for `weight`.
    """
    a_name, b_name = (f"{module}.{kind.format(letter)}" for letter in "AB")
    if b_name not in adapter.tensors:
        raise UserError(f"{where}: {b_name}: missing, although {a_name} exists")
    a = adapter.tensors[a_name]
    b = adapter.tensors[b_name]
    # peft's patterns name a module; where target_parameters names the parameter, that.
    is_parameter = any(
        f".{weight}".endswith(f".{target}")
        for target in adapter.config.get("target_parameters") or ()
    )
    scale, rank = scale_of(adapter.config, weight if is_parameter else module, where)
    width = experts * rank
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != width or b.shape[1] != width:
        of_experts = f" of {experts} experts" if experts > 1 else ""
        raise UserError(
            f"{where}: {a_name}: A and B have the shapes {list(a.shape)} and {list(b.shape)}, not "
            f"the config's rank {rank}{of_experts}"
        )
    return a, b, scale, rank


def _find_misfit(name: str, shape: Shape, target: TargetModel, where: str) -> str | None:
    expected = target.shapes.get(target.tied.get(name, name))
    if expected is None:
        return (
            f"{where}: {name}: adapted, but {target.class_name} of this config has no such tensor"
        )
    if shape != expected:
        return (
            f"{where}: {name}: its update has the shape {list(shape)}, the tensor {list(expected)}"
        )
    return None


ReadDequantized = Callable[[StoredTensor], Tensor]


def find_stored(source: Source, target: TargetModel) -> dict[str, StoredTensor]:
    """Finds the stored tensors by the target's names: the checkpoint's, or the base's under an
    adapter.

    Raises `UserError` where they are not those of `target`.
    """
    tensors = dict(source.tensors)
    for name, tensor in source.adapter.tensors.items() if source.adapter is not None else ():
        if name in tensors and name in target.shapes and tensors[name].shape != tensor.shape:
            # an embedding that was trained whole, and has grown with the tokenizer
            tensors[name] = tensor
    if source.adapter is not None:
        tensors = add_new_head(target.model, tensors, source.adapter.tensors)
    stored = match_tensors(tensors, target, str(source.path), prefixed=source.names_may_be_prefixed)
    if source.adapter is not None:
        return stored | find_own_bases(source.adapter)
    return stored | _find_of_base(source, target, stored)


def _find_of_base(
    source: Source, target: TargetModel, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Finds the tensors beside the language model that the training did not change, in the files of
    a checkpoint's base: there they have their own dtype.
    """
    if not (
        target.beside
        and source.state
        and source.base is not None
        and any(source.base.glob("*.safetensors"))
    ):
        return {}
    base = convert_to_parameters(target.model, read_folder(source.base), str(source.base))
    of_same_shape = {
        name: base[name]
        for name in target.beside & base.keys()
        if base[name].shape == stored[name].shape
    }

    def is_same(name: str) -> bool:
        of_base = of_same_shape[name]
        saved = stored[name]
        return all(
            torch.equal(read_rows(of_base, *bounds).to(saved.dtype), read_rows(saved, *bounds))
            for bounds in row_blocks(of_base.shape)
        )

    return {name: tensor for name, tensor in of_same_shape.items() if is_same(name)}


def choose_written_dtype(
    source: Source, target: TargetModel, options: ExportOptions
) -> torch.dtype:
    """The dtype of the model: the one that was asked for, else the base's."""
    given = options.dtype or source.recipe.get("export_dtype")
    return choose_dtype(
        given, source.base, config_dtype(target.config_json), main_dtype(source.tensors.values())
    )


def find_quantized(source: Source, target: TargetModel) -> frozenset[str]:
    """The names of the weights that were quantized in the training; empty where the base was
    not.
    """
    if source.quantized:  # their files may leave some linear layers as they are
        return frozenset(source.quantized)
    if source.quantization.bits is not None:
        return frozenset(quantized_weights(target.model))
    return frozenset()


def make_dequantizer(source: Source) -> ReadDequantized:
    """A function that reads a weight [rows, columns] of the base in the numbers, of the compute
    dtype, that the training multiplied with.

    It keeps the latest one, for its rows are asked for block by block: each thread needs its own.
    """
    latest: list[tuple[StoredTensor, Tensor]] = []

    def read_dequantized(stored: StoredTensor) -> Tensor:
        if not latest or latest[0][0] is not stored:
            latest.clear()  # freed before the next is computed
            whole = quantize_whole(
                source.quantized.get(stored.name) or read(stored), source.quantization
            )
            latest.append((stored, dequantize_tensor(whole, source.compute_dtype)))
        return latest[0][1]

    return read_dequantized


def plan_values(
    source: Source,
    target: TargetModel,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    onto: MergeOnto,
    read_dequantized: ReadDequantized | None = None,
    *,
    dtype_is_given: bool = False,
) -> dict[str, Value]:
    """Plans every tensor of the result, by name, to be written in `dtype`. Reads no values but
    those of an adapter's tied tensors.

    Beside a language model each tensor that comes from the base's files keeps its dtype there,
    unless the user named one (`dtype_is_given`). Onto `dequantized`, weights that the training
    quantized have the values that it multiplied with. `read_dequantized` is shared by calls whose
    values one thread reads; None makes one.

    Raises `UserError` if the adapter does not fit the target, or the merged model would be another.
    """
    updates: Mapping[str, WeightUpdate] = {}
    if source.adapter is not None:
        updates = find_updates(source.adapter, target, str(source.path))
        check_mergeable(source.adapter, updates, target, str(source.path))
    if onto == "dequantized":
        quantized = find_quantized(source, target)
    else:
        quantized = frozenset(source.quantized)
    read_dequantized = read_dequantized or make_dequantizer(source)
    of_checkpoint = source.adapter is None and bool(source.state)
    values = {}
    for name in target.shapes:
        if name in quantized:
            stored_dtype = source.compute_dtype
        else:
            stored_dtype = stored[name].dtype
        is_saved = of_checkpoint and stored[name].parts[0].path.is_relative_to(source.path)
        if dtype_is_given or is_saved or name not in target.beside:
            written = dtype
        else:
            written = stored_dtype
        value = stored_value(stored[name], name, target.written_dtype(name, stored_dtype, written))
        if name in quantized:
            value = replace(value, rows=dequantized_rows(stored[name], read_dequantized))
        if name in updates:
            values[name] = merged_value(updates[name], value)
        else:
            values[name] = value
    return values


def dequantized_rows(
    stored: StoredTensor, read_dequantized: ReadDequantized
) -> Callable[[int, int], Tensor]:
    """The rows of a `Value` that is read by `read_dequantized`, of `make_dequantizer`."""
    return lambda start, stop: read_dequantized(stored)[start:stop].float()
