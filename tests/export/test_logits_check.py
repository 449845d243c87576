"""Given a family whose logits the export would compute wrongly, when a run starts, then it is refused before training."""

from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.export import logits
from finetune.export.logits import check_streamed_logits
from tests.models.families import FAMILIES, HYBRIDS, MASKED, OTHERS, OWN_ATTENTION, build

DENSE = [family for family in FAMILIES if family != "mixtral"]


@pytest.mark.parametrize("family", [*DENSE, *OTHERS, *HYBRIDS, *MASKED, *OWN_ATTENTION])
def test_every_family_can_be_verified(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need no run as well."""
    monkeypatch.setattr("finetune.export.logits._is_plain", lambda _: False)
    assert check_streamed_logits(build(family).config)


@pytest.fixture
def without_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a convolution's weights as zeros, as a reader would that no module asked for them."""
    read = logits._Reader.__call__

    def wrong(self: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape) if "conv1d" in name else read(self, name, like)

    monkeypatch.setattr(logits._Reader, "__call__", wrong)


@pytest.mark.usefixtures("without_convolutions")
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5_text"])
def test_a_family_whose_logits_would_be_wrong_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=r"its export could not be verified \(logits"):
        check_streamed_logits(build(family).config)


def test_linear_layers_embeddings_and_norms_need_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise AssertionError("the logits of a plain model were computed")

    monkeypatch.setattr("finetune.export.logits.stream_logits", fail)
    assert not check_streamed_logits(build("llama").config)


def test_a_family_that_allows_no_small_twin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.export.logits.MAX_PARAMETERS", 1000)
    said: list[str] = []
    assert not check_streamed_logits(build("falcon_h1").config, log=said.append)
    assert len(said) == 1
    assert "not checked ahead on a small twin of the model (it would have " in said[0]


def test_random_states_are_kept() -> None:
    config = build("falcon_h1").config
    before = torch.get_rng_state()
    check_streamed_logits(config)
    assert torch.equal(torch.get_rng_state(), before)
