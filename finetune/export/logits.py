"""Computes a model's logits with a few rows of one tensor in memory at a time, so that a model of
any size runs on any machine.

An export is verified by them. `check_streamed_logits` finds out before a training whether a family
can be computed in this way.
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

ROWS = 2  # prompts
TOKENS = 16  # of each prompt
# (name, start, stop) -> these rows of a parameter or saved buffer; a scalar counts as one row
Rows = Callable[[str, int, int], Tensor]
# (name of a linear layer, its inputs) -> the inputs that it multiplies with its weight
RoundInputs = Callable[[str, Tensor], Tensor]


def make_prompts(vocabulary: int) -> Tensor:
    """Makes the prompts on which logits are compared: int64[ROWS, TOKENS], all below `vocabulary`.

    They depend on the size of the vocabulary only.

    >>> make_prompts(100).shape, bool((make_prompts(7) < 7).all())
    (torch.Size([2, 16]), True)
    """
    return (torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 7919 + 11) % vocabulary


class Logits(NamedTuple):
    """The logits of a model on `make_prompts`, and the choices that it made on the way."""

    values: Tensor  # float32[ROWS, TOKENS, vocabulary]
    # the indices of each call of `topk`, int64[..., chosen]; such as the experts of each token
    choices: list[Tensor]

    def relative_difference(self, other: "Logits") -> float:
        """Returns the norm of the difference from `other`, divided by the norm of `other`."""
        difference = (self.values - other.values).norm() / other.values.norm().clamp_min(1e-30)
        return float(difference)

    def median_difference(self, other: "Logits") -> float:
        """Computes the relative difference from `other` for each token, and returns the median."""
        differences = (self.values - other.values).norm(dim=-1)
        return float((differences / other.values.norm(dim=-1).clamp_min(1e-30)).median())

    def chooses_as(self, other: "Logits") -> bool:
        """Whether both models made the same choices, such as each token's experts."""
        pairs = zip(self.choices, other.choices, strict=True)
        return all(torch.equal(own, others) for own, others in pairs)


@torch.no_grad()
def stream_logits(model: nn.Module, rows: Rows, choices: Sequence[Tensor] = ()) -> Logits:
    """Computes the logits of `make_prompts` in float32.

    Args:
        model: The model, on meta.
        rows: Reads the model's values.
        choices: The `Logits.choices` that a different model made, and this model must make too,
            whatever its scores are; empty: it chooses by its scores.

    Raises:
        UserError: The model computes with a tensor that has no values.
    """
    plain: Any = model
    prompts = make_prompts(plain.config.get_text_config().vocab_size)
    with stream_values(model, [rows]), GivenChoices(choices) as recorder:
        logits: Tensor = plain(input_ids=prompts, use_cache=False).logits
    return Logits(logits.float(), recorder.chosen)


class CheckpointLogits:
    """The logits of a checkpoint, which a thread computes while the export is written."""

    def __init__(
        self, pool: ThreadPoolExecutor, compute: Callable[[Sequence[Tensor]], Logits]
    ) -> None:
        """Starts the computation in the thread.

        Args:
            pool: The pool of the thread.
            compute: Computes the logits. It is called with the choices that the model must take,
                or with none.
        """
        self._compute = compute
        self._future = pool.submit(compute, ())

    def result(self) -> Logits:
        """Waits until the logits are computed, and returns them."""
        return self._future.result()

    def with_choices(self, choices: Sequence[Tensor]) -> Logits:
        """Computes the logits again, here and now, with `choices` in place of the model's own."""
        return self._compute(choices)


@contextmanager
def stream_values(
    model: nn.Module, variants: Sequence[Rows], round_inputs: Sequence[RoundInputs | None] = ()
) -> Iterator[None]:
    """A block in which `model` computes with values that are read when they are needed.

    The model's parameters are on meta and stay there. A linear layer multiplies with a block of
    rows while the next block is read. An embedding reads the rows of its tokens. Any other
    parameter is read when a module uses it.

    Args:
        model: The model.
        variants: Each reads the values of one variant of the model. The variants may differ in the
            weights of linear layers only; all other values are those of the first. The caller's
            inputs hold the rows of the first variant, then those of the second, and so on.
        round_inputs: For each variant, what is done to the inputs of linear layers; None: nothing.
            Empty: nothing for all.
    """
    parameters = {module: module._parameters for module in model.modules()}
    reader = _Reader(variants[0])
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        # By the exact type: a subclass may compute something else.
        forward = STREAMED.get(type(module))
        if forward is not None:
            module.forward = partial(forward, module, name, variants, round_inputs)
        stored_class = _StoredExperts if is_experts(module) else _StoredParameters
        module.__dict__["_parameters"] = stored_class(module._parameters, prefix, reader)
        _read_buffers(prefix, module, variants[0])
    try:
        with _NoMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        for module, on_meta in parameters.items():
            module.__dict__["_parameters"] = on_meta
            if type(module) in STREAMED:
                del module.forward


class _Reader:
    """Reads whole tensors, and keeps the latest one.

    A module may ask for a tensor several times in a row, if only for its dtype.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.latest: tuple[str, Tensor] | None = None  # (name, tensor)

    def __call__(self, name: str, like: Tensor) -> Tensor:
        """Returns the tensor `name`. `like` is the same tensor on meta."""
        if self.latest is None or self.latest[0] != name:
            self.latest = None  # frees the tensor before the next one is read
            self.latest = (name, _read_whole(name, like, self.rows))
        return self.latest[1]


class _StoredParameters(dict[str, nn.Parameter | None]):
    """Stands in for a module's `_parameters`: `module.weight` reads the weight from the files.

    A hook around the module's forward would not suffice: Mamba's mixers use the weight of their
    convolution, and DoRA that of its base layer, without calling the module that owns it.
    """

    def __init__(
        self, on_meta: Mapping[str, nn.Parameter | None], prefix: str, reader: _Reader
    ) -> None:
        """
        Args:
            on_meta: The module's parameters.
            prefix: The module's name with a final dot; empty for the model itself.
            reader: Reads the parameters.
        """
        super().__init__(on_meta)
        self.prefix = prefix
        self.reader = reader

    def __getitem__(self, attribute: str) -> Any:
        on_meta = super().__getitem__(attribute)
        if on_meta is None:
            return None
        return self.reader(self.prefix + attribute, on_meta)


class _StoredExperts(_StoredParameters):
    """The parameters of a layer's experts, each of which holds the matrices of all experts.

    They are read one expert at a time, as transformers' loop over the experts uses them.
    """

    def __getitem__(self, attribute: str) -> Any:
        on_meta = dict.__getitem__(self, attribute)
        if on_meta is None:
            return None
        return _ExpertMatrices(self.prefix + attribute, self.reader.rows)


class _ExpertMatrices:
    """Stands in for a parameter of experts: an index, the number of an expert, reads its matrix."""

    def __init__(self, name: str, rows: Rows) -> None:
        self.name = name
        self.rows = rows

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        return self.rows(self.name, int(expert), int(expert) + 1)[0].float()


class _NoMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which a computation with a meta tensor raises `UserError`.

    Without it, copying a meta tensor to the CPU would give whatever is in memory there.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default and not args[0].is_meta:
            # Idefics 3 moves hidden states to the device of its parameters, which is meta here.
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


def _compute_linear(
    module: nn.Linear,
    name: str,
    variants: Sequence[Rows],
    round_inputs: Sequence[RoundInputs | None],
    inputs: Tensor,
) -> Tensor:
    """Computes a linear layer for each variant of the model, reading the weight in blocks of rows.

    Args:
        module: The layer, with its weight on meta.
        name: The layer's name.
        variants: For each variant, a function that reads rows of the weight.
        round_inputs: For each variant, what is done to the inputs; None: nothing. Empty: nothing
            for all.
        inputs: [variants x rows, ..., in_features]: the inputs of one variant after another.

    Returns:
        [variants x rows, ..., out_features].
    """
    if any(round_inputs):
        pairs = zip(inputs.chunk(len(variants)), round_inputs, strict=True)
        inputs = torch.cat(
            [
                variant_inputs if round_variant is None else round_variant(name, variant_inputs)
                for variant_inputs, round_variant in pairs
            ]
        )
    # Allocated once: small results kept between the blocks would fragment the heap until no block
    # fits.
    result = inputs.new_empty(*inputs.shape[:-1], module.out_features)
    bounds = list(row_blocks((module.out_features, module.in_features)))

    def read_blocks(start: int, stop: int) -> list[Tensor]:
        return [rows(f"{name}.weight", start, stop) for rows in variants]

    for (start, stop), blocks in zip(bounds, prefetch(read_blocks, bounds), strict=True):
        # The chunks of `result` are views: writing to them fills it.
        parts = zip(result.chunk(len(variants)), inputs.chunk(len(variants)), blocks, strict=True)
        for variant_result, variant_inputs, block in parts:
            variant_result[..., start:stop] = functional.linear(variant_inputs, block.float())
    return result if module.bias is None else result + module.bias


def _look_up_embedding(
    module: nn.Embedding,
    name: str,
    variants: Sequence[Rows],
    _: Sequence[RoundInputs | None],
    ids: Tensor,
) -> Tensor:
    """Returns the embeddings of `ids` in float32, [*ids.shape, width].

    It reads one row for each different id, from the first variant: embeddings do not differ.
    """
    tokens, indices = torch.unique(ids, return_inverse=True)
    rows = torch.cat(
        [variants[0](f"{name}.weight", token, token + 1).float() for token in tokens.tolist()]
    )
    return rows[indices]


# What `stream_values` puts in place of a module's forward. Other modules keep theirs.
STREAMED: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _compute_linear,
    nn.Embedding: _look_up_embedding,
}


def _read_buffers(prefix: str, module: nn.Module, rows: Rows) -> None:
    """Replaces the saved buffers of `module`, without those of its children, by their values.

    They stay replaced when `stream_values` ends.
    """
    for attribute in module._buffers.keys() - module._non_persistent_buffers_set:
        buffer = module._buffers[attribute]
        if buffer is not None:
            module._buffers[attribute] = _read_whole(prefix + attribute, buffer, rows)


def _read_whole(name: str, like: Tensor, rows: Rows) -> Tensor:
    """Returns the whole tensor `name`, of the shape of `like`: in float32 if it is floating."""
    is_scalar = like.dim() == 0
    height = 1 if is_scalar else like.shape[0]
    tensor = rows(name, 0, height)
    return tensor.float() if tensor.is_floating_point() else tensor


# The largest sizes of the twin. Only these are reduced: the vocabulary, MLPs and experts are plain
# in every family.
VOCABULARY = 64
INTERMEDIATE_SIZE = 256
EXPERTS = 32
MAX_PARAMETERS = 1 << 30  # of the twin, 4 GiB in float32; a larger twin is not run
LARGEST_DIFFERENCE = 1e-4  # ‖streamed − own‖ / ‖own‖ that the order of float32 sums explains


def check_streamed_logits(
    config: Any, trust_remote_code: bool = False, log: Callable[[str], object] = print
) -> bool:
    """Checks on a small twin of the model that `stream_logits` computes this family right.

    The twin has one decoder layer of each kind, a small vocabulary and narrow MLPs. The logits of
    transformers' forward and of `stream_logits` must agree. A model that has only linear layers,
    embeddings and norms needs no twin. The random state of the CPU stays as it is.

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
            twin_config = _shrink_config(config)
            twin = build_on_meta(twin_config, torch.float32, trust_remote_code).eval()
            if _is_plain(twin):
                return False
            parts = _list_text_parts(twin)
            count = sum(p.numel() for module in parts for p in module.parameters())
            if count > MAX_PARAMETERS:
                raise ValueError(f"it would have {count:,} parameters")
            # It stays on meta, and reads the values of `twin`.
            streamed = build_on_meta(twin_config, torch.float32, trust_remote_code).eval()
            _fill_with_noise(twin)
            prompts = make_prompts(text_config_of(twin_config).vocab_size)
            with torch.no_grad():
                expected = twin(input_ids=prompts, use_cache=False).logits.float()
        except Exception as error:  # a family can reject such a twin in any way
            reason = first_line(error)
            log(
                f"export  not checked ahead on a small twin of the model ({reason}); the export "
                "itself will be verified"
            )
            return False
        values = twin.state_dict()
        try:
            logits = stream_logits(
                streamed, lambda name, start, stop: _slice_rows(values[name], start, stop)
            ).values
        except Exception as error:
            raise _make_unverifiable_error(twin, on_one_line(error)) from error
    difference = float((logits - expected).norm() / expected.norm())
    if not difference <= LARGEST_DIFFERENCE:
        raise _make_unverifiable_error(
            twin, f"logits computed a tensor at a time differ by {difference:.2g} from its own"
        )
    return True


def _slice_rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Returns these rows of `tensor`; of a scalar, the scalar."""
    return tensor[start:stop] if tensor.dim() else tensor


def _make_unverifiable_error(model: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(model).__name__}: its export could not be verified ({reason}); this family is not "
        "supported: name another model"
    )


def _is_plain(model: nn.Module) -> bool:
    """Whether all tensors for text belong to linear layers, embeddings and norms.

    The logits of such a model need no check.
    """
    return all(
        type(module) in STREAMED or type(module).__name__.endswith("Norm")
        for _, module in text_modules(model)
        if module._parameters or module._buffers.keys() - module._non_persistent_buffers_set
    )


def _list_text_parts(model: Any) -> list[nn.Module]:
    """Lists the parts of `model` that work on text: without a vision tower, the model itself."""
    if has_other_parts(model):
        return [trunk_of(model), head_of(model)]
    return [model]


def _shrink_config(config: Any) -> Any:
    """Returns a copy of `config` with few decoder layers and with small sizes.

    It keeps the first two layers, and the first layer of each kind in `layer_types`. Vocabulary,
    MLPs and the number of experts shrink; other sizes, such as the hidden size, stay.
    """
    shrunk = copy.deepcopy(config)
    config = text_config_of(config)
    text_config = text_config_of(shrunk)  # the part of `shrunk` that is changed
    depth = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or ())
    kept = sorted({0, min(1, depth - 1), *(kinds.index(kind) for kind in set(kinds))})
    sizes = {
        "num_hidden_layers": len(kept),
        # The last layers share keys and values with earlier ones, and are cut off.
        "num_kv_shared_layers": 0,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "decoder_vocab_size": VOCABULARY,  # of Marian's head
        "intermediate_size": INTERMEDIATE_SIZE,
        "moe_intermediate_size": INTERMEDIATE_SIZE,
        **dict.fromkeys(EXPERT_COUNTS, EXPERTS),
    }
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == depth:  # an entry for each layer
            setattr(text_config, name, [value[index] for index in kept])
        elif isinstance(value, int) and name.endswith("_token_id"):
            setattr(text_config, name, min(value, VOCABULARY - 1))
        elif isinstance(value, int) and not isinstance(value, bool) and name in sizes:
            setattr(text_config, name, min(value, sizes[name]))
    # Gemma 3n has a size for each layer.
    if isinstance(getattr(config, "intermediate_size", None), list):
        text_config.intermediate_size = [INTERMEDIATE_SIZE] * len(kept)
    return shrunk


def _fill_with_noise(model: Any) -> None:
    """Moves the text parts of `model` from meta to the CPU, and gives the parameters values.

    The values are a short stretch of normal noise, repeated: a random number for each element would
    take seconds. Every parameter begins at another point of the stretch. Buffers keep their values.
    """
    parts = nn.ModuleList(_list_text_parts(model))
    buffers = {name: buffer.clone() for name, buffer in parts.named_buffers()}
    parts.to_empty(device="cpu")
    model.tie_weights()  # `to_empty` gives tied parameters memory of their own
    noise = torch.randn((1 << 16) - 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, buffer in parts.named_buffers():
            buffer.copy_(buffers[name])
        for index, parameter in enumerate(parts.parameters()):
            size = parameter.numel()
            repeated = noise.roll(index * 7919).repeat(ceil_div(size, len(noise)))
            values = repeated[:size].view(parameter.shape)
            if parameter.dim() > 1:
                fan_in = max(parameter[0].numel(), 1)
                parameter.copy_(values * fan_in**-0.5)
            else:
                parameter.copy_(1 + 0.1 * values)  # such as the weight of a norm
