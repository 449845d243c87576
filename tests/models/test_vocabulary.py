"""Embedding and head that have grown: which rows are the file's and which the mean, whatever slice is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.config.pretrained import Vocabulary
from finetune.files.tensors import read_folder
from finetune.models.embedding import make_grown_reader


@pytest.mark.parametrize(
    ("known", "tokens", "rows", "new"),
    [
        (10, 12, 16, range(10, 16)),  # outgrown: new tokens, and rows that fill up
        (7, 9, 10, range(7, 9)),  # the file has spare rows, of which two are used
        (8, 11, 12, range(8, 12)),  # both
    ],
)
def test_rows_of_added_tokens_are_the_mean_of_the_known(
    known: int, tokens: int, rows: int, new: range, tmp_path: Path
) -> None:
    weight = torch.randn(10, 6).bfloat16()
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    read = make_grown_reader(read_folder(tmp_path)["weight"], Vocabulary(known, tokens, rows))
    whole = read((slice(0, rows), slice(0, 6)))
    mean = weight[:known].double().mean(0).float()
    for row in range(rows):
        torch.testing.assert_close(
            whole[row], mean if row in new else weight[row].float(), atol=0, rtol=1e-6
        )
    for start in range(rows + 1):  # as ranks read it, of which the last may have no rows
        part = read((slice(start, min(start + 5, rows)), slice(2, 5)))
        assert torch.equal(part, whole[start : start + 5, 2:5])
