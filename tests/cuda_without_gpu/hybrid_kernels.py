"""Run by test_hybrid_kernels.py in a process of its own: packed documents through transformers' modules for the kernels of
causal-conv1d, mamba-ssm and flash-linear-attention.

None of the three can be had without a GPU, so modules with their published signatures stand in their places before transformers
imports its models. They refuse what the kernels refuse, and compute each document by transformers' own reference functions.
"""

# ruff: noqa: N803, N806 - the kernels' own names
import json
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CALLS: Counter[str] = Counter()
PACKED: Counter[str] = Counter()  # calls that received boundaries


def reference(family: str, name: str) -> Any:
    """transformers' function that computes what the kernel does."""
    module = sys.modules[f"transformers.models.{family}.modeling_{family}"]
    return getattr(module, name).__wrapped__


def lengths_of(seq_idx: Tensor | None, x: Tensor, tokens: int) -> list[int]:
    """The documents of int32[rows, tokens], as the kernels demand it."""
    if seq_idx is None:
        return [tokens]
    assert seq_idx.dtype == torch.int32 and seq_idx.shape == (x.shape[0], tokens), seq_idx.shape
    assert x.shape[0] == 1 and bool((seq_idx.diff() >= 0).all())
    return seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
    return_final_states: bool = False, final_states_out: Any = None, activation: Any = None,
) -> Tensor:  # fmt: skip
    assert (
        activation in (None, "silu", "swish") and initial_states is None and not return_final_states
    )
    assert seq_idx is None or x.stride(1) == 1, "seq_idx is only supported for channel last layout"
    CALLS["causal_conv1d_fn"] += 1
    PACKED["causal_conv1d_fn"] += seq_idx is not None
    compute = reference("lfm2", "causal_conv1d_fn")
    parts = x.split(lengths_of(seq_idx, x, x.shape[2]), dim=2)
    return torch.cat([compute(part, weight, bias, activation=activation) for part in parts], dim=2)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Any = None, activation: Any = None,
    cache_seqlens: Any = None, conv_state_indices: Any = None,
) -> Tensor:  # fmt: skip
    raise AssertionError("training has no cache")


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert (
        not output_final_state and initial_state is None and "seq_idx" not in kwargs
    ) or cu_seqlens is not None
    CALLS["chunk_gated_delta_rule"] += 1
    lengths = [q.shape[1]]
    if cu_seqlens is not None:
        PACKED["chunk_gated_delta_rule"] += 1
        assert (
            cu_seqlens.dtype == torch.int64
            and q.shape[0] == 1
            and int(cu_seqlens[-1]) == q.shape[1]
        )
        lengths = cu_seqlens.diff().tolist()
    compute = reference("qwen3_next", "torch_chunk_gated_delta_rule")
    rows = zip(*(each.split(lengths, dim=1) for each in (q, k, v, g, beta)), strict=True)
    found = [
        compute(*row[:3], g=row[3], beta=row[4], use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
        for row in rows
    ]
    return torch.cat(found, dim=1), None


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Any = None, gk: Any = None, gv: Any = None, beta: Any = None, scale: Any = None,
    initial_state: Any = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    raise AssertionError("training has no cache")


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
    dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
    dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")), return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:  # fmt: skip
    assert z is None and not return_final_states and initial_states is None and cu_seqlens is None
    CALLS["mamba_chunk_scan_combined"] += 1
    PACKED["mamba_chunk_scan_combined"] += seq_idx is not None
    compute = reference("bamba", "mamba2_chunk_scan")
    lengths = lengths_of(seq_idx, x, x.shape[1])
    found = [
        compute(
            *row[:2],
            A,
            *row[2:],
            chunk_size,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )
        for row in zip(*(each.split(lengths, dim=1) for each in (x, dt, B, C)), strict=True)
    ]
    return torch.cat([each[0] if isinstance(each, tuple) else each for each in found], dim=1)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Any, dt_bias: Tensor, A: Tensor, D: Tensor, chunk_size: int,
    initial_states: Any = None, seq_idx: Any = None, dt_limit: Any = (0.0, float("inf")),
    return_final_states: bool = False, activation: str = "silu", rmsnorm_weight: Any = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None, outproj_bias: Any = None, headdim: Any = None, ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:  # fmt: skip
    """Convolution, scan, gated norm and output projection in one, as in training."""
    assert (
        not return_final_states
        and initial_states is None
        and (rmsnorm_weight is None or not norm_before_gate)
    )
    CALLS["mamba_split_conv1d_scan_combined"] += 1
    PACKED["mamba_split_conv1d_scan_combined"] += seq_idx is not None
    rows, tokens, _ = zxbcdt.shape
    heads = len(dt_bias)
    inner = heads * headdim
    states = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    z, mixed, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    mixed = causal_conv1d_fn(
        mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation
    ).transpose(1, 2)
    x, B, C = mixed.split([inner, ngroups * states, ngroups * states], dim=-1)
    B, C = (each.view(rows, tokens, ngroups, states) for each in (B, C))
    y = mamba_chunk_scan_combined(
        x.view(rows, tokens, heads, headdim), dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, seq_idx=seq_idx,
        dt_softplus=True, dt_limit=dt_limit,
    ).reshape(rows, tokens, inner) * F.silu(z)  # fmt: skip
    if rmsnorm_weight is not None:
        grouped = y.view(rows, tokens, ngroups, -1)
        y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + rmsnorm_eps)).view_as(
            y
        ) * rmsnorm_weight
    return F.linear(y, outproj_weight, outproj_bias)


def install() -> None:
    """Puts the three packages into sys.modules."""
    places = {
        "causal_conv1d": (causal_conv1d_fn, causal_conv1d_update),
        "fla.ops.gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
        "mamba_ssm.ops.triton.ssd_combined": (
            mamba_chunk_scan_combined,
            mamba_split_conv1d_scan_combined,
        ),
    }
    for place, functions in places.items():
        parts = place.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
                sys.modules[name] = module
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        for function in functions:
            setattr(sys.modules[place], function.__name__, function)


def compare(family: str) -> dict[str, Any]:
    """How far a packed row is from one document at a time, with the boundaries and without, and what the kernels received."""
    from finetune.models import documents as isolation
    from tests.models.families import documents, gradients, ours, packed, plain_loss, relative_error
    from tests.models.test_recurrent import build, norm

    truth = plain_loss(plain := build(family), documents())
    true_gradients = gradients(plain, truth)
    CALLS.clear(), PACKED.clear()
    loss = (model := ours(build(family)))(**packed(documents()))
    found = gradients(model, loss)
    difference = {name: gradient - true_gradients[name] for name, gradient in found.items()}
    result = {
        "loss": relative_error(loss, truth),
        "gradients": norm(difference) / norm(true_gradients),
        "calls": dict(CALLS),
        "packed": dict(PACKED),
    }
    read, isolation._read_documents = isolation._read_documents, lambda *_: None
    with torch.no_grad():
        result["without"] = relative_error(ours(build(family))(**packed(documents())), truth)
        result["evaluated"] = None
    isolation._read_documents = read
    with torch.no_grad():
        evaluated = plain_loss(build(family).eval(), documents())
        result["evaluated"] = relative_error(
            ours(build(family)).eval()(**packed(documents())), evaluated
        )
    return result


def compare_quantized(family: str) -> float:
    """How far the loss with linear layers in 4 bits, whose weights some kernels read themselves, is from the loss of the same
    numbers in plain layers."""
    from finetune.config.schema import Quantization
    from finetune.models.quantized_layers import CODES, SCALES, QuantizedLinear, linear_layers
    from finetune.models.quantized_weights import dequantize_tensor, quantize_tensor
    from tests.models.families import documents, ours, packed, plain_loss, relative_error
    from tests.models.test_recurrent import build

    nf4 = Quantization(load_in_4bit=True)
    plain, model = build(family), build(family)
    for (name, linear), (_, other) in zip(linear_layers(model), linear_layers(plain), strict=True):
        whole = quantize_tensor(linear.weight.detach(), nf4)
        other.weight.data = dequantize_tensor(whole, torch.float32)
        layer = QuantizedLinear(linear, nf4, torch.float32)
        for part, held in ((CODES, whole.codes), (SCALES, whole.scales)):
            filled = F.pad(held, (0, -held.numel() % 4)).view(torch.float32)
            setattr(layer, part, torch.nn.Parameter(filled, requires_grad=False))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
    return relative_error(ours(model)(**packed(documents())), plain_loss(plain, documents()))


if __name__ == "__main__":
    install()
    import transformers.models.bamba.modeling_bamba
    import transformers.models.lfm2.modeling_lfm2
    import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: F401

    found = {family: compare(family) for family in sys.argv[1:]}
    if find_spec("bitsandbytes") is not None:
        found = {
            family: each | {"quantized": compare_quantized(family)}
            for family, each in found.items()
        }
    print(json.dumps(found))
