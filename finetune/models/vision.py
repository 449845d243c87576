"""The training forward of a vision-language model over documents with images, in packed or padded
rows.

Tower and projector run first, over all images of the micro-batch at once, on every rank. Then the
model's own forward runs with each document's positions. Hooks pass the boundaries of documents to
the language model, because the forwards around it would drop them.
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
from finetune.constants import Fields, Record
from finetune.distributed.model_parts import base_of, other_parts, trunk_of
from finetune.errors import UserError
from finetune.models.attention import BOUNDARIES, NAME, NO_MASK, shows_images_in_windows


def forward_images(
    model: Any, images: Mapping[str, Tensor], counts: Sequence[int], **kwargs: Any
) -> Tensor:
    """Runs the model up to the output head.

    Args:
        model: An `...ForConditionalGeneration`.
        images: The processor's arguments for all images, in the order of the documents; without an
            image those of a blank one, which adds nothing.
        counts: The images of each document.
        kwargs: Arguments of the language model.

    Returns:
        The inputs of the output head: [rows, tokens, hidden].
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
        reads_all = find_family(base.config.model_type).embedders_read_all_tokens
        hidden: Tensor = (base if reads_all else trunk)(**kwargs).last_hidden_state
        return hidden + _zero_from(features).to(hidden)
    ids = kwargs["input_ids"]
    is_image = ids == base.config.image_token_id
    held = {name: kwargs.pop(name) for name in BOUNDARIES if name in kwargs}
    if hasattr(base, "get_rope_index"):
        lengths = held.get("packed_lengths") or (ids.shape[1],) * ids.shape[0]
        kwargs["position_ids"] = _find_positions(
            base, ids, is_image, kwargs["position_ids"], lengths, counts, images
        )
    is_ours = trunk.config._attn_implementation == NAME
    in_windows = shows_images_in_windows(trunk.config)
    if in_windows or find_family(base.config.model_type).images_see_themselves:
        starts = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
        numbers = torch.where(is_image, starts.cumsum(1), -1)
        types = "mm_token_type_ids" if in_windows else "token_type_ids"
        held |= {"image_tokens": numbers} if is_ours else {}
        kwargs |= {} if is_ours else {types: is_image.long()}
    if is_ours:
        kwargs["attention_mask"] = NO_MASK
    with _added_arguments(trunk, held):
        if base is model:  # Llama 4's own forward would run the head, too
            embedded = _embed_images(base, ids, is_image, features)
            outputs = trunk(**kwargs | {"input_ids": None}, inputs_embeds=embedded)
        else:
            outputs = base(**kwargs, mm_encoder_outputs={"image": features})
    states: Tensor = outputs.last_hidden_state
    return states


def _zero_from(features: Any) -> Tensor:
    """A zero that depends on the tower's outputs.

    Added to a loss, it lets this rank take part in the tower's collectives of the backward.
    """
    tensors = [leaf for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
    sums = [tensor.float().sum() for tensor in tensors if tensor.is_floating_point()]
    return 0.0 * torch.stack(sums).sum()


def _embed_images(base: Any, ids: Tensor, is_image: Tensor, features: Any) -> Tensor:
    """The embeddings [rows, tokens, hidden], with projected features at the images' tokens."""
    embedded: Tensor = base.get_input_embeddings()(ids)
    flat = features.last_hidden_state.flatten(0, -2)
    projected = base.multi_modal_projector(flat).to(embedded)
    return embedded.masked_scatter(is_image.unsqueeze(-1), projected)


def _gradients_of_tower(model: Any) -> Any:
    """Switches gradients off in this block, unless a part beside the language model is trained.

    With gradients, checkpointing would keep the inputs of the tower's layers for nothing.
    """
    is_trained = any(
        parameter.requires_grad for part in other_parts(model) for parameter in part.parameters()
    )
    return torch.set_grad_enabled(is_trained and torch.is_grad_enabled())


def _read_across(
    model: Any, images: Mapping[str, Tensor], counts: Sequence[int], **kwargs: Any
) -> Tensor:
    """Runs a model whose cross attention reads the images of a token's own document (Llama 3.2
    Vision), up to the output head.

    A token before its document's first image attends to all tiles of the document equally, as in
    transformers. A document without images attends to a vector of zeros. Its keys, values and
    output are zeros, so the layers do not change it, as in transformers.

    Takes and returns what `forward_images` does.
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
    """Finds for each token the tiles that it attends to, and the images of its document.

    Args:
        ids: int64[tokens], of all documents.
        lengths: The tokens of each document.
        counts: The images of each document.
        images: The processor's arguments.
        image_id: The token that stands for an image.

    Returns:
        (bool[tokens, images, tiles], bool[tokens, images]).
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
    """Finds the tiles that each token of one document attends to, by transformers' own functions.

    Args:
        ids: int64[tokens].
        tiles: int[images, tiles], 1 where an image has the tile.
        image_id: The token that stands for an image.

    Returns:
        bool[tokens, images, tiles].
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
    """Whether layers of cross attention read the images; such models answer prompts one by one."""
    return find_family(base_of(model).config.model_type).images_are_read_across


def with_read_tiles(model: Any, ids: Tensor, inputs: Fields) -> Fields:
    """Adds to the arguments of `generate` the tiles that tokens read, for models that need them.

    Args:
        model: Any model.
        ids: int64[1, tokens], one prompt.
        inputs: The arguments for the prompt's images.
    """
    if not reads_across(model):
        return inputs
    tiles = inputs["aspect_ratio_mask"][0].cpu()
    read = _find_read_tiles(ids[0].cpu(), tiles, base_of(model).config.image_token_id)
    return {**inputs, "cross_attention_mask": read[None].long().to(model.device)}


def record_outputs(model: nn.Module) -> None:
    """Lets transformers record the outputs of a sharded tower's layers for LLaVA's projector.

    transformers looks up what to record by the name of the tower's class, which FSDP2 has changed.
    """
    registry: Record = getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            dict.__setitem__(registry, str(type(module)), module._can_record_outputs)
    # FSDP2 warns of in-place changes to a projector's output; transformers does not change it.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@contextmanager
def _added_arguments(trunk: nn.Module, held: Fields) -> Iterator[None]:
    """Adds the arguments `held` to every call of `trunk` in this block."""
    hook = trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, **held}), with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        hook.remove()


def find_prompt_positions(
    model: Any, ids: Tensor, mask: Tensor, inputs: Fields
) -> tuple[Tensor, Tensor]:
    """Finds the positions of prompts with images.

    Args:
        model: An `...ForConditionalGeneration`.
        ids: int64[rows, tokens], padded on the left.
        mask: int64[rows, tokens], 0 at padding.
        inputs: The arguments of its forward for the images of all rows.

    Returns:
        (the positions as the model's forward takes them, the position of the token after each
        prompt, int64[rows, 1]).
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
    """Finds the positions of tokens in documents with images.

    Returns:
        int64[4, rows, tokens]: the place in the document, then time, height and width, as the model
        counts them for the document alone.
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
