"""Hooks on decoder layers, for early exits and layer dropout.

Early exits (LayerSkip: Elhoushi et al. 2024, arXiv:2404.16710): the output head also scores the
outputs of layers before the last. Layer dropout (LayerDrop: Fan et al. 2020, arXiv:1909.11556): a
layer's input replaces its output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.distributed.model_parts import decoder_layers, trunk_of, unwrap
from finetune.errors import UserError
from finetune.models.cross_entropy import HeadFunction, LossHead, sum_weighted_losses


class WatchedLayers:
    """Hooks on the decoder layers of a model, which keep or replace the layers' outputs.

    The hooks stay on the layers after a forward, because a checkpointed layer may run through them
    again in the backward.
    """

    def __init__(self, model: Any) -> None:
        self.layers = decoder_layers(model)
        self.norm = find_last_norm(model)
        self._is_proven = False  # whether `_prove` has passed
        self._kept_layers: frozenset[int] = frozenset()  # whose outputs are put into `_states`
        self._states: dict[int, Tensor] = {}  # layer -> its output [rows, tokens, hidden]
        # Layer -> bool[rows, tokens], where its input replaces its output: in the next forward, and
        # in the latest, which the backward may repeat after `watch` has ended.
        self._next_passed_by: Mapping[int, Tensor] = {}
        self._passed_by: Mapping[int, Tensor] = {}
        trunk_of(model).register_forward_pre_hook(self._begin)
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(partial(self._watch, index), with_kwargs=True)

    @contextmanager
    def watch(self, kept: Iterable[int], passed_by: Mapping[int, Tensor]) -> Iterator[None]:
        """Keeps the outputs of layers for `score`, and replaces others, in one forward in this
        block.

        Args:
            kept: The layers, counted from 0, whose outputs are kept.
            passed_by: Layer -> bool[rows, tokens], True where the layer leaves a token unchanged.
        """
        if self._is_proven:
            self._kept_layers = frozenset(kept)
        else:
            last_layer = len(self.layers) - 1  # which `_prove` reads
            self._kept_layers = frozenset((*kept, last_layer))
        self._next_passed_by = passed_by
        self._states = {}
        try:
            yield
        finally:
            self._kept_layers = frozenset()
            self._next_passed_by = {}
            self._states = {}

    def score(self, exits: Sequence[int], weights: Tensor) -> HeadFunction:
        """Makes a `HeadFunction` that adds up the weighted losses of several layers' outputs.

        Within `watch`, a model called with this function returns fp32[exits + 2]: the weighted sum
        with its gradients, then for the log the summed loss of each exit and of the model's output.

        Args:
            exits: The layers, from 0, that are scored in addition to the model's output.
            weights: fp32[exits + 1]: the weight of each exit, then that of the model's output.
        """

        def compute_loss(
            head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor
        ) -> Tensor:
            self._prove(head, hidden)
            exit_states = [self._read_after(head, layer)[positions] for layer in exits]
            scored_states = torch.cat([*exit_states, hidden[positions]])
            scored_labels = labels[positions].repeat(len(weights))
            token_weights = weights.repeat_interleave(len(positions))
            parts = len(weights)
            return sum_weighted_losses(
                head, scored_states, scored_labels, None, token_weights, parts
            )

        return compute_loss

    def _read_after(self, head: LossHead, layer: int) -> Tensor:
        """Returns what the head would read if `layer` were the last one: [tokens, hidden]."""
        return head.scale(self.norm(self._states[layer])).flatten(0, -2)

    @torch.no_grad()
    def _prove(self, head: LossHead, hidden: Tensor) -> None:
        """Checks once that `_read_after` of the last layer returns `hidden`, what the head reads.

        Raises `UserError` where the model computes something else between that layer and the head.
        """
        if self._is_proven:
            return
        last = self._read_after(head, len(self.layers) - 1)
        if last.shape != hidden.shape or not torch.allclose(last, hidden, rtol=1e-2, atol=1e-3):
            raise UserError(
                "exit_layers: the output head of this model reads something else than the norm of "
                "its last layer, so that a layer before it cannot be scored; name another model"
            )
        self._is_proven = True

    def _begin(self, _trunk: nn.Module, _arguments: object) -> None:
        """Takes over what `watch` was given, before the trunk's forward."""
        self._passed_by = self._next_passed_by

    def _watch(
        self,
        index: int,
        _layer: nn.Module,
        arguments: tuple[Any, ...],
        keys: dict[str, Any],
        output: Any,
    ) -> Any:
        """Replaces the layer's output where it is passed by, and keeps it if it is to be scored.

        output: The states [rows, tokens, hidden], alone or first in a tuple.
        """
        hidden = output[0] if isinstance(output, tuple) else output
        if index in self._passed_by:
            before = arguments[0] if arguments else keys["hidden_states"]
            hidden = torch.where(self._passed_by[index].unsqueeze(-1), before, hidden)
        if index in self._kept_layers:
            self._states[index] = hidden
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def watch_layers(model: nn.Module) -> WatchedLayers:
    """Returns the `WatchedLayers` of a model, sharded or not. The first call makes them.

    Raises `UserError` as `find_last_norm` does.
    """
    inner = unwrap(model)
    if not hasattr(inner, "watched_layers"):
        inner.watched_layers = WatchedLayers(inner)
    watched: WatchedLayers = inner.watched_layers
    return watched


def find_last_norm(model: Any) -> nn.Module:
    """Returns the norm between the last decoder layer and the output head.

    Raises `UserError` where the trunk has no norm after its layers, or several.
    """
    trunk = trunk_of(model)
    layers = set(decoder_layers(model))
    is_after_layers = False
    norms: list[nn.Module] = []
    for part in trunk.children():
        is_norm = "norm" in type(part).__name__.lower()
        if is_after_layers and is_norm:
            norms.append(part)
        holds_layers = not layers.isdisjoint(part.modules())
        is_after_layers = is_after_layers or holds_layers
    if len(norms) == 1:
        return norms[0]
    raise UserError(
        f"exit_layers: {type(trunk).__name__} has {len(norms)} norms after its last layer, "
        "and one is expected that the output head reads; name another model"
    )
