"""What a model class does to its hidden states before the output head, and to the scores after it,
measured.

Classes scale and cap logits by keys of many names, which other classes have and ignore. So no key
is read: the class's own forward runs around a trunk and a head that return known numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetune.constants import ceil_div
from finetune.distributed.model_parts import base_of, has_scores, head_of, trunk_of
from finetune.errors import UserError
from finetune.models.loss_chunks import UNCHANGED, LogitTransform

# Powers of two, which a factor rounds to no other number: from where a cap does nothing to where it
# does everything.
SCORES = (2.0**-40, 2.0**-10, 0.25, 1.0, 4.0, -8.0, 256.0, 2.0**40)
ROUNDING = 1e-5  # classes may compute in float32


class _TrunkOutputs:
    """Stands in for whatever a trunk returns: `hidden`, and None for all else that a forward asks
    for.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class HeadFactors(NamedTuple):
    """The factors of a class around its head: logits = `logits`(head(`input_scale` * hidden))."""

    input_scale: float = 1.0
    logits: LogitTransform = UNCHANGED


@torch.no_grad()
def measure_head_factors(model: Any) -> HeadFactors:
    """The factors and the cap of `model`.

    It may be on meta; call this before its forward is replaced.

    Without any for a class whose head does not read what its trunk returns, which the probe
    refuses. Raises `UserError` where the logits are anything else than the head's scores, scaled
    and capped.
    """
    if has_scores(model):  # the scores themselves; the probe compares them
        return HeadFactors()
    config: Any = model.config.get_text_config()
    head = head_of(model)
    hidden = torch.outer(_make_powers(len(SCORES)), _make_powers(config.hidden_size)).unsqueeze(0)
    scores = (
        torch.tensor(SCORES, dtype=torch.float64)
        .view(1, -1, 1)
        .expand(-1, -1, head.weight.shape[0])
    )
    read: list[Tensor] = []

    def answer(states: Tensor, *_: Any, **__: Any) -> Tensor:
        read.append(states.double())
        return scores

    stubs = {module: lambda *_, **__: _TrunkOutputs(hidden) for module in _list_trunks(model, head)}
    logits = _run(model, {**stubs, head: answer}, len(SCORES))
    if logits is None or len(read) != 1 or read[0].shape != hidden.shape:
        return HeadFactors()
    input_scale = (read[0] / hidden).flatten()
    if not torch.allclose(
        input_scale, input_scale[:1].expand_as(input_scale), rtol=ROUNDING, atol=0.0
    ):
        return HeadFactors()
    probed = logits.double()
    if probed.shape == scores.shape and bool((probed == probed[..., :1]).all()):
        transform = _fit(probed[0, :, 0])
        if transform is not None:
            return HeadFactors(_plain(float(input_scale[0])), transform)
    raise UserError(
        f"{type(model).__name__}: its logits are something else than the scores of its output "
        "head, scaled or capped, and cannot be trained here; name another model"
    )


def _make_powers(length: int) -> Tensor:
    """Powers of two of both signs, float64[length]: no norm leaves them as they are."""
    return torch.tensor([1.0, -0.5, 2.0, 4.0, -0.125], dtype=torch.float64).repeat(
        ceil_div(length, 5)
    )[:length]


def _list_trunks(model: Any, head: nn.Module) -> list[nn.Module]:
    """The modules one of which the forward calls for what its head reads."""
    modules = [base_of(model), trunk_of(model), model.get_decoder()]
    return [
        module
        for module in modules
        if module is not model and all(part is not head for part in module.modules())
    ]


def _run(model: Any, forwards: dict[nn.Module, Any], tokens: int) -> Tensor | None:
    """The logits of the class's own forward over `tokens` tokens, with other `forwards` in some of
    its modules; None where it needs more than these.
    """
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        outputs = type(model).forward(model, input_ids=torch.zeros(1, tokens, dtype=torch.long))
    except Exception:  # each class has its own forward
        return None
    finally:
        for module in forwards:
            del module.__dict__["forward"]
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _fit(values: Tensor) -> LogitTransform | None:
    """softcap * tanh(scale * score / softcap), of which `values` are those at SCORES; None where
    they are not.
    """
    scores = torch.tensor(SCORES, dtype=torch.float64)
    scale = float(values[0] / scores[0])
    largest = float(values[-1])
    is_capped = not abs(largest - scale * SCORES[-1]) <= ROUNDING * abs(scale * SCORES[-1])
    if is_capped:
        expected = largest * torch.tanh(scale * scores / largest)
    else:
        expected = scale * scores
    if not torch.allclose(values, expected, rtol=ROUNDING, atol=0.0):
        return None
    return LogitTransform(_plain(scale), _plain(largest) if is_capped else None)


def _plain(number: float) -> float:
    """`number` without what the last digits of a division or a product have rounded.

    >>> _plain(0.30000000000000004)
    0.3
    """
    return float(f"{number:.15g}")
