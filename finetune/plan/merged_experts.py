"""Expert weights with their adapters added, which peft computes in each forward: what they take."""

from dataclasses import dataclass

from finetune.config.module_patterns import is_parameter_named
from finetune.plan.activations import Computation
from finetune.plan.architecture import Architecture


@dataclass(frozen=True, slots=True)
class MergedExperts:
    """Bytes, whatever the number of tokens, of expert weights with their adapters added, which peft computes in each forward."""

    kept: int = 0  # between forward and backward
    layer: int = 0  # of the layer with the most
    largest: int = 0  # of one parameter


def merged_expert_bytes(a: Architecture, run: Computation) -> MergedExperts:
    """The merged experts of a model with adapters on them, on one rank; nothing without."""
    if run.lora is None or not run.lora.lora_target_parameters:
        return MergedExperts()
    targets, sizes = run.lora.lora_target_parameters, []
    for layer in range(a.layers):
        adapted = [t.numel for t in a.experts(layer) if is_parameter_named(t.name, targets)]
        sizes.append([run.itemsize * numel // run.expert_ranks for numel in adapted])
    every = run.checkpoint_every
    kept = sum(sum(layer) for index, layer in enumerate(sizes) if every is None or index % every)
    return MergedExperts(kept, max(map(sum, sizes)), max((size for layer in sizes for size in layer), default=0))
