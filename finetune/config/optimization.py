"""How the parameters move: the optimizers by name, and the recipe's section."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.keys import Positive, ReadAs, SameOnResume
from finetune.config.schedules import (
    ARGUMENTS_HELP,
    DEFAULT_SCHEDULE,
    SCHEDULE_HELP,
    SHORT_NAMES,
    Schedule,
    ScheduleName,
)
from finetune.constants import FP32, ITEMSIZE, OFFLOAD_ALIGNMENT, Names, Shape, round_up

QUANTIZED_MIN_NUMEL = 4096
QUANTIZED_BLOCK = 256
QUANTIZATION_MAP = 256  # torchao's (optim/adam.py, subclass_8bit.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The facts about an optimizer that the rest of the package needs."""

    help: str = ""  # a sentence of the help of `optim`, after its name

    # Memory and disk.
    # (shape of a rank's part of a tensor, bytes per number) -> bytes of optimizer state in memory.
    count_state: Callable[[Shape, int], int]
    # the same in a checkpoint; None: as in memory
    count_saved: Callable[[Shape, int], int] | None = None
    # the same of a layer's matrix; None: as of the others
    count_matrix: Callable[[Shape, int], int] | None = None
    # bytes of a number of its moments in the files of nvme; None: as its parameter
    moment_itemsize: int | None = None
    # fp32 copies of a rank's part of the largest tensor, while that is updated
    update_copies: int = 0
    # for each number of the largest tensor, whole on every rank, while that is updated
    update_bytes: int = 0
    allocates_roots: bool = False  # the roots of all second moments that it updates together
    # what the plan says where it advises this one instead of a larger one; None: never
    advice: str | None = None

    # The step.
    reads_found_inf: bool = False  # skips its update by the flag of torch's GradScaler
    reads_betas: bool = True  # whether it uses adam_beta1, adam_beta2 and adam_epsilon
    decouples_decay: bool = True  # weight_decay is no part of its gradient
    # of the layers' matrices, which it updates otherwise than the rest; None: all alike
    momentum: float | None = None

    # What it needs, and what it cannot be combined with (features of exclusions.py), and why.
    package: str | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)

    # Other tools.
    other_names: Names = ()  # their values of `optim`, for a hint
    # a pattern of the names that `finetune convert` takes for it, in lower case and without _
    converted: str = "(?!)"


def _adam(shape: Shape, itemsize: int) -> int:
    """Bytes of two moments and a counter."""
    return 2 * itemsize * prod(shape) + FP32


def _adam_8bit(shape: Shape, itemsize: int) -> int:
    """Moments of a byte a number, with a scale for each block and a map; small tensors and uneven
    ones in fp32.
    """
    numel = prod(shape)
    if numel < QUANTIZED_MIN_NUMEL or numel % QUANTIZED_BLOCK:
        return _adam(shape, FP32)
    return 2 * (numel + FP32 * (numel // QUANTIZED_BLOCK + QUANTIZATION_MAP)) + FP32


def _rows_and_columns(shape: Shape, itemsize: int) -> int:
    """Returns a number for each row and for each column, which every rank holds; of a vector, for
    each number.
    """
    return FP32 * (1 + (sum(shape) if len(shape) == 2 else prod(shape)))


DEFAULT_OPTIMIZER = "adamw_torch_fused"
OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw_torch_fused": OptimizerFacts(
        count_state=_adam,
        reads_found_inf=True,
        other_names=("adamw", "adamw_apex_fused", "paged_adamw_32bit"),
        # Transformer Engine's FusedAdam decays weights as AdamW does.
        converted=r"(.*\.)?(fusedadam|(?!.*[48]bit)[^.]*adamw[^.]*)",
    ),
    "adamw_torch": OptimizerFacts(
        count_state=_adam, allocates_roots=True, other_names=("adamw_hf",)
    ),
    "adam": OptimizerFacts(
        help="is torch's Adam, whose weight_decay is part of the gradient",
        count_state=_adam,
        reads_found_inf=True,
        decouples_decay=False,
        converted=r"(.*\.)?adam",
    ),
    "adamw_bf16_moments": OptimizerFacts(
        help="keeps its moments in bf16: 4 bytes a parameter instead of 8",
        count_state=lambda shape, _: _adam(shape, ITEMSIZE["bfloat16"]),
        moment_itemsize=ITEMSIZE["bfloat16"],
        advice="moments rounded to bf16, no more time",
        reads_found_inf=True,
        conflicts={"an uneven vocabulary": "it rounds the moments of equal shards alike"},
    ),
    "adamw_8bit": OptimizerFacts(
        help=(
            "keeps them in 8 bits: 2 bytes, by torchao, which has to be installed; not under FSDP1"
        ),
        count_state=_adam_8bit,
        count_saved=lambda shape, _: _adam(shape, FP32),
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
        count_state=_rows_and_columns,
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
        count_state=_adam,
        count_matrix=lambda shape, itemsize: itemsize * prod(shape),
        momentum=0.95,
        update_copies=2,  # the update in bf16 before and after, and in fp32
        # in bf16: the whole update, its iterate, and two products that are never larger
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
KEPT_IN_FILES = " or ".join(
    [name for name, row in OPTIMIZERS.items() if "optim_offload: nvme" not in row.conflicts]
)
SMALLEST_WITHOUT_PACKAGE = [
    name for name, row in OPTIMIZERS.items() if row.advice and row.package is None
][-1]
COUPLED_DECAY = " and ".join(name for name, row in OPTIMIZERS.items() if not row.decouples_decay)

_LION = (
    "not supported: no kept library has Lion for sharded parameters; adamw_bf16_moments takes the "
    "same memory, adamw_8bit less"
)
REFUSED_OPTIMIZERS: Mapping[str, str] = {  # other tools' values of `optim` -> why there is none
    **dict.fromkeys(
        ("lion", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), _LION
    ),
    "adamw_torch_4bit": "not supported; adamw_8bit is the smallest AdamW here",
    "muon_8bit": "not supported; muon keeps one moment in fp32",
}


# Vectors by their role, which may have the shape of a matrix: norms with a row for each head,
# biases with a row for each expert, rates of recurrent layers (Mamba's A_log, RWKV's time_mix_*).
NOT_DECAYED = re.compile(r"norm|bias$|(^|\.)(A_log|time_mix_\w+)$")
# by names of parameters: embeddings and heads
NOT_IN_LAYERS = re.compile(r"embed|(^|\.)(wte|wpe|(lm_)?head)\.")


def is_layers_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix of a layer, which Muon orthogonalizes: no embedding, head or
    vector.

    >>> [
    ...     is_layers_matrix(f"{name}.weight", (8, 8))
    ...     for name in ("h.0.attn.c_proj", "lm_head", "model.embed_tokens")
    ... ]
    [True, False, False]
    """
    return len(shape) == 2 and NOT_IN_LAYERS.search(name) is None


def count_optimizer_bytes(
    optim: str | None, shape: Shape, itemsize: int, *, name: str = "", on_disk: bool = False
) -> int:
    """Counts the bytes of optimizer state for a rank's part, of this `shape`, of a trained tensor;
    0 without `optim`.

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
    of_matrix = None
    if is_layers_matrix(name, shape):
        of_matrix = facts.count_matrix
    return ((on_disk and facts.count_saved) or of_matrix or facts.count_state)(shape, itemsize)


def list_smaller(optim: str, *, with_package: bool) -> Mapping[str, str]:
    """Lists the optimizers that the plan advises instead of `optim`, with their costs: a package's,
    or the others.

    >>> list_smaller("adamw_bf16_moments", with_package=True)
    {'adamw_8bit': 'moments in 8 bits; needs torchao'}
    """
    matrix = (1024, 1024)
    itemsize = FP32
    now = count_optimizer_bytes(optim, matrix, itemsize)
    smaller = {}
    for name, facts in OPTIMIZERS.items():
        is_smaller = facts.count_state(matrix, itemsize) < now
        if facts.advice and is_smaller and (facts.package is not None) == with_package:
            smaller[name] = facts.advice
    return smaller


def convert_optimizer(name: str) -> str | None:
    """Our name for the optimizer that another tool has by this name or path; None: there is none
    here.

    >>> [
    ...     convert_optimizer(name)
    ...     for name in ("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", "lion_8bit")
    ... ]
    ['adamw_torch_fused', 'adamw_8bit', None]
    """
    plain = name.lower().replace("_", "")
    return next(
        (ours for ours, facts in OPTIMIZERS.items() if re.fullmatch(facts.converted, plain)), None
    )


def list_offloaded_itemsizes(optim: str, dtype: str, compute_dtype: str) -> tuple[int, ...]:
    """Lists the bytes of a number in each tensor that `optim_offload: nvme` keeps in files for a
    parameter of `dtype`.

    These are AdamW's two moments, after a master weight where the model computes in another dtype.

    >>> list_offloaded_itemsizes("adamw_torch", "float32", "bfloat16")
    (4, 4, 4)
    >>> list_offloaded_itemsizes("adamw_bf16_moments", "float32", "float32")
    (2, 2)
    """
    moment = OPTIMIZERS[optim].moment_itemsize or ITEMSIZE[dtype]
    return (*([ITEMSIZE[dtype]] if dtype != compute_dtype else []), moment, moment)


def count_offloaded_bytes(numel: int, itemsizes: Iterable[int]) -> int:
    """Counts the bytes of a rank's file of tensors of `numel` numbers, each padded to a multiple of
    OFFLOAD_ALIGNMENT.

    >>> count_offloaded_bytes(1000, (4, 4, 4)), count_offloaded_bytes(2048, (4, 2, 2))
    (12288, 16384)
    """
    return sum(round_up(numel * itemsize, OFFLOAD_ALIGNMENT) for itemsize in itemsizes)


# A key: its type and marks, then its help and default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """How the parameters move."""

    num_train_epochs: Annotated[
        float, Gt(0), Le(1_000_000), SameOnResume, "How often the data is gone through."
    ] = 1.0
    max_steps: Annotated[
        Positive | None,
        SameOnResume,
        ReadAs(-1, None),
        (
            "Optimizer steps; overrides num_train_epochs. null, or -1 as in Transformers: "
            "num_train_epochs decides."
        ),
    ] = None
    learning_rate: Annotated[float, Gt(0), "The peak learning rate."] = 2e-5
    lr_scheduler_type: Annotated[
        ScheduleName, *(ReadAs(short, name) for short, name in SHORT_NAMES.items()), SCHEDULE_HELP
    ] = DEFAULT_SCHEDULE
    lr_scheduler_kwargs: Annotated[dict[str, float | str] | None, ARGUMENTS_HELP] = None
    min_lr_ratio: Annotated[
        float, Ge(0), Le(1), "The schedule ends at learning_rate times this."
    ] = 0.0
    warmup_ratio: Annotated[
        float,
        Ge(0),
        Le(1),
        "The share of the steps that warm up; ignored where warmup_steps is set.",
    ] = 0.03
    warmup_steps: Annotated[int | None, Ge(0), "The steps that warm up."] = None
    optim: Annotated[OptimizerName, OPTIMIZER_HELP] = DEFAULT_OPTIMIZER
    optim_offload: Annotated[
        Literal["none", "nvme"],
        "Where the optimizer's state is. none: in memory. nvme: its moments, and fp32 master "
        "weights where mixed_precision is on, are in files under offload_dir; a step reads and "
        f"writes them one decoder layer after another. Under FSDP2, with {KEPT_IN_FILES}.",
    ] = "none"
    offload_dir: Annotated[
        str | None,
        "A folder on the NVMe disk of each node, for the files of optim_offload: nvme. They end "
        "with the run; a checkpoint needs none of them.",
    ] = None
    weight_decay: Annotated[
        float,
        Ge(0),
        "Weight decay, on matrices only: not on norms and biases, nor on A_log and time_mix "
        f"parameters of recurrent layers; decoupled, but for {COUPLED_DECAY}.",
    ] = 0.0
    adam_beta1: Annotated[float, Ge(0), Lt(1), "Decay of the first moment."] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1), "Decay of the second moment."] = 0.999
    adam_epsilon: Annotated[float, Gt(0), "Added to the root of the second moment."] = 1e-8
    neftune_noise_alpha: Annotated[
        float | None,
        Gt(0),
        SameOnResume,
        "NEFTune: uniform noise on the embeddings while training, at most this over the root of "
        "the document's tokens times the hidden size.",
    ] = None
    label_smoothing: Annotated[
        float,
        Ge(0),
        Lt(1),
        SameOnResume,
        "Train on this share of an even distribution over the vocabulary beside each label, as "
        "torch's cross_entropy; the held-out loss is without it.",
    ] = 0.0
    token_loss: Annotated[
        Literal["cross_entropy", "dft", "eaft"],
        SameOnResume,
        "What the cross entropy of a trained token is weighted by, which gets no gradient. "
        "cross_entropy: nothing; dft: the token's probability; eaft: the entropy of the 20 "
        "likeliest tokens over 3. The held-out loss is without it.",
    ] = "cross_entropy"
    eaft_alpha: Annotated[
        float, Gt(0), SameOnResume, "token_loss: eaft: the exponent of the weight."
    ] = 1.0
    optim_in_backward: Annotated[
        bool,
        "Update each parameter in the backward, as soon as its gradient is complete, and free the "
        "gradient: the gradients of the whole model are never in memory together. For steps of "
        "one micro-batch, with max_grad_norm: null, in one process or under FSDP2.",
    ] = False
    max_grad_norm: Annotated[
        float | None, Gt(0), "The gradient is scaled down to this norm; null: no clipping."
    ] = 1.0
    on_nonfinite: Annotated[
        Literal["stop", "skip"],
        "What is done at a step whose loss or gradient is not finite: the update is never made.",
    ] = "stop"
    max_skipped_steps: Annotated[
        Positive, "Under on_nonfinite: skip, stop the run after this many skipped steps."
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
