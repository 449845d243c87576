"""What is exported: found, opened and described, without reading a value.

    a run's folder                  its newest valid checkpoint
    a checkpoint of this project    manifest.json, model/, state.json; full or LoRA
    accelerator.save_state          pytorch_model_fsdp_0/ or .bin; model.safetensors of DDP
    torch.distributed.checkpoint    .metadata and *.distcp
    a PEFT adapter                  adapter_config.json and adapter_model.safetensors
    a Hugging Face folder           *.safetensors, or pytorch_model.bin

Folders of other tools seldom say which architecture they hold; then `base_model` names it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.folders import find_newest_valid, list_checkpoints
from finetune.checkpoint.manifest import MODEL, STATE, find_checkpoint_of, find_damage, read_state
from finetune.config.module_names import peft_name
from finetune.config.pretrained import ADAPTER_TORCH_FILE, ADAPTER_WEIGHTS, check_adapter_config
from finetune.config.quantization import read_recipe_quantization
from finetune.config.schema import Quantization
from finetune.constants import ADAPTER_CONFIG, CONFIG_FILE, VALUE_WEIGHT
from finetune.errors import UserError, progress_bar
from finetune.export import torch_files
from finetune.files.json_files import load_json
from finetune.files.network import download_file, download_folder, find_local_folder
from finetune.files.run_files import refuse_several_runs
from finetune.files.tensors import StoredTensor, hash_weights, read_files, read_folder
from finetune.models.quantized_weights import StoredQuantized, dequantize_published, split_quantized

FSDP_FOLDER = "pytorch_model_fsdp_0"  # of accelerator.save_state, sharded
FSDP_FILE = "pytorch_model_fsdp.bin"
# of a hub repository
DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "README.md"]
TORCH_SHARDS = "pytorch_model-*-of-*.bin"
TORCH_FILES = (FSDP_FILE, "pytorch_model.bin", "model.pt", "model.pth")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `tensors` have PEFT's names without its prefix:
    `model.layers.0.self_attn.q_proj.lora_A.weight`."""

    config: dict[str, Any]  # adapter_config.json
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Source:
    """A model to export, opened and described; no values are read yet.

    Returned by `open_source`.
    """

    path: Path  # as errors name it
    description: Path  # the folder with config.json, tokenizer and chat template
    # by the names in the files; the base model's where there is an adapter
    tensors: dict[str, StoredTensor]
    names_may_be_prefixed: bool = False
    adapter: Adapter | None = None
    base_model: str | None = None  # a hub name or a folder
    base: Path | None = None  # its folder, where it is on this machine
    base_is_named: bool = False  # by --base-model
    base_differs: bool = False  # known not to have the weights that the adapter was trained on
    # state.json of a checkpoint of this project
    state: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None  # the run's folder, where the source belongs to one
    has_critic: bool = False  # beside `tensors`, which no export holds
    # of `tensors`, those stored in 4 or 8 bits
    quantized: Mapping[str, StoredQuantized] = field(default_factory=dict)

    @property
    def adapter_names(self) -> Collection[str]:
        """The names of the adapter's tensors; none without one."""
        return () if self.adapter is None else self.adapter.tensors.keys()

    @property
    def recipe(self) -> Mapping[str, Any]:
        recipe = self.state.get("recipe")
        return recipe if isinstance(recipe, dict) else {}

    @property
    def quantization(self) -> Quantization:
        """How the base was quantized in the training."""
        return read_recipe_quantization(self.recipe)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the training multiplied with the base."""
        return getattr(torch, str(self.state.get("compute_dtype")), torch.bfloat16)


def open_source(
    path: Path, *, base_model: str | None = None, log: Callable[[str], object] = print
) -> Source:
    """Opens `path`, whichever of the kinds above it is.

    Newer checkpoints that are damaged are logged. A critic, which only training reads, is left out.

    Raises `UserError` where it is none of them, is damaged, or needs a `base_model` that is
    missing.
    """
    source = _open(path, base_model, log)
    trained = source.tensors if source.adapter is None else source.adapter.tensors
    kept = {name: tensor for name, tensor in trained.items() if not name.endswith(VALUE_WEIGHT)}
    if len(kept) == len(trained):
        return source
    if source.adapter is None:
        return replace(source, tensors=kept, has_critic=True)
    return replace(source, adapter=replace(source.adapter, tensors=kept), has_critic=True)


def _open(path: Path, base_model: str | None, log: Callable[[str], object]) -> Source:
    checkpoint = _find_checkpoint(path, log)
    if checkpoint is not None:
        source = replace(
            _open_checkpoint(checkpoint, base_model), base_is_named=base_model is not None
        )
        return replace(source, base_differs=not _is_base_the_trained_one(source, base_model, log))
    if (path / ADAPTER_CONFIG).exists():
        return _open_adapter(path, base_model)
    tensors, prefixed = _read_foreign_tensors(path)
    has_config = (path / CONFIG_FILE).exists()
    if not has_config and base_model is None:
        raise UserError(
            f"{path}: has no config.json; name the model that was trained (a folder or a hub name) "
            "with --base-model"
        )
    base = find_base(base_model) if base_model else None
    description = path if has_config or base is None else base
    return Source(path, description, tensors, prefixed, base_model=base_model, base=base)


def find_base(name: str, revision: str | None = None, *, with_weights: bool = False) -> Path:
    """The folder of a base model: `name`, or a hub name's from cache or hub (without weights by
    default).

    Raises `UserError` where it is missing or unreachable.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute():
        raise UserError(
            f"{name}: the base model's folder is gone; name its new place with --base-model"
        )
    # says what is wrong with a repository of something else
    download_file(name, CONFIG_FILE, revision)
    if with_weights:
        patterns = [*DESCRIPTIONS, "*.safetensors"]
    else:
        patterns = DESCRIPTIONS
    return download_folder(name, patterns, "its files", revision)


def _find_checkpoint(path: Path, log: Callable[[str], object]) -> Path | None:
    """The checkpoint of this project that `path` is or holds; None where there is none."""
    checkpoint = find_checkpoint_of(path)
    if checkpoint is not None:
        if problems := _find_problems(checkpoint):
            raise UserError(
                f"{path}: damaged: {'; '.join(problems)}; export another checkpoint of the run"
            )
        return checkpoint
    if path.name == "checkpoints" and list_checkpoints(path.parent):
        run = path.parent
    else:
        run = path
    if not list_checkpoints(run):
        return None
    passed_over: list[str] = []
    newest = find_newest_valid(run, passed_over.append, verify=_find_problems)
    if newest is None:
        raise UserError.of([f"{run}: no checkpoint of this run is whole", *passed_over])
    for line in passed_over:
        log(line)
    return newest


def _find_problems(checkpoint: Path) -> list[str]:
    """Finds what is wrong with a checkpoint's model; reads every byte of it."""
    total_bytes = sum(
        path.stat().st_size for path in (checkpoint / MODEL).rglob("*") if path.is_file()
    )
    with progress_bar(f"checking {checkpoint.name}", total_bytes) as advance:
        return find_damage(checkpoint, parts=[MODEL], advance=advance)


def _open_checkpoint(checkpoint: Path, base_model: str | None) -> Source:
    model = checkpoint / MODEL
    state = read_state(checkpoint, STATE)
    name = base_model or state.get("base_model")
    run = None
    if checkpoint.parent.name == "checkpoints":
        run = checkpoint.parent.parent
    source = Source(checkpoint, model, read_folder(model), base_model=name, state=state, run=run)
    is_own = name == source.recipe.get("model_name_or_path")
    revision = source.recipe.get("model_revision") if is_own else None
    if (model / ADAPTER_CONFIG).exists():
        return _add_base(source, load_json(model / ADAPTER_CONFIG), revision)
    if base_model is not None:
        return replace(source, base=find_base(base_model, revision))
    return replace(source, base=find_local_folder(name, revision) if name else None)


def _is_base_the_trained_one(
    source: Source, given: str | None, log: Callable[[str], object]
) -> bool:
    """Whether the base has the weights that the adapter was trained on, if known; reads every byte
    of it.

    Raises `UserError` for others, unless --base-model named that base: then the difference is
    logged.
    """
    trained_on = source.state.get("inputs", {}).get("base")
    if (
        source.adapter is None
        or source.base is None
        or trained_on is None
        or hash_weights(source.base) == trained_on
    ):
        return True
    problem = f"{source.base}: not the weights that the adapter of {source.path} was trained on"
    if given is None:
        raise UserError(f"{problem}; restore them, or name a folder with --base-model")
    log(f"warning: {problem}; used all the same, since --base-model names them")
    return False


def _open_adapter(path: Path, base_model: str | None) -> Source:
    config = load_json(path / ADAPTER_CONFIG)
    if (path / ADAPTER_WEIGHTS).exists():  # an optimizer's moments may lie beside it
        tensors = read_files([path / ADAPTER_WEIGHTS])
    elif (path / ADAPTER_TORCH_FILE).exists():
        tensors = torch_files.read_torch_files([path / ADAPTER_TORCH_FILE])
    else:
        tensors = read_folder(path)
    name = base_model or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{path / ADAPTER_CONFIG}: names no base model; name it with --base-model")
    return _add_base(Source(path, path, tensors, base_model=name), config, config.get("revision"))


def _add_base(source: Source, config: dict[str, Any], revision: str | None) -> Source:
    """`source`, whose tensors are an adapter's, with the base model under it."""
    check_adapter_config(config, str(source.description / ADAPTER_CONFIG))
    if source.base_model is None:
        raise UserError(
            f"{source.path}: a LoRA checkpoint that names no base model; name it with --base-model"
        )
    base = find_base(source.base_model, revision, with_weights=True)
    named = {peft_name(name): tensor for name, tensor in source.tensors.items()}
    adapter = Adapter(config, {name: replace(tensor, name=name) for name, tensor in named.items()})
    if (source.description / CONFIG_FILE).exists():
        description = source.description
    else:
        description = base
    tensors, quantized = split_quantized(read_folder(base), str(base))
    return replace(
        source,
        description=description,
        tensors=tensors,
        adapter=adapter,
        base=base,
        quantized=quantized,
    )


def _read_foreign_tensors(path: Path) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors in a folder of another tool, and whether their names may have a prefix."""
    for folder in (path, path / FSDP_FOLDER):
        if (folder / torch_files.METADATA).exists():
            return torch_files.read_dcp_folder(folder), True
    if any(path.glob("*.safetensors")):
        return dequantize_published(read_folder(path), path), False
    for name in TORCH_FILES:
        if (path / name).exists():
            return torch_files.read_torch_files([path / name]), True
    if shards := sorted(path.glob(TORCH_SHARDS)):
        return torch_files.read_torch_files(shards), True
    refuse_several_runs(path)
    raise UserError(
        f"{path}: nothing to export: no checkpoint of a run, no {FSDP_FOLDER}, no .metadata, no "
        f"*.safetensors, no {' or '.join(TORCH_FILES[:2])}"
    )
