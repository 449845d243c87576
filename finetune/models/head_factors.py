"""Measures how a model class scales the input of its output head, and scales and caps its scores.

Classes do so by config keys of many names, and other classes have the same keys and ignore them. So
no key is read. Instead the class's own forward runs, with a trunk and a head that return known
numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetune.constants import ceil_div
from finetune.distributed.model_parts import base_of, has_scores, head_of, trunk_of
from finetune.errors import UserError
from finetune.models.loss_chunks import UNCHANGED, LogitTransform

# What the head returns in the measurement. A cap changes the smallest score by nothing, and the
# largest score to the cap. They are powers of two, so that multiplying by a factor rounds nothing.
PROBE_SCORES = (2.0**-40, 2.0**-10, 0.25, 1.0, 4.0, -8.0, 256.0, 2.0**40)
ROUNDING = 1e-5  # relative tolerance: classes may compute in float32


class _TrunkOutputs:
    """Stands in for the outputs of a trunk.

    `last_hidden_state`, or index 0, is `hidden`. Every other attribute or index is None.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class HeadFactors(NamedTuple):
    """What a class computes around its head: logits = `logits`(head(`input_scale` * hidden))."""

    input_scale: float = 1.0
    logits: LogitTransform = UNCHANGED


@torch.no_grad()
def measure_head_factors(model: Any) -> HeadFactors:
    """Measures the scale of the head's input, and the scale and the cap of the logits, of `model`.

    The model may be on meta. Call this before its forward is replaced.

    Returns HeadFactors(), which changes nothing, for a class whose head reads something else than
    the trunk's output times a number: the probe refuses such a class.

    Raises:
        UserError: The logits are something else than the head's scores, scaled and capped.
    """
    if has_scores(model):  # such a class returns the head's scores; the probe compares them
        return HeadFactors()
    head = head_of(model)
    hidden = torch.outer(
        _make_powers(len(PROBE_SCORES)), _make_powers(head.weight.shape[1])
    ).unsqueeze(0)
    scores = (
        torch.tensor(PROBE_SCORES, dtype=torch.float64)
        .view(1, -1, 1)
        .expand(-1, -1, head.weight.shape[0])
    )
    head_inputs: list[Tensor] = []

    def head_stub(states: Tensor, *_: Any, **__: Any) -> Tensor:
        head_inputs.append(states.double())
        return scores

    stubs = {module: lambda *_, **__: _TrunkOutputs(hidden) for module in _list_trunks(model, head)}
    logits = _run_forward(model, {**stubs, head: head_stub}, len(PROBE_SCORES))
    if logits is None or len(head_inputs) != 1 or head_inputs[0].shape != hidden.shape:
        return HeadFactors()
    ratios = (head_inputs[0] / hidden).flatten()
    input_scale = ratios[0]
    if not torch.allclose(ratios, input_scale.expand_as(ratios), rtol=ROUNDING, atol=0.0):
        return HeadFactors()
    probed = logits.double()
    # As the head's scores are the same for every id, so must the logits be.
    if probed.shape == scores.shape and bool((probed == probed[..., :1]).all()):
        transform = _fit_transform(probed[0, :, 0])
        if transform is not None:
            return HeadFactors(_strip_rounding(float(input_scale)), transform)
    raise UserError(
        f"{type(model).__name__}: its logits are something else than the scores of its output "
        "head, scaled or capped, and cannot be trained here; name another model"
    )


def _make_powers(length: int) -> Tensor:
    """Makes a vector of powers of two of both signs, fp64[length].

    No norm leaves such a vector unchanged, so a norm before the head would be noticed.
    """
    pattern = torch.tensor([1.0, -0.5, 2.0, 4.0, -0.125], dtype=torch.float64)
    return pattern.repeat(ceil_div(length, len(pattern)))[:length]


def _list_trunks(model: Any, head: nn.Module) -> list[nn.Module]:
    """The modules that a class's forward may call for the head's input.

    The model itself is left out, and so is a module that holds the head.
    """
    modules = [base_of(model), trunk_of(model), model.get_decoder()]
    return [
        module
        for module in modules
        if module is not model and all(part is not head for part in module.modules())
    ]


def _run_forward(model: Any, stubs: dict[nn.Module, Any], tokens: int) -> Tensor | None:
    """Runs the class's own forward over `tokens` tokens and returns its logits.

    Returns None if the forward fails with the stubs, or returns no logits.

    Args:
        stubs: Module -> the function that replaces its forward during this call.
    """
    for module, stub in stubs.items():
        module.__dict__["forward"] = stub
    try:
        outputs = type(model).forward(model, input_ids=torch.zeros(1, tokens, dtype=torch.long))
    except Exception:  # a class may need anything that the stubs do not have
        return None
    finally:
        for module in stubs:
            del module.__dict__["forward"]
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _fit_transform(logits: Tensor) -> LogitTransform | None:
    """Finds the scale and the cap by which a class turns PROBE_SCORES into `logits`, fp64[scores].

    Returns None if `logits` are neither scale * score nor softcap * tanh(scale * score / softcap).
    """
    scores = torch.tensor(PROBE_SCORES, dtype=torch.float64)
    scale = float(logits[0] / scores[0])
    largest_logit = float(logits[-1])
    uncapped = scale * PROBE_SCORES[-1]
    # Written so that a logit that is not a number counts as capped, which then fits nothing.
    is_capped = not abs(largest_logit - uncapped) <= ROUNDING * abs(uncapped)
    if is_capped:  # at the largest score the logit is the cap
        expected = largest_logit * torch.tanh(scale * scores / largest_logit)
    else:
        expected = scale * scores
    if not torch.allclose(logits, expected, rtol=ROUNDING, atol=0.0):
        return None
    softcap = _strip_rounding(largest_logit) if is_capped else None
    return LogitTransform(_strip_rounding(scale), softcap)


def _strip_rounding(number: float) -> float:
    """Drops the last digits of `number`, which a division or a product may have rounded.

    >>> _strip_rounding(0.30000000000000004)
    0.3
    """
    return float(f"{number:.15g}")
