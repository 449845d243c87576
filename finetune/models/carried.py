"""Tensors in a base's files that its class in transformers has no place for: an export carries them
over unchanged.

Most are layers for multi-token prediction; others are constants of older versions, or parts that
the class leaves out.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash

from finetune.config.multi_token import count_predicting_layers, predicts_further
from finetune.files.tensors import StoredTensor, read_slice
from finetune.units import counted

# What transformers itself passes over in the files of older versions
# (`_adjust_missing_and_unexpected_keys`).
CONSTANTS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
HASHED_ROWS = 4096  # at once
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
NAMED_PATTERNS = 4  # in a sentence; more are named by the modules above them


def find_carried(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors that an export of `model` carries over.

    `stored`: of `convert_to_parameters`, in which they keep the names of the files.
    """
    places = model.state_dict().keys()
    may_carry = carries(model)
    return {
        name: tensor for name, tensor in stored.items() if name not in places and may_carry(name)
    }


def carries(model: Any) -> Callable[[str], bool]:
    """Returns a function of a name: whether a tensor of the files that has no place in `model` is
    carried over. Others are an error.
    """
    left_out = "|".join(
        (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *CONSTANTS)
    )
    pattern = re.compile(left_out)
    is_predicting = predicts(model)
    return lambda name: pattern.search(name) is not None or is_predicting(name)


def predicts(model: Any) -> Callable[[str], bool]:
    """Returns a function of a name: whether a tensor of the files that has no place in `model`
    belongs to its layers of multi-token prediction.
    """
    promised = count_predicting_layers(model.config.to_dict())
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0) or 0)
    return lambda name: promised > 0 and predicts_further(name, layers, promised)


def hash_tensors(tensors: Mapping[str, StoredTensor]) -> str:
    """A hash of the names, shapes, dtypes and values of tensors on disk, a few rows at a time."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        height = tensor.shape[0] if tensor.shape else 1
        for start in range(0, height, HASHED_ROWS):
            rows = read_slice(tensor, (slice(start, start + HASHED_ROWS),) if tensor.shape else ())
            digest.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe_carried(tensors: Mapping[str, StoredTensor], class_name: str) -> str:
    """Describes the carried tensors, for the first screen, the export's last lines and the model
    card.
    """
    patterns = ", ".join(list_patterns(tensors))
    held = counted(len(tensors), "tensor")
    return (
        f"{held} of the base ({patterns}), which {class_name} does not hold: untrained, and "
        "exported unchanged"
    )


def list_patterns(names: Iterable[str]) -> list[str]:
    """Patterns that match `names`, for a sentence: each number that varies as `*`, or the modules
    that hold them all.

    >>> list_patterns(
    ...     ["mtp.layers.0.experts.1.up_proj.weight", "mtp.layers.0.experts.2.up_proj.weight"]
    ... )
    ['mtp.layers.0.experts.*.up_proj.weight']
    """
    numbers_of: dict[str, list[list[str]]] = {}
    for name in names:
        numbers_of.setdefault(NUMBER.sub("*", name), []).append(NUMBER.findall(name))
    patterns = sorted(_fill_in(pattern, numbers) for pattern, numbers in numbers_of.items())
    depth = max((pattern.count(".") for pattern in patterns), default=0)
    while len(patterns) > NAMED_PATTERNS and depth > 0:
        patterns = sorted({_cut_at_depth(pattern, depth) for pattern in patterns})
        depth -= 1
    return patterns


def _fill_in(pattern: str, numbers: list[list[str]]) -> str:
    """`pattern` with each number that is the same in all names in place of its `*`."""
    for of_place in zip(*numbers, strict=True):
        pattern = pattern.replace("*", of_place[0] if len(set(of_place)) == 1 else "\0", 1)
    return pattern.replace("\0", "*")


def _cut_at_depth(pattern: str, depth: int) -> str:
    """The first `depth` parts of a name, and `*` for the others.

    >>> _cut_at_depth("mtp.layers.*.mlp.up_proj.weight", 2), _cut_at_depth("mtp.norm", 2)
    ('mtp.layers.*', 'mtp.norm')
    """
    parts = pattern.split(".")
    if len(parts) <= depth:
        return pattern
    return ".".join((*parts[:depth], "*"))
