"""Makes the rows of a step from completions: packs them behind their prompts, deals them to ranks,
and adds the loss's columns.

A row may hold a prompt once for several completions of its group. Then the prompt is a document,
and each completion is one that begins with the prompt's last token, which predicts its first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Example
from finetune.data.images import ImageProcessor
from finetune.data.packing import (
    BatchConfig,
    StoredBatches,
    add_images,
    arrange_epoch,
    deal_rows,
    make_filler,
    pack_documents,
    pad_documents,
)
from finetune.distributed.world import DataParallelRank
from finetune.rollout.critic import find_targets
from finetune.rollout.engine import Ended, Rollout, find_advantages

# The fewest rows of a rank: with fewer and longer rows some ranks would get much less work.
ROWS_OF_RANK = 4


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt with its completion; or one of the two, where completions share a prompt."""

    tokens: Example
    first: int  # position of the first token; above 0 the document continues the prompt before it
    completion: int | None  # the completion's place in the rollout; None for a prompt alone
    experts: NDArray[np.int16] | None = None  # [tokens, layers, chosen], as in `Sampled`

    @property
    def length(self) -> int:
        return len(self.tokens.input_ids)


Piece = list[Document]
"""One completion, or a prompt and all completions that share it. A piece lies in one row."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Settings for packing completions into the rows of a rank."""

    recipe: Recipe
    rank: DataParallelRank
    pad_token_id: int
    shares_prompts: bool  # whether a row holds a prompt once for several completions
    prompts: StoredBatches | None = None  # the data set of prompts, with their images

    @property
    def images(self) -> ImageProcessor | None:
        """Reads the prompts' images; None where prompts have none."""
        return None if self.prompts is None else self.prompts.images


def make_step_batch(rollout: Rollout, options: RowOptions) -> StepBatch:
    """Makes this rank's micro-batches of completions, with the columns for loss and metrics."""
    batch = lay_out(rollout, options)
    columns = _describe(rollout, options.recipe)
    is_ahead = options.recipe.rollout.max_staleness > 0
    of_tokens = rollout.of_tokens
    if options.recipe.method_facts.has_critic:
        targets = find_targets(rollout, options.recipe)
        of_tokens |= {"token_advantages": targets.advantages, "returns": targets.returns}
        explained = np.full(len(rollout.sampled), targets.explained_variance, np.float32)
        columns["explained_variance"] = explained
    micro_batches = tuple(
        _attach(micro_batch, rollout, columns, of_tokens, is_ahead=is_ahead)
        for micro_batch in batch.micro_batches
    )
    return replace(batch, micro_batches=micro_batches)


def lay_out(rollout: Rollout, options: RowOptions) -> StepBatch:
    """Makes this rank's micro-batches of completions without columns.

    Where completions share prompts, several rows of `max_length` may be packed as one longer row.
    The `example_ids` of a micro-batch are places in the rollout, and each completion is a group.
    """
    rows_together = _count_rows_together(rollout, options)
    row_tokens = rows_together * options.recipe.data.max_length
    groups = _cut_groups(rollout, row_tokens if options.shares_prompts else 0)
    pieces = [_make_piece(places, rollout, options) for places in groups]
    micro_batches = []
    for dealt in _deal_pieces(pieces, rows_together, options):
        micro_batch = _make_micro_batch(dealt, options)
        micro_batches.append(_add_images(micro_batch, rollout, options))
    documents = [document for piece in pieces for document in piece]
    trained_tokens = sum(
        int((document.tokens.labels != IGNORE_INDEX).sum()) for document in documents
    )
    return StepBatch(
        step=0,
        epoch=0.0,
        micro_batches=tuple(micro_batches),
        tokens=sum(document.length for document in documents),
        trained_tokens=trained_tokens,
        chosen_tokens=trained_tokens,
        squared_tokens=sum((each.first + each.length) ** 2 - each.first**2 for each in documents),
        groups=len(rollout.sampled),
    )


def _deal_pieces(
    pieces: Sequence[Piece], rows_together: int, options: RowOptions
) -> Iterator[list[Piece]]:
    """Packs `pieces` into rows and yields those of each of this rank's micro-batches.

    rows_together: How many rows of `max_length` are packed as one.
    """
    recipe = options.recipe
    rank = options.rank
    lengths = np.array([sum(document.length for document in piece) for piece in pieces], np.int32)
    config = BatchConfig(
        seed=recipe.run.seed,
        packing=recipe.data.packing,
        max_length=rows_together * recipe.data.max_length,
        global_batch_size=len(pieces),
    )
    rows = arrange_epoch(lengths, config, 1, 0)
    size = recipe.batch.per_device_train_batch_size // rows_together
    for ids in deal_rows([rows[row] for row in range(len(rows))], rank.rank, rank.size, size):
        yield [pieces[i] for i in ids]


def _count_rows_together(rollout: Rollout, options: RowOptions) -> int:
    """Counts the rows of a micro-batch that are packed as one longer row.

    A longer row holds more of the completions that share a prompt. Each rank keeps at least
    ROWS_OF_RANK rows.
    """
    if not options.shares_prompts:
        return 1
    recipe = options.recipe
    tokens = sum(len(completion.token_ids) for completion in rollout.sampled)
    size = recipe.batch.per_device_train_batch_size
    most = tokens // (ROWS_OF_RANK * options.rank.size * recipe.data.max_length)
    return max(
        rows for rows in range(1, size + 1) if rows == 1 or (rows <= most and size % rows == 0)
    )


def _cut_groups(rollout: Rollout, most: int) -> Iterator[list[int]]:
    """Yields the places of completions that share a prompt: those of a group that fit together.

    most: The tokens into which they fit with their prompt once.
    """
    for group in range(0, len(rollout.sampled), rollout.generations):
        together: list[int] = []
        tokens = 0
        for place in range(group, group + rollout.generations):
            prompt = rollout.prompts[place]
            # An environment may give each completion another prompt.
            is_shared = len(prompt) > 1 and rollout.prompts[(*together, place)[0]] == prompt
            # The prompt's last token predicts the completion's first one.
            own = 1 + len(rollout.sampled[place].token_ids)
            if together and (not is_shared or tokens + own > most):
                yield together
                together = []
            if not together:
                tokens = len(prompt) - 1
            tokens += own
            together.append(place)
        yield together


def _make_piece(places: Sequence[int], rollout: Rollout, options: RowOptions) -> Piece:
    """Makes the documents of the completions at `places`, which have one prompt.

    The prompt of one completion is the beginning of its document. The prompt of several is a
    document before theirs.
    """
    *prompt, last = rollout.prompts[places[0]]
    prompt_labels = [IGNORE_INDEX] * len(prompt)
    is_shared = len(places) > 1
    masks_truncated = options.recipe.rollout.mask_truncated_completions
    image_ids = () if options.images is None else options.images.token_ids
    if is_shared:
        experts = rollout.sampled[places[0]].experts
        piece = [_make_document(prompt, prompt_labels, 0, None, experts)]
    else:
        piece = []
    for place in places:
        completion = rollout.sampled[place]
        is_learned = not (masks_truncated and completion.ended is Ended.CUT)
        ids = [last, *completion.token_ids]
        # A completion ends where the model samples an image's token. Nothing reads that token; as
        # an input it would need an image.
        if ids[-1] in image_ids:
            ids[-1] = last
        labels = [*completion.labels(is_learned=is_learned), IGNORE_INDEX]
        if not is_shared:
            ids = prompt + ids
            labels = prompt_labels + labels
        first = len(prompt) if is_shared else 0
        piece.append(_make_document(ids, labels, first, place, completion.experts))
    return piece


def _make_document(
    ids: list[int],
    labels: list[int],
    first: int,
    completion: int | None,
    experts: NDArray[np.int16] | None,
) -> Document:
    """Makes a document of `ids`.

    Args:
        ids: The tokens of a prompt, of a completion, or of both.
        labels: The labels of `ids`.
        first: The position of `ids[0]` in the prompt with its completion.
        completion: The completion's place in the rollout; None for a prompt alone.
        experts: The experts of all tokens of the prompt and the completion.
    """
    own = None if experts is None else experts[first : first + len(ids)]
    tokens = Example(np.array(ids, np.int32), np.array(labels, np.int32))
    return Document(tokens, first, completion, own)


def _make_micro_batch(pieces: Sequence[Piece], options: RowOptions) -> MicroBatch:
    """Makes a micro-batch whose examples are the completions of `pieces`; without any, a filler."""
    documents = [document for piece in pieces for document in piece]
    tokens = [document.tokens for document in documents]
    packing = options.recipe.data.packing
    if not documents:
        return make_filler(packing).with_documents()
    if packing:
        micro_batch = pack_documents(tokens)
    else:
        micro_batch = pad_documents(tokens, options.pad_token_id)
    completions = tuple(
        document.completion for document in documents if document.completion is not None
    )
    micro_batch = replace(
        micro_batch, example_ids=completions, experts=_lay_out_experts(micro_batch, documents)
    ).with_documents()
    if len(completions) == len(documents):
        return micro_batch
    return _continue_prompts(micro_batch, documents)


def _add_images(micro_batch: MicroBatch, rollout: Rollout, options: RowOptions) -> MicroBatch:
    """Adds the images of the completions' prompts, where prompts have images."""
    if options.prompts is None or options.images is None:
        return micro_batch
    ids = rollout.example_ids[list(micro_batch.example_ids)].tolist()
    return add_images(micro_batch, ids, options.prompts.examples, options.images)


def _lay_out_experts(micro_batch: MicroBatch, documents: Sequence[Document]) -> Tensor | None:
    """Returns the experts of `documents` at their tokens' places, -1 elsewhere.

    Returns int16[rows, tokens, layers, chosen], or None where no document has experts.
    """
    known = [document.experts for document in documents if document.experts is not None]
    if not known:
        return None
    rows, tokens = micro_batch.input_ids.shape
    laid_out = torch.full((rows * tokens, *known[0].shape[1:]), -1, dtype=torch.int16)
    start = 0
    for row, document in enumerate(documents):
        if not micro_batch.packed_lengths:
            start = row * tokens
        if document.experts is not None:
            laid_out[start : start + document.length] = torch.from_numpy(document.experts)
        start += document.length
    return laid_out.view(rows, tokens, *laid_out.shape[1:])


def _continue_prompts(micro_batch: MicroBatch, documents: Sequence[Document]) -> MicroBatch:
    """Lets the completions of a packed micro-batch continue the prompt before them."""
    assert micro_batch.packed_lengths is not None and micro_batch.trained_documents is not None
    padding = len(micro_batch.packed_lengths) - len(documents)  # a document of its own, or none
    firsts = np.array([document.first for document in documents] + [0] * padding)
    positions = micro_batch.position_ids + torch.from_numpy(
        np.repeat(firsts, micro_batch.packed_lengths)
    )
    continued: list[int | None] = []
    prompt = 0
    for place, first in enumerate(firsts.tolist()):
        prompt = prompt if first else place
        continued.append(prompt if first else None)
    is_completion = np.array([document.completion is not None for document in documents])
    # each document's place among the completions; of a prompt any
    place_of_document = torch.from_numpy(np.maximum(is_completion.cumsum() - 1, 0))
    return replace(
        micro_batch,
        position_ids=positions,
        continued=tuple(continued),
        document_lengths=tuple(
            document.length for document in documents if document.completion is not None
        ),
        trained_documents=place_of_document[micro_batch.trained_documents],
    )


def _describe(rollout: Rollout, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """Returns the columns that the loss and the metrics read.

    They are fp32[completions], "scores" is fp32[completions, functions].
    """
    count = len(rollout.sampled)
    columns = {
        "advantages": find_advantages(rollout, recipe),
        "rewards": rollout.rewards,
        "scores": rollout.scores,
        "deviations": np.repeat(rollout.deviations(), rollout.generations),
        "flat": [rollout.flat_groups / rollout.sampled_groups] * count,
        "groups": [rollout.sampled_groups] * count,
        "tokens": [len(each.log_probabilities) for each in rollout.sampled],
        "calls": [each.calls for each in rollout.sampled],
        "failed_calls": [each.failed_calls for each in rollout.sampled],
        "entropies": [each.entropy for each in rollout.sampled],
        "hand_over": [rollout.hand_over_seconds] * count,
        "cuts": [each.cuts for each in rollout.sampled],
        "dropped": [each.dropped for each in rollout.sampled],
        "is_cut": [each.ended is Ended.CUT for each in rollout.sampled],
        "failed": [rollout.failures / (rollout.sampled_groups * rollout.generations)] * count,
    }
    return {name: np.asarray(values, np.float32) for name, values in columns.items()}


def _attach(
    micro_batch: MicroBatch,
    rollout: Rollout,
    columns: Mapping[str, NDArray[np.float32]],
    of_tokens: Mapping[str, Sequence[Sequence[float]]],
    *,
    is_ahead: bool,
) -> MicroBatch:
    """Adds columns to a micro-batch of `lay_out`, and makes prompts its examples.

    Columns of tokens are fp32[positions]: "sampled", the log-probability under the sampler, and
    "versions", the step whose weights sampled the token.

    Args:
        micro_batch: Its examples are places in the rollout.
        rollout: The step's completions.
        columns: By name, a value for each completion of the rollout.
        of_tokens: By name, a value for each token of each completion; without any, no column.
        is_ahead: Whether sampling runs ahead of training, so that "versions" is needed.
    """
    places = list(micro_batch.example_ids)
    tensors = {
        "sampled": _spread(micro_batch, [each.log_probabilities for each in rollout.sampled])
    }
    if is_ahead:
        tensors["versions"] = _spread(micro_batch, [each.versions for each in rollout.sampled])
    tensors |= {name: _spread(micro_batch, values) for name, values in of_tokens.items() if values}
    tensors |= {name: torch.from_numpy(values[places]) for name, values in columns.items()}
    return replace(
        micro_batch, columns=tensors, example_ids=tuple(rollout.example_ids[places].tolist())
    )


def _spread(micro_batch: MicroBatch, by_completion: Sequence[Sequence[float]]) -> Tensor:
    """Puts each completion's values at the positions of its trained tokens: fp32[positions]."""
    has_label, counts = _count_labels(micro_batch)
    values: list[float] = []
    for place, count in zip(micro_batch.example_ids, counts, strict=True):
        values += by_completion[place][:count]  # `count` is 0 where a completion is not trained on
    return torch.zeros(len(has_label)).masked_scatter(
        has_label, torch.tensor(values, dtype=torch.float32)
    )


def collect_by_completion(micro_batch: MicroBatch, values: Tensor) -> dict[int, list[float]]:
    """Collects each completion's values from the positions of its trained tokens.

    Args:
        micro_batch: One of `lay_out`.
        values: [positions].

    Returns the completion's place in the rollout -> its values.
    """
    has_label, counts = _count_labels(micro_batch)
    by_completion = torch.split(values[has_label], counts)
    return {
        place: own.tolist()
        for place, own in zip(micro_batch.example_ids, by_completion, strict=True)
    }


def _count_labels(micro_batch: MicroBatch) -> tuple[Tensor, list[int]]:
    """Returns (which positions have a label, bool[positions]; the labels of each completion)."""
    assert micro_batch.trained_documents is not None
    has_label = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
    counts = torch.bincount(
        micro_batch.trained_documents[has_label], minlength=len(micro_batch.example_ids)
    )
    return has_label, counts.tolist()
