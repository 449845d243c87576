"""The planned memory of attention that makes masks or scores [tokens, tokens], against what torch allocates."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from finetune.config.methods import Method
from finetune.plan.activations import layer_bytes
from tests.conftest import slow_but
from tests.plan.run_specs import make_spec
from tests.plan.small_steps import SMALL, planned_share
from tests.plan.traced import saved_for_backward

ATTENTIONS: dict[str, dict[str, Any]] = {
    "window": {"model_type": "mistral", "sliding_window": 128},
    "dropout": {"attention_dropout": 0.1},
    "both": {"model_type": "mistral", "sliding_window": 128, "attention_dropout": 0.1},
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0}
CASES = [(name, recomputes) for name in ATTENTIONS for recomputes in (False, True)]


@pytest.mark.parametrize(
    ("name", "recomputes"), slow_but([("window", False), ("dropout", True)], CASES)
)
def test_scores_and_masks_of_whole_documents_are_planned(name: str, recomputes: bool) -> None:
    """They grow with the square of a document, and are most of this step."""
    share = planned_share(SMALL | ATTENTIONS[name], recomputes=recomputes, tokens=1024)
    assert 0.99 < share < 1.15, share


@pytest.mark.parametrize(
    ("attention", "recomputes"),
    slow_but(
        [("eager", False), ("sdpa", True)],
        [(name, recomputes) for name in ("eager", "sdpa") for recomputes in (False, True)],
    ),
)
def test_transformers_own_attention_is_planned(attention: str, recomputes: bool) -> None:
    """In a row of two documents, which a mask keeps apart."""
    share = planned_share(
        SMALL, attention=attention, documents=2, recomputes=recomputes, tokens=1024
    )
    assert 1 <= share < 1.2, share


@pytest.mark.parametrize(
    ("attention", "how"),
    [("sdpa", {"recomputes": True}), ("eager", {}), ("sdpa", {"evaluates": True})],
    ids=["recomputed", "kept", "evaluated"],
)
def test_the_masks_of_a_packed_micro_batch_are_planned(attention: str, how: dict[str, Any]) -> None:
    """transformers' own attention masks the scores of all its rows together."""
    share = planned_share(SMALL, attention=attention, documents=4, rows=4, tokens=1024, **how)
    assert 1 <= share < 1.4, share


def test_the_scores_of_an_evaluation_are_planned() -> None:
    """Gemma 2 caps them, so that no kernel computes its attention on a CPU."""
    config = SMALL | {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
    assert 1 <= planned_share(config, tokens=1024, evaluates=True) < 1.1


def test_the_rotation_of_wide_queries_is_planned() -> None:
    """In an evaluation it takes more than an MLP that is narrower than the queries."""
    config = SMALL | {"intermediate_size": 128, "num_attention_heads": 16}
    assert 1 <= planned_share(config, evaluates=True) < 1.3


def test_what_traced_layers_are_given_is_planned_in_an_evaluation() -> None:
    """The embeddings, a layer's input and, under transformers' own attention, the mask of the row."""
    config = SMALL | {"model_type": "apertus"}
    for attention in ("auto", "sdpa"):
        share = planned_share(config, attention=attention, tokens=1024, evaluates=True)
        assert 1 <= share < 1.2, (attention, share)


def test_the_scores_of_traced_layers_grow_with_the_square() -> None:
    """A layer saves a mask by SDPA, and GPT-2's softmax of each head by eager attention."""
    spec = make_spec(GPT2, ranks=1)
    saved = {}
    for attention in ("auto", "sdpa", "eager"):
        computation = replace(spec.computation, attention=attention, cpu=True)
        trace = spec.architecture.trace(computation)
        assert trace is not None and trace.failure is None
        saved[attention] = trace.layers[0].saved.square
    itemsize = spec.computation.itemsize
    assert saved == {"auto": 0, "sdpa": itemsize, "eager": itemsize * spec.architecture.heads}


def test_the_mask_of_padding_is_planned() -> None:
    """Of padded rows in which a token sees all of its document; SDPA saves it in fp32."""
    saved = []
    for packing in (False, True):
        spec = make_spec(SMALL, ranks=1, max_length=256)
        recipe = replace(
            spec.recipe,
            method=Method(method="masked_diffusion"),
            data=replace(spec.recipe.data, packing=packing),
        )
        spec = replace(spec, recipe=recipe, device="cpu")
        saved.append(layer_bytes(spec.architecture, spec.computation)["attention"])
    query = torch.randn(1, 4, 256, 64, requires_grad=True)
    visible = torch.ones(1, 1, 1, 256, dtype=torch.bool).expand(-1, -1, 256, -1)
    with saved_for_backward(iter([query])) as kept:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=visible)
    assert 256 * (saved[0] - saved[1]) == 256 * 256 * 4 in kept.values()
