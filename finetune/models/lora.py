"""LoRA by peft: adapters injected into a transformers model, their first values, and a layer as one
operation.

A layer's E experts are one parameter, which peft adapts by `target_parameters`. The factors of all
experts are two matrices: A [E r, in] has the experts one after another, B [out, r E] has all
experts' columns of the first rank, then those of the next rank. Where several parameters of a
module are adapted, peft nests the adapters, the last parameter's outermost: the number of
`base_layer`s in an adapter's name says which parameter it adapts.
"""

import copy
import hashlib
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
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
    base_name,
    is_adapter,
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
from finetune.constants import ADAPTER_NAME, ROTATION, Shape
from finetune.distributed.model_parts import (
    Slices,
    Values,
    expert_modules,
    find_float32,
    gather_whole,
    has_other_parts,
    has_scores,
    head_of,
    is_experts,
    set_buffer,
    text_modules,
    text_names,
    trunk_of,
)
from finetune.distributed.tensor_parallel import find_local_head
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, read_folder, read_slice
from finetune.models.cross_entropy import LossHead, replicate
from finetune.models.loss_chunks import HeadProduct
from finetune.units import counted

POSITIONS = ("inv_freq", "embed_positions")  # ends of the names of RoPE's buffers
ADAPTER = ".default.weight"  # the end of an adapter's parameter name: ...lora_A.default.weight


def add_adapters(model: nn.Module, lora: Lora, base_dtype: torch.dtype) -> None:
    """Injects fp32 adapters into `model`, which is on the meta device, and freezes the rest.

    Frozen parameters get `base_dtype`; those of `modules_to_save` are trained in fp32.

    Raises `UserError` where `lora_target_modules`, `lora_target_parameters`, `modules_to_save` or a
    pattern names no part of the model.
    """
    head = next(name for name, module in model.named_modules() if module is head_of(model))
    layers = [name for name, module in text_modules(model) if isinstance(module, nn.Linear)]
    left_out = find_family(trunk_of(model).config.model_type).unadaptable
    known = {find_name_suffix(name) for name in layers if name.rpartition(".")[2] not in left_out}
    refuse_unknown_layers(
        lora, layers, type(model).__name__, has_experts=bool(expert_modules(model))
    )
    names = [name for name, _ in model.named_parameters()]
    refuse_other_parameters(lora.lora_target_parameters, _list_expert_parameters(model), names)
    parameters = find_adapted_parameters(model, lora.lora_target_parameters)
    cast_frozen(model, base_dtype)
    model.requires_grad_(False)
    saved_whole = _find_saved_whole(model, lora)
    with warnings.catch_warnings():  # what peft warns of is refused below
        warnings.filterwarnings(
            "ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning
        )
        warnings.filterwarnings("ignore", r"Invalid `oft_block_size`")
        config = make_config(lora, known, head, saved_whole)
        config.task_type = _find_task(model)
        inject_adapters(model, within_language_model(model, config))
        remake_indices(model)
    if not isinstance(head_of(model), nn.Linear):
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
    places = _find_places(model, lora)
    refuse_unadapted(
        lora, {parameters[place].name if place in parameters else place for place in places}
    )
    config = within_language_model(
        model, config_for_peft(model, config, places - parameters.keys())
    )
    configs: Any = model.peft_config
    configs["default"] = config
    # Only now, for the adapter's config: before, peft would have wrapped these modules, and renamed
    # their parameters.
    saved = {name.rpartition(".")[0] for names in saved_whole.values() for name in names}
    config.modules_to_save = sorted(saved) or None


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters and buffers, but for the buffers that transformers keeps in fp32 in a model
    of 16 bits: RoPE's frequencies, those that its class names, and complex numbers.

    At a distance of some hundred tokens a frequency that is rounded to bf16 turns by another angle.
    `nn.Module.to` would make complex numbers real: those of RoPE in Llama 4's image tower.
    """
    buffers = dict(model.named_buffers())
    in_fp32 = find_float32(model, buffers)
    model.to(dtype)
    for name, buffer in buffers.items():
        if name in in_fp32 or name.endswith(POSITIONS) or buffer.is_complex():
            set_buffer(model, name, buffer)


def adapt_head(model: Any) -> None:
    """Makes peft's layer around the output head the head, so that the loss includes the adapter."""
    layer = head_of(model)
    base = layer.base_layer
    assert hasattr(layer, "lora_A") and not layer.lora_variant, "rules refuse DoRA and OFT here"
    layer.__class__ = _head_class()
    if type(base) is nn.Linear:  # the model computes no loss
        return
    for name in ("input_scale", "logits", "label_smoothing", "token_weights"):
        setattr(layer, name, base.__dict__.pop(name))
    base.__class__ = nn.Linear
    for name, parameter in list(base.named_parameters()):  # a critic has more parameters
        if name not in ("weight", "bias"):
            delattr(base, name)
            layer.register_parameter(name, parameter)


def _find_places(model: nn.Module, lora: Lora) -> set[str]:
    """The names of the modules in `model` that have adapters.

    Raises `UserError` where `oft_block_size` does not divide the inputs of one of them: peft would
    choose another size there.
    """
    places = {
        name.partition(".lora_")[0].partition(ROTATION)[0]
        for name, _ in model.named_parameters()
        if is_adapter(name)
    }
    assert places, "the adapter is empty"
    if lora.oft_block_size is not None:
        layers: dict[str, Any] = {place: model.get_submodule(place) for place in sorted(places)}
        refuse_undivided(lora, {place: layer.in_features for place, layer in layers.items()})
    return places


def _find_task(model: nn.Module) -> str:
    """Returns peft's name of the task of `model`."""
    if not has_scores(model):
        return "CAUSAL_LM"
    return "TOKEN_CLS" if scores_tokens(model.config) else "SEQ_CLS"


def find_name_suffix(name: str) -> str:
    """The end of a layer's name, by which peft finds this kind of layer: from the last part that is
    no number.

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
    is_transposed: bool  # [experts, in, out]


def _list_expert_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that hold experts' matrices, [experts, out, in]."""
    names = []
    for path, module in model.named_modules():
        if is_experts(module):
            parameters = module.named_parameters(recurse=False)
            names += [f"{path}.{name}" for name, parameter in parameters if parameter.dim() == 3]
    return names


def find_adapted_parameters(
    model: nn.Module, targets: Collection[str]
) -> dict[str, AdaptedParameter]:
    """Finds the parameters that `targets` name by the end of their names.

    The rule is peft's (`BaseTuner._inject_parameters`).

    Args:
        model: Without adapters.
        targets: The recipe's `lora_target_parameters`.

    Returns:
        The prefix of the adapter's names -> the parameter that it adapts.
    """
    adapted = {}
    for path, module in model.named_modules():
        named = [
            (f"{path}.{name}", parameter)
            for name, parameter in module.named_parameters(recurse=False)
        ]
        matched = [
            (name, parameter) for name, parameter in named if is_parameter_named(name, targets)
        ]
        is_transposed = bool(getattr(module, "is_transposed", False))
        for depth, (name, parameter) in enumerate(reversed(matched)):
            adapted[path + ".base_layer" * depth] = AdaptedParameter(
                name, tuple(parameter.shape), is_transposed
            )
    return adapted


def inject_adapters(model: nn.Module, config: Any) -> None:
    """Puts the adapters of `config`, a peft LoraConfig, on exactly the modules that it names.

    In many mixtures peft takes `gate_proj` for a layer of a routed expert, as in transformers 4. It
    would move the adapters of shared experts and dense layers onto the routed experts. Here it does
    not translate names.
    """
    from peft import inject_adapter_in_model
    from peft.utils import transformers_weight_conversion as names

    convert: Any = names.convert_peft_config_for_transformers
    names.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        inject_adapter_in_model(config, model)
    finally:
        names.convert_peft_config_for_transformers = convert


def config_for_peft(model: nn.Module, config: Any, adapted: Collection[str]) -> Any:
    """Changes `config` so that plain peft puts the adapters on the modules that were trained.

    A layer that peft would take for a routed expert's (`inject_adapters`) is named by its weight as
    a parameter; the tensors of its adapter are the same.

    Args:
        model: The adapted model.
        config: A LoraConfig or an OFTConfig.
        adapted: The names of all adapted modules.

    Raises:
        UserError: peft could not open the adapter.
    """
    renamed = {name for name in config.target_modules or () if _is_renamed(model, config, name)}
    if not renamed:
        return config
    is_rotation = config.peft_type == "OFT"
    if is_rotation or config.use_dora:
        key = "oft_block_size" if is_rotation else "use_dora"
        raise UserError(
            f"{key}: peft cannot open such an adapter on {', '.join(sorted(renamed))} of "
            f"{type(model).__name__}, which it takes for layers of the routed experts; leave "
            f"{key} out, or name others in lora_target_modules"
        )
    config = copy.deepcopy(config)
    weights = [f"{module}.weight" for module in adapted if is_parameter_named(module, renamed)]
    config.target_parameters = [*(config.target_parameters or ()), *sorted(weights)]
    config.target_modules = sorted(set(config.target_modules) - renamed)
    config.lora_dropout = 0.0  # peft refuses it for parameters, and only training needs it
    for patterns in ("rank_pattern", "alpha_pattern"):
        setattr(
            config,
            patterns,
            {rf"({key})(\.weight)?": value for key, value in getattr(config, patterns).items()},
        )
    return config


def _is_renamed(model: nn.Module, config: Any, target: str) -> bool:
    """Whether plain peft would put the adapters of `target` on other modules."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    alone = copy.copy(config)
    alone.target_modules = {target}
    if config.peft_type != "OFT":
        alone.target_parameters = None
        alone.rank_pattern = {}
        alone.alpha_pattern = {}
    try:
        convert_peft_config_for_transformers(alone, model, None)
    except ValueError:  # `target` is half of a layer that transformers 5 has joined
        return True
    return set(alone.target_modules) != {target}


def _find_saved_whole(model: nn.Module, lora: Lora) -> dict[nn.Parameter, list[str]]:
    """The parameters that `modules_to_save` names -> all their names; a tied one has several."""
    named = names_of_parameters(model)
    text = text_names(model)
    refuse_unmatched("modules_to_save", lora.modules_to_save, named.values(), text)
    return {
        parameter: names
        for parameter, names in named.items()
        if names[0].startswith(text) and is_saved_whole(names, lora)
    }


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter -> all its names; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def within_language_model(model: Any, config: Any) -> Any:
    """Limits the target_modules of `config` to the language model of a vision-language model.

    Its tower has layers of the same names, so the targets become a regular expression.
    """
    if not has_other_parts(model) or not config.target_modules:
        return config
    names = {module: name for name, module in model.named_modules()}
    trunk = names[trunk_of(model)]
    head = names[head_of(model)]
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
        linear_layers: The names that `all-linear` means; it excludes the head and `saved_whole`.
        head: The head's name.
        saved_whole: The parameters that are trained whole, with their names.
    """
    from peft import LoraConfig, OFTConfig

    saved = sorted({name.rpartition(".")[0] for names in saved_whole.values() for name in names})
    targets = set(lora.named_targets)
    if lora.adapts_all:
        targets |= linear_layers - {head.rpartition(".")[2]}
    excluded = [name for name in saved if name.rpartition(".")[2] in targets] or None
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
    """Adds the first values of adapters to those of `base`.

    A is uniform (He et al. 2015 with a = sqrt 5, as in peft) and B is zero. DoRA's magnitude is the
    norm of each row of the base weight (Liu et al. 2024, eq. 5, at B = 0).

    Args:
        base: The values of the frozen parameters.
        shapes: The shape of every parameter, by name.
        seed: The run's seed.
        multiplied: The weights that layers multiply by, where they are not those of `base`.
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
            layer = name.split(".lora_magnitude_vector.")[0]
            columns = slice(0, shapes[f"{layer}.lora_A{ADAPTER}"][1])
            rows = multiplied(f"{layer}.base_layer.weight", (slices[0], columns))
            norm: Tensor = torch.linalg.vector_norm(rows.float(), dim=1)
            return norm
        raise AssertionError(f"{name}: an adapter parameter without a start value")

    return values


def remake_indices(model: nn.Module) -> None:
    """Computes the indices of peft's rotations again, which peft has moved to the meta device."""
    for module in model.modules():
        if type(module).__name__ == "OFTRotationModule":
            size: Any = module.block_size
            rows, columns = torch.triu_indices(size, size, 1)
            module.rows = rows
            module.cols = columns


def make_rotations(vectors: Tensor, block_size: int) -> Tensor:
    """Makes OFT's rotations as peft does: I + 2Q + 2Q^2 + 2Q^3 + Q^4.

    This approximates the Cayley transform (I + Q) / (I - Q) (Qiu et al. 2025, arXiv:2506.19847). Q
    is skew-symmetric, with `vectors` above its diagonal.

    Args:
        vectors: [blocks, size (size - 1) / 2].
        block_size: The size.

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
    """Adds the values of the adapter in `folder` to those of `start`.

    Args:
        model: Unsharded, with its adapters. The files may lack what it trains whole, such as new
            tokens.
        folder: An adapter by peft.
        start: The values of what the adapter does not hold.

    Raises:
        UserError: The adapter's tensors are not those of the model's adapters, by name and shape;
            or its copy of an adapted head, which peft saves beside it, is not the base's.
    """
    where = f"adapter_name_or_path: {folder}"
    stored = {peft_name(name): tensor for name, tensor in read_folder(folder).items()}
    trained = {
        parameter: names
        for parameter, names in names_of_parameters(model).items()
        if parameter.requires_grad
    }
    first_names = {peft_name(name): names[0] for names in trained.values() for name in names}
    bases = {name: peft_name(own) for name, own in list_base_layers(model).items()}
    tensors = {first_names[name]: tensor for name, tensor in stored.items() if name in first_names}
    adapters = {names[0] for names in trained.values() if is_adapter(names[0])}
    missing = sorted(adapters - tensors.keys())
    extra = sorted(stored.keys() - first_names.keys() - set(bases.values()))
    if missing or extra:
        raise _misfit(where, model, missing, extra)
    shapes = {names[0]: tuple(parameter.shape) for parameter, names in trained.items()}
    _check_shapes(where, model, tensors, shapes)
    copies = {name: stored[own] for name, own in bases.items() if own in stored}

    def values(name: str, slices: Slices) -> Tensor:
        if name in tensors:
            return read_slice(tensors[name], slices)
        value = start(name, slices)
        if name in copies:
            copy_of_base = read_slice(copies[name], slices)
            if not torch.equal(copy_of_base, value.to(copy_of_base.dtype)):
                raise UserError(
                    f"{where}: was trained on another {base_name(name)} than the base's, and holds "
                    "it; name the base model that it was trained on"
                )
        return value

    return values


def _misfit(where: str, model: nn.Module, missing: list[str], extra: list[str]) -> UserError:
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
    """Raises `UserError` where a tensor of an adapter has another shape than its parameter."""
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise UserError(
                f"{where}: {peft_name(name)} has the shape {list(tensors[name].shape)}, but "
                f"{type(model).__name__} needs {list(shape)}; name the base model it was trained "
                "on, with the same added_tokens"
            )


def list_base_layers(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter of an adapted layer's base -> its name in that layer."""
    layers = {}
    for names in names_of_parameters(model).values():
        for name in names:
            if ".base_layer." in name:
                layers[names[0]] = name
    return layers


def seed_of(seed: int, name: str) -> int:
    """Makes a 63-bit seed from the run's `seed` and the name of a tensor or module."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


@cache
def _head_class() -> type[nn.Module]:
    """peft's layer around an output head, as a `LossHead`."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    class AdaptedHead(LossHead, PeftLinear):  # type: ignore[misc]
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
            weight = self.without_gradient(weight)
            if self.disable_adapters:
                return HeadProduct(hidden, weight, bias, shard=shard)
            joined = torch.cat((hidden, self._multiply_by_a(hidden)), -1)
            b = self._scaled_b(hidden.device)
            own_b = b.to_local() if isinstance(b, DTensor) else b
            return HeadProduct(joined, weight, bias, own_b, shard)

        def compute_logits(self, hidden: Tensor) -> Tensor:
            base = self.base_layer
            logits = base(replicate(hidden, base.weight))
            if not self.disable_adapters:
                inner = replicate(self._multiply_by_a(hidden), base.weight)
                logits = logits + F.linear(inner, self._scaled_b(hidden.device).to(inner.dtype))
            return gather_whole(logits)

        def _multiply_by_a(self, hidden: Tensor) -> Tensor:
            """Multiplies hidden states [..., hidden] by A: [..., rank], in their dtype."""
            a = self.lora_A[ADAPTER_NAME]
            inner = a(self.lora_dropout[ADAPTER_NAME](hidden.to(a.weight.dtype)))
            return inner.to(hidden.dtype)  # type: ignore[no-any-return]

        def _scaled_b(self, device: torch.device) -> Tensor:
            """B [vocabulary, rank] times the adapter's scale."""
            b = self.lora_B[ADAPTER_NAME]
            if isinstance(b, Fsdp1):  # its weight is whole only in its own forward
                rank = self.r[ADAPTER_NAME]
                weight = b(torch.eye(rank, device=device)).t()
            else:
                weight = b.weight
            return weight * self.scaling[ADAPTER_NAME]  # type: ignore[no-any-return]

    return AdaptedHead
