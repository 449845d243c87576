"""Tensor parallelism: the matrices of each layer sharded over a group of ranks, by the plan in
transformers' config.

A column-wise layer computes a part of its outputs on each rank, a row-wise one reads such parts and
sums over the group (Shoeybi et al. 2019, arXiv:1909.08053, section 3). So attention computes a part
of its heads on each rank, the MLP a part of its intermediate features; the input and the output of
a decoder layer are whole on every rank. Embedding and head are divided over the vocabulary. FSDP
then shards a rank's part over the mesh's other dimensions.

The plan has a style, such as "colwise", for each module. Norms of heads are replicated; of their
gradients, a rank computes the part of its own heads.
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
from finetune.constants import Record
from finetune.distributed.model_parts import find_local_slices, head_of, local_part
from finetune.distributed.world import TENSOR, World
from finetune.errors import UserError

GRADIENT_STYLE = "replicated_with_grad_allreduce"  # of norms of heads
PARTIAL = "gradient_is_partial"  # marks a module: each rank computes a part of its gradients


class _Columns(ColwiseParallel):
    """torch's style without the all-reduce of the input's gradient.

    Several layers of a module read the same input. `_SumOfGradients` sums its gradient once for the
    module; torch's style would sum it once for each layer.
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


def _sum_input_gradient(
    module: nn.Module, args: tuple[Any, ...], kwargs: Record, group: dist.ProcessGroup
) -> tuple[tuple[Any, ...], Record]:
    """A forward pre-hook of attention and MLP, whose input is the first or `hidden_states`."""
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

    The model is on meta and may have adapters. Call it before FSDP shards the model. Raises
    `UserError` if transformers' plan for the model is not understood.
    """
    if not world.sharding.divides_matrices:
        return
    _check_plan(
        model, f"{world.sharding.source}: {describe_sizes(world.sharding.mesh_sizes or {})}"
    )
    assert world.mesh is not None
    mesh = world.mesh[TENSOR]
    embedding = model.get_input_embeddings()
    head = head_of(model)
    is_tied = embedding.weight is head.weight
    styles = _find_styles(model)
    read_by_columns = set()  # modules whose layers read one input column-wise
    for name, style in styles.items():
        if style == GRADIENT_STYLE:
            setattr(model.get_submodule(name), PARTIAL, True)
        elif style.startswith("colwise"):
            read_by_columns.add(name.rpartition(".")[0])
    for name in read_by_columns:
        hook = partial(_sum_input_gradient, group=mesh.get_group())
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    parallelize_module(model, mesh, _torch_styles(model, styles), src_data_rank=None)
    parallelize_module(
        embedding, mesh, _VocabularyParallel(input_layouts=Replicate()), src_data_rank=None
    )
    for path, part in head.named_modules():
        # lora_A of an adapted head is replicated: it works on the hidden states
        if not path.startswith("lora_A"):
            _divide_rows(part, mesh)
    if is_tied:
        getattr(head, "base_layer", head).weight = embedding.weight


def _find_styles(model: Any) -> dict[str, str]:
    """Finds each module's style in transformers' plan, which has * for the index of a layer."""
    plan = model.config.base_model_tp_plan
    styles = {}
    for name, _ in model.named_modules():
        prefix, _, inner = name.partition(".")
        pattern = re.sub(r"\.\d+\.", ".*.", inner)
        if prefix == model.base_model_prefix and pattern in plan:
            styles[name] = plan[pattern]
    return styles


def _divide_rows(module: nn.Module, mesh: Any) -> None:
    """Shards the module's own parameters by rows."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        trained = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(divided, requires_grad=trained))


def _check_plan(model: Any, where: str) -> None:
    """Raises `UserError` if torch is too old, or if the plan is empty, has an unknown style, or
    lacks the norms of heads.
    """
    if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
        raise UserError(
            f"{where}: tensor parallelism needs a newer torch than {torch.__version__}; 2.13 is "
            "tested"
        )
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    kind = model.config.model_type
    divides_heads = plan.get("layers.*.self_attn.q_proj") == "colwise"
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    unplanned = []
    for norm in ("k_norm", "q_norm"):
        is_planned = plan.get(f"layers.*.self_attn.{norm}") == GRADIENT_STYLE
        if divides_heads and norm in modules and not is_planned:
            unplanned.append(norm)
    styles = {style for name, style in plan.items() if name != "embed_tokens"}
    unknown = sorted(styles - {*STYLES, GRADIENT_STYLE})
    if unknown:
        problem = f"has {unknown[0]}"
    elif unplanned:
        problem = f"lacks {', '.join(unplanned)}"
    elif not plan:
        problem = "is empty"
    else:
        return
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
        # FSDP puts its hook on a module's output, and would lose it on a view.
        summed = RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )  # type: ignore[no-untyped-call]
        return summed.clone()


def _torch_styles(model: Any, styles: dict[str, str]) -> dict[str, ParallelStyle]:
    """Makes torch's style for each sharded module; of an adapted layer, for the base and for the
    one of the adapter's matrices that is divided.
    """
    torch_styles = {}
    for name, style in styles.items():
        if style not in STYLES:
            continue
        make_style = STYLES[style]
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            torch_styles[name] = make_style()
            continue
        torch_styles[f"{name}.base_layer"] = make_style()
        if style.startswith("rowwise"):
            torch_styles[f"{name}.lora_A.default"] = make_style()
        else:
            torch_styles[f"{name}.lora_B.default"] = make_style()
            # A's gradient comes from B's columns of this rank
            setattr(layer.get_submodule("lora_A.default"), PARTIAL, True)
    return torch_styles


class VocabularyShard(NamedTuple):
    """The rows of a head that this rank has: one for each id from `first` on."""

    first: int
    rows: int  # of the whole vocabulary
    group: Any  # the ranks that have the other rows

    def log_softmax(
        self, logits: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Computes log-probabilities from this shard's logits. All ranks of the group call it.

        Args:
            logits: [tokens, rows of this shard].
            labels: int64[tokens].
            label_smoothing: As in `label_log_probabilities`.

        Returns:
            (those of this shard's rows, in place of `logits`; those of the labels, [tokens], the
            same on every rank).
        """
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        # torch's logsumexp takes another tensor of this size
        exponentials = (logits - largest.unsqueeze(1)).exp_().sum(1)
        is_here, rows = self._find(labels, logits)
        of_labels = torch.where(is_here, logits.gather(1, rows.unsqueeze(1)).squeeze(1), 0.0)
        parts = [exponentials, of_labels]
        if label_smoothing:
            parts.append(logits.sum(1))
        sums = torch.stack(parts)
        dist.all_reduce(sums, group=self.group)
        normalizer = largest + sums[0].log()
        of_labels = sums[1] - normalizer
        if label_smoothing:
            of_labels = of_labels.lerp(sums[2] / self.rows - normalizer, label_smoothing)
        return logits.sub_(normalizer.unsqueeze(1)), of_labels

    def gradient(self, log_probabilities: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """Computes this shard's columns of `cross_entropy_gradient`, in place of
        `log_probabilities`.
        """
        is_here, rows = self._find(labels, log_probabilities)
        grad = log_probabilities.exp_()
        of_labels = (is_here * (label_smoothing - 1)).to(grad.dtype)
        grad.scatter_add_(1, rows.unsqueeze(1), of_labels.unsqueeze(1))
        if label_smoothing:
            grad -= label_smoothing / self.rows
        return grad

    def _find(self, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (whether each label is in this shard, its row there, or any row if it is not)."""
        rows = labels - self.first
        is_here = (rows >= 0) & (rows < logits.shape[1])
        return is_here, rows.clamp(0, logits.shape[1] - 1)


def find_local_head(
    weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """Returns (weight, bias, shard) of a head as this rank has them; the shard is None if the whole
    vocabulary is here.
    """
    if not isinstance(weight, DTensor):
        return weight, bias, None
    rows, _ = find_local_slices(weight)
    shard = VocabularyShard(rows.start, weight.shape[0], weight.device_mesh.get_group())
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return weight.to_local(), local_bias, shard


def sum_partial_gradients(model: nn.Module, world: World) -> None:
    """All-reduces the gradients of the modules marked PARTIAL within each tensor-parallel group:
    each rank has computed a part of them.

    Called after the last micro-batch of a step.
    """
    if world.mesh is None or not world.sharding.divides_matrices:
        return
    gradients = []
    for module in model.modules():
        if hasattr(module, PARTIAL):
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    gradients.append(local_part(parameter.grad))
    if gradients:
        # offloaded ones too are summed on the devices, which the group connects
        together = torch.cat([gradient.flatten() for gradient in gradients]).to(world.device)
        dist.all_reduce(together, group=world.mesh[TENSOR].get_group())
        parts = torch.split(together, [gradient.numel() for gradient in gradients])
        for gradient, summed in zip(gradients, parts, strict=True):
            gradient.copy_(summed.view(gradient.shape))
