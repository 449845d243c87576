"""Factors and caps of logits are found in a class's own forward, whatever its config calls them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM

from finetune.distributed.model_parts import trunk_of
from finetune.errors import UserError
from finetune.models.head_factors import HeadFactors, measure_head_factors
from finetune.models.loss_chunks import LogitTransform
from tests.models.sweep import is_composite, small_config

# family -> (its keys, what they do around the head)
KNOWN: dict[str, tuple[dict[str, Any], HeadFactors]] = {
    "llama": ({}, HeadFactors()),
    "cohere2": ({"logit_scale": 0.3}, HeadFactors(logits=LogitTransform(0.3))),
    "falcon_h1": ({"lm_head_multiplier": 0.7}, HeadFactors(logits=LogitTransform(0.7))),
    "granite": (
        {"logits_scaling": 5.0},
        HeadFactors(logits=LogitTransform(0.2)),
    ),  # one key, which divides
    "hyperclovax": (
        {"logits_scaling": 5.0},
        HeadFactors(logits=LogitTransform(5.0)),
    ),  # and multiplies
    "mpt": ({"logit_scale": 0.3}, HeadFactors()),  # another, which is ignored
    "gemma2": ({"final_logit_softcapping": 3.0}, HeadFactors(logits=LogitTransform(softcap=3.0))),
    "recurrent_gemma": ({"logits_soft_cap": 4.0}, HeadFactors(logits=LogitTransform(softcap=4.0))),
    "inkling_text": ({"logits_mup_width_multiplier": 8.0}, HeadFactors(input_scale=0.125)),
    "minicpm3": ({"dim_model_base": 96}, HeadFactors(input_scale=2.0)),
    "muse_glimmer": (
        {"output_multiplier": 0.21, "final_logit_softcapping": 7.0},
        HeadFactors(logits=LogitTransform(0.21, 7.0)),
    ),
    "granite_docling": ({"logits_scaling": 4.0}, HeadFactors(logits=LogitTransform(0.25))),
}


def build(family: str, keys: dict[str, Any], device: str) -> Any:
    config = small_config(family)
    text = config.get_text_config()
    for key, value in keys.items():
        setattr(text, key, value)
    auto_class: Any = AutoModelForImageTextToText if is_composite(family) else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        return auto_class.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", KNOWN)
def test_they_are_those_of_the_class(family: str) -> None:
    keys, expected = KNOWN[family]
    model = build(family, keys, "meta")
    input_scale = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert measure_head_factors(model) == expected
    assert {
        name: module.__dict__.get("forward") for name, module in model.named_modules()
    } == input_scale


@pytest.mark.parametrize(
    "family", ["muse_glimmer", "inkling_text", "minicpm3", "granite", "gemma2"]
)
def test_with_them_the_head_gives_the_models_own_logits(family: str) -> None:
    """Held against transformers' forward on random weights."""
    model = build(family, KNOWN[family][0], "cpu")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
        hidden = trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        factors = measure_head_factors(model)
        scores, _ = factors.logits.forward(
            model.get_output_embeddings()(hidden * factors.input_scale)
        )
    assert torch.allclose(scores, own, rtol=1e-4, atol=1e-5)


def subclass(change: Any) -> Any:
    """A Llama of tomorrow, whose forward does something of its own to the logits."""

    class Tomorrow(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = change(outputs.logits)
            return outputs

    with torch.device("meta"):
        return Tomorrow(small_config("llama")).eval()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda logits: logits.float() * 0.3, LogitTransform(0.3)),
        (lambda logits: 9 * torch.tanh(logits / 9) / 2, LogitTransform(0.5, 4.5)),
    ],
)
def test_a_name_that_nobody_has_heard_of_is_no_matter(
    change: Any, expected: LogitTransform
) -> None:
    found = measure_head_factors(subclass(change)).logits
    assert found.scale == pytest.approx(expected.scale, rel=1e-7)
    assert found.softcap == (
        None if expected.softcap is None else pytest.approx(expected.softcap, rel=1e-7)
    )


def clamp(logits: Tensor) -> Tensor:
    return logits.clamp(-5, 5)


@pytest.mark.parametrize(
    "change", [clamp, torch.sigmoid, lambda logits: logits[..., :7], lambda logits: logits + 1]
)
def test_what_is_no_factor_and_no_cap_is_refused(change: Any) -> None:
    with pytest.raises(
        UserError, match="its logits are something else than the scores of its output head"
    ):
        measure_head_factors(subclass(change))


def test_a_class_that_needs_more_is_left_to_the_probe() -> None:
    assert measure_head_factors(build("bert", {}, "meta")) == HeadFactors()
