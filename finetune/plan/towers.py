"""What a vision-language model has beside its language model: tower and projector, by its config.json.

Source: the model classes of transformers 5; tests/plan builds each on the meta device and compares names and shapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import index as whole_number
from typing import Any

from finetune.config.facts import names_vision_language, refuse_wrong_values
from finetune.errors import UserError

Config = Mapping[str, Any]
Tensor = tuple[str, tuple[int, ...]]  # its name and shape
LARGEST = 1 << 40  # a size of a tensor
WHOLE = "vision_language_config"  # the key under which `split_config` keeps all of a config.json


def split_config(config: Mapping[str, Any], drop_vision: bool = False) -> dict[str, Any]:
    """The config of the language model alone, from a config.json. For a vision-language model the key WHOLE holds the
    complete config, or None with `drop_vision`.

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
    tied = config.get("tie_word_embeddings", own.get("tie_word_embeddings", family.tied if family else False))
    return own | {WHOLE: None if drop_vision else config, "tie_word_embeddings": tied}


def list_parts(whole: Mapping[str, Any], hidden: int, where: str) -> tuple[str, tuple[tuple[Tensor, ...], ...]]:
    """The name of the language model, whose hidden size is `hidden`, and the tensors of each part beside it.

    Raises `UserError` for a family that is not in the table, and for sizes with which no tower can be built.
    """
    kind = str(whole.get("model_type"))
    if kind not in _FAMILIES:
        raise UserError(f"{where}: the vision tower of {kind!r} cannot be planned; supported: {', '.join(_FAMILIES)}")
    family, vision = _FAMILIES[kind], whole.get("vision_config") or {}
    for part in (whole, vision):
        refuse_wrong_values(part, where)
    whole, vision = ({key: value for key, value in part.items() if value is not None} for part in (whole, vision))
    try:
        parts = tuple(tuple(part) for part in family.parts(whole, vision, hidden))
        if all(0 < size < LARGEST for part in parts for _, shape in part for size in map(whole_number, shape)):
            return family.language_model, parts
    except (TypeError, ValueError, LookupError, ArithmeticError):
        pass
    raise UserError(f"{where}: vision_config: no vision tower of {kind} has its sizes; copy or download it again")


def _layer(name: str, *shape: int, bias: bool = True) -> Iterator[Tensor]:
    """A layer or norm: its weight, and a bias where it has one."""
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _layers(name: str, shapes: Mapping[str, tuple[int, ...]], bias: bool = True) -> Iterator[Tensor]:
    return chain.from_iterable(_layer(f"{name}.{inner}", *shape, bias=bias) for inner, shape in shapes.items())


def _side(size: Any) -> int:
    """The rows of an image or a patch, whose size is one number or two."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def _gemma3(_whole: Config, vision: Config, hidden: int) -> Iterator[Iterable[Tensor]]:
    width = vision.get("hidden_size", 768)
    yield _siglip("model.vision_tower", {**SIGLIP, **vision})
    projector = "model.multi_modal_projector"
    yield (
        (f"{projector}.mm_input_projection_weight", (width, hidden)),
        (f"{projector}.mm_soft_emb_norm.weight", (width,)),
    )


def _smolvlm(whole: Config, vision: Config, hidden: int) -> Iterator[Iterable[Tensor]]:
    sizes = {**SIGLIP, "hidden_size": 1152, "patch_size": 32, "vision_use_head": False, **vision}
    yield _siglip("model.vision_model", sizes)
    merged = sizes["hidden_size"] * whole.get("scale_factor", 2) ** 2
    yield _layer("model.connector.modality_projection.proj", hidden, merged, bias=False)


SIGLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}


def _siglip(tower: str, sizes: Config) -> Iterator[Tensor]:
    width, inner, patch = sizes["hidden_size"], sizes["intermediate_size"], _side(sizes["patch_size"])
    mlp: dict[str, tuple[int, ...]] = {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
    yield from _layer(f"{tower}.embeddings.patch_embedding", width, sizes["num_channels"], patch, patch)
    yield f"{tower}.embeddings.position_embedding.weight", ((_side(sizes["image_size"]) // patch) ** 2, width)
    for index in range(sizes["num_hidden_layers"]):
        attention = {f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        norms = {"layer_norm1": (width,), "layer_norm2": (width,)}
        yield from _layers(f"{tower}.encoder.layers.{index}", {**attention, **norms, **mlp})
    yield from _layer(f"{tower}.post_layernorm", width)
    if sizes["vision_use_head"]:
        yield f"{tower}.head.probe", (1, 1, width)
        yield f"{tower}.head.attention.in_proj_weight", (3 * width, width)
        yield f"{tower}.head.attention.in_proj_bias", (3 * width,)
        yield from _layers(f"{tower}.head", {"attention.out_proj": (width, width), "layernorm": (width,), **mlp})


def _internvl(whole: Config, vision: Config, hidden: int) -> Iterator[Iterable[Tensor]]:
    width = vision.get("hidden_size", 1024)
    yield _internvl_tower(vision, width)
    merged = width * int(1 / whole.get("downsample_ratio", 0.5)) ** 2
    shapes: dict[str, tuple[int, ...]] = {"layer_norm": (merged,), "linear_1": (hidden, merged)}
    yield _layers("model.multi_modal_projector", shapes | {"linear_2": (hidden, hidden)})


def _internvl_tower(vision: Config, width: int) -> Iterator[Tensor]:
    tower, inner, patch = (
        "model.vision_tower",
        vision.get("intermediate_size", 4096),
        _side(vision.get("patch_size", 14)),
    )
    embeddings = f"{tower}.embeddings"
    yield f"{embeddings}.cls_token", (1, 1, width)
    if vision.get("use_mask_token"):
        yield f"{embeddings}.mask_token", (1, 1, width)
    if vision.get("use_absolute_position_embeddings", True):
        patches = (_side(vision.get("image_size", 448)) // patch) ** 2
        yield f"{embeddings}.position_embeddings", (1, patches + 1, width)
    yield from _layer(f"{embeddings}.patch_embeddings.projection", width, vision.get("num_channels", 3), patch, patch)
    norms = {f"layernorm_{place}": (width,) for place in ("before", "after")}
    for index in range(vision.get("num_hidden_layers", 24)):
        layer = f"{tower}.encoder.layer.{index}"
        yield from ((f"{layer}.lambda_{number}", (width,)) for number in (1, 2))
        inputs = {f"attention.{name}_proj": (width, width) for name in "qkv"}
        yield from _layers(layer, inputs, bias=bool(vision.get("attention_bias")))
        if vision.get("use_qk_norm"):
            yield from _layers(layer, {f"attention.{name}_norm": (width,) for name in "qk"}, bias=False)
        shapes = {"attention.projection_layer": (width, width), "mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
        yield from _layers(layer, shapes)
        yield from _layers(layer, norms, bias=vision.get("norm_type", "layer_norm") == "layer_norm")
    if not vision.get("use_mean_pooling", True):
        yield from _layer(f"{tower}.layernorm", width)


def _mistral3(whole: Config, vision: Config, hidden: int) -> Iterator[Iterable[Tensor]]:
    width = vision.get("hidden_size", 1024)
    yield _pixtral(vision, width)
    projector, bias = "model.multi_modal_projector", bool(whole.get("multimodal_projector_bias"))
    merged = width * whole.get("spatial_merge_size", 2) ** 2
    merger: dict[str, tuple[int, ...]] = {"norm": (width,), "patch_merger.merging_layer": (width, merged)}
    linears = {"linear_1": (hidden, width), "linear_2": (hidden, hidden)}
    yield chain(_layers(projector, merger, bias=False), _layers(projector, linears, bias=bias))


def _pixtral(vision: Config, width: int) -> Iterator[Tensor]:
    tower, patch, inner = "model.vision_tower", vision.get("patch_size", 16), vision.get("intermediate_size", 4096)
    yield from _layer(f"{tower}.patch_conv", width, vision.get("num_channels", 3), patch, patch, bias=False)
    yield f"{tower}.ln_pre.weight", (width,)
    shapes: dict[str, tuple[int, ...]] = {f"attention.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {f"feed_forward.{name}_proj": (inner, width) for name in ("gate", "up")}
    shapes |= {"feed_forward.down_proj": (width, inner), "attention_norm": (width,), "ffn_norm": (width,)}
    for index in range(vision.get("num_hidden_layers", 24)):
        yield from _layers(f"{tower}.transformer.layers.{index}", shapes, bias=False)


def _qwen2_5(_whole: Config, vision: Config, hidden: int) -> Iterator[Iterable[Tensor]]:
    width, inner, merged = _qwen_sizes(vision, 3584, 3420)
    mlp = {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    ends = {"merger.mlp.0": (merged, merged), "merger.mlp.2": (vision.get("out_hidden_size", hidden), merged)}
    yield [
        ("model.visual.patch_embed.proj.weight", (width, *_qwen_patch(vision, 14))),
        *_qwen_blocks(vision.get("depth", 32), width, mlp, norm_bias=False),
        ("model.visual.merger.ln_q.weight", (width,)),
        *_layers("model.visual", ends),
    ]


def _qwen3(_whole: Config, vision: Config, hidden: int) -> Iterator[Iterable[Tensor]]:
    width, inner, merged = _qwen_sizes(vision, 1152, 4304)
    deep = range(len(vision.get("deepstack_visual_indexes", (8, 16, 24))))
    mergers = {"merger": width} | {f"deepstack_merger_list.{index}": merged for index in deep}
    ends: dict[str, tuple[int, ...]] = {}
    for name, normed in mergers.items():
        ends |= {f"{name}.norm": (normed,), f"{name}.linear_fc1": (merged, merged)}
        ends |= {f"{name}.linear_fc2": (vision.get("out_hidden_size", hidden), merged)}
    mlp = {"mlp.linear_fc1": (inner, width), "mlp.linear_fc2": (width, inner)}
    yield [
        *_layer("model.visual.patch_embed.proj", width, *_qwen_patch(vision, 16)),
        ("model.visual.pos_embed.weight", (vision.get("num_position_embeddings", 2304), width)),
        *_qwen_blocks(vision.get("depth", 27), width, mlp, norm_bias=True),
        *_layers("model.visual", ends),
    ]


def _qwen_sizes(vision: Config, width: int, inner: int) -> tuple[int, int, int]:
    """Hidden and intermediate size, and the width of the patches that become one token."""
    width = vision.get("hidden_size", width)
    return width, vision.get("intermediate_size", inner), width * vision.get("spatial_merge_size", 2) ** 2


def _qwen_patch(vision: Config, usual: int) -> tuple[int, ...]:
    """The numbers of a patch: [channels, images, rows, columns]."""
    size = vision.get("patch_size", usual)
    return vision.get("in_channels", vision.get("in_chans", 3)), vision.get("temporal_patch_size", 2), size, size


def _qwen_blocks(depth: int, width: int, mlp: Mapping[str, tuple[int, ...]], norm_bias: bool) -> Iterator[Tensor]:
    for index in range(depth):
        block = f"model.visual.blocks.{index}"
        yield from _layers(block, {"norm1": (width,), "norm2": (width,)}, bias=norm_bias)
        yield from _layers(block, {"attn.qkv": (3 * width, width), "attn.proj": (width, width), **mlp})


@dataclass(frozen=True, slots=True)
class _Family:
    parts: Callable[[Config, Config, int], Iterator[Iterable[Tensor]]]  # of (config.json, its vision_config, hidden)
    tied: bool  # whether the head is, where config.json does not say
    language_model: str = "model.language_model"


# By model_type. Mistral's files hold a head of their own, which transformers then keeps apart.
_FAMILIES: Mapping[str, _Family] = {
    "gemma3": _Family(_gemma3, tied=True),
    "mistral3": _Family(_mistral3, tied=False),
    "qwen2_5_vl": _Family(_qwen2_5, tied=False),
    "qwen3_vl": _Family(_qwen3, tied=False),
    "qwen3_vl_moe": _Family(_qwen3, tied=False),
    "smolvlm": _Family(_smolvlm, tied=False, language_model="model.text_model"),
    "internvl": _Family(_internvl, tied=True),
}
