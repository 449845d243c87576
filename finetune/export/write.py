"""The weights of the result: planned as values in files, then streamed to disk a block at a
time.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from finetune.config.module_names import PEFT_PREFIX
from finetune.config.pretrained import ADAPTER_WEIGHTS, why_unsupported
from finetune.constants import ADAPTER
from finetune.distributed.model_parts import Values
from finetune.errors import UserError, progress_bar
from finetune.export.base_account import NOTHING_CARRIED, BaseAccount, plan_carried
from finetune.export.merge_choice import MergeChoice
from finetune.export.publish import ExportOptions
from finetune.export.source import Adapter, Source
from finetune.export.target import (
    TargetModel,
    Value,
    as_floating,
    cast_rows,
    prefetch,
    raw_bytes,
    row_blocks,
    stored_value,
)
from finetune.export.values import (
    choose_written_dtype,
    find_quantized,
    find_stored,
    find_updates,
    make_dequantizer,
    plan_values,
)
from finetune.export.vllm_names import name_for_vllm
from finetune.files.durable import sync_folder, write_file
from finetune.files.tensors import INDEX_FILE, SINGLE_FILE, StoredTensor, header_bytes, read_slice
from finetune.models.weights import BoxedTensor, Slices
from finetune.units import read_size

SYNC_BYTES = 64 * 1024 * 1024  # how much is written before the disk is waited for
# of SYNC_BYTES; a slower disk holds the writer up, instead of filling the memory
UNSYNCED_PARTS = 4
# the kernel drops from its cache only whole folios, which may begin in the part before
FOLIO_BYTES = 2 * 1024 * 1024


def make_file(path: Path, content: bytes, size: int) -> None:
    """A new file of `size` bytes that begins with `content`; the rest are zeros, which take no room
    before `fill_file`.

    Raises `FileExistsError` for a file that exists, and any other `OSError` as it comes.
    """
    with path.open("xb", buffering=0) as file:
        file.write(content)
        file.truncate(size)


def fill_file(
    path: Path,
    position: int,
    chunks: Iterable[bytes | memoryview],
    on_disk: Callable[[int], object] = lambda _: None,
) -> None:
    """Writes `chunks` into a file from `position` on, and waits until the disk has them.

    A thread waits for the disk while the next part is written. It then has the kernel forget the
    part, so that whoever reads it next reads the disk, and calls `on_disk` with the number of
    bytes, from the file's beginning, that are there.

    Raises `OSError` as it comes (a full disk, say).
    """
    # macOS has no fdatasync
    wait_for_disk: Callable[[int], object] = getattr(os, "fdatasync", os.fsync)

    def sync(descriptor: int, start: int, end: int, *, is_last: bool = False) -> None:
        (os.fsync if is_last else wait_for_disk)(descriptor)
        _forget(descriptor, start, end)
        on_disk(end)

    with path.open("r+b", buffering=0) as file, ThreadPoolExecutor(max_workers=1) as pool:
        file.seek(position)
        synced = 0
        waiting = list[Future[None]]()
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            position += len(view)
            while view:
                view = view[file.write(view) :]
            if position - synced >= SYNC_BYTES:
                waiting.append(pool.submit(sync, file.fileno(), synced, position))
                synced = position
            if len(waiting) > UNSYNCED_PARTS:
                waiting.pop(0).result()
        waiting.append(pool.submit(sync, file.fileno(), synced, position, is_last=True))
        # each: the kernel reports a failure once, to the part that waited for it
        for future in waiting:
            future.result()


def _forget(descriptor: int, start: int, end: int) -> None:
    """Has the kernel drop these bytes of a file, which are on disk, from its cache, where the
    system can.
    """
    if hasattr(os, "posix_fadvise"):
        start = max(0, start - FOLIO_BYTES)
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of the result."""

    name: str  # its path in the result's folder
    values: tuple[Value, ...]

    @property
    def header(self) -> bytes:
        return header_bytes(((v.name, v.dtype, v.shape) for v in self.values), {"format": "pt"})

    @property
    def byte_count(self) -> int:
        return len(self.header) + sum(value.byte_count for value in self.values)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that will be written. Returned by `plan_weights`."""

    model: tuple[Shard, ...]  # empty where the adapter alone is exported
    adapter: Shard | None
    adapter_config: Mapping[str, Any]  # the content of adapter_config.json
    dtype: torch.dtype  # of the model
    # by the target's names: the checkpoint's, or the base's under an adapter
    stored: Mapping[str, StoredTensor]
    merge: MergeChoice | None = None  # of an adapter that was trained on a quantized base
    is_merged: bool = False  # whether an adapter is in the model's values
    account: BaseAccount = NOTHING_CARRIED  # of the base's tensors

    @property
    def shards(self) -> tuple[Shard, ...]:
        return (*self.model, *([self.adapter] if self.adapter is not None else []))

    @property
    def byte_count(self) -> int:
        return sum(shard.byte_count for shard in self.shards)

    @property
    def values(self) -> list[Value]:
        """The tensors of the model itself, without those that are carried over from the base."""
        return [
            value
            for shard in self.model
            for value in shard.values
            if value.name not in self.account.carried
        ]


# tensor -> xxh3_128 of its bytes, taken from memory on their way to the file
Digests = Mapping[str, str]


def ignore(_file: str, _end: int) -> None:
    """Does nothing: no reader waits for the files."""


def plan_weights(
    source: Source,
    target: TargetModel,
    options: ExportOptions,
    merge: MergeChoice | None = None,
    account: BaseAccount = NOTHING_CARRIED,
) -> Weights:
    """The files of the result, and how each tensor in them follows from what is stored.

    Reads no values, but tied ones.

    Raises `UserError` where the stored tensors are not those of `target`, or an adapter does not
    fit it.
    """
    if source.adapter is None and not options.model:
        raise UserError(f"{source.path}: holds no adapter; omit --adapter-only")
    where = str(source.path)
    dtype = choose_written_dtype(source, target, options)
    adapter = None
    config: Mapping[str, Any] = {}
    if source.adapter is not None and options.adapter:
        config, adapter = _plan_adapter(source.adapter, target, where, options)
    if not options.model:
        return Weights((), adapter, config, dtype, {})
    stored = find_stored(source, target)
    dtype_is_given = bool(options.dtype or source.recipe.get("export_dtype"))
    onto = merge.onto if merge else "original"
    read_dequantized = make_dequantizer(source)
    planned = plan_values(
        source, target, stored, dtype, onto, read_dequantized, dtype_is_given=dtype_is_given
    )
    if onto == "dequantized":
        quantized = find_quantized(source, target)
    else:
        quantized = frozenset[str]()

    def read_base(name: str, slices: Slices) -> Tensor:
        base = stored[name]
        if name in quantized:
            return read_dequantized(base)[slices]
        return read_slice(base, slices)

    values = list(_plan_files(source, target, read_base, planned))
    values += plan_carried(account, source, target, dtype, dtype_is_given=dtype_is_given)
    shards = _split_into_shards(values, read_size(options.max_shard_size))
    is_merged = source.adapter is not None
    return Weights(shards, adapter, config, dtype, stored, merge, is_merged, account)


def _plan_files(
    source: Source, target: TargetModel, read_base: Values, planned: Mapping[str, Value]
) -> Iterator[Value]:
    """The tensors as the files hold them, made from the model's parameters: one file tensor for
    each expert, where the model has one parameter for all experts of a layer.
    """
    updates = {}
    if source.adapter is not None:
        updates = find_updates(source.adapter, target, str(source.path))

    def read(parameter: str, slices: Slices) -> Tensor:
        values = as_floating(read_base(parameter, slices))
        if parameter in updates:
            return updates[parameter].apply(values, slices)
        return values

    def rows(box: BoxedTensor, start: int, stop: int) -> Tensor:
        return box.read((slice(start, stop),), read)

    for name, box in target.files.items():
        first = box.parts[0].name
        parameters = {part.name for part in box.parts}
        if box.parts == BoxedTensor.whole(first, target.shapes[first]).parts:
            yield replace(planned[first], name=name)
        elif parameters & source.quantized.keys() or any(
            updates[parameter].needs_whole_rows for parameter in parameters & updates.keys()
        ):
            raise UserError(
                f"{source.path}: {first}: adapted, but {target.class_name} stores it otherwise in "
                "its files; --adapter-only exports the adapter as it is"
            )
        else:
            yield Value(name, box.shape, planned[first].dtype, partial(rows, box))


def _plan_adapter(
    adapter: Adapter, target: TargetModel, where: str, options: ExportOptions
) -> tuple[Mapping[str, Any], Shard]:
    """The content of adapter_config.json, and the file of its tensors."""
    dtype = None
    if options.dtype and not options.model:
        dtype = getattr(torch, options.dtype)
    if why_unsupported(adapter.config) is None:
        find_updates(adapter, target, where)  # raises unless it is complete and fits
    tensors = dict(adapter.tensors)
    # peft gives each module that it replaces a copy of its own
    for name, first in target.tied.items():
        if first in tensors and name.rpartition(".")[0] in (
            adapter.config.get("modules_to_save") or ()
        ):
            tensors.setdefault(name, tensors[first])
    values = [
        stored_value(tensor, PEFT_PREFIX + name, dtype or tensor.dtype)
        for name, tensor in tensors.items()
    ]
    config: Mapping[str, Any] = adapter.config
    if options.adapter_names == "vllm":
        config, values = name_for_vllm(adapter, values, target, where)
    folder = f"{ADAPTER}/" if options.model else ""
    values.sort(key=lambda value: value.name)
    return config, Shard(folder + ADAPTER_WEIGHTS, tuple(values))


def _split_into_shards(values: Sequence[Value], max_shard_bytes: int) -> tuple[Shard, ...]:
    """`values` in order, each file filled up to `max_shard_bytes` of values; a larger tensor gets a
    file of its own.
    """
    groups: list[list[Value]] = [[]]
    filled = 0
    for value in values:
        if groups[-1] and filled + value.byte_count > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(value)
        filled += value.byte_count
    stem = SINGLE_FILE.removesuffix(".safetensors")
    if len(groups) == 1:
        names = [SINGLE_FILE]
    else:
        numbers = range(1, len(groups) + 1)
        names = [f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" for number in numbers]
    # Wide elements first, so that each tensor is aligned to its dtype: mixed dtypes are rare, and
    # order is kept otherwise.
    return tuple(
        Shard(name, tuple(sorted(group, key=lambda value: -value.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    )


def write_weights(
    folder: Path, weights: Weights, on_disk: Callable[[str, int], object] = ignore
) -> Digests:
    """Fills the files that `make_files` made.

    Calls `on_disk(file, end)`, in a thread, as their first `end` bytes are there.
    """
    digests = {value.name: xxhash.xxh3_128() for shard in weights.shards for value in shard.values}
    with progress_bar("writing", weights.byte_count) as advance:
        for shard in weights.shards:
            content = _stream(shard, digests, advance)
            fill_file(folder / shard.name, len(shard.header), content, partial(on_disk, shard.name))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def make_files(folder: Path, weights: Weights) -> None:
    """Every safetensors file of the result, with its header but without values, and a model's
    index.
    """
    for shard in weights.shards:
        (folder / shard.name).parent.mkdir(exist_ok=True)
        make_file(folder / shard.name, shard.header, shard.byte_count)
    if len(weights.model) > 1:
        total = sum(value.byte_count for shard in weights.model for value in shard.values)
        weight_map = {value.name: shard.name for shard in weights.model for value in shard.values}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX_FILE, [f"{json.dumps(index, indent=2)}\n".encode()])
    for inner in {(folder / shard.name).parent for shard in weights.shards}:
        sync_folder(inner)


def _stream(
    shard: Shard, digests: Mapping[str, xxhash.xxh3_128], advance: Callable[[int], object]
) -> Iterator[memoryview]:
    """The bytes of one file's values, in order; adds those of each tensor to its digest."""
    parts = [
        (value, start, stop) for value in shard.values for start, stop in row_blocks(value.shape)
    ]
    for (value, _, _), block in zip(parts, prefetch(cast_rows, parts), strict=True):
        if block.numel():
            content = raw_bytes(block)
            digests[value.name].update(content)
            yield content
            advance(block.nbytes)
