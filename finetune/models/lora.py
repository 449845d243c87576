"""LoRA and OFT by peft: injects adapters into a transformers model and provides their first values.

A layer's E experts are one parameter, which peft adapts by `target_parameters`. The factors of all
experts are two matrices. A [E r, in] has the experts one after another. B [out, r E] has the
columns of all experts for the first rank, then those for the next rank, and so on. If several
parameters of a module are adapted, peft nests the adapters, the last parameter's outermost: the
number of `base_layer`s in an adapter's name says which parameter it adapts.
"""

import copy
import hashlib
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor

from finetune.config.families import find_family
from finetune.config.module_names import (
    ORIGINAL_MODULE,
    base_name,
    is_adapter,
    is_copied,
    is_parameter_named,
    is_saved_whole,
    peft_name,
    refuse_other_parameters,
    refuse_unadapted,
    refuse_undivided,
    refuse_unknown_layers,
    refuse_unmatched,
)
from finetune.config.pretrained import scores_tokens
from finetune.config.schema import Lora
from finetune.constants import ADAPTER_CONFIG, ADAPTER_NAME, ROTATION, Shape
from finetune.distributed.model_parts import (
    Slices,
    Values,
    expert_modules,
    find_float32,
    gather_whole,
    has_other_parts,
    has_scores,
    head_of,
    name_of,
    set_tensor,
    text_modules,
    text_names,
    trunk_of,
)
from finetune.distributed.tensor_parallel import find_local_head
from finetune.errors import UserError
from finetune.files.json_files import load_json
from finetune.files.tensors import StoredTensor, read, read_folder, read_slice
from finetune.models.cross_entropy import LossHead, replicate
from finetune.models.loss_chunks import HeadProduct
from finetune.models.quantized_layers import list_expert_weights
from finetune.units import counted

POSITIONS = ("inv_freq", "embed_positions")  # how the names of RoPE's buffers end
ADAPTER = ".default.weight"  # how an adapter's parameter name ends: ...lora_A.default.weight


def add_adapters(model: nn.Module, lora: Lora, base_dtype: torch.dtype) -> None:
    """Injects fp32 adapters into `model`, which is on the meta device, and freezes the rest.

    Frozen parameters get `base_dtype`; those of `modules_to_save` are trained in fp32.

    Raises:
        UserError: `lora_target_modules`, `lora_target_parameters`, `modules_to_save` or a pattern
            names no part of the model; `oft_block_size` does not divide a layer's inputs; or peft
            could not open the adapter.
    """
    head = name_of(model, head_of(model))
    layers = [name for name, module in text_modules(model) if isinstance(module, nn.Linear)]
    unadaptable = find_family(trunk_of(model).config.model_type).unadaptable
    kinds = {find_name_suffix(name) for name in layers if _last_part(name) not in unadaptable}
    refuse_unknown_layers(
        lora, layers, type(model).__name__, has_experts=bool(expert_modules(model))
    )
    names = [name for name, _ in model.named_parameters()]
    refuse_other_parameters(lora.lora_target_parameters, list_expert_weights(model), names)
    parameters = find_adapted_parameters(model, lora.lora_target_parameters)
    cast_frozen(model, base_dtype)
    model.requires_grad_(False)
    saved_whole = find_saved_whole(model, lora)
    with warnings.catch_warnings():  # what peft warns of is refused below
        warnings.filterwarnings(
            "ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning
        )
        warnings.filterwarnings("ignore", r"Invalid `oft_block_size`")
        config = make_config(lora, kinds, head, saved_whole)
        config.task_type = _find_task(model)
        inject_adapters(model, within_language_model(model, config))
        remake_indices(model)
    is_head_adapted = not isinstance(head_of(model), nn.Linear)
    if is_head_adapted:
        adapt_head(model)
    for name, parameter in model.named_parameters():
        is_trained = is_adapter(name) or parameter in saved_whole
        if parameter in saved_whole:
            parameter.requires_grad_(True)
        if is_trained:
            parameter.data = parameter.data.to(torch.float32)
        assert parameter.requires_grad == is_trained, (
            f"{name}: requires_grad is {parameter.requires_grad}"
        )
    adapted = _list_adapted(model)
    _check_block_size(model, lora, adapted)
    refuse_unadapted(
        lora, {parameters[name].name if name in parameters else name for name in adapted}
    )
    adapted_modules = adapted - parameters.keys()
    config = within_language_model(model, config_for_peft(model, config, adapted_modules))
    configs: Any = model.peft_config
    configs["default"] = config
    # Set only now, for the adapter's config file: before the injection it would have made peft wrap
    # these modules, which renames their parameters.
    config.modules_to_save = _list_modules(saved_whole) or None


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters and buffers of `model` to `dtype`, except for some buffers.

    These are the buffers that transformers keeps in fp32 in a 16-bit model, and complex ones. The
    first are those that the model's class names, and RoPE's frequencies: rounded to bf16, a
    frequency gives another angle at a distance of some hundred tokens. Complex buffers (RoPE in
    Llama 4's image tower) would be made real by `nn.Module.to`.
    """
    buffers = dict(model.named_buffers())
    names_in_fp32 = find_float32(model, buffers)
    model.to(dtype)
    for name, buffer in buffers.items():
        if name in names_in_fp32 or name.endswith(POSITIONS) or buffer.is_complex():
            set_tensor(model, name, buffer)


def adapt_head(model: Any) -> None:
    """Makes peft's layer around the output head a `LossHead`, so that the loss uses the adapter."""
    layer = head_of(model)
    base = layer.base_layer
    assert hasattr(layer, "lora_A") and not layer.lora_variant, "rules refuse DoRA and OFT here"
    layer.__class__ = _head_class()
    if type(base) is nn.Linear:
        # `install_loss` was not called, as in the plan's trace: the model computes no loss, for
        # which alone a head needs what follows.
        return
    # The loss and a critic's parameters move from the base to the layer, which is the head now.
    for name in ("input_scale", "logits", "label_smoothing", "token_weights"):
        setattr(layer, name, base.__dict__.pop(name))
    base.__class__ = nn.Linear
    for name, parameter in list(base.named_parameters()):
        if name not in ("weight", "bias"):
            delattr(base, name)
            layer.register_parameter(name, parameter)


def _list_adapted(model: nn.Module) -> set[str]:
    """The prefixes of the adapters' names: those of adapted modules, and those of adapted
    parameters as `find_adapted_parameters` has them.
    """
    adapted = set()
    for name, _ in model.named_parameters():
        if is_adapter(name):
            before_lora, _, _ = name.partition(".lora_")
            module_name, _, _ = before_lora.partition(ROTATION)
            adapted.add(module_name)
    assert adapted, "the adapter is empty"
    return adapted


def _check_block_size(model: nn.Module, lora: Lora, adapted: Collection[str]) -> None:
    """Raises `UserError` if `oft_block_size` does not divide the inputs of an adapted layer.

    peft would choose another size there.
    """
    if lora.oft_block_size is not None:
        layers: dict[str, Any] = {name: model.get_submodule(name) for name in sorted(adapted)}
        refuse_undivided(lora, {name: layer.in_features for name, layer in layers.items()})


def _last_part(name: str) -> str:
    """The part of a dotted name behind the last dot."""
    return name.rpartition(".")[2]


def _list_modules(saved_whole: Mapping[nn.Parameter, Sequence[str]]) -> list[str]:
    """The names of the modules that hold these parameters, sorted."""
    return sorted({name.rpartition(".")[0] for names in saved_whole.values() for name in names})


def _find_task(model: nn.Module) -> str:
    """Returns peft's name for what `model` computes, its `task_type`."""
    if not has_scores(model):
        return "CAUSAL_LM"
    return "TOKEN_CLS" if scores_tokens(model.config) else "SEQ_CLS"


def find_name_suffix(name: str) -> str:
    """The end of a layer's name by which peft finds all layers of its kind.

    It starts at the last part of the name that is not a number.

    >>> find_name_suffix("layers.0.self_attn.q_proj"), find_name_suffix("layers.1.adapters.0.1")
    ('q_proj', 'adapters.0.1')
    """
    parts = name.split(".")
    first = max((index for index, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[first:])


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """A parameter with an adapter. Returned by `find_adapted_parameters`."""

    name: str  # in the base model
    shape: Shape  # [experts, out, in], or [out, in]
    is_transposed: bool  # whether `shape` is [experts, in, out] instead


def find_adapted_parameters(
    model: nn.Module, targets: Collection[str]
) -> dict[str, AdaptedParameter]:
    """Finds the parameters whose names end with one of `targets`.

    Names them as peft does (`BaseTuner._inject_parameters`), which nests the adapters of a module's
    parameters.

    Args:
        model: Without adapters.
        targets: The recipe's `lora_target_parameters`.

    Returns:
        The prefix of the adapter's names -> the parameter that it adapts.
    """
    adapted = {}
    for path, module in model.named_modules():
        parameters = [
            (f"{path}.{name}", parameter)
            for name, parameter in module.named_parameters(recurse=False)
        ]
        matched = [
            (name, parameter) for name, parameter in parameters if is_parameter_named(name, targets)
        ]
        is_transposed = bool(getattr(module, "is_transposed", False))
        for depth, (name, parameter) in enumerate(reversed(matched)):  # the last is outermost
            adapted[path + ".base_layer" * depth] = AdaptedParameter(
                name, tuple(parameter.shape), is_transposed
            )
    return adapted


def inject_adapters(model: nn.Module, config: Any) -> None:
    """Puts adapters on exactly the modules that `config`, a peft LoraConfig or OFTConfig, names.

    In many mixtures peft takes `gate_proj` for a layer of a routed expert, as in transformers 4. It
    would move the adapters of shared experts and dense layers onto the routed experts. So its
    translation of names is switched off during the injection.
    """
    from peft import inject_adapter_in_model
    from peft.utils import transformers_weight_conversion as peft_conversion

    convert: Any = peft_conversion.convert_peft_config_for_transformers
    peft_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        inject_adapter_in_model(config, model)
    finally:
        peft_conversion.convert_peft_config_for_transformers = convert


def config_for_peft(model: nn.Module, config: Any, adapted: Collection[str]) -> Any:
    """Returns a config with which plain peft puts the adapters on the modules that were trained.

    peft would move the adapters of some layers onto the routed experts (`inject_adapters`). Those
    layers are not named as modules; their weights are named as parameters instead. The adapter's
    tensors are the same. Returns `config` itself if there are no such layers.

    Args:
        model: The adapted model.
        config: A LoraConfig or an OFTConfig.
        adapted: The names of all adapted modules.

    Raises:
        UserError: peft could not open the adapter.
    """
    moved = {name for name in config.target_modules or () if _is_moved_by_peft(model, config, name)}
    if not moved:
        return config
    is_rotation = config.peft_type == "OFT"
    if is_rotation or config.use_dora:
        key = "oft_block_size" if is_rotation else "use_dora"
        raise UserError(
            f"{key}: peft cannot open such an adapter on {', '.join(sorted(moved))} of "
            f"{type(model).__name__}, which it takes for layers of the routed experts; leave "
            f"{key} out, or name others in lora_target_modules"
        )
    config = copy.deepcopy(config)
    weights = [f"{module}.weight" for module in adapted if is_parameter_named(module, moved)]
    config.target_parameters = [*(config.target_parameters or ()), *sorted(weights)]
    config.target_modules = sorted(set(config.target_modules) - moved)
    config.lora_dropout = 0.0  # peft refuses it for parameters, and only training needs it
    for pattern_key in ("rank_pattern", "alpha_pattern"):
        # A pattern that matched a layer's name must match the name of the layer's weight as well.
        patterns = getattr(config, pattern_key)
        setattr(
            config,
            pattern_key,
            {rf"({name})(\.weight)?": value for name, value in patterns.items()},
        )
    return config


def _is_moved_by_peft(model: nn.Module, config: Any, target: str) -> bool:
    """Whether plain peft would put the adapters of `target` on other modules.

    Asks peft's own translation, with a config that has no other target.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    single = copy.copy(config)
    single.target_modules = {target}
    if config.peft_type != "OFT":
        single.target_parameters = None
        single.rank_pattern = {}
        single.alpha_pattern = {}
    try:
        convert_peft_config_for_transformers(single, model, None)
    except ValueError:  # `target` is half of a layer that transformers 5 has joined
        return True
    return set(single.target_modules) != {target}


def find_saved_whole(model: nn.Module, lora: Lora) -> dict[nn.Parameter, list[str]]:
    """Maps each parameter that `modules_to_save` names to all its names.

    Only parameters of the language model count. Raises `UserError` if a pattern names none.
    """
    names_by_parameter = names_of_parameters(model)
    text = text_names(model)
    refuse_unmatched("modules_to_save", lora.modules_to_save, names_by_parameter.values(), text)
    return {
        parameter: names
        for parameter, names in names_by_parameter.items()
        if names[0].startswith(text) and is_saved_whole(names, lora)
    }


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Maps each parameter to all its names; a tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def within_language_model(model: Any, config: Any) -> Any:
    """Returns a config whose target_modules are limited to the language model.

    The tower of a vision-language model has layers of the same names, so the targets become a
    regular expression. Returns `config` itself for other models.
    """
    if not has_other_parts(model) or not config.target_modules:
        return config
    trunk = name_of(model, trunk_of(model))
    head = name_of(model, head_of(model))
    targets = "|".join(
        re.escape(target.removeprefix(f"{trunk}.")) for target in sorted(config.target_modules)
    )
    pattern = rf"{re.escape(trunk)}\.(.*\.)?({targets})"
    if is_parameter_named(head, config.target_modules):
        pattern = rf"{pattern}|{re.escape(head)}"
    config = copy.copy(config)
    config.target_modules = pattern
    return config


def make_config(
    lora: Lora,
    linear_layers: set[str],
    head: str,
    saved_whole: Mapping[nn.Parameter, Sequence[str]],
) -> Any:
    """Makes peft's LoraConfig or OFTConfig from the recipe's keys.

    Args:
        lora: The recipe's keys.
        linear_layers: The ends of names that `all-linear` means. The head among them is left out.
        head: The head's name.
        saved_whole: The parameters that are trained whole, with their names; they get no adapters.
    """
    from peft import LoraConfig, OFTConfig

    targets = set(lora.named_targets)
    if lora.adapts_all:
        targets |= linear_layers - {_last_part(head)}
    excluded = [name for name in _list_modules(saved_whole) if _last_part(name) in targets] or None
    if lora.oft_block_size is not None:
        return OFTConfig(
            oft_block_size=lora.oft_block_size,
            target_modules=sorted(targets),
            exclude_modules=excluded,
            bias="none",
        )
    return LoraConfig(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=sorted(targets),
        target_parameters=list(lora.lora_target_parameters) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=dict(lora.rank_pattern or {}),
        alpha_pattern=dict(lora.alpha_pattern or {}),
        exclude_modules=excluded,
        bias="none",
    )


def with_adapters(
    base: Values, shapes: Mapping[str, torch.Size], seed: int, multiplied: Values | None = None
) -> Values:
    """Returns the values of `base`, and for adapters their first values.

    A is uniform (He et al. 2015 with a = sqrt 5, as in peft) and B is zero. DoRA's magnitude is the
    norm of each row of the base weight (Liu et al. 2024, eq. 5, at B = 0). OFT's vectors are zero.

    Args:
        base: The values of all other parameters.
        shapes: The shape of each adapter parameter, by name.
        seed: The run's seed.
        multiplied: The weights that layers multiply by, if they are not those of `base`.
    """
    multiplied = multiplied or base

    def values(name: str, slices: Slices) -> Tensor:
        if not is_adapter(name):
            return base(name, slices)
        if ".lora_A." in name:
            bound = 1 / math.sqrt(shapes[name][1])
            generator = torch.Generator().manual_seed(seed_of(seed, name))
            return torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)[slices]
        if ".lora_B." in name or ROTATION in name:
            return torch.zeros(shapes[name])[slices]
        if ".lora_magnitude_vector." in name:
            layer, _, _ = name.partition(".lora_magnitude_vector.")
            _, width = shapes[f"{layer}.lora_A{ADAPTER}"]
            rows_slice = slices[0]  # each row of the weight has one magnitude
            rows = multiplied(f"{layer}.base_layer.weight", (rows_slice, slice(0, width)))
            norm: Tensor = torch.linalg.vector_norm(rows.float(), dim=1)
            return norm
        raise AssertionError(f"{name}: an adapter parameter without a start value")

    return values


def remake_indices(model: nn.Module) -> None:
    """Makes the index tensors of peft's rotations again, which peft has moved to meta."""
    for module in model.modules():
        if type(module).__name__ == "OFTRotationModule":
            size: Any = module.block_size
            rows, columns = torch.triu_indices(size, size, 1)
            module.rows = rows
            module.cols = columns


def make_rotations(vectors: Tensor, block_size: int) -> Tensor:
    """Makes OFT's rotations as peft does: I + 2Q + 2Q^2 + 2Q^3 + Q^4.

    This approximates the Cayley transform (I + Q) / (I - Q) (Qiu et al. 2025, arXiv:2506.19847). Q
    is skew-symmetric, and its elements above the diagonal are `vectors`.

    Args:
        vectors: [blocks, size (size - 1) / 2], row by row.
        block_size: The size of a block.

    Returns:
        [blocks, size, size].
    """
    rows, columns = torch.triu_indices(block_size, block_size, 1)
    q = vectors.new_zeros(len(vectors), block_size, block_size)
    q[:, rows, columns] = vectors
    q = q - q.transpose(1, 2)
    square = q @ q
    identity = torch.eye(block_size, dtype=q.dtype, device=q.device)
    return identity + 2 * q + 2 * square + 2 * square @ q + square @ square


def read_adapter(model: nn.Module, folder: Path, start: Values) -> Values:
    """Returns the values of the adapter in `folder`, and those of `start` for everything else.

    The adapter may lack parameters that the model trains whole, such as new tokens. peft may have
    saved copies of frozen weights with the adapter, such as an adapted layer's own or the
    embedding's; they must equal the base's, which is checked when the value is read.

    Args:
        model: Unsharded, with its adapters.
        folder: A peft adapter.
        start: The values of the parameters that the adapter does not hold.

    Raises:
        UserError: The adapter's tensors do not match the model's adapters by name and shape; or,
            when called, the values find that a copied weight is not the base's.
    """
    where = f"adapter_name_or_path: {folder}"
    config = load_json(folder / ADAPTER_CONFIG)
    stored = _read_stored(folder)
    trained = {
        parameter: names
        for parameter, names in names_of_parameters(model).items()
        if parameter.requires_grad
    }
    # A tied parameter is known by its first name; the files may have it under any.
    first_names = {peft_name(name): names[0] for names in trained.values() for name in names}
    tensors = {first_names[name]: tensor for name, tensor in stored.items() if name in first_names}
    adapters = {names[0] for names in trained.values() if is_adapter(names[0])}
    frozen = {
        parameter: names
        for parameter, names in names_of_parameters(model).items()
        if parameter not in trained
    }
    base_layers = _list_copied(model, stored, frozen.values())
    missing = sorted(adapters - tensors.keys())
    extra = sorted(stored.keys() - first_names.keys() - set(base_layers.values()))
    if missing or extra:
        raise _make_mismatch_error(where, model, missing, extra)
    shapes = {names[0]: tuple(parameter.shape) for parameter, names in trained.items()}
    _check_shapes(where, model, tensors, shapes)
    base_copies = {name: stored[inner] for name, inner in base_layers.items() if inner in stored}
    frozen_shapes = {names[0]: tuple(parameter.shape) for parameter, names in frozen.items()}
    _check_shapes(where, model, base_copies, frozen_shapes)
    _refuse_untied(where, stored, trained.values(), config)

    def values(name: str, slices: Slices) -> Tensor:
        if name in tensors:
            return read_slice(tensors[name], slices)
        value = start(name, slices)
        if name in base_copies:
            copied = read_slice(base_copies[name], slices)
            if not torch.equal(copied, value.to(copied.dtype)):
                raise UserError(
                    f"{where}: was trained on another {base_name(name)} than the base's, and holds "
                    "it; name the base model that it was trained on"
                )
        return value

    return values


def _list_copied(
    model: nn.Module, stored: Collection[str], frozen: Iterable[list[str]]
) -> dict[str, str]:
    """Maps the first names of frozen parameters to those under which an adapter may hold copies.

    Args:
        model: With its adapters.
        stored: The names of the adapter's tensors.
        frozen: The names of each frozen parameter.
    """
    copied = {name: peft_name(inner) for name, inner in list_base_layers(model).items()}
    return copied | {names[0]: name for names in frozen for name in names if name in stored}


def _read_stored(folder: Path) -> dict[str, StoredTensor]:
    """Opens an adapter's tensors by peft's names."""
    return {
        peft_name(name): tensor
        for name, tensor in read_folder(folder).items()
        if ORIGINAL_MODULE not in name  # a copy of the base's, which nothing reads
    }


def _refuse_untied(
    where: str,
    stored: Mapping[str, StoredTensor],
    trained: Iterable[list[str]],
    config: Mapping[str, Any],
) -> None:
    """Raises `UserError` if an adapter was trained with a value for each name of a tied parameter.

    PEFT trains a copy of a tied weight that modules_to_save names, and may leave the other one as
    it is in the base. Here the two stay one.

    Args:
        where: The adapter, for the message.
        stored: The adapter's tensors by name.
        trained: The names of each trained parameter; one, if it is not tied.
        config: The content of adapter_config.json.
    """
    for names in ([peft_name(name) for name in each] for each in trained):
        own = [name for name in names if name in stored]
        if not own or _is_one(names, stored, config):
            continue
        raise UserError(
            f"{where}: {own[0]} was trained apart from the weight that it is tied to, which would "
            "be tied again here; name a base with both weights in its files and "
            "tie_word_embeddings: false in config.json"
        )


def _is_one(
    names: list[str], stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> bool:
    """Whether an adapter has one value for all names of a parameter."""
    own = [read(stored[name]) for name in names if name in stored]
    others = (name for name in names if name not in stored)
    return all(torch.equal(value, own[0]) for value in own) and all(
        is_copied(name, config) for name in others
    )


def _make_mismatch_error(
    where: str, model: nn.Module, missing: list[str], extra: list[str]
) -> UserError:
    """Makes the error for an adapter with `missing` and `extra` tensors; it names the first."""
    if missing:
        first = f"it has no {peft_name(missing[0])}"
    else:
        first = f"{extra[0]} has no place there"
    return UserError(
        f"{where}: does not fit {type(model).__name__} with the recipe's LoRA keys: {first} "
        f"({counted(len(missing), 'tensor')} missing, {len(extra)} without a place); name the "
        "base model it was trained on, and leave the LoRA keys to the adapter"
    )


def _check_shapes(
    where: str, model: nn.Module, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, Shape]
) -> None:
    """Raises `UserError` if one of an adapter's `tensors` has another shape than its parameter.

    shapes: The parameters' shapes by name; the adapter need not have all of them.
    """
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise UserError(
                f"{where}: {peft_name(name)} has the shape {list(tensors[name].shape)}, but "
                f"{type(model).__name__} needs {list(shape)}; name the base model it was trained "
                "on, with the same added_tokens, or merge it (finetune export) and train that model"
            )


def list_base_layers(model: nn.Module) -> dict[str, str]:
    """Maps the first name of each parameter in an adapted layer's base to its name in the layer.

    The two differ for a tied parameter, such as the embedding that an adapted head shares.
    """
    names_in_layers = {}
    for names in names_of_parameters(model).values():
        for name in names:
            if ".base_layer." in name:
                names_in_layers[names[0]] = name
    return names_in_layers


def seed_of(seed: int, name: str) -> int:
    """Makes a 63-bit seed from the run's `seed` and the name of a tensor or module."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


@cache
def _head_class() -> type[nn.Module]:
    """Makes the class of an adapted output head: peft's `Linear` as a `LossHead`.

    It is made at the first call and not at import, because importing peft takes a second.
    """
    from peft.tuners.lora.layer import Linear as PeftLinear

    class AdaptedHead(LossHead, PeftLinear):  # type: ignore[misc]
        """Declares the attributes of peft's layer that it reads."""

        base_layer: Any
        lora_A: Any  # noqa: N815
        lora_B: Any  # noqa: N815
        lora_dropout: Any
        r: Any
        scaling: Any
        disable_adapters: bool

        def prepare(self, hidden: Tensor) -> HeadProduct:
            base = self.base_layer
            weight, bias, shard = find_local_head(base.weight, base.bias)
            weight = self.detach_if_frozen(weight)
            if self.disable_adapters:
                return HeadProduct(hidden, weight, bias, shard=shard)
            hidden_and_inner = torch.cat((hidden, self._multiply_by_a(hidden)), -1)
            scaled_b = self._scale_b(hidden.device)
            local_b = scaled_b.to_local() if isinstance(scaled_b, DTensor) else scaled_b
            return HeadProduct(hidden_and_inner, weight, bias, local_b, shard)

        def compute_logits(self, hidden: Tensor) -> Tensor:
            base = self.base_layer
            logits = base(replicate(hidden, base.weight))
            if not self.disable_adapters:
                inner = replicate(self._multiply_by_a(hidden), base.weight)
                logits = logits + F.linear(inner, self._scale_b(hidden.device).to(inner.dtype))
            return gather_whole(logits)

        def _multiply_by_a(self, hidden: Tensor) -> Tensor:
            """Computes hidden states [..., hidden] times A: [..., rank], in the dtype of hidden."""
            a = self.lora_A[ADAPTER_NAME]
            inner = a(self.lora_dropout[ADAPTER_NAME](hidden.to(a.weight.dtype)))
            return inner.to(hidden.dtype)  # type: ignore[no-any-return]

        def _scale_b(self, device: torch.device) -> Tensor:
            """Computes B times the adapter's scale: [vocabulary, rank]."""
            b = self.lora_B[ADAPTER_NAME]
            if isinstance(b, Fsdp1):
                # FSDP1 gathers the weight only for the module's own forward, so that computes it.
                rank = self.r[ADAPTER_NAME]
                weight = b(torch.eye(rank, device=device)).t()
            else:
                weight = b.weight
            return weight * self.scaling[ADAPTER_NAME]  # type: ignore[no-any-return]

    return AdaptedHead
