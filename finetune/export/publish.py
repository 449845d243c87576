"""The options of an export, their checks, and the output folder, which appears whole or not at all.

This module imports no torch.
"""

import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Literal, get_args

from finetune.checkpoint.manifest import STATE
from finetune.config.export_formats import EXPORT_FORMATS, SAFETENSORS, check_formats, list_keys
from finetune.config.quantization import read_recipe_quantization
from finetune.config.yaml_file import find_yaml
from finetune.constants import ADAPTER, ADAPTER_CONFIG, CONFIG_FILE, EXPORT_SPARE_BYTES, Names
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import read_json_object
from finetune.units import disk_size, read_size

DTYPES = ("float32", "bfloat16", "float16")
# The base onto which a QLoRA adapter is merged: the unquantized one, or the one that training used,
# quantized and dequantized again.
MergeOnto = Literal["original", "dequantized"]
AdapterNames = Literal["peft", "vllm"]  # the program whose names an adapter's tensors get


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of an export, from the command line or the arguments of `export`."""

    dtype: str | None = None  # None: the recipe's export_dtype, or the base's dtype
    max_shard_size: str = "5GB"  # of one safetensors file
    verify: bool = True
    overwrite: bool = False  # whether an existing export at the output is replaced
    model: bool = True  # whether the model is written; under LoRA the merged one
    # whether an adapter is written as a PEFT folder: in adapter/ if the model is written too
    adapter: bool = True
    adapter_names: AdapterNames = "peft"
    trust_remote_code: bool = False
    merge_onto: MergeOnto | None = None  # QLoRA; None: `choose_merge` measures both and chooses
    formats: Names = ("safetensors",)
    # name -> value of the formats' keys (`list_keys`) that are set; the others have their defaults
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a format's key: `options["gguf_types"]`."""
        return self.all_keys()[name]

    def all_keys(self) -> dict[str, Any]:
        """Returns the values of all formats' keys by name, with defaults for those not set.

        Raises `UserError` if `keys` has a name that no format knows.
        """
        defaults = {key.name: key.default for key in list_keys()}
        for name in self.keys:
            if name not in defaults:
                raise UserError(
                    f"export: {name}: not an argument; the formats have {', '.join(defaults)}"
                )
        return defaults | dict(self.keys)


def is_alone(name: str, options: "ExportOptions") -> bool:
    """Whether the format `name` is the only one of an export.

    The files of a folder format then stand in the export's folder, not in a folder within it.
    """
    return options.formats == (name,)


def find_run_of_adapter(folder: Path) -> Path | None:
    """Returns the folder of the run whose exported adapter is `folder`; None if it is no such one.

    >>> find_run_of_adapter(Path("downloads/adapter"))
    """
    folder = folder.absolute()
    run = folder.parent
    is_of_run = folder.name == ADAPTER and (run / "metrics.jsonl").is_file()
    return run if is_of_run else None


def _was_quantized(source: Path) -> bool:
    """Whether a checkpoint in `source` was trained on a quantized base, by the recipe in its state.

    `source` is a checkpoint, a folder of checkpoints, a run's folder, or its adapter.
    """
    states = [source / STATE, *source.glob(f"*/{STATE}"), *source.glob(f"checkpoints/*/{STATE}")]
    recipes = [read_json_object(state).get("recipe") for state in states]
    run = find_run_of_adapter(source)
    if run is not None:
        recipes.append(find_yaml(run / "recipe.yaml"))
    return any(
        isinstance(recipe, dict) and read_recipe_quantization(recipe).bits is not None
        for recipe in recipes
    )


def check_request(source: Path, output: Path, options: ExportOptions) -> None:
    """Raises `UserError` if the paths or the options already rule an export out.

    It reads no weights. First it restores exports that a killed process was replacing, since
    `source` may be one of them.
    """
    durable.restore_exports(source)
    for folder in (source, output):
        durable.restore_folder(folder)
    if not source.exists():
        raise UserError(f"{source}: no such folder; give a run's folder or a checkpoint")
    if source.is_file():
        raise UserError(f"{source}: a file; give the folder that holds it")
    _check_options(options)
    if options.merge_onto is not None and not _was_quantized(source):
        raise UserError(
            f"{source}: --merge-onto: not known to be trained on a quantized base; omit it"
        )
    if source.resolve().is_relative_to(output.resolve()):
        raise UserError(f"{output}: holds what is exported; choose another --output")
    _check_replaceable(output, options.overwrite)
    _check_writable(output)


def _check_options(options: ExportOptions) -> None:
    """Raises `UserError` if an option has a wrong value or contradicts another option."""
    if options.dtype not in (None, *DTYPES):
        raise UserError(f"--dtype: {options.dtype}: one of {', '.join(DTYPES)} is expected")
    check_formats(options.formats, options.all_keys(), is_model=options.model)
    try:
        read_size(options.max_shard_size)
    except UserError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    if options.merge_onto is not None and not options.model:
        raise UserError("--merge-onto: nothing is merged with --adapter-only; omit one of them")
    names = options.adapter_names
    if names not in get_args(AdapterNames):
        raise UserError(
            f"--adapter-names: {names}: one of {', '.join(get_args(AdapterNames))} is expected"
        )
    if names != "peft" and (options.model or SAFETENSORS not in options.formats):
        raise UserError(
            f"--adapter-names: {names}: vLLM loads an adapter from a PEFT folder; add "
            "--adapter-only, and leave --format out"
        )


def _check_writable(output: Path) -> None:
    """Raises `UserError` if nothing can be written to the nearest existing folder above `output`.

    It makes a temporary folder there and removes it.
    """
    nearest = next(folder for folder in output.absolute().parents if folder.exists())
    try:
        with TemporaryDirectory(prefix=".finetune-", dir=nearest):
            pass
    except OSError as error:
        raise _make_unwritable_error(output, error) from None


@contextmanager
def publish(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `output`, and renames it to `output` when the block ends.

    If the block raises, the folder is removed, and with it the parents that were made for it.

    Raises `UserError` if `output` exists and may not be replaced, if another process is exporting
    to it, or in place of an `OSError` (a full disk, say) of the block.
    """
    durable.restore_folder(output)
    _check_replaceable(output, overwrite)
    staging, replaced = durable.paths_beside(output)
    missing_parents = [folder for folder in output.parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock_descriptor = _make_locked_folder(staging, output)
    except OSError as error:
        _remove_empty(missing_parents)
        raise _make_unwritable_error(output, error) from None
    try:
        with durable.stage_and_rename(output, staging, replaced):
            yield staging
    except BaseException as error:
        _remove_empty(missing_parents)
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            raise UserError(
                f"{output}: cannot be written: {reason}; nothing is left of the export"
            ) from None
        raise
    finally:
        os.close(lock_descriptor)


def _check_replaceable(output: Path, overwrite: bool) -> None:
    """Raises `UserError` if `output` exists and may not be replaced.

    It may be replaced if `overwrite` is set and it is an export or an empty folder.
    """
    if not (output.exists() or output.is_symlink()):
        return
    if not overwrite:
        raise UserError(
            f"{output}: exists; choose another --output, or replace it with --overwrite"
        )
    is_folder = output.is_dir() and not output.is_symlink()
    if not is_folder or not _holds_export(output):
        raise UserError(
            f"{output}: not an exported model, so --overwrite does not replace it; choose another "
            "--output"
        )


def _holds_export(folder: Path) -> bool:
    """Whether a folder is empty, or holds a file by which an export is known: a config, or GGUF."""
    suffixes = [row.suffix for row in EXPORT_FORMATS.values() if row.suffix]
    patterns = [CONFIG_FILE, ADAPTER_CONFIG, *(f"*{suffix}" for suffix in suffixes)]
    is_empty = not any(folder.iterdir())
    return is_empty or any(any(folder.glob(pattern)) for pattern in patterns)


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raises `UserError` if the disk of `folder` has too little room.

    Free must be `needed_bytes` and a reserve of EXPORT_SPARE_BYTES. `folder` lies in the folder
    that the message names.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + EXPORT_SPARE_BYTES:
        raise UserError(
            f"{folder.parent}: the export takes {disk_size(needed_bytes)}, but the disk has "
            f"{disk_size(free)} free; make room or choose another --output"
        )


def _make_unwritable_error(output: Path, error: OSError) -> UserError:
    return UserError(f"{output}: cannot be written: {error.strerror}; choose another --output")


def _make_locked_folder(staging: Path, output: Path) -> int:
    """Makes the folder `staging` if it is missing, and locks it.

    Returns the descriptor of the lock, which lasts until it is closed. Raises `UserError` if
    another process holds the lock.
    """
    staging.mkdir(exist_ok=True)
    try:
        return durable.lock_folder(staging)
    except durable.FolderInUse:
        raise UserError(
            f"{output}: another process is exporting to it; wait for it, or choose another --output"
        ) from None


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes those of `folders` that are empty. The innermost comes first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and a lost terminal (SIGHUP) into `SystemExit` within the block.

    The exception unwinds the block, which then removes unfinished files. Signals that are ignored,
    as SIGHUP is under nohup, stay ignored. Does nothing outside the main thread, because only the
    main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # Under a launcher Ctrl-C arrives twice. The second must not interrupt the removal.
        if not received:
            received.append(number)
            raise SystemExit(128 + number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    except Exception:
        if received:  # a C extension replaced the exit by an error of its own
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
