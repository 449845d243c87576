"""What is exported: found, opened and described, without reading a value.

    a run's folder                  its newest valid checkpoint
    a checkpoint of ours            manifest.json, model/, state.json; full or LoRA
    accelerator.save_state          pytorch_model_fsdp_0/ (sharded), pytorch_model_fsdp.bin (full), model.safetensors (DDP)
    torch.distributed.checkpoint    .metadata and *.distcp
    a PEFT adapter                  adapter_config.json and adapter_model.safetensors
    a Hugging Face folder           *.safetensors, or pytorch_model.bin

Folders of others seldom say which architecture they are of; then `base_model` names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.export import lora_merge as lora
from finetune.export import torch_files
from finetune.export.dcp_metadata import METADATA
from finetune.export.preflight import DTYPES
from finetune.export.progress import progress_bar
from finetune.export.target import CONFIG_FILE, stored_dtype
from finetune.hub import download_file, find_local_folder
from finetune.safetensors_io.header import read_json
from finetune.safetensors_io.tensors import StoredTensor, main_dtype, read_folder

FSDP_FOLDER, FSDP_FILE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "README.md"]  # of a hub repository
TORCH_SHARDS = "pytorch_model-*-of-*.bin"
TORCH_FILES = (FSDP_FILE, "pytorch_model.bin", "model.pt", "model.pth")


@dataclass(frozen=True, slots=True)
class Source:
    """Something that can be exported."""

    path: Path  # as errors name it
    description: Path  # the folder with config.json, tokenizer and chat template
    tensors: dict[str, StoredTensor]  # by the names that its writer used; the base's where there is an adapter
    names_may_be_prefixed: bool = False
    adapter: lora.Adapter | None = None
    base_model: str | None = None  # a hub name or a folder
    base: Path | None = None  # its folder, where it is on this machine
    state: Mapping[str, Any] = field(default_factory=dict)  # state.json of a checkpoint of ours
    run: Path | None = None  # the run's folder, where the source is of one

    @property
    def recipe(self) -> Mapping[str, Any]:
        recipe = self.state.get("recipe")
        return recipe if isinstance(recipe, dict) else {}


def open_source(path: Path, *, base_model: str | None = None, tell: Callable[[str], object] = print) -> Source:
    """What stands at `path`, whichever of the kinds above it is. `tell` hears of newer checkpoints that are damaged.

    Raises `UserError` where it is none of them, is damaged, or needs a `base_model` that is not given or not at hand.
    """
    checkpoint = _checkpoint_of(path, tell)
    if checkpoint is not None:
        return _of_same_base(_open_checkpoint(checkpoint, base_model), base_model, tell)
    if (path / lora.CONFIG_FILE).exists():
        return _open_adapter(path, base_model)
    tensors, prefixed = _foreign_tensors(path)
    own = (path / CONFIG_FILE).exists()
    if not own and base_model is None:
        raise UserError(
            f"{path}: has no config.json; name the model that was trained (a folder or a hub name) with --base-model"
        )
    base = find_base(base_model) if base_model else None
    description = path if own or base is None else base
    return Source(path, description, tensors, prefixed, base_model=base_model, base=base)


def find_base(name: str, revision: str | None = None, *, with_weights: bool = False) -> Path:
    """The folder of a base model: a folder as it is, a hub name from the cache or the hub, weights only where wanted.

    Raises `UserError` where it is not to be had.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute():
        raise UserError(f"{name}: the base model's folder is gone; say where it is with --base-model")
    from huggingface_hub import snapshot_download

    download_file(name, CONFIG_FILE, revision)  # says in one sentence what is wrong, where something is
    patterns = [*DESCRIPTIONS, "*.safetensors"] if with_weights else DESCRIPTIONS
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _checkpoint_of(path: Path, tell: Callable[[str], object]) -> Path | None:
    """The checkpoint of ours that `path` is or holds; None where it is nothing of ours."""
    from finetune.checkpoint.manifest import find_checkpoint_of
    from finetune.checkpoint.retention import find_newest_valid, list_checkpoints

    checkpoint = find_checkpoint_of(path)
    if checkpoint is not None:
        if problems := _problems_of(checkpoint):
            raise UserError(f"{path}: damaged: {'; '.join(problems)}; export another checkpoint of the run")
        return checkpoint
    if path.name == "checkpoints" and list_checkpoints(path.parent):
        path = path.parent
    if not list_checkpoints(path):
        return None
    passed_over: list[str] = []
    newest = find_newest_valid(path, passed_over.append, verify=_problems_of)
    if newest is None:
        raise UserError.of([f"{path}: no checkpoint of this run is whole", *passed_over])
    for line in passed_over:
        tell(line)
    return newest


def _problems_of(checkpoint: Path) -> list[str]:
    """What is wrong with the model in a checkpoint of ours, every byte of which is read."""
    from finetune.checkpoint.manifest import MODEL, find_problems

    total_bytes = sum(path.stat().st_size for path in (checkpoint / MODEL).rglob("*") if path.is_file())
    with progress_bar(f"checking {checkpoint.name}", total_bytes) as advance:
        return find_problems(checkpoint, parts=[MODEL], advance=advance)


def _open_checkpoint(checkpoint: Path, base_model: str | None) -> Source:
    from finetune.checkpoint.json_files import read_state
    from finetune.checkpoint.manifest import MODEL, STATE

    model = checkpoint / MODEL
    state = read_state(checkpoint, STATE)
    name = base_model or state.get("base_model")
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    source = Source(checkpoint, model, read_folder(model), base_model=name, state=state, run=run)
    revision = source.recipe.get("model_revision")
    if (model / lora.CONFIG_FILE).exists():
        return _with_base(source, _json_object(model / lora.CONFIG_FILE), revision)
    if base_model is not None:
        return replace(source, base=find_base(base_model, revision))
    return replace(source, base=find_local_folder(name, revision) if name else None)


def _of_same_base(source: Source, given: str | None, tell: Callable[[str], object]) -> Source:
    """`source`, if its adapters were trained on the base that stands under them; every byte of the base is read.

    Raises `UserError` where they were not; where the user named that base with --base-model, `tell` hears of it.
    """
    from finetune.checkpoint.inputs import hash_base

    then = source.state.get("inputs", {}).get("base")
    if source.adapter is None or source.base is None or then is None or hash_base(source.base) == then:
        return source
    said = f"{source.base}: these are not the weights that the adapters of {source.path} were trained on"
    if given is None:
        raise UserError(f"{said}; restore them, or name a folder with --base-model")
    tell(f"{said}; merged with them all the same, since --base-model names them")
    return source


def _open_adapter(path: Path, base_model: str | None) -> Source:
    config = _json_object(path / lora.CONFIG_FILE)
    if not (path / lora.WEIGHTS_FILE).exists() and (path / "adapter_model.bin").exists():
        tensors = torch_files.read_torch_files([path / "adapter_model.bin"])
    else:
        tensors = read_folder(path)
    name = base_model or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{path / lora.CONFIG_FILE}: names no base model; name it with --base-model")
    return _with_base(Source(path, path, tensors, base_model=name), config, config.get("revision"))


def _with_base(source: Source, config: dict[str, Any], revision: str | None) -> Source:
    """`source`, whose tensors are an adapter's, with its base under it."""
    lora.refuse_malformed(config, str(source.description / lora.CONFIG_FILE))
    if source.base_model is None:
        raise UserError(f"{source.path}: a LoRA checkpoint that names no base model; name it with --base-model")
    base = find_base(source.base_model, revision, with_weights=True)
    named = {lora.peft_name(name): tensor for name, tensor in source.tensors.items()}
    adapter = lora.Adapter(config, {name: replace(tensor, name=name) for name, tensor in named.items()})
    description = source.description if (source.description / CONFIG_FILE).exists() else base
    return replace(source, description=description, tensors=read_folder(base), adapter=adapter, base=base)


def _foreign_tensors(path: Path) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors of a folder that others wrote, and whether their names may stand behind a prefix."""
    for folder in (path, path / FSDP_FOLDER):
        if (folder / METADATA).exists():
            return torch_files.read_dcp_folder(folder), True
    if any(path.glob("*.safetensors")):
        return read_folder(path), False
    files = [path / name for name in TORCH_FILES if (path / name).exists()][:1] or sorted(path.glob(TORCH_SHARDS))
    if files:
        return torch_files.read_torch_files(files), True
    raise UserError(
        f"{path}: nothing to export is here: no checkpoint of a run, no {FSDP_FOLDER}, no .metadata, no *.safetensors, no "
        f"{' or '.join(TORCH_FILES[:2])}"
    )


def _base_dtype(base: Path | None) -> torch.dtype | None:
    """The dtype of most of the base's weights, as its files say; by its config where they are not here."""
    if base is None:
        return None
    try:
        return main_dtype(base)
    except UserError:
        return stored_dtype(_json_object(base / CONFIG_FILE)) if (base / CONFIG_FILE).exists() else None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def wanted_dtype(source: Source, config_json: Mapping[str, Any], given: str | None) -> torch.dtype:
    """The dtype of the result: as given, as the recipe says, as the base has it, as the config says, as it is stored."""
    name = given or source.recipe.get("export_dtype")
    if name is not None:
        return getattr(torch, str(name))  # type: ignore[no-any-return]
    floats = [tensor.dtype for tensor in source.tensors.values() if tensor.dtype.is_floating_point]
    found = _base_dtype(source.base) or stored_dtype(config_json) or (floats[0] if floats else torch.float32)
    return found if str(found).removeprefix("torch.") in DTYPES else torch.bfloat16
