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

from finetune.errors import UserError
from finetune.sharding.layouts import Slices, Values
from finetune.tensors import StoredTensor, read_slice

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
    """Raises `UserError` where the files do not hold exactly the base model's parameters."""
    needed = {base_name(name): parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
    tied = {base_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - needed.keys()
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    extra = [
        name
        for name in stored
        if name not in needed and name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems = [
        f"{where}: {_listed(needed.keys() - stored.keys())} missing: these are not the weights of {type(model).__name__}"
    ]
    problems = problems if needed.keys() - stored.keys() else []
    if extra:
        problems.append(
            f"{where}: {_listed(extra)} without a place in {type(model).__name__}: the config does not fit the weights"
        )
    problems += [
        f"{where}: {name} has the shape {list(stored[name].shape)}, but the config says {list(parameter.shape)}"
        for name, parameter in needed.items()
        if name in stored and tuple(stored[name].shape) != tuple(parameter.shape)
    ]
    if problems:
        raise UserError.of(problems)


def seeded_values(make_twin: Callable[[], nn.Module], seed: int) -> Values:
    """Values for training from random weights: the family's own initialisation, drawn module by module from
    (seed, module name). `make_twin` builds the same model on meta, unsharded."""
    twin: Any = make_twin()

    def values(name: str, slices: Slices) -> torch.Tensor:
        module_name, _, leaf = name.rpartition(".")
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
