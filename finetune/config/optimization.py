"""How the parameters are updated: the facts about each optimizer, and the recipe's section."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.keys import LocalFolder, MayChange, Positive, ReadAs
from finetune.config.schedules import (
    ARGUMENTS_HELP,
    DEFAULT_SCHEDULE,
    SCHEDULE_HELP,
    SHORT_NAMES,
    Schedule,
    ScheduleName,
)
from finetune.constants import FP32, ITEMSIZE, OFFLOAD_ALIGNMENT, Names, Shape, round_up

# torchao's 8-bit moments (optim/adam.py, subclass_8bit.py): smaller tensors stay in fp32, a block
# of numbers has one scale, and a map has a number for each of the 256 codes.
QUANTIZED_MIN_NUMEL = 4096
QUANTIZED_BLOCK = 256
QUANTIZATION_MAP = 256

# The most numbers of a tensor that adamw_bf16_moments updates at once without a compiler. It limits
# each fp32 temporary to 64 MiB.
UPDATED_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The facts about an optimizer that the rest of the package needs."""

    help: str = ""  # what the help of `optim` says after the optimizer's name

    # Memory and disk.
    # (shape of a rank's shard of a parameter, bytes of a number of it) -> bytes of optimizer state
    # in memory
    count_state: Callable[[Shape, int], int]
    # the same in a checkpoint; None: as in memory
    count_saved: Callable[[Shape, int], int] | None = None
    # the kind of state in a checkpoint: optimizers of the same kind resume each other's
    saved_state: str = "two moments"
    # the same for the matrices of layers; None: as for other parameters
    count_matrix: Callable[[Shape, int], int] | None = None
    # bytes of a number of a moment under `optim_offload: nvme`; None: those of the parameter
    moment_itemsize: int | None = None
    # fp32 copies of a rank's shard of the largest tensor that its update allocates
    update_copies: int = 0
    # bytes for each number of a rank's shard of the largest tensor that its update allocates on a
    # CPU, where the update is not compiled; and the most numbers that are updated at once there
    cpu_update_bytes: int = 0
    cpu_update_numel: int | None = None
    # bytes for each number of the largest matrix of a layer, unsharded, that its update allocates
    update_bytes: int = 0
    # whether an update allocates the roots of the second moments of all tensors updated together
    allocates_roots: bool = False
    # what the plan says where it advises this one instead of a larger one; None: never
    advice: str | None = None

    # The step.
    reads_found_inf: bool = False  # whether torch's `found_inf` flag makes it skip its update
    reads_betas: bool = True  # whether it uses adam_beta1, adam_beta2 and adam_epsilon
    decouples_decay: bool = True  # whether it decays weights directly, not through the gradient
    # of a fused kernel, which rounds a weight once a step: the optimizer that rounds it at each
    # operation, and has the same update where no weight decays through its gradient
    unfused: str | None = None
    # of the layers' matrices, which it updates by another rule; None: one rule for all parameters
    momentum: float | None = None

    # What it needs, and the features of exclusions.py that exclude it, each with the reason.
    package: str | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)

    # Other tools.
    other_names: Names = ()  # their values of `optim`, for a hint
    # a pattern of the names for which `finetune convert` writes this optimizer, in lower case and
    # without _; the default matches none
    converted: str = "(?!)"


def _count_adam(shape: Shape, itemsize: int) -> int:
    """Counts the bytes of two moments and a counter."""
    return 2 * itemsize * prod(shape) + FP32


def _count_adam_8bit(shape: Shape, itemsize: int) -> int:
    """Counts the bytes of two moments in 8 bits, with the scales of their blocks and a map, and of
    a counter.

    Tensors that are small or not divided by a block have moments in fp32. `itemsize` has no effect.
    """
    numel = prod(shape)
    if numel < QUANTIZED_MIN_NUMEL or numel % QUANTIZED_BLOCK:
        return _count_adam(shape, FP32)
    return 2 * (numel + FP32 * (numel // QUANTIZED_BLOCK + QUANTIZATION_MAP)) + FP32


def _count_rows_and_columns(shape: Shape, itemsize: int) -> int:
    """Counts the bytes of an fp32 number for each row and column of a matrix, and of a counter.

    Other tensors have an fp32 number for each of theirs. `itemsize` has no effect.
    """
    numbers = sum(shape) if len(shape) == 2 else prod(shape)
    return FP32 * (1 + numbers)


DEFAULT_OPTIMIZER = "adamw_torch_fused"
OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw_torch_fused": OptimizerFacts(
        count_state=_count_adam,
        reads_found_inf=True,
        unfused="adamw_torch",
        other_names=("adamw", "adamw_apex_fused", "paged_adamw_32bit"),
        # Transformer Engine's FusedAdam decays weights as AdamW does.
        converted=r"(.*\.)?(fusedadam|(?!.*[48]bit)[^.]*adamw[^.]*)",
    ),
    "adamw_torch": OptimizerFacts(
        count_state=_count_adam, allocates_roots=True, other_names=("adamw_hf",)
    ),
    "adam": OptimizerFacts(
        help="is torch's Adam, whose weight_decay is part of the gradient",
        count_state=_count_adam,
        reads_found_inf=True,
        decouples_decay=False,
        unfused="adamw_torch",
        converted=r"(.*\.)?adam",
    ),
    "adamw_bf16_moments": OptimizerFacts(
        help="keeps its moments in bf16: 4 bytes a parameter instead of 8",
        count_state=lambda shape, _: _count_adam(shape, ITEMSIZE["bfloat16"]),
        moment_itemsize=ITEMSIZE["bfloat16"],
        cpu_update_bytes=32,
        cpu_update_numel=UPDATED_AT_ONCE,
        advice="moments rounded to bf16, no more time",
        reads_found_inf=True,
        conflicts={"an uneven vocabulary": "it rounds the moments of equal shards alike"},
    ),
    "adamw_8bit": OptimizerFacts(
        help=(
            "keeps them in 8 bits: 2 bytes, by torchao, which has to be installed; not under FSDP1"
        ),
        count_state=_count_adam_8bit,
        count_saved=lambda shape, _: _count_adam(shape, FP32),
        cpu_update_bytes=60,
        advice="moments in 8 bits; needs torchao",
        package="torchao",
        conflicts={
            "fsdp_version: 1": "FSDP1 cannot save its moments",
            "tp_size": "its blocks of moments cross the shards",
            "optim_offload: nvme": "its state cannot be kept in files",
        },
        other_names=("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"),
        converted=r"(.*\.)?(?=.*[48]bit)[^.]*adamw[^.]*",
    ),
    "adafactor": OptimizerFacts(
        help=(
            "keeps a number for each row and column, at the fixed learning rate, as Transformers' "
            "Trainer has it; not under FSDP1"
        ),
        count_state=_count_rows_and_columns,
        saved_state="rows and columns",
        update_copies=3,  # the square, the update and the moved weights
        reads_betas=False,
        conflicts={
            "fsdp_version: 1": "FSDP1 flattens the rows and columns that it averages over",
            "tp_size": "it averages over whole rows and columns",
            "expert_parallel_size": "it averages over whole rows and columns",
            "optim_offload: nvme": "its state cannot be kept in files",
            "optim_in_backward": "it averages each update over the ranks",
            "trained experts": (
                "it keeps averages of rows and columns, and the experts of a layer are a stack of "
                "matrices"
            ),
        },
        converted="adafactor",  # not torch.optim.Adafactor, which scales the rate by the parameters
    ),
    "muon": OptimizerFacts(
        help=(
            "orthogonalizes the updates of the matrices in layers, and is AdamW for the "
            "embedding, the head and vectors: 4 bytes a parameter of a layer; not under FSDP1"
        ),
        count_state=_count_adam,
        saved_state="one moment of matrices",
        count_matrix=lambda shape, itemsize: itemsize * prod(shape),
        momentum=0.95,
        # the update in fp32, and in bf16 before and after it is orthogonalized
        update_copies=2,
        # four matrices in bf16: the unsharded update, its iterate, and two products that are never
        # larger
        update_bytes=8,
        conflicts={
            "fsdp_version: 1": "FSDP1 flattens the matrices that it orthogonalizes",
            "fsdp_offload_params": "the host would multiply whole matrices",
            "tp_size": "it orthogonalizes whole matrices",
            "expert_parallel_size": "it orthogonalizes whole matrices",
            "optim_offload: nvme": "its state cannot be kept in files",
            "optim_in_backward": "it gathers each matrix over the ranks",
            "trained experts": (
                "it orthogonalizes matrices, and the experts of a layer are a stack of them"
            ),
        },
        # not torch.optim.Muon without its adjust_lr_fn, nor dion's, which scale updates otherwise
        converted="muon",
    ),
    "sgd": OptimizerFacts(
        help="keeps nothing",
        count_state=lambda shape, itemsize: 0,
        saved_state="none",
        update_copies=1,
        reads_betas=False,
        decouples_decay=False,
        conflicts={"optim_offload: nvme": "it has no state to keep in files"},
        converted=r"(.*\.)?sgd",
    ),
}
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]

OPTIMIZER_HELP = "The optimizer. " + " ".join(
    f"{name} {row.help}." for name, row in OPTIMIZERS.items() if row.help
)
# The optimizers of `optim_offload: nvme`, for its help.
KEPT_IN_FILES = " or ".join(
    [name for name, row in OPTIMIZERS.items() if "optim_offload: nvme" not in row.conflicts]
)
# The last one has the smallest state: the advised optimizers are in descending order.
SMALLEST_WITHOUT_PACKAGE = [
    name for name, row in OPTIMIZERS.items() if row.advice and row.package is None
][-1]
# The optimizers that decay weights through the gradient, for the help of weight_decay.
COUPLED_DECAY = " and ".join(name for name, row in OPTIMIZERS.items() if not row.decouples_decay)

_LION = (
    "not supported: no kept library has Lion for sharded parameters; adamw_bf16_moments takes the "
    "same memory, adamw_8bit less"
)
# Other tools' values of `optim` that have no counterpart here -> the reason, or what to use.
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("lion", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), _LION
    ),
    "adamw_torch_4bit": "not supported; adamw_8bit is the smallest AdamW here",
    "muon_8bit": "not supported; muon keeps one moment in fp32",
}


# Names of parameters that are vectors by their role, though they may have the shape of a matrix:
# norms with a row for each head, biases with a row for each expert, rates of recurrent layers
# (Mamba's A_log, RWKV's time_mix_*).
NOT_DECAYED = re.compile(r"norm|bias$|(^|\.)(A_log|time_mix_\w+)$")
# Names of parameters of embeddings and heads; `score` is the head of scores.
NOT_IN_LAYERS = re.compile(r"embed|(^|\.)(wte|wpe|(lm_)?head|output_projection|score)\.")


def is_layers_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix of a layer, whose updates Muon orthogonalizes.

    Embeddings, heads and vectors are none.

    >>> [
    ...     is_layers_matrix(f"{name}.weight", (8, 8))
    ...     for name in ("h.0.attn.c_proj", "lm_head", "score", "model.embed_tokens")
    ... ]
    [True, False, False, False]
    """
    return len(shape) == 2 and NOT_IN_LAYERS.search(name) is None


def count_optimizer_bytes(
    optim: str | None, shape: Shape, itemsize: int, *, name: str = "", on_disk: bool = False
) -> int:
    """Counts the bytes of optimizer state for a rank's shard of a trained parameter.

    Args:
        optim: The optimizer; None has no state.
        shape: Of the shard.
        itemsize: Bytes of a number of the parameter.
        name: Of the parameter, by which Muon's matrices are known.
        on_disk: Whether to count the state in a checkpoint, not in memory.

    >>> [
    ...     count_optimizer_bytes(name, (10, 8), 4)
    ...     for name in ("adamw_torch", "adafactor", "sgd", None)
    ... ]
    [644, 76, 0, 0]
    >>> [
    ...     count_optimizer_bytes("muon", (10, 8), 4, name=name)
    ...     for name in ("h.0.fc.weight", "lm_head.weight")
    ... ]
    [320, 644]
    """
    if optim is None:
        return 0
    facts = OPTIMIZERS[optim]
    count = facts.count_state
    if on_disk and facts.count_saved is not None:
        count = facts.count_saved
    elif facts.count_matrix is not None and is_layers_matrix(name, shape):
        count = facts.count_matrix
    return count(shape, itemsize)


def list_smaller(optim: str, *, with_package: bool) -> Mapping[str, str]:
    """Returns the optimizers with less state than `optim`: name -> what the change costs, in words.

    Only those are listed that the plan advises (`OptimizerFacts.advice`).

    `with_package`: whether to list those that need a package, or those that need none.

    >>> list_smaller("adamw_bf16_moments", with_package=True)
    {'adamw_8bit': 'moments in 8 bits; needs torchao'}
    """
    # They are compared by their state for one fp32 matrix of a layer, in which most parameters are.
    matrix = (1024, 1024)
    itemsize = FP32
    current_bytes = count_optimizer_bytes(optim, matrix, itemsize)
    smaller = {}
    for name, facts in OPTIMIZERS.items():
        is_smaller = facts.count_state(matrix, itemsize) < current_bytes
        if facts.advice and is_smaller and (facts.package is not None) == with_package:
            smaller[name] = facts.advice
    return smaller


def convert_optimizer(name: str) -> str | None:
    """Returns the value of `optim` for another tool's name or path of an optimizer; None if there
    is none.

    >>> [
    ...     convert_optimizer(name)
    ...     for name in ("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", "lion_8bit")
    ... ]
    ['adamw_torch_fused', 'adamw_8bit', None]
    """
    plain_name = name.lower().replace("_", "")
    for optim, facts in OPTIMIZERS.items():
        if re.fullmatch(facts.converted, plain_name):
            return optim
    return None


def list_offloaded_itemsizes(optim: str, dtype: str, compute_dtype: str) -> tuple[int, ...]:
    """Lists the itemsizes of the tensors that `optim_offload: nvme` keeps in files for a parameter.

    The tensors are AdamW's two moments, and before them a master weight if `dtype`, the
    parameter's, is not the compute dtype.

    >>> list_offloaded_itemsizes("adamw_torch", "float32", "bfloat16")
    (4, 4, 4)
    >>> list_offloaded_itemsizes("adamw_bf16_moments", "float32", "float32")
    (2, 2)
    """
    moment = OPTIMIZERS[optim].moment_itemsize or ITEMSIZE[dtype]
    if dtype == compute_dtype:
        return (moment, moment)
    master_weight = ITEMSIZE[dtype]
    return (master_weight, moment, moment)


def count_offloaded_bytes(numel: int, itemsizes: Iterable[int]) -> int:
    """Counts the bytes that a parameter's state takes in a rank's file of `optim_offload: nvme`.

    The state has a tensor of `numel` numbers for each of `itemsizes`, padded to a multiple of
    OFFLOAD_ALIGNMENT.

    >>> count_offloaded_bytes(1000, (4, 4, 4)), count_offloaded_bytes(2048, (4, 2, 2))
    (12288, 16384)
    """
    return sum(round_up(numel * itemsize, OFFLOAD_ALIGNMENT) for itemsize in itemsizes)


# Each key below has its type and marks, then its help text and default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """The recipe's keys of the optimizer, its schedule, and how the loss is changed in training."""

    num_train_epochs: Annotated[
        float, Gt(0), Le(1_000_000), "How often the data is gone through."
    ] = 1.0
    max_steps: Annotated[
        Positive | None,
        ReadAs(-1, None),
        (
            "Optimizer steps; overrides num_train_epochs. null, or -1 as in Transformers: "
            "num_train_epochs decides."
        ),
    ] = None
    learning_rate: Annotated[float, Gt(0), MayChange, "The peak learning rate."] = 2e-5
    lr_scheduler_type: Annotated[
        ScheduleName,
        *(ReadAs(short, name) for short, name in SHORT_NAMES.items()),
        MayChange,
        SCHEDULE_HELP,
    ] = DEFAULT_SCHEDULE
    lr_scheduler_kwargs: Annotated[dict[str, float | str] | None, MayChange, ARGUMENTS_HELP] = None
    min_lr_ratio: Annotated[
        float, Ge(0), Le(1), MayChange, "The schedule ends at learning_rate times this."
    ] = 0.0
    warmup_ratio: Annotated[
        float,
        Ge(0),
        Le(1),
        MayChange,
        "The share of the steps that warm up; ignored where warmup_steps is set.",
    ] = 0.03
    warmup_steps: Annotated[int | None, Ge(0), MayChange, "The steps that warm up."] = None
    optim: Annotated[OptimizerName, MayChange, OPTIMIZER_HELP] = DEFAULT_OPTIMIZER
    optim_offload: Annotated[
        Literal["none", "nvme"],
        MayChange,
        "Where the optimizer's state is. none: in memory. nvme: its moments, and fp32 master "
        "weights where mixed_precision is on, are in files under offload_dir; a step reads and "
        f"writes them one decoder layer after another. Under FSDP2, with {KEPT_IN_FILES}.",
    ] = "none"
    offload_dir: Annotated[
        str | None,
        LocalFolder,
        MayChange,
        "A folder on the NVMe disk of each node, for the files of optim_offload: nvme. They end "
        "with the run; a checkpoint needs none of them.",
    ] = None
    weight_decay: Annotated[
        float,
        Ge(0),
        MayChange,
        "Weight decay, on matrices only: not on norms and biases, nor on A_log and time_mix "
        f"parameters of recurrent layers; decoupled, except with {COUPLED_DECAY}.",
    ] = 0.0
    adam_beta1: Annotated[float, Ge(0), Lt(1), MayChange, "Decay of the first moment."] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1), MayChange, "Decay of the second moment."] = 0.999
    adam_epsilon: Annotated[float, Gt(0), MayChange, "Added to the root of the second moment."] = (
        1e-8
    )
    neftune_noise_alpha: Annotated[
        float | None,
        Gt(0),
        "NEFTune: uniform noise on the embeddings while training, at most this over the root of "
        "the document's tokens times the hidden size.",
    ] = None
    label_smoothing: Annotated[
        float,
        Ge(0),
        Lt(1),
        "The share of each label that is spread evenly over the vocabulary, as in torch's "
        "cross_entropy; the held-out loss is without it.",
    ] = 0.0
    token_loss: Annotated[
        Literal["cross_entropy", "dft", "eaft"],
        "The weight of a trained token's cross entropy, which gets no gradient. cross_entropy: 1; "
        "dft: the token's probability; eaft: the entropy of the 20 likeliest tokens, divided by 3. "
        "The held-out loss is without it.",
    ] = "cross_entropy"
    eaft_alpha: Annotated[float, Gt(0), "token_loss: eaft: the exponent of the weight."] = 1.0
    optim_in_backward: Annotated[
        bool,
        MayChange,
        "Update each parameter in the backward, as soon as its gradient is complete, and free the "
        "gradient: the gradients of the whole model are never in memory together. For steps of "
        "one micro-batch, with max_grad_norm: null, in one process or under FSDP2.",
    ] = False
    max_grad_norm: Annotated[
        float | None,
        Gt(0),
        MayChange,
        "The gradient is scaled down to this norm; null: no clipping.",
    ] = 1.0
    on_nonfinite: Annotated[
        Literal["stop", "skip"],
        MayChange,
        "What is done at a step whose loss or gradient is not finite: the update is never made.",
    ] = "stop"
    max_skipped_steps: Annotated[
        Positive, MayChange, "Under on_nonfinite: skip, stop the run after this many skipped steps."
    ] = 10

    def schedule(self, steps: int) -> Schedule:
        """Returns the learning rates of a run of `steps` optimizer steps."""
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * steps)
        return Schedule(
            peak=self.learning_rate,
            steps=steps,
            warmup_steps=warmup,
            floor=self.learning_rate * self.min_lr_ratio,
            kind=self.lr_scheduler_type,
            arguments=self.lr_scheduler_kwargs or {},
        )
