"""LoRA layers whose adapters are computed with their base, in one operation for each input."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, library, nn

from finetune.constants import ADAPTER_NAME
from finetune.distributed.model_parts import product_dtype
from finetune.models.quantized_layers import Form, QuantizedLinear, dequantize_parameters

# Layers of one module to which transformers' code gives the same input.
SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


def fuse_adapters(model: nn.Module) -> int:
    """Lets LoRA layers compute y = x W^T + s (x A^T) B^T (Hu et al. 2021, eq. 3) in one operation.

    peft computes the adapter's product, scales it and adds it. That writes three more tensors of
    the output's size in the forward, and two in the backward: the scaled gradient, and a second
    gradient of the input. Under autocast each adapter also keeps a cast copy of the input. Here the
    product itself adds the adapter, and the input is kept as it came. Layers with the same input
    (q, k and v) are one operation: one product with all their A, one gradient of the input.

    Layers with dropout or DoRA stay peft's. In the layer's forward its adapter must be whole, which
    excludes FSDP1 (an adapter is a unit of its own) and tensor parallelism (it is sharded).

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
        leaf = name.rpartition(".")[2]
        path = name.removesuffix(leaf)
        for names in SHARED_INPUTS:
            members = [layers[path + each] for each in names if path + each in layers]
            if members and layer is members[0]:
                layer.group = tuple(members)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    has_dropout = isinstance(layer.lora_dropout[ADAPTER_NAME], nn.Dropout)
    return not (
        has_dropout
        or layer.lora_variant
        or layer.fan_in_fan_out
        or layer.lora_B[ADAPTER_NAME].bias is not None
    )


@cache
def _fused_class() -> type[nn.Module]:
    """peft's layer with another forward. A function, because importing peft takes a second."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    class FusedLinear(PeftLinear):  # type: ignore[misc]
        casts_parameters = True  # FSDP2 need not cast them
        group: tuple[Any, ...]  # the layers whose outputs this one computes, itself first
        # (an input, the output for it), where the first layer of the group has computed it
        ready: tuple[Tensor, Tensor] | None

        def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> Tensor:
            ready = self.ready
            self.ready = None
            if arguments or keys or not self.is_fusable():
                output: Tensor = super().forward(x, *arguments, **keys)
                return output
            if ready is not None and ready[0] is x:
                return ready[1]
            others = self.group[1:]
            if any(other.ready is not None or not other.is_fusable() for other in others):
                # The model calls them with another input, or not at all.
                self.group = (self,)
                others = ()
            outputs = multiply((self, *others), x)
            for other, output in zip(others, outputs[1:], strict=True):
                other.ready = (x, output)
            return outputs[0]

        def is_fusable(self) -> bool:
            """Whether the base is a frozen layer that `multiply` knows, and the adapter is on."""
            base = self.base_layer
            has_frozen_bias = base.bias is None or not base.bias.requires_grad
            is_known = type(base) in (nn.Linear, QuantizedLinear)
            return is_known and has_frozen_bias and not self.disable_adapters and not self.merged

    return FusedLinear


class _LayerForm(NamedTuple):
    """What `_LoraLinears` needs to know of a layer beside its tensors."""

    scale: float  # the adapter's
    dtype: torch.dtype  # of the products
    quantized: Form | None  # of a quantized weight


class _LayerTensors(NamedTuple):
    """The tensors of a layer, in the order of the arguments of `_LoraLinears`."""

    a: Any  # [rank, in]
    b: Any  # [out, rank]
    bias: Any  # None where the layer has none
    weight: Any  # [out, in], or a quantized weight's codes
    scales: Any  # of a quantized weight; else None


NAMES = [*_LayerTensors.__annotations__]
LAYER_TENSORS = len(NAMES)
# the places of every layer's A and B among the tensors
ALL_A = slice(NAMES.index("a"), None, LAYER_TENSORS)
ALL_B = slice(NAMES.index("b"), None, LAYER_TENSORS)
BEFORE_TENSORS = 2  # arguments: the input and the forms


def multiply(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """The outputs [..., out] of fused layers for one input [..., in]."""
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
    # Views are made outside, so that a model may add to an output in place (Falcon).
    return [product.view(*x.shape[:-1], product.shape[-1]) for product in products]


def add_product(sums: Tensor, left: Tensor, right: Tensor, *, may_be_kept: bool = False) -> Tensor:
    """Computes sums + left @ right in the memory of `sums` [rows, columns].

    may_be_kept: Whether selective checkpointing may have kept `sums`, and must find it unchanged.
        Then the result gets its own memory, unless it is compiled.
    """
    # torch.compile makes its graph functional, in which addmm copies `sums`: 448 copies of a
    # layer's output in a step of 8B. An operator of our own it turns back into one in place, where
    # nothing else reads `sums`.
    if torch.compiler.is_compiling():
        _add_product(sums, left, right)
        return sums
    # Not addmm_, which models/cpu_products.py cannot override.
    return torch.addmm(sums, left, right, out=None if may_be_kept else sums)


@library.custom_op("finetune::add_product", mutates_args=("sums",))
def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(sums, left, right, out=sums)


@_add_product.register_fake
def _(sums: Tensor, left: Tensor, right: Tensor) -> None:
    pass


class _LoraLinears(torch.autograd.Function):
    """LoRA layers with one input: [..., in] -> [rows, out] of each layer.

    It computes in the dtype of the forms, whatever autocast says. For the backward it keeps the
    input as it came, and x A^T ("inner") [rows, ranks of all layers].
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
            for form, layer, own in zip(forms, layers, inners, strict=True):
                base = _restore_weight(layer, form).t()
                if layer.bias is None:
                    product = rows @ base
                else:
                    product = torch.addmm(layer.bias.to(dtype), rows, base)
                scaled_b = _scale_b(layer, form)
                products.append(add_product(product, own, scaled_b.t(), may_be_kept=True))
        ctx.forms = forms
        ctx.save_for_backward(inputs, inner, *tensors)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, inner, *tensors = ctx.saved_tensors
        forms = ctx.forms
        layers = _group_by_layer(tensors)
        dtype = forms[0].dtype
        of_inputs = None
        of_tensors: list[Tensor | None] = [None] * len(tensors)
        with torch.autocast(inputs.device.type, enabled=False):
            of_outputs = [gradient.to(dtype) for gradient in gradients]
            of_inner = _backward_to_inner(of_outputs, layers, forms)
            needs_gradient = ctx.needs_input_grad[BEFORE_TENSORS:]
            if any(needs_gradient[ALL_A]):
                rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
                of_tensors[ALL_A] = _backward_to_a(of_inner, rows, layers)
            if any(needs_gradient[ALL_B]):
                of_tensors[ALL_B] = _backward_to_b(of_outputs, inner, layers, forms)
            if ctx.needs_input_grad[0]:
                of_rows = _backward_to_rows(of_outputs, of_inner, layers, forms)
                of_inputs = of_rows.view(inputs.shape).to(inputs.dtype)
        return of_inputs, None, *of_tensors


Layers = Sequence[_LayerTensors]
Forms = Sequence[_LayerForm]


def _backward_to_inner(of_outputs: Sequence[Tensor], layers: Layers, forms: Forms) -> Tensor:
    """The gradient of x A^T of all layers: [rows, ranks of all layers]."""
    of_inner = []
    for of_output, layer, form in zip(of_outputs, layers, forms, strict=True):
        of_inner.append(of_output @ _scale_b(layer, form))
    return of_inner[0] if len(of_inner) == 1 else torch.cat(of_inner, 1)


def _backward_to_a(of_inner: Tensor, rows: Tensor, layers: Layers) -> list[Tensor]:
    """The gradient of each layer's A, by one product."""
    of_a = torch.split(of_inner.t() @ rows, _list_ranks(layers))
    return [gradient.to(layer.a.dtype) for gradient, layer in zip(of_a, layers, strict=True)]


def _backward_to_b(
    of_outputs: Sequence[Tensor], inner: Tensor, layers: Layers, forms: Forms
) -> list[Tensor]:
    """The gradient of each layer's B."""
    inners = torch.split(inner, _list_ranks(layers), 1)
    of_b = []
    for of_output, own, layer, form in zip(of_outputs, inners, layers, forms, strict=True):
        of_b.append((of_output.t() @ own).to(layer.b.dtype) * form.scale)
    return of_b


def _backward_to_rows(
    of_outputs: Sequence[Tensor], of_inner: Tensor, layers: Layers, forms: Forms
) -> Tensor:
    """The gradient of the input, [rows, in]: the sum over the layers and their adapters."""
    of_rows = None
    for of_output, layer, form in zip(of_outputs, layers, forms, strict=True):
        weight = _restore_weight(layer, form, of_output)
        if of_rows is None:
            of_rows = of_output @ weight
        else:
            add_product(of_rows, of_output, weight)
    assert of_rows is not None
    return add_product(of_rows, of_inner, _join_a(layers, forms[0].dtype))


def _group_by_layer(tensors: Sequence[Tensor | None]) -> list[_LayerTensors]:
    starts = range(0, len(tensors), LAYER_TENSORS)
    return [_LayerTensors(*tensors[start : start + LAYER_TENSORS]) for start in starts]


def _list_ranks(layers: Layers) -> list[int]:
    return [layer.a.shape[0] for layer in layers]


def _join_a(layers: Layers, dtype: torch.dtype) -> Tensor:
    """The A of all layers: [ranks of all layers, in]."""
    each = [layer.a.to(dtype) for layer in layers]
    return each[0] if len(each) == 1 else torch.cat(each)


def _scale_b(layer: _LayerTensors, form: _LayerForm) -> Tensor:
    scaled: Tensor = (layer.b * form.scale).to(form.dtype)
    return scaled


def _restore_weight(
    layer: _LayerTensors, form: _LayerForm, of_output: Tensor | None = None
) -> Tensor:
    """The base weight [out, in] in the dtype of the products, dequantized where it is quantized.

    of_output: In a backward, the gradient that its product multiplies.
    """
    if form.quantized is None:
        weight: Tensor = layer.weight.to(form.dtype)
        return weight
    assert layer.scales is not None
    return dequantize_parameters(layer.weight, layer.scales, form.quantized, form.dtype, of_output)
