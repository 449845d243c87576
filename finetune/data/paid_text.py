"""The text that a reward model or a judge reads to score a completion.

A reward model reads it by its own chat template, a judge as its prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.judge import fill_prompt
from finetune.config.reward_names import name_of_reward
from finetune.config.schema import Data, Model, Recipe
from finetune.data.formats import Completion
from finetune.data.messages import BadRow, Message
from finetune.data.render import render_scored
from finetune.data.tokenizer import Renderer, apply_template, load_tokenizer, make_renderer
from finetune.errors import UserError

TextOrMessages = str | Sequence[Message]  # the form of a prompt or a completion


@dataclass(frozen=True, slots=True)
class RewardText:
    """Renders and encodes conversations for a reward model, as `method: reward` does.

    The tokenizer and the chat template are the reward model's own.
    """

    name: str  # the model's folder, or its name on the hub
    tokenizer: Any
    renderer: Renderer

    def render(self, prompt: TextOrMessages, completion: TextOrMessages) -> str:
        """Renders a prompt and its completion as the text that the reward model reads.

        Both are text, or both are messages. Raises `UserError` if the chat template rejects them.
        """
        try:
            if isinstance(prompt, str):
                return render_scored(Completion(prompt, str(completion)), self.renderer).text
            return apply_template(self.renderer, [*prompt, *completion])
        except BadRow as error:
            raise UserError(f"rewards: {self.name}: {error}") from None

    def encode(self, prompt: TextOrMessages, completion: TextOrMessages) -> list[int]:
        """Returns the token ids of the text that `render` makes. Raises the same `UserError`."""
        text = self.render(prompt, completion)
        # A chat template writes its own BOS; plain text gets the tokenizer's.
        is_plain = isinstance(prompt, str)
        return list(self.tokenizer(text, add_special_tokens=is_plain, verbose=False).input_ids)


def read_reward_texts(recipe: Recipe) -> list[RewardText]:
    """Loads the tokenizer of each of the recipe's reward models, in their order.

    Raises `UserError` for a model without a tokenizer.
    """
    texts = []
    for name in recipe.rollout.reward_models:
        tokenizer = load_tokenizer(keys_of_reward(name, recipe), Data())
        renderer = make_renderer(tokenizer, False, recipe.data.chat_template_date)
        texts.append(RewardText(name, tokenizer, renderer))
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
        yield name_of_reward(text.name), text.render(prompt, completion)
    for judge in recipe.rollout.judges:
        values = dict.fromkeys(judge.places, "")
        values |= {name: str(value) for name, value in columns.items()}
        yield judge.title, fill_prompt(judge, prompt, completion, values)
