"""The training forward of a vision-language model over documents with images, in packed or padded
rows.

The tower and the projector run over all images of the micro-batch at once, before the embedding, on
every rank. The rest is the model's own forward, to which each document's positions are given, and
in which the boundaries of documents reach attention past the parts that would not pass them on.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from finetune.config.families import find_family
from finetune.distributed.model_parts import base_of, other_parts, trunk_of
from finetune.errors import UserError
from finetune.models.attention import BOUNDARIES, NAME, NO_MASK


def forward_images(
    model: Any, images: Mapping[str, Tensor], counts: Sequence[int], **kwargs: Any
) -> Tensor:
    """Returns the inputs of the output head: [rows, tokens, hidden].

    Args:
        model: An `...ForConditionalGeneration`.
        images: Its processor's arguments for all images, in the order of the documents; where there
            is none, those of a blank one, which adds nothing.
        counts: Images of each document.
        kwargs: Arguments of the trunk.
    """
    base = base_of(model)
    trunk = trunk_of(model)
    if reads_across(model):
        return _read_across(model, images, counts, **kwargs)
    if "mm_encoder_outputs" not in inspect.signature(base.forward).parameters:
        raise UserError("images need transformers 5.20 or later; upgrade it")
    with _gradients_of_tower(model):
        features = base.get_image_features(**images, return_dict=True)
    kwargs["use_cache"] = False
    if not any(counts):
        # what is sharded is gathered by all ranks, in the same order
        entry = base if find_family(base.config.model_type).embedders_read_all_tokens else trunk
        hidden: Tensor = entry(**kwargs).last_hidden_state
        tensors = [
            leaf
            for leaf in tree_leaves(features)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        return hidden + 0.0 * torch.stack([tensor.float().sum() for tensor in tensors]).sum().to(
            hidden
        )
    ids = kwargs["input_ids"]
    is_image = ids == base.config.image_token_id
    held = {name: kwargs.pop(name) for name in BOUNDARIES if name in kwargs}
    if hasattr(base, "get_rope_index"):
        lengths = held.get("packed_lengths") or (ids.shape[1],) * ids.shape[0]
        kwargs["position_ids"] = _find_positions(
            base, ids, is_image, kwargs["position_ids"], lengths, counts, images
        )
    is_ours = trunk.config._attn_implementation == NAME
    if find_family(base.config.model_type).images_see_themselves:
        starts = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
        numbers = torch.where(is_image, starts.cumsum(1), -1)
        held |= {"image_tokens": numbers} if is_ours else {}
        kwargs |= {} if is_ours else {"token_type_ids": is_image.long()}
    if is_ours:
        kwargs["attention_mask"] = NO_MASK
    with _arguments_of(trunk, held):
        if base is model:  # Llama 4's forward ends with the head
            embedded = _embed_images(base, ids, is_image, features)
            outputs = trunk(**kwargs | {"input_ids": None}, inputs_embeds=embedded)
        else:
            outputs = base(**kwargs, mm_encoder_outputs={"image": features})
    states: Tensor = outputs.last_hidden_state
    return states


def _embed_images(base: Any, ids: Tensor, is_image: Tensor, features: Any) -> Tensor:
    """The embeddings [rows, tokens, hidden], with the projected features in the images' places."""
    embedded: Tensor = base.get_input_embeddings()(ids)
    flat = features.last_hidden_state.flatten(0, -2)
    projected = base.multi_modal_projector(flat).to(embedded)
    return embedded.masked_scatter(is_image.unsqueeze(-1), projected)


def _gradients_of_tower(model: Any) -> Any:
    """In this block gradients are kept where anything beside the language model is trained: else
    checkpointing would keep its layers' inputs.
    """
    is_trained = any(
        parameter.requires_grad for part in other_parts(model) for parameter in part.parameters()
    )
    return torch.set_grad_enabled(is_trained and torch.is_grad_enabled())


def _read_across(
    model: Any, images: Mapping[str, Tensor], counts: Sequence[int], **kwargs: Any
) -> Tensor:
    """Returns the head's inputs of a model whose cross attention reads the images of a token's own
    document (Llama 3.2 Vision).

    A token before its document's first image reads all tiles of its images alike, as transformers
    has it. A document without images reads a vector of zeros, of which keys, values and output
    are zeros: it passes the layers unchanged, as transformers has it where no row has an image.
    """
    base = base_of(model)
    trunk = trunk_of(model)
    with _gradients_of_tower(model):
        seen = base.vision_model(**images).last_hidden_state
        states = base.multi_modal_projector(seen)
    *_, patches, hidden = states.shape
    ids = kwargs["input_ids"]
    rows, tokens = ids.shape
    lengths = kwargs.get("packed_lengths") or (tokens,) * rows
    attended, is_owned = _find_attended(
        ids.flatten(), lengths, counts, images, base.config.image_token_id
    )
    reads = attended.any(-1).any(-1)
    allowed = torch.where(reads[:, None, None], attended, is_owned[:, :, None])
    reads_zeros = ~is_owned.any(1, keepdim=True)
    is_read = torch.cat([allowed.repeat_interleave(patches, 2).flatten(1), reads_zeros], 1)
    hidden_from = torch.finfo(states.dtype).min
    mask = torch.zeros_like(is_read, dtype=states.dtype).masked_fill(~is_read, hidden_from)
    read = torch.cat([states.view(1, -1, hidden), states.new_zeros(1, 1, hidden)], 1)
    outputs = trunk(
        **kwargs | {"use_cache": False},
        cross_attention_states=read.expand(rows, -1, -1),
        cross_attention_mask=mask.view(rows, 1, tokens, -1),
        full_text_row_masked_out_mask=reads.view(rows, 1, tokens, 1).to(states.dtype),
    )
    result: Tensor = outputs.last_hidden_state
    return result


def _find_attended(
    ids: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    images: Mapping[str, Tensor],
    image_id: int,
) -> tuple[Tensor, Tensor]:
    """Returns (bool[tokens, images, tiles]: the tiles that each token reads, by transformers' own
    functions; bool[tokens, images]: the images of its document).
    """
    tiles = images["aspect_ratio_mask"][0].cpu()
    attended = torch.zeros(len(ids), *tiles.shape, dtype=torch.bool)
    is_owned = torch.zeros(len(ids), len(tiles), dtype=torch.bool)
    on_host = ids.cpu()
    first = 0
    start = 0
    for length, count in zip(lengths, counts, strict=False):  # the last document may be padding
        own = slice(start, start + length), slice(first, first + count)
        if count:
            attended[own] = _find_read_tiles(on_host[own[0]], tiles[own[1]], image_id)
        is_owned[own] = True
        start += length
        first += count
    return attended.to(ids.device), is_owned.to(ids.device)


def _find_read_tiles(ids: Tensor, tiles: Tensor, image_id: int) -> Tensor:
    """bool[tokens, images, tiles]: what each token of a document reads, whose images have `tiles`
    (int[images, tiles]).
    """
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    spans = get_cross_attention_token_mask(ids.tolist(), image_id)
    shape = tiles.shape[-1], len(ids)
    dense = convert_sparse_cross_attention_mask_to_dense([spans], [tiles.sum(-1).tolist()], *shape)
    return torch.from_numpy(dense[0] > 0)


def reads_across(model: Any) -> bool:
    """Whether layers of cross attention read the images. Their prompts are answered one by one."""
    return find_family(base_of(model).config.model_type).images_are_read_across


def with_read_tiles(model: Any, ids: Tensor, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments `inputs` of `generate` for the images of one prompt `ids` (int64[1, tokens]),
    with the tiles that its tokens read, where `model` asks for them.
    """
    if not reads_across(model):
        return inputs
    tiles = inputs["aspect_ratio_mask"][0].cpu()
    read = _find_read_tiles(ids[0].cpu(), tiles, base_of(model).config.image_token_id)
    return {**inputs, "cross_attention_mask": read[None].long().to(model.device)}


def record_outputs(model: nn.Module) -> None:
    """Lets transformers record the outputs of a sharded tower's layers, which LLaVA's projector
    reads.

    It looks up what to record by the name of the tower's class, which FSDP2 has changed.
    """
    registry: dict[str, Any] = getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            dict.__setitem__(registry, str(type(module)), module._can_record_outputs)
    # FSDP2 warns of in-place changes to what a projector returns; transformers scatters it into a
    # new tensor.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@contextmanager
def _arguments_of(trunk: nn.Module, held: Mapping[str, Any]) -> Iterator[None]:
    """In this block `trunk` is called with the arguments `held` too."""
    hook = trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, **held}), with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        hook.remove()


def find_prompt_positions(
    model: Any, ids: Tensor, mask: Tensor, inputs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns (the positions of prompts as the model's forward reads them; int64[rows, 1], that of
    the token after each prompt).

    Args:
        model: An `...ForConditionalGeneration`.
        ids: int64[rows, tokens], padded on the left.
        mask: int64[rows, tokens], 0 where padding.
        inputs: The arguments of its forward for their images, of all rows.
    """
    base = base_of(model)
    text = (mask.cumsum(1) - 1).clamp(min=0)
    if not hasattr(base, "get_rope_index"):
        return text, mask.sum(1, keepdim=True)
    keys = {name: inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    placed = base.get_rope_index(ids, attention_mask=mask, **keys)[0]
    return torch.cat([text[None], placed]), placed.amax((0, 2))[:, None] + 1


def _find_positions(
    base: Any,
    ids: Tensor,
    is_image: Tensor,
    text: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    images: Mapping[str, Tensor],
) -> Tensor:
    """int64[4, rows, tokens]: the place of each token in its document, then its time, height and
    width as the model counts them for this document alone.
    """
    grids = images["image_grid_thw"]
    used = 0
    positions = []
    documents = zip(
        torch.split(ids.flatten(), list(lengths)),
        torch.split(is_image.flatten(), list(lengths)),
        strict=True,
    )
    for index, (tokens, of_image) in enumerate(documents):
        count = counts[index] if index < len(counts) else 0  # the last document may be padding
        if count:
            keys = {
                "mm_token_type_ids": of_image[None].int(),
                "image_grid_thw": grids[used : used + count],
            }
            positions.append(base.get_rope_index(tokens[None], **keys)[0][:, 0])
        else:
            positions.append(torch.arange(len(tokens), device=ids.device).expand(3, -1))
        used += count
    return torch.cat([text[None], torch.cat(positions, 1).view(3, *ids.shape)])
