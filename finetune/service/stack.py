"""Several adapters in one pass of the base: each token is multiplied with the adapter of its datum.

The tokens of a micro-batch are sorted by adapter. The products of a layer are therefore grouped
matrix products, like those of a mixture's experts. Every rank has the unsharded factors of all
adapters. The model's own adapter is not used.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.schema import Recipe
from finetune.constants import ADAPTER_NAME
from finetune.data.batches import MicroBatch
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import World
from finetune.models.experts import multiply_grouped
from finetune.models.routing import find_routing

Factors = tuple[Tensor, Tensor]  # A^T [adapters, in, rank], B^T [adapters, rank, out]


def can_stack(model: nn.Module, recipe: Recipe) -> bool:
    """Returns whether several adapters may share a pass of the model.

    They may not if layers are compiled, because a pass replaces the forward of layers. They may not
    if the model has routers, because the auxiliary loss depends on all tokens together.
    """
    return not recipe.model.torch_compile and find_routing(unwrap(model)) is None


class AdapterStack:
    """The adapters of one pass, and the gradients of their factors."""

    def __init__(
        self, model: nn.Module, adapters: Sequence[Mapping[str, Tensor]], scales: Sequence[float]
    ) -> None:
        """Stacks the adapters.

        Args:
            model: The session's model, which has an adapter on the same layers.
            adapters: Each adapter's unsharded factors by parameter name: A [rank, in] and B
                [out, rank], with the rank of the model's adapter.
            scales: What `Adapters.compute_scale` returns for each adapter.
        """
        transformer = unwrap(model)
        device = next(iter(adapters[0].values())).device
        # parameter name -> the transposed factors of all adapters, leaves of autograd:
        # A^T [adapters, in, rank] or B^T [adapters, rank, out]
        self._leaves = {
            name: torch.stack([adapter[name].mT for adapter in adapters]).requires_grad_()
            for name in adapters[0]
        }
        self._scales = torch.tensor(scales, device=device)[:, None, None]  # as factors broadcast
        # int32[adapters]: where each adapter's tokens end in the micro-batch
        self._ends = torch.zeros(len(adapters), dtype=torch.int32, device=device)
        self._layers: dict[Any, Factors] = {
            layer: (
                self._leaves[f"{name}.lora_A.{ADAPTER_NAME}.weight"],
                self._leaves[f"{name}.lora_B.{ADAPTER_NAME}.weight"],
            )
            for name, layer in transformer.named_modules()
            if hasattr(layer, "lora_A")
        }

    @property
    def size(self) -> int:
        """The number of adapters."""
        return len(self._scales)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Makes the model's layers use these adapters during the block."""
        with ExitStack() as restored:
            for layer in self._layers:
                layer.forward = partial(self.multiply, layer)
                restored.callback(delattr, layer, "forward")
            yield

    def assign_tokens(self, micro_batch: MicroBatch, owners: Sequence[int]) -> None:
        """Assigns the tokens of the next forward to adapters.

        Args:
            micro_batch: The micro-batch of that forward, on the host. Its examples are sorted by
                adapter.
            owners: For each example of the step, the index of its adapter.
        """
        counts = [0] * self.size
        for example, tokens in zip(
            micro_batch.example_ids, _count_tokens(micro_batch), strict=True
        ):
            counts[owners[example]] += tokens
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        ends[-1] = micro_batch.input_ids.numel()  # padding comes last, and has no loss
        self._ends = ends.to(self._ends.device)

    def multiply(self, layer: Any, inputs: Tensor) -> Tensor:
        """Computes a layer, each token with its adapter: [..., in] -> [..., out]."""
        product: Tensor = layer.base_layer(inputs)
        down, up = self._layers[layer]
        with torch.autocast(inputs.device.type, enabled=False):
            rows = inputs.reshape(-1, inputs.shape[-1]).to(product.dtype)
            low_rank = multiply_grouped(rows, down, self._ends)
            added = multiply_grouped(low_rank, up * self._scales, self._ends)
        return product + added.view(product.shape)

    def gather_gradients(self, world: World) -> list[dict[str, Tensor]]:
        """Sums the gradients over the ranks. All ranks call it.

        Returns:
            For each adapter: parameter name -> unsharded gradient, in the parameter's shape.
        """
        leaves = self._leaves.values()
        summed = world.sum_over_groups(torch.cat([_gradient_of(leaf).flatten() for leaf in leaves]))
        flat_gradients = torch.split(summed, [leaf.numel() for leaf in leaves])
        by_name = {
            name: flat.view_as(leaf).mT
            for (name, leaf), flat in zip(self._leaves.items(), flat_gradients, strict=True)
        }
        return [
            {name: stacked[index] for name, stacked in by_name.items()}
            for index in range(self.size)
        ]


def _gradient_of(leaf: Tensor) -> Tensor:
    """Returns a leaf's gradient; zeros if no backward reached it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _count_tokens(micro_batch: MicroBatch) -> Sequence[int]:
    """Counts the positions of each example in a micro-batch.

    An example in a padded row has all positions of the row. In a packed row, the padding at the end
    belongs to no example.
    """
    if micro_batch.cu_seq_lens is not None:
        return micro_batch.document_lengths
    return [micro_batch.input_ids.shape[1]] * len(micro_batch.example_ids)
