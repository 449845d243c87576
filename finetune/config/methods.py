"""The recipe's section on what the model learns from (answers, preferences, a teacher), and what each method needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from finetune.config.key_annotations import FileOrName, SameOnResume
from finetune.config.rollouts import DEFAULT_POLICY_LOSS, POLICY_LOSSES, Rollout

DEFAULT_METHOD = "sft"
RowKind = Literal["answers", "pairs", "ratings", "prompts"]
# Documents in a group, which no batch takes apart: an answer; chosen and rejected; a rated answer and a mismatched one.
GROUP_SIZES: Mapping[RowKind, int] = {"answers": 1, "pairs": 2, "ratings": 2, "prompts": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFacts:
    """What data, training, plan and `finetune init` ask about a method."""

    says: str  # what the model learns, for the recipe that `finetune init` writes
    rows: RowKind = "answers"  # what it reads of the data
    keys: tuple[str, ...] = ()  # the recipe's keys, beside `method`, that it uses and another method does not
    needs_reference: bool = False  # the log-probabilities of the model before training
    needs_teacher: bool = False  # another model's probabilities
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that have another default under this method
    losses: tuple[str, ...] = ()  # the values of loss_type

    @property
    def compares(self) -> bool:
        """Whether it compares answers, so that a row is a group of documents."""
        return self.documents > 1

    @property
    def samples(self) -> bool:
        """Whether it learns from completions that the model in training samples."""
        return self.rows == "prompts"

    @property
    def documents(self) -> int:
        """Documents in a group, which no batch takes apart."""
        return GROUP_SIZES[self.rows]


TEACHER_KEYS = ("teacher_model_name_or_path", "teacher_model_revision", "teacher_load_in_4bit")
PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero")
LABEL_KEYS = ("label_smoothing", "token_loss", "eaft_alpha")  # of the cross entropy of labels
METHODS: Mapping[str, MethodFacts] = {
    DEFAULT_METHOD: MethodFacts(says="learns the answers (supervised fine-tuning)", keys=LABEL_KEYS),
    "dpo": MethodFacts(
        says="learns from pairs which answer is the better one, against the model before training", rows="pairs",
        keys=("beta", "loss_type", "label_smoothing", "rpo_alpha"), needs_reference=True, losses=PAIR_LOSSES,
    ),
    "orpo": MethodFacts(
        says="learns the chosen answers, and to prefer them to the rejected ones", rows="pairs", keys=("beta",)
    ),
    "simpo": MethodFacts(
        says="learns from pairs which answer is the better one, without a reference", rows="pairs",
        keys=("beta", "simpo_gamma"),
    ),
    "kto": MethodFacts(
        says="learns from answers that are rated good or bad", rows="ratings",
        keys=("beta", "desirable_weight", "undesirable_weight"), needs_reference=True,
    ),
    "distill": MethodFacts(
        says="learns a larger model's probabilities for every token of the answers",
        keys=(*TEACHER_KEYS, "distill_beta", "temperature", "distill_alpha", *LABEL_KEYS), needs_teacher=True,
    ),
    "grpo": MethodFacts(
        says="samples completions of prompts, and learns which of them get the larger reward", rows="prompts",
        keys=("loss_type", "beta", "temperature", *(key.name for key in fields(Rollout))),
        defaults={"loss_type": DEFAULT_POLICY_LOSS, "beta": 0.0}, losses=tuple(POLICY_LOSSES),
    ),
    "on_policy_distill": MethodFacts(
        says="samples completions of prompts, and learns a larger model's probabilities for their tokens",
        rows="prompts", keys=("loss_type", "temperature", *TEACHER_KEYS, *(key.name for key in fields(Rollout))),
        needs_teacher=True, defaults={"loss_type": DEFAULT_POLICY_LOSS, "num_generations": 1},
        losses=tuple(name for name, loss in POLICY_LOSSES.items() if loss.average != "sums"),
    ),
}  # fmt: skip
PAIRED = tuple(name for name, facts in METHODS.items() if facts.rows == "pairs")
RATED = tuple(name for name, facts in METHODS.items() if facts.rows == "ratings")
REWARDED = tuple(name for name, facts in METHODS.items() if facts.samples and not facts.needs_teacher)
TAUGHT = tuple(name for name, facts in METHODS.items() if facts.needs_teacher and not facts.samples)
if TYPE_CHECKING:
    MethodName = str
    LossName = str
else:
    MethodName = Literal[tuple(METHODS)]
    LossName = Literal[(*PAIR_LOSSES, *POLICY_LOSSES)]


# A key: its type and marks, then its help and default.
# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What the model learns from: answers, pairs of answers, rated answers, or another model."""

    method: Annotated[MethodName, SameOnResume,
        "; ".join(f"{name}: {facts.says}" for name, facts in METHODS.items()) + "."] = DEFAULT_METHOD
    beta: Annotated[float, Ge(0), SameOnResume,
        "dpo, kto: how strongly the model is held to the reference; orpo: the weight of the odds ratio; simpo: the "
        "scale of the rewards; grpo: the weight of the KL divergence from the reference, 0 unless it is given."] = 0.1
    loss_type: Annotated[LossName, SameOnResume,
        "dpo: the loss of a pair; sigmoid is the paper's. grpo, on_policy_distill: of sampled completions, "
        f"{DEFAULT_POLICY_LOSS} unless it is given; docs/online.md has the papers."] = "sigmoid"
    rpo_alpha: Annotated[float | None, Gt(0), SameOnResume,
        "dpo: add the cross entropy of the chosen answers, times this (RPO)."] = None
    simpo_gamma: Annotated[float, Ge(0), SameOnResume,
        "simpo: how much larger the reward of the chosen answer should be."] = 0.5
    desirable_weight: Annotated[float, Ge(0), SameOnResume, "kto: the weight of answers rated good."] = 1.0
    undesirable_weight: Annotated[float, Ge(0), SameOnResume, "kto: the weight of answers rated bad."] = 1.0
    teacher_model_name_or_path: Annotated[str | None, FileOrName, SameOnResume,
        "The teacher of a distillation, with the same tokenizer and vocabulary."] = None
    teacher_model_revision: Annotated[str | None, SameOnResume,
        "The hub revision of teacher_model_name_or_path."] = None
    teacher_load_in_4bit: Annotated[bool, SameOnResume,
        "Keep the teacher's linear layers in 4 bits (nf4, double quantization); needs bitsandbytes."] = False
    distill_beta: Annotated[float, Ge(0), Le(1), SameOnResume,
        "distill: 0 is the forward KL divergence, 1 the reverse, between them the generalized Jensen-Shannon "
        "divergence."] = 0.5
    temperature: Annotated[float, Gt(0), SameOnResume,
        "What logits are divided by: distill: those of teacher and student; grpo, on_policy_distill: all, in sampling "
        "and in training."] = 1.0
    distill_alpha: Annotated[float, Gt(0), Le(1), SameOnResume,
        "distill: the weight of the divergence; the rest is the weight of the labels' cross entropy."] = 1.0
# fmt: on


# The keys of an entry of `datasets` that name columns of only some rows.
COLUMN_KEYS: Mapping[str, tuple[RowKind, ...]] = {
    "chosen_column": ("pairs", "ratings"),
    "rejected_column": ("pairs", "ratings"),
    "label_column": ("ratings",),
}


UNSHOWN = (
    "per_device_generation_batch_size",
    "log_completions",
    "reward_timeout_seconds",
    "on_bad_reward",
)  # of how, not of what


def describe_method(values: Mapping[str, Any]) -> str:
    """The method of a recipe with these `values`, and its keys, where they are set.

    >>> describe_method({"method": "dpo", "beta": 0.1, "loss_type": "sigmoid", "rpo_alpha": None, "label_smoothing": 0.0})
    'dpo: beta 0.1, loss_type sigmoid'
    """  # noqa: E501
    method = values.get("method", DEFAULT_METHOD)
    if method == DEFAULT_METHOD:
        return "supervised fine-tuning"
    used = [f"{key} {_show(values[key])}" for key in METHODS[method].keys if key not in UNSHOWN and values.get(key)]
    return f"{method}: {', '.join(used)}"


def _show(value: Any) -> str:
    """A key's value in a line: of a file's function its name.

    >>> _show(["exact_answer", "/home/me/rewards.py:short"])
    'exact_answer + rewards.py:short'
    """
    if isinstance(value, list | tuple):
        return " + ".join(str(each).rpartition("/")[2] for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
