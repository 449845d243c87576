"""Decoder layers whose outputs are scored by the head too, or replaced by what entered them.

Early exits (LayerSkip: Elhoushi et al. 2024, arXiv:2404.16710) and layer dropout (LayerDrop: Fan et
al. 2020, arXiv:1909.11556).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.distributed.model_parts import decoder_layers, trunk_of, unwrap
from finetune.errors import UserError
from finetune.models.cross_entropy import HeadFunction, LossHead, weigh_losses


class WatchedLayers:
    """The decoder layers of a model in training, whose outputs are kept or replaced on their way.

    Its hooks stay on the layers, because a checkpointed layer may run through them again in the
    backward.
    """

    def __init__(self, model: Any) -> None:
        self.layers = decoder_layers(model)
        self.norm = find_last_norm(model)
        self._is_proven = False
        self._kept: frozenset[int] = frozenset()
        self._states: dict[int, Tensor] = {}
        self._given: Mapping[int, Tensor] = {}  # for the next forward
        self._passed_by: Mapping[int, Tensor] = {}  # of the last one, which its backward may repeat
        trunk_of(model).register_forward_pre_hook(self._begin)
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(partial(self._watch, index), with_kwargs=True)

    @contextmanager
    def watch(self, kept: Iterable[int], passed_by: Mapping[int, Tensor]) -> Iterator[None]:
        """Keeps the states of one forward within, for `score`.

        Args:
            kept: The layers, from 0, whose output is kept.
            passed_by: Layer -> bool[rows, tokens], True where a token's state stays what it was
                before that layer.
        """
        # the last one for the proof
        self._kept = frozenset(kept if self._is_proven else (*kept, len(self.layers) - 1))
        self._given = passed_by
        self._states = {}
        try:
            yield
        finally:
            self._kept = frozenset()
            self._given = {}
            self._states = {}

    def score(self, exits: Sequence[int], weights: Tensor) -> HeadFunction:
        """A `HeadFunction`: the weighted sum of the losses after several layers.

        `model(..., head_function=...)` within `watch` returns fp32[exits + 2]: that sum with its
        gradients, and for the log the loss of each exit and of the model's output.

        Args:
            exits: The layers that are scored beside the model's output.
            weights: fp32[exits + 1]: of each exit, then of the model's output.
        """

        def compute_loss(
            head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor | None
        ) -> Tensor:
            if positions is None:
                positions = torch.arange(len(labels), device=labels.device)
            self._prove(head, hidden)
            early = [self._read_after(head, layer)[positions] for layer in exits]
            scored = torch.cat([*early, hidden[positions]])
            by_token = weights.repeat_interleave(len(positions))
            compute = weigh_losses(by_token, parts=len(weights))
            return compute(head, scored, labels[positions].repeat(len(weights)), None)

        return compute_loss

    def _read_after(self, head: LossHead, layer: int) -> Tensor:
        """What the head would read after a layer, [tokens, hidden]."""
        return head.scale(self.norm(self._states[layer])).flatten(0, -2)

    @torch.no_grad()
    def _prove(self, head: LossHead, hidden: Tensor) -> None:
        """Compares what the head reads with the norm of the last layer's state, once.

        Raises `UserError` where the model computes something else between them.
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
        self._passed_by = self._given

    def _watch(
        self,
        index: int,
        _layer: nn.Module,
        arguments: tuple[Any, ...],
        keys: dict[str, Any],
        output: Any,
    ) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if index in self._passed_by:
            before = arguments[0] if arguments else keys["hidden_states"]
            hidden = torch.where(self._passed_by[index].unsqueeze(-1), before, hidden)
        if index in self._kept:
            self._states[index] = hidden
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def watch_layers(model: nn.Module) -> WatchedLayers:
    """The watched layers of a model, sharded or not; the first call hooks them.

    Raises `UserError` as `find_last_norm`.
    """
    inner = unwrap(model)
    if not hasattr(inner, "watched_layers"):
        inner.watched_layers = WatchedLayers(inner)
    watched: WatchedLayers = inner.watched_layers
    return watched


def find_last_norm(model: Any) -> nn.Module:
    """The norm between the last decoder layer and the output head.

    Raises `UserError` where the trunk has no such part, or several.
    """
    trunk = trunk_of(model)
    layers = set(decoder_layers(model))
    after = False
    norms: list[nn.Module] = []
    for part in trunk.children():
        is_norm = "norm" in type(part).__name__.lower()
        if after and is_norm:
            norms.append(part)
        after = after or not layers.isdisjoint(part.modules())
    if len(norms) == 1:
        return norms[0]
    raise UserError(
        f"exit_layers: {type(trunk).__name__} has {len(norms)} norms after its last layer, "
        "and one is expected that the output head reads; name another model"
    )
