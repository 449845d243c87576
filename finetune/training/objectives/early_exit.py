"""Fine-tuning that learns the answers after inner layers too, and drops layers (LayerSkip:
Elhoushi et al. 2024, arXiv:2404.16710).

Its model can be cut short, or draft for itself. An exit is a layer after which the head predicts
the answers too. A document passes a layer by if its states skip that layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.methods import Method, choose_layers
from finetune.constants import IGNORE_INDEX, Fields
from finetune.data.batches import MicroBatch, StepBatch, copy_to
from finetune.data.examples import make_generator
from finetune.models.watched_layers import watch_layers
from finetune.training.objectives.objective import SFT, Measured, Objective

# exit_weights -> the weight of each exit, from the number of layers before it
WEIGHTS: Mapping[str, Callable[[Sequence[int]], list[float]]] = {
    "uniform": lambda depths: [1.0 for _ in depths],
    "linear": lambda depths: [float(depth) for depth in depths],
    "sum": lambda depths: [float(total) for total in accumulate(depths)],
    "root": lambda depths: [math.sqrt(depth) for depth in depths],
    "inverse": lambda depths: [1 / depth for depth in depths],
    "inverse_root": lambda depths: [1 / math.sqrt(depth) for depth in depths],
}
# layer_dropout_schedule -> the share of layer_dropout that a layer has, from its depth (0 to 1) and
# the number of layers
SCHEDULES: Mapping[str, Callable[[float, int], float]] = {
    "uniform": lambda _share, _layers: 1.0,
    "exp": lambda share, _layers: 2**share - 1,
    "linear": lambda share, _layers: share,
    "log": lambda share, layers: math.log(share * (layers - 1) + 1, max(layers, 2)),
    "sin": lambda share, _layers: math.sin(math.pi / 2 * share),
    "sigmoid": lambda share, _layers: 1 / (1 + math.exp(-10 * (share - 0.5))),
}
GRADUAL_SHARE = 0.5  # of a run's steps, after which a gradual curriculum has every exit


@dataclass(frozen=True, slots=True)
class EarlyExit(Objective):
    """The weighted mean of the cross entropies after the exits and of the model's output.

    Which layers a document passes by is a pure function of the seed, the step and the example.
    """

    keys: Method
    seed: int
    steps: int | None  # of the run; a gradual curriculum needs them

    def for_evaluation(self) -> Objective:
        """Fine-tuning's loss: that of the model's output."""
        return SFT

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Fields, batch: StepBatch
    ) -> Measured:
        """The weighted loss, and as metrics the loss of each exit and of the model's output."""
        watched = watch_layers(model)
        layers = len(watched.layers)
        device = micro_batch.labels.device
        exits = choose_exits(self.keys, layers, batch.step, self.steps)
        weights = copy_to(torch.tensor(weigh_exits(self.keys, exits, layers)), device)
        drawn = self.draw(micro_batch, batch.step, layers)
        passed_by = {layer: copy_to(is_passed_by, device) for layer, is_passed_by in drawn.items()}
        with watched.watch(exits, passed_by):
            loss, *losses = model(**inputs, head_function=watched.score(exits, weights))
        trained = (micro_batch.labels != IGNORE_INDEX).sum().float()
        names = [*(f"exit_loss/{layer}" for layer in exits), "output_loss"]
        metrics = {}
        for name, loss_sum in zip(names, losses, strict=True):
            metrics[name] = torch.stack([loss_sum.detach().float(), trained])
        return Measured(loss, metrics)

    def draw(self, micro_batch: MicroBatch, step: int, layers: int) -> dict[int, Tensor]:
        """Draws which documents pass which layers by.

        Returns:
            Layer -> bool[rows, tokens], on the host, of each layer that may be passed by.
        """
        chances = find_chances(self.keys, layers)
        rows, tokens = micro_batch.labels.shape
        # of the whole row, of which other ranks of the sequence may have other tokens
        own_tokens = slice(micro_batch.first_token, micro_batch.first_token + tokens)
        row_length = max(own_tokens.stop, sum(micro_batch.document_lengths))
        passed_by = {layer: np.zeros((rows, row_length), bool) for layer in chances}
        for example_id, row, document in micro_batch.locate_documents():
            random = make_generator(self.seed, f"layer_dropout {step}", example_id).random(layers)
            for layer, chance in chances.items():
                passed_by[layer][row, document] = random[layer] < chance
        return {
            layer: torch.from_numpy(of_row[:, own_tokens]) for layer, of_row in passed_by.items()
        }


def choose_exits(keys: Method, layers: int, step: int, steps: int | None) -> tuple[int, ...]:
    """Chooses the exits of a step: layers from 0, without the last, whose output is the model's.

    `steps`: of the run.
    """
    asked = choose_layers(keys.exit_layers, layers)
    if keys.exit_curriculum == "rotational":
        chosen = {(layer + step) % layers for layer in asked}
    elif keys.exit_curriculum == "gradual":
        assert steps is not None, "`make_answer_objective` has refused a run without"
        done = step / steps
        # the deepest layers first
        chosen = {layer for layer in asked if done >= GRADUAL_SHARE * (1 - layer / layers)}
    else:
        chosen = {*asked}
    return tuple(sorted(chosen - {layers - 1}))


def weigh_exits(keys: Method, exits: Sequence[int], layers: int) -> list[float]:
    """Computes the weights of the losses of `exits` and of the model's output; they add up to 1."""
    depths = [*(layer + 1 for layer in exits), layers]
    *early, last = WEIGHTS[keys.exit_weights](depths)
    weights = [*(keys.exit_scale * weight for weight in early), last]
    total = sum(weights)
    return [weight / total for weight in weights]


def find_chances(keys: Method, layers: int) -> dict[int, float]:
    """Computes with which probability a document passes each layer by; only those above 0."""
    if not keys.layer_dropout:
        return {}
    find_share = SCHEDULES[keys.layer_dropout_schedule]
    chances = {}
    for layer in choose_layers(keys.layer_dropout_layers, layers):
        depth = layer / max(layers - 1, 1)
        chance = keys.layer_dropout * find_share(depth, layers)
        if chance > 0:
            chances[layer] = chance
    return chances
