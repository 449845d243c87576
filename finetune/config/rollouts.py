"""How the model is sampled and rewarded while it trains: the section of a recipe, and the losses of completions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from finetune.config.key_annotations import Positive, PythonName, SameOnResume

# Rewards that ship: name -> what it gives. The functions are in rollout/shipped_rewards.py.
SHIPPED_REWARDS: Mapping[str, str] = {
    "exact_answer": "1 where the completion, without the white space around it, is the row's answer",
    "number": "1 where the last number of the completion is that of the row's answer",
    "format": "1 where the completion is <think>...</think><answer>...</answer>",
    "think_format": "1 where the completion begins with <think>...</think>",
    "length": "the share of max_completion_length that the completion leaves unused",
    "soft_overlong_punishment": "0 up to max_completion_length less soft_punish_cache tokens, then down to -1 (DAPO)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What distinguishes a loss of sampled completions."""

    paper: str
    # What the loss is averaged over: sequences, each the mean of its tokens; all tokens of the step; sequences times
    # max_completion_length; or sequences, each with one ratio for the sum of its tokens.
    average: Literal["sequences", "tokens", "budget", "sums"]
    # What a reward is compared with: the mean of its group; that of the others in its group; or of the whole step.
    baseline: Literal["group", "others", "step"] = "group"
    # How the probability ratio is bounded: as PPO's surrogate, or as a weight without a gradient.
    bound: Literal["surrogate", "weight"] = "surrogate"


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "grpo": PolicyLoss(paper="Shao et al. 2024, arXiv:2402.03300, eq. 3", average="sequences"),
    "dapo": PolicyLoss(paper="Yu et al. 2025, arXiv:2503.14476, eq. 8", average="tokens"),
    "dr_grpo": PolicyLoss(paper="Liu et al. 2025, arXiv:2503.20783, listing 1", average="budget"),
    "cispo": PolicyLoss(paper="MiniMax 2025, arXiv:2506.13585, eq. 4 and 5", average="tokens", bound="weight"),
    "rloo": PolicyLoss(paper="Ahmadian et al. 2024, arXiv:2402.14740, sec. 3.4", average="sums", baseline="others"),
    "reinforce++": PolicyLoss(paper="Hu et al. 2025, arXiv:2501.03262", average="tokens", baseline="step"),
}
DEFAULT_POLICY_LOSS = "dapo"
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
if TYPE_CHECKING:
    PolicyLossName = str
else:
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]


# A key: its type and marks, then its help and default.
# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How completions are sampled from the model in training, and what they are worth."""

    rewards: Annotated[tuple[str, ...], PythonName, SameOnResume,
        "What a completion is worth: functions of files of yours, such as my_rewards.py:right, with TRL's arguments, "
        "and these names: " + "; ".join(f"{name}: {says}" for name, says in SHIPPED_REWARDS.items()) + "."] = ()
    reward_weights: Annotated[tuple[float, ...] | None, SameOnResume,
        "A number for each of rewards, which are summed with it; null: 1."] = None
    num_generations: Annotated[Positive, SameOnResume,
        "Completions of each prompt, which are compared with each other: a group. A step samples them for "
        "global_batch_size prompts."] = 8
    max_completion_length: Annotated[Positive, SameOnResume,
        "Tokens of a completion, at most. With its prompt it has at most max_length; longer prompts are dropped, and "
        "counted."] = 256
    num_iterations: Annotated[Positive, SameOnResume,
        "How often the completions of a step are trained on, an optimizer step each time (mu in the GRPO paper)."] = 1
    steps_per_generation: Annotated[Positive, SameOnResume,
        "The steps whose completions are sampled together, from the same weights; each trains on its own share."] = 1
    max_num_gen_batches: Annotated[Positive, SameOnResume,
        "How often a step may sample until it has global_batch_size groups whose rewards differ: groups without signal "
        "are dropped, and other prompts take their places (DAPO's dynamic sampling). 1: none is dropped."] = 1
    per_device_generation_batch_size: Annotated[Positive,
        "Completions that a rank samples at once; when one ends, the next takes its place. Sets the memory of the "
        "key-value cache."] = 64
    scale_rewards: Annotated[Literal["group", "batch", "none"], SameOnResume,
        "What the difference of a reward from its baseline is divided by: the standard deviation in its group, in the "
        "step, or nothing."] = "group"
    epsilon: Annotated[float, Gt(0), SameOnResume,
        "How far below 1 the probability ratio is followed, and above where epsilon_high is null."] = 0.2
    epsilon_high: Annotated[float | None, Gt(0), SameOnResume,
        "How far above 1; with loss_type: cispo the largest ratio itself."] = None
    importance_sampling_level: Annotated[Literal["token", "sequence"], SameOnResume,
        "What has a probability ratio: each token, or the sequence, as the geometric mean of its tokens' (GSPO)."
    ] = "token"
    importance_sampling_correction: Annotated[Correction, SameOnResume,
        "How the loss is corrected where sampling and training compute different probabilities: it is multiplied by "
        "their ratio, of each token or of the sequence, truncated at importance_sampling_clip_max, or 0 beyond it."
    ] = "none"
    importance_sampling_clip_max: Annotated[float, Gt(0), SameOnResume,
        "The largest ratio that importance_sampling_correction follows."] = 3.0
    importance_sampling_clip_min: Annotated[float | None, Gt(0), SameOnResume,
        "The smallest; null: there is none."] = None
    soft_punish_cache: Annotated[int | None, Gt(0), SameOnResume,
        "The last tokens before max_completion_length, over which the reward soft_overlong_punishment falls to -1."
    ] = None
    mask_truncated_completions: Annotated[bool, SameOnResume,
        "Learn nothing from completions that max_completion_length has cut (DAPO)."] = False
    log_completions: Annotated[int, Ge(0),
        "The number of prompts in a step whose completions are written to completions.jsonl, with their rewards."] = 1
    reward_timeout_seconds: Annotated[float, Gt(0),
        "How long the rewards of a step may take; they are computed in a process of their own."] = 60.0
    on_bad_reward: Annotated[Literal["error", "zero"], SameOnResume,
        "What is done where a reward raises, takes too long or is not finite: the run ends, or it is 0 and counted."
    ] = "error"

    @property
    def updates_per_generation(self) -> int:
        """The optimizer steps on what is sampled together; after the first, the model is not the sampled one."""
        return self.num_iterations * self.steps_per_generation
# fmt: on
