"""Proof that what was written is what the checkpoint holds: names, values, and logits in a fresh process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.export import architecture, fresh, lora
from finetune.export.architecture import Architecture
from finetune.export.fresh_process import FreshProcess
from finetune.export.streaming import streamed_logits
from finetune.export.values import read_rows, row_blocks
from finetune.export.writing import Shard, computed_ahead
from finetune.tensors import StoredTensor, read_files

# The largest ‖exported − checkpoint‖ / ‖checkpoint‖ of the logits that is let pass, both computed in float32. Zero where
# no rounding happened; the rest allows for rounding every weight once (bfloat16 keeps 8 bits, float16 11) and for the
# order of the sums in a merge.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
ORIGINAL_MODULE = ".original_module."  # peft's name for what a module that was trained whole (modules_to_save) replaces
DIFFERENCES_LISTED = 10


def verify_weights(folder: Path, shards: Sequence[Shard], advance: Callable[[int], object]) -> None:
    """Reads every value of `shards` back and compares it with the checkpoint's after the cast, bit by bit.

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
    differing = _differing(folder, shards, advance)
    _refuse(
        [f"{name}: differs from the checkpoint" for name in differing], "values read back differ from the checkpoint's"
    )


def verify_logits(
    opened: FreshProcess,
    folder: Path,
    built: Architecture,
    stored: Mapping[str, StoredTensor],
    adapter: lora.Adapter | None,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> float:
    """Compares the logits that a fresh process gets from `folder` with those of the checkpoint.

    Returns their relative difference. Raises `UserError` where it is over the bound.
    """
    ours = _checkpoint_logits(folder, built, stored, adapter, trust_remote_code)
    theirs = opened.logits()
    if not torch.isfinite(ours).all():
        raise UserError(
            "the checkpoint's logits are not finite: the training has diverged; export an earlier checkpoint"
        )
    difference = float((theirs - ours).norm() / ours.norm().clamp_min(1e-30))
    bound = 0.0 if adapter is None and _is_lossless(stored, dtype) else BOUNDS[dtype]
    if not difference <= bound:
        raise UserError(
            f"not exported: in a fresh process the logits differ by {difference:.2g} from the checkpoint's, where {bound:g} "
            "is the most that rounding explains"
        )
    return difference


def _is_lossless(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> bool:
    floats = {tensor.dtype for tensor in stored.values() if tensor.dtype.is_floating_point}
    return all(found.itemsize == 1 or torch.promote_types(found, dtype) == dtype for found in floats)


def _differing(folder: Path, shards: Sequence[Shard], advance: Callable[[int], object]) -> list[str]:
    """The names of the values that `folder` holds otherwise than the checkpoint after the cast."""
    places = [(folder / s.name, value, *rows) for s in shards for value in s.values for rows in row_blocks(value.shape)]
    differing: dict[str, None] = {}
    for (file, value, start, stop), expected in zip(places, computed_ahead(p[1:] for p in places), strict=True):
        if not _same_bits(fresh.rows_by_safetensors(file, value.name, start, stop), expected):
            differing[value.name] = None
        advance(expected.nbytes)
    return list(differing)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same bytes: NaN equals NaN, and -0 does not equal 0."""
    pair = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if pair[0].numel() % 8 == 0:
        pair = [bits.view(torch.int64) for bits in pair]  # bytes by ones take five times as long
    return torch.equal(*pair)


def _checkpoint_logits(
    folder: Path,
    built: Architecture,
    stored: Mapping[str, StoredTensor],
    adapter: lora.Adapter | None,
    trust_remote_code: bool,
) -> torch.Tensor:
    """The logits of the stored values, in float32; an adapter is run by peft, beside its base and not merged."""
    model = built.model
    if adapter is not None:
        model = _with_adapter(architecture.build(folder, trust_remote_code=trust_remote_code).model, adapter.config)

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        is_base = lora.BASE_LAYER in name or ORIGINAL_MODULE in name
        if adapter is not None and not is_base and lora.peft_name(name) in adapter.tensors:
            return read_rows(adapter.tensors[lora.peft_name(name)], start, stop)
        name = name.replace(lora.BASE_LAYER, ".").replace(ORIGINAL_MODULE, ".")
        return read_rows(stored[built.tied.get(name, name)], start, stop)

    return streamed_logits(model, rows)


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
