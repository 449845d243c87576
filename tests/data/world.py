"""A rank among others, for tests that need no process group; and examples without a file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from finetune.config.schema import Data, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.examples import Examples, cut
from finetune.data.formats import ParsedRow
from finetune.data.groups import GroupReader
from finetune.data.messages import BadRow
from finetune.data.sources import RowBatch
from finetune.data.token_store import TokenStore
from finetune.distributed.world import DataParallelRank


def Rank(  # noqa: N802
    rank: int = 0, size: int = 1, sequence_rank: int = 0, sequence_size: int = 1
) -> DataParallelRank:
    """Rank `rank` of `size` on one node."""
    return DataParallelRank(rank, size, rank, torch.device("cpu"), sequence_rank, sequence_size)


def store_of(
    documents: Sequence[Sequence[int]],
    first_trained: int = 1,
    group_size: int = 1,
    ratings: Sequence[int] = (),
) -> TokenStore:
    """A store of documents of the given token ids, each trained on from its token `first_trained` on; the rating of each group."""
    flat = np.array([token for document in documents for token in document], np.int32)
    labels = [
        [
            document[i + 1] if i + 1 >= first_trained and i + 1 < len(document) else IGNORE_INDEX
            for i in range(len(document))
        ]
        for document in documents
    ]
    lengths = [len(document) for document in documents]
    return TokenStore(
        input_ids=flat,
        labels=np.array([label for row in labels for label in row], np.int32),
        starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        trained=np.array([sum(label != IGNORE_INDEX for label in row) for row in labels], np.int32),
        files=np.zeros(len(documents), np.int32),
        rows=np.arange(len(documents)) // group_size + 1,
        hashes=np.array([hash(tuple(d)) & 0xFFFFFFFFFFFFFFFF for d in documents], np.uint64),
        ratings=np.repeat(
            np.array(ratings or [0] * (len(documents) // group_size), np.int8), group_size
        ),
        kept_starts=np.zeros(len(documents) + 1, np.int64),
        kept_bytes=np.zeros(0, np.uint8),
        first_images=None,
        image_starts=np.zeros(1, np.int64),
        image_bytes=np.zeros(0, np.uint8),
        image_hashes=np.zeros(0, np.uint64),
        facts={
            "files": ["made-up.jsonl"],
            "rows_read": len(documents),
            "tally": {"rows": {}, "where": {}},
            "group_size": group_size,
            "is_rated": bool(ratings),
            "is_asked": False,
        },
    )


def examples_of(
    lengths: Sequence[int], max_length: int = 64, group_size: int = 1, ratings: Sequence[int] = ()
) -> Examples:
    """Examples of the given lengths; the tokens of example i are 1000 * i, 1000 * i + 1, ..."""
    documents = [[1000 * i + t for t in range(length)] for i, length in enumerate(lengths)]
    return cut(store_of(documents, group_size=group_size, ratings=ratings), max_length, "error")[0]


def read_groups(
    kind: Any, data: Data, rows: Sequence[Any], source: DatasetSource
) -> list[ParsedRow | BadRow]:
    """The groups of each of `rows`, which are all rows of the source."""
    batch = RowBatch(source.path, tuple(range(len(rows))), tuple(rows))
    ((_, _, parsed_rows),) = GroupReader(kind, data).read_batches([(source, batch)])
    return parsed_rows
