"""What a first recipe needs to know of a data set: format, columns, rows and their length. No torch."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.methods import RowKind
from finetune.config.schema import DatasetSource
from finetune.data.formats import (
    ANSWER_COLUMNS,
    LABEL_COLUMNS,
    QUESTION_COLUMNS,
    TEXT_COLUMNS,
    Completion,
    Conversation,
    Document,
    ParsedRow,
    Question,
    Text,
    TokenRow,
    find_common_pair,
    parse_row,
)
from finetune.data.messages import BadRow, describe_value, list_columns
from finetune.data.preferences import find_sides
from finetune.data.readers import file_kind
from finetune.data.sources import list_files, read_rows
from finetune.data.tokenize import READERS
from finetune.errors import UserError

ROWS_READ = 1000  # of a data set, from its beginning
CHARACTERS_A_TOKEN = 3.0  # English has some 4; code, numbers and other languages fewer
TEMPLATE_TOKENS = 16  # around the turns of a row
SAVED_BESIDE_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")  # by `datasets`, beside its Arrow files
COLUMN_KEY = "(messages|prompt|completion|text|chosen|rejected)_column"

Ask = Callable[[str, str], str]  # (question, default) -> answer


@dataclass(frozen=True, slots=True)
class DataSummary:
    """A data set as far as its first rows show it. Returned by `summarize_data`."""

    source: DatasetSource  # with the columns that a recipe has to name
    format: str  # messages, sharegpt, alpaca, prompt_completion or text
    columns: tuple[str, ...]
    rows: int  # in all, where `is_counted`; else those that were read
    is_counted: bool
    longest_tokens: int  # of all but the longest hundredth of the rows
    mean_tokens: float  # of a row
    is_tokenized: bool  # counted by the model's tokenizer; else guessed from characters
    kind: RowKind = "answers"
    sample: tuple[dict[str, Any], ...] = ()  # the rows that were read


def summarize_data(
    source: DatasetSource, model: str, *, has_template: bool, ask: Ask | None, kind: RowKind | None = None
) -> DataSummary:
    """Reads the first rows of `source` and finds its columns; a tokenizer in `model` counts their tokens.

    `has_template`: the model has a chat template, through which questions and answers then go. `ask`: asks a person
    which column is which, where their names do not show it. `kind`: what the method reads; None: what the first row
    holds.

    Raises `UserError` where there are no rows, or columns that nobody names.
    """
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    taken = 0
    for batch in read_rows(source, streaming=True):
        for number, row in zip(batch.numbers, batch.rows, strict=True):
            bad += [f"{batch.file}:{number}: {row}"] if isinstance(row, BadRow) else []
            rows += [row] if not isinstance(row, BadRow) else []
            taken += 1
        if taken >= ROWS_READ:
            break
    if not rows:
        raise UserError(bad[0] if bad else f"{source.origin}: has no rows")
    rows = rows[:ROWS_READ]
    kind = kind or find_kind(rows[0], source)
    if kind == "answers":
        source = choose_columns(rows[0], source, has_template=has_template, ask=ask)
    read = [_read(row, source, kind) for row in rows]
    documents = [document for row in read for group in row.groups for document in group.documents]
    files = () if source.function else list_files(source)
    lengths, is_tokenized = count_tokens(documents, Path(model))
    return DataSummary(
        source=source,
        format=read[0].rendering,
        columns=tuple(map(str, rows[0])),
        rows=taken if taken < ROWS_READ else _count_rows(files, taken),
        is_counted=taken < ROWS_READ or bool(files),
        longest_tokens=int(lengths[int(0.99 * (len(lengths) - 1))]) + TEMPLATE_TOKENS,
        mean_tokens=(sum(lengths) / len(lengths) + TEMPLATE_TOKENS) * len(documents) / len(rows),
        is_tokenized=is_tokenized,
        kind=kind,
        sample=tuple(rows),
    )


def find_kind(row: Mapping[str, Any], source: DatasetSource) -> RowKind:
    """What a row holds: a pair of answers, a rated answer, or answers. Columns that a person names are answers."""
    if source.chosen_column or source.rejected_column:
        return "pairs"
    if source.completion_column or source.messages_column or source.text_column:
        return "answers"
    if None not in find_sides(row, source):
        return "pairs"
    is_rated = any(isinstance(row.get(column), bool) for column in LABEL_COLUMNS)
    return "ratings" if is_rated else "answers"


def choose_columns(
    row: Mapping[str, Any], source: DatasetSource, *, has_template: bool, ask: Ask | None
) -> DatasetSource:
    """`source` with what a recipe has to say of its columns: nothing, where our own readers recognize the row."""
    named = (source.messages_column, source.prompt_column, source.completion_column, source.text_column)
    if not any(named):
        try:
            found = parse_row(row, source)
        except BadRow as error:
            if not str(error).startswith("unknown format"):
                raise UserError(f"{source.origin}: {name_flags(str(error))}") from None
            source = _guess_columns(row, source) or _ask_columns(row, source, ask)
        else:
            if pair := find_common_pair(row, source):  # a recipe says what was recognized
                source = replace(source, prompt_column=pair[0], completion_column=pair[1])
            if found.format == "prompt_completion" and isinstance(found.document, Completion) and has_template:
                completion = "completion" if row.get("completion") is not None else "chosen"
                source = replace(source, prompt_column="prompt", completion_column=completion)
    if source.prompt_column and source.completion_column and source.type is None and has_template:
        source = replace(source, type="messages")
    return source


def _guess_columns(row: Mapping[str, Any], source: DatasetSource) -> DatasetSource | None:
    by_name = {str(column).lower(): str(column) for column, value in row.items() if isinstance(value, str)}
    numbers = {str(column).lower(): str(column) for column, value in row.items() if isinstance(value, int | float)}
    prompt = next((by_name[name] for name in (*QUESTION_COLUMNS, "user") if name in by_name), None)
    completion = next((by_name[name] for name in (*ANSWER_COLUMNS, "label") if name in by_name), None)
    number = next((numbers[name] for name in ANSWER_COLUMNS[:6] if name in numbers), None)
    if prompt is not None and completion is None and number is not None:
        raise UserError(
            f"{source.origin}: {number}: text is expected, found {describe_value(row[number])}; write it as "
            "text, in quotes"
        )
    if prompt is not None and completion is not None:
        return replace(source, prompt_column=prompt, completion_column=completion)
    text = next((by_name[name] for name in TEXT_COLUMNS if name in by_name), None)
    if text is None and len(by_name) == 1:
        text = next(iter(by_name.values()))
    return replace(source, text_column=text) if text is not None and prompt is None else None


def _ask_columns(row: Mapping[str, Any], source: DatasetSource, ask: Ask | None) -> DatasetSource:
    columns = list_columns(row) or "none"
    if ask is None:
        raise UserError(
            f"{source.origin}: its columns are {columns}; say which to read with --prompt-column and "
            "--completion-column, --messages-column or --text-column"
        )
    print(f"{source.origin}: its columns are {columns}")
    prompt = _ask_column("Which one holds the prompt or question? (none: plain text)", row, ask)
    if not prompt:
        return replace(source, text_column=_ask_column("Which one holds the text?", row, ask) or None)
    return replace(source, prompt_column=prompt, completion_column=_ask_column("Which one holds the answer?", row, ask))


def _ask_column(question: str, row: Mapping[str, Any], ask: Ask) -> str:
    while column := ask(question, ""):
        if column not in row:
            print(f"{column}: no such column; there are {list_columns(row)}")
        elif isinstance(row[column], int | float):
            print(f"{column}: text is expected, found {describe_value(row[column])}; write it as text, in quotes")
        else:
            break
    return column


def _read(row: Mapping[str, Any], source: DatasetSource, kind: RowKind) -> ParsedRow:
    try:
        return READERS[kind](row, source)
    except BadRow as error:
        raise UserError(f"{source.origin}: {name_flags(str(error))}") from None


def name_flags(text: str) -> str:
    """A message on a recipe's keys in the words of `finetune init`.

    >>> name_flags("to train on the chosen answers alone, set completion_column: chosen")
    'to train on the chosen answers alone, pass --completion-column chosen'
    """
    text = re.sub(rf"(?:set )?\b{COLUMN_KEY}: (\w+)", r"pass --\1-column \2", text)
    return re.sub(rf"\b{COLUMN_KEY}\b", r"--\1-column", text)


def count_tokens(documents: Sequence[Document], model: Path) -> tuple[list[float], bool]:
    """(the tokens of each document from the shortest on, whether the tokenizer in the folder `model` has counted them).

    Without one they are guessed from the characters. What a chat template adds is not counted.
    """
    texts = [join_text(document) for document in documents]
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    except Exception:  # tokenizers raises no class of its own; launch says what is wrong with the file
        return sorted(len(text) / CHARACTERS_A_TOKEN for text in texts), False
    return sorted(map(float, counts)), True


def join_text(document: Document) -> str:
    """About the text that a model reads of a document."""
    match document:
        case Text(text):
            return text
        case Completion(prompt, completion):
            return prompt + completion
        case Question(asked):
            return asked if isinstance(asked, str) else join_text(asked)
        case TokenRow(ids):
            return "x" * round(len(ids) * CHARACTERS_A_TOKEN)
        case Conversation(messages, _, tools):
            parts = [_describe_message(message) for message in messages]
            return "\n".join([*parts, *(json.dumps(tool, ensure_ascii=False, default=str) for tool in tools)])


def _describe_message(message: Mapping[str, Any]) -> str:
    if message.keys() <= {"role", "content", "input"} and isinstance(message.get("content"), str):
        return f"{message['role']}\n{message['content']}\n"
    return json.dumps(message, ensure_ascii=False, default=str)


def list_unread_files(source: DatasetSource) -> list[str]:
    """The data files in the folder that `source` names which are none of its split's, by their paths in the folder."""
    folder = Path(source.origin)
    if not folder.is_dir():
        return []
    read = {Path(file).resolve() for file in list_files(source)}
    unread = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.resolve() not in read)
    return sorted(str(path) for path in unread if _is_data(path))


def _is_data(path: Path) -> bool:
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    return file_kind(str(path)) is not None and not is_hidden and path.name not in SAVED_BESIDE_DATA


def _count_rows(files: Sequence[str], taken: int) -> int:
    """All rows of local files; of a data set of the hub or a function, those that were read."""
    from finetune.data.sources import count_rows

    return sum(count_rows(file, Path(file).stat().st_mtime_ns) for file in files) if files else taken
