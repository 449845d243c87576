"""The types of sampling: requests, completions, rollouts with their rewards and advantages, and the
protocols of the engines that sample.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from finetune.config.methods import POLICY_LOSSES
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.images import EncodedImage
from finetune.distributed.world import World

Floats = NDArray[np.float64]


class Ended(Enum):
    """Why a completion ended."""

    STOPPED = "stopped"  # its last token ends the turn
    CUT = "cut"  # max_completion_length leaves no room for more
    ABORTED = "aborted"  # a change of the server's weights interrupted it


class Request(NamedTuple):
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    # The run's seed, the step, the prompt's number in the step and the completion's number in its
    # group. A request that continues a completion has one more number. Random numbers depend on
    # this seed alone, not on the other requests.
    seed: tuple[int, ...]
    max_tokens: int | None = None  # a limit of this request; None: that of the `Sampling`
    images: tuple[EncodedImage, ...] = ()  # of the prompt

    @property
    def prompt_seed(self) -> tuple[int, ...]:
        """The part of the seed that all completions of the prompt have in common."""
        return self.seed[:3]

    def draw_uniforms(self, tokens: int) -> Floats:
        """Draws a number in [0, 1) for each token: fp64[tokens]."""
        entropy = np.random.SeedSequence([*self.seed, *b"rollout"])
        return np.random.Generator(np.random.Philox(entropy)).random(tokens)

    def draw_seed(self) -> int:
        """Draws a seed of 63 bits for a server, which draws the random numbers itself."""
        entropy = np.random.SeedSequence([*self.seed, *b"rollout"])
        return int(entropy.generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn: always from the whole vocabulary, the distribution that is trained."""

    max_tokens: int  # of a completion, unless its request has a limit
    temperature: float = 1.0
    greedy: bool = False  # takes the likeliest token

    def limit(self, request: Request) -> int:
        """Returns the most tokens that the completion of `request` may have."""
        return request.max_tokens or self.max_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion. It may have several sampled turns with the answers of tools between them."""

    token_ids: list[int]  # those of tools' answers included
    # of each sampled token, under the distribution from which it was sampled
    log_probabilities: list[float]
    entropy: float  # nats, summed over the sampled tokens
    ended: Ended
    # for each token 1 if it was sampled, 0 if a tool answered it; empty: all were sampled
    tool_mask: list[int] = field(default_factory=list)
    calls: int = 0  # calls of tools
    failed_calls: int = 0  # calls whose answer is an error
    # for each sampled token the step whose weights sampled it; empty: nothing is sampled ahead
    versions: list[int] = field(default_factory=list)
    cuts: int = 0  # how often a change of weights or the end of a run interrupted the sampling
    dropped: int = 0  # tokens that were sampled before an interruption, and then dropped
    # int16[tokens of prompt and completion, layers, chosen]: the experts of each token; -1 for the
    # last token, which the model has not read. None: the recipe does not replay experts.
    experts: NDArray[np.int16] | None = field(default=None, compare=False)

    def labels(self, *, is_learned: bool) -> list[int]:
        """Returns the labels: a sampled token is its label, a tool's token has IGNORE_INDEX.

        is_learned: Whether the completion is trained on; if not, all labels are IGNORE_INDEX.
        """
        if not is_learned:
            return [IGNORE_INDEX] * len(self.token_ids)
        mask = self.tool_mask or [1] * len(self.token_ids)
        return [
            token if is_sampled else IGNORE_INDEX
            for token, is_sampled in zip(self.token_ids, mask, strict=True)
        ]

    def last_turn(self) -> list[int]:
        """Returns the tokens sampled after the last answer of a tool; all tokens without any."""
        tool_places = np.flatnonzero(np.array(self.tool_mask) == 0)
        last_tool_place = max(tool_places, default=-1)
        return self.token_ids[last_tool_place + 1 :]

    def extend(self, answer_ids: list[int], more: "Sampled") -> "Sampled":
        """Appends the tokens of a tool's answer, and then the turn that was sampled after it."""
        mask = self.tool_mask or [1] * len(self.token_ids)
        return replace(
            self,
            token_ids=self.token_ids + answer_ids + more.token_ids,
            log_probabilities=self.log_probabilities + more.log_probabilities,
            entropy=self.entropy + more.entropy,
            ended=more.ended,
            tool_mask=mask + [0] * len(answer_ids) + [1] * len(more.token_ids),
            versions=self.versions + more.versions,
            cuts=self.cuts + more.cuts,
            dropped=self.dropped + more.dropped,
        )

    def join(self, more: "Sampled") -> "Sampled":
        """Appends the tokens that were sampled after an interruption of the same turn."""
        return replace(
            self,
            token_ids=self.token_ids + more.token_ids,
            log_probabilities=self.log_probabilities + more.log_probabilities,
            entropy=self.entropy + more.entropy,
            ended=more.ended,
            versions=self.versions + more.versions,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the completion as values of JSON, which `of_json` reads."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values |= {"ended": self.ended.value}
        del values["experts"]
        if self.experts is not None:
            values["experts"] = _write_experts(self.experts)
        return values

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Makes the completion from the values that `as_json` returned."""
        fields: dict[str, Any] = {**values, "ended": Ended(values["ended"])}
        if fields.get("experts") is not None:
            fields["experts"] = _read_experts(fields["experts"])
        return cls(**fields)


def _write_experts(experts: NDArray[np.int16]) -> dict[str, Any]:
    """Writes an array as values of JSON: its shape, and its little-endian bytes in base64."""
    data = base64.b64encode(experts.astype("<i2").tobytes()).decode()
    return {"shape": list(experts.shape), "int16": data}


def _read_experts(values: Mapping[str, Any]) -> NDArray[np.int16]:
    """Reads the array that `_write_experts` wrote."""
    data = np.frombuffer(base64.b64decode(values["int16"]), "<i2")
    return data.reshape(values["shape"]).astype(np.int16)


class Engine(Protocol):
    """Samples completions from the current weights of the model in training."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Samples a completion for each request, in order.

        All ranks call it, each with its own requests; ranks of one tensor parallel group have the
        same ones.
        """


def sample_shares(
    engine: Engine, world: World, sampling: Sampling, requests: Sequence[Request]
) -> list[Sampled]:
    """Samples a completion of each request.

    All ranks call it with the same requests, and each returns all completions, in their order. Each
    tensor parallel group samples a share of the requests, together with the same group of the other
    pipeline stages. With a server, only the group's first rank in the first stage asks, and the
    others' completions are [].
    """
    groups = world.tensor_group_count
    index = world.tensor_group_index
    first = len(requests) * index // groups
    end = len(requests) * (index + 1) // groups
    completions = engine.sample(requests[first:end], sampling)
    by_rank = world.gather([completion.as_json() for completion in completions])
    # Of each group, only the first rank of the first stage is sure to have completions. A group's
    # ranks are consecutive, and those of the first stage come first.
    ranks_in_group = world.stage_size // groups
    by_group = [by_rank[group * ranks_in_group] for group in range(groups)]
    return [Sampled.of_json(values) for values in chain.from_iterable(by_group)]


Converse = Callable[[Callable[[Sequence[Request]], list[Sampled]]], list[Sampled]]
"""Samples completions of several turns, by the function that it gets: requests -> one turn each."""


SMALLEST_DEVIATION = 1e-4  # added to a standard deviation before a division by it, as in TRL
# Fields of `Rollout` that are one number of all completions:
OF_ALL = ("failures", "generations", "sampled_groups", "flat_groups")
# Fields of `Rollout` with a number for each trained token:
OF_TOKENS = ("old", "reference", "values")


@dataclass(frozen=True, slots=True)
class Rollout:
    """The completions of some prompts: `generations` of the first prompt, then of the next one.

    A group is the completions of one prompt.
    """

    example_ids: NDArray[np.int64]  # [completions]: the places of their prompts in the data set
    prompts: list[list[int]]  # [completions][tokens]
    sampled: list[Sampled]  # [completions]
    scores: Floats  # [completions, rewards]; nan: no score
    rewards: Floats  # [completions]: the weighted sum of the scores; nan: no score at all
    failures: int  # completions with at least one score that failed and became 0
    generations: int  # completions of each prompt
    sampled_groups: int  # the groups that were sampled, including those that were dropped
    flat_groups: int  # sampled groups whose rewards are all equal
    hand_over_seconds: float = 0.0  # how long the server's last hand-over of weights took
    # [completions][trained tokens], measured before the generation's first update; empty if the
    # loss does not need them:
    old: list[list[float]] = field(default_factory=list)  # log-probabilities of the trained model
    reference: list[list[float]] = field(default_factory=list)  # those of the reference
    values: list[list[float]] = field(default_factory=list)  # of the critic

    @property
    def of_tokens(self) -> dict[str, list[list[float]]]:
        """The fields of `OF_TOKENS` by name, in a new dict."""
        return {name: getattr(self, name) for name in OF_TOKENS}

    def select(self, groups: NDArray[np.int64]) -> "Rollout":
        """Returns a rollout of only the groups at the places `groups`, in that order.

        The counts of sampled and flat groups and of failures stay.
        """
        places = (groups[:, None] * self.generations + np.arange(self.generations)).ravel()
        return replace(
            self,
            example_ids=self.example_ids[places],
            prompts=[self.prompts[i] for i in places],
            sampled=[self.sampled[i] for i in places],
            scores=self.scores[places],
            rewards=self.rewards[places],
        )

    def join(self, more: "Rollout") -> "Rollout":
        """Appends the groups of `more`, and adds its counts."""
        return replace(
            self,
            example_ids=np.concatenate((self.example_ids, more.example_ids)),
            prompts=self.prompts + more.prompts,
            sampled=self.sampled + more.sampled,
            scores=np.concatenate((self.scores, more.scores)),
            rewards=np.concatenate((self.rewards, more.rewards)),
            failures=self.failures + more.failures,
            sampled_groups=self.sampled_groups + more.sampled_groups,
            flat_groups=self.flat_groups + more.flat_groups,
        )

    def deviations(self) -> Floats:
        """Computes the standard deviation of each group's rewards: fp64[groups]; 0: it is flat."""
        groups = self.rewards.reshape(-1, self.generations)
        return np.array([_deviation(group) for group in groups])

    def describe_lines(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields a line of JSON for each completion.

        `of_lines` makes the rollout of the lines. `finetune inspect` reads a line as a data row,
        with a prompt and a completion.
        """
        of_all = {name: getattr(self, name) for name in OF_ALL}
        for i, completion in enumerate(self.sampled):
            of_tokens = {
                name: values[i] if values else None for name, values in self.of_tokens.items()
            }
            yield {
                "prompt": tokenizer.decode(self.prompts[i]),
                "completion": tokenizer.decode(completion.token_ids),
                "example_id": int(self.example_ids[i]),
                "prompt_ids": self.prompts[i],
                "sampled": completion.as_json(),
                "scores": [none_for_nan(score) for score in self.scores[i].tolist()],
                "reward": none_for_nan(float(self.rewards[i])),
                **of_tokens,
                **of_all,
            }

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]]) -> Self:
        """Makes a rollout of the lines that `describe_lines` yielded; there is at least one."""
        of_tokens: dict[str, Any] = {}
        for name in OF_TOKENS:
            of_tokens[name] = [line[name] for line in lines if line.get(name) is not None]
        return cls(
            example_ids=np.array([line["example_id"] for line in lines], np.int64),
            prompts=[line["prompt_ids"] for line in lines],
            sampled=[Sampled.of_json(line["sampled"]) for line in lines],
            scores=np.array([line["scores"] for line in lines], np.float64).reshape(len(lines), -1),
            rewards=np.array([line["reward"] for line in lines], np.float64),
            **of_tokens,
            **{name: lines[0][name] for name in OF_ALL},
        )


def none_for_nan(value: float) -> float | None:
    """Returns a number as JSON has it, which knows no nan."""
    return None if math.isnan(value) else value


def compute_advantages(rewards: Floats, generations: int, baseline: str, scale: str) -> Floats:
    """Computes by how much each reward is above its baseline: fp64[completions].

    The advantage is 0 for a completion without a reward.

    Args:
        rewards: [completions], group after group; nan: no reward.
        generations: The completions of a group.
        baseline: `PolicyLoss.baseline`: the mean of the group's other rewards ("others"), of all
            rewards ("step"), or else of the group's rewards.
        scale: The recipe's `scale_rewards`, which applies to the last of these baselines.
    """
    groups = rewards.reshape(-1, generations)
    counts = (~np.isnan(groups)).sum(1, keepdims=True)  # [groups, 1]: completions with a reward
    totals = np.nansum(groups, 1, keepdims=True)
    if baseline == "others":
        means_of_others = (totals - groups) / np.maximum(counts - 1, 1)
        # A group's only reward has nothing to be compared with.
        advantages = np.where(counts > 1, groups - means_of_others, 0.0 * groups)
    elif baseline == "step":
        advantages = (groups - _mean(rewards)) / (_deviation(rewards) + SMALLEST_DEVIATION)
    else:
        advantages = groups - totals / np.maximum(counts, 1)
        if scale == "group":
            deviations = np.array([[_deviation(group)] for group in groups])
            advantages = advantages / (deviations + SMALLEST_DEVIATION)
        elif scale == "batch":
            advantages = advantages / (_deviation(rewards) + SMALLEST_DEVIATION)
    return np.asarray(np.nan_to_num(advantages.ravel(), nan=0.0), np.float64)


def _mean(values: Floats) -> float:
    """Computes the mean of the values that are not nan; 0 if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0


def _deviation(values: Floats) -> float:
    """Computes the sample standard deviation (n - 1) of the values that are not nan.

    It is exactly 0 if they are equal, and for fewer than two.

    >>> _deviation(np.full(3, 0.1)), _deviation(np.array([1.0, 3.0, np.nan])).__round__(3)
    (0.0, 1.414)
    """
    known = values[~np.isnan(values)]
    # By rounding, the mean of equal numbers may differ from them, and the deviation from 0.
    if len(known) < 2 or (known == known[0]).all():
        return 0.0
    return float(known.std(ddof=1))


def find_advantages(rollout: Rollout, recipe: Recipe) -> Floats:
    """Computes the completions' advantages under the recipe's loss: fp64[completions]."""
    baseline = POLICY_LOSSES[recipe.method.loss_type].baseline
    return compute_advantages(
        rollout.rewards, rollout.generations, baseline, recipe.rollout.scale_rewards
    )
