"""Makes the rows of a step from completions: packs them behind their prompts, deals them to ranks,
and adds the columns that the loss reads.

A row may hold a prompt once for several completions of its group. Then the prompt, without its last
token, is a document. Each completion is a document that continues the prompt: it begins with the
prompt's last token, which predicts the completion's first token.
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

# Every rank keeps this many rows. With fewer and longer rows some ranks would get much less work.
ROWS_OF_RANK = 4


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt with its completion; or only one of them, if completions share the prompt."""

    tokens: Example
    # The first token's position in the prompt with its completion; above 0: this document continues
    # the prompt document before it.
    first: int
    completion: int | None  # the completion's place in the rollout; None for a prompt alone
    experts: NDArray[np.int16] | None = None  # [tokens, layers, chosen], as in `Sampled`

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens.input_ids)


Piece = list[Document]
"""One completion behind its prompt, or a prompt and all completions that share it.

A row holds a piece as a whole.
"""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Settings for packing completions into the rows of a rank."""

    recipe: Recipe
    rank: DataParallelRank
    pad_token_id: int
    shares_prompts: bool  # whether a row holds a prompt once for several completions
    prompts: StoredBatches | None = None  # the prompts' data set, whose images are read

    @property
    def images(self) -> ImageProcessor | None:
        """The processor of the prompts' images; None if prompts have no images."""
        return None if self.prompts is None else self.prompts.images


def make_step_batch(rollout: Rollout, options: RowOptions) -> StepBatch:
    """Makes this rank's micro-batches of completions, with the columns for loss and metrics."""
    batch = lay_out(rollout, options)
    completion_columns = _make_columns(rollout, options.recipe)
    samples_ahead = options.recipe.rollout.max_staleness > 0
    token_columns = dict(rollout.of_tokens)
    if options.recipe.method_facts.has_critic:
        targets = find_targets(rollout, options.recipe)
        token_columns |= {"token_advantages": targets.advantages, "returns": targets.returns}
        # One number of the rollout, repeated for each completion.
        explained_variance = np.full(len(rollout.sampled), targets.explained_variance, np.float32)
        completion_columns["explained_variance"] = explained_variance
    micro_batches = tuple(
        _add_columns(
            micro_batch, rollout, completion_columns, token_columns, samples_ahead=samples_ahead
        )
        for micro_batch in batch.micro_batches
    )
    return replace(batch, micro_batches=micro_batches)


def lay_out(rollout: Rollout, options: RowOptions) -> StepBatch:
    """Makes this rank's micro-batches of completions, without the columns of the loss.

    The `example_ids` of a micro-batch are the completions' places in the rollout. In the batch's
    count of groups each completion is one group. If completions share prompts, several rows of
    `max_length` may be packed as one longer row.
    """
    rows_together = _count_rows_together(rollout, options)
    most_tokens = 0
    if options.shares_prompts:
        most_tokens = rows_together * options.recipe.data.max_length
    pieces = [_make_piece(places, rollout, options) for places in _cut_groups(rollout, most_tokens)]
    micro_batches = []
    for micro_batch_pieces in _deal_pieces(pieces, rows_together, options):
        micro_batch = _make_micro_batch(micro_batch_pieces, options)
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
        # A completion that continues a prompt attends to the prompt's tokens too.
        squared_tokens=sum((each.first + each.length) ** 2 - each.first**2 for each in documents),
        groups=len(rollout.sampled),
    )


def _deal_pieces(
    pieces: Sequence[Piece], rows_together: int, options: RowOptions
) -> Iterator[list[Piece]]:
    """Packs `pieces` into rows, and yields the pieces of each of this rank's micro-batches.

    rows_together: How many rows of `max_length` are packed as one longer row.
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
    # The pieces are an epoch of a single step, in which no pieces have to stay side by side.
    rows = arrange_epoch(lengths, config, group_size=1, epoch=0)
    micro_batch_rows = recipe.batch.per_device_train_batch_size // rows_together
    for ids in deal_rows(
        [rows[row] for row in range(len(rows))], rank.rank, rank.size, micro_batch_rows
    ):
        yield [pieces[i] for i in ids]


def _count_rows_together(rollout: Rollout, options: RowOptions) -> int:
    """Chooses how many rows of a micro-batch are packed as one longer row.

    A longer row can hold more of the completions that share a prompt. The number divides the
    micro-batch, and by the sampled tokens leaves each rank at least ROWS_OF_RANK rows.
    """
    if not options.shares_prompts:
        return 1
    recipe = options.recipe
    tokens = sum(len(completion.token_ids) for completion in rollout.sampled)
    micro_batch_rows = recipe.batch.per_device_train_batch_size
    most_rows = tokens // (ROWS_OF_RANK * options.rank.size * recipe.data.max_length)
    return max(
        rows
        for rows in range(1, micro_batch_rows + 1)
        if rows == 1 or (rows <= most_rows and micro_batch_rows % rows == 0)
    )


def _cut_groups(rollout: Rollout, most_tokens: int) -> Iterator[list[int]]:
    """Cuts each group into completions that share a prompt within one row, and yields their places.

    most_tokens: The most tokens of a prompt and the completions that share it; 0: none share one.
    """
    for group_start in range(0, len(rollout.sampled), rollout.generations):
        together: list[int] = []
        tokens = 0
        for place in range(group_start, group_start + rollout.generations):
            prompt = rollout.prompts[place]
            # The prompt's last token comes again before each completion, whose first it predicts.
            completion_tokens = 1 + len(rollout.sampled[place].token_ids)
            if together:
                # An environment may give each completion of a group another prompt. Of a prompt of
                # one token nothing is left to share.
                can_share = len(prompt) > 1 and rollout.prompts[together[0]] == prompt
                if not can_share or tokens + completion_tokens > most_tokens:
                    yield together
                    together = []
            if not together:
                tokens = len(prompt) - 1
            tokens += completion_tokens
            together.append(place)
        yield together


def _make_piece(places: Sequence[int], rollout: Rollout, options: RowOptions) -> Piece:
    """Makes the documents of the completions at `places`, which have the same prompt.

    A single completion is one document with its prompt. Several completions get the prompt as a
    document before theirs.
    """
    *prompt, last_prompt_id = rollout.prompts[places[0]]
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
        ids = [last_prompt_id, *completion.token_ids]
        # A completion ends where the model samples an image token. As an input, this token would
        # need an image, so another id takes its place: no label follows the last input.
        if ids[-1] in image_ids:
            ids[-1] = last_prompt_id
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
    """Makes a document of the tokens `ids` of a prompt, of a completion, or of both.

    Args:
        ids: The token ids.
        labels: One for each of the `ids`.
        first: The position of `ids[0]` in the prompt with its completion.
        completion: The completion's place in the rollout; None for a prompt alone.
        experts: [tokens, layers, chosen], of the prompt with its completion; None: not recorded.
    """
    document_experts = None if experts is None else experts[first : first + len(ids)]
    tokens = Example(np.array(ids, np.int32), np.array(labels, np.int32))
    return Document(tokens, first, completion, document_experts)


def _make_micro_batch(pieces: Sequence[Piece], options: RowOptions) -> MicroBatch:
    """Makes a micro-batch whose examples are the completions of `pieces`; a filler if empty."""
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
    if len(completions) == len(documents):  # no prompt is a document
        return micro_batch
    return _continue_prompts(micro_batch, documents)


def _add_images(micro_batch: MicroBatch, rollout: Rollout, options: RowOptions) -> MicroBatch:
    """Adds the images of the completions' prompts, if prompts have images."""
    if options.prompts is None or options.images is None:
        return micro_batch
    ids = rollout.example_ids[list(micro_batch.example_ids)].tolist()
    return add_images(micro_batch, ids, options.prompts.examples, options.images)


def _lay_out_experts(micro_batch: MicroBatch, documents: Sequence[Document]) -> Tensor | None:
    """Lays out the documents' experts as the micro-batch's tokens lie.

    Returns int16[rows, tokens, layers, chosen], or None if no document has recorded experts. Tokens
    without recorded experts have -1.
    """
    recorded = [document.experts for document in documents if document.experts is not None]
    if not recorded:
        return None
    rows, tokens = micro_batch.input_ids.shape
    _, layers, chosen = recorded[0].shape
    experts = torch.full((rows * tokens, layers, chosen), -1, dtype=torch.int16)
    start = 0
    for index, document in enumerate(documents):
        if micro_batch.packed_lengths is None:  # each document has a row
            start = index * tokens
        if document.experts is not None:
            experts[start : start + document.length] = torch.from_numpy(document.experts)
        start += document.length
    return experts.view(rows, tokens, layers, chosen)


def _continue_prompts(micro_batch: MicroBatch, documents: Sequence[Document]) -> MicroBatch:
    """Marks the completions of a packed micro-batch as continuing the prompt before them.

    Positions continue, too, and only completions stay examples: prompts that are documents do not
    count in `document_lengths` and `trained_documents`.
    """
    assert micro_batch.packed_lengths is not None and micro_batch.trained_documents is not None
    # The row's padding is a document; there is none if the tokens fill the row.
    padding_documents = len(micro_batch.packed_lengths) - len(documents)
    firsts = np.array([document.first for document in documents] + [0] * padding_documents)
    positions = micro_batch.position_ids + torch.from_numpy(
        np.repeat(firsts, micro_batch.packed_lengths)
    )
    continued: list[int | None] = []
    prompt_index = 0
    for index, first in enumerate(firsts.tolist()):
        if first > 0:
            continued.append(prompt_index)
        else:
            prompt_index = index
            continued.append(None)
    is_completion = np.array([document.completion is not None for document in documents])
    # Each document's index among the completions. A prompt has no labels, so any index will do.
    completion_index = torch.from_numpy(np.maximum(is_completion.cumsum() - 1, 0))
    return replace(
        micro_batch,
        position_ids=positions,
        continued=tuple(continued),
        document_lengths=tuple(
            document.length for document in documents if document.completion is not None
        ),
        trained_documents=completion_index[micro_batch.trained_documents],
    )


def _make_columns(rollout: Rollout, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """Makes the columns of completions that the loss and the metrics read: fp32[completions].

    "scores" is fp32[completions, rewards]. A number of the whole rollout is repeated.
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


def _add_columns(
    micro_batch: MicroBatch,
    rollout: Rollout,
    completion_columns: Mapping[str, NDArray[np.float32]],
    token_columns: Mapping[str, Sequence[Sequence[float]]],
    *,
    samples_ahead: bool,
) -> MicroBatch:
    """Adds the columns of a micro-batch's completions and tokens, and makes prompts its examples.

    Columns of tokens are fp32[positions]. Besides `token_columns` they are "sampled", the token's
    log-probability under the sampler, and "versions", the step whose weights sampled the token.

    Args:
        micro_batch: One of `lay_out`, whose `example_ids` are places in the rollout.
        rollout: The step's completions.
        completion_columns: Name -> a value for each completion of the rollout.
        token_columns: Name -> a value for each trained token of each completion; an empty one is
            left out.
        samples_ahead: Whether completions may come from older weights; only then "versions" is
            added.
    """
    places = list(micro_batch.example_ids)
    tensors = {
        "sampled": _spread(micro_batch, [each.log_probabilities for each in rollout.sampled])
    }
    if samples_ahead:
        tensors["versions"] = _spread(micro_batch, [each.versions for each in rollout.sampled])
    for name, values in token_columns.items():
        if values:
            tensors[name] = _spread(micro_batch, values)
    for name, column in completion_columns.items():
        tensors[name] = torch.from_numpy(column[places])
    return replace(
        micro_batch, columns=tensors, example_ids=tuple(rollout.example_ids[places].tolist())
    )


def _spread(micro_batch: MicroBatch, by_completion: Sequence[Sequence[float]]) -> Tensor:
    """Spreads each completion's values over the positions of its trained tokens.

    by_completion: [completions of the rollout][sampled tokens].

    Returns fp32[positions], 0 at positions without a label.
    """
    has_label, counts = _count_labels(micro_batch)
    values: list[float] = []
    for place, count in zip(micro_batch.example_ids, counts, strict=True):
        # All values, or none: a completion that is not trained on has values but no labels.
        values += by_completion[place][:count]
    return torch.zeros(len(has_label)).masked_scatter(
        has_label, torch.tensor(values, dtype=torch.float32)
    )


def collect_by_completion(micro_batch: MicroBatch, values: Tensor) -> dict[int, list[float]]:
    """Collects each completion's values from the positions of its trained tokens.

    Args:
        micro_batch: One of `lay_out`.
        values: [positions].

    Returns:
        A completion's place in the rollout -> its values: [trained tokens].
    """
    has_label, counts = _count_labels(micro_batch)
    by_completion = torch.split(values[has_label], counts)
    return {
        place: completion_values.tolist()
        for place, completion_values in zip(micro_batch.example_ids, by_completion, strict=True)
    }


def _count_labels(micro_batch: MicroBatch) -> tuple[Tensor, list[int]]:
    """Counts each completion's labels.

    Returns:
        (bool[positions]: whether the position has a label; [completions]: the number of labels).
    """
    assert micro_batch.trained_documents is not None
    has_label = micro_batch.labels.flatten()[micro_batch.trained_positions] >= 0
    counts = torch.bincount(
        micro_batch.trained_documents[has_label], minlength=len(micro_batch.example_ids)
    )
    return has_label, counts.tolist()
