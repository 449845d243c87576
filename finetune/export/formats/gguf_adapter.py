"""A LoRA adapter as GGUF, which llama.cpp applies to a base of its own format (`--lora`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch

from finetune.config.pretrained_adapter import why_unsupported
from finetune.errors import UserError
from finetune.export.formats.gguf_file import (
    FILE_TYPES,
    PlannedFile,
    file_name,
    find_differences,
    plan_file,
    write_file,
)
from finetune.export.formats.gguf_model import FileTensor, find_llama_cpp, plan_tensors
from finetune.export.merge import scale_of
from finetune.export.publish import ExportOptions
from finetune.export.source import Source
from finetune.export.target import TargetModel, Value, stored_value
from finetune.terminal import progress_bar
from finetune.units import disk_size

A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The files of an adapter, one of each type. Returned by `plan_adapter`."""

    files: tuple[PlannedFile, ...]
    verify: bool

    @property
    def byte_count(self) -> int:
        return sum(file.byte_count for file in self.files)

    def write(self, folder: Path, logits: object) -> list[str]:
        """Writes the files into `folder`, and returns a line on each. Logits would need the base in GGUF."""
        said = []
        with progress_bar("writing GGUF", self.byte_count) as advance:
            for file in self.files:
                written = write_file(folder, file, advance)
                if self.verify and (problems := find_differences(folder / file.name, file, written)):
                    raise UserError.of(
                        [f"{file.name}: not exported: the file does not hold the adapter", *problems[:10]]
                    )
                verdict = "verified: every tensor" if self.verify else "not verified"
                said.append(f"{file.name}: an adapter of {disk_size(file.byte_count)}, {verdict}")
        return said


def plan_adapter(source: Source, target: TargetModel, options: ExportOptions, title: str) -> AdapterPlan:
    """Plans the files of the adapter of `source`.

    Raises `UserError` where llama.cpp would apply another adapter: it knows A and B of linear layers alone.
    """
    adapter, where = source.adapter, str(source.path)
    model: Any = target.model
    assert adapter is not None
    config = model.config.get_text_config()
    reason = why_unsupported(adapter.config) or ("use_dora" if adapter.config.get("use_dora") else None)
    others = [name for name in sorted(adapter.tensors) if not name.endswith((A, B))]
    if reason is not None or others or adapter.config.get("target_parameters"):
        what = reason or (others[0] if others else "target_parameters")
        raise UserError(f"{where}: {what}: llama.cpp has no adapter of this kind; export the merged model as GGUF")
    if wrong := [each for each in options.gguf_types if each not in FILE_TYPES]:
        raise UserError(f"--gguf-type: {wrong[0]}: an adapter is written as {', '.join(FILE_TYPES)}")
    modules = [name.removesuffix(A) for name in adapter.tensors if name.endswith(A)]
    scales = {module: scale_of(adapter.config, module, where) for module in modules}
    alphas = {scale * rank for scale, rank in scales.values()}
    # llama.cpp has one alpha for all modules: where they differ, it is left out, and B is scaled instead.
    alpha = alphas.pop() if len(alphas) == 1 else None
    bases = [
        Value(f"{module}.weight", target.shapes[f"{module}.weight"], torch.float32, _no_rows) for module in modules
    ]
    tensors = []
    for module, base in zip(modules, plan_tensors(bases, config, where), strict=True):
        a, b = (adapter.tensors[module + end] for end in (A, B))
        scale = 1.0 if alpha is not None else scales[module][0]
        first = FileTensor(f"{base.name}.lora_a", a.shape, (stored_value(a, a.name, torch.float32),))
        second = replace(
            base, name=f"{base.name}.lora_b", shape=b.shape, values=(stored_value(b, b.name, torch.float32),)
        )
        tensors += [first, replace(second, change=partial(_scaled, scale, base.change))]
    types = options.gguf_types or ("f32",)
    architecture = find_llama_cpp(config.model_type).architecture
    keys = partial(_write_keys, title=title, alpha=alpha)
    names = [f"{file_name(title)}-lora-{each.upper()}.gguf" for each in types]
    files = (plan_file(name, architecture, tensors, each, keys) for name, each in zip(names, types, strict=True))
    return AdapterPlan(tuple(files), options.verify)


def _no_rows(start: int, stop: int) -> torch.Tensor:
    raise AssertionError("the base is not read")


def _scaled(scale: float, change: Callable[[torch.Tensor], torch.Tensor] | None, rows: torch.Tensor) -> torch.Tensor:
    return (change(rows) if change is not None else rows) * scale


def _write_keys(writer: Any, title: str, alpha: float | None) -> list[FileTensor]:
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(title)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    return []
