"""The rows that a run with a quantized base keeps, so that its export can measure which merged model is the better one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.constants import IGNORE_INDEX
from finetune.data.examples import Examples
from finetune.errors import UserError
from finetune.files.durable import replace_file

ROWS_FILE = "comparison_rows.json"  # in the run's folder
ROW_TOKENS = 1024  # of a row, at most
MAX_TOKENS, MIN_TOKENS = 4096, 256  # of all rows, padding included
# Three models are computed on a CPU, in float32: for a large one fewer rows are taken, so that it ends in minutes.
FLOP_BUDGET = 25e12  # of one of them


@dataclass(frozen=True, slots=True)
class ComparisonRows:
    """Examples, padded on the right: attention is causal, so that what comes after an example does not matter to it."""

    input_ids: torch.Tensor  # int64[rows, tokens]
    labels: torch.Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    lengths: torch.Tensor  # int64[rows]
    held_out: bool  # else they were trained on: nothing is held out

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def labeled_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


def write_comparison_rows(folder: Path, examples: Examples, *, held_out: bool) -> None:
    """Writes the first of `examples` that have a label within ROW_TOKENS, at most MAX_TOKENS in all; of pairs, chosen sides."""
    examples = examples.answers()
    rows: list[dict[str, list[int]]] = []
    longest = 0
    for example_id in range(len(examples)):
        example = examples[example_id]
        ids, labels = example.input_ids[:ROW_TOKENS], example.labels[:ROW_TOKENS]
        if not (labels != IGNORE_INDEX).any():
            continue
        longest = max(longest, len(ids))
        if rows and (len(rows) + 1) * longest > MAX_TOKENS:
            break
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    replace_file(folder / ROWS_FILE, json.dumps({"held_out": held_out, "rows": rows}) + "\n")


def read_comparison_rows(folder: Path | None, parameters: int, vocabulary: int) -> ComparisonRows | None:
    """The rows of the run in `folder`: as many as a model of so many parameters computes within the budget, one at least.

    None where the run kept none. Raises `UserError` where the file is damaged, or holds ids beyond `vocabulary`.
    """
    if folder is None or not (folder / ROWS_FILE).is_file():
        return None
    try:
        content = json.loads((folder / ROWS_FILE).read_bytes())
        rows = [(_as_ids(row["input_ids"]), _as_ids(row["labels"])) for row in content["rows"]]
        held_out = content["held_out"] is True
        are_rows = all(_is_row(ids, labels, vocabulary) for ids, labels in rows)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
        are_rows = False
    if not are_rows:
        raise UserError(f"{folder / ROWS_FILE}: damaged; remove it, and decide with --merge-onto")
    rows = _first_within(rows, min(MAX_TOKENS, max(MIN_TOKENS, int(FLOP_BUDGET / (2 * parameters)))))
    if not rows:
        return None
    pad = torch.nn.utils.rnn.pad_sequence
    return ComparisonRows(
        input_ids=pad([ids for ids, _ in rows], batch_first=True),
        labels=pad([labels for _, labels in rows], batch_first=True, padding_value=IGNORE_INDEX),
        lengths=torch.tensor([len(ids) for ids, _ in rows]),
        held_out=held_out,
    )


Row = tuple[torch.Tensor, torch.Tensor]


def _first_within(rows: Sequence[Row], tokens: int) -> list[Row]:
    longest = 0
    for count, (ids, _) in enumerate(rows):
        longest = max(longest, len(ids))
        if count and (count + 1) * longest > tokens:
            return list(rows[:count])
    return list(rows)


def _is_row(ids: torch.Tensor, labels: torch.Tensor, vocabulary: int) -> bool:
    labeled = labels[labels != IGNORE_INDEX]
    return (
        ids.shape == labels.shape
        and ids.numel() > 0
        and labeled.numel() > 0
        and all(int(each.min()) >= 0 and int(each.max()) < vocabulary for each in (ids, labeled))
    )


def _as_ids(value: Any) -> torch.Tensor:
    return torch.tensor([int(each) for each in value], dtype=torch.int64)
