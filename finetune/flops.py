"""Floating-point operations of training and peaks of devices, for the plan and for MFU. Imports no
torch.

FLOP to train on one token: 6N + 12 L H Q T, less 2 for each weight without a gradient: 4N + 12 L H
Q T under LoRA. N counts no untied input embedding, which multiplies nothing, and of routed experts
those that a token chooses; L layers, H heads, Q head size (the mean of a key's and a value's), T
tokens in a row. Recomputed activations are not counted. Source: Chowdhery et al. 2022 (PaLM),
appendix B.
"""

import re
from typing import Any

# Dense bf16 with fp32 sums, per second, by the words of a device's name; where two fit, the longer
# one. From the vendors' data sheets, whose figures "with sparsity" are halved. AMD's MI250X counts
# as two devices, of which this is one.
PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 155e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI355X": 2500e12,
    "MI350X": 2300e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}
FP8_SPEEDUP = 2  # of the dense peak, on every device above that multiplies in FP8
FORMULA = "6N + 12LHQT, 4N for LoRA"


def flop_per_token(
    *, parameters: int, layers: int, heads: float, head_size: float, length: float, frozen: int = 0
) -> float:
    """FLOP to train on one token.

    Args:
        parameters: N, of which `frozen` get no gradient.
        length: T. The field takes the row's; of packed documents it is the sum of their squared
            lengths over the sum of their lengths.

    >>> flop_per_token(parameters=10**9, layers=1, heads=1, head_size=1, length=0) == 6e9
    True
    """
    return float(6 * parameters - 2 * frozen + 12 * layers * heads * head_size * length)


def fp8_share_of(
    flop_per_token: float, *, trained: int = 0, frozen: int = 0, weight_gradients: bool = True
) -> float:
    """The share of a token's FLOP that is in FP8: of `trained` and `frozen` weights, forward and
    backward.

    >>> fp8_share_of(12e9, trained=10**9), fp8_share_of(12e9, trained=10**9, weight_gradients=False)
    (0.5, 0.3333333333333333)
    """
    return ((6 if weight_gradients else 4) * trained + 4 * frozen) / flop_per_token


def mix_peaks(peak: float, fp8_share: float) -> float:
    """FLOP per second at the peaks of bf16 (`peak`) and FP8 together, of FLOP of which `fp8_share`
    are in FP8.

    >>> mix_peaks(989e12, 0.0) / 1e12, mix_peaks(989e12, 1.0) / 1e12
    (989.0, 1978.0)
    """
    return peak / (1 - fp8_share + fp8_share / FP8_SPEEDUP)


def flop_per_token_of(config: Any, *, parameters: int, length: float, frozen: int = 0) -> float:
    """The same, with L, H and Q from a transformers config: means where layers differ."""
    layers = list_layer_configs(config)
    heads = [count_heads(layer) for layer in layers]
    widths = [count_heads(layer) * read_head_size(layer) for layer in layers]
    return flop_per_token(
        parameters=parameters,
        layers=count_attention_layers(config),
        heads=sum(heads) / len(heads),
        head_size=sum(widths) / max(sum(heads), 1),
        length=length,
        frozen=frozen,
    )


def list_layer_configs(config: Any) -> list[Any]:
    """Lists the config of each layer where they differ (Gemma 4), and the values of `config` itself
    may not be read; else `config` alone.
    """
    if getattr(config, "is_heterogeneous", False):  # since transformers 5.23
        return list(config.per_layer_config)
    return [config]


def count_attention_layers(config: Any) -> int:
    """Counts the layers that compare tokens with each other. States and convolutions do not; their
    products are small.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "num_hidden_layers", None) or 0  # BLT has no layers of its own
    return sum("linear" not in kind and ("attention" in kind or "hybrid" in kind) for kind in kinds)


def count_heads(config: Any) -> int:
    """H by the config of a model, or of a layer."""
    return getattr(config, "num_attention_heads", None) or 0


def read_head_size(config: Any) -> float:
    """Q by the config of a model, or of a layer.

    Under MLA (DeepSeek), `head_dim` is only the rotated part of a key.
    """
    latent: list[Any] = [
        getattr(config, name, None)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ]
    if all(isinstance(size, int) and size for size in latent):
        return float(sum(latent)) / 2
    heads = count_heads(config)
    return getattr(config, "head_dim", None) or (
        float(config.hidden_size // heads) if heads else 0.0
    )


def forward_flop_per_token_of(config: Any, *, parameters: int, length: float) -> float:
    """The same of a forward alone, which is a third: a teacher's."""
    return flop_per_token_of(config, parameters=parameters, length=length) / 3


def peak_flops_of(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU in FLOP per second, by its name; None where it is not known.

    Not known either: a part of a GPU (MIG), and laptops' versions, which run at other clocks under
    the same name.

    >>> peak_flops_of("NVIDIA H200"), peak_flops_of("NVIDIA H100 PCIe"), peak_flops_of("a laptop")
    (989000000000000.0, 756000000000000.0, None)
    """
    words = set(re.split(r"[\s-]+", device_name))
    fitting = [model for model in PEAK_FLOPS if words.issuperset(model.split())]
    if fitting and not words & {"MIG", "Laptop", "D"}:
        return PEAK_FLOPS[max(fitting, key=len)]
    return None
