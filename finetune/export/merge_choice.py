"""Which base an adapter that was trained on a quantized one is merged onto: measured, on rows of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import UserError
from finetune.export.comparison_rows import ComparisonRows, read_comparison_rows
from finetune.export.merge import choose_written_dtype
from finetune.export.merge_measure import TRAINED, MergedScore, can_be_measured, measure_merges
from finetune.export.options import ExportOptions, MergeOnto
from finetune.export.source import Source
from finetune.export.target import TargetModel

# In nats. The dequantized base is the one that was trained: the original must be better by more than rounding explains.
NOTICEABLE_LOSS = 1e-3


@dataclass(frozen=True, slots=True)
class MergeChoice:
    """The base that is merged onto, and what it was chosen by. Returned by `choose_merge`."""

    onto: MergeOnto
    reason: str
    rows: ComparisonRows | None = None
    measured: Mapping[str, MergedScore] = field(
        default_factory=dict
    )  # trained, original, dequantized; empty without rows


def choose_merge(
    source: Source, target: TargetModel, options: ExportOptions, log: Callable[[str], object]
) -> MergeChoice | None:
    """Measures both merged models beside the trained one, logs the numbers, and chooses. None where no adapter is merged, or
    its base was not quantized.

    Raises `UserError` where `--merge-onto` does not apply.
    """
    bits = source.quantization.bits
    if source.adapter is None or bits is None:
        if options.merge_onto is not None:
            raise UserError(f"{source.path}: --merge-onto: not known to be trained on a quantized base; omit it")
        return None
    if not options.model:
        return None
    if source.quantized and options.merge_onto == "original":
        raise UserError(
            f"{source.base}: --merge-onto original: the base is stored in {bits} bits; name the original with --base-model"
        )
    model: Any = target.model
    parameters, vocabulary = sum(p.numel() for p in model.parameters()), model.config.get_text_config().vocab_size
    rows = read_comparison_rows(source.run, parameters, vocabulary)
    if rows is None or not can_be_measured(source, target) or (options.merge_onto and not options.verify):
        onto = options.merge_onto or "dequantized"
        reason = (
            "as --merge-onto says" if options.merge_onto else "which the adapter was trained on; nothing was measured"
        )
        log(f"merged onto the {onto} base, {reason}")
        return MergeChoice(onto, reason)
    measured = measure_merges(source, target, choose_written_dtype(source, target, options), rows)
    choice = _choose(measured, rows, options.merge_onto)
    for line in describe_choice(choice, bits):
        log(line)
    return choice


def describe_choice(choice: MergeChoice, bits: int) -> list[str]:
    """What was measured, for the terminal."""
    if choice.rows is None:
        return []
    kind = "held-out" if choice.rows.held_out else "training"
    names = {TRAINED: f"{bits}-bit base + adapter", "original": "merged onto the original base"}
    names["dequantized"] = "merged onto the dequantized base"
    lines = [f"merge   on {len(choice.rows)} {kind} rows, {choice.rows.labeled_tokens:,} labeled tokens"]
    for name, found in choice.measured.items():
        difference = "" if name == TRAINED else f", largest logit difference {found.logit_difference:.3g}"
        lines.append(f"        {names[name]}: loss {found.loss:.4f}{difference}")
    return [*lines, f"        exported: onto the {choice.onto} base, {choice.reason}"]


def _choose(measured: Mapping[str, MergedScore], rows: ComparisonRows, asked: MergeOnto | None) -> MergeChoice:
    if asked is not None:
        return MergeChoice(asked, "as --merge-onto says", rows, measured)
    if "original" not in measured:
        return MergeChoice("dequantized", "for the base is stored quantized", rows, measured)
    gain = measured["dequantized"].loss - measured["original"].loss
    if gain > NOTICEABLE_LOSS:
        return MergeChoice("original", f"whose loss is lower by {gain:.4f}", rows, measured)
    if gain < -NOTICEABLE_LOSS:
        return MergeChoice("dequantized", f"whose loss is lower by {-gain:.4f}", rows, measured)
    return MergeChoice(
        "dequantized", "which the adapter was trained on; the losses are as good as equal", rows, measured
    )
