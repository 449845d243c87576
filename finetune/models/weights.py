"""The values of a model's parameters: slices of safetensors files, or random from a seed.

Both are pure functions of (name, slices), so every layout and every number of ranks starts from the same weights.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from finetune.distributed.parallelize import Slices, Values
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, read_slice
from finetune.models.embedding import find_grown, grown_reader, grown_shape
from finetune.models.lora import base_name, seed_of
from finetune.pretrained_config import Vocabulary


def stored_values(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    where: str,
    quantized: Container[str] = (),
    vocabulary: Vocabulary | None = None,
) -> Values:
    """Values read from files, each rank its own slices. `where` names the files in errors; `vocabulary`: what the embedding
    and the head have grown to.

    Raises `UserError` naming every tensor that is missing, without a place in the model, or of another shape.
    """
    grown = find_grown(model, stored, vocabulary)
    fitting = {name: grown_shape(tensor, vocabulary) for name, tensor in grown.items()} if vocabulary else {}
    refuse_mismatch(model, {**stored, **fitting}, where, quantized)
    readers = {name: grown_reader(tensor, vocabulary) for name, tensor in grown.items()} if vocabulary else {}

    def values(name: str, slices: Slices) -> torch.Tensor:
        name = base_name(name)
        return readers[name](slices) if name in readers else read_slice(stored[name], slices)

    return values


def refuse_mismatch(
    model: nn.Module, stored: Mapping[str, StoredTensor], where: str, quantized: Container[str] = ()
) -> None:
    """Raises `UserError` where the files do not hold exactly the base model's parameters and saved buffers; of those that are
    `quantized`, the shape alone is compared."""
    needed = saved_buffers(model) | dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - needed.keys()
    untied = {name: tensor for name, tensor in stored.items() if name not in tied}
    problems = find_mismatches(model, untied, {name: tuple(tensor.shape) for name, tensor in needed.items()}, where)
    problems += [
        f"{where}: {name} is stored as {str(stored[name].dtype).removeprefix('torch.')}, which is quantized in a way that is not "
        "supported; name the unquantized model"
        for name, parameter in needed.items()
        if name in stored
        and name not in quantized
        and _is_quantized(stored[name].dtype)
        and parameter.is_floating_point()
    ]
    if problems:
        raise UserError.of(problems)


def find_mismatches(
    model: nn.Module, stored: Mapping[str, StoredTensor], needed: Mapping[str, tuple[int, ...]], where: str
) -> list[str]:
    """What is wrong with the tensors `stored` as those of `model`, which are `needed` with these shapes: a sentence on those
    that are missing, one on those without a place in it, and one for each of another shape."""
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    extra = {name for name in stored.keys() - needed.keys() if not any(re.search(part, name) for part in ignored)}
    missing, class_name = needed.keys() - stored.keys(), type(model).__name__
    problems = []
    if missing:
        problems.append(f"{where}: {_listed(missing)} missing: these are not the weights of {class_name}")
    if extra:
        problems.append(
            f"{where}: {_listed(extra)} without a place in {class_name}: the config does not fit the weights"
        )
    return problems + [
        f"{where}: {name} has the shape {list(stored[name].shape)}, but the config says {list(shape)}"
        for name, shape in needed.items()
        if name in stored and stored[name].shape != shape
    ]


def _is_quantized(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype mean nothing without scales: int8, and float8 too."""
    return not dtype.is_floating_point or dtype.itemsize < 2


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds beside the parameters (Gemma 4's `layer_scalar`), by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def load_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Fills the saved buffers of `model`, which are in memory while its parameters are still on meta."""
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(read_slice(stored[name], tuple(slice(0, size) for size in buffer.shape)))


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
                torch.manual_seed(seed_of(seed, module_name))
                twin._init_weights(module)
        value: torch.Tensor = getattr(module, leaf).detach()[slices].clone()
        module.to_empty(device="meta", recurse=False)
        return value

    return values


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest + (" is" if len(ordered) == 1 else " are")
