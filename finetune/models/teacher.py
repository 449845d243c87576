"""A teacher: a frozen model beside the one that is trained, in the compute dtype, spread over the ranks by the same layout.

It runs first, and of its forward only what enters its head is kept. Its head's weight is gathered inside the student's head, for
as long as the two models' logits meet there, chunk by chunk (divergence.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.quantization import read_teacher_quantization
from finetune.config.schema import Recipe
from finetune.constants import compute_dtype
from finetune.distributed.parallelize import gathered, parallelize
from finetune.distributed.world import World
from finetune.flops import forward_flop_per_token_of
from finetune.models.attention.documents import install_attention
from finetune.models.checkpointing import compile_layers
from finetune.models.head.cross_entropy import CrossEntropyHead, HeadFunction, install_loss
from finetune.models.head.divergence import DivergenceOptions, TeacherScores, linear_divergence
from finetune.models.load import DTYPES, ModelSize, build_on_meta, count_parameters, read_base_values
from finetune.models.moe.experts import expert_modules, install_experts
from finetune.models.quantized.base import fill_quantized_layers, quantize_layers
from finetune.pretrained_config import load_config


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model, and how a student learns from it. Returned by `load_teacher`."""

    model: nn.Module
    size: ModelSize
    options: DivergenceOptions

    def flop_per_token(self, length: int) -> float:
        """FLOP of a forward of one token in rows of `length`."""
        return forward_flop_per_token_of(self.model.config, parameters=self.size.multiplied, length=length)

    @torch.no_grad()
    def compare(self, inputs: Mapping[str, Any]) -> HeadFunction:
        """Runs the teacher over a micro-batch. What it returns, at the head of a student over the same micro-batch, computes
        the three sums of `linear_divergence`.

        inputs: the model's keyword arguments, with `trained_positions`.
        """
        states = self.model(**inputs, head_function=_select_states)

        def diverge(head: CrossEntropyHead, hidden: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
            own: Any = self.model.get_output_embeddings()  # type: ignore[operator]
            with gathered(own):
                return linear_divergence(
                    hidden,
                    head.weight,
                    labels,
                    TeacherScores(states, own.weight, own.bias, own.logits),
                    self.options,
                    bias=head.bias,
                    logits=head.logits,
                    trained_positions=positions,
                    label_smoothing=head.label_smoothing if head.training else 0.0,
                )

        return diverge


def load_teacher(recipe: Recipe, world: World) -> Teacher:
    """Builds the recipe's teacher on meta, shards it over the ranks, and reads every rank's own slices.

    Whether it can teach, `training.distillation.check_teacher` answers first. Raises `UserError` for a model that cannot be reached,
    or whose files do not fit its config.
    """
    keys, dtype = recipe.teacher, DTYPES[compute_dtype(world.sharding, recipe.model, recipe.lora)]
    assert keys is not None
    config = load_config(keys)
    quantization = read_teacher_quantization(getattr(config, "quantization_config", None), recipe.method)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # how the files are quantized: they are read here
    model = build_on_meta(config, dtype, keys.trust_remote_code).requires_grad_(False).eval()
    values, stored = read_base_values(model, config, keys)
    install_attention(model, keys.attn_implementation, world.sequence_group)
    install_loss(model)
    install_experts(model, world, dtype)
    size = count_parameters(model)
    unfilled = quantize_layers(model, quantization, dtype, stored) if quantization.bits else frozenset[str]()
    # The Accelerate file names the student's layers; a teacher of another family has its own.
    own = replace(world, sharding=replace(world.sharding, wrap_classes=()))
    parallelize(model, values, own, unfilled)
    fill_quantized_layers(model, values, stored, world)
    if keys.torch_compile and not expert_modules(model):  # whose tokens for each expert differ from step to step
        compile_layers(model)
    method = recipe.method
    return Teacher(model, size, DivergenceOptions(method.distill_beta, method.temperature, method.distill_alpha))


def _select_states(_head: CrossEntropyHead, hidden: Tensor, _labels: Tensor, positions: Tensor | None) -> Tensor:
    """What enters the teacher's head at the trained positions."""
    return hidden if positions is None else hidden[positions]
