"""The engines that sample completions, as protocols, and the completions: requests, tokens,
log-probabilities, rewards, advantages.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from finetune.config.methods import POLICY_LOSSES
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.images import EncodedImage

Floats = NDArray[np.float64]


class Ended(Enum):
    """Why a completion ended."""

    STOPPED = "stopped"  # its last token ends the turn
    CUT = "cut"  # it has max_completion_length tokens
    ABORTED = "aborted"  # the weights changed before its end


class Request(NamedTuple):
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    # The seed of its random numbers, which do not depend on the requests beside it: the run's seed,
    # the step, the prompt's place in the step, the completion's number, and that of its part.
    seed: tuple[int, ...]
    max_tokens: int | None = None  # where it is less than that of the `Sampling`
    images: tuple[EncodedImage, ...] = ()  # the prompt's

    def draw_uniforms(self, tokens: int) -> Floats:
        """Draws a number in [0, 1) for each token: float64[tokens]."""
        entropy = np.random.SeedSequence([*self.seed, *b"rollout"])
        return np.random.Generator(np.random.Philox(entropy)).random(tokens)

    def draw_seed(self) -> int:
        """Draws an int64 seed for a server that draws its own numbers."""
        return int(
            np.random.SeedSequence([*self.seed, *b"rollout"]).generate_state(1, np.uint64)[0] >> 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn: always from the whole vocabulary, which is what is trained."""

    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False

    def limit(self, request: Request) -> int:
        """The most tokens that a completion may have."""
        return request.max_tokens or self.max_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion. It may have several sampled turns with the answers of tools between them."""

    token_ids: list[int]
    # of each sampled token, under the distribution from which it was sampled
    log_probabilities: list[float]
    entropy: float  # nats, summed over the sampled tokens
    ended: Ended
    tool_mask: list[int] = field(default_factory=list)  # 1 sampled, 0 a tool's; empty: all sampled
    calls: int = 0  # calls of tools
    failed_calls: int = 0  # calls that an error answered
    # For each sampled token the step whose weights sampled it; empty: those of the step itself.
    versions: list[int] = field(default_factory=list)
    cuts: int = 0  # how often a change of weights or the end of a run interrupted it
    dropped: int = 0  # tokens that were sampled before an interruption and are not part of it
    # int16[tokens of prompt and completion, layers, chosen]: the experts of each token, -1 for the
    # last, which the model has not read; None where the recipe does not replay them
    experts: NDArray[np.int16] | None = field(default=None, compare=False)

    def labels(self, *, is_learned: bool) -> list[int]:
        """The labels: sampled tokens, IGNORE_INDEX for a tool's; none unless it `is_learned`."""
        if not is_learned:
            return [IGNORE_INDEX] * len(self.token_ids)
        mask = self.tool_mask or [1] * len(self.token_ids)
        return [
            token if is_sampled else IGNORE_INDEX
            for token, is_sampled in zip(self.token_ids, mask, strict=True)
        ]

    def last_turn(self) -> list[int]:
        """The tokens sampled after the last answer of a tool."""
        return self.token_ids[max(np.flatnonzero(np.array(self.tool_mask) == 0), default=-1) + 1 :]

    def extend(self, given: list[int], more: "Sampled") -> "Sampled":
        """Appends tokens `given` to the model, such as a tool's answer, and the turn after them."""
        mask = self.tool_mask or [1] * len(self.token_ids)
        return replace(
            self,
            token_ids=self.token_ids + given + more.token_ids,
            log_probabilities=self.log_probabilities + more.log_probabilities,
            entropy=self.entropy + more.entropy,
            ended=more.ended,
            tool_mask=mask + [0] * len(given) + [1] * len(more.token_ids),
            versions=self.versions + more.versions,
            cuts=self.cuts + more.cuts,
            dropped=self.dropped + more.dropped,
        )

    def join(self, more: "Sampled") -> "Sampled":
        """Appends what was sampled after an interruption."""
        return replace(
            self,
            token_ids=self.token_ids + more.token_ids,
            log_probabilities=self.log_probabilities + more.log_probabilities,
            entropy=self.entropy + more.entropy,
            ended=more.ended,
            versions=self.versions + more.versions,
        )

    def as_json(self) -> dict[str, Any]:
        """The completion as values of JSON, for `of_json`."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values |= {"ended": self.ended.value}
        del values["experts"]
        if self.experts is not None:
            values["experts"] = _write_experts(self.experts)
        return values

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `as_json` returned."""
        read: dict[str, Any] = {**values, "ended": Ended(values["ended"])}
        if read.get("experts") is not None:
            read["experts"] = _read_experts(read["experts"])
        return cls(**read)


def _write_experts(experts: NDArray[np.int16]) -> dict[str, Any]:
    data = base64.b64encode(experts.astype("<i2").tobytes()).decode()
    return {"shape": list(experts.shape), "int16": data}


def _read_experts(written: Mapping[str, Any]) -> NDArray[np.int16]:
    data = np.frombuffer(base64.b64decode(written["int16"]), "<i2")
    return data.reshape(written["shape"]).astype(np.int16)


class Engine(Protocol):
    """Samples completions from the weights in training, as they are now."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Samples a completion for each request, in order.

        All ranks call it, each with its own requests.
        """

    def forget(self) -> None:
        """Drops records from before the last checkpoint, which no resumed run needs any more.

        The main rank calls it.
        """


Converse = Callable[[Callable[[Sequence[Request]], list[Sampled]]], list[Sampled]]
"""Samples completions in several turns. Its argument is a function that samples for requests."""


class ServedEngine(Engine, Protocol):
    """An engine with a server that gets copies of the weights and samples while the model trains.

    prompts_step: The step whose prompts the completions continue.
    """

    hand_over_seconds: float  # how long the last hand-over took
    version: int  # the number of optimizer steps after which the current weights were taken

    def hand_over(self) -> None:
        """Gives the server the current weights, unless it has them. All ranks call it."""

    def submit(self, prompts_step: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begins to sample completions of `requests` from the weights handed over."""

    def converse(self, prompts_step: int, converse: Converse, sampling: Sampling) -> None:
        """Begins to sample completions by `converse`, in a thread of the main rank."""

    def is_in_flight(self, prompts_step: int) -> bool:
        """Whether completions of that step have been begun."""

    def take(self, prompts_step: int) -> list[Sampled]:
        """Waits for the completions of that step; returns them on every rank. All ranks call it."""

    def describe_lines(self) -> Iterator[dict[str, Any]]:
        """Yields a line of JSON for each completion that was begun, on the main rank."""

    def recall(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes completions from a checkpoint's lines, so that they are not sampled again."""


SMALLEST_DEVIATION = 1e-4  # added to a standard deviation before a division by it, as in TRL
# the fields of a rollout that are one number
OF_ALL = ("failures", "generations", "sampled_groups", "flat_groups")
OF_TOKENS = ("old", "reference", "values")  # the fields with a number for each trained token


@dataclass(frozen=True, slots=True)
class Rollout:
    """The completions of some prompts: `generations` of the first prompt, then of the next one.

    A group is the completions of one prompt.
    """

    example_ids: NDArray[np.int64]  # [completions]: the prompts' places in the data set
    prompts: list[list[int]]  # [completions][tokens]
    sampled: list[Sampled]
    scores: Floats  # [completions, reward functions]; nan: no score
    rewards: Floats  # [completions]: the weighted sum of the scores; nan: no score
    failures: int  # completions of which a score failed: a function, an environment or a model
    generations: int
    sampled_groups: int  # with the groups that were dropped
    flat_groups: int  # sampled groups whose rewards are all equal
    hand_over_seconds: float = 0.0  # how long the server's last hand-over of weights took
    # [completions][trained tokens], from before the first update on them; empty where the loss
    # needs none: log-probabilities in training and of the reference, and the critic's values.
    old: list[list[float]] = field(default_factory=list)
    reference: list[list[float]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)

    @property
    def of_tokens(self) -> dict[str, list[list[float]]]:
        """The fields of `OF_TOKENS` by name."""
        return {name: getattr(self, name) for name in OF_TOKENS}

    def select(self, groups: NDArray[np.int64]) -> "Rollout":
        """The rollout of the groups at these places."""
        kept = (groups[:, None] * self.generations + np.arange(self.generations)).ravel()
        return replace(
            self,
            example_ids=self.example_ids[kept],
            prompts=[self.prompts[i] for i in kept],
            sampled=[self.sampled[i] for i in kept],
            scores=self.scores[kept],
            rewards=self.rewards[kept],
        )

    def join(self, more: "Rollout") -> "Rollout":
        """Appends the groups of `more`."""
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
        """The standard deviation of each group's rewards: [groups]."""
        return np.array([_deviation(group) for group in self.rewards.reshape(-1, self.generations)])

    def describe_lines(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields a line for each completion.

        `finetune inspect` reads it as a row with a prompt and a completion, `of_lines` as part of
        the rollout.
        """
        of_all = {name: getattr(self, name) for name in OF_ALL}
        for i, each in enumerate(self.sampled):
            of_tokens = {
                name: values[i] if values else None for name, values in self.of_tokens.items()
            }
            yield {
                "prompt": tokenizer.decode(self.prompts[i]),
                "completion": tokenizer.decode(each.token_ids),
                "example_id": int(self.example_ids[i]),
                "prompt_ids": self.prompts[i],
                "sampled": each.as_json(),
                "scores": [_none_for_nan(score) for score in self.scores[i].tolist()],
                "reward": _none_for_nan(float(self.rewards[i])),
                **of_tokens,
                **of_all,
            }

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]]) -> Self:
        """Makes the rollout from the lines of `describe_lines`."""
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


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def compute_advantages(rewards: Floats, generations: int, baseline: str, scale: str) -> Floats:
    """Computes by how much each reward is above its baseline; 0 where there is no reward.

    Args:
        rewards: [completions], group after group; nan where there is none.
        generations: The completions of a group.
        baseline: The loss's `PolicyLoss.baseline`.
        scale: The recipe's `scale_rewards`.

    Returns:
        [completions].
    """
    groups = rewards.reshape(-1, generations)
    known = ~np.isnan(groups)
    number = known.sum(1, keepdims=True)
    total = np.nansum(groups, 1, keepdims=True)
    if baseline == "others":
        others = (total - groups) / np.maximum(number - 1, 1)
        # A reward without others has nothing to be compared with.
        advantages = np.where(number > 1, groups - others, 0.0 * groups)
    elif baseline == "step":
        advantages = (groups - _mean(rewards)) / (_deviation(rewards) + SMALLEST_DEVIATION)
    else:
        advantages = groups - total / np.maximum(number, 1)
        if scale == "group":
            deviations = np.array([[_deviation(group)] for group in groups])
            advantages = advantages / (deviations + SMALLEST_DEVIATION)
        elif scale == "batch":
            advantages = advantages / (_deviation(rewards) + SMALLEST_DEVIATION)
    return np.asarray(np.nan_to_num(advantages.ravel(), nan=0.0), np.float64)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0


def _deviation(values: Floats) -> float:
    """The standard deviation of a sample, with n - 1 as divisor; nan is left out.

    >>> _deviation(np.full(3, 0.1)), _deviation(np.array([1.0, 3.0, np.nan])).__round__(3)
    (0.0, 1.414)
    """
    known = values[~np.isnan(values)]
    # By rounding, the mean of equal numbers may differ from them.
    if len(known) < 2 or (known == known[0]).all():
        return 0.0
    return float(known.std(ddof=1))


def find_advantages(rollout: Rollout, recipe: Recipe) -> Floats:
    """The completions' advantages under the recipe's loss: [completions]."""
    baseline = POLICY_LOSSES[recipe.method.loss_type].baseline
    return compute_advantages(
        rollout.rewards, rollout.generations, baseline, recipe.rollout.scale_rewards
    )
