"""Makes a model compute each document as if it were alone, in packed and in padded rows.

After `install_attention` the forward of a transformers model takes these arguments:

- `cu_seq_lens`: int32[documents + 1], the boundaries of the documents in the one packed row.
- `max_document_length`: the tokens of the longest document.
- `packed_lengths`: the tokens of each document, so that the host need not read them from a GPU.
- `document_lengths`: in padded rows, the tokens of each row's document, for long-context RoPE.
- `continued`: for each document, the index of the document that it continues, or None. Requires
  `can_continue`.
- `visible_tokens`: bool[rows, tokens], False at padding. With it attention is not causal: a token
  sees all of its document.
- `image_tokens`: int64[rows, tokens], the number of each token's image, -1 for text, if the tokens
  of an image see each other.

Without `cu_seq_lens` every row is one document, padded on the right. Generation, which passes an
attention mask or a cache, runs transformers' SDPA.

Three kinds of layers look past a document's end in other ways than by attending.

`longrope` and `dynamic` RoPE choose their frequencies by the length of a text. transformers uses
the largest position of a batch for all rows, and its dynamic RoPE keeps the largest length that it
has seen. A document's loss would then depend on the documents beside it. Here every token gets the
frequencies for the length of its own document.

Llama 4's layers without RoPE scale their queries by the place in the row. Here they scale by the
position in the document.

Recurrent layers (linear attention, Mamba, RWKV, xLSTM, short convolutions) carry a state from token
to token, which must start again with each document. With the kernels' packages installed,
transformers' own modules take the boundaries of all documents. Without them, and in families whose
modules ignore boundaries, a module runs over one document after the other. config/families.py lists
these modules and their arguments.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.compatibility import FLASH_GPUS, FLASH_ON_INDEX, FLASH_PACKAGES
from finetune.config.facts import attends_by_mask
from finetune.config.families import Family, find_family
from finetune.constants import Names
from finetune.distributed.model_parts import (
    has_other_parts,
    language_model_of,
    other_parts,
    trunk_of,
)
from finetune.errors import UserError
from finetune.models.attention import (
    NAME,
    prepare_for_packed,
    register,
    scale_by_position,
    split_boundaries,
)
from finetune.models.attention_kernels import find_windows
from finetune.models.routing import find_routing

# by which transformers' flash attention gets the boundaries of documents
FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def install_attention(
    model: Any, implementation: str = "auto", sequence_group: ProcessGroup | None = None
) -> None:
    """Installs the attention that the recipe's `attn_implementation` names.

    `auto` is this project's attention. It runs torch's kernels, or those of an installed package
    that is faster on this GPU; `flash_attention_3` and `flash_attention_4` name such a package.
    Other names are transformers': sdpa, eager and flex_attention find the documents by the position
    ids, and flash_attention_2 gets their boundaries.

    Args:
        model: An `XForCausalLM`.
        implementation: As the recipe names it.
        sequence_group: The ranks that share a row's tokens; requires `auto`. None: each rank has
            whole rows.

    Raises:
        UserError: The implementation is not available.
    """
    trunk = trunk_of(model)
    family = find_family(trunk.config.model_type)
    implementation = _choose_implementation(implementation, trunk, family)
    if implementation == "auto":
        register()
    name = NAME if implementation == "auto" else implementation
    try:  # only for the language model: a vision tower keeps an attention of transformers
        language_model_of(model).set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"attn_implementation: {implementation} cannot be used with {type(model).__name__} "
            f"here ({str(error).splitlines()[0]}); leave the key out for packed attention that "
            "needs no extra package"
        ) from error
    # Without SDPA a tower would keep the scores of all pairs of an image's patches.
    for part in other_parts(model):
        if isinstance(part, PreTrainedModel) and part._supports_sdpa:
            part.set_attn_implementation("sdpa")
    install_document_rotary(model, sequence_group)
    install_query_scales(model)
    install_recurrence(model)
    # implementation -> what rewrites the arguments of the language model's forward for it
    rewriters: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "auto": partial(prepare_for_packed, find_windows(model), sequence_group),
        "flash_attention_2": _prepare_for_flash,
        "flash_attention_3": _prepare_for_flash,
    }
    if family.document_mask == "here":
        rewriters |= dict.fromkeys(("eager", "sdpa"), _mask_documents)
    prepare = rewriters.get(implementation, _drop_boundaries)
    trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, prepare(kwargs)), with_kwargs=True
    )
    if family.drops_arguments:
        _hand_down(trunk, "Attention", ("documents", *FLASH_ARGUMENTS))
    elif family.document_mask == "here":
        # BART's embedding of positions gets no position ids, and would count the tokens of the row.
        _hand_down(trunk, "PositionalEmbedding", ("position_ids",))


def _choose_implementation(implementation: str, trunk: Any, family: Family) -> str:
    """Resolves the recipe's name for attention.

    Returns `auto` for this project's attention, after activating a package's kernels if they are to
    be used; else transformers' name.
    """
    if implementation == "auto" and _attends_by_mask(trunk):
        has_sdpa = trunk._supports_sdpa and family.document_mask != "here"
        return "sdpa" if has_sdpa else "eager"
    if implementation == "auto":
        activate_fastest_kernels()
    # If the package is not installed, transformers may get its kernels from the hub.
    elif implementation in FLASH_PACKAGES and activate_flash_kernels(implementation):
        return "auto"
    return implementation


# Like `prepare_for_packed`, these functions turn the arguments of a training forward into those
# that an implementation reads.


def _prepare_for_flash(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Renames the boundaries to FLASH_ARGUMENTS, for transformers' flash attention."""
    kwargs, (boundaries, longest, *_) = split_boundaries(kwargs)
    if boundaries is None:
        return kwargs
    return kwargs | dict(
        zip(FLASH_ARGUMENTS, (boundaries, boundaries, longest, longest), strict=True)
    )


def _mask_documents(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Adds a causal mask inside documents, for attention that cannot take boundaries.

    The mask is fp32[1, 1, tokens, tokens], added to the scores.
    """
    kwargs, (boundaries, *_) = split_boundaries(kwargs)
    if boundaries is None:
        return kwargs
    position_ids = kwargs["position_ids"]  # they start again with each document
    tokens = torch.arange(position_ids.shape[1], device=position_ids.device)
    start = tokens - position_ids[0]  # where the document of each token begins in the row
    is_hidden = (tokens[:, None] < tokens) | (start[:, None] != start)
    mask = torch.zeros(is_hidden.shape, device=position_ids.device).masked_fill(
        is_hidden, torch.finfo(torch.float32).min
    )
    return kwargs | {"attention_mask": mask[None, None]}


def _drop_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drops BOUNDARIES, for attention that finds documents by their position ids."""
    remaining, _ = split_boundaries(kwargs)
    return remaining


def _hand_down(trunk: nn.Module, kind: str, names: Names) -> None:
    """Passes arguments of the trunk's forward to modules whose callers drop them.

    Args:
        trunk: The language model.
        kind: The end of the modules' class names.
        names: The arguments; `position_ids` only by itself.
    """
    received: dict[str, Any] = {}

    def receive(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        received.clear()
        received.update({name: kwargs[name] for name in names if kwargs.get(name) is not None})

    def hand(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if "position_ids" not in received:
            return args, kwargs | received
        position_ids = received["position_ids"]
        # BART's embedding takes one row, [tokens]: the packed one.
        if "position_ids" in kwargs and len(position_ids) == 1:
            return args, kwargs | {"position_ids": position_ids[0]}
        return args, kwargs

    trunk.register_forward_pre_hook(receive, with_kwargs=True)
    for module in trunk.modules():
        if type(module).__name__.endswith(kind):
            module.register_forward_pre_hook(hand, with_kwargs=True)


def can_continue(model: Any) -> bool:
    """Returns whether documents of a packed row may continue another one: completions a prompt.

    The prompt is then computed only once. Three things forbid it: a part besides this project's
    attention that reads a document's tokens or length (recurrent layers, chunks, long-context RoPE,
    images), attention that needs a mask of blocks, and an auxiliary loss of the routers, which
    counts each token.
    """
    trunk = trunk_of(model)
    routing = find_routing(model)
    layer_types = getattr(trunk.config, "layer_types", None) or ()
    obstacles = (
        trunk.config._attn_implementation != NAME,
        has_other_parts(model),
        bool(find_windows(model)),
        "chunked_attention" in layer_types,
        bool(recurrent_modules(model)),
        depends_on_length(trunk),
        routing is not None and bool(routing.coefficient),
    )
    return not any(obstacles)


def _attends_by_mask(trunk: Any) -> bool:
    """Returns whether the trunk is transformers' own class and its attention reads only a mask.

    Such attention cannot take the boundaries of documents.
    """
    config = trunk.config
    is_of_transformers = type(trunk).__module__.startswith("transformers.")
    layer_types = getattr(config, "layer_types", None) or ()
    return is_of_transformers and attends_by_mask(config.model_type, layer_types)


def activate_fastest_kernels() -> None:
    """Switches torch to FlashAttention 3 or 4 where it is installed and this GPU runs it.

    Otherwise, and for deterministic runs, torch keeps its own FlashAttention 2.
    """
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return
    major, _ = torch.cuda.get_device_capability()
    for name in FLASH_PACKAGES:
        with suppress(UserError):  # FlashAttention 4 is not installed
            if major in FLASH_GPUS[name] and activate_flash_kernels(name):
                return


def find_missing_flash_package() -> str | None:
    """Returns the package to install for a FlashAttention 4 that this GPU could run.

    None: it is installed, or the GPU or a deterministic run cannot use it.
    """
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return None
    major, _ = torch.cuda.get_device_capability()
    module, _ = FLASH_PACKAGES["flash_attention_4"]
    with suppress(ImportError):  # the package around the module may be missing
        if importlib.util.find_spec(module) is not None:
            return None
    if major in FLASH_GPUS["flash_attention_4"]:
        return FLASH_ON_INDEX
    return None


def activate_flash_kernels(implementation: str) -> bool:
    """Switches torch's attention to the FlashAttention 3 or 4 of an installed package.

    Returns:
        False if FlashAttention 3 is not installed; transformers can get its kernels from the hub.

    Raises:
        UserError: FlashAttention 4 is not installed.
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


LENGTH_DEPENDENT = ("longrope", "dynamic")  # RoPE types whose frequencies depend on a text's length
DEFAULT = None  # in place of a layer type, if all layers have the same RoPE


def depends_on_length(model: nn.Module) -> bool:
    """Returns whether the model's RoPE chooses its frequencies by the length of a text."""
    return any(
        _length_dependent_layers(getattr(module, "rope_type", None)) for module in model.modules()
    )


def install_document_rotary(model: Any, sequence_group: ProcessGroup | None = None) -> None:
    """Makes length-dependent RoPE choose frequencies by the length of each token's own document.

    In training the lengths come from `cu_seq_lens` or `document_lengths`. Elsewhere, as in
    generation, a row is one document that ends at its largest position. A model without such RoPE
    stays as it is.

    Args:
        model: A `...ForCausalLM`, before sharding and before its attention is installed.
        sequence_group: The ranks that share the tokens of a row; None: each rank has whole rows.

    Raises:
        UserError: The config has such a RoPE, but the model's own code does not compute it by a
            module of transformers.
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
        # transformers' decorator updates the frequencies; the forward that it wraps applies them.
        plain_forward = inspect.unwrap(type(module).forward)
        forward = partial(_embed_positions, plain_forward, current)
        module.forward = MethodType(forward, module)


@dataclass(slots=True)
class _Lengths:
    """The lengths of the documents of the running forward."""

    # int64[rows, tokens of this rank] or [rows, 1]: the length of each token's document; None: the
    # forward does not give it
    of_tokens: Tensor | None = None
    # the lengths of all documents; None: the host does not know them
    on_host: tuple[int, ...] | None = None


def _configured_types(config: Any) -> Any:
    """Returns the config's RoPE type, {layer type: RoPE type} if it has one for each, or None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = {
        key: value.get("rope_type") for key, value in parameters.items() if isinstance(value, dict)
    }
    return by_layer or parameters.get("rope_type")


def _length_dependent_layers(rope_type: Any) -> list[str | None]:
    """Lists the layer types whose RoPE depends on a text's length.

    rope_type: One RoPE type for all layers, for which the list is [DEFAULT] or empty; or {layer
        type: RoPE type}.
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
    """Sets `current` from a forward's arguments, before the forward runs.

    The lengths come from the packed row's boundaries or the padded rows' lengths. A forward without
    either leaves them None.
    """
    current.of_tokens = None
    current.on_host = None
    if (boundaries := kwargs.get("cu_seq_lens")) is not None:
        rank = 0 if sequence_group is None else sequence_group.rank()
        ranks = 1 if sequence_group is None else sequence_group.size()
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
    """Runs the forward of a rotary module with the frequencies of each token's document.

    It computes all tokens with each set of frequencies, and each token takes the result of the set
    of its document. There are few sets besides the usual one: under longrope one for all long
    documents, under dynamic RoPE one for each length of a long document.

    Args:
        apply: Computes the module's forward with the frequencies that the module has.
        current: The lengths of this forward's documents.
        module: The rotary module.
        x: As in the module's forward.
        position_ids: [rows, tokens].
        layer_type: As in the module's forward; None: all layers have the same RoPE.

    Returns:
        What the module's forward returns.
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
        layer_argument = {}
    else:
        kind = module.rope_type[layer_type]
        parameters = config.rope_parameters[layer_type]
        prefix = f"{layer_type}_"
        layer_argument = {"layer_type": layer_type}

    def embed(frequencies: Tensor) -> Any:
        setattr(module, f"{prefix}inv_freq", frequencies)
        return apply(*arguments)

    def find_frequencies(length: int | Tensor) -> Tensor:
        initialize = ROPE_INIT_FUNCTIONS[kind]
        frequencies: Tensor
        frequencies, _scale = initialize(config, x.device, seq_len=length, **layer_argument)
        return frequencies

    usual = getattr(module, f"{prefix}original_inv_freq").to(x.device)
    outputs = embed(usual)
    if kind == "longrope":
        limit = parameters["original_max_position_embeddings"]
        if current.on_host is None or max(current.on_host) > limit:
            # All lengths above the limit have the same frequencies.
            outputs = _select(lengths > limit, embed(find_frequencies(limit + 1)), outputs)
    else:
        limit = config.max_position_embeddings
        on_host = set(lengths.flatten().tolist() if current.on_host is None else current.on_host)
        for length in on_host:
            if length > limit:
                # A tensor, as in transformers: from a number, the base is rounded differently.
                frequencies = find_frequencies(torch.full((), length, device=x.device))
                outputs = _select(lengths == length, embed(frequencies), outputs)
    setattr(module, f"{prefix}inv_freq", usual)
    return outputs


def _select(is_chosen: Tensor, chosen: Any, others: Any) -> Any:
    """Takes the tokens that are chosen from `chosen`, the other tokens from `others`.

    Args:
        is_chosen: bool[rows, tokens] or [rows, 1].
        chosen: A rotary module's output: (cosines, sines), or one complex tensor.
        others: As `chosen`.
    """
    if isinstance(chosen, tuple):
        return tuple(_select(is_chosen, *pair) for pair in zip(chosen, others, strict=True))
    return torch.where(is_chosen[..., None], chosen, others)


def install_query_scales(model: Any) -> None:
    """Makes layers that scale their queries by place scale them by position in the document.

    A model without such layers stays as it is.

    model: A `...ForCausalLM`, before sharding and before its layers are compiled.
    """
    for layer in trunk_of(model).modules():
        attention: Any = getattr(layer, "self_attn", None)
        is_of_transformers = type(attention).__module__.startswith("transformers.")
        scales = is_of_transformers and getattr(attention, "attn_temperature_tuning", False)
        if scales and not attention.use_rope:
            scale_by_position(attention)
            layer.register_forward_pre_hook(_pass_positions, with_kwargs=True)


def _pass_positions(
    _layer: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Passes a layer's position ids on to its attention, which the layer itself does not do."""
    return args, kwargs | {"query_positions": kwargs["position_ids"]}


@dataclass(slots=True)
class _Documents:
    """The documents of the running forward, for recurrent modules.

    If both fields are None, each row is one document.
    """

    # tokens of each document of a packed row, whose documents are computed one after another
    lengths: list[int] | None = None
    # the arguments by which modules take the boundaries, if their kernels are installed
    boundaries: dict[str, Tensor] | None = None


def install_recurrence(model: Any) -> None:
    """Makes recurrent modules compute each document of a packed row by itself.

    Call it before sharding, and before a hook of the trunk is registered that drops the boundaries.
    It does nothing for a family without recurrent layers.

    model: A `...ForCausalLM`.
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
    """Returns the modules of a model that carry a state from token to token; maybe none."""
    trunk = trunk_of(model)
    recurrence = find_family(trunk.config.model_type).recurrence
    ends = () if recurrence is None else recurrence.modules
    return [module for module in trunk.modules() if type(module).__name__.endswith(ends)]


def _read_documents(
    current: _Documents, arguments: Names, _trunk: nn.Module, _args: Any, kwargs: dict[str, Any]
) -> None:
    """Sets `current` from the arguments of a forward, before the forward runs.

    arguments: The names by which modules take boundaries; empty: they take none.
    """
    current.lengths = None
    current.boundaries = None
    boundaries: Tensor | None = kwargs.get("cu_seq_lens")
    if boundaries is None or len(boundaries) == 2:  # each row is one document
        return
    if not arguments:
        current.lengths = list(kwargs.get("packed_lengths") or boundaries.diff().tolist())
        return
    tokens = kwargs["position_ids"].shape[-1]
    indexes = torch.arange(len(boundaries) - 1, dtype=torch.int32, device=boundaries.device)
    document_of_token = indexes.repeat_interleave(boundaries.diff(), output_size=tokens)
    values = {"cu_seq_lens_q": boundaries.long(), "seq_idx": document_of_token[None]}
    current.boundaries = {name: values[name] for name in arguments}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _run_each_document(
    forward: Callable[..., Any], current: _Documents, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Runs the forward of a recurrent module over the `current` documents.

    It runs once if the module takes boundaries or each row is one document, else once for each
    document.
    """
    mask = kwargs.get("attention_mask")
    # Mamba's trunk passes on the empty mask of the packed attention.
    if mask is not None and mask.numel() == 0:
        kwargs["attention_mask"] = None
    if current.boundaries is not None:
        return forward(module, *args, **kwargs | current.boundaries)
    lengths = current.lengths
    if lengths is None:
        return forward(module, *args, **kwargs)
    tokens = sum(lengths)

    def split_by_document(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[1] == tokens:
            # The backward of a split is one concatenation; the backward of each slice would fill a
            # row.
            return torch.split(argument, lengths, dim=1)
        return [argument] * len(lengths)

    leaves, structure = tree_flatten((args, kwargs))
    outputs = []
    for document_leaves in zip(*map(split_by_document, leaves), strict=True):
        document_args, document_kwargs = tree_unflatten(document_leaves, structure)
        outputs.append(forward(module, *document_args, **document_kwargs))
    return _join_outputs(outputs, lengths)


def _join_outputs(outputs: list[Any], lengths: list[int]) -> Any:
    """Joins the outputs of the documents to the output of the row.

    A part without tokens, such as a last state, is the last document's.
    """
    leaves_by_document = [tree_leaves(output) for output in outputs]
    _, structure = tree_flatten(outputs[-1])
    joined = []
    for parts in zip(*leaves_by_document, strict=True):
        has_tokens = all(
            isinstance(part, Tensor) and part.dim() > 1 and part.shape[1] == length
            for part, length in zip(parts, lengths, strict=True)
        )
        if has_tokens:
            joined.append(torch.cat(parts, dim=1))
        else:
            joined.append(parts[-1])
    return tree_unflatten(joined, structure)
