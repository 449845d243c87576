"""Plans the values of an export's tensors: as stored, dequantized, or with an adapter merged.

Nothing is computed here. Each plan is a function that reads and computes rows when they are
written.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finetune.config.module_names import find_problem, find_value, is_adapter, is_copied
from finetune.config.pretrained import why_unsupported
from finetune.constants import ROTATION, Shape
from finetune.errors import UserError
from finetune.export.publish import ExportOptions, MergeOnto
from finetune.export.source import Adapter, Source
from finetune.export.target import (
    SHOWN_PROBLEMS,
    TargetModel,
    Value,
    as_floating,
    match_tensors,
    read_rows,
    row_blocks,
    stored_value,
)
from finetune.files.tensors import (
    Slices,
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
from finetune.models.weights import convert_to_parameters

BASE_LAYER = ".base_layer."  # peft's name for the layer that an adapter wraps


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What an adapter does to one tensor of its base. It is computed in float32, slice by slice."""

    # (elements of the base in float32, their slices of the tensor) -> the updated elements
    apply: Callable[[Tensor, Slices], Tensor]
    shape: Shape  # the shape that the base tensor must have
    used: frozenset[str]  # names of the adapter's tensors that `apply` reads
    is_replacement: bool = False  # whether the result does not depend on the base tensor
    needs_whole_rows: bool = False  # whether `apply` takes slices of rows only, not of columns


def refuse_idle(adapter: Adapter, where: str) -> None:
    """Raises `UserError` if an adapter changes nothing.

    That is so if it has no tensors but LoRA's factors A and B, and every B is zero.
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
    """Finds the weights of adapted layers that PEFT saved with the adapter.

    PEFT saves that of an adapted embedding, for instance. Returns base tensor's name -> saved copy.
    """
    return {
        name.replace(BASE_LAYER, "."): tensor
        for name, tensor in adapter.tensors.items()
        if _is_own_base(name)
    }


def _is_own_base(name: str) -> bool:
    """Whether a tensor of an adapter is the saved weight of an adapted layer."""
    return BASE_LAYER in name and not is_adapter(name)


def find_updates(adapter: Adapter, target: TargetModel, where: str) -> dict[str, WeightUpdate]:
    """Finds what an adapter does to its base: name of the base tensor -> update.

    Raises `UserError` if the adapter is empty, or one of its tensors belongs to no update or has a
    wrong shape.
    """
    parameters = find_adapted_parameters(
        target.model, adapter.config.get("target_parameters") or ()
    )
    updates: dict[str, WeightUpdate] = {}
    for name in sorted(adapter.tensors):
        updates |= _find_update(name, adapter, target, parameters, where)
    own_bases = set(filter(_is_own_base, adapter.tensors))
    # saved under both names of a tied tensor: the update of the first name covers the second
    repeated = {name for name, first in target.tied.items() if _repeats(adapter, name, first)}
    known_names = own_bases.union(repeated, *(update.used for update in updates.values()))
    problems = [
        f"{where}: {name}: is no part of LoRA for {target.class_name}"
        for name in sorted(adapter.tensors.keys() - known_names)
    ]
    shapes = {name: update.shape for name, update in updates.items()}
    shapes |= {name: tensor.shape for name, tensor in find_own_bases(adapter).items()}
    for name, shape in shapes.items():
        misfit = _find_misfit(name, shape, target, where)
        if misfit is not None:
            problems.append(misfit)
    if problems or not updates:
        raise UserError.of(problems[:SHOWN_PROBLEMS] or [f"{where}: the adapter is empty"])
    return updates


def _find_update(
    name: str,
    adapter: Adapter,
    target: TargetModel,
    parameters: Mapping[str, AdaptedParameter],
    where: str,
) -> dict[str, WeightUpdate]:
    """Finds the update for which the adapter's tensor `name` stands.

    Each update has one such tensor: A stands for B too, for instance. Any other tensor has none.

    Args:
        name: The name of a tensor of the adapter.
        adapter: The adapter.
        target: The model that it changes.
        parameters: `find_adapted_parameters` of the adapter's target_parameters.
        where: Names the adapter in errors.

    Returns:
        {name of the base tensor: update}, or {}.
    """
    if name.endswith(f"{ROTATION}weight"):
        module, _, _ = name.partition(ROTATION)
        weight = f"{module}.weight"
        # 0 if the target has no such tensor, which `find_updates` reports
        row_count = target.shapes[weight][0] if weight in target.shapes else 0
        return {weight: _make_rotation_update(adapter, name, row_count, where)}
    module, _, _ = name.rpartition(".lora_")
    weight = f"{module}.weight"
    if name.endswith(".lora_A.weight") and module in parameters:
        parameter = parameters[module]
        return {parameter.name: _make_parameter_update(adapter, module, parameter, where)}
    if name.endswith(".lora_A.weight"):
        return {weight: _make_linear_update(adapter, module, weight, where)}
    if name.endswith(".lora_B.bias"):
        return {f"{module}.bias": _make_bias_update(adapter, module, where)}
    if name.endswith(".lora_embedding_A"):
        return {weight: _make_embedding_update(adapter, module, where)}
    # The second name of a tied tensor, with other values than under the first: merging would untie
    # the two, which `check_mergeable` refuses.
    is_untied = name in target.tied and not _repeats(adapter, name, target.tied[name])
    if name in target.shapes or is_untied:
        return {name: _make_replacement(adapter.tensors[name])}
    return {}


def find_parameter_updates(
    adapter: Adapter, target: TargetModel, where: str
) -> dict[str, WeightUpdate]:
    """Finds the updates of the parameters that peft's target_parameters name, by their names."""
    adapted = find_adapted_parameters(target.model, adapter.config.get("target_parameters") or ())
    updates = find_updates(adapter, target, where) if adapted else {}
    return {
        parameter.name: updates[parameter.name]
        for parameter in adapted.values()
        if parameter.name in updates
    }


def merged_value(update: WeightUpdate, base: Value) -> Value:
    """Returns the value of a base tensor with its update merged, in float32 until it is written."""

    def rows(start: int, stop: int) -> Tensor:
        return update.apply(base.rows(start, stop).float(), (slice(start, stop),))

    return Value(base.name, base.shape, base.dtype, rows)


def find_scale(config: Mapping[str, Any], module: str, where: str) -> tuple[float, int]:
    """Returns (scale, rank) of LoRA on one module: its update is scale * B A.

    rank_pattern and alpha_pattern may give the module its own rank and alpha.

    Args:
        config: The content of adapter_config.json.
        module: The module's name, or the parameter's if target_parameters names that.
        where: Names the adapter in errors.

    Raises:
        UserError: One of the patterns is no regular expression.
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
    """Raises `UserError` if the base with its updates merged would not be the trained model.

    That is so for updates that would untie tied tensors. Of tied tensors only the first may have an
    update, and only one that replaces it under both names.
    """
    changed_firsts = {
        name
        for name in target.tied.values()
        if name in updates and not updates[name].is_replacement
    }
    changed_seconds = updates.keys() & target.tied.keys()
    untied = sorted(changed_firsts | changed_seconds | _find_trained_apart(adapter, target))
    if untied:
        raise UserError(
            f"{where}: {untied[0]}: is tied to another weight, and merging would untie them; "
            "--adapter-only exports the adapter as it is"
        )


def _find_trained_apart(adapter: Adapter, target: TargetModel) -> set[str]:
    """Finds tied tensors of which an adapter holds one that PEFT trained apart from the other.

    PEFT trains a copy of a module that modules_to_save names. The other module keeps the base's
    values, unless it is copied too. Returns the first names.
    """
    return {
        first
        for name, first in target.tied.items()
        if first in adapter.tensors
        and is_copied(first, adapter.config)
        and not is_copied(name, adapter.config)
    }


def refuse_unsupported(adapter: Adapter, where: str) -> None:
    """Raises `UserError` for a kind of adapter that is not merged here."""
    reason = why_unsupported(adapter.config)
    if reason is not None:
        raise UserError(f"{where}: {reason}; --adapter-only exports the adapter as it is")


def _make_parameter_update(
    adapter: Adapter, module: str, parameter: AdaptedParameter, where: str
) -> WeightUpdate:
    """Makes the update of a parameter that target_parameters names.

    The parameter has two dimensions, as the weight of a linear layer, or holds all experts of a
    layer: [experts, out, in], or transposed [experts, in, out].

    With experts, A [experts rank, in] has the rows of one expert after another. In B [out, rank
    experts] expert e has the columns e, e + experts, ...
    """
    if len(parameter.shape) == 2:
        return _make_linear_update(adapter, module, parameter.name, where)
    experts = parameter.shape[0]
    a, b, scale, rank = _find_factors(adapter, module, parameter.name, where, experts=experts)
    inputs = a.shape[1]
    outputs = b.shape[0]
    if parameter.is_transposed:
        shape = (experts, inputs, outputs)
    else:
        shape = (experts, outputs, inputs)

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        unsliced = (slice(None),) * (len(shape) - len(slices))
        if parameter.is_transposed:
            expert_slice, input_slice, output_slice = (*slices, *unsliced)
        else:
            expert_slice, output_slice, input_slice = (*slices, *unsliced)
        b_rows = read_slice(b, (output_slice,)).float()
        updated = weight.clone()
        for index, expert in enumerate(range(*expert_slice.indices(experts))):
            a_rows = slice(expert * rank, (expert + 1) * rank)
            product = b_rows[:, expert::experts] @ read_slice(a, (a_rows, input_slice)).float()
            updated[index] += (product.T if parameter.is_transposed else product) * scale
        return updated

    return WeightUpdate(apply, shape, frozenset({a.name, b.name}))


def _make_linear_update(
    adapter: Adapter, module: str, weight_name: str, where: str
) -> WeightUpdate:
    """Makes the update of a linear layer's weight W [out, in]: W + scale * B A.

    With DoRA each row of this sum is then scaled to the length that the magnitude vector has for
    it, which takes whole rows.
    """
    a, b, scale, _ = _find_factors(adapter, module, weight_name, where)
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
        columns = slices[1:]  # empty: all columns
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


def _make_rotation_update(adapter: Adapter, name: str, row_count: int, where: str) -> WeightUpdate:
    """Makes the update of a layer whose inputs OFT rotates: each block W of columns becomes W Rᵀ.

    Args:
        adapter: An OFT adapter.
        name: The tensor with the rotations' vectors, [blocks, size (size - 1) / 2].
        row_count: The rows of the layer's weight.
        where: Names the adapter in errors.

    Raises:
        UserError: The vectors do not have the config's block size.
    """
    vectors = adapter.tensors[name]
    block_size = adapter.config["oft_block_size"]
    if len(vectors.shape) != 2 or vectors.shape[1] != block_size * (block_size - 1) // 2:
        raise UserError(
            f"{where}: {name}: has the shape {list(vectors.shape)}, which is not of blocks of "
            f"{block_size}; copy both files again"
        )
    blocks = vectors.shape[0]

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        rotations = make_rotations(read(vectors).float(), block_size)
        parts = weight.view(len(weight), blocks, block_size)
        # w: row of the weight, b: block, i and j: column of the block, before and after
        return torch.einsum("wbi,bji->wbj", parts, rotations).reshape(weight.shape)

    shape = (row_count, blocks * block_size)
    return WeightUpdate(apply, shape, frozenset({name}), needs_whole_rows=True)


def _make_embedding_update(adapter: Adapter, module: str, where: str) -> WeightUpdate:
    """Makes the update of an embedding's weight W [tokens, width]: W + scale * (B A)ᵀ.

    A has a column for each token. Raises `UserError` with DoRA, which is not merged here.
    """
    a, b, scale, _ = _find_factors(
        adapter, module, f"{module}.weight", where, suffix="lora_embedding_{}"
    )
    if adapter.config.get("use_dora"):
        raise UserError(
            f"{where}: {a.name}: DoRA is not merged into embeddings; --adapter-only exports the "
            "adapter"
        )

    def apply(weight: Tensor, slices: Slices) -> Tensor:
        tokens = slices[:1]
        product = read(b).float() @ read_slice(a, (slice(None), *tokens)).float()
        return weight + product.T * scale

    return WeightUpdate(
        apply, (a.shape[1], b.shape[0]), frozenset({a.name, b.name}), needs_whole_rows=True
    )


def _make_bias_update(adapter: Adapter, module: str, where: str) -> WeightUpdate:
    """Makes the update of a layer's bias by the bias of B, which is scaled as B is."""
    bias = adapter.tensors[f"{module}.lora_B.bias"]
    scale, _ = find_scale(adapter.config, module, where)
    return WeightUpdate(
        lambda base, slices: base + scale * read_slice(bias, slices).float(),
        bias.shape,
        frozenset({bias.name}),
    )


def _make_replacement(tensor: StoredTensor) -> WeightUpdate:
    """Makes the update that puts a tensor of the adapter in place of the base's.

    The adapter has such tensors for what was trained whole: modules_to_save, or a bias.
    """
    return WeightUpdate(
        lambda _, slices: as_floating(read_slice(tensor, slices)),
        tensor.shape,
        frozenset({tensor.name}),
        is_replacement=True,
    )


def _repeats(adapter: Adapter, name: str, first: str) -> bool:
    """Whether an adapter holds a tied tensor under both names with the same values.

    `first` is the name under which models store it, and `name` the other one.
    """
    second_tensor = adapter.tensors.get(name)
    first_tensor = adapter.tensors.get(first)
    if second_tensor is None or first_tensor is None:
        return False
    return torch.equal(read(second_tensor), read(first_tensor))


def _find_factors(
    adapter: Adapter,
    module: str,
    weight: str,
    where: str,
    *,
    experts: int = 1,
    suffix: str = "lora_{}.weight",
) -> tuple[StoredTensor, StoredTensor, float, int]:
    """Finds the factors A and B of an adapted weight, their scale and their rank.

    Args:
        adapter: The adapter.
        module: The beginning of the factors' names.
        weight: The name of the base tensor.
        where: Names the adapter in errors.
        experts: How many experts' factors A and B hold; 1: the weight has no experts.
        suffix: The end of the factors' names, with {} for the letter A or B.

    Returns:
        A [experts rank, in], B [out, experts rank], the scale, and the rank of one expert.

    Raises:
        UserError: B is missing, or the shapes do not fit the config's rank.
    """
    a_name, b_name = (f"{module}.{suffix.format(letter)}" for letter in "AB")
    if b_name not in adapter.tensors:
        raise UserError(f"{where}: {b_name}: missing, although {a_name} exists")
    a = adapter.tensors[a_name]
    b = adapter.tensors[b_name]
    # peft's patterns name a module, but a parameter if target_parameters names that.
    is_parameter = any(
        f".{weight}".endswith(f".{target}")  # whole parts of the name
        for target in adapter.config.get("target_parameters") or ()
    )
    scale, rank = find_scale(adapter.config, weight if is_parameter else module, where)
    width = experts * rank
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != width or b.shape[1] != width:
        of_experts = f" of {experts} experts" if experts > 1 else ""
        raise UserError(
            f"{where}: {a_name}: A and B have the shapes {list(a.shape)} and {list(b.shape)}, not "
            f"the config's rank {rank}{of_experts}"
        )
    return a, b, scale, rank


def _find_misfit(name: str, shape: Shape, target: TargetModel, where: str) -> str | None:
    """Says why an update of `shape` does not fit the target's tensor `name`; None if it fits."""
    expected = target.shapes.get(target.tied.get(name, name))
    if expected is None:
        return (
            f"{where}: {name}: adapted, but {target.class_name} of this config has no such tensor"
            "; name the model that the adapter was trained on with --base-model"
        )
    if shape != expected:
        return (
            f"{where}: {name}: its update has the shape {list(shape)}, the tensor {list(expected)}"
            "; name the model that the adapter was trained on with --base-model"
        )
    return None


# a stored weight -> its values as training multiplied with them; see `make_dequantizer`
ReadDequantized = Callable[[StoredTensor], Tensor]


def find_stored(source: Source, target: TargetModel) -> dict[str, StoredTensor]:
    """Finds the stored tensor of each of the target's tensors, by the target's names.

    It is the checkpoint's. If there is an adapter, it is that of the adapter's base before any
    update, or a tensor that the adapter has in place of it.

    Raises `UserError` if tensors are missing, unexpected or of another shape.
    """
    tensors = dict(source.tensors)
    adapter_tensors = {}
    if source.adapter is not None:
        adapter_tensors = source.adapter.tensors | find_own_bases(source.adapter)
    for name, tensor in adapter_tensors.items():
        if name in tensors and name in target.shapes and tensors[name].shape != tensor.shape:
            # an embedding that has grown with the tokenizer, and a head
            tensors[name] = tensor
    if source.adapter is not None:
        tensors = add_new_head(target.model, tensors, source.adapter.tensors)
    stored = match_tensors(tensors, target, str(source.path), prefixed=source.names_may_be_prefixed)
    if source.adapter is not None:
        return stored | find_own_bases(source.adapter)
    return stored | _find_unchanged_in_base(source, target, stored)


def _find_unchanged_in_base(
    source: Source, target: TargetModel, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Finds tensors outside the language model that training left as they are in the base's files.

    In the base's files they have their original dtype, which the checkpoint may have changed.
    Returns them by name; none if the source is no checkpoint of ours, or its base is not on this
    machine.

    Args:
        source: The source, without an adapter.
        target: The model, which may have tensors `beside` its language model.
        stored: The checkpoint's tensors, by the target's names.
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

    def is_unchanged(name: str) -> bool:
        original = of_same_shape[name]
        saved = stored[name]
        return all(
            torch.equal(
                read_rows(original, start, stop).to(saved.dtype), read_rows(saved, start, stop)
            )
            for start, stop in row_blocks(original.shape)
        )

    return {name: tensor for name, tensor in of_same_shape.items() if is_unchanged(name)}


def choose_written_dtype(
    source: Source, target: TargetModel, options: ExportOptions
) -> torch.dtype:
    """Chooses the dtype of the written model.

    It is the user's (`--dtype` or the recipe's export_dtype), else that of the base's files, of the
    config, or of most stored bytes, whichever is known first.
    """
    user_dtype = options.dtype or source.recipe.get("export_dtype")
    stored_dtype = main_dtype(source.tensors.values())
    return choose_dtype(user_dtype, source.base, config_dtype(target.config_json), stored_dtype)


def find_quantized(
    source: Source, target: TargetModel, onto: MergeOnto = "dequantized"
) -> frozenset[str]:
    """Finds the names of the base's weights that are read as training multiplied with them.

    They are the weights that are stored quantized. If none is, and `onto` asks for the base that
    training used, they are all that training quantizes by the recipe.
    """
    # quantized files may have some linear layers unquantized
    if source.quantized or onto == "original" or source.quantization.bits is None:
        return frozenset(source.quantized)
    return frozenset(quantized_weights(target.model))


def make_dequantizer(source: Source) -> ReadDequantized:
    """Makes a function that reads a weight as training multiplied with it.

    The function takes a stored weight of the base and returns it [rows, columns] in the compute
    dtype, quantized and dequantized. It keeps the latest weight, since the caller asks for its rows
    block by block. Each thread needs a function of its own.
    """
    latest: list[tuple[StoredTensor, Tensor]] = []  # empty, or the latest weight

    def read_dequantized(stored: StoredTensor) -> Tensor:
        if not latest or latest[0][0] is not stored:
            latest.clear()  # freed before the next is computed
            quantized = quantize_whole(
                source.quantized.get(stored.name) or read(stored), source.quantization
            )
            latest.append((stored, dequantize_tensor(quantized, source.compute_dtype)))
        _, weight = latest[0]
        return weight

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
    """Plans the value of every tensor of the model, by the target's names, any adapter merged.

    It reads no values but those of an adapter's tied tensors.

    Args:
        source: What is exported.
        target: The model.
        stored: `find_stored` of the two.
        dtype: The dtype in which the model is written.
        onto: The base of the merge. With `dequantized`, weights that training quantized have the
            values that it multiplied with; with `original`, those of the base's files, which are
            dequantized only if they are stored quantized.
        read_dequantized: Shared by calls whose values are read in one thread; None makes one.
        dtype_is_given: Whether the user chose `dtype`. If not, tensors outside the language model
            that come from the base's files keep their dtype.

    Raises:
        UserError: The adapter does not fit the target, or the merged model would not be the trained
            one.
    """
    updates: Mapping[str, WeightUpdate] = {}
    if source.adapter is not None:
        refuse_unsupported(source.adapter, str(source.path))
        updates = find_updates(source.adapter, target, str(source.path))
        check_mergeable(source.adapter, updates, target, str(source.path))
    quantized = find_quantized(source, target, onto)
    read_dequantized = read_dequantized or make_dequantizer(source)
    is_full_checkpoint = source.adapter is None and bool(source.state)
    values = {}
    for name in target.shapes:
        if name in quantized:
            stored_dtype = source.compute_dtype
        else:
            stored_dtype = stored[name].dtype
        # not one that `find_stored` has taken from the base's files
        is_from_checkpoint = is_full_checkpoint and stored[name].parts[0].path.is_relative_to(
            source.path
        )
        if dtype_is_given or is_from_checkpoint or name not in target.beside:
            usual_dtype = dtype
        else:
            usual_dtype = stored_dtype
        written_dtype = target.written_dtype(name, stored_dtype, usual_dtype)
        value = stored_value(stored[name], name, written_dtype)
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
    """Makes the `rows` function of a `Value` whose weight is read by `read_dequantized`."""
    return lambda start, stop: read_dequantized(stored)[start:stop].float()
