"""Rows of retrieval: a query, a document that answers it, and others that do not, each embedded as
one vector.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import (
    Candidate,
    Columns,
    Group,
    ParsedRow,
    Row,
    Text,
    first_given,
    label_of_number,
)
from finetune.data.messages import BadRow, list_columns
from finetune.units import is_fp32_number

# As sentence-transformers' rows name them, and NeMo Automodel's.
QUERY = ("query", "anchor", "question")
OF_RETRIEVAL_ALONE = ("positive", "pos_doc")  # which rows of no other kind have
POSITIVE = (*OF_RETRIEVAL_ALONE, "document", "answer")
NEGATIVE = ("negative", "negatives", "neg_doc")
FORMAT = "retrieval"
# of queries whose documents are scored beside them
CANDIDATES = ("documents", "docs", "document", "passages", "passage", "answer", "response")
LABELS = ("labels", "label", "scores", "score")


def parse_retrieval(row: Row, source: DatasetSource, data: Data) -> ParsedRow:
    """Reads a query with its document and the first `num_negatives` of its negatives.

    Raises `BadRow`.

    >>> row = {"anchor": "2+2?", "positive": "4", "negative": "5"}
    >>> parsed = parse_retrieval(
    ...     row, DatasetSource(path="sums.jsonl"), Data(num_negatives=1, query_prompt="Sum: ")
    ... )
    >>> [document.text for document in parsed.groups[0].documents]
    ['Sum: 2+2?', '4', '5']
    """
    columns = Columns(row)
    query = _take_query(columns, source)
    positive = _take_text(columns, _find_document_column(row, source, POSITIVE))
    negatives = list(_take_negatives(columns, source))[: data.num_negatives]
    if len(negatives) < data.num_negatives:
        raise BadRow(
            f"{len(negatives)} negatives, where num_negatives is {data.num_negatives}; lower it, "
            f"or add negatives ({', '.join(NEGATIVE)}, negative_1, ...; rejected_column names them)"
        )
    documents = [Text(data.query_prompt + query)]
    documents += [Text(data.document_prompt + text) for text in (positive, *negatives)]
    group = Group(tuple(documents), pooling=data.pooling)
    findings = ("same_texts",) if positive in (query, *negatives) else ()
    return ParsedRow((group,), FORMAT, columns.unused, findings)


def parse_ranked(row: Row, source: DatasetSource, data: Data) -> ParsedRow:
    """Reads a query with `num_negatives` + 1 documents, each with a score of how well it answers.

    Raises `BadRow`.

    >>> row = {"query": "2+2?", "documents": ["4", "5"], "labels": [1, 0]}
    >>> group = parse_ranked(
    ...     row, DatasetSource(path="sums.jsonl"), Data(num_negatives=1, document_prompt=" - ")
    ... ).groups[0]
    >>> [document.text for document in group.documents]
    ['2+2? - 4', '2+2? - 5']
    """
    columns = Columns(row)
    query = _take_query(columns, source)
    named = (source.label_column,) if source.label_column else LABELS
    label = first_given(row, named)
    if label is None:
        texts, numbers = _take_by_columns(columns, source)
    else:
        name = _find_document_column(row, source, CANDIDATES)
        texts = list(_read_texts(_as_list(columns.take(name)), name))
        numbers = list(_read_numbers(_as_list(columns.take(label)), label))
        if len(texts) != len(numbers):
            raise BadRow(f"{label}: {len(numbers)} numbers for {len(texts)} documents in {name}")
    count = 1 + data.num_negatives
    if len(texts) < count:
        raise BadRow(
            f"{len(texts)} documents, where num_negatives: {data.num_negatives} asks for {count}; "
            "lower it, or add documents"
        )
    if label is None and count == 1:
        raise BadRow(
            "a document without a label says nothing where num_negatives is 0; set num_negatives, "
            f"or label the document ({', '.join(LABELS)}; label_column names it)"
        )
    begin = data.query_prompt + query + data.document_prompt
    documents = tuple(Candidate(begin + text) for text in texts[:count])
    labels = tuple(map(label_of_number, numbers[:count]))
    findings = tuple(_find_faults(numbers[:count], numbers[count:]))
    return ParsedRow((Group(documents, labels=labels),), "ranked", columns.unused, findings)


def _find_faults(read: Sequence[float], unread: Sequence[float]) -> Iterator[str]:
    """Yields what the scores of a query's documents, read and unread, show to be wrong."""
    if max(unread, default=0.0) > max(read):
        yield "best_unread"
    if len(read) > 1 and len(set(read)) == 1:
        yield "same_scores"


def _take_by_columns(columns: Columns, source: DatasetSource) -> tuple[list[str], list[float]]:
    """Returns (the document that answers and its negatives; their scores, 1 and zeros)."""
    name = _find_document_column(columns.row, source, POSITIVE)
    texts = [_take_text(columns, name), *_take_negatives(columns, source)]
    return texts, [1.0] + [0.0] * (len(texts) - 1)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_numbers(values: Iterable[Any], name: str) -> Iterable[float]:
    """Yields each of `values` as a float from 0 on. Raises `BadRow`."""
    for value in values:
        if not is_fp32_number(value) or value < 0:
            raise BadRow(
                f"{name}: a number from 0 on is expected, of at most 3.4e38, found {value!r:.100}"
            )
        yield float(value)


def write_pair_template(data: Data, bos: str, eos: str) -> str:
    """Writes the chat template by which sentence-transformers puts a query before a document.

    It writes what `parse_ranked` does. A message of another role is such a text already.

    Args:
        data: With the prompts of query and document.
        bos: What the tokenizer writes before plain text.
        eos: What it writes after it.
    """
    texts = (bos, data.query_prompt, data.document_prompt, eos)
    before, query, document, after = (json.dumps(text, ensure_ascii=False) for text in texts)
    return (
        f"{{{{ {before} }}}}{{% for message in messages %}}"
        f'{{% if message["role"] == "query" %}}{{{{ {query} }}}}{{% endif %}}'
        f'{{% if message["role"] == "document" %}}{{{{ {document} }}}}{{% endif %}}'
        f'{{{{ message["content"] }}}}{{% endfor %}}{{{{ {after} }}}}'
    )


def _take_query(columns: Columns, source: DatasetSource) -> str:
    """Returns the query's text. Raises `BadRow` where there is none."""
    name = _find_column(columns.row, source.prompt_column, QUERY, "query", "prompt_column")
    return _take_text(columns, name)


def _find_document_column(row: Row, source: DatasetSource, usual: Iterable[str]) -> str:
    """Returns the column that holds the document. Raises `BadRow` where there is none."""
    return _find_column(row, source.chosen_column, usual, "document", "chosen_column")


def _find_column(row: Row, named: str | None, usual: Iterable[str], what: str, key: str) -> str:
    """Returns the column that holds what is asked for.

    Args:
        row: The row.
        named: The column that the source names; None: the first of `usual` with a value.
        usual: The names that the column may have.
        what: What it holds, for errors.
        key: The source's key that names it, for errors.

    Raises:
        BadRow: The source names none, and the row has none of `usual`.
    """
    if named is not None:
        return named
    present = first_given(row, usual)
    if present is None:
        raise BadRow(f"no {what}: its columns are {list_columns(row) or 'none'} ({key} names it)")
    return present


def _take_text(columns: Columns, name: str) -> str:
    """Returns the text of a column, or the first text of its list. Raises `BadRow`."""
    value = columns.take(name)
    if isinstance(value, list):
        texts = list(_read_texts(value, name))
    else:
        texts = [columns.take_text(name, may_be_empty=False)]
    if not texts:
        raise BadRow(f"{name}: an empty list")
    return texts[0]


def _take_negatives(columns: Columns, source: DatasetSource) -> Iterable[str]:
    """Yields the texts of the columns of negatives.

    Their order is that of NEGATIVE, then negative_1, negative_2, ... by number.
    """
    numbered = sorted(
        (name for name in columns.row if _is_numbered(name)),
        key=lambda name: int(name.split("_")[1]),
    )
    named = (source.rejected_column,) if source.rejected_column else (*NEGATIVE, *numbered)
    for name in named:
        value = columns.take(name)
        if value is not None:
            yield from _read_texts(_as_list(value), name)


def _is_numbered(name: str) -> bool:
    return name.startswith("negative_") and name.removeprefix("negative_").isdecimal()


def _read_texts(values: Iterable[Any], name: str) -> Iterable[str]:
    """Yields the text of each value: a text, or a mapping with a `text`. Raises `BadRow`."""
    for value in values:
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise BadRow(f"{name}: text is expected, found {value!r:.100}")
        yield text
