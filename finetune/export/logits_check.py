"""A check before training that an export can be verified: its logits, computed a tensor at a time, are the model's own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from finetune.config.facts import EXPERT_COUNTS
from finetune.errors import UserError
from finetune.export.logits import STREAMED, prompts, stream_logits
from finetune.models.load import build_on_meta

VOCABULARY, INTERMEDIATE_SIZE, EXPERTS = 64, 256, 32  # of the twin: what is plain in every family need not be wide
MAX_PARAMETERS = 1 << 30  # of the twin, 4 GiB of float32; a larger one is not checked
LARGEST_DIFFERENCE = 1e-4  # ‖streamed − own‖ / ‖own‖ that the order of float32 sums explains


def check_streamed_logits(config: Any, trust_remote_code: bool = False, log: Callable[[str], object] = print) -> bool:
    """Raises `UserError` where the export of a model of `config` could not be verified.

    A twin with one decoder layer of each kind, a small vocabulary and narrow MLPs runs both ways. A model of linear
    layers, embeddings and norms alone needs no run. No random state is changed. Returns whether the twin ran; why it did
    not, where it should, is logged.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            smaller = _cut(config)
            own = build_on_meta(smaller, torch.float32, trust_remote_code).eval()
            if _is_plain(own):
                return False
            if (count := sum(p.numel() for p in own.parameters())) > MAX_PARAMETERS:
                raise ValueError(f"it would have {count:,} parameters")
            streamed = build_on_meta(smaller, torch.float32, trust_remote_code).eval()
            _fill(own)
            with torch.no_grad():
                truth = own(input_ids=prompts(smaller.vocab_size), use_cache=False).logits.float()
        except Exception as error:  # the family allows no such twin
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log(
                f"export  not checked ahead on a small twin of the model ({reason}); the export itself will be verified"
            )
            return False
        values = own.state_dict()
        try:
            found = stream_logits(streamed, lambda name, start, stop: _rows(values[name], start, stop))
        except Exception as error:
            raise _unverifiable(own, " ".join(str(error).split()) or type(error).__name__) from error
    difference = float((found - truth).norm() / truth.norm())
    if not difference <= LARGEST_DIFFERENCE:
        raise _unverifiable(own, f"logits computed a tensor at a time differ by {difference:.2g} from its own")
    return True


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop] if tensor.dim() else tensor  # a scalar has one row, itself


def _unverifiable(model: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(model).__name__}: its export could not be verified ({reason}); this family is not supported: name another "
        "model"
    )


def _is_plain(model: nn.Module) -> bool:
    """Whether all tensors are those of linear layers, embeddings and norms, whose logits need no check."""
    return all(
        type(module) in STREAMED or type(module).__name__.endswith("Norm")
        for module in model.modules()
        if module._parameters or module._buffers.keys() - module._non_persistent_buffers_set
    )


def _cut(config: Any) -> Any:
    """`config` with one decoder layer of each kind, two at least, and small sizes where the family does not matter."""
    smaller = copy.deepcopy(config)
    depth = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or ())
    kept = sorted({0, min(1, depth - 1), *(kinds.index(kind) for kind in set(kinds))})
    sizes = {
        "num_hidden_layers": len(kept),
        "num_kv_shared_layers": 0,  # of the last layers, which are cut off
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "intermediate_size": INTERMEDIATE_SIZE,
        "moe_intermediate_size": INTERMEDIATE_SIZE,
        **dict.fromkeys(EXPERT_COUNTS, EXPERTS),
    }
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(smaller, name, [value[index] for index in kept])
        elif isinstance(value, int) and name.endswith("_token_id"):
            setattr(smaller, name, min(value, VOCABULARY - 1))
        elif isinstance(value, int) and not isinstance(value, bool) and name in sizes:
            setattr(smaller, name, min(value, sizes[name]))
    if isinstance(getattr(config, "intermediate_size", None), list):  # Gemma 3n: a size for each layer
        smaller.intermediate_size = [INTERMEDIATE_SIZE] * len(kept)
    return smaller


def _fill(model: nn.Module) -> None:
    """Gives the parameters of `model`, on meta, memory and values: a short stretch of noise, repeated, since a random
    number for each would take seconds. Buffers, which are real, keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    plain: Any = model
    plain.tie_weights()
    noise = torch.randn((1 << 16) - 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for index, parameter in enumerate(model.parameters()):
            repeated = noise.roll(index * 7919).repeat(-(-parameter.numel() // len(noise)))[: parameter.numel()]
            values = repeated.view(parameter.shape)
            fan_in = max(parameter[0].numel(), 1) if parameter.dim() > 1 else 1
            parameter.copy_(values * fan_in**-0.5 if parameter.dim() > 1 else 1 + 0.1 * values)
