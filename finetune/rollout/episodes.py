"""The episodes of a step's completions on the main rank: environments are reset before sampling,
and their rewards are read after it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.config.schema import Recipe
from finetune.constants import Record
from finetune.data.environments import Environments, choose_environment
from finetune.data.messages import BadRow
from finetune.data.tokenize import encode_prompt
from finetune.data.tokenizer import make_encoder, make_renderer_of
from finetune.errors import UserError
from finetune.rollout.engine import Request
from finetune.rollout.rewards import Rewards

Row = dict[str, Any]  # as rewards read it


@dataclass(frozen=True, slots=True)
class EndedEpisodes:
    """The results of the environments of some completions: every list is [completions]."""

    # by the metric's name of an environment's own reward; None: the completion had another one
    rewards: dict[str, list[float | None]]
    states: list[str | None]  # as `freeze` returns them; None: not asked for, or lost
    lost: list[bool]  # the environment failed, or the prompt was too long


@dataclass(frozen=True, slots=True)
class Episodes:
    """The environments of the completions of some prompts, one each."""

    recipe: Recipe
    tokenizer: Any
    rewards: Rewards
    first_place: int  # what `Rewards.reserve_places` returned
    rows: list[Row]  # [completions]; `begin` appends what `reset` says to their prompts
    overlong: set[int] = field(default_factory=set)  # completions whose prompt became too long

    def begin(self, requests: Sequence[Request]) -> list[list[int]]:
        """Resets all environments; returns the prompt's token ids for each completion.

        The completions of one prompt have the same seed: their environments begin alike.

        Raises:
            UserError: An environment fails, or its prompt is too long, while `on_bad_reward` is
                error.
        """
        items = []
        for place, request in enumerate(requests):
            items.append(self._describe_reset(place, request))
        renderer = make_renderer_of(self.recipe.data, self.tokenizer)
        encoder = make_encoder(self.tokenizer)
        prompts = [list(request.prompt_ids) for request in requests]
        for place, answer in enumerate(self.rewards.ask_environments("reset", items)):
            if answer.get("said") is None:
                continue
            row = _append(self.rows[place], answer["said"])
            try:
                ids = encode_prompt(row, renderer, encoder)
            except BadRow as error:
                raise UserError(f"environment: what reset said: {error}") from None
            if self._has_room(place, len(ids)):
                self.rows[place] = row
                prompts[place] = ids
        return prompts

    def end(self) -> EndedEpisodes:
        """Ends all episodes; returns their rewards and states.

        Raises `UserError` where an environment fails and `on_bad_reward` is error.
        """
        items = [{"place": self.first_place + place} for place in range(len(self.rows))]
        answers = self.rewards.ask_environments("finish", items)
        rewards: dict[str, list[float | None]] = {}
        for name in list_environment_rewards(self._facts):
            rewards[name] = [None] * len(answers)
        states = []
        lost = []
        for place, answer in enumerate(answers):
            is_lost = "problem" in answer or place in self.overlong
            state = None if is_lost else answer["state"]
            lost.append(is_lost)
            states.append(state)
            own_reward = self._facts[self._choose(place)].reward
            if own_reward is not None:
                rewards[own_reward][place] = 0.0 if is_lost else answer["reward"]
        return EndedEpisodes(rewards, states, lost)

    def _describe_reset(self, place: int, request: Request) -> Record:
        """Returns the item that asks for the reset of a completion's environment."""
        chosen = self._choose(place)
        columns = dict(self.rows[place]["columns"])
        if chosen:
            del columns["environment"]  # as TRL
        return {
            "place": self.first_place + place,
            "environment": self.recipe.rollout.environments[chosen],
            "row": {"prompt": self.rows[place]["prompt"], **columns},
            "seed": str(request.seed[:3]),
        }

    def _choose(self, place: int) -> str:
        """Returns the key of `_facts` that the completion's row chooses."""
        return choose_environment(self._facts, self.rows[place]["columns"])

    @property
    def _facts(self) -> Environments:
        facts: Environments = self.tokenizer.environments
        return facts

    def _has_room(self, place: int, tokens: int) -> bool:
        """Returns whether a prompt of `tokens` leaves room for a completion; else marks it."""
        most = self.recipe.data.max_length - self.recipe.rollout.max_completion_length
        if tokens <= most:
            return True
        problem = (
            f"environment: with what reset says the prompt has {tokens} tokens, and "
            f"max_length less max_completion_length is {most}; raise max_length, or let it say less"
        )
        if self.recipe.rollout.on_bad_reward == "error":
            raise UserError(f"{problem}; on_bad_reward: zero counts such completions and continues")
        print(problem, file=sys.stderr)
        self.overlong.add(place)
        return False


def list_environment_rewards(environments: Environments) -> list[str]:
    """Lists the names that metrics give to the environments' own rewards, each once."""
    return list(dict.fromkeys(each.reward for each in environments.values() if each.reward))


def _append(row: Row, said: str) -> Row:
    """Returns the row with `said` at the end of its prompt's last message."""
    *before, last = row["prompt"]
    return {**row, "prompt": [*before, {**last, "content": (last["content"] or "") + said}]}
