"""The planned activations of rows with images against what torch really keeps: the language model's; the tower is frozen."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from finetune.config.schema import Lora
from finetune.models.cross_entropy import install_loss
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.documents import install_attention
from finetune.models.fused_lora import fuse_adapters
from finetune.models.gating import install_gating
from finetune.models.lora import add_adapters
from finetune.models.vision import forward_with_images
from finetune.plan.activations import Computation, kept_bytes
from finetune.plan.architecture import read_architecture, split_config
from tests.plan.test_activations import CONFIG, DOCUMENTS, TOLERANCE, packed_inputs
from tests.plan.traced import saved_for_backward
from tests.vision import END, IMAGE, QWEN_IDS, START, VOCABULARY, rope

TEXT = CONFIG | {"vocab_size": VOCABULARY}
TOWER: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 128, "patch_size": 14}
GEMMA_IDS = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16, "sliding_window": 64},
        "vision_config": TOWER
        | {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 112,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 16,
        **GEMMA_IDS,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | rope(mrope_section=[2, 2, 4]),
        "vision_config": TOWER
        | {"depth": 3, "num_heads": 4, "out_hidden_size": 64, "window_size": 56},
        **QWEN_IDS,
    },
}
PIXELS: dict[str, dict[str, torch.Tensor]] = {  # of two images, each of 64 patches and 16 tokens
    "gemma3": {"pixel_values": torch.zeros(2, 3, 112, 112)},
    "qwen2_5_vl": {
        "pixel_values": torch.zeros(2 * 64, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * 2),
    },
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("lora", [None, Lora(use_peft=True, lora_r=8)], ids=["full", "lora"])
@pytest.mark.parametrize("every", [None, 1], ids=["", "checkpointing"])
def test_activations_of_rows_with_images_are_planned_within_a_tenth(
    family: str, dtype: torch.dtype, lora: Lora | None, every: int | None
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **MODELS[family])
    model: Any = AutoModelForImageTextToText.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    install_attention(model)
    install_loss(model)
    install_gating(model)
    if lora is not None:
        add_adapters(model, lora, dtype)
        fuse_adapters(model)
        model.to(dtype)
    if every is not None:
        checkpoint_activations(model, every)
    model.train()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("language_model", "lm_head")):
            parameter.requires_grad_(False)
    inputs = packed_inputs() | {"packed_lengths": DOCUMENTS}
    for first in (10, 120):  # in the first document, and in the second
        inputs["input_ids"][0, first : first + 16] = IMAGE
    images = {
        name: each.to(dtype) if name == "pixel_values" else each
        for name, each in PIXELS[family].items()
    }
    with saved_for_backward(
        iter([*model.parameters(), *model.buffers(), *images.values()])
    ) as kept:
        forward_with_images(model, images, (1, 1, 0), **inputs)
    tokens = sum(DOCUMENTS)
    run = Computation(
        itemsize=dtype.itemsize,
        checkpoint_every=every,
        lora=lora,
        cpu=True,
        document_length=sum(n * n for n in DOCUMENTS) // tokens,
        masks_images=family == "gemma3",
    )
    whole = model.config.to_dict() | {"architectures": [type(model).__name__]}
    a = read_architecture(split_config(whole), "config.json")
    # Not autograd's, as in test_activations.py: the output; under checkpointing cos and sin.
    elsewhere = a.hidden * run.residual_itemsize + (
        2 * a.rotated_size * run.residual_itemsize if every == 1 else 0
    )
    planned = tokens * (sum(kept_bytes(a, run).values()) - elsewhere)
    assert planned == pytest.approx(sum(kept.values()), rel=TOLERANCE)
    print(f"{family}, {dtype}: {planned / sum(kept.values()) - 1:+.2%}")
