"""Rows of retrieval: a query, a document that answers it, and others that do not, each embedded as
one vector.
"""

from collections.abc import Iterable
from typing import Any

from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import Columns, Group, ParsedRow, Row, Text
from finetune.data.messages import BadRow, list_columns

# As sentence-transformers' rows name them, and NeMo Automodel's.
QUERY = ("query", "anchor", "question")
POSITIVE = ("positive", "pos_doc", "document", "answer")
NEGATIVE = ("negative", "negatives", "neg_doc")
FORMAT = "retrieval"


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
    query = _take_text(columns, _find(row, source.prompt_column, QUERY, "query", "prompt_column"))
    positive = _take_text(
        columns, _find(row, source.chosen_column, POSITIVE, "document", "chosen_column")
    )
    negatives = list(_take_negatives(columns, source))[: data.num_negatives]
    if len(negatives) < data.num_negatives:
        raise BadRow(
            f"{len(negatives)} negatives, where num_negatives is {data.num_negatives}; lower it, "
            f"or add negatives ({', '.join(NEGATIVE)}, negative_1, ...; rejected_column names them)"
        )
    documents = (data.document_prompt + text for text in (positive, *negatives))
    texts = (data.query_prompt + query, *documents)
    return ParsedRow(
        (Group(tuple(map(Text, texts)), pooling=data.pooling),), FORMAT, columns.unused
    )


def _find(row: Row, named: str | None, usual: Iterable[str], what: str, key: str) -> str:
    """The column that holds the query or the document. Raises `BadRow` where there is none."""
    if named is not None:
        return named
    present = next((name for name in usual if row.get(name) is not None), None)
    if present is None:
        raise BadRow(f"no {what}: its columns are {list_columns(row) or 'none'} ({key} names it)")
    return present


def _take_text(columns: Columns, name: str) -> str:
    """The text of a column, or the first of its list."""
    value = columns.take(name)
    if isinstance(value, list):
        texts = list(_read_texts(value, name))
    else:
        texts = [columns.take_text(name, may_be_empty=False)]
    if not texts:
        raise BadRow(f"{name}: an empty list")
    return texts[0]


def _take_negatives(columns: Columns, source: DatasetSource) -> Iterable[str]:
    """The texts of the columns of negatives, in their order: negative, negatives, negative_1,
    negative_2, ...
    """
    numbered = sorted(
        (name for name in columns.row if _is_numbered(name)),
        key=lambda name: int(name.split("_")[1]),
    )
    named = (source.rejected_column,) if source.rejected_column else (*NEGATIVE, *numbered)
    for name in named:
        value = columns.take(name)
        if value is not None:
            yield from _read_texts(value if isinstance(value, list) else [value], name)


def _is_numbered(name: str) -> bool:
    return name.startswith("negative_") and name.removeprefix("negative_").isdigit()


def _read_texts(values: Iterable[Any], name: str) -> Iterable[str]:
    """Each of `values` as text, which it is, or holds as a `text`. Raises `BadRow`."""
    for value in values:
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise BadRow(f"{name}: text is expected, found {value!r:.100}")
        yield text
