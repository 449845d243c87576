"""Rows of retrieval: a query with documents, for embedding models and for rerankers.

An embedding model makes one vector of each text. A reranker scores a query and a document together.
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
from finetune.data.messages import BadRow, list_columns, parse_list, parse_number
from finetune.units import is_fp32_number

# The columns' usual names, in sentence-transformers and NeMo Automodel.
QUERY = ("query", "anchor", "question")
OF_RETRIEVAL_ALONE = ("positive", "pos_doc")  # columns that no other kind of row has
POSITIVE = (*OF_RETRIEVAL_ALONE, "document", "answer")
NEGATIVE = ("negative", "negatives", "neg_doc")
FORMAT = "retrieval"
# Columns with all documents of a query, and with a score for each document.
CANDIDATES = ("documents", "docs", "document", "passages", "passage", "answer", "response")
LABELS = ("labels", "label", "scores", "score")


def parse_retrieval(row: Row, source: DatasetSource, data: Data) -> ParsedRow:
    """Reads a query, the document that answers it, and the first `num_negatives` negatives.

    The group's documents stand in this order, each with the recipe's prompt before it. Raises
    `BadRow` if a text is missing or there are too few negatives.

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
    """Reads a query and its first `num_negatives` + 1 documents, with their relevance scores.

    The scores stand in a column of labels. Without such a column the positive has score 1 and the
    negatives have 0. Each document is joined to the query as one text. Raises `BadRow`.

    >>> row = {"query": "2+2?", "documents": ["4", "5"], "labels": [1, 0]}
    >>> group = parse_ranked(
    ...     row, DatasetSource(path="sums.jsonl"), Data(num_negatives=1, document_prompt=" - ")
    ... ).groups[0]
    >>> [document.text for document in group.documents]
    ['2+2? - 4', '2+2? - 5']
    """
    columns = Columns(row)
    query = _take_query(columns, source)
    label_names = (source.label_column,) if source.label_column else LABELS
    label_column = first_given(row, label_names)
    if label_column is None:
        texts, scores = _take_positive_and_negatives(columns, source)
    else:
        name = _find_document_column(row, source, CANDIDATES)
        texts = list(_read_texts(_take_list(columns, name), name))
        scores = list(_read_scores(_take_list(columns, label_column), label_column))
        if len(texts) != len(scores):
            raise BadRow(
                f"{label_column}: {len(scores)} numbers for {len(texts)} documents in {name}"
            )
    count = 1 + data.num_negatives
    if len(texts) < count:
        raise BadRow(
            f"{len(texts)} documents, where num_negatives: {data.num_negatives} asks for {count}; "
            "lower it, or add documents"
        )
    if label_column is None and count == 1:
        raise BadRow(
            "a document without a label says nothing where num_negatives is 0; set num_negatives, "
            f"or label the document ({', '.join(LABELS)}; label_column names it)"
        )
    before_document = data.query_prompt + query + data.document_prompt
    documents = tuple(Candidate(before_document + text) for text in texts[:count])
    labels = tuple(map(label_of_number, scores[:count]))
    findings = tuple(_find_score_faults(scores[:count], scores[count:]))
    return ParsedRow((Group(documents, labels=labels),), "ranked", columns.unused, findings)


def _find_score_faults(read: Sequence[float], unread: Sequence[float]) -> Iterator[str]:
    """Yields the names of the findings about the scores of a query's documents.

    Args:
        read: Scores of the documents that are trained on.
        unread: Scores of the documents beyond `num_negatives` + 1, which are left out.
    """
    if max(unread, default=0.0) > max(read):
        yield "best_unread"
    if len(read) > 1 and len(set(read)) == 1:
        yield "same_scores"


def _take_positive_and_negatives(
    columns: Columns, source: DatasetSource
) -> tuple[list[str], list[float]]:
    """Returns the texts of the positive and the negatives, and their scores: 1, then zeros."""
    name = _find_document_column(columns.row, source, POSITIVE)
    texts = [_take_text(columns, name), *_take_negatives(columns, source)]
    return texts, [1.0] + [0.0] * (len(texts) - 1)


def _take_list(columns: Columns, name: str) -> list[Any]:
    """Takes the list of a column, which may be JSON text; of any other value a list of it alone."""
    value = parse_list(columns.take(name), name)
    return value if isinstance(value, list) else [value]


def _read_scores(values: Iterable[Any], name: str) -> Iterable[float]:
    """Yields the scores as floats. Raises `BadRow` for a value that is no number, or negative."""
    for value in values:
        score = parse_number(value)
        if not is_fp32_number(score) or score < 0:
            raise BadRow(
                f"{name}: a number from 0 on is expected, of at most 3.4e38, found {value!r:.100}"
            )
        yield float(score)


def write_pair_template(data: Data, bos: str, eos: str) -> str:
    """Makes a chat template that joins a query and a document as `parse_ranked` does.

    sentence-transformers gives the template messages of the roles query and document. A message of
    any other role is written without a prompt, since it holds the joined text.

    Args:
        data: Has the prompts for query and document.
        bos: What the tokenizer writes before plain text.
        eos: What the tokenizer writes after plain text.
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
    """Returns the query's text. Raises `BadRow` if the row has none."""
    name = _find_column(columns.row, source.prompt_column, QUERY, "query", "prompt_column")
    return _take_text(columns, name)


def _find_document_column(row: Row, source: DatasetSource, usual: Iterable[str]) -> str:
    """Returns the name of the column with the document or documents.

    That is the source's chosen_column, else the first of `usual` with a value in the row. Raises
    `BadRow` if there is none.
    """
    return _find_column(row, source.chosen_column, usual, "document", "chosen_column")


def _find_column(row: Row, named: str | None, usual: Iterable[str], what: str, key: str) -> str:
    """Returns the name of a column: `named`, else the first of `usual` with a value in the row.

    Args:
        row: The row.
        named: The column that the recipe names; None if it names none.
        usual: The column's usual names.
        what: What the column holds, for the error.
        key: The recipe key that names the column, for the error.

    Raises:
        BadRow: `named` is None, and the row has a value in none of `usual`.
    """
    if named is not None:
        return named
    present = first_given(row, usual)
    if present is None:
        raise BadRow(f"no {what}: its columns are {list_columns(row) or 'none'} ({key} names it)")
    return present


def _take_text(columns: Columns, name: str) -> str:
    """Returns the text of a column, or the first text if the column holds a list.

    Raises `BadRow` if there is no text, or an empty one.
    """
    value = parse_list(columns.take(name), name)
    if isinstance(value, list):
        texts = list(_read_texts(value, name))
    else:
        texts = [columns.take_text(name, may_be_empty=False)]
    if not texts:
        raise BadRow(f"{name}: an empty list")
    return texts[0]


def _take_negatives(columns: Columns, source: DatasetSource) -> Iterable[str]:
    """Yields the texts of all negatives of a row; a column may hold one text or a list.

    The columns are the source's rejected_column if it names one; else those of NEGATIVE, then
    negative_1, negative_2, ... by number.
    """
    numbered = sorted(
        (name for name in columns.row if _is_numbered_negative(name)),
        key=lambda name: int(name.split("_")[1]),
    )
    names = (source.rejected_column,) if source.rejected_column else (*NEGATIVE, *numbered)
    for name in names:
        if columns.take(name) is not None:
            yield from _read_texts(_take_list(columns, name), name)


def _is_numbered_negative(name: str) -> bool:
    return name.startswith("negative_") and name.removeprefix("negative_").isdecimal()


def _read_texts(values: Iterable[Any], name: str) -> Iterable[str]:
    """Yields the text of each value, which is a text or a mapping with a `text`.

    Raises `BadRow` for any other value, and for an empty text. `name`: the column, for errors.
    """
    for value in values:
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise BadRow(f"{name}: text is expected, found {value!r:.100}")
        yield text
