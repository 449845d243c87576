"""The logits by which an export is verified are those of transformers, for every family that is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.export.logits import Logits, make_prompts, stream_logits
from finetune.export.merge_choice import ComparisonRows, measure
from finetune.export.target import describe_target, read_rows
from finetune.files.tensors import read_folder
from finetune.models.weights import convert_to_parameters
from tests.models.families import (
    EVERY,
    LONG_CONTEXT,
    build,
    documents,
    forget_lengths,
    padded,
    plain_loss,
)


@pytest.mark.parametrize("family", EVERY)
def test_streamed_logits_are_the_models(family: str, tmp_path: Path) -> None:
    model = build(family).eval()
    model.save_pretrained(tmp_path)
    target = describe_target(tmp_path)
    stored = convert_to_parameters(target.model, read_folder(tmp_path), str(tmp_path))

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        return read_rows(stored[target.tied.get(name, name)], start, stop)

    with torch.no_grad():
        truth = model(input_ids=make_prompts(model.config.vocab_size), use_cache=False).logits
    for _ in range(2):  # the second time on the model as the first has left it
        found = stream_logits(target.model, rows).values
        assert float((found - truth).norm() / truth.norm()) < 1e-5
        assert all(parameter.is_meta for parameter in target.model.parameters())


@pytest.mark.parametrize(("family", "config"), LONG_CONTEXT.items())
def test_merges_aremeasured_on_each_row_as_if_it_were_alone(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Rows below and beyond the length at which RoPE changes its frequencies, padded into one batch; two variants."""
    model = build(family, **config).eval()
    forget_lengths(model)
    model.save_pretrained(tmp_path)
    target = describe_target(tmp_path)
    stored = convert_to_parameters(target.model, read_folder(tmp_path), str(tmp_path))
    examples = documents()
    batch = padded(examples)
    rows = ComparisonRows(
        batch["input_ids"], batch["labels"], torch.tensor(batch["document_lengths"]), held_out=True
    )
    with torch.no_grad():
        truth = plain_loss(model, examples).item() / rows.labeled_tokens
    read = lambda name, start, stop: read_rows(stored[target.tied.get(name, name)], start, stop)  # noqa: E731
    for found in measure(target.model, [read, read], rows):
        assert found.loss == pytest.approx(truth, rel=1e-6)
        assert found.logit_difference == 0


def test_the_median_difference_is_that_of_most_tokens() -> None:
    """However far a third of the tokens are, as those that another program sends to other experts."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 16, 50, generator=generator)
    near = values * (1 + 0.01 * torch.randn(values.shape, generator=generator))
    near[:, ::3] = torch.randn(2, 6, 50, generator=generator)
    of_all = Logits(near, []).relative_difference(Logits(values, []))
    of_half = Logits(near, []).median_difference(Logits(values, []))
    assert of_all > 0.5 and 0.005 < of_half < 0.02
