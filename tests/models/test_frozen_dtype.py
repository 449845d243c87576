"""A model in 16 bits, frozen under adapters or trained, has the buffers of transformers' model in 16 bits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from finetune.models.load import build_on_meta
from finetune.models.lora import cast_frozen
from tests import vision
from tests.models.families import EVERY, build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_are_those_of_transformers_in_16_bits(dtype: torch.dtype) -> None:
    """RoPE's frequencies above all: rounded, they turn by another angle at a distance of some hundred tokens."""
    frequencies = 0
    for family in EVERY:
        config = build(family).config
        theirs = dict(build_on_meta(config, dtype).named_buffers())
        model = build_on_meta(config, torch.float32)
        cast_frozen(model, dtype)
        ours = dict(model.named_buffers())
        assert ours.keys() == theirs.keys()
        for name, buffer in ours.items():
            if buffer.is_floating_point():
                assert buffer.dtype == theirs[name].dtype, (family, name)
                # GPT-J's and CodeGen's are computed in the default dtype, which is that of 16 bits there
                is_computed_in_16_bits = name.endswith("embed_positions")
                assert is_computed_in_16_bits or torch.equal(buffer, theirs[name]), (family, name)
                frequencies += name.endswith("inv_freq")
        assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert frequencies > len(EVERY)


@pytest.mark.parametrize("family", ["llama", "glm4_moe", "nemotron_h"])
def test_biases_of_routers_are_in_fp32_as_from_pretrained_opens_them(
    family: str, tmp_path: Path
) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs = {name: buffer.dtype for name, buffer in opened.named_buffers()}
    trained = build_on_meta(model.config, torch.bfloat16)
    dtypes = {parameter.dtype for parameter in trained.parameters()}
    assert dtypes == {torch.bfloat16}, "routers' weights too: FSDP refuses a unit of two dtypes"
    frozen = build_on_meta(model.config, torch.float32)
    cast_frozen(frozen, torch.bfloat16)
    for ours in (trained, frozen):
        assert {name: buffer.dtype for name, buffer in ours.named_buffers()} == theirs
    has_biases = any("e_score_correction_bias" in name for name in theirs)
    assert has_biases == (family != "llama")


@pytest.mark.parametrize("family", vision.FAMILIES | vision.MORE | vision.PIXTRAL)
def test_image_towers_under_adapters_are_those_that_from_pretrained_opens_in_16_bits(
    family: str, tmp_path: Path
) -> None:
    """RoPE of Llama 4's tower is complex: cast by torch it would lose its imaginary half."""
    vision.make_vision_model(tmp_path, family)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    cast_frozen(ours, torch.bfloat16)
    expected = dict(theirs.named_buffers()) | dict(theirs.named_parameters())
    for name, tensor in [*ours.named_buffers(), *ours.named_parameters()]:
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
