"""Gated MLPs and experts, down(act(gate(x)) * up(x)), that keep only the outputs of gate and up.

torch's own product keeps act(gate) too, which is a quarter of what an MLP keeps for its backward.
Here the backward computes it again and reuses memory: the peak is lower by two tensors of the MLP's
width. Every number is the same, bit for bit. Unsloth and Liger do this with kernels of their own,
and torch.compile does it in the layers that it compiles.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from finetune.distributed.model_parts import text_modules

# (forward, backward) of an activation. The forward takes gate and returns act(gate). The backward
# takes (gradient of act(gate), gate, grad_input=memory) and writes gate's gradient to `memory`.
Activation = tuple[Callable[..., Tensor], Callable[..., Tensor]]
# Takes an MLP and its input [..., hidden], and returns (gate, up), each [..., width].
Split = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
SILU: Activation = (F.silu, torch.ops.aten.silu_backward.grad_input)
GELU_TANH: Activation = (
    partial(F.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
)


def install_gating(model: Any) -> None:
    """Makes the MLPs and experts of a language model keep only gate and up for their backward.

    Changes the modules whose class computes them as Llama's, Phi-3's or Mixtral's does, with SiLU
    or the tanh form of GELU. Others stay as they are, and so do MLPs whose forward was replaced.
    """
    mlp: Any
    for _, mlp in text_modules(model):
        kind: Any = type(mlp)
        split = _find_split(kind)
        activation_name = "activation_fn" if split is _split_one_layer else "act_fn"
        activation = _find_activation(getattr(mlp, activation_name, None))
        if activation is None:
            continue
        if split is not None and "forward" not in vars(mlp):
            mlp.forward = partial(_forward_mlp, mlp, split, activation)
        elif getattr(kind, "_apply_gate", None) is _default_apply_gate:
            mlp._apply_gate = partial(_gate_experts, mlp, activation)


def _forward_mlp(module: Any, split: Split, activation: Activation, x: Tensor) -> Tensor:
    """Computes an MLP: [..., hidden] -> [..., hidden]."""
    if not _saves_tensors():
        output: Tensor = type(module).forward(module, x)
        return output
    product: Tensor = _Gate.apply(*split(module, x), activation)  # type: ignore[no-untyped-call]
    down: Tensor = module.down_proj(product)
    return down


def _gate_experts(module: Any, activation: Activation, gate_up: Tensor) -> Tensor:
    """Computes act(gate) * up of experts: [rows, 2 * width] -> [rows, width].

    Replaces only the `_apply_gate` of an experts module; the rest of its forward is not touched.
    """
    if not _saves_tensors():
        default_product: Tensor = _default_apply_gate(module, gate_up)
        return default_product
    product: Tensor = _Gate.apply(*gate_up.chunk(2, dim=-1), activation)  # type: ignore[no-untyped-call]
    return product


def _saves_tensors() -> bool:
    """Whether autograd saves tensors for a backward now.

    False in a layer that is being compiled, where the compiler chooses what is saved.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Gate(torch.autograd.Function):
    """act(gate) * up, of two tensors of one shape and dtype.

    The backward overwrites the product's gradient. It may, because only the down projection reads
    the product, so nothing else needs this gradient.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        activate, _ = activation
        return activate(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        activate, activate_backward = ctx.activation
        grad_up = activate(gate).mul_(grad_product)
        grad_activated = grad_product.mul_(up)
        grad_gate = activate_backward(grad_activated, gate, grad_input=grad_activated)
        return grad_gate, grad_up, None


def _split_two_layers(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(gate, up) of an MLP that has a layer for each, as Llama's."""
    return module.gate_proj(x), module.up_proj(x)


def _split_one_layer(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(gate, up) of an MLP that computes both by one layer, as Phi-3's."""
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    return gate, up


# The source of a forward's body, with the input renamed to x -> how it computes gate and up.
SPLITS = {
    "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
    "return down_proj": _split_two_layers,
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))": _split_two_layers,
    "up_states = self.gate_up_proj(x)\n"
    "gate, up_states = up_states.chunk(2, dim=-1)\n"
    "up_states = up_states * self.activation_fn(gate)\n"
    "return self.down_proj(up_states)": _split_one_layer,
}


@cache
def _find_split(kind: type[nn.Module]) -> Split | None:
    """Finds how a class computes gate and up, by the source of its forward.

    Returns None if the source is not one of SPLITS, or cannot be read.
    """
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, SyntaxError, TypeError):  # the source is not available
        return None
    if not isinstance(forward, ast.FunctionDef) or forward.decorator_list:
        return None
    signature = forward.args
    if len(signature.args) != 2 or signature.vararg or signature.kwonlyargs or signature.kwarg:
        return None
    _self, input_argument = signature.args
    for node in ast.walk(forward):
        if isinstance(node, ast.Name) and node.id == input_argument.arg:
            node.id = "x"
    body = "\n".join(ast.unparse(statement) for statement in forward.body)
    return SPLITS.get(body)


def _find_activation(module: Any) -> Activation | None:
    """The SILU or GELU_TANH that computes what `module` does; None for any other activation."""
    if type(module) in (SiLUActivation, nn.SiLU):  # a subclass may compute another function
        return SILU
    if type(module) is GELUTanh and isinstance(module.act, partial):
        return GELU_TANH
    return None
