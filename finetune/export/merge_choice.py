"""Chooses the base that an adapter of a quantized base is merged onto: the quantized base,
dequantized, or the original.

The choice is measured: both merged models are compared with the trained one on rows of the run.
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
ROW_TOKENS = 1024  # the most of one row
# The bounds on the tokens of all rows together, padding included. A large model gets fewer, so that
# computing three models on a CPU in float32 takes minutes.
MAX_TOKENS = 4096
MIN_TOKENS = 256
FLOP_BUDGET = 25e12  # for one of the models


@dataclass(frozen=True, slots=True)
class ComparisonRows:
    """Examples of a run, one in each row, padded on the right.

    They need no attention mask: attention is causal, so that an example does not see its padding.
    """

    input_ids: Tensor  # int64[rows, tokens]
    labels: Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    lengths: Tensor  # int64[rows]: tokens without padding
    held_out: bool  # False: they were trained on, since the run held nothing out

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def labeled_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())

    @property
    def description(self) -> str:
        """What the rows are and how many, for a sentence."""
        kind = "held-out" if self.held_out else "training"
        return f"{len(self)} {kind} rows ({self.labeled_tokens:,} labeled tokens)"


def write_comparison_rows(folder: Path, examples: Examples, *, held_out: bool) -> None:
    """Writes the comparison rows of a run: the first `examples`, as many as MAX_TOKENS allows.

    Each is cut to ROW_TOKENS, and skipped if no label is left. Rejected answers of pairs and
    answers that are rated bad are left out.

    Args:
        folder: The run's folder.
        examples: The examples of the run.
        held_out: Whether the run held `examples` out.
    """
    answers = examples.keep_good_answers()
    in_order = (answers[index] for index in range(len(answers)))
    cut = ((example.input_ids[:ROW_TOKENS], example.labels[:ROW_TOKENS]) for example in in_order)
    labeled = ((ids, labels) for ids, labels in cut if (labels != IGNORE_INDEX).any())
    rows = [
        {"input_ids": ids.tolist(), "labels": labels.tolist()}
        for ids, labels in _take_first(labeled, MAX_TOKENS)
    ]
    replace_file(folder / ROWS_FILE, json.dumps({"held_out": held_out, "rows": rows}) + "\n")


def read_comparison_rows(
    folder: Path | None, parameters: int, vocabulary: int
) -> ComparisonRows | None:
    """Reads the comparison rows of a run: as many as a model computes within FLOP_BUDGET.

    At least one is read, if the run has any.

    Args:
        folder: The run's folder; None: the model belongs to no run.
        parameters: The model's number of parameters.
        vocabulary: The size of the model's vocabulary.

    Returns:
        The rows; None if the run kept none.

    Raises:
        UserError: The file is damaged, or holds ids outside of the vocabulary.
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
    affordable_tokens = int(FLOP_BUDGET / (2 * parameters))  # 2 FLOP for each parameter
    rows = _take_first(rows, min(MAX_TOKENS, max(MIN_TOKENS, affordable_tokens)))
    if not rows:
        return None
    pad = torch.nn.utils.rnn.pad_sequence
    return ComparisonRows(
        input_ids=pad([ids for ids, _ in rows], batch_first=True),
        labels=pad([labels for _, labels in rows], batch_first=True, padding_value=IGNORE_INDEX),
        lengths=torch.tensor([len(ids) for ids, _ in rows]),
        held_out=held_out,
    )


Row = tuple[Any, Any]  # (ids, labels), of the same length


def _take_first(rows: Iterable[Row], most_tokens: int) -> list[Row]:
    """Takes the first of `rows`, as many as fit into `most_tokens` when they are padded.

    The first row is always taken.
    """
    first_rows = list[Row]()
    longest = 0
    for ids, labels in rows:
        longest = max(longest, len(ids))
        if first_rows and (len(first_rows) + 1) * longest > most_tokens:
            break
        first_rows.append((ids, labels))
    return first_rows


def _is_row(ids: Tensor, labels: Tensor, vocabulary: int) -> bool:
    """Whether `ids` and `labels` are a row: of one shape, within the vocabulary, partly labeled."""
    labeled = labels[labels != IGNORE_INDEX]
    all_ids = torch.cat([ids, labeled])
    are_ids = (
        all_ids.dtype == torch.int64
        and len(labeled) > 0
        and 0 <= int(all_ids.min()) <= int(all_ids.max())
    )
    return ids.shape == labels.shape and are_ids and int(all_ids.max()) < vocabulary


TRAINED = "trained"  # the variant that is not merged: the quantized base with its adapter


@dataclass(frozen=True, slots=True)
class MergedScore:
    """How a model does on the comparison rows, computed in float32, beside a first model."""

    loss: float  # per labeled token, in nats
    logit_difference: float  # the largest difference of a logit from the first model's
    # KL divergence from the first model's probabilities, per labeled token, in nats
    divergence: float = 0.0


def can_be_measured(source: Source, target: TargetModel) -> bool:
    """Whether every quantized weight belongs to a plain linear layer.

    Only the weights of linear layers may differ between the variants that `measure` computes.
    """
    modules = (
        target.model.get_submodule(name.rpartition(".")[0])
        for name in find_quantized(source, target)
    )
    return all(type(module) is nn.Linear for module in modules)


def measure_merges(
    source: Source, target: TargetModel, dtype: torch.dtype, rows: ComparisonRows
) -> dict[str, MergedScore]:
    """Measures the trained model and the merged ones in one pass over the base's files.

    The trained model computes W x + B A x as (W + B A) x in float32, with W dequantized to the
    compute dtype. The merged models are rounded to `dtype`, in which they would be written.

    Returns:
        The scores of "trained", "original" and "dequantized". There is no "original" if the base is
        stored quantized.
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
    readers = [make_reader(values, target) for values in variants.values()]
    scores = measure(target.model, readers, rows)
    return dict(zip(variants, scores, strict=True))


def make_reader(values: Mapping[str, Value], target: TargetModel) -> Rows:
    """Makes a reader of rows of `values`, in the dtype in which they are written.

    It knows tied parameters too, though `values` holds only the first of them.
    """
    return lambda name, start, stop: cast_rows(values[target.tied.get(name, name)], start, stop)


@torch.no_grad()
def measure(
    model: nn.Module,
    variants: Sequence[Rows],
    rows: ComparisonRows,
    round_inputs: Sequence[RoundInputs | None] = (),
) -> list[MergedScore]:
    """Measures variants of a model on `rows`, and compares all with the first variant.

    Logits are computed a chunk of tokens at a time, and never held whole.

    Args:
        model: The model, on meta.
        variants: For each variant, a function that reads its values. Only weights of linear layers
            may differ.
        rows: The comparison rows.
        round_inputs: For each variant, what is done to the inputs of linear layers; None: nothing.
            Empty: nothing for all.

    Returns:
        The score of each variant.
    """
    plain: Any = model
    count = len(variants)
    factors = measure_head_factors(plain)
    # [variants x rows, tokens]: the same rows for each variant
    inputs = {name: ids.repeat(count, 1) for name, ids in _make_inputs(model, rows).items()}
    # bool[rows x tokens]: False at padding
    is_token = (torch.arange(rows.input_ids.shape[1]) < rows.lengths[:, None]).flatten()
    labels = rows.labels.flatten()[is_token]
    sums = _Sums(count)
    with stream_values(model, variants, round_inputs):
        hidden = trunk_of(plain)(**inputs, use_cache=False).last_hidden_state * factors.input_scale
        # [variants, tokens without padding, hidden]
        hidden = hidden.reshape(count, is_token.numel(), -1)[:, is_token]
        vocabulary = plain.config.get_text_config().vocab_size
        chunk_tokens = max(1, loss_chunk_tokens(vocabulary, "cpu") // count)
        for chunk_hidden, chunk_labels in zip(
            torch.split(hidden, chunk_tokens, dim=1), torch.split(labels, chunk_tokens), strict=True
        ):
            logits, _ = factors.logits.forward(head_of(plain)(chunk_hidden).float())
            sums.add(logits, chunk_labels)
    return sums.average(rows.labeled_tokens)


def _make_inputs(model: nn.Module, rows: ComparisonRows) -> dict[str, Tensor]:
    """Makes the trunk's inputs, each int64[rows, tokens]: ids, and positions if RoPE needs them.

    RoPE that depends on the length of a text takes it from the row's largest position. Padding
    therefore repeats the position of the last token.
    """
    inputs = {"input_ids": rows.input_ids}
    if depends_on_length(model):
        install_document_rotary(model)
        positions = torch.arange(rows.input_ids.shape[1])
        inputs["position_ids"] = positions.minimum(rows.lengths[:, None] - 1)
    return inputs


class _Sums:
    """Collects, for each variant, its loss and how far it is from the first variant.

    The distance is measured by the KL divergence and by the largest difference of a logit.
    """

    def __init__(self, variants: int) -> None:
        self.losses = torch.zeros(variants, dtype=torch.float64)
        self.differences = torch.zeros(variants)
        self.divergences = torch.zeros(variants, dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a chunk of tokens.

        Losses and divergences count labeled tokens only; logits are compared at all tokens.

        Args:
            logits: fp32[variants, tokens, vocabulary].
            labels: int64[tokens]: the id to predict, or IGNORE_INDEX.
        """
        is_labeled = labels != IGNORE_INDEX
        log_probabilities = logits[:, is_labeled].log_softmax(-1)
        expected_ids = labels[is_labeled].expand(len(logits), -1)
        losses = -log_probabilities.gather(-1, expected_ids[..., None])
        self.losses += losses.double().sum((1, 2))
        differences = (logits - logits[:1]).abs().flatten(1).amax(1)
        self.differences = torch.maximum(self.differences, differences)
        first = log_probabilities[:1]
        divergences = first.exp() * (first - log_probabilities)
        self.divergences += divergences.flatten(1).double().sum(1)

    def average(self, labeled_tokens: int) -> list[MergedScore]:
        """Returns the score of each variant, with means over `labeled_tokens`."""
        losses = (self.losses / labeled_tokens).tolist()
        divergences = (self.divergences / labeled_tokens).tolist()
        differences = self.differences.tolist()
        return [
            MergedScore(loss, difference, divergence)
            for loss, difference, divergence in zip(losses, differences, divergences, strict=True)
        ]


# In nats. A smaller difference of the losses counts as none. Then the dequantized base is chosen,
# since the adapter was trained on it.
NOTICEABLE_LOSS = 1e-3


@dataclass(frozen=True, slots=True)
class MergeChoice:
    """The base that an adapter is merged onto, and why. Returned by `choose_merge`."""

    onto: MergeOnto
    reason: str  # continues a sentence: "merged onto the ... base, REASON"
    rows: ComparisonRows | None = None  # None: nothing was measured
    # the result of `measure_merges`; empty without rows
    measured: Mapping[str, MergedScore] = field(default_factory=dict)


def choose_merge(
    source: Source, target: TargetModel, options: ExportOptions, log: Callable[[str], object]
) -> MergeChoice | None:
    """Chooses the base to merge the adapter onto, by measuring both merged models if possible.

    Returns:
        The choice, which is logged too; None if no adapter is merged, or if its base was not
        quantized in the training.

    Raises:
        UserError: The original is asked for, and the base is stored quantized; or the file of
            comparison rows is damaged.
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
    """Describes a measured choice for the terminal, a line for each model; [] if not measured.

    `bits`: the bits of the quantized base.
    """
    if choice.rows is None:
        return []
    lines = [f"merge   on {choice.rows.description}"]
    for name, score in choice.measured.items():
        if name == TRAINED:
            label = f"{bits}-bit base + adapter"
            difference = ""
        else:
            label = f"merged onto the {name} base"
            difference = f", largest logit difference {score.logit_difference:.3g}"
        lines.append(f"        {label}: loss {score.loss:.4f}{difference}")
    return [*lines, f"        exported: onto the {choice.onto} base, {choice.reason}"]


def _choose(
    measured: Mapping[str, MergedScore], rows: ComparisonRows, requested: MergeOnto | None
) -> MergeChoice:
    """Chooses the requested base, else the one with the lower loss.

    Args:
        measured: The result of `measure_merges`.
        rows: The rows that were measured on.
        requested: The value of --merge-onto; None: the user left it out.
    """
    if requested is not None:
        return MergeChoice(requested, "as --merge-onto says", rows, measured)
    if "original" not in measured:
        return MergeChoice("dequantized", "for the base is stored quantized", rows, measured)
    gain = measured["dequantized"].loss - measured["original"].loss
    reason = f"whose loss is lower by {abs(gain):.4f}"
    if abs(gain) <= NOTICEABLE_LOSS:
        reason = "which the adapter was trained on; the losses are as good as equal"
    return MergeChoice(
        "original" if gain > NOTICEABLE_LOSS else "dequantized", reason, rows, measured
    )
