"""The floating-point operations (FLOP) of training, and the peaks of devices, for the plan and for
MFU. Imports no torch.

Training on one token takes 6N + 12 L H Q T FLOP, less 2 for each weight without a gradient: under
LoRA 4N + 12 L H Q T.
N: parameters in matrix products. An untied input embedding is not counted, since it multiplies
nothing; of routed experts, only those that a token chooses are counted.
L: layers. H: heads. Q: head size, the mean of a key's and a value's. T: tokens in a row.
Recomputed activations are not counted. Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

import re
from typing import Any, NamedTuple

# Words in a device's name -> its peak in FLOP per second, for dense bf16 products with fp32 sums.
# If several entries match a name, the longest one holds. The numbers are from the vendors' data
# sheets; figures "with sparsity" are halved. An MI250X appears as two devices: this is one of them.
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
FP8_SPEEDUP = 2  # the FP8 peak over the bf16 peak, on every device above that multiplies in FP8
FORMULA = "6N + 12LHQT, 4N for LoRA"  # for the plan's table


def flop_per_token(
    *, parameters: int, layers: int, heads: float, head_size: float, length: float, frozen: int = 0
) -> float:
    """Counts the FLOP to train on one token.

    Args:
        parameters: N, including `frozen` parameters.
        layers: L.
        heads: H.
        head_size: Q.
        length: T. Usually it is the row's length. For packed documents it is the sum of their
            squared lengths divided by the sum of their lengths.
        frozen: How many of `parameters` get no gradient.

    >>> flop_per_token(parameters=10**9, layers=1, heads=1, head_size=1, length=0) == 6e9
    True
    """
    return float(6 * parameters - 2 * frozen + 12 * layers * heads * head_size * length)


class TokenPasses(NamedTuple):
    """How often a step computes a token, on average over its tokens, by the trained model."""

    trained: float = 1.0  # forwards with a backward
    measured: float = 0.0  # forwards without one


TRAINED_ONCE = TokenPasses()


def count_token_passes(
    *, are_rated: bool, measures_all: bool, of_generation: float = 0.0
) -> TokenPasses:
    """Counts the passes of a step.

    Args:
        are_rated: Whether each answer has a mismatched one beside it, which is only measured.
        measures_all: Whether a forward measures all tokens before they are trained on.
        of_generation: `Recipe.generation_forwards`.
    """
    trained = 0.5 if are_rated else 1.0
    return TokenPasses(trained, 1 - trained + measures_all + of_generation)


def fp8_share_of(
    flop_per_token: float,
    *,
    trained: int = 0,
    frozen: int = 0,
    weight_gradients: bool = True,
    passes: TokenPasses = TRAINED_ONCE,
) -> float:
    """Computes the share of a step's FLOP that is in FP8.

    Args:
        flop_per_token: All FLOP of a step for a token.
        trained: Weights with a gradient whose products are in FP8.
        frozen: Weights without a gradient whose products are in FP8.
        weight_gradients: Whether the products that give the weights' gradients are in FP8 too.
        passes: How often a step computes a token.

    >>> fp8_share_of(12e9, trained=10**9), fp8_share_of(12e9, trained=10**9, weight_gradients=False)
    (0.5, 0.3333333333333333)
    """
    # Each product takes 2 FLOP a weight: one in the forward, one for the inputs' gradients, and one
    # for the weight's own gradient.
    per_trained = 6 if weight_gradients else 4
    per_frozen = 4
    training = per_trained * trained + per_frozen * frozen
    forward = 2 * (trained + frozen)
    return (passes.trained * training + passes.measured * forward) / flop_per_token


def mix_peaks(peak: float, fp8_share: float) -> float:
    """Computes the peak in FLOP per second of work that is partly in FP8 and else in bf16.

    Args:
        peak: The device's bf16 peak.
        fp8_share: The share of the FLOP that is in FP8.

    >>> mix_peaks(989e12, 0.0) / 1e12, mix_peaks(989e12, 1.0) / 1e12
    (989.0, 1978.0)
    """
    return peak / (1 - fp8_share + fp8_share / FP8_SPEEDUP)


def flop_per_token_of(config: Any, *, parameters: int, length: float, frozen: int = 0) -> float:
    """As `flop_per_token`, with L, H and Q from a transformers config.

    If layers differ, H and the product H Q are means over the layers.
    """
    layers = list_layer_configs(config)
    heads = [count_heads(layer) for layer in layers]
    widths = [count_heads(layer) * read_head_size(layer) for layer in layers]  # H Q of each
    return flop_per_token(
        parameters=parameters,
        layers=count_attention_layers(config),
        heads=sum(heads) / len(heads),
        head_size=sum(widths) / max(sum(heads), 1),
        length=length,
        frozen=frozen,
    )


def list_layer_configs(config: Any) -> list[Any]:
    """Lists the configs from which to read sizes of layers.

    If layers differ (Gemma 4), these are the configs of all layers, because the values of `config`
    itself may not be read. Else it is `config` alone.
    """
    if getattr(config, "is_heterogeneous", False):  # since transformers 5.23
        return list(config.per_layer_config)
    return [config]


def count_attention_layers(config: Any) -> int:
    """Counts the layers with attention, L of the formula.

    Layers with a recurrent state or a convolution compare no tokens with each other; their products
    are small.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "num_hidden_layers", None) or 0  # BLT has no layers of its own
    return sum("linear" not in kind and ("attention" in kind or "hybrid" in kind) for kind in kinds)


def count_heads(config: Any) -> int:
    """Returns H, the attention heads, by the config of a model or a layer; 0 if it has none."""
    return getattr(config, "num_attention_heads", None) or 0


def read_head_size(config: Any) -> float:
    """Returns Q, the head size, by the config of a model or a layer; 0 without attention heads.

    Under MLA (DeepSeek), `head_dim` is only the rotated part of a key, and is not read.
    """
    # MLA: a key has two parts, qk_nope and qk_rope
    key_and_value_sizes: list[Any] = [
        getattr(config, name, None)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ]
    if all(isinstance(size, int) and size for size in key_and_value_sizes):
        return float(sum(key_and_value_sizes)) / 2  # the mean of a key's and a value's size
    heads = count_heads(config)
    return getattr(config, "head_dim", None) or (
        float(config.hidden_size // heads) if heads else 0.0
    )


def forward_flop_per_token_of(config: Any, *, parameters: int, length: float) -> float:
    """Counts the FLOP of only a forward of one token, such as a teacher's: a third of training."""
    return flop_per_token_of(config, parameters=parameters, length=length) / 3


def peak_flops_of(device_name: str) -> float | None:
    """Returns the dense bf16 peak in FLOP per second of the GPU with this name; None if it is not
    known.

    It is not known of a part of a GPU (MIG), and of laptop and D versions, which are slower than
    the GPU of the same name.

    >>> peak_flops_of("NVIDIA H200"), peak_flops_of("NVIDIA H100 PCIe"), peak_flops_of("a laptop")
    (989000000000000.0, 756000000000000.0, None)
    """
    words = set(re.split(r"[\s-]+", device_name))
    matching = [model for model in PEAK_FLOPS if words.issuperset(model.split())]
    if matching and not words & {"MIG", "Laptop", "D"}:
        return PEAK_FLOPS[max(matching, key=len)]
    return None
