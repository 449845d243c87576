"""What a reward reads of a completion: the text of a reward model, by its own template, or of a
judge.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.judge import fill_prompt
from finetune.config.reward_names import name_of_reward
from finetune.config.schema import Data, Model, Recipe
from finetune.constants import Fields
from finetune.data.formats import Completion
from finetune.data.messages import BadRow, Message
from finetune.data.render import render_scored
from finetune.data.tokenizer import Renderer, apply_template, load_tokenizer, make_renderer
from finetune.errors import UserError

Said = str | Sequence[Message]  # a prompt or a completion, as text or as messages


@dataclass(frozen=True, slots=True)
class RewardText:
    """How a reward model reads a conversation: by its own tokenizer and chat template, as `method:
    reward` does.
    """

    name: str  # of the folder or on the hub
    tokenizer: Any
    renderer: Renderer

    def render(self, prompt: Said, completion: Said) -> str:
        """Renders a prompt with its completion as the text that the reward model reads.

        Both are text, or both are messages. Raises `UserError` where the chat template rejects
        them.
        """
        try:
            if isinstance(prompt, str):
                return render_scored(Completion(prompt, str(completion)), self.renderer).text
            return apply_template(self.renderer, [*prompt, *completion])
        except BadRow as error:
            raise UserError(f"rewards: {self.name}: {error}") from None

    def encode(self, prompt: Said, completion: Said) -> list[int]:
        """The token ids of that text. Raises `UserError` as `render`."""
        text = self.render(prompt, completion)
        is_plain = isinstance(prompt, str)
        return list(self.tokenizer(text, add_special_tokens=is_plain, verbose=False).input_ids)


def read_reward_texts(recipe: Recipe) -> list[RewardText]:
    """How each reward model of the recipe reads conversations.

    Raises `UserError` for one without a tokenizer.
    """
    texts = []
    for name in recipe.rollout.reward_models:
        tokenizer = load_tokenizer(keys_of_reward(name, recipe), Data())
        texts.append(RewardText(name, tokenizer, make_renderer(tokenizer, assistant_only=False)))
    return texts


def keys_of_reward(name: str, recipe: Recipe) -> Model:
    """Returns the recipe's keys for a model as they are for the reward model `name`."""
    return Model(model_name_or_path=name, trust_remote_code=recipe.model.trust_remote_code)


def show_rewarded(
    row: Fields, texts: Sequence[RewardText], recipe: Recipe
) -> Iterator[tuple[str, str]]:
    """Yields (name in metrics, text to read) for each reward model and judge of the recipe.

    The text shows the row's own answer as the completion, or "..." where the row has no answer.

    Args:
        row: As `Examples.read_row` gives it.
        texts: How the reward models read conversations.
        recipe: With the judges.

    Raises:
        UserError: A chat template rejects the row.
    """
    prompt = row["prompt"]
    columns = row["columns"]
    answer = str(columns.get("answer", "..."))
    completion: Said = answer
    if not isinstance(prompt, str):
        completion = [{"role": "assistant", "content": answer}]
    for text in texts:
        yield name_of_reward(text.name), text.render(prompt, completion)
    for judge in recipe.rollout.judges:
        values = dict.fromkeys(judge.places, "")
        values |= {name: str(value) for name, value in columns.items()}
        yield judge.title, fill_prompt(judge, prompt, completion, values)
