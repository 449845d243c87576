"""The trained model of an adapter on a quantized base, and both ways of merging it, measured in one pass over the base's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.constants import IGNORE_INDEX, loss_chunk_tokens
from finetune.export.blocks import Value, cast_rows
from finetune.export.comparison_rows import ComparisonRows
from finetune.export.logits import Rows, stream
from finetune.export.merge import find_quantized, find_stored, make_dequantizer, plan_values
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.models.head_chunks import LogitTransform

TRAINED = "trained"  # the quantized base with the adapter beside it


@dataclass(frozen=True, slots=True)
class MergedScore:
    """A model on the comparison rows, computed in float32."""

    loss: float  # per labeled token, in nats
    logit_difference: float  # the largest from the trained model's


def can_be_measured(source: Source, target: TargetModel) -> bool:
    """Whether all that is quantized is read by plain linear layers, which alone can have several weights at once."""
    modules = (target.model.get_submodule(name.rpartition(".")[0]) for name in find_quantized(source, target))
    return all(type(module) is nn.Linear for module in modules)


def measure_merges(
    source: Source, target: TargetModel, dtype: torch.dtype, rows: ComparisonRows
) -> dict[str, MergedScore]:
    """The trained model and both merged ones, in one pass over the base's files: each weight is quantized once.

    The trained one computes W x + B A x as (W + B A) x in float32, W dequantized to the compute dtype; the merged ones are
    rounded to `dtype`, in which they are written. A base that is stored quantized has no original.
    """
    stored, read_dequantized = find_stored(source, target), make_dequantizer(source)
    variants = {TRAINED: plan_values(source, target, stored, torch.float32, "dequantized", read_dequantized)}
    if not source.quantized:
        variants["original"] = plan_values(source, target, stored, dtype, "original")
    variants["dequantized"] = plan_values(source, target, stored, dtype, "dequantized", read_dequantized)
    found = _measure(target.model, [_rows_of(values, target) for values in variants.values()], rows)
    return dict(zip(variants, found, strict=True))


def _rows_of(values: Mapping[str, Value], target: TargetModel) -> Rows:
    return lambda name, start, stop: cast_rows(values[target.tied.get(name, name)], start, stop)


@torch.no_grad()
def _measure(model: nn.Module, variants: Sequence[Rows], rows: ComparisonRows) -> list[MergedScore]:
    """Each variant on `rows`; the first is the one that logits are compared with. Logits are never whole."""
    plain: Any = model
    count, transform = len(variants), LogitTransform.from_config(plain.config)
    chunk = max(1, loss_chunk_tokens(plain.config.get_text_config().vocab_size, "cpu") // count)
    real = (torch.arange(rows.input_ids.shape[1]) < rows.lengths[:, None]).flatten()
    labels = rows.labels.flatten()[real]
    losses, differences = torch.zeros(count, dtype=torch.float64), torch.zeros(count)
    with stream(model, variants):
        trunk = getattr(plain, plain.base_model_prefix)
        hidden = trunk(input_ids=rows.input_ids.repeat(count, 1), use_cache=False).last_hidden_state
        hidden = hidden.reshape(count, real.numel(), -1)[:, real]
        for start in range(0, len(labels), chunk):
            scores, _ = transform.forward(plain.get_output_embeddings()(hidden[:, start : start + chunk]).float())
            wanted = labels[start : start + chunk].repeat(count)
            each = functional.cross_entropy(scores.flatten(0, 1), wanted, ignore_index=IGNORE_INDEX, reduction="none")
            losses += each.view(count, -1).double().sum(1)
            differences = torch.maximum(differences, (scores - scores[:1]).abs().flatten(1).amax(1))
    losses /= rows.labeled_tokens
    return [
        MergedScore(loss, difference) for loss, difference in zip(losses.tolist(), differences.tolist(), strict=True)
    ]
