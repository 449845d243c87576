"""Training embeddings: the contrastive loss of all documents of a step, on all ranks, whatever its
micro-batches.

Gradients are cached (Gao et al. 2021, arXiv:2101.06983, section 3). A forward of the whole step
without gradients computes the vectors. From all vectors follow the loss and its gradient to each of
them. With these gradients, each micro-batch has a forward and a backward of its own.
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
    """The loss of all documents of a step or of all held-out data, and its gradients."""

    row_of: Mapping[int, int]  # example -> the row of its vector
    contrast: Contrast


@dataclass(frozen=True, slots=True)
class ContrastiveObjective(GroupObjective):
    """The mean over queries of InfoNCE: how surely a query finds its own document among those of
    all queries of the step.
    """

    group_size: int  # a query, its document, and its negatives
    temperature: float
    dims: tuple[int, ...]  # lengths that vectors are cut to, of which the losses are added
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them
    is_held_out: bool = False  # then nothing has a backward, and the vectors are enough
    step: StepVectors | None = None  # None before `prepare`

    @classmethod
    def of(cls, recipe: Recipe, sequence_group: ProcessGroup | None) -> "ContrastiveObjective":
        """Makes the recipe's objective."""
        return cls(
            recipe.group_size,
            recipe.method.temperature,
            recipe.method.matryoshka_dims,
            sequence_group,
        )

    def for_evaluation(self) -> "ContrastiveObjective":
        """The same, whose losses have no backward."""
        return replace(self, is_held_out=True)

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "ContrastiveObjective":
        """Returns the objective with the vectors of the whole step, their losses and gradients.

        Restores the random state: the forwards that follow have the same dropout again.
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
        own = torch.cat(vectors)
        gathered = own.new_zeros(len(all_ids), own.shape[1])
        if world.is_first_of_batch:  # the other ranks of its sequence have the same vectors
            gathered[_copy_rows([row_of[example_id] for example_id in ids], device)] = own
        world.sum(gathered)
        compared = contrast(gathered, self.group_size, self.temperature, self.dims)
        return replace(self, step=StepVectors(row_of, compared))

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's queries; their backward has the gradient of all losses of
        the step to the micro-batch's documents.
        """
        assert self.step is not None, "a step is prepared before it is measured"
        compared = self.step.contrast
        row_list = [self.step.row_of[example_id] for example_id in micro_batch.example_ids]
        rows = _copy_rows(row_list, compared.losses.device)
        queries = rows[:: self.group_size] // self.group_size
        loss = compared.losses[queries].sum()
        if not self.is_held_out:
            vectors = embed_documents(model, micro_batch, inputs, self.sequence_group)
            with_gradient = (vectors * compared.gradients[rows]).sum()
            # the value of the loss, with the gradient of the product
            loss = with_gradient + (loss - with_gradient).detach()
        return make_measured(loss, describe_places(compared.places[queries]), self.sequence_group)


def _copy_rows(rows: list[int], device: torch.device) -> Tensor:
    """int64[rows] on `device`, which the host does not wait for."""
    return copy_to(torch.tensor(rows, dtype=torch.int64), device)


def embed_documents(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """Computes the vector of each document, the mean state of its tokens with a label;
    fp64[documents, hidden].

    `sequence_group`: the ranks that divide the documents' tokens between them; each returns the
    vectors of all.
    """
    states: Tensor = model(**inputs, head_function=head_states)
    sums = sum_by_document(states, micro_batch, sequence_group)
    tokens = sum_by_document(torch.ones_like(states[:, :1]), micro_batch, sequence_group)
    return sums / tokens
