"""A model's logits, computed with a few rows of one tensor in memory at a time: any model's, on any
machine.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.config.facts import EXPERT_COUNTS
from finetune.config.pretrained import text_config_of
from finetune.constants import ceil_div
from finetune.distributed.model_parts import (
    has_other_parts,
    head_of,
    is_experts,
    text_modules,
    trunk_of,
)
from finetune.errors import UserError, first_line, on_one_line
from finetune.export.target import prefetch, row_blocks
from finetune.models.load import build_on_meta
from finetune.models.routing import GivenChoices

ROWS = 2
TOKENS = 16
# (name, start, stop) -> rows of a parameter or saved buffer; a scalar has one row, itself.
Rows = Callable[[str, int, int], Tensor]
# (layer, its inputs) -> what it multiplies
RoundInputs = Callable[[str, Tensor], Tensor]


def prompts(vocabulary: int) -> Tensor:
    """The prompts on which logits are compared: int64[ROWS, TOKENS], the same for every model of
    this vocabulary.

    >>> prompts(100).shape, bool((prompts(7) < 7).all())
    (torch.Size([2, 16]), True)
    """
    return (torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 7919 + 11) % vocabulary


class Logits(NamedTuple):
    """What a model computes of `prompts`."""

    values: Tensor  # float32[ROWS, TOKENS, vocabulary]
    choices: list[Tensor]  # int64, the places of each `topk`: a token's experts, say

    def differ_from(self, other: "Logits") -> float:
        """The norm of the difference from the values of `other`, in units of their norm."""
        difference = (self.values - other.values).norm() / other.values.norm().clamp_min(1e-30)
        return float(difference)

    def median_difference(self, other: "Logits") -> float:
        """The same for the logits of one token: the median over the tokens."""
        differences = (self.values - other.values).norm(dim=-1)
        return float((differences / other.values.norm(dim=-1).clamp_min(1e-30)).median())

    def chooses_as(self, other: "Logits") -> bool:
        """Whether both take the same experts for each token."""
        pairs = zip(self.choices, other.choices, strict=True)
        return all(torch.equal(own, theirs) for own, theirs in pairs)


@torch.no_grad()
def stream_logits(model: nn.Module, rows: Rows, choices: Sequence[Tensor] = ()) -> Logits:
    """Computes the logits of `prompts` in float32.

    Args:
        model: On meta.
        rows: Reads its values.
        choices: Of `Logits`; what this model takes too, whatever its scores.

    Raises:
        UserError: The model computes with something that has no values.
    """
    plain: Any = model
    with stream(model, [rows]), GivenChoices(choices) as made:
        logits: Tensor = plain(
            input_ids=prompts(plain.config.get_text_config().vocab_size), use_cache=False
        ).logits
    return Logits(logits.float(), made.chosen)


class CheckpointLogits:
    """The logits of a checkpoint, which a thread computes."""

    def __init__(
        self, pool: ThreadPoolExecutor, compute: Callable[[Sequence[Tensor]], Logits]
    ) -> None:
        """
        Args:
            pool: Of the thread.
            compute: Computes them, with the given choices.
        """
        self._compute = compute
        self._future = pool.submit(compute, ())

    def result(self) -> Logits:
        """Returns them once they are computed."""
        return self._future.result()

    def with_choices(self, choices: Sequence[Tensor]) -> Logits:
        """Computes them again, with these choices in place of its own."""
        return self._compute(choices)


@contextmanager
def stream(
    model: nn.Module, variants: Sequence[Rows], round_inputs: Sequence[RoundInputs | None] = ()
) -> Iterator[None]:
    """In this block `model`, which is on meta and stays there, computes with values that are read
    as they are needed.

    A linear layer multiplies with a block of rows while the next is read, an embedding reads the
    rows of its tokens, and any other parameter is read when a module, its owner or another, uses
    it. With several `variants` of the model the inputs are those of each, one after the other in
    dimension 0, and only linear layers may differ: in their weights, and in what `round_inputs`
    does to their inputs, for each variant.
    """
    parameters = {module: module._parameters for module in model.modules()}
    read = _Reader(variants[0])
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        forward = STREAMED.get(type(module))  # a subclass may compute something else
        if forward is not None:
            module.forward = partial(forward, module, name, variants, round_inputs)
        stored = _StoredExperts if is_experts(module) else _StoredParameters
        module.__dict__["_parameters"] = stored(module._parameters, prefix, read)
        _read_buffers(prefix, module, variants[0])
    try:
        with _NoMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        for module, own in parameters.items():
            module.__dict__["_parameters"] = own
            if type(module) in STREAMED:
                del module.forward


class _Reader:
    """Reads whole tensors.

    The last one is kept: a module may ask for it again, if only for its dtype.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.latest: tuple[str, Tensor] | None = None

    def __call__(self, name: str, like: Tensor) -> Tensor:
        if self.latest is None or self.latest[0] != name:
            self.latest = None  # freed before the next is read
            self.latest = (name, _read_whole(name, like, self.rows))
        return self.latest[1]


class _StoredParameters(dict[str, nn.Parameter | None]):
    """A module's parameters on meta, each of which is read when an attribute of the module is.

    A hook around its owner's forward would not suffice: Mamba's mixers read the weight of their
    convolution, and DoRA that of its base layer, without calling them.
    """

    def __init__(
        self, on_meta: Mapping[str, nn.Parameter | None], prefix: str, read: _Reader
    ) -> None:
        super().__init__(on_meta)
        self.prefix = prefix
        self.read = read

    def __getitem__(self, attribute: str) -> Any:
        on_meta = super().__getitem__(attribute)
        if on_meta is None:
            return None
        return self.read(self.prefix + attribute, on_meta)


class _StoredExperts(_StoredParameters):
    """The parameters of all experts of a layer, read an expert at a time, as the loop over them
    does.
    """

    def __getitem__(self, attribute: str) -> Any:
        on_meta = dict.__getitem__(self, attribute)
        if on_meta is None:
            return None
        return _EachExpert(self.prefix + attribute, self.read.rows)


class _EachExpert:
    """A parameter that is indexed by the number of an expert, and by nothing else."""

    def __init__(self, name: str, rows: Rows) -> None:
        self.name = name
        self.rows = rows

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        return self.rows(self.name, int(expert), int(expert) + 1)[0].float()


class _NoMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises on a computation with a meta tensor, which has no values: a copy of one is whatever
    was in memory.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default and not args[0].is_meta:
            # Idefics 3 moves states to where its parameters are
            kwargs = {**(kwargs or {}), "device": "cpu"}
        result = function(*args, **(kwargs or {}))
        if any(
            isinstance(leaf, Tensor) and leaf.is_meta
            for leaf in tree_leaves((args, kwargs, result))
        ):
            raise UserError(
                f"the logits cannot be computed a tensor at a time: {function} has an operand "
                "without values"
            )
        return result


def _linear(
    module: nn.Linear,
    name: str,
    variants: Sequence[Rows],
    round_inputs: Sequence[RoundInputs | None],
    inputs: Tensor,
) -> Tensor:
    """Computes a linear layer in each of `variants` of its weight, which is read in blocks of rows.

    Args:
        module: The layer, whose weight is on meta.
        name: Its name in the files.
        variants: Each reads rows of the weight.
        round_inputs: For each variant; None: it leaves them as they are.
        inputs: [variants x rows, ..., in_features]: the inputs of one variant after another.

    Returns:
        [variants x rows, ..., out_features].
    """
    if any(round_inputs):
        pairs = zip(inputs.chunk(len(variants)), round_inputs, strict=True)
        inputs = torch.cat([own if rounds is None else rounds(name, own) for own, rounds in pairs])
    # Allocated once: small results kept between the blocks would fragment the heap until no block
    # fits.
    result = inputs.new_empty(*inputs.shape[:-1], module.out_features)
    places = list(row_blocks((module.out_features, module.in_features)))

    def read_blocks(start: int, stop: int) -> list[Tensor]:
        return [rows(f"{name}.weight", start, stop) for rows in variants]

    for (start, stop), blocks in zip(places, prefetch(read_blocks, places), strict=True):
        parts = zip(result.chunk(len(variants)), inputs.chunk(len(variants)), blocks, strict=True)
        for own_result, own_inputs, block in parts:
            own_result[..., start:stop] = functional.linear(own_inputs, block.float())
    return result if module.bias is None else result + module.bias


def _embedding(
    module: nn.Embedding,
    name: str,
    variants: Sequence[Rows],
    _: Sequence[RoundInputs | None],
    ids: Tensor,
) -> Tensor:
    tokens, places = torch.unique(ids, return_inverse=True)
    rows = torch.cat(
        [variants[0](f"{name}.weight", token, token + 1).float() for token in tokens.tolist()]
    )
    return rows[places]


STREAMED: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
}


def _read_buffers(prefix: str, module: nn.Module, rows: Rows) -> None:
    for attribute in module._buffers.keys() - module._non_persistent_buffers_set:
        buffer = module._buffers[attribute]
        if buffer is not None:
            module._buffers[attribute] = _read_whole(prefix + attribute, buffer, rows)


def _read_whole(name: str, like: Tensor, rows: Rows) -> Tensor:
    tensor = rows(name, 0, like.shape[0] if like.dim() else 1)
    return tensor.float() if tensor.is_floating_point() else tensor


VOCABULARY = 64
INTERMEDIATE_SIZE = 256
EXPERTS = 32  # of the twin: what is plain in every family need not be wide
MAX_PARAMETERS = 1 << 30  # of the twin, 4 GiB of float32; a larger one is not checked
LARGEST_DIFFERENCE = 1e-4  # ‖streamed − own‖ / ‖own‖ that the order of float32 sums explains


def check_streamed_logits(
    config: Any, trust_remote_code: bool = False, log: Callable[[str], object] = print
) -> bool:
    """Checks on a small twin of the model that its export can be verified tensor by tensor.

    The twin has one decoder layer of each kind, a small vocabulary and narrow MLPs. It computes
    logits by transformers' forward and by `stream_logits`, which must agree. A model of linear
    layers, embeddings and norms alone needs no run. No random state is changed.

    Args:
        config: The model's config.
        trust_remote_code: Whether the model's own code may run.
        log: Takes the reason if no twin can be made.

    Returns:
        Whether the twin ran.

    Raises:
        UserError: The logits differ, or cannot be computed tensor by tensor.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            smaller = _cut(config)
            twin = build_on_meta(smaller, torch.float32, trust_remote_code).eval()
            if _is_plain(twin):
                return False
            parts = _text_parts(twin)
            count = sum(p.numel() for module in parts for p in module.parameters())
            if count > MAX_PARAMETERS:
                raise ValueError(f"it would have {count:,} parameters")
            streamed = build_on_meta(smaller, torch.float32, trust_remote_code).eval()
            _fill(twin)
            ids = prompts(text_config_of(smaller).vocab_size)
            with torch.no_grad():
                expected = twin(input_ids=ids, use_cache=False).logits.float()
        except Exception as error:  # the family allows no such twin
            reason = first_line(error)
            log(
                f"export  not checked ahead on a small twin of the model ({reason}); the export "
                "itself will be verified"
            )
            return False
        values = twin.state_dict()
        try:
            logits = stream_logits(
                streamed, lambda name, start, stop: _rows(values[name], start, stop)
            ).values
        except Exception as error:
            raise _unverifiable(twin, on_one_line(error)) from error
    difference = float((logits - expected).norm() / expected.norm())
    if not difference <= LARGEST_DIFFERENCE:
        raise _unverifiable(
            twin, f"logits computed a tensor at a time differ by {difference:.2g} from its own"
        )
    return True


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop] if tensor.dim() else tensor  # a scalar has one row, itself


def _unverifiable(model: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(model).__name__}: its export could not be verified ({reason}); this family is not "
        "supported: name another model"
    )


def _is_plain(model: nn.Module) -> bool:
    """Whether all tensors are those of linear layers, embeddings and norms, whose logits need no
    check.
    """
    return all(
        type(module) in STREAMED or type(module).__name__.endswith("Norm")
        for _, module in text_modules(model)
        if module._parameters or module._buffers.keys() - module._non_persistent_buffers_set
    )


def _text_parts(model: Any) -> list[nn.Module]:
    """Returns the parts of `model` that work on text; a vision tower stays on meta."""
    if has_other_parts(model):
        return [trunk_of(model), head_of(model)]
    return [model]


def _cut(config: Any) -> Any:
    """`config` with one decoder layer of each kind, two at least, and small sizes where the family
    does not matter.
    """
    whole = copy.deepcopy(config)
    config = text_config_of(config)
    smaller = text_config_of(whole)
    depth = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or ())
    kept = sorted({0, min(1, depth - 1), *(kinds.index(kind) for kind in set(kinds))})
    sizes = {
        "num_hidden_layers": len(kept),
        "num_kv_shared_layers": 0,  # of the last layers, which are cut off
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "decoder_vocab_size": VOCABULARY,  # of Marian's head
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
    # Gemma 3n: a size for each layer
    if isinstance(getattr(config, "intermediate_size", None), list):
        smaller.intermediate_size = [INTERMEDIATE_SIZE] * len(kept)
    return whole


def _fill(model: Any) -> None:
    """Gives the parameters of `model`, on meta, memory and values: a short stretch of noise,
    repeated, since a random number for each would take seconds.

    Buffers, which are real, keep their values.
    """
    parts = nn.ModuleList(_text_parts(model))
    buffers = {name: buffer.clone() for name, buffer in parts.named_buffers()}
    parts.to_empty(device="cpu")
    model.tie_weights()
    noise = torch.randn((1 << 16) - 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, buffer in parts.named_buffers():
            buffer.copy_(buffers[name])
        for index, parameter in enumerate(parts.parameters()):
            repeated = noise.roll(index * 7919).repeat(ceil_div(parameter.numel(), len(noise)))[
                : parameter.numel()
            ]
            values = repeated.view(parameter.shape)
            fan_in = 1
            if parameter.dim() > 1:
                fan_in = max(parameter[0].numel(), 1)
            parameter.copy_(values * fan_in**-0.5 if parameter.dim() > 1 else 1 + 0.1 * values)
