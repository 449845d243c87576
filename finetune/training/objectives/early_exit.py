"""Fine-tuning with losses after inner layers and with dropped layers (LayerSkip: Elhoushi et al.
2024, arXiv:2404.16710).

The trained model works without its last layers, or drafts for itself with its first ones. An exit
is an inner layer after which the head predicts the answers too. A document passes a layer by if its
hidden states skip that layer.
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

# exit_weights -> the weight of each exit, from its depth: the number of layers up to it, itself
# included
WEIGHTS: Mapping[str, Callable[[Sequence[int]], list[float]]] = {
    "uniform": lambda depths: [1.0 for _ in depths],
    "linear": lambda depths: [float(depth) for depth in depths],
    "sum": lambda depths: [float(total) for total in accumulate(depths)],
    "root": lambda depths: [math.sqrt(depth) for depth in depths],
    "inverse": lambda depths: [1 / depth for depth in depths],
    "inverse_root": lambda depths: [1 / math.sqrt(depth) for depth in depths],
}
# layer_dropout_schedule -> the share of `layer_dropout` that a layer has, from its depth (0 for the
# first layer to 1 for the last) and the number of layers
SCHEDULES: Mapping[str, Callable[[float, int], float]] = {
    "uniform": lambda _depth, _layers: 1.0,
    "exp": lambda depth, _layers: 2**depth - 1,
    "linear": lambda depth, _layers: depth,
    "log": lambda depth, layers: math.log(depth * (layers - 1) + 1, max(layers, 2)),
    "sin": lambda depth, _layers: math.sin(math.pi / 2 * depth),
    "sigmoid": lambda depth, _layers: 1 / (1 + math.exp(-10 * (depth - 0.5))),
}
GRADUAL_SHARE = 0.5  # the share of a run's steps after which a gradual curriculum has every exit


@dataclass(frozen=True, slots=True)
class EarlyExit(Objective):
    """The weighted mean of the cross entropies after each exit and at the model's output.

    Which layers a document passes by is a pure function of the seed, the batch's draws and the
    example.
    """

    keys: Method
    seed: int
    steps: int | None  # of the run; only a gradual curriculum needs them

    def for_evaluation(self) -> Objective:
        """Returns the loss of supervised fine-tuning: that of the model's output alone."""
        return SFT

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the weighted loss; the metrics are the loss of each exit and of the model's output.

        An exit's metric is named by the layer's index, from 0.
        """
        watched = watch_layers(model)
        layers = len(watched.layers)
        device = micro_batch.labels.device
        exits = choose_exits(self.keys, layers, batch.step, self.steps)
        weights = copy_to(torch.tensor(weigh_exits(self.keys, exits, layers)), device)
        on_host = self.draw(micro_batch, batch.draws, layers)
        passed_by = {layer: copy_to(passes, device) for layer, passes in on_host.items()}
        with watched.watch(exits, passed_by):
            loss, *loss_sums = model(**inputs, head_function=watched.score(exits, weights))
        trained_tokens = (micro_batch.labels != IGNORE_INDEX).sum().float()
        names = [*(f"exit_loss/{layer}" for layer in exits), "output_loss"]
        metrics = {}
        for name, loss_sum in zip(names, loss_sums, strict=True):
            metrics[name] = torch.stack([loss_sum.detach().float(), trained_tokens])
        return Measured(loss, metrics)

    def draw(self, micro_batch: MicroBatch, draws: str, layers: int) -> dict[int, Tensor]:
        """Draws which documents pass which layers by. `draws`: the batch's.

        Returns:
            For each layer that documents may pass by, bool[rows, tokens] on the host: whether the
            token's document does.
        """
        probabilities = find_skip_probabilities(self.keys, layers)
        rows, tokens = micro_batch.labels.shape
        # A row's tokens may be divided among ranks: draw for the whole row, then cut out this
        # rank's tokens.
        own_tokens = slice(micro_batch.first_token, micro_batch.first_token + tokens)
        row_length = max(own_tokens.stop, sum(micro_batch.document_lengths))
        passed_by = {layer: np.zeros((rows, row_length), bool) for layer in probabilities}
        for example_id, row, document in micro_batch.locate_documents():
            random = make_generator(self.seed, f"layer_dropout {draws}", example_id).random(layers)
            for layer, probability in probabilities.items():
                passed_by[layer][row, document] = random[layer] < probability
        return {
            layer: torch.from_numpy(passes[:, own_tokens]) for layer, passes in passed_by.items()
        }


def choose_exits(keys: Method, layers: int, step: int, steps: int | None) -> tuple[int, ...]:
    """Chooses the exits of a step: indexes of layers, from 0, in ascending order.

    The last layer is never an exit, since its output is the model's.

    Args:
        keys: With `exit_layers` and `exit_curriculum`.
        layers: How many layers the model has.
        step: 0-based.
        steps: How many steps the run has; None if that is unknown.
    """
    exit_layers = choose_layers(keys.exit_layers, layers)
    if keys.exit_curriculum == "rotational":
        chosen = {(layer + step) % layers for layer in exit_layers}
    elif keys.exit_curriculum == "gradual":
        assert steps is not None, "`make_answer_objective` refuses a run without a number of steps"
        done = step / steps
        # the deepest layers first
        chosen = {layer for layer in exit_layers if done >= GRADUAL_SHARE * (1 - layer / layers)}
    else:
        chosen = {*exit_layers}
    last_layer = layers - 1
    return tuple(sorted(chosen - {last_layer}))


def weigh_exits(keys: Method, exits: Sequence[int], layers: int) -> list[float]:
    """Computes the weight of each exit's loss and, last, of the loss of the model's output.

    The weights add up to 1.
    """
    depths = [*(layer + 1 for layer in exits), layers]
    *exit_weights, output_weight = WEIGHTS[keys.exit_weights](depths)
    weights = [*(keys.exit_scale * weight for weight in exit_weights), output_weight]
    total = sum(weights)
    return [weight / total for weight in weights]


def find_skip_probabilities(keys: Method, layers: int) -> dict[int, float]:
    """Computes the probability that a document passes a layer by.

    Returns layer -> probability, without the layers that no document passes by.
    """
    if not keys.layer_dropout:
        return {}
    find_share = SCHEDULES[keys.layer_dropout_schedule]
    probabilities = {}
    for layer in choose_layers(keys.layer_dropout_layers, layers):
        depth = layer / max(layers - 1, 1)
        probability = keys.layer_dropout * find_share(depth, layers)
        if probability > 0:
            probabilities[layer] = probability
    return probabilities
