"""Proves that an export holds the checkpoint: every value is read back, and logits are compared.

A separate process opens the export as its users will. `reload_process.start_reload` runs `python -m
finetune.export.verify RESULTS` early, since its imports take seconds. The first line of JSON on its
stdin names the folder, in which only the tensors' values are missing. Each further line reports how
much of a file is on disk. The process reads every value as soon as it is there. It writes the
values' digests and the logits of fixed prompts into the file RESULTS. If the folder does not load
it writes one line to stderr and ends with exit code 1.
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

from finetune.config.module_names import ORIGINAL_MODULE, is_adapter, peft_name
from finetune.constants import ADAPTER_CONFIG, TOKENIZER_CONFIG, Shape
from finetune.errors import UserError
from finetune.export.logits import CheckpointLogits, Logits, stream_logits
from finetune.export.publish import ExportOptions
from finetune.export.reload_process import ReloadProcess, start_reload
from finetune.export.source import Adapter, Source
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
from finetune.export.write import Digests, Weights, find_misfits, ignore
from finetune.files.tensors import SINGLE_FILE, HeaderEntry, Slices, read_files, read_header
from finetune.models.carried import make_carried_filter
from finetune.models.load import auto_class_of
from finetune.models.lora import inject_adapters, remake_indices
from finetune.models.weights import boxes_of_parameters
from finetune.units import counted

# How much of a file is read before it is opened again. safetensors reads through a memory map,
# whose pages count as resident until it is closed.
MAPPED_BYTES = 16 * 1024 * 1024
BUFFER_BYTES = 1024 * 1024  # a buffer that fits a core's cache is filled fastest
# One read call fills this many buffers, which are all the same memory. Fewer calls are faster:
# between two of them another thread's imports may hold Python's lock for milliseconds.
BUFFERS = 32
# (file, end) -> returns once the first `end` bytes of the file are on disk
Wait = Callable[[str, int], object]

Result = TypeVar("Result")


class WrittenFiles:
    """Reads tensors from safetensors files, which may still be written meanwhile.

    Several threads may read: a lock lets them take turns.
    """

    def __init__(
        self, folder: Path, files: tuple[str, ...], wait: Wait = lambda _file, _end: None
    ) -> None:
        """Reads the headers of the files, which must be complete.

        Args:
            folder: The folder of the files.
            files: The names of the files.
            wait: Waits for bytes of a file that is still written; by default all are there.

        Raises:
            UserError: A header is wrong.
        """
        self._folder = folder
        self._wait = wait
        self._lock = Lock()
        # tensor's name -> (file, header entry), in the order of the files
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
        """Waits for rows `start` to `stop` of a tensor, and returns `use(rows)`.

        A scalar has one row, itself. The rows are a memory map that `use` must not keep: a later
        call closes it.
        """
        file, entry = self.entries[name]
        row_count = entry.shape[0] if entry.shape else 1
        row_bytes = (entry.end - entry.begin) // max(1, row_count)
        self._wait(file, entry.begin + stop * row_bytes)
        with self._lock:
            if self._opened_file != file or self._mapped_bytes > MAPPED_BYTES:
                self.close()
                self._opened = safe_open(self._folder / file, framework="pt")
                self._opened_file = file
            self._mapped_bytes += (stop - start) * row_bytes
            tensor = self._opened.get_slice(name)
            return use(tensor[start:stop] if entry.shape else self._opened.get_tensor(name))

    def close(self) -> None:
        """Closes the file that is open, if any. A later `read` opens it again."""
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._opened = None
        self._opened_file = ""
        self._mapped_bytes = 0


def read_digests(
    files: WrittenFiles, advance: Callable[[int], object] = lambda _: None
) -> dict[str, str]:
    """Reads every tensor and returns the digest of its bytes, by name, in the order of the files.

    A digest is a hexadecimal xxh3_128, as in `Digests`. `advance` is called with the number of
    bytes of each block.
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


# The dtype of the export -> the largest ‖exported − checkpoint‖ / ‖checkpoint‖ of the logits that
# rounding explains; both logits are computed in float32. A bound allows for rounding every weight
# once (bfloat16 keeps 8 bits, float16 11) and for the order of the sums in a merge. If nothing was
# rounded or merged, the bound is 0 instead: see `_find_logits_bound`.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
LOGITS = "logits"  # a tensor in the separate process's results; the others are `Logits.choices`
LISTED_DIFFERENCES = 10  # the most differences in one message


@contextmanager
def start_verification(
    folder: Path,
    weights: Weights,
    options: ExportOptions,
    logits: CheckpointLogits | None,
    reload: ReloadProcess | None,
) -> Iterator[tuple[Callable[[str, int], object], Callable[[Digests], str]]]:
    """Verifies an export while its values are written.

    A separate process reads every value back as soon as it is on disk, and computes logits with the
    values. If only an adapter is written there are no logits, and this process reads the values
    back at the end. With `options.verify` off nothing is verified.

    Args:
        folder: The export's folder, in which only the values are missing.
        weights: What is written to it.
        options: Whether it is verified, and may run code of its own.
        logits: The checkpoint's logits; None if only an adapter is written, or nothing is verified.
        reload: The separate process; None starts one.

    Yields:
        Two functions for the writer. The first must be called with (file, end) once the first `end`
        bytes of a file are on disk. The second must be called with the digests of all that was
        written. It returns the verdict, which ends the line on the export's folder, and raises
        `UserError` if the export is wrong.
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
        # whoever started `reload` also ends it
        with nullcontext(reload) if reload is not None else start_reload() as process:
            process.open_folder(folder, files, trust_remote_code=trust_remote_code)

            def verify_model(written: Digests) -> str:
                results, digests = process.read_results()
                compare_values(folder, weights, written, digests)
                values = results.pop(LOGITS)
                choices = [results[name] for name in sorted(results)]
                exported = Logits(values, choices)
                agreement = compare_logits(logits, exported, _find_logits_bound(weights))
                return f", verified: every value, and {agreement} in a separate process"

            yield process.on_disk, verify_model


def compare_values(
    folder: Path, weights: Weights, written: Digests, read_back: Mapping[str, str]
) -> None:
    """Compares the files of an export with the plan: names, shapes, dtypes and values.

    Args:
        folder: The export's folder.
        weights: The plan.
        written: The digests of the values that were computed before they were written.
        read_back: The digests of the values that were read back.

    Raises:
        UserError: A list of the tensors that differ.
    """
    stored = read_files(folder / shard.name for shard in weights.shards)
    expected = {
        value.name: (value.dtype, value.shape) for shard in weights.shards for value in shard.values
    }
    in_files = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    problems = find_misfits(expected, in_files)
    refuse_differences(problems, "not exported: the files do not hold what the model needs")
    differing = [name for name in expected if read_back.get(name) != written[name]]
    refuse_differences(
        [f"{name}: differs from the checkpoint" for name in differing],
        "not exported: values read back differ from the checkpoint's",
    )


@contextmanager
def start_logits(
    source: Source, target: TargetModel, weights: Weights, trust_remote_code: bool
) -> Iterator[CheckpointLogits]:
    """Starts to compute the logits of the stored values, before any merge, in float32.

    A thread computes them; leaving the block stops it. PEFT runs an adapter beside the base that
    the export merges it onto, so the comparison also checks the merge. Only the adapter of a
    parameter is merged here too, as the parameter's rows are read: PEFT would make a copy of all
    experts.
    """
    quantized = find_quantized(source, target, weights.merge.onto if weights.merge else "original")
    read_dequantized = make_dequantizer(source)
    model = target.model
    adapter = source.adapter
    ended = Event()
    parameter_updates = dict[str, WeightUpdate]()
    if adapter is not None:
        # a model of its own for PEFT, which changes it in place; a tied head stays tied
        whole_shapes = {
            name: shape for name, shape in source.adapter_shapes.items() if ".lora_" not in name
        }
        base_target = describe_target(
            source.description,
            trust_remote_code=trust_remote_code,
            adapter=whole_shapes,
            is_quantized=bool(source.quantized),
        )
        parameter_updates = find_parameter_updates(adapter, target, str(source.path))
        model = _add_adapter(base_target.model, adapter.config)
        _refuse_incomplete(model, adapter, str(source.path))

    def rows(name: str, start: int, stop: int) -> Tensor:
        """Reads rows of the tensor that has this name in `model`, where PEFT has renamed some."""
        if ended.is_set():
            raise CancelledError
        is_base = BASE_LAYER in name or ORIGINAL_MODULE in name
        adapter_name = peft_name(name)
        if adapter is not None and not is_base:
            # a tied tensor that was trained whole is saved once
            for saved_name in (adapter_name, target.tied.get(adapter_name, adapter_name)):
                if saved_name in adapter.tensors:
                    return read_rows(adapter.tensors[saved_name], start, stop)
        base_name = name.replace(BASE_LAYER, ".").replace(ORIGINAL_MODULE, ".")
        base = weights.stored[target.tied.get(base_name, base_name)]
        if base_name in quantized:
            values = read_dequantized(base)[start:stop]
        else:
            values = read_rows(base, start, stop)
        if base_name in parameter_updates:
            return parameter_updates[base_name].apply(values.float(), (slice(start, stop),))
        return values

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield CheckpointLogits(pool, partial(stream_logits, model, rows))
        finally:
            ended.set()


def _add_adapter(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """Adds PEFT's adapter layers to a model on meta, on meta too, and returns it in eval mode.

    Adapters of parameters (target_parameters) are left out. `config`: the content of
    adapter_config.json.
    """
    from accelerate import init_empty_weights
    from peft import LoraConfig, OFTConfig

    config_class: Any = OFTConfig if config.get("peft_type") == "OFT" else LoraConfig
    without_parameters = {**config, "target_parameters": None, "inference_mode": True}
    fields = config_class.__dataclass_fields__
    known = {key: value for key, value in without_parameters.items() if key in fields}
    if known.get("target_modules") in ([], None):  # all its adapters are of parameters
        return model.eval()
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        # PEFT warns about tied weights, which `start_logits` reads as one tensor
        warnings.simplefilter("ignore", UserWarning)
        inject_adapters(model, config_class(**known))
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            # PEFT's copy of a tied head (ensure_weight_tying) has the two of the embedding
            weight: Any = module._parameters["weight"]
            module.out_features, module.in_features = weight.shape
    remake_indices(model)
    return model.eval()


def _refuse_incomplete(model: torch.nn.Module, adapter: Adapter, where: str) -> None:
    """Raises `UserError` if an adapter lacks tensors of modules that its config names.

    PEFT would give them first values, with which their layers are the base's.
    """
    names = (peft_name(name) for name, _ in model.named_parameters() if is_adapter(name))
    missing = sorted(name for name in names if name not in adapter.tensors)
    if missing:
        raise UserError(
            f"{where}: {missing[0]}: missing ({counted(len(missing), 'tensor')} in all), although "
            f"{ADAPTER_CONFIG} names its module; copy the adapter again"
        )


def _find_logits_bound(weights: Weights) -> float:
    """Finds the largest relative difference of the logits that rounding explains.

    It is 0 if no adapter is merged and the written dtype holds all stored values exactly.
    """
    dtypes = {tensor.dtype for tensor in weights.stored.values() if tensor.dtype.is_floating_point}
    is_lossless = all(
        # one byte: float8, which torch does not promote
        dtype.itemsize == 1 or torch.promote_types(dtype, weights.dtype) == weights.dtype
        for dtype in dtypes
    )
    if is_lossless and not weights.is_merged:
        return 0.0
    return BOUNDS[weights.dtype]


def compare_logits(checkpoint: CheckpointLogits, exported: Logits, bound: float) -> str:
    """Compares the export's logits with the checkpoint's, and returns the verdict in words.

    In a mixture of experts, rounding can send a token to another expert if two have nearly the same
    score. So if the difference is over `bound` and the experts differ, the checkpoint's logits are
    computed again with the experts that the export has chosen.

    Args:
        checkpoint: The checkpoint's logits. They are waited for.
        exported: The logits that the separate process computed.
        bound: The largest relative difference that is allowed.

    Raises:
        UserError: The difference is over `bound`, or the checkpoint's logits are not finite.
    """
    expected = checkpoint.result()
    if not torch.isfinite(expected.values).all():
        raise UserError(
            "the checkpoint's logits are not finite: the training has diverged; export an earlier "
            "checkpoint"
        )
    difference = exported.relative_difference(expected)
    condition = ""
    if bound and difference > bound and not exported.chooses_as(expected):
        difference = exported.relative_difference(checkpoint.with_choices(exported.choices))
        condition = " with the same experts"
    if not difference <= bound:  # also if it is nan
        # the bounds of the 16-bit dtypes
        advice = "; export with --dtype float32, which rounds nothing" if bound >= 0.01 else ""
        raise UserError(
            f"not exported: in a separate process the logits differ by {difference:.2g} from the "
            f"checkpoint's{condition}; rounding explains at most {bound:g}{advice}"
        )
    if not difference:
        return "identical logits"
    return f"logits within {difference:.1g}{condition}"


def refuse_differences(differences: list[str], problem: str) -> None:
    """Raises `UserError` if there are `differences`: with `problem` and the first of them."""
    listed = differences[:LISTED_DIFFERENCES]
    if len(differences) > LISTED_DIFFERENCES:
        listed.append(f"and {len(differences) - LISTED_DIFFERENCES} more")
    if listed:
        raise UserError.of([problem, *listed])


def main(arguments: list[str]) -> int:
    """Runs the separate process and returns its exit code.

    `arguments`: the file for the results. Its tensors are the logits and the experts' choices, and
    its metadata the digests.
    """
    results = Path(arguments[0])
    import_transformers()
    line = sys.stdin.readline()
    if not line:
        return 1  # the parent has gone
    request = json.loads(line)  # from `ReloadProcess.open_folder`
    folder = Path(request["folder"])
    file_names = tuple(request["files"])
    trust_remote_code = request["trust_remote_code"]
    try:
        progress = DiskProgress(folder, file_names)
        progress.follow(sys.stdin)
        target = describe_target(folder, trust_remote_code=trust_remote_code)
        load_with_transformers(folder, trust_remote_code)
        with ThreadPoolExecutor(max_workers=1) as pool:
            files = WrittenFiles(folder, file_names, progress.wait_for)
            digests = pool.submit(read_digests, files)
            logits = _compute_logits(folder, target, progress)
            tensors = {LOGITS: logits.values.contiguous()}
            for number, choice in enumerate(logits.choices):
                tensors[f"choice {number:06}"] = choice.contiguous()
            save_file(tensors, results, metadata=digests.result())
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


class DiskProgress:
    """How much of each file in a folder is on disk, as the parent process reports it."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._sizes = {file: (folder / file).stat().st_size for file in files}
        self._ends = dict.fromkeys(self._sizes, 0)  # file -> its first bytes that are on disk
        self._changed = Condition()

    def follow(self, lines: Iterable[str]) -> None:
        """Starts a thread that reads the parent's reports from `lines`.

        The thread ends this process if the reports end before all bytes are on disk.
        """
        Thread(target=self._follow, args=[lines], daemon=True).start()

    def _follow(self, lines: Iterable[str]) -> None:
        """Reads the reports: a line of JSON with a `file` and the `end` up to which it is on disk.

        It ends this process if a file cannot be read or the reports end too early.
        """
        try:
            for line in lines:
                report = json.loads(line)
                file = report["file"]
                _read_ahead(self._folder / file, self._ends[file], report["end"])
                with self._changed:
                    self._ends[file] = report["end"]
                    self._changed.notify_all()
        except OSError as error:  # without an exit, `wait_for` would wait for these bytes forever
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
    """Reads the bytes of a file from `position` to `end` into the kernel's cache.

    The content is thrown away. Bytes that are read in order are cached in large pieces. This takes
    a fraction of the CPU time of page faults, and of advising the kernel to read ahead.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while position < end:
            size = min(end - position, BUFFERS * BUFFER_BYTES)
            full_buffers, rest = divmod(size, BUFFER_BYTES)
            # the same buffer again and again: nobody looks at what is read
            buffers = [buffer] * full_buffers + [buffer[:rest]]
            position += os.preadv(file.fileno(), buffers, position) or end  # 0: the file ended


def load_with_transformers(folder: Path, trust_remote_code: bool) -> None:
    """Opens a folder as a user of transformers does: configs, tokenizer and, on meta, the model.

    Raises `UserError` if any of them does not load, or if transformers finds a tensor missing,
    unexpected or of another shape. Unexpected tensors that are carried over from the base are fine.
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
    problems = {kind: sorted(map(str, names)) for kind, names in loading_info.items() if names}
    if problems:
        raise UserError(
            "; ".join(
                f"transformers reports {kind}: {', '.join(names[:5])}"
                for kind, names in problems.items()
            )
        )


def _compute_logits(folder: Path, target: TargetModel, progress: DiskProgress) -> Logits:
    """Computes the logits of the model in `folder`, from its files, as their values arrive on disk.

    The adapter's files in adapter/ are not read.
    """
    if (folder / SINGLE_FILE).exists():
        paths = [folder / SINGLE_FILE]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    files = WrittenFiles(folder, tuple(path.name for path in paths), progress.wait_for)
    boxes = boxes_of_parameters(target.model, files.shapes, str(folder))

    def read_file_tensor(name: str, slices: Slices) -> Tensor:
        if not slices:  # a scalar
            return files.read(name, 0, 1, _copy_float32)
        row_slice, *other_slices = slices
        rows = files.read(name, row_slice.start, row_slice.stop, _copy_float32)
        return rows[(slice(None), *other_slices)]

    def read_parameter_rows(name: str, start: int, stop: int) -> Tensor:
        box = boxes[target.tied.get(name, name)]
        return box.read((slice(start, stop),) if box.shape else (), read_file_tensor)

    return stream_logits(target.model, read_parameter_rows)


def _copy_float32(mapped: Tensor) -> Tensor:
    """Copies a memory map, to float32 if it is floating-point; other dtypes stay."""
    return mapped.to(torch.float32 if mapped.is_floating_point() else mapped.dtype, copy=True)


if __name__ == "__main__":
    # Imports make half a million objects and no garbage: the collector would walk through them all.
    gc.disable()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # At once: a thread may be reading stdin, for which Python would wait, or abort.
    os._exit(code)
