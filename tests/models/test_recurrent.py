"""Given a family whose layers carry a state from token to token, when documents are packed into one row, then losses and
gradients are those of one document at a time through transformers alone."""

from typing import Any

import pytest
import torch

from finetune.config.families import FAMILIES
from finetune.models.decoder_layers import checkpoint_activations
from tests.conftest import slow_but
from tests.models import sweep
from tests.models.families import documents, gradients, ours, packed, padded, plain_loss, relative_error

RECURRENT = [name for name, family in FAMILIES.items() if family.recurrence is not None]
QUICK = ["qwen3_5_text", "falcon_h1", "jamba", "lfm2", "kimi_linear", "rwkv"]
CLOSE = 1e-5


def build(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = sweep.tiny_config(family)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()


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


def norm(gradients: dict[str, torch.Tensor]) -> float:
    """The norm over all parameters."""
    return float(torch.stack([each.norm() for each in gradients.values()]).norm())


@pytest.mark.parametrize("family", slow_but(QUICK, RECURRENT))
def test_without_the_reset_they_differ(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.models.documents._read_documents", lambda *_: None)
    with torch.no_grad():
        truth = plain_loss(build(family), documents())
        assert relative_error(ours(build(family))(**packed(documents())), truth) > 10 * CLOSE
