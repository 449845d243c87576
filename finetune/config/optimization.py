"""How the parameters move: the optimizers and the learning-rate schedules by name, and the recipe's section."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.keys import Positive, ReadAs, SameOnResume
from finetune.constants import FP32, ITEMSIZE, OFFLOAD_ALIGNMENT, count_steps

QUANTIZED_MIN_NUMEL, QUANTIZED_BLOCK, QUANTIZATION_MAP = 4096, 256, 256  # torchao's (optim/adam.py, subclass_8bit.py)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What the rest of the package asks about an optimizer."""

    help: str = ""  # a sentence of the help of `optim`, after its name

    # Memory and disk.
    # (shape of a rank's part of a tensor, bytes per number) -> bytes of optimizer state in memory.
    count_state: Callable[[Shape, int], int]
    count_saved: Callable[[Shape, int], int] | None = None  # the same in a checkpoint; None: as in memory
    count_matrix: Callable[[Shape, int], int] | None = None  # the same of a layer's matrix; None: as of the others
    moment_itemsize: int | None = None  # bytes of a number of its moments in the files of nvme; None: as its parameter
    update_copies: int = 0  # fp32 copies of a rank's part of the largest tensor, while that is updated
    update_bytes: int = 0  # for each number of the largest tensor, whole on every rank, while that is updated
    allocates_roots: bool = False  # the roots of all second moments that it updates together
    advice: str | None = None  # what the plan says where it advises this one instead of a larger one; None: never

    # The step.
    reads_found_inf: bool = False  # skips its update by the flag of torch's GradScaler
    reads_betas: bool = True  # whether it uses adam_beta1, adam_beta2 and adam_epsilon
    decouples_decay: bool = True  # weight_decay is no part of its gradient

    # What it needs, and what it cannot be combined with (the names of OPTIMIZER_CONFLICTS in layout_rules.py), and why.
    package: str | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)

    # Other tools.
    other_names: tuple[str, ...] = ()  # their values of `optim`, for a hint
    converted: str = "(?!)"  # a pattern of the names that `finetune convert` takes for it, in lower case and without _


def _adam(shape: Shape, itemsize: int) -> int:
    """Two moments and a counter."""
    return 2 * itemsize * prod(shape) + FP32


def _adam_bf16(shape: Shape, itemsize: int) -> int:
    return _adam(shape, ITEMSIZE["bfloat16"])


def _adam_fp32(shape: Shape, itemsize: int) -> int:
    return _adam(shape, FP32)


def _adam_8bit(shape: Shape, itemsize: int) -> int:
    """Moments of a byte a number, with a scale for each block and a map; small tensors and uneven ones in fp32."""
    numel = prod(shape)
    if numel < QUANTIZED_MIN_NUMEL or numel % QUANTIZED_BLOCK:
        return _adam(shape, FP32)
    return 2 * (numel + FP32 * (numel // QUANTIZED_BLOCK + QUANTIZATION_MAP)) + FP32


def _rows_and_columns(shape: Shape, itemsize: int) -> int:
    """A number for each row and for each column, which every rank holds; of a vector, for each number."""
    return FP32 * (1 + (sum(shape) if len(shape) > 1 else prod(shape)))


DEFAULT_OPTIMIZER = "adamw_torch_fused"
OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw_torch_fused": OptimizerFacts(
        count_state=_adam,
        reads_found_inf=True,
        other_names=("adamw", "adamw_apex_fused", "paged_adamw_32bit"),
        # Transformer Engine's FusedAdam decays weights as AdamW does.
        converted=r"(.*\.)?(fusedadam|(?!.*[48]bit)[^.]*adamw[^.]*)",
    ),
    "adamw_torch": OptimizerFacts(count_state=_adam, allocates_roots=True, other_names=("adamw_hf",)),
    "adam": OptimizerFacts(
        help="is torch's Adam, whose weight_decay is part of the gradient", count_state=_adam, reads_found_inf=True,
        decouples_decay=False, converted=r"(.*\.)?adam",
    ),
    "adamw_bf16_moments": OptimizerFacts(
        help="keeps its moments in bf16: 4 bytes a parameter instead of 8", count_state=_adam_bf16,
        moment_itemsize=ITEMSIZE["bfloat16"], advice="moments rounded to bf16, no more time", reads_found_inf=True,
        conflicts={"an uneven vocabulary": "it rounds the moments of equal shards alike"},
    ),
    "adamw_8bit": OptimizerFacts(
        help="keeps them in 8 bits: 2 bytes, by torchao, which has to be installed; not under FSDP1",
        count_state=_adam_8bit, count_saved=_adam_fp32, advice="moments in 8 bits; needs torchao", package="torchao",
        conflicts={
            "FSDP1": "FSDP1 cannot save its moments",
            "tp_size": "its blocks of moments cross the shards",
            "optim_offload: nvme": "its state cannot be kept in files",
        },
        other_names=("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"),
        converted=r"(.*\.)?(?=.*[48]bit)[^.]*adamw[^.]*",
    ),
    "adafactor": OptimizerFacts(
        help="keeps a number for each row and column, at the fixed learning rate, as Transformers' Trainer has it; "
        "not under FSDP1",
        count_state=_rows_and_columns,
        update_copies=3,  # the square, the update and the moved weights
        reads_betas=False,
        conflicts={
            "FSDP1": "FSDP1 flattens the rows and columns that it averages over",
            "tp_size": "it averages over whole rows and columns",
            "expert_parallel_size": "it averages over whole rows and columns",
            "optim_offload: nvme": "its state cannot be kept in files",
            "optim_in_backward": "it averages each update over the ranks",
            "trained experts": "it keeps averages of rows and columns, and the experts of a layer are a stack of "
            "matrices",
        },
        converted="adafactor",  # not torch.optim.Adafactor, which scales the rate by the parameters
    ),
    "muon": OptimizerFacts(
        help="orthogonalizes the updates of the matrices in layers, and is AdamW for the embedding, the head and "
        "vectors: 4 bytes a parameter of a layer; not under FSDP1",
        count_state=_adam,
        count_matrix=lambda shape, itemsize: itemsize * prod(shape),
        update_copies=2,  # the update in bf16 before and after, and in fp32
        update_bytes=8,  # in bf16: the whole update, its iterate, and two products that are never larger
        conflicts={
            "FSDP1": "FSDP1 flattens the matrices that it orthogonalizes",
            "CPU offload": "the host would multiply whole matrices",
            "tp_size": "it orthogonalizes whole matrices",
            "expert_parallel_size": "it orthogonalizes whole matrices",
            "optim_offload: nvme": "its state cannot be kept in files",
            "optim_in_backward": "it gathers each matrix over the ranks",
            "trained experts": "it orthogonalizes matrices, and the experts of a layer are a stack of them",
        },
        converted="muon",  # not torch.optim.Muon without its adjust_lr_fn, nor dion's, which scale updates otherwise
    ),
    "sgd": OptimizerFacts(
        help="keeps nothing", count_state=lambda shape, itemsize: 0, update_copies=1, reads_betas=False,
        decouples_decay=False, conflicts={"optim_offload: nvme": "it has no state to keep in files"},
        converted=r"(.*\.)?sgd",
    ),
}  # fmt: skip
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]

OPTIMIZER_HELP = "The optimizer. " + " ".join(f"{name} {row.help}." for name, row in OPTIMIZERS.items() if row.help)
KEPT_IN_FILES = " or ".join([name for name, row in OPTIMIZERS.items() if "optim_offload: nvme" not in row.conflicts])
SMALLEST_WITHOUT_PACKAGE = [name for name, row in OPTIMIZERS.items() if row.advice and row.package is None][-1]
COUPLED_DECAY = " and ".join(name for name, row in OPTIMIZERS.items() if not row.decouples_decay)

_LION = (
    "not supported: no kept library has Lion for sharded parameters; adamw_bf16_moments takes the same memory, "
    "adamw_8bit less"
)
REFUSED_OPTIMIZERS: Mapping[str, str] = {  # other tools' values of `optim` -> why there is none
    **dict.fromkeys(("lion", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), _LION),
    "adamw_torch_4bit": "not supported; adamw_8bit is the smallest AdamW here",
    "muon_8bit": "not supported; muon keeps one moment in fp32",
}


NOT_IN_LAYERS = re.compile(r"embed|(^|\.)(wte|wpe|(lm_)?head)\.")  # by names of parameters: embeddings and heads


def is_layers_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix of a layer, which Muon orthogonalizes: no embedding, head or vector.

    >>> [is_layers_matrix(f"{name}.weight", (8, 8)) for name in ("h.0.attn.c_proj", "lm_head", "model.embed_tokens")]
    [True, False, False]
    """
    return len(shape) == 2 and NOT_IN_LAYERS.search(name) is None


def count_optimizer_bytes(
    optim: str | None, shape: Shape, itemsize: int, *, name: str = "", on_disk: bool = False
) -> int:
    """Bytes of the optimizer's state of a rank's part, of this `shape`, of one trained tensor; None: no optimizer.

    >>> [count_optimizer_bytes(name, (10, 8), 4) for name in ("adamw_torch", "adafactor", "sgd", None)]
    [644, 76, 0, 0]
    >>> [count_optimizer_bytes("muon", (10, 8), 4, name=name) for name in ("h.0.fc.weight", "lm_head.weight")]
    [320, 644]
    """
    if optim is None:
        return 0
    facts = OPTIMIZERS[optim]
    of_matrix = facts.count_matrix if is_layers_matrix(name, shape) else None
    return ((on_disk and facts.count_saved) or of_matrix or facts.count_state)(shape, itemsize)


def list_smaller(optim: str, *, with_package: bool) -> Mapping[str, str]:
    """The optimizers that the plan advises instead of `optim`, with their costs: those of a package, or the others.

    >>> list_smaller("adamw_bf16_moments", with_package=True)
    {'adamw_8bit': 'moments in 8 bits; needs torchao'}
    """
    matrix, itemsize = (1024, 1024), FP32
    now = count_optimizer_bytes(optim, matrix, itemsize)
    return {
        name: facts.advice
        for name, facts in OPTIMIZERS.items()
        if facts.advice and facts.count_state(matrix, itemsize) < now and (facts.package is not None) == with_package
    }


def convert_optimizer(name: str) -> str | None:
    """Our name for the optimizer that another tool has by this name or path; None: there is none here.

    >>> [convert_optimizer(name) for name in ("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", "lion_8bit")]
    ['adamw_torch_fused', 'adamw_8bit', None]
    """
    plain = name.lower().replace("_", "")
    return next((ours for ours, facts in OPTIMIZERS.items() if re.fullmatch(facts.converted, plain)), None)


def list_offloaded_itemsizes(optim: str, dtype: str, compute_dtype: str) -> tuple[int, ...]:
    """Bytes of a number of each tensor that `optim_offload: nvme` keeps in files for a parameter of `dtype`: two
    moments of AdamW, before them a master weight where the model computes in another dtype.

    >>> list_offloaded_itemsizes("adamw_torch", "float32", "bfloat16")
    (4, 4, 4)
    >>> list_offloaded_itemsizes("adamw_bf16_moments", "float32", "float32")
    (2, 2)
    """
    moment = OPTIMIZERS[optim].moment_itemsize or ITEMSIZE[dtype]
    return (*([ITEMSIZE[dtype]] if dtype != compute_dtype else []), moment, moment)


def count_offloaded_bytes(numel: int, itemsizes: Iterable[int]) -> int:
    """Bytes in a rank's file of tensors of `numel` numbers, each padded to a multiple of OFFLOAD_ALIGNMENT.

    >>> count_offloaded_bytes(1000, (4, 4, 4)), count_offloaded_bytes(2048, (4, 2, 2))
    (12288, 16384)
    """
    return sum(-(-numel * itemsize // OFFLOAD_ALIGNMENT) * OFFLOAD_ALIGNMENT for itemsize in itemsizes)


DECAY_SHARE = 0.1  # of a run's steps, in which warmup_stable_decay decays unless num_decay_steps is given
INVERSE_SQRT_TIMESCALE = 10_000  # transformers', where nothing warms up
DECAYS: Mapping[str, Callable[[float], float]] = {  # what is left of the rate by the share of the steps that is done
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
DEFAULT_SCHEDULE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak` over `warmup_steps`, then `kind` down to `floor` at the last of `steps`."""

    peak: float
    steps: int
    warmup_steps: int = 0
    floor: float = 0.0
    kind: str = DEFAULT_SCHEDULE  # lr_scheduler_type
    arguments: Mapping[str, float | str] = field(default_factory=dict)  # lr_scheduler_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """What the rest of the package asks about a schedule."""

    # What is left of the rate above `floor`, from 1 to 0, at a step after the warm-up.
    share_left: Callable[[int, Schedule], float]
    # lr_scheduler_kwargs, by transformers' names: one of these words, or without any a number above 0.
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_end: bool = True  # min_lr_ratio has an effect
    needs_floor: bool = False  # min_lr_ratio must be set
    warms_from_floor: bool = False  # the warm-up begins there, not at 0


def _share_done(step: int, schedule: Schedule) -> float:
    """The share of the steps after the warm-up that is done."""
    return min(1.0, (step - schedule.warmup_steps) / max(1, schedule.steps - schedule.warmup_steps))


def _decay_at_the_end(step: int, schedule: Schedule) -> float:
    """1, then a decay over the last `num_decay_steps`."""
    decay = count_steps(float(schedule.arguments.get("num_decay_steps", DECAY_SHARE)), schedule.steps)
    decay = max(1, min(decay or 1, schedule.steps - schedule.warmup_steps))
    done = min(1.0, max(0.0, (step - (schedule.steps - decay)) / decay))
    return DECAYS[str(schedule.arguments.get("decay_type", "cosine"))](done)


def _inverse_sqrt(step: int, schedule: Schedule) -> float:
    scale = float(schedule.arguments.get("timescale", schedule.warmup_steps or INVERSE_SQRT_TIMESCALE))
    return math.sqrt(scale / (step - schedule.warmup_steps + scale))


_CONSTANT = ScheduleFacts(share_left=lambda step, schedule: 1.0, has_end=False)
SCHEDULES: Mapping[str, ScheduleFacts] = {
    DEFAULT_SCHEDULE: ScheduleFacts(share_left=lambda step, schedule: DECAYS["cosine"](_share_done(step, schedule))),
    "linear": ScheduleFacts(share_left=lambda step, schedule: DECAYS["linear"](_share_done(step, schedule))),
    "constant": _CONSTANT,
    "constant_with_warmup": _CONSTANT,
    "cosine_with_min_lr": ScheduleFacts(
        share_left=lambda step, schedule: DECAYS["cosine"](_share_done(step, schedule)), needs_floor=True
    ),
    "polynomial": ScheduleFacts(
        share_left=lambda step, schedule: (
            (1 - _share_done(step, schedule)) ** float(schedule.arguments.get("power", 1.0))
        ),
        arguments={"power": ()},
    ),
    "inverse_sqrt": ScheduleFacts(share_left=_inverse_sqrt, arguments={"timescale": ()}, has_end=False),
    "warmup_stable_decay": ScheduleFacts(
        share_left=_decay_at_the_end,
        arguments={"num_decay_steps": (), "decay_type": tuple(DECAYS)},
        warms_from_floor=True,
    ),
}
SHORT_NAMES = {"wsd": "warmup_stable_decay"}
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
SCHEDULE_HELP = (
    f"What follows the linear warm-up, by Transformers' names, and {', '.join(SHORT_NAMES)} for the last. constant "
    "warms up too: warmup_steps: 0 leaves that out."
)
ARGUMENTS_HELP = (
    "What the schedule takes, by Transformers' names: power (polynomial), timescale (inverse_sqrt), num_decay_steps "
    "and decay_type (warmup_stable_decay: the last tenth of the steps and cosine; or linear, 1-sqrt)."
)
# transformers' other arguments, which are keys of the recipe here.
SCHEDULE_KEYS = {
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "min_lr": "min_lr_ratio, a share of learning_rate",
    "lr_end": "min_lr_ratio, a share of learning_rate",
    "num_warmup_steps": "warmup_steps",
}


def compute_learning_rate(step: int, schedule: Schedule) -> float:
    """The learning rate of optimizer step `step` (0-based): a pure function, so that there is no scheduler to save.

    As in transformers, but the warm-up starts one step later on its ramp, so that the first step has a learning rate
    above 0. Cosine: Loshchilov and Hutter 2017, eq. 5, without restarts.

    >>> s = Schedule(peak=1.0, warmup_steps=2, steps=10)
    >>> [round(compute_learning_rate(step, s), 3) for step in (0, 1, 2, 6, 9, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.038, 0.0]
    """
    facts = SCHEDULES[schedule.kind]
    if step < schedule.warmup_steps:
        lowest = schedule.floor if facts.warms_from_floor else 0.0  # as in transformers
        return lowest + (schedule.peak - lowest) * (step + 1) / schedule.warmup_steps
    return schedule.floor + (schedule.peak - schedule.floor) * facts.share_left(step, schedule)


def find_schedule_problems(kind: str, arguments: Mapping[str, float | str]) -> list[str]:
    """What is wrong with `lr_scheduler_kwargs` for the schedule, one sentence each."""
    takes, problems = SCHEDULES[kind].arguments, []
    for name, value in arguments.items():
        if name in SCHEDULE_KEYS:
            problems.append(f"{name}: here it is {SCHEDULE_KEYS[name]}")
        elif name not in takes:
            problems.append(f"{name}: {kind} takes {' and '.join(takes) or 'no arguments'}")
        elif takes[name] and value not in takes[name]:
            problems.append(f"{name}: {value} does not fit; one of {', '.join(takes[name])} is expected")
        elif not takes[name] and (not isinstance(value, int | float) or value <= 0):
            problems.append(f"{name}: {value} does not fit; a number above 0 is expected")
    return [f"lr_scheduler_kwargs: {problem}" for problem in problems]


# A key: its type and marks, then its help and default.
# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """How the parameters move."""

    num_train_epochs: Annotated[float, Gt(0), SameOnResume, "How often the data is gone through."] = 1.0
    max_steps: Annotated[Positive | None, SameOnResume, ReadAs(-1, None),
        "Optimizer steps; overrides num_train_epochs. null, or -1 as in Transformers: num_train_epochs decides."] = None
    learning_rate: Annotated[float, Gt(0), "The peak learning rate."] = 2e-5
    lr_scheduler_type: Annotated[ScheduleName, *(ReadAs(short, name) for short, name in SHORT_NAMES.items()),
        SCHEDULE_HELP] = DEFAULT_SCHEDULE
    lr_scheduler_kwargs: Annotated[dict[str, float | str] | None, ARGUMENTS_HELP] = None
    min_lr_ratio: Annotated[float, Ge(0), Le(1), "The schedule ends at learning_rate times this."] = 0.0
    warmup_ratio: Annotated[float, Ge(0), Le(1),
        "The share of the steps that warm up; ignored where warmup_steps is set."] = 0.03
    warmup_steps: Annotated[int | None, Ge(0), "The steps that warm up."] = None
    optim: Annotated[OptimizerName, OPTIMIZER_HELP] = DEFAULT_OPTIMIZER
    optim_offload: Annotated[Literal["none", "nvme"],
        "Where the optimizer's state is. none: in memory. nvme: its moments, and fp32 master weights where "
        "mixed_precision is on, are in files under offload_dir; a step reads and writes them one decoder layer after "
        f"another. Under FSDP2, with {KEPT_IN_FILES}."] = "none"
    offload_dir: Annotated[str | None,
        "A folder on the NVMe disk of each node, for the files of optim_offload: nvme. They end with the run; a "
        "checkpoint needs none of them."] = None
    weight_decay: Annotated[float, Ge(0),
        f"Weight decay, on matrices only (not on norms and biases); decoupled, but for {COUPLED_DECAY}."] = 0.0
    adam_beta1: Annotated[float, Ge(0), Lt(1), "Decay of the first moment."] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1), "Decay of the second moment."] = 0.999
    adam_epsilon: Annotated[float, Gt(0), "Added to the root of the second moment."] = 1e-8
    neftune_noise_alpha: Annotated[float | None, Gt(0), SameOnResume,
        "NEFTune: uniform noise on the embeddings while training, at most this over the root of the document's "
        "tokens times the hidden size."] = None
    label_smoothing: Annotated[float, Ge(0), Lt(1), SameOnResume,
        "Train on this share of an even distribution over the vocabulary beside each label, as torch's "
        "cross_entropy; the held-out loss is without it."] = 0.0
    token_loss: Annotated[Literal["cross_entropy", "dft", "eaft"], SameOnResume,
        "What the cross entropy of a trained token is weighted by, which gets no gradient. cross_entropy: nothing; "
        "dft: the token's probability; eaft: the entropy of the 20 likeliest tokens over 3. The held-out loss is "
        "without it."] = "cross_entropy"
    eaft_alpha: Annotated[float, Gt(0), SameOnResume, "token_loss: eaft: the exponent of the weight."] = 1.0
    optim_in_backward: Annotated[bool,
        "Update each parameter in the backward, as soon as its gradient is complete, and free the gradient: the "
        "gradients of the whole model are never in memory together. For steps of one micro-batch, with "
        "max_grad_norm: null, in one process or under FSDP2."] = False
    max_grad_norm: Annotated[float | None, Gt(0), "The gradient is scaled down to this norm; null: no clipping."] = 1.0
    on_nonfinite: Annotated[Literal["stop", "skip"],
        "What is done at a step whose loss or gradient is not finite: the update is never made."] = "stop"
    max_skipped_steps: Annotated[Positive, "Under on_nonfinite: skip, stop the run after this many skipped steps."] = 10

    def schedule(self, steps: int) -> Schedule:
        """The learning rates of a run of `steps` optimizer steps."""
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * steps)
        return Schedule(
            peak=self.learning_rate,
            steps=steps,
            warmup_steps=min(warmup, steps),
            floor=self.learning_rate * self.min_lr_ratio,
            kind=self.lr_scheduler_type,
            arguments=self.lr_scheduler_kwargs or {},
        )
# fmt: on
