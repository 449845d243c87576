"""The model that an export makes: built on meta, its tensors computed from the stored ones, in
rows.
"""

import copy
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from finetune.config.pretrained import read_facts
from finetune.config.quantization import read_published_form
from finetune.constants import CONFIG_FILE, Shape
from finetune.distributed.model_parts import find_float32, text_names
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

SECTIONS = ("text_config", "vision_config")  # of a vision-language model's config.json
# In float32, the widest dtype that a block is converted to. Blocks that fit a core's cache, and
# that the allocator keeps instead of returning them to the kernel, take a third of the CPU time of
# 32 MiB blocks.
BLOCK_BYTES = 4 * 1024 * 1024
PREFETCHED_BLOCKS = 2
# torch.compile's, FSDP1's, activation checkpointing's
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The tensors of a causal language model, as it holds them and as its files do.

    Returned by `describe_target`.
    """

    config_json: dict[str, Any]  # the file's content
    model: nn.Module  # on meta; its buffers (rotary frequencies) are real
    shapes: dict[str, Shape]  # of parameters and saved buffers, in the model's order
    tied: dict[str, str]  # name that is not stored -> name of the tensor with its values
    float32: frozenset[str]  # names that transformers keeps in float32 whatever the model's dtype
    # the tensors of the model's files, each as parts of those in `shapes`; most are one of them
    files: dict[str, BoxedTensor]
    # names of what a vision-language model has beside its language model, never trained
    beside: frozenset[str]
    # name of a tensor that the source's model has tied, and this one not -> name of the first one
    untied: dict[str, str] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    def written_dtype(self, name: str, stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
        """The dtype in which `name`, stored as `stored`, is written to a model of dtype
        `wanted`.
        """
        if not stored.is_floating_point:
            return stored
        return torch.float32 if name in self.float32 else wanted

    def written_config(self, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
        """The content of config.json, with the dtype and the class of what is written."""
        config = copy.deepcopy(self.config_json) | {"architectures": [self.class_name]}
        name = str(dtype).removeprefix("torch.")
        config["dtype"] = name
        sections = [config[key] for key in SECTIONS if isinstance(config.get(key), dict)]
        for part in (config, *sections):
            if part is not config.get("vision_config"):
                part |= {key: name for key in ("dtype", "torch_dtype") if key in part}
            if part.get("use_cache") is False:
                part["use_cache"] = True  # training turned it off; generation needs it
            _add_rope_of_transformers_4(part)
        if not trust_remote_code:
            # the code that it names is not in the folder, and transformers has the class
            config.pop("auto_map", None)
        return config


def _add_rope_of_transformers_4(config: dict[str, Any]) -> None:
    """Adds the keys of transformers 4, which mlx-lm reads: without them it uses wrong
    frequencies.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    config.setdefault("rope_theta", rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind != "default":
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        config.setdefault("rope_scaling", rest | {"type": kind})


def import_transformers() -> None:
    """Imports the libraries that describe a target, which takes seconds."""
    import accelerate  # noqa: F401
    import transformers.conversion_mapping
    import transformers.modeling_utils  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401


def describe_target(
    folder: Path, *, trust_remote_code: bool = False, adapter: Collection[str] = ()
) -> TargetModel:
    """The model that config.json of `folder` describes.

    adapter: The names of an adapter's tensors. With one on a tied head the model is untied, since
        the merged head is no longer the embedding.

    Raises `UserError` where it describes none, names code to run (unless `trust_remote_code`) or a
    quantized model.
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
    # of a base, which is read dequantized
    if read_published_form(config_json.get("quantization_config")) is not None:
        del config_json["quantization_config"]
    if "quantization_config" in config_json:
        raise UserError(
            f"{path}: quantization_config: quantized weights cannot be exported; name the "
            "unquantized model"
        )
    model = _build_model(folder, trust_remote_code)
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    adapted = {f"{name.rpartition('.lora_')[0]}.weight" for name in adapter if ".lora_" in name}
    untied = {name: first for name, first in tied.items() if name in adapted}
    if untied:
        for section in (config_json, config_json.get("text_config")):
            if isinstance(section, dict):
                section["tie_word_embeddings"] = False
        model = _build_model(folder, trust_remote_code, ties=False)
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


def _build_model(folder: Path, trust_remote_code: bool, *, ties: bool = True) -> nn.Module:
    from transformers import AutoConfig

    path = folder / CONFIG_FILE
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not ties:
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
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
    """One tensor of the result.

    `rows(start, stop)` are its rows in float32, or as stored if not floating.

    A scalar has one row, itself. Reading the same rows again gives the same bits.
    """

    name: str
    shape: Shape
    dtype: torch.dtype  # as written
    rows: Callable[[int, int], Tensor]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def row_blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    """Returns (start, stop) of the rows of a tensor, in blocks of at most BLOCK_BYTES in float32
    (but at least a row).

    >>> list(row_blocks((3, 2**19)))
    [(0, 2), (2, 3)]
    """
    height = shape[0] if shape else 1
    step = max(1, BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
    return ((start, min(start + step, height)) for start in range(0, height, step))


def cast_rows(value: Value, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` in the dtype of the result.

    Raises `UserError` where that dtype cannot hold them.
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
    """The bytes of `rows`, row-major, as a file holds them."""
    return rows.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_rows(stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` as they are stored; a scalar has one row, itself."""
    return read_slice(stored, (slice(start, stop),) if stored.shape else ())


def stored_value(stored: StoredTensor, name: str, dtype: torch.dtype) -> Value:
    """A stored tensor as a value to write, under another name and dtype.

    Its rows are read when asked for.
    """

    def rows(start: int, stop: int) -> Tensor:
        return as_floating(read_rows(stored, start, stop))

    return Value(name, stored.shape, dtype, rows)


def as_floating(block: Tensor) -> Tensor:
    """`block` as values are computed with: in float32, or as stored if not floating."""
    # float64 is kept: rounding it to float32 first would round twice
    if block.is_floating_point() and block.dtype != torch.float64:
        return block.float()
    return block


def prefetch(compute: Callable[..., Block], parts: Iterable[tuple[Any, ...]]) -> Iterator[Block]:
    """`compute(*part)` for each part, in order; a thread computes the next ones while the caller
    works on this one.

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
                waiting += [pool.submit(compute, *part) for part in islice(remaining, 1)]
                yield block
        finally:
            for future in waiting:
                future.cancel()


def match_tensors(
    stored: Mapping[str, StoredTensor], target: TargetModel, where: str, *, prefixed: bool
) -> dict[str, StoredTensor]:
    """The stored tensors by the target's names, each of them once, in its order.

    `prefixed`: the names may have a common prefix (`model.` in Accelerate's folders) and other
    tensors may lie beside them (an optimizer's). A tied tensor that is stored twice counts once, if
    both are equal.

    Raises `UserError` listing what is missing, unexpected or of another shape.
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
    for tied, source in target.tied.items():
        if tied in named:
            twin = named.pop(tied)
            if not are_equal(twin, first := named.setdefault(source, twin)):
                raise UserError(
                    f"{where}: {tied} differs from {first.name}, which the config says it is tied "
                    "to; set tie_word_embeddings to false in config.json if it was trained on its "
                    "own"
                )
    for name, source in target.untied.items():
        if source in named:
            named.setdefault(name, named[source])
    problems = find_mismatches(target.model, named, target.shapes, where)
    if problems:
        raise UserError.of(problems[:20])
    return {name: named[name] for name in target.shapes}


def _find_prefix(named: Mapping[str, StoredTensor], target: TargetModel, where: str) -> str:
    """The prefix of the model's names in a state dict that may hold more than the model."""
    counts: dict[str, int] = {}
    for name in named:
        parts = name.split(".")
        for start in range(min(len(parts), 4)):
            if ".".join(parts[start:]) in target.shapes:
                prefix = "".join(f"{part}." for part in parts[:start])
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        raise UserError(
            f"{where}: holds the model more than once, under {' and '.join(sorted(best))}; keep one"
        )
    return best[0] if best else ""
