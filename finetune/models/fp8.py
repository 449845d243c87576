"""Linear layers that multiply in 8-bit floats (FP8), by torchao.

Their weights keep their names, dtypes and values.

Imports torchao, so import this module only where an Accelerate file asks for FP8.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.config import ScalingType
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from finetune.config.layout import Sharding, gathers_fp8, is_multiplied_in_fp8
from finetune.config.module_names import is_adapter
from finetune.distributed.model_parts import head_modules, product_dtype, text_modules


class Fp8Linear(Float8Linear):  # type: ignore[misc]
    """torchao's linear layer, also under a CPU's autocast, and cheaper where the weight is
    frozen.
    """

    is_exact = False  # multiplies in the input's dtype instead, by the weight as it is gathered

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(product_dtype(inputs))  # torchao asks for CUDA's autocast only
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        weight = self.weight
        if self.is_exact:
            if isinstance(weight, Float8TrainingTensor):
                weight = weight.to_original_precision()
            return F.linear(inputs, weight.to(inputs.dtype), bias)
        if weight.requires_grad:
            multiply = matmul_with_hp_or_float8_args
        else:
            multiply = _FrozenProduct
        product: Tensor = multiply.apply(inputs, weight.t(), self.linear_mm_config, self.config)
        return product if bias is None else product + bias


@torch._dynamo.allow_in_graph
class _FrozenProduct(torch.autograd.Function):
    """torchao's product with a frozen weight, without the input and the weight gradient that it
    would keep.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_t: Tensor, mm_config: Any, config: Any) -> Tensor:
        product = matmul_with_hp_or_float8_args.forward(
            _Unsaved(), inputs, weight_t, mm_config, config
        )
        ctx.save_for_backward(weight_t)
        ctx.settings = mm_config, config
        return cast(Tensor, product)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight_t,) = gradients, ctx.saved_tensors
        mm_config, config = ctx.settings
        rows = gradient.reshape(-1, gradient.shape[-1])
        grad = _cast(
            rows, config.cast_config_grad_output, mm_config, GemmInputRole.GRAD_OUTPUT, config
        )
        weight = _cast(
            weight_t,
            config.cast_config_weight_for_grad_input,
            mm_config,
            GemmInputRole.WEIGHT,
            config,
        )
        return (
            torch.mm(grad, weight.t()).reshape(*gradient.shape[:-1], weight_t.shape[0]),
            None,
            None,
            None,
        )


class _Unsaved:
    """A context that keeps nothing for a backward."""

    def save_for_backward(self, *_: Tensor) -> None:
        pass


def _cast(tensor: Tensor, cast_config: Any, mm_config: Any, role: Any, config: Any) -> Any:
    """`tensor` in 8 bits with a scale for all of it, or for each row, as torchao's backward casts
    it.
    """
    if isinstance(tensor, Float8TrainingTensor) or cast_config.scaling_type is ScalingType.DISABLED:
        return tensor
    granularity = cast_config.scaling_granularity
    return hp_tensor_to_float8_dynamic(
        tensor,
        cast_config.target_dtype,
        mm_config,
        gemm_input_role=role,
        scaling_granularity=granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def multiply_in_fp8(model: nn.Module, sharding: Sharding) -> int:
    """Makes linear layers of `model`, which is on meta, multiply in FP8, and returns how many: all
    but the first one, the output head, adapters, and those of a size that the hardware does not
    multiply.

    Call it before sharding, after adapters are in place.

    Raises `UserError` for a mixture of experts, and where no layer is left.
    """
    assert sharding.fp8 is not None
    head = head_modules(model)
    linears = [
        (name, module)
        for name, module in text_modules(model)
        if isinstance(module, nn.Linear) and module not in head and not is_adapter(f"{name}.weight")
    ]
    first = linears[0][0] if linears else ""
    chosen = {
        name
        for name, linear in linears
        if name != first and is_multiplied_in_fp8(tuple(linear.weight.shape))
    }
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in chosen, config=_make_config(sharding)
    )
    for module in model.modules():
        if type(module) is Float8Linear:
            module.__class__ = Fp8Linear
    return len(chosen)


def count_multiplied(model: nn.Module) -> tuple[int, int]:
    """Returns (trained, frozen) numbers of the whole weights, over all ranks, that are multiplied
    in FP8.
    """
    trained = 0
    frozen = 0
    for layer in (module for module in model.modules() if isinstance(module, Fp8Linear)):
        numbers = layer.in_features * layer.out_features
        if layer.weight.requires_grad:
            trained += numbers
        else:
            frozen += numbers
    return trained, frozen


def _make_config(sharding: Sharding) -> Any:
    fp8 = sharding.fp8
    assert fp8 is not None
    return replace(
        Float8LinearConfig.from_recipe_name(fp8.recipe_name),
        pad_inner_dim=fp8.pad_inner_dim,
        enable_fsdp_float8_all_gather=gathers_fp8(sharding),
    )


def keep_scales_current(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Finds the scales of all weights that FSDP gathers in 8 bits after an update, in one
    all-reduce.
    """
    optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """In this block `model` multiplies in its compute dtype: FP8's common scale makes tokens depend
    on each other.
    """
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    for layer in layers:
        layer.is_exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_exact = False
