"""LoRA adapters merged into their base model, a few rows at a time.

W' = W + scale · B A, with scale = alpha / r, or alpha / sqrt(r) where rank-stabilized (Hu et al. 2021; Kalajdzievski
2023). DoRA (Liu et al. 2024) then gives every row of W' the trained length m: W'' = m · W' / ‖W'‖. All in float32.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import UserError
from finetune.export.blocks import Value, stored_value
from finetune.export.source import Adapter
from finetune.export.target import TargetModel
from finetune.safetensors_io.tensors import StoredTensor, read, read_slice

BASE_LAYER = ".base_layer."
# Settings under which B A is not what is added to W, or something else is.
UNMERGEABLE = (
    "fan_in_fan_out",
    "megatron_config",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "layer_replication",
    "target_parameters",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
INITIALIZATIONS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")  # PiSSA, OLoRA, CorDA … change it


@dataclass(frozen=True, slots=True)
class Update:
    """What an adapter does to one tensor of its base, a few rows at a time, in float32."""

    apply: Callable[[torch.Tensor, int, int], torch.Tensor]  # (rows of the base, start, stop) -> the same rows, updated
    shape: tuple[int, ...]  # of the tensor that it fits
    used: frozenset[str]  # the adapter's tensors in it
    is_whole: bool = False  # whether the tensor is replaced


def find_own_bases(adapter: Adapter) -> dict[str, StoredTensor]:
    """Base tensor -> the copy of it that PEFT saved with the adapter, as it does for an adapted embedding."""
    return {name.replace(BASE_LAYER, "."): t for name, t in adapter.tensors.items() if BASE_LAYER in name}


def find_updates(adapter: Adapter, target: TargetModel, where: str) -> dict[str, Update]:
    """Base tensor -> what the adapter does to it.

    Raises `UserError` where a tensor of the adapter fits no module or has a wrong shape.
    """
    found: dict[str, Update] = {}
    for name in sorted(adapter.tensors):
        module = name.rpartition(".lora_")[0]
        if name.endswith(".lora_A.weight"):
            found[f"{module}.weight"] = _linear_update(adapter, module, where)
        elif name.endswith(".lora_B.bias"):
            found[f"{module}.bias"] = _bias_update(adapter, module, where)
        elif name.endswith(".lora_embedding_A"):
            found[f"{module}.weight"] = _embedding_update(adapter, module, where)
        elif name in target.shapes or (name in target.tied and not _repeats(adapter, name, target.tied[name])):
            found[name] = _replacement(adapter.tensors[name], name)
    used = frozenset(name for name in adapter.tensors if BASE_LAYER in name)
    used |= {name for name, first in target.tied.items() if _repeats(adapter, name, first)}
    used = used.union(*(update.used for update in found.values()))
    problems = [
        f"{where}: {name}: is no part of LoRA for {target.class_name}" for name in sorted(adapter.tensors.keys() - used)
    ]
    fits = {name: update.shape for name, update in found.items()}
    fits |= {name: tensor.shape for name, tensor in find_own_bases(adapter).items()}
    problems += [p for name, shape in fits.items() if (p := _find_misfit(name, shape, target, where))]
    if problems or not found:
        raise UserError.of(problems[:20] or [f"{where}: the adapter is empty"])
    return found


def merged_value(update: Update, base: Value) -> Value:
    """The base tensor with its update merged."""

    def rows(start: int, stop: int) -> torch.Tensor:
        return update.apply(base.rows(start, stop).float(), start, stop)

    return Value(base.name, base.shape, base.dtype, rows)


def scale_of(config: Mapping[str, Any], module: str, where: str) -> tuple[float, int]:
    """(scale, rank) of one adapted module, its entries in rank_pattern and alpha_pattern included."""
    rank = _match_pattern(config.get("rank_pattern"), module, config["r"], where)
    alpha = _match_pattern(config.get("alpha_pattern"), module, config["lora_alpha"], where)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), rank


def _match_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any, where: str) -> Any:
    """peft's rule (peft.utils.other.get_pattern_key): the first pattern that matches the end of the module's name."""
    for key, value in (pattern or {}).items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error:
            raise UserError(f"{where}: {key!r}: a pattern that is no regular expression") from None
    return default


def why_unmergeable(config: Mapping[str, Any]) -> str | None:
    """Why adding B A to the original base is not what was trained, by the adapter's config; None where it is."""
    for key in UNMERGEABLE:
        if config.get(key):
            return f"{key}: this kind of LoRA cannot be merged"
    start = config.get("init_lora_weights", True)
    if start not in INITIALIZATIONS_THAT_KEEP_THE_BASE:
        return f"init_lora_weights: {start} changes the base model, so that this adapter does not fit the original"
    return None


def check_mergeable(adapter: Adapter, updates: Mapping[str, Update], target: TargetModel, where: str) -> None:
    """Raises `UserError` where the base with its updates would not be the model that was trained."""
    reason = why_unmergeable(adapter.config)
    firsts = {name for name in target.tied.values() if name in updates and not updates[name].is_whole}
    tied = sorted(firsts | (updates.keys() & target.tied.keys()))
    if reason is None and tied:
        reason = f"{tied[0]}: is tied to another weight, and merging would untie them"
    if reason is not None:
        raise UserError(f"{where}: {reason}; --adapter-only exports the adapter as it is")


def _linear_update(adapter: Adapter, module: str, where: str) -> Update:
    a, b, scale = _factors(adapter, f"{module}.lora_A.weight", f"{module}.lora_B.weight", where)
    name = f"{module}.lora_magnitude_vector"
    magnitude = adapter.tensors.get(name)
    if (magnitude is not None) != bool(adapter.config.get("use_dora")):
        raise UserError(f"{where}: {name}: {'present' if magnitude else 'missing'}, which contradicts use_dora")
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise UserError(f"{where}: {name}: has the shape {list(magnitude.shape)}, but B has {b.shape[0]} rows")

    def apply(weight: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        weight = weight + (read_slice(b, (slice(start, stop),)).float() @ read(a).float()) * scale
        if magnitude is None:
            return weight
        lengths: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
        return (read_slice(magnitude, (slice(start, stop),)).float() / lengths)[:, None] * weight

    used = {a.name, b.name} | ({magnitude.name} if magnitude else set())
    return Update(apply, (b.shape[0], a.shape[1]), frozenset(used))


def _embedding_update(adapter: Adapter, module: str, where: str) -> Update:
    """The update of an embedding is (B A)ᵀ: A has a column, the result a row for each token."""
    a, b, scale = _factors(adapter, f"{module}.lora_embedding_A", f"{module}.lora_embedding_B", where)
    if adapter.config.get("use_dora"):
        raise UserError(f"{where}: {a.name}: DoRA is not merged into embeddings; --adapter-only exports the adapter")

    def apply(weight: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return weight + (read(b).float() @ read_slice(a, (slice(None), slice(start, stop))).float()).T * scale

    return Update(apply, (a.shape[1], b.shape[0]), frozenset({a.name, b.name}))


def _bias_update(adapter: Adapter, module: str, where: str) -> Update:
    bias = adapter.tensors[f"{module}.lora_B.bias"]
    scale, _ = scale_of(adapter.config, module, where)
    return Update(
        lambda base, start, stop: base + scale * read_slice(bias, (slice(start, stop),)).float(),
        bias.shape,
        frozenset({bias.name}),
    )


def _replacement(tensor: StoredTensor, name: str) -> Update:
    """A tensor that was trained whole (modules_to_save, or a bias)."""
    rows = stored_value(tensor, name, tensor.dtype).rows
    return Update(lambda _, start, stop: rows(start, stop), tensor.shape, frozenset({tensor.name}), is_whole=True)


def _repeats(adapter: Adapter, name: str, first: str) -> bool:
    """Whether an adapter holds a tied tensor under its second `name` too, with the values of the `first`."""
    second, original = adapter.tensors.get(name), adapter.tensors.get(first)
    return second is not None and original is not None and torch.equal(read(second), read(original))


def _factors(adapter: Adapter, a: str, b: str, where: str) -> tuple[StoredTensor, StoredTensor, float]:
    """A [r, in], B [out, r] and the scale of one module, of one rank."""
    if b not in adapter.tensors:
        raise UserError(f"{where}: {b}: missing, although {a} exists")
    one, other = adapter.tensors[a], adapter.tensors[b]
    scale, rank = scale_of(adapter.config, a.rpartition(".lora_")[0], where)
    if len(one.shape) != 2 or len(other.shape) != 2 or one.shape[0] != rank or other.shape[1] != rank:
        raise UserError(
            f"{where}: {a}: A and B have the shapes {list(one.shape)} and {list(other.shape)}, not the config's rank {rank}"
        )
    return one, other, scale


def _find_misfit(name: str, shape: tuple[int, ...], target: TargetModel, where: str) -> str | None:
    expected = target.shapes.get(target.tied.get(name, name))
    if expected is None:
        return f"{where}: {name}: adapted, but {target.class_name} of this config has no such tensor"
    if shape != expected:
        return f"{where}: {name}: its update has the shape {list(shape)}, the tensor {list(expected)}"
    return None
