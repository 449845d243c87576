"""The keys of one entry of `datasets`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from finetune.recipe.markers import FileOrName, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """One entry of `datasets` or `eval_datasets`."""

    path: Annotated[str, FileOrName, "A file, glob, folder or hub name."]
    name: Annotated[str | None, "The hub data set's configuration."] = None
    split: Annotated[str, "Which split, slices such as train[:5%] included."] = "train"
    type: Annotated[
        Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"] | None,
        "The rows' format; null: recognized from the columns.",
    ] = None
    weight: Annotated[
        float,
        Gt(0),
        "How often the rows of this source are read in an epoch: 0.5 reads half of them, 2 reads each twice.",
    ] = 1.0
    max_samples: Annotated[
        Positive | None,
        "Read this many of the rows, drawn by the seed; null: all. Of a stream the first ones, since to draw them it would "
        "have to be read to its end.",
    ] = None
    messages_column: Annotated[str | None, "The column that holds the messages, where it is not named as usual."] = None
    prompt_column: Annotated[str | None, "The column that holds the prompt or question."] = None
    completion_column: Annotated[str | None, "The column that holds the completion or answer."] = None
    text_column: Annotated[str | None, "The column that holds plain text."] = None
    alpaca_prompt: Annotated[
        bool,
        "Write the question of an alpaca row in the wording of Alpaca's authors (Below is an instruction ...), inside the "
        "user's turn; chat_template: alpaca writes that wording without turns.",
    ] = False
