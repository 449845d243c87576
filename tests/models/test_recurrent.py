"""Given a family whose layers carry a state from token to token, when documents are packed into one row, then losses and
gradients are those of one document at a time through transformers alone."""

import copy
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from finetune.config.families import FAMILIES
from finetune.models.decoder_layers import checkpoint_activations
from tests.conftest import let_states_last, slow_but
from tests.models import sweep
from tests.models.families import (
    documents,
    gradients,
    ours,
    packed,
    padded,
    plain_loss,
    relative_error,
)
from tests.vision import make_vision_model

RECURRENT = [name for name, family in FAMILIES.items() if family.recurrence is not None]
DELTA_RULES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
QUICK = ["qwen3_5_text", "falcon_h1", "jamba", "lfm2", "rwkv"]
CLOSE = 1e-5
AS_TRAINED = (20, 45, 64, 33)  # tokens: documents of the runs in tests/training


def build(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = sweep.tiny_config(family)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return let_states_last(model).train()


@pytest.mark.parametrize("family", slow_but(QUICK, RECURRENT))
def test_packed_rows_have_the_losses_and_gradients_of_each_document(family: str) -> None:
    plain = build(family)
    if plain._supports_sdpa:  # Zamba's eager attention rounds more than its gradients may differ
        plain.set_attn_implementation("sdpa")
    truth = plain_loss(plain, documents())
    true_gradients = gradients(plain, truth)
    for rows, recomputed in ((packed, False), (packed, True), (padded, False)):
        model = ours(build(family))
        if recomputed:
            checkpoint_activations(model, 1)
        loss = model(**rows(documents()))
        found = gradients(model, loss)
        assert relative_error(loss, truth) < CLOSE
        assert found.keys() == true_gradients.keys()
        difference = {name: gradient - true_gradients[name] for name, gradient in found.items()}
        assert norm(difference) < CLOSE * norm(true_gradients)
        if (
            family in DELTA_RULES
        ):  # the gradients of decays are small beside the others, whose norm would hide them
            assert max(relative_norms(difference, true_gradients).values()) < CLOSE


class InDouble(ModuleType):
    """torch as a module of transformers sees it that is to compute in fp64 what it always computes in fp32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("family", slow_but(["qwen3_5_text", "qwen3_5"], [*DELTA_RULES, "qwen3_5"]))
def test_rounding_hides_no_error_in_any_gradient(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models that are compared are such that transformers' own gradients in fp32 are near those in fp64."""
    from transformers import AutoModelForImageTextToText

    if family == "qwen3_5":
        single = AutoModelForImageTextToText.from_pretrained(
            make_vision_model(tmp_path, family)
        ).train()
    else:
        single = build(family)
    single.set_experts_implementation("eager")  # torch's grouped products have no fp64
    double = copy.deepcopy(single).double()
    rounded = gradients(single, plain_loss(single, documents(AS_TRAINED)))
    modeling = type(single).__module__
    monkeypatch.setattr(importlib.import_module(modeling), "torch", InDouble("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    exact = gradients(double, plain_loss(double, documents(AS_TRAINED)))
    difference = {name: gradient - exact[name] for name, gradient in rounded.items()}
    assert max(relative_norms(difference, exact).values()) < CLOSE


def relative_norms(
    differences: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> dict[str, float]:
    """The norm of each difference, in units of its gradient's own."""
    return {name: float(each.norm() / gradients[name].norm()) for name, each in differences.items()}


def norm(gradients: dict[str, torch.Tensor]) -> float:
    """The norm over all parameters."""
    return float(torch.stack([each.norm() for each in gradients.values()]).norm())


@pytest.mark.parametrize("family", slow_but(QUICK, RECURRENT))
def test_without_the_reset_they_differ(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.models.documents._read_documents", lambda *_: None)
    with torch.no_grad():
        truth = plain_loss(build(family), documents())
        assert relative_error(ours(build(family))(**packed(documents())), truth) > 10 * CLOSE
