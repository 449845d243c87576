"""Tensor parallelism: the matrices of each layer divided over a group of ranks, by the plan in transformers' config.

A column-wise layer computes a part of its outputs on each rank, a row-wise one reads such parts and sums over the group
(Shoeybi et al. 2019, arXiv:1909.08053, section 3). So attention computes a part of its heads, the MLP a part of its
intermediate features; what enters and leaves a layer is whole on every rank. Embedding and head are divided over the
vocabulary. FSDP then shards what a rank holds over the ranks of the mesh's other dimensions.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from finetune.distributed.mesh import TENSOR
from finetune.distributed.world import World

GRADIENT_STYLE = "replicated_with_grad_allreduce"
PARTIAL = "gradient_is_partial"  # the attribute of a module whose parameters' gradients each rank knows a part of

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def divide_matrices(model: Any, world: World) -> None:
    """Divides the matrices of `model`, which is on meta and may have adapters, over the ranks of each tensor parallel group.

    Call it before FSDP shards the model.
    """
    if world.sharding.tensor_parallel_size == 1:
        return
    assert world.mesh is not None
    mesh, tied = world.mesh[TENSOR], model.get_input_embeddings().weight is model.get_output_embeddings().weight
    styles = dict(_find_styles(model))
    for name, module in model.named_modules():
        if styles.get(name) == GRADIENT_STYLE:
            setattr(module, PARTIAL, True)
    parallelize_module(model, mesh, _torch_styles(model, styles), src_data_rank=None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parallelize_module(embedding, mesh, _VocabularyParallel(input_layouts=Replicate()), src_data_rank=None)
    for name, parameter in list(head.named_parameters()):
        divided = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        head.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    if tied:
        head.weight = embedding.weight


class _VocabularyParallel(RowwiseParallel):
    """An embedding whose rows are divided: each rank looks up the ids that it has, and the group sums."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        # FSDP hangs its hook on what a module returns, and loses it on a view.
        summed = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)  # type: ignore[no-untyped-call]
        return summed.clone()


def _find_styles(model: Any) -> Iterator[tuple[str, str]]:
    """(name of a module, its style in the plan of transformers' config)."""
    plan = {f"{model.base_model_prefix}.{pattern}": style for pattern, style in model.config.base_model_tp_plan.items()}
    for name, _ in model.named_modules():
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        if pattern in plan:
            yield name, plan[pattern]


def _torch_styles(model: Any, styles: dict[str, str]) -> dict[str, ParallelStyle]:
    """torch's style for each divided module: of an adapted layer, for the base and for one of its adapter's two matrices."""
    found = {}
    for name, style in styles.items():
        if style not in STYLES:
            continue
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            found[name] = STYLES[style]()
        else:
            divided = "lora_A" if style.startswith("rowwise") else "lora_B"
            found |= {f"{name}.{part}": STYLES[style]() for part in ("base_layer", f"{divided}.default")}
    return found
