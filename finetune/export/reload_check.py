"""What a stranger sees of an exported folder: `python -m finetune.export.reload_check FOLDER LOGITS` in a process of its own.

FOLDER holds config.json; the weights may still be in the making. It is opened when a line has come on stdin, with
transformers and safetensors, none of the reading code that wrote it. The logits of the fixed prompts are left in the file
LOGITS. A folder that cannot be opened so ends the process with one line on stderr and exit code 1.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from finetune.errors import UserError
from finetune.export import target as architecture
from finetune.export.logits import streamed_logits
from finetune.export.target import Architecture
from finetune.safetensors_io.tensors import SINGLE_FILE

TRUST_REMOTE_CODE = "--trust-remote-code"

Used = TypeVar("Used")


def main(arguments: list[str]) -> int:
    trust_remote_code = TRUST_REMOTE_CODE in arguments
    folder, logits = (Path(argument) for argument in arguments if argument != TRUST_REMOTE_CODE)
    import_transformers()
    try:
        built = architecture.build(folder, trust_remote_code=trust_remote_code)
        if not sys.stdin.readline():
            return 1  # whoever started this has gone
        open_as_others_do(folder, trust_remote_code)
        save_file({"logits": _logits(folder, built).contiguous()}, logits)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def import_transformers() -> None:
    """What takes seconds of a start; its names are imported where they are used."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401


def open_as_others_do(folder: Path, trust_remote_code: bool = False) -> None:
    """Loads config, generation config, tokenizer and (on meta) the model by transformers' own ways.

    Raises `UserError` where a tensor is missing, left over or misshapen, or any of it does not open.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        GenerationConfig.from_pretrained(folder)
        if (folder / "tokenizer_config.json").exists():
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _, told = AutoModelForCausalLM.from_pretrained(
            folder, device_map="meta", output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever is wrong with it, the folder is not fit to be published
        raise UserError(f"transformers cannot open it: {type(error).__name__}: {error}") from None
    wrong = {kind: sorted(map(str, names)) for kind, names in told.items() if names}
    if wrong:
        raise UserError(
            "; ".join(f"transformers reports {kind}: {', '.join(names[:5])}" for kind, names in wrong.items())
        )


def _logits(folder: Path, built: Architecture) -> torch.Tensor:
    files = sorted(folder.glob("*.safetensors")) if not (folder / SINGLE_FILE).exists() else [folder / SINGLE_FILE]
    holder: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            holder |= dict.fromkeys(opened.keys(), file)

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        name = built.tied.get(name, name)
        return rows_by_safetensors(holder[name], name, start, stop, _float32)

    return streamed_logits(built.model, rows)


def rows_by_safetensors(file: Path, name: str, start: int, stop: int, use: Callable[[torch.Tensor], Used]) -> Used:
    """What `use` makes of rows of a tensor, as the reference implementation reads them; a scalar has one row, itself.

    The rows are a memory map, gone when `use` returns: the file is opened for each call, so that its pages are let go.
    """
    with safe_open(file, framework="pt") as opened:
        part: Any = opened.get_slice(name)
        return use(part[start:stop] if part.get_shape() else opened.get_tensor(name))


def _float32(mapped: torch.Tensor) -> torch.Tensor:
    """A copy in memory; what is no float keeps its type."""
    return mapped.to(torch.float32 if mapped.is_floating_point() else mapped.dtype, copy=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
