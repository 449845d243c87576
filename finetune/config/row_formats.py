"""The formats of rows by the names that `type` takes: all that is asked about one without reading a row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """What the rest of the package asks about a format."""

    says: str  # what its rows are, in a recipe that `finetune init` writes
    is_chat: bool = False  # a chat template renders its rows
    columns: frozenset[str] = frozenset()  # by which a row of it is recognized, where no other format's are there


TURNS = "conversations; the model's chat template writes their turns"
FORMATS: Mapping[str, FormatFacts] = {
    "messages": FormatFacts(TURNS, is_chat=True),
    "sharegpt": FormatFacts(TURNS, is_chat=True),
    "alpaca": FormatFacts("instructions with their outputs, as turns of the model's chat template", is_chat=True),
    "prompt_completion": FormatFacts("prompts with their completions, joined without a chat template"),
    "text": FormatFacts("plain text, all of it trained on"),
    "tokens": FormatFacts("rows that are tokens already", columns=frozenset({"input_ids"})),
    "squad": FormatFacts(
        "SQuAD's questions, with the first answer of each", columns=frozenset({"context", "question", "answers"})
    ),
    "hellaswag": FormatFacts(
        "HellaSwag's contexts, with the right ending of each", columns=frozenset({"ctx", "endings", "label"})
    ),
}
# These and the names in reports that `type` does not take: see `ParsedRow.rendering`.
RENDERINGS: Mapping[str, FormatFacts] = {
    **FORMATS,
    "preference": FormatFacts(
        "pairs of a chosen and a rejected answer, as turns of the model's chat template", is_chat=True
    ),
    "preference_text": FormatFacts("pairs of a chosen and a rejected answer, joined without a chat template"),
    "prompt_completion_messages": FormatFacts(
        "prompts with their answers, as turns of the model's chat template", is_chat=True
    ),
}

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]
