"""The floating-point operations of training, and what devices can do: for the plan before and the metrics during. No torch.

FLOP to train on one token: 6N + 12 L H Q T, and 4N + 12 L H Q T under LoRA, where the base's weights get no gradients. N
counts no untied input embedding, which multiplies nothing; L layers, H heads, Q head size, T tokens in a row. Recomputed
activations are not counted. Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

from typing import Any

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16, per second
FORMULA = "6N + 12LHQT, 4N for LoRA"


def flop_per_token(
    *, parameters: int, layers: int, heads: int, head_size: int, length: int, frozen_base: bool
) -> float:
    """FLOP to train on one token. `parameters`: N; `length`: T, the row's, as the field counts it.

    >>> flop_per_token(parameters=10**9, layers=1, heads=1, head_size=1, length=0, frozen_base=False) == 6e9
    True
    """
    return float((4 if frozen_base else 6) * parameters + 12 * layers * heads * head_size * length)


def flop_per_token_of(config: Any, *, parameters: int, length: int, frozen_base: bool) -> float:
    """The same, with L, H and Q from a transformers config."""
    heads = config.num_attention_heads
    return flop_per_token(
        parameters=parameters,
        layers=config.num_hidden_layers,
        heads=heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        length=length,
        frozen_base=frozen_base,
    )


def peak_flops_of(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU in FLOP per second, by its name; None where it is not known.

    >>> peak_flops_of("NVIDIA H200"), peak_flops_of("a laptop")
    (989000000000000.0, None)
    """
    return next((peak for model, peak in PEAK_FLOPS.items() if model in device_name), None)
