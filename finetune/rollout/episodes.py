"""The environments of a step's completions, as the main rank sees them: what they say first, and
what they pay.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.config.schema import Recipe
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
    """What the environments of some completions leave; each list has an entry for each of them."""

    rewards: dict[str, list[float | None]]  # by the name of an environment's own reward
    states: list[str | None]  # for reward functions that read them; None: it was lost
    lost: list[bool]


@dataclass(frozen=True, slots=True)
class Episodes:
    """The environments of the completions of some prompts, one each."""

    recipe: Recipe
    tokenizer: Any
    rewards: Rewards
    first_place: int  # of `Rewards.reserve_places`
    rows: list[Row]  # [completions]; `begin` adds to their prompts what is said first
    overlong: set[int] = field(default_factory=set)  # completions whose prompt has no room for that

    def begin(self, requests: Sequence[Request]) -> list[list[int]]:
        """Resets all environments; returns the prompt ids of each completion.

        Completions of a prompt draw the same numbers, so that their environments begin alike.
        Raises `UserError` for one that does something wrong, and `on_bad_reward` is error.
        """
        names = self.recipe.rollout.environments
        items = []
        for place, (row, request) in enumerate(zip(self.rows, requests, strict=True)):
            columns = dict(row["columns"])
            chosen = choose_environment(self._facts, columns)
            if chosen:
                del columns["environment"]  # as TRL
            given = {"prompt": row["prompt"], **columns}
            seed = str(request.seed[:3])
            at = self.first_place + place
            items.append({"place": at, "environment": names[chosen], "row": given, "seed": seed})
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
        """Ends the episodes; returns their environments' rewards.

        Raises `UserError` as `begin` does.
        """
        items = [{"place": self.first_place + place} for place in range(len(self.rows))]
        answers = self.rewards.ask_environments("finish", items)
        lost = ["problem" in each or i in self.overlong for i, each in enumerate(answers)]
        rewards: dict[str, list[float | None]] = {}
        for name in list_own_rewards(self._facts):
            rewards[name] = [None] * len(answers)
        for place, answer in enumerate(answers):
            facts = self._facts[choose_environment(self._facts, self.rows[place]["columns"])]
            if facts.reward is not None:
                rewards[facts.reward][place] = 0.0 if lost[place] else answer["reward"]
        states = []
        for answer, is_lost in zip(answers, lost, strict=True):
            states.append(None if is_lost else answer["state"])
        return EndedEpisodes(rewards, states, lost)

    @property
    def _facts(self) -> Environments:
        facts: Environments = self.tokenizer.environments
        return facts

    def _has_room(self, place: int, tokens: int) -> bool:
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


def list_own_rewards(environments: Environments) -> list[str]:
    """Lists the metrics' names of the rewards that environments give themselves, each once."""
    return list(dict.fromkeys(each.reward for each in environments.values() if each.reward))


def _append(row: Row, said: str) -> Row:
    """The row with what an environment says first at the end of its prompt's last message."""
    *before, last = row["prompt"]
    return {**row, "prompt": [*before, {**last, "content": (last["content"] or "") + said}]}
