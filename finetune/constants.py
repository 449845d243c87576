"""The numbers, rules and types that data, loss, checkpoint and plan share. Imports no torch."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any

Names = tuple[str, ...]
Shape = tuple[int, ...]

# the label of a position that is not trained on; torch's cross_entropy skips it
IGNORE_INDEX = -100
# Packed rows are padded to a multiple of this, and so are the positions that the loss looks at. A
# new length costs: a CPU compiles bf16 products for every shape and keeps them (oneDNN), a GPU's
# allocator finds no block that fits.
ROUND_TOKENS = 64
CONTRASTED_QUERIES = 1024  # whose cosines with all documents of a step are computed at once
PROMPTS_AT_ONCE = 16  # read together before their completions are sampled

# Of the probability ratios of sampled tokens: the borders of a histogram, and the metrics that hold
# its shares.
RATIO_BORDERS = (0.5, 0.8, 0.9, 0.99, 0.999, 1.001, 1.01, 1.1, 1.25, 2.0)
RATIO_SHARES = tuple(
    f"ratio/share/{low}-{high}"
    for low, high in zip((0, *RATIO_BORDERS), (*RATIO_BORDERS, "inf"), strict=True)
)

# The widest head that flash attention takes; tokens of a block of the masks that flex_attention
# reads.
LARGEST_FLASH_HEAD = 256
BLOCK_TOKENS = 128

# The loss works on chunks of tokens: as many as make this many bytes of fp32 logits, by device
# type, ...
LOSS_CHUNK_BYTES: Mapping[str, int] = {"cuda": 1 << 30, "cpu": 64 << 20}
# ... or this many where the head is frozen, so that no chunk adds to its weight's gradient, ...
FROZEN_CHUNK_BYTES = 256 << 20
# ... but not fewer: adding up the weight's gradient would cost more than the products
LOSS_CHUNK_MIN_TOKENS = 256

# State in files (optim_offload: nvme): a multiple for offsets and lengths that suits direct
# requests to any disk.
OFFLOAD_ALIGNMENT = 4096

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "safetensors",
    "tokenizers",
    "numpy",
)
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder in which torch keeps what it compiles
OPTIONAL_PACKAGES = ("bitsandbytes", "torchao")  # the numbers of a run may depend on them

EXPORT = "export"
ALL_LINEAR = "all-linear"  # lora_target_modules: every linear layer but the output head
# what transformers calls output heads
HEADS = frozenset(
    {
        "lm_head",
        "embed_out",
        "output_projection",
        "head",
        "classifier",
        "qa_outputs",
        "score",
        "summary",
    }
)
ROTATION = ".oft_R."  # in the names of parameters by which OFT rotates a layer's inputs
ADAPTER = "adapter"  # in a run's folder
PROCESSOR_FILES = (  # of a vision-language model's folder
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # in a Hugging Face folder
# What makes a saved tokenizer cut or pad every text: settings of its last use, which say nothing of
# the model.
CUTTING_KEYS = {
    TOKENIZER_FILE: ("truncation", "padding"),
    TOKENIZER_CONFIG: (
        "max_length",
        "truncation",
        "truncation_strategy",
        "stride",
        "padding",
        "pad_to_multiple_of",
    ),
}
SCORES = "score"  # the head of transformers' classes for sequence classification
VALUE_WEIGHT = "value_weight"  # of the output head: a critic's vector, in checkpoints alone
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"  # in a Hugging Face folder
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
ADAPTER_CONFIG = "adapter_config.json"  # in a PEFT folder
# of an adapter's rank in grouped products: on a GPU they want rows of 16 bytes
EXPERT_RANK_MULTIPLE = 8
ADAPTER_NAME = "default"  # of peft, the only one here
# What an export takes beside its weights (tokenizer, index, card), so that the disk is not filled
# to the brim.
EXPORT_SPARE_BYTES = 64 * 1024 * 1024

FP32 = 4  # bytes
# bytes, in memory and in a file
ITEMSIZE: Mapping[str, int] = {"float32": FP32, "bfloat16": 2, "float16": 2}
# of a mixed_precision
COMPUTE_DTYPE: Mapping[str, str] = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


@cache
def read_versions() -> Mapping[str, str]:
    """The installed version of each of PACKAGES and OPTIONAL_PACKAGES. Reading one takes 10 ms."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    for name in OPTIONAL_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def count_cores() -> int:
    """The CPU cores that this process may use: of its affinity mask where the system has one, else
    the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loss_chunk_tokens(vocabulary: int, device_type: str, *, trains_head: bool = True) -> int:
    """Tokens in a chunk of the loss, at most.

    >>> (
    ...     loss_chunk_tokens(32_000, "cpu"),
    ...     loss_chunk_tokens(128_256, "cpu"),
    ...     loss_chunk_tokens(128_256, "cuda"),
    ...     loss_chunk_tokens(128_256, "cuda", trains_head=False),
    ... )
    (524, 256, 2092, 523)
    """
    budget = LOSS_CHUNK_BYTES.get(device_type, LOSS_CHUNK_BYTES["cuda"])
    if not trains_head:
        budget = min(budget, FROZEN_CHUNK_BYTES)
    return max(budget // (ITEMSIZE["float32"] * vocabulary), LOSS_CHUNK_MIN_TOKENS)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up.

    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `number`.

    >>> round_up(7, 3), round_up(6, 3)
    (9, 6)
    """
    return ceil_div(number, multiple) * multiple


def divergence_chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Tokens in a chunk of the divergence from a teacher, at most: half as many, since two models'
    logits meet in it.

    >>> divergence_chunk_tokens(32_000, "cpu"), divergence_chunk_tokens(128_256, "cuda")
    (262, 1046)
    """
    return ceil_div(loss_chunk_tokens(vocabulary, device_type), 2)


def count_steps(interval: float | None, steps: int) -> int | None:
    """Steps between two events of a run of `steps` steps; an interval below 1 is a share of them,
    rounded up.

    The rounding is that of transformers' `TrainerState.compute_steps`.

    >>> count_steps(5, 1000), count_steps(0.05, 1010), count_steps(None, 1000)
    (5, 51, None)
    """
    if interval is None:
        return None
    if interval < 1:
        return math.ceil(interval * steps)
    return int(interval)


def grow_rows(rows: int, tokens: int, multiple: int) -> int:
    """Rows of an embedding of `rows` that must hold `tokens`: `rows` if they suffice, else a
    multiple of `multiple`.

    >>> grow_rows(128256, 128256, 64), grow_rows(128256, 128258, 64)
    (128256, 128320)
    """
    if tokens <= rows:
        return rows
    return round_up(tokens, multiple)


def find_positions(config: Mapping[str, Any]) -> int | None:
    """Returns the number of positions that a model was made for; None where its config says none.

    config: Keys as in config.json.

    >>> find_positions({"n_positions": 1024}), find_positions({"model_type": "mamba"})
    (1024, None)
    """
    named = (config.get(key) for key in POSITION_KEYS)
    return next((value for value in named if isinstance(value, int)), None)
