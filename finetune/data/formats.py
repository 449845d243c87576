"""Reads a row as a conversation, a prompt with its completion, plain text or tokens.

The format is the recipe's, or recognized from the row's columns.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from finetune.config.methods import PAIRED, RATED
from finetune.config.schema import FORMATS, DatasetSource, Pooling
from finetune.constants import IGNORE_INDEX, Names
from finetune.data.messages import (
    BadRow,
    Message,
    Tool,
    describe_value,
    list_columns,
    parse_if_json,
    parse_messages,
    parse_tools,
    parse_turns,
)

Row = Mapping[str, Any]
# The names that columns have in published data, in lower case, the most usual first.
QUESTION_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input", "context")
ANSWER_COLUMNS = (
    "completion",
    "answer",
    "response",
    "output",
    "solution",
    "target",
    "assistant",
    "reply",
)
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "content", "document", "body", "article")
LABEL_COLUMNS = ("label", "kto_tag")  # say whether the answer is good
# (question column, answer column), in upper or lower case: names that leave no doubt that they are
# a user's turn and the assistant's
COMMON_PAIRS = (
    ("prompt", "response"),
    ("input", "output"),
    ("question", "answer"),
    ("instruction", "response"),
    ("instruction", "output"),
)
# Matches the name, in lower case, of a column that may be part of the question: options, option_a,
# choices, A to E, passage.
QUESTION_PART = re.compile(
    r"(option|choice|context|passage|paragraph|document|article|body|content|text|story|background"
    r"|table|schema|premise|candidate|ending)(s|_?[a-z0-9])?|history|[a-e]"
)
# the column of the variables that a row gives its chat template besides the messages
VARIABLES = "chat_template_kwargs"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template renders."""

    messages: tuple[Message, ...]
    # [messages]: whether each is trained on; False for all but the assistant's
    trained: tuple[bool, ...]
    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # the row's own chat_template_kwargs
    images: tuple[Any, ...] = ()  # as the row names them, one for each IMAGE in the contents

    @property
    def answers(self) -> list[Message]:
        """The messages that are trained on."""
        return list(compress(self.messages, self.trained))


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion as text, joined without a chat template.

    Only the completion is trained on.
    """

    prompt: str
    completion: str
    # True: if the tokenizer has a chat template, that renders the two as a user's turn and the
    # assistant's
    are_turns: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, all of which is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Token ids that another program has made. No template and no BOS is added to them."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]  # [ids]: whether each is trained on

    def stretches(self) -> Iterator[tuple[bool, list[int]]]:
        """Splits the ids where training begins or ends.

        Yields (whether they are trained on, consecutive ids).
        """
        for is_trained, pairs in groupby(zip(self.trained, self.ids, strict=True), itemgetter(0)):
            yield is_trained, [token_id for _, token_id in pairs]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to which the model in training samples the answers."""

    asked: Conversation | str  # the prompt
    row: str  # JSON text of what rewards read of the row

    @property
    def images(self) -> tuple[Any, ...]:
        """The images of the prompt, as the row names them."""
        return () if isinstance(self.asked, str) else self.asked.images


@dataclass(frozen=True, slots=True)
class Candidate:
    """A query and one of its documents, as the one text that a reranker scores."""

    text: str


@dataclass(frozen=True, slots=True)
class Steps:
    """A prompt and the steps of an answer. Each step is scored at its end."""

    prompt: str
    steps: tuple[str, ...]
    labels: tuple[int, ...]  # [steps]: 1 for a right step, 0 for a wrong one
    separator: str  # stands behind each step


Document = Conversation | Completion | Text | TokenRow | Question | Candidate | Steps


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that stay together in one batch, because a method compares them.

    Examples: chosen and rejected; a rated answer, and its prompt with the answer to another prompt.
    A document that is not compared is a group by itself.
    """

    documents: tuple[Document, ...]
    rating: int = 0  # 1: a good answer, -1: a bad one, 0: not rated
    # [documents]: the label of the last token of each, for methods that train a score of it; None:
    # nothing is scored
    labels: tuple[int, ...] | None = None
    # how the vector of each document is made; None: no vectors are made
    pooling: Pooling | None = field(default=None, repr=False)


def label_of_number(number: float) -> int:
    """Returns the label that stands for a number: the bits of its fp32, as an int32.

    It is never IGNORE_INDEX, whose bits are those of a NaN.

    >>> number_of_label(label_of_number(0.25))
    0.25
    """
    return int(np.float32(number).view(np.int32))


def number_of_label(label: int) -> float:
    """Returns the number that a label of `label_of_number` stands for."""
    return float(np.int32(label).view(np.float32))


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The contents of a row. Returned by the parsers of every kind of row, such as `parse_row`."""

    groups: tuple[Group, ...]
    format: str  # a key of `FORMATS`, or the name of another parser's format, such as preference
    unused_columns: tuple[str, ...]  # the columns that hold a value and were not read
    findings: Names = ()  # keys of `CHECKS` in data/findings.py

    @property
    def document(self) -> Document:
        """The first document of the first group."""
        return self.groups[0].documents[0]

    @property
    def rendering(self) -> str:
        """The name of the format in reports. It says whether a chat template renders the row.

        >>> ParsedRow((Group((Completion("2+2=", " 4"),)),), "preference", ()).rendering
        'preference_text'
        """
        if self.format == "preference" and isinstance(self.document, Completion):
            return "preference_text"
        if self.format == "prompt_completion" and isinstance(self.document, Conversation):
            return "prompt_completion_messages"
        return self.format


@dataclass(frozen=True, slots=True)
class Columns:
    """A row, with a record of which columns have been read. The parsers read rows through it."""

    row: Row
    used: set[str] = field(default_factory=set)

    def take(self, column: str) -> Any:
        """Returns the value of a column, None if the row does not have it; records it as used."""
        self.used.add(column)
        return self.row.get(column)

    def take_text(self, column: str, may_be_empty: bool = True) -> str:
        """Takes the text of a column, as `take`.

        Raises `BadRow` for a value that is not text, and for an empty text unless `may_be_empty`.
        """
        value = self.take(column)
        if not isinstance(value, str):
            raise BadRow(f"{column}: text is expected, found {self._describe(column, value)}")
        if not value and not may_be_empty:
            raise BadRow(f"{column}: empty")
        return value

    def take_messages(self, column: str) -> list[Any]:
        """Takes the list of messages of a column, as `take`; the column may hold it as JSON text.

        Raises `BadRow` for any other value.
        """
        value = self.take(column)
        if isinstance(value, str):
            value = parse_if_json(value)
        if not isinstance(value, list):
            # str() of a list of Python, as pandas writes it into a CSV file
            is_of_python = isinstance(value, str) and value.lstrip().startswith(("[{'", '[{"'))
            advice = "; its text is not JSON: write it by json.dumps" if is_of_python else ""
            raise BadRow(
                f"{column}: a list of messages is expected, found {self._describe(column, value)}"
                f"{advice}"
            )
        return value

    def _describe(self, column: str, value: Any) -> str:
        """Describes a value for an error; of a missing column also which columns the row has."""
        present = "" if column in self.row else f"; its columns are {list_columns(self.row)}"
        return describe_value(value) + present

    @property
    def unused(self) -> Names:
        """The columns that hold a value and have not been read."""
        return tuple(
            str(column)
            for column, value in self.row.items()
            if column not in self.used and value not in (None, "", [], {})
        )


def first_given(row: Row, columns: Iterable[str]) -> str | None:
    """Returns the first of `columns` in which the row has a value; None if it has none in any."""
    return next((column for column in columns if row.get(column) is not None), None)


def parse_row(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a row in the format of the source's `type`, else in the one that its columns show.

    Raises `BadRow` for a row of no known format, and for one that its format's parser rejects.

    >>> parse_row({"prompt": "2+2=", "completion": "4"}, DatasetSource(path="sums.jsonl")).document
    Completion(prompt='2+2=', completion='4')
    """
    common_pair = find_common_pair(row, source)
    if common_pair is None:
        row_format = source.type or recognize_format(row, source)
    else:
        row_format = "messages"
    columns = Columns(row)
    if FORMATS[row_format].may_be_rated:
        _refuse_rated(columns, row_format, source)
    findings: Names = ()
    if common_pair is not None:
        question_column, answer_column = common_pair
        source = replace(source, prompt_column=question_column, completion_column=answer_column)
        findings = ("columns_recognized",)
    group = Group((parse_document(row_format, columns, source),))
    return ParsedRow((group,), row_format, columns.unused, findings)


def find_common_pair(row: Row, source: DatasetSource) -> tuple[str, str] | None:
    """Finds the columns of a question and its answer by their names, if these leave no doubt.

    Returns None if the source names columns or a format, if other columns may be part of the
    conversation, or if there are several candidates.

    >>> find_common_pair({"Prompt": "2+2?", "Response": "4"}, DatasetSource(path="sums.csv"))
    ('Prompt', 'Response')
    """
    named = (source.messages_column, source.prompt_column, source.completion_column)
    if source.type or source.text_column or any(named):
        return None
    present = [str(column) for column, value in row.items() if value is not None]
    if {"instruction", "output"} <= set(present) or any(map(_is_of_conversation, present)):
        return None
    candidates = [
        (question, answer)
        for question in present
        if question.lower() in QUESTION_COLUMNS
        for answer in present
        if answer.lower() in ANSWER_COLUMNS
    ]
    if len(candidates) != 1:
        return None
    [(question, answer)] = candidates
    is_known = (question.lower(), answer.lower()) in COMMON_PAIRS
    are_texts = isinstance(row[question], str) and isinstance(row[answer], str)
    return (question, answer) if is_known and are_texts else None


def _is_of_conversation(column: str) -> bool:
    """Whether a column, by its name, may hold a conversation or a part of the question."""
    name = column.lower()
    return name in CONVERSATION_COLUMNS or QUESTION_PART.fullmatch(name) is not None


def recognize_format(row: Row, source: DatasetSource) -> str:
    """Finds the format of a row by its columns.

    It is the format whose columns the source names, else the first of `FORMATS` whose columns the
    row has. A list under `chosen` is a conversation, unless the row also has a prompt or another
    conversation.

    Raises `BadRow` if no format fits.
    """
    present = {column for column, value in row.items() if value is not None}
    named_format = _find_named_format(present, source)
    if named_format is not None:
        return named_format
    fitting = next((name for name, facts in FORMATS.items() if facts.fits(present)), None)
    is_chat = fitting is not None and FORMATS[fitting].is_chat
    if isinstance(row.get("chosen"), list) and "prompt" not in present and not is_chat:
        return "messages"
    if fitting is None:
        _refuse_null_column(row, present)
        _refuse_pair_without_text(row)
        raise BadRow(_explain_unknown(row, present))
    return fitting


def _find_named_format(present: set[str], source: DatasetSource) -> str | None:
    """Finds the format that the source's column keys ask for; None if it names no column.

    `present`: the columns in which the row has a value.
    """
    if source.messages_column is not None:
        return "messages"
    # In a ShareGPT row completion_column names the answer to its conversation.
    completes_sharegpt = FORMATS["sharegpt"].fits(present) and "prompt" not in present
    names_completion = source.completion_column is not None and not completes_sharegpt
    if source.prompt_column or names_completion:
        return "prompt_completion"
    return None if source.text_column is None else "text"


def _explain_unknown(row: Row, present: set[str]) -> str:
    """Writes the message on a row of no known format.

    `present`: the columns in which the row has a value.
    """
    known_formats = (
        " + ".join(facts.columns[0]) + (f" ({facts.note})" if facts.note else "")
        for facts in FORMATS.values()
    )
    hint = "Name the columns (prompt_column and completion_column, messages_column or text_column)"
    for chosen, rejected in (("chosen", "rejected"), ("response_w", "response_l")):
        if {chosen, rejected} <= present:
            hint = (
                f"{chosen} and {rejected} are two answers to one prompt: method: "
                f"{' or '.join(PAIRED)} learns from such pairs; to train on the better answers "
                f"alone, set prompt_column and completion_column: {chosen}"
            )
    return (
        f"unknown format: its columns are {list_columns(row) or 'none'}; known formats: "
        f"{', '.join(known_formats)}. {hint}"
    )


def _refuse_pair_without_text(row: Row) -> None:
    """Raises `BadRow` for a row with the columns of a question and its answer, one not text."""
    columns = {str(column).lower(): column for column in row}
    for pair in COMMON_PAIRS:
        if not columns.keys() >= set(pair):
            continue
        for column in (columns[name] for name in pair):
            value = row[column]
            if isinstance(value, str):
                continue
            advice = "; write it as text, in quotes" if isinstance(value, float | int) else ""
            raise BadRow(f"{column}: text is expected, found {describe_value(value)}{advice}")


def _refuse_null_column(row: Row, present: set[str]) -> None:
    """Raises `BadRow` for a row that has all columns of a known format, but no value in some.

    Of several such formats, the message is about the one with the most values. `present`: the
    columns in which the row has a value.
    """
    candidates = []  # (name of the format, columns by which it is recognized)
    for name, facts in FORMATS.items():
        candidates += [(name, columns) for columns in facts.columns if row.keys() >= set(columns)]
    if not candidates:
        return
    name, columns = max(candidates, key=lambda candidate: len(present.intersection(candidate[1])))
    expected = "text" if name in ("alpaca", "prompt_completion", "text") else "a value"
    null_column = next(column for column in columns if column not in present)
    raise BadRow(f"{null_column}: {expected} is expected, found nothing")


def _refuse_rated(columns: Columns, row_format: str, source: DatasetSource) -> None:
    """Raises `BadRow` for a row with a bad answer, which would be trained on like a good one.

    Such a row has a label that says false, a rejected answer or a score. A label that says true is
    recorded as used. A rejected answer is accepted if the source names `chosen`, or messages beside
    the pair. A score is accepted if the source names a column of messages, prompt or completion.
    """
    row = columns.row
    for column in LABEL_COLUMNS:
        label = row.get(column)
        rating = ""
        if isinstance(label, bool | str):
            rating = str(label).strip().lower()
        if rating == "true":
            columns.take(column)
        if rating == "false":
            raise BadRow(
                f"{column}: false marks a bad answer, which would be trained on like a good one; "
                f"method: {RATED[0]} learns from both; else train on the other rows alone"
            )
    named = (source.messages_column, source.prompt_column, source.completion_column)
    # the messages of such a column are not a side of the pair
    names_other_messages = source.messages_column not in (None, "chosen", "rejected")
    if row.get("rejected") and "chosen" not in named and not names_other_messages:
        if row_format == "messages":
            key = "messages_column"
        else:
            key = "completion_column"
        raise BadRow(
            f"rejected: method: {' or '.join(PAIRED)} learns from pairs; to train on the chosen "
            f"answers alone, set {key}: chosen"
        )
    if row.get("score") is not None and not any(named):
        raise BadRow(
            "score: training by scores is not supported; to train on every row alike, name the "
            "columns to read (messages_column, or prompt_column and completion_column)"
        )


def _take_message_turns(columns: Columns, source: DatasetSource) -> list[Any]:
    """Takes a list of messages; or a question and its answer, if the source names their columns, or
    if the row has their usual columns and no messages.
    """
    is_named = source.prompt_column or source.completion_column
    messages_column = source.messages_column or first_given(columns.row, ("messages", "chosen"))
    has_usual = all(isinstance(columns.row.get(name), str) for name in ("prompt", "completion"))
    if is_named or (messages_column is None and has_usual):
        question = columns.take_text(source.prompt_column or "prompt")
        answer = columns.take_text(source.completion_column or "completion")
        return [make_message("user", question), make_message("assistant", answer)]
    return columns.take_messages(messages_column or "messages")


def _take_sharegpt_turns(columns: Columns, source: DatasetSource) -> list[Any]:
    """Takes ShareGPT's turns, and the answer in a column of its own that may follow them."""
    if columns.row.get("conversations") is not None:
        default = "conversations"
    else:
        default = "conversation"
    turns = list(columns.take_messages(source.messages_column or default))
    answer = columns.take(source.completion_column or "chosen")  # "chosen": of a preference pair
    if answer is not None:
        turns += answer if isinstance(answer, list) else [answer]
    return turns


TURN_READERS: dict[str, Callable[[Columns, DatasetSource], list[Any]]] = {
    "messages": _take_message_turns,
    "sharegpt": _take_sharegpt_turns,
}


def _parse_alpaca(columns: Columns, source: DatasetSource) -> Document:
    """Reads Alpaca's instruction and input as the user's turn, and its output as the answer."""
    question = take_question(columns, source)
    output = columns.take_text(source.completion_column or "output")
    return make_conversation(columns, [*question, make_message("assistant", output)])


def take_question(columns: Columns, source: DatasetSource) -> list[Message]:
    """Reads the turns before an Alpaca row's answer: its history, then instruction and input.

    Raises `BadRow` for a column that does not hold what is expected.
    """
    instruction = columns.take_text(source.prompt_column or "instruction")
    extra_input = ""
    if columns.row.get("input") is not None:
        extra_input = columns.take_text("input")
    if source.alpaca_prompt:
        question = make_message("user", _make_alpaca_prompt(instruction, extra_input))
    elif extra_input:
        # `input` is for chat templates that read message["input"]
        question = make_message("user", f"{instruction}\n\n{extra_input}") | {"input": extra_input}
    else:
        question = make_message("user", instruction)
    return [*_parse_history(columns), question]


def _make_alpaca_prompt(instruction: str, extra_input: str) -> str:
    """Writes the prompt of Alpaca's authors, without the part on the input if that is empty.

    A line break follows the last heading, as torchtune and others write it.

    >>> _make_alpaca_prompt("Add the numbers.", "2 and 3").splitlines()[1:]
    ['', '### Instruction:', 'Add the numbers.', '', '### Input:', '2 and 3', '', '### Response:']
    """
    paired = ""
    if extra_input:
        paired = ", paired with an input that provides further context"
    task = (
        f"Below is an instruction that describes a task{paired}. Write a response that "
        "appropriately completes the request."
    )
    parts = [
        task,
        f"### Instruction:\n{instruction}",
        f"### Input:\n{extra_input}" if extra_input else "",
        "### Response:\n",
    ]
    return "\n\n".join(filter(None, parts))


def _parse_history(columns: Columns) -> list[Message]:
    """Reads the earlier turns of an Alpaca row from `history`, a list of [question, answer].

    The column may also hold JSON text, or be missing.
    """
    history = parse_if_json(columns.take("history")) or []
    turns = []
    for pair in history if isinstance(history, list) else [history]:
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(text, str) for text in pair)
        ):
            raise BadRow(
                f"history: a list of [question, answer] is expected, found {describe_value(pair)}"
            )
        turns += [make_message("user", pair[0]), make_message("assistant", pair[1])]
    return turns


def _parse_prompt_completion(columns: Columns, source: DatasetSource) -> Document:
    """Reads a prompt and its completion, as text or, if one is a list, as messages."""
    row = columns.row
    has_chosen_for_completion = row.get("completion") is None and row.get("chosen") is not None
    default_column = "chosen" if has_chosen_for_completion else "completion"
    prompt_column = source.prompt_column or "prompt"
    completion_column = source.completion_column or default_column
    prompt = parse_turns(row.get(prompt_column))
    if isinstance(prompt, list) or isinstance(row.get(completion_column), list):
        prompt = columns.take_messages(prompt_column)
        completion = columns.take_messages(completion_column)
        return make_conversation(columns, [*without_training(prompt), *completion])
    return Completion(
        columns.take_text(prompt_column), columns.take_text(completion_column, may_be_empty=False)
    )


def without_training(turns: list[Any]) -> list[Any]:
    """Marks every turn of a prompt, including the assistant's, as not trained on."""
    return [{**turn, "train": False} if isinstance(turn, dict) else turn for turn in turns]


def _parse_text(columns: Columns, source: DatasetSource) -> Document:
    """Reads a row of plain text."""
    return Text(columns.take_text(source.text_column or "text", may_be_empty=False))


def _parse_squad(columns: Columns, source: DatasetSource) -> Document:
    """Reads a SQuAD row with the first of its answers, in the words of NeMo Automodel's prompt."""
    answers = columns.take(source.completion_column or "answers")
    texts = None
    if isinstance(answers, Mapping):
        texts = answers.get("text")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRow(
            f"answers: a mapping with a list of text is expected, found {describe_value(answers)}"
        )
    if not texts:
        raise BadRow("answers: there is none")
    prompt = (
        f"Context: {columns.take_text('context')} Question: {columns.take_text('question')} "
        "Answer: "
    )
    return Completion(prompt, texts[0].strip(), are_turns=True)


def _parse_hellaswag(columns: Columns, source: DatasetSource) -> Document:
    """Reads a HellaSwag row as NeMo Automodel does: the context, completed by the right ending."""
    endings = columns.take("endings")
    # a table of which some rows have no label holds floats
    label = str(columns.take("label")).removesuffix(".0")
    if not isinstance(endings, list) or not label.isdecimal() or int(label) >= len(endings):
        raise BadRow(
            f"endings: a list in which label {label} names one is expected, found "
            f"{describe_value(endings)}"
        )
    return Completion(columns.take_text("ctx"), str(endings[int(label)]))


def _parse_cauldron(columns: Columns, source: DatasetSource) -> Document:
    """Reads a row of The Cauldron: pairs of turns about the row's images."""
    texts = columns.take("texts")
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(each, dict) for each in texts)
    ):
        raise BadRow(
            "texts: a list of mappings with user and assistant is expected, found "
            f"{describe_value(texts)}"
        )
    roles = ("user", "assistant")
    turns = [{"role": role, "content": pair.get(role)} for pair in texts for role in roles]
    return make_conversation(columns, turns)


def _parse_tokens(columns: Columns, source: DatasetSource) -> Document:
    """Reads a row of token ids and drops its padding.

    `labels` says which ids are trained on; without it, all are. `attention_mask` is 0 at padding;
    without it, there is none.
    """
    ids = _take_numbers(columns, "input_ids", None)
    labels = _take_numbers(columns, "labels", len(ids)) or ids
    mask = _take_numbers(columns, "attention_mask", len(ids)) or [1] * len(ids)
    for position, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (token, IGNORE_INDEX):
            raise BadRow(
                f"labels: {label} at position {position}, where input_ids has {token}; labels are "
                f"the ids themselves, and {IGNORE_INDEX} where nothing is trained"
            )
    attended = [i for i, value in enumerate(mask) if value]  # the positions that are not padding
    has_gap = attended and attended != list(range(attended[0], attended[-1] + 1))
    if has_gap or not {*mask} <= {0, 1}:
        raise BadRow(
            "attention_mask: ones are expected, with zeros before or after them where padding "
            f"stands, found {describe_value(mask)}"
        )
    return TokenRow(
        ids=tuple(ids[i] for i in attended),
        trained=tuple(labels[i] != IGNORE_INDEX for i in attended),
    )


def _take_numbers(columns: Columns, column: str, length: int | None) -> list[int]:
    """Takes the list of whole numbers in a column.

    Args:
        columns: The row.
        column: The column's name.
        length: How many numbers are expected. The row may then be without the column, for which
            the result is empty. None: any number of them; the column is required.

    Raises:
        BadRow: The column does not hold such a list.
    """
    numbers = columns.take(column)
    if numbers is None and length is not None:
        return []
    if (
        not isinstance(numbers, list)
        or not numbers
        or any(type(number) is not int for number in numbers)
    ):
        raise BadRow(
            f"{column}: a list of whole numbers is expected, found {describe_value(numbers)}"
        )
    if length is not None and len(numbers) != length:
        raise BadRow(f"{column}: {len(numbers)} numbers, but input_ids has {length}")
    return numbers


PARSERS: dict[str, Callable[[Columns, DatasetSource], Document]] = {
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_text,
    "squad": _parse_squad,
    "hellaswag": _parse_hellaswag,
    "cauldron": _parse_cauldron,
    "tokens": _parse_tokens,
}


def parse_document(
    row_format: str, columns: Columns, source: DatasetSource, *, needs_answer: bool = True
) -> Document:
    """Reads the document of a row in a format, a key of TURN_READERS or PARSERS.

    Raises `BadRow` for a row that is not as expected. `needs_answer`: as in `make_conversation`,
    for a format of TURN_READERS.
    """
    if row_format in TURN_READERS:
        turns = TURN_READERS[row_format](columns, source)
        return make_conversation(columns, turns, needs_answer=needs_answer)
    return PARSERS[row_format](columns, source)


def make_message(role: str, content: str) -> Message:
    """Makes a message of plain text."""
    return {"role": role, "content": content}


def make_conversation(
    columns: Columns, turns: list[Any], *, needs_answer: bool = True
) -> Conversation:
    """Makes a conversation of turns and of other columns of the row.

    The other columns are `system`, `tools`, `images` or `image`, and `chat_template_kwargs`. They
    are recorded as used. `system` is put in front as a message, unless the first message is that
    one already.

    Raises `BadRow` for turns or columns that are not as expected; with `needs_answer` also if no
    turn is the assistant's.
    """
    messages, trained, images = parse_messages(
        turns, _take_images(columns), needs_answer=needs_answer
    )
    tools = _take_tools(columns, messages)
    system = columns.row.get("system")
    if isinstance(system, str):
        columns.take("system")
        first = messages[0]
        is_first = first["role"] == "system" and first["content"] == system
        if system and not is_first:
            messages = (make_message("system", system), *messages)
            trained = (False, *trained)
    variables = parse_if_json(columns.take(VARIABLES)) or {}
    if not isinstance(variables, dict):
        raise BadRow(f"{VARIABLES}: a mapping is expected, found {describe_value(variables)}")
    # Parquet fills mappings with nulls
    set_variables = {name: value for name, value in variables.items() if value is not None}
    return Conversation(messages, trained, tools, set_variables, images)


def _take_tools(columns: Columns, messages: Sequence[Message]) -> tuple[Tool, ...]:
    """Takes the tool schemas of a row: of its column, or out of its first messages.

    Only system and developer messages before all others may have tools.

    Raises `BadRow` if the column and these messages describe different tools.
    """
    tools = parse_tools(columns.take("tools"))
    message_tools: list[Tool] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        message_tools += parse_tools(message.pop("tools", None))
    if tools and message_tools and list(tools) != message_tools:
        raise BadRow("tools: the column and a system message describe different tools; keep one")
    return tools or tuple(message_tools)


def _take_images(columns: Columns) -> list[Any]:
    """Takes the images of a row from the first column of `images` and `image` with a value.

    The value is a list, or one image. Without such a column the result is empty.
    """
    column = next((name for name in ("images", "image") if columns.row.get(name)), None)
    if column is None:
        return []
    value = columns.take(column)
    return value if isinstance(value, list) else [value]
