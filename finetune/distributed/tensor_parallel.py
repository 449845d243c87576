"""Tensor parallelism: the matrices of each layer sharded over a group of ranks, by the plan in
transformers' config.

A column-wise layer computes a part of its outputs on each rank, a row-wise one reads such parts and
sums over the group (Shoeybi et al. 2019, arXiv:1909.08053, section 3). So attention computes a part
of its heads, the MLP a part of its intermediate features; what enters and leaves a layer is whole
on every rank. Embedding and head are divided over the vocabulary. FSDP then shards what a rank
holds over the ranks of the mesh's other dimensions.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from finetune.config.layout import describe_sizes
from finetune.distributed.model_parts import find_local_slices, head_of
from finetune.distributed.world import TENSOR, World
from finetune.errors import UserError

GRADIENT_STYLE = "replicated_with_grad_allreduce"
# the attribute of a module whose parameters' gradients each rank knows a part of
PARTIAL = "gradient_is_partial"


class _Columns(ColwiseParallel):
    """torch's style without its all-reduce of the input's gradient.

    Several layers read the same input. `_SumOfGradients` sums its gradient once, where the input
    enters their module; torch's style would sum it once for each layer.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any,
        desired_input_layouts: Any,
        mod: Any,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        return DTensor.from_local(
            inputs[0], device_mesh, [Replicate()], run_check=False, grad_placements=[Partial()]
        )


class _SumOfGradients(torch.autograd.Function):
    """The identity, whose gradient is all-reduced over `group`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        summed = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wraps the input of attention or MLP, given by position or as `hidden_states`."""
    if args:
        return (_SumOfGradients.apply(args[0], group), *args[1:]), kwargs  # type: ignore[no-untyped-call]
    return args, kwargs | {"hidden_states": _SumOfGradients.apply(kwargs["hidden_states"], group)}  # type: ignore[no-untyped-call]


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": _Columns,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: _Columns(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def divide_matrices(model: Any, world: World) -> None:
    """Shards the matrices of `model` over each tensor-parallel group.

    The model is on meta and may have adapters.

    Call it before FSDP shards the model. Raises `UserError` if transformers' plan for the model is
    not understood.
    """
    if not world.sharding.divides_matrices:
        return
    _check_plan(
        model, f"{world.sharding.source}: {describe_sizes(world.sharding.mesh_sizes or {})}"
    )
    assert world.mesh is not None
    mesh = world.mesh[TENSOR]
    tied = model.get_input_embeddings().weight is head_of(model).weight
    plan = {
        f"{model.base_model_prefix}.{pattern}": style
        for pattern, style in model.config.base_model_tp_plan.items()
    }
    patterns = {name: re.sub(r"\.\d+\.", ".*.", name) for name, _ in model.named_modules()}
    styles = {name: plan[pattern] for name, pattern in patterns.items() if pattern in plan}
    for name, module in model.named_modules():
        if styles.get(name) == GRADIENT_STYLE:
            setattr(module, PARTIAL, True)
    for parent in {
        name.rpartition(".")[0] for name, style in styles.items() if style.startswith("colwise")
    }:
        hook = partial(_enter, group=mesh.get_group())
        model.get_submodule(parent).register_forward_pre_hook(hook, with_kwargs=True)
    parallelize_module(model, mesh, _torch_styles(model, styles), src_data_rank=None)
    embedding = model.get_input_embeddings()
    head = head_of(model)
    parallelize_module(
        embedding, mesh, _VocabularyParallel(input_layouts=Replicate()), src_data_rank=None
    )
    for path, part in head.named_modules():
        if not path.startswith("lora_A"):  # of an adapted head, whose states all ranks have
            _divide_rows(part, mesh)
    if tied:
        getattr(head, "base_layer", head).weight = embedding.weight


def _divide_rows(module: nn.Module, mesh: Any) -> None:
    """Shards the module's own parameters by rows."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        trained = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(divided, requires_grad=trained))


def _check_plan(model: Any, where: str) -> None:
    if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
        raise UserError(
            f"{where}: tensor parallelism needs a newer torch than {torch.__version__}; 2.13 is "
            "tested"
        )
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    kind = model.config.model_type
    of_heads = plan.get("layers.*.self_attn.q_proj") == "colwise"
    if of_heads:
        norms = {name.rpartition(".")[2] for name, _ in model.named_modules()} & {
            "q_norm",
            "k_norm",
        }
    else:
        norms = set()
    unplanned = [
        name for name in sorted(norms) if plan.get(f"layers.*.self_attn.{name}") != GRADIENT_STYLE
    ]
    unknown = sorted(
        {style for name, style in plan.items() if name != "embed_tokens"}
        - {*STYLES, GRADIENT_STYLE}
    )
    if not plan or unplanned or unknown:
        problem = "is empty"
        if unknown:
            problem = f"has {unknown[0]}"
        elif unplanned:
            problem = f"lacks {', '.join(unplanned)}"
        raise UserError(
            f"{where}: the plan of transformers {transformers.__version__} for {kind} {problem}, "
            "and is not understood; use a version that this project is tested with, or no tensor "
            "parallelism"
        )


class _VocabularyParallel(RowwiseParallel):
    """An embedding with sharded rows: each rank looks up the ids that it holds, and the group adds
    up the results.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        # FSDP hangs its hook on what a module returns, and loses it on a view.
        summed = RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )  # type: ignore[no-untyped-call]
        return summed.clone()


def _torch_styles(model: Any, styles: dict[str, str]) -> dict[str, ParallelStyle]:
    """torch's style for each sharded module; of an adapted layer, for the base and one of its
    adapter's matrices.
    """
    torch_styles = {}
    for name, style in styles.items():
        if style not in STYLES:
            continue
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            torch_styles[name] = STYLES[style]()
        else:
            divided = "lora_A" if style.startswith("rowwise") else "lora_B"
            if divided == "lora_B":  # and its input's gradient, so A's too, are parts
                setattr(layer.get_submodule("lora_A.default"), PARTIAL, True)
            torch_styles |= {
                f"{name}.{part}": STYLES[style]() for part in ("base_layer", f"{divided}.default")
            }
    return torch_styles


class VocabularyShard(NamedTuple):
    """The rows of a head that this rank has."""

    first: int
    rows: int  # of the whole vocabulary
    group: Any  # the ranks that have the others

    def log_softmax(
        self, logits: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities [tokens, rows of this shard] of `logits`, in their place, and those
        of `labels` [tokens] as by `label_log_probabilities`; the same on every rank of the group,
        which all call it.
        """
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        # torch's logsumexp takes another tensor of this size
        own = (logits - largest.unsqueeze(1)).exp_().sum(1)
        is_here, rows = self._find(labels, logits)
        of_labels = torch.where(is_here, logits.gather(1, rows.unsqueeze(1)).squeeze(1), 0.0)
        sums = torch.stack([own, of_labels, *([logits.sum(1)] if label_smoothing else [])])
        dist.all_reduce(sums, group=self.group)
        normalizer = largest + sums[0].log()
        of_labels = sums[1] - normalizer
        if label_smoothing:
            of_labels = of_labels.lerp(sums[2] / self.rows - normalizer, label_smoothing)
        return logits.sub_(normalizer.unsqueeze(1)), of_labels

    def gradient(self, log_probabilities: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """This shard's columns of `cross_entropy_gradient`, in place of `log_probabilities`."""
        is_here, rows = self._find(labels, log_probabilities)
        grad = log_probabilities.exp_()
        grad.scatter_add_(
            1, rows.unsqueeze(1), (is_here * (label_smoothing - 1)).to(grad.dtype).unsqueeze(1)
        )
        if label_smoothing:
            grad -= label_smoothing / self.rows
        return grad

    def _find(self, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each label is in this shard, and its row there (any row, where it is not)."""
        rows = labels - self.first
        return (rows >= 0) & (rows < logits.shape[1]), rows.clamp(0, logits.shape[1] - 1)


def find_local_head(
    weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """Returns (weight, bias) of a head as this rank has them, and their place in the vocabulary;
    None if it is all here.
    """
    if not isinstance(weight, DTensor):
        return weight, bias, None
    (rows, _), mesh = find_local_slices(weight), weight.device_mesh
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return (
        weight.to_local(),
        local_bias,
        VocabularyShard(rows.start, weight.shape[0], mesh.get_group()),
    )


def sum_partial_gradients(model: nn.Module, world: World) -> None:
    """All-reduces the gradients of replicated norms within each tensor-parallel group.

    Each rank has computed them from its own heads only. Called after the last micro-batch of a
    step.
    """
    if world.mesh is None or not world.sharding.divides_matrices:
        return
    parameters = (
        p
        for module in model.modules()
        if hasattr(module, PARTIAL)
        for p in module.parameters(recurse=False)
    )
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for p in parameters
        if p.grad is not None
    ]
    if gradients:
        # Where they are offloaded, they still cross between the devices, to which the group
        # belongs.
        together = torch.cat([gradient.flatten() for gradient in gradients]).to(world.device)
        dist.all_reduce(together, group=world.mesh[TENSOR].get_group())
        parts = torch.split(together, [gradient.numel() for gradient in gradients])
        for gradient, summed in zip(gradients, parts, strict=True):
            gradient.copy_(summed.view(gradient.shape))
