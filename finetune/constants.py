"""Numbers, names of files and small rules that several packages share. Imports no torch."""

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
# Packed rows, and the positions that the loss reads, are padded to a multiple of this, because each
# new length costs something: on a CPU, oneDNN compiles bf16 products for every shape and keeps
# them; on a GPU, the allocator has no block of that size.
ROUND_TOKENS = 64
CONTRASTED_QUERIES = 1024  # the cosines of this many queries with all documents are held at once
# Held-out prompts are answered this many at once, or as many as have so many tokens with their
# answers.
ANSWERS_AT_ONCE = 64
ANSWERED_TOKENS = 16_384
PROMPTS_AT_ONCE = 16  # this many prompts are read together, before completions are sampled

# The borders of the histogram of sampled tokens' probability ratios, and for each of its bins the
# metric that holds the bin's share.
RATIO_BORDERS = (0.5, 0.8, 0.9, 0.99, 0.999, 1.001, 1.01, 1.1, 1.25, 2.0)
RATIO_SHARES = tuple(
    f"ratio/share/{low}-{high}"
    for low, high in zip((0, *RATIO_BORDERS), (*RATIO_BORDERS, "inf"), strict=True)
)

LARGEST_FLASH_HEAD = 256  # the largest head size of flash attention
BLOCK_TOKENS = 128  # tokens in a block of flex_attention's masks

# The loss works on chunks of tokens. These are the largest bytes of a chunk's fp32 logits, by
# device type ...
LOSS_CHUNK_BYTES: Mapping[str, int] = {"cuda": 1 << 30, "cpu": 64 << 20}
# ... and this if that is less and the head is frozen: no chunk adds to its weight's gradient then.
FROZEN_CHUNK_BYTES = 256 << 20
# A chunk has at least this many tokens: with fewer, adding up the gradient of the head's weight
# would cost more than the products.
LOSS_CHUNK_MIN_TOKENS = 256

# Offsets and lengths in the files of offloaded state (optim_offload: nvme) are multiples of this
# many bytes, which suits direct requests to any disk.
OFFLOAD_ALIGNMENT = 4096

# the packages whose versions a run records
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
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # the environment variable of torch.compile's cache
OPTIONAL_PACKAGES = ("bitsandbytes", "torchao")  # recorded too, if they are installed

EXPORT = "export"  # in a run's folder: the exported model
ALL_LINEAR = "all-linear"  # lora_target_modules: every linear layer but the output head
# the names of output heads in transformers' models
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
ROTATION = (
    ".oft_R."  # a part of the names of the parameters with which OFT rotates a layer's inputs
)
ADAPTER = "adapter"  # in a run's folder: the exported adapter
PROCESSOR_FILES = (  # in the folder of a vision-language model
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # in a Hugging Face folder
# File -> the keys that make a saved tokenizer cut or pad every text. They are settings of its last
# use, not facts about the model.
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
SCORES = "score"  # the head's name in transformers' classes for sequence classification
# a parameter of the output head: a critic's vector, which only checkpoints have
VALUE_WEIGHT = "value_weight"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"  # in a Hugging Face folder
# the keys of config.json that may hold the number of positions
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
ADAPTER_CONFIG = "adapter_config.json"  # in a PEFT folder
# The rank of an experts' adapter is padded to a multiple of this: grouped products on a GPU need
# rows of a multiple of 16 bytes.
EXPERT_RANK_MULTIPLE = 8
ADAPTER_NAME = "default"  # peft's name for the adapter; there is never another
# a rank that holds so many bytes of a teacher's likeliest tokens writes them (`distill_top_k`)
STORED_PIECE_BYTES = 256 << 20
# Free bytes that an export leaves for what it writes besides weights (tokenizer, index, card).
EXPORT_SPARE_BYTES = 64 * 1024 * 1024

FP32 = 4  # the bytes of a number in fp32
# dtype -> the bytes of a number, in memory and in a file
ITEMSIZE: Mapping[str, int] = {"float32": FP32, "bfloat16": 2, "float16": 2}
# mixed_precision -> the compute dtype
COMPUTE_DTYPE: Mapping[str, str] = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


@cache
def read_versions() -> Mapping[str, str]:
    """Reads the installed version of each of PACKAGES, and of OPTIONAL_PACKAGES if installed.

    The result is cached, because reading one version takes 10 ms.
    """
    versions = {name: metadata.version(name) for name in PACKAGES}
    for name in OPTIONAL_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def count_cores() -> int:
    """Counts the CPU cores that this process may use: those in its affinity mask, or all of the
    machine's if the system has no such masks.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loss_chunk_tokens(vocabulary: int, device_type: str, *, trains_head: bool = True) -> int:
    """Returns the largest number of tokens in a chunk of the loss.

    `trains_head`: whether the output head is trained.

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
    """Divides `number` by `divisor`, rounded up.

    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`.

    >>> round_up(7, 3), round_up(6, 3)
    (9, 6)
    """
    return ceil_div(number, multiple) * multiple


def divergence_chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Returns the largest number of tokens in a chunk of the divergence from a teacher.

    It is half of `loss_chunk_tokens`, because a chunk holds the logits of two models.

    >>> divergence_chunk_tokens(32_000, "cpu"), divergence_chunk_tokens(128_256, "cuda")
    (262, 1046)
    """
    return ceil_div(loss_chunk_tokens(vocabulary, device_type), 2)


def stored_token_bytes(top_k: int) -> int:
    """Returns the bytes of a teacher's `top_k` likeliest tokens at a trained token, in files.

    They are the tokens' ids, and their scores with that of all other tokens.

    >>> stored_token_bytes(32)
    260
    """
    int32 = 4  # bytes of an id
    return int32 * top_k + FP32 * (top_k + 1)


def count_steps(interval: float | None, steps: int) -> int | None:
    """Returns the number of steps between two events, such as saves; None without an interval.

    An `interval` below 1 is a share of the run's `steps`, rounded up as transformers'
    `TrainerState.compute_steps` does.

    >>> count_steps(5, 1000), count_steps(0.05, 1010), count_steps(None, 1000)
    (5, 51, None)
    """
    if interval is None:
        return None
    if interval < 1:
        return math.ceil(interval * steps)
    return int(interval)


def grow_rows(rows: int, tokens: int, multiple: int) -> int:
    """Returns how many rows an embedding of `rows` rows must have to hold `tokens` tokens.

    It keeps its rows if they suffice. Else the number is rounded up to a multiple of `multiple`.

    >>> grow_rows(128256, 128256, 64), grow_rows(128256, 128258, 64)
    (128256, 128320)
    """
    if tokens <= rows:
        return rows
    return round_up(tokens, multiple)


def find_positions(config: Mapping[str, Any]) -> int | None:
    """Returns the number of positions that a model was made for; None if its config has none.

    `config`: keys and values as in config.json.

    >>> find_positions({"n_positions": 1024}), find_positions({"model_type": "mamba"})
    (1024, None)
    """
    values = (config.get(key) for key in POSITION_KEYS)
    return next((value for value in values if isinstance(value, int)), None)
