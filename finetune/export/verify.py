"""Proof that the files hold the checkpoint: names and values read back, and logits computed by a
separate process.

The process opens the export as its users will. `reload_process.start_reload` runs `python -m
finetune.export.verify RESULTS`, which imports, which takes seconds. Lines of JSON on its stdin then
name the folder, in which all but the values is complete, and say how far its files are on disk. It
reads every value from there, a part behind the writer, and leaves in the file RESULTS their digests
and the logits of fixed prompts. A folder that does not load is one line on stderr and exit code 1.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from finetune.config.module_names import peft_name
from finetune.constants import TOKENIZER_CONFIG, Shape
from finetune.errors import UserError
from finetune.export.logits import CheckpointLogits, Logits, stream_logits
from finetune.export.publish import ExportOptions
from finetune.export.reload_process import ReloadProcess, start_reload
from finetune.export.source import Source
from finetune.export.target import (
    TargetModel,
    describe_target,
    import_transformers,
    raw_bytes,
    read_rows,
    row_blocks,
)
from finetune.export.values import (
    BASE_LAYER,
    WeightUpdate,
    find_parameter_updates,
    find_quantized,
    make_dequantizer,
)
from finetune.export.write import Digests, Weights, ignore
from finetune.files.tensors import SINGLE_FILE, HeaderEntry, read_files, read_header
from finetune.models.carried import make_carried_filter
from finetune.models.load import auto_class_of
from finetune.models.lora import inject_adapters, remake_indices
from finetune.models.weights import Slices, boxes_of_parameters

# How much of a file is read before it is reopened. Rows are a memory map of safetensors', whose
# pages count as resident.
MAPPED_BYTES = 16 * 1024 * 1024
BUFFER_BYTES = 1024 * 1024  # what fits a core's cache is copied fastest
# filled by one call, all of them the same: between calls a thread that imports holds Python's lock
# for milliseconds
BUFFERS = 32
# (file, end): returns once the first `end` bytes of it are on disk
Wait = Callable[[str, int], object]

Result = TypeVar("Result")


class WrittenFiles:
    """The tensors of some safetensors files of a folder, which may be written while they are read.

    One reading: rows are handed out one call at a time.
    """

    def __init__(
        self, folder: Path, files: tuple[str, ...], wait: Wait = lambda _file, _end: None
    ) -> None:
        """Reads the headers, which the files must hold.

        Raises `UserError` where one is wrong, or two hold one name.
        """
        self._folder = folder
        self._wait = wait
        self._lock = Lock()
        self.entries: dict[str, tuple[str, HeaderEntry]] = {}
        for file in files:
            for entry in sorted(read_header(folder / file), key=lambda entry: entry.begin):
                self.entries[entry.name] = (file, entry)
        self._opened: Any = None
        self._opened_file = ""
        self._mapped_bytes = 0

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: entry.shape for name, (_, entry) in self.entries.items()}

    def read(self, name: str, start: int, stop: int, use: Callable[[Tensor], Result]) -> Result:
        """`use(rows)` for rows of a tensor (of a scalar, itself): a memory map that is gone when
        `use` returns.
        """
        file, entry = self.entries[name]
        row_bytes = (entry.end - entry.begin) // max(1, entry.shape[0] if entry.shape else 1)
        self._wait(file, entry.begin + stop * row_bytes)
        with self._lock:
            if self._opened_file != file or self._mapped_bytes > MAPPED_BYTES:
                self.close()
                self._opened = safe_open(self._folder / file, framework="pt")
                self._opened_file = file
            self._mapped_bytes += (stop - start) * row_bytes
            part = self._opened.get_slice(name)
            return use(part[start:stop] if entry.shape else self._opened.get_tensor(name))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._opened = None
        self._opened_file = ""
        self._mapped_bytes = 0


def read_digests(
    files: WrittenFiles, advance: Callable[[int], object] = lambda _: None
) -> dict[str, str]:
    """The digest (xxh3, 128 bits, hexadecimal) of every tensor's bytes, by name, in the file's
    order.
    """
    digests = {}
    for name, (_, entry) in files.entries.items():
        digest = xxhash.xxh3_128()

        def add(rows: Tensor, digest: Any = digest) -> int:
            digest.update(raw_bytes(rows))
            return rows.nbytes

        for start, stop in row_blocks(entry.shape):
            advance(files.read(name, start, stop, add))
        digests[name] = digest.hexdigest()
    files.close()
    return digests


# The largest ‖exported − checkpoint‖ / ‖checkpoint‖ of the logits, both computed in float32, that
# rounding explains. Zero where nothing was rounded; else it allows for rounding every weight once
# (bfloat16 keeps 8 bits, float16 11) and for the order of the sums in a merge.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
LOGITS = "logits"  # a tensor of the separate process's results; the others are the choices
# PEFT's name for a module that one in modules_to_save replaces
ORIGINAL_MODULE = ".original_module."
LISTED_DIFFERENCES = 10


@contextmanager
def start_verification(
    folder: Path,
    weights: Weights,
    options: ExportOptions,
    logits: CheckpointLogits | None,
    reload: ReloadProcess | None,
) -> Iterator[tuple[Callable[[str, int], object], Callable[[Digests], str]]]:
    """Verifies `folder`, in which all but the values is complete, while they are written.

    A separate process reads every value back, and computes logits of them, as the values come onto
    the disk.

    Args:
        folder: The export.
        weights: What is written to it.
        options: Whether it is verified, and may run code of its own.
        logits: The checkpoint's; None where the adapter alone is written, or nothing is verified.
        reload: The separate process; None starts one.

    Yields:
        Two functions. The first is called with (file, end) once the first `end` bytes of a file are
        on disk. The second is called with the digests of what was written: it returns the verdict
        for the last line, and raises `UserError` where the export is wrong.
    """
    if not options.verify:
        yield ignore, lambda written: ", not verified"
    elif not weights.model:

        def verify_adapter(written: Digests) -> str:
            digests = read_digests(
                WrittenFiles(folder, tuple(shard.name for shard in weights.shards))
            )
            compare_values(folder, weights, written, digests)
            return ", verified: every value"

        yield ignore, verify_adapter
    else:
        assert logits is not None
        files = [shard.name for shard in weights.shards]
        trust_remote_code = options.trust_remote_code
        with nullcontext(reload) if reload is not None else start_reload() as process:
            process.open_folder(folder, files, trust_remote_code=trust_remote_code)

            def verify_model(written: Digests) -> str:
                results, digests = process.read_results()
                compare_values(folder, weights, written, digests)
                exported = Logits(results.pop(LOGITS), [results[name] for name in sorted(results)])
                agreement = compare_logits(logits, exported, _logits_bound(weights))
                return f", verified: every value, and {agreement} in a separate process"

            yield process.on_disk, verify_model


def compare_values(
    folder: Path, weights: Weights, written: Digests, read: Mapping[str, str]
) -> None:
    """Compares the digests of the values that were read back, `read`, with those taken before they
    were written.

    Raises `UserError` listing the tensors that differ.
    """
    files = read_files(folder / shard.name for shard in weights.shards)
    expected = {value.name: value for shard in weights.shards for value in shard.values}
    problems = [f"{name}: not in the files" for name in expected if name not in files]
    problems += [
        f"{name}: in the files, but not in the model" for name in files if name not in expected
    ]
    for name, value in expected.items():
        if name in files and (files[name].shape, files[name].dtype) != (value.shape, value.dtype):
            problems.append(
                f"{name}: {files[name].dtype} {files[name].shape}, not {value.dtype} {value.shape}"
            )
    refuse_differences(problems, "not exported: the files do not hold what the model needs")
    differing = [name for name in expected if read.get(name) != written[name]]
    refuse_differences(
        [f"{name}: differs from the checkpoint" for name in differing],
        "not exported: values read back differ from the checkpoint's",
    )


@contextmanager
def start_logits(
    source: Source, target: TargetModel, weights: Weights, trust_remote_code: bool
) -> Iterator[CheckpointLogits]:
    """The logits of the stored values, in float32, computed in a thread that ends with the block.

    An adapter is run by PEFT, beside the base that it is merged onto, and not merged; but that of a
    parameter is, as the parameter is read: one expert at a time, where PEFT would make a copy of
    them all.
    """
    is_dequantized = weights.merge is not None and weights.merge.onto == "dequantized"
    if is_dequantized:
        quantized = find_quantized(source, target)
    else:
        quantized = frozenset()
    read_dequantized = make_dequantizer(source)
    model = target.model
    adapter = source.adapter
    ended = Event()
    merged = dict[str, WeightUpdate]()
    if adapter is not None:
        other = describe_target(source.description, trust_remote_code=trust_remote_code)
        merged = find_parameter_updates(adapter, target, str(source.path))
        model = _add_adapter(other.model, adapter.config)

    def rows(name: str, start: int, stop: int) -> Tensor:
        if ended.is_set():
            raise CancelledError
        is_base = BASE_LAYER in name or ORIGINAL_MODULE in name
        short = peft_name(name)
        if adapter is not None and not is_base:
            # a tied one that was trained whole is saved once
            for known in (short, target.tied.get(short, short)):
                if known in adapter.tensors:
                    return read_rows(adapter.tensors[known], start, stop)
        name = name.replace(BASE_LAYER, ".").replace(ORIGINAL_MODULE, ".")
        base = weights.stored[target.tied.get(name, name)]
        if name in quantized:
            values = read_dequantized(base)[start:stop]
        else:
            values = read_rows(base, start, stop)
        if name in merged:
            return merged[name].apply(values.float(), (slice(start, stop),))
        return values

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield CheckpointLogits(pool, partial(stream_logits, model, rows))
        finally:
            ended.set()


def _add_adapter(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """`model`, on meta, with PEFT's adapter layers in it, on meta too; without those of
    parameters.
    """
    from accelerate import init_empty_weights
    from peft import LoraConfig, OFTConfig

    kind: Any = OFTConfig if config.get("peft_type") == "OFT" else LoraConfig
    without_parameters = {**config, "target_parameters": None, "inference_mode": True}
    fields = kind.__dataclass_fields__
    known = {key: value for key, value in without_parameters.items() if key in fields}
    if known.get("target_modules") in ([], None):
        return model.eval()
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        # of tied weights, which `rows` reads as one tensor
        warnings.simplefilter("ignore", UserWarning)
        inject_adapters(model, kind(**known))
    remake_indices(model)
    return model.eval()


def _logits_bound(weights: Weights) -> float:
    """The largest relative difference of the logits that rounding to the dtype of `weights`
    explains.
    """
    floats = {tensor.dtype for tensor in weights.stored.values() if tensor.dtype.is_floating_point}
    is_lossless = all(
        d.itemsize == 1 or torch.promote_types(d, weights.dtype) == weights.dtype for d in floats
    )
    if is_lossless and not weights.is_merged:
        return 0.0
    return BOUNDS[weights.dtype]


def compare_logits(checkpoint: CheckpointLogits, exported: Logits, bound: float) -> str:
    """Says how far the separate process's logits are from the checkpoint's.

    In a mixture, rounding can send a token to other experts where two of them have nearly the same
    score. Then the checkpoint's logits are computed again, with the experts of the export.

    Raises `UserError` where the difference is over `bound`.
    """
    expected = checkpoint.result()
    if not torch.isfinite(expected.values).all():
        raise UserError(
            "the checkpoint's logits are not finite: the training has diverged; export an earlier "
            "checkpoint"
        )
    difference = exported.differ_from(expected)
    with_the_same = ""
    if bound and difference > bound and not exported.chooses_as(expected):
        difference = exported.differ_from(checkpoint.with_choices(exported.choices))
        with_the_same = " with the same experts"
    if not difference <= bound:
        advice = "; export with --dtype float32, which rounds nothing" if bound >= 0.01 else ""
        raise UserError(
            f"not exported: in a separate process the logits differ by {difference:.2g} from the "
            f"checkpoint's{with_the_same}; rounding explains at most {bound:g}{advice}"
        )
    if not difference:
        return "identical logits"
    return f"logits within {difference:.1g}{with_the_same}"


def refuse_differences(differences: list[str], what: str) -> None:
    """Raises `UserError` with `what`, and the first of `differences`, if there are any."""
    listed = differences[:LISTED_DIFFERENCES]
    if len(differences) > LISTED_DIFFERENCES:
        listed.append(f"and {len(differences) - LISTED_DIFFERENCES} more")
    if listed:
        raise UserError.of([what, *listed])


def main(arguments: list[str]) -> int:
    """The separate process."""
    results = Path(arguments[0])
    import_transformers()
    line = sys.stdin.readline()
    if not line:
        return 1  # the parent has gone
    given = json.loads(line)
    folder = Path(given["folder"])
    trust_remote_code = given["trust_remote_code"]
    try:
        progress = DiskProgress(folder, given["files"])
        progress.follow(sys.stdin)
        target = describe_target(folder, trust_remote_code=trust_remote_code)
        load_with_transformers(folder, trust_remote_code)
        with ThreadPoolExecutor(max_workers=1) as pool:
            digests = pool.submit(
                read_digests, WrittenFiles(folder, tuple(given["files"]), progress.wait_for)
            )
            logits = _compute_logits(folder, target, progress)
            tensors = {LOGITS: logits.values.contiguous()}
            for number, chosen in enumerate(logits.choices):
                tensors[f"choice {number:06}"] = chosen.contiguous()
            save_file(tensors, results, metadata=digests.result())
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


class DiskProgress:
    """Knows how many bytes of each file of a folder are on disk."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._sizes = {file: (folder / file).stat().st_size for file in files}
        self._ends = dict.fromkeys(self._sizes, 0)
        self._changed = Condition()

    def follow(self, lines: Iterable[str]) -> None:
        """Reads what the parent says, in a thread.

        Ends this process if the parent goes before it is done.
        """
        Thread(target=self._follow, args=[lines], daemon=True).start()

    def _follow(self, lines: Iterable[str]) -> None:
        try:
            for line in lines:
                said = json.loads(line)
                _read_ahead(self._folder / said["file"], self._ends[said["file"]], said["end"])
                with self._changed:
                    self._ends[said["file"]] = said["end"]
                    self._changed.notify_all()
        except OSError as error:  # else whoever waits for these bytes would wait forever
            print(
                f"{error.filename or self._folder}: cannot be read back: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        if self._ends != self._sizes:
            os._exit(1)

    def wait_for(self, file: str, end: int) -> None:
        """Returns once the first `end` bytes of `file` are on disk."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends[file] >= end)


def _read_ahead(path: Path, position: int, end: int) -> None:
    """Reads these bytes of a file, for the kernel to keep.

    Read in order, they are kept in large pieces, which takes a fraction of the processor's time
    that page faults, or the kernel's own advice to read ahead, take.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while position < end:
            whole, rest = divmod(min(end - position, BUFFERS * BUFFER_BYTES), BUFFER_BYTES)
            position += (
                os.preadv(file.fileno(), [buffer] * whole + [buffer[:rest]], position) or end
            )


def load_with_transformers(folder: Path, trust_remote_code: bool) -> None:
    """Loads config, generation config, tokenizer and (on meta) the model as a user of transformers
    does.

    Raises `UserError` where any of it does not load, or a tensor is missing, unexpected or of
    another shape.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        GenerationConfig.from_pretrained(folder)
        if (folder / TOKENIZER_CONFIG).exists():
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model, loading_info = auto_class_of(config).from_pretrained(
            folder, device_map="meta", output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever is wrong, the folder must not be published
        raise UserError(f"transformers cannot open it: {type(error).__name__}: {error}") from None
    may_carry = make_carried_filter(model)
    loading_info["unexpected_keys"] = {
        name for name in loading_info["unexpected_keys"] if not may_carry(name)
    }
    wrong = {kind: sorted(map(str, names)) for kind, names in loading_info.items() if names}
    if wrong:
        raise UserError(
            "; ".join(
                f"transformers reports {kind}: {', '.join(names[:5])}"
                for kind, names in wrong.items()
            )
        )


def _compute_logits(folder: Path, target: TargetModel, progress: DiskProgress) -> Logits:
    if (folder / SINGLE_FILE).exists():
        paths = [folder / SINGLE_FILE]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    files = WrittenFiles(folder, tuple(path.name for path in paths), progress.wait_for)
    boxes = boxes_of_parameters(target.model, files.shapes, str(folder))

    def read(name: str, slices: Slices) -> Tensor:
        start, stop = (slices[0].start, slices[0].stop) if slices else (0, 1)
        rows = files.read(name, start, stop, _copy_float32)
        return rows[(slice(None), *slices[1:])] if slices else rows

    def rows(name: str, start: int, stop: int) -> Tensor:
        box = boxes[target.tied.get(name, name)]
        return box.read((slice(start, stop),) if box.shape else (), read)

    return stream_logits(target.model, rows)


def _copy_float32(mapped: Tensor) -> Tensor:
    """A copy in memory; what is not floating keeps its dtype."""
    return mapped.to(torch.float32 if mapped.is_floating_point() else mapped.dtype, copy=True)


if __name__ == "__main__":
    # imports make no garbage, but half a million objects, through which the collector would walk
    gc.disable()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # at once: a thread may be reading stdin, which Python would wait for, or abort
