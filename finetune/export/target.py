"""The model that an export writes: its class on the meta device, its tensors, and their values.

A value is computed from stored tensors a few rows at a time, so that memory stays bounded.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from finetune.config.families import find_family
from finetune.config.pretrained import read_facts
from finetune.config.quantization import read_published_form
from finetune.constants import CONFIG_FILE, Shape
from finetune.distributed.model_parts import find_float32, name_of, text_names
from finetune.errors import UserError, first_line
from finetune.files.json_files import load_json
from finetune.files.tensors import StoredTensor, read_slice
from finetune.models.load import build_on_meta
from finetune.models.weights import (
    BoxedTensor,
    are_equal,
    boxes_of_files,
    convert_to_parameters,
    find_mismatches,
)

SECTIONS = ("text_config", "vision_config")  # the parts of a vision-language model's config.json
# The largest block of rows, counted in float32, the widest dtype that a block is converted to.
# Blocks of this size fit a core's cache, and the allocator keeps them instead of returning them to
# the kernel: they take a third of the CPU time of 32 MiB blocks.
BLOCK_BYTES = 4 * 1024 * 1024
PREFETCHED_BLOCKS = 2  # blocks that `prefetch` computes ahead of its caller
# The parts of tensors' names that torch.compile, FSDP1 and activation checkpointing add.
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
PREFIX_PARTS = 3  # the longest prefix of a foreign model's names: a.b.c.
SHOWN_PROBLEMS = 20  # the most problems in one message

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A model and its tensors, by the names in the model and by those in its files.

    Returned by `describe_target`.
    """

    config_json: dict[str, Any]  # the content of config.json, adjusted to `model`
    model: nn.Module  # on meta; its buffers (rotary frequencies) are real
    shapes: dict[str, Shape]  # of parameters and saved buffers that are not `tied`, in their order
    tied: dict[str, str]  # tied tensor, which is not stored -> the tensor whose values it shares
    float32: frozenset[str]  # names that transformers keeps in float32 whatever the model's dtype
    # name in the written files -> the parts of tensors in `shapes` that fill it; mostly one tensor
    files: dict[str, BoxedTensor]
    # names of the tensors of a vision-language model that are no part of its language model
    beside: frozenset[str]
    # tensor that is tied in the source's model but not in this one -> the tensor it was tied to
    untied: dict[str, str] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    def written_dtype(self, name: str, stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
        """Returns the dtype in which the tensor `name` is written.

        It is `wanted`, the model's dtype, except for tensors that are not floating-point, which
        stay as `stored`, and for those that transformers keeps in float32.
        """
        if not stored.is_floating_point:
            return stored
        return torch.float32 if name in self.float32 else wanted

    def written_config(self, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
        """Makes the content of the export's config.json.

        It is the source's, with the class and the `dtype` of the written model.
        """
        config = copy.deepcopy(self.config_json) | {"architectures": [self.class_name]}
        dtype_name = str(dtype).removeprefix("torch.")
        config["dtype"] = dtype_name
        sections = [config[key] for key in SECTIONS if isinstance(config.get(key), dict)]
        for section in (config, *sections):
            # the tensors of a tower may keep the base's dtype, and transformers reads the main one
            if section is not config.get("vision_config"):
                section |= {key: dtype_name for key in ("dtype", "torch_dtype") if key in section}
            if section.get("use_cache") is False:
                section["use_cache"] = True  # training turned it off; generation needs it
            _add_rope_of_transformers_4(section)
        if not trust_remote_code:
            # the code that auto_map names is not copied, and transformers has the class
            config.pop("auto_map", None)
        return config


def _add_rope_of_transformers_4(config: dict[str, Any]) -> None:
    """Repeats transformers 5's `rope_parameters` under the keys of transformers 4.

    mlx-lm reads these keys: without them it uses wrong frequencies. In a config with parameters for
    each type of attention they are those of full attention. There only a family that mlx-lm opens
    gets them: in others transformers itself would take `rope_scaling` for every layer.
    """
    all_types = config.get("rope_parameters")
    if not isinstance(all_types, dict):
        return
    rope = find_main_rope(config)
    if rope is not all_types:
        if not find_family(str(config.get("model_type"))).opens_in_mlx:
            return
        local = all_types.get("sliding_attention") or {}
        if "rope_theta" in local:
            config.setdefault("rope_local_base_freq", local["rope_theta"])
    if "rope_theta" not in rope:
        return
    config.setdefault("rope_theta", rope["rope_theta"])
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config.setdefault("rope_scaling", scaling | {"type": rope_type})


def find_main_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Finds the RoPE parameters of full attention in a config.json; empty if it has none.

    >>> find_main_rope({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})
    {'rope_theta': 1000000.0}
    """
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    return rope.get("full_attention") or rope


def import_transformers() -> None:
    """Imports the libraries that `describe_target` needs, which takes seconds."""
    import accelerate  # noqa: F401
    import transformers.conversion_mapping
    import transformers.modeling_utils  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401


def describe_target(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    adapter: Mapping[str, Shape] = MappingProxyType({}),
    is_quantized: bool = False,
) -> TargetModel:
    """Describes the model of the config.json in `folder`.

    Args:
        folder: A folder with a config.json; the weights are not read.
        trust_remote_code: Whether code that the config names may run.
        adapter: The shapes of an adapter's tensors by name. If a tied head has an adapter the model
            is untied, since the merged head is no longer the embedding. If the adapter has the
            embedding, of more or fewer tokens, the model has as many.
        is_quantized: Whether the weights are stored by bitsandbytes, and read dequantized.

    Raises:
        UserError: The config is missing, describes no causal language model or a quantized one, or
            names code that is not trusted.
    """
    from transformers import CONFIG_MAPPING

    path = folder / CONFIG_FILE
    if not path.exists():
        raise UserError(f"{path}: missing; name the model that was trained with --base-model")
    config_json = load_json(path)
    if (
        "auto_map" in config_json
        and config_json.get("model_type") not in CONFIG_MAPPING
        and not trust_remote_code
    ):
        raise UserError(
            f"{path}: auto_map: this model has code of its own ({config_json.get('model_type')}); "
            "read it, then allow it with --trust-remote-code"
        )
    # A base in a quantized form that is read dequantized: the model here is a plain one.
    form = read_published_form(config_json.get("quantization_config"))
    if "quantization_config" in config_json and (is_quantized or form is not None):
        del config_json["quantization_config"]
    if "quantization_config" in config_json:
        raise UserError(
            f"{path}: quantization_config: quantized weights cannot be exported; name the "
            "unquantized model"
        )
    model: Any = _build_model(folder, trust_remote_code)
    tokens = count_tokens(model, adapter)
    if tokens is not None:
        _set_vocabulary(config_json, tokens)
        model = _build_model(folder, trust_remote_code, tokens=tokens)
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    adapted_modules = {name.rpartition(".lora_")[0] for name in adapter if ".lora_" in name}
    adapted_weights = {f"{module}.weight" for module in adapted_modules}
    untied = {name: first for name, first in tied.items() if name in adapted_weights}
    if untied:
        for section in (config_json, config_json.get("text_config")):
            if isinstance(section, dict):
                section["tie_word_embeddings"] = False
        model = _build_model(folder, trust_remote_code, ties=False, tokens=tokens)
        tied = {name: first for name, first in tied.items() if name not in untied}
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}
    return TargetModel(
        config_json=config_json,
        model=model,
        shapes=shapes,
        files=boxes_of_files(model, shapes),
        tied=tied,
        float32=find_float32(model, state),
        beside=frozenset(name for name in shapes if not name.startswith(text_names(model))),
        untied=untied,
    )


def _set_vocabulary(config_json: dict[str, Any], tokens: int) -> None:
    """Sets the size of the vocabulary in the content of config.json."""
    text_section = config_json.get("text_config")
    if isinstance(text_section, dict):
        text_section["vocab_size"] = tokens
    else:
        config_json["vocab_size"] = tokens


def count_tokens(model: Any, adapter: Mapping[str, Shape]) -> int | None:
    """Counts the rows of the embedding in an adapter that was trained on another vocabulary.

    PEFT saves the embedding with an adapter if the base was resized. Returns None if the adapter
    has no embedding, or one of as many tokens as `model`.

    Args:
        model: The adapter's base, a model of transformers.
        adapter: The shapes of the adapter's tensors by name.
    """
    embedding = model.get_input_embeddings()
    name = name_of(model, embedding)
    for own_name in (f"{name}.weight", f"{name}.base_layer.weight"):
        shape = adapter.get(own_name)
        if shape and shape[0] != embedding.weight.shape[0]:
            return shape[0]
    return None


def _build_model(
    folder: Path, trust_remote_code: bool, *, ties: bool = True, tokens: int | None = None
) -> nn.Module:
    """Builds the model of the config.json in `folder` on meta, in float32 and in eval mode.

    Args:
        folder: The folder.
        trust_remote_code: Whether code that the config names may run.
        ties: False unties the head from the embedding, whatever the config says.
        tokens: The size of the vocabulary; None: the config's.

    Raises:
        UserError: Transformers cannot build the model.
    """
    from transformers import AutoConfig

    path = folder / CONFIG_FILE
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not ties:
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
        if tokens is not None:
            config.get_text_config().vocab_size = tokens
        read_facts(config, str(path))
        return build_on_meta(config, torch.float32, trust_remote_code).eval()
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    except Exception as error:  # a config can be wrong in any way
        reason = first_line(error)
        raise UserError(
            f"{path}: describes no causal language model that transformers can build: {reason}"
        ) from None


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the export, whose rows are computed when they are asked for.

    A scalar has one row, itself.
    """

    name: str
    shape: Shape
    dtype: torch.dtype  # as written
    # (start, stop) -> these rows as `as_floating` returns them; the same bits at every call
    rows: Callable[[int, int], Tensor]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def row_blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    """Divides a tensor's rows into blocks, and yields (start, stop) of each.

    A block has at most BLOCK_BYTES in float32, but at least one row.

    >>> list(row_blocks((3, 2**19)))
    [(0, 2), (2, 3)]
    """
    row_count = shape[0] if shape else 1
    row_bytes = max(1, torch.float32.itemsize * math.prod(shape[1:]))
    step = max(1, BLOCK_BYTES // row_bytes)
    return ((start, min(start + step, row_count)) for start in range(0, row_count, step))


def cast_rows(value: Value, start: int, stop: int) -> Tensor:
    """Reads rows `start` to `stop` of a value in the dtype in which they are written.

    Raises `UserError` if that is float16 and a finite number is beyond its range.
    """
    rows = value.rows(start, stop)
    cast = rows.to(value.dtype)
    if value.dtype == torch.float16 and not torch.equal(torch.isfinite(cast), torch.isfinite(rows)):
        raise UserError(
            f"{value.name}: holds values beyond float16's 65,504; export with --dtype bfloat16 or "
            "float32"
        )
    return cast


def raw_bytes(rows: Tensor) -> memoryview:
    """Returns the bytes of `rows` as a file holds them: row-major. It copies only if it must."""
    return rows.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_rows(stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Reads rows `start` to `stop` in the dtype of the file; a scalar has one row, itself."""
    return read_slice(stored, (slice(start, stop),) if stored.shape else ())


def stored_value(stored: StoredTensor, name: str, dtype: torch.dtype) -> Value:
    """Makes a value of a stored tensor, to be written as `name` in `dtype`."""

    def rows(start: int, stop: int) -> Tensor:
        return as_floating(read_rows(stored, start, stop))

    return Value(name, stored.shape, dtype, rows)


def as_floating(block: Tensor) -> Tensor:
    """Converts floating-point numbers to float32, except float64. Other numbers stay."""
    # float64 rounded to float32 and then to the dtype of the file would be rounded twice
    if block.is_floating_point() and block.dtype != torch.float64:
        return block.float()
    return block


def prefetch(compute: Callable[..., Block], parts: Iterable[tuple[Any, ...]]) -> Iterator[Block]:
    """Yields `compute(*part)` for each part, in order.

    A thread computes the next PREFETCHED_BLOCKS while the caller works on the latest one.

    >>> list(prefetch(pow, [(2, 3), (3, 2)]))
    [8, 9]
    """
    remaining = iter(parts)
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: list[Future[Block]] = [
            pool.submit(compute, *part) for part in islice(remaining, PREFETCHED_BLOCKS)
        ]
        try:
            while waiting:
                block = waiting.pop(0).result()
                # one more part, if any remains
                waiting += [pool.submit(compute, *part) for part in islice(remaining, 1)]
                yield block
        finally:
            for future in waiting:
                future.cancel()


def match_tensors(
    stored: Mapping[str, StoredTensor], target: TargetModel, where: str, *, prefixed: bool
) -> dict[str, StoredTensor]:
    """Returns the stored tensors by the target's names, in the order of `target.shapes`.

    A tied tensor that is stored under both names must be equal there, and counts once. A tensor
    that is untied in the target but not stored has the values of the one it was tied to.

    Args:
        stored: Name -> tensor of the source's files.
        target: The model that needs them.
        where: Names the source in errors.
        prefixed: Whether the names may have a common prefix (`model.` in Accelerate's folders) and
            other tensors (an optimizer's) may lie beside them.

    Raises:
        UserError: A list of the tensors that are missing, unexpected or of another shape; or tied
            tensors differ.
    """
    named = {WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}
    if prefixed:
        prefix = _find_prefix(named, target, where)
        named = {
            name.removeprefix(prefix): tensor
            for name, tensor in named.items()
            if name.startswith(prefix)
        }
    named = convert_to_parameters(target.model, named, where)
    for tied_name, first_name in target.tied.items():
        if tied_name in named:
            tied = named.pop(tied_name)
            first = named.setdefault(first_name, tied)  # the files may have only the tied name
            if not are_equal(tied, first):
                raise UserError(
                    f"{where}: {tied_name} differs from {first.name}, which the config says it is "
                    "tied to; set tie_word_embeddings to false in config.json if it was trained on "
                    "its own"
                )
    for name, first_name in target.untied.items():
        if first_name in named:
            named.setdefault(name, named[first_name])
    problems = find_mismatches(target.model, named, target.shapes, where)
    if problems:
        raise UserError.of(problems[:SHOWN_PROBLEMS])
    return {name: named[name] for name in target.shapes}


def _find_prefix(named: Mapping[str, StoredTensor], target: TargetModel, where: str) -> str:
    """Finds the prefix of the model's names in a state dict that may hold more than the model.

    It is the prefix after which the most names are the target's; "" if no name is. Raises
    `UserError` if several prefixes fit equally many names.
    """
    counts: dict[str, int] = {}  # prefix -> the number of names of the target that follow it
    for name in named:
        parts = name.split(".")
        for start in range(min(len(parts), PREFIX_PARTS + 1)):
            if ".".join(parts[start:]) in target.shapes:
                prefix = "".join(f"{part}." for part in parts[:start])
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        raise UserError(
            f"{where}: holds the model more than once, under {' and '.join(sorted(best))}; keep one"
        )
    return best[0] if best else ""
