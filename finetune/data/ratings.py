"""Rated rows: an answer with a label, good or bad, and beside it another prompt's answer, which KTO's KL term needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.config.schema import DatasetSource
from finetune.data.formats import (
    PARSERS,
    Columns,
    Completion,
    Conversation,
    Document,
    Row,
    Text,
    make_message,
    recognize_format,
)
from finetune.data.messages import BadRow, Message, describe_value, list_columns
from finetune.data.preferences import find_sides, parse_pair

LABELS = ("label", "kto_tag")
Turns = list[tuple[Message, bool]]  # messages, each with whether it is trained on
MEANINGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True, slots=True)
class Rated:
    """An answer to a prompt; only the answer is trained on."""

    document: Conversation | Completion
    is_good: bool


@dataclass(frozen=True, slots=True)
class ParsedRatings:
    """What a row holds: a rated answer, or the good and the bad one of a pair. Returned by `parse_ratings`."""

    rated: tuple[Rated, ...]
    format: str
    unused_columns: tuple[str, ...]  # that hold a value
    findings: tuple[str, ...] = ()  # names in `checks.CHECKS`


def parse_ratings(row: Row, source: DatasetSource) -> ParsedRatings:
    """Reads a row with a label, or a preference row as two. Raises `BadRow`.

    >>> row = {"prompt": "2+2=", "completion": " 5", "label": False}
    >>> parse_ratings(row, DatasetSource(path="sums.jsonl")).rated
    (Rated(document=Completion(prompt='2+2=', completion=' 5'), is_good=False),)
    """
    if source.label_column is None and None not in find_sides(row, source):
        parsed = parse_pair(row, source)
        rated = (Rated(parsed.pair.chosen, True), Rated(parsed.pair.rejected, False))
        return ParsedRatings(rated, "preference", parsed.unused_columns, parsed.findings)
    names = (source.label_column,) if source.label_column else LABELS
    label = next((name for name in names if row.get(name) is not None), None)
    if label is None:
        raise BadRow(
            f"{' or '.join(names)}: nothing that rates the answer: its columns are {list_columns(row) or 'none'} (label_column "
            "names it); rows with a chosen and a rejected answer are read too"
        )
    columns = Columns(row)
    value = columns.take(label)
    is_good = MEANINGS.get(str(value).strip().lower())
    if is_good is None:
        raise BadRow(f"{label}: true or false is expected, found {describe_value(value)}")
    row_format = source.type or recognize_format(row, source)
    document = PARSERS[row_format](columns, source)
    if isinstance(document, Text):
        raise BadRow(
            "plain text is no answer that could be rated; name its prompt and completion (prompt_column, completion_column)"
        )
    if isinstance(document, Conversation) and row_format != "prompt_completion":
        document = _train_last(document)
    return ParsedRatings((Rated(document, is_good),), row_format, columns.unused)


def join_answer(prompt: Document, answer: Document) -> Document:
    """The prompt of one document with the answer of another.

    >>> join_answer(Completion("2+2=", " 4"), Completion("Who?", " Me."))
    Completion(prompt='2+2=', completion=' Me.')
    """
    if isinstance(prompt, Completion):
        if isinstance(answer, Completion):
            return replace(prompt, completion=answer.completion)
        contents = [m["content"] for m, on in _split(answer)[1] if on] if isinstance(answer, Conversation) else []
        return replace(prompt, completion="\n".join(contents))
    assert isinstance(prompt, Conversation), "plain text has no prompt"
    if isinstance(answer, Conversation):
        turns = _split(answer)[1]
    else:
        assert isinstance(answer, Completion), "plain text has no answer"
        turns = [(make_message("assistant", answer.completion), True)]
    whole = [*_split(prompt)[0], *turns]
    return replace(prompt, messages=tuple(m for m, _ in whole), trained=tuple(on for _, on in whole))


def have_same_prompt(first: Document, second: Document) -> bool:
    """Whether two documents answer the same prompt."""
    if isinstance(first, Conversation) and isinstance(second, Conversation):
        return _split(first)[0] == _split(second)[0]
    return isinstance(first, Completion) and isinstance(second, Completion) and first.prompt == second.prompt


def find_mismatched(documents: Sequence[Document], earlier: Document | None) -> list[Document | None]:
    """For each of `documents` the next one, in a circle, that answers another prompt; else `earlier`, a document read before.

    None where there is none.
    """
    count = len(documents)
    found: list[Document | None] = []
    for i, document in enumerate(documents):
        others = (documents[(i + k) % count] for k in range(1, count))
        another = next((other for other in others if not have_same_prompt(document, other)), None)
        if another is None and earlier is not None and not have_same_prompt(document, earlier):
            another = earlier
        found.append(another)
    return found


def _train_last(conversation: Conversation) -> Conversation:
    """Only the last answer is rated; what comes before it is its prompt."""
    last = max(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    trained = tuple(on and i == last for i, on in enumerate(conversation.trained))
    return replace(conversation, trained=trained)


def _split(conversation: Conversation) -> tuple[Turns, Turns]:
    """(the turns before the first that is trained on, the others), each with whether it is."""
    turns = list(zip(conversation.messages, conversation.trained, strict=True))
    first = next((i for i, on in enumerate(conversation.trained) if on), len(turns))
    return turns[:first], turns[first:]
