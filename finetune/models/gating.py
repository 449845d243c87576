"""Gated MLPs and experts, down(act(gate(x)) * up(x)), that keep the outputs of gate and up alone.

torch's own product keeps act(gate) too, a quarter of what an MLP keeps for its backward. Here the
backward makes it again, in memory that is there: two tensors of the MLP's width less at its peak.
Every number is the same, bit for bit. Unsloth and Liger do so by kernels of their own; a compiled
layer does by itself.
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

# gate -> act(gate), and (gradient of act(gate), gate, grad_input=memory) -> gradient of gate
Activation = tuple[Callable[..., Tensor], Callable[..., Tensor]]
SILU: Activation = (F.silu, torch.ops.aten.silu_backward.grad_input)
GELU_TANH: Activation = (
    partial(F.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
)


def install_gating(model: Any) -> None:
    """Lets the MLPs and experts of a language model keep less, where their class computes them as
    Llama's, Phi-3's or Mixtral's does, with SiLU or GELU's tanh form.
    """
    mlp: Any
    for _, mlp in text_modules(model):
        kind: Any = type(mlp)
        split = _find_split(kind)
        name = "activation_fn" if split is _by_one_layer else "act_fn"
        activation = _find_activation(getattr(mlp, name, None))
        if activation is None:
            continue
        if split is not None and "forward" not in vars(mlp):
            mlp.forward = partial(_forward, mlp, split, activation)
        elif getattr(kind, "_apply_gate", None) is _default_apply_gate:
            mlp._apply_gate = partial(_gate_experts, mlp, activation)


def _forward(
    module: Any,
    split: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    activation: Activation,
    x: Tensor,
) -> Tensor:
    """The MLP of [..., hidden]: its class's own forward where nothing is kept, or compiled."""
    if not _keeps_anything():
        own: Tensor = type(module).forward(module, x)
        return own
    product: Tensor = _Gate.apply(*split(module, x), activation)  # type: ignore[no-untyped-call]
    down: Tensor = module.down_proj(product)
    return down


def _gate_experts(module: Any, activation: Activation, gate_up: Tensor) -> Tensor:
    """act(gate) * up of experts [rows, 2 * width], whose forward is another's."""
    if not _keeps_anything():
        own: Tensor = _default_apply_gate(module, gate_up)
        return own
    product: Tensor = _Gate.apply(*gate_up.chunk(2, dim=-1), activation)  # type: ignore[no-untyped-call]
    return product


def _keeps_anything() -> bool:
    """Whether torch keeps tensors for a backward now; of compiled layers the compiler decides."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Gate(torch.autograd.Function):
    """act(gate) * up, of one shape and dtype. Nothing but the down projection reads the product, so
    that the backward may write over its gradient.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        activate, _ = activation
        return activate(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        activate, activate_backward = ctx.activation
        of_up = activate(gate).mul_(of_product)
        of_activated = of_product.mul_(up)
        of_gate = activate_backward(of_activated, gate, grad_input=of_activated)
        return of_gate, of_up, None


def _by_two_layers(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return module.gate_proj(x), module.up_proj(x)


def _by_one_layer(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    return gate, up


# What a class's forward may say, its input called x -> how its gate and up are computed.
SPLITS = {
    "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
    "return down_proj": _by_two_layers,
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))": _by_two_layers,
    "up_states = self.gate_up_proj(x)\n"
    "gate, up_states = up_states.chunk(2, dim=-1)\n"
    "up_states = up_states * self.activation_fn(gate)\n"
    "return self.down_proj(up_states)": _by_one_layer,
}


@cache
def _find_split(kind: type[nn.Module]) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None:
    """How a class computes gate and up; None if it is no gated MLP, or another."""
    try:
        written = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, SyntaxError, TypeError):  # its source is not at hand
        return None
    if not isinstance(written, ast.FunctionDef) or written.decorator_list:
        return None
    takes = written.args
    if len(takes.args) != 2 or takes.vararg or takes.kwonlyargs or takes.kwarg:
        return None
    given = takes.args[1].arg
    for node in ast.walk(written):
        if isinstance(node, ast.Name) and node.id == given:
            node.id = "x"
    body = "\n".join(ast.unparse(statement) for statement in written.body)
    return SPLITS.get(body.replace("(gate, up_states)", "gate, up_states"))


def _find_activation(module: Any) -> Activation | None:
    if type(module) in (SiLUActivation, nn.SiLU):  # a subclass may compute another function
        return SILU
    if type(module) is GELUTanh and isinstance(module.act, partial):
        return GELU_TANH
    return None
