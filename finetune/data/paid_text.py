"""The text that a reward model or a judge reads to score a completion.

A reward model reads it by its own chat template, a judge as its prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.judge import fill_prompt
from finetune.config.reward_names import name_of_reward
from finetune.config.schema import Data, Model, Recipe
from finetune.data.formats import Completion, Conversation, Document
from finetune.data.messages import BadRow, Message
from finetune.data.render import RenderedText, render_scored
from finetune.data.tokenize import tokenize
from finetune.data.tokenizer import (
    Encoder,
    Renderer,
    choose_tools,
    load_tokenizer,
    make_encoder,
    make_renderer,
)
from finetune.errors import UserError

TextOrMessages = str | Sequence[Message]  # the form of a prompt or a completion


@dataclass(frozen=True, slots=True)
class RewardText:
    """Renders and encodes conversations for a reward model, as `method: reward` does.

    The encoder and the chat template are the reward model's own.
    """

    name: str  # the model's folder, or its name on the hub
    encoder: Encoder
    renderer: Renderer

    def render(self, row: Mapping[str, Any], completion: TextOrMessages) -> str:
        """Renders a row's prompt and its completion as the text that the reward model reads.

        Args:
            row: The row as reward functions get it. Its `variables` and the tools of its prompt are
                rendered too.
            completion: Text if the prompt is text, else messages.

        Raises:
            UserError: The chat template rejects them.
        """
        return self._render(row, completion).text

    def encode(self, row: Mapping[str, Any], completion: TextOrMessages) -> list[int]:
        """Returns the token ids of the text that `render` makes. Raises the same `UserError`."""
        ids: list[int] = tokenize(
            [self._render(row, completion)], [(0, 0)], self.encoder
        ).input_ids.tolist()
        return ids

    def _render(self, row: Mapping[str, Any], completion: TextOrMessages) -> RenderedText:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            document: Document = Completion(prompt, str(completion))
        else:
            messages = (*prompt, *completion)
            document = Conversation(
                messages,
                trained=(False,) * len(messages),
                tools=choose_tools(self.renderer, row),
                variables=row.get("variables") or {},
            )
        try:
            return render_scored(document, self.renderer)
        except BadRow as error:
            raise UserError(f"rewards: {self.name}: {error}") from None


def read_reward_texts(recipe: Recipe) -> list[RewardText]:
    """Loads the tokenizer of each of the recipe's reward models, in their order.

    Raises `UserError` for a model without a tokenizer.
    """
    texts = []
    for name in recipe.rollout.reward_models:
        keys = keys_of_reward(name, recipe)
        rollout = recipe.rollout
        tokenizer = load_tokenizer(keys, Data(), rollout.tools, rollout.environments)
        renderer = make_renderer(tokenizer, False, recipe.data.chat_template_date)
        texts.append(RewardText(name, make_encoder(tokenizer), renderer))
    return texts


def keys_of_reward(name: str, recipe: Recipe) -> Model:
    """Makes the keys by which a reward model is loaded.

    `name`: the model's folder, or its name on the hub. `trust_remote_code` is the recipe's.
    """
    return Model(model_name_or_path=name, trust_remote_code=recipe.model.trust_remote_code)


def show_rewarded(
    row: Mapping[str, Any], texts: Sequence[RewardText], recipe: Recipe
) -> Iterator[tuple[str, str]]:
    """Yields (name in metrics, text to read) for each reward model, then for each judge.

    The text has the row's own answer as the completion, or "..." if the row has no answer.

    Args:
        row: What `Examples.read_row` returns.
        texts: One for each reward model.
        recipe: The run's, which has the judges.

    Raises:
        UserError: A chat template rejects the row.
    """
    prompt = row["prompt"]
    columns = row["columns"]
    answer = str(columns.get("answer", "..."))
    completion: TextOrMessages = answer
    if not isinstance(prompt, str):
        completion = [{"role": "assistant", "content": answer}]
    for text in texts:
        yield name_of_reward(text.name), text.render(row, completion)
    for judge in recipe.rollout.judges:
        values = dict.fromkeys(judge.places, "")
        values |= {name: str(value) for name, value in columns.items()}
        yield judge.title, fill_prompt(judge, prompt, completion, values)
