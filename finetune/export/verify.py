"""Proof that the files hold the checkpoint: names and values read back, and logits computed by a separate process."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import torch

from finetune.config.module_names import peft_name
from finetune.errors import UserError
from finetune.export import merge as lora
from finetune.export.logits import stream_logits
from finetune.export.merge import find_quantized, make_dequantizer
from finetune.export.publish import ExportOptions
from finetune.export.reload_check import WrittenFiles, read_digests
from finetune.export.reload_process import ReloadProcess, start_reload
from finetune.export.source import Source
from finetune.export.target import TargetModel, describe_target, read_rows
from finetune.export.write import Digests, Weights, ignore
from finetune.files.tensors import read_files
from finetune.models.lora import inject_adapters

# The largest ‖exported − checkpoint‖ / ‖checkpoint‖ of the logits, both computed in float32, that rounding explains.
# Zero where nothing was rounded; else it allows for rounding every weight once (bfloat16 keeps 8 bits, float16 11) and
# for the order of the sums in a merge.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
ORIGINAL_MODULE = ".original_module."  # PEFT's name for a module that one in modules_to_save replaces
LISTED_DIFFERENCES = 10


@contextmanager
def start_verification(
    folder: Path,
    weights: Weights,
    options: ExportOptions,
    logits: Future[torch.Tensor] | None,
    reload: ReloadProcess | None = None,
) -> Iterator[tuple[Callable[[str, int], object], Callable[[Digests], str]]]:
    """Verifies `folder`, in which all but the values is complete, while they are written. `logits`: the checkpoint's.

    Gives two functions: of (file, end), to be called as its first `end` bytes are on disk, and of the digests of what
    was written, which returns the verdict for the last line, and raises `UserError` where it is against.

    The separate process (`reload`, where it runs already) reads
    every value back, and computes its logits, as the values come onto the disk.
    """
    if not options.verify:
        yield ignore, lambda written: ", not verified"
    elif not weights.model:

        def verify_adapter(written: Digests) -> str:
            found = read_digests(WrittenFiles(folder, tuple(shard.name for shard in weights.shards)))
            compare_values(folder, weights, written, found)
            return ", verified: every value"

        yield ignore, verify_adapter
    else:
        assert logits is not None
        files, trust_remote_code = [shard.name for shard in weights.shards], options.trust_remote_code
        with nullcontext(reload) if reload is not None else start_reload() as process:
            process.open_folder(folder, files, trust_remote_code=trust_remote_code)

            def verify_model(written: Digests) -> str:
                its_logits, digests = process.read_results()
                compare_values(folder, weights, written, digests)
                bound = _logits_bound(weights)
                difference = _compare_logits(logits.result(), its_logits, bound)
                agreement = f"logits within {difference:.1g}" if difference else "identical logits"
                return f", verified: every value, and {agreement} in a separate process"

            yield process.on_disk, verify_model


def compare_values(folder: Path, weights: Weights, written: Digests, found: Mapping[str, str]) -> None:
    """Compares the digests of the values that were read back, `found`, with those taken before they were written.

    Raises `UserError` listing the tensors that differ.
    """
    files = read_files(folder / shard.name for shard in weights.shards)
    expected = {value.name: value for shard in weights.shards for value in shard.values}
    problems = [f"{name}: not in the files" for name in expected if name not in files]
    problems += [f"{name}: in the files, but not in the model" for name in files if name not in expected]
    for name, value in expected.items():
        if name in files and (files[name].shape, files[name].dtype) != (value.shape, value.dtype):
            problems.append(f"{name}: {files[name].dtype} {files[name].shape}, not {value.dtype} {value.shape}")
    _raise_if_any(problems, "the files do not hold what the model needs")
    differing = [name for name in expected if found.get(name) != written[name]]
    _raise_if_any(
        [f"{name}: differs from the checkpoint" for name in differing], "values read back differ from the checkpoint's"
    )


@contextmanager
def start_logits(
    source: Source, target: TargetModel, weights: Weights, trust_remote_code: bool
) -> Iterator[Future[torch.Tensor]]:
    """The logits of the stored values, in float32, computed in a thread that ends with the block.

    An adapter is run by PEFT, beside the base that it is merged onto, and not merged; but that of a parameter is, as
    the parameter is read: one expert at a time, where PEFT would make a copy of them all.
    """
    is_dequantized = weights.merge is not None and weights.merge.onto == "dequantized"
    quantized = find_quantized(source, target) if is_dequantized else frozenset()
    read_dequantized = make_dequantizer(source)
    model, adapter, ended, merged = target.model, source.adapter, Event(), dict[str, lora.WeightUpdate]()
    if adapter is not None:
        other = describe_target(source.description, trust_remote_code=trust_remote_code)
        merged = lora.find_parameter_updates(adapter, target, str(source.path))
        model = _add_adapter(other.model, adapter.config)

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        if ended.is_set():
            raise CancelledError
        is_base = lora.BASE_LAYER in name or ORIGINAL_MODULE in name
        short = peft_name(name)
        if adapter is not None and not is_base:
            for known in (short, target.tied.get(short, short)):  # a tied one that was trained whole is saved once
                if known in adapter.tensors:
                    return read_rows(adapter.tensors[known], start, stop)
        name = name.replace(lora.BASE_LAYER, ".").replace(ORIGINAL_MODULE, ".")
        base = weights.stored[target.tied.get(name, name)]
        values = read_dequantized(base)[start:stop] if name in quantized else read_rows(base, start, stop)
        return merged[name].apply(values.float(), (slice(start, stop),)) if name in merged else values

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield pool.submit(stream_logits, model, rows)
        finally:
            ended.set()


def _add_adapter(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """`model`, on meta, with PEFT's adapter layers in it, on meta too; without those of parameters."""
    from accelerate import init_empty_weights
    from peft import LoraConfig

    known = {key: config[key] for key in LoraConfig.__dataclass_fields__ if key in config}
    known |= {"target_parameters": None, "inference_mode": True}
    if known.get("target_modules") in ([], None):
        return model.eval()
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of tied weights, which `rows` reads as one tensor
        inject_adapters(model, LoraConfig(**known))
    return model.eval()


def _logits_bound(weights: Weights) -> float:
    """The largest relative difference of the logits that rounding to the dtype of `weights` explains."""
    floats = {tensor.dtype for tensor in weights.stored.values() if tensor.dtype.is_floating_point}
    is_lossless = all(d.itemsize == 1 or torch.promote_types(d, weights.dtype) == weights.dtype for d in floats)
    return 0.0 if is_lossless and not weights.is_merged else BOUNDS[weights.dtype]


def _compare_logits(expected: torch.Tensor, found: torch.Tensor, bound: float) -> float:
    """The relative difference of the separate process's logits, `found`, from the checkpoint's.

    Raises `UserError` where it is over `bound`.
    """
    if not torch.isfinite(expected).all():
        raise UserError(
            "the checkpoint's logits are not finite: the training has diverged; export an earlier checkpoint"
        )
    difference = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    if not difference <= bound:
        raise UserError(
            f"not exported: in a separate process the logits differ by {difference:.2g} from the checkpoint's; "
            f"rounding explains at most {bound:g}"
        )
    return difference


def _raise_if_any(problems: list[str], what: str) -> None:
    if problems:
        more = [f"and {len(problems) - LISTED_DIFFERENCES} more"] if len(problems) > LISTED_DIFFERENCES else []
        raise UserError.of([f"not exported: {what}", *problems[:LISTED_DIFFERENCES], *more])
