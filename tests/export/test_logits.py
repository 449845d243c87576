"""The logits by which an export is verified are those of transformers, for every family that is trained."""

from pathlib import Path

import pytest
import torch

from finetune.export.blocks import read_rows
from finetune.export.logits import prompts, stream_logits
from finetune.export.target import describe_target
from finetune.files.tensors import read_folder
from finetune.models.weights import convert_to_parameters
from tests.models.families import EVERY, build


@pytest.mark.parametrize("family", EVERY)
def test_streamed_logits_are_the_models(family: str, tmp_path: Path) -> None:
    model = build(family).eval()
    model.save_pretrained(tmp_path)
    target = describe_target(tmp_path)
    stored = convert_to_parameters(target.model, read_folder(tmp_path), str(tmp_path))

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        return read_rows(stored[target.tied.get(name, name)], start, stop)

    with torch.no_grad():
        truth = model(input_ids=prompts(model.config.vocab_size), use_cache=False).logits
    for _ in range(2):  # the second time on the model as the first has left it
        found = stream_logits(target.model, rows)
        assert float((found - truth).norm() / truth.norm()) < 1e-5
        assert all(parameter.is_meta for parameter in target.model.parameters())
