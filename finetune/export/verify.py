"""Proof that what was written is what the checkpoint holds: names, values, and logits in a fresh process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
import xxhash

from finetune.errors import UserError
from finetune.export import lora_merge as lora
from finetune.export import target as architecture
from finetune.export.logits import streamed_logits
from finetune.export.reload_check import rows_by_safetensors
from finetune.export.source import Source
from finetune.export.target import Architecture
from finetune.export.values import Value, raw_bytes, read_rows, row_blocks
from finetune.export.writing import Shard
from finetune.safetensors_io.tensors import StoredTensor, read_files

# The largest ‖exported − checkpoint‖ / ‖checkpoint‖ of the logits that is let pass, both computed in float32. Zero where
# no rounding happened; the rest allows for rounding every weight once (bfloat16 keeps 8 bits, float16 11) and for the
# order of the sums in a merge.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
ORIGINAL_MODULE = ".original_module."  # peft's name for what a module that was trained whole (modules_to_save) replaces
DIFFERENCES_LISTED = 10


def verify_weights(
    folder: Path, shards: Sequence[Shard], digests: Mapping[str, bytes], advance: Callable[[int], object]
) -> None:
    """Reads every value of `shards` back and compares its digest with the one that `write_weights` took.

    Raises `UserError` listing the tensors that differ.
    """
    found = read_files(folder / shard.name for shard in shards)
    expected = {value.name: value for shard in shards for value in shard.values}
    problems = [f"{name}: not in the files" for name in expected if name not in found]
    problems += [f"{name}: in the files, but not of this model" for name in found if name not in expected]
    for name, value in expected.items():
        if name in found and (found[name].shape, found[name].dtype) != (value.shape, value.dtype):
            problems.append(f"{name}: {found[name].dtype} {found[name].shape}, not {value.dtype} {value.shape}")
    _refuse(problems, "the files do not hold what the model needs")
    differing = [
        f"{value.name}: differs from the checkpoint"
        for shard in shards
        for value in shard.values
        if _digest_read_back(folder / shard.name, value, advance) != digests[value.name]
    ]
    _refuse(differing, "values read back differ from the checkpoint's")


def _digest_read_back(file: Path, value: Value, advance: Callable[[int], object]) -> bytes:
    digest = xxhash.xxh3_128()

    def add(rows: torch.Tensor) -> int:
        digest.update(raw_bytes(rows))
        return rows.nbytes

    for start, stop in row_blocks(value.shape):
        advance(rows_by_safetensors(file, value.name, start, stop, add))
    return digest.digest()


@contextmanager
def checkpoint_logits(
    source: Source, built: Architecture, stored: Mapping[str, StoredTensor], trust_remote_code: bool = False
) -> Iterator[Future[torch.Tensor]]:
    """The logits of the stored values, in float32, computed in a thread while the block goes on, but no longer than it.

    An adapter is run by peft, beside its base and not merged.
    """
    model, adapter, ended = built.model, source.adapter, Event()
    if adapter is not None:
        model = _with_adapter(
            architecture.build(source.description, trust_remote_code=trust_remote_code).model, adapter.config
        )

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        if ended.is_set():
            raise CancelledError
        is_base = lora.BASE_LAYER in name or ORIGINAL_MODULE in name
        if adapter is not None and not is_base and lora.peft_name(name) in adapter.tensors:
            return read_rows(adapter.tensors[lora.peft_name(name)], start, stop)
        name = name.replace(lora.BASE_LAYER, ".").replace(ORIGINAL_MODULE, ".")
        return read_rows(stored[built.tied.get(name, name)], start, stop)

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield pool.submit(streamed_logits, model, rows)
        finally:
            ended.set()


def logits_bound(stored: Mapping[str, StoredTensor], dtype: torch.dtype, *, is_merged: bool) -> float:
    """The largest relative difference of the logits that writing `stored` in `dtype` explains."""
    floats = {tensor.dtype for tensor in stored.values() if tensor.dtype.is_floating_point}
    is_lossless = all(found.itemsize == 1 or torch.promote_types(found, dtype) == dtype for found in floats)
    return 0.0 if is_lossless and not is_merged else BOUNDS[dtype]


def verify_logits(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> float:
    """The relative difference of a fresh process's logits, `theirs`, from the checkpoint's.

    Raises `UserError` where it is over `bound`.
    """
    if not torch.isfinite(ours).all():
        raise UserError(
            "the checkpoint's logits are not finite: the training has diverged; export an earlier checkpoint"
        )
    difference = float((theirs - ours).norm() / ours.norm().clamp_min(1e-30))
    if not difference <= bound:
        raise UserError(
            f"not exported: in a fresh process the logits differ by {difference:.2g} from the checkpoint's, where {bound:g} "
            "is the most that rounding explains"
        )
    return difference


def _with_adapter(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """`model`, on meta, with peft's adapter layers in it, on meta too."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, inject_adapter_in_model

    known = {key: config[key] for key in LoraConfig.__dataclass_fields__ if key in config}
    with init_empty_weights(include_buffers=False):
        inject_adapter_in_model(LoraConfig(**known | {"inference_mode": True}), model)
    return model.eval()


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        more = [f"and {len(problems) - DIFFERENCES_LISTED} more"] if len(problems) > DIFFERENCES_LISTED else []
        raise UserError.of([f"not exported: {what}", *problems[:DIFFERENCES_LISTED], *more])
