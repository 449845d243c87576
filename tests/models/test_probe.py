"""Given a model of any family, when it is about to be trained, then its loss is that of one document at a time through
transformers alone, or it is refused in a sentence that says what to do."""

from typing import Any

import pytest

from tests.models.families import HYBRIDS, LEAKY, OTHERS, OWN_ATTENTION


@pytest.mark.parametrize(
    "case",
    [
        *(f"{family}, packed" for family in OTHERS),
        *(f"{family}, padded" for family in (*HYBRIDS, *LEAKY, *OWN_ATTENTION)),
    ],
)
def test_what_is_let_in_trains_on_the_loss_of_one_document_at_a_time(case: str, loaded: dict[str, Any]) -> None:
    found = loaded[case]
    assert found["error"] is None
    assert found["loss"] == pytest.approx(found["plain"], rel=1e-4 if "xlstm" in case else 1e-6)


@pytest.mark.parametrize("family", LEAKY)
def test_layers_that_do_not_keep_packed_documents_apart_are_refused(family: str, loaded: dict[str, Any]) -> None:
    error = loaded[f"{family}, packed"]["error"]
    assert "do not keep documents apart; set packing: false" in error and "\n" not in error


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_attention_that_is_not_ours_is_refused_in_a_sentence(family: str, loaded: dict[str, Any]) -> None:
    error = loaded[f"{family}, packed"]["error"]
    assert "cannot be trained on packed documents" in error and "\n" not in error
    assert error.endswith("set packing: false and attn_implementation: eager")


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_with_a_state_are_refused_for_packed_rows(family: str, loaded: dict[str, Any]) -> None:
    assert (
        "layers, in which packed documents cannot be kept apart; set packing: false"
        in loaded[f"{family}, packed"]["error"]
    )


def test_a_forward_that_computes_something_else_is_refused(loaded: dict[str, Any]) -> None:
    """ModernBERT's decoder has a layer of its own between its trunk and its output head."""
    assert "does not compute what the model's own forward does" in loaded["modernbert-decoder, packed"]["error"]
