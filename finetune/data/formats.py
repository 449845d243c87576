"""Rows as conversations, prompts with completions, plain text or tokens; the format is recognized
from the columns.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
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
)

Row = Mapping[str, Any]
# The names of columns in published data, in lower case, the most usual first.
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
LABEL_COLUMNS = ("label", "kto_tag")  # whether the answer is good
# Those of a question and its answer, in any case of letters, that name themselves: a user's turn
# and the assistant's.
COMMON_PAIRS = (
    ("prompt", "response"),
    ("input", "output"),
    ("question", "answer"),
    ("instruction", "response"),
    ("instruction", "output"),
)
# The name, in lower case, of a column that may be part of the question: options, option_a, choices,
# A to E, passage.
QUESTION_PART = re.compile(
    r"(option|choice|context|passage|paragraph|document|article|body|content|text|story|background"
    r"|table|schema|premise|candidate|ending)(s|_?[a-z0-9])?|history|[a-e]"
)
# the column of what a row's chat template reads beside its messages
VARIABLES = "chat_template_kwargs"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template renders, from messages, sharegpt and alpaca rows, and
    conversational prompts.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]  # [messages]; false for all but the assistant's
    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # the row's own chat_template_kwargs
    images: tuple[Any, ...] = ()  # as the row names them, one for each IMAGE in the contents


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion, joined without a chat template; only the completion is trained
    on.
    """

    prompt: str
    completion: str
    are_turns: bool = field(default=False, repr=False)  # where there is a chat template


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, all of which is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Ids that another program has made, with what it trains on.

    No template and no BOS is put to them.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]  # [ids]

    def stretches(self) -> Iterator[tuple[bool, list[int]]]:
        """Yields (whether it is trained on, its ids) for each longest stretch of ids."""
        for is_trained, pairs in groupby(zip(self.trained, self.ids, strict=True), itemgetter(0)):
            yield is_trained, [token for _, token in pairs]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose answers the model in training samples."""

    asked: Conversation | str
    row: str  # what rewards read, as JSON

    @property
    def images(self) -> tuple[Any, ...]:
        """The images of the prompt, as the row names them."""
        return () if isinstance(self.asked, str) else self.asked.images


@dataclass(frozen=True, slots=True)
class Candidate:
    """A query with one of its documents, as the text by which a reranker scores them."""

    text: str


@dataclass(frozen=True, slots=True)
class Steps:
    """An answer in steps after its prompt, each of which is scored at its end."""

    prompt: str
    steps: tuple[str, ...]
    labels: tuple[int, ...]  # of each step, whether it is right
    separator: str  # behind each step


Document = Conversation | Completion | Text | TokenRow | Question | Candidate | Steps


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that no batch takes apart.

    For example one answer; chosen and rejected; or a rated answer, and its prompt with the answer
    to another.
    """

    documents: tuple[Document, ...]
    rating: int = 0  # 1: a good answer, -1: a bad one, 0: not rated
    # [documents]: what the score of each one's last token should be; None: nothing is scored
    labels: tuple[int, ...] | None = None
    # how each document becomes one vector; None: it does not
    pooling: Pooling | None = field(default=None, repr=False)


def label_of_number(number: float) -> int:
    """A label that stands for a number: the bits of its fp32, which are never IGNORE_INDEX.

    >>> number_of_label(label_of_number(0.25))
    0.25
    """
    return int(np.float32(number).view(np.int32))


def number_of_label(label: int) -> float:
    """The number that a label of `label_of_number` stands for."""
    return float(np.int32(label).view(np.float32))


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The contents of a row. Returned by `parse_row`, and by those of preferences and ratings."""

    groups: tuple[Group, ...]
    format: str  # preference, or a key of PARSERS
    unused_columns: tuple[str, ...]  # that hold a value
    findings: Names = ()  # names in the table of data/findings.py

    @property
    def document(self) -> Document:
        return self.groups[0].documents[0]

    @property
    def rendering(self) -> str:
        """The format under its name in reports, which says whether a chat template renders the row.

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
    """A row and the columns of it that have been read."""

    row: Row
    used: set[str] = field(default_factory=set)

    def take(self, column: str) -> Any:
        """The value of a column, which counts as used from now on; None if the row has no such
        column.
        """
        self.used.add(column)
        return self.row.get(column)

    def take_text(self, column: str, may_be_empty: bool = True) -> str:
        """As `take`. Raises `BadRow` if the column holds no text, or an empty one where none may be
        empty.
        """
        value = self.take(column)
        if not isinstance(value, str):
            raise BadRow(f"{column}: text is expected, found {self._describe(column, value)}")
        if not value and not may_be_empty:
            raise BadRow(f"{column}: empty")
        return value

    def take_messages(self, column: str) -> list[Any]:
        """As `take`, of a list or its JSON text. Raises `BadRow` if the column holds neither."""
        value = self.take(column)
        if isinstance(value, str):
            value = parse_if_json(value)
        if not isinstance(value, list):
            raise BadRow(
                f"{column}: a list of messages is expected, found {self._describe(column, value)}"
            )
        return value

    def _describe(self, column: str, value: Any) -> str:
        present = "" if column in self.row else f"; its columns are {list_columns(self.row)}"
        return describe_value(value) + present

    @property
    def unused(self) -> Names:
        """The columns that hold a value and have not been read."""
        return tuple(
            str(c)
            for c, value in self.row.items()
            if c not in self.used and value not in (None, "", [], {})
        )


def first_given(row: Row, columns: Iterable[str]) -> str | None:
    """Returns the first of `columns` in which the row has a value; None without any."""
    return next((column for column in columns if row.get(column) is not None), None)


def parse_row(row: Row, source: DatasetSource) -> ParsedRow:
    """Reads a row in the format that the source's `type` names, else in the one that its columns
    show.

    Raises `BadRow`.

    >>> parse_row({"prompt": "2+2=", "completion": "4"}, DatasetSource(path="sums.jsonl")).document
    Completion(prompt='2+2=', completion='4')
    """
    recognized = find_common_pair(row, source)
    if recognized is None:
        row_format = source.type or recognize_format(row, source)
    else:
        row_format = "messages"
    columns = Columns(row)
    if FORMATS[row_format].may_be_rated:
        _check_preference(columns, row_format, source)
    findings: Names = ()
    if recognized is not None:
        source = replace(source, prompt_column=recognized[0], completion_column=recognized[1])
        findings = ("columns_recognized",)
    group = Group((PARSERS[row_format](columns, source),))
    return ParsedRow((group,), row_format, columns.unused, findings)


def find_common_pair(row: Row, source: DatasetSource) -> tuple[str, str] | None:
    """Finds the columns of a question and its answer by their names, where these leave no doubt.

    Returns None where the source names columns or a format, and where other columns may be part of
    the conversation.

    >>> find_common_pair({"Prompt": "2+2?", "Response": "4"}, DatasetSource(path="sums.csv"))
    ('Prompt', 'Response')
    """
    named = (source.messages_column, source.prompt_column, source.completion_column)
    if source.type or source.text_column or any(named):
        return None
    present = [str(column) for column, value in row.items() if value is not None]
    if {"instruction", "output"} <= set(present) or any(map(_is_of_conversation, present)):
        return None
    questions = [name for name in present if name.lower() in QUESTION_COLUMNS]
    answers = [name for name in present if name.lower() in ANSWER_COLUMNS]
    if len(questions) != 1 or len(answers) != 1:
        return None
    question = questions[0]
    answer = answers[0]
    is_known = (question.lower(), answer.lower()) in COMMON_PAIRS
    if is_known and isinstance(row[question], str) and isinstance(row[answer], str):
        return (question, answer)
    return None


def _is_of_conversation(column: str) -> bool:
    """Whether a column may hold a conversation, or a part of the question."""
    name = column.lower()
    return name in CONVERSATION_COLUMNS or QUESTION_PART.fullmatch(name) is not None


def recognize_format(row: Row, source: DatasetSource) -> str:
    """The format of a row: the one whose columns the source names, else the first of `FORMATS` that
    fits the row's own.

    A list under `chosen` is a conversation, unless a prompt or another conversation stands beside.

    Raises `BadRow`.
    """
    present = {column for column, value in row.items() if value is not None}
    named = _find_named_format(present, source)
    if named is not None:
        return named
    fitting = next((name for name, facts in FORMATS.items() if facts.fits(present)), None)
    is_chat = fitting is not None and FORMATS[fitting].is_chat
    if isinstance(row.get("chosen"), list) and "prompt" not in present and not is_chat:
        return "messages"
    if fitting is None:
        _refuse_null_column(row, present)
        raise BadRow(_explain_unknown(row, present))
    return fitting


def _find_named_format(present: set[str], source: DatasetSource) -> str | None:
    """The format whose columns the source names, in a row that has the columns `present`."""
    if source.messages_column is not None:
        return "messages"
    # In a ShareGPT row completion_column names the answer to its conversation.
    completes_sharegpt = FORMATS["sharegpt"].fits(present) and "prompt" not in present
    names_completion = source.completion_column is not None and not completes_sharegpt
    if source.prompt_column or names_completion:
        return "prompt_completion"
    return None if source.text_column is None else "text"


def _explain_unknown(row: Row, present: set[str]) -> str:
    """The message on a row of no known format."""
    known = (
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
        f"{', '.join(known)}. {hint}"
    )


def _refuse_null_column(row: Row, present: set[str]) -> None:
    """Raises `BadRow` where a row has all columns of a known format, but no value in one of
    them.
    """
    candidates = []  # (a format, columns by which it is recognized, all of which the row has)
    for name, facts in FORMATS.items():
        candidates += [(name, columns) for columns in facts.columns if row.keys() >= set(columns)]
    if not candidates:
        return
    name, columns = max(candidates, key=lambda candidate: len(present.intersection(candidate[1])))
    expected = "text" if name in ("alpaca", "prompt_completion", "text") else "a value"
    null = next(column for column in columns if column not in present)
    raise BadRow(f"{null}: {expected} is expected, found nothing")


def _check_preference(columns: Columns, row_format: str, source: DatasetSource) -> None:
    """Raises `BadRow` for rows that rate an answer: a bad answer would be trained on like a good
    one.
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
    # turns beside the pair, which are no part of it
    names_others = source.messages_column not in (None, "chosen", "rejected")
    if row.get("rejected") and "chosen" not in named and not names_others:
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


def _parse_messages(columns: Columns, source: DatasetSource) -> Document:
    if source.prompt_column or source.completion_column:
        question = columns.take_text(source.prompt_column or "prompt")
        answer = columns.take_text(source.completion_column or "completion")
        return make_conversation(
            columns, [make_message("user", question), make_message("assistant", answer)]
        )
    if columns.row.get("messages") is not None:
        default = "messages"
    else:
        default = "chosen"
    return make_conversation(columns, columns.take_messages(source.messages_column or default))


def _parse_sharegpt(columns: Columns, source: DatasetSource) -> Document:
    if columns.row.get("conversations") is not None:
        default = "conversations"
    else:
        default = "conversation"
    turns = list(columns.take_messages(source.messages_column or default))
    chosen = columns.take(source.completion_column or "chosen")  # of a preference pair
    if chosen is not None:
        turns += chosen if isinstance(chosen, list) else [chosen]
    return make_conversation(columns, turns)


def _parse_alpaca(columns: Columns, source: DatasetSource) -> Document:
    question = take_question(columns, source)
    output = columns.take_text(source.completion_column or "output")
    return make_conversation(columns, [*question, make_message("assistant", output)])


def take_question(columns: Columns, source: DatasetSource) -> list[Message]:
    """The turns before an Alpaca row's answer: earlier ones, then instruction and input.

    Raises `BadRow`.
    """
    instruction = columns.take_text(source.prompt_column or "instruction")
    extra = ""
    if columns.row.get("input") is not None:
        extra = columns.take_text("input")
    if source.alpaca_prompt:
        question = make_message("user", _make_alpaca_prompt(instruction, extra))
    elif extra:
        question = make_message("user", f"{instruction}\n\n{extra}") | {"input": extra}
    else:
        question = make_message("user", instruction)
    return [*_parse_history(columns), question]


def _make_alpaca_prompt(instruction: str, extra: str) -> str:
    """The prompt of Alpaca's authors, with a line break after its last heading, as torchtune and
    others write it.

    >>> _make_alpaca_prompt("Add the numbers.", "2 and 3").splitlines()[1:]
    ['', '### Instruction:', 'Add the numbers.', '', '### Input:', '2 and 3', '', '### Response:']
    """
    paired = ""
    if extra:
        paired = ", paired with an input that provides further context"
    task = (
        f"Below is an instruction that describes a task{paired}. Write a response that "
        "appropriately completes the request."
    )
    parts = [
        task,
        f"### Instruction:\n{instruction}",
        f"### Input:\n{extra}" if extra else "",
        "### Response:\n",
    ]
    return "\n\n".join(filter(None, parts))


def _parse_history(columns: Columns) -> list[Message]:
    """The earlier turns of an Alpaca row, from its list of [question, answer]."""
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
    row = columns.row
    has_chosen_alone = row.get("completion") is None and row.get("chosen") is not None
    usual = "chosen" if has_chosen_alone else "completion"
    prompt_column = source.prompt_column or "prompt"
    completion_column = source.completion_column or usual
    if isinstance(row.get(prompt_column), list) or isinstance(row.get(completion_column), list):
        prompt = columns.take_messages(prompt_column)
        completion = columns.take_messages(completion_column)
        return make_conversation(columns, [*without_training(prompt), *completion])
    return Completion(
        columns.take_text(prompt_column), columns.take_text(completion_column, may_be_empty=False)
    )


def without_training(turns: list[Any]) -> list[Any]:
    """The turns of a prompt, none of which is trained on, not the assistant's either."""
    return [{**turn, "train": False} if isinstance(turn, dict) else turn for turn in turns]


def _parse_text(columns: Columns, source: DatasetSource) -> Document:
    return Text(columns.take_text(source.text_column or "text", may_be_empty=False))


def _parse_squad(columns: Columns, source: DatasetSource) -> Document:
    """SQuAD's rows as NeMo Automodel writes them: the first of the answers."""
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
    """HellaSwag's rows as NeMo Automodel writes them: the context with its right ending."""
    endings = columns.take("endings")
    label = str(columns.take("label"))
    if not isinstance(endings, list) or not label.isdecimal() or int(label) >= len(endings):
        raise BadRow(
            f"endings: a list in which label {label} names one is expected, found "
            f"{describe_value(endings)}"
        )
    return Completion(columns.take_text("ctx"), str(endings[int(label)]))


def _parse_cauldron(columns: Columns, source: DatasetSource) -> Document:
    """The Cauldron's rows: turns in pairs, about the row's images."""
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
    ids = _take_numbers(columns, "input_ids", None)
    labels = _take_numbers(columns, "labels", len(ids)) or ids
    mask = _take_numbers(columns, "attention_mask", len(ids)) or [1] * len(ids)
    for position, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (token, IGNORE_INDEX):
            raise BadRow(
                f"labels: {label} at position {position}, where input_ids has {token}; labels are "
                f"the ids themselves, and {IGNORE_INDEX} where nothing is trained"
            )
    kept = [i for i, attended in enumerate(mask) if attended]  # the rest is padding
    is_hole = kept and kept != list(range(kept[0], kept[-1] + 1))
    if is_hole or not {*mask} <= {0, 1}:
        raise BadRow(
            "attention_mask: ones are expected, with zeros before or after them where padding "
            f"stands, found {describe_value(mask)}"
        )
    return TokenRow(tuple(ids[i] for i in kept), tuple(labels[i] != IGNORE_INDEX for i in kept))


def _take_numbers(columns: Columns, column: str, length: int | None) -> list[int]:
    """A column of whole numbers, as many as `length`; empty where that is given and the row has no
    such column.
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
    "messages": _parse_messages,
    "sharegpt": _parse_sharegpt,
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_text,
    "squad": _parse_squad,
    "hellaswag": _parse_hellaswag,
    "cauldron": _parse_cauldron,
    "tokens": _parse_tokens,
}


def make_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def make_conversation(columns: Columns, turns: list[Any]) -> Conversation:
    """Makes a conversation of turns and of the row's own columns beside them.

    These are `system`, `tools`, its images and `chat_template_kwargs`; they count as used. Raises
    `BadRow`.
    """
    messages, trained, images = parse_messages(turns, _take_images(columns))
    system = columns.row.get("system")
    if isinstance(system, str):
        columns.take("system")
        if system and messages[0] != make_message("system", system):
            messages = (make_message("system", system), *messages)
            trained = (False, *trained)
    variables = parse_if_json(columns.take(VARIABLES)) or {}
    if not isinstance(variables, dict):
        raise BadRow(f"{VARIABLES}: a mapping is expected, found {describe_value(variables)}")
    # Parquet fills mappings with nulls
    given = {name: value for name, value in variables.items() if value is not None}
    of_system = None
    if messages[0]["role"] in ("system", "developer"):
        of_system = messages[0].pop("tools", None)
    return Conversation(
        messages, trained, parse_tools(columns.take("tools") or of_system), given, images
    )


def _take_images(columns: Columns) -> list[Any]:
    """The row's images, as TRL, LLaVA and LLaMA-Factory have them: one, or a list."""
    column = next((name for name in ("images", "image") if columns.row.get(name)), None)
    if column is None:
        return []
    value = columns.take(column)
    return value if isinstance(value, list) else [value]
