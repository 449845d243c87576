"""What can be told of an export before torch is imported: mistakes in the command, a place that cannot be written."""

from pathlib import Path

from finetune.errors import UserError
from finetune.export.publish import bring_back, bring_back_exports, refuse_existing, refuse_unwritable
from finetune.units import read_size

DTYPES = ("float32", "bfloat16", "float16")


def refuse_mistakes(source: Path, output: Path, *, dtype: str | None, max_shard_size: str, overwrite: bool) -> None:
    """Raises `UserError` where the export could only fail, whatever `source` holds."""
    bring_back_exports(source)
    for place in (source, output):
        bring_back(place)
    if not source.exists():
        raise UserError(f"{source}: no such folder; give a run's folder or a checkpoint")
    if source.is_file():
        raise UserError(f"{source}: a file; give the folder that holds it")
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype: {dtype}: one of {', '.join(DTYPES)} is expected")
    try:
        read_size(max_shard_size)
    except UserError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    if source.resolve().is_relative_to(output.resolve()):
        raise UserError(f"{output}: holds what is exported; choose another --output")
    refuse_existing(output, overwrite)
    refuse_unwritable(output)
