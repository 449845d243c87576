"""Carried tensors: those in a base's files that its transformers class has no parameter for.

An export carries them over unchanged. Most belong to layers for multi-token prediction; others are
constants that older versions saved, or parts that the class leaves out.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash

from finetune.config.multi_token import count_predicting_layers, predicts_further
from finetune.files.tensors import StoredTensor, read_slice
from finetune.units import counted

# Names of constants in files of older versions, which transformers ignores too
# (`_adjust_missing_and_unexpected_keys`).
CONSTANTS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
HASHED_ROWS = 4096  # of a tensor, read at once
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # a part of a name between two dots
NAMED_PATTERNS = 4  # the most in a sentence; if there are more, it names the modules above them


def find_carried(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Finds the tensors that an export of `model` carries over; empty if there are none.

    stored: As `convert_to_parameters` returns it: a tensor without a place in the model has the
        name that it has in the files.
    """
    model_names = model.state_dict().keys()
    may_carry = make_carried_filter(model)
    return {
        name: tensor
        for name, tensor in stored.items()
        if name not in model_names and may_carry(name)
    }


def make_carried_filter(model: Any) -> Callable[[str], bool]:
    """Makes a filter of names: does an export carry over the tensor with this name?

    It expects names of tensors in the files that have no place in `model`. The tensors that it
    rejects are an error of the files.
    """
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    pattern = re.compile("|".join((*ignored, *CONSTANTS)))
    is_predicting = make_prediction_filter(model)
    return lambda name: pattern.search(name) is not None or is_predicting(name)


def make_prediction_filter(model: Any) -> Callable[[str], bool]:
    """Makes a filter of names: does the tensor belong to a layer for multi-token prediction?

    It expects names of tensors in the files that have no place in `model`.
    """
    promised = count_predicting_layers(model.config.to_dict())
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0) or 0)
    return lambda name: promised > 0 and predicts_further(name, layers, promised)


def hash_tensors(tensors: Mapping[str, StoredTensor]) -> str:
    """Hashes the names, dtypes, shapes and values of tensors on disk, HASHED_ROWS rows at a time.

    Returns 32 hexadecimal digits.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        is_scalar = not tensor.shape
        rows = 1 if is_scalar else tensor.shape[0]
        for start in range(0, rows, HASHED_ROWS):
            slices = () if is_scalar else (slice(start, start + HASHED_ROWS),)
            values = read_slice(tensor, slices)
            digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe_carried(tensors: Mapping[str, StoredTensor], class_name: str) -> str:
    """Describes the carried tensors in a sentence, without its period.

    It is shown on the first screen, among the export's last lines and in the model card.
    """
    patterns = ", ".join(list_patterns(tensors))
    count = counted(len(tensors), "tensor")
    return (
        f"{count} of the base ({patterns}), which {class_name} does not hold: untrained, and "
        "exported unchanged"
    )


def list_patterns(names: Iterable[str]) -> list[str]:
    """Lists patterns that match `names`, few enough for a sentence.

    A number that varies is `*`. If there are more than NAMED_PATTERNS, the ends of the patterns are
    cut off, so that they name the modules that hold the tensors.

    >>> list_patterns(
    ...     ["mtp.layers.0.experts.1.up_proj.weight", "mtp.layers.0.experts.2.up_proj.weight"]
    ... )
    ['mtp.layers.0.experts.*.up_proj.weight']
    """
    numbers_of: dict[str, list[list[str]]] = {}
    for name in names:
        numbers_of.setdefault(NUMBER.sub("*", name), []).append(NUMBER.findall(name))
    patterns = sorted(_fill_in_numbers(pattern, numbers) for pattern, numbers in numbers_of.items())
    depth = max((pattern.count(".") for pattern in patterns), default=0)
    while len(patterns) > NAMED_PATTERNS and depth > 0:
        patterns = sorted({_cut_at_depth(pattern, depth) for pattern in patterns})
        depth -= 1
    return patterns


def _fill_in_numbers(pattern: str, numbers: list[list[str]]) -> str:
    """Replaces each `*` of `pattern` whose number is the same in all names by the number.

    numbers: For each name, its numbers in the order of the pattern's `*`.

    >>> _fill_in_numbers("layers.*.experts.*.weight", [["3", "0"], ["3", "1"]])
    'layers.3.experts.*.weight'
    """
    for values in zip(*numbers, strict=True):
        is_same = len(set(values)) == 1
        # A number that varies becomes \0 for now, so that the next value finds the next `*`.
        pattern = pattern.replace("*", values[0] if is_same else "\0", 1)
    return pattern.replace("\0", "*")


def _cut_at_depth(pattern: str, depth: int) -> str:
    """Returns the first `depth` parts of a pattern, with one `*` in place of all further parts.

    >>> _cut_at_depth("mtp.layers.*.mlp.up_proj.weight", 2), _cut_at_depth("mtp.norm", 2)
    ('mtp.layers.*', 'mtp.norm')
    """
    parts = pattern.split(".")
    if len(parts) <= depth:
        return pattern
    return ".".join((*parts[:depth], "*"))
