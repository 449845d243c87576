"""LoRA layers that compute their base and their adapter in one autograd operation."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, library, nn

from finetune.constants import ADAPTER_NAME
from finetune.distributed.model_parts import product_dtype
from finetune.models.quantized_layers import Form, QuantizedLinear, dequantize_bytes

# Names of layers in one module to which transformers' code gives the same input.
SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


def fuse_adapters(model: nn.Module) -> int:
    """Makes LoRA layers compute y = x W^T + s (x A^T) B^T (Hu et al. 2021, eq. 3) in one operation.

    peft computes the adapter's product, scales it and adds it. That writes three more tensors of
    the output's size in the forward, and two in the backward: the scaled gradient, and a second
    gradient of the input. Under autocast each adapter also keeps a cast copy of the input. Here one
    matrix product adds the adapter to the base's output, and the input is kept without a cast.
    Layers with the same input (q, k and v) are one operation: one product of the input with all
    their A, and one gradient of the input.

    Layers with dropout or DoRA keep peft's forward. The forward needs the layer's whole adapter,
    which excludes FSDP1 (an adapter is a unit of its own) and tensor parallelism (it is sharded).

    Returns:
        The number of layers that were changed.
    """
    from peft.tuners.lora.layer import Linear as PeftLinear

    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is PeftLinear and _is_plain(module)
    }
    for layer in layers.values():
        layer.__class__ = _fused_class()
        layer.group = (layer,)
        layer.ready = None
    for name, layer in layers.items():
        _, _, own_name = name.rpartition(".")
        path = name.removesuffix(own_name)
        for names in SHARED_INPUTS:
            members = [layers[path + member] for member in names if path + member in layers]
            if members and layer is members[0]:
                layer.group = tuple(members)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """Whether the layer's output is exactly x W^T + s (x A^T) B^T, plus the base's bias if any."""
    has_dropout = isinstance(layer.lora_dropout[ADAPTER_NAME], nn.Dropout)
    return not (
        has_dropout
        or layer.lora_variant
        or layer.fan_in_fan_out
        or layer.lora_B[ADAPTER_NAME].bias is not None
    )


@cache
def _fused_class() -> type[nn.Module]:
    """Makes the class of fused layers: peft's `Linear` with another forward.

    It is made at the first call and not at import, because importing peft takes a second.
    """
    from peft.tuners.lora.layer import Linear as PeftLinear

    class FusedLinear(PeftLinear):  # type: ignore[misc]
        casts_parameters = True  # the forward casts its parameters, so FSDP2 need not
        group: tuple[Any, ...]  # whose outputs this forward computes: this layer, then others
        # (an input, this layer's output for it), once the first layer of its group has computed it
        ready: tuple[Tensor, Tensor] | None

        def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> Tensor:
            """Returns this layer's output, and leaves the other outputs of its group in `ready`."""
            ready = self.ready
            self.ready = None
            if arguments or keys or not self.is_fusable():
                output: Tensor = super().forward(x, *arguments, **keys)
                return output
            if ready is not None:
                ready_input, ready_output = ready
                if ready_input is x:
                    return ready_output
            others = self.group[1:]
            if any(other.ready is not None or not other.is_fusable() for other in others):
                # A layer that still has an output in `ready` never fetched it: the model calls it
                # with another input, or not at all. From now on this layer computes alone.
                self.group = (self,)
                others = ()
            own_output, *other_outputs = compute_outputs((self, *others), x)
            for other, other_output in zip(others, other_outputs, strict=True):
                other.ready = (x, other_output)
            return own_output

        def is_fusable(self) -> bool:
            """Whether `compute_outputs` knows the base, the bias is frozen, the adapter is on."""
            base = self.base_layer
            has_frozen_bias = base.bias is None or not base.bias.requires_grad
            is_known = type(base) in (nn.Linear, QuantizedLinear)
            return is_known and has_frozen_bias and not self.disable_adapters and not self.merged

    return FusedLinear


class _LayerForm(NamedTuple):
    """What `_LoraLinears` needs to know of a layer besides its tensors."""

    scale: float  # of the adapter: s in the formula of `fuse_adapters`
    dtype: torch.dtype  # in which the matrix products run; the same for all layers of a group
    quantized: Form | None  # how the base weight is quantized; None if it is stored plain


class _LayerTensors(NamedTuple):
    """The tensors of a layer, in the order of the arguments of `_LoraLinears`."""

    a: Any  # the adapter's A, [rank, in]
    b: Any  # the adapter's B, [out, rank]
    bias: Any  # of the base, [out]; None if it has no bias
    weight: Any  # of the base, [out, in], or the codes of a quantized weight
    scales: Any  # of a quantized weight; None if it is stored plain


LAYER_TENSORS = len(_LayerTensors.__annotations__)  # tensors of one layer
# Where the A and the B of every layer are in the flat list of all layers' tensors.
ALL_A = slice(0, None, LAYER_TENSORS)
ALL_B = slice(1, None, LAYER_TENSORS)
BEFORE_TENSORS = 2  # arguments of `_LoraLinears` before the tensors: the input and the forms


def compute_outputs(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Computes the output [..., out] of each fused layer for their common input `x` [..., in]."""
    dtype = product_dtype(x)
    forms: list[_LayerForm] = []
    tensors: list[Tensor | None] = []
    for layer in layers:
        base = layer.base_layer
        if type(base) is QuantizedLinear:
            form, weight, scales = base.stored_weight(dtype)
        else:
            form = None
            weight = base.weight
            scales = None
        forms.append(_LayerForm(layer.scaling[ADAPTER_NAME], dtype, form))
        a = layer.lora_A[ADAPTER_NAME].weight
        b = layer.lora_B[ADAPTER_NAME].weight
        tensors += (a, b, base.bias, weight, scales)
    products: tuple[Tensor, ...] = _LoraLinears.apply(x, tuple(forms), *tensors)  # type: ignore[no-untyped-call]
    # The views are made outside of the operation, so that a model may add to an output in place,
    # as Falcon does.
    return [product.view(*x.shape[:-1], product.shape[-1]) for product in products]


def add_product(sums: Tensor, left: Tensor, right: Tensor, *, may_be_kept: bool = False) -> Tensor:
    """Computes sums + left @ right in the memory of `sums` [rows, columns].

    Args:
        left: [rows, inner].
        right: [inner, columns].
        may_be_kept: Whether selective checkpointing may have kept `sums` and needs it unchanged.
            Then the result gets memory of its own, except in a compiled graph.
    """
    # torch.compile makes its graph functional, where addmm into `sums` would copy `sums` first: 448
    # copies of a layer's output in a step of an 8B model. It makes our own operator work in place
    # again if nothing else reads `sums`.
    if torch.compiler.is_compiling():
        _add_product(sums, left, right)
        return sums
    # Not addmm_, which models/cpu_products.py cannot override.
    if may_be_kept:
        return torch.addmm(sums, left, right)
    return torch.addmm(sums, left, right, out=sums)


@library.custom_op("finetune::add_product", mutates_args=("sums",))
def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `sums` in place. torch.compile does not look into this operator."""
    torch.addmm(sums, left, right, out=sums)


@_add_product.register_fake
def _(sums: Tensor, left: Tensor, right: Tensor) -> None:
    pass


class _LoraLinears(torch.autograd.Function):
    """LoRA layers with a common input: [..., in] -> for each layer [rows, out].

    `rows` are all the leading dimensions of the input, flattened. The products run in the dtype of
    the forms, whatever autocast says. For the backward it keeps the input without a cast, and
    `inner`, which is x A^T of all layers: [rows, ranks of all layers].
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, forms: tuple[_LayerForm, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        layers = _group_by_layer(tensors)
        dtype = forms[0].dtype
        products = []
        with torch.autocast(inputs.device.type, enabled=False):
            rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
            inner = rows @ _join_a(layers, dtype).t()
            inners = torch.split(inner, _list_ranks(layers), 1)
            for form, layer, layer_inner in zip(forms, layers, inners, strict=True):
                weight_t = _restore_weight(layer, form).t()
                if layer.bias is None:
                    product = rows @ weight_t
                else:
                    product = torch.addmm(layer.bias.to(dtype), rows, weight_t)
                scaled_b = _scale_b(layer, form)
                products.append(add_product(product, layer_inner, scaled_b.t(), may_be_kept=True))
        ctx.forms = forms
        ctx.save_for_backward(inputs, inner, *tensors)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, inner, *tensors = ctx.saved_tensors
        forms = ctx.forms
        layers = _group_by_layer(tensors)
        dtype = forms[0].dtype
        grad_inputs = None
        grad_tensors: list[Tensor | None] = [None] * len(tensors)
        with torch.autocast(inputs.device.type, enabled=False):
            grad_outputs = [gradient.to(dtype) for gradient in gradients]
            grad_inner = _backward_to_inner(grad_outputs, layers, forms)
            needs_gradient = ctx.needs_input_grad[BEFORE_TENSORS:]
            if any(needs_gradient[ALL_A]):
                rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
                grad_tensors[ALL_A] = _backward_to_a(grad_inner, rows, layers)
            if any(needs_gradient[ALL_B]):
                grad_tensors[ALL_B] = _backward_to_b(grad_outputs, inner, layers, forms)
            if ctx.needs_input_grad[0]:
                grad_rows = _backward_to_rows(grad_outputs, grad_inner, layers, forms)
                grad_inputs = grad_rows.view(inputs.shape).to(inputs.dtype)
        return grad_inputs, None, *grad_tensors


# One item for each layer of the group.
Layers = Sequence[_LayerTensors]
Forms = Sequence[_LayerForm]


def _backward_to_inner(grad_outputs: Sequence[Tensor], layers: Layers, forms: Forms) -> Tensor:
    """Computes the gradient of `inner`: [rows, ranks of all layers]."""
    grad_inner = []
    for grad_output, layer, form in zip(grad_outputs, layers, forms, strict=True):
        grad_inner.append(grad_output @ _scale_b(layer, form))
    return grad_inner[0] if len(grad_inner) == 1 else torch.cat(grad_inner, 1)


def _backward_to_a(grad_inner: Tensor, rows: Tensor, layers: Layers) -> list[Tensor]:
    """Computes the gradient of each layer's A, [rank, in], by one product for all layers."""
    grad_a = torch.split(grad_inner.t() @ rows, _list_ranks(layers))
    return [gradient.to(layer.a.dtype) for gradient, layer in zip(grad_a, layers, strict=True)]


def _backward_to_b(
    grad_outputs: Sequence[Tensor], inner: Tensor, layers: Layers, forms: Forms
) -> list[Tensor]:
    """Computes the gradient of each layer's B, [out, rank]."""
    inners = torch.split(inner, _list_ranks(layers), 1)
    grad_b = []
    for grad_output, layer_inner, layer, form in zip(
        grad_outputs, inners, layers, forms, strict=True
    ):
        grad_b.append((grad_output.t() @ layer_inner).to(layer.b.dtype) * form.scale)
    return grad_b


def _backward_to_rows(
    grad_outputs: Sequence[Tensor], grad_inner: Tensor, layers: Layers, forms: Forms
) -> Tensor:
    """Computes the gradient of the input, [rows, in]: summed over all layers and adapters."""
    grad_rows = None
    for grad_output, layer, form in zip(grad_outputs, layers, forms, strict=True):
        weight = _restore_weight(layer, form, grad_output)
        if grad_rows is None:
            grad_rows = grad_output @ weight
        else:
            add_product(grad_rows, grad_output, weight)
    assert grad_rows is not None
    return add_product(grad_rows, grad_inner, _join_a(layers, forms[0].dtype))


def _group_by_layer(tensors: Sequence[Tensor | None]) -> list[_LayerTensors]:
    """Cuts the flat list of all layers' tensors into the tensors of each layer."""
    starts = range(0, len(tensors), LAYER_TENSORS)
    return [_LayerTensors(*tensors[start : start + LAYER_TENSORS]) for start in starts]


def _list_ranks(layers: Layers) -> list[int]:
    """The rank r of each layer's adapter."""
    return [layer.a.shape[0] for layer in layers]


def _join_a(layers: Layers, dtype: torch.dtype) -> Tensor:
    """Concatenates the A of all layers: [ranks of all layers, in]."""
    a_of_layers = [layer.a.to(dtype) for layer in layers]
    return a_of_layers[0] if len(a_of_layers) == 1 else torch.cat(a_of_layers)


def _scale_b(layer: _LayerTensors, form: _LayerForm) -> Tensor:
    """The adapter's B times its scale, [out, rank], in the dtype of the products."""
    scaled: Tensor = (layer.b * form.scale).to(form.dtype)
    return scaled


def _restore_weight(
    layer: _LayerTensors, form: _LayerForm, grad_output: Tensor | None = None
) -> Tensor:
    """The base weight [out, in] in the dtype of the products, dequantized if it is quantized.

    Args:
        grad_output: In a backward, the gradient that the weight is multiplied by. No value of the
            result depends on it: it keeps torch.compile from merging this dequantization with the
            forward's, and from keeping the dequantized weight between them.
    """
    weight: Tensor
    if form.quantized is None:
        weight = layer.weight.to(form.dtype)
    else:
        weight = dequantize_bytes(
            layer.weight, layer.scales, *form.quantized, form.dtype, grad_output
        )
    return weight
