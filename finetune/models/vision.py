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
    """What enters the output head: [rows, tokens, hidden].

    Args:
        model: An `...ForConditionalGeneration`.
        images: Its processor's arguments for all images, in the order of the documents; where there
            is none, those of a blank one, which adds nothing.
        counts: Images of each document.
        kwargs: Arguments of the trunk.
    """
    base = base_of(model)
    trunk = trunk_of(model)
    if "mm_encoder_outputs" not in inspect.signature(base.forward).parameters:
        raise UserError("images need transformers 5.20 or later; upgrade it")
    is_trained = any(
        parameter.requires_grad for part in other_parts(model) for parameter in part.parameters()
    )
    # Else checkpointing would keep its layers' inputs.
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        features = base.get_image_features(**images, return_dict=True)
    kwargs["use_cache"] = False
    if not any(counts):
        hidden: Tensor = trunk(**kwargs).last_hidden_state
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
        outputs = base(**kwargs, mm_encoder_outputs={"image": features})
    states: Tensor = outputs.last_hidden_state
    return states


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
    """Within it, `trunk` is called with the arguments `held` too."""
    hook = trunk.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, **held}), with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        hook.remove()


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
