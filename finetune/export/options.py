"""What an export is asked for, checked without torch: a mistake in the command is reported before seconds of
imports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune.checkpoint.manifest import STATE
from finetune.config.quantization import read_recipe_quantization
from finetune.errors import UserError
from finetune.export.publish import check_destination
from finetune.files.durable import restore_exports, restore_folder
from finetune.files.run_json import read_json_object
from finetune.units import read_size

DTYPES = ("float32", "bfloat16", "float16")
MergeOnto = Literal["original", "dequantized"]  # the base that an adapter trained on a quantized one is merged onto


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What of a source is exported, and how."""

    dtype: str | None = None  # None: the base model's
    max_shard_size: str = "5GB"
    verify: bool = True
    overwrite: bool = False
    model: bool = True  # LoRA: the merged model
    adapter: bool = True  # LoRA: the adapter as a PEFT folder; in `adapter/` beside a merged model
    trust_remote_code: bool = False
    merge_onto: MergeOnto | None = None  # QLoRA: None: the one with the lower held-out loss


def _was_quantized(source: Path) -> bool:
    """Whether a checkpoint in `source`, by the recipe in its state, has an adapter of a quantized base."""
    states = [source / STATE, *source.glob(f"*/{STATE}"), *source.glob(f"checkpoints/*/{STATE}")]
    recipes = (read_json_object(state).get("recipe") for state in states)
    return any(isinstance(each, dict) and read_recipe_quantization(each).bits is not None for each in recipes)


def check_request(source: Path, output: Path, options: ExportOptions) -> None:
    """Raises `UserError` where the export could only fail, whatever `source` holds.

    First restores exports that a killed process was replacing: one of them may be `source`.
    """
    restore_exports(source)
    for place in (source, output):
        restore_folder(place)
    if not source.exists():
        raise UserError(f"{source}: no such folder; give a run's folder or a checkpoint")
    if source.is_file():
        raise UserError(f"{source}: a file; give the folder that holds it")
    if options.dtype not in (None, *DTYPES):
        raise UserError(f"--dtype: {options.dtype}: one of {', '.join(DTYPES)} is expected")
    try:
        read_size(options.max_shard_size)
    except UserError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    if options.merge_onto is not None and not options.model:
        raise UserError("--merge-onto: nothing is merged with --adapter-only; omit one of them")
    if options.merge_onto is not None and not _was_quantized(source):
        raise UserError(f"{source}: --merge-onto: not known to be trained on a quantized base; omit it")
    if source.resolve().is_relative_to(output.resolve()):
        raise UserError(f"{output}: holds what is exported; choose another --output")
    check_destination(output, options.overwrite)
