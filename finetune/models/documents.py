"""What is put into a model so that it computes each document as if it were alone, packed or padded,
on any ranks.

After `install_attention` a transformers model's forward accepts `cu_seq_lens` (int32[documents +
1], the boundaries of the documents in the one packed row), `max_document_length` (int),
`packed_lengths` (the tokens of each document, for kernels that the host starts for each: it need
not ask a GPU) and, where `can_continue` says so, `continued` (the place of the document that each
continues, or None). Without them every row is one document padded on the right. With
`visible_tokens` (bool[rows, tokens], False where padding) attention is not causal: a token sees all
of its document. Generation, which passes an attention mask or a cache, runs transformers' SDPA.

Two kinds of layers beside attention look past a document's end:

`longrope` and `dynamic` RoPE choose their frequencies by the length of a text. transformers takes
the largest position of a batch for all of its rows, and its dynamic RoPE keeps the largest length
that it has seen. The loss of a document would then depend on what lies beside it, so the
frequencies are chosen here, for every token by the length of its own document.

Recurrent layers (linear attention, Mamba, RWKV, xLSTM, short convolutions) carry a state from token
to token, which starts again with each document. With the kernels' packages installed, transformers'
own modules take the boundaries of all documents at once. Without them, and in families whose
modules would ignore the boundaries, a module runs over one document after the other.
config/families.py says which modules these are, and what they take.
"""

import importlib.util
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import activate_flash_attention_impl
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.compatibility import FLASH_GPUS, FLASH_ON_INDEX, FLASH_PACKAGES
from finetune.config.facts import attends_by_mask
from finetune.config.families import find_family
from finetune.distributed.model_parts import (
    has_other_parts,
    language_model_of,
    other_parts,
    trunk_of,
)
from finetune.errors import UserError
from finetune.models.attention import NAME, prepare_for_packed, register, split_boundaries
from finetune.models.attention_kernels import find_windows
from finetune.models.routing import find_routing

FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def install_attention(
    model: Any, implementation: str = "auto", sequence_group: ProcessGroup | None = None
) -> None:
    """Makes `model` (an `XForCausalLM`) use the attention that the recipe's `attn_implementation`
    names.

    `auto` is this module's attention, by torch's kernels or by those of an installed package that
    is faster on this GPU; `flash_attention_3` and `flash_attention_4` name such a package. Any
    other name is transformers' own: sdpa, eager and flex_attention find the documents in the
    position ids, flash_attention_2 receives their boundaries.

    Args:
        model: An `XForCausalLM`.
        implementation: As the recipe names it.
        sequence_group: The ranks that share a row's tokens, only with `auto`; None: each rank has
            whole rows.

    Raises:
        UserError: The implementation is not available.
    """
    trunk = trunk_of(model)
    family = find_family(trunk.config.model_type)
    if implementation == "auto" and _attends_by_mask(trunk):
        if trunk._supports_sdpa and family.document_mask != "here":
            implementation = "sdpa"
        else:
            implementation = "eager"
    if implementation == "auto":
        activate_fastest_kernels()
    elif implementation in FLASH_PACKAGES and activate_flash_kernels(implementation):
        implementation = "auto"
    if implementation == "auto":
        register()
    try:  # a vision tower keeps its own
        language_model_of(model).set_attn_implementation(
            NAME if implementation == "auto" else implementation
        )
    except (ImportError, ValueError) as error:
        raise UserError(
            f"attn_implementation: {implementation} cannot be used with {type(model).__name__} "
            f"here ({str(error).splitlines()[0]}); leave the key out for packed attention that "
            "needs no extra package"
        ) from error
    # written out, an image's scores would be of the square of its patches
    for part in other_parts(model):
        if isinstance(part, PreTrainedModel) and part._supports_sdpa:
            part.set_attn_implementation("sdpa")
    install_document_rotary(model, sequence_group)
    install_recurrence(model)
    rewrite: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "auto": partial(prepare_for_packed, find_windows(model), sequence_group),
        "flash_attention_2": _prepare_for_flash,
        "flash_attention_3": _prepare_for_flash,
    }
    if family.document_mask == "here":
        rewrite |= dict.fromkeys(("eager", "sdpa"), _mask_documents)
    # A hook on the trunk, whose every caller passes `use_cache`: False is training.
    trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, rewrite.get(implementation, _drop_boundaries)(kwargs)),
        with_kwargs=True,
    )

    if family.drops_arguments:
        _hand_down(trunk, "Attention", ("documents", *FLASH_ARGUMENTS))
    elif (
        family.document_mask == "here"
    ):  # BART's embedding of positions would count the tokens of the row
        _hand_down(trunk, "PositionalEmbedding", ("position_ids",))


# From the arguments of a training forward to those that the implementation reads, as
# `prepare_for_packed` does.


def _prepare_for_flash(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs, (boundaries, longest, *_) = split_boundaries(kwargs)
    if boundaries is None:
        return kwargs
    return kwargs | dict(
        zip(FLASH_ARGUMENTS, (boundaries, boundaries, longest, longest), strict=True)
    )


def _mask_documents(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Adds a mask of all pairs of tokens, for attention that has no other way to know documents."""
    kwargs, (boundaries, *_) = split_boundaries(kwargs)
    if boundaries is None:
        return kwargs
    places = kwargs["position_ids"]  # which start again with each document
    tokens = torch.arange(places.shape[1], device=places.device)
    start = tokens - places[0]
    is_hidden = (tokens[:, None] < tokens) | (start[:, None] != start)
    mask = torch.zeros(is_hidden.shape, device=places.device).masked_fill(
        is_hidden, torch.finfo(torch.float32).min
    )
    return kwargs | {"attention_mask": mask[None, None]}


def _drop_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    return split_boundaries(kwargs)[0]


def _hand_down(trunk: nn.Module, kind: str, names: tuple[str, ...]) -> None:
    """Hands the modules whose class is called `kind` what the forward of `trunk` receives under
    these names.
    """
    received: dict[str, Any] = {}

    def receive(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        received.clear()
        received.update({name: kwargs[name] for name in names if kwargs.get(name) is not None})

    def hand(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if "position_ids" not in received:
            return args, kwargs | received
        is_counted = "position_ids" in kwargs and len(received["position_ids"]) == 1
        return args, kwargs | ({"position_ids": received["position_ids"][0]} if is_counted else {})

    trunk.register_forward_pre_hook(receive, with_kwargs=True)
    for module in trunk.modules():
        if type(module).__name__.endswith(kind):
            module.register_forward_pre_hook(hand, with_kwargs=True)


def can_continue(model: Any) -> bool:
    """Whether a document of `model`'s packed rows may continue another, computed from its own
    tokens alone.

    Not where something beside our attention reads the tokens of a document or its length (recurrent
    layers, chunks, long-context RoPE, images), where attention needs a mask of blocks, and where
    the routers' auxiliary loss counts each token.
    """
    trunk = trunk_of(model)
    routing = find_routing(model)
    is_ours = (
        trunk.config._attn_implementation == NAME
        and not has_other_parts(model)
        and not find_windows(model)
    )
    is_chunked = "chunked_attention" in (getattr(trunk.config, "layer_types", None) or ())
    is_recurrent = bool(recurrent_modules(model)) or depends_on_length(trunk)
    return (
        is_ours
        and not is_chunked
        and not is_recurrent
        and (routing is None or not routing.coefficient)
    )


def _attends_by_mask(trunk: Any) -> bool:
    config = trunk.config
    # and not that of a model's own code
    is_own = type(trunk).__module__.startswith("transformers.")
    return is_own and attends_by_mask(config.model_type, getattr(config, "layer_types", None) or ())


def activate_fastest_kernels() -> None:
    """FlashAttention 3 or 4 if installed and run by this GPU; torch's own 2 for deterministic runs,
    and otherwise.
    """
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return
    major, _ = torch.cuda.get_device_capability()
    for name in FLASH_PACKAGES:
        with suppress(UserError):
            if major in FLASH_GPUS[name] and activate_flash_kernels(name):
                return


def find_missing_flash_package() -> str | None:
    """The package on the index whose FlashAttention this GPU would run, where it is not
    installed.
    """
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return None
    major, _ = torch.cuda.get_device_capability()
    module, _ = FLASH_PACKAGES["flash_attention_4"]
    with suppress(ImportError):  # of the package that the module is in
        if importlib.util.find_spec(module) is not None:
            return None
    if major in FLASH_GPUS["flash_attention_4"]:
        return FLASH_ON_INDEX
    return None


def activate_flash_kernels(implementation: str) -> bool:
    """Makes torch's attention use the FlashAttention 3 or 4 of an installed package, by torch's own
    switch; False where FlashAttention 3 is not installed, since transformers finds kernels of it on
    the hub.

    Raises `UserError` where FlashAttention 4 is not installed.
    """
    package, name = FLASH_PACKAGES[implementation]
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        if implementation == "flash_attention_3":
            return False
        raise UserError(
            f"attn_implementation: {implementation} needs the package that has {package} "
            f"({error}); install it, or leave the key out"
        ) from error
    return True


LENGTH_DEPENDENT = ("longrope", "dynamic")
DEFAULT = None  # the layer type where all layers have the same RoPE


def depends_on_length(model: nn.Module) -> bool:
    """Whether rows of several lengths in one forward of transformers' own would share one choice of
    frequencies.
    """
    return any(
        _length_dependent_layers(getattr(module, "rope_type", None)) for module in model.modules()
    )


def install_document_rotary(model: Any, sequence_group: ProcessGroup | None = None) -> None:
    """Makes `model` compute each document's rotary embedding as transformers does for that document
    alone.

    Models with other kinds of RoPE stay as they are. In training the lengths come from
    `cu_seq_lens` or `document_lengths`. Elsewhere, as in generation, a row is one document that
    ends at its largest position.

    Args:
        model: a `...ForCausalLM`, before sharding and before its attention is installed.
        sequence_group: the ranks that shard the tokens of a row.
    Raises:
        UserError: the config has such a RoPE, but the model's own code computes it in another way
            than transformers.
    """
    trunk = trunk_of(model)
    modules = [
        module
        for module in trunk.modules()
        if _length_dependent_layers(getattr(module, "rope_type", None))
    ]
    if not modules:
        if _length_dependent_layers(_configured_types(trunk.config)):
            raise UserError(
                f"{type(model).__name__}: the RoPE of its own code depends on the length of a row; "
                "set trust_remote_code: false, or name another model"
            )
        return
    current = _Lengths()
    trunk.register_forward_pre_hook(
        partial(_read_lengths, current, sequence_group), with_kwargs=True
    )
    for module in modules:
        # transformers' own forward updates the frequencies first, in a wrapper; what it wraps only
        # applies them.
        apply = inspect.unwrap(type(module).forward)
        module.forward = MethodType(partial(_embed_positions, apply, current), module)


@dataclass(slots=True)
class _Lengths:
    """The lengths of the documents of the forward that is running."""

    # int64[rows, tokens] or [rows, 1]: of the document of each token; None: not given
    of_tokens: Tensor | None = None
    on_host: tuple[int, ...] | None = None  # of all documents; None: the device has to be asked


def _configured_types(config: Any) -> Any:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = {
        key: value.get("rope_type") for key, value in parameters.items() if isinstance(value, dict)
    }
    return by_layer or parameters.get("rope_type")


def _length_dependent_layers(rope_type: Any) -> list[str | None]:
    """The layer types whose RoPE depends on the length; [DEFAULT] where it is that of all
    layers.
    """
    if isinstance(rope_type, dict):
        by_layer = rope_type
    else:
        by_layer = {DEFAULT: rope_type}
    return [layer for layer, kind in by_layer.items() if kind in LENGTH_DEPENDENT]


def _read_lengths(
    current: _Lengths,
    sequence_group: ProcessGroup | None,
    _trunk: nn.Module,
    _args: Any,
    kwargs: dict[str, Any],
) -> None:
    """Sets `current` from a forward's arguments: its row's boundaries, or the lengths of padded
    rows.
    """
    current.of_tokens = current.on_host = None
    if (boundaries := kwargs.get("cu_seq_lens")) is not None:
        rank, ranks = (
            (0, 1) if sequence_group is None else (sequence_group.rank(), sequence_group.size())
        )
        tokens = kwargs["position_ids"].shape[1]
        lengths = boundaries.diff().long()
        by_token = lengths.repeat_interleave(lengths, output_size=tokens * ranks)
        current.of_tokens = by_token[None, rank * tokens : (rank + 1) * tokens]
        current.on_host = kwargs.get("packed_lengths")
    elif lengths := kwargs.get("document_lengths"):
        current.of_tokens = torch.tensor(lengths, device=kwargs["position_ids"].device)[:, None]
        current.on_host = lengths


@torch.no_grad()
def _embed_positions(
    apply: Callable[..., Any],
    current: _Lengths,
    module: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    """The forward of a rotary module.

    `apply` computes it with one set of frequencies for all tokens.

    Each set is applied to every token, and each token takes the result of its own. There are few:
    one beyond the original length under longrope, one for each longer document under dynamic.
    """
    arguments = [module, x, position_ids]
    if layer_type is not None:
        arguments.append(layer_type)
    if layer_type not in _length_dependent_layers(module.rope_type):
        return apply(*arguments)
    if current.of_tokens is None:
        lengths = position_ids.amax(-1, keepdim=True) + 1
    else:
        lengths = current.of_tokens
    config = module.config
    if layer_type is None:
        kind = module.rope_type
        parameters = config.rope_parameters
        prefix = ""
        of_layer = {}
    else:
        kind = module.rope_type[layer_type]
        parameters = config.rope_parameters[layer_type]
        prefix = f"{layer_type}_"
        of_layer = {"layer_type": layer_type}

    def embed(frequencies: Tensor) -> Any:
        setattr(module, f"{prefix}inv_freq", frequencies)
        return apply(*arguments)

    def find_frequencies(length: int | Tensor) -> Tensor:
        initialize = ROPE_INIT_FUNCTIONS[kind]
        frequencies: Tensor = initialize(config, x.device, seq_len=length, **of_layer)[0]
        return frequencies

    usual = getattr(module, f"{prefix}original_inv_freq").to(x.device)
    outputs = embed(usual)
    if kind == "longrope":
        limit = parameters["original_max_position_embeddings"]
        if current.on_host is None or max(current.on_host) > limit:
            outputs = _select(lengths > limit, embed(find_frequencies(limit + 1)), outputs)
    else:
        limit = config.max_position_embeddings
        on_host = set(lengths.flatten().tolist() if current.on_host is None else current.on_host)
        for length in on_host:
            if length > limit:
                # A tensor, as transformers has it: a number would round the base of the powers
                # otherwise.
                frequencies = find_frequencies(torch.full((), length, device=x.device))
                outputs = _select(lengths == length, embed(frequencies), outputs)
    setattr(module, f"{prefix}inv_freq", usual)
    return outputs


def _select(is_chosen: Tensor, chosen: Any, others: Any) -> Any:
    """`chosen` for the tokens of is_chosen, bool[rows, tokens]: cosines and sines, or one complex
    tensor.
    """
    if isinstance(chosen, tuple):
        return tuple(_select(is_chosen, *pair) for pair in zip(chosen, others, strict=True))
    return torch.where(is_chosen[..., None], chosen, others)


@dataclass(slots=True)
class _Documents:
    """The documents of the forward that is running."""

    lengths: list[int] | None = None  # of a packed row; None: each row is one document
    # the arguments of transformers' modules, where kernels take them
    boundaries: dict[str, Tensor] | None = None


def install_recurrence(model: Any) -> None:
    """Makes the recurrent modules of `model`, a `...ForCausalLM`, compute each document of a packed
    row by itself.

    Call it before sharding and before the trunk's other hooks, which drop the boundaries. Does
    nothing for a family without recurrent layers.
    """
    trunk = trunk_of(model)
    recurrence = find_family(trunk.config.model_type).recurrence
    if recurrence is None:
        return
    current = _Documents()
    has_kernels = bool(recurrence.packages) and all(
        map(importlib.util.find_spec, recurrence.packages)
    )
    arguments = recurrence.arguments if has_kernels else ()
    trunk.register_forward_pre_hook(partial(_read_documents, current, arguments), with_kwargs=True)
    for module in recurrent_modules(model):
        module.forward = MethodType(
            partial(_run_each_document, type(module).forward, current), module
        )


def recurrent_modules(model: Any) -> list[nn.Module]:
    """Returns the modules of a model that carry a state from token to token."""
    trunk = trunk_of(model)
    recurrence = find_family(trunk.config.model_type).recurrence
    ends = () if recurrence is None else recurrence.modules
    return [module for module in trunk.modules() if type(module).__name__.endswith(ends)]


def _read_documents(
    current: _Documents,
    arguments: tuple[str, ...],
    _trunk: nn.Module,
    _args: Any,
    kwargs: dict[str, Any],
) -> None:
    """Sets `current` from the arguments of a forward."""
    current.lengths = current.boundaries = None
    starts: Tensor | None = kwargs.get("cu_seq_lens")
    if starts is None or len(starts) == 2:
        return
    if not arguments:
        current.lengths = list(kwargs.get("packed_lengths") or starts.diff().tolist())
        return
    tokens = kwargs["position_ids"].shape[-1]
    numbers = torch.arange(len(starts) - 1, dtype=torch.int32, device=starts.device)
    made = {
        "cu_seq_lens_q": starts.long(),
        "seq_idx": numbers.repeat_interleave(starts.diff(), output_size=tokens)[None],
    }
    current.boundaries = {name: made[name] for name in arguments}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _run_each_document(
    forward: Callable[..., Any], current: _Documents, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a recurrent module over the documents of `current`."""
    mask = kwargs.get("attention_mask")
    # that of the packed attention, which Mamba's trunk hands on
    if mask is not None and mask.numel() == 0:
        kwargs["attention_mask"] = None
    if current.boundaries is not None:
        return forward(module, *args, **kwargs | current.boundaries)
    lengths = current.lengths
    if lengths is None:
        return forward(module, *args, **kwargs)
    tokens = sum(lengths)

    def split(tensor: Tensor) -> Any:
        # One split, whose backward is one concatenation. That of a slice would fill the whole row
        # for each document.
        is_of_tokens = tensor.dim() > 1 and tensor.shape[1] == tokens
        if is_of_tokens:
            return iter(torch.split(tensor, lengths, dim=1))
        return iter([tensor] * len(lengths))

    leaves, structure = tree_flatten((args, kwargs))
    columns = [
        split(leaf) if isinstance(leaf, Tensor) else iter([leaf] * len(lengths)) for leaf in leaves
    ]
    outputs = []
    for row in zip(*columns, strict=True):
        own_args, own_kwargs = tree_unflatten(row, structure)
        outputs.append(forward(module, *own_args, **own_kwargs))
    return _join_outputs(outputs, lengths)


def _join_outputs(outputs: list[Any], lengths: list[int]) -> Any:
    """The outputs of all documents in one row; of what is no output of tokens, a last state, the
    last document's.
    """
    flat = [tree_flatten(output)[0] for output in outputs]
    joined = []
    for column in zip(*flat, strict=True):
        is_of_tokens = all(
            isinstance(each, Tensor) and each.dim() > 1 and each.shape[1] == length
            for each, length in zip(column, lengths, strict=True)
        )
        joined.append(torch.cat(column, dim=1) if is_of_tokens else column[-1])
    return tree_unflatten(joined, tree_flatten(outputs[-1])[1])
