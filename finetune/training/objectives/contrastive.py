"""Training embeddings: a contrastive loss that compares all documents of a step, over all ranks and
micro-batches.

Gradients are cached (Gao et al. 2021, arXiv:2101.06983, section 3):

1. `prepare` computes the vectors of the whole step in forwards without gradients.
2. From all vectors it computes the loss, and the gradient of the loss to each vector.
3. `measure` runs each micro-batch again with a graph, into which it feeds those gradients.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch, StepBatch, copy_to
from finetune.distributed.parallelize import reshard
from finetune.distributed.world import World
from finetune.models.contrast import Contrast, contrast, head_states
from finetune.training.objectives.objective import GroupObjective, Measured
from finetune.training.objectives.preference import make_measured
from finetune.training.objectives.ranks import describe_places
from finetune.training.reference import sum_by_document


@dataclass(frozen=True, slots=True)
class StepVectors:
    """The compared vectors of a step, or of all held-out data: their losses and gradients."""

    row_of: Mapping[int, int]  # example id -> the row of its vector in `contrast`
    contrast: Contrast


@dataclass(frozen=True, slots=True)
class ContrastiveObjective(GroupObjective):
    """InfoNCE averaged over queries: how surely a query finds its own document among the documents
    of all queries of the step.
    """

    group_size: int  # documents in a group: a query, its document, and its negatives
    temperature: float
    # the losses of vectors that are cut to these lengths are added; empty: vectors are not cut
    dims: tuple[int, ...]
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them
    is_held_out: bool = False  # held-out data has no backward: `measure` runs no forward
    step: StepVectors | None = None  # None before `prepare`

    @classmethod
    def of(cls, recipe: Recipe, sequence_group: ProcessGroup | None) -> "ContrastiveObjective":
        """Makes the objective of the recipe's keys."""
        return cls(
            recipe.group_size,
            recipe.method.temperature,
            recipe.method.matryoshka_dims,
            sequence_group,
        )

    def for_evaluation(self) -> "ContrastiveObjective":
        """Returns the objective of held-out data, whose losses have no graph."""
        return replace(self, is_held_out=True)

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "ContrastiveObjective":
        """Computes the vectors of the whole step, and their losses and gradients.

        It restores the random state, so that `measure` drops the same activations as the forwards
        here.

        Returns:
            The objective with `step` set.
        """
        ids: list[int] = []
        vectors: list[Tensor] = []
        device = world.device
        random_devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=random_devices):
            for micro_batch in micro_batches():
                on_device = micro_batch.to(device)
                vectors.append(
                    embed_documents(model, on_device, on_device.inputs, self.sequence_group)
                )
                ids += micro_batch.example_ids
        reshard(model)
        all_ids = sorted(set(chain.from_iterable(world.gather(ids))))
        row_of = {example_id: row for row, example_id in enumerate(all_ids)}
        own_vectors = torch.cat(vectors)
        own_rows = [row_of[example_id] for example_id in ids]
        all_vectors = own_vectors.new_zeros(len(all_ids), own_vectors.shape[1])
        # The ranks that share a batch have the same vectors: one of them puts them into the sum.
        if world.is_first_of_batch:
            all_vectors[_copy_rows(own_rows, device)] = own_vectors
        world.sum(all_vectors)
        compared = contrast(all_vectors, self.group_size, self.temperature, self.dims)
        return replace(self, step=StepVectors(row_of, compared))

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the losses of the micro-batch's queries.

        The gradient of the sum is not that of these losses alone. It is the gradient of all losses
        of the step to the vectors of the micro-batch's documents.
        """
        assert self.step is not None, "a step is prepared before it is measured"
        compared = self.step.contrast
        row_list = [self.step.row_of[example_id] for example_id in micro_batch.example_ids]
        rows = _copy_rows(row_list, compared.losses.device)
        # the first document of each group is its query
        queries = rows[:: self.group_size] // self.group_size
        loss = compared.losses[queries].sum()
        if not self.is_held_out:
            vectors = embed_documents(model, micro_batch, inputs, self.sequence_group)
            with_gradient = (vectors * compared.gradients[rows]).sum()
            # the value of the loss, with the gradient of the product
            loss = with_gradient + (loss - with_gradient).detach()
        return make_measured(loss, describe_places(compared.places[queries]), self.sequence_group)


def _copy_rows(rows: list[int], device: torch.device) -> Tensor:
    """Copies the numbers of rows to `device` as int64[rows], without making the host wait."""
    return copy_to(torch.tensor(rows, dtype=torch.int64), device)


def embed_documents(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """Computes each document's vector, fp64[documents, hidden]: the mean hidden state of its
    labeled tokens.

    `sequence_group`: the ranks that divide the documents' tokens between them; each of them returns
    the vectors of whole documents. None: this rank has all tokens.
    """
    states: Tensor = model(**inputs, head_function=head_states)
    sums = sum_by_document(states, micro_batch, sequence_group)
    ones = torch.ones_like(states[:, :1])
    token_counts = sum_by_document(ones, micro_batch, sequence_group)
    return sums / token_counts
