"""Where parameters get their values: from the slices of safetensors files, or from a seed and a name.

Both are pure functions of (name, slices), so every layout and every number of ranks starts from the same weights.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from finetune.distributed.parallelize import Slices, Values
from finetune.errors import UserError
from finetune.safetensors_io.tensors import StoredTensor, read_slice

ADAPTER = ".default.weight"  # the end of an adapter's parameter name: ...lora_A.default.weight


def stored_values(model: nn.Module, stored: Mapping[str, StoredTensor], where: str) -> Values:
    """Values read from files, each rank its own slices. `where` names the files in errors.

    Raises `UserError` naming every tensor that is missing, without a place in the model, or of another shape.
    """
    refuse_mismatch(model, stored, where)

    def values(name: str, slices: Slices) -> torch.Tensor:
        return read_slice(stored[base_name(name)], slices)

    return values


def refuse_mismatch(model: nn.Module, stored: Mapping[str, StoredTensor], where: str) -> None:
    """Raises `UserError` where the files do not hold exactly the base model's parameters and saved buffers."""
    needed = saved_buffers(model) | {base_name(n): p for n, p in model.named_parameters() if not is_adapter(n)}
    tied = {base_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - needed.keys()
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    extra = [
        name
        for name in stored
        if name not in needed and name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]
    missing, class_name = needed.keys() - stored.keys(), type(model).__name__
    if (missing or extra) and _is_renamed_by_transformers(model):
        raise UserError(
            f"{where}: the files of {class_name} name or arrange its tensors otherwise than its modules do "
            f"({_listed(extra or missing)} no such parameter), and transformers converts them as it loads; this "
            "conversion is not supported here: name a model of another family"
        )
    problems = []
    if missing:
        problems.append(f"{where}: {_listed(missing)} missing: these are not the weights of {class_name}")
    if extra:
        problems.append(
            f"{where}: {_listed(extra)} without a place in {class_name}: the config does not fit the weights"
        )
    problems += [
        f"{where}: {name} has the shape {list(stored[name].shape)}, but the config says {list(parameter.shape)}"
        for name, parameter in needed.items()
        if name in stored and tuple(stored[name].shape) != tuple(parameter.shape)
    ]
    if problems:
        raise UserError.of(problems)


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds beside the parameters (Gemma 4's `layer_scalar`), by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def load_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Fills the saved buffers of `model`, which are in memory while its parameters are still on meta."""
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(read_slice(stored[name], tuple(slice(0, size) for size in buffer.shape)))


def _is_renamed_by_transformers(model: nn.Module) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    known: Any = model
    return bool(get_model_conversion_mapping(known, add_legacy=False))


def seeded_values(make_twin: Callable[[], nn.Module], seed: int) -> Values:
    """Values for training from random weights: the family's own initialization, drawn module by module from
    (seed, module name). `make_twin` builds the same model on meta, unsharded."""
    twin: Any = make_twin()

    def values(name: str, slices: Slices) -> torch.Tensor:
        module_name, _, leaf = base_name(name).rpartition(".")
        module = twin.get_submodule(module_name)
        if next(module.parameters(recurse=False)).is_meta:
            module.to_empty(device="cpu", recurse=False)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(_seed_of(seed, module_name))
                twin._init_weights(module)
        value: torch.Tensor = getattr(module, leaf).detach()[slices].clone()
        module.to_empty(device="meta", recurse=False)
        return value

    return values


def with_adapters(base: Values, shapes: Mapping[str, torch.Size], seed: int) -> Values:
    """`base` for the frozen parameters; for adapters their start: A uniform (He et al. 2015 with a = sqrt 5, as in
    peft), B zero, and DoRA's magnitude the norm of each row of the base weight (Liu et al. 2024, eq. 5, at B = 0)."""

    def values(name: str, slices: Slices) -> torch.Tensor:
        if not is_adapter(name):
            return base(name, slices)
        if ".lora_A." in name:
            bound = 1 / math.sqrt(shapes[name][1])
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            return torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)[slices]
        if ".lora_B." in name:
            return torch.zeros(shapes[name])[slices]
        if ".lora_magnitude_vector." in name:
            layer = name.split(".lora_magnitude_vector.")[0]
            columns = slice(0, shapes[f"{layer}.lora_A{ADAPTER}"][1])
            rows = base(f"{layer}.base_layer.weight", (slices[0], columns))
            norm: torch.Tensor = torch.linalg.vector_norm(rows.float(), dim=1)
            return norm
        raise AssertionError(f"{name}: an adapter parameter without a start value")

    return values


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """A parameter's name in the base model's files: peft moves an adapted layer's own into `base_layer`."""
    return name.replace(".base_layer.", ".")


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest + (" is" if len(ordered) == 1 else " are")
