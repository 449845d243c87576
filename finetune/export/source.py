"""Opens the source of an export: lists its tensors and finds its configs, without reading values.

A source is one of these:

    a run's folder                  its newest valid checkpoint
    a checkpoint of this project    manifest.json, model/, state.json; full or LoRA
    accelerator.save_state          pytorch_model_fsdp_0/ or .bin; model.safetensors of DDP
    torch.distributed.checkpoint    .metadata and *.distcp
    a PEFT adapter                  adapter_config.json and adapter_model.safetensors
    a Hugging Face folder           *.safetensors, or pytorch_model.bin

Many folders of other tools have no config.json. `base_model` then names the model to describe them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.folders import find_newest_valid, list_checkpoints
from finetune.checkpoint.manifest import MODEL, STATE, find_checkpoint_of, find_damage, read_state
from finetune.config.methods import MethodFacts, facts_of
from finetune.config.module_names import ORIGINAL_MODULE, peft_name
from finetune.config.pretrained import ADAPTER_TORCH_FILE, ADAPTER_WEIGHTS, check_adapter_config
from finetune.config.quantization import read_recipe_quantization
from finetune.config.schema import Quantization
from finetune.config.yaml_file import find_yaml
from finetune.constants import (
    ADAPTER_CONFIG,
    COMPUTE_DTYPE,
    CONFIG_FILE,
    TOKENIZER_FILE,
    VALUE_WEIGHT,
    Shape,
)
from finetune.errors import UserError, progress_bar
from finetune.export import torch_files
from finetune.export.publish import find_run_of_adapter
from finetune.files.json_files import load_json
from finetune.files.network import DESCRIPTIONS, download_file, download_folder, find_local_folder
from finetune.files.run_files import refuse_several_runs
from finetune.files.tensors import StoredTensor, hash_weights, read_files, read_folder
from finetune.models.quantized_weights import StoredQuantized, dequantize_published, split_quantized

FSDP_FOLDER = "pytorch_model_fsdp_0"  # accelerator.save_state writes it for a sharded state dict
FSDP_FILE = "pytorch_model_fsdp.bin"  # and this file for a full one
# A tokenizer has at least one of these files.
VOCABULARIES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt")
TORCH_SHARDS = "pytorch_model-*-of-*.bin"
# files of other tools that hold a whole state dict; the first that exists is read
TORCH_FILES = (FSDP_FILE, "pytorch_model.bin", "model.pt", "model.pth")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A PEFT adapter: LoRA or OFT."""

    config: dict[str, Any]  # the content of adapter_config.json
    # by PEFT's names without its prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Source:
    """The source of an export, whose values are not read yet. Returned by `open_source`."""

    path: Path  # the name in messages
    description: Path  # the folder with config.json, and mostly with the tokenizer
    # by the names in the files; if there is an adapter, these are its base model's
    tensors: dict[str, StoredTensor]
    # the names may have a common prefix, and an optimizer's tensors lie beside them
    names_may_be_prefixed: bool = False
    adapter: Adapter | None = None
    base_model: str | None = None  # a hub name or a folder; None: not known
    base: Path | None = None  # the base model's folder; None: not on this machine, or not known
    # the folder of an adapter that brings a tokenizer of its own; None: it is in `description`
    adapter_tokenizer: Path | None = None
    base_is_named: bool = False  # --base-model named the base of a checkpoint of this project
    base_differs: bool = False  # known not to have the weights that the adapter was trained on
    # content of state.json of a checkpoint of this project; of a run's adapter, the part that is
    # the same for the whole run; empty for other sources
    state: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None  # the run's folder; None: the source belongs to none
    has_critic: bool = False  # the source also has a critic, which is left out of the tensors
    # those of `tensors` that are stored in 4 or 8 bits
    quantized: Mapping[str, StoredQuantized] = field(default_factory=dict)

    @property
    def adapter_shapes(self) -> dict[str, Shape]:
        """The shapes of the adapter's tensors by name; empty if there is no adapter."""
        tensors = {} if self.adapter is None else self.adapter.tensors
        return {name: tensor.shape for name, tensor in tensors.items()}

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer and its chat template."""
        return self.adapter_tokenizer or self.description

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The run's recipe as key -> value; empty if the source is of no run of ours."""
        recipe = self.state.get("recipe")
        return recipe if isinstance(recipe, dict) else {}

    @property
    def method(self) -> MethodFacts:
        """The facts about the recipe's method."""
        return facts_of(self.recipe)

    @property
    def quantization(self) -> Quantization:
        """How training quantized the base, by the recipe."""
        return read_recipe_quantization(self.recipe)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which training multiplied with the base; bfloat16 if it is not known."""
        return getattr(torch, str(self.state.get("compute_dtype")), torch.bfloat16)


def open_source(
    path: Path, *, base_model: str | None = None, log: Callable[[str], object] = print
) -> Source:
    """Opens `path`, which is one of the kinds at the top of this file.

    A critic's weight, which only training reads, is left out.

    Args:
        path: A folder.
        base_model: The user's --base-model; None: the source names its base, or needs none.
        log: Takes lines about newer checkpoints that are damaged and passed over, and a warning if
            `base_model` has other weights than the adapter was trained on.

    Raises:
        UserError: `path` is of no such kind or damaged, or its base model is not named, missing or
            another than the adapter was trained on.
    """
    source = _open(path, base_model, log)
    tensors = source.tensors if source.adapter is None else source.adapter.tensors
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(VALUE_WEIGHT)}
    if len(kept) == len(tensors):
        return source
    if source.adapter is None:
        return replace(source, tensors=kept, has_critic=True)
    return replace(source, adapter=replace(source.adapter, tensors=kept), has_critic=True)


def _open(path: Path, base_model: str | None, log: Callable[[str], object]) -> Source:
    """Opens `path` as `open_source` does, a critic's weight included."""
    checkpoint = _find_checkpoint(path, log)
    if checkpoint is not None:
        source = replace(
            _open_checkpoint(checkpoint, base_model), base_is_named=base_model is not None
        )
        return replace(source, base_differs=not _verify_base(source, base_model, log))
    if (path / ADAPTER_CONFIG).exists():
        return _open_adapter(path, base_model)
    tensors, may_be_prefixed = _read_foreign_tensors(path)
    has_config = (path / CONFIG_FILE).exists()
    if not has_config and base_model is None:
        raise UserError(
            f"{path}: has no config.json; name the model that was trained (a folder or a hub name) "
            "with --base-model"
        )
    base = find_base(base_model) if base_model else None
    description = path if has_config or base is None else base
    return Source(path, description, tensors, may_be_prefixed, base_model=base_model, base=base)


def find_base(name: str, revision: str | None = None, *, with_weights: bool = False) -> Path:
    """Returns the folder of a base model, downloading what is missing in the hub's cache.

    Args:
        name: A folder or a hub name.
        revision: The revision on the hub; None: the main one.
        with_weights: Whether the weights are downloaded too, beside the files that describe them.

    Raises:
        UserError: The model is missing or the hub unreachable.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute():
        raise UserError(
            f"{name}: the base model's folder is gone; name its new place with --base-model"
        )
    # First, because it raises the clearer error for a repository without a model.
    download_file(name, CONFIG_FILE, revision)
    if with_weights:
        patterns = [*DESCRIPTIONS, "*.safetensors"]
    else:
        patterns = DESCRIPTIONS
    return download_folder(name, patterns, "its model", revision)


def _find_checkpoint(path: Path, log: Callable[[str], object]) -> Path | None:
    """Finds the checkpoint of this project that `path` names; None if `path` is something else.

    A checkpoint, or its model/, names that checkpoint. A run's folder, or its checkpoints/, names
    the newest one that is not damaged. Newer ones that are passed over are logged.

    Raises `UserError` if the checkpoint, or every one of the run, is damaged.
    """
    checkpoint = find_checkpoint_of(path)
    if checkpoint is not None:
        if problems := _find_problems(checkpoint):
            raise UserError(
                f"{path}: damaged: {'; '.join(problems)}; export another checkpoint of the run"
            )
        return checkpoint
    path = path.absolute()  # "." has no name
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
    """Lists what is wrong with a checkpoint's model; it reads every byte of the model's files."""
    total_bytes = sum(
        path.stat().st_size for path in (checkpoint / MODEL).rglob("*") if path.is_file()
    )
    with progress_bar(f"checking {checkpoint.name}", total_bytes) as advance:
        return find_damage(checkpoint, parts=[MODEL], advance=advance)


def _open_checkpoint(checkpoint: Path, base_model: str | None) -> Source:
    """Opens a checkpoint of this project.

    The base is required under LoRA, and where `base_model` names it. Otherwise it is only looked up
    on this machine, and `Source.base` is None if it is not there.
    """
    model = checkpoint / MODEL
    state = read_state(checkpoint, STATE)
    name = base_model or state.get("base_model")
    run = None
    if checkpoint.parent.name == "checkpoints":
        run = checkpoint.parent.parent
    source = Source(checkpoint, model, read_folder(model), base_model=name, state=state, run=run)
    is_recipe_model = name == source.recipe.get("model_name_or_path")
    revision = source.recipe.get("model_revision") if is_recipe_model else None
    if (model / ADAPTER_CONFIG).exists():
        return _add_base(source, load_json(model / ADAPTER_CONFIG), revision)
    if base_model is not None:
        return replace(source, base=find_base(base_model, revision))
    return replace(source, base=find_local_folder(name, revision) if name else None)


def _verify_base(source: Source, base_model: str | None, log: Callable[[str], object]) -> bool:
    """Compares the base's weights with the hash of those that the adapter was trained on.

    It reads every byte of the base. Returns True if they are the same, or if there is nothing to
    compare: no adapter, no base, or no hash in the checkpoint. Different weights are an error,
    unless the user named them by `base_model`: then a warning is logged, and False returned.

    Raises `UserError` for different weights that the user did not name.
    """
    trained_hash = source.state.get("inputs", {}).get("base")
    if (
        source.adapter is None
        or source.base is None
        or trained_hash is None
        or hash_weights(source.base) == trained_hash
    ):
        return True
    problem = f"{source.base}: not the weights that the adapter of {source.path} was trained on"
    if base_model is None:
        raise UserError(f"{problem}; restore them, or name a folder with --base-model")
    log(f"warning: {problem}; used all the same, since --base-model names them")
    return False


def _open_adapter(path: Path, base_model: str | None) -> Source:
    """Opens a PEFT folder with the base model that `base_model`, or else the adapter, names."""
    config = load_json(path / ADAPTER_CONFIG)
    if (path / ADAPTER_WEIGHTS).exists():  # the only file to read: others may be an optimizer's
        tensors = read_files([path / ADAPTER_WEIGHTS])
    elif (path / ADAPTER_TORCH_FILE).exists():
        tensors = torch_files.read_torch_files([path / ADAPTER_TORCH_FILE])
    else:
        tensors = read_folder(path)
    trained_base = config.get("base_model_name_or_path")
    name = base_model or trained_base
    if not isinstance(name, str) or not name:
        raise UserError(f"{path / ADAPTER_CONFIG}: names no base model; name it with --base-model")
    revision = config.get("revision") if name == trained_base else None
    run = find_run_of_adapter(path)
    source = Source(
        path,
        path,
        tensors,
        base_model=name,
        adapter_tokenizer=path if has_vocabulary(path) else None,
        state=_read_settings(run) if run is not None else {},
        run=run,
    )
    return _add_base(source, config, revision)


def has_vocabulary(folder: Path) -> bool:
    """Whether `folder` has a tokenizer's vocabulary, not only its settings."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def _read_settings(run: Path) -> dict[str, Any]:
    """Reads what the state.json of a checkpoint of `run` says of the whole run."""
    precision = find_yaml(run / "accelerate.yaml").get("mixed_precision")
    return {
        "recipe": find_yaml(run / "recipe.yaml"),
        "compute_dtype": COMPUTE_DTYPE.get(str(precision)),
    }


def _add_base(source: Source, config: dict[str, Any], revision: str | None) -> Source:
    """Opens the base model of `source`, whose tensors so far are those of an adapter.

    Returns a source with the adapter in `adapter` and the base's tensors in `tensors`.

    Args:
        source: The adapter as it was opened. Its `base_model` names the base.
        config: The content of adapter_config.json.
        revision: The base's revision on the hub; None: the main one.

    Raises:
        UserError: The config is wrong, or the base is not named or missing.
    """
    check_adapter_config(config, str(source.description / ADAPTER_CONFIG))
    if source.base_model is None:
        raise UserError(
            f"{source.path}: a LoRA checkpoint that names no base model; name it with --base-model"
        )
    base = find_base(source.base_model, revision, with_weights=True)
    by_name = {
        peft_name(name): tensor
        for name, tensor in source.tensors.items()
        if ORIGINAL_MODULE not in name  # a copy of the base's, which nothing reads
    }
    adapter = Adapter(
        config, {name: replace(tensor, name=name) for name, tensor in by_name.items()}
    )
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
    """Opens the tensors in a folder of another tool.

    Returns them by name, and whether their names may have a prefix and an optimizer's tensors lie
    beside them. Raises `UserError` if the folder holds none.
    """
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
