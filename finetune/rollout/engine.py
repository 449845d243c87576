"""What samples completions, and what they are: tokens, log-probabilities and the reason of the
end.
"""

import base64
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


class Ended(Enum):
    """Why a completion ended."""

    STOPPED = "stopped"  # at a token that ends a turn, which is its last
    CUT = "cut"  # at max_completion_length
    ABORTED = "aborted"  # by a change of weights, in the middle of a completion


class Request(NamedTuple):
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    # of its random numbers, whatever else is sampled beside it: the run's seed, the step, the place
    # of the prompt in it, which completion of the prompt, and numbers of its parts
    seed: tuple[int, ...]
    max_tokens: int | None = None  # fewer than those of the `Sampling`
    images: tuple[EncodedImage, ...] = ()  # of the prompt

    def draw_uniforms(self, tokens: int) -> NDArray[np.float64]:
        """float64[tokens]: a number in [0, 1) for each token."""
        entropy = np.random.SeedSequence([*self.seed, *b"rollout"])
        return np.random.Generator(np.random.Philox(entropy)).random(tokens)

    def draw_seed(self) -> int:
        """A seed in int64, for a server that draws its own numbers."""
        return int(
            np.random.SeedSequence([*self.seed, *b"rollout"]).generate_state(1, np.uint64)[0] >> 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen: from all of the vocabulary, whose distribution is the one
    trained.
    """

    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False

    def limit(self, request: Request) -> int:
        """The most tokens that a completion may have."""
        return request.max_tokens or self.max_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion; where tools have answered, with what they said between the turns that were
    sampled.
    """

    token_ids: list[int]
    # of each sampled token, under the distribution that it was sampled from
    log_probabilities: list[float]
    entropy: float  # nats, of those distributions, summed
    ended: Ended
    # of each token: 1 sampled, 0 of a tool; empty: all sampled
    tool_mask: list[int] = field(default_factory=list)
    calls: int = 0  # of tools
    failed_calls: int = 0  # that got an error
    # Of each sampled token, after how many optimizer steps the weights that sampled it were taken;
    # empty: they are those of the step.
    versions: list[int] = field(default_factory=list)
    cuts: int = 0  # how often a change of weights, or the end of a run, has cut it
    dropped: int = 0  # tokens that were sampled, then cut, and are not part of it
    # int16[prompt and completion, layers, chosen]: the experts of each token that was read, -1 of
    # the last; None: they are not replayed
    experts: NDArray[np.int16] | None = field(default=None, compare=False)

    def labels(self, *, is_learned: bool) -> list[int]:
        """The tokens that are trained on: those that were sampled; none of a completion that is not
        learned from.
        """
        if is_learned:
            mask = self.tool_mask or [1] * len(self.token_ids)
        else:
            mask = [0] * len(self.token_ids)
        return [
            token if by else IGNORE_INDEX for token, by in zip(self.token_ids, mask, strict=True)
        ]

    def last_turn(self) -> list[int]:
        """The tokens that were sampled last, after what tools have answered."""
        return self.token_ids[max(np.flatnonzero(np.array(self.tool_mask) == 0), default=-1) + 1 :]

    def extend(self, given: list[int], more: "Sampled") -> "Sampled":
        """It, then the tokens `given` to the model, and what it has sampled after them."""
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
        """It, and what was sampled on after it was cut."""
        return replace(
            self,
            token_ids=self.token_ids + more.token_ids,
            log_probabilities=self.log_probabilities + more.log_probabilities,
            entropy=self.entropy + more.entropy,
            ended=more.ended,
            versions=self.versions + more.versions,
        )

    def as_json(self) -> dict[str, Any]:
        """The values that `of_json` reads."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values |= {"ended": self.ended.value}
        del values["experts"]
        if self.experts is not None:
            values["experts"] = _write_experts(self.experts)
        return values

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """The completion that `as_json` has described."""
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
    """Samples completions from the weights that are trained, as they are now."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """A completion of each request, in order.

        All ranks call it, each with requests of its own.
        """

    def forget(self) -> None:
        """Drops what only a run that resumes from before the last checkpoint would need.

        The main rank calls it.
        """


Converse = Callable[[Callable[[Sequence[Request]], list[Sampled]]], list[Sampled]]
"""Samples completions in several turns by the function that it is given, which answers requests."""


class ServedEngine(Engine, Protocol):
    """An engine that hands its weights over, and can sample from them while the model trains."""

    hand_over_seconds: float  # that this took the last time
    version: int  # the optimizer steps after which the weights are as they are now

    def hand_over(self) -> None:
        """Gives the sampler the weights as they are now, unless it has them. All ranks call it."""

    def submit(self, prompts_step: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begins to sample completions of the prompts of `prompts_step` from these weights."""

    def converse(self, prompts_step: int, converse: Converse, sampling: Sampling) -> None:
        """Begins to sample them by `converse`, in a thread of the main rank."""

    def is_in_flight(self, prompts_step: int) -> bool:
        """Whether completions of the prompts of `prompts_step` have been begun."""

    def take(self, prompts_step: int) -> list[Sampled]:
        """Waits for those completions and returns them on every rank. All ranks call it."""

    def describe_lines(self) -> Iterator[dict[str, Any]]:
        """A line of JSON for each completion that was begun, on the main rank."""

    def recall(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes those lines of a checkpoint back: what was there is not sampled again."""


SMALLEST_DEVIATION = 1e-4  # added to a standard deviation that is divided by, as in TRL
# what is one number of a rollout
OF_ALL = ("failures", "generations", "sampled_groups", "flat_groups")
OF_TOKENS = ("old", "reference", "values")  # what is a number of each trained token


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completions of some prompts, `generations` of each, one after another."""

    example_ids: NDArray[np.int64]  # [completions]: the prompts'
    prompts: list[list[int]]  # [completions]
    sampled: list[Sampled]
    scores: NDArray[np.float64]  # [completions, functions]; nan: the function says nothing of it
    # [completions]: the weighted sum; nan where no function says anything
    rewards: NDArray[np.float64]
    failures: int
    generations: int
    sampled_groups: int  # also those that were dropped
    flat_groups: int  # of those, without a difference between their rewards
    hand_over_seconds: float = 0.0  # in which a server got the weights, the last time before
    # Of the trained tokens, before the first update on them; empty where the loss needs none: their
    # log-probabilities in training, and of the reference, and the critic's values.
    old: list[list[float]] = field(default_factory=list)
    reference: list[list[float]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)

    @property
    def of_tokens(self) -> dict[str, list[list[float]]]:
        """The values of each token by the names of `OF_TOKENS`, [completions][trained tokens] each,
        or empty.
        """
        return {name: getattr(self, name) for name in OF_TOKENS}

    def select(self, groups: NDArray[np.int64]) -> "Rollout":
        """The rollout of some of the prompts, by their places."""
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
        """Both, one after the other."""
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

    def deviations(self) -> NDArray[np.float64]:
        """[prompts]: of the rewards of each prompt's completions."""
        return np.array([_deviation(group) for group in self.rewards.reshape(-1, self.generations)])

    def describe_lines(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """A line for each completion, which `finetune inspect` reads as a row with a prompt and a
        completion.
        """
        of_all = {name: getattr(self, name) for name in OF_ALL}
        for i, each in enumerate(self.sampled):
            yield {
                "prompt": tokenizer.decode(self.prompts[i]),
                "completion": tokenizer.decode(each.token_ids),
                "example_id": int(self.example_ids[i]),
                "prompt_ids": self.prompts[i],
                "sampled": each.as_json(),
                "scores": [None if np.isnan(score) else score for score in self.scores[i].tolist()],
                "reward": None if np.isnan(self.rewards[i]) else float(self.rewards[i]),
                **{
                    name: of_tokens[i] if of_tokens else None
                    for name, of_tokens in self.of_tokens.items()
                },
                **of_all,
            }

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]]) -> Self:
        """The rollout that `describe_lines` has described."""
        of_tokens: dict[str, Any] = {
            name: [line[name] for line in lines if line.get(name) is not None] for name in OF_TOKENS
        }
        return cls(
            example_ids=np.array([line["example_id"] for line in lines], np.int64),
            prompts=[line["prompt_ids"] for line in lines],
            sampled=[Sampled.of_json(line["sampled"]) for line in lines],
            scores=np.array([line["scores"] for line in lines], np.float64).reshape(len(lines), -1),
            rewards=np.array([line["reward"] for line in lines], np.float64),
            **of_tokens,
            **{name: lines[0][name] for name in OF_ALL},
        )


def compute_advantages(
    rewards: NDArray[np.float64], generations: int, baseline: str, scale: str
) -> NDArray[np.float64]:
    """[completions]: by how much each reward is above its baseline; 0 where there is no reward.

    Args:
        rewards: [completions], those of a prompt one after another; nan: none.
        generations: Completions of each prompt.
        baseline, scale: Of `PolicyLoss`, and the recipe's `scale_rewards`.
    """
    groups = rewards.reshape(-1, generations)
    known = ~np.isnan(groups)
    number = known.sum(1, keepdims=True)
    total = np.nansum(groups, 1, keepdims=True)
    if baseline == "others":
        others = (total - groups) / np.maximum(number - 1, 1)
        # alone, it is compared with nothing
        advantages = np.where(number > 1, groups - others, 0.0 * groups)
    elif baseline == "step":
        advantages = (groups - _mean(rewards)) / (_deviation(rewards) + SMALLEST_DEVIATION)
    else:
        advantages = groups - total / np.maximum(number, 1)
        if scale == "group":
            advantages = advantages / (
                np.array([[_deviation(group)] for group in groups]) + SMALLEST_DEVIATION
            )
        elif scale == "batch":
            advantages = advantages / (_deviation(rewards) + SMALLEST_DEVIATION)
    return np.asarray(np.nan_to_num(advantages.ravel(), nan=0.0), np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0


def _deviation(values: NDArray[np.float64]) -> float:
    """Returns the standard deviation of a sample, with its size less 1 as divisor.

    >>> _deviation(np.full(3, 0.1)), _deviation(np.array([1.0, 3.0, np.nan])).__round__(3)
    (0.0, 1.414)
    """
    known = values[~np.isnan(values)]
    if len(known) < 2 or (known == known[0]).all():  # the mean of equal numbers may be another one
        return 0.0
    return float(known.std(ddof=1))


def find_advantages(rollout: Rollout, recipe: Recipe) -> NDArray[np.float64]:
    """[completions]: their advantages under the recipe's loss."""
    baseline = POLICY_LOSSES[recipe.method.loss_type].baseline
    return compute_advantages(
        rollout.rewards, rollout.generations, baseline, recipe.rollout.scale_rewards
    )
