"""The section of a recipe that says how the parameters move: the optimizer, the learning rate, the loss. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.markers import Positive, ReadAs, SameOnResume

# Schedule -> its lr_scheduler_kwargs, by transformers' names; a number above 0, or one of these words.
SCHEDULE_ARGUMENTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "polynomial": {"power": ()},
    "inverse_sqrt": {"timescale": ()},
    "warmup_stable_decay": {"num_decay_steps": (), "decay_type": ("cosine", "linear", "1-sqrt")},
}
# transformers' other arguments, which are keys of the recipe here.
SCHEDULE_KEYS = {
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "min_lr": "min_lr_ratio, a share of learning_rate",
    "lr_end": "min_lr_ratio, a share of learning_rate",
    "num_warmup_steps": "warmup_steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """How the parameters move."""

    num_train_epochs: Annotated[float, Gt(0), SameOnResume, "How often the data is gone through."] = 1.0
    max_steps: Annotated[
        Positive | None,
        SameOnResume,
        ReadAs(-1, None),
        "Optimizer steps; overrides num_train_epochs. null, or -1 as in Transformers: num_train_epochs decides.",
    ] = None
    learning_rate: Annotated[float, Gt(0), "The peak learning rate."] = 2e-5
    lr_scheduler_type: Annotated[
        Literal[
            "cosine",
            "linear",
            "constant",
            "constant_with_warmup",
            "cosine_with_min_lr",
            "polynomial",
            "inverse_sqrt",
            "warmup_stable_decay",
        ],
        ReadAs("wsd", "warmup_stable_decay"),
        "What follows the linear warm-up, by Transformers' names, and wsd for the last. constant warms up too: warmup_steps: 0 "
        "leaves that out.",
    ] = "cosine"
    lr_scheduler_kwargs: Annotated[
        dict[str, float | str] | None,
        "What the schedule takes, by Transformers' names: power (polynomial), timescale (inverse_sqrt), num_decay_steps and "
        "decay_type (warmup_stable_decay: the last tenth of the steps and cosine; or linear, 1-sqrt).",
    ] = None
    min_lr_ratio: Annotated[float, Ge(0), Le(1), "The schedule ends at learning_rate times this."] = 0.0
    warmup_ratio: Annotated[
        float, Ge(0), Le(1), "The share of the steps that warm up; ignored where warmup_steps is set."
    ] = 0.03
    warmup_steps: Annotated[int | None, Ge(0), "The steps that warm up."] = None
    optim: Annotated[
        Literal["adamw_torch_fused", "adamw_torch", "adamw_bf16_moments", "adamw_8bit", "adafactor", "sgd"],
        "The optimizer. adamw_bf16_moments keeps its moments in bf16: 4 bytes a parameter instead of 8; adamw_8bit in 8 bits: 2 "
        "bytes, by torchao, which has to be installed; not under FSDP1. adafactor keeps a number for each row and column, at "
        "the fixed learning rate, as Transformers' Trainer has it; not under FSDP1. sgd keeps nothing.",
    ] = "adamw_torch_fused"
    optim_offload: Annotated[
        Literal["none", "nvme"],
        "Where the optimizer's state is: none: in memory; nvme: its moments, and fp32 master weights where mixed_precision is on, in "
        "files under offload_dir, of which every step reads and writes one decoder layer after another. Under FSDP2, with "
        "adamw_torch_fused, adamw_torch or adamw_bf16_moments.",
    ] = "none"
    offload_dir: Annotated[
        str | None,
        "A folder on the NVMe disk of each node, for the files of optim_offload: nvme. They end with the run; a checkpoint needs "
        "none of them.",
    ] = None
    weight_decay: Annotated[
        float, Ge(0), "Weight decay, on matrices only (not on norms and biases); decoupled, but for sgd."
    ] = 0.0
    adam_beta1: Annotated[float, Ge(0), Lt(1), "Decay of the first moment."] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1), "Decay of the second moment."] = 0.999
    adam_epsilon: Annotated[float, Gt(0), "Added to the root of the second moment."] = 1e-8
    neftune_noise_alpha: Annotated[
        float | None,
        Gt(0),
        SameOnResume,
        "NEFTune: uniform noise on the embeddings while training, at most this over the root of the document's tokens times "
        "the hidden size.",
    ] = None
    label_smoothing: Annotated[
        float,
        Ge(0),
        Lt(1),
        SameOnResume,
        "Train on this share of an even distribution over the vocabulary beside each label, as torch's cross_entropy; the "
        "held-out loss is without it.",
    ] = 0.0
    optim_in_backward: Annotated[
        bool,
        "Update each parameter in the backward, as soon as its gradient is complete, and free the gradient: the gradients of "
        "the whole model are never in memory together. For steps of one micro-batch, with max_grad_norm: null, in one process "
        "or under FSDP2.",
    ] = False
    max_grad_norm: Annotated[float | None, Gt(0), "The gradient is scaled down to this norm; null: no clipping."] = 1.0
    on_nonfinite: Annotated[
        Literal["stop", "skip"],
        "What is done at a step whose loss or gradient is not finite: the update is never made.",
    ] = "stop"
    max_skipped_steps: Annotated[Positive, "Under on_nonfinite: skip, stop the run after this many skipped steps."] = 10
