"""Plans the safetensors files of an export, and streams their values to disk block by block."""

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
from finetune.constants import ADAPTER, Shape
from finetune.distributed.model_parts import Slices, Values
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
from finetune.models.weights import BoxedTensor
from finetune.units import read_size

SYNC_BYTES = 64 * 1024 * 1024  # a part: as much as is written before the disk is waited for
# The most parts that wait for the disk. A slower disk then holds the writer up, instead of filling
# the memory.
UNSYNCED_PARTS = 4
# The kernel drops only whole folios, its units of cache, and one may begin in the part before: at
# most this much earlier.
FOLIO_BYTES = 2 * 1024 * 1024


def make_file(path: Path, content: bytes, size: int) -> None:
    """Makes a new file of `size` bytes that begins with `content`, for `fill_file` to complete.

    The rest are zeros that take no room on disk. Raises `FileExistsError` if the file exists, and
    any other `OSError` as it comes.
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
    """Writes `chunks` into an existing file from byte `position` on, and waits for the disk.

    After each part of SYNC_BYTES a thread waits for the disk, while the next part is written. Then
    it has the kernel drop the part from its cache, so that whoever reads it next reads the disk.
    Last it calls `on_disk` with the end of the part: the bytes up to there, counted from the file's
    beginning, are on disk.

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
        part_begin = 0  # the first part includes what `make_file` wrote
        waiting = list[Future[None]]()
        for chunk in chunks:
            unwritten = memoryview(chunk).cast("B")
            position += len(unwritten)
            while unwritten:  # an unbuffered write may write less than it was given
                unwritten = unwritten[file.write(unwritten) :]
            if position - part_begin >= SYNC_BYTES:
                waiting.append(pool.submit(sync, file.fileno(), part_begin, position))
                part_begin = position
            if len(waiting) > UNSYNCED_PARTS:
                waiting.pop(0).result()
        waiting.append(pool.submit(sync, file.fileno(), part_begin, position, is_last=True))
        # Each is asked: the kernel reports a failure once, to the part that waited for it.
        for future in waiting:
            future.result()


def _forget(descriptor: int, start: int, end: int) -> None:
    """Has the kernel drop bytes of a file, which are on disk, from its cache.

    Without posix_fadvise (on macOS) it does nothing.
    """
    if hasattr(os, "posix_fadvise"):
        start = max(0, start - FOLIO_BYTES)
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of the export."""

    name: str  # the file's path in the export's folder
    values: tuple[Value, ...]  # in the order of the file

    @property
    def header(self) -> bytes:
        entries = ((value.name, value.dtype, value.shape) for value in self.values)
        return header_bytes(entries, {"format": "pt"})

    @property
    def byte_count(self) -> int:
        return len(self.header) + sum(value.byte_count for value in self.values)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that an export will have. Returned by `plan_weights`."""

    model: tuple[Shard, ...]  # empty: only the adapter is exported
    adapter: Shard | None  # None: no adapter is exported
    adapter_config: Mapping[str, Any]  # the content of adapter_config.json; empty without adapter
    dtype: torch.dtype  # the dtype of the model
    # `find_stored`: the tensors that the model's values are made of; empty without a model
    stored: Mapping[str, StoredTensor]
    merge: MergeChoice | None = None  # the base of the merge; None: not QLoRA, or no merge
    is_merged: bool = False  # whether an adapter is merged into the model's values
    account: BaseAccount = NOTHING_CARRIED  # what the export makes of the base's tensors

    @property
    def shards(self) -> tuple[Shard, ...]:
        return (*self.model, *([self.adapter] if self.adapter is not None else []))

    @property
    def byte_count(self) -> int:
        return sum(shard.byte_count for shard in self.shards)

    @property
    def values(self) -> list[Value]:
        """The values of the model's parameters: all but the tensors carried over from the base."""
        return [
            value
            for shard in self.model
            for value in shard.values
            if value.name not in self.account.carried
        ]


# tensor's name -> hexadecimal xxh3_128 of its bytes, computed in memory as they were written
Digests = Mapping[str, str]


def find_misfits(
    expected: Mapping[str, tuple[object, Shape]], stored: Mapping[str, tuple[object, Shape]]
) -> list[str]:
    """Finds how the tensors of files differ from those of a plan, both name -> (type, shape)."""
    problems = [f"{name}: not in the files" for name in expected if name not in stored]
    problems += [
        f"{name}: in the files, but not in the model" for name in stored if name not in expected
    ]
    for name in expected:
        if name in stored and stored[name] != expected[name]:
            kind, shape = stored[name]
            expected_kind, expected_shape = expected[name]
            problems.append(f"{name}: {kind} {shape}, not {expected_kind} {expected_shape}")
    return problems


def ignore(_file: str, _end: int) -> None:
    """Stands in for `on_disk` where nobody reads the files while they are written."""


def plan_weights(
    source: Source,
    target: TargetModel,
    options: ExportOptions,
    merge: MergeChoice | None = None,
    account: BaseAccount = NOTHING_CARRIED,
) -> Weights:
    """Plans the files of an export and the value of each tensor in them.

    It reads no values but those of tied tensors, which are compared, and of tensors beside a
    language model, which are compared with the base's.

    Args:
        source: What is exported.
        target: The model that is written.
        options: Whether model and adapter are written, the dtype, and the size of a file.
        merge: Which base a QLoRA adapter is merged onto; None: the original, or nothing is merged.
        account: With the tensors that are carried over from the base: training never touched them,
            and the target has no parameter for them.

    Raises:
        UserError: The stored tensors are not those of `target`, the adapter does not fit it, or an
            adapter is asked for and there is none.
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
    quantized = find_quantized(source, target, onto)

    def read_base(name: str, slices: Slices) -> Tensor:
        base = stored[name]
        if name in quantized:
            return read_dequantized(base)[slices]
        return read_slice(base, slices)

    values = list(_plan_file_tensors(source, target, read_base, planned))
    values += plan_carried(account, source, target, dtype, dtype_is_given=dtype_is_given)
    shards = _split_into_shards(values, read_size(options.max_shard_size))
    is_merged = source.adapter is not None
    return Weights(shards, adapter, config, dtype, stored, merge, is_merged, account)


def _plan_file_tensors(
    source: Source, target: TargetModel, read_base: Values, planned: Mapping[str, Value]
) -> Iterator[Value]:
    """Plans the tensors that the files hold, which may differ from the model's parameters.

    Most of them are whole parameters. But a file tensor may also be a part of a parameter, or made
    of several: where one parameter holds all experts of a layer, the files may have a tensor for
    each expert.

    Args:
        source: What is exported.
        target: The model. Its `files` say of which parts a file tensor is made.
        read_base: Reads slices of a parameter of the base.
        planned: The values of the whole parameters, from `plan_values`.

    Raises:
        UserError: The files hold parts of a parameter that is stored quantized, or whose update
            takes whole rows only.
    """
    updates = {}
    if source.adapter is not None:
        updates = find_updates(source.adapter, target, str(source.path))

    def read_updated(parameter: str, slices: Slices) -> Tensor:
        base = as_floating(read_base(parameter, slices))
        if parameter in updates:
            return updates[parameter].apply(base, slices)
        return base

    def read_rows(box: BoxedTensor, start: int, stop: int) -> Tensor:
        return box.read((slice(start, stop),), read_updated)

    for name, box in target.files.items():
        first = box.parts[0].name
        parameters = {part.name for part in box.parts}
        is_whole_parameter = box.parts == BoxedTensor.whole(first, target.shapes[first]).parts
        if is_whole_parameter:
            yield replace(planned[first], name=name)
        elif parameters & source.quantized.keys() or any(
            updates[parameter].needs_whole_rows for parameter in parameters & updates.keys()
        ):
            raise UserError(
                f"{source.path}: {first}: adapted, but {target.class_name} stores it otherwise in "
                "its files; --adapter-only exports the adapter as it is"
            )
        else:
            yield Value(name, box.shape, planned[first].dtype, partial(read_rows, box))


def _plan_adapter(
    adapter: Adapter, target: TargetModel, where: str, options: ExportOptions
) -> tuple[Mapping[str, Any], Shard]:
    """Plans the adapter's files: returns the content of adapter_config.json and the weights.

    The tensors keep their dtype, unless the adapter is exported alone and --dtype is given. Raises
    `UserError` if the adapter does not fit the target, or vLLM's names are asked for and vLLM does
    not load it.
    """
    dtype = None  # each tensor's own
    if options.dtype and not options.model:
        dtype = getattr(torch, options.dtype)
    if why_unsupported(adapter.config) is None:
        find_updates(adapter, target, where)  # raises unless the adapter is complete and fits
    tensors = dict(adapter.tensors)
    # peft gives each module in modules_to_save a copy of the weights, even of tied ones
    saved_modules = adapter.config.get("modules_to_save") or ()
    for name, first in target.tied.items():
        module, _, _ = name.rpartition(".")
        if first in tensors and module in saved_modules:
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
    """Divides `values`, in order, into files of at most `max_shard_bytes` of values.

    A larger tensor gets a file of its own. A single file is named without a number.
    """
    groups: list[list[Value]] = [[]]
    group_bytes = 0  # of the last group
    for value in values:
        if groups[-1] and group_bytes + value.byte_count > max_shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(value)
        group_bytes += value.byte_count
    stem = SINGLE_FILE.removesuffix(".safetensors")
    if len(groups) == 1:
        names = [SINGLE_FILE]
    else:
        numbers = range(1, len(groups) + 1)
        names = [f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" for number in numbers]
    # Within a file wide elements come first, so that each tensor is aligned to its dtype. Tensors
    # of one width keep their order, and mixed dtypes are rare.
    return tuple(
        Shard(name, tuple(sorted(group, key=lambda value: -value.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    )


def write_weights(
    folder: Path, weights: Weights, on_disk: Callable[[str, int], object] = ignore
) -> Digests:
    """Computes all values and writes them into the files that `make_files` made.

    A thread calls `on_disk(file, end)` whenever more is on disk: the first `end` bytes of that
    file. Returns the digest of each tensor's bytes.
    """
    digests = {value.name: xxhash.xxh3_128() for shard in weights.shards for value in shard.values}
    with progress_bar("writing", weights.byte_count) as advance:
        for shard in weights.shards:
            content = _stream(shard, digests, advance)
            fill_file(folder / shard.name, len(shard.header), content, partial(on_disk, shard.name))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def make_files(folder: Path, weights: Weights) -> None:
    """Makes all safetensors files with their headers but without values, and the model's index.

    A model in one file has no index.
    """
    for shard in weights.shards:
        (folder / shard.name).parent.mkdir(exist_ok=True)
        make_file(folder / shard.name, shard.header, shard.byte_count)
    if len(weights.model) > 1:
        total = sum(value.byte_count for shard in weights.model for value in shard.values)
        weight_map = {value.name: shard.name for shard in weights.model for value in shard.values}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX_FILE, [f"{json.dumps(index, indent=2)}\n".encode()])
    for parent in {(folder / shard.name).parent for shard in weights.shards}:
        sync_folder(parent)


def _stream(
    shard: Shard, digests: Mapping[str, xxhash.xxh3_128], advance: Callable[[int], object]
) -> Iterator[memoryview]:
    """Yields the bytes of a file's values in order, a block of rows at a time.

    It adds them to the digest of their tensor, and calls `advance` with their number once the
    caller comes back for the next block.
    """
    block_places = [
        (value, start, stop) for value in shard.values for start, stop in row_blocks(value.shape)
    ]
    blocks = prefetch(cast_rows, block_places)
    for (value, _, _), block in zip(block_places, blocks, strict=True):
        if block.numel():
            content = raw_bytes(block)
            digests[value.name].update(content)
            yield content
            advance(block.nbytes)
