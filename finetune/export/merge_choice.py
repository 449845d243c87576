"""Which base an adapter that was trained on a quantized one is merged onto: measured, on rows of
the run.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.constants import IGNORE_INDEX, loss_chunk_tokens
from finetune.data.examples import Examples
from finetune.distributed.model_parts import head_of, trunk_of
from finetune.errors import UserError
from finetune.export.logits import RoundInputs, Rows, stream_values
from finetune.export.publish import ExportOptions, MergeOnto
from finetune.export.source import Source
from finetune.export.target import TargetModel, Value, cast_rows
from finetune.export.values import (
    choose_written_dtype,
    find_quantized,
    find_stored,
    make_dequantizer,
    plan_values,
)
from finetune.files.durable import replace_file
from finetune.files.json_files import parse_json, read_bounded
from finetune.models.documents import depends_on_length, install_document_rotary
from finetune.models.head_factors import measure_head_factors

ROWS_FILE = "comparison_rows.json"  # in the run's folder
ROW_TOKENS = 1024  # of a row, at most
MAX_TOKENS = 4096
MIN_TOKENS = 256  # of all rows, padding included
# Three models are computed on a CPU, in float32: for a large one fewer rows are taken, so that it
# ends in minutes.
FLOP_BUDGET = 25e12  # of one of them


@dataclass(frozen=True, slots=True)
class ComparisonRows:
    """Examples, padded on the right: attention is causal, so that what comes after an example does
    not matter to it.
    """

    input_ids: Tensor  # int64[rows, tokens]
    labels: Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    lengths: Tensor  # int64[rows]
    held_out: bool  # else they were trained on: nothing is held out

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def labeled_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


def write_comparison_rows(folder: Path, examples: Examples, *, held_out: bool) -> None:
    """Writes the first labeled `examples` within ROW_TOKENS, at most MAX_TOKENS in all; of pairs,
    chosen sides.
    """
    answers = examples.answers()
    each = (answers[number] for number in range(len(answers)))
    cut = ((example.input_ids[:ROW_TOKENS], example.labels[:ROW_TOKENS]) for example in each)
    rows = _take_within((row for row in cut if (row[1] != IGNORE_INDEX).any()), MAX_TOKENS)
    written = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in rows]
    replace_file(folder / ROWS_FILE, json.dumps({"held_out": held_out, "rows": written}) + "\n")


def read_comparison_rows(
    folder: Path | None, parameters: int, vocabulary: int
) -> ComparisonRows | None:
    """The rows of the run in `folder`: as many as a model of that size computes within the budget,
    at least one.

    None where the run kept none. Raises `UserError` where the file is damaged, or holds ids beyond
    `vocabulary`.
    """
    if folder is None or not (folder / ROWS_FILE).is_file():
        return None
    try:
        content = parse_json(read_bounded(folder / ROWS_FILE))
        rows = [
            (torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in content["rows"]
        ]
        held_out = content["held_out"] is True
        are_rows = all(_is_row(ids, labels, vocabulary) for ids, labels in rows)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
        are_rows = False
    if not are_rows:
        raise UserError(f"{folder / ROWS_FILE}: damaged; remove it, and decide with --merge-onto")
    rows = _take_within(rows, min(MAX_TOKENS, max(MIN_TOKENS, int(FLOP_BUDGET / (2 * parameters)))))
    if not rows:
        return None
    pad = torch.nn.utils.rnn.pad_sequence
    return ComparisonRows(
        input_ids=pad([ids for ids, _ in rows], batch_first=True),
        labels=pad([labels for _, labels in rows], batch_first=True, padding_value=IGNORE_INDEX),
        lengths=torch.tensor([len(ids) for ids, _ in rows]),
        held_out=held_out,
    )


Row = tuple[Any, Any]  # ids and labels, of one length


def _take_within(rows: Iterable[Row], tokens: int) -> list[Row]:
    """The first of `rows`, one at least, as many as have at most `tokens` together when they are
    padded.
    """
    taken = list[Row]()
    longest = 0
    for row in rows:
        longest = max(longest, len(row[0]))
        if taken and (len(taken) + 1) * longest > tokens:
            break
        taken.append(row)
    return taken


def _is_row(ids: Tensor, labels: Tensor, vocabulary: int) -> bool:
    labeled = labels[labels != IGNORE_INDEX]
    numbers = torch.cat([ids, labeled])
    are_ids = (
        numbers.dtype == torch.int64
        and len(labeled) > 0
        and 0 <= int(numbers.min()) <= int(numbers.max())
    )
    return ids.shape == labels.shape and are_ids and int(numbers.max()) < vocabulary


TRAINED = "trained"  # the quantized base with the adapter beside it


@dataclass(frozen=True, slots=True)
class MergedScore:
    """A model on the comparison rows, computed in float32."""

    loss: float  # per labeled token, in nats
    logit_difference: float  # the largest from the trained model's
    divergence: float = 0.0  # KL from the trained model's probabilities, per labeled token, in nats


def can_be_measured(source: Source, target: TargetModel) -> bool:
    """Whether all that is quantized is read by plain linear layers, which alone can have several
    weights at once.
    """
    modules = (
        target.model.get_submodule(name.rpartition(".")[0])
        for name in find_quantized(source, target)
    )
    return all(type(module) is nn.Linear for module in modules)


def measure_merges(
    source: Source, target: TargetModel, dtype: torch.dtype, rows: ComparisonRows
) -> dict[str, MergedScore]:
    """The trained model and both merged ones, in one pass over the base's files: each weight is
    quantized once.

    The trained one computes W x + B A x as (W + B A) x in float32, W dequantized to the compute
    dtype; the merged ones are rounded to `dtype`, in which they are written. A base that is stored
    quantized has no original.
    """
    stored = find_stored(source, target)
    read_dequantized = make_dequantizer(source)
    variants = {
        TRAINED: plan_values(source, target, stored, torch.float32, "dequantized", read_dequantized)
    }
    if not source.quantized:
        variants["original"] = plan_values(source, target, stored, dtype, "original")
    variants["dequantized"] = plan_values(
        source, target, stored, dtype, "dequantized", read_dequantized
    )
    scores = measure(target.model, [rows_of(values, target) for values in variants.values()], rows)
    return dict(zip(variants, scores, strict=True))


def rows_of(values: Mapping[str, Value], target: TargetModel) -> Rows:
    """The rows of `values`, tied ones too, as they are written."""
    return lambda name, start, stop: cast_rows(values[target.tied.get(name, name)], start, stop)


@torch.no_grad()
def measure(
    model: nn.Module,
    variants: Sequence[Rows],
    rows: ComparisonRows,
    round_inputs: Sequence[RoundInputs | None] = (),
) -> list[MergedScore]:
    """Each variant on `rows`; the first is the one that logits are compared with.

    Logits are never whole.

    round_inputs: of each variant, what is done to the inputs of linear layers; none: nothing.
    """
    plain: Any = model
    count = len(variants)
    factors = measure_head_factors(plain)
    inputs = {name: ids.repeat(count, 1) for name, ids in _make_inputs(model, rows).items()}
    is_token = (torch.arange(rows.input_ids.shape[1]) < rows.lengths[:, None]).flatten()
    labels = rows.labels.flatten()[is_token]
    sums = _Sums(count)
    with stream_values(model, variants, round_inputs):
        hidden = trunk_of(plain)(**inputs, use_cache=False).last_hidden_state * factors.input_scale
        hidden = hidden.reshape(count, is_token.numel(), -1)[:, is_token]
        vocabulary = plain.config.get_text_config().vocab_size
        chunk = max(1, loss_chunk_tokens(vocabulary, "cpu") // count)
        for some, own_labels in zip(
            torch.split(hidden, chunk, 1), torch.split(labels, chunk), strict=True
        ):
            logits, _ = factors.logits.forward(head_of(plain)(some).float())
            sums.add(logits, own_labels)
    return sums.average(rows.labeled_tokens)


def _make_inputs(model: nn.Module, rows: ComparisonRows) -> dict[str, Tensor]:
    inputs = {"input_ids": rows.input_ids}
    if depends_on_length(model):  # a row ends at its largest position; what pads it stays there
        install_document_rotary(model)
        places = torch.arange(rows.input_ids.shape[1])
        inputs["position_ids"] = places.minimum(rows.lengths[:, None] - 1)
    return inputs


class _Sums:
    """The sums of each variant over tokens: the loss, the largest difference of a logit from the
    first variant's, and the divergence from the first variant.
    """

    def __init__(self, variants: int) -> None:
        self.losses = torch.zeros(variants, dtype=torch.float64)
        self.differences = torch.zeros(variants)
        self.divergences = torch.zeros(variants, dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a chunk of tokens. `logits`: fp32[variants, tokens, vocabulary]; `labels`:
        int64[tokens].
        """
        is_labeled = labels != IGNORE_INDEX
        log_probabilities = logits[:, is_labeled].log_softmax(-1)
        wanted = labels[is_labeled].expand(len(logits), -1)
        losses = -log_probabilities.gather(-1, wanted[..., None])
        self.losses += losses.double().sum((1, 2))
        differences = (logits - logits[:1]).abs().flatten(1).amax(1)
        self.differences = torch.maximum(self.differences, differences)
        first = log_probabilities[:1]
        divergences = first.exp() * (first - log_probabilities)
        self.divergences += divergences.flatten(1).double().sum(1)

    def average(self, tokens: int) -> list[MergedScore]:
        """The means over `tokens` labeled ones."""
        losses = (self.losses / tokens).tolist()
        divergences = (self.divergences / tokens).tolist()
        differences = self.differences.tolist()
        return [MergedScore(*each) for each in zip(losses, differences, divergences, strict=True)]


# In nats. The dequantized base is the one that was trained: the original must be better by more
# than rounding explains.
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
    """Measures both merged models beside the trained one, logs the numbers, and chooses.

    None where no adapter is merged, or its base was not quantized.
    """
    bits = source.quantization.bits
    if source.adapter is None or bits is None:
        return None
    if not options.model:
        return None
    if source.quantized and options.merge_onto == "original":
        raise UserError(
            f"{source.base}: --merge-onto original: the base is stored in {bits} bits; name the "
            "original with --base-model"
        )
    model: Any = target.model
    parameters = sum(p.numel() for p in model.parameters())
    vocabulary = model.config.get_text_config().vocab_size
    rows = read_comparison_rows(source.run, parameters, vocabulary)
    if (
        rows is None
        or not can_be_measured(source, target)
        or (options.merge_onto and not options.verify)
    ):
        onto = options.merge_onto or "dequantized"
        if options.merge_onto:
            reason = "as --merge-onto says"
        else:
            reason = "which the adapter was trained on; nothing was measured"
        log(f"merged onto the {onto} base, {reason}")
        return MergeChoice(onto, reason)
    measured = measure_merges(source, target, choose_written_dtype(source, target, options), rows)
    choice = _choose(measured, rows, options.merge_onto)
    for line in describe_choice(choice, bits):
        log(line)
    return choice


def describe_choice(choice: MergeChoice, bits: int) -> list[str]:
    """Describes the measurement for the terminal."""
    if choice.rows is None:
        return []
    kind = "held-out" if choice.rows.held_out else "training"
    lines = [
        f"merge   on {len(choice.rows)} {kind} rows, {choice.rows.labeled_tokens:,} labeled tokens"
    ]
    for name, score in choice.measured.items():
        if name == TRAINED:
            difference = ""
        else:
            difference = f", largest logit difference {score.logit_difference:.3g}"
        if name == TRAINED:
            label = f"{bits}-bit base + adapter"
        else:
            label = f"merged onto the {name} base"
        lines.append(f"        {label}: loss {score.loss:.4f}{difference}")
    return [*lines, f"        exported: onto the {choice.onto} base, {choice.reason}"]


def _choose(
    measured: Mapping[str, MergedScore], rows: ComparisonRows, asked: MergeOnto | None
) -> MergeChoice:
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
        "dequantized",
        "which the adapter was trained on; the losses are as good as equal",
        rows,
        measured,
    )
