"""The tensors of the result as values: as they are stored, or with an adapter merged onto its base, dequantized or not."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from finetune.export import lora_merge as lora
from finetune.export.blocks import Value, match_tensors, stored_value
from finetune.export.options import ExportOptions, MergeOnto
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.files.tensors import StoredTensor, main_dtype, read
from finetune.models.quantize import dequantize_tensor, quantized_weights
from finetune.models.quantized_base import quantize_whole
from finetune.safetensors_io.dtypes import choose_dtype, config_dtype

ReadDequantized = Callable[[StoredTensor], torch.Tensor]


def find_stored(source: Source, target: TargetModel) -> dict[str, StoredTensor]:
    """What is stored, by the target's names: the checkpoint's tensors, or the base's under an adapter.

    Raises `UserError` where they are not those of `target`.
    """
    tensors = dict(source.tensors)
    for name, tensor in source.adapter.tensors.items() if source.adapter is not None else ():
        if name in tensors and name in target.shapes and tensors[name].shape != tensor.shape:
            tensors[name] = tensor  # an embedding that was trained whole, and has grown with the tokenizer
    stored = match_tensors(tensors, target, str(source.path), prefixed=source.names_may_be_prefixed)
    return stored if source.adapter is None else stored | lora.find_own_bases(source.adapter)


def choose_written_dtype(source: Source, target: TargetModel, options: ExportOptions) -> torch.dtype:
    """The dtype of the model: the one that was asked for, else the base's."""
    given = options.dtype or source.recipe.get("export_dtype")
    return choose_dtype(given, source.base, config_dtype(target.config_json), main_dtype(source.tensors.values()))


def find_quantized(source: Source, target: TargetModel) -> frozenset[str]:
    """The names of the weights that were quantized in the training; empty where the base was not."""
    if source.quantized:  # their files may leave some linear layers as they are
        return frozenset(source.quantized)
    return frozenset(quantized_weights(target.model)) if source.quantization.bits is not None else frozenset()


def make_dequantizer(source: Source) -> ReadDequantized:
    """A function that reads a weight [rows, columns] of the base in the numbers, of the compute dtype, that the training
    multiplied with. It keeps the latest one, for its rows are asked for block by block: each thread needs its own."""
    latest: list[tuple[StoredTensor, torch.Tensor]] = []

    def read_dequantized(stored: StoredTensor) -> torch.Tensor:
        if not latest or latest[0][0] is not stored:
            latest.clear()  # freed before the next is computed
            whole = quantize_whole(source.quantized.get(stored.name) or read(stored), source.quantization)
            latest.append((stored, dequantize_tensor(whole, source.compute_dtype)))
        return latest[0][1]

    return read_dequantized


def plan_values(
    source: Source,
    target: TargetModel,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    onto: MergeOnto = "original",
    read_dequantized: ReadDequantized | None = None,
) -> dict[str, Value]:
    """Every tensor of the result, written in `dtype`, by name. Reads none of their values.

    `read_dequantized`: for values of several calls that are read by one thread.

    Raises `UserError` where the adapter does not fit the target, or merging it would not give the model that was trained.
    """
    updates: Mapping[str, lora.Update] = {}
    if source.adapter is not None:
        updates = lora.find_updates(source.adapter, target, str(source.path))
        lora.check_mergeable(source.adapter, updates, target, str(source.path))
    quantized = find_quantized(source, target) if onto == "dequantized" else frozenset(source.quantized)
    read_dequantized = read_dequantized or make_dequantizer(source)
    found = {}
    for name in target.shapes:
        stored_dtype = source.compute_dtype if name in quantized else stored[name].dtype
        value = stored_value(stored[name], name, target.written_dtype(name, stored_dtype, dtype))
        if name in quantized:
            value = replace(value, rows=_dequantized_rows(stored[name], read_dequantized))
        found[name] = lora.merged_value(updates[name], value) if name in updates else value
    return found


def _dequantized_rows(stored: StoredTensor, read_dequantized: ReadDequantized) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: read_dequantized(stored)[start:stop].float()
