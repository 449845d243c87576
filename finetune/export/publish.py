"""The folder that an export makes: what may be asked of it, and how it appears whole or not at all.

No torch.
"""

import os
import shutil
import signal
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
from finetune.constants import ADAPTER_CONFIG, CONFIG_FILE, EXPORT_SPARE_BYTES, Names
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import read_json_object
from finetune.units import disk_size, read_size

DTYPES = ("float32", "bfloat16", "float16")
# the base that an adapter trained on a quantized one is merged onto
MergeOnto = Literal["original", "dequantized"]
AdapterNames = Literal["peft", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of an export."""

    dtype: str | None = None  # None: the base model's
    max_shard_size: str = "5GB"
    verify: bool = True
    overwrite: bool = False
    model: bool = True  # LoRA: the merged model
    adapter: bool = True  # LoRA: the adapter as a PEFT folder; in `adapter/` beside a merged model
    adapter_names: AdapterNames = "peft"  # whose names the adapter's tensors have
    trust_remote_code: bool = False
    merge_onto: MergeOnto | None = None  # QLoRA: None: the one with the lower held-out loss
    formats: Names = ("safetensors",)
    # of the formats (`list_keys`); each has its default
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """The value of a format's key."""
        return self.all_keys()[name]

    def all_keys(self) -> dict[str, Any]:
        """The values of all formats' keys, by name.

        Raises `UserError` where `keys` has one that no format knows.
        """
        defaults = {key.name: key.default for key in list_keys()}
        for name in self.keys:
            if name not in defaults:
                raise UserError(
                    f"export: {name}: not an argument; the formats have {', '.join(defaults)}"
                )
        return defaults | dict(self.keys)


def is_alone(name: str, options: "ExportOptions") -> bool:
    """Whether a format is the only one, whose files stand in the folder itself."""
    return options.formats == (name,)


def _was_quantized(source: Path) -> bool:
    """Whether a checkpoint in `source`, by the recipe in its state, has an adapter of a quantized
    base.
    """
    states = [source / STATE, *source.glob(f"*/{STATE}"), *source.glob(f"checkpoints/*/{STATE}")]
    recipes = (read_json_object(state).get("recipe") for state in states)
    return any(
        isinstance(each, dict) and read_recipe_quantization(each).bits is not None
        for each in recipes
    )


def check_request(source: Path, output: Path, options: ExportOptions) -> None:
    """Raises `UserError` where the export could only fail, whatever `source` holds.

    First restores exports that a killed process was replacing: one of them may be `source`.
    """
    durable.restore_exports(source)
    for place in (source, output):
        durable.restore_folder(place)
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
    """Raises `UserError` for options of which one is wrong by itself or beside another."""
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
    """Raises `UserError` where nothing can be written to the folder in which `output` will be."""
    above = next(folder for folder in output.absolute().parents if folder.exists())
    try:
        with TemporaryDirectory(prefix=".finetune-", dir=above):
            pass
    except OSError as error:
        raise _unwritable(output, error) from None


@contextmanager
def publish(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Makes an empty folder beside `output`, and renames it to that when the block ends.

    Where the block raises, the folder is removed, with the folders above it that were made for it.

    Raises `UserError` where `output` exists and may not be replaced, or another process is
    exporting to it.
    """
    durable.restore_folder(output)
    _check_replaceable(output, overwrite)
    staging, replaced = durable.paths_beside(output)
    missing = [folder for folder in output.parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(staging, output)
    except OSError as error:
        _remove_empty(missing)
        raise _unwritable(output, error) from None
    try:
        with durable.stage_and_rename(output, staging, replaced):
            yield staging
    except BaseException as error:
        _remove_empty(missing)
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            raise UserError(
                f"{output}: cannot be written: {reason}; nothing is left of the export"
            ) from None
        raise
    finally:
        os.close(lock)


def _check_replaceable(output: Path, overwrite: bool) -> None:
    """Raises `UserError` if `output` exists, unless `overwrite` and it is an export (or empty)."""
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
    """Whether a folder is an export, or empty."""
    suffixes = [row.suffix for row in EXPORT_FORMATS.values() if row.suffix]
    names = [CONFIG_FILE, ADAPTER_CONFIG, *(f"*{suffix}" for suffix in suffixes)]
    return not any(folder.iterdir()) or any(any(folder.glob(name)) for name in names)


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raises `UserError` where the disk under `folder` has less than `needed_bytes` and a reserve
    free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + EXPORT_SPARE_BYTES:
        raise UserError(
            f"{folder.parent}: the export takes {disk_size(needed_bytes)}, but the disk has "
            f"{disk_size(free)} free; make room or choose another --output"
        )


def _unwritable(output: Path, error: OSError) -> UserError:
    return UserError(f"{output}: cannot be written: {error.strerror}; choose another --output")


def _lock(staging: Path, output: Path) -> int:
    """Makes the staging folder and locks it, until the returned descriptor is closed."""
    staging.mkdir(exist_ok=True)
    try:
        return durable.lock_folder(staging)
    except durable.FolderInUse:
        raise UserError(
            f"{output}: another process is exporting to it; wait for it, or choose another --output"
        ) from None


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes `folders`, each within the one after it, except those that are not empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and a lost terminal end the block by `SystemExit`, so that unfinished files
    are removed.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # under a launcher Ctrl-C arrives twice; the second must not interrupt the removal
        if not received:
            received.append(number)
            raise SystemExit(128 + number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # nohup ignores SIGHUP
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    except Exception:
        if received:  # a C extension replaced the exit by an error of its own
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
