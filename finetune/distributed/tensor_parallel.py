"""Tensor parallelism: a group of ranks shards the matrices of each layer, as transformers plans.

A column-wise layer computes some of its outputs on each rank; a row-wise layer reads them as inputs
and sums its output over the group (Shoeybi et al. 2019, arXiv:1909.08053, section 3). So each rank
computes some heads of attention and some intermediate features of the MLP. The input and the output
of a decoder layer are replicated. Embedding and output head are sharded over the vocabulary. FSDP
then shards a rank's part over the mesh's other dimensions.

The plan is in transformers' config of the model: a style, such as "colwise", for each module. Norms
of heads (q_norm, k_norm) are replicated. A rank computes their gradients from its own heads, and
the group sums them.
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
from finetune.distributed.model_parts import find_local_slices, head_of, local_part
from finetune.distributed.world import TENSOR, World
from finetune.errors import UserError

GRADIENT_STYLE = "replicated_with_grad_allreduce"  # the plan's style for norms of heads
# An attribute that marks a module: gradients of its own parameters must be summed over the group.
PARTIAL = "gradient_is_partial"


class _Columns(ColwiseParallel):
    """torch's column-wise style without the all-reduce of the input's gradient.

    Several layers of a module, such as q, k and v, read the same input. `_SumOfGradients` sums the
    input's gradient once for the module; torch's style would sum it once for each layer.
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
    """Returns hidden states unchanged; the backward sums their gradient over `group`."""

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
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: makes the backward sum the gradient of a module's input over `group`.

    The module is attention or an MLP. The input is its first positional argument, or
    `hidden_states`.
    """
    if args:
        hidden, *others = args
        return (_SumOfGradients.apply(hidden, group), *others), kwargs  # type: ignore[no-untyped-call]
    hidden = _SumOfGradients.apply(kwargs["hidden_states"], group)  # type: ignore[no-untyped-call]
    return args, kwargs | {"hidden_states": hidden}


# a style of transformers' plan -> a function that makes torch's style
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": _Columns,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: _Columns(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def divide_matrices(model: Any, world: World) -> None:
    """Shards the matrices of `model` over each tensor-parallel group.

    `model` is on meta and may have adapters. Call this before FSDP shards it. Does nothing without
    tensor parallelism. Raises `UserError` if transformers' plan is unusable, or torch too old.
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
    parents = set()  # modules with column-wise layers, which all read the module's input
    for name, style in styles.items():
        if style == GRADIENT_STYLE:
            setattr(model.get_submodule(name), PARTIAL, True)
        elif style.startswith("colwise"):
            parent, _, _ = name.rpartition(".")
            parents.add(parent)
    for parent in parents:
        hook = partial(_sum_input_gradient, group=mesh.get_group())
        model.get_submodule(parent).register_forward_pre_hook(hook, with_kwargs=True)
    parallelize_module(model, mesh, _torch_styles(model, styles), src_data_rank=None)
    parallelize_module(
        embedding, mesh, _VocabularyParallel(input_layouts=Replicate()), src_data_rank=None
    )
    for path, part in head.named_modules():
        # The lora_A of a head with an adapter has no rows of the vocabulary: it is replicated.
        if not path.startswith("lora_A"):
            _divide_rows(part, mesh)
    if is_tied:  # sharding has replaced both weights: tie them again
        getattr(head, "base_layer", head).weight = embedding.weight


def _find_styles(model: Any) -> dict[str, str]:
    """Returns the name of each module in transformers' plan -> the module's style.

    Names in the plan begin below the base model, and have * in place of a layer's index.
    """
    plan = model.config.base_model_tp_plan
    styles = {}
    for name, _ in model.named_modules():
        prefix, _, name_in_base = name.partition(".")
        pattern = re.sub(r"\.\d+\.", ".*.", name_in_base)
        if prefix == model.base_model_prefix and pattern in plan:
            styles[name] = plan[pattern]
    return styles


def _divide_rows(module: nn.Module, mesh: Any) -> None:
    """Shards the module's own parameters, but not those of its children, by rows."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        is_trained = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=is_trained))


def _check_plan(model: Any, where: str) -> None:
    """Raises `UserError` if torch is too old, or transformers' plan for `model` is unusable.

    A plan is unusable if it is empty, has an unknown style, or lacks the norms of heads. `where`
    begins the message: the Accelerate file and its sizes.
    """
    if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
        raise UserError(
            f"{where}: tensor parallelism needs a newer torch than {torch.__version__}; 2.13 is "
            "tested"
        )
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    model_type = model.config.model_type
    divides_heads = plan.get("layers.*.self_attn.q_proj") == "colwise"
    module_leaves = {name.split(".")[-1] for name, _ in model.named_modules()}
    unplanned = []
    for norm in ("k_norm", "q_norm"):
        is_planned = plan.get(f"layers.*.self_attn.{norm}") == GRADIENT_STYLE
        if divides_heads and norm in module_leaves and not is_planned:
            unplanned.append(norm)
    # `divide_matrices` shards the embedding whatever its style is
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
        f"{where}: the plan of transformers {transformers.__version__} for {model_type} {problem}, "
        "and is not understood; use a version that this project is tested with, or no tensor "
        "parallelism"
    )


class _VocabularyParallel(RowwiseParallel):
    """The style of an embedding whose rows are sharded over the group.

    Each rank looks up the ids whose rows it holds, and the group sums the results.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        summed = RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )  # type: ignore[no-untyped-call]
        # FSDP puts a hook on a module's output. On a view, the hook would be lost.
        return summed.clone()


def _torch_styles(model: Any, styles: dict[str, str]) -> dict[str, ParallelStyle]:
    """Makes torch's style for each sharded module, by name.

    In a layer with an adapter, two modules are sharded: the base layer, and the adapter's A of a
    row-wise layer or B of a column-wise one. The A of a column-wise layer is marked PARTIAL.
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
            # A is replicated, but this rank computes its gradient from its own outputs of B only
            setattr(layer.get_submodule("lora_A.default"), PARTIAL, True)
    return torch_styles


class VocabularyShard(NamedTuple):
    """The rows of the output head's weight that this rank has; a row belongs to a token id."""

    first: int  # the id of the first row here; the rest follow in order
    rows: int  # the number of rows on all ranks together
    group: Any  # the ranks that divide the rows

    def log_softmax(
        self, logits: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Computes log-probabilities from this shard's logits. All ranks of the group call it.

        Args:
            logits: [tokens, rows of this shard]; overwritten.
            labels: int64[tokens], ids of the whole vocabulary.
            label_smoothing: As in `label_log_probabilities`.

        Returns:
            (log-probabilities of this shard's ids, in the memory of `logits`; log-probabilities of
            the labels, smoothed, [tokens], the same on every rank).
        """
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        # torch's logsumexp would need one more tensor of the size of `logits`
        exponentials = (logits - largest.unsqueeze(1)).exp_().sum(1)
        is_here, rows = self._find(labels, logits)
        label_logits = torch.where(is_here, logits.gather(1, rows.unsqueeze(1)).squeeze(1), 0.0)
        parts = [exponentials, label_logits]
        if label_smoothing:
            parts.append(logits.sum(1))
        sums = torch.stack(parts)
        dist.all_reduce(sums, group=self.group)
        normalizer = largest + sums[0].log()
        label_log_probabilities = sums[1] - normalizer
        if label_smoothing:
            mean_log_probability = sums[2] / self.rows - normalizer
            label_log_probabilities = label_log_probabilities.lerp(
                mean_log_probability, label_smoothing
            )
        return logits.sub_(normalizer.unsqueeze(1)), label_log_probabilities

    def gradient(self, log_probabilities: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """Computes the gradient of the cross entropy by this shard's logits.

        It is this shard's columns of `cross_entropy_gradient`. Overwrites `log_probabilities`,
        [tokens, rows of this shard], with the result, and needs no other rank.
        """
        is_here, rows = self._find(labels, log_probabilities)
        grad = log_probabilities.exp_()
        # what is added at each label: zero if the label is in another shard
        label_terms = (is_here * (label_smoothing - 1)).to(grad.dtype)
        grad.scatter_add_(1, rows.unsqueeze(1), label_terms.unsqueeze(1))
        if label_smoothing:
            grad -= label_smoothing / self.rows
        return grad

    def _find(self, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (whether each label is in this shard, the label's row here), both [tokens].

        The row is a valid index even if the label is in another shard.
        """
        row_count = logits.shape[1]
        rows = labels - self.first
        is_here = (rows >= 0) & (rows < row_count)
        return is_here, rows.clamp(0, row_count - 1)


def find_local_head(
    weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """Returns (weight, bias, shard): this rank's part of an output head, as plain tensors.

    `shard` describes the rows of that part. It is None if the head is not sharded.
    """
    if not isinstance(weight, DTensor):
        return weight, bias, None
    rows, _ = find_local_slices(weight)
    shard = VocabularyShard(rows.start, weight.shape[0], weight.device_mesh.get_group())
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return weight.to_local(), local_bias, shard


def sum_partial_gradients(model: nn.Module, world: World) -> None:
    """Sums the gradients of the modules marked PARTIAL over each tensor-parallel group.

    All ranks call it after the last micro-batch of a step. Does nothing without tensor parallelism.
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
        # One collective for all. The group connects devices, so offloaded gradients go there too.
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(world.device)
        dist.all_reduce(flat, group=world.mesh[TENSOR].get_group())
        flat_parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, summed in zip(gradients, flat_parts, strict=True):
            gradient.copy_(summed.view(gradient.shape))
