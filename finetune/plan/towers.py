"""What a vision-language model has beside its language model: the tensors of its vision tower and projector, by its
config.json.

Source: the model classes of transformers 5; tests/plan builds each on the meta device and compares names and shapes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finetune.config.facts import names_vision_language
from finetune.errors import UserError

Tensor = tuple[str, tuple[int, ...]]  # its name and shape
WHOLE = "vision_language_config"  # the key under which `split_config` keeps all of a config.json


def split_config(config: Mapping[str, Any], drop_vision: bool = False) -> dict[str, Any]:
    """The part of a config.json that the language model has, with all of it under WHOLE where it is a vision-language
    model's: None there where `drop_vision` leaves the rest out.

    >>> config = {"model_type": "qwen2_5_vl", "architectures": ["VForConditionalGeneration"], "vision_config": {}}
    >>> split_config(config)["model_type"]
    'qwen2_5_vl_text'
    """
    text = config.get("text_config")
    own = {**text} if isinstance(text, dict) else {**config}
    if not names_vision_language(config):
        return own
    if not isinstance(text, dict) or "model_type" not in text:  # Qwen2.5-VL is published without a text_config
        own["model_type"] = f"{config.get('model_type')}_text"
    family = _FAMILIES.get(str(config.get("model_type")))
    tied = config.get("tie_word_embeddings", own.get("tie_word_embeddings", family[1] if family else False))
    return own | {WHOLE: None if drop_vision else config, "tie_word_embeddings": tied}


def list_parts(whole: Mapping[str, Any], hidden: int, where: str) -> tuple[tuple[Tensor, ...], ...]:
    """The tensors of each part beside the language model, whose hidden size is `hidden`.

    Raises `UserError` for a family that is not in the table.
    """
    kind = str(whole.get("model_type"))
    if kind not in _FAMILIES:
        raise UserError(f"{where}: the vision tower of {kind!r} cannot be planned; supported: {', '.join(_FAMILIES)}")
    vision = whole.get("vision_config")
    return tuple(tuple(part) for part in _FAMILIES[kind][0](whole, vision or {}, hidden))


def _layer(name: str, *shape: int, bias: bool = True) -> Iterator[Tensor]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _norm(name: str, width: int, bias: bool = True) -> Iterator[Tensor]:
    return _layer(name, width, bias=bias)


def _gemma3(_whole: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> Iterator[Iterator[Tensor]]:
    width = vision.get("hidden_size", 768)
    yield _siglip(vision, width)
    projector = "model.multi_modal_projector"
    shapes = {"mm_input_projection_weight": (width, hidden), "mm_soft_emb_norm.weight": (width,)}
    yield ((f"{projector}.{name}", shape) for name, shape in shapes.items())


def _siglip(vision: Mapping[str, Any], width: int) -> Iterator[Tensor]:
    inner, patch = vision.get("intermediate_size", 3072), vision.get("patch_size", 16)
    tower, patches = "model.vision_tower", vision.get("image_size", 224) // patch
    yield from _layer(f"{tower}.embeddings.patch_embedding", width, vision.get("num_channels", 3), patch, patch)
    yield f"{tower}.embeddings.position_embedding.weight", (patches * patches, width)
    for index in range(vision.get("num_hidden_layers", 12)):
        layer = f"{tower}.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _layer(f"{layer}.self_attn.{name}", width, width)
        yield from _siglip_mlp(layer, ("layer_norm1", "layer_norm2"), width, inner)
    yield from _norm(f"{tower}.post_layernorm", width)
    if vision.get("vision_use_head", True):
        head = f"{tower}.head"
        yield f"{head}.probe", (1, 1, width)
        yield f"{head}.attention.in_proj_weight", (3 * width, width)
        yield f"{head}.attention.in_proj_bias", (3 * width,)
        yield from _layer(f"{head}.attention.out_proj", width, width)
        yield from _siglip_mlp(head, ("layernorm",), width, inner)


def _siglip_mlp(layer: str, norms: tuple[str, ...], width: int, inner: int) -> Iterator[Tensor]:
    for norm in norms:
        yield from _norm(f"{layer}.{norm}", width)
    yield from _layer(f"{layer}.mlp.fc1", inner, width)
    yield from _layer(f"{layer}.mlp.fc2", width, inner)


def _mistral3(whole: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> Iterator[Iterator[Tensor]]:
    width = vision.get("hidden_size", 1024)
    yield _pixtral(vision, width)
    projector, bias = "model.multi_modal_projector", bool(whole.get("multimodal_projector_bias"))
    merged = width * whole.get("spatial_merge_size", 2) ** 2
    yield (
        tensor
        for part in (
            _norm(f"{projector}.norm", width, bias=False),
            _layer(f"{projector}.patch_merger.merging_layer", width, merged, bias=False),
            _layer(f"{projector}.linear_1", hidden, width, bias=bias),
            _layer(f"{projector}.linear_2", hidden, hidden, bias=bias),
        )
        for tensor in part
    )


def _pixtral(vision: Mapping[str, Any], width: int) -> Iterator[Tensor]:
    tower, patch, inner = "model.vision_tower", vision.get("patch_size", 16), vision.get("intermediate_size", 4096)
    yield f"{tower}.patch_conv.weight", (width, vision.get("num_channels", 3), patch, patch)
    yield f"{tower}.ln_pre.weight", (width,)
    for index in range(vision.get("num_hidden_layers", 24)):
        layer = f"{tower}.transformer.layers.{index}"
        shapes = {f"attention.{name}_proj": (width, width) for name in "qkvo"}
        shapes |= {f"feed_forward.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes |= {"feed_forward.down_proj": (width, inner)}
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(("attention_norm", "ffn_norm"), (width,))
        yield from ((f"{layer}.{name}.weight", shape) for name, shape in (shapes | norms).items())


def _qwen2_5(_whole: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> Iterator[Iterator[Tensor]]:
    yield _qwen2_5_tower(vision, vision.get("out_hidden_size", hidden))


def _qwen2_5_tower(vision: Mapping[str, Any], out: int) -> Iterator[Tensor]:
    width, inner, merged = _qwen_sizes(vision, 3584, 3420)
    yield "model.visual.patch_embed.proj.weight", (width, *_qwen_patch(vision, 14))
    for index in range(vision.get("depth", 32)):
        block = f"model.visual.blocks.{index}"
        yield from _qwen_attention(block, width, bias=False)
        for name in ("gate_proj", "up_proj"):
            yield from _layer(f"{block}.mlp.{name}", inner, width)
        yield from _layer(f"{block}.mlp.down_proj", width, inner)
    yield "model.visual.merger.ln_q.weight", (width,)
    yield from _layer("model.visual.merger.mlp.0", merged, merged)
    yield from _layer("model.visual.merger.mlp.2", out, merged)


def _qwen3(_whole: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> Iterator[Iterator[Tensor]]:
    yield _qwen3_tower(vision, vision.get("out_hidden_size", hidden))


def _qwen3_tower(vision: Mapping[str, Any], out: int) -> Iterator[Tensor]:
    width, inner, merged = _qwen_sizes(vision, 1152, 4304)
    yield from _layer("model.visual.patch_embed.proj", width, *_qwen_patch(vision, 16))
    yield "model.visual.pos_embed.weight", (vision.get("num_position_embeddings", 2304), width)
    for index in range(vision.get("depth", 27)):
        block = f"model.visual.blocks.{index}"
        yield from _qwen_attention(block, width, bias=True)
        yield from _layer(f"{block}.mlp.linear_fc1", inner, width)
        yield from _layer(f"{block}.mlp.linear_fc2", width, inner)
    deep = range(len(vision.get("deepstack_visual_indexes", (8, 16, 24))))
    mergers = {"merger": width} | {f"deepstack_merger_list.{index}": merged for index in deep}
    for name, normed in mergers.items():
        yield from _norm(f"model.visual.{name}.norm", normed)
        yield from _layer(f"model.visual.{name}.linear_fc1", merged, merged)
        yield from _layer(f"model.visual.{name}.linear_fc2", out, merged)


def _qwen_sizes(vision: Mapping[str, Any], width: int, inner: int) -> tuple[int, int, int]:
    """Hidden and intermediate size, and the width of the patches that become one token."""
    width = vision.get("hidden_size", width)
    return width, vision.get("intermediate_size", inner), width * vision.get("spatial_merge_size", 2) ** 2


def _qwen_patch(vision: Mapping[str, Any], usual: int) -> tuple[int, ...]:
    """The numbers of a patch: [channels, images, rows, columns]."""
    size = vision.get("patch_size", usual)
    return vision.get("in_channels", vision.get("in_chans", 3)), vision.get("temporal_patch_size", 2), size, size


def _qwen_attention(block: str, width: int, bias: bool) -> Iterator[Tensor]:
    for norm in ("norm1", "norm2"):
        yield from _norm(f"{block}.{norm}", width, bias=bias)
    yield from _layer(f"{block}.attn.qkv", 3 * width, width)
    yield from _layer(f"{block}.attn.proj", width, width)


Lister = Callable[[Mapping[str, Any], Mapping[str, Any], int], Iterator[Iterator[Tensor]]]
# By model_type: what lists the parts, and whether the head is tied where config.json does not say. Mistral's files hold
# a head of their own, which transformers then keeps apart.
_FAMILIES: Mapping[str, tuple[Lister, bool]] = {
    "gemma3": (_gemma3, True),
    "mistral3": (_mistral3, False),
    "qwen2_5_vl": (_qwen2_5, False),
    "qwen3_vl": (_qwen3, False),
}
