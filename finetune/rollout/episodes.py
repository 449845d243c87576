"""The episodes of completions, on the main rank: environments are reset before sampling, and their
rewards and states are read after it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.schema import Recipe
from finetune.data.environments import Environments, choose_environment
from finetune.data.messages import BadRow
from finetune.data.tokenize import encode_prompt
from finetune.data.tokenizer import make_encoder, make_renderer_of
from finetune.errors import UserError
from finetune.rollout.engine import Request
from finetune.rollout.rewards import Rewards

Row = dict[str, Any]  # a data row with its `prompt` and `columns`, as rewards read it


@dataclass(frozen=True, slots=True)
class EndedEpisodes:
    """The results of the environments of some completions. Every list but `lost` is
    [completions].
    """

    # The rewards of each environment, by their name in metrics; None: the completion had another
    # environment.
    rewards: dict[str, list[float | None]]
    states: list[str | None]  # as `freeze` returns them; None: no function reads them, or lost
    # the places of those whose environment failed, or whose prompt became too long
    lost: list[int]


@dataclass(frozen=True, slots=True)
class Episodes:
    """The environments of some completions, one for each."""

    recipe: Recipe
    tokenizer: Any
    rewards: Rewards  # its process runs the environments
    first_place: int  # of the completions' environments, from `Rewards.take_places`
    rows: list[Row]  # [completions]; `begin` appends the text that `reset` returns to the prompts

    def begin(self, requests: Sequence[Request]) -> list[list[int]]:
        """Resets all environments, and appends the texts that they return to the prompts.

        Returns the token ids of each completion's prompt. The environments of one prompt's
        completions get the same seed, so that they begin alike. An environment whose text is too
        long is lost: its prompt stays as it was.

        Raises:
            UserError: The text of a reset cannot be rendered; or an environment fails, or its
                prompt is too long, and `on_bad_reward` is error.
        """
        items = []
        for place, request in enumerate(requests):
            items.append(self._describe_reset(place, request))
        renderer = make_renderer_of(self.recipe.data, self.tokenizer)
        encoder = make_encoder(self.tokenizer)
        prompts = [list(request.prompt_ids) for request in requests]
        overlong = []
        for place, answer in enumerate(self.rewards.ask_environments("reset", items)):
            if answer.get("said") is None:  # a failure, or `reset` returned no text
                continue
            row = _append(self.rows[place], answer["said"])
            try:
                ids = encode_prompt(row, renderer, encoder)
            except BadRow as error:
                raise UserError(f"environment: what reset said: {error}") from None
            if self._accept_length(len(ids)):
                self.rows[place] = row
                prompts[place] = ids
            else:
                overlong.append({"place": self.first_place + place})
        if overlong:  # ended, so that their calls and `end` find them lost
            self.rewards.ask_environments("finish", overlong)
        return prompts

    def end(self) -> EndedEpisodes:
        """Ends all episodes; returns their rewards and states. A lost environment's reward is 0.

        Raises `UserError` if an environment fails and `on_bad_reward` is error.
        """
        items = [{"place": self.first_place + place} for place in range(len(self.rows))]
        answers = self.rewards.ask_environments("finish", items)
        rewards: dict[str, list[float | None]] = {}
        for name in list_environment_rewards(self._facts):
            rewards[name] = [None] * len(answers)
        states = []
        lost = []
        for place, answer in enumerate(answers):
            if "problem" in answer:
                lost.append(place)
            states.append(answer.get("state"))
            reward_name = self._facts[self._choose(place)].reward
            if reward_name is not None:
                rewards[reward_name][place] = answer.get("reward", 0.0)
        return EndedEpisodes(rewards, states, lost)

    def _describe_reset(self, place: int, request: Request) -> dict[str, Any]:
        """Makes the item that asks for the reset of a completion's environment."""
        environment_key = self._choose(place)
        columns = dict(self.rows[place]["columns"])
        # The only environment of a run has an empty key. Else the row's column has chosen it, and
        # TRL does not pass this column on.
        if environment_key:
            del columns["environment"]
        return {
            "place": self.first_place + place,
            "environment": self.recipe.rollout.environments[environment_key],
            "row": {"prompt": self.rows[place]["prompt"], **columns},
            "seed": str(request.prompt_seed),  # completions of one prompt begin alike
        }

    def _choose(self, place: int) -> str:
        """Returns the key of the environment that the completion's row chooses, as in `_facts`."""
        return choose_environment(self._facts, self.rows[place]["columns"])

    @property
    def _facts(self) -> Environments:
        """Facts about the recipe's environments, by key; `load_tokenizer` keeps them."""
        facts: Environments = self.tokenizer.environments
        return facts

    def _accept_length(self, tokens: int) -> bool:
        """Returns whether a prompt of `tokens` tokens leaves room for a completion.

        If not, it prints the problem; or it raises `UserError` if `on_bad_reward` is error.
        """
        most_tokens = self.recipe.data.max_length - self.recipe.rollout.max_completion_length
        if tokens <= most_tokens:
            return True
        problem = (
            f"environment: with what reset says the prompt has {tokens} tokens, and max_length "
            f"less max_completion_length is {most_tokens}; raise max_length, or let it say less"
        )
        if self.recipe.rollout.on_bad_reward == "error":
            raise UserError(f"{problem}; on_bad_reward: zero counts such completions and continues")
        print(problem, file=sys.stderr)
        return False


def list_environment_rewards(environments: Environments) -> list[str]:
    """Lists the names that metrics give to the environments' own rewards, without repetitions."""
    return list(dict.fromkeys(each.reward for each in environments.values() if each.reward))


def _append(row: Row, text: str) -> Row:
    """Returns a copy of the row with `text` at the end of the prompt's last message."""
    *messages, last = row["prompt"]
    return {**row, "prompt": [*messages, {**last, "content": (last["content"] or "") + text}]}
