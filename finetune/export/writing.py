"""The weights of the result: dealt out over files, streamed to disk a block at a time."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from finetune.durable import write_file
from finetune.export.prefetch import computed_ahead
from finetune.export.values import Value, raw_bytes, row_blocks, written
from finetune.safetensors_io.header import header_bytes
from finetune.safetensors_io.tensors import INDEX_FILE, SINGLE_FILE


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the result."""

    name: str
    values: tuple[Value, ...]

    @property
    def header(self) -> bytes:
        return header_bytes(((v.name, v.dtype, v.shape) for v in self.values), {"format": "pt"})

    @property
    def byte_count(self) -> int:
        return len(self.header) + sum(value.byte_count for value in self.values)


def shards_of(values: Sequence[Value], max_shard_bytes: int, single: str = SINGLE_FILE) -> list[Shard]:
    """`values` in order, each file filled up to `max_shard_bytes` of values; a larger tensor gets a file of its own."""
    groups: list[list[Value]] = [[]]
    filled = 0
    for value in values:
        if groups[-1] and filled + value.byte_count > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(value)
        filled += value.byte_count
    stem = single.removesuffix(".safetensors")
    names = [f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [single]
    # Wide elements first, so that each tensor begins where its dtype may: mixed dtypes are rare, and order is kept otherwise.
    return [
        Shard(name, tuple(sorted(group, key=lambda value: -value.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


def write_weights(folder: Path, shards: Sequence[Shard], advance: Callable[[int], object]) -> dict[str, bytes]:
    """Writes every shard and, where there are several, their index. `advance` is told the bytes as they are written.

    Returns the xxh3_128 digest of each tensor's bytes, taken from memory on their way to the file.
    """
    digests = {value.name: xxhash.xxh3_128() for shard in shards for value in shard.values}
    for shard in shards:
        write_file(folder / shard.name, _chunks(shard, digests, advance))
    if len(shards) > 1:
        total = sum(value.byte_count for shard in shards for value in shard.values)
        weight_map = {value.name: shard.name for shard in shards for value in shard.values}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX_FILE, [f"{json.dumps(index, indent=2)}\n".encode()])
    return {name: digest.digest() for name, digest in digests.items()}


def _chunks(
    shard: Shard, digests: Mapping[str, xxhash.xxh3_128], advance: Callable[[int], object]
) -> Iterator[bytes | memoryview]:
    """The bytes of one file, in order; those of each tensor are digested too."""
    yield shard.header
    parts = [(value, start, stop) for value in shard.values for start, stop in row_blocks(value.shape)]
    for (value, _, _), block in zip(parts, computed_ahead(written, parts), strict=True):
        if block.numel():
            content = raw_bytes(block)
            digests[value.name].update(content)
            yield content
            advance(block.nbytes)
