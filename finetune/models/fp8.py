"""Linear layers that multiply in 8-bit floats (FP8), by torchao.

The layers' weights keep their names, dtypes and values: the forward casts them.

Imports torchao, so import this module only where an Accelerate file asks for FP8.
"""

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
from finetune.distributed.model_parts import product_dtype, text_linears


class Fp8Linear(Float8Linear):  # type: ignore[misc]
    """torchao's linear layer, which also works under a CPU's autocast, and whose frozen weight
    costs less memory and time.
    """

    # Whether it multiplies in the compute dtype; `without_rounding` of models/probe.py sets it. The
    # weight may still be rounded: FSDP may gather it in FP8.
    is_exact = False

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(
            product_dtype(inputs)
        )  # torchao's own forward knows CUDA's autocast only
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
    """torchao's product `inputs @ weight_t` with a frozen weight.

    torchao's own operation keeps the input for the weight's gradient and computes this gradient,
    which a frozen weight does not need.

    Args of the forward:
        inputs: [..., in].
        weight_t: [in, out]; an 8-bit tensor where FSDP has gathered the weight in FP8.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_t: Tensor, mm_config: Any, config: Any) -> Tensor:
        product = matmul_with_hp_or_float8_args.forward(
            _DiscardingContext(), inputs, weight_t, mm_config, config
        )
        ctx.save_for_backward(weight_t)
        ctx.settings = mm_config, config
        return cast(Tensor, product)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_product,) = gradients
        (weight_t,) = ctx.saved_tensors
        mm_config, config = ctx.settings
        rows_fp8 = _cast(
            grad_product.reshape(-1, grad_product.shape[-1]),
            config.cast_config_grad_output,
            mm_config,
            GemmInputRole.GRAD_OUTPUT,
            config,
        )
        weight_t_fp8 = _cast(
            weight_t,
            config.cast_config_weight_for_grad_input,
            mm_config,
            GemmInputRole.WEIGHT,
            config,
        )
        grad_rows = torch.mm(rows_fp8, weight_t_fp8.t())
        grad_inputs = grad_rows.reshape(*grad_product.shape[:-1], weight_t.shape[0])
        return grad_inputs, None, None, None


class _DiscardingContext:
    """Stands in for autograd's context, and keeps nothing for a backward."""

    def save_for_backward(self, *_: Tensor) -> None:
        pass


def _cast(tensor: Tensor, cast_config: Any, mm_config: Any, role: Any, config: Any) -> Any:
    """Casts a matrix to 8 bits as torchao's backward does: with one scale, or a scale for each row.

    Returns `tensor` unchanged if it is in 8 bits already, or if its cast is disabled.

    Args:
        cast_config: The part of `config` for this tensor.
        role: The tensor's place in the product, a `GemmInputRole`.
    """
    is_in_fp8 = isinstance(tensor, Float8TrainingTensor)
    if is_in_fp8 or cast_config.scaling_type is ScalingType.DISABLED:
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
    """Makes the linear layers of `model`, which is on meta, multiply in FP8.

    Four kinds stay as they are: the first linear layer, the output head, adapters, and layers of a
    size that the hardware does not multiply. Call it before sharding, after adapters are in place.

    Returns:
        The number of layers that multiply in FP8.
    """
    assert sharding.fp8 is not None
    chosen = {
        name
        for name, linear in text_linears(model)[1:]
        if is_multiplied_in_fp8(tuple(linear.weight.shape))
    }
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in chosen, config=_make_config(sharding)
    )
    for module in model.modules():
        if type(module) is Float8Linear:
            module.__class__ = Fp8Linear
    return len(chosen)


def count_multiplied(model: nn.Module) -> tuple[int, int]:
    """Counts the weights' elements that are multiplied in FP8: (trained, frozen).

    A sharded weight counts whole, with the elements of all ranks.
    """
    trained = 0
    frozen = 0
    for layer in (module for module in model.modules() if isinstance(module, Fp8Linear)):
        elements = layer.in_features * layer.out_features
        if layer.weight.requires_grad:
            trained += elements
        else:
            frozen += elements
    return trained, frozen


def _make_config(sharding: Sharding) -> Any:
    """Makes torchao's Float8LinearConfig from the keys of the Accelerate file."""
    fp8 = sharding.fp8
    assert fp8 is not None
    return replace(
        Float8LinearConfig.from_recipe_name(fp8.recipe_name),
        pad_inner_dim=fp8.pad_inner_dim,
        enable_fsdp_float8_all_gather=gathers_fp8(sharding),
    )


def keep_scales_current(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes each step of `optimizer` recompute the scales of the weights that FSDP gathers in FP8.

    One all-reduce finds the scales of all weights, so the all-gathers need none of their own.
    """
    optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
