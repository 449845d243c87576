"""Training embeddings: the contrastive loss of all documents of a step, on all ranks, whatever its
micro-batches.

Gradients are cached (Gao et al. 2021, arXiv:2101.06983, section 3): a forward of the whole step
without gradients gives the vectors, these the loss and its gradient to each vector, and with it
each micro-batch has a backward of its own.
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
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.objectives.preference import share_of
from finetune.training.objectives.ranks import describe_places
from finetune.training.reference import sum_by_document


@dataclass(frozen=True, slots=True)
class StepVectors:
    """The vectors of all documents of a step or of all held-out data, and what the loss says of
    them.
    """

    places: Mapping[int, int]  # example -> the row of its vector
    contrast: Contrast


@dataclass(frozen=True, slots=True)
class ContrastiveObjective(Objective):
    """The mean over queries of the loss of their own document among those of all queries of the
    step.
    """

    group_size: int
    temperature: float
    dims: tuple[int, ...]
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them
    is_held_out: bool = False  # nothing is trained on, so that the vectors are all that is needed
    step: StepVectors | None = None

    @classmethod
    def of(cls, recipe: Recipe, sequence_group: ProcessGroup | None) -> "ContrastiveObjective":
        """The recipe's."""
        return cls(
            recipe.group_size,
            recipe.method.temperature,
            recipe.method.matryoshka_dims,
            sequence_group,
        )

    def count(self, batch: StepBatch) -> int:
        """The queries of the step."""
        return batch.groups

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "ContrastiveObjective":
        """Computes the vectors of the whole step.

        The dropout of the forwards that follow is the same again.
        """
        ids: list[int] = []
        vectors: list[Tensor] = []
        device = world.device
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            for each in micro_batches():
                on_device = each.to(device)
                vectors.append(
                    embed_documents(model, on_device, on_device.inputs, self.sequence_group)
                )
                ids += each.example_ids
        reshard(model)
        everywhere = sorted(set(chain.from_iterable(world.gather(ids))))
        places = {example_id: place for place, example_id in enumerate(everywhere)}
        own = torch.cat(vectors)
        gathered = own.new_zeros(len(everywhere), own.shape[1])
        if world.is_first_of_batch:  # the others of its group know the same
            gathered[_copy_places([places[example_id] for example_id in ids], device)] = own
        world.sum(gathered)
        return replace(self, step=StepVectors(places, self._compare(gathered)))

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's queries, with the gradient of all losses of the step to
        its documents.
        """
        assert self.step is not None, "a step is prepared before it is measured"
        losses = self.step.contrast.losses
        places = [self.step.places[example_id] for example_id in micro_batch.example_ids]
        rows = _copy_places(places, losses.device)
        queries = rows[:: self.group_size] // self.group_size
        loss = losses[queries].sum()
        if not self.is_held_out:
            vectors = embed_documents(model, micro_batch, inputs, self.sequence_group)
            with_gradient = (vectors * self.step.contrast.gradients[rows]).sum()
            loss = with_gradient + (loss - with_gradient).detach()
        metrics = describe_places(self.step.contrast.places[queries])
        return Measured(share_of(loss.float(), self.sequence_group), metrics)

    def _compare(self, vectors: Tensor) -> Contrast:
        return contrast(vectors, self.group_size, self.temperature, self.dims)


def _copy_places(places: list[int], device: torch.device) -> Tensor:
    """int64[places] on `device`, which the host does not wait for."""
    return copy_to(torch.tensor(places, dtype=torch.int64), device)


def embed_documents(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """The vector of each document: the mean state of its tokens with a label, fp64[documents,
    hidden].

    sequence_group: The ranks that divide the documents' tokens between them; each returns the
    vectors of all.
    """
    states: Tensor = model(**inputs, head_function=head_states)
    sums = sum_by_document(states, micro_batch, sequence_group)
    tokens = sum_by_document(torch.ones_like(states[:, :1]), micro_batch, sequence_group)
    return sums / tokens
