"""The training forward of a vision-language model over documents with images, in packed or padded
rows.

Vision tower and projector run first, on every rank, over all images of the micro-batch at once.
Then the model's own forward runs with the positions of each document. A hook passes the boundaries
of documents to the language model, because the forwards around it would drop them.
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
from finetune.distributed.model_parts import base_of, trains_tower, trunk_of
from finetune.errors import UserError
from finetune.models.attention import BOUNDARIES, NAME, NO_MASK, shows_images_in_windows


def forward_with_images(
    model: Any, images: Mapping[str, Tensor], counts: Sequence[int], **kwargs: Any
) -> Tensor:
    """Runs a vision-language model up to the output head.

    The tower also runs if no document has an image, because its collectives need every rank.

    Args:
        model: An `...ForConditionalGeneration`.
        images: The arguments that the processor makes of all images, in the order of the documents.
            If no document has an image, those of a blank one, which changes no output.
        counts: The number of images of each document.
        kwargs: The arguments of the language model.

    Returns:
        The inputs of the output head, [rows, tokens, hidden].
    """
    base = base_of(model)
    trunk = trunk_of(model)
    if reads_across(model):
        return _forward_with_cross_attention(model, images, counts, **kwargs)
    if "mm_encoder_outputs" not in inspect.signature(base.forward).parameters:
        raise UserError("images need transformers 5.20 or later; upgrade it")
    with _gradients_of_tower(model):
        features = base.get_image_features(**images, return_dict=True)
    kwargs["use_cache"] = False
    family = find_family(base.config.model_type)
    if not any(counts):
        # The embedders of images are in the base. In some families they read every token.
        run = base if family.embedders_read_all_tokens else trunk
        hidden: Tensor = run(**kwargs).last_hidden_state
        return hidden + _make_zero(features).to(hidden)
    ids = kwargs["input_ids"]
    is_image = ids == base.config.image_token_id
    trunk_arguments = {name: kwargs.pop(name) for name in BOUNDARIES if name in kwargs}
    if hasattr(base, "get_rope_index"):
        lengths = trunk_arguments.get("packed_lengths") or (ids.shape[1],) * ids.shape[0]
        kwargs["position_ids"] = _find_positions(
            base, ids, is_image, kwargs["position_ids"], lengths, counts, images
        )
    uses_packed_attention = trunk.config._attn_implementation == NAME
    sees_images_in_windows = shows_images_in_windows(trunk.config)
    if sees_images_in_windows or family.images_see_themselves:
        # the tokens of an image attend to each other in both directions
        if uses_packed_attention:
            trunk_arguments["image_tokens"] = _number_images(is_image)
        elif sees_images_in_windows:
            kwargs["mm_token_type_ids"] = is_image.long()
        else:
            kwargs["token_type_ids"] = is_image.long()
    if uses_packed_attention:
        kwargs["attention_mask"] = NO_MASK
    with _added_arguments(trunk, trunk_arguments):
        if base is model:  # Llama 4, whose own forward would run the head, too
            embedded = _embed_images(base, ids, is_image, features)
            outputs = trunk(**kwargs | {"input_ids": None}, inputs_embeds=embedded)
        else:
            outputs = base(**kwargs, mm_encoder_outputs={"image": features})
    states: Tensor = outputs.last_hidden_state
    return states


def _number_images(is_image: Tensor) -> Tensor:
    """Numbers the runs of image tokens in each row from 1; other tokens get -1.

    is_image: bool[rows, tokens]. The result is int64[rows, tokens].
    """
    follows_image_token = F.pad(is_image, (1, 0))[:, :-1]  # moved by a token to the right
    starts = is_image & ~follows_image_token
    return torch.where(is_image, starts.cumsum(1), -1)


def _make_zero(features: Any) -> Tensor:
    """Returns a zero, 0-dim fp32, that depends on the tower's outputs.

    Added to the hidden states, it makes this rank take part in the tower's collectives of the
    backward.
    """
    tensors = [leaf for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
    sums = [tensor.float().sum() for tensor in tensors if tensor.is_floating_point()]
    return 0.0 * torch.stack(sums).sum()


def _embed_images(base: Any, ids: Tensor, is_image: Tensor, features: Any) -> Tensor:
    """Embeds tokens, [rows, tokens, hidden], with the projected features at the image tokens.

    Args:
        base: The model without its output head.
        ids: int64[rows, tokens].
        is_image: bool[rows, tokens].
        features: The outputs of the tower.
    """
    embedded: Tensor = base.get_input_embeddings()(ids)
    flat = features.last_hidden_state.flatten(0, -2)
    projected = base.multi_modal_projector(flat).to(embedded)
    return embedded.masked_scatter(is_image.unsqueeze(-1), projected)


def _gradients_of_tower(model: Any) -> Any:
    """Switches gradients off in this block, unless a part beside the language model is trained.

    If the tower is frozen, checkpointing would keep the inputs of its layers for nothing.
    """
    return torch.set_grad_enabled(trains_tower(model) and torch.is_grad_enabled())


def _forward_with_cross_attention(
    model: Any, images: Mapping[str, Tensor], counts: Sequence[int], **kwargs: Any
) -> Tensor:
    """Runs a model with layers of cross attention to images (Llama 3.2 Vision) up to the output
    head.

    A token attends to images of its own document. A token before the document's first image
    attends to all tiles of the document, as in transformers. The tokens of a document without
    images attend to a vector of zeros: keys, values and output are zeros, so the layers leave the
    document as it is, as in transformers.

    Takes and returns what `forward_with_images` does.
    """
    base = base_of(model)
    trunk = trunk_of(model)
    with _gradients_of_tower(model):
        tower_states = base.vision_model(**images).last_hidden_state
        states = base.multi_modal_projector(tower_states)
    *_, patches, hidden = states.shape  # [1, images, tiles, patches, hidden]
    ids = kwargs["input_ids"]
    rows, tokens = ids.shape
    lengths = kwargs.get("packed_lengths") or (tokens,) * rows
    attended, is_owned = _find_attended(
        ids.flatten(), lengths, counts, images, base.config.image_token_id
    )
    # bool[tokens]: whether an image of the token's document is before it
    is_after_image = attended.any(-1).any(-1)
    attends_to_tile = torch.where(is_after_image[:, None, None], attended, is_owned[:, :, None])
    # The keys are the patches of all tiles, then the zeros.
    attends_to_zeros = ~is_owned.any(1, keepdim=True)
    # bool[tokens, keys]
    attends = torch.cat(
        [attends_to_tile.repeat_interleave(patches, 2).flatten(1), attends_to_zeros], 1
    )
    masked_out = torch.finfo(states.dtype).min
    mask = torch.zeros_like(attends, dtype=states.dtype).masked_fill(~attends, masked_out)
    del attends  # the trunk needs the memory
    keys = torch.cat([states.view(1, -1, hidden), states.new_zeros(1, 1, hidden)], 1)
    outputs = trunk(
        **kwargs | {"use_cache": False},
        cross_attention_states=keys.expand(rows, -1, -1),
        cross_attention_mask=mask.view(rows, 1, tokens, -1),
        full_text_row_masked_out_mask=is_after_image.view(rows, 1, tokens, 1).to(states.dtype),
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
        lengths: The number of tokens of each document.
        counts: The number of images of each document.
        images: The processor's arguments for all images.
        image_id: The id of the token that stands for an image.

    Returns:
        (whether a token attends to a tile bool[tokens, images, tiles], whether an image is of the
        token's document bool[tokens, images]).
    """
    tiles = images["aspect_ratio_mask"][0].cpu()
    attended = torch.zeros(len(ids), *tiles.shape, dtype=torch.bool)
    is_owned = torch.zeros(len(ids), len(tiles), dtype=torch.bool)
    ids_on_cpu = ids.cpu()
    first_image = 0
    first_token = 0
    # not strict: padding at the end is a document without a count
    for length, count in zip(lengths, counts, strict=False):
        own_tokens = slice(first_token, first_token + length)
        own_images = slice(first_image, first_image + count)
        if count:
            attended[own_tokens, own_images] = _find_attended_tiles(
                ids_on_cpu[own_tokens], tiles[own_images], image_id
            )
        is_owned[own_tokens, own_images] = True
        first_token += length
        first_image += count
    return attended.to(ids.device), is_owned.to(ids.device)


def _find_attended_tiles(ids: Tensor, tiles: Tensor, image_id: int) -> Tensor:
    """Finds the tiles that each token of one document attends to, by transformers' own functions.

    Args:
        ids: int64[tokens], on the CPU.
        tiles: int[images, tiles], 1 where an image has the tile; on the CPU.
        image_id: The id of the token that stands for an image.

    Returns:
        bool[tokens, images, tiles].
    """
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    # Both functions work on a batch; here it has one document.
    spans = get_cross_attention_token_mask(ids.tolist(), image_id)
    tile_counts = tiles.sum(-1).tolist()
    (mask,) = convert_sparse_cross_attention_mask_to_dense(
        [spans], [tile_counts], max_num_tiles=tiles.shape[-1], length=len(ids)
    )
    return torch.from_numpy(mask > 0)


def reads_across(model: Any) -> bool:
    """Whether layers of cross attention read the images, as in Llama 3.2 Vision.

    Such models answer prompts one by one.
    """
    return find_family(base_of(model).config.model_type).images_are_read_across


def with_read_tiles(model: Any, ids: Tensor, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the tiles that each token attends to, for models that read images by cross attention.

    Args:
        model: Any model with images.
        ids: int64[1, tokens], one prompt.
        inputs: The arguments of `generate` for the prompt's images.

    Returns:
        `inputs` with `cross_attention_mask`; unchanged for other models.
    """
    if not reads_across(model):
        return inputs
    tiles = inputs["aspect_ratio_mask"][0].cpu()
    attended = _find_attended_tiles(ids[0].cpu(), tiles, base_of(model).config.image_token_id)
    return {**inputs, "cross_attention_mask": attended[None].long().to(model.device)}


def record_outputs(model: nn.Module) -> None:
    """Lets transformers record the outputs of a sharded tower's layers, which LLaVA's projector
    reads.

    transformers looks up what to record by the tower's class, which FSDP2 has replaced.
    """
    registry: dict[str, Any] = getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            dict.__setitem__(registry, str(type(module)), module._can_record_outputs)
    # FSDP2 warns that a projector's output must not be changed in place; transformers does not.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@contextmanager
def _added_arguments(trunk: nn.Module, added: Mapping[str, Any]) -> Iterator[None]:
    """Adds the keyword arguments `added` to every call of `trunk` in this block."""
    hook = trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, **added}), with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        hook.remove()


def find_prompt_positions(
    model: Any, ids: Tensor, mask: Tensor, inputs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Finds the positions of prompts with images.

    Args:
        model: An `...ForConditionalGeneration`.
        ids: int64[rows, tokens], padded on the left.
        mask: int64[rows, tokens], 0 at padding.
        inputs: The arguments of the model's forward for the images of all rows.

    Returns:
        (the positions as the model's forward takes them, the position of the token after each
        prompt int64[rows, 1]). The positions are int64[rows, tokens]; int64[4, rows, tokens] of
        models that count them in time, height and width, as in `_find_positions`.
    """
    base = base_of(model)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    if not hasattr(base, "get_rope_index"):
        return places, mask.sum(1, keepdim=True)
    keys = {name: inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    rope_positions, _ = base.get_rope_index(ids, attention_mask=mask, **keys)
    next_positions = rope_positions.amax((0, 2))[:, None] + 1
    return torch.cat([places[None], rope_positions]), next_positions


def _find_positions(
    base: Any,
    ids: Tensor,
    is_image: Tensor,
    places: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    images: Mapping[str, Tensor],
) -> Tensor:
    """Finds the positions of tokens in documents with images.

    Args:
        base: The model without its output head.
        ids: int64[rows, tokens].
        is_image: bool[rows, tokens].
        places: int64[rows, tokens], the place of each token in its document.
        lengths: The number of tokens of each document.
        counts: The number of images of each document.
        images: The processor's arguments for all images.

    Returns:
        int64[4, rows, tokens]: the place in the document, then the positions in time, height and
        width, which the model counts for each document alone.
    """
    grids = images["image_grid_thw"]
    first_image = 0
    rope_positions = []  # of each document, [3, its tokens]
    documents = zip(
        torch.split(ids.flatten(), list(lengths)),
        torch.split(is_image.flatten(), list(lengths)),
        strict=True,
    )
    for index, (document_ids, is_image_token) in enumerate(documents):
        # padding at the end is a document without a count
        count = counts[index] if index < len(counts) else 0
        if count:
            positions, _ = base.get_rope_index(
                document_ids[None],
                mm_token_type_ids=is_image_token[None].int(),
                image_grid_thw=grids[first_image : first_image + count],
            )
            rope_positions.append(positions[:, 0])  # of the only row
        else:
            places_in_text = torch.arange(len(document_ids), device=ids.device)
            rope_positions.append(places_in_text.expand(3, -1))
        first_image += count
    return torch.cat([places[None], torch.cat(rope_positions, 1).view(3, *ids.shape)])
