"""Attention that keeps packed documents apart without an O(tokens^2) mask, on every device, with no flash-attn build.

After `install_attention` a transformers model's forward accepts `cu_seq_lens` (int32[documents + 1], the boundaries of
the documents in the one packed row), `max_document_length` (int), `packed_lengths` (the tokens of each document, for
kernels that the host starts for each: it need not ask a GPU) and, where `can_continue` says so, `continued` (the place
of the document that each continues, or None). Without them every row is one document padded on the right. Generation,
which passes an attention mask or a cache, runs transformers' SDPA.

Where ranks divide a row's tokens between them, each attends for some of the heads, over the whole row.

On a CPU attention runs in float32: torch's bf16 backward there is half as fast, and compiles for every length.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from finetune.config.compatibility import FLASH_GPUS
from finetune.config.facts import attends_by_mask
from finetune.config.families import find_family
from finetune.config.layout import divides_heads
from finetune.distributed.model_parts import has_other_parts, language_model_of, other_parts, trunk_of
from finetune.distributed.sequence_parallel import (
    gather_keys,
    take_heads,
    trade_heads_for_tokens,
    trade_tokens_for_heads,
)
from finetune.errors import UserError
from finetune.models.attention_kernels import (
    Continued,
    RowDocuments,
    ScoreOptions,
    attend_documents,
    attend_from,
    attend_with_mask,
    find_windows,
    make_masks,
)
from finetune.models.document_layers import (
    depends_on_length,
    install_document_rotary,
    install_recurrence,
    recurrent_modules,
)
from finetune.models.routing import find_routing

NAME = "packed"
# Of the documents of a packed row, and of those in padded rows, which only long-context RoPE reads.
BOUNDARIES = ("cu_seq_lens", "max_document_length", "packed_lengths", "document_lengths", "image_tokens", "continued")
WHOLE_ROWS = RowDocuments()
NO_MASK: dict[str, Any] = {}  # an attention_mask for a whole vision-language model, which then makes none of its own
UNSUPPORTED = ("position_bias",)  # arguments that transformers may pass and this attention does not take


def install_attention(model: Any, implementation: str = "auto", sequence_group: ProcessGroup | None = None) -> None:
    """Makes `model` (an `XForCausalLM`) use the attention that the recipe's `attn_implementation` names.

    `auto` is this module's attention, by torch's kernels or by those of an installed package that is faster on this
    GPU; `flash_attention_3` and `flash_attention_4` name such a package. Any other name is transformers' own: sdpa,
    eager and flex_attention find the documents in the position ids, flash_attention_2 receives their boundaries.

    Args:
        model: An `XForCausalLM`.
        implementation: As the recipe names it.
        sequence_group: The ranks that share a row's tokens, only with `auto`; None: each rank has whole rows.

    Raises:
        UserError: The implementation is not available.
    """
    trunk = trunk_of(model)
    family = find_family(trunk.config.model_type)
    if implementation == "auto" and _attends_by_mask(trunk):
        implementation = "sdpa" if trunk._supports_sdpa and family.masks_documents != "here" else "eager"
    if implementation == "auto":
        activate_fastest_kernels()
    elif implementation in FLASH_PACKAGES and activate_flash_kernels(implementation):
        implementation = "auto"
    if implementation == "auto":
        _register()
    try:  # a vision tower keeps its own
        language_model_of(model).set_attn_implementation(NAME if implementation == "auto" else implementation)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"attn_implementation: {implementation} cannot be used with {type(model).__name__} here "
            f"({str(error).splitlines()[0]}); leave the key out for packed attention that needs no extra package"
        ) from error
    for part in other_parts(model):  # written out, an image's scores would be of the square of its patches
        if isinstance(part, PreTrainedModel) and part._supports_sdpa:
            part.set_attn_implementation("sdpa")
    install_document_rotary(model, sequence_group)
    install_recurrence(model)
    rewrite: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "auto": partial(_prepare_for_packed, find_windows(model), sequence_group),
        "flash_attention_2": _prepare_for_flash,
        "flash_attention_3": _prepare_for_flash,
    }
    if family.masks_documents == "here":
        rewrite |= dict.fromkeys(("eager", "sdpa"), _mask_documents)
    # A hook on the trunk, whose every caller passes `use_cache`: False is training.
    trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, rewrite.get(implementation, _drop_boundaries)(kwargs)), with_kwargs=True
    )

    if family.drops_arguments:
        _hand_down(trunk, "Attention", ("documents", *FLASH_ARGUMENTS))
    elif family.masks_documents == "here":  # BART's embedding of positions would count the tokens of the row
        _hand_down(trunk, "PositionalEmbedding", ("position_ids",))


def _hand_down(trunk: nn.Module, kind: str, names: tuple[str, ...]) -> None:
    """Hands the modules whose class is called `kind` what the forward of `trunk` receives under these names."""
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
    """Whether a document of `model`'s packed rows may continue another, computed from its own tokens alone.

    Not where something beside our attention reads the tokens of a document or its length (recurrent layers, chunks,
    long-context RoPE, images), where attention needs a mask of blocks, and where the routers' auxiliary loss counts
    each token.
    """
    trunk, routing = trunk_of(model), find_routing(model)
    is_ours = trunk.config._attn_implementation == NAME and not has_other_parts(model) and not find_windows(model)
    is_chunked = "chunked_attention" in (getattr(trunk.config, "layer_types", None) or ())
    is_recurrent = bool(recurrent_modules(model)) or depends_on_length(trunk)
    return is_ours and not is_chunked and not is_recurrent and (routing is None or not routing.coefficient)


# From the arguments of a training forward to those that the implementation reads. Generation's stay as they are.


def _prepare_for_packed(
    windows: frozenset[int | None], sequence_group: ProcessGroup | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    kwargs, (boundaries, longest, lengths, _, images, places) = _split_boundaries(kwargs)
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask is not NO_MASK) or kwargs.get("use_cache") is not False:
        return kwargs
    masks: dict[int | None, BlockMask] = {}
    if windows:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        tokens = ids.shape[1] * (1 if sequence_group is None else sequence_group.size())
        masks = make_masks(windows, boundaries, tokens, ids.device)
    continued = None if places is None else Continued.find(places, lengths, boundaries.device)
    # transformers leaves a four-dimensional mask alone. Without one, it compares position ids to find packed
    # documents in every forward: a host synchronization on CUDA, for a mask that nothing reads.
    prepared = kwargs | {
        "attention_mask": torch.empty((0, 0, 0, 0), dtype=torch.bool),
        "documents": RowDocuments(boundaries, longest, lengths, masks, images, continued),
    }
    return prepared if sequence_group is None else prepared | {"sequence_group": sequence_group}


def _split_boundaries(kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The arguments without BOUNDARIES, and these; None for those that are missing."""
    others = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    return others, [kwargs.get(name) for name in BOUNDARIES]


FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _prepare_for_flash(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs, (boundaries, longest, *_) = _split_boundaries(kwargs)
    if boundaries is None:
        return kwargs
    return kwargs | dict(zip(FLASH_ARGUMENTS, (boundaries, boundaries, longest, longest), strict=True))


def _attends_by_mask(trunk: Any) -> bool:
    config = trunk.config
    is_own = type(trunk).__module__.startswith("transformers.")  # and not that of a model's own code
    return is_own and attends_by_mask(config.model_type, getattr(config, "layer_types", None) or ())


def _mask_documents(kwargs: dict[str, Any]) -> dict[str, Any]:
    """With a mask of all pairs of tokens, for attention that has no other way to know documents."""
    kwargs, (boundaries, *_) = _split_boundaries(kwargs)
    if boundaries is None:
        return kwargs
    places = kwargs["position_ids"]  # which start again with each document
    tokens = torch.arange(places.shape[1], device=places.device)
    start = tokens - places[0]
    is_hidden = (tokens[:, None] < tokens) | (start[:, None] != start)
    mask = torch.zeros(is_hidden.shape, device=places.device).masked_fill(is_hidden, torch.finfo(torch.float32).min)
    return kwargs | {"attention_mask": mask[None, None]}


def _drop_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    return _split_boundaries(kwargs)[0]


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    # For generation; training passes a mask of its own, see `_prepare_for_packed`.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: RowDocuments = WHOLE_ROWS,
    sequence_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document; transformers' attention interface.

    Args:
        query: [rows, heads, tokens, head size]; key and value: [rows, key-value heads, tokens, head size].
        attention_mask: empty in training; what `sdpa_mask` made, in generation.
        dropout, scaling, sliding_window, softcap, s_aux (sinks): see `ScoreOptions`.
        documents: of the rows.
        sequence_group: the ranks that divide the row's tokens between them: `tokens` are this rank's, and the documents
            those of the whole row.
    Returns:
        [rows, tokens, heads, head size], and None for the attention weights.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} needs {name}; set attn_implementation: eager for this model")
    options = ScoreOptions(scaling, sliding_window, softcap, dropout, s_aux, _find_chunk(module))
    if attention_mask is None or attention_mask.numel() > 0:
        return attend_with_mask(module, query, key, value, attention_mask, options), None
    # Under autocast the rotated query and key are fp32 beside a bf16 value; the kernels want one type.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32) if device == "cpu" else dtype
    query, key, value = (states.to(compute_dtype) for states in (query, key, value))
    with torch.autocast(device, enabled=False):
        if sequence_group is None:
            return attend_documents(query, key, value, documents, options).to(dtype), None
        return _attend_across_ranks(query, key, value, documents, options, dtype, sequence_group), None


def _find_chunk(attention: Any) -> int | None:
    """The tokens of a chunk of a document, outside of which this layer sees nothing (Llama 4)."""
    config = getattr(attention, "config", None)
    types = getattr(config, "layer_types", None) or ()
    is_chunked = "chunked_attention" in types and types[attention.layer_idx] == "chunked_attention"
    return config.attention_chunk_size if config is not None and is_chunked else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the collectives are no part of a compiled layer
def _attend_across_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: RowDocuments,
    options: ScoreOptions,
    dtype: torch.dtype,
    group: ProcessGroup,
) -> Tensor:
    """As `attend_documents`, in `dtype`, with this rank's tokens: for some of the heads over the whole row, or, where
    there are more ranks than heads, from these tokens to the keys of the whole row."""
    if not divides_heads(query.shape[1], group.size()):
        first = group.rank() * query.shape[2]
        key, value = gather_keys(key, group), gather_keys(value, group)
        return attend_from(query, key, value, first, documents, options).to(dtype)
    query, key, value = trade_tokens_for_heads(query, key, value, group)
    if options.sinks is not None:
        options = options._replace(sinks=take_heads(options.sinks, group))
    return trade_heads_for_tokens(attend_documents(query, key, value, documents, options).to(dtype), group)


# A recipe's name -> the module of its package, torch's name for it.
FLASH_PACKAGES = {"flash_attention_3": ("flash_attn_interface", "FA3"), "flash_attention_4": ("flash_attn.cute", "FA4")}


def activate_fastest_kernels() -> None:
    """FlashAttention 3 or 4 if installed and run by this GPU; torch's own 2 for deterministic runs, and otherwise."""
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return
    major, _ = torch.cuda.get_device_capability()
    for name in FLASH_PACKAGES:
        with suppress(UserError):
            if major in FLASH_GPUS[name] and activate_flash_kernels(name):
                return


def activate_flash_kernels(implementation: str) -> bool:
    """Makes torch's attention use the FlashAttention 3 or 4 of an installed package, by torch's own switch; False where
    FlashAttention 3 is not installed, since transformers finds kernels of it on the hub.

    Raises `UserError` where FlashAttention 4 is not installed.
    """
    package, name = FLASH_PACKAGES[implementation]
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        if implementation == "flash_attention_3":
            return False
        raise UserError(
            f"attn_implementation: {implementation} needs the package that has {package} ({error}); install "
            "it, or leave the key out"
        ) from error
    return True
