"""Fine-tuning that learns the answers after inner layers too, and drops layers.

So a model can be cut short, or draft for itself (LayerSkip: Elhoushi et al. 2024,
arXiv:2404.16710).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.methods import Method, choose_layers
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch, copy_to
from finetune.data.examples import make_generator
from finetune.models.watched_layers import watch_layers
from finetune.training.objectives.objective import SFT, Measured, Objective

# exit_weights -> the weights of exits after so many layers each
WEIGHTS: Mapping[str, Callable[[Sequence[int]], list[float]]] = {
    "uniform": lambda depths: [1.0 for _ in depths],
    "linear": lambda depths: [float(depth) for depth in depths],
    "sum": lambda depths: [float(total) for total in accumulate(depths)],
    "root": lambda depths: [math.sqrt(depth) for depth in depths],
    "inverse": lambda depths: [1 / depth for depth in depths],
    "inverse_root": lambda depths: [1 / math.sqrt(depth) for depth in depths],
}
# layer_dropout_schedule -> the share of layer_dropout, by a layer's share of the model's depth and
# the number of layers
SCHEDULES: Mapping[str, Callable[[float, int], float]] = {
    "uniform": lambda _share, _layers: 1.0,
    "exp": lambda share, _layers: 2**share - 1,
    "linear": lambda share, _layers: share,
    "log": lambda share, layers: math.log(share * (layers - 1) + 1, max(layers, 2)),
    "sin": lambda share, _layers: math.sin(math.pi / 2 * share),
    "sigmoid": lambda share, _layers: 1 / (1 + math.exp(-10 * (share - 0.5))),
}
GRADUAL_SHARE = 0.5  # of a run's steps, after which every exit of a gradual curriculum is scored


@dataclass(frozen=True, slots=True)
class EarlyExit(Objective):
    """The weighted mean of the cross entropies after several layers, of which the model's output
    is the last.

    Which layers a document passes by is a pure function of the seed, the step and the example.
    """

    keys: Method
    seed: int
    steps: int | None  # of the run; a gradual curriculum needs them

    def for_evaluation(self) -> Objective:
        """Fine-tuning's loss, of the model's output."""
        return SFT

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The weighted loss; the loss of each exit, and of the model's output."""
        watched = watch_layers(model)
        count = len(watched.layers)
        device = micro_batch.labels.device
        exits = choose_exits(self.keys, count, batch.step, self.steps)
        weights = copy_to(torch.tensor(weigh_exits(self.keys, exits, count)), device)
        passed_by = {
            layer: copy_to(documents, device)
            for layer, documents in self.draw(micro_batch, batch.step, count).items()
        }
        with watched.watch(exits, passed_by):
            loss, *losses = model(**inputs, head_function=watched.score(exits, weights))
        trained = (micro_batch.labels != IGNORE_INDEX).sum().float()
        names = [*(f"exit_loss/{layer}" for layer in exits), "output_loss"]
        metrics = {
            name: torch.stack([each.detach().float(), trained])
            for name, each in zip(names, losses, strict=True)
        }
        return Measured(loss, metrics)

    def draw(self, micro_batch: MicroBatch, step: int, layers: int) -> dict[int, Tensor]:
        """Draws which documents pass which layers by.

        Returns:
            On the host, bool[rows, tokens] as the labels lie, by layer; none of a layer that none
            may pass by.
        """
        chances = find_chances(self.keys, layers)
        rows, tokens = micro_batch.labels.shape
        here = slice(micro_batch.first_token, micro_batch.first_token + tokens)
        length = max(here.stop, sum(micro_batch.document_lengths))
        passed_by = {layer: np.zeros((rows, length), bool) for layer in chances}
        for example_id, row, own in micro_batch.locate_documents():
            random = make_generator(self.seed, f"layer_dropout {step}", example_id).random(layers)
            for layer, chance in chances.items():
                passed_by[layer][row, own] = random[layer] < chance
        return {layer: torch.from_numpy(each[:, here]) for layer, each in passed_by.items()}


def choose_exits(keys: Method, layers: int, step: int, steps: int | None) -> tuple[int, ...]:
    """The layers, from 0, after which step `step` scores the answers; without the last layer,
    whose output is the model's.
    """
    asked = choose_layers(keys.exit_layers, layers)
    if keys.exit_curriculum == "rotational":
        chosen = {(layer + step) % layers for layer in asked}
    elif keys.exit_curriculum == "gradual":
        assert steps is not None, "`make_answer_objectives` has asked for them"
        done = step / steps
        chosen = {layer for layer in asked if done >= GRADUAL_SHARE * (1 - layer / layers)}
    else:
        chosen = {*asked}
    return tuple(sorted(chosen - {layers - 1}))


def weigh_exits(keys: Method, exits: Sequence[int], layers: int) -> list[float]:
    """The weights of the losses after the layers `exits` and of the model's output; they add up to
    1.
    """
    *early, last = WEIGHTS[keys.exit_weights]([*(layer + 1 for layer in exits), layers])
    weights = [*(keys.exit_scale * weight for weight in early), last]
    return [weight / sum(weights) for weight in weights]


def find_chances(keys: Method, layers: int) -> dict[int, float]:
    """The probability with which a document passes a layer by, of those that it may pass by."""
    if not keys.layer_dropout:
        return {}
    share = SCHEDULES[keys.layer_dropout_schedule]
    chances = {
        layer: keys.layer_dropout * share(layer / max(layers - 1, 1), layers)
        for layer in choose_layers(keys.layer_dropout_layers, layers)
    }
    return {layer: chance for layer, chance in chances.items() if chance > 0}
