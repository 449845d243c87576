"""Tiny vision-language checkpoints with random weights, by transformers, of the families that are tried."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.conftest import let_states_last, make_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 32,
}
IMAGE, VIDEO, START, END = 262, 263, 264, 265  # ids after those of the tokenizer
VOCABULARY = 272
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | keys}


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
} | rope(mrope_section=[1, 0, 0], mrope_interleaved=True, partial_rotary_factor=0.25)
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"sliding_window": 16},
        "vision_config": VISION | {"vision_use_head": False},  # as published
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 56},
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": rope(mrope_section=[1, 1, 2]),
        "vision_config": QWEN_VISION,
        **QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {"intermediate_size": 512}
        | rope(mrope_section=[2, 1, 1], mrope_interleaved=True),
        "vision_config": QWEN_VISION
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": LINEAR,
        "vision_config": QWEN_VISION | {"num_position_embeddings": 16},
        **QWEN_IDS,
    },
}


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GEMMA_4 = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
GEMMA_4_LARGE = {
    "use_bidirectional_attention": "vision",
    # what a layer does to an image is seen in the next one alone
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
GEMMA_4_IMAGES = {
    "vision_config": VISION
    | {
        "model_type": "gemma4_vision",
        "head_dim": 8,
        "num_key_value_heads": 2,
        "position_embedding_size": 64,
    },
    "audio_config": None,
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
}
LLAMA_4 = {
    "model_type": "llama4_text",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 64,
    "interleave_moe_layer_step": 1,
}
OUTPUT_16 = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
MORE: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": GEMMA_4, **GEMMA_4_IMAGES},
    "gemma4_large": {
        "model_type": "gemma4",
        "text_config": GEMMA_4 | GEMMA_4_LARGE,
        **GEMMA_4_IMAGES,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
    "glm4v": {
        "text_config": rope(mrope_section=[1, 1, 2], partial_rotary_factor=1.0),
        "vision_config": QWEN_VISION | {"image_size": 28},
        **QWEN_IDS,
    },
    "qwen2_vl": {
        "text_config": rope(mrope_section=[1, 1, 2]),
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
        },
        **QWEN_IDS,
    },
    "qwen3_vl_moe": {
        "text_config": rope(mrope_section=[2, 1, 1], mrope_interleaved=True)
        | EXPERTS
        | {"decoder_sparse_step": 1},
        "vision_config": QWEN_VISION
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_IDS,
    },
    "qwen3_5_moe": {
        "text_config": LINEAR | EXPERTS,
        "vision_config": QWEN_VISION | {"num_position_embeddings": 16},
        **QWEN_IDS,
    },
    "llama4": {
        "text_config": LLAMA_4,
        "vision_config": VISION
        | {"model_type": "llama4_vision_model", "intermediate_size": 64}
        | OUTPUT_16,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "glm46v": {
        "text_config": rope(mrope_section=[1, 1, 2], partial_rotary_factor=1.0),
        "vision_config": QWEN_VISION | {"image_size": 28},
        **QWEN_IDS,
    },
    "idefics3": {
        "text_config": {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
    "llava_next": {
        "text_config": {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        "image_token_index": IMAGE,
    },
}
MORE["mllama"] = {
    "text_config": {
        "vocab_size": IMAGE,
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 16,
        "attention_heads": 2,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "intermediate_size": 24,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
        "image_size": 28,
        "patch_size": 14,
        "max_num_tiles": 4,
    },
    "image_token_index": IMAGE,
}
# whose tower timm builds; without batch statistics, as the published one
CONVNEXT = {"model_type": "gemma3n_vision", "architecture": "convnext_atto", "hidden_size": 16}
WITH_TIMM: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "text_config": {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": IMAGE,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,  # as the published ones have them
            "laurel_rank": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        },
        "vision_config": CONVNEXT
        | {"model_args": {"depths": [1, 1, 1, 1], "dims": [4, 8, 12, 16]}}
        | {"vocab_offset": IMAGE, "vocab_size": 4},
        "audio_config": {
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 8],
            "vocab_offset": IMAGE + 4,
            "vocab_size": 4,
        },
        "vision_soft_tokens_per_image": 4,
        "image_token_id": IMAGE,
        "audio_token_id": IMAGE + 4,
        "boi_token_id": START,
        "eoi_token_id": END,
    }
}
MISTRAL_4 = {
    "model_type": "mistral4",
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 0,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 16,  # beyond which queries are scaled
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
PIXTRAL: dict[str, dict[str, Any]] = {  # whose class is that of LLaVA, or of Mistral 3
    "mistral4": FAMILIES["mistral3"] | {"model_type": "mistral3", "text_config": MISTRAL_4},
    "pixtral": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 56},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_index": IMAGE,
    },
}
# of widths that bitsandbytes dequantizes on a CPU; layers of linear attention and of sparse latents
GLM_5: dict[str, dict[str, Any]] = {
    "glm5_next": {
        "text_config": {
            "hidden_size": 64,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "indexed_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "indexer_types": ["full", "full"],
            "index_topk": 64,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_kpool": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        "vision_config": QWEN_VISION
        | {"depth": 1, "out_hidden_size": 64, "projection_intermediate_size": 24},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_start_token_id": END + 1,
        "video_end_token_id": END + 2,
    }
}
# families of text -> the only class of their models, which has a tower
WITH_TOWER_ALONE = {"mistral4": "mistral4", "glm5_next_text": "glm5_next"}
MIXED_DTYPES = ("qwen3_vl",)  # the language model in bf16, the tower in fp32


def text_prompt() -> dict[str, Any]:
    """Inputs of a forward."""
    import torch

    return {"input_ids": torch.arange(32).reshape(2, 16) * 7 % 250}


def image_prompt(family: str) -> dict[str, Any]:
    """Inputs of a forward with an image that takes the place of one token, or two."""
    import torch

    generator = torch.Generator().manual_seed(0)
    count = {"mistral3": 2, "gemma3": 4}.get(family, 1)
    ids = torch.tensor([[5, 6, START, *[IMAGE] * count, END, 7, 8, 9]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.startswith("qwen"):
        inputs |= {
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
        return inputs | {"pixel_values": torch.randn(4, 3 * 2 * 14 * 14, generator=generator)}
    width = 56 if family == "mistral3" else 28
    inputs |= {"image_sizes": torch.tensor([[28, width]])} if family == "mistral3" else {}
    return inputs | {"pixel_values": torch.randn(1, 3, 28, width, generator=generator)}


def whole_config(family: str) -> dict[str, Any]:
    """The content of config.json."""
    tokenizer = make_tokenizer()
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    keys = (FAMILIES | MORE | PIXTRAL | GLM_5 | WITH_TIMM)[family]
    text = TEXT | {"vocab_size": VOCABULARY} | ids | keys["text_config"]
    return {"model_type": family} | keys | {"text_config": text}


def make_vision_model(folder: Path, family: str, *, seed: int = 0, dtype: str = "float32") -> Path:
    """A Hugging Face folder of the whole model, with the tokenizer of `make_model`, and a file of an image processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(**whole_config(family))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = let_states_last(
            AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
        )
        for name, parameter in model.named_parameters():
            # Those of Gemma 3, Llama 3.2 and ConvNeXt begin near zero: images would be the same.
            if re.search(r"mm_input_projection|_gate$|gate_attn|\.gamma$", name):
                torch.nn.init.normal_(parameter, std=0.2)
    if family in MIXED_DTYPES:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if "visual" in name else parameter.data.bfloat16()
    model.save_pretrained(folder)
    if family in MIXED_DTYPES:  # transformers names the dtype of the first parameter, the tower's
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            text.replace('"dtype": "float32"', '"dtype": "bfloat16"')
        )
    tokenizer.save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text(json.dumps({"image_processor_type": f"{family} {name}"}))
    return folder


# What stands in a text for an image, and the processors of the families whose images are tried.
PLACES = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "start_token": "<|img|>",
    "end_token": "<|/img|>",
}
IDEFICS_PLACES = [
    "<image>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<global-img>",
]  # its processor's own
GEMMA_NAMES = {"image_token": "<|image|>", "boi_token": "<|img|>", "eoi_token": "<|/img|>"}
INTERNVL_NAMES = {
    "context_image_token": "<|image|>",
    "video_token": "<|video|>",
    "start_image_token": "<|img|>",
    "end_image_token": "<|/img|>",
}
SMOLVLM_NAMES = {
    "image_token": "<|image|>",
    "fake_image_token": "<|img|>",
    "global_image_token": "<|/img|>",
}
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIDE_28 = {"size": {"height": 28, "width": 28}}
# family -> (preprocessor_config.json, processor_config.json, names of the tokens, what the template writes for an image)
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "qwen2_5_vl": (
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 28 * 28,
            "max_pixels": 56 * 84,
            "patch_size": 14,
        },
        {},
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        "<|img|><|image|><|/img|>",
    ),
    "gemma3": (
        {"image_processor_type": "Gemma3ImageProcessor", **SIDE_28},
        {"image_seq_length": 4},
        GEMMA_NAMES,
        "<|img|>",
    ),
    "internvl": (
        {"image_processor_type": "GotOcr2ImageProcessor", **SIDE_28, "crop_to_patches": False},
        {"image_seq_length": 1},
        INTERNVL_NAMES,
        "<|image|>",
    ),
    "mistral3": (
        {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 14,
            "size": {"longest_edge": 56},
        },
        {
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "<|image|>",
            "image_break_token": "<|img|>",
        }
        | {"image_end_token": "<|/img|>"},
        {},
        "<|image|>",
    ),
}
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": SIDE_28["size"],
}
STRATEGY = {
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
GLM_SIZE = {"size": {"shortest_edge": 28 * 56, "longest_edge": 56 * 168}, "patch_size": 14}
LLAMA_4_PLACES = [
    "<|patch|>",
    "<|image|>",
    "<|image_start|>",
    "<|image_end|>",
]  # its processor's own
PROCESSORS |= {
    "llama4": (
        {"image_processor_type": "Llama4ImageProcessor", "max_patches": 4, **SIDE_28},
        {"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        {},
        "<|image|>",
    ),
    "mllama": (
        {"image_processor_type": "MllamaImageProcessor", "max_image_tiles": 4, **SIDE_28},
        {},
        {"image_token": "<|image|>"},
        "<|image|>",
    ),
    "pixtral": (
        PROCESSORS["mistral3"][0],
        PROCESSORS["mistral3"][1]
        | {"spatial_merge_size": 1, "processor_class": "PixtralProcessor"},
        {},
        "<|image|>",
    ),
    "mistral4": PROCESSORS["mistral3"],
    "smolvlm": (
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 56}}
        | {"max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 1},
        SMOLVLM_NAMES,
        "<|image|>",
    ),
    "idefics3": (
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 56}}
        | {"max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 1},
        {},
        "<image>",
    ),
    "gemma4": (
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "max_soft_tokens": 70},
        {"image_seq_length": 70},
        GEMMA_NAMES | {"audio_token": "<|img|>", "boa_token": "<|img|>", "eoa_token": "<|img|>"},
        "<|image|>",
    ),
    "gemma3n": (
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}},
        {"image_seq_length": 4, "audio_seq_length": 4},
        GEMMA_NAMES | {"audio_token": "<|aud|>", "boa_token": "<|img|>", "eoa_token": "<|img|>"},
        "<|image|>",
    ),
    "llava": (CLIP, STRATEGY, {"image_token": "<|image|>"}, "<|image|>"),
    "llava_next": (
        CLIP
        | {"image_processor_type": "LlavaNextImageProcessor"}
        | {"image_grid_pinpoints": MORE["llava_next"]["image_grid_pinpoints"]},
        STRATEGY,
        {"image_token": "<|image|>"},
        "<|image|>",
    ),
    **{
        family: ({"image_processor_type": processor} | GLM_SIZE, {}, *PROCESSORS["qwen2_5_vl"][2:])
        for family, processor in (
            ("glm4v", "Glm4vImageProcessor"),
            ("glm46v", "Glm46VImageProcessor"),
        )
    },
    **dict.fromkeys(
        ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), PROCESSORS["qwen2_5_vl"]
    ),
}
PROCESSORS["gemma4_large"] = PROCESSORS["gemma4"]


def add_processor(folder: Path, family: str) -> Path:
    """Gives a folder of `make_vision_model` the processor of its family, and a tokenizer with an image's tokens."""
    from transformers import PreTrainedTokenizerFast

    image, processor, names, place = PROCESSORS[family]
    plain = make_tokenizer()
    backend = plain.backend_tokenizer
    own = {"idefics3": IDEFICS_PLACES, "llama4": LLAMA_4_PLACES}
    places = own.get(family, [*PLACES.values()])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in places]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        chat_template=PARTS_TEMPLATE.replace("PLACE", place),
        extra_special_tokens=names,
    )
    assert tokenizer.convert_tokens_to_ids(places) == [IMAGE, VIDEO, START, END]
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def draw_image(path: Path, number: int) -> Path:
    """A small picture of its own size and color."""
    from PIL import Image, ImageDraw

    picture = Image.new(
        "RGB", (30 + 17 * (number % 4), 60 - 11 * (number % 3)), (37 * number % 256, 90, 200)
    )
    ImageDraw.Draw(picture).ellipse((3, 5, 20 + number % 9, 25), fill=(250, 20 * number % 256, 0))
    picture.save(path)
    return path


def make_image_chat(folder: Path, *, rows: int, every: int = 1) -> Path:
    """Conversations about images, in two turns in every third row; all but each `every`-th row without one, if not 1."""
    lines = []
    for row in range(rows):
        content: list[dict[str, str]] = [
            {"type": "text", "text": f"What is {row}?" + " Tell me." * (row % 4)}
        ]
        if every == 1 or row % every == 0:
            content.insert(
                0, {"type": "image", "path": draw_image(folder / f"{row}.png", row).name}
            )
        if row % 5 == 4 and every == 1:
            content.append(
                {"type": "image", "path": draw_image(folder / f"{row}-b.png", row + 3).name}
            )
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": f"It is {2 * row}."},
        ]
        if row % 3 == 2:
            messages += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes."},
            ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path = folder / "images.jsonl"
    path.write_text("".join(lines))
    return path


def open_processor(folder: Path, family: str) -> Any:
    """transformers' own processor of a folder, which without torchvision is made of its parts."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,
        processor_class_from_name,
    )

    name = PROCESSORS[family][1].get("processor_class")
    name = name or PROCESSOR_MAPPING_NAMES[AutoConfig.from_pretrained(folder).model_type]
    known: Any = (
        _pixtral_processor() if name == "PixtralProcessor" else processor_class_from_name(name)
    )
    parts = {"image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil")}
    parts |= {"tokenizer": AutoTokenizer.from_pretrained(folder)}
    unchecked = type(known.__name__, (known,), {"check_argument_for_proper_class": lambda *_: None})
    videos = {name: None for name in known.get_attributes() if name not in parts}
    return unchecked(**parts, **videos, **PROCESSORS[family][1])


def _pixtral_processor() -> Any:
    """transformers' own class, whose module cannot be imported without torchvision, of its source."""
    import types
    from importlib.util import find_spec

    spec = find_spec("transformers.models.pixtral.processing_pixtral")
    assert spec is not None and spec.origin is not None
    source = (
        Path(spec.origin)
        .read_text()
        .replace(".image_processing_pixtral", ".image_processing_pil_pixtral")
    )
    source = source.replace("@auto_docstring\n", "")  # it looks for the class in the file
    module = types.ModuleType(spec.name)
    module.__package__ = "transformers.models.pixtral"
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module.PixtralProcessor


def process_row(place: str, processor: Any) -> dict[str, Any]:
    """What `processor` makes of the row at `place`, a line of a file of `make_image_chat`."""
    from transformers.image_utils import load_image

    file, _, line = place.rpartition(":")
    messages = json.loads(Path(file).read_text().splitlines()[int(line) - 1])["messages"]
    parts = [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    pictures = [
        load_image(str(Path(file).parent / part["path"]))
        for part in parts
        if part["type"] == "image"
    ]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    images = {"images": [pictures]} if pictures else {}
    found = processor(text=[text], **images, return_tensors="pt", add_special_tokens=False)
    found = {name: value for name, value in found.items() if name != "attention_mask"}
    # Llama 4's rounds pixels to bf16
    return {n: value.float() if value.is_floating_point() else value for n, value in found.items()}
